"""Running a model over paged memory as an engine would, but with the worst memory allowed. Knows no architecture.

Blocks are scattered at random, everything not yet written is NaN, and entries of a table beyond a sequence's own
blocks point anywhere: a model that looks where it should not answers NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.models import Model
from octavo.ops import reference
from octavo.ops.interface import CacheLayout, StepInput


def step_of(
    pieces: Sequence[tuple[Sequence[int], int]], tables: np.ndarray, block_size: int, rows: Sequence[int] | None = None
) -> StepInput:
    """The step that computes, for each sequence, the tokens `pieces[s][0]` after `pieces[s][1]` earlier ones."""
    counts = [len(tokens) for tokens, _ in pieces]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in pieces])
    positions = np.concatenate([np.arange(done, done + len(tokens)) for tokens, done in pieces]).astype(np.int32)
    owner = np.repeat(np.arange(len(pieces)), counts)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    return StepInput(
        token_ids=tokens,
        positions=positions,
        slots=slots.astype(np.int32),
        query_starts=starts,
        context_lens=np.array([done + len(tokens) for tokens, done in pieces], np.int32),
        block_tables=tables,
        logit_rows=np.arange(len(tokens), dtype=np.int32) if rows is None else np.array(rows, np.int32),
    )


def scattered_tables(lengths: Sequence[int], block_size: int, seed: int) -> tuple[np.ndarray, int]:
    """Block tables in random order for sequences of these lengths, padded with any ids, and the number of blocks."""
    random = np.random.default_rng(seed)
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + 2
    order = random.permutation(blocks)
    tables = random.integers(0, blocks, (len(lengths), max(needed) + 1)).astype(np.int32)
    for s, count in enumerate(needed):
        tables[s, :count], order = order[:count], order[count:]
    return tables, blocks


def nan_cache(model: Model, blocks: int, block_size: int, ops: Any = reference) -> Any:
    """A cache full of NaN."""
    layout = CacheLayout(model.num_layers, model.num_kv_heads, block_size, model.head_dim)
    cache = ops.new_cache(blocks, layout)
    if ops is reference:
        cache[:] = np.nan
    else:
        cache.blocks[:] = 0xFF  # in every type a NaN
    return cache


def paged_logits(
    model: Model,
    sequences: Sequence[Sequence[int]],
    *,
    chunk: int | None = None,
    block_size: int = 16,
    seed: int = 0,
    ops: Any = reference,
) -> list[np.ndarray]:
    """Logits at every place of each sequence, [length, V], computed `chunk` tokens of each a step (None: at once)."""
    tables, blocks = scattered_tables([len(tokens) for tokens in sequences], block_size, seed)
    cache = nan_cache(model, blocks, block_size, ops)
    done = 0
    parts: list[list[np.ndarray]] = [[] for _ in sequences]
    size = chunk or max(map(len, sequences))
    while done < max(map(len, sequences)):
        running = [s for s, tokens in enumerate(sequences) if len(tokens) > done]
        step = step_of([(sequences[s][done : done + size], done) for s in running], tables[running], block_size)
        logits = ops.to_numpy(model.logits(model.forward(step, cache)))
        for place, s in enumerate(running):
            parts[s].append(logits[step.query_starts[place] : step.query_starts[place + 1]])
        done += size
    return [np.concatenate(part) for part in parts]

"""A model whose next token depends on every token it reads back from paged memory, and a naive twin without memory.

One wrong block, one missing copy, one stale slot changes the hash of a context, and with it all that follows: so the
engine's memory machinery is proven by comparing tokens, thousands of steps a second.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np

from octavo.engine.beam import BeamSearch
from octavo.engine.request import Request
from octavo.ops import reference
from octavo.params import BeamParams, SamplingParams

VOCAB = 24
EOS = 3
POISON = -7


def logits_of(context: np.ndarray) -> np.ndarray:
    """Float32 logits [VOCAB], a function of the whole context."""
    state = zlib.crc32(np.ascontiguousarray(context, np.int32).tobytes())
    mixed = (np.arange(1, VOCAB + 1, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(state)) * np.uint64(
        6364136223846793005
    )
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(2862933555777941757)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**24 * 6).astype(np.float32)


class ToyOps:
    """The few operations the engine itself calls; a cache holds one token id a slot."""

    kv_type = "f32"

    def new_cache(self, num_blocks: int, layout: Any, *, prefault: bool) -> np.ndarray:
        return np.full((num_blocks, layout.block_size), POISON, np.int64)

    def block_bytes(self, layout: Any) -> int:
        return 8 * layout.block_size

    def copy_blocks(self, source: np.ndarray, target: np.ndarray, pairs: np.ndarray) -> None:
        target[pairs[:, 1]] = source[pairs[:, 0]]

    def take_rows(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return x[rows]

    def to_numpy(self, x: np.ndarray) -> np.ndarray:
        return x

    draw = staticmethod(reference.draw)
    logprobs = staticmethod(reference.logprobs)


class ToyModel:
    """Writes each token to its slot, reads each context back through its block table."""

    num_layers, num_kv_heads, head_dim, vocab_size = 1, 1, 1, VOCAB

    def __init__(self, max_positions: int = 512) -> None:
        self.max_positions = max_positions
        self.steps: list[SimpleNamespace] = []
        self.fail_on_token: int | None = None
        self.nan_on_token: int | None = None

    def forward(self, step: Any, cache: np.ndarray) -> np.ndarray:
        if self.fail_on_token is not None and self.fail_on_token in step.token_ids:
            raise FloatingPointError("a kernel broke")
        cache.reshape(-1)[step.slots] = step.token_ids
        contexts: list[np.ndarray] = []
        for s, length in enumerate(step.context_lens):
            block_size = cache.shape[1]
            blocks = step.block_tables[s, : -(-int(length) // block_size)]
            context = cache[blocks].reshape(-1)[:length]
            assert POISON not in context, "a slot was read that nobody wrote"
            begin, end = step.query_starts[s], step.query_starts[s + 1]
            assert step.positions[end - 1] == length - 1
            contexts += [context[: length - (end - begin) + i + 1] for i in range(end - begin)]
        rows = [logits_of(contexts[row]) for row in step.logit_rows]
        for place, row in enumerate(step.logit_rows):
            if self.nan_on_token is not None and contexts[row][-1] == self.nan_on_token:
                rows[place] = np.full(VOCAB, np.nan, np.float32)
        self.steps.append(SimpleNamespace(tokens=len(step.token_ids), sequences=len(step.context_lens)))
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return hidden


def naive_answers(request: Request, max_model_len: int, draw: Any) -> list[list[int]]:
    """The answers of a request by the same model without any memory: the whole context is hashed for every token.

    `draw(logits, params, seed, index, position, history) -> token` draws one token for one sequence.
    """
    params, prompt = request.params, request.prompt_token_ids
    room = max_model_len - len(prompt)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    if isinstance(params, BeamParams):
        return _naive_beams(request, most)
    answers = []
    for index in range(params.num_samples):
        answer: list[int] = []
        while len(answer) < most:
            context = np.array(prompt + answer)
            token = draw(logits_of(context), params, request.seed, index, len(context), (prompt, answer))
            answer.append(token)
            ended = token == EOS and not params.ignore_eos
            if len(answer) >= params.min_tokens and (ended or token in params.stop_token_ids):
                break
        answers.append(answer)
    return answers


def _naive_beams(request: Request, most: int) -> list[list[int]]:
    params = request.params
    assert isinstance(params, BeamParams)
    search = BeamSearch(params, frozenset({EOS}), most)
    beams: list[list[int]] = [[]]
    while not search.done:
        rows = np.array([logits_of(np.array(request.prompt_token_ids + beam)) for beam in beams], np.float64)
        logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        step = search.step(logprobs.astype(np.float32))
        beams = [[*beams[p], t] for p, t in zip(step.parents, step.tokens, strict=True)]
    return [list(h.token_ids) for h in search.best(params.n or params.width)]


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)

"""Attention as its definition has it, in float64 over contiguous keys: what paged attention must equal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.ops.interface import StepInput


@dataclass
class Scene:
    """Sequences whose last tokens a step computes, all keys and values in order, and the paged cache they lie in."""

    step: StepInput
    q: np.ndarray  # [T, H, D]
    keys: list[np.ndarray]  # [context, G, D] of each sequence, not rotated again
    values: list[np.ndarray]
    cache: np.ndarray
    layer: int

    def new(self, which: list[np.ndarray]) -> np.ndarray:
        """The rows of keys or values that the step writes: [T, G, D]."""
        counts = np.diff(self.step.query_starts)
        return np.concatenate([rows[len(rows) - count :] for rows, count in zip(which, counts, strict=True)])


def make_scene(
    *,
    lengths: list[tuple[int, int]],  # context and new tokens of each sequence
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    seed: int,
    size: float = 1.0,
) -> Scene:
    """A cache of NaN but for the contexts before the step, in blocks scattered at random, in the middle of 3 layers."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * size).astype(np.float32)

    needed = [-(-context // block_size) for context, _ in lengths]
    blocks = sum(needed) + 1
    order, layer = random.permutation(blocks), 1
    tables = random.integers(0, blocks, (len(lengths), max(needed))).astype(np.int32)
    cache = np.full((blocks, 3, 2, kv_heads, block_size, head_dim), np.nan, np.float32)
    keys, values, slots, positions = [], [], [], []
    for s, (context, new) in enumerate(lengths):
        tables[s, : needed[s]], order = order[: needed[s]], order[needed[s] :]
        keys.append(normal(context, kv_heads, head_dim))
        values.append(normal(context, kv_heads, head_dim))
        for place in range(context):
            block, offset = tables[s, place // block_size], place % block_size
            if place < context - new:
                cache[block, layer, :, :, offset] = keys[s][place], values[s][place]
            else:
                slots.append(block * block_size + offset)
                positions.append(place)
    counts = [new for _, new in lengths]
    total = sum(counts)
    step = StepInput(
        token_ids=np.zeros(total, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_lens=np.array([context for context, _ in lengths], np.int32),
        block_tables=tables,
        logit_rows=np.arange(total, dtype=np.int32),
    )
    return Scene(step, normal(total, heads, head_dim), keys, values, cache, layer)


def naive_attention(scene: Scene, scale: float, window: int | None = None, softcap: float | None = None) -> np.ndarray:
    """Softmax over the whole context of each query, one query and one head at a time, in float64: [T, H, D]."""
    out = np.empty(scene.q.shape)
    heads = scene.q.shape[1]
    for s, (keys, values) in enumerate(zip(scene.keys, scene.values, strict=True)):
        for row in range(scene.step.query_starts[s], scene.step.query_starts[s + 1]):
            position = scene.step.positions[row]
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(heads):
                group = head // (heads // keys.shape[1])
                seen = keys[first : position + 1, group].astype(np.float64)
                scores = seen @ scene.q[row, head].astype(np.float64) * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights / weights.sum() @ values[first : position + 1, group].astype(np.float64)
    return out

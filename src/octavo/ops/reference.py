"""Every operation in plain NumPy, float32: the oracle of the faster backends. Knows arrays; no model, no scheduling.

Attention walks a sequence's blocks tile by tile and merges the tiles with the online softmax of Milakov & Gimelshein
(2018, arXiv:1805.02867) as FlashAttention does (Dao et al. 2022, arXiv:2205.14135), so its memory does not grow with
the context. Which blocks that are, `reference_plan` works out once a step for all layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.loading.tensor import StoredTensor
from octavo.ops.interface import Activation, AttentionSpec, CacheLayout, Int32, StepInput
from octavo.ops.reference_plan import Float32, Group, Plan, RopeTable, Tile
from octavo.ops.reference_sampling import draw as draw  # named again: they are operations as those below
from octavo.ops.reference_sampling import logprobs as logprobs

if TYPE_CHECKING:
    from octavo.models.interface import Model

kv_type = "f32"  # what keys and values are kept as
LOWEST = np.float32(-1e30)  # below any score, yet finite: a tile wholly hidden has exp(-inf - LOWEST) = 0, not NaN
RUN = 64  # products of a sum that are added by BLAS in one go


def compile(model: Model, /) -> Model:
    """The model itself: every operation is computed as it is called."""
    return model


# --- weights ---------------------------------------------------------------------------------------------------------


def linear_weight(parts: Sequence[StoredTensor], /) -> Float32:
    """The parts stacked, as float32 [columns, rows]: for a few tokens BLAS is twice as fast with rows last."""
    weight = np.empty((parts[0].shape[1], sum(part.shape[0] for part in parts)), np.float32)
    end = 0
    for part in parts:
        for start in range(0, part.shape[0], 256):  # so many rows are still in the cache when they are turned
            rows = part.decode(part.raw[start : start + 256])
            weight[:, end : end + len(rows)] = rows.T
            end += len(rows)
    return weight


def vector(parts: Sequence[StoredTensor], /, *, offset: float = 0.0) -> Float32:
    """The parts joined end to end, `offset` added."""
    joined: Float32 = np.concatenate([part.float32() for part in parts]) + np.float32(offset)
    return joined


def rope_table(inv_freq: NDArray[np.float64], max_positions: int, /, *, factor: float = 1.0) -> RopeTable:
    """Frequencies rounded to float32: models are trained with float32 angles, whose error grows with the position."""
    return RopeTable(inv_freq.astype(np.float32), max_positions, factor)


# --- tokens to hidden states, and back -------------------------------------------------------------------------------


def embed(weight: Float32, ids: Int32, /) -> Float32:
    """Rows `ids` of a weight: [T, E]."""
    rows: Float32 = weight.T[ids]
    return rows


def linear(x: Float32, weight: Float32, bias: Float32 | None = None, /) -> Float32:
    """x [T, in] times the weight's transpose, plus bias: [T, out].

    Summed in short runs, then over the runs: BLAS adds hundreds of products in a row, and where a hidden state has a
    few huge elements, as language models' do, each addition rounds at their size. This halves the error of the logits.
    """
    y: Float32 = x[:, :RUN] @ weight[:RUN]
    run = np.empty_like(y)
    for start in range(RUN, len(weight), RUN):
        np.matmul(x[:, start : start + RUN], weight[start : start + RUN], out=run)
        y += run
    if bias is not None:
        y += bias
    return y


def take_rows(x: Float32, rows: Int32, /) -> Float32:
    """x[rows]."""
    return x[rows]


def to_numpy(x: Float32, /) -> Float32:
    """The array itself, contiguous."""
    return np.ascontiguousarray(x, np.float32)


# --- between the matrix products -------------------------------------------------------------------------------------


def rms_norm(x: Float32, weight: Float32, eps: float, /) -> Float32:
    """x / sqrt(mean(x^2) + eps) * weight over groups of len(weight) columns (Zhang & Sennrich 2019), in float64."""
    groups = x.reshape(-1, len(weight)).astype(np.float64)
    mean_square = np.square(groups).mean(axis=-1, keepdims=True)
    y: Float32 = (groups / np.sqrt(mean_square + eps) * weight).astype(np.float32)
    return y.reshape(x.shape)


def layer_norm(x: Float32, weight: Float32, bias: Float32, eps: float, /) -> Float32:
    """(x - mean) / sqrt(var + eps) * weight + bias over a row (Ba et al. 2016), in float64."""
    centred = x - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    y: Float32 = (centred / np.sqrt(variance + eps) * weight + bias).astype(np.float32)
    return y


def add(x: Float32, y: Float32, /) -> Float32:
    """x + y."""
    return x + y


def scale(x: Float32, factor: float, /) -> Float32:
    """x * factor."""
    y: Float32 = x * np.float32(factor)
    return y


def softcap(x: Float32, cap: float, /) -> Float32:
    """cap * tanh(x / cap)."""
    y: Float32 = np.tanh(x / np.float32(cap)) * np.float32(cap)
    return y


def activate(x: Float32, kind: Activation, /) -> Float32:
    """The activation, element by element."""
    return _ACTIVATIONS[kind](x)


def gated(gate_up: Float32, kind: Activation, /) -> Float32:
    """activate(gate) * up for a fused [T, 2F] of gate then up: [T, F]."""
    width = gate_up.shape[-1] // 2
    return activate(gate_up[..., :width], kind) * gate_up[..., width:]


def split(x: Float32, sizes: Sequence[int], /) -> list[Float32]:
    """Columns of x in runs of the given sizes."""
    ends = itertools.accumulate(sizes)
    return [x[..., end - size : end] for size, end in zip(sizes, ends, strict=True)]


def silu(x: Float32) -> Float32:
    """x * sigmoid(x); the exponent is bounded so that exp cannot overflow, where the result is zero anyway."""
    y: Float32 = x / (1 + np.exp(np.minimum(-x, np.float32(88))))
    return y


def gelu(x: Float32) -> Float32:
    """x times the normal distribution's integral up to x (Hendrycks & Gimpel 2016)."""
    y: Float32 = np.float32(0.5) * x * (1 + erf(x * np.float32(math.sqrt(0.5))))
    return y


def gelu_tanh(x: Float32) -> Float32:
    """The same paper's approximation of it by tanh."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    y: Float32 = np.float32(0.5) * x * (1 + np.tanh(inner))
    return y


def relu(x: Float32) -> Float32:
    """max(x, 0)."""
    y: Float32 = np.maximum(x, np.float32(0))
    return y


_ACTIVATIONS: dict[Activation, Callable[[Float32], Float32]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
}

_ERF_STEPS = 64  # grid points a unit
_ERF_GRID = np.arange(4 * _ERF_STEPS + 1) / _ERF_STEPS
_ERF = np.array([math.erf(x) for x in _ERF_GRID])
_ERF_SLOPE = 2 / math.sqrt(math.pi) * np.exp(-(_ERF_GRID**2))


def erf(x: Float32) -> Float32:
    """The error function, to float32's last digit: Taylor steps of third order from a grid of exact values."""
    distance = np.fmin(np.abs(x), np.float32(4)).astype(np.float64)  # erf(4) is 1 in float32; so NaN has an index
    nearest = np.rint(distance * _ERF_STEPS).astype(np.intp)
    at, step = _ERF_GRID[nearest], distance - _ERF_GRID[nearest]
    value = _ERF[nearest] + _ERF_SLOPE[nearest] * step * (1 - step * at + step * step * (2 * at * at - 1) / 3)
    y: Float32 = np.copysign(value, x).astype(np.float32)
    return y


# --- paged attention -------------------------------------------------------------------------------------------------


def plan(step: StepInput, /) -> Plan:
    """A plan that fills as the layers ask."""
    return Plan(step)


def attention(
    q: Float32, k: Float32, v: Float32, cache: Float32, layer: int, plan: Plan, spec: AttentionSpec, /
) -> Float32:
    """Rotate q and k, write k and v to the step's slots of `cache`, attend causally over each sequence's blocks."""
    tokens = len(q)
    queries = q.reshape(tokens, spec.num_heads, spec.head_dim)
    keys = k.reshape(tokens, spec.num_kv_heads, spec.head_dim)
    values = v.reshape(tokens, spec.num_kv_heads, spec.head_dim)
    if spec.rope is not None:
        cos, sin = plan.rotation(spec.rope)
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
    write_kv(keys, values, cache, layer, plan.step.slots)
    return paged_attention(queries, cache, layer, plan, spec).reshape(tokens, -1)


def rotate(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Turn dimension i of each head with dimension i + n/2 of the n rotated ones (RoFormer, Su et al. 2021).

    x [T, heads, D]; cos, sin [T, 1, n / 2]; dimensions from n on pass unchanged.
    """
    half = cos.shape[-1]
    y = np.empty(x.shape, np.float32)
    left, right = x[..., :half], x[..., half : 2 * half]
    y[..., :half] = left * cos - right * sin
    y[..., half : 2 * half] = right * cos + left * sin
    y[..., 2 * half :] = x[..., 2 * half :]
    return y


def write_kv(keys: Float32, values: Float32, cache: Float32, layer: int, slots: Int32) -> None:
    """Put keys and values [T, G, D] of one layer at `slots` (block * block_size + offset).

    Tokens that a row does not see get weight 0, and 0 times infinity or NaN is NaN: a value that is not finite becomes
    zeros, and its key NaN, so that whoever sees the token has NaN and nobody else.
    """
    finite = np.isfinite(values).all(axis=-1, keepdims=True)
    if not finite.all():
        keys, values = np.where(finite, keys, np.float32(np.nan)), np.where(finite, values, np.float32(0))
    blocks, offsets = np.divmod(slots, cache.shape[4])
    cache[blocks, layer, 0, :, offsets] = keys
    cache[blocks, layer, 1, :, offsets] = values


def paged_attention(q: Float32, cache: Float32, layer: int, plan: Plan, spec: AttentionSpec) -> Float32:
    """Attention of each query to the tokens up to its own in the blocks of its sequence: [T, H, D] to [T, H, D]."""
    out = np.empty(q.shape, np.float32)
    heads = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    for group in plan.groups(spec.window, cache.shape):
        seqs, num = group.rows.shape
        grouped = (q[group.rows] * np.float32(spec.scale)).reshape(seqs, num, *heads, spec.head_dim)
        rows = grouped.transpose(0, 2, 3, 1, 4).reshape(seqs, heads[0], heads[1] * num, spec.head_dim)
        attended = _walk(rows, cache, layer, group, spec.softcap).reshape(seqs, *heads, num, spec.head_dim)
        out[group.rows] = attended.transpose(0, 3, 1, 2, 4).reshape(seqs, num, spec.num_heads, spec.head_dim)
    return out


Partial = tuple[Float32, Float32, Float32]  # of each row: highest score m [..., 1]; sum of exp(score - m); output * sum


def _walk(q: Float32, cache: Float32, layer: int, group: Group, cap: float | None) -> Float32:
    """Online softmax over the group's tiles: q [S, G, rows, D], scaled already, to outputs of the same shape."""
    first, *rest = group.tiles
    highest, total, out = _look(q, cache, layer, first, cap)
    for tile in rest:
        here = slice(len(tile.blocks))  # sequences that reach so far: the first ones, being sorted by length
        merge((highest[here], total[here], out[here]), _look(q[here], cache, layer, tile, cap))
    out /= total
    return out


def _look(q: Float32, cache: Float32, layer: int, tile: Tile, cap: float | None) -> Partial:
    """Attention to one tile alone."""
    keys, values = _gather(cache, layer, tile)
    scores = q @ keys.swapaxes(-1, -2)
    if cap is not None:
        scores = softcap(scores, cap)
    if tile.hidden is not None:
        by_query = scores.reshape(*scores.shape[:2], -1, *tile.hidden.shape[1:])
        np.copyto(by_query, -np.inf, where=tile.hidden[:, None, None])
        scores = by_query.reshape(scores.shape)
    highest = np.maximum(scores.max(axis=-1, keepdims=True), LOWEST)
    scores -= highest
    weights = np.exp(scores, out=scores)
    return highest, weights.sum(axis=-1, keepdims=True), weights @ values


def merge(kept: Partial, new: Partial) -> None:
    """Make `kept` the attention to the keys of both."""
    highest = np.maximum(kept[0], new[0])
    fade, weight = np.exp(kept[0] - highest), np.exp(new[0] - highest)
    kept[0][:] = highest
    for mine, theirs in zip(kept[1:], new[1:], strict=True):
        mine *= fade
        mine += theirs * weight


def _gather(cache: Float32, layer: int, tile: Tile) -> tuple[Float32, Float32]:
    """Keys and values of a tile, each [S, G, keys, D]; zero where stale, as NaN may lie there and 0 * NaN is NaN."""
    heads, dim = cache.shape[3], cache.shape[5]
    both, each = np.arange(2)[:, None, None, None], np.arange(heads)[:, None]
    blocks = cache[tile.blocks[:, None, :], layer, both, each]  # [2, S, G, blocks, size, D]
    seq, block, offset = tile.stale
    if len(seq):
        blocks[:, seq, :, block, offset] = 0
    keys, values = blocks.reshape(2, len(tile.blocks), heads, -1, dim)
    return keys, values


def new_cache(num_blocks: int, layout: CacheLayout, /, *, prefault: bool = False) -> Float32:
    """[num_blocks, layers, 2, G, block_size, D]: zeros, so that the system gives pages only as they are written; with
    `prefault` they are, all.
    """
    cache = np.zeros((num_blocks, *_block_shape(layout)), np.float32)
    if prefault:
        cache.fill(0)
    return cache


def block_bytes(layout: CacheLayout, /) -> int:
    """Bytes of one block, all layers, keys and values."""
    return 4 * math.prod(_block_shape(layout))


def _block_shape(layout: CacheLayout) -> tuple[int, ...]:
    return layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim


def copy_blocks(source: Float32, target: Float32, pairs: Int32, /) -> None:
    """target[b] = source[a] for each row (a, b) of `pairs`, all reads before all writes."""
    target[pairs[:, 1]] = source[pairs[:, 0]]

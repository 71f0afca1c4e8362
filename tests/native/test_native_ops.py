"""Every operation of the seam on our kernels against the NumPy reference, at shapes that fill no vector."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.loading.storage import BY_NAME
from octavo.loading.tensor import StoredTensor
from octavo.ops import reference
from octavo.ops.interface import Activation, AttentionSpec, CacheLayout, StepInput
from octavo.ops.native import NativeOps
from tests.models.paged import scattered_tables, step_of

TOKENS = (1, 15, 17, 127)
OPS = NativeOps("f32", 2)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(values: np.ndarray, kind: str = "F32") -> StoredTensor:
    """A tensor of these values as a file would give it in this storage type."""
    storage = BY_NAME[kind]
    raw: Any
    if kind == "F32":
        raw = values
    elif kind == "F16":
        raw = values.astype(np.float16)
    elif kind == "BF16":
        raw = ((values.view(np.uint32) + 0x7FFF) >> 16).astype(np.uint16)
    else:
        raw = quants.quantize(values, GGMLQuantizationType[kind])
    return StoredTensor(kind, values.shape, kind, raw, storage.decode)


def weights(*parts: StoredTensor) -> tuple[Any, Any]:
    """Ours and the reference's."""
    return OPS.linear_weight(parts), reference.linear_weight(parts)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(TOKENS),
    st.integers(1, 70),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["F32", "F16"])), min_size=1, max_size=3),
    st.booleans(),
)
def test_products_with_float_weights(tokens: int, columns: int, parts: list[tuple[int, str]], biased: bool) -> None:
    tensors = [stored(normal(n, columns, seed=n), kind) for n, kind in parts]
    x, bias = normal(tokens, columns, seed=9), normal(sum(n for n, _ in parts), seed=8) if biased else None
    ours, theirs = weights(*tensors)
    np.testing.assert_allclose(OPS.linear(x, ours, bias), reference.linear(x, theirs, bias), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_products_with_activations_rounded_to_the_weights_kind(kind: str, tokens: int) -> None:
    """Rounding x to 8 bits moves each element by up to 1/254 of its group's largest: at random, in 96 columns."""
    ours, theirs = weights(stored(normal(50, 96), kind), stored(normal(17, 96, seed=1), kind))
    x = normal(tokens, 96, seed=2)
    want = reference.linear(x, theirs)
    error = np.abs(OPS.linear(x, ours) - want)
    assert error.max() < 0.35
    assert error.mean() < 0.06
    assert np.corrcoef(OPS.linear(x, ours).ravel(), want.ravel())[0, 1] > 0.9995


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_an_embedding_takes_rows_of_the_weight_that_products_use(kind: str) -> None:
    tensors = [stored(normal(21, 64), kind), stored(normal(5, 64, seed=1), kind)]
    ours, theirs = weights(*tensors)
    ids = np.array([3, 0, 25, 20, 21, 3], np.int32)
    np.testing.assert_allclose(OPS.embed(ours, ids), reference.embed(theirs, ids), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("columns", [1, 31, 33, 80])
def test_norms(tokens: int, columns: int) -> None:
    x, weight, bias = normal(tokens, columns) * 7 + 2, normal(columns, seed=1), normal(columns, seed=2)
    np.testing.assert_allclose(OPS.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=2e-5)
    np.testing.assert_allclose(
        OPS.layer_norm(x, weight, bias, 1e-2), reference.layer_norm(x, weight, bias, 1e-2), atol=2e-5
    )
    heads = np.concatenate([x, x[:, ::-1] * 3, -x], axis=1)
    np.testing.assert_allclose(OPS.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5), atol=2e-5)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("columns", [1, 31, 33, 80])
def test_elementwise_operations(tokens: int, columns: int) -> None:
    x, y = normal(tokens, columns) * 4, normal(tokens, columns, seed=1)
    both = np.concatenate([x, y], axis=1)
    np.testing.assert_array_equal(OPS.add(x, y), x + y)
    np.testing.assert_array_equal(OPS.scale(x, 1.7), reference.scale(x, 1.7))
    np.testing.assert_allclose(OPS.softcap(x, 3.0), reference.softcap(x, 3.0), atol=2e-6)
    for kind in get_args(Activation):
        np.testing.assert_allclose(OPS.activate(x, kind), reference.activate(x, kind), atol=3e-6)
        np.testing.assert_allclose(OPS.gated(both, kind), reference.gated(both, kind), atol=1e-5)


def test_columns_are_split_and_rows_taken() -> None:
    x = normal(6, 10)
    for mine, their in zip(OPS.split(x, (3, 5, 2)), reference.split(x, (3, 5, 2)), strict=True):
        np.testing.assert_array_equal(OPS.to_numpy(OPS.scale(mine, 2.0)), their * 2)
    np.testing.assert_array_equal(OPS.take_rows(x, np.array([4, 1, 4], np.int32)), x[[4, 1, 4]])
    assert OPS.take_rows(x, np.array([], np.int32)).shape == (0, 10)


def test_a_vector_is_joined_and_moved() -> None:
    parts = [stored(normal(3)), stored(normal(4, seed=1))]
    np.testing.assert_array_equal(OPS.vector(parts, offset=1.0), reference.vector(parts, offset=1.0))


def mixed(x: np.ndarray) -> np.ndarray:
    """The Walsh-Hadamard transform of runs of dimensions, normalised, and so its own inverse: [..., D] to [..., D]."""
    size = x.shape[-1] & -x.shape[-1]
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)], np.float32)
    return (x.reshape(*x.shape[:-1], -1, size) @ (signs / np.float32(size**0.5))).reshape(x.shape)


def byte_tolerance(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How far attention in bytes may be off, [T, H]: q [T, H, D], keys and values [N, G, D], rotated and mixed.

    A row is rounded to steps of a 127th of its largest, so each element is off by a uniform error of +- half a step,
    whose deviation is step / sqrt(12). A score, q * k, is off by q * (k's errors) + k * (q's), a sum of independent
    ones: its deviation follows from the rows' norms, and beyond six of it (sub-Gaussian: 2 exp(-18) each) is none here;
    a softcap shrinks it. Scores off by at most e move tanh(e / 2) of the weight from some tokens to others, at worst
    from the lowest value to the highest. Values are off by half a step themselves; their weights, each by half of a
    255th of the largest among 64 tokens, and these largest together are at most the sum of all.
    """

    def step(x: np.ndarray) -> np.ndarray:
        return np.abs(x).max(-1) / 127

    def of_group(x: np.ndarray) -> np.ndarray:
        return np.repeat(x, q.shape[1] // keys.shape[1])

    norm_q, norm_k = (np.linalg.norm(x, axis=-1) for x in (q, keys))
    from_keys, from_queries = norm_q * of_group(step(keys).max(0)), of_group(norm_k.max(0)) * step(q)
    deviation = q.shape[2] ** -0.5 * np.hypot(from_keys, from_queries) / 12**0.5
    spread = of_group((values.max(0) - values.min(0)).max(-1))
    largest = of_group(np.abs(values).max((0, 2)))
    return np.asarray(
        np.tanh(6 * deviation / 2) * spread + largest * (0.5 / 127 + min(len(values), 64) * 0.5 / 255) + 3e-4
    )


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("spec", [(6, 2, 10, 4, None, 0.0), (3, 3, 17, 0, 5, 0.0), (9, 1, 64, 64, None, 2.0)])
def test_attention_step_by_step(kv_type: Any, spec: tuple[int, int, int, int, int | None, float]) -> None:
    """Prefill, a chunk, decode: outputs, and with f32 the very caches' worth of answers."""
    heads, kv_heads, dim, rotated, window, cap = spec
    ops = NativeOps(kv_type, 3)
    layout = CacheLayout(2, kv_heads, 4, dim)
    inv_freq = 50.0 ** -(np.arange(0, rotated, 2) / max(rotated, 1))
    rope = {o: o.rope_table(inv_freq, 64, factor=1.2) if rotated else None for o in (ops, reference)}
    tables, blocks = scattered_tables([21, 9, 1], 4, 3)
    caches = {o: o.new_cache(blocks, layout) for o in (ops, reference)}
    tolerance = {"f32": 2e-5}.get(kv_type, 0.06)
    keys, values = (np.empty((0, kv_heads, dim), np.float32) for _ in range(2))
    for number, pieces in enumerate([[([0] * 20, 0), ([0] * 5, 0)], [([0], 20), ([0] * 4, 5), ([0], 0)]]):
        step = step_of(pieces, tables[: len(pieces)], 4)
        q, k, v = (
            normal(len(step.slots), n * dim, seed=10 * number + i) for i, n in enumerate((heads, kv_heads, kv_heads))
        )
        specs = {
            o: AttentionSpec(heads, kv_heads, dim, dim**-0.5, window=window, softcap=cap or None, rope=rope[o])
            for o in (ops, reference)
        }
        got, want = (o.attention(q, k, v, caches[o], 1, o.plan(step), specs[o]) for o in (ops, reference))
        q, k, v = (x.reshape(len(x), -1, dim) for x in (q, k, v))
        if rotated:
            by = reference.plan(step).rotation(rope[reference])
            q, k = reference.rotate(q, *by), reference.rotate(k, *by)
        keys, values = np.concatenate([keys, mixed(k)]), np.concatenate([values, v])
        if kv_type == "int8":
            limit = byte_tolerance(mixed(q), keys, values)
            assert (np.abs(got - want).reshape(-1, heads, dim) <= limit[:, :, None]).all()
        else:
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def attend(ops: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None) -> np.ndarray:
    """Attention of one step to itself: a sequence of all rows but three, and another of those; [T, H, D] of each."""
    tokens, heads, dim = q.shape
    tables, blocks = scattered_tables([tokens - 3, 3], 16, 3)
    step = step_of([([0] * (tokens - 3), 0), ([0] * 3, 0)], tables, 16)
    cache = ops.new_cache(blocks, CacheLayout(1, k.shape[1], 16, dim))
    spec = AttentionSpec(heads, k.shape[1], dim, dim**-0.5, window=window)
    rows = (x.reshape(tokens, -1) for x in (q, k, v))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.array(ops.attention(*rows, cache, 0, ops.plan(step), spec)).reshape(tokens, heads, dim)


@pytest.mark.parametrize("kv_type", ["reference", "f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("size", [(4, 2, 64), (1, 1, 33)])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3.4e38, 7e4])
@pytest.mark.parametrize("where", ["key", "value"])
def test_a_number_that_is_none_reaches_only_who_sees_it(
    kv_type: str, window: int | None, size: tuple[int, int, int], number: float, where: str
) -> None:
    """What others computed must not depend on it: their keys and values may be shared, and outlive its request."""
    ops = reference if kv_type == "reference" else NativeOps(kv_type, 2)  # type: ignore[arg-type]
    heads, kv_heads, dim = size
    q, k, v = (normal(60, n * dim, seed=n + i).reshape(60, n, dim) for i, n in enumerate((heads, kv_heads, kv_heads)))
    clean = attend(ops, q, k, v, window)
    (k if where == "key" else v)[37, 0, 5] = number
    found = attend(ops, q, k, v, window)
    sees = [37 <= token < (57 if window is None else 37 + window) for token in range(60)]
    np.testing.assert_array_equal(found[~np.array(sees)], clean[~np.array(sees)])
    group = heads // kv_heads
    np.testing.assert_array_equal(found[:, group:], clean[:, group:])
    if where == "value" and not np.isfinite(number):
        assert np.isnan(found[sees][:, :group]).any((1, 2)).all()


@pytest.mark.parametrize("sink", [0.0, 1e-30, 1e-6, 1.0])
def test_a_value_of_zeros_leaves_the_others_their_digits(sink: float) -> None:
    """An attention sink: a first token that nearly all look at, with a value of next to nothing."""
    q, k, v = (normal(60, 64, seed=i).reshape(60, 1, 64) for i in range(3))
    k[0], v[0], v[1:] = 0, sink, 0.02 * v[1:]
    q[..., 0] = k[0, 0, 0] = 8.0
    k[1:, 0, 0] = 0
    found, want = (attend(ops, q, k, v)[20:57] for ops in (NativeOps("int8", 1), reference))
    np.testing.assert_allclose(found, want, rtol=0, atol=0.05 * np.abs(want).max() + 2e-5 * sink)


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("size", [1e6, 1e9, 1e12])
def test_scores_far_beyond_any_choose_the_highest(kv_type: Any, size: float) -> None:
    q, k, v = (normal(60, 64, seed=i).reshape(60, 1, 64) for i in range(3))
    found, want = attend(NativeOps(kv_type, 1), q * np.float32(size), k, v), attend(reference, q, k, v)
    assert np.isfinite(found).all()
    assert np.isfinite(want).all()
    np.testing.assert_allclose(found[0], v[0], rtol=0, atol=0.02)  # it sees itself alone
    for row in found[:57]:
        assert np.abs(row - v[:, :, :]).max(-1).min() < 0.05  # one token's value


GROWTH = """
import os, sys
from octavo.ops import reference
from octavo.ops.interface import CacheLayout
from octavo.ops.native import NativeOps

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

ops = reference if sys.argv[1] == "reference" else NativeOps("int8", 1)
layout = CacheLayout(30, 3, 16, 64)
blocks, before = (64 << 20) // ops.block_bytes(layout), resident()
lazy = ops.new_cache(blocks, layout)
little = resident() - before
ready = ops.new_cache(blocks, layout, prefault=True)
print(little, resident() - before, *(getattr(cache, "blocks", cache).any() for cache in (lazy, ready)))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells what is resident as Linux does")
@pytest.mark.parametrize("ops", ["native", "reference"])
def test_memory_is_taken_as_it_is_written_or_at_once(ops: str) -> None:
    """In a process of its own: elsewhere the system's allocator may have memory left that is resident already."""
    child = subprocess.run([sys.executable, "-c", GROWTH, ops], capture_output=True, text=True, check=True)
    little, much, *rest = child.stdout.split()
    assert int(little) < 16 << 20
    assert int(much) > 56 << 20
    assert rest == ["False", "False"]


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "int8"])
def test_blocks_are_as_large_as_said_and_copied_whole(kv_type: Any) -> None:
    ops, layout = NativeOps(kv_type, 2), CacheLayout(3, 2, 4, 5)
    source, target = ops.new_cache(4, layout), ops.new_cache(3, layout)
    row = {"f32": 4 * 5, "int8": 5 + 4}.get(kv_type, 2 * 5)  # a byte each, and their scale
    assert ops.block_bytes(layout) == 3 * 2 * 2 * 4 * row
    assert source.blocks.shape == (4, ops.block_bytes(layout))
    assert not source.blocks.any()
    source.blocks[:] = np.arange(1, 5)[:, None]
    ops.copy_blocks(source, target, np.array([[3, 0], [1, 2]], np.int32))
    assert target.blocks[:, [0, -1]].tolist() == [[4, 4], [0, 0], [2, 2]]
    ops.copy_blocks(source, source, np.array([[0, 1], [1, 2], [2, 0]], np.int32))
    assert source.blocks[:, 7].tolist() == [3, 1, 2, 4]
    for bad in ([[4, 0]], [[0, 3]], [[-1, 0]]):
        with pytest.raises(ValueError, match="no block"):
            ops.copy_blocks(source, target, np.array(bad, np.int32))


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(MemoryError):
        OPS.new_cache(2**40, CacheLayout(30, 8, 16, 128))


def test_what_does_not_fit_together_is_named() -> None:
    weight = OPS.linear_weight([stored(normal(7, 5))])
    with pytest.raises(ValueError, match="6 columns, but its weight has 5"):
        OPS.linear(normal(2, 6), weight)
    with pytest.raises(ValueError, match="8 elements, but its weight 7 rows"):
        OPS.linear(normal(2, 5), weight, normal(8))
    with pytest.raises(ValueError, match="divide"):
        OPS.rms_norm(normal(2, 7), normal(4), 1e-5)
    with pytest.raises(ValueError, match="token_ids has 7"):
        OPS.embed(weight, np.array([0, 7], np.int32))
    with pytest.raises(ValueError, match="3 rows where 2 belong"):
        OPS.add(normal(2, 5), normal(3, 5))


def test_no_rows_are_no_work() -> None:
    weight = OPS.linear_weight([stored(normal(7, 5))])
    assert OPS.linear(normal(0, 5), weight).shape == (0, 7)
    empty = np.zeros(0, np.int32)
    step = StepInput(empty, empty, empty, np.zeros(1, np.int32), empty, np.zeros((0, 0), np.int32), empty)
    cache, spec = OPS.new_cache(1, CacheLayout(1, 1, 4, 5)), AttentionSpec(1, 1, 5, 1.0)
    assert OPS.attention(normal(0, 5), normal(0, 5), normal(0, 5), cache, 0, OPS.plan(step), spec).shape == (0, 5)

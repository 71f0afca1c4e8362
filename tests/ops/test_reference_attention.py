"""Paged attention in its pieces - rotation, writing, walking blocks - each against brute force in float64."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops import reference, reference_plan
from octavo.ops.interface import AttentionSpec, CacheLayout, Ops, StepInput
from tests.ops.brute import Scene, make_scene, naive_attention

_module_is_ops: Ops = reference  # for the type checker


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    """Arithmetic on garbage shows as a RuntimeWarning: none is allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@st.composite
def drawings(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """What to make a scene of, and how to attend in it."""
    kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([64, 80, 96, 128, 256]))
    contexts = draw(st.lists(st.sampled_from([1, 2, 15, 16, 17, 33, 64, 127]), min_size=1, max_size=4))
    shape = {
        "lengths": [(context, draw(st.sampled_from([1, 1, min(context, 5), context]))) for context in contexts],
        "heads": kv_heads * draw(st.integers(1, 9)),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "block_size": draw(st.sampled_from([1, 2, 3, 4, 8, 16, 32, 64])),
        "seed": draw(st.integers(0, 2**31)),
    }
    window, softcap = draw(st.none() | st.integers(1, 140)), draw(st.none() | st.floats(0.5, 30))
    return shape, {"window": window, "softcap": softcap, "scale": head_dim**-0.5}


def attend(scene: Scene, options: dict[str, Any], rope: Any = None) -> np.ndarray:
    heads, dim = scene.q.shape[1:]
    spec = AttentionSpec(heads, scene.cache.shape[3], dim, rope=rope, **options)
    flat = [rows.reshape(len(rows), -1) for rows in (scene.q, scene.new(scene.keys), scene.new(scene.values))]
    out = reference.attention(*flat, scene.cache, scene.layer, reference.plan(scene.step), spec)
    assert out.dtype == np.float32
    return out.reshape(scene.q.shape)


@settings(max_examples=60, deadline=None)
@given(drawings())
def test_equals_naive_attention_over_a_cache_of_nan(drawn: tuple[dict[str, Any], dict[str, Any]]) -> None:
    shape, options = drawn
    scene = make_scene(**shape)
    np.testing.assert_allclose(attend(scene, options), naive_attention(scene, **options), atol=3e-6)


@settings(max_examples=25, deadline=None)
@given(
    drawings(),
    st.sampled_from([1, 4, 24, 64]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 4096, 50_000]),
)
def test_tiles_of_any_size_merge_to_the_same(
    drawn: tuple[dict[str, Any], dict[str, Any]], keys: int, queries: int, gathered: int
) -> None:
    shape, options = drawn
    scene = make_scene(**shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_plan, "KEY_TILE", keys)
        patch.setattr(reference_plan, "QUERY_TILE", queries)
        patch.setattr(reference_plan, "GATHER_LIMIT", gathered)
        np.testing.assert_allclose(attend(scene, options), naive_attention(scene, **options), atol=3e-6)


@pytest.mark.parametrize("window", [None, 30])
def test_long_contexts_walk_many_tiles(window: int | None) -> None:
    lengths = [(1300, 1), (40, 1), (700, 1), (1100, 300), (513, 1)]
    scene = make_scene(lengths=lengths, heads=2, kv_heads=1, head_dim=16, block_size=16, seed=1)
    options = {"window": window, "scale": 0.25}
    np.testing.assert_allclose(attend(scene, options), naive_attention(scene, **options), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=6), st.randoms(use_true_random=False), st.sampled_from([1, 40]))
def test_partial_results_merge_in_any_order(sizes: list[int], order: Any, spread: float) -> None:
    """A part may hold no key that the row sees at all."""
    sizes = [max(sizes[0], 1), *sizes[1:]]
    random = np.random.default_rng(sum(sizes))
    scores = [(random.standard_normal((2, size)) * spread).astype(np.float32) for size in sizes]
    values = [random.standard_normal((size, 3)).astype(np.float32) for size in sizes]

    def part(score: np.ndarray, value: np.ndarray) -> reference.Partial:
        highest = np.maximum(score.max(axis=-1, keepdims=True, initial=-np.inf), reference.LOWEST)
        weights = np.exp(score - highest)
        return highest, weights.sum(axis=-1, keepdims=True), weights @ value

    parts = [part(score, value) for score, value in zip(scores, values, strict=True)]
    order.shuffle(parts)
    kept, *rest = parts
    for new in rest:
        reference.merge(kept, new)
    exact = np.exp(np.concatenate(scores, axis=1).astype(np.float64))
    want = exact / exact.sum(axis=-1, keepdims=True) @ np.concatenate(values)
    np.testing.assert_allclose(kept[2] / kept[1], want, atol=2e-6)


def test_scores_too_large_for_exp_are_no_trouble() -> None:
    scene = make_scene(lengths=[(40, 40), (20, 1)], heads=2, kv_heads=1, head_dim=64, block_size=4, seed=2, size=30)
    out = attend(scene, {"scale": 1.0})
    np.testing.assert_allclose(out, naive_attention(scene, 1.0), rtol=1e-3, atol=2e-2)


def test_a_window_does_not_look_at_tiles_wholly_outside() -> None:
    scene = make_scene(lengths=[(127, 1)], heads=1, kv_heads=1, head_dim=64, block_size=4, seed=3)
    plan = reference.plan(scene.step)
    (group,) = plan.groups(10, scene.cache.shape)
    looked_at = {int(block) for tile in group.tiles for block in tile.blocks.ravel()}
    assert looked_at == set(scene.step.block_tables[0, 29:32].tolist())  # places 117 to 126


def test_windows_that_begin_in_other_blocks_end_within_the_table() -> None:
    """The first spans blocks 29 to 31, the second 28 to 31: looked at together, the first must not reach block 32."""
    scene = make_scene(lengths=[(127, 1), (125, 1)], heads=2, kv_heads=1, head_dim=64, block_size=4, seed=3)
    assert scene.step.block_tables.shape == (2, 32)
    options = {"window": 10, "scale": 0.125}
    np.testing.assert_allclose(attend(scene, options), naive_attention(scene, **options), atol=3e-6)


def test_a_prompt_looks_at_each_tile_once_and_never_ahead() -> None:
    length = 4096
    step = StepInput(
        *(np.arange(length, dtype=np.int32) for _ in range(3)),
        query_starts=np.array([0, length], np.int32),
        context_lens=np.array([length], np.int32),
        block_tables=np.arange(length // 16, dtype=np.int32)[None],
        logit_rows=np.array([length - 1], np.int32),
    )
    groups = reference.plan(step).groups(None, (256, 1, 2, 1, 16, 64))
    pairs = sum(group.rows.size * tile.blocks.size * 16 for group in groups for tile in group.tiles)
    assert pairs < 0.55 * length * length
    assert max(group.rows.size * tile.blocks.size * 16 for group in groups for tile in group.tiles) <= 128 * 256
    masks = sum(tile.hidden.size for group in groups for tile in group.tiles if tile.hidden is not None)
    assert masks <= length * (128 + 256)


@pytest.mark.parametrize("tokens", [1, 15, 17, 127])
@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_writing_puts_each_head_of_each_token_in_its_slot_and_nothing_else(tokens: int, block_size: int) -> None:
    random = np.random.default_rng(0)
    cache = np.full((128 // block_size + 3, 2, 2, 3, block_size, 8), np.nan, np.float32)
    keys, values = (random.standard_normal((tokens, 3, 8)).astype(np.float32) for _ in range(2))
    slots = random.permutation(128)[:tokens].astype(np.int32)
    reference.write_kv(keys, values, cache, 1, slots)
    for t, slot in enumerate(slots):
        np.testing.assert_array_equal(cache[slot // block_size, 1, 0, :, slot % block_size], keys[t])
        np.testing.assert_array_equal(cache[slot // block_size, 1, 1, :, slot % block_size], values[t])
    assert np.count_nonzero(~np.isnan(cache)) == 2 * keys.size


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(64, 64), (64, 16), (80, 80), (96, 72), (128, 128), (256, 2)]),
    st.integers(1, 5),
    st.lists(st.integers(0, 4000), min_size=1, max_size=17),
    st.sampled_from([1.0, 1.19]),
)
def test_rotation_is_multiplication_by_unit_complex_numbers(
    dims: tuple[int, int], heads: int, places: list[int], factor: float
) -> None:
    dim, rotated = dims
    inv_freq = 10000.0 ** -(np.arange(0, rotated, 2) / rotated)
    table = reference.rope_table(inv_freq, 4001, factor=factor)
    x = np.random.default_rng(0).standard_normal((len(places), heads, dim)).astype(np.float32)
    step = make_scene(lengths=[(1, 1)], heads=1, kv_heads=1, head_dim=2, block_size=1, seed=0).step
    step.positions = np.array(places, np.int32)
    y = reference.rotate(x, *reference.plan(step).rotation(table))
    half = rotated // 2
    angles = np.array(places)[:, None, None] * inv_freq.astype(np.float32).astype(np.float64)
    turned = (x[..., :half] + 1j * x[..., half:rotated]) * np.exp(1j * angles) * factor
    # float32 angles, as models are trained with, are off by up to 4000 * 2 ** -25 at the far end
    np.testing.assert_allclose(y[..., :half], turned.real, atol=2e-3)
    np.testing.assert_allclose(y[..., half:rotated], turned.imag, atol=2e-3)
    np.testing.assert_array_equal(y[..., rotated:], x[..., rotated:])


def test_attention_rotates_before_it_writes() -> None:
    scene = make_scene(lengths=[(9, 9)], heads=2, kv_heads=1, head_dim=64, block_size=4, seed=5)
    table = reference.rope_table(100.0 ** -(np.arange(0, 64, 2) / 64), 9)
    cos, sin = reference.plan(scene.step).rotation(table)
    out = attend(scene, {"scale": 0.125}, rope=table)
    scene.q, scene.keys[0] = reference.rotate(scene.q, cos, sin), reference.rotate(scene.keys[0], cos, sin)
    np.testing.assert_allclose(out, naive_attention(scene, 0.125), atol=3e-6)
    blocks, offsets = np.divmod(scene.step.slots, 4)
    np.testing.assert_array_equal(scene.cache[blocks, 1, 0, :, offsets], scene.keys[0])


def test_a_place_beyond_the_table_is_an_error() -> None:
    scene = make_scene(lengths=[(9, 9)], heads=1, kv_heads=1, head_dim=64, block_size=4, seed=5)
    with pytest.raises(ValueError, match="position 8 is beyond the 8"):
        attend(scene, {"scale": 0.125}, rope=reference.rope_table(np.ones(32), 8))


def test_cache_has_the_bytes_it_says_and_blocks_are_contiguous() -> None:
    layout = CacheLayout(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8)
    cache = reference.new_cache(5, layout)
    assert cache.nbytes == 5 * reference.block_bytes(layout) == 5 * 3 * 2 * 2 * 4 * 8 * 4
    assert cache[3].flags.c_contiguous
    assert not cache.any()


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(6)), st.integers(0, 6), st.booleans())
def test_copying_blocks_reads_all_before_it_writes(order: list[int], count: int, one_cache: bool) -> None:
    random = np.random.default_rng(0)
    source = random.standard_normal((6, 1, 2, 1, 2, 3)).astype(np.float32)
    target = source if one_cache else random.standard_normal(source.shape).astype(np.float32)
    pairs = np.array([(random.integers(6), b) for b in order[:count]], np.int32).reshape(-1, 2)
    before, want = source.copy(), target.copy()
    for a, b in pairs:
        want[b] = before[a]
    reference.copy_blocks(source, target, pairs)
    np.testing.assert_array_equal(target, want)


def test_scale_of_a_score_is_the_spec_s() -> None:
    scene = make_scene(lengths=[(12, 12)], heads=1, kv_heads=1, head_dim=64, block_size=4, seed=7)
    for scale in (1 / 8, 1 / math.sqrt(17), 1.0):
        np.testing.assert_allclose(attend(scene, {"scale": scale}), naive_attention(scene, scale), atol=1e-5)

"""The native draws and log-probabilities, on every instruction set that this machine has, against float64 arithmetic.

What the laws mean, and that a batch's rows are alone, tests/engine/test_sampler.py shows of these kernels too; here are
the shapes at which vectors, pieces, chunks and threads begin and end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo import _native
from octavo.ops import reference
from octavo.ops.interface import Laws
from octavo.ops.native import NativeOps

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

EDGES = [1, 2, 7, 16, 17, 63, 255, 256, 257, 271, 4095, 4096, 4097, 12_289]  # of vectors, sets, pieces and chunks


@dataclass(frozen=True)
class Law:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


LAWS = [
    Law(temperature=0),
    Law(),
    Law(temperature=0.8, top_p=0.95),
    Law(temperature=1.5, top_p=0.99),
    Law(temperature=5, top_p=0.5),
    Law(top_p=1e-9),
    Law(top_k=1),
    Law(temperature=0.8, top_k=50, top_p=0.95),
    Law(temperature=3, top_k=1000),
    Law(temperature=9, top_k=12_000, top_p=0.999999),
    Law(min_p=0.05),
    Law(temperature=2, min_p=1e-4, top_p=0.9),
    Law(min_p=0.01, top_k=20, top_p=0.8),
    Law(min_p=1),
    Law(temperature=1e-6),
    Law(temperature=1e6),
]


@pytest.fixture(params=_native.usable_isas(), autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OCTAVO_ISA", request.param)
    assert _native.isa() == request.param
    return str(request.param)


def laws_of(laws: list[Law], uniform: Float64) -> Laws:
    return Laws(
        np.array([law.temperature for law in laws], np.float64),
        np.array([law.top_k for law in laws], np.int64),
        np.array([law.top_p for law in laws], np.float64),
        np.array([law.min_p for law in laws], np.float64),
        uniform,
    )


def shares(row: Float32, law: Law) -> Float64:
    """The exact probability of every token [V]: 0 where it does not pass the filters."""
    x = row.astype(np.float64)
    weights = np.exp((x - x.max()) / law.temperature)
    kept = weights >= law.min_p * (1 - 1e-6)
    if law.top_k:
        kept &= x >= np.sort(x)[-min(law.top_k, len(x))]
    weights[~kept] = 0
    order = np.argsort(-x, kind="stable")
    reached = np.cumsum(weights[order]) >= law.top_p * weights.sum() * (1 - 1e-6)
    if law.top_p < 1:
        weights[x < x[order[np.argmax(reached)]]] = 0
    return weights / weights.sum()


def assert_drawn(token: int, row: Float32, law: Law, u: float) -> None:
    """The token whose share u falls in, or one next to it by rounding: float32 weights are exact to some 1e-6."""
    if law.temperature == 0:
        assert token == int(row.argmax())
        return
    share = shares(row, law)
    below = share[:token].sum()
    assert share[token] > 0
    assert below - 2e-6 <= u <= below + share[token] + 2e-6


def make_rows(rng: np.random.Generator, vocab: int) -> Float32:
    """Rows of many shapes: as a model has them, flat, peaked, tied, and with impossible tokens."""
    bell = rng.normal(0, 2.5, vocab)
    bell[rng.integers(0, vocab, min(vocab, 40))] += np.linspace(13, 2, min(vocab, 40))
    holes = np.where(rng.random(vocab) < 0.3, -np.inf, bell)
    holes[rng.integers(0, vocab)] = 1
    tied = np.round(bell)
    signs = np.where(rng.random(vocab) < 0.5, -0.0, 0.0)
    return np.array([bell, bell * 6, bell * 0.01, holes, tied, signs, -bell - 100, np.zeros(vocab)], np.float32)


@pytest.mark.parametrize("vocab", EDGES)
def test_draws_are_where_float64_arithmetic_has_them(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = make_rows(rng, vocab)
    sources = np.repeat(np.arange(len(logits)), len(LAWS))
    laws = LAWS * len(logits)
    uniform = rng.random(len(laws))
    uniform[::7], uniform[1::7] = 0, 1 - 2.0**-53
    before = logits.copy()
    tokens = NativeOps(threads=2).draw(logits, sources, laws_of(laws, uniform))
    assert (logits == before).all()
    for token, source, law, u in zip(tokens.tolist(), sources.tolist(), laws, uniform.tolist(), strict=True):
        assert_drawn(token, logits[source], law, u)


@given(
    values=st.lists(st.sampled_from([-np.inf, -3e38, -5.0, -1.0, -0.0, 0.0, 1e-30, 1.0, 1.5, 3.0, 3e38]), min_size=1),
    repeats=st.integers(1, 40),
    law=st.builds(
        Law,
        temperature=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
        top_k=st.integers(0, 30),
        top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-3]),
        min_p=st.sampled_from([0.0, 0.3]),
    ),
    u=st.floats(0, 1, exclude_max=True),
)
@settings(deadline=None, max_examples=300)
def test_a_draw_from_few_values_passes_the_filters(values: list[float], repeats: int, law: Law, u: float) -> None:
    row = np.array(values * repeats, np.float32)
    for each in _native.usable_isas():  # hypothesis runs the test many times in one fixture
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OCTAVO_ISA", each)
            (token,) = NativeOps(threads=1).draw(row[None], np.zeros(1, np.int64), laws_of([law], np.array([u])))
        if row.max() == -np.inf:
            assert token == -1
        else:
            assert_drawn(int(token), row, law, u)


@pytest.mark.parametrize("vocab", [4097, 20_000, 49_152])
def test_a_draw_has_the_same_bits_on_any_number_of_threads_and_in_any_batch(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = make_rows(rng, vocab)
    sources = np.tile(np.arange(len(logits)), 20)
    laws = laws_of([LAWS[i % len(LAWS)] for i in range(len(sources))], rng.random(len(sources)))
    together = NativeOps(threads=1).draw(logits, sources, laws)
    for threads in (2, 3, 5):
        ops = NativeOps(threads=threads)
        for draws in (len(sources), 37, 4, 1):  # fewer than threads, too: they share a row then
            for begin in range(0, len(sources), draws):
                some = np.arange(begin, min(begin + draws, len(sources)))
                assert ops.draw(logits, sources[some], laws.of(some)).tolist() == together[some].tolist()
    tokens = np.maximum(together, 0)
    alone = NativeOps(threads=1).logprobs(logits, sources, tokens, 5)
    for threads in (2, 3, 5):
        for begin in range(0, len(sources), threads - 1):
            some = np.arange(begin, min(begin + threads - 1, len(sources)))
            found = NativeOps(threads=threads).logprobs(logits, sources[some], tokens[some], 5)
            assert found.log_sums.tobytes() == alone.log_sums[some].tobytes()
            assert found.ranks.tolist() == alone.ranks[some].tolist()
            assert found.top_ids.tolist() == alone.top_ids[some].tolist()


@pytest.mark.parametrize("vocab", [5, 17, 5000])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_that_is_no_numbers_has_no_token_and_harms_no_other(vocab: int, threads: int) -> None:
    rng = np.random.default_rng(1)
    good = np.repeat(make_rows(rng, vocab)[:1], 8, axis=0)
    bad = good.copy()
    bad[0, 0], bad[1, -1], bad[2, vocab // 2], bad[3] = np.nan, -np.nan, np.inf, -np.inf
    bad[4, 0], bad[4, 1] = np.inf, np.nan
    for law in LAWS:
        laws = laws_of([law] * 8, rng.random(8))
        tokens = NativeOps(threads=threads).draw(bad, np.arange(8), laws)
        expected = NativeOps(threads=threads).draw(good, np.arange(8), laws)
        assert tokens.tolist() == [-1] * 5 + expected[5:].tolist()
    found = NativeOps(threads=threads).logprobs(bad, np.arange(8), np.zeros(8, np.int64), 3)
    assert np.isnan(found.log_sums).tolist() == [True] * 5 + [False] * 3
    assert (found.top_ids[:5] == -1).all()


@pytest.mark.parametrize("vocab", EDGES)
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_those_of_float64_arithmetic(vocab: int, top: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = make_rows(rng, vocab)
    sources = rng.integers(0, len(logits), 20)
    tokens = rng.integers(0, vocab, 20)
    found = NativeOps(threads=2).logprobs(logits, sources, tokens, top)
    x = logits[sources].astype(np.float64)
    peak = x.max(axis=1, keepdims=True)
    assert found.log_sums == pytest.approx(np.log(np.exp(x - peak).sum(axis=1)) + peak[:, 0], rel=1e-12, abs=5e-7)
    expected = reference.logprobs(logits, sources, tokens, top)
    assert found.ranks.tolist() == expected.ranks.tolist()
    assert found.top_ids.tolist() == expected.top_ids.tolist()


def test_arguments_that_do_not_fit_are_refused() -> None:
    logits = np.zeros((3, 8), np.float32)
    ops, laws = NativeOps(threads=1), laws_of([Law()] * 2, np.zeros(2))
    with pytest.raises(ValueError, match=r"sources has 3 where there are 3\."):
        ops.draw(logits, np.array([0, 3]), laws)
    with pytest.raises(ValueError, match=r"sources has -1"):
        ops.draw(logits, np.array([0, -1]), laws)
    with pytest.raises(ValueError, match=r"temperature has 2 entries where 3 belong\."):
        ops.draw(logits, np.arange(3), laws)
    with pytest.raises(ValueError, match=r"token_ids has 8"):
        ops.logprobs(logits, np.arange(2), np.array([0, 8]), 0)
    with pytest.raises(ValueError, match="A row of logits"):
        ops.draw(np.zeros((3, 0), np.float32), np.arange(2), laws)
    assert ops.draw(logits, np.zeros(0, np.int64), laws.of(np.zeros(0, np.int64))).tolist() == []

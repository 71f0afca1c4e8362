"""Sampling against exact probabilities, a naive sampler and Transformers' warpers; and that rows are alone.

All of it twice: drawn by the NumPy reference, and by the native kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation import logits_process as hf

from octavo.engine import sampler
from octavo.engine.sampler import SamplingTable
from octavo.ops import reference, reference_sampling
from octavo.ops.interface import Ops
from octavo.ops.native import NativeOps
from octavo.outputs import TokenLogprobs
from octavo.params import SamplingParams

VOCAB = 49152  # SmolLM2's; some paths are taken by large vocabularies only
Float32 = NDArray[np.float32]
History = tuple[Sequence[int], Sequence[int]]


class Drawing:
    """The operations that all tests of this file draw by."""

    ops: Ops


@pytest.fixture(scope="module", autouse=True, params=["reference", "native"])
def drawing_ops(request: pytest.FixtureRequest) -> None:
    Drawing.ops = reference if request.param == "reference" else NativeOps(threads=2)


def sample(logits: Float32, *arguments: Any) -> sampler.Drawn:
    return sampler.sample(Drawing.ops, logits, *arguments)


def logprobs(logits: Float32, tokens: NDArray[np.int64], top: int) -> list[TokenLogprobs]:
    return sampler.logprobs(Drawing.ops, logits, np.arange(len(tokens)), tokens, top)


def language_like(rng: np.random.Generator, rows: int, vocab: int = VOCAB) -> Float32:
    """Logits as a language model has them: a broad body and a few dozen tokens far over it."""
    logits = rng.normal(0, 2.5, (rows, vocab)).astype(np.float32)
    for row in logits:
        row[rng.integers(0, vocab, 60)] += np.linspace(13, 2, 60, dtype=np.float32)
    return logits


def draw(
    logits: Float32,
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    histories: Mapping[int, History] | None = None,
    sources: Sequence[int] | None = None,
    eos: Sequence[int] = (),
) -> sampler.Drawn:
    """One draw for each of `params`, in rows 0, 1, ... of a fresh table."""
    count = len(params)
    table = SamplingTable(count)
    for row, each in enumerate(params):
        table.set(row, each, seeds[row] if seeds else row, 0, eos)
    return sample(
        logits,
        np.array(sources if sources is not None else range(count), np.int64),
        table,
        np.arange(count),
        np.array(positions if positions is not None else [5] * count, np.int64),
        lambda row: flat((histories or {})[row]),
    )


def flat(history: History) -> tuple[list[int], int]:
    """Prompt and answer as the sampler takes them: all tokens, and how many are the prompt's."""
    prompt, output = history
    return [*prompt, *output], len(prompt)


def draws_of_one_row(row: Float32, params: SamplingParams, count: int) -> NDArray[np.int64]:
    """Many draws from one row of logits, as a long answer makes them: one seed, the positions 0, 1, ..."""
    table = SamplingTable(1)
    table.set(0, params, 1234, 0)
    zeros = np.zeros(count, np.int64)
    return sample(row[None], zeros, table, zeros, np.arange(count), lambda _: ((), 0)).token_ids


# --- a naive sampler --------------------------------------------------------------------------------------------------


def uniform(seed: int, index: int, position: int) -> float:
    """SplitMix64 over the three numbers, in whole numbers of Python."""
    mask, h = 2**64 - 1, 0
    for value in (seed, index, position):
        h = ((h ^ value) + 0x9E3779B97F4A7C15) & mask
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & mask
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & mask
        h ^= h >> 31
    return (h >> 11) / 2**53


def adjusted(row: Float32, params: SamplingParams, history: History, eos: Sequence[int]) -> list[float]:
    prompt, output = history
    logits = [float(x) for x in row]
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else eos)}:
            logits[token] = -math.inf
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    return logits


def law(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The surviving tokens and their probabilities."""
    peak = max(logits)
    weights = {t: math.exp((x - peak) / params.temperature) for t, x in enumerate(logits) if x > -math.inf}
    kept = [t for t, w in weights.items() if w >= params.min_p * (1 - 1e-9)]
    if 0 < params.top_k < len(kept):
        kth = sorted((logits[t] for t in kept), reverse=True)[params.top_k - 1]
        kept = [t for t in kept if logits[t] >= kth]
    total, reached, edge = sum(weights[t] for t in kept), 0.0, -math.inf
    for t in sorted(kept, key=lambda t: -weights[t]):
        reached += weights[t]
        if reached >= params.top_p * total * (1 - 1e-9):
            edge = logits[t]
            break
    kept = [t for t in kept if logits[t] >= edge]
    total = sum(weights[t] for t in kept)
    return {t: weights[t] / total for t in kept}


def assert_drawn(token: int, logits: list[float], params: SamplingParams, u: float, slack: float = 1e-5) -> None:
    """The token is the one whose share of the cumulated probability u falls in (or next to it, by rounding)."""
    if params.temperature == 0:
        assert token == logits.index(max(logits))
        return
    probabilities = law(logits, params)
    assert token in probabilities
    below = sum(p for t, p in probabilities.items() if t < token)
    assert below - slack <= u <= below + probabilities[token] + slack


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.5, 2.0]), max_size=2),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.lists(st.integers(0, 3), max_size=1),
    ignore_eos=st.booleans(),
)
TOKENS = st.lists(st.integers(0, 7), max_size=6)


@given(
    params=st.lists(PARAMS, min_size=1, max_size=8),
    histories=st.lists(st.tuples(TOKENS, TOKENS), min_size=8, max_size=8),
    seed=st.integers(0, 2**63),
    vocab=st.sampled_from([8, 9, 300]),
    tied=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_equals_a_naive_sampler(
    params: list[SamplingParams], histories: list[History], seed: int, vocab: int, tied: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (len(params), vocab)).astype(np.float32)
    logits = np.round(logits) if tied else logits
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 5] = 0
    before, eos = logits.copy(), [1]
    drawn = draw(
        logits,
        params,
        seeds=[seed] * len(params),
        positions=range(len(params)),
        histories=dict(enumerate(histories)),
        eos=eos,
    )
    assert drawn.ok.all()
    assert (logits == before).all()
    for row, each in enumerate(params):
        u = uniform(seed, 0, row)
        assert_drawn(int(drawn.token_ids[row]), adjusted(logits[row], each, histories[row], eos), each, u)


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.2, top_p=0.99),
    SamplingParams(temperature=5.0, top_p=0.5),
    SamplingParams(temperature=0.2, top_p=0.9),
    SamplingParams(top_k=50),
    SamplingParams(top_k=4000, temperature=3.0),
    SamplingParams(top_k=40_000, temperature=9.0, top_p=0.9999999),
    SamplingParams(top_k=50, top_p=0.9, temperature=0.7),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1e-4, top_p=0.9, temperature=2.0),
    SamplingParams(min_p=0.01, top_k=20, top_p=0.8),
    SamplingParams(top_p=1e-9),
    SamplingParams(temperature=0),
]


@pytest.mark.parametrize("shape", ["language", "flat", "peaked", "tied", "misleading"])
def test_equals_a_naive_sampler_on_a_large_vocabulary(shape: str) -> None:
    rng = np.random.default_rng(3)
    rows = {
        "language": language_like(rng, 1),
        "flat": rng.normal(0, 0.01, (1, VOCAB)).astype(np.float32),
        "peaked": language_like(rng, 1) * np.float32(6),
        "tied": rng.integers(-4, 9, (1, VOCAB)).astype(np.float32),
        # The tokens a nucleus is guessed from have a higher logit than all others: the guess is far too high.
        "misleading": np.where(np.arange(VOCAB) % reference_sampling._STRIDE == 0, 5.0, 4.9).astype(np.float32)[None],
    }
    logits = rows[shape]
    drawn = draw(logits, FILTERS, sources=[0] * len(FILTERS), seeds=[77] * len(FILTERS))
    for token, params in zip(drawn.token_ids.tolist(), FILTERS, strict=True):
        # A nucleus of nearly equal tokens ends at one of them by the last bit of a sum of thousands.
        slack = 1e-3 if shape == "flat" else 1e-5
        assert_drawn(token, [float(x) for x in logits[0]], params, uniform(77, 0, 5), slack)


# --- statistics -------------------------------------------------------------------------------------------------------


def chi_square_is_plausible(drawn: NDArray[np.int64], probabilities: dict[int, float]) -> bool:
    """Whether counts fit the probabilities: within 5 standard deviations of chi-square's mean; rare tokens pooled."""
    count = len(drawn)
    seen = {int(t): int(n) for t, n in zip(*np.unique(drawn, return_counts=True), strict=True)}
    if not set(seen) <= set(probabilities):
        return False
    bins: list[tuple[float, int]] = [(0.0, 0)]
    for token, p in sorted(probabilities.items(), key=lambda item: item[1]):
        expected, observed = bins[-1]
        bin_with = (expected + p * count, observed + seen.get(token, 0))
        bins = [*bins, bin_with] if expected >= 20 else [*bins[:-1], bin_with]
    chi_square = sum((observed - expected) ** 2 / expected for expected, observed in bins)
    freedom = len(bins) - 1
    return chi_square <= freedom + 5 * math.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("params", FILTERS[:-2], ids=range(len(FILTERS) - 2))
def test_tokens_are_as_frequent_as_likely(params: SamplingParams) -> None:
    row = np.random.default_rng(11).normal(0, 2, 700).astype(np.float32)
    drawn = draws_of_one_row(row, params, 10_000)
    assert chi_square_is_plausible(drawn, law([float(x) for x in row], params))


def test_the_statistic_sees_a_wrong_temperature() -> None:
    row = np.random.default_rng(11).normal(0, 2, 700).astype(np.float32)
    drawn = draws_of_one_row(row, SamplingParams(temperature=1.05), 20_000)
    assert not chi_square_is_plausible(drawn, law([float(x) for x in row], SamplingParams()))


def test_uniform_numbers_are_uniform_and_independent() -> None:
    numbers = np.arange(40_000, dtype=np.uint64)
    fixed = np.full(40_000, 7, np.uint64)
    for seed, index, position in ((numbers, fixed, fixed), (fixed, numbers, fixed), (fixed, fixed, numbers)):
        u = sampler.uniforms(sampler.streams(seed, index), position.astype(np.int64))
        assert (u >= 0).all()
        assert (u < 1).all()
        counts = np.histogram(u, 50, (0, 1))[0]
        assert ((counts - 800) ** 2 / 800).sum() < 49 + 5 * math.sqrt(98)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.025
    few = np.array([0, 1, 2**63, 12345], np.uint64)
    assert sampler.uniforms(sampler.streams(few, few), few[::-1].astype(np.int64)).tolist() == [
        uniform(int(a), int(a), int(b)) for a, b in zip(few, few[::-1], strict=True)
    ]


# --- Transformers -----------------------------------------------------------------------------------------------------

WARPERS: list[tuple[SamplingParams, list[Any]]] = [
    (SamplingParams(temperature=0.7), [hf.TemperatureLogitsWarper(0.7)]),
    (SamplingParams(top_k=30), [hf.TopKLogitsWarper(30)]),
    (SamplingParams(top_p=0.9), [hf.TopPLogitsWarper(0.9)]),
    (SamplingParams(top_p=0.3, temperature=2.0), [hf.TemperatureLogitsWarper(2.0), hf.TopPLogitsWarper(0.3)]),
    (SamplingParams(min_p=0.03), [hf.MinPLogitsWarper(0.03)]),
    (SamplingParams(top_k=100, top_p=0.8), [hf.TopKLogitsWarper(100), hf.TopPLogitsWarper(0.8)]),
    (SamplingParams(repetition_penalty=1.4), [hf.RepetitionPenaltyLogitsProcessor(1.4)]),
    (
        SamplingParams(repetition_penalty=0.7, temperature=0.5, top_k=9),
        [hf.RepetitionPenaltyLogitsProcessor(0.7), hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(9)],
    ),
]


@pytest.mark.parametrize(("params", "warpers"), WARPERS, ids=range(len(WARPERS)))
@pytest.mark.parametrize("vocab", [40, 5000])
def test_survivors_and_probabilities_equal_transformers(
    params: SamplingParams, warpers: list[Any], vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw in the middle of each token's share, as Transformers' probabilities lay them out, gives that token."""
    row = np.random.default_rng(5).normal(0, 2.5, vocab).astype(np.float32)
    prompt, output = [1, 2, 3, 3], [7, 7, 8]
    scores = torch.from_numpy(row.copy())[None]
    for warper in warpers:
        scores = warper(torch.tensor([prompt + output]), scores)
    shares = torch.softmax(scores[0].double(), dim=0).numpy()
    tokens = np.flatnonzero(shares > 1e-5)
    middles = (np.cumsum(shares) - shares / 2)[tokens]
    monkeypatch.setattr(sampler, "uniforms", lambda *_: middles)
    history = dict.fromkeys(range(len(tokens)), (prompt, output))
    drawn = draw(row[None], [params] * len(tokens), sources=[0] * len(tokens), histories=history)
    assert drawn.token_ids.tolist() == tokens.tolist()


# --- rows are alone ---------------------------------------------------------------------------------------------------

SPECIALS = [
    SamplingParams(logit_bias={3: 50.0, 9: -50.0}),
    SamplingParams(repetition_penalty=1.8, temperature=0),
    SamplingParams(presence_penalty=2.0, frequency_penalty=1.0, top_p=0.9),
    SamplingParams(min_tokens=100, temperature=0.5),
]
MIXED = [*FILTERS, *SPECIALS, *FILTERS]


def mixed_batch() -> tuple[Float32, dict[int, History]]:
    rng = np.random.default_rng(17)
    histories = {row: (rng.integers(0, VOCAB, 40).tolist(), rng.integers(0, VOCAB, 9).tolist()) for row in range(32)}
    return language_like(rng, len(MIXED)), histories


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    """The fault: a seed gave other tokens in another batch."""
    logits, histories = mixed_batch()
    together = [
        draw(logits, MIXED, positions=[p] * len(MIXED), histories=histories, eos=[2]).token_ids for p in range(3)
    ]
    table = SamplingTable(64)
    for row, params in enumerate(MIXED):
        table.set(63 - row, params, row, 0, [2])  # other rows, and the batch in another order
    order = np.random.default_rng(1).permutation(len(MIXED))
    of_row = {row: flat(each) for row, each in histories.items()}
    for position in range(3):
        at = np.full(len(MIXED), position)
        alone = []
        for row in range(len(MIXED)):
            one = np.array([63 - row])
            drawn = sample(logits[row][None], np.zeros(1, np.int64), table, one, at[:1], lambda _, row=row: of_row[row])
            alone.append(drawn.token_ids[0])
        shuffled = sample(logits, order, table, 63 - order, at, lambda i: of_row[int(order[i])]).token_ids
        assert together[position].tolist() == alone
        assert together[position][order].tolist() == shuffled.tolist()


@pytest.mark.parametrize("tile", [1, 3 * VOCAB, 1 << 30])
def test_tokens_do_not_depend_on_how_rows_are_put_together(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, histories = mixed_batch()
    expected = draw(logits, MIXED, histories=histories).token_ids
    monkeypatch.setattr(sampler, "_TILE", tile)
    monkeypatch.setattr(reference_sampling, "_TILE", tile)
    assert draw(logits, MIXED, histories=histories).token_ids.tolist() == expected.tolist()


def test_bias_and_penalties_stay_in_their_row() -> None:
    """The fault: logit bias or penalties leaked to a batch neighbour."""
    logits, histories = mixed_batch()
    before = logits.copy()
    with_specials = draw(logits, MIXED, histories=histories).token_ids
    assert (logits == before).all()
    plain = [SamplingParams() if params in SPECIALS else params for params in MIXED]
    without = draw(logits, plain).token_ids
    others = [row for row, params in enumerate(MIXED) if params not in SPECIALS]
    assert with_specials[others].tolist() == without[others].tolist()
    assert with_specials[len(FILTERS)] == 3  # the bias of 50 did work


def test_samples_of_one_row_differ_by_index_and_repeat_by_seed() -> None:
    logits = language_like(np.random.default_rng(2), 2)
    table = SamplingTable(8)
    for row in range(8):
        table.set(row, SamplingParams(temperature=2.0), 99, row % 4)
    sources = np.array([1] * 4 + [0] * 4)
    ids = sample(logits, sources, table, np.arange(8), np.full(8, 3), {}.__getitem__).token_ids
    assert len(set(ids[:4].tolist())) == 4
    again = sample(logits[::-1].copy(), 1 - sources, table, np.arange(8), np.full(8, 3), {}.__getitem__).token_ids
    assert ids.tolist() == again.tolist()


def test_a_row_forgets_who_had_it_before() -> None:
    row = np.zeros((1, 10), np.float32)
    table = SamplingTable(1)
    one = np.zeros(1, np.int64)
    table.set(0, SamplingParams(logit_bias={4: 99.0}, repetition_penalty=2.0, top_k=1), 0, 0, [1])
    assert sample(row, one, table, one, one, lambda _: ([4, 4, 5], 2)).token_ids.tolist() == [4]
    table.set(0, SamplingParams(logit_bias={6: 1.0}, temperature=0), 0, 0)
    assert sample(row, one, table, one, one, lambda _: ([], 0)).token_ids.tolist() == [6]
    table.set(0, SamplingParams(temperature=0), 0, 0)
    assert sample(row, one, table, one, one, {}.__getitem__).token_ids.tolist() == [0]


@pytest.mark.parametrize("seed", [-1, 2**64 + 5, 10**30])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert draw(np.zeros((1, 9), np.float32), [SamplingParams()], seeds=[seed]).ok.all()


# --- rows that cannot be drawn from -----------------------------------------------------------------------------------


def test_logits_that_are_no_numbers_fail_their_own_row_only() -> None:
    rng = np.random.default_rng(4)
    params = [FILTERS[i % len(FILTERS)] for i in range(20)]
    good = language_like(rng, 20)
    expected = draw(good, params).token_ids
    bad = good.copy()
    bad[1, 100], bad[6, :], bad[7, 3], bad[13, -1] = np.nan, -np.inf, np.inf, np.nan
    drawn = draw(bad, params)
    broken = [1, 6, 7, 13]
    assert np.flatnonzero(~drawn.ok).tolist() == broken
    assert (drawn.token_ids[broken] == -1).all()
    assert drawn.token_ids[drawn.ok].tolist() == expected[drawn.ok].tolist()


def test_nothing_left_to_draw_fails_the_row() -> None:
    row = np.full((1, 5), -np.inf, np.float32)
    row[0, 2] = 1
    params = SamplingParams(min_tokens=2, stop_token_ids=[2])
    assert not draw(row, [params], histories={0: ([], [])}).ok[0]


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("vocab", [12, VOCAB])
def test_an_impossible_token_is_never_drawn(u: float, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.random.default_rng(8).normal(0, 1, (1, vocab)).astype(np.float32)
    row[0, : vocab // 3] = -np.inf
    row[0, -vocab // 3 :] = -np.inf
    monkeypatch.setattr(sampler, "uniforms", lambda stream, _: np.full(len(stream), u))
    ids = draw(row, FILTERS, sources=[0] * len(FILTERS)).token_ids
    assert (row[0, ids] > -np.inf).all()
    assert ids[0] == (vocab // 3 if u == 0 else vocab - vocab // 3 - 1 - (vocab % 3 > 0))


def test_rounding_never_leads_out_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary's last tokens are no whole chunk; their sums in float32 and in float64 differ."""
    rows = np.random.default_rng(8).normal(0, 1, (100, 1000)).astype(np.float32)
    monkeypatch.setattr(sampler, "uniforms", lambda stream, _: np.full(len(stream), 1 - 2.0**-53))
    assert (draw(rows, [SamplingParams()] * 100).token_ids == 999).all()


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-7, 1e7, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = language_like(np.random.default_rng(9), 1)
    logits[0, :1000] = -np.inf
    tokens = draws_of_one_row(logits[0], SamplingParams(temperature=temperature), 20).tolist()
    assert min(tokens) >= 1000
    assert (set(tokens) == {int(logits[0].argmax())}) if temperature < 1 else len(set(tokens)) > 15


# --- greedy, ends, penalties ------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.zeros((2, 9), np.float32)
    logits[0, [4, 7]] = 1
    assert draw(logits, [SamplingParams(temperature=0)] * 2).token_ids.tolist() == [4, 0]


def test_top_k_keeps_all_equals_of_the_kth() -> None:
    row = np.array([0, 2, 1, 1, 1, 0], np.float32)
    assert set(draws_of_one_row(row, SamplingParams(top_k=2), 500).tolist()) == {1, 2, 3, 4}


def test_top_p_keeps_all_equals_of_its_edge_and_at_least_one_token() -> None:
    row = np.log(np.array([0.1, 0.4, 0.2, 0.2, 0.1])).astype(np.float32)
    assert set(draws_of_one_row(row, SamplingParams(top_p=0.55), 500).tolist()) == {1, 2, 3}
    assert set(draws_of_one_row(row, SamplingParams(top_p=1e-12), 500).tolist()) == {1}


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_no_end_before_min_tokens(ignore_eos: bool) -> None:
    row = np.array([[9.0, 8.0, 7.0, 6.0]], np.float32)
    table, one = SamplingTable(1), np.zeros(1, np.int64)
    table.set(
        0, SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1, 500], ignore_eos=ignore_eos), 0, 0, [0, 999]
    )
    output: list[int] = []
    history: History = ([], output)
    for _ in range(4):
        output += sample(row, one, table, one, one, lambda _: flat(history)).token_ids.tolist()
    assert output == ([0, 0, 0, 0] if ignore_eos else [2, 2, 0, 0])
    assert not table.special[0]  # back on the fast path


@given(st.lists(st.integers(0, 11), max_size=30), st.lists(st.integers(0, 11), max_size=8))
@settings(deadline=None)
def test_penalties_are_kept_from_step_to_step_as_if_counted_anew(outputs: list[int], prompt: list[int]) -> None:
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)
    kept = SamplingTable(1)
    kept.set(0, params, 0, 0)
    row = np.linspace(-2, 2, 12, dtype=np.float32)
    for count in range(0, len(outputs) + 1, 3):
        fresh = SamplingTable(1)
        fresh.set(0, params, 0, 0)
        by_kept, by_fresh = row.copy(), row.copy()
        kept.adjust(0, by_kept, *flat((prompt, outputs[:count])))
        fresh.adjust(0, by_fresh, *flat((prompt, outputs[:count])))
        assert by_kept == pytest.approx(by_fresh, abs=1e-6)
        assert by_kept.tolist() == pytest.approx(adjusted(row, params, (prompt, outputs[:count]), []), abs=1e-5)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_equal_a_float64_log_softmax() -> None:
    logits = language_like(np.random.default_rng(6), 30)
    logits[3] += 1000
    logits[4, 7:] = -np.inf
    exact = torch.log_softmax(torch.from_numpy(logits).double(), dim=1).numpy()
    tokens = np.random.default_rng(7).integers(0, VOCAB, 30)
    tokens[4], tokens[5] = 3, int(logits[5].argmax())
    chosen = exact[np.arange(30), tokens]
    assert np.allclose(sampler.log_softmax(Drawing.ops, logits), exact, rtol=0, atol=1e-5)
    for row, entry in enumerate(logprobs(logits, tokens, 5)):
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(chosen[row], abs=1e-6)
        assert entry.rank == 1 + (logits[row] > logits[row, tokens[row]]).sum()
        best = np.argsort(-exact[row], kind="stable")[:5].tolist()
        assert list(entry.top) == best
        assert list(entry.top.values()) == pytest.approx(exact[row, best], abs=1e-6)


def test_the_likeliest_are_listed_lower_ids_first_among_equals() -> None:
    logits = np.array([[1, 2, 1, 2, 0, 1]], np.float32)
    (entry,) = logprobs(logits, np.array([2]), 4)
    assert list(entry.top) == [1, 3, 0, 2]
    assert entry.rank == 3
    assert logprobs(logits, np.array([2]), 0)[0].top == {}
    assert list(logprobs(logits, np.array([2]), 99)[0].top) == [1, 3, 0, 2, 5, 4]


@dataclass
class Unread:
    """A history nobody may ask for."""

    def __call__(self, row: int) -> tuple[list[int], int]:
        raise AssertionError(f"row {row} is not special")


def test_histories_are_read_for_special_rows_only() -> None:
    table = SamplingTable(2)
    table.set(0, SamplingParams(), 0, 0, [3])
    table.set(1, SamplingParams(temperature=0, min_tokens=0, stop_token_ids=[1]), 0, 0, [3])
    rows = np.arange(2)
    assert sample(np.zeros((2, 5), np.float32), rows, table, rows, rows, Unread()).ok.all()

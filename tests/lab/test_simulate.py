"""What simulations show: the claims of the lab on real traces, sharing, sweeps, the same bytes every time."""

from __future__ import annotations

import gc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.request import Request
from octavo.engine.scheduler import StepPlan
from octavo.lab import strategies, traces
from octavo.lab.memory import Account
from octavo.lab.memory_ledger import Moment
from octavo.lab.results import Result, Run, load, save
from octavo.lab.simulate import Simulation, simulate
from octavo.lab.sweeps import block_sizes, savings
from octavo.lab.work import Arrival, Work

AZURE = Path(__file__).parents[3] / "shared/traces/azure_conv_2023.csv"
POOL, LONGEST = 16_384, 4096  # a model of 7 billion parameters on 24 GB


class ByTokens:
    """A step of so many seconds a token, whatever it is for."""

    def seconds(self, prefill_tokens: int, decode_sequences: int, *other: int) -> float:
        return 0.02 + 1e-4 * prefill_tokens + 1e-5 * decode_sequences

    def describe(self) -> dict[str, Any]:
        return {}


def run(work: Work, name: str, *, pool_slots: int = POOL, longest: int = LONGEST, **options: Any) -> Run:
    return simulate(
        work, name, pool_slots=pool_slots, max_model_len=longest, step_time=ByTokens(), token_bytes=2**19, **options
    )


@pytest.fixture(scope="module")
def azure() -> Work:
    """The first requests of the trace: more at once than the pool holds."""
    if not AZURE.exists():
        pytest.skip("the Azure trace is not here")
    return traces.read(AZURE, limit=150).at_rate(4)


# --- claims -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(azure: Work) -> dict[str, Run]:
    return {name: run(azure, name) for name in strategies.ALL if name != "none"}


def test_reserving_the_longest_wastes_most_and_paging_nothing(runs: dict[str, Run]) -> None:
    assert 0.15 <= runs["max"].summary.utilisation <= 0.45
    assert runs["paged"].summary.utilisation > 0.96
    order = [runs[name].summary.utilisation for name in ("max", "own", "pow2", "oracle", "paged")]
    assert order == sorted(order)


def test_more_requests_fit(runs: dict[str, Run]) -> None:
    at_once = {name: one.summary.in_flight_mean for name, one in runs.items()}
    assert at_once["paged"] >= 2.5 * at_once["max"]
    assert runs["max"].summary.in_flight_max == POOL // LONGEST
    assert runs["paged"].summary.fit_at_once >= 2.5 * runs["max"].summary.fit_at_once
    assert runs["paged"].summary.throughput >= 2 * runs["max"].summary.throughput


def test_holes_are_a_waste_of_contiguous_memory_only(runs: dict[str, Run]) -> None:
    for name in ("own", "pow2", "oracle", "doubling"):
        assert runs[name].summary.fragmented_failures > 0, name
        assert runs[name].summary.external > 0, name
    for name in ("max", "chunks", "paged"):
        assert (runs[name].summary.fragmented_failures, runs[name].summary.external) == (0, 0), name


def test_every_request_is_answered_or_refused(azure: Work, runs: dict[str, Run]) -> None:
    for name, one in runs.items():
        summary = one.summary
        assert summary.finished + summary.rejected == len(azure.arrivals), name
        assert summary.rejected == sum(a.prompt_tokens + a.output_tokens > LONGEST for a in azure.arrivals), name
        assert sum(piece.slots for piece in one.map) == POOL, name
        series = one.series
        assert len(series.time) <= 400
        for moment in zip(series.stored, series.internal, series.reserved, series.external, series.free, strict=True):
            assert sum(moment) == POOL, name


def test_without_a_cache_all_is_computed_again_and_again(azure: Work) -> None:
    few = Work(azure.name, azure.source, azure.arrivals[:8])
    none, paged = run(few, "none").summary, run(few, "paged").summary
    assert none.finished == paged.finished
    expected = sum(
        sum(range(a.prompt_tokens, a.prompt_tokens + a.output_tokens - 1))
        for a in few.arrivals
        if a.prompt_tokens + a.output_tokens <= LONGEST
    )
    assert none.recomputed_tokens == expected
    assert paged.recomputed_tokens == 0
    assert none.tpot.p50 is not None
    assert paged.tpot.p50 is not None
    assert none.tpot.p50 > 5 * paged.tpot.p50


# --- sharing ------------------------------------------------------------------------------------------------------


class Watched(Simulation):
    """Keeps the largest memory of any step."""

    most = Account(0, 0, 0)

    def look(self, plan: StepPlan) -> Moment:
        moment = super().look(plan)
        self.most = max(self.most, Account(*moment[:3]))
        return moment


@pytest.mark.parametrize(("options", "shared"), [({}, True), ({"sharing": False}, False)])
def test_a_hundred_requests_hold_their_common_prompt_once(options: dict[str, Any], shared: bool) -> None:
    requests, common, own, output = 100, 2000, 10, 20
    work = Work(
        "shared", "made", tuple(Arrival(0.0, ((0, common), (i + 1, own)), output, output) for i in range(requests))
    )
    manager = strategies.make("paged", 400_000, 4096, **options)
    simulation = Watched(
        work, "paged", manager, max_model_len=4096, step_time=ByTokens(), token_bytes=1, token_budget=300_000
    )
    simulation.run()
    each = own + output - 1  # the last token's is never computed
    ahead = each if shared else 0  # the first computes what all others wait for, and has ended when they have all
    assert simulation.most.stored == (common if shared else requests * common) + requests * each - ahead
    assert sum(simulation.most) - simulation.most.stored < 16 * requests
    found = simulation.ledger.summary().cached_tokens
    assert found == ((requests - 1) * common if shared else 0)


def test_sharing_saves_more_the_more_share() -> None:
    samples, beams = savings(samples=(2, 4)), savings(beams=(2, 4))
    assert (samples.name, beams.name, samples.x) == ("samples", "beams", [2.0, 4.0])
    for short, long in (samples.series.values(), beams.series.values()):
        assert 0 < short[0] < short[1] < 0.75  # of four that share all, three are saved
        assert 0 < long[0] < long[1] < 0.75
    for by_samples, by_beams in zip(samples.series.values(), beams.series.values(), strict=True):
        assert all(more > less for less, more in zip(by_samples, by_beams, strict=True))


def test_large_blocks_hold_less(azure: Work) -> None:
    sweep = block_sizes(azure, pool_slots=POOL, max_model_len=LONGEST, step_time=ByTokens(), token_bytes=1, requests=25)
    (line,) = sweep.series.values()
    assert sweep.x[0] == 1
    assert sweep.x[-1] == 256
    assert line == sorted(line, reverse=True)
    assert line[0] > 0.97
    assert line[-1] < 0.95


# --- the clock and the file ---------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    arrivals = tuple(
        Arrival(0.1 * i, ((0, 30), (i + 1, 40)), 20, 30, n=2 if i % 3 == 1 else 1, beam_width=3 * (i % 3 == 2))
        for i in range(30)
    )
    work = Work("mixed", "made", arrivals)
    for name in strategies.ALL:
        for file in ("a", "b"):
            result = Result(
                kind="simulated", octavo="", commit="", machine={}, model={}, pool_slots=1024, seed=7, work={},
                step_time={}, runs=[run(work, name, pool_slots=1024, longest=256, seed=7)],
            )  # fmt: skip
            save(result, tmp_path / file)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes(), name
        assert load(tmp_path / "a") == result


def test_the_times_of_one_request() -> None:
    work = Work("one", "made", (Arrival(5.0, ((0, 100),), 3, 3),))
    told: list[tuple[int, int]] = []
    one = run(work, "paged", progress=lambda done, of: told.append((done, of)))
    first, later = 0.02 + 100 * 1e-4, 2 * (0.02 + 1e-5)
    assert one.summary.seconds == pytest.approx(first + later)
    assert one.summary.ttft.p50 == pytest.approx(first)
    assert one.summary.tpot.p99 == pytest.approx(later / 2)
    assert one.summary.throughput == pytest.approx(3 / (first + later))
    assert told == [(1, 1)]
    assert one.series.time[-1] == pytest.approx(5 + first + later)


def test_twice_as_fast_is_half_the_time_between() -> None:
    work = Work("two", "made", tuple(Arrival(10.0 * i, ((i, 50),), 5, 5) for i in range(3)))
    slow, fast = run(work, "paged"), run(work, "paged", rate=2.0)
    assert slow.summary.seconds - fast.summary.seconds == pytest.approx(10)
    assert asdict(slow.summary.ttft) == pytest.approx(asdict(fast.summary.ttft))
    assert (slow.rate, fast.rate) == (1.0, 2.0)
    assert (slow.map_time, fast.map_time) == (10.0, 5.0)


def test_nothing_to_do_is_done() -> None:
    one = run(Work("none", "made", ()), "paged")
    assert (one.summary.finished, one.summary.utilisation, one.series.time) == (0, 1.0, [])
    assert one.map[0].kind == "free"


def test_answers_that_outgrow_the_pool_are_rejected() -> None:
    work = Work("long", "made", (Arrival(0.0, ((0, 40),), 60, 60), Arrival(0.0, ((1, 10),), 5, 5)))
    for name in ("none", "paged", "chunks", "doubling", "own"):
        summary = run(
            work, name, pool_slots=64, longest=128, settings={"chunk": 16} if name == "chunks" else {}
        ).summary
        assert (summary.finished, summary.rejected) == (1, 1), name


@pytest.mark.parametrize(
    ("name", "settings", "first", "last"),
    [  # pairs of one request that ends with 29 slots written, and one that ends with 7
        ("max", {}, (25, 35 + 57, 9 + 2), (29, 35, 0)),
        ("own", {}, (25, 35 + 25, 9 + 2), (29, 35, 0)),
        ("oracle", {}, (25, 3 + 9, 9 + 2), (29, 3, 0)),
        ("doubling", {}, (25, 3 + 9, 9 + 2), (29, 3, 0)),
        ("chunks", {"chunk": 32}, (25, 3 + 25, 9 + 2), (29, 3, 0)),
        ("paged", {}, (25, 3 + 9, 9 + 2), (29, 3, 0)),
    ],
)
def test_two_requests_by_hand(
    name: str, settings: dict[str, Any], first: tuple[int, int, int], last: tuple[int, int, int]
) -> None:
    work = Work("two", "by hand", (Arrival(0.0, ((0, 20),), 10, 40), Arrival(0.0, ((1, 5),), 3, 16)))
    series = run(work, name, pool_slots=256, longest=64, settings=settings).series
    moments = list(zip(series.stored, series.internal, series.reserved, strict=True))
    assert (moments[0], moments[-1]) == (first, last)
    assert [sum(moment) + free for moment, free in zip(moments, series.free, strict=True)] == [256] * len(moments)
    assert not any(series.external)


def test_a_hole_on_either_side_by_hand() -> None:
    """32 slots are free, 16 before and 16 behind the one that runs; the one that waits needs 32."""
    few, many = ((0, 10),), ((1, 10),)
    work = Work(
        "holes", "by hand",
        (Arrival(0, few, 6, 6), Arrival(0, many, 20, 22), Arrival(0, few, 6, 6), Arrival(0, many, 15, 22)),
    )  # fmt: skip
    made = run(work, "oracle", pool_slots=64, longest=64)
    assert made.series.external == [0] * 6 + [32] * 14 + [0] * 15
    assert made.summary.fragmented_failures == 1


@pytest.mark.parametrize("name", ["paged", "oracle"])
def test_a_request_that_is_over_is_forgotten(name: str) -> None:
    """A trace's tokens would fill gigabytes."""
    alive: list[int] = []

    def told(done: int, of: int) -> None:
        gc.collect()
        alive.append(sum(isinstance(one, Request) for one in gc.get_objects()))

    gc.collect()
    before = sum(isinstance(one, Request) for one in gc.get_objects())
    apart = tuple(Arrival(1000.0 * place, ((place, 20),), 5, 16) for place in range(8))
    run(Work("apart", "one after the other", apart), name, pool_slots=256, longest=64, progress=told)
    assert max(alive) <= before + 2

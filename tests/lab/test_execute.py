"""Simulator and engine: the same memory after every step, for every strategy, whatever comes and however tight."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.engine.beam import BeamStep
from octavo.engine.engine import Engine
from octavo.engine.report import StepRecord
from octavo.engine.request import Request, Sequence
from octavo.engine.scheduler import StepPlan
from octavo.errors import RequestError
from octavo.lab import strategies
from octavo.lab.execute import Execution, execute
from octavo.lab.memory_ledger import Line, Moment
from octavo.lab.simulate import Simulation
from octavo.lab.work import Arrival, Work
from tests.engine.test_engine_memory import draw
from tests.engine.toy import VOCAB, ToyModel, ToyOps, naive_answers

MAX_MODEL_LEN = 64
BLOCK_SIZE = 4
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    *((name, {"fit": fit}) for name in ("max", "own", "pow2", "oracle", "doubling") for fit in ("first", "best")),
    ("chunks", {"chunk": 8}),
    ("paged", {}),
    ("paged", {"prefix_caching": False}),
    ("paged", {"copy_on_write": False}),
    ("paged", {"sharing": False}),
]


class SteppedExecution(Execution):
    """The engine by a clock that counts steps; remembers what was drawn. Each step the memory is proven sound."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.ticks = 0.0
        self.answers: dict[tuple[int, int], list[int]] = {}  # by request and answer: prompt and answer
        self.beam_steps: dict[int, list[BeamStep]] = {}
        super().__init__(*args, **options)

    def now(self) -> float:
        return self.ticks

    def wait(self, until: float) -> None:
        self.ticks = until

    def _watch(self, record: StepRecord) -> None:
        self.ticks += self._moment is not None
        record.seconds = 1.0
        super()._watch(record)
        self.manager.check()

    def submit(self, line: Line, prompt: list[int], n: int, beam_width: int, priority: int) -> Request:
        request = super().submit(line, prompt, n, beam_width, priority)
        if request.beam is not None:
            steps = self.beam_steps.setdefault(request.arrival, [])
            search, step = request.beam, request.beam.step
            search.step = lambda logprobs: steps.append(step(logprobs)) or steps[-1]  # type: ignore[method-assign]
        return request

    def leave(self, request: Request) -> None:
        answers = [seq.output_token_ids for seq in sorted(request.ended, key=lambda seq: seq.index)]
        if not self.ledger.lines[request].story.rejected:  # whatever the layout, attention reads what it must
            assert answers == naive_answers(request, MAX_MODEL_LEN, draw)
        for seq in request.ended:
            self.answers[request.arrival, seq.index] = list(seq.tokens)
        super().leave(request)


class Replay:
    """Draws what an execution drew."""

    def __init__(self, execution: SteppedExecution) -> None:
        self.answers = execution.answers
        self.beam_steps = {arrival: iter(steps) for arrival, steps in execution.beam_steps.items()}

    def tokens(self, drawing: list[Sequence]) -> list[int]:
        return [self.answers[seq.request.arrival, seq.index][len(seq.tokens)] for seq in drawing]

    def beams(self, request: Request, width: int) -> BeamStep:
        return next(self.beam_steps[request.arrival])


class CheckedSimulation(Simulation):
    """Each step the memory is proven sound, and its account is added up again from the memory map."""

    def look(self, plan: StepPlan) -> Moment:
        moment = super().look(plan)
        slots = dict.fromkeys(("free", "stored", "shared", "cached", "internal", "reserved"), 0)
        for piece in self.manager.pieces():
            slots[piece.kind] += piece.slots
        assert slots["stored"] + slots["shared"] == moment.stored
        assert (slots["internal"], slots["reserved"]) == (moment.internal, moment.reserved)
        assert slots["free"] + slots["cached"] == moment.free + moment.external
        return moment

    def step(self) -> None:
        super().step()
        self.manager.check()


class OneSecond:
    """Every step takes one."""

    def seconds(self, *work: int) -> float:
        return 1.0

    def describe(self) -> dict[str, Any]:
        return {}


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    shared, own = draw(st.integers(0, 20)), draw(st.integers(1, 20))
    output = draw(st.integers(1, 20))
    kind = draw(st.sampled_from(["one", "one", "samples", "beams"]))
    return Arrival(
        at=float(draw(st.integers(0, 30))),
        prompt=((draw(st.integers(0, 1)), shared), (draw(st.integers(2, 1000)), own)),
        output_tokens=output,
        max_tokens=output + draw(st.integers(0, 20)),
        n=draw(st.integers(2, 4)) if kind == "samples" else 1,
        beam_width=draw(st.integers(2, 4)) if kind == "beams" else 0,
    )


works = st.lists(arrivals(), min_size=1, max_size=10).map(
    lambda items: Work("made up", "Hypothesis", tuple(sorted(items, key=lambda a: a.at)))
)


def toy_engine() -> Engine:
    return Engine(ToyModel(), ToyOps(), EngineConfig(num_blocks=1, preemption="recompute"), eos_ids={3})


def both(
    work: Work, name: str, pool_slots: int, token_budget: int, options: dict[str, Any]
) -> tuple[SteppedExecution, CheckedSimulation]:
    """The same work on the engine and in the simulator."""

    def manager() -> Any:
        return strategies.make(name, pool_slots, MAX_MODEL_LEN, block_size=BLOCK_SIZE, **options)

    common: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "token_budget": token_budget, "sequence_limit": 8}
    executed = SteppedExecution(work, name, manager(), engine=toy_engine(), **common)
    executed.run()
    simulated = CheckedSimulation(
        work,
        name,
        manager(),
        step_time=OneSecond(),
        token_bytes=8,
        vocabulary=VOCAB,
        draws=Replay(executed),
        **common,
    )
    simulated.run()
    return executed, simulated


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@settings(max_examples=15, deadline=None)
@given(work=works, pool_blocks=st.integers(8, 60), token_budget=st.sampled_from([8, 24, 200]))
def test_simulator_and_engine_agree_step_for_step(
    name: str, options: dict[str, Any], work: Work, pool_blocks: int, token_budget: int
) -> None:
    executed, simulated = both(work, name, pool_blocks * BLOCK_SIZE, token_budget, options)
    assert simulated.ledger.moments == executed.ledger.moments
    assert simulated.ledger.stories == executed.ledger.stories
    assert simulated.manager.moved == executed.manager.moved
    assert simulated.map == executed.map
    for figure in ("copied_bytes", "preemptions", "recomputed_tokens", "fit_at_once"):
        assert getattr(simulated.ledger, figure) == getattr(executed.ledger, figure), figure
    for figure in ("refused", "fragmented"):
        assert getattr(simulated.manager, figure) == getattr(executed.manager, figure), figure
    for run in (executed, simulated):
        assert run.manager.account() == (0, 0, 0)
        assert all(story.rejected or story.last is not None for story in run.ledger.stories)
        assert all(min(moment) >= 0 for moment in run.ledger.moments)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_tight_pool_is_fully_used_and_all_is_answered(name: str, options: dict[str, Any]) -> None:
    """What Hypothesis may not find: preemption, copies and waiting at once, in every strategy that has them."""
    work = Work(
        "tight",
        "by hand",
        tuple(
            Arrival(
                float(i // 3), ((0, 9), (i + 1, 3 + i)), 12, 16, n=3 if i % 4 == 1 else 1, beam_width=2 * (i % 4 == 3)
            )
            for i in range(12)
        ),
    )
    executed, simulated = both(work, name, 28 * BLOCK_SIZE, 32, options)
    assert simulated.ledger.summary() == executed.ledger.summary()
    summary = executed.ledger.summary()
    assert summary.finished + summary.rejected == 12
    assert summary.finished > 0
    assert (summary.preemptions > 0) == (name in ("doubling", "chunks", "paged"))
    assert (summary.copied_bytes > 0) == (name not in ("none", "max"))  # max has no room for several sequences


@pytest.mark.parametrize(
    ("name", "options"), [("paged", {}), ("own", {}), ("doubling", {}), ("chunks", {"chunk": 8}), ("none", {})]
)
@settings(max_examples=15, deadline=None)
@given(work=works, pool_blocks=st.integers(8, 60), token_budget=st.sampled_from([8, 24, 200]))
def test_what_is_known_to_find_no_room_would_find_none(
    name: str, options: dict[str, Any], work: Work, pool_blocks: int, token_budget: int
) -> None:
    """Managers remember a refusal until something changes; without that memory, all is the same."""
    runs = []
    for forgets in (False, True):
        manager = strategies.make(name, pool_blocks * BLOCK_SIZE, MAX_MODEL_LEN, block_size=BLOCK_SIZE, **options)
        simulation = Simulation(
            work,
            name,
            manager,
            max_model_len=MAX_MODEL_LEN,
            step_time=OneSecond(),
            token_bytes=8,
            token_budget=token_budget,
            sequence_limit=8,
        )
        if forgets:
            forget_refusals(manager)
        simulation.run()
        runs.append((simulation.ledger.moments, simulation.ledger.stories, manager.refused, manager.fragmented))
    assert runs[0] == runs[1]


def forget_refusals(manager: Any) -> None:
    admit, nothing = manager.admit, manager._refusal

    def forgetful(*args: Any, **options: Any) -> Any:
        manager._refusal = nothing
        return admit(*args, **options)

    manager.admit = forgetful


def test_the_real_clock_is_kept() -> None:
    work = Work("two", "by hand", (Arrival(0.0, ((0, 8),), 4, 8), Arrival(0.3, ((1, 8),), 4, 8)))
    told: list[tuple[int, int]] = []
    run = execute(
        work,
        "own",
        engine=toy_engine(),
        pool_slots=64,
        max_model_len=MAX_MODEL_LEN,
        settings={"block_size": 4},
        progress=lambda done, of: told.append((done, of)),
    )
    assert run.summary.finished == 2
    assert run.summary.in_flight_max == 1
    assert run.summary.seconds >= 0.3
    assert run.summary.ttft.p50 is not None
    assert run.summary.ttft.p50 < 0.3
    assert told == [(1, 2), (2, 2)]
    assert sum(piece.slots for piece in run.map) == 64


def test_a_block_size_without_kernel_is_refused() -> None:
    work = Work("one", "by hand", (Arrival(0.0, ((0, 8),), 4, 8),))
    with pytest.raises(RequestError, match="block_size is 128"):
        execute(work, "paged", engine=toy_engine(), pool_slots=512, max_model_len=64, settings={"block_size": 128})

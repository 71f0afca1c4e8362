"""Runs work through the engine's scheduler and a strategy's manager on a virtual clock. Knows no model, no tensors.

Every decision is the scheduler's and the manager's, as in the engine: what is left out is the computing, whose time a
model of the step tells, and the drawing of tokens. Answers are as long as the work says, their tokens all different.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from octavo.engine.beam import BeamSearch, BeamStep
from octavo.engine.request import Request, Sequence
from octavo.engine.scheduler import PreemptionCost, Scheduler, StepPlan
from octavo.lab.memory import Manager
from octavo.lab.memory_ledger import Line
from octavo.lab.results import Run
from octavo.lab.running import Progress, Runner, params_of
from octavo.lab.step_time import StepTime
from octavo.lab.strategies import complete, make
from octavo.lab.work import Work
from octavo.outputs import Timings
from octavo.params import BeamParams

VOCABULARY = 32_000  # of prompts; answers' tokens lie above it
BEAM_VOCABULARY = 64  # likely next tokens of a beam
# Standard deviation of their logits. beam_sharing.fit gives 4 for SmolLM2 writing 58 tokens, and 6 for 128. With 5,
# 2, 4 and 8 beams save 29.7, 41.2 and 46.5 % for 58 tokens (SmolLM2's 30.2, 41.7 and 48.9 %), and for 128 tokens
# 38.2, 55.2 and 62.6 % (SmolLM2's 38.3, 54.4 and 61.3 %).
BEAM_SPREAD = 5.0


class Draws(Protocol):
    """The answers: which tokens, and which beams go on."""

    def tokens(self, drawing: list[Sequence]) -> list[int]: ...
    def beams(self, request: Request, width: int) -> BeamStep: ...


class FreshDraws:
    """Tokens that were never seen before; beams by made-up logits."""

    def __init__(self, seed: int, beam_spread: float = BEAM_SPREAD) -> None:
        self._seed, self._beam_spread = seed, beam_spread
        self._tokens = itertools.count(VOCABULARY)
        self._random: dict[int, np.random.Generator] = {}

    def tokens(self, drawing: list[Sequence]) -> list[int]:
        return list(itertools.islice(self._tokens, len(drawing)))

    def beams(self, request: Request, width: int) -> BeamStep:
        assert request.beam is not None
        key = request.arrival
        random = self._random.setdefault(key, np.random.Generator(np.random.Philox(key=[self._seed, key])))
        logits = random.normal(0, self._beam_spread, (width, BEAM_VOCABULARY))
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return request.beam.step(logprobs.astype(np.float32))


class Simulation(Runner):
    """One run on a virtual clock."""

    def __init__(
        self,
        work: Work,
        strategy: str,
        manager: Manager,
        *,
        max_model_len: int,
        step_time: StepTime,
        token_bytes: int,
        seed: int = 0,
        token_budget: int = 2048,
        sequence_limit: int = 256,
        map_time: float | None = None,
        vocabulary: int = VOCABULARY,
        draws: Draws | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.clock = 0.0
        self._step_time = step_time
        self._draws = draws or FreshDraws(seed)
        self._ids, self._order = itertools.count(), itertools.count()
        super().__init__(
            work,
            strategy,
            manager,
            Scheduler(
                manager,
                token_budget=token_budget,
                sequence_limit=sequence_limit,
                preemption="recompute",
                cost=PreemptionCost(0.0, 0.0),
                new_sequence_id=self._ids.__next__,
            ),
            vocabulary=vocabulary,
            max_model_len=max_model_len,
            block_bytes=token_bytes * manager.block_size,
            seed=seed,
            map_time=map_time,
            progress=progress,
        )

    def now(self) -> float:
        return self.clock

    def wait(self, until: float) -> None:
        self.clock = until

    def submit(self, line: Line, prompt: list[int], n: int, beam_width: int, priority: int) -> Request:
        """As Engine.add_request."""
        request = Request(
            id="",
            prompt=None,
            prompt_token_ids=prompt,
            params=params_of(n, beam_width, line.asked.output),
            arrival=next(self._order),
            seed=0,
            priority=priority,
            timings=Timings(arrived=line.story.at),
        )
        if isinstance(request.params, BeamParams):
            request.beam = BeamSearch(request.params, frozenset(), line.asked.output)
        request.live.append(Sequence(next(self._ids), request, 0, prompt.copy()))
        self.scheduler.add(request)
        return request

    # --- a step: the order of things is Engine._step's ---------------------------------------------------------------

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self._end_what_cannot_go_on(plan)
        context, pairs = self._commit(plan)
        copied = self.count(plan)
        if not plan.sequences:
            return
        moment = self.look(plan)
        prefill = sum(plan.counts) - plan.num_decodes
        seconds = self._step_time.seconds(prefill, plan.num_decodes, context, copied, pairs)
        self.clock += seconds
        self.ledger.note(moment, plan, self.clock, seconds)
        self._draw(plan)

    def _end_what_cannot_go_on(self, plan: StepPlan) -> None:
        if not plan.exhausted and not plan.stuck:
            return
        for request in dict.fromkeys(seq.request for seq in plan.exhausted):
            self.ledger.lines[request].story.rejected = True
            if request.beam is not None or not request.live:
                self.scheduler.finish(request, "length")
                self.leave(request)
        for request in plan.stuck:
            self.ledger.lines[request].story.rejected = True
            self.scheduler.fail(request, "The prompt found no room.")
            self.leave(request)

    def _commit(self, plan: StepPlan) -> tuple[int, int]:
        """The plan is computed; returns the context that decoding read, and the pairs of attention in prompts."""
        commit, context, pairs = self.manager.commit, 0, 0
        for place, (seq, count) in enumerate(zip(plan.sequences, plan.counts, strict=True)):
            commit(seq.id, count, seq.tokens)
            before = seq.computed
            seq.computed = before + count
            if place < plan.num_decodes:
                context += seq.computed
            else:
                pairs += count * before + count * (count + 1) // 2
        return context, pairs

    def _draw(self, plan: StepPlan) -> None:
        """As Drawer.draw. Short, as it goes over every sequence every step."""
        scheduler, lines = self.scheduler, self.ledger.lines
        drawing: list[Sequence] = []
        beams: dict[Request, list[Sequence]] = {}
        for seq in plan.sequences:
            if seq.computed < len(seq.tokens):
                continue
            request = seq.request
            if request.beam is not None:
                beams.setdefault(request, []).append(seq)
                continue
            drawing.append(seq)
            if request.timings.first_token is None:
                drawing += [scheduler.fork(seq, index) for index in range(1, request.params.num_samples)]
                self._start(request)
        for seq, token in zip(drawing, self._draws.tokens(drawing), strict=True):
            tokens, request = seq.tokens, seq.request
            tokens.append(token)
            if len(tokens) >= lines[request].length:
                scheduler.end(seq)
                if not request.live:
                    self.leave(request)
        for request, live in beams.items():
            self._step_beams(request, live)

    def _start(self, request: Request) -> None:
        request.timings.first_token = self.clock
        self.ledger.start(request, self.clock)

    def _step_beams(self, request: Request, beams: list[Sequence]) -> None:
        """As Drawer._step_beams."""
        assert request.beam is not None
        step = self._draws.beams(request, len(beams))
        if not request.started:
            self._start(request)
        if not step.parents:
            self.scheduler.finish(request, "length")
            self.leave(request)
            return
        for index, beam in enumerate(beams):
            if index not in step.parents:
                self.scheduler.drop(beam)
        taken: set[int] = set()
        following: list[Sequence] = []
        for parent in step.parents:
            following.append(self.scheduler.fork(beams[parent], 0) if parent in taken else beams[parent])
            taken.add(parent)
        for seq, token in zip(following, step.tokens, strict=True):
            seq.tokens.append(token)
        request.live[:] = following


def simulate(
    work: Work,
    strategy: str,
    *,
    pool_slots: int,
    max_model_len: int,
    step_time: StepTime,
    token_bytes: int,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    rate: float = 1.0,
    token_budget: int = 2048,
    sequence_limit: int = 256,
    map_time: float | None = None,
    progress: Progress | None = None,
) -> Run:
    """One strategy on one load; the same arguments give the same Run.

    rate: the work's requests come so many times as fast. map_time: when the memory map is drawn, in seconds after the
    beginning; None: half-way between the first arrival and the last. progress(requests done, of all) is called after
    each. Raises RequestError for a strategy or setting that does not exist.
    """
    complete_settings = complete(strategy, settings or {})
    simulation = Simulation(
        work if rate == 1.0 else work.at_rate(rate),
        strategy,
        make(strategy, pool_slots, max_model_len, **complete_settings),
        max_model_len=max_model_len,
        step_time=step_time,
        token_bytes=token_bytes,
        seed=seed,
        token_budget=token_budget,
        sequence_limit=sequence_limit,
        map_time=map_time,
        progress=progress,
    )
    simulation.run()
    return simulation.as_run(complete_settings, rate)

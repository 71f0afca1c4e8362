"""What a simulation and an execution have in common: requests come, are refused or answered, and the memory is noted.

Knows neither clock nor engine: those are what the two differ in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler, StepPlan
from octavo.lab.memory import Asked, Manager
from octavo.lab.memory_ledger import Ledger, Line, Moment, Story
from octavo.lab.results import Piece, Run
from octavo.lab.strategies import find
from octavo.lab.work import Arrival, Work, token_ids
from octavo.params import BeamParams, SamplingParams

Progress = Callable[[int, int], None]  # requests done, of all


class Runner(ABC):
    """One run of one strategy; `run` it once."""

    def __init__(
        self,
        work: Work,
        strategy: str,
        manager: Manager,
        scheduler: Scheduler,
        *,
        vocabulary: int,
        max_model_len: int,
        block_bytes: int,
        seed: int,
        map_time: float | None,
        progress: Progress | None,
    ) -> None:
        """vocabulary: prompts have tokens from 0 to below it."""
        self.work, self.manager, self.scheduler = work, manager, scheduler
        self.strategy = find(strategy)
        self.ledger = Ledger(manager, scheduler)
        self.map_time = middle(work) if map_time is None else map_time
        self.map: list[Piece] | None = None
        self._vocabulary, self._max_model_len, self._block_bytes, self._seed = (
            vocabulary,
            max_model_len,
            block_bytes,
            seed,
        )
        self._progress = progress
        self._done = 0

    # --- what the two differ in --------------------------------------------------------------------------------------

    @abstractmethod
    def now(self) -> float:
        """Seconds after the beginning."""

    @abstractmethod
    def wait(self, until: float) -> None:
        """Nothing is to be done before then."""

    @abstractmethod
    def step(self) -> None:
        """One step of the engine."""

    @abstractmethod
    def submit(self, line: Line, prompt: list[int], n: int, beam_width: int, priority: int) -> Request:
        """Queue a request whose answers will be as long as the line says."""

    # --- requests ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until all is answered."""
        arrivals, coming = self.work.arrivals, 0
        while True:
            while coming < len(arrivals) and arrivals[coming].at <= self.now():
                self._arrive(coming, arrivals[coming])
                coming += 1
            if self.scheduler.has_work:
                self.step()
            elif coming < len(arrivals):
                self.wait(arrivals[coming].at)
            else:
                break
        if self.map is None:
            self.map = self.manager.pieces()

    def _arrive(self, place: int, arrival: Arrival) -> None:
        lines = arrival.sequences if self.strategy.resubmits else 1
        story = Story(arrival.at, arrival.output_tokens, arrival.sequences, open=lines)
        self.ledger.stories.append(story)
        asked = asked_of(place, arrival)
        if not self._admissible(asked):
            story.rejected = True
            self._count_done()
            return
        prompt = token_ids(arrival.prompt, self._vocabulary, self._seed).tolist()
        end = asked.prompt + asked.output
        if not self.strategy.resubmits:
            self._submit(Line(story, asked, end, end), prompt, arrival.n, arrival.beam_width)
            return
        for _ in range(lines):
            self._submit(Line(story, one_token(place, len(prompt)), end, len(prompt) + 1), prompt, 1, 0)

    def _admissible(self, asked: Asked) -> bool:
        """Whether a request can be served at all, if nothing else runs."""
        fits = asked.prompt >= 1 and asked.output >= 1 and asked.prompt + asked.output <= self._max_model_len
        return fits and asked.sequences <= self.scheduler.sequence_limit and self.manager.can_ever_hold(asked)

    def _submit(self, line: Line, prompt: list[int], n: int, beam_width: int) -> None:
        # Where nothing outlives a step, an answer's next token goes before the first of later requests.
        request = self.submit(line, prompt, n, beam_width, line.asked.place if self.strategy.resubmits else 0)
        line.asked.others = _others_of(request)
        self.manager.expect(request.live[0].id, line.asked)
        self.ledger.lines[request] = line

    def leave(self, request: Request) -> None:
        """The request is over; where nothing outlives a step, its answer's next token is the next request."""
        line = self.ledger.lines.pop(request)
        line.asked.others = list  # managers keep what they were told: with it, every request and its tokens
        story, length = line.story, line.length
        if length < line.end and not story.rejected:
            following = Line(story, one_token(line.asked.place, length), line.end, length + 1, length - 1)
            if self.manager.can_ever_hold(following.asked):
                self._submit(following, request.ended[0].tokens, 1, 0)
                return
            story.rejected = True
        story.last = None if story.rejected else self.now()
        story.open -= 1
        if story.open == 0:
            self._count_done()

    def _count_done(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self.work.arrivals))

    # --- memory -----------------------------------------------------------------------------------------------------

    def look(self, plan: StepPlan) -> Moment:
        """The memory of a step whose tokens were just committed; draws the memory map when its time has come."""
        if self.map is None and self.now() >= self.map_time:
            self.map = self.manager.pieces()
        return self.ledger.look(plan)

    def count(self, plan: StepPlan) -> int:
        """A step did this; returns the bytes it copied."""
        return self.ledger.count(plan, self._block_bytes)

    def as_run(self, settings: Mapping[str, Any], rate: float) -> Run:
        """What the run has left."""
        return Run(
            strategy=self.strategy.name,
            label=self.strategy.label,
            settings=dict(settings),
            rate=rate,
            summary=self.ledger.summary(),
            series=self.ledger.series(),
            map_time=self.map_time,
            map=self.map or [],
        )


def middle(work: Work) -> float:
    """The moment half-way between the first arrival and the last."""
    return (work.arrivals[0].at + work.arrivals[-1].at) / 2 if work.arrivals else 0.0


def asked_of(place: int, arrival: Arrival) -> Asked:
    """What memory is told of an arrival."""
    return Asked(
        place=place,
        prompt=arrival.prompt_tokens,
        output=arrival.output_tokens,
        max_tokens=arrival.max_tokens,
        sequences=arrival.sequences,
        beams=arrival.beam_width > 0,
    )


def one_token(place: int, prompt: int) -> Asked:
    """What memory is told of a request for one token more."""
    return Asked(place=place, prompt=prompt, output=1, max_tokens=1)


def params_of(n: int, beam_width: int, output_tokens: int) -> SamplingParams | BeamParams:
    """What the engine is asked, so that each answer is exactly so long."""
    if beam_width:
        return BeamParams(width=beam_width, max_tokens=output_tokens, ignore_eos=True)
    return SamplingParams(n=n, max_tokens=output_tokens, ignore_eos=True)


def _others_of(request: Request) -> Callable[[], list[int]]:
    """Tokens of the sequences that the request's first one is to be forked into."""

    def others() -> list[int]:
        if request.started:
            return [len(seq.tokens) - 1 for seq in request.live[1:]]
        return [len(request.prompt_token_ids)] * (request.params.num_samples - 1)

    return others

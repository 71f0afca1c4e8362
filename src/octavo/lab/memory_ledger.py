"""What a run of the lab is told by: every step's memory, every request's moments. Knows no strategy and no model.

The memory of a step is what is held while it computes: after its plan claimed slots, its tokens counted as stored,
before its answers end and give back what they held.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Request, Sequence
from octavo.engine.scheduler import Scheduler, StepPlan
from octavo.kv.memory_ops import Kind
from octavo.lab.memory import Asked, Manager
from octavo.lab.results import Percentiles, Series, Summary

MOMENTS = 400  # of a series


class Moment(NamedTuple):
    """The memory of one step, in slots, and the requests."""

    stored: int
    internal: int
    reserved: int
    external: int
    free: int
    in_flight: int
    waiting: int


@dataclass(slots=True)
class Story:
    """What became of one request; seconds after the beginning."""

    at: float
    output_tokens: int  # of each answer
    sequences: int
    cached_tokens: int = 0
    first: float | None = None
    last: float | None = None
    rejected: bool = False
    open: int = 1  # requests to the engine that it still consists of


@dataclass(slots=True)
class Line:
    """One request to the engine: an arrival, or where nothing outlives a step, the next token of one answer."""

    story: Story
    asked: Asked
    end: int  # tokens of prompt and answer
    length: int  # of these, with which the sequences of this request end
    computed_before: int = 0  # tokens of its prompt that were computed once already

    def recomputed(self, seq: Sequence, count: int) -> int:
        """How many of the prompt tokens just computed, the last `count`, had been computed before."""
        if seq.request.started:
            return count
        before = min(self.computed_before, seq.computed) - (seq.computed - count)
        self.computed_before = max(self.computed_before, seq.computed)
        return max(0, before)


class Ledger:
    """Adds up a run step by step."""

    def __init__(self, manager: Manager, scheduler: Scheduler) -> None:
        self.manager, self.scheduler = manager, scheduler
        self.stories: list[Story] = []
        self.lines: dict[Request, Line] = {}  # of the requests that are in the engine
        self.fit_at_once: int | None = None
        self.copied_bytes = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.prompt_seconds = self.decode_seconds = 0.0  # of steps with prompt tokens, and of those without
        self.decode_steps = self.decoded = 0  # steps without prompt tokens, and sequences in them
        self._slots = manager.pool.num_blocks * manager.block_size
        self._ends, self._seconds, self._moments = array("d"), array("d"), array("q")

    def look(self, plan: StepPlan) -> Moment:
        """The memory of a step; to be called once its tokens are committed, before any is drawn."""
        for seq, count in zip(plan.sequences[plan.num_decodes :], plan.counts[plan.num_decodes :], strict=True):
            self.recomputed_tokens += self.lines[seq.request].recomputed(seq, count)
        manager, scheduler = self.manager, self.scheduler
        stored, internal, reserved = manager.account()
        free = self._slots - stored - internal - reserved
        external = 0
        in_flight = len(scheduler.running)
        if scheduler.num_waiting:
            if self.fit_at_once is None and manager.refused:
                self.fit_at_once = in_flight
            head = scheduler.first_waiting
            if head is not None and manager.fits_no_hole(head.live[0].id, len(head.live[0].tokens) - head.started):
                external, free = free, 0
        return Moment(stored, internal, reserved, external, free, in_flight, scheduler.num_waiting)

    def count(self, plan: StepPlan, block_bytes: int) -> int:
        """A step did this; returns the bytes it copied."""
        self.preemptions += len(plan.preempted)
        copied = plan.memory.count(Kind.COPY) * block_bytes if plan.memory.runs else 0
        self.copied_bytes += copied
        return copied

    def start(self, request: Request, now: float) -> None:
        """The request has its first token, unless it had it before."""
        story = self.lines[request].story
        if story.first is None:
            story.first, story.cached_tokens = now, request.cached_tokens

    def note(self, moment: Moment, plan: StepPlan, end: float, seconds: float) -> None:
        """This step, with this memory, took so long and ended then."""
        if len(plan.sequences) > plan.num_decodes:
            self.prompt_seconds += seconds
        else:
            self.decode_seconds += seconds
            self.decode_steps += 1
            self.decoded += plan.num_decodes
        self._ends.append(end)
        self._seconds.append(seconds)
        self._moments.extend(moment)

    @property
    def moments(self) -> list[Moment]:
        """Of every step."""
        return [Moment(*row) for row in self._table().tolist()]

    def _table(self) -> NDArray[np.int64]:
        """int64 [steps, columns of Moment]."""
        table: NDArray[np.int64] = np.array(self._moments, np.int64).reshape(-1, len(Moment._fields))
        return table

    def series(self) -> Series:
        """The memory at moments evenly spaced: each time that of the step going on then, or the one before it."""
        if not self._ends:
            return Series()
        ends, table = np.array(self._ends), self._table()
        begin = ends[0] - self._seconds[0]
        times = np.linspace(begin, ends[-1], min(MOMENTS, len(ends) + 1))[1:]
        rows = table[np.minimum(np.searchsorted(ends, times), len(ends) - 1)]
        columns = {name: rows[:, i].tolist() for i, name in enumerate(Moment._fields)}
        return Series(time=[round(t, 6) for t in times.tolist()], **columns)

    def summary(self) -> Summary:
        """The numbers of the run."""
        table, weights = self._table(), np.array(self._seconds)
        busy = float(weights.sum())
        means = dict.fromkeys(Moment._fields, 0.0)
        if busy > 0:
            means = dict(zip(Moment._fields, (weights @ table / busy).tolist(), strict=True))
        held = means["stored"] + means["internal"] + means["reserved"]
        most = int(table[:, Moment._fields.index("in_flight")].max()) if len(table) else 0
        done = [story for story in self.stories if story.last is not None and not story.rejected]
        begin = self.stories[0].at if self.stories else 0.0
        seconds = max((story.last for story in done if story.last is not None), default=begin) - begin
        answered = sum(story.output_tokens * story.sequences for story in done)
        return Summary(
            utilisation=means["stored"] / held if held else 1.0,
            stored=means["stored"] / self._slots,
            internal=means["internal"] / self._slots,
            reserved=means["reserved"] / self._slots,
            external=means["external"] / self._slots,
            in_flight_mean=means["in_flight"],
            in_flight_max=most,
            fit_at_once=most if self.fit_at_once is None else self.fit_at_once,
            fragmented_failures=self.manager.fragmented,
            copied_bytes=self.copied_bytes,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            cached_tokens=sum(story.cached_tokens for story in done),
            finished=len(done),
            rejected=sum(story.rejected for story in self.stories),
            seconds=seconds,
            throughput=answered / seconds if seconds > 0 else 0.0,
            ttft=_percentiles([story.first - story.at for story in done if story.first is not None]),
            tpot=_percentiles([tpot for story in done if (tpot := _tpot(story)) is not None]),
            prompt_seconds=self.prompt_seconds,
            decode_seconds=self.decode_seconds,
            decode_steps=self.decode_steps,
            decode_batch=self.decoded / self.decode_steps if self.decode_steps else 0.0,
        )


def _tpot(story: Story) -> float | None:
    if story.first is None or story.last is None or story.output_tokens < 2:
        return None
    return (story.last - story.first) / (story.output_tokens - 1)


def _percentiles(seconds: list[float]) -> Percentiles:
    if not seconds:
        return Percentiles(p50=None, p90=None, p99=None)
    p50, p90, p99 = np.percentile(np.array(seconds), [50, 90, 99]).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)

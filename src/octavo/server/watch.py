"""What is noted of every step, and a copy of the engine's counters between two steps. Knows no Prometheus, no HTTP.

All of it runs on the engine's thread: a step may lose a few microseconds here and no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.engine import Engine
from octavo.engine.report import MemoryReport, StepRecord
from octavo.engine.request import Request, Sequence, State
from octavo.kv.report import Usage
from octavo.server.histogram import STEP_TOKENS, TOKEN, TTFT, Histogram

_Counts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine between two steps."""

    usage: Usage  # blocks now; its counts of events start anew with an engine that was broken off: take `events`
    report: MemoryReport
    running: int  # requests
    waiting: int  # without those swapped out
    swapped: int
    events: _Counts  # since the server started
    prompt_tokens: int  # of the requests that got their first token; those found in the prefix cache included
    step_tokens: Histogram
    step_seconds: Histogram
    first_token_seconds: Histogram
    next_token_seconds: Histogram


class StepWatch:
    """Watches one engine: call it with every StepRecord.

    The next token of a sequence that decodes comes one step after the last one, so all of a step's decodes share one
    latency: the time between the ends of two steps. Only what was preempted in between has waited longer, and is
    looked for when there are preemptions.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kv, self._scheduler = engine.kv, engine.scheduler
        self._lost: _Counts = {}  # what was counted before the engine was last broken off
        self._last_end = 0.0
        self._last_sequences: list[Sequence] = []
        self._preempted = 0
        self._stalled: dict[Request, float] = {}  # preempted in mid-answer -> when its last tokens came
        self._prompt_tokens = 0
        self._step_tokens = Histogram.of(STEP_TOKENS)
        self._step_seconds = Histogram.of(TOKEN)
        self._first_token = Histogram.of(TTFT)
        self._next_token = Histogram.of(TOKEN)

    def __call__(self, record: StepRecord) -> None:
        """Note a step."""
        plan, end = record.plan, record.began + record.seconds
        scheduler = self._engine.scheduler
        if scheduler.recomputed + scheduler.swapped != self._preempted:
            self._preempted = scheduler.recomputed + scheduler.swapped
            self._note_stalled()
        decodes = plan.num_decodes
        if plan.sequences:
            self._step_tokens.observe(sum(plan.counts))
            self._step_seconds.observe(record.seconds)
            if self._stalled:
                decodes -= self._observe_returned(plan.sequences[:decodes], end)
            if decodes:
                self._next_token.observe(end - self._last_end, decodes)
            for seq in plan.sequences[plan.num_decodes :]:
                first = seq.request.timings.first_token
                if first is not None and first >= record.began:
                    self._first_token.observe(first - seq.request.timings.arrived)
                    self._prompt_tokens += len(seq.request.prompt_token_ids)
        self._last_end, self._last_sequences = end, plan.sequences

    def _note_stalled(self) -> None:
        for seq in self._last_sequences:
            request = seq.request
            if request.state in (State.WAITING, State.SWAPPED) and request.started:
                self._stalled.setdefault(request, self._last_end)

    def _observe_returned(self, decoding: list[Sequence], end: float) -> int:
        """The tokens for which a preempted request waited; returns how many of the step's decodes they were."""
        returned = 0
        for request, since in list(self._stalled.items()):
            count = sum(seq.request is request for seq in decoding)
            if count:
                self._next_token.observe(end - since, count)
                returned += count
            if count or request.state is State.FINISHED:
                del self._stalled[request]
        return returned

    def snapshot(self) -> Snapshot:
        """A copy of everything; O(sequences)."""
        engine = self._engine
        if engine.kv is not self._kv:  # it was broken off, and started afresh with empty memory
            self._lost = self._events(self._kv.usage())
            self._kv, self._scheduler = engine.kv, engine.scheduler
        scheduler, usage = engine.scheduler, engine.kv.usage()
        return Snapshot(
            usage=usage,
            report=engine.memory_report(),
            running=len(scheduler.running),
            waiting=scheduler.num_waiting - scheduler.num_swapped,
            swapped=scheduler.num_swapped,
            events=self._events(usage),
            prompt_tokens=self._prompt_tokens,
            step_tokens=self._step_tokens.copy(),
            step_seconds=self._step_seconds.copy(),
            first_token_seconds=self._first_token.copy(),
            next_token_seconds=self._next_token.copy(),
        )

    def _events(self, usage: Usage) -> _Counts:
        """What the memory and the scheduler last known have counted, and those before them."""
        scheduler = self._scheduler
        counts = {
            "hit_tokens": usage.hit_tokens,
            "lookup_tokens": usage.lookup_tokens,
            "copies": usage.copies,
            "evictions": usage.evictions,
            "swapped_out": usage.swapped_out,
            "swapped_in": usage.swapped_in,
            "recompute": scheduler.recomputed,
            "swap": scheduler.swapped,
        }
        return {name: count + self._lost.get(name, 0) for name, count in counts.items()}

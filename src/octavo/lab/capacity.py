"""How much memory a trace needs: the smallest pool in which few enough requests wait for memory. Knows no files.

Each pool is tried by simulating all requests in it, with the engine's own scheduler and manager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.config import MAX_NUM_SEQS
from octavo.engine.request import Request
from octavo.engine.scheduler import StepPlan
from octavo.errors import ConfigError, RequestError
from octavo.lab.memory_paged import Paged
from octavo.lab.simulate import Simulation
from octavo.lab.step_time import StepTime
from octavo.lab.work import Arrival, Work

PRECISION = 0.02  # of the pool's size
MAX_POOL_BLOCKS = 1 << 20  # tried first, for want of an unlimited one; each costs some hundred bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of the requests in a pool of one size."""

    blocks: int
    queued: int  # requests that waited for memory: a refused one, those in line behind it, those preempted
    rejected: int  # requests that never fitted: longer than the context or than the pool
    in_flight_max: int
    held_max: int  # most blocks held at once
    preemptions: int
    utilisation: float  # tokens stored / slots held
    ttft_p99: float | None  # seconds


Progress = Callable[[int, int, int], None]  # blocks of the pool now tried, requests done, of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be served, and by what."""

    work: Work
    block_size: int  # tokens
    token_bytes: int
    max_model_len: int  # tokens of the longest sequence
    step_time: StepTime

    def fitting(self) -> Work:
        """The requests that fit the context: no memory helps the others. Raises RequestError where there is none."""
        work, longest = self.work, self.max_model_len
        fitting = tuple(a for a in work.arrivals if a.prompt_tokens + a.output_tokens <= longest)
        if not fitting:
            raise RequestError(
                f"All {len(work.arrivals):,} requests of {work.name} are longer than {longest:,} tokens."
            )
        return Work(work.name, work.source, fitting)


def attempt(question: Question, blocks: int, progress: Progress | None = None) -> Trial:
    """Serve the requests that fit the context from a pool of so many blocks.

    The number of sequences is not limited, so that only memory makes a request wait.
    """
    if blocks < 1:
        raise ConfigError(f"A pool of {blocks} blocks holds nothing; it must have at least 1.")
    return _Watched(question, blocks, progress).trial()


def need(
    question: Question, *, target_queued: float, target_rejected: float = 0.0, progress: Progress | None = None
) -> tuple[Trial, ...]:
    """The smallest pool that meets the targets, to within 2 %, and after it all others that were tried.

    Targets are shares of the requests that fit the context. Now and then fewer wait in a smaller pool than in a larger
    one, since they are then admitted in other steps; what is found is a pool that meets the targets, and one 2 %
    smaller that does not. Raises ConfigError for a target that is no share.
    """
    for name, share in (("target_queued", target_queued), ("target_rejected", target_rejected)):
        if not 0 <= share < 1:
            raise ConfigError(f"{name} is {share}; it must be a share from 0 to below 1.")
    arrivals = question.fitting().arrivals
    tried: dict[int, Trial] = {}

    def meets(blocks: int) -> bool:
        if blocks not in tried:
            tried[blocks] = attempt(question, blocks, progress)
        trial = tried[blocks]
        return trial.queued <= target_queued * len(arrivals) and trial.rejected <= target_rejected * len(arrivals)

    high = min(sum(_blocks_of(a, question.block_size) for a in arrivals), MAX_POOL_BLOCKS)  # for all at once
    if not meets(high):
        raise RequestError(
            f"Even {high:,} blocks, the most that can be simulated, do not meet the targets; fewer requests, or easier "
            "targets, would work."
        )
    most = tried[high].held_max + high // 100 + 1  # what was held at most, and the 1 % that admissions leave free
    if most < high and meets(most):
        high = most
    low, step = 0, max(1, int(PRECISION * high))
    while not low and step < high:  # down in ever longer strides: far below the peak, trials are long and tell nothing
        if meets(high - step):
            high, step = high - step, 2 * step
        else:
            low = high - step
    while high - low > max(1, PRECISION * high):
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return tried[high], *(tried[blocks] for blocks in sorted(tried) if blocks != high)


def _blocks_of(arrival: Arrival, block_size: int) -> int:
    """At most, shared with nobody."""
    return arrival.sequences * -(-(arrival.prompt_tokens + arrival.output_tokens) // block_size)


class _Watched:
    """A simulation of the paged strategy that notes who had to wait for memory."""

    def __init__(self, question: Question, blocks: int, progress: Progress | None) -> None:
        self._manager = Paged(blocks, question.block_size)
        self._simulation = Simulation(
            question.fitting(),
            "paged",
            self._manager,
            max_model_len=question.max_model_len,
            step_time=question.step_time,
            token_bytes=question.token_bytes,
            sequence_limit=MAX_NUM_SEQS,
            progress=None if progress is None else lambda done, of: progress(blocks, done, of),
        )
        self._scheduler = self._simulation.scheduler
        self._schedule, self._add = self._scheduler.schedule, self._scheduler.add
        self._waited: set[int] = set()  # requests, by their number in the order of arrival
        self._come = 0  # requests so far
        self._noted = 0  # of the first so many, all that had to wait are among them
        self._held_max = 0
        setattr(self._scheduler, "schedule", self._watch)  # noqa: B010 (methods are replaced, on purpose)
        setattr(self._scheduler, "add", self._arrive)  # noqa: B010

    def _arrive(self, request: Request) -> None:
        self._come = request.arrival + 1
        self._add(request)

    def _watch(self) -> StepPlan:
        refused = self._manager.refused
        plan = self._schedule()
        self._waited.update(request.arrival for request in plan.preempted)
        head = self._scheduler.first_waiting
        if head is not None and self._manager.refused > refused:
            self._waited.add(head.arrival)
            self._waited.update(range(max(head.arrival, self._noted), self._come))
            self._noted = self._come
        pool = self._manager.pool
        self._held_max = max(self._held_max, pool.num_active + pool.num_shared)
        return plan

    def trial(self) -> Trial:
        self._simulation.run()
        summary = self._simulation.ledger.summary()
        return Trial(
            blocks=self._manager.pool.num_blocks,
            queued=len(self._waited),
            rejected=summary.rejected,
            in_flight_max=summary.in_flight_max,
            held_max=self._held_max,
            preemptions=summary.preemptions,
            utilisation=summary.utilisation,
            ttft_p99=summary.ttft.p99,
        )

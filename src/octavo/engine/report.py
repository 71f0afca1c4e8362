"""What the memory did while the engine ran, as plain numbers for people. Knows nothing of how they are shown."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler, StepPlan
from octavo.kv.manager import KVManager


@dataclass(slots=True)
class MemoryReport:
    """Counters since the engine started; "used" blocks are those that some sequence holds."""

    block_size: int  # tokens
    block_bytes: int
    kv_type: str  # what keys and values are kept as
    num_blocks: int
    free: int  # now
    cached: int  # now: held by nobody, still findable
    active: int  # now: held once
    shared: int  # now: held several times
    peak_used: int
    peak_shared: int
    peak_utilisation: float  # tokens stored / slots held, when most blocks were used
    copies: int  # blocks copied on write
    evictions: int  # cached blocks reclaimed
    preemptions_recompute: int
    preemptions_swap: int
    prefix_hit_tokens: int
    prefix_lookup_tokens: int
    prompt_tokens: int  # computed; without those found in the prefix cache
    output_tokens: int
    busy_seconds: float  # spent in steps

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens a second of work."""
        return self.output_tokens / self.busy_seconds if self.busy_seconds else 0.0

    def __str__(self) -> str:
        """A few lines for a person."""
        peak = f"{self.peak_used:,} used, {self.peak_shared:,} shared"
        preemptions = f"{self.preemptions_recompute} by recompute, {self.preemptions_swap} by swap"
        lines = {
            "pool": f"{self.num_blocks:,} blocks of {self.block_size} tokens, {self.block_bytes:,} bytes each, "
            f"{self.kv_type}",
            "now": f"{self.free:,} free, {self.cached:,} cached, {self.active:,} active, {self.shared:,} shared",
            "at the peak": f"{peak}, {self.peak_utilisation:.1%} of the used slots held a token",
            "copies": f"{self.copies:,} on write; {self.evictions:,} evictions; preemptions: {preemptions}",
            "prefix cache": f"{self.prefix_hit_tokens:,} of {self.prefix_lookup_tokens:,} prompt tokens found",
            "tokens": f"{self.prompt_tokens:,} of prompts, {self.output_tokens:,} of answers, "
            f"{self.tokens_per_second:.1f} answer tokens a second",
        }
        return "\n".join(f"{name:13}{text}" for name, text in lines.items())


@dataclass(slots=True)
class StepRecord:
    """One step, for those who watch the engine (`Engine.watchers`). Valid during the call only: copy what you keep."""

    began: float  # by time.perf_counter()
    seconds: float
    plan: StepPlan
    touched: list[Request]  # got tokens, or ended

    @property
    def decode_tokens(self) -> int:
        return self.plan.num_decodes

    @property
    def prefill_tokens(self) -> int:
        return sum(self.plan.counts[self.plan.num_decodes :])


class Meter:
    """Adds up what a MemoryReport tells, step by step."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.busy_seconds = 0.0
        self._peak_used = 0
        self._peak_shared = 0
        self._peak_utilisation = 0.0

    def observe(self, kv: KVManager) -> None:
        """Note the state of memory, once a step's tokens are stored."""
        self.observe_growth(kv)
        if kv.pool.num_active + kv.pool.num_shared == self._peak_used > 0:
            self._peak_utilisation = kv.usage().utilisation

    def observe_growth(self, kv: KVManager) -> None:
        """Note the state of memory where no more tokens are stored than before: when samples are forked."""
        pool = kv.pool
        self._peak_shared = max(self._peak_shared, pool.num_shared)
        if pool.num_active + pool.num_shared > self._peak_used:
            self._peak_used = pool.num_active + pool.num_shared
            self._peak_utilisation = kv.usage().utilisation

    def report(self, kv: KVManager, scheduler: Scheduler, block_bytes: int, kv_type: str) -> MemoryReport:
        """The numbers now."""
        usage = kv.usage()
        return MemoryReport(
            block_size=kv.block_size,
            block_bytes=block_bytes,
            kv_type=kv_type,
            num_blocks=kv.pool.num_blocks,
            free=usage.free,
            cached=usage.cached,
            active=usage.active,
            shared=usage.shared,
            peak_used=self._peak_used,
            peak_shared=self._peak_shared,
            peak_utilisation=self._peak_utilisation,
            copies=usage.copies,
            evictions=usage.evictions,
            preemptions_recompute=scheduler.recomputed,
            preemptions_swap=scheduler.swapped,
            prefix_hit_tokens=usage.hit_tokens,
            prefix_lookup_tokens=usage.lookup_tokens,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            busy_seconds=self.busy_seconds,
        )

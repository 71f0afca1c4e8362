"""What the device must copy before the next forward pass, decided by the manager. Knows block ids, never bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """From where to where a run moves blocks."""

    COPY = "copy"  # device -> device (copy-on-write)
    SWAP_OUT = "swap out"  # device -> host
    SWAP_IN = "swap in"  # host -> device


@dataclass(slots=True)
class MemoryOps:
    """Runs of (source block, target block) pairs, to be done in order, each run in one batched call.

    Pairs of one run never touch each other's blocks but to read the same source: they may be done in any order, or
    at once. Done run by run they leave what each would have left at the moment it was decided.
    """

    runs: list[tuple[Kind, list[tuple[int, int]]]] = field(default_factory=list)
    _read: set[int] = field(default_factory=set, init=False, repr=False, compare=False)  # by the last run
    _written: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    def add(self, kind: Kind, source: int, target: int) -> None:
        """Appends one transfer, to the last run where that keeps its pairs independent; amortised O(1)."""
        if not self.runs or self.runs[-1][0] is not kind or self._conflicts(kind, source, target):
            self.runs.append((kind, []))
            self._read.clear()
            self._written.clear()
        self.runs[-1][1].append((source, target))
        self._read.add(source)
        self._written.add(target)

    def _conflicts(self, kind: Kind, source: int, target: int) -> bool:
        # A swap reads one memory and writes the other, so only its targets can meet.
        within = kind is Kind.COPY and (source in self._written or target in self._read)
        return within or target in self._written

    def count(self, kind: Kind) -> int:
        """Blocks moved this way."""
        return sum(len(pairs) for run_kind, pairs in self.runs if run_kind is kind)

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.runs)

"""Runs of consecutive blocks in one row of memory: what is taken, and the holes between. Knows no sequences.

The classic allocator (Knuth 1997, The Art of Computer Programming 1, section 2.5): holes in the order of their
addresses, the first or the smallest that is large enough is cut, and what is given back melts with its neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

from octavo.kv.errors import BadSize, BrokenInvariant, DoubleFree

Fit = Literal["first", "best"]


class Arena:
    """`size` blocks from 0; a run is (start, count). Each operation is O(holes)."""

    def __init__(self, size: int, fit: Fit = "first") -> None:
        """fit: which hole to cut, the first or the smallest that is large enough. Raises BadSize for no blocks."""
        if size < 1:
            raise BadSize(f"An arena of {size} blocks holds nothing; it must have at least 1.")
        self.size = size
        self.fit = fit
        self.free = size
        self.changes = 0  # runs taken and given back so far: nothing has changed where this has not
        self._starts = [0]  # of the holes, ascending
        self._counts = [size]

    @property
    def largest(self) -> int:
        """Blocks of the largest hole."""
        return max(self._counts, default=0)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """(start, count) of each, in the order of addresses."""
        return list(zip(self._starts, self._counts, strict=True))

    def take(self, count: int) -> int | None:
        """The start of a run of so many blocks, or None if no hole is large enough. Raises BadSize for none."""
        if count < 1:
            raise BadSize(f"A run of {count} blocks was asked for; it must have at least 1.")
        if count > self.free:
            return None
        index = self._find(count)
        if index is None:
            return None
        start = self._starts[index]
        self._cut(index, count)
        return start

    def take_all(self, counts: list[int]) -> list[tuple[int, int]] | None:
        """Runs of these many blocks, or None and nothing taken if one finds no hole."""
        taken: list[tuple[int, int]] = []
        for count in counts:
            start = self.take(count)
            if start is None:
                for run in reversed(taken):
                    self.give(*run)
                return None
            taken.append((start, count))
        return taken

    def extend(self, end: int, count: int) -> bool:
        """Take the `count` blocks from `end` on, if they are free: the run that ends there grows where it stands."""
        index = bisect_left(self._starts, end)
        if index == len(self._starts) or self._starts[index] != end or self._counts[index] < count:
            return False
        self._cut(index, count)
        return True

    def give(self, start: int, count: int) -> None:
        """Give back a run, or a part of one. Raises DoubleFree where any of it is free, BadSize where it is outside."""
        if not (start >= 0 and count >= 1 and start + count <= self.size):
            raise BadSize(f"The blocks {start} to {start + count - 1} are not all of an arena of {self.size}.")
        starts, counts = self._starts, self._counts
        index = bisect_left(starts, start)
        before = index > 0 and starts[index - 1] + counts[index - 1]
        if (index > 0 and before > start) or (index < len(starts) and starts[index] < start + count):
            raise DoubleFree(f"Some of the blocks {start} to {start + count - 1} are free already.")
        self.free += count
        self.changes += 1
        if index < len(starts) and starts[index] == start + count:  # melts with the hole after it
            count += counts[index]
            starts[index], counts[index] = start, count
        else:
            starts.insert(index, start)
            counts.insert(index, count)
        if index > 0 and before == start:  # and with the one before it
            counts[index - 1] += count
            del starts[index], counts[index]

    def _find(self, count: int) -> int | None:
        """The hole to cut."""
        if self.fit == "first":
            return next((index for index, hole in enumerate(self._counts) if hole >= count), None)
        fitting = [(hole, index) for index, hole in enumerate(self._counts) if hole >= count]
        return min(fitting)[1] if fitting else None

    def _cut(self, index: int, count: int) -> None:
        self.free -= count
        self.changes += 1
        if self._counts[index] == count:
            del self._starts[index], self._counts[index]
        else:
            self._starts[index] += count
            self._counts[index] -= count

    def check(self) -> None:
        """Holes are ordered, apart and counted right; raises BrokenInvariant."""
        end = -1
        for start, count in self.holes:
            if start <= end or count < 1:
                raise BrokenInvariant(
                    f"The hole of {count} blocks at {start} touches or precedes one that ends at {end}."
                )
            end = start + count
        if end > self.size or sum(self._counts) != self.free:
            raise BrokenInvariant(f"{self.free} of {self.size} blocks count as free, but the holes are {self.holes}.")

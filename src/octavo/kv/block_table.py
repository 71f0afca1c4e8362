"""The page table of one sequence: logical block -> physical block. Knows addresses, never who else uses a block."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.kv.errors import BadPosition, BadSize, UnknownBlock

Int32 = NDArray[np.int32]


class BlockTable:
    """Token t lies in block `table[t // block_size]` at offset `t % block_size` (PagedAttention, Kwon et al. 2023).

    Backed by an int32 array that doubles when full, so that a batch can take whole rows of it without a loop.
    """

    __slots__ = ("_blocks", "_length", "block_size")

    def __init__(self, block_size: int, blocks: Iterable[int] = ()) -> None:
        """Maps the logical blocks 0, 1, ... to `blocks`; raises BadSize or UnknownBlock."""
        if block_size < 1:
            raise BadSize(f"block_size is {block_size}; a block holds at least 1 token.")
        self.block_size = block_size
        initial = np.array([*blocks], np.int32)
        if len(initial) and initial.min() < 0:
            raise UnknownBlock(f"A block table cannot hold the block id {initial.min()}; ids start at 0.")
        self._length = len(initial)
        self._blocks: Int32 = np.empty(max(8, self._length + self._length // 8), np.int32)
        self._blocks[: self._length] = initial

    def __len__(self) -> int:
        """Logical blocks mapped."""
        return self._length

    @property
    def array(self) -> Int32:
        """The physical blocks in logical order, int32 [len(self)]: a view, good until the next append."""
        return self._blocks[: self._length]

    def __getitem__(self, index: int) -> int:
        """The physical block of a logical one (negative: from the end); raises BadPosition."""
        return int(self._blocks.item(self._index(index)))

    def append(self, block: int) -> None:
        """Maps the next logical block; amortised O(1); raises UnknownBlock."""
        if block < 0:
            raise UnknownBlock(f"A block table cannot hold the block id {block}; ids start at 0.")
        if self._length == len(self._blocks):
            self._blocks = np.concatenate((self._blocks, np.empty_like(self._blocks)))
        self._blocks[self._length] = block
        self._length += 1

    def replace(self, index: int, block: int) -> None:
        """Maps a logical block (negative: from the end) elsewhere; raises BadPosition or UnknownBlock."""
        if block < 0:
            raise UnknownBlock(f"A block table cannot hold the block id {block}; ids start at 0.")
        self._blocks[self._index(index)] = block

    def locate(self, position: int) -> tuple[int, int]:
        """(physical block, offset in it) of a token's position; raises BadPosition."""
        index, offset = divmod(position, self.block_size)
        if not 0 <= index < self._length:
            raise self._beyond(position)
        return int(self._blocks.item(index)), offset

    def slots(self, start: int, stop: int) -> Int32:
        """Slots (block * block_size + offset) of the positions start..stop-1, int32; raises BadPosition."""
        if not 0 <= start <= stop <= self._length * self.block_size:
            raise self._beyond(start if start < 0 or start > stop else stop - 1)
        index, offset = np.divmod(np.arange(start, stop, dtype=np.int32), np.int32(self.block_size))
        slots: Int32 = self._blocks[index] * np.int32(self.block_size) + offset
        return slots

    def _index(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise BadPosition(f"Logical block {index} is not mapped: the table has {self._length}.")
        return index if index >= 0 else index + self._length

    def _beyond(self, position: int) -> BadPosition:
        capacity = self._length * self.block_size
        return BadPosition(f"Position {position} has no slot: the table maps {capacity} positions from 0.")

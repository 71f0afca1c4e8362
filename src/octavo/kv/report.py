"""What memory looks like from outside: counters for every step, and each block with its holders. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.kv.block_pool import BlockState
from octavo.kv.memory_ops import Kind

if TYPE_CHECKING:
    from octavo.kv.manager import KVManager


@dataclass(frozen=True, slots=True)
class Usage:
    """Counters of one moment. Blocks, unless the name says tokens or slots; the last group counts since the start.

    A shared block counts once, in `slots_held` as in `tokens_stored`: utilisation is about memory, not about holders.
    """

    num_blocks: int
    free: int
    cached: int
    active: int  # held once
    shared: int  # held several times
    pinned: int  # of active and shared
    host_blocks: int
    host_used: int
    tokens_stored: int  # computed tokens in held blocks
    slots_held: int  # slots of held blocks

    hit_tokens: int  # prompt tokens found in the prefix cache
    lookup_tokens: int  # prompt tokens looked for
    copies: int  # copy-on-write
    evictions: int  # CACHED blocks reclaimed
    swapped_out: int
    swapped_in: int

    @property
    def utilisation(self) -> float:
        """Share of the held slots that hold a computed token (nothing held: 1)."""
        return self.tokens_stored / self.slots_held if self.slots_held else 1.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens looked for that were found (nothing looked for: 0)."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One physical block."""

    block: int
    state: BlockState
    refs: int
    holders: tuple[tuple[int, int], ...]  # (sequence id, logical index)
    pins: int  # pins that hold it
    key: str | None  # hex chain key, if published
    filled: int  # slots that hold a computed token


def usage(manager: KVManager) -> Usage:
    """The counters; O(sequences)."""
    pool, host, cache = manager.pool, manager.host, manager.cache
    held = pool.num_blocks - pool.available
    slots = held * manager.block_size
    return Usage(
        num_blocks=pool.num_blocks,
        free=pool.num_free,
        cached=pool.num_cached,
        active=pool.num_active,
        shared=pool.num_shared,
        pinned=len(manager.pinned),
        host_blocks=host.num_blocks,
        host_used=host.num_blocks - host.available,
        tokens_stored=slots - _empty_slots(manager),
        slots_held=slots,
        hit_tokens=cache.hit_tokens,
        lookup_tokens=cache.lookup_tokens,
        copies=manager.moved[Kind.COPY],
        evictions=pool.evictions,
        swapped_out=manager.moved[Kind.SWAP_OUT],
        swapped_in=manager.moved[Kind.SWAP_IN],
    )


def _empty_slots(manager: KVManager) -> int:
    """Slots of held blocks without a computed token: they can only lie at the ends of tables."""
    empty = 0
    size = manager.block_size
    ends: dict[int, list[int]] = {}  # a block that is the end of a table, perhaps of several -> tokens each has in it
    for seq in manager.sequences.values():
        capacity = len(seq.table) * size
        if seq.writable_until == capacity:  # from computed on, all of it is its own
            empty += capacity - seq.computed
        else:
            ends.setdefault(seq.table[-1], []).append(seq.computed % size)
    for block, filled in ends.items():
        whole = block in manager.cache.entries or manager.pool.refs(block) > len(filled)  # another holder has it full
        empty += 0 if whole else size - max(filled)
    return empty


def snapshot(manager: KVManager) -> list[BlockReport]:
    """Every device block, by id; O(blocks + what the tables hold)."""
    pool, size, entries = manager.pool, manager.block_size, manager.cache.entries
    holders: list[list[tuple[int, int]]] = [[] for _ in range(pool.num_blocks)]
    filled = [size if block in entries else 0 for block in range(pool.num_blocks)]
    for seq in manager.sequences.values():
        for index, block in enumerate(seq.table.array.tolist()):
            holders[block].append((seq.id, index))
            filled[block] = max(filled[block], min(size, seq.computed - index * size))
    return [
        BlockReport(
            block=block,
            state=pool.state(block),
            refs=pool.refs(block),
            holders=tuple(holders[block]),
            pins=manager.pinned.get(block, 0),
            key=entries[block].key.hex() if block in entries else None,
            filled=filled[block],
        )
        for block in range(pool.num_blocks)
    ]


class CellState(IntEnum):
    """What a block is to someone who looks at all of them at once; as BlockState, with prompts told apart."""

    FREE = 0
    CACHED = 1
    ACTIVE = 2
    SHARED = 3
    PREFILL = 4  # claimed by a prompt (or a recomputed beginning) that has not filled it yet
    SWAPPED = 5  # of the host pool: holds a block of a preempted sequence


def cells(manager: KVManager) -> NDArray[np.uint32]:
    """Every device block in one number each, uint32 [num_blocks]; O(blocks) of NumPy, O(sequences) of Python.

    Bits 0-7: CellState. 8-15: slots that hold a computed token. 16-23: references, 255 for more. 24: pinned.
    """
    refs = manager.pool.all_refs()
    free = manager.pool.free()
    states = np.minimum(refs, 2) + np.int32(CellState.CACHED)
    filled = np.full(len(refs), manager.block_size, np.int32)
    states[free], filled[free] = CellState.FREE, 0
    _look_at_ends(manager, refs, states, filled)
    packed = states | filled << 8 | np.minimum(refs, 255) << 16
    if manager.pinned:
        packed[list(manager.pinned)] |= 1 << 24
    result: NDArray[np.uint32] = packed.astype(np.uint32)
    return result


def _look_at_ends(
    manager: KVManager, refs: NDArray[np.int32], states: NDArray[np.int32], filled: NDArray[np.int32]
) -> None:
    """Sets what is special about the blocks in which the computed tokens of a sequence end, and those after them."""
    ends: dict[int, list[int]] = {}  # block -> computed tokens in it, of each sequence that ends there
    for seq in manager.sequences.values():
        index, rest = divmod(seq.computed, manager.block_size)
        if index == len(seq.table):
            continue
        ends.setdefault(seq.table[index], []).append(rest)
        if seq.computed < seq.length:
            claimed = seq.table.array[index:]
            states[claimed[refs[claimed] == 1]] = CellState.PREFILL
            filled[claimed[1:]] = 0
    for block, rests in ends.items():
        if block not in manager.cache.entries and refs[block] == len(rests):  # else somebody has it full
            filled[block] = max(rests)


def host_cells(manager: KVManager) -> NDArray[np.uint32]:
    """Every host block as `cells` has it: SWAPPED or FREE, and its references; uint32 [host.num_blocks]."""
    refs = manager.host.all_refs()
    packed = (refs > 0) * np.int32(CellState.SWAPPED) | np.minimum(refs, 255) << 16
    result: NDArray[np.uint32] = packed.astype(np.uint32)
    return result

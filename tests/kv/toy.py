"""A toy KV cache: each slot holds what a token's KV stands for, so that a wrong share or copy is read back as wrong."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from octavo.kv import BlockTable, KVManager, MemoryOps
from octavo.kv.memory_ops import Kind

Mark = tuple[int, int]  # a token, and the hash of its salt and of all tokens up to it


def marks(tokens: Sequence[int], salt: bytes = b"") -> list[Mark]:
    """What the slots of these tokens hold once computed: KV depends on the whole prefix, not on the token alone."""
    prefix = hash(salt)
    result = []
    for token in tokens:
        prefix = hash((prefix, token))
        result.append((token, prefix))
    return result


class ToyMemory:
    """Device and host blocks of marks, [blocks, block_size, 2]; never written slots hold (-1, -1)."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.device = np.full((num_blocks, block_size, 2), -1, np.int64)
        self.host = np.full((num_host_blocks, block_size, 2), -1, np.int64)

    def copy(self) -> ToyMemory:
        other = ToyMemory(len(self.device), self.block_size, len(self.host))
        other.device[:], other.host[:] = self.device, self.host
        return other

    def execute(self, ops: MemoryOps, shuffle: Random) -> None:
        """Run by run; the pairs of one run in any order, as they are promised to be independent."""
        for kind, pairs in ops.runs:
            source = self.host if kind is Kind.SWAP_IN else self.device
            target = self.host if kind is Kind.SWAP_OUT else self.device
            for a, b in shuffle.sample(pairs, len(pairs)):
                target[b] = source[a]

    def write(self, table: BlockTable, start: int, what: Sequence[Mark]) -> None:
        """A forward pass: the marks of the positions from `start`."""
        slots = table.slots(start, start + len(what))
        self.device.reshape(-1, 2)[slots] = np.array(what, np.int64).reshape(-1, 2)

    def read(self, table: BlockTable, count: int, *, host: bool = False) -> list[Mark]:
        """What lies at the first `count` positions."""
        memory = self.host if host else self.device
        return [(int(a), int(b)) for a, b in memory.reshape(-1, 2)[table.slots(0, count)]]


class Rig:
    """A manager with the toy cache it manages; `compute` is a forward pass over one sequence."""

    def __init__(
        self, num_blocks: int, block_size: int = 4, *, num_host_blocks: int = 0, prefix_caching: bool = True
    ) -> None:
        self.manager = KVManager(num_blocks, block_size, num_host_blocks=num_host_blocks, prefix_caching=prefix_caching)
        self.memory = ToyMemory(num_blocks, block_size, num_host_blocks)
        self.shuffle = Random(0)

    def compute(self, seq_id: int, tokens: Sequence[int], count: int | None = None, *, salt: bytes = b"") -> None:
        """Executes what is pending, writes the next `count` tokens (None: all claimed) and commits them."""
        self.memory.execute(self.manager.take_ops(), self.shuffle)
        start, length = self.manager.computed(seq_id), self.manager.length(seq_id)
        stop = length if count is None else start + count
        self.memory.write(self.manager.table(seq_id), start, marks(tokens, salt)[start:stop])
        self.manager.commit(seq_id, stop - start, tokens)
        self.manager.check()

    def right(self, seq_id: int, tokens: Sequence[int], *, salt: bytes = b"") -> bool:
        """Whether every computed token is read back through the table as what it is."""
        settled = self.memory.copy()
        settled.execute(self.manager.pending, self.shuffle)
        computed = self.manager.computed(seq_id)
        if seq_id in self.manager.swapped:
            found = settled.read(self.manager.swapped[seq_id].table, computed, host=True)
        else:
            found = settled.read(self.manager.table(seq_id), computed)
        return found == marks(tokens, salt)[:computed]

    def blocks(self, seq_id: int) -> list[int]:
        """The physical blocks of a sequence."""
        return [int(block) for block in self.manager.table(seq_id).array]

    def state(self) -> object:
        """Everything that an operation which changes nothing must leave alone."""
        manager = self.manager
        return (
            manager.snapshot(),
            manager.usage(),
            list(manager.pool.cached()),
            dict(manager.in_flight),
            [(s.id, s.length, s.computed, s.writable_until, list(s.keys)) for s in manager.sequences.values()],
            [(s.id, s.length, s.table.array.tolist()) for s in manager.swapped.values()],
            [(kind, list(pairs)) for kind, pairs in manager.pending.runs],
        )

"""The engine's own manager in the lab: the same decisions, with accounts, and with copy-on-write as a switch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.kv.block_pool import BlockState
from octavo.kv.manager import Admission, KVManager, Outcome
from octavo.kv.report import BlockReport
from octavo.lab.memory import Account, Asked, merged
from octavo.lab.results import Piece


class Refusal(NamedTuple):
    """An admission that found no room, and what must change before another may."""

    seq_id: int
    blocks: int  # at least so many it will take
    last_key: bytes | None = None  # of the last block of its prefix that was found
    next_key: bytes | None = None  # and of the first that was not


class Paged(KVManager):
    """KVManager, told of each request's lengths for its accounts only."""

    def __init__(
        self, num_blocks: int, block_size: int, *, copy_on_write: bool = True, prefix_caching: bool = True
    ) -> None:
        """copy_on_write False: a fork copies the block that it could write at once, where one is free."""
        super().__init__(num_blocks, block_size, prefix_caching=prefix_caching)
        self.copy_on_write = copy_on_write
        self.refused = 0
        self.fragmented = 0  # never: any block serves
        self._asked: dict[int, Asked] = {}
        self._finals: dict[int, int] = {}
        self._refusal: Refusal | None = None

    def expect(self, seq_id: int, asked: Asked) -> None:
        self._asked[seq_id], self._finals[seq_id] = asked, asked.final

    def can_ever_hold(self, asked: Asked) -> bool:
        return self.blocks_to_admit(asked.prompt, asked.sequences) <= self.pool.num_blocks

    def fits_no_hole(self, seq_id: int, num_tokens: int) -> bool:
        return False

    def admit(
        self,
        seq_id: int,
        tokens: Sequence[int],
        *,
        salt: bytes = b"",
        use_cache: bool = True,
        reserve: int = 0,
        keys: list[bytes] | None = None,
    ) -> Admission:
        """As KVManager's; refusals are counted. One that was refused is only looked at again when it may get on: the
        simulator asks a million times.
        """
        again = self._refusal
        if (
            again is not None
            and again.seq_id == seq_id
            and again.blocks + reserve > self.pool.available
            and (again.last_key is None or again.last_key in self.cache.blocks)
            and again.next_key not in self.cache.blocks
            and again.next_key not in self.in_flight
        ):
            self.refused += 1
            return Admission(Outcome.NO_SPACE)
        keys = [] if keys is None else keys
        admission = super().admit(seq_id, tokens, salt=salt, use_cache=use_cache, reserve=reserve, keys=keys)
        self._refusal = None
        if admission.outcome is Outcome.NO_SPACE:
            self.refused += 1
            self._refusal = self._why(seq_id, len(tokens), keys)
        return admission

    def _why(self, seq_id: int, num_tokens: int, keys: list[bytes]) -> Refusal:
        """keys: of the prompt's first blocks, as far as they were looked for."""
        blocks = self._blocks_of(num_tokens)
        found = next((index for index, key in enumerate(keys) if key not in self.cache.blocks), None)
        if found is None:  # it was not looked how much more there is
            return Refusal(seq_id, blocks - ((num_tokens - 1) // self.block_size if self.prefix_caching else 0))
        return Refusal(seq_id, blocks - found, keys[found - 1] if found else None, keys[found])

    def fork(self, parent_id: int, child_id: int, length: int | None = None) -> None:
        """As KVManager's; without copy-on-write the child's last block, if it is not full, is copied here."""
        super().fork(parent_id, child_id, length)
        self.expect(child_id, self._asked[parent_id])
        child = self.sequences[child_id]
        if not self.copy_on_write and child.length % self.block_size and self.pool.available:
            self._copy_on_write(child)
            child.writable_until = len(child.table) * self.block_size

    def account(self) -> Account:
        """O(sequences), and short: it runs every step."""
        size, finals = self.block_size, self._finals
        held = (self.pool.num_blocks - self.pool.available) * size
        empty = internal = 0
        ends: dict[int, list[tuple[int, int]]] = {}  # a block that several may share -> (computed, final) of each in it
        for seq_id, seq in self.sequences.items():
            capacity = len(seq.table) * size
            if seq.writable_until == capacity:  # from computed on, all of it is its own
                empty += capacity - seq.computed
                final = finals[seq_id]
                if final < capacity:
                    internal += capacity - final
            elif seq.computed % size:
                begin = capacity - size
                ends.setdefault(seq.table[-1], []).append((seq.computed - begin, min(finals[seq_id] - begin, size)))
        for block, sharers in ends.items():
            if block in self.cache.entries or self.pool.refs(block) > len(sharers):
                continue  # it is full, by another holder
            empty += size - max(computed for computed, _ in sharers)
            internal += size - max(final for _, final in sharers)
        return Account(held - empty, internal, empty - internal)

    def pieces(self) -> list[Piece]:
        """O(blocks)."""
        return merged(piece for report in self.snapshot() for piece in self._pieces_of(report))

    def _pieces_of(self, block: BlockReport) -> list[Piece]:
        size = self.block_size
        if block.state is BlockState.FREE or block.state is BlockState.CACHED:
            return [Piece(kind="free" if block.state is BlockState.FREE else "cached", slots=size, owner=-1)]
        places = {self._asked[seq_id].place for seq_id, _ in block.holders}
        owner = places.pop() if len(places) == 1 else -1
        used = max(min(size, self._finals[seq_id] - index * size) for seq_id, index in block.holders)
        used = max(used, block.filled)
        return [
            Piece(kind="shared" if block.refs > 1 else "stored", slots=block.filled, owner=owner),
            Piece(kind="reserved", slots=used - block.filled, owner=owner),
            Piece(kind="internal", slots=size - used, owner=owner),
        ]

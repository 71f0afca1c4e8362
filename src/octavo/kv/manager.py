"""The virtual memory of the KV cache: who holds which blocks, what is shared, what must be copied.

Knows sequences, token counts and block ids; never tensors, requests or devices, and a token's value only to find
its block again. It decides, the device executes: copies come out as `MemoryOps`, to be done before the next forward.

A sequence *claims* slots (`length`), the forward pass fills them, `commit` says so (`computed`). Only what is computed
is ever shared, and nothing shared or published is ever written: the first to write such a block copies it.
A published block stands in every table right after the block its prefix ends in, and tables are released from tail to
head; so the cache is reclaimed leaves first, and what is found is found whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from octavo.kv.block_pool import BlockPool
from octavo.kv.block_table import BlockTable
from octavo.kv.errors import BadSequence, BadSize, UnknownPin, UnknownSequence
from octavo.kv.integrity import check
from octavo.kv.memory_ops import Kind, MemoryOps
from octavo.kv.prefix_cache import Entry, PrefixCache
from octavo.kv.report import BlockReport, Usage, snapshot, usage


class Outcome(Enum):
    """What became of an admission."""

    ADMITTED = "admitted"
    NO_SPACE = "no space"  # too few blocks are available now
    WAIT = "wait"  # a running sequence is computing the next block of this prefix: ask again, and share it


class Admission(NamedTuple):
    """The answer to `admit`; `cached_tokens` of the prompt are computed already, always fewer than all."""

    outcome: Outcome
    cached_tokens: int = 0
    awaited: bytes | None = None  # to WAIT for: asking is in vain while this key is in flight


class Pin(NamedTuple):
    """A pinned prefix: the id to unpin it with, and the tokens it covers (whole blocks; 0 if none was cached)."""

    id: int
    tokens: int


@dataclass(slots=True)
class SequenceState:
    """One sequence's memory. In `KVManager.swapped` its table maps to host blocks, else to device blocks."""

    id: int
    salt: bytes
    table: BlockTable
    length: int  # slots claimed
    computed: int  # tokens whose KV is written
    writable_until: int  # positions from length up to here can be claimed with neither page fault nor copy
    findable: bool  # every full computed block of it is published; False: none is published from here on
    keys: list[bytes]  # chain keys of its first full blocks: the prompt's, then those published
    saved: list[bytes] = field(default_factory=list)  # swapped out: packed tokens of the blocks that were published


class _Residents(dict[int, SequenceState]):
    """Sequences by id; an id that is missing is an error with a name."""

    def __missing__(self, seq_id: int) -> SequenceState:
        raise UnknownSequence(
            f"Sequence {seq_id} holds no device memory: it was not admitted, or freed or swapped out."
        )


class KVManager:
    """Block tables of all sequences over one device pool and one host pool.

    Sequence ids are the caller's. Every operation on one token or one block is O(1); those that raise, return False
    or do not admit have changed nothing. All attributes are for reading only.
    """

    def __init__(
        self, num_blocks: int, block_size: int = 16, *, num_host_blocks: int = 0, prefix_caching: bool = True
    ) -> None:
        """Device and host pool sizes in blocks of `block_size` tokens; raises BadSize."""
        if num_blocks < 1 or block_size < 1:
            raise BadSize(f"{num_blocks} blocks of {block_size} tokens hold nothing; both must be at least 1.")
        if num_blocks * block_size >= 2**31:
            raise BadSize(f"{num_blocks} blocks of {block_size} tokens have more slots than int32 can number (2**31).")
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.cache = PrefixCache(block_size)
        self.pool = BlockPool(num_blocks, self._evict)
        self.host = BlockPool(num_host_blocks, lambda block: None)
        self.sequences: dict[int, SequenceState] = _Residents()
        self.swapped: dict[int, SequenceState] = {}
        self.in_flight: dict[bytes, int] = {}  # key of a prompt's block not yet computed -> sequence computing it
        self.pins: dict[int, list[int]] = {}  # pin id -> blocks
        self.pinned: dict[int, int] = {}  # block -> pins that hold it
        self.moved = dict.fromkeys(Kind, 0)  # blocks copied and swapped so far
        self.on_evict: Callable[[int], None] | None = None  # told of each CACHED block that is reclaimed
        self.pending = MemoryOps()
        self._changed: set[int] = set()
        self._next_pin = 0

    # --- what a sequence has ---------------------------------------------------------------------------------------
    def table(self, seq_id: int) -> BlockTable:
        """The sequence's block table (another object after a swap); raises UnknownSequence."""
        return self.sequences[seq_id].table

    def length(self, seq_id: int) -> int:
        """Tokens it has slots for, swapped out or not; raises UnknownSequence."""
        return (self.swapped.get(seq_id) or self.sequences[seq_id]).length

    def computed(self, seq_id: int) -> int:
        """Tokens whose KV is written, swapped out or not; raises UnknownSequence."""
        return (self.swapped.get(seq_id) or self.sequences[seq_id]).computed

    # --- admission -------------------------------------------------------------------------------------------------
    def blocks_to_admit(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Blocks of a prompt forked into so many sequences that each write one more token.

        All but one of them need a block of their own for it: a copy of the prompt's last one, or a new one.
        """
        return num_tokens // self.block_size + num_sequences

    @property
    def usable_blocks(self) -> int:
        """Blocks that are not pinned: the most that requests can ever have."""
        return self.pool.num_blocks - len(self.pinned)

    def can_ever_fit(self, tokens: Sequence[int], num_sequences: int = 1, salt: bytes = b"") -> bool:
        """Whether `blocks_to_admit` blocks exist at all. If not, the request would wait for ever.

        Blocks that are pinned serve those only who begin with what they hold.
        """
        need = self.blocks_to_admit(len(tokens), num_sequences)
        if need <= self.usable_blocks or not self.pinned:
            return need <= self.usable_blocks
        found = self.cache.match(tokens, salt, (len(tokens) - 1) // self.block_size, [])
        return need <= self.usable_blocks + sum(block in self.pinned for block in found)

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
        """Claims slots for all of a prompt, on published blocks where its prefix has some (if `use_cache`).

        At least one token is left to compute, whose logits give the next. `reserve` blocks must stay available after
        it, or there is no space. `keys` are the chain keys of a beginning of `tokens` with this salt, where the caller
        keeps them: they are extended, so that a prompt that has to ask every step is hashed once. Raises BadSequence
        for an id in use or a prompt that is empty or not int32.
        """
        self._require_new(seq_id)
        if len(tokens) == 0:
            raise BadSequence(f"Sequence {seq_id} has no tokens; a prompt has at least one.")
        keys = [] if keys is None else keys
        search = use_cache and self.prefix_caching
        limit = (len(tokens) - 1) // self.block_size if search else 0
        if self._blocks_of(len(tokens)) - limit + reserve > self.pool.available:
            return Admission(Outcome.NO_SPACE)  # not even if all of it were found
        hits = self.cache.match(tokens, salt, limit, keys)
        if len(hits) < limit and keys[len(hits)] in self.in_flight:
            return Admission(Outcome.WAIT, awaited=keys[len(hits)])
        fresh = self._blocks_of(len(tokens)) - len(hits)
        revived = sum(self.pool.refs(block) == 0 for block in hits)  # available now, but about to be read
        if fresh + revived + reserve > self.pool.available:
            return Admission(Outcome.NO_SPACE)
        if self.prefix_caching:
            self.cache.extend_keys(keys, tokens, salt, len(tokens) // self.block_size)
        keys = keys[: len(tokens) // self.block_size]
        cached = len(hits) * self.block_size
        if search:
            self.cache.lookup_tokens += len(tokens)
            self.cache.hit_tokens += cached
        for block in hits:  # before any is allocated, lest these be reclaimed
            self.pool.reference(block)
        table = BlockTable(self.block_size, hits + [self.pool.allocate() for _ in range(fresh)])
        for key in keys[len(hits) :]:
            self.in_flight.setdefault(key, seq_id)
        capacity = len(table) * self.block_size
        self._enter(SequenceState(seq_id, salt, table, len(tokens), cached, capacity, self.prefix_caching, keys))
        return Admission(Outcome.ADMITTED, cached)

    # --- growth ----------------------------------------------------------------------------------------------------
    def grow(self, seq_id: int, count: int = 1) -> bool:
        """Claims slots for `count` more tokens; False if blocks lack. Raises UnknownSequence or BadSequence."""
        seq = self.sequences[seq_id]
        end = seq.length + count
        if seq.length <= end <= seq.writable_until:
            seq.length = end
            return True
        return self._page_fault(seq, end)

    def _page_fault(self, seq: SequenceState, end: int) -> bool:
        if end < seq.length:
            raise BadSequence(f"Sequence {seq.id} cannot grow by {end - seq.length} tokens; a sequence never shrinks.")
        partial = seq.length < len(seq.table) * self.block_size
        copy = partial and not self._is_own(seq.table[-1])
        fresh = self._blocks_of(end) - len(seq.table)
        if copy + fresh > self.pool.available:
            return False
        if copy:
            self._copy_on_write(seq)
        for _ in range(fresh):
            seq.table.append(self.pool.allocate())
        if copy or fresh:
            self._changed.add(seq.id)
        seq.length = end
        seq.writable_until = len(seq.table) * self.block_size
        return True

    def _copy_on_write(self, seq: SequenceState) -> None:
        shared, own = seq.table[-1], self.pool.allocate()
        self._move(Kind.COPY, shared, own)
        seq.table.replace(-1, own)
        self._release([shared])

    def _evict(self, block: int) -> None:
        self.cache.forget(block)
        if self.on_evict is not None:
            self.on_evict(block)

    def _is_own(self, block: int) -> bool:
        """Whether its one holder may write it: what is published is never written, though nobody else reads it now."""
        return self.pool.refs(block) == 1 and block not in self.cache.entries

    def commit(self, seq_id: int, count: int, tokens: Sequence[int]) -> None:
        """The forward pass has written the KV of `count` more tokens; blocks filled by them are published.

        `tokens` are all of the sequence's, and are read where a block was filled. Raises UnknownSequence, or
        BadSequence for more tokens than were claimed.
        """
        seq = self.sequences[seq_id]
        end = seq.computed + count
        if not seq.computed <= end <= seq.length:
            raise BadSequence(f"Sequence {seq_id} has {seq.length} slots, {seq.computed} written: not {count} more.")
        if end % self.block_size < count and seq.findable:  # some of these tokens was the last of its block
            self._publish(seq, end // self.block_size, tokens)
        seq.computed = end

    def _publish(self, seq: SequenceState, stop: int, tokens: Sequence[int]) -> None:
        """Publishes the blocks computed up to logical block `stop`, or shares the block that has the same already."""
        start = seq.computed // self.block_size
        for index, packed in enumerate([self.cache.pack(tokens, index) for index in range(start, stop)], start):
            if index == len(seq.keys):
                seq.keys.append(self.cache.key(seq.keys[-1] if index else None, packed, seq.salt))
            self._land(seq, index)
            if not self._publish_block(seq, index, packed):
                self._stop_publishing(seq)
                return

    def _publish_block(self, seq: SequenceState, index: int, packed: bytes) -> bool:
        """Publishes a computed block, or takes its published twin instead; False if its key collides with another's."""
        own = seq.table[index]
        entry = Entry(seq.keys[index], seq.table[index - 1] if index else seq.salt, packed)
        twin = self.cache.find(entry)
        if twin is None:
            return self.cache.publish(own, entry)
        if twin != own:
            self.pool.reference(twin)
            self.pool.release(own, keep=False)
            seq.table.replace(index, twin)
            self._changed.add(seq.id)
        return True

    def _stop_publishing(self, seq: SequenceState) -> None:
        """What follows a block that is not published is not either: its chain would hang in the air."""
        seq.findable = False
        for index in range(seq.computed // self.block_size, len(seq.keys)):
            self._land(seq, index)

    def _land(self, seq: SequenceState, index: int) -> None:
        """Nobody need wait for the sequence to compute this block: it has, or it will not."""
        if self.in_flight.get(seq.keys[index]) == seq.id:
            del self.in_flight[seq.keys[index]]

    # --- sharing and leaving ---------------------------------------------------------------------------------------
    def fork(self, parent_id: int, child_id: int, length: int | None = None) -> None:
        """A child that shares the blocks of the parent's first `length` tokens (None: all).

        Raises UnknownSequence, or BadSequence for a parent not fully computed, a child id in use or a length beyond.
        """
        parent = self.sequences[parent_id]
        length = parent.length if length is None else length
        self._require_new(child_id)
        if parent.computed != parent.length:
            raise BadSequence(f"Sequence {parent_id} has computed {parent.computed} of {parent.length}; fork it after.")
        if not 0 < length <= parent.length:
            raise BadSequence(f"Sequence {parent_id} has {parent.length} tokens; a fork takes 1 to all, not {length}.")
        blocks = parent.table.array[: self._blocks_of(length)].tolist()
        for block in blocks:
            self.pool.reference(block)
        if len(blocks) == len(parent.table):
            parent.writable_until = parent.length
        table = BlockTable(self.block_size, blocks)
        keys = parent.keys[: length // self.block_size]
        self._enter(SequenceState(child_id, parent.salt, table, length, length, length, parent.findable, keys))

    def free(self, seq_id: int) -> None:
        """Gives back all the sequence holds, at any moment, swapped out or not; raises UnknownSequence."""
        if seq_id in self.swapped:
            self._release_host(self.swapped.pop(seq_id).table.array.tolist())
        else:
            self._leave(self.sequences[seq_id])

    def _require_new(self, seq_id: int) -> None:
        if seq_id in self.sequences or seq_id in self.swapped:
            raise BadSequence(f"Sequence {seq_id} exists already; free it first or take another id.")

    def _enter(self, seq: SequenceState) -> None:
        self.sequences[seq.id] = seq
        self._changed.add(seq.id)

    def _leave(self, seq: SequenceState) -> None:
        for index in range(seq.computed // self.block_size, len(seq.keys)):
            self._land(seq, index)
        self._release(seq.table.array.tolist())
        self._changed.discard(seq.id)
        del self.sequences[seq.id]

    def _release(self, blocks: list[int]) -> None:
        """From tail to head, so that a chain's end is reclaimed before its beginning."""
        for block in reversed(blocks):
            self.pool.release(block, keep=block in self.cache.entries)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- swapping --------------------------------------------------------------------------------------------------
    def swap_out(self, seq_ids: Iterable[int]) -> bool:
        """Moves the computed tokens of these sequences to the host, each block once; slots not computed are dropped.

        False if the host lacks blocks. Raises UnknownSequence, or BadSequence for an id given twice.
        """
        seqs = self._group(seq_ids, self.sequences)
        tables = [seq.table.array[: self._blocks_of(seq.computed)].tolist() for seq in seqs]
        blocks = dict.fromkeys(block for table in tables for block in table)
        if len(blocks) > self.host.available:
            return False
        place = {block: self.host.allocate() for block in blocks}  # held once more until the tables hold them
        for block, host in place.items():
            self._move(Kind.SWAP_OUT, block, host)
        for seq, table in zip(seqs, tables, strict=True):
            full = table[: seq.computed // self.block_size]
            seq.saved = [self.cache.entries[block].tokens for block in full] if seq.findable else []
            self._leave(seq)
            del seq.keys[len(full) :]  # of tokens dropped, in whose place others may come
            seq.table = BlockTable(self.block_size, [place[block] for block in table])
            for host in seq.table.array.tolist():
                self.host.reference(host)
            seq.length = seq.writable_until = seq.computed
            self.swapped[seq.id] = seq
        self._release_host(list(place.values()))
        return True

    def blocks_to_swap_in(self, seq_ids: Iterable[int]) -> int:
        """Available blocks that `swap_in` takes; raises UnknownSequence or BadSequence."""
        seqs = self._group(seq_ids, self.swapped)
        return self._room_to_return(seqs, self._still_published(seqs))

    def swap_in(self, seq_ids: Iterable[int], *, reserve: int = 0) -> bool:
        """Brings these sequences back, sharing kept, on blocks still published on the device where there are some.

        False if blocks lack, `reserve` of which must stay available. Raises UnknownSequence, or BadSequence for an id
        given twice.
        """
        seqs = self._group(seq_ids, self.swapped)
        place = self._still_published(seqs)
        if self._room_to_return(seqs, place) + reserve > self.pool.available:
            return False
        for block in place.values():  # all held once more until the tables hold them
            self.pool.reference(block)
        for host in dict.fromkeys(host for seq in seqs for host in seq.table.array.tolist()):
            if host not in place:
                place[host] = self.pool.allocate()
                self._move(Kind.SWAP_IN, host, place[host])
        for seq in seqs:
            self._return(seq, [place[host] for host in seq.table.array.tolist()])
        self._release(list(place.values()))
        return True

    def _return(self, seq: SequenceState, blocks: list[int]) -> None:
        for block in blocks:
            self.pool.reference(block)
        self._release_host(seq.table.array.tolist())
        seq.table = BlockTable(self.block_size, blocks)
        seq.findable = seq.findable and all(self._publish_block(seq, *block) for block in enumerate(seq.saved))
        seq.saved = []
        del self.swapped[seq.id]
        self._enter(seq)

    def _still_published(self, seqs: list[SequenceState]) -> dict[int, int]:
        """Host block -> device block that holds the same and can be shared instead of copied."""
        place: dict[int, int] = {}
        for seq in seqs:
            before: int | bytes = seq.salt
            for key, packed, host in zip(seq.keys, seq.saved, seq.table.array.tolist(), strict=False):
                block = self.cache.find(Entry(key, before, packed))
                if block is None:
                    break
                place[host] = before = block
        return place

    def _room_to_return(self, seqs: list[SequenceState], place: dict[int, int]) -> int:
        hosts = {host for seq in seqs for host in seq.table.array.tolist()}
        revived = sum(self.pool.refs(block) == 0 for block in set(place.values()))
        return len(hosts) - len(place) + revived

    def _group(self, seq_ids: Iterable[int], where: dict[int, SequenceState]) -> list[SequenceState]:
        ids = list(seq_ids)
        if len(set(ids)) < len(ids):
            raise BadSequence(f"The sequences {ids} are not distinct.")
        for seq_id in ids:
            if seq_id not in where:
                state = "swapped out" if where is self.swapped else "on the device"
                raise UnknownSequence(f"Sequence {seq_id} is not {state}.")
        return [where[seq_id] for seq_id in ids]

    def _release_host(self, blocks: list[int]) -> None:
        for block in blocks:
            self.host.release(block, keep=False)

    def _move(self, kind: Kind, source: int, target: int) -> None:
        self.pending.add(kind, source, target)
        self.moved[kind] += 1

    # --- the prefix cache ------------------------------------------------------------------------------------------
    def pin(self, tokens: Sequence[int], salt: bytes = b"") -> Pin:
        """Keeps the published blocks of this prefix from being reclaimed, until `unpin`."""
        blocks = self.cache.match(tokens, salt, len(tokens) // self.block_size, [])
        for block in blocks:
            self.pool.reference(block)
            self.pinned[block] = self.pinned.get(block, 0) + 1
        self._next_pin += 1
        self.pins[self._next_pin] = blocks
        return Pin(self._next_pin, len(blocks) * self.block_size)

    def unpin(self, pin_id: int) -> None:
        """Ends a pin; raises UnknownPin."""
        if pin_id not in self.pins:
            raise UnknownPin(f"Pin {pin_id} does not exist, or was unpinned before.")
        self._unpin(self.pins.pop(pin_id))

    def _unpin(self, blocks: list[int]) -> None:
        for block in blocks:
            self.pinned[block] -= 1
            if not self.pinned[block]:
                del self.pinned[block]
        self._release(blocks)

    @property
    def num_pinned_blocks(self) -> int:
        """Distinct blocks held by pins."""
        return len(self.pinned)

    def reset_prefix_cache(self) -> None:
        """Forgets every prefix: CACHED blocks become FREE, pins hold nothing more, what runs now is never published."""
        self.cache.clear()
        for seq in self.sequences.values():
            self._stop_publishing(seq)
        for seq in self.swapped.values():
            seq.findable, seq.saved = False, []
        for blocks in self.pins.values():
            self._unpin(blocks)
            blocks.clear()
        self.pool.drop_cached()

    # --- what the runner takes, what people look at ----------------------------------------------------------------
    def take_ops(self) -> MemoryOps:
        """The copies decided since the last call, to be executed before the next forward pass."""
        taken, self.pending = self.pending, MemoryOps()
        return taken

    def take_changed(self) -> set[int]:
        """Ids of the running sequences whose block tables changed since the last call."""
        taken, self._changed = self._changed, set()
        return taken

    def usage(self) -> Usage:
        """Counters of now; O(sequences)."""
        return usage(self)

    def snapshot(self) -> list[BlockReport]:
        """Every device block, by id: what it is, who holds it, why it is kept; O(blocks)."""
        return snapshot(self)

    def check(self) -> None:
        """Proves the invariants; raises BrokenInvariant with the first that fails. O(blocks)."""
        check(self)

"""Memory before paging: each sequence has slots of its own, in runs of consecutive blocks, and shares none.

One manager for all of them, since they differ in two things only: how much a sequence is given at first, and what
happens when that is full. A run is described by an ordinary block table, so that the same kernels read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.kv.block_table import BlockTable
from octavo.kv.errors import BadSequence, BrokenInvariant, OutOfBlocks, UnknownSequence
from octavo.kv.manager import Admission, Outcome
from octavo.kv.memory_ops import Kind, MemoryOps
from octavo.kv.report import Usage
from octavo.lab.arena import Arena
from octavo.lab.memory import Account, Asked, merged
from octavo.lab.results import Piece

Run = tuple[int, int]  # (first block, blocks)


@dataclass(slots=True, eq=False)
class Region:
    """One sequence's memory."""

    asked: Asked
    table: BlockTable
    runs: list[Run]
    length: int  # slots claimed
    computed: int  # tokens whose KV is written
    capacity: int  # slots held


@dataclass(slots=True)
class Claim:
    """What a request holds beside its sequences' regions: runs for sequences that are to be forked yet."""

    runs: list[Run] = field(default_factory=list)
    pending: int = 0  # forks
    live: int = 0  # sequences with a region


class Blocks:
    """The arena's blocks, counted as the engine counts a BlockPool's."""

    num_shared = num_cached = evictions = 0

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def num_blocks(self) -> int:
        return self._arena.size

    @property
    def available(self) -> int:
        return self._arena.free

    num_free = available

    @property
    def num_active(self) -> int:
        return self._arena.size - self._arena.free


class Regions:
    """A memory manager whose sequences share nothing. Each method as KVManager has it, but for what is said here."""

    num_pinned_blocks = 0

    def __init__(
        self,
        arena: Arena,
        block_size: int,
        max_model_len: int,
        *,
        reserve: Callable[[Asked], int] | None = None,
        unit: int | None = None,
    ) -> None:
        """reserve: slots that each sequence of a request is given for good; None: as many as it has tokens, and more
        when they are full: a run twice as long (unit None), or further runs of `unit` blocks.
        """
        self.arena, self.block_size = arena, block_size
        self.pool = Blocks(arena)
        self.refused = 0
        self.fragmented = 0
        self.moved = dict.fromkeys(Kind, 0)
        self.sequences: dict[int, Region] = {}
        self.in_flight: dict[bytes, int] = {}  # nobody waits for another's blocks
        self._reserve, self._unit = reserve, unit
        self._longest = -(-max_model_len // block_size)  # blocks
        self._asked: dict[int, Asked] = {}
        self._claims: dict[Asked, Claim] = {}
        self._refusal = self._tried = (-1, -1)  # the sequence that last found no room, and the arena's changes then
        self._tears = False  # whether the sequence tried last would have fitted, were all that is free one hole
        self._torn: set[int] = set()  # sequences that wait, and were counted as fragmented
        self._pending = MemoryOps()
        self._changed: set[int] = set()

    # --- admission ------------------------------------------------------------------------------------------------

    @property
    def usable_blocks(self) -> int:
        return self.arena.size

    def expect(self, seq_id: int, asked: Asked) -> None:
        self._asked[seq_id] = asked

    def table(self, seq_id: int) -> BlockTable:
        return self._region(seq_id).table

    def blocks_to_admit(self, num_tokens: int, num_sequences: int = 1) -> int:
        return num_sequences * -(-num_tokens // self.block_size)

    def can_ever_fit(self, tokens: Sequence[int], num_sequences: int = 1, salt: bytes = b"") -> bool:
        return self.blocks_to_admit(len(tokens), num_sequences) <= self.arena.size

    def can_ever_hold(self, asked: Asked) -> bool:
        each = sum(self._counts(asked, asked.prompt))
        return asked.sequences * each <= self.arena.size

    def fits_no_hole(self, seq_id: int, num_tokens: int) -> bool:
        """Whether a sequence that waits would be admitted if all that is free were one hole."""
        if self._tried != (seq_id, self.arena.changes):
            self._tried = seq_id, self.arena.changes
            counts = self._all_counts(self._asked[seq_id], num_tokens)
            self._tears = False
            if sum(counts) <= self.arena.free:
                runs = self.arena.take_all(counts)
                self._give(runs or [])
                self._tears = runs is None
                self._tried = seq_id, self.arena.changes
        return self._tears

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
        """Takes what the sequence and those that are to be forked from it begin with: a fork must not fail."""
        if seq_id in self.sequences:
            raise BadSequence(f"Sequence {seq_id} exists already; free it first or take another id.")
        if self._refusal == (seq_id, self.arena.changes):
            self.refused += 1
            return Admission(Outcome.NO_SPACE)
        asked = self._asked[seq_id]
        counts = self._all_counts(asked, len(tokens))
        needed = sum(counts) + (reserve if self._reserve is None else 0)
        runs = self.arena.take_all(counts) if needed <= self.arena.free else None
        if runs is None:
            self.refused += 1
            if needed <= self.arena.free and seq_id not in self._torn:
                self._torn.add(seq_id)
                self.fragmented += 1
            if self._reserve is not None:  # else it depends on how many blocks are to stay free, too
                self._refusal = seq_id, self.arena.changes
            return Admission(Outcome.NO_SPACE)
        self._torn.discard(seq_id)
        own = len(self._counts(asked, len(tokens)))
        self._claims[asked] = Claim(runs[own:], len(asked.others()))
        self._enter(seq_id, asked, runs[:own], len(tokens), 0)
        return Admission(Outcome.ADMITTED)

    def _counts(self, asked: Asked, num_tokens: int) -> list[int]:
        """Blocks of the runs that a sequence of so many tokens begins with."""
        if self._reserve is not None:
            return [self._blocks_of(max(num_tokens, self._reserve(asked)))]
        blocks = self._blocks_of(num_tokens)
        return [blocks] if self._unit is None else [self._unit] * -(-blocks // self._unit)

    def _all_counts(self, asked: Asked, num_tokens: int) -> list[int]:
        """The same, with the sequences that are to follow."""
        tokens = [num_tokens, *asked.others()]
        return [count for each in tokens for count in self._counts(asked, each)]

    def _enter(self, seq_id: int, asked: Asked, runs: list[Run], length: int, computed: int) -> None:
        blocks = _blocks(runs)
        table = BlockTable(self.block_size, blocks[: self._longest])
        capacity = len(blocks) * self.block_size
        self.sequences[seq_id] = Region(asked, table, runs, length, computed, capacity)
        self._claims[asked].live += 1
        self._changed.add(seq_id)

    # --- growth ---------------------------------------------------------------------------------------------------

    def grow(self, seq_id: int, count: int = 1) -> bool:
        region = self._region(seq_id)
        end = region.length + count
        if end > region.capacity and not self._enlarge(seq_id, region, self._blocks_of(end)):
            return False
        region.length = end
        return True

    def _enlarge(self, seq_id: int, region: Region, blocks: int) -> bool:
        """Give a full region room for so many blocks in all."""
        if self._reserve is not None:
            return False
        grown = self._double(region, blocks) if self._unit is None else self._append(region, blocks, self._unit)
        if grown:
            self._changed.add(seq_id)
            all_blocks = _blocks(region.runs)
            region.capacity = len(all_blocks) * self.block_size
            region.table = BlockTable(self.block_size, all_blocks[: self._longest])
        return grown

    def _append(self, region: Region, blocks: int, unit: int) -> bool:
        held = sum(count for _, count in region.runs)
        runs = self.arena.take_all([unit] * -(-(blocks - held) // unit))
        region.runs += runs or []
        return runs is not None

    def _double(self, region: Region, blocks: int) -> bool:
        """Twice the room where it stands, or elsewhere with a copy of all; if neither can be had, what is needed."""
        start, held = region.runs[0]
        wanted = max(blocks, min(2 * held, self._longest))
        if self.arena.extend(start + held, wanted - held):
            region.runs[0] = start, wanted
            return True
        moved = self.arena.take(wanted)
        if moved is not None:
            self._copy(region.table, range(moved, moved + self._blocks_of(region.length)))
            self.arena.give(start, held)
            region.runs[0] = moved, wanted
            return True
        if self.arena.extend(start + held, blocks - held):
            region.runs[0] = start, blocks
            return True
        self.fragmented += wanted <= self.arena.free
        return False

    def commit(self, seq_id: int, count: int, tokens: Sequence[int]) -> None:
        region = self._region(seq_id)
        if region.computed + count > region.length:
            raise BadSequence(
                f"Sequence {seq_id} has {region.length} slots, {region.computed} written: not {count} more."
            )
        region.computed += count

    # --- forking and leaving --------------------------------------------------------------------------------------

    def fork(self, parent_id: int, child_id: int, length: int | None = None) -> None:
        """A child with a copy of the parent's first `length` tokens, in a region of its own.

        Raises OutOfBlocks if it was not foreseen when the request was admitted, and there is no room.
        """
        parent = self._region(parent_id)
        length = parent.length if length is None else length
        if parent.computed != parent.length or not 0 < length <= parent.length:
            raise BadSequence(f"Sequence {parent_id} has computed {parent.computed} of {parent.length}; fork it after.")
        runs = self._claimed(parent.asked, length)
        self.expect(child_id, parent.asked)
        self._enter(child_id, parent.asked, runs, length, length)
        self._copy(parent.table, _blocks(runs)[: self._blocks_of(length)])

    def _claimed(self, asked: Asked, length: int) -> list[Run]:
        claim = self._claims[asked]
        if claim.pending == 0:
            runs = self.arena.take_all(self._counts(asked, length))
            if runs is None:
                raise OutOfBlocks(f"A fork of {length} tokens finds no room, and none was claimed for it.")
            return runs
        claim.pending -= 1
        if self._unit is None:  # the smallest that will do: thus all find one, in whatever order they come
            taken = [min((run for run in claim.runs if run[1] >= self._blocks_of(length)), key=lambda run: run[1])]
        else:
            taken = claim.runs[: len(self._counts(asked, length))]
        claim.runs = [run for run in claim.runs if run not in taken]
        if claim.pending == 0:
            self._give(claim.runs)
            claim.runs = []
        return taken

    def free(self, seq_id: int) -> None:
        """A beam's region stays with its request, for the beam that is forked in its place."""
        region = self._region(seq_id)
        del self.sequences[seq_id]
        self._changed.discard(seq_id)
        claim = self._claims[region.asked]
        claim.live -= 1
        if region.asked.beams and claim.live > 0:
            claim.runs += region.runs
            claim.pending += 1
            return
        self._give(region.runs)
        if claim.live == 0:
            self._give(claim.runs)
            del self._claims[region.asked]

    def _give(self, runs: Iterable[Run]) -> None:
        for start, count in runs:
            self.arena.give(start, count)

    def _copy(self, source: BlockTable, targets: Sequence[int]) -> None:
        for old, new in zip(source.array[: len(targets)].tolist(), targets, strict=True):
            self._pending.add(Kind.COPY, old, new)
        self.moved[Kind.COPY] += len(targets)

    def _region(self, seq_id: int) -> Region:
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise UnknownSequence(f"Sequence {seq_id} holds no memory: it was not admitted, or freed.") from None

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- what there was none of before paging ---------------------------------------------------------------------

    def swap_out(self, seq_ids: Iterable[int]) -> bool:
        return False

    def swap_in(self, seq_ids: Iterable[int], *, reserve: int = 0) -> bool:
        return False

    def reset_prefix_cache(self) -> None:
        """There is none."""

    # --- what the runner takes, what people look at -----------------------------------------------------------------

    def take_ops(self) -> MemoryOps:
        taken, self._pending = self._pending, MemoryOps()
        return taken

    def take_changed(self) -> set[int]:
        taken, self._changed = self._changed, set()
        return taken

    def account(self) -> Account:
        """O(sequences), and short: it runs every step."""
        stored = internal = reserved = 0
        for region in self.sequences.values():
            asked = region.asked
            used = min(asked.prompt + asked.output - 1, region.capacity)
            stored += region.computed
            reserved += used - region.computed
            internal += region.capacity - used
        for asked, claim in self._claims.items():
            if claim.runs:
                slots = sum(count for _, count in claim.runs) * self.block_size
                used = min(slots, claim.pending * asked.final)
                reserved += used
                internal += slots - used
        return Account(stored, internal, reserved)

    def pieces(self) -> list[Piece]:
        """O(sequences + holes)."""
        size = self.block_size
        found: list[tuple[int, list[Piece]]] = []  # by the first block
        for start, count in self.arena.holes:
            found.append((start, [Piece(kind="free", slots=count * size, owner=-1)]))
        for asked, claim in self._claims.items():
            left = claim.pending * asked.final
            for start, count in claim.runs:
                used = min(left, count * size)
                left -= used
                reserved = Piece(kind="reserved", slots=used, owner=asked.place)
                found.append((start, [reserved, Piece(kind="internal", slots=count * size - used, owner=asked.place)]))
        for region in self.sequences.values():
            begin = 0  # the position of the run's first slot
            for start, count in region.runs:
                found.append((start, _run_pieces(region, begin, begin + count * size)))
                begin += count * size
        return merged(piece for _, pieces in sorted(found, key=lambda entry: entry[0]) for piece in pieces)

    def usage(self) -> Usage:
        """Counters of now."""
        account, arena = self.account(), self.arena
        return Usage(
            num_blocks=arena.size,
            free=arena.free,
            cached=0,
            active=arena.size - arena.free,
            shared=0,
            pinned=0,
            host_blocks=0,
            host_used=0,
            tokens_stored=account.stored,
            slots_held=(arena.size - arena.free) * self.block_size,
            hit_tokens=0,
            lookup_tokens=0,
            copies=self.moved[Kind.COPY],
            evictions=0,
            swapped_out=0,
            swapped_in=0,
        )

    def check(self) -> None:
        """Holes and runs share out the arena, and tables say what the runs are; raises BrokenInvariant. O(blocks)."""
        self.arena.check()
        held = [run for region in self.sequences.values() for run in region.runs]
        held += [run for claim in self._claims.values() for run in claim.runs]
        blocks = sorted(_blocks([*held, *self.arena.holes]))
        if blocks != list(range(self.arena.size)):
            raise BrokenInvariant(
                f"Runs {held} and holes {self.arena.holes} do not share out {self.arena.size} blocks."
            )
        for seq_id, region in self.sequences.items():
            whole = _blocks(region.runs)
            if region.table.array.tolist() != whole[: self._longest]:
                raise BrokenInvariant(f"Sequence {seq_id} has the runs {region.runs}, but another table.")
            if not region.computed <= region.length <= region.capacity == len(whole) * self.block_size:
                raise BrokenInvariant(
                    f"Sequence {seq_id} has {region.computed} of {region.length} in {region.capacity}."
                )
        live = {asked: claim.live for asked, claim in self._claims.items()}
        counted = dict.fromkeys(live, 0)
        for region in self.sequences.values():
            counted[region.asked] += 1
        if live != counted:
            raise BrokenInvariant("A request counts other sequences than it has.")


def _blocks(runs: Iterable[Run]) -> list[int]:
    return [block for start, count in runs for block in range(start, start + count)]


def _run_pieces(region: Region, begin: int, end: int) -> list[Piece]:
    """Positions `begin` to `end` of a region, by what they are held for."""
    stored = min(max(region.computed, begin), end)
    used = min(max(region.asked.final, stored), end)
    owner = region.asked.place
    return [
        Piece(kind="stored", slots=stored - begin, owner=owner),
        Piece(kind="reserved", slots=used - stored, owner=owner),
        Piece(kind="internal", slots=end - used, owner=owner),
    ]

"""What can be seen of paged memory, as plain data taken from the engine between two steps. Knows no HTTP, no text.

All of it runs on the engine's thread and changes nothing but its own notes. A `MemoryWatch` exists only while somebody
looks; it notes the events of every step, and is asked for a `Sample` a few times a second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.engine import Engine
from octavo.engine.report import StepRecord
from octavo.engine.request import Request, Sequence, State
from octavo.kv.manager import KVManager, SequenceState
from octavo.kv.memory_ops import Kind
from octavo.kv.prefix_cache import Entry
from octavo.kv.report import cells, host_cells
from octavo.params import BeamParams

Cells = NDArray[np.uint32]  # one number a block: see `octavo.kv.report.cells`
Event = dict[str, Any]

MOST_EVENTS = 400  # kept between two samples; of more, the oldest are dropped and counted
ROW_INTERVAL = 0.2  # seconds between two lists of requests: they are dearer than the blocks, and read by people
MOST_REQUESTS = 32  # listed in a sample: those that run first, in order


class Unknown(Exception):  # noqa: N818 (it is an answer)
    """There is no such block or request (any more); the message says so in one sentence."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What does not change while the engine lives. Sizes in bytes, lengths in tokens."""

    num_blocks: int
    num_host_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    prefix_caching: bool

    @classmethod
    def of(cls, engine: Engine) -> Geometry:
        return cls(
            num_blocks=engine.kv.pool.num_blocks,
            num_host_blocks=engine.kv.host.num_blocks,
            block_size=engine.kv.block_size,
            block_bytes=engine.block_bytes,
            max_model_len=engine.limits.max_model_len,
            max_num_seqs=engine.limits.max_num_seqs,
            token_budget=engine.config.max_batched_tokens,
            prefix_caching=engine.kv.prefix_caching,
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """One moment in numbers: blocks now, requests now, speed since the last sample, counts since the engine began.

    `paged` and the two `contiguous` figures are blocks for the same running requests: what their tables hold, and what
    would be reserved for them in one piece each, at their own longest and at the model's. A request counts as many
    sequences as it runs, or will once its prompt is computed.
    """

    free: int
    cached: int
    active: int
    shared: int
    pinned: int
    host_used: int
    tokens_stored: int  # in held blocks, each once
    tokens_apart: int  # the same if no sequence shared its blocks with another
    utilisation: float  # of the slots in held blocks: the share that holds a token
    running: int
    sequences: int
    waiting: int
    swapped: int
    steps: int  # since the last sample
    prefill_rate: float  # tokens a second
    decode_rate: float
    step_seconds: float  # mean since the last sample
    paged: int
    contiguous_own: int
    contiguous_model: int
    copies: int
    evictions: int
    swapped_out: int
    swapped_in: int
    recomputed: int  # requests preempted so
    swap_preempted: int
    hit_tokens: int
    lookup_tokens: int


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request in a list."""

    id: str
    state: str  # waiting, swapped, running
    kind: str  # sampling, beam
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found when it was first admitted
    prefill_done: int  # of prefill_of tokens to be computed before it decodes (its prompt, or what a preemption lost)
    prefill_of: int
    output_tokens: int  # of its longest sequence
    most_tokens: int  # its answer can have
    sequences: int
    logical_blocks: int  # entries in its tables
    blocks: int  # physical blocks in its tables, each once
    shared_blocks: int  # of those, held more than once
    preemptions: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one moment, what changed since the sample before, and what happened in between."""

    number: int
    time: float  # seconds of time.perf_counter()
    geometry: Geometry
    cells: Cells
    host: Cells
    changed: NDArray[np.int64]  # blocks whose cell differs from the sample before
    host_changed: NDArray[np.int64]
    events: list[Event]
    dropped: int  # events that did not fit
    figures: Figures
    listed: bool  # whether `requests` is of this moment, or of a sample shortly before
    requests: list[RequestRow]
    more_requests: int  # not listed


@dataclass(slots=True)
class _Tally:
    """Added up over the steps between two samples."""

    since: float
    steps: int = 0
    seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    dropped: int = 0


class MemoryWatch:
    """Watches one engine between `install` and `remove`; without them each sample stands alone, and has no events.

    Requests are listed in a sample if the last list is `row_interval` seconds old, or something began or ended.
    """

    def __init__(self, row_interval: float = ROW_INTERVAL) -> None:
        self._row_interval = row_interval
        self._rows_at = -row_interval
        self._costs: deque[float] = deque(maxlen=5)
        self._rows: list[RequestRow] = []
        self._more_rows = 0
        self._kv: KVManager | None = None  # whose evictions are told
        self._number = 0
        self._cells: Cells = np.zeros(0, np.uint32)
        self._host: Cells = np.zeros(0, np.uint32)
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._tally = _Tally(time.perf_counter())
        self._watcher: Callable[[StepRecord], None] | None = None

    def install(self, engine: Engine) -> None:
        """From now on note what every step does."""
        self._watcher = partial(self._on_step, engine)
        engine.watchers.append(self._watcher)
        self._follow(engine.kv)

    def remove(self, engine: Engine) -> None:
        """Look away: from now on no step tells of anything. Does nothing if not installed."""
        engine.watchers = [watcher for watcher in engine.watchers if watcher is not self._watcher]
        if self._kv is not None:
            self._kv.on_evict = None

    @property
    def cost(self) -> float:
        """Seconds of the engine's thread that a sample takes; the median of late, for the first one loads code."""
        return sorted(self._costs)[len(self._costs) // 2] if self._costs else 0.0

    # --- every step -------------------------------------------------------------------------------------------------

    def _follow(self, kv: KVManager) -> None:
        """A step that is broken off makes the engine start afresh with another memory."""
        if self._watcher is not None and self._kv is not kv:
            self._kv = kv
            kv.on_evict = self._on_evict

    def _note(self, kind: str, /, **what: Any) -> None:
        if len(self._events) == MOST_EVENTS:
            self._tally.dropped += 1
        self._events.append({"type": kind, **what})

    def _on_evict(self, block: int) -> None:
        self._note("evict", block=block)

    def _on_step(self, engine: Engine, record: StepRecord) -> None:
        self._follow(engine.kv)
        tally, plan = self._tally, record.plan
        tally.steps += 1
        tally.seconds += record.seconds
        tally.decode_tokens += plan.num_decodes
        for request in plan.preempted:
            kind = "swap" if request.state is State.SWAPPED else "recompute"
            self._note("preempt", request=request.id, kind=kind)
        if plan.memory:
            self._note_moves(engine.kv, record)
        for seq, count in zip(plan.sequences[plan.num_decodes :], plan.counts[plan.num_decodes :], strict=True):
            tally.prefill_tokens += count
            self._note_prefill(seq, count)
        for request in record.touched:
            if request.state is State.FINISHED:
                reason = request.ended[-1].finish_reason if request.ended else None
                self._note("finish", request=request.id, reason=reason)

    def _note_moves(self, kv: KVManager, record: StepRecord) -> None:
        ends = {}
        for seq in record.plan.sequences:
            state = kv.sequences.get(seq.id)
            if state is not None and len(state.table):
                ends[state.table[-1]] = seq
        names = {Kind.COPY: "copy", Kind.SWAP_OUT: "swap_out", Kind.SWAP_IN: "swap_in"}
        for kind, pairs in record.plan.memory.runs:
            for source, target in pairs:
                writer = ends.get(target) if kind is Kind.COPY else None
                whose = {} if writer is None else {"request": writer.request.id, "sequence": writer.index}
                self._note(names[kind], source=source, target=target, **whose)

    def _note_prefill(self, seq: Sequence, count: int) -> None:
        request = seq.request
        self._note(
            "prefill",
            request=request.id,
            tokens=count,
            done=min(seq.computed, seq.prefill_end) or len(request.prompt_token_ids),
            of=seq.prefill_end or len(request.prompt_token_ids),
            cached=request.cached_tokens if seq.computed - count == request.cached_tokens else 0,  # told once
        )

    # --- now and then -----------------------------------------------------------------------------------------------

    def sample(self, engine: Engine) -> Sample:
        """Memory as it is now, and what happened since the last sample."""
        begin, work = time.perf_counter(), time.thread_time()
        kv, tally = engine.kv, self._tally
        self._follow(kv)
        now, host = cells(kv), host_cells(kv)
        fresh = len(self._cells) != len(now)
        changed = np.arange(len(now)) if fresh else np.flatnonzero(now != self._cells)
        host_changed = np.arange(len(host)) if fresh else np.flatnonzero(host != self._host)
        count = len(self._rows) + self._more_rows
        listed = begin - self._rows_at >= self._row_interval or len(engine.requests) != count
        if listed:
            self._rows_at = begin
            self._rows, self._more_rows = _rows(engine)
        sample = Sample(
            number=self._number,
            time=begin,
            geometry=Geometry.of(engine),
            cells=now,
            host=host,
            changed=changed,
            host_changed=host_changed,
            events=list(self._events),
            dropped=tally.dropped,
            figures=_figures(engine, tally, begin),
            listed=listed,
            requests=self._rows,
            more_requests=self._more_rows,
        )
        self._number += 1
        self._cells, self._host = now, host
        self._events.clear()
        self._tally = _Tally(begin)
        self._costs.append(time.thread_time() - work)
        return sample


def _figures(engine: Engine, tally: _Tally, now: float) -> Figures:
    usage, scheduler = engine.kv.usage(), engine.scheduler
    seconds = max(now - tally.since, 1e-9)
    own, model, sequences = _contiguous_blocks(engine)
    return Figures(
        free=usage.free,
        cached=usage.cached,
        active=usage.active,
        shared=usage.shared,
        pinned=usage.pinned,
        host_used=usage.host_used,
        tokens_stored=usage.tokens_stored,
        tokens_apart=sum([seq.computed for seq in engine.kv.sequences.values()]),
        utilisation=usage.utilisation,
        running=len(scheduler.running),
        sequences=sequences,
        waiting=scheduler.num_waiting - scheduler.num_swapped,
        swapped=scheduler.num_swapped,
        steps=tally.steps,
        prefill_rate=tally.prefill_tokens / seconds,
        decode_rate=tally.decode_tokens / seconds,
        step_seconds=tally.seconds / tally.steps if tally.steps else 0.0,
        paged=usage.active + usage.shared,
        contiguous_own=own,
        contiguous_model=model,
        copies=usage.copies,
        evictions=usage.evictions,
        swapped_out=usage.swapped_out,
        swapped_in=usage.swapped_in,
        recomputed=scheduler.recomputed,
        swap_preempted=scheduler.swapped,
        hit_tokens=usage.hit_tokens,
        lookup_tokens=usage.lookup_tokens,
    )


def _contiguous_blocks(engine: Engine) -> tuple[int, int, int]:
    """Blocks' worth of memory that the running requests would have reserved at (their own, the model's) longest, and
    the sequences they are."""
    size, longest = engine.kv.block_size, engine.limits.max_model_len
    own = sequences = 0
    for request in engine.scheduler.running:
        most = request.params.max_tokens
        own_longest = longest if most is None else min(longest, len(request.prompt_token_ids) + most)
        count = request.num_sequences
        sequences += count
        own += count * -(-own_longest // size)
    return own, sequences * -(-longest // size), sequences


def _most_tokens(engine: Engine, request: Request) -> int:
    return engine.limits.most_tokens(len(request.prompt_token_ids), request.params.max_tokens)


def _rows(engine: Engine) -> tuple[list[RequestRow], int]:
    """The requests to list, running ones first, and how many there are beside."""
    running = engine.scheduler.running[:MOST_REQUESTS]
    rows = [_row(engine, request) for request in running]
    room = MOST_REQUESTS - len(rows)
    others = [r for r in engine.requests.values() if r.state is not State.RUNNING][:room] if room else []
    rows += [_row(engine, request) for request in others]
    return rows, len(engine.requests) - len(rows)


def _row(engine: Engine, request: Request) -> RequestRow:
    logical, blocks = _blocks_of(engine, request)
    held = blocks.tolist() if request.state is State.RUNNING else []
    done, of = _prefill(request)
    return RequestRow(
        id=request.id,
        state=request.state.name.lower(),
        kind="beam" if isinstance(request.params, BeamParams) else "sampling",
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=request.cached_tokens,
        prefill_done=done,
        prefill_of=of,
        output_tokens=max((seq.num_output_tokens for seq in [*request.live, *request.ended]), default=0),
        most_tokens=_most_tokens(engine, request),
        sequences=len(request.live),
        logical_blocks=logical,
        blocks=len(blocks),
        shared_blocks=sum([engine.kv.pool.refs(block) > 1 for block in held]),
        preemptions=request.preemptions,
    )


def _memory_of(engine: Engine, seq: Sequence) -> SequenceState | None:
    """What the sequence holds, on the device or the host; None if nothing."""
    return engine.kv.sequences.get(seq.id) or engine.kv.swapped.get(seq.id)


def _blocks_of(engine: Engine, request: Request) -> tuple[int, NDArray[np.int32]]:
    """Entries in the request's tables, and the distinct blocks they name."""
    states = [_memory_of(engine, seq) for seq in request.live]
    tables = [state.table.array for state in states if state is not None]
    if len(tables) <= 1:
        return sum(map(len, tables)), tables[0] if tables else np.zeros(0, np.int32)
    entries = np.concatenate(tables)
    return len(entries), np.unique(entries)


def _prefill(request: Request) -> tuple[int, int]:
    """(tokens computed, tokens to compute) before it decodes (again)."""
    if not request.live:
        return len(request.prompt_token_ids), len(request.prompt_token_ids)
    root = request.live[0]
    of = root.prefill_end or len(request.prompt_token_ids)
    return min(root.computed, of), of


# --- one block, one request -------------------------------------------------------------------------------------------


class Holder(NamedTuple):
    """Who holds a block: the answer `sequence` of the request, as its logical block `logical`."""

    request: str
    sequence: int
    logical: int


@dataclass(frozen=True, slots=True)
class Link:
    """One published block in a chain of prefixes."""

    block: int
    key: str  # SHA-256 of the key before it and its tokens, hex


@dataclass(frozen=True, slots=True)
class BlockDetail:
    """One physical block: what it holds, for whom, and how it is found again."""

    block: int
    state: str
    refs: int
    pins: int
    filled: int
    block_size: int
    holders: list[Holder]
    token_ids: list[int]
    key: str | None  # None: not published (not full, or not to be found)
    chain: list[Link]  # from the root to this block; of one not published, to the block before it
    salted: bool  # its chain starts from a cache salt: only who gives the same one shares it


def block_detail(engine: Engine, block: int) -> BlockDetail:
    """All that is known of a block; raises Unknown. O(what the tables hold), in NumPy."""
    kv = engine.kv
    if not 0 <= block < kv.pool.num_blocks:
        raise Unknown(f"There is no block {block}; the blocks of this pool are 0 to {kv.pool.num_blocks - 1}.")
    held = list(_holders(engine, block))
    entry = kv.cache.entries.get(block)
    tokens, filled, before = _content(engine, held, entry)
    chain = _chain(engine, block if entry is not None else before)
    root = kv.cache.entries[chain[0].block].before if chain else b""
    return BlockDetail(
        block=block,
        state=kv.pool.state(block).value,
        refs=kv.pool.refs(block),
        pins=kv.pinned.get(block, 0),
        filled=filled,
        block_size=kv.block_size,
        holders=[Holder(seq.request.id, seq.index, logical) for seq, logical in held],
        token_ids=tokens,
        key=entry.key.hex() if entry is not None else None,
        chain=chain,
        salted=any(seq.request.salt for seq, _ in held) or (isinstance(root, bytes) and root != b""),
    )


def _live(engine: Engine) -> Iterator[Sequence]:
    for request in engine.requests.values():
        yield from request.live


def _holders(engine: Engine, block: int) -> Iterator[tuple[Sequence, int]]:
    """The sequences on the device that hold the block, and where in their tables."""
    for seq in _live(engine):
        state = engine.kv.sequences.get(seq.id)
        if state is not None:
            for logical in np.flatnonzero(state.table.array == block).tolist():
                yield seq, logical


def _content(
    engine: Engine, held: list[tuple[Sequence, int]], entry: Entry | None
) -> tuple[list[int], int, int | None]:
    """(tokens, how many are computed, the block before it in a holder's table)."""
    size = engine.kv.block_size
    if entry is not None:
        tokens = np.frombuffer(entry.tokens, "<i4").tolist()
        return tokens, size, entry.before if isinstance(entry.before, int) else None
    best: tuple[list[int], int, int | None] = [], 0, None
    for seq, logical in held:
        state = engine.kv.sequences[seq.id]
        filled = max(0, min(size, state.computed - logical * size))
        tokens = seq.tokens[logical * size : logical * size + filled]
        if filled >= best[1]:
            best = tokens, filled, state.table[logical - 1] if logical else None
    return best


def _chain(engine: Engine, block: int | bytes | None) -> list[Link]:
    """The published blocks from the root to this one; none if it is not published."""
    entries = engine.kv.cache.entries
    chain: list[Link] = []
    while isinstance(block, int) and block in entries:
        chain.append(Link(block, entries[block].key.hex()))
        block = entries[block].before
    return chain[::-1]


@dataclass(frozen=True, slots=True)
class SharedEntry:
    """An entry of a table whose block somebody else holds too."""

    logical: int
    block: int
    others: list[Holder]


@dataclass(frozen=True, slots=True)
class SequenceDetail:
    """One sequence and its block table: logical block i lies in the physical block `table[i]`."""

    sequence: int
    where: str  # device, host, nowhere
    computed: int  # tokens whose keys and values are written
    output_token_ids: list[int]
    cumulative_logprob: float
    table: list[int]
    shared: list[SharedEntry]


@dataclass(frozen=True, slots=True)
class RequestDetail:
    """One request with all its sequences that run."""

    row: RequestRow
    block_size: int
    prompt: str | None
    prompt_token_ids: list[int]
    priority: int
    sequences: list[SequenceDetail] = field(default_factory=list)
    ended: int = 0  # answers that are complete
    contiguous_own: int = 0  # blocks that reserving each sequence's longest would take
    contiguous_model: int = 0


def request_detail(engine: Engine, request_id: str) -> RequestDetail:
    """All that is known of a request; raises Unknown. O(what the tables hold), in NumPy."""
    request = engine.requests.get(request_id)
    if request is None:
        raise Unknown(f"There is no request {request_id!r} here: it has ended, or never was.")
    size = engine.kv.block_size
    row = _row(engine, request)
    count = request.num_sequences
    others = _who_else(engine, request)
    return RequestDetail(
        row=row,
        block_size=size,
        prompt=request.prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        priority=request.priority,
        sequences=[_sequence_detail(engine, seq, others) for seq in request.live],
        ended=len(request.ended),
        contiguous_own=count * -(-(row.prompt_tokens + row.most_tokens) // size),
        contiguous_model=count * -(-engine.limits.max_model_len // size),
    )


def _who_else(engine: Engine, request: Request) -> dict[int, list[Holder]]:
    """Of the request's blocks on the device: all who hold them."""
    _, mine = _blocks_of(engine, request)
    found: dict[int, list[Holder]] = {}
    for seq in _live(engine):
        state = engine.kv.sequences.get(seq.id)
        if state is None:
            continue
        table = state.table.array
        for logical in np.flatnonzero(np.isin(table, mine)).tolist():
            found.setdefault(int(table[logical]), []).append(Holder(seq.request.id, seq.index, logical))
    return found


def _sequence_detail(engine: Engine, seq: Sequence, holders: dict[int, list[Holder]]) -> SequenceDetail:
    state = _memory_of(engine, seq)
    table = state.table.array.tolist() if state is not None else []
    where = "nowhere" if state is None else "host" if seq.id in engine.kv.swapped else "device"
    me = (seq.request.id, seq.index)
    return SequenceDetail(
        sequence=seq.index,
        where=where,
        computed=seq.computed,
        output_token_ids=seq.output_token_ids,
        cumulative_logprob=seq.cumulative_logprob,
        table=table,
        shared=list(_shared(table, holders, me)) if where == "device" else [],
    )


def _shared(table: Iterable[int], holders: dict[int, list[Holder]], me: tuple[str, int]) -> Iterator[SharedEntry]:
    for logical, block in enumerate(table):
        others = [holder for holder in holders.get(block, ()) if holder[:2] != me]
        if others:
            yield SharedEntry(logical, block, others)

"""Who computes how many tokens in the next step: requests and the KV manager in, a StepPlan out. Knows no tensors.

One rule: a step has a token budget. Running requests come first, in order of (priority, arrival): a token for every
sequence that decodes, then prompt chunks; then waiting ones while blocks, sequences and budget last (those that come
before a running prompt in order, ahead of its next chunk). A request that cannot grow takes the blocks of the last in
order (Kwon et al. 2023, section 4.5: whole requests, all or nothing), so the first in order always gets on and nothing
can deadlock.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from octavo.config import PreemptionMode
from octavo.engine.request import Fork, Request, Sequence, State
from octavo.kv.interface import Memory
from octavo.kv.manager import Outcome
from octavo.kv.memory_ops import MemoryOps
from octavo.outputs import FinishReason


@dataclass(slots=True)
class StepPlan:
    """What a step does: `counts[i]` tokens of `sequences[i]` from its first uncomputed one on, after `memory`."""

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_decodes: int = 0  # the first so many sequences decode one token each; the others are prompt chunks
    memory: MemoryOps = field(default_factory=MemoryOps)
    exhausted: list[Sequence] = field(default_factory=list)  # alone and out of blocks: their answers end here
    stuck: list[Request] = field(default_factory=list)  # cannot be admitted though nothing else runs
    preempted: list[Request] = field(default_factory=list)  # gave up their blocks: SWAPPED, or WAITING to be recomputed

    def add(self, seq: Sequence, count: int) -> None:
        self.sequences.append(seq)
        self.counts.append(count)


@dataclass(slots=True)
class PreemptionCost:
    """Estimated seconds of the two ways to preempt, from rates the engine measures as it runs."""

    seconds_per_block: float  # moving one block one way
    seconds_per_token: float  # computing one token of a prompt

    def prefers_swap(self, blocks: int, tokens: int) -> bool:
        """Whether moving `blocks` out and back costs less than computing `tokens` again."""
        return 2 * blocks * self.seconds_per_block < tokens * self.seconds_per_token


class Room(Enum):
    """What came of the attempt to free blocks for a request."""

    MADE = auto()  # somebody else gave up blocks: try again
    GAVE_UP = auto()  # the request itself was the last in order and is preempted
    ALONE = auto()  # nothing else runs: there is no room to be made


class Scheduler:
    """Keeps the waiting and the running requests and plans each step. Not thread-safe."""

    def __init__(
        self,
        kv: Memory,
        *,
        token_budget: int,
        sequence_limit: int,
        preemption: PreemptionMode,
        cost: PreemptionCost,
        new_sequence_id: Callable[[], int],
    ) -> None:
        self.kv = kv
        self.token_budget = token_budget
        self.sequence_limit = sequence_limit
        self.preemption = preemption
        self.cost = cost
        self.running: list[Request] = []  # by order
        self.recomputed, self.swapped = 0, 0  # preemptions, by kind
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # heap by order; the aborted are skipped
        self._num_waiting = 0
        self._num_swapped = 0
        self._preempted: list[Request] = []  # in the step being planned
        self._new_sequence_id = new_sequence_id
        # Blocks an admission leaves free while others run, lest they be preempted at their next page fault.
        self._watermark = kv.pool.num_blocks // 100

    # --- what the engine tells ----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that hold no device memory, swapped ones included."""
        return self._num_waiting

    @property
    def num_swapped(self) -> int:
        return self._num_swapped

    @property
    def first_waiting(self) -> Request | None:
        """The request that is to be admitted next."""
        while self._waiting and self._waiting[0][1].state not in (State.WAITING, State.SWAPPED):
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self._num_waiting > 0

    def add(self, request: Request) -> None:
        """Queue a new request, whose one sequence holds its prompt."""
        self._enqueue(request)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A sequence that shares all of the parent's blocks; it runs from the next step on."""
        child = parent.fork(self._new_sequence_id(), index)
        self.kv.fork(parent.id, child.id)
        parent.request.live.append(child)
        return child

    def end(self, seq: Sequence) -> None:
        """A running sequence has its last token: release its blocks, and with the last of them end the request."""
        request = seq.request
        request.live.remove(seq)
        request.ended.append(seq)
        self.kv.free(seq.id)
        if not request.live:
            self.finish(request, "stop")

    def drop(self, seq: Sequence) -> None:
        """A beam that nobody continues: release its blocks and forget it."""
        seq.request.live.remove(seq)
        self.kv.free(seq.id)

    def fail(self, request: Request, message: str) -> None:
        """The request cannot be served further, for this reason."""
        request.error = message
        self.finish(request, "error")

    def finish(self, request: Request, reason: FinishReason) -> None:
        """The request is over, in whatever state it was: what still ran of it ends so, and all it holds is released."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is not State.FINISHED:
            self._num_waiting -= 1  # its heap entry is skipped when it comes up
            self._num_swapped -= request.state is State.SWAPPED
        unforked = {id(fork.child) for fork in request.forks}
        for seq in request.live:
            if request.state is not State.WAITING and id(seq) not in unforked:
                self.kv.free(seq.id)
        request.end(reason)

    # --- a step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step and claim the memory it needs."""
        plan = StepPlan()
        preempted = self.recomputed + self.swapped
        prefills = self._schedule_decodes(plan)
        plan.num_decodes = len(plan.sequences)
        budget = self.token_budget - plan.num_decodes
        admits = preempted == self.recomputed + self.swapped  # who was just preempted shall not come back at once
        if admits and prefills and self._waiting and self._waiting[0][0] < prefills[0].request.order:
            budget = self._admit_waiting(plan, budget, before=prefills[0].request)
        for seq in prefills:
            budget -= self._schedule_chunk(plan, seq, budget)
        if admits:
            self._admit_waiting(plan, budget)
        plan.memory = self.kv.take_ops()
        plan.preempted, self._preempted = self._preempted, []
        return plan

    def _schedule_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Give each decoding sequence its next slot; returns the sequences still in their prefill."""
        prefills: list[Sequence] = []
        sequences, counts, grow = plan.sequences, plan.counts, self.kv.grow
        position = 0
        while position < len(self.running):
            request = self.running[position]
            if len(request.live) == 1 and not request.forks:  # the common case, kept short: it runs 256 times a step
                seq = request.live[0]
                if seq.computed < seq.prefill_end:
                    prefills.append(seq)
                elif grow(seq.id):
                    sequences.append(seq)
                    counts.append(1)
                else:
                    self._claim(request, plan, prefills)
            else:
                self._claim(request, plan, prefills)
            if position < len(self.running) and self.running[position] is request:
                position += 1
        return prefills

    def _claim(self, request: Request, plan: StepPlan, prefills: list[Sequence]) -> None:
        """The same for a request of several sequences or short of blocks: all of its sequences step, or none."""
        if request.forks and not self._fork_again(request, plan):
            return
        chunks = [seq for seq in request.live if seq.prefilling]
        waits_for_all = request.beam is not None and (bool(chunks) or bool(request.forks))
        unforked = {id(fork.child) for fork in request.forks}
        decodes: list[Sequence] = []
        if not waits_for_all:  # beams are compared with each other, so they step together
            for seq in [s for s in request.live if not s.prefilling and id(s) not in unforked]:
                if seq not in request.live:  # ended with a sibling that ran out of blocks
                    continue
                room = self._grow(seq, 1)
                if room is Room.GAVE_UP:
                    return
                if room is Room.ALONE:
                    self._exhaust(seq, plan)
                else:
                    decodes.append(seq)
        for seq in decodes:
            if seq in request.live:
                plan.add(seq, 1)
        prefills.extend(seq for seq in chunks if seq in request.live)

    def _grow(self, seq: Sequence, count: int) -> Room:
        """Claim `count` slots; MADE if they are claimed."""
        while not self.kv.grow(seq.id, count):
            room = self._make_room(seq.request)
            if room is not Room.MADE:
                return room
        return Room.MADE

    def _make_room(self, request: Request) -> Room:
        victim = self.running[-1]
        if victim is not request:
            self._preempt(victim)
            return Room.MADE
        if len(self.running) == 1:
            return Room.ALONE
        self._preempt(request)
        return Room.GAVE_UP

    def _exhaust(self, seq: Sequence, plan: StepPlan) -> None:
        """End an answer that has outgrown the whole pool, and with it what could only be forked from it."""
        request = seq.request
        doomed = list(request.live) if request.beam is not None else [seq]
        if request.beam is None:
            for fork in request.forks:
                if fork.parent in doomed:
                    doomed.append(fork.child)
        unforked = {id(fork.child) for fork in request.forks}
        request.forks = [fork for fork in request.forks if fork.child not in doomed]
        for one in doomed:
            request.live.remove(one)
            request.ended.append(one)
            if id(one) not in unforked:
                self.kv.free(one.id)
            plan.exhausted.append(one)

    def _schedule_chunk(self, plan: StepPlan, seq: Sequence, budget: int) -> int:
        """As much of a prefill as the budget allows; returns the tokens taken."""
        count = min(seq.prefill_end - seq.computed, budget)
        if count > 0:
            plan.add(seq, count)
        return count

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit_waiting(self, plan: StepPlan, budget: int, before: Request | None = None) -> int:
        """Start waiting requests, in order, those `before` another only if given; returns the budget left."""
        put_aside: list[tuple[tuple[int, int], Request]] = []  # their prompt's next block is just being computed
        waiting = self._waiting
        free_sequences = self.sequence_limit
        if waiting:
            free_sequences -= sum(request.num_sequences for request in self.running)
        while waiting and budget > 0 and len(put_aside) < free_sequences:
            request = waiting[0][1]
            if before is not None and request.order > before.order:
                break
            if request.state not in (State.WAITING, State.SWAPPED):
                heapq.heappop(waiting)
                continue
            if request.num_sequences > free_sequences:
                break
            outcome = self._admit(request)
            if outcome is Outcome.WAIT:
                put_aside.append(heapq.heappop(waiting))
            elif outcome is Outcome.ADMITTED:
                heapq.heappop(waiting)
                self._start(request)
                free_sequences -= request.num_sequences
                if request.live[0].prefilling:
                    budget -= self._schedule_chunk(plan, request.live[0], budget)
            elif self.running:
                break
            else:  # alone and yet no room, which submission has excluded: pinned blocks are in the way
                plan.stuck.append(request)
                heapq.heappop(waiting)
        for entry in put_aside:
            heapq.heappush(waiting, entry)
        return budget

    def _start(self, request: Request) -> None:
        insort(self.running, request, key=lambda r: r.order)
        self._num_waiting -= 1
        self._num_swapped -= request.state is State.SWAPPED
        request.state = State.RUNNING

    def _admit(self, request: Request) -> Outcome:
        if request.awaited in self.kv.in_flight:
            return Outcome.WAIT
        watermark = self._watermark if self.running else 0
        if request.state is State.SWAPPED:
            ids = [seq.id for seq in request.live]
            reserve = len(ids) + watermark if self.running else 0
            return Outcome.ADMITTED if self.kv.swap_in(ids, reserve=reserve) else Outcome.NO_SPACE
        root = request.live[0]
        tokens = root.tokens[:-1] if request.started else root.tokens  # the last drawn token is computed by decoding
        forks = _forks(request.live) if request.started else []
        reserve = self._reserve(request, forks) + watermark if self.running else 0
        admission = self.kv.admit(
            root.id,
            tokens,
            salt=request.salt,
            use_cache=not request.wants_prompt_logprobs,
            reserve=reserve,
            keys=request.keys,
        )
        request.awaited = admission.awaited
        if admission.outcome is Outcome.ADMITTED:
            root.computed, root.prefill_end = admission.cached_tokens, len(tokens)
            request.forks = forks
            if request.preemptions == 0:
                request.cached_tokens = admission.cached_tokens
        return admission.outcome

    def _reserve(self, request: Request, forks: list[Fork]) -> int:
        """Blocks the other sequences of a request will need soon after its first one is admitted."""
        block_size = self.kv.block_size
        if not request.started:
            return request.params.num_samples - 1
        return sum(-(-(len(fork.child.tokens) - fork.shared) // block_size) + 1 for fork in forks)

    # --- preemption --------------------------------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        """Take all blocks of the last request in order; it waits again, at its old place in the queue."""
        self.running.remove(request)
        self._preempted.append(request)
        request.preemptions += 1
        if self._swap_out(request):
            request.state = State.SWAPPED
            self.swapped += 1
            self._num_swapped += 1
        else:
            request.state = State.WAITING
            self.recomputed += 1
            unforked = {id(fork.child) for fork in request.forks}
            for seq in request.live:
                if id(seq) not in unforked:
                    self.kv.free(seq.id)
                seq.computed = seq.prefill_end = 0
        request.forks.clear()
        request.keys.clear()  # they were another sequence's if its first one has ended since
        self._enqueue(request)

    def _swap_out(self, request: Request) -> bool:
        # One still in its prefill is recomputed: what it has computed stays findable in the prefix cache.
        if self.preemption == "recompute" or request.forks or any(seq.prefilling for seq in request.live):
            return False
        ids = [seq.id for seq in request.live]
        if self.preemption == "auto":
            blocks = {int(block) for seq_id in ids for block in self.kv.table(seq_id).array}
            tokens = sum(seq.computed for seq in request.live[:1]) + sum(
                len(fork.child.tokens) - fork.shared for fork in _forks(request.live)
            )
            if not self.cost.prefers_swap(len(blocks), tokens):
                return False
        return self.kv.swap_out(ids)

    def _fork_again(self, request: Request, plan: StepPlan) -> bool:
        """Fork the preempted sequences whose parents are computed again; False if the request was preempted."""
        for fork in list(request.forks):
            child, parent = fork.child, fork.parent
            if fork not in request.forks or parent.prefilling or any(f.child is parent for f in request.forks):
                continue
            request.forks.remove(fork)
            self.kv.fork(parent.id, child.id, fork.shared)
            child.computed, child.prefill_end = fork.shared, len(child.tokens) - 1
            if child.prefilling:
                room = self._grow(child, child.prefill_end - child.computed)
                if room is Room.GAVE_UP:
                    return False
                if room is Room.ALONE:
                    self._exhaust(child, plan)
        return bool(request.live)

    # --- small things ------------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.order, request))
        self._num_waiting += 1


def _forks(live: list[Sequence]) -> list[Fork]:
    """How to share again after a recompute: each sequence from the earlier one it has the longest beginning with.

    That is the tree of forks the sequences came from, so no more blocks are held than before the preemption.
    """
    forks: list[Fork] = []
    for place, child in enumerate(live[1:], start=1):
        best = max(((_common(child, other), -i) for i, other in enumerate(live[:place])))
        forks.append(Fork(child, live[-best[1]], best[0]))
    return forks


def _common(a: Sequence, b: Sequence) -> int:
    """Tokens two sequences of a request begin with alike, at most all that both have computed."""
    low, high = len(a.request.prompt_token_ids), min(len(a.tokens), len(b.tokens)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if a.tokens[low:middle] == b.tokens[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

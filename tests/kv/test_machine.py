"""KVManager under every sequence of operations, beside a naive model: each sequence is a list of tokens.

After each rule the invariants are proved, every computed token of every sequence is read back through its table as
itself after its whole prefix, so is every block that the prefix cache would hand out, and what must be shared is.
A second machine runs with keys of two bits, where collisions are everyday: it must share less, never wrongly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.kv import Outcome, prefix_cache
from octavo.kv.errors import BadSequence, UnknownPin, UnknownSequence
from tests.kv.toy import Mark, Rig, marks

SALTS = [b"", b"salt"]
salts = st.sampled_from(SALTS)
short_texts = st.lists(st.integers(0, 1), min_size=1, max_size=8)  # of two tokens, so that prefixes meet often


@dataclass
class Model:
    """What a sequence is, with no idea of blocks."""

    tokens: list[int]
    salt: bytes
    computed: int
    prompt: int  # tokens it was admitted with, which others may wait for
    published: bool = True  # False: a reset came, and nothing of it is findable from then on
    swapped: bool = False
    marks: list[Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.marks = marks(self.tokens, self.salt)

    def extend(self, more: list[int]) -> None:
        self.tokens += more
        self.marks = marks(self.tokens, self.salt)


class KVMachine(RuleBasedStateMachine):
    """All operations in any order."""

    exact_keys = True  # keys do not collide, so what can be shared must be

    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.sampled_from([1, 4, 4, 8]),
        num_host_blocks=st.integers(0, 10),
        caching=st.sampled_from([True, True, True, False]),
        seed=st.integers(0, 2**32),
    )
    def begin(self, num_blocks: int, block_size: int, num_host_blocks: int, caching: bool, seed: int) -> None:
        self.rig = Rig(num_blocks, block_size, num_host_blocks=num_host_blocks, prefix_caching=caching)
        self.manager, self.size, self.caching = self.rig.manager, block_size, caching
        self.rig.shuffle = Random(seed)
        self.models: dict[int, Model] = {}
        self.pins: dict[int, tuple[bytes, list[int]]] = {}  # pin -> salt and tokens it covers
        self.refused: list[tuple[list[int], bytes, list[bytes]]] = []
        self.changed: set[int] = set()
        self.tables: dict[int, list[int]] = {}
        self.next_id = 0

    # --- what the rules choose from ----------------------------------------------------------------------------
    def ids(self, *, swapped: bool = False) -> list[int]:
        return [seq_id for seq_id, model in self.models.items() if model.swapped is swapped]

    def choose(self, data: st.DataObject, *, swapped: bool = False) -> int:
        return data.draw(st.sampled_from(self.ids(swapped=swapped)))

    def prompt(self, data: st.DataObject) -> tuple[list[int], bytes]:
        """New tokens after some beginning of a text that is known."""
        known = [(model.tokens, model.salt) for model in self.models.values()] or [([], b"")]
        text, salt = data.draw(st.sampled_from(known))
        cut = data.draw(st.integers(0, len(text)))
        return text[:cut] + data.draw(short_texts) * data.draw(st.integers(1, 2)), data.draw(st.just(salt) | salts)

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.size)

    # --- admission ---------------------------------------------------------------------------------------------
    @rule(data=st.data(), use_cache=st.sampled_from([True, True, True, False]), reserve=st.integers(0, 2))
    def admit(self, data: st.DataObject, use_cache: bool, reserve: int) -> None:
        tokens, salt = self.prompt(data)
        self.try_to_admit(tokens, salt, use_cache, reserve, [])

    @precondition(lambda self: self.refused)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        tokens, salt, keys = data.draw(st.sampled_from(self.refused))
        more = data.draw(short_texts)  # a preempted sequence comes back longer
        self.try_to_admit(tokens + more, salt, True, 0, keys.copy())  # of other tokens these would be wrong

    def try_to_admit(self, tokens: list[int], salt: bytes, use_cache: bool, reserve: int, keys: list[bytes]) -> None:
        before, available = self.rig.state(), self.manager.pool.available
        must_hit = self.findable_prefix(tokens, salt) if use_cache else 0
        seq_id, self.next_id = self.next_id, self.next_id + 1
        admission = self.manager.admit(seq_id, tokens, salt=salt, use_cache=use_cache, reserve=reserve, keys=keys)
        if admission.outcome is Outcome.ADMITTED:
            cached = admission.cached_tokens
            assert must_hit <= cached < len(tokens)
            assert cached % self.size == 0
            assert use_cache or cached == 0
            assert self.manager.pool.available >= reserve
            self.models[seq_id] = Model(list(tokens), salt, cached, len(tokens))
            return
        assert self.rig.state() == before
        if admission.outcome is Outcome.WAIT:
            assert use_cache
            assert not self.exact_keys or self.is_being_computed(tokens, salt)
        else:
            assert self.blocks_of(len(tokens)) + reserve > available
            self.refused.append((tokens, salt, keys))

    def findable_prefix(self, tokens: list[int], salt: bytes) -> int:
        """Tokens that must be found: whole blocks a living, published sequence has computed; never the last token."""
        if not (self.caching and self.exact_keys):
            return 0
        best = 0
        for model in self.models.values():
            if model.salt == salt and model.published and not model.swapped:
                common = next(
                    (i for i, (a, b) in enumerate(zip(tokens, model.tokens, strict=False)) if a != b),
                    min(len(tokens), len(model.tokens)),
                )
                best = max(best, min(common, model.computed, len(tokens) - 1) // self.size)
        return best * self.size

    def is_being_computed(self, tokens: list[int], salt: bytes) -> bool:
        """Whether a running sequence has yet to compute a block of this prompt."""
        return any(
            model.salt == salt and model.published and not model.swapped and tokens[:end] == model.tokens[:end]
            for model in self.models.values()
            for end in range(self.size, min(len(tokens) - 1, model.prompt) + 1, self.size)
            if model.computed < end
        )

    # --- growing and computing ---------------------------------------------------------------------------------
    @precondition(lambda self: self.ids())
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=10))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        seq_id = self.choose(data)
        model, before = self.models[seq_id], self.rig.state()
        fresh = self.blocks_of(len(model.tokens) + len(more)) - len(self.manager.table(seq_id))
        if self.manager.grow(seq_id, len(more)):
            model.extend(more)
        else:
            assert self.rig.state() == before
            assert fresh + 1 > self.manager.pool.available  # one more where its last block must be copied

    @precondition(lambda self: self.ids())
    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        """A step: memory operations first, then all the writes, then the commits."""
        self.rig.memory.execute(self.manager.take_ops(), self.rig.shuffle)
        counts = {}
        for seq_id in data.draw(st.lists(st.sampled_from(self.ids()), unique=True, min_size=1)):
            model = self.models[seq_id]
            counts[seq_id] = data.draw(st.integers(0, len(model.tokens) - model.computed))
            what = model.marks[model.computed : model.computed + counts[seq_id]]
            self.rig.memory.write(self.manager.table(seq_id), model.computed, what)
        for seq_id, count in counts.items():
            self.models[seq_id].computed += count
            self.manager.commit(seq_id, count, self.models[seq_id].tokens)

    @precondition(lambda self: self.ids())
    @rule(data=st.data())
    def forward_all(self, data: st.DataObject) -> None:
        """A step that computes all there is, for everybody."""
        self.rig.memory.execute(self.manager.take_ops(), self.rig.shuffle)
        for seq_id in self.ids():
            model = self.models[seq_id]
            self.rig.memory.write(self.manager.table(seq_id), model.computed, model.marks[model.computed :])
        for seq_id in self.ids():
            model = self.models[seq_id]
            count, model.computed = len(model.tokens) - model.computed, len(model.tokens)
            self.manager.commit(seq_id, count, model.tokens)

    def ready_to_fork(self) -> list[int]:
        return [s for s in self.ids() if 0 < self.models[s].computed == len(self.models[s].tokens)]

    @precondition(lambda self: self.ready_to_fork())
    @rule(data=st.data(), times=st.integers(1, 3))
    def fork(self, data: st.DataObject, times: int) -> None:
        parent = data.draw(st.sampled_from(self.ready_to_fork()))
        model = self.models[parent]
        for _ in range(times):
            length = data.draw(st.none() | st.integers(1, len(model.tokens)))
            self.manager.fork(parent, self.next_id, length)
            tokens = model.tokens[:length]
            child = Model(tokens, model.salt, len(tokens), min(len(tokens), model.prompt), model.published)
            self.models[self.next_id] = child
            self.next_id += 1

    # --- leaving -----------------------------------------------------------------------------------------------
    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """An end, an abort or a preemption by recompute: at any moment, in any state."""
        seq_id = data.draw(st.sampled_from(sorted(self.models)))
        self.manager.free(seq_id)
        del self.models[seq_id]

    @precondition(lambda self: self.ids())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group = data.draw(st.lists(st.sampled_from(self.ids()), unique=True, min_size=1))
        tables = [self.tables_of(seq_id)[: self.blocks_of(self.models[seq_id].computed)] for seq_id in group]
        needed = len({block for table in tables for block in table})
        before, room = self.rig.state(), self.manager.host.available
        done = self.manager.swap_out(group)
        assert done == (needed <= room)
        if not done:
            assert self.rig.state() == before
            return
        assert room - self.manager.host.available == needed
        for seq_id in group:
            model = self.models[seq_id]
            del model.tokens[model.computed :], model.marks[model.computed :]
            model.swapped = True

    @precondition(lambda self: self.ids(swapped=True))
    @rule(data=st.data(), reserve=st.sampled_from([0, 0, 1]))
    def swap_in(self, data: st.DataObject, reserve: int) -> None:
        group = data.draw(st.lists(st.sampled_from(self.ids(swapped=True)), unique=True, min_size=1))
        needed, available, before = self.manager.blocks_to_swap_in(group), self.manager.pool.available, self.rig.state()
        assert self.rig.state() == before
        done = self.manager.swap_in(group, reserve=reserve)
        assert done == (needed + reserve <= available)
        if not done:
            assert self.rig.state() == before
            return
        assert available - self.manager.pool.available <= needed  # less where two swapped copies became one
        for seq_id in group:
            self.models[seq_id].swapped = False
            self.models[seq_id].prompt = 0  # nobody waits for it any more

    # --- the cache ---------------------------------------------------------------------------------------------
    @precondition(lambda self: self.manager.pool.available)
    @rule(data=st.data())
    def evict_by_pressure(self, data: st.DataObject) -> None:
        """Somebody takes blocks with a text unlike any other, and leaves."""
        count = data.draw(st.integers(1, self.manager.pool.available))
        tokens = [7] * (count * self.size)
        assert self.manager.admit(self.next_id, tokens, use_cache=False).outcome is Outcome.ADMITTED
        self.manager.free(self.next_id)
        self.next_id += 1

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        tokens, salt = self.prompt(data)
        pin = self.manager.pin(tokens, salt)
        assert self.findable_prefix([*tokens, 0], salt) <= pin.tokens <= len(tokens)
        self.pins[pin.id] = (salt, tokens[: pin.tokens])

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(sorted(self.pins)))
        self.manager.unpin(pin)
        del self.pins[pin]

    @rule(chance=st.integers(0, 5))
    def reset_prefix_cache(self, chance: int) -> None:
        if chance:
            return
        self.manager.reset_prefix_cache()
        for model in self.models.values():
            model.published = False
        self.pins = dict.fromkeys(self.pins, (b"", []))

    @rule()
    def misuse(self) -> None:
        """What raises changes nothing."""
        before, unknown = self.rig.state(), self.next_id + 1000
        for act in (self.manager.grow, self.manager.free, self.manager.table):
            with pytest.raises(UnknownSequence):
                act(unknown)
        with pytest.raises(UnknownPin):
            self.manager.unpin(unknown)
        for seq_id, model in self.models.items():
            with pytest.raises(BadSequence):
                self.manager.admit(seq_id, [1])
            if not model.swapped:
                with pytest.raises(BadSequence):
                    self.manager.commit(seq_id, len(model.tokens) - model.computed + 1, model.tokens)
                with pytest.raises(UnknownSequence):
                    self.manager.swap_out([seq_id, unknown])
        assert self.rig.state() == before

    # --- after each rule ---------------------------------------------------------------------------------------
    @invariant()
    def memory_is_sound(self) -> None:
        self.manager.check()

    @invariant()
    def sequences_are_what_the_model_says(self) -> None:
        for seq_id, model in self.models.items():
            assert self.manager.length(seq_id) == len(model.tokens)
            assert self.manager.computed(seq_id) == model.computed
            if self.exact_keys:
                state = (self.manager.swapped if model.swapped else self.manager.sequences)[seq_id]
                assert state.findable == (self.caching and model.published)
        assert sorted(self.manager.sequences) == self.sorted_ids(swapped=False)
        assert sorted(self.manager.swapped) == self.sorted_ids(swapped=True)

    def sorted_ids(self, *, swapped: bool) -> list[int]:
        return sorted(self.ids(swapped=swapped))

    @invariant()
    def every_computed_token_is_read_back(self) -> None:
        settled = self.rig.memory.copy()
        settled.execute(self.manager.pending, self.rig.shuffle)
        for seq_id, model in self.models.items():
            table = (self.manager.swapped if model.swapped else self.manager.sequences)[seq_id].table
            assert settled.read(table, model.computed, host=model.swapped) == model.marks[: model.computed]
        for pin, (salt, tokens) in self.pins.items():
            found = settled.device[self.manager.pins[pin]].reshape(-1, 2).tolist()
            assert [tuple(mark) for mark in found] == marks(tokens, salt)
        for block in self.manager.cache.entries:  # what a later prompt would be handed
            tokens, salt = self.published_prefix(block)
            assert [tuple(mark) for mark in settled.device[block].tolist()] == marks(tokens, salt)[-self.size :]

    def published_prefix(self, block: int) -> tuple[list[int], bytes]:
        tokens: list[int] = []
        before: int | bytes = block
        while not isinstance(before, bytes):
            entry = self.manager.cache.entries[before]
            tokens = [int.from_bytes(entry.tokens[i : i + 4], "little") for i in range(0, 4 * self.size, 4)] + tokens
            before = entry.before
        return tokens, before

    @invariant()
    def equal_prefixes_share_their_blocks(self) -> None:
        if not (self.caching and self.exact_keys):
            return
        home: dict[Any, int] = {}
        for seq_id in self.ids():
            model = self.models[seq_id]
            if model.published:
                for index, block in enumerate(self.tables_of(seq_id)[: model.computed // self.size]):
                    prefix = (model.salt, tuple(model.tokens[: (index + 1) * self.size]))
                    assert home.setdefault(prefix, block) == block

    @invariant()
    def nobody_writes_what_others_read(self) -> None:
        holders = Counter(block for seq_id in self.ids() for block in self.tables_of(seq_id))
        for seq_id in self.ids():
            model = self.models[seq_id]
            if model.computed < len(model.tokens):
                assert all(holders[b] == 1 for b in self.tables_of(seq_id)[model.computed // self.size :])

    @invariant()
    def changed_tables_are_reported(self) -> None:
        self.changed |= self.manager.take_changed()
        now = {seq_id: self.tables_of(seq_id) for seq_id in self.ids()}
        assert {seq_id for seq_id, table in now.items() if self.tables.get(seq_id) != table} <= self.changed
        assert self.changed <= now.keys() | self.tables.keys()
        self.tables, self.changed = now, set()

    @invariant()
    def reports_agree(self) -> None:
        usage, blocks = self.manager.usage(), self.manager.snapshot()
        held = [report for report in blocks if report.refs]
        assert usage.tokens_stored == sum(report.filled for report in held)
        assert usage.slots_held == len(held) * self.size
        assert Counter(report.state.value for report in blocks) == Counter(
            free=usage.free, cached=usage.cached, active=usage.active, shared=usage.shared
        )
        for report in blocks:
            assert report.refs == len(report.holders) + report.pins

    def tables_of(self, seq_id: int) -> list[int]:
        return [int(block) for block in self.manager.table(seq_id).array]

    def teardown(self) -> None:
        """Whatever happened: when all have left, every block is there."""
        if not hasattr(self, "rig"):
            return
        for seq_id in self.models:
            self.manager.free(seq_id)
        for pin in self.pins:
            self.manager.unpin(pin)
        self.manager.check()
        assert self.manager.pool.available == self.manager.pool.num_blocks
        assert self.manager.host.num_free == self.manager.host.num_blocks
        assert not self.manager.in_flight


class CollidingKVMachine(KVMachine):
    """The same with keys of two bits."""

    exact_keys = False

    def __init__(self) -> None:
        super().__init__()
        strong = prefix_cache.digest
        self.weakened = patch.object(prefix_cache, "digest", lambda data: bytes([strong(data)[0] & 3]))
        self.weakened.start()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.weakened.stop()


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCollidingKVMachine = CollidingKVMachine.TestCase
TestCollidingKVMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""BlockPool: states, counters, reclaim order and named errors, alone and against a model that recounts everything."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.kv import BlockPool, BlockState
from octavo.kv.errors import BadSize, BrokenInvariant, DoubleFree, OutOfBlocks, UnknownBlock


def pool_of(num_blocks: int) -> tuple[BlockPool, list[int]]:
    reclaimed: list[int] = []
    return BlockPool(num_blocks, reclaimed.append), reclaimed


def test_a_block_goes_through_all_states() -> None:
    pool, _ = pool_of(2)
    block = pool.allocate()
    assert pool.state(block) is BlockState.ACTIVE
    pool.reference(block)
    assert pool.state(block) is BlockState.SHARED
    pool.release(block, keep=True)
    assert pool.state(block) is BlockState.ACTIVE
    pool.release(block, keep=True)
    assert pool.state(block) is BlockState.CACHED
    pool.reference(block)
    assert pool.state(block) is BlockState.ACTIVE
    pool.release(block, keep=False)
    assert pool.state(block) is BlockState.FREE


def test_cached_blocks_are_reclaimed_least_recently_released_first_and_after_the_free_ones() -> None:
    pool, reclaimed = pool_of(4)
    a, b, c = (pool.allocate() for _ in range(3))
    for block in (b, a, c):
        pool.release(block, keep=True)
    pool.reference(b)  # used again: now the youngest
    pool.release(b, keep=True)
    assert pool.allocate() not in (a, b, c)
    assert reclaimed == []
    assert [pool.allocate() for _ in range(3)] == [a, c, b] == reclaimed
    assert pool.evictions == 3


def test_exhaustion_is_a_named_error_that_changes_nothing() -> None:
    pool, _ = pool_of(2)
    pool.allocate(), pool.allocate()
    with pytest.raises(OutOfBlocks, match="All 2 blocks are held"):
        pool.allocate()
    assert (pool.num_free, pool.num_cached, pool.num_active, pool.num_shared) == (0, 0, 2, 0)
    pool.check()


@pytest.mark.parametrize("keep", [True, False])
def test_double_free_is_a_named_error_that_changes_nothing(keep: bool) -> None:
    pool, _ = pool_of(2)
    block = pool.allocate()
    pool.release(block, keep)
    for again in (True, False):
        with pytest.raises(DoubleFree, match=f"Block {block}"):
            pool.release(block, again)
    assert pool.available == 2
    assert pool.state(block) is (BlockState.CACHED if keep else BlockState.FREE)
    pool.check()


@pytest.mark.parametrize("block", [-1, 3, 10**9])
def test_foreign_ids_are_named_errors(block: int) -> None:
    pool, _ = pool_of(3)
    for use in (pool.reference, pool.refs, pool.state, lambda b: pool.release(b, keep=False)):
        with pytest.raises(UnknownBlock, match="not of this pool, whose blocks are 0 to 2"):
            use(block)
    pool.check()


def test_a_free_block_cannot_be_shared() -> None:
    pool, _ = pool_of(1)
    with pytest.raises(UnknownBlock, match="nothing in it to share"):
        pool.reference(0)
    pool.check()


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(BadSize, match="-1"):
        pool_of(-1)


def test_check_sees_a_wrong_counter_and_a_block_in_two_lists() -> None:
    pool, _ = pool_of(3)
    pool.num_shared = 1
    with pytest.raises(BrokenInvariant, match="num_shared"):
        pool.check()
    pool.num_shared = 0
    pool._cached[0] = None
    with pytest.raises(BrokenInvariant, match="partition"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a model that has a list for each thing and counts anew."""

    def __init__(self) -> None:
        super().__init__()
        self.reclaimed: list[int] = []
        self.pool = BlockPool(5, self.reclaimed.append)
        self.refs = dict.fromkeys(range(5), 0)
        self.cached: list[int] = []  # oldest first

    @rule()
    def allocate(self) -> None:
        free = [b for b, refs in self.refs.items() if refs == 0 and b not in self.cached]
        if not free and not self.cached:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate()
            return
        block = self.pool.allocate()
        if free:
            assert block in free
        else:
            assert block == self.cached.pop(0) == self.reclaimed[-1]
        self.refs[block] = 1

    @precondition(lambda self: any(self.refs.values()) or self.cached)
    @rule(data=st.data())
    def reference(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b, refs in self.refs.items() if refs or b in self.cached]))
        self.pool.reference(block)
        self.refs[block] += 1
        if block in self.cached:
            self.cached.remove(block)

    @rule(block=st.integers(0, 4), keep=st.booleans())
    def release(self, block: int, keep: bool) -> None:
        if self.refs[block] == 0:
            with pytest.raises(DoubleFree):
                self.pool.release(block, keep)
            return
        self.pool.release(block, keep)
        self.refs[block] -= 1
        if self.refs[block] == 0 and keep:
            self.cached.append(block)

    @rule()
    def drop_cached(self) -> None:
        self.pool.drop_cached()
        self.cached.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert list(self.pool.cached()) == self.cached
        states = [self.pool.state(block) for block in range(5)]
        for state, count in (
            (BlockState.FREE, self.pool.num_free),
            (BlockState.CACHED, self.pool.num_cached),
            (BlockState.ACTIVE, self.pool.num_active),
            (BlockState.SHARED, self.pool.num_shared),
        ):
            assert states.count(state) == count
        assert [self.pool.refs(block) for block in range(5)] == list(self.refs.values())
        assert self.pool.evictions == len(self.reclaimed)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

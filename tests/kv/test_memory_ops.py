"""MemoryOps: run by run they leave what each transfer would have left at once, and independent ones are one batch."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from octavo.kv import Kind, MemoryOps
from tests.kv.toy import ToyMemory

blocks = st.integers(0, 4)
transfers = st.lists(st.tuples(st.sampled_from(Kind), blocks, blocks).filter(lambda t: t[1] != t[2]), max_size=25)


@given(transfers, st.integers())
def test_batches_in_order_equal_each_transfer_at_its_time(decided: list[tuple[Kind, int, int]], seed: int) -> None:
    eager, batched = ToyMemory(5, 1, 5), ToyMemory(5, 1, 5)
    for memory in (eager, batched):
        memory.device[:, 0, 0], memory.host[:, 0, 0] = range(5), range(5, 10)
    ops = MemoryOps()
    for kind, source, target in decided:
        one = MemoryOps()
        one.add(kind, source, target)
        eager.execute(one, Random(0))
        ops.add(kind, source, target)
    batched.execute(ops, Random(seed))  # in any order inside a run
    assert (batched.device == eager.device).all()
    assert (batched.host == eager.host).all()
    assert [(kind, *pair) for kind, pairs in ops.runs for pair in pairs] == decided
    assert sum(ops.count(kind) for kind in Kind) == len(decided)
    assert bool(ops) == bool(decided)


def test_independent_transfers_of_a_kind_are_one_run() -> None:
    ops = MemoryOps()
    for target in range(1, 5):
        ops.add(Kind.COPY, 0, target)  # one source, many copies: a beam
    for block in range(5):
        ops.add(Kind.SWAP_OUT, block, 4 - block)  # ids of two memories do not meet
    assert [(kind, len(pairs)) for kind, pairs in ops.runs] == [(Kind.COPY, 4), (Kind.SWAP_OUT, 5)]


def test_a_transfer_that_touches_the_run_begins_a_new_one() -> None:
    for second in ((1, 2), (2, 0), (2, 1)):  # reads what was written, writes what was read, writes what was written
        ops = MemoryOps()
        ops.add(Kind.COPY, 0, 1)
        ops.add(Kind.COPY, *second)
        assert [pairs for _, pairs in ops.runs] == [[(0, 1)], [second]]

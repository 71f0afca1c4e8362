"""BlockTable: every address against division by hand, growth, and named errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kv import BlockTable
from octavo.kv.errors import BadPosition, BadSize, UnknownBlock

BLOCK_SIZES = [1, 4, 8, 16, 32, 64]


@given(st.lists(st.integers(0, 10_000), max_size=60), st.sampled_from(BLOCK_SIZES), st.data())
def test_addresses_are_those_of_division(blocks: list[int], block_size: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(blocks)))
    table = BlockTable(block_size, blocks[:cut])
    for block in blocks[cut:]:
        table.append(block)
    assert len(table) == len(blocks)
    assert table.array.dtype == np.int32
    assert table.array.tolist() == blocks == [table[i] for i in range(len(table))]
    slots = []
    for position in range(len(blocks) * block_size):
        block, offset = table.locate(position)
        assert (block, offset) == (blocks[position // block_size], position % block_size)
        slots.append(block * block_size + offset)
    stop = data.draw(st.integers(0, len(slots)))
    start = data.draw(st.integers(0, stop))
    assert table.slots(start, stop).dtype == np.int32
    assert table.slots(start, stop).tolist() == slots[start:stop]


def test_replace_moves_one_block_only() -> None:
    table = BlockTable(4, [5, 6, 7])
    table.replace(1, 9)
    table.replace(-1, 8)
    assert table.array.tolist() == [5, 9, 8]
    assert (table[-1], table[-3]) == (8, 5)


def test_appending_does_not_reallocate_each_time() -> None:
    table = BlockTable(16)
    buffers = set()
    for block in range(10_000):
        table.append(block)
        buffers.add(table._blocks.__array_interface__["data"][0])
    assert len(buffers) < 20
    assert table.array.tolist() == list(range(10_000))


def test_a_copy_of_a_table_shares_no_memory() -> None:
    table = BlockTable(4, [1, 2, 3])
    other = BlockTable(4, table.array)
    other.replace(0, 9)
    assert table.array.tolist() == [1, 2, 3]


@pytest.mark.parametrize("position", [-1, 12, 10**6])
def test_a_position_without_a_slot_is_a_named_error(position: int) -> None:
    table = BlockTable(4, [5, 6, 7])
    with pytest.raises(BadPosition, match=f"Position {position} has no slot: the table maps 12"):
        table.locate(position)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 13), (5, 4), (12, 13)])
def test_a_range_without_slots_is_a_named_error(start: int, stop: int) -> None:
    with pytest.raises(BadPosition, match="maps 12 positions"):
        BlockTable(4, [5, 6, 7]).slots(start, stop)


@pytest.mark.parametrize("index", [3, -4])
def test_a_logical_block_that_is_not_mapped_is_a_named_error(index: int) -> None:
    table = BlockTable(4, [5, 6, 7])
    with pytest.raises(BadPosition, match=f"Logical block {index} is not mapped"):
        table[index]
    with pytest.raises(BadPosition, match=f"Logical block {index} is not mapped"):
        table.replace(index, 1)


def test_no_table_holds_a_negative_block() -> None:
    table = BlockTable(4, [5])
    for use in (lambda: table.append(-1), lambda: table.replace(0, -1), lambda: BlockTable(4, [2, -1])):
        with pytest.raises(UnknownBlock, match="-1"):
            use()
    assert table.array.tolist() == [5]


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(BadSize, match="block_size is 0"):
        BlockTable(0)

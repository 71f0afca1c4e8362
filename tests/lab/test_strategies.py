"""The arena against a bitmap; what each strategy gives, refuses and copies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.kv.errors import BadSize, BrokenInvariant, DoubleFree
from octavo.kv.interface import Memory
from octavo.kv.manager import KVManager, Outcome
from octavo.kv.memory_ops import Kind
from octavo.lab import strategies
from octavo.lab.arena import Arena, Fit
from octavo.lab.memory import Account, Asked, Manager
from octavo.lab.memory_regions import Regions

SIZE = 24
_: type[Memory] = KVManager  # mypy: the engine's own manager has the interface, too


# --- the arena ----------------------------------------------------------------------------------------------------


def holes_of(free: list[bool]) -> list[tuple[int, int]]:
    """The maximal runs of free blocks."""
    holes: list[tuple[int, int]] = []
    for block, is_free in enumerate(free):
        if is_free and block and free[block - 1]:
            holes[-1] = holes[-1][0], holes[-1][1] + 1
        elif is_free:
            holes.append((block, 1))
    return holes


@settings(max_examples=200, deadline=None)
@given(fit=st.sampled_from(["first", "best"]), data=st.data())
def test_the_arena_is_a_bitmap(fit: Fit, data: st.DataObject) -> None:
    arena, free = Arena(SIZE, fit), [True] * SIZE
    runs: list[tuple[int, int]] = []
    for _step in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["take", "take", "give", "extend", "take all"]))
        if action == "take":
            count = data.draw(st.integers(1, 10))
            fitting = [hole for hole in holes_of(free) if hole[1] >= count]
            expected = min(fitting, key=(lambda h: h[1]) if fit == "best" else (lambda h: h[0]), default=None)
            start = arena.take(count)
            assert start == (expected and expected[0])
            if start is not None:
                runs.append((start, count))
                free[start : start + count] = [False] * count
        elif action == "take all":
            counts = data.draw(st.lists(st.integers(1, 8), max_size=3))
            taken = arena.take_all(counts)
            for start, count in taken or []:
                assert all(free[start : start + count])
                free[start : start + count] = [False] * count
            runs += taken or []
        elif action == "extend" and runs:
            index = data.draw(st.integers(0, len(runs) - 1))
            (start, held), count = runs[index], data.draw(st.integers(1, 6))
            after = free[start + held : start + held + count]
            assert arena.extend(start + held, count) == (len(after) == count and all(after))
            if len(after) == count and all(after):
                runs[index] = start, held + count
                free[start + held : start + held + count] = [False] * count
        elif action == "give" and runs:
            start, count = runs.pop(data.draw(st.integers(0, len(runs) - 1)))
            arena.give(start, count)
            free[start : start + count] = [True] * count
        arena.check()
        assert arena.holes == holes_of(free)
        assert arena.free == sum(free)
        assert arena.largest == max((count for _, count in holes_of(free)), default=0)


def test_what_is_free_or_foreign_cannot_be_given_back() -> None:
    arena = Arena(8)
    assert arena.take(4) == 0
    for start, count in ((3, 2), (4, 1), (6, 2)):
        with pytest.raises(DoubleFree):
            arena.give(start, count)
    for start, count in ((-1, 2), (7, 2), (0, 0)):
        with pytest.raises(BadSize):
            arena.give(start, count)
    with pytest.raises(BadSize):
        arena.take(0)
    with pytest.raises(BadSize):
        Arena(0)
    assert arena.holes == [(4, 4)]
    arena.free = 5
    with pytest.raises(BrokenInvariant):
        arena.check()


# --- strategies ---------------------------------------------------------------------------------------------------


def admitted(manager: Manager, seq_id: int, asked: Asked) -> bool:
    manager.expect(seq_id, asked)
    outcome = manager.admit(seq_id, list(range(asked.prompt))).outcome
    manager.check()
    return outcome is Outcome.ADMITTED


def computed(manager: Manager, seq_id: int, tokens: int) -> None:
    manager.commit(seq_id, tokens, list(range(1000)))


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("max", 64),
        ("own", 10 + 30),
        ("pow2", 10 + 16),
        ("oracle", 10 + 9),
        ("doubling", 10),
        ("chunks", 16),
        ("paged", 10),
    ],
)
def test_what_is_held_for_a_request(name: str, held: int) -> None:
    """A prompt of 10 tokens, an answer of 9 in truth and at most 30; its last token is never stored."""
    options = {"block_size": 1, **({"chunk": 16} if name == "chunks" else {})}
    manager = strategies.make(name, 128, 64, **options)
    assert admitted(manager, 0, Asked(0, 10, 9, 30))
    used = min(held, 18)
    assert manager.account() == Account(0, held - used, used)
    computed(manager, 0, 10)
    assert manager.account() == Account(10, held - used, used - 10)
    assert sum(piece.slots for piece in manager.pieces()) == 128
    assert sum(piece.slots for piece in manager.pieces() if piece.kind == "stored") == 10
    manager.free(0)
    assert manager.account() == (0, 0, 0)


@pytest.mark.parametrize(("output", "reserved"), [(1, 1), (2, 2), (3, 4), (25, 32), (32, 32), (33, 64)])
def test_powers_of_two(output: int, reserved: int) -> None:
    assert strategies.power_of_two(output) == reserved


def test_free_in_total_but_in_holes() -> None:
    manager = strategies.make("own", 100, 100, block_size=1)
    for seq_id, tokens in enumerate((30, 20, 30, 20)):
        assert admitted(manager, seq_id, Asked(seq_id, tokens - 5, 5, 5))
    manager.free(0)
    manager.free(2)
    late = Asked(4, 35, 5, 5)
    assert not admitted(manager, 4, late)
    assert manager.fits_no_hole(4, 35)
    assert (manager.refused, manager.fragmented) == (1, 1)
    assert not admitted(manager, 4, late)
    assert (manager.refused, manager.fragmented) == (2, 1)  # the same request, still waiting
    manager.free(1)
    assert not manager.fits_no_hole(4, 35)
    assert admitted(manager, 4, late)


def test_best_fit_keeps_the_large_hole() -> None:
    starts = {}
    for fit in ("first", "best"):
        manager = strategies.make("oracle", 100, 100, block_size=1, fit=fit)
        for seq_id, tokens in enumerate((40, 10, 20, 30)):
            assert admitted(manager, seq_id, Asked(seq_id, tokens - 1, 1, 1))
        manager.free(0)
        manager.free(2)
        assert admitted(manager, 4, Asked(4, 14, 1, 1))
        starts[fit] = int(manager.table(4).array[0])
    assert starts == {"first": 0, "best": 50}


def test_doubling_moves_what_does_not_fit_where_it_stands() -> None:
    manager = strategies.make("doubling", 64, 64, block_size=1)
    assert admitted(manager, 0, Asked(0, 4, 20, 20))
    assert admitted(manager, 1, Asked(1, 4, 20, 20))
    computed(manager, 0, 4)
    computed(manager, 1, 4)
    assert manager.grow(1)  # nothing is behind it
    assert manager.moved[Kind.COPY] == 0
    assert manager.grow(0)  # the second is in the way
    assert manager.moved[Kind.COPY] == 4
    assert manager.take_ops().runs == [(Kind.COPY, [(i, 12 + i) for i in range(4)])]
    assert manager.table(0).array.tolist() == list(range(12, 20))
    manager.check()


@pytest.mark.parametrize("name", ["max", "own", "pow2", "oracle", "doubling", "chunks"])
def test_samples_have_a_copy_each(name: str) -> None:
    manager = strategies.make(name, 1024, 64)
    asked = Asked(0, 33, 10, 10, sequences=3, others=lambda: [33, 33])
    assert admitted(manager, 0, asked)
    before = manager.account()
    computed(manager, 0, 33)
    manager.fork(0, 1)
    manager.fork(0, 2)
    manager.check()
    assert manager.moved[Kind.COPY] == 2 * 3  # blocks of 16
    assert manager.account().stored == 3 * 33
    assert sum(manager.account()) == sum(before)  # claimed when it was admitted
    assert not set(manager.table(1).array.tolist()) & set(manager.table(2).array.tolist())


def test_copy_on_write_can_be_switched_off() -> None:
    for copy_on_write, copies in ((True, 0), (False, 2)):
        manager = strategies.make("paged", 1024, 64, copy_on_write=copy_on_write)
        assert admitted(manager, 0, Asked(0, 33, 10, 10, sequences=3))
        computed(manager, 0, 33)
        manager.fork(0, 1)
        manager.fork(0, 2)
        manager.check()
        assert manager.moved[Kind.COPY] == copies
        assert manager.account().stored == 33 + copies
        assert manager.grow(1)
        manager.check()


def test_without_sharing_it_is_regions_of_single_blocks() -> None:
    manager = strategies.make("paged", 1024, 64, sharing=False)
    assert isinstance(manager, Regions)
    assert admitted(manager, 0, Asked(0, 33, 10, 10))
    assert sum(manager.account()) == 48


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("paging", {}, "There is no strategy 'paging'"),
        ("max", {"chunk": 16}, "has no setting 'chunk'"),
        ("max", {"fit": "worst"}, "fit is 'worst'"),
        ("paged", {"block_size": 0}, "block_size is 0"),
        ("chunks", {"chunk": 100}, "chunk is 100"),
    ],
)
def test_what_does_not_exist_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        strategies.make(name, 1024, 64, **options)

"""KVManager, one operation at a time: what it claims, shares, copies, moves and reports."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from octavo.kv import BlockState, Kind, KVManager, Outcome
from octavo.kv.errors import BadSequence, BadSize, BrokenInvariant, KVError, UnknownPin, UnknownSequence
from tests.kv.toy import Rig

BLOCK_SIZES = [1, 4, 8, 16, 32, 64]


def admitted(rig: Rig, seq_id: int, tokens: list[int], **options: bytes) -> int:
    """Admits and computes a prompt; returns its cached tokens."""
    admission = rig.manager.admit(seq_id, tokens, **options)
    assert admission.outcome is Outcome.ADMITTED
    rig.compute(seq_id, tokens, **options)
    return admission.cached_tokens


def unchanged_by(rig: Rig, error: type[KVError], match: str, act: Callable[[], object]) -> None:
    before = rig.state()
    with pytest.raises(error, match=match):
        act()
    assert rig.state() == before
    rig.manager.check()


# --- admission and growth --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("length", [1, 7, 64, 65])
def test_admission_claims_slots_for_all_tokens(block_size: int, length: int) -> None:
    rig = Rig(100, block_size)
    assert rig.manager.admit(1, range(length)) == (Outcome.ADMITTED, 0, None)
    assert (rig.manager.length(1), rig.manager.computed(1)) == (length, 0)
    assert len(rig.manager.table(1)) == -(-length // block_size)
    rig.compute(1, range(length))
    assert rig.right(1, range(length))


def test_a_growing_sequence_gets_a_page_only_when_its_last_is_full() -> None:
    rig = Rig(4)
    tokens = [1, 2, 3]
    admitted(rig, 1, tokens)
    rig.manager.take_changed()
    for token in range(10):
        tokens.append(token)
        new_page = rig.manager.length(1) % 4 == 0
        assert rig.manager.grow(1)
        assert rig.manager.take_changed() == ({1} if new_page else set())
        rig.compute(1, tokens)
    assert rig.right(1, tokens)
    assert len(rig.manager.table(1)) == 4


def test_growth_by_many_tokens_is_all_or_nothing() -> None:
    rig = Rig(4)
    admitted(rig, 1, [1, 2, 3])
    before = rig.state()
    assert not rig.manager.grow(1, 14)
    assert rig.state() == before
    assert rig.manager.grow(1, 13)
    assert rig.manager.grow(1, 0)
    assert not rig.manager.grow(1)
    rig.manager.check()


def test_no_space_changes_nothing_and_space_admits() -> None:
    rig = Rig(3)
    admitted(rig, 1, [1] * 8)
    before = rig.state()
    assert rig.manager.admit(2, [2] * 5).outcome is Outcome.NO_SPACE
    assert rig.manager.admit(2, [2] * 4, reserve=1).outcome is Outcome.NO_SPACE
    assert rig.state() == before
    assert rig.manager.admit(2, [2] * 4).outcome is Outcome.ADMITTED


def test_a_refused_prompt_is_admitted_as_soon_as_it_fits() -> None:
    rig = Rig(6)
    prompt = [1] * 12 + [2] * 8
    keys: list[bytes] = []  # asked for again and again with the same keys
    admitted(rig, 1, [1] * 8)
    admitted(rig, 2, [3] * 8)
    assert rig.manager.grow(2, 4)
    for _ in range(2):
        assert (
            rig.manager.admit(9, prompt, keys=keys).outcome is Outcome.NO_SPACE
        )  # 2 published, 3 more needed, 1 available
    rig.compute(2, [3] * 12)
    assert rig.manager.admit(9, prompt, keys=keys).outcome is Outcome.NO_SPACE
    assert rig.manager.grow(1, 4)
    rig.compute(1, [1] * 12)  # a third block of the prompt is published; none is available
    assert rig.manager.admit(9, prompt, keys=keys).outcome is Outcome.NO_SPACE
    rig.manager.free(2)
    assert rig.manager.admit(9, prompt, keys=keys, reserve=2).outcome is Outcome.NO_SPACE
    assert rig.manager.admit(9, prompt, keys=keys, reserve=1) == (Outcome.ADMITTED, 12, None)


def test_asking_again_is_not_fooled_by_another_prompt_or_salt() -> None:
    rig = Rig(3)
    admitted(rig, 1, [1] * 4)
    prompt = [1] * 12
    assert rig.manager.admit(2, [2] * 12).outcome is Outcome.NO_SPACE
    assert rig.manager.admit(2, prompt) == (Outcome.ADMITTED, 4, None)
    rig.manager.free(2)
    assert rig.manager.admit(2, prompt, salt=b"a").outcome is Outcome.NO_SPACE
    assert rig.manager.admit(2, prompt) == (Outcome.ADMITTED, 4, None)
    rig.manager.free(2)
    assert rig.manager.admit(2, prompt, use_cache=False).outcome is Outcome.NO_SPACE
    assert rig.manager.admit(2, prompt) == (Outcome.ADMITTED, 4, None)


def test_keys_kept_by_the_caller_serve_a_prompt_that_comes_back_longer_or_shorter() -> None:
    rig = Rig(4)
    text, keys = [1] * 12, list[bytes]()
    admitted(rig, 1, text)
    assert rig.manager.admit(2, text[:9], reserve=3, keys=keys).outcome is Outcome.NO_SPACE
    assert rig.manager.admit(2, [*text, 1], keys=keys) == (Outcome.ADMITTED, 12, None)
    assert len(keys) == 3
    rig.manager.free(2)
    assert rig.manager.admit(2, text[:9], keys=keys) == (Outcome.ADMITTED, 8, None)
    rig.manager.check()


def test_keys_stay_the_callers_and_name_no_block_beyond_the_prompt() -> None:
    rig = Rig(4)
    text, keys = [1] * 9, list[bytes]()
    rig.manager.cache.extend_keys(keys, [1] * 12, b"", 3)
    assert rig.manager.admit(0, text, keys=keys) == (Outcome.ADMITTED, 0, None)
    assert list(rig.manager.in_flight) == keys[:2]  # the third is of a block that it may fill with other tokens
    assert len(keys) == 3
    keys.clear()
    rig.compute(0, text)
    text += [2] * 3
    assert rig.manager.grow(0, 3)
    rig.compute(0, text)
    assert rig.right(0, text)


def test_a_refused_prompt_is_hashed_no_further_than_its_first_miss() -> None:
    rig = Rig(4)
    keys: list[bytes] = []
    assert rig.manager.admit(0, [1] * 20, keys=keys).outcome is Outcome.NO_SPACE
    assert len(keys) == 1


def test_who_waits_is_told_for_which_block() -> None:
    rig = Rig(12)
    prompt, other, keys = [1] * 9, [1] * 8 + [2] * 5, list[bytes]()
    rig.manager.cache.extend_keys(keys, other, b"", 3)
    rig.manager.admit(0, prompt)
    for block in range(2):
        admission = rig.manager.admit(1, other, keys=keys)
        assert admission == (Outcome.WAIT, 0, keys[block])
        assert admission.awaited in rig.manager.in_flight
        rig.compute(0, prompt, 4)
        assert admission.awaited not in rig.manager.in_flight
    assert rig.manager.admit(1, other, keys=keys) == (Outcome.ADMITTED, 8, None)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("num_sequences", [1, 2, 4])
def test_the_blocks_of_a_forked_prompt_are_foretold(num_tokens: int, num_sequences: int) -> None:
    """By doing it: prompt, forks, one token each."""
    rig = Rig(100)
    tokens = [*range(num_tokens)]
    admitted(rig, 0, tokens)
    for child in range(1, num_sequences):
        rig.manager.fork(0, child)
    for seq_id in range(num_sequences):
        assert rig.manager.grow(seq_id)
    usage = rig.manager.usage()
    assert rig.manager.blocks_to_admit(num_tokens, num_sequences) == usage.active + usage.shared


def test_admission_refuses_what_cannot_be() -> None:
    rig = Rig(8, num_host_blocks=8)
    admitted(rig, 1, [1] * 5)
    admitted(rig, 2, [2] * 5)
    assert rig.manager.swap_out([2])
    unchanged_by(rig, BadSequence, "Sequence 1 exists", lambda: rig.manager.admit(1, [1]))
    unchanged_by(rig, BadSequence, "Sequence 2 exists", lambda: rig.manager.admit(2, [1]))
    unchanged_by(rig, BadSequence, "has no tokens", lambda: rig.manager.admit(3, []))
    unchanged_by(rig, BadSequence, "must be 4 int32", lambda: rig.manager.admit(3, [1, 1, 1, 1, 2**40, 1, 1, 1, 1]))


def test_operations_on_an_unknown_sequence_are_named_errors() -> None:
    rig = Rig(8, num_host_blocks=2)
    manager = rig.manager
    for act in (
        lambda: manager.grow(7),
        lambda: manager.commit(7, 1, [1]),
        lambda: manager.fork(7, 8),
        lambda: manager.free(7),
        lambda: manager.table(7),
        lambda: manager.length(7),
        lambda: manager.computed(7),
        lambda: manager.swap_out([7]),
        lambda: manager.swap_in([7]),
        lambda: manager.blocks_to_swap_in([7]),
    ):
        unchanged_by(rig, UnknownSequence, "Sequence 7", act)


def test_a_sequence_never_shrinks_and_commits_no_more_than_it_claimed() -> None:
    rig = Rig(8)
    admitted(rig, 1, [1] * 5)
    unchanged_by(rig, BadSequence, "never shrinks", lambda: rig.manager.grow(1, -1))
    unchanged_by(rig, BadSequence, "5 slots, 5 written", lambda: rig.manager.commit(1, 1, [1] * 6))
    assert rig.manager.grow(1, 3)
    unchanged_by(rig, BadSequence, "not -1 more", lambda: rig.manager.commit(1, -1, [1] * 8))
    unchanged_by(rig, BadSequence, "must be 4 int32", lambda: rig.manager.commit(1, 3, [1] * 7))


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (2**27, 16)])
def test_sizes_that_cannot_be_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(BadSize, match=str(num_blocks)):
        KVManager(num_blocks, block_size)
    with pytest.raises(BadSize, match="-1"):
        KVManager(1, num_host_blocks=-1)


# --- sharing ---------------------------------------------------------------------------------------------------------
def test_a_fork_shares_all_and_each_first_write_copies_but_the_last() -> None:
    rig = Rig(8)
    texts = {0: [1, 2, 3, 4, 5, 6]}
    admitted(rig, 0, texts[0])
    for child in (1, 2):
        rig.manager.fork(0, child)
        texts[child] = list(texts[0])
    assert rig.blocks(0) == rig.blocks(1) == rig.blocks(2)
    assert rig.manager.usage().shared == 2
    for seq_id in (2, 0, 1):
        texts[seq_id].append(10 + seq_id)
        assert rig.manager.grow(seq_id)
    assert rig.manager.pending.count(Kind.COPY) == 2
    assert len(rig.manager.pending.runs) == 1  # one batched call
    for seq_id, text in texts.items():
        rig.compute(seq_id, text)
    assert all(rig.right(seq_id, text) for seq_id, text in texts.items())
    assert len({rig.blocks(seq_id)[1] for seq_id in texts}) == 3
    assert len({rig.blocks(seq_id)[0] for seq_id in texts}) == 1


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    rig = Rig(8)
    admitted(rig, 0, [1] * 8)
    rig.manager.fork(0, 1)
    assert rig.manager.grow(0)
    assert rig.manager.grow(1)
    assert not rig.manager.take_ops()
    assert rig.blocks(0)[2] != rig.blocks(1)[2]
    rig.manager.check()


def test_a_copy_lacks_a_block_and_nothing_changes() -> None:
    rig = Rig(2)
    admitted(rig, 0, [1] * 6)
    rig.manager.fork(0, 1)
    before = rig.state()
    assert not rig.manager.grow(0)
    assert rig.state() == before
    rig.manager.free(0)
    assert rig.manager.grow(1)  # alone now: it writes in place
    assert not rig.manager.take_ops()


def test_a_fork_of_a_beginning_shares_that_much() -> None:
    rig = Rig(8)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    admitted(rig, 0, text)
    rig.manager.fork(0, 1, 6)
    assert rig.blocks(1) == rig.blocks(0)[:2]
    assert (rig.manager.length(1), rig.manager.computed(1)) == (6, 6)
    other = [*text[:6], 0, 0, 0]
    assert rig.manager.grow(0)  # its own last block is its own still
    assert rig.manager.grow(1, 3)
    assert rig.manager.take_ops().runs == [(Kind.COPY, [(rig.blocks(0)[1], rig.blocks(1)[1])])]
    rig = Rig(8)
    admitted(rig, 0, text)
    rig.manager.fork(0, 1, 6)
    rig.manager.free(0)
    assert rig.manager.grow(1, 3)
    rig.compute(1, other)
    assert rig.right(1, other)
    assert admitted(rig, 2, text) == 8  # the full block it forked from is as it was
    rig.manager.free(2)
    assert admitted(rig, 3, other) == 8  # and the one of its own is found too


def test_a_fork_needs_a_computed_parent_and_a_new_child() -> None:
    rig = Rig(8)
    rig.manager.admit(0, [1] * 6)
    unchanged_by(rig, BadSequence, "computed 0 of 6", lambda: rig.manager.fork(0, 1))
    rig.compute(0, [1] * 6)
    unchanged_by(rig, BadSequence, "Sequence 0 exists", lambda: rig.manager.fork(0, 0))
    for length in (0, 7, -1):
        unchanged_by(rig, BadSequence, f"not {length}", lambda length=length: rig.manager.fork(0, 1, length))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_beams_hold_as_many_blocks_as_the_tree_has(steps: int) -> None:
    """A beam search whose beams all descend from one each second step: blocks = distinct block contents, no more."""
    rig = Rig(64)
    texts = {0: [7] * 10}
    admitted(rig, 0, texts[0])
    for child in (1, 2, 3):
        rig.manager.fork(0, child)
        texts[child] = list(texts[0])
    next_id = 4
    for step in range(steps * 4):
        for seq_id, text in texts.items():
            text.append(100 * step + seq_id)
            assert rig.manager.grow(seq_id)
        for seq_id, text in texts.items():
            rig.compute(seq_id, text)
        if step % 2:
            survivor = max(texts)
            for loser in [seq_id for seq_id in texts if seq_id != survivor]:
                rig.manager.free(loser)
                del texts[loser]
                rig.manager.fork(survivor, next_id)
                texts[next_id] = list(texts[survivor])
                next_id += 1
        assert all(rig.right(seq_id, text) for seq_id, text in texts.items())
        tree = {tuple(text[: min(end, len(text))]) for text in texts.values() for end in range(4, len(text) + 4, 4)}
        usage = rig.manager.usage()
        assert usage.active + usage.shared == len(tree)


def test_equal_blocks_computed_side_by_side_become_one() -> None:
    rig = Rig(8)
    prompt = [1] * 8
    for seq_id in (0, 1):
        assert rig.manager.admit(seq_id, prompt, use_cache=False).outcome is Outcome.ADMITTED
    assert set(rig.blocks(0)).isdisjoint(rig.blocks(1))
    rig.compute(0, prompt)
    rig.manager.take_changed()
    rig.compute(1, prompt)
    assert rig.blocks(0) == rig.blocks(1)
    assert rig.manager.take_changed() == {1}
    assert (rig.manager.usage().shared, rig.manager.usage().active) == (2, 0)


def test_prefix_caching_can_be_turned_off() -> None:
    rig = Rig(8, prefix_caching=False)
    for seq_id in (0, 1):
        assert admitted(rig, seq_id, [1] * 8) == 0
    assert set(rig.blocks(0)).isdisjoint(rig.blocks(1))
    rig.manager.free(0)
    usage = rig.manager.usage()
    assert (usage.cached, usage.lookup_tokens, usage.hit_rate) == (0, 0, 0.0)
    assert rig.manager.pin([1] * 8).tokens == 0


def test_use_cache_false_computes_all_and_still_publishes() -> None:
    rig = Rig(8)
    admitted(rig, 0, [1] * 8)
    assert rig.manager.admit(1, [1] * 9, use_cache=False) == (Outcome.ADMITTED, 0, None)
    assert rig.manager.usage().lookup_tokens == 8  # of the first only
    rig.compute(1, [1] * 9)
    assert rig.blocks(1)[:2] == rig.blocks(0)


def test_salts_do_not_share() -> None:
    rig = Rig(8)
    assert admitted(rig, 0, [1] * 9, salt=b"a") == 0
    assert admitted(rig, 1, [1] * 9, salt=b"b") == 0
    assert admitted(rig, 2, [1] * 9, salt=b"a") == 8


# --- swapping --------------------------------------------------------------------------------------------------------
def test_a_swapped_group_comes_back_with_its_sharing() -> None:
    rig = Rig(8, num_host_blocks=8, prefix_caching=False)
    texts = {0: [1, 2, 3, 4, 5, 6], 1: [1, 2, 3, 4, 5, 6]}
    admitted(rig, 0, texts[0])
    rig.manager.fork(0, 1)
    texts[1].append(9)
    assert rig.manager.grow(1)
    rig.compute(1, texts[1])
    assert rig.manager.swap_out([0, 1])
    usage = rig.manager.usage()
    assert (usage.host_used, usage.free, usage.swapped_out) == (3, 8, 3)
    assert all(rig.right(seq_id, text) for seq_id, text in texts.items())
    admitted(rig, 5, [0] * 20)  # overwrites what they had
    assert rig.manager.blocks_to_swap_in([0, 1]) == 3
    assert rig.manager.swap_in([0, 1])
    usage = rig.manager.usage()
    assert (usage.host_used, usage.shared, usage.active, usage.swapped_in) == (0, 1, 7, 3)
    assert all(rig.right(seq_id, text) for seq_id, text in texts.items())
    assert rig.manager.take_changed() == {0, 1, 5}
    rig.manager.check()


@pytest.mark.parametrize("salt", [b"", b"tenant"])
def test_swap_in_shares_what_is_still_on_the_device(salt: bytes) -> None:
    rig = Rig(8, num_host_blocks=8)
    text = [1] * 12 + [2]
    admitted(rig, 0, text, salt=salt)
    assert rig.manager.swap_out([0])
    assert rig.manager.pool.num_cached == 3
    admitted(rig, 1, [1] * 8, salt=salt)  # holds two of the three again
    assert rig.manager.blocks_to_swap_in([0]) == 2  # the third is cached, the partial one is gone
    assert rig.manager.swap_in([0])
    assert rig.manager.take_ops().count(Kind.SWAP_IN) == 1
    assert rig.blocks(0)[:2] == rig.blocks(1)
    rig.manager.check()


def test_swap_in_republishes_what_the_device_forgot() -> None:
    rig = Rig(4, num_host_blocks=4)
    text = [1] * 8 + [2, 3]
    admitted(rig, 0, text)
    assert rig.manager.swap_out([0])
    admitted(rig, 1, [9] * 16)
    rig.manager.free(1)
    assert rig.manager.swap_in([0])
    assert rig.right(0, text)
    rig.manager.check()
    text += [4, 5]
    assert rig.manager.grow(0, 2)
    rig.compute(0, text)
    assert admitted(rig, 2, [*text, 6]) == 12
    assert rig.right(2, [*text, 6])


def test_swap_out_drops_slots_not_computed() -> None:
    rig = Rig(12, num_host_blocks=2)
    text = [1] * 20
    rig.manager.admit(0, text)
    rig.compute(0, text, 6)
    assert rig.manager.swap_out([0])
    assert (rig.manager.length(0), rig.manager.computed(0), rig.manager.usage().host_used) == (6, 6, 2)
    assert rig.manager.swap_in([0])
    other = text[:6] + [2] * 14  # what was dropped need not come again
    assert rig.manager.grow(0, 14)
    rig.compute(0, other)
    assert rig.right(0, other)
    assert admitted(rig, 1, text) == 4


def test_swapping_is_all_or_nothing() -> None:
    rig = Rig(6, num_host_blocks=3)
    admitted(rig, 0, [1] * 8)
    admitted(rig, 1, [2] * 8)
    before = rig.state()
    assert not rig.manager.swap_out([0, 1])
    assert rig.state() == before
    assert rig.manager.swap_out([0])
    admitted(rig, 2, [3] * 12)
    before = rig.state()
    assert not rig.manager.swap_in([0])
    assert rig.state() == before
    rig.manager.free(1)
    assert not rig.manager.swap_in([0], reserve=2)
    assert rig.manager.swap_in([0], reserve=1)
    rig.manager.check()


def test_swap_groups_are_checked_before_anything_moves() -> None:
    rig = Rig(8, num_host_blocks=8)
    admitted(rig, 0, [1] * 8)
    admitted(rig, 1, [2] * 8)
    unchanged_by(rig, BadSequence, "not distinct", lambda: rig.manager.swap_out([0, 0]))
    unchanged_by(rig, UnknownSequence, "Sequence 5 is not on the device", lambda: rig.manager.swap_out([0, 5]))
    assert rig.manager.swap_out([0])
    unchanged_by(rig, UnknownSequence, "Sequence 1 is not swapped out", lambda: rig.manager.swap_in([0, 1]))
    unchanged_by(rig, UnknownSequence, "swapped out", lambda: rig.manager.grow(0))
    rig.manager.free(0)
    assert rig.manager.usage().host_used == 0


# --- pins and the cache ----------------------------------------------------------------------------------------------
def test_a_pinned_prefix_survives_any_pressure() -> None:
    rig = Rig(6)
    admitted(rig, 0, [1] * 10)
    pin = rig.manager.pin([1] * 11)
    assert pin.tokens == 8
    again = rig.manager.pin([1] * 4)
    rig.manager.free(0)
    for seq_id in (1, 2):
        admitted(rig, seq_id, [10 + seq_id] * 16)
        rig.manager.free(seq_id)
    assert rig.manager.num_pinned_blocks == rig.manager.usage().pinned == 2
    assert not rig.manager.can_ever_fit([9] * 16)
    assert rig.manager.can_ever_fit([9] * 15)
    assert rig.manager.can_ever_fit([1] * 23)  # it begins with what is pinned
    assert not rig.manager.can_ever_fit([1] * 23, salt=b"other")
    assert admitted(rig, 3, [1] * 10) == 8
    rig.manager.free(3)
    rig.manager.unpin(pin.id)
    assert rig.manager.num_pinned_blocks == 1
    rig.manager.check()
    rig.manager.unpin(again.id)
    assert rig.manager.usable_blocks == 6
    admitted(rig, 4, [4] * 24)
    rig.manager.free(4)
    assert admitted(rig, 5, [1] * 10) == 0
    unchanged_by(rig, UnknownPin, f"Pin {pin.id}", lambda: rig.manager.unpin(pin.id))


def test_pins_know_salts() -> None:
    rig = Rig(6)
    admitted(rig, 0, [1] * 8, salt=b"a")
    assert rig.manager.pin([1] * 8).tokens == 0
    assert rig.manager.pin([1] * 8, b"a").tokens == 8


def test_reset_forgets_every_prefix_and_harms_nobody() -> None:
    rig = Rig(12, num_host_blocks=4)
    text, swapped, waited_for = [1] * 9, [2] * 9, [3] * 9
    admitted(rig, 0, text)
    admitted(rig, 1, swapped)
    assert rig.manager.swap_out([1])
    rig.manager.admit(2, waited_for)
    pin = rig.manager.pin(text)
    rig.manager.reset_prefix_cache()
    rig.manager.check()
    usage = rig.manager.usage()
    assert (usage.cached, usage.pinned) == (0, 0)
    assert rig.manager.admit(3, waited_for) == (Outcome.ADMITTED, 0, None)  # not a wait for what is published no more
    assert rig.manager.swap_in([1])
    for seq_id, tokens in ((0, text), (1, swapped)):
        tokens += [0] * 3
        assert rig.manager.grow(seq_id, 3)
        rig.compute(seq_id, tokens)
        assert rig.right(seq_id, tokens)
    rig.compute(2, waited_for)
    rig.manager.unpin(pin.id)
    for seq_id in range(4):
        rig.manager.free(seq_id)
    assert (rig.manager.pool.num_free, rig.manager.usage().host_used) == (12, 0)
    assert admitted(rig, 4, text) == 0
    assert admitted(rig, 5, text) == 8
    rig.manager.check()


# --- reports ---------------------------------------------------------------------------------------------------------
def test_usage_counts_a_shared_block_once() -> None:
    rig = Rig(16)
    admitted(rig, 0, [1] * 6)
    rig.manager.fork(0, 1)
    rig.manager.fork(0, 2, 5)
    usage = rig.manager.usage()
    assert (usage.shared, usage.active, usage.tokens_stored, usage.slots_held) == (2, 0, 6, 8)
    assert usage.utilisation == 6 / 8
    assert rig.manager.grow(0)
    rig.compute(0, [1] * 7)
    usage = rig.manager.usage()
    assert (usage.tokens_stored, usage.slots_held, usage.copies) == (4 + 3 + 2, 12, 1)
    assert KVManager(4).usage().utilisation == 1.0


def test_usage_counts_a_published_block_as_the_full_one_it_is() -> None:
    rig = Rig(16)
    admitted(rig, 0, [1] * 9)
    rig.manager.fork(0, 1, 6)
    rig.manager.free(0)  # of the second block the child reads half; the cache still finds all of it
    usage = rig.manager.usage()
    assert (usage.active, usage.tokens_stored, usage.slots_held) == (2, 8, 8)


def test_usage_counts_hits_evictions_and_rates() -> None:
    rig = Rig(4)
    admitted(rig, 0, [1] * 10)
    rig.manager.free(0)
    assert admitted(rig, 1, [1] * 10) == 8
    rig.manager.free(1)
    admitted(rig, 2, [2] * 16)
    usage = rig.manager.usage()
    assert (usage.hit_tokens, usage.lookup_tokens, usage.evictions) == (8, 36, 2)
    assert usage.hit_rate == 8 / 36


def test_snapshot_tells_who_holds_each_block_and_why_it_is_kept() -> None:
    rig = Rig(6)
    admitted(rig, 0, [1] * 6)
    rig.manager.fork(0, 1)
    admitted(rig, 2, [2] * 4)
    rig.manager.free(2)
    rig.manager.pin([1] * 4)
    first, second = rig.blocks(0)
    blocks = rig.manager.snapshot()
    assert [report.block for report in blocks] == list(range(6))
    assert blocks[first].holders == ((0, 0), (1, 0))
    assert (blocks[first].refs, blocks[first].pins, blocks[first].filled) == (3, 1, 4)
    assert blocks[first].state is BlockState.SHARED
    assert len(blocks[first].key or "") == 64
    assert (blocks[second].refs, blocks[second].filled, blocks[second].key) == (2, 2, None)
    cached = [report for report in blocks if report.state is BlockState.CACHED]
    assert [(report.refs, report.filled, report.holders) for report in cached] == [(0, 4, ())]
    assert sum(report.state is BlockState.FREE and report.filled == 0 for report in blocks) == 3


# --- the proof itself ------------------------------------------------------------------------------------------------
def broken_reference(rig: Rig) -> None:
    rig.manager.pool.reference(rig.blocks(0)[0])


def broken_table(rig: Rig) -> None:
    rig.manager.table(0).replace(1, rig.blocks(1)[0])


def broken_length(rig: Rig) -> None:
    rig.manager.sequences[0].computed = 99


def broken_claim(rig: Rig) -> None:
    rig.manager.sequences[2].writable_until = 12


def broken_key(rig: Rig) -> None:
    cache, block = rig.manager.cache, rig.blocks(1)[0]
    cache.entries[block] = cache.entries[block]._replace(tokens=bytes(16))


def broken_parent(rig: Rig) -> None:
    rig.manager.cache.forget(rig.blocks(0)[0])
    rig.manager.sequences[0].findable = rig.manager.sequences[2].findable = False


def broken_order(rig: Rig) -> None:
    rig.manager.free(1)
    pool = rig.manager.pool
    pool._cached.move_to_end(next(pool.cached()))


def broken_publication(rig: Rig) -> None:
    assert rig.manager.grow(0)  # its last block is its own now, with a slot claimed and not computed
    rig.manager._publish(rig.manager.sequences[0], 3, [1] * 12)


def broken_flight(rig: Rig) -> None:
    rig.manager.in_flight[b"key"] = 55


def broken_pin(rig: Rig) -> None:
    rig.manager.pinned[0] = 1


def broken_host(rig: Rig) -> None:
    rig.manager.host.allocate()


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (broken_reference, "counts 3 references; 2 hold it"),
        (broken_table, "references"),
        (broken_length, "Sequence 0 computed 99 of 10"),
        (broken_claim, "Sequence 2 may write"),
        (broken_key, "wrong key"),
        (broken_parent, "is not"),
        (broken_order, "before its child"),
        (broken_publication, "may write block"),
        (broken_flight, "Sequence 55 is waited for"),
        (broken_pin, "Pins hold"),
        (broken_host, "host block 0 counts 1 references; 0 hold it"),
    ],
)
def test_check_finds_every_kind_of_harm(harm: Callable[[Rig], None], match: str) -> None:
    rig = Rig(12, num_host_blocks=2)
    admitted(rig, 0, [1] * 10)
    admitted(rig, 1, [2] * 12)
    rig.manager.fork(0, 2)
    rig.manager.check()
    harm(rig)
    with pytest.raises(BrokenInvariant, match=match):
        rig.manager.check()


def test_tables_feed_a_batch_without_a_loop() -> None:
    rig = Rig(20)
    admitted(rig, 0, [1] * 10)
    table = rig.manager.table(0)
    assert table.array.dtype == np.int32
    assert table.slots(3, 6).tolist() == [table[0] * 4 + 3, table[1] * 4, table[1] * 4 + 1]

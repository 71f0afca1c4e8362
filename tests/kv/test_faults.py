"""The memory faults engines like this had (section 5 of the design): one test each, named for it."""

from __future__ import annotations

import pytest

from octavo.kv import BlockState, KVManager, Outcome, prefix_cache
from tests.kv.toy import Rig


def admitted(rig: Rig, seq_id: int, tokens: list[int], **options: bytes) -> int:
    admission = rig.manager.admit(seq_id, tokens, **options)
    assert admission.outcome is Outcome.ADMITTED
    rig.compute(seq_id, tokens, **options)
    return admission.cached_tokens


def test_a_hash_collision_hands_nobody_anothers_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "digest", lambda data: b"\0")  # every key collides with every other
    rig = Rig(40)
    prompts = {0: [1] * 9, 1: [2] * 9, 2: [1, 1, 1, 1, 2, 2, 2, 2, 3], 3: [1] * 4 + [5]}
    for seq_id, prompt in prompts.items():
        cached = admitted(rig, seq_id, prompt)
        assert cached == (4 if seq_id in (2, 3) else 0)  # the one block whose tokens are the same: no other
    assert admitted(rig, 4, [1] * 9, salt=b"another tenant") == 0
    for seq_id, prompt in prompts.items():
        assert rig.right(seq_id, prompt)
    assert rig.right(4, [1] * 9, salt=b"another tenant")


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_prompt_that_hits_in_full_keeps_a_query_token(block_size: int, num_blocks: int) -> None:
    rig = Rig(20, block_size)
    prompt = list(range(block_size * num_blocks))
    admitted(rig, 0, prompt)
    rig.manager.free(0)
    assert rig.manager.admit(1, prompt) == (Outcome.ADMITTED, block_size * (num_blocks - 1), None)
    assert rig.manager.computed(1) < rig.manager.length(1) == len(prompt)
    rig.compute(1, prompt)
    assert rig.right(1, prompt)
    assert rig.manager.pool.num_cached == 0  # its last block was published before: the two are one again


def test_a_preempted_request_that_hits_on_return_has_the_hits_computed() -> None:
    rig = Rig(10)
    tokens = [1, 2, 3, 4, 5, 6]
    admitted(rig, 0, tokens)
    for token in range(5):
        tokens.append(token)
        assert rig.manager.grow(0)
        rig.compute(0, tokens)
    rig.manager.free(0)  # preempted: recomputed on return
    tokens.append(99)
    assert rig.manager.admit(0, tokens) == (Outcome.ADMITTED, 8, None)
    assert (rig.manager.computed(0), rig.manager.length(0)) == (8, 12)
    assert rig.right(0, tokens)  # the eight are there, and right, with nothing computed
    rig.compute(0, tokens)  # only the other four
    assert rig.right(0, tokens)


def test_no_block_is_shared_before_its_kv_is_computed() -> None:
    rig = Rig(10)
    prompt = [1] * 13
    assert rig.manager.admit(0, prompt) == (Outcome.ADMITTED, 0, None)
    before = rig.state()
    assert rig.manager.admit(1, prompt).outcome is Outcome.WAIT  # same step
    assert rig.state() == before
    assert rig.manager.admit(2, [2] * 13).outcome is Outcome.ADMITTED  # others do not wait
    rig.compute(0, prompt, 6)
    assert rig.manager.admit(1, prompt).outcome is Outcome.WAIT  # its second block is half computed
    assert rig.manager.admit(3, [*prompt[:5], 9]) == (Outcome.ADMITTED, 4, None)  # who needs the first only gets it
    rig.compute(0, prompt, 7)
    assert rig.manager.admit(1, prompt) == (Outcome.ADMITTED, 12, None)
    assert rig.blocks(1)[:3] == rig.blocks(0)[:3]
    assert rig.right(1, prompt)


@pytest.mark.parametrize("leave", ["free", "swap_out", "reset"])
def test_nobody_waits_for_a_sequence_that_will_not_compute(leave: str) -> None:
    rig = Rig(10, num_host_blocks=10)
    prompt = [1] * 13
    rig.manager.admit(0, prompt)
    rig.compute(0, prompt, 6)
    assert rig.manager.admit(1, prompt).outcome is Outcome.WAIT
    if leave == "free":
        rig.manager.free(0)
    elif leave == "swap_out":
        assert rig.manager.swap_out([0])
    else:
        rig.manager.reset_prefix_cache()
    assert rig.manager.admit(1, prompt) == (Outcome.ADMITTED, 0 if leave == "reset" else 4, None)
    rig.compute(1, prompt)
    assert rig.right(1, prompt)


def test_a_hit_is_not_handed_out_under_eviction_pressure() -> None:
    rig = Rig(4)
    admitted(rig, 0, [1] * 8)
    rig.manager.free(0)
    admitted(rig, 1, [2] * 8)
    assert rig.manager.pool.available == 2  # the very blocks that the next prompt hits
    before = rig.state()
    assert rig.manager.admit(2, [1] * 9).outcome is Outcome.NO_SPACE
    assert rig.state() == before
    rig.manager.free(1)
    assert rig.manager.admit(2, [1] * 9) == (Outcome.ADMITTED, 8, None)
    assert len(set(rig.blocks(2))) == 3
    rig.compute(2, [1] * 9)
    assert rig.right(2, [1] * 9)


def test_leaves_are_reclaimed_before_what_they_follow() -> None:
    rig = Rig(4)
    admitted(rig, 0, [1] * 16)
    rig.manager.free(0)
    for size, hits in ((4, 12), (8, 8), (12, 4)):
        assert rig.manager.admit(1, [size] * size, use_cache=False).outcome is Outcome.ADMITTED
        rig.manager.check()
        blocks = rig.manager.cache.match([1] * 16, b"", 4, [])
        assert len(blocks) * 4 == hits  # what is left of the prefix is found whole
        rig.manager.free(1)


def test_many_forks_do_not_fill_the_swap_and_stop_everything() -> None:
    rig = Rig(24, num_host_blocks=6)
    for request in range(3):  # n = 4 over a prompt of two and a half blocks, each a token further: 3 + 3 blocks
        root = 10 * request
        prompt = [request] * 10
        admitted(rig, root, prompt)
        for child in range(1, 4):
            rig.manager.fork(root, root + child)
        for child in range(4):
            assert rig.manager.grow(root + child)
            rig.compute(root + child, [*prompt, child])
    groups = [[10 * request + child for child in range(4)] for request in range(3)]
    assert rig.manager.swap_out(groups[0])  # not 4 x 3 blocks: what they share goes once
    assert rig.manager.usage().host_used == 6
    before = rig.state()
    assert not rig.manager.swap_out(groups[1])  # full: the caller recomputes instead
    assert rig.state() == before
    for seq_id in groups[1]:
        rig.manager.free(seq_id)
    assert rig.manager.swap_in(groups[0])
    assert rig.manager.swap_out(groups[2])
    for seq_id in groups[2]:
        rig.manager.free(seq_id)  # and who leaves while swapped out leaves nothing behind
    assert rig.manager.usage().host_used == 0
    assert all(rig.right(child, [0] * 10 + [child]) for child in groups[0])
    rig.manager.check()


def test_a_request_too_long_for_the_pool_is_known_from_the_start() -> None:
    manager = KVManager(8, 4)
    assert manager.can_ever_fit([1] * 31)
    assert not manager.can_ever_fit([1] * 32)  # 8 blocks, and one for the first token
    assert manager.blocks_to_admit(32) == 9
    assert manager.can_ever_fit([1] * 15, num_sequences=5)
    assert not manager.can_ever_fit([1] * 15, num_sequences=6)
    for tokens, sequences in ((31, 1), (15, 5), (16, 4)):
        rig = Rig(8)  # what is said to fit fits
        prompt = list(range(tokens))
        admitted(rig, 0, prompt)
        for child in range(1, sequences):
            rig.manager.fork(0, child)
        assert all(rig.manager.grow(seq_id) for seq_id in range(sequences))


@pytest.mark.parametrize("computed", [0, 1, 4, 6, 13])
@pytest.mark.parametrize("swapped", [False, True])
def test_abort_in_mid_prefill_leaks_nothing(computed: int, swapped: bool) -> None:
    rig = Rig(8, num_host_blocks=8)
    prompt = [1] * 13
    rig.manager.admit(0, prompt)
    if computed:
        rig.compute(0, prompt, computed)
    if swapped:
        assert rig.manager.swap_out([0])
    rig.manager.free(0)
    rig.manager.check()
    usage = rig.manager.usage()
    assert (usage.active, usage.shared, usage.host_used) == (0, 0, 0)
    assert usage.cached == computed // 4
    assert not rig.manager.in_flight
    assert rig.manager.take_changed() == set()
    admitted(rig, 0, [2] * 32)  # every block can be had again


def test_abort_with_a_copy_pending_harms_nobody() -> None:
    rig = Rig(4)
    text = [1] * 6
    admitted(rig, 0, text)
    rig.manager.fork(0, 1)
    assert rig.manager.grow(1)  # its copy is decided, not done
    target = rig.blocks(1)[1]
    rig.manager.free(1)
    assert rig.manager.admit(2, [2] * 3).outcome is Outcome.ADMITTED
    assert rig.blocks(2) == [target]
    rig.compute(2, [2] * 3)
    assert rig.right(0, text)
    assert rig.right(2, [2] * 3)


def test_a_client_that_left_keeps_no_block() -> None:
    rig = Rig(8)
    admitted(rig, 0, [1] * 6)
    for child in (1, 2):
        rig.manager.fork(0, child)
        assert rig.manager.grow(child)
    for seq_id in (1, 0, 2):
        rig.manager.free(seq_id)
        rig.manager.check()
    assert {report.state for report in rig.manager.snapshot()} <= {BlockState.FREE, BlockState.CACHED}

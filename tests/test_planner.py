"""The capacity planner against sums done by hand and by brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.planner import KVShape, Plan, plan

LLAMA_7B = KVShape(num_layers=32, num_kv_heads=32, head_dim=128, element_bytes=2)
GIB = 2**30

shapes = st.builds(
    KVShape,
    num_layers=st.integers(1, 80),
    num_kv_heads=st.integers(1, 64),
    head_dim=st.sampled_from([32, 64, 80, 128, 256]),
    element_bytes=st.sampled_from([2, 4]),
)
block_sizes = st.sampled_from([1, 4, 8, 16, 32, 64])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    context = draw(st.integers(1, 131072))
    return plan(
        draw(shapes),
        memory=draw(st.integers(1, 2**42)),
        context=context,
        typical=draw(st.none() | st.integers(1, context)),
        block_size=draw(block_sizes),
    )


def test_llama_7b_counts_all_its_layers() -> None:
    assert LLAMA_7B.token_bytes == 512 * 1024  # not the 16 KB of texts that forget the 32 layers
    assert LLAMA_7B.formula(16) == "16 × 2 × 32 × 32 × 128 × 2 = 8,388,608 bytes"
    bytewise = KVShape(num_layers=32, num_kv_heads=32, head_dim=128, element_bytes=1, scale_bytes=4)
    assert bytewise.formula(16) == "16 × 2 × 32 × 32 × (128 × 1 + 4) = 4,325,376 bytes"


def test_a_plan_by_hand() -> None:
    made = plan(LLAMA_7B, memory=24 * GIB, context=4096, typical=1000)
    assert made.blocks == 24 * GIB // (8 * 2**20) == 3072
    assert made.tokens == 49152
    assert made.contiguous == 12  # 24 GiB / (4096 x 512 KiB)
    assert made.paged == 48  # 49152 slots / (1000 + 7.5)
    assert made.paged_longest == 12
    assert made.gain == 4.0


def test_typical_defaults_to_a_quarter_of_the_context() -> None:
    assert plan(LLAMA_7B, memory=GIB, context=4096).typical == 1024
    assert plan(LLAMA_7B, memory=GIB, context=1).typical == 1


@given(plans())
def test_nothing_is_promised_beyond_the_memory(made: Plan) -> None:
    assert made.blocks * made.block_bytes <= made.memory < (made.blocks + 1) * made.block_bytes
    assert made.contiguous * made.context * made.token_bytes <= made.memory
    assert made.paged * (made.typical + (made.block_size - 1) / 2) <= made.tokens
    assert made.paged_longest * -(-made.context // made.block_size) <= made.blocks
    assert 0 < made.contiguous_use <= 1
    assert 0 < made.paged_use <= 1


@given(plans())
def test_paged_holds_at_least_as_many_once_the_saving_exceeds_the_last_blocks(made: Plan) -> None:
    if made.contiguous and 2 * made.typical + 3 * (made.block_size - 1) <= 2 * made.context:
        assert made.paged >= made.contiguous


@given(shapes, block_sizes, st.integers(1, 2**40), st.integers(1, 2**40), st.integers(1, 8192))
def test_more_memory_never_holds_fewer(shape: KVShape, block_size: int, one: int, two: int, context: int) -> None:
    small, large = (plan(shape, memory=m, context=context, block_size=block_size) for m in sorted((one, two)))
    assert (small.blocks, small.contiguous, small.paged) <= (large.blocks, large.contiguous, large.paged)
    assert small.paged <= large.paged
    assert small.contiguous <= large.contiguous


def test_the_paged_estimate_meets_requests_of_random_lengths() -> None:
    made = plan(LLAMA_7B, memory=64 * GIB, context=4096, typical=700)
    rng, fits, free = random.Random(0), 0, made.blocks
    while (need := -(-rng.randint(1, 1399) // made.block_size)) <= free:  # mean 700
        fits, free = fits + 1, free - need
    assert abs(fits - made.paged) / made.paged < 0.1


@pytest.mark.parametrize("wrong", [{"memory": 0}, {"context": 0}, {"typical": 0}, {"typical": 4097}, {"block_size": 3}])
def test_impossible_numbers_are_named(wrong: dict[str, int]) -> None:
    asked = {"memory": GIB, "context": 4096, **wrong}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        plan(LLAMA_7B, **asked)
    with pytest.raises(ConfigError, match="num_layers"):
        KVShape(num_layers=0, num_kv_heads=1, head_dim=1, element_bytes=1)

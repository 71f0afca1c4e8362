"""What a caller may ask is checked when it is said, and every refusal names the parameter and its value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.config import EngineConfig, parse_bytes
from octavo.errors import ConfigError, RequestError
from octavo.params import BeamParams, SamplingParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": 1.5},
        {"n": True},
        {"best_of": 1, "n": 2},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 300, "max_tokens": 299},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"repetition_penalty": 1e-320},
        {"logit_bias": {1: 1e300}},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("inf")},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"seed": 1.5},
        {"logprobs": -1},
        {"prompt_logprobs": 1.5},
        {"stop": ["a", ""]},
        {"stop": 5},
        {"stop": {"a": 1}},
        {"ignore_eos": "no"},
        {"skip_special_tokens": None},
        {"include_stop": 1},
        {"stop_token_ids": 5},
        {"stop_token_ids": "5"},
        {"logit_bias": [1]},
        {"stop_token_ids": [-3]},
    ],
)
def test_a_sampling_parameter_that_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    with pytest.raises(RequestError, match=rf"^{name} is .*; it must be ") as refusal:
        SamplingParams(**wrong)
    assert str(refusal.value).endswith(".")


def test_numbers_of_numpy_are_numbers_and_what_the_caller_changes_later_stays_theirs() -> None:
    bias, stops = {np.int64(3): np.float32(1.5)}, [np.int32(7)]
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), logit_bias=bias, stop_token_ids=stops, seed=np.uint64(9)
    )
    bias.clear()
    stops.clear()
    assert (params.logit_bias, params.stop_token_ids) == ({3: 1.5}, (7,))


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 0},
        {"n": 5, "width": 4},
        {"length_penalty": float("nan")},
        {"early_stopping": "always"},
        {"max_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8},
    ],
)
def test_a_beam_parameter_that_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=rf"^{next(iter(wrong))} is .*; it must be "):
        BeamParams(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 5},
        {"num_blocks": 0},
        {"max_num_seqs": 0},
        {"max_batched_tokens": 1.5},
        {"max_num_seqs": 8, "max_batched_tokens": 7},
        {"preemption": "both"},
        {"block_size": 16.0},
        {"num_blocks": True},
        {"max_num_seqs": 10**12},
        {"max_num_seqs": 70_000, "max_batched_tokens": 80_000},
        {"seed": [1]},
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(wrong))} is "):
        EngineConfig(**wrong)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("1.5GB", 1_500_000_000), (" 512 MiB ", 512 * 2**20), ("7", 7), (9, 9), ("2k", 2048)],
)
def test_memory_sizes_are_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 GiBs", "1e9", -1, "٣GiB", 1.5, None, "9" * 400 + "TiB", True])
def test_what_is_no_memory_size_is_refused(text: int | str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)

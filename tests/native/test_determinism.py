"""deterministic=True: no bit of a log-probability depends on batch, chunks, caches, preemption, blocks or threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams

PROMPTS = [
    "The lighthouse keeper opened the letter and read",
    "def fibonacci(n):\n",
    "In 1969, Apollo 11",
    "The history of the printing press begins " * 40,  # longer than the kernels' runs of keys
    "1, 1, 2, 3, 5, 8,",
    "The history of the printing press begins " * 12,
]
PARAMS = [SamplingParams(temperature=0.9, max_tokens=12, seed=i, logprobs=2, ignore_eos=True) for i in range(6)]


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.completions[0].token_ids, o.completions[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def make(smollm2_path: Path) -> Any:
    def make(**settings: Any) -> LLM:
        return LLM(smollm2_path, **{"kv_memory": "128MiB", "deterministic": True, **settings})

    return make


@pytest.fixture(scope="module")
def alone(make: Any) -> list[Any]:
    """Each prompt by itself, in one piece, on one thread."""
    llm = make(prefix_caching=False, threads=1)
    return [bits(llm.generate([prompt], params))[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"threads": 2, "block_size": 4},
        {"threads": 3, "block_size": 64},
        {"max_batched_tokens": 7, "max_num_seqs": 5},
        {"max_batched_tokens": 64, "block_size": 1},
        {"num_blocks": 27, "preemption": "recompute"},
        {"num_blocks": 27, "preemption": "swap"},
    ],
    ids=str,
)
def test_every_way_to_run_gives_the_same_bits(settings: Any, make: Any, alone: list[Any]) -> None:
    llm = make(**settings)
    assert bits(llm.generate(PROMPTS, PARAMS)) == alone
    assert bits(llm.generate(PROMPTS[::-1], PARAMS[::-1])) == alone[::-1]  # from the prefix cache, in another order
    report = llm.memory_report()
    preempted = report.preemptions_recompute + report.preemptions_swap
    assert (preempted > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize("kv_dtype", ["f16", "f32", "int8"])
def test_so_do_other_types_of_keys_and_values(kv_dtype: str, make: Any) -> None:
    llm = make(kv_dtype=kv_dtype, prefix_caching=False, threads=1)
    each = [bits(llm.generate([prompt], params))[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert bits(make(kv_dtype=kv_dtype, threads=2, max_batched_tokens=64).generate(PROMPTS, PARAMS)) == each

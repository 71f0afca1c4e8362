"""Real weights: the same greedy tokens however the engine is set up and whoever else runs, on either backend.

The reference's greedy and beam tokens are Transformers' own. Those of the kernels, which round activations to 8 bits,
are as likely to Transformers as its own but for a little.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, BeamParams, RequestOutput, SamplingParams

PROMPTS = [
    "The lighthouse keeper opened the letter and read",
    "def fibonacci(n):\n",
    "Once upon a time, in a kingdom by the sea, there lived",
    "The capital of France is",
    "Water boils at 100 degrees because",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are",
    "SELECT name FROM users WHERE",
    "In 1969, Apollo 11",
    "A recipe for bread: first, take",
    "Paging in an operating system means that",
    "The mitochondria is",
    "Roses are red,",
    "import numpy as np\n\nx = np.",
    "The judge looked at the witness and said",
    "To be, or not to be,",
    "Photosynthesis is the process by which",
    "My favourite thing about winter is",
    "The history of the printing press begins " * 12,
]
LENGTH = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Any:
    """The kernels, unless a test asks for the reference, which takes thirty times as long: the engine is the same."""
    return getattr(request, "param", "native")


@pytest.fixture(scope="module")
def prompts(backend: Any) -> list[str]:
    return PROMPTS if backend == "native" else [*PROMPTS[:6], PROMPTS[-1]]


@pytest.fixture(scope="module")
def expected(backend: Any, oracle: Any, smollm2_path: Path, prompts: list[str]) -> list[list[int]]:
    """Greedy answers, each held against Transformers token by token.

    Proposed by Octavo and checked: Transformers reads prompt and answer at once, and at every place the answer's next
    token must be its likeliest. By induction the answer is the one it would have given, which costs a pass a prompt
    instead of one a token. A token of the kernels may be less likely by e^-1, where two are nearly as likely.
    """
    import torch

    llm = LLM(smollm2_path, kv_memory="256MiB", prefix_caching=False, backend=backend)
    outputs = llm.generate(prompts, GREEDY)
    for output in outputs:
        ids = output.prompt_token_ids + output.completions[0].token_ids
        start = len(output.prompt_token_ids)
        with torch.inference_mode():
            logits = oracle(torch.tensor([ids])).logits[0, start - 1 : -1]
        lacking = logits.max(dim=-1).values - logits[range(LENGTH), ids[start:]]
        assert lacking.max() <= (0.0 if backend == "reference" else 1.0), output.prompt
        assert (lacking > 0).float().mean() < 0.1
    answers = tokens(outputs)
    assert {len(answer) for answer in answers} == {LENGTH}
    return answers


@pytest.fixture
def make_llm(backend: Any, smollm2_path: Path) -> Any:
    def make(**settings: Any) -> LLM:
        return LLM(smollm2_path, **{"kv_memory": "512MiB", "backend": backend, **settings})

    return make


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.completions[0].token_ids for output in outputs]


def assert_nothing_is_lost(llm: LLM) -> None:
    llm.engine.step()
    llm.engine.kv.check()
    usage = llm.engine.kv.usage()
    assert usage.free + usage.cached == usage.num_blocks


@pytest.mark.parametrize("backend", ["reference", "native"], indirect=True)
def test_chunks_and_small_blocks_change_no_token(make_llm: Any, prompts: list[str], expected: list[list[int]]) -> None:
    llm = make_llm(block_size=4, max_batched_tokens=64)
    assert tokens(llm.generate(prompts, GREEDY)) == expected
    assert_nothing_is_lost(llm)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_block_size_changes_no_token(
    make_llm: Any, prompts: list[str], expected: list[list[int]], block_size: int
) -> None:
    llm = make_llm(block_size=block_size)
    assert tokens(llm.generate(prompts, GREEDY)) == expected
    assert_nothing_is_lost(llm)


@pytest.mark.parametrize("budget", [7, 64])  # unlimited, for these prompts, is the default of the other tests
def test_chunked_prefill_changes_no_token(
    make_llm: Any, prompts: list[str], expected: list[list[int]], budget: int
) -> None:
    llm = make_llm(max_batched_tokens=budget)
    assert tokens(llm.generate(prompts, GREEDY)) == expected


def test_prefix_cache_cold_warm_full_hit_and_off_change_no_token(
    make_llm: Any, prompts: list[str], expected: list[list[int]]
) -> None:
    llm = make_llm(block_size=4)
    cold = llm.generate(prompts, GREEDY)
    assert sum(o.cached_tokens for o in cold) == 0
    warm = llm.generate(prompts, GREEDY)
    for output in warm:  # everything but the last, partly filled block, or the query token's
        assert output.cached_tokens == (len(output.prompt_token_ids) - 1) // 4 * 4
    assert tokens(cold) == tokens(warm) == expected
    full = next(o for o in warm if len(o.prompt_token_ids) % 4 == 0)  # the prompt is cached to its last token
    assert full.computed_tokens == 4
    off = make_llm(prefix_caching=False)
    for _ in range(2):
        outputs = off.generate(prompts[:4], GREEDY)
        assert tokens(outputs) == expected[:4]
        assert all(o.cached_tokens == 0 for o in outputs)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_forced_preemption_changes_no_token(
    make_llm: Any, prompts: list[str], expected: list[list[int]], mode: str
) -> None:
    llm = make_llm(num_blocks=3 * len(prompts) + 4, preemption=mode, prefix_caching=mode == "swap")
    assert tokens(llm.generate(prompts, GREEDY)) == expected
    report = llm.memory_report()
    assert (report.preemptions_recompute if mode == "recompute" else report.preemptions_swap) > 0
    assert_nothing_is_lost(llm)


def test_a_batch_of_one_gives_the_tokens_of_a_batch_of_thirty_two(
    make_llm: Any, prompts: list[str], expected: list[list[int]]
) -> None:
    llm = make_llm(prefix_caching=False)
    many = [prompts[i % len(prompts)] for i in range(32)]
    assert tokens(llm.generate(many, GREEDY)) == [expected[i % len(prompts)] for i in range(32)]
    for prompt, answer in zip(prompts, expected, strict=True):
        assert tokens(llm.generate(prompt, GREEDY)) == [answer]


def test_four_greedy_samples_are_one_answer_four_times_on_shared_blocks(
    make_llm: Any, prompts: list[str], expected: list[list[int]]
) -> None:
    llm = make_llm()
    params = SamplingParams(n=4, temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    for output, answer in zip(llm.generate(prompts, params), expected, strict=True):
        assert [c.token_ids for c in output.completions] == [answer] * 4
    assert llm.memory_report().copies > 0
    assert_nothing_is_lost(llm)


def test_aborted_neighbours_change_no_token(make_llm: Any, prompts: list[str], expected: list[list[int]]) -> None:
    llm = make_llm(max_batched_tokens=64)
    engine, tokenizer = llm.engine, llm.tokenizer
    requests = [engine.add_request(str(i), tokenizer.encode(p), GREEDY) for i, p in enumerate(prompts)]
    for step in range(10_000):
        if not engine.has_work:
            break
        if step in (1, 3, 5):
            engine.abort(str(step))
        engine.step()
    for i, request in enumerate(requests):
        got = request.output().completions[0]
        if i in (1, 3, 5):
            assert got.finish_reason == "abort"
            assert got.token_ids == expected[i][: len(got.token_ids)]
        else:
            assert got.token_ids == expected[i]
    assert_nothing_is_lost(llm)


@cache
def beam_prompts() -> list[str]:
    return [PROMPTS[0], PROMPTS[5], PROMPTS[17]]


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
def test_beams_are_those_of_transformers_and_their_blocks_those_of_the_tree(
    make_llm: Any, oracle: Any, width: int, length_penalty: float
) -> None:
    import torch

    llm = make_llm()
    engine, tokenizer = llm.engine, llm.tokenizer
    params = BeamParams(width=width, max_tokens=24, length_penalty=length_penalty)
    for number, prompt in enumerate(beam_prompts()):
        ids = tokenizer.encode(prompt)
        request = engine.add_request(f"{number}", ids, params)
        while engine.has_work:
            engine.step()
            assert_tree(llm, request)
        with torch.inference_mode():
            theirs = oracle.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                num_beams=width,
                num_return_sequences=width,
                length_penalty=length_penalty,
                early_stopping=False,
                max_new_tokens=24,
                eos_token_id=sorted(engine.eos_ids),
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        mine = request.output().completions
        for completion, row, score in zip(mine, theirs.sequences, theirs.sequences_scores, strict=True):
            answer = row[len(ids) :].tolist()
            assert completion.token_ids == answer[: len(completion.token_ids)]
            assert set(answer[len(completion.token_ids) :]) <= {0}  # padding
            assert completion.score == pytest.approx(float(score), abs=2e-4)
    assert_nothing_is_lost(llm)


def assert_tree(llm: LLM, request: Any) -> None:
    """Blocks held equal the distinct block-aligned beginnings of the live beams."""
    if not request.live:
        return
    size = llm.config.block_size
    beginnings = {
        tuple(seq.tokens[: min(end, seq.computed)])
        for seq in request.live
        for end in range(size, seq.computed + size, size)
    }
    usage = llm.engine.kv.usage()
    assert usage.active + usage.shared == len(beginnings)

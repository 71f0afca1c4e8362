"""LLM's face over the toy engine: kinds of prompts, params for all or each, order, streams, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError, RequestError
from octavo.llm import LLM, as_batch
from octavo.params import BeamParams, SamplingParams
from tests.engine.test_engine_memory import make_engine
from tests.engine.toy import ToyOps, greedy


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr("octavo.llm.load_engine", lambda *_: make_engine(num_blocks=400))
    return LLM("toy")


def test_one_prompt_or_many_come_back_in_order(llm: LLM) -> None:
    (one,) = llm.generate([1, 2, 3], greedy(max_tokens=4, ignore_eos=True))
    many = llm.generate([[5], [1, 2, 3], [7, 7]], greedy(max_tokens=4, ignore_eos=True))
    assert [o.prompt_token_ids for o in many] == [[5], [1, 2, 3], [7, 7]]
    assert many[1].completions[0].token_ids == one.completions[0].token_ids
    assert all(o.finished and o.timings.ttft is not None for o in many)


def test_params_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate([[1], [2]], [greedy(max_tokens=2, ignore_eos=True), BeamParams(width=3, max_tokens=5)])
    assert len(outputs[0].completions[0].token_ids) == 2
    assert len(outputs[1].completions) == 3
    scores = [c.score for c in outputs[1].completions]
    assert scores == sorted(scores, reverse=True)
    with pytest.raises(RequestError, match="2 prompts but 1 params"):
        llm.generate([[1], [2]], [greedy()])


def test_a_refused_prompt_runs_none_of_its_company(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id 99"):
        llm.generate([[1], [99]], greedy())
    assert not llm.engine.has_work


def test_a_stream_left_early_aborts_what_still_runs(llm: LLM) -> None:
    stream = llm.stream([[1], [2]], greedy(max_tokens=None, ignore_eos=True))
    changed = next(stream)
    assert [place for place, _ in changed] == [0, 1]
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    assert llm.memory_report().active == 0


def test_streams_and_calls_that_share_an_engine_lose_no_end(llm: LLM) -> None:
    params = greedy(max_tokens=7, ignore_eos=True)
    last: dict[str, Any] = {}
    one, two = llm.stream([1], params), llm.stream([[2], [3]], params)
    for _ in range(40):
        for name, stream in (("a", one), ("b", two)):
            last.update({f"{name}{place}": output for place, output in next(stream, [])})
    for changed in llm.stream([4], params):
        llm.generate([5], greedy(max_tokens=20, ignore_eos=True))
        last.update({f"c{place}": output for place, output in changed})
    assert sorted(last) == ["a0", "b0", "b1", "c0"]
    for output in last.values():
        assert output.finished
        assert len(output.completions[0].token_ids) == 7


def test_the_last_stream_items_are_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(seed=5, n=2, max_tokens=6, ignore_eos=True)
    last: dict[int, Any] = {}
    for changed in llm.stream([[1], [2, 3]], params):
        last.update(changed)
    for place, output in enumerate(llm.generate([[1], [2, 3]], params)):
        assert [c.token_ids for c in last[place].completions] == [c.token_ids for c in output.completions]


@pytest.mark.parametrize(
    ("prompts", "batch"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], "b"], [[1], "b"]),
        ([{"role": "user", "content": "x"}], [[{"role": "user", "content": "x"}]]),
        ([[{"role": "user"}]], [[{"role": "user"}]]),
        ([], []),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1], [2]]), [[1], [2]]),
        ([np.int64(1), np.int64(2)], [[1, 2]]),
    ],
)
def test_what_is_one_prompt_and_what_are_many(prompts: Any, batch: Any) -> None:
    assert as_batch(prompts) == batch


@pytest.mark.parametrize("prompt", [[[1.5]], [[True]], [[None]], [3.0], {"a": 1}, b"Hello", [b"Hello"], bytearray(3)])
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, greedy())


def test_chat_takes_no_text_and_no_message_without_content(llm: LLM) -> None:
    for wrong in ("hello", ["hello"]):
        with pytest.raises(RequestError, match="chat takes messages"):
            llm.chat(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="role and content"):
        llm.chat([{"role": "user"}])


def test_memory_that_cannot_be_had_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_cache(*_: object, prefault: bool) -> object:
        raise MemoryError

    monkeypatch.setattr(ToyOps, "new_cache", new_cache)
    with pytest.raises(ConfigError, match=r"64 KV blocks take 0\.0 GiB, more than .* lower kv_memory or num_blocks\."):
        make_engine()


def test_the_report_tells_of_sharing_and_use_that_lasted_less_than_a_step(llm: LLM) -> None:
    llm.generate([1, 2], SamplingParams(n=3, max_tokens=2, seed=1, ignore_eos=True))
    report = llm.memory_report()
    assert (report.peak_shared, report.peak_used, report.copies) == (1, 3, 2)
    assert report.peak_utilisation == 0.75  # three blocks of three tokens each
    assert "copies" in str(report)


@pytest.mark.parametrize("params", [5, "greedy", ["greedy"], [None], {"temperature": 0}])
def test_what_are_no_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="params"):
        llm.generate([1], params)
    assert not llm.engine.has_work


@pytest.mark.parametrize("options", [{"priority": "high"}, {"priority": None}, {"cache_salt": b"x"}])
def test_options_of_the_wrong_kind_are_refused_before_they_reach_the_queue(llm: LLM, options: dict[str, Any]) -> None:
    stream = llm.stream([1], greedy(max_tokens=5, ignore_eos=True))
    next(stream)
    with pytest.raises(RequestError, match=next(iter(options))):
        llm.generate([2], greedy(), **options)
    *_, last = stream
    assert last[0][1].finished
    llm.generate([1], greedy(max_tokens=1), cache_salt="\ud800")


def test_an_unknown_or_double_setting_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no engine setting 'gpu_memory'"):
        LLM("toy", gpu_memory=1)
    from octavo.config import EngineConfig

    with pytest.raises(ConfigError, match="not both"):
        LLM("toy", config=EngineConfig(), block_size=4)

"""AsyncLLM over the toy engine: streams, readers that leave, aborts and ends from many tasks at once."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from octavo.async_llm import AsyncLLM, Stream
from octavo.engine.request import Request
from octavo.errors import OctavoError, RequestError
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams
from octavo.server.pace import Pace
from tests.engine.test_engine_memory import make_engine
from tests.engine.toy import ToyModel, greedy


@pytest.fixture
def model() -> ToyModel:
    return ToyModel()


@pytest.fixture
def llm(model: ToyModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    monkeypatch.setattr("octavo.async_llm.load_engine", lambda *_: make_engine(model, num_blocks=400))
    made = AsyncLLM("toy")
    yield made
    made.close()


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def wait_until_empty(llm: AsyncLLM) -> None:
    for _ in range(200):
        report = await llm.memory_report()
        if report.active + report.shared == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("blocks are still held")


def test_a_stream_grows_and_ends_and_equals_what_the_engine_gives_alone(llm: AsyncLLM) -> None:
    params = greedy(max_tokens=30, ignore_eos=True)
    outputs = asyncio.run(collect(llm.generate([1, 2, 3], params)))
    lengths = [len(o.completions[0].token_ids) for o in outputs]
    assert lengths == sorted(lengths)
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    alone = make_engine()
    request = alone.add_request("a", [1, 2, 3], params)
    while alone.has_work:
        alone.step()
    assert outputs[-1].completions[0].token_ids == request.ended[0].output_token_ids
    assert len(outputs[-1].completions[0].token_ids) == 30


def test_deltas_add_up_to_the_whole_however_slowly_they_are_read(llm: AsyncLLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=40, ignore_eos=True, logprobs=2)

    async def read(pause: float) -> tuple[list[RequestOutput], RequestOutput]:
        items = []
        async for output in llm.generate([1, 2, 3], params, deltas=True):
            items.append(copy.deepcopy(output))
            await asyncio.sleep(pause)
        whole = copy.deepcopy(items[0])
        for item in items[1:]:
            whole.extend(item)
        return items, whole

    expected = asyncio.run(collect(llm.generate([1, 2, 3], params)))[-1]
    for pause in (0, 0.004, 0.2):
        items, whole = asyncio.run(read(pause))
        assert [(c.index, c.token_ids, c.finish_reason, c.logprobs) for c in whole.completions] == [
            (c.index, c.token_ids, c.finish_reason, c.logprobs) for c in expected.completions
        ]
        assert [item.finished for item in items] == [False] * (len(items) - 1) + [True]
        assert sum(len(c.token_ids) for item in items for c in item.completions) == 120
    assert len(items) < 10


def test_several_prompts_go_into_one_stream_and_equal_each_alone(llm: AsyncLLM) -> None:
    params = greedy(max_tokens=20, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]

    async def read() -> dict[str, RequestOutput]:
        whole: dict[str, RequestOutput] = {}
        async with llm.open(prompts, params, request_ids=["a", "b", "c"]) as stream:
            while len(whole) < 3 or not all(output.finished for output in whole.values()):
                for output in await stream.get():
                    whole.setdefault(output.request_id, output)
                    if whole[output.request_id] is not output:
                        whole[output.request_id].extend(output)
                await asyncio.sleep(0.002)
        return whole

    async def alone(prompt: list[int]) -> list[int]:
        return (await collect(llm.generate(prompt, params)))[-1].completions[0].token_ids

    async def both() -> None:
        whole = await read()
        for name, prompt in zip("abc", prompts, strict=True):
            assert whole[name].completions[0].token_ids == await alone(prompt)
        await wait_until_empty(llm)

    asyncio.run(both())


class Signal:
    """A pace that wakes at once and counts how often, and has others believe that it would wait."""

    def __init__(self, waits_until: float) -> None:
        self.waits_until = waits_until
        self.wakes = 0

    def wake(self, stream: Stream) -> None:
        self.wakes += 1
        stream.wake()


@pytest.fixture
def steps_of_2_ms(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm._engine.step

    def slow() -> list[Request]:
        time.sleep(0.002)
        return step()

    monkeypatch.setattr(llm._engine, "step", slow)


async def read_all(stream: Stream, whole: dict[str, RequestOutput], num_requests: int = 1) -> None:
    """Add up what is still to come."""
    while len(whole) < num_requests or not all(output.finished for output in whole.values()):
        for output in await asyncio.wait_for(stream.get(), 10):
            whole.setdefault(output.request_id, output)
            if whole[output.request_id] is not output:
                whole[output.request_id].extend(output)


@pytest.mark.usefixtures("steps_of_2_ms")
def test_news_that_would_wait_is_held_and_nothing_of_it_is_lost(llm: AsyncLLM) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=60, ignore_eos=True, logprobs=1)

    async def held() -> tuple[dict[str, RequestOutput], int]:
        pace, whole = Signal(math.inf), dict[str, RequestOutput]()
        async with llm.open([[1, 2], [3, 4]], params, request_ids=["a", "b"], pace=pace) as stream:
            await read_all(stream, whole, 2)
        return whole, pace.wakes

    whole, wakes = asyncio.run(held())
    assert wakes < 30  # the first, the ends, and what came before the reader had read the first
    for name, prompt in {"a": [1, 2], "b": [3, 4]}.items():
        (expected,) = asyncio.run(collect(llm.generate(prompt, params)))[-1:]
        assert [(c.token_ids, c.logprobs, c.finish_reason) for c in whole[name].completions] == [
            (c.token_ids, c.logprobs, c.finish_reason) for c in expected.completions
        ]
        assert whole[name].output_tokens == 120


@pytest.mark.usefixtures("steps_of_2_ms")
def test_held_news_goes_out_in_time_and_before_a_step_with_a_prompt_and_at_an_abort(llm: AsyncLLM) -> None:
    params = greedy(max_tokens=None, ignore_eos=True)

    async def main() -> None:
        pace = Signal(time.monotonic() + 0.1)
        async with llm.open([[1, 2]], params, request_ids=["a"], pace=pace) as stream:
            await stream.get()
            while time.monotonic() < pace.waits_until - 0.01:
                (timely,) = await asyncio.wait_for(stream.get(), 5)
            assert time.monotonic() < pace.waits_until + 0.5
            assert len(timely.completions[0].token_ids) > 5
            pace.waits_until = math.inf
            await asyncio.sleep(0.05)
            before = pace.wakes
            await asyncio.sleep(0.05)
            assert pace.wakes == before
            await collect(llm.generate([5, 6, 7], greedy(max_tokens=1)))
            (late,) = await asyncio.wait_for(stream.get(), 5)
            assert len(late.completions[0].token_ids) > 10
            assert not late.finished
            await asyncio.sleep(0.05)
            assert await llm.abort("a")
            (last,) = await asyncio.wait_for(stream.get(), 5)
            assert last.finished
            assert len(last.completions[0].token_ids) > 5
        await wait_until_empty(llm)
        assert not llm._held

    asyncio.run(main())


@pytest.mark.usefixtures("steps_of_2_ms")
@pytest.mark.parametrize("longest", [0, 0.003, 0.02])
def test_at_a_pace_each_answer_is_what_it_is_without(llm: AsyncLLM, longest: float) -> None:
    params = greedy(max_tokens=40, ignore_eos=True)
    prompts = [[i, 1, 2] for i in range(12)]

    async def paced() -> list[list[int]]:
        pace = Pace(longest, share=1e-9)

        async def one(name: str, prompt: list[int]) -> list[int]:
            whole: dict[str, RequestOutput] = {}
            async with llm.open([prompt], params, request_ids=[name], pace=pace) as stream:
                await read_all(stream, whole)
            return whole[name].completions[0].token_ids

        return await asyncio.gather(*(one(str(i), prompt) for i, prompt in enumerate(prompts)))

    async def plain() -> list[list[int]]:
        outputs = await asyncio.gather(*(collect(llm.generate(prompt, params)) for prompt in prompts))
        return [output[-1].completions[0].token_ids for output in outputs]

    assert asyncio.run(paced()) == asyncio.run(plain())


def test_of_several_prompts_that_cannot_all_be_none_begins(llm: AsyncLLM, model: ToyModel) -> None:
    async def refused() -> None:
        with pytest.raises(RequestError):
            async with llm.open([[1, 2, 3], [4] * 10_000], greedy(), request_ids=["a", "b"]):
                raise AssertionError("it was opened")
        assert not await asyncio.wrap_future(llm.call(lambda engine: engine.has_work))
        report = await llm.memory_report()
        assert (report.active, report.shared, report.prompt_tokens) == (0, 0, 0)

    asyncio.run(refused())


def test_who_leaves_a_stream_of_several_frees_them_all(llm: AsyncLLM) -> None:
    async def leave() -> None:
        params = greedy(max_tokens=400, ignore_eos=True)
        async with llm.open([[1, 2, 3], [4, 5]], params, request_ids=["a", "b"]) as stream:
            await stream.get()
        # Before another step, in which one that was forgotten would go on.
        assert not await asyncio.wrap_future(llm.call(lambda engine: list(engine.requests)))
        await wait_until_empty(llm)

    asyncio.run(leave())


def test_many_streams_at_once_and_a_third_of_the_readers_leave(llm: AsyncLLM) -> None:
    async def reader(number: int) -> list[int] | None:
        stream = llm.generate([number % 20, 1, 2], greedy(max_tokens=40, ignore_eos=True))
        async with contextlib.aclosing(stream):
            async for output in stream:
                if number % 3 == 0 and len(output.completions[0].token_ids) > 2:
                    return None
        return output.completions[0].token_ids

    async def main() -> list[list[int] | None]:
        answers = await asyncio.gather(*(reader(i) for i in range(60)))
        await wait_until_empty(llm)
        return answers

    answers = asyncio.run(main())
    for number, answer in enumerate(answers):
        if number % 3:
            assert answer is not None
            assert len(answer) == 40
            assert answer == answers[number % 20] or (number % 20) % 3 == 0


def test_a_cancelled_task_frees_its_blocks(llm: AsyncLLM) -> None:
    """A client that left kept its blocks."""

    async def main() -> None:
        task = asyncio.create_task(collect(llm.generate([1] * 30, greedy(max_tokens=None, ignore_eos=True))))
        await asyncio.sleep(0.02)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await wait_until_empty(llm)

    asyncio.run(main())


def test_abort_ends_the_stream_and_says_so(llm: AsyncLLM) -> None:
    async def main() -> RequestOutput:
        task = asyncio.create_task(
            collect(llm.generate([1], greedy(max_tokens=None, ignore_eos=True), request_id="it"))
        )
        while not await llm.abort("it"):
            await asyncio.sleep(0.001)
        assert not await llm.abort("it")
        return (await task)[-1]

    output = asyncio.run(main())
    assert output.finished
    assert output.completions[0].finish_reason == "abort"


def test_a_request_that_cannot_be_is_refused_before_anything_runs(llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="token id 99"):
        asyncio.run(collect(llm.generate([99], greedy())))
    with pytest.raises(RequestError, match="no tokenizer"):
        asyncio.run(collect(llm.generate("text", greedy())))


def test_a_failing_step_ends_its_streams_with_the_reason_and_the_next_is_served(llm: AsyncLLM, model: ToyModel) -> None:
    model.fail_on_token = 9
    bad = asyncio.run(collect(llm.generate([9], greedy())))[-1]
    assert bad.completions[0].finish_reason == "error"
    assert "a kernel broke" in (bad.error or "")
    good = asyncio.run(collect(llm.generate([4], greedy(max_tokens=1))))[-1]
    assert len(good.completions[0].token_ids) == 1


def test_closing_ends_what_runs_and_refuses_what_comes_after(llm: AsyncLLM) -> None:
    async def main() -> RequestOutput:
        task = asyncio.create_task(collect(llm.generate([1], SamplingParams(max_tokens=None, ignore_eos=True))))
        await asyncio.sleep(0.005)
        await asyncio.to_thread(llm.close)
        return (await task)[-1]

    assert asyncio.run(main()).completions[0].finish_reason in ("abort", "length")
    with pytest.raises(OctavoError, match="closed"):
        asyncio.run(collect(llm.generate([1], greedy())))


def test_a_fault_of_the_engine_itself_ends_its_streams_with_the_reason_and_serving_goes_on(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> list[RequestOutput]:
        long = greedy(max_tokens=None, ignore_eos=True)
        tasks = [asyncio.create_task(collect(llm.generate([i], long))) for i in range(3)]
        await asyncio.sleep(0.005)
        with monkeypatch.context() as broken:
            broken.setattr("octavo.engine.scheduler.Scheduler.schedule", lambda _: 1 / 0)
            return [outputs[-1] for outputs in await asyncio.wait_for(asyncio.gather(*tasks), 5)]

    for output in asyncio.run(main()):
        assert output.completions[0].finish_reason == "error"
        assert "ZeroDivisionError" in (output.error or "")
    good = asyncio.run(collect(llm.generate([4], greedy(max_tokens=1))))[-1]
    assert good.completions[0].finish_reason == "length"
    asyncio.run(wait_until_empty(llm))


def test_a_forked_child_is_told_that_the_engine_stayed_behind(llm: AsyncLLM) -> None:
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(asyncio.wait_for(collect(llm.generate([1], greedy())), 5))
        except OctavoError as error:
            os._exit(0 if "forked" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_event_loops_in_two_threads_share_one_engine(llm: AsyncLLM) -> None:
    results: dict[int, int] = {}

    def work(number: int) -> None:
        outputs = asyncio.run(collect(llm.generate([number], greedy(max_tokens=20, ignore_eos=True))))
        results[number] = len(outputs[-1].completions[0].token_ids)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == dict.fromkeys(range(6), 20)

"""/metrics of an AsyncLLM that really runs, read by Prometheus's own parsers and held against what happened."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from octavo.async_llm import AsyncLLM
from octavo.engine.report import StepRecord
from octavo.engine.scheduler import StepPlan
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput
from octavo.params import BeamParams, SamplingParams
from octavo.server import metrics as metrics_module
from octavo.server.histogram import LATENCY, SAMPLES, STEP_TOKENS, TOKEN, TTFT, Histogram, up_to
from octavo.server.metrics import Metrics
from tests.engine.test_engine_memory import make_engine
from tests.engine.toy import ToyModel, greedy

DOCS = Path(__file__).resolve().parents[2] / "docs"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MakeLLM = Callable[..., tuple[AsyncLLM, Metrics]]


class SlowModel(ToyModel):
    """A step takes a millisecond, and none is begun while `gate` is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, step: Any, cache: Any) -> Any:
        self.gate.wait(20)
        time.sleep(0.001)
        return super().forward(step, cache)


@pytest.fixture
def model() -> SlowModel:
    return SlowModel()


@pytest.fixture
def make(model: SlowModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    made: list[AsyncLLM] = []

    def build(**settings: Any) -> tuple[AsyncLLM, Metrics]:
        monkeypatch.setattr("octavo.async_llm.load_engine", lambda *_: make_engine(model, **settings))
        made.append(AsyncLLM("toy"))
        return made[-1], Metrics(made[-1], 'a "toy"\n')

    yield build
    model.gate.set()
    for llm in made:
        llm.close()


class Read:
    """A scrape, parsed."""

    def __init__(self, body: bytes, parse: Any = parse_text) -> None:
        self.families = {family.name: family for family in parse(body.decode())}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        found = [s.value for s in self.samples if s.name == f"octavo:{name}" and labels.items() <= s.labels.items()]
        assert len(found) == 1, (name, labels, found)
        return float(found[0])

    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}


async def read(metrics: Metrics) -> Read:
    return Read((await metrics.render())[0])


async def answer(
    llm: AsyncLLM, metrics: Metrics, prompt: list[int], params: SamplingParams | BeamParams, **options: Any
) -> RequestOutput:
    output: RequestOutput | None = None
    async for item in llm.generate(prompt, params, **options):
        output = item
    metrics.observe_finished(output, params)
    assert output is not None
    return output


async def serve(llm: AsyncLLM, metrics: Metrics, asked: list[tuple[list[int], Any]]) -> list[RequestOutput]:
    return list(await asyncio.gather(*(answer(llm, metrics, prompt, params) for prompt, params in asked)))


def tokens_of(outputs: list[RequestOutput]) -> int:
    return sum(len(c.token_ids) for output in outputs for c in output.completions)


class TestFigures:
    """They are what happened."""

    def test_counts_and_latencies(self, make: MakeLLM, model: SlowModel) -> None:
        llm, metrics = make(num_blocks=200)
        asked = [([i + 1, 2, 3, 4, 5, 6], greedy(max_tokens=5 + i, ignore_eos=True)) for i in range(8)]
        asked.append(([1, 1, 1], SamplingParams(n=4, seed=1, max_tokens=7, ignore_eos=True)))
        asked.append(([9, 9], greedy(stop_token_ids=tuple(range(24)))))

        async def run() -> tuple[list[RequestOutput], Read]:
            outputs = await serve(llm, metrics, asked)
            return outputs, await read(metrics)

        outputs, seen = asyncio.run(run())
        firsts = sum(len(output.completions) for output in outputs)
        assert seen("generation_tokens_total") == tokens_of(outputs) == sum(range(5, 13)) + 28 + 1
        assert seen("prompt_tokens_total") == sum(len(prompt) for prompt, _ in asked)
        assert seen("prompt_tokens_computed_total") == sum(output.computed_tokens for output in outputs)
        assert seen("time_to_first_token_seconds_count") == len(asked)
        assert seen("inter_token_latency_seconds_count") == tokens_of(outputs) - firsts
        assert seen("iteration_tokens_total_sum") == sum(step.tokens for step in model.steps)
        assert seen("iteration_tokens_total_count") == seen("iteration_seconds_count") == len(model.steps)
        assert seen("request_success_total", finished_reason="length") == 9
        assert seen("request_success_total", finished_reason="stop") == 1
        assert seen("request_generation_tokens_sum") == tokens_of(outputs)
        assert seen("request_params_n_bucket", le="1.0") == 9
        assert seen("request_params_n_sum") == 13
        assert seen("request_params_max_tokens_count") == 10
        ttft = sum(output.timings.ttft or 0 for output in outputs)
        assert seen("time_to_first_token_seconds_sum") == pytest.approx(ttft)
        parts = seen("request_queue_time_seconds_sum") + seen("request_inference_time_seconds_sum")
        assert parts == pytest.approx(seen("e2e_request_latency_seconds_sum"))
        inner = seen("request_prefill_time_seconds_sum") + seen("request_decode_time_seconds_sum")
        assert inner == pytest.approx(seen("request_inference_time_seconds_sum"))
        assert seen("request_prefill_time_seconds_sum") > 0.001 * len(asked)  # each computed its prompt in a step
        assert seen("request_time_per_output_token_seconds_count") == 9
        spans = [
            ((o.timings.finished or 0) - (o.timings.first_token or 0), len(o.completions[0].token_ids) - 1)
            for o in outputs
        ]
        mean = sum(seconds / later for seconds, later in spans if later)
        assert seen("request_time_per_output_token_seconds_sum") == pytest.approx(mean)

    def test_prefix_hits(self, make: MakeLLM) -> None:
        llm, metrics = make(num_blocks=100)
        prompt, params = list(range(1, 18)), greedy(max_tokens=3, ignore_eos=True)

        async def run() -> Read:
            await answer(llm, metrics, prompt, params)
            await answer(llm, metrics, prompt, params)
            return await read(metrics)

        seen = asyncio.run(run())
        assert seen("prefix_cache_hits_total") == 16
        assert seen("prompt_tokens_total") == 34
        assert seen("prompt_tokens_computed_total") == 18
        rate = seen("prefix_cache_hits_total") / seen("prefix_cache_queries_total")
        assert seen("prefix_cache_hit_rate") == pytest.approx(rate)
        assert seen("kv_blocks", state="cached") > 0

    @pytest.mark.parametrize("kind", ["recompute", "swap"])
    def test_preemptions_and_the_wait_they_cause(self, kind: str, make: MakeLLM) -> None:
        llm, metrics = make(num_blocks=24, preemption=kind, prefix_caching=False)
        asked = [([i + 1] * 6, greedy(max_tokens=40, ignore_eos=True)) for i in range(6)]

        async def run() -> tuple[list[RequestOutput], list[Read]]:
            running = asyncio.ensure_future(serve(llm, metrics, asked))
            scrapes = []
            while not running.done():
                scrapes.append(await read(metrics))
                await asyncio.sleep(0.005)
            return await running, [*scrapes, await read(metrics)]

        outputs, scrapes = asyncio.run(run())
        last = scrapes[-1]
        preempted = sum(output.preemptions for output in outputs)
        assert preempted > 2
        assert last("num_preemptions_total") == preempted
        assert last("preemptions_total", kind="swap") + last("preemptions_total", kind="recompute") == preempted
        assert last("preemptions_total", kind=kind) > 0
        assert (last("kv_blocks_swapped_total", direction="out") > 0) == (kind == "swap")
        assert last("kv_blocks_swapped_total", direction="in") == last("kv_blocks_swapped_total", direction="out")
        assert last("time_to_first_token_seconds_count") == len(asked)  # computing a prompt again is no first token
        assert last("prompt_tokens_total") == 6 * 6
        held = [sum(s(f"num_requests_{state}") for state in ("running", "waiting", "swapped")) for s in scrapes]
        assert max(held) == len(asked)
        if kind == "swap":
            assert max(s("num_requests_swapped") for s in scrapes) > 0
            assert max(s("host_blocks", state="used") for s in scrapes) > 0
            assert max(s("cpu_cache_usage_perc") for s in scrapes) > 0
        assert last("inter_token_latency_seconds_count") == tokens_of(outputs) - len(outputs)
        # the tokens of an answer come one after the other, so that the time between them is the time of decoding
        between, decoding = last("inter_token_latency_seconds_sum"), last("request_decode_time_seconds_sum")
        assert between == pytest.approx(decoding, rel=0.05)
        assert_never_back(scrapes)

    def test_shared_blocks_while_four_answers_run(self, make: MakeLLM) -> None:
        llm, metrics = make(num_blocks=100)
        params = SamplingParams(n=4, seed=3, max_tokens=60, ignore_eos=True)

        async def run() -> tuple[list[Read], Read]:
            task = asyncio.ensure_future(answer(llm, metrics, list(range(1, 15)), params))
            scrapes = []
            while not task.done():
                scrapes.append(await read(metrics))
                await asyncio.sleep(0.002)
            return scrapes, await read(metrics)

        scrapes, last = asyncio.run(run())
        assert max(s("kv_blocks", state="shared") for s in scrapes) == 3  # 14 tokens in blocks of 4: 3 stay shared
        assert max(s("num_requests_running") for s in scrapes) == 1
        assert max(s("kv_fragmentation") for s in scrapes) > 0
        for scrape in scrapes:
            states = {state: scrape("kv_blocks", state=state) for state in ("free", "cached", "active", "shared")}
            assert sum(states.values()) == 100
            assert scrape("kv_cache_usage_perc") == pytest.approx((states["active"] + states["shared"]) / 100)
            assert scrape("kv_utilisation") + scrape("kv_fragmentation") == pytest.approx(1)
        assert last("kv_block_copies_total") == 3  # the half-full block, for all but the last holder
        assert last("num_requests_running") == last("kv_blocks", state="shared") == 0
        assert_never_back([*scrapes, last])

    def test_beams_pins_and_evictions(self, make: MakeLLM) -> None:
        llm, metrics = make(num_blocks=16)

        async def run() -> tuple[Read, list[RequestOutput]]:
            outputs = [await answer(llm, metrics, [1, 2, 3, 4, 5], BeamParams(width=3, max_tokens=8))]
            llm.call(lambda engine: engine.pin([1, 2, 3, 4])).result()
            asked = [([6 + i] * 12, greedy(max_tokens=4, ignore_eos=True)) for i in range(6)]
            outputs += await serve(llm, metrics, asked)
            return await read(metrics), outputs

        seen, outputs = asyncio.run(run())
        assert seen("kv_blocks_pinned") == 1
        assert seen("kv_block_evictions_total") > 0
        assert seen("time_to_first_token_seconds_count") == len(outputs)
        assert seen("prompt_tokens_total") == sum(len(output.prompt_token_ids) for output in outputs)

    def test_a_reader_that_leaves(self, make: MakeLLM) -> None:
        llm, metrics = make(num_blocks=100)
        params = greedy(max_tokens=400, ignore_eos=True)

        async def run() -> Read:
            stream = llm.generate([1, 2, 3], params)
            first = await stream.__anext__()
            assert isinstance(stream, AsyncIterator)
            await stream.aclose()  # type: ignore[attr-defined]
            metrics.observe_finished(first, params, aborted=True)
            metrics.observe_finished(None, params, aborted=True)
            metrics.observe_rejected()
            return await read(metrics)

        seen = asyncio.run(run())
        assert seen("request_success_total", finished_reason="abort") == seen("requests_aborted_total") == 2
        assert seen("requests_rejected_total") == 1
        assert seen("e2e_request_latency_seconds_count") == 0
        assert seen("num_requests_running") == 0

    def test_a_request_with_a_cut_answer_is_cut(self, make: MakeLLM) -> None:
        llm, metrics = make(num_blocks=100)
        params = SamplingParams(n=8, seed=2, max_tokens=6)

        async def run() -> tuple[RequestOutput, Read]:
            return await answer(llm, metrics, [1, 2], params), await read(metrics)

        output, seen = asyncio.run(run())
        assert {completion.finish_reason for completion in output.completions} == {"stop", "length"}
        assert seen("request_success_total", finished_reason="length") == 1

    def test_a_failed_request(self, make: MakeLLM, model: SlowModel) -> None:
        llm, metrics = make(num_blocks=100)
        model.fail_on_token = 5

        async def run() -> Read:
            output = await answer(llm, metrics, [5], greedy(max_tokens=4))
            assert output.error
            return await read(metrics)

        assert asyncio.run(run())("request_success_total", finished_reason="error") == 1


def assert_never_back(scrapes: list[Read]) -> None:
    """Counters and buckets only grow from scrape to scrape; buckets grow from bound to bound, up to the count."""
    before: dict[Any, float] = {}
    for scrape in scrapes:
        for family in scrape.families.values():
            if family.type == "gauge" or not family.name.startswith("octavo:"):
                continue
            for sample in family.samples:
                key = (sample.name, *sorted(sample.labels.items()))
                assert sample.value >= before.get(key, 0), key
                before[key] = sample.value
            buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
            assert buckets == sorted(buckets)


class TestTrouble:
    """A scrape always answers."""

    def test_a_closed_engine(self, make: MakeLLM) -> None:
        llm, metrics = make(num_blocks=100)

        async def run() -> tuple[Read, Read]:
            await answer(llm, metrics, [1, 2, 3], greedy(max_tokens=6, ignore_eos=True))
            before = await read(metrics)
            await asyncio.to_thread(llm.close)
            return before, await read(metrics)

        before, after = asyncio.run(run())
        assert (before("engine_up"), after("engine_up")) == (1, 0)
        assert after("generation_tokens_total") == 6
        assert "octavo:num_requests_running" in before.names() - after.names()
        assert_never_back([before, after])
        with pytest.raises(OctavoError, match="closed"):
            Metrics(llm, "toy")

    def test_a_thread_that_died(self, make: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        llm, metrics = make(num_blocks=100)

        def die(_: StepRecord) -> None:
            raise SystemExit

        async def run() -> Read:
            llm.call(lambda engine: engine.watchers.append(die)).result()
            output = await answer(llm, metrics, [1, 2, 3], greedy(max_tokens=6, ignore_eos=True))
            assert output.finished
            return await read(metrics)

        assert asyncio.run(run())("engine_up") == 0

    def test_a_step_that_takes_long(self, make: MakeLLM, model: SlowModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics_module, "PATIENCE", 0.1)
        llm, metrics = make(num_blocks=100)

        async def run() -> tuple[Read, float]:
            model.gate.clear()
            task = asyncio.ensure_future(answer(llm, metrics, [1, 2, 3], greedy(max_tokens=6, ignore_eos=True)))
            await asyncio.sleep(0.05)
            begin = time.perf_counter()
            seen = await read(metrics)
            seconds = time.perf_counter() - begin
            model.gate.set()
            await task
            after = await read(metrics)
            assert after("generation_tokens_total") == 6
            assert after("request_queue_time_seconds_sum") < 0.1 < after("request_prefill_time_seconds_sum")
            return seen, seconds

        seen, seconds = asyncio.run(run())
        assert seconds < 2
        assert seen("engine_up") == 1
        assert seen("generation_tokens_total") == 0

    def test_counters_outlive_an_engine_that_was_broken_off(self, make: MakeLLM) -> None:
        llm, metrics = make(num_blocks=24, preemption="swap", prefix_caching=False)
        asked = [([i + 1] * 6, greedy(max_tokens=40, ignore_eos=True)) for i in range(6)]

        def break_off(engine: Any) -> None:
            def schedule() -> StepPlan:
                raise RuntimeError("broken")

            engine.scheduler.schedule = schedule

        async def run() -> list[Read]:
            await serve(llm, metrics, asked)
            scrapes = [await read(metrics)]
            llm.call(break_off).result()
            broken = await answer(llm, metrics, [1, 2], greedy(max_tokens=3))
            assert broken.error
            scrapes.append(await read(metrics))
            await serve(llm, metrics, asked)
            return [*scrapes, await read(metrics)]

        scrapes = asyncio.run(run())
        assert_never_back(scrapes)
        assert scrapes[0]("preemptions_total", kind="swap") > 0
        assert scrapes[2]("preemptions_total", kind="swap") > scrapes[1]("preemptions_total", kind="swap")


class TestShape:
    """Names, labels, buckets and formats."""

    def test_both_formats_say_the_same(self, make: MakeLLM) -> None:
        llm, metrics = make(num_blocks=100)

        async def run() -> list[tuple[bytes, str]]:
            await answer(llm, metrics, [1, 2, 3], greedy(max_tokens=6, ignore_eos=True))
            metrics.observe_http("GET", "/metrics", 200)
            metrics.observe_http("BREW\n", "/pot", 418)
            return [await metrics.render(), await metrics.render(OPENMETRICS)]

        (text, text_type), (openmetrics, openmetrics_type) = asyncio.run(run())
        assert text_type.startswith("text/plain; version=")
        assert openmetrics_type.startswith("application/openmetrics-text; version=1.0.0")
        assert openmetrics.endswith(b"# EOF\n")
        one, other = Read(text), Read(openmetrics, parse_openmetrics)
        ours = [
            {(s.name, *sorted(s.labels.items())): s.value for s in r.samples if s.name.startswith("octavo:")}
            for r in (one, other)
        ]
        assert ours[0] == ours[1]
        assert one("generation_tokens_total", model_name='a "toy"\n', engine="0") == 6
        assert one("http_requests_total", method="other", path="/pot", status="418") == 1
        assert one("cache_config_info", block_size="4", num_gpu_blocks="100") == 1
        assert "process_resident_memory_bytes" in one.names()

    def test_every_bound_of_vllm_is_there(self) -> None:
        ttft = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
        token = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
        latency = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
        for theirs, ours in ((ttft, TTFT), (token, TOKEN), (latency, LATENCY)):
            assert set(map(float, theirs.split())) <= set(ours)
            assert list(ours) == sorted(set(ours))
        assert list(STEP_TOKENS) == [1, *(2**power for power in range(3, 15))]
        assert list(SAMPLES) == [1, 2, 5, 10, 20]
        assert up_to(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
        assert up_to(1000)[-1] == 1000

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5))))
    def test_a_histogram_counts(self, values: list[tuple[float, int]]) -> None:
        histogram = Histogram.of(TOKEN)
        for value, times in values:
            histogram.observe(value, times)
        for bound, count in histogram.buckets():
            assert count == sum(times for value, times in values if value <= float(bound))
        assert histogram.total == pytest.approx(sum(value * times for value, times in values))

    def test_watching_costs_microseconds(self, make: MakeLLM) -> None:
        llm, metrics = make(num_blocks=400)
        params = greedy(max_tokens=2, ignore_eos=True)
        requests = llm.call(lambda engine: [engine.add_request(f"{i}", [1], params) for i in range(256)]).result()
        plan = StepPlan([request.live[0] for request in requests if request.live] * 256, [1] * 256, 256)
        record, watch = StepRecord(0.0, 0.004, plan, []), metrics._watch
        plan.sequences = plan.sequences[:256]
        best = min(_seconds(lambda: [watch(record) for _ in range(100)]) for _ in range(20)) / 100
        assert best < 20e-6


def _seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


class TestDocuments:
    """The dashboard and the table speak of what there is."""

    @pytest.fixture
    def seen(self, make: MakeLLM) -> Read:
        _, metrics = make(num_blocks=100)
        metrics.observe_http("GET", "/metrics", 200)
        return asyncio.run(read(metrics))

    def test_the_dashboard_asks_for_what_is_exported(self, seen: Read) -> None:
        board = json.loads((DOCS / "grafana.json").read_text())
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        exprs = [target["expr"] for panel in panels for target in panel["targets"]]
        assert len(exprs) >= 20
        exported = seen.names()
        for expr in exprs:
            asked = re.findall(r"octavo:\w+", expr)
            assert asked, expr
            for name in asked:
                assert name in exported, f"{expr} asks for {name}"
            for name, inside in re.findall(r"(octavo:\w+)\{([^}]*)\}", expr):
                labels = set(re.findall(r"(\w+)\s*[=!]", inside))
                assert any(s.name == name and labels <= set(s.labels) for s in seen.samples), expr
            for grouped in re.findall(r"by \(([^)]*)\)", expr):
                labels = {label.strip() for label in grouped.split(",")}
                assert any(s.name == asked[0] and labels <= set(s.labels) for s in seen.samples), expr
            assert expr.count("(") == expr.count(")")
        names = {variable["name"] for variable in board["templating"]["list"]}
        assert names == {"datasource", "model_name"}
        assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)

    def test_the_table_lists_them_all(self, seen: Read) -> None:
        text = (DOCS / "metrics.md").read_text()
        rows = dict(re.findall(r"^\| `octavo:(\w+)` \| (\w+) \|", text, re.MULTILINE))
        kinds = {f.name: f.type for f in seen.families.values() if f.name.startswith("octavo:")}
        expected = {
            name.removeprefix("octavo:") + ("_total" if kind == "counter" else ""): kind for name, kind in kinds.items()
        }
        assert rows == expected


def test_the_real_model(smollm2_path: Path) -> None:
    llm = AsyncLLM(smollm2_path, num_blocks=64)
    try:
        metrics = Metrics(llm, "smollm2")

        async def run() -> tuple[RequestOutput, Read]:
            params = SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True)
            output: RequestOutput | None = None
            async for output in llm.generate("The sea is", params):  # noqa: B007
                pass
            metrics.observe_finished(output, params)
            assert output is not None
            return output, await read(metrics)

        output, seen = asyncio.run(run())
    finally:
        llm.close()
    assert seen("generation_tokens_total") == 24
    assert seen("prompt_tokens_total") == len(output.prompt_token_ids)
    assert 0 < seen("time_to_first_token_seconds_sum") <= seen("e2e_request_latency_seconds_sum")
    assert seen("inter_token_latency_seconds_count") == 22

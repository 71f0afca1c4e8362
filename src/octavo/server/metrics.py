"""`/metrics`: what Prometheus is told, under vLLM's names with the prefix `octavo:`. Knows no FastAPI and no routes.

What the engine knows is read between two of its steps when somebody asks, so nothing is kept twice; only what passes by
(latencies, requests that end, HTTP answers) is added up here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from octavo import __version__
from octavo.async_llm import AsyncLLM
from octavo.engine.engine import Engine
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput
from octavo.params import BeamParams, SamplingParams
from octavo.server.histogram import LATENCY, SAMPLES, TOKEN, Histogram, up_to
from octavo.server.watch import Snapshot, StepWatch

logger = logging.getLogger(__name__)

PATIENCE = 3.0  # seconds that a scrape waits for the step in progress before it tells what it last knew
TEXT = "text/plain; version=0.0.4; charset=utf-8"
REASONS = ("stop", "length", "abort", "error")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_LATENCIES = {
    "e2e_request_latency_seconds": "Seconds from a request's arrival to its last token.",
    "request_queue_time_seconds": "Seconds a request waited until its prompt began to be computed.",
    "request_inference_time_seconds": "Seconds from the first computation for a request to its last token.",
    "request_prefill_time_seconds": "Seconds from the first computation for a request to its first token.",
    "request_decode_time_seconds": "Seconds from a request's first token to its last.",
}
_SIZES = {
    "request_prompt_tokens": "Prompt tokens of a request, those found in the prefix cache included.",
    "request_generation_tokens": "Answer tokens of a request, over all its answers.",
    "request_params_max_tokens": "max_tokens of a request, where it has one.",
}
_TPOT = "request_time_per_output_token_seconds"
_TEXTS = {
    **_LATENCIES,
    **_SIZES,
    _TPOT: "Seconds an answer token of a request took on average, after the first.",
    "request_params_n": "Answers a request asks for.",
}


class Metrics:
    """The figures of one AsyncLLM. `observe_…` may be called by any thread; the engine's thread is watched from here.

    Raises OctavoError if the AsyncLLM is closed already.
    """

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._labels = {"model_name": model_name, "engine": "0"}
        self._guard = threading.Lock()
        self._ended: Counter[str] = Counter()  # by reason
        self._http: Counter[tuple[str, str, str]] = Counter()  # by method, path template and status
        self._rejected = 0
        self._watch, self._last, facts = llm.call(_join).result()
        self._facts = facts
        sizes = up_to(facts["max_model_len"])
        self._requests = {name: Histogram.of(LATENCY) for name in _LATENCIES}
        self._requests |= {name: Histogram.of(sizes) for name in _SIZES}
        self._requests |= {_TPOT: Histogram.of(TOKEN), "request_params_n": Histogram.of(SAMPLES)}

    # --- what passes by ------------------------------------------------------------------------------------------

    def observe_finished(
        self, output: RequestOutput | None, params: SamplingParams | BeamParams, *, aborted: bool = False
    ) -> None:
        """A request has ended. Call it once for each that the engine took on.

        `output` is the last one seen, None if there was none, and need not hold the answers' texts and tokens;
        `aborted` tells that the reader left before the end.
        Latencies and sizes are those of requests that were answered to their end.
        """
        reason = "abort" if aborted or output is None else _reason(output)
        with self._guard:
            self._ended[reason] += 1
            self._requests["request_params_n"].observe(_num_answers(params))
            if params.max_tokens is not None:
                self._requests["request_params_max_tokens"].observe(params.max_tokens)
            if output is not None and reason in ("stop", "length"):
                self._observe_answered(output, params)

    def observe_rejected(self) -> None:
        """A request was turned away because too many waited (429)."""
        with self._guard:
            self._rejected += 1

    def observe_http(self, method: str, path: str, status: int) -> None:
        """An HTTP request was answered. `path` is the route's template, so that there are only so many of them."""
        with self._guard:
            self._http[method if method in METHODS else "other", path, str(status)] += 1

    def _observe_answered(self, output: RequestOutput, params: SamplingParams | BeamParams) -> None:
        observe, times = self._requests, output.timings
        end = time.perf_counter() if times.finished is None else times.finished
        observe["e2e_request_latency_seconds"].observe(end - times.arrived)
        observe["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        observe["request_generation_tokens"].observe(output.output_tokens)
        if times.scheduled is not None:
            observe["request_queue_time_seconds"].observe(times.scheduled - times.arrived)
            observe["request_inference_time_seconds"].observe(end - times.scheduled)
            if times.first_token is not None:
                observe["request_prefill_time_seconds"].observe(times.first_token - times.scheduled)
        if times.first_token is not None:
            observe["request_decode_time_seconds"].observe(end - times.first_token)
            beside = params.num_samples if isinstance(params, SamplingParams) else len(output.completions)
            later = output.output_tokens / beside - 1 if beside else 0.0  # tokens of an answer after its first
            if later > 0:
                observe[_TPOT].observe((end - times.first_token) / later)

    # --- what is told --------------------------------------------------------------------------------------------

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type) for a scrape: Prometheus text, or OpenMetrics if the Accept header asks for it.

        Always answers. While a step takes long it tells what was last known; once the engine is gone, its gauges are
        left out, `octavo:engine_up` is 0 and counters stay where they were.
        """
        up = await self._refresh()
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Families(self._families(up)))
        # not by the client's choose_encoder, which for some scrapers makes octavo_ of octavo:
        if any(kind.split(";")[0].strip() == "application/openmetrics-text" for kind in accept.split(",")):
            body: bytes = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(registry, openmetrics.ALLOWUTF8), TEXT

    async def _refresh(self) -> bool:
        """Read the engine; False if there is none any more."""
        try:
            future = asyncio.wrap_future(self._llm.call(lambda _: self._watch.snapshot()))
            self._last = await asyncio.wait_for(future, PATIENCE)
        except asyncio.TimeoutError:
            pass
        except OctavoError:
            return False
        except Exception:  # whoever scrapes is to learn of it, not to fail with it
            logger.exception("The engine's figures could not be read.")
            return False
        return True

    def _families(self, up: bool) -> list[Metric]:
        snap = self._last
        families = [*self._totals(snap), *self._distributions(snap), *self._served(), *self._infos(up)]
        return [*self._gauges(snap), *families] if up else families

    def _gauges(self, snap: Snapshot) -> Iterator[Metric]:
        usage = snap.usage
        held = (usage.active + usage.shared) / usage.num_blocks
        host = usage.host_used / usage.host_blocks if usage.host_blocks else 0.0
        yield self._gauge("num_requests_running", "Requests that compute.", snap.running)
        yield self._gauge("num_requests_waiting", "Requests that wait, without those swapped out.", snap.waiting)
        yield self._gauge("num_requests_swapped", "Preempted requests whose blocks are in host memory.", snap.swapped)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks that is held, from 0 to 1.", held)
        yield self._gauge("gpu_cache_usage_perc", "kv_cache_usage_perc under its old name.", held)
        yield self._gauge("cpu_cache_usage_perc", "Share of the host blocks that is held, from 0 to 1.", host)
        states = {name: getattr(usage, name) for name in ("free", "cached", "active", "shared")}
        yield self._gauge("kv_blocks", "KV blocks by state; together they are the pool.", states, by="state")
        yield self._gauge("kv_blocks_pinned", "KV blocks kept by pins, of those active and shared.", usage.pinned)
        hosts = {"free": usage.host_blocks - usage.host_used, "used": usage.host_used}
        yield self._gauge("host_blocks", "Blocks of host memory, for swapping, by state.", hosts, by="state")
        text = "Share of the slots of held blocks that holds a token."
        yield self._gauge("kv_utilisation", text, usage.utilisation)
        text = "Share of the slots of held blocks that is empty: 1 - kv_utilisation."
        yield self._gauge("kv_fragmentation", text, 1 - usage.utilisation)
        found, sought = snap.events["hit_tokens"], snap.events["lookup_tokens"]
        text = "Share of all prompt tokens looked for that the prefix cache had, since the start."
        yield self._gauge("prefix_cache_hit_rate", text, found / sought if sought else 0.0)

    def _totals(self, snap: Snapshot) -> Iterator[Metric]:
        events, report = snap.events, snap.report
        kinds = {kind: events[kind] for kind in ("recompute", "swap")}
        moved = {"in": events["swapped_in"], "out": events["swapped_out"]}
        yield self._count(
            "prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", events["lookup_tokens"]
        )
        yield self._count("prefix_cache_hits", "Prompt tokens found in the prefix cache.", events["hit_tokens"])
        yield self._count("num_preemptions", "Times a request gave up its blocks for others.", sum(kinds.values()))
        yield self._count(
            "preemptions",
            "Preemptions, by what became of the blocks: recompute, dropped; swap, moved to host memory.",
            kinds,
            by="kind",
        )
        yield self._count("prompt_tokens", "Tokens of the prompts answered with a first token.", snap.prompt_tokens)
        text = "Prompt tokens computed for them: those not found in the prefix cache."
        yield self._count("prompt_tokens_computed", text, report.prompt_tokens)
        yield self._count("generation_tokens", "Answer tokens drawn.", report.output_tokens)
        yield self._count("kv_block_copies", "Blocks copied on write.", events["copies"])
        yield self._count("kv_block_evictions", "Cached blocks reclaimed.", events["evictions"])
        yield self._count("kv_blocks_swapped", "Blocks moved to host memory and back.", moved, by="direction")
        yield self._count("engine_busy_seconds", "Seconds spent in steps.", report.busy_seconds)

    def _distributions(self, snap: Snapshot) -> Iterator[Metric]:
        yield self._histogram("iteration_tokens_total", "Tokens computed in a step.", snap.step_tokens)
        yield self._histogram("iteration_seconds", "Seconds a step took.", snap.step_seconds)
        text = "Seconds from a request's arrival to its first token."
        yield self._histogram("time_to_first_token_seconds", text, snap.first_token_seconds)
        text = "Seconds between two tokens of an answer."
        yield self._histogram("inter_token_latency_seconds", text, snap.next_token_seconds)
        text = "inter_token_latency_seconds under its old name."
        yield self._histogram("time_per_output_token_seconds", text, snap.next_token_seconds)
        with self._guard:
            for name, histogram in self._requests.items():
                yield self._histogram(name, _TEXTS[name], histogram)

    def _served(self) -> Iterator[Metric]:
        with self._guard:
            ended, http, rejected = (
                {reason: self._ended[reason] for reason in REASONS},
                dict(self._http),
                self._rejected,
            )
        yield self._count("request_success", "Requests that ended, by how.", ended, by="finished_reason")
        yield self._count("requests_aborted", "Requests whose reader left, or that were aborted.", ended["abort"])
        yield self._count("requests_rejected", "Requests turned away because too many waited.", rejected)
        family = CounterMetricFamily(
            "octavo:http_requests",
            "HTTP requests, by method, path template and status.",
            labels=["method", "path", "status"],
        )
        for (method, path, status), count in sorted(http.items()):
            family.add_metric([method, path, status], count)
        yield family

    def _infos(self, up: bool) -> Iterator[Metric]:
        facts, config = self._facts, self._llm.config
        yield self._gauge("engine_up", "1 while the engine answers, 0 once it is gone.", up)
        yield self._info("build_info", "What runs.", {"version": __version__})
        cache = {
            "block_size": config.block_size,
            "num_gpu_blocks": self._last.usage.num_blocks,
            "num_cpu_blocks": self._last.usage.host_blocks,
            "block_bytes": facts["block_bytes"],
            "cache_dtype": facts["kv_type"],
            "enable_prefix_caching": config.prefix_caching,
            "preemption": config.preemption,
        }
        text = "How the KV memory is set up; the device's blocks are called num_gpu_blocks wherever they are."
        yield self._info("cache_config_info", text, cache)

    # --- Prometheus's shapes ----------------------------------------------------------------------------------------

    def _gauge(self, name: str, text: str, value: float | Mapping[str, float], by: str = "") -> Metric:
        """A gauge; several, told apart by the label `by`, where `value` has one for each of its values."""
        family = GaugeMetricFamily(f"octavo:{name}", text, labels=[*self._labels, *([by] if by else [])])
        for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            family.add_metric([*self._labels.values(), *([key] if by else [])], number)
        return family

    def _count(self, name: str, text: str, value: float | Mapping[str, float], by: str = "") -> Metric:
        """The same, a counter."""
        family = CounterMetricFamily(f"octavo:{name}", text, labels=[*self._labels, *([by] if by else [])])
        for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            family.add_metric([*self._labels.values(), *([key] if by else [])], number)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"octavo:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.total)
        return family

    def _info(self, name: str, text: str, facts: Mapping[str, object]) -> Metric:
        labels = {**self._labels, **{key: str(value) for key, value in facts.items()}}
        family = GaugeMetricFamily(f"octavo:{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family


class _Families(Collector):
    """Families that are there already, in the shape a registry wants."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _join(engine: Engine) -> tuple[StepWatch, Snapshot, dict[str, Any]]:
    """On the engine's thread: begin to watch."""
    watch = StepWatch(engine)
    engine.watchers.append(watch)
    limits, ops = engine.limits, engine.ops
    facts = {"max_model_len": limits.max_model_len, "block_bytes": engine.block_bytes, "kv_type": ops.kv_type}
    return watch, watch.snapshot(), facts


def _num_answers(params: SamplingParams | BeamParams) -> int:
    return params.n or params.num_samples


def _reason(output: RequestOutput) -> str:
    """How a request ended: as its answers did, "length" if any of them was cut."""
    reasons = {completion.finish_reason for completion in output.completions}
    if output.error is not None or "error" in reasons:
        return "error"
    return next((reason for reason in ("abort", "length", "stop") if reason in reasons), "abort")

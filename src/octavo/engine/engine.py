"""The loop: schedule, move memory, compute, draw, hand out. Knows no HTTP, no files and no threads.

One `step` is: Scheduler -> StepPlan -> MemoryOps executed -> Batch -> model -> logits -> Drawer -> tokens. A fault in a
step ends the requests of that step and no others.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineConfig, parse_bytes
from octavo.engine import sampler
from octavo.engine.batch import Batch
from octavo.engine.beam import BeamSearch
from octavo.engine.constraint import Constraint, Constraints
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.drawing import Drawer
from octavo.engine.limits import Limits
from octavo.engine.report import MemoryReport, Meter, StepRecord
from octavo.engine.request import Request, Sequence, State
from octavo.engine.scheduler import PreemptionCost, Scheduler, StepPlan
from octavo.errors import ConfigError, RequestError
from octavo.kv.manager import KVManager, Pin
from octavo.kv.memory_ops import Kind, MemoryOps
from octavo.loading.tokenizer import Tokenizer
from octavo.models.interface import Model
from octavo.ops.interface import Array, CacheLayout, Ops
from octavo.params import BeamParams, SamplingParams

logger = logging.getLogger(__name__)

PROMPT_LOGIT_ROWS = 64  # rows of a prompt's logits held at once: a vocabulary of 262,144 makes 64 MiB of them


class Engine:
    """One model, its KV memory and the requests on it. Not thread-safe: one thread calls all methods."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.model, self.ops, self.config, self.tokenizer = model, ops, config, tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.limits = Limits.of(config, model)
        self.constraints = Constraints(tokenizer, self.eos_ids, model.vocab_size)
        layout = CacheLayout(model.num_layers, model.num_kv_heads, config.block_size, model.head_dim)
        self.block_bytes = ops.block_bytes(layout)
        num_blocks = self.limits.num_blocks(config, self.block_bytes)
        num_host_blocks = 0 if config.preemption == "recompute" else parse_bytes(config.swap_memory) // self.block_bytes
        self._cache = self._new_cache(num_blocks, layout, "kv_memory or num_blocks", config.prefault)
        self._host_cache = self._new_cache(num_host_blocks, layout, "swap_memory", False)
        self._num_blocks, self._num_host_blocks = num_blocks, num_host_blocks
        self._cost = PreemptionCost(seconds_per_block=self.block_bytes / 4e9, seconds_per_token=1e-3)
        self._sequence_ids = itertools.count()
        self._arrivals = itertools.count()
        self._seeds = random.Random(config.seed)
        self._meter = Meter()
        self._requests: dict[str, Request] = {}
        self.watchers: list[Callable[[StepRecord], None]] = []  # told of every step, on the thread that steps
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Empty memory and empty queues."""
        config = self.config
        self.kv = self._new_manager()
        self.scheduler = Scheduler(
            self.kv,
            token_budget=config.max_batched_tokens,
            sequence_limit=self.limits.max_num_seqs,
            preemption=config.preemption,
            cost=self._cost,
            new_sequence_id=self._sequence_ids.__next__,
        )
        self._batch = Batch(self.kv, max_rows=self.limits.max_num_seqs, max_model_len=self.limits.max_model_len)
        self._drawer = Drawer(
            self.scheduler,
            self._batch,
            self._meter,
            self.ops,
            limits=self.limits,
            eos_ids=self.eos_ids,
            constraints=self.constraints,
            new_sequence=self._new_sequence,
        )

    def _new_manager(self) -> KVManager:
        """Of the empty memory; `octavo.lab` puts another in its place."""
        config = self.config
        return KVManager(
            self._num_blocks,
            config.block_size,
            num_host_blocks=self._num_host_blocks,
            prefix_caching=config.prefix_caching,
        )

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams | BeamParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        constraint: Constraint | None = None,
    ) -> Request:
        """Queue a request. Lower `priority` runs first; only prompts of the same `cache_salt` share a prefix.

        constraint: the params' grammar, compiled by `constraints.compile`, which any thread may call beforehand and
            which may take long; without it the grammar is compiled here.

        Raises RequestError, with the numbers, for one that can never be served.
        """
        ids = list(prompt_token_ids)
        _check_kinds(params, priority, cache_salt)
        if request_id in self._requests:
            raise RequestError(f"A request with the id {request_id!r} is already here; ids must differ.")
        if isinstance(params, SamplingParams) and params.stop and self.tokenizer is None:
            raise RequestError("Stop strings need a tokenizer, and this model has none; use stop_token_ids.")
        salt = cache_salt.encode("utf-8", "surrogatepass")
        self.limits.check(ids, params, self.kv, salt)
        if isinstance(params, SamplingParams) and params.grammar is not None and constraint is None:
            constraint = self.constraints.compile(params.grammar)
        seed = getattr(params, "seed", None)
        request = Request(
            id=request_id,
            prompt=prompt,
            prompt_token_ids=ids,
            params=params,
            arrival=next(self._arrivals),
            seed=(self._seeds.getrandbits(64) if seed is None else seed) % 2**64,
            priority=priority,
            salt=salt,
        )
        request.live.append(self._new_sequence(request, 0))
        request.live[0].matcher = constraint.matcher() if constraint else None
        if isinstance(params, BeamParams):
            request.beam = BeamSearch(params, self.eos_ids, self.limits.most_tokens(len(ids), params.max_tokens))
        if request.wants_prompt_logprobs:
            request.prompt_logprobs = [None]
        self.scheduler.add(request)
        self._requests[request_id] = request
        return request

    @property
    def requests(self) -> Mapping[str, Request]:
        """Those that have not ended, by id, in the order they came."""
        return self._requests

    def abort(self, request_id: str) -> Request | None:
        """End a request at once, wherever it stands, and free all it holds; None if it is not here (any more)."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request, "abort")
        return request

    def pin(self, token_ids: Seq[int], cache_salt: str = "") -> Pin:
        """Keep the cached blocks of this beginning until `unpin`; the pin tells how many tokens there were."""
        return self.kv.pin(token_ids, cache_salt.encode("utf-8", "surrogatepass"))

    def unpin(self, pin: int) -> None:
        """Let a pinned beginning be reclaimed again. Raises KVError for an unknown pin."""
        self.kv.unpin(pin)

    def memory_report(self) -> MemoryReport:
        """What the memory did since the engine started."""
        return self._meter.report(self.kv, self.scheduler, self.block_bytes, self.ops.kv_type)

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Compute one step; returns the requests that got tokens or ended.

        What goes wrong with a request ends that request. If the step itself is broken off, by a fault in here or by
        Ctrl-C, nobody knows any more what memory holds: all requests end, memory is emptied, and the error goes on.
        """
        try:
            return self._step()
        except BaseException as error:
            for request in self._requests.values():
                request.error = f"The engine was broken off in the midst of a step: {error!r}."
                request.end("error")
            self._requests.clear()
            self._start_afresh()
            raise

    def _step(self) -> list[Request]:
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        self._batch.leave()
        touched = self._end_what_cannot_go_on(plan)
        failed = self._move(plan.memory)
        touched += failed
        if plan.sequences and not failed:
            touched += self._try_to_compute(plan)
        touched = list(dict.fromkeys(touched))
        for request in touched:
            if request.state is State.FINISHED:
                self._requests.pop(request.id, None)
        self._meter.observe_growth(self.kv)
        seconds = time.perf_counter() - begin
        self._meter.busy_seconds += seconds
        if self.watchers:
            self._tell(StepRecord(begin, seconds, plan, touched))
        return touched

    def _tell(self, record: StepRecord) -> None:
        """Whoever watches must not break what he sees: one that fails is dismissed."""
        failed = [watcher for watcher in self.watchers if not _watches(watcher, record)]
        self.watchers = [watcher for watcher in self.watchers if watcher not in failed]

    def _end_what_cannot_go_on(self, plan: StepPlan) -> list[Request]:
        for seq in plan.exhausted:
            seq.finish_reason, seq.stop_reason = "length", "kv_memory"
        touched = list(dict.fromkeys(seq.request for seq in plan.exhausted))
        for request in touched:
            if request.beam is not None:
                request.beam.cut()
                self._drawer.end_beams(request)
                for seq in request.ended:
                    if seq.finish_reason == "length":
                        seq.stop_reason = "kv_memory"
            elif not request.live:
                self.scheduler.finish(request, "length")
        for request in plan.stuck:
            pinned = self.kv.num_pinned_blocks
            message = f"The prompt found no room: {pinned} of {self.kv.pool.num_blocks} KV blocks are pinned."
            self.scheduler.fail(request, message)
        return touched + plan.stuck

    def _move(self, memory: MemoryOps) -> list[Request]:
        """Copy and swap blocks. If that fails, the requests that held memory end, and are returned."""
        caches = {
            Kind.COPY: (self._cache, self._cache),
            Kind.SWAP_OUT: (self._cache, self._host_cache),
            Kind.SWAP_IN: (self._host_cache, self._cache),
        }
        try:
            for kind, pairs in memory.runs:
                begin = time.perf_counter()
                self.ops.copy_blocks(*caches[kind], np.array(pairs, np.int32))
                if kind is not Kind.COPY:
                    seconds = (time.perf_counter() - begin) / len(pairs)
                    self._cost.seconds_per_block += 0.2 * (seconds - self._cost.seconds_per_block)
        except Exception as error:
            # The tables already tell of copies that never happened: nothing in memory can be trusted any more.
            victims = [r for r in self._requests.values() if r.state in (State.RUNNING, State.SWAPPED)]
            for request in victims:
                self.scheduler.fail(request, f"Moving KV blocks failed: {error!r}.")
            self.kv.reset_prefix_cache()
            return victims
        return []

    def _try_to_compute(self, plan: StepPlan) -> list[Request]:
        """Compute a plan; returns its requests, ended if it failed."""
        requests = list(dict.fromkeys(seq.request for seq in plan.sequences))
        try:
            self._compute(plan)
        except Exception as error:  # whatever it was, the other requests are not to suffer for it
            for request in requests:
                if request.state is not State.FINISHED:
                    self.scheduler.fail(request, f"The step that computed this request failed: {error!r}.")
        return requests

    def _compute(self, plan: StepPlan) -> None:
        self._drawer.join(plan.sequences)
        step = self._batch.prepare(plan)
        begin = time.perf_counter()
        hidden = self.model.forward(step, self._cache)
        rows = self._prompt_logprobs(plan, hidden)
        logits = self.ops.to_numpy(self.model.logits(hidden if rows is None else self.ops.take_rows(hidden, rows)))
        self._measure(plan, time.perf_counter() - begin)
        self._commit(plan, begin)
        self._meter.observe(self.kv)
        drawing = plan.sequences
        if plan.num_decodes < len(drawing):
            drawing = [seq for seq in drawing if seq.computed == len(seq.tokens)]
        self._drawer.draw(drawing, logits)

    def _commit(self, plan: StepPlan, began: float) -> None:
        self._batch.advance()
        commit = self.kv.commit
        for seq, count in zip(plan.sequences, plan.counts, strict=True):
            commit(seq.id, count, seq.tokens)
            seq.computed += count
        for seq in plan.sequences[plan.num_decodes :]:
            if seq.request.timings.scheduled is None:
                seq.request.timings.scheduled = began

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        tokens = sum(plan.counts)
        if tokens >= 2 * plan.num_decodes + 32:  # mostly prompt: tells what a token costs to recompute
            self._cost.seconds_per_token += 0.2 * (seconds / tokens - self._cost.seconds_per_token)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Array) -> NDArray[np.int32] | None:
        """Report the prompts' log-probabilities where asked; returns the rows that draw, None for all."""
        if not any(seq.request.wants_prompt_logprobs for seq in plan.sequences[plan.num_decodes :]):
            return None
        rows: list[int] = []
        row = 0
        for seq, count in zip(plan.sequences, plan.counts, strict=True):
            last = seq.computed + count == len(seq.tokens)
            if seq.request.wants_prompt_logprobs and not seq.request.started:
                self._prompt_chunk_logprobs(seq, count, hidden, row)
                row += count
            else:
                row += last
            if last:
                rows.append(row - 1)
        return np.array(rows, np.int32)

    def _prompt_chunk_logprobs(self, seq: Sequence, count: int, hidden: Array, row: int) -> None:
        request, params = seq.request, seq.request.params
        assert isinstance(params, SamplingParams)
        assert params.prompt_logprobs is not None
        assert request.prompt_logprobs is not None
        targets = seq.tokens[seq.computed + 1 : seq.computed + count + 1]  # what stands after each token of the chunk
        del request.prompt_logprobs[seq.computed + 1 :]  # from before a preemption
        for begin in range(0, len(targets), PROMPT_LOGIT_ROWS):
            piece = targets[begin : begin + PROMPT_LOGIT_ROWS]
            rows = np.arange(row + begin, row + begin + len(piece), dtype=np.int32)
            logits = self.ops.to_numpy(self.model.logits(self.ops.take_rows(hidden, rows)))
            places = np.arange(len(piece))
            top = params.prompt_logprobs
            request.prompt_logprobs += sampler.logprobs(self.ops, logits, places, np.array(piece), top)

    def _new_cache(self, num_blocks: int, layout: CacheLayout, setting: str, prefault: bool) -> Array:
        try:
            return self.ops.new_cache(num_blocks, layout, prefault=prefault)
        except MemoryError:
            size = num_blocks * self.block_bytes / 2**30
            raise ConfigError(
                f"{num_blocks} KV blocks take {size:,.1f} GiB, more than this machine can give; lower {setting}."
            ) from None

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        """A sequence that holds the request's prompt and no memory yet."""
        params = request.params
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer,
                request.prompt_token_ids,
                stop=params.stop if isinstance(params, SamplingParams) else (),
                include_stop=isinstance(params, SamplingParams) and params.include_stop,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        tokens = request.prompt_token_ids.copy()
        return Sequence(next(self._sequence_ids), request, index, tokens, detokenizer=detokenizer)


def _check_kinds(params: object, priority: object, cache_salt: object) -> None:
    """What would break the queue, or others in it, much later."""
    if not isinstance(params, (SamplingParams, BeamParams)):
        raise RequestError(f"params is {params!r}; it must be SamplingParams or BeamParams.")
    if not isinstance(priority, int):
        raise RequestError(f"priority is {priority!r}; it must be a whole number, lower ones run first.")
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt is {cache_salt!r}; it must be a text.")


def _watches(watcher: Callable[[StepRecord], None], record: StepRecord) -> bool:
    try:
        watcher(record)
    except Exception:
        logger.exception("A watcher of the engine failed and is told of no more steps.")
        return False
    return True

"""Runs work on the real engine with a strategy's manager, by the real clock. Knows the simulator's rules, no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from octavo.config import BLOCK_SIZES, EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.report import StepRecord
from octavo.engine.request import Request, State
from octavo.engine.scheduler import StepPlan
from octavo.errors import RequestError
from octavo.kv.manager import KVManager
from octavo.lab.memory import Manager
from octavo.lab.memory_ledger import Line, Moment
from octavo.lab.results import Run
from octavo.lab.running import Progress, Runner, params_of
from octavo.lab.strategies import complete, make
from octavo.lab.work import Work


class LabEngine(Engine):
    """The engine with another manager; `on_commit` is told when a step's tokens are stored, before any is drawn."""

    def __init__(self, base: Engine, config: EngineConfig, manager: Manager) -> None:
        """base: whose model and operations to use."""
        self._manager = manager
        self.on_commit: Callable[[StepPlan], None] = lambda plan: None
        super().__init__(base.model, base.ops, config, eos_ids=base.eos_ids)

    def _new_manager(self) -> KVManager:
        return cast(KVManager, self._manager)  # it has all that the engine asks of its own

    def _commit(self, plan: StepPlan, began: float) -> None:
        super()._commit(plan, began)
        self.on_commit(plan)


class Execution(Runner):
    """One run by the real clock."""

    def __init__(
        self,
        work: Work,
        strategy: str,
        manager: Manager,
        *,
        engine: Engine,
        max_model_len: int,
        seed: int = 0,
        token_budget: int = 2048,
        sequence_limit: int = 256,
        map_time: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Raises RequestError for a block size that no kernel has."""
        self.engine = LabEngine(engine, _config(engine, manager, max_model_len, token_budget, sequence_limit), manager)
        self._names = 0
        self._began: float | None = None
        self._moment: Moment | None = None
        super().__init__(
            work,
            strategy,
            manager,
            self.engine.scheduler,
            vocabulary=self.engine.limits.vocab_size,
            max_model_len=max_model_len,
            block_bytes=self.engine.block_bytes,
            seed=seed,
            map_time=map_time,
            progress=progress,
        )
        self.engine.on_commit = self._look
        self.engine.watchers.append(self._watch)

    def now(self) -> float:
        if self._began is None:
            self._began = time.perf_counter()
        return time.perf_counter() - self._began

    def wait(self, until: float) -> None:
        time.sleep(max(0.0, until - self.now()))

    def submit(self, line: Line, prompt: list[int], n: int, beam_width: int, priority: int) -> Request:
        self._names += 1
        params = params_of(n, beam_width, line.asked.output)
        return self.engine.add_request(str(self._names), prompt, params, priority=priority)

    def step(self) -> None:
        for request in self.engine.step():
            if any(seq.stop_reason == "kv_memory" for seq in request.ended) or request.error is not None:
                self.ledger.lines[request].story.rejected = True
            if request.state is State.FINISHED:
                self.leave(request)

    def _look(self, plan: StepPlan) -> None:
        self._moment = self.look(plan)

    def _watch(self, record: StepRecord) -> None:
        self.count(record.plan)
        if self._moment is not None:
            self.ledger.note(self._moment, record.plan, self.now(), record.seconds)
            self._moment = None
        for request in record.touched:
            if request.started:
                self.ledger.start(request, self.now())


def _config(
    engine: Engine, manager: Manager, max_model_len: int, token_budget: int, sequence_limit: int
) -> EngineConfig:
    if manager.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise RequestError(f"block_size is {manager.block_size}; the engine's kernels have {sizes}.")
    return EngineConfig(
        block_size=manager.block_size,
        num_blocks=manager.pool.num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=sequence_limit,
        max_batched_tokens=token_budget,
        preemption="recompute",
        seed=0,
        backend=engine.config.backend,
        kv_dtype=engine.config.kv_dtype,
        threads=engine.config.threads,
    )


def execute(
    work: Work,
    strategy: str,
    *,
    engine: Engine,
    pool_slots: int,
    max_model_len: int,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    rate: float = 1.0,
    token_budget: int = 2048,
    sequence_limit: int = 256,
    map_time: float | None = None,
    progress: Progress | None = None,
) -> Run:
    """One strategy on one load, for real: requests are submitted when their moment has come, answered or not.

    engine: whose model and kernels to use (`LLM("smollm2").engine`); its own memory is left alone. The rest is as
    `simulate` has it. Raises RequestError for a strategy or setting that does not exist, or a block size no kernel has.
    """
    complete_settings = complete(strategy, settings or {})
    execution = Execution(
        work if rate == 1.0 else work.at_rate(rate),
        strategy,
        make(strategy, pool_slots, max_model_len, **complete_settings),
        engine=engine,
        max_model_len=max_model_len,
        seed=seed,
        token_budget=token_budget,
        sequence_limit=sequence_limit,
        map_time=map_time,
        progress=progress,
    )
    execution.run()
    return execution.as_run(complete_settings, rate)

"""A study: every strategy on the same work at every load, gathered into one result. Knows no figures and no files."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import __version__
from octavo.errors import RequestError
from octavo.lab import strategies
from octavo.lab.results import Result, Run, Sweep
from octavo.lab.work import Work

if TYPE_CHECKING:
    from octavo.lab.hardware import GPU, Model
    from octavo.llm import LLM

SAMPLES, BEAMS = (2, 4, 6, 8, 16), (2, 4, 6, 8)
_MAP_AT = 0.6  # of the time in which requests come: everything is then busy

Progress = Callable[[str, float], None]  # what is being done, and the share of all that is done


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run on a work."""

    strategies: tuple[str, ...]
    rates: tuple[float, ...]
    seed: int
    sweeps: bool = True  # also utilisation against block size, and what sharing saves against n and beam width

    def __post_init__(self) -> None:
        if not self.rates or not all(0 < rate < float("inf") for rate in self.rates):
            raise RequestError(f"The rates are {self.rates}; there must be some, each above 0 and finite.")
        for name in self.strategies:
            if name not in strategies.ALL:
                raise RequestError(f"There is no strategy {name!r}; there are {', '.join(strategies.ALL)}.")


def simulated(work: Work, plan: Plan, gpu: GPU, model: Model, count: int, progress: Progress) -> Result:
    """Every strategy at the scale of `count` GPUs. Raises RequestError where the weights leave no room for KV."""
    from octavo.lab.hardware import pool_slots
    from octavo.lab.simulate import simulate
    from octavo.lab.step_time import of
    from octavo.lab.sweeps import block_sizes, savings

    slots, step_time = pool_slots(gpu, model, count), of(gpu, model, count)
    common: dict[str, Any] = {
        "pool_slots": slots,
        "max_model_len": model.max_model_len,
        "step_time": step_time,
        "token_bytes": model.token_bytes,
        "seed": plan.seed,
    }
    runs = _runs(work, plan, lambda name, rate, told: simulate(
        work, name, rate=rate, map_time=_map_time(work, rate), progress=told, **common,
    ), progress)  # fmt: skip
    sweeps: list[Sweep] = []
    if plan.sweeps:
        progress(f"{work.name}: block sizes", 1.0)
        sweeps.append(block_sizes(work, **common))
        progress(f"{work.name}: sharing", 1.0)
        sweeps += [savings(samples=SAMPLES, seed=plan.seed), savings(beams=BEAMS, seed=plan.seed)]
    return Result(
        kind="simulated",
        octavo=__version__,
        commit=commit(),
        machine={"name": f"{count} × {gpu.label}" if count > 1 else gpu.label, "source": gpu.source},
        model={"name": model.label, "token_bytes": model.token_bytes, "max_model_len": model.max_model_len},
        pool_slots=slots,
        seed=plan.seed,
        work=described(work),
        step_time=step_time.describe(),
        runs=runs,
        sweeps=sweeps,
    )


def executed(work: Work, plan: Plan, llm: LLM, name: str, slots: int, max_model_len: int, progress: Progress) -> Result:
    """Every strategy on the real engine of this machine; `name`: the model's, `slots`: tokens that the pool holds."""
    from octavo.lab.execute import execute

    runs = _runs(work, plan, lambda strategy, rate, told: execute(
        work, strategy, engine=llm.engine, pool_slots=slots, max_model_len=max_model_len, seed=plan.seed, rate=rate,
        map_time=_map_time(work, rate), progress=told,
    ), progress)  # fmt: skip
    engine = llm.engine
    return Result(
        kind="executed",
        octavo=__version__,
        commit=commit(),
        machine=machine(),
        model={
            "name": name,
            "token_bytes": engine.block_bytes // engine.config.block_size,
            "max_model_len": max_model_len,
        },
        pool_slots=slots,
        seed=plan.seed,
        work=described(work),
        step_time={},
        runs=runs,
    )


def _runs(
    work: Work, plan: Plan, run: Callable[[str, float, Callable[[int, int], None]], Run], progress: Progress
) -> list[Run]:
    loads = [(name, rate) for name in plan.strategies for rate in _rates(name, plan)]
    made: list[Run] = []
    for before, (name, rate) in enumerate(loads):
        words = f"{work.name}: {strategies.ALL[name].label}, {rate:g} ×"

        def told(done: int, of: int, words: str = words, before: int = before) -> None:
            progress(words, (before + done / max(of, 1)) / len(loads))

        progress(words, before / len(loads))
        made.append(run(name, rate, told))
    return made


def _rates(name: str, plan: Plan) -> tuple[float, ...]:
    """No cache is run at the highest load only: it computes all for each token, and takes as long as all others."""
    return (max(plan.rates),) if strategies.ALL[name].resubmits else plan.rates


def _map_time(work: Work, rate: float) -> float:
    return _MAP_AT * work.arrivals[-1].at / rate if work.arrivals else 0.0


def described(work: Work) -> dict[str, Any]:
    """The work for the result's file."""
    return {
        "name": work.name,
        "source": work.source,
        "requests": len(work.arrivals),
        "prompt_tokens": sum(arrival.prompt_tokens for arrival in work.arrivals),
        "output_tokens": sum(arrival.output_tokens * arrival.sequences for arrival in work.arrivals),
        "seconds": round(work.arrivals[-1].at, 3) if work.arrivals else 0.0,
    }


def first(work: Work, requests: int | None) -> Work:
    """The work with no more than so many of its requests."""
    if requests is None or requests >= len(work.arrivals):
        return work
    return Work(work.name, f"{work.source}; of these the first {requests}", work.arrivals[:requests])


def commit() -> str:
    """The commit of the source that runs, "+" behind it where files were changed since; "" where git knows none."""
    folder = Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return f"{head}+" if _git(folder, "status", "--porcelain", "--untracked-files=no", ".") else head
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """This machine's processor, the cores this process may use, and its memory in bytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"processor": _processor(), "cores": cores, "memory": memory, "system": platform.system()}


def _processor() -> str:
    try:
        lines: Sequence[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

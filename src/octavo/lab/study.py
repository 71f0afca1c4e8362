"""A study: every strategy on the same work at every load, gathered into one result. Knows no figures and no files."""

from __future__ import annotations

import os
import platform
import subprocess
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import __version__
from octavo.errors import RequestError
from octavo.lab import strategies
from octavo.lab.results import Result, Run, Series, Sweep
from octavo.lab.work import Work

if TYPE_CHECKING:
    from octavo.lab.hardware import GPU, Model
    from octavo.llm import LLM

SAMPLES, BEAMS = (2, 4, 6, 8, 16), (2, 4, 6, 8)
FASTEST = 1e9  # times as fast as the work says, or as slow: beyond, times are no longer finite
_MAP_AT = 0.6  # of the time in which requests come: the moment of a map where no better one can be known before

Progress = Callable[[str, float], None]  # what is being done, and the share of all that is done


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run on a work."""

    strategies: tuple[str, ...]
    rates: tuple[float, ...]
    seed: int
    rounds: int = 1  # of an execution at the highest load, strategies in turns: other programs disturb a clock
    sweeps: bool = True  # also, if paging is among them, utilisation against block size and what sharing saves

    def __post_init__(self) -> None:
        if not self.rates or not all(1 / FASTEST <= rate <= FASTEST for rate in self.rates):
            raise RequestError(
                f"The rates are {', '.join(map(str, self.rates)) or 'none'}; there must be some, each above 0 and "
                f"finite: from {1 / FASTEST:g} to {FASTEST:g}."
            )
        for name in self.strategies:
            if name not in strategies.ALL:
                raise RequestError(f"There is no strategy {name!r}; there are {', '.join(strategies.ALL)}.")


def simulated(work: Work, plan: Plan, gpu: GPU, model: Model, count: int, progress: Progress) -> Result:
    """Every strategy at the scale of `count` GPUs. Raises RequestError where the weights leave no room for KV."""
    from octavo.lab.hardware import MEMORY_SHARE, pool_slots
    from octavo.lab.simulate import simulate
    from octavo.lab.step_time import of
    from octavo.lab.sweeps import block_sizes, savings

    slots, step_time = pool_slots(gpu, model, count), of(gpu, model, count)
    _require_some_fit(work, model.max_model_len)
    common: dict[str, Any] = {
        "pool_slots": slots,
        "max_model_len": model.max_model_len,
        "step_time": step_time,
        "token_bytes": model.token_bytes,
        "seed": plan.seed,
    }

    def run(name: str, rate: float, at: float, told: Callable[[int, int], None] | None = None) -> Run:
        return simulate(work, name, rate=rate, map_time=at, progress=told, **common)

    loads = [(name, rate) for name in plan.strategies for rate in _rates(name, plan)]
    runs = _runs(work, loads, lambda name, rate, told: run(name, rate, _map_time(work, rate), told), progress)
    progress(f"{work.name}: memory maps", 1.0)
    runs = _mapped(runs, lambda name, rate, at: run(name, rate, at))
    sweeps: list[Sweep] = []
    if plan.sweeps and "paged" in plan.strategies:
        progress(f"{work.name}: block sizes", 1.0)
        sweeps.append(block_sizes(work, **common))
        progress(f"{work.name}: sharing", 1.0)
        sweeps += [savings(samples=SAMPLES, seed=plan.seed), savings(beams=BEAMS, seed=plan.seed)]
    return Result(
        kind="simulated",
        octavo=__version__,
        commit=commit(),
        machine={
            "name": f"{count} × {gpu.label}" if count > 1 else gpu.label,
            "source": gpu.source,
            "memory": gpu.memory * count,
            "usable": MEMORY_SHARE,
        },
        model={
            "name": model.label,
            "weight_bytes": model.weight_bytes,
            "token_bytes": model.token_bytes,
            "max_model_len": model.max_model_len,
        },
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

    _require_some_fit(work, max_model_len)
    engine = llm.engine
    at = _expected_moment(work, plan, slots, max_model_len)

    def run(strategy: str, rate: float, told: Callable[[int, int], None] | None = None, work: Work = work) -> Run:
        return execute(
            work, strategy, engine=engine, pool_slots=slots, max_model_len=max_model_len, seed=plan.seed, rate=rate,
            map_time=_map_time(work, rate) if at is None else at, progress=told,
        )  # fmt: skip

    progress(f"{work.name}: warming up", 0.0)
    run(plan.strategies[0], FASTEST, work=_shortest(work))  # or the first strategy alone would pay for cold memory
    runs = _medians(_runs(work, _turns(plan), run, progress), plan)
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


def _require_some_fit(work: Work, longest: int) -> None:
    if not any(a.prompt_tokens + a.output_tokens <= longest for a in work.arrivals):
        raise RequestError(
            f"All {len(work.arrivals):,} requests of {work.name} are longer than the {longest:,} tokens of the longest "
            "sequence; a model of a longer context would work, or --context for octavo lab run."
        )


def _runs(
    work: Work,
    loads: Sequence[tuple[str, float]],
    run: Callable[[str, float, Callable[[int, int], None]], Run],
    progress: Progress,
) -> list[Run]:
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


def _turns(plan: Plan) -> list[tuple[str, float]]:
    """Strategy and load of every run by the real clock: strategies in turns, so that what else the machine does in a
    while slows all of them; the highest load, which is compared, in rounds.
    """
    rates = sorted(plan.rates)
    turns = [(name, rate) for rate in rates for name in plan.strategies if rate in _rates(name, plan)]
    keeping = [(name, rates[-1]) for name in plan.strategies if not strategies.ALL[name].resubmits]
    return turns + (plan.rounds - 1) * keeping


def _medians(runs: Sequence[Run], plan: Plan) -> list[Run]:
    """One run of each strategy and load, in the plan's order: of several that of the median throughput."""
    made: list[Run] = []
    for name in plan.strategies:
        for rate in sorted(_rates(name, plan)):
            same = [run for run in runs if (run.strategy, run.rate) == (name, rate)]
            median = sorted(same, key=lambda run: run.summary.throughput)[(len(same) - 1) // 2]
            if len(same) > 1:
                median.repeats = [run.summary.throughput for run in same]
            made.append(median)
    return made


def _shortest(work: Work) -> Work:
    """The work's shortest request alone."""
    shortest = min(work.arrivals, key=lambda arrival: arrival.prompt_tokens + arrival.output_tokens)
    return Work(work.name, work.source, (replace(shortest, at=0.0),))


def _map_time(work: Work, rate: float) -> float:
    return _MAP_AT * work.arrivals[-1].at / rate if work.arrivals else 0.0


def _mapped(runs: list[Run], again: Callable[[str, float, float], Run]) -> list[Run]:
    """The runs, those of the highest load with their maps drawn at the moment that shows them best.

    `again(strategy, rate, map time)` runs one once more: the moment is known only when all strategies have run.
    """
    rate = max((run.rate for run in runs), default=0.0)
    mapped = [run.rate == rate and not strategies.ALL[run.strategy].resubmits for run in runs]
    at = typical_moment([run for run, wanted in zip(runs, mapped, strict=True) if wanted])
    if at is None:
        return runs
    return [again(run.strategy, rate, at) if wanted else run for run, wanted in zip(runs, mapped, strict=True)]


def _expected_moment(work: Work, plan: Plan, slots: int, max_model_len: int) -> float | None:
    """The moment for maps of an execution, which is too long to be run twice: from a simulation with measured steps."""
    from octavo.lab.simulate import simulate
    from octavo.lab.step_time import SMOLLM2

    keeping = [name for name in plan.strategies if not strategies.ALL[name].resubmits]
    return typical_moment([
        simulate(
            work, name, rate=max(plan.rates), pool_slots=slots, max_model_len=max_model_len, step_time=SMOLLM2,
            token_bytes=1, seed=plan.seed,
        )
        for name in keeping
    ])  # fmt: skip


def typical_moment(runs: Sequence[Run]) -> float | None:
    """When all of these runs hold and store most nearly what each does on average while requests wait.

    Seconds after the first arrival; None where there is nothing to choose from.
    """
    series = [run.series for run in runs if run.series.time]
    if not series:
        return None
    means = [_while_waiting(one) for one in series]

    def off(moment: float) -> float:
        apart = 0.0
        for one, (held, stored) in zip(series, means, strict=True):
            at = min(bisect_left(one.time, moment), len(one.time) - 1)
            apart += abs(_held(one, at) - held) + abs(one.stored[at] - stored)
        return apart

    end = min(one.time[-1] for one in series)
    moments = sorted({moment for one in series for moment in one.time if moment <= end})
    return min(moments, key=off)


def _while_waiting(series: Series) -> tuple[float, float]:
    """Slots held and stored on average while requests wait; while any is in flight, where none ever waits."""
    places = [place for place, count in enumerate(series.waiting) if count]
    places = places or [place for place, count in enumerate(series.in_flight) if count] or [0]
    held, stored = (sum(values) / len(places) for values in (
        [_held(series, place) for place in places], [series.stored[place] for place in places],
    ))  # fmt: skip
    return held, stored


def _held(series: Series, place: int) -> int:
    return series.stored[place] + series.internal[place] + series.reserved[place]


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
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)  # not a repository that we are installed in
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

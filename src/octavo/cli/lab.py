"""`octavo lab`: strategies side by side, simulated or for real, and the report. Knows options and files; measures
nothing and draws nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import DEFAULT_MODEL, grouped, with_default
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.lab.results import Result
    from octavo.lab.study import Plan, Progress
    from octavo.lab.work import Work

_OUT = Path("octavo-lab")
_REQUESTS = 100  # simulated: enough to fill the memory of one GPU many times
_SCENARIOS = ("poisson", "shared-prompt", "samples")  # which tell the story in a minute
_RUN_STRATEGIES = ("max", "own", "paged")  # the worst, what any server could do, and ours; all take twice as long
_RUN_REQUESTS = 40  # as many as a few cores answer in minutes; pages just cannot hold them all at once

# Written out, as help is to come without loading the lab; a test compares them with what there is.
_STRATEGIES = (
    "none (No cache), max (Contiguous, the model's longest), own (Contiguous, the request's limit), pow2 (Contiguous, "
    "a power of two), oracle (Contiguous, the true length), doubling (Contiguous, doubling), chunks (Fixed chunks), "
    "paged (Paged)"
)
_GPUS = "l4, a10, rtx-4090, a100-40g, a100-80g, h100-80g, cpu"
_MODELS = "llama-2-7b, llama-3.1-8b, opt-13b, llama-3.1-70b, smollm2"
_WORKS = "poisson, shared-prompt, samples, beams, chat, code, questions"

Trace = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace",
        exists=True,
        dir_okay=False,
        help="Arrivals and lengths of real requests: an Azure CSV, a Mooncake JSONL, or any file with their columns. "
        "May be given more than once.",
        show_default=False,
    ),
]
Scenario = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        help=with_default(
            f"One of the lab's own works (repeatable): {_WORKS}.",
            "the first three, if there is no --trace",
        ),
        show_default=False,
    ),
]
OneScenario = Annotated[
    str, typer.Option("--scenario", help=f"One of the lab's own works, where there is no --trace: {_WORKS}.")
]
OneTrace = Annotated[
    Path | None,
    typer.Option(
        "--trace", exists=True, dir_okay=False, help="Arrivals and lengths of real requests.", show_default=False
    ),
]
Chosen = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        help=with_default(f"A strategy (repeatable): {_STRATEGIES}.", "all; none for the first work only"),
        show_default=False,
    ),
]
Executed = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        help=with_default(f"A strategy (repeatable): {_STRATEGIES}.", "max, own and paged"),
        show_default=False,
    ),
]
Rates = Annotated[str, typer.Option("--rates", help="Loads: how many times as fast as they did the requests come.")]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, help="Runs of each strategy at the highest load, in turns: the median counts.")
]
Requests = Annotated[int, typer.Option("--requests", min=1, help="Requests of a work at most, the first ones.")]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="Same seed, same work; same simulation, byte for byte.")
]
Out = Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for results, report and figures.")]
Gpu = Annotated[str, typer.Option("--gpu", help=f"The GPU whose memory and speed are simulated: {_GPUS}.")]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="How many of them share the model.")]
SimulatedModel = Annotated[
    str, typer.Option("--model", help=f"The model whose weights and keys and values fill it: {_MODELS}.")
]
RunModel = Annotated[str, typer.Option("--model", "-m", help="The model that is run, as for the other commands.")]
Slots = Annotated[int, typer.Option("--slots", min=64, help="Tokens whose keys and values the memory holds.")]
Context = Annotated[int, typer.Option("--context", min=16, help="Tokens of the longest sequence that is allowed.")]
Results = Annotated[
    list[Path], typer.Argument(metavar="RESULT.json...", exists=True, dir_okay=False, help="What lab runs have left.")
]
Report = Annotated[
    Path, typer.Option("--output", "-o", dir_okay=False, help="The report; its figures go beside it, named after it.")
]


def simulate(
    trace: Trace = None,
    scenario: Scenario = None,
    gpu: Gpu = "rtx-4090",
    gpus: Gpus = 1,
    model: SimulatedModel = "llama-2-7b",
    strategy: Chosen = None,
    rates: Rates = "0.25,0.5,1,2",
    requests: Requests = _REQUESTS,
    seed: Seed = 0,
    out: Out = _OUT,
) -> None:
    """Simulate every strategy at the scale of a named GPU and model, and report.

    The scheduler and the memory are Octavo's own, run for real; only the time of a step is computed, from the GPU's
    data sheet. The folder gets one JSON for each work, report.html, which needs nothing but itself, and PNG figures.

    [bold]Examples[/bold]

      octavo lab simulate

      octavo lab simulate --trace azure.csv --strategy max --strategy paged --rates 1,2

      octavo lab simulate --trace mooncake.jsonl --gpu h100-80g --gpus 8 --model llama-3.1-70b
    """
    from octavo.lab import figures, hardware, strategies, study

    figures.require_matplotlib()  # said now, not after a minute's work
    names = [] if trace and not scenario else dict.fromkeys(scenario or _SCENARIOS)
    works = _traces(list(dict.fromkeys(trace or [])), requests)
    works += [study.first(_scenario(name, seed), requests) for name in names]
    chosen_gpu, chosen_model = hardware.gpu(gpu), hardware.model(model)
    first = _plan(strategy or list(strategies.ALL), rates, seed)
    further = replace(_plan(strategy or _keeping(), rates, seed), sweeps=False)  # they are the same for all works

    def made(place: int, progress: Progress) -> Result:
        plan = further if place else first
        return study.simulated(works[place], plan, chosen_gpu, chosen_model, gpus, progress)

    _study(works, made, out)


def run(
    trace: OneTrace = None,
    scenario: OneScenario = "questions",
    model: RunModel = DEFAULT_MODEL,
    slots: Slots = 4096,
    context: Context = 2048,
    strategy: Executed = None,
    rates: Rates = "2,8,1000",
    rounds: Rounds = 3,
    requests: Requests = _RUN_REQUESTS,
    seed: Seed = 0,
    out: Out = _OUT,
) -> None:
    """Run strategies on the real engine of this machine, by the real clock, and report.

    All strategies get the same requests and the same memory, and compute with the same kernels; what differs is where
    keys and values are put. Without options: 40 short questions, coming at 2 and at 8 a second and all at once, in
    memory for two of the longest sequences. That takes some three minutes on two cores with nothing else to do.

    [bold]Examples[/bold]

      octavo lab run

      octavo lab run --strategy max --strategy paged --rates 1000 --rounds 5

      octavo lab run --trace azure.csv --requests 12 --rates 1,4 --strategy max --strategy paged
    """
    from octavo.lab import figures, study
    from octavo.llm import LLM

    figures.require_matplotlib()
    work = study.first(_scenario(scenario, seed), requests) if trace is None else _traces([trace], requests)[0]
    plan = replace(_plan(strategy or list(_RUN_STRATEGIES), rates, seed), rounds=rounds)
    llm = LLM(model, num_blocks=max(1, slots // 16), max_model_len=context, prefix_caching=False)

    def made(place: int, progress: Progress) -> Result:
        return study.executed(work, plan, llm, model, slots, context, progress)

    _study([work], made, out)


def report(results: Results, output: Report = Path("report.html")) -> None:
    """Make the report of results that are there: one HTML file that needs nothing else, and PNG figures beside it.

    [bold]Example[/bold]

      octavo lab report octavo-lab/*.json -o report.html
    """
    from octavo.lab.results import load

    _write_report([load(path) for path in results], output)


def _keeping() -> list[str]:
    """The strategies that keep keys and values: no cache takes as long as all of them together."""
    from octavo.lab.strategies import ALL

    return [name for name, strategy in ALL.items() if not strategy.resubmits]


def _plan(chosen: list[str], rates: str, seed: int) -> Plan:
    from octavo.lab import study

    try:
        numbers = tuple(sorted({float(rate) for rate in rates.split(",")}))
    except ValueError:
        raise RequestError(f"--rates is {rates!r}; it must be numbers with commas between them: 0.5,1,2.") from None
    return study.Plan(strategies=tuple(dict.fromkeys(chosen)), rates=numbers, seed=seed)


def _scenario(name: str, seed: int) -> Work:
    from octavo.lab.scenarios import ALL

    if name not in ALL:
        raise RequestError(f"There is no scenario {name!r}; there are {', '.join(ALL)}.")
    return ALL[name](seed)


def _traces(paths: list[Path], requests: int) -> list[Work]:
    from octavo.lab import traces

    return [traces.read(path, limit=requests) for path in paths]


def _study(works: list[Work], made: Any, out: Path) -> None:
    """Make each work's result, write it at once, and report on all."""
    from octavo.lab.report import file_names
    from octavo.lab.results import save

    results: list[Result] = []
    with _folder(out), _bar(len(works)) as tell:
        for place, work in enumerate(works):
            began = monotonic()
            result = made(place, lambda words, share, place=place: tell(words, place + share))
            results.append(result)
            save(result, out / f"{file_names(results)[-1]}.json")
            if not sys.stderr.isatty():
                runs = "1 run" if len(result.runs) == 1 else f"{len(result.runs)} runs"
                words = f"{work.name}: {len(work.arrivals):,} requests, {runs} in {monotonic() - began:,.0f} s"
                typer.echo(words, err=True)
    _write_report(results, out / "report.html")
    own = {f"{name}.json" for name in file_names(results)}
    if older := sorted(path.name for path in out.glob("*.json") if path.name not in own):
        typer.echo(f"Not in the report, as it was there before: {', '.join(older)}. octavo lab report takes any.")


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """The folder, made before a long run and not after it; gone again if nothing came of it."""
    new = [path for path in (out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # something is in it
            for path in new:
                path.rmdir()
        raise


def _write_report(results: list[Result], path: Path) -> None:
    from octavo.lab import report as made

    with _bar(1) as tell:
        files = made.write(results, path, lambda done, total: tell("drawing", done / total))
    typer.echo(f"{path}: {len(results)} result{'s' if len(results) > 1 else ''}; {len(files) - 1} figures beside it.")


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A progress bar on a terminal; yields what it is told with: words, and how much of `total` is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=total)
        yield lambda words, done: progress.update(bar, description=words, completed=done)


lab = typer.Typer(rich_markup_mode="rich", no_args_is_help=True)
for command in (run, simulate, report):
    lab.command()(grouped(command))


@lab.callback()
def about() -> None:
    """Put every way to allocate KV memory side by side, on the same requests and the same memory.

    [bold]Example[/bold]

      octavo lab simulate
    """

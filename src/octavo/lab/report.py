"""The lab's report: results as one HTML file that needs nothing else, and its figures as PNG beside it.

Knows results, figures and claims; not where results come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any, TypeGuard

from octavo.lab import claims, figures
from octavo.lab.results import Result, Run


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure on the page."""

    figure: figures.Figure
    panels: list[tuple[str, str]]  # title and SVG of each


@dataclass(frozen=True, slots=True)
class Table:
    """A line for each strategy, its name first."""

    title: str
    columns: list[str]
    lines: list[list[str]]


@dataclass(frozen=True, slots=True)
class Chapter:
    """One result on the page."""

    anchor: str
    title: str
    facts: list[tuple[str, str]]
    tables: list[Table]
    drawn: list[Drawn]
    rate: float
    notes: list[str]  # on what the tables' columns mean


def write(results: Sequence[Result], path: Path, progress: Callable[[int, int], None] | None = None) -> list[Path]:
    """Write the report and its figures beside it, named after it; `progress` is told figures done and all.

    Returns the files written, the report first. Raises RequestError if matplotlib is missing, OSError as files do.
    """
    figures.require_matplotlib()
    path.parent.mkdir(parents=True, exist_ok=True)
    planned = [(result, figures.all_figures(result)) for result in results]
    total, done = sum(len(made) for _, made in planned), 0
    chapters, written, names_of = [], [path], file_names(results)
    for place, (result, made) in enumerate(planned):
        drawn = []
        for figure in made:
            names = [panel.title for panel in figure.panels]
            svgs = figures.svgs(figure, f"r{place}-{figure.name}-")
            drawn.append(Drawn(figure, list(zip(names, svgs, strict=True))))
            picture = path.with_name(f"{path.stem}-{names_of[place]}-{figure.name}.png")
            picture.write_bytes(figures.png(figure))
            written.append(picture)
            done += 1
            if progress is not None:
                progress(done, total)
        chapters.append(_chapter(place, result, drawn))
    path.write_text(_page(chapters, results), encoding="utf-8")
    return written


def file_names(results: Sequence[Result]) -> list[str]:
    """A name for each result's files, without an ending: of its work and kind, all different, none too long."""
    names: list[str] = []
    for result in results:
        work = "".join(letter if letter.isalnum() else "-" for letter in str(result.work.get("name", "")).lower())
        name = f"{work.encode()[:100].decode(errors='ignore').strip('-') or 'work'}-{result.kind}"
        used = sum(other == name or other.startswith(f"{name}-") for other in names)
        names.append(f"{name}-{used + 1}" if used else name)
    return names


def _page(chapters: Sequence[Chapter], results: Sequence[Result]) -> str:
    import jinja2

    rows = claims.rows(results)
    template = resources.files("octavo.lab").joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    measured = [row for row in rows if row.verdict != "not measured"]
    grouped = [list(same) for _, same in groupby(measured, key=lambda row: row.claim)]
    return environment.from_string(template).render(
        chapters=chapters,
        claims=grouped,
        unmeasured=_unmeasured(rows),
        rule=claims.RULE,
        circumstances=[
            (chapter.title, words) for chapter, words in zip(chapters, claims.circumstances(results), strict=True)
        ],
        colours=_colours(),
    )


def _unmeasured(rows: Sequence[claims.Row]) -> tuple[list[str], list[str]]:
    """The claims that no result says anything about, and commands whose results would."""
    missing = [row for row in rows if row.verdict == "not measured"]
    commands = []
    for command in sorted({row.command for row in missing}):
        needed = sorted({name for row in missing if row.command == command for name in row.needs})
        commands.append(" ".join([f"octavo lab {command}", *(f"--strategy {name}" for name in needed)]))
    return [row.claim for row in missing], commands


def _colours() -> str:
    """The colours of both themes; paper is always light."""
    light, dark = (
        "; ".join(f"--{name}: {colour}" for name, colour in figures.palette(theme).items())
        for theme in ("light", "dark")
    )
    return (
        f":root {{ {light} }}\n"
        f'@media screen {{ :root[data-theme="dark"] {{ {dark} }} }}\n'
        f'@media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}'
    )


# A result in words.


def _chapter(place: int, result: Result, drawn: list[Drawn]) -> Chapter:
    rate = figures.top_rate(result)
    runs = [run for run in result.runs if run.rate == rate]
    tables = [table for title, columns in _TABLES if len((table := _table(title, columns, runs)).columns) > 1]
    there = {name for table in tables for name in table.columns}
    return Chapter(
        anchor=f"result-{place + 1}",
        title=f"{result.work.get('name', 'A work without a name')}, {result.kind}",
        facts=_facts(result),
        tables=tables,
        drawn=drawn,
        rate=rate,
        notes=[note for name, note in _NOTES if name in there],
    )


def _table(title: str, columns: Columns, runs: Sequence[Run]) -> Table:
    """Without the columns in which every strategy has nothing."""
    shown = [(name, show) for name, show in columns if any(show(run) not in ("0", "") for run in runs)]
    lines = [[run.label, *(show(run) or "none" for _, show in shown)] for run in runs]
    return Table(title, ["strategy", *(name for name, _ in shown)], lines)


def _facts(result: Result) -> list[tuple[str, str]]:
    facts = [
        ("how", f"{result.kind} by Octavo {result.octavo}, commit {result.commit or 'unknown'}, seed {result.seed}"),
        ("work", _work(result.work)),
        ("model", _model(result.model)),
        ("machine", _machine(result.machine)),
        ("KV memory", _pool(result)),
        ("repeated", _repeated(result)),
        *_step_time(result.step_time),
    ]
    return [(name, words) for name, words in facts if words]


def _repeated(result: Result) -> str:
    times = max((len(run.repeats) for run in result.runs), default=0)
    return f"at the highest load, {times} times in turns: shown is the run of the median throughput" if times else ""


def _work(work: dict[str, Any]) -> str:
    made = [str(work.get("source") or "source unknown")]
    for name, unit in (
        ("requests", "requests"), ("prompt_tokens", "prompt tokens"), ("output_tokens", "answer tokens"),
    ):  # fmt: skip
        if _is_number(work.get(name)):
            made.append(f"{work[name]:,} {unit}")
    if _is_number(work.get("seconds")):
        made.append(f"coming over {work['seconds']:,.1f} s at 1×")
    return "; ".join([made[0], ", ".join(made[1:])]).rstrip("; ")


def _model(model: dict[str, Any]) -> str:
    made = [str(model.get("name", "unnamed"))]
    if _is_number(model.get("weight_bytes")):
        made.append(f"{size(model['weight_bytes'])} of weights")
    if _is_number(model.get("token_bytes")):
        made.append(f"{size(model['token_bytes'])} of keys and values for each token")
    if _is_number(model.get("max_model_len")):
        made.append(f"sequences of at most {model['max_model_len']:,} tokens")
    return ", ".join(made)


def _machine(machine: dict[str, Any]) -> str:
    name = str(machine.get("name") or machine.get("gpu") or machine.get("processor") or "unnamed")
    made = [name]
    if _is_number(machine.get("cores")):
        made.append(f"{machine['cores']} cores for this process")
    if _is_number(machine.get("memory")):
        made.append(f"{size(machine['memory'])} of memory")
    if _is_number(machine.get("usable")):
        made.append(f"{machine['usable']:.0%} of it for weights, keys and values".replace("%", " %"))
    made += [str(machine[key]) for key in ("system", "source") if machine.get(key)]
    return ", ".join(made)


def _pool(result: Result) -> str:
    pool, token = f"{result.pool_slots:,} token slots", result.model.get("token_bytes")
    if not _is_number(token):
        return pool
    pool += f" of {size(token)}: {result.pool_slots * token / 2**30:,.2f} GiB"
    memory, usable = result.machine.get("memory"), result.machine.get("usable")
    weights = result.model.get("weight_bytes")
    if not (_is_number(memory) and _is_number(usable) and _is_number(weights)):
        return pool
    left = memory * usable - weights
    return (
        f"{memory / 2**30:,.1f} GiB × {usable:g} = {memory * usable / 2**30:,.1f} GiB, less {weights / 2**30:,.1f} GiB "
        f"of weights, is {left / 2**30:,.2f} GiB; {pool}"
    )


def _step_time(model: dict[str, Any]) -> list[tuple[str, str]]:
    """The model of a step's time in lines."""
    if not model:
        return [("time of a step", "measured, not modelled")]
    figures = []
    if _is_number(model.get("gpus")):
        figures.append(f"{model['gpus']} GPU{'s' if model['gpus'] != 1 else ''}")
    for name, scale, unit in (("bandwidth", 1e9, "GB/s"), ("flops", 1e12, "TFLOP/s"), ("overhead", 1e-3, "ms a step")):
        if _is_number(model.get(name)):
            figures.append(
                f"{model[name] / scale:,.4g} {unit}" if scale < 1e9 else f"{model[name] / scale:,.0f} {unit}"
            )
    prices, error = model.get("seconds"), model.get("error")
    if isinstance(prices, dict):
        figures += [f"{name.replace('_', ' ')} {_small(value)}" for name, value in prices.items() if _is_number(value)]
    if isinstance(error, dict) and _is_number(error.get("median")):
        figures.append(f"median error {100 * error['median']:.1f} %")
    return [
        ("time of a step", ": ".join(str(model[key]) for key in ("kind", "formula") if model.get(key))),
        ("its figures", ", ".join(figures)),
        ("assumed", str(model.get("assumed") or "")),
        ("its source", str(model.get("source") or "")),
    ]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _small(value: float) -> str:
    """A time of milliseconds to picoseconds."""
    for scale, unit in ((1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-12:.3g} ps"


def seconds(value: float | None) -> str:
    """A time for people, in the unit that suits it."""
    if value is None:
        return "—"
    if value >= 1:
        return f"{value:,.1f} s"
    return f"{1000 * value:,.0f} ms" if value >= 0.1 else f"{1000 * value:,.1f} ms"


def size(count: float) -> str:
    """Bytes for people."""
    if not count:
        return "0"
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    whole = unit == "B" or value == int(value) or value >= (100 if unit in ("GiB", "TiB") else 10)
    return f"{value:,.0f} {unit}" if whole else f"{value:,.1f} {unit}"


Columns = tuple[tuple[str, Callable[[Run], str]], ...]

_FIRST: Columns = (
    ("rejected", lambda run: claims.refused(run).removeprefix("rejected ")),
    ("utilised", lambda run: f"{100 * run.summary.utilisation:.1f} %"),
    ("in flight, mean / most", lambda run: f"{run.summary.in_flight_mean:,.1f} / {run.summary.in_flight_max:,}"),
    ("tokens/s", lambda run: f"{run.summary.throughput:,.1f}"),
    ("first token, p50", lambda run: seconds(run.summary.ttft.p50)),
    ("preempted", lambda run: f"{run.summary.preemptions:,}"),
)
_SECOND: Columns = (
    ("fit at once", lambda run: f"{run.summary.fit_at_once:,}"),
    ("first token, p99", lambda run: seconds(run.summary.ttft.p99)),
    ("per token, p50", lambda run: seconds(run.summary.tpot.p50)),
    ("per token, p90", lambda run: seconds(run.summary.tpot.p90)),
    ("per token, p99", lambda run: seconds(run.summary.tpot.p99)),
    ("answers a step", lambda run: f"{run.summary.decode_batch:,.1f}" if run.summary.decode_steps else ""),
    ("time on prompts", lambda run: _on_prompts(run)),
    ("failed by holes", lambda run: f"{run.summary.fragmented_failures:,}"),
    ("copied", lambda run: size(run.summary.copied_bytes)),
    ("recomputed, tokens", lambda run: f"{run.summary.recomputed_tokens:,}"),
    ("found cached, tokens", lambda run: f"{run.summary.cached_tokens:,}"),
)


def _on_prompts(run: Run) -> str:
    """ "" for a run whose file does not tell."""
    busy = run.summary.prompt_seconds + run.summary.decode_seconds
    return f"{100 * run.summary.prompt_seconds / busy:.0f} %" if busy else ""


_TABLES = (("", _FIRST), ("The rest of its figures", _SECOND))
_NOTES = (
    ("rejected", "Rejected: requests that could never fit, of all; what is beside it is about the others only."),
    ("utilised", "Utilised: tokens stored ÷ slots held, over the time that requests were in flight."),
    ("fit at once", "Fit at once: requests in flight when first one had to wait for memory; all, if none had to."),
    ("answers a step", "Answers a step: sequences that wrote in a step without prompts, on average."),
    ("time on prompts", "Time on prompts: share of the steps' time in those that computed prompts, also or only."),
    ("failed by holes", "Failed by holes: admissions and growths that failed though enough was free in total."),
)

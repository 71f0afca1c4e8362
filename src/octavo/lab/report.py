"""The lab's report: results as one HTML file that needs nothing else, and its figures as PNG beside it.

Knows results, figures and claims; not where results come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from octavo.lab import claims, figures
from octavo.lab.results import Result, Run


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure on the page."""

    figure: figures.Figure
    panels: list[tuple[str, str]]  # title and SVG of each


@dataclass(frozen=True, slots=True)
class Chapter:
    """One result on the page."""

    anchor: str
    title: str
    facts: list[tuple[str, str]]
    columns: list[str]
    table: list[list[str]]  # a line for each strategy
    drawn: list[Drawn]
    rate: float


def write(results: Sequence[Result], path: Path, progress: Callable[[int, int], None] | None = None) -> list[Path]:
    """Write the report and its figures beside it, named after it; `progress` is told figures done and all.

    Returns the files written, the report first. Raises RequestError if matplotlib is missing, OSError as files do.
    """
    figures.require_matplotlib()
    path.parent.mkdir(parents=True, exist_ok=True)
    planned = [(result, figures.all_figures(result)) for result in results]
    total, done = sum(len(made) for _, made in planned), 0
    chapters, written = [], [path]
    for place, (result, made) in enumerate(planned):
        drawn = []
        for figure in made:
            names = [panel.title for panel in figure.panels]
            svgs = figures.svgs(figure, f"r{place}-{figure.name}-")
            drawn.append(Drawn(figure, list(zip(names, svgs, strict=True))))
            picture = path.with_name(f"{path.stem}-{_file_name(result)}-{figure.name}.png")
            picture.write_bytes(figures.png(figure))
            written.append(picture)
            done += 1
            if progress is not None:
                progress(done, total)
        chapters.append(_chapter(place, result, drawn))
    path.write_text(_page(chapters, claims.rows(results)), encoding="utf-8")
    return written


def _file_name(result: Result) -> str:
    name = f"{result.work.get('name', 'work')}-{result.kind}"
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")


def _page(chapters: Sequence[Chapter], rows: Sequence[claims.Row]) -> str:
    import jinja2

    template = resources.files("octavo.lab").joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    grouped = [list(same) for _, same in groupby(rows, key=lambda row: row.claim)]
    return environment.from_string(template).render(chapters=chapters, claims=grouped, colours=_colours())


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
    columns = [(title, show) for title, show in _COLUMNS if any(show(run) != "0" for run in runs)]
    if not any(run.summary.rejected for run in runs):
        columns = [(title, show) for title, show in columns if title != "finished"]  # all of them
    return Chapter(
        anchor=f"result-{place + 1}",
        title=f"{result.work.get('name', 'A work without a name')}, {result.kind}",
        facts=_facts(result),
        columns=[title for title, _ in columns],
        table=[[run.label, *(show(run) for _, show in columns)] for run in runs],
        drawn=drawn,
        rate=rate,
    )


def _facts(result: Result) -> list[tuple[str, str]]:
    token_bytes = result.model.get("token_bytes")
    pool = f"{result.pool_slots:,} token slots"
    if token_bytes:
        pool += f" of {token_bytes:,} bytes: {result.pool_slots * token_bytes / 2**30:,.2f} GiB"
    work = {name: value for name, value in result.work.items() if name not in ("name", "source")}
    return [
        ("how", f"{result.kind} by Octavo {result.octavo}, commit {result.commit or 'unknown'}, seed {result.seed}"),
        ("work", f"{result.work.get('source', 'source unknown')}; {_listed(work)}"),
        ("model", _listed(result.model)),
        ("machine", _listed(result.machine)),
        ("KV memory", pool),
        ("time of a step", _listed(result.step_time) or "measured, not modelled"),
    ]


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {_shown(value)}" for name, value in values.items() if value != "")


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return f"({_listed(value)})"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return str(value)


def seconds(value: float | None) -> str:
    """A time for people, in the unit that suits it."""
    if value is None:
        return "—"
    if value >= 1:
        return f"{value:,.1f} s"
    return f"{1000 * value:,.0f} ms" if value >= 0.1 else f"{1000 * value:,.1f} ms"


def size(count: int) -> str:
    """Bytes for people."""
    if not count:
        return "0"
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if value >= 10 or unit == "B" else f"{value:,.1f} {unit}"


_COLUMNS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("utilised", lambda run: f"{100 * run.summary.utilisation:.1f} %"),
    ("in flight, mean", lambda run: f"{run.summary.in_flight_mean:,.1f}"),
    ("most", lambda run: f"{run.summary.in_flight_max:,}"),
    ("fit at once", lambda run: f"{run.summary.fit_at_once:,}"),
    ("tokens/s", lambda run: f"{run.summary.throughput:,.1f}"),
    ("first token, p50", lambda run: seconds(run.summary.ttft.p50)),
    ("p99", lambda run: seconds(run.summary.ttft.p99)),
    ("per token, p50", lambda run: seconds(run.summary.tpot.p50)),
    ("p99 ", lambda run: seconds(run.summary.tpot.p99)),
    ("failed by holes", lambda run: f"{run.summary.fragmented_failures:,}"),
    ("copied", lambda run: size(run.summary.copied_bytes)),
    ("preempted", lambda run: f"{run.summary.preemptions:,}"),
    ("recomputed, tokens", lambda run: f"{run.summary.recomputed_tokens:,}"),
    ("found cached, tokens", lambda run: f"{run.summary.cached_tokens:,}"),
    ("finished", lambda run: f"{run.summary.finished:,}"),
    ("rejected", lambda run: f"{run.summary.rejected:,}"),
)

"""The lab's figures, drawn with matplotlib: as SVG for a page that has a light and a dark theme, and as PNG.

Reads runs and sweeps, and knows neither strategies nor files of results. The colours are those of the memory page,
read from its stylesheet: in an SVG they stay the stylesheet's variables, so that the page's theme sets them.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from octavo.lab.results import Result, Run, Sweep

# What slots hold, in the order in which figures stack them: the field's name, its colour on the memory page, its name.
STATES = (
    ("stored", "active", "stored: a token that somebody needs"),
    ("shared", "shared", "shared: stored once, needed by several"),
    ("internal", "bad", "internal waste: held, never to be used"),
    ("reserved", "prefill", "reserved: held for tokens to come"),
    ("external", "swapped", "external waste: free, in holes too small"),
    ("cached", "cached", "cached: free, kept in case it is asked for again"),
    ("free", "free", "free"),
)
_COLOUR = {name: colour for name, colour, _ in STATES}
_WORDS = {name: words for name, _, words in STATES}
_OVER_TIME = ("stored", "internal", "reserved", "external", "free")
_HELD = ("stored", "internal", "reserved")
_LINES = ("active", "bad", "prefill", "swapped", "ink", "shared", "cached", "soft")
_MARKERS = "osD^vP*X"
_WIDTH = 4.6  # inches of a panel; text of 9 points is then still read on a phone
_NARROW = 3.4  # of a panel among three in a row
_MAP_ROWS, _MAP_COLUMNS = 14, 1024  # a map finer than this is drawn in cells of several slots
_ROW = 0.86  # of a row of a map is drawn; the rest parts it from the next
_ON_YELLOW = "#211d18"  # text, in either theme: no variable has this colour
_PNG_DPI = 120
_MOMENTS = 200  # of a stack over time: more cannot be told apart
_NO_CACHE = "none"  # the strategy that keeps nothing between two steps
_SQUASHES = 3.0  # times what all others reach: its axes would show nothing else
_NAMED = 0.62  # inches at the right of a panel, for the names of its lines
_EDGE, _TITLE = 0.06, 0.28  # inches

Key = tuple[tuple[str, str], ...]  # colour and words of each entry of a legend


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes of a figure."""

    title: str
    draw: Callable[[Axes], None]
    height: float = 2.3  # inches
    width: float = _WIDTH
    bare: bool = False  # no ticks and labels, so no room for them either
    right: float = 0.15  # inches beside the axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Panels that are looked at together."""

    name: str  # of its file
    title: str
    caption: str  # what to see in it
    panels: tuple[Panel, ...]
    key: Key = ()
    columns: int = 2


def require_matplotlib() -> None:
    """Raise RequestError if there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise RequestError("Figures need matplotlib, which is not installed; pip install 'octavo[lab]' brings it.")


@cache
def palette(theme: str = "light") -> dict[str, str]:
    """The memory page's colours of a theme, "light" or "dark", by their names in its stylesheet."""
    css = resources.files("octavo.server").joinpath("static/page.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root(?:\[data-theme=\"dark\"\])? \{(.*?)\}", css, re.DOTALL)[:2]
    found = re.findall(r"--([a-z-]+): #([0-9a-f]+);", {"light": light, "dark": dark}[theme])
    return {
        name: "#" + (digits if len(digits) == 6 else "".join(2 * digit for digit in digits)) for name, digits in found
    }


# The figures.


def all_figures(result: Result) -> list[Figure]:
    """Every figure that the result holds something for, in the order in which a report shows them."""
    rate = top_rate(result)
    runs = [run for run in result.runs if run.rate == rate]
    made = [
        _maps(runs, result.pool_slots),
        _shares(runs),
        _waste(runs, result.pool_slots),
        _in_flight(runs),
        _latency(result),
        _throughput(result),
    ]
    if any(run.strategy == "paged" for run in result.runs):
        made += [_block_sizes(result.sweeps), _savings(result.sweeps)]
    return [figure for figure in made if figure.panels]


def top_rate(result: Result) -> float:
    """The highest load of a result, the one that memory is looked at under."""
    return max((run.rate for run in result.runs), default=1.0)


def _maps(runs: Sequence[Run], pool_slots: int) -> Figure:
    keeping = [run for run in runs if run.map and run.strategy != _NO_CACHE]
    there = {piece.kind for run in keeping for piece in run.map}
    return Figure(
        name="maps",
        title="The memory of each strategy at the same moment",
        caption=_map_caption(runs, keeping, pool_slots) if keeping else "",
        panels=tuple(
            Panel(title=_map_title(run), draw=_drawn_map(run, pool_slots), height=1.75, bare=True) for run in keeping
        ),
        key=_state_key([name for name, _, _ in STATES if name in there]),
    )


def _map_caption(runs: Sequence[Run], keeping: Sequence[Run], pool_slots: int) -> str:
    caption = (
        f"One moment, {keeping[0].map_time:,.1f} s after the first arrival; averages over the whole run are beside it. "
        f"{pool_slots:,} token slots, read like a page: each row goes on where the one above it ends. A light line "
        "parts what belongs to different requests."
    )
    if len(keeping) < len(runs) and any(run.strategy == _NO_CACHE for run in runs):
        caption += " No cache has no map: it keeps nothing from one step to the next."
    return caption


def _drawn_map(run: Run, pool_slots: int) -> Callable[[Axes], None]:
    def draw(ax: Axes) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        columns = -(-pool_slots // _MAP_ROWS)
        grain = max(1, columns // _MAP_COLUMNS)
        by_kind: dict[str, list[tuple[float, float]]] = {}
        for kind, begin, end in _cells(run, grain):
            for corner in _wrapped(begin, end, columns):
                by_kind.setdefault(kind, []).extend(corner)
        ax.set_facecolor(palette()["free"])
        for kind, corners in by_kind.items():
            codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(corners) // 5)
            ax.add_patch(PathPatch(Path(corners, codes), facecolor=palette()[_COLOUR[kind]], linewidth=0))
        edges = _edges(run)
        if len(edges) <= 400:
            rows = [divmod(edge, columns) for edge in edges]
            ax.vlines([x for _, x in rows], [y for y, _ in rows], [y + _ROW for y, _ in rows],
                      colors=palette()["leaf"], linewidth=1.1)  # fmt: skip
        ax.set(xlim=(0, columns), ylim=(_MAP_ROWS, -0.14), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.set_facecolor("none")

    return draw


def _cells(run: Run, grain: int) -> list[tuple[str, int, int]]:
    """The map as (kind, first slot, slot behind the last), neighbours of a kind as one; ends rounded to `grain`."""
    cells: list[tuple[str, int, int]] = []
    at = 0
    for piece in run.map:
        begin, end = (round(edge / grain) * grain for edge in (at, at + piece.slots))
        at += piece.slots
        if begin == end:
            continue
        if cells and cells[-1][0] == piece.kind:
            cells[-1] = (piece.kind, cells[-1][1], end)
        else:
            cells.append((piece.kind, begin, end))
    return cells


def _wrapped(begin: int, end: int, columns: int) -> list[list[tuple[float, float]]]:
    """The corners of a run of slots that is broken into rows, five to a rectangle."""
    corners: list[list[tuple[float, float]]] = []
    while begin < end:
        row, x = divmod(begin, columns)
        stop = min(end, (row + 1) * columns)
        right = x + stop - begin
        corners.append([(x, row), (right, row), (right, row + _ROW), (x, row + _ROW), (x, row)])
        begin = stop
    return corners


def _edges(run: Run) -> list[int]:
    """Where one request's slots end and another's begin."""
    edges, at, before = [], 0, None
    for piece in run.map:
        if piece.owner >= 0 and before is not None and before >= 0 and piece.owner != before:
            edges.append(at)
        before = piece.owner
        at += piece.slots
    return edges


def _shares(runs: Sequence[Run]) -> Figure:
    kinds = ("stored", "reserved", "internal", "external")

    def draw(ax: Axes) -> None:
        for place, run in enumerate(runs):
            held = [getattr(run.summary, kind) for kind in kinds]
            left, whole = 0.0, sum(held) or 1.0
            ax.text(0, place - 0.34, f"{run.label}: {_percent(run.summary.utilisation)} of what is held", va="bottom")
            for kind, share in zip(kinds, held, strict=True):
                part = 100 * share / whole
                ax.barh(place, part, left=left, height=0.56, color=palette()[_COLOUR[kind]])
                if part >= 9:
                    on = _ON_YELLOW if kind == "reserved" else palette()["on-state"]
                    ax.text(left + part / 2, place, f"{part:.1f} %", ha="center", va="center_baseline", color=on)
                left += part
        ax.set(xlim=(0, 100), ylim=(len(runs) - 0.65, -0.75), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)

    return Figure(
        name="shares",
        title="Of the pool in use: held, and free but unusable",
        caption="Averaged over the time that requests were in flight. As in figure 2 of the PagedAttention paper, the "
        "whole bar is what is held and what is free in holes too small. Utilisation, beside the name, is what is "
        "stored of what is held, without those holes.",
        panels=(Panel(title="", draw=draw, height=0.5 * len(runs), bare=True),) if runs else (),
        key=_state_key(kinds),
        columns=1,
    )


def _waste(runs: Sequence[Run], pool_slots: int) -> Figure:
    end = _shown_until(runs)
    return Figure(
        name="waste",
        title="Where the memory went, over time",
        caption="Share of the pool. What is held and not stored is what kept others waiting, so that the same "
        "requests took longer." + _beyond(runs),
        panels=tuple(
            Panel(title=run.label, draw=_drawn_waste(run, pool_slots, end), height=1.9)
            for run in runs
            if run.series.time
        ),
        key=_state_key(_OVER_TIME),
    )


def _shown_until(runs: Sequence[Run]) -> float:
    """The last second that figures show: the end of all runs but those that take over three times the median."""
    ends = sorted(run.series.time[-1] for run in runs if run.series.time)
    return max([end for end in ends if end <= 3 * ends[(len(ends) - 1) // 2]] or [0.0]) or 1.0


def _beyond(runs: Sequence[Run]) -> str:
    end = _shown_until(runs)
    cut = [f"{run.label}: until {run.series.time[-1]:,.0f} s" for run in runs if run.series.time[-1:] > [end]]
    return f" Not shown to the end: {', '.join(cut)}." if cut else ""


def _drawn_waste(run: Run, pool_slots: int, end: float) -> Callable[[Axes], None]:
    def draw(ax: Axes) -> None:
        every = slice(None, None, -(-len(run.series.time) // _MOMENTS))
        held = _OVER_TIME[:-1]  # free is what is not covered
        layers = [[100 * slots / pool_slots for slots in getattr(run.series, kind)[every]] for kind in held]
        ax.set_facecolor(palette()["free"])
        ax.stackplot(run.series.time[every], layers, colors=[palette()[_COLOUR[kind]] for kind in held], linewidth=0)
        ax.set(xlim=(0, end), ylim=(0, 100), xlabel="seconds", ylabel="% of the pool")
        ax.grid(visible=False)

    return draw


def _in_flight(runs: Sequence[Run]) -> Figure:
    runs = [run for run in runs if run.series.time]
    looks = _looks(runs)

    def drawn(field: str, label: str) -> Callable[[Axes], None]:
        def draw(ax: Axes) -> None:
            for run in runs:
                colour, _ = looks[run.strategy, run.label]
                ax.plot(run.series.time, getattr(run.series, field), color=colour, linewidth=1.3)
            ax.set(xlabel="seconds", ylabel=label, ylim=(0, None))
            ax.set_xlim(0, _shown_until(runs))

        return draw

    panels = (
        Panel(title="In flight", draw=drawn("in_flight", "requests")),
        Panel(title="Waiting for memory", draw=drawn("waiting", "requests")),
    )
    return Figure(
        name="in-flight",
        title="Requests in flight, and requests that wait",
        caption="The same requests at the same times, in the same memory." + _beyond(runs),
        panels=panels if runs else (),
        key=_line_key(runs),
    )


def _latency(result: Result) -> Figure:
    runs, left_out = _without_squashing(result.runs)
    panels = []
    for measure, words, unit in (("ttft", "Time to first token", "s"), ("tpot", "Time per token", "ms")):
        for part in ("p50", "p90", "p99"):
            draw = _drawn_load(runs, _latency_of(measure, part, 1e3 if unit == "ms" else 1.0), log=True)
            panels.append(Panel(title=f"{words}, {part}, {unit}", draw=draw, height=2.1, width=_NARROW, right=_NAMED))
    return Figure(
        name="latency",
        title="Latency against load",
        caption="How long half, nine in ten and 99 in 100 requests waited for their first token, and for each token "
        "after it, by how many times as fast as in the work the requests come. Some scales are logarithmic." + left_out,
        panels=tuple(panels) if len({run.rate for run in runs}) > 1 else (),
        key=_line_key(runs),
        columns=3,
    )


def _without_squashing(runs: Sequence[Run]) -> tuple[list[Run], str]:
    """The runs without those of no cache, and a sentence that says so, where the others would be a line at 0."""
    others = [run for run in runs if run.strategy != _NO_CACHE]
    most = max((run.summary.ttft.p50 or 0.0 for run in others), default=0.0)
    slow = [run for run in runs if run.strategy == _NO_CACHE and (run.summary.ttft.p50 or 0.0) > _SQUASHES * most > 0]
    if not slow:
        return list(runs), ""
    waits = ", ".join(f"{run.summary.ttft.p50:,.0f} s at {run.rate:g}×" for run in slow)
    return others, f" No cache is left out, as nothing else could be seen beside it: p50 to first token {waits}."


def _latency_of(measure: str, part: str, scale: float) -> Callable[[Run], float | None]:
    def value(run: Run) -> float | None:
        found: float | None = getattr(getattr(run.summary, measure), part)
        return None if found is None else found * scale

    return value


def _throughput(result: Result) -> Figure:
    across = (
        ("Answer tokens a second", lambda run: run.summary.throughput),
        ("Requests in flight, on average", lambda run: run.summary.in_flight_mean),
    )
    panels = [Panel(title=title, draw=_drawn_load(result.runs, value), right=_NAMED) for title, value in across]
    return Figure(
        name="throughput",
        title="Throughput against load",
        caption="Where a line turns flat, its strategy has reached what this memory lets it do; while it rises, more "
        "load would give more.",
        panels=tuple(panels) if len({run.rate for run in result.runs}) > 1 else (),
        key=_line_key(result.runs),
    )


def _drawn_load(
    runs: Sequence[Run], value: Callable[[Run], float | None], *, log: bool = False
) -> Callable[[Axes], None]:
    looks = _looks(runs)

    def draw(ax: Axes) -> None:
        heights: list[float] = []
        ends: list[tuple[float, float, str, str]] = []
        for (strategy, label), (colour, marker) in looks.items():
            line = sorted((r for r in runs if (r.strategy, r.label) == (strategy, label)), key=lambda r: r.rate)
            points = [(run.rate, found) for run in line if (found := value(run)) is not None and (found > 0 or not log)]
            ax.plot([x for x, _ in points], [y for _, y in points], color=colour, marker=marker, markersize=4)
            heights += [y for _, y in points]
            ends += [(*points[-1], strategy, colour)] if points else []
        rates = sorted({run.rate for run in runs})
        ax.set_xscale("log", base=2)
        ax.set_xticks(rates, [f"{rate:g}×" for rate in rates])
        ax.xaxis.minorticks_off()
        ax.set(xlabel="load")
        if log and heights and max(heights) > 8 * min(heights):
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(_plainly)
            ax.yaxis.set_minor_formatter("")
        else:
            ax.set_ylim(0, None)
        _name_lines(ax, ends)

    return draw


def _name_lines(ax: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Each line's name at the right of the axes, at the height of its end (x, y, name, colour), none over another."""
    ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())  # they stay what they are
    at = ax.transData + ax.transAxes.inverted()
    apart = 8.5 / (ax.get_window_extent().height / ax.figure.dpi * 72)  # of the axes' height
    names = sorted((float(at.transform((x, y))[1]), x, y, name, colour) for x, y, name, colour in ends)
    heights = _spread([height for height, *_ in names], apart)
    for height, (_, x, y, name, colour) in zip(heights, names, strict=True):
        ax.annotate(
            name, (x, y), (1.05, height), textcoords="axes fraction", va="center", fontsize=7.5,
            annotation_clip=False, arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 1},
        )  # fmt: skip


def _spread(heights: Sequence[float], apart: float) -> list[float]:
    """Rising heights, moved as little as keeps each `apart` above the one before, and all from 0 to 1 if they fit."""
    groups: list[tuple[float, int]] = []  # (mean height, names) of those that touch
    for height in heights:
        middle, count = height, 1
        while groups and middle - groups[-1][0] < apart * (count + groups[-1][1]) / 2:
            before, more = groups.pop()
            middle, count = (middle * count + before * more) / (count + more), count + more
        groups.append((middle, count))
    placed = [middle + apart * (place - (count - 1) / 2) for middle, count in groups for place in range(count)]
    for place in range(len(placed)):
        placed[place] = max(placed[place], apart * place)
    for place in range(len(placed)):
        placed[-1 - place] = min(placed[-1 - place], 1 - apart * place)
    return placed


def _plainly(value: float, _: Any) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.{max(0, math.ceil(-math.log10(value)))}f}"


def _block_sizes(sweeps: Sequence[Sweep]) -> Figure:
    panels = [_panel(sweep, "", "tokens in a block", "% utilised") for sweep in sweeps if sweep.name == "block_size"]
    return Figure(
        name="block-size",
        title="Utilisation against block size",
        caption="Half of a request's last block stays empty on average: little of a small block, much of a large one.",
        panels=tuple(panels),
        key=_sweep_key(sweeps, "block_size"),
        columns=1,
    )


def _savings(sweeps: Sequence[Sweep]) -> Figure:
    axes = {"samples": ("Parallel samples", "answers to one prompt (n)"), "beams": ("Beam search", "beam width")}
    panels = [_panel(sweep, *axes[sweep.name], "% saved") for sweep in sweeps if sweep.name in axes]
    return Figure(
        name="savings",
        title="Memory saved by sharing, on made-up works",
        caption="Not the work above: requests made up for this, their lengths exponential with the means of the "
        "paper's ShareGPT and Alpaca data sets. Blocks saved by sharing, of the blocks that there would be without it, "
        "as figure 15 of the PagedAttention paper counts them.",
        panels=tuple(panels),
        key=_sweep_key(sweeps, *axes),
    )


def _panel(sweep: Sweep, title: str, across: str, up: str) -> Panel:
    lines = sorted(sweep.series.items())  # as the file has them
    colours = dict(zip(sorted(sweep.series), _LINES * len(lines), strict=False))

    def draw(ax: Axes) -> None:
        top = 0.0
        for place, (label, values) in enumerate(lines):
            shown = [100 * value for value in values]
            top = max(top, *shown)
            marker = _MARKERS[place % len(_MARKERS)]
            ax.plot(sweep.x, shown, color=palette()[colours[label]], marker=marker, markersize=4.5)
            if len(lines) < 3:
                for x, y in zip(sweep.x, shown, strict=True):
                    ax.annotate(f"{y:.1f}", (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=8)
        ax.set_xscale("log", base=2)
        ax.set_xticks(sweep.x, [f"{x:g}" for x in sweep.x])
        ax.minorticks_off()
        ax.set(xlabel=across, ylabel=up, ylim=(0, min(108.0, max(10.0, 1.15 * top))))

    return Panel(title=title, draw=draw, height=2.4)


def _sweep_key(sweeps: Sequence[Sweep], *names: str) -> Key:
    labels = sorted({label for sweep in sweeps if sweep.name in names for label in sweep.series})
    return tuple(zip(_LINES * len(labels), labels, strict=False)) if len(labels) > 1 else ()


# Colours and words of several figures.


def _looks(runs: Sequence[Run]) -> dict[tuple[str, str], tuple[str, str]]:
    """Colour and marker of each strategy: paging has the colour of blocks in use, the others one each."""
    return {
        who: (palette()[colour], _MARKERS[place % len(_MARKERS)])
        for place, (who, colour) in enumerate(_line_colours(runs).items())
    }


def _line_colours(runs: Sequence[Run]) -> dict[tuple[str, str], str]:
    whos = list(dict.fromkeys((run.strategy, run.label) for run in runs))
    paged = next((who for who in whos if who[0] == "paged"), None)
    others = [who for who in whos if who != paged]
    colours = {who: _LINES[1 + place % (len(_LINES) - 1)] for place, who in enumerate(others)}
    return colours if paged is None else {**colours, paged: "active"}  # last: drawn over the others


def _line_key(runs: Sequence[Run]) -> Key:
    return tuple(
        (colour, label if name.lower() == label.lower() else f"{name}: {label}")
        for (name, label), colour in _line_colours(runs).items()
    )


def _state_key(names: Sequence[str]) -> Key:
    return tuple((_COLOUR[name], _WORDS[name]) for name in names)


def _map_title(run: Run) -> str:
    held = sum(piece.slots for piece in run.map if piece.kind in ("stored", "shared", "internal", "reserved"))
    stored = sum(piece.slots for piece in run.map if piece.kind in ("stored", "shared"))
    now = f"{_percent(stored / held)} utilised" if held else "nothing held"
    return f"{run.label}: {now}; {_percent(run.summary.utilisation)} on average"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# Drawing.


def svgs(figure: Figure, prefix: str) -> list[str]:
    """Each panel as an SVG element whose colours are the page's variables; `prefix` makes ids unique on the page."""
    return [_svg(panel, f"{prefix}{place}") for place, panel in enumerate(figure.panels)]


def png(figure: Figure) -> bytes:
    """All panels on one picture in the light theme, with title and legend."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Patch

    columns, first = min(figure.columns, len(figure.panels)), figure.panels[0]
    rows = -(-len(figure.panels) // columns)
    wide = 6.4 if columns == 1 else first.width
    tall = max(panel.height for panel in figure.panels) + (_TITLE if first.title else 0.1)
    across = max(1, int(wide * columns // 3.1))  # entries of the legend in a row
    legend = 0.21 * -(-len(figure.key) // across) + 0.1 if figure.key else 0.0
    size = (wide * columns, tall * rows + 0.3 + legend)
    with _style():
        canvas = Canvas(figsize=size)
        canvas.text(_EDGE / size[0], 1 - 0.1 / size[1], figure.title, va="top", fontsize=12, fontweight="bold")
        for place, panel in enumerate(figure.panels):
            row, column = divmod(place, columns)
            ax = _axes(canvas, panel, size, (column * wide, legend + tall * (rows - 1 - row), wide))
            ax.set_title(panel.title, loc="left")
            panel.draw(ax)
        if figure.key:
            patches = [Patch(facecolor=palette()[colour], label=words) for colour, words in figure.key]
            canvas.legend(handles=patches, loc="lower left", ncols=across, frameon=False, borderaxespad=0.2)
        out = io.BytesIO()
        canvas.savefig(out, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    return _in_few_colours(out)


def _in_few_colours(picture: io.BytesIO) -> bytes:
    """A PNG with a palette of 128 colours: a third of the size, and nothing to be seen of it in a drawing."""
    from PIL import Image

    small = io.BytesIO()
    Image.open(picture).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def _svg(panel: Panel, prefix: str) -> str:
    from matplotlib.figure import Figure as Canvas

    size = (panel.width, panel.height)
    with _style():
        canvas = Canvas(figsize=size)
        panel.draw(_axes(canvas, panel, size, (0.0, 0.0, panel.width)))
        out = io.StringIO()
        canvas.savefig(out, format="svg", facecolor="none", metadata={"Date": None})
    return _for_the_page(out.getvalue(), prefix)


def _axes(canvas: Any, panel: Panel, size: tuple[float, float], at: tuple[float, float, float]) -> Axes:
    """Axes whose lower left corner with all around it is at (x, y) and that are so wide, in inches of `size`."""
    x, y, wide = at
    left, right, bottom, top = (_EDGE, _EDGE, _EDGE, _EDGE) if panel.bare else (0.58, panel.right, 0.46, _EDGE)
    across, up = wide - left - right, panel.height - bottom - top
    made: Axes = canvas.add_axes(((x + left) / size[0], (y + bottom) / size[1], across / size[0], up / size[1]))
    return made


def _style() -> Any:
    from matplotlib import rc_context

    colours = palette()
    return rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "octavo",
            "text.parse_math": False,  # a trace's name may have dollars in it
            "font.size": 9,
            "axes.titlesize": 9.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": colours["soft"],
            "axes.labelcolor": colours["soft"],
            "axes.facecolor": "none",
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": colours["line"],
            "grid.linewidth": 0.6,
            "text.color": colours["ink"],
            "xtick.color": colours["soft"],
            "ytick.color": colours["soft"],
            "lines.linewidth": 1.6,
            "figure.facecolor": colours["leaf"],
            "savefig.facecolor": colours["leaf"],
            "legend.fontsize": 8.5,
            "legend.handlelength": 1.0,
            "legend.handleheight": 0.9,
            "path.simplify_threshold": 0.4,
        }
    )


def _for_the_page(svg: str, prefix: str) -> str:
    """An SVG document as an element of a page: no addresses, ids of its own, and variables for colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    used = set(re.findall(r"#([\w-]+)[\")]", svg))
    svg = re.sub(r'\sid="([^"]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"(href=\"|url\()#([\w-]+)", rf"\1#{prefix}-\2", svg)
    for name, colour in palette().items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)  # a hundredth of a point is enough
    svg = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font: \1px var(--sans)", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return re.sub(r"\n\s*", "\n", svg).strip()

"""`octavo top URL`: the essentials of a running server, in a terminal. Knows how to show them, no HTTP."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from octavo.cli.scrape import Essentials, Latency, Scrape, Server

Url = Annotated[str, typer.Argument(metavar="URL", help="Where the server listens, such as http://127.0.0.1:8000.")]
ApiKey = Annotated[
    str, typer.Option("--api-key", envvar="OCTAVO_API_KEY", help="The key the server was started with, if with one.")
]
Interval = Annotated[float, typer.Option("--interval", min=0.1, max=3600, help="Seconds from one look to the next.")]
Once = Annotated[bool, typer.Option("--once", help="Look twice, an interval apart, print the figures and end.")]
Json = Annotated[bool, typer.Option("--json", help="The figures as a JSON object, one a line.")]

WINDOW = 60.0  # seconds whose latencies are shown
_MARKS = {"shared": ("█", "magenta"), "active": ("▓", "green"), "cached": ("▒", "yellow"), "free": ("░", "dim")}
_LEVELS = " ▁▂▃▄▅▆▇█"


def top(
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = "",
    interval: Interval = 1.0,
    once: Once = False,
    as_json: Json = False,
) -> None:
    """Watch a running server: requests, tokens a second, blocks by state, prefix hits, preemptions, TTFT and TPOT.

    Latencies are those of the last minute watched, with --once those since the server started. It goes on when the
    server goes away, and finds it again. Ctrl-C ends it.

    [bold]Examples[/bold]

      octavo top http://127.0.0.1:8000

      octavo top gpu-host:8000 --once --json
    """
    from octavo.cli.scrape import Server

    server = Server(url, api_key)
    try:
        if once:
            _print_once(server, interval, as_json)
        else:
            _watch(server, interval, as_json)
    except KeyboardInterrupt:  # how one leaves
        pass


def _print_once(server: Server, interval: float, as_json: bool) -> None:
    from octavo.cli.scrape import essentials

    first = server.scrape()
    time.sleep(interval)
    _print(essentials([first, server.scrape()], since_start=True), server, as_json)


def _print(figures: Essentials, server: Server, as_json: bool) -> None:
    from rich.console import Console

    from octavo.cli.show import show

    if as_json:
        print(json.dumps({"url": server.url, **asdict(figures)}), flush=True)
    else:
        show(view(figures, server.url, Console().width))


def _watch(server: Server, interval: float, as_json: bool) -> None:
    """Until Ctrl-C. The first look must succeed: until then nobody knows whether there is such a server."""
    from rich.console import Console

    watched = Watched(server)
    watched.look()
    console = Console()
    if as_json or not console.is_terminal:
        while True:
            _tell(watched, as_json)
            time.sleep(interval)
            watched.look_again()
    _live(watched, console, interval)


def _tell(watched: Watched, as_json: bool) -> None:
    """What was seen, or on standard error why nothing was."""
    import sys

    if watched.problem:
        print(f"octavo: {watched.problem}", file=sys.stderr, flush=True)
    else:
        _print(watched.figures, watched.server, as_json)


def _live(watched: Watched, console: Console, interval: float) -> None:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(watched.view(console), refresh=True)
            time.sleep(interval)
            watched.look_again()


class Watched:
    """A server and what was seen of it in the last minute."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.problem = ""  # why the last look failed
        self._scrapes: deque[Scrape] = deque()
        self._speeds: deque[float] = deque(maxlen=120)  # answer tokens a second, the newest last

    @property
    def figures(self) -> Essentials:
        """What the last look that succeeded has shown."""
        from octavo.cli.scrape import essentials

        return essentials(self._scrapes)

    def look(self) -> None:
        """Look now. Raises OctavoError."""
        from octavo.cli.scrape import restarted

        scrape = self.server.scrape()
        if self._scrapes and restarted(self._scrapes[-1], scrape):
            self._scrapes.clear()
        self._scrapes.append(scrape)
        while scrape.when - self._scrapes[0].when > WINDOW and len(self._scrapes) > 2:
            self._scrapes.popleft()
        self._speeds.append(self.figures.tokens_per_second or 0.0)
        self.problem = ""

    def look_again(self) -> None:
        """Look now; a server that went away may come back, and so is only noted."""
        from octavo.errors import OctavoError

        try:
            self.look()
        except OctavoError as problem:
            self.problem = str(problem)

    def view(self, console: Console) -> RenderableType:
        """The figures, the speed's course, and what is wrong."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [view(self.figures, self.server.url, console.width, list(self._speeds))]
        if self.problem:
            parts.append(Text(f"\n{self.problem} Trying again; the figures are the last ones.", "bold red"))
        return Group(*parts)


def view(figures: Essentials, url: str, width: int, speeds: list[float] | None = None) -> RenderableType:
    """The figures in some ten lines. Colours only repeat what the characters say."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from octavo.cli.display import printable

    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(printable(figures.model), "bold").append(f"  octavo {printable(figures.version)} at {url}  ", "dim")
    head.append("ready" if figures.ready else "not ready", "green" if figures.ready else "bold red")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    requests = f"{figures.running:,} running, {figures.waiting:,} waiting, {figures.swapped:,} swapped"
    table.add_row("requests", requests)
    speed = f"{_number(figures.tokens_per_second)} answer, {_number(figures.prompt_tokens_per_second)} prompt"
    table.add_row("tokens/s", speed)
    if speeds and len(speeds) > 1:
        table.add_row("", sparkline(speeds[-max(10, width - 20) :]))
    table.add_row("blocks", bar(figures.blocks, max(10, width - 20)))
    table.add_row("", _legend(figures))
    held = figures.blocks.get("active", 0) + figures.blocks.get("shared", 0)
    stored = f"{figures.utilisation:.1%} of the held slots store a token" if held else "nothing is held"
    table.add_row("memory", f"{stored}; {figures.prefix_hit_rate:.1%} prefix hits")
    taken = figures.preemptions
    since = f"{figures.copies:,} copies on write, {figures.evictions:,} evictions, preemptions: "
    table.add_row("events", f"{since}{taken['recompute']:,} recompute, {taken['swap']:,} swap")
    over = "since the start" if figures.window is None else f"last {figures.window:.0f} s"
    table.add_row("TTFT", f"{_latency(figures.ttft)}  ({over})")
    table.add_row("TPOT", f"{_latency(figures.tpot)}  ({over})")
    return Group(head, "", table)


def bar(blocks: dict[str, int], width: int) -> Text:
    """The pool to scale, `width` characters; a state with any block at all has one character at least."""
    from rich.text import Text

    text, total = Text(no_wrap=True), sum(blocks.values())
    if not total:
        return text.append("unknown", "dim")
    cells = {state: max(1, count * width // total) for state, count in blocks.items() if count}
    largest = max(cells, key=lambda state: cells[state])
    cells[largest] = max(1, cells[largest] + width - sum(cells.values()))
    for state, count in cells.items():
        mark, style = _MARKS[state]
        text.append(mark * count, style)
    return text


def _legend(figures: Essentials) -> Text:
    from rich.text import Text

    text = Text()
    for state, (mark, style) in _MARKS.items():
        text.append(f"{mark} ", style).append(f"{figures.blocks[state]:,} {state}  ")
    text.append(f"of {sum(figures.blocks.values()):,}")
    if figures.pinned:
        text.append(f", {figures.pinned:,} pinned")
    if figures.host_blocks_used:
        text.append(f", {figures.host_blocks_used:,} in host memory")
    return text


def sparkline(values: list[float]) -> str:
    """The values as little columns, the highest of them full."""
    most = max(values)
    return "".join(_LEVELS[round(value / most * (len(_LEVELS) - 1))] if most > 0 else " " for value in values)


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:,.1f}"


def _latency(latency: Latency) -> str:
    return f"p50 {_milliseconds(latency.p50)}, p95 {_milliseconds(latency.p95)}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    return f"{seconds * 1000:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"

"""Answers on the screen while they grow. Knows outputs and text, not where they come from.

Four views with the same two methods, `update(index, output)` and `close()`: one answer straight to the output (Solo),
several in order (InOrder), several side by side on a terminal (Board), several line by line where there is none
(Interleaved).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from octavo.outputs import Completion, RequestOutput

_MOST_PANELS = 16
_UNPRINTABLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters: a model must not drive the terminal."""
    return text.translate(_UNPRINTABLE)


class View(Protocol):
    """Shows answers."""

    def update(self, index: int, output: RequestOutput) -> None:
        """Show the newest state of the answers to prompt `index`."""
        ...

    def close(self) -> None:
        """All answers have ended."""
        ...


class Solo:
    """One answer, written as it comes."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._clean = printable if self._out.isatty() else str
        self.shown = 0  # characters

    def update(self, index: int, output: RequestOutput) -> None:
        """Write what is new."""
        text = output.completions[0].text if output.completions else ""
        self._out.write(self._clean(text[self.shown :]))
        self._out.flush()
        self.shown = len(text)

    def close(self) -> None:
        """End the line."""
        self._out.write("\n")


class InOrder:
    """Several answers, each written whole under its heading once all before it are."""

    def __init__(self, titles: Sequence[str], out: TextIO | None = None) -> None:
        self._titles = titles
        self._out = out or sys.stdout
        self._finished: dict[int, RequestOutput] = {}
        self._next = 0

    def update(self, index: int, output: RequestOutput) -> None:
        """Keep a finished answer, and write those whose turn it is."""
        if output.finished:
            self._finished[index] = output
        while self._next in self._finished:
            self._write(self._next, self._finished.pop(self._next))
            self._next += 1

    def close(self) -> None:
        """Nothing is left to do."""

    def _write(self, index: int, output: RequestOutput) -> None:
        for completion in output.completions:
            number = f"{index + 1}.{completion.index + 1}" if len(output.completions) > 1 else f"{index + 1}"
            self._out.write(f"--- {number}: {self._titles[index]}\n{completion.text.strip()}\n\n")
        if output.error:
            self._out.write(f"--- {index + 1}: {self._titles[index]}\n{output.error}\n\n")
        self._out.flush()


class Board:
    """Several answers side by side, redrawn as they grow; whole ones stay on the screen at the end."""

    def __init__(self, titles: Sequence[str], console: Console | None = None) -> None:
        self.console = console or Console()
        self._titles = titles
        self._outputs: list[RequestOutput | None] = [None] * len(titles)
        self._live = Live(console=self.console, get_renderable=self._growing, refresh_per_second=12, transient=True)
        if self.console.is_terminal:
            self._live.start()

    @staticmethod
    def fits(count: int, console: Console) -> bool:
        """Whether so many answers can be watched at once there."""
        return console.is_terminal and count <= _MOST_PANELS

    def update(self, index: int, output: RequestOutput) -> None:
        """Take the answer's new state; the screen follows a dozen times a second."""
        self._outputs[index] = output

    def close(self) -> None:
        """Leave the whole answers on the screen."""
        self._live.stop()
        self.console.print(self.whole())

    def whole(self) -> RenderableType:
        """All answers in full."""
        return self._grid(None)

    def _growing(self) -> RenderableType:
        rows = -(-len(self._titles) // self._columns)
        return self._grid(max(3, (self.console.height - 1) // rows))

    @property
    def _columns(self) -> int:
        return 2 if self.console.width >= 80 and len(self._titles) > 1 else 1

    def _grid(self, height: int | None) -> Table:
        grid = Table.grid(expand=True)
        columns = self._columns
        for _ in range(columns):
            grid.add_column(ratio=1)
        panels = [self._panel(i, height) for i in range(len(self._titles))]
        for start in range(0, len(panels), columns):
            grid.add_row(*panels[start : start + columns])
        return grid

    def _panel(self, index: int, height: int | None) -> Panel:
        output = self._outputs[index]
        completions = output.completions if output else []
        room = None if height is None else max(1, (height - 2) // max(1, len(completions)))
        bodies: list[Text] = []
        for completion in completions:
            mark = f"{completion.index + 1}. " if len(completions) > 1 else ""
            text = Text(overflow="fold").append(mark, "bold").append(printable(completion.text.strip()))
            bodies.append(self._tail(text, room))
        if output is not None and output.error:
            bodies.append(Text(output.error, "red"))
        finished = output is not None and output.finished
        return Panel(
            Group(*bodies),
            title=Text(self._titles[index], "bold", overflow="ellipsis"),
            title_align="left",
            subtitle=Text(_status(completions), "dim") if completions else Text("waiting", "dim"),
            subtitle_align="right",
            border_style="green" if finished else "cyan",
            height=height,
        )

    def _tail(self, text: Text, lines: int | None) -> Text:
        if lines is None:
            return text
        width = self.console.width // self._columns - 4
        return Text("\n").join(list(text.wrap(self.console, max(10, width)))[-lines:])


class Interleaved:
    """Several answers line by line as they come, each line with its answer's label; for a pipe or a log."""

    def __init__(self, titles: Sequence[str], out: TextIO | None = None, width: int = 100) -> None:
        self._titles = titles
        self._out = out or sys.stdout
        self._width = width
        self._written: dict[tuple[int, int], int] = {}  # characters of each answer
        for index, title in enumerate(titles):
            self._out.write(f"[{index + 1}] {title}\n")

    def update(self, index: int, output: RequestOutput) -> None:
        """Write the lines that are full; at an answer's end, what is left of it."""
        for completion in output.completions:
            mark = f"[{index + 1}.{completion.index + 1}] " if len(output.completions) > 1 else f"[{index + 1}] "
            key = (index, completion.index)
            start = self._written.get(key, 0)
            *full, rest = self._lines(completion.text[start:])
            for line in full:
                self._write(mark, line)
            self._written[key] = len(completion.text) - len(rest)
            if completion.finish_reason is not None and rest:
                self._write(mark, rest)
                self._written[key] = len(completion.text)
        if output.error:
            self._write(f"[{index + 1}] ", output.error)

    def close(self) -> None:
        """Nothing is left to do."""

    def _write(self, mark: str, line: str) -> None:
        if line.strip():
            self._out.write(f"{mark}{line.strip()}\n")
            self._out.flush()

    def _lines(self, text: str) -> list[str]:
        """The text cut at its line ends and, beyond the width, at spaces; joined again it is the text."""
        lines: list[str] = []
        for line in text.splitlines(keepends=True) or [""]:
            while len(line) > self._width:
                cut = line.rfind(" ", 1, self._width) + 1 or self._width
                lines.append(line[:cut])
                line = line[cut:]
            lines.append(line)
        return [*lines, ""] if lines[-1].endswith("\n") else lines


def _status(completions: Sequence[Completion]) -> str:
    tokens = sum(len(completion.token_ids) for completion in completions)
    reasons = {completion.finish_reason for completion in completions}
    if None in reasons:
        return f"{tokens} tokens …"
    return f"{tokens} tokens, {' and '.join(sorted(str(reason) for reason in reasons))}"


def title_of(text: str, width: int = 60) -> str:
    """A prompt on one short line."""
    return textwrap.shorten(text, width, placeholder=" …")

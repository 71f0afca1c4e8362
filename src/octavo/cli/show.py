"""Tables to standard output; in a pipe without spaces at the ends of lines. Knows no table."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType


def show(*parts: RenderableType) -> None:
    """Print the parts below each other."""
    console = Console()
    if console.is_terminal:
        console.print(*parts, sep="\n")
        return
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    sys.stdout.flush()

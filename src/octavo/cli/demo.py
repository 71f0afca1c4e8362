"""`octavo demo`: eight prompts at once, the answers streaming, and what their memory did. What `make demo` runs.

Knows prompts and tables, not what fills them.
"""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import DEFAULT_MODEL, EngineOptions, Model
from octavo.cli.session import note_full_pool, open_llm
from octavo.cli.streams import named
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from rich.console import RenderableType

# Every prompt begins with this, so its blocks exist once and all eight read them.
SYSTEM = (
    "You are a friendly and knowledgeable assistant. Answer in plain words that a child of ten understands. "
    "Be accurate, be brief, and do not use more than three sentences."
)
PROMPTS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "What is photosynthesis?",
    "How do I make a cup of tea?",
    "What does a baker do?",
    "What is the moon made of?",
    "Give me a tip for learning a language.",
    "Write a short poem about the sea.",
)
TWICE = 7  # this prompt is answered twice: both answers go on from the same blocks, so the first to write copies one

Tokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")]
Svg = Annotated[Path | None, typer.Option("--svg", dir_okay=False, help="Also draw the end of the run into this file.")]


def demo(
    model: Model = DEFAULT_MODEL,
    max_tokens: Tokens = 64,
    svg: Svg = None,
    *,
    engine: EngineOptions,
) -> None:
    """Answer eight different prompts at once, and report what their memory did.

    All eight begin with the same system message, whose blocks they share. The last one is answered twice from the
    same blocks; where the two answers part, one block is copied. The prompts are answered greedily (the two answers to
    the last with a fixed seed), so every run says the same.

    [bold]Examples[/bold]

      octavo demo

      octavo demo --block-size 4 --max-tokens 32

      octavo demo --svg demo.svg
    """
    from rich.console import Console

    from octavo.cli.display import Board, Interleaved, View
    from octavo.cli.memory import memory_table
    from octavo.cli.show import show

    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    params = [greedy] * len(PROMPTS)
    params[TWICE] = SamplingParams(temperature=0.7, top_p=0.95, n=2, seed=1, max_tokens=max_tokens)
    begin = time.perf_counter()
    llm = open_llm(model, engine)
    loaded = time.perf_counter()
    console = Console()
    board = Board(PROMPTS, console)
    view: View = board if console.is_terminal else Interleaved(PROMPTS)
    conversations = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in PROMPTS]
    ended = {}
    for outputs in llm.stream(conversations, params):
        for index, output in outputs:
            ended[index] = output
            board.update(index, output)
            if view is not board:
                view.update(index, output)
    view.close()
    seconds = time.perf_counter() - loaded
    report = memory_table(llm.memory_report())
    closing = f"{len(PROMPTS)} prompts, 9 answers in {seconds:.1f} s; the model was ready after {loaded - begin:.1f} s."
    show(report, closing)
    note_full_pool(ended, llm)
    if svg is not None:
        _draw(svg, [board.whole(), report, closing])


def _draw(file: Path, parts: list[RenderableType]) -> None:
    """The parts as a picture of a terminal. Raises OSError if the file cannot be written."""
    from rich.console import Console

    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(*parts, sep="\n")
    picture = console.export_svg(title="make demo")
    picture = re.sub(
        r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL
    )  # fonts that would be fetched from elsewhere
    with named(file):
        file.write_text(picture, encoding="utf-8")

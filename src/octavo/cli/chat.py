"""`octavo chat`: a conversation. Reads lines from a person or a pipe, streams the answers, keeps the history.

Knows messages, not how a model sees them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import DEFAULT_MODEL, EngineOptions, Model, SamplingOptions, sampling_params
from octavo.cli.session import can_chat, note_full_pool, open_llm
from octavo.cli.streams import STDIN, named
from octavo.errors import ModelError, RequestError

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.params import SamplingParams

_HELP = "/reset forgets the conversation, /memory shows the KV blocks, /exit (or Ctrl-D) ends, Ctrl-C stops an answer."

System = Annotated[str | None, typer.Option("--system", help="A system message at the conversation's beginning.")]


def chat(
    model: Model = DEFAULT_MODEL,
    system: System = None,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Talk with a model; the answers stream, and what was said before is found again in the prefix cache.

    In the conversation: /reset forgets it, /memory shows the KV blocks, /exit or Ctrl-D ends. Ctrl-C stops the answer,
    not the program. Lines from a pipe are taken as messages one after another.

    [bold]Examples[/bold]

      octavo chat

      octavo chat --system "Answer in rhymes." --temperature 0.9

      printf 'What is the capital of France?\\nAnd of Italy?\\n' | octavo chat --temperature 0
    """
    params = sampling_params({"max_tokens": None, **sampling.given()})
    llm = open_llm(model, engine)
    if not can_chat(llm):
        raise ModelError(f"{model} has no chat template; use `octavo generate --raw` to continue a text.")
    Conversation(llm, params, system).run()


class Conversation:
    """What was said so far, and the loop that goes on with it."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self._beginning)
        self._interactive = sys.stdin.isatty()
        self._commands: dict[str, Callable[[], None]] = {
            "/reset": self._reset,
            "/memory": self._show_memory,
            "/help": lambda: self._note(_HELP),
        }

    def run(self) -> None:
        """Until /exit or the end of the input."""
        if self._interactive:
            _edit_lines()
            self._note(_HELP)
        while (line := self._read()) is not None:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if text in self._commands:
                self._commands[text]()
            elif text.startswith("/") and text[1:].isalpha():
                self._note(f"{text} is no command. {_HELP}")
            elif text:
                self._answer(text)

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        try:
            with named(STDIN):
                return input("\n> ") if self._interactive else sys.stdin.readline() or None
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            self._note("\n/exit or Ctrl-D ends the conversation.")
            return ""

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        try:
            output, interrupted = self._stream()
            if output is not None and output.error:
                raise RequestError(output.error)
        except RequestError as problem:
            self.messages.pop()
            self._note(f"{problem} /reset begins anew.")
            return
        said = output.completions[0].text if output and output.completions else ""
        self.messages.append({"role": "assistant", "content": said})
        if interrupted:
            self._note("(stopped)")
        if output is not None:
            note_full_pool({0: output}, self._llm)
        if not interrupted and output is not None:
            self._note(_summary(output), only_interactive=True)

    def _stream(self) -> tuple[RequestOutput | None, bool]:
        """Show the answer to the messages; returns its last state, and whether Ctrl-C ended it."""
        from octavo.cli.display import Solo

        view, output = Solo(), None
        with _ctrl_c() as pressed:
            for outputs in self._llm.stream([self.messages], self._params):
                for index, output in outputs:
                    view.update(index, output)
                if pressed.is_set():
                    break  # leaving the loop aborts the request, and its blocks go back
        view.close()
        return output, pressed.is_set()

    def _reset(self) -> None:
        self.messages = list(self._beginning)
        self._note("The conversation begins anew.")

    def _show_memory(self) -> None:
        from octavo.cli.memory import memory_table
        from octavo.cli.show import show

        show(memory_table(self._llm.memory_report()))

    def _note(self, text: str, *, only_interactive: bool = False) -> None:
        """A word to the person, apart from the answers."""
        if self._interactive or not only_interactive:
            dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
            print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)


@contextmanager
def _ctrl_c() -> Iterator[Event]:
    """Turn the first Ctrl-C into an event, so that it cannot cut a step in two; the second raises as ever."""
    pressed = Event()

    def handler(number: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _edit_lines() -> None:
    """Line editing and recall of earlier lines, where Python has them: importing the module switches them on."""
    with suppress(ImportError):
        import readline  # noqa: F401


def _summary(output: RequestOutput) -> str:
    tokens, timings = len(output.completions[0].token_ids), output.timings
    text = f"{tokens} tokens, {output.cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the cache"
    if timings.finished is None or timings.first_token is None or tokens < 2:
        return text
    return f"{text}, {(tokens - 1) / (timings.finished - timings.first_token):.1f} tokens/s"

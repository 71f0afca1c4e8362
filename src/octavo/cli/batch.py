"""`octavo batch`: answer a JSONL file into another, in order, so that it can be killed and run again.

A result is written once all before it are, each line in one write; so the output is always a beginning of the whole,
but for a last line that a kill may have cut. Running again removes that one and goes on behind the others. Knows
requests and results, not how they are computed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.batch_line import Question, read_question
from octavo.cli.options import DEFAULT_MODEL, EngineOptions, Model, SamplingOptions, sampling_params, with_default
from octavo.cli.session import open_llm
from octavo.cli.streams import named, require_regular
from octavo.errors import OctavoError, RequestError

if TYPE_CHECKING:
    from octavo.engine.request import Request
    from octavo.llm import LLM

_AHEAD = 4  # requests in hand for each sequence that can run: one slow answer must not leave the engine idle behind it

Input = Annotated[
    Path, typer.Argument(metavar="FILE.jsonl", exists=True, dir_okay=False, help="One request a line; see above.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        dir_okay=False,
        help=with_default("Where the results go.", "FILE.results.jsonl, beside it"),
        show_default=False,
    ),
]


def batch(
    file: Input,
    output: Output = None,
    model: Model = DEFAULT_MODEL,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Answer every line of a JSONL file, in order, with a progress bar; can be stopped and resumed.

    Kill it at any moment and run the same command again: it goes on where it stopped.

    The exit code is 0 if every line was served, 1 if any result is an error, also of an earlier run, 2 if nothing
    could be run as asked, and 130 after Ctrl-C.

    [bold]A line[/bold] is a JSON object with "messages" (a conversation), "prompt" (a text to continue as it is) or
    "prompt_token_ids", and any parameters of SamplingParams, such as "max_tokens" or "n"; with "width" it is a beam
    search and takes those of BeamParams. The sampling options below hold for lines that do not say otherwise. A
    "custom_id" comes back with the result. Lines of OpenAI's batch files, {"custom_id": ..., "body": {...}}, are
    read too; the model they name is not looked at.

    [bold]A result[/bold] has "line" (counted from 0, empty lines left out), "custom_id", "completions" (each with
    "text", "token_ids" and "finish_reason"), token counts, timings in seconds, and "error": null, or why the line
    could not be served. "input" is a digest of the line, model and options, by which a resumed run knows its own.

    [bold]Examples[/bold]

      octavo batch questions.jsonl

      octavo batch questions.jsonl -o answers.jsonl --temperature 0 --max-tokens 100
    """
    target = output or file.with_suffix(".results.jsonl")
    for path in (file, target):
        require_regular(path)
    if target.resolve() == file.resolve():
        raise RequestError(f"{target} is the input itself; name another file with -o.")
    defaults = sampling.given()
    sampling_params(defaults)  # a bad option is said now, not on every line
    salt = json.dumps([model, defaults], sort_keys=True).encode()
    with file.open("rb") as source:
        total = sum(1 for _ in _lines(source, file))
        source.seek(0)
        lines = _lines(source, file)
        with _sole_writer(target) as results:
            done, failed = _resume(results, lines, salt, target)
            if 0 < done < total:
                were = "line was" if done == 1 else "lines were"
                typer.echo(f"{done} {were} answered before; going on at line {done + 1}.", err=True)
            if done < total:
                try:
                    run = Run(open_llm(model, engine), defaults, salt, results)
                    run.answer(lines, done, total)
                except KeyboardInterrupt:
                    typer.echo("octavo: interrupted; run the same command again to go on.", err=True)
                    raise
                failed += run.failed
    before = " was complete before" if done == total else ""
    typer.echo(f"{target}{before}: {_count(total, 'result')}, {_count(failed, 'error')}.", err=True)
    if failed:
        raise typer.Exit(1)


class Run:
    """The lines in hand: some in the engine, some finished and waiting for those before them."""

    def __init__(self, llm: LLM, defaults: dict[str, Any], salt: bytes, results: IO[bytes]) -> None:
        self._llm = llm
        self._defaults = defaults
        self._salt = salt
        self._results = results
        self._in_hand: deque[tuple[dict[str, Any], Request | str]] = deque()  # a str is why it cannot be served
        self.failed = 0

    def answer(self, lines: Iterator[bytes], done: int, total: int) -> None:
        """Answer the lines and write their results; `done` of `total` were answered before."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("lines, {task.fields[speed]:.0f} tokens/s,"))
        console = Console(stderr=True)
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=total, completed=done, speed=0.0)
            numbered = enumerate(lines, start=done)
            most = _AHEAD * self._llm.config.sequence_limit
            while True:
                while len(self._in_hand) < most and (line := next(numbered, None)) is not None:
                    self._submit(*line)
                while self._in_hand and self._write_first():
                    progress.update(bar, advance=1, speed=self._llm.memory_report().tokens_per_second)
                if not self._in_hand:
                    return
                self._llm.engine.step()

    def _submit(self, number: int, line: bytes) -> None:
        from octavo.llm import tokenize

        question = Question()
        try:
            read_question(line, self._defaults, question)
            text, ids = tokenize(self._llm.tokenizer, question.prompt)
            request: Request | str = self._llm.engine.add_request(f"line-{number}", ids, question.params, prompt=text)
        except RequestError as problem:
            request = str(problem)
        except Exception as problem:  # whatever is odd about it: a line must not end the others
            request = f"The line cannot be served: {type(problem).__name__}: {problem}."
        head = {"line": number, "custom_id": question.custom_id, "input": _digest(self._salt, line)}
        self._in_hand.append((head, request))

    def _write_first(self) -> bool:
        """Write the first result in hand if it is there."""
        from octavo.cli.results import as_dict
        from octavo.engine.request import State

        head, request = self._in_hand[0]
        if isinstance(request, str):
            result = {"completions": [], "error": request}
        elif request.state is State.FINISHED:
            result = as_dict(request.output())
        else:
            return False
        self._in_hand.popleft()
        self.failed += result["error"] is not None
        text = json.dumps({**head, **result}, ensure_ascii=False)
        self._results.write(text.encode("utf-8", "backslashreplace") + b"\n")  # half a surrogate pair stays JSON so
        self._results.flush()
        return True


def _lines(source: IO[bytes], file: Path) -> Iterator[bytes]:
    """The lines that are not empty."""
    with named(file):
        for line in source:
            if stripped := line.strip():
                yield stripped


@contextmanager
def _sole_writer(target: Path) -> Iterator[IO[bytes]]:
    """The output, open for reading and writing by this process alone. Raises OctavoError or OSError if it cannot be."""
    # also around the closing, which tries once more to write what could not be written
    with named(target), os.fdopen(os.open(target, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OctavoError(f"{target} is being written by another octavo batch.") from None
        yield handle


def _resume(results: IO[bytes], lines: Iterator[bytes], salt: bytes, target: Path) -> tuple[int, int]:
    """Count (the results that are there, the errors in them), take their lines, and cut off a last that is not whole.

    Raises RequestError, and changes nothing, if they are not the first results of this input.
    """
    count = failed = size = 0
    for result in results:
        if not result.endswith(b"\n"):
            break
        line, read = next(lines, None), _read(result)
        if line is None or read.get("input") != _digest(salt, line):
            raise RequestError(
                f"Line {count + 1} of {target} answers another input, model or options than these; "
                "name another file with -o, or remove that one."
            )
        count, size = count + 1, size + len(result)
        failed += read.get("error") is not None
    results.seek(size)
    results.truncate()
    return count, failed


def _digest(salt: bytes, line: bytes) -> str:
    return hashlib.sha256(salt + b"\n" + line).hexdigest()[:16]


def _read(result: bytes) -> dict[str, Any]:
    """A line of results; empty where it is none of ours."""
    try:
        read = json.loads(result)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

"""What commands read and write: errors that name the file or stream, and text that must be UTF-8. Knows no command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from octavo.errors import RequestError

STDIN = "Standard input"


def prepare() -> None:
    """Make the standard streams fit for use: one that was closed leads nowhere, and none fails over a character."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it then also takes the stream's number, which no other file should get
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # in some locales other bytes would slip through
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console may lack a character


def silence(stream: TextIO) -> None:
    """Let what the stream still holds go nowhere: it cannot be written, and Python would try once more at the end."""
    with suppress(OSError, ValueError):  # a stream without a number of its own needs nothing
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def culprit(problem: OSError) -> str:
    """The file or stream that the error is about. Standard output is silenced if it is the one."""
    name = problem.filename or "Standard output or a file"  # unbuffered, it leaves no trace
    try:
        sys.stdout.flush()  # what could not be written is still there, and fails again
    except OSError:
        silence(sys.stdout)
        name = problem.filename or "Standard output"
    return str(name)


@contextmanager
def named(name: str | Path) -> Iterator[None]:
    """Put the name into an OSError without one; what is not UTF-8 is a RequestError."""
    try:
        yield
    except UnicodeDecodeError as problem:
        raise RequestError(f"{name} is not UTF-8 text: byte {problem.start} cannot be read.") from None
    except OSError as problem:
        problem.filename = problem.filename or str(name)
        raise


def require_regular(path: Path) -> None:
    """Raise RequestError if it is there and no regular file: what is read twice, or read and written, must be one."""
    if path.exists() and not path.is_file():
        raise RequestError(f"{path} is not a regular file; a batch can be resumed only from and to one.")


def require_utf8(text: str) -> None:
    """Raise RequestError for an argument with bytes that are not UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        where = f"character {problem.start + 1} cannot be read"
        raise RequestError(f"The argument {text!r} is not UTF-8 text: {where}.") from None

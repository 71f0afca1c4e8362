"""The `octavo` command. Here only: how it starts, and how it says that something went wrong. Knows no command."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from octavo.errors import ConfigError, OctavoError, RequestError

_PLAIN = {
    "Input should be a valid integer.*": "it must be a whole number",
    "Input should be a valid number.*": "it must be a number",
    r"Input should be greater than or equal to (\S+)": r"it must be at least \1",
    "Input should be": "it must be",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 failed, 2 asked for what cannot be, 130 interrupted by Ctrl-C."""
    # OpenBLAS's threads spin while they wait for each other: with one a core, on a machine that others use too, all
    # of them wait most of the time. It reads this when NumPy is loaded.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, cpus // 2)))
    from typer import Abort

    from octavo.cli import streams
    from octavo.cli.app import app

    streams.prepare()
    try:
        code = app(arguments, prog_name="octavo", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, Abort):  # which of them, depends on typer's version
        code = 130
    except OctavoError as problem:
        code = _say(str(problem), 2 if isinstance(problem, (ConfigError, RequestError)) else 1)
    except BrokenPipeError:  # whoever read has had enough
        code = 1
        streams.silence(sys.stdout)
    except OSError as problem:
        code = _say(f"{streams.culprit(problem)} cannot be read or written: {problem.strerror or problem}.", 1)
    except Exception as problem:
        # typer's own errors share no public base class across its versions, but all can be shown
        if not hasattr(problem, "format_message"):
            raise
        code = _say(_usage(problem), getattr(problem, "exit_code", 2))
    sys.exit(code or 0)


def _usage(problem: Any) -> str:
    """What typer has to say of a command line, in plain words, and where that is explained."""
    message = problem.format_message()
    for theirs, ours in _PLAIN.items():
        message = re.sub(theirs, ours, message)
    command = getattr(getattr(problem, "ctx", None), "command_path", "octavo")
    return f"{message.rstrip('.')}; see {command} --help."


def _say(message: str, code: int) -> int:
    from octavo.cli.streams import silence

    try:
        print(f"octavo: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:  # there is nowhere left to say it
        silence(sys.stderr)
    return code

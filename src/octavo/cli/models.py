"""`octavo models`: what can be run here, and what is already on this machine. Knows names, not what they do."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="The same as one JSON object.")]

_FOLDERS_ONLY = ("opt",)  # architectures that have no GGUF files


def models(as_json: Json = False) -> None:
    """List the built-in models, and the architectures, files and quantisations that can be run.

    A built-in model is fetched on first use and kept in a cache folder ($OCTAVO_CACHE names another). Any other model
    is named by its path or its Hugging Face id.

    [bold]Examples[/bold]

      octavo models

      octavo models --json
    """
    facts = _facts()
    if as_json:
        print(json.dumps(facts))
    else:
        _show(facts)


def _facts() -> dict[str, Any]:
    from octavo.loading.dialect import ARCHITECTURES
    from octavo.loading.resolve import BUILT_IN, cache_folder, cached_path, is_cached
    from octavo.loading.storage import STORAGE_TYPES

    built_in = [
        {
            "name": model.name,
            "description": model.description,
            "bytes": model.size,
            "licence": model.licence,
            "cached": str(cached_path(model)) if is_cached(model.name) else None,
        }
        for model in BUILT_IN.values()
    ]
    return {
        "built_in": built_in,
        "cache": str(cache_folder()),
        "architectures": list(ARCHITECTURES),
        "folders_only": list(_FOLDERS_ONLY),
        "files": ["GGUF file", "Hugging Face folder with safetensors"],
        "tensors": [kind.name for kind in STORAGE_TYPES],
    }


def _show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from octavo.cli.memory import size
    from octavo.cli.show import show

    table = Table(title="Built-in models", title_justify="left", title_style="bold")
    for column in ("name", "size", "here", "licence", "what it is"):
        table.add_column(column, justify="right" if column == "size" else "left")
    for model in facts["built_in"]:
        here = "yes" if model["cached"] else "no"
        table.add_row(model["name"], size(model["bytes"]), here, model["licence"], model["description"])
    support = Table.grid(padding=(0, 2))
    support.add_column(style="cyan", no_wrap=True)
    support.add_row("cache folder", facts["cache"])
    support.add_row("architectures", ", ".join(facts["architectures"]))
    support.add_row("files", f"{', '.join(facts['files'])} ({', '.join(facts['folders_only'])}: folders only)")
    support.add_row("tensors", ", ".join(facts["tensors"]))
    show(table, "", support)

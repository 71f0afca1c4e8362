"""Opening a model for a command, with a word on what is going on. The only place of the CLI that makes an LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.cli.options import EngineOptions

if TYPE_CHECKING:
    from octavo.llm import LLM


def open_llm(model: str, options: EngineOptions) -> LLM:
    """Load the model with the options given on the command line.

    Raises ConfigError for a setting that cannot be and ModelError for a model that cannot be loaded.
    """
    from rich.console import Console

    from octavo.loading.resolve import BUILT_IN, is_cached

    fetched = "Fetching (once) and loading" if model in BUILT_IN and not is_cached(model) else "Loading"
    console = Console(stderr=True)
    if not console.is_terminal and fetched != "Loading":
        console.print(f"{fetched} {model} …")  # a pipe has no spinner, and this may take minutes
    with console.status(f"{fetched} {model} …"):
        from octavo.llm import LLM

        return LLM(model, **options.given())


def can_chat(llm: LLM) -> bool:
    """Whether the model has a chat template."""
    return llm.tokenizer is not None and llm.tokenizer.chat_template is not None

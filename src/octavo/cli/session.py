"""Opening a model for a command, and words on what is going on, to standard error. Knows no command.

The only place of the CLI that makes an LLM or an AsyncLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.options import EngineOptions

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput


def open_llm(model: str, options: EngineOptions) -> LLM:
    """Load the model with the options given on the command line.

    Raises ConfigError for a setting that cannot be and ModelError for a model that cannot be loaded.
    """
    with loading(model):
        from octavo.llm import LLM

        return LLM(model, **options.given())


def open_async_llm(model: str, options: EngineOptions) -> AsyncLLM:
    """The same for many callers at once."""
    with loading(model):
        from octavo.async_llm import AsyncLLM

        return AsyncLLM(model, **options.given())


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Tell, while it lasts, that the model is loaded, and that it is fetched first if it is."""
    from rich.console import Console

    from octavo.cli.memory import size
    from octavo.loading.builtin import built_in
    from octavo.loading.resolve import is_cached

    console = Console(stderr=True)
    if not Path(model).expanduser().exists() and (known := built_in(model)) and not is_cached(known.name):
        # also where there is a spinner: this may take minutes
        console.print(f"Fetching {known.name} ({size(known.size)}) once …", highlight=False)
    with console.status(f"Loading {model} …"):
        yield


def note(text: str | None) -> None:
    """Say a word beside the answers, if there is one."""
    if text is not None:
        print(f"octavo: {text}", file=sys.stderr, flush=True)


def note_full_pool(outputs: Mapping[int, RequestOutput], llm: LLM) -> None:
    """Name the answers that ended because the KV pool is full."""
    from octavo.cli.endings import out_of_memory

    note(out_of_memory(outputs, llm.memory_report().num_blocks))


def can_chat(llm: LLM) -> bool:
    """Whether the model has a chat template."""
    return llm.tokenizer is not None and llm.tokenizer.chat_template is not None

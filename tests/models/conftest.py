"""Small models, made once: Transformers' own and ours, loaded from the folder that Transformers saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo.loading.checkpoint import Checkpoint, load_checkpoint

Pair = tuple[Any, Checkpoint]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """By name: Transformers' model and the checkpoint of the same weights."""
    from tests.models import small

    @cache
    def make(name: str) -> Pair:
        theirs = small.make(name)
        folder: Path = tmp_path_factory.mktemp(name)
        theirs.save_pretrained(folder)
        return theirs, load_checkpoint(folder)

    return make

"""Real models and shared data for these tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.loading.checkpoint import Checkpoint, load_checkpoint
from octavo.loading.resolve import is_cached, resolve
from octavo.loading.tokenizer import Tokenizer
from tests.conftest import SHARED


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Checkpoint:
    return load_checkpoint(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Checkpoint) -> Tokenizer:
    assert smollm2.tokenizer is not None
    return smollm2.tokenizer


@pytest.fixture(scope="session")
def gemma() -> Checkpoint:
    path = os.environ.get("OCTAVO_TEST_GEMMA")
    if path is None and not is_cached("gemma3-270m"):
        pytest.skip(
            "Gemma-3-270M is not here: set OCTAVO_TEST_GEMMA to its .gguf file, or fetch it once (253 MB) with "
            "python -c 'from octavo.loading.resolve import resolve; resolve(\"gemma3-270m\")'"
        )
    return load_checkpoint(Path(path) if path else resolve("gemma3-270m"))


@pytest.fixture(scope="session")
def gemma_tokenizer(gemma: Checkpoint) -> Tokenizer:
    assert gemma.tokenizer is not None
    return gemma.tokenizer


@pytest.fixture(scope="session")
def tokenizer_cases() -> dict[str, list[dict[str, Any]]]:
    """llama.cpp's ids for both models."""
    file = SHARED / "tokenizer_cases.json"
    if not file.is_file():
        pytest.skip("../shared/tokenizer_cases.json (llama.cpp's token ids) is not beside the repository")
    cases: dict[str, list[dict[str, Any]]] = json.loads(file.read_text("utf-8"))["cases"]
    return cases

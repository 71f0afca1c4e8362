"""What all tests share: where real weights and shared data are, and the oracle, loaded once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # see octavo.cli; before anything loads NumPy

import pytest

from octavo.loading.resolve import resolve
from tests.gguf_oracle import load_oracle

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Ctrl-C works: a shell that starts the tests in the background has them, and what they start, ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded default model's file, fetched to the cache on first use."""
    return resolve("smollm2")


@pytest.fixture(scope="session")
def oracle(smollm2_path: Path) -> Any:
    """Transformers' SmolLM2 of the same file, float32, eager attention."""
    return load_oracle(smollm2_path)

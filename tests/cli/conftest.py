"""Running `octavo` inside the test, on a model small enough to follow by eye."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from octavo.cli import main
from octavo.llm import LLM

from . import tiny


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


Octavo = Callable[..., Ran]


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Octavo:
    """Runs a command line; `stdin` is piped in."""

    def run(*arguments: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def alphabet(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every model is the alphabet; set "template" to None for one without a chat template. Has the LLMs made."""
    options: dict[str, Any] = {"template": tiny.TEMPLATE, "made": []}

    def load(model: object, config: Any) -> Any:
        made = tiny.engine(config, template=options["template"])
        options["made"].append(made)
        return made

    monkeypatch.setattr("octavo.llm.load_engine", load)
    monkeypatch.setattr("octavo.async_llm.load_engine", load)
    return options


@pytest.fixture
def llm(alphabet: dict[str, Any]) -> LLM:
    """An LLM on the alphabet."""
    return LLM("alphabet")

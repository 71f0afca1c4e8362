"""What the documents show works, and what they name is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from .conftest import Octavo

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/server.md")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.usefixtures("alphabet")
def test_the_readme_s_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    sync, asynchronous, _ = blocks("python")  # the third is run by tests/server/test_clients.py
    exec(compile(sync, "README.md", "exec"), {})
    assert "prefix cache" in capsys.readouterr().out
    exec(compile(asynchronous, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("tuvwxyz\n")


def test_the_readme_s_commands_are_understood(octavo: Octavo) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if "bin/octavo" in line]
    assert len(commands) >= 6
    for line in commands:
        ran = octavo(*shlex.split(line, comments=True)[1:], "--help")
        assert ran.code == 0, ran.err


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_are_there(document: str) -> None:
    text = re.sub(r"https?://\S+", "", (ROOT / document).read_text())
    named = set(re.findall(r"(?<![\w/.])([\w-]+(?:/[\w.-]+)*\.(?:py|md|svg))\b", text))
    places = (ROOT, ROOT / "src/octavo", ROOT / "src/octavo/models", ROOT / "src/octavo/ops", ROOT / "docs")
    places += (ROOT / "src/octavo/server", ROOT / "src/octavo/lab")
    missing = [name for name in named if not any((place / name).is_file() for place in places)]
    assert named
    assert not missing

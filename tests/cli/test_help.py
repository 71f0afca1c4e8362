"""Every command and option explains itself, quickly."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from octavo.cli.app import app

from .conftest import Octavo

TOP: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
# A group's commands are there by both words, as they are typed.
COMMANDS = TOP | {
    f"{name} {inner}": command for name in TOP for inner, command in getattr(TOP[name], "commands", {}).items()
}


def test_all_commands_are_there() -> None:
    assert sorted(TOP) == ["batch", "chat", "demo", "generate", "lab", "models", "plan", "serve", "top"]
    assert sorted(set(COMMANDS) - set(TOP)) == ["lab report", "lab run", "lab simulate"]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_explained_and_every_command_has_an_example(name: str) -> None:
    command = COMMANDS[name]
    shown = CliRunner().invoke(app, [*name.split(), "--help"], terminal_width=200).output
    assert f"octavo {name}" in command.help
    assert "Example" in command.help
    for parameter in command.params:
        assert parameter.help, f"{name} {parameter.name}"
        assert (parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar) in shown


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_are_command_lines_that_are_understood(name: str, octavo: Octavo) -> None:
    import shlex

    for line in COMMANDS[name].help.splitlines():
        if line.strip().startswith("octavo "):
            words = shlex.split(line.split(">")[0])[1:]
            ran = octavo(*words, "--help")  # an option that there is not is refused even so
            assert ran.code == 0, ran.err


def test_every_file_of_the_command_line_says_what_it_must_not_know() -> None:
    import ast
    from pathlib import Path

    import octavo.cli

    docs = {p.name: ast.get_docstring(ast.parse(p.read_text())) for p in Path(octavo.cli.__file__).parent.glob("*.py")}
    assert not [name for name, text in docs.items() if "Knows" not in (text or "")]


def test_version_and_no_command_at_all(octavo: Octavo) -> None:
    from octavo import __version__

    assert octavo("--version").out == f"octavo {__version__}\n"
    ran = octavo()
    assert ran.code == 0
    assert all(name in ran.out for name in TOP)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom octavo.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'numpy', 'tokenizers', 'jinja2', 'gguf', 'huggingface_hub', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"

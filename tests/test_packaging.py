"""What a user gets on installing and importing: little, quickly, and nothing that only the tests need."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points, requires, version
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parent.parent
TEST_ONLY = ("torch", "transformers", "hypothesis", "pytest", "sentencepiece")

# VmHWM and not ru_maxrss, which a process inherits from the one that started it.
MEASURE = """
import json, pathlib, sys, time
begin = time.perf_counter()
import octavo
seconds = time.perf_counter() - begin
modules = sorted(sys.modules)
kib = int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
print(json.dumps({"seconds": seconds, "mib": kib / 1024, "modules": modules}))
"""


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_import_is_light() -> None:
    measured = json.loads(python(MEASURE))
    assert not {"numpy", "tokenizers", "jinja2", "gguf", "rich", "typer", *TEST_ONLY} & set(measured["modules"])
    assert measured["seconds"] < 0.3
    assert measured["mib"] < 60


@pytest.mark.parametrize("name", sorted(octavo.__all__))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(octavo, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        octavo.nonsense  # noqa: B018


def test_nothing_at_run_time_imports_what_only_the_tests_have() -> None:
    pattern = re.compile(rf"^\s*(?:import|from)\s+({'|'.join(TEST_ONLY)})\b", re.MULTILINE)
    found = {str(path): m[1] for path in ROOT.glob("src/**/*.py") if (m := pattern.search(path.read_text()))}
    assert not found
    needed = [name for name in requires("octavo") or [] if "extra ==" not in name]
    assert not [name for name in needed if re.match(rf"({'|'.join(TEST_ONLY)})\b", name)]


def test_the_whole_package_imports_without_torch() -> None:
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(ROOT.glob("src/octavo/**/*.py"))
    ]
    blocked = f"import sys, importlib\nfor name in {TEST_ONLY}: sys.modules[name] = None\n"
    python(blocked + f"for name in {modules}: importlib.import_module(name)")


def test_versions_and_licence_agree() -> None:
    assert version("octavo") == octavo.__version__
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    (script,) = entry_points(group="console_scripts", name="octavo")
    assert script.value == "octavo.cli:main"


def test_every_file_says_what_it_is_for() -> None:
    silent = [str(path) for path in ROOT.glob("src/**/*.py") if not path.read_text().startswith('"""')]
    assert not silent


def test_a_workload_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text('{"name": "x", "requests": [1]}')
    (tmp_path / "cut.json").write_text("{")
    for file, words in (("missing.json", "cannot be read"), ("wrong.json", "no workload"), ("cut.json", "not JSON")):
        command = [sys.executable, ROOT / "benchmarks/run.py", "smollm2", tmp_path / file]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert words in done.stderr


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "apt-get install python3 python3-venv"),
        ("case $2 in *version_info*) exit 1;; esac; echo Python 3.9.2", "needs Python 3.10 or newer"),
        ("case $2 in *ensurepip*) exit 1;; esac", "apt-get install python-fake-venv"),
    ],
)
def test_make_says_what_is_missing(tmp_path: Path, script: str | None, words: str) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    if script is not None:
        (tmp_path / "python-fake").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python-fake").chmod(0o755)
    command = ["make", "demo", f"PYTHON={tmp_path / 'python-fake'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert words in done.stderr
    assert not list(tmp_path.glob(".venv/installed"))

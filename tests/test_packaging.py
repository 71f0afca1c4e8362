"""What a user gets on installing and importing: little, quickly, and nothing that only the tests need."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution, entry_points, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    assert "octavo._native" not in measured["modules"]  # it comes with the first engine
    assert measured["seconds"] < 0.3
    assert measured["mib"] < 60


def test_an_install_takes_less_than_150_mb() -> None:
    sizes: dict[str, int] = {}

    def add(name: str) -> None:
        if canonicalize_name(name) not in sizes:
            found = distribution(name)
            files = [Path(str(file.locate())) for file in found.files or []]
            sizes[canonicalize_name(name)] = sum(file.stat().st_size for file in files if file.is_file())
            for needed in map(Requirement, found.requires or []):
                if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                    add(needed.name)

    add("octavo")
    # An editable install leaves the Python files where they are; bytecode doubles them.
    sizes["octavo"] += 2 * sum(file.stat().st_size for file in ROOT.glob("src/octavo/**/*.py"))
    assert {"octavo", "numpy", "tokenizers"} <= sizes.keys()
    assert not set(TEST_ONLY) & sizes.keys()
    assert sum(sizes.values()) < 150e6, sorted(sizes.items(), key=lambda size: -size[1])


BUILD = """
import sys
from scikit_build_core import build
build.build_sdist(sys.argv[1])
build.build_wheel(sys.argv[1])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel, made in build/ as `make` does: little is compiled again."""
    pytest.importorskip("scikit_build_core", reason="make installs the build tools")
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run([sys.executable, "-c", BUILD, folder], cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def files_below(*folders: str) -> set[str]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in paths if path.suffix not in (".pyc", ".so")}


def test_the_source_distribution_holds_what_a_wheel_is_made_of(built: Path) -> None:
    with tarfile.open(next(built.glob("octavo-*.tar.gz"))) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert {"pyproject.toml", "LICENSE", "README.md", "native/CMakeLists.txt", "native/src/kernels.cpp"} <= names
    assert files_below("src", "native") <= names
    assert not [name for name in names if re.match(r"(build|dist|\.venv)/|\.git/|.*\.(so|gguf|safetensors)$", name)]


def test_the_wheel_holds_the_package_and_its_module_only(built: Path) -> None:
    (wheel,) = built.glob("octavo-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (module,) = [name for name in names if name.endswith(".so")]
        assert [name for name in archive.namelist() if name.endswith("dist-info/licenses/LICENSE")]
    assert re.fullmatch(r"octavo/_native\.[a-z0-9_.-]+\.so", module)
    assert names - {module} == {name.removeprefix("src/") for name in files_below("src")}
    assert not wheel.name.endswith("-any.whl")


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
        ("case $2 in *Python.h*) exit 1;; esac", "apt-get install python-fake-dev"),
        ("exit 0", "apt-get install g++"),
    ],
)
def test_make_says_what_is_missing(tmp_path: Path, script: str | None, words: str) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    if script is not None:
        (tmp_path / "python-fake").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python-fake").chmod(0o755)
    # A shell and make, and nothing else: no compiler either.
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "make", "rm"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    command = ["make", "demo", f"PYTHON={tmp_path / 'python-fake'}"]
    environment = {"PATH": str(tmp_path / "bin")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert words in done.stderr
    assert not list(tmp_path.glob(".venv/installed"))

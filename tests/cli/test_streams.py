"""Streams that are closed, full, odd or no text: one sentence, never a traceback, never a wait without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Octavo

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import octavo.llm
from octavo.cli import main
from tests.cli import tiny
octavo.llm.load_engine = lambda model, config: tiny.engine(config)
main(sys.argv[1:])
"""
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def shell(words: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell line in which `octavo` is the real process, on the alphabet."""
    line = f'octavo() {{ "$PYTHON" -c "$SCRIPT" "$@"; }}; {words}'
    environment = {**os.environ, "PYTHON": sys.executable, "SCRIPT": SCRIPT}
    command = ["sh", "-c", line, "sh", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("octavo generate w >&-", 0, ""),
        ("octavo generate w <&-", 0, ""),
        ("octavo generate <&-", 2, "There is no prompt"),
        ("octavo generate w 2>&-", 0, ""),
        ("octavo generate w >&- <&- 2>&-", 0, ""),
        pytest.param("octavo generate w >/dev/full", 1, "No space left on device", marks=needs_full),
        pytest.param(
            "octavo generate w --json >/dev/full",
            1,
            "No space left on device",
            marks=needs_full,
        ),
        pytest.param("octavo --help >/dev/full", 1, "No space left on device", marks=needs_full),
        pytest.param("octavo nonsense 2>/dev/full", 2, "", marks=needs_full),
        ("octavo generate a b c -n 9 --json | true", 0, ""),
        ("printf 'a\\377' | octavo generate", 2, "Standard input is not UTF-8 text: byte 1"),
        ("printf 'a\\377' | LC_ALL=C octavo generate", 2, "Standard input is not UTF-8 text"),
        ("printf 'a\\n\\377\\n' | octavo chat", 2, "Standard input is not UTF-8 text"),
        ("octavo generate \"a$(printf '\\377')\"", 2, "The argument 'a\\udcff' is not UTF-8 text: character 2"),
        ("octavo generate a --stop \"$(printf '\\377')\"", 2, "The argument '\\udcff' is not UTF-8 text"),
    ],
)
def test_standard_streams(line: str, code: int, words: str) -> None:
    ran = shell(line)
    assert ran.returncode == code, ran.stderr
    assert words in ran.stderr
    assert ran.stderr.count("\n") == (1 if words else 0)


@pytest.mark.usefixtures("alphabet")
class TestFiles:
    """Input and output of a batch, and files of prompts."""

    @pytest.mark.parametrize("odd", ["fifo", "/dev/null", "/dev/full"])
    def test_a_batch_goes_only_from_and_to_regular_files(self, octavo: Octavo, tmp_path: Path, odd: str) -> None:
        file = tmp_path / "in.jsonl"
        file.write_text('{"prompt": "w"}\n')
        if odd == "fifo":
            odd = str(tmp_path / "fifo")
            os.mkfifo(odd)
        elif not Path(odd).exists():
            pytest.skip(f"this system has no {odd}")
        for command in (["batch", odd, "-o", str(tmp_path / "out")], ["batch", str(file), "-o", odd]):
            ran = octavo(*command)
            assert (ran.code, ran.err.count("\n")) == (2, 1)
            assert f"{odd} is not a regular file" in ran.err

    def test_a_disk_that_is_full_while_a_batch_writes(self, tmp_path: Path) -> None:
        file, out = tmp_path / "in.jsonl", tmp_path / "out"
        file.write_text('{"prompt": "w"}\n' * 9)
        ran = shell('ulimit -f 1; trap "" XFSZ; octavo batch "$1" -o "$2"', str(file), str(out))
        assert ran.returncode == 1
        assert f"{out} cannot be read or written: File too large." in ran.stderr
        assert ran.stderr.count("\n") == 1
        again = shell('octavo batch "$1" -o "$2"', str(file), str(out))
        assert again.returncode == 0
        assert [json.loads(line)["line"] for line in out.read_text().splitlines()] == list(range(9))

    @pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="this system has no /proc")
    def test_a_file_that_cannot_be_read_is_named(self, octavo: Octavo, tmp_path: Path) -> None:
        for command in (["generate", "-f"], ["batch", "-o", str(tmp_path / "out")]):
            ran = octavo(*command, "/proc/self/mem")
            assert (ran.code, ran.err.count("\n")) == (1, 1)
            assert "/proc/self/mem cannot be read or written: Input/output error." in ran.err

    @pytest.mark.parametrize("flags", ["--num-blocks 2147483647", "--swap-memory 9000TiB"])
    def test_memory_that_no_machine_has(self, octavo: Octavo, flags: str) -> None:
        ran = octavo("generate", "w", *flags.split())
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert "more than this machine can give" in ran.err

"""The command itself, in a process of its own, on the real default model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def octavo(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the installed command; fails the test if the command fails."""
    command = str(Path(sys.executable).with_name("octavo"))
    done = subprocess.run([command, *arguments], input=stdin, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.usefixtures("smollm2_path")
def test_generate_answers_a_question() -> None:
    done = octavo("generate", "Complete: The capital of France is", "--temperature", "0", "--max-tokens", "16")
    assert "Paris" in done.stdout


@pytest.mark.usefixtures("smollm2_path")
def test_batch_answers_as_generate_does(tmp_path: Path) -> None:
    texts = ["What is the capital of France?", "What is water made of?"]
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts))
    flags = ["--temperature", "0", "--max-tokens", "8"]
    octavo("batch", str(file), *flags, "--max-num-seqs", "2", "--block-size", "4")
    batched = [json.loads(line)["completions"] for line in (tmp_path / "in.results.jsonl").read_text().splitlines()]
    alone = [
        json.loads(line)["completions"] for line in octavo("generate", *texts, *flags, "--json").stdout.splitlines()
    ]
    assert batched == alone

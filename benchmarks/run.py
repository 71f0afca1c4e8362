"""Run workloads on Octavo and print one JSON line each, the line that every engine's runner prints.

    python benchmarks/run.py MODEL WORKLOAD.json... [--setting value]...

`seconds` runs from handing in all requests to the last token; loading and one warm-up are outside it. After the shared
keys come `weights_mib` (the model's files), `kv_mib` (the pool of KV blocks) and `kv_type` (what they hold). The pool
holds the largest of the workloads in full, and no more, unless --kv-memory says otherwise. Machines are noisy:
compare.py takes turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo import LLM, EngineConfig, OctavoError, SamplingParams
from octavo.llm import make_config
from octavo.loading.resolve import resolve
from workload import WARM_UP, BadWorkloadError, Request, Workload, read, result_line


def main() -> None:
    """Load the model once, warm it up, run each workload. What cannot be run is one sentence, and exit code 2."""
    try:
        model, works, settings = command_line()
        begin = time.perf_counter()
        llm = LLM(model, **settings)
        load_seconds = time.perf_counter() - begin
        sizes = memory_sizes(llm, resolve(model))
        run(llm, WARM_UP.requests)
        for work in works:
            line = result_line("octavo", work.name, *run(llm, work.requests), load_seconds)
            print(json.dumps(line | sizes), flush=True)
    except (OctavoError, BadWorkloadError) as problem:
        print(f"run.py: {problem}", file=sys.stderr)
        sys.exit(2)


def command_line(description: str | None = __doc__) -> tuple[str, list[Workload], dict[str, Any]]:
    """The model, workloads and settings asked for; a pool as large as the workloads need, unless one is given."""
    settings = vars(arguments(description).parse_args())
    model, paths = settings.pop("model"), settings.pop("workloads")
    works = [read(path) for path in paths]
    if "kv_memory" not in settings:
        settings["num_blocks"] = blocks_of(works, make_config(None, settings))
    return model, works, settings


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The command line: settings are EngineConfig's, and those not given are left to it."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", help="a built-in name, a GGUF file, a model folder or a Hugging Face id")
    parser.add_argument("workloads", nargs="+", type=Path, metavar="WORKLOAD.json")
    parser.add_argument("--backend", help="reference or native")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-dtype", help="element type of keys and values")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction)
    parser.add_argument("--prefault", action=argparse.BooleanOptionalAction, help="take all KV memory while loading")
    parser.add_argument("--kv-memory", help="such as 4GiB; default: what the largest workload needs")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--max-batched-tokens", type=int, help="default: 2048, as for the other engines")
    parser.add_argument("--max-num-seqs", type=int, help="default: 256, as for the other engines")
    return parser


def blocks_of(works: Sequence[Workload], config: EngineConfig) -> int:
    """KV blocks for the largest workload, with as many requests at once as may run, and one to spare for each."""
    limit = config.sequence_limit
    needs = [
        sorted((r.num_blocks(config.block_size) + r.n for r in work.requests), reverse=True)
        for work in [WARM_UP, *works]
    ]
    return max(sum(need[:limit]) for need in needs)


def memory_sizes(llm: LLM, path: Path) -> dict[str, Any]:
    """MiB of the model's files and of the KV pool, and its type: what a peak of memory is to be measured against."""
    files = [*path.glob("*.safetensors")] if path.is_dir() else [path]
    report = llm.memory_report()
    return {
        "weights_mib": round(sum(file.stat().st_size for file in files) / 2**20),
        "kv_mib": round(report.num_blocks * report.block_bytes / 2**20),
        "kv_type": report.kv_type,
    }


def run(llm: LLM, requests: Sequence[Request]) -> tuple[int, float, list[float]]:
    """Answer the requests: (tokens made, seconds it took, seconds to each request's first token)."""
    params = [SamplingParams(temperature=0, max_tokens=r.max_tokens, n=r.n, ignore_eos=True) for r in requests]
    begin = time.perf_counter()
    outputs = llm.generate([request.prompt_token_ids for request in requests], params)
    seconds = time.perf_counter() - begin
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
    return tokens, seconds, [o.timings.first_token - begin for o in outputs if o.timings.first_token is not None]


if __name__ == "__main__":
    main()

"""What serving costs: a workload by streaming HTTP clients and by the Python API, in turns on the same machine.

    python benchmarks/serving.py MODEL WORKLOAD.json [--rounds 3] [--page]

Every request of the workload is a client of its own that streams from /v1/completions. Prints one JSON line a run, and
the ratio of the medians of tokens a second. With --page a memory page is open meanwhile (its stream is read). The
clients run on this machine too, and `client_cpu` tells what they take of it: they are not the server's cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo import LLM, OctavoError, SamplingParams
from workload import WARM_UP, BadWorkloadError, Workload, read

HOST = "127.0.0.1"


def main() -> None:
    """Load the model twice, here and in a server, and let both do the work in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("workload", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="keep a memory page open")
    asked = parser.parse_args()
    try:
        work = read(asked.workload)
        llm = LLM(asked.model)
        with server(asked.model) as (port, process):
            rates = compare(llm, port, process, work, asked.rounds, asked.page)
    except (OctavoError, BadWorkloadError) as problem:
        print(f"serving.py: {problem}", file=sys.stderr)
        sys.exit(2)
    ratio = statistics.median(rates["server"]) / statistics.median(rates["python"])
    print(f"server / Python API: {ratio:.3f}, {work.name}, medians of {asked.rounds}")


def compare(llm: LLM, port: int, process: int, work: Workload, rounds: int, page: bool) -> dict[str, list[float]]:
    """Tokens a second of each way in each round."""
    rates: dict[str, list[float]] = {"python": [], "server": []}
    for turn in range(-1, rounds):  # the first warms up both
        asked = work if turn >= 0 else WARM_UP
        for way in ("python", "server"):
            cpu, server_cpu = time.process_time(), cpu_seconds(process)
            if way == "python":
                tokens, seconds = by_python(llm, asked, salt=f"turn {turn}")
            else:
                tokens, seconds = asyncio.run(by_http(port, asked, f"turn {turn}", page))
            if turn >= 0:
                rates[way].append(tokens / seconds)
                line: dict[str, Any] = {"way": way, "tok_s": round(tokens / seconds, 1), "seconds": round(seconds, 2)}
                if way == "server":
                    line["client_cpu"] = round((time.process_time() - cpu) / seconds, 3)
                    line["server_cpu"] = round((cpu_seconds(process) - server_cpu) / seconds, 3)
                print(json.dumps(line), flush=True)
    return rates


def by_python(llm: LLM, work: Workload, salt: str) -> tuple[int, float]:
    """(answer tokens, seconds)."""
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=r.max_tokens, n=r.n) for r in work.requests]
    begin = time.perf_counter()
    outputs = llm.generate([r.prompt_token_ids for r in work.requests], params, cache_salt=salt)
    return sum(len(c.token_ids) for o in outputs for c in o.completions), time.perf_counter() - begin


async def by_http(port: int, work: Workload, salt: str, page: bool) -> tuple[int, float]:
    """(answer tokens, seconds)."""
    watching = asyncio.create_task(watch(port)) if page else None
    begin = time.perf_counter()
    counts = await asyncio.gather(*(ask(port, r.prompt_token_ids, r.max_tokens, r.n, salt) for r in work.requests))
    seconds = time.perf_counter() - begin
    if watching is not None:
        watching.cancel()
    return sum(counts), seconds


async def ask(port: int, prompt: list[int], max_tokens: int, n: int, salt: str) -> int:
    """Stream one answer; returns how many tokens the server says it has."""
    body = json.dumps(
        {
            "model": "benchmark",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "n": n,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    tail = b""
    while piece := await reader.read(2**16):
        tail = (tail + piece)[-4096:]
    writer.close()
    found = re.search(rb'"completion_tokens":(\d+)', tail)
    if found is None or b"[DONE]" not in tail:
        raise OctavoError(f"The server ended a stream with {tail[-300:]!r}.")
    return int(found[1])


async def watch(port: int) -> None:
    """Read what a memory page reads."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**24)
    writer.write(f"GET /memory/events HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
    try:
        while await reader.read(2**20):
            pass
    finally:
        writer.close()


@contextmanager
def server(model: str) -> Iterator[tuple[int, int]]:
    """A server on this machine: its port and its process."""
    start = "from octavo.cli import main; main()"
    command = [sys.executable, "-c", start, "serve", model, "--port", "0", "--served-model-name", "benchmark"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"serving .* at http://[^ ]*:(\d+) ", line):
                break
        else:
            raise OctavoError("The server did not start.")
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield int(found[1]), process.pid
    finally:
        process.terminate()
        process.wait()
    drain.wait()


def cpu_seconds(process: int) -> float:
    """Processor time a process has taken so far (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

"""What serving costs: a workload by streaming HTTP clients and by the Python API, in turns on the same machine.

    python benchmarks/serving.py MODEL WORKLOAD.json [--rounds 3] [--page]

Every request of the workload is a client of its own that streams from /v1/completions. Prints one JSON line a run, and
the ratio of the medians of tokens a second. With --page a memory page is open meanwhile (its stream is read). The
clients run on this machine too, and `client_cpu` tells what they take of it: they are not the server's cost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any, cast

from octavo import LLM, OctavoError, SamplingParams
from workload import WARM_UP, BadWorkloadError, Request, Workload, read

HOST = "127.0.0.1"
PAGE = f"GET /memory/events HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()  # what a memory page reads all the time


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
                tokens, seconds = by_http(port, asked, f"turn {turn}", page)
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


def by_http(port: int, work: Workload, salt: str, page: bool) -> tuple[int, float]:
    """(answer tokens, seconds). One thread reads from whichever client has something: what it takes of the machine is
    little, and none of the server's."""
    begin = time.perf_counter()
    with ExitStack() as stack, DefaultSelector() as ready:
        clients = [stack.enter_context(asking(port, post(request, salt))) for request in work.requests]
        ends = dict.fromkeys(clients, b"")
        for client in clients:
            ready.register(client, EVENT_READ)
        if page:
            ready.register(stack.enter_context(asking(port, PAGE)), EVENT_READ)
        unfinished = len(clients)
        while unfinished:
            for key, _ in ready.select():
                client = cast(socket.socket, key.fileobj)
                piece = client.recv(2**16)
                if client in ends:
                    ends[client] = (ends[client] + piece)[-4096:]
                if not piece:
                    ready.unregister(client)
                    unfinished -= client in ends
    return sum(map(tokens_told, ends.values())), time.perf_counter() - begin


def asking(port: int, request: bytes) -> socket.socket:
    """A client that has sent its request."""
    client = socket.create_connection((HOST, port))
    client.sendall(request)
    return client


def post(request: Request, salt: str) -> bytes:
    """A request to stream an answer, as it goes over the wire."""
    body = json.dumps(
        {
            "model": "benchmark",
            "prompt": request.prompt_token_ids,
            "max_tokens": request.max_tokens,
            "n": request.n,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def tokens_told(end: bytes) -> int:
    """How many tokens the server says, at a stream's end, that the answer has."""
    found = re.search(rb'"completion_tokens":(\d+)', end)
    if found is None or b"[DONE]" not in end:
        raise OctavoError(f"The server ended a stream with {end[-300:]!r}.")
    return int(found[1])


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

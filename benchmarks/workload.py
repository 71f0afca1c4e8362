"""What every engine is given to do, and the line that says how it went. Knows no engine.

A workload is JSON, {"name", "requests": [{"prompt_token_ids": [int], "max_tokens": int, "n": int}]}: all requests are
handed in at once, are greedy and ignore end-of-sequence, so that every engine does the same work.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BadWorkloadError(ValueError):
    """A file that is no workload; the message is for people."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how much of an answer is wanted."""

    prompt_token_ids: list[int]
    max_tokens: int
    n: int = 1

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that all its answers hold at their ends, if they share none."""
        return self.n * -(-(len(self.prompt_token_ids) + self.max_tokens) // block_size)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to be answered together."""

    name: str
    requests: list[Request]


WARM_UP = Workload("warm-up", [Request(list(range(2000, 2064)), 8)])  # what every engine answers before the clock runs


def read(path: Path) -> Workload:
    """The workload in a file. Raises BadWorkloadError if there is none."""
    try:
        work = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise BadWorkloadError(f"The workload {path} cannot be read: {problem.strerror}.") from None
    except ValueError as problem:
        raise BadWorkloadError(f"The workload {path} is not JSON: {problem}.") from None
    try:
        requests = [Request(r["prompt_token_ids"], r["max_tokens"], r.get("n", 1)) for r in work["requests"]]
        fits = (
            isinstance(work["name"], str) and requests and all(isinstance(r.prompt_token_ids, list) for r in requests)
        )
    except (KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise BadWorkloadError(
            f'{path} is no workload; one is {{"name", "requests": [{{"prompt_token_ids", "max_tokens"}}]}}.'
        )
    return Workload(work["name"], requests)


def result_line(
    engine: str, name: str, output_tokens: int, seconds: float, first: Sequence[float], load_seconds: float
) -> dict[str, Any]:
    """The result, with the keys that the runners of all engines print as one line of JSON.

    `first` are the seconds from handing in to each request's first token.
    """
    return {
        "engine": engine,
        "workload": name,
        "output_tokens": output_tokens,
        "seconds": round(seconds, 3),
        "tok_s": round(output_tokens / seconds, 1),
        "ttft_ms_mean": round(1e3 * sum(first) / len(first), 1) if first else None,
        "load_s": round(load_seconds, 2),
        "rss_mib": round(peak_resident_bytes() / 2**20),
    }


def peak_resident_bytes() -> int:
    """The most memory this process ever held.

    Linux's own count for the program that runs now; getrusage would add what its parent held when it started it.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

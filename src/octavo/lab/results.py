"""What a run of the lab leaves: one JSON file that says all about it. Plain data; knows no strategy and no figures.

The same seed, commit and work give the same simulated file, byte for byte: nothing in it reads a clock.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
    # Where the engine's time went; files of before have none of these.
    prompt_seconds: float = 0.0  # in steps that computed prompt tokens
    decode_seconds: float = 0.0  # in all others
    decode_steps: int = 0  # those others
    decode_batch: float = 0.0  # sequences in one of them, on average


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
    repeats: list[float] = field(default_factory=list)  # throughput of each time it was run, if more than once; this
    # is the run of their median


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
    """Write a result, whole or not at all; the same one always gives the same bytes."""
    text = json.dumps(asdict(result), sort_keys=True, separators=(",", ":"), allow_nan=False)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path) -> Result:
    """Read a result. Raises RequestError, naming the file and the place in it, for one that is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
        json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair can be escaped in JSON, not shown
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is no result of octavo lab: it is not JSON ({error}).") from None
    if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
        raise RequestError(f"{path} has the format {data['format']!r}; this version reads {FORMAT}.")
    try:
        result: Result = _made(Result, data, "")
        _check(result)
    except _DamagedError as error:
        raise RequestError(f"{path} is no result of octavo lab: {error}.") from None
    return result


# --- what is read from a file, which anybody may have written --------------------------------------------------------


class _DamagedError(Exception):
    """Where in the file something is not what it must be."""


def _made(kind: Any, value: Any, where: str) -> Any:
    """The value as `kind`, a type that one of the classes above names. Raises _DamagedError."""
    if is_dataclass(kind):
        return _object(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value in arguments:
            return value
        raise _DamagedError(f"{where} is {_shown(value)}; it must be {' or '.join(map(repr, arguments))}")
    if origin is UnionType:  # a figure or none
        return None if value is None else _made(arguments[0], value, where)
    if kind is float and type(value) in (int, float) and abs(value) < math.inf:
        return value
    if kind is not float and type(value) is (origin or kind):
        if origin is list and arguments[0] in (int, float):  # long ones: only a wrong one needs its place
            wanted = (int, float) if arguments[0] is float else (int,)
            if all(type(one) in wanted and abs(one) < math.inf for one in value):
                return value
        if origin is list:
            return [_made(arguments[0], one, f"{where}[{place}]") for place, one in enumerate(value)]
        if origin is dict and arguments[1] is not Any:
            return {name: _made(arguments[1], one, f"{where}.{name}") for name, one in value.items()}
        return value
    raise _DamagedError(f"{where} is {_shown(value)}; it must be {_WORDS[origin or kind]}")


_WORDS = {int: "a whole number", float: "a finite number", str: "text", dict: "an object", list: "a list"}


def _object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _DamagedError(f"{where or 'it'} is {_shown(value)}; it must be an object")
    types, before = _types(kind), f"{where}." if where else ""
    for name in value:
        if name not in types:
            raise _DamagedError(f"there is no {before}{name} in this format")
    for one in fields(kind):
        if one.name not in value and one.default is MISSING and one.default_factory is MISSING:
            raise _DamagedError(f"{before}{one.name} is missing")
    return kind(**{name: _made(types[name], one, f"{before}{name}") for name, one in value.items()})


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _check(result: Result) -> None:
    """What the types do not say, and figures rely on."""
    if result.pool_slots < 1:
        raise _DamagedError(f"pool_slots is {result.pool_slots}; it must be at least 1")
    if type(result.model.get("token_bytes", 0)) is not int:
        raise _DamagedError(f"model.token_bytes is {_shown(result.model['token_bytes'])}; it must be a whole number")
    for place, run in enumerate(result.runs):
        if not run.rate > 0:
            raise _DamagedError(f"runs[{place}].rate is {run.rate}; it must be above 0")
        if len({len(values) for values in asdict(run.series).values()}) > 1:
            raise _DamagedError(f"runs[{place}].series has lists of different lengths")
        if any(piece.slots < 0 for piece in run.map) or sum(piece.slots for piece in run.map) > result.pool_slots:
            raise _DamagedError(f"runs[{place}].map does not share out the pool's {result.pool_slots:,} slots")
    for place, sweep in enumerate(result.sweeps):
        if any(len(values) != len(sweep.x) for values in sweep.series.values()):
            raise _DamagedError(f"sweeps[{place}] has lists of different lengths")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

"""Traces of real traffic, and files like them, as the lab's work. Knows their formats, and no engine.

A file is CSV with a header, or JSONL (told by its first character), with the columns of either published trace:

    TIMESTAMP, ContextTokens, GeneratedTokens    a date and time, or seconds: Azure LLM inference trace
    timestamp, input_length, output_length       milliseconds: Mooncake

and, where the file has them, `hash_ids` (JSONL: the identity of each 512-token block of the prompt, of which equal ones
are equal tokens) and `max_tokens` (what the request said its answer may have). Other columns are passed over. A prompt
without hash_ids shares nothing with any other: Azure's trace does not tell, so sharing is not assumed.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, BinaryIO

from octavo.errors import RequestError
from octavo.lab.work import Arrival, Segment, Work

HASH_BLOCK = 512  # tokens in a block of hash_ids
MAX_TOKENS = 10_000_000  # of a prompt or an answer: beyond any model's context, so that a slip is found at its line
MAX_REQUESTS = 2_000_000  # a trace is sorted in memory
MAX_LINE = 1 << 22  # bytes
_SECOND = 10**9  # of the nanoseconds that times are counted in: a trace may span days and tell hundreds of them
SMALLEST_LIMIT = 256

_SOURCES = {
    "azure_conv_2023": 'Azure LLM inference trace 2023, CC-BY 4.0 (Patel et al., "Splitwise", ISCA 2024)',
    "mooncake_conversation": 'Mooncake trace, Apache-2.0 (Qin et al., "Mooncake", FAST 2025)',
}
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,12}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d{1,18}(?:\.0+)?", re.ASCII)


def assumed_max_tokens(output_tokens: int) -> int:
    """The limit a request is assumed to have named: the next of 256, 512, 1024, 2048, ... that its answer fits in.

    No published trace tells. Clients set round limits, and an answer ended within its own, so this is the tightest
    round limit there can have been: what is reserved for it is at most twice the answer, or 256. It flatters
    allocators that reserve by the limit, so that what paging gains over them is not made by the assumption.
    """
    return max(SMALLEST_LIMIT, 1 << (output_tokens - 1).bit_length())


def read(path: str | Path, *, limit: int | None = None, seconds: float | None = None) -> Work:
    """The requests of a trace in the order of their arrival, the first at 0 seconds.

    limit: only so many, from the first on
    seconds: only those of so many first seconds

    Raises RequestError, which names the file, the line and the column, for what cannot be read.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise RequestError(f"limit is {limit}; it must be at least 1, or None for the whole trace.")
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise RequestError(f"seconds is {seconds}; it must be above 0, or None for the whole trace.")
    try:
        with path.open("rb") as opened:
            rows = _read_rows(path, opened)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not rows:
        raise RequestError(f"{path} has no requests; a line for each is needed, with {_wanted()}.")
    _require_one_clock(path, rows)
    rows.sort(key=lambda row: row.at)  # stable: logs are written as requests end, or by several writers
    first = rows[0].at
    kept = rows if seconds is None else [row for row in rows if row.at - first < seconds * _SECOND]
    numbers = _Numbers()
    arrivals = tuple(_arrival(row, first, numbers) for row in kept[:limit])
    name, file = (text.encode(errors="replace").decode() for text in (path.stem, path.name))  # names need not be UTF-8
    return Work(name, _SOURCES.get(name, file), arrivals)


def _require_one_clock(path: Path, rows: list[_Row]) -> None:
    """Dates count from the year 1, numbers from 0: between them lie two thousand years of nothing."""
    if len({row.dated for row in rows}) > 1:
        dated = sum(row.dated for row in rows)
        raise RequestError(
            f"{path} tells {dated:,} times as a date and {len(rows) - dated:,} as a number; one of the two would work."
        )


# --- columns ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Names:
    """How a trace calls its columns, and the unit of a time that is a plain number."""

    time: str
    prompt: str
    output: str
    unit: str
    nanoseconds: int  # in the unit

    @property
    def all(self) -> tuple[str, str, str]:
        return self.time, self.prompt, self.output


_KNOWN = (
    _Names("TIMESTAMP", "ContextTokens", "GeneratedTokens", "seconds", _SECOND),
    _Names("timestamp", "input_length", "output_length", "milliseconds", 10**6),
)


def _wanted() -> str:
    return " or ".join(", ".join(names.all) for names in _KNOWN)


def _names(found: list[str], where: str) -> _Names:
    for names in _KNOWN:
        if set(names.all) <= set(found):
            for name in names.all:
                if found.count(name) > 1:
                    raise RequestError(f"{where}: there are {found.count(name)} columns {name}; one would work.")
            return names
    shown = ", ".join(repr(name[:40]) for name in found[:8]) or "nothing"
    raise RequestError(f"{where}: the columns are {shown}; {_wanted()} would work.")


@dataclass(frozen=True, slots=True)
class _Row:
    """A request as the file tells of it."""

    at: int  # nanoseconds, from wherever the file counts
    dated: bool  # it is a date and time, not a number
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None
    hash_ids: list[int] | None


def _row(values: dict[str, Any], names: _Names, where: str) -> _Row:
    prompt_tokens = _tokens(values, names.prompt, where)
    output_tokens = _tokens(values, names.output, where)
    max_tokens = None
    if values.get("max_tokens") not in (None, ""):
        max_tokens = _tokens(values, "max_tokens", where)
        if max_tokens < output_tokens:
            raise RequestError(
                f"{where}, column max_tokens: {max_tokens} is less than the {output_tokens} tokens of the answer; "
                "leave it empty where it is not known."
            )
    ids = values.get("hash_ids")
    at, dated = _time(values.get(names.time), names, where)
    return _Row(
        at=at,
        dated=dated,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=max_tokens,
        hash_ids=None if ids in (None, "") else _hash_ids(ids, prompt_tokens, where),
    )


def _tokens(values: dict[str, Any], column: str, where: str) -> int:
    value = values.get(column)
    number = _whole(value)
    if number is None or not 1 <= number <= MAX_TOKENS:
        raise RequestError(
            f"{where}, column {column}: {_shown(value)} is no number of tokens; "
            f"a whole number from 1 to {MAX_TOKENS:,} would work."
        )
    return number


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value.strip().partition(".")[0])
    return None


def _time(value: object, names: _Names, where: str) -> tuple[int, bool]:
    """Nanoseconds, and whether they are of a date."""
    stamp = _date(value.strip()) if isinstance(value, str) else None
    dated = stamp is not None
    if stamp is None:
        stamp = _nanoseconds(value, names.nanoseconds)
    if stamp is None:
        raise RequestError(
            f"{where}, column {names.time}: {_shown(value)} is no time; {names.unit} from 0 on, "
            "or a date and time like 2023-11-16 18:15:46.68, would work."
        )
    return stamp, dated


def _nanoseconds(value: object, unit: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    whole = _whole(value)
    try:
        number: int | float = float(value) if whole is None else whole
    except (ValueError, OverflowError):
        return None
    return round(number * unit) if 0 <= number < 1e12 else None


def _date(text: str) -> int | None:
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    zone = (match[8] or "Z").replace(":", "")
    offset = 0 if zone == "Z" else (int(zone[1:3]) * 60 + int(zone[3:])) * (-1 if zone[0] == "-" else 1)
    if hour > 23 or minute > 59 or second > 60:
        return None
    try:
        days = date(year, month, day).toordinal()
    except ValueError:
        return None
    fraction = int((match[7] or "0").ljust(12, "0")[:9])
    return (((days * 24 + hour) * 60 + minute - offset) * 60 + second) * _SECOND + fraction


def _hash_ids(ids: object, prompt_tokens: int, where: str) -> list[int]:
    blocks = -(-prompt_tokens // HASH_BLOCK)
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise RequestError(
            f"{where}, column hash_ids: {_shown(ids)} is no list of whole numbers; JSONL with one for each "
            f"block of {HASH_BLOCK} prompt tokens would work."
        )
    if len(ids) != blocks:
        raise RequestError(
            f"{where}, column hash_ids: there are {len(ids)}; {prompt_tokens:,} prompt tokens in blocks of "
            f"{HASH_BLOCK} need {blocks}."
        )
    return ids


def _shown(value: object) -> str:
    text = "nothing" if value is None or value == "" else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Numbers:
    """Gives out the numbers of segments: one for each identity that a file tells of, a new one for all else."""

    known: dict[tuple[int, int], int] = field(default_factory=dict)
    given: int = 0

    def new(self) -> int:
        self.given += 1
        return self.given - 1

    def of(self, hash_id: int, tokens: int) -> int:
        number = self.known.get((hash_id, tokens))
        if number is None:
            number = self.known[hash_id, tokens] = self.new()
        return number


def _arrival(row: _Row, first: int, numbers: _Numbers) -> Arrival:
    return Arrival(
        at=(row.at - first) / _SECOND,
        prompt=_segments(row, numbers),
        output_tokens=row.output_tokens,
        max_tokens=row.max_tokens or assumed_max_tokens(row.output_tokens),
    )


def _segments(row: _Row, numbers: _Numbers) -> tuple[Segment, ...]:
    if row.hash_ids is None:
        return ((numbers.new(), row.prompt_tokens),)
    left = row.prompt_tokens
    segments: list[Segment] = []
    for hash_id in row.hash_ids:
        tokens = min(HASH_BLOCK, left)
        segments.append((numbers.of(hash_id, tokens), tokens))
        left -= tokens
    return tuple(segments)


# --- files ------------------------------------------------------------------------------------------------------------


def _read_rows(path: Path, file: BinaryIO) -> list[_Row]:
    lines = _Lines(path, file)
    first = lines.peek()
    if first is None:
        raise RequestError(f"{path} is empty; a line for each request is needed, with {_wanted()}.")
    read_rows: Callable[[_Lines], Iterator[tuple[str, dict[str, Any]]]]
    read_rows = _json_rows if first.lstrip().startswith(("{", "[")) else _csv_rows
    rows: list[_Row] = []
    names: _Names | None = None
    for where, values in read_rows(lines):
        if names is None:
            names = _names(list(values), where)
        rows.append(_row(values, names, where))
        if len(rows) > MAX_REQUESTS:
            raise RequestError(f"{path} has more than {MAX_REQUESTS:,} requests; a part of it would work.")
    return rows


class _Lines:
    """The lines of a file one after another, so that one of any size is never in memory at once."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.number = path, 0
        self._file = file
        self._peeked: str | None = None

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.number}"

    def peek(self) -> str | None:
        """The first line that is not blank; None if there is none."""
        for line in self:
            if line.strip():
                self._peeked = line
                return line
        return None

    def __iter__(self) -> Iterator[str]:
        if self._peeked is not None:
            line, self._peeked = self._peeked, None
            yield line
        while line := self._next():
            yield line

    def _next(self) -> str:
        line = self._file.readline(MAX_LINE)
        self.number += bool(line)
        if len(line) == MAX_LINE:
            raise RequestError(f"{self.where} is longer than {MAX_LINE:,} bytes; one request a line would work.")
        try:
            return line.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise RequestError(
                f"{self.where} is not UTF-8: byte {error.start + 1} is 0x{byte:02x}; a file in UTF-8 would work."
            ) from None


def _json_rows(lines: _Lines) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in lines:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "too long or too deep"
            raise RequestError(f"{lines.where} is not JSON ({reason}); one object a line would work.") from None
        if not isinstance(value, dict):
            raise RequestError(f"{lines.where} holds {type(value).__name__}, not an object; one a line would work.")
        yield lines.where, value


def _csv_rows(lines: _Lines) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                _names(header, lines.where)
            elif len(cells) < len(header):
                missing = header[len(cells)]
                raise RequestError(
                    f"{lines.where}, column {missing}: the line ends before it; "
                    f"{len(header)} values separated by commas would work."
                )
            else:
                yield lines.where, dict(zip(header, cells, strict=False))
    except csv.Error as error:
        raise RequestError(f"{lines.where} is not CSV ({error}); values separated by commas would work.") from None

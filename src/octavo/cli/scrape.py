"""A server's /metrics read and understood: the essentials of two moments. Knows HTTP and Prometheus's text, no screen.

Uses the standard library alone, so that `octavo top` comes with the base install.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import SplitResult, urlsplit

from octavo.errors import OctavoError, RequestError

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
MOST_BYTES = 16 * 2**20
BLOCK_STATES = ("shared", "active", "cached", "free")


@dataclass(slots=True)
class Scrape:
    """The figures of one moment, by name and labels."""

    when: float  # time.monotonic()
    samples: dict[str, list[tuple[dict[str, str], float]]]
    ready: bool  # what /health says

    def value(self, name: str, **labels: str) -> float:
        """The sum over the samples with these labels; 0 if there is none."""
        return sum(value for has, value in self.samples.get(f"octavo:{name}", ()) if labels.items() <= has.items())

    def label(self, name: str, label: str) -> str:
        """A label of the first sample; "" if there is none."""
        return next((has.get(label, "") for has, _ in self.samples.get(f"octavo:{name}", ())), "")

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram: values up to each upper bound."""
        found = self.samples.get(f"octavo:{name}_bucket", ())
        return {float(has["le"]): value for has, value in found if "le" in has}


@dataclass(slots=True)
class Latency:
    """Seconds below which half and 95 % of the latencies lay; None: there were none."""

    p50: float | None
    p95: float | None


@dataclass(slots=True)
class Essentials:
    """What `octavo top` shows. Rates are those between two scrapes; latencies are of `window` seconds."""

    model: str
    version: str
    ready: bool
    running: int
    waiting: int
    swapped: int
    tokens_per_second: float | None  # of answers
    prompt_tokens_per_second: float | None
    blocks: dict[str, int]  # by state; together the pool
    pinned: int
    host_blocks_used: int
    utilisation: float
    prefix_hit_rate: float
    preemptions: dict[str, int]  # by kind, since the server's start
    copies: int
    evictions: int
    ttft: Latency
    tpot: Latency
    window: float | None  # None: since the server's start


@dataclass(slots=True)
class Server:
    """Where to ask, and with which key. Raises RequestError for a URL that is none."""

    url: str
    api_key: str = field(default="", repr=False)
    timeout: float = 5.0
    _parts: SplitResult = field(init=False, repr=False)

    def __post_init__(self) -> None:
        url = self.url if "://" in self.url else f"http://{self.url}"
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            usable = False
        if not usable or not url.isascii() or not url.isprintable() or " " in url:
            raise RequestError(f"{self.url!r} is not a server's URL; write it like http://127.0.0.1:8000.")
        if not self.api_key.isascii() or not (self.api_key.isprintable() or not self.api_key):
            raise RequestError("The API key has characters that no HTTP header can carry; give another --api-key.")
        self._parts = parts._replace(path=re.sub(r"/(v1|metrics)?/*$", "", parts.path))
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._parts.path}"

    def scrape(self) -> Scrape:
        """The figures now. Raises OctavoError if there is no answer, or not the one there must be."""
        status, body = self._get("/metrics")
        if status == 401:
            wrong = "does not take this API key" if self.api_key else "wants an API key"
            raise OctavoError(f"The server at {self.url} {wrong}; give the one it was started with as --api-key.")
        if status >= 500:
            raise OctavoError(f"The server at {self.url} answers with status {status}.")
        samples = parse(body) if status == 200 else {}
        if "octavo:engine_up" not in samples:
            raise OctavoError(f"At {self.url} there is no Octavo server: its /metrics is not ours (status {status}).")
        when = time.monotonic()
        return Scrape(when, samples, ready=self._get("/health")[0] == 200)

    def _get(self, path: str) -> tuple[int, str]:
        parts = self._parts
        assert parts.hostname is not None
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.timeout)
        headers = {"Accept": "text/plain", **({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})}
        try:
            connection.request("GET", parts.path + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MOST_BYTES).decode("utf-8", "replace")
        except TimeoutError:
            raise OctavoError(f"The server at {self.url} did not answer within {self.timeout:g} seconds.") from None
        except ssl.SSLError as problem:
            raise OctavoError(f"The server at {self.url} cannot be trusted or has no TLS: {problem.reason}.") from None
        except OSError as problem:
            why = problem.strerror or str(problem) or type(problem).__name__
            raise OctavoError(f"The server at {self.url} cannot be reached: {why}.") from None
        except HTTPException as problem:
            raise OctavoError(f"What answers at {self.url} does not speak HTTP: {problem!r}.") from None
        finally:
            connection.close()


def parse(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Prometheus's text: name -> (labels, value). Lines that are none are passed over."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, number in _lines(text):
        try:
            value = float(number)
        except ValueError:
            continue
        pairs = {key: _ESCAPE.sub(_unescape, quoted) for key, quoted in _LABEL.findall(labels)}
        samples.setdefault(name, []).append((pairs, value))
    return samples


def _lines(text: str) -> Iterator[tuple[str, str, str]]:
    for line in text.split("\n"):
        match = None if line.startswith("#") else _SAMPLE.fullmatch(line.strip())
        if match:
            yield match[1], match[2] or "", match[3]


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def quantile(q: float, buckets: dict[float, float]) -> float | None:
    """Where the share `q` of the values lies below, taken as evenly spread in their bucket; None without values.

    As Prometheus's histogram_quantile: beyond the last finite bound the answer is that bound.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    rank, low, below = q * buckets[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank and count > below:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
        low, below = (low if bound == float("inf") else bound), count
    return low


def restarted(before: Scrape, now: Scrape) -> bool:
    """Whether another server answers than before: a counter has gone back."""
    names = ("generation_tokens_total", "prompt_tokens_total", "engine_busy_seconds_total")
    return any(now.value(name) < before.value(name) for name in names)


def essentials(scrapes: Sequence[Scrape], *, since_start: bool = False) -> Essentials:
    """The newest of the scrapes, of one server and in order: rates since the one before, latencies since the first.

    `since_start` takes the latencies of all the time that the server runs.
    """
    now = scrapes[-1]
    first = None if since_start or len(scrapes) < 2 else scrapes[0]
    return Essentials(
        model=now.label("engine_up", "model_name"),
        version=now.label("build_info", "version"),
        ready=now.ready and now.value("engine_up") == 1,
        running=int(now.value("num_requests_running")),
        waiting=int(now.value("num_requests_waiting")),
        swapped=int(now.value("num_requests_swapped")),
        tokens_per_second=_rate("generation_tokens_total", scrapes),
        prompt_tokens_per_second=_rate("prompt_tokens_total", scrapes),
        blocks={state: int(now.value("kv_blocks", state=state)) for state in BLOCK_STATES},
        pinned=int(now.value("kv_blocks_pinned")),
        host_blocks_used=int(now.value("host_blocks", state="used")),
        utilisation=now.value("kv_utilisation"),
        prefix_hit_rate=now.value("prefix_cache_hit_rate"),
        preemptions={kind: int(now.value("preemptions_total", kind=kind)) for kind in ("recompute", "swap")},
        copies=int(now.value("kv_block_copies_total")),
        evictions=int(now.value("kv_block_evictions_total")),
        ttft=_latency("time_to_first_token_seconds", first, now),
        tpot=_latency("inter_token_latency_seconds", first, now),
        window=None if first is None else now.when - first.when,
    )


def _rate(name: str, scrapes: Sequence[Scrape]) -> float | None:
    if len(scrapes) < 2:
        return None
    before, now = scrapes[-2], scrapes[-1]
    return (now.value(name) - before.value(name)) / max(now.when - before.when, 1e-9)


def _latency(name: str, first: Scrape | None, now: Scrape) -> Latency:
    before = first.buckets(name) if first is not None else {}
    buckets = {bound: count - before.get(bound, 0.0) for bound, count in now.buckets(name).items()}
    return Latency(quantile(0.5, buckets), quantile(0.95, buckets))

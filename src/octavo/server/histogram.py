"""A histogram that takes an observation in well under a microsecond, and the bounds in use. Knows no Prometheus.

Every bound that vLLM has is here, so that a query written for its buckets finds them; finer ones are added where a
small model would leave vLLM's first bucket holding everything.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

_FINE = (0.001, 0.0025, 0.005)
TTFT = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN = (
    *(*_FINE, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY = (
    *(*_FINE, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)


def up_to(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … as far as `most`."""
    ladder = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(bound for bound in ladder if bound <= most)


@dataclass(slots=True)
class Histogram:
    """How often a value fell into each bucket; `bounds` are the buckets' upper ends, which belong to them."""

    bounds: tuple[float, ...]
    counts: list[int]  # one more than bounds: beyond the last
    total: float = 0.0  # sum of the values

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        """Note a value, as if it came so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Histogram:
        return Histogram(self.bounds, self.counts.copy(), self.total)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), the last of them "+Inf", as Prometheus has it."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))

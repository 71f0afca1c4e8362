"""A result that no strategy made: every part of one, with figures that a reader would believe."""

from __future__ import annotations

import random

from octavo.lab.results import Percentiles, Piece, Result, Run, Series, Summary, Sweep

POOL = 20_000
_STRATEGIES = (  # name, label, utilisation, internal part of the rest, requests that fit
    ("none", "no cache", 1.0, 0.0, 40),
    ("max", "contiguous, the longest reserved", 0.224, 0.8, 5),
    ("pow2", "contiguous, the next power of two reserved", 0.31, 0.5, 9),
    ("oracle", "contiguous, the right length reserved", 0.62, 0.0, 14),
    ("doubling", "contiguous, doubled and moved", 0.71, 0.3, 15),
    ("chunks", "chunks of 256, not shared", 0.88, 0.6, 18),
    ("paged", "paged, blocks of 16", 0.969, 0.9, 21),
)


def synthetic(
    *, kind: str = "simulated", rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0), sweeps: bool = True
) -> Result:
    draw = random.Random(5)
    return Result(
        kind=kind,  # type: ignore[arg-type]
        octavo="0.1.0",
        commit="0123abcd",
        machine={"gpu": "RTX 4090 24 GB", "count": 1} if kind == "simulated" else {"processor": "Xeon", "cores": 2},
        model={"name": "llama-2-7b", "token_bytes": 524_288},
        pool_slots=POOL,
        seed=0,
        work={
            "name": f"code {kind}",
            "source": "made <here>",
            "requests": 300,
            "prompt_tokens": 99,
            "output_tokens": 9,
        },
        step_time={"kind": "roofline", "bandwidth": 1.008e12},
        runs=[_run(draw, rate, *strategy) for strategy in _STRATEGIES for rate in rates],
        sweeps=_sweeps() if sweeps else [],
    )


def _run(draw: random.Random, rate: float, name: str, label: str, used: float, internal: float, fit: int) -> Run:
    busy = min(1.0, rate / 2 * 21 / fit)
    series, room = Series(), min(0.99, busy)
    for moment in range(200):
        held = room * POOL * min(1.0, moment / 30, (200 - moment) / 30) * draw.uniform(0.94, 1.0)
        stored = used * held
        waste = held - stored
        external = (POOL - held) * 0.3 if name in ("max", "pow2", "oracle", "doubling") else 0.0
        row = (stored, waste * internal, waste * (1 - internal), external)
        whole = [int(slots) for slots in row]
        for field, slots in zip(("stored", "internal", "reserved", "external"), whole, strict=True):
            getattr(series, field).append(slots)
        series.time.append(moment / rate)
        series.free.append(POOL - sum(whole))
        series.in_flight.append(int(fit * held / POOL))
        series.waiting.append(int(max(0.0, rate * 20 - fit) * min(1.0, moment / 100)))
    summary = Summary(
        utilisation=used, stored=used * room, internal=internal * (1 - used) * room,
        reserved=(1 - internal) * (1 - used) * room, external=0.04 if name == "oracle" else 0.0,
        in_flight_mean=fit * busy * 0.9, in_flight_max=fit, fit_at_once=fit,
        fragmented_failures=37 if name == "oracle" else 0, copied_bytes=10**9 if name == "doubling" else 0,
        preemptions=3 if name == "paged" else 0, recomputed_tokens=0, cached_tokens=0, finished=300, rejected=0,
        seconds=200 / rate, throughput=fit * 21 * busy,
        ttft=Percentiles(p50=2.1 * rate / fit, p90=8.4 * rate / fit, p99=None if rate > 2 and fit < 6 else 1.9 * rate),
        tpot=Percentiles(p50=0.02 * (1 + busy), p90=0.03 * (1 + busy), p99=0.05 * (1 + busy)),
        prompt_seconds=20 / rate, decode_seconds=180 / rate, decode_steps=1000, decode_batch=fit * busy * 0.9,
    )  # fmt: skip
    return Run(
        strategy=name, label=label, settings={}, rate=rate, summary=summary, series=series, map_time=60 / rate,
        map=_map(draw, name, used),
    )  # fmt: skip


def _map(draw: random.Random, name: str, used: float) -> list[Piece]:
    pieces: list[Piece] = []
    left, owner = POOL, 0
    while left > 0:
        if name == "paged":
            kind = draw.choices(("stored", "shared", "cached", "free"), (80, 10, 6, 4))[0]
            filled = 16 if kind != "stored" or draw.random() < 0.95 else draw.randint(1, 15)
            row = [Piece(kind=kind, slots=filled, owner=draw.randint(0, 20) if kind == "stored" else -1)]  # type: ignore[arg-type]
            row += [Piece(kind="reserved", slots=16 - filled, owner=row[0].owner)] if filled < 16 else []
        else:
            region = 4096 if name == "max" else draw.randint(200, 2400)
            stored = int(region * used * draw.uniform(0.7, 1.2)) if used < 1 else region
            rest = max(0, region - stored)
            row = [Piece(kind="stored", slots=min(stored, region), owner=owner)]
            row += [
                Piece(kind="reserved", slots=rest // 3, owner=owner),
                Piece(kind="internal", slots=rest - rest // 3, owner=owner),
            ]
            row += [Piece(kind="free", slots=draw.randint(10, 300), owner=-1)] if draw.random() < 0.3 else []
        owner += 1
        for piece in row:
            piece.slots = min(piece.slots, left)
            left -= piece.slots
        pieces += [piece for piece in row if piece.slots]
    return pieces


def _sweeps() -> list[Sweep]:
    sizes = [2.0**power for power in range(9)]
    return [
        Sweep(name="block_size", x=sizes, series={"code": [1 - size / 2 / 500 for size in sizes]}),
        Sweep(name="samples", x=[2, 4, 6, 8, 16], series={"short (as Alpaca)": [0.08, 0.12, 0.15, 0.17, 0.2],
                                                           "longer (as ShareGPT)": [0.3, 0.4, 0.5, 0.55, 0.6]}),
        Sweep(name="beams", x=[2, 4, 6, 8], series={"short (as Alpaca)": [0.38, 0.5, 0.55, 0.6]}),
    ]  # fmt: skip

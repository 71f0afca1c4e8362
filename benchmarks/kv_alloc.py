"""Measures the KV memory: the cost of an allocation whatever the pool's size, and the manager's part of a decode step.

    python benchmarks/kv_alloc.py [--repeats N]

Needs no model and no data. Compare figures taken on one idle machine only.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from itertools import product
from random import Random
from statistics import median
from time import perf_counter_ns

from octavo.kv import BlockPool, KVManager

SMALL, LARGE = 10_000, 1_000_000
CHURN = 5_000  # blocks of one round of allocations and releases


def churn(pool: BlockPool, keep: bool) -> Callable[[], float]:
    """One round: allocate CHURN blocks, release them; ns a pair. `keep` makes every allocation reclaim a cached one."""

    def once() -> float:
        allocate, release = pool.allocate, pool.release
        start = perf_counter_ns()
        blocks = [allocate() for _ in range(CHURN)]
        for block in blocks:
            release(block, keep)
        return (perf_counter_ns() - start) / CHURN

    return once


def pool_of(num_blocks: int, keep: bool, mixed: bool) -> BlockPool:
    """A pool whose blocks are all free, or (keep) all cached, in order of their ids or (mixed) in none at all."""
    pool = BlockPool(num_blocks, lambda block: None)
    blocks = [pool.allocate() for _ in range(num_blocks)]
    if mixed:
        Random(0).shuffle(blocks)
    for block in blocks:
        pool.release(block, keep)
    return pool


def alternate(rounds: list[Callable[[], float]], repeats: int) -> list[float]:
    """Medians of each, measured in turns so that the machine's moods meet all alike."""
    times = [[one() for one in rounds] for _ in range(repeats)]
    return [median(column) for column in zip(*times, strict=True)]


def step_time(num_sequences: int, block_size: int, prefix_caching: bool, repeats: int) -> float:
    """Median microseconds that `grow` and `commit` of all sequences take in one decode step."""
    prompt, steps = 100, max(repeats, 4 * block_size)
    blocks = num_sequences * ((prompt + steps + num_sequences) // block_size + 2)
    manager = KVManager(blocks, block_size, prefix_caching=prefix_caching)
    tokens = {i: [i] * (prompt + i % block_size) for i in range(num_sequences)}  # fill their blocks at different steps
    for i, text in tokens.items():
        manager.admit(i, text)
        manager.commit(i, len(text), text)
    times = []
    for _ in range(steps):
        for text in tokens.values():
            text.append(0)
        start = perf_counter_ns()
        for i in tokens:
            manager.grow(i)
        for i, text in tokens.items():
            manager.commit(i, 1, text)
        times.append((perf_counter_ns() - start) / 1000)
        manager.take_changed()
    return median(times)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description="Cost of KV block allocation and of the memory manager in a step.")
    parser.add_argument("--repeats", type=int, default=200, help="rounds of each measurement (default: %(default)s)")
    repeats = parser.parse_args().repeats
    gc.disable()
    print(f"allocate + release, ns a pair        {SMALL:>9,} {LARGE:>9,} blocks   ratio")
    for keep, mixed in product((False, True), (False, True)):
        small, large = alternate([churn(pool_of(size, keep, mixed), keep) for size in (SMALL, LARGE)], repeats)
        name = f"{'reclaiming cached' if keep else 'free'} blocks, {'mixed' if mixed else 'in order'}"
        print(f"{name:<36} {small:>9.0f} {large:>9.0f}          {large / small:.2f}")
    print("(mixed: an order without pattern, where a large pool also pays for the processor's cache misses)")
    for caching in (True, False):
        time = step_time(256, 16, caching, repeats)
        print(f"grow + commit, 256 sequences, block size 16, prefix caching {caching}: {time:.0f} us a step")
    manager = KVManager(10_000)
    for i in range(256):
        manager.admit(i, [i] * 100)
    looks = []
    for _ in range(repeats):
        start = perf_counter_ns()
        manager.usage()
        looks.append((perf_counter_ns() - start) / 1000)
    print(f"usage(), 256 sequences: {median(looks):.0f} us")


if __name__ == "__main__":
    main()

"""Measure what this machine can do at most: reading memory, and products in each form it has an instruction for.

    python benchmarks/ceilings.py [--threads N] [--rounds 9] [--json]

Every other figure is to be read against these. They are medians; on a shared machine even they move by a fifth.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import cached_property

from compiled import CannotCompileError, compiled

PRODUCTS = ("f32_fma", "bf16_vector", "int8_vector", "bf16_tile", "int8_tile")
LONG_ENOUGH = 0.05  # seconds of one round
MIB = 1 << 20


class Machine:
    """What `threads` threads reach together here, measured when first asked for. Raises CannotCompileError."""

    def __init__(self, threads: int, rounds: int) -> None:
        flags = ["-std=c++20", "-O3", "-march=native", "-Wno-psabi", "-fopenmp", "-shared", "-fPIC"]
        self._library = ctypes.CDLL(str(compiled("ceilings.cpp", flags)))
        self.threads, self._rounds = threads, rounds
        self._reads: dict[int, float] = {}

    def read_gb_s(self, num_bytes: int) -> float:
        """GB/s of reading a set of so many bytes over and over: from whichever cache holds it, or from DRAM."""
        size = max(num_bytes, MIB)
        known = next((known for known in self._reads if abs(known - size) < size / 20), None)
        if known is None:
            self._reads[size] = read_rate(self._library, size // 4096 * 4096, self.threads, self._rounds)
        return self._reads[known or size]

    @cached_property
    def instructions_gop_s(self) -> dict[str, float]:
        """Multiplications and additions, in GOP/s, by instruction."""
        rates = {name: product_rate(self._library, name, self.threads, self._rounds) for name in PRODUCTS}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def product_gop_s(self, kind: str) -> float:
        """GOP/s of the fastest way to multiply 'f32', 'bf16' or 'int8': in its own instructions or a wider type's."""
        wider = {"int8": ("int8", "bf16", "f32"), "bf16": ("bf16", "f32"), "f32": ("f32",)}[kind]
        return max(rate for name, rate in self.instructions_gop_s.items() if name.startswith(wider))


def read_rate(library: ctypes.CDLL, num_bytes: int, threads: int, rounds: int) -> float:
    """GB/s of reading `num_bytes` over and over."""
    library.allocate.restype, library.allocate.argtypes = ctypes.c_void_p, (ctypes.c_int64, ctypes.c_int)
    library.release.restype, library.release.argtypes = None, (ctypes.c_void_p, ctypes.c_int64)
    function = library.read_seconds
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
    data = library.allocate(num_bytes, threads)
    if not data:
        raise MemoryError(f"{num_bytes} bytes")
    try:
        once = median_seconds(lambda passes: float(function(data, num_bytes, threads, passes)), rounds)
    finally:
        library.release(data, num_bytes)
    assert once is not None
    return num_bytes / once / 1e9


def product_rate(library: ctypes.CDLL, name: str, threads: int, rounds: int) -> float | None:
    """GOP/s of an instruction; None if this machine has none."""
    function = getattr(library, name)
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_double))
    operations = ctypes.c_double()
    once = median_seconds(lambda count: float(function(threads, 1000 * count, ctypes.byref(operations))), rounds)
    if once is None:
        return None
    function(threads, 1000, ctypes.byref(operations))
    return threads * operations.value / once / 1e9


def median_seconds(run: Callable[[int], float], rounds: int) -> float | None:
    """Seconds of one repetition: the median of `rounds` measurements, each of as many as take a while."""
    repetitions = 1
    while (seconds := run(repetitions)) < LONG_ENOUGH:
        if seconds < 0:
            return None
        repetitions = 2 * repetitions if seconds == 0 else max(repetitions + 1, int(repetitions * 0.06 / seconds))
    return statistics.median(run(repetitions) for _ in range(rounds)) / repetitions


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=num_processors())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        machine = Machine(options.threads, options.rounds)
    except CannotCompileError as problem:
        print(f"ceilings.py: {problem}", file=sys.stderr)
        sys.exit(2)
    reads = {mib: machine.read_gb_s(mib * MIB) for mib in (options.threads, 24, 100, 200, 1024)}
    products = machine.instructions_gop_s
    if options.json:
        print(json.dumps({"threads": machine.threads, "read_gb_s_by_mib": reads, "product_gop_s": products}))
        return
    for mib, rate in reads.items():
        print(f"read a set of {mib:>5} MiB {rate:8.1f} GB/s")
    for name, rate in products.items():
        print(f"{name:<23} {rate:8.0f} GOP/s")


if __name__ == "__main__":
    main()

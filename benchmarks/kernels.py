"""The native kernels one by one: what they reach, beside what this machine can do at most.

    python benchmarks/kernels.py [linear] [attention] [--formats q4,q8] [--rows 1,32] [--kv-dtype int8]
        [--rounds 9] [--json]

Products and attention run as in a model: on as many weights, or layers of a cache, as SmolLM2-135M has, one after
another in one recorded program, so that they come from where a step would find them. GB/s count the weights, or the
keys and values, once; GOP/s count a multiplication and an addition as two. `of ceiling` is the time that the slower of
reading and multiplying would take at this machine's own rates (ceilings.py), as a share of the time taken; more than
100 % says that the machine was busy with others while its rates were measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ceilings import Machine
from compiled import CannotCompileError
from octavo import _native
from octavo.loading.tensor import StoredTensor
from octavo.ops.interface import AttentionSpec, CacheLayout, StepInput
from octavo.ops.native import KvType, NativeOps, auto_kv_type, run_step
from octavo.ops.native_program import assemble
from octavo.ops.native_trace import Trace, Value

FORMATS = {"q4": ("Q4_1", "int8"), "q8": ("Q8_0", "int8"), "bf16": ("BF16", "bf16"), "f32": ("F32", "f32")}
SHAPES = {  # SmolLM2-135M's products: rows of the weight, its columns, how many there are
    "qkv": (960, 576, 30),
    "out": (576, 576, 30),
    "gate, up": (3072, 576, 30),
    "down": (576, 1536, 30),
    "head": (49152, 576, 1),
}
FEWEST, LONG_ENOUGH = 3, 2.0  # rounds of a slow kernel; seconds after which there are no more
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 30, 9, 3, 64, 16


@dataclass(frozen=True, slots=True)
class Result:
    """One kernel on one shape."""

    what: str
    milliseconds: float
    gb_s: float
    gop_s: float
    of_ceiling: float


class Bench:
    """Runs kernels and sets the time they took against the machine's ceilings."""

    def __init__(self, machine: Machine, rounds: int, kv_type: KvType) -> None:
        self.machine, self._rounds = machine, rounds
        self.ops = NativeOps(kv_type, machine.threads)

    def result(self, what: str, run: Callable[[], object], num_bytes: int, operations: float, kind: str) -> Result:
        """Time `run`, which reads so many bytes and does so many operations on this kind of numbers."""
        run()
        times: list[float] = []
        while len(times) < self._rounds and (len(times) < FEWEST or sum(times) < LONG_ENOUGH):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        seconds = statistics.median(times)
        reading = num_bytes / self.machine.read_gb_s(num_bytes)
        multiplying = operations / self.machine.product_gop_s(kind)
        floor = max(reading, multiplying) / 1e9
        return Result(what, 1e3 * seconds, num_bytes / seconds / 1e9, operations / seconds / 1e9, floor / seconds)


def linear(bench: Bench, formats: Sequence[str], row_counts: Sequence[int]) -> Iterator[Result]:
    """Products of each format on SmolLM2's shapes."""
    random = np.random.default_rng(0)
    for name in formats:
        dtype, kind = FORMATS[name]
        for shape, (rows, columns, copies) in SHAPES.items():
            stored = random_weight(random, dtype, rows, columns)
            weights = [bench.ops.linear_weight([stored]) for _ in range(copies)]
            trace = Trace()
            program = assemble(trace, products(bench.ops, trace.input(columns), weights, shape), bench.machine.threads)
            for count in row_counts:
                x = random.standard_normal((count, columns), np.float32)
                yield bench.result(
                    f"{name} {shape} {rows} x {columns}, {count} rows, {copies} of them",
                    lambda program=program, x=x: program.run_rows([x]),  # type: ignore[misc]
                    sum(weight.bytes for weight in weights),
                    2.0 * count * rows * columns * copies,
                    kind,
                )


def random_weight(random: np.random.Generator, dtype: str, rows: int, columns: int) -> StoredTensor:
    """A weight as a file would hold it."""
    from gguf import GGMLQuantizationType, quants

    values = random.standard_normal((rows, columns), np.float32) * np.float32(0.05)
    raw = quants.quantize(values, GGMLQuantizationType[dtype])
    raw = raw.view(np.uint16) if dtype == "BF16" else raw
    return StoredTensor("weight", (rows, columns), dtype, raw, lambda stored: stored.astype(np.float32))


def products(ops: NativeOps, x: Value, weights: Sequence[_native.Weight], shape: str) -> Value:
    """All of the weights times the same input; gate and up with the activation between, as models use them."""
    out = x
    for weight in weights:
        out = ops.linear(x, weight)
        if shape == "gate, up":
            out = ops.gated(out, "silu")
    return out


@dataclass(frozen=True, slots=True)
class Contexts:
    """Sequences of a step: their lengths, how many of their last tokens are new, and the tokens all of them share."""

    what: str
    lengths: tuple[int, ...]
    new: int = 1
    shared: int = 0  # tokens; whole blocks

    def step(self) -> tuple[StepInput, int]:
        """The step, and the blocks it needs."""
        prefix = self.shared // BLOCK
        tables = np.zeros((len(self.lengths), -(-max(self.lengths) // BLOCK)), np.int32)
        tables[:, :prefix] = np.arange(prefix)
        end = prefix
        order = np.random.default_rng(0)
        own = [-(-length // BLOCK) - prefix for length in self.lengths]
        ids = order.permutation(sum(own)) + prefix  # as scattered as a pool is after long use
        for row, count in enumerate(own):
            tables[row, prefix : prefix + count] = ids[end - prefix : end - prefix + count]
            end += count
        positions = np.concatenate([np.arange(length - self.new, length) for length in self.lengths])
        sequences = np.repeat(np.arange(len(self.lengths)), self.new)
        slots = tables[sequences, positions // BLOCK] * BLOCK + positions % BLOCK
        return StepInput(
            token_ids=np.zeros(len(positions), np.int32),
            positions=positions.astype(np.int32),
            slots=slots.astype(np.int32),
            query_starts=np.arange(len(self.lengths) + 1, dtype=np.int32) * self.new,
            context_lens=np.array(self.lengths, np.int32),
            block_tables=tables,
            logit_rows=np.zeros(0, np.int32),
        ), end

    @property
    def distinct_tokens(self) -> int:
        """Tokens whose keys and values must be read."""
        return self.shared + sum(length - self.shared for length in self.lengths)

    @property
    def pairs(self) -> int:
        """Pairs of a new token and a token it sees."""
        return sum(self.new * (length - self.new) + self.new * (self.new + 1) // 2 for length in self.lengths)


CONTEXTS = (
    Contexts("decode, one context of 8192", (8192,)),
    Contexts("decode, 256 contexts of 100 to 300", tuple(100 + 200 * i // 255 for i in range(256))),
    Contexts("decode, 32 contexts of 1088, nothing shared", (1088,) * 32),
    Contexts("decode, 32 contexts of 1088, 1024 shared", (1088,) * 32, shared=1024),
    Contexts("prefill, 16 prompts of 100", (100,) * 16, new=100),
    Contexts("prefill, 8 prompts of 250", (250,) * 8, new=250),
    Contexts("prefill, 2 prompts of 1000", (1000,) * 2, new=1000),
    Contexts("prefill, 2048 tokens", (2048,), new=2048),
    Contexts("prefill, the last 160 of 1900", (1900,), new=160),
    Contexts("prefill, the last 2048 of 8192", (8192,), new=2048),
)


def attention(bench: Bench) -> Iterator[Result]:
    """Attention of all layers of SmolLM2 over contexts of several kinds, writing keys and values included."""
    layout = CacheLayout(LAYERS, KV_HEADS, BLOCK, HEAD_DIM)
    token_bytes = bench.ops.block_bytes(layout) // BLOCK
    int8 = bench.ops.kv_type == "int8"
    for contexts in CONTEXTS:
        step, blocks = contexts.step()
        cache = bench.ops.new_cache(blocks, layout)
        fill(cache.blocks)
        program, inputs = attention_program(bench.ops, bench.machine.threads, len(step.token_ids))
        yield bench.result(
            f"{bench.ops.kv_type} attention, {contexts.what}, {LAYERS} layers",
            lambda program=program, inputs=inputs, step=step, cache=cache: run_step(program, inputs, step, cache),  # type: ignore[misc]
            contexts.distinct_tokens * token_bytes,
            4.0 * contexts.pairs * HEADS * HEAD_DIM * LAYERS,
            "int8" if int8 else "bf16",
        )


def fill(blocks: NDArray[np.uint8]) -> None:
    """Small numbers everywhere: memory never written would all be the one page of zeros."""
    blocks[...] = 0x3C


def attention_program(ops: NativeOps, threads: int, tokens: int) -> tuple[_native.Program, list[NDArray[np.float32]]]:
    """Every layer's attention of the same queries, keys and values; and those."""
    rope = ops.rope_table(1e5 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM), 8192)
    spec = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, rope=rope)
    widths = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    trace = Trace()
    q, k, v = (trace.input(width) for width in widths)
    out = q
    for layer in range(LAYERS):
        out = ops.attention(q, k, v, None, layer, None, spec)
    random = np.random.default_rng(0)
    return assemble(trace, out, threads), [random.standard_normal((tokens, width), np.float32) for width in widths]


def formats(text: str) -> list[str]:
    """Names of formats, with commas between."""
    names = text.split(",")
    if unknown := [name for name in names if name not in FORMATS]:
        raise argparse.ArgumentTypeError(f"there is no format {unknown[0]!r}; there are {', '.join(FORMATS)}")
    return names


def row_counts(text: str) -> list[int]:
    """Numbers of rows, with commas between."""
    if not all(count.isdecimal() and int(count) > 0 for count in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers of rows, such as 1,32")
    return [int(count) for count in text.split(",")]


def main() -> None:
    """Measure and print, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", metavar="linear|attention", help="default: both")
    parser.add_argument("--formats", type=formats, default=list(FORMATS), help=f"of weights: {','.join(FORMATS)}")
    parser.add_argument("--rows", type=row_counts, default=ROWS, help=f"of activations: {','.join(map(str, ROWS))}")
    kv_type = auto_kv_type(quantised=True, head_dim=HEAD_DIM)
    parser.add_argument("--kv-dtype", default=kv_type, choices=get_args(KvType), help="of keys and values; %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="%(default)s, fewer where one takes long")
    parser.add_argument("--threads", type=int, default=_native.default_threads(), help="%(default)s")
    parser.add_argument("--json", action="store_true", help="a JSON object each instead of the table")
    options = parser.parse_args()
    which = options.which or ["linear", "attention"]
    if unknown := set(which) - {"linear", "attention"}:
        parser.error(f"there is no {unknown.pop()!r} to measure; there are linear and attention")
    try:
        bench = Bench(Machine(options.threads, options.rounds), options.rounds, options.kv_dtype)
    except CannotCompileError as problem:
        print(f"kernels.py: {problem}", file=sys.stderr)
        sys.exit(2)
    results: list[Iterator[Result]] = []
    if "linear" in which:
        results.append(linear(bench, options.formats, options.rows))
    if "attention" in which:
        results.append(attention(bench))
    if not options.json:
        print(f"{'':<64}{'ms':>9}{'GB/s':>8}{'GOP/s':>8}{'of ceiling':>12}")
    for result in (result for one in results for result in one):
        if options.json:
            print(json.dumps(asdict(result)), flush=True)
        else:
            rates = f"{result.milliseconds:>9.3f}{result.gb_s:>8.1f}{result.gop_s:>8.0f}{result.of_ceiling:>12.0%}"
            print(f"{result.what:<64}{rates}", flush=True)


if __name__ == "__main__":
    main()

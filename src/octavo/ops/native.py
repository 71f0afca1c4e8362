"""The operations on our own kernels for CPUs: a model's pass is recorded once and then replayed, a call a step.

Handed the symbols of a trace, an operation notes itself down; handed NumPy arrays (float32), it is recorded alone and
run at once. Results have the same bits whatever else is in the batch, however a prompt was cut up and whatever the
number of threads. Knows which symbols and arrays a kernel takes; neither kernels nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.errors import ModelError
from octavo.loading.tensor import StoredTensor
from octavo.ops.interface import (
    Activation,
    Array,
    AttentionSpec,
    CacheLayout,
    Float32,
    Int32,
    Int64,
    Laws,
    Logprobs,
    StepInput,
)
from octavo.ops.native_program import assemble
from octavo.ops.native_trace import Ids, Trace, Value

if TYPE_CHECKING:
    from octavo.models.interface import Model

KvType = Literal["bf16", "f16", "f32", "int8"]

_NO_IDS = np.zeros(0, np.int32)
_NO_TABLES = np.zeros((0, 0), np.int32)
_NO_STARTS = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """Frequencies in float32, with which models are trained; angles are worked out for the positions of a step."""

    inv_freq: Float32  # [rotated dimensions / 2], radians a position
    max_positions: int
    factor: float


def auto_kv_type(*, quantised: bool, head_dim: int) -> KvType:
    """What keys and values are best kept as, beside weights that are quantised or not.

    int8 where weights are quantised, as the kernels then round what they multiply to 8 bits anyway, and where the
    instruction set multiplies bytes: half the memory in half the time. Elsewhere bytes would only take longer. A head
    of an odd size, whose large dimensions cannot be spread over many others, stays bf16.
    """
    spread = head_dim & -head_dim  # dimensions that are mixed (native/src/attention.hpp)
    return "int8" if quantised and spread >= 32 and _native.byte_dots() else "bf16"


class NativeOps:
    """The operations, on `threads` threads (None: OMP_NUM_THREADS, or the processors this process may use).

    Keys and values are cached as `kv_type`; int8 ones with a float32 scale for each token and head, and then queries
    and attention's weights are rounded to 8 bits too. Weights stay in the type they are stored in; 4- and 8-bit ones
    multiply activations rounded to 8 bits, bfloat16 ones activations rounded to bfloat16, others float32. `isa` names
    the instruction set whose kernels run. Raises ValueError if OCTAVO_ISA names one that this machine cannot run.
    """

    def __init__(self, kv_type: KvType = "bf16", threads: int | None = None) -> None:
        self.kv_type: KvType = kv_type
        self.threads = threads or _native.default_threads()
        self.isa = _native.isa()

    def compile(self, model: Model, /) -> Model:
        """The model recorded. Raises ModelError for one that the kernels cannot compute."""
        try:
            return Recorded(model, self.threads)
        except ValueError as error:
            raise ModelError(f"The native kernels cannot compute this model: {error}; try backend reference.") from None

    # --- weights ----------------------------------------------------------------------------------------------------

    def linear_weight(self, parts: Sequence[StoredTensor], /) -> _native.Weight:
        """The parts stacked, kept in their storage types and put in the order in which kernels read."""
        stored = [(part.dtype, np.ascontiguousarray(part.raw), part.shape[0], part.shape[1]) for part in parts]
        return _native.pack(stored, self.threads)

    def vector(self, parts: Sequence[StoredTensor], /, *, offset: float = 0.0) -> Float32:
        """The parts joined end to end, `offset` added."""
        joined: Float32 = np.concatenate([part.float32() for part in parts]) + np.float32(offset)
        return joined

    def rope_table(self, inv_freq: NDArray[np.float64], max_positions: int, /, *, factor: float = 1.0) -> RopeTable:
        """Frequencies, and what cosines and sines are multiplied by."""
        return RopeTable(inv_freq.astype(np.float32), max_positions, factor)

    # --- tokens to hidden states, and back --------------------------------------------------------------------------

    def embed(self, weight: _native.Weight, ids: Any, /) -> Array:
        """Rows `ids` of the weight: [T, E]."""
        if isinstance(ids, Ids):
            return ids.trace.append("embed", weight.columns, {}, weight=weight, ids=ids, factor=1.0)
        trace = Trace()
        out = self.embed(weight, Ids(trace, "token_ids"))
        ids = np.ascontiguousarray(ids, np.int32)
        step = StepInput(ids, np.zeros_like(ids), np.zeros_like(ids), _NO_STARTS, _NO_IDS, _NO_TABLES, _NO_IDS)
        return run_step(assemble(trace, out, self.threads), [], step, None)

    def linear(self, x: Array, weight: _native.Weight, bias: Float32 | None = None, /) -> Array:
        """x [T, in] times the weight's transpose, plus bias: [T, out]."""
        return self._call("linear", weight.rows, {"x": x}, weight=weight, bias=bias, gate=None)

    def take_rows(self, x: Array, rows: Any, /) -> Array:
        """x[rows]: [R, E]."""
        if isinstance(x, Value):
            return x.trace.append("take_rows", x.columns, {"x": x}, "logits", rows=rows)
        return x[rows]

    def to_numpy(self, x: Float32, /) -> Float32:
        """The array itself: what leaves a recorded pass is NumPy's."""
        return x

    # --- between the matrix products --------------------------------------------------------------------------------

    def rms_norm(self, x: Array, weight: Float32, eps: float, /) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight over groups of len(weight) columns."""
        return self._call("norm", _columns(x), {"x": x}, weight=weight, bias=None, eps=eps)

    def layer_norm(self, x: Array, weight: Float32, bias: Float32, eps: float, /) -> Array:
        """(x - mean) / sqrt(var + eps) * weight + bias over a row."""
        return self._call("norm", _columns(x), {"x": x}, weight=weight, bias=bias, eps=eps)

    def add(self, x: Array, y: Array, /) -> Array:
        """x + y."""
        return self._call("add", _columns(x), {"x": x, "y": y})

    def scale(self, x: Array, factor: float, /) -> Array:
        """x * factor."""
        return self._call("scale", _columns(x), {"x": x}, number=factor)

    def softcap(self, x: Array, cap: float, /) -> Array:
        """cap * tanh(x / cap)."""
        return self._call("softcap", _columns(x), {"x": x}, number=cap)

    def activate(self, x: Array, kind: Activation, /) -> Array:
        """The activation, element by element."""
        return self._call("activate", _columns(x), {"x": x}, kind=kind)

    def gated(self, gate_up: Array, kind: Activation, /) -> Array:
        """activate(gate) * up for a fused [T, 2F] of gate then up: [T, F]."""
        return self._call("gated", _columns(gate_up) // 2, {"x": gate_up}, kind=kind)

    def split(self, x: Array, sizes: Sequence[int], /) -> list[Array]:
        """Columns of x in runs of the given sizes: parts of the same memory."""
        runs = [(end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        if not isinstance(x, Value):
            return [x[:, first : first + size] for first, size in runs]
        return [Value(x.trace, x.rows, size, x.whole, x.first + first) for first, size in runs]

    # --- from logits to tokens --------------------------------------------------------------------------------------

    def draw(self, logits: Float32, sources: Int64, laws: Laws, /) -> Int64:
        """A token for each of R draws: [R]; -1 where the row has a NaN or its maximum is infinite."""
        return _native.draw(
            logits, sources, laws.temperature, laws.top_k, laws.top_p, laws.min_p, laws.uniform, self.threads
        )

    def logprobs(self, logits: Float32, sources: Int64, token_ids: Int64, top: int, /) -> Logprobs:
        """What log-probabilities are made of, for R rows and a token of each."""
        return Logprobs(*_native.logprobs(logits, sources, token_ids, top, self.threads))

    # --- paged attention --------------------------------------------------------------------------------------------

    def plan(self, step: StepInput, /) -> Array:
        """The step itself: the native planner works from it, once for all layers."""
        return step

    def attention(
        self, q: Array, k: Array, v: Array, cache: Any, layer: int, plan: Any, spec: AttentionSpec, /
    ) -> Array:
        """Rotate q and k, write k and v to the step's slots of `cache`, attend causally over each sequence's blocks."""
        reads = {"q": q, "k": k, "v": v}
        return self._call("attention", _columns(q), reads, step=plan, cache=cache, layer=layer, spec=spec)

    def new_cache(self, num_blocks: int, layout: CacheLayout, /, *, prefault: bool = False) -> _native.Cache:
        """Zeros, so that the system gives pages only as they are written; with `prefault` they are, all."""
        cache = _native.Cache(num_blocks, self.kv_type, *_shape(layout))
        if prefault:
            cache.blocks.fill(0)
        return cache

    def block_bytes(self, layout: CacheLayout, /) -> int:
        """Bytes of one block, all layers, keys and values."""
        return _native.block_bytes(self.kv_type, *_shape(layout))

    def copy_blocks(self, source: _native.Cache, target: _native.Cache, pairs: Int32, /) -> None:
        """target[b] = source[a] for each row (a, b) of `pairs`, all reads before all writes."""
        _native.copy_blocks(source, target, pairs, self.threads)

    def _call(
        self,
        op: str,
        columns: int,
        reads: dict[str, Array],
        *,
        step: StepInput | None = None,
        cache: Any = None,
        **settings: Any,
    ) -> Array:
        """Note an operation down where its arrays are symbols; otherwise run it."""
        first = next(iter(reads.values()))
        if isinstance(first, Value):
            return first.trace.append(op, columns, reads, first.rows, **settings)
        trace = Trace()
        inputs = [np.ascontiguousarray(array, np.float32) for array in reads.values()]
        symbols = {name: trace.input(_columns(array)) for name, array in reads.items()}
        program = assemble(trace, trace.append(op, columns, symbols, **settings), self.threads)
        return program.run_rows(inputs) if step is None else run_step(program, inputs, step, cache)


def run_step(program: _native.Program, inputs: list[Float32], step: StepInput, cache: _native.Cache | None) -> Float32:
    """Run a program over a step. Raises ValueError, a sentence, for a step that cannot be; nothing is written then."""
    return program.run_step(
        inputs,
        step.token_ids,
        step.positions,
        step.slots,
        step.query_starts,
        step.context_lens,
        step.block_tables,
        step.logit_rows,
        cache,
    )


class Recorded:
    """A model whose passes were recorded: the same answers, in one call each."""

    def __init__(self, model: Model, threads: int) -> None:
        self.num_layers, self.num_kv_heads, self.head_dim = model.num_layers, model.num_kv_heads, model.head_dim
        self.vocab_size, self.max_positions = model.vocab_size, model.max_positions
        trace = Trace()
        hidden = model.forward(_symbolic_step(trace), None)
        self._forward = assemble(trace, hidden, threads)
        trace = Trace()
        self._logits = assemble(trace, model.logits(trace.input(hidden.columns)), threads)

    def forward(self, step: StepInput, cache: _native.Cache, /) -> Float32:
        """Hidden states of `step.logit_rows`, [R, E]. Raises ValueError, before anything is written, for a bad step."""
        return run_step(self._forward, [], step, cache)

    def logits(self, hidden: Float32, /) -> Float32:
        """Scores of every token to come next, [R, V]."""
        return self._logits.run_rows([hidden])

    def time_kernels(self) -> None:
        """From now on, note the time that kernels take."""
        self._forward.time()
        self._logits.time()

    def kernel_seconds(self) -> dict[str, float]:
        """What each kind of kernel took one thread since then, and what it waited for the others."""
        seconds: dict[str, float] = {}
        for kind, spent in (*self._forward.seconds(), *self._logits.seconds()):
            seconds[kind] = seconds.get(kind, 0.0) + spent
        return seconds


def _symbolic_step(trace: Trace) -> Any:
    """A step of which a model may use what rows are looked up by: the rest is for the planner alone."""
    ids: dict[str, Any] = {
        "token_ids": Ids(trace, "token_ids"),
        "positions": Ids(trace, "positions"),
        "logit_rows": Ids(trace, "logit_rows"),
    }
    rest: Any = dict.fromkeys(("slots", "query_starts", "context_lens", "block_tables"))
    return StepInput(**ids, **rest)


def _shape(layout: CacheLayout) -> tuple[int, int, int, int]:
    return layout.num_layers, layout.num_kv_heads, layout.block_size, layout.head_dim


def _columns(x: Array) -> int:
    return x.columns if isinstance(x, Value) else x.shape[1]

"""The seam between models and kernels: every operation a model may call, on arrays only the backend understands.

A model file calls these and never a method of an array, so that it runs unchanged on every backend. The first one,
`octavo.ops.reference` (NumPy, float32), is the oracle of those to come. Nothing here knows of scheduling.

Shapes: T tokens in the step, S sequences, R rows wanted as logits, E hidden size, H query heads, G key/value heads,
D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.loading.tensor import StoredTensor

if TYPE_CHECKING:
    from octavo.models.interface import Model

Array = Any  # activations, weights and caches are opaque: only the backend that made them looks inside
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(slots=True)
class StepInput:
    """What one forward pass computes: T new tokens of S sequences, laid one sequence after another.

    The tokens of sequence s are rows `query_starts[s]:query_starts[s + 1]`; they are the last ones of its context,
    whose `context_lens[s]` tokens (these included) lie in the blocks `block_tables[s]`.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T] place of each token in its sequence
    slots: Int32  # [T] where its key and value go: block * block_size + offset
    query_starts: Int32  # [S + 1]
    context_lens: Int32  # [S]
    block_tables: Int32  # [S, longest table]; entries beyond a sequence's own blocks are arbitrary valid ids
    logit_rows: Int32  # [R] rows of the hidden states whose logits are wanted


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    rope: Array | None = None  # a table from Ops.rope_table; None: positions are not rotated in


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The shape of one KV block: [num_layers, 2, num_kv_heads, block_size, head_dim] (a backend may reorder it)."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int


@dataclass(slots=True)
class Laws:
    """By what law each of R draws is made; every field is [R]. `Ops.draw` says how."""

    temperature: Float64  # 0: the likeliest token
    top_k: Int64  # 0: all tokens
    top_p: Float64  # in (0, 1]
    min_p: Float64  # in [0, 1]
    uniform: Float64  # in [0, 1): where in the cumulated probability the draw is made

    def of(self, which: Int64) -> Laws:
        """The laws of some of the draws."""
        return Laws(
            self.temperature[which], self.top_k[which], self.top_p[which], self.min_p[which], self.uniform[which]
        )


class Logprobs(NamedTuple):
    """What log-probabilities are made of: a token's is its logit minus its row's log_sum."""

    log_sums: Float64  # [R]: log(sum(exp(row))); NaN where the row has a NaN or its maximum is infinite
    ranks: Int64  # [R]: 1 + the number of tokens whose logit is higher than the given one's
    top_ids: Int64  # [R, N]: the likeliest first, the lower id first among equals; -1 beyond the last


class Ops(Protocol):
    """The operations. A module of functions satisfies it."""

    @property
    def kv_type(self) -> str:
        """What keys and values are kept as: bf16, f16, f32 or int8."""
        ...

    def compile(self, model: Model, /) -> Model:
        """A model that answers as `model` does, in the way this backend runs it best; called once all weights are in.

        A model's Python code calls the same operations whatever the batch, so a backend may run it once on symbols
        and replay what it called. The name is the one that PyTorch gives to the same request. Outside of a compiled
        model's calls, arrays are what `forward` and `logits` return.
        """
        ...

    # --- weights -----------------------------------------------------------------------------------------------
    def linear_weight(self, parts: Sequence[StoredTensor], /) -> Array:
        """A weight for `linear` and `embed`: the [rows, columns] parts stacked along rows (fused QKV, gate-up)."""
        ...

    def vector(self, parts: Sequence[StoredTensor], /, *, offset: float = 0.0) -> Array:
        """A float vector (a norm's weight, a bias), the parts joined end to end, `offset` added (Gemma's 1 + w)."""
        ...

    def rope_table(self, inv_freq: NDArray[np.float64], max_positions: int, /, *, factor: float = 1.0) -> Array:
        """Cosines and sines times `factor` for 2 * len(inv_freq) rotated dimensions (half-split pairing)."""
        ...

    # --- tokens to hidden states, and back ----------------------------------------------------------------------
    def embed(self, weight: Array, ids: Int32, /) -> Array:
        """Rows `ids` of the weight: [T, E]."""
        ...

    def linear(self, x: Array, weight: Array, bias: Array | None = None, /) -> Array:
        """x [T, in] times the weight's transpose, plus bias: [T, out]."""
        ...

    def take_rows(self, x: Array, rows: Int32, /) -> Array:
        """x[rows]: [R, E]."""
        ...

    def to_numpy(self, x: Array, /) -> NDArray[np.float32]:
        """The array as float32 in host memory (logits for the sampler)."""
        ...

    # --- from logits to tokens ----------------------------------------------------------------------------------
    def draw(self, logits: Float32, sources: Int64, laws: Laws, /) -> Int64:
        """A token for each of R draws, draw i from row `sources[i]` of logits [L, V] by its law: [R].

        Temperature 0 takes the lowest id of the highest logit. Otherwise tokens weigh exp(logit / temperature), and
        those stay that pass all filters: as likely as min_p times the likeliest; then at or over the k-th highest
        logit; then in the fewest, likeliest first, that hold top_p of what is left. Tokens of equal logit live or die
        together. The draw inverts the cumulated weight of what stays, in the order of ids, at `uniform`. -1 where the
        row has a NaN or its maximum is infinite. No draw depends on the others; backends may differ by the rounding of
        float32 weights.
        """
        ...

    def logprobs(self, logits: Float32, sources: Int64, token_ids: Int64, top: int, /) -> Logprobs:
        """For token_ids[i] of row `sources[i]` of logits [L, V], and for the `top` likeliest of the row."""
        ...

    # --- between the matrix products -------------------------------------------------------------------------------
    def rms_norm(self, x: Array, weight: Array, eps: float, /) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight over groups of len(weight) columns: a whole row, or each head of it."""
        ...

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float, /) -> Array:
        """(x - mean) / sqrt(var + eps) * weight + bias over a row."""
        ...

    def add(self, x: Array, y: Array, /) -> Array:
        """x + y."""
        ...

    def scale(self, x: Array, factor: float, /) -> Array:
        """x * factor."""
        ...

    def softcap(self, x: Array, cap: float, /) -> Array:
        """cap * tanh(x / cap)."""
        ...

    def activate(self, x: Array, kind: Activation, /) -> Array:
        """The activation, element by element ("gelu" is the exact one, by erf)."""
        ...

    def gated(self, gate_up: Array, kind: Activation, /) -> Array:
        """activate(gate) * up for a fused [T, 2F] of gate then up: [T, F]."""
        ...

    def split(self, x: Array, sizes: Sequence[int], /) -> list[Array]:
        """Columns of x in runs of the given sizes."""
        ...

    # --- paged attention --------------------------------------------------------------------------------------------
    def plan(self, step: StepInput, /) -> Array:
        """What every layer's attention needs of the step and is worked out once: made anew for each forward pass."""
        ...

    def attention(
        self, q: Array, k: Array, v: Array, cache: Array, layer: int, plan: Array, spec: AttentionSpec, /
    ) -> Array:
        """Rotate q and k, write k and v to the step's slots of `cache`, attend causally over each sequence's blocks.

        q [T, H * D]; k, v [T, G * D]; returns [T, H * D]. Query head h reads key/value head h // (H // G).
        """
        ...

    def new_cache(self, num_blocks: int, layout: CacheLayout, /, *, prefault: bool = False) -> Array:
        """Room for `num_blocks` KV blocks, each contiguous: zeros. The system gives its pages as they are written, or,
        with `prefault`, now: that takes a step's time wherever it happens, in virtual machines a good part of it.
        """
        ...

    def block_bytes(self, layout: CacheLayout, /) -> int:
        """Bytes of one block in this backend's element type, all layers, keys and values."""
        ...

    def copy_blocks(self, source: Array, target: Array, pairs: Int32, /) -> None:
        """target[b] = source[a] for each row (a, b) of `pairs`, all reads before all writes. The two may be one."""
        ...

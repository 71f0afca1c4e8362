"""The pieces models are put together from, each a few calls of ops. Knows no architecture and no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.models.settings import Sizes
from octavo.ops.interface import Activation, Array, AttentionSpec, Int32, Ops, StepInput


@dataclass(frozen=True, slots=True)
class Linear:
    """x times the transposed weight, plus bias; fused weights give their outputs side by side."""

    weight: Array
    bias: Array | None = None

    def __call__(self, ops: Ops, x: Array) -> Array:
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root-mean-square normalisation of rows, or of each head in a row when the weight is a head long."""

    weight: Array
    eps: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        return ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Normalisation of rows to mean 0 and variance 1."""

    weight: Array
    bias: Array
    eps: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm


def rows(ops: Ops, x: Array, wanted: Int32 | None) -> Array:
    """Rows `wanted` of x, or all."""
    return x if wanted is None else ops.take_rows(x, wanted)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query self-attention of one layer over the paged cache."""

    layer: int
    spec: AttentionSpec
    qkv: Linear  # queries, keys, values
    out: Linear
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(self, ops: Ops, x: Array, cache: Array, plan: Array, wanted: Int32 | None) -> Array:
        spec = self.spec
        keys = spec.num_kv_heads * spec.head_dim
        q, k, v = ops.split(self.qkv(ops, x), (spec.num_heads * spec.head_dim, keys, keys))
        if self.q_norm is not None:
            q = self.q_norm(ops, q)
        if self.k_norm is not None:
            k = self.k_norm(ops, k)
        return self.out(ops, rows(ops, ops.attention(q, k, v, cache, self.layer, plan, spec), wanted))


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, "GLU Variants Improve Transformer")."""

    gate_up: Linear  # gate, up
    down: Linear
    activation: Activation

    def __call__(self, ops: Ops, x: Array) -> Array:
        return self.down(ops, ops.gated(self.gate_up(ops, x), self.activation))


@dataclass(frozen=True, slots=True)
class MLP:
    """down(activation(up(x)))."""

    up: Linear
    down: Linear
    activation: Activation

    def __call__(self, ops: Ops, x: Array) -> Array:
        return self.down(ops, ops.activate(self.up(ops, x), self.activation))


class Layer(Protocol):
    """One layer of a decoder: hidden states [T, E] to hidden states, of the rows `wanted` or of all.

    The last layer is told which rows the head will see. All that others still need there is keys and values.
    """

    def __call__(self, ops: Ops, x: Array, cache: Array, plan: Array, wanted: Int32 | None, /) -> Array: ...


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMLP | MLP

    def __call__(self, ops: Ops, x: Array, cache: Array, plan: Array, wanted: Int32 | None, /) -> Array:
        attended = self.attention(ops, self.attention_norm(ops, x), cache, plan, wanted)
        x = ops.add(rows(ops, x, wanted), attended)
        return ops.add(x, self.mlp(ops, self.mlp_norm(ops, x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Embedding, layers, a last norm and the head: a Model, whatever its layers are."""

    ops: Ops
    sizes: Sizes
    embed: Callable[[StepInput], Array]  # tokens, and positions where they are learned, to [T, E]
    layers: Sequence[Layer]
    norm: Norm | None
    head: Linear
    project_out: Linear | None = None  # from the hidden size to the head's, where they differ
    logits_cap: float | None = None  # logits become cap * tanh(logits / cap)

    @property
    def num_layers(self) -> int:
        return self.sizes.layers

    @property
    def num_kv_heads(self) -> int:
        return self.sizes.kv_heads

    @property
    def head_dim(self) -> int:
        return self.sizes.head_dim

    @property
    def vocab_size(self) -> int:
        return self.sizes.vocab

    @property
    def max_positions(self) -> int:
        return self.sizes.positions

    def forward(self, step: StepInput, cache: Array, /) -> Array:
        """Hidden states, normed, of `step.logit_rows`: [R, E]. Keys and values of all the step's tokens are cached."""
        plan = self.ops.plan(step)
        x = self.embed(step)
        *others, last = self.layers
        for layer in others:
            x = layer(self.ops, x, cache, plan, None)
        x = last(self.ops, x, cache, plan, step.logit_rows)
        if self.norm is not None:
            x = self.norm(self.ops, x)
        return x if self.project_out is None else self.project_out(self.ops, x)

    def logits(self, hidden: Array, /) -> Array:
        """Scores of every token to come next, [R, V], for any rows of what `forward` returned."""
        scores = self.head(self.ops, hidden)
        return scores if self.logits_cap is None else self.ops.softcap(scores, self.logits_cap)

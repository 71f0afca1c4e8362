"""Gemma 3, the text model (arXiv:2503.19786): norms around both halves of a layer, and of each query and key head.

Most layers see a sliding window, with a rotary base of their own; every sixth sees all. Embeddings are scaled by the
square root of their size, norm weights are stored less 1. Knows ops only.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.layers import Attention, Decoder, GatedMLP, RMSNorm, rows
from octavo.models.rope import local_rope_table, rope_table
from octavo.models.settings import Settings, read_sizes
from octavo.models.weights import Weights
from octavo.ops.interface import Array, AttentionSpec, Int32, Ops


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    attention_norm: RMSNorm
    attention: Attention
    after_attention: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMLP
    after_mlp: RMSNorm

    def __call__(self, ops: Ops, x: Array, cache: Array, plan: Array, wanted: Int32 | None, /) -> Array:
        attended = self.attention(ops, self.attention_norm(ops, x), cache, plan, wanted)
        x = ops.add(rows(ops, x, wanted), self.after_attention(ops, attended))
        return ops.add(x, self.after_mlp(ops, self.mlp(ops, self.mlp_norm(ops, x))))


def build(config: Settings, weights: Weights, ops: Ops, reach: int) -> Decoder:
    """A Gemma 3 for `reach` positions. Raises ModelError for what it cannot compute."""
    config.unset("mlp_bias")
    sizes, eps, activation = read_sizes(config), config.number("rms_norm_eps"), config.activation()
    hidden, inner, queries, keys = sizes.hidden, sizes.inner, sizes.queries, sizes.keys
    bias = config.flag("attention_bias")
    scale = config.number("query_pre_attn_scalar") ** -0.5
    cap = config.optional_number("attn_logit_softcapping")
    weights.expect("model.layers.0.self_attn.q_proj.weight", queries, hidden)
    everywhere, nearby = rope_table(config, ops, reach), local_rope_table(config, ops, reach)

    def norm(here: Weights, name: str, size: int) -> RMSNorm:
        return here.rms_norm(name, size, eps, offset=1.0)

    def layer(index: int, window: int | None) -> SandwichLayer:
        here = weights.under(f"model.layers.{index}")
        part = here.under("self_attn")
        rope = everywhere if window is None else nearby
        attention = Attention(
            index,
            AttentionSpec(sizes.heads, sizes.kv_heads, sizes.head_dim, scale, window=window, softcap=cap, rope=rope),
            qkv=part.linear({"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, bias=bias),
            out=part.linear({"o_proj": hidden}, queries, bias=bias),
            q_norm=norm(part, "q_norm", sizes.head_dim),
            k_norm=norm(part, "k_norm", sizes.head_dim),
        )
        return SandwichLayer(
            attention_norm=norm(here, "input_layernorm", hidden),
            attention=attention,
            after_attention=norm(here, "post_attention_layernorm", hidden),
            mlp_norm=norm(here, "pre_feedforward_layernorm", hidden),
            mlp=GatedMLP(
                gate_up=here.linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden),
                down=here.linear({"mlp.down_proj": hidden}, inner),
                activation=activation,
            ),
            after_mlp=norm(here, "post_feedforward_layernorm", hidden),
        )

    table = weights.embedding("model.embed_tokens", sizes.vocab, hidden)
    return Decoder(
        ops=ops,
        sizes=sizes,
        embed=lambda step: ops.scale(ops.embed(table, step.token_ids), hidden**0.5),
        layers=[layer(index, window) for index, window in enumerate(config.windows())],
        norm=norm(weights, "model.norm", hidden),
        head=weights.head(table, "model.embed_tokens", sizes, tied=config.flag("tie_word_embeddings")),
        logits_cap=config.optional_number("final_logit_softcapping"),
    )

"""Llama 1 to 3, SmolLM2 and all who kept their file format (Touvron et al. 2023, arXiv:2302.13971).

RMS norms before attention and MLP, rotary positions, grouped queries, a gated MLP. Knows ops only.
"""

from __future__ import annotations

from octavo.models.layers import Attention, Decoder, GatedMLP, PreNormLayer
from octavo.models.rope import rope_table
from octavo.models.settings import Settings, read_sizes
from octavo.models.weights import Weights
from octavo.ops.interface import AttentionSpec, Ops


def build(config: Settings, weights: Weights, ops: Ops, reach: int) -> Decoder:
    """A Llama for `reach` positions. Raises ModelError for what it cannot compute."""
    bias = config.flag("attention_bias")
    return llama_like(config, weights, ops, reach, qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias"))


def llama_like(
    config: Settings,
    weights: Weights,
    ops: Ops,
    reach: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,  # RMS norms of each query and key head, before they are rotated
) -> Decoder:
    """Llama and the descendants that differ from it in biases, windows and norms of the heads only."""
    config.unset()
    sizes, eps, activation = read_sizes(config), config.number("rms_norm_eps"), config.activation()
    hidden, inner, queries, keys, head_dim = sizes.hidden, sizes.inner, sizes.queries, sizes.keys, sizes.head_dim
    weights.expect("model.layers.0.self_attn.q_proj.weight", queries, hidden)
    rope = rope_table(config, ops, reach)

    def layer(index: int, window: int | None) -> PreNormLayer:
        here = weights.under(f"model.layers.{index}")
        part = here.under("self_attn")
        attention = Attention(
            index,
            AttentionSpec(sizes.heads, sizes.kv_heads, head_dim, head_dim**-0.5, window=window, rope=rope),
            qkv=part.linear({"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, bias=qkv_bias),
            out=part.linear({"o_proj": hidden}, queries, bias=out_bias),
            q_norm=part.rms_norm("q_norm", head_dim, eps) if head_norms else None,
            k_norm=part.rms_norm("k_norm", head_dim, eps) if head_norms else None,
        )
        mlp = GatedMLP(
            gate_up=here.linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, bias=mlp_bias),
            down=here.linear({"mlp.down_proj": hidden}, inner, bias=mlp_bias),
            activation=activation,
        )
        return PreNormLayer(
            attention_norm=here.rms_norm("input_layernorm", hidden, eps),
            attention=attention,
            mlp_norm=here.rms_norm("post_attention_layernorm", hidden, eps),
            mlp=mlp,
        )

    table = weights.embedding("model.embed_tokens", sizes.vocab, hidden)
    return Decoder(
        ops=ops,
        sizes=sizes,
        embed=lambda step: ops.embed(table, step.token_ids),
        layers=[layer(index, window) for index, window in enumerate(config.windows())],
        norm=weights.rms_norm("model.norm", hidden, eps),
        head=weights.head(table, "model.embed_tokens", sizes, tied=config.flag("tie_word_embeddings")),
    )

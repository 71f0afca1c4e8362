"""Phi-3 and Phi-4-mini (Abdin et al. 2024, arXiv:2404.14219): Llama's computation from weights fused in the file.

Rotary positions may cover a part of each head, and be stretched by LongRoPE. Knows ops only.
"""

from __future__ import annotations

from octavo.models.layers import Attention, Decoder, GatedMLP, PreNormLayer
from octavo.models.rope import rope_table
from octavo.models.settings import Settings, read_sizes
from octavo.models.weights import Weights
from octavo.ops.interface import AttentionSpec, Ops


def build(config: Settings, weights: Weights, ops: Ops, reach: int) -> Decoder:
    """A Phi-3 for `reach` positions. Raises ModelError for what it cannot compute."""
    config.unset("attention_bias", "mlp_bias")
    sizes, eps, activation = read_sizes(config), config.number("rms_norm_eps"), config.activation()
    hidden, inner = sizes.hidden, sizes.inner
    weights.expect("model.layers.0.self_attn.qkv_proj.weight", sizes.queries + 2 * sizes.keys, hidden)
    rope = rope_table(config, ops, reach)

    def layer(index: int, window: int | None) -> PreNormLayer:
        here = weights.under(f"model.layers.{index}")
        scale = sizes.head_dim**-0.5
        attention = Attention(
            index,
            AttentionSpec(sizes.heads, sizes.kv_heads, sizes.head_dim, scale, window=window, rope=rope),
            qkv=here.linear({"self_attn.qkv_proj": sizes.queries + 2 * sizes.keys}, hidden),
            out=here.linear({"self_attn.o_proj": hidden}, sizes.queries),
        )
        mlp = GatedMLP(
            gate_up=here.linear({"mlp.gate_up_proj": 2 * inner}, hidden),
            down=here.linear({"mlp.down_proj": hidden}, inner),
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

"""GPT-2 (Radford et al. 2019): learned positions, layer norms before attention and MLP, biases. Knows ops only."""

from __future__ import annotations

from octavo.models.layers import MLP, Attention, Decoder, PreNormLayer
from octavo.models.settings import Settings, read_sizes
from octavo.models.weights import Weights
from octavo.ops.interface import Array, AttentionSpec, Ops, StepInput


def build(config: Settings, weights: Weights, ops: Ops, reach: int) -> Decoder:
    """A GPT-2, for as many positions as it has learned. Raises ModelError for what it cannot compute."""
    config.unset()
    sizes, eps, activation = read_sizes(config), config.number("layer_norm_epsilon"), config.activation()
    hidden, inner = sizes.hidden, sizes.inner
    scale = sizes.head_dim**-0.5 if config.flag("scale_attn_weights") else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")

    def layer(index: int) -> PreNormLayer:
        here = weights.under(f"h.{index}")
        layer_scale = scale / (index + 1) if by_layer else scale
        return PreNormLayer(
            attention_norm=here.layer_norm("ln_1", hidden, eps),
            attention=Attention(
                index,
                AttentionSpec(sizes.heads, sizes.kv_heads, sizes.head_dim, layer_scale),
                qkv=here.linear({"attn.c_attn": 3 * hidden}, hidden, bias=True),
                out=here.linear({"attn.c_proj": hidden}, hidden, bias=True),
            ),
            mlp_norm=here.layer_norm("ln_2", hidden, eps),
            mlp=MLP(
                up=here.linear({"mlp.c_fc": inner}, hidden, bias=True),
                down=here.linear({"mlp.c_proj": hidden}, inner, bias=True),
                activation=activation,
            ),
        )

    table = weights.embedding("wte", sizes.vocab, hidden)
    places = weights.embedding("wpe", sizes.positions, hidden)

    def embed(step: StepInput) -> Array:
        return ops.add(ops.embed(table, step.token_ids), ops.embed(places, step.positions))

    return Decoder(
        ops=ops,
        sizes=sizes,
        embed=embed,
        layers=[layer(index) for index in range(sizes.layers)],
        norm=weights.layer_norm("ln_f", hidden, eps),
        head=weights.head(table, "wte", sizes, tied=config.flag("tie_word_embeddings")),
    )

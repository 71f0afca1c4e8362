"""OPT (Zhang et al. 2022, arXiv:2205.01068): learned positions that begin at 2, layer norms before each half or after.

The 350M model has its norms after, and embeddings narrower than its layers. Knows ops only.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.layers import MLP, Attention, Decoder, LayerNorm, PreNormLayer, rows
from octavo.models.settings import Settings, read_sizes
from octavo.models.weights import Weights
from octavo.ops.interface import Array, AttentionSpec, Int32, Ops, StepInput

_EPS = 1e-5
_FIRST = 2  # the place of the first token: 0 and 1 were padding's


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    attention: Attention
    after_attention: LayerNorm
    mlp: MLP
    after_mlp: LayerNorm

    def __call__(self, ops: Ops, x: Array, cache: Array, plan: Array, wanted: Int32 | None, /) -> Array:
        attended = self.attention(ops, x, cache, plan, wanted)
        x = self.after_attention(ops, ops.add(rows(ops, x, wanted), attended))
        return self.after_mlp(ops, ops.add(x, self.mlp(ops, x)))


def build(config: Settings, weights: Weights, ops: Ops, reach: int) -> Decoder:
    """An OPT, for as many positions as it has learned. Raises ModelError for what it cannot compute."""
    config.unset()
    if not config.flag("layer_norm_elementwise_affine"):
        raise config.refusal("layer_norm_elementwise_affine", "true: norms without weights are not supported")
    sizes, activation, bias = read_sizes(config), config.activation(), config.flag("enable_bias")
    hidden, inner = sizes.hidden, sizes.inner
    before = config.flag("do_layer_norm_before")
    width = config.whole("word_embed_proj_dim") if "word_embed_proj_dim" in config else hidden
    decoder = weights.under("model.decoder")

    def layer(index: int) -> PreNormLayer | PostNormLayer:
        here = decoder.under(f"layers.{index}")
        part = here.under("self_attn")
        attention = Attention(
            index,
            AttentionSpec(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.head_dim**-0.5),
            qkv=part.linear({"q_proj": hidden, "k_proj": hidden, "v_proj": hidden}, hidden, bias=bias),
            out=part.linear({"out_proj": hidden}, hidden, bias=bias),
        )
        mlp = MLP(
            here.linear({"fc1": inner}, hidden, bias=bias), here.linear({"fc2": hidden}, inner, bias=bias), activation
        )
        first, second = (here.layer_norm(f"{name}_layer_norm", hidden, _EPS) for name in ("self_attn", "final"))
        if before:
            return PreNormLayer(first, attention, second, mlp)
        return PostNormLayer(attention, first, mlp, second)

    table = decoder.embedding("embed_tokens", sizes.vocab, width)
    places = decoder.embedding("embed_positions", sizes.positions + _FIRST, hidden, skip=_FIRST)
    project_in = decoder.linear({"project_in": hidden}, width) if width != hidden else None

    def embed(step: StepInput) -> Array:
        x = ops.embed(table, step.token_ids)
        x = x if project_in is None else project_in(ops, x)
        return ops.add(x, ops.embed(places, step.positions))

    normed = before and not config.flag("_remove_final_layer_norm")
    return Decoder(
        ops=ops,
        sizes=sizes,
        embed=embed,
        layers=[layer(index) for index in range(sizes.layers)],
        norm=decoder.layer_norm("final_layer_norm", hidden, _EPS) if normed else None,
        project_out=decoder.linear({"project_out": width}, hidden) if width != hidden else None,
        head=weights.head(
            table, "model.decoder.embed_tokens", sizes, tied=config.flag("tie_word_embeddings"), width=width
        ),
    )

"""Qwen3, the dense ones (arXiv:2505.09388): Llama with a norm of each query and key head. Knows ops only."""

from __future__ import annotations

from octavo.models.layers import Decoder
from octavo.models.llama import llama_like
from octavo.models.settings import Settings
from octavo.models.weights import Weights
from octavo.ops.interface import Ops


def build(config: Settings, weights: Weights, ops: Ops, reach: int) -> Decoder:
    """A Qwen3 for `reach` positions. Raises ModelError for what it cannot compute."""
    config.unset("mlp_bias")
    bias = config.flag("attention_bias")
    return llama_like(config, weights, ops, reach, qkv_bias=bias, out_bias=bias, head_norms=True)

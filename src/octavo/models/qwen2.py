"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values. Knows ops only."""

from __future__ import annotations

from octavo.models.layers import Decoder
from octavo.models.llama import llama_like
from octavo.models.settings import Settings
from octavo.models.weights import Weights
from octavo.ops.interface import Ops


def build(config: Settings, weights: Weights, ops: Ops, reach: int) -> Decoder:
    """A Qwen2 for `reach` positions; its later layers may have a sliding window. Raises ModelError as others do."""
    config.unset("mlp_bias")
    return llama_like(config, weights, ops, reach, qkv_bias=True)

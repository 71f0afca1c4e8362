"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with a sliding window in every layer. Knows ops only."""

from __future__ import annotations

from octavo.models.layers import Decoder
from octavo.models.llama import llama_like
from octavo.models.settings import Settings
from octavo.models.weights import Weights
from octavo.ops.interface import Ops


def build(config: Settings, weights: Weights, ops: Ops, reach: int) -> Decoder:
    """A Mistral for `reach` positions. Raises ModelError for what it cannot compute."""
    config.unset("attention_bias", "mlp_bias")
    return llama_like(config, weights, ops, reach)

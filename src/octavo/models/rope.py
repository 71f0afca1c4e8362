"""Rotary frequencies and the ways to stretch them over longer contexts. Knows config keys; no weights, no layers.

RoPE is Su et al. 2021 (arXiv:2104.09864). Every way of scaling ends in frequencies that stay fixed while an engine
runs, because the keys in its cache are rotated already. Where Transformers lets them depend on the length of the
sequence at hand (longrope), the longest context the engine is set up for decides instead. Dynamic scaling is nothing
but such a dependence, so it is not supported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.models.settings import Settings
from octavo.ops.interface import Array, Ops

Frequencies = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Span:
    """What frequencies are worked out for."""

    dim: int  # rotated dimensions of a head
    theta: float  # frequency i is theta ** (-2 i / dim)
    trained: int  # positions of training (max_position_embeddings)
    reach: int  # positions the engine is set up for
    original: int  # positions of training before the context was extended

    @property
    def frequencies(self) -> Frequencies:
        """Radians a position, unscaled: [dim / 2]."""
        return self.theta ** (-np.arange(0, self.dim, 2) / self.dim)


def rope_table(config: Settings, ops: Ops, reach: int) -> Array:
    """The rotary table of a model's layers, for an engine set up for `reach` positions.

    Raises ModelError for a way of scaling, or a setting of one, that is not known.
    """
    scaling = config.part("rope_scaling")
    kind = scaling.choice("rope_type", "default", tuple(_WAYS))
    keys, scale = _WAYS[kind]
    scaling.known_only((*_COMMON, *keys))
    trained = config.whole("max_position_embeddings")
    original = scaling.whole(_ORIGINAL) if _ORIGINAL in scaling else trained
    span = Span(_rotated(config), config.number("rope_theta"), trained, reach, original)
    if kind == "yarn" and span.theta <= 1:
        raise config.refusal("rope_theta", "over 1 with rope scaling of type 'yarn'")
    with np.errstate(all="ignore"):  # looked at below
        frequencies, factor = scale(scaling, span)
    if not _fit_float32(frequencies, factor):
        raise config.refusal("rope_scaling" if kind != "default" else "rope_theta", "such that float32 holds rotations")
    return ops.rope_table(frequencies, reach, factor=factor)


def local_rope_table(config: Settings, ops: Ops, reach: int) -> Array:
    """The rotary table of Gemma 3's sliding layers: a base frequency of their own, never scaled."""
    theta, trained = config.number("rope_local_base_freq"), config.whole("max_position_embeddings")
    with np.errstate(all="ignore"):
        frequencies = Span(_rotated(config), theta, trained, reach, trained).frequencies
    if not _fit_float32(frequencies):
        raise config.refusal("rope_local_base_freq", "such that float32 holds rotations")
    return ops.rope_table(frequencies, reach)


def _fit_float32(frequencies: Frequencies, factor: float = 1.0) -> bool:
    """Whether angles and magnitudes stay numbers in float32; others would make every logit NaN."""
    with np.errstate(all="ignore"):
        most = np.maximum(frequencies.max(), abs(factor)) * 2.0**31  # more positions than any context has
        return bool(most <= np.finfo(np.float32).max)  # also False for NaN


def _rotated(config: Settings) -> int:
    """Dimensions of a head that are rotated."""
    head_dim = config.whole("head_dim")
    rotated = int(head_dim * config.number("partial_rotary_factor"))
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise config.refusal("partial_rotary_factor", f"a share of head_dim ({head_dim}) that is an even number")
    return rotated


def _default(scaling: Settings, span: Span) -> tuple[Frequencies, float]:
    return span.frequencies, 1.0


def _linear(scaling: Settings, span: Span) -> tuple[Frequencies, float]:
    """Positions divided by the factor (Chen et al. 2023, arXiv:2306.15595)."""
    return span.frequencies / scaling.number("factor"), 1.0


def _llama3(scaling: Settings, span: Span) -> tuple[Frequencies, float]:
    """Long wavelengths divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low == high:
        raise scaling.refusal("high_freq_factor", "another number than low_freq_factor")
    turns = span.original * span.frequencies / (2 * math.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return span.frequencies * (kept + (1 - kept) / scaling.number("factor")), 1.0


def _yarn(scaling: Settings, span: Span) -> tuple[Frequencies, float]:
    """Dimensions that turn often kept, those that turn seldom divided by the factor (Peng et al. 2023, 2309.00071)."""
    factor = scaling.number("factor", span.trained / span.original)

    def dimension(turns: float) -> float:
        """The one that turns so often over the original context."""
        return span.dim * math.log(span.original / (turns * 2 * math.pi)) / (2 * math.log(span.theta))

    low, high = dimension(_turns(scaling, "beta_fast", 32)), dimension(_turns(scaling, "beta_slow", 1))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, span.dim - 1)
    divided = np.clip((np.arange(span.dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return span.frequencies * (1 - divided + divided / factor), _yarn_magnitude(scaling, factor)


def _turns(scaling: Settings, key: str, default: float) -> float:
    turns = scaling.number(key, default)
    if not 1e-6 <= turns <= 1e6:
        raise scaling.refusal(key, "a number from 0.000001 to 1000000")
    return turns


def _yarn_magnitude(scaling: Settings, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    given = scaling.optional_number("attention_factor")
    if given is not None:
        return given
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return magnitude(scaling.number("mscale")) / magnitude(scaling.number("mscale_all_dim"))
    return magnitude(1.0)


def _longrope(scaling: Settings, span: Span) -> tuple[Frequencies, float]:
    """A divisor for each frequency, one set for short contexts and one for long (Ding et al. 2024, 2402.13753)."""
    if span.original < 2:
        raise scaling.refusal(_ORIGINAL, "at least 2 with rope scaling of type 'longrope'")
    short, long = (scaling.numbers(key, span.dim // 2) for key in ("short_factor", "long_factor"))
    factor = scaling.number("factor", span.trained / span.original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(span.original)) if factor > 1 else 1.0
    divisors = long if span.reach > span.original else short
    return span.frequencies / divisors, scaling.number("attention_factor", magnitude)


def _factors(scaling: Settings, span: Span) -> tuple[Frequencies, float]:
    """A divisor for each frequency, as GGUF files store them."""
    return span.frequencies / scaling.numbers("factors", span.dim // 2), 1.0


_ORIGINAL = "original_max_position_embeddings"
_COMMON = ("rope_type", _ORIGINAL)
_YARN = ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim", "finetuned")

# rope_type: the keys it has beside the common ones, and what they make of the frequencies.
_WAYS: dict[str, tuple[tuple[str, ...], Callable[[Settings, Span], tuple[Frequencies, float]]]] = {
    "default": ((), _default),
    "linear": (("factor",), _linear),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), _llama3),
    "yarn": (_YARN, _yarn),
    "longrope": (("factor", "short_factor", "long_factor", "attention_factor"), _longrope),
    "factors": (("factors",), _factors),
}

"""Reading a checkpoint's settings key by key, and refusing what we would compute wrongly. Knows no architecture.

The keys are those of `octavo.loading.dialect`, which sees to it that sizes are there and make sense. Here the rest:
nothing is ignored that could change a token; a feature that no model here has is refused by name, with its value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import ModelError
from octavo.ops.interface import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# What other decoders have that changes their numbers. No architecture here computes it, so none may have it set.
_FOREIGN = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
    *("residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling", "logit_scale"),
    *("attention_chunk_size", "no_rope_layers", "clip_qkv", "alibi", "use_bidirectional_attention"),
    *("use_qk_norm", "qk_layernorm", "use_parallel_residual", "rope_interleaved", "add_cross_attention"),
)


class Settings:
    """One mapping of settings, of a model or of a part of it.

    Each reader raises ModelError, naming the key and its value, for what it cannot take. A key that is missing or null
    takes the default, if the reader was given one.
    """

    def __init__(self, owner: str, values: Mapping[str, Any]) -> None:
        self._owner = owner
        self._values = values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def refusal(self, key: str, must: str) -> ModelError:
        """The error for a value that cannot be."""
        if key not in self._values:
            return ModelError(f"{self._owner} does not give {key}; it must be {must}.")
        return ModelError(f"{self._owner} has {key} = {self._values[key]!r}; it must be {must}.")

    def whole(self, key: str) -> int:
        """A whole number of at least 1."""
        value = self._values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(key, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number over 0."""
        value = self._values[key] if key in self else default
        if not _positive(value):
            raise self.refusal(key, "a number over 0")
        return float(value)  # type: ignore[arg-type]  # None is not positive

    def optional_number(self, key: str) -> float | None:
        """A finite number over 0, or None where it is missing or null."""
        return self.number(key) if key in self else None

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of `count` finite numbers over 0."""
        value = self._values.get(key)
        if not isinstance(value, Sequence) or len(value) != count or not all(map(_positive, value)):
            raise self.refusal(key, f"a list of {count} numbers over 0")
        return [float(one) for one in value]

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or False."""
        value = self._values[key] if key in self else default
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """One of the choices."""
        value = self._values[key] if key in self else default
        if value not in choices:
            raise self.refusal(key, f"one of {', '.join(choices)}")
        return str(value)

    def activation(self) -> Activation:
        """The op for the activation that Transformers calls `hidden_act`."""
        return _ACTIVATIONS[self.choice("hidden_act", "", tuple(_ACTIVATIONS))]

    def windows(self) -> list[int | None]:
        """For each layer, how many tokens a token sees; None: all before it."""
        kinds = self._values["layer_types"]
        return [self.whole("sliding_window") if kind == "sliding_attention" else None for kind in kinds]

    def part(self, key: str) -> Settings:
        """The mapping under a key, empty where it is missing or null."""
        return Settings(f"{self._owner}'s {key}", self._values.get(key) or {})

    def known_only(self, keys: Sequence[str]) -> None:
        """Refuse whatever is set and not among the keys."""
        for key, value in self._values.items():
            if value is not None and key not in keys:
                raise self.refusal(key, f"left out; supported beside it are {', '.join(keys)}")

    def unset(self, *keys: str) -> None:
        """Refuse each of these keys, and what no model here computes, unless it is missing, null, false or empty."""
        for key in (*keys, *_FOREIGN):
            if self._values.get(key):
                raise self.refusal(key, "left out or false: models of this kind are not supported with it")


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The dimensions that every architecture has."""

    hidden: int
    inner: int  # of the MLP
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int  # longest context in training

    @property
    def queries(self) -> int:
        """Columns of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Columns of all heads' keys, or values."""
        return self.kv_heads * self.head_dim


def read_sizes(config: Settings) -> Sizes:
    """The sizes by the names they have in every architecture's settings."""
    return Sizes(
        hidden=config.whole("hidden_size"),
        inner=config.whole("intermediate_size"),
        layers=config.whole("num_hidden_layers"),
        heads=config.whole("num_attention_heads"),
        kv_heads=config.whole("num_key_value_heads"),
        head_dim=config.whole("head_dim"),
        vocab=config.whole("vocab_size"),
        positions=config.whole("max_position_embeddings"),
    )

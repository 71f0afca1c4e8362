"""What a model is to the engine that runs it. Knows neither architectures nor files."""

from __future__ import annotations

from typing import Protocol

from octavo.ops.interface import Array, StepInput


class Model(Protocol):
    """A decoder-only language model over some backend's ops."""

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Elements of a key or a value of one head."""
        ...

    @property
    def vocab_size(self) -> int:
        """Logits of a row: token ids are below it."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest context the model was trained for, in tokens."""
        ...

    def forward(self, step: StepInput, cache: Array, /) -> Array:
        """Compute the step's tokens and cache their keys and values; hidden states of `step.logit_rows`, [R, E]."""
        ...

    def logits(self, hidden: Array, /) -> Array:
        """Scores of every token to come next, [R, V], for any rows of what `forward` returned."""
        ...

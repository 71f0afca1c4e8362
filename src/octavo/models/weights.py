"""Taking a checkpoint's tensors into a backend, each checked against the shape it must have, and none left over.

A tensor nobody asked for would be a bias or a layer that the model silently computes without, so it is an error too.
Knows names and shapes; neither what a layer computes nor how a tensor is stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import ModelError
from octavo.loading.tensor import StoredTensor
from octavo.models.layers import LayerNorm, Linear, RMSNorm
from octavo.models.settings import Sizes
from octavo.ops.interface import Array, Ops

if TYPE_CHECKING:
    from octavo.loading.checkpoint import Checkpoint

# Written by some versions of Transformers, computed from the config by all: masks and rotary frequencies.
_DERIVED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias))")


class Weights:
    """The tensors under a prefix of names."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, prefix: str = "", used: set[str] | None = None) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._prefix = prefix
        self._used = set() if used is None else used

    def under(self, prefix: str) -> Weights:
        """The tensors further in."""
        return Weights(self._checkpoint, self._ops, f"{self._prefix}{prefix}.", self._used)

    def expect(self, name: str, rows: int, columns: int) -> None:
        """Raise ModelError unless there is such a tensor: before anything of a size in the settings is computed."""
        self._checkpoint.tensor(self._prefix + name, (rows, columns))

    def linear(self, rows: Mapping[str, int], columns: int, *, bias: bool = False) -> Linear:
        """The named projections stacked into one: each [its rows, columns], all with a bias or none."""
        weight = self._ops.linear_weight([self._take(f"{name}.weight", n, columns) for name, n in rows.items()])
        if not bias:
            return Linear(weight)
        return Linear(weight, self._ops.vector([self._take(f"{name}.bias", n) for name, n in rows.items()]))

    def embedding(self, name: str, rows: int, columns: int, *, skip: int = 0) -> Array:
        """A table for `Ops.embed`, of a tensor's rows from `skip` on."""
        part = self._take(f"{name}.weight", rows, columns)
        if skip:
            part = replace(part, shape=(rows - skip, columns), raw=part.raw[skip:])
        return self._ops.linear_weight([part])

    def head(self, table: Array, table_name: str, sizes: Sizes, *, tied: bool, width: int | None = None) -> Linear:
        """The projection from `width` columns (the hidden size, unless given) to logits; if tied, the embedding again.

        Raises ModelError if the two are said to be tied, but the file has a head of its own that differs.
        """
        shape = sizes.vocab, width or sizes.hidden
        if not tied:
            return self.linear({"lm_head": shape[0]}, shape[1])
        if "lm_head.weight" in self._checkpoint.tensors:
            own, embedded = self._take("lm_head.weight", *shape), self._take(f"{table_name}.weight", *shape)
            if own.dtype != embedded.dtype or not np.array_equal(own.raw, embedded.raw):
                raise ModelError(
                    f"{self._checkpoint.name} says that its head is its embedding (tie_word_embeddings = True), "
                    f"but {own.name} differs from {embedded.name}; set tie_word_embeddings to false to use it."
                )
        return Linear(table)

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        """A norm whose weight is what is stored, plus `offset`."""
        return RMSNorm(self._ops.vector([self._take(f"{name}.weight", size)], offset=offset), eps)

    def layer_norm(self, name: str, size: int, eps: float) -> LayerNorm:
        """A norm with weight and bias."""
        weight, bias = (self._ops.vector([self._take(f"{name}.{kind}", size)]) for kind in ("weight", "bias"))
        return LayerNorm(weight, bias, eps)

    def refuse_unused(self, unneeded: Sequence[str] = ()) -> None:
        """Raise ModelError if a tensor was not taken, other than those whose name begins with one of `unneeded`."""
        unused = [
            name
            for name in self._checkpoint.tensors
            if name not in self._used and not _DERIVED.fullmatch(name) and not name.startswith(tuple(unneeded))
        ]
        if unused:
            shown = ", ".join(sorted(unused)[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
            raise ModelError(
                f"{self._checkpoint.name} has tensors that a {self._checkpoint.architecture} model does not use "
                f"({shown}), so it would be computed wrongly; "
                "is its config.json its own, and no adapter or other architecture in the file?"
            )

    def _take(self, name: str, *shape: int) -> StoredTensor:
        self._used.add(self._prefix + name)
        return self._checkpoint.tensor(self._prefix + name, shape)

"""A weight as it lies in a file: its name, shape, storage type and raw bytes. Knows no model and no backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One named weight, still in its storage type, so that a backend may keep it quantised.

    `raw` is the stored data (usually a memory map): for a plain type an array of `shape` (BF16 as uint16), for a
    GGUF quantised type uint8 `[*shape[:-1], bytes of one row]`, whole quantisation blocks along the last axis.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # GGUF's names: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K
    raw: NDArray[np.generic]
    decode: Callable[[NDArray[np.generic]], NDArray[np.float32]]

    def float32(self) -> NDArray[np.float32]:
        """The values as float32 of `shape`."""
        return self.decode(self.raw).reshape(self.shape)

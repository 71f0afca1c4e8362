"""The ways weights are stored: name, GGML number, bytes of a quantisation block, values. Knows no file and no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Raw = NDArray[np.generic]
Decode = Callable[[Raw], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class StorageType:
    """One way to store values: `block` values along the last axis take `block_bytes` bytes."""

    name: str  # GGUF's name
    ggml: int  # its number in a GGUF file
    block: int
    block_bytes: int
    element: np.dtype[np.generic]  # of the raw array; uint8 for quantised types
    decode: Decode  # raw -> float32; whole rows may be taken out of the raw array first

    @property
    def quantised(self) -> bool:
        """Whether values share scales in blocks."""
        return self.block > 1

    def raw_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the raw array of a tensor of `shape`, whose last axis must hold whole blocks."""
        if not self.quantised:
            return shape
        return (*shape[:-1], shape[-1] // self.block * self.block_bytes)


def _from_float(raw: Raw) -> NDArray[np.float32]:
    return raw.astype(np.float32, copy=False)


def _from_bfloat16(raw: Raw) -> NDArray[np.float32]:
    wide: NDArray[np.uint32] = raw.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def _dequantiser(name: str) -> Decode:
    def decode(raw: Raw) -> NDArray[np.float32]:
        from gguf import GGMLQuantizationType, quants  # a tenth of a second: only when values are asked for

        values: NDArray[np.float32] = quants.dequantize(raw, GGMLQuantizationType[name])
        return values

    return decode


def _quantised(name: str, ggml: int, block: int, block_bytes: int) -> StorageType:
    return StorageType(name, ggml, block, block_bytes, np.dtype("u1"), _dequantiser(name))


STORAGE_TYPES = (
    StorageType("F32", 0, 1, 4, np.dtype("<f4"), _from_float),
    StorageType("F16", 1, 1, 2, np.dtype("<f2"), _from_float),
    StorageType("BF16", 30, 1, 2, np.dtype("<u2"), _from_bfloat16),
    _quantised("Q8_0", 8, 32, 34),
    _quantised("Q4_0", 2, 32, 18),
    _quantised("Q4_1", 3, 32, 20),
    _quantised("Q5_0", 6, 32, 22),
    _quantised("Q5_1", 7, 32, 24),
    _quantised("Q4_K", 12, 256, 144),
    _quantised("Q5_K", 13, 256, 176),
    _quantised("Q6_K", 14, 256, 210),
)
BY_NAME = {kind.name: kind for kind in STORAGE_TYPES}
BY_GGML = {kind.ggml: kind for kind in STORAGE_TYPES}

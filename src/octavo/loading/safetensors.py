"""The safetensors format: weights of one file, mapped into memory. Knows no model.

Follows the format's description: 8 bytes with the length of a JSON header, the header, the data without gaps. (The
`safetensors` package gives NumPy no bfloat16, so the header is read here, and checked against the file.)
"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.loading.files import map_file, parse_json
from octavo.loading.storage import BY_NAME, StorageType
from octavo.loading.tensor import StoredTensor

_TYPES = {name: BY_NAME[name] for name in ("F32", "F16", "BF16")}
_MOST_DIMENSIONS = 8
_LONGEST = 2**60  # bytes of data, and the longest dimension
_LONGEST_HEADER = 100_000_000  # as in the format's own implementation


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The weights of a .safetensors file by name.

    Raises ModelError, naming the file and the tensor, if the file is truncated or contradicts itself. A tensor of
    another type than F32, F16 and BF16 is refused.
    """
    buffer = map_file(path, "a safetensors file")
    length = int.from_bytes(buffer[:8], "little")
    if len(buffer) < 8 or length > min(len(buffer) - 8, _LONGEST_HEADER):
        raise ModelError(
            f"{path} claims a header of {length} bytes but has {len(buffer)} in all; it is truncated or no safetensors "
            "file."
        )
    try:
        header = parse_json(buffer[8 : 8 + length].decode(), f"{path}: the header")
    except UnicodeDecodeError:
        raise ModelError(f"{path}: the header is no UTF-8 text; it is damaged or no safetensors file.") from None
    header.pop("__metadata__", None)
    spans = {name: _span(path, name, entry) for name, entry in header.items()}
    size, base = len(buffer) - 8 - length, 8 + length
    end = 0
    for name, (start, stop, _, _) in sorted(spans.items(), key=lambda item: item[1][:2]):
        if start != end:
            raise ModelError(f"{path}: the tensor {name!r} begins at byte {start} of the data instead of {end}.")
        end = stop
    if end != size:
        what = "truncated" if end > size else "damaged"
        raise ModelError(f"{path} has {size} bytes of data but its tensors take {end}: it is {what}, so get it again.")
    return {name: _tensor(buffer, name, base + start, shape, kind) for name, (start, _, shape, kind) in spans.items()}


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, tuple[int, ...], StorageType]:
    """Where a tensor's data begin and end, its shape and type, from its entry in the header."""
    if not isinstance(entry, dict):
        raise ModelError(f"{path}: the entry of tensor {name!r} in the header is no object.")
    dtype = entry.get("dtype")
    kind = _TYPES.get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        raise ModelError(
            f"{path}: the tensor {name!r} is stored as {dtype!r}, which is not supported; {', '.join(_TYPES)} are."
        )
    shape, offsets = _whole_numbers(entry.get("shape")), _whole_numbers(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ModelError(f"{path}: the tensor {name!r} has no proper shape and data_offsets in the header.")
    (start, stop), needed = offsets, prod(shape) * kind.block_bytes
    if stop - start != needed:
        raise ModelError(
            f"{path}: the tensor {name!r}, of shape {list(shape)} in {kind.name}, takes {needed} bytes but has "
            f"{stop - start}."
        )
    return start, stop, shape, kind


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    fits = isinstance(value, list) and len(value) <= _MOST_DIMENSIONS
    return tuple(value) if fits and all(type(item) is int and 0 <= item < _LONGEST for item in value) else None


def _tensor(buffer: mmap.mmap, name: str, start: int, shape: tuple[int, ...], kind: StorageType) -> StoredTensor:
    count = prod(shape)
    raw: NDArray[np.generic] = np.frombuffer(buffer, kind.element, count, start) if count else np.empty(0, kind.element)
    if not raw.flags.aligned:
        raw = raw.copy()
    return StoredTensor(name, shape, kind.name, raw.reshape(shape), kind.decode)

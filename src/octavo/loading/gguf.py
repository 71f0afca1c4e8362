"""The GGUF container: its metadata and its tensors, mapped into memory. Knows no model and no tokenizer.

Follows the GGUF specification (versions 2 and 3, little-endian). The `gguf` package's reader takes seconds on a long
vocabulary and trusts every count; this one takes a twentieth of a second and checks each against the file. What the
values mean is left to the `gguf` package (see `octavo.loading.storage`).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.loading.files import map_file
from octavo.loading.storage import BY_GGML, STORAGE_TYPES
from octavo.loading.tensor import StoredTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_SCALARS: dict[int, tuple[str, str]] = {  # GGUF's value type -> struct's and NumPy's letters
    0: ("B", "u1"),
    1: ("b", "i1"),
    2: ("H", "<u2"),
    3: ("h", "<i2"),
    4: ("I", "<u4"),
    5: ("i", "<i4"),
    6: ("f", "<f4"),
    7: ("?", "?"),
    10: ("Q", "<u8"),
    11: ("q", "<i8"),
    12: ("d", "<f8"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_LEAST_KEY = 8 + 4 + 1  # bytes of the shortest metadata entry: its key's length, value type, value
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8  # of the shortest tensor entry: name length, dimensions, one of them, type, offset
_MOST_DIMENSIONS = 4
_MOST_NESTING = 4


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What a GGUF file holds."""

    path: Path
    metadata: dict[str, Any]  # numbers, bools, texts; arrays of texts are lists, other arrays NumPy's
    tensors: dict[str, StoredTensor]  # GGUF's names; shapes are NumPy's (slowest axis first)


def read_gguf(path: Path) -> GGUFFile:
    """Metadata and mapped tensors of a GGUF file.

    Raises ModelError, naming the file and the key or tensor, if it is no GGUF file, is truncated or contradicts
    itself, or holds a tensor type that is not supported.
    """
    buffer = map_file(path, "a GGUF file")
    if buffer[:4] != MAGIC:
        raise ModelError(
            f"{path} is not a GGUF file: it begins with {bytes(buffer[:4])!r} instead of {MAGIC!r}; give a .gguf file "
            "or a Hugging Face folder."
        )
    reader = _Reader(path, buffer)
    reader.inside = "its header"
    version = reader.u32()
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "big-endian" if swapped in VERSIONS else f"of GGUF version {version}"
        raise ModelError(f"{path} is {what}; versions 2 and 3, little-endian, are supported.")
    num_tensors, num_keys = reader.u64(), reader.u64()
    reader.check_count(num_tensors, _LEAST_TENSOR, "tensors")
    reader.check_count(num_keys, _LEAST_KEY, "metadata keys")

    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        reader.inside = "the metadata key after " + repr(next(reversed(metadata), "its header"))
        key = reader.text()
        reader.inside = f"the metadata key {key!r}"
        if key in metadata:
            raise ModelError(f"{path} has the metadata key {key!r} twice.")
        metadata[key] = reader.value(reader.u32())
    entries = _read_entries(reader, num_tensors)
    tensors = _map_tensors(reader, entries, _alignment(path, metadata))
    return GGUFFile(path, metadata, tensors)


class _Reader:
    """A cursor over the file's bytes that never goes beyond their end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = len(MAGIC)
        self.inside = ""  # what is being read, for messages

    def skip(self, count: int) -> int:
        """Where the next `count` bytes begin; the cursor moves behind them."""
        start = self.at
        if count > self.size - start:
            raise ModelError(
                f"{self.path} ends inside {self.inside} (its {self.size} bytes are {start + count - self.size} too "
                "few): it is truncated or damaged, so get it again."
            )
        self.at = start + count
        return start

    def u32(self) -> int:
        value: int = _U32.unpack_from(self.buffer, self.skip(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self.buffer, self.skip(8))[0]
        return value

    def check_count(self, count: int, least_bytes: int, of_what: str) -> None:
        if count * least_bytes > self.size - self.at:
            raise ModelError(
                f"{self.path} claims {count} {of_what} in {self.inside}, more than its {self.size} bytes can hold: it "
                "is truncated or damaged, so get it again."
            )

    def text(self) -> str:
        length = self.u64()
        start = self.skip(length)
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.not_text() from None

    def not_text(self) -> ModelError:
        return ModelError(f"{self.path}: {self.inside} has a text that is not UTF-8; the file is damaged.")

    def value(self, kind: int, depth: int = 0) -> Any:
        """The next metadata value of GGUF's value type `kind`."""
        if kind in _SCALARS:
            letter = _SCALARS[kind][0]
            found = struct.unpack_from("<" + letter, self.buffer, self.skip(struct.calcsize(letter)))[0]
            # 1e-05 was meant, not its neighbour 9.999999747378752e-06
            return float(str(np.float32(found))) if kind == _FLOAT32 else found
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < _MOST_NESTING:
            return self.array(self.u32(), self.u64(), depth)
        raise ModelError(f"{self.path}: {self.inside} has a value of unknown type {kind}.")

    def array(self, kind: int, count: int, depth: int) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind][1])
            start = self.skip(count * dtype.itemsize)
            return np.frombuffer(self.buffer, dtype, count, start)
        if kind == _STRING:
            self.check_count(count, 8, "texts")
            return self.texts(count)
        self.check_count(count, 12, "arrays")
        return [self.value(kind, depth + 1) for _ in range(count)]

    def texts(self, count: int) -> list[str]:
        """`count` texts; written out, as a vocabulary has a quarter of a million."""
        buffer, at, last = self.buffer, self.at, self.size - 8
        read_length = _U64.unpack_from
        found = []
        try:
            for _ in range(count):
                if at > last:
                    break
                start = at + 8
                at = start + read_length(buffer, at)[0]
                found.append(buffer[start:at].decode())
        except UnicodeDecodeError:
            raise self.not_text() from None
        if len(found) < count or at > self.size:
            self.skip(max(at, self.size + 1) - self.at)  # raises
        self.at = at
        return found


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the file announces it."""

    name: str
    shape: tuple[int, ...]
    ggml: int
    offset: int  # bytes after the beginning of the data


def _read_entries(reader: _Reader, count: int) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    for _ in range(count):
        reader.inside = f"the list of tensors, after {next(reversed(entries), 'the metadata')!r}"
        name = reader.text()
        reader.inside = f"the entry of tensor {name!r}"
        dimensions = reader.u32()
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ModelError(f"{reader.path}: the tensor {name!r} has {dimensions} dimensions; 1 to 4 are supported.")
        shape = tuple(reader.u64() for _ in range(dimensions))[::-1]
        if name in entries:
            raise ModelError(f"{reader.path} has the tensor {name!r} twice.")
        entries[name] = _Entry(name, shape, reader.u32(), reader.u64())
    return list(entries.values())


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path}: the metadata key 'general.alignment' is {alignment!r}; it must be a power of two.")
    return alignment


def _map_tensors(reader: _Reader, entries: list[_Entry], alignment: int) -> dict[str, StoredTensor]:
    base = -(-reader.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    end, before = base, ""
    for entry in sorted(entries, key=lambda entry: entry.offset):
        start = base + entry.offset
        if start % alignment or start < end:
            fault = f"overlaps {before!r}" if start < end else f"begins at no multiple of {alignment}"
            raise ModelError(f"{reader.path}: the tensor {entry.name!r} {fault}; the file is damaged.")
        tensors[entry.name] = _map_tensor(reader, entry, start)
        end, before = start + tensors[entry.name].raw.nbytes, entry.name
    return tensors


def _map_tensor(reader: _Reader, entry: _Entry, start: int) -> StoredTensor:
    kind = BY_GGML.get(entry.ggml)
    if kind is None:
        raise ModelError(
            f"{reader.path}: the tensor {entry.name!r} is stored as {_type_name(entry.ggml)}, which is not supported; "
            f"{', '.join(kind.name for kind in STORAGE_TYPES)} are."
        )
    if entry.shape[-1] % kind.block:
        raise ModelError(
            f"{reader.path}: the tensor {entry.name!r} is stored as {kind.name}, in blocks of {kind.block} values, but "
            f"its rows have {entry.shape[-1]}; the file is damaged."
        )
    shape = kind.raw_shape(entry.shape)
    count = 1
    for size in shape:
        count *= size  # Python's integers: a damaged shape must not wrap around
    if count < 1 or count * kind.element.itemsize > reader.size - start:
        raise ModelError(
            f"{reader.path}: the data of tensor {entry.name!r}, of shape {list(entry.shape)} in {kind.name}, "
            f"{'is empty' if count < 1 else 'goes beyond the end of the file'}: it is truncated or damaged, so get it "
            "again."
        )
    raw: NDArray[np.generic] = np.frombuffer(reader.buffer, kind.element, count, start).reshape(shape)
    return StoredTensor(entry.name, entry.shape, kind.name, raw if raw.flags.aligned else raw.copy(), kind.decode)


def _type_name(ggml: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return f"{GGMLQuantizationType(ggml).name} (type {ggml})"
    except ValueError:
        return f"the unknown type {ggml}"

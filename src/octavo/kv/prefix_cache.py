"""The page cache: full, computed blocks found again by their tokens and all before. Knows no sequence, frees nothing.

A block's key is SHA-256 of the key before it and of its own tokens (int32, little-endian); the chain starts from
SHA-256 of a salt, so that who gives another salt shares nothing. Keys are the same in every process and machine.
A key alone is never believed: a block is found only if its tokens are the ones asked for *and* it follows the very
block found before it, which by induction proves the whole prefix. A collision is a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from octavo.kv.errors import BadSequence


def digest(data: bytes) -> bytes:
    """SHA-256 (FIPS 180-4) of the data, 32 bytes."""
    return sha256(data).digest()


class Entry(NamedTuple):
    """What a published block holds; two blocks with equal entries hold the same keys and values."""

    key: bytes
    before: int | bytes  # the published block of the tokens before these; the salt where there are none
    tokens: bytes  # packed


class PrefixCache:
    """Which physical block holds the KV of which prefix. Every operation is O(1) a block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[bytes, int] = {}  # key -> block
        self.entries: dict[int, Entry] = {}  # block -> what it holds
        self.lookup_tokens = 0  # prompt tokens looked for
        self.hit_tokens = 0  # those of them that were found
        self._pack = struct.Struct(f"<{block_size}i").pack

    def pack(self, tokens: Sequence[int], index: int) -> bytes:
        """The tokens of logical block `index` as bytes; raises BadSequence if they are too few or not int32."""
        start = index * self.block_size
        try:
            return self._pack(*tokens[start : start + self.block_size])
        except struct.error as error:
            end = start + self.block_size
            raise BadSequence(f"Tokens {start} to {end - 1} must be {self.block_size} int32 values: {error}.") from None

    def key(self, before: bytes | None, packed: bytes, salt: bytes) -> bytes:
        """The chain key of a block's packed tokens after the key `before` (None: they are the first)."""
        return digest((digest(salt) if before is None else before) + packed)

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int], salt: bytes, count: int) -> None:
        """Appends to the chain keys of the first blocks of `tokens` until there are `count`."""
        for index in range(len(keys), count):
            keys.append(self.key(keys[-1] if keys else None, self.pack(tokens, index), salt))

    def match(self, tokens: Sequence[int], salt: bytes, limit: int, keys: list[bytes]) -> list[int]:
        """The published blocks of the longest known prefix, at most `limit`.

        `keys` are the chain keys of a beginning of it; as far as the walk goes they are extended, so that they are at
        least one more than the blocks if it ended early.
        """
        blocks: list[int] = []
        before: int | bytes = salt
        for index in range(limit):
            self.extend_keys(keys, tokens, salt, index + 1)
            if keys[index] not in self.blocks:
                break
            block = self.find(Entry(keys[index], before, self.pack(tokens, index)))
            if block is None:
                break
            blocks.append(block)
            before = block
        return blocks

    def find(self, entry: Entry) -> int | None:
        """The block that holds exactly this, or None."""
        block = self.blocks.get(entry.key)
        return block if block is not None and self.entries[block] == entry else None

    def publish(self, block: int, entry: Entry) -> bool:
        """Makes the block findable; False, and nothing done, if its key collides with a published one."""
        if entry.key in self.blocks:
            return False
        self.blocks[entry.key] = block
        self.entries[block] = entry
        return True

    def forget(self, block: int) -> None:
        """The block's content is no longer found."""
        del self.blocks[self.entries.pop(block).key]

    def clear(self) -> None:
        """Nothing is found any more."""
        self.blocks.clear()
        self.entries.clear()

"""PrefixCache: keys are those of the definition, and nothing but the very prefix is ever found."""

from __future__ import annotations

import struct
from hashlib import sha256

import pytest

from octavo.kv import PrefixCache
from octavo.kv import prefix_cache as module
from octavo.kv.errors import BadSequence
from octavo.kv.prefix_cache import Entry


def publish(cache: PrefixCache, tokens: list[int], blocks: list[int], salt: bytes = b"") -> None:
    keys: list[bytes] = []
    cache.extend_keys(keys, tokens, salt, len(blocks))
    before: int | bytes = salt
    for index, block in enumerate(blocks):
        assert cache.publish(block, Entry(keys[index], before, cache.pack(tokens, index)))
        before = block


def test_keys_are_chained_sha256_of_little_endian_int32_after_a_salted_root() -> None:
    keys: list[bytes] = []
    PrefixCache(2).extend_keys(keys, [1, -2, 3, 2**31 - 1, 5], b"tenant", 2)
    first = sha256(sha256(b"tenant").digest() + struct.pack("<2i", 1, -2)).digest()
    assert keys == [first, sha256(first + struct.pack("<2i", 3, 2**31 - 1)).digest()]


def test_the_longest_published_prefix_is_found_up_to_the_limit() -> None:
    cache = PrefixCache(2)
    publish(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert cache.match([1, 2, 3, 4, 5, 6], b"", 3, []) == [7, 8, 9]
    assert cache.match([1, 2, 3, 4, 5, 6], b"", 2, []) == [7, 8]
    keys: list[bytes] = []
    blocks = cache.match([1, 2, 3, 4, 0, 0], b"", 3, keys)
    assert blocks == [7, 8]
    assert len(keys) == 3  # the last is of the block that was not found
    assert cache.match([3, 4], b"", 1, []) == []  # the same tokens elsewhere are another prefix
    assert cache.match([1, 2], b"another tenant", 1, []) == []


def test_what_is_forgotten_is_not_found() -> None:
    cache = PrefixCache(2)
    publish(cache, [1, 2, 3, 4], [7, 8])
    cache.forget(8)
    assert cache.match([1, 2, 3, 4], b"", 2, []) == [7]
    cache.clear()
    assert cache.match([1, 2, 3, 4], b"", 2, []) == []
    assert not cache.blocks
    assert not cache.entries


def test_a_collision_is_a_miss_and_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "digest", lambda data: b"the same for all")
    cache = PrefixCache(2)
    publish(cache, [1, 2], [7])
    assert cache.match([1, 2], b"", 1, []) == [7]
    assert cache.match([3, 4], b"", 1, []) == []  # other tokens
    assert cache.match([1, 2], b"salt", 1, []) == []  # other salt
    assert cache.match([1, 2, 1, 2], b"", 2, []) == [7]  # the same tokens after other ones
    assert not cache.publish(8, Entry(b"the same for all", 7, cache.pack([1, 2], 0)))


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2, 3, 2**31], [1, 2, 3, "4"], [1, 2, 3, 4.0]])
def test_tokens_that_cannot_be_packed_are_a_named_error(tokens: list[int]) -> None:
    with pytest.raises(BadSequence, match="Tokens 0 to 3 must be 4 int32 values"):
        PrefixCache(4).pack(tokens, 0)

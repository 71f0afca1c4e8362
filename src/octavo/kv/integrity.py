"""The proof that the memory is sound: every invariant of the manager, checked against all it holds. Changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from octavo.kv.errors import BrokenInvariant

if TYPE_CHECKING:
    from octavo.kv.block_pool import BlockPool
    from octavo.kv.manager import KVManager, SequenceState


def check(manager: KVManager) -> None:
    """Raises BrokenInvariant with the first invariant that fails; O(blocks + what the tables hold)."""
    manager.pool.check()
    manager.host.check()
    _check_references(manager)
    for seq in manager.sequences.values():
        _check_sequence(manager, seq)
    for seq in manager.swapped.values():
        _check_swapped(manager, seq)
    _check_cache(manager)
    _check_flights(manager)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BrokenInvariant(message)


def _check_references(manager: KVManager) -> None:
    """References are what tables and pins hold; the host keeps nothing that no swapped sequence holds."""
    pinned = Counter(block for blocks in manager.pins.values() for block in blocks)
    _require(dict(pinned) == manager.pinned, f"Pins hold {dict(pinned)}, but {manager.pinned} is counted.")
    tables = Counter(block for seq in manager.sequences.values() for block in seq.table.array.tolist())
    _compare(manager.pool, tables + pinned, "device")
    swapped = Counter(block for seq in manager.swapped.values() for block in seq.table.array.tolist())
    _compare(manager.host, swapped, "host")
    _require(manager.host.num_cached == 0, "A host block is cached, though nothing is found there.")


def _compare(pool: BlockPool, held: Counter[int], name: str) -> None:
    for block in range(pool.num_blocks):
        refs = pool.refs(block)
        _require(refs == held[block], f"The {name} block {block} counts {refs} references; {held[block]} hold it.")


def _check_sequence(manager: KVManager, seq: SequenceState) -> None:
    """Lengths agree, and what the sequence may write without asking is its own."""
    size, name = manager.block_size, f"Sequence {seq.id}"
    capacity = len(seq.table) * size
    _require(0 <= seq.computed <= seq.length, f"{name} computed {seq.computed} of {seq.length} tokens.")
    _require(len(seq.table) == -(-seq.length // size), f"{name} has {len(seq.table)} blocks for {seq.length} tokens.")
    _require(seq.writable_until in (seq.length, capacity), f"{name} may write up to {seq.writable_until}.")
    _require(seq.id not in manager.swapped, f"{name} is on the device and swapped out.")
    blocks = seq.table.array.tolist()
    full = seq.computed // size
    for block in blocks[full : -(-seq.writable_until // size)]:
        own = manager.pool.refs(block) == 1 and block not in manager.cache.entries
        untouched = seq.computed == seq.writable_until
        _require(own or untouched, f"{name} may write block {block}, which is shared or published.")
    if seq.findable:
        published = [manager.cache.blocks.get(key) for key in seq.keys[:full]]
        _require(published == blocks[:full], f"{name} has blocks {blocks[:full]}; its keys name {published}.")


def _check_swapped(manager: KVManager, seq: SequenceState) -> None:
    """All it has is computed, and on the host."""
    blocks = -(-seq.length // manager.block_size)
    whole = seq.computed == seq.length and len(seq.table) == blocks
    _require(
        whole, f"Sequence {seq.id} has {seq.length} tokens, {seq.computed} computed, {len(seq.table)} host blocks."
    )


def _check_cache(manager: KVManager) -> None:
    """Published blocks are whole chains from a root, in every table that holds their end, and go last one first."""
    cache = manager.cache
    keys = {block: entry.key for block, entry in cache.entries.items()}
    _require(keys == {block: key for key, block in cache.blocks.items()}, "Keys and blocks are crossed.")
    age = {block: order for order, block in enumerate(manager.pool.cached())}
    _require(age.keys() <= cache.entries.keys(), "A cached block is not published: nothing finds it.")
    for block in cache.entries:
        _check_entry(manager, block, age)
    for seq in manager.sequences.values():
        _check_chain(manager, seq.table.array.tolist(), seq.salt)
    for blocks in manager.pins.values():
        _require(all(block in cache.entries for block in blocks), "A pinned block is not published.")
        _check_chain(manager, blocks, None)


def _check_entry(manager: KVManager, block: int, age: dict[int, int]) -> None:
    """A published block is full, has its tokens' key, and goes before the block it follows (`age`: of CACHED ones)."""
    cache, entry = manager.cache, manager.cache.entries[block]
    _require(len(entry.tokens) == 4 * manager.block_size, f"Block {block} is published, but not full.")
    _require(manager.pool.refs(block) > 0 or block in age, f"Block {block} is published, but free.")
    if isinstance(entry.before, bytes):
        _require(entry.key == cache.key(None, entry.tokens, entry.before), f"Block {block} has a wrong key.")
        return
    _require(entry.before in cache.entries, f"Block {block} is published, its parent {entry.before} is not.")
    key = cache.key(cache.entries[entry.before].key, entry.tokens, b"")
    _require(entry.key == key, f"Block {block} has a wrong key.")
    younger = entry.before not in age or (block in age and age[entry.before] > age[block])
    _require(younger, f"The cached block {entry.before} would be reclaimed before its child {block}.")


def _check_chain(manager: KVManager, blocks: list[int], salt: bytes | None) -> None:
    """A published block stands right after the block its prefix ends in (salt None: any)."""
    for index, block in enumerate(blocks):
        entry = manager.cache.entries.get(block)
        if entry is None:
            continue
        first = isinstance(entry.before, bytes) and salt in (None, entry.before)
        _require(entry.before == blocks[index - 1] if index else first, f"Block {block} is torn from its prefix.")


def _check_flights(manager: KVManager) -> None:
    """Whoever waits for a block waits for a running sequence that is still to compute it."""
    for key, owner in manager.in_flight.items():
        seq = manager.sequences.get(owner)
        ahead = seq is not None and seq.findable and key in seq.keys[seq.computed // manager.block_size :]
        _require(ahead, f"Sequence {owner} is waited for, but will not compute block {key.hex()[:8]}.")

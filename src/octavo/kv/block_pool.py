"""The page frames: which physical blocks are free, cached or held. Knows counts only, never whose a block is."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from octavo.kv.errors import BadSize, BrokenInvariant, DoubleFree, OutOfBlocks, UnknownBlock


class BlockState(Enum):
    """What a block is, derived from its references and from whether its content can still be found."""

    FREE = "free"  # no reference, no content
    CACHED = "cached"  # no reference, content findable: reclaimed when no block is free
    ACTIVE = "active"  # one reference
    SHARED = "shared"  # several references


class BlockPool:
    """`num_blocks` blocks with ids from 0, each operation O(1).

    CACHED blocks are reclaimed least recently released first; `on_reclaim(block)` is called before such a block is
    given out anew, so that its content is no longer found. Whoever releases a chain of blocks from tail to head thus
    has its leaves reclaimed first.
    """

    def __init__(self, num_blocks: int, on_reclaim: Callable[[int], None]) -> None:
        if num_blocks < 0:
            raise BadSize(f"A pool cannot have {num_blocks} blocks; it needs 0 or more.")
        self.num_blocks = num_blocks
        self.num_shared = 0
        self.evictions = 0  # CACHED blocks reclaimed so far
        self._on_reclaim = on_reclaim
        self._refs = [0] * num_blocks
        # A stack, so that the block just freed goes out first, while it is warm; packed, so that a pool of a million
        # blocks whose order long use has mixed up costs no cache miss more than a small one.
        self._free = array("i", range(num_blocks - 1, -1, -1))
        # A plain dict would do but for next(iter(d)), which walks over all its deleted entries: quadratic as a queue.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_active(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached) - self.num_shared

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free and cached."""
        return len(self._free) + len(self._cached)

    def allocate(self) -> int:
        """A block with one reference and no content; raises OutOfBlocks."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.evictions += 1
            self._on_reclaim(block)
        else:
            raise OutOfBlocks(f"All {self.num_blocks} blocks are held; release some first.")
        self._refs[block] = 1
        return block

    def reference(self, block: int) -> None:
        """One more holder of a held or CACHED block; raises UnknownBlock."""
        refs = self.refs(block)
        if refs == 0:
            if block not in self._cached:
                raise UnknownBlock(f"Block {block} is free: there is nothing in it to share.")
            del self._cached[block]
        elif refs == 1:
            self.num_shared += 1
        self._refs[block] = refs + 1

    def release(self, block: int, keep: bool) -> None:
        """One holder less. The last one leaves it CACHED if `keep`, else FREE; raises DoubleFree or UnknownBlock."""
        refs = self.refs(block)
        if refs == 0:
            raise DoubleFree(f"Block {block} is released but nobody holds it.")
        if refs == 2:
            self.num_shared -= 1
        elif refs == 1:
            if keep:
                self._cached[block] = None
            else:
                self._free.append(block)
        self._refs[block] = refs - 1

    def drop_cached(self) -> None:
        """Makes every CACHED block FREE, without telling `on_reclaim`."""
        self._free.extend(self._cached)
        self._cached.clear()

    def refs(self, block: int) -> int:
        """References to the block; raises UnknownBlock."""
        if not 0 <= block < self.num_blocks:
            raise UnknownBlock(f"Block {block} is not of this pool, whose blocks are 0 to {self.num_blocks - 1}.")
        return self._refs[block]

    def state(self, block: int) -> BlockState:
        """The block's state; raises UnknownBlock."""
        refs = self.refs(block)
        if refs > 1:
            return BlockState.SHARED
        if refs == 1:
            return BlockState.ACTIVE
        return BlockState.CACHED if block in self._cached else BlockState.FREE

    def all_refs(self) -> NDArray[np.int32]:
        """References to every block, int32 [num_blocks]; a copy. O(blocks)."""
        return np.fromiter(self._refs, np.int32, self.num_blocks)

    def free(self) -> NDArray[np.int32]:
        """The FREE blocks, int32 [num_free], the next to be given out last; a copy. O(blocks)."""
        return np.array(self._free, np.int32)

    def cached(self) -> Iterator[int]:
        """The CACHED blocks, the next to be reclaimed first."""
        return iter(self._cached)

    def check(self) -> None:
        """Free, cached and held blocks partition the pool, and are counted right; raises BrokenInvariant. O(blocks)."""
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        free, cached = set(self._free), set(self._cached)
        if len(free) < len(self._free):
            raise BrokenInvariant("A block stands twice in the free list.")
        if free & cached or free & held or cached & held or len(free | cached | held) != self.num_blocks:
            raise BrokenInvariant(f"{free=}, {cached=} and {held=} do not partition {self.num_blocks} blocks.")
        if min(self._refs, default=0) < 0:
            raise BrokenInvariant("A block has fewer than no references.")
        if self.num_shared != sum(refs > 1 for refs in self._refs):
            raise BrokenInvariant(f"num_shared is {self.num_shared}, but the references tell otherwise.")

"""What can be asked wrongly of the KV memory. An operation that raises one of these has changed nothing."""
# ruff: noqa: N818 - each is named for what happened

from __future__ import annotations


class KVError(Exception):
    """Whatever the memory manager raises on purpose."""


class OutOfBlocks(KVError):
    """A block was asked of a pool with none free and none cached."""


class DoubleFree(KVError):
    """A block that nobody holds was released: its count of references would fall under zero."""


class UnknownBlock(KVError):
    """The id is not of this pool, or the block holds nothing that could be shared."""


class UnknownSequence(KVError):
    """No sequence of this id holds device memory: never admitted, freed, or swapped out."""


class BadSequence(KVError):
    """The sequence is not in a state that allows this, or was described wrongly."""


class BadPosition(KVError, IndexError):
    """A position, or a logical block, beyond what the block table maps."""


class BadSize(KVError, ValueError):
    """A size the memory cannot have."""


class UnknownPin(KVError):
    """The pin was never given out, or was unpinned before."""


class BrokenInvariant(KVError):
    """`check()` found memory that contradicts itself: a fault of Octavo, never of its caller."""

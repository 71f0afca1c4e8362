"""What the reference attention works out once a step for all layers: who looks together, at which blocks, seeing what.

Knows the step's tables and lengths; neither keys nor values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.ops.interface import Int32, StepInput

Float32 = NDArray[np.float32]
Index = NDArray[np.intp]
Bool = NDArray[np.bool_]

# A tile's keys, values and scores fit a core's second-level cache (1 MiB or more); with fewer queries or keys than
# these, Python's share of the time grows.
KEY_TILE = 256  # keys of one sequence that are looked at together
QUERY_TILE = 128  # queries of one sequence that look together
GATHER_LIMIT = 2**18  # elements of several sequences' keys and values that are looked at together


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """Angles are worked out for the positions of a step, not stored: a long context's table would take 100 MB."""

    inv_freq: Float32  # [rotated dimensions / 2], radians a position
    max_positions: int
    factor: float


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A run of blocks of each of a group's sequences."""

    blocks: Index  # [S, blocks]; past a sequence's end its first block again, wholly hidden
    hidden: Bool | None  # [S, queries, keys] True where a query must not look; None: each sees all
    stale: tuple[Index, ...]  # sequence, block and offset of slots that hold nothing of the sequence


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Sequences with as many queries each, the one with most to look at first."""

    rows: Index  # [S, queries] rows of the step
    tiles: list[Tile]


@dataclass(slots=True, eq=False)
class Plan:
    """What all layers share in one forward pass."""

    step: StepInput
    _rotations: dict[int, tuple[RopeTable, Float32, Float32]] = field(default_factory=dict)
    _groups: dict[tuple[int | None, tuple[int, ...]], list[Group]] = field(default_factory=dict)

    def rotation(self, table: RopeTable) -> tuple[Float32, Float32]:
        """Cosines and sines of the step's positions, each [T, 1, rotated dimensions / 2]."""
        if id(table) not in self._rotations:
            positions = self.step.positions
            if len(positions) and positions.max() >= table.max_positions:
                raise ValueError(
                    f"position {positions.max()} is beyond the {table.max_positions} this model was set up for"
                )
            angles = (positions.astype(np.float32)[:, None] * table.inv_freq)[:, None, :]
            factor = np.float32(table.factor)
            self._rotations[id(table)] = table, np.cos(angles) * factor, np.sin(angles) * factor
        return self._rotations[id(table)][1:]

    def groups(self, window: int | None, cache_shape: tuple[int, ...]) -> list[Group]:
        """Who attends together, and to which blocks, in layers with this window."""
        key = window, cache_shape
        if key not in self._groups:
            self._groups[key] = list(_groups(self.step, window, cache_shape))
        return self._groups[key]


def _groups(step: StepInput, window: int | None, cache_shape: tuple[int, ...]) -> Iterator[Group]:
    """Sequences with one new token together, up to GATHER_LIMIT; those with more alone, QUERY_TILE at a time."""
    size, elements = cache_shape[4], 2 * cache_shape[3] * cache_shape[5]
    starts, counts = step.query_starts[:-1].astype(np.intp), np.diff(step.query_starts)
    reach = step.context_lens if window is None else np.minimum(step.context_lens, window + size)
    single = np.flatnonzero(counts == 1)
    single = single[np.argsort(-reach[single], kind="stable")]
    while len(single):
        longest = min(int(reach[single[0]]), KEY_TILE)
        taken, single = np.split(single, [max(1, GATHER_LIMIT // (elements * longest))])
        yield _group(step, taken, starts[taken][:, None], window, size)
    for seq in np.flatnonzero(counts > 1):
        for first in range(0, counts[seq], QUERY_TILE):
            rows = starts[seq] + np.arange(first, min(first + QUERY_TILE, counts[seq]))
            yield _group(step, np.array([seq]), rows[None], window, size)


def _group(step: StepInput, seqs: Index, rows: Index, window: int | None, size: int) -> Group:
    """The tiles from the first key that any query of a sequence sees to the last."""
    ends = step.context_lens[seqs] - step.query_starts[seqs + 1]  # row + end = the query's position
    positions = rows + ends[:, None]
    first = np.zeros(len(seqs), np.intp)
    if window is not None:
        first = np.maximum(positions[:, 0] - window + 1, 0) // size
    last = positions[:, -1] // size
    order = np.argsort(first - last, kind="stable")
    seqs, rows, positions, first, last = seqs[order], rows[order], positions[order], first[order], last[order]
    step_size = max(1, KEY_TILE // size)
    tiles = []
    for start in range(0, int((last - first).max()) + 1, step_size):
        here = slice(int(np.count_nonzero(last - first >= start)))
        width = min(step_size, int(last[0] - first[0]) + 1 - start)
        logical = first[here, None] + start + np.arange(width)
        tiles.append(_tile(step.block_tables[seqs[here]], logical, positions[here], first[here], window, size))
    return Group(rows, tiles)


def _tile(tables: Int32, logical: Index, positions: Index, first: Index, window: int | None, size: int) -> Tile:
    """The tile of the logical blocks [S, blocks] of each sequence, seen from `positions` [S, queries]."""
    held = np.where(logical <= positions[:, -1:] // size, logical, first[:, None])
    offsets = np.arange(size)
    keys = (logical[:, :, None] * size + offsets).reshape(len(tables), 1, -1)
    hidden = keys > positions[:, :, None]
    if window is not None:
        hidden |= keys <= positions[:, :, None] - window
    stale = held[:, :, None] * size + offsets > positions[:, -1, None, None]
    blocks = np.take_along_axis(tables, held, axis=1).astype(np.intp)
    return Tile(blocks, hidden if hidden.any() else None, np.nonzero(stale))

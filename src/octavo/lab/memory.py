"""What every strategy's manager has beside what the engine needs, and what it is told of a request. Knows no time.

Slots are stored (they hold the KV of a token that somebody needs), reserved (held, and to be used before the request
ends), internal (held, and never to be used) or not held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.kv.interface import Memory
from octavo.kv.memory_ops import Kind
from octavo.lab.results import Piece


def _alone() -> list[int]:
    return []


@dataclass(slots=True, eq=False)
class Asked:
    """What is known of one request. A strategy reads what its kind can know; `output` is for oracles and accounts."""

    place: int  # in the work
    prompt: int  # tokens
    output: int  # tokens of each answer, in truth
    max_tokens: int  # as the request limits them
    sequences: int = 1  # that run at once
    beams: bool = False
    others: Callable[[], list[int]] = _alone  # at an admission: tokens of each further sequence that is to follow it

    @property
    def final(self) -> int:
        """Slots each of its sequences has used in the end: the KV of the last token is never computed."""
        return self.prompt + self.output - 1


class Account(NamedTuple):
    """Slots that are held, by what they are held for."""

    stored: int
    internal: int
    reserved: int


class Manager(Memory, Protocol):
    """A strategy at work."""

    refused: int  # admissions that found no room
    fragmented: int  # those (each request's once) and growths that failed though enough was free in total

    @property
    def moved(self) -> Mapping[Kind, int]: ...  # blocks copied so far
    def expect(self, seq_id: int, asked: Asked) -> None: ...  # tells of a request before its sequence is admitted
    def can_ever_hold(self, asked: Asked) -> bool: ...  # whether an empty pool would admit it
    def account(self) -> Account: ...
    def fits_no_hole(self, seq_id: int, num_tokens: int) -> bool: ...  # though enough is free
    def pieces(self) -> list[Piece]: ...  # the memory map, in the order of addresses
    def check(self) -> None: ...


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind and owner as one; none of no slots."""
    result: list[Piece] = []
    for piece in pieces:
        if piece.slots <= 0:
            continue
        if result and result[-1].kind == piece.kind and result[-1].owner == piece.owner:
            result[-1].slots += piece.slots
        else:
            result.append(piece)
    return result

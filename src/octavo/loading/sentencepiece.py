"""SentencePiece's BPE: pieces joined in the order of their scores, unknown characters as bytes. Knows no files.

This is the tokenizer that GGUF calls "llama" (Llama 2, Mistral, Gemma, Phi-3), whose files hold scores and no merges.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

SPACE = "▁"

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_MOST_WORDS = 50_000  # kept between calls
_LONGEST_KEPT = 64


def byte_of(piece: str) -> int | None:
    """The byte that a piece such as "<0x0A>" stands for; None for any other."""
    match = _BYTE.fullmatch(piece)
    return int(match[1], 16) if match else None


class ScoreEncoder:
    """Joins neighbouring pieces to the one of the best score (leftmost first) until none can be joined.

    `ids` maps the pieces that text may become to their ids, `scores` has each id's score, `byte_ids` the 256 ids of
    the bytes (None: the vocabulary has none) that stand for a character which is no piece; failing that, `unknown`.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: Sequence[float],
        byte_ids: Sequence[int | None],
        unknown: int | None,
        *,
        prefix_space: bool,
    ) -> None:
        self._ids = ids
        self._ranks = {piece: -scores[token] for piece, token in ids.items()}  # the smallest is joined first
        self._byte_ids = byte_ids
        self._unknown = unknown
        self._prefix_space = prefix_space
        self._words: dict[str, list[int]] = {}
        # Words may be encoded one by one where no piece reaches across their boundary: before a space, unless some
        # piece has this character and a space side by side. (Whole texts would do too, only slower.)
        inner = {part[-1] for part in "\0".join(ids).split(SPACE)[:-1] if part} - {"\0"} | {SPACE}
        self._boundary = re.compile(f"(?<=[^{re.escape(''.join(sorted(inner)))}])(?={SPACE})")

    def __call__(self, text: str, starts: bool) -> list[int]:
        """Token ids of `text`; `starts`: it begins the prompt or stands after a special token."""
        text = text.replace(" ", SPACE)
        if starts and self._prefix_space:
            text = SPACE + text
        found: list[int] = []
        for word in self._boundary.split(text):
            found += self._word(word)
        return found

    def _word(self, word: str) -> list[int]:
        kept = self._words.get(word)
        if kept is not None:
            return kept
        found = [token for piece in self._join(word) for token in self._tokens(piece)]
        if len(word) <= _LONGEST_KEPT:
            if len(self._words) >= _MOST_WORDS:
                self._words.clear()
            self._words[word] = found
        return found

    def _tokens(self, piece: str) -> list[int]:
        token = self._ids.get(piece)
        if token is not None:
            return [token]
        found = [self._byte_ids[byte] for byte in piece.encode()]
        known = [token for token in found if token is not None]
        if len(known) == len(found):
            return known
        return [] if self._unknown is None else [self._unknown]

    def _join(self, word: str) -> list[str]:
        """The pieces of `word`, in O(n log n)."""
        ranks, size = self._ranks, len(word)
        ends = list(range(1, size + 1))  # of the piece that begins here; 0 once it belongs to one further left
        before = list(range(-1, size - 1))  # where the piece in front begins
        queue = [
            (rank, at, at + 2) for at in range(size - 1) if (rank := ranks.get(word[at : at + 2])) is not None
        ]  # candidates: rank, beginning, end
        heapify(queue)
        while queue:
            _, left, end = heappop(queue)
            middle = ends[left]
            if not 0 < middle < end or ends[middle] != end:
                continue  # one of its halves has been joined to another
            ends[left], ends[middle] = end, 0
            if end < size:
                before[end] = left
                rank = ranks.get(word[left : ends[end]])
                if rank is not None:
                    heappush(queue, (rank, left, ends[end]))
            start = before[left]
            if start >= 0:
                rank = ranks.get(word[start:end])
                if rank is not None:
                    heappush(queue, (rank, start, end))
        pieces, at = [], 0
        while at < size:
            pieces.append(word[at : ends[at]])
            at = ends[at]
        return pieces

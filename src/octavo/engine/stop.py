"""Finds stop strings in a text that comes in pieces, and says what must be held back meanwhile. Knows no tokens.

One Knuth-Morris-Pratt automaton a stop string (SIAM J. Comput. 6(2), 1977): constant time a character whatever the
text's length, and the same answer however the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Reads a text piece by piece, looking for any of some non-empty strings.

    The string that is complete first is found; of those complete at the same character, the one that began first (the
    longest).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._fallbacks = tuple(_fallbacks(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop string the text now ends with

    @property
    def held(self) -> int:
        """How many characters at the text's end may be the head of a stop string; call it after a `feed` of no find."""
        return max(self._matched, default=0)

    def feed(self, piece: str, *, heed: bool = True) -> tuple[str, int] | None:
        """Read on. Returns the stop string found and where it ends in the piece, then reads no further; else None.

        With `heed` false, what is found in this piece is let pass, though the piece may hold the head of a later find.
        """
        for place, character in enumerate(piece):
            for i, stop in enumerate(self._stops):
                if self._advance(i, character) and heed:
                    return stop, place + 1
        return None

    def copy(self) -> StopMatcher:
        """An independent matcher that has read the same text."""
        twin = object.__new__(StopMatcher)
        twin._stops, twin._fallbacks, twin._matched = self._stops, self._fallbacks, self._matched.copy()
        return twin

    def _advance(self, i: int, character: str) -> bool:
        """Read a character against one stop string; True if that completes it."""
        stop, fallback, matched = self._stops[i], self._fallbacks[i], self._matched[i]
        while matched and stop[matched] != character:
            matched = fallback[matched - 1]
        matched += stop[matched] == character
        complete = matched == len(stop)
        self._matched[i] = fallback[-1] if complete else matched
        return complete


def _fallbacks(stop: str) -> list[int]:
    """For each head of the string, the length of the longest shorter head that it ends with."""
    lengths = [0]
    for character in stop[1:]:
        length = lengths[-1]
        while length and stop[length] != character:
            length = lengths[length - 1]
        lengths.append(length + (stop[length] == character))
    return lengths

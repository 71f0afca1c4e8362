"""Special tokens found in a text by their spelling. Knows nothing of how the text between them is encoded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

_SPACES = " \t\n\r\v\f"


class SpecialTokens:
    """Splits texts at the spellings in `ids`, the leftmost first and there the longest.

    White space after the tokens in `swallow` goes with them (Phi-3).
    """

    def __init__(self, ids: Mapping[str, int], swallow: Collection[int] = ()) -> None:
        self._ids = {text: token for text, token in ids.items() if text}
        self._swallow = frozenset(swallow)
        self._lengths: dict[str, list[int]] = {}  # by the first character, longest first
        seconds: dict[str, set[str]] = {}
        for text in self._ids:
            lengths = self._lengths.setdefault(text[0], [])
            if len(text) not in lengths:
                lengths.append(len(text))
            seconds.setdefault(text[0], set()).add(text[1:2])
        for lengths in self._lengths.values():
            lengths.sort(reverse=True)
        self._candidates = re.compile(
            "|".join(_beginning(first, seconds[first]) for first in sorted(seconds)) or "(?!)"
        )

    def split(self, text: str) -> Iterator[str | int]:
        """The parts of `text` in order: texts (never empty) and ids of special tokens."""
        done = at = 0
        while (candidate := self._candidates.search(text, at)) is not None:
            start = candidate.start()
            end = self._end(text, start)
            if end == start:
                at = start + 1
                continue
            if start > done:
                yield text[done:start]
            token = self._ids[text[start:end]]
            yield token
            if token in self._swallow:
                while end < len(text) and text[end] in _SPACES:
                    end += 1
            done = at = end
        if done < len(text):
            yield text[done:]

    def _end(self, text: str, start: int) -> int:
        for length in self._lengths[text[start]]:
            if text[start : start + length] in self._ids:
                return min(start + length, len(text))
        return start


def _beginning(first: str, seconds: set[str]) -> str:
    if "" in seconds:
        return re.escape(first)
    return re.escape(first) + "[" + re.escape("".join(sorted(seconds))) + "]"

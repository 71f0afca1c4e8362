"""Tokens in, text out, as they come: never half a character, never the head of a stop string. Knows no requests."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from octavo.engine.stop import StopMatcher

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Tokenizer(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which are no text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some tokens."""
        ...

    def token_bytes(self, token: int, /) -> bytes:
        """What a token adds in the midst of a text, as UTF-8; one token may hold a part of a character only."""
        ...


class Detokenizer:
    """The text of one answer, which grows by a token at a time.

    Tokens are turned into bytes and these into text, in constant time a token whatever the answer's length: at most
    three bytes of an unfinished character and the head of a possible stop string wait for the next token. Bytes that
    are no UTF-8 become U+FFFD, as in `tokenizer.decode`.

    prompt_ids: the prompt, whose text and the answer's make that of both together. It matters where it has no text
        (BOS alone): there some tokenizers drop the space before the first word.
    stop: the text ends before the first of these to be complete (of two complete at once, before the longer), or after
        it with include_stop.
    min_tokens: a stop string complete before the answer has so many tokens is let pass.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.stop_hit: str | None = None  # the stop string that ended the text
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._min_tokens = min_tokens
        self._num_tokens = 0
        begun = any(self._bytes(token) for token in reversed(prompt_ids))
        self._textless: list[int] | None = None if begun else list(prompt_ids)  # the ids so far, until one has text
        self._decoder = _utf8_decoder("replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._held = ""  # decoded, but may be the head of a stop string
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text that is safe so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became safe, "" after a stop string."""
        if self.stop_hit is not None:
            return ""
        self._num_tokens += 1
        return self._emit(self._release(self._decoder.decode(self._next_bytes(token_id))))

    def flush(self) -> str:
        """The answer has ended: returns the rest of its text, what was held back for what might have followed."""
        if self.stop_hit is not None:
            return ""
        safe = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return self._emit(safe)

    def copy(self) -> Detokenizer:
        """An independent detokenizer in the same state, for a sequence that forks."""
        twin = object.__new__(Detokenizer)
        twin.__dict__.update(self.__dict__)
        twin._decoder = _utf8_decoder("replace")
        twin._decoder.setstate(self._decoder.getstate())
        twin._matcher = self._matcher.copy() if self._matcher else None
        twin._textless = None if self._textless is None else self._textless.copy()
        twin._pieces = [self.text]
        return twin

    def _emit(self, safe: str) -> str:
        if safe:
            self._pieces.append(safe)
        return safe

    def _release(self, piece: str) -> str:
        """Take new text in and give out what is no part of a stop string, whatever follows."""
        if self._matcher is None:
            return piece
        window = self._held + piece
        found = self._matcher.feed(piece, heed=self._num_tokens >= self._min_tokens)
        if found is None:
            keep = len(window) - self._matcher.held
        else:
            self.stop_hit, end = found
            keep = len(self._held) + end - (0 if self._include_stop else len(self.stop_hit))
        self._held = window[keep:] if found is None else ""
        return window[:keep]

    def _next_bytes(self, token_id: int) -> bytes:
        raw = self._bytes(token_id)
        if self._textless is None:
            return raw
        self._textless.append(token_id)
        if not raw:
            return raw
        ids, self._textless = self._textless, None
        bare = raw.startswith(b" ") and not self._decode(ids).startswith(" ")
        return raw[1:] if bare else raw

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)

"""Log-probabilities in OpenAI's two shapes. Knows tokens and their texts; not where they come from."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.loading.tokenizer import Tokenizer
from octavo.outputs import TokenLogprobs

_LEAST = -9999.0  # what OpenAI writes for a probability of 0, whose logarithm JSON has no number for


def of_chat(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` of a choice of a chat completion."""
    content = [
        {
            **_spelled(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_spelled(tokenizer, token, logprob) for token, logprob in entry.top.items()],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _spelled(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(raw)}


class CompletionLogprobs:
    """The `logprobs` of a choice of a completion, which come in pieces: `text_offset` counts on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters before the next token

    def piece(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of some tokens; those without an entry (a prompt's first) have None."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(token_ids, entries, strict=True):
            found["tokens"].append(self._tokenizer.token_text(token))
            found["text_offset"].append(self._offset)
            found["token_logprobs"].append(None if entry is None else max(entry.logprob, _LEAST))
            found["top_logprobs"].append(None if entry is None else self._top(entry))
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return found

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens by their texts; of two of one text (both parts of a character) the likelier stays."""
        named: dict[str, float] = {}
        for token, logprob in entry.top.items():
            named.setdefault(self._tokenizer.token_text(token), max(logprob, _LEAST))
        named.setdefault(self._tokenizer.token_text(entry.token_id), max(entry.logprob, _LEAST))
        return named

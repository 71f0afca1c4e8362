"""Special tokens in a text, against a search that tries every place and every token."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from octavo.loading.special import SpecialTokens

LETTERS = st.text("ab<|\n ", max_size=5)


def naive(text: str, ids: dict[str, int], swallow: set[int]) -> list[str | int]:
    parts: list[str | int] = []
    pending, at = "", 0
    while at < len(text):
        fitting = [token for token in ids if token and text.startswith(token, at)]
        if not fitting:
            pending, at = pending + text[at], at + 1
            continue
        best = max(fitting, key=len)
        parts += [pending] if pending else []
        parts.append(ids[best])
        pending, at = "", at + len(best)
        while ids[best] in swallow and at < len(text) and text[at] in " \n":
            at += 1
    return parts + ([pending] if pending else [])


@given(st.lists(LETTERS, max_size=6, unique=True), st.text("ab<|\n é", max_size=30), st.sets(st.integers(0, 5)))
def test_as_a_search_of_every_place(tokens, text, swallow):
    ids = {token: place for place, token in enumerate(tokens)}
    assert list(SpecialTokens(ids, swallow).split(text)) == naive(text, ids, swallow)


def test_no_tokens_leave_the_text_whole():
    assert list(SpecialTokens({}).split("abc")) == ["abc"]
    assert list(SpecialTokens({"<x>": 1}).split("")) == []


def test_the_longest_wins_and_white_space_goes_with_it():
    ids = {"<|end|>": 7, "<|end": 8, "\n\n": 9, "\n": 10}
    assert list(SpecialTokens(ids).split("a<|end|> \n\n\nb")) == ["a", 7, " ", 9, 10, "b"]
    assert list(SpecialTokens(ids, {7}).split("a<|end|> \n\n\nb")) == ["a", 7, "b"]


def test_time_grows_with_the_text_only():
    """Gemma has six thousand special tokens; a text of nothing but their beginnings must not take them all."""
    tokens = SpecialTokens({f"<unused{number}>": number for number in range(6000)})
    start = time.process_time()
    assert list(tokens.split("<unused" * 50_000)) == ["<unused" * 50_000]
    assert time.process_time() - start < 5

"""SentencePiece's BPE by scores, against the plain rule: join the best pair, look again, until there is none."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.loading.sentencepiece import SPACE, ScoreEncoder, byte_of


def naive(text: str, scores: dict[str, float]) -> list[str]:
    parts = list(text)
    while True:
        pairs = [
            (-scores[left + right], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in scores
        ]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(st.text("ab▁", min_size=1, max_size=4), st.integers(-6, 0), max_size=40),
    st.text("abc  ", max_size=30),
    st.booleans(),
)
@example({"ab": 0, "bab": -1}, "bab", False)  # joined to what stands before it
@example({"ba": 0, "bab": -1}, "bab", False)  # and after
@example({"aa": 0}, "aaa", False)  # the leftmost first
def test_joins_as_the_plain_rule(pieces, text, prefix_space):
    """With equal scores (the leftmost first), pieces that hold spaces inside, and characters that are no piece."""
    ids = {piece: 300 + place for place, piece in enumerate(pieces)}
    scores = [0.0] * 300 + [float(score) for score in pieces.values()]
    encoder = ScoreEncoder(ids, scores, list(range(256)), None, prefix_space=prefix_space)
    expected: list[int] = []
    for piece in naive((SPACE if prefix_space else "") + text.replace(" ", SPACE), pieces):
        expected += [ids[piece]] if piece in ids else list(piece.encode())
    assert encoder(text, True) == expected
    assert encoder(text, True) == expected  # and again from what it kept


def test_a_space_in_front_only_where_the_text_begins():
    ids = {"▁a": 0, "a": 1, "▁": 2}
    encoder = ScoreEncoder(ids, [0.0, -1.0, -2.0], [None] * 256, None, prefix_space=True)
    assert encoder("a", True) == [0]
    assert encoder("a", False) == [1]
    assert encoder(" a", True) == [2, 0]


def test_unknown_characters_are_bytes_or_the_unknown_token():
    ids = {"a": 0}
    assert ScoreEncoder(ids, [0.0], list(range(100, 356)), 9, prefix_space=False)("aé", False) == [0, 295, 269]
    assert ScoreEncoder(ids, [0.0], [None] * 256, 9, prefix_space=False)("aéé", False) == [0, 9, 9]
    assert ScoreEncoder(ids, [0.0], [None] * 256, None, prefix_space=False)("aé", False) == [0]


@pytest.mark.parametrize(("piece", "byte"), [("<0x0A>", 10), ("<0xff>", 255), ("<0xGG>", None), ("<0x0A", None)])
def test_byte_pieces(piece, byte):
    assert byte_of(piece) == byte


@pytest.mark.parametrize("text", ["a" * 100_000, "ab" * 50_000, " a" * 100_000, "é" * 100_000, " " * 100_000])
def test_long_texts_take_no_quadratic_time(text):
    pieces = ["a", "aa", "aaaa", "ab", "abab", "▁", "▁▁", "▁▁▁▁", "▁a"]
    ids = {piece: place for place, piece in enumerate(pieces)}
    encoder = ScoreEncoder(ids, [-float(place) for place in range(9)], [None] * 256, 8, prefix_space=False)
    start = time.process_time()
    assert encoder(text, False)
    assert time.process_time() - start < 6

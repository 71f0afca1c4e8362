"""The text of an answer as it grows: whole characters, stop strings, and in the end what `decode` gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.detokenizer import Detokenizer
from octavo.engine.stop import StopMatcher


class Pieces:
    """A tokenizer of given pieces of bytes. Like Llama 2's, it drops the space before a text's first word."""

    def __init__(self, pieces: Sequence[bytes | str], special: Sequence[int] = (), bos: int | None = None) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.special_ids = frozenset(special)
        self.bos = bos

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.pieces[token] for token in ids if token not in skipped).decode(errors="replace")
        bare = ids and ids[0] == self.bos and skip_special_tokens and text.startswith(" ")
        return text[1:] if bare else text


def pushed(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """What each token gives, and at last what flush gives."""
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def text_of(tokenizer: Any, ids: Sequence[int], **options: Any) -> tuple[str, str | None]:
    detokenizer = Detokenizer(tokenizer, **options)
    given_out = pushed(detokenizer, ids)
    assert "".join(given_out) == detokenizer.text
    return detokenizer.text, detokenizer.stop_hit


# --- characters -------------------------------------------------------------------------------------------------------

FAMILY = "👨‍👩‍👧‍👦"  # seven code points joined to one picture
BYTES = Pieces([bytes([b]) for b in range(256)])


def test_no_half_character_is_given_out() -> None:
    text = f"é中😊{FAMILY}."
    detokenizer = Detokenizer(BYTES)
    so_far = b""
    for byte in text.encode():
        so_far += bytes([byte])
        detokenizer.push(byte)
        assert detokenizer.text == so_far.decode(errors="ignore")
    assert detokenizer.text == text
    assert detokenizer.flush() == ""


def test_an_unfinished_character_at_the_end_is_one_replacement_character() -> None:
    assert pushed(Detokenizer(BYTES), "😊".encode()[:3]) == ["", "", "", "\ufffd"]


def test_bytes_that_are_no_text_hold_nothing_back() -> None:
    """Faults like these: a run of such bytes is kept for ever, and decoded again at each token."""
    detokenizer = Detokenizer(BYTES)
    assert "".join(detokenizer.push(0xFF) for _ in range(5000)) == "\ufffd" * 5000
    lengths = [len(detokenizer.text) for _ in range(999) if detokenizer.push(0xF0) is not None]
    assert np.diff(lengths).tolist() == [1] * 998


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_become_what_decode_makes_of_them(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES)
    whole = BYTES.decode(ids)
    for token in ids:
        detokenizer.push(token)
        assert whole.startswith(detokenizer.text)
    detokenizer.flush()
    assert detokenizer.text == whole


def test_a_long_answer_is_read_token_by_token() -> None:
    """100,000 tokens: time a token must not grow with the text (this test would take minutes)."""
    rng = np.random.default_rng(0)
    tokenizer = Pieces(["a", "ab", " and", "😊", b"\xe4\xb8", b"\xad", b"\xff", "aab"])
    ids = rng.integers(0, 8, 100_000).tolist()
    text, hit = text_of(tokenizer, ids, stop=("aabaabaabaabaabaabaabaabaabaabaabaab" * 4, "never"))
    assert hit is None
    assert text == tokenizer.decode(ids)


# --- special tokens, and the space where a text begins ----------------------------------------------------------------

SPACED = Pieces(["<s>", " Hello", " you", " ", "</s>"], special=(0, 4), bos=0)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_left_out_if_asked(skip: bool) -> None:
    text, _ = text_of(SPACED, [1, 4, 2], prompt_ids=[0, 1], skip_special_tokens=skip)
    assert text == (" Hello you" if skip else " Hello</s> you")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("prompt", [[0], [0, 4], [0, 1], [1], [0, 3]])
@pytest.mark.parametrize("answer", [[1, 2], [4, 2, 1], [3, 1]])
def test_prompt_and_answer_together_make_the_text_of_both(prompt: list[int], answer: list[int], skip: bool) -> None:
    text, _ = text_of(SPACED, answer, prompt_ids=prompt, skip_special_tokens=skip)
    before = SPACED.decode(prompt, skip_special_tokens=skip)
    assert before + text == SPACED.decode(prompt + answer, skip_special_tokens=skip)


def test_without_a_prompt_the_answer_is_decoded_alone() -> None:
    assert text_of(SPACED, [1, 2]) == (" Hello you", None)


# --- stop strings -----------------------------------------------------------------------------------------------------

WORDS = Pieces(["one", " two", "\n", "\nUs", "er", ":", " end", "User"])


def test_a_stop_string_across_tokens_is_found_and_its_head_never_given_out() -> None:
    detokenizer = Detokenizer(WORDS, stop=["\nUser:"])
    assert pushed(detokenizer, [0, 1, 3, 4, 5, 6]) == ["one", " two", "", "", "", "", ""]
    assert (detokenizer.text, detokenizer.stop_hit) == ("one two", "\nUser:")


def test_what_only_looked_like_a_stop_string_is_given_out_after_all() -> None:
    detokenizer = Detokenizer(WORDS, stop=["\nUser:"])
    assert pushed(detokenizer, [0, 3, 3, 4, 6]) == ["one", "", "\nUs", "", "\nUser end", ""]
    assert detokenizer.stop_hit is None


def test_the_head_of_a_stop_string_is_given_out_at_the_end() -> None:
    detokenizer = Detokenizer(WORDS, stop=["\nUser:"])
    assert pushed(detokenizer, [0, 3, 4]) == ["one", "", "", "\nUser"]
    assert detokenizer.flush() == ""
    assert detokenizer.text == "one\nUser"


def test_include_stop_keeps_it_and_drops_what_the_token_has_beyond() -> None:
    stop = ["two\nU"]
    assert text_of(WORDS, [0, 1, 3, 4], stop=stop, include_stop=True) == ("one two\nU", "two\nU")
    assert text_of(WORDS, [0, 1, 3, 4], stop=stop) == ("one ", "two\nU")


def test_the_stop_string_complete_first_wins_and_of_two_at_once_the_longer() -> None:
    assert text_of(WORDS, [0, 1, 7, 5], stop=["User:", "se"]) == ("one twoU", "se")
    assert text_of(WORDS, [0, 1, 7, 5], stop=["er:", "User:", ":"]) == ("one two", "User:")
    assert text_of(WORDS, [0, 1, 7, 5], stop=["one two", "two"]) == ("", "one two")


def test_a_stop_string_within_half_a_character_waits_for_the_rest() -> None:
    detokenizer = Detokenizer(BYTES, stop=["😊!"])
    assert pushed(detokenizer, "a😊!b".encode()) == ["a"] + [""] * 7
    assert detokenizer.stop_hit == "😊!"


def test_min_tokens_lets_earlier_stop_strings_pass() -> None:
    ids = [0, 1, 0, 1, 0, 1]
    assert text_of(WORDS, ids, stop=["two"], min_tokens=0) == ("one ", "two")
    assert text_of(WORDS, ids, stop=["two"], min_tokens=2) == ("one ", "two")
    assert text_of(WORDS, ids, stop=["two"], min_tokens=3) == ("one twoone ", "two")
    assert text_of(WORDS, ids, stop=["two"], min_tokens=9) == ("one twoone twoone two", None)


TEXTS = st.text("ab", min_size=1, max_size=5)


@given(
    pieces=st.lists(
        st.text("abc😊", max_size=4).map(str.encode) | st.sampled_from([b"\xf0\x9f", b"\x98", b"\x8a", b"a\xff"])
    ),
    stops=st.lists(TEXTS | st.sampled_from(["😊", "b😊a", "\ufffd"]), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
@settings(max_examples=400)
def test_stop_strings_are_found_as_by_looking_at_the_whole_text(
    pieces: list[bytes], stops: list[str], include: bool, min_tokens: int
) -> None:
    tokenizer = Pieces(pieces)
    ids = list(range(len(pieces)))
    texts = [visible(pieces[:count]) for count in range(len(pieces) + 1)] + [tokenizer.decode(ids)]
    expected: tuple[str, str | None] = (texts[-1], None)
    for count in range(1, len(texts)):
        if min(count, len(pieces)) >= min_tokens and (
            end_and_stop := first_end(texts[count], len(texts[count - 1]), stops)
        ):
            end, stop = end_and_stop
            expected = (texts[count][: end if include else end - len(stop)], stop)
            break
    detokenizer = Detokenizer(tokenizer, stop=stops, include_stop=include, min_tokens=min_tokens)
    for count, token in enumerate(ids, start=1):
        detokenizer.push(token)
        assert expected[0].startswith(detokenizer.text)
        if detokenizer.stop_hit is None:
            held = texts[count][len(detokenizer.text) :]
            assert texts[count] == detokenizer.text + held
            assert held == longest_head(texts[count], stops)
    detokenizer.flush()
    assert (detokenizer.text, detokenizer.stop_hit) == expected


def visible(pieces: Sequence[bytes]) -> str:
    """What can be told of the text from its first tokens: all but an unfinished last character (of those used here)."""
    raw = b"".join(pieces)
    head = next((head for head in (b"\xf0\x9f\x98", b"\xf0\x9f\x8a", b"\xf0\x9f") if raw.endswith(head)), b"")
    return raw.removesuffix(head).decode(errors="replace")


def first_end(text: str, after: int, stops: list[str]) -> tuple[int, str] | None:
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def longest_head(text: str, stops: list[str]) -> str:
    heads = [stop[:n] for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return max(heads, key=len)


@given(st.lists(TEXTS, min_size=1, max_size=3), st.lists(TEXTS, max_size=12), st.booleans())
def test_the_matcher_finds_the_same_however_the_text_is_cut(stops: list[str], cuts: list[str], copied: bool) -> None:
    whole = StopMatcher(stops).feed("".join(cuts))
    matcher, read, found = StopMatcher(stops), 0, None
    for piece in cuts:
        matcher = matcher.copy() if copied else matcher
        found = matcher.feed(piece)
        if found:
            break
        read += len(piece)
    assert whole == (found and (found[0], read + found[1]))


# --- forks ------------------------------------------------------------------------------------------------------------


def test_a_copy_goes_its_own_way() -> None:
    tokenizer = Pieces(["a", b"\xf0\x9f", b"\x98\x8a", b"\x98\x8b", "sto", "p", "ry"])
    first = Detokenizer(tokenizer, stop=["stop"])
    for token in (0, 4, 0, 1):
        first.push(token)
    second = first.copy()
    assert pushed(first, [2, 4, 5]) == ["😊", "", "", ""]
    assert pushed(second, [3, 4, 6]) == ["😋", "", "story", ""]
    assert (first.text, first.stop_hit) == ("astoa😊", "stop")
    assert (second.text, second.stop_hit) == ("astoa😋story", None)


def test_copies_taking_turns_find_their_own_stop_strings() -> None:
    first = Detokenizer(Pieces(["sto", "p", "ry"]), stop=["stop"])
    second = first.copy()
    assert [first.push(0), second.push(2), first.push(1), second.push(1)] == ["", "ry", "", "p"]
    assert (first.stop_hit, second.stop_hit) == ("stop", None)


def test_copies_before_any_text_each_remember_their_own_tokens() -> None:
    first = Detokenizer(SPACED, [])
    second = first.copy()
    assert [first.push(0), second.push(1), first.push(1)] == ["", " Hello", "Hello"]


def test_a_copy_before_the_first_token_drops_its_own_space() -> None:
    first = Detokenizer(SPACED, [0])
    second = first.copy()
    assert [first.push(1), second.push(2), second.push(1)] == ["Hello", "you", " Hello"]


# --- real tokens ------------------------------------------------------------------------------------------------------

REAL_TEXTS = [
    "Plain words, and a  double space.\n\n\tdef f(x):\n        return x ** 2  # ok\r\n",
    f"Emoji 😀👍🏽 {FAMILY} 🏳️‍🌈 flags 🇩🇪🇯🇵 and e\u0301 combining",
    "汉字与日本語、한국어 그리고 ไทย हिन्दी العربية עברית",
    "𝕬𝖓𝖈𝖎𝖊𝖓𝖙 𐍈 𓂀 \U0010ffff \x00\x7f end",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    from octavo.loading.gguf import read_gguf
    from octavo.loading.gguf_tokenizer import read_gguf_tokenizer

    return read_gguf_tokenizer(read_gguf(smollm2_path))


@pytest.mark.parametrize("text", REAL_TEXTS)
def test_real_tokens_give_back_the_text(smollm2: Any, text: str) -> None:
    ids = smollm2.encode(text, special=False)
    prompt = smollm2.encode("Say: ")
    given_out = pushed(Detokenizer(smollm2, prompt), ids)
    assert "".join(given_out) == smollm2.decode(ids) == text
    assert not any("\ufffd" in piece for piece in given_out)


@pytest.mark.parametrize("text", REAL_TEXTS)
def test_real_text_stops_at_any_of_its_substrings(smollm2: Any, text: str) -> None:
    ids = smollm2.encode(text, special=False)
    for begin in range(0, len(text), 3):
        for length in (1, 2, 7):
            stop = text[begin : begin + length]
            if stop:
                assert text_of(smollm2, ids, stop=[stop]) == (text[: text.find(stop)], stop)


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_random_real_tokens_give_what_decode_gives(smollm2: Any, data: st.DataObject, skip: bool) -> None:
    token = st.integers(0, smollm2.vocab_size - 1) | st.sampled_from(sorted(smollm2.special_ids)) | st.integers(0, 400)
    ids = data.draw(st.lists(token, max_size=30))
    text, _ = text_of(smollm2, ids, prompt_ids=smollm2.encode("Hi"), skip_special_tokens=skip)
    assert text == smollm2.decode(ids, skip_special_tokens=skip)

"""What the views write while answers grow, and at their end."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from octavo.cli.display import Board, InOrder, Interleaved, Solo, printable, title_of
from octavo.outputs import Completion, RequestOutput, Timings


def output(*texts: str, finished: bool = False, error: str | None = None) -> RequestOutput:
    completions = [
        Completion(index=i, text=text, token_ids=[1] * len(text), finish_reason="stop" if finished else None)
        for i, text in enumerate(texts)
    ]
    return RequestOutput("r", "p", [1], completions, finished, Timings(0.0), error=error)


@given(st.lists(st.text(max_size=30), min_size=1, max_size=8))
def test_solo_writes_exactly_the_text(pieces: list[str]) -> None:
    out = io.StringIO()
    view = Solo(out)
    for end in range(1, len(pieces) + 1):
        view.update(0, output("".join(pieces[:end])))
    view.close()
    assert out.getvalue() == "".join(pieces) + "\n"


def test_in_order_waits_for_those_before() -> None:
    out = io.StringIO()
    view = InOrder(["one", "two", "three"], out)
    view.update(1, output("b", finished=True))
    view.update(0, output("a"))
    assert out.getvalue() == ""
    view.update(0, output("a", finished=True))
    view.update(2, output(finished=True, error="It cannot be."))
    assert out.getvalue() == "--- 1: one\na\n\n--- 2: two\nb\n\n--- 3: three\nIt cannot be.\n\n"


@given(st.lists(st.text("ab \n", max_size=40), min_size=1, max_size=8))
def test_interleaved_writes_every_word_once_in_order(pieces: list[str]) -> None:
    out = io.StringIO()
    view = Interleaved(["t"], out, width=12)
    for end in range(1, len(pieces) + 1):
        view.update(0, output("".join(pieces[:end])))
        view.update(0, output("".join(pieces[:end])))
    view.update(0, output("".join(pieces), finished=True))
    view.close()
    lines = out.getvalue().splitlines()[1:]
    assert all(line.startswith("[1] ") and len(line) <= 12 + len("[1] ") for line in lines)
    assert "".join(line[4:] for line in lines).replace(" ", "") == "".join("".join(pieces).split())


def test_interleaved_tells_answers_apart() -> None:
    out = io.StringIO()
    view = Interleaved(["one", "two"], out)
    view.update(1, output("x\ny", "z"))
    view.update(0, output("a", finished=True))
    view.update(1, output("x\ny", "z\n", finished=True))
    assert out.getvalue().splitlines() == ["[1] one", "[2] two", "[2.1] x", "[1] a", "[2.1] y", "[2.2] z"]


class TestBoard:
    """Panels side by side."""

    def board(self, *titles: str, height: int = 24) -> tuple[Board, Console]:
        console = Console(file=io.StringIO(), width=100, height=height)
        return Board(titles, console), console

    def shown(self, console: Console, what: object) -> list[str]:
        console.print(what)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().splitlines()

    def test_growing_answers_show_their_ends_and_fit_the_screen(self) -> None:
        board, console = self.board(*"abcdefgh")
        for index in range(8):
            board.update(index, output("first " + "word " * 200 + f"last{index}"))
        lines = self.shown(console, board._growing())
        assert len(lines) <= 24
        text = "\n".join(lines)
        assert all(f"last{index}" in text for index in range(8))
        assert "first" not in text

    def test_at_the_end_answers_are_whole(self) -> None:
        board, console = self.board("a [bold]title[/bold]", "b", "c")
        long_word = "".join(chr(0x4E00 + i) for i in range(200))  # Chinese has no spaces to break at
        board.update(0, output("first [red]" + "word " * 100 + "last", finished=True))
        board.update(1, output(long_word, "two", finished=True))
        board.update(2, output(finished=True, error="It cannot be."))
        text = "\n".join(self.shown(console, board.whole()))
        assert "a [bold]title[/bold]" in text  # no markup of ours
        assert "first [red]" in text
        assert "last" in text
        assert all(character in text for character in long_word)
        assert "It cannot be." in text
        assert "tokens, stop" in text

    def test_only_a_few_fit_on_a_terminal_and_none_in_a_pipe(self) -> None:
        terminal = Console(file=io.StringIO(), force_terminal=True)
        assert Board.fits(8, terminal)
        assert not Board.fits(50, terminal)
        assert not Board.fits(2, Console(file=io.StringIO()))


def test_a_model_does_not_drive_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\x9b\x7f\r\n\tc\u200d é") == "a[31mb\n\tc\u200d é"


@pytest.mark.parametrize(("text", "title"), [("a\n b  c", "a b c"), ("word " * 40, "word")])
def test_titles_are_one_short_line(text: str, title: str) -> None:
    assert title_of(text).startswith(title)
    assert len(title_of(text)) <= 60
    assert "\n" not in title_of(text)

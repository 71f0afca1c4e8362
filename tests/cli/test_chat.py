"""`octavo chat`: history, commands, pipes, a terminal, and Ctrl-C in the midst of an answer."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.chat import Conversation
from octavo.llm import LLM
from octavo.params import SamplingParams

from .conftest import Octavo

ROOT = Path(__file__).parents[2]
SLOW = """
import sys
import octavo.llm
from octavo.cli import main
from tests.cli import tiny
octavo.llm.load_engine = lambda model, config: tiny.engine(config, delay=0.15)
main(["chat"])
"""


@pytest.mark.usefixtures("alphabet")
def test_lines_of_a_pipe_are_messages(octavo: Octavo) -> None:
    ran = octavo("chat", stdin="w\n\n  \nx\n")
    assert (ran.code, ran.out, ran.err) == (0, "xyz\nyz\n", "")


def test_the_history_is_part_of_the_next_prompt_and_its_blocks_are_found(llm: LLM, octavo: Octavo) -> None:
    talk = Conversation(llm, SamplingParams(temperature=0, max_tokens=None), "be" + "e" * 30)
    for text in ("w", "x"):
        talk._answer(text)
    assert [m["content"] for m in talk.messages] == ["be" + "e" * 30, "w", "xyz", "x", "yz"]
    report = llm.memory_report()
    assert report.prefix_hit_tokens == 32  # two blocks of the first prompt
    assert report.active == report.shared == 0


@pytest.mark.usefixtures("alphabet")
def test_commands(octavo: Octavo) -> None:
    ran = octavo("chat", "--system", "0", stdin="w\n/reset\n/memory\n/help\n/nonsense\n/exit\nw\n")
    assert ran.out.startswith("xyz\n")
    assert ran.out.count("xyz") == 1  # nothing is answered behind /exit
    assert "blocks used" in ran.out
    assert "begins anew" in ran.err
    assert "/nonsense is no command" in ran.err
    assert ran.err.count("Ctrl-C stops an answer") == 2


def test_reset_keeps_the_system_message_alone(llm: LLM) -> None:
    talk = Conversation(llm, SamplingParams(max_tokens=2), "0")
    talk._answer("a")
    talk._reset()
    assert talk.messages == [{"role": "system", "content": "0"}]


@pytest.mark.usefixtures("alphabet")
def test_a_conversation_that_outgrows_the_context_says_so_and_goes_on(octavo: Octavo) -> None:
    ran = octavo("chat", "--max-model-len", "20", stdin=f"w\n{'a' * 30}\nx\n")
    assert ran.out == "xyz\nyz\n"  # what did not fit is not in the history
    assert "max_model_len" in ran.err
    assert "/reset begins anew" in ran.err


def test_a_model_without_a_template_cannot_chat(octavo: Octavo, alphabet: dict[str, Any]) -> None:
    alphabet["template"] = None
    ran = octavo("chat", stdin="w\n")
    assert (ran.code, ran.out) == (1, "")
    assert "generate --raw" in ran.err


class Terminal:
    """A chat on a terminal of its own, whose answers take a while."""

    def __init__(self) -> None:
        self._screen, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLOW], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._unread = ""

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def read(self, words: str, seconds: float = 30) -> str:
        """What appears up to and with `words`, or in so many seconds; what follows is left for the next call."""
        deadline = time.monotonic() + seconds
        while words not in self._unread and (left := deadline - time.monotonic()) > 0:
            if select.select([self._screen], [], [], left)[0]:
                self._unread += os.read(self._screen, 4096).decode(errors="replace")
        end = self._unread.index(words) + len(words) if words in self._unread else len(self._unread)
        seen, self._unread = self._unread[:end], self._unread[end:]
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """Closed at the end, whatever happens."""
    made = Terminal()
    yield made
    made.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.read("> ")
    terminal.type("a\n")
    assert "bcd" in terminal.read("bcd")  # it streams: the answer is far from its end
    terminal.ctrl_c()
    stopped = terminal.read("> ")
    assert "(stopped)" in stopped
    assert "xyz" not in stopped
    for _ in range(20):  # a signal that comes just before Python waits for a key is seen with the next one only
        terminal.ctrl_c()
        if "Ctrl-D ends" in (seen := terminal.read("Ctrl-D ends", 0.5)):
            break
    assert "Ctrl-D ends" in seen
    terminal.read("> ")
    terminal.type("/memory\n")
    assert ", 0 now" in terminal.read("evictions")  # the blocks of the stopped answer went back
    terminal.read("> ")
    terminal.type("x\n")
    assert "yz" in terminal.read("from the cache")
    terminal.read("> ")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0

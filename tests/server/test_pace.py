"""How long news of streams waits: urgent news not at all, other news until sending has paid off, never too long."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.pace import Pace


@dataclass(eq=False)
class Stream:
    """What a Pace sees of one; notes when it is woken."""

    loop: Loop
    urgent: bool = False
    sending: float = 0.0  # processor time that its reader takes, who has his turn soon
    woken: list[float] = field(default_factory=list)

    def wake(self) -> None:
        self.woken.append(self.loop.now)
        self.loop.call_soon(self._send)

    def _send(self) -> None:
        self.loop.worked += self.sending


@dataclass
class Loop:
    """An event loop whose clock goes as far as it is told."""

    now: float = 1000.0
    worked: float = 5.0  # processor time of its thread
    timers: list[tuple[float, Any]] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Any) -> None:
        self.timers.append((when, call))

    def call_soon(self, call: Any, *arguments: Any) -> None:
        self.timers.append((self.now, partial(call, *arguments)))

    def go(self, until: float) -> None:
        while due := [timer for timer in self.timers if timer[0] <= until]:
            when, call = timer = min(due, key=lambda timer: timer[0])
            self.timers.remove(timer)
            self.now = max(self.now, when)
            call()
        self.now = until


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return install(Loop(), monkeypatch)


def install(made: Loop, patch: pytest.MonkeyPatch) -> Loop:
    patch.setattr("octavo.server.pace.asyncio.get_running_loop", lambda: made)
    patch.setattr("octavo.server.pace.time.thread_time", lambda: made.worked)
    return made


def test_few_streams_hardly_wait_and_many_wait_together(loop: Loop) -> None:
    paced = Pace(longest=0.1, share=0.02)
    streams = [Stream(loop) for _ in range(3)]
    for stream in streams:
        paced.wake(stream)
    loop.go(1000.0)
    assert [stream.woken for stream in streams] == [[1000.0]] * 3  # nothing was sent for long
    loop.worked += 0.001  # what sending has taken
    loop.now = 1000.03
    for stream in streams:
        paced.wake(stream)
    loop.go(1000.049)
    assert [len(stream.woken) for stream in streams] == [1, 1, 1]
    loop.go(1000.06)
    assert [stream.woken[1:] for stream in streams] == [[pytest.approx(1000.05)]] * 3  # 1 ms is 2 % of 50 ms


def test_until_when_all_wait_is_known_as_soon_as_they_have_sent_and_never_too_early(loop: Loop) -> None:
    paced = Pace(longest=0.1, share=0.02)
    streams = [Stream(loop, sending=0.0005) for _ in range(2)]
    for stream in streams:
        paced.wake(stream)
    loop.timers.pop()[1]()  # they are woken, and have not sent
    assert paced.waits_until == pytest.approx(1000.1)
    paced.wake(streams[0])
    loop.go(1000.0)
    assert [stream.woken for stream in streams] == [[1000.0]] * 2  # what came while they sent does not go out for free
    assert paced.waits_until == pytest.approx(1000.05)
    loop.go(1000.06)
    assert streams[0].woken[1:] == [pytest.approx(1000.05)]
    assert paced.waits_until == pytest.approx(1000.075)  # one has sent: half as long


def test_a_first_token_and_an_end_do_not_wait(loop: Loop) -> None:
    paced = Pace(longest=0.1)
    paced.wake(Stream(loop))
    loop.go(1000.0)
    loop.worked += 1
    late, urgent = Stream(loop), Stream(loop, urgent=True)
    paced.wake(late)
    paced.wake(urgent)
    assert (late.woken, urgent.woken) == ([], [1000.0])
    loop.go(1000.1)
    assert late.woken == [pytest.approx(1000.1)]


def test_with_no_interval_nothing_waits(loop: Loop) -> None:
    stream = Stream(loop)
    for _ in range(3):
        Pace(longest=0).wake(stream)
    assert stream.woken == [1000.0] * 3


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 0.05), st.floats(0, 0.01), st.booleans()), max_size=40))
def test_whoever_has_news_is_woken_within_the_longest_wait(told: list[tuple[int, float, float, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        loop = install(Loop(), patch)
        paced = Pace(longest=0.1)
        streams = [Stream(loop) for _ in range(5)]
        news: list[tuple[Stream, float]] = []
        for which, passed, worked, urgent in told:
            streams[which].urgent = urgent
            paced.wake(streams[which])
            news.append((streams[which], loop.now))
            loop.worked += worked
            loop.go(loop.now + passed)
        loop.go(loop.now + 1)
        assert not loop.timers
        for stream, when in news:
            assert any(when <= woken <= when + 0.1 + 1e-9 for woken in stream.woken)

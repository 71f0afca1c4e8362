"""When many streams have news step after step: how long each waits for more, so that sending leaves time to compute.

To send one token to one client takes a processor some 50 us: of 32 clients, 5 % of a step of SmolLM2 on two cores. Four
tokens that go out together take hardly more than one. Knows no HTTP; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time

from octavo.async_llm import Stream

SHARE = 0.01  # of a processor that the event loop should spend on sending


class Pace:
    """Wakes streams, those with urgent news at once, others all together when what the last time took has paid off.

    The time is measured, not assumed: all that the event loop's thread worked since then. With few clients the wait is
    shorter than a step; `longest` bounds it, in seconds, however many there are. `waits_until`, when the others are to
    be woken next, is read by the engine's thread too.
    """

    def __init__(self, longest: float, share: float = SHARE) -> None:
        self.waits_until = 0.0
        self._longest, self._share = longest, share
        self._waiting: dict[Stream, None] = {}
        self._sending = False  # those last woken have not had their turn yet
        self._woken_at = self._worked = 0.0  # when they were, and the thread's processor time then

    def wake(self, stream: Stream) -> None:
        """There is news for the stream."""
        if stream.urgent or not self._longest:
            stream.wake()
            return
        if not self._waiting and not self._sending:
            self._set_timer()
        self._waiting[stream] = None

    def _set_timer(self) -> None:
        self._weigh()
        asyncio.get_running_loop().call_at(self.waits_until, self._wake_all)

    def _weigh(self) -> None:
        pays_off = (time.thread_time() - self._worked) / self._share
        self.waits_until = self._woken_at + min(pays_off, self._longest)

    def _wake_all(self) -> None:
        for stream in self._waiting:
            stream.wake()
        self._waiting.clear()
        loop = asyncio.get_running_loop()
        self._woken_at, self._worked = loop.time(), time.thread_time()
        self.waits_until = self._woken_at + self._longest  # for all that is known yet
        self._sending = True
        loop.call_soon(loop.call_soon, self._sent)  # in the turn after the readers'

    def _sent(self) -> None:
        self._sending = False
        if self._waiting:
            self._set_timer()
        else:
            self._weigh()

"""Ctrl-C between two steps of the engine, not within one. Knows no engine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def undivided() -> Iterator[None]:
    """Have Ctrl-C wait for the end of the block: an engine left in the midst of a step has lost count of its memory.

    A second Ctrl-C does not wait. Where the program handles SIGINT itself, or this is not the main thread (which alone
    is interrupted), nothing is changed.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt

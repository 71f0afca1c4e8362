"""Ctrl-C in the midst of a step: the step is finished, the memory stays sound, the next call is served."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from octavo.interrupts import undivided
from octavo.llm import LLM
from tests.engine.test_engine_memory import assert_nothing_is_lost, make_engine
from tests.engine.toy import ToyModel, greedy


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@undivided()
def pressed(times: int, done: list[str]) -> None:
    for _ in range(times):
        press()
    done.append("the rest")


def test_it_waits_for_the_end_and_a_second_one_does_not() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pressed(1, done)
    assert done == ["the rest"]
    with pytest.raises(KeyboardInterrupt):
        pressed(2, done)
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_and_other_threads_are_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with undivided():
            press()
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)

    def work() -> None:
        with undivided():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel()
    engine = make_engine(model)
    monkeypatch.setattr("octavo.llm.load_engine", lambda *_: engine)
    llm = LLM("toy")
    forward = model.forward

    def pressed_within(*args: object) -> object:
        if len(model.steps) == 3:
            press()
        return forward(*args)

    monkeypatch.setattr(model, "forward", pressed_within)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3]], greedy(max_tokens=None, ignore_eos=True))
    engine.kv.check()
    assert not engine.has_work
    assert_nothing_is_lost(engine)
    (output,) = llm.generate([1, 2], greedy(max_tokens=4, ignore_eos=True))
    assert len(output.completions[0].token_ids) == 4

"""What memory a trace needs, against work whose need is plain."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError, RequestError
from octavo.lab import scenarios
from octavo.lab.capacity import Question, attempt, need
from octavo.lab.step_time import SMOLLM2
from octavo.lab.work import Arrival, Work


def question(*arrivals: Arrival, max_model_len: int = 4096) -> Question:
    return Question(
        work=Work("made", "up", arrivals),
        block_size=16,
        token_bytes=23_040,
        max_model_len=max_model_len,
        step_time=SMOLLM2,
    )


def ten_at_once(prompt: int = 64, output: int = 33) -> Question:
    """Each holds 6 blocks in the end: the last of 97 tokens is never computed."""
    return question(*(Arrival(0.0, ((i, prompt),), output, 256) for i in range(10)))


def test_nobody_waits_in_a_pool_for_all() -> None:
    trial = attempt(ten_at_once(), 61)
    assert (trial.queued, trial.rejected, trial.in_flight_max, trial.held_max) == (0, 0, 10, 60)


def test_who_waits_for_memory_is_counted_once() -> None:
    trial = attempt(ten_at_once(), 6)
    assert (trial.queued, trial.rejected, trial.in_flight_max) == (9, 0, 1)  # one after the other
    trial = attempt(ten_at_once(), 5)
    assert trial.rejected == 10  # each outgrows the pool alone


def test_those_in_line_behind_one_that_waits_wait_too() -> None:
    sizes = (160, 160, 16, 16, 16)  # of prompts; the first two do not fit side by side, all but the first do
    asked = question(*(Arrival(0.0, ((i, size),), 16, 256) for i, size in enumerate(sizes)))
    trial = attempt(asked, 20)
    assert (trial.queued, trial.in_flight_max) == (4, 4)


def test_those_that_never_fit_do_not_count_as_waiting() -> None:
    trial = attempt(question(*(Arrival(at, ((i, size),), 16, 256) for i, (at, size) in enumerate(
        [(0.0, 500), (0.0, 64), (0.0, 64), (100.0, 64)]
    ))), 6)  # fmt: skip
    assert (trial.rejected, trial.queued) == (1, 1)  # the third, not the fourth, which comes when all is done


def test_the_smallest_pool_that_does() -> None:
    best, *others = need(ten_at_once(), target_queued=0.0)
    assert best.queued == best.rejected == 0
    assert 60 <= best.blocks <= 61
    failed = [one for one in others if one.blocks < best.blocks]
    assert max(one.blocks for one in failed) >= best.blocks - 2
    assert all(one.queued for one in failed)
    assert need(ten_at_once(), target_queued=0.5)[0].blocks < best.blocks


def test_shared_beginnings_need_memory_once() -> None:
    work = scenarios.shared_prompt(0, requests=30, system_tokens=1600, rate=100.0)
    apart = [
        Arrival(a.at, ((10**6 + i, a.prompt_tokens),), a.output_tokens, a.max_tokens)
        for i, a in enumerate(work.arrivals)
    ]
    shared, alone = (need(question(*arrivals), target_queued=0.1)[0] for arrivals in (work.arrivals, apart))
    assert 5 * shared.blocks < alone.blocks


def test_what_no_memory_helps_is_left_out() -> None:
    asked = question(Arrival(0.0, ((0, 90),), 10, 256), Arrival(0.0, ((1, 91),), 10, 256), max_model_len=100)
    assert len(asked.fitting().arrivals) == 1
    assert need(asked, target_queued=0.0)[0].rejected == 0
    with pytest.raises(RequestError, match="All 1 requests of made are longer than 50 tokens"):
        need(question(Arrival(0.0, ((0, 90),), 10, 256), max_model_len=50), target_queued=0.0)


def test_what_cannot_be() -> None:
    for targets in ({"target_queued": 1.0}, {"target_queued": -0.1}, {"target_queued": 0.0, "target_rejected": 2.0}):
        with pytest.raises(ConfigError, match="share from 0"):
            need(ten_at_once(), **targets)
    with pytest.raises(ConfigError, match="at least 1"):
        attempt(ten_at_once(), 0)

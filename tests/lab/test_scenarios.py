"""Scenarios: the same from the same seed, and each about what it says it is about."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from octavo.errors import RequestError
from octavo.lab import scenarios
from octavo.lab.work import Work


@pytest.mark.parametrize("name", scenarios.ALL)
def test_the_seed_decides_all(name: str) -> None:
    make = scenarios.ALL[name]
    work = make(7)
    assert work == make(7)
    assert work != make(8)
    assert work.name == name
    assert work.source.startswith("made up")
    assert [a.at for a in work.arrivals] == sorted(a.at for a in work.arrivals)
    assert work.arrivals[0].at == 0
    assert all(1 <= a.output_tokens <= a.max_tokens for a in work.arrivals)
    assert all(tokens >= 1 for a in work.arrivals for _, tokens in a.prompt)


def test_a_hundred_requests_behind_two_thousand_tokens() -> None:
    arrivals = scenarios.shared_prompt(0).arrivals
    assert len(arrivals) == 100
    assert {a.prompt[0] for a in arrivals} == {(arrivals[0].prompt[0][0], 2000)}
    assert len({a.prompt[1][0] for a in arrivals}) == 100


def test_a_turn_of_a_chat_holds_all_before() -> None:
    arrivals = scenarios.chat(0, conversations=10).arrivals
    talks: dict[int, list[tuple[tuple[int, int], ...]]] = {}
    for a in arrivals:
        talks.setdefault(a.prompt[1][0], []).append(a.prompt)
        assert a.prompt[0] == arrivals[0].prompt[0]  # the system prompt
    assert len(talks) == 10
    for turns in talks.values():
        assert len(turns) >= 2
        for earlier, later in pairwise(turns):
            assert later[: len(earlier)] == earlier
            assert len(later) == len(earlier) + 2  # the answer, and the next question
    answers = {a.prompt: a.output_tokens for a in arrivals}
    for turns in talks.values():
        for earlier, later in pairwise(turns):
            assert later[len(earlier)][1] == answers[earlier]


def test_widths() -> None:
    assert {a.n for a in scenarios.samples(0).arrivals} == {2, 4, 8, 16}
    assert {a.n for a in scenarios.samples(0, n=5).arrivals} == {5}
    assert {a.beam_width for a in scenarios.beams(0).arrivals} == {2, 4, 6, 8}
    assert {a.beam_width for a in scenarios.beams(0, width=3).arrivals} == {3}


def test_code_is_of_wildly_varying_lengths() -> None:
    outputs = [a.output_tokens for a in scenarios.code(0).arrivals]
    assert np.quantile(outputs, 0.95) > 50 * np.quantile(outputs, 0.05)
    assert {a.max_tokens for a in scenarios.code(0).arrivals} == {1024}


def test_arrivals_are_poisson() -> None:
    gaps = np.diff([a.at for a in scenarios.poisson(0, requests=4000, rate=5.0).arrivals])
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential: as wide as its mean


@pytest.mark.parametrize(
    "make",
    [
        lambda: scenarios.poisson(-1),
        lambda: scenarios.poisson(0, requests=0),
        lambda: scenarios.poisson(0, rate=0),
        lambda: scenarios.samples(0, n=-1),
        lambda: scenarios.chat(0, turns=0),
        lambda: scenarios.shared_prompt(0, system_tokens=0),
    ],
)
def test_what_cannot_be(make: Callable[[], Work]) -> None:
    with pytest.raises(RequestError, match="must be"):
        make()

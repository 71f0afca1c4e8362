"""Work made up to show one thing each: sharing, beams, conversations, lengths that nobody foresees. Knows no strategy.

The same seed always gives the same work. Arrivals are Poisson: the gaps between them are drawn from an exponential
distribution, as those of people who know nothing of one another are. Lengths are log-normal, as those of published
traces nearly are: many short ones, a few very long.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from octavo.errors import RequestError
from octavo.lab.traces import assumed_max_tokens
from octavo.lab.work import Arrival, Segment, Work


def shared_prompt(
    seed: int, *, requests: int = 100, system_tokens: int = 2000, own_tokens: int = 50, rate: float = 20.0
) -> Work:
    """One system prompt before every user's own question: so many requests a second, all with the same beginning."""
    _at_least_one(requests=requests, system_tokens=system_tokens, own_tokens=own_tokens)
    draw = _Draw(seed, rate)
    system = draw.segment(system_tokens)
    return _work(
        "shared-prompt",
        f"{requests} requests, {rate:g} a second, behind the same {system_tokens:,} tokens (seed {seed})",
        [
            draw.arrival(
                (system, draw.segment(draw.length(own_tokens, 0.6, 4 * own_tokens))), draw.length(100, 0.7, 512)
            )
            for _ in range(requests)
        ],
    )


def chat(
    seed: int,
    *,
    conversations: int = 40,
    turns: int = 6,
    system_tokens: int = 200,
    rate: float = 1.0,
    pause: float = 15.0,
) -> Work:
    """Conversations: each turn's prompt is all that was said before, answers included, and a new question.

    A conversation has 2 to twice `turns` less 2 turns; `pause` seconds on average between an answer's beginning and
    the next question. A prompt's tokens that were an earlier answer are new to every cache: work knows an answer's
    length, not its tokens.
    """
    _at_least_one(conversations=conversations, turns=turns, system_tokens=system_tokens)
    draw = _Draw(seed, rate)
    system = draw.segment(system_tokens)
    arrivals: list[Arrival] = []
    for _ in range(conversations):
        at = draw.next_time()
        said: tuple[Segment, ...] = (system,)
        for _ in range(draw.between(2, max(2, 2 * turns - 2))):
            question, answer = draw.length(40, 0.8, 400), draw.length(130, 0.7, 600)
            said = (*said, draw.segment(question))
            arrivals.append(Arrival(at, said, answer, assumed_max_tokens(answer)))
            said = (*said, draw.segment(answer))
            at += draw.gap(1 / pause) + 0.03 * answer  # thinking, and reading along as it is written
    return _work("chat", f"{conversations} conversations of some {turns} turns (seed {seed})", arrivals)


def samples(seed: int, *, n: int | None = None, requests: int = 60, rate: float = 2.0) -> Work:
    """Several answers to each prompt, drawn in parallel: `n`, or 2, 4, 8 and 16 in turns."""
    _at_least_one(requests=requests, n=n or 1)
    draw, widths = _Draw(seed, rate), itertools.cycle((n,) if n else (2, 4, 8, 16))
    return _work(
        "samples",
        f"{requests} requests of {n or '2 to 16'} samples each, {rate:g} a second (seed {seed})",
        [
            draw.arrival((draw.segment(draw.length(160, 0.9, 1000)),), draw.length(150, 0.7, 512), n=next(widths))
            for _ in range(requests)
        ],
    )


def beams(seed: int, *, width: int | None = None, requests: int = 60, rate: float = 2.0) -> Work:
    """Beam search, as for translations: `width` beams, or 2, 4, 6 and 8 in turns."""
    _at_least_one(requests=requests, width=width or 2)
    draw, widths = _Draw(seed, rate), itertools.cycle((width,) if width else (2, 4, 6, 8))
    return _work(
        "beams",
        f"{requests} requests of {width or '2 to 8'} beams each, {rate:g} a second (seed {seed})",
        [
            draw.arrival(
                (draw.segment(draw.length(160, 0.9, 1000)),), draw.length(100, 0.7, 400), beam_width=next(widths)
            )
            for _ in range(requests)
        ],
    )


def code(seed: int, *, requests: int = 400, rate: float = 5.0) -> Work:
    """Completion in an editor: a few lines or whole files before the cursor; a bracket or a whole function after it.

    Lengths spread over three orders of magnitude, and every request names the same generous limit, as plug-ins do.
    """
    _at_least_one(requests=requests)
    draw = _Draw(seed, rate)
    arrivals = []
    for _ in range(requests):
        answer = draw.length(25, 1.6, 1024)
        arrivals.append(draw.arrival((draw.segment(draw.length(700, 1.3, 3000)),), answer, max_tokens=1024))
    return _work("code", f"{requests} completions, {rate:g} a second, of 1 to 1,024 tokens (seed {seed})", arrivals)


def poisson(seed: int, *, requests: int = 400, rate: float = 4.0) -> Work:
    """Ordinary questions, nothing shared, at a steady rate."""
    _at_least_one(requests=requests)
    draw = _Draw(seed, rate)
    return _work(
        "poisson",
        f"{requests} requests, {rate:g} a second on average, nothing shared (seed {seed})",
        [
            draw.arrival((draw.segment(draw.length(500, 0.9, 3000)),), draw.length(129, 0.9, 1000))
            for _ in range(requests)
        ],
    )


def questions(seed: int, *, requests: int = 400, rate: float = 1.0) -> Work:
    """Short questions, as to a small assistant: answers of a sentence to a page, of which nobody knows which comes.

    Writing answers takes nearly all the time, as with chats on large models; so on a few cores, too, it is the batch
    that makes an engine fast.
    """
    _at_least_one(requests=requests)
    draw = _Draw(seed, rate)
    return _work(
        "questions",
        f"{requests} questions of some 60 tokens, {rate:g} a second on average, with answers of 8 to 256 (seed {seed})",
        [
            draw.arrival((draw.segment(draw.length(60, 0.5, 128)),), max(8, draw.length(110, 0.8, 256)))
            for _ in range(requests)
        ],
    )


ALL: dict[str, Callable[[int], Work]] = {
    "questions": questions,
    "shared-prompt": shared_prompt,
    "chat": chat,
    "samples": samples,
    "beams": beams,
    "code": code,
    "poisson": poisson,
}


class _Draw:
    """What chance decides, and the numbers of segments."""

    def __init__(self, seed: int, rate: float) -> None:
        if seed < 0:
            raise RequestError(f"seed is {seed}; it must be 0 or more.")
        if not 0 < rate < float("inf"):
            raise RequestError(f"rate is {rate} requests a second; it must be above 0.")
        self._random = np.random.Generator(np.random.Philox(seed))
        self._numbers: Iterator[int] = itertools.count()
        self._rate, self._time = rate, 0.0

    def next_time(self) -> float:
        """Of an arrival; the first comes at 0."""
        now = self._time
        self._time += self.gap(self._rate)
        return now

    def gap(self, rate: float) -> float:
        # Rounded, because the last bits of a logarithm may differ from machine to machine, and a result must not.
        return round(float(self._random.exponential(1 / rate)), 6)

    def length(self, median: int, spread: float, most: int) -> int:
        """Log-normal, from 1 to `most`; `spread` is the standard deviation of the logarithm."""
        return max(1, min(most, round(median * float(np.exp(spread * self._random.standard_normal())))))

    def between(self, least: int, most: int) -> int:
        return int(self._random.integers(least, most + 1))

    def segment(self, tokens: int) -> Segment:
        """Tokens that nothing else has."""
        return next(self._numbers), tokens

    def arrival(
        self,
        prompt: tuple[Segment, ...],
        output: int,
        *,
        max_tokens: int | None = None,
        n: int = 1,
        beam_width: int = 0,
    ) -> Arrival:
        return Arrival(self.next_time(), prompt, output, max_tokens or assumed_max_tokens(output), n, beam_width)


def _work(name: str, source: str, arrivals: list[Arrival]) -> Work:
    return Work(name, f"made up: {source}", tuple(sorted(arrivals, key=lambda arrival: arrival.at)))


def _at_least_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1.")

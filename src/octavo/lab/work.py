"""What is done in the lab: requests with their moments of arrival. Plain data; knows no strategy and no files.

A prompt is a list of segments, each named by a number: equal numbers are equal tokens, so that prompts of a hundred
million tokens need no memory until they are asked for, and sharing between them is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Segment = tuple[int, int]  # (number, tokens)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, what it asks, how long its answers will be (which no strategy may look at)."""

    at: float  # seconds after the beginning
    prompt: tuple[Segment, ...]
    output_tokens: int  # of each answer
    max_tokens: int  # what the request says its answer may have at most: reservations go by this
    n: int = 1  # answers sampled in parallel
    beam_width: int = 0  # over 0: beam search of so many beams instead

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.prompt)

    @property
    def sequences(self) -> int:
        """Lines of tokens that run at once."""
        return self.beam_width or self.n


@dataclass(frozen=True, slots=True)
class Work:
    """Requests in the order of their arrival."""

    name: str
    source: str  # where it comes from, for the report: a trace's citation, or how it was made
    arrivals: tuple[Arrival, ...]

    def at_rate(self, factor: float) -> Work:
        """The same requests, coming `factor` times as fast."""
        quicker = tuple(
            Arrival(a.at / factor, a.prompt, a.output_tokens, a.max_tokens, a.n, a.beam_width) for a in self.arrivals
        )
        return Work(self.name, self.source, quicker)


def token_ids(prompt: Iterable[Segment], vocabulary: int, seed: int = 0) -> NDArray[np.int32]:
    """The tokens of a prompt: a function of its segments' numbers and the seed; ids from 0 to `vocabulary` - 1."""
    pieces = [
        np.random.Generator(np.random.Philox(key=[seed, number])).integers(0, vocabulary, tokens, dtype=np.int32)
        for number, tokens in prompt
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

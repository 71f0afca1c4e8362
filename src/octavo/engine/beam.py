"""Beam search: which beams go on with which token, and which answers are finished. Knows log-probabilities only.

The rules are those of Transformers (5.24, `_beam_search`), in the same float32 arithmetic, so that the same
log-probabilities give the same beams: of the likeliest continuations, W times 1 + the number of end tokens (at least
2W), those among the first W that end an answer are kept as finished, and the first W that do not are the next beams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.ops.reference_sampling import largest
from octavo.outputs import FinishReason
from octavo.params import BeamParams

_Path = tuple["_Path", int] | None  # the answer's tokens, last first; beams share their beginnings


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer: its tokens (with the one that ended it) and what it scored."""

    token_ids: list[int]
    score: float  # cumulative_logprob / len(token_ids) ** length_penalty
    cumulative_logprob: float
    finish_reason: FinishReason
    stop_reason: int | None = None  # the stop token that ended it; None at end-of-sequence


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The beams to go on with, likeliest first: beam i continues the old beam `parents[i]` with `tokens[i]`."""

    parents: list[int]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Finished:
    path: _Path
    length: int
    total: np.float32
    score: np.float32
    reason: FinishReason


class BeamSearch:
    """The beams of one request; the caller computes their log-probabilities and keeps their memory.

    eos_ids: tokens that end an answer, beside the request's stop tokens (not with ignore_eos).
    max_new_tokens: the most tokens of an answer, by the request or the context's end.
    """

    def __init__(self, params: BeamParams, eos_ids: frozenset[int], max_new_tokens: int) -> None:
        self.params = params
        self.max_new_tokens = max_new_tokens
        self.done = False
        self._stop_ids = frozenset(params.stop_token_ids)
        self._end_ids = self._stop_ids if params.ignore_eos else self._stop_ids | eos_ids
        self._num_candidates = max(2, 1 + len(self._end_ids)) * params.width
        self._length = 0  # tokens of each live beam
        self._paths: list[_Path] = [None]  # the live beams, likeliest first
        self._totals: NDArray[np.float32] = np.zeros(1, np.float32)  # their log-probabilities
        self._finished: list[_Finished] = []  # best first, at most `width`

    def step(self, logprobs: NDArray[np.float32]) -> BeamStep:
        """Choose the next beams by the log-probabilities [W, V] of the live beams' next token, in the beams' order.

        The first step has one beam, the prompt. Once `done`, no beam goes on. Between equals the lower beam, then the
        lower token comes first. Raises RequestError for log-probabilities that are not numbers.
        """
        totals = logprobs + self._totals[:, None]
        if self._length < self.params.min_tokens:
            totals[:, [token for token in self._end_ids if token < logprobs.shape[1]]] = -np.inf
        if np.isnan(totals.max()):
            raise RequestError("The model gave log-probabilities that are not numbers; no beam can go on.")
        self._length += 1
        parents, tokens, scores = self._sort_out(totals)
        self._paths = [(self._paths[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        self._totals = np.array(scores, np.float32)
        self.done = self._is_done()
        return BeamStep([], []) if self.done else BeamStep(parents, tokens)

    def cut(self) -> None:
        """End the search here: the live beams become answers as they are, of finish reason "length"."""
        if not self.done:
            self.done = True
            self._keep(
                [self._finish(path, total, "length") for path, total in zip(self._paths, self._totals, strict=True)]
            )

    def best(self, n: int | None = None) -> list[Hypothesis]:
        """The n best finished answers (None: as many as the request asked for), best first."""
        count = n or self.params.n or self.params.width
        return [self._hypothesis(finished) for finished in self._finished[:count]]

    def _sort_out(self, totals: NDArray[np.float32]) -> tuple[list[int], list[int], list[np.float32]]:
        """Keep the continuations that end an answer; returns parents, tokens and totals of those that go on."""
        ended: list[_Finished] = []
        parents: list[int] = []
        tokens: list[int] = []
        scores: list[np.float32] = []
        for rank, (parent, token, total) in enumerate(self._candidates(totals)):
            ends = token in self._end_ids
            if ends or self._length >= self.max_new_tokens:
                if rank < self.params.width:
                    ended.append(self._finish((self._paths[parent], token), total, "stop" if ends else "length"))
            elif len(parents) < self.params.width:
                parents.append(parent)
                tokens.append(token)
                scores.append(total)
        self._keep(ended)
        return parents, tokens, scores

    def _candidates(self, totals: NDArray[np.float32]) -> Iterator[tuple[int, int, np.float32]]:
        """The likeliest continuations as (beam, token, total), likeliest first; impossible ones left out."""
        flat = totals.reshape(-1)
        for place in largest(flat, self._num_candidates).tolist():
            if flat[place] > -np.inf:
                yield *divmod(place, totals.shape[1]), flat[place]

    def _finish(self, path: _Path, total: np.float32, reason: FinishReason) -> _Finished:
        return _Finished(path, self._length, total, self._score(total, self._length), reason)

    def _keep(self, ended: list[_Finished]) -> None:
        """Keep the best of what is finished; an earlier answer goes before a later one of the same score."""
        self._finished = sorted(self._finished + ended, key=lambda finished: -finished.score)[: self.params.width]

    def _is_done(self) -> bool:
        """Whether nothing can go on, or nothing that goes on is thought able to beat the worst finished answer."""
        if not self._paths:
            return True
        if len(self._finished) < self.params.width:
            return False
        early, penalty = self.params.early_stopping, self.params.length_penalty
        if early is True:
            return True
        length = self.max_new_tokens if early == "never" and penalty > 0 else self._length
        return not self._score(self._totals[0], length) > self._finished[-1].score

    def _score(self, total: np.float32, length: int) -> np.float32:
        with np.errstate(all="ignore"):  # an extreme length penalty may leave the range of float32
            length_factor = np.float32(np.float64(max(1, length)) ** self.params.length_penalty)
            score: np.float32 = total / length_factor
        return score

    def _hypothesis(self, finished: _Finished) -> Hypothesis:
        token_ids: list[int] = []
        path = finished.path
        while path is not None:
            path, token = path
            token_ids.append(token)
        token_ids.reverse()
        stopped = finished.reason == "stop" and token_ids[-1] in self._stop_ids
        return Hypothesis(
            token_ids=token_ids,
            score=float(finished.score),
            cumulative_logprob=float(finished.total),
            finish_reason=finished.reason,
            stop_reason=token_ids[-1] if stopped else None,
        )

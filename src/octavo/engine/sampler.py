"""Whose tokens are drawn by what law: parameters, bias, penalties, seeds. Knows rows of a batch, not requests or text.

A draw's place in the cumulated probability is hashed from (seed, answer, position). It reads nothing of the other rows:
same seed, same tokens, whatever else is in the batch and whatever was preempted. `Ops.draw` says how a token follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.ops.interface import Laws, Ops
from octavo.outputs import TokenLogprobs
from octavo.params import SamplingParams

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Bool = NDArray[np.bool_]
Ids = Sequence[int]

_TILE = 1 << 20  # logits adjusted together: bounds the copies
_COLDEST, _HOTTEST = 1e-6, 1e6  # beyond these a temperature changes nothing more in float32


class Drawn(NamedTuple):
    """What `sample` gives for its R draws."""

    token_ids: Int64  # [R]; -1 where not ok
    ok: Bool  # [R]; False: the logits had a NaN or +inf, or no token was possible


class SamplingTable:
    """The sampling parameters of every batch row, [max_rows] each, set when a sequence joins and kept between steps."""

    def __init__(self, max_rows: int) -> None:
        self.temperature: Float64 = np.zeros(max_rows, np.float64)
        self.top_k: Int64 = np.zeros(max_rows, np.int64)
        self.top_p: Float64 = np.ones(max_rows, np.float64)
        self.min_p: Float64 = np.zeros(max_rows, np.float64)
        self.stream: UInt64 = np.zeros(max_rows, np.uint64)
        self.special: Bool = np.zeros(max_rows, np.bool_)  # rows whose logits are adjusted before anything else
        self.reports: Bool = np.zeros(max_rows, np.bool_)  # rows whose log-probabilities somebody asks for
        self.constrained: Bool = np.zeros(max_rows, np.bool_)  # rows with a grammar; they are special too
        self._adjustments: dict[int, _Adjustment] = {}

    def set(self, row: int, params: SamplingParams, seed: int, index: int, eos_ids: Collection[int] = ()) -> None:
        """Put a sequence into a row, whatever was there: answer `index` of a request with this seed (taken mod 2**64).

        `eos_ids` and the request's stop_token_ids cannot be drawn before its min_tokens.
        """
        hot = min(max(params.temperature, _COLDEST), _HOTTEST)
        self.temperature[row] = hot if params.temperature > 0 else 0.0
        self.top_k[row] = min(params.top_k, np.iinfo(np.int32).max)
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.stream[row : row + 1] = streams(np.array([seed % 2**64], np.uint64), np.array([index], np.uint64))
        self.reports[row] = params.logprobs is not None or params.best_of is not None
        self.constrained[row] = params.grammar is not None
        adjustment = _Adjustment.of(params, eos_ids)
        self.special[row] = adjustment is not None
        if adjustment is not None:
            self._adjustments[row] = adjustment
        else:
            self._adjustments.pop(row, None)

    def laws(self, rows: Int64, positions: Int64) -> Laws:
        """The laws of draws for the sequences in these rows, each for a place in its sequence."""
        temperature = self.temperature[rows]
        random = temperature.any()  # else no draw looks at its number
        return Laws(
            temperature=temperature,
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniform=uniforms(self.stream[rows], positions) if random else np.zeros(len(rows)),
        )

    def adjust(self, row: int, logits: Float32, tokens: Ids, num_prompt_tokens: int) -> None:
        """Apply a special row's bias, min_tokens and penalties to logits [V], in place."""
        adjustment = self._adjustments[row]
        adjustment.apply(logits, tokens, num_prompt_tokens)
        self.special[row] = adjustment.goes_on(len(tokens) - num_prompt_tokens + 1)


@dataclass(slots=True)
class _Adjustment:
    """What is done to the logits of one sequence before anything is drawn."""

    bias_ids: Int64
    bias: Float32
    end_ids: Int64
    min_tokens: int
    repetition: float
    presence: float
    frequency: float
    constrained: bool
    tally: _Tally | None = None

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: Collection[int]) -> _Adjustment | None:
        """None if the parameters leave the logits as they are."""
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        adjustment = cls(
            bias_ids=np.array(list(params.logit_bias), np.int64),
            bias=np.array(list(params.logit_bias.values()), np.float32),
            end_ids=np.array(sorted(ends), np.int64),
            min_tokens=params.min_tokens,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            constrained=params.grammar is not None,
        )
        return adjustment if adjustment.goes_on(0) else None

    @property
    def penalises(self) -> bool:
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    def goes_on(self, num_outputs: int) -> bool:
        """Whether there is anything to do once the answer has so many tokens."""
        too_short = num_outputs < self.min_tokens and len(self.end_ids) > 0
        return self.constrained or self.penalises or len(self.bias_ids) > 0 or too_short

    def apply(self, logits: Float32, tokens: Ids, num_prompt_tokens: int) -> None:
        logits[self.bias_ids] += self.bias
        if len(tokens) - num_prompt_tokens < self.min_tokens:
            self._bar_ends(logits)
        if self.penalises:
            self._penalise(logits, tokens, num_prompt_tokens)

    def _bar_ends(self, logits: Float32) -> None:
        ends = self.end_ids[self.end_ids < len(logits)]
        before = logits[ends]
        logits[ends] = -np.inf
        if self.constrained and logits.max() == -np.inf:
            logits[ends] = before  # the grammar allows nothing else

    def _penalise(self, logits: Float32, tokens: Ids, num_prompt_tokens: int) -> None:
        if self.tally is None:
            self.tally = _Tally(tokens[:num_prompt_tokens] if self.repetition != 1 else (), num_prompt_tokens)
        self.tally.update(tokens)
        ids, counts = self.tally.ids, self.tally.counts
        x = logits[ids]
        # Keskar et al. 2019 (CTRL), section 4.1; negative logits are multiplied, as Transformers does.
        x = np.where(x > 0, x / np.float32(self.repetition), x * np.float32(self.repetition))
        logits[ids] = x - np.float32(self.presence) * (counts > 0) - np.float32(self.frequency) * counts


class _Tally:
    """The tokens of a prompt and its answer, and how often the answer has each; a step counts only what is new."""

    def __init__(self, seen: Ids, num_prompt_tokens: int) -> None:
        self._ids: Int64 = np.unique(np.array(seen, np.int64))
        self._counts: Float32 = np.zeros(len(self._ids), np.float32)
        self._place = {token: place for place, token in enumerate(self._ids.tolist())}
        self._num_counted = num_prompt_tokens

    @property
    def ids(self) -> Int64:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Float32:
        """Times the answer has each of `ids`: 0 for those only the prompt has."""
        return self._counts[: len(self._place)]

    def update(self, tokens: Ids) -> None:
        """Count the answer's tokens that were not there the last time."""
        for token in tokens[self._num_counted :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token
            self._counts[place] += 1
        self._num_counted = len(tokens)

    def _grow(self) -> None:
        room = len(self._ids) + 16
        self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])


# --- drawing ----------------------------------------------------------------------------------------------------------


def sample(
    ops: Ops,
    logits: Float32,
    sources: Int64,
    table: SamplingTable,
    rows: Int64,
    positions: Int64,
    history: Callable[[int], tuple[Ids, int]],
    forbid: Callable[[Int64, Float32], None] | None = None,
) -> Drawn:
    """Draw R tokens.

    logits [L, V] are read only. Draw i reads row `sources[i]` of them (several draws may read one: the samples of a
    prompt), has the parameters of row `rows[i]` of the table, and is for place `positions[i]` of its sequence.
    `history(i)` gives its tokens so far and how many of them are the prompt; it is asked for special rows only.
    `forbid(draws, logits)` makes impossible, in the logits [D, V] of these draws, what their grammars do not allow; it
    is asked where there are rows with grammars.
    """
    laws = table.laws(rows, positions)
    special = table.special[rows]
    if not special.any():
        token_ids = ops.draw(logits, sources, laws)
        return Drawn(token_ids, token_ids >= 0)
    token_ids = np.empty(len(rows), np.int64)
    plain = np.flatnonzero(~special)
    token_ids[plain] = ops.draw(logits, sources[plain], laws.of(plain))
    step = max(1, _TILE // logits.shape[1])
    for begin in range(0, int(special.sum()), step):
        draws = np.flatnonzero(special)[begin : begin + step]
        adjusted = logits[sources[draws]]  # a copy: what is done to one row is nobody else's
        if forbid is not None and table.constrained[rows[draws]].any():
            forbid(draws, adjusted)
        for i, row, x in zip(draws.tolist(), rows[draws].tolist(), adjusted, strict=True):
            table.adjust(row, x, *history(i))
        token_ids[draws] = ops.draw(adjusted, np.arange(len(draws)), laws.of(draws))
    return Drawn(token_ids, token_ids >= 0)


def streams(seed: UInt64, index: UInt64) -> UInt64:
    """What answer `index` of a request with this seed takes its numbers from (SplitMix64, Steele et al. 2014): [R]."""
    return _mix(_mix(seed) ^ index)


def uniforms(stream: UInt64, position: Int64) -> Float64:
    """Numbers in [0, 1), [R], each a function of its stream and its place in the sequence only."""
    h = _mix(stream ^ position.astype(np.uint64))
    return np.asarray(h >> np.uint64(11), np.float64) * 2.0**-53


def _mix(z: UInt64) -> UInt64:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


# --- log-probabilities ------------------------------------------------------------------------------------------------


def log_softmax(ops: Ops, logits: Float32) -> Float32:
    """Log-probabilities [R, V] of logits [R, V]."""
    rows = np.arange(len(logits))
    log_sums = ops.logprobs(logits, rows, np.zeros_like(rows), 0).log_sums[:, None]
    coarse = log_sums.astype(np.float32)  # the difference to it is exact where it matters: near the likeliest
    shifted: Float32 = logits - coarse
    shifted -= (log_sums - coarse).astype(np.float32)
    return shifted


def logprobs(ops: Ops, logits: Float32, sources: Int64, token_ids: Int64, top: int) -> list[TokenLogprobs]:
    """What to report of token_ids[i] by row sources[i] of the model's own logits, and of the `top` likeliest tokens.

    A token's rank is 1 plus the number of tokens of strictly higher logit; among equals the lower id is likelier.
    """
    found = ops.logprobs(logits, sources, token_ids, top)
    chosen = logits[sources, token_ids] - found.log_sums
    likeliest = logits[sources[:, None], found.top_ids] - found.log_sums[:, None]
    return [
        TokenLogprobs(
            token_id=token,
            logprob=logprob,
            rank=rank,
            top={i: x for i, x in zip(ids, of_ids, strict=True) if i >= 0},
        )
        for token, logprob, rank, ids, of_ids in zip(
            token_ids.tolist(),
            chosen.tolist(),
            found.ranks.tolist(),
            found.top_ids.tolist(),
            likeliest.tolist(),
            strict=True,
        )
    ]

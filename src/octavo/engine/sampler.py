"""Logits in, tokens out: bias, penalties, filters and the draw, many rows at a time. Knows rows, not requests or text.

Temperature leaves the order of tokens as it is, so each filter (min_p, top_k, top_p) is a lower bound on the logit, and
a row's survivors are the tokens at or over the highest of its bounds. Tokens of equal logit therefore live or die
together: at the k-th place top_k keeps all of them, and so does top_p at its edge. No result depends on a sort's whim.

A draw inverts the cumulated probability in the order of token ids at a number hashed from (seed, answer, position). It
reads nothing of the other rows: same seed, same tokens, whatever else is in the batch and whatever was preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.outputs import TokenLogprobs
from octavo.params import SamplingParams

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Bool = NDArray[np.bool_]
Ids = Sequence[int]

_TILE = 1 << 20  # logits looked at together: bounds the temporaries, and stays near the caches
_CHUNK = 256  # tokens whose probability is summed first when a whole vocabulary is drawn from
_STRIDE = 32  # every so manieth token is looked at to guess how far a nucleus reaches
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
        self.seed: UInt64 = np.zeros(max_rows, np.uint64)
        self.index: UInt64 = np.zeros(max_rows, np.uint64)
        self.special: Bool = np.zeros(max_rows, np.bool_)  # rows whose logits are adjusted before anything else
        self._adjustments: dict[int, _Adjustment] = {}

    def set(self, row: int, params: SamplingParams, seed: int, index: int, eos_ids: Collection[int] = ()) -> None:
        """Put a sequence into a row, whatever was there: answer `index` of a request with this seed (taken mod 2**64).

        `eos_ids` and the request's stop_token_ids cannot be drawn before its min_tokens.
        """
        hot = min(max(params.temperature, _COLDEST), _HOTTEST)
        self.temperature[row] = hot if params.temperature > 0 else 0.0
        self.top_k[row] = min(params.top_k, np.iinfo(np.int32).max)
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.seed[row], self.index[row] = seed % 2**64, index
        adjustment = _Adjustment.of(params, eos_ids)
        self.special[row] = adjustment is not None
        if adjustment is not None:
            self._adjustments[row] = adjustment
        else:
            self._adjustments.pop(row, None)

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
        )
        return adjustment if adjustment.goes_on(0) else None

    @property
    def penalises(self) -> bool:
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    def goes_on(self, num_outputs: int) -> bool:
        """Whether there is anything to do once the answer has so many tokens."""
        return self.penalises or len(self.bias_ids) > 0 or (num_outputs < self.min_tokens and len(self.end_ids) > 0)

    def apply(self, logits: Float32, tokens: Ids, num_prompt_tokens: int) -> None:
        logits[self.bias_ids] += self.bias
        if len(tokens) - num_prompt_tokens < self.min_tokens:
            logits[self.end_ids[self.end_ids < len(logits)]] = -np.inf
        if self.penalises:
            self._penalise(logits, tokens, num_prompt_tokens)

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
    logits: Float32,
    sources: Int64,
    table: SamplingTable,
    rows: Int64,
    positions: Int64,
    history: Callable[[int], tuple[Ids, int]],
) -> Drawn:
    """Draw R tokens.

    logits [L, V] are read only. Draw i reads row `sources[i]` of them (several draws may read one: the samples of a
    prompt), has the parameters of row `rows[i]` of the table, and is for place `positions[i]` of its sequence.
    `history(row)` gives the tokens so far and how many of them are the prompt; it is asked for special rows only.
    """
    uniform = uniforms(table.seed[rows], table.index[rows], positions)
    drawn = Drawn(np.empty(len(rows), np.int64), np.empty(len(rows), np.bool_))
    special = table.special[rows]
    with np.errstate(over="ignore", divide="ignore"):
        for draws in _tiles(np.flatnonzero(~special), logits.shape[1]):
            _draw(_rows_of(logits, sources[draws]), table, rows, uniform, draws, drawn)
        for draws in _tiles(np.flatnonzero(special), logits.shape[1]):
            adjusted = logits[sources[draws]]  # a copy: what is done to one row is nobody else's
            for row, x in zip(rows[draws].tolist(), adjusted, strict=True):
                table.adjust(row, x, *history(row))
            _draw(adjusted, table, rows, uniform, draws, drawn)
    return drawn


def uniforms(seed: UInt64, index: UInt64, position: Int64) -> Float64:
    """Numbers in [0, 1), [R], each a function of its three arguments only (SplitMix64, Steele et al. 2014, chained)."""
    h = _mix(seed)
    h = _mix(h ^ index)
    h = _mix(h ^ position.astype(np.uint64))
    return np.asarray(h >> np.uint64(11), np.float64) * 2.0**-53


def _mix(z: UInt64) -> UInt64:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def _tiles(draws: Int64, vocab: int) -> Iterator[Int64]:
    step = max(1, _TILE // vocab)
    for begin in range(0, len(draws), step):
        yield draws[begin : begin + step]


def _rows_of(logits: Float32, rows: Int64) -> Float32:
    """logits[rows], without a copy if they lie one after another, as they nearly always do."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all()):
        return logits[first : last + 1]
    return logits[rows]


@dataclass(slots=True)
class _Laws:
    """By what law each row of a tile [D, V] is drawn from; every field is [D]."""

    peak: Float64  # the highest logit
    temperature: Float64
    top_k: Int64
    top_p: Float64
    min_p: Float64
    uniform: Float64

    def of(self, which: Int64) -> _Laws:
        return _Laws(
            self.peak[which],
            self.temperature[which],
            self.top_k[which],
            self.top_p[which],
            self.min_p[which],
            self.uniform[which],
        )


def _draw(x: Float32, table: SamplingTable, rows: Int64, uniform: Float64, draws: Int64, drawn: Drawn) -> None:
    """Draw from each row of x [D, V] for the draws numbered `draws` [D]; writes to `drawn`."""
    token_ids = x.argmax(axis=1)  # the lowest id of the highest; a NaN counts as highest
    peak = x[np.arange(len(x)), token_ids]
    ok = np.isfinite(peak)
    rows = rows[draws]
    temperature, top_k, top_p, min_p = table.temperature[rows], table.top_k[rows], table.top_p[rows], table.min_p[rows]
    filtered = ((top_k > 0) & (top_k < x.shape[1])) | (top_p < 1) | (min_p > 0)
    random = ok & (temperature > 0)
    laws = _Laws(peak.astype(np.float64), temperature, top_k, top_p, min_p, uniform[draws])
    for which, method in ((random & filtered, _draw_filtered), (random & ~filtered, _draw_unfiltered)):
        chosen = np.flatnonzero(which)
        if len(chosen):
            token_ids[chosen] = method(_rows_of(x, chosen), laws.of(chosen))
    drawn.token_ids[draws] = np.where(ok, token_ids, -1)
    drawn.ok[draws] = ok


def _draw_unfiltered(x: Float32, laws: _Laws) -> Int64:
    """Draw from the whole vocabulary: a chunk of it first, then a token of the chunk."""
    weights = _weights(x, laws)
    sums = _cumulated_chunks(weights)
    target = laws.uniform * sums[:, -1]
    chunk = _invert(sums, target)
    before = np.where(chunk > 0, _at(sums, np.maximum(chunk - 1, 0)), 0.0)
    tokens = chunk[:, None] * _CHUNK + np.arange(_CHUNK)
    inside = np.take_along_axis(weights, np.minimum(tokens, x.shape[1] - 1), axis=1) * (tokens < x.shape[1])
    return chunk * _CHUNK + _invert(np.cumsum(inside, axis=1, dtype=np.float64), target - before)


def _draw_filtered(x: Float32, laws: _Laws) -> Int64:
    """Draw from the survivors of min_p, top_k and top_p."""
    limited = (laws.top_k > 0) & (laws.top_k < x.shape[1])
    floor = np.maximum(_min_p_floor(laws), _near_largest(x, np.where(limited, laws.top_k, 0)))
    bare = np.flatnonzero((laws.top_p < 1) & ~limited & (laws.min_p == 0))  # the nucleus of a whole vocabulary
    mass = np.zeros(len(x))
    if len(bare):
        mass[bare], floor[bare] = _nucleus_floor(_rows_of(x, bare), laws.of(bare))
    tokens, short = _draw_over(x, laws, limited, mass, floor)
    again = np.flatnonzero(short)
    if len(again):
        # Tokens each less likely than (1 - p) / 2V weigh less than 1 - p together: the nucleus needs none of them.
        some = laws.of(again)
        least = some.peak + some.temperature * np.log((1 - some.top_p) * mass[again] / (2 * x.shape[1]))
        tokens[again], _ = _draw_over(x[again], some, limited[again], mass[again], least.astype(np.float32))
    return tokens


def _draw_over(x: Float32, laws: _Laws, limited: Bool, mass: Float64, floor: Float32) -> tuple[Int64, Bool]:
    """Draw from the survivors, all of which are known to have logits of at least `floor` [D].

    `mass` is the weight of the whole vocabulary where its nucleus is wanted, else 0. The second answer is True where
    the nucleus reaches below the floor, so that the token is not to be used.
    """
    found = np.flatnonzero(x >= floor[:, None])
    starts = np.searchsorted(found, np.arange(len(x) + 1) * x.shape[1])
    counts = np.diff(starts)
    values = np.full((len(x), counts.max()), -np.inf, np.float32)  # by rising token id
    values[np.arange(values.shape[1]) < counts[:, None]] = x.reshape(-1)[found]
    ranked = np.sort(values, axis=1)[:, ::-1]
    kth = _at(ranked, np.clip(laws.top_k - 1, 0, ranked.shape[1] - 1))
    floor = np.where(limited, np.maximum(floor, kth), floor)
    sums = np.cumsum(_weights(ranked, laws) * (ranked >= floor[:, None]), axis=1, dtype=np.float64)
    wanted = laws.top_p * np.where(mass > 0, mass, sums[:, -1])
    short = (mass > 0) & (sums[:, -1] < wanted)
    edge = np.minimum((sums < wanted[:, None]).sum(axis=1), ranked.shape[1] - 1)
    floor = np.where(laws.top_p < 1, np.maximum(floor, _at(ranked, edge)), floor)
    sums = np.cumsum(_weights(values, laws) * (values >= floor[:, None]), axis=1, dtype=np.float64)
    place = _invert(sums, laws.uniform * sums[:, -1])
    return found[starts[:-1] + place] - np.arange(len(x)) * x.shape[1], short


def _min_p_floor(laws: _Laws) -> Float32:
    """The logit whose probability is min_p times the likeliest's; -inf where min_p is 0."""
    return (laws.peak + laws.temperature * np.log(laws.min_p)).astype(np.float32)


def _near_largest(x: Float32, rank: Int64) -> Float32:
    """A value not over the rank-th largest of each row of x [D, V] but mostly near it; -inf where rank is 0.

    The rank-th largest of the maxima of disjoint sets of tokens: so many tokens at least are as large.
    """
    columns = max(512, 4 * int(rank.max()))
    depth = x.shape[1] // columns
    if depth < 4 or not rank.any():
        return np.full(len(x), -np.inf, np.float32)
    maxima = np.sort(x[:, : depth * columns].reshape(len(x), depth, columns).max(axis=1), axis=1)
    return np.where(rank > 0, _at(maxima, columns - np.maximum(rank, 1)), np.float32(-np.inf))


def _nucleus_floor(x: Float32, laws: _Laws) -> tuple[Float64, Float32]:
    """The weight of each row of x [D, V], and a logit the nucleus hardly reaches below, by a sample of tokens.

    The tail of small weights that a nucleus leaves out is long, so that a sample of it tells its weight well.
    """
    mass = _cumulated_chunks(_weights(x, laws))[:, -1]
    ranked = np.sort(x[:, ::_STRIDE], axis=1)
    tail = np.cumsum(_weights(ranked, laws), axis=1, dtype=np.float64) * _STRIDE
    beyond = (tail < 0.7 * (1 - laws.top_p[:, None]) * mass[:, None]).sum(axis=1)
    return mass, _at(ranked, np.minimum(beyond, ranked.shape[1] - 1))


def _weights(x: Float32, laws: _Laws) -> Float32:
    """Probabilities [D, V] but for a factor a row."""
    weights: Float32 = x - laws.peak.astype(np.float32)[:, None]
    weights *= (1 / laws.temperature).astype(np.float32)[:, None]
    np.exp(weights, out=weights)
    return weights


def _cumulated_chunks(weights: Float32) -> Float64:
    sums = np.add.reduceat(weights, np.arange(0, weights.shape[1], _CHUNK), axis=1)
    return np.cumsum(sums, axis=1, dtype=np.float64)


def _invert(sums: Float64, target: Float64) -> Int64:
    """The first place of each row of cumulated weights [D, n] that exceeds the target [D]; never one of weight 0."""
    last = (sums < sums[:, -1:]).sum(axis=1)  # rounding may put the target at the total: then the last of any weight
    places: Int64 = np.minimum((sums <= target[:, None]).sum(axis=1), last)
    return places


def _at(values: NDArray[Any], places: Int64) -> NDArray[Any]:
    """values[d, places[d]] for each row d."""
    return values[np.arange(len(values)), places]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def log_softmax(logits: Float32) -> Float32:
    """Log-probabilities [R, V] of logits [R, V]."""
    shifted: Float32 = logits - logits.max(axis=1, keepdims=True)
    shifted -= _log_of_sum(shifted).astype(np.float32)[:, None]
    return shifted


def chosen_logprobs(logits: Float32, token_ids: Int64) -> Float64:
    """The log-probability of token_ids[i] by row i of logits [R, V]: [R]."""
    chosen = np.empty(len(logits))
    for tile in _tiles(np.arange(len(logits)), logits.shape[1]):
        x = _rows_of(logits, tile)
        peak = x.max(axis=1)
        log_of_sum = _log_of_sum(x - peak[:, None])
        chosen[tile] = (_at(x, token_ids[tile]).astype(np.float64) - peak) - log_of_sum
    return chosen


def logprobs(logits: Float32, token_ids: Int64, top: int) -> list[TokenLogprobs]:
    """What to report of token_ids[i] by row i of the model's own logits [R, V], and of the `top` likeliest tokens.

    A token's rank is 1 plus the number of tokens of strictly higher logit; among equals the lower id is likelier.
    """
    entries: list[TokenLogprobs] = []
    for x, token, logprob in zip(logits, token_ids.tolist(), chosen_logprobs(logits, token_ids).tolist(), strict=True):
        shift = float(x[token]) - logprob
        best = largest(x, top)
        entries.append(
            TokenLogprobs(
                token_id=token,
                logprob=logprob,
                rank=1 + int(np.count_nonzero(x > x[token])),
                top=dict(zip(best.tolist(), (x[best].astype(np.float64) - shift).tolist(), strict=True)),
            )
        )
    return entries


def largest(x: Float32, count: int) -> Int64:
    """The places of the `count` largest of x [n], largest first, the lower place first among equals."""
    if count >= len(x):
        return np.argsort(-x, kind="stable")
    if count == 0:
        return np.zeros(0, np.int64)
    places = np.flatnonzero(x >= np.partition(x, -count)[-count])
    return places[np.argsort(-x[places], kind="stable")[:count]]


def _log_of_sum(shifted: Float32) -> Float64:
    """log(sum(exp(row))) of rows whose maximum is 0."""
    total: Float64 = np.exp(shifted).sum(axis=1, dtype=np.float64)
    return np.log(total)

"""Drawing and log-probabilities in NumPy, many rows at a time: the oracle of faster ones. Knows rows of logits only.

Temperature leaves the order of tokens as it is, so each filter (min_p, top_k, top_p) is a lower bound on the logit, and
a row's survivors are the tokens at or over the highest of its bounds. No result depends on a sort's whim, and none on
the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops.interface import Laws, Logprobs

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

_TILE = 1 << 20  # logits looked at together: bounds the temporaries, and stays near the caches
_CHUNK = 256  # tokens whose probability is summed first when a whole vocabulary is drawn from
_STRIDE = 32  # every so manieth token is looked at to guess how far a nucleus reaches


def draw(logits: Float32, sources: Int64, laws: Laws, /) -> Int64:
    """A token for each of R draws: [R]; -1 where the row has a NaN or its maximum is infinite."""
    token_ids = np.empty(len(sources), np.int64)
    with np.errstate(over="ignore", divide="ignore"):
        for draws in _tiles(np.arange(len(sources)), logits.shape[1]):
            token_ids[draws] = _draw(_rows_of(logits, sources[draws]), laws.of(draws))
    return token_ids


def logprobs(logits: Float32, sources: Int64, token_ids: Int64, top: int, /) -> Logprobs:
    """What log-probabilities are made of, for R rows and a token of each."""
    log_sums, ranks = np.empty(len(sources)), np.empty(len(sources), np.int64)
    top_ids = np.full((len(sources), top), -1, np.int64)
    with np.errstate(invalid="ignore"):
        for which in _tiles(np.arange(len(sources)), logits.shape[1]):
            x = _rows_of(logits, sources[which])
            peak = x.max(axis=1)  # a NaN is its row's maximum
            sums: Float64 = np.exp(x - peak[:, None]).sum(axis=1, dtype=np.float64)
            log_sums[which] = np.where(np.isfinite(peak), peak.astype(np.float64) + np.log(sums), np.nan)
            ranks[which] = 1 + np.count_nonzero(x > _at(x, token_ids[which])[:, None], axis=1)
            for row in np.flatnonzero(np.isfinite(peak)) if top else ():
                best = largest(x[row], top)
                top_ids[which[row], : len(best)] = best
    return Logprobs(log_sums, ranks, top_ids)


def largest(x: Float32, count: int) -> Int64:
    """The places of the `count` largest of x [n], largest first, the lower place first among equals."""
    if count >= len(x):
        return np.argsort(-x, kind="stable")
    if count == 0:
        return np.zeros(0, np.int64)
    places = np.flatnonzero(x >= np.partition(x, -count)[-count])
    return places[np.argsort(-x[places], kind="stable")[:count]]


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


# --- drawing ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Peaked(Laws):
    """The laws of a tile [D, V], and the highest logit of each of its rows."""

    peak: Float64

    def of(self, which: Int64) -> _Peaked:
        return _Peaked(*(getattr(self, field)[which] for field in self.__dataclass_fields__))


def _draw(x: Float32, laws: Laws) -> Int64:
    """A token from each row of x [D, V], or -1."""
    token_ids = x.argmax(axis=1)  # the lowest id of the highest; a NaN counts as highest
    peak = _at(x, token_ids)
    ok = np.isfinite(peak)
    filtered = ((laws.top_k > 0) & (laws.top_k < x.shape[1])) | (laws.top_p < 1) | (laws.min_p > 0)
    random = ok & (laws.temperature > 0)
    peaked = _Peaked(laws.temperature, laws.top_k, laws.top_p, laws.min_p, laws.uniform, peak.astype(np.float64))
    for which, method in ((random & filtered, _draw_filtered), (random & ~filtered, _draw_unfiltered)):
        chosen = np.flatnonzero(which)
        if len(chosen):
            token_ids[chosen] = method(_rows_of(x, chosen), peaked.of(chosen))
    return np.where(ok, token_ids, -1)


def _draw_unfiltered(x: Float32, laws: _Peaked) -> Int64:
    """Draw from the whole vocabulary: a chunk of it first, then a token of the chunk."""
    weights = _weights(x, laws)
    sums = _cumulated_chunks(weights)
    target = laws.uniform * sums[:, -1]
    chunk = _invert(sums, target)
    before = np.where(chunk > 0, _at(sums, np.maximum(chunk - 1, 0)), 0.0)
    tokens = chunk[:, None] * _CHUNK + np.arange(_CHUNK)
    inside = np.take_along_axis(weights, np.minimum(tokens, x.shape[1] - 1), axis=1) * (tokens < x.shape[1])
    return chunk * _CHUNK + _invert(np.cumsum(inside, axis=1, dtype=np.float64), target - before)


def _draw_filtered(x: Float32, laws: _Peaked) -> Int64:
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


def _draw_over(x: Float32, laws: _Peaked, limited: Bool, mass: Float64, floor: Float32) -> tuple[Int64, Bool]:
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


def _min_p_floor(laws: _Peaked) -> Float32:
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


def _nucleus_floor(x: Float32, laws: _Peaked) -> tuple[Float64, Float32]:
    """The weight of each row of x [D, V], and a logit the nucleus hardly reaches below, by a sample of tokens.

    The tail of small weights that a nucleus leaves out is long, so that a sample of it tells its weight well.
    """
    mass = _cumulated_chunks(_weights(x, laws))[:, -1]
    ranked = np.sort(x[:, ::_STRIDE], axis=1)
    tail = np.cumsum(_weights(ranked, laws), axis=1, dtype=np.float64) * _STRIDE
    beyond = (tail < 0.7 * (1 - laws.top_p[:, None]) * mass[:, None]).sum(axis=1)
    return mass, _at(ranked, np.minimum(beyond, ranked.shape[1] - 1))


def _weights(x: Float32, laws: _Peaked) -> Float32:
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

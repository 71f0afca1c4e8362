"""What a caller may ask of one request: sampling or beam search. Plain data, checked when made; knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from octavo.errors import RequestError
from octavo.grammar import Grammar

FLOAT32_MAX = 3.4e38


def _check(ok: bool, name: str, value: object, must: str) -> None:
    if not ok:
        raise RequestError(f"{name} is {value!r}; it must be {must}.", param=name)


def _listed(name: str, value: Any, fits: Callable[[Any], bool], must: str) -> tuple[Any, ...]:
    """The value as a tuple of its own, each element of which fits."""
    _check(isinstance(value, Iterable) and not isinstance(value, (str, Mapping)), name, value, must)
    items = tuple(value)
    _check(all(fits(item) for item in items), name, value, must)
    return items


def _finite(value: Any) -> bool:
    """Whether it is a number that float32 can hold."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and bool(-FLOAT32_MAX <= value <= FLOAT32_MAX)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _check_ends(params: SamplingParams | BeamParams) -> None:
    """What says when an answer is over; the stop token ids become a tuple of the params' own."""
    least, most = params.min_tokens, params.max_tokens
    ids = _listed("stop_token_ids", params.stop_token_ids, lambda t: _whole(t, 0), "a list of token ids (0 or more)")
    object.__setattr__(params, "stop_token_ids", ids)
    _check(most is None or _whole(most, 1), "max_tokens", most, "a whole number of at least 1, or None")
    for name in ("ignore_eos", "skip_special_tokens"):
        _check(isinstance(getattr(params, name), bool), name, getattr(params, name), "True or False")
    fits = _whole(least, 0) and (most is None or least <= most)
    _check(fits, "min_tokens", least, f"a whole number from 0 to max_tokens ({most})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw the answer's tokens. Raises RequestError, naming the parameter, for a value that cannot be.

    The order of work on a row of logits: grammar, logit_bias and min_tokens, penalties, temperature, min_p, top_k,
    top_p, then one draw. min_tokens yields where the grammar allows nothing but an end. Reported logprobs are those of
    the model's own logits, before any of it.
    """

    n: int = 1  # answers to give
    best_of: int | None = None  # answers to draw; the n of the highest mean log-probability are given
    max_tokens: int | None = 256  # most tokens of an answer; None: up to the context's end
    min_tokens: int = 0  # no end-of-sequence or stop before so many tokens
    temperature: float = 1.0  # 0: always the likeliest token (greedy)
    top_k: int = 0  # draw among the k likeliest; 0: all
    top_p: float = 1.0  # draw among the likeliest whose probabilities first reach p
    min_p: float = 0.0  # leave out tokens less likely than min_p times the likeliest
    repetition_penalty: float = 1.0  # over 1: tokens of prompt and answer are made less likely (CTRL, Keskar 2019)
    presence_penalty: float = 0.0  # taken once from the logit of each token the answer already has
    frequency_penalty: float = 0.0  # taken as often as the answer has it
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to these tokens' logits
    seed: int | None = None  # same seed, same tokens, whatever else is in the batch
    logprobs: int | None = None  # report the log-probabilities of each drawn token and of so many likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    stop: str | Sequence[str] = ()  # end the answer before any of these texts
    stop_token_ids: Sequence[int] = ()  # end the answer at any of these tokens
    include_stop: bool = False  # leave the stop string in the text
    ignore_eos: bool = False  # go on past the end-of-sequence token
    skip_special_tokens: bool = True  # leave special tokens out of the text
    grammar: Grammar | None = None  # what the answer must look like; it ends where the grammar does

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        stop = _listed("stop", stop, lambda s: isinstance(s, str) and s != "", "a text or a list of them, none empty")
        object.__setattr__(self, "stop", stop)
        _check_ends(self)
        _check(isinstance(self.include_stop, bool), "include_stop", self.include_stop, "True or False")
        _check(_whole(self.n, 1), "n", self.n, "a whole number of at least 1")
        best_of_fits = self.best_of is None or _whole(self.best_of, self.n)
        _check(best_of_fits, "best_of", self.best_of, f"a whole number of at least n ({self.n})")
        _check(_finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _check(_whole(self.top_k, 0), "top_k", self.top_k, "a whole number of at least 1, or 0 for all")
        _check(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "over 0 and at most 1")
        _check(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        repetition = self.repetition_penalty
        _check(_finite(repetition) and 0.01 <= repetition <= 100, "repetition_penalty", repetition, "from 0.01 to 100")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_finite(value) and -2 <= value <= 2, name, value, "from -2 to 2")
        bias = self.logit_bias
        bias_fits = isinstance(bias, Mapping) and all(
            _whole(t, 0) and _finite(b) and abs(b) <= 1e9 for t, b in bias.items()
        )
        _check(bias_fits, "logit_bias", bias, "a mapping of token ids to numbers from -1e9 to 1e9")
        object.__setattr__(self, "logit_bias", dict(bias))  # the caller may change theirs
        _check(self.seed is None or isinstance(self.seed, Integral), "seed", self.seed, "a whole number")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or _whole(value, 0), name, value, "a whole number of at least 0, or None")
        _check(self.grammar is None or isinstance(self.grammar, Grammar), "grammar", self.grammar, "a Grammar or None")
        followed = self.grammar is None or not self.ignore_eos  # nothing can follow the end of a grammar
        _check(followed, "ignore_eos", self.ignore_eos, "False where there is a grammar, whose end is the answer's")

    @property
    def num_samples(self) -> int:
        """Answers that are drawn: best_of, or n."""
        return self.best_of or self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Beam search: keep the `width` likeliest beginnings at every step (Transformers' rules for score and ending).

    A finished answer scores sum(logprobs) / (its tokens ** length_penalty). Raises RequestError as SamplingParams does.
    """

    width: int = 4  # beams
    n: int | None = None  # answers to give, best first; None: width
    max_tokens: int | None = 256
    min_tokens: int = 0
    length_penalty: float = 1.0  # over 0 favours long answers, under 0 short ones
    early_stopping: bool | Literal["never"] = False  # True: end as soon as `width` answers are finished
    stop_token_ids: Sequence[int] = ()  # ends of an answer beside end-of-sequence
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_ends(self)
        _check(_whole(self.width, 1), "width", self.width, "a whole number of at least 1")
        n_fits = self.n is None or (_whole(self.n, 1) and self.n <= self.width)
        _check(n_fits, "n", self.n, f"a whole number from 1 to width ({self.width})")
        _check(_finite(self.length_penalty), "length_penalty", self.length_penalty, "a finite number")
        _check(
            self.early_stopping in (True, False, "never"),
            "early_stopping",
            self.early_stopping,
            "True, False or 'never'",
        )

    @property
    def num_samples(self) -> int:
        """Sequences that run: the width."""
        return self.width

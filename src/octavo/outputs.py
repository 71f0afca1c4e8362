"""What comes back for a request: answers, log-probabilities, token counts and timings. Plain data; knows no engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one place: of the token that stands there, its rank (1: likeliest), and of the likeliest."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]  # token id -> log-probability, likeliest first


@dataclass(slots=True)
class Completion:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None while it runs
    stop_reason: str | int | None = None  # the stop string or token that ended it, "kv_memory" if it outgrew the pool
    cumulative_logprob: float | None = None  # sum over the answer's tokens; None unless the request needed it
    logprobs: list[TokenLogprobs] | None = None  # one a token, if asked for
    score: float | None = None  # beam search: what the answers are ordered by

    def extend(self, later: Completion) -> None:
        """Append what another says that goes on where this one stops."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class Timings:
    """Moments of a request, in seconds of time.perf_counter(); None: not reached."""

    arrived: float
    scheduled: float | None = None  # its first chunk began to be computed
    first_token: float | None = None
    finished: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived


@dataclass(slots=True)
class RequestOutput:
    """A request's state after a step, or its end. `completions` are ordered by index (beams: best first)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    finished: bool
    timings: Timings
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    computed_tokens: int = 0  # prompt tokens computed
    output_tokens: int = 0  # answer tokens so far, those of answers that are not given back included
    preemptions: int = 0  # times its memory was taken for others
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first is None: nothing stands before it
    error: str | None = None  # why it failed, when finish_reason is "error"

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.completions[0].text

    def extend(self, later: RequestOutput) -> None:
        """Take in a later state of the same request, both of which tell only what is new."""
        known = {completion.index: completion for completion in self.completions}
        for completion in later.completions:
            if completion.index in known:
                known[completion.index].extend(completion)
            else:
                self.completions.append(completion)
        self.finished, self.error = later.finished, later.error
        self.cached_tokens, self.computed_tokens = later.cached_tokens, later.computed_tokens
        self.output_tokens, self.preemptions = later.output_tokens, later.preemptions

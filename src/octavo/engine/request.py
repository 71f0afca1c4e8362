"""A request and the sequences it runs: what was asked, the tokens so far, the end. Knows no memory and no model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from octavo.engine.beam import BeamSearch
from octavo.engine.constraint import Matcher
from octavo.engine.detokenizer import Detokenizer
from octavo.outputs import Completion, FinishReason, RequestOutput, Timings, TokenLogprobs
from octavo.params import BeamParams, SamplingParams


class State(Enum):
    """Where a request stands."""

    WAITING = auto()  # holds no memory: new, or preempted and to be recomputed
    SWAPPED = auto()  # preempted, its blocks in host memory
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens: the prompt and the answer so far.

    Its first `computed` tokens have their keys and values in memory. Up to `prefill_end` they are computed in chunks
    (a prompt, or what a preemption lost); from there on it decodes, and exactly the last token is not computed yet.
    """

    id: int  # its name in the KV manager
    request: Request
    index: int  # which of the request's answers it is
    tokens: list[int]
    computed: int = 0
    prefill_end: int = 0
    row: int = -1  # its row in the batch arrays; -1: none
    matcher: Matcher | None = None  # where the answer stands in its grammar
    detokenizer: Detokenizer | None = None
    num_detokenized: int = 0  # answer tokens the detokenizer has seen
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float | None = None
    told: int = 0  # answer tokens handed out by `news`
    told_text: int = 0  # characters of it
    told_end: bool = False

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_end

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[len(self.request.prompt_token_ids) :]

    def fork(self, seq_id: int, index: int) -> Sequence:
        """A new sequence that continues this one; whoever calls forks the memory too."""
        return Sequence(
            id=seq_id,
            request=self.request,
            index=index,
            tokens=self.tokens.copy(),
            computed=self.computed,
            prefill_end=self.prefill_end,
            matcher=self.matcher.copy() if self.matcher else None,
            detokenizer=self.detokenizer.copy() if self.detokenizer else None,
            num_detokenized=self.num_detokenized,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs.copy(),
        )

    def catch_up_text(self) -> None:
        """Detokenise what was drawn since the last call; text is only made when somebody looks."""
        detokenizer = self.detokenizer
        if detokenizer is None:
            return
        new = self.tokens[len(self.request.prompt_token_ids) + self.num_detokenized :]
        for token in new:
            detokenizer.push(token)
        self.num_detokenized += len(new)
        if self.finish_reason is not None:
            detokenizer.flush()

    def completion(self) -> Completion:
        """The answer as it stands."""
        self.catch_up_text()
        params = self.request.params
        scored = isinstance(params, BeamParams) or params.logprobs is not None or params.best_of is not None
        with_logprobs = isinstance(params, SamplingParams) and params.logprobs is not None
        return Completion(
            index=self.index,
            text=self.detokenizer.text if self.detokenizer else "",
            token_ids=self.output_token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=self.cumulative_logprob if scored else None,
            logprobs=self.logprobs.copy() if with_logprobs else None,
            score=self.score,
        )

    @property
    def has_news(self) -> bool:
        return self.num_output_tokens > self.told or (self.finish_reason is not None and not self.told_end)

    def news(self) -> Completion:
        """The answer as it stands, with only the text, tokens and log-probabilities that no `news` has told before."""
        self.catch_up_text()
        params, told = self.request.params, self.told
        text = self.detokenizer.text if self.detokenizer else ""
        new = self.tokens[len(self.request.prompt_token_ids) + told :]
        completion = Completion(
            self.index,
            text[self.told_text :],
            new,
            self.finish_reason,
            self.stop_reason,
            logprobs=self.logprobs[told:]
            if isinstance(params, SamplingParams) and params.logprobs is not None
            else None,
            score=self.score,
        )
        self.told, self.told_text, self.told_end = told + len(new), len(text), self.finish_reason is not None
        return completion


@dataclass(slots=True, eq=False)
class Fork:
    """After a preemption: `child` will share the first `shared` tokens of `parent` once those are computed again."""

    child: Sequence
    parent: Sequence
    shared: int


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way through the engine. Requests are ordered by (priority, arrival): lower comes first."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams | BeamParams
    arrival: int  # running number, which makes the order total
    seed: int
    priority: int = 0
    salt: bytes = b""
    state: State = State.WAITING
    live: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # prefix-cache keys of its first sequence's tokens, once hashed
    awaited: bytes | None = None  # the key of a block that it waits for another request to compute
    forks: list[Fork] = field(default_factory=list)  # sequences still to be forked again after a preemption
    beam: BeamSearch | None = None
    timings: Timings = field(default_factory=lambda: Timings(arrived=time.perf_counter()))
    cached_tokens: int = 0
    preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None

    @property
    def order(self) -> tuple[int, int]:
        return (self.priority, self.arrival)

    @property
    def started(self) -> bool:
        """Whether its prompt has been computed and answers drawn (it may have been preempted since)."""
        return self.timings.first_token is not None

    @property
    def num_sequences(self) -> int:
        """Sequences it runs, or will once its prompt is computed."""
        return len(self.live) if self.started else self.params.num_samples

    @property
    def num_answers(self) -> int:
        """Answers to give back."""
        params = self.params
        return (params.n or params.width) if isinstance(params, BeamParams) else params.n

    @property
    def wants_prompt_logprobs(self) -> bool:
        return isinstance(self.params, SamplingParams) and self.params.prompt_logprobs is not None

    def end(self, reason: FinishReason) -> None:
        """It is over; whatever still ran of it ends so. Whoever calls has seen to its memory."""
        for seq in self.live:
            seq.finish_reason = reason
        self.ended += self.live
        self.live.clear()
        self.forks.clear()
        self.state = State.FINISHED
        self.timings.finished = time.perf_counter()

    def output(self) -> RequestOutput:
        """What the caller sees now."""
        return self._output([seq.completion() for seq in self._answers()])

    def news(self) -> RequestOutput:
        """The same, its completions holding only what is new since the last `news`: those without any are left out."""
        return self._output([seq.news() for seq in self._answers() if seq.has_news])

    def _answers(self) -> list[Sequence]:
        sequences = [*self.live, *self.ended]
        if len(sequences) > 1:
            sequences.sort(key=lambda s: s.index)
        if self.beam is not None or self.params.num_samples > self.num_answers:
            return self._best(sequences, self.state is State.FINISHED)
        return sequences

    def _output(self, completions: list[Completion]) -> RequestOutput:
        prompt = len(self.prompt_token_ids)
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            completions=completions,
            finished=self.state is State.FINISHED,
            timings=self.timings,
            cached_tokens=self.cached_tokens,
            computed_tokens=prompt - self.cached_tokens if self.started else 0,
            output_tokens=sum([len(seq.tokens) - prompt for seq in (*self.live, *self.ended)]),
            preemptions=self.preemptions,
            prompt_logprobs=self.prompt_logprobs,
            error=self.error,
        )

    def _best(self, sequences: list[Sequence], finished: bool) -> list[Sequence]:
        """Beams are shown once they are chosen; of best_of samples the n with the highest mean log-probability."""
        if not finished:
            return []
        if self.beam is None and len(sequences) > self.num_answers:
            sequences = sorted(sequences, key=_mean_logprob, reverse=True)[: self.num_answers]
        for index, seq in enumerate(sequences):
            seq.index = index
        return sequences


def _mean_logprob(seq: Sequence) -> float:
    return seq.cumulative_logprob / max(1, seq.num_output_tokens)

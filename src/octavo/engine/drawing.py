"""Logits in, longer sequences out: draws tokens, advances beams, ends answers. Knows no model and no block tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine import sampler
from octavo.engine.batch import Batch
from octavo.engine.constraint import Constraints
from octavo.engine.limits import Limits
from octavo.engine.report import Meter
from octavo.engine.request import Request, Sequence, State
from octavo.engine.sampler import SamplingTable
from octavo.engine.scheduler import Scheduler
from octavo.ops.interface import Ops
from octavo.outputs import FinishReason
from octavo.params import SamplingParams

Logits = NDArray[np.float32]
NOT_FINITE = (
    "No token can be drawn: the model's logits are not finite numbers, or logit_bias, min_tokens and grammar together "
    "forbid every token."
)


class _End(NamedTuple):
    """At which tokens it must be looked whether a sequence ends."""

    last_ids: frozenset[int]
    length: int  # tokens, the prompt's included, with which it ends whatever they are
    by_any: bool  # every token may complete a stop string or the grammar


class Drawer:
    """Continues the sequences whose tokens are all computed, each from its row of logits."""

    def __init__(
        self,
        scheduler: Scheduler,
        batch: Batch,
        meter: Meter,
        ops: Ops,
        *,
        limits: Limits,
        eos_ids: frozenset[int],
        constraints: Constraints,
        new_sequence: Callable[[Request, int], Sequence],
    ) -> None:
        self._scheduler, self._batch, self._meter, self._ops = scheduler, batch, meter, ops
        self._limits, self._eos_ids, self._new_sequence = limits, eos_ids, new_sequence
        self._constraints = constraints
        self._table = SamplingTable(limits.max_num_seqs)
        self._ends = [_End(frozenset(), 0, False)] * limits.max_num_seqs  # by batch row

    def join(self, sequences: list[Sequence]) -> None:
        """Give the sequences that have none a row in the batch, and note there how they are sampled."""
        for seq in self._batch.join(sequences):
            request = seq.request
            if isinstance(request.params, SamplingParams):
                self._table.set(seq.row, request.params, request.seed, seq.index, self._eos_ids)
                self._ends[seq.row] = self._end_of(seq, request.params)

    def draw(self, sequences: list[Sequence], logits: Logits) -> None:
        """Draw the next token of each sequence from its row of logits [R, V]; a prompt's end forks its samples."""
        beams: dict[Request, list[int]] = {}
        sources: list[int] = []  # rows of logits, one a draw
        drawing: list[Sequence] = []
        for row, seq in enumerate(sequences):
            request = seq.request
            if request.beam is not None:
                beams.setdefault(request, []).append(row)
            elif request.started:
                sources.append(row)
                drawing.append(seq)
            else:
                samples = [seq, *(self._scheduler.fork(seq, i) for i in range(1, request.params.num_samples))]
                sources += [row] * len(samples)
                drawing += samples
        if drawing:
            self._sample(drawing, logits, np.array(sources, np.int64))
        for request, rows in beams.items():
            self._step_beams(request, [sequences[row] for row in rows], logits[rows])

    def end_beams(self, request: Request) -> None:
        """Give the best hypotheses so far as the answers of a beam search, which is over."""
        assert request.beam is not None
        self._scheduler.finish(request, "length")
        request.ended.clear()
        for index, hypothesis in enumerate(request.beam.best(request.num_answers)):
            seq = self._new_sequence(request, index)
            seq.tokens += hypothesis.token_ids
            seq.finish_reason, seq.stop_reason = hypothesis.finish_reason, hypothesis.stop_reason
            seq.score, seq.cumulative_logprob = hypothesis.score, hypothesis.cumulative_logprob
            request.ended.append(seq)

    # --- samples ----------------------------------------------------------------------------------------------------

    def _sample(self, drawing: list[Sequence], logits: Logits, sources: NDArray[np.int64]) -> None:
        self.join(drawing)
        rows = np.array([seq.row for seq in drawing], np.int64)
        positions = self._batch.computed(rows)  # all tokens are
        drawn = sampler.sample(
            self._ops,
            logits,
            sources,
            self._table,
            rows,
            positions,
            history=lambda i: _history(drawing[i]),
            forbid=lambda draws, adjusted: self._forbid([drawing[i] for i in draws], adjusted),
        )
        reports = np.flatnonzero(self._table.reports[rows] & drawn.ok)
        if len(reports):
            self._note_logprobs([drawing[i] for i in reports], logits, sources[reports], drawn.token_ids[reports])
        constrained = np.flatnonzero(self._table.constrained[rows] & drawn.ok)
        if len(constrained):
            self._follow([drawing[i] for i in constrained], drawn.token_ids[constrained].tolist())
        self._accept(drawing, drawn.token_ids.tolist())
        self._batch.append(rows, drawn.token_ids)

    def _forbid(self, drawing: list[Sequence], logits: Logits) -> None:
        """Make impossible, in the row of logits [D, V] of each sequence, what its grammar does not allow."""
        constrained = [(place, seq.matcher) for place, seq in enumerate(drawing) if seq.matcher is not None]
        self._constraints.forbid(logits, constrained)

    def _follow(self, drawing: list[Sequence], token_ids: list[int]) -> None:
        """Take the drawn tokens to the grammars; a request whose grammar fails ends."""
        for seq, token in zip(drawing, token_ids, strict=True):
            assert seq.matcher is not None
            if seq.request.state is not State.FINISHED and not seq.matcher.take(token):
                self._scheduler.fail(seq.request, seq.matcher.fault)

    def _note_logprobs(
        self, drawing: list[Sequence], logits: Logits, sources: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> None:
        """Log-probabilities of what was drawn, for sequences that report or rank by them."""
        by_top: dict[int, list[int]] = {}  # so many likeliest tokens are asked for -> places in `drawing`
        for i, seq in enumerate(drawing):
            params = seq.request.params
            assert isinstance(params, SamplingParams)
            by_top.setdefault(params.logprobs or 0, []).append(i)
        for top, places in by_top.items():
            entries = sampler.logprobs(self._ops, logits, sources[places], token_ids[places], top)
            for i, entry in zip(places, entries, strict=True):
                drawing[i].cumulative_logprob += entry.logprob
                drawing[i].logprobs.append(entry)

    def _accept(self, drawing: list[Sequence], token_ids: list[int]) -> None:
        """Append the drawn tokens, and end the sequences whose last they are. Short: it goes 256 times round a step."""
        finished, ends, accepted = State.FINISHED, self._ends, 0
        for seq, token in zip(drawing, token_ids, strict=True):
            request, tokens = seq.request, seq.tokens
            if request.state is finished:
                continue  # a sibling has failed, or its grammar
            if token < 0:
                self._scheduler.fail(request, NOT_FINITE)
                continue
            tokens.append(token)
            accepted += 1
            if request.timings.first_token is None:
                self._start(request)
            last_ids, length, by_any = ends[seq.row]
            if token in last_ids or len(tokens) >= length or by_any:
                ending = self._ending(seq, token)
                if ending is not None:
                    seq.finish_reason, seq.stop_reason = ending
                    self._scheduler.end(seq)
        self._meter.output_tokens += accepted

    def _end_of(self, seq: Sequence, params: SamplingParams) -> _End:
        room = self._limits.most_tokens(len(seq.request.prompt_token_ids), params.max_tokens)
        return _End(
            last_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            length=len(seq.request.prompt_token_ids) + room,
            by_any=(bool(params.stop) and seq.detokenizer is not None) or seq.matcher is not None,
        )

    def _ending(self, seq: Sequence, token: int) -> tuple[FinishReason, str | int | None] | None:
        """(finish reason, stop reason) if the token just appended was the last."""
        params, count = seq.request.params, seq.num_output_tokens
        assert isinstance(params, SamplingParams)
        if count >= params.min_tokens:
            if token in params.stop_token_ids:
                return "stop", token
            if token in self._eos_ids and not params.ignore_eos:
                return "stop", None
            if params.stop and seq.detokenizer is not None:
                seq.catch_up_text()
                if seq.detokenizer.stop_hit is not None:
                    return "stop", seq.detokenizer.stop_hit
        if seq.matcher is not None and seq.matcher.ended:
            return "stop", None
        if len(seq.tokens) >= self._ends[seq.row].length:
            return "length", None
        return None

    def _start(self, request: Request) -> None:
        """Its prompt is computed and answered with a token."""
        request.timings.first_token = time.perf_counter()
        self._meter.prompt_tokens += len(request.prompt_token_ids) - request.cached_tokens

    # --- beams ------------------------------------------------------------------------------------------------------

    def _step_beams(self, request: Request, beams: list[Sequence], logits: Logits) -> None:
        """Choose the next beams of a request from logits [W, V]; drop, keep and fork sequences accordingly."""
        search = request.beam
        assert search is not None
        if not np.isfinite(logits.max(axis=1)).all():  # a NaN is its row's maximum
            self._scheduler.fail(request, NOT_FINITE)
            return
        step = search.step(sampler.log_softmax(self._ops, logits))
        self._meter.output_tokens += len(step.tokens)
        if not request.started:
            self._start(request)
        if search.done:
            self.end_beams(request)
            return
        for i, beam in enumerate(beams):
            if i not in step.parents:
                self._scheduler.drop(beam)
        taken: set[int] = set()
        following: list[Sequence] = []
        for parent in step.parents:
            following.append(self._scheduler.fork(beams[parent], 0) if parent in taken else beams[parent])
            taken.add(parent)
        for index, (seq, token) in enumerate(zip(following, step.tokens, strict=True)):
            seq.index = index
            seq.tokens.append(token)
        request.live[:] = following
        joined = [seq for seq in following if seq.row >= 0]
        self._batch.append(np.array([seq.row for seq in joined], np.int64), [seq.tokens[-1] for seq in joined])


def _history(seq: Sequence) -> tuple[list[int], int]:
    """The tokens so far and how many are the prompt, for penalties."""
    return seq.tokens, len(seq.request.prompt_token_ids)

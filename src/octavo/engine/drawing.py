"""Logits in, longer sequences out: draws tokens, advances beams, ends answers. Knows no model and no block tables."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.engine import sampler
from octavo.engine.batch import Batch
from octavo.engine.limits import Limits
from octavo.engine.report import Meter
from octavo.engine.request import Request, Sequence, State
from octavo.engine.sampler import SamplingTable
from octavo.engine.scheduler import Scheduler
from octavo.outputs import FinishReason
from octavo.params import SamplingParams

Logits = NDArray[np.float32]
NOT_FINITE = (
    "No token can be drawn: the model's logits are not finite numbers, or logit_bias and min_tokens forbid every token."
)


class Drawer:
    """Continues the sequences whose tokens are all computed, each from its row of logits."""

    def __init__(
        self,
        scheduler: Scheduler,
        batch: Batch,
        meter: Meter,
        *,
        limits: Limits,
        eos_ids: frozenset[int],
        new_sequence: Callable[[Request, int], Sequence],
    ) -> None:
        self._scheduler, self._batch, self._meter = scheduler, batch, meter
        self._limits, self._eos_ids, self._new_sequence = limits, eos_ids, new_sequence
        self._table = SamplingTable(limits.max_num_seqs)

    def join(self, sequences: list[Sequence]) -> None:
        """Give the sequences that have none a row in the batch, and note there how they are sampled."""
        for seq in self._batch.join(sequences):
            request = seq.request
            if isinstance(request.params, SamplingParams):
                self._table.set(seq.row, request.params, request.seed, seq.index, self._eos_ids)

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
        rows = np.fromiter((seq.row for seq in drawing), np.int64, len(drawing))
        positions = np.fromiter((len(seq.tokens) for seq in drawing), np.int64, len(drawing))
        by_row = {seq.row: seq for seq in drawing}
        drawn = sampler.sample(logits, sources, self._table, rows, positions, lambda row: _history(by_row[row]))
        _note_logprobs(drawing, logits, sources, drawn)
        for seq, token, ok in zip(drawing, drawn.token_ids.tolist(), drawn.ok.tolist(), strict=True):
            if seq.request.state is State.FINISHED:
                continue  # a sibling has failed
            if not ok:
                self._scheduler.fail(seq.request, NOT_FINITE)
                continue
            self._accept(seq, token)
        self._batch.append(drawing)

    def _accept(self, seq: Sequence, token: int) -> None:
        """Append a drawn token, and end the sequence if it is the last."""
        seq.tokens.append(token)
        self._count(seq.request, 1)
        ending = self._ending(seq, token)
        if ending is not None:
            seq.finish_reason, seq.stop_reason = ending
            self._scheduler.end(seq)

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
        if count == params.max_tokens or len(seq.tokens) >= self._limits.max_model_len:
            return "length", None
        return None

    def _count(self, request: Request, tokens: int) -> None:
        self._meter.output_tokens += tokens
        if request.timings.first_token is None:
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
        step = search.step(sampler.log_softmax(logits))
        self._count(request, len(step.tokens))
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
        self._batch.append([seq for seq in following if seq.row >= 0])


def _history(seq: Sequence) -> tuple[list[int], int]:
    """The tokens so far and how many are the prompt, for penalties."""
    return seq.tokens, len(seq.request.prompt_token_ids)


def _note_logprobs(drawing: list[Sequence], logits: Logits, sources: NDArray[np.int64], drawn: sampler.Drawn) -> None:
    """Log-probabilities of what was drawn, for the requests that report or rank by them."""
    by_top: dict[int, list[int]] = {}  # so many likeliest tokens are asked for -> places in `drawing`
    for i, seq in enumerate(drawing):
        params = seq.request.params
        assert isinstance(params, SamplingParams)
        if drawn.ok[i] and (params.logprobs is not None or params.best_of is not None):
            by_top.setdefault(params.logprobs or 0, []).append(i)
    for top, places in by_top.items():
        entries = sampler.logprobs(logits[sources[places]], drawn.token_ids[places], top)
        for i, entry in zip(places, entries, strict=True):
            drawing[i].cumulative_logprob += entry.logprob
            drawing[i].logprobs.append(entry)

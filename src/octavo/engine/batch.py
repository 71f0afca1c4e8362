"""Plan in, arrays out: what a forward pass reads, kept from step to step in one row per sequence. Knows no scheduling.

A row is filled when a sequence first runs and afterwards only touched where something changed: the token drawn last,
the tokens computed, a block table that got a page. A step then gathers rows; it does not rebuild them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from octavo.engine.request import Sequence
from octavo.engine.scheduler import StepPlan
from octavo.kv.interface import Memory
from octavo.ops.interface import StepInput

Int32 = NDArray[np.int32]


class Batch:
    """The rows of all running sequences: [max_rows] counts and [max_rows, longest table] blocks."""

    def __init__(self, kv: Memory, *, max_rows: int, max_model_len: int) -> None:
        longest = min(-(-max_model_len // kv.block_size), kv.pool.num_blocks)
        self._kv = kv
        self._tables: Int32 = np.zeros((max_rows, longest), np.int32)
        self._last_token: Int32 = np.zeros(max_rows, np.int32)
        self._computed: Int32 = np.zeros(max_rows, np.int32)
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)  # of the step prepared last, and the tokens of each
        self._counts: Int32 = np.zeros(0, np.int32)
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._members: dict[int, tuple[Sequence, object]] = {}  # by the KV manager's id

    def leave(self) -> None:
        """Free the rows of sequences that lost the memory they joined with: ended, preempted or swapped out."""
        memory = self._kv.sequences
        for seq_id in [i for i, (_, state) in self._members.items() if memory.get(i) is not state]:
            seq, _ = self._members.pop(seq_id)
            self._free_rows.append(seq.row)
            seq.row = -1

    def join(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Give a row to each sequence that has none; returns those that joined."""
        joined = [seq for seq in sequences if seq.row < 0]
        for seq in joined:
            seq.row = self._free_rows.pop()
            self._members[seq.id] = seq, self._kv.sequences[seq.id]
            self._last_token[seq.row] = seq.tokens[-1]
            self._computed[seq.row] = seq.computed
            self._copy_table(seq)
        return joined

    def prepare(self, plan: StepPlan) -> StepInput:
        """The arrays of a step whose sequences have all joined; logits are wanted where a sequence draws a token."""
        for seq_id in self._kv.take_changed():
            if seq_id in self._members:
                self._copy_table(self._members[seq_id][0])
        sequences, num_decodes = plan.sequences, plan.num_decodes
        self._rows = rows = np.array([seq.row for seq in sequences], np.int64)
        self._counts = counts = np.array(plan.counts, np.int32)
        starts = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        computed = self._computed[rows]
        token_ids = np.empty(starts[-1], np.int32)
        token_ids[:num_decodes] = self._last_token[rows[:num_decodes]]
        for i in range(num_decodes, len(sequences)):
            seq = sequences[i]
            token_ids[starts[i] : starts[i + 1]] = seq.tokens[seq.computed : seq.computed + plan.counts[i]]
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(computed - starts[:-1], counts)
        context_lens = computed + counts
        block_size = self._kv.block_size
        tables = self._tables[rows, : -(-int(context_lens.max()) // block_size)]
        owners = np.repeat(np.arange(len(sequences), dtype=np.int32), counts)
        slots = tables[owners, positions // block_size] * np.int32(block_size) + positions % block_size
        return StepInput(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=starts,
            context_lens=context_lens,
            block_tables=tables,
            logit_rows=self._logit_rows(plan, starts),
        )

    def advance(self) -> None:
        """The tokens of the step prepared last are computed."""
        self._computed[self._rows] += self._counts

    def computed(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens of the sequences in these rows are computed: [R]."""
        return self._computed[rows].astype(np.int64)

    def append(self, rows: NDArray[np.int64], token_ids: ArrayLike) -> None:
        """The sequences in these rows got a token each."""
        self._last_token[rows] = token_ids

    def _copy_table(self, seq: Sequence) -> None:
        array = self._kv.table(seq.id).array
        self._tables[seq.row, : len(array)] = array

    @staticmethod
    def _logit_rows(plan: StepPlan, starts: Int32) -> Int32:
        """The last token of each sequence that draws; every token of a prompt whose log-probabilities are asked for."""
        if plan.num_decodes == len(plan.sequences):
            last: Int32 = starts[1:] - np.int32(1)
            return last
        rows: list[int] = []
        for i, (seq, count) in enumerate(zip(plan.sequences, plan.counts, strict=True)):
            if seq.request.wants_prompt_logprobs and not seq.request.started:
                rows.extend(range(starts[i], starts[i + 1]))
            elif seq.computed + count == len(seq.tokens):
                rows.append(int(starts[i + 1]) - 1)
        return np.array(rows, np.int32)

"""A forward pass written down instead of computed: values that stand for arrays, and the instructions that make them.

A model's Python code calls the same operations whatever the batch; only the numbers of tokens, sequences and logits
differ. So it runs once with the symbols of this file, and what it called is replayed for every step. Knows neither
kernels nor numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Rows = Literal["tokens", "logits"]  # a value has a row for each token of the step, or for each row wanted as logits
IdSource = Literal["token_ids", "positions", "logit_rows"]


@dataclass(eq=False, slots=True, repr=False)
class Value:
    """Stands for a float32 array [rows, columns]; or for the columns of another from `first` on."""

    trace: Trace
    rows: Rows
    columns: int
    parent: Value | None = None
    first: int = 0

    @property
    def whole(self) -> Value:
        """The value whose memory this is a part of; itself, unless it was split off."""
        return self if self.parent is None else self.parent


@dataclass(frozen=True, slots=True)
class Ids:
    """Stands for one of the step's arrays of numbers, by which rows are looked up."""

    trace: Trace
    source: IdSource


@dataclass(eq=False, slots=True)
class Instruction:
    """One call of a kernel: `op` names the method of `_native.Program` that adds it, `settings` its other arguments."""

    op: str
    reads: dict[str, Value]
    out: Value
    settings: dict[str, Any]


@dataclass(eq=False, slots=True)
class Trace:
    """What was called so far, in order. Each instruction's `out` is its own, and is never written again."""

    instructions: list[Instruction] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)

    def input(self, columns: int) -> Value:
        """A value handed in with each run; its rows are the run's tokens."""
        value = Value(self, "tokens", columns)
        self.inputs.append(value)
        return value

    def append(
        self, op: str, columns: int, reads: dict[str, Value], rows: Rows = "tokens", /, **settings: Any
    ) -> Value:
        """Note a call; returns the value it makes."""
        out = Value(self, rows, columns)
        self.instructions.append(Instruction(op, reads, out, settings))
        return out

    def readers(self, output: Value) -> dict[Value, list[Instruction | None]]:
        """Who reads each value, or a part of it; None stands for the caller, who gets `output`."""
        readers: dict[Value, list[Instruction | None]] = {output.whole: [None]}
        for instruction in self.instructions:
            for value in instruction.reads.values():
                readers.setdefault(value.whole, []).append(instruction)
        return readers

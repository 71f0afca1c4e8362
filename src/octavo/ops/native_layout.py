"""From instructions to memory: which forms each value is wanted in, when all threads must wait, and who lies where.

Knows which instructions share out work by rows, and how wide a row of each form is; no kernels and no numbers of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo.ops.native_trace import Instruction, Rows, Trace, Value

Form = Literal["f32", "q8", "bf16"]
Stored = tuple[Value, Form]

_ANY_FORM = ("norm", "take_rows", "add", "scale", "softcap", "activate", "gated")  # write all forms that are wanted
_BY_ROWS = (*_ANY_FORM, "embed", "convert")  # each thread works on a run of rows


@dataclass(eq=False, slots=True)
class Region:
    """Memory that several values use one after another, as wide as the widest of them; the caller's hold one value."""

    row_bytes: dict[Rows, int] = field(default_factory=lambda: {"tokens": 0, "logits": 0})
    holder: Literal["arena", "input", "output"] = "arena"
    value: Value | None = None  # an input or output

    def hold(self, rows: Rows, row_bytes: int) -> None:
        self.row_bytes[rows] = max(self.row_bytes[rows], row_bytes)


@dataclass(eq=False, slots=True)
class Layout:
    """A trace made ready to be run: phases of instructions, with a barrier between any two, and each value's place."""

    phases: list[list[Instruction]]
    regions: list[Region]
    places: dict[Stored, Region]


def lay_out(trace: Trace, output: Value) -> Layout:
    """Lay out a trace that ends in `output`, a whole value."""
    wanted = _wanted_forms(trace, output)
    phases = _phases(_with_conversions(trace, wanted))
    return _Placement(phases, wanted).place(trace.inputs, output)


def row_bytes(columns: int, form: Form) -> int:
    """Bytes of a row: int8 come with a scale and a sum for each 32 columns, bf16 in rows of a multiple of 32."""
    if form == "f32":
        return 4 * columns
    return columns + columns // 32 * 8 if form == "q8" else 2 * (-(-columns // 32) * 32)


def _makes_any_form(instruction: Instruction) -> bool:
    """Norms of heads do not: a group of int8 would lie across two heads. Gated products do, in whole groups."""
    if instruction.op == "norm" and len(instruction.settings["weight"]) != instruction.out.columns:
        return False
    if instruction.op == "linear":
        return instruction.settings["gate"] is not None and instruction.out.columns % 32 == 0
    return instruction.op in _ANY_FORM


def _reads(instruction: Instruction) -> list[Stored]:
    """What it reads, in which forms: products their weight's, all else float32."""
    stored: list[Stored] = []
    for name, value in instruction.reads.items():
        if instruction.op == "linear" and name == "x":
            forms: list[Form] = instruction.settings["weight"].inputs
            stored += [(value if form != "f32" else value.whole, form) for form in forms]
        else:
            stored.append((value.whole, "f32"))
    return stored


def _wanted_forms(trace: Trace, output: Value) -> dict[Value, list[Form]]:
    """Of each value, the forms somebody reads. Other forms of some columns of a value are those columns' own."""
    wanted: dict[Value, list[Form]] = {output: ["f32"]}
    for value, form in (stored for instruction in trace.instructions for stored in _reads(instruction)):
        forms = wanted.setdefault(value, [])
        if form not in forms:
            forms.append(form)
    for instruction in trace.instructions:
        wanted.setdefault(instruction.out, ["f32"])  # read by nobody, but attention is for its keys and values too
    return wanted


def _with_conversions(trace: Trace, wanted: dict[Value, list[Form]]) -> list[Instruction]:
    """The instructions, each followed by the conversions of what it makes that it cannot write itself."""
    parts: dict[Value, list[Value]] = {}
    for value in wanted:
        parts.setdefault(value.whole, []).append(value)
    instructions: list[Instruction] = []

    def convert(whole: Value, able: bool) -> None:
        for value in parts.get(whole, ()):
            if wanted[value] != ["f32"] and not (able and value is whole):
                if "f32" not in wanted.setdefault(whole, []):
                    wanted[whole].append("f32")
                instructions.append(Instruction("convert", {"x": value}, value, {}))

    for value in trace.inputs:
        convert(value, able=False)
    for instruction in trace.instructions:
        instructions.append(instruction)
        convert(instruction.out, able=_makes_any_form(instruction))
    return instructions


def _phases(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Runs of instructions that share out the same rows the same way need no barrier: each thread reads its own."""
    phases: list[list[Instruction]] = []
    last: Rows | None = None
    for instruction in instructions:
        rows = instruction.out.rows if instruction.op in _BY_ROWS else None
        if rows is None or rows != last:
            phases.append([])
        phases[-1].append(instruction)
        last = rows
    return phases


class _Placement:
    """Linear scan: memory is given when a value is made, and free again in the phase after its last use."""

    def __init__(self, phases: list[list[Instruction]], wanted: dict[Value, list[Form]]) -> None:
        self._phases, self._wanted = phases, wanted
        last_use: dict[Stored, int] = {}
        for number, phase in enumerate(phases):
            for instruction in phase:
                for stored in (*_uses(instruction), *self._writes(instruction)):
                    last_use[stored] = number
        self._ending: list[list[Stored]] = [[] for _ in phases]  # values whose last use is in a phase
        for stored, number in last_use.items():
            self._ending[number].append(stored)
        self._regions: list[Region] = []
        self._free: list[Region] = []
        self._places: dict[Stored, Region] = {}

    def place(self, inputs: list[Value], output: Value) -> Layout:
        for value in inputs:
            self._fix((value, "f32"), "input")
        self._fix((output, "f32"), "output")
        for number, phase in enumerate(self._phases):
            for instruction in phase:
                self._over_residual(instruction, number)
                for stored in self._writes(instruction):
                    if stored not in self._places:
                        self._places[stored] = self._take(stored)
            for stored in self._ending[number]:
                self._release(self._places[stored])
        return Layout(self._phases, self._regions, self._places)

    def _writes(self, instruction: Instruction) -> list[Stored]:
        forms = self._wanted.get(instruction.out, [])
        if instruction.op == "convert":
            return [(instruction.out, form) for form in forms if form != "f32"]
        return [(instruction.out, form) for form in forms if form == "f32" or _makes_any_form(instruction)]

    def _fix(self, stored: Stored, holder: Literal["input", "output"]) -> None:
        self._places[stored] = region = Region(holder=holder, value=stored[0])
        self._regions.append(region)

    def _over_residual(self, instruction: Instruction, number: int) -> None:
        """A product is written over the residual it is added to, if nobody needs that for anything else."""
        residual = instruction.reads.get("residual")
        if instruction.op != "linear" or residual is None or residual.parent is not None:
            return
        stored: Stored = (residual, "f32")
        ends, region = stored in self._ending[number], self._places[stored]
        place = self._places.get((instruction.out, "f32"))
        if ends and place is None and region.holder == "arena" and _reads(instruction).count(stored) == 1:
            self._ending[number].remove(stored)  # its memory lives on in the product's
            self._places[(instruction.out, "f32")] = region

    def _take(self, stored: Stored) -> Region:
        """The smallest free region that is wide enough, or the widest, which then grows."""
        value, form = stored
        size = row_bytes(value.columns, form)
        width = {id(region): region.row_bytes[value.rows] for region in self._free}
        enough = [region for region in self._free if width[id(region)] >= size]
        if enough:
            region = min(enough, key=lambda r: width[id(r)])
        elif self._free:
            region = max(self._free, key=lambda r: width[id(r)])
        else:
            region = Region()
            self._regions.append(region)
        if region in self._free:
            self._free.remove(region)
        region.hold(value.rows, size)
        return region

    def _release(self, region: Region) -> None:
        if region.holder == "arena":
            self._free.append(region)


def _uses(instruction: Instruction) -> list[Stored]:
    if instruction.op == "convert":
        return [(instruction.reads["x"].whole, "f32")]
    return _reads(instruction)

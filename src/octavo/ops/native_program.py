"""From a trace to the `_native.Program` that replays it. Knows the native module's calls; no model and no step."""

from __future__ import annotations

from typing import Any

from octavo import _native
from octavo.ops.interface import AttentionSpec
from octavo.ops.native_fusion import fuse
from octavo.ops.native_layout import Form, Layout, Region, lay_out
from octavo.ops.native_trace import Ids, Instruction, Trace, Value


def assemble(trace: Trace, output: Value, threads: int) -> _native.Program:
    """The trace's program, shortened where it can be: its inputs are the trace's, its output is `output`.

    Raises ValueError, a sentence, for operations on shapes that do not fit together.
    """
    fuse(trace, output)
    return _Assembly(lay_out(trace, output), threads).program


class _Assembly:
    """Numbers everything in a layout as the program does."""

    def __init__(self, layout: Layout, threads: int) -> None:
        self.program = _native.Program(threads)
        self._layout = layout
        self._regions = {id(region): self._region(region) for region in layout.regions}
        self._values: dict[Value, int] = {}
        self._ropes: dict[int, int] = {}
        for phase in layout.phases:
            self.program.barrier()
            for instruction in phase:
                self._add(instruction)

    def _region(self, region: Region) -> int:
        value = region.value
        if value is None:
            return self.program.region(**region.row_bytes)
        if region.holder == "input":
            return self.program.input(value.columns)
        return self.program.output(value.rows, value.columns)

    def _add(self, instruction: Instruction) -> None:
        numbers = {name: self._value(value) for name, value in instruction.reads.items()}
        if instruction.op == "convert":
            self.program.convert(**numbers)
            return
        settings = {name: self._setting(setting) for name, setting in instruction.settings.items() if name != "spec"}
        if "spec" in instruction.settings:
            settings |= self._attention(instruction.settings["spec"])
        getattr(self.program, instruction.op)(**numbers, **settings, out=self._value(instruction.out))

    def _setting(self, setting: Any) -> Any:
        return setting.source if isinstance(setting, Ids) else setting

    def _attention(self, spec: AttentionSpec) -> dict[str, Any]:
        return {
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "scale": spec.scale,
            "window": spec.window or 0,
            "softcap": spec.softcap or 0.0,
            "rope": -1 if spec.rope is None else self._rope(spec.rope),
        }

    def _rope(self, table: Any) -> int:
        if id(table) not in self._ropes:
            self._ropes[id(table)] = self.program.rope(table.inv_freq, table.factor, table.max_positions)
        return self._ropes[id(table)]

    def _value(self, value: Value) -> int:
        if value not in self._values:
            self._values[value] = self.program.value(
                rows=value.rows,
                columns=value.columns,
                stride=value.whole.columns,
                first=value.first,
                f32=self._place(value.whole, "f32"),
                q8=self._place(value, "q8"),
                bf16=self._place(value, "bf16"),
            )
        return self._values[value]

    def _place(self, value: Value, form: Form) -> int:
        region = self._layout.places.get((value, form))
        return -1 if region is None else self._regions[id(region)]

"""Where each millisecond of a step goes, against its floor: a workload run on Octavo, its steps taken apart.

    python benchmarks/steps.py MODEL WORKLOAD.json [--setting value]...

Steps that only decode are told from those that compute prompts. A part's floor is the time that reading its weights,
and the keys and values seen, or its multiplications would take at this machine's own rates (ceilings.py), whichever is
longer; what is done in Python has none. Of a prompt's, the last layer is left out: it is needed only for the rows whose
logits are wanted. So a workload's floor is what no engine can beat here that multiplies as often in the same types.
Settings are those of run.py. Clocks are read around calls that the engine makes anyway.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ceilings import Machine, num_processors
from compiled import CannotCompileError
from octavo import LLM, OctavoError
from octavo.engine.report import MemoryReport
from octavo.loading.checkpoint import Checkpoint, load_checkpoint
from octavo.loading.resolve import resolve
from octavo.ops.interface import StepInput
from run import command_line, run
from workload import WARM_UP, BadWorkloadError

FORWARD, HEAD = "layers (forward)", "head (logits)"
INT8 = ("Q", "I")  # how the names of quantised types begin


@dataclass(slots=True)
class Kind:
    """The steps of one kind, added up."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds of each
    floors: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Floors:
    """What a model's parts would take if only the machine's own rates bounded them."""

    def __init__(self, checkpoint: Checkpoint, machine: Machine, memory: MemoryReport) -> None:
        matrices = {name: tensor for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
        layers = [tensor for name, tensor in matrices.items() if ".layers." in name or name.startswith("h.")]
        head = [max(matrices.values(), key=lambda tensor: tensor.shape[0])]  # the vocabulary's; tied or not
        self._parts = {
            part: (sum(t.raw.nbytes for t in tensors), sum(t.shape[0] * t.shape[1] for t in tensors))
            for part, tensors in ((FORWARD, layers), (HEAD, head))
        }
        dtype = layers[0].dtype
        kind = "int8" if dtype.startswith(INT8) else "bf16" if dtype == "BF16" else "f32"
        self._product = machine.product_gop_s(kind) * 1e9
        self._attention_product = (
            machine.product_gop_s(memory.kv_type if memory.kv_type in ("int8", "bf16") else "f32") * 1e9
        )
        self._read = machine.read_gb_s(sum(size for size, _ in self._parts.values())) * 1e9
        config = checkpoint.config
        self._windows = [
            config["sliding_window"] if kind == "sliding_attention" else None for kind in config["layer_types"]
        ]
        self._block_size = memory.block_size
        self._layer_bytes = memory.block_bytes / memory.block_size / len(self._windows)
        self._width = config["num_attention_heads"] * config["head_dim"]

    def head(self, rows: int) -> float:
        """Seconds of so many rows' logits."""
        return self._products(HEAD, rows)

    def forward(self, step: StepInput) -> float:
        """Seconds of the layers: products, and attention's two of each query with what it sees, each slot read once."""
        layers = len(self._windows) - (len(step.logit_rows) < len(step.token_ids))
        seconds = self._products(FORWARD, len(step.token_ids) * layers / len(self._windows))
        for window, count in Counter(self._windows[:layers]).items():
            reading = num_slots(step, window, self._block_size) * self._layer_bytes / self._read
            multiplying = 4 * num_pairs(step, window) * self._width / self._attention_product
            seconds += count * max(reading, multiplying)
        return seconds

    def _products(self, part: str, rows: float) -> float:
        size, elements = self._parts[part]
        return max(size / self._read, 2 * rows * elements / self._product)


def num_pairs(step: StepInput, window: int | None) -> int:
    """Queries and keys they see, in a layer."""
    seen = step.positions.astype(np.int64) + 1
    return int((seen if window is None else np.minimum(seen, window)).sum())


def num_slots(step: StepInput, window: int | None, block_size: int) -> int:
    """Slots whose keys and values are seen, in a layer."""
    slots = []
    for table, context, new in zip(step.block_tables, step.context_lens, np.diff(step.query_starts), strict=True):
        begin = 0 if window is None else max(0, int(context) - int(new) + 1 - window)
        block, offset = np.divmod(np.arange(begin, context), block_size)
        slots.append(table[block] * block_size + offset)
    return len(np.unique(np.concatenate(slots)))


class Watch:
    """Times an engine's parts while it runs."""

    def __init__(self, llm: LLM, floors: Floors) -> None:
        self.start()
        self._now: dict[str, float] = {}
        self._floor: dict[str, float] = {}
        self._step: Any = None
        self._floors = floors
        engine: Any = llm.engine
        engine.step = self._whole(engine.step)
        engine.scheduler.schedule = self._part("schedule", engine.scheduler.schedule)
        engine._batch.prepare = self._part("batch arrays", engine._batch.prepare)
        engine._drawer.draw = self._part("sampling, answers", engine._drawer.draw)
        engine.model = _Timed(engine.model, self._forward(engine.model), self._logits(engine.model))

    def start(self) -> None:
        """Begin to count anew."""
        self.kinds = {"decode": Kind(), "prefill": Kind()}
        self.aside = 0.0  # seconds between steps that floors took to be counted

    def _part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args)
            self._now[name] = self._now.get(name, 0) + time.perf_counter() - begin
            return result

        return timed

    def _forward(self, model: Any) -> Callable[..., Any]:
        timed = self._part(FORWARD, model.forward)

        def forward(step: Any, cache: Any) -> Any:
            self._step = step
            return timed(step, cache)

        return forward

    def _logits(self, model: Any) -> Callable[..., Any]:
        timed = self._part(HEAD, model.logits)

        def logits(hidden: Any) -> Any:
            self._floor[HEAD] = self._floors.head(len(hidden))
            return timed(hidden)

        return logits

    def _whole(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            self._now, self._floor, self._step = {}, {}, None
            begin = time.perf_counter()
            result = step()
            seconds = time.perf_counter() - begin
            if self._step is not None:
                begin = time.perf_counter()
                self._floor[FORWARD] = self._floors.forward(self._step)
                self.aside += time.perf_counter() - begin
                tokens = len(self._step.token_ids)
                kind = self.kinds["decode" if tokens == len(self._step.context_lens) else "prefill"]
                kind.steps, kind.tokens, kind.seconds = kind.steps + 1, kind.tokens + tokens, kind.seconds + seconds
                for sums, values in ((kind.parts, self._now), (kind.floors, self._floor)):
                    for name, value in values.items():
                        sums[name] += value
            return result

        return timed


class _Timed:
    """A model with two of its methods replaced; compiled ones may not let theirs be."""

    def __init__(self, model: Any, forward: Callable[..., Any], logits: Callable[..., Any]) -> None:
        self._model, self.forward, self.logits = model, forward, logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def rate(tokens: int, seconds: float) -> str:
    """So many tokens in so long, for people."""
    return f"{tokens} tokens in {seconds:.3f} s, {tokens / seconds:.0f} a second"


def table(kinds: dict[str, Kind]) -> str:
    """Milliseconds a step, as Markdown."""
    rows = ["| step | part | ms | floor, ms | share of the step |", "| --- | --- | ---: | ---: | ---: |"]
    for name, kind in kinds.items():
        if not kind.steps:
            continue
        rest = kind.seconds - sum(kind.parts.values())
        title = f"{name}: {kind.steps} steps of {kind.tokens / kind.steps:.1f} tokens"
        whole = 1e3 * sum(kind.floors.values()) / kind.steps
        rows.append(f"| {title} | whole | {1e3 * kind.seconds / kind.steps:.3f} | {whole:.3f} | |")
        for part, seconds in [*kind.parts.items(), ("the rest", rest)]:
            floor = f"{1e3 * kind.floors[part] / kind.steps:.3f}" if part in kind.floors else ""
            rows.append(f"| | {part} | {1e3 * seconds / kind.steps:.3f} | {floor} | {seconds / kind.seconds:.1%} |")
    return "\n".join(rows)


def kernel_table(before: dict[str, float], after: dict[str, float]) -> str:
    """Milliseconds of one thread in each kind of kernel, over the whole workload, as Markdown."""
    spent = {kind: seconds - before.get(kind, 0.0) for kind, seconds in after.items()}
    rows = ["| kernel | ms, whole workload | share |", "| --- | ---: | ---: |"]
    for kind, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        name = "waiting for other threads" if kind == "barrier" else kind
        rows.append(f"| {name} | {1e3 * seconds:.1f} | {seconds / sum(spent.values()):.1%} |")
    return "\n".join(rows)


def main() -> None:
    """Run the workloads, one table each."""
    try:
        model, works, settings = command_line(__doc__)
        machine = Machine(settings.get("threads", num_processors()), rounds=5)
        llm = LLM(model, **settings)
        floors = Floors(load_checkpoint(resolve(model)), machine, llm.memory_report())
        kernels: Any = llm.engine.model
        native = hasattr(kernels, "time_kernels")  # the reference has none
        if native:
            kernels.time_kernels()
        watch = Watch(llm, floors)
        run(llm, WARM_UP.requests)
        for work in works:
            watch.start()
            before = kernels.kernel_seconds() if native else {}
            tokens, seconds, _ = run(llm, work.requests)
            floor = sum(sum(kind.floors.values()) for kind in watch.kinds.values())
            seconds -= watch.aside
            print(f"\n{work.name}: {rate(tokens, seconds)}; at the floor {rate(tokens, floor)}\n\n{table(watch.kinds)}")
            if native:
                print(f"\n{kernel_table(before, kernels.kernel_seconds())}")
    except (OctavoError, BadWorkloadError, CannotCompileError) as problem:
        print(f"steps.py: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

"""Rewrites of a recorded pass that save passes over memory: neighbours become the one instruction that does both.

Each rewrite holds only where nobody else reads what lies between the two. Knows instructions; no kernels, no memory.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.ops.native_trace import Instruction, Trace, Value

Rewrite = Callable[[Instruction, Instruction], "Instruction | None"]  # (producer, its only reader) -> both in one


def fuse(trace: Trace, output: Value) -> None:
    """Apply the rewrites below to a trace, in place, as often as they fit."""
    readers = trace.readers(output)
    producers: dict[Value, Instruction] = {}
    fused: dict[int, Instruction] = {}  # place -> what stands there
    places: dict[Instruction, int] = {}
    for place, instruction in enumerate(trace.instructions):
        for value in list(instruction.reads.values()):
            producer = producers.get(value)
            if producer is None or len(readers[value]) != 1:
                continue
            both = next((new for rewrite in _REWRITES if (new := rewrite(producer, instruction)) is not None), None)
            if both is not None:
                del fused[places[producer]]
                instruction = both
                break
        fused[place] = instruction
        producers[instruction.out] = instruction
        places[instruction] = place
    trace.instructions[:] = fused.values()


def add_to_product(producer: Instruction, reader: Instruction) -> Instruction | None:
    """add(x, linear(h)): the product is added to x as it is written. Gemma's add(x, norm(h)) likewise."""
    if reader.op != "add" or producer.op not in ("linear", "norm"):
        return None
    if "residual" in producer.reads or producer.settings.get("gate") is not None:
        return None
    other = next(value for value in reader.reads.values() if value is not producer.out)
    return Instruction(producer.op, {**producer.reads, "residual": other}, reader.out, producer.settings)


def gate_in_product(producer: Instruction, reader: Instruction) -> Instruction | None:
    """gated(linear(h)): gate and up columns are multiplied before they leave the registers."""
    if reader.op != "gated" or producer.op != "linear" or "residual" in producer.reads:
        return None
    if producer.settings["gate"] is not None or not producer.settings["weight"].gateable:
        return None
    return Instruction("linear", producer.reads, reader.out, {**producer.settings, "gate": reader.settings["kind"]})


def scale_embedding(producer: Instruction, reader: Instruction) -> Instruction | None:
    """scale(embed(ids)), as in Gemma."""
    if reader.op != "scale" or producer.op != "embed":
        return None
    factor = producer.settings["factor"] * reader.settings["number"]
    return Instruction("embed", producer.reads, reader.out, {**producer.settings, "factor": factor})


def take_in_attention(producer: Instruction, reader: Instruction) -> Instruction | None:
    """take_rows(attention(q, k, v)), as in a last layer: only rows wanted attend, yet all keys and values are kept."""
    if reader.op != "take_rows" or producer.op != "attention" or producer.out.rows != "tokens":
        return None
    if reader.settings["rows"].source != "logit_rows":
        return None
    return Instruction("attention", producer.reads, reader.out, producer.settings)


_REWRITES: tuple[Rewrite, ...] = (add_to_product, gate_in_product, scale_embedding, take_in_attention)

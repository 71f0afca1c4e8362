"""Recorded passes: whole models against the reference, rewrites and memory reuse against plain evaluation, bad steps.

Whatever is random here is a program: operations on values made earlier, in any order and read any number of times. The
reference computes them one by one; the recorded program is fused, laid out over shared memory and run by a team.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import _native, models
from octavo.errors import ModelError
from octavo.loading.checkpoint import load_checkpoint
from octavo.ops import reference
from octavo.ops.interface import AttentionSpec, CacheLayout, StepInput
from octavo.ops.native import NativeOps, RopeTable, run_step
from octavo.ops.native_fusion import fuse
from octavo.ops.native_layout import lay_out
from octavo.ops.native_program import assemble
from octavo.ops.native_trace import Ids, Instruction, Trace, Value
from tests.models import small
from tests.models.paged import nan_cache, paged_logits, scattered_tables, step_of
from tests.native.test_native_ops import mixed, normal, stored

LENGTHS = (45, 1, 23, 17)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, small.VOCAB, length).tolist() for length in lengths]


# --- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", small.MODELS)
def test_a_model_answers_as_the_reference_with_the_same_bits_however_it_is_cut_up(name: str, pair: Any) -> None:
    checkpoint = pair(name)[1]
    want = paged_logits(models.build(checkpoint, reference), prompts())
    first: list[np.ndarray] | None = None
    for threads, chunk, block_size in ((1, None, 16), (2, 7, 4), (3, 1, 16), (3, 3, 1)):
        ops = NativeOps("f32", threads)
        got = paged_logits(models.build(checkpoint, ops), prompts(), chunk=chunk, block_size=block_size, ops=ops)
        for mine, their in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, their, rtol=0, atol=1e-4)
        for mine, earlier in zip(got, first or got, strict=True):
            np.testing.assert_array_equal(mine, earlier)
        first = got


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def to_bytes(weights: np.ndarray, values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Times their values' scales, they become multiples of a 255th of the largest among 64 tokens of the context."""
    scales = np.abs(values).max(-1) / 127
    scaled, stretch = weights * scales, tokens // 64
    step_sizes = np.array([scaled[stretch == n].max() / 255 for n in stretch])
    return np.asarray(np.rint(scaled / step_sizes) * step_sizes / scales)


def attention_that_rounds(
    kv_type: str, q: np.ndarray, cache: np.ndarray, layer: int, step: Any, spec: Any
) -> np.ndarray:
    """Attention of [T, H, D] one query and head at a time, with weights rounded, of contexts up to one partition."""
    out = np.empty_like(q)
    for s, (start, end) in enumerate(pairwise(step.query_starts)):
        tokens = np.arange(step.context_lens[s])
        blocks, offsets = step.block_tables[s][tokens // cache.shape[4]], tokens % cache.shape[4]
        keys, values = (cache[blocks, layer, which, :, offsets] for which in (0, 1))  # [context, G, D]
        for row, (h, group) in product(
            range(start, end), enumerate(np.arange(q.shape[1]) * keys.shape[1] // q.shape[1])
        ):
            seen = step.context_lens[s] - (end - row) + 1
            first = 0 if spec.window is None else max(0, seen - spec.window)
            scores = keys[first:seen, group] @ q[row, h] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            power = (scores - scores.max()) / np.log(2)
            part = power - np.floor(power)  # 2 ** part as the kernels have it, to 1e-4: it decides what is rounded how
            weights = np.exp2(power - part) * np.polyval([0.07826797, 0.22630768, 0.6954243, 1], part)
            value = values[first:seen, group]
            rounded = to_bf16(weights) if kv_type == "bf16" else to_bytes(weights, value, tokens[first:seen])
            out[row, h] = rounded @ value / weights.sum()
    return out


def rounding(kv_type: str) -> Any:
    """The reference with keys and values rounded as blocks of a type hold them; with int8, queries and weights too, and
    with bf16 where its products take both sides so."""

    def rounded(x: np.ndarray) -> np.ndarray:
        if kv_type == "f16":
            return x.astype(np.float16).astype(np.float32)
        if kv_type == "bf16":
            return to_bf16(x)
        largest = np.abs(x).max(-1, keepdims=True)
        return np.asarray(np.rint(x * (127 / largest)) * (largest / 127))

    def attention(
        q: np.ndarray, k: np.ndarray, v: np.ndarray, cache: np.ndarray, layer: int, plan: Any, spec: Any
    ) -> np.ndarray:
        queries, keys, values = (x.reshape(len(x), -1, spec.head_dim) for x in (q, k, v))
        if spec.rope is not None:
            queries, keys = (reference.rotate(x, *plan.rotation(spec.rope)) for x in (queries, keys))
        if kv_type == "int8":
            queries, keys = (mixed(rounded(mixed(x))) for x in (queries, keys))
            reference.write_kv(keys, rounded(values), cache, layer, plan.step.slots)
            return attention_that_rounds(kv_type, queries, cache, layer, plan.step, spec).reshape(len(q), -1)
        reference.write_kv(rounded(keys), rounded(values), cache, layer, plan.step.slots)
        if kv_type == "bf16" and _native.bf16_dots():
            return attention_that_rounds(kv_type, rounded(queries), cache, layer, plan.step, spec).reshape(len(q), -1)
        return reference.paged_attention(queries, cache, layer, plan, spec).reshape(len(q), -1)

    return SimpleNamespace(**{**vars(reference), "attention": attention})


@pytest.mark.parametrize("kv_type", ["bf16", "f16", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma3-capped", "gpt2"])
def test_shorter_keys_and_values_cost_little_and_no_bit_by_cutting_up(name: str, kv_type: Any, pair: Any) -> None:
    """What rounding costs comes from the reference, told to round as the kernels do. From that one, results differ only
    where float32's last digit decides which way a number is rounded: one in thousands, by one step."""
    checkpoint = pair(name)[1]
    exact, want = (paged_logits(models.build(checkpoint, o), prompts()) for o in (reference, rounding(kv_type)))
    cost = max(np.abs(one - other).max() for one, other in zip(exact, want, strict=True))
    first: list[np.ndarray] | None = None
    for threads, chunk, block_size in ((1, None, 16), (3, 1, 4)):
        ops = NativeOps(kv_type, threads)
        got = paged_logits(models.build(checkpoint, ops), prompts(), chunk=chunk, block_size=block_size, ops=ops)
        for mine, their in zip(got, want, strict=True):
            assert np.abs(mine - their).max() < cost / 4
        for mine, earlier in zip(got, first or got, strict=True):
            np.testing.assert_array_equal(mine, earlier)
        first = got


def test_smollm2_predicts_as_the_reference_does(smollm2_path: Any) -> None:
    """4-bit weights times 8-bit activations: how far its distributions diverge, and its choices where one is clear."""
    checkpoint = load_checkpoint(smollm2_path)
    text = "Water boils at 100 degrees Celsius, and ice melts at 0. The capital of France is Paris, and of Italy"
    assert checkpoint.tokenizer is not None
    tokens = checkpoint.tokenizer.encode(text)
    ops = NativeOps()
    (want,) = paged_logits(models.build(checkpoint, reference, 64), [tokens])
    (got,) = paged_logits(models.build(checkpoint, ops, 64), [tokens], chunk=9, ops=ops)
    mine, theirs = (
        x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True)) for x in (got, want)
    )
    assert (np.exp(theirs) * (theirs - mine)).sum(-1).mean() < 0.01
    ordered = np.sort(want, axis=-1)
    clear = ordered[:, -1] - ordered[:, -2] > 0.5
    assert clear.sum() > 10
    np.testing.assert_array_equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


# --- rewrites --------------------------------------------------------------------------------------------------------

OPS = NativeOps("f32", 2)
WIDTH = 32
HEADS = 4
KINDS = ("F32", "F16", "BF16", "Q8_0")  # of weights: their inputs are wanted as float32, bfloat16 and int8


def ops_of(trace: Trace) -> list[str]:
    return [instruction.op for instruction in trace.instructions]


def square(seed: int) -> Any:
    return OPS.linear_weight([stored(normal(WIDTH, WIDTH, seed=seed) / 6)])


def doubled(seed: int) -> Any:
    return OPS.linear_weight([stored(normal(2 * WIDTH, WIDTH, seed=seed) / 6)])


def run_both(record: Any, monkeypatch: pytest.MonkeyPatch, *inputs: np.ndarray) -> list[str]:
    """Run what `record` makes of the inputs with and without rewrites, compare, and name the rewritten operations."""
    trace = Trace()
    out = record(*(trace.input(x.shape[1]) for x in inputs))
    shortened = assemble(trace, out, 3).run_rows(list(inputs))
    names = ops_of(trace)
    with monkeypatch.context() as plain:
        plain.setattr("octavo.ops.native_program.fuse", lambda trace, output: None)
        trace = Trace()
        out = record(*(trace.input(x.shape[1]) for x in inputs))
        np.testing.assert_allclose(shortened, assemble(trace, out, 2).run_rows(list(inputs)), rtol=0, atol=1e-6)
    assert len(names) < len(trace.instructions)
    return names


def test_a_product_is_added_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, weight = normal(7, WIDTH), normal(7, WIDTH, seed=1), square(2)
    assert run_both(lambda x, y: OPS.add(x, OPS.linear(y, weight)), monkeypatch, x, y) == ["linear"]
    assert run_both(lambda x, y: OPS.add(OPS.linear(y, weight, normal(WIDTH)), x), monkeypatch, x, y) == ["linear"]


def test_gate_and_up_are_multiplied_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = normal(7, WIDTH), doubled(2), normal(2 * WIDTH)
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        names = run_both(lambda x, kind=kind: OPS.gated(OPS.linear(x, weight, bias), kind), monkeypatch, x)
        assert names == ["linear"]


def test_a_norm_is_added_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, weight = normal(7, WIDTH), normal(7, WIDTH, seed=1), normal(WIDTH, seed=2)
    assert run_both(lambda x, y: OPS.add(x, OPS.rms_norm(y, weight, 1e-5)), monkeypatch, x, y) == ["norm"]


def test_an_embedding_is_scaled_as_it_is_read() -> None:
    trace, weight = Trace(), square(0)
    out = OPS.scale(OPS.embed(weight, Ids(trace, "token_ids")), 3.0)
    program = assemble(trace, out, 1)
    assert ops_of(trace) == ["embed"]
    ids = np.array([5, 0, 31], np.int32)
    none, starts = np.zeros(0, np.int32), np.zeros(1, np.int32)
    step = StepInput(ids, ids, ids, starts, none, np.zeros((0, 0), np.int32), none)
    np.testing.assert_array_equal(run_step(program, [], step, None), OPS.embed(weight, ids) * np.float32(3))


def test_only_the_rows_that_are_taken_attend() -> None:
    trace, spec = Trace(), AttentionSpec(2, 1, WIDTH // 2, 1.0)
    q, k, v = (trace.input(width) for width in (WIDTH, WIDTH // 2, WIDTH // 2))
    attended = OPS.attention(q, k, v, None, 0, None, spec)
    out = OPS.take_rows(attended, Ids(trace, "logit_rows"))
    fuse(trace, out)
    assert ops_of(trace) == ["attention"]
    assert trace.instructions[0].out is out
    assert out.rows == "logits"
    trace = Trace()
    q, k, v = (trace.input(width) for width in (WIDTH, WIDTH // 2, WIDTH // 2))
    attended = OPS.attention(q, k, v, None, 0, None, spec)
    OPS.take_rows(attended, Ids(trace, "logit_rows"))
    fuse(trace, attended)  # the caller reads it
    assert ops_of(trace) == ["attention", "take_rows"]


def test_nothing_is_rewritten_that_somebody_else_reads() -> None:
    weight = square(0)
    trace = Trace()
    x = trace.input(WIDTH)
    product = OPS.linear(x, weight)
    fuse(trace, OPS.add(OPS.add(x, product), OPS.scale(product, 2.0)))
    assert ops_of(trace) == ["linear", "scale", "add", "add"] or ops_of(trace) == ["linear", "add", "scale", "add"]
    trace = Trace()
    product = OPS.linear(trace.input(WIDTH), weight)
    fuse(trace, OPS.add(product, product))
    assert ops_of(trace) == ["linear", "add"]
    trace = Trace()
    product = OPS.linear(x := trace.input(WIDTH), weight)
    OPS.add(x, product)
    fuse(trace, product)  # the caller reads it
    assert "add" in ops_of(trace)
    trace = Trace()
    odd = OPS.linear_weight([stored(normal(10, WIDTH))])  # halves that share a panel
    fuse(trace, OPS.gated(OPS.linear(trace.input(WIDTH), odd), "silu"))
    assert ops_of(trace) == ["linear", "gated"]


# --- memory and barriers: programs in which a fault of one of them shows --------------------------------------------

WIDE = 96  # so many columns that a product reads its input again after it has begun to write
R = np.arange(5).repeat(60).astype(np.int32)  # more rows wanted than there are tokens


class Both:
    """Names of weights, for either side."""

    def __init__(self, ops: Any, take: Any) -> None:
        self.ops, self.take = ops, take
        self.square, self.int8 = (
            ops.linear_weight([stored(normal(WIDE, WIDE, seed=seed) / 9, kind)])
            for seed, kind in ((1, "F32"), (2, "Q8_0"))
        )
        self.double = ops.linear_weight([stored(normal(2 * WIDE, WIDE, seed=3) / 9)])
        self.ones, self.head = np.ones(WIDE, np.float32), np.ones(12, np.float32)

    def mul(self, x: Any) -> Any:
        return self.ops.linear(x, self.square)

    def same(self, x: Any) -> Any:
        """A value that is not the caller's memory."""
        return self.ops.scale(x, 1.0)


def reads_what_it_overwrites(b: Both, x: Any) -> Any:
    x = b.same(x)
    return b.same(b.ops.add(x, b.mul(x)))


def needs_the_residual_again(b: Both, x: Any) -> Any:
    x = b.same(x)
    return b.ops.scale(b.ops.add(b.mul(b.ops.add(x, b.mul(b.ops.activate(x, "gelu")))), x), 2.0)


def goes_on_from_the_residuals_place(b: Both, x: Any) -> Any:
    y = b.ops.add(b.same(x), b.mul(x))
    return b.ops.add(b.mul(b.mul(y)), y)


def adds_twice(b: Both, x: Any) -> Any:
    return b.ops.add(b.ops.scale(x, 3.0), b.ops.add(x, b.mul(x)))


def adds_what_is_gated(b: Both, x: Any) -> Any:
    return b.ops.add(x, b.ops.gated(b.ops.linear(x, b.double), "silu"))


def gates_a_sum(b: Both, x: Any) -> Any:
    return b.ops.gated(b.ops.add(b.ops.linear(x, b.double), b.ops.linear(b.same(x), b.double)), "silu")


def rounds_norms_of_heads(b: Both, x: Any) -> Any:
    return b.ops.linear(b.ops.rms_norm(x, b.head, 1e-5), b.int8)


def rounds_columns(b: Both, x: Any) -> Any:
    middle = b.ops.split(b.ops.linear(x, b.double), (17, WIDE, WIDE - 17))[1]
    return b.ops.add(b.ops.linear(middle, b.int8), b.mul(middle))


def takes_many_rows(b: Both, x: Any) -> Any:
    rows = b.ops.take_rows(b.mul(x), b.take)
    return b.ops.add(b.mul(b.mul(rows)), rows)


PROGRAMS = [
    *(reads_what_it_overwrites, needs_the_residual_again, goes_on_from_the_residuals_place, adds_twice),
    *(adds_what_is_gated, gates_a_sum, rounds_norms_of_heads, rounds_columns, takes_many_rows),
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_used_again_only_when_nobody_reads_it(program: Any, threads: int) -> None:
    x, trace = normal(5, WIDE), Trace()
    out = program(Both(OPS, Ids(trace, "logit_rows")), trace.input(WIDE))
    want = program(Both(reference, R), x)
    none, ids = np.zeros(0, np.int32), np.zeros(5, np.int32)
    step = StepInput(ids, ids, ids, np.zeros(1, np.int32), none, np.zeros((0, 0), np.int32), R)
    assembled = assemble(trace, out, threads)
    for _ in range(2):
        got = run_step(assembled, [x], step, None)
        assert np.linalg.norm(got - want) <= (0.02 if "round" in program.__name__ else 1e-5) * np.linalg.norm(want)


# --- memory and barriers: random programs ----------------------------------------------------------------------------


class Random:
    """Records random operations, and evaluates them by the reference as they are recorded."""

    def __init__(self, draw: st.DrawFn, tokens: int) -> None:
        self.draw, self.trace = draw, Trace()
        self.rounded = False
        self.inputs = [normal(tokens, WIDTH, seed=i) for i in range(2)]
        self.rows = np.array(draw(st.lists(st.integers(0, tokens - 1), max_size=5)), np.int32)
        self.token_ids = np.array(draw(st.lists(st.integers(0, WIDTH - 1), min_size=tokens, max_size=tokens)), np.int32)
        self.values: list[tuple[Value, np.ndarray]] = [(self.trace.input(WIDTH), x) for x in self.inputs]
        self.weights = {
            kind: tuple(both_weights(normal(rows, WIDTH, seed=rows) / 6, kind) for rows in (WIDTH, 2 * WIDTH))
            for kind in KINDS
        }

    def pick(self, like: np.ndarray | None = None) -> tuple[Value, np.ndarray]:
        """Any value made so far; or one of the same rows as another."""
        found = [v for v in self.values if like is None or v[1].shape == like.shape]
        return found[-1 - self.draw(st.integers(0, 9)) * self.draw(st.booleans()) % len(found)]

    def step(self) -> None:
        """One more operation, on both sides."""
        draw = self.draw
        symbol, array = self.pick()
        name = draw(
            st.sampled_from(["linear", "gated", "norm", "heads", "add", "scale", "activate", "split", "embed", "take"])
        )
        kind = draw(st.sampled_from(KINDS))
        self.rounded |= kind in ("BF16", "Q8_0")
        made: list[tuple[Value, np.ndarray]] = []
        for ops, x, side in ((OPS, symbol, 0), (reference, array, 1)):
            o: Any = ops
            small, large = (pair[side] for pair in self.weights[kind])
            if name == "linear":
                y = o.linear(x, small, np.ones(WIDTH, np.float32))
            elif name == "gated":
                y = o.gated(o.linear(x, large), "silu")
            elif name == "norm":
                y = o.rms_norm(x, np.ones(WIDTH, np.float32), 1e-3)
            elif name == "heads":
                y = o.rms_norm(x, np.ones(WIDTH // HEADS, np.float32), 1e-3)
            elif name == "scale":
                y = o.scale(x, 0.5)
            elif name == "activate":
                y = o.activate(x, "gelu")
            elif name == "split":
                y = o.split(o.linear(x, large), (7, WIDTH, WIDTH - 7))[1]
            elif name == "embed":
                y = o.embed(small, Ids(self.trace, "token_ids") if side == 0 else self.token_ids)
            elif name == "take":
                if symbol.rows == "logits":
                    return
                y = o.take_rows(x, Ids(self.trace, "logit_rows") if side == 0 else self.rows)
            else:
                break
            made.append(y)
        if name == "add":
            other, other_array = self.pick(array)
            if other.rows != symbol.rows:
                return
            made = [OPS.add(symbol, other), reference.add(array, other_array)]
        self.values.append((made[0], made[1]))


def both_weights(values: np.ndarray, kind: str) -> tuple[Any, Any]:
    tensor = stored(values, kind)
    return OPS.linear_weight([tensor]), reference.linear_weight([tensor])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_programs_compute_what_the_reference_does(data: st.DataObject) -> None:
    tokens = data.draw(st.sampled_from([1, 2, 5, 9]))
    program = Random(data.draw, tokens)
    for _ in range(data.draw(st.integers(1, 14))):
        program.step()
    symbol, want = program.values[-1]
    if symbol.parent is not None or symbol in program.trace.inputs:
        symbol, want = OPS.scale(symbol, 2.0), want * 2
    fresh = np.zeros(tokens, np.int32)
    step = StepInput(
        program.token_ids, fresh, fresh, np.zeros(1, np.int32), fresh[:0], np.zeros((0, 0), np.int32), program.rows
    )
    for threads in (1, 3):
        assembled = assemble(_copy(program.trace), symbol, threads)
        for _ in range(2):  # the second time over memory that the first left behind
            got = run_step(assembled, program.inputs, step, None)
            if not program.rounded:
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
            assert np.linalg.norm(got - want) <= 0.1 * np.linalg.norm(want)


def _copy(trace: Trace) -> Trace:
    """The instructions again, as assembling rewrites them."""
    return Trace([Instruction(i.op, dict(i.reads), i.out, dict(i.settings)) for i in trace.instructions], trace.inputs)


def test_a_models_layers_share_a_few_regions_and_wait_only_where_rows_cross(pair: Any) -> None:
    """Ten layers take no more memory than two: residual in place, everything else reused."""
    trace = Trace()
    x = trace.input(WIDTH)
    norm = np.ones(WIDTH, np.float32)
    for i in range(10):
        x = OPS.add(x, OPS.linear(OPS.gated(OPS.linear(OPS.rms_norm(x, norm, 1e-5), doubled(i)), "silu"), square(i)))
    out = OPS.rms_norm(x, norm, 1e-5)
    fuse(trace, out)
    layout = lay_out(trace, out)
    assert len([region for region in layout.regions if region.holder == "arena"]) <= 3
    assert len(layout.phases) == 3 * 10 + 1
    heads = Trace()
    x = heads.input(WIDTH)
    q = OPS.add(OPS.scale(x, 2.0), OPS.rms_norm(x, norm, 1e-5))
    assert len(lay_out(heads, q).phases) == 1


def test_results_are_the_callers_while_held_and_their_memory_is_used_again_after() -> None:
    weight = square(0)
    trace = Trace()
    program = assemble(trace, OPS.linear(trace.input(WIDTH), weight), 2)
    xs = [normal(n, WIDTH, seed=n) for n in (3, 5, 2)]
    results = [program.run_rows([x]) for x in xs]
    for x, result in zip(xs, results, strict=True):
        np.testing.assert_array_equal(result, OPS.linear(x, weight))
    part = results[-1][1:]
    address = results[-1].ctypes.data
    del results, result
    assert program.run_rows([xs[0]]).ctypes.data != address  # a view still holds it
    address = program.run_rows([xs[0]]).ctypes.data
    assert program.run_rows([xs[2]]).ctypes.data == address
    np.testing.assert_array_equal(part, OPS.linear(xs[2], weight)[1:])


def test_threads_of_python_take_turns_on_one_program() -> None:
    weight = square(0)
    trace = Trace()
    program = assemble(trace, OPS.linear(OPS.activate(trace.input(WIDTH), "gelu"), weight), 2)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = normal(seed + 1, WIDTH, seed=seed)
        want = OPS.linear(OPS.activate(x, "gelu"), weight)
        if any(not np.array_equal(program.run_rows([x]), want) for _ in range(50)):
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_caches_of_different_block_sizes_serve_one_model(pair: Any) -> None:
    ops = NativeOps("f32", 2)
    model = models.build(pair("llama")[1], ops)
    (prompt,) = prompts((20,))
    (want,) = paged_logits(model, [prompt], block_size=16, ops=ops)
    for block_size in (4, 16, 64):
        (got,) = paged_logits(model, [prompt], chunk=6, block_size=block_size, ops=ops)
        np.testing.assert_array_equal(got, want)


def test_results_hold_where_the_system_grants_fewer_threads_than_asked() -> None:
    code = """if True:
        import numpy as np
        from octavo.ops.native import NativeOps
        from tests.native.test_native_ops import normal, stored

        x, tensor = normal(9, 32), stored(normal(48, 32))
        one, many = (ops.linear(x, ops.linear_weight([tensor])) for ops in (NativeOps("f32", 1), NativeOps("f32", 4)))
        assert np.array_equal(one, many)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "OMP_THREAD_LIMIT": "2"})


# --- steps that cannot be --------------------------------------------------------------------------------------------


def changed(array: np.ndarray, place: int, value: int) -> np.ndarray:
    copy = array.copy()
    copy.reshape(-1)[place] = value
    return copy


BAD_STEPS: dict[str, tuple[Any, str]] = {
    "a token beyond the vocabulary": (
        lambda s: {"token_ids": changed(s.token_ids, 2, small.VOCAB)},
        "token_ids has 61",
    ),
    "a negative token": (lambda s: {"token_ids": changed(s.token_ids, 0, -1)}, "token_ids has -1"),
    "a position beyond the rotations": (lambda s: {"positions": changed(s.positions, 1, 64)}, "positions has 64"),
    "a negative position": (lambda s: {"positions": changed(s.positions, 1, -5)}, "positions has -5"),
    "a slot beyond the cache": (lambda s: {"slots": changed(s.slots, 3, 10**6)}, "slots has 1000000"),
    "a negative slot": (lambda s: {"slots": changed(s.slots, 3, -2)}, "slots has -2"),
    "a block beyond the cache": (lambda s: {"block_tables": changed(s.block_tables, 0, 99)}, "block_tables has 99"),
    "a table that is too short": (lambda s: {"block_tables": s.block_tables[:, :1].copy()}, "takes 3 blocks"),
    "too few tables": (lambda s: {"block_tables": s.block_tables[:1]}, "block_tables has 1 entries where 2"),
    "too few positions": (lambda s: {"positions": s.positions[:-1]}, "positions has 10 entries where 11"),
    "too few slots": (lambda s: {"slots": s.slots[:-1]}, "slots has 10 entries where 11"),
    "too few starts": (lambda s: {"query_starts": s.query_starts[:-1]}, "query_starts has 2 entries where 3"),
    "starts that end early": (lambda s: {"query_starts": changed(s.query_starts, 2, 10)}, "must begin with 0 and end"),
    "starts that begin late": (lambda s: {"query_starts": changed(s.query_starts, 0, 1)}, "must begin with 0"),
    "starts that decrease": (lambda s: {"query_starts": changed(s.query_starts, 1, 12)}, "must"),
    "a context shorter than its tokens": (lambda s: {"context_lens": changed(s.context_lens, 0, 8)}, "at least 1 and"),
    "a context of nothing": (lambda s: {"context_lens": changed(s.context_lens, 0, -3)}, "at least 1 and"),
    "a row that is not there": (lambda s: {"logit_rows": np.array([0, 11], np.int32)}, "logit_rows has 11"),
    "a negative row": (lambda s: {"logit_rows": np.array([-1], np.int32)}, "logit_rows has -1"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_step_that_cannot_be_is_refused_before_anything_is_written(name: str, pair: Any) -> None:
    ops = NativeOps("f32", 2)
    model = models.build(pair("llama")[1], ops, 64)
    tables, blocks = scattered_tables([9, 2], 4, 0)
    cache = nan_cache(model, blocks, 4, ops)
    change, message = BAD_STEPS[name]
    step = step_of([([1] * 9, 0), ([2] * 2, 0)], tables, 4)
    with pytest.raises(ValueError, match=message):
        model.forward(replace(step, **change(step)), cache)
    assert (cache.blocks == 0xFF).all()
    assert np.isfinite(model.forward(step, cache)).all()


def test_arrays_of_other_types_and_caches_of_other_models_are_refused(pair: Any) -> None:
    ops = NativeOps("f32", 2)
    model = models.build(pair("llama")[1], ops, 64)
    tables, blocks = scattered_tables([9], 4, 0)
    cache = nan_cache(model, blocks, 4, ops)
    step = step_of([([1] * 9, 0)], tables, 4)
    with pytest.raises(TypeError):
        model.forward(replace(step, token_ids=step.token_ids.astype(np.int64)), cache)
    with pytest.raises(TypeError):
        model.forward(step, np.zeros((blocks, 10)))
    with pytest.raises(ValueError, match="needs a step and a cache"):
        model.forward(step, None)
    for wrong in ((2, 2, 10), (3, 3, 10), (3, 2, 12)):
        with pytest.raises(ValueError, match="this cache was made for"):
            model.forward(step, ops.new_cache(blocks, CacheLayout(wrong[0], wrong[1], 4, wrong[2])))
    with pytest.raises(ValueError, match="35 columns where 36 belong"):
        model.logits(np.zeros((1, 35), np.float32))


def test_a_model_that_the_kernels_cannot_compute_is_refused_as_it_is_loaded(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeOps, "rope_table", lambda self, inv_freq, n, *, factor=1.0: RopeTable(normal(40), n, 1.0))
    with pytest.raises(ModelError, match="more dimensions are rotated than a head has"):
        models.build(pair("llama")[1], NativeOps("f32", 1))


@pytest.mark.parametrize("kv_type", ["f32", "int8"])
@pytest.mark.parametrize("name", small.MODELS)
def test_rows_that_nobody_wants_change_no_bit_of_others_or_of_what_follows(name: str, kv_type: Any, pair: Any) -> None:
    """Of a last layer they only leave keys and values behind, which the next step reads."""
    ops = NativeOps(kv_type, 2)
    model = models.build(pair(name)[1], ops)
    sequences = prompts((45, 1, 23))
    tables, blocks = scattered_tables([46, 2, 24], 4, 0)
    hidden, after = [], []
    wanted = [68, 3, 45, 3, 44]  # in any order, one of them twice
    for rows in (None, wanted, []):
        cache = nan_cache(model, blocks, 4, ops)
        hidden.append(model.forward(step_of([(tokens, 0) for tokens in sequences], tables, 4, rows=rows), cache))
        after.append(model.forward(step_of([([1], len(tokens)) for tokens in sequences], tables, 4), cache))
    np.testing.assert_array_equal(hidden[1], hidden[0][wanted])
    assert np.isfinite(after[0]).all()
    np.testing.assert_array_equal(after[1], after[0])
    np.testing.assert_array_equal(after[2], after[0])


def test_no_rows_may_be_wanted(pair: Any) -> None:
    ops = NativeOps("f32", 2)
    model = models.build(pair("gpt2")[1], ops)
    tables, blocks = scattered_tables([9], 4, 0)
    cache = nan_cache(model, blocks, 4, ops)
    hidden = model.forward(step_of([([1] * 8, 0)], tables, 4, rows=[]), cache)
    assert hidden.shape == (0, 36)
    assert model.logits(hidden).shape == (0, small.VOCAB)
    assert np.isfinite(model.forward(step_of([([1], 8)], tables, 4), cache)).all()

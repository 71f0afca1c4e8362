"""How long a step takes: fitted to steps of the real engine, or computed from a GPU's data sheet. Knows no strategy.

A simulation has no clock of its own: what it says of seconds comes from here, and is as good as the error stated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.lab.hardware import GPU, Model
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.report import StepRecord
    from octavo.llm import LLM


class StepTime(Protocol):
    """A model of a step's time."""

    def seconds(
        self,
        prefill_tokens: int,
        decode_sequences: int,
        context_tokens: int,
        copied_bytes: int,
        prefill_pairs: int = 0,
    ) -> float:
        """Seconds of one step.

        prefill_tokens: prompt tokens computed
        decode_sequences: sequences that compute one token each
        context_tokens: tokens whose keys and values the decoding sequences read, added up over them
        copied_bytes: moved by copy-on-write, reallocation or swap
        prefill_pairs: (token, token it attends to) of the prompt tokens computed: of a chunk of `c` tokens after `k`
            computed ones, c * k + c * (c + 1) // 2
        """
        ...

    def describe(self) -> dict[str, Any]:
        """For the result's file: the kind of model, its formula and numbers, where they come from, its error."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One step of the real engine; what `StepTime.seconds` is asked, and the answer."""

    prefill_tokens: int
    decode_sequences: int
    context_tokens: int
    copied_bytes: int
    prefill_pairs: int
    seconds: float
    run: int  # steps of one run are held out together: they are too alike to test one another


# --- on the real engine -----------------------------------------------------------------------------------------------

# (sequences, prompt tokens, answer tokens): many short ones, few long ones, some 25,000 tokens in all.
SHAPES = tuple(
    (sequences, prompt, 9)
    for prompt, counts in (
        (16, (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
        (64, (1, 3, 8, 20, 40, 64)),
        (250, (1, 4, 8, 16, 24)),
        (600, (1, 2, 6)),
        (1500, (1, 2)),
        (3000, (1,)),
    )
    for sequences in counts
)


def measure(llm: LLM, shapes: Sequence[tuple[int, int, int]] = SHAPES, repeats: int = 3) -> list[Measurement]:
    """Steps of many shapes on this engine, of each the quickest of `repeats` runs: whatever else runs here only slows.

    The engine is to have its prefix cache off, lest prompts be found instead of computed, and nothing else to do. Takes
    some ten seconds a repeat on two cores.
    """
    random = np.random.default_rng(0)
    vocabulary = llm.engine.model.vocab_size
    prompts = [random.integers(0, vocabulary, (sequences, prompt)).tolist() for sequences, prompt, _ in shapes]
    takes: list[list[Measurement]] = []
    for _ in range(repeats):  # the whole list again, so that one busy moment does not spoil all runs of a shape
        takes.append([])
        for run, (asked, (_, _, answer)) in enumerate(zip(prompts, shapes, strict=True)):
            params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
            takes[-1] += _steps(llm, asked, params, run)
    return [min(same, key=lambda step: step.seconds) for same in zip(*takes, strict=True)]


def _steps(llm: LLM, prompts: list[list[int]], params: SamplingParams, run: int) -> list[Measurement]:
    steps: list[Measurement] = []
    engine = llm.engine

    def watch(record: StepRecord) -> None:
        steps.append(measurement(record, engine.block_bytes, run))

    engine.watchers.append(watch)
    try:
        llm.generate(prompts, params)
    finally:
        engine.watchers.remove(watch)
    return steps


def measurement(record: StepRecord, block_bytes: int, run: int = 0) -> Measurement:
    """What a watcher of the engine is told of a step, as a measurement."""
    plan = record.plan
    decoding, prompts = plan.sequences[: plan.num_decodes], plan.sequences[plan.num_decodes :]
    chunks = zip(prompts, plan.counts[plan.num_decodes :], strict=True)
    return Measurement(
        prefill_tokens=record.prefill_tokens,
        decode_sequences=plan.num_decodes,
        context_tokens=sum(seq.computed for seq in decoding),
        copied_bytes=block_bytes * sum(len(pairs) for _, pairs in plan.memory.runs),
        prefill_pairs=sum(c * (seq.computed - c) + c * (c + 1) // 2 for seq, c in chunks),
        seconds=record.seconds,
        run=run,
    )


# --- fitted -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far a fit is off, on steps of runs that it was not fitted to."""

    steps: int
    r2: float  # the part of the seconds' variation that is explained
    median: float  # error of a step, relative to its own seconds
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Seconds as a sum of what a step does, each at a price of its own; no price is negative."""

    overhead: float  # seconds a step
    prefill_token: float  # seconds a prompt token
    prefill_pair: float  # seconds a pair
    decode_sequence: float  # seconds a sequence
    context_token: float  # seconds a token read
    copied_byte: float  # seconds a byte
    error: FitError | None = None
    where: str = ""  # what was measured: model and machine

    def seconds(
        self,
        prefill_tokens: int,
        decode_sequences: int,
        context_tokens: int,
        copied_bytes: int,
        prefill_pairs: int = 0,
    ) -> float:
        return (
            self.overhead
            + self.prefill_token * prefill_tokens
            + self.prefill_pair * prefill_pairs
            + self.decode_sequence * decode_sequences
            + self.context_token * context_tokens
            + self.copied_byte * copied_bytes
        )

    def describe(self) -> dict[str, Any]:
        prices = {name: getattr(self, name) for name in (*_PRICES, "copied_byte")}
        return {
            "kind": "fitted",
            "formula": "overhead + prefill_token × prompt tokens + prefill_pair × pairs of attention in prompts "
            "+ decode_sequence × sequences + context_token × tokens of context read + copied_byte × bytes copied",
            "source": f"steps of the real engine: {self.where}",
            "seconds": prices,
            "error": asdict(self.error) if self.error else None,
        }


_PRICES = ("overhead", "prefill_token", "prefill_pair", "decode_sequence", "context_token")


def fit(measurements: Sequence[Measurement], *, copied_byte: float = 0.0, where: str = "") -> Fitted:
    """The prices that suit these steps best, by relative error; every fourth run is held out and tells the error.

    copied_byte: seconds a byte, measured by itself (`copy_price`): a step's few copies drown in the rest

    Raises RequestError for too few steps to tell prices apart.
    """
    held_out = [m for m in measurements if m.run % 4 == 3]
    fitted_to = [m for m in measurements if m.run % 4 != 3]
    if len(fitted_to) < 2 * len(_PRICES) or not held_out:
        raise RequestError(
            f"{len(measurements)} steps are too few to fit a model of a step's time; at least {4 * len(_PRICES)}, of "
            "4 runs or more, would work."
        )
    seconds = np.array([m.seconds - copied_byte * m.copied_bytes for m in fitted_to])
    work = np.array([_work_of(m) for m in fitted_to], np.float64)
    # Each step counts by its relative error, or the few long ones would decide alone.
    prices = non_negative_least_squares(work / seconds[:, None], np.ones(len(seconds)))
    made = Fitted(**dict(zip(_PRICES, prices.tolist(), strict=True)), copied_byte=copied_byte, where=where)
    return replace(made, error=error_of(made, held_out))


def _work_of(m: Measurement) -> tuple[int, ...]:
    """What each price of _PRICES is paid for."""
    return 1, m.prefill_tokens, m.prefill_pairs, m.decode_sequences, m.context_tokens


def error_of(step_time: StepTime, measurements: Sequence[Measurement]) -> FitError:
    """How far a model is off on these steps."""
    told = np.array(
        [
            step_time.seconds(m.prefill_tokens, m.decode_sequences, m.context_tokens, m.copied_bytes, m.prefill_pairs)
            for m in measurements
        ]
    )
    true = np.array([m.seconds for m in measurements])
    relative = np.abs(told - true) / true
    varied = float(((true - true.mean()) ** 2).sum())
    return FitError(
        steps=len(measurements),
        r2=1 - float(((told - true) ** 2).sum()) / varied if varied else 0.0,
        median=float(np.median(relative)),
        p90=float(np.quantile(relative, 0.9)),
    )


def non_negative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 that minimises |a x - b|: a [rows, columns], b [rows]. Lawson and Hanson 1974, chapter 23.

    A column joins the solution while its gradient says that this helps; one whose value would be negative leaves.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale  # prices differ by ten orders of magnitude
    columns = a.shape[1]
    x = np.zeros(columns)
    free = np.zeros(columns, bool)
    for _ in range(10 * columns):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10 * np.linalg.norm(b):
            break
        free[best] = True
        while free.any():
            tried = np.zeros(columns)
            tried[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if tried[free].min() > 0:
                x = tried
                break
            low = free & (tried <= 0)
            step = np.min(x[low] / np.maximum(x[low] - tried[low], 1e-300))
            x = x + step * (tried - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return np.asarray(x / scale)


def copy_price(repeats: int = 5, size: int = 1 << 26) -> float:
    """Seconds a byte of a large copy in this machine's memory; the quickest of `repeats`."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    taken: list[float] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - begin)
    return min(taken) / size


# SmolLM2 by our kernels; `measure` and `fit` as above, undisturbed: 261 steps, two takes of each. A run that it was not
# fitted to (24 requests of Azure's lengths in steps of 256 tokens, three takes) took 7.30 s; this tells 7.49 s.
SMOLLM2 = Fitted(
    overhead=5.476e-3,
    prefill_token=4.141e-4,
    prefill_pair=4.668e-7,
    decode_sequence=4.666e-4,
    context_token=1.546e-6,
    copied_byte=1.635e-10,
    error=FitError(steps=65, r2=0.9952, median=0.0495, p90=0.1096),
    where="SmolLM2 135M (Q4_1, KV in bf16), 2 cores of an Intel Xeon with AVX-512 VNNI, 2 threads",
)


# --- a GPU's roofline -------------------------------------------------------------------------------------------------

BANDWIDTH_REACHED = 0.8  # of the data sheet's
FLOPS_REACHED = 0.6
LAUNCH_SECONDS = 0.003  # scheduling, kernel launches, sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The larger of the time to move a step's bytes and the time to compute it (Williams et al., CACM 2009)."""

    gpu: GPU
    model: Model
    count: int = 1  # GPUs, each with an even part of weights, heads and KV
    overhead: float = LAUNCH_SECONDS  # seconds a step

    def seconds(
        self,
        prefill_tokens: int,
        decode_sequences: int,
        context_tokens: int,
        copied_bytes: int,
        prefill_pairs: int = 0,
    ) -> float:
        model, tokens = self.model, prefill_tokens + decode_sequences
        moved = model.weight_bytes + (context_tokens + tokens) * model.token_bytes + 2 * copied_bytes
        pair_flops = 4 * model.num_layers * model.num_heads * model.head_dim
        flops = 2 * model.parameters * tokens + pair_flops * (prefill_pairs + context_tokens)
        return self.overhead + max(
            moved / (BANDWIDTH_REACHED * self.gpu.bandwidth * self.count),
            flops / (FLOPS_REACHED * self.gpu.flops * self.count),
        )

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "roofline",
            "formula": "overhead + max(bytes ÷ (0.8 × bandwidth × GPUs), FLOP ÷ (0.6 × FLOP/s × GPUs)); bytes: "
            "weights + KV read and written + twice the bytes copied; FLOP: 2 × parameters × tokens + "
            "4 × layers × heads × head size × (token, token attended to) pairs",
            "source": f"not measured here; {self.gpu.source}; {self.model.source}",
            "assumed": "80 % of the bandwidth and 60 % of the FLOP/s are reached, a step's overhead is "
            f"{1e3 * self.overhead:g} ms, what GPUs tell one another costs nothing",
            "bandwidth": self.gpu.bandwidth,
            "flops": self.gpu.flops,
            "gpus": self.count,
            "overhead": self.overhead,
            "error": None,
        }


def roofline(gpu: GPU, model: Model, count: int = 1) -> Roofline:
    """A step's time on `count` GPUs, from their data sheets. Raises RequestError for no GPU, or one without figures."""
    if count < 1:
        raise RequestError(f"count is {count}; there must be at least 1 GPU.")
    if not (gpu.bandwidth and gpu.flops):
        raise RequestError(f"Steps on {gpu.label} were measured, one at a time and with smollm2 only.")
    return Roofline(gpu=gpu, model=model, count=count)


def of(gpu: GPU, model: Model, count: int = 1) -> StepTime:
    """What was measured where it was, the roofline elsewhere. Raises RequestError as `roofline` does."""
    if (gpu.name, model.name, count) == ("cpu", "smollm2", 1):
        return SMOLLM2
    return roofline(gpu, model, count)

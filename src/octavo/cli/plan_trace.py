"""`octavo plan --trace`: what memory a trace needs. Knows how to ask the lab and to show the answer; no simulation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.planner import KVShape

if TYPE_CHECKING:
    from octavo.lab.capacity import Progress, Question, Trial
    from octavo.lab.hardware import GPU, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says."""

    model: str
    config: dict[str, Any]
    dtype: str
    shape: KVShape
    trace: Path
    memory: int | None  # bytes; None: to be found
    context: int  # tokens
    block_size: int
    target_queued: str
    target_rejected: str
    requests: int
    rate: float
    gpu: str
    gpus: int


def plan_trace(asked: Asked, as_json: bool) -> None:
    """Find the memory, or try the one given, and show it. Raises RequestError for what cannot be."""
    from octavo.lab import capacity, hardware, step_time, traces
    from octavo.lab.study import FASTEST

    queued, rejected = share("--target-queued", asked.target_queued), share("--target-rejected", asked.target_rejected)
    if not 1 / FASTEST <= asked.rate <= FASTEST:
        raise RequestError(f"--rate is {asked.rate}; it must be above 0: from {1 / FASTEST:g} to {FASTEST:g}.")
    gpu, model = hardware.gpu(asked.gpu), _model(asked)
    work = traces.read(asked.trace, limit=asked.requests)
    question = capacity.Question(
        work=work if asked.rate == 1 else work.at_rate(asked.rate),
        block_size=asked.block_size,
        token_bytes=asked.shape.token_bytes,
        max_model_len=asked.context,
        step_time=step_time.of(gpu, model, asked.gpus),
    )
    with _progress() as tell:
        if asked.memory is None:
            trials = capacity.need(question, target_queued=queued, target_rejected=rejected, progress=tell)
        else:
            trials = (capacity.attempt(question, _blocks(asked), tell),)
    notes = _notes(asked, question, trials[0], gpu, model)
    if as_json:
        print(json.dumps(_facts(asked, question, trials, notes, queued, rejected)))
    else:
        _show(asked, question, trials, notes)


def share(name: str, text: str) -> float:
    """0.01 of "1%" or "0.01". Raises RequestError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(%?)\s*", text, re.ASCII)
    number = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= number < 1:
        raise RequestError(f"{name} is {text!r}; it must be a share from 0% to below 100%, such as 1% or 0.01.")
    return number


def _blocks(asked: Asked) -> int:
    from octavo.cli.memory import size

    block = asked.block_size * asked.shape.token_bytes
    blocks = (asked.memory or 0) // block
    if not blocks:
        raise RequestError(
            f"--memory is {size(asked.memory or 0)}; it must hold at least one block of {asked.block_size} tokens "
            f"({size(block)})."
        )
    return blocks


def _model(asked: Asked) -> Model:
    """The model's scale, its parameters counted from its settings: in each layer attention and a gated MLP."""
    from octavo.lab.hardware import Model

    config = asked.config
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    attention = 2 * hidden * (heads + config["num_key_value_heads"]) * config["head_dim"]
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    parameters = embeddings + layers * (attention + 3 * hidden * config["intermediate_size"])
    return Model(
        name=asked.model,
        label=asked.model,
        parameters=parameters,
        weight_bytes=2 * parameters,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        kv_element_bytes=asked.shape.element_bytes,
        max_model_len=config["max_position_embeddings"],
        source="its config.json, parameters counted from it, 16 bits each",
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=1)
        yield lambda blocks, done, of: progress.update(
            bar, description=f"trying {blocks:,} blocks", completed=done, total=of
        )


def _notes(asked: Asked, question: Question, trial: Trial, gpu: GPU, model: Model) -> list[str]:
    from octavo.cli.memory import size
    from octavo.lab.hardware import MEMORY_SHARE

    notes: list[str] = []
    too_long = len(question.work.arrivals) - len(question.fitting().arrivals)
    if too_long:
        notes.append(f"{too_long:,} requests are longer than {asked.context:,} tokens and left out: no memory helps.")
    gpus = f"{asked.gpus} × {gpu.label}"
    memory, room = trial.blocks * asked.block_size * question.token_bytes, MEMORY_SHARE * gpu.memory * asked.gpus
    if gpu.bandwidth and memory + model.weight_bytes > room:
        notes.append(
            f"With {size(model.weight_bytes)} of weights in 16 bits that is more than {gpus} has room for "
            f"({MEMORY_SHARE:.0%}: {size(room)}); more of them are quicker, and need less: try --gpus."
        )
    notes.append(
        f"How long a request stays is told by {gpu.label} ({gpu.source}); prompts are taken to share tokens only where "
        "the trace says so."
    )
    return notes


def _facts(
    asked: Asked, question: Question, trials: tuple[Trial, ...], notes: list[str], queued: float, rejected: float
) -> dict[str, Any]:
    block_bytes, arrivals = asked.block_size * question.token_bytes, question.work.arrivals
    trial, fitting = trials[0], len(question.fitting().arrivals)
    return {
        "model": asked.model,
        "dtype": asked.dtype,
        **asdict(asked.shape),
        "trace": question.work.name,
        "source": question.work.source,
        "requests": len(arrivals),
        "too_long": len(arrivals) - fitting,
        "context": asked.context,
        "rate": asked.rate,
        "target_queued": queued,
        "target_rejected": rejected,
        "meets_targets": trial.queued <= queued * fitting and trial.rejected <= rejected * fitting,
        "block_size": asked.block_size,
        "block_bytes": block_bytes,
        "token_bytes": question.token_bytes,
        "memory": trial.blocks * block_bytes,
        **asdict(trial),
        "contiguous_memory": trial.in_flight_max * asked.context * question.token_bytes,
        "trials": [asdict(one) for one in trials],
        "step_time": question.step_time.describe(),
        "notes": notes,
    }


def _show(asked: Asked, question: Question, trials: tuple[Trial, ...], notes: list[str]) -> None:
    from rich.table import Table

    from octavo.cli.memory import size
    from octavo.cli.show import show

    arrivals, fitting, trial = question.work.arrivals, len(question.fitting().arrivals), trials[0]
    block_bytes, percent = asked.block_size * question.token_bytes, _percent_of(fitting)
    seconds = arrivals[-1].at
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="cyan")
    facts.add_row("trace", f"{question.work.name}: {len(arrivals):,} requests in {seconds:,.0f} s")
    facts.add_row("a block", f"{asked.block_size} tokens, {size(block_bytes)} ({asked.dtype})")
    facts.add_row(
        "memory" if asked.memory else "needed",
        f"{size(trial.blocks * block_bytes)}: {trial.blocks:,} blocks, {trial.blocks * asked.block_size:,} tokens",
    )
    targets = f"{asked.target_queued} to wait, {asked.target_rejected} to be rejected"
    facts.add_row("of requests", f"{percent(trial.queued)} wait for memory, {percent(trial.rejected)} are rejected")
    facts.add_row("", f"(target: at most {targets})")
    facts.add_row("in flight", f"{trial.in_flight_max:,} at most, {trial.utilisation:.1%} of the slots held in use")
    longest = trial.in_flight_max * asked.context * question.token_bytes
    facts.add_row("contiguous", f"{size(longest)} for as many, {asked.context:,} tokens reserved for each")
    tried = Table(title="What was tried", title_justify="left")
    for column in ("memory", "blocks", "wait", "rejected", "preempted", "first token, p99"):
        tried.add_column(column, justify="right")
    for one in sorted(trials, key=lambda one: one.blocks):
        first = "—" if one.ttft_p99 is None else f"{one.ttft_p99:,.2f} s"
        row = (f"{one.blocks:,}", percent(one.queued), percent(one.rejected), f"{one.preemptions:,}", first)
        tried.add_row(size(one.blocks * block_bytes), *row)
    show(facts, "", tried, *notes)


def _percent_of(whole: int) -> Callable[[int], str]:
    return lambda part: f"{part / whole:.1%}"

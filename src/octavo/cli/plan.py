"""`octavo plan`: how many requests fit in a memory. Knows a model's shape and how to show a plan; no arithmetic."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.options import with_default
from octavo.cli.plan_trace import Asked, plan_trace
from octavo.config import BLOCK_SIZES, parse_bytes
from octavo.errors import RequestError
from octavo.planner import ELEMENT_BYTES, SCALE_BYTES, KVShape, Plan
from octavo.planner import plan as make_plan

Name = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="As for the other commands; a folder with only a config.json will do."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="Memory for KV blocks, beside the weights, such as 24GiB. Needed, except with --trace: it is then only "
        "asked how this much would do.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        help=with_default(
            "Tokens of the longest request, prompt and answer.", "4096; with --trace, what the model was made for"
        ),
        show_default=False,
    ),
]
BlockSize = Annotated[int, typer.Option("--block-size", help=f"Tokens in a block: {', '.join(map(str, BLOCK_SIZES))}.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        "--dtype",
        help=f"What keys and values are kept as: {', '.join(ELEMENT_BYTES)} or auto, what this machine would take.",
    ),
]
AvgPrompt = Annotated[int | None, typer.Option("--avg-prompt", min=1, help="Tokens of an average prompt.")]
AvgOutput = Annotated[int | None, typer.Option("--avg-output", min=1, help="Tokens of an average answer.")]
Typical = Annotated[
    int | None,
    typer.Option(
        "--typical",
        min=1,
        help=with_default(
            "Tokens of an average request; instead of --avg-prompt and --avg-output.", "a quarter of the context"
        ),
        show_default=False,
    ),
]
_trace = partial(typer.Option, rich_help_panel="From a trace")
Trace = Annotated[
    Path | None,
    _trace(
        "--trace",
        help="Requests to serve, in CSV or JSONL: TIMESTAMP, ContextTokens, GeneratedTokens (Azure's) or timestamp, "
        "input_length, output_length, hash_ids (Mooncake's).",
    ),
]
TargetQueued = Annotated[
    str, _trace("--target-queued", help="Requests that may have to wait for memory, of those there are.")
]
TargetRejected = Annotated[
    str, _trace("--target-rejected", help="Requests that may find the memory too small for them alone.")
]
Requests = Annotated[int, _trace("--requests", min=1, help="Requests to take from the trace, the first ones.")]
Rate = Annotated[float, _trace("--rate", help="How many times as fast as they did the requests come.")]
Gpu = Annotated[
    str, _trace("--gpu", help="Whose speed says how long a request stays; octavo lab knows the same names.")
]
Gpus = Annotated[int, _trace("--gpus", min=1, help="How many of them share the model.")]
Json = Annotated[bool, typer.Option("--json", help="The plan as a JSON object.")]


def plan(
    model: Name,
    memory: Memory = None,
    context: Context = None,
    block_size: BlockSize = 16,
    dtype: Dtype = "auto",
    avg_prompt: AvgPrompt = None,
    avg_output: AvgOutput = None,
    typical: Typical = None,
    trace: Trace = None,
    target_queued: TargetQueued = "1%",
    target_rejected: TargetRejected = "0%",
    requests: Requests = 1000,
    rate: Rate = 1.0,
    gpu: Gpu = "a100-80g",
    gpus: Gpus = 1,
    as_json: Json = False,
) -> None:
    """Say how many blocks, tokens and requests fit in a memory, contiguous against paged; or what memory a trace needs.

    Contiguous allocation reserves the longest context for every request. Paged allocation takes blocks as tokens come;
    half of a request's last block stays empty on average. Every layer is counted. No weights are loaded.

    With --trace the requests are simulated, each when it came and as long as it was, in ever better guesses at the
    memory, until no more of them wait for memory than the target says.

    [bold]Examples[/bold]

      octavo plan smollm2 --memory 1GiB --context 4096

      octavo plan ./llama-7b --memory 24GiB --context 4096 --dtype f16 --avg-prompt 700 --avg-output 300

      octavo plan ./llama-7b --dtype f16 --trace azure.csv --target-queued 1%
    """
    if dtype not in ("auto", *ELEMENT_BYTES):
        raise RequestError(f"--dtype is {dtype!r}; it must be one of auto, {', '.join(ELEMENT_BYTES)}.")
    if (avg_prompt is None) != (avg_output is None):
        raise RequestError("--avg-prompt and --avg-output go together; give both, or --typical.")
    if avg_prompt is not None and avg_output is not None:
        if typical is not None:
            raise RequestError("--typical is the sum of --avg-prompt and --avg-output; give it or the two.")
        typical = avg_prompt + avg_output
    if trace is None and memory is None:
        raise RequestError("--memory is missing; give it, or a --trace to learn what memory it needs.")
    if trace is not None and typical is not None:
        raise RequestError("A trace tells how long its requests are; give --trace, or the average lengths.")
    from octavo.ops.backends import auto_kv_type

    config, quantised = _config(model)
    if dtype == "auto":
        dtype = auto_kv_type(quantised=quantised, head_dim=config["head_dim"])
    shape = _shape(config, dtype)
    if trace is not None:
        plan_trace(
            Asked(
                model=model,
                config=config,
                dtype=dtype,
                shape=shape,
                trace=trace,
                memory=None if memory is None else parse_bytes(memory),
                context=context or config["max_position_embeddings"],
                block_size=block_size,
                target_queued=target_queued,
                target_rejected=target_rejected,
                requests=requests,
                rate=rate,
                gpu=gpu,
                gpus=gpus,
            ),
            as_json,
        )
        return
    assert memory is not None
    made = make_plan(shape, memory=parse_bytes(memory), context=context or 4096, typical=typical, block_size=block_size)
    notes = _notes(made, config["max_position_embeddings"])
    if as_json:
        derived = {"notes": notes, "tokens": made.tokens, "token_bytes": made.token_bytes, "gain": made.gain}
        print(json.dumps({"model": model, "dtype": dtype, **asdict(shape), **asdict(made), **derived}))
    else:
        _show(model, dtype, shape, made, notes)


def _shape(config: dict[str, Any], dtype: str) -> KVShape:
    return KVShape(
        num_layers=config["num_hidden_layers"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        element_bytes=ELEMENT_BYTES[dtype],
        scale_bytes=SCALE_BYTES.get(dtype, 0),
    )


def _config(model: str) -> tuple[dict[str, Any], bool]:
    """The model's settings in our dialect, and whether its weights are quantised.

    Raises ModelError if it cannot be had or is not supported.
    """
    from octavo.loading.checkpoint import load_checkpoint
    from octavo.loading.dialect import normalise
    from octavo.loading.files import read_json
    from octavo.loading.resolve import resolve

    alone = Path(model) / "config.json"
    if not Path(model).exists() and "/" in model:
        alone = _config_from_hub(model) or alone
    if alone.is_file():
        return normalise(read_json(alone), alone), False  # in safetensors, as a folder's are
    checkpoint = load_checkpoint(resolve(model))
    return checkpoint.config, checkpoint.quantised


def _config_from_hub(model: str) -> Path | None:
    """The config.json of a Hub id, without the weights; None if it cannot be had, and `resolve` is to say why."""
    from huggingface_hub import snapshot_download  # hf_hub_download retries for long, and loudly, without a network

    try:
        return Path(snapshot_download(model, allow_patterns=["config.json"])) / "config.json"
    except Exception:  # the client raises its own, those of its HTTP library and of the system
        return None


def _notes(made: Plan, limit: int) -> list[str]:
    """What the figures do not say: that nothing fits, or that this model would not run so."""
    from octavo.cli.memory import size

    memory, notes = size(made.memory), []
    if not made.blocks:
        notes.append(f"{memory} does not hold one block of {made.block_size} tokens ({size(made.block_bytes)}).")
    elif not made.paged_longest:
        notes.append(f"{memory} does not hold one request of {made.context:,} tokens in blocks of {made.block_size}.")
    if made.context > limit:
        notes.append(f"A context of {made.context:,} tokens is beyond the {limit:,} that the model was made for.")
    return notes


def _show(model: str, dtype: str, shape: KVShape, made: Plan, notes: list[str]) -> None:
    from rich.table import Table

    from octavo.cli.memory import size
    from octavo.cli.show import show

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="cyan")
    facts.add_row("model", f"{model}: {shape.num_layers} layers, KV heads: {shape.num_kv_heads} × {shape.head_dim}")
    of_head = "(head_dim × bytes + scale)" if shape.scale_bytes else "head_dim × bytes"
    facts.add_row("a block", f"block_size × 2 × layers × kv_heads × {of_head} ({dtype})")
    facts.add_row("", f"= {shape.formula(made.block_size)}")
    facts.add_row("a token", f"{made.token_bytes:,} bytes ({size(made.token_bytes)})")
    facts.add_row("memory", f"{size(made.memory)}: {made.blocks:,} blocks, {made.tokens:,} tokens")
    fits = Table(title=f"Requests of up to {made.context:,} tokens, {made.typical:,} on average", title_justify="left")
    fits.add_column("allocation")
    fits.add_column("requests that fit", justify="right")
    fits.add_column("memory in use", justify="right")
    longest = -(-made.context // made.block_size) * made.block_size
    for allocation, requests, use in (
        ("contiguous, the longest reserved", made.contiguous, made.contiguous_use),
        ("paged", made.paged, made.paged_use),
        ("paged, if all grow to the longest", made.paged_longest, made.context / longest),
    ):
        fits.add_row(allocation, f"{requests:,}", f"{use:.1%}" if requests else "—")
    gain = [] if made.gain is None else [f"Paged holds {made.gain:.1f} times the requests."]
    show(facts, "", fits, *gain, *notes)

"""`octavo plan`: how many requests fit in a memory. Reads a model's shape, leaves the arithmetic to the planner."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.options import with_default
from octavo.config import parse_bytes
from octavo.errors import RequestError
from octavo.planner import ELEMENT_BYTES, KVShape, Plan
from octavo.planner import plan as make_plan

Name = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="As for the other commands; a folder with only a config.json will do."),
]
Memory = Annotated[str, typer.Option("--memory", help="Memory for KV blocks, beside the weights, such as 24GiB.")]
Context = Annotated[int, typer.Option("--context", min=1, help="Tokens of the longest request, prompt and answer.")]
BlockSize = Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a block.")]
Dtype = Annotated[str, typer.Option("--dtype", help=f"What keys and values are stored in: {', '.join(ELEMENT_BYTES)}.")]
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
Json = Annotated[bool, typer.Option("--json", help="The plan as a JSON object.")]


def plan(
    model: Name,
    memory: Memory,
    context: Context = 4096,
    block_size: BlockSize = 16,
    dtype: Dtype = "f32",
    avg_prompt: AvgPrompt = None,
    avg_output: AvgOutput = None,
    typical: Typical = None,
    as_json: Json = False,
) -> None:
    """Say how many blocks, tokens and requests fit in a memory, contiguous against paged.

    Contiguous allocation reserves the longest context for every request. Paged allocation takes blocks as tokens come;
    half of a request's last block stays empty on average. Every layer is counted. No weights are loaded.

    [bold]Examples[/bold]

      octavo plan smollm2 --memory 1GiB --context 4096

      octavo plan ./llama-7b --memory 24GiB --context 4096 --dtype f16 --avg-prompt 700 --avg-output 300
    """
    if dtype not in ELEMENT_BYTES:
        raise RequestError(f"--dtype is {dtype!r}; it must be one of {', '.join(ELEMENT_BYTES)}.")
    if (avg_prompt is None) != (avg_output is None):
        raise RequestError("--avg-prompt and --avg-output go together; give both, or --typical.")
    if avg_prompt is not None and avg_output is not None:
        if typical is not None:
            raise RequestError("--typical is the sum of --avg-prompt and --avg-output; give it or the two.")
        typical = avg_prompt + avg_output
    shape = _shape(model, ELEMENT_BYTES[dtype])
    made = make_plan(shape, memory=parse_bytes(memory), context=context, typical=typical, block_size=block_size)
    if as_json:
        derived = {"tokens": made.tokens, "token_bytes": made.token_bytes, "gain": made.gain}
        print(json.dumps({"model": model, "dtype": dtype, **asdict(shape), **asdict(made), **derived}))
    else:
        _show(model, dtype, shape, made)


def _shape(model: str, element_bytes: int) -> KVShape:
    config = _config(model)
    return KVShape(
        num_layers=config["num_hidden_layers"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        element_bytes=element_bytes,
    )


def _config(model: str) -> dict[str, Any]:
    """The model's settings in our dialect. Raises ModelError if it cannot be had or is not supported."""
    from octavo.loading.checkpoint import load_checkpoint
    from octavo.loading.dialect import normalise
    from octavo.loading.files import read_json
    from octavo.loading.resolve import resolve

    alone = Path(model) / "config.json"
    if not Path(model).exists() and "/" in model:
        alone = _config_from_hub(model) or alone
    if alone.is_file():
        return normalise(read_json(alone), alone)
    return load_checkpoint(resolve(model)).config


def _config_from_hub(model: str) -> Path | None:
    """The config.json of a Hub id, without the weights; None if it cannot be had, and `resolve` is to say why."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception:  # the client raises its own, those of its HTTP library and of the system
        return None


def _show(model: str, dtype: str, shape: KVShape, made: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    from octavo.cli.memory import size

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="cyan")
    facts.add_row("model", f"{model}: {shape.num_layers} layers, KV heads: {shape.num_kv_heads} × {shape.head_dim}")
    facts.add_row("a block", f"block_size × 2 × layers × kv_heads × head_dim × bytes ({dtype})")
    facts.add_row("", f"= {shape.formula(made.block_size)}")
    facts.add_row("a token", f"{made.token_bytes:,} bytes ({size(made.token_bytes)})")
    facts.add_row("memory", f"{size(made.memory)}: {made.blocks:,} blocks, {made.tokens:,} tokens")
    fits = Table(title=f"Requests of up to {made.context:,} tokens, {made.typical:,} on average", title_justify="left")
    fits.add_column("allocation")
    fits.add_column("requests that fit", justify="right")
    fits.add_column("memory in use", justify="right")
    fits.add_row("contiguous, the longest reserved", f"{made.contiguous:,}", f"{made.contiguous_use:.1%}")
    fits.add_row("paged", f"{made.paged:,}", f"{made.paged_use:.1%}")
    longest = -(-made.context // made.block_size) * made.block_size
    fits.add_row("paged, if all grow to the longest", f"{made.paged_longest:,}", f"{made.context / longest:.1%}")
    console = Console()
    console.print(facts, "", fits, sep="\n")
    if made.gain is not None:
        console.print(f"Paged holds {made.gain:.1f} times the requests.")

"""Options that several commands share, each written once. Knows typer and the settings' names, not what they do.

A command takes a whole group as one parameter (`engine: EngineOptions`), and `grouped` shows typer one option for each
of its fields. An option that was not given is None, so that the defaults stay where they belong, in EngineConfig
and SamplingParams; the help texts read them from there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, get_type_hints

import typer

from octavo.cli.streams import require_utf8
from octavo.config import BLOCK_SIZES, EngineConfig
from octavo.params import SamplingParams

DEFAULT_MODEL = "smollm2"
# The API draws from the model's own distribution; a small model reads better a little below it.
SAMPLING_DEFAULTS = {"temperature": 0.7, "top_p": 0.95}


def with_default(help_text: str, default: str) -> str:
    """A help text that ends with the default of an option whose own is None, "not given"."""
    return f"{help_text} [dim]\\[default: {default}][/dim]"


def _option(owner: type, panel: str, field: str, help_text: str, default: str | None = None, *flags: str) -> Any:
    """An option named like `field` of `owner`; its help shows the default that holds when it is not given."""
    own = SAMPLING_DEFAULTS.get(field, next(f.default for f in fields(owner) if f.name == field))
    return typer.Option(
        *(flags or (f"--{field.replace('_', '-')}",)),
        help=with_default(help_text, str(own) if default is None else default),
        show_default=False,
        rich_help_panel=panel,
    )


_engine = partial(_option, EngineConfig, "Engine")
_sampling = partial(_option, SamplingParams, "Sampling")
_PREFIX_FLAGS = "--prefix-caching/--no-prefix-caching"
_SEQUENCES = f"{EngineConfig().sequence_limit}, or the token budget if smaller"

Model = Annotated[
    str, typer.Option("--model", "-m", help="A built-in name, a GGUF file, a model folder or a Hugging Face id.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The settings of EngineConfig."""

    block_size: Annotated[
        int | None, _engine("block_size", f"Tokens in a KV block: {', '.join(map(str, BLOCK_SIZES))}.")
    ] = None
    num_blocks: Annotated[
        int | None, _engine("num_blocks", "KV blocks in the pool.", "as many as --kv-memory holds")
    ] = None
    kv_memory: Annotated[str | None, _engine("kv_memory", "Memory for KV blocks, such as 512MiB.")] = None
    prefault: Annotated[
        bool | None,
        _engine(
            "prefault",
            "Have the system give all KV memory at the start: no step waits for it, but the process is large at once.",
            "off",
        ),
    ] = None
    swap_memory: Annotated[
        str | None,
        _engine("swap_memory", "Host memory for the blocks of preempted requests; 0: always recompute."),
    ] = None
    max_model_len: Annotated[
        int | None,
        _engine("max_model_len", "Tokens of the longest sequence, prompt and answer.", "what the model was made for"),
    ] = None
    max_num_seqs: Annotated[int | None, _engine("max_num_seqs", "Sequences that run at once.", _SEQUENCES)] = None
    max_batched_tokens: Annotated[
        int | None,
        _engine("max_batched_tokens", "Tokens computed in one step; longer prompts are computed in chunks."),
    ] = None
    prefix_caching: Annotated[
        bool | None,
        _engine("prefix_caching", "Find the blocks of a prompt's beginning again.", "on", _PREFIX_FLAGS),
    ] = None
    preemption: Annotated[
        str | None,
        _engine("preemption", "How a request gives up its blocks: recompute, swap, or auto (the cheaper)."),
    ] = None

    backend: Annotated[
        str | None,
        _engine("backend", "What computes: native (our kernels), reference (NumPy), or auto: native if installed."),
    ] = None
    threads: Annotated[
        int | None,
        _engine("threads", "Threads of the kernels.", "OMP_NUM_THREADS, or the processors this process may use"),
    ] = None
    kv_dtype: Annotated[
        str | None,
        _engine(
            "kv_dtype",
            "Keys and values are kept as bf16, f16, f32, int8 or auto: int8 beside quantised weights where the "
            "processor multiplies bytes fast, else bf16.",
        ),
    ] = None
    deterministic: Annotated[
        bool | None,
        _engine("deterministic", "Demand the same bits in every batch; native kernels always give them.", "off"),
    ] = None

    def given(self) -> dict[str, Any]:
        """The settings that were given, by their names in EngineConfig."""
        return _given(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The parameters of SamplingParams that are the same for every answer."""

    max_tokens: Annotated[int | None, _sampling("max_tokens", "Most tokens of an answer.")] = None
    temperature: Annotated[
        float | None, _sampling("temperature", "How freely to draw; 0: always the likeliest token.")
    ] = None
    top_k: Annotated[int | None, _sampling("top_k", "Draw among the k likeliest tokens; 0: all.")] = None
    top_p: Annotated[
        float | None, _sampling("top_p", "Draw among the likeliest whose probabilities first reach p.")
    ] = None
    min_p: Annotated[
        float | None, _sampling("min_p", "Leave out tokens less likely than this part of the likeliest.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _sampling("repetition_penalty", "Over 1: tokens that were there come less often again.")
    ] = None
    seed: Annotated[int | None, _sampling("seed", "Same seed, same tokens, whatever runs beside.", "random")] = None
    stop: Annotated[
        list[str] | None, _sampling("stop", "End the answer before this text; may be given more than once.", "none")
    ] = None
    ignore_eos: Annotated[
        bool | None, _sampling("ignore_eos", "Go on past the end-of-sequence token.", "off", "--ignore-eos")
    ] = None

    def given(self) -> dict[str, Any]:
        """The parameters that were given, by their names in SamplingParams."""
        return _given(self)


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """SamplingParams from what was given over the command line's defaults. Raises RequestError for a bad value."""
    return SamplingParams(**{**SAMPLING_DEFAULTS, **given})


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every parameter whose type is a dataclass shown to typer as one option for each field."""
    # not get_type_hints, which in Python 3.10 hides an Annotated whose default is None within an Optional
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    kinds = {p.name: p.annotation for p in parameters if isinstance(p.annotation, type)}
    groups = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}
    shown: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name in groups:
            shown += _as_parameters(groups[parameter.name])
        else:
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def flat(**values: Any) -> None:
        for text in _texts(values):
            require_utf8(text)
        for name, kind in groups.items():
            values[name] = kind(**{f.name: values.pop(f.name) for f in fields(kind)})
        command(**values)

    flat.__name__, flat.__doc__, flat.__module__ = command.__name__, _reflowed(command), command.__module__
    flat.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return flat


def _texts(values: dict[str, Any]) -> Iterator[str]:
    """Whatever text was given, but for names of files, whose bytes need be no text."""
    for name, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and name != "model":
                yield item


def _reflowed(command: Callable[..., None]) -> str:
    """Its docstring with each paragraph on one line, for typer to wrap at the terminal's width."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(text if text.startswith(" ") else " ".join(text.split()) for text in paragraphs)


def _as_parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=f.default,
            annotation=hints[f.name],
        )
        for f in fields(group)
    ]


def _given(group: Any) -> dict[str, Any]:
    values = {f.name: getattr(group, f.name) for f in fields(group)}
    return {name: value for name, value in values.items() if value not in (None, [], ())}

"""`octavo generate`: answer prompts from the command line, a file or a pipe. Knows no engine and no views inside."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import DEFAULT_MODEL, EngineOptions, Model, SamplingOptions, sampling_params, with_default
from octavo.cli.session import can_chat, note, note_full_pool, open_llm
from octavo.cli.streams import STDIN, named
from octavo.errors import OctavoError, RequestError
from octavo.params import BeamParams, SamplingParams

if TYPE_CHECKING:
    from octavo.cli.display import View
    from octavo.llm import LLM

Prompts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT", help="What to answer. None given: the whole of standard input.", show_default=False
    ),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        exists=True,
        dir_okay=False,
        help="More prompts, one a line, after those of the command line; empty lines are skipped.",
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help=with_default(
            "Put each prompt into the model's chat template, or continue the bare text.",
            "chat if the model has a template",
        ),
        show_default=False,
    ),
]
System = Annotated[str | None, typer.Option("--system", help="A system message before each prompt (with --chat).")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a prompt: texts, token ids, counts, timings.")]
Samples = Annotated[
    int | None,
    typer.Option(
        "--n", "-n", help=with_default("Answers to each prompt.", "1"), show_default=False, rich_help_panel="Sampling"
    ),
]
BestOf = Annotated[
    int | None,
    typer.Option(
        "--best-of",
        help=with_default("Draw so many answers, and keep the n of the highest mean log-probability.", "n"),
        show_default=False,
        rich_help_panel="Sampling",
    ),
]
Beam = Annotated[
    int | None,
    typer.Option("--beam", metavar="WIDTH", help="Beam search instead of sampling.", rich_help_panel="Sampling"),
]


def generate(
    prompts: Prompts = None,
    model: Model = DEFAULT_MODEL,
    file: File = None,
    chat: Chat = None,
    system: System = None,
    as_json: Json = False,
    n: Samples = None,
    best_of: BestOf = None,
    beam: Beam = None,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Answer one prompt or many at once; the text streams as it is made.

    One answer goes to standard output as bare text. Several are shown side by side on a terminal, and one after
    another in a pipe, in the order of the prompts: those of the command line come before those of --file.

    [bold]Examples[/bold]

      octavo generate "Why is the sky blue?"

      octavo generate "Once upon a time" --raw --n 3 --seed 7

      octavo generate --file prompts.txt --temperature 0 --json > answers.jsonl

      git diff | octavo generate --system "Describe this change in one sentence."

      octavo generate "Translate to French: good morning" --beam 4
    """
    params = _params(sampling, n=n, best_of=best_of, beam=beam)
    texts = _texts(prompts or [], file)
    if system is not None and chat is False:
        raise RequestError("--system needs the chat template, which --raw leaves out.")
    llm = open_llm(model, engine)
    asked = as_messages(llm, texts, chat, system, model)
    if as_json:
        _print_json(llm, asked, params)
    else:
        _stream(llm, asked, texts, params)


def as_messages(llm: LLM, texts: list[str], chat: bool | None, system: str | None, model: str) -> list[Any]:
    """Each text as a conversation, or as it is where no chat template is wanted or (chat=None) there is none.

    Raises RequestError where a conversation is asked of a model without a template.
    """
    if chat is None and system is None:
        chat = can_chat(llm)
    if chat is False:
        return list(texts)
    if not can_chat(llm):
        raise RequestError(f"{model} has no chat template; use --raw to continue the bare text.")
    before = [] if system is None else [{"role": "system", "content": system}]
    return [[*before, {"role": "user", "content": text}] for text in texts]


def _params(sampling: SamplingOptions, **more: int | None) -> SamplingParams | BeamParams:
    given = sampling.given() | {name: value for name, value in more.items() if value is not None}
    width = given.pop("beam", None)
    if width is None:
        return sampling_params(given)
    unfit = sorted(given.keys() - {"max_tokens", "ignore_eos", "n"})
    if unfit:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unfit)
        raise RequestError(f"--beam draws nothing at random and has no stop texts, so it cannot be used with {flags}.")
    return BeamParams(width=width, **{"n": 1, **given})


def _texts(prompts: list[str], file: Path | None) -> list[str]:
    texts = list(prompts)
    if file is not None:
        with named(file):
            texts += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not texts:
            raise RequestError(f"{file} has no prompts; it should hold one a line.")
    elif not texts and not sys.stdin.isatty():
        with named(STDIN):
            texts = [text] if (text := sys.stdin.read().rstrip("\n")) else []
    if not texts:
        raise RequestError('There is no prompt; write one after the command, as in: octavo generate "Tell me a joke".')
    return texts


def _print_json(llm: LLM, asked: list[Any], params: SamplingParams | BeamParams) -> None:
    from octavo.cli.results import as_dict

    outputs = llm.generate(asked, params)
    for output in outputs:
        print(json.dumps(as_dict(output), ensure_ascii=False))
    note_full_pool(dict(enumerate(outputs)), llm)


def _stream(llm: LLM, asked: list[Any], texts: list[str], params: SamplingParams | BeamParams) -> None:
    from octavo.cli.endings import out_of_tokens

    answers = (params.n or params.width) if isinstance(params, BeamParams) else params.n
    view = _view(texts, answers)
    grows = params.num_samples == answers  # otherwise the answers are chosen at the end
    failed, ended = None, {}
    for outputs in llm.stream(asked, params):
        for index, output in outputs:
            failed = failed or output.error
            if grows or output.finished:
                view.update(index, output)
            if output.finished:
                ended[index] = output
    view.close()
    note_full_pool(ended, llm)
    if sys.stderr.isatty():
        note(out_of_tokens(ended, params.max_tokens))
    if failed:
        raise OctavoError(failed)


def _view(texts: list[str], n: int) -> View:
    from rich.console import Console

    from octavo.cli.display import Board, InOrder, Solo, title_of

    if len(texts) * n == 1:
        return Solo()
    titles = [title_of(text) for text in texts]
    console = Console()
    return Board(titles, console) if Board.fits(len(texts), console) else InOrder(titles)

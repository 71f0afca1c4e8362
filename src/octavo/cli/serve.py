"""`octavo serve`: a model behind OpenAI's API, with metrics and the memory page. Knows no routes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import DEFAULT_MODEL, EngineOptions
from octavo.cli.session import note, open_async_llm
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.server.settings import ServerSettings

ServedModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="A built-in name, a GGUF file, a model folder or a Hugging Face id.")
]
Host = Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0: all of this machine's.")]
Port = Annotated[int, typer.Option(help="0: any that is free.")]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar="OCTAVO_API_KEY",
        help="Ask clients for this key; may be given more than once. The environment shows it to fewer eyes.",
        show_default="none",
        show_envvar=True,
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", help="What clients call the model; may be given more than once."),
]
Origins = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", help="Let web pages of this origin ask (CORS); may be given more than once."),
]
Queued = Annotated[int, typer.Option(help="Sequences that may wait beside those that run; more get 429.")]
Timeout = Annotated[float, typer.Option(help="Seconds a request may take, waiting included; 0: no limit.")]
Drain = Annotated[float, typer.Option(help="Seconds that running requests have after SIGTERM or Ctrl-C.")]
Interval = Annotated[
    float,
    typer.Option(help="Seconds that tokens of a stream may wait for the next, where very many are sent; 0: none."),
]
Body = Annotated[str, typer.Option(help="The largest body of a request.")]
Format = Annotated[str, typer.Option(help="Logs, on standard error, as text or json.")]
Level = Annotated[str, typer.Option(help="debug, info, warning or error; debug shows health checks and scrapes too.")]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Write prompts and answers into the log.")]


def serve(
    model: ServedModel = DEFAULT_MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Keys = None,
    served_model_name: Names = None,
    allow_origin: Origins = None,
    max_queued: Queued = 512,
    request_timeout: Timeout = 0.0,
    drain_timeout: Drain = 60.0,
    stream_interval: Interval = 0.1,
    max_body: Body = "8MiB",
    log_format: Format = "text",
    log_level: Level = "info",
    log_prompts: LogPrompts = False,
    *,
    engine: EngineOptions,
) -> None:
    """Serve a model: OpenAI's API under /v1, metrics at /metrics, and a page at / that shows the KV memory.

    [bold]Examples[/bold]

      octavo serve

      octavo serve model.gguf --port 8080 --kv-memory 4GiB

      OCTAVO_API_KEY=secret octavo serve --host 0.0.0.0
    """
    from octavo.config import parse_bytes

    try:
        from octavo.server.logs import configure
        from octavo.server.run import bind
        from octavo.server.run import serve as run
        from octavo.server.settings import ServerSettings
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Serving needs the module {error.name}, which is not installed; pip install 'octavo[server]'."
        ) from None
    configure(log_format, log_level)  # type: ignore[arg-type]  # it says what there is
    settings = ServerSettings(
        model_names=tuple(served_model_name or [_name_of(model)]),
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(allow_origin or ()),
        max_queued=max_queued,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        stream_interval=stream_interval,
        max_body_bytes=parse_bytes(max_body),
        log_prompts=log_prompts,
    )
    listening = bind(settings)  # before the model is loaded: a port in use is found at once
    url = _url(settings, listening.getsockname()[1])
    llm = open_async_llm(model, engine)
    _note_open_door(settings)
    _note_small_pool(llm)
    run(
        llm, settings, listening, lambda: note(f"serving {settings.model_names[0]} at {url} (memory page) and {url}/v1")
    )


def _note_open_door(settings: ServerSettings) -> None:
    """Say so where anybody in the network may ask."""
    if settings.host not in ("127.0.0.1", "localhost", "::1") and not settings.api_keys:
        note("anybody who reaches this address may ask and watch; --api-key would keep them out.")


def _note_small_pool(llm: AsyncLLM) -> None:
    """Say so where memory, not the model, bounds a request."""
    context = llm.context
    if llm.max_model_len < context:
        note(
            f"all KV blocks hold {llm.max_model_len:,} tokens, fewer than the context of {context:,}: no request may "
            "have more; raise --kv-memory or --num-blocks."
        )


def _name_of(model: str) -> str:
    """A file by its name, without the path of this machine; all else as it was called."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name if path.exists() else model


def _url(settings: ServerSettings, port: int) -> str:
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"

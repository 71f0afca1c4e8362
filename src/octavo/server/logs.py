"""Structured logs: a line for each HTTP request and each request of the engine, under one id. Knows no routes.

Never the text of a prompt or an answer, unless asked; never a query string, which may hold a key. What came from
outside is quoted, so that nobody can forge a line.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, get_args
from uuid import uuid4

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.outputs import RequestOutput
    from octavo.server.metrics import Metrics

Format = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
LONGEST_ID = 128  # characters

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

request_id: ContextVar[str] = ContextVar("request_id", default="")  # of the HTTP request being answered

http_logger = logging.getLogger("octavo.http")
engine_logger = logging.getLogger("octavo.requests")

_VALID_ID = re.compile(rf"[!-~]{{1,{LONGEST_ID}}}")
_BARE = re.compile(r"[\w.:/+@%-]+", re.ASCII)  # values that need no quotes in a line of text


def configure(format: Format = "text", level: str = "info") -> None:
    """Send the logs of Octavo and of uvicorn to standard error, as lines of text or as JSON objects.

    Start uvicorn with `log_config=None, access_log=False`, or it takes its own away again and logs each request twice.
    Raises ConfigError for a format or a level that there is not.
    """
    if format not in get_args(Format):
        raise ConfigError(f"The log format is {format!r}; it must be {' or '.join(get_args(Format))}.")
    if level not in LEVELS:
        raise ConfigError(f"The log level is {level!r}; it must be one of {', '.join(LEVELS)}.")
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Stderr)]:
        root.removeHandler(old)
    handler = _Stderr()
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root.addHandler(handler)
    for name in ("octavo", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class _Stderr(logging.StreamHandler[Any]):
    """Our own handler, to be known again."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id if there is one, and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= _fields(record)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)  # ASCII: no terminal is driven by it


class TextFormatter(logging.Formatter):
    """One line for people: time, level, logger, message, then key=value; a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        pairs = [f"{key}={_quoted(value)}" for key, value in _fields(record).items()]
        message = _printable(record.getMessage())
        line = " ".join([_time(record), f"{record.levelname:7}", f"{record.name}:", message, *pairs])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    name = request_id.get()
    return {**({"request_id": name} if name else {}), **getattr(record, "fields", {})}


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _printable(text: str) -> str:
    """The text on one line, control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def log_finished(
    output: RequestOutput | None, *, engine_id: str = "", aborted: bool = False, log_prompts: bool = False
) -> None:
    """A line on a request of the engine that has ended; the arguments are those of Metrics.observe_finished.

    `engine_id` names it where there is no output; `log_prompts` adds what was asked and answered.
    """
    fields: dict[str, Any] = {"engine_id": engine_id}
    reasons: list[str] = []
    if output is not None:
        fields = _facts(output)
        reasons = list(dict.fromkeys(c.finish_reason for c in output.completions if c.finish_reason is not None))
        if log_prompts:
            fields["prompt"] = output.prompt if output.prompt is not None else output.prompt_token_ids
            fields["answers"] = [completion.text for completion in output.completions]
    failed = output is not None and output.error is not None
    fields["finish_reason"] = "abort" if aborted or output is None else ",".join(reasons)
    engine_logger.log(logging.ERROR if failed else logging.INFO, "request ended", extra={"fields": fields})


def _facts(output: RequestOutput) -> dict[str, Any]:
    times = output.timings
    end = time.perf_counter() if times.finished is None else times.finished
    facts: dict[str, Any] = {
        "engine_id": output.request_id,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.cached_tokens,
        "completion_tokens": output.output_tokens,
        "preemptions": output.preemptions,
        "seconds": round(end - times.arrived, 6),
    }
    if times.ttft is not None:
        facts["ttft"] = round(times.ttft, 6)
    if output.error is not None:
        facts["error"] = output.error
    return facts


class RequestLog:
    """ASGI middleware around the whole application: gives each HTTP request its id, its line and its place in Metrics.

    The id is the client's X-Request-Id if that is 1 to 128 printable ASCII characters without spaces, else a new one;
    it is in `request_id` while the request is answered and in the answer's X-Request-Id. The line is written when the
    last byte is out or the client is gone; those of paths that begin as `quiet` says at level debug.
    """

    def __init__(
        self,
        app: App,
        metrics: Metrics | None = None,
        *,
        quiet: tuple[str, ...] = ("/health", "/metrics", "/memory/", "/page/"),
    ) -> None:
        self.app = app
        self.metrics = metrics
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(_id_of(scope), receive, send)
        token = request_id.set(exchange.id)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except Exception:
            exchange.failed = True
            raise
        finally:
            self._note(scope, exchange)
            request_id.reset(token)

    def _note(self, scope: Scope, exchange: _Exchange) -> None:
        method, path = scope.get("method", "WEBSOCKET"), scope["path"]
        status = exchange.final_status
        fields = {
            "method": method,
            "path": path,
            "status": status,
            "seconds": round(time.perf_counter() - exchange.began, 6),
            "bytes": exchange.bytes_sent,
        }
        if exchange.client_left:
            fields["client_left"] = True
        if exchange.failed:
            fields["failed"] = True
        if scope.get("client"):
            fields["client"] = scope["client"][0]
        level = logging.DEBUG if path.startswith(self._quiet) and status < 400 else logging.INFO
        if status >= 500 or exchange.failed:
            level = logging.ERROR
        http_logger.log(level, "request answered", extra={"fields": fields})
        if self.metrics is not None and scope["type"] == "http":
            self.metrics.observe_http(method, _template(scope), status)


class _Exchange:
    """One request and its answer, as they pass by."""

    def __init__(self, name: str, receive: Receive, send: Send) -> None:
        self.id = name
        self.began = time.perf_counter()
        self.status: int | None = None  # None: no answer has begun
        self.bytes_sent = 0
        self.failed = False  # the application raised
        self._complete = False
        self._disconnected = False
        self._receive, self._send = receive, send

    @property
    def client_left(self) -> bool:
        """Whether it left before the answer's end."""
        return self._disconnected and not self._complete

    @property
    def final_status(self) -> int:
        """The answer's status; where there was none, 499 if the client left (nginx's number) and else 500."""
        if self.status is not None:
            return self.status
        return 499 if self._disconnected else 500

    async def receive(self) -> Message:
        """Pass on what comes, and see the client leave."""
        message = await self._receive()
        self._disconnected |= message["type"] == "http.disconnect"  # as it also is told once the answer is complete
        return message

    async def send(self, message: Message) -> None:
        """Pass on what goes, the id with the answer's head."""
        kind = message["type"]
        if kind == "websocket.close" and self.status is None:
            self.status = 403  # refused: what the server answers the handshake with
        if kind in ("http.response.start", "websocket.accept"):
            self.status = message.get("status", 101)
            headers = [(key, value) for key, value in message.get("headers", ()) if key.lower() != b"x-request-id"]
            message = {**message, "headers": [*headers, (b"x-request-id", self.id.encode("ascii"))]}
        elif kind == "http.response.body":
            self.bytes_sent += len(message.get("body", b""))
        await self._send(message)
        if kind == "http.response.body" and not message.get("more_body", False):
            self._complete = True


def _id_of(scope: Scope) -> str:
    for key, value in scope["headers"]:
        if key == b"x-request-id":
            text = value.decode("latin-1")
            if _VALID_ID.fullmatch(text):
                return str(text)
    return uuid4().hex


def _template(scope: Scope) -> str:
    """The route's template, such as /v1/models/{model}; "other" where no route was found, whatever was asked for."""
    return str(getattr(scope.get("route"), "path", "other"))

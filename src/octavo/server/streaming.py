"""Sending answers while the client is there: server-sent events, and stopping at once when it leaves. Knows no engine.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ClientGone, from_exception
from octavo.server.race import unless

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One event that holds JSON."""
    return b"data: " + encoded(data) + b"\n\n"


def encoded(data: Any) -> bytes:
    """JSON, as short as it can be. This is done for every token of every client."""
    try:
        return orjson.dumps(data)
    except TypeError:  # a lone surrogate, as an id that a client made up may have
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves meanwhile. Raises ClientGone then."""
    return await unless(_left(request.receive), work, ClientGone)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come. What fails after the first of them ends the stream with an error event."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self.background = None
        self.status_code = 200
        self._first, self._rest = first, rest
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless(_left(receive), self._send_all(send), ClientGone)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with contextlib.aclosing(self._rest) as rest:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for data in rest:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            data = event(from_exception(error).body()) + DONE
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def begun(request: Request, events: AsyncGenerator[bytes, None]) -> EventStream:
    """The stream, once its first event is there: until then a failure is an HTTP error with a status of its own."""
    try:
        return EventStream(await unless_gone(request, anext(events)), events)
    except BaseException:
        await events.aclose()
        raise

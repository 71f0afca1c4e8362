"""The memory page over HTTP: its files, a snapshot, one block, one request, and a stream of what changes.

Knows JSON and server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html); what there is to
see comes from `memory_view`. Whoever serves these routes decides who may see them: prompts and answers are in them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse

from octavo.async_llm import AsyncLLM
from octavo.engine.engine import Engine
from octavo.errors import OctavoError
from octavo.loading.tokenizer import Tokenizer
from octavo.server.errors import ApiError
from octavo.server.memory_view import (
    BlockDetail,
    Figures,
    MemoryWatch,
    RequestDetail,
    RequestRow,
    Sample,
    Unknown,
    block_detail,
    request_detail,
)
from octavo.server.shapes import errors

T = TypeVar("T")

logger = logging.getLogger(__name__)

INTERVAL = 1 / 15  # seconds between samples while the engine works
IDLE_INTERVAL = 0.2  # while nothing changes
HEARTBEAT = 1.0  # at least so often something is sent, if only to show that the line is alive
LONGEST = 0.5  # between two samples, however dear they are
MOST_COST = 0.01  # of the engine's time may go into samples: where they are dear, there are fewer

PAGE_FILES = {
    "page.css": "text/css",
    "main.js": "text/javascript",
    "dom.js": "text/javascript",
    "feed.js": "text/javascript",
    "field.js": "text/javascript",
    "story.js": "text/javascript",
    "table.js": "text/javascript",
    "charts.js": "text/javascript",
    "ask.js": "text/javascript",
}
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class MemoryFeed:
    """One sample for all who look: taken only while somebody does, encoded once, sent to each as fast as they read.

    Who reads too slowly is not sent what he missed but a snapshot of now. Belongs to one event loop.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._readers: set[_Reader] = set()
        self._pump: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def readers(self) -> int:
        """Pages that look now."""
        return len(self._readers)

    async def messages(self) -> AsyncIterator[bytes]:
        """Server-sent events: a "snapshot", then a "delta" for each sample, until the feed or the engine closes."""
        if self._closed:
            return
        reader = _Reader()
        self._readers.add(reader)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            while (message := await reader.next()) is not None:
                yield message
        finally:
            self._readers.discard(reader)
            if not self._readers and self._pump is not None:
                self._pump.cancel()
                self._pump = None

    def close(self) -> None:
        """End all streams: a server that is to shut down would wait for them for ever."""
        self._closed = True
        for reader in self._readers:
            reader.end()

    async def _run(self) -> None:
        watch = MemoryWatch()
        try:
            await self._call(watch.install)
            await self._sample_for_ever(watch)
        except Exception as error:
            if not isinstance(error, OctavoError):  # else the engine is closed: there is nothing more to see
                logger.exception("The memory page's samples failed.")
            for reader in self._readers:
                reader.end()
        finally:
            with contextlib.suppress(OctavoError):
                self._llm.call(watch.remove)

    async def _sample_for_ever(self, watch: MemoryWatch) -> None:
        clock = asyncio.get_running_loop().time
        sent = -HEARTBEAT
        while True:
            begin = clock()
            sample = await self._call(watch.sample)
            if _tells_something(sample) or begin - sent >= HEARTBEAT:
                sent = begin
                news = _News(sample)
                for reader in self._readers:
                    reader.put(news)
            wanted = INTERVAL if sample.figures.steps or sample.figures.running else IDLE_INTERVAL
            await asyncio.sleep(max(wanted - (clock() - begin), min(watch.cost / MOST_COST, LONGEST), 0.0))

    async def _call(self, function: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self._llm.call(function))


def _tells_something(sample: Sample) -> bool:
    return bool(sample.figures.steps or sample.events or len(sample.changed) or len(sample.host_changed))


class _News:
    """A sample as bytes, made once, whoever asks."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._bytes: dict[str, bytes] = {}

    def delta(self) -> bytes:
        return self._made("delta", delta_json)

    def snapshot(self) -> bytes:
        return self._made("snapshot", snapshot_json)

    def _made(self, name: str, body: Callable[[Sample], dict[str, Any]]) -> bytes:
        if name not in self._bytes:
            text = json.dumps(body(self._sample), separators=(",", ":"))
            self._bytes[name] = f"event: {name}\ndata: {text}\n\n".encode()
        return self._bytes[name]


class _Reader:
    """Holds the newest sample until it is sent; if one was overwritten, a snapshot is due instead of a delta."""

    def __init__(self) -> None:
        self._news: _News | None = None
        self._behind = True
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, news: _News) -> None:
        self._behind = self._behind or self._news is not None
        self._news = news
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """What to send next; None: nothing more comes."""
        await self._changed.wait()
        self._changed.clear()
        if self._ended or self._news is None:
            return None
        message = self._news.snapshot() if self._behind else self._news.delta()
        self._news, self._behind = None, False
        return message


# dataclasses.asdict copies deeply, which 15 times a second for 32 requests would cost more than the sample itself.
_FIGURES, _ROW = tuple(Figures.__dataclass_fields__), tuple(RequestRow.__dataclass_fields__)
_figures_of, _row_of = attrgetter(*_FIGURES), attrgetter(*_ROW)


def _common(sample: Sample) -> dict[str, Any]:
    return {
        "number": sample.number,
        "time": round(sample.time, 4),
        "figures": {name: round(value, 4) for name, value in zip(_FIGURES, _figures_of(sample.figures), strict=True)},
    }


def _requests(sample: Sample) -> dict[str, Any]:
    rows = [dict(zip(_ROW, _row_of(row), strict=True)) for row in sample.requests]
    return {"requests": rows, "more_requests": sample.more_requests}


def snapshot_json(sample: Sample) -> dict[str, Any]:
    """All of it. `cells` and `host` are base64 of little-endian uint32, a block each (see `octavo.kv.report.cells`)."""
    return {
        "geometry": asdict(sample.geometry),
        "cells": base64.b64encode(sample.cells.astype("<u4").tobytes()).decode(),
        "host": base64.b64encode(sample.host.astype("<u4").tobytes()).decode(),
        **_common(sample),
        **_requests(sample),
    }


def delta_json(sample: Sample) -> dict[str, Any]:
    """What changed: `cells` and `host` are [block, cell, block, cell, ...]; `events` as they happened.

    `requests` and `more_requests` are there a few times a second; where they are not, they are as before.
    """
    return {
        "cells": np.stack((sample.changed, sample.cells[sample.changed]), 1).ravel().tolist(),
        "host": np.stack((sample.host_changed, sample.host[sample.host_changed]), 1).ravel().tolist(),
        "events": sample.events,
        "dropped": sample.dropped,
        **_common(sample),
        **(_requests(sample) if sample.listed else {}),
    }


def block_json(detail: BlockDetail, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A block, with its tokens as people read them."""
    holders = [holder._asdict() for holder in detail.holders]
    return {**asdict(detail), "holders": holders, **_readable(detail.token_ids, tokenizer)}


def request_json(detail: RequestDetail, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A request, with its texts."""
    sequences = []
    for seq in detail.sequences:
        shared = [
            {"logical": s.logical, "block": s.block, "others": [holder._asdict() for holder in s.others]}
            for s in seq.shared
        ]
        text = None if tokenizer is None else tokenizer.decode(seq.output_token_ids)
        sequences.append({**asdict(seq), "shared": shared, "text": text})
    prompt = detail.prompt
    if prompt is None and tokenizer is not None:
        prompt = tokenizer.decode(detail.prompt_token_ids, skip_special_tokens=False)
    body = asdict(detail)
    return {**body.pop("row"), **body, "prompt": prompt, "sequences": sequences}


def _readable(ids: list[int], tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        return {"text": None, "pieces": None}
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return {"text": text, "pieces": [tokenizer.token_text(token) for token in ids]}


def memory_router(llm: AsyncLLM, feed: MemoryFeed | None = None) -> APIRouter:
    """The routes of the page: `/` and `/page/*` hold no secrets; `/memory/*` is for those who may read prompts.

    `feed.close()` ends the streams of all pages that are open; call it when the server is to stop.
    """
    router = APIRouter(tags=["memory"])
    feed = MemoryFeed(llm) if feed is None else feed

    async def ask(function: Callable[[Engine], T]) -> T:
        try:
            return await asyncio.wrap_future(llm.call(function))
        except Unknown as error:
            raise ApiError(404, str(error), code="not_found") from None

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return _file("index.html", "text/html")

    @router.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise ApiError(404, f"The page has no file {name!r}.", code="not_found")
        return _file(name, PAGE_FILES[name])

    @router.get("/memory/snapshot", responses=errors(401, 503))
    async def snapshot() -> dict[str, Any]:
        """Every block, the figures and the requests, now."""
        return snapshot_json(await ask(MemoryWatch().sample))

    @router.get("/memory/blocks/{block}", responses=errors(400, 401, 404, 503))
    async def block(block: int) -> dict[str, Any]:
        """One physical block: holders, tokens, hash chain."""
        detail = await ask(partial(block_detail, block=block))
        return await asyncio.to_thread(block_json, detail, llm.tokenizer)

    @router.get(
        "/memory/requests/{request_id:path}",
        response_model=None,
        responses={204: {"description": "It ended."}, **errors(400, 401, 404, 503)},
    )
    async def request(request_id: str, ended: bool = False) -> dict[str, Any] | Response:
        """One request that runs or waits: its block tables, with whom each block is shared, its progress and texts.

        With `ended`, one that is not here (any more) is no error, but answered with 204.
        """
        try:
            detail = await ask(partial(request_detail, request_id=request_id))
        except ApiError:
            if ended:
                return Response(status_code=204)
            raise
        return await asyncio.to_thread(request_json, detail, llm.tokenizer)

    @router.get("/memory/events", response_class=StreamingResponse)
    async def events() -> StreamingResponse:
        """Server-sent events: one "snapshot", then "delta"s, at most 15 a second."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(feed.messages(), media_type="text/event-stream", headers=headers)

    return router


def _file(name: str, media_type: str) -> Response:
    body = (files("octavo.server") / "static" / name).read_bytes()
    return Response(body, media_type=f"{media_type}; charset=utf-8", headers=PAGE_HEADERS)

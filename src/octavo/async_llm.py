"""The asynchronous face: each request is an async stream; the engine runs in a thread of its own. Knows no HTTP.

All calls reach the engine through one inbox that its thread empties between steps, so the engine needs no locks, and
neither the event loop nor the engine ever waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from octavo.config import EngineConfig
from octavo.engine.constraint import Constraint
from octavo.engine.engine import Engine
from octavo.engine.report import MemoryReport
from octavo.engine.request import Request, State
from octavo.errors import OctavoError
from octavo.llm import Params, Prompt, load_engine, make_config, tokenize
from octavo.loading.tokenizer import Tokenizer
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Pace(Protocol):
    """When the readers of an event loop's streams are woken."""

    waits_until: float  # time.monotonic() before which it wakes nobody whose news is not urgent

    def wake(self, stream: Stream) -> None:
        """Called on the event loop when there is news: wake the stream, now or later."""
        ...


class Stream:
    """What becomes of requests handed in together, on its way from the engine's thread to a reader on an event loop.

    Of states that nobody has read yet, cumulative ones (which tell all so far, of one request) replace each other,
    deltas add up. With a pace, which is for deltas, the reader may have to wait, unless the news is `urgent`: the
    first, or an end.
    """

    def __init__(self, deltas: bool, pace: Pace | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.urgent = True
        self._pace = pace
        self._reader: asyncio.Future[None] | None = None  # waits for news
        self._deltas = deltas
        self._unread: deque[RequestOutput] = deque(maxlen=None if deltas else 1)
        self._fault: BaseException | None = None

    def put(self, request: Request) -> None:
        """Called by the engine's thread, which has the event loop `tell` afterwards."""
        self._unread.append(request.news() if self._deltas else request.output())
        if request.state is State.FINISHED:
            self.urgent = True

    def waits(self, until: float) -> bool:
        """Whether news of a request that goes on would wait until then, time.monotonic(), if it were put now."""
        return self._pace is not None and not self.urgent and until < self._pace.waits_until

    def fail(self, error: BaseException) -> None:
        """Called likewise, where no more can be put."""
        self._fault, self.urgent = error, True

    def tell(self) -> None:
        """There is news."""
        if self._pace is None:
            self.wake()
        else:
            self._pace.wake(self)

    def wake(self) -> None:
        """Let the reader read now."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> list[RequestOutput]:
        """What was put since the last `get`, one output for each request there is news of. For one reader at a time.

        Raises what the stream failed with. There is nothing to wait for once all requests are `finished`.
        """
        while not self._unread:
            if self._fault is not None:
                raise self._fault
            self._reader = self.loop.create_future()
            await self._reader
        self.urgent = False
        first = self._unread.popleft()
        news = {first.request_id: first}
        while self._unread:
            output = self._unread.popleft()
            known = news.setdefault(output.request_id, output)
            if known is not output:
                known.extend(output)
        return list(news.values())


def _tell_soon(loop: asyncio.AbstractEventLoop, streams: Iterable[Stream]) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is there to read
        loop.call_soon_threadsafe(_tell, streams)


def _tell(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.tell()


class AsyncLLM:
    """A model ready to answer many callers at once, from any number of event loops and threads.

    Arguments and errors are those of LLM. `close()` ends the engine's thread; also `async with`.
    """

    def __init__(self, model: str | Path = "smollm2", *, config: EngineConfig | None = None, **settings: Any) -> None:
        self._engine = load_engine(model, make_config(config, settings))
        self._streams: dict[Request, Stream] = {}  # used by the engine's thread only
        self._held: dict[Request, None] = {}  # likewise: those whose news is not put yet, for it would wait
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: end
        self._closed = False
        self._pid = os.getpid()
        self._gate = threading.Lock()  # nothing enters the inbox after its None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, as the model was made or set up for it."""
        return self._engine.limits.max_model_len

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that can be served: the context's, or all blocks' if they are fewer."""
        return min(self.context, self._engine.kv.pool.num_blocks * self.config.block_size)

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs and takes requests."""
        return self._thread.is_alive() and not self._closed

    async def generate(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        deltas: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer to one prompt as it grows; the last item is `finished`.

        With `deltas` an item's completions tell only what is new since the item before, and those with nothing new are
        left out. A slow reader gets fewer, longer items. Leaving the loop, or cancelling the task, aborts the request.
        Raises RequestError before the first item for a request that can never be served.
        """
        stream = Stream(deltas)
        name = uuid4().hex if request_id is None else request_id
        async with self._feed(stream, [prompt], params, [name], priority, cache_salt):
            while True:
                for output in await stream.get():
                    yield output
                    if output.finished:
                        return

    @contextlib.asynccontextmanager
    async def open(
        self,
        prompts: Sequence[Prompt],
        params: Params | None = None,
        *,
        request_ids: Sequence[str],
        priority: int = 0,
        cache_salt: str = "",
        pace: Pace | None = None,
    ) -> AsyncIterator[Stream]:
        """A request for each of the prompts, whose deltas are read from one stream. All of them begin, or none does.

        This is `generate` for who counts microseconds. Leaving the block aborts what still runs. Raises RequestError
        where one of them can never be served.
        """
        stream = Stream(deltas=True, pace=pace)
        async with self._feed(stream, prompts, params, request_ids, priority, cache_salt):
            yield stream

    @contextlib.asynccontextmanager
    async def _feed(
        self,
        stream: Stream,
        prompts: Sequence[Prompt],
        params: Params | None,
        names: Sequence[str],
        priority: int,
        cache_salt: str,
    ) -> AsyncIterator[None]:
        """While the block lasts, what becomes of the prompts goes into the stream."""
        tokenized = [tokenize(self._engine.tokenizer, prompt) for prompt in prompts]
        params = SamplingParams() if params is None else params
        constraint = await self._compiled(params)
        requests: list[Request] = []

        def add(engine: Engine) -> None:
            try:
                for name, (text, ids) in zip(names, tokenized, strict=True):
                    request = engine.add_request(
                        name,
                        ids,
                        params,
                        prompt=text,
                        priority=priority,
                        cache_salt=cache_salt,
                        constraint=constraint,
                    )
                    requests.append(request)
                    self._streams[request] = stream
            except BaseException:
                self._drop(engine, requests)  # now, before a step begins
                raise

        try:
            await asyncio.wrap_future(self.call(add))
            yield
        finally:
            with contextlib.suppress(OctavoError):  # closed: everything is aborted already
                self.call(lambda engine: self._drop(engine, requests))

    async def _compiled(self, params: Params) -> Constraint | None:
        """The params' grammar, made ready on a thread of its own: it may take seconds."""
        if not isinstance(params, SamplingParams) or params.grammar is None:
            return None
        return await asyncio.to_thread(self._engine.constraints.compile, params.grammar)

    async def abort(self, request_id: str) -> bool:
        """End a request now; its stream ends with finish reason "abort". False if it is not running here."""
        return await asyncio.wrap_future(self.abort_soon(request_id))

    def abort_soon(self, request_id: str) -> Future[bool]:
        """The same, for callers that do not wait."""
        return self.call(lambda engine: self._abort(engine, request_id))

    async def memory_report(self) -> MemoryReport:
        """What the KV memory did since the model was loaded."""
        return await asyncio.wrap_future(self.call(Engine.memory_report))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Have the engine's thread run the function between two steps, and give what it returns or raises.

        Raises OctavoError once closed. The function must be short: no step begins meanwhile.
        """
        if os.getpid() != self._pid:
            raise OctavoError("This AsyncLLM was made before the process forked; make one in the child.")
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._engine))
            except BaseException as error:
                future.set_exception(error)

        with self._gate:
            if self._closed:
                raise OctavoError("This AsyncLLM is closed.")
            self._inbox.put(run)
        return future

    def close(self) -> None:
        """End the engine's thread; requests that still run end with finish reason "abort"."""
        self._shut()
        self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException:
            self._shut()
            self._empty_inbox()
            raise
        finally:
            self._end_all()

    def _work(self) -> None:
        engine, inbox = self._engine, self._inbox
        while True:
            while not engine.has_work or not inbox.empty():
                order = inbox.get()
                if order is None:
                    return
                order()
            if self._held and engine.scheduler.num_waiting:
                self._hand_out(())  # a step with a prompt may take long
            begin = time.monotonic()
            try:
                changed = engine.step()
            except Exception:  # the engine has ended all its requests with the reason, and can go on
                changed = list(self._streams)
            end = time.monotonic()
            self._hand_out(changed, math.inf if engine.scheduler.num_waiting else end + (end - begin))

    def _shut(self) -> None:
        with self._gate:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)

    def _empty_inbox(self) -> None:
        """After a fault that ended the thread: run what still waits, so that nobody waits for ever."""
        while (order := self._inbox.get()) is not None:
            order()

    def _end_all(self) -> None:
        requests = list(self._streams)
        with contextlib.suppress(Exception):  # after a fault the engine may be past even that
            for request in requests:
                self._engine.abort(request.id)
        self._hand_out(requests)
        self._fail(list(self._streams), OctavoError("The engine has ended."))

    def _hand_out(self, requests: Iterable[Request], until: float = math.inf) -> None:
        """Put the states of these requests, and of those held so far, into their streams; wake each event loop once.

        What would wait `until` the next step ends is held till then: the news of several steps costs the processors,
        which compute meanwhile, hardly more than that of one.
        """
        woken: dict[asyncio.AbstractEventLoop, dict[Stream, None]] = {}
        requests = {**self._held, **dict.fromkeys(requests)}
        self._held.clear()
        for request in requests:
            stream = self._streams.get(request)
            if stream is None:
                continue
            if request.state is not State.FINISHED and stream.waits(until):
                self._held[request] = None
                continue
            try:
                stream.put(request)
            except Exception as error:  # its text cannot be told; the others' can
                logger.exception("Request %s cannot be handed out, and ends.", request.id)
                self._fail([request], error)
                self._engine.abort(request.id)
                continue
            woken.setdefault(stream.loop, {})[stream] = None
            if request.state is State.FINISHED:
                del self._streams[request]
        for loop, streams in woken.items():
            _tell_soon(loop, streams)

    def _fail(self, requests: list[Request], error: BaseException) -> None:
        """End the requests' streams with an error."""
        for request in requests:
            stream = self._streams.pop(request)
            stream.fail(error)
            _tell_soon(stream.loop, [stream])

    def _abort(self, engine: Engine, request_id: str) -> bool:
        request = engine.abort(request_id)
        if request is not None:
            self._hand_out([request])
        return request is not None

    def _drop(self, engine: Engine, requests: list[Request]) -> None:
        """The reader has left: abort its requests that got in and still run."""
        for request in requests:
            self._streams.pop(request, None)
            self._held.pop(request, None)
            if request.state is not State.FINISHED:
                engine.abort(request.id)

"""A socket, signals, and the end: SIGTERM or Ctrl-C lets requests finish, a second one does not. Knows no routes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from octavo.async_llm import AsyncLLM
from octavo.errors import ConfigError
from octavo.server.app import build_app
from octavo.server.connection import Connection
from octavo.server.logs import RequestLog
from octavo.server.service import Service
from octavo.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_LAST_WORDS = 0.5  # seconds that a client has to read why its request was aborted
_KEEP_ALIVE = 75  # seconds; longer than the proxies in front usually wait, lest a request meet a closing connection


def bind(settings: ServerSettings) -> socket.socket:
    """A listening socket. Raises ConfigError where there can be none."""
    host, port = settings.host, settings.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as error:
        raise ConfigError(
            f"Nothing can listen at {host} port {port}: {error.strerror or error}; choose another --host or --port."
        ) from None
    return listening


def serve(llm: AsyncLLM, settings: ServerSettings, listening: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until told to end; returns when all is closed. `on_ready` is called once requests can come."""
    try:
        Server(llm, settings, on_ready).run(sockets=[listening])
    finally:
        llm.close()


class Server(uvicorn.Server):
    """uvicorn's, which drains as ours has to: no new request, open pages closed, a limit on how long it takes."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, on_ready: Callable[[], None]) -> None:
        app = build_app(llm, settings)
        self.service: Service = app.state.service
        self._close_pages, self._on_ready = app.state.feed.close, on_ready
        super().__init__(
            uvicorn.Config(
                RequestLog(app, self.service.metrics),
                http=Connection,
                log_config=None,
                log_level="warning",  # what it says of its own course, the lines here say better
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE,
                lifespan="off",
                ws="none",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        self.port = self.servers[0].sockets[0].getsockname()[1]
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close. Until the last request has ended, who comes is told that this server is on its way out."""
        self.service.draining.set()
        self._close_pages()
        limit = self._loop.call_later(self.service.settings.drain_timeout, self._end_requests)
        self._say_what_runs()
        try:
            while self.service.is_busy and not self.force_exit:
                await asyncio.sleep(0.05)
            await super().shutdown(sockets=sockets)
        finally:
            limit.cancel()

    def _say_what_runs(self) -> None:
        if self.service.is_busy:
            seconds = self.service.settings.drain_timeout
            logger.info(
                "draining: %d sequences still run or wait, for at most %g seconds; a second signal ends them",
                self.service.admission.inside,
                seconds,
            )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends."""
        if self.should_exit and self.started:
            self._loop.call_soon_threadsafe(self._end_requests)
        self.should_exit = True

    def _end_requests(self) -> None:
        """Abort what still runs. Its clients are told so; connections that then stay open are cut."""
        self.service.abort_all()
        self._loop.call_later(_LAST_WORDS, self._cut)

    def _cut(self) -> None:
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

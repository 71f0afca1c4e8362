"""A connection that does not wait for ever: bounds on a request's head and on how long a request takes to arrive.

Knows no HTTP beyond what uvicorn's parser tells of it.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 64 * 2**10  # bytes of a request's first line and headers
LONGEST_ARRIVAL = 120.0  # seconds from a connection's or a request's first byte to the last one of its body


class Connection(HttpToolsProtocol):
    """uvicorn's, closed where a request's head grows without end, or does not come to one in time.

    Without these bounds whoever sends a byte now and then, or one header after another, holds sockets and memory.
    """

    _head_bytes = 0  # of the request whose head has not ended
    _in_head = True
    _arriving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client is there, who may take so long to ask."""
        super().connection_made(transport)
        self._await_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless the head has become too long."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MOST_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The head of a request may have {MOST_HEAD} bytes.")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._await_rest()

    def on_headers_complete(self) -> None:
        """Its body may follow."""
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of it is there."""
        self._in_head, self._head_bytes = True, 0
        self._stop_waiting()
        super().on_message_complete()

    def _await_rest(self) -> None:
        self._stop_waiting()
        self._arriving = self.loop.call_later(LONGEST_ARRIVAL, self._give_up)

    def _stop_waiting(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _give_up(self) -> None:
        if self.pipeline:  # it is read no further, for the one before it is still being answered
            self._await_rest()
        else:
            self.transport.close()

"""What is checked before a request reaches a route: its key and its size. Pure ASGI, so that streams pass untouched."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import ApiError

# The page's own files hold nothing of anybody; health is for whoever watches over the process.
OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/")
OPEN_FOLDERS = ("/page/",)


class Guard:
    """Refuses with 401 who has no key (if there are any), with 413 a body of more than `max_body_bytes`."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            self._check_length(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        preflight = scope["method"] == "OPTIONS"  # a browser asks without a key whether it may ask with one
        if not self._digests or preflight or path in OPEN_PATHS or path.startswith(OPEN_FOLDERS):
            return
        given = _digest(_bearer(scope))
        # All are compared, in constant time: how long it takes tells nothing of how near a guess was.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_length(self, scope: Scope) -> None:
        said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if said.isdigit() and int(said[:20]) > self._max_body_bytes:
            raise self._too_large()

    def _counted(self, receive: Receive) -> Receive:
        """The same body, cut off with an error where it grows too large: one that is sent in chunks has no length."""
        size = 0

        async def counting() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise self._too_large()
            return message

        return counting

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body has more than {self._max_body_bytes} bytes.",
            code="body_too_large",
            headers={"Connection": "close"},
        )


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:].strip())
    return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

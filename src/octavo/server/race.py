"""Waiting for work that may become pointless meanwhile. Knows no HTTP and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def unless(ending: Awaitable[object], work: Awaitable[T], error: Callable[[], Exception]) -> T:
    """The result of `work`, if it is there before `ending` is; else `error()` is raised. Both are cancelled then."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(ending)
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error()
        return working.result()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)

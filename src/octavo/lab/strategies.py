"""How memory can be handed out to sequences: every strategy by name, and how its manager is made. Knows no time.

max, own, pow2 and oracle are what systems before PagedAttention did, by the names of Kwon et al. 2023, section 6.1:
Orca (Max) reserves the model's longest sequence, Orca (Pow2) the answer rounded up to a power of two, Orca (Oracle)
what is really needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.lab.arena import Arena
from octavo.lab.memory import Asked, Manager
from octavo.lab.memory_paged import Paged
from octavo.lab.memory_regions import Regions


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to hand out memory. `make(pool_slots, max_model_len, settings)` gives a manager of an empty pool."""

    name: str
    label: str  # for people
    settings: Mapping[str, Any]  # those it has, with their defaults
    make: Callable[[int, int, Mapping[str, Any]], Manager]
    resubmits: bool = False  # nothing outlives a step: every token is a request of its own


def make(name: str, pool_slots: int, max_model_len: int, **settings: Any) -> Manager:
    """The memory manager of a strategy. Raises RequestError for a name or a setting that does not exist."""
    return find(name).make(pool_slots, max_model_len, complete(name, settings))


def find(name: str) -> Strategy:
    """Raises RequestError for a name that does not exist."""
    if name not in ALL:
        raise RequestError(f"There is no strategy {name!r}; there are {', '.join(ALL)}.")
    return ALL[name]


def complete(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the defaults of those not given. Raises RequestError for one that does not exist or suit."""
    known = find(name).settings
    for key, value in settings.items():
        if key not in known:
            raise RequestError(f"The strategy {name!r} has no setting {key!r}; it has {', '.join(known)}.")
        if key == "fit" and value not in ("first", "best"):
            raise RequestError(f"fit is {value!r}; it must be 'first' or 'best'.")
        if key in ("block_size", "chunk") and not (isinstance(value, int) and value >= 1):
            raise RequestError(f"{key} is {value!r}; it must be a whole number of at least 1.")
    return {**known, **settings}


def _no_cache(pool_slots: int, max_model_len: int, settings: Mapping[str, Any]) -> Manager:
    return Paged(pool_slots // settings["block_size"], settings["block_size"], prefix_caching=False)


def _paged(pool_slots: int, max_model_len: int, settings: Mapping[str, Any]) -> Manager:
    block_size = settings["block_size"]
    if not settings["sharing"]:
        return Regions(Arena(pool_slots // block_size), block_size, max_model_len, unit=1)
    return Paged(
        pool_slots // block_size,
        block_size,
        copy_on_write=settings["copy_on_write"],
        prefix_caching=settings["prefix_caching"],
    )


def _chunks(pool_slots: int, max_model_len: int, settings: Mapping[str, Any]) -> Manager:
    block_size, chunk = settings["block_size"], settings["chunk"]
    if chunk % block_size:
        raise RequestError(f"chunk is {chunk}; it must be a multiple of block_size ({block_size}).")
    return Regions(
        Arena(pool_slots // chunk * (chunk // block_size)), block_size, max_model_len, unit=chunk // block_size
    )


def _doubling(pool_slots: int, max_model_len: int, settings: Mapping[str, Any]) -> Manager:
    return Regions(Arena(pool_slots // settings["block_size"], settings["fit"]), settings["block_size"], max_model_len)


def _reserving(slots: Callable[[Asked, int], int]) -> Callable[[int, int, Mapping[str, Any]], Manager]:
    """Contiguous, never growing: `slots(asked, max_model_len)` for each sequence, at most max_model_len."""

    def made(pool_slots: int, max_model_len: int, settings: Mapping[str, Any]) -> Manager:
        block_size = settings["block_size"]
        arena = Arena(pool_slots // block_size, settings["fit"])
        return Regions(arena, block_size, max_model_len, reserve=lambda a: min(max_model_len, slots(a, max_model_len)))

    return made


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


_RUN = {"block_size": 16, "fit": "first"}
ALL: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("none", "No cache", {"block_size": 16}, _no_cache, resubmits=True),
        Strategy("max", "Contiguous, the model's longest", _RUN, _reserving(lambda a, longest: longest)),
        Strategy("own", "Contiguous, the request's limit", _RUN, _reserving(lambda a, _: a.prompt + a.max_tokens)),
        Strategy(
            "pow2", "Contiguous, a power of two", _RUN, _reserving(lambda a, _: a.prompt + power_of_two(a.output))
        ),
        Strategy("oracle", "Contiguous, the true length", _RUN, _reserving(lambda a, _: a.prompt + a.output)),
        Strategy("doubling", "Contiguous, doubling", _RUN, _doubling),
        Strategy("chunks", "Fixed chunks", {"block_size": 16, "chunk": 256}, _chunks),
        Strategy(
            "paged",
            "Paged",
            {"block_size": 16, "sharing": True, "copy_on_write": True, "prefix_caching": True},
            _paged,
        ),
    )
}

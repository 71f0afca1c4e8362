"""Real traffic through the manager: memory is used to the full, nothing is lost, every shared prefix is found."""

from __future__ import annotations

import csv
import json
from collections import deque
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from octavo.kv import KVManager, Outcome

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


def trace(name: str, source: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"There is no ../shared/traces/{name}; get it from {source}.")
    return path


def azure(count: int) -> list[tuple[int, int]]:
    """(prompt tokens, generated tokens) of the first requests."""
    path = trace("azure_conv_2023.csv", "the Azure Public Dataset (Azure LLM inference trace 2023, conversation)")
    with path.open(newline="") as file:
        rows = islice(csv.DictReader(file), count)
        return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]


def mooncake(count: int) -> list[dict[str, Any]]:
    path = trace("mooncake_conversation.jsonl", "the Mooncake repository (FAST 2025 traces, conversation)")
    with path.open() as file:
        return [json.loads(line) for line in islice(file, count)]


def test_azure_conversations_fill_memory_and_lose_nothing() -> None:
    """2,000 requests: admit while there is room, one token a step, the latest gives way when one cannot grow."""
    manager = KVManager(4096, 16)
    requests = azure(2000)
    waiting = deque(range(len(requests)))
    texts: dict[int, list[int]] = {i: [i] * prompt for i, (prompt, _) in enumerate(requests)}
    running: list[int] = []
    utilisation, preemptions, steps = [], 0, 0
    while waiting or running:
        for i in running.copy():
            while i in running and not manager.grow(i):
                latest = running.pop()
                manager.free(latest)
                waiting.appendleft(latest)
                preemptions += 1
        growing = list(running)
        while waiting and manager.admit(waiting[0], texts[waiting[0]]).outcome is Outcome.ADMITTED:
            running.append(waiting.popleft())
        manager.take_ops()
        for i in running:
            if i in growing:
                texts[i].append(i)
            manager.commit(i, manager.length(i) - manager.computed(i), texts[i])
        if waiting:
            utilisation.append(manager.usage().utilisation)
        for i in [i for i in running if len(texts[i]) == sum(requests[i])]:
            running.remove(i)
            manager.free(i)
        steps += 1
        if steps % 500 == 0:
            manager.check()
    manager.check()
    assert all(len(texts[i]) == sum(request) for i, request in enumerate(requests))
    assert manager.pool.available == 4096
    assert preemptions > 0  # the pool was full, and full again
    assert len(utilisation) > 1000
    assert mean(utilisation) >= 0.96
    print(f"mean {mean(utilisation):.4f}, least {min(utilisation):.4f}, {preemptions} preemptions, {steps} steps")
    assert min(utilisation) >= 0.96


def test_mooncake_conversations_find_every_prefix_the_trace_shares() -> None:
    """500 requests, some running at once; `hash_ids` name 512-token blocks together with all before them."""
    requests = mooncake(500)
    manager = KVManager(150_000, 64)
    seen: set[int] = set()
    running: deque[int] = deque()
    shareable = total = found = 0
    for i, request in enumerate(requests):
        length, ids = request["input_length"], request["hash_ids"]
        assert (len(ids) - 1) * 512 < length <= len(ids) * 512
        tokens = [block for block in ids for _ in range(512)][:length]
        known = next((index for index, block in enumerate(ids) if block not in seen), len(ids))
        shareable += min(known * 512, length)
        total += length
        seen.update(ids)
        admission = manager.admit(i, tokens)
        assert admission.outcome is Outcome.ADMITTED
        found += admission.cached_tokens
        while manager.computed(i) < length:  # in chunks
            manager.commit(i, min(2048, length - manager.computed(i)), tokens)
        running.append(i)
        if len(running) > 8:
            manager.free(running.popleft())
    manager.check()
    usage = manager.usage()
    assert usage.evictions == 0  # as good as unbounded
    assert (usage.hit_tokens, usage.lookup_tokens) == (found, total)
    assert shareable > 1_000_000  # the trace does share
    print(f"hit rate {usage.hit_rate:.4f}, the trace allows {shareable / total:.4f}")
    assert usage.hit_rate == pytest.approx(shareable / total, rel=0.01)

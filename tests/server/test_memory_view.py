"""What the memory page is told, against the KV manager's own slow snapshot and against plain recounting."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from hashlib import sha256
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.engine import Engine
from octavo.kv.block_pool import BlockState
from octavo.kv.report import CellState, cells, host_cells
from octavo.params import BeamParams, SamplingParams
from octavo.server.memory_routes import MemoryFeed, _News, _Reader, delta_json, snapshot_json
from octavo.server.memory_view import MOST_EVENTS, MemoryWatch, Unknown, block_detail, request_detail
from tests.engine.test_engine_memory import make_engine
from tests.engine.toy import VOCAB, ToyModel
from tests.server.toys import ToyServer, toy_server

SAME = {BlockState.FREE: 0, BlockState.CACHED: 1, BlockState.ACTIVE: 2, BlockState.SHARED: 3}


def long_answers(**options: Any) -> SamplingParams:
    return SamplingParams(ignore_eos=True, **options)


requests = st.tuples(
    st.lists(st.integers(4, 6), min_size=1, max_size=26),
    st.one_of(
        st.builds(long_answers, n=st.integers(1, 4), max_tokens=st.integers(1, 30)),
        st.builds(BeamParams, width=st.integers(1, 3), max_tokens=st.integers(1, 14), ignore_eos=st.just(True)),
    ),
)


def check_cells(engine: Engine) -> None:
    """Each cell says what the manager's own report says."""
    kv = engine.kv
    prefilling = {
        int(block)
        for seq in kv.sequences.values()
        if seq.computed < seq.length
        for block in seq.table.array[seq.computed // kv.block_size :]
    }
    for report, cell in zip(kv.snapshot(), cells(kv).tolist(), strict=True):
        state = CellState.PREFILL if report.block in prefilling and report.refs == 1 else SAME[report.state]
        assert cell == state | report.filled << 8 | report.refs << 16 | bool(report.pins) << 24, report
    held = Counter(int(b) for seq in kv.swapped.values() for b in seq.table.array)
    assert [cell >> 16 for cell in host_cells(kv).tolist()] == [held[block] for block in range(kv.host.num_blocks)]


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(requests, min_size=1, max_size=7),
    num_blocks=st.integers(16, 40),
    preemption=st.sampled_from(["swap", "recompute"]),
    budget=st.integers(8, 40),
    every=st.integers(1, 4),
)
def test_samples_tell_the_truth(asked: Any, num_blocks: int, preemption: str, budget: int, every: int) -> None:
    engine = make_engine(num_blocks=num_blocks, preemption=preemption, max_batched_tokens=budget, max_num_seqs=8)
    watch = MemoryWatch(row_interval=0.0)
    watch.install(engine)
    shown = watch.sample(engine)
    mirror, host = shown.cells.copy(), shown.host.copy()
    told: Counter[str] = Counter()
    for number, (prompt, params) in enumerate(asked):
        engine.add_request(str(number), prompt, params)
    pin = engine.pin(asked[0][0])
    for step in range(3000):
        if not engine.has_work:
            break
        engine.step()
        check_cells(engine)
        if step % every:
            continue
        sample = watch.sample(engine)
        told.update(event["type"] + event.get("kind", "") for event in sample.events)
        mirror[sample.changed], host[sample.host_changed] = (
            sample.cells[sample.changed],
            sample.host[sample.host_changed],
        )
        assert np.array_equal(mirror, cells(engine.kv))
        assert np.array_equal(host, host_cells(engine.kv))
        check_rows(engine, sample)
        if step % 3 == 0:
            check_details(engine)
    engine.unpin(pin.id)
    told.update(event["type"] + event.get("kind", "") for event in watch.sample(engine).events)
    usage, scheduler = engine.kv.usage(), engine.scheduler
    assert told["copy"] == usage.copies
    assert told["evict"] == usage.evictions
    assert (told["swap_out"], told["swap_in"]) == (usage.swapped_out, usage.swapped_in)
    assert (told["preemptrecompute"], told["preemptswap"]) == (scheduler.recomputed, scheduler.swapped)
    assert told["finish"] == len(asked)


def check_rows(engine: Engine, sample: Any) -> None:
    rows = {row.id: row for row in sample.requests}
    assert set(rows) == set(engine.requests)
    for request in engine.requests.values():
        memory = engine.kv.sequences if rows[request.id].state == "running" else engine.kv.swapped
        tables = [memory[seq.id].table.array.tolist() for seq in request.live if seq.id in memory]
        blocks = {block for table in tables for block in table}
        row = rows[request.id]
        assert (row.logical_blocks, row.blocks) == (sum(map(len, tables)), len(blocks))
        if row.state == "running":
            assert row.shared_blocks == sum(engine.kv.pool.refs(block) > 1 for block in blocks)
    figures = sample.figures
    assert figures.paged == figures.active + figures.shared
    assert figures.tokens_apart >= figures.tokens_stored - figures.pinned * engine.kv.block_size
    assert figures.contiguous_model >= figures.contiguous_own


def check_details(engine: Engine) -> None:
    """Holders, sharing and tokens, recounted from the tables."""
    holders: dict[int, set[tuple[str, int, int]]] = {}
    for request in engine.requests.values():
        for seq in request.live:
            if seq.id in engine.kv.sequences:
                for logical, block in enumerate(engine.kv.table(seq.id).array.tolist()):
                    holders.setdefault(block, set()).add((request.id, seq.index, logical))
    for report in engine.kv.snapshot():
        detail = block_detail(engine, report.block)
        assert {tuple(h) for h in detail.holders} == holders.get(report.block, set())
        assert (detail.state, detail.refs, detail.filled) == (report.state.value, report.refs, report.filled)
        assert len(detail.token_ids) == detail.filled
        assert detail.key == report.key
    for request in engine.requests.values():
        detail = request_detail(engine, request.id)
        for seq, told in zip(request.live, detail.sequences, strict=True):
            assert told.output_token_ids == seq.output_token_ids
            if told.where != "device":
                assert told.where == ("host" if seq.id in engine.kv.swapped else "nowhere")
                continue
            assert told.table == engine.kv.table(seq.id).array.tolist()
            shared = {s.logical: {tuple(h) for h in s.others} for s in told.shared}
            for logical, block in enumerate(told.table):
                others = {h for h in holders[block] if h[:2] != (request.id, seq.index)}
                assert shared.get(logical, set()) == others


def test_a_chain_of_hashes_can_be_recomputed_from_the_root() -> None:
    engine = make_engine()
    engine.add_request("a", [4, 5, 6, 7] * 3 + [8], long_answers(max_tokens=4), cache_salt="mine")
    engine.step()
    block = request_detail(engine, "a").sequences[0].table[2]
    detail = block_detail(engine, block)
    key = sha256(b"mine").digest()
    for link in detail.chain:
        key = sha256(key + np.array([4, 5, 6, 7], "<i4").tobytes()).digest()
        assert link.key == key.hex()
    assert len(detail.chain) == 3
    assert detail.chain[-1].block == block
    assert detail.salted
    while engine.has_work:
        engine.step()
    left = block_detail(engine, block)
    assert (left.state, left.token_ids, left.salted, left.holders) == ("cached", [4, 5, 6, 7], True, [])


def test_four_answers_share_the_prompt_and_three_copy() -> None:
    engine = make_engine()
    watch = MemoryWatch()
    watch.install(engine)
    watch.sample(engine)
    engine.add_request("a", [5] * 10, long_answers(n=4, max_tokens=3, temperature=1.0))
    for _ in range(2):
        engine.step()
    sample = watch.sample(engine)
    copies = [event for event in sample.events if event["type"] == "copy"]
    assert len(copies) == 3
    assert {event["source"] for event in copies} == {2}
    assert [(event["request"], event["sequence"]) for event in copies] == [("a", 0), ("a", 1), ("a", 2)]
    (row,) = sample.requests
    assert (row.sequences, row.blocks, row.logical_blocks, row.shared_blocks) == (4, 6, 12, 2)
    assert (sample.figures.contiguous_own, sample.figures.contiguous_model) == (4 * 4, 4 * 128)
    assert request_detail(engine, "a").contiguous_own == 16


def test_events_are_bounded_and_what_is_dropped_is_counted() -> None:
    engine = make_engine(num_blocks=200)
    watch = MemoryWatch()
    watch.install(engine)
    for number in range(MOST_EVENTS):
        engine.add_request(str(number), [5], long_answers(max_tokens=1))
    while engine.has_work:
        engine.step()
    sample = watch.sample(engine)
    assert len(sample.events) == MOST_EVENTS
    assert sample.dropped == MOST_EVENTS  # a prefill and an end each
    assert sample.events[-1]["type"] == "finish"
    assert watch.sample(engine).dropped == 0


def test_it_goes_on_when_the_engine_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    watch = MemoryWatch()
    watch.install(engine)
    engine.add_request("a", [5] * 30, long_answers(max_tokens=9))
    engine.step()
    watch.sample(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    sample = watch.sample(engine)
    assert sample.figures.free == 64
    assert len(sample.changed) > 0
    engine.add_request("b", [5] * 30, long_answers(max_tokens=9))
    engine.step()
    assert [event["type"] for event in watch.sample(engine).events] == ["prefill"]
    assert engine.kv.on_evict is not None
    watch.remove(engine)
    assert engine.kv.on_evict is None
    assert engine.watchers == []


def test_what_does_not_exist_is_said_so() -> None:
    engine = make_engine()
    with pytest.raises(Unknown, match=r"block 64; .* 0 to 63"):
        block_detail(engine, 64)
    with pytest.raises(Unknown, match="'nobody'"):
        request_detail(engine, "nobody")


# --- over HTTP --------------------------------------------------------------------------------------------------------


async def messages(toy: ToyServer, during: Any) -> list[tuple[str, Any]]:
    """The messages of the event stream: a first one, those while `during` runs, and until nothing runs any more."""
    found: list[tuple[str, Any]] = []
    async with (
        httpx.AsyncClient(base_url=toy.url, timeout=20) as client,
        client.stream("GET", "/memory/events") as response,
    ):
        task, event = None, ""
        async for line in response.aiter_lines():
            event = line[7:] if line.startswith("event: ") else event
            if line.startswith("data: "):
                found.append((event, json.loads(line[6:])))
                if task is None:  # the snapshot: what happened before it is in it, and not told as events
                    task = asyncio.create_task(during(client))
                elif task.done() and not found[-1][1]["figures"]["running"]:
                    break
        assert task is not None
        await task
    return found


def watchers(toy: ToyServer) -> int:
    """How many beside the server's own for its metrics."""
    return toy.llm.call(lambda engine: len(engine.watchers)).result(5)


def unpacked(text: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text), "<u4").tolist()


def test_deltas_add_up_to_a_snapshot_and_nobody_watches_when_all_have_left() -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"model": "toy", "prompt": "abcdefgh", "n": 3, "max_tokens": 60, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    with toy_server() as toy:
        before = watchers(toy)
        assert toy.llm.call(lambda engine: engine.kv.on_evict).result(5) is None
        found = asyncio.run(messages(toy, ask))
        kinds = [kind for kind, _ in found]
        assert kinds[0] == "snapshot"
        mirror: list[int] = []
        for kind, body in found:
            if kind == "snapshot":
                mirror = unpacked(body["cells"])
            for block, cell in zip(body["cells"][::2], body["cells"][1::2], strict=True) if kind == "delta" else ():
                mirror[block] = cell
        now = httpx.get(f"{toy.url}/memory/snapshot").json()
        assert unpacked(now["cells"]) == mirror
        copied = any(event["type"] == "copy" for _, body in found for event in body.get("events", []))
        assert copied or kinds.count("snapshot") > 1  # who could not keep up has missed it
        for _ in range(100):
            if watchers(toy) == before:
                break
            asyncio.run(asyncio.sleep(0.05))
        assert watchers(toy) == before


def test_errors_have_openais_shape() -> None:
    with toy_server({"api_keys": ("secret",)}) as toy:
        key = {"Authorization": "Bearer secret"}
        for path in ("snapshot", "events", "blocks/0", "requests/x"):
            assert httpx.get(f"{toy.url}/memory/{path}").status_code == 401
        for path in ("blocks/99999", "blocks/-1", "requests/nobody"):
            answer = httpx.get(f"{toy.url}/memory/{path}", headers=key)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
        assert httpx.get(f"{toy.url}/memory/requests/nobody?ended=true", headers=key).status_code == 204
        page = httpx.get(f"{toy.url}/")
        assert page.status_code == 200
        assert "unsafe" not in page.headers["content-security-policy"]
        assert httpx.get(f"{toy.url}/page/main.js").headers["content-type"].startswith("text/javascript")
        assert httpx.get(f"{toy.url}/page/..%2fapp.py").status_code == 404


def test_who_reads_slowly_gets_a_snapshot_instead_of_all_he_missed() -> None:
    engine = make_engine()
    watch = MemoryWatch()
    watch.install(engine)

    async def read() -> list[bytes | None]:
        reader, got = _Reader(), []
        for late in (False, False, True, False):
            reader.put(_News(watch.sample(engine)))
            if late:
                reader.put(_News(watch.sample(engine)))
            got.append(await reader.next())
        reader.end()
        return [*got, await reader.next()]

    got = asyncio.run(read())
    assert [message and message.split(b"\n")[0] for message in got] == [
        b"event: snapshot",
        b"event: delta",
        b"event: snapshot",
        b"event: delta",
        None,
    ]


def test_a_closed_feed_lets_its_readers_go() -> None:
    with toy_server() as toy:

        async def close_while_reading() -> int:
            feed = MemoryFeed(toy.llm)
            count = 0
            async for _ in feed.messages():
                count += 1
                if count == 2:
                    feed.close()
            assert [message async for message in feed.messages()] == []
            return count

        assert asyncio.run(asyncio.wait_for(close_while_reading(), 10)) == 2


def test_a_sample_is_json_and_small() -> None:
    engine = make_engine(ToyModel(512), num_blocks=10_000)
    watch = MemoryWatch()
    watch.install(engine)
    for number in range(64):
        engine.add_request(str(number), [number % (VOCAB - 4) + 4] * 40, long_answers(max_tokens=50))
    for _ in range(9):
        engine.step()
    watch.sample(engine)
    engine.step()
    sample = watch.sample(engine)
    assert len(json.dumps(snapshot_json(sample))) < 80_000
    assert len(json.dumps(delta_json(sample))) < 20_000
    assert "requests" not in delta_json(sample)  # they were listed a moment ago
    assert len(snapshot_json(sample)["requests"]) == 32
    assert (len(sample.requests), sample.more_requests) == (32, 32)

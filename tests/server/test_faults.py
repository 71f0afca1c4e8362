"""Load, faults and ends: clients that leave, full queues, deadlines, failing steps, keys, sizes, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.toys import ToyServer, events, toy_server

ENDLESS: dict[str, Any] = {"model": "toy", "prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}
SHORT: dict[str, Any] = {"model": "toy", "prompt": "abc", "max_tokens": 4}


@pytest.fixture(scope="module")
def toy() -> Iterator[ToyServer]:
    with toy_server() as server:
        yield server


@contextlib.contextmanager
def slow_steps(toy: ToyServer, seconds: float) -> Iterator[None]:
    forward = toy.model.forward

    def slower(*args: Any) -> Any:
        time.sleep(seconds)
        return forward(*args)

    toy.model.forward = slower  # type: ignore[method-assign]
    try:
        yield
    finally:
        toy.model.forward = forward  # type: ignore[method-assign]


def wait_until(condition: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_within_a_step(toy: ToyServer, stream: bool) -> None:
    with slow_steps(toy, 0.05):
        with socket.create_connection(("127.0.0.1", toy.server.port)) as client:
            client.sendall(raw_post(ENDLESS | {"stream": stream}))
            wait_until(lambda: toy.held_blocks() > 0)
            steps = len(toy.model.steps)
        wait_until(lambda: toy.held_blocks() == 0, seconds=2)
    assert len(toy.model.steps) - steps <= 3  # the one in progress, one begun before the server could hear of it


def test_500_streaming_clients_a_third_of_which_leave_end_with_every_block_free() -> None:
    with toy_server({"max_queued": 1000}, num_blocks=600, max_num_seqs=64) as toy:
        port = toy.server.port
        asyncio.run(all_clients(port, seed=1))
        wait_until(lambda: toy.held_blocks() == 0)
        before = resident_mib()
        asyncio.run(all_clients(port, seed=2))
        wait_until(lambda: toy.held_blocks() == 0)
        assert resident_mib() - before < 30
        assert toy.server.service.admission.inside == 0
        toy.llm.call(lambda engine: engine.kv.check()).result(10)
        assert toy.post("/v1/completions", SHORT).status_code == 200


async def all_clients(port: int, seed: int) -> None:
    chance = random.Random(seed)
    leaves_after = [chance.randrange(4000) if number % 3 == 0 else None for number in range(500)]
    ended = await asyncio.gather(*(client(port, number, after) for number, after in enumerate(leaves_after)))
    assert sum(ended) >= 333


async def client(port: int, number: int, leaves_after: int | None) -> bool:
    """Stream one answer, or leave after so many bytes; whether it came to its end. Quicker than a library for 500."""
    body = ENDLESS | {"prompt": "abcdefgh"[: 1 + number % 8], "max_tokens": 30 + number % 50, "n": 1 + number % 2}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw_post(body))
    received = b""
    while piece := await reader.read(2**16):
        received += piece
        if leaves_after is not None and len(received) > leaves_after:
            writer.transport.abort()
            return False
    writer.close()
    assert received.startswith(b"HTTP/1.1 200"), received[:300]
    assert b"data: [DONE]" in received[-100:]
    return True


def raw_post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def test_a_client_that_does_not_read_is_not_waited_for_by_others(toy: ToyServer) -> None:
    with socket.create_connection(("127.0.0.1", toy.server.port)) as sleeper:
        sleeper.sendall(raw_post(ENDLESS | {"n": 20, "logprobs": 5}))
        assert toy.post("/v1/completions", SHORT).status_code == 200  # the sleeper never reads
    wait_until(lambda: toy.held_blocks() == 0)


# --- too many, too long, too large ------------------------------------------------------------------------------------


def test_beyond_the_queue_there_is_429_and_when_to_come_again() -> None:
    with toy_server({"max_queued": 3}, max_num_seqs=2) as toy, slow_steps(toy, 0.02):
        inside: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: inside.append(toy.post("/v1/completions", ENDLESS | {"max_tokens": 60}).status_code)
            )
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: toy.server.service.admission.inside == 5)
        refused = toy.post("/v1/completions", SHORT)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        for thread in threads:
            thread.join()
        assert inside == [200] * 5
        assert toy.post("/v1/completions", SHORT).status_code == 200
        metrics = httpx.get(f"{toy.url}/metrics").text
        assert re.search(r"^octavo:requests_rejected_total\{.*\} 1\.0$", metrics, re.MULTILINE)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_over_its_time_is_ended_and_says_so(stream: bool) -> None:
    with toy_server({"request_timeout": 0.3}) as toy, slow_steps(toy, 0.02):
        response = toy.post("/v1/completions", ENDLESS | {"stream": stream})
        if stream:
            *_, last = events(response.text)
            assert last["error"]["code"] == "request_timeout"
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
        wait_until(lambda: toy.held_blocks() == 0)
        assert toy.post("/v1/completions", SHORT).status_code == 200


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_too_large_is_refused_unread(chunked: bool) -> None:
    with toy_server({"max_body_bytes": 1000}) as toy:
        body = json.dumps(SHORT | {"prompt": "a" * 2000}).encode()
        content: Any = iter([body[:500], body[500:]]) if chunked else body
        response = httpx.post(
            f"{toy.url}/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert toy.post("/v1/completions", SHORT).status_code == 200


def test_a_prompt_of_a_million_characters_is_refused_at_once(toy: ToyServer) -> None:
    tokenizer = toy.llm.tokenizer
    assert tokenizer is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "encoder", lambda *_, **__: pytest.fail("it was tokenized"))
        response = toy.post("/v1/completions", SHORT | {"prompt": "a" * 1_000_000})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


# --- faults within ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_failing_step_is_500_for_its_requests_and_the_next_is_served(stream: bool) -> None:
    with toy_server() as toy:
        toy.model.fail_on_token = 12
        response = toy.post("/v1/completions", SHORT | {"prompt": "i", "stream": stream})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert "a kernel broke" in response.json()["error"]["message"]
        toy.model.fail_on_token = None
        assert toy.post("/v1/completions", SHORT | {"prompt": "i"}).status_code == 200
        assert httpx.get(f"{toy.url}/health").status_code == 200


def test_a_step_that_fails_in_the_midst_of_a_stream_ends_it_with_an_error_event() -> None:
    with toy_server() as toy, slow_steps(toy, 0.01):
        with httpx.stream("POST", f"{toy.url}/v1/completions", json=ENDLESS, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            forward = toy.model.forward

            def broken(*_: Any) -> Any:
                raise FloatingPointError("a kernel broke")

            toy.model.forward = broken  # type: ignore[method-assign]
            rest = [line for line in lines if line]
            toy.model.forward = forward  # type: ignore[method-assign]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["error"]["type"] == "server_error"
        assert toy.held_blocks() == 0


def test_while_it_drains_whoever_comes_is_told_and_what_runs_ends() -> None:
    with toy_server() as toy, slow_steps(toy, 0.01):
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(toy.post("/v1/completions", ENDLESS).text))
        thread.start()
        wait_until(lambda: toy.held_blocks() > 0)
        toy.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: httpx.get(f"{toy.url}/health").status_code == 503)  # on a connection of its own
        assert httpx.get(f"{toy.url}/health/live").status_code == 200
        refused = toy.post("/v1/completions", SHORT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        thread.join()
        assert events(texts[0])[-1]["choices"][0]["finish_reason"] == "length"


def test_what_no_state_of_the_pool_could_hold_is_refused_before_any_work() -> None:
    with toy_server(num_blocks=10) as toy:  # of 4 tokens each, far fewer than the context of 512
        assert httpx.get(f"{toy.url}/v1/models").json()["data"][0]["max_model_len"] == 40
        refused = toy.post("/v1/completions", SHORT | {"max_tokens": 40})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert not toy.model.steps
        assert toy.post("/v1/completions", SHORT | {"max_tokens": 30}).status_code == 200


def test_an_engine_that_is_gone_is_told_by_health_and_answers_503() -> None:
    with toy_server() as toy:
        assert httpx.get(f"{toy.url}/health/live").status_code == 200
        toy.llm.close()
        assert httpx.get(f"{toy.url}/health/live").status_code == 503
        assert httpx.get(f"{toy.url}/health").json() == {"status": "dead"}
        assert toy.post("/v1/completions", SHORT).status_code == 503
        assert httpx.get(f"{toy.url}/metrics").status_code == 200


# --- who may ----------------------------------------------------------------------------------------------------------


def test_with_a_key_everything_but_health_and_the_page_itself_asks_for_it() -> None:
    with toy_server({"api_keys": ("s3cret", "other")}) as toy:
        right, wrong = {"Authorization": "Bearer s3cret"}, {"Authorization": "Bearer s3cre"}
        document = httpx.get(f"{toy.url}/openapi.json", headers=right).json()
        paths = [path.replace("{name}", "toy").split("{")[0] for path in document["paths"]]
        open_paths = {"/health", "/health/live", "/health/ready"}
        for path in {*paths, "/openapi.json", "/docs", "/memory/snapshot", "/nowhere"} - open_paths:
            for headers in ({}, wrong, {"Authorization": "s3cret"}, {"Authorization": "Basic s3cret"}):
                response = httpx.get(f"{toy.url}{path}", headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
        for path in (*open_paths, "/"):
            assert httpx.get(f"{toy.url}{path}").status_code == 200
        assert toy.post("/v1/completions", SHORT).status_code == 401
        assert toy.post("/v1/completions", SHORT, headers=right).status_code == 200
        assert toy.post("/v1/completions", SHORT, headers={"authorization": "bearer other"}).status_code == 200


def test_cors_is_off_unless_an_origin_is_allowed() -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with toy_server() as toy:
        response = toy.post("/v1/completions", SHORT, headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in response.headers
        assert httpx.options(f"{toy.url}/v1/completions", headers=asked).status_code == 405
    with toy_server({"cors_origins": ("https://a.example",), "api_keys": ("k",)}) as toy:
        allowed = httpx.options(f"{toy.url}/v1/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refused = toy.post("/v1/completions", SHORT, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = toy.post("/v1/completions", SHORT, headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_page_of_another_site_cannot_ask_in_plain_text(toy: ToyServer) -> None:
    """What a browser sends across origins without asking first: a form, or text."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = httpx.post(f"{toy.url}/v1/completions", content=json.dumps(SHORT), headers={"content-type": kind})
        assert response.status_code == 400


# --- fuzz -------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    st.sampled_from(
        ["model", "messages", "prompt", "max_tokens", "n", "best_of", "stop", "seed", "logprobs", "top_logprobs"]
    )
    | st.sampled_from(["logit_bias", "tools", "tool_choice", "response_format", "stream", "stream_options", "echo"])
    | st.sampled_from(
        ["temperature", "top_p", "grammar", "structured_outputs", "suffix", "priority", "use_beam_search"]
    )
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["chat/completions", "completions"]), st.dictionaries(FIELDS, JSON, max_size=5), st.booleans())
def test_malformed_bodies_are_4xx(toy: ToyServer, path: str, body: dict[str, Any], valid_else: bool) -> None:
    base = {"model": "toy", "max_tokens": 4}
    base |= {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    response = toy.post(f"/v1/{path}", base | body if valid_else else body)
    assert response.status_code < 500, (body, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"].endswith("."), response.text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_bytes_are_4xx(toy: ToyServer, body: bytes) -> None:
    response = httpx.post(
        f"{toy.url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=20
    )
    assert 400 <= response.status_code < 500


# --- the end ----------------------------------------------------------------------------------------------------------


def start(*options: str) -> tuple[subprocess.Popen[str], str]:
    """`octavo serve` in a process of its own, and its address."""
    command = [sys.executable, "-c", "from octavo.cli import main; main()", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "serving" in line and "http://" in line:
            return process, line.split(" at ")[1].split()[0]
    raise AssertionError("the server did not start")


def ask_long(url: str, tokens: int, into: list[str]) -> threading.Thread:
    body = {"model": "smollm2", "prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}

    def run() -> None:
        with contextlib.suppress(httpx.HTTPError):
            into.append(httpx.post(f"{url}/v1/completions", json=body, timeout=100).text)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.usefixtures("smollm2_path")
def test_sigterm_lets_requests_finish_and_takes_no_new_ones() -> None:
    process, url = start()
    texts: list[str] = []
    with httpx.Client() as kept:  # a connection that is open already
        kept.get(f"{url}/health")
        thread = ask_long(url, 400, texts)
        wait_until(lambda: "octavo:num_requests_running" in kept.get(f"{url}/metrics").text and running(kept, url) == 1)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not takes(kept, url), seconds=5)
    thread.join()
    assert process.wait(30) == 0
    chunks = events(texts[0])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.usefixtures("smollm2_path")
def test_a_second_signal_ends_at_once_and_tells_the_clients() -> None:
    process, url = start()
    texts: list[str] = []
    thread = ask_long(url, 8000, texts)
    with httpx.Client() as client:
        wait_until(lambda: running(client, url) == 1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.wait(15)  # a quarter of the time it would have to drain
    thread.join()
    assert json.loads(texts[0].split("\n\n")[-3][6:])["error"]["code"] == "aborted"


def running(client: httpx.Client, url: str) -> int:
    line = next(
        x for x in client.get(f"{url}/metrics").text.splitlines() if x.startswith("octavo:num_requests_running{")
    )
    return int(float(line.split()[-1]))


def takes(client: httpx.Client, url: str) -> bool:
    try:
        return client.post(f"{url}/v1/completions", json=SHORT | {"model": "smollm2"}).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_port_in_use_is_one_sentence(toy: ToyServer) -> None:
    command = [sys.executable, "-c", "from octavo.cli import main; main()", "serve", "--port", str(toy.server.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "Nothing can listen" in ended.stderr
    assert "Traceback" not in ended.stderr

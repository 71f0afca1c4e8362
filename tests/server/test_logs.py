"""Logs: one line a request under one id, nothing that could forge a line, no text that nobody asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.outputs import Completion, RequestOutput, Timings
from octavo.server import logs
from octavo.server.logs import RequestLog, configure, log_finished, request_id

Lines = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    names = ("octavo", "uvicorn")
    handlers, levels = root.handlers.copy(), [logging.getLogger(name).level for name in names]
    yield
    root.handlers[:] = handlers
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(level)


class Tally:
    """Takes the place of Metrics."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    def observe_http(self, method: str, path: str, status: int) -> None:
        self.seen.append((method, path, status))


def make_app() -> FastAPI:
    app = FastAPI()

    @app.get("/items/{name:path}")
    async def item(name: str) -> str:
        logging.getLogger("octavo.test").info("at work")
        return request_id.get()

    @app.get("/stream")
    async def stream(count: int = 3) -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            for _ in range(count):
                await asyncio.sleep(0.01)
                yield f"{request_id.get()}\n"

        return StreamingResponse(parts())

    @app.get("/stream-that-fails")
    async def stream_that_fails() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "begun\n"
            raise RuntimeError("in the midst")

        return StreamingResponse(parts())

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a fault")

    @app.get("/health")
    async def health() -> str:
        return "well"

    @app.post("/items/{name:path}")
    async def change(name: str) -> None:
        """Takes a body."""

    return app


async def ask(log: RequestLog, *paths: str, method: str = "GET", **options: Any) -> list[httpx.Response]:
    transport = httpx.ASGITransport(log, raise_app_exceptions=False)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return list(await asyncio.gather(*(client.request(method, path, **options) for path in paths)))


def lines(capsys: pytest.CaptureFixture[str], message: str = "request answered") -> Lines:
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    return [entry for entry in entries if entry["message"] == message]


class TestRequestLog:
    """The middleware."""

    def test_one_line_a_request_each_under_its_own_id(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure("json", "info")
        tally = Tally()
        log = RequestLog(make_app(), tally)  # type: ignore[arg-type]
        answers = asyncio.run(ask(log, *(f"/items/{i}?key=secret" for i in range(20)), "/stream", "/stream?count=5"))
        err = capsys.readouterr().err
        assert "secret" not in err
        entries = [json.loads(line) for line in err.splitlines()]
        done = {entry["request_id"]: entry for entry in entries if entry["logger"] == "octavo.http"}
        assert len(done) == len(answers) == 22
        for answer in answers:
            name = answer.headers["x-request-id"]
            assert set(answer.text.replace('"', "").split()) == {name}  # the handler, and the stream, saw the same
            entry = done[name]
            assert (entry["status"], entry["path"]) == (200, answer.url.path)
            assert entry["bytes"] == len(answer.content)
            assert 0 < entry["seconds"] < 5
            if answer.url.path == "/stream":
                assert entry["seconds"] > 0.03  # logged at the stream's end
        assert {entry["request_id"] for entry in entries if entry["message"] == "at work"} <= set(done)
        assert set(tally.seen) == {("GET", "/items/{name:path}", 200), ("GET", "/stream", 200)}

    def test_paths_are_templates_and_their_number_is_bounded(self) -> None:
        tally = Tally()
        log = RequestLog(make_app(), tally)  # type: ignore[arg-type]
        asyncio.run(ask(log, *(f"/nowhere/{i}" for i in range(5)), "/items/5"))
        asyncio.run(ask(log, "/items/5", "/stream", method="PUT"))
        asyncio.run(ask(log, "/items/5", method="POST"))
        assert set(tally.seen) == {
            ("GET", "other", 404),
            ("GET", "/items/{name:path}", 200),
            ("PUT", "/items/{name:path}", 405),
            ("PUT", "/stream", 405),
            ("POST", "/items/{name:path}", 200),
        }

    @pytest.mark.parametrize("path", ["/broken", "/stream-that-fails"])
    def test_faults(self, path: str, capsys: pytest.CaptureFixture[str]) -> None:
        configure("json")
        tally = Tally()
        log = RequestLog(make_app(), tally)  # type: ignore[arg-type]
        with contextlib.suppress(RuntimeError):
            asyncio.run(ask(log, path, headers={"x-request-id": "mine"}))
        status = 500 if path == "/broken" else 200
        (line,) = lines(capsys)
        assert (line["level"], line["status"], line["failed"]) == ("error", status, True)
        assert line["request_id"] == "mine"
        assert tally.seen == [("GET", path, status)]

    def test_what_is_asked_for_all_the_time_is_quiet(self, capsys: pytest.CaptureFixture[str]) -> None:
        log = RequestLog(make_app())
        for level, count in (("info", 0), ("debug", 1)):
            configure("json", level)
            asyncio.run(ask(log, "/health"))
            assert len(lines(capsys)) == count

    @pytest.mark.parametrize(
        ("sent", "taken"),
        [
            (b"abc-123", True),
            (b"!" * 128, True),
            (b"x" * 129, False),
            (b"", False),
            (b"a b", False),
            (b"a\tb", False),
            (b'evil\nlevel="error"', False),
            (b"caf\xe9", False),
            (b"\x1b[31m", False),
        ],
    )
    def test_ids_from_outside(self, sent: bytes, taken: bool) -> None:
        started: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Request-Id", b"theirs")]})
            await send({"type": "http.response.body", "body": b""})

        async def send(message: Any) -> None:
            started.append(message)

        async def receive() -> Any:
            return {"type": "http.request"}

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-request-id", sent)]}
        asyncio.run(RequestLog(app)(scope, receive, send))
        ids = [value for key, value in started[0]["headers"] if key.lower() == b"x-request-id"]
        assert len(ids) == 1
        assert (ids[0] == sent) == taken
        assert taken or len(ids[0]) == 32

    def test_a_client_that_leaves_a_real_server(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure("json")
        tally = Tally()
        with serving(RequestLog(make_app(), tally)) as port:  # type: ignore[arg-type]
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"GET /stream?count=500 HTTP/1.1\r\nHost: x\r\nX-Request-Id: gone\r\n\r\n")
                assert connection.recv(100)
            deadline = time.monotonic() + 4
            while not tally.seen and time.monotonic() < deadline:
                time.sleep(0.01)
            assert httpx.get(f"http://127.0.0.1:{port}/items/1").status_code == 200
        logging.getLogger("uvicorn.error").warning("a word")
        entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        ended = {e["request_id"]: e for e in entries if e["logger"] == "octavo.http"}
        assert ended["gone"]["client_left"]
        assert ended["gone"]["status"] == 200
        assert ended["gone"]["seconds"] < 4
        assert not any("client_left" in e for name, e in ended.items() if name != "gone")
        assert any(e["logger"] == "uvicorn.error" for e in entries)  # uvicorn's own lines come in the same shape
        assert not any(e["logger"] == "uvicorn.access" for e in entries)

    def test_a_client_that_leaves_before_any_answer(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure("json")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        asyncio.run(RequestLog(app)(scope, receive, send))
        (line,) = lines(capsys)
        assert (line["status"], line["client_left"]) == (499, True)

    @pytest.mark.parametrize(("answer", "status"), [("websocket.accept", 101), ("websocket.close", 403)])
    def test_websockets(self, answer: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
        configure("json")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": answer})

        async def send(message: Any) -> None: ...

        scope = {"type": "websocket", "path": "/events", "headers": []}
        asyncio.run(RequestLog(app)(scope, send, send))  # type: ignore[arg-type]
        (line,) = lines(capsys)
        assert (line["method"], line["path"], line["status"]) == ("WEBSOCKET", "/events", status)

    def test_lifespan_passes(self) -> None:
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["type"])

        asyncio.run(RequestLog(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
        assert seen == ["lifespan"]


@contextlib.contextmanager
def serving(app: Any) -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def make_output(**changes: Any) -> RequestOutput:
    timings = Timings(arrived=1.0, scheduled=1.5, first_token=2.0, finished=4.0)
    given = {
        "request_id": "cmpl-1",
        "prompt": "a secret question",
        "prompt_token_ids": [1, 2, 3],
        "completions": [Completion(0, "a secret answer", [4, 5], "stop"), Completion(1, "other", [4], "length")],
        "finished": True,
        "timings": timings,
        "cached_tokens": 2,
        "output_tokens": 3,
    }
    return RequestOutput(**{**given, **changes})


class TestEngineLines:
    """A line for each request of the engine."""

    def test_what_is_in_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure("json")
        token = request_id.set("http-1")
        log_finished(make_output())
        request_id.reset(token)
        err = capsys.readouterr().err
        assert "secret" not in err
        line = json.loads(err)
        wanted = {
            "request_id": "http-1",
            "engine_id": "cmpl-1",
            "prompt_tokens": 3,
            "cached_tokens": 2,
            "completion_tokens": 3,
            "finish_reason": "stop,length",
            "ttft": 1.0,
            "seconds": 3.0,
            "preemptions": 0,
        }
        assert wanted.items() <= line.items()

    def test_prompts_only_if_asked(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure("json")
        log_finished(make_output(), log_prompts=True)
        (line,) = lines(capsys, "request ended")
        assert line["prompt"] == "a secret question"
        assert line["answers"] == ["a secret answer", "other"]

    def test_aborted_and_failed(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure("json")
        log_finished(None, engine_id="cmpl-2", aborted=True)
        log_finished(make_output(error="It broke.", completions=[Completion(0, finish_reason="error")]))
        aborted, failed = lines(capsys, "request ended")
        assert (aborted["engine_id"], aborted["finish_reason"], aborted["level"]) == ("cmpl-2", "abort", "info")
        assert (failed["finish_reason"], failed["error"], failed["level"]) == ("error", "It broke.", "error")


class TestFormats:
    """Text and JSON."""

    @settings(deadline=None)
    @given(st.text(), st.text())
    def test_a_record_is_one_line_whatever_is_in_it(self, message: str, value: str) -> None:
        record = logging.LogRecord("octavo.x", logging.INFO, "f", 1, "%s", (message,), None)
        record.fields = {"path": value}
        text = logs.TextFormatter().format(record)
        assert text.isprintable()
        entry = json.loads(logs.JsonFormatter().format(record))
        assert (entry["message"], entry["path"]) == (message, value)
        assert logs.JsonFormatter().format(record).isascii()

    def test_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure("text")
        asyncio.run(ask(RequestLog(make_app()), "/items/a%0aforged%20line", headers={"x-request-id": "r1"}))
        line = capsys.readouterr().err.splitlines()[-1]
        assert 'request answered request_id=r1 method=GET path="/items/a\\nforged line" status=404 seconds=0.' in line

    def test_tracebacks_stay_whole(self, capsys: pytest.CaptureFixture[str]) -> None:
        for kind in ("text", "json"):
            configure(kind)  # type: ignore[arg-type]
            try:
                raise ValueError("deep")
            except ValueError:
                logging.getLogger("octavo.x").exception("it failed")
            err = capsys.readouterr().err
            shown = json.loads(err)["exception"] if kind == "json" else err
            assert "Traceback" in shown
            assert "ValueError: deep" in shown

    def test_configure_again_replaces(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure("text")
        configure("json", "warning")
        logging.getLogger("octavo.x").info("hidden")
        logging.getLogger("uvicorn.error").warning("shown")
        assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == ["shown"]

    def test_what_there_is_not(self) -> None:
        with pytest.raises(ConfigError, match="'xml'; it must be text or json"):
            configure("xml")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="'loud'; it must be one of debug, info, warning, error"):
            configure("text", "loud")

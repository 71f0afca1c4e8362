"""`octavo top` against servers that are there, that are not, that are something else, and that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from octavo.async_llm import AsyncLLM
from octavo.cli.scrape import Scrape, Server, essentials, parse, quantile
from octavo.cli.top import Watched, bar, sparkline, view
from octavo.errors import OctavoError, RequestError
from octavo.params import SamplingParams
from octavo.server.histogram import TOKEN, Histogram
from octavo.server.metrics import Metrics
from tests.engine.test_engine_memory import make_engine

from .conftest import Octavo


def serve_a_little(model_name: str = "toy") -> str:
    """The metrics of an engine that has answered two prompts, as a server would give them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.async_llm.load_engine", lambda *_: make_engine(num_blocks=50))
        llm = AsyncLLM("toy")
    try:
        metrics = Metrics(llm, model_name)

        async def run() -> str:
            params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True)
            for _ in range(2):
                async for _ in llm.generate([1, 2, 3, 4, 5, 6], params):
                    pass
            return (await metrics.render())[0].decode()

        return asyncio.run(run())
    finally:
        llm.close()


@pytest.fixture(scope="module")
def text() -> str:
    return serve_a_little()


class FakeServer:
    """Answers /metrics with what it was given; wants `key` if there is one."""

    def __init__(self, body: str, port: int = 0) -> None:
        self.body, self.status, self.key, self.health, self.asked = body, 200, "", 200, 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += self.path == "/metrics"
                status = {"/metrics": outer.status, "/health": outer.health}.get(self.path, 404)
                if outer.key and self.headers.get("Authorization") != f"Bearer {outer.key}":
                    status = 401
                body = outer.body.encode() if self.path == "/metrics" and status == 200 else b"{}"
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server(text: str) -> Iterator[FakeServer]:
    made = FakeServer(text)
    yield made
    made.close()


class TestOnce:
    """One look, for people and for scripts."""

    def test_json(self, octavo: Octavo, server: FakeServer) -> None:
        ran = octavo("top", server.url, "--once", "--json", "--interval", "0.1")
        assert (ran.code, ran.err) == (0, "")
        seen = json.loads(ran.out)
        assert (seen["model"], seen["ready"], seen["url"]) == ("toy", True, server.url)
        assert seen["blocks"] == {
            "shared": 0,
            "active": 0,
            "cached": seen["blocks"]["cached"],
            "free": seen["blocks"]["free"],
        }
        assert seen["blocks"]["cached"] > 0
        assert sum(seen["blocks"].values()) == 50
        assert (seen["tokens_per_second"], seen["prompt_tokens_per_second"]) == (0, 0)
        assert seen["prefix_hit_rate"] == pytest.approx(4 / 12)
        assert 0 < seen["ttft"]["p50"] <= seen["ttft"]["p95"]
        assert 0 < seen["tpot"]["p50"] <= seen["tpot"]["p95"]
        assert seen["preemptions"] == {"recompute": 0, "swap": 0}
        assert seen["window"] is None
        assert server.asked == 2

    def test_for_people(self, octavo: Octavo, server: FakeServer) -> None:
        server.health = 503
        ran = octavo("top", f"{server.url}/v1/", "--once", "--interval", "0.1")
        assert ran.code == 0
        assert f"toy  octavo 0.1.0 at {server.url}  not ready" in ran.out
        assert "0 running, 0 waiting, 0 swapped" in ran.out
        assert "33.3% prefix hits" in ran.out
        assert "(since the start)" in ran.out
        assert "of 50" in ran.out

    def test_the_key(self, octavo: Octavo, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        server.key = "open sesame"
        for arguments, words in (((), "wants an API key"), (("--api-key", "wrong"), "does not take this API key")):
            ran = octavo("top", server.url, "--once", *arguments)
            assert (ran.code, ran.err.count("\n")) == (1, 1)
            assert f"The server at {server.url} {words}" in ran.err
        assert octavo("top", server.url, "--once", "--interval", "0.1", "--api-key", "open sesame").code == 0
        monkeypatch.setenv("OCTAVO_API_KEY", "open sesame")
        assert octavo("top", server.url, "--once", "--interval", "0.1").code == 0

    def test_no_server(self, octavo: Octavo) -> None:
        ran = octavo("top", "127.0.0.1:9", "--once")
        assert ran.code == 1
        assert ran.err == "octavo: The server at http://127.0.0.1:9 cannot be reached: Connection refused.\n"

    @pytest.mark.parametrize(
        ("status", "body"), [(404, ""), (200, "<html>hello</html>"), (200, "vllm:x 1\n"), (302, "")]
    )
    def test_another_server(self, status: int, body: str, octavo: Octavo, server: FakeServer) -> None:
        server.status, server.body = status, body
        ran = octavo("top", server.url, "--once")
        assert ran.code == 1
        assert f"At {server.url} there is no Octavo server" in ran.err

    def test_what_speaks_no_http(self, octavo: Octavo) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]

            def answer() -> None:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"SSH-2.0-x\r\n")

            thread = threading.Thread(target=answer)
            thread.start()
            ran = octavo("top", f"http://127.0.0.1:{port}", "--once")
            thread.join()
        assert ran.code == 1
        assert "does not speak HTTP" in ran.err
        assert "Traceback" not in ran.err

    def test_a_server_that_says_nothing(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with pytest.raises(OctavoError, match=r"did not answer within 0\.1 seconds"):
                Server(url, timeout=0.1).scrape()

    @pytest.mark.parametrize(
        "url", ["ftp://x", "http://", "http://x:99999", "http://x:port", "", "http://a b", "http://ü"]
    )
    def test_no_url(self, url: str, octavo: Octavo) -> None:
        ran = octavo("top", url, "--once")
        assert ran.code == 2
        assert "is not a server's URL; write it like http://127.0.0.1:8000." in ran.err

    def test_keys_that_no_header_carries(self) -> None:
        with pytest.raises(RequestError, match="no HTTP header"):
            Server("http://x", "a\r\nb")


class TestWatching:
    """Going on while servers come and go."""

    def test_in_a_terminal(self, text: str) -> None:
        first = FakeServer(text)
        leader, follower = pty.openpty()
        command = [sys.executable, "-c", "from octavo.cli import main; main()", "top", first.url, "--interval", "0.1"]
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=env)
        os.close(follower)
        try:
            assert "running" in until(leader, "running")
            first.close()
            assert "Connection refused. Trying again" in until(leader, "Trying again")
            second = FakeServer(text.replace('"toy"', '"newborn"'), port=first.port)
            try:
                until(leader, "newborn")
                process.send_signal(signal.SIGINT)
                rest = until(leader, "\x1b[?25h")  # the cursor is back
                assert process.wait(10) == 0
                assert "Traceback" not in rest
            finally:
                second.close()
        finally:
            process.kill()
            process.wait()
            os.close(leader)

    def test_lines_of_json_in_a_pipe(self, server: FakeServer) -> None:
        command = [sys.executable, "-c", "from octavo.cli import main; main()", "top", server.url, "--interval", "0.1"]
        process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            seen = [json.loads(process.stdout.readline()) for _ in range(3)]
            server.status = 500
            assert "answers with status 500" in process.stderr.readline()
            server.status = 200
            seen.append(json.loads(process.stdout.readline()))
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.communicate()
        assert [one["window"] is None for one in seen] == [True, False, False, False]

    def test_rates_and_latencies_are_of_what_was_watched(self) -> None:
        first = scrape(0.0, tokens=100, waits=[(5.0, 1000)])
        second = scrape(2.0, tokens=150, waits=[(5.0, 1000), (0.02, 90), (0.3, 10)])
        seen = essentials([first, second])
        assert seen.tokens_per_second == 25
        assert 0.015 <= (seen.tpot.p50 or 0) <= 0.025
        assert 0.2 <= (seen.tpot.p95 or 0) <= 0.3
        assert 2.5 <= (essentials([first, second], since_start=True).tpot.p50 or 0) <= 5
        assert essentials([second, replace(second, when=3.0)]).tpot.p50 is None

    def test_a_server_that_started_anew_has_no_negative_rates(self, server: FakeServer) -> None:
        watched = Watched(Server(server.url))
        watched.look()
        watched.look()
        before = watched.figures.tokens_per_second
        server.body = server.body.replace("generation_tokens_total{", "x{")
        watched.look()
        assert before == 0
        assert watched.figures.tokens_per_second is None
        watched.look()
        assert watched.figures.tokens_per_second == 0

    def test_only_the_last_minute_is_kept(self, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        watched = Watched(Server(server.url))
        now = 0.0
        monkeypatch.setattr("octavo.cli.scrape.time.monotonic", lambda: now)
        for now in (0.0, 30.0, 59.0, 90.0, 120.0, 500.0):  # noqa: B007
            watched.look()
        assert watched.figures.window == 380
        assert watched.problem == ""


def scrape(when: float, tokens: int, waits: list[tuple[float, int]]) -> Scrape:
    histogram = Histogram.of(TOKEN)
    for wait, times in waits:
        histogram.observe(wait, times)
    buckets = [({"le": bound}, count) for bound, count in histogram.buckets()]
    name = "octavo:inter_token_latency_seconds_bucket"
    return Scrape(when, {name: buckets, "octavo:generation_tokens_total": [({}, tokens)]}, ready=True)


def until(leader: int, words: str, seconds: float = 20) -> str:
    """What the terminal got until these words came."""
    got, deadline = "", time.monotonic() + seconds
    while words not in got:
        left = deadline - time.monotonic()
        assert left > 0, f"{words!r} never came: {got[-2000:]!r}"
        if select.select([leader], [], [], left)[0]:
            got += os.read(leader, 65536).decode("utf-8", "replace")
    return got


class TestReading:
    """Prometheus's text and its histograms."""

    def test_parse_reads_what_prometheus_reads(self, text: str) -> None:
        theirs = {
            (s.name, *sorted(s.labels.items())): s.value
            for f in text_string_to_metric_families(text)
            for s in f.samples
        }
        ours = {(name, *sorted(labels.items())): v for name, many in parse(text).items() for labels, v in many}
        assert ours == theirs
        assert len(ours) > 300

    @settings(deadline=None)
    @given(st.text())
    def test_parse_takes_anything(self, text: str) -> None:
        parse(text)

    def test_labels_with_everything_in_them(self) -> None:
        name = 'a "b" \\ {c="d"} \n, e'
        assert parse(serve_a_little(name))["octavo:engine_up"][0][0]["model_name"] == name

    @settings(deadline=None)
    @given(st.lists(st.floats(0, 79), min_size=1), st.floats(0.01, 0.99))
    def test_a_quantile_lies_in_the_bucket_where_it_is(self, values: list[float], q: float) -> None:
        histogram = Histogram.of(TOKEN)
        for value in values:
            histogram.observe(value)
        found = quantile(q, {float(bound): count for bound, count in histogram.buckets()})
        rank = q * len(values)
        true = next(v for i, v in enumerate(sorted(values), start=1) if i >= rank)
        low, high = (max((b for b in TOKEN if b < true), default=0), min(b for b in TOKEN if b >= true))
        assert found is not None
        assert low - 1e-9 <= found <= high + 1e-9

    def test_a_quantile_of_nothing_and_beyond_the_last_bound(self) -> None:
        assert quantile(0.5, {}) is None
        assert quantile(0.5, {1.0: 0, float("inf"): 0}) is None
        assert quantile(0.5, {1.0: 1, float("inf"): 10}) == 1.0
        assert quantile(0.5, {1.0: 10, float("inf"): 10}) == 0.5  # evenly spread


class TestDrawing:
    """The terminal's view."""

    @settings(deadline=None)
    @given(st.fixed_dictionaries({s: st.integers(0, 10**6) for s in ("shared", "active", "cached", "free")}))
    def test_a_bar_is_to_scale(self, blocks: dict[str, int]) -> None:
        drawn = bar(blocks, 60).plain
        total = sum(blocks.values())
        if not total:
            assert drawn == "unknown"
            return
        assert len(drawn) == 60
        for state, mark in {"shared": "█", "active": "▓", "cached": "▒", "free": "░"}.items():
            count = blocks[state]
            assert abs(drawn.count(mark) - 60 * count / total) <= 4
            assert (drawn.count(mark) > 0) == (count > 0)

    def test_sparkline(self) -> None:
        assert sparkline([0, 1, 2, 4, 8]) == " ▁▂▄█"
        assert sparkline([0, 0]) == "  "

    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_a_view_fits_and_drives_no_terminal(self, width: int, server: FakeServer) -> None:
        server.body = server.body.replace('"toy"', '"to\x1b[31my"')
        figures = essentials([Server(server.url).scrape()])
        console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(view(figures, server.url, width, [1.0, 2.0]))
        shown = console.export_text()
        assert "\x1b" not in shown
        assert max(map(len, shown.splitlines())) <= width
        assert "—" in shown  # no rates from one look

"""What somebody would send who wants the server down, slow or wrong: broken Unicode, huge bodies, endless heads, faults
at the worst moment. Each test stands for a whole kind.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from pydantic import ValidationError

from octavo.engine.request import Request
from octavo.loading.tokenizer import Tokenizer
from octavo.server import connection
from octavo.server.schemas import ChatRequest, CompletionRequest
from octavo.server.service import Admission
from tests.server.test_faults import ENDLESS, SHORT, slow_steps, wait_until
from tests.server.toys import SPELLED, ToyServer, events, toy_server, toy_tokenizer

CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
HALF = "a\ud800b"  # json.dumps writes it as clients do that cut a text between two UTF-16 units: "a\\ud800b"


@pytest.fixture(scope="module")
def toy() -> Iterator[ToyServer]:
    with toy_server() as server:
        yield server


def post(toy: ToyServer, path: str, body: Any, **options: Any) -> httpx.Response:
    """As JSON in ASCII, which httpx's own would not be."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{toy.url}{path}", content=content, headers={"content-type": "application/json"}, timeout=20, **options
    )


# --- what bodies hold -------------------------------------------------------------------------------------------------


def message(**fields: Any) -> dict[str, Any]:
    return CHAT | {"messages": [{"role": "user", "content": "a"} | fields]}


@pytest.mark.parametrize("half", [HALF, "\udfff"])
def test_half_a_surrogate_pair_anywhere_is_no_fault_of_the_server(toy: ToyServer, half: str) -> None:
    function = {"name": "f", "description": half, "parameters": {"type": "object", "properties": {half: {}}}}
    call = {"id": half, "type": "function", "function": {"name": half, "arguments": half}}
    texts: list[dict[str, Any]] = [
        *({name: half} for name in ("prompt", "stop", "cache_salt", "model", "user", "grammar", "n", half)),
        {"prompt": [half, "a"], "echo": True, "logprobs": 1},
        {"stop": [half]},
        {"structured_outputs": {"choice": [half]}},
        {"structured_outputs": {"regex": half}},
        {"logit_bias": {half: 1}},
        {"response_format": {"type": half}},
    ]
    chats = [
        *(message(**{name: half}) for name in ("content", "name", "role", half)),
        message(content=[{"type": "text", "text": half}]),
        CHAT | {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]},
        CHAT | {"tools": [{"type": "function", "function": function}]},
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [half]}}}},
        CHAT | {"chat_template_kwargs": {half: half}},
    ]
    asked = [("/v1/completions", SHORT | text) for text in texts] + [("/v1/chat/completions", chat) for chat in chats]
    for path, body in [*asked, ("/tokenize", {"prompt": half})]:
        response = post(toy, path, body)
        assert response.status_code < 500, (body, response.text)
        assert response.status_code == 200 or response.json()["error"]["message"].endswith(".")


@pytest.mark.parametrize("name", ["my-field", "a b", "Upper", "body", "path", "query", "2", "list[str]", "a\x00"])
def test_a_parameter_not_known_is_refused_by_its_name_whatever_that_is(toy: ToyServer, name: str) -> None:
    for path, body, param in (
        ("/v1/completions", SHORT | {name: 1}, name),
        ("/v1/chat/completions", message(**{name: 1}), f"messages[0].{name}"),
        ("/tokenize", {"prompt": "a", name: 1}, name),
    ):
        error = post(toy, path, body).json()["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")
        assert param in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/tokenize", {"prompt": 5}, "prompt", "a text"),
        ("/tokenize", {"messages": 5}, "messages", "list"),
        ("/v1/completions", SHORT | {"stop": ["a"] * 65}, "stop", "64"),
        ("/v1/completions", SHORT | {"prompt": []}, "prompt", "at least 1"),
        ("/v1/completions", SHORT | {"use_beam_search": True, "n": 5, "best_of": 3}, "best_of", "at least n"),
    ],
)
def test_of_a_union_the_error_is_that_of_what_was_meant(
    toy: ToyServer, path: str, body: Any, param: str, said: str
) -> None:
    error = post(toy, path, body).json()["error"]
    assert error["param"] == param
    assert said in error["message"]


def many(item: str, count: int = 400_000) -> bytes:
    return ",".join([item] * count).encode()


@pytest.mark.parametrize(
    "field",
    [
        b'"prompt":[' + many("[1]") + b"]",
        b'"prompt":[' + many("true") + b"]",
        b'"prompt":[' + many("7") + b"]",
        b'"prompt":"a","stop":[' + many("1") + b"]",
        b'"prompt":"a","logit_bias":{' + b",".join(b'"k%d":1' % i for i in range(400_000)) + b"}",
        b'"prompt":"a",' + b",".join(b'"k%d":1' % i for i in range(400_000)),
    ],
    ids=["lists", "booleans", "ids", "stops", "biases", "strangers"],
)
def test_a_body_of_a_million_errors_is_looked_at_up_to_the_first_few(toy: ToyServer, field: bytes) -> None:
    """Each error that pydantic gathers takes time in which nobody else is served."""
    body = b'{"model":"toy",' + field + b"}"
    assert post(toy, "/v1/completions", body).status_code == 400
    try:
        CompletionRequest.model_validate(json.loads(body))
    except ValidationError as error:  # too many ids are found too many for the context only later
        assert error.error_count() < 20  # noqa: PT017


def test_control_tokens_in_tools_and_template_variables_stay_text() -> None:
    toy = toy_tokenizer()
    template = "<s>{{ tools }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}</s>"
    tokenizer = Tokenizer(
        vocabulary=toy.vocabulary,
        encoder=toy.encoder,
        bos_id=0,
        eos_ids=toy.eos_ids,
        chat_template=template,
        named_tokens={},
    )
    tools = [{"description": "a</s><a>b", "parameters": {"properties": {"</s>": {}}}}]
    ids = tokenizer.encode_chat([{"role": "user", "content": "c"}], tools=tools, mood="d</s>")
    assert [token for token in ids if token < 4] == [0, SPELLED.index("</s>")]


# --- how much is asked ------------------------------------------------------------------------------------------------


def test_more_than_would_ever_fit_is_refused_and_not_let_into_an_empty_house() -> None:
    with toy_server({"max_queued": 10}, max_num_seqs=8) as toy:
        response = toy.post("/v1/completions", SHORT | {"prompt": ["a"] * 10, "n": 2})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_sequences")
        assert toy.post("/v1/completions", SHORT | {"prompt": ["a"] * 9, "n": 2}).status_code == 200
        house: Admission = toy.server.service.admission
        assert house.inside == 0


def test_of_several_prompts_none_is_computed_if_one_cannot_be(toy: ToyServer) -> None:
    steps = len(toy.model.steps)
    assert toy.post("/v1/completions", SHORT | {"prompt": [[4, 5], [99]]}).status_code == 400
    assert len(toy.model.steps) == steps


# --- the worst moment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_the_time_of_a_request_is_over_while_its_grammar_is_made(stream: bool) -> None:
    with toy_server({"request_timeout": 0.2}) as toy:
        released = threading.Event()
        with patch.object(toy.llm._engine.constraints, "compile", lambda _: released.wait(10)):
            response = toy.post("/v1/completions", SHORT | {"structured_outputs": {"regex": "[a-e]"}, "stream": stream})
            assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
            released.set()
        assert toy.server.service.admission.inside == 0
        assert toy.held_blocks() == 0


def test_one_answer_that_cannot_be_told_ends_alone(toy: ToyServer) -> None:
    news = Request.news

    def broken(request: Request) -> Any:
        if request.prompt_token_ids[-1] == SPELLED.index("l"):
            raise ValueError("a broken detokenizer")
        return news(request)

    answers: list[str] = []
    with slow_steps(toy, 0.005), patch.object(Request, "news", broken):
        other = threading.Thread(
            target=lambda: answers.append(toy.post("/v1/completions", ENDLESS | {"max_tokens": 50}).text)
        )
        other.start()
        wait_until(lambda: toy.held_blocks() > 0)
        response = toy.post("/v1/completions", SHORT | {"prompt": "l"})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        other.join()
    assert events(answers[0])[-1]["choices"][0]["finish_reason"] == "length"
    assert httpx.get(f"{toy.url}/health").status_code == 200
    wait_until(lambda: toy.held_blocks() == 0)
    assert toy.server.service.admission.inside == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_and_cannot_even_tell_ends_every_stream() -> None:
    def broken(_: Request) -> Any:
        raise ValueError("a broken detokenizer")

    def dying(*_: Any) -> Any:
        raise SystemExit("the engine's thread ends")

    with toy_server() as toy, patch.object(Request, "news", broken):
        toy.model.forward = dying  # type: ignore[method-assign]
        assert toy.post("/v1/completions", SHORT).status_code in (500, 503)
        assert httpx.get(f"{toy.url}/health/live").status_code == 503


def test_a_bug_in_a_route_has_openais_shape(toy: ToyServer) -> None:
    with patch.object(toy.server.service, "check_model", side_effect=ZeroDivisionError):
        response = toy.post("/v1/completions", SHORT)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "x-request-id" in response.headers


# --- connections ------------------------------------------------------------------------------------------------------


def ended(client: socket.socket, seconds: float) -> bytes:
    """What comes until the server closes the connection, which it must within so many seconds."""
    client.settimeout(seconds)
    received = b""
    try:
        while piece := client.recv(2**16):
            received += piece
    except ConnectionError:
        pass
    return received


def test_a_head_without_an_end_is_cut_off(toy: ToyServer) -> None:
    with socket.create_connection(("127.0.0.1", toy.server.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        header = b"X-Filler: " + b"a" * 8000 + b"\r\n"
        with pytest.raises(ConnectionError):
            client.sendall(header * 4000)
    with socket.create_connection(("127.0.0.1", toy.server.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header * 5 + b"\r\n")
        assert ended(client, 5).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "begin",
    [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
def test_who_does_not_say_what_he_wants_is_not_waited_for(toy: ToyServer, begin: bytes) -> None:
    with (
        patch.object(connection, "LONGEST_ARRIVAL", 0.2),
        socket.create_connection(("127.0.0.1", toy.server.port)) as client,
    ):
        client.sendall(begin)
        ended(client, 5)


def test_a_slow_answer_is_no_slow_request(toy: ToyServer) -> None:
    with patch.object(connection, "LONGEST_ARRIVAL", 0.2), slow_steps(toy, 0.02):
        response = toy.post("/v1/completions", ENDLESS | {"max_tokens": 40})
    assert events(response.text)[-1]["choices"][0]["finish_reason"] == "length"


def test_hundreds_of_idle_connections_keep_nobody_out(toy: ToyServer) -> None:
    async def idle_and_ask() -> int:
        idle = [await asyncio.open_connection("127.0.0.1", toy.server.port) for _ in range(300)]
        async with httpx.AsyncClient() as client:
            response = await client.post(f"{toy.url}/v1/completions", json=SHORT, timeout=10)
        for _, writer in idle:
            writer.close()
        return response.status_code

    assert asyncio.run(idle_and_ask()) == 200


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/../health/../v1/models", "/page/../v1/models", "/page/..%2fv1/models"]
)
def test_no_path_leads_around_the_key(path: str) -> None:
    with toy_server({"api_keys": ("k",)}) as toy, socket.create_connection(("127.0.0.1", toy.server.port)) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = ended(client, 5)
        assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 404"))
        assert b'"object"' not in answer


def test_chat_requests_are_read_as_before() -> None:
    assert ChatRequest.model_validate(CHAT | {"stop_token_ids": [3.0, 4]}).stop_token_ids == [3, 4]

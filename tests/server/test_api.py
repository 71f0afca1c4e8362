"""The routes over the toy engine: shapes, parameters refused by name, echo, samples, beams, errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.toys import EOS, ToyServer, events, toy_server, toy_tokenizer

CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 8}
TEXT: dict[str, Any] = {"model": "toy", "prompt": "abc", "max_tokens": 8}


@pytest.fixture(scope="module")
def toy() -> Iterator[ToyServer]:
    with toy_server() as server:
        yield server


def ask(toy: ToyServer, path: str, **body: Any) -> Any:
    response = toy.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(toy: ToyServer, body: Any, path: str = "/v1/chat/completions") -> dict[str, Any]:
    response = toy.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def test_a_chat_completion_has_openais_shape_and_true_counts(toy: ToyServer) -> None:
    reply = ask(toy, "/v1/chat/completions", **CHAT, seed=1, ignore_eos=True)
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    prompt = toy_tokenizer().encode_chat(CHAT["messages"])
    assert reply["usage"]["prompt_tokens"] == len(prompt) == 6
    assert reply["usage"]["completion_tokens"] == 8
    assert reply["usage"]["total_tokens"] == 14


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_whole_answer(toy: ToyServer, path: str, n: int) -> None:
    chat = "chat" in path
    body = (CHAT if chat else TEXT) | {"seed": 3, "n": n, "max_tokens": 40}
    whole = ask(toy, path, **body)
    streamed = events(toy.post(path, body | {"stream": True, "stream_options": {"include_usage": True}}).text)
    texts, reasons = dict.fromkeys(range(n), ""), dict.fromkeys(range(n))
    for chunk in streamed:
        for choice in chunk["choices"]:
            assert reasons[choice["index"]] is None, "a choice goes on after its end"
            texts[choice["index"]] += choice["delta"].get("content", "") if chat else choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    expected = [c["message"]["content"] if chat else c["text"] for c in whole["choices"]]
    assert list(texts.values()) == expected
    assert list(reasons.values()) == [c["finish_reason"] for c in whole["choices"]]
    assert [chunk["usage"] for chunk in streamed[:-1]] == [None] * (len(streamed) - 1)
    counted = streamed[-1]["usage"]
    assert {k: counted[k] for k in ("prompt_tokens", "completion_tokens")} == {
        k: whole["usage"][k] for k in ("prompt_tokens", "completion_tokens")
    }
    assert len({chunk["id"] for chunk in streamed}) == 1


def test_usage_is_streamed_only_if_asked_for(toy: ToyServer) -> None:
    assert all("usage" not in chunk for chunk in events(toy.post("/v1/completions", TEXT | {"stream": True}).text))


def test_several_prompts_give_choices_in_their_order(toy: ToyServer) -> None:
    together = ask(toy, "/v1/completions", **TEXT | {"prompt": ["abc", "fgh"], "n": 2, "seed": 5})
    alone = [ask(toy, "/v1/completions", **TEXT | {"prompt": p, "n": 2, "seed": 5}) for p in ("abc", "fgh")]
    assert [c["index"] for c in together["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in together["choices"]] == [c["text"] for reply in alone for c in reply["choices"]]
    assert together["usage"]["completion_tokens"] == sum(r["usage"]["completion_tokens"] for r in alone)
    ids = ask(toy, "/v1/completions", **TEXT | {"prompt": [[0, 4, 5, 6], [0, 9, 10, 11]], "n": 2, "seed": 5})
    assert [c["text"] for c in ids["choices"]] == [c["text"] for c in together["choices"]]


def test_echo_gives_the_prompt_with_its_logprobs_and_nothing_more_for_max_tokens_0(toy: ToyServer) -> None:
    body = TEXT | {"echo": True, "logprobs": 2, "max_tokens": 0}
    (choice,) = ask(toy, "/v1/completions", **body)["choices"]
    assert choice["text"] == "abc"
    probs = choice["logprobs"]
    assert probs["tokens"] == ["<s>", "a", "b", "c"]
    assert probs["token_logprobs"][0] is None
    assert all(p < 0 for p in probs["token_logprobs"][1:])
    assert [len(t) for t in probs["top_logprobs"][1:]] in ([2, 2, 2], [3, 2, 2], [3, 3, 3], [2, 3, 3], [2, 2, 3])
    longer = ask(toy, "/v1/completions", **body | {"max_tokens": 5, "seed": 1, "ignore_eos": True})
    assert longer["choices"][0]["text"].startswith("abc")
    assert len(longer["choices"][0]["logprobs"]["tokens"]) == 9
    assert longer["choices"][0]["logprobs"]["token_logprobs"][:4] == probs["token_logprobs"]
    streamed = events(
        toy.post("/v1/completions", body | {"max_tokens": 5, "seed": 1, "ignore_eos": True, "stream": True}).text
    )
    assert "".join(c["choices"][0]["text"] for c in streamed) == longer["choices"][0]["text"]
    pieces = [c["choices"][0]["logprobs"] for c in streamed if c["choices"][0]["logprobs"]]
    for key, values in longer["choices"][0]["logprobs"].items():
        assert [v for piece in pieces for v in piece[key]] == values


def test_chat_logprobs_hold_the_likeliest_and_their_bytes(toy: ToyServer) -> None:
    reply = ask(toy, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=3, temperature=0, ignore_eos=True)
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["token"] == entry["top_logprobs"][0]["token"]
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_beams_come_best_first_and_equal_the_engines_own(toy: ToyServer) -> None:
    reply = ask(toy, "/v1/completions", **TEXT, use_beam_search=True, n=2, best_of=4, temperature=0)
    assert len(reply["choices"]) == 2
    streamed = events(
        toy.post("/v1/completions", TEXT | {"use_beam_search": True, "n": 2, "best_of": 4, "stream": True}).text
    )
    texts = ["", ""]
    for chunk in streamed:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [c["text"] for c in reply["choices"]]


def test_the_same_prompt_again_is_found_in_the_cache_unless_salted(toy: ToyServer) -> None:
    body = TEXT | {"prompt": "abcdefghijklmno", "cache_salt": "s"}
    first, again = (ask(toy, "/v1/completions", **body)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == 12
    other = ask(toy, "/v1/completions", **body | {"cache_salt": "t"})["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_stop_strings_and_their_reason(toy: ToyServer) -> None:
    free = ask(toy, "/v1/completions", **TEXT, temperature=0, ignore_eos=True)["choices"][0]["text"]
    stop = free[3]
    cut = ask(toy, "/v1/completions", **TEXT, temperature=0, ignore_eos=True, stop=stop)["choices"][0]
    assert cut["text"] == free[: free.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = ask(
        toy, "/v1/completions", **TEXT, temperature=0, ignore_eos=True, stop=[stop], include_stop_str_in_output=True
    )["choices"][0]
    assert kept["text"] == cut["text"] + stop


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {}}, "audio"),
        ({"store": True}, "store"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"x": 1}}, None),
        ({"logit_bias": {"99": 1}}, None),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"length_penalty": 1.0}, "length_penalty"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 100000}, "messages"),
        ({"messages": [{"role": "user", "content": "abc" * 200}]}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_any_work(toy: ToyServer, change: dict[str, Any], param: str) -> None:
    steps = len(toy.model.steps)
    error = refused(toy, CHAT | change)
    if param is not None:
        assert error["param"] == param
        assert param.split(".")[-1].split("[")[0] in error["message"] or "context" in error["message"]
    assert len(toy.model.steps) == steps


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "toy"', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(toy: ToyServer, body: bytes) -> None:
    response = httpx.post(f"{toy.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_an_unknown_model_path_or_method_is_said_so(toy: ToyServer) -> None:
    response = toy.post("/v1/completions", TEXT | {"model": "gpt"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert httpx.get(f"{toy.url}/v1/models/gpt").status_code == 404
    assert httpx.get(f"{toy.url}/nowhere").json()["error"]["type"] == "invalid_request_error"
    response = httpx.get(f"{toy.url}/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "POST" in response.json()["error"]["message"]


def test_models_version_and_tokens(toy: ToyServer) -> None:
    models = httpx.get(f"{toy.url}/v1/models").json()
    assert [m["id"] for m in models["data"]] == ["toy"]
    assert models["data"][0]["max_model_len"] == 512
    assert httpx.get(f"{toy.url}/v1/models/toy").json() == models["data"][0]
    assert httpx.get(f"{toy.url}/version").json()["version"]
    tokens = ask(toy, "/tokenize", prompt="abc", return_token_strs=True)
    assert (tokens["tokens"], tokens["token_strs"], tokens["count"]) == ([0, 4, 5, 6], ["<s>", "a", "b", "c"], 4)
    assert ask(toy, "/tokenize", prompt="abc", add_special_tokens=False)["tokens"] == [4, 5, 6]
    assert ask(toy, "/tokenize", messages=CHAT["messages"])["tokens"] == [0, 2, 4, 5, 6, 1]
    assert ask(toy, "/detokenize", tokens=[0, 4, 5, 6, EOS])["prompt"] == "<s>abc</s>"
    assert refused(toy, {"prompt": "a", "messages": CHAT["messages"]}, "/tokenize")
    assert refused(toy, {}, "/tokenize")


def test_control_tokens_in_a_message_stay_text(toy: ToyServer) -> None:
    said = ask(toy, "/tokenize", messages=[{"role": "user", "content": "a</s>b"}])["tokens"]
    assert EOS not in said


def test_the_api_document_is_served_and_names_every_route(toy: ToyServer) -> None:
    document = httpx.get(f"{toy.url}/openapi.json").json()
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/metrics",
    } <= set(document["paths"])


def test_deep_nesting_is_refused_not_a_crash(toy: ToyServer) -> None:
    text = '{"model": "toy", "messages": [{"role": "user", "content": ' + "[" * 3000 + "]" * 3000 + "}]}"
    response = httpx.post(f"{toy.url}/v1/chat/completions", content=text, headers={"content-type": "application/json"})
    assert response.status_code == 400

"""The clients people have, unchanged, against `octavo serve` on real weights: openai, litellm, LangChain."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network
KEY = "a-key"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}


@pytest.fixture(scope="module")
def url(smollm2_path: Any) -> Iterator[str]:
    command = [sys.executable, "-c", "from octavo.cli import main; main()", "serve", "smollm2", "--port", "0"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OCTAVO_API_KEY": KEY, "OMP_NUM_THREADS": "2"}
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "serving" in line and "http://" in line:
            break
    else:
        pytest.fail("the server did not start")
    drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
    yield line.split(" at ")[1].split()[0] + "/v1"
    process.terminate()
    assert process.wait(30) == 0
    drain.wait()


@pytest.fixture(scope="module")
def answer(url: str) -> str:
    """What the server answers to the question, by no client library."""
    body = {"model": "smollm2", "messages": QUESTION, **GREEDY}
    reply = httpx.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    text = reply.json()["choices"][0]["message"]["content"]
    assert len(text) > 10
    return text


def test_the_readme_s_client_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "from openai" in b]
    exec(block.replace("http://127.0.0.1:8000/v1", url).replace('"none"', f'"{KEY}"'), {})
    assert len(capsys.readouterr().out) > 5


# --- openai -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)


def test_openai_answers_whole_and_streamed(openai_client: Any, answer: str) -> None:
    whole = openai_client.chat.completions.create(model="smollm2", messages=QUESTION, **GREEDY)
    assert whole.choices[0].message.content == answer
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens > 0
    chunks = list(
        openai_client.chat.completions.create(
            model="smollm2", messages=QUESTION, **GREEDY, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_answers_many_at_once_asynchronously(url: str, answer: str) -> None:
    import openai

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as client:

            async def one(stream: bool) -> str:
                made = await client.chat.completions.create(model="smollm2", messages=QUESTION, **GREEDY, stream=stream)
                if not stream:
                    return made.choices[0].message.content or ""
                return "".join([c.choices[0].delta.content or "" async for c in made])

            return list(await asyncio.gather(*(one(i % 2 == 0) for i in range(8))))

    assert asyncio.run(main()) == [answer] * 8


def test_openai_completions_models_and_logprobs(openai_client: Any) -> None:
    assert [m.id for m in openai_client.models.list()] == ["smollm2"]
    made = openai_client.completions.create(
        model="smollm2", prompt=["The sea", "The sky"], max_tokens=5, n=2, logprobs=3, echo=True, seed=1
    )
    assert len(made.choices) == 4
    assert made.choices[0].text.startswith("The sea")
    assert len(made.choices[0].logprobs.tokens) == 7
    chat = openai_client.chat.completions.create(
        model="smollm2", messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY
    )
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content).startswith(chat.choices[0].message.content)
    extras = {"top_k": 5, "min_p": 0.1, "use_beam_search": False, "priority": 1, "cache_salt": "x"}
    assert openai_client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=3, extra_body=extras
    ).choices


def test_openai_parses_answers_into_models(openai_client: Any) -> None:
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=20)
        country: str = Field(max_length=20)
        inhabitants: int = Field(ge=0, le=10**8)

    made = openai_client.chat.completions.parse(
        model="smollm2", messages=QUESTION, response_format=City, max_tokens=200, temperature=0
    )
    assert isinstance(made.choices[0].message.parsed, City)
    free = openai_client.chat.completions.create(
        model="smollm2", messages=QUESTION, response_format={"type": "json_object"}, max_tokens=300, seed=3
    )
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_openai_calls_tools_whole_and_streamed(openai_client: Any, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 100,
    }
    whole = openai_client.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    arguments, names = "", []
    for chunk in openai_client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            names += [piece.function.name] if piece.function.name else []
            arguments += piece.function.arguments or ""
    assert (names, arguments) == (["weather"], call.function.arguments)
    followed = [
        *asked["messages"],
        whole.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "It rains."},
    ]
    said = openai_client.chat.completions.create(**{**asked, "messages": followed, "tool_choice": "none"})
    assert said.choices[0].message.content
    assert not said.choices[0].message.tool_calls


def test_openai_raises_its_own_errors(url: str, openai_client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="not served here"):
        openai_client.chat.completions.create(model="gpt-5", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        openai_client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="reasoning_effort is not supported"):
        openai_client.chat.completions.create(model="smollm2", messages=QUESTION, reasoning_effort="low")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()


# --- litellm ----------------------------------------------------------------------------------------------------------


def test_litellm_sync_and_async_whole_and_streamed(url: str, answer: str) -> None:
    import litellm

    asked: dict[str, Any] = {
        "model": "openai/smollm2",
        "messages": QUESTION,
        "api_base": url,
        "api_key": KEY,
        **GREEDY,
    }
    assert litellm.completion(**asked).choices[0].message.content == answer
    assert "".join(c.choices[0].delta.content or "" for c in litellm.completion(**asked, stream=True)) == answer

    async def main() -> tuple[str, str]:
        whole = await litellm.acompletion(**asked)
        streamed = [c.choices[0].delta.content or "" async for c in await litellm.acompletion(**asked, stream=True)]
        return whole.choices[0].message.content, "".join(streamed)

    assert asyncio.run(main()) == (answer, answer)
    text = litellm.text_completion(
        model="text-completion-openai/smollm2", prompt="The sea", api_base=url, api_key=KEY, max_tokens=4
    )
    assert text.choices[0].text


# --- LangChain --------------------------------------------------------------------------------------------------------


def test_langchain_sync_and_async_whole_and_streamed(url: str, answer: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="smollm2", base_url=url, api_key=KEY, temperature=0, max_tokens=24)  # type: ignore[call-arg]
    said = model.invoke(QUESTION)
    assert said.content == answer
    assert said.usage_metadata is not None
    assert "".join(str(piece.content) for piece in model.stream(QUESTION)) == answer

    async def main() -> tuple[Any, str]:
        streamed = [str(piece.content) async for piece in model.astream(QUESTION)]
        return (await model.ainvoke(QUESTION)).content, "".join(streamed)

    assert asyncio.run(main()) == (answer, answer)


def test_langchain_calls_tools_and_answers_in_a_structure(url: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"It rains in {city}."

    class Capital(BaseModel):
        """A capital."""

        name: str = Field(max_length=20)

    model = ChatOpenAI(model="smollm2", base_url=url, api_key=KEY, temperature=0, max_tokens=200)  # type: ignore[call-arg]
    called = model.bind_tools([weather], tool_choice="weather").invoke("How is the weather in Paris?")
    assert [call["name"] for call in called.tool_calls] == ["weather"]
    assert set(called.tool_calls[0]["args"]) == {"city"}
    for method in ("json_schema", "function_calling"):
        made = model.with_structured_output(Capital, method=method).invoke(QUESTION)
        assert isinstance(made, Capital)

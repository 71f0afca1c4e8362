"""A server on the toy engine, in a thread: real sockets and clients, thousands of steps a second, faults on demand."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import httpx

from octavo.async_llm import AsyncLLM
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.loading.tokenizer import Tokenizer, Vocabulary
from octavo.server.run import Server, bind
from octavo.server.settings import ServerSettings
from tests.engine.toy import EOS, VOCAB, ToyModel, ToyOps

SPELLED = ["<s>", "<a>", "<b>", "</s>", *'abcdefghijklmnop {}":'][:VOCAB]
TEMPLATE = (
    "<s>{% for m in messages %}{{ '<a>' if m.role == 'assistant' else '<b>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def toy_tokenizer() -> Tokenizer:
    """A character a token; what it has no token for is left out."""
    ids = {text: token for token, text in enumerate(SPELLED)}

    def encode(text: str, *, add: bool, parse: bool) -> list[int]:
        found = [0] if add else []
        while text:
            spelled = next((s for s in SPELLED[:4] if parse and text.startswith(s)), text[0])
            found += [ids[spelled]] if spelled in ids else []
            text = text[len(spelled) :]
        return found

    vocabulary = Vocabulary(
        size=VOCAB,
        text=lambda token: SPELLED[token],
        bytes=lambda token: SPELLED[token].encode(),
        special_ids=frozenset(range(4)),
    )
    return Tokenizer(
        vocabulary=vocabulary,
        encoder=encode,
        bos_id=0,
        eos_ids=frozenset({EOS}),
        chat_template=TEMPLATE,
        named_tokens={},
    )


@dataclass(slots=True)
class ToyServer:
    """A running server and what is behind it."""

    url: str
    server: Server
    llm: AsyncLLM
    model: ToyModel

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=30, **options)

    def held_blocks(self) -> int:
        """Blocks that somebody holds, between two steps."""
        report = self.llm.call(Engine.memory_report).result(10)
        return report.active + report.shared


@contextmanager
def toy_server(settings: dict[str, Any] | None = None, **config: Any) -> Iterator[ToyServer]:
    """A toy model named "toy", served on a port of its own until the end of the block."""
    model = ToyModel(config.pop("max_positions", 512))
    chosen = EngineConfig(**{"num_blocks": 400, "block_size": 4, "swap_memory": 8 * 4 * 64, **config})
    engine = Engine(model, ToyOps(), chosen, tokenizer=toy_tokenizer(), eos_ids={EOS})  # type: ignore[arg-type]
    with patch("octavo.async_llm.load_engine", lambda *_: engine):
        llm = AsyncLLM("toy")
    served = ServerSettings(model_names=("toy",), port=0, **(settings or {}))
    listening, ready = bind(served), threading.Event()
    server = Server(llm, served, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield ToyServer(f"http://127.0.0.1:{server.port}", server, llm, model)
    finally:
        server.handle_exit(15, None)
        server.handle_exit(15, None)
        thread.join(20)
        llm.close()
        assert not thread.is_alive()


def free_port() -> int:
    """A port that nobody listens at, most likely."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def events(text: str) -> list[Any]:
    """The JSON of a stream's events; the last must be [DONE]."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), text[:500]
    assert lines[-1] == "data: [DONE]", lines[-1]
    return [json.loads(line[6:]) for line in lines[:-1]]

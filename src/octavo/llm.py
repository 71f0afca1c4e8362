"""The synchronous face: name a model, hand in prompts, get answers. Knows no HTTP and no command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.report import MemoryReport
from octavo.engine.request import Request, State
from octavo.errors import ConfigError, RequestError
from octavo.interrupts import undivided
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.tokenizer import Tokenizer
from octavo.outputs import RequestOutput
from octavo.params import BeamParams, SamplingParams

Message: TypeAlias = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message]"  # a text, its token ids, or a conversation
Params: TypeAlias = "SamplingParams | BeamParams"


def load_engine(model: str | Path, config: EngineConfig) -> Engine:
    """An engine on the model of this path, built-in name or Hub id. Raises ModelError or ConfigError."""
    from octavo import models
    from octavo.loading.checkpoint import load_checkpoint
    from octavo.loading.resolve import resolve
    from octavo.ops.backends import choose

    checkpoint = load_checkpoint(resolve(model))
    ops = choose(config, quantised=checkpoint.quantised, head_dim=checkpoint.config["head_dim"])
    built = models.build(checkpoint, ops, config.max_model_len)
    return Engine(built, ops, config, tokenizer=checkpoint.tokenizer, eos_ids=_eos_ids(checkpoint))


def _eos_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """The tokens that end an answer; a model without a tokenizer names them in its settings, if anywhere."""
    if checkpoint.tokenizer is not None:
        return checkpoint.tokenizer.eos_ids
    named = checkpoint.config.get("eos_token_id")
    return frozenset(named if isinstance(named, list) else [named] if named is not None else [])


def make_config(config: EngineConfig | None, settings: Mapping[str, Any]) -> EngineConfig:
    """The config given, or one of the settings given by name. Raises ConfigError for both, or an unknown name."""
    if config is not None:
        if settings:
            raise ConfigError(f"Give a config or single settings ({', '.join(settings)}), not both.")
        return config
    known = EngineConfig.__dataclass_fields__
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(f"There is no engine setting {unknown[0]!r}; there are {', '.join(known)}.")
    return EngineConfig(**settings)


def tokenize(tokenizer: Tokenizer | None, prompt: Prompt) -> tuple[str | None, list[int]]:
    """(text, token ids) of a prompt of any kind. Raises RequestError for one that is none of them."""
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return prompt, _tokenizer(tokenizer).encode(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise RequestError(f"A prompt is a text, token ids or messages, not {type(prompt).__name__}.")
    if all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompt):
        return None, [int(item) for item in prompt if isinstance(item, Integral)]
    if not all(isinstance(item, Mapping) and "role" in item and "content" in item for item in prompt):
        raise RequestError("A prompt is a text, a list of token ids, or a list of messages with role and content.")
    messages = [dict(item) for item in prompt if isinstance(item, Mapping)]
    return _tokenizer(tokenizer).render_chat(messages), _tokenizer(tokenizer).encode_chat(messages)


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise RequestError("This model has no tokenizer; give token ids.")
    return tokenizer


def _plain(prompt: Any) -> Any:
    """An array of token ids, NumPy's or another's, as lists."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


class LLM:
    """A model ready to answer one caller; for several at once, or from several threads, there is AsyncLLM.

    Settings are EngineConfig's, by name: `LLM("smollm2", kv_memory="2GiB")`.

    Raises ModelError if the model cannot be had, ConfigError for a setting that cannot be.
    """

    def __init__(self, model: str | Path = "smollm2", *, config: EngineConfig | None = None, **settings: Any) -> None:
        self.engine = load_engine(model, make_config(config, settings))

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer one prompt or many (together, in one batch); results come in the order of the prompts.

        A prompt is a text, a list of token ids, or a list of messages (rendered by the model's chat template).
        `params` is one for all or one for each. Raises RequestError if any of them can never be served; nothing is
        run then.
        """
        requests = self._add(prompts, params, priority, cache_salt)
        try:
            for request in requests:
                while request.state is not State.FINISHED:
                    self._step()
        finally:
            self._abort(requests)
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Iterator[list[tuple[int, RequestOutput]]]:
        """The same, step by step: each item holds (place of the prompt, its answer so far) for those that changed.

        Leaving the loop early aborts what still runs.
        """
        requests = self._add(prompts, params, priority, cache_salt)
        unended = {request: place for place, request in enumerate(requests)}  # as far as the caller has seen
        try:
            for request in requests:
                while request.state is not State.FINISHED:
                    changed = [(unended[r], r) for r in self._step() if r in unended]
                    for _, ended in [pair for pair in changed if pair[1].state is State.FINISHED]:
                        del unended[ended]
                    yield [(place, r.output()) for place, r in changed]
            if unended:  # another call, made meanwhile, took the steps in which these ended
                yield [(place, r.output()) for r, place in unended.items()]
        finally:
            self._abort(requests)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of {"role", "content"}; `options` as for `generate`."""
        texts = isinstance(messages, str) or any(isinstance(item, str) for item in messages)
        if texts:
            raise RequestError("chat takes messages, each with role and content; generate takes texts.")
        return self.generate(messages, params, **options)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamParams | None = None, **options: Any
    ) -> list[RequestOutput]:
        """The likeliest answers by beam search, best first; `options` as for `generate`."""
        return self.generate(prompts, params or BeamParams(), **options)

    def memory_report(self) -> MemoryReport:
        """What the KV memory did since the model was loaded."""
        return self.engine.memory_report()

    def _step(self) -> list[Request]:
        with undivided():
            return self.engine.step()

    def _add(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None, priority: int, salt: str
    ) -> list[Request]:
        batch = as_batch(prompts)
        each = _params_for_each(params, len(batch))
        requests: list[Request] = []
        try:
            for prompt, own in zip(batch, each, strict=True):
                text, ids = tokenize(self.tokenizer, prompt)
                name = uuid4().hex
                requests.append(
                    self.engine.add_request(name, ids, own, prompt=text, priority=priority, cache_salt=salt)
                )
        except BaseException:
            self._abort(requests)
            raise
        return requests

    def _abort(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.abort(request.id)


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts: one prompt of any kind becomes a list of one."""
    prompts = _plain(prompts)
    if isinstance(prompts, (str, bytes, bytearray, memoryview)) or not isinstance(prompts, Sequence):
        return [prompts]  # what is no prompt is refused when it is tokenized
    if prompts and isinstance(prompts[0], (Integral, Mapping)):
        return [prompts]  # type: ignore[list-item]  # a list of token ids or of messages is one prompt
    return list(prompts)  # type: ignore[arg-type]


def _params_for_each(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, (SamplingParams, BeamParams)):
        return [params] * count
    if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
        raise RequestError(f"params is {params!r}; it must be SamplingParams, BeamParams or a list of them.")
    if len(params) != count:
        raise RequestError(f"There are {count} prompts but {len(params)} params; give one for all or one for each.")
    return list(params)

"""Answers put together from what comes of them step by step: whole, or as the chunks of a stream. Knows no shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from octavo.outputs import RequestOutput
from octavo.server.streaming import DONE, encoded, event

Json = dict[str, Any]
Deltas = AsyncGenerator[list[tuple[int, RequestOutput]], None]  # of each step: (place of the prompt, what is new)


class Usage:
    """OpenAI's `usage`: tokens of all prompts of one HTTP request and of their answers."""

    def __init__(self) -> None:
        self._latest: dict[int, RequestOutput] = {}  # by the place of the prompt

    def note(self, place: int, output: RequestOutput) -> None:
        """Take in the newest state of a request."""
        self._latest[place] = output

    def as_dict(self) -> Json:
        """What is sent."""
        outputs = self._latest.values()
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(output.output_tokens for output in outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
        }


async def whole(deltas: Deltas, usage: Usage) -> list[RequestOutput]:
    """The outputs of all prompts in their order, each with its completions in theirs."""
    outputs: dict[int, RequestOutput] = {}
    async for news in deltas:
        for place, output in news:
            if place in outputs:
                outputs[place].extend(output)
            else:
                outputs[place] = output
            usage.note(place, outputs[place])
    for output in outputs.values():
        output.completions.sort(key=lambda completion: completion.index)
    return [outputs[place] for place in sorted(outputs)]


async def chunks(
    deltas: Deltas,
    usage: Usage,
    named: Json,
    choices: Callable[[int, RequestOutput], list[Json]],
    last: Callable[[], Json] | None,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream, those of one step together: each is `named` with one of the `choices` of a step.

    With `last`, a chunk without choices that has it as its `usage` comes at the end; all others have null.
    """
    # What is the same in all of them is encoded once: this goes round for every token of every client.
    begin = b"data: " + encoded(named)[:-1] + b',"choices":['
    end = b"]}\n\n" if last is None else b'],"usage":null}\n\n'
    async with aclosing(deltas) as stream:
        async for news in stream:
            found: list[Json] = []
            for place, output in news:
                usage.note(place, output)
                found += choices(place, output)
            if found:
                yield b"".join([begin + encoded(choice) + end for choice in found])
    if last is not None:
        yield event({**named, "choices": [], "usage": last()})
    yield DONE

"""Tokens of an answer, counted as its parts go by. Knows outputs only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.outputs import RequestOutput


@dataclass(slots=True)
class Usage:
    """Of all prompts of one HTTP request."""

    _latest: dict[int, RequestOutput] = field(default_factory=dict)  # by the place of the prompt

    def note(self, place: int, output: RequestOutput) -> None:
        """Take in the newest state of a request."""
        self._latest[place] = output

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        outputs = self._latest.values()
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(output.output_tokens for output in outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
        }

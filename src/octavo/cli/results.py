"""An output as JSON: the one shape that `generate --json` and `batch` write. Knows outputs only."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.outputs import RequestOutput


def as_dict(output: RequestOutput) -> dict[str, Any]:
    """The answers, token counts and timings in seconds; what was not asked for (logprobs, scores) is left out."""
    timings = output.timings
    finished = timings.finished
    return {
        "completions": [
            {key: value for key, value in asdict(completion).items() if key in _ALWAYS or value is not None}
            for completion in output.completions
        ],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.cached_tokens,
        "output_tokens": sum(len(completion.token_ids) for completion in output.completions),
        "ttft": None if timings.ttft is None else round(timings.ttft, 4),
        "seconds": None if finished is None else round(finished - timings.arrived, 4),
        "error": output.error,
        **({"prompt_logprobs": [p and asdict(p) for p in output.prompt_logprobs]} if output.prompt_logprobs else {}),
    }


_ALWAYS = {"index", "text", "token_ids", "finish_reason"}

"""A line on answers that ended before they were done. Knows outputs and counts; not where they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.outputs import Completion, RequestOutput


def out_of_memory(outputs: Mapping[int, RequestOutput], num_blocks: int) -> str | None:
    """What to say of the answers that outgrew the KV pool; `outputs` by the place of their prompts, from 0."""
    full = {place: [c for c in o.completions if c.stop_reason == "kv_memory"] for place, o in outputs.items()}
    names = _answers(outputs, full)
    pool = f"the KV pool of {num_blocks:,} block{'' if num_blocks == 1 else 's'} is full"
    return names and f"{names} ended early: {pool}; raise --kv-memory or --num-blocks."


def out_of_tokens(outputs: Mapping[int, RequestOutput], max_tokens: int | None) -> str | None:
    """What to say of the answers that took as many tokens as they might."""
    cut = {
        place: [c for c in o.completions if c.finish_reason == "length" and len(c.token_ids) == max_tokens]
        for place, o in outputs.items()
    }
    names = _answers(outputs, cut)
    return names and f"{names} ended at --max-tokens, {max_tokens}."


def _answers(outputs: Mapping[int, RequestOutput], chosen: Mapping[int, list[Completion]]) -> str | None:
    """How the chosen answers are numbered on the screen: "answer 1", "answers 1.2 and 3"; None where there are none."""
    names = [
        f"{place + 1}.{completion.index + 1}" if len(outputs[place].completions) > 1 else f"{place + 1}"
        for place, completions in sorted(chosen.items())
        for completion in completions
    ]
    if not names:
        return None
    return f"answers {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"answer {names[0]}"

"""How much of each other's memory beams share: on the real engine, and in the simulator with beams by made-up logits.

The simulator has no model, so which beams go on is drawn; `simulate.BEAM_SPREAD` says how decidedly. It is what `fit`
finds on a real model. Knows both runners, and no strategy but paging.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.lab.execute import Execution
from octavo.lab.memory import Manager
from octavo.lab.memory_ledger import Line
from octavo.lab.strategies import make
from octavo.lab.sweeps import Counting, saved
from octavo.lab.work import Arrival, Work

if TYPE_CHECKING:
    from octavo.engine.request import Request
    from octavo.llm import LLM

WIDTHS = (2, 4, 8)
SPREADS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0)  # that `fit` tries
SEEDS = (0, 1, 2)  # of the simulations that are averaged

Lengths = Sequence[int]  # tokens of each prompt


def measured(llm: LLM, prompts: Sequence[list[int]], width: int, tokens: int) -> float:
    """The share of blocks that `width` beams of `tokens` tokens save by sharing, over all steps, on this engine.

    prompts: token ids of text that the model knows; beams of random tokens part sooner than anybody's.
    """
    work = beams([len(prompt) for prompt in prompts], width, tokens)
    longest = max(arrival.prompt_tokens for arrival in work.arrivals) + tokens
    slots = len(prompts) * width * (longest + 32)
    manager = make("paged", slots, longest, prefix_caching=False)
    run = _Execution(
        work, "paged", manager, prompts, engine=llm.engine, max_model_len=longest, sequence_limit=len(prompts) * width
    )
    run.run()
    return run.saved


def simulated(lengths: Lengths, width: int, tokens: int, spread: float) -> float:
    """The same in the simulator, the mean of a few seeds; spread: standard deviation of the made-up logits."""
    work = beams(lengths, width, tokens)
    return sum(saved(work, seed, spread) for seed in SEEDS) / len(SEEDS)


def fit(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> tuple[float, dict[int, tuple[float, float]]]:
    """The spread by which the simulator comes nearest to this engine, and for each width what both then save."""
    lengths = [len(prompt) for prompt in prompts]
    real = {width: measured(llm, prompts, width, tokens) for width in WIDTHS}
    told = {s: {width: simulated(lengths, width, tokens, s) for width in WIDTHS} for s in SPREADS}
    best = min(SPREADS, key=lambda spread: sum((told[spread][width] - real[width]) ** 2 for width in WIDTHS))
    return best, {width: (real[width], told[best][width]) for width in WIDTHS}


def beams(lengths: Lengths, width: int, tokens: int) -> Work:
    """One beam search for each prompt, all at once, sharing nothing with one another."""
    arrivals = [Arrival(0.0, ((place, n),), tokens, tokens, 1, width) for place, n in enumerate(lengths)]
    return Work("beams", "prompts of one's own", tuple(arrivals))


class _Execution(Counting, Execution):
    """With prompts of text."""

    def __init__(
        self, work: Work, strategy: str, manager: Manager, prompts: Sequence[list[int]], **options: Any
    ) -> None:
        self._prompts = prompts
        super().__init__(work, strategy, manager, **options)

    def submit(self, line: Line, prompt: list[int], n: int, beam_width: int, priority: int) -> Request:
        return super().submit(line, list(self._prompts[line.asked.place]), n, beam_width, priority)

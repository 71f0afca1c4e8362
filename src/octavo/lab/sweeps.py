"""One number against another: what sharing saves against n and beam width, utilisation against block size.

Knows the simulator, and no figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from octavo.engine.scheduler import StepPlan
from octavo.lab.memory_ledger import Moment
from octavo.lab.results import Sweep
from octavo.lab.running import Runner
from octavo.lab.simulate import BEAM_SPREAD, FreshDraws, Simulation, simulate
from octavo.lab.step_time import StepTime
from octavo.lab.strategies import make
from octavo.lab.work import Arrival, Work

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REQUESTS = 32  # of each point of `savings`
# Mean tokens of prompts and answers of the data sets in Kwon et al. 2023, section 6.1 and figure 11.
LENGTHS = {"19 tokens in, 58 out (as Alpaca)": (19.31, 58.45), "161 tokens in, 338 out (as ShareGPT)": (161.31, 337.99)}


def savings(*, samples: Iterable[int] = (), beams: Iterable[int] = (), seed: int = 0) -> Sweep:
    """Blocks that sharing saves, of those that sequences would hold without it, over all steps (figure 15 of Kwon et
    al. 2023), for requests of exponentially distributed lengths with the means of the paper's data sets.

    Give `samples`, the values of n, or `beams`, the beam widths. What beams go on is drawn by made-up logits.
    """
    widths, beamed = (list(beams), True) if beams else (list(samples), False)
    series = {
        label: [saved(_requests(*means, width, beamed, seed), seed) for width in widths]
        for label, means in LENGTHS.items()
    }
    return Sweep(name="beams" if beamed else "samples", x=[float(width) for width in widths], series=series)


def block_sizes(
    work: Work,
    *,
    pool_slots: int,
    max_model_len: int,
    step_time: StepTime,
    token_bytes: int,
    seed: int = 0,
    requests: int = 300,
) -> Sweep:
    """Utilisation of paging, without a prefix cache, against the block size, over the first `requests` of the work."""
    part = Work(work.name, work.source, work.arrivals[:requests])
    runs = [
        simulate(
            part,
            "paged",
            pool_slots=pool_slots,
            max_model_len=max_model_len,
            step_time=step_time,
            token_bytes=token_bytes,
            seed=seed,
            settings={"block_size": size, "prefix_caching": False},
        )
        for size in BLOCK_SIZES
    ]
    return Sweep(
        name="block_size",
        x=[float(size) for size in BLOCK_SIZES],
        series={"Paged": [run.summary.utilisation for run in runs]},
    )


class Counting(Runner):
    """Adds up, over all steps, the blocks that tables name, and those that are held. Goes before either runner."""

    named = held = 0

    @property
    def saved(self) -> float:
        """The share of the blocks named that sharing saves."""
        return 1 - self.held / self.named

    def look(self, plan: StepPlan) -> Moment:
        self.named += sum(len(self.manager.table(seq_id)) for seq_id in self.manager.sequences)
        moment = super().look(plan)
        self.held += (moment.stored + moment.internal + moment.reserved) // self.manager.block_size
        return moment


class _CountingSimulation(Counting, Simulation):
    """For paging in the simulator."""


class _Steady(StepTime):
    """Every step takes as long: nothing here depends on it."""

    def seconds(self, *work: Any) -> float:
        return 1.0

    def describe(self) -> dict[str, Any]:
        return {}


def saved(work: Work, seed: int, beam_spread: float = BEAM_SPREAD) -> float:
    """The share of blocks that sequences of the work, all at once, save by sharing, over all steps.

    beam_spread: standard deviation of the made-up logits that say which beams go on
    """
    most = sum(arrival.sequences * (arrival.prompt_tokens + arrival.output_tokens + 32) for arrival in work.arrivals)
    simulation = _CountingSimulation(
        work,
        "paged",
        make("paged", most, most, prefix_caching=False),
        max_model_len=most,
        step_time=_Steady(),
        token_bytes=1,
        seed=seed,
        draws=FreshDraws(seed, beam_spread),
        sequence_limit=sum(arrival.sequences for arrival in work.arrivals),
    )
    simulation.run()
    return simulation.saved


def _requests(prompt: float, output: float, width: int, beamed: bool, seed: int) -> Work:
    random = np.random.Generator(np.random.Philox(key=[seed, 0]))
    even = (np.arange(REQUESTS) + 0.5) / REQUESTS  # quantiles, so that few requests have the distribution's mean
    prompts, outputs = (random.permutation(np.ceil(-mean * np.log1p(-even))).astype(int) for mean in (prompt, output))
    n, beams = (1, width) if beamed else (width, 0)
    arrivals = [
        Arrival(0.0, ((place, p),), o, o, n, beams)
        for place, (p, o) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
    ]
    return Work("sharing", "exponential lengths", tuple(arrivals))

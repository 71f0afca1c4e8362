"""What a step costs in Python beside the model: scheduler, KV manager and batch arrays, in milliseconds (medians).

python benchmarks/scheduling.py [--sequences 256] [--steps 400]
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import count

import numpy as np

from octavo.engine.batch import Batch
from octavo.engine.request import Request, Sequence, State
from octavo.engine.scheduler import PreemptionCost, Scheduler, StepPlan
from octavo.kv.manager import KVManager
from octavo.params import SamplingParams

PROMPT = 512


def running_scheduler(num_sequences: int, steps: int) -> Scheduler:
    """A scheduler with so many sequences in decode, none sharing a block, and room for `steps` tokens each."""
    blocks_each = -(-(PROMPT + steps + 16) // 16)
    kv = KVManager(num_sequences * blocks_each + 1, 16)
    ids = count()
    scheduler = Scheduler(
        kv,
        token_budget=num_sequences * PROMPT,
        sequence_limit=num_sequences,
        preemption="recompute",
        cost=PreemptionCost(1.0, 1.0),
        new_sequence_id=lambda: next(ids),
    )
    for i in range(num_sequences):
        prompt = [(i + 31 * place) % 50_000 for place in range(PROMPT)]
        request = Request(str(i), None, prompt, SamplingParams(max_tokens=None), arrival=i, seed=0)
        request.live.append(Sequence(next(ids), request, 0, list(prompt)))
        scheduler.add(request)
    return scheduler


def commit(scheduler: Scheduler, plan: StepPlan) -> None:
    """What the engine does after the forward pass, with token 7 drawn everywhere."""
    for seq, tokens in zip(plan.sequences, plan.counts, strict=True):
        scheduler.kv.commit(seq.id, tokens, seq.tokens)
        seq.computed += tokens
        seq.tokens.append(7 + seq.id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    scheduler = running_scheduler(options.sequences, options.steps)
    batch = Batch(scheduler.kv, max_rows=options.sequences, max_model_len=PROMPT + options.steps + 16)
    plan_ms: list[float] = []
    array_ms: list[float] = []
    for step in range(options.steps):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        batch.join(plan.sequences)
        batch.prepare(plan)
        batch.advance()
        prepared = time.perf_counter()
        commit(scheduler, plan)
        rows = np.array([seq.row for seq in plan.sequences])
        committed = time.perf_counter()
        batch.append(rows, [seq.tokens[-1] for seq in plan.sequences])
        array_ms.append(1e3 * (prepared - planned + time.perf_counter() - committed))
        plan_ms.append(1e3 * (planned - begin + committed - prepared))
        if step == 0:
            assert all(request.state is State.RUNNING for request in scheduler.running)
            plan_ms.clear()  # the prefill
            array_ms.clear()
    for name, values in (("scheduler + KV manager", plan_ms), ("batch arrays", array_ms)):
        ordered = sorted(values)
        print(
            f"{name}, {options.sequences} sequences: median {statistics.median(ordered):.3f} ms a step, "
            f"p99 {ordered[int(0.99 * len(ordered))]:.3f} ms"
        )


if __name__ == "__main__":
    main()

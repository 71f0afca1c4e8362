"""The engine over paged memory against the same model without any: whatever is scheduled, the tokens are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.engine import sampler
from octavo.engine.engine import Engine
from octavo.engine.request import Request, State
from octavo.engine.scheduler import StepPlan
from octavo.errors import RequestError
from octavo.ops import reference
from octavo.params import BeamParams, SamplingParams
from tests.engine.toy import EOS, VOCAB, ToyModel, ToyOps, greedy, naive_answers


def make_engine(model: ToyModel | None = None, **settings: Any) -> WatchedEngine:
    settings = {"block_size": 4, "num_blocks": 64, "swap_memory": 4 * 8 * 32, **settings}
    return WatchedEngine(model or ToyModel(), ToyOps(), EngineConfig(**settings), eos_ids={EOS})


class WatchedEngine(Engine):
    """Remembers which beam searches ran out of blocks: what they would have given with more cannot be told."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cut: set[Request] = set()

    def _end_what_cannot_go_on(self, plan: StepPlan) -> list[Request]:
        self.cut.update(seq.request for seq in plan.exhausted if seq.request.beam)
        return super()._end_what_cannot_go_on(plan)


def draw(logits: np.ndarray, params: SamplingParams, seed: int, index: int, position: int, history: Any) -> int:
    table = sampler.SamplingTable(1)
    table.set(0, params, seed, index, {EOS})
    zero = np.zeros(1, np.int64)
    drawn = sampler.sample(
        reference,
        logits[None],
        zero,
        table,
        zero,
        np.array([position]),
        lambda _: ([*history[0], *history[1]], len(history[0])),
    )
    return int(drawn.token_ids[0])


def run(engine: WatchedEngine, limit: int = 5000) -> None:
    for _ in range(limit):
        if not engine.has_work:
            return
        engine.step()
        engine.kv.check()
    raise AssertionError("the engine does not get on: it has work but no step ends it")


def assert_nothing_is_lost(engine: WatchedEngine) -> None:
    engine.step()  # hands freed rows back
    usage = engine.kv.usage()
    assert usage.free + usage.cached == engine.kv.pool.num_blocks
    assert usage.host_used == 0
    assert engine.scheduler.num_waiting == engine.scheduler.num_swapped == 0
    assert len(engine._batch._free_rows) == engine.config.sequence_limit


def assert_right(engine: WatchedEngine, request: Request) -> None:
    """Each answer is the naive one; one that ran out of blocks is its beginning."""
    if request in engine.cut:
        return
    expected = naive_answers(request, engine.limits.max_model_len, draw)
    given = {s.index: s for s in request.ended}
    assert len(given) == len(expected)
    for index, answer in enumerate(expected):
        got = given[index]
        if got.output_token_ids != answer:
            assert request.beam is None, (got.output_token_ids, answer)
            assert got.finish_reason in ("length", "abort"), (got.output_token_ids, answer)
            assert answer[: got.num_output_tokens] == got.output_token_ids


# --- what a request may be ------------------------------------------------------------------------------------

beams = st.builds(
    BeamParams,
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 12),
    length_penalty=st.sampled_from([0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
samples = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 3),
    ignore_eos=st.booleans(),
)
prompts = st.builds(
    lambda shared, own: [(7 * i) % VOCAB for i in range(shared)] + own,
    st.sampled_from([0, 3, 8, 9, 16, 23]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
)
requests = st.tuples(prompts, st.one_of(samples, samples, beams), st.integers(0, 2), st.integers(0, 12))
engines = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 4, 8, 16]),
        "num_blocks": st.sampled_from([12, 20, 40, 200]),
        "max_batched_tokens": st.sampled_from([7, 16, 2048]),
        "prefix_caching": st.booleans(),
        "preemption": st.sampled_from(["auto", "recompute", "swap"]),
        "swap_memory": st.sampled_from([0, 600, 1 << 16]),
        "max_num_seqs": st.sampled_from([4, 7]),
        "seed": st.just(0),
    }
)


@settings(max_examples=250, deadline=None)
@given(engines, st.lists(requests, min_size=1, max_size=8), st.sets(st.integers(0, 7), max_size=2), st.integers(1, 20))
def test_any_mix_of_requests_gives_the_tokens_of_a_model_without_memory(
    options: dict[str, Any], wanted: list[Any], aborted: set[int], abort_at: int
) -> None:
    engine = make_engine(**options)
    queue = sorted(enumerate(wanted), key=lambda item: item[1][3])
    accepted: list[Request] = []
    refusals: list[str] = []
    step = 0
    while queue or engine.has_work:
        while queue and queue[0][1][3] <= step:
            name, (prompt, params, priority, _) = queue.pop(0)
            try:
                accepted.append(engine.add_request(str(name), prompt, params, priority=priority))
            except RequestError as error:
                refusals.append(str(error))
        if step == abort_at:
            for name in aborted:
                engine.abort(str(name))
        engine.step()
        engine.kv.check()
        step += 1
        assert step < 3000, "the engine does not get on"
    assert all("KV blocks" in refusal or "sequences" in refusal for refusal in refusals)
    for request in accepted:
        assert request.state is State.FINISHED
        assert request.error is None
        if any(s.finish_reason == "abort" for s in request.ended):
            continue
        assert_right(engine, request)
    assert_nothing_is_lost(engine)


# --- single mechanisms ----------------------------------------------------------------------------------------


def test_two_equal_prompts_in_one_step_share_blocks_and_compute_once() -> None:
    """A block was shared before its KV was computed; two equal prompts were both computed."""
    model = ToyModel()
    engine = make_engine(model)
    prompt = [i % VOCAB for i in range(33)]
    twins = [engine.add_request(str(i), prompt, greedy(max_tokens=5, ignore_eos=True)) for i in range(2)]
    run(engine)
    assert [r.cached_tokens for r in twins] == [0, 32]
    for request in twins:
        assert_right(engine, request)


def test_a_full_prompt_hit_leaves_a_query_token() -> None:
    engine = make_engine()
    prompt = [i % VOCAB for i in range(32)]
    for name in "ab":
        request = engine.add_request(name, prompt, greedy(max_tokens=5))
        run(engine)
        assert_right(engine, request)
    assert request.cached_tokens == 28


def test_the_prompt_of_n_samples_is_held_once() -> None:
    engine = make_engine(num_blocks=200)
    prompt = [i % VOCAB for i in range(41)]
    engine.add_request("n", prompt, SamplingParams(n=8, max_tokens=3, seed=1, ignore_eos=True))
    engine.step()
    usage = engine.kv.usage()
    assert (usage.active, usage.shared) == (0, 11)
    engine.step()
    usage = engine.kv.usage()
    assert (usage.active, usage.shared, usage.copies) == (8, 10, 7)  # the last one writes without copying
    run(engine)
    assert_nothing_is_lost(engine)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_forced_preemption_changes_no_token(mode: str) -> None:
    engine = make_engine(num_blocks=20, preemption=mode, swap_memory=1 << 16)
    requests = [engine.add_request(str(i), [i, 5, 6, 7, i], greedy(max_tokens=30, ignore_eos=True)) for i in range(6)]
    run(engine)
    counts = (engine.scheduler.recomputed, engine.scheduler.swapped)
    assert counts[mode == "swap"] > 0
    assert counts[mode != "swap"] == 0
    for request in requests:
        assert_right(engine, request)
        assert all(s.finish_reason == "length" and s.num_output_tokens == 30 for s in request.ended)
    assert_nothing_is_lost(engine)


@pytest.mark.parametrize(("per_block", "per_token", "kind"), [(1e-9, 1e3, "swap"), (1e6, 1e-9, "recompute")])
def test_the_cheaper_way_to_preempt_is_chosen(per_block: float, per_token: float, kind: str) -> None:
    """By estimated cost: bytes to move there and back against tokens to compute again."""
    engine = make_engine(num_blocks=20, preemption="auto", swap_memory=1 << 16)
    engine._cost.seconds_per_block, engine._cost.seconds_per_token = per_block, per_token
    for i in range(6):
        engine.add_request(str(i), [i, 5, 6, 7, i], greedy(max_tokens=30, ignore_eos=True))
    while not (engine.scheduler.swapped or engine.scheduler.recomputed):
        engine.step()
    assert (engine.scheduler.swapped > 0) == (kind == "swap")
    assert (engine.scheduler.recomputed > 0) == (kind == "recompute")
    run(engine)
    assert_nothing_is_lost(engine)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_tree_of_samples_holds_no_more_blocks_when_it_is_back(mode: str) -> None:
    engine = make_engine(num_blocks=60, preemption=mode, swap_memory=1 << 16)
    request = engine.add_request("tree", list(range(20)), SamplingParams(n=4, max_tokens=20, seed=3, ignore_eos=True))
    for _ in range(8):
        engine.step()
    before = engine.kv.usage()
    engine.scheduler._preempt(request)
    assert engine.kv.usage().active + engine.kv.usage().shared == 0
    while request.state is not State.RUNNING or request.forks or any(s.prefilling for s in request.live):
        engine.step()
    held = engine.kv.usage()
    grown = sum(-(-s.computed // 4) - 5 for s in request.live)
    assert held.active + held.shared <= 5 + grown
    assert held.shared >= before.shared > 0
    run(engine)
    assert_right(engine, request)
    assert_nothing_is_lost(engine)


def test_beams_that_come_back_one_by_one_still_step_together() -> None:
    """Recomputed beams are forked again with tails of their own; none may be extended before the last is there."""
    for first in range(12):
        engine = make_engine(num_blocks=200, preemption="recompute", prefix_caching=False, max_batched_tokens=5)
        request = engine.add_request("b", [first, 1, 2], BeamParams(width=4, max_tokens=26, ignore_eos=True))
        for _ in range(16):
            engine.step()
        engine.scheduler._preempt(request)
        run(engine)
        assert request.error is None
        assert_right(engine, request)


def test_keys_of_a_sequence_that_has_ended_do_not_name_the_blocks_of_another() -> None:
    """The first sample ends, the request is recomputed from its second: its blocks must be found by its own tokens."""
    for seed in range(200):
        engine = make_engine(num_blocks=60, preemption="recompute")
        prompt = [5, 1, 2]
        request = engine.add_request("n", prompt, SamplingParams(n=2, max_tokens=24, seed=seed))
        while request.state is not State.FINISHED and not (
            request.ended and request.ended[0].index == 0 and len(request.live[0].tokens) > 9
        ):
            engine.step()
            if len(request.live) == 2 and request.live[0].num_output_tokens == 9 and not request.preemptions:
                engine.scheduler._preempt(request)  # the keys are hashed from the first sample's tokens
        if request.state is State.FINISHED or not request.preemptions:
            continue
        engine.scheduler._preempt(request)
        engine.kv.reset_prefix_cache()  # what it computed before is gone: it is published anew
        run(engine)
        assert_right(engine, request)
        answer = next(s for s in request.ended if s.index == 1)
        again = engine.add_request("again", answer.tokens[:-1], greedy(max_tokens=1))
        run(engine)
        assert again.cached_tokens == (len(answer.tokens) - 2) // 4 * 4
        return
    raise AssertionError("no seed ends the first sample before the second")


def test_a_preempted_request_that_hits_the_cache_on_return_computes_only_the_rest() -> None:
    """A preempted request that hit the cache on return was prefilled as if it had not."""
    model = ToyModel()
    engine = make_engine(model, num_blocks=60, preemption="recompute")
    request = engine.add_request("a", [i % VOCAB for i in range(33)], greedy(max_tokens=20, ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.scheduler._preempt(request)
    model.steps.clear()
    engine.step()
    assert model.steps[0].tokens == request.live[0].computed - 36  # nine full blocks were found again
    run(engine)
    assert_right(engine, request)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_request_preempted_in_its_prefill_has_no_output_and_yet_was_begun(mode: str, caching: bool) -> None:
    """ "No output yet" was taken for "never prefilled"."""
    model = ToyModel()
    engine = make_engine(model, max_batched_tokens=9, preemption=mode, prefix_caching=caching, swap_memory=1 << 16)
    request = engine.add_request("a", [i % VOCAB for i in range(40)], greedy(max_tokens=6, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert request.live[0].computed == 27
    engine.scheduler._preempt(request)
    model.steps.clear()
    run(engine)
    assert_right(engine, request)
    assert sum(step.tokens for step in model.steps) == (40 - 24 if caching else 40) + 5
    assert (request.output().cached_tokens, request.output().computed_tokens) == (0, 40)  # its own blocks are no hit
    assert_nothing_is_lost(engine)


def test_swap_filled_by_many_samples_falls_back_to_recompute() -> None:
    """Many n > 1 requests filled the swap and stopped everything."""
    engine = make_engine(num_blocks=24, preemption="swap", swap_memory=8 * 4 * 3)
    requests = [
        engine.add_request(str(i), [i, 1, 2], SamplingParams(n=3, max_tokens=16, seed=i, ignore_eos=True))
        for i in range(8)
    ]
    run(engine)
    assert engine.scheduler.recomputed > 0
    for request in requests:
        assert_right(engine, request)
    assert_nothing_is_lost(engine)


def test_a_prompt_that_can_never_fit_is_refused_with_numbers_and_blocks_nobody() -> None:
    """One request too long for the pool waited for ever and blocked the queue."""
    engine = make_engine(num_blocks=8)
    with pytest.raises(RequestError, match=r"40 tokens .* need 11 KV blocks of 4 tokens; there are 8"):
        engine.add_request("long", [1] * 40, greedy())
    request = engine.add_request("short", [1, 2], greedy(max_tokens=3))
    run(engine)
    assert_right(engine, request)


def test_one_that_outgrows_the_pool_alone_ends_with_length_and_aborts_no_other() -> None:
    """One sequence's overflow aborted every other."""
    engine = make_engine(num_blocks=8)
    long = engine.add_request("long", [1] * 8, greedy(max_tokens=None, ignore_eos=True))
    other = engine.add_request("other", [2] * 8, greedy(max_tokens=9, ignore_eos=True))
    run(engine)
    assert [s.finish_reason for s in long.ended] == ["length"]
    assert long.ended[0].num_output_tokens == 32 - 8 + 1  # the last token needs no slot
    assert other.ended[0].num_output_tokens == 9
    assert_right(engine, long)
    assert_right(engine, other)


def test_samples_that_outgrow_the_pool_end_one_by_one() -> None:
    engine = make_engine(num_blocks=8)
    request = engine.add_request("n", [1] * 8, SamplingParams(n=3, max_tokens=None, seed=1, ignore_eos=True))
    run(engine)
    assert [s.finish_reason for s in request.ended] == ["length"] * 3
    lengths = sorted(s.num_output_tokens for s in request.ended)
    assert lengths[-1] == 25  # whoever is left has the whole pool
    assert_right(engine, request)


def test_beams_that_outgrow_the_pool_end_with_what_they_have() -> None:
    engine = make_engine(num_blocks=8)
    request = engine.add_request("b", [1] * 8, BeamParams(width=3, max_tokens=100, ignore_eos=True))
    run(engine)
    output = request.output()
    assert len(output.completions) == 3
    assert all(c.finish_reason == "length" and c.token_ids for c in output.completions)
    assert all(c.stop_reason == "kv_memory" for c in output.completions)
    assert_nothing_is_lost(engine)


def test_a_failing_step_ends_its_requests_and_no_others() -> None:
    model = ToyModel()
    engine = make_engine(model, max_num_seqs=1)
    model.fail_on_token = 9
    bad = engine.add_request("bad", [9, 1, 2], greedy(max_tokens=4))
    good = engine.add_request("good", [4, 1, 2], greedy(max_tokens=2))
    run(engine)
    assert bad.error is not None
    assert "a kernel broke" in bad.error
    assert [s.finish_reason for s in bad.ended] == ["error"]
    assert_right(engine, good)
    assert_nothing_is_lost(engine)


def test_logits_that_are_not_finite_fail_that_one_request() -> None:
    model = ToyModel()
    engine = make_engine(model)
    model.nan_on_token = 9
    bad = engine.add_request("bad", [1, 2, 9], greedy(max_tokens=4))
    good = engine.add_request("good", [4, 1, 2], greedy(max_tokens=1))
    run(engine)
    assert "not finite" in (bad.error or "")
    assert_right(engine, good)


def test_moving_blocks_that_fails_ends_all_that_held_memory_and_forgets_the_cache() -> None:
    engine = make_engine(num_blocks=64)
    requests = [
        engine.add_request(str(i), [1, 2, 3], SamplingParams(n=2, seed=i, max_tokens=9, ignore_eos=True))
        for i in range(2)
    ]
    engine.step()

    def broken(*_: Any) -> None:
        raise MemoryError("no")

    engine.ops.copy_blocks = broken  # type: ignore[method-assign]
    run(engine)
    assert all(r.error and "Moving KV blocks failed" in r.error for r in requests)
    del engine.ops.copy_blocks
    after = engine.add_request("after", [1, 2, 3], greedy(max_tokens=5))
    run(engine)
    assert_right(engine, after)
    assert_nothing_is_lost(engine)


def test_abort_in_mid_prefill_leaks_nothing() -> None:
    engine = make_engine(max_batched_tokens=7)
    engine.add_request("a", [1] * 40, greedy())
    engine.step()
    engine.abort("a")
    assert not engine.has_work
    assert_nothing_is_lost(engine)


def test_abort_of_a_waiting_and_of_a_swapped_request_leaks_nothing() -> None:
    engine = make_engine(num_blocks=20, preemption="swap", swap_memory=1 << 16)
    for i in range(6):
        engine.add_request(str(i), [i, 5, 6, 7, i], greedy(max_tokens=30, ignore_eos=True))
    while not engine.scheduler.num_swapped:
        engine.step()
    for i in range(6):
        assert engine.abort(str(i)) is not None
    assert_nothing_is_lost(engine)


def test_lower_priority_numbers_run_first_and_arrival_breaks_ties() -> None:
    engine = make_engine(max_num_seqs=1)
    order: list[str] = []
    for name, priority in (("late", 5), ("a", 1), ("b", 1), ("first", 0)):
        engine.add_request(name, [1, 2], greedy(max_tokens=1), priority=priority)
    while engine.has_work:
        order += [r.id for r in engine.step()]
    assert order == ["first", "a", "b", "late"]


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    """A seed gave other tokens in another batch."""
    params = SamplingParams(seed=11, n=2, max_tokens=12, ignore_eos=True)

    def answer(company: int) -> list[list[int]]:
        engine = make_engine(num_blocks=400)
        for i in range(company):
            engine.add_request(f"c{i}", [i, i], SamplingParams(seed=i, max_tokens=20, ignore_eos=True))
        request = engine.add_request("it", [1, 2, 3], params)
        run(engine)
        return [s.output_token_ids for s in sorted(request.ended, key=lambda s: s.index)]

    assert answer(0) == answer(9)
    assert answer(0)[0] != answer(0)[1]


def test_unseeded_requests_repeat_with_the_engine_seed_only() -> None:
    def answer(seed: int | None) -> list[int]:
        engine = make_engine(seed=seed)
        request = engine.add_request("it", [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
        run(engine)
        return request.ended[0].output_token_ids

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)
    assert answer(None) != answer(None)


def test_prompt_logprobs_in_chunks_and_after_a_preemption() -> None:
    engine = make_engine(max_batched_tokens=7, max_num_seqs=2)
    prompt = [i % VOCAB for i in range(30)]
    engine.add_request("warm", prompt, greedy(max_tokens=1))
    run(engine)
    request = engine.add_request("a", prompt, greedy(max_tokens=2, prompt_logprobs=3))
    engine.step()
    engine.step()
    engine.scheduler._preempt(request)
    run(engine)
    assert request.prompt_logprobs is not None
    assert len(request.prompt_logprobs) == 30
    assert request.prompt_logprobs[0] is None
    from tests.engine.toy import logits_of

    for place, entry in enumerate(request.prompt_logprobs[1:], start=1):
        assert entry is not None
        row = logits_of(np.array(prompt[:place])).astype(np.float64)
        expected = row - np.log(np.exp(row).sum())
        assert entry.token_id == prompt[place]
        assert entry.logprob == pytest.approx(expected[prompt[place]], abs=1e-5)
        assert len(entry.top) == 3
        assert entry.rank == 1 + (row > row[prompt[place]]).sum()
    assert_right(engine, request)


def test_best_of_gives_the_likeliest_by_mean_logprob() -> None:
    engine = make_engine()
    drawn = engine.add_request("all", [1, 2, 3], SamplingParams(n=6, best_of=6, seed=4, max_tokens=8, logprobs=0))
    picked = engine.add_request("two", [1, 2, 3], SamplingParams(n=2, best_of=6, seed=4, max_tokens=8))
    run(engine)
    means = [sum(t.logprob for t in c.logprobs or []) / len(c.token_ids) for c in drawn.output().completions]
    best = sorted(means, reverse=True)[:2]
    output = picked.output()
    assert [c.index for c in output.completions] == [0, 1]
    got = [(c.cumulative_logprob or 0) / len(c.token_ids) for c in output.completions]
    assert got == pytest.approx(best)


def test_the_blocks_of_a_beam_search_are_those_of_its_tree() -> None:
    """Each step holds the distinct blocks of the tree of live beams, no more."""
    engine = make_engine(num_blocks=300)
    request = engine.add_request("b", list(range(10)), BeamParams(width=4, max_tokens=40, ignore_eos=True))
    while engine.has_work:
        engine.step()
        if request.live:
            prefixes = {
                tuple(seq.tokens[: min(end, seq.computed)])
                for seq in request.live
                for end in range(4, seq.computed + 4, 4)
            }
            usage = engine.kv.usage()
            assert usage.active + usage.shared == len(prefixes)


def test_pinned_blocks_that_leave_no_room_fail_the_request_and_nothing_hangs() -> None:
    engine = make_engine(num_blocks=16)
    engine.add_request("warm", [i % VOCAB for i in range(33)], greedy(max_tokens=1))
    waiting = engine.add_request("late", [VOCAB - 1 - i % VOCAB for i in range(40)], greedy(max_tokens=1))
    while engine.has_work and waiting.state is State.WAITING and engine._requests.get("warm"):
        engine.step()
    pin, tokens = engine.pin([i % VOCAB for i in range(33)])
    assert tokens == 32
    run(engine)
    if waiting.error:
        assert "pinned" in waiting.error
    engine.unpin(pin)
    assert_nothing_is_lost(engine)


def test_a_salt_keeps_prefixes_apart() -> None:
    engine = make_engine()
    prompt = [i % VOCAB for i in range(20)]
    cached = []
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        request = engine.add_request(name, prompt, greedy(max_tokens=1), cache_salt=salt)
        run(engine)
        cached.append(request.cached_tokens)
    assert cached == [0, 0, 16]


@pytest.mark.parametrize(
    ("ids", "params", "words"),
    [
        ([], greedy(), "no tokens"),
        ([1, VOCAB], greedy(), f"token id {VOCAB}; this model knows 0 to {VOCAB - 1}"),
        ([-1], greedy(), "token id -1"),
        ([1] * 512, greedy(), "512 tokens; with one token of answer it exceeds the context of 512"),
        ([1], greedy(stop_token_ids=[VOCAB]), f"Token id {VOCAB}"),
        ([1], greedy(logit_bias={99: 1.0}), "Token id 99"),
        ([1], greedy(logprobs=VOCAB + 1), "logprobs is 25"),
        ([1], SamplingParams(n=300), "300 sequences at once; at most 256"),
        ([1], greedy(stop="x"), "Stop strings need a tokenizer"),
    ],
)
def test_what_can_never_be_served_is_refused_in_a_sentence(ids: list[int], params: SamplingParams, words: str) -> None:
    engine = make_engine(num_blocks=400)
    with pytest.raises(RequestError, match=words):
        engine.add_request("x", ids, params)
    assert not engine.has_work


def test_ids_of_living_requests_must_differ() -> None:
    engine = make_engine()
    engine.add_request("x", [1], greedy(max_tokens=1))
    with pytest.raises(RequestError, match="'x' is already here"):
        engine.add_request("x", [1], greedy(max_tokens=1))
    run(engine)
    engine.add_request("x", [1], greedy(max_tokens=1))


@pytest.mark.parametrize("place", ["schedule", "copy_blocks", "forward", "commit", "draw"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_step_broken_off_anywhere_ends_all_requests_and_spoils_no_later_one(place: str, error: Any) -> None:
    model = ToyModel()
    engine = make_engine(model, num_blocks=30, preemption="swap", swap_memory=1 << 16)
    requests = [
        engine.add_request(str(i), [i, 1, 2, 3, 4], SamplingParams(n=2, seed=i, max_tokens=20, ignore_eos=True))
        for i in range(4)
    ]
    for _ in range(3):
        engine.step()
    owner = {"schedule": engine.scheduler, "copy_blocks": engine.ops, "forward": model, "commit": engine.kv}.get(
        place, engine._drawer
    )
    original, calls = getattr(owner, place), iter(range(100))

    def broken(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        if next(calls) == 1:
            raise error
        return result

    setattr(owner, place, broken)
    with pytest.raises(error):
        run(engine)
    assert all(r.state is State.FINISHED and "broken off" in (r.error or "") for r in requests)
    if owner in (model, engine.ops):
        delattr(owner, place)
    assert not engine.has_work
    after = engine.add_request("after", [0, 1, 2, 3, 4], greedy(max_tokens=9, ignore_eos=True))
    run(engine)
    assert_right(engine, after)
    assert_nothing_is_lost(engine)


def test_what_precedes_a_running_prefill_in_order_is_computed_before_it() -> None:
    """A three-token prompt of high priority waited until a long prompt of low priority was computed."""
    engine = make_engine(ToyModel(5000), num_blocks=1000, max_batched_tokens=16)
    engine.add_request("long", [i % VOCAB for i in range(3000)], greedy(max_tokens=1), priority=9)
    engine.step()
    urgent = engine.add_request("urgent", [1, 2, 3], greedy(max_tokens=1), priority=0)
    later = engine.add_request("later", [1, 2, 3], greedy(max_tokens=1), priority=10)
    engine.step()
    assert urgent.state is State.FINISHED
    assert later.state is State.WAITING


def test_those_who_share_what_a_pin_holds_are_not_refused_for_it() -> None:
    engine = make_engine(num_blocks=10)
    prompt = [i % VOCAB for i in range(24)]
    engine.add_request("warm", prompt, greedy(max_tokens=1))
    run(engine)
    pin = engine.pin(prompt)
    assert pin.tokens == 24
    shared = engine.add_request("shared", [*prompt, 5], greedy(max_tokens=3, ignore_eos=True))
    with pytest.raises(RequestError, match="need 7 KV blocks of 4 tokens; there are 4"):
        engine.add_request("other", [7] * 25, greedy(max_tokens=3))
    run(engine)
    assert_right(engine, shared)
    assert shared.cached_tokens == 24
    engine.unpin(pin.id)
    assert_nothing_is_lost(engine)


def test_many_that_wait_for_one_prefix_cost_a_step_no_more_than_those_that_could_run() -> None:
    model = ToyModel(4000)
    engine = make_engine(model, num_blocks=4000, max_batched_tokens=64, max_num_seqs=8)
    prompt = [i % VOCAB for i in range(2000)]
    asked: list[int] = []
    admit = engine.kv.admit
    engine.kv.admit = lambda *args, **options: (asked.append(1), admit(*args, **options))[1]  # type: ignore[method-assign]
    requests = [
        engine.add_request(str(i), [*prompt, i % VOCAB], greedy(max_tokens=1, ignore_eos=True)) for i in range(200)
    ]
    most = 0
    while engine.has_work:
        asked.clear()
        engine.step()
        most = max(most, len(asked))
    assert most <= 2 * 8
    assert sum(r.cached_tokens == 2000 for r in requests) == 199


def test_one_sample_whose_logits_are_not_finite_fails_its_request_and_not_the_step() -> None:
    for seed in range(30):
        model = ToyModel()
        engine = make_engine(model)
        model.nan_on_token = 9
        bad = engine.add_request("bad", [1, 2], SamplingParams(n=4, max_tokens=12, seed=seed, ignore_eos=True))
        good = engine.add_request("good", [4, 1], greedy(max_tokens=1))
        run(engine)
        assert_right(engine, good)
        assert bad.error is None or "not finite" in bad.error
        assert_nothing_is_lost(engine)
        if bad.error and bad.ended[0].tokens[-1] == 9 and bad.ended[-1].tokens[-1] != 9:
            lengths = {s.num_output_tokens for s in bad.ended}
            assert len(lengths) == 1  # once the first had failed, none of its siblings drew a token
            return
    raise AssertionError("no seed lets the first sample fail and the last go on")


def test_blocks_that_never_came_back_from_swap_are_not_found_by_anybody() -> None:
    engine = make_engine(num_blocks=20, preemption="swap", swap_memory=1 << 16)
    requests = [engine.add_request(str(i), [i, 5, 6, 7, i], greedy(max_tokens=30, ignore_eos=True)) for i in range(6)]
    copy_blocks = engine.ops.copy_blocks

    def no_way_back(source: Any, target: Any, pairs: Any) -> None:
        if source is engine._host_cache:
            raise MemoryError("no")
        copy_blocks(source, target, pairs)

    engine.ops.copy_blocks = no_way_back  # type: ignore[method-assign]
    while not any(r.error for r in requests):
        engine.step()
        engine.kv.check()
    run(engine)
    for i, failed in enumerate(requests):
        if failed.error:
            tokens = failed.ended[0].tokens
            again = engine.add_request(f"again {i}", tokens[: 4 * (len(tokens) // 4) + 1], greedy(max_tokens=3))
            run(engine)
            assert_right(engine, again)
    assert_nothing_is_lost(engine)

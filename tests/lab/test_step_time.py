"""The time of a step: prices found again, a real engine's steps, data sheets' rooflines; and named hardware."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.lab import hardware, step_time
from octavo.lab.step_time import Fitted, Measurement
from octavo.llm import LLM

TRUE = Fitted(
    overhead=5e-3,
    prefill_token=4e-4,
    prefill_pair=5e-7,
    decode_sequence=5e-4,
    context_token=1.5e-6,
    copied_byte=2e-10,
)


def steps(random: np.random.Generator, noise: float, true: Fitted = TRUE, count: int = 400) -> list[Measurement]:
    """Steps of a machine whose prices are known."""
    made: list[Measurement] = []
    for place in range(count):
        prefill, decode = int(random.integers(0, 2048)) * int(random.integers(0, 2)), int(random.integers(1, 64))
        work = {
            "prefill_tokens": prefill,
            "decode_sequences": decode,
            "context_tokens": decode * int(random.integers(10, 3000)),
            "copied_bytes": int(random.integers(0, 2)) * 368_640,
            "prefill_pairs": prefill * int(random.integers(1, 2000)),
        }
        seconds = true.seconds(**work) * float(np.exp(noise * random.standard_normal()))
        made.append(Measurement(**work, seconds=seconds, run=place // 10))
    return made


class TestFit:
    """Against prices that are known."""

    def test_prices_are_found_again(self) -> None:
        found = step_time.fit(steps(np.random.default_rng(0), 0.0), copied_byte=2e-10)
        for name in TRUE.__dataclass_fields__.keys() - {"error", "where"}:
            assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
        assert found.error is not None
        assert found.error.median < 1e-6
        assert found.error.r2 == pytest.approx(1)

    def test_noise_is_stated_as_error(self) -> None:
        found = step_time.fit(steps(np.random.default_rng(0), 0.1), copied_byte=2e-10)
        for name in TRUE.__dataclass_fields__.keys() - {"error", "where"}:
            assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.25)
        assert found.error is not None
        assert found.error.median == pytest.approx(0.067, abs=0.02)  # of a normal error, 0.67 deviations
        assert found.error.p90 == pytest.approx(0.164, abs=0.04)
        assert found.error.steps == 100

    def test_what_costs_nothing_is_not_paid_for(self) -> None:
        found = step_time.fit(steps(np.random.default_rng(1), 0.05, replace(TRUE, context_token=0.0, overhead=0.0)))
        assert 0 <= found.context_token < 1e-8
        assert min(getattr(found, name) for name in step_time._PRICES) >= 0

    def test_too_few_steps(self) -> None:
        with pytest.raises(RequestError, match="3 steps are too few"):
            step_time.fit(steps(np.random.default_rng(0), 0.0)[:3])

    @settings(deadline=None, max_examples=100)
    @given(st.integers(0, 2**32), st.integers(1, 4), st.integers(8, 20))
    def test_least_squares_that_are_not_negative(self, seed: int, columns: int, rows: int) -> None:
        """The conditions of Karush, Kuhn and Tucker: they hold at the minimum, and only there."""
        random = np.random.default_rng(seed)
        # Columns that are much alike, so that some join the solution and have to leave it again.
        base = random.standard_normal((rows, columns))
        mixed = base @ np.abs(random.standard_normal((columns, columns))) + 0.3 * random.standard_normal(base.shape)
        a, b = np.hstack([base, mixed]), base.sum(axis=1) + 0.1 * random.standard_normal(rows)
        x = step_time.non_negative_least_squares(a, b)
        gradient = a.T @ (b - a @ x)
        assert (x >= 0).all()
        assert (gradient <= 1e-8).all()
        assert np.abs(gradient[x > 0]).max(initial=0) < 1e-8


class TestMeasured:
    """On the real engine."""

    def test_what_steps_did(self) -> None:
        llm = LLM("smollm2", prefix_caching=False, num_blocks=200, max_batched_tokens=256, max_model_len=1024)
        measured = step_time.measure(llm, [(1, 300, 3), (4, 20, 3)], repeats=2)

        def work(m: Measurement) -> tuple[int, ...]:
            return m.run, m.prefill_tokens, m.prefill_pairs, m.decode_sequences, m.context_tokens

        assert [work(m) for m in measured] == [
            (0, 256, 256 * 257 // 2, 0, 0),  # a prompt of 300 tokens in two chunks
            (0, 44, 44 * 256 + 44 * 45 // 2, 0, 0),
            (0, 0, 0, 1, 301),
            (0, 0, 0, 1, 302),
            (1, 80, 4 * 20 * 21 // 2, 0, 0),
            (1, 0, 0, 4, 4 * 21),
            (1, 0, 0, 4, 4 * 22),
        ]
        assert all(m.seconds > 0 for m in measured)
        assert measured[0].seconds > measured[3].seconds  # 256 tokens take longer than one

    def test_copies_cost_something(self) -> None:
        assert 1e-12 < step_time.copy_price(repeats=2, size=1 << 22) < 1e-7

    def test_the_fit_that_is_kept_states_its_error(self) -> None:
        told = step_time.SMOLLM2.describe()
        assert told["error"]["median"] < 0.1
        assert told["error"]["steps"] > 50
        assert "SmolLM2" in told["source"]
        json.dumps(told, allow_nan=False)


class TestRoofline:
    """Against sums done by hand."""

    gpu, model = hardware.GPUS["a100-40g"], hardware.MODELS["opt-13b"]

    def test_a_decode_is_bound_by_memory_and_a_prompt_by_computing(self) -> None:
        made = step_time.roofline(self.gpu, self.model)
        weights = 2 * self.model.parameters
        moved = weights + (8000 + 10) * 819_200 + 2 * 10**6
        assert made.seconds(0, 10, 8000, 10**6) == pytest.approx(0.003 + moved / (0.8 * 1555e9))
        flops = 2 * self.model.parameters * 2000 + 4 * 40 * 5120 * 2_001_000
        assert made.seconds(2000, 0, 0, 0, 2_001_000) == pytest.approx(0.003 + flops / (0.6 * 312e12))

    def test_more_of_everything_never_takes_less(self) -> None:
        made, base = step_time.roofline(self.gpu, self.model), (100, 10, 5000, 1000, 5050)
        for place in range(5):
            more = [number * (10 if i == place else 1) for i, number in enumerate(base)]
            assert made.seconds(*more) >= made.seconds(*base)
        assert step_time.roofline(self.gpu, self.model, 2).seconds(*base) < made.seconds(*base)

    def test_it_says_that_it_was_not_measured(self) -> None:
        told = step_time.roofline(self.gpu, self.model).describe()
        assert "not measured" in told["source"]
        assert told["error"] is None
        json.dumps(told, allow_nan=False)

    def test_what_was_measured_is_taken_where_it_was(self) -> None:
        cpu, smollm2 = hardware.GPUS["cpu"], hardware.MODELS["smollm2"]
        assert step_time.of(cpu, smollm2) is step_time.SMOLLM2
        assert step_time.of(self.gpu, smollm2) == step_time.roofline(self.gpu, smollm2)
        for model, count in ((self.model, 1), (smollm2, 2)):
            with pytest.raises(RequestError, match="smollm2 only"):
                step_time.of(cpu, model, count)
        with pytest.raises(RequestError, match="at least 1 GPU"):
            step_time.roofline(self.gpu, self.model, 0)


class TestHardware:
    """Against what others published."""

    def test_the_paged_attention_paper(self) -> None:
        """Kwon et al. 2023, table 1: OPT-13B on one A100 of 40 GB has 800 KB a token and 15,700 slots."""
        model = hardware.MODELS["opt-13b"]
        assert model.token_bytes == 800 * 1024
        assert hardware.pool_slots(hardware.GPUS["a100-40g"], model) == pytest.approx(15_700, rel=0.02)

    def test_scales_people_ask_about(self) -> None:
        seven = hardware.pool_slots(hardware.GPUS["rtx-4090"], hardware.MODELS["llama-2-7b"])
        seventy = hardware.pool_slots(hardware.GPUS["h100-80g"], hardware.MODELS["llama-3.1-70b"], 8)
        assert (hardware.MODELS["llama-2-7b"].token_bytes, seven) == (2 * 32 * 4096 * 2, 18_510)
        assert (hardware.MODELS["llama-3.1-70b"].token_bytes, seventy) == (2 * 80 * 1024 * 2, 1_448_493)
        assert hardware.pool_slots(hardware.GPUS["cpu"], hardware.MODELS["smollm2"]) == 2**30 // 23_040

    def test_what_cannot_be(self) -> None:
        with pytest.raises(RequestError, match=r"23\.9 GiB for its weights.*20\.2 GiB"):
            hardware.pool_slots(hardware.GPUS["l4"], hardware.MODELS["opt-13b"])
        with pytest.raises(RequestError, match="at least 1 GPU"):
            hardware.pool_slots(hardware.GPUS["l4"], hardware.MODELS["opt-13b"], 0)
        for find in (hardware.gpu, hardware.model):
            with pytest.raises(RequestError, match="'abacus'; there are"):
                find("abacus")

    def test_every_figure_has_a_source(self) -> None:
        assert all(one.source for one in (*hardware.GPUS.values(), *hardware.MODELS.values()))

    def test_the_embedded_model_is_what_is_said(self) -> None:
        engine, said = LLM("smollm2", num_blocks=4, kv_dtype="bf16").engine, hardware.MODELS["smollm2"]
        model = engine.model
        assert (model.num_layers, model.num_kv_heads, model.head_dim) == (
            said.num_layers,
            said.num_kv_heads,
            said.head_dim,
        )
        assert engine.limits.max_model_len <= said.max_model_len
        assert engine.block_bytes == 16 * said.token_bytes

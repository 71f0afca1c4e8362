"""The simulator's beams share what a real model's share: SmolLM2's, at several widths."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.lab import beam_sharing
from octavo.lab.simulate import BEAM_SPREAD
from octavo.llm import LLM

# Enough that where a few beams part, which the last digit of a score decides, does not decide the mean.
TEXTS = (Path(__file__).parents[2] / "benchmarks" / "prompts.txt").read_text(encoding="utf-8").splitlines()[:24]
TOKENS = 48  # nearly the paper's short answers


@pytest.mark.parametrize("width", beam_sharing.WIDTHS)
def test_made_up_beams_save_what_a_models_do(width: int, smollm2: LLM) -> None:
    prompts = [smollm2.tokenizer.encode(text) for text in TEXTS]
    real = beam_sharing.measured(smollm2, prompts, width, TOKENS)
    told = beam_sharing.simulated([len(prompt) for prompt in prompts], width, TOKENS, BEAM_SPREAD)
    assert told == pytest.approx(real, abs=0.05)


def test_beams_that_go_on_more_decidedly_share_less_with_one_another() -> None:
    shares = [beam_sharing.simulated([8] * 4, 4, 40, spread) for spread in (1.0, 4.0, 16.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1] + 0.1


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LLM:
    return LLM(str(smollm2_path), num_blocks=64, max_model_len=512, prefix_caching=False)

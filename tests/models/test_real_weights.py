"""Real weights against Transformers with the same GGUF file.

The logits of these models reach 40 and 80, where float32 has steps of 4e-6 and 8e-6, and pass through 30 layers, some
of whose hidden states have elements 1000 times the rest. So float32 itself is uncertain by about 1e-4: Transformers'
own float32 logits are up to 1.4e-4 from what it computes in float64 with the same weights. The oracle here is therefore
Transformers in float64: the only one that a float32 implementation can be held to within 1e-4.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import models
from octavo.loading.checkpoint import Checkpoint, load_checkpoint
from octavo.loading.resolve import is_cached, resolve
from octavo.models import Model
from octavo.ops import reference
from tests.gguf_oracle import load_oracle
from tests.models.paged import nan_cache, paged_logits, scattered_tables, step_of

TOLERANCE = 1e-4
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village at the foot of the mountains, there lived an old clockmaker who",
    "Water boils at 100 degrees Celsius, and ice melts",
)
PARAGRAPH = (
    "A page table maps the pages of a program to frames of memory, so that what looks contiguous may lie anywhere. "
    "When a page is written that two programs share, the system copies it first, and only then. "
)


def in_float64(model: Any) -> Any:
    """The same weights in float64; rotary angles stay float32, as they are in training."""
    exact = copy.deepcopy(model)
    for parameter in exact.parameters():
        parameter.data = parameter.data.double()
    for name, buffer in exact.named_buffers():
        if name.endswith("embed_scale"):
            buffer.data = buffer.data.double()
    return exact


def their_logits(model: Any, tokens: list[int], last: int = 0) -> np.ndarray:
    """At every place, or at the last ones."""
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([tokens]), logits_to_keep=last).logits[0].numpy()
    return logits


class Real:
    """A model's file, Transformers' float64 version of it, and ours."""

    def __init__(self, path: Path, theirs: Any) -> None:
        self.checkpoint: Checkpoint = load_checkpoint(path)
        self.ours: Model = models.build(self.checkpoint, reference)
        self.exact = in_float64(theirs)

    def encode(self, text: str) -> list[int]:
        assert self.checkpoint.tokenizer is not None
        return self.checkpoint.tokenizer.encode(text)

    def last_logits(self, tokens: list[int], last: int) -> np.ndarray:
        """Ours at the last places, the prompt computed in two pieces."""
        tables, blocks = scattered_tables([len(tokens)], 16, seed=0)
        cache, cut = nan_cache(self.ours, blocks, 16), len(tokens) // 2
        self.ours.forward(step_of([(tokens[:cut], 0)], tables, 16, rows=[]), cache)
        rest = len(tokens) - cut
        step = step_of([(tokens[cut:], cut)], tables, 16, rows=list(range(rest - last, rest)))
        logits: np.ndarray = reference.to_numpy(self.ours.logits(self.ours.forward(step, cache)))
        return logits


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, oracle: Any) -> Real:
    return Real(smollm2_path, oracle)


@pytest.fixture(scope="module")
def gemma() -> Real:
    if not is_cached("gemma3-270m"):
        pytest.skip("Gemma-3-270M is not in the cache: octavo.loading.resolve.resolve('gemma3-270m') fetches it")
    path = resolve("gemma3-270m")
    return Real(path, load_oracle(path))


@pytest.mark.parametrize(("chunk", "block_size"), [(None, 16), (5, 4), (1, 16)])
def test_smollm2_at_every_place_of_four_texts(smollm2: Real, chunk: int | None, block_size: int) -> None:
    prompts = [smollm2.encode(text) for text in TEXTS]
    ours = paged_logits(smollm2.ours, prompts, chunk=chunk, block_size=block_size)
    for mine, prompt in zip(ours, prompts, strict=True):
        np.testing.assert_allclose(mine, their_logits(smollm2.exact, prompt), rtol=0, atol=TOLERANCE)


def test_smollm2_is_as_near_to_exact_as_transformers_in_float32(smollm2: Real, oracle: Any) -> None:
    """Root mean square error over all logits: ours at most 1.5 times theirs."""
    prompts = [smollm2.encode(text) for text in TEXTS]
    exact = [their_logits(smollm2.exact, prompt) for prompt in prompts]

    def error(logits: list[np.ndarray]) -> float:
        return float(np.sqrt(np.mean([np.square(a - b).mean() for a, b in zip(logits, exact, strict=True)])))

    assert error(paged_logits(smollm2.ours, prompts)) < 1.5 * error(
        [their_logits(oracle, prompt) for prompt in prompts]
    )


def test_smollm2_after_a_long_text(smollm2: Real) -> None:
    tokens = smollm2.encode(PARAGRAPH * 8)[:300]
    ours = smollm2.last_logits(tokens, 24)
    np.testing.assert_allclose(ours, their_logits(smollm2.exact, tokens, 24), rtol=0, atol=TOLERANCE)


def test_gemma_at_every_place_of_four_texts(gemma: Real) -> None:
    prompts = [gemma.encode(text) for text in TEXTS]
    for mine, prompt in zip(paged_logits(gemma.ours, prompts, chunk=9), prompts, strict=True):
        np.testing.assert_allclose(mine, their_logits(gemma.exact, prompt), rtol=0, atol=TOLERANCE)


def test_gemma_after_a_text_longer_than_its_window(gemma: Real) -> None:
    tokens = gemma.encode(PARAGRAPH * 16)[:540]
    assert len(tokens) == 540
    ours = gemma.last_logits(tokens, 24)
    np.testing.assert_allclose(ours, their_logits(gemma.exact, tokens, 24), rtol=0, atol=TOLERANCE)

"""Every architecture against Transformers in float32: the logits at all places, however the work is cut up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo import models
from octavo.ops import reference
from tests.models import small
from tests.models.paged import nan_cache, paged_logits, scattered_tables, step_of

TOLERANCE = 1e-4
LENGTHS = (45, 1, 23, 17)  # longer than every window and original context in `small`


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, small.VOCAB, length).tolist() for length in lengths]


def theirs_at(model: Any, prompt: list[int]) -> np.ndarray:
    """Gemma's attention soft-cap is in its config, but Transformers' eager attention must be told."""
    cap = getattr(model.config, "attn_logit_softcapping", None)
    logits: np.ndarray = small.logits(model, prompt, **({} if cap is None else {"softcap": cap}))
    return logits


def check(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for mine, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, their, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in small.MODELS if name != "phi3-longrope"])
def test_equal_to_transformers_in_one_piece_in_chunks_and_token_by_token(name: str, pair: Any) -> None:
    theirs, checkpoint = pair(name)
    model = models.build(checkpoint, reference)
    sequences = prompts()
    want = [theirs_at(theirs, prompt) for prompt in sequences]
    assert max(np.abs(logits).max() for logits in want) > 1, "logits too small to tell models apart"
    for chunk, block_size in ((None, 16), (7, 4), (3, 1), (1, 16)):
        check(paged_logits(model, sequences, chunk=chunk, block_size=block_size, seed=block_size), want)


@pytest.mark.parametrize(("reach", "length"), [(None, 45), (21, 21), (20, 20), (20, 7)])
def test_longrope_is_chosen_by_the_context_the_engine_is_set_up_for(reach: int | None, length: int, pair: Any) -> None:
    """Transformers takes the long factors for sequences over 20 tokens; set up for more than 20, we always do."""
    theirs, checkpoint = pair("phi3-longrope")
    model = models.build(checkpoint, reference, reach)
    (prompt,) = prompts((length,))
    for chunk in (None, 3, 1):
        check(paged_logits(model, [prompt], chunk=chunk, block_size=4), [theirs_at(theirs, prompt)])


def test_explicit_factors_equal_the_scaling_they_were_made_from(pair: Any) -> None:
    """GGUF files hold Llama 3's scaling as a divisor for each frequency."""
    import dataclasses

    theirs, checkpoint = pair("llama-llama3")
    plain = 100.0 ** -(np.arange(0, 10, 2) / 10)
    factors = plain / theirs.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 3.9
    assert factors.min() < 1.1
    scaling = {"rope_type": "factors", "factors": factors.tolist()}
    config = {**checkpoint.config, "rope_scaling": scaling}
    model = models.build(dataclasses.replace(checkpoint, config=config), reference)
    (prompt,) = prompts((45,))
    check(paged_logits(model, [prompt]), [theirs_at(theirs, prompt)])


def test_only_the_rows_asked_for_are_returned_and_logits_may_be_taken_in_pieces(pair: Any) -> None:
    theirs, checkpoint = pair("gemma3-capped")
    model = models.build(checkpoint, reference)
    first, second = prompts((19, 12))
    tables, blocks = scattered_tables((19, 12), 4, seed=1)
    step = step_of([(first, 0), (second, 0)], tables, 4, rows=[30, 4, 18])
    hidden = model.forward(step, nan_cache(model, blocks, 4))
    want = np.stack([theirs_at(theirs, second)[11], *theirs_at(theirs, first)[[4, 18]]])
    check([reference.to_numpy(model.logits(hidden))], [want])
    check(
        [reference.to_numpy(model.logits(reference.take_rows(hidden, np.array([i], np.int32))))[0] for i in range(3)],
        list(want),
    )


def test_a_step_may_want_no_logits(pair: Any) -> None:
    _, checkpoint = pair("llama")
    model = models.build(checkpoint, reference)
    (prompt,) = prompts((8,))
    tables, blocks = scattered_tables((8,), 4, seed=1)
    hidden = model.forward(step_of([(prompt, 0)], tables, 4, rows=[]), nan_cache(model, blocks, 4))
    assert reference.to_numpy(model.logits(hidden)).shape == (0, small.VOCAB)


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt-350m"])
def test_a_model_says_what_its_engine_must_know(name: str, pair: Any) -> None:
    theirs, checkpoint = pair(name)
    config, model = theirs.config, models.build(checkpoint, reference)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    assert (model.num_layers, model.num_kv_heads, model.head_dim) == (config.num_hidden_layers, heads, head_dim)
    assert (model.vocab_size, model.max_positions) == (small.VOCAB, config.max_position_embeddings)

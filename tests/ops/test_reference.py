"""The operations that are not attention, each against its definition in float64 or against torch."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.loading.tensor import StoredTensor
from octavo.ops import reference
from octavo.ops.interface import Activation


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    """No overflow in exp, no division by zero, whatever the input."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def stored(values: np.ndarray, name: str = "w") -> StoredTensor:
    """A tensor as a file would give it."""
    return StoredTensor(name, values.shape, "F32", values, lambda raw: raw.astype(np.float32))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 15, 17, 127]),
    st.integers(1, 40),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.booleans(),
)
def test_linear_is_the_product_with_the_stacked_parts(tokens: int, columns: int, rows: list[int], biased: bool) -> None:
    parts = [normal(n, columns, seed=n) for n in rows]
    biases = [normal(n, seed=n + 50) for n in rows]
    x = normal(tokens, columns, seed=99)
    bias = reference.vector([stored(b) for b in biases]) if biased else None
    got = reference.linear(x, reference.linear_weight([stored(p) for p in parts]), bias)
    want = x.astype(np.float64) @ np.concatenate(parts).T.astype(np.float64)
    np.testing.assert_allclose(got, want + (np.concatenate(biases) if biased else 0), atol=1e-4)
    assert got.dtype == np.float32
    outputs = reference.split(got, rows)
    assert [part.shape[1] for part in outputs] == rows
    np.testing.assert_array_equal(np.concatenate(outputs, axis=1), got)


def test_embedding_takes_rows_of_a_weight_that_linear_shares() -> None:
    table = normal(13, 6)
    weight = reference.linear_weight([stored(table)])
    ids = np.array([3, 0, 12, 3], np.int32)
    np.testing.assert_array_equal(reference.embed(weight, ids), table[ids])
    np.testing.assert_allclose(reference.linear(table[ids], weight), table[ids] @ table.T, atol=1e-5)


def test_rows_taken_may_be_none() -> None:
    x = normal(5, 4)
    np.testing.assert_array_equal(reference.take_rows(x, np.array([4, 1], np.int32)), x[[4, 1]])
    empty = reference.take_rows(x, np.array([], np.int32))
    weight = reference.linear_weight([stored(normal(3, 4))])
    assert reference.linear(reference.rms_norm(empty, np.ones(4, np.float32), 1e-5), weight).shape == (0, 3)


@pytest.mark.parametrize("tokens", [1, 15, 17, 127])
@pytest.mark.parametrize("heads", [1, 3])
def test_rms_norm_is_over_as_many_columns_as_its_weight(tokens: int, heads: int) -> None:
    x, weight = normal(tokens, heads * 80) * 7, normal(80, seed=1)
    groups = x.astype(np.float64).reshape(tokens, heads, 80)
    want = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(reference.rms_norm(x, weight, 1e-5), want.reshape(x.shape), atol=1e-5)


def test_layer_norm_and_an_offset_vector() -> None:
    x, weight, bias = normal(17, 96) + 3, normal(96, seed=1), normal(96, seed=2)
    exact = x.astype(np.float64)
    want = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(reference.layer_norm(x, weight, bias, 1e-5), want, atol=1e-5)
    np.testing.assert_array_equal(reference.vector([stored(weight)], offset=1.0), weight + 1)


def test_elementwise_operations_stay_float32() -> None:
    x, y = normal(4, 6), normal(4, 6, seed=1)
    for got, want in (
        (reference.add(x, y), x + y),
        (reference.scale(x, 576**0.5), x * np.float32(24)),
        (reference.softcap(x, 0.7), 0.7 * np.tanh(x.astype(np.float64) / 0.7)),
        (reference.to_numpy(x[:, ::2]), x[:, ::2]),
    ):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_erf_is_exact_to_1e_7() -> None:
    x = np.concatenate([np.linspace(-6, 6, 40_001), [0.0, -0.0, 1e-30, 80.0, -1e30]]).astype(np.float32)
    want = np.array([math.erf(one) for one in x])
    assert np.abs(reference.erf(x) - want).max() < 1e-7


def test_nan_stays_nan_in_every_activation() -> None:
    kinds: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")
    assert all(np.isnan(reference.activate(np.array([np.nan], np.float32), kind)).all() for kind in kinds)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_equal_torch_s_and_never_overflow(kind: Activation) -> None:
    import torch

    f = torch.nn.functional
    theirs: dict[str, Any] = {
        "silu": f.silu,
        "gelu": f.gelu,
        "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"),
        "relu": f.relu,
    }
    x = (
        np.concatenate([np.linspace(-30, 30, 2001), [-1e4, -500, -100, 100, 500, 1e4]])
        .astype(np.float32)
        .reshape(9, -1)
    )
    want = theirs[kind](torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(reference.activate(x, kind), want, rtol=1e-6, atol=1e-6)
    up = normal(*x.shape)
    np.testing.assert_allclose(reference.gated(np.hstack([x, up]), kind), want * up, rtol=2e-6, atol=1e-6)

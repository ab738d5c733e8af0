"""Vectors of every kind are read as what they say; what is wrong with them is said in a sentence."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from recovering import FakeEncoder
from torch import Tensor

from unembed.errors import UnembedError
from unembed.vectors import check_vectors, similarity

E = 12


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((9, E)).astype(np.float32)


def checked(vectors: Any) -> Tensor:
    return check_vectors(vectors, size=E, encoder_name="fake")


@pytest.mark.parametrize(
    "make",
    [
        lambda v: v.astype(np.float64),
        lambda v: v[::-1].copy()[::-1],  # negative strides, which torch does not take as they are
        lambda v: v.astype(">f4"),  # nor another byte order, nor more bits
        lambda v: v.astype(np.longdouble),
        lambda v: torch.from_numpy(v),
        lambda v: torch.from_numpy(v).double().requires_grad_(),
        lambda v: v.tolist(),
        lambda v: list(v),
    ],
    ids=["float64", "strided", "swapped", "longer", "torch", "torch64", "lists", "arrays"],
)
def test_vectors_of_every_kind_are_the_same(vectors: np.ndarray, make: Any) -> None:
    given = make(vectors)
    for found, wanted in ((checked(given), vectors), (checked(given[2]), vectors[2:3])):
        assert torch.equal(found, torch.from_numpy(wanted))
        assert found.dtype == torch.float32 and not found.requires_grad


@pytest.mark.parametrize("make", [np.asfortranarray, lambda v: torch.from_numpy(v.T.copy()).T])
def test_vectors_lie_in_one_order_whatever_order_they_came_in(vectors: np.ndarray, make: Any) -> None:
    e = checked(make(vectors))
    assert e.is_contiguous() and torch.equal(e, torch.from_numpy(vectors))


def test_vectors_that_may_not_be_written_are_read(vectors: np.ndarray) -> None:
    stored = np.frombuffer(vectors.tobytes(), np.float32).reshape(vectors.shape)  # as from a database
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(checked(stored), torch.from_numpy(vectors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_what_it_says(vectors: np.ndarray, dtype: torch.dtype) -> None:
    half = torch.from_numpy(vectors).to(dtype)
    assert torch.equal(checked(half), half.float())
    if dtype == torch.float16:
        assert torch.equal(checked(half.numpy()), half.float())


@pytest.mark.parametrize("nothing", [np.zeros((0, E)), [], torch.zeros(0, E)])
def test_no_vectors_are_no_rows(nothing: Any) -> None:
    assert checked(nothing).shape == (0, E)


def _row(value: float, *, at: tuple[int, ...] = (1,)) -> np.ndarray:
    rows = np.ones((3, E))
    rows[at] = value
    return rows


@pytest.mark.parametrize(
    ("vectors", "said"),
    [
        (np.ones((2, E + 1)), rf"shape \(2, {E + 1}\), expected \(N, {E}\) as fake makes them; choose"),
        (np.ones(E - 1), rf"shape \({E - 1},\), expected"),
        (np.ones((1, 2, E)), rf"shape \(1, 2, {E}\), expected"),
        (np.float32(1.0), r"shape \(\), expected"),
        (_row(np.nan, at=(1, 4)), "vector 1 holds NaN or infinity; leave it out"),
        (_row(np.inf, at=(2, 0)), "vector 2 holds NaN or infinity"),
        (_row(-np.inf, at=(0, 0)), "vector 0 holds NaN or infinity"),
        (_row(0.0), "vector 1 is all zeros"),
        (torch.zeros(E), "vector 0 is all zeros"),
        (["a"] * E, "vectors must be numbers"),
        ([[1.0] * E, [1.0]], "vectors must be numbers"),
        ({"a": 1}, "vectors must be numbers"),
        (None, "vectors must be numbers"),
        (np.array([object()] * E), "vectors must be numbers"),
        (np.ones((2, E), complex), "vectors must be numbers"),
    ],
)
def test_bad_vectors_are_refused_in_a_sentence(vectors: Any, said: str) -> None:
    with pytest.raises(UnembedError, match=said) as caught:
        checked(vectors)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_a_blank_recovery_has_no_cosine() -> None:
    vectors = FakeEncoder().encode(["a", "b"])
    np.testing.assert_allclose(similarity(FakeEncoder(), vectors * 3, ["a", " "]), [1.0, 0.0], atol=1e-6)

"""The imputer for scikit-learn, by its own checks and on images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from misconv._train import cpu_by_default
from misconv.sklearn import ImageImputer


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    with cpu_by_default():
        yield


def images(count: int = 12) -> Any:
    X = np.random.default_rng(0).normal(size=(count, 2, 8, 8)).astype(np.float32)
    X[:, :, 2:5, 3:6] = np.nan
    return X


@parametrize_with_checks([ImageImputer(steps=1, rank=0, device="cpu")])  # type: ignore[untyped-decorator]
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_images_and_rows_are_filled_alike() -> None:
    X = images()
    imputer = ImageImputer(steps=3, device="cpu").fit(X)
    filled = imputer.transform(X)
    seen = ~np.isnan(X)
    assert filled.dtype == np.float32
    assert not np.isnan(filled).any()
    assert np.array_equal(filled[seen], X[seen])
    rows = X.reshape(12, -1)
    again = clone(imputer).set_params(shape=(2, 8, 8)).fit(rows).transform(rows)
    assert again.shape == rows.shape
    np.testing.assert_allclose(again.reshape(X.shape), filled, rtol=1e-5, atol=1e-5)
    double = imputer.transform(X.astype(np.float64))
    assert double.dtype == np.float64
    assert np.array_equal(double[seen], X[seen].astype(np.float64))
    steps = make_pipeline(ImageImputer(steps=1, device="cpu"), FunctionTransformer(lambda x: x.reshape(len(x), -1)))
    assert steps.fit_transform(X).shape == (12, 128)


def test_other_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="X must be images"):
        ImageImputer(steps=1, device="cpu").fit(np.zeros((2, 2, 2, 2, 2)))

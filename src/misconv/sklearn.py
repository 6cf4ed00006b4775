"""For pipelines of scikit-learn: an imputer of images with NaN."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

try:
    from sklearn.base import BaseEstimator, TransformerMixin
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("misconv.sklearn needs scikit-learn: pip install 'misconv[demo]'") from error

from misconv.density import UNetDMFA
from misconv.training import fit_density

__all__ = ["ImageImputer"]


class ImageImputer(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is not typed
    """Fill the NaN of images with the mean of a `UNetDMFA`, which learns from the incomplete images alone.

    Args:
        shape: (C, H, W) of an image, where rows of X are images in one line, as scikit-learn has them; None where X is
            (N, C, H, W) or (N, H, W).
        components, rank: of the density.
        steps: how long it learns.
        device: "cuda" or "cpu"; by default a GPU if there is one.
        random_state: a seed.

    Attributes:
        density_: the density, to be saved by `misconv.save`.
        history_: the records of its training.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(20, 8, 8))
        >>> X[:, 2:4, 2:4] = np.nan
        >>> filled = ImageImputer(steps=2, device="cpu").fit_transform(X)
        >>> filled.shape, bool(np.isnan(filled).any())
        ((20, 8, 8), False)
    """

    def __init__(
        self,
        shape: tuple[int, int, int] | None = None,
        *,
        components: int = 1,
        rank: int = 4,
        steps: int = 500,
        device: str | None = None,
        random_state: int = 0,
    ) -> None:
        self.shape = shape
        self.components = components
        self.rank = rank
        self.steps = steps
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: object = None) -> Self:  # as scikit-learn calls it
        """Learn what the missing pixels of such images may be."""
        from misconv._train import one_device

        images = self._images(X, reset=True)
        side = max(images.shape[2:])
        torch.manual_seed(self.random_state)
        density = UNetDMFA(images.shape[1], self.components, self.rank, patch=1 if side <= 64 else 2)
        self.history_ = fit_density(
            density, images, steps=self.steps, seed=self.random_state, fabric=one_device(self.device), progress=False
        )
        self.density_ = density.eval()
        return self

    def transform(self, X: Any) -> NDArray[Any]:
        """X with its NaN filled, in its own shape; what was seen comes back bit for bit."""
        check_is_fitted(self)
        images = self._images(X, reset=False)
        given = np.asarray(X)
        kind = given.dtype if given.dtype.kind == "f" else np.dtype(np.float64)
        result = given.astype(kind).reshape(images.shape)
        with torch.inference_mode():
            for start in range(0, len(images), 64):
                x = images[start : start + 64]
                observed = ~x.isnan()
                mean = self.density_(x.where(observed, 0), observed).mean.numpy()
                part = result[start : start + 64]
                np.copyto(part, mean.astype(kind), where=np.isnan(part))
        return result.reshape(given.shape)

    def _images(self, X: Any, *, reset: bool) -> torch.Tensor:
        """X as float32 images (N, C, H, W)."""
        array = validate_data(
            self, X, reset=reset, ensure_all_finite="allow-nan", allow_nd=True, dtype="numeric", ensure_min_samples=1
        )
        if self.shape is not None:
            array = array.reshape(len(array), *self.shape)
        elif array.ndim == 3:
            array = array[:, None]
        elif array.ndim == 2:  # features in a line
            array = array[:, None, None]
        if array.ndim != 4:
            raise ValueError(f"X must be images (N, C, H, W) or (N, H, W), or rows with a shape, got {array.ndim} axes")
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.three_d_array = True
        return tags

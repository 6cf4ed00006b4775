"""Images to work with: so far the digits that ship with scikit-learn."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["digits"]


def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits of scikit-learn: images (N, 1, 8, 8) between 0 and 1, and labels (N,).

    Example:
        >>> images, labels = digits()
        >>> images.shape, labels.shape
        (torch.Size([1797, 1, 8, 8]), torch.Size([1797]))
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'misconv[demo]'") from error
    values, labels = load_digits(return_X_y=True)
    return torch.as_tensor(values / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.as_tensor(labels)

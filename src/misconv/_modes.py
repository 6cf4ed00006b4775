"""Training and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """A module in evaluation mode; all its parts come back in the mode that each had. Functions have no mode.

    Example:
        >>> layer = nn.Dropout(0.5)
        >>> with evaluating(layer):
        ...     inside = layer.training
        >>> inside, layer.training
        (False, True)
    """
    modes = [(part, part.training) for part in module.modules()] if isinstance(module, nn.Module) else []
    try:
        if isinstance(module, nn.Module):
            module.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training

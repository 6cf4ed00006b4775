"""Which path a computation takes: a fused kernel or touched windows where they serve, else the plain formulas."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from misconv._torch import in_forward_ad, in_transform, is_traced

__all__ = ["HAS_TRITON", "LARGEST_RANK", "is_eager", "is_ordinary", "is_plain", "plain", "warn_plain_path"]

# Triton comes with torch on Linux; looked for here, because torch.compile cannot trace a search.
HAS_TRITON = find_spec("triton") is not None
LARGEST_RANK = 16  # of a density, for the kernels
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))  # others may be fake, or a wrapper that has no values
_logger = logging.getLogger("misconv")
_forced = int(os.environ.get("MISCONV_PLAIN", "0") not in ("", "0"))  # read once: a look at it costs a microsecond


@contextmanager
def plain() -> Iterator[None]:
    """Take the plain PyTorch path everywhere: no fused kernel, no shortcut for windows without a missing pixel.

    Results are the same up to rounding; this is for comparing, debugging and measuring. ``MISCONV_PLAIN=1`` in the
    environment does the same for a whole process.

    Example:
        >>> import misconv
        >>> p = misconv.MFA.point(torch.rand(1, 3, 8, 8))
        >>> with misconv.plain():
        ...     y = misconv.functional.expected_conv2d(p, torch.randn(4, 3, 3, 3))
    """
    global _forced
    _forced += 1
    try:
        yield
    finally:
        _forced -= 1


def is_plain() -> bool:
    """Whether somebody asks for the plain path."""
    return _forced > 0


def is_eager(*tensors: Tensor) -> bool:
    """Whether these are ordinary tensors, with nobody tracing, transforming or differentiating forwards.

    Only then may values decide what is computed, or a kernel be launched that nobody else knows.
    """
    if torch.compiler.is_compiling() or is_traced():
        return False
    if in_transform() or in_forward_ad():
        return False
    return is_ordinary(*tensors)


def is_ordinary(*tensors: Tensor) -> bool:
    """Whether these are plain tensors or parameters, and no subclasses such as fake tensors."""
    return _ORDINARY.issuperset(map(type, tensors))  # before every layer: a generator would take twice as long


@cache
def warn_plain_path(reason: str) -> None:
    """Say, once for every reason, that the plain path is taken on a GPU."""
    _logger.warning("misconv computes with plain PyTorch on this GPU, several times slower: %s", reason)

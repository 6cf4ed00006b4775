"""Argument checks: every message names the argument, the requirement and the value received.

Shapes, dtypes and devices are checked always; they cost nothing. Checks of *values* read the data, which makes a GPU
wait for its host and breaks a traced graph, so by default they run for plain CPU tensors alone (see `readable`).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "check_fraction",
    "check_images",
    "check_observed",
    "check_seen_finite",
    "check_size",
    "describe",
    "readable",
]


def describe(value: object) -> str:
    """The short form of a value in an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def readable(*tensors: Tensor, check: bool | None = None) -> bool:
    """Whether the values of these tensors may be looked at: as `check` says, and by default on the CPU only."""
    if check is False or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) or type(t) not in _PLAIN for t in tensors):
        return False  # inside vmap, grad or a fake tensor mode there are no values to look at
    return bool(check) or all(t.device.type == "cpu" for t in tensors)


_PLAIN = (Tensor, torch.nn.Parameter)


def check_size(name: str, value: int) -> None:
    """A count of images, rows or columns: an integer of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {describe(value)}")


def check_fraction(fraction: float) -> None:
    """A share of the image that is to be hidden: strictly between nothing and everything."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise ValueError(f"fraction must lie strictly between 0 and 1, got {describe(fraction)}")


def check_images(name: str, x: Tensor) -> None:
    """A batch of images: floating point, (B, C, H, W), nothing empty."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of images (B, C, H, W), got {describe(x)}")
    if not x.is_floating_point():
        raise TypeError(
            f"{name} must be a floating-point image, got {describe(x)}; convert it, for example {name}.float() / 255"
        )
    if x.dim() != 4 or 0 in x.shape:
        raise ValueError(f"{name} must have shape (B, C, H, W) with no empty dimension, got {describe(x)}")


def check_observed(name: str, observed: Tensor, like: Tensor, *, check: bool | None = None) -> Tensor:
    """Return `observed` as bool, fit for images shaped and placed like the (…, C, H, W) tensor `like`.

    Numbers are taken where they can mean nothing else: 0 is missing, 1 is observed.
    """
    if not isinstance(observed, Tensor):
        raise TypeError(f"{name} must be a bool tensor, True where the pixel was seen, got {describe(observed)}")
    *batch, channels, height, width = like.shape
    allowed = ((*batch, 1, height, width), (*batch, channels, height, width))
    if tuple(observed.shape) not in allowed:
        shapes = " or ".join(str(shape) for shape in dict.fromkeys(allowed))
        raise ValueError(f"{name} must have shape {shapes} to fit the images, got {describe(observed)}")
    if observed.device != like.device:
        raise ValueError(f"{name} must be on the device of the images, {like.device}, got {describe(observed)}")
    if observed.dtype == torch.bool:
        return observed
    if observed.is_complex():
        raise TypeError(f"{name} must be a bool tensor, True where the pixel was seen, got {describe(observed)}")
    if readable(observed, check=check):
        odd = observed[(observed != 0) & (observed != 1)]
        if odd.numel():
            raise ValueError(
                f"{name} must be bool, or hold only 0 (missing) and 1 (observed), got the value {odd[0].item()}"
            )
    return observed != 0


def check_seen_finite(name: str, x: Tensor, seen: Tensor, *, check: bool | None = None) -> None:
    """Every pixel of `x` where `seen` is True is a finite number."""
    if not readable(x, seen, check=check):
        return
    bad = ~x.isfinite() & seen
    if bad.any():
        place = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"{name} must be finite wherever it is observed, got {x[place].item()} at {place} and "
            f"{int(bad.sum())} such values in all; mark missing pixels as not observed, as misconv.observe does for NaN"
        )

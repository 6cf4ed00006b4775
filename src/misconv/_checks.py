"""Argument checks: every message names the argument, the requirement and the value received.

Shapes, dtypes and devices are checked always; they cost nothing. Checks of *values* read the data, which makes a GPU
wait for its host and breaks a traced graph, so by default they run for plain CPU tensors alone (see `readable`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from misconv.mfa import MFA

__all__ = [
    "check_fraction",
    "check_images",
    "check_mfa",
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


def check_mfa(p: MFA, check: bool | None) -> None:
    """Shapes, types and devices of an MFA always; values where they may be looked at."""
    shapes = {
        "logits": "(B, K)",
        "means": "(B, K, C, H, W)",
        "factors": "(B, K, L, C, H, W)",
        "noise": "(B, K, C, H, W)",
    }
    for name, shape in shapes.items():
        value = getattr(p, name)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor {shape}, got {describe(value)}")
        if value.dim() != shape.count(",") + 1:
            raise ValueError(f"{name} must have shape {shape}, got {describe(value)}")
    for name in shapes:
        value = getattr(p, name)
        if value.dtype != p.means.dtype or value.device != p.means.device:
            raise ValueError(
                f"{name} must have the type {p.means.dtype} and device {p.means.device} of means, got {describe(value)}"
            )
    batch, components, *image = p.means.shape
    if 0 in p.means.shape:
        raise ValueError(f"means must hold at least one image, component, channel and pixel, got {describe(p.means)}")
    rank = p.factors.shape[2]
    wanted = {
        "logits": (batch, components),
        "factors": (batch, components, rank, *image),
        "noise": tuple(p.means.shape),
    }
    for name, expected in wanted.items():
        if tuple(getattr(p, name).shape) != expected:
            raise ValueError(f"{name} must have shape {expected} to fit means, got {describe(getattr(p, name))}")
    seen: Tensor | None = None
    if p.observed is not None:
        p.observed = check_observed("observed", p.observed, p.means[:, 0], check=check)
        seen = p.observed.unsqueeze(1)
    if not readable(p.logits, p.means, p.factors, p.noise, check=check):
        return
    if not p.means.isfinite().all():
        raise ValueError(f"means must be finite, got {_first(p.means, ~p.means.isfinite())}")
    if seen is not None and not ((p.means == p.means[:, :1]) | ~seen).all():
        raise ValueError(
            "means must be the same in all components where observed is True, for there the pixel is exact"
        )
    noise = p.noise if seen is None else p.noise.masked_fill(seen, 0)
    if not (noise >= 0).all() or noise.isinf().any():
        bad = ~(noise >= 0) | noise.isinf()
        raise ValueError(f"noise must be finite variances of at least 0, got {_first(noise, bad)}")
    factors = p.factors if seen is None else p.factors.masked_fill(seen.unsqueeze(2), 0)
    if not factors.isfinite().all():
        raise ValueError(f"factors must be finite, got {_first(factors, ~factors.isfinite())}")
    # A component may be switched off by -inf, but not all of an image.
    off = p.logits.isneginf()
    bad = (~p.logits.isfinite() & ~off) | off.all(1, keepdim=True)
    if bad.any():
        raise ValueError(f"logits must be finite (or -inf for some components), got {_first(p.logits, bad)}")


def _first(values: Tensor, bad: Tensor) -> str:
    place = tuple(int(i) for i in bad.nonzero()[0])
    return f"{values[place].item()} at {place}"

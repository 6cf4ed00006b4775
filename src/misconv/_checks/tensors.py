"""Argument checks: every message names the argument, the requirement and the value received.

Shapes, dtypes and devices are checked always; they cost nothing. Checks of *values* read the data, which makes a GPU
wait for its host and breaks a traced graph, so by default they run for plain CPU tensors alone (see `readable`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from misconv._backend import is_ordinary
from misconv._torch import is_traced, is_wrapped

if TYPE_CHECKING:
    from misconv.mfa import MFA

__all__ = [
    "channels_last",
    "check_dense",
    "check_fraction",
    "check_images",
    "check_index",
    "check_mfa",
    "check_nonnegative",
    "check_observed",
    "check_pair",
    "check_positive",
    "check_probability",
    "check_same_device",
    "check_seed",
    "check_seen_finite",
    "check_size",
    "describe",
    "is_integer",
    "is_number",
    "readable",
    "seems_inverted",
    "split_nan",
    "warn_if_inverted",
]

_LONGEST = 60  # characters of a value in a message
_MOST = 4  # elements of a list that are shown
_SCALARS = (bool, int, float, complex, str, bytes, np.generic, type(None), type(...))
_PRINTABLE = (*_SCALARS, Enum, PurePath, torch.dtype, torch.device, slice, range)
_COMPUTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # float8 is for storage alone


def describe(value: object) -> str:
    """The short form of a value in an error message: one line, never the contents of tensors, arrays or objects.

    >>> describe(torch.zeros(2, 3, device="cpu")), describe(np.zeros(1000)), describe("relu")
    ('a float32 tensor of shape (2, 3) on cpu', 'a float64 numpy array of shape (1000,)', "'relu' (str)")
    """
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, np.ndarray):
        return f"a {value.dtype} numpy array of shape {value.shape}"
    if isinstance(value, nn.Module):
        leaf = type(value).__module__.startswith("torch.nn.") and not any(value.children())
        return f"{_shortened(value) if leaf else kind} (a module)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _describe_collection(value)
    if isinstance(value, _PRINTABLE):
        return f"{_shortened(value)} ({kind})"
    if callable(value) and hasattr(value, "__name__"):
        return f"the {kind} {value.__name__}"
    return f"an object of type {kind}"


def _describe_tensor(value: Tensor) -> str:
    layout = "" if value.layout == torch.strided else f"{str(value.layout).removeprefix('torch.')} "
    dtype = str(value.dtype).removeprefix("torch.")
    if isinstance(value, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return f"an uninitialized {dtype} parameter on {value.device}"
    if value.is_nested:  # has no shape
        return f"a nested {dtype} tensor on {value.device}"
    return f"a {layout}{dtype} tensor of shape {tuple(value.shape)} on {value.device}"


def _describe_collection(value: Collection[object]) -> str:
    kind, count = type(value).__name__, len(value)
    parts = [*value, *(value.values() if isinstance(value, dict) else ())]
    if count <= _MOST and all(isinstance(part, _SCALARS) for part in parts):
        return f"{_shortened(value)} ({kind})"
    return f"a {kind} of {count} elements"


def _shortened(value: object) -> str:
    """One line of at most 60 characters: `repr` of anything printable, which fails for integers of many digits."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        return "a value that cannot be printed"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def readable(*tensors: Tensor, check: bool | None = None) -> bool:
    """Whether the values of these tensors may be looked at: as `check` says, and by default on the CPU only."""
    if check is False or torch.compiler.is_compiling() or is_traced():
        return False
    if any(is_wrapped(t) for t in tensors) or not is_ordinary(*tensors):
        return False  # inside vmap, grad or a fake tensor mode there are no values to look at
    return bool(check) or all(t.device.type == "cpu" for t in tensors)


def is_integer(value: object) -> bool:
    """Whether this is an integer of Python or numpy; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether this is a finite real number of Python or numpy; True and False are none."""
    if is_integer(value):
        return True
    return isinstance(value, (float, np.floating)) and math.isfinite(value)


def check_size(name: str, value: int) -> int:
    """A count of images, rows or columns: an integer of at least one, returned as Python's."""
    if type(value) is int and 1 <= value < 2**63:  # before every layer, so at once
        return value
    if not is_integer(value) or not 1 <= value < 2**63:
        raise ValueError(f"{name} must be an integer of at least 1, got {describe(value)}")
    return int(value)


def check_fraction(fraction: float) -> None:
    """A share of the image that is to be hidden: strictly between nothing and everything."""
    if not is_number(fraction) or not 0 < fraction < 1:
        raise ValueError(f"fraction must lie strictly between 0 and 1, got {describe(fraction)}")


def check_positive(name: str, value: float) -> float:
    """A finite number above zero, such as a learning rate, returned as Python's float."""
    if not is_number(value) or not value > 0:
        raise ValueError(f"{name} must be a finite number above 0, got {describe(value)}")
    return _as_float(name, value)


def check_nonnegative(name: str, value: float) -> float:
    """A finite number of at least zero, such as a weight decay, returned as Python's float."""
    if not is_number(value) or not value >= 0:
        raise ValueError(f"{name} must be a finite number of at least 0, got {describe(value)}")
    return _as_float(name, value)


def check_probability(name: str, value: float) -> float:
    """A number from 0 to 1, both included, returned as Python's float."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {describe(value)}")
    return float(value)


def _as_float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        raise ValueError(f"{name} must fit a float, got {describe(value)}") from None


def check_seed(name: str, value: int) -> int:
    """A seed of random numbers: an integer from 0 to 2⁶³ - 1, which torch and numpy both take; returned as Python's."""
    if not is_integer(value) or not 0 <= value < 2**63:
        raise ValueError(f"{name} must be an integer from 0 to 2**63 - 1, got {describe(value)}")
    return int(value)


def check_index(name: str, value: int, size: int) -> int:
    """A place among `size` many, from the end where it is negative; returned as Python's integer from 0 on."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {describe(value)}")
    if not -size <= value < size:
        raise IndexError(f"{name} must be one of {size}, from {-size} to {size - 1}, got {describe(value)}")
    return int(value) % size


def check_pair(name: str, value: object, *, least: int = 1) -> tuple[int, int]:
    """The stride, dilation, padding or kernel size of a convolution, (rows, columns): an integer, or a pair of them."""
    # Before every layer, so it is worth the words: as functions take it, and as modules hold it.
    if type(value) is int and least <= value < 2**31:
        return value, value
    if type(value) is tuple and len(value) == 2:
        first, second = value
        if type(first) is int and type(second) is int and least <= first < 2**31 and least <= second < 2**31:
            return first, second
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or not all(is_integer(n) and least <= n < 2**31 for n in pair):
        raise ValueError(f"{name} must be an integer of at least {least} or a pair of them, got {describe(value)}")
    return int(pair[0]), int(pair[1])


def check_same_device(values: Mapping[str, Tensor | nn.Module | MFA | None]) -> None:
    """All of these arguments, tensors, MFAs or modules by name, are on one device; None and empty modules fit any."""
    places = {name: _devices(value) for name, value in values.items() if value is not None}
    if len(set().union(*places.values())) <= 1:
        return
    found = [f"{name} on {' and '.join(sorted(map(str, where)))}" for name, where in places.items() if where]
    if len(found) == 1:
        raise ValueError(f"{found[0].split(' on ')[0]} must be on one device, got {found[0]}")
    names = [text.split(" on ")[0] for text in found]
    raise ValueError(f"{_listed(names)} must be on one device, got {_listed(found)}")


def _devices(value: Tensor | nn.Module | MFA) -> set[torch.device]:
    if isinstance(value, nn.Module):
        return {t.device for tensors in (value.parameters(), value.buffers()) for t in tensors}
    return {value.device}


def _listed(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def check_dense(name: str, x: Tensor) -> None:
    """Numbers that can be computed with, each in its own place: no sparse or nested tensor, no float8."""
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got {describe(x)}")
    if x.is_floating_point() and x.dtype not in _COMPUTABLE:
        raise TypeError(f"{name} must be of type float16, bfloat16, float32 or float64, got {describe(x)}")


def check_images(name: str, x: Tensor) -> None:
    """A batch of images: floating point, (B, C, H, W), nothing empty."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of images (B, C, H, W), got {describe(x)}")
    if not x.is_floating_point():
        raise TypeError(
            f"{name} must be a floating-point image, got {describe(x)}; convert it, for example {name}.float()"
        )
    check_dense(name, x)
    if x.dim() != 4 or 0 in x.shape:
        raise ValueError(f"{name} must have shape (B, C, H, W) with no empty dimension, got {describe(x)}")


def channels_last(x: Tensor, channels: int) -> str:
    """What to add to a message about images whose last dimension seems to hold their channels."""
    return "; channels come before height and width" if x.shape[-1] == channels != x.shape[-3] else ""


def split_nan(x: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Images and what was seen of them; where nobody says it, NaN is missing, and 0 stands in its place."""
    if observed is not None:
        return x, observed
    seen = ~x.isnan()
    return x.where(seen, 0), seen


def check_observed(name: str, observed: Tensor, like: Tensor, *, check: bool | None = None) -> Tensor:
    """Return `observed` as bool, fit for images shaped and placed like the (…, C, H, W) tensor `like`.

    Numbers are taken where they can mean nothing else: 0 is missing, 1 is observed.
    """
    if not isinstance(observed, Tensor):
        raise TypeError(f"{name} must be a bool tensor, True where the pixel was seen, got {describe(observed)}")
    check_dense(name, observed)
    # One by one: for torch 2.11's compiler no tuple of sizes is among others.
    sizes = observed.shape
    fits = len(sizes) == like.dim() and sizes[:-3] == like.shape[:-3] and sizes[-2:] == like.shape[-2:]
    if not fits or (sizes[-3] != 1 and sizes[-3] != like.shape[-3]):
        *batch, channels, height, width = like.shape
        allowed = ((*batch, 1, height, width), (*batch, channels, height, width))
        shapes = " or ".join(str(shape) for shape in dict.fromkeys(allowed))
        raise ValueError(f"{name} must have shape {shapes} to fit the images, got {describe(observed)}")
    if observed.device != like.device:
        raise ValueError(f"{name} must be on the device of the images, {like.device}, got {describe(observed)}")
    if observed.dtype == torch.bool:
        return observed
    if observed.is_complex() or observed.is_quantized:
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
    finite = x.isfinite()
    bad = ~finite & seen
    if bad.any():
        place = tuple(int(i) for i in bad.nonzero()[0])
        advice = "mark missing pixels as not observed, as misconv.observe does for NaN"
        if finite.any() and not (finite & seen).any():
            advice = "observed must be True where a pixel was seen, and it may be inverted here"
        raise ValueError(
            f"{name} must be finite wherever it is observed, got {x[place].item()} at {place} and "
            f"{int(bad.sum())} such values in all; {advice}"
        )


def seems_inverted(x: Tensor, observed: Tensor) -> bool:
    """Whether all that is seen of every image is one value; values that are not seen are not looked at."""
    seen = observed.expand(x.shape)
    counted = seen.flatten(1).sum(1) > 1
    high = x.masked_fill(~seen, -torch.inf).flatten(1).amax(1)
    low = x.masked_fill(~seen, torch.inf).flatten(1).amin(1)
    return bool(counted.any()) and bool((high == low)[counted].all()) and not bool(seen.all())


def warn_if_inverted(*batches: tuple[Tensor, Tensor], stacklevel: int) -> None:
    """Warn where `observed` seems to be inverted in all of these batches (x, observed)."""
    if batches and all(seems_inverted(x, observed) for x, observed in batches):
        warnings.warn(
            "what is observed of every image is one constant value: observed must be True where a pixel was seen, and "
            "it may be inverted here",
            stacklevel=stacklevel + 1,
        )


def check_mfa(p: MFA, check: bool | None) -> None:
    """Shapes, types and devices of an MFA always; values where they may be read."""
    _check_types_of_mfa(p)
    _check_shapes_of_mfa(p)
    if p.observed is not None:
        p.observed = check_observed("observed", p.observed, p.means[:, 0], check=check)
    if readable(p.logits, p.means, p.factors, p.noise, check=check):
        _check_values_of_mfa(p)


def _check_types_of_mfa(p: MFA) -> None:
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
        check_dense(name, value)
        if value.dim() != shape.count(",") + 1:
            raise ValueError(f"{name} must have shape {shape}, got {describe(value)}")
    for name in shapes:
        value = getattr(p, name)
        if value.dtype != p.means.dtype or value.device != p.means.device:
            raise ValueError(
                f"{name} must have the type {p.means.dtype} and device {p.means.device} of means, got {describe(value)}"
            )


def _check_shapes_of_mfa(p: MFA) -> None:
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


def _check_values_of_mfa(p: MFA) -> None:
    seen = None if p.observed is None else p.observed.unsqueeze(1)
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

"""What torchvision's v2 functions do to an image with missing pixels, NaN; see `misconv.transforms.Incomplete`.

A kernel fills the holes with numbers that change nothing, calls torchvision's own kernel, and marks the holes again.
What is complete therefore comes out bit for bit as torchvision makes it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

__all__ = ["KERNELS", "NATIVE", "refuse"]

Kernel = Callable[..., Any]

# NaN stays where it is, or moves with the image, and no number depends on it.
NATIVE = {
    "get_dimensions",
    "get_num_channels",
    "get_size",
    "horizontal_flip",
    "normalize",
    "permute_channels",
    "vertical_flip",
}
_POINTWISE = (
    "adjust_brightness",
    "adjust_gamma",
    "gaussian_noise",
    "invert",
    "posterize",
    "solarize",
)
# A pixel of the result needs all channels of the pixel.
_MIXING_CHANNELS = ("adjust_hue", "adjust_saturation", "rgb_to_grayscale")
_GEOMETRIC = (
    "affine",
    "center_crop",
    "crop",
    "elastic",
    "five_crop",
    "gaussian_blur",
    "pad",
    "perspective",
    "resize",
    "resized_crop",
    "rotate",
    "ten_crop",
)


def _kernel(work: Callable[..., Any]) -> Kernel:
    """A kernel for incomplete images from work on plain tensors."""

    def kernel(inpt: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = work(inpt.as_subclass(Tensor), *args, **kwargs)
        if isinstance(result, Tensor):
            return tv_tensors.wrap(result, like=inpt)
        return type(result)(tv_tensors.wrap(part, like=inpt) for part in result)

    return kernel


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The image with 0 in its holes, or itself where it has none, and where it is seen."""
    seen = ~x.isnan() if x.is_floating_point() else torch.ones_like(x, dtype=torch.bool)
    return (x if bool(seen.all()) else x.where(seen, 0)), seen


def _mark(result: Tensor, seen: Tensor) -> Tensor:
    return result.masked_fill(~seen, math.nan) if result.is_floating_point() else result


def refuse(name: str, reason: str = "it is not known what that means for missing pixels") -> Kernel:
    """The kernel of a function that incomplete images cannot go through."""

    def work(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise TypeError(f"{name} cannot be applied to an Incomplete image: {reason}")

    return _kernel(work)


# Each pixel by itself ------------------------------------------------------------------------------------------------


def _pointwise(name: str, mixes_channels: bool) -> Kernel:
    own = getattr(F, f"{name}_image")

    def work(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        filled, seen = _split(x)
        result = own(filled, *args, **kwargs)
        seen = seen.all(-3, keepdim=True) if mixes_channels and x.dim() > 2 else seen
        return _mark(result, seen.expand(result.shape))

    return _kernel(work)


def _grayscale_to_rgb(x: Tensor) -> Tensor:
    return (
        x
        if x.shape[-3] >= 3
        else _mark(F.grayscale_to_rgb_image(_split(x)[0]), ~x.isnan().expand(*x.shape[:-3], 3, *x.shape[-2:]))
    )


def _to_dtype(x: Tensor, dtype: torch.dtype = torch.float32, scale: bool = False) -> Tensor:
    filled, seen = _split(x)
    if not dtype.is_floating_point and not bool(seen.all()):
        raise TypeError(
            f"to_dtype cannot turn an Incomplete image with holes into {dtype}, which has no NaN to mark them; fill "
            "them first (misconv.impute), or keep a floating-point type"
        )
    return _mark(F.to_dtype_image(filled, dtype=dtype, scale=scale), seen)


def _jpeg(x: Tensor, quality: int) -> Tensor:
    if x.is_floating_point():
        raise TypeError(
            f"jpeg needs an image of uint8, in which no pixel can be missing, got an Incomplete image of {x.dtype}"
        )
    result: Tensor = F.jpeg_image(x, quality=quality)
    return result


def _erase(x: Tensor, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False) -> Tensor:
    value = torch.as_tensor(v)
    if value.numel() == 1 and not bool(value):  # torchvision's default
        if not x.is_floating_point():
            raise _no_integers("erase", x)
        value = torch.full_like(value, math.nan, dtype=x.dtype)
    result: Tensor = F.erase_image(x, i=i, j=j, h=h, w=w, v=value.to(x.device), inplace=inplace)
    return result


# Statistics ----------------------------------------------------------------------------------------------------------


def _adjust_contrast(x: Tensor, contrast_factor: float) -> Tensor:
    """``r·x + (1 − r)·m``, with m the mean gray of the pixels that are seen in all channels."""
    filled, seen = _split(x)
    result: Tensor = F.adjust_contrast_image(filled, contrast_factor=contrast_factor)
    if bool(seen.all()):
        return result
    image = (-3, -2, -1)
    known = seen.all(-3, keepdim=True)
    count = known.sum(image, keepdim=True)
    if bool(((count == 0) & seen.any(-1).any(-1).any(-1)[..., None, None, None]).any()):
        raise ValueError(
            "adjust_contrast needs a pixel that is seen in all channels to know the mean gray of an Incomplete image, "
            "got an image without one"
        )
    gray = F.rgb_to_grayscale_image(filled) if x.shape[-3] == 3 else filled
    wide = torch.promote_types(x.dtype, torch.float32)  # a sum in half precision overflows
    mean = (gray.where(known, 0).sum(image, keepdim=True, dtype=wide) / count.clamp_min(1)).to(x.dtype)
    around = filled.mul(contrast_factor).add(mean, alpha=1.0 - contrast_factor).clamp(0, 1)
    whole = seen.flatten(-3).all(-1)[..., None, None, None]
    return _mark(torch.where(whole, result, around), seen)


def _autocontrast(x: Tensor) -> Tensor:
    """From the least to the largest seen value of each channel: holes are filled with the least."""
    filled, seen = _split(x)
    if x.numel() == 0 or not x.is_floating_point():
        return _mark(F.autocontrast_image(x), seen)
    least = x.where(seen, math.inf).amin((-2, -1), keepdim=True)
    least = least.where(seen.any(-1, keepdim=True).any(-2, keepdim=True), 0)
    return _mark(F.autocontrast_image(filled.where(seen, least)), seen)


def _equalize(x: Tensor) -> Tensor:
    """Channel by channel, with the seen pixels in a row: torchvision counts what it gets."""
    filled, seen = _split(x)
    result = F.equalize_image(filled)
    partly = seen.any(-1).any(-1) & ~seen.all(-1).all(-1)
    for place in partly.nonzero().tolist():
        channel, here = x[tuple(place)], seen[tuple(place)]
        result[tuple(place)][here] = F.equalize_image(channel[here].view(1, 1, -1)).flatten()
    return _mark(result, seen)


# Neighbours ----------------------------------------------------------------------------------------------------------


def _adjust_sharpness(x: Tensor, sharpness_factor: float) -> Tensor:
    """``x + (1 − r)·(smooth − x)`` inside, with the 3×3 mean over the seen neighbours."""
    filled, seen = _split(x)
    result = F.adjust_sharpness_image(filled, sharpness_factor=sharpness_factor)
    if bool(seen.all()) or min(x.shape[-2:]) <= 2:
        return _mark(result, seen)
    planes = filled.reshape(-1, 1, *x.shape[-2:])
    weight = planes.new_tensor([[1, 1, 1], [1, 5, 1], [1, 1, 1]]).view(1, 1, 3, 3) / 13
    total, share, gap = (
        torch.nn.functional.conv2d(part.reshape(planes.shape).to(x.dtype), weight).view(
            *x.shape[:-2], *(n - 2 for n in x.shape[-2:])
        )
        for part in (filled, seen, ~seen)
    )
    inside = filled[..., 1:-1, 1:-1]
    smooth = total / share.clamp_min(1 / 26)
    sharp = (inside + (1.0 - sharpness_factor) * (smooth - inside)).clamp(0, 1)
    result = result.clone()
    result[..., 1:-1, 1:-1] = torch.where(gap > 0, sharp, result[..., 1:-1, 1:-1])
    return _mark(result, seen)


def _geometric(name: str) -> Kernel:
    own = getattr(F, f"{name}_image")
    signature = inspect.signature(own)

    def work(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(x, *args, **kwargs)
        bound.apply_defaults()
        arguments = dict(list(bound.arguments.items())[1:])
        fill = arguments.get("fill")
        given = _is_given(name, fill)
        if "fill" in arguments and not given and fill is not None:
            arguments["fill"] = 0.0

        def move(image: Tensor, border: float) -> list[Tensor]:
            constant = {"fill": border} if fill is not None else {}
            moved = own(image, **arguments | constant)
            return [moved] if isinstance(moved, Tensor) else list(moved)

        moved = own(_split(x)[0], **arguments)
        if x.numel() == 0:
            return moved
        parts = [moved] if isinstance(moved, Tensor) else list(moved)
        parts = _over_seen(name, x, parts, move, given)
        return parts[0] if isinstance(moved, Tensor) else type(moved)(parts)

    return _kernel(work)


def _over_seen(
    name: str, x: Tensor, values: list[Tensor], move: Callable[[Tensor, float], list[Tensor]], given: bool
) -> list[Tensor]:
    """Moved images as means over what is seen, from the moved images whose holes are 0.

    The same linear map of `observed` is the weight, which the outside has only where it is given. No hole is in reach
    of a pixel exactly where the map of numbers in the holes is 0; the numbers differ so that they do not cancel.
    """
    kind = x.dtype if x.is_floating_point() else torch.float32
    tolerance = max(1e-4, 8 * torch.finfo(kind).eps)
    height, width = x.shape[-2:]
    whole = move(torch.ones(1, height, width, dtype=kind, device=x.device), float(given))
    outside = [(w - 1).abs() > tolerance for w in whole]
    if not x.is_floating_point():
        if not given and any(bool(out.any()) for out in outside):
            raise _no_integers(name, x)
        return values
    seen = ~x.isnan()
    if bool(seen.all()) and (given or not any(bool(out.any()) for out in outside)):
        return values
    numbers = 1 + torch.arange(height * width, dtype=torch.float64, device=x.device).mul(0.6180339887498949).frac()
    holes = move(numbers.view(height, width).to(kind).expand(x.shape).masked_fill(seen, 0), 0.0)
    weights = move(seen.to(kind), float(given))
    results = []
    for value, hole, weight, full, out in zip(values, holes, weights, whole, outside, strict=True):
        reference = full if given else torch.ones_like(full)
        untouched = (hole == 0) & (given | ~out)
        mean = torch.where(untouched, value, value * reference / weight.clamp_min(1e-4))
        results.append(mean.masked_fill(~untouched & (weight < reference / 2), math.nan))
    return results


def _is_given(name: str, fill: Any) -> bool:
    """Whether what comes in from outside is said to be seen: anything but None, a single 0 (the default), or NaN."""
    if fill is None:
        return False
    if isinstance(fill, int | float):
        return fill != 0 and not math.isnan(fill)
    unknown = [math.isnan(value) for value in fill]
    if any(unknown) and not all(unknown):
        raise ValueError(f"fill of {name} must be numbers or NaN in all channels, got some of both")
    return not any(unknown)


def _no_integers(name: str, x: Tensor) -> TypeError:
    return TypeError(
        f"{name} makes pixels that are missing, which {x.dtype} cannot mark; convert the Incomplete image first, for "
        "example with v2.ToDtype(torch.float32, scale=True), or give a fill"
    )


KERNELS: dict[str, Kernel] = {
    **{name: _pointwise(name, False) for name in _POINTWISE},
    **{name: _pointwise(name, True) for name in _MIXING_CHANNELS},
    **{name: _geometric(name) for name in _GEOMETRIC},
    "adjust_contrast": _kernel(_adjust_contrast),
    "adjust_sharpness": _kernel(_adjust_sharpness),
    "autocontrast": _kernel(_autocontrast),
    "equalize": _kernel(_equalize),
    "erase": _kernel(_erase),
    "grayscale_to_rgb": _kernel(_grayscale_to_rgb),
    "jpeg": _kernel(_jpeg),
    "to_dtype": _kernel(_to_dtype),
}

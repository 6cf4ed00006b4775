"""Images with missing pixels in torchvision's v2 pipelines: resize, rotate or crop without spreading the holes.

Flips, crops and normalization leave NaN where it is, but everything that interpolates mixes a NaN into all pixels that
touch it. An `Incomplete` image is interpolated over its observed pixels alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F
except ImportError as error:
    raise ImportError("transforms need torchvision: pip install 'misconv[vision]'") from error

__all__ = ["Incomplete"]

_INTERPOLATING = ("affine", "elastic", "gaussian_blur", "perspective", "resize", "resized_crop", "rotate")


class Incomplete(tv_tensors.Image):  # type: ignore[misc]  # torchvision is not typed
    """An image (…, C, H, W) whose missing pixels are NaN, for `torchvision.transforms.v2`.

    Where a transform interpolates, the result is the weighted mean of the observed pixels, ``T(x·o) / T(o)``, and a
    pixel is missing if less than half of its weight is observed; so is what comes in from outside of the image.

    Example:
        >>> from torchvision.transforms import v2
        >>> image = torch.ones(1, 8, 8)
        >>> image[:, 2:4, 2:4] = float("nan")
        >>> small = v2.Resize(4)(Incomplete(image))
        >>> small.isnan().sum().item(), small.nan_to_num(1.0).unique().tolist()
        (1, [1.0])
    """


def _over_observed(functional: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel of an interpolating transform for incomplete images."""

    def kernel(inpt: Incomplete, *args: Any, **kwargs: Any) -> Tensor:
        plain = inpt.as_subclass(Tensor)
        observed = ~plain.isnan()
        if not plain.is_floating_point():
            return _wrap(functional(plain, *args, **kwargs), inpt)
        values = functional(plain.where(observed, 0), *args, **kwargs)
        # The same transform of what is observed is the weight; outside of the image there is none, whatever fills it.
        weight = functional(observed.to(plain.dtype), *args, **{**kwargs, **({"fill": 0} if "fill" in kwargs else {})})
        whole = weight > 1 - 1e-4  # nothing missing nearby: exactly what the transform gives for a complete image
        mean = torch.where(whole, values, values / weight.clamp_min(1e-4))
        return _wrap(mean.masked_fill(weight < 0.5, torch.nan), inpt)

    return kernel


def _wrap(result: Tensor, like: Incomplete) -> Tensor:
    wrapped: Tensor = tv_tensors.wrap(result, like=like)
    return wrapped


for _name in _INTERPOLATING:
    _functional = getattr(F, _name)
    F.register_kernel(_functional, tv_tensor_cls=Incomplete)(_over_observed(_functional))

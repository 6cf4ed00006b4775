"""Images with missing pixels in torchvision's v2 pipelines: every transform, without spreading or filling the holes.

A NaN that is averaged, binned or converted becomes a NaN everywhere or a number that nobody has seen. For an
`Incomplete` image interpolation, statistics and padding look at the seen pixels alone (see `_transform_kernels`), and
what cannot do that is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from misconv._checks import describe

try:
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F

    from misconv._transforms import KERNELS, NATIVE, refuse
except ImportError as error:
    raise ImportError("transforms need torchvision: pip install 'misconv[vision]'") from error

__all__ = ["Incomplete"]

# Code of torchvision that may compute with NaN itself: a mixture with a missing pixel is missing, a moved one moves.
_MIXING = {"AugMix.forward", "CutMix.transform", "MixUp.transform"}


class Incomplete(tv_tensors.Image):  # type: ignore[misc]  # torchvision is not typed
    """An image (…, C, H, W) whose missing pixels are NaN, for `torchvision.transforms.v2`.

    - What interpolates or blurs gives the weighted mean of the seen pixels, ``T(x·o) / T(o)``; a pixel is missing if
      less than half of its weight is seen.
    - Statistics (contrast, autocontrast, equalize) are those of the seen pixels.
    - What comes in from outside of the image is missing, and so is what is erased. `fill` and `value` are seen numbers
      only where they differ from torchvision's default, a single 0: ``fill=[0.0]`` is black that was seen.
    - What mixes channels (gray, hue, saturation) or images (MixUp, AugMix) is missing if one of them is.
    - A complete image gives torchvision's own result, except where it is mixed with the outside. An image of integers
      is complete.
    - Whatever else reads the pixels is refused, such as JPEG, integers or `PIL` images of what is missing. Only
      `torchvision.tv_tensors.Image(…)` and `to_image` make an ordinary image of it, whose NaN are NaN.

    Args:
        data: (…, C, H, W) or (H, W), a tensor, an array or a `PIL` image; `dtype`, `device` and `requires_grad` as in
            `torchvision.tv_tensors.Image`.

    Example:
        >>> from torchvision.transforms import v2
        >>> image = torch.ones(1, 8, 8)
        >>> image[:, 2:4, 2:4] = float("nan")
        >>> small = v2.Resize(4)(Incomplete(image))
        >>> small.isnan().sum().item(), small.nan_to_num(1.0).unique().tolist()
        (1, [1.0])
        >>> v2.Pad(1)(small).isnan().sum().item()
        21
    """

    def __new__(cls, data: Any, **kwargs: Any) -> Incomplete:
        """Check what `torchvision.tv_tensors.Image` takes on trust."""
        foreign = kwargs.keys() - {"dtype", "device", "requires_grad"}
        if foreign:
            raise TypeError(f"Incomplete takes data, dtype, device and requires_grad, got {min(foreign)!r}")
        try:
            image = super().__new__(cls, data, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = ValueError if isinstance(error, ValueError) or isinstance(data, Tensor) else TypeError
            raise kind(
                "data must be an image (…, C, H, W) or (H, W): a tensor, an array or a PIL image, with a dtype and "
                f"on a device that it can have, got {_short(data)}: {str(error).splitlines()[0][:150]}"
            ) from error
        if image.is_complex():
            raise TypeError(f"data must be real numbers, NaN where they are missing, got {_short(data)}")
        made: Incomplete = image
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """As in torchvision, but code of torchvision that knows no missing pixels does not get to compute with them.

        Kernels below get plain tensors, so only code that passes by them comes here: v1 functions, kernels called by
        their names, `LinearTransformation`, `to_pil_image`.
        """
        output = super().__torch_function__(func, types, args, kwargs)
        if torch.compiler.is_compiling() or not isinstance(output, Tensor):
            return output
        caller = _torchvision_caller()
        if caller is None:
            return output
        if caller.co_qualname not in _MIXING:
            _refuse_holes(caller.co_qualname.removesuffix(".transform"), args)
        elif func is Tensor.reshape and caller.co_qualname == "AugMix.forward":
            return output.as_subclass(cls)  # its chain of transforms must know what it gets
        return output


def _short(data: Any) -> str:
    """An argument of the wrong kind in a few words."""
    if isinstance(data, np.ndarray):
        return f"a {data.dtype} array of shape {data.shape}"
    return describe(data) if isinstance(data, Tensor) else type(data).__name__


def _torchvision_caller() -> CodeType | None:
    """The code of torchvision's transforms that calls a torch function directly, if that is who does."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "torch":
        frame = frame.f_back
    name = str(frame.f_globals.get("__name__"))
    return frame.f_code if name.startswith("torchvision.transforms.") else None


def _refuse_holes(name: str, args: Sequence[Any]) -> None:
    for image in args:
        if isinstance(image, Incomplete) and bool(image.as_subclass(Tensor).isnan().any()):
            raise ValueError(  # a TypeError would be lost: to torch it says that an operator does not apply
                f"{name} of torchvision does not know missing pixels, got an Incomplete image with holes; fill them "
                "first (misconv.impute), or use a transform of torchvision.transforms.v2 that calls v2.functional"
            )


def _register() -> None:
    """Our kernel for every function of v2 that has one for images; a refusal where we have none."""
    for name in dir(F):
        function = getattr(F, name)
        if hasattr(F, f"{name}_image") and function.__name__ == name and name not in NATIVE:
            F.register_kernel(function, tv_tensor_cls=Incomplete)(KERNELS.get(name) or refuse(name))


_register()

"""Arguments in the forms in which callers hold them: images of numpy and PIL, indices of any kind, generators."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from misconv._checks.tensors import describe, readable

__all__ = ["IMAGE_FORMS", "INTEGERS", "as_rows", "generator_device", "read_images", "unpack_images"]

# Whose values int64 holds.
INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
IMAGE_FORMS = 'NaN-coded images, pairs (x, observed) or dictionaries {"image": …, "observed": …}'
_MODES = ("L", "I", "F", "RGB", "I;16", "I;16L", "I;16B", "I;16N")


def read_images(x: Any) -> tuple[Tensor, Tensor | None]:
    """A tensor, an array or a PIL image as a tensor; and where an array is masked, None where it has no mask.

    >>> read_images(np.ones((1, 1, 2, 2), ">f4"))[0].shape
    torch.Size([1, 1, 2, 2])
    """
    if isinstance(x, Tensor):
        return x, None
    if isinstance(x, np.ndarray):
        absent = torch.tensor(np.ma.getmaskarray(x), device="cpu") if isinstance(x, np.ma.MaskedArray) else None
        return _from_numpy(np.asarray(x)), absent
    if _is_pil(x):
        if x.mode not in _MODES:
            raise TypeError(
                f"x must be a PIL image of mode L, I, F or RGB, got mode {x.mode}; convert it, for example "
                'x.convert("RGB")'
            )
        pixels = np.asarray(x)
        pixels = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)  # (C, H, W)
        return _from_numpy(pixels[None]), None
    raise TypeError(f"x must be a torch.Tensor of images (B, C, H, W), a numpy array or a PIL image, got {describe(x)}")


def _is_pil(x: object) -> bool:
    """Known by its name, for PIL need not be installed."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(x).__mro__)


def _from_numpy(x: np.ndarray[Any, Any]) -> Tensor:
    """A copy, whatever the order of bytes and the strides are."""
    if x.dtype.kind not in "iuf" or x.dtype.itemsize > 8:
        raise TypeError(f"x must hold floating-point numbers or integers, got an array of {x.dtype}")
    return torch.tensor(np.ascontiguousarray(x, x.dtype.newbyteorder("=")), device="cpu")


def generator_device(generator: torch.Generator | None, otherwise: torch.device) -> torch.device:
    """Where random numbers are drawn: where the generator lives, and without one where they are wanted."""
    if generator is None:
        return otherwise
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {describe(generator)}")
    return generator.device


def unpack_images(item: object) -> tuple[Any, Any]:
    """Images and, or None, what is observed of them, from what a Dataset or a DataLoader gives.

    That is images alone, (images, observed, …), (images, labels, …), or a dictionary with "image" and maybe "observed".

    Example:
        >>> unpack_images(("x", torch.tensor([3, 1])))
        ('x', None)
    """
    if isinstance(item, Mapping):
        if "image" not in item:
            raise ValueError(f'images must yield dictionaries with the key "image", got the keys {describe([*item])}')
        return item["image"], item.get("observed")
    if not isinstance(item, (tuple, list)):
        return item, None
    if not item:
        raise ValueError(f"images must yield {IMAGE_FORMS}, got an empty {type(item).__name__}")
    images, second = (*item, None)[:2]
    return images, None if _is_label(second) else second


def _is_label(value: object) -> bool:
    """The number of a class, or one for each image."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim <= 1 and str(value.dtype).removeprefix("torch.").startswith(("int", "uint"))
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_rows(index: object, count: int, device: torch.device) -> slice | Tensor:
    """An index of `count` images as a slice or as a tensor (m,), with which the batch dimension stays."""
    if isinstance(index, slice):
        try:
            rows = range(*index.indices(count))
        except (TypeError, ValueError) as error:
            raise type(error)(f"index must be a slice of integers, got {describe(index)}") from error
        return index if rows.step > 0 else torch.tensor(list(rows), dtype=torch.int64, device=device)
    chosen = _as_index(index)
    if chosen is None or (chosen.dtype == torch.bool and chosen.shape != (count,)):
        raise TypeError(
            f"index must be an integer, a slice, or a list or tensor of integers or of {count} bools, got "
            f"{describe(index)}"
        )
    if chosen.dtype != torch.bool and readable(chosen):
        bad = (chosen < -count) | (chosen >= count)
        if bad.any():
            raise IndexError(f"index must be one of {count} images, got {int(chosen[bad][0])}")
    return chosen.to(device)


def _as_index(index: object) -> Tensor | None:
    """Integers (m,) or bools (m,), one integer as (1,); None for what is neither."""
    if isinstance(index, (list, range)):
        index = list(index)
        if not index:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
    elif isinstance(index, bool) or not (isinstance(index, (int, Tensor)) or hasattr(index, "__array__")):
        return None
    try:
        # On the CPU, where the check of the range can look at it.
        chosen = index if isinstance(index, Tensor) else torch.as_tensor(index, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None
    if chosen.dtype == torch.bool:
        return chosen if chosen.dim() == 1 else None
    if chosen.is_floating_point() or chosen.is_complex() or chosen.dim() > 1:
        return None
    return chosen.to(torch.int64).reshape(-1)

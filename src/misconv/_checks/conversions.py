"""Arguments in the forms in which callers hold them: images of numpy and PIL, indices of any kind, generators."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from misconv._checks.tensors import check_dense, check_observed, describe, readable

__all__ = [
    "IMAGE_FORMS",
    "INTEGERS",
    "as_batch",
    "as_observed",
    "as_rows",
    "generator_device",
    "read_images",
    "unpack_images",
]

INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
IMAGE_FORMS = 'NaN-coded images, pairs (x, observed) or dictionaries {"image": …, "observed": …}'
_MODES = ("L", "I", "F", "RGB", "I;16", "I;16L", "I;16B", "I;16N", "LA", "RGBA")
_CONVERTED = {"1": "L", "P": "RGB", "PA": "RGBA"}  # what numbers of a palette say, and the 255 of a white pixel
_WITH_ALPHA = {"L": "LA", "RGB": "RGBA"}


def as_batch(
    x: Any, observed: Any = None, like: Tensor | None = None, *, name: str = "x", nodata: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Images in any form as floating-point images (B, C, H, W); and what was seen of them, None where NaN says it.

    Integers keep their values. A batch of floating-point images is passed on as it is, and nothing of it is read.

    Args:
        x: a tensor, an array, masked or not, a PIL image, or a list of PIL images of one size; (C, H, W) and (H, W)
            are one image.
        observed: a tensor or an array, (B, 1, H, W) or (B, C, H, W); of one image also (1, H, W), (C, H, W) or (H, W).
        like: a tensor of the module that reads the images: integers get its type (those of more than a byte float32 at
            least, which holds them), and what is no tensor goes to its device. None for torch's default type.
        nodata: a number that stands for "no reading".

    Example:
        >>> x, observed = as_batch(np.ma.masked_equal(np.array([[7, 0]], "uint8"), 0))
        >>> x.tolist(), observed.tolist()
        ([[[[7.0, 0.0]]]], [[[[True, False]]]])
    """
    plain = isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()
    if plain and nodata is None and (observed is None or isinstance(observed, Tensor)):
        return x, observed
    images, seen = read_images(x, name)
    _check_numbers(name, x, images)
    if nodata is not None:
        differs = _differs(images, nodata)
        seen = differs if seen is None else differs & seen
    lone = images.dim() < 4
    images = _with_batch(_as_floating(_beside(like, images, x), like))
    observed = as_observed(observed, images, lone=lone)
    if seen is None:
        return images, observed
    observed = ~images.isnan() if observed is None else check_observed("observed", observed, images)
    return images, observed & _with_batch(seen.to(images.device))


def as_observed(observed: Any, images: Tensor, *, lone: bool = False) -> Any:
    """`observed` of an array as a tensor beside the images; of a `lone` image with the dimensions that it lacks."""
    if isinstance(observed, np.ndarray) and observed.dtype.kind in "biuf":
        observed = _to_tensor(observed).to(images.device)
    return _with_batch(observed) if lone and isinstance(observed, Tensor) and observed.dim() in (2, 3) else observed


def _with_batch(images: Tensor) -> Tensor:
    """(H, W) or (C, H, W) → (1, C, H, W)."""
    return images[(None,) * (4 - images.dim())] if images.dim() < 4 else images


def _check_numbers(name: str, x: object, images: Tensor) -> None:
    """Numbers that images can hold, in a shape that they can have."""
    check_dense(name, images)
    if not images.is_floating_point() and images.dtype not in INTEGERS:
        raise TypeError(f"{name} must hold floating-point numbers or integers, got {describe(x)}")
    if not 2 <= images.dim() <= 4:
        raise ValueError(
            f"{name} must have shape (B, C, H, W), or (C, H, W) or (H, W) for one image, got {describe(x)}"
        )


def _beside(like: Tensor | None, images: Tensor, x: object) -> Tensor:
    """Images on the device of the module that reads them, unless they came as a tensor, which its owner has placed."""
    return images if like is None or isinstance(x, Tensor) else images.to(like.device)


def _as_floating(images: Tensor, like: Tensor | None) -> Tensor:
    """Integers as numbers of the same value in a floating-point type; half precision holds those of a byte alone."""
    if images.is_floating_point():
        return images
    dtype = like.dtype if like is not None and like.is_floating_point() else torch.get_default_dtype()
    return images.to(dtype if images.element_size() == 1 else torch.promote_types(dtype, torch.float32))


def _differs(images: Tensor, nodata: float) -> Tensor:
    """Where images hold another number than `nodata`, compared as they are stored."""
    if images.is_floating_point():
        return images != float(nodata)
    kind = torch.iinfo(images.dtype)
    if nodata != nodata or not kind.min <= nodata <= kind.max or nodata != int(nodata):
        raise ValueError(f"nodata must be an integer that {kind.dtype} can hold, as x does, got {describe(nodata)}")
    if images.dtype == torch.uint64:  # by its bits: int64 holds half of its numbers
        return images.view(torch.int64) != int(nodata) - 2**64 * (nodata >= 2**63)
    return images.long() != int(nodata)


def read_images(x: Any, name: str = "x") -> tuple[Tensor, Tensor | None]:
    """A tensor, an array or PIL images as a tensor; and what was seen of it, None where nothing but NaN is missing.

    Missing is what an array masks, and what is wholly transparent.

    >>> read_images(np.ones((1, 1, 2, 2), ">f4"))[0].shape
    torch.Size([1, 1, 2, 2])
    """
    if isinstance(x, Tensor):
        return x, None
    if isinstance(x, np.ndarray):
        if x.dtype.kind not in "iuf" or x.dtype.itemsize > 8:
            raise TypeError(f"{name} must hold floating-point numbers or integers, got an array of {x.dtype}")
        return _to_tensor(np.asarray(x)), _seen(np.ma.getmask(x), x.shape)
    if _is_pil(x):
        return _from_pil(x, name)
    if isinstance(x, (list, tuple)) and x and all(_is_pil(each) for each in x):
        return _from_pil_list(x, name)
    raise TypeError(
        f"{name} must be a torch.Tensor of images (B, C, H, W), a numpy array or a PIL image, got {describe(x)}"
    )


def _seen(absent: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Where nothing is masked, None where that is so everywhere."""
    return _to_tensor(~np.broadcast_to(absent, shape)) if np.any(absent) else None


def _is_pil(x: object) -> bool:
    """Known by its name, for PIL need not be installed."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(x).__mro__)


def _from_pil(x: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """A PIL image as (C, H, W), and where it is not wholly transparent, (1, H, W)."""
    mode = _CONVERTED.get(x.mode, x.mode)
    if "transparency" in x.info:  # of one colour, or of some of a palette
        mode = _WITH_ALPHA.get(mode, mode)
    if mode not in _MODES:
        raise TypeError(
            f"{name} must be a PIL image of mode L, I, F, RGB, LA, RGBA, P or 1, got mode {x.mode}; convert it, for "
            f'example {name}.convert("RGB")'
        )
    pixels = np.atleast_3d(np.asarray(x if x.mode == mode else x.convert(mode)))  # (H, W, C)
    alpha = pixels[..., -1] if mode in _WITH_ALPHA.values() else np.ones(1)
    colours = pixels[..., :-1] if mode in _WITH_ALPHA.values() else pixels
    return _to_tensor(np.moveaxis(colours, 2, 0)), _seen(alpha == 0, (1, *pixels.shape[:2]))


def _from_pil_list(x: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """PIL images of one size as a batch."""
    found = [_from_pil(each, name) for each in x]
    kinds = {(tuple(image.shape), image.dtype) for image, _ in found}
    if len(kinds) > 1:
        listed = " and ".join(sorted(f"{dtype} of {shape}" for shape, dtype in kinds))
        raise ValueError(f"{name} must be PIL images of one size, one type and one number of channels, got {listed}")
    images = torch.stack([image for image, _ in found])
    if all(seen is None for _, seen in found):
        return images, None
    whole = torch.ones(1, *images.shape[2:], dtype=torch.bool, device="cpu")
    return images, torch.stack([whole if seen is None else seen for _, seen in found])


def _to_tensor(x: np.ndarray[Any, Any]) -> Tensor:
    """A copy, whatever the order of bytes and the strides are."""
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

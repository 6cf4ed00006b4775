"""The image on its way to the first convolution: every channel an affine function of a channel of the MFA.

Networks normalise (`(x - mean) / std`), rescale, reorder channels and pad before they convolve, in place or not. An
affine map of an MFA is an MFA. So the values are left to the network's own arithmetic, which runs on the mean image;
here it is only followed which channel each one comes from and with what slope. `random_image` puts the two together.

In-place operations reach every view of the same memory. Therefore views share one `Pixels`, as they share the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from misconv._torch import first_of
from misconv.mfa import MFA

__all__ = [
    "ARITHMETIC",
    "CERTAIN",
    "SELECTIONS",
    "Image",
    "Selection",
    "affine_slope",
    "assign",
    "channel_numbers",
    "connected_mean",
    "find_selections",
    "flips_channels",
    "pad",
    "random_image",
    "scale",
    "select",
    "slope_tensor",
    "source_image",
]

Slope = float | Tensor  # a number, or a tensor without dimensions
CERTAIN = -1  # the source of a channel that does not depend on the image


@dataclass(eq=False)
class Pixels:
    """The channels that lie in one piece of memory."""

    sources: list[int]  # the channel of the MFA that each comes from, or CERTAIN
    slopes: list[Slope]
    margins: tuple[int, int, int, int] = (0, 0, 0, 0)  # left, right, top, bottom
    mode: str = "constant"  # what fills the margins
    changed: bool = False  # whether anything was done to the image at all
    spoiled: str | None = None  # what has been done to it that cannot be followed

    def copy(self, index: Sequence[int]) -> Pixels:
        """The same channels, or some of them, in memory of their own."""
        return replace(self, sources=[self.sources[i] for i in index], slopes=[self.slopes[i] for i in index])


@dataclass(eq=False)
class Image:
    """A tensor (B, c, H, W) that holds the channels `index` of `pixels`; (B, H, W) where the channel is `dropped`."""

    pixels: Pixels
    index: list[int]
    dropped: bool = False
    detached: bool = False  # without gradients
    recomputed: bool = False  # by a reentrant checkpoint, whose backward pass is one inside another
    fresh: bool = False  # as it entered the network, where nothing but a convolution has read it
    borrowed: bool = False  # whether the tensor lies in the memory of the MFA, where nobody may write

    @property
    def untouched(self) -> bool:
        """Whether these are the images of the MFA, with all their channels."""
        return not self.pixels.changed and len(self.index) == len(self.pixels.sources)

    @property
    def sources(self) -> list[int]:
        """The channel of the MFA behind each channel."""
        return [self.pixels.sources[i] for i in self.index]

    @property
    def slopes(self) -> list[Slope]:
        """The slope of each channel."""
        return [self.pixels.slopes[i] for i in self.index]

    def copy(self) -> Image:
        """The same image in memory of its own."""
        return replace(self, pixels=self.pixels.copy(self.index), index=list(range(len(self.index))))


def source_image(channels: int, *, borrowed: bool = False) -> Image:
    """The image as it enters the network."""
    index = list(range(channels))
    return Image(Pixels(index.copy(), [1.0] * channels), index, fresh=True, borrowed=borrowed)


# Arithmetic ----------------------------------------------------------------------------------------------------------

_ADD = {"add", "iadd", "radd"}
_SUB = {"sub", "subtract", "isub"}
_MUL = {"mul", "multiply", "imul", "rmul"}
_DIV = {"div", "divide", "true_divide", "truediv", "itruediv", "idiv"}
_NEG = {"neg", "negative"}
ARITHMETIC = {*_ADD, *_SUB, *_MUL, *_DIV, *_NEG, "rsub"}


def affine_slope(name: str, operands: Sequence[Any], place: int, kwargs: dict[str, Any]) -> Any:
    """The slope of an arithmetic function in its operand at `place`: a number, a tensor, or None if it has none.

    `operands` are its positional arguments, `kwargs` the others.
    """
    alpha = kwargs.get("alpha", 1)
    if set(kwargs) - {"alpha"} or not isinstance(alpha, (int, float)):
        return None
    if name in _NEG:
        return -1.0 if len(operands) == 1 else None
    if len(operands) != 2:
        return None
    other = operands[1 - place]
    if name in _ADD:
        return 1.0 if place == 0 else float(alpha)
    if name in _SUB or name == "rsub":
        first = place == (1 if name == "rsub" else 0)
        return 1.0 if first else -float(alpha)
    if name in _MUL:
        return other
    if name in _DIV and place == 0:
        return 1 / other
    return None


def channel_numbers(operand: Any, channels: int, *, dropped: bool = False) -> list[Slope] | None:
    """One number for every channel out of an operand that is broadcast against (B, C, H, W); None where it varies more.

    An operand of more channels than the image has spreads a single channel.
    """
    if isinstance(operand, (int, float)) and not isinstance(operand, bool):
        return [float(operand)] * channels
    if not isinstance(operand, Tensor) or operand.is_complex():
        return None
    if operand.numel() == 1:
        return [operand.reshape(())] * channels
    shape = [1] * (4 - operand.dim()) + list(operand.shape)
    if dropped or operand.dim() > 4 or operand.numel() != shape[1] or (channels != 1 and channels != shape[1]):
        return None
    return list(operand.reshape(-1).unbind())


def scale(image: Image, operands: Sequence[Any], place: int, slope: Any, *, in_place: bool) -> Image | None:
    """The image after an arithmetic function with this slope; None where it is not affine in each channel."""
    channels = len(image.index)
    numbers = channel_numbers(slope, channels, dropped=image.dropped)
    others = [operand for position, operand in enumerate(operands) if position != place]
    spread = [channel_numbers(operand, channels, dropped=image.dropped) for operand in others]
    if numbers is None or any(part is None for part in spread):
        return None
    count = max(len(part) for part in (numbers, *spread) if part is not None)
    numbers = numbers if len(numbers) == count else numbers * count
    result = image if in_place else image.copy()
    if count != channels:
        if in_place:
            return None
        result = replace(image, pixels=image.pixels.copy(image.index * count), index=list(range(count)))
    pixels = result.pixels
    for i, number in zip(result.index, numbers, strict=True):
        pixels.slopes[i] = _product(pixels.slopes[i], number)
    pixels.changed = True
    return result


def _product(slope: Slope, number: Slope) -> Slope:
    return number if isinstance(slope, float) and slope == 1.0 else slope * number


def pad(image: Image, margins: Sequence[int], mode: str) -> Image | str:
    """The image with margins; what is in the way, in words, where they cannot be followed."""
    before = image.pixels
    added = tuple(margins) if len(margins) == 4 else (*margins, 0, 0)
    if len(added) != 4 or min(added) < 0 or image.dropped:
        return "it crops, or pads other dimensions than height and width"
    if mode != "constant" and (any(before.margins) or added[0] != added[1] or added[2] != added[3]):
        return f"its {mode} padding is uneven, or follows another padding"
    if mode == "constant" and before.mode != "constant":
        return f"it follows {before.mode} padding"
    result = image.copy()
    total = tuple(a + b for a, b in zip(before.margins, added, strict=True))
    result.pixels.margins = (total[0], total[1], total[2], total[3])
    result.pixels.mode, result.pixels.changed = mode, True
    return result


# Channels ------------------------------------------------------------------------------------------------------------

# Functions that choose, repeat, reorder or join channels. What they do to channels is seen by calling them on numbers.
SELECTIONS = {
    "cat", "concat", "concatenate", "stack", "getitem", "select", "narrow", "index_select", "flip", "unbind", "split",
    "split_with_sizes", "chunk", "tensor_split", "unsqueeze", "squeeze", "expand", "expand_as", "repeat", "tile",
}  # fmt: skip

# What came of a selection: whether the channel is dropped, and for each channel the number of the image among the
# arguments and its place in it, or None for a channel that comes from no image.
Selection = tuple[bool, tuple[tuple[int, int] | None, ...]]
Call = Callable[[Callable[[Tensor], Tensor]], Any]
_BATCH = 1 << 20  # images of a batch are told apart, so that none is taken for another


def find_selections(
    call: Call, images: Sequence[tuple[Tensor, Image]], results: Sequence[Tensor], size: torch.Size
) -> list[Selection | None]:
    """What a function has done to channels, for each of its results; None where it did something else to the image.

    Args:
        call: ``call(substitute)`` calls the function with ``substitute(tensor)`` in place of every tensor.
        images: the images among its arguments, with their tensors.
        results: what it has returned.
        size: height and width of the images.
    """
    codes: list[tuple[int, int] | None] = []

    def substitute(tensor: Tensor) -> Tensor:
        number = first_of(i for i, (known, _) in enumerate(images) if known is tensor)
        image = None if number is None else images[number][1]
        if image is None and not tensor.is_floating_point():
            return tensor.cpu()  # an index
        first = len(codes)
        if image is None:
            codes.append(None)
            return torch.full([*tensor.shape[:-2], *[1, 1][-tensor.dim() :]], first, dtype=torch.int64, device="cpu")
        assert number is not None
        codes.extend((number, i) for i in range(len(image.index)))
        code = torch.arange(first, len(codes), device="cpu").view(1, -1, 1, 1)
        code = code + _BATCH * torch.arange(len(tensor), device="cpu").view(-1, 1, 1, 1)
        return code.squeeze(1) if image.dropped else code

    try:
        found = call(substitute)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return [None] * len(results)
    found = [found] if isinstance(found, Tensor) else list(found)
    return [
        _decode(code, codes, result) if result.shape[-2:] == size else None
        for code, result in zip(found, results, strict=True)
    ]


def _decode(found: Tensor, codes: list[tuple[int, int] | None], result: Tensor) -> Selection | None:
    if result.dim() not in (3, 4) or found.dim() != result.dim() or found.shape[:-2] != result.shape[:-2]:
        return None
    if found.shape[-2:] not in ((1, 1), result.shape[-2:]):
        return None
    dropped = found.dim() == 3
    found = found.unsqueeze(1) if dropped else found  # (B, c, H', W')
    row = found[:1, :, :1, :1] % _BATCH
    chosen = [codes[int(code)] for code in row.flatten()]
    batch = _BATCH * torch.arange(len(found), device="cpu").view(-1, 1, 1, 1)
    certain = torch.tensor([code is None for code in chosen], device="cpu").view(1, -1, 1, 1)
    if not torch.equal(found, torch.where(certain, row, row + batch).expand_as(found)):
        return None
    return dropped, tuple(chosen)


def flips_channels(call: Call) -> bool:
    """Whether a flip leaves height and width alone: two rows and columns of different numbers show it."""
    numbers = torch.arange(4, device="cpu").view(1, 1, 2, 2).expand(1, 2, 2, 2)
    flipped = call(lambda tensor: numbers)
    return isinstance(flipped, Tensor) and torch.equal(flipped, numbers)


def select(images: Sequence[Image], selection: Selection, *, view: bool) -> Image | None:
    """The image that a selection makes of others; a `view` lies in the memory of the first of them."""
    dropped, chosen = selection
    first = images[0].pixels
    if any(
        (image.pixels.margins, image.pixels.mode, image.pixels.spoiled) != (first.margins, first.mode, None)
        for image in images
    ):
        return None
    if view:
        index = [images[0].index[code[1]] for code in chosen if code is not None]
        return replace(images[0], index=index, dropped=dropped)
    sources = [CERTAIN if code is None else images[code[0]].sources[code[1]] for code in chosen]
    slopes = [0.0 if code is None else images[code[0]].slopes[code[1]] for code in chosen]
    pixels = Pixels(sources, slopes, first.margins, first.mode, changed=True)
    detached, recomputed = all(image.detached for image in images), any(image.recomputed for image in images)
    return Image(pixels, list(range(len(sources))), dropped, detached, recomputed)


def assign(target: Image, value: Image | None) -> bool:
    """Let the channels of `target` be those of `value` from now on, or certain ones where that is None."""
    pixels = target.pixels
    if value is not None:
        if len(value.index) not in (1, len(target.index)) or value.pixels.spoiled or pixels.mode != value.pixels.mode:
            return False
        if pixels.margins != value.pixels.margins:
            return False
    count = len(target.index)
    sources = [CERTAIN] * count if value is None else value.sources * (count // len(value.index))
    slopes: list[Slope] = [0.0] * count if value is None else value.slopes * (count // len(value.index))
    for i, source, slope in zip(target.index, sources, slopes, strict=True):
        pixels.sources[i], pixels.slopes[i] = source, slope
    pixels.changed = True
    return True


# The MFA -------------------------------------------------------------------------------------------------------------


def random_image(p: MFA, image: Image, values: Tensor, mean: Callable[[], Tensor]) -> MFA:
    """The MFA of a channel-wise affine function of the images `p`.

    Args:
        values: what the network has made of the mean image, (B, c, H', W').
        mean: the mean image (B, C, H, W) that it was made of, where it matters.
    """
    pixels = image.pixels
    p = p.detach() if image.detached else p
    if image.untouched:
        return p
    slope = slope_tensor(image, values)  # (c, 1, 1)
    if pixels.mode != "constant":
        left, right, top, bottom = pixels.margins
        values = values[..., top : values.shape[-2] - bottom, left : values.shape[-1] - right]
    apart = p.means - mean().to(values.device).unsqueeze(1)  # exactly zero where the pixel was observed
    means, factors, noise = (_moved(image, part) for part in (apart, p.factors, p.noise))
    dtype = values.dtype
    return MFA(
        logits=p.logits.to(dtype),
        means=(values.unsqueeze(1) + means * slope).to(dtype),
        factors=(factors * slope).to(dtype),
        noise=(noise * slope * slope).to(dtype),
        observed=_observed(p, image),
        check=False,
    )


def connected_mean(image: Image, values: Tensor, mean: Tensor) -> Tensor:
    """The values that a network has made of a detached mean image, with the gradients that they lack."""
    difference = (mean - mean.detach()).unsqueeze(1)  # zero, but for its gradient
    moved = _moved(image, difference).squeeze(1) * slope_tensor(image, values)
    if image.pixels.mode != "constant":
        moved = torch.nn.functional.pad(moved, image.pixels.margins, image.pixels.mode)
    return values + (moved.select(1, 0) if image.dropped else moved).to(values.dtype)


def slope_tensor(image: Image, like: Tensor) -> Tensor:
    """The slopes of all channels, (c, 1, 1)."""
    dtype, device = torch.promote_types(like.dtype, torch.float32), like.device
    # Not torch.tensor(list), which copies from the host and cannot be captured in a CUDA graph.
    parts = [
        slope.to(device, dtype) if isinstance(slope, Tensor) else torch.full((), slope, dtype=dtype, device=device)
        for slope in image.slopes
    ]
    return torch.stack(parts).view(-1, 1, 1)


def _moved(image: Image, parts: Tensor) -> Tensor:
    """Parameters of the source pixels (…, C, H, W) where the image has them, (…, c, H', W'); zeros in its margins."""
    parts = _chosen(parts, [max(source, 0) for source in image.sources])
    around = image.pixels.margins
    if image.pixels.mode != "constant" or not any(around):
        return parts
    padded: Tensor = torch.unflatten(torch.nn.functional.pad(parts.flatten(1, -3), around), 1, parts.shape[1:-2])
    return padded


def _chosen(parts: Tensor, channels: list[int]) -> Tensor:
    if channels == list(range(parts.shape[-3])):
        return parts
    return torch.cat([parts.narrow(-3, channel, 1) for channel in channels], -3)


def _observed(p: MFA, image: Image) -> Tensor | None:
    """Where the channels are certain, (B, 1 or c, H', W')."""
    pixels, sources = image.pixels, image.sources
    around = pixels.margins if pixels.mode == "constant" else (0, 0, 0, 0)
    observed = p.observed
    if observed is None:
        if CERTAIN not in sources and not any(around):
            return None
        observed = torch.zeros(len(p), 1, *p.shape[-2:], dtype=torch.bool, device=p.device)
    if CERTAIN in sources or observed.shape[1] > 1:
        every = observed.expand(len(p), p.shape[1], *p.shape[-2:])
        all_known = torch.ones_like(every[:, :1])
        observed = torch.cat([all_known if s == CERTAIN else every.narrow(1, s, 1) for s in sources], 1)
    return torch.nn.functional.pad(observed, around, value=True)

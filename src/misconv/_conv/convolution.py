"""One value for a convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from misconv._math import Padding, Pair, margins, output_size, pair

__all__ = ["Convolution"]


# Not frozen: one is made before every layer, and that would take twice as long. Not a named tuple, whose properties
# torch 2.8 cannot compile.
@dataclass(eq=False)
class Convolution:
    """A convolution: its filters, and how they move over an image.

    Args:
        weight: (O, C/groups, kh, kw).
        bias: (O,) or None.
        stride, padding, dilation, groups: as in `torch.nn.functional.conv2d`.
        padding_mode: as in `torch.nn.Conv2d`.

    Example:
        >>> conv = Convolution.of(nn.Conv2d(3, 8, 3, stride=2, padding=1))
        >>> conv.kernel, conv.size((32, 32))
        ((3, 3), (16, 16))
    """

    weight: Tensor
    bias: Tensor | None = None
    stride: Pair = 1
    padding: Padding = 0
    dilation: Pair = 1
    groups: int = 1
    padding_mode: str = "zeros"

    @classmethod
    def of(cls, module: nn.Conv2d) -> Convolution:
        """The convolution that a module computes."""
        geometry: Any = (module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
        # Where a weight is a parameter it is found sooner than by asking the module, which asks everywhere else first.
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        return cls(module.weight if weight is None else weight, module.bias if bias is None else bias, *geometry)

    @property
    def geometry(self) -> tuple[Pair, Padding, Pair, int, str]:
        """All but weight and bias."""
        return self.stride, self.padding, self.dilation, self.groups, self.padding_mode

    def replace(self, weight: Tensor, bias: Tensor | None) -> Convolution:
        """The same geometry with other filters."""
        return Convolution(weight, bias, *self.geometry)

    @property
    def kernel(self) -> tuple[int, int]:
        """Height and width of a window."""
        return self.weight.shape[2], self.weight.shape[3]

    @property
    def margins(self) -> tuple[int, int, int, int]:
        """The padding as `torch.nn.functional.pad` takes it: left, right, top, bottom."""
        return margins(self.kernel, self.padding, self.dilation)

    @property
    def strides(self) -> tuple[int, int]:
        """Down and across."""
        return pair(self.stride)

    @property
    def dilations(self) -> tuple[int, int]:
        """Down and across."""
        return pair(self.dilation)

    def size(self, image: tuple[int, ...]) -> tuple[int, int]:
        """Height and width of the response to images of this height and width."""
        return output_size(image, self.kernel, self.stride, self.padding, self.dilation)

    def __call__(self, images: Tensor) -> Tensor:
        """The plain convolution of certain images, with any leading dimensions: (…, C, H, W) → (…, O, H', W')."""
        flat = images.reshape(-1, *images.shape[-3:])
        padding = self.padding
        if self.padding_mode != "zeros":
            flat, padding = F.pad(flat, self.margins, self.padding_mode), 0
        flat = F.conv2d(flat, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)
        return flat.reshape(*images.shape[:-3], *flat.shape[-3:])

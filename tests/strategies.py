"""Random cases for property tests: small images, all kinds of convolutions, all kinds of holes."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from torch import Tensor, nn

from misconv import MFA
from tests.reference import random_mfa


@dataclass
class Case:
    p: MFA
    conv: nn.Conv2d

    def arguments(self) -> dict[str, object]:
        """The convolution's arguments, for the functions of `misconv.functional`."""
        names = ("weight", "bias", "stride", "padding", "dilation", "groups", "padding_mode")
        return {name: getattr(self.conv, name) for name in names}


@st.composite
def observations(draw: st.DrawFn, batch: int, channels: int, height: int, width: int) -> Tensor | None:
    """Nothing observed, everything, a shared region, or a region per channel."""
    kind = draw(st.sampled_from(["none", "all", "shared", "per channel", "density"]))
    if kind == "density":
        return None  # no pixel is exact
    if kind in ("none", "all"):
        return torch.full((batch, 1, height, width), kind == "all")
    generator = torch.Generator(torch.get_default_device()).manual_seed(draw(st.integers(0, 2**16)))
    planes = 1 if kind == "shared" else channels
    return torch.rand(batch, planes, height, width, generator=generator) < 0.6


@st.composite
def mfas(draw: st.DrawFn, max_side: int = 6) -> MFA:
    batch, components, rank = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
    image = (draw(st.integers(1, 4)), draw(st.integers(1, max_side)), draw(st.integers(1, max_side)))
    observed = draw(observations(batch, *image))
    return random_mfa(batch, components, rank, image, observed, seed=draw(st.integers(0, 2**16)))


@st.composite
def cases(draw: st.DrawFn, modes: tuple[str, ...] = ("zeros",)) -> Case:
    groups = draw(st.sampled_from([1, 1, 2]))
    channels = groups * draw(st.integers(1, 4 // groups))
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    dilation = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    mode = draw(st.sampled_from(modes))
    padding: int | str | tuple[int, int]
    padding = draw(st.sampled_from([0, 1, (0, 1), (2, 1), "same", "valid"]))
    stride = 1 if padding == "same" else draw(st.sampled_from([1, 2, (2, 1)]))
    # Large enough for the kernel, and for reflection, which needs more pixels than it adds.
    height = draw(st.integers(dilation[0] * (kernel[0] - 1) + 1, 7)) + 2 * (mode != "zeros")
    width = draw(st.integers(dilation[1] * (kernel[1] - 1) + 1, 7)) + 2 * (mode != "zeros")
    batch, components, rank = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
    image = (channels, height, width)
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    conv = nn.Conv2d(
        channels,
        groups * draw(st.integers(1, 2)),
        kernel,
        stride,
        padding,
        dilation,
        groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    observed = draw(observations(batch, *image))
    return Case(random_mfa(batch, components, rank, image, observed, seed=seed), conv)

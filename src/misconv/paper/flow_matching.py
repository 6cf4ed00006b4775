r"""Flow matching (Lipman et al. 2023) given the seen pixels of an image, learned from incomplete images alone.

Every pixel has a time τ of its own: 1 for pixels C that are shown, t for pixels N that are noised, 0 for all others.
With noise ε, which is standard normal, the network is given τ and

.. math:: u_i = (1 - \tau_i) \, \varepsilon_i + \tau_i x_i.

At time 0 there is nothing but noise. It tells nothing, and 0 stands for it. So a pixel that is missing in the data has
time 0, and its value is never needed.

Training: of the seen pixels of an image more are hidden. C and N are disjoint parts of the seen pixels, drawn without a
look at x, and the loss is the squared error of a prediction f of x at all seen pixels that are not shown. Which pixels
are missing must not depend on x either. Then the best prediction, also for a pixel that is missing, is

.. math:: f_i(u, \tau) = E[x_i \mid x_C, \; (1 - t) \, \varepsilon_N + t \, x_N],

the same as if the images were complete. Two things follow:

- At noised pixels v = (f − u) / (1 − t) is the velocity that carries noise at t = 0 to x given x_C at t = 1.
- With t = 0 no pixel tells anything but those that are shown, and f is the conditional mean: the best guess.

Every third time nothing is shown, so that to draw an image of which nothing is seen is one of the tasks that were
trained. One thing is not: an incomplete image never shows all its pixels, so in training some are always at time 0, and
in sampling none. There the network extrapolates from parts of images to whole ones: it weighs the evidence of pixels as
if there were fewer of them, and samples differ from each other more than images do. In some way every method must
extrapolate: what depends on pixels that are never seen together cannot be learned from the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from misconv._checks import check_size, generator_device
from misconv.paper.given import check_given, check_range, check_shape

__all__ = ["FlowMatching"]

GROUPS = 8  # of a group normalization, at most
FREQUENCIES = 16  # of the sines that tell the network its time
ROUNDING = 1e-6  # a value may lie this far outside of 0 … 1


class FlowMatching(nn.Module):
    """Draws the hidden pixels of an image given the seen ones, by a flow from noise to images.

    Args:
        shape: (C, H, W) of the images.
        scales: of the U-Net; each has half the resolution of the one before.
        width: channels of the first scale; every further one doubles them.
        steps: of the integration from noise to image, by Heun's method: two evaluations each, but for the last.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> flow = FlowMatching(shape=(1, 8, 8), scales=2, width=8)
        >>> x, observed = torch.rand(4, 1, 8, 8), torch.rand(4, 1, 8, 8) > 0.5
        >>> flow.sample(x, observed, 5).shape
        torch.Size([5, 4, 1, 8, 8])
        >>> bool((flow.impute(x, observed) == x)[observed].all())
        True
    """

    def __init__(self, shape: Sequence[int] = (1, 28, 28), scales: int = 3, width: int = 48, steps: int = 20) -> None:
        super().__init__()
        self.shape = check_shape(shape)
        self.scales, self.width = check_size("scales", scales), check_size("width", width)
        self.steps = check_size("steps", steps)
        self.network = _UNet(self.shape[0], self.scales, self.width)

    def config(self) -> dict[str, Any]:
        """The arguments that make such a model."""
        return {"shape": list(self.shape), "scales": self.scales, "width": self.width, "steps": self.steps}

    def forward(self, u: Tensor, times: Tensor) -> Tensor:
        """(f − u) / (1 − τ), (B, C, H, W): at noised pixels the velocity, at pixels of time 0 the prediction itself.

        Args:
            u: partly noised images (B, C, H, W) from −1 to 1, where they are not noised; 0 at pixels of time 0.
            times: of every pixel, (B, C, H, W); all that are neither 0 nor 1 in an image are the same.
        """
        out: Tensor = self.network(u, times)
        return out

    @torch.no_grad()
    def sample(self, x: Tensor, observed: Tensor, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Images (n, B, C, H, W) whose hidden pixels are drawn given the seen ones, which stay bit for bit.

        Values are clamped to 0 … 1. Hidden values of `x` are not read; where nothing is observed, whole images are
        drawn.
        """
        n = check_size("n", n)
        shown, seen = self._given(x, observed)
        where = generator_device(generator, x.device)
        noise = torch.randn((n, *x.shape), generator=generator, device=where, dtype=shown.dtype).to(x.device)
        # One after the other: the memory of the network does not grow with n.
        return torch.stack([self._completed(self._integrate(each, shown, seen), x, seen) for each in noise])

    @torch.no_grad()
    def impute(self, x: Tensor, observed: Tensor) -> Tensor:
        """The mean (B, C, H, W) of what hidden pixels may be, clamped to 0 … 1; seen pixels stay bit for bit.

        Hidden values of `x` are not read.
        """
        shown, seen = self._given(x, observed)
        return self._completed(self(shown, seen.to(shown.dtype)), x, seen)

    def _integrate(self, state: Tensor, shown: Tensor, seen: Tensor) -> Tensor:
        """From noise to images by Heun's method; the last step is Euler's, for at time 1 there is no velocity.

        Steps get shorter towards the image, for what the last one leaves of the noise is replaced by a mean.
        """
        for now, after in pairwise(1 - (1 - n / self.steps) ** 2 for n in range(self.steps + 1)):
            velocity = self._velocity(state, shown, seen, now)
            ahead = state + (after - now) * velocity
            if after < 1:
                velocity = (velocity + self._velocity(ahead, shown, seen, after)) / 2
                ahead = state + (after - now) * velocity
            state = ahead
        return state

    def _velocity(self, state: Tensor, shown: Tensor, seen: Tensor, time: float) -> Tensor:
        # Where numbers have few digits, a time near 1 must not become 1, which is that of pixels that are shown.
        before = 1 - torch.finfo(state.dtype).eps
        times = torch.full_like(state, min(time, before)).masked_fill(seen, 1)
        if time == 0:
            prediction: Tensor = self(shown, times)  # noise tells nothing, and 0 stands for it
            return prediction - state
        velocity: Tensor = self(torch.where(seen, shown, state), times)
        return velocity

    def _given(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Images from −1 to 1, hidden pixels 0, in the type of the parameters; and what is seen, (B, C, H, W)."""
        parameter = next(self.parameters())
        seen = check_given(x, observed, self.shape, parameter.device)
        check_range(x, seen, ROUNDING)
        seen = seen.expand_as(x)
        return (2 * x.to(parameter.dtype) - 1).masked_fill(~seen, 0), seen

    def _completed(self, values: Tensor, x: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen, x, ((values + 1) / 2).clamp(0, 1).to(x.dtype))


# The network ---------------------------------------------------------------------------------------------------------


class _UNet(nn.Module):
    """A residual U-Net of images, the times of their pixels, and the time of the noised ones; 0 at first."""

    def __init__(self, channels: int, scales: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**n for n in range(scales)]
        inner = 4 * width
        self.time = nn.Sequential(nn.Linear(2 * FREQUENCIES, inner), nn.SiLU(), nn.Linear(inner, inner), nn.SiLU())
        self.first = nn.Conv2d(2 * channels, width, 3, padding=1)
        self.down = nn.ModuleList(_Block(each, each, inner) for each in widths)
        self.smaller = nn.ModuleList(nn.Conv2d(a, b, 3, 2, padding=1) for a, b in pairwise(widths))
        self.middle = _Block(widths[-1], widths[-1], inner)
        self.larger = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_Block(2 * each, each, inner) for each in widths)
        self.norm = _norm(width)
        self.last = _zero(nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, u: Tensor, times: Tensor) -> Tensor:
        """(B, C, H, W)."""
        time = self.time(_waves(times.masked_fill(times == 1, 0).amax((1, 2, 3))))
        x, skips = self.first(torch.cat([u, times], 1)), []
        for n, block in enumerate(self.down):
            x = self.smaller[n - 1](x) if n else x
            x = block(x, time)
            skips.append(x)
        x = self.middle(x, time)
        for n in reversed(range(len(skips))):
            x = self.up[n](torch.cat([x, skips[n]], 1), time)
            x = self.larger[n - 1](F.interpolate(x, size=skips[n - 1].shape[-2:])) if n else x
        out: Tensor = self.last(F.silu(self.norm(x)))
        return out


class _Block(nn.Module):
    """Two convolutions around which the image goes on; the time scales and shifts what is between them."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([_norm(inside), _norm(outside)])
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.second = _zero(nn.Conv2d(outside, outside, 3, padding=1))
        self.time = nn.Linear(time, 2 * outside)
        self.around = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(B, outside, H, W)."""
        scale, shift = self.time(time)[:, :, None, None].chunk(2, 1)
        y = self.norms[1](self.first(F.silu(self.norms[0](x))))
        out: Tensor = self.around(x) + self.second(F.silu(y * (1 + scale) + shift))
        return out


def _norm(width: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(GROUPS, width), width)


def _zero(layer: nn.Conv2d) -> nn.Conv2d:
    """With weights 0, so that a new network says nothing."""
    nn.init.zeros_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def _waves(time: Tensor) -> Tensor:
    """Sines and cosines (B, 2 · FREQUENCIES) of times (B,), from one in the unit interval to a thousand."""
    steps = torch.arange(FREQUENCIES, device=time.device, dtype=time.dtype) / (FREQUENCIES - 1)
    angles = time[:, None] * 1000**steps
    return torch.cat([angles.sin(), angles.cos()], 1)

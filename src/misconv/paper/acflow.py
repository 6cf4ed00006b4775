"""ACFlow (Li et al. 2020): a normalizing flow of the hidden pixels of an image, given the seen ones.

A RealNVP in logit space. Seen pixels stand on the conditioning side of every coupling and are never transformed, so one
flow serves every missing region. Unlike the densities of `misconv.density` it learns from complete images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from misconv._checks import check_size, describe, generator_device
from misconv.paper.given import check_given, check_range, check_shape

__all__ = ["ACFlow"]

HALF_LEVEL = 1 / 512  # with it a byte k, which stands for k - ½ … k + ½, has 1/256 of the unit interval
REACH = 3.0  # where 0 and 1 lie in logit space, whatever the margin: about what a standard normal variable takes
STEEPEST = 2.0  # the largest log-scale of one coupling
FARTHEST = 10.0  # the largest shift of one coupling; logits beyond it look alike to a network
NEAREST = 1e-6  # to 0 and 1, before the logit
ROUNDING = 1e-6  # a dequantised value may lie so far outside
CHECKERBOARDS, CHANNELS, LAST = 3, 3, 4  # couplings of a scale, before and after its squeeze; and of the last scale
# The four pixels of a 2×2 block, those beside its diagonal first: these leave a scale, changed by two checkerboards.
ORDER = (1, 2, 0, 3)
MOST_SCALES = 10


class ACFlow(nn.Module):
    r"""The density of the hidden pixels of an image given the seen ones, as a normalizing flow.

    With u the hidden pixels, o the seen ones, y = logit(margin + (1 − 2 margin) x) up to a constant factor, and z made
    of y by couplings, each of which changes some of the hidden pixels by what it reads of all others:

    .. math:: \log p(x_u \mid x_o) = \sum_u \log N(z_u; 0, 1) + \log |\det \partial z_u / \partial x_u|.

    A coupling is z = (y + t) · exp(s) at the pixels that it changes, with bounded t and s; its network reads the seen
    pixels of the whole image and which they are, too. Each scale has three checkerboards; then, with every 2×2 block as
    four channels, three couplings of one half of the channels given the other. Half of the channels goes on to the next
    scale. The density lives where the logit is defined: by default half a grey level beyond 0 and 1. What is
    transformed has float64, whatever the networks have, so that the inverse is exact also where couplings are steep.

    Args:
        shape: (C, H, W) of the images. Rows and columns are padded, as seen ones, where 2×2 blocks do not fit.
        scales: how many; each halves the resolution once more.
        width: channels of the first scale's networks; every scale doubles them.
        blocks: residual blocks of every network.
        margin: how far 0 and 1 are kept from the ends of the logit, in units of the interval; below ½. The default
            is half a grey level. The authors' code has 0.05.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> flow = ACFlow(shape=(1, 8, 8), scales=2, width=8, blocks=1)
        >>> x, observed = torch.rand(4, 1, 8, 8), torch.rand(4, 1, 8, 8) > 0.5
        >>> flow.log_prob(x, observed).shape, flow.sample(x, observed, 5).shape
        (torch.Size([4]), torch.Size([5, 4, 1, 8, 8]))
        >>> bool((flow.impute(x, observed) == x)[observed].all())
        True
    """

    def __init__(
        self,
        shape: Sequence[int] = (1, 28, 28),
        scales: int = 3,
        width: int = 32,
        blocks: int = 2,
        margin: float = HALF_LEVEL,
    ) -> None:
        super().__init__()
        self.shape = check_shape(shape)
        self.scales, self.width = check_size("scales", scales), check_size("width", width)
        self.blocks, self.margin = check_size("blocks", blocks), _check_margin(margin)
        if self.scales > MOST_SCALES:
            raise ValueError(f"scales must be at most {MOST_SCALES}, got {describe(scales)}")
        sizes = self.shape[0], self.scales, self.width, self.blocks
        self.levels = nn.ModuleList(_Level(number, *sizes) for number in range(self.scales))

    def config(self) -> dict[str, Any]:
        """The arguments that make such a flow."""
        sizes = {"scales": self.scales, "width": self.width, "blocks": self.blocks, "margin": self.margin}
        return {"shape": list(self.shape), **sizes}

    def forward(self, x: Tensor, observed: Tensor) -> Tensor:
        """The same as `log_prob`."""
        x, observed = self._check(x, observed)
        z, log_det = self.encode(x, observed)
        normal = -0.5 * (z.square() + math.log(2 * math.pi))
        density = normal.masked_fill(observed, 0).sum((1, 2, 3)) + log_det
        # In float32, or in the type of the images or of the parameters where it holds more.
        wide = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        return density.to(torch.promote_types(x.dtype, wide))

    def log_prob(self, x: Tensor, observed: Tensor) -> Tensor:
        """Log density (B,) of the hidden pixels given the seen ones, in nats, for pixels in units of 0 to 1.

        Args:
            x: complete images (B, C, H, W) with values from 0 to 1.
            observed: bool (B, 1, H, W) or (B, C, H, W), True where the pixel was seen. An image of which nothing is
                hidden has log density 0.
        """
        out: Tensor = self(x, observed)
        return out

    def encode(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """What the flow makes of complete images, (B, C, H, W), and the log-determinant (B,) of its Jacobian.

        Hidden pixels become what is standard normal if the flow is right; seen ones their logits. Both have float64.
        """
        x, observed = self._check(x, observed)
        self._check_range(x, observed, complete=True)
        y, slope = self._to_logits(_double(x))
        hidden = ~observed.expand_as(x)
        link = slope.masked_fill(~hidden, 0).sum((1, 2, 3))
        y, known, contexts = self._prepare(y, hidden)
        z, log_det = self._encode(0, y, known, contexts)
        return self._cropped(z), link + log_det

    def decode(self, z: Tensor, x: Tensor, observed: Tensor) -> Tensor:
        """The images (B, C, H, W) of which `encode` makes `z`; seen pixels are those of `x`, bit for bit.

        `z` is read at hidden pixels alone, and `x` at seen ones.
        """
        x, observed = self._check(x, observed)
        if not isinstance(z, Tensor) or z.shape != x.shape:
            raise ValueError(f"z must have the shape of x, {tuple(x.shape)}, got {describe(z)}")
        self._check_range(x, observed, complete=False)
        seen = observed.expand_as(x)
        y, _ = self._to_logits(_double(x).masked_fill(~seen, 0.5))
        y, known, contexts = self._prepare(y.where(seen, _double(z)), ~seen)
        y = self._cropped(self._decode(0, y, known, contexts))
        return torch.where(seen, x, self._from_logits(y).to(x.dtype))

    @torch.no_grad()
    def sample(self, x: Tensor, observed: Tensor, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Images (n, B, C, H, W) whose hidden pixels are drawn given the seen ones, which stay bit for bit.

        Values are clamped to 0 … 1. Hidden values of `x` are not read.
        """
        n = check_size("n", n)
        x, observed = self._check(x, observed)
        where = generator_device(generator, x.device)
        z = torch.randn((n, *x.shape), generator=generator, device=where, dtype=torch.float32).to(x.device)
        # One after the other: the memory of the networks does not grow with n.
        return torch.stack([self._completed(each, x, observed) for each in z])

    @torch.no_grad()
    def impute(self, x: Tensor, observed: Tensor) -> Tensor:
        """The best guess (B, C, H, W): what z = 0 stands for, clamped to 0 … 1; seen pixels stay bit for bit.

        Hidden values of `x` are not read.
        """
        x, observed = self._check(x, observed)
        return self._completed(torch.zeros_like(x), x, observed)

    def _completed(self, z: Tensor, x: Tensor, observed: Tensor) -> Tensor:
        return torch.where(observed, x, self.decode(z, x, observed).clamp(0, 1))

    # Logits ----------------------------------------------------------------------------------------------------------

    @property
    def _factor(self) -> float:
        return REACH / math.log((1 - self.margin) / self.margin)

    def _to_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels in logit space, and the log of the slope there."""
        inner = 1 - 2 * self.margin
        share = (self.margin + inner * x).clamp(NEAREST, 1 - NEAREST)
        slope = math.log(self._factor * inner) - share.log() - (-share).log1p()
        return self._factor * share.logit(), slope

    def _from_logits(self, y: Tensor) -> Tensor:
        return ((y / self._factor).sigmoid() - self.margin) / (1 - 2 * self.margin)

    # Scales ----------------------------------------------------------------------------------------------------------

    def _prepare(self, y: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Images and what is seen of them, padded; and what is seen at every scale, with its mask."""
        block = 2 ** (self.scales - 1)
        more = (0, -self.shape[2] % block, 0, -self.shape[1] % block)
        y, hidden = F.pad(y, more), F.pad(hidden, more)
        context = torch.cat([y.masked_fill(hidden, 0), ~hidden], 1).to(next(self.parameters()).dtype)
        contexts = [context]
        for _ in range(1, self.scales):
            contexts.append(_squeeze(contexts[-1]))
        return y, ~hidden, contexts

    def _cropped(self, y: Tensor) -> Tensor:
        return y[..., : self.shape[1], : self.shape[2]]

    def _encode(self, number: int, y: Tensor, known: Tensor, contexts: list[Tensor]) -> tuple[Tensor, Tensor]:
        level = self.levels[number]
        assert isinstance(level, _Level)
        log_det = y.new_zeros(len(y))
        for coupling, passive in level.first(known):
            y, change = coupling(y, known, passive, contexts[number])
            log_det = log_det + change
        if number == self.scales - 1:
            return y, log_det
        y, known = _squeeze(y), _squeeze(known)
        for coupling, passive in level.second(known):
            y, change = coupling(y, known, passive, contexts[number + 1])
            log_det = log_det + change
        done, rest = y.chunk(2, 1)
        rest, change = self._encode(number + 1, rest, known.chunk(2, 1)[1], contexts)
        return _unsqueeze(torch.cat([done, rest], 1)), log_det + change

    def _decode(self, number: int, y: Tensor, known: Tensor, contexts: list[Tensor]) -> Tensor:
        level = self.levels[number]
        assert isinstance(level, _Level)
        if number < self.scales - 1:
            y, small = _squeeze(y), _squeeze(known)
            done, rest = y.chunk(2, 1)
            rest = self._decode(number + 1, rest, small.chunk(2, 1)[1], contexts)
            y = torch.cat([done, rest], 1)
            for coupling, passive in reversed(level.second(small)):
                y = coupling.invert(y, small, passive, contexts[number + 1])
            y = _unsqueeze(y)
        for coupling, passive in reversed(level.first(known)):
            y = coupling.invert(y, known, passive, contexts[number])
        return y

    # Checks ----------------------------------------------------------------------------------------------------------

    def _check(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        return x, check_given(x, observed, self.shape, next(self.parameters()).device)

    def _check_range(self, x: Tensor, observed: Tensor, *, complete: bool) -> None:
        """All values that are read lie between 0 and 1, or as far beyond as the density reaches."""
        read = torch.ones_like(observed) if complete else observed
        check_range(x, read, self.margin / (1 - 2 * self.margin) + ROUNDING)


class _Level(nn.Module):
    """The couplings of one scale."""

    def __init__(self, number: int, image: int, scales: int, width: int, blocks: int) -> None:
        super().__init__()
        channels, context, width = image * 2**number, 2 * image * 4**number, width * 2**number
        is_last = number == scales - 1
        count = LAST if is_last else CHECKERBOARDS
        self.checkerboards = nn.ModuleList(_Coupling(channels, context, width, blocks) for _ in range(count))
        self.channels = nn.ModuleList(
            _Coupling(4 * channels, 4 * context, 2 * width, blocks) for _ in range(0 if is_last else CHANNELS)
        )

    def first(self, known: Tensor) -> list[tuple[Any, Tensor]]:
        """Couplings before the squeeze, each with what it does not change: black or white places, in turns."""
        rows, columns = (torch.arange(size, device=known.device) for size in known.shape[-2:])
        black = (rows[:, None] + columns) % 2 == 0
        return [(coupling, black if n % 2 == 0 else ~black) for n, coupling in enumerate(self.checkerboards)]

    def second(self, known: Tensor) -> list[tuple[Any, Tensor]]:
        """Couplings after the squeeze, which change the second or the first half of the channels, in turns."""
        first = (torch.arange(known.shape[1], device=known.device) < known.shape[1] // 2)[:, None, None]
        return [(coupling, first if n % 2 == 0 else ~first) for n, coupling in enumerate(self.channels)]


class _Coupling(nn.Module):
    """An affine coupling: z = (y + t) · exp(s) at hidden places outside of a pattern, with t and s of all others."""

    def __init__(self, channels: int, context: int, width: int, blocks: int) -> None:
        super().__init__()
        self.network = _Network(2 * channels + context, width, 2 * channels, blocks)

    def forward(self, y: Tensor, known: Tensor, pattern: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """What it makes of y, and the log-determinant (B,)."""
        shift, log_scale = self._affine(y, known, pattern, context)
        return (y + shift) * log_scale.exp(), log_scale.sum((1, 2, 3))

    def invert(self, z: Tensor, known: Tensor, pattern: Tensor, context: Tensor) -> Tensor:
        """The y of which it makes z."""
        shift, log_scale = self._affine(z, known, pattern, context)
        return z * (-log_scale).exp() - shift

    def _affine(self, y: Tensor, known: Tensor, pattern: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        active = ~(pattern | known)
        given = torch.cat([_bounded(y.masked_fill(active, 0), FARTHEST).to(context.dtype), active, context], 1)
        # The network has fewer digits than what it changes.
        changes = self.network(given).to(y.dtype).masked_fill(torch.cat([~active, ~active], 1), 0)
        shift, log_scale = changes.chunk(2, 1)
        return _bounded(shift, FARTHEST), _bounded(log_scale, STEEPEST)


def _bounded(values: Tensor, most: float) -> Tensor:
    """About the same near 0, and never beyond ± `most`."""
    return most * (values / most).tanh()


def _double(x: Tensor) -> Tensor:
    """In float64 wherever there is one."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


class _Network(nn.Module):
    """A residual network whose blocks all speak to its output, which is 0 at first: a new flow changes nothing."""

    def __init__(self, inside: int, width: int, outside: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, width, 3, padding=1)
        self.blocks = nn.ModuleList(_block(width) for _ in range(blocks))
        self.skips = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(blocks))
        self.last = nn.Conv2d(width, outside, 1)
        nn.init.zeros_(self.last.weight)
        assert self.last.bias is not None
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, outside, H, W)."""
        x = self.first(x)
        skipped = torch.zeros_like(x)
        for block, skip in zip(self.blocks, self.skips, strict=True):
            x = x + block(x)
            skipped = skipped + skip(x)
        out: Tensor = self.last(skipped.relu())
        return out


def _block(width: int) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(), nn.Conv2d(width, width, 1),
    )  # fmt: skip


def _squeeze(y: Tensor) -> Tensor:
    """2×2 blocks as channels: (B, C, H, W) to (B, 4C, H/2, W/2), in which `ORDER` is that of the pixels of a block."""
    batch, channels, height, width = y.shape
    parts = y.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 3, 5, 1, 2, 4)
    parts = parts.reshape(batch, 4, channels, height // 2, width // 2)
    return torch.stack([parts[:, n] for n in ORDER], 1).flatten(1, 2)  # (B, 4C, H/2, W/2)


def _unsqueeze(y: Tensor) -> Tensor:
    """The inverse of `_squeeze`."""
    batch, channels, height, width = y.shape
    parts = y.reshape(batch, 4, channels // 4, height, width)
    ordered = torch.stack([parts[:, ORDER.index(n)] for n in range(4)], 1)
    grid = ordered.reshape(batch, 2, 2, channels // 4, height, width).permute(0, 3, 4, 1, 5, 2)
    return grid.reshape(batch, channels // 4, 2 * height, 2 * width)


def _check_margin(margin: float) -> float:
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not NEAREST <= margin < 0.5:
        raise ValueError(f"margin must be a number from {NEAREST} to below 0.5, got {describe(margin)}")
    return float(margin)

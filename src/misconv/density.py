"""Where the MFA of an image comes from: densities, modules `(x, observed) -> MFA` with observed pixels exact.

`LinearDMFA` and `ConvDMFA` are networks that predict the parameters for every image anew (density networks, trained
by `misconv.fit_density`); `SMFA` is one mixture for all images, fitted by EM and conditioned on what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._checks import check_images, check_observed, check_seed, check_size, describe
from misconv._density import (
    MOST_WEIGHTS,
    Batches,
    DensityNetwork,
    Parameters,
    Statistics,
    Units,
    add_blocks,
    add_over_processes,
    check_devices,
    check_floor,
    check_rank,
    check_representable,
    check_shape,
    check_sizes,
    collect,
    head,
    initialize_components,
    maximize,
    measure,
    pairs,
    result_type,
    some,
    start,
)
from misconv.mfa import MFA

__all__ = ["SMFA", "ConvDMFA", "LinearDMFA"]


class LinearDMFA(DensityNetwork):
    """The paper's density network for small images: convolutions, then one linear layer per parameter.

    Convolutions of 5×5 with 16, 32 and 64 channels and of 3×3 with 32, each with ReLU; the linear layers see all of
    their output, so the number of weights grows with the square of the number of pixels.

    Args:
        shape: (C, H, W) of the images, which is fixed.
        components: K. rank: L.
        noise_floor: the least noise variance, as a share of the images' variance.

    Example:
        >>> density = LinearDMFA(shape=(1, 8, 8), rank=4)
        >>> density(torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8) > 0.25)
        MFA(2 images of 1×8×8, 1 component of rank 4)
    """

    def __init__(
        self, shape: tuple[int, int, int], components: int = 1, rank: int = 4, noise_floor: float = 1e-3
    ) -> None:
        channels, height, width = self.shape = check_shape(shape)
        super().__init__(channels, components, rank, noise_floor)
        weights = 32 * height * width * components * (rank + 2) * channels * height * width
        if weights > MOST_WEIGHTS:
            raise ValueError(
                f"shape must be that of small images, got {self.shape}, for which the linear layers would have "
                "too many weights; use ConvDMFA"
            )
        self.features = nn.Sequential(
            nn.Conv2d(2 * channels, 16, 5, padding=2), nn.ReLU(),
            nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
            nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        width_in, pixels = 32 * height * width, channels * height * width
        self.logits = nn.Linear(width_in, components) if components > 1 else None  # one needs no weight
        self.means = nn.Linear(width_in, components * pixels)
        self.factors = nn.Linear(width_in, components * rank * pixels) if rank else None
        self.noise = nn.Linear(width_in, components * pixels)
        initialize_components(self.means, self.noise)

    def config(self) -> dict[str, Any]:
        """The arguments that make another one like this."""
        return {"shape": list(self.shape), **self._settings()}

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        """The MFA of every image given its observed pixels."""
        check_images("x", x)
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(f"x must hold images of {self.shape}, as this density was made for, got {describe(x)}")
        inside, x, observed = self._input(x, observed)
        features = self.features(inside)

        def image(flat: Tensor) -> Tensor:
            return flat.view(len(flat), -1, *self.shape[1:])  # (B, K·C or K·L·C, H, W)

        factors = x.new_zeros(len(x), 0, *x.shape[2:]) if self.factors is None else image(self.factors(features))
        return self._output(
            x, observed, self._weigh(features), image(self.means(features)), factors, image(self.noise(features))
        )


class ConvDMFA(DensityNetwork):
    """The paper's fully convolutional density network, for images of any size.

    Blocks of convolution, ReLU and BatchNorm, by default [32]×2 down [64]×2 down [128]×4 up [64]×2 up [32]×2, and a
    head of two convolutions for each parameter.

    Args:
        channels: C. components: K. rank: L.
        widths: channels at full, half and quarter size (more for deeper networks).
        depths: how many blocks on the way down, at the bottom, and on the way up again.
        noise_floor: the least noise variance, as a share of the images' variance.
        skips: whether what was on the way down is given again on the way up (as in a U-Net); the paper has none.

    Example:
        >>> density = ConvDMFA(channels=3, components=2, rank=4)
        >>> density(torch.rand(2, 3, 30, 21), torch.rand(2, 1, 30, 21) > 0.25)
        MFA(2 images of 3×30×21, 2 components of rank 4)
    """

    def __init__(
        self,
        channels: int,
        components: int = 1,
        rank: int = 4,
        widths: tuple[int, ...] = (32, 64, 128),
        depths: tuple[int, ...] = (2, 2, 4, 2, 2),
        noise_floor: float = 1e-3,
        skips: bool = False,
    ) -> None:
        super().__init__(channels, components, rank, noise_floor)
        if not isinstance(skips, bool):
            raise TypeError(f"skips must be True or False, got {describe(skips)}")
        check_sizes("widths", widths)
        check_sizes("depths", depths)
        if len(depths) != 2 * len(widths) - 1:
            raise ValueError(
                "depths must be positive, one for each of the widths on the way down, and again on the way up: "
                f"{2 * len(widths) - 1} for {len(widths)} widths, got {describe(depths)}"
            )
        self.widths, self.depths, self.skips = tuple(map(int, widths)), tuple(map(int, depths)), skips
        widths, depths = self.widths, self.depths
        layers: list[nn.Module] = []
        inside = 2 * channels
        for level, width in enumerate(widths):
            if level:
                layers.append(nn.Conv2d(inside, inside, 3, stride=2, padding=1))
            inside = add_blocks(layers, inside, width, depths[level])
        for step, width in enumerate(reversed(widths[:-1])):
            layers.append(nn.ConvTranspose2d(inside, inside, 3, stride=2, padding=1, output_padding=1))
            inside = add_blocks(layers, inside + skips * width, width, depths[len(widths) + step])
        self.features = nn.Sequential(*layers)
        self.means = head(inside, components * channels)
        self.factors = head(inside, components * rank * channels) if rank else None
        self.noise = head(inside, components * channels)
        self.logits = nn.Linear(inside, components) if components > 1 else None  # one needs no weight
        initialize_components(self.means[-1], self.noise[-1])

    def config(self) -> dict[str, Any]:
        """The arguments that make another one like this."""
        layers = {"widths": list(self.widths), "depths": list(self.depths)}
        return {"channels": self.channels, **layers, **self._settings(), "skips": self.skips}

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        """The MFA of every image given its observed pixels."""
        inside, x, observed = self._input(x, observed)
        height, width = x.shape[2:]
        # Halved and doubled again, a side keeps its length if it is a multiple of this; what is added is missing.
        multiple = 2 ** (len(self.widths) - 1)
        if self.training and len(x) * -(-height // multiple) * -(-width // multiple) == 1:
            raise ValueError(
                "x must hold several images of this size in training mode, where BatchNorm measures their features; "
                f"got {describe(x)} (density.eval() takes a single one)"
            )
        features = self._through(F.pad(inside, (0, -width % multiple, 0, -height % multiple)))
        features = features[..., :height, :width]
        factors = x.new_zeros(len(x), 0, height, width) if self.factors is None else self.factors(features)
        logits = self._weigh(features.mean((2, 3)))
        return self._output(x, observed, logits, self.means(features), factors, self.noise(features))

    def _through(self, features: Tensor) -> Tensor:
        if not self.skips:
            out: Tensor = self.features(features)
            return out
        passed: list[Tensor] = []
        for layer in self.features:
            if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2):
                passed.append(features)
            features = layer(features)
            if isinstance(layer, nn.ConvTranspose2d):
                features = torch.cat([features, passed.pop()], 1)
        return features


class SMFA(nn.Module):
    """One mixture of factor analyzers for all images, fitted by EM on what is seen of them.

    `forward` conditions it on the observed pixels of each image.

    Args:
        components: K.
        rank: L; with one component and rank 0 every pixel is a Gaussian of its own.
        shape: (C, H, W), where the parameters are to exist before `fit` (for loading them).

    Example:
        >>> images, observed = torch.rand(50, 1, 4, 4), torch.rand(50, 1, 4, 4) > 0.25
        >>> density = SMFA(components=2, rank=1).fit(images, observed, iterations=5)
        >>> density(images[:3], observed[:3])
        MFA(3 images of 1×4×4, 2 components of rank 1)
    """

    logits: Tensor
    means: Tensor
    factors: Tensor
    noise: Tensor

    def __init__(self, components: int = 10, rank: int = 6, shape: tuple[int, int, int] | None = None) -> None:
        super().__init__()
        check_size("components", components)
        check_rank(rank)
        self.components, self.rank = int(components), int(rank)
        self.history: list[float] = []
        self.floor = 0.0
        # What EM works on: float64, in units of the data; None before `begin`.
        self._exact: Parameters | None = None
        self._units: Units | None = None
        for name in ("logits", "means", "factors", "noise"):
            self.register_buffer(name, None)
        if shape is not None:
            self._allocate(check_shape(shape), torch.get_default_dtype(), torch.get_default_device())

    def config(self) -> dict[str, Any]:
        """The arguments that make another one like this."""
        shape = None if self.means is None else list(self.means.shape[1:])
        return {"components": self.components, "rank": self.rank, "shape": shape}

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        """The MFA of every image given its observed pixels."""
        if self.means is None:
            raise RuntimeError("this SMFA has no parameters yet; call fit(x, observed) first")
        check_images("x", x)
        shape = tuple(self.means.shape[1:])
        if x.shape[1:] != shape:
            raise ValueError(f"x must hold images of {shape}, as this SMFA was fitted to, got {describe(x)}")
        check_devices(x, observed, self.means.device)
        observed = check_observed("observed", observed, x)
        kind = result_type(x.dtype, self.means.dtype)
        prior = (self.logits, self.means, self.factors, self.noise)
        logits, means, factors, noise = (t.to(kind).expand(len(x), *t.shape) for t in prior)
        return MFA(logits, means, factors, noise, check=False).condition(x.to(kind), observed)

    def fit(
        self,
        x: Tensor | Batches,
        observed: Tensor | None = None,
        *,
        iterations: int = 50,
        tolerance: float = 1e-4,
        minibatch: int | None = None,
        noise_floor: float = 1e-3,
        seed: int = 0,
        on_iteration: Callable[[int, float], None] | None = None,
    ) -> SMFA:
        """Fit by EM on incomplete images; the log-likelihood of what is seen never falls (except with `minibatch`).

        A fresh module takes the device and dtype of the images (float32 at least). One that has parameters keeps its
        own, and EM runs there: images on another device are sent to it batch by batch.

        Args:
            x: images (N, C, H, W), or, for data that does not fit into memory, anything that yields batches
                (x, observed) each time it is iterated, such as a DataLoader.
            observed: bool (N, 1, H, W) or (N, C, H, W).
            iterations: the largest number of passes over the data.
            tolerance: stop when a pass gains less than this, in nats per seen pixel.
            minibatch: update after this many images instead of after a pass (stepwise EM); of an `x` that yields
                batches, after each of them.
            noise_floor: the least noise variance, as a share of the variance of the pixel's channel.
            seed: of the start and of the order of minibatches.
            on_iteration: called after every pass with its number and the mean log-likelihood of an image.

        With `torch.distributed` initialised, every process passes its own images, and sums are taken over all.
        """
        check_size("iterations", iterations)
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or tolerance != tolerance:
            raise ValueError(f"tolerance must be a number, got {describe(tolerance)}")
        if minibatch is not None:
            check_size("minibatch", minibatch)
        if on_iteration is not None and not callable(on_iteration):
            raise TypeError(
                f"on_iteration must be a function of (number, log-likelihood), got {describe(on_iteration)}"
            )
        self.begin(x, observed, noise_floor=noise_floor, seed=seed)
        passes = self.passes(x, observed, iterations=iterations, tolerance=tolerance, minibatch=minibatch, seed=seed)
        for number, likelihood in passes:
            if on_iteration is not None:
                on_iteration(number, likelihood)
        return self

    def passes(
        self,
        x: Tensor | Batches,
        observed: Tensor | None = None,
        *,
        iterations: int = 50,
        tolerance: float = 1e-4,
        minibatch: int | None = None,
        seed: int = 0,
    ) -> Iterator[tuple[int, float]]:
        """Iterate as `fit` does, after `begin` or `resume`; yields the number of each pass and the mean log-likelihood.

        The number counts all passes, also those before a `resume`.
        """
        memory: Statistics | None = None
        while len(self.history) < iterations and not (len(self.history) > 1 and self.gain() < tolerance):
            number = len(self.history) + 1
            memory = self.iterate(x, observed, minibatch=minibatch, memory=memory, seed=int(seed) + number)
            yield number, self.history[-1]

    def gain(self) -> float:
        """What the last pass gained, in nats per seen pixel."""
        before, after = self.history[-2:]
        return (after - before) / self._working()[1].seen

    @torch.no_grad()
    def begin(
        self, x: Tensor | Batches, observed: Tensor | None = None, *, noise_floor: float = 1e-3, seed: int = 0
    ) -> None:
        """Measure every pixel, then start from k-means over the seen pixels of up to 2,000 images."""
        check_floor(noise_floor)
        seed = check_seed("seed", seed)
        device = None if self.means is None else self.means.device
        units, images, total, like = measure(x, observed, device)
        if total < self.components:
            raise ValueError(f"x must hold at least as many images as components, {self.components}, got {total}")
        check_representable(units.scale, noise_floor, like.dtype if self.means is None else self.means.dtype)
        self._allocate(tuple(like.shape[1:]), like.dtype, like.device)
        self._units, self.floor, self.history = units, noise_floor, []
        chosen, mask = some(self._standardized(x, observed), images, units.center, limit=2000, seed=seed)
        self._keep(start(chosen, mask, self.components, self.rank, self.floor, seed))

    @torch.no_grad()
    def iterate(
        self,
        x: Tensor | Batches,
        observed: Tensor | None = None,
        *,
        minibatch: int | None = None,
        memory: Statistics | None = None,
        seed: int = 0,
    ) -> Statistics | None:
        """One pass over the data; adds the mean log-likelihood of an image, before its updates, to `history`.

        Returns:
            With `minibatch` the running statistics, to be passed as `memory` to the next pass; else None.
        """
        p, _ = self._working()
        if minibatch is None:
            sums: Statistics | None = None
            for flat, mask in self._standardized(x, observed):
                part = self._collect(p, flat, mask)
                sums = part if sums is None else sums + part
            assert sums is not None
            add_over_processes(*vars(sums).values())
            self._keep(maximize(p, sums, self.floor))
            self.history.append(float(sums.likelihood / sums.images))
            return None
        check_size("minibatch", minibatch)
        minibatch = int(minibatch)
        step = 0 if memory is None else round(float(memory.images))
        likelihood, images = 0.0, 0.0
        for flat, mask in self._standardized(x, observed, minibatch, seed):
            part = self._collect(p, flat, mask)
            add_over_processes(*vars(part).values())
            likelihood, images = likelihood + float(part.likelihood), images + float(part.images)
            average = Statistics(*(value / part.images for value in vars(part).values()))
            step += 1
            # Robbins–Monro: steps whose sum is infinite and whose squares' sum is not.
            memory = average if memory is None else memory.blend(average, (step + 1) ** -0.6)
            p = maximize(p, memory, self.floor)
            memory.images.fill_(1.0)
        assert memory is not None
        self._keep(p)
        self.history.append(likelihood / images)
        # The number of steps so far travels in `images`, which is 1 for an average.
        memory.images.fill_(float(step))
        return memory

    def resumable(self) -> dict[str, Tensor]:
        """Everything EM needs to go on exactly where it is."""
        parameters, units = self._working()
        values = {**vars(parameters), **vars(units), "seen": torch.tensor(units.seen, dtype=torch.float64)}
        return {f"em.{name}": value for name, value in values.items()}

    def resume(self, images: Tensor, tensors: dict[str, Tensor], history: list[float], floor: float) -> None:
        """Go on from what `resumable` returned, with images like those it was fitted to."""
        names = ("logits", "means", "factors", "noise", "center", "scale", "seen")
        absent = [f"em.{name}" for name in names if f"em.{name}" not in tensors]
        if absent:
            raise ValueError(f"tensors must be those of SMFA.resumable, got none named {', '.join(absent)}")
        self._allocate(tuple(images.shape[1:]), images.dtype, images.device)
        logits, means, factors, noise, center, scale, seen = (
            tensors[f"em.{name}"].to(self.means.device) for name in names
        )
        self._units = Units(center, scale, float(seen))
        self.history, self.floor = list(history), floor
        self._keep(Parameters(logits, means, factors, noise))

    def _standardized(
        self, x: Tensor | Batches, observed: Tensor | None, size: int | None = None, seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (N, n) in float64: values in units of the data, zero where not observed; and observed."""
        units = cast(Units, self._units).to(self.means.device)
        for chunk, seen in pairs(x, observed, size, seed, self.means.device):
            if chunk.shape[1:] != self.means.shape[1:]:
                raise ValueError(f"x must hold images of {tuple(self.means.shape[1:])}, got {describe(chunk)}")
            yield units.apply(chunk, seen)

    def _collect(self, p: Parameters, flat: Tensor, mask: Tensor) -> Statistics:
        """The E-step, with the log-likelihood in the units of the images."""
        part = collect(p, flat, mask)
        part.likelihood -= (mask @ cast(Units, self._units).scale.to(flat.device).log()).sum()
        return part

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Room for the parameters; those of a module that has some stay on its device and in its dtype."""
        if self.components * (self.rank + 2) * math.prod(shape) > MOST_WEIGHTS:
            raise ValueError(
                f"components and rank must make at most {MOST_WEIGHTS} parameters for images of {shape}, got "
                f"{describe(self.components)} components of rank {describe(self.rank)}"
            )
        if self.means is not None:
            dtype, device = self.means.dtype, self.means.device

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.promote_types(dtype, torch.float32), device=device)

        self.logits = zeros(self.components)
        self.means = zeros(self.components, *shape)
        self.factors = zeros(self.components, self.rank, *shape)
        self.noise = torch.ones_like(self.means)

    def _keep(self, p: Parameters) -> None:
        """Store EM's parameters in the units and type of the images, and as they are for the next iteration."""
        self._exact, (_, units) = p, self._working(p)
        self.logits.copy_(p.logits)
        self.means.copy_((units.center + units.scale * p.means).view(self.means.shape))
        self.factors.copy_((units.scale * p.factors).view(self.factors.shape))
        self.noise.copy_((units.scale.square() * p.noise).view(self.noise.shape))

    def _working(self, p: Parameters | None = None) -> tuple[Parameters, Units]:
        """EM's parameters and units, where the module is."""
        p = p or self._exact
        if p is None or self._units is None:
            raise RuntimeError("this SMFA is not being fitted; call begin(x, observed) first")
        return p.to(self.means.device), self._units.to(self.means.device)

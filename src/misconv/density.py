"""Where the MFA of an image comes from: densities, modules `(x, observed) -> MFA` with observed pixels exact.

`LinearDMFA` and `ConvDMFA` are networks that predict the parameters for every image anew (density networks, trained
by `misconv.fit_density`); `SMFA` is one mixture for all images, fitted by EM and conditioned on what is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv import _em
from misconv._checks import check_images, check_size, describe
from misconv._density_network import Network, check_floor, check_rank, part_components
from misconv.mfa import MFA

__all__ = ["SMFA", "ConvDMFA", "LinearDMFA"]


class LinearDMFA(Network):
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
        if len(shape) != 3:
            raise ValueError(f"shape must be (channels, height, width), got {describe(shape)}")
        channels, height, width = shape
        super().__init__(channels, components, rank, noise_floor)
        check_size("height", height)
        check_size("width", width)
        self.shape = (channels, height, width)
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
        part_components(self.means, self.noise)

    def config(self) -> dict[str, Any]:
        """The arguments that make another one like this."""
        return {"shape": list(self.shape), **self._settings()}

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        """The MFA of every image given its observed pixels."""
        inside, x, observed = self._input(x, observed)
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(f"x must hold images of {self.shape}, as this density was made for, got {describe(x)}")
        features = self.features(inside)

        def image(flat: Tensor) -> Tensor:
            return flat.view(len(flat), -1, *self.shape[1:])  # (B, K·C or K·L·C, H, W)

        factors = x.new_zeros(len(x), 0, *x.shape[2:]) if self.factors is None else image(self.factors(features))
        return self._output(
            x, observed, self._weigh(features), image(self.means(features)), factors, image(self.noise(features))
        )


class ConvDMFA(Network):
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
        if len(depths) != 2 * len(widths) - 1 or min(*depths, *widths) < 1:
            raise ValueError(
                "depths must be positive, one for each of the widths on the way down, and again on the way up: "
                f"{2 * len(widths) - 1} for {len(widths)} widths, got {describe(depths)}"
            )
        self.widths, self.depths, self.skips = tuple(widths), tuple(depths), skips
        layers: list[nn.Module] = []
        inside = 2 * channels
        for level, width in enumerate(widths):
            if level:
                layers.append(nn.Conv2d(inside, inside, 3, stride=2, padding=1))
            inside = _blocks(layers, inside, width, depths[level])
        for step, width in enumerate(reversed(widths[:-1])):
            layers.append(nn.ConvTranspose2d(inside, inside, 3, stride=2, padding=1, output_padding=1))
            inside = _blocks(layers, inside + skips * width, width, depths[len(widths) + step])
        self.features = nn.Sequential(*layers)
        self.means = _head(inside, components * channels)
        self.factors = _head(inside, components * rank * channels) if rank else None
        self.noise = _head(inside, components * channels)
        self.logits = nn.Linear(inside, components) if components > 1 else None  # one needs no weight
        part_components(self.means[-1], self.noise[-1])

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


def _blocks(layers: list[nn.Module], inside: int, width: int, count: int) -> int:
    for _ in range(count):
        layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(width)]
        inside = width
    return inside


def _head(inside: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, 16, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(16), nn.Conv2d(16, out, 3, padding=1)
    )


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
    center: Tensor

    def __init__(self, components: int = 10, rank: int = 6, shape: tuple[int, int, int] | None = None) -> None:
        super().__init__()
        check_size("components", components)
        check_rank(rank)
        self.components, self.rank = components, rank
        self.history: list[float] = []
        self.floor = 0.0
        for name in ("logits", "means", "factors", "noise", "center"):
            self.register_buffer(name, None)
        if shape is not None:
            self._allocate(tuple(shape), torch.get_default_dtype(), torch.get_default_device())

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
        prior = (self.logits, self.means, self.factors, self.noise)
        logits, means, factors, noise = (t.to(x.dtype).expand(len(x), *t.shape) for t in prior)
        return MFA(logits, means, factors, noise, check=False).condition(x, observed)

    def fit(
        self,
        x: Tensor | _em.Batches,
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

        Args:
            x: images (N, C, H, W), or, for data that does not fit into memory, anything that yields batches
                (x, observed) each time it is iterated, such as a DataLoader.
            observed: bool (N, 1, H, W) or (N, C, H, W).
            iterations: at most so many passes over the data.
            tolerance: stop when a pass gains less than this share of the log-likelihood.
            minibatch: update after every so many images instead of after a pass (stepwise EM); of an `x` that yields
                batches, after each of them.
            noise_floor: the least noise variance, as a share of the images' variance.
            seed: of the start and of the order of minibatches.
            on_iteration: called after every pass with its number and the mean log-likelihood of an image.

        With `torch.distributed` initialised, every process passes its own images, and sums are taken over all.
        """
        self.begin(x, observed, noise_floor=noise_floor, seed=seed)
        memory: _em.Statistics | None = None
        for number in range(1, iterations + 1):
            memory = self.iterate(x, observed, minibatch=minibatch, memory=memory, seed=seed + number)
            if on_iteration is not None:
                on_iteration(number, self.history[-1])
            if len(self.history) > 1 and self.gain() < tolerance:
                break
        return self

    def gain(self) -> float:
        """What the last pass gained, as a share of the log-likelihood."""
        before, after = self.history[-2:]
        return (after - before) / max(abs(after), 1e-12)

    def begin(
        self, x: Tensor | _em.Batches, observed: Tensor | None = None, *, noise_floor: float = 1e-3, seed: int = 0
    ) -> None:
        """Measure every pixel, then start from k-means over the seen pixels of up to 2,000 images."""
        check_floor(noise_floor)
        sums, images, like = _em.measure(x, observed)
        total = sums.new_tensor(float(images))
        _em.add_over_processes(sums, total)
        if total < self.components:
            raise ValueError(f"x must hold at least as many images as components, {self.components}, got {int(total)}")
        shape = tuple(like.shape[1:])
        never = (sums[0] == 0).nonzero()
        if len(never):
            place = tuple(int(i) for i in torch.unravel_index(never[0, 0], shape))
            raise ValueError(
                f"observed must show every pixel in at least one image, got {len(never)} that are never seen, the "
                f"first at (channel, row, column) {place}; crop them away, or use a density network"
            )
        self._allocate(shape, like.dtype, like.device)
        center = sums[1] / sums[0]
        variance = (sums[2] / sums[0] - center.square()).clamp_min(0).mean()
        self.floor = max(noise_floor * float(variance), 1e-12)
        self.center.copy_(center.view(shape))
        self.history = []
        chosen, mask = _em.some(self._centered(x, observed), images, center, limit=2000, seed=seed)
        self._keep(_em.start(chosen, mask, self.components, self.rank, self.floor, seed))

    def iterate(
        self,
        x: Tensor | _em.Batches,
        observed: Tensor | None = None,
        *,
        minibatch: int | None = None,
        memory: _em.Statistics | None = None,
        seed: int = 0,
    ) -> _em.Statistics | None:
        """One pass over the data; adds the mean log-likelihood of an image, before its updates, to `history`.

        Returns:
            With `minibatch` the running statistics, to be passed as `memory` to the next pass; else None.
        """
        p = self._parameters64()
        if minibatch is None:
            sums: _em.Statistics | None = None
            for flat, mask in self._centered(x, observed):
                part = _em.collect(p, flat, mask)
                sums = part if sums is None else sums + part
            assert sums is not None
            _em.add_over_processes(*vars(sums).values())
            self._keep(_em.maximize(p, sums, self.floor))
            self.history.append(float(sums.likelihood / sums.images))
            return None
        check_size("minibatch", minibatch)
        step = 0 if memory is None else round(float(memory.images))
        likelihood, images = 0.0, 0.0
        for flat, mask in self._centered(x, observed, minibatch, seed):
            part = _em.collect(p, flat, mask)
            _em.add_over_processes(*vars(part).values())
            likelihood, images = likelihood + float(part.likelihood), images + float(part.images)
            average = _em.Statistics(*(value / part.images for value in vars(part).values()))
            step += 1
            # Robbins–Monro: steps whose sum is infinite and whose squares' sum is not.
            memory = average if memory is None else memory.blend(average, (step + 1) ** -0.6)
            p = _em.maximize(p, memory, self.floor)
            memory.images.fill_(1.0)
        assert memory is not None
        self._keep(p)
        self.history.append(likelihood / images)
        # The number of steps so far travels in `images`, which is 1 for an average.
        memory.images.fill_(float(step))
        return memory

    def resumable(self) -> dict[str, Tensor]:
        """Everything EM needs to go on exactly where it is."""
        return {f"em.{name}": value for name, value in vars(self._parameters64()).items()} | {"em.center": self.center}

    def resume(self, images: Tensor, tensors: dict[str, Tensor], history: list[float], floor: float) -> None:
        """Go on from what `resumable` returned, with images like those it was fitted to."""
        self._allocate(tuple(images.shape[1:]), images.dtype, images.device)
        names = ("logits", "means", "factors", "noise")
        logits, means, factors, noise = (tensors[f"em.{name}"].to(images.device) for name in names)
        self.center.copy_(tensors["em.center"])
        self.history, self.floor = list(history), floor
        self._keep(_em.Parameters(logits, means, factors, noise))

    def _centered(
        self, x: Tensor | _em.Batches, observed: Tensor | None, size: int | None = None, seed: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (N, n) in float64: values around the pixel means, zero where not observed; and observed."""
        center = self.center.double().flatten()
        for chunk, seen in _em.pairs(x, observed, size, seed):
            flat, mask = _em.flatten(chunk, seen)
            yield (flat - center) * mask, mask

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.logits = zeros(self.components)
        self.means = zeros(self.components, *shape)
        self.factors = zeros(self.components, self.rank, *shape)
        self.noise = torch.ones_like(self.means)
        self.center = zeros(*shape).double()
        self._exact: _em.Parameters | None = None

    def _keep(self, p: _em.Parameters) -> None:
        """Store EM's float64 parameters in the type of the images, and as they are for the next iteration."""
        self._exact = p
        self.logits.copy_(p.logits)
        self.means.copy_((p.means + self.center.flatten()).view(self.means.shape))
        self.factors.copy_(p.factors.view(self.factors.shape))
        self.noise.copy_(p.noise.view(self.noise.shape))

    def _parameters64(self) -> _em.Parameters:
        if self._exact is not None:
            return self._exact
        means = (self.means.double() - self.center).flatten(1)
        factors, noise = self.factors.double().flatten(2), self.noise.double().flatten(1)
        return _em.Parameters(self.logits.double(), means, factors, noise)

"""Where the MFA of an image comes from: densities, modules `(x, observed) -> MFA` with observed pixels exact.

`LinearDMFA` and `ConvDMFA` are networks that predict the parameters for every image anew (density networks, trained
by `misconv.fit_density`); `SMFA` is one mixture for all images, fitted by EM and conditioned on what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from misconv._checks import (
    as_batch,
    channels_last,
    check_images,
    check_observed,
    check_seed,
    check_size,
    describe,
    split_nan,
)
from misconv._density import (
    MOST_WEIGHTS,
    Batches,
    Bounds,
    ConvDMFA,
    LinearDMFA,
    Parameters,
    Prior,
    Statistics,
    UNetDMFA,
    Units,
    add_over_processes,
    check_bounds,
    check_devices,
    check_floor,
    check_prior,
    check_rank,
    check_representable,
    check_shape,
    clip,
    collect,
    log_prior,
    maximize,
    measure,
    pairs,
    result_type,
    some,
    start,
    with_margin,
)
from misconv.mfa import MFA

__all__ = ["SMFA", "ConvDMFA", "LinearDMFA", "UNetDMFA"]

for _network in (ConvDMFA, LinearDMFA, UNetDMFA):
    _network.__module__ = __name__  # here they are found, by people and in files


class SMFA(nn.Module):
    """One mixture of factor analyzers for all images, fitted by EM on what is seen of them.

    `forward` conditions it on the observed pixels of each image.

    Args:
        components: K.
        rank: L; with one component and rank 0 every pixel is a Gaussian of its own.
        shape: (C, H, W), where the parameters are to exist before `fit` (for loading them).
        prior: how strongly every pixel of a component is held to doubt where images are few for K and L, so that a
            mixture does not take them for all there is (docs/maths.md); 0 for the largest likelihood, as in the paper.
        bounds: where means lie, (lowest, highest); "data": the range of what `fit` saw; None for no bounds. A pixel has
            at most the variance that they allow.

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
    low: Tensor
    high: Tensor

    def __init__(
        self,
        components: int = 10,
        rank: int = 6,
        shape: tuple[int, int, int] | None = None,
        prior: float = 1.0,
        bounds: Bounds = "data",
    ) -> None:
        super().__init__()
        check_size("components", components)
        check_rank(rank)
        self.components, self.rank, self.prior = int(components), int(rank), check_prior(prior)
        self.bounds = check_bounds(bounds)
        self.history: list[float] = []
        self.floor = 0.0
        # What EM works on: float64, in units of the data; None before `begin`.
        self._exact: Parameters | None = None
        self._units: Units | None = None
        for name in ("logits", "means", "factors", "noise", "low", "high"):
            self.register_buffer(name, None)
        if shape is not None:
            self._allocate(check_shape(shape), torch.get_default_dtype(), torch.get_default_device())

    def config(self) -> dict[str, Any]:
        """The arguments that make another one like this."""
        shape = None if self.means is None else list(self.means.shape[1:])
        bounds = list(self.bounds) if isinstance(self.bounds, tuple) else self.bounds
        known = {"components": self.components, "rank": self.rank, "shape": shape}
        return {**known, "prior": self.prior, "bounds": bounds}

    def forward(self, x: Any, observed: Any = None) -> MFA:
        """The MFA of every image given its observed pixels; without `observed` those that are not NaN.

        Images may have any form that `misconv.observe` takes; integers get the type of the parameters.
        """
        if self.means is None:
            raise RuntimeError("this SMFA has no parameters yet; call fit(x, observed) first")
        x, observed = as_batch(x, observed, self.means)
        check_images("x", x)
        shape = tuple(self.means.shape[1:])
        if x.shape[1:] != shape:
            advice = channels_last(x, shape[0])
            raise ValueError(f"x must hold images of {shape}, as this SMFA was fitted to, got {describe(x)}{advice}")
        x, observed = split_nan(x, observed)
        check_devices(x, observed, self.means.device)
        observed = check_observed("observed", observed, x)
        kind = result_type(x.dtype, self.means.dtype)
        prior = (self.logits, self.means, self.factors, self.noise)
        logits, means, factors, noise = (t.to(kind).expand(len(x), *t.shape) for t in prior)
        p = MFA(logits, means, factors, noise, check=False).condition(x.to(kind), observed)
        return p if self.bounds is None else clip(p, self.low.to(kind), self.high.to(kind))

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
        """Fit by EM on incomplete images; the likelihood, with its prior, never falls (except with `minibatch`).

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
        self._bound_by(units)
        self._units, self.floor, self.history = units, noise_floor, []
        chosen, mask = some(self._standardized(x, observed), images, units.center, limit=2000, seed=seed)
        prior = Prior(self._believed(total) / len(chosen), units.variance)
        self._keep(start(chosen, mask, self.components, self.rank, self.floor, prior, seed))

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
        p, units = self._working()
        prior = Prior(self._believed(units.images) / units.images, units.variance)
        if minibatch is None:
            sums: Statistics | None = None
            for flat, mask in self._standardized(x, observed):
                part = self._collect(p, flat, mask)
                sums = part if sums is None else sums + part
            assert sums is not None
            add_over_processes(*vars(sums).values())
            reached = float(sums.likelihood / sums.images + log_prior(p, prior))
            self._keep(maximize(p, sums, self.floor, prior))
            self.history.append(reached)
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
            p = maximize(p, memory, self.floor, prior)
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
        counts = {"seen": units.seen, "images": units.images}
        values = {**vars(parameters), **vars(units), **{k: torch.tensor(v).double() for k, v in counts.items()}}
        return {f"em.{name}": value for name, value in values.items()}

    def resume(self, images: Tensor, tensors: dict[str, Tensor], history: list[float], floor: float) -> None:
        """Go on from what `resumable` returned, with images like those it was fitted to."""
        names = [f.name for kind in (Parameters, Units) for f in fields(kind)]
        absent = [f"em.{name}" for name in names if f"em.{name}" not in tensors]
        if absent:
            raise ValueError(f"tensors must be those of SMFA.resumable, got none named {', '.join(absent)}")
        self._allocate(tuple(images.shape[1:]), images.dtype, images.device)
        found = {name: tensors[f"em.{name}"].to(self.means.device) for name in names}
        counts = {name: float(found[name]) for name in ("seen", "images")}
        units: dict[str, Any] = {f.name: found[f.name] for f in fields(Units)} | counts
        self._units = Units(**units)
        self._bound_by(self._units)
        self.history, self.floor = list(history), floor
        self._keep(Parameters(**{f.name: found[f.name] for f in fields(Parameters)}))

    def _believed(self, images: float) -> float:
        """How many images the prior counts for: less with every real one."""
        believed = self.prior * self.components * (2 * self.rank + 2) ** 2 / images
        return min(believed, images / self.components)

    def _bound_by(self, units: Units) -> None:
        """Take the range of the data for bounds, if so wished."""
        if self.bounds == "data":
            scale = units.scale.view(self.means.shape[1:])[:, 0, 0]
            low, high = with_margin(units.low, units.high, scale)
            self.low.copy_(low)
            self.high.copy_(high)

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
        if self.bounds is not None:
            low, high = self.bounds if isinstance(self.bounds, tuple) else (-1.0, 1.0)
            self.low, self.high = zeros(shape[0], 1, 1) + low, zeros(shape[0], 1, 1) + high

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

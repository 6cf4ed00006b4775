"""The training of a density as a job for `misconv._train.engine`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from misconv._checks import check_fraction, check_seed, check_size, describe
from misconv._train.images import Holes, TensorImages, check_incomplete
from misconv._train.jobs import call_model, check_count, check_share
from misconv._train.loan import borrowed
from misconv._train.running import Job, Rate
from misconv._train.scores import (
    OBJECTIVES,
    figures,
    fit_sums,
    nearest_error,
    ratio_and_error,
    validation_sums,
)
from misconv._train.session import EpochRecord
from misconv._train.streams import StreamedImages
from misconv.mfa import MFA
from misconv.missing import square

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["DensityTraining", "check_density_arguments", "density_job"]

_MEASURED = 32  # images whose fill is compared with them before the training


def density_job(
    density: nn.Module,
    images: Tensor,
    observed: Tensor,
    fabric: Fabric,
    *,
    batch_size: int,
    learning_rate: Rate,
    objective: str = OBJECTIVES[0],
    mse_epochs: int = 0,
    shape: Callable[..., Tensor] = square,
    fraction: float = 1 / 4,
    augment: bool = False,
    validation: float = 0.1,
    seed: int = 0,
    clip: float | None = 5.0,
    divisor: float = 1.0,
    **more: Any,
) -> Job:
    """The training of a density on tensors; the arguments are those of `misconv.fit_density`, and of a `Job`.

    Bytes are divided by `divisor`.
    """
    images, observed = check_incomplete(images, observed)
    check_density_arguments(objective, mse_epochs, fraction, validation)
    seed, batch_size = check_seed("seed", seed), check_size("batch_size", batch_size)
    options: dict[str, Any] = {"validation": validation, "batch_size": batch_size, "seed": seed, "divisor": divisor}
    source = TensorImages(images, observed, fabric, **options)
    training = DensityTraining(density, source, Holes(shape, fraction, seed, augment), fabric, objective, mse_epochs)
    return training.job(learning_rate=learning_rate, validation=validation, seed=seed, clip=clip, **more)


def check_density_arguments(objective: str, mse_epochs: int, fraction: float, validation: float) -> None:
    """Those of `misconv.fit_density` that are about neither images nor time."""
    check_fraction(fraction)
    check_share("validation", validation)
    check_count("mse_epochs", mse_epochs)
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(map(repr, OBJECTIVES))}, got {describe(objective)}")


class DensityTraining:
    """What is done to a density in each step, and how it is judged.

    Args:
        source: the images. holes: what is hidden of them.
        objective, mse_epochs: of `misconv.fit_density`.
    """

    def __init__(
        self,
        density: nn.Module,
        source: TensorImages | StreamedImages,
        holes: Holes,
        fabric: Fabric,
        objective: str,
        mse_epochs: int,
    ) -> None:
        self.density, self.source, self.holes, self.fabric = density, source, holes, fabric
        self.objective, self.mse_epochs = objective, mse_epochs
        self.described = holes.identify(source.image)
        self.shown = holes.of_validation(source.held_observed()) if source.held_size else None
        self.squared = torch.zeros((), device=fabric.device)  # the weight of the squared error
        self.error = 0.0  # the standard error of what was last evaluated
        self.nearest: float | None = None  # the squared error of nearest-pixel fill, which never changes

    def job(self, *, learning_rate: Rate, validation: float, seed: int, **options: Any) -> Job:
        """For `train`; the options are those of a `Job`."""
        source = self.source
        settings = {
            "task": "density",
            "seed": seed,
            **source.settings,
            "objective": self.objective,
            "mse_epochs": self.mse_epochs,
            "shape": self.described,
            "fraction": self.holes.fraction,
            "augment": self.holes.augment,
            "validation": validation,
        }
        if isinstance(source, StreamedImages):
            options |= {"stream": lambda epoch, skip: source.stream(epoch, skip, self.holes), "expected": source.steps}
        return Job(
            self.density, self.loss, 4, self.summarise, self.evaluate, source.size, source.batch_size, learning_rate,
            seed=seed, begin=self.begin, prepare=self.prepare, resident=source.resident, settings=settings,
            data=source.identify, synchronize=True, tolerance=lambda: self.error, **options,
        )  # fmt: skip

    def prepare(self) -> None:
        """Let the density measure the images."""
        calibrate = getattr(self.density, "calibrate", None)
        if callable(calibrate):
            x, seen = self.source.sample()
            with borrowed(self.density, x.device) as loan:
                loan.result = None  # it keeps what it learns
                call_model("density", calibrate, (x, seen))
            self._scale_deviations(x, seen)

    @torch.no_grad()
    def _scale_deviations(self, x: Tensor, seen: Tensor) -> None:
        """Let a density that starts from a fill claim the errors of that fill at first; the rest is to be learned."""
        # It may be inside a user's own.
        found = [m for m in self.density.modules() if hasattr(m, "scale_deviations") and m.is_untrained]
        if not found:
            return
        x, seen = x[:_MEASURED], seen[:_MEASURED]
        less = seen & self.holes.of_batch((len(x), *x.shape[2:]), 0, 0).to(seen.device)
        for module in found:
            with borrowed(module, x.device) as loan:
                loan.result = None  # it keeps them
                for _ in range(3):  # bounds let less of a large deviation through
                    ratio = self._error_to_claim(module, x, seen, less)
                    if ratio is not None:
                        cast(Any, module).scale_deviations(ratio)

    def _error_to_claim(self, density: nn.Module, x: Tensor, seen: Tensor, less: Tensor) -> Tensor | None:
        """How many times the deviation that is claimed for every channel the error is, (C,), if it is anything."""
        sums = torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device)
        # As many at a time as a step has room for.
        for part in torch.arange(len(x), device=x.device).split(self.source.batch_size):
            images, shown = x[part], less[part]
            p, hidden = density(images, shown), (seen[part] & ~shown).expand(images.shape)
            squares = torch.stack([(p.mean - images).square(), p.variance]).double()
            sums += squares.where(hidden, 0).sum((1, 3, 4))
        total = self.fabric.all_reduce(sums.to(self.fabric.device), reduce_op="sum")
        assert isinstance(total, Tensor)
        return (total[0] / total[1]).sqrt().to(x.device) if bool((total > 0).all()) else None

    def begin(self, epoch: int) -> None:
        """Before an epoch."""
        self.squared.fill_(1.0 if epoch < self.mse_epochs else 0.0)
        self.source.begin(epoch, self.holes)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """What is minimised, and sums of `fit_sums` over the batch."""
        x, seen, less = (t.to(self.fabric.device) for t in self.source.take(batch))
        target = (seen & ~less).expand(x.shape)
        sums = fit_sums(self._predict(model, x, less), x, target, self.objective)
        total = self.fabric.all_reduce(sums[-1].detach().clone(), reduce_op="sum")  # which it writes into
        assert isinstance(total, Tensor)
        # Gradients are averaged over processes, but pixels are to be averaged over the whole batch.
        scale = self.fabric.world_size / total.clamp_min(1)
        return (sums[0] + self.squared * sums[2]) * scale, sums

    def _predict(self, model: nn.Module, x: Tensor, less: Tensor) -> MFA:
        p = call_model("density", model, (x, less))
        if not isinstance(p, MFA) or p.shape != x.shape:
            raise TypeError(f"density must return a misconv.MFA of images {tuple(x.shape)}, got {describe(p)}")
        return p

    def summarise(self, sums: list[float]) -> EpochRecord:
        """What is recorded of the images that it learned from."""
        _, nll, error, pixels = sums
        return {"nll": nll / max(pixels, 1), "mse": error / max(pixels, 1)}

    def evaluate(self, model: nn.Module) -> tuple[float, EpochRecord]:
        """The likelihoods that are minimised, on the images that were set aside; and what is recorded of them."""
        if self.shown is None:
            return -math.inf, {}
        sums = torch.zeros(11, dtype=torch.float64, device=self.fabric.device)
        for part in torch.arange(len(self.shown), device=self.shown.device).split(2 * self.source.batch_size):
            mine = part[self.fabric.global_rank :: self.fabric.world_size]
            idle = len(mine) == 0  # it takes part all the same: processes call the model together, or not at all
            found = self._test(model, part[:1] if idle else mine)
            if not idle:
                sums += found
        total = self.fabric.all_reduce(sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        nearest, *rest = total.tolist()
        self.nearest = nearest if self.nearest is None else self.nearest
        objective, self.error = ratio_and_error(rest[:4], rest[-1])
        return objective, figures(rest[4:], self.nearest)

    def _test(self, model: nn.Module, which: Tensor) -> Tensor:
        """Sums over some images: error of nearest-pixel fill, `validation_sums`."""
        assert self.shown is not None
        x, seen = self.source.take_held(which)
        x, seen, less = (t.to(self.fabric.device) for t in (x, seen, self.shown[which]))
        target = (seen & ~less).expand(x.shape)
        p = self._predict(model, x, less)
        sums = validation_sums(p, x, target, self.objective)
        nearest = sums.new_zeros(1) if self.nearest is not None else nearest_error(x, less, target).view(1)
        return torch.cat([nearest, sums])

"""A U-Net that learns to inpaint from incomplete images by splitting losses, with the package `deepinv`.

Of what is seen a region like those that are missing is hidden; the network sees the rest and is scored on the hidden
part (Yaman et al. 2020): deepinv's `SplittingLoss` with its `Inpainting` physics and its `UNet`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv import missing, store
from misconv._train import EpochRecord, Job, cosine_schedule, train
from misconv.paper.cache import as_json
from misconv.paper.inputs import IncompleteImages

if TYPE_CHECKING:
    from misconv.paper.classification import Experiment

__all__ = ["SplittingSettings", "inpainter", "is_there"]

HELD = 0.1  # of the images choose the epoch


@dataclass(frozen=True)
class SplittingSettings:
    """The U-Net and its training."""

    widths: tuple[int, ...] = (32, 64, 128)
    epochs: int = 15
    batch_size: int = 256
    learning_rate: float = 1e-3


def is_there() -> bool:
    """Whether deepinv can be imported."""
    return importlib.util.find_spec("deepinv") is not None


def inpainter(experiment: Experiment, settings: SplittingSettings) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, observed) -> filled x, by a network of this experiment that is trained the first time."""
    unit = {**experiment.identity, "density_kind": "splitting", "splitting": as_json(settings), "seed": 0}
    path = experiment.cache.density(unit)
    network, loss = _network(experiment.data.shape, settings, missing.like(experiment.train.observed))
    if experiment.cache.get(unit, "fit") is None or not path.exists():
        experiment.say(f"{experiment.data.title}, {experiment.shape}: learning to inpaint (splitting losses)")
        job = _job(network, loss, settings, experiment.train, unit)
        checkpoint = experiment.cache.running(unit)
        (history,) = train(
            [job], experiment.fabric, epochs=settings.epochs, checkpoint=checkpoint,
            checkpoint_seconds=experiment.pause, progress=experiment.progress, title="inpainting",
        )  # fmt: skip
        record = {"kind": "fit", **experiment.circumstances(), "seconds": job.seconds, "history": history}
        experiment.cache.keep(unit, record)
        store.save(network, path)
        checkpoint.unlink(missing_ok=True)
    store.load(path, into=network)
    network.to(experiment.device).eval().requires_grad_(False)

    def fill(x: Tensor, observed: Tensor) -> Tensor:
        y = x.masked_fill(~observed, 0)
        guess: Tensor = network(y, _physics(y, observed))
        return torch.where(observed, x, guess.clamp(0, 1))

    return fill


def _network(
    shape: tuple[int, int, int], settings: SplittingSettings, regions: Callable[..., Tensor]
) -> tuple[nn.Module, Any]:
    """The network, which splits what it is given while it learns, and its loss."""
    try:
        from deepinv.loss import SplittingLoss
        from deepinv.models import UNet
    except ImportError as error:
        raise ImportError("the U-Net of splitting losses needs deepinv: pip install 'misconv[alternatives]'") from error
    loss = SplittingLoss(mask_generator=_Regions(regions, shape), eval_split_input=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        channels = shape[0]
        unet = UNet(channels + 1, channels, residual=False, channels_per_scale=settings.widths)
    return loss.adapt_model(_WithMask(unet)), loss


class _WithMask(nn.Module):
    """A U-Net that is told which pixels it is given."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, y: Tensor, physics: Any, **options: Any) -> Tensor:
        """(B, C, H, W)."""
        mask = physics.mask[:, :1].to(y.dtype).expand(len(y), 1, *y.shape[2:])
        out: Tensor = self.unet(torch.cat([y, mask], 1))
        return out


class _Regions:
    """What deepinv asks for the mask of a split: regions like those that are missing, out of what is seen."""

    def __init__(self, regions: Callable[..., Tensor], shape: tuple[int, int, int]) -> None:
        self.regions, self.size = regions, shape[1:]

    def step(self, batch_size: int, input_mask: Tensor, **options: Any) -> dict[str, Tensor]:
        """1 where a pixel is shown."""
        shown = self.regions(batch_size, *self.size, fraction=1 / 4, device=input_mask.device)
        return {"mask": shown.to(input_mask.dtype) * input_mask}


def _physics(y: Tensor, observed: Tensor) -> Any:
    from deepinv.physics import Inpainting

    return Inpainting(tuple(y.shape[1:]), mask=observed.to(y.dtype).expand_as(y), device=y.device)


def _job(
    network: nn.Module, splitting: Any, settings: SplittingSettings, data: IncompleteImages, unit: dict[str, Any]
) -> Job:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(5), device="cpu").to(data.images.device)
    held, learned = order.split([round(HELD * len(data)), len(data) - round(HELD * len(data))])

    def error(model: Any, rows: Tensor) -> Tensor:
        y, observed = data.at(rows)
        physics = _physics(y, observed)
        guess = model(y.masked_fill(~observed, 0), physics, update_parameters=True)
        found: Tensor = splitting(guess, y.masked_fill(~observed, 0), physics, network)
        return found

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        found = error(model, learned[batch.to(learned.device)])
        return found, found.detach().double().view(1) * len(batch)

    def evaluate(model: nn.Module) -> tuple[float, EpochRecord]:
        """Regions are hidden of the images set aside, too, the same ones every time."""
        with torch.random.fork_rng(devices=[data.images.device] if data.images.is_cuda else []):
            torch.manual_seed(0)
            total = sum(float(_held_error(model, data, part, network)) for part in held.split(settings.batch_size))
        return total / max(len(held), 1), {"validation_mse": total / max(len(held), 1)}

    # Not resident: deepinv makes its operators anew in every step, of numbers of the CPU, so no graph can be captured.
    return Job(
        network, loss, 1, lambda sums: {"mse": sums[0] / len(learned)}, evaluate, len(learned), settings.batch_size,
        cosine_schedule(settings.learning_rate, settings.epochs), settings=unit, name="inpainting",
    )  # fmt: skip


def _held_error(model: Any, data: IncompleteImages, rows: Tensor, network: Any) -> Tensor:
    """The squared error of what was hidden, per value, times the number of images."""
    x, observed = data.at(rows)
    shown = network.mask_generator.step(len(rows), observed.to(x.dtype))["mask"] > 0
    guess = model(x.masked_fill(~shown, 0), _physics(x, shown))
    hidden = (observed & ~shown).expand_as(x)
    error: Tensor = (guess - x).square().where(hidden, 0).sum() / hidden.sum().clamp_min(1) * len(rows)
    return error

"""The Wasserstein autoencoders of the paper's appendix (Tolstikhin et al. 2018), which learn from incomplete images.

Only the encoder's first layer knows of missing pixels; it is that of any method of `misconv.paper.methods`. The error
of the reconstruction is measured at seen pixels alone, and an adversary on the codes makes them standard normal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from misconv._checks import check_images, check_observed, describe
from misconv._train import EpochRecord, Job, call_model
from misconv.paper.cache import as_json
from misconv.paper.inputs import IncompleteImages, Take
from misconv.paper.networks import WIDTH
from misconv.paper.settings import FULL, MIXED

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["SETTINGS", "WAE", "WAESettings", "adversarial_losses", "reconstruction_loss", "wae_job"]


@dataclass(frozen=True)
class WAESettings:
    """A `WAE` and its training.

    Args:
        width: channels of the first scale of encoder and decoder; every step down doubles them.
        depth: steps down. blocks: convolutions at every scale.
        latent: numbers of a code. hidden: width of the discriminator.
        weight: of the adversary's loss.
        learning_rate: of Adam, of all parts. The paper names a smaller one for the discriminator; in the authors' code
            that factor is the weight of its loss, which Adam does not feel.
        precision: of the training on a GPU, in Fabric's words; a CPU has full precision.
        measured: test images are looked at every `measured` epochs, and by the chosen one.
    """

    width: int
    depth: int
    blocks: int
    latent: int
    hidden: int
    weight: float
    learning_rate: float
    batch_size: int
    epochs: int
    precision: str = FULL
    measured: int = 1


# The appendix trains those of SVHN and CelebA for 50 epochs, which are 16 and 12 PFLOP. All rows of a table, each three
# times, would take an hour at 100 TFLOP/s. Here they have fewer.
SETTINGS = {
    "mnist": WAESettings(40, 2, 1, 20, 64, weight=0.01, learning_rate=4e-4, batch_size=128, epochs=20),
    "svhn": WAESettings(
        96, 2, 2, 20, 64, weight=0.01, learning_rate=4e-4, batch_size=64, epochs=10, precision=MIXED, measured=2
    ),
    "celeba": WAESettings(
        64, 4, 4, 64, 512, weight=0.025, learning_rate=1e-4, batch_size=16, epochs=15, precision=MIXED, measured=3
    ),
    # Not in the paper: small enough for a few minutes on a CPU.
    "digits": WAESettings(12, 2, 1, 8, 32, weight=0.01, learning_rate=3e-3, batch_size=64, epochs=20, measured=2),
}


class WAE(nn.Module):
    """An autoencoder whose codes an adversary compares with standard normal ones.

    Args:
        first: takes what a method gives, returns (B, 32, H, W).
        shape: (C, H, W) of the images; height and width must be multiples of 2 to the power of `depth`.
        settings: sizes.

    Example:
        >>> from misconv.paper.methods import method_named
        >>> from misconv.mfa import MFA
        >>> wae = WAE(method_named("misconv_dmfa").first_layer(1), (1, 28, 28), SETTINGS["mnist"])
        >>> wae.encode(MFA.point(torch.rand(2, 1, 28, 28))).shape, wae.decode(torch.randn(5, 20)).shape
        (torch.Size([2, 20]), torch.Size([5, 1, 28, 28]))
    """

    def __init__(self, first: nn.Module, shape: tuple[int, int, int], settings: WAESettings) -> None:
        super().__init__()
        step = 2**settings.depth
        if shape[1] % step or shape[2] % step:
            raise ValueError(
                f"shape must have a height and a width that are multiples of {step}, got {describe(shape)}"
            )
        self.latent = settings.latent
        self.encoder = nn.ModuleDict({"first": first, "rest": _encoder(shape, settings)})
        self.decoder = _decoder(shape, settings)
        self.discriminator = _discriminator(settings)

    def encode(self, *inputs: Any) -> Tensor:
        """Codes (B, latent) of what a method gives of some images."""
        out: Tensor = self.encoder["rest"](self.encoder["first"](*inputs))
        return out

    def decode(self, codes: Tensor) -> Tensor:
        """Images (B, C, H, W), with values from 0 to 1."""
        out: Tensor = self.decoder(codes)
        return out

    def reconstruct(self, inputs: Any) -> Tensor:
        """Images (B, C, H, W) by their codes; `inputs` is what a method gives of some images."""
        return self.decode(call_model("the encoder", self.encode, inputs))

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Reconstructions, and what the discriminator says, (B, 1), before its sigmoid.

        It says it of codes that are standard normal; of those of the images, for its own learning; and again of those,
        for that of the encoder. Gradients of the second reach the discriminator alone, those of the third all but it.
        """
        codes = self.encode(*inputs)
        fixed = {name: parameter.detach() for name, parameter in self.discriminator.named_parameters()}
        judged = functional_call(self.discriminator, fixed, (codes,))
        prior = torch.randn_like(codes)
        return self.decode(codes), self.discriminator(prior), self.discriminator(codes.detach()), judged


def reconstruction_loss(images: Tensor, x: Tensor, observed: Tensor) -> Tensor:
    """Mean squared error over seen values; others are not read.

    The authors' code divides by the number of all values, so that images with larger holes count less.

    Example:
        >>> x, observed = torch.tensor([[[[0.5, float("nan")]]]]), torch.tensor([[[[True, False]]]])
        >>> reconstruction_loss(torch.zeros(1, 1, 1, 2), x, observed).item()
        0.25
    """
    check_images("images", images)
    if x.shape != images.shape:
        raise ValueError(f"x must have the shape of images, {tuple(images.shape)}, got {describe(x)}")
    hidden = ~check_observed("observed", observed, x).expand_as(x)
    error = (images - x.masked_fill(hidden, 0)).masked_fill(hidden, 0)
    return error.square().sum() / (~hidden).sum().clamp_min(1)


def adversarial_losses(of_prior: Tensor, of_codes: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross entropies: of the discriminator, and of the encoder, whose codes shall be taken for normal ones."""
    ones, zeros = torch.ones_like(of_prior), torch.zeros_like(of_codes)
    loss = F.binary_cross_entropy_with_logits
    return loss(of_prior, ones) + loss(of_codes, zeros), loss(judged, ones)


def wae_job(
    wae: WAE,
    settings: WAESettings,
    take: Take,
    data: IncompleteImages,
    rows: tuple[Tensor, Tensor],
    fabric: Fabric,
    *,
    test: Callable[[WAE], EpochRecord] = lambda wae: {},
    seed: int = 0,
    identity: dict[str, Any] | None = None,
) -> Job:
    """The training of an autoencoder, for `misconv._train.train` in one process.

    The authors take a step for the discriminator and then one for the rest; here both parts step at once.

    Args:
        take: how a method gives some of the images, by their indices; see `misconv.paper.methods.Method`.
        data: the same images, for what is to be reconstructed: what they show.
        rows: indices of the images to learn from, and of those that choose the epoch.
        test: measures the autoencoder after every epoch; what it returns is recorded, and chooses nothing.
        identity: what else must agree for a checkpoint to be continued.
    """
    learned, held = rows
    now = 0

    def begin(epoch: int) -> None:
        nonlocal now
        now = epoch

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        chosen = learned[batch.to(learned.device)]
        images, *judged = call_model("the autoencoder", model, take(chosen))
        reconstruction = reconstruction_loss(images, *data.at(chosen))
        own, fooled = adversarial_losses(*judged)
        figures = torch.stack([reconstruction, own, fooled]).detach().double() * len(batch)
        return reconstruction + settings.weight * (own + fooled), figures

    def summarise(sums: list[float]) -> EpochRecord:
        names = ("reconstruction", "discriminator", "adversary")
        return {name: total / len(learned) for name, total in zip(names, sums, strict=True)}

    def evaluate(model: nn.Module) -> tuple[float, EpochRecord]:
        measured = test(wae) if (now + 1) % settings.measured == 0 else {}
        if len(held) == 0:
            return -math.inf, measured
        total = torch.zeros((), device=held.device, dtype=torch.float64)
        for part in held.split(4 * settings.batch_size):
            with fabric.autocast():
                images = wae.reconstruct(take(part))
            total += reconstruction_loss(images, *data.at(part)) * len(part)
        error = float(total) / len(held)
        return error, {"validation_reconstruction": error, **measured}

    known = {"task": "wae", "wae": as_json(settings), **(identity or {})}
    return Job(
        wae, loss, 3, summarise, evaluate, len(learned), settings.batch_size, settings.learning_rate, seed=seed,
        begin=begin, resident=data.images.device.type == "cuda", settings=known, name="WAE",
    )  # fmt: skip


def _encoder(shape: tuple[int, int, int], settings: WAESettings) -> nn.Module:
    layers: list[nn.Module] = [_convolution(WIDTH, settings.width)]
    inside = settings.width
    for level in range(settings.depth):
        width = settings.width * 2**level
        for _ in range(settings.blocks):
            layers += _block(inside, width)
            inside = width
        layers.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
    flat = _flat(shape, settings)
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(flat, settings.latent))


def _decoder(shape: tuple[int, int, int], settings: WAESettings) -> nn.Module:
    width = settings.width * 2 ** (settings.depth - 1)
    small = (width, *(size // 2**settings.depth for size in shape[1:]))
    layers = [nn.Linear(settings.latent, _flat(shape, settings)), nn.Unflatten(1, small), nn.ReLU()]
    for level in reversed(range(settings.depth)):
        layers.append(nn.ConvTranspose2d(width, width, 3, stride=2, padding=1, output_padding=1))
        for number in range(settings.blocks):
            is_last = number == settings.blocks - 1
            narrow = settings.width * 2 ** max(level - 1, 0) if is_last else width
            layers += _block(width, narrow)
            width = narrow
    return nn.Sequential(*layers, _convolution(width, width), _convolution(width, shape[0]), nn.Sigmoid())


def _discriminator(settings: WAESettings) -> nn.Module:
    """Without the sigmoid at its end, which is in the loss."""
    layers: list[nn.Module] = [nn.Linear(settings.latent, settings.hidden), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(settings.hidden, settings.hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(settings.hidden, 1))


def _flat(shape: tuple[int, int, int], settings: WAESettings) -> int:
    """Numbers of an image at the smallest scale."""
    pixels = (shape[1] >> settings.depth) * (shape[2] >> settings.depth)
    return (settings.width << (settings.depth - 1)) * pixels


def _block(inside: int, width: int) -> tuple[nn.Module, ...]:
    return _convolution(inside, width), nn.ReLU(), nn.BatchNorm2d(width)


def _convolution(inside: int, width: int) -> nn.Module:
    return nn.Conv2d(inside, width, 3, padding=1)

"""supMIWAE (Ipsen, Mattei and Frellsen 2022): a classifier marginalised over completions of a variational autoencoder.

Encoder and decoder are small convolutional networks; all parts are trained together from incomplete images, by the
importance-weighted bound

    log p(x_o, y) ≥ E log (1/S) Σ_s p(x_o | z_s) p(z_s) / q(z_s | x_o) · p(y | x_o, x_m,s),

with z_s drawn from the encoder and the missing pixels x_m,s from the decoder. Answers are averaged with the same
weights, without the label.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv import impute
from misconv.paper.inputs import point

__all__ = ["SupMIWAE", "SupMIWAESettings", "log_weights"]

_DEVIATIONS = (0.03, 1.0)  # of a pixel: a smaller one would give a constant background any likelihood


@dataclass(frozen=True)
class SupMIWAESettings:
    """Sizes of the autoencoder, and its training.

    Args:
        width: channels of the first scale; every step down doubles them. steps: down.
        latent: numbers of a code. samples: of every image in a step of the training.
    """

    width: int = 32
    steps: int = 3
    latent: int = 64
    samples: int = 3
    learning_rate: float = 1e-3


class SupMIWAE(nn.Module):
    """A classifier of complete images, and the autoencoder that completes them.

    Args:
        classifier: takes an MFA.
        shape: (C, H, W). settings: sizes.
        samples: how many completions are averaged in evaluation.
    """

    def __init__(
        self, classifier: nn.Module, shape: tuple[int, int, int], settings: SupMIWAESettings, samples: int
    ) -> None:
        super().__init__()
        self.classifier, self.settings, self.samples = classifier, settings, samples
        self.shape, (channels, height, width) = shape, shape
        widths = [settings.width * 2**n for n in range(settings.steps)]
        step = 2**settings.steps
        self.small = (widths[-1], -(-height // step), -(-width // step))
        inside = [channels + 1, *widths]
        down = [(nn.Conv2d(a, b, 4, 2, 1), nn.ReLU()) for a, b in zip(inside, widths, strict=False)]
        # Padded to a multiple of the step, so that every size goes down and comes back.
        self.margin = (0, self.small[2] * step - width, 0, self.small[1] * step - height)
        flat = math.prod(self.small)
        self.encoder = nn.Sequential(
            *(part for block in down for part in block), nn.Flatten(), nn.Linear(flat, 2 * settings.latent)
        )
        outside = [*widths[-2::-1], widths[0]]
        up = [(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.ReLU()) for a, b in zip(widths[::-1], outside, strict=True)]
        self.decoder = nn.Sequential(
            nn.Linear(settings.latent, flat), nn.ReLU(), nn.Unflatten(1, self.small),
            *(part for block in up for part in block), nn.Conv2d(widths[0], 2 * channels, 3, padding=1),
        )  # fmt: skip

    def encode(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the code, (B, latent) each, from what is seen."""
        given = torch.cat([impute.zero(x, observed) - 0.5 * observed, observed.to(x.dtype)], 1)
        # In full precision, whatever the networks have: likelihoods are sums over thousands of pixels.
        mean, log = self.encoder(F.pad(given, self.margin)).float().chunk(2, 1)
        return mean, (log.clamp(-8, 8) / 2).exp()

    def decode(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of every pixel, (…, C, H, W) each."""
        _, height, width = self.shape
        out = self.decoder(z.flatten(0, -2)).float()[..., :height, :width]
        mean, raw = torch.unflatten(out, 0, z.shape[:-1]).chunk(2, -3)
        low, high = _DEVIATIONS
        return mean.sigmoid(), low + (high - low) * (raw - 2).sigmoid()

    def complete(
        self, x: Tensor, observed: Tensor, samples: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Completions (S, B, C, H, W), and the logarithms of their importance weights, (S, B)."""

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)

        mean, deviation = self.encode(x, observed)
        z = mean + deviation * normal((samples, *mean.shape))
        pixels, spread = self.decode(z)
        drawn = pixels + spread * normal(pixels.shape)
        logs = log_weights(x, observed, (pixels, spread), z, (mean, deviation))
        return torch.where(observed, x, drawn), logs

    def forward(self, x: Tensor, observed: Tensor, labels: Tensor | None = None) -> Tensor:
        """Log-probabilities (B, classes); with labels the bound of log p(x_o, y), (B,)."""
        if labels is None:
            return self._answer(x, observed)
        samples = self.settings.samples
        images, logs = self.complete(x, observed, samples)
        said = -F.cross_entropy(self.classifier(point(images.flatten(0, 1))), labels.repeat(samples), reduction="none")
        return (logs + said.view(samples, -1)).logsumexp(0) - math.log(samples)

    def _answer(self, x: Tensor, observed: Tensor) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(0)
        images, logs = self.complete(x, observed, self.samples, generator)
        said = torch.stack([self.classifier(point(each)).log_softmax(1) for each in images])  # (S, B, classes)
        return (logs.log_softmax(0).unsqueeze(2) + said).logsumexp(0)


def log_weights(
    x: Tensor, observed: Tensor, pixels: tuple[Tensor, Tensor], z: Tensor, code: tuple[Tensor, Tensor]
) -> Tensor:
    """log p(x_o | z) + log p(z) − log q(z | x_o), (S, B); pixels that are not seen are not read.

    Args:
        pixels: mean and deviation that the decoder says, (S, B, C, H, W) each.
        z: (S, B, latent). code: mean and deviation that the encoder says, (B, latent) each.
    """
    seen = observed.expand_as(x)
    likelihood = _log_normal(impute.zero(x, observed), *pixels).where(seen, 0).sum((2, 3, 4))
    prior = _log_normal(z, torch.zeros_like(z), torch.ones_like(z)).sum(2)
    return likelihood + prior - _log_normal(z, *code).sum(2)


def _log_normal(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return -((x - mean) / deviation).square() / 2 - deviation.log() - math.log(2 * math.pi) / 2

"""Completions that a density draws, and classifiers that average their answers over them.

In training a classifier is given one completion, drawn anew every time; in evaluation it averages its probabilities
over several, which are the same in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from misconv.mfa import MFA
from misconv.paper.inputs import point

__all__ = ["SAMPLES", "Draw", "Sampled", "draw_completion", "draw_factors", "mean_log"]

SAMPLES = 16  # completions of every test image
Draw = Callable[..., MFA]  # (p, generator) -> p with some of its doubt drawn


def draw_completion(p: MFA, generator: torch.Generator | None = None) -> MFA:
    """One completion of every image, as if it were certain.

    Example:
        >>> x = torch.rand(2, 1, 4, 4)
        >>> bool((draw_completion(MFA.point(x)).mean == x).all())
        True
    """
    means, noise = _drawn(p, generator)
    deviation = torch.where(noise > 0, noise, 1).sqrt() * (noise > 0)  # the root has no gradient at 0
    drawn = means + deviation * _normal(means.shape, means, generator)
    return point(drawn if p.observed is None else torch.where(p.observed, p.means[:, 0], drawn))


def draw_factors(p: MFA, generator: torch.Generator | None = None) -> MFA:
    """What pixels share is drawn, what each has by itself stays as noise: an MFA of one component, without factors."""
    means, noise = _drawn(p, generator)
    factors = p.factors.new_zeros(len(p), 1, 0, *means.shape[1:])
    logits = p.logits.new_zeros(len(p), 1)
    return MFA(logits, means.unsqueeze(1), factors, noise.unsqueeze(1), p.observed, check=False)


def _drawn(p: MFA, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Component and factors drawn: the mean of what is left, and its variance, (B, C, H, W) each.

    `MFA.sample` looks at weights when it draws a component, which cannot be captured in a CUDA graph.
    """
    means, factors, noise = p.pinned()
    latent = _normal(p.factors.shape[:3], p.means, generator)  # (B, K, L)
    if p.logits.shape[1] == 1:
        shared = torch.einsum("bl,blchw->bchw", latent[:, 0], factors[:, 0])
        return means[:, 0] + shared, noise[:, 0]
    # Gumbel's trick: the largest of log-weights plus Gumbel noise is each component with its probability.
    uniform = torch.rand(p.logits.shape, generator=generator, device=p.device).clamp(1e-20, 1 - 1e-7)
    chosen = (p.logits - (-uniform.log()).log()).argmax(1, keepdim=True)
    weight = torch.zeros_like(p.logits).scatter_(1, chosen, 1.0)  # (B, K)
    shared = torch.einsum("bkl,bklchw->bchw", latent * weight.unsqueeze(2), factors)
    return torch.einsum("bk,bkchw->bchw", weight, means) + shared, torch.einsum("bk,bkchw->bchw", weight, noise)


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


class Sampled(nn.Module):
    """A classifier of MFAs that is given draws of them.

    Args:
        classifier: takes an MFA.
        draw: `draw_completion` or `draw_factors`.
        samples: how many draws of every image are averaged in evaluation.
    """

    def __init__(self, classifier: nn.Module, draw: Draw, samples: int = SAMPLES) -> None:
        super().__init__()
        self.classifier, self.draw, self.samples = classifier, draw, samples

    def forward(self, p: MFA) -> Tensor:
        """Logits of one draw in training, the logarithms of mean probabilities in evaluation."""
        if self.training:
            out: Tensor = self.classifier(self.draw(p))
            return out
        generator = torch.Generator(p.device).manual_seed(0)
        return mean_log([self.classifier(self.draw(p, generator)).log_softmax(1) for _ in range(self.samples)])


def mean_log(logs: list[Tensor]) -> Tensor:
    """Logarithms of the mean of probabilities whose logarithms these are.

    Example:
        >>> mean_log([torch.tensor([0.25]).log(), torch.tensor([0.75]).log()]).exp()
        tensor([0.5000])
    """
    return torch.stack(logs).logsumexp(0) - math.log(len(logs))

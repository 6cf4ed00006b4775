"""Predictions with doubt: how much of it is due to the pixels that are missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from misconv._checks import check_size, describe
from misconv._modes import evaluating
from misconv.mfa import MFA

__all__ = ["Prediction", "predictive"]


@dataclass
class Prediction:
    """What a classifier says of incomplete images, averaged over what they may be."""

    probabilities: Tensor  # (B, classes), the mean over completions
    variance: Tensor  # (B, classes), how much the probability of each class varies with the missing pixels
    share: Tensor  # (B, classes), that variance as a share of all doubt about "is it this class?", p(1 − p)


def predictive(
    network: Callable[[MFA], Tensor],
    p: Any,
    samples: int = 32,
    *,
    generator: torch.Generator | None = None,
) -> Prediction:
    """Class probabilities averaged over completions, and the part of their doubt that missing pixels make.

    For each class the doubt whether an image belongs to it is q(1 − q), with q its probability. By the law of total
    variance this is the doubt that stays when all pixels are known, E[qᵢ(1 − qᵢ)], plus the variance of qᵢ over
    completions i; the second part would go away if nothing were missing.

    Args:
        network: takes an MFA and returns logits (B, classes), for example a network from `misconv.convert`. It is asked
            in evaluation mode, whatever mode it comes in: dropout and batches would be taken for missing pixels.
        p: the images, as their density describes them (an `MFA`); or, for a network that was converted with a density,
            the images themselves, with NaN where they are missing, in any form that `misconv.observe` takes.
        samples: completions to draw; the error of all results falls with their root.
        generator: source of randomness.

    Example:
        >>> network = lambda p: p.mean.flatten(1) * torch.tensor([1.0, -1.0])
        >>> one = torch.ones(1, 1, 1, 1, 2)
        >>> sure = predictive(network, MFA.point(one[0]))
        >>> sure.probabilities.sum().item(), sure.variance.max().item()
        (1.0, 0.0)
        >>> unsure = predictive(network, MFA(torch.zeros(1, 1), one, torch.zeros(1, 1, 0, 1, 1, 2), one))
        >>> bool((unsure.share > 0.05).all())
        True
    """
    if not callable(network):
        raise TypeError(f"network must be a module or function MFA -> logits (B, classes), got {describe(network)}")
    check_size("samples", samples)
    with evaluating(network), torch.no_grad():
        ask = getattr(network, "to_mfa", None)
        if ask is not None and not isinstance(p, MFA):
            p = _named(ask, p)
        if not isinstance(p, MFA):
            raise TypeError(f"p must be a misconv.MFA, which a density gives for (x, observed), got {describe(p)}")
        mean = square = torch.zeros((), device=p.device)
        for number in range(1, samples + 1):
            completion = p.sample(1, generator=generator)[0]
            point = MFA.point(completion)
            logits = network(point) if ask is None else _named(network, point)
            _check_logits(logits, p, number, mean)
            q = logits.double().softmax(1)
            # Welford's update, which does not subtract large numbers.
            before = q - mean
            mean = mean + before / number
            square = square + before * (q - mean)
    variance = square / samples
    doubt = mean * (1 - mean)
    share = torch.where(doubt == 0, 0, variance / doubt).clamp(0, 1)  # NaN stays NaN
    kind = p.dtype
    return Prediction(mean.to(kind), variance.to(kind), share.to(kind))


def _check_logits(logits: Any, p: MFA, number: int, mean: Tensor) -> None:
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(p) or logits.is_complex():
        raise ValueError(f"network must return logits (B, classes), with B = {len(p)}, got {describe(logits)}")
    if number > 1 and logits.shape != mean.shape:
        raise ValueError(
            f"network must return logits of the same classes every time, {mean.shape[1]}, got {describe(logits)}"
        )


def _named(ask: Callable[[Any], Any], images: Any) -> Any:
    """What a converted network or its density says of images; `p` is what our caller calls them."""
    try:
        return ask(images)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"p must be a misconv.MFA, or images that the network takes: {error}") from error

"""How good a density is by itself: the figures of the paper's Table 7."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from misconv._checks import check_images, check_observed, check_size, describe
from misconv._modes import evaluating
from misconv.mfa import MFA
from misconv.paper.acflow import ACFlow

__all__ = ["SMALLEST", "check_metrics", "most_probable", "psnr_and_ssim", "quality"]

SMALLEST = 6  # pixels: the window of SSIM, 11×11, reaches 5 beyond the image, and reflection needs one more than that


@torch.no_grad()
def quality(
    density: Callable[[Tensor, Tensor], MFA] | ACFlow, images: Tensor, observed: Tensor, *, batch_size: int = 256
) -> dict[str, float]:
    """How well a density predicts what was hidden from it: log-likelihood, and errors of its most probable imputation.

    Each figure is computed for every image by itself, then averaged over images:

    - `nll`: −log density of the hidden values of an image given the seen ones, in nats.
    - `mse`: squared error of the most probable imputation, summed over the hidden values of an image, as it is in the
      paper's table; `mse_per_pixel` is the same for one hidden value: all errors over the number of hidden values.
    - `psnr`: peak signal-to-noise ratio of the filled image, all pixels of it, in decibels.
    - `ssim`: structural similarity of the filled image, all pixels of it, with the usual Gaussian window (σ = 1.5
      pixels, 11×11, the image reflected at its edges).
    - `images`: their number; `exact`: how many of them, once clamped, were filled without any error. Their PSNR is
      infinite, so they do not count in the mean of `psnr`, which is infinite only where there is no other image.

    The hidden values are replaced by 0 before the density is called. For PSNR and SSIM the imputation is clamped to
    0 … 1, the range of an image; for MSE it is taken as it is. Both, and the sums, are computed in float64.

    Args:
        density: any module or function ``(x, observed) -> MFA`` whose MFA holds the observed pixels, and no others, as
            exact; or an `ACFlow`, whose best guess is filled in. A module is evaluated in eval mode, and left as it
            was.
        images: complete images (N, C, H, W), uint8, or floating point between 0 and 1.
        observed: bool (N, 1, H, W) or (N, C, H, W), what the density may see.
        batch_size: how many images at a time.

    Example:
        >>> def density(x, observed):
        ...     flat = torch.full_like(x, 0.5).unsqueeze(1)
        ...     return MFA(x.new_zeros(len(x), 1), flat, flat.unsqueeze(2)[:, :, :0], flat).fix(x, observed)
        >>> observed = torch.ones(2, 1, 8, 8, dtype=torch.bool)
        >>> observed[..., :4] = False
        >>> found = quality(density, torch.ones(2, 1, 8, 8), observed)
        >>> found["mse"], found["mse_per_pixel"], round(found["psnr"], 2)  # ¼ at 32 of 64 pixels
        (8.0, 0.25, 9.03)
    """
    images, observed = _check(images, observed)
    check_size("batch_size", batch_size)
    parts = []
    with evaluating(density):
        for x, seen in zip(images.split(batch_size), observed.split(batch_size), strict=True):
            x = x.to(torch.get_default_dtype()) / 255 if x.dtype == torch.uint8 else x
            parts.append(_each(density, x, seen))
    each = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    exact = each["psnr"].isposinf()
    return {
        "nll": float(each["nll"].mean()),
        "mse": float(each["error"].mean()),
        "mse_per_pixel": float(each["error"].sum() / each["hidden"].sum()),
        "psnr": float(each["psnr"][~exact].mean()) if not exact.all() else math.inf,
        "ssim": float(each["ssim"].mean()),
        "exact": float(exact.sum()),
        "images": float(len(images)),
    }


def most_probable(p: MFA) -> Tensor:
    """The most probable images (B, C, H, W): the mean of the component with the largest weight.

    The most probable point of one Gaussian is its mean. The highest point of a mixture has no closed form; the mean of
    its heaviest component is the usual approximation.

    Example:
        >>> means = torch.tensor([0.25, 0.75]).view(1, 2, 1, 1, 1)
        >>> p = MFA(torch.tensor([[0.0, 1.0]]), means, means.unsqueeze(2)[:, :, :0], means)
        >>> most_probable(p).item(), round(p.mean.item(), 2)
        (0.75, 0.62)
    """
    return p.means[torch.arange(len(p), device=p.device), p.logits.argmax(-1)]


def _each(density: Callable[[Tensor, Tensor], MFA] | ACFlow, x: Tensor, observed: Tensor) -> dict[str, Tensor]:
    """The figures of every image, (B,) each."""
    hidden = ~observed.expand_as(x)
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    guess, log_prob = _answer(density, x, observed)
    truth, filled = x.to(wide), guess.to(wide)
    psnr, ssim = psnr_and_ssim(filled.clamp(0, 1), truth)
    return {
        "nll": -log_prob.to(wide),
        "error": (filled - truth).masked_fill(~hidden, 0).square().sum((1, 2, 3)),
        "hidden": hidden.sum((1, 2, 3)),
        "psnr": psnr,
        "ssim": ssim,
    }


def _answer(density: Callable[[Tensor, Tensor], MFA] | ACFlow, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """The filled images, and the log density (B,) of what was hidden; images are filled without a look at that."""
    hidden = ~observed.expand_as(x)
    shown = x.masked_fill(hidden, 0)
    if isinstance(density, ACFlow):
        return density.impute(shown, observed), density.log_prob(x, observed)
    p = density(shown, observed)
    _check_answer(p, x, observed)
    return most_probable(p), p.log_prob(x, hidden)


def check_metrics() -> None:
    """Say before any training that torchmetrics is not there."""
    try:
        from torchmetrics.functional import image  # noqa: F401
    except ImportError as error:
        raise ImportError("PSNR and SSIM come from torchmetrics: pip install 'misconv[paper]'") from error


def psnr_and_ssim(filled: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """PSNR, and SSIM with its usual Gaussian window, of every image from 0 to 1, (B,) each."""
    check_metrics()
    from torchmetrics.functional import image as metrics

    options: dict[str, Any] = {"data_range": 1.0, "reduction": "none"}
    with filled.device:  # torchmetrics makes tensors on the default device
        psnr = metrics.peak_signal_noise_ratio(filled, truth, dim=(1, 2, 3), **options)
        ssim = metrics.structural_similarity_index_measure(filled, truth, **options)
    assert isinstance(ssim, Tensor)  # one result was asked for
    return psnr, ssim


def _check(images: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        check_images("images", images)
        low, high = images.aminmax()
        if not (low >= 0 and high <= 1):  # NaN is neither
            raise ValueError(
                f"images must be complete, with values between 0 and 1, got {low.item():.6g} to {high.item():.6g}"
            )
    elif images.dim() != 4 or 0 in images.shape:
        raise ValueError(f"images must have shape (N, C, H, W) with no empty dimension, got {describe(images)}")
    if min(images.shape[-2:]) < SMALLEST:
        raise ValueError(f"images must have at least {SMALLEST}×{SMALLEST} pixels for SSIM, got {describe(images)}")
    observed = check_observed("observed", observed, images, check=True)
    if observed.all():
        raise ValueError("observed must hide at least one pixel, for that is what the density has to predict")
    return images, observed


def _check_answer(p: MFA, x: Tensor, observed: Tensor) -> None:
    if not isinstance(p, MFA):
        raise TypeError(f"density must return a misconv.MFA, got {describe(p)}")
    if p.shape != x.shape:
        raise ValueError(f"density must return an MFA of the images' shape {tuple(x.shape)}, got {p}")
    # What is not exact would be marginal instead of conditional; what is exact has no likelihood that could be scored.
    if p.observed is None or not torch.equal(p.observed.expand_as(x), observed.expand_as(x)):
        raise ValueError("density must return an MFA that holds the observed pixels, and no others, as exact")

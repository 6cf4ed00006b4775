"""Errors of images over some of their pixels alone, as metrics of torchmetrics.

A measure of the whole image tells little of what was filled in: most pixels were seen, and are equal by construction.
And where both images hold zeros in their holes, it counts those as exact. These metrics count the pixels they are told
to, `where`, and never read another: NaN, infinity or garbage there changes no bit of the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from misconv._checks import check_images, check_positive, check_size, describe

try:
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError("metrics need torchmetrics: pip install 'misconv[paper]'") from error

__all__ = ["MaskedMSE", "MaskedPSNR", "MaskedSSIM"]

WIDE = torch.float64  # sums over many images keep their digits
WINDOWS = ("gaussian", "uniform")


class _Masked(Metric):
    """What they have in common: sums, and settings that must agree."""

    settings: Tensor

    def merge_state(self, incoming_state: Any) -> None:
        """Add the state of a metric with the same settings."""
        theirs = incoming_state["settings"] if isinstance(incoming_state, dict) else incoming_state.settings
        if not torch.equal(theirs.cpu(), self.settings.cpu()):
            raise ValueError(
                f"incoming_state must be of a metric with the same settings, {self.settings.tolist()}, got "
                f"{theirs.tolist()}"
            )
        super().merge_state(incoming_state)


class MaskedMSE(_Masked):
    r"""Mean squared error over the counted values of all images.

    .. math:: \mathrm{MSE} = \sum_{i \in \mathrm{where}} (\hat x_i - x_i)^2 \, / \, |\mathrm{where}|

    NaN where nothing has been counted. `update` takes

    - prediction, target: images (B, C, H, W), floating point.
    - where: bool (B, 1, H, W) or (B, C, H, W), True for the pixels to count.

    Args:
        options: those of `torchmetrics.Metric`.

    Example:
        >>> target, prediction = torch.zeros(1, 1, 2, 2), torch.tensor([[[[0.5, float("nan")], [0.1, 0.0]]]])
        >>> metric = MaskedMSE()
        >>> metric.update(prediction, target, where=torch.tensor([[[[True, False], [False, True]]]]))
        >>> metric.compute().item()
        0.125
    """

    is_differentiable = True
    higher_is_better = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _add_states(self)

    def update(self, prediction: Tensor, target: Tensor, where: Tensor) -> None:
        """Count some pixels of a batch of images."""
        error, counted = _squared_error(prediction, target, where)
        self.total = self.total + error.sum()
        self.count = self.count + counted.sum()

    def compute(self) -> Tensor:
        """The mean, a number."""
        return self.total / self.count


class MaskedPSNR(_Masked):
    r"""Peak signal-to-noise ratio over the counted values, in decibels.

    .. math:: \mathrm{PSNR} = 10 \log_{10}(\mathrm{data\_range}^2 / \mathrm{MSE})

    MSE is that of `MaskedMSE` over all images, as in torchmetrics; with ``per_image=True`` the ratio is that of every
    image, averaged over the images of which anything is counted, as in the paper. It is infinite without any error,
    and NaN where nothing has been counted. `update` takes what that of `MaskedMSE` takes.

    Args:
        data_range: the largest value minus the smallest one that pixels may have.
        per_image: whether to average the ratio over images.
        options: those of `torchmetrics.Metric`.

    Example:
        >>> metric = MaskedPSNR(data_range=1.0)
        >>> metric.update(torch.full((1, 1, 2, 2), 0.1), torch.zeros(1, 1, 2, 2), where=torch.ones(1, 1, 2, 2).bool())
        >>> round(metric.compute().item(), 4)
        20.0
    """

    is_differentiable = True
    higher_is_better = True
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, data_range: float = 1.0, *, per_image: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.data_range, self.per_image = check_positive("data_range", data_range), bool(per_image)
        _add_states(self, self.data_range, self.per_image)

    def update(self, prediction: Tensor, target: Tensor, where: Tensor) -> None:
        """Count some pixels of a batch of images."""
        error, counted = _squared_error(prediction, target, where)
        if self.per_image:
            some = counted > 0
            self.total = self.total + self._ratio(error[some] / counted[some]).sum()
            self.count = self.count + some.sum()
        else:
            self.total = self.total + error.sum()
            self.count = self.count + counted.sum()

    def compute(self) -> Tensor:
        """The ratio, a number."""
        mean = self.total / self.count
        return mean if self.per_image else self._ratio(mean)

    def _ratio(self, error: Tensor) -> Tensor:
        return 10 * (self.data_range**2 / error).log10()


class MaskedSSIM(_Masked):
    r"""Structural similarity, averaged over the windows all of whose pixels are counted.

    With means μ, variances σ² and the covariance of both images in the window around a pixel, weighted by the window,
    c₁ = (0.01 · data_range)² and c₂ = (0.03 · data_range)²:

    .. math:: \mathrm{SSIM} = \frac{(2 \mu_{\hat x} \mu_x + c_1)(2 \sigma_{\hat x x} + c_2)}
        {(\mu_{\hat x}^2 + \mu_x^2 + c_1)(\sigma_{\hat x}^2 + \sigma_x^2 + c_2)}

    A window that touches a pixel which is not counted has no structure to compare, and is left out. The mean is that
    of every image over its windows and channels, then over the images that have such a window; NaN where none has.
    Where all is counted, this is torchmetrics' `StructuralSimilarityIndexMeasure`, whose window is as large as sigma
    asks for: 11 pixels for 1.5. `update` takes what that of `MaskedMSE` takes.

    The paper's authors measured with scikit-image's former defaults: ``MaskedSSIM(2.0, window="uniform", size=7,
    reflect=False, sample_covariance=True)``.

    Args:
        data_range: the largest value minus the smallest one that pixels may have.
        window: "gaussian" or "uniform" weights.
        size: of the window, odd.
        sigma: of the Gaussian, in pixels.
        reflect: whether images, and `where` with them, are reflected at their edges, so that every pixel has a window.
            If not, windows that reach beyond an edge are left out.
        sample_covariance: whether variances are those of a sample, divided by n - 1 instead of n, the window's pixels.
        options: those of `torchmetrics.Metric`.

    Example:
        >>> target = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> where = torch.ones(1, 1, 32, 32, dtype=torch.bool)
        >>> where[..., :8] = False
        >>> metric = MaskedSSIM(data_range=1.0)
        >>> metric.update(target.masked_fill(~where, float("nan")), target, where)
        >>> metric.compute().item()
        1.0
    """

    is_differentiable = True
    higher_is_better = True
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(
        self,
        data_range: float = 1.0,
        *,
        window: str = "gaussian",
        size: int = 11,
        sigma: float = 1.5,
        reflect: bool = True,
        sample_covariance: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.data_range, self.sigma = check_positive("data_range", data_range), check_positive("sigma", sigma)
        if window not in WINDOWS:
            raise ValueError(f"window must be one of {', '.join(map(repr, WINDOWS))}, got {describe(window)}")
        self.window, self.size = window, check_size("size", size)
        if self.size % 2 == 0 or self.size == 1:
            raise ValueError(f"size must be an odd number of at least 3, got {describe(size)}")
        self.reflect, self.sample_covariance = bool(reflect), bool(sample_covariance)
        numbers = (self.data_range, WINDOWS.index(window), self.size, self.sigma, self.reflect, self.sample_covariance)
        _add_states(self, *numbers)

    def update(self, prediction: Tensor, target: Tensor, where: Tensor) -> None:
        """Count some pixels of a batch of images."""
        first, second, counted = _counted(prediction, target, where)
        self._check_size(first)
        if self.reflect:
            first, second, counted = (_reflected(t, self.size // 2) for t in (first, second, counted.to(WIDE)))
        whole = F.max_pool2d(1 - counted.to(WIDE), self.size, stride=1) == 0  # (B, C, windows, windows)
        middle = (first + second).sum((1, 2, 3), keepdim=True) / (2 * counted.sum((1, 2, 3), keepdim=True)).clamp_min(1)
        ssim = self._map(first, second, middle).masked_fill(~whole, 0).sum((1, 2, 3))
        windows = whole.sum((1, 2, 3))
        some = windows > 0
        self.total = self.total + (ssim[some] / windows[some]).sum()
        self.count = self.count + some.sum()

    def compute(self) -> Tensor:
        """The mean, a number."""
        return self.total / self.count

    def _map(self, first: Tensor, second: Tensor, middle: Tensor) -> Tensor:
        """SSIM of every window.

        Second moments are those around `middle`, (B, 1, 1, 1): those of large values would lose their digits.
        """
        c1, c2 = (0.01 * self.data_range) ** 2, (0.03 * self.data_range) ** 2
        first, second = first - middle, second - middle
        moments = torch.cat([first, second, first * first, second * second, first * second])
        m1, m2, s11, s22, s12 = self._means(moments).chunk(5)
        number = self.size**2
        scale = number / (number - 1) if self.sample_covariance else 1.0
        v1, v2 = scale * (s11 - m1 * m1).clamp_min(0), scale * (s22 - m2 * m2).clamp_min(0)
        covariance = scale * (s12 - m1 * m2)
        m1, m2 = m1 + middle, m2 + middle
        return (2 * m1 * m2 + c1) * (2 * covariance + c2) / ((m1 * m1 + m2 * m2 + c1) * (v1 + v2 + c2))

    def _means(self, images: Tensor) -> Tensor:
        """Weighted means of all windows, along rows and then along columns."""
        channels = images.shape[1]
        offsets = torch.arange(self.size, dtype=WIDE, device=images.device) - self.size // 2
        weights = (-0.5 * (offsets / self.sigma) ** 2).exp() if self.window == "gaussian" else torch.ones_like(offsets)
        line = (weights / weights.sum()).expand(channels, 1, 1, self.size)
        return F.conv2d(F.conv2d(images, line, groups=channels), line.transpose(2, 3), groups=channels)

    def _check_size(self, images: Tensor) -> None:
        least = self.size // 2 + 1 if self.reflect else self.size
        if min(images.shape[-2:]) < least:
            height, width = images.shape[-2:]
            raise ValueError(
                f"prediction must have at least {least}×{least} pixels for a window of {self.size}×{self.size}, got "
                f"{height}×{width}"
            )


def _add_states(metric: Metric, *settings: float) -> None:
    """What is added up over batches and processes; and the settings.

    A collection of torchmetrics takes metrics for one whose states agree after the first batch. Sums of different
    metrics may, for example where nothing is counted; with their settings they never do.
    """
    for name in ("total", "count"):
        metric.add_state(name, default=torch.zeros((), dtype=WIDE), dist_reduce_fx="sum")
    metric.add_state("settings", default=torch.tensor(settings, dtype=WIDE), dist_reduce_fx="max")


def _squared_error(prediction: Tensor, target: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Of every image: the sum of squared errors over its counted values, and their number."""
    first, second, counted = _counted(prediction, target, where)
    return (first - second).square().sum((1, 2, 3)), counted.sum((1, 2, 3))


def _counted(prediction: Tensor, target: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both images, 0 where nothing is counted, and what is counted of every channel."""
    check_images("prediction", prediction)
    check_images("target", target)
    if target.shape != prediction.shape or target.device != prediction.device:
        raise ValueError(
            f"target must have the shape of prediction, {tuple(prediction.shape)}, and its device, "
            f"{prediction.device}, got {describe(target)}"
        )
    if not isinstance(where, Tensor) or where.dtype != torch.bool:
        raise TypeError(f"where must be a bool tensor, True for the pixels to count, got {describe(where)}")
    batch, channels, height, width = prediction.shape
    allowed = dict.fromkeys(((batch, 1, height, width), (batch, channels, height, width)))
    if tuple(where.shape) not in allowed:
        shapes = " or ".join(str(shape) for shape in allowed)
        raise ValueError(f"where must have shape {shapes} to fit the images, got {describe(where)}")
    if where.device != prediction.device:
        raise ValueError(f"where must be on the device of the images, {prediction.device}, got {describe(where)}")
    counted = where.expand_as(prediction)
    first, second = (images.to(WIDE).masked_fill(~counted, 0) for images in (prediction, target))
    return first, second, counted


def _reflected(images: Tensor, pad: int) -> Tensor:
    return F.pad(images, (pad, pad, pad, pad), mode="reflect")

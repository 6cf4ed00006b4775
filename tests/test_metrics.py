"""Metrics over some pixels, against torchmetrics where all are counted, and against loops where they are not."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure

import misconv
from misconv.metrics import MaskedMSE, MaskedPSNR, MaskedSSIM
from tests.reference import tolerance

AUTHORS: dict[str, Any] = {
    "data_range": 2.0, "window": "uniform", "size": 7, "reflect": False, "sample_covariance": True,
}  # fmt: skip
KINDS = {
    "mse": lambda: MaskedMSE(),
    "psnr": lambda: MaskedPSNR(2.0),
    "psnr per image": lambda: MaskedPSNR(2.0, per_image=True),
    "ssim": lambda: MaskedSSIM(),
    "ssim of the authors": lambda: MaskedSSIM(**AUTHORS),
}


def images(batch: int = 4, channels: int = 2, height: int = 20, width: int = 17) -> tuple[Tensor, Tensor, Tensor]:
    """Prediction, target and what to count: most pixels of all channels, but for a corner and one more."""
    target = torch.rand(batch, channels, height, width)
    prediction = target + 0.2 * torch.randn_like(target)
    where = torch.ones(batch, 1, height, width, dtype=torch.bool)
    where[:, :, :4, :5] = False
    where[0, :, -2, -3] = False
    return prediction, target, where


def measured(metric: Any, *batches: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    for batch in batches:
        metric.update(*batch)
    found: Tensor = metric.compute()
    return found


# Against others --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_range", [1.0, 2.0])
def test_where_all_is_counted_they_are_those_of_torchmetrics(data_range: float) -> None:
    prediction, target, where = images()
    everything = torch.ones_like(where)
    theirs: Any
    for ours, theirs in (
        (MaskedPSNR(data_range), PeakSignalNoiseRatio(data_range=data_range)),
        (MaskedSSIM(data_range), StructuralSimilarityIndexMeasure(data_range=data_range)),
        (
            MaskedSSIM(data_range, window="uniform", size=7),
            StructuralSimilarityIndexMeasure(gaussian_kernel=False, kernel_size=7, data_range=data_range),
        ),
    ):
        halves = [tuple(t[part] for t in (prediction, target, everything)) for part in (slice(1), slice(1, None))]
        for half in halves:
            ours.update(*half)
            theirs.update(*half[:2])
        torch.testing.assert_close(
            ours.compute().to(target.dtype), theirs.compute(), rtol=tolerance("exact"), atol=1e-9
        )


def test_errors_are_those_of_counted_values_alone() -> None:
    prediction, target, _ = images()
    where = torch.rand(target.shape) > 0.6  # channels by themselves
    a, b, chosen = (t.double().cpu().numpy() for t in (prediction, target, where))
    chosen = chosen.astype(bool)
    mse = np.mean((a[chosen] - b[chosen]) ** 2)
    each = [10 * np.log10(4 / np.mean((x[c] - y[c]) ** 2)) for x, y, c in zip(a, b, chosen, strict=True)]
    batch = (prediction, target, where)
    assert measured(MaskedMSE(), batch).item() == pytest.approx(mse)
    assert measured(MaskedPSNR(2.0), batch).item() == pytest.approx(10 * np.log10(4 / mse))
    assert measured(MaskedPSNR(2.0, per_image=True), batch).item() == pytest.approx(np.mean(each))


def by_hand(prediction: Tensor, target: Tensor, where: Tensor, size: int, data_range: float) -> float:
    """scikit-image's definition, window by window: uniform weights, covariances of a sample, no window beyond an edge."""
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    counted = where.expand_as(target).cpu().numpy()
    a, b = (t.double().cpu().numpy() for t in (prediction, target))
    means = []
    for n in range(len(a)):
        found = []
        for place in np.ndindex(a.shape[1], a.shape[2] - size + 1, a.shape[3] - size + 1):
            window = (n, place[0], slice(place[1], place[1] + size), slice(place[2], place[2] + size))
            if counted[window].all():
                x, y = a[window].ravel(), b[window].ravel()
                ((xx, xy), (_, yy)), mx, my = np.cov(x, y), x.mean(), y.mean()
                found.append((2 * mx * my + c1) * (2 * xy + c2) / ((mx**2 + my**2 + c1) * (xx + yy + c2)))
        means += [np.mean(found)] if found else []
    return float(np.mean(means))


@pytest.mark.parametrize("counted", ["everything", "some", "channels"])
def test_ssim_of_the_authors_window_by_window(counted: str) -> None:
    prediction, target, where = images(3, 2, 12, 11)
    if counted == "everything":
        where = torch.ones_like(where)
    elif counted == "channels":
        where = where.expand_as(target).clone()
        where[1, 0] = False
        where[2, :, 5, 5] = False  # in every window but few
    found = measured(MaskedSSIM(**AUTHORS), (prediction, target, where))
    assert found.item() == pytest.approx(by_hand(prediction, target, where, 7, 2.0), rel=1e-6)


def test_a_window_that_touches_a_pixel_that_is_not_counted_is_left_out() -> None:
    """Of a reflected image also one that touches its reflection: what is left is a mean over the map of torchmetrics."""
    prediction, target, where = images()
    metric: Any = StructuralSimilarityIndexMeasure(data_range=1.0, return_full_image=True)
    _, every = metric(prediction, target)
    pad = torch.nn.functional.pad((~where).to(target.dtype), (5, 5, 5, 5), mode="reflect")
    whole = (torch.nn.functional.conv2d(pad, torch.ones(1, 1, 11, 11)) < 0.5).expand_as(target)
    assert 0 < int(whole.sum()) < whole.numel()
    each = [every[n][whole[n]].mean() for n in range(len(target))]
    found = measured(MaskedSSIM(1.0), (prediction, target, where))
    torch.testing.assert_close(found.to(target.dtype), torch.stack(each).mean(), rtol=tolerance("exact"), atol=1e-9)


def test_zeros_in_the_holes_of_both_images_inflate_the_usual_psnr() -> None:
    """By 10 log₁₀ of the share that is counted, about 2 dB where 37 % is missing; not so here."""
    prediction, target, where = images(8, 1, 20, 20)
    where = torch.rand(where.shape) > 0.37
    filled = [image.masked_fill(~where, 0) for image in (prediction, target)]
    usual: Any = PeakSignalNoiseRatio(data_range=1.0)
    gained = usual(*filled) - measured(MaskedPSNR(1.0), (*filled, where))
    share = where.double().mean().item()
    assert gained.item() == pytest.approx(-10 * math.log10(share), rel=1e-4)
    assert 1.7 < gained.item() < 2.4


# What they never read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e30])
def test_other_values_change_no_bit(kind: str, poison: float) -> None:
    prediction, target, where = images()
    clean = measured(KINDS[kind](), (prediction, target, where))
    spoilt = (t.masked_fill(~where, poison) for t in (prediction, target))
    assert torch.equal(measured(KINDS[kind](), (*spoilt, where)), clean)
    assert clean.isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_and_only_of_counted_values(kind: str) -> None:
    prediction, target, where = images()
    spoilt = prediction.masked_fill(~where, math.nan).requires_grad_()
    KINDS[kind]()(spoilt, target, where).backward()
    assert spoilt.grad is not None
    assert spoilt.grad.isfinite().all()
    assert not spoilt.grad[~where.expand_as(target)].any()
    assert spoilt.grad.any()


# What they add up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_batches_merge_and_start_again(kind: str) -> None:
    prediction, target, where = images()
    whole = measured(KINDS[kind](), (prediction, target, where))
    parts = [tuple(t[part] for t in (prediction, target, where)) for part in (slice(3), slice(3, None))]
    batches = measured(KINDS[kind](), *parts)  # type: ignore[arg-type]
    first, second = KINDS[kind](), KINDS[kind]()
    first.update(*parts[0])
    second.update(*parts[1])
    second.merge_state(first)
    for found in (batches, second.compute()):
        torch.testing.assert_close(found, whole)
    second.reset()
    assert torch.equal(measured(second, (prediction, target, where)), whole)


def test_metrics_of_other_settings_do_not_merge() -> None:
    batch = images()
    one, same, other = MaskedPSNR(1.0), MaskedPSNR(1.0), MaskedPSNR(255.0)
    for metric in (one, same, other):
        metric.update(*batch)
    before = one.compute()
    with pytest.raises(ValueError, match=r"the same settings, \[1.0, 0.0\], got \[255.0, 0.0\]"):
        one.merge_state(other)
    one.merge_state(same)
    torch.testing.assert_close(one.compute(), before)


@pytest.mark.parametrize("offset", [0.0, 1e6, 1e9])
def test_ssim_of_values_far_from_zero(offset: float) -> None:
    """Large squares that are subtracted from each other would leave nothing of a small range."""
    x, where = torch.rand(1, 1, 24, 24, dtype=torch.float64), torch.rand(1, 1, 24, 24) > 0.01
    assert measured(MaskedSSIM(), (x + offset, x + offset, where)).item() == pytest.approx(1, abs=1e-12)
    near = measured(MaskedSSIM(), (x + offset, x + 0.1 * torch.rand_like(x) + offset, where)).item()
    assert 0.5 < near < 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_which_nothing_is_counted_adds_nothing(kind: str) -> None:
    prediction, target, where = images()
    nothing = where.clone()
    nothing[1:] = False
    assert torch.equal(
        measured(KINDS[kind](), (prediction, target, nothing)),
        measured(KINDS[kind](), (prediction[:1], target[:1], where[:1])),
    )
    assert measured(KINDS[kind](), (prediction, target, torch.zeros_like(where))).isnan()


def test_a_collection_does_not_take_one_for_another() -> None:
    """Their sums agree after a batch of which nothing is counted, or one without any error."""
    first, second = torch.rand(2, 1, 12, 12), torch.rand(2, 1, 12, 12)
    every = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    metrics: dict[str, Any] = {
        "mse": MaskedMSE(), "psnr": MaskedPSNR(per_image=True), "range": MaskedPSNR(2.0, per_image=True),
        "ssim": MaskedSSIM(), "small": MaskedSSIM(size=7), "author": MaskedSSIM(window="uniform"),
    }  # fmt: skip
    alone = {name: metric.clone() for name, metric in metrics.items()}
    together = MetricCollection(metrics)
    for batch in ((first, second, ~every), (first, first, ~every), (first, second, every)):
        together.update(*batch)
        for metric in alone.values():
            metric.update(*batch)
    assert together.compute() == {name: metric.compute() for name, metric in alone.items()}
    assert len({value.item() for value in together.compute().values()}) == len(metrics)


def test_without_any_error() -> None:
    _, target, where = images()
    assert measured(MaskedMSE(), (target, target, where)) == 0
    assert measured(MaskedPSNR(), (target, target, where)) == math.inf
    assert measured(MaskedSSIM(), (target, target, where)).item() == pytest.approx(1)


# What is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ((None, 0, 0), TypeError, "prediction must be a torch.Tensor of images (B, C, H, W), got None"),
        ((0, torch.ones(4, 2, 20, 16), 0), ValueError, "target must have the shape of prediction, (4, 2, 20, 17), and"),
        (
            (0, torch.ones(4, 2, 20, 17).int(), 0),
            TypeError,
            "target must be a floating-point image, got a int32 tensor",
        ),
        (
            (0, 0, torch.ones(4, 1, 20, 17)),
            TypeError,
            "where must be a bool tensor, True for the pixels to count, got a",
        ),
        (
            (0, 0, torch.ones(4, 3, 20, 17).bool()),
            ValueError,
            "where must have shape (4, 1, 20, 17) or (4, 2, 20, 17) to fit the images, got a bool tensor of shape",
        ),
    ],
)
def test_bad_images(batch: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    given = [good if isinstance(bad, int) else bad for good, bad in zip(images(), batch, strict=True)]
    for metric in KINDS.values():
        with pytest.raises(kind) as error:
            metric().update(*given)
        assert str(error.value).startswith(message)


def test_images_smaller_than_the_window() -> None:
    small = images(1, 1, 6, 5)
    with pytest.raises(ValueError, match="prediction must have at least 6×6 pixels for a window of 11×11, got 6×5"):
        MaskedSSIM().update(*small)
    with pytest.raises(ValueError, match="prediction must have at least 7×7 pixels for a window of 7×7, got 6×5"):
        MaskedSSIM(**AUTHORS).update(*small)
    MaskedSSIM(size=9).update(*small)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_range": 0}, "data_range must be a finite number above 0, got 0"),
        ({"window": "round"}, "window must be one of 'gaussian', 'uniform', got 'round'"),
        ({"size": 8}, "size must be an odd number of at least 3, got 8"),
        ({"size": 1}, "size must be an odd number of at least 3, got 1"),
        ({"sigma": -1.0}, "sigma must be a finite number above 0, got -1.0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedSSIM(**options)


def test_they_are_there_without_a_second_import(monkeypatch: pytest.MonkeyPatch) -> None:
    assert misconv.metrics.MaskedSSIM is MaskedSSIM
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.delitem(sys.modules, "misconv.metrics")
    with pytest.raises(ImportError, match=r"metrics need torchmetrics: pip install 'misconv\[paper\]'"):
        importlib.import_module("misconv.metrics")

"""What `assess` finds, against densities whose quality is known, and pixel by pixel against scipy."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.ndimage import distance_transform_edt
from scipy.stats import norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import misconv
from misconv import MFA, SMFA, assess, impute, missing
from misconv._assess.scores import crps
from misconv._math import coverage_level
from misconv.assess import Assessment
from tests.reference import dense_log_prob, random_mfa

SHAPE = (2, 6, 7)


class Truth(nn.Module):
    """The density that images were drawn from, or one whose deviation is `wide` times as large."""

    def __init__(self, components: int = 1, wide: float = 1.0) -> None:
        super().__init__()
        p = random_mfa(1, components, 2, SHAPE)
        self.wide = wide
        for name in ("logits", "means", "factors", "noise"):
            self.register_buffer(name, getattr(p, name))
        self.batch_norm = nn.BatchNorm2d(2)  # has a mode that could be forgotten
        self.calls: list[tuple[Tensor, Tensor]] = []

    def prior(self, count: int) -> MFA:
        tensors = (self.logits, self.means, self.factors, self.noise)
        return MFA(*(t.expand(count, *t.shape[1:]) for t in tensors))

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        assert not self.training
        assert not self.batch_norm.training
        assert not torch.is_grad_enabled()
        self.calls.append((x, observed))
        p = self.prior(len(x)).condition(x, observed)
        return MFA(p.logits, p.means, p.factors * self.wide, p.noise * self.wide**2, p.observed)


def incomplete(truth: Truth, count: int = 40, planes: int = 1) -> tuple[Tensor, Tensor]:
    """Images drawn from the density, of which some pixels are missing."""
    x = truth.prior(count).sample(1, generator=torch.Generator(truth.means.device).manual_seed(1))[0]
    observed = torch.rand(count, planes, *SHAPE[1:]) < 0.8
    return x, observed


# Scores of single pixels ---------------------------------------------------------------------------------------------


def mixtures(count: int = 12, components: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.randn(count, components).softmax(1),
        torch.randn(count, components),
        torch.rand(count, components) + 0.05,
        2 * torch.randn(count),
    )


def test_crps_is_the_integral_of_the_squared_difference_of_distributions(dtype: torch.dtype) -> None:
    weights, means, variances, y = mixtures()
    found = crps(weights, means, variances, y)
    for pixel in range(len(y)):
        w, m, s = (t[pixel].double().cpu().numpy() for t in (weights, means, variances.sqrt()))
        value = float(y[pixel])
        below, _ = quad(lambda t, w=w, m=m, s=s: (w @ norm.cdf(t, m, s)) ** 2, -12, value, limit=200)
        above, _ = quad(lambda t, w=w, m=m, s=s: (w @ norm.sf(t, m, s)) ** 2, value, 12, limit=200)
        assert float(found[pixel]) == pytest.approx(below + above, rel=1e-6 if dtype == torch.float64 else 1e-4)


def test_crps_is_that_of_monte_carlo() -> None:
    weights, means, variances, y = mixtures(4)
    parts = torch.distributions.Normal(means, variances.sqrt())
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(weights), parts)
    draws, others = mixture.sample((200_000,)), mixture.sample((200_000,))
    expected = (draws - y).abs().mean(0) - 0.5 * (draws - others).abs().mean(0)
    torch.testing.assert_close(crps(weights, means, variances, y), expected, rtol=0.02, atol=0.005)


def test_the_level_of_a_pixel_is_that_of_scipy() -> None:
    weights, means, variances, y = mixtures()
    cdf = (weights.cpu().numpy() * norm.cdf(y.cpu()[:, None], means.cpu(), variances.sqrt().cpu())).sum(1)
    np.testing.assert_allclose(coverage_level(weights, means, variances, y).cpu(), np.abs(2 * cdf - 1), atol=1e-6)


def test_a_pixel_without_variance() -> None:
    """A certain density: the score is the absolute error, and the truth lies inside only where it is met."""
    one, zero = torch.ones(2, 1), torch.zeros(2, 1)
    y = torch.tensor([0.0, 3.0])
    torch.testing.assert_close(crps(one, zero, zero, y), y)
    torch.testing.assert_close(coverage_level(one, zero, zero, y), torch.tensor([0.0, 1.0]))


# The whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("components", [1, 3])
def test_the_true_density_is_believed(components: int) -> None:
    """Intervals hold what they claim within sampling error, and so does the deviation."""
    truth = Truth(components)
    report = assess(truth, *incomplete(truth, 1000), seed=3)
    assert report.coverage_50 == pytest.approx(0.5, abs=0.02)
    assert report.coverage_90 == pytest.approx(0.9, abs=0.02)
    assert all(abs(level - found) < 0.03 for level, found in report.calibration)
    assert report.deviation == pytest.approx(report.rmse, rel=0.05)
    assert report.believable
    best = min((report.nearest_rmse, "nearest-pixel"), (report.push_pull_rmse, "push–pull"))
    first = f"The mean beats {best[1]} fill (RMSE {report.rmse:.3g} against {best[0]:.3g})"
    assert report.verdict().startswith(first)
    assert "can be believed: 5" in report.verdict() or "can be believed: 4" in report.verdict()


@pytest.mark.parametrize(("wide", "word"), [(2.0, "wide"), (0.4, "narrow")])
def test_a_wrong_width_is_named(wide: float, word: str) -> None:
    """Twice as wide: the 50 % interval holds P(|z| < 1.35) = 82 %; every proper score is worse, the mean is the same."""
    truth = Truth()
    x, observed = incomplete(truth, 400)
    good, bad = (assess(density, x, observed) for density in (truth, Truth(wide=wide)))
    assert bad.coverage_50 == pytest.approx(2 * norm.cdf(0.6745 * wide) - 1, abs=0.03)
    assert bad.rmse == pytest.approx(good.rmse)
    assert bad.deviation == pytest.approx(wide * good.deviation)
    assert not bad.believable
    assert f"but the deviation of {bad.deviation:.3g} cannot be believed, it is too {word}: " in bad.verdict()
    for name in ("nll", "marginal_nll", "crps"):
        assert getattr(bad, name) > getattr(good, name)


def test_a_verdict_names_the_better_fill_and_tails_that_are_too_light() -> None:
    truth = Truth()
    report = replace(
        assess(truth, *incomplete(truth, 50)),
        rmse=0.5, nearest_rmse=0.6, push_pull_rmse=0.4, coverage_50=0.65, coverage_90=0.89, deviation=0.45,
    )  # fmt: skip
    assert report.verdict().startswith(
        "The mean does not beat push–pull fill (RMSE 0.5 against 0.4), and the deviation"
    )
    assert "cannot be believed, it is too wide for most pixels and too narrow for some: 65 %" in report.verdict()
    level = replace(report, push_pull_rmse=0.495, coverage_50=0.5)
    assert level.verdict().startswith(
        "The mean is level with push–pull fill (RMSE 0.5 against 0.495), and the deviation"
    )
    assert "it is too wide: 65 %" in replace(report, coverage_90=0.95, deviation=0.9).verdict()
    assert "claimed / real                   0.90" in str(report)


def test_a_density_that_knows_nothing_does_not_beat_the_nearest_pixel() -> None:
    def nothing(x: Tensor, observed: Tensor) -> MFA:
        means = torch.full_like(x, 9.0).unsqueeze(1)
        return MFA(x.new_zeros(len(x), 1), means, x.new_zeros(len(x), 1, 0, *x.shape[1:]), torch.ones_like(means))

    report = assess(nothing, torch.rand(20, 1, 8, 8))
    assert report.verdict().startswith("The mean does not beat ")
    assert " fill (RMSE 8." in report.verdict()
    assert "), and the deviation of 1 cannot be believed, it is too narrow: 0 %" in report.verdict()


def halves(batch: int, height: int, width: int, **_: Any) -> Tensor:
    """The left half stays."""
    return (torch.arange(width) < width // 2).expand(batch, 1, height, width)


def test_every_figure_is_that_of_a_loop() -> None:
    truth = Truth(2)
    x, observed = incomplete(truth, 5, planes=2)
    report = assess(truth, x, observed, shape=halves, batch_size=2)
    less = observed & halves(5, *SHAPE[1:]).to(observed.device)
    with torch.no_grad():
        p = truth.eval()(x, less)
    hidden = (observed & ~less).nonzero().tolist()
    assert report.pixels == len(hidden)
    rows = []
    for b, c, i, j in hidden:
        distances = (
            distance_transform_edt(~less[b, c].cpu().numpy()) if less[b, c].any() else np.full(SHAPE[1:], np.inf)
        )
        w, m = p.weights[b].cpu().numpy(), p.means[b, :, c, i, j].cpu().numpy()
        v = (p.noise + p.factors.square().sum(2))[b, :, c, i, j].cpu().numpy()
        y, mean = float(x[b, c, i, j]), float(w @ m)
        level = abs(2 * float(w @ norm.cdf(y, m, v**0.5)) - 1)
        density = float(np.log(w @ norm.pdf(y, m, v**0.5)))
        variance = float(w @ (v + m**2)) - mean**2
        share = 1 - float(less[b].double().mean())
        rows.append([(mean - y) ** 2, variance, level <= 0.5, level <= 0.9, -density, share, distances[i, j]])
    table = np.array(rows)
    means = table.mean(0)
    near, smooth = (
        (fill(x, less) - x)[observed & ~less].square().mean().sqrt().item()
        for fill in (impute.nearest, impute.push_pull)
    )
    joint = -float(dense_log_prob(p, x, observed & ~less).sum()) / len(hidden)
    found = (report.rmse, report.deviation, report.coverage_50, report.coverage_90, report.marginal_nll)
    assert found == pytest.approx((*means[:2] ** 0.5, *means[2:5]), rel=1e-4)
    assert (report.nearest_rmse, report.push_pull_rmse, report.nll) == pytest.approx((near, smooth, joint), rel=1e-4)
    for rows_found, column in ((report.by_share, 5), (report.by_distance, 6)):
        assert sum(row.pixels for row in rows_found) == report.pixels
        for row in rows_found:
            inside = (table[:, column] > (math.inf if row.low is None else row.low + 1e-9)) & (
                table[:, column] <= (math.inf if row.high is None else row.high + 1e-9)
            )
            chosen = table[inside]
            assert row.pixels == len(chosen)
            figures = (row.rmse, row.deviation, row.coverage_50, row.coverage_90)
            assert figures == pytest.approx((*chosen[:, :2].mean(0) ** 0.5, *chosen[:, 2:4].mean(0)), rel=1e-4)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e20])
def test_missing_pixels_change_no_bit(poison: float) -> None:
    """What was missing is never read; what was hidden is never shown."""
    truth = Truth(2)
    x, observed = incomplete(truth)
    images = (x, x.where(observed, poison))
    clean, other = (assess(truth, each, observed, shape=missing.noise) for each in images)
    assert clean == other
    assert len(truth.calls) == 2
    for shown, seen in truth.calls:
        assert (seen & ~observed).sum() == 0
        assert torch.equal(shown, x.where(seen, 0))
        assert (observed & ~seen).any()


def test_regions_are_like_those_that_are_missing_or_as_told() -> None:
    truth = Truth()
    x, _ = incomplete(truth, 60)
    rows = missing.stripes(60, *SHAPE[1:], generator=torch.Generator().manual_seed(0)).to(x.device)
    assess(truth, x, rows)
    (_, seen) = truth.calls[-1]
    assert torch.equal(seen, seen[..., :1].expand(seen.shape)) or torch.equal(seen, seen[..., :1, :].expand(seen.shape))
    assess(truth, x, shape=missing.noise, fraction=0.5)
    assert (~truth.calls[-1][1]).double().mean().item() == pytest.approx(0.5)
    first, second, third = (assess(truth, x, rows, seed=seed) for seed in (0, 0, 1))
    assert first == second != third


def test_channels_that_are_missing_whole_have_a_row() -> None:
    truth = Truth()
    x, _ = incomplete(truth, 50)
    x[::2, 0] = x[1::2, 1] = math.nan
    x[:10, :] = torch.randn(10, *SHAPE)  # complete ones: of the others nothing would stay
    report = assess(truth, x)
    assert report.images <= 10
    assert [(row.label, row.low, row.high) for row in report.by_distance] == [("unseen channel", None, None)]
    assert json.loads(report.to_json())["by_distance"][0]["high"] is None


class Pictures(Dataset[Any]):
    """A data set with a length, which gives single images in one of several forms."""

    def __init__(self, x: Tensor, observed: Tensor, form: str) -> None:
        self.x, self.observed, self.form = x, observed, form

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> Any:
        if number >= len(self.x):
            raise AssertionError("there is no such image")
        x, observed = self.x[number], self.observed[number]
        coded = x.masked_fill(~observed, math.nan)
        pairs = {"pair": (x, observed), "labelled": (coded, number % 3), "three": (x, observed, number)}
        return {"nan": coded, **pairs, "dict": {"image": x, "observed": observed}}[self.form]


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "data set of NaN": lambda x, observed: Pictures(x, observed, "nan"),
    "data set of pairs": lambda x, observed: Pictures(x, observed, "pair"),
    "data set with labels": lambda x, observed: Pictures(x, observed, "labelled"),
    "data set of three": lambda x, observed: Pictures(x, observed, "three"),
    "data set of dictionaries": lambda x, observed: Pictures(x, observed, "dict"),
    "loader of NaN": lambda x, observed: DataLoader(Pictures(x, observed, "nan"), batch_size=7),
    "loader of pairs": lambda x, observed: DataLoader(TensorDataset(x, observed), batch_size=7),
    "loader with labels": lambda x, observed: DataLoader(Pictures(x, observed, "labelled"), batch_size=7),
    "loader of dictionaries": lambda x, observed: DataLoader(Pictures(x, observed, "dict"), batch_size=100),
    "generator": lambda x, observed: (pair for pair in zip(x.split(9), observed.split(9), strict=True)),
    "array": lambda x, observed: x.masked_fill(~observed, math.nan).cpu().numpy(),
    "masked array": lambda x, observed: np.ma.MaskedArray(x.cpu().numpy(), mask=(~observed).cpu().numpy()),
    "NaN": lambda x, observed: x.masked_fill(~observed, math.nan),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limit", [None, 23])
def test_images_in_every_form_give_the_same(form: str, limit: int | None) -> None:
    truth = Truth()
    x, observed = incomplete(truth, planes=2)
    expected = assess(truth, x, observed, batch_size=16, limit=limit)
    assert assess(truth, FORMS[form](x, observed), batch_size=16, limit=limit) == expected
    sizes = [len(shown) for shown, _ in truth.calls]
    assert max(sizes) <= 16
    assert sum(sizes) == 2 * expected.images  # those of which something is hidden
    assert (limit or 40) * 0.8 < expected.images <= (limit or 40)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int64])
def test_integers_keep_their_values(dtype: torch.dtype) -> None:
    truth = Truth()
    images = (100 * torch.rand(20, *SHAPE)).to(dtype)
    expected = assess(truth, images.to(torch.get_default_dtype()))
    assert assess(truth, images) == assess(truth, images.cpu().numpy()) == expected
    assert assess(truth, list(images)) == expected


def test_observed_that_is_inverted_is_noticed() -> None:
    x, observed = torch.rand(20, *SHAPE), torch.rand(20, 1, *SHAPE[1:]) < 0.6
    for options in ({}, {"shape": misconv.missing.square}):
        with pytest.warns(UserWarning, match="what is observed of every image is one constant value") as caught:
            assess(Truth(), x.masked_fill(~observed, 0.25), ~observed, **options)
        assert caught[0].filename == __file__


def test_the_density_keeps_its_mode_and_its_type() -> None:
    truth = Truth().to(torch.float32)
    truth.batch_norm.eval()
    x, observed = incomplete(truth)
    report = assess(truth, x.double(), observed)
    assert truth.training
    assert not truth.batch_norm.training
    assert truth.calls[0][0].dtype == torch.float32
    assert report == assess(truth, x.float(), observed)
    with pytest.raises(ValueError, match="images must be finite wherever"):
        assess(truth, x / 0, observed)
    assert truth.training


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_full(kind: torch.dtype) -> None:
    truth = Truth()
    x, observed = incomplete(truth)

    def rounded(x: Tensor, observed: Tensor) -> MFA:
        return truth.eval()(x, observed).to(kind)

    found, expected = assess(rounded, x, observed), assess(truth, x, observed)
    assert found.rmse == pytest.approx(expected.rmse, rel=0.01)
    assert found.nll == pytest.approx(expected.nll, rel=0.05)


def test_several_sizes_need_a_shape() -> None:
    density = misconv.UNetDMFA(channels=1, rank=1)
    images = [torch.rand(1, 8, 8), torch.rand(1, 8, 8), torch.rand(1, 12, 10)]
    assert assess(density, images, shape=missing.square).images == 3
    with pytest.raises(
        ValueError, match=r"images must have one size where shape is None.* got \(8, 8\) and \(12, 10\)"
    ):
        assess(density, images)


# How it is told ------------------------------------------------------------------------------------------------------


def report() -> Assessment:
    truth = Truth(2)
    return assess(truth, *incomplete(truth))


def test_it_prints_as_a_table() -> None:
    found = report()
    text = str(found)
    assert text.splitlines()[0] == f"{found.pixels:,} hidden pixels of {found.images} images"
    assert text.endswith(found.verdict())
    assert f"{found.rmse:.4g}" in text
    for row in (*found.by_share, *found.by_distance):
        assert f"{row.label} " in text
        assert f"{row.pixels:,} " in text
    assert max(map(len, text.removesuffix(found.verdict()).splitlines())) < 100


def test_it_is_frozen_and_becomes_json() -> None:
    found = report()
    with pytest.raises(AttributeError):
        found.rmse = 0.0  # type: ignore[misc]
    again = json.loads(found.to_json())
    assert again == found.to_dict()
    assert again["rmse"] == found.rmse
    assert again["calibration"][9] == [0.5, found.coverage_50]
    assert again["by_distance"][0]["rmse"] == found.by_distance[0].rmse


def test_the_picture_shows_the_figures() -> None:
    found = report()
    left, right = found.plot().axes
    (curve,) = (line for line in left.lines if line.get_label() == "this density")
    levels, coverage = curve.get_data()
    assert (levels[10], coverage[10]) == pytest.approx((50, 100 * found.coverage_50))
    drawn = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    assert drawn["RMSE, mean"] == [row.rmse for row in found.by_distance]
    assert drawn["deviation claimed"] == [row.deviation for row in found.by_distance]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = report()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plot draws with matplotlib: pip install 'misconv\[figures\]'"):
        found.plot()


def test_bad_arguments() -> None:
    truth = Truth()
    x, observed = incomplete(truth)
    for name, value in (("batch_size", 0), ("limit", -1), ("seed", -1), ("fraction", 1.0)):
        with pytest.raises(ValueError, match=f"{name} must"):
            assess(truth, x, observed, **{name: value})
    with pytest.raises(TypeError, match=r"density must be a module or function \(x, observed\) -> MFA, got 3"):
        assess(3, x, observed)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"density must return a misconv.MFA of images \(\d+, 2, 6, 7\) on .*, got a"):
        assess(lambda x, observed: x, x, observed)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"images must have shape \(N, C, H, W\) with no empty dimension, got"):
        assess(truth, x[0])
    with pytest.raises(ValueError, match="observed must have shape"):
        assess(truth, x, observed[:3])
    with pytest.raises(TypeError, match="observed must be None where images is not one tensor"):
        assess(truth, [x], observed)
    with pytest.raises(TypeError, match=r"images must be a tensor \(N, C, H, W\), or a Dataset, .* got 3 \(int\)"):
        assess(truth, 3)
    with pytest.raises(TypeError, match="images must yield NaN-coded images, .* as tensors or arrays, got 'a' "):
        assess(truth, "a path")
    with pytest.raises(ValueError, match='images must yield dictionaries with the key "image", got the keys'):
        assess(truth, [{"x": x}])
    with pytest.raises(ValueError, match=r"images must yield NaN-coded images, .* got an empty tuple"):
        assess(truth, [()])
    with pytest.raises(ValueError, match="images must hold at least one image, got none"):
        assess(truth, [])
    with pytest.raises(ValueError, match="images must have seen pixels that can be hidden while others stay, got none"):
        assess(truth, x, torch.zeros_like(observed))
    with pytest.raises(TypeError, match="shape must be a generator"):
        assess(truth, x, observed, shape=3)  # type: ignore[arg-type]


def test_a_fitted_mixture_is_assessed_on_other_images() -> None:
    """One of them is missing altogether, of which an SMFA would say nothing."""
    truth = Truth()
    x, observed = incomplete(truth, 300)
    observed[250] = False
    found = assess(SMFA(components=1, rank=2).fit(x[:200], observed[:200]), x[200:], observed[200:])
    assert found.believable
    assert 90 < found.images < 100
    assert found.rmse < found.nearest_rmse

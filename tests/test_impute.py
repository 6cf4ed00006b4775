"""Imputers against scikit-learn's, and that what was not seen changes no bit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.ndimage import distance_transform_edt
from sklearn.impute import KNNImputer, SimpleImputer
from torch import Tensor, nn

from misconv import MFA, impute, missing
from misconv._math.fill import _neighbours, push_pull
from tests.reference import random_mfa

POISON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "large": 1e30, "noise": None}
IMPUTERS: dict[str, Callable[[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "zero": lambda x, observed: impute.zero,
    "nearest": lambda x, observed: impute.nearest,
    "push_pull": lambda x, observed: impute.push_pull,
    "Mean": lambda x, observed: impute.Mean().fit(x, observed),
    "KNN": lambda x, observed: impute.KNN(2).fit(x, observed),
    "by_density": lambda x, observed: impute.by_density(prior),
}


def prior(x: Tensor, observed: Tensor) -> MFA:
    return random_mfa(len(x), 2, 2, (x.shape[1], x.shape[2], x.shape[3])).condition(x, observed)


def poisoned(x: Tensor, observed: Tensor, poison: str) -> Tensor:
    value = POISON[poison]
    return torch.where(observed, x, torch.randn_like(x) if value is None else value)


def table(x: Tensor, observed: Tensor) -> np.ndarray:
    """Rows of pixels with NaN for what is missing, as scikit-learn wants them."""
    return torch.where(observed, x, math.nan).double().flatten(1).cpu().numpy()


def agree(ours: Tensor, theirs: np.ndarray, tolerance: float) -> None:
    torch.testing.assert_close(ours.flatten(1).double().cpu().numpy(), theirs, rtol=tolerance, atol=tolerance)


def exact(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 1e-5


# KNN -----------------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    fitted=st.integers(1, 40),
    queries=st.integers(1, 9),
    image=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    k=st.integers(1, 12),
    share=st.sampled_from([0.03, 0.1, 0.3, 0.5, 0.9]),
    per_channel=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 999),
)
def test_knn_is_that_of_scikit_learn(
    fitted: int,
    queries: int,
    image: tuple[int, int, int],
    k: int,
    share: float,
    per_channel: tuple[bool, bool],
    seed: int,
) -> None:
    """Few donors, none, no common pixels, more neighbours than images: all of them occur here."""
    torch.manual_seed(seed)
    channels, *size = image
    x, y = torch.randn(fitted, *image, dtype=torch.float64) + 3, torch.randn(queries, *image, dtype=torch.float64) + 3
    x_seen = torch.rand(fitted, channels if per_channel[0] else 1, *size) < share
    y_seen = torch.rand(queries, channels if per_channel[1] else 1, *size) < share
    known = x_seen.expand(x.shape).any(0).flatten()
    if not known.any():
        return
    filled = impute.KNN(k).fit(x, x_seen)(y, y_seen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns and rows that are all missing
        expected = KNNImputer(n_neighbors=k, keep_empty_features=True).fit(table(x, x_seen)).transform(table(y, y_seen))
    np.testing.assert_allclose(
        filled.flatten(1)[:, known].cpu().numpy(), expected[:, known.cpu().numpy()], rtol=1e-9, atol=1e-9
    )
    # What scikit-learn leaves out has the value that `Mean` gives it.
    mean = impute.Mean().fit(x, x_seen)(y, y_seen)
    assert torch.equal(filled.flatten(1)[:, ~known], mean.flatten(1)[:, ~known])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", ["square", "noise", "stripes"])
def test_knn_on_images(shape: str, dtype: torch.dtype) -> None:
    """Enough images and holes for several rounds of asking; large offsets do not cost digits."""
    x = (torch.randn(300, 6) @ torch.randn(6, 144) + 0.1 * torch.randn(300, 144) + 1000).view(300, 1, 12, 12).to(dtype)
    generator = torch.Generator().manual_seed(0)
    observed = getattr(missing, shape)(300, 12, 12, fraction=0.25, generator=generator, device=x.device)
    filled = impute.KNN().fit(x[:250], observed[:250])(x[250:], observed[250:])
    assert filled.dtype == dtype
    rows = table(x, observed)
    agree(
        filled,
        KNNImputer(n_neighbors=5).fit(rows[:250]).transform(rows[250:]),
        1e-9 if dtype == torch.float64 else 1e-6,
    )


def test_knn_of_the_fitted_images_themselves(dtype: torch.dtype) -> None:
    x, observed = torch.randn(30, 2, 3, 3), torch.rand(30, 1, 3, 3) < 0.6
    agree(
        impute.KNN(3).fit(x, observed)(x, observed),
        KNNImputer(n_neighbors=3).fit_transform(table(x, observed)),
        exact(dtype),
    )


def test_chunks_and_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, observed = torch.randn(60, 3, 5, 5), torch.rand(60, 3, 5, 5) < 0.4
    knn = impute.KNN(4).fit(x[:40], observed[:40])
    whole = knn(x[40:], observed[40:])
    one_by_one = torch.cat([knn(x[i : i + 1], observed[i : i + 1]) for i in range(40, 60)])
    assert torch.equal(whole, one_by_one)
    for size in (1, 50_000, 200_000):
        monkeypatch.setattr(impute, "_WORK_BYTES", size)
        monkeypatch.setattr(impute, "_PAIRS", 7 * size)
        assert torch.equal(knn(x[40:], observed[40:]), whole)


def nearest_first(x: Tensor, seen: Tensor, y: Tensor, y_seen: Tensor, k: int) -> Tensor:
    """The obvious form, pixel by pixel; of equally near images the first counts as nearer."""
    filled = y.clone()
    for q in range(len(y)):
        common = seen & y_seen[q]
        square = torch.where(common, x - y[q], 0).square().sum((1, 2, 3)) * y[q].numel() / common.sum((1, 2, 3))
        order = square.round(decimals=9).nan_to_num(math.inf).argsort(stable=True)
        for place in (~y_seen[q]).nonzero():
            c, i, j = place.tolist()
            donors = [x[n, c, i, j] for n in order.tolist() if seen[n, c, i, j] and not square[n].isnan()][:k]
            filled[q, c, i, j] = torch.stack(donors).mean()
    return filled


def test_ties_go_to_the_image_fitted_first(dtype: torch.dtype) -> None:
    """Black and white images are full of ties, and an image may be there twice."""
    x, seen = (torch.rand(80, 1, 3, 4) < 0.5).to(dtype), torch.rand(80, 1, 3, 4) < 0.7
    x[40:60], seen[40:60] = x[:20], seen[:20]
    y, y_seen = (torch.rand(30, 1, 3, 4) < 0.5).to(dtype), torch.rand(30, 1, 3, 4) < 0.7
    expected = nearest_first(x, seen, y, y_seen, 3)
    torch.testing.assert_close(impute.KNN(3).fit(x, seen)(y, y_seen), expected)


def test_more_neighbours_than_images(dtype: torch.dtype) -> None:
    x, observed = torch.randn(4, 1, 2, 2), torch.ones(4, 1, 2, 2, dtype=torch.bool)
    less = observed[:1].clone()
    less[..., 0, 0] = False
    filled = impute.KNN(100).fit(x, observed)(x[:1], less)
    torch.testing.assert_close(filled[0, 0, 0, 0], x[:, 0, 0, 0].mean())


def test_without_a_common_pixel_it_is_the_mean() -> None:
    x = torch.randn(6, 1, 1, 4)
    left = torch.tensor([True, True, False, False]).view(1, 1, 1, 4)
    knn, mean = impute.KNN(2).fit(x, (~left).expand(x.shape)), impute.Mean().fit(x, (~left).expand(x.shape))
    assert torch.equal(knn(x[:1], left), mean(x[:1], left))
    nothing = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    assert torch.equal(knn(x[:1], nothing), mean(x[:1], nothing))


def test_knn_inside_autocast() -> None:
    x, observed = torch.randn(20, 3, 4, 4), torch.rand(20, 1, 4, 4) < 0.6
    knn = impute.KNN(3).fit(x, observed)
    with torch.autocast(x.device.type, torch.bfloat16):
        inside = knn(x, observed)
    assert torch.equal(inside, knn(x, observed))


# Mean and zero -------------------------------------------------------------------------------------------------------


@given(fitted=st.integers(1, 12), channels=st.integers(1, 3), share=st.floats(0.1, 1), seed=st.integers(0, 99))
def test_mean_is_that_of_scikit_learn(fitted: int, channels: int, share: float, seed: int) -> None:
    torch.manual_seed(seed)
    x, observed = torch.randn(fitted, channels, 3, 2), torch.rand(fitted, channels, 3, 2) < share
    known = observed.any(0).flatten()
    if not known.any():
        return
    filled = impute.Mean().fit(x, observed)(x, observed).flatten(1)[:, known]
    rows = table(x, observed)[:, known.cpu().numpy()]
    agree(filled, SimpleImputer().fit_transform(rows), exact(x.dtype))


def test_a_pixel_or_a_channel_never_seen() -> None:
    x = torch.arange(1.0, 9.0).view(1, 2, 2, 2)
    observed = torch.tensor([True, True, False, False] + 4 * [False]).view(1, 2, 2, 2)
    for imputer in (impute.Mean(), impute.KNN()):
        filled = imputer.fit(x, observed)(x, observed)
        assert filled.flatten().tolist() == [1, 2, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]
    x = torch.tensor([1.0, 2.0, 30.0, 50.0, 0.0, 0.0]).view(1, 3, 1, 2)
    observed = torch.tensor([True, False, True, True, False, False]).view(1, 3, 1, 2)
    assert impute.Mean().fit(x, observed)(x, observed).flatten().tolist() == [1, 1, 30, 50, 27, 27]


def test_means_are_summed_in_float64() -> None:
    x = torch.full((20_000, 1, 1, 1), 0.1, dtype=torch.float32)
    observed = torch.ones_like(x, dtype=torch.bool)
    x = torch.cat([x, torch.tensor([1e8, -1e8], dtype=torch.float32).view(2, 1, 1, 1)])
    observed = torch.ones_like(x, dtype=torch.bool)
    torch.testing.assert_close(impute.Mean().fit(x, observed).mean.item(), 0.1 * 20_000 / 20_002, rtol=1e-6, atol=0)


def test_zero() -> None:
    x, observed = torch.randn(2, 3, 4, 4), torch.rand(2, 1, 4, 4) < 0.5
    assert torch.equal(impute.zero(x, observed), x * observed)


# From the image itself: the nearest pixel, and push–pull ---------------------------------------------------------------

SIZES = [(1, 1), (7, 5), (1, 9), (16, 16), (33, 12)]


def holes(size: tuple[int, int], planes: int, share: float) -> Tensor:
    """Three images of three channels; something is seen in each."""
    observed = torch.rand(3, planes, *size) < share
    observed[..., 0, 0] |= ~observed.flatten(2).any(2)
    return observed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_nearest_is_as_near_as_scipy_finds(size: tuple[int, int], planes: int, share: float) -> None:
    """Each pixel holds its own number, so that what is filled says where it comes from."""
    height, width = size
    numbers = torch.arange(float(height * width)).view(size).expand(3, 3, *size)
    observed = holes(size, planes, share)
    filled = impute.nearest(numbers.masked_fill(~observed, math.nan), observed)
    source = torch.stack([filled // width, filled % width], -1)  # (3, 3, H, W, 2)
    place = torch.stack([numbers // width, numbers % width], -1)
    squared = (source - place).square().sum(-1)
    seen = observed.expand(numbers.shape)
    assert (seen.flatten(2).gather(2, filled.long().flatten(2))).all()
    for b in range(3):
        for c in range(3):
            expected = distance_transform_edt(~seen[b, c].cpu().numpy()) ** 2
            np.testing.assert_array_equal(squared[b, c].cpu().numpy(), expected.round())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_push_pull_keeps_constants_and_stays_in_range(size: tuple[int, int], share: float, dtype: torch.dtype) -> None:
    observed = holes(size, 3, share)
    constant = torch.full((3, 3, *size), 0.7)
    torch.testing.assert_close(impute.push_pull(constant.masked_fill(~observed, math.nan), observed), constant)
    ramp = (torch.arange(float(size[0])).view(-1, 1) + 2 * torch.arange(float(size[1]))).expand(3, 3, *size) - 5
    filled = impute.push_pull(ramp.masked_fill(~observed, math.nan), observed)
    for limit, sign in ((math.inf, 1), (-math.inf, -1)):
        extreme = sign * (sign * ramp.masked_fill(~observed, limit)).amin((2, 3), keepdim=True)
        assert (sign * (filled - extreme) >= -100 * exact(dtype)).all()


@pytest.mark.parametrize("size", SIZES)
def test_a_relaxed_fill_keeps_constants_and_what_was_seen_and_stays_in_range(size: tuple[int, int]) -> None:
    observed = holes(size, 3, 0.5).expand(3, 3, *size)
    constant = torch.full((3, 3, *size), 0.7)
    filled = push_pull(constant.masked_fill(~observed, math.nan), observed, relaxed=True)
    torch.testing.assert_close(filled, constant)
    noise = torch.rand(3, 3, *size)
    filled = push_pull(noise.masked_fill(~observed, math.nan), observed, relaxed=True)
    assert torch.equal(filled[observed], noise[observed])
    assert filled.min() >= 0
    assert filled.max() <= noise[observed].max() + 1e-6


def test_a_relaxed_fill_is_nearer_to_a_solution_of_laplace() -> None:
    """Found by a thousand sweeps from the plain one."""
    x = torch.rand(2, 1, 24, 24)
    observed = missing.square(2, 24, 24, fraction=0.25, device=x.device)
    plain = push_pull(x, observed)
    solution = plain
    for _ in range(1000):
        solution = torch.where(observed, x, _neighbours(solution))
    relaxed = push_pull(x, observed, relaxed=True)
    assert (relaxed - solution).norm() < 0.75 * (plain - solution).norm()


def test_push_pull_is_nearer_to_a_smooth_image_than_the_nearest_pixel() -> None:
    y, x = torch.meshgrid(torch.linspace(0, 3, 32), torch.linspace(0, 3, 32), indexing="ij")
    image = (y.sin() + x.cos()).view(1, 1, 32, 32)
    observed = missing.square(1, 32, 32, fraction=0.1, generator=torch.Generator().manual_seed(0), device=image.device)
    smooth, near = (fill(image, observed) - image for fill in (impute.push_pull, impute.nearest))
    assert smooth.square().mean() < near.square().mean() / 2


@pytest.mark.parametrize("fill", [impute.nearest, impute.push_pull])
@pytest.mark.parametrize("size", SIZES)
def test_a_channel_never_seen_becomes_zero(fill: Callable[[Tensor, Tensor], Tensor], size: tuple[int, int]) -> None:
    x, observed = torch.full((2, 2, *size), math.nan), torch.zeros(2, 2, *size, dtype=torch.bool)
    x[0, 1], observed[0, 1] = 5.0, True
    filled = fill(x, observed)
    assert (filled[0, 1] == 5).all()
    assert (filled[0, 0] == 0).all()
    assert (filled[1] == 0).all()


@pytest.mark.parametrize("fill", [impute.nearest, impute.push_pull])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fills_of_every_type(fill: Callable[[Tensor, Tensor], Tensor], kind: torch.dtype) -> None:
    """Also inside autocast, where a convolution would round."""
    x, observed = torch.randn(2, 3, 40, 24).to(kind), holes((40, 24), 1, 0.02)[:2]
    filled = fill(x, observed)
    assert filled.dtype == kind
    assert filled.isfinite().all()
    assert torch.equal(filled[observed.expand(x.shape)], x[observed.expand(x.shape)])
    torch.testing.assert_close(filled.double(), fill(x.double(), observed), rtol=1e-2, atol=1e-2)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert torch.equal(fill(x, observed), filled)


@pytest.mark.parametrize("fill", [impute.nearest, impute.push_pull])
def test_fills_have_gradients(fill: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Those of the definition, and none, not NaN, at pixels that were not seen."""
    observed = holes((7, 5), 3, 0.3)
    x = torch.randn(3, 3, 7, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: fill(x.where(observed, math.nan), observed), (x,))
    poison = x.detach().masked_fill(~observed, math.nan).requires_grad_()
    (slope,) = torch.autograd.grad(fill(poison, observed).sum(), poison)
    assert (slope[~observed] == 0).all()
    torch.testing.assert_close(slope.sum(), torch.tensor(float(x.numel()), dtype=slope.dtype))


@pytest.mark.parametrize("fill", [impute.nearest, impute.push_pull])
def test_fills_compile_into_one_graph(fill: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.compiler.reset()
    x, observed = torch.randn(3, 3, 7, 5), holes((7, 5), 1, 0.3)
    compiled = torch.compile(fill, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, observed), fill(x, observed))


# All imputers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMPUTERS)
@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("poison", POISON)
def test_hidden_values_change_no_bit(name: str, planes: int, poison: str) -> None:
    x, observed = torch.randn(12, 3, 4, 4), torch.rand(12, planes, 4, 4) < 0.5
    clean, other = IMPUTERS[name](x[:8], observed[:8]), IMPUTERS[name](poisoned(x, observed, poison)[:8], observed[:8])
    expected, filled = clean(x[8:], observed[8:]), other(poisoned(x, observed, poison)[8:], observed[8:])
    assert torch.equal(expected, filled)
    assert filled.isfinite().all()
    for mine, theirs in zip(state(clean), state(other), strict=True):
        assert torch.equal(mine, theirs)


def state(imputer: object) -> list[Tensor]:
    return list(imputer.state_dict().values()) if isinstance(imputer, nn.Module) else []


@pytest.mark.parametrize("name", IMPUTERS)
def test_observed_pixels_and_complete_images_come_back_unchanged(name: str, dtype: torch.dtype) -> None:
    x, observed = torch.randn(12, 3, 4, 4), torch.rand(12, 1, 4, 4) < 0.5
    x[0, 0, 0, 0] = -0.0
    observed[:4] = True
    imputer = IMPUTERS[name](x, observed)
    filled = imputer(x, observed)
    assert filled.shape == x.shape
    assert filled.dtype == dtype
    seen = observed.expand(x.shape)
    assert torch.equal(filled[seen], x[seen])
    assert filled[0, 0, 0, 0].signbit()
    assert torch.equal(imputer(x[:4], observed[:4]), x[:4])
    given_back = x.clone()
    imputer(x, observed)
    assert torch.equal(x, given_back)  # nothing happens in place


@pytest.mark.parametrize("imputer", [impute.Mean(), impute.KNN(2)], ids=["Mean", "KNN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_result_has_the_type_of_the_images(imputer: nn.Module, dtype: torch.dtype) -> None:
    x, observed = torch.randn(6, 1, 3, 3), torch.rand(6, 1, 3, 3) < 0.6
    filled = imputer.fit(x, observed)(x.to(dtype).requires_grad_(), observed)  # type: ignore[operator]  # fit is not one of nn.Module
    assert filled.dtype == dtype
    assert not filled.requires_grad


@pytest.mark.parametrize("make", [impute.Mean, impute.KNN])
def test_fitted_imputers_pass_through_state_dicts(make: Callable[[], impute.Mean | impute.KNN]) -> None:
    x, observed = torch.randn(7, 2, 3, 3), torch.rand(7, 1, 3, 3) < 0.6
    first = make().fit(x, observed)
    second = nn.Sequential(make())
    second.load_state_dict({f"0.{name}": value for name, value in first.state_dict().items()})
    assert torch.equal(first(x, observed), second[0](x, observed))
    assert not list(first.parameters())


def test_by_density_has_gradients_and_its_parameters() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, observed: Tensor) -> MFA:
            p = random_mfa(len(x), 2, 1, (1, 3, 3))
            return MFA(p.logits, p.means + self.shift, p.factors, p.noise)  # pins nothing

    imputer = impute.by_density(Shift())
    x, observed = torch.randn(2, 1, 3, 3), torch.rand(2, 1, 3, 3) < 0.5
    filled = imputer(x, observed)
    assert torch.equal(filled[observed], x[observed])
    (slope,) = torch.autograd.grad(filled.sum(), list(imputer.parameters()))
    torch.testing.assert_close(slope, (~observed).sum().to(slope))


def test_bad_arguments() -> None:
    x, observed = torch.randn(4, 2, 3, 3), torch.rand(4, 1, 3, 3) < 0.5
    for k in (0, -1, 2.0, True, "5", None):
        with pytest.raises(ValueError, match="k must be an integer of at least 1, got"):
            impute.KNN(k)  # type: ignore[arg-type]
    for name in ("Mean", "KNN"):
        imputer = getattr(impute, name)()
        with pytest.raises(RuntimeError, match=rf"{name} must be fitted before use: call .fit\(x, observed\) first"):
            imputer(x, observed)
        with pytest.raises(
            ValueError, match="observed must be True for at least one pixel of the fitted images, got none"
        ):
            imputer.fit(x, torch.zeros_like(observed))
        imputer.fit(x, observed)
        with pytest.raises(
            ValueError, match=r"x must have the shape \(B, 2, 3, 3\) and the device .* got .* \(4, 1, 3, 3\)"
        ):
            imputer(x[:, :1], observed)
    with pytest.raises(TypeError, match=r"density must be a module or function \(x, observed\) -> MFA, got 3"):
        impute.by_density(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="density must return an MFA, got a"):
        impute.by_density(lambda x, observed: x)(x, observed)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("name", IMPUTERS)
def test_bad_images(name: str, values_are_checked: None) -> None:
    x, observed = torch.randn(4, 2, 3, 3), torch.rand(4, 1, 3, 3) < 0.5
    imputer = IMPUTERS[name](x, observed)
    with pytest.raises(TypeError, match="x must be a floating-point image"):
        imputer(x.int(), observed)
    with pytest.raises(
        ValueError, match=r"observed must have shape \(4, 1, 3, 3\) or \(4, 2, 3, 3\) to fit the images, got"
    ):
        imputer(x, observed[:2])
    x[observed.expand(x.shape)] = math.inf
    with pytest.raises(ValueError, match="x must be finite wherever it is observed, got inf"):
        imputer(x, observed)
    if name in ("Mean", "KNN"):
        with pytest.raises(ValueError, match="x must be finite wherever it is observed, got inf"):
            IMPUTERS[name](x, observed)


@pytest.mark.parametrize("make", [impute.Mean, impute.KNN])
def test_a_fitted_imputer_stays_where_it_is(make: Callable[[], impute.Mean | impute.KNN]) -> None:
    x, observed = torch.randn(6, 1, 3, 3), torch.rand(6, 1, 3, 3) < 0.6
    imputer = make().fit(x, observed).eval()
    again = imputer.fit(x.cpu(), observed.cpu())
    assert again is imputer
    assert not again.training
    assert all(buffer.device == x.device for buffer in again.buffers())
    torch.testing.assert_close(again(x, observed), make().fit(x, observed)(x, observed))
    with pytest.raises(
        ValueError, match="x must have the shape .* and the device .* of the fitted images, got .* on meta"
    ):
        imputer(x.to("meta"), observed.to("meta"))
    for call in (imputer, imputer.fit, impute.zero, impute.nearest, impute.push_pull):
        with pytest.raises(ValueError, match="observed must be on the device of the images, .*, got .* on meta"):
            call(x, observed.to("meta"))


def test_a_density_must_answer_for_the_images() -> None:
    x, observed = torch.randn(4, 2, 3, 3), torch.rand(4, 1, 3, 3) < 0.5
    with pytest.raises(
        ValueError, match=r"density must return an MFA of shape \(4, 2, 3, 3\) on .*, got one of shape \(2, 2, 3, 3\)"
    ):
        impute.by_density(lambda x, observed: random_mfa(2, 1, 1, (2, 3, 3)))(x, observed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_by_density_keeps_the_type_of_the_images(dtype: torch.dtype) -> None:
    x, observed = torch.randn(4, 2, 3, 3).to(dtype), torch.rand(4, 1, 3, 3) < 0.5
    filled = impute.by_density(lambda x, observed: random_mfa(4, 2, 1, (2, 3, 3)).to(torch.float32))(x, observed)
    assert filled.dtype == dtype
    assert torch.equal(filled[observed.expand(x.shape)], x[observed.expand(x.shape)])

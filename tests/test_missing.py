from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from misconv import missing, observe

Generate = Callable[..., Tensor]
ALL: dict[str, Generate] = {
    name: getattr(missing, name) for name in ("square", "trapezoid", "noise", "free_form", "stripes", "channels")
}
sizes = st.integers(1, 40)
fractions = st.floats(0.01, 0.99)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@pytest.mark.parametrize("name", ALL)
@given(batch=st.integers(1, 3), height=sizes, width=sizes, fraction=fractions, seed=st.integers(0, 99))
def test_any_size_and_fraction(name: str, batch: int, height: int, width: int, fraction: float, seed: int) -> None:
    observed = ALL[name](batch, height, width, fraction=fraction, generator=seeded(seed))
    planes = 3 if name == "channels" else 1
    assert observed.shape == (batch, planes, height, width)
    assert observed.dtype == torch.bool
    assert observed.is_contiguous()
    hidden = (~observed).sum((1, 2, 3))
    assert (hidden == hidden[0]).all()  # every image of a batch loses the same number of pixels
    assert hidden[0] > 0
    if height * width > 1:
        assert hidden[0] < observed[0].numel() or height == 1  # a single row is hidden whole by stripes


@pytest.mark.parametrize("name", ["trapezoid", "noise", "free_form"])
@given(height=sizes, width=sizes, fraction=fractions)
def test_exact_fractions(name: str, height: int, width: int, fraction: float) -> None:
    observed = ALL[name](2, height, width, fraction=fraction, generator=seeded())
    pixels = height * width
    wanted = min(max(round(fraction * pixels), 1), max(pixels - 1, 1))
    assert (~observed).sum((1, 2, 3)).tolist() == [wanted, wanted]


@given(height=sizes, width=sizes, fraction=fractions)
def test_squares_are_squares_as_near_as_can_be(height: int, width: int, fraction: float) -> None:
    hidden = ~missing.square(1, height, width, fraction=fraction, generator=seeded())[0, 0]
    rows, columns = hidden.any(1).sum().item(), hidden.any(0).sum().item()
    assert hidden.sum() == rows * columns  # one rectangle
    wanted = min(max(round(fraction * height * width), 1), max(height * width - 1, 1))
    small, large = min(height, width), max(height, width)
    if rows == columns:
        candidates = [side**2 for side in range(1, small + 1)]
    else:  # too flat for a square: all of the short side
        assert min(rows, columns) == small
        candidates = [small * long for long in range(1, large + 1)]
    candidates = [area for area in candidates if area < height * width or height * width == 1]
    assert abs(rows * columns - wanted) == min(abs(area - wanted) for area in candidates)


@pytest.mark.parametrize("size", [(28, 28), (32, 32), (64, 64)])
def test_a_quarter_as_in_the_paper(size: tuple[int, int]) -> None:
    hidden = ~missing.square(5, *size, fraction=1 / 4, generator=seeded())
    assert (hidden.sum((1, 2, 3)) == size[0] * size[1] // 4).all()


@pytest.mark.parametrize("name", ALL)
def test_reproducible_and_different(name: str) -> None:
    first, second, third = (ALL[name](16, 12, 10, generator=seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert not (first == first[:1]).all()  # images of a batch differ
    torch.manual_seed(0)
    fourth = ALL[name](16, 12, 10)
    torch.manual_seed(0)
    assert torch.equal(ALL[name](16, 12, 10), fourth)


@pytest.mark.parametrize("name", ALL)
def test_the_generator_draws_and_the_device_receives(name: str) -> None:
    observed = ALL[name](2, 8, 8, generator=torch.Generator().manual_seed(0), device="meta")
    assert observed.device.type == "meta"


@pytest.mark.parametrize("name", ["square", "noise", "stripes", "channels"])
def test_every_place_is_equally_likely_where_it_can_be(name: str) -> None:
    hidden = (~ALL[name](4000, 9, 9, fraction=1 / 3, generator=seeded())).double().mean(0)
    if name == "square":  # a square is drawn uniformly among its places, which the corners belong to least often
        assert hidden[0, 4, 4] > hidden[0, 0, 0] > 0
    else:
        assert ((hidden - 1 / 3).abs() < 0.05).all()


@pytest.mark.parametrize("fraction", [1 / 10, 1 / 4, 1 / 2, 3 / 4])
def test_trapezoids_touch_opposite_edges_and_slope(fraction: float) -> None:
    hidden = ~missing.trapezoid(1000, 24, 24, fraction=fraction, generator=seeded())[:, 0]
    upright = hidden.any(2).all(1)
    lying = hidden.any(1).all(1)
    assert (upright | lying).all()
    widths = hidden.sum(2)
    assert (widths[:, 0] != widths[:, -1]).float().mean() > 0.4
    # Each row of an upright one, each column of a lying one, is hidden in one piece.
    pieces = torch.minimum(
        hidden.int().diff(dim=2).clamp_min(0).sum(2).amax(1), hidden.int().diff(dim=1).clamp_min(0).sum(1).amax(1)
    )
    assert (pieces <= 1).all()


def test_the_sides_of_trapezoids_are_straight() -> None:
    hidden = ~missing.trapezoid(400, 64, 64, fraction=1 / 2, generator=seeded())[:, 0]
    line = torch.stack([torch.ones(64), torch.arange(64)], 1).double()

    def bent(upright: torch.Tensor) -> torch.Tensor:
        """By how many pixels a side is away from the line through it, if the parallel sides lie on top and bottom."""
        left = upright.int().argmax(2).double()
        sides = torch.stack([left, left + upright.sum(2)])
        return (sides - sides @ (line @ torch.linalg.pinv(line))).abs().amax((0, 2))

    assert torch.minimum(bent(hidden), bent(hidden.mT)).max() < 1.5  # by rounding to whole pixels


def test_stripes_are_bands_of_rows() -> None:
    hidden = ~missing.stripes(50, 32, 7, fraction=1 / 4, bands=4, generator=seeded())[:, 0]
    assert (hidden == hidden[:, :, :1]).all()
    assert (hidden[:, :, 0].sum(1) == 8).all()
    around = torch.cat([hidden[:, -1:, 0], hidden[:, :, 0]], 1).int().diff(dim=1)
    assert ((around == 1).sum(1) == 4).all()


def test_channels_are_whole() -> None:
    observed = missing.channels(20, 5, 5, channels=8, fraction=1 / 4, generator=seeded())
    assert observed.shape == (20, 8, 5, 5)
    assert (observed == observed[:, :, :1, :1]).all()
    assert ((~observed[:, :, 0, 0]).sum(1) == 2).all()


@pytest.mark.parametrize("name", ALL)
def test_hide_only_ever_hides(name: str) -> None:
    observed = torch.rand(4, 3, 10, 12) < 0.7
    options = {"channels": 3} if name == "channels" else {}
    less = missing.hide(observed, ALL[name], fraction=1 / 3, generator=seeded(), **options)
    assert less.shape == observed.shape
    assert not (less & ~observed).any()
    fresh = ALL[name](4, 10, 12, fraction=1 / 3, generator=seeded(), **options)
    assert torch.equal(less, observed & fresh)


def test_observe_takes_nan_and_nodata() -> None:
    x = torch.tensor([1.0, math.nan, -9999.0, 0.0]).view(1, 1, 2, 2)
    values, observed = observe(x, nodata=-9999)
    assert observed.flatten().tolist() == [True, False, False, True]
    assert values.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    values, observed = observe(torch.tensor([1.0, -math.inf]).view(1, 1, 1, 2), nodata=-math.inf)
    assert observed.flatten().tolist() == [True, False]
    complete = torch.randn(2, 3, 4, 4)
    values, observed = observe(complete)
    assert torch.equal(values, complete)
    assert observed.all()
    values, observed = observe(complete * math.nan)  # everything missing
    assert not observed.any()
    assert (values == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_bad_arguments(name: str) -> None:
    generate = ALL[name]
    for fraction in (0, 1, -0.2, 1.5, math.nan, "half", True):
        with pytest.raises(ValueError, match="fraction must lie strictly between 0 and 1, got"):
            generate(2, 8, 8, fraction=fraction)
    for arguments, argument in (
        ((0, 8, 8), "batch"),
        ((2, 0, 8), "height"),
        ((2, 8, -1), "width"),
        ((2, 8.0, 8), "height"),
    ):
        with pytest.raises(ValueError, match=f"{argument} must be an integer of at least 1, got"):
            generate(*arguments)
    with pytest.raises(TypeError, match="generator must be a torch.Generator or None, got 3"):
        generate(2, 8, 8, generator=3)


def test_bad_images_and_options() -> None:
    with pytest.raises(
        TypeError, match=r"x must be a floating-point image, got a uint8 tensor of shape \(1, 1, 2, 2\)"
    ):
        observe(torch.zeros(1, 1, 2, 2, dtype=torch.uint8))
    with pytest.raises(TypeError, match="x must be a torch.Tensor of images"):
        observe([[1.0]])
    with pytest.raises(ValueError, match=r"x must have shape \(B, C, H, W\) with no empty dimension, got"):
        observe(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="with no empty dimension"):
        observe(torch.zeros(0, 1, 2, 2))
    with pytest.raises(
        ValueError, match=r"x must be finite wherever it is observed, got inf at \(0, 0, 1, 0\) and 1 such"
    ):
        observe(torch.tensor([1.0, math.nan, math.inf, 0.0]).view(1, 1, 2, 2))
    with pytest.raises(TypeError, match="nodata must be a number or None, got 'no'"):
        observe(torch.zeros(1, 1, 2, 2), nodata="no")
    with pytest.raises(TypeError, match="observed must be a bool tensor"):
        missing.hide(torch.ones(2, 1, 4, 4))
    with pytest.raises(TypeError, match="shape must be a generator such as misconv.missing.square, got 'square'"):
        missing.hide(torch.ones(2, 1, 4, 4, dtype=torch.bool), "square")
    with pytest.raises(ValueError, match="bands must be an integer of at least 1, got 0"):
        missing.stripes(2, 8, 8, bands=0)
    with pytest.raises(ValueError, match="channels must be an integer of at least 1, got 0"):
        missing.channels(2, 8, 8, channels=0)
    with pytest.raises(ValueError, match="strokes must be an integer of at least 1"):
        missing.free_form(2, 8, 8, strokes=0)

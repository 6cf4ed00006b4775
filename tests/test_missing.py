from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given
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
@example(height=19, width=15, fraction=0.7)  # 199.5 pixels, or a little less where they are multiplied one by one
@example(height=15, width=19, fraction=0.7)
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
    wanted = min(max(round(fraction * (height * width)), 1), max(height * width - 1, 1))
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


def test_a_slanted_cut_hides_one_side_of_an_image() -> None:
    hidden = ~missing.trapezoid(400, 20, 20, fraction=1 / 2, generator=seeded(), cut=True)[:, 0]
    assert (hidden.sum((1, 2)) == 200).all()
    sides = torch.stack([hidden[:, 0], hidden[:, -1], hidden[:, :, 0], hidden[:, :, -1]], 1).all(2)  # (400, 4)
    assert (sides.sum(1) == 1).all()
    assert (sides.sum(0) > 60).all()
    upper = hidden[sides[:, 0]]
    lengths = upper.sum(1)  # of every column: they grow, or shrink, from left to right
    assert ((lengths.diff(dim=1) >= 0).all(1) | (lengths.diff(dim=1) <= 0).all(1)).all()
    assert (lengths.sub(10).abs().max(1).values <= 5).all()
    assert (lengths[:, 0] != lengths[:, -1]).float().mean() > 0.5


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
        TypeError, match=r"x must hold floating-point numbers or integers, got a bool tensor of shape \(1, 1, 2, 2\)"
    ):
        observe(torch.zeros(1, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"x must be a torch.Tensor of images .*, a numpy array or a PIL image, got"):
        observe([[1.0]])
    with pytest.raises(ValueError, match=r"x must have shape \(B, C, H, W\), or \(C, H, W\) or \(H, W\) for one image"):
        observe(torch.zeros(2))
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


# What others hold images in ----------------------------------------------------------------------------------------

READING = [[[[1, -9999], [0, 4]]]]


@pytest.mark.parametrize("kind", ["<i2", ">i2", "<i4", "<i8", "<f4", ">f4", "<f8", ">f8"])
def test_observe_takes_numpy_in_any_order_of_bytes(kind: str) -> None:
    array = np.array(READING, kind)
    array.flags.writeable = False
    values, observed = observe(array, nodata=-9999)
    assert observed.flatten().tolist() == [True, False, True, True]
    assert values.flatten().tolist() == [1, 0, 0, 4]
    assert (
        values.dtype == {"i": torch.get_default_dtype(), "f": torch.float32 if "4" in kind else torch.float64}[kind[1]]
    )
    backwards, _ = observe(array[..., ::-1], nodata=-9999)
    assert torch.equal(backwards, values.flip(3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64])
def test_observe_takes_integers_with_nodata(dtype: torch.dtype) -> None:
    values, observed = observe(torch.tensor([[[[7, 250], [0, 250]]]]).to(dtype), nodata=250)
    assert values.dtype == torch.get_default_dtype()
    assert values.flatten().tolist() == [7, 0, 0, 0]
    assert observed.flatten().tolist() == [True, False, True, False]


def test_observe_takes_masked_arrays() -> None:
    for kind in ("f4", "i4"):
        values, observed = observe(np.ma.masked_equal(np.array(READING, kind), 4))
        assert observed.flatten().tolist() == [True, True, True, False]
        assert values.flatten().tolist() == [1, -9999, 0, 0]
    values, observed = observe(np.ma.masked_equal(np.array(READING, "f4"), 4), nodata=-9999)
    assert observed.flatten().tolist() == [True, False, True, False]


def test_observe_takes_pil_images() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    values, observed = observe(image.fromarray(pixels), nodata=0)
    assert values.shape == (1, 3, 2, 4)
    assert torch.equal(values[0].cpu(), torch.tensor(pixels, device="cpu").permute(2, 0, 1).to(values.dtype))
    assert (~observed).sum() == 1
    assert observe(image.fromarray(pixels))[1].all()
    values, observed = observe(image.fromarray(np.array([[1.5, np.nan]], np.float32)))
    assert values.tolist() == [[[[1.5, 0.0]]]]
    assert observed.tolist() == [[[[True, False]]]]
    for mode in ("CMYK", "LAB", "HSV"):
        with pytest.raises(
            TypeError,
            match=f"x must be a PIL image of mode L, I, F, RGB, LA, RGBA, P or 1, got mode {mode}; convert it",
        ):
            observe(image.new(mode, (3, 2)))


@pytest.mark.parametrize(
    ("x", "nodata", "error", "message"),
    [
        (
            np.zeros((1, 1, 2, 2), np.uint8),
            -9999,
            ValueError,
            "nodata must be an integer that uint8 can hold, as x does, got -9999",
        ),
        (np.zeros((1, 1, 2, 2), np.int16), 0.5, ValueError, "nodata must be an integer that int16 can hold"),
        (np.zeros((1, 1, 2, 2), np.int16), math.nan, ValueError, "nodata must be an integer that int16 can hold"),
        (np.zeros((1, 1, 2, 2), np.float32), 10**400, ValueError, "nodata must be a number that a float can hold"),
        (np.zeros((1, 1, 2, 2), np.float32), np.zeros(3), TypeError, "nodata must be a number or None"),
        (np.zeros((1, 1, 2, 2), np.float32), np.True_, TypeError, "nodata must be a number or None"),
        (
            np.zeros((1, 1, 2, 2), bool),
            None,
            TypeError,
            "x must hold floating-point numbers or integers, got an array of bool",
        ),
        (
            np.zeros((1, 1, 2, 2), complex),
            None,
            TypeError,
            "x must hold floating-point numbers or integers, got an array of complex128",
        ),
        (np.array([[[["a"]]]]), None, TypeError, "x must hold floating-point numbers or integers"),
        (np.zeros((1, 1, 3, 4, 4)), None, ValueError, r"x must have shape \(B, C, H, W\), or \(C, H, W\)"),
        (np.zeros(4, np.int16), 0, ValueError, r"x must have shape \(B, C, H, W\), or \(C, H, W\)"),
        (None, None, TypeError, "x must be a torch.Tensor of images .* got None"),
        ("image.png", None, TypeError, "x must be a torch.Tensor of images .* got 'image.png'"),
    ],
)
def test_bad_arrays(x: Any, nodata: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        observe(x, nodata)


def test_nodata_of_numpy() -> None:
    x = torch.tensor([1.0, -3.4028234663852886e38], dtype=torch.float32).view(1, 1, 1, 2)
    for nodata in (np.float32(-3.4028235e38), np.float64(-3.4028234663852886e38), -3.4028234663852886e38):
        assert observe(x, nodata)[1].flatten().tolist() == [True, False]
    assert observe(x.round(), np.int16(1))[1].flatten().tolist() == [False, True]


def test_devices_that_are_not_there_and_sizes_beyond_memory() -> None:
    for device in ("nowhere", "cuda:99", [0], 3.5):
        with pytest.raises(ValueError, match="device must be one that this machine has, got"):
            missing.square(2, 8, 8, device=device)
    with pytest.raises(ValueError, match=r"batch, height and width must make at most 2\*\*34 pixels, got"):
        missing.noise(10**9, 10**9, 10**9)
    with pytest.raises(ValueError, match="strokes and turns must make at most 10,000 pieces, got"):
        missing.free_form(1, 8, 8, strokes=10**9)
    seen = torch.ones(2, 3, 4, 4, dtype=torch.bool)
    for drawn in (3, seen[:1], seen.float(), seen[:, :2], seen.to("meta")):
        with pytest.raises(ValueError, match=r"shape must draw bool regions \(2, 1, 4, 4\) or \(2, 3, 4, 4\), got"):
            missing.hide(seen, lambda *_, drawn=drawn, **__: drawn)

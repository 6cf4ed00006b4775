"""Every function and every class of torchvision's v2 with an image that has holes: seen pixels alone count."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image as PILImage
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import functional as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from misconv import missing, observe
from misconv._transforms.kernels import KERNELS, NATIVE, refuse
from misconv.transforms import Incomplete

BILINEAR = v2.InterpolationMode.BILINEAR
NEAREST = v2.InterpolationMode.NEAREST
SIDE = (9, 8)
DISPLACEMENT = 0.2 * torch.rand(1, *SIDE, 2, generator=torch.Generator("cpu").manual_seed(0), device="cpu") - 0.1
CORNERS = [[0, 0], [7, 0], [7, 8], [0, 8]]

# Each pixel by itself, or with statistics of all: for the seen pixels in a row torchvision says what is right.
PIXELS: dict[str, list[dict[str, Any]]] = {
    "adjust_brightness": [{"brightness_factor": f} for f in (0.0, 0.7, 1.9)],
    "adjust_contrast": [{"contrast_factor": f} for f in (0.0, 0.5, 1.0, 1.7)],
    "adjust_gamma": [{"gamma": 0.5}, {"gamma": 2.0, "gain": 1.5}],
    "adjust_hue": [{"hue_factor": f} for f in (-0.5, 0.1, 0.3)],
    "adjust_saturation": [{"saturation_factor": f} for f in (0.0, 0.5, 1.0, 2.0)],
    "autocontrast": [{}],
    "equalize": [{}],
    "grayscale_to_rgb": [{}],
    "invert": [{}],
    "normalize": [{"mean": [0.4] * 3, "std": [0.2, 0.3, 0.5]}],
    "permute_channels": [{"permutation": [2, 0, 1]}],
    "posterize": [{"bits": b} for b in (0, 3, 8)],
    "rgb_to_grayscale": [{}, {"num_output_channels": 3}],
    "solarize": [{"threshold": t} for t in (0.0, 0.5, 1.0)],
    "to_dtype": [{"dtype": torch.float32}, {"dtype": torch.float16, "scale": True}],
}
# Pixels that move and mix: the dense matrix of the transform says what is right.
MOVES: dict[str, list[dict[str, Any]]] = {
    "affine": [
        {"angle": 20.0, "translate": [1, 2], "scale": 1.2, "shear": [5.0, 0.0], "interpolation": BILINEAR},
        {"angle": 20.0, "translate": [1, 2], "scale": 0.8, "shear": [5.0, 0.0], "interpolation": NEAREST},
    ],
    "center_crop": [{"output_size": [5, 4]}, {"output_size": [12, 5]}],
    "crop": [
        {"top": 1, "left": 2, "height": 5, "width": 4},
        {"top": -2, "left": 3, "height": 9, "width": 9},
        {"top": 20, "left": 20, "height": 3, "width": 3},
    ],
    "elastic": [{"displacement": DISPLACEMENT}, {"displacement": DISPLACEMENT, "interpolation": NEAREST}],
    "five_crop": [{"size": [5, 4]}],
    "gaussian_blur": [{"kernel_size": [3, 5]}, {"kernel_size": [5, 3], "sigma": [2.0, 0.7]}],
    "horizontal_flip": [{}],
    "pad": [
        {"padding": [1, 2, 3, 4]},
        {"padding": 2, "fill": 0},
        {"padding": 2, "fill": math.nan},
        {"padding": -2},
        *({"padding": 3, "padding_mode": mode} for mode in ("edge", "reflect", "symmetric")),
    ],
    "perspective": [
        {"startpoints": CORNERS, "endpoints": [[1, 1], [6, 0], [7, 7], [0, 8]]},
        {"startpoints": CORNERS, "endpoints": [[1, 1], [6, 0], [7, 7], [0, 8]], "fill": 0, "interpolation": NEAREST},
    ],
    "resize": [
        {"size": [5, 4]},
        {"size": [5, 4], "antialias": False},
        {"size": [17, 19]},
        {"size": [5, 4], "interpolation": v2.InterpolationMode.BICUBIC},
        {"size": [14, 4], "interpolation": v2.InterpolationMode.BICUBIC, "antialias": False},
        {"size": [5, 4], "interpolation": v2.InterpolationMode.NEAREST_EXACT},
        {"size": list(SIDE)},
    ],
    "resized_crop": [
        {"top": 1, "left": 1, "height": 6, "width": 5, "size": [4, 9]},
        {"top": -3, "left": 1, "height": 9, "width": 9, "size": [4, 5]},
    ],
    "rotate": [
        {"angle": 30.0},
        {"angle": 30.0, "interpolation": BILINEAR, "expand": True, "fill": 0},
        {"angle": 90.0, "interpolation": BILINEAR},
    ],
    "ten_crop": [{"size": [5, 4]}],
    "vertical_flip": [{}],
}
# With tests of their own below.
OTHERS = {"adjust_sharpness", "erase", "gaussian_noise", "get_dimensions", "get_num_channels", "get_size", "jpeg"}


@pytest.fixture(autouse=True)
def _single_precision_by_default() -> None:
    """Rotations of torchvision that expand the image need it; images are double where they are not said to be else."""
    torch.set_default_dtype(torch.float32)


def cases(table: dict[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, arguments) for name, all_arguments in table.items() for arguments in all_arguments]


def plain(image: Tensor) -> Tensor:
    return image.as_subclass(Tensor)


def picture(*batch: int, fraction: float = 0.3, side: tuple[int, int] = SIDE) -> tuple[Tensor, Tensor]:
    """An image in (0.2, 0.8), and where it is seen, the same in all channels."""
    x = 0.2 + 0.6 * torch.rand(*batch, 3, *side, dtype=torch.float64)
    return x, torch.rand(*batch, 1, *side) > fraction


def with_holes(x: Tensor, seen: Tensor) -> Incomplete:
    return Incomplete(x.masked_fill(~seen, math.nan))


def each(result: Any) -> list[Tensor]:
    parts = [result] if isinstance(result, Tensor) else list(result)
    assert all(type(part) is Incomplete for part in parts)
    return [plain(part) for part in parts]


def test_every_function_of_torchvision_is_in_a_table() -> None:
    functions = {n for n in dir(F) if hasattr(F, f"{n}_image") and getattr(F, n).__name__ == n}
    assert functions == PIXELS.keys() | MOVES.keys() | OTHERS
    assert functions == KERNELS.keys() | NATIVE


def test_a_function_without_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="swirl cannot be applied to an Incomplete image: it is not known what"):
        refuse("swirl")(Incomplete(torch.rand(3, 4, 4)), 3)


# Functions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arguments"), cases(PIXELS))
@pytest.mark.parametrize("batch", [(), (2,), (2, 2)])
def test_pixels_and_statistics(name: str, arguments: dict[str, Any], batch: tuple[int, ...]) -> None:
    x, seen = picture(*batch)
    (result,) = each(getattr(F, name)(with_holes(x, seen), **arguments))
    images, masks, results = (t.reshape(-1, *t.shape[-3:]) for t in (x, seen, result))
    for image, mask, out in zip(images, masks, results, strict=True):
        row = tv_tensors.Image(image[:, mask[0]].unsqueeze(1))  # (C, 1, N) of the seen pixels
        expected = plain(getattr(F, name)(row, **arguments)).squeeze(1)
        assert out[:, ~mask[0]].isnan().all()
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out[:, mask[0]], expected, rtol=1e-12, atol=1e-12)


def dense(name: str, arguments: dict[str, Any]) -> list[Tensor]:
    """The transform as matrices (pixels out, pixels in), from the images that are 1 at one pixel."""
    units = torch.eye(SIDE[0] * SIDE[1], dtype=torch.float64).view(-1, 1, *SIDE)
    fill = {"fill": 0} if arguments.get("fill") is not None else {}
    moved = getattr(F, name)(tv_tensors.Image(units), **arguments | fill)
    parts = [moved] if isinstance(moved, Tensor) else moved
    return [plain(part).flatten(1).T for part in parts]


@pytest.mark.parametrize(("name", "arguments"), cases(MOVES))
def test_moves_are_means_over_what_is_seen(name: str, arguments: dict[str, Any]) -> None:
    x, seen = picture(2)
    x[1, 2], seen = x[1, 2] * 3, seen.expand(x.shape).clone()
    seen[0, 1] = torch.rand(SIDE) > 0.5  # channels may have holes of their own
    results = each(getattr(F, name)(with_holes(x, seen), **arguments))
    for result, matrix in zip(results, dense(name, arguments), strict=True):
        weight = seen.flatten(2).to(x) @ matrix.T
        expected = (x.where(seen, 0).flatten(2) @ matrix.T) / weight
        out = result.flatten(2)
        clear = (weight - 0.5).abs() > 1e-9  # of a weight of one half rounding decides
        assert torch.equal(out.isnan()[clear], (weight < 0.5)[clear])
        kept = ~out.isnan()
        torch.testing.assert_close(out[kept], expected[kept], rtol=2e-4, atol=1e-9)


@pytest.mark.parametrize(("name", "arguments"), cases(MOVES))
def test_far_from_holes_torchvisions_own_bits(name: str, arguments: dict[str, Any]) -> None:
    """What does not depend on the numbers in the holes is exactly what torchvision makes of any numbers there."""
    x, seen = picture(fraction=0.1)
    given = arguments | ({"fill": 0} if arguments.get("fill") is not None else {})
    own = [getattr(F, name)(tv_tensors.Image(x.where(seen, v)), **given) for v in (0.3, 3.7, -7.0)]
    inside = getattr(F, name)(tv_tensors.Image(torch.ones_like(x)), **given)
    parts = zip(*([part] if isinstance(part, Tensor) else part for part in (*own, inside)), strict=True)
    results = each(getattr(F, name)(with_holes(x, seen), **arguments))
    for result, (first, second, third, ones) in zip(results, (map(plain, p) for p in parts), strict=True):
        far = (first == second) & (first == third) & ((ones - 1).abs() < 1e-5)
        assert torch.equal(result[far], first[far])


@pytest.mark.parametrize(("name", "arguments"), cases(PIXELS | MOVES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
def test_complete_images_are_torchvisions_own(name: str, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    x = picture(2)[0]
    x = (x * 255).to(dtype) if dtype == torch.uint8 else x.to(dtype)
    function = getattr(F, name)
    if dtype == torch.uint8 and (name == "normalize" or arguments.get("fill") is math.nan):
        return
    own = function(tv_tensors.Image(x), **arguments)
    ones = torch.ones(1, *SIDE, dtype=torch.float64)
    inside = function(tv_tensors.Image(ones), **arguments) if name in MOVES else None
    edges = isinstance(inside, Tensor) and bool(((plain(inside) - 1).abs() > 1e-4).any())
    if edges and dtype == torch.uint8:
        with pytest.raises(TypeError, match=f"{name} makes pixels that are missing, which torch.uint8 cannot mark"):
            function(Incomplete(x), **arguments)
        return
    results = each(function(Incomplete(x), **arguments))
    wholes = [None] * len(results) if inside is None else [inside] if isinstance(inside, Tensor) else inside
    for result, expected, whole in zip(results, [own] if isinstance(own, Tensor) else own, wholes, strict=True):
        assert result.dtype == expected.dtype
        near = torch.ones(()).bool() if whole is None else (plain(whole) - 1).abs() < 1e-5
        near = near.expand(result.shape)
        assert torch.equal(result[near], plain(expected)[near])
        assert result.isnan().sum() == (0 if whole is None else (~near & result.isnan()).sum())


@pytest.mark.parametrize(
    ("name", "arguments"), [*cases(PIXELS | MOVES), ("adjust_sharpness", {"sharpness_factor": 2.0})]
)
def test_nothing_under_a_hole_is_read(name: str, arguments: dict[str, Any]) -> None:
    """A NaN has bits of its own; whichever they are, all bits of the result are the same."""
    x, seen = picture(2)
    x = x.float()
    bits = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x7FFFFFFF]).to(torch.int32)
    bits = bits[torch.randint(4, x.shape)].view(torch.float32)
    results = [
        each(getattr(F, name)(Incomplete(x.where(seen, v)), **arguments))
        for v in (torch.tensor(math.nan).float(), bits)
    ]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first.isnan(), second.isnan())
        assert torch.equal(first.nan_to_num(), second.nan_to_num())


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 2.5])
def test_sharpness(factor: float) -> None:
    x, seen = picture(2)
    (result,) = each(F.adjust_sharpness(with_holes(x, seen), factor))
    assert torch.equal(result.isnan(), ~seen.expand(x.shape))
    for b, c, i, j in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
        if not seen[b, 0, i, j]:
            continue
        value = x[b, c, i, j].clone()
        if 0 < i < SIDE[0] - 1 and 0 < j < SIDE[1] - 1:
            window = (slice(i - 1, i + 2), slice(j - 1, j + 2))
            weight = torch.ones(3, 3)
            weight[1, 1] = 5
            weight = weight * seen[b, 0][window]
            smooth = (weight * x[b, c][window]).sum() / weight.sum()
            value = (value + (1 - factor) * (smooth - value)).clamp(0, 1)
        torch.testing.assert_close(result[b, c, i, j], value, rtol=1e-9, atol=1e-9)
    complete = F.adjust_sharpness(Incomplete(x), factor)
    assert torch.equal(plain(complete), plain(F.adjust_sharpness(tv_tensors.Image(x), factor)))
    assert torch.equal(plain(F.adjust_sharpness(Incomplete(x[..., :2, :]), factor)), x[..., :2, :])
    five = F.adjust_sharpness(with_holes(x, seen).reshape(2, 1, 3, *SIDE).as_subclass(Incomplete), factor)
    assert torch.equal(plain(five).nan_to_num().squeeze(1), result.nan_to_num())


def test_noise_falls_on_seen_pixels_as_ever() -> None:
    x, seen = picture()
    torch.manual_seed(3)
    expected = plain(F.gaussian_noise(tv_tensors.Image(x)))
    torch.manual_seed(3)
    (result,) = each(F.gaussian_noise(with_holes(x, seen)))
    assert torch.equal(result.nan_to_num(), expected.where(seen, 0))


def test_sizes() -> None:
    image = with_holes(*picture())
    assert F.get_size(image) == list(SIDE)
    assert F.get_dimensions(image) == [3, *SIDE]
    assert F.get_num_channels(image) == 3


def test_erased_pixels_are_missing_unless_a_value_is_given() -> None:
    x, seen = picture()
    image = with_holes(x, seen)
    box = {"i": 2, "j": 1, "h": 4, "w": 3}
    gone = torch.zeros(x.shape, dtype=torch.bool)
    gone[:, 2:6, 1:4] = True
    for value in (torch.zeros(1, 1, 1), 0):
        (result,) = each(F.erase(image, **box, v=value))
        assert torch.equal(result.isnan(), gone | ~seen)
        assert torch.equal(result.nan_to_num(), x.where(seen & ~gone, 0))
    for value in (torch.full((1, 1, 1), 0.5), torch.zeros(3, 1, 1), torch.rand(3, 4, 3)):
        (result,) = each(F.erase(image, **box, v=value))
        assert torch.equal(result[gone], value.to(x).expand(3, 4, 3).flatten())
        assert torch.equal(result.isnan(), ~seen & ~gone)
    before = plain(image).clone()
    assert torch.equal(plain(image).nan_to_num(), before.nan_to_num())
    F.erase(image, **box, v=torch.zeros(1), inplace=True)
    assert plain(image)[gone].isnan().all()
    with pytest.raises(TypeError, match="erase makes pixels that are missing, which torch.uint8 cannot mark"):
        F.erase(Incomplete(torch.zeros(3, 9, 8, dtype=torch.uint8)), **box, v=torch.zeros(1))


@pytest.mark.parametrize("fill", [0.5, [0.0], [0.1, 0.0, 0.3], -1])
def test_a_fill_that_is_given_is_seen(fill: Any) -> None:
    x, seen = picture()
    (padded,) = each(F.pad(with_holes(x, seen), 2, fill=fill))
    assert torch.equal(padded[:, 2:-2, 2:-2].isnan(), ~seen.expand(x.shape))
    assert torch.equal(padded[:, 0], plain(F.pad(tv_tensors.Image(x), 2, fill=fill))[:, 0])
    for function, arguments in (
        (F.rotate, {"angle": 30.0, "interpolation": BILINEAR, "expand": True}),
        (F.affine, {"angle": 0.0, "translate": [2, 1], "scale": 1.0, "shear": [0.0, 0.0]}),
        (F.elastic, {"displacement": 3 * DISPLACEMENT}),
    ):
        whole = function(Incomplete(x), **arguments, fill=fill)
        assert torch.equal(plain(whole), plain(function(tv_tensors.Image(x), **arguments, fill=fill)))
        (partly,) = each(function(with_holes(x, seen), **arguments, fill=fill))
        (unseen,) = each(function(with_holes(x, seen), **arguments))
        assert 0 < partly.isnan().sum() < unseen.isnan().sum()
        constant = Incomplete(torch.full_like(x, 0.5).masked_fill(~seen, math.nan))
        if fill == 0.5:
            (same,) = each(function(constant, **arguments, fill=fill))
            edge = plain(function(tv_tensors.Image(torch.full_like(x, 0.5)), **arguments, fill=fill))
            torch.testing.assert_close(same[~same.isnan()], edge[~same.isnan()], rtol=1e-5, atol=1e-6)


def test_a_fill_of_some_channels_only_is_refused() -> None:
    with pytest.raises(ValueError, match="fill of pad must be numbers or NaN in all channels, got some of both"):
        F.pad(Incomplete(torch.rand(3, 4, 4)), 1, fill=[0.1, math.nan, 0.2])
    assert each(F.pad(Incomplete(torch.rand(3, 4, 4)), 1, fill=[math.nan] * 3))[0].isnan().sum() == 3 * 20


def test_bands_that_are_missing_each_for_itself() -> None:
    x = 0.2 + 0.6 * torch.rand(3, *SIDE, dtype=torch.float64)
    holes = torch.rand(x.shape) < 0.2
    image = Incomplete(x.masked_fill(holes, math.nan))
    anywhere = holes.any(0).expand(x.shape)
    for function, factor in ((F.adjust_saturation, 0.5), (F.adjust_hue, 0.2), (F.rgb_to_grayscale, 3)):
        (result,) = each(function(image, factor))
        assert torch.equal(result.isnan(), anywhere)
        assert torch.equal(result[~anywhere], plain(function(tv_tensors.Image(x), factor))[~anywhere])
    gray = plain(F.rgb_to_grayscale(tv_tensors.Image(x)))[0]
    (result,) = each(F.adjust_contrast(image, 0.5))
    assert torch.equal(result.isnan(), holes)
    torch.testing.assert_close(result[~holes], (0.5 * x + 0.5 * gray[~holes.any(0)].mean())[~holes])
    (result,) = each(F.equalize(image))
    assert torch.equal(result.isnan(), holes)
    assert torch.equal(each(F.grayscale_to_rgb(image))[0].isnan(), holes)  # three channels already
    for gone in (1, slice(None)):
        x = torch.rand(3, *SIDE)
        x[gone] = math.nan
        for name in ("autocontrast", "equalize", "invert"):
            assert torch.equal(each(getattr(F, name)(Incomplete(x)))[0].isnan(), x.isnan())
        (result,) = each(F.resize(Incomplete(x), [4, 4]))
        assert torch.equal(result.isnan().all(-1).all(-1), x.isnan().all(-1).all(-1))
        assert torch.equal(result.isnan().any(-1).any(-1), x.isnan().all(-1).all(-1))
    assert F.adjust_contrast(Incomplete(x), 0.5).isnan().all()
    x[0] = 0.5
    with pytest.raises(ValueError, match="adjust_contrast needs a pixel that is seen in all channels"):
        F.adjust_contrast(Incomplete(x), 0.5)


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
def test_integers_and_jpeg_cannot_say_what_is_missing() -> None:
    image = with_holes(*picture())
    for dtype in (torch.uint8, torch.int16, torch.bool):
        with pytest.raises(TypeError, match=f"to_dtype cannot turn an Incomplete image with holes into {dtype}"):
            F.to_dtype(image, dtype, scale=dtype != torch.bool)
    with pytest.raises(TypeError, match="jpeg needs an image of uint8, in which no pixel can be missing, got"):
        F.jpeg(image, 90)
    with torch.device("cpu"):  # torchvision puts its tensors on the default device, and decodes on the CPU alone
        integers = Incomplete(torch.randint(256, (3, 16, 16), dtype=torch.uint8))
        assert torch.equal(plain(F.jpeg(integers, 90)), plain(F.jpeg(tv_tensors.Image(plain(integers)), 90)))
    whole = Incomplete(torch.rand(3, 4, 4))
    assert torch.equal(
        plain(F.to_dtype(whole, torch.uint8, scale=True)),
        plain(F.to_dtype(tv_tensors.Image(plain(whole)), torch.uint8, scale=True)),
    )


# Code of torchvision that asks no kernel -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: F.to_pil_image(x), "to_pil_image"),
        (lambda x: v2.ToPILImage()(x), "to_pil_image"),
        (
            lambda x: v2.LinearTransformation(torch.eye(216).double(), torch.zeros(216).double())(x),
            "LinearTransformation",
        ),
        (lambda x: F.equalize_image(x), "to_dtype_image"),
        (lambda x: F.convert_image_dtype(x, torch.uint8), "to_dtype_image"),
        (lambda x: F.pad_image(x, [1, 1]), "_pad_with_scalar_fill"),
        (lambda x: F.adjust_contrast_image(x, 0.5), "_blend"),
        (lambda x: v1.autocontrast(x), "autocontrast"),
        (lambda x: v1.resize(x, [4, 4]), "_cast_squeeze_in"),
        (lambda x: torchvision.transforms.RandomInvert(1.0)(x), "invert"),
    ],
)
def test_code_that_knows_no_holes_is_refused_by_name(call: Any, name: str) -> None:
    x, seen = picture()
    call(Incomplete(x))  # a complete image is one like any other
    with pytest.raises(
        ValueError, match=f"{name} of torchvision does not know missing pixels, got an Incomplete image"
    ):
        call(with_holes(x, seen))


def test_mixtures_of_images() -> None:
    x, seen = picture(4)
    labels = torch.arange(4)
    both = seen & seen.roll(1, 0)
    torch.manual_seed(1)
    result, _ = v2.MixUp(num_classes=4)(with_holes(x, seen), labels)
    torch.manual_seed(1)
    expected, _ = v2.MixUp(num_classes=4)(tv_tensors.Image(x), labels)
    assert torch.equal(each(result)[0].isnan(), ~both.expand(x.shape))
    assert torch.equal(plain(result).nan_to_num(), plain(expected).where(both, 0))
    torch.manual_seed(1)
    result, _ = v2.CutMix(num_classes=4)(with_holes(x, seen), labels)
    torch.manual_seed(1)
    moved, _ = v2.CutMix(num_classes=4)(tv_tensors.Image(seen.to(x)), labels)
    assert torch.equal(each(result)[0].isnan(), plain(moved).eq(0).expand(x.shape))


# Classes -------------------------------------------------------------------------------------------------------------

CLASSES: dict[str, list[dict[str, Any]]] = {
    "AugMix": [{"chain_depth": 1}, {"severity": 3, "fill": 0.5}],
    "AutoAugment": [{}],
    "CenterCrop": [{"size": 15}, {"size": 54}],
    "ColorJitter": [{"brightness": 0.5, "contrast": 0.5, "saturation": 0.5, "hue": 0.3}],
    "ConvertImageDtype": [{"dtype": torch.float32}],
    "ElasticTransform": [{"alpha": 10.0}],
    "FiveCrop": [{"size": 14}],
    "GaussianBlur": [{"kernel_size": 3}],
    "GaussianNoise": [{}],
    "Grayscale": [{}, {"num_output_channels": 3}],
    "Identity": [{}],
    "Normalize": [{"mean": [0.1] * 3, "std": [0.9] * 3}, {"mean": [0.1] * 3, "std": [0.9] * 3, "inplace": True}],
    "Pad": [{"padding": 3}, {"padding": 3, "fill": {Incomplete: 0.5}}, {"padding": 3, "fill": {tv_tensors.Mask: 1}}],
    "RGB": [{}],
    "RandAugment": [{"num_ops": 4}],
    "RandomAdjustSharpness": [{"sharpness_factor": 2.0, "p": 1.0}],
    "RandomAffine": [{"degrees": 30, "translate": (0.2, 0.2), "scale": (0.8, 1.2), "shear": 10}],
    "RandomAutocontrast": [{"p": 1.0}],
    "RandomChannelPermutation": [{}],
    "RandomCrop": [{"size": 62, "pad_if_needed": True}, {"size": 25, "padding": 12}],
    "RandomEqualize": [{"p": 1.0}],
    "RandomErasing": [{"p": 1.0}, {"p": 1.0, "value": "random"}],
    "RandomGrayscale": [{"p": 1.0}],
    "RandomHorizontalFlip": [{"p": 1.0}],
    "RandomInvert": [{"p": 1.0}],
    "RandomPerspective": [{"p": 1.0}],
    "RandomPhotometricDistort": [{"p": 1.0}],
    "RandomPosterize": [{"bits": 3, "p": 1.0}],
    "RandomResize": [{"min_size": 15, "max_size": 55}],
    "RandomResizedCrop": [{"size": 27}],
    "RandomRotation": [{"degrees": 45}, {"degrees": 45, "expand": True, "interpolation": BILINEAR}],
    "RandomShortestSize": [{"min_size": 36}],
    "RandomSolarize": [{"threshold": 0.5, "p": 1.0}],
    "RandomVerticalFlip": [{"p": 1.0}],
    "RandomZoomOut": [{"p": 1.0}],
    "Resize": [{"size": 35}],
    "ScaleJitter": [{"target_size": (49, 39)}],
    "TenCrop": [{"size": 14}],
    "ToDtype": [{"dtype": torch.float32, "scale": True}],
    "TrivialAugmentWide": [{}],
}
# They leave images alone, need more than an image, or are tested above by what they call.
APART = {
    "AutoAugmentPolicy", "InterpolationMode", "Transform",  # no transforms
    "Compose", "RandomApply", "RandomChoice", "RandomOrder", "Lambda",  # they call others
    "ClampBoundingBoxes", "ClampKeyPoints", "ConvertBoundingBoxFormat", "PILToTensor", "RandomIoUCrop",
    "SanitizeBoundingBoxes", "SanitizeKeyPoints", "SetClampingMode", "ToImage", "ToTensor",
    "CutMix", "MixUp", "JPEG", "LinearTransformation", "ToPILImage", "ToPureTensor", "UniformTemporalSubsample",
}  # fmt: skip


def test_every_class_of_torchvision_is_in_a_table() -> None:
    assert {name for name in dir(v2) if name[0].isupper()} <= CLASSES.keys() | APART


@pytest.mark.parametrize(("name", "arguments"), cases(CLASSES))
@pytest.mark.parametrize("batch", [(), (2,)])
def test_classes(name: str, arguments: dict[str, Any], batch: tuple[int, ...]) -> None:
    transform = getattr(v2, name)(**copy.deepcopy(arguments))
    for seed in range(8):
        torch.manual_seed(seed)
        x, seen = picture(*batch, fraction=0.4, side=(44, 50))
        results = []
        for hole in (math.nan, torch.tensor(-0x400000, dtype=torch.int32).view(torch.float32).item()):
            torch.manual_seed(seed)
            results.append(each(transform(Incomplete(x.masked_fill(~seen, hole)))))
        for result, again in zip(*results, strict=True):
            assert torch.equal(result.nan_to_num(), again.nan_to_num())
            known = result[~result.isnan()]
            assert known.numel() > 0.02 * result.numel()  # the whole image has not gone
            assert known.isfinite().all()
            assert result.isnan().any() or name in (
                "RandomResize",
                "Resize",
                "ScaleJitter",
                "RandomShortestSize",
                "RandomResizedCrop",
                "GaussianBlur",
            )
            if name in (
                "CenterCrop",
                "Pad",
                "RandomCrop",
                "RandomRotation",
                "RandomAffine",
                "RandomZoomOut",
                "RandomPerspective",
            ):
                assert known.min() > 0.19  # no zeros that were never seen
                assert known.max() < 0.81


def test_containers_and_what_leaves_images_alone() -> None:
    image = with_holes(*picture())
    inner = v2.Compose(
        [v2.RandomApply([v2.Pad(1)], p=1.0), v2.RandomChoice([v2.Resize(6)]), v2.RandomOrder([v2.RGB()])]
    )
    assert type(inner(image)) is Incomplete
    for leave in (v2.ToImage(), v2.SetClampingMode("soft") if hasattr(v2, "SetClampingMode") else v2.Identity()):
        assert leave(image) is image
    tensor = v2.ToPureTensor()(image)
    assert type(tensor) is Tensor
    assert torch.equal(tensor.isnan(), plain(image).isnan())
    sample = {"image": image, "mask": tv_tensors.Mask(torch.ones(1, *SIDE)), "label": 3}
    out = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.Resize((4, 4))])(sample)
    assert type(out["image"]) is Incomplete
    assert out["mask"].shape == (1, 4, 4)


def test_a_usual_pipeline() -> None:
    pipeline = v2.Compose([
        v2.RandomHorizontalFlip(p=1.0),
        v2.Resize(32),
        v2.CenterCrop(24),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.25] * 3),
    ])  # fmt: skip
    x = torch.rand(3, 64, 48).masked_fill(~missing.noise(1, 64, 48, fraction=0.06)[0], math.nan)
    result = pipeline(Incomplete(x))
    x, observed = observe(plain(result).unsqueeze(0))
    assert x.shape == (1, 3, 24, 24)
    assert 0.9 < observed.double().mean() <= 1
    assert x[observed].abs().max() <= 2


# The image itself ----------------------------------------------------------------------------------------------------


def test_an_incomplete_image_stays_one() -> None:
    image = with_holes(*picture())
    for same in (v2.ToImage()(image), Incomplete(image), tv_tensors.wrap(plain(image), like=image), image.clone()):
        assert type(same) is Incomplete
        assert torch.equal(plain(same).nan_to_num(), plain(image).nan_to_num())
    for kind in (Tensor, tv_tensors.Image):
        assert type(image.as_subclass(kind)) is kind  # who says so means it


def test_what_an_image_can_be_made_of() -> None:
    assert Incomplete(torch.rand(4, 5)).shape == (1, 4, 5)
    assert Incomplete(np.full((3, 4, 5), np.nan)).dtype == torch.float64
    assert Incomplete(PILImage.new("RGB", (5, 4))).shape == (3, 4, 5)
    assert Incomplete([[1.0, math.nan]], dtype=torch.float16, device="cpu").dtype == torch.float16
    assert Incomplete(torch.rand(3, 4, 4), requires_grad=True).requires_grad
    image = with_holes(*picture())
    for same in (pickle.loads(pickle.dumps(image)), copy.deepcopy(image), copy.copy(image)):
        assert type(same) is Incomplete
        assert torch.equal(plain(same).nan_to_num(), plain(image).nan_to_num())


@pytest.mark.parametrize(
    ("data", "kwargs", "error", "message"),
    [
        (
            torch.rand(4),
            {},
            ValueError,
            r"data must be an image \(…, C, H, W\) or \(H, W\): .* got a float32 tensor of shape \(4,\)",
        ),
        (None, {}, TypeError, r"data must be an image .* got NoneType"),
        ("image.png", {}, TypeError, r"data must be an image .* got str"),
        ({"image": 3}, {}, TypeError, r"data must be an image .* got dict"),
        (
            np.zeros((300, 300), dtype="datetime64[s]"),
            {},
            TypeError,
            r"data must be an image .* got a datetime64\[s\] array of shape \(300, 300\)",
        ),
        (
            torch.rand(3, 4, 4, dtype=torch.complex64),
            {},
            TypeError,
            "data must be real numbers, NaN where they are missing, got a complex64",
        ),
        (
            torch.rand(3, 4, 4),
            {"mask": 1},
            TypeError,
            "Incomplete takes data, dtype, device and requires_grad, got 'mask'",
        ),
        (
            torch.zeros(3, 4, 4, dtype=torch.int32),
            {"requires_grad": True},
            ValueError,
            "data must be an image .*: only Tensors of floating",
        ),
    ],
)
def test_what_it_cannot_be_made_of(data: Any, kwargs: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        Incomplete(data, **kwargs)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)

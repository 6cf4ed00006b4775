"""Images in every form in which people hold them, at every door, against the plain tensor: bit for bit."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from PIL import Image
from torch import Tensor, nn

import misconv
from misconv import MFA, SMFA, ConvDMFA, LinearDMFA, UNetDMFA, convert, fit_density, observe, predictive
from misconv._checks import as_batch

Array = np.ndarray[Any, Any]
HEIGHT, WIDTH = 6, 8
INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


def default() -> torch.dtype:
    return torch.get_default_dtype()


def pixels(channels: int, count: int = 2) -> Array:
    """(B, C, H, W), from 0 to 120: what any type holds."""
    return np.random.default_rng(0).integers(0, 121, (count, channels, HEIGHT, WIDTH))


def holes(count: int = 2) -> Array:
    """(B, 1, H, W), True where a pixel is missing."""
    return np.random.default_rng(1).random((count, 1, HEIGHT, WIDTH)) < 0.3


def coded(x: Array, absent: Array | bool = False, kind: str | None = None) -> Array:
    """With NaN where it is missing."""
    kind = kind or str(default()).removeprefix("torch.")
    return np.where(absent, np.nan, x).astype(kind)


def tensor(x: Array) -> Tensor:
    """On the device of the modules."""
    return torch.tensor(np.ascontiguousarray(x), device="cpu").to(torch.get_default_device())


# The doors -----------------------------------------------------------------------------------------------------------


def densities(channels: int) -> dict[str, nn.Module]:
    x = torch.rand(30, channels, HEIGHT, WIDTH) * 120
    seen = torch.rand(30, 1, HEIGHT, WIDTH) < 0.8
    return {
        "UNetDMFA": UNetDMFA(channels, 2, 2, widths=(8, 8), depths=(1, 1)).eval(),
        "ConvDMFA": ConvDMFA(channels, 2, 1, widths=(4,), depths=(1,)).eval(),
        "LinearDMFA": LinearDMFA((channels, HEIGHT, WIDTH), 1, 1).eval(),
        "SMFA": SMFA(2, 1).fit(x, seen, iterations=2),
    }


@cache
def modules(channels: int, kind: torch.dtype, device: torch.device) -> dict[str, nn.Module]:
    """Every density, and a network that was converted with one."""
    torch.manual_seed(0)
    made = densities(channels)
    layers = (
        nn.Conv2d(channels, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return {**made, "converted": convert(nn.Sequential(*layers), made["UNetDMFA"]).eval()}


def module(name: str, channels: int) -> nn.Module:
    return modules(channels, default(), torch.get_default_device())[name]


def answer(door: str, channels: int, *images: Any) -> list[Tensor]:
    """All that a door gives for images."""
    if door == "observe":
        return list(observe(*images))
    if door == "predictive":
        net = module("converted", channels)
        generator = torch.Generator(torch.get_default_device()).manual_seed(0)
        return list(vars(predictive(net, *images, 3, generator=generator)).values())
    with torch.no_grad():
        found = module(door, channels)(*images)
    return (
        [found.logits, found.means, found.factors, found.noise, found.observed] if isinstance(found, MFA) else [found]
    )


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
        for a, b in zip(first, second, strict=True)
    )


MODULES = ("UNetDMFA", "ConvDMFA", "LinearDMFA", "SMFA", "converted")
DOORS = ("observe", *MODULES, "predictive")


# Forms of images -----------------------------------------------------------------------------------------------------


def mirrored(x: Array) -> Array:
    """The same numbers with negative strides, and not to be written to."""
    found = x[..., ::-1].copy()[..., ::-1]
    found.flags.writeable = False
    return found


def palette(transparent: int | bytes | None = None) -> Image.Image:
    """Four colours; the first is (0, 1, 2)."""
    made = Image.fromarray(np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH) % 4).convert("P")
    made.putpalette(range(12))
    if transparent is not None:
        made.info["transparency"] = transparent
    return made


def of_palette() -> Array:
    return np.moveaxis(np.arange(12).reshape(4, 3)[np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 4], 2, 0)[None]


def with_key(image: Image.Image, key: int | tuple[int, ...]) -> Image.Image:
    """One colour of it is transparent."""
    image.info["transparency"] = key
    return image


def pil(x: Array) -> Image.Image:
    """(C, H, W) as a picture of bytes."""
    x = x.astype(np.uint8)
    return Image.fromarray(x[0] if len(x) == 1 else np.ascontiguousarray(np.moveaxis(x, 0, 2)))


def opacity(absent: Array) -> Array:
    """What is seen is opaque, or nearly transparent."""
    return np.where(absent, 0, np.where(np.arange(WIDTH) % 2, 255, 1))


GRAY, RGB, ABSENT = pixels(1), pixels(3), holes()
# What is given, and the same as NaN-coded numbers of the default type, or of its own.
FORMS: dict[str, Callable[[], tuple[Any, Array]]] = {
    "a float64 array": lambda: (coded(RGB, ABSENT, "f8"), coded(RGB, ABSENT, "f8")),
    "a float32 array": lambda: (coded(RGB, ABSENT, "f4"), coded(RGB, ABSENT, "f4")),
    "a float16 array": lambda: (coded(RGB, ABSENT, "f2"), coded(RGB, ABSENT, "f2")),
    "a foreign order of bytes": lambda: (coded(RGB, ABSENT, ">f4"), coded(RGB, ABSENT, "f4")),
    "negative strides": lambda: (mirrored(coded(RGB, ABSENT)), coded(RGB, ABSENT)),
    "a masked array": lambda: (np.ma.masked_array(coded(RGB), ABSENT | (RGB < 9)), coded(RGB, ABSENT | (RGB < 9))),
    "masked garbage": lambda: (np.ma.masked_array(np.where(ABSENT, np.inf, coded(RGB)), ABSENT.repeat(3, 1)), coded(RGB, ABSENT)),
    "a masked array with NaN": lambda: (np.ma.masked_array(coded(RGB, ABSENT), RGB < 9), coded(RGB, ABSENT | (RGB < 9))),
    "masked integers": lambda: (np.ma.masked_array(RGB.astype("i2"), ABSENT.repeat(3, 1)), coded(RGB, ABSENT)),
    "a masked array without a mask": lambda: (np.ma.masked_array(RGB.astype("u1")), coded(RGB)),
    **{f"a {kind} array": lambda kind=kind: (RGB.astype(kind), coded(RGB)) for kind in INTEGERS},
    **{f"a {kind} tensor": lambda kind=kind: (tensor(RGB).to(getattr(torch, kind)), coded(RGB)) for kind in INTEGERS},
    "integers of a foreign order of bytes": lambda: (RGB.astype(">u2"), coded(RGB)),
    "one image": lambda: (tensor(coded(RGB, ABSENT))[0], coded(RGB, ABSENT)[:1]),
    "one image, an array": lambda: (coded(RGB, ABSENT)[0], coded(RGB, ABSENT)[:1]),
    "one image, a masked array": lambda: (np.ma.masked_array(RGB[0], ABSENT[0].repeat(3, 0)), coded(RGB, ABSENT)[:1]),
    "one image of bytes": lambda: (tensor(RGB[0]).byte(), coded(RGB)[:1]),
    "a gray image": lambda: (tensor(coded(GRAY, ABSENT))[0, 0], coded(GRAY, ABSENT)[:1]),
    "a gray image, an array": lambda: (coded(GRAY, ABSENT)[0, 0], coded(GRAY, ABSENT)[:1]),
    "a gray image of bytes, masked": lambda: (np.ma.masked_array(GRAY[0, 0].astype("u1"), ABSENT[0, 0]), coded(GRAY, ABSENT)[:1]),
    "L": lambda: (pil(GRAY[0]), coded(GRAY)[:1]),
    "RGB": lambda: (pil(RGB[0]), coded(RGB)[:1]),
    "LA": lambda: (pil(np.concatenate([GRAY[0], opacity(ABSENT[0])])), coded(GRAY, ABSENT)[:1]),
    "RGBA": lambda: (pil(np.concatenate([RGB[0], opacity(ABSENT[0])])), coded(RGB, ABSENT)[:1]),
    "RGBA, opaque": lambda: (pil(np.concatenate([RGB[0], opacity(ABSENT[0] & False)])), coded(RGB)[:1]),
    "L, one shade transparent": lambda: (with_key(pil(GRAY[0]), int(GRAY[0, 0, 0, 0])), coded(GRAY, GRAY[0, 0, 0, 0] == GRAY)[:1]),
    "RGB, one colour transparent": lambda: (with_key(pil(RGB[0]), tuple(map(int, RGB[0, :, 2, 3]))), coded(RGB, (RGB[:1, :, 2:3, 3:4] == RGB).all(1, keepdims=True))[:1]),
    "P": lambda: (palette(), coded(of_palette())),
    "P, one colour transparent": lambda: (palette(0), coded(of_palette(), (of_palette() == of_palette()[..., :1, :1]).all(1, keepdims=True))),
    "P, some colours transparent": lambda: (palette(b"\x00\x80"), coded(of_palette(), (of_palette() == of_palette()[..., :1, :1]).all(1, keepdims=True))),
    "1": lambda: (Image.fromarray(GRAY[0, 0] > 60), coded(np.where(GRAY > 60, 255, 0))[:1]),
    "I": lambda: (Image.fromarray(GRAY[0, 0].astype("i4")), coded(GRAY)[:1]),
    "I;16": lambda: (Image.fromarray(100 * GRAY[0, 0].astype("u2")), coded(100 * GRAY)[:1]),
    "F": lambda: (Image.fromarray(coded(GRAY, ABSENT, "f4")[0, 0]), coded(GRAY, ABSENT, "f4")[:1]),
    "several pictures": lambda: ([pil(each) for each in RGB], coded(RGB)),
    "several gray pictures, a tuple": lambda: (tuple(pil(each) for each in GRAY), coded(GRAY)),
    "pictures with and without alpha": lambda: ([pil(RGB[0]), pil(np.concatenate([RGB[1], opacity(ABSENT[1])]))], coded(RGB, ABSENT & (np.arange(2) > 0).reshape(2, 1, 1, 1))),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("door", DOORS)
def test_every_form_is_the_plain_tensor(door: str, form: str) -> None:
    given_, plain = FORMS[form]()
    channels = plain.shape[1]
    found, expected = answer(door, channels, given_), answer(door, channels, tensor(plain))
    assert same(found, expected)
    assert len(found[0]) == len(plain)
    if door != "observe":
        assert all(t.device.type == torch.get_default_device().type for t in found)


@pytest.mark.parametrize("door", DOORS)
def test_what_is_given_is_left_as_it_was(door: str) -> None:
    array = np.ma.masked_array(coded(RGB), ABSENT.repeat(3, 1))
    image = tensor(coded(RGB, ABSENT))[0]
    before = array.copy(), image.clone()
    answer(door, 3, array)
    answer(door, 3, image)
    assert np.array_equal(array.data, before[0].data)
    assert np.array_equal(array.mask, before[0].mask)
    assert torch.equal(image.nan_to_num(-1), before[1].nan_to_num(-1))


# Forms of `observed` -------------------------------------------------------------------------------------------------

SEEN = ~ABSENT  # (B, 1, H, W)
WITH_OBSERVED: dict[str, Callable[[], tuple[Any, Any, Tensor]]] = {
    "an array": lambda: (tensor(coded(RGB)), SEEN, tensor(SEEN)),
    "an array for every channel": lambda: (tensor(coded(RGB)), (RGB > 9), tensor(RGB > 9)),
    "0 and 1": lambda: (tensor(coded(RGB)), SEEN.astype(">i2"), tensor(SEEN)),
    "two arrays": lambda: (RGB.astype("u1"), SEEN, tensor(SEEN)),
    "an array of bytes, a tensor": lambda: (RGB.astype("u1"), tensor(SEEN), tensor(SEEN)),
    "NaN under it": lambda: (coded(RGB, ABSENT), SEEN, tensor(SEEN)),
    "masked besides": lambda: (np.ma.masked_array(coded(RGB), RGB < 9), SEEN, tensor(SEEN & (RGB >= 9))),
    "one image, (1, H, W)": lambda: (tensor(coded(RGB))[0], tensor(SEEN)[0], tensor(SEEN)[:1]),
    "one image, (C, H, W)": lambda: (tensor(coded(RGB))[0], tensor(RGB > 9)[0], tensor(RGB > 9)[:1]),
    "one image, (H, W)": lambda: (tensor(coded(RGB))[0], tensor(SEEN)[0, 0], tensor(SEEN)[:1]),
    "one image, (1, 1, H, W)": lambda: (tensor(coded(RGB))[0], tensor(SEEN)[:1], tensor(SEEN)[:1]),
    "one image, arrays": lambda: (RGB[0].astype("u1"), SEEN[0, 0], tensor(SEEN)[:1]),
    "a picture": lambda: (pil(RGB[0]), SEEN[0, 0], tensor(SEEN)[:1]),
    "a picture with alpha": lambda: (pil(np.concatenate([RGB[0], opacity(ABSENT[0])])), RGB[0] > 9, tensor(SEEN & (RGB > 9))[:1]),
    "pictures": lambda: ([pil(each) for each in RGB], SEEN, tensor(SEEN)),
}  # fmt: skip


@pytest.mark.parametrize("form", WITH_OBSERVED)
@pytest.mark.parametrize("door", MODULES)
def test_every_form_of_observed(door: str, form: str) -> None:
    x, observed, expected = WITH_OBSERVED[form]()
    plain = tensor(coded(RGB))[: len(expected)]
    assert same(answer(door, 3, x, observed), answer(door, 3, plain, expected))


def test_what_is_seen_is_not_read_elsewhere() -> None:
    """As everywhere: garbage under a mask changes no bit."""
    for door in MODULES:
        found = [answer(door, 3, np.ma.masked_array(np.where(ABSENT, value, RGB).astype("i4"), ABSENT.repeat(3, 1))) for value in (0, 10**9)]  # fmt: skip
        assert same(*found), door


# Types ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", MODULES)
def test_types_of_images_and_modules(door: str) -> None:
    """A density answers in the type of the images, at least its own for half precision; a network in its own."""
    own = copy.deepcopy(module(door, 3)).float()
    x, seen = coded(RGB, False, "f4"), SEEN
    expected = own(tensor(x), tensor(seen))
    for kind, of_density in (
        ("f8", torch.float64),
        ("f4", torch.float32),
        ("f2", torch.float32),
        ("u1", torch.float32),
    ):
        for form in (x.astype(kind), tensor(x.astype(kind))):
            found = own(form, seen)
            assert found.dtype == (torch.float32 if door == "converted" else of_density), (kind, type(form))
            if found.dtype == torch.float32 and door == "converted":
                assert torch.equal(found, expected)


def test_integers_that_half_precision_cannot_hold() -> None:
    """Bytes get the type of the module, others float32 at least."""
    like = torch.zeros(1, dtype=torch.float16)
    assert as_batch(np.full((2, 2), 255, "u1"), None, like)[0].dtype == torch.float16
    found, _ = as_batch(np.full((2, 2), 65535, "u2"), None, like)
    assert found.dtype == torch.float32
    assert (found == 65535).all()


def test_a_network_without_a_density_takes_complete_images() -> None:
    torch.manual_seed(0)
    net = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())).eval()
    expected = net(tensor(coded(RGB)))
    for form in (RGB, RGB.astype("u1"), coded(RGB), [pil(each) for each in RGB], tensor(RGB)):
        assert torch.equal(net(form), expected)
    with pytest.raises(ValueError, match="x with missing pixels needs a density"):
        net(pil(np.concatenate([RGB[0], opacity(ABSENT[0])])))
    with pytest.raises(ValueError, match="observed needs a density"):
        net(RGB, SEEN)


def test_learned_and_asked_in_the_same_units(without_tf32: None) -> None:
    """A density that learned bytes is asked of bytes."""
    x = torch.randint(100, 140, (64, 1, HEIGHT, WIDTH)).byte()
    seen = torch.rand(64, 1, HEIGHT, WIDTH) < 0.8
    density = UNetDMFA(1, rank=1, widths=(4, 4), depths=(1, 1))
    fit_density(density, x, seen, steps=3, progress=False)
    means = density.eval()(x, seen).mean
    assert ((means > 90) & (means < 150)).all()
    network = convert(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Flatten()), density).eval()
    with torch.no_grad():
        network.network[0].weight.fill_(1)
        network.network[0].bias.zero_()
    torch.testing.assert_close(network(x, seen), means.flatten(1), rtol=1e-5, atol=1e-3)


def test_nodata_is_compared_as_stored() -> None:
    """Before a number is rounded to a floating-point type."""
    large = np.array([[2**24, 2**24 + 1, 2**63, 2**64 - 1]], "u8")
    for nodata in large[0]:
        assert (~observe(large, int(nodata))[1]).flatten().tolist() == (large[0] == nodata).tolist()
    x, observed = observe([pil(each) for each in RGB], nodata=7)
    assert torch.equal(observed.cpu(), torch.tensor(RGB != 7, device="cpu"))
    assert (x[~observed] == 0).all()


# Nothing in the way --------------------------------------------------------------------------------------------------


def test_plain_images_pass_as_they_are() -> None:
    x, observed = torch.rand(2, 3, 4, 4), torch.rand(2, 1, 4, 4) < 0.5
    found = as_batch(x, observed, x[0].double())
    assert found[0] is x
    assert found[1] is observed
    assert as_batch(x) == (x, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU that waits for its host")
@pytest.mark.parametrize("door", ["UNetDMFA", "ConvDMFA", "converted"])
def test_no_wait_for_a_gpu(door: str) -> None:
    own = copy.deepcopy(module(door, 3)).float()
    forms = [
        (tensor(coded(RGB, ABSENT, "f4")),),
        (tensor(coded(RGB, False, "f4")), tensor(SEEN)),
        (tensor(RGB[0]).byte(), tensor(SEEN)[0, 0]),
    ]
    with torch.no_grad():
        for form in forms:
            own(*form)
        try:
            with warnings.catch_warnings(action="ignore"):  # it calls itself a prototype
                torch.cuda.set_sync_debug_mode("error")
            for form in forms:
                own(*form)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("door", ["UNetDMFA", "ConvDMFA", "SMFA", "converted"])
def test_compiled(door: str) -> None:
    torch.compiler.reset()
    own = module(door, 3)
    compiled = torch.compile(own, fullgraph=True, backend="eager")
    with torch.no_grad():
        forms = [
            (tensor(coded(RGB, ABSENT)), None),
            (tensor(RGB[0]).byte(), tensor(SEEN)[0, 0]),
            (tensor(coded(RGB)), tensor(SEEN)),
        ]
        for x, observed in forms[
            : 1 if door == "converted" else 2 if door == "UNetDMFA" else 3
        ]:  # it takes long for large graphs
            found, expected = compiled(x, observed), own(x, observed)
            if isinstance(expected, MFA):
                found, expected = found.mean, expected.mean
            torch.testing.assert_close(found, expected)


# What is wrong -------------------------------------------------------------------------------------------------------

TWO_SIZES = [Image.new("RGB", (4, 4)), Image.new("RGB", (4, 5))]
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a name": (lambda: "image.png", TypeError, r"x must be a torch.Tensor of images \(B, C, H, W\), a numpy array or a PIL image, got 'image.png'"),
    "nothing": (lambda: None, TypeError, "x must be a torch.Tensor of images .* got None"),
    "an empty list": (list, TypeError, r"x must be a torch.Tensor of images .* got \[\] \(list\)"),
    "a list of tensors": (lambda: [torch.rand(3, 4, 4)], TypeError, "x must be a torch.Tensor of images .* got a list of 1 elements"),
    "pictures among others": (lambda: [Image.new("L", (4, 4)), 3], TypeError, "x must be a torch.Tensor of images .* got a list"),
    "two sizes": (lambda: TWO_SIZES, ValueError, r"x must be PIL images of one size, one type and one number of channels, got torch.uint8 of \(3, 4, 4\) and torch.uint8 of \(3, 5, 4\)"),
    "gray among coloured": (lambda: [Image.new("L", (4, 4)), Image.new("RGB", (4, 4))], ValueError, r"x must be PIL images of one size, .* got torch.uint8 of \(1, 4, 4\) and"),
    "CMYK": (lambda: Image.new("CMYK", (4, 4)), TypeError, r'x must be a PIL image of mode L, I, F, RGB, LA, RGBA, P or 1, got mode CMYK; convert it, for example x.convert\("RGB"\)'),
    "a bool array": (lambda: np.zeros((3, 4, 4), bool), TypeError, "x must hold floating-point numbers or integers, got an array of bool"),
    "a bool tensor": (lambda: torch.zeros(3, 4, 4) > 0, TypeError, r"x must hold floating-point numbers or integers, got a bool tensor of shape \(3, 4, 4\)"),
    "a bool batch": (lambda: torch.zeros(1, 3, 4, 4) > 0, TypeError, "x must hold floating-point numbers or integers, got a bool tensor"),
    "complex numbers": (lambda: torch.zeros(3, 4, 4, dtype=torch.complex64), TypeError, "x must hold floating-point numbers or integers, got a complex64 tensor"),
    "objects": (lambda: np.array([[None]]), TypeError, "x must hold floating-point numbers or integers, got an array of object"),
    "float8": (lambda: torch.zeros(3, 4, 4, dtype=torch.float8_e5m2), TypeError, "x must be of type float16, bfloat16, float32 or float64, got a float8"),
    "sparse": (lambda: torch.zeros(3, 4, 4).to_sparse(), TypeError, "x must be a dense tensor, got a sparse_coo"),
    "one line": (lambda: torch.rand(4), ValueError, r"x must have shape \(B, C, H, W\), or \(C, H, W\) or \(H, W\) for one image, got a .* \(4,\)"),
    "a number": (lambda: np.ones(()), ValueError, r"x must have shape \(B, C, H, W\), or .*\(\)"),
    "five axes": (lambda: np.zeros((1, 1, 3, 4, 4)), ValueError, r"x must have shape \(B, C, H, W\), or .* got a float64 numpy array of shape \(1, 1, 3, 4, 4\)"),
    "nothing in it": (lambda: np.zeros((0, 3, 4, 4)), ValueError, r"x must have shape \(B, C, H, W\) with no empty dimension, got"),
    "no columns": (lambda: torch.zeros(3, 4, 0), ValueError, r"x must have shape \(B, C, H, W\) with no empty dimension, got"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("door", DOORS)
def test_bad_images(door: str, case: str) -> None:
    make, kind, message = BAD[case]
    with pytest.raises(kind, match=message) as caught:
        answer(door, 3, make())
    text = str(caught.value)
    assert len(text) < 240
    assert "\n" not in text
    assert "255" not in text


@pytest.mark.parametrize("door", MODULES)
def test_channels_at_the_end_are_named(door: str) -> None:
    with pytest.raises(
        ValueError, match=r"got a .* tensor of shape \(1, 6, 8, 3\) on .*; channels come before height and width"
    ):
        answer(door, 3, np.moveaxis(RGB[0], 0, 2))


@pytest.mark.parametrize(
    ("observed", "kind", "message"),
    [
        (np.array([["no"]]), TypeError, "observed must be a bool tensor, True where the pixel was seen, got a <U2 numpy array"),
        ([[True]], TypeError, "observed must be a bool tensor"), ("mask.png", TypeError, "observed must be a bool tensor, .* got 'mask.png'"),
        (SEEN, ValueError, r"observed must have shape \(1, 1, 6, 8\) or \(1, 3, 6, 8\) to fit the images, got a bool tensor of shape \(2, 1, 6, 8\)"),
        (SEEN[0, 0, :3], ValueError, "observed must have shape .* got a bool tensor of shape"), (SEEN[0, 0, 0], ValueError, "observed must have shape"),
        (SEEN[0].repeat(2, 0), ValueError, r"observed must have shape .* \(1, 2, 6, 8\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("door", MODULES)
def test_bad_observed(door: str, observed: Any, kind: type[Exception], message: str) -> None:
    for image in (tensor(coded(RGB))[0], RGB[0], pil(RGB[0])):
        with pytest.raises(kind, match=message):
            answer(door, 3, image, observed)


def test_observed_of_a_batch_has_a_batch() -> None:
    """Nothing is guessed of several images."""
    for door in MODULES:
        with pytest.raises(ValueError, match=r"observed must have shape \(2, 1, 6, 8\) or \(2, 3, 6, 8\)"):
            answer(door, 3, tensor(coded(RGB)), SEEN[0, 0])


def test_numbers_other_than_0_and_1(values_are_checked: None) -> None:
    for door in MODULES:
        with pytest.raises(
            ValueError, match=r"observed must be bool, or hold only 0 \(missing\) and 1 \(observed\), got the value 255"
        ):
            answer(door, 3, RGB, np.where(SEEN, 255, 0).astype("u1"))


def test_observed_that_is_inverted_is_named(values_are_checked: None) -> None:
    x = tensor(coded(RGB, ABSENT))
    for door in ("UNetDMFA", "ConvDMFA", "LinearDMFA", "converted"):
        with pytest.raises(
            ValueError, match="x must be finite wherever it is observed, got nan .* it may be inverted here"
        ):
            answer(door, 3, x, tensor(ABSENT))
        with pytest.raises(
            ValueError, match="x must be finite wherever it is observed, got nan .* mark missing pixels as not"
        ):
            answer(door, 3, x, torch.ones_like(tensor(SEEN)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
def test_tensors_elsewhere_are_not_moved() -> None:
    """Whoever has placed a tensor is told; what has no place is brought along."""
    torch.manual_seed(0)
    density = UNetDMFA(3, widths=(4,), depths=(1,)).cuda().eval()
    net = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).cuda(), density)
    here = torch.tensor(coded(RGB, False, "f4"), device="cpu")
    for module_ in (density, net):
        for x, observed in ((here, None), (here[0], None), (here.byte(), None), (here, SEEN), (here.cuda(), torch.tensor(SEEN, device="cpu")), (RGB, torch.tensor(SEEN, device="cpu"))):  # fmt: skip
            with pytest.raises(ValueError, match="must be on one device"):
                module_(x, observed)
        module_(here.cuda(), SEEN)
        module_(RGB, SEEN)
        module_(pil(RGB[0]))


# The definition ------------------------------------------------------------------------------------------------------


@given(st.data())
def test_observe_is_what_it_says(data: st.DataObject) -> None:
    """Any shape and any integer type, with and without nodata and mask, as tensor and as array."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4), label="shape"))
    kind = np.dtype(data.draw(st.sampled_from(INTEGERS), label="type"))
    limits = np.iinfo(kind)
    numbers = st.one_of(st.integers(limits.min, limits.max), st.integers(0, 3))
    size = int(np.prod(shape))
    x = np.array(data.draw(st.lists(numbers, min_size=size, max_size=size)), kind).reshape(shape)
    nodata = data.draw(st.one_of(st.none(), numbers), label="nodata")
    absent = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size))).reshape(shape)
    for given_, masked in ((x, False), (torch.tensor(x, device="cpu"), False), (np.ma.masked_array(x, absent), True)):
        values, seen = observe(given_, nodata)
        assert values.shape == seen.shape == (1,) * (4 - len(shape)) + shape
        missing = (np.zeros(shape, bool) if nodata is None else x == nodata) | (absent & masked)
        assert np.array_equal(seen.cpu().numpy().reshape(shape), ~missing)
        expected = torch.tensor(x, device="cpu").to(torch.promote_types(default(), torch.float32)).numpy()
        assert np.array_equal(values.cpu().numpy().reshape(shape), np.where(missing, 0, expected))
        again = observe(values.masked_fill(~seen, torch.nan))
        assert torch.equal(again[0], values)
        assert torch.equal(again[1], seen)


# At the front door ---------------------------------------------------------------------------------------------------


def test_transforms_need_no_import_of_their_own() -> None:
    code = (
        "import sys, misconv; assert 'torchvision' not in sys.modules; "
        "print(misconv.transforms.Incomplete.__name__, 'torchvision' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["Incomplete", "True"], found.stderr


def test_what_was_saved_is_what_convert_made(tmp_path: Any) -> None:
    torch.set_default_dtype(torch.float32)
    models = pytest.importorskip("torchvision").models
    density = UNetDMFA(3, widths=(8, 8), depths=(1, 1))
    net = convert(models.resnet18(num_classes=3), density).eval()
    misconv.save(net, tmp_path / "net")
    loaded = misconv.load(tmp_path / "net")
    assert type(loaded) is type(net)
    assert type(loaded.density) is UNetDMFA
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 48, 4), dtype=np.uint8))
    with torch.no_grad():
        assert torch.equal(loaded.to(torch.get_default_device())(picture), net(picture))

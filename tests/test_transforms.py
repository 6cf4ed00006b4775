from __future__ import annotations

import math

import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from misconv import missing, observe
from misconv.transforms import Incomplete

TRANSFORMS = {
    "resize": v2.Resize((20, 28), antialias=True),
    "enlarge": v2.Resize((90, 70)),
    "resized crop": v2.RandomResizedCrop(24),
    "rotate": v2.RandomRotation((30, 30), interpolation=v2.InterpolationMode.BILINEAR),
    "affine": v2.RandomAffine((10, 10), shear=(5, 5), interpolation=v2.InterpolationMode.BILINEAR),
    "blur": v2.GaussianBlur(5, sigma=1.0),
    "perspective": v2.RandomPerspective(p=1.0),
    "elastic": v2.ElasticTransform(20.0),
}


def holes(fraction: float = 0.06) -> torch.Tensor:
    """A picture (3, 64, 48) with single pixels missing."""
    x = torch.rand(3, 64, 48)
    return x.masked_fill(~missing.noise(1, 64, 48, fraction=fraction)[0], math.nan)


def test_resizing_does_not_spread_the_holes() -> None:
    x = holes()
    half = v2.Resize((32, 24))
    spread, kept = (half(kind(x)).isnan().double().mean() for kind in (tv_tensors.Image, Incomplete))
    assert spread > 0.4  # what a plain image does
    assert kept < 0.01


@pytest.mark.parametrize("name", TRANSFORMS)
def test_complete_images_are_transformed_as_ever(name: str) -> None:
    x, transform = torch.rand(3, 64, 48), TRANSFORMS[name]
    torch.manual_seed(1)
    expected = transform(tv_tensors.Image(x))
    torch.manual_seed(1)
    result = transform(Incomplete(x))
    assert isinstance(result, Incomplete)
    inside = ~result.isnan()
    # At the edge of a turned image a plain one is mixed with the black outside, and this one is not.
    near = (result - expected.as_subclass(torch.Tensor)).abs()[inside] < 1e-3
    assert near.double().mean() > 0.93
    if name in ("resize", "enlarge", "resized crop", "blur"):
        assert inside.all()
        assert torch.equal(result.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_constant_image_stays_constant_and_finite(name: str) -> None:
    x = torch.full((3, 64, 48), 0.7).masked_fill(holes(0.3).isnan(), math.nan)
    result = TRANSFORMS[name](Incomplete(x)).as_subclass(torch.Tensor)
    seen = result[~result.isnan()]
    assert len(seen) > 0
    torch.testing.assert_close(seen, torch.full_like(seen, 0.7), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_hidden_values_are_gone(name: str) -> None:
    """There is nothing to leak: NaN is the only value at missing places; and a batch is transformed as its images are."""
    x = holes()
    torch.manual_seed(1)
    alone = TRANSFORMS[name](Incomplete(x))
    torch.manual_seed(1)
    together = TRANSFORMS[name](Incomplete(torch.stack([x, x])))
    torch.testing.assert_close(together[1], alone, equal_nan=True)


def test_a_usual_pipeline() -> None:
    pipeline = v2.Compose([
        v2.RandomHorizontalFlip(p=1.0),
        v2.Resize(32),
        v2.CenterCrop(24),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.25] * 3),
    ])  # fmt: skip
    result = pipeline(Incomplete(holes()))
    x, observed = observe(result.as_subclass(torch.Tensor).unsqueeze(0))
    assert x.shape == (1, 3, 24, 24)
    assert 0.9 < observed.double().mean() <= 1
    assert x[observed].abs().max() <= 2


def test_bands_are_missing_each_for_itself() -> None:
    x = torch.rand(3, 64, 48)
    x[1] = math.nan
    result = v2.Resize((32, 24))(Incomplete(x))
    assert result[1].isnan().all()
    assert not result[[0, 2]].isnan().any()

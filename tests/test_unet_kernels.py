"""The kernels around UNetDMFA against its plain formulas in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import misconv
from misconv import MFA, UNetDMFA, missing
from misconv._density.network import FARTHEST
from misconv._math import push_pull

pytest.importorskip("triton")

from misconv._triton import Frame, smooth_input


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of convolutions: it is what is around them that is tested here."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def network(channels: int = 2, components: int = 1, rank: int = 2, patch: int = 2, **options: object) -> UNetDMFA:
    """One that says something of everything, in units that are not those of the data."""
    torch.manual_seed(0)
    density = UNetDMFA(channels, components, rank, widths=(6, 8), depths=(1, 1), patch=patch, **options)  # type: ignore[arg-type]
    for parameter in density.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, observed = images(channels, (12, 12), seen="channels")
    density.calibrate(x.nan_to_num(), observed)
    return density.double().eval()


def images(channels: int = 2, size: tuple[int, int] = (3, 4), seen: str = "shared") -> tuple[Tensor, Tensor]:
    """Two images in odd units with NaN where they are missing; of the last one nothing was seen, or one channel."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    planes = channels if seen == "channels" else 1
    observed = torch.rand(2, planes, *size, generator=generator) < 0.6
    observed[1] = False
    if seen == "channels":
        observed[1, 0] = True
    x = 30 + 12 * torch.randn(2, channels, *size, generator=generator)
    return x.masked_fill(~observed, torch.nan).float(), observed


def fused(density: UNetDMFA, x: Tensor, observed: Tensor) -> MFA:
    """By the kernels, on a CPU too; checked and without gradients, as `forward` has it."""
    with torch.no_grad():
        return density._fused(*density._arguments(x, observed))


def assert_same(found: MFA, expected: MFA, bound: float) -> None:
    """Where something is missing; seen pixels are exact, and nothing else is said of them."""
    assert found.observed is not None
    hidden = ~found.observed.expand(found.mean.shape).unsqueeze(1)
    for name in ("means", "noise"):
        ours, theirs = (getattr(p, name).double() for p in (found, expected))
        assert_near(ours.where(hidden, 0), theirs.where(hidden, 0), bound)
    ours, theirs = (p.factors.double().where(hidden.unsqueeze(2), 0) for p in (found, expected))
    assert_near(ours, theirs, bound)
    assert_near(found.weights.double(), expected.weights.double(), bound)
    seen = (~hidden).expand(found.means.shape)
    assert torch.equal(found.means[seen], expected.means.to(found.dtype)[seen])
    for values in (found.means, found.factors, found.noise):
        assert values.isfinite().all()


def assert_near(ours: Tensor, theirs: Tensor, bound: float) -> None:
    assert (ours - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize(
    ("patch", "seen", "size"),
    [(1, "channels", (3, 4)), (2, "shared", (4, 4)), (3, "channels", (5, 6)), (4, "shared", (7, 9)), (2, "channels", (1, 5))],
)  # fmt: skip
def test_patches_and_sizes(patch: int, seen: str, size: tuple[int, int]) -> None:
    density = network(patch=patch)
    x, observed = images(size=size, seen=seen)
    expected = density(x.double(), observed)
    assert_same(fused(copy.deepcopy(density).float(), x, observed), expected, 1e-5)


@pytest.mark.parametrize(
    ("channels", "components", "rank", "bounds"),
    [(1, 1, 0, "data"), (3, 2, 4, "data"), (1, 3, 1, None), (1, 1, 8, (-10.0, 90.0))],
)
def test_components_ranks_and_bounds(
    channels: int, components: int, rank: int, bounds: tuple[float, float] | str | None
) -> None:
    density = network(channels, components, rank, bounds=bounds)
    x, observed = images(channels)
    expected = density(x.double(), observed)
    assert_same(fused(copy.deepcopy(density).float(), x, observed), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Images in half precision, the network too or not."""
    density = network().float()
    x, observed = images()
    x = x.to(dtype)
    wide = density(x, observed)
    assert wide.dtype == torch.float32
    assert_same(fused(density, x, observed), wide, 1e-5)
    narrow = density.to(dtype)
    found = fused(narrow, x, observed)
    assert found.dtype == dtype
    assert_same(found, narrow(x, observed), 0.1)


@pytest.mark.parametrize("layout", ["channels_last", "part", "repeated"])
def test_layouts(layout: str) -> None:
    """Images and masks need not be one number after the other."""
    density = network().float()
    x, observed = images(size=(4, 6), seen="channels")
    if layout == "channels_last":
        x, observed = (t.contiguous(memory_format=torch.channels_last) for t in (x, observed))
    elif layout == "part":
        x, observed = (t[..., 1::2] for t in (x, observed))
    else:
        x, observed = x, observed[:1, :1].expand(2, 1, 4, 6)
        x = torch.where(observed, x.nan_to_num(), torch.nan)
    expected = density(x.clone(memory_format=torch.contiguous_format), observed.contiguous())
    assert_same(fused(density, x, observed), expected, 1e-5)


def test_the_fill_is_that_of_push_pull() -> None:
    """What the network reads, with outliers cut off and zeros past the image."""
    x, observed = images(size=(7, 9), seen="channels")
    x[0, 0, 0, 0], observed[0, 0, 0, 0] = 1e30, True
    frame = Frame(torch.full((2,), 30.0), torch.full((2,), 12.0), None, None, 1e-3, FARTHEST)
    inside, _ = smooth_input(x, observed, frame, 4, torch.float32)
    assert inside.is_contiguous(memory_format=torch.channels_last)
    standard = ((x.double() - 30) / 12).where(observed, 0).clamp(-FARTHEST, FARTHEST)
    filled = push_pull(standard, observed, relaxed=True)
    expected = F.pixel_unshuffle(F.pad(torch.cat([filled, observed.double()], 1), (0, 3, 0, 1)), 4)
    torch.testing.assert_close(inside.double(), expected, rtol=1e-5, atol=1e-6)


def test_missing_values_are_never_read() -> None:
    density = network().float()
    x, observed = images()
    expected = fused(density, x, observed)
    for poison in (torch.inf, 1e30):
        found = fused(density, x.where(observed, poison), observed)
        for name in ("means", "factors", "noise", "logits"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_the_kernels_are_used_on_a_gpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with them the density says what it says without."""
    torch.set_default_dtype(torch.float32)
    density = UNetDMFA(3, components=2, patch=4).cuda().eval()
    x = torch.rand(4, 3, 70, 50, device="cuda")
    observed = missing.square(4, 70, 50, device="cuda")
    if precision == "bfloat16":
        density, x = density.bfloat16(), x.bfloat16()
    used = []
    kernels = UNetDMFA._fused
    monkeypatch.setattr(UNetDMFA, "_fused", lambda *arguments: used.append(1) or kernels(*arguments))
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
        found = density(x, observed)
        with misconv.plain():
            expected = density(x, observed)
    assert used == [1]
    assert_same(found, expected, 1e-5 if precision == "float32" else 0.05)
    density(x, observed).means.float().sum().backward()  # what learns takes the plain path
    calls: list[object] = []
    density.enter.register_forward_hook(lambda *arguments: calls.append(arguments))
    with torch.no_grad():
        density(x, observed)  # so does what is watched inside
    assert len(calls) == 1
    assert used == [1]

"""The kernels of the CPU, compiled from C++, against the plain formulas; and machines on which they cannot be compiled."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from misconv import MFA, _doctor
from misconv._backend import plain
from misconv._conv import compiled
from misconv.functional import expected_conv2d
from tests.reference import random_mfa

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="the path of the CPU")
needs_kernels = pytest.mark.skipif(compiled.why_not() is not None, reason=f"no kernels: {compiled.why_not()}")

# components, rank, groups, filters, stride, padding, dilation, whether channels miss pixels of their own
SETTINGS = [
    (1, 4, 1, 32, 1, 1, 1, False),
    (1, 5, 1, 40, 2, 3, 1, False),
    (1, 0, 1, 3, 1, 0, 2, True),
    (3, 2, 1, 20, 1, 1, 1, True),
    (2, 9, 2, 70, 2, 2, 2, False),
    (1, 4, 4, 8, 1, 1, 1, True),
]


def make(components: int, rank: int, planes: int, share: float = 0.3) -> MFA:
    """Images of 4×17×19, of which some rows and some scattered pixels are missing."""
    observed = torch.rand(3, planes, 17, 19) > share / 2
    observed[:, :, 5 : 5 + round(17 * share)] = False
    return random_mfa(3, components, rank, (4, 17, 19), observed)


def gradients(p: MFA, weight: Tensor, direction: Tensor, *geometry: Any) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (p.logits, p.means, p.factors, p.noise, weight)]
    q = MFA(*leaves[:4], p.observed, check=False)
    y = expected_conv2d(q, leaves[4], None, *geometry)
    found = torch.autograd.grad(y, leaves, direction.to(y.dtype), materialize_grads=True)
    # Components share an observed pixel, so only the sum of its gradients has a meaning.
    assert p.observed is not None
    means = torch.where(p.observed.unsqueeze(1), found[1].sum(1, keepdim=True), found[1])
    return y.detach(), found[0], means, *found[2:]


@needs_kernels
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_single_precision_against_double(setting: tuple[Any, ...], last: bool) -> None:
    components, rank, groups, filters, stride, padding, dilation, per_channel = setting
    torch.manual_seed(0)
    p, weight = (
        make(components, rank, 4 if per_channel else 1).to(torch.float32),
        torch.randn(filters, 4 // groups, 3, 3).float(),
    )
    weight = weight.to(memory_format=torch.channels_last) if last else weight
    geometry = (stride, padding, dilation, groups)
    direction = torch.randn(expected_conv2d(p, weight, None, *geometry).shape)
    ours = gradients(p, weight, direction, *geometry)
    with plain():
        exact = gradients(p.to(torch.float64), weight.double(), direction, *geometry)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 1e-6 * b.norm() + 1e-12
    with torch.inference_mode():  # in place
        assert torch.equal(expected_conv2d(p, weight, None, *geometry), ours[0])
    for a, b in zip(ours, gradients(p, weight, direction, *geometry), strict=True):
        assert torch.equal(a, b)


@needs_kernels
@pytest.mark.parametrize("components", [1, 2])
def test_long_rows(components: int) -> None:
    """More touched windows side by side than the kernels take at once, with gaps and without."""
    torch.manual_seed(0)
    observed = torch.ones(2, 1, 12, 150, dtype=torch.bool)
    observed[0, :, 3:9, 5:145] = False
    observed[1] = torch.rand(12, 150) > 0.3
    p, weight = random_mfa(2, components, 4, (3, 12, 150), observed).to(torch.float32), torch.randn(33, 3, 5, 5).float()
    direction = torch.randn(expected_conv2d(p, weight, None, 1, 2).shape)
    ours = gradients(p, weight, direction, 1, 2)
    with plain():
        exact = gradients(p.to(torch.float64), weight.double(), direction, 1, 2)
        theirs = gradients(p, weight, direction, 1, 2)
    for a, b, c in zip(ours, exact, theirs, strict=True):
        # The gradient of weights is a long sum, in which torch's own operations lose digits as well.
        assert (a - b).norm() <= max(1e-6 * b.norm() + 1e-12, 2 * (c - b).norm())
    with torch.inference_mode():
        assert torch.equal(expected_conv2d(p, weight, None, 1, 2), ours[0])


@needs_kernels
def test_no_window_sees_the_image() -> None:
    p = random_mfa(2, 1, 3, (3, 1, 1), torch.zeros(2, 1, 1, 1, dtype=torch.bool))
    weight, bias = torch.randn(4, 3, 1, 1), torch.randn(4)
    found = expected_conv2d(p, weight, bias, 10, 3)  # its only window lies in the padding
    torch.testing.assert_close(found, bias.relu().view(1, 4, 1, 1).expand(2, -1, -1, -1))


@needs_kernels
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_everything_or_nothing_is_missing(share: float) -> None:
    p, weight = make(2, 2, 1), torch.randn(5, 4, 3, 3, requires_grad=True)
    means = p.means[:, :1].expand_as(p.means) if share == 0 else p.means
    p = MFA(p.logits, means, p.factors, p.noise, torch.full((3, 1, 17, 19), share == 0))
    with plain():
        expected = expected_conv2d(p, weight)
    result = expected_conv2d(p, weight)
    torch.testing.assert_close(result, expected)
    assert ("ExpectedReLU" in type(result.grad_fn).__name__) == (share > 0)


@needs_kernels
def test_layouts_threads_and_what_is_not_a_number() -> None:
    """Strided inputs and gradients, several callers at a time, and a NaN that stays where it was."""
    p, conv = make(1, 3, 1), nn.Conv2d(4, 6, 3, padding=1)
    expected = expected_conv2d(p, conv.weight, conv.bias, padding=1)
    columns = (t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (p.means, p.factors, p.noise))
    strided = MFA(p.logits, *columns, p.observed)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(expected_conv2d, strided, conv.weight, conv.bias, padding=1) for _ in range(8)]
        for job in jobs:
            torch.testing.assert_close(job.result(), expected)
    given = (torch.ones(()).expand_as(expected), torch.ones_like(expected))
    one, ones = (torch.autograd.grad(expected, conv.weight, g, retain_graph=True)[0] for g in given)
    assert torch.equal(one, ones)
    means = p.means.clone()
    means[0, 0, 0, 4, 9] = torch.nan  # observed or not: it is in no window of the other images
    result = expected_conv2d(
        MFA(p.logits, means, p.factors, p.noise, p.observed, check=False), conv.weight, conv.bias, padding=1
    )
    assert result[0, :, 3:6, 8:11].isnan().all()
    assert result.isnan().sum() == 6 * 9


# Machines without them --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has not looked for the kernels yet, and an empty cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    compiled._library.cache_clear()
    yield tmp_path
    compiled._library.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The same result by torch's own operations, without a word; `misconv doctor` tells why."""
    p, weight = make(1, 2, 1), torch.randn(5, 4, 3, 3)
    for compiler, reason in (
        ("no-such-compiler", "no C++ compiler no-such-compiler was found"),
        (script(fresh / "broken", "echo 'sorry: out of order' >&2; exit 3"), "sorry: out of order"),
    ):
        monkeypatch.setenv("CXX", compiler)
        compiled._library.cache_clear()
        with plain():
            expected = expected_conv2d(p, weight)
        torch.testing.assert_close(expected_conv2d(p, weight), expected)
        assert reason in str(compiled.why_not())
        assert any(reason in line for line in _doctor.lines(_doctor.examine()))
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in (fresh / "cache").rglob("*")] == ["misconv"]


def test_where_nothing_can_be_written(fresh: Path) -> None:
    (fresh / "cache").write_text("a file, not a folder")
    assert compiled.why_not() is not None


@needs_kernels
def test_several_at_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the cache is whole, whoever wrote it; here by a compiler that takes what is there already."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    real = compiled._compiled()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(fresh / "cache"))
    copy = f'while [ "$1" != -o ]; do shift; done; sleep 0.1; cp {real} "$2"'
    monkeypatch.setenv("CXX", script(fresh / "quick", copy))
    with ThreadPoolExecutor(4) as pool:
        paths = {job.result() for job in [pool.submit(compiled._compiled) for _ in range(4)]}
    assert len(paths) == 1
    assert [path.name for path in (fresh / "cache" / "misconv").iterdir()] == [next(iter(paths)).name]
    assert compiled.why_not() is None

"""The whole way of a user, with tensors on the CPU and on a GPU, on a machine that has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision

import misconv

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["ConvDMFA", "SMFA"])
def test_fit_convert_predict_save_and_load(kind: str, device: str, tmp_path: Path) -> None:
    """Everything stays where the caller's tensors are."""
    torch.set_default_dtype(torch.float32)
    images = torch.rand(32, 3, 32, 32, device=device)
    images[~misconv.missing.square(32, 32, 32, device=device).expand_as(images)] = torch.nan
    x, observed = misconv.observe(images)
    if kind == "SMFA":
        density: torch.nn.Module = misconv.SMFA(components=2, rank=2).fit(x, observed, iterations=2)
    else:
        density = misconv.ConvDMFA(channels=3, rank=2, widths=(8, 16), depths=(1, 1, 1)).to(device)
        misconv.fit_density(density, x, observed, epochs=1, progress=False)
    p = density(x[:4], observed[:4])
    assert p.device.type == device
    filled = misconv.impute.by_density(density)(x[:4], observed[:4])
    assert filled.device.type == device
    assert torch.equal(filled[observed[:4].expand_as(filled)], x[:4][observed[:4].expand_as(filled)])

    net = misconv.convert(torchvision.models.resnet18(num_classes=10).to(device), density).eval()
    with torch.no_grad():
        y = net(images[:4])
        assert y.device.type == device
        assert y.isfinite().all()
        complete = torch.rand(4, 3, 32, 32, device=device)
        torch.testing.assert_close(net(complete), net.network(complete), rtol=1e-3, atol=1e-3)
    said = misconv.predictive(net, p, samples=4)
    assert said.probabilities.device.type == device
    torch.testing.assert_close(said.probabilities.sum(1), torch.ones(4, device=device))
    net.train()(images).sum().backward()
    assert all(value.device.type == device for value in net.state_dict().values())

    path = tmp_path / "density.safetensors"
    misconv.save(density, path)
    loaded = misconv.load(path).to(device).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x[:4], observed[:4]).mean, density.eval()(x[:4], observed[:4]).mean)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_where_is_said_in_one_sentence() -> None:
    torch.set_default_dtype(torch.float32)
    x = torch.rand(2, 3, 32, 32, device="cpu")
    observed = torch.rand(2, 1, 32, 32, device="cpu") < 0.7
    density = misconv.ConvDMFA(channels=3, rank=1, widths=(8,), depths=(1,)).cpu()
    net = misconv.convert(torchvision.models.resnet18(num_classes=3).cpu(), density, train_density=True)
    with pytest.raises(ValueError, match=r"x is on cpu, observed on cpu, the density on cuda:0, the network on cuda:0"):
        net.cuda()(x, observed)
    with pytest.raises(ValueError, match=r"cuda:0") as told:
        density(x, observed)  # on the GPU with the network
    assert "cpu" in str(told.value)
    assert len(str(told.value).splitlines()) == 1
    p = misconv.MFA.point(x)
    with pytest.raises(ValueError, match=r"cuda:0"):
        misconv.MisConv2d(3, 4, 3).cuda()(p)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; tests/test_cli.py runs it without one")
@pytest.mark.parametrize("command", [["demo", "--quick", "--out", "report"]], ids=["demo"])
def test_the_first_command_of_a_newcomer(command: list[str], tmp_path: Path) -> None:
    """Nothing but its own words: no traceback, no advice of a library."""
    environment = os.environ | {"COLUMNS": "120"}
    result = subprocess.run(
        [sys.executable, "-m", "misconv", *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Tensor Cores" not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "report" / "index.html").exists()

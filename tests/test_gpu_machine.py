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
from misconv._train import one_device

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


@pytest.mark.parametrize("layer", ["zeros", "reflect", "circular", "gelu", "norm"])
def test_another_default_device_changes_nothing(layer: str) -> None:
    """A tensor that is made somewhere inside must be where the caller's are: on `meta` it would have no values at all."""
    torch.set_default_dtype(torch.float32)
    cpu = torch.device("cpu")
    with cpu:
        x, observed = torch.rand(8, 3, 16, 16), misconv.missing.square(8, 16, 16)
        density = misconv.UNetDMFA(3, components=2, rank=2, widths=(8, 8), depths=(1, 1))
        mode = layer if layer in ("zeros", "reflect", "circular") else "zeros"
        conv = misconv.MisConv2d(
            3, 8, 3, padding=1, padding_mode=mode, activation="gelu" if layer == "gelu" else "relu",
            norm=torch.nn.BatchNorm2d(8) if layer == "norm" else None,
        )  # fmt: skip

    def responses() -> list[torch.Tensor]:
        p = density(x, observed)
        y = conv(p)
        grads = torch.autograd.grad(y.sum(), [*conv.parameters(), *density.parameters()], allow_unused=True)
        with torch.no_grad():
            return [y, conv(p), p.log_prob(x, ~observed), *(g for g in grads if g is not None)]

    with cpu:
        expected = responses()
    with torch.device("meta"):
        found = responses()
        assert density(x, observed).sample(2).device == cpu
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="this Adam counts steps on the default device"
)
def test_training_under_another_default_device() -> None:
    torch.set_default_dtype(torch.float32)
    with torch.device("cpu"):
        x, observed = torch.rand(24, 1, 12, 12), misconv.missing.square(24, 12, 12)
        density = misconv.UNetDMFA(1, rank=1, widths=(4, 4), depths=(1, 1))
        network = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(4, 2),
        )
        labels = torch.arange(24) % 2
    fabric = one_device("cpu")
    with torch.device("meta"):
        misconv.fit_density(density, x, observed, steps=2, progress=False, fabric=fabric)
        net = misconv.convert(network, density)
        misconv.training.fit_classifier(net, (x, observed), labels, epochs=1, progress=False, fabric=fabric)
        assert (
            misconv.predictive(net.eval(), x.where(observed, torch.nan), samples=2).probabilities.device.type == "cpu"
        )
        assert misconv.assess(density, x, observed).verdict()
        for fill in (misconv.impute.nearest, misconv.impute.push_pull):
            assert fill(x, observed).device.type == "cpu"


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

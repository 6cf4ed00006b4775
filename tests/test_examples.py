"""The examples run, on tiny data; and a converted network in two processes learns what it learns in one."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def test_pretrained_resnet() -> None:
    probabilities = load("pretrained_resnet")["main"](images=8)
    assert probabilities.shape == (8, 10)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(8))


def test_segmentation_learns() -> None:
    assert load("segmentation")["main"](images=256, epochs=3) > 0.9


@pytest.mark.filterwarnings("ignore::Warning:pytorch_lightning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.filterwarnings("ignore:.*module.s. in eval mode")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_lightning_trainer() -> None:
    assert load("lightning_module")["main"](images=256, epochs=4) > 0.5


def test_torchrun_with_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"]
    command += [str(FOLDER / "distributed.py"), "--images", "128", "--epochs", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 processes, loss" in done.stdout


GRADIENTS = """
import sys, torch, torch.distributed as dist
from torch import nn
import misconv
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
cnn = nn.Sequential(nn.Conv2d(2, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3))
net = misconv.convert(cnn, misconv.LinearDMFA((2, 6, 6), components=2, rank=1))
torch.manual_seed(1)
x = torch.rand(8, 2, 6, 6).masked_fill(torch.rand(8, 1, 6, 6) < 0.3, torch.nan)
labels = torch.randint(3, (8,))
if rank == 0:
    nn.functional.cross_entropy(net(x), labels).backward()
    torch.save({n: p.grad.clone() for n, p in net.named_parameters()}, f"{folder}/one.pt")
    net.zero_grad()
parallel = nn.parallel.DistributedDataParallel(net)
mine = slice(4 * rank, 4 * rank + 4)
nn.functional.cross_entropy(parallel(x[mine]), labels[mine]).backward()
torch.save({n: p.grad for n, p in net.named_parameters()}, f"{folder}/two{rank}.pt")
dist.destroy_process_group()
"""


def test_two_processes_give_the_gradients_of_one(tmp_path: Path) -> None:
    script = tmp_path / "gradients.py"
    script.write_text(GRADIENTS)
    commands = [[sys.executable, str(script), str(rank), str(tmp_path)] for rank in (0, 1)]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait(timeout=120) == 0
    one = torch.load(tmp_path / "one.pt")
    assert any(name.startswith("density.factors") for name in one)  # the loss reaches the density's variance too
    for rank in (0, 1):
        two = torch.load(tmp_path / f"two{rank}.pt")
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-9, atol=1e-12)


def test_onnx(tmp_path: Path) -> None:
    """Exported with its density, and run in onnxruntime, NaN and all."""
    import onnxruntime

    import misconv

    torch.manual_seed(0)
    stem = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
    cnn = torch.nn.Sequential(*stem, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4))
    net = misconv.convert(cnn, misconv.ConvDMFA(3, rank=2, widths=(8,), depths=(1,))).eval()
    x = torch.rand(2, 3, 16, 16).masked_fill(~misconv.missing.square(2, 16, 16), torch.nan)
    with warnings.catch_warnings(action="ignore"):  # the exporter tells of its own deprecations
        torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(result), net(x), rtol=1e-5, atol=1e-5)

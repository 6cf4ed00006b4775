"""The examples run, on tiny data."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_script, torchrun

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
    assert load("segmentation")["main"](images=256, epochs=6) > 0.95


@pytest.mark.filterwarnings("ignore::Warning:pytorch_lightning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.filterwarnings("ignore:.*module.s. in eval mode")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_lightning_trainer() -> None:
    with torch.device("cpu"):  # its Trainer asks for the CPU, and torch's samplers for a default device that is one
        assert load("lightning_module")["main"](images=256, epochs=4) > 0.5


@pytest.mark.parametrize("name", ["pretrained_resnet", "segmentation", "lightning_module"])
def test_as_a_newcomer_runs_it(name: str) -> None:
    """In a process where tensors are on the CPU, also beside a GPU; no advice about Tensor Cores."""
    printed = run_script(FOLDER / f"{name}.py", "--images", "64", "--epochs", "1")
    assert name == "lightning_module" or "Tensor Cores" not in printed


def test_torchrun_with_two_processes() -> None:
    assert "2 processes, loss" in torchrun(FOLDER / "distributed.py", "--images", "128", "--epochs", "1")

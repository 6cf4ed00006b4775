"""Several processes train as one: real ones, that talk over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

START = """
import gc, sys, torch
from lightning_fabric import Fabric
from torch import nn
import misconv
from misconv import MFA, SMFA, ConvDMFA, LinearDMFA, convert, data, fit_density, missing
from misconv.training import fit_classifier
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # Adam makes a step of rounding errors where a gradient is zero
processes, result, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
fabric = Fabric(accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto")
fabric.launch()
x, labels = data.digits()
x, labels = x[:128].double(), labels[:128]
observed = missing.square(128, 8, 8, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
found = {}
"""
END = """
if fabric.global_rank == 0:
    torch.save(found, result)
if torch.distributed.is_initialized():
    gc.collect()  # what still knows the group would keep its threads alive beyond the end of Python
    torch.distributed.destroy_process_group()
"""


def run(folder: Path, script: str, processes: int, name: str | None = None) -> dict[str, Any]:
    """What the first process has found."""
    path, result = folder / "script.py", folder / f"{name or processes}.pt"
    path.write_text(START + script + END)
    command = [sys.executable, "-W", "ignore::UserWarning", str(path), str(processes), str(result), str(folder)]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(result)
    return found


def agree(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            two[name], value, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


DENSITY = """
density = ConvDMFA(1, rank=2, widths=(8,), depths=(1,))  # with BatchNorm
norms = [m for m in density.modules() if isinstance(m, nn.BatchNorm2d)]
history = fit_density(density, x, observed, epochs=2, learning_rate=1e-4, batch_size=BATCH, fabric=fabric, progress=False)
assert norms and all(type(m) is nn.BatchNorm2d for m in norms)
found = density.state_dict() | {name: torch.tensor(history[-1][name]) for name in history[-1]}
"""


@pytest.mark.parametrize("batch_size", [3])  # shares of unequal size
def test_a_density_with_batch_normalization(batch_size: int, tmp_path: Path) -> None:
    """Of the whole batch; of 3 images one process has one, and of the last of validation, 13 in all, none."""
    script = DENSITY.replace("BATCH", str(batch_size))
    agree(run(tmp_path, script, 1), run(tmp_path, script, 2))


def test_em(tmp_path: Path) -> None:
    script = """
density = SMFA(2, 1)
fit_density(density, x[:127], observed[:127], epochs=3, fabric=fabric, progress=False)
found = density.state_dict()
"""
    agree(run(tmp_path, script, 1), run(tmp_path, script, 2))


def test_one_process_has_complete_images_and_does_not_need_the_density(tmp_path: Path) -> None:
    """Its parameters get no gradient there, and all processes wait for it; in batches of two that are complete, nowhere."""
    script = """
observed[::2] = True
network = convert(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)), LinearDMFA((1, 8, 8), rank=1))
spare = network.spare = nn.Linear(2, 2)  # nobody needs it
before = spare.weight.clone()
used = network.density.noise.weight.clone()
fit_classifier(
    network, (x, observed), labels, validation_inputs=(x[:9], observed[:9]), validation_labels=labels[:9], epochs=2,
    learning_rate=1e-4, batch_size=2, fabric=fabric, progress=False,
)
assert torch.equal(spare.weight, before)
assert not torch.equal(network.density.noise.weight, used)
found = network.state_dict()
"""
    agree(run(tmp_path, script, 1), run(tmp_path, script, 2))


def test_a_checkpoint_is_continued_by_all(tmp_path: Path) -> None:
    """The first process alone reads it: the others have another working folder, where it is not."""
    script = """
import os
home = folder if fabric.global_rank == 0 else folder + "/elsewhere"
os.makedirs(home, exist_ok=True)
os.chdir(home)
density = ConvDMFA(1, rank=2, widths=(8,), depths=(1,))
mixture = SMFA(2, 1)
histories = [
    fit_density(density, x, observed, epochs=EPOCHS, batch_size=42, fabric=fabric, progress=False, CHECKPOINTa),
    fit_density(mixture, x, observed, epochs=EPOCHS, fabric=fabric, progress=False, CHECKPOINTb),
]
found = density.state_dict() | mixture.state_dict()
found["epochs"] = torch.tensor([len(history) for history in histories])
"""
    straight = run(
        tmp_path, script.replace("CHECKPOINTa", "").replace("CHECKPOINTb", "").replace("EPOCHS", "3"), 2, "straight"
    )
    script = script.replace("CHECKPOINTa", "checkpoint='a'").replace("CHECKPOINTb", "checkpoint='b'")
    run(tmp_path, script.replace("EPOCHS", "2"), 2, "half")
    assert (tmp_path / "a").exists()
    assert not list((tmp_path / "elsewhere").iterdir())
    resumed = run(tmp_path, script.replace("EPOCHS", "3"), 2, "resumed")
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name


def test_all_processes_refuse_together(tmp_path: Path) -> None:
    """An error in one of them must not let the others wait for ever."""
    script = """
def refused(message, *args, **options):
    try:
        fit_density(*args, fabric=fabric, progress=False, epochs=1, **options)
    except (ValueError, OSError, FloatingPointError) as error:
        assert message in str(error), error
        found[message] = torch.tensor(1)
    else:
        raise AssertionError(message)

def small():
    torch.manual_seed(0)
    return ConvDMFA(1, rank=1, widths=(4,), depths=(1,))

fit_density(small(), x, observed, epochs=1, fabric=fabric, progress=False, checkpoint=folder + "/run")
refused("but its seed is 0 and not 1", small(), x, observed, seed=1, checkpoint=folder + "/run")
refused("checkpoint must be in a folder that exists", small(), x, observed, checkpoint=folder + "/nowhere/run")
refused("at least one for each of the 2 processes", small(), x, observed, batch_size=1)
refused("at least one for each of the 2 processes", small(), x[:1], observed[:1])
refused("at least one for each of the 2 processes", SMFA(1, 1), x[:1], observed[:1])
refused("must be called with the same module, data and settings", small(), x + fabric.global_rank, observed)
refused("must be called with the same module, data and settings", small(), x, observed, batch_size=10 + fabric.global_rank)
refused("learning_rate must be a number from 0 to 1e+30", small(), x, observed, learning_rate=1e31)
"""
    assert len(run(tmp_path, script, 2)) == 5

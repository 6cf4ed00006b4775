"""Several processes train as one: real ones, that talk over gloo.

Starting them takes longest, so all scripts run one after the other in the same two processes, and once more alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.processes import run_script, torchrun

RUN = """
import gc, json, sys, torch
from lightning_fabric import Fabric
from torch import nn
from misconv import MFA, SMFA, ConvDMFA, LinearDMFA, convert, data, fit_density, missing
from misconv.training import fit_classifier
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # Adam makes a step of rounding errors where a gradient is zero
processes, folder = int(sys.argv[1]), sys.argv[2]
fabric = Fabric(accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto")
fabric.launch()
results = {}
with open(folder + "/scripts.json") as file:
    scripts = json.load(file)
for name, script in scripts.items():
    x, labels = data.digits()
    x, labels = x[:128].double(), labels[:128]
    observed = missing.square(128, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    names = {**globals(), "found": {}}
    exec(compile(script, name, "exec"), names)
    results[name] = names["found"]
if fabric.global_rank == 0:
    torch.save(results, f"{folder}/{processes}.pt")
if torch.distributed.is_initialized():
    del names
    gc.collect()  # what still knows the group would keep its threads alive beyond the end of Python
    torch.distributed.destroy_process_group()
"""

# Of the whole batch; of 3 images one process has one, and of the last of validation, 13 in all, none.
BATCH_NORMALIZATION = """
density = ConvDMFA(1, rank=2, widths=(8,), depths=(1,))  # with BatchNorm
norms = [m for m in density.modules() if isinstance(m, nn.BatchNorm2d)]
history = fit_density(density, x, observed, epochs=1, learning_rate=1e-4, batch_size=3, fabric=fabric, progress=False)
assert norms and all(type(m) is nn.BatchNorm2d for m in norms)
found = density.state_dict() | {name: torch.tensor(history[-1][name]) for name in history[-1]}
"""

# Each process reads its share of a Dataset; of a loader that shuffles all of them take their share of the same batches,
# also of one that is smaller than they are many.
STREAMS = """
from torch.utils.data import DataLoader, TensorDataset
images = TensorDataset(x[:29].masked_fill(~observed[:29], torch.nan))
for kind, source in (("dataset", images), ("loader", DataLoader(images, 5, shuffle=True))):
    torch.manual_seed(0)
    density = ConvDMFA(1, rank=1, widths=(4,), depths=(1,))
    history = fit_density(density, source, steps=14, learning_rate=1e-4, batch_size=3, fabric=fabric, progress=False)
    found |= {f"{kind}.{name}": value for name, value in density.state_dict().items()}
    found |= {f"{kind}.{name}": torch.tensor(history[-1][name]) for name in history[-1]}
"""

EM = """
density = SMFA(2, 1)
fit_density(density, x[:127], observed[:127], epochs=3, fabric=fabric, progress=False)
found = density.state_dict()
"""

# One process has complete images: the density's parameters get no gradient there, and all processes wait for it; in
# batches of two that are complete, nowhere.
COMPLETE_IMAGES = """
observed[::2] = True
network = convert(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)), LinearDMFA((1, 8, 8), rank=1), train_density=True)
spare = network.spare = nn.Linear(2, 2)  # nobody needs it
before = spare.weight.clone()
used = network.density.noise.weight.clone()
fit_classifier(
    network, (x, observed), labels, validation_inputs=(x[:9], observed[:9]), validation_labels=labels[:9], epochs=1,
    learning_rate=1e-4, batch_size=2, fabric=fabric, progress=False,
)
assert torch.equal(spare.weight, before)
assert not torch.equal(network.density.noise.weight, used)
found = network.state_dict()
"""

# The first process alone reads a checkpoint: the others have another working folder, where it is not.
CHECKPOINT = """
import os
home, before = folder if fabric.global_rank == 0 else folder + "/elsewhere", os.getcwd()
os.makedirs(home, exist_ok=True)
os.chdir(home)

def fit(epochs, **checkpoints):
    torch.manual_seed(0)
    density, mixture = ConvDMFA(1, rank=2, widths=(8,), depths=(1,)), SMFA(2, 1)
    options = {"epochs": epochs, "learning_rate": 1e-3, "fabric": fabric, "progress": False}
    first = fit_density(density, x, observed, batch_size=42, checkpoint=checkpoints.get("network"), **options)
    second = fit_density(mixture, x, observed, checkpoint=checkpoints.get("em"), **options)
    return density.state_dict() | mixture.state_dict() | {"epochs": torch.tensor([len(first), len(second)])}

straight = fit(3)
fit(2, network="a", em="b")
assert os.path.exists("a") == os.path.exists("b") == (fabric.global_rank == 0)
found = fit(3, network="a", em="b")
for key, value in straight.items():
    assert torch.equal(found[key], value), key
os.chdir(before)
"""

# An error in one process must not let the others wait for ever.
REFUSED = """
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

if processes == 2:
    fit_density(small(), x, observed, epochs=1, fabric=fabric, progress=False, checkpoint=folder + "/run")
    refused("but its seed is 0 and not 1", small(), x, observed, seed=1, checkpoint=folder + "/run")
    refused("checkpoint must be in a folder that exists", small(), x, observed, checkpoint=folder + "/nowhere/run")
    refused("at least one for each of the 2 processes", small(), x, observed, batch_size=1)
    refused("at least one for each of the 2 processes", small(), x[:1], observed[:1])
    refused("at least one for each of the 2 processes", SMFA(1, 1), x[:1], observed[:1])
    refused("must be called with the same module, data and settings", small(), x + fabric.global_rank, observed)
    refused("must be called with the same module, data and settings", small(), x, observed, batch_size=10 + fabric.global_rank)
    refused("learning_rate must be a number from 0 to 1e+30", small(), x, observed, learning_rate=1e31)
    assert len(found) == 5
"""

# Of 127 images one process has one more than the other, and of some images nothing is counted.
METRICS = """
from misconv.metrics import MaskedMSE, MaskedPSNR, MaskedSSIM
x, observed, noisy = x[:127], observed[:127], x[:127] + 0.1 * torch.randn(127, 1, 8, 8)
observed[:40:2] = False
mine = slice(fabric.global_rank, None, processes)
metrics = {"mse": MaskedMSE(), "psnr": MaskedPSNR(), "images": MaskedPSNR(per_image=True), "ssim": MaskedSSIM(size=3)}
for name, metric in metrics.items():
    metric.update(noisy[mine], x[mine], observed[mine])
    found[name] = metric.compute()
"""

ALIKE = {
    "batch normalization": BATCH_NORMALIZATION, "streams": STREAMS, "EM": EM, "complete images": COMPLETE_IMAGES,
    "metrics": METRICS,
}  # fmt: skip
SCRIPTS = {**ALIKE, "checkpoint": CHECKPOINT, "refused": REFUSED}


def run(folder: Path, processes: int) -> dict[str, dict[str, Any]]:
    """What the first process has found in every script."""
    path = folder / "run.py"
    path.write_text(RUN)
    (torchrun if processes == 2 else run_script)(path, str(processes), str(folder))
    found: dict[str, dict[str, Any]] = torch.load(folder / f"{processes}.pt")
    return found


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    (tmp_path / "scripts.json").write_text(json.dumps(SCRIPTS))
    two = run(tmp_path, 2)
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "scripts.json").write_text(json.dumps(ALIKE))
    one = run(tmp_path, 1)
    for script in ALIKE:
        assert one[script].keys() == two[script].keys()
        for name, value in one[script].items():
            torch.testing.assert_close(
                two[script][name], value, rtol=1e-6, atol=1e-9,
                msg=lambda text, place=f"{script}, {name}": f"{place}: {text}",
            )  # fmt: skip

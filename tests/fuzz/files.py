"""Damaged and hostile files: `misconv.load` refuses them shortly, or returns the very bits that were saved."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import misconv
from misconv import impute, store
from tests import damage
from tests.fuzz.child import bounded
from tests.fuzz.outcome import Choices, FuzzFailure, Outcome, expect, ok, refused

SECONDS, MEGABYTES = 10, 600
State = dict[str, Tensor]


@cache
def originals() -> dict[str, tuple[bytes, Any]]:
    """Files as they were saved, and what made them."""
    torch.manual_seed(0)
    x, observed = torch.rand(6, 1, 4, 4), torch.rand(6, 1, 4, 4) < 0.8
    observed[0] = True
    observed[:, :, 0, 0] = True
    models: dict[str, nn.Module] = {
        "network": nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)
        ).eval(),
        "layer": misconv.MisConv2d(1, 2, 3, norm=nn.BatchNorm2d(2), activation="silu"),
        "SMFA": misconv.SMFA(2, 1).fit(x, observed, iterations=2),
        "ConvDMFA": misconv.ConvDMFA(1, rank=1, widths=(4,), depths=(1,)),
        "KNN": impute.KNN(2).fit(x, observed),
        "converted": misconv.convert(
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten()), misconv.SMFA(2, 1, (1, 8, 8))
        ),
        "registry": torchvision.models.squeezenet1_1(num_classes=2).eval(),
        "many": nn.Sequential(nn.LSTM(2, 3), nn.ModuleDict({"a": nn.PReLU(), "b": nn.Embedding(3, 2)})),
    }
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        for name, model in models.items():
            misconv.save(model, path)
            files[name] = path.read_bytes(), model
        store.write(path, {"a": torch.rand(3), "b": torch.arange(4)}, {"epoch": 3})
        files["tensors"] = path.read_bytes(), None
    return files


def case(seed: int, device: str = "cpu") -> Outcome:
    """One file, damaged by chance or made to do harm, loaded in a process with bounds."""
    choices = Choices("files", seed)
    name = choices.pick(list(originals()))
    data, model = originals()[name]
    chance = choices.chance(0.6)
    what, changed = (damage.damaged if chance else damage.hostile)(data, choices)
    into = model is not None and choices.chance(0.4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(changed)
        try:
            said = bounded(lambda: _load(path, name, into), seconds=SECONDS, megabytes=MEGABYTES)
        except FuzzFailure as error:
            raise FuzzFailure(f"{name}, {what}, {'into a model' if into else 'new'}: {error}") from error
    label = f"{name}, {what}: "
    if said["refused"] is not None:
        message = said["refused"]
        expect(len(message) <= 700 and message.count("\n") <= 2, f"{label}a message of {len(message)} characters")
        expect(said["unchanged"], f"{label}refused, but the model was changed")
        return refused("damaged" if chance else "hostile")
    expect(not chance or said["same"], f"{label}loaded, with other bits than were saved")
    return ok("the same bits" if said["same"] else "a hostile file that is harmless")


def _load(path: Path, name: str, into: bool) -> dict[str, Any]:
    """In the child: try it, and say what came of it."""
    data, model = originals()[name]
    del data
    before = None if model is None else _state(model)
    try:
        if model is None:
            tensors, meta = store.read(path)
            same = meta == {"epoch": 3} and torch.equal(tensors["b"], torch.arange(4)) and len(tensors) == 2
            return {"refused": None, "same": same, "unchanged": True}
        loaded = misconv.load(path, into=model if into else None)
    except (ValueError, OSError) as error:
        unchanged = model is None or _equal(_state(model), before)
        return {"refused": str(error), "unchanged": unchanged, "same": False}
    assert before is not None
    same = _equal(_state(loaded), before) and type(loaded) is type(model)
    return {"refused": None, "same": same, "unchanged": True}


def _state(model: nn.Module) -> State:
    """Everything that `save` promises to keep."""
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    flags = [m.training for m in model.modules()] + [p.requires_grad for p in model.parameters()]
    return tensors | {"flags": torch.tensor(flags)}


def _equal(a: State, b: State | None) -> bool:
    if b is None or a.keys() != b.keys():
        return False
    return all(a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and a[n].equal(b[n]) for n in a)

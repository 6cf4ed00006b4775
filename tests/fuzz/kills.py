"""Processes that are killed while they save or train: no file is lost or cut, and what resumes has the same bits."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import misconv
from misconv import store
from tests.fuzz.child import killed
from tests.fuzz.outcome import Choices, Outcome, expect, ok

EPOCHS = 3


def case(seed: int, device: str = "cpu") -> Outcome:
    """One kind of work, killed once or several times."""
    choices = Choices("kills", seed)
    kind = choices.weighted({_saves: 3, _training: 5, _cache: 2})
    with tempfile.TemporaryDirectory() as folder:
        return ok(kind(choices, Path(folder)))


# Saving --------------------------------------------------------------------------------------------------------------


@cache
def _models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(size, 8) for size in (3, 300, 3000)]


def _saves(choices: Choices, folder: Path) -> str:
    """Models saved over one another: the file is one of them, and the next save leaves nothing but the file."""
    path = folder / "model"
    misconv.save(_models()[0], path)

    def save_all() -> None:
        for number in range(10_000):
            misconv.save(_models()[number % 3], path)

    for _ in range(choices.randint(1, 3)):
        killed(save_all, choices.uniform(0, 0.05))
        found = misconv.load(path).state_dict()
        same = [
            all(torch.equal(found[n], t) for n, t in m.state_dict().items() if found[n].shape == t.shape)
            for m in _models()
        ]
        expect(any(same), "the file holds a model that was never saved")
    misconv.save(_models()[1], path)
    left = sorted(entry.name for entry in folder.iterdir())
    expect(left == ["model"], f"files are left behind: {left}")
    return "save"


# Training ------------------------------------------------------------------------------------------------------------


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(12, 1, 6, 6, generator=generator), torch.rand(12, 1, 6, 6, generator=generator) < 0.8


def _fabric() -> Any:
    """The CPU, also where there is a GPU: a process that has used one cannot be forked."""
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


def _density(kind: str, checkpoint: Path | None) -> list[Tensor]:
    """All that a training leaves: parameters, buffers and numbers."""
    torch.manual_seed(1)
    x, observed = _data()
    observed[0] = True
    density = misconv.SMFA(2, 1) if kind == "SMFA" else misconv.ConvDMFA(1, rank=1, widths=(4,), depths=(1,))
    history = misconv.fit_density(
        density,
        x,
        observed,
        epochs=EPOCHS,
        batch_size=4,
        checkpoint=checkpoint,
        progress=False,
        seed=2,
        validation=0.2,
        fabric=_fabric(),
    )
    return _left(density, history)


def _classifier(checkpoint: Path | None) -> list[Tensor]:
    from misconv.training import fit_classifier

    torch.manual_seed(1)
    x, _ = _data()
    network = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(48, 2)
    )
    history = fit_classifier(
        network, x, torch.arange(12) % 2, validation_inputs=x[:4], validation_labels=torch.arange(4) % 2, epochs=EPOCHS,
        batch_size=4, checkpoint=checkpoint, progress=False, seed=2, fabric=_fabric(),
    )  # fmt: skip
    return _left(network, history)


def _left(module: nn.Module, history: list[Any]) -> list[Tensor]:
    text = json.dumps(history, sort_keys=True).encode()
    numbers = torch.tensor(list(text), dtype=torch.uint8)
    return [*(t.detach().clone() for t in module.state_dict().values()), numbers]


TRAININGS: dict[str, Callable[[Path | None], list[Tensor]]] = {
    "ConvDMFA": lambda checkpoint: _density("ConvDMFA", checkpoint),
    "SMFA": lambda checkpoint: _density("SMFA", checkpoint),
    "classifier": _classifier,
}


@cache
def _uninterrupted(kind: str) -> tuple[list[Tensor], float]:
    """What a training leaves that nobody disturbs, and how many seconds it takes."""
    TRAININGS[kind](None)  # warm
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        left = TRAININGS[kind](Path(folder) / "checkpoint")
        return left, time.monotonic() - start


def _training(choices: Choices, folder: Path) -> str:
    """A training that is killed up to three times ends with the bits of one that is not."""
    kind = choices.pick(list(TRAININGS))
    expected, seconds = _uninterrupted(kind)
    path = folder / "checkpoint"
    kills, wanted = 0, choices.randint(1, 3)
    while kills < wanted:
        if killed(lambda: TRAININGS[kind](path), choices.uniform(0, seconds)):
            kills += 1
        else:  # it was done before: again, and less time
            path.unlink(missing_ok=True)
            seconds /= 2
        if path.exists():
            store.read(path)  # whole
    actual = TRAININGS[kind](path)
    same = len(actual) == len(expected) and all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    expect(same, f"{kind}: killed {kills} times and resumed, other bits came out")
    left = sorted(entry.name for entry in folder.iterdir())
    expect(set(left) <= {"checkpoint"}, f"{kind}: files are left behind: {left}")
    return f"{kind} training"


# The cache of finished work ------------------------------------------------------------------------------------------


def _cache(choices: Choices, folder: Path) -> str:
    """Records are kept one by one: killed between or inside of them, each is whole or not there, and none is lost.

    What is missing is kept by the next process, and what was there stays as it was, to the byte.
    """
    from misconv.paper.cache import Cache

    units = [({"method": "zero", "seed": seed}, {"accuracy": 0.5 + seed, "pad": "x" * 2000}) for seed in range(30)]

    def keep() -> None:
        cache = Cache(folder / "cache")
        checkpoint = cache.running([settings for settings, _ in units])
        for settings, record in units:
            if cache.get(settings) is None:
                store.write(checkpoint, {"a": torch.ones(3)}, {"epoch": settings["seed"]})
                cache.keep(settings, record)
                checkpoint.unlink(missing_ok=True)

    there: dict[Path, bytes] = {}
    for _ in range(choices.randint(1, 4)):
        killed(keep, choices.uniform(0, 0.05))
        cache = Cache(folder / "cache")
        for settings, record in units:
            found = cache.get(settings)
            expect(found in (None, {**record, "settings": settings}), "a record holds something else")
        now = {path: path.read_bytes() for path in (folder / "cache" / "records").glob("*.json")}
        expect(now.items() >= there.items(), "a record that was there is lost or changed")
        there = now
    keep()
    cache = Cache(folder / "cache")
    for settings, record in units:
        expect(cache.get(settings) == {**record, "settings": settings}, "a record is missing")
    left = [path.name for path in cache.running(units[0][0]).parent.iterdir() if not path.name.startswith(".")]
    expect(len(left) <= 1, f"more than the last checkpoint is left behind: {left}")
    return "cache"

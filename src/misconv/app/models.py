"""What the page has learned: densities of digits, of photographs and of single bands, and a classifier of digits.

They are fitted once, from data that ship with scikit-learn, and kept in the user's cache folder. An entry that is
damaged, that belongs to something else or to other settings is fitted again.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from misconv import data
from misconv.density import UNetDMFA
from misconv.layers import MisConv2d
from misconv.mfa import MFA
from misconv.missing import free_form, noise, square
from misconv.store import load, read_notes, save

__all__ = ["Models", "Settings", "cache_folder", "held_out_digits", "held_out_photographs", "prepare_models"]

Say = Callable[[str], None]
Module = TypeVar("Module", bound=nn.Module)

TRAINED_DIGITS = 1300  # the page shows the others
CLASSES = 10
_VALIDATION = 150  # of the trained digits, to choose the classifier's epoch
_RECIPE = 2  # a change of what is fitted below that the settings do not tell: add 1


@dataclass(frozen=True)
class Settings:
    """How long everything is fitted; by default for about a minute in all on one core."""

    digit_steps: int = 600
    photograph_steps: int = 200
    band_steps: int = 180
    classifier_epochs: int = 10
    side: int = 40  # of the crops of photographs, in pixels
    crops: int = 500
    batch_size: int = 16


@dataclass(frozen=True)
class Models:
    """All that is learned, in evaluation mode on the CPU."""

    digits: UNetDMFA
    photographs: UNetDMFA  # of three bands, red, green and blue
    band: UNetDMFA  # of a single one
    classifier: nn.Module  # MFA of digits -> logits (B, 10)


def cache_folder() -> Path:
    """Where fitted models are kept: `misconv/app` in the user's cache folder, that of XDG_CACHE_HOME if it is set."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    local = os.environ.get("LOCALAPPDATA", "") if sys.platform == "win32" else ""
    # By its specification a relative XDG_CACHE_HOME is to be ignored.
    base = Path(chosen) if os.path.isabs(chosen) else Path(local) if local else Path.home() / ".cache"
    return base / "misconv" / "app"


def prepare_models(folder: Path, say: Say, settings: Settings | None = None) -> Models:
    """Load the models from a folder; fit what is not there, and keep it there.

    Args:
        folder: it is created if need be. Where that is impossible the models are fitted and not kept.
        say: hears what is fitted, and why.
        settings: how long to fit.
    """
    settings = settings or Settings()
    cache = _Cache(folder, say, {"recipe": _RECIPE, **asdict(settings)})
    digits = cache.entry("digits", _new_digit_density, lambda new: _fit_digits(new, settings))
    photographs = cache.entry("photographs", _new_photograph_density, lambda new: _fit_photographs(new, settings))
    band = cache.entry("band", _new_band_density, lambda new: _fit_band(new, settings))
    classifier = cache.entry("classifier", _new_classifier, lambda new: _fit_classifier(new, digits, settings))
    return Models(digits, photographs, band, classifier)


def held_out_digits() -> tuple[Tensor, Tensor]:
    """Digits (N, 1, 8, 8) that nothing was learned from, and their labels (N,)."""
    images, labels = _shuffled_digits()
    return images[TRAINED_DIGITS:], labels[TRAINED_DIGITS:]


def held_out_photographs() -> list[Tensor]:
    """The right halves of the photographs (3, 427, 320), which nothing was learned from."""
    return [photograph.tensor_split(2, dim=2)[1] for photograph in data.photographs()]


# The cache ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cache:
    folder: Path
    say: Say
    notes: dict[str, Any]  # with which an entry must have been fitted

    def entry(self, name: str, new: Callable[[], Module], fit: Callable[[Module], None]) -> Module:
        """A model from its file, or fitted and written."""
        path = self.folder / f"{name}.safetensors"
        if path.exists():
            found = self._load(path, new())
            if found is not None:
                return found
            self.say(f"{path} is damaged or of another version; fitting it again")
        self.say(_TOLD[name])
        model = new()
        fit(model)
        self._keep(model.eval(), path)
        return model

    def _load(self, path: Path, into: Module) -> Module | None:
        try:
            if read_notes(path) != self.notes:
                return None
            return cast(Module, load(path, into=into)).eval()
        except (OSError, ValueError, TypeError, RuntimeError):
            return None

    def _keep(self, model: nn.Module, path: Path) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save(model, path, notes=self.notes)
        except OSError as error:
            self.say(f"it cannot be kept for the next start: {error}")


_TOLD = {
    "digits": "Learning what digits look like, from incomplete digits (once, about 15 s)",
    "photographs": "Learning what photographs look like, from incomplete crops (once, about 25 s)",
    "band": "Learning what a single band looks like (once, about 15 s)",
    "classifier": "Learning to read incomplete digits (once, about 10 s)",
}


# What is fitted ----------------------------------------------------------------------------------------------------


def _seeded(make: Callable[[], Module]) -> Module:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return make().float()


def _new_digit_density() -> UNetDMFA:
    return _seeded(lambda: UNetDMFA(1, components=3, rank=4, widths=(24, 48), depths=(1, 2), patch=1))


def _new_photograph_density() -> UNetDMFA:
    return _seeded(lambda: UNetDMFA(3, components=2, rank=4))


def _new_band_density() -> UNetDMFA:
    return _seeded(lambda: UNetDMFA(1, components=2, rank=4))


def _new_classifier() -> nn.Sequential:
    return _seeded(
        lambda: nn.Sequential(
            MisConv2d(1, 16, 3, padding=1, activation="relu"),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(32),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, CLASSES),
        )
    )  # fmt: skip


def _shuffled_digits() -> tuple[Tensor, Tensor]:
    images, labels = data.digits()
    order = torch.randperm(len(images), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return images[order], labels[order]


def _holes(count: int, side: int) -> Tensor:
    """Holes of several kinds and sizes, (N, 1, side, side): on the page anything may be painted."""
    generator = torch.Generator("cpu").manual_seed(1)
    kinds = [(shape, share) for share in (0.1, 0.25, 0.5) for shape in (square, free_form, noise)]
    size = -(-count // len(kinds))
    parts = [
        shape(size, side, side, fraction=share, generator=generator, device=torch.device("cpu"))
        for shape, share in kinds
    ]
    return torch.stack(parts, 1).flatten(0, 1)[:count]  # the kinds in turn


def _fit(density: UNetDMFA, images: Tensor, steps: int, batch_size: int, *, augment: bool) -> None:
    # Training and what it needs are not imported where all models are in the cache: the page then starts sooner.
    from misconv._train import one_device
    from misconv.training import fit_density

    observed = _holes(len(images), images.shape[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not good yet: the page tells its errors
        fit_density(
            density, images.where(observed, torch.nan), steps=steps, batch_size=batch_size, augment=augment,
            fabric=one_device("cpu"), progress=False,
        )  # fmt: skip


def _fit_digits(density: UNetDMFA, settings: Settings) -> None:
    _fit(density, _shuffled_digits()[0][:TRAINED_DIGITS], settings.digit_steps, 2 * settings.batch_size, augment=False)


def _fit_photographs(density: UNetDMFA, settings: Settings) -> None:
    _fit(density, _crops(settings), settings.photograph_steps, settings.batch_size, augment=True)


def _fit_band(density: UNetDMFA, settings: Settings) -> None:
    crops = _crops(settings)
    bands = torch.stack([crop[number % 3] for number, crop in enumerate(crops)]).unsqueeze(1)
    _fit(density, bands, settings.band_steps, settings.batch_size, augment=True)


def _crops(settings: Settings) -> Tensor:
    """Squares from anywhere in the left halves of the photographs, (N, 3, side, side)."""
    generator, side, found = torch.Generator("cpu").manual_seed(2), settings.side, []
    halves = [photograph.tensor_split(2, dim=2)[0] for photograph in data.photographs()]
    for number in range(settings.crops):
        half = halves[number % len(halves)]
        top, left = (int(torch.randint(n - side + 1, (), generator=generator, device="cpu")) for n in half.shape[1:])
        found.append(half[:, top : top + side, left : left + side])
    return torch.stack(found)


def _fit_classifier(network: nn.Sequential, density: UNetDMFA, settings: Settings) -> None:
    """On digits as they are, and on the same digits with two holes each."""
    from misconv._train import one_device
    from misconv.training import fit_classifier

    images, labels = (values[:TRAINED_DIGITS] for values in _shuffled_digits())
    images, labels = images.repeat(3, 1, 1, 1), labels.repeat(3)
    observed = _holes(len(images), 8)
    observed[:TRAINED_DIGITS] = True
    with torch.no_grad():
        p = density(images, observed)
    held = torch.arange(len(images)) % TRAINED_DIGITS >= TRAINED_DIGITS - _VALIDATION
    fit_classifier(
        network, _rows(p, ~held), labels[~held], validation_inputs=_rows(p, held), validation_labels=labels[held],
        epochs=settings.classifier_epochs, batch_size=64, learning_rate=3e-3, fabric=one_device("cpu"), progress=False,
    )  # fmt: skip


def _rows(p: MFA, chosen: Tensor) -> MFA:
    return p[chosen.nonzero().flatten()]

"""What one visitor looks at, and what each action does to it; the page calls these and shows what they return."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from misconv.app.analysis import analyse
from misconv.app.downloads import write_results
from misconv.app.drawing import photo_image
from misconv.app.holes import drawn_hole, pack_hole, unpack_hole
from misconv.app.models import Models
from misconv.app.pictures import Picture, digit, photograph, read_picture
from misconv.app.report import results_html

__all__ = ["DIGIT", "OWN", "PHOTOGRAPH", "Look", "Visits"]

DIGIT, PHOTOGRAPH, OWN = "Digit", "Photograph", "Your own"
_SAMPLES: dict[str, Callable[[int], Picture]] = {DIGIT: digit, PHOTOGRAPH: photograph}


@dataclass(frozen=True)
class Look:
    """An image and its hole, bool (H, W)."""

    picture: Picture
    hole: Tensor
    kind: str = DIGIT
    number: int = 0  # of the digit or photograph


@dataclass
class Visits:
    """The actions, with the models that they share."""

    models: Models

    def __post_init__(self) -> None:
        self._count = itertools.count(1)

    def start(self, kind: str, number: int, shape: str, share: float) -> Look:
        """A digit or a photograph with a hole."""
        if kind not in _SAMPLES:
            raise ValueError(f"kind must be {DIGIT} or {PHOTOGRAPH}, got another text")
        picture = _SAMPLES[kind](number)
        return Look(picture, drawn_hole(shape, share, picture.size, number), kind, number)

    def another(self, look: Look, shape: str, share: float) -> Look:
        """The next digit or photograph; an image of one's own stays."""
        return look if look.kind == OWN else self.start(look.kind, look.number + 1, shape, share)

    def open(self, path: str, shape: str, share: float) -> Look:
        """An image of one's own; ValueError where it cannot be read."""
        picture = read_picture(Path(path))
        return Look(picture, drawn_hole(shape, share, picture.size, 0), OWN)

    def paint(self, look: Look, sent: Any) -> Look:
        """The same image with the hole that the page has sent."""
        text = sent.get("hole") if isinstance(sent, dict) else None
        return replace(look, hole=unpack_hole(text, look.picture.size))

    def draw(self, look: Look, shape: str, share: float) -> Look:
        """The same image with a new hole of this shape."""
        seed = next(self._count)
        return replace(look, hole=drawn_hole(shape, share, look.picture.size, seed))

    def canvas(self, look: Look) -> dict[str, Any]:
        """What the page paints on."""
        height, width = look.picture.size
        image = photo_image(look.picture.values)
        return {
            "image": image,
            "width": width,
            "height": height,
            "hole": pack_hole(look.hole),
            "key": next(self._count),
        }

    def results(self, look: Look) -> str:
        """What is to be seen of it, as HTML."""
        return results_html(analyse(look.picture, look.hole, self.models), next(self._count))

    def files(self, look: Look, folder: Path) -> list[str]:
        """Paths of the filled image and of its standard deviation, written into a folder."""
        with torch.inference_mode():
            found = analyse(look.picture, look.hole, self.models)
        return [str(path) for path in write_results(found, look.hole, self.models, folder)]

"""The paper's figures from an experiment: shapes of missing regions, imputations, responses of the first layer."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from misconv import impute, missing, store
from misconv._train import as_floats
from misconv.data import ImageSet
from misconv.layers import MisConv2d
from misconv.mfa import MFA
from misconv.paper import figures
from misconv.paper.classification import Experiment
from misconv.paper.inputs import BYTE
from misconv.paper.settings import SHAPES

__all__ = ["check_drawable", "illustrate"]


@torch.no_grad()
def illustrate(experiment: Experiment, folder: Path, count: int = 6) -> list[Path]:
    """Write masks.png, imputations.png and first-layer.png into a folder; trains what they need and is not there."""
    count = min(count, len(experiment.data.test))
    shown = torch.arange(count, device=experiment.device)
    truth = as_floats(experiment.data.test[:count].to(experiment.device), BYTE)
    x, observed = experiment.test.at(shown)
    with torch.enable_grad():
        smfa, dmfa = (experiment.density(kind)(x, observed) for kind in ("smfa", "dmfa"))
        layer = _first_layer(experiment)
    assert isinstance(smfa, MFA)
    assert isinstance(dmfa, MFA)
    drawn = {
        "masks": figures.masks(truth, {shape: _observed(shape, truth) for shape in SHAPES}),
        "imputations": figures.imputations(
            truth,
            observed,
            {"zero": impute.zero(x, observed), "SMFA": smfa.mean, "DMFA": dmfa.mean},
            {"SMFA": smfa.variance.sqrt(), "DMFA": dmfa.variance.sqrt()},
            dmfa.sample(3, generator=torch.Generator(x.device).manual_seed(0)),
        ),
        "first-layer": figures.responses(
            layer(MFA.point(dmfa.mean[:3])), layer(dmfa[:3]), x[:3], observed[:3], dmfa.mean[:3]
        ),
    }
    paths = []
    for name, figure in drawn.items():
        memory = io.BytesIO()
        figure.savefig(memory, format="png", bbox_inches="tight", pad_inches=0.15)
        paths.append(folder / f"{name}.png")
        store.write_bytes(paths[-1], memory.getvalue())
    return paths


def check_drawable(images: Sequence[ImageSet]) -> None:
    """Say before any training that matplotlib is not there, or that images are neither grey nor coloured."""
    figures.figure_class()
    for each in images:
        if each.shape[0] not in (1, 3):
            raise ValueError(f"{each.name} must have images of 1 or 3 channels to draw figures, got {each.shape[0]}")


def _observed(shape: str, images: Tensor) -> Tensor:
    count, _, height, width = images.shape
    generator = torch.Generator().manual_seed(2)
    observed: Tensor = getattr(missing, shape)(count, height, width, fraction=SHAPES[shape], generator=generator)
    return observed.to(images.device)


def _first_layer(experiment: Experiment) -> MisConv2d:
    """The first layer of the classifier with MisConv and DMFA, of seed 0."""
    experiment.run(["misconv_dmfa"], [0])
    path = experiment.cache.layer(experiment.unit("misconv_dmfa", 0))
    if not path.exists():
        raise FileNotFoundError(f"{path} must be there, for its classifier was trained; use another folder")
    layer = store.load(path)
    if not isinstance(layer, MisConv2d) or layer.in_channels != experiment.data.shape[0]:
        raise ValueError(f"cannot load {path}: it holds another layer than its name stands for")
    return layer.to(experiment.device).eval()

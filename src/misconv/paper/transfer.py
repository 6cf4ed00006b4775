"""Table A, no retraining: classifiers that were trained on complete images meet incomplete ones.

The networks are those of the row “GT” by the one recipe. The density learns from the same complete images, of which it
hides regions of all shapes; every way to treat missing pixels meets the same networks and the same regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from misconv import impute
from misconv.mfa import MFA
from misconv.paper.cache import as_json
from misconv.paper.completions import SAMPLES, Sampled, draw_completion, draw_factors
from misconv.paper.inputs import IncompleteImages, filled, point
from misconv.paper.measures import measures
from misconv.paper.methods import method_named
from misconv.paper.recipe import Runs
from misconv.paper.regions import ALL_SHAPES, region_named
from misconv.paper.scores import Record

__all__ = ["WAYS", "Way", "known_transfer", "run_transfer", "shapes_of"]

CHUNK = 1000  # images at a time

Fills = dict[str, Callable[[Tensor, Tensor], Any]]


@dataclass(frozen=True)
class Way:
    """A way to give incomplete images to a network that takes MFAs.

    Args:
        name: in records. title: in tables.
        source: "zero", "mean", "knn" or "density": what fills in, or says what may be missing.
        form: what of it the network is given.
        wrap: what averages the network's answers.
    """

    name: str
    title: str
    source: str
    form: Callable[[MFA], MFA] = lambda p: p
    wrap: Callable[[nn.Module], nn.Module] = lambda network: network


WAYS = (
    Way("zero", "zero", "zero"),
    Way("mean", "mean", "mean"),
    Way("knn", "k-NN", "knn"),
    Way("mfa", "MFA imputation", "density", filled),
    Way("misconv", "MisConv", "density"),
    Way("samples", "samples averaged", "density", wrap=lambda network: Sampled(network, draw_completion)),
    Way("draws", "MisConv over draws of the factors", "density", wrap=lambda network: Sampled(network, draw_factors)),
)


def shapes_of(channels: int) -> list[str]:
    """The shapes of Table A; an image of one channel cannot lose one."""
    return [shape for shape in ALL_SHAPES if shape != "channels" or channels > 1]


def run_transfer(runs: Runs, names: Sequence[str], seeds: Sequence[int]) -> list[Record]:
    """The records of all ways with all shapes and seeds; what is not there yet is trained, and measured."""
    cache = runs.experiment.cache
    wanted = [
        (shape, way, seed)
        for shape in shapes_of(runs.experiment.data.shape[0])
        for way in WAYS
        if way.name in names
        for seed in seeds
    ]
    todo = [each for each in wanted if cache.get(_unit(runs, *each), "transfer") is None]
    if todo:
        asked = list(dict.fromkeys(seed for *_, seed in todo))
        networks = {seed: work.network for (_, seed), work in runs.networks(["gt"], asked).items()}
        fills = _fills(runs, {way.source for _, way, _ in todo})
        for shape in dict.fromkeys(shape for shape, *_ in todo):
            units = [(way, seed) for each, way, seed in todo if each == shape]
            _measure(runs, shape, units, networks, fills)
    found = [cache.get(_unit(runs, *each), "transfer") for each in wanted]
    return [record for record in found if record is not None]


def known_transfer(runs: Runs, seeds: Sequence[int]) -> list[Record]:
    """The records that are there."""
    cache, shapes = runs.experiment.cache, shapes_of(runs.experiment.data.shape[0])
    units = [_unit(runs, shape, way, seed) for shape in shapes for way in WAYS for seed in seeds]
    return [record for record in (cache.get(unit, "transfer") for unit in units) if record is not None]


def _density(runs: Runs) -> Any:
    return replace(runs.recipe.density, shapes="all", complete=True)


def _unit(runs: Runs, shape: str, way: Way, seed: int) -> dict[str, Any]:
    """What makes a record what it is; it has the network's settings in it."""
    density = as_json(_density(runs)) if way.source == "density" else None
    more = {"shape": shape, "fraction": ALL_SHAPES[shape], "method": way.name, "seed": seed, "variant": "transfer"}
    neighbours = method_named("knn").settings if way.source == "knn" else {}
    return {**runs.unit("gt", seed), **more, "density": density, "samples": SAMPLES, **neighbours}


def _fills(runs: Runs, sources: set[str]) -> Fills:
    """What fills in or says what may be missing, learned from complete training images."""
    experiment = runs.experiment
    found: Fills = {"zero": impute.zero}
    if "density" in sources:
        found["density"] = experiment.density("unet", _density(runs))
    for name in sources & {"mean", "knn"}:
        fit = method_named(name).fit_imputer
        assert fit is not None
        found[name] = fit(*experiment.whole("train").at(experiment.split[0]))
    return found


@torch.no_grad()
def _measure(
    runs: Runs, shape: str, units: Sequence[tuple[Way, int]], networks: dict[int, nn.Module], fills: Fills
) -> None:
    """Write the records of one shape, of some ways with seeds."""
    experiment = runs.experiment
    experiment.say(f"{experiment.data.title}, {shape}: testing networks that were trained on complete images")
    images, labels = experiment.data.test.to(experiment.device), experiment.labels[1]
    generator = torch.Generator().manual_seed(2)
    draw, size = region_named(shape, images.shape[1]), (len(images), *images.shape[2:])
    observed = draw(*size, fraction=ALL_SHAPES[shape], generator=generator).to(experiment.device)
    data = IncompleteImages(images, observed, experiment.filler)
    tested = {(way, seed): way.wrap(networks[seed]).eval() for way, seed in units}
    logs: dict[tuple[Way, int], list[Tensor]] = {each: [] for each in tested}
    for rows in torch.arange(len(images), device=experiment.device).split(CHUNK):
        given = {source: _as_mfa(fills[source](*data.at(rows))) for source in {way.source for way, _ in units}}
        for (way, seed), network in tested.items():
            logs[way, seed].append(network(way.form(given[way.source])).float().log_softmax(1))
    for (way, seed), parts in logs.items():
        found = measures(torch.cat(parts), labels)
        record = {"kind": "transfer", **experiment.circumstances(), "shape": shape, "method": way.name, "seed": seed}
        experiment.cache.keep(_unit(runs, shape, way, seed), {**record, **found})


def _as_mfa(said: MFA | Tensor) -> MFA:
    return point(said) if isinstance(said, Tensor) else said

"""Tables 3, 4 and 5 and Figure 2: one Wasserstein autoencoder, many ways to treat missing pixels; and a flow.

The protocol is that of `misconv.paper.classification`. The error at seen pixels of validation images chooses the epoch.
Test images are looked at after every epoch, or every fifth of a large network, because the paper prints the best of
these numbers; they choose nothing but the column that says so. A reconstruction is compared with the complete image,
all pixels of it; samples, as many as there are test images, are what the decoder makes of standard normal codes, always
the same ones.

One row is no autoencoder, but `misconv.paper.flow_matching`. In the place of a reconstruction it has the completion of
an incomplete image, whose seen pixels are exact, so that its errors can be compared at hidden pixels alone. Its samples
are drawn with nothing seen, from noise that is always the same; that takes longer than an epoch, so it is done once.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from misconv import store
from misconv._train import Job, train
from misconv.data import ImageSet
from misconv.paper import figures
from misconv.paper.cache import as_json
from misconv.paper.classification import Experiment
from misconv.paper.classifiers import side_by_side
from misconv.paper.features import FEATURES, FeatureSettings, Ruler, check_ruler
from misconv.paper.flow_matching import FlowMatching
from misconv.paper.matching import SETTINGS as MATCHING
from misconv.paper.matching import MatchingSettings, make_matching, matching_job
from misconv.paper.methods import METHODS, Method, method_named
from misconv.paper.quality import psnr_and_ssim
from misconv.paper.scores import Record
from misconv.paper.settings import VALIDATION
from misconv.paper.wae import SETTINGS, WAE, WAESettings, wae_job

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = [
    "FLOW",
    "ROWS",
    "Generation",
    "check_generation",
    "draw_generation",
    "image_scores",
    "is_drawn",
    "quick_generation",
    "row_named",
]

FLOW = Method("flow_matching", "flow matching", "completed by a flow from noise to images, without an autoencoder")
# The same with the library's own density in place of the paper's.
WITH_UNET = (
    replace(method_named("mfa"), name="mfa_unet", title="MFA imputation (UNetDMFA)", density="unet"),
    replace(method_named("misconv_dmfa"), name="misconv_unet", title="MisConv (UNetDMFA)", density="unet"),
)
_OTHERS = {method.name: method for method in (*WITH_UNET, FLOW)}
_PAPERS = tuple(method.name for method in METHODS if method.name not in ("misconv_smfa", "gt"))
ROWS = (*_PAPERS, *_OTHERS, "gt")
BETTER: dict[str, Callable[..., float]] = {
    "frechet": min, "ssim": max, "ssim_authors": max, "psnr": max, "psnr_hidden": max,
}  # fmt: skip
CHUNK = 1000  # images at a time
FIGURE = "misconv, Figure 2"  # written into the file
EXACT = 1e-14  # a mean squared error as small as this is rounding, and stands for one of 0
FEWEST_TESTED = 2  # images, for a variance of their features
CODES = 4  # the seed of the codes, or the noise, that become samples
FEW_STEPS = 2  # of the flow's integration in a quick run


def row_named(name: str) -> Method:
    """The method of that name, those that are in no other table among them."""
    return _OTHERS.get(name) or method_named(name)


def image_scores(images: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """PSNR and SSIM of images (B, C, H, W) from 0 to 1, (B,) each, by torchmetrics.

    `ssim` has a Gaussian window and a range of 1. `ssim_authors` is close to what the paper's authors took from
    scikit-image: a uniform window of 7×7 pixels, and a range of 2, which it assumed for floating point.
    """
    psnr, ssim = psnr_and_ssim(images, truth)
    from torchmetrics.functional import image as metrics

    with images.device:  # torchmetrics makes tensors on the default device
        theirs = metrics.structural_similarity_index_measure(
            images, truth, gaussian_kernel=False, kernel_size=7, data_range=2.0, reduction="none"
        )
    assert isinstance(theirs, Tensor)  # one result was asked for
    return {"psnr": psnr, "ssim": ssim, "ssim_authors": theirs}


class Generation:
    """The autoencoders and flows of one experiment: trained once, measured, kept, and loaded again.

    Args:
        experiment: data, missing regions, densities, and where finished work is kept.
        wae, features, flow: settings, by default those of the data set (of SVHN, if it has none).
        inception: weights of Inception, for the Fréchet distance.
    """

    def __init__(
        self,
        experiment: Experiment,
        wae: WAESettings | None = None,
        features: FeatureSettings | None = None,
        inception: Path | None = None,
        flow: MatchingSettings | None = None,
    ) -> None:
        self.experiment, self.settings = experiment, wae or _settings(experiment.data.name)
        self.flow_settings = flow or _flow_settings(experiment.data.name)
        self.ruler = Ruler(experiment, features, inception)

    def unit(self, name: str, seed: int) -> dict[str, Any]:
        """What makes a method with a seed what it is."""
        experiment = self.experiment
        common = {"method": name, "seed": seed, "validation": VALIDATION, "ruler": self.ruler.identity}
        if name == FLOW.name:
            return {**experiment.identity, **common, "flow_matching": as_json(self.flow_settings)}
        method, settings = row_named(name), experiment.settings
        density = None if method.density is None else as_json(settings.density(method.density))
        return {
            **experiment.identity, **method.settings, **common, "variant": "wae", "wae": as_json(self.settings),
            "density": density,
        }  # fmt: skip

    def run(self, names: Sequence[str], seeds: Sequence[int]) -> list[Record]:
        """The records of all methods with all seeds; those that are not there yet are trained, side by side."""
        kinds = {name: _kind(name) for name in names}
        found = {
            kind: iter(self.experiment.records(_of(kinds, kind), seeds, self.unit, self._train, kind))
            for kind in ("wae", FLOW.name)
        }
        return [next(found[kind]) for kind in kinds.values() for _ in seeds]

    def known(self, names: Sequence[str], seeds: Sequence[int]) -> list[Record]:
        """The records that are there."""
        found = (self.experiment.cache.get(self.unit(name, seed), _kind(name)) for name in names for seed in seeds)
        return [record for record in found if record is not None]

    def load(self, name: str, seed: int) -> WAE | FlowMatching:
        """A trained autoencoder, or flow; one whose file is not there is trained."""
        self.run([name], [seed])
        path = self.experiment.cache.network(self.unit(name, seed))
        if not path.exists():
            self._train([(name, seed)])
        model = self._new(name, seed)
        store.load(path, into=model)
        return model.eval()

    # Training --------------------------------------------------------------------------------------------------------

    def _train(self, units: Sequence[tuple[str, int]]) -> None:
        """Train some autoencoders side by side, or some flows."""
        experiment = self.experiment
        self.ruler.prepare()
        is_flow = units[0][0] == FLOW.name  # then all of them are
        what, epochs = ("flows", self.flow_settings.epochs) if is_flow else ("WAEs", self.settings.epochs)
        titles = ", ".join(dict.fromkeys(row_named(name).title for name, _ in units))
        experiment.say(f"{experiment.data.title}: training {what}, {titles}{side_by_side(len(units))}")
        jobs = [self._job(name, seed) for name, seed in units]
        checkpoint = experiment.cache.running([job.settings for job in jobs])
        fabric = experiment.fabric_with(self.flow_settings.precision) if is_flow else self.fabric
        histories = train(
            jobs, fabric, epochs=epochs, checkpoint=checkpoint, progress=experiment.progress,
            checkpoint_seconds=experiment.pause, title=f"{len(jobs)} {what}", transient=True,
        )  # fmt: skip
        done = []
        for (name, seed), job, history in zip(units, jobs, histories, strict=True):
            store.save(job.module.eval(), experiment.cache.network(self.unit(name, seed)))
            done.append((self.unit(name, seed), self._record(name, seed, job, history, len(jobs))))
        experiment.keep(done, [checkpoint])

    def _job(self, name: str, seed: int) -> Job:
        experiment, model = self.experiment, self._new(name, seed)
        more: dict[str, Any] = {
            "test": lambda model: self.measure(name, model), "seed": seed, "identity": self.unit(name, seed)
        }  # fmt: skip
        if isinstance(model, FlowMatching):
            return matching_job(model, self.flow_settings, experiment.train, experiment.split, **more)
        method = row_named(name)
        # That of GT is measured at all pixels; the authors' leaves out what is hidden from the others.
        data = experiment.whole("train") if method.takes_complete else experiment.train
        return wae_job(
            model, self.settings, experiment.take(method, "train"), data, experiment.split, self.fabric, **more
        )

    @cached_property
    def fabric(self) -> Fabric:
        """Where and how precisely autoencoders are trained."""
        return self.experiment.fabric_with(self.settings.precision)

    def _new(self, name: str, seed: int) -> WAE | FlowMatching:
        shape, device = self.experiment.data.shape, self.experiment.device
        if name == FLOW.name:
            return make_matching(self.flow_settings, shape, seed).to(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            wae = WAE(row_named(name).first_layer(shape[0]), shape, self.settings).to(device)
        # The layout of tensor cores.
        return wae.to(memory_format=torch.channels_last) if device.type == "cuda" else wae

    def _record(self, name: str, seed: int, job: Job, history: Sequence[dict[str, float]], side_by_side: int) -> Record:
        model = job.module
        assert isinstance(model, WAE | FlowMatching)
        chosen = history[job.kept]
        if "psnr" not in chosen:
            chosen = chosen | self.measure(name, model)
        found: dict[str, Any] = {key: chosen.get(key) for key in BETTER}
        for key, better in BETTER.items():
            known = [record[key] for record in (*history, chosen) if key in record]
            found[f"{key}_best"] = better(known) if known else None
        if found["frechet"] is None:
            found["frechet"] = self.ruler.distance(self.samples(model))
        validation = {key: value for key, value in chosen.items() if key.startswith("validation")}
        return {
            "kind": _kind(name), **self.experiment.circumstances(), "method": name,
            "seed": seed, **found, "features": self.ruler.title, **validation, "epoch": job.kept + 1,
            "epochs": len(history), "seconds": job.seconds, "side_by_side": side_by_side,
        }  # fmt: skip

    # Measuring -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, name: str, model: WAE | FlowMatching) -> dict[str, float]:
        """Reconstructions of the test images, and samples where these are quick; in evaluation mode."""
        truth, parts, error, hidden = self.experiment.whole("test"), [], 0.0, 0
        for rows in torch.arange(len(truth), device=self.experiment.device).split(CHUNK):
            # Squares minus squares: in TF32, as a GPU convolves, the variance of a window would be lost.
            images, target = self.reconstruct(name, model, rows).double(), truth.at(rows)[0].double()
            gone = ~self.experiment.test.observed[rows].expand_as(images)
            error, hidden = error + float((images - target).square()[gone].sum()), hidden + int(gone.sum())
            parts.append(image_scores(images, target))
        figures = {key: _mean_of_inexact(torch.cat([part[key] for part in parts])) for key in parts[0]}
        figures["psnr_hidden"] = -10 * math.log10(max(error / hidden, EXACT))
        is_quick = self.ruler.is_quick and isinstance(model, WAE)
        return figures | ({"frechet": self.ruler.distance(self.samples(model))} if is_quick else {})

    def reconstruct(self, name: str, model: WAE | FlowMatching, rows: Tensor) -> Tensor:
        """Some of the test images, by what a method is given of them: a flow completes them."""
        if isinstance(model, FlowMatching):
            return model.impute(*self.experiment.test.at(rows))
        return model.reconstruct(self.experiment.take(row_named(name), "test")(rows))

    @torch.no_grad()
    def samples(self, model: WAE | FlowMatching, count: int | None = None) -> Tensor:
        """The first of the images that a decoder makes of normal codes; or that a flow draws with nothing seen."""
        if isinstance(model, WAE):
            return torch.cat([model.decode(part) for part in self._codes[:count].split(CHUNK)])
        generator = torch.Generator().manual_seed(CODES)
        size = len(self.experiment.data.test) if count is None else count
        blank = torch.zeros(1, *model.shape, device=self.experiment.device, dtype=torch.float32)
        parts = [blank.expand(len(part), -1, -1, -1) for part in torch.arange(size, device="cpu").split(CHUNK)]
        return torch.cat([model.sample(x, torch.zeros_like(x) > 0, generator=generator)[0] for x in parts])

    @cached_property
    def _codes(self) -> Tensor:
        generator = torch.Generator().manual_seed(CODES)
        size = len(self.experiment.data.test), self.settings.latent
        return torch.randn(size, generator=generator, device="cpu", dtype=torch.float32).to(self.experiment.device)


def _kind(name: str) -> str:
    """Of a row's records."""
    return FLOW.name if name == FLOW.name else "wae"


def _of(kinds: dict[str, str], kind: str) -> list[str]:
    return [name for name, its in kinds.items() if its == kind]


def _mean_of_inexact(values: Tensor) -> float:
    """A completion without any error has an infinite PSNR, which no mean can hold; NaN stays NaN."""
    inexact = values[~values.isposinf()]
    return float(inexact.mean()) if len(inexact) else -10 * math.log10(EXACT)


def _flow_settings(name: str) -> MatchingSettings:
    return MATCHING.get(name, MATCHING["svhn"])


def _settings(name: str) -> WAESettings:
    return SETTINGS.get(name, SETTINGS["svhn"])


def quick_generation(experiment: Experiment, epochs: int, inception: Path | None) -> Generation:
    """With small networks, few epochs, and few steps from noise to image."""
    wae = replace(SETTINGS["digits"], epochs=epochs, depth=_settings(experiment.data.name).depth)
    features = replace(FEATURES["digits"], epochs=epochs)
    flow = replace(MATCHING["digits"], epochs=epochs, steps=FEW_STEPS)
    return Generation(experiment, wae, features, inception, flow)


def check_generation(images: ImageSet, inception: str | Path | None) -> None:
    """Say before any training that these images cannot be generated, or their distance not be measured."""
    step = 2 ** _settings(images.name).depth
    height, width = images.shape[1:]
    if height % step or width % step:
        raise ValueError(
            f"{images.name} must have a height and a width that are multiples of {step}, which the autoencoder halves, "
            f"got {height}×{width}"
        )
    if len(images.test) < FEWEST_TESTED:
        raise ValueError(
            f"{images.name} must have at least {FEWEST_TESTED} test images, for a Fréchet distance, got "
            f"{len(images.test)}"
        )
    check_ruler(images, inception)


def draw_generation(generation: Generation, path: Path, count: int = 5) -> Path:
    """Figure 2: reconstructions of some test images and samples, a row for each method; trains what is not there."""
    experiment = generation.experiment
    generation.run(ROWS, [0])
    rows = torch.arange(min(count, len(experiment.test)), device=experiment.device)
    rebuilt, drawn = {}, {}
    for method in map(row_named, ROWS):
        model = generation.load(method.name, 0)
        with torch.no_grad():
            rebuilt[method.starred] = generation.reconstruct(method.name, model, rows)
            drawn[method.starred] = generation.samples(model, count)
    truth = experiment.whole("test").at(rows)[0]
    figure = figures.generated(truth, experiment.test.observed[rows], rebuilt, drawn)
    memory = io.BytesIO()
    figure.savefig(memory, format="png", bbox_inches="tight", pad_inches=0.15, metadata={"Title": FIGURE})
    store.write_bytes(path, memory.getvalue())
    return path


def is_drawn(path: Path) -> bool:
    """Whether this is a file of `draw_generation`."""
    return path.is_file() and FIGURE.encode() in path.read_bytes()[:1000]

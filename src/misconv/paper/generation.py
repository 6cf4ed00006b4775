"""Tables 3, 4 and 5 and Figure 2: one Wasserstein autoencoder, many ways to treat missing pixels.

The protocol is that of `misconv.paper.classification`. The error at seen pixels of validation images chooses the epoch.
Test images are looked at after every epoch, because the paper prints the best of these numbers; they choose nothing but
the column that says so. A reconstruction is compared with the complete image, all pixels of it; samples, as many as
there are test images, are what the decoder makes of standard normal codes, always the same ones.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from misconv import store
from misconv._train import Job, train
from misconv.data import ImageSet
from misconv.paper import figures
from misconv.paper.cache import as_json
from misconv.paper.classification import Experiment
from misconv.paper.features import FEATURES, FeatureSettings, Ruler, check_ruler
from misconv.paper.inputs import Take
from misconv.paper.methods import TRAINED, Method, method_named
from misconv.paper.quality import psnr_and_ssim
from misconv.paper.scores import Record
from misconv.paper.settings import VALIDATION
from misconv.paper.wae import SETTINGS, WAE, WAESettings, wae_job

__all__ = ["ROWS", "Generation", "check_generation", "draw_generation", "image_scores", "quick_generation"]

ROWS = tuple(method.name for method in TRAINED if method.name != "misconv_smfa")
BETTER: dict[str, Callable[..., float]] = {"frechet": min, "ssim": max, "ssim_authors": max, "psnr": max}
CHUNK = 1000  # images at a time
CODES = 4  # the seed of the codes that become samples


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
    """The autoencoders of one experiment: trained once, measured, kept, and loaded again.

    Args:
        experiment: data, missing regions, densities, and where finished work is kept.
        wae, features: settings, by default those of the data set (of SVHN, if it has none).
        inception: weights of Inception, for the Fréchet distance.
    """

    def __init__(
        self,
        experiment: Experiment,
        wae: WAESettings | None = None,
        features: FeatureSettings | None = None,
        inception: Path | None = None,
    ) -> None:
        self.experiment, self.settings = experiment, wae or _settings(experiment.data.name)
        self.ruler = Ruler(experiment, features, inception)

    def unit(self, name: str, seed: int) -> dict[str, Any]:
        """What makes a method with a seed what it is."""
        method, settings = method_named(name), self.experiment.settings
        density = None if method.density is None else as_json(settings.density(method.density))
        return {
            **self.experiment.identity, **method.settings, "variant": "wae", "method": name, "seed": seed,
            "validation": VALIDATION, "wae": as_json(self.settings), "density": density, "ruler": self.ruler.identity,
        }  # fmt: skip

    def run(self, names: Sequence[str], seeds: Sequence[int]) -> list[Record]:
        """The records of all methods with all seeds; those that are not there yet are trained, side by side."""
        return self.experiment.records(names, seeds, self.unit, self._train, "wae")

    def load(self, name: str, seed: int) -> WAE:
        """A trained autoencoder; one whose file is not there is trained."""
        self.run([name], [seed])
        path = self.experiment.cache.network(self.unit(name, seed))
        if not path.exists():
            self._train([(name, seed)])
        wae = self._wae(method_named(name), seed)
        store.load(path, into=wae)
        return wae.eval()

    # Training --------------------------------------------------------------------------------------------------------

    def _train(self, units: Sequence[tuple[str, int]]) -> None:
        """Train some autoencoders side by side."""
        experiment = self.experiment
        self.ruler.prepare()
        titles = ", ".join(dict.fromkeys(method_named(name).title for name, _ in units))
        experiment.say(f"{experiment.data.title}: training WAEs, {titles}; {len(units)} side by side")
        jobs = [self._job(method_named(name), seed) for name, seed in units]
        checkpoint = experiment.cache.running([job.settings for job in jobs])
        histories = train(
            jobs, experiment.fabric, epochs=self.settings.epochs, checkpoint=checkpoint, progress=experiment.progress,
            checkpoint_seconds=experiment.pause, title=f"{len(jobs)} WAEs", transient=True,
        )  # fmt: skip
        done = []
        for (name, seed), job, history in zip(units, jobs, histories, strict=True):
            store.save(job.module.eval(), experiment.cache.network(self.unit(name, seed)))
            done.append((self.unit(name, seed), self._record(name, seed, job, history, len(jobs))))
        experiment.keep(done, [checkpoint])

    def _job(self, method: Method, seed: int) -> Job:
        experiment = self.experiment
        given = experiment.take(method, "test")
        # That of GT is measured at all pixels; the authors' leaves out what is hidden from the others.
        data = experiment.whole("train") if method.takes_complete else experiment.train
        return wae_job(
            self._wae(method, seed), self.settings, experiment.take(method, "train"), data, experiment.split,
            experiment.fabric, test=lambda wae: self.measure(wae, given), seed=seed,
            identity=self.unit(method.name, seed),
        )  # fmt: skip

    def _wae(self, method: Method, seed: int) -> WAE:
        shape = self.experiment.data.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return WAE(method.first_layer(shape[0]), shape, self.settings).to(self.experiment.device)

    def _record(self, name: str, seed: int, job: Job, history: Sequence[dict[str, float]], side_by_side: int) -> Record:
        chosen = history[job.kept]
        found: dict[str, Any] = {key: chosen.get(key) for key in BETTER}
        for key, better in BETTER.items():
            found[f"{key}_best"] = better(record[key] for record in history) if key in chosen else None
        if not self.ruler.is_quick:
            assert isinstance(job.module, WAE)
            found["frechet"] = self.ruler.distance(self.samples(job.module))
        return {
            "kind": "wae", **self.experiment.circumstances(), "method": name, "seed": seed, **found,
            "features": self.ruler.title, "validation_reconstruction": chosen["validation_reconstruction"],
            "epoch": job.kept + 1, "epochs": len(history), "seconds": job.seconds, "side_by_side": side_by_side,
        }  # fmt: skip

    # Measuring -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, wae: WAE, take: Take) -> dict[str, float]:
        """Reconstructions of the test images, given as a method gives them, and samples; in evaluation mode."""
        truth, parts = self.experiment.whole("test"), []
        for rows in torch.arange(len(truth), device=self.experiment.device).split(CHUNK):
            # Squares minus squares: in TF32, as a GPU convolves, the variance of a window would be lost.
            parts.append(image_scores(wae.reconstruct(take(rows)).double(), truth.at(rows)[0].double()))
        figures = {name: torch.cat([part[name] for part in parts]).mean().item() for name in parts[0]}
        return figures | ({"frechet": self.ruler.distance(self.samples(wae))} if self.ruler.is_quick else {})

    @torch.no_grad()
    def samples(self, wae: WAE, count: int | None = None) -> Tensor:
        """The first of the images that the decoder makes of normal codes."""
        return torch.cat([wae.decode(part) for part in self._codes[:count].split(CHUNK)])

    @cached_property
    def _codes(self) -> Tensor:
        generator = torch.Generator().manual_seed(CODES)
        size = len(self.experiment.data.test), self.settings.latent
        return torch.randn(size, generator=generator, device="cpu", dtype=torch.float32).to(self.experiment.device)


def _settings(name: str) -> WAESettings:
    return SETTINGS.get(name, SETTINGS["svhn"])


def quick_generation(experiment: Experiment, epochs: int, inception: Path | None) -> Generation:
    """With few epochs."""
    name = experiment.data.name
    features = replace(FEATURES.get(name, FEATURES["svhn"]), epochs=epochs)
    return Generation(experiment, replace(_settings(name), epochs=epochs), features, inception)


def check_generation(images: ImageSet, inception: str | Path | None) -> None:
    """Say before any training that these images cannot be generated, or their distance not be measured."""
    step = 2 ** _settings(images.name).depth
    height, width = images.shape[1:]
    if height % step or width % step:
        raise ValueError(
            f"{images.name} must have a height and a width that are multiples of {step}, which the autoencoder halves, "
            f"got {height}×{width}"
        )
    check_ruler(images, inception)


@torch.no_grad()
def draw_generation(generation: Generation, path: Path, count: int = 5) -> Path:
    """Figure 2: reconstructions of some test images and samples, a row for each method; trains what is not there."""
    experiment = generation.experiment
    with torch.enable_grad():
        generation.run(ROWS, [0])
    rows = torch.arange(min(count, len(experiment.test)), device=experiment.device)
    rebuilt, drawn = {}, {}
    for method in map(method_named, ROWS):
        wae = generation.load(method.name, 0)
        rebuilt[method.starred] = wae.reconstruct(experiment.take(method, "test")(rows))
        drawn[method.starred] = generation.samples(wae, count)
    truth = experiment.whole("test").at(rows)[0]
    figure = figures.generated(truth, experiment.test.observed[rows], rebuilt, drawn)
    memory = io.BytesIO()
    figure.savefig(memory, format="png", bbox_inches="tight", pad_inches=0.15)
    store.write_bytes(path, memory.getvalue())
    return path

"""How long a training step of the networks of `misconv table` takes on a GPU, many of them side by side.

    python benchmarks/training.py --out results/bench/training-cuda.json

Images are noise of the sizes of the real ones: a step takes as long with them. Every row trains for three short epochs
and reports the last one. CUDA_DEVICE_MAX_CONNECTIONS is recorded, the number of queues to the GPU; the driver reads it
when a process begins.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from misconv._store import commit, device_name, versions
from misconv._train import Job, train
from misconv.data import ImageSet
from misconv.paper.cache import Cache
from misconv.paper.classification import Experiment
from misconv.paper.command import fabric_on
from misconv.paper.densities import job_of, make_density
from misconv.paper.generation import FLOW, Generation
from misconv.paper.matching import SETTINGS as MATCHING
from misconv.paper.settings import FULL, MIXED, SETTINGS, VALIDATION
from misconv.paper.wae import SETTINGS as AUTOENCODERS

EPOCHS = 3
SIZES = {"mnist": (1, 28, 28), "svhn": (3, 32, 32), "cifar10": (3, 32, 32), "celeba": (3, 64, 64)}


@dataclass(frozen=True)
class Row:
    """What is timed: a network of a data set, how many of them, how precisely, how many steps."""

    network: str  # "classifier", "wae", "flow matching", or a density: "dmfa", "unet", "acflow"
    dataset: str
    count: int
    steps: int
    precision: str = FULL
    search: bool = False  # whether cuDNN tries its algorithms
    last: bool = False  # whether channels come last in memory, where they do not anyway


ROWS: tuple[Row, ...] = (
    Row("classifier", "mnist", 45, 200),
    Row("classifier", "mnist", 32, 200),
    Row("classifier", "mnist", 8, 200),
    Row("dmfa", "mnist", 1, 200),
    Row("wae", "svhn", 9, 30, MIXED),
    Row("wae", "svhn", 9, 30, MIXED, search=True),
    Row("wae", "celeba", 9, 20, MIXED),
    Row("wae", "celeba", 9, 20, MIXED, search=True),
    Row("dmfa", "svhn", 1, 100),
    Row("dmfa", "svhn", 1, 100, search=True),
    Row("unet", "svhn", 1, 60),
    Row("unet", "svhn", 1, 60, search=True),
    Row("flow matching", "svhn", 3, 40),
    Row("flow matching", "svhn", 3, 40, search=True),
    Row("flow matching", "svhn", 3, 40, MIXED),
    Row("acflow", "svhn", 1, 40),
    Row("dmfa", "celeba", 1, 40),
    Row("unet", "celeba", 1, 40),
    Row("acflow", "celeba", 1, 20),
    Row("classifier", "svhn", 45, 100),
    Row("classifier", "cifar10", 27, 60),
    Row("wae", "svhn", 9, 30),
    Row("wae", "svhn", 1, 60, MIXED),
    Row("classifier", "mnist", 45, 200, last=True),
    Row("classifier", "svhn", 45, 100, last=True),
    Row("classifier", "cifar10", 27, 60, last=True),
    Row("flow matching", "svhn", 3, 40, MIXED, last=True),
    Row("acflow", "svhn", 1, 40, last=True),
    Row("acflow", "svhn", 1, 40, MIXED, last=True),
)


def main() -> None:
    """Time every row, print it, write JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="numbers of rows")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: list[dict[str, Any]] = []
    record = {"commit": commit(), "versions": versions(device), "device": device_name(device), "rows": rows}
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(ROWS):
        if options.only and str(number) not in options.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asdict(row) | timed(row, options.device, Path(folder)) | {"connections": connections})
        print(number, {key: value for key, value in rows[-1].items() if value}, flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def timed(row: Row, device: str, folder: Path) -> dict[str, Any]:
    """Seconds until the last epoch begins, and microseconds of a step in it, of one network."""
    torch.backends.cudnn.benchmark = row.search
    jobs, experiment = make_jobs(row, device, folder)
    if row.last:
        jobs = [replace(job, module=job.module.to(memory_format=torch.channels_last)) for job in jobs]
    begun: list[float] = []
    first = jobs[0].begin

    def begin(epoch: int) -> None:
        begun.append(time.perf_counter())  # the GPU has finished the epoch before: its sums were read
        if first is not None:
            first(epoch)

    jobs[0] = replace(jobs[0], begin=begin)
    jobs = [replace(job, evaluate=lambda model: (float("-inf"), {}), tolerance=None) for job in jobs]
    start = time.perf_counter()
    train(jobs, experiment.fabric_with(row.precision), epochs=EPOCHS, progress=False)
    end = time.perf_counter()
    steps = jobs[0].size // jobs[0].batch_size
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    each = 1e6 * (end - begun[-1]) / (steps * row.count)
    return {"first_s": round(begun[-1] - start, 3), "step_us": float(f"{each:.4g}"), "peak_gb": round(peak, 2)}


def make_jobs(row: Row, device: str, folder: Path) -> tuple[list[Job], Experiment]:
    """The trainings of a row, and the experiment that they belong to."""

    def experiment(batch_size: int, held: float) -> Experiment:
        size = round(row.steps * batch_size / (1 - held)) + 1
        return Experiment(images(row.dataset, size), "square", Cache(folder), fabric_on(device), progress=False)

    seeds = range(row.count)
    if row.network == "classifier":
        found = experiment(SETTINGS[row.dataset].classifier.batch_size, VALIDATION)
        inputs = found.inputs_of("zero")
        return [found._job("zero", seed, found.unit("zero", seed), inputs) for seed in seeds], found
    if row.network in ("wae", "flow matching"):
        settings = replace(AUTOENCODERS[row.dataset], precision=row.precision)
        flow = replace(MATCHING[row.dataset], precision=row.precision)
        name = FLOW.name if row.network == "flow matching" else "zero"
        found = experiment(flow.batch_size if name == FLOW.name else settings.batch_size, VALIDATION)
        generation = Generation(found, settings, flow=flow)
        return [generation._job(name, seed) for seed in seeds], found
    chosen = SETTINGS[row.dataset].density(row.network)
    found = experiment(chosen.batch_size, 0.1)
    data = found.whole("train") if row.network == "acflow" else found.train
    make: Callable[[], Job] = lambda: job_of(  # noqa: E731
        make_density(chosen, found.data.shape), chosen, data, found.fabric_with(row.precision)
    )
    return [make() for _ in seeds], found


def images(dataset: str, size: int) -> ImageSet:
    """Noise of the sizes of a data set, with ten classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (size + 20, *SIZES[dataset]), generator=generator, dtype=torch.uint8)
    labels = torch.arange(len(x)) % 10
    return ImageSet(dataset, dataset, x[:size], labels[:size], x[size:], labels[size:])


if __name__ == "__main__":
    main()

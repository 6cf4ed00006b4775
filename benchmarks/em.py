"""EM for SMFA: the time of one iteration over 60,000 images of 784 pixels, K = 10, L = 6, a quarter missing.

Correctness first: the likelihood must not fall, and must be that of `MFA.log_prob`. Prints a line per iteration and
writes JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from misconv import MFA, SMFA, missing
from misconv._store import commit

SETTINGS = {"images": 60_000, "height": 28, "width": 28, "components": 10, "rank": 6, "iterations": 5, "seed": 0}


def data(images: int, height: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images with structure, low rank plus noise, and a square of a quarter missing from each."""
    generator = torch.Generator().manual_seed(seed)
    pixels = height * width
    x = torch.randn(images, 20, generator=generator) @ torch.randn(20, pixels, generator=generator) * 0.1
    x = x + 0.2 * torch.randn(images, pixels, generator=generator)
    observed = missing.square(images, height, width, fraction=1 / 4, generator=generator)
    return x.view(images, 1, height, width), observed


def check(density: SMFA, x: Tensor, observed: Tensor) -> float:
    """The largest relative difference between EM's likelihood and that of the MFA, over some images."""
    some = slice(0, 64)
    parts = (density.logits, density.means, density.factors, density.noise)
    logits, means, factors, noise = (t.double().expand(64, *t.shape) for t in parts)
    exact = MFA(logits, means, factors, noise, check=False).log_prob(x[some].double(), observed[some]).mean()
    density.iterate(x[some], observed[some])
    return abs(density.history.pop() / float(exact) - 1)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "bench" / "em.json")
    out = parser.parse_args().out
    images, components, rank = SETTINGS["images"], SETTINGS["components"], SETTINGS["rank"]
    x, observed = data(images, SETTINGS["height"], SETTINGS["width"], SETTINGS["seed"])

    density = SMFA(components, rank)
    clock = time.perf_counter()
    density.begin(x, observed)
    start = time.perf_counter() - clock
    print(f"start (k-means, a few steps on 2,000 images): {start:.2f} s")
    seconds = []
    for number in range(SETTINGS["iterations"]):
        clock = time.perf_counter()
        density.iterate(x, observed)
        seconds.append(time.perf_counter() - clock)
        print(f"iteration {number + 1}: {seconds[-1]:.2f} s, log-likelihood {density.history[-1]:.3f} per image")
    assert all(b >= a for a, b in zip(density.history, density.history[1:], strict=False)), "EM must not fall"
    difference = check(density, x, observed)
    assert difference < 1e-5, f"EM's likelihood is off by {difference}"
    median = statistics.median(seconds)
    print(f"one iteration over {images} × {x[0].numel()}, K = {components}, L = {rank}: {median:.2f} s (median)")

    record = {
        "benchmark": "EM",
        "settings": SETTINGS,
        "start_seconds": start,
        "iteration_seconds": {"median": median, "min": min(seconds), "max": max(seconds), "all": seconds},
        "likelihood_difference": difference,
        "commit": commit(),
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

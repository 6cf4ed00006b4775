"""Draw the paper's figures with the digits of scikit-learn: `make docs` runs this (a few minutes on a CPU).

    python tools/figures.py [--out docs/pictures]

Shapes of missing regions, imputations with their uncertainty, responses of a trained first layer, and what autoencoders
make of incomplete images.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from misconv import data
from misconv.paper.cache import Cache
from misconv.paper.classification import Experiment
from misconv.paper.command import fabric_on
from misconv.paper.generation import Generation, draw_generation
from misconv.paper.illustrate import illustrate


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the figures need in a folder of its own, and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # so that the pictures are the same whatever the number of cores
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(
            data.load("digits"), "square", Cache(folder), fabric_on("cpu"), progress=False, say=print
        )
        drawn = draw_generation(Generation(experiment), options.out / "generation.png")
        for path in (*illustrate(experiment, options.out), drawn):
            print(path)


if __name__ == "__main__":
    main()

"""A trained ResNet that reads images with holes: one line to convert it, the ordinary torchvision pipeline before it.

    python examples/pretrained_resnet.py

With a network at hand, take ``torchvision.models.resnet18(weights="DEFAULT")``; here it has random weights, and the
images are random too, so that the example runs anywhere in seconds.
"""

from __future__ import annotations

import argparse

import torch
import torchvision
from torchvision.transforms import v2

import misconv
from misconv.transforms import Incomplete


def main(images: int = 64, side: int = 72, epochs: int = 1) -> torch.Tensor:
    """Learn what the missing pixels may be, convert the network, classify; returns the class probabilities."""
    torch.manual_seed(0)
    # NaN marks what is missing: here a square of each image, in your data clouds, dead sensors, empty slices.
    raw = torch.rand(images, 3, side, side)
    raw[~misconv.missing.square(images, side, side, fraction=1 / 9).expand_as(raw)] = torch.nan

    # The pipeline the network was trained with. `Incomplete` keeps resizing from spreading the holes.
    pipeline = v2.Compose([v2.Resize(64), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
    batch = torch.stack([pipeline(Incomplete(image)).as_subclass(torch.Tensor) for image in raw])
    x, observed = misconv.observe(batch)

    density = misconv.UNetDMFA(channels=3)
    misconv.fit_density(density, x, observed, epochs=epochs, progress=False)

    network = misconv.convert(torchvision.models.resnet18(num_classes=10), density).eval()  # this is the line
    with torch.no_grad():
        logits = network(batch[:8])  # NaN goes in …
    print("finite:", bool(logits.isfinite().all()))  # … and numbers come out

    doubt = misconv.predictive(network, density(x[:8], observed[:8]), samples=8)
    print("share of the doubt that is due to missing pixels:", f"{doubt.share.mean().item():.3f}")
    return doubt.probabilities


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()
    main(images=arguments.images, epochs=arguments.epochs)

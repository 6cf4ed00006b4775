"""Segmentation of images with holes: a small U-Net, converted like any other network and trained with its density.

    python examples/segmentation.py

The task: where is the bright disc? A quarter of each image is missing, also of the disc.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import misconv


class UNet(nn.Module):
    """Down, up, and a bridge between them; nothing in it knows of missing pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 16, 3, padding=1)
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.leave = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 1, H, W)."""
        near = F.relu(self.enter(x))
        far = F.relu(self.up(self.down(near)))
        out: Tensor = self.leave(torch.cat([near, far], 1))
        return out


def discs(count: int, side: int = 32) -> tuple[Tensor, Tensor]:
    """Noisy images (N, 1, H, W) with a disc each, and where it is."""
    place = torch.rand(count, 2, 1, 1, 1) * (side - 16) + 8
    rows, columns = torch.arange(side).view(-1, 1), torch.arange(side)
    inside = (rows - place[:, 0]) ** 2 + (columns - place[:, 1]) ** 2 < 36
    return 0.8 * inside + 0.15 * torch.randn(count, 1, side, side), inside.float()


def main(images: int = 512, epochs: int = 8) -> float:
    """Train, and return the share of test pixels that are right."""
    torch.manual_seed(0)
    complete, truth = discs(images)
    x = complete.masked_fill(~misconv.missing.square(images, 32, 32), torch.nan)
    train, test = slice(0, images * 3 // 4), slice(images * 3 // 4, None)

    density = misconv.UNetDMFA(channels=1, rank=2, widths=(16, 32), depths=(1, 1), patch=1)
    misconv.fit_density(density, x[train], epochs=epochs, progress=False)
    network = misconv.convert(UNet(), density, train_density=True).train()

    # Network and density learn together, as train_density=True says; the loss reaches the density through the mean and
    # the variance. Without it the density would stay as it was fitted.
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(epochs):
        for indices in torch.randperm(train.stop).split(32):
            loss = F.binary_cross_entropy_with_logits(network(x[indices]), truth[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()
    with torch.no_grad():
        right = ((network(x[test]) > 0) == (truth[test] > 0.5)).float().mean().item()
    print(f"pixels right: {right:.3f} (saying nothing is disc: {1 - truth[test].mean().item():.3f})")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    main(arguments.images, arguments.epochs)

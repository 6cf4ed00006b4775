"""A converted network inside a LightningModule, trained by Lightning's Trainer.

pip install pytorch-lightning
python examples/lightning_module.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import misconv
from misconv import data


class Digits(LightningModule):
    """A classifier of digits with missing pixels, density included."""

    def __init__(self, density: nn.Module) -> None:
        super().__init__()
        cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Flatten(), nn.Linear(16 * 64, 10)
        )
        self.network = misconv.convert(cnn, density)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss of a batch of images with NaN, and labels."""
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Adam for everything."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main(images: int = 512, epochs: int = 2) -> float:
    """Train, and return the share of training digits that are read right."""
    torch.manual_seed(0)
    complete, labels = (t[:images] for t in data.digits())
    x = complete.masked_fill(~misconv.missing.square(images, 8, 8), torch.nan)
    density = misconv.UNetDMFA(channels=1, rank=2, widths=(16, 32), depths=(1, 1), patch=1)
    misconv.fit_density(density, *misconv.observe(x), epochs=epochs, progress=False)
    module = Digits(density.eval())
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, labels), batch_size=64, shuffle=True))
    module.eval()
    with torch.no_grad():
        right = (module.network(x).argmax(1) == labels).float().mean().item()
    print(f"digits read right: {right:.3f}")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    main(arguments.images, arguments.epochs)

"""The same training on many GPUs and many machines: everything about that is an argument of Lightning Fabric.

One machine, two processes, on its CPU:

    torchrun --nproc-per-node 2 examples/distributed.py --accelerator cpu

Four machines with eight GPUs each, started on every one of them:

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \
        examples/distributed.py --accelerator cuda --precision bf16-mixed
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn

import misconv
from misconv import data


def main(accelerator: str = "cpu", precision: str = "32-true", images: int = 512, epochs: int = 2) -> float:
    """Fit a density and train a converted network on digits; returns the last loss."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // processes
    fabric = Fabric(
        accelerator=accelerator, devices=processes, num_nodes=nodes, precision=precision,
        strategy="ddp" if processes * nodes > 1 else "auto",
    )  # fmt: skip
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    complete, labels = (t[:images] for t in data.digits())
    seen = misconv.missing.square(images, 8, 8, generator=torch.Generator().manual_seed(0))
    x, observed = misconv.observe(complete.masked_fill(~seen, torch.nan))

    density = misconv.UNetDMFA(channels=1, rank=2, widths=(16, 32), depths=(1, 1), patch=1)
    misconv.fit_density(density, x, observed, epochs=epochs, fabric=fabric, progress=False)

    cnn = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
    converted = misconv.convert(cnn, density)
    network, optimizer = fabric.setup(converted, torch.optim.Adam(converted.parameters(), lr=1e-3))
    loss = torch.zeros(())
    for epoch in range(epochs):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch))
        for indices in order.split(64):
            mine = indices[fabric.global_rank :: fabric.world_size]  # every process takes its share of the batch
            output = network(x[mine].to(fabric.device), observed[mine].to(fabric.device))
            loss = F.cross_entropy(output, labels[mine].to(fabric.device))
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
    if fabric.global_rank == 0:
        print(f"{fabric.world_size} processes, loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    main(**vars(parser.parse_args()))
    if torch.distributed.is_initialized():
        gc.collect()  # networks that still know the group would keep its threads alive beyond the end of Python
        torch.distributed.destroy_process_group()

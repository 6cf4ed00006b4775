"""What a converted network costs beside the plain one: images per second, in evaluation and in training.

    python benchmarks/network.py --out results/bench/network-cuda.json

Correctness first: complete images must give what the plain network gives, and the kernels around the density what its
plain formulas give. Then plain and converted network take turns, with float32 (convolutions in TF32, as torch has it)
and with bfloat16 and channels_last; the density is timed alone too. `plain / converted` is the share of the plain
network's speed that is left. Parameters are random: they do not change the cost.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import misconv
from misconv import UNetDMFA, missing
from misconv._store import commit, device_name, versions

MODES = ("float32", "bfloat16")


def main() -> None:
    """Read the command line, check, measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=["resnet50", "resnet18"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--patch", type=int, default=4)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--components", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    rows = [density_row(mode, options, device) for mode in options.modes]
    for name in options.networks:
        for mode in options.modes:
            rows += network_rows(name, mode, options, device)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    record = {"settings": settings, "rows": rows, "commit": commit()}
    record |= {"versions": versions(device), "device": device_name(device)}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def density_of(options: argparse.Namespace) -> UNetDMFA:
    """One that says something of every pixel."""
    density = UNetDMFA(3, options.components, options.rank, patch=options.patch)
    nn.init.normal_(density.head.weight, std=0.05)
    return density.eval()


def images_of(mode: str, options: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images with NaN in a square of a quarter, and what is seen of them."""
    x = torch.rand(options.batch_size, 3, options.size, options.size, device=device)
    observed = missing.square(len(x), options.size, options.size, device=device)
    return in_mode(x, mode), observed


def in_mode(module: Any, mode: str) -> Any:
    """A network or images in the type and layout of a mode."""
    if mode == "float32":
        return module
    return module.to(torch.bfloat16).to(memory_format=torch.channels_last)


@torch.no_grad()
def density_row(mode: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The density alone: its time, its operations, and how far kernels and plain formulas are apart."""
    density = in_mode(density_of(options).to(device), mode)
    x, observed = images_of(mode, options, device)
    few = slice(0, min(8, len(x)))
    found = density(x[few], observed[few])
    with misconv.plain():
        expected = density(x[few], observed[few])
        with FlopCounterMode(display=False) as counter:
            density(x[:1], observed[:1])
    hidden = ~observed[few].expand(found.mean.shape)
    difference = relative(found.mean[hidden], expected.mean[hidden])
    assert difference < (5e-3 if mode == "float32" else 5e-2), f"kernels and plain formulas differ by {difference}"
    (seconds,) = timed([lambda: density(x, observed)], options.turns, device)
    row = {
        "network": "UNetDMFA", "kind": "evaluation", "mode": mode, "ms": 1e3 * seconds,
        "gflop_per_image": counter.get_total_flops() / 1e9, "parameters": count(density), "difference": difference,
        "mb": peak(lambda: density(x, observed), device),
        "out_mb": sum(t.nbytes for t in parts(density(x, observed))) / 1e6,
    }  # fmt: skip
    print(row, flush=True)
    return row


def network_rows(name: str, mode: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Evaluation and training of one network."""
    plain = in_mode(getattr(torchvision.models, name)().to(device), mode)
    net = misconv.convert(copy.deepcopy(plain), in_mode(density_of(options).to(device), mode))
    complete, observed = images_of(mode, options, device)
    incomplete = complete.masked_fill(~observed, torch.nan)
    rows = []
    for kind in ("evaluation", "training"):
        both = [plain, net]
        for module in both:
            module.train(kind == "training")
        if kind == "evaluation":
            with torch.no_grad():
                difference = relative(net(complete[:8]), plain(complete[:8]))
            assert difference < (5e-3 if mode == "float32" else 5e-2), f"complete images differ by {difference}"
        steps = [step(m, x, kind) for m, x in zip(both, (complete, incomplete), strict=True)]
        before, after = timed(steps, options.turns, device)
        memory = [peak(s, device) for s in steps]
        row = {
            "network": name, "kind": kind, "mode": mode, "plain_ms": 1e3 * before, "converted_ms": 1e3 * after,
            "plain / converted": before / after, "plain_mb": memory[0], "converted_mb": memory[1],
        }  # fmt: skip
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
        rows.append(row)
    return rows


def step(network: nn.Module, x: Tensor, kind: str) -> Callable[[], None]:
    """One forward pass, or one step of training with SGD."""
    if kind == "evaluation":

        def evaluate() -> None:
            with torch.no_grad():
                network(x)

        return evaluate
    optimizer = torch.optim.SGD((p for p in network.parameters() if p.requires_grad), 1e-3)
    labels = torch.randint(1000, (len(x),), device=x.device)

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x).float(), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return train


def timed(steps: list[Callable[[], None]], turns: int, device: torch.device) -> list[float]:
    """Median seconds of each, in turns, so that noise meets all alike; three calls at a time."""
    taken: list[list[float]] = [[] for _ in steps]
    for turn in range(turns + 2):  # two to warm up
        for seconds, each in zip(taken, steps, strict=True):
            wait(device)
            start = time.perf_counter()
            for _ in range(3):
                each()
            wait(device)
            if turn >= 2:
                seconds.append((time.perf_counter() - start) / 3)
    return [statistics.median(seconds) for seconds in taken]


def wait(device: torch.device) -> None:
    """Until the GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(run: Callable[[], None], device: torch.device) -> float | None:
    """Megabytes at the peak of one call."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    run()
    wait(device)
    return torch.cuda.max_memory_allocated(device) / 1e6


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The norm of a difference over that of what is compared with."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def parts(p: misconv.MFA) -> tuple[Tensor, ...]:
    """The numbers that an MFA consists of."""
    return p.means, p.factors, p.noise


def count(module: nn.Module) -> int:
    """Of parameters."""
    return sum(p.numel() for p in module.parameters())


if __name__ == "__main__":
    main()

"""Whole networks in the benchmark: torchvision's, as they are and converted, in evaluation and in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from misconv import missing
from misconv._backend import plain
from misconv.bench.checks import WrongResultError
from misconv.bench.layer import Contender
from misconv.convert import convert
from misconv.density import UNetDMFA
from misconv.mfa import MFA

__all__ = ["MODELS", "NetworkSetting", "Networks", "network_settings"]

MODELS = ("resnet18", "resnet50", "efficientnet_b0", "convnext_tiny", "regnet_y_400mf")
_BOUNDS = {"float32": 5e-3, "bfloat16": 5e-2}  # how far results of whole networks may be apart: TF32, bfloat16


@dataclass(frozen=True)
class NetworkSetting:
    """One row: a network of torchvision, what is done with it, and how."""

    model: str
    task: Literal["evaluation", "training"] = "evaluation"
    mode: Literal["float32", "bfloat16"] = "float32"  # convolutions in TF32, as torch has it; or channels_last, too
    batch: int = 64
    graph: bool = False  # a CUDA graph of the whole step
    size: int = 224
    share: float = 0.25  # missing, in one square
    components: int = 1
    rank: int = 4
    patch: int = 4

    def __str__(self) -> str:
        how = self.mode if self.mode == "float32" else "bfloat16, channels_last"
        graph = ", CUDA graph" if self.graph else ""
        return f"{self.model}, {self.task}, {how}, {self.batch}×3×{self.size}×{self.size}{graph}"

    def tiny(self) -> NetworkSetting:
        """The same for a computer that has no time."""
        return replace(self, batch=2, size=32)


def network_settings(device: torch.device, models: tuple[str, ...] = MODELS) -> list[NetworkSetting]:
    """All rows for a device; a CPU has no CUDA graphs, and no time for large batches."""
    if device.type != "cuda":
        return [NetworkSetting(model, batch=8) for model in models[:2]]
    return [
        NetworkSetting(model, task, mode, batch, graph)
        for model in models
        for mode in ("float32", "bfloat16")
        for batch in (64, 128, 256)
        for task in ("evaluation", "training")  # which changes the network, and so comes last
        for graph in (False, True)
        # The usual size of a batch where the first layer weighs most.
        if batch != 128 or (model, task, mode) == ("resnet18", "training", "bfloat16")
    ]


class Networks:
    """A network as it is, converted for an MFA that is given, and converted with a `UNetDMFA`; and their images.

    For all rows that differ in the task alone, or in whether it is a graph.
    """

    def __init__(self, setting: NetworkSetting, generator: torch.Generator) -> None:
        import torchvision  # an extra

        self.setting, device = setting, generator.device
        self.plain = self._cast(getattr(torchvision.models, setting.model)(weights=None).to(device).eval())
        density = UNetDMFA(3, setting.components, setting.rank, patch=setting.patch)
        nn.init.normal_(density.head.weight, std=0.05)  # it shall say something of every pixel
        self.density: UNetDMFA = self._cast(density.to(device).eval())
        x = torch.rand(setting.batch, 3, setting.size, setting.size, generator=generator, device=device)
        self.complete = self._cast(x)
        self.observed = missing.square(
            len(x), setting.size, setting.size, fraction=setting.share, generator=generator, device=device
        )
        self.incomplete = self.complete.masked_fill(~self.observed, torch.nan)
        with torch.no_grad():
            self.p: MFA = self.density(self.complete, self.observed)
        self.given, self.converted = convert(self.plain), convert(self.plain, self.density)

    def _cast(self, module: Any) -> Any:
        """A network or images in the type and layout of the setting."""
        if self.setting.mode == "float32":
            return module
        return module.to(torch.bfloat16).to(memory_format=torch.channels_last)

    @torch.no_grad()
    def check(self) -> float:
        """The largest error; a `WrongResultError` if it is too large.

        Complete images must give the network's own result, incomplete ones that of the plain path.
        """
        few, some = self.complete[:8], self.incomplete[:8]
        with plain():
            expected = self.converted(some)
        errors = {
            "complete images": _error(self.converted(few), self.plain(few)),
            "incomplete images": _error(self.converted(some), expected),
        }
        for images, error in errors.items():
            if not error <= _BOUNDS[self.setting.mode]:
                raise WrongResultError(f"{self.setting}: {images} differ by {error:.1e}")
        return max(errors.values())

    @torch.no_grad()
    def about_density(self) -> dict[str, float]:
        """How large the density is, and how much it computes and says of a batch."""
        with plain(), FlopCounterMode(display=False) as counter:
            self.density(self.complete[:1], self.observed[:1])
        return {
            "parameters": sum(p.numel() for p in self.density.parameters()),
            "gflop_per_image": counter.get_total_flops() / 1e9,
            "out_mb": sum(t.nbytes for t in (self.p.means, self.p.factors, self.p.noise)) / 1e6,
        }

    def contenders(self, task: str, graph: bool) -> dict[str, Contender]:
        """`network`, `given` and `density`, each a whole step; in evaluation also the density `alone`."""
        inputs: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
            "network": (self.plain, (self.complete,)),
            "given": (self.given, (self.p,)),
            "density": (self.converted, (self.incomplete,)),
        }
        if task == "evaluation":
            inputs["alone"] = (self.density, (self.complete, self.observed))
        steps = {name: self._step(task, *network) for name, network in inputs.items()}
        if graph:
            steps = {name: _captured(step) for name, step in steps.items()}
        return {name: Contender(partial(_call, step)) for name, step in steps.items()}

    def _step(self, task: str, network: nn.Module, inputs: tuple[Any, ...]) -> Callable[[], object]:
        """A forward pass, or a step of training with SGD."""
        if task == "evaluation":
            network.eval()

            def evaluate() -> object:
                with torch.no_grad():
                    return network(*inputs)

            return evaluate
        network.train()
        optimizer = torch.optim.SGD((p for p in network.parameters() if p.requires_grad), 1e-3)
        labels = torch.arange(self.setting.batch, device=self.complete.device)

        def train() -> object:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(*inputs).float(), labels)
            loss.backward()
            optimizer.step()
            return loss

        return train


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def _call(step: Callable[[], object], _: int) -> object:
    """There is one set of inputs."""
    return step()


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    """The same as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_: object = step) -> None:  # what a graph reads must live as long as it does
        graph.replay()

    return replay

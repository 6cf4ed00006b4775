"""What the benchmark runs: settings of a first layer, random inputs for it, and the contenders that compute it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv import functional, missing
from misconv._backend import plain
from misconv.layers import MisConv2d
from misconv.mfa import MFA

__all__ = ["Contender", "Inputs", "Kind", "Layer", "Setting", "draw", "likelihood", "normalized"]

Kind = Literal["forward", "weights", "everything"]

# More than the level-2 cache of any GPU of today (an H200 has 50 MB): inputs rotate until they no longer fit, or until
# there are enough of them to be different.
CACHE_BYTES, MOST_SETS = 128e6, 8


@dataclass(frozen=True)
class Setting:
    """Images and a convolution; square images, filters and holes."""

    batch: int = 64
    channels: int = 3
    size: int = 64
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    filters: int = 32
    share: float = 1 / 4  # of the pixels, missing
    components: int = 1
    rank: int = 4
    per_channel: bool = False  # whether every channel misses pixels of its own

    @property
    def output(self) -> tuple[int, int, int, int]:
        """(B, O, H', W')."""
        side = (self.size + 2 * self.padding - self.kernel) // self.stride + 1
        return self.batch, self.filters, side, side

    def __str__(self) -> str:
        stride = f"/{self.stride}" if self.stride > 1 else ""
        return (
            f"{self.batch}×{self.channels}×{self.size}×{self.size} {self.kernel}×{self.kernel}{stride}→{self.filters} "
            f"K={self.components} L={self.rank} {100 * self.share:g} %{' per channel' if self.per_channel else ''}"
        )

    def tiny(self) -> Setting:
        """The same on a scale at which everything runs in milliseconds."""
        size = max(self.size // 8, 2 * self.kernel)
        batch = max(self.batch // 16, min(self.batch, 2))
        return replace(self, batch=batch, size=size, filters=max(self.filters // 8, 2))

    def plain_bytes(self, kind: Kind) -> float:
        """About what the plain path allocates on the way, in tensors of the size of the output."""
        tensors = self.rank + 5 if kind == "forward" else 2 * self.rank + 10
        return 4.0 * math.prod(self.output) * self.components * tensors


class Inputs(NamedTuple):
    """Images as a convolution takes them, and as MisConv does."""

    x: Tensor  # (B, C, H, W), complete
    p: MFA

    def tracked(self) -> Inputs:
        """The same values, as leaves that ask for their gradients."""
        p = self.p.detach()
        for leaf in (p.logits, p.means, p.factors, p.noise):
            leaf.requires_grad_()
        return Inputs(self.x.detach().requires_grad_(), p)

    def double(self) -> Inputs:
        """The same values in float64."""
        return Inputs(self.x.double(), self.p.to(torch.float64))


def draw(setting: Setting, generator: torch.Generator) -> Inputs:
    """Random images with holes, float32, where the generator lives; all components agree at observed pixels."""
    batch, channels, size = setting.batch, setting.channels, setting.size
    planes = channels if setting.per_channel else 1
    if 0 < setting.share < 1:
        holes = [missing.square(batch, size, size, fraction=setting.share, generator=generator) for _ in range(planes)]
        observed = torch.cat(holes, 1)
    else:
        observed = torch.full((batch, planes, size, size), setting.share == 0, device=generator.device)
    image, components = (channels, size, size), (batch, setting.components)
    x = _randn(generator, batch, *image)
    means = torch.where(observed.unsqueeze(1), x.unsqueeze(1), _randn(generator, *components, *image))
    factors = 0.3 * _randn(generator, *components, setting.rank, *image)
    noise = (0.1 + 0.1 * _randn(generator, *components, *image).abs()).square()
    return Inputs(x, MFA(_randn(generator, *components), means, factors, noise, observed))


class Contender(NamedTuple):
    """Something to be timed: `run` makes `calls` calls, on the i-th set of inputs, inside `around`."""

    run: Callable[[int], object]
    around: Callable[[], ExitStack] = ExitStack
    calls: int = 1
    input_bytes: int = 0


class Layer:
    """One setting with weights and inputs on a device, and everything that can compute its layer.

    The contenders: ``conv`` (convolution and ReLU of complete images), ``conv_inplace`` (with a ReLU in place),
    ``conv_image`` (like conv; of *everything*, also the gradient of the images), ``misconv``, ``plain`` (misconv by
    the plain path), ``conv_graph`` and ``misconv_graph`` (a CUDA graph of one call for every set of inputs).
    """

    def __init__(self, setting: Setting, generator: torch.Generator, sets: int | None = None) -> None:
        self.setting = setting
        fan_in = setting.channels * setting.kernel**2
        shape = (setting.filters, setting.channels, setting.kernel, setting.kernel)
        self.weight = (_randn(generator, *shape) / math.sqrt(fan_in)).requires_grad_()
        self.bias = (0.1 * _randn(generator, setting.filters)).requires_grad_()
        self.given = _randn(generator, *setting.output)  # the gradient that arrives from the network above
        first = draw(setting, generator)
        size = _bytes(first.x, *_parts(first.p))
        sets = sets or min(max(math.ceil(CACHE_BYTES / size), 1), MOST_SETS)
        self.inputs = [first, *(draw(setting, generator) for _ in range(sets - 1))]
        self.tracked = [inputs.tracked() for inputs in self.inputs]

    def conv(self, inputs: Inputs) -> Tensor:
        """Convolution and ReLU of complete images."""
        return torch.relu(self._convolve(inputs))

    def conv_inplace(self, inputs: Inputs) -> Tensor:
        """The same with one tensor less."""
        return torch.relu_(self._convolve(inputs))

    def misconv(self, inputs: Inputs) -> Tensor:
        """The expected activation."""
        s = self.setting
        return functional.expected_conv2d(inputs.p, self.weight, self.bias, s.stride, s.padding)

    def contender(self, name: str, kind: Kind) -> Contender:
        """What is timed under this name."""
        of_images = name.startswith("conv")
        tracked = kind == "everything" and name != "conv"
        sets = self.tracked if tracked else self.inputs
        forward = {"conv_inplace": self.conv_inplace}.get(name, self.conv if of_images else self.misconv)
        read = _bytes(self.weight, self.bias, *([sets[0].x] if of_images else _parts(sets[0].p)))

        def around() -> ExitStack:
            return _inside(name, kind)

        if kind == "forward":
            if name.endswith("_graph"):
                return _captured(forward, sets, around, read)
            return Contender(lambda i: forward(sets[i % len(sets)]), around, 1, read)

        def step(i: int) -> object:
            inputs = sets[i % len(sets)]
            leaves = self.leaves(inputs, of_images) if tracked else [self.weight, self.bias]
            return torch.autograd.grad(forward(inputs), leaves, self.given, allow_unused=True)

        return Contender(step, around, 1, read + _bytes(self.given))

    def leaves(self, inputs: Inputs, of_images: bool = False) -> list[Tensor]:
        """Whatever has a gradient: also the images, or what the density says of them."""
        p = inputs.p
        # The weight of a single component is 1, and without factors there is nothing to learn about them.
        chosen = [p.means, *[p.factors] * (self.setting.rank > 0), p.noise, *[p.logits] * (self.setting.components > 1)]
        return [self.weight, self.bias, *([inputs.x] if of_images else chosen)]

    def _convolve(self, inputs: Inputs) -> Tensor:
        return F.conv2d(inputs.x, self.weight, self.bias, self.setting.stride, self.setting.padding)


def normalized(layer: Layer, name: str) -> Contender:
    """Convolution, BatchNorm in training and ReLU, with the gradients of their parameters: ``conv`` or ``misconv``."""
    s = layer.setting
    like: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    conv = nn.Conv2d(s.channels, s.filters, s.kernel, s.stride, s.padding, bias=False, **like)
    batch_norm = nn.BatchNorm2d(s.filters, **like)
    network: nn.Module = nn.Sequential(conv, batch_norm, nn.ReLU())
    if name == "misconv":
        network = MisConv2d.from_conv(conv, norm=batch_norm, activation=nn.ReLU())
    network.train()

    def step(i: int) -> object:
        inputs = layer.inputs[i % len(layer.inputs)]
        response = network(inputs.p if name == "misconv" else inputs.x)
        return torch.autograd.grad(response, list(network.parameters()), layer.given)

    first = layer.inputs[0]
    read = _bytes(*([first.x] if name == "conv" else _parts(first.p)), layer.given)
    return Contender(step, ExitStack, 1, read)


def likelihood(layer: Layer, name: str) -> Contender:
    """`MFA.log_prob` of the seen pixels with the gradient of everything in the density, as a density is trained."""
    given = layer.given.flatten()[: layer.setting.batch]
    # The density of whole images: nothing is exact before it was scored.
    whole = [i._replace(p=MFA(i.p.logits, i.p.means, i.p.factors, i.p.noise, check=False)) for i in layer.tracked]
    seen = [inputs.p.observed for inputs in layer.inputs]

    def step(i: int) -> object:
        inputs = whole[i % len(whole)]
        score = inputs.p.log_prob(inputs.x.detach(), seen[i % len(seen)])
        return torch.autograd.grad(score, layer.leaves(inputs)[2:], given)

    return Contender(
        step, lambda: _inside(name, "everything"), 1, _bytes(whole[0].x, given, *_parts(layer.inputs[0].p))
    )


def _inside(name: str, kind: Kind) -> ExitStack:
    """Entered once for a burst, so that it costs the calls nothing."""
    stack = ExitStack()
    if kind == "forward":
        stack.enter_context(torch.no_grad())
    if name == "plain":
        stack.enter_context(plain())
    return stack


def _captured(
    forward: Callable[[Inputs], Tensor], sets: list[Inputs], around: Callable[[], ExitStack], read: int
) -> Contender:
    """A CUDA graph of one call for every set, so that a replay is mostly work and hardly launch."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with around(), torch.cuda.stream(side):
        for inputs in [*sets, sets[0]]:
            forward(inputs)
    torch.cuda.current_stream().wait_stream(side)
    with around():
        expected = [forward(inputs) for inputs in sets]
        with torch.cuda.graph(graph):
            results = [forward(inputs) for inputs in sets]
        for result in results:
            result.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(results, expected, strict=True)):
        raise ArithmeticError("a CUDA graph of the layer gives something else than the layer")

    def replay(_: int) -> object:
        graph.replay()
        return results  # they live in the graph's own memory, as long as the graph does

    return Contender(replay, ExitStack, len(sets), read)


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _parts(p: MFA) -> list[Tensor]:
    return [t for t in (p.logits, p.means, p.factors, p.noise, p.observed) if t is not None]


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)

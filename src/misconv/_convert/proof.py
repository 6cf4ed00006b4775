"""Before a converted network is returned: an image that it takes, and the proof that it computes what it should."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv._convert.search import as_tree
from misconv._convert.stem import Response
from misconv._torch import pytree
from misconv.mfa import MFA

if TYPE_CHECKING:
    from misconv.convert import Converted

__all__ = ["acceptable_image", "prove", "same_randomness"]

# Sides of the images a network is tried on, until it takes one.
_SIDES = (64, 32, 28, 96, 128, 16, 8, 224, 256, 299, 384)


def acceptable_image(network: nn.Module, density: nn.Module | None) -> Tensor:
    """Two random images of a size that the network takes."""
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    like = convolutions[0].weight
    # A network that chooses among channels, or repeats them, takes another number than its convolutions.
    own = getattr(density, "channels", None)
    read = [module.in_channels for module in convolutions[:5]]
    channels = dict.fromkeys([*([own] if isinstance(own, int) else []), *read, 3, 1, 4])
    shapes: list[tuple[int, ...]] = [(count, *size) for count in channels for size in _sizes(network)]
    # Some densities are made for one size alone.
    wanted = getattr(density, "shape", None) or getattr(getattr(density, "means", None), "shape", (0,))[1:]
    if isinstance(wanted, tuple) and len(wanted) == 3:
        shapes.insert(0, wanted)
    # What fails on a GPU, an index out of range for example, may end all work there; so it is tried on the CPU first.
    elsewhere = [] if like.device.type == "cpu" else [copy.deepcopy(network).cpu()]
    for tried in (*elsewhere, network):
        shape, reason = _first_accepted(tried, shapes, like.dtype, "cpu" if tried in elsewhere else like.device)
        if shape is not None:
            return torch.randn(2, *shape, dtype=like.dtype, device=like.device)
    said = str(reason).splitlines()[0][:200] if str(reason) else ""
    raise ValueError(
        f"model must take a batch of images (B, C, H, W) as its only argument, but it failed on random ones of each of "
        f"{shapes[:6]} and others; on the first with {type(reason).__name__}: {said}. If it takes one size alone, say "
        "which: model.image_size = (height, width)"
    )


def _first_accepted(
    network: nn.Module, shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str
) -> tuple[tuple[int, ...] | None, Exception | None]:
    """The first of the shapes (C, H, W) of images that the network takes, or its first complaint."""
    reason: Exception | None = None
    for shape in shapes:
        try:
            network(torch.randn(2, *shape, dtype=dtype, device=device))
        except Exception as error:  # whatever a network may raise at a size it was not made for
            reason = reason or error
        else:
            return shape, None
    return None, reason


def _sizes(network: nn.Module) -> list[tuple[int, int]]:
    """The size the network says it wants, where it does, and the usual ones; a small one first, as most take any."""
    config: Any
    said: list[Any] = [getattr(network, "image_size", None)]
    for name in ("pretrained_cfg", "default_cfg"):
        config = getattr(network, name, None)
        said.append(config.get("input_size", (None,))[-1] if hasattr(config, "get") else None)
    sizes: list[tuple[int, int]] = [(64, 64)]
    for size in (*said, *_SIDES):
        if isinstance(size, int):
            sizes.append((size, size))
        elif isinstance(size, tuple) and len(size) == 2:
            sizes.insert(0, size)
    return list(dict.fromkeys(sizes))


def prove(converted: Converted, image: Tensor) -> None:
    """Complete images must give what they gave before, incomplete ones numbers."""
    torch.manual_seed(0)
    expected = converted.network(image.clone())
    torch.manual_seed(0)
    actual, outputs = converted.run_stem(MFA.point(image))
    before, after = (pytree.tree_leaves(as_tree(result)) for result in (expected, actual))
    same = len(before) == len(after) and all(_equal(a, b) for a, b in zip(before, after, strict=True))
    if not same:
        raise ValueError(
            f"model must give the same result for complete images after conversion, but with the stem {converted.stem} "
            f"it does not; name its parts, for example stem={converted.stem.convolution!r}"
        )
    _prove_mixture(converted, image, outputs)
    batch, _, height, width = image.shape
    half = torch.arange(width, device=image.device).expand(batch, 1, height, width) < width // 2
    ones = torch.ones_like(image).unsqueeze(1)
    p = MFA(image.new_zeros(batch, 1), image.unsqueeze(1), 0.5 * ones.unsqueeze(1), ones, half)
    known = [leaf.isfinite().all() for leaf in before if isinstance(leaf, Tensor)]
    found = [leaf.isfinite().all() for leaf in pytree.tree_leaves(as_tree(converted(p))) if isinstance(leaf, Tensor)]
    if all(known) and not all(found):
        raise ValueError(
            f"model must give finite results for incomplete images, but with stem {converted.stem} it fails"
        )


def _prove_mixture(converted: Converted, image: Tensor, outputs: list[tuple[Response, Tensor]]) -> None:
    """Images that are one of two, each with probability one half, must give the mean of what the two give.

    They do not where what the network does to an image before its first convolution depends on the image (it subtracts
    its mean, for example), or escapes the functions of torch.
    """
    other = 1 + 3 * torch.randn_like(image)
    both = torch.stack([image, other], 1)  # (B, 2, C, H, W)
    batch, _, *shape = both.shape
    p = MFA(image.new_zeros(batch, 2), both, image.new_zeros(batch, 2, 0, *shape), torch.zeros_like(both))
    _, others = converted.run_stem(MFA.point(other))
    _, mixed = converted.run_stem(p)
    for (first, one), (second, two), (response, found) in zip(outputs, others, mixed, strict=True):
        means = [r.convolution.p.means[:, 0] for r in (first, second)]
        same = _near(response.convolution.p.means, torch.stack(means, 1))
        if response.moments is None:  # statistics of the batch are those of the mixture, and not of the two
            same = same and _near(found, torch.lerp(one.float(), two.float(), 0.5))
        if not same:
            raise ValueError(
                f"model must hand its first convolution {converted.stem.convolution or 'forward'!r} the image, or a "
                "fixed affine function of each channel, but what it does to the image depends on the image itself; do "
                "that to the images before they enter the network"
            )


def _near(found: Tensor, expected: Tensor) -> bool:
    # Half precision rounds behind the convolution, behind the normalization and here, of both images and the mixture.
    tolerance = max(1e-3 if found.is_cuda else 1e-4, 6 * torch.finfo(found.dtype).eps)
    size = float(expected.abs().max())
    return torch.allclose(found.to(expected.dtype), expected, rtol=0, atol=tolerance * size, equal_nan=True)


def _equal(before: Any, after: Any) -> bool:
    if not isinstance(before, Tensor):
        return not isinstance(after, Tensor)
    if not isinstance(after, Tensor) or before.shape != after.shape or before.dtype != after.dtype:
        return False
    if before.device.type == "cpu" or not before.is_floating_point():
        return torch.equal(before.nan_to_num(), after.nan_to_num())
    # A GPU may choose another algorithm for the same convolution.
    return torch.allclose(before, after, rtol=1e-3, atol=1e-3 * float(before.abs().max()), equal_nan=True)


@contextmanager
def same_randomness(network: nn.Module) -> Iterator[None]:
    """Random images that are always the same, without touching the user's random numbers."""
    devices = {p.device for p in network.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(0)
        yield

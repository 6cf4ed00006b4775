"""What is trained: densities and classifiers as jobs for `misconv._train.engine`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._checks import (
    check_dense,
    check_fraction,
    check_images,
    check_observed,
    check_seed,
    check_seen_finite,
    check_size,
    describe,
)
from misconv._torch import pytree
from misconv._train.identity import fingerprint, identify, identify_data
from misconv._train.loan import borrowed, check_trainable
from misconv._train.running import Job, Rate, generator
from misconv._train.session import EpochRecord
from misconv.mfa import MFA
from misconv.missing import hide, square

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = [
    "Inputs",
    "as_floats",
    "check_count",
    "check_incomplete",
    "check_share",
    "classifier_job",
    "cosine_schedule",
    "count_right",
    "density_job",
]

Inputs = MFA | Tensor | tuple[Tensor, ...] | Callable[[Tensor], Any]


def density_job(
    density: nn.Module,
    images: Tensor,
    observed: Tensor,
    fabric: Fabric,
    *,
    batch_size: int,
    learning_rate: Rate,
    mse_epochs: int = 0,
    shape: Callable[..., Tensor] = square,
    fraction: float = 1 / 4,
    validation: float = 0.1,
    seed: int = 0,
    clip: float | None = 5.0,
) -> Job:
    """The training of a density; the arguments are those of `misconv.fit_density`."""
    images, observed = check_incomplete(images, observed)
    seed, batch_size = check_seed("seed", seed), check_size("batch_size", batch_size)
    check_fraction(fraction)
    check_share("validation", validation)
    check_count("mse_epochs", mse_epochs)
    settings = {
        "task": "density",
        "seed": seed,
        "images": list(images.shape),
        "mse_epochs": mse_epochs,
        "shape": _identify_shape(shape, fraction, images),
        "fraction": fraction,
        "validation": validation,
    }
    count = round(validation * len(images))
    order = torch.randperm(len(images), generator=generator(seed, "split"), device="cpu").to(images.device)
    held, rows = order.split([count, len(images) - count])
    if len(rows) == 0:
        raise ValueError(f"images must hold more than the share set aside for validation, got {describe(images)}")
    given = images, observed, rows
    batch_size = min(batch_size, len(rows))

    def prepare() -> None:
        calibrate = getattr(density, "calibrate", None)
        if callable(calibrate):
            x, seen, chosen = given
            with borrowed(density, x.device) as loan:
                loan.result = None  # it keeps what it learns
                _call("density", calibrate, (as_floats(x[chosen]), seen[chosen]))

    resident = _fits(fabric, images, observed)
    if resident:
        images, observed, held, rows = (t.to(fabric.device) for t in (images, observed, held, rows))
    known = observed.clone()  # what is shown of each image in this epoch
    shown = observed[held]
    if len(held):
        shown = hide(shown, shape, fraction=fraction, generator=generator(seed, "validation", images.device))
    squared = torch.zeros((), device=fabric.device)  # the weight of the squared error

    def begin(epoch: int) -> None:
        squared.fill_(1.0 if epoch < mse_epochs else 0.0)
        holes = generator(seed, _HOLES + epoch, images.device)
        known.copy_(hide(observed, shape, fraction=fraction, generator=holes))

    def score(model: nn.Module, which: Tensor, less: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over some images: −log p and squared error of what was hidden; how many pixels."""
        x, seen, less = (t.to(fabric.device) for t in (as_floats(images[which]), observed[which], less))
        target = (seen & ~less).expand(x.shape)
        p = _call("density", model, (x, less))
        if not isinstance(p, MFA) or p.shape != x.shape:
            raise TypeError(f"density must return a misconv.MFA of images {tuple(x.shape)}, got {describe(p)}")
        error = (p.mean - x).where(target, 0).square().sum()
        return -p.log_prob(x, target).sum(), error, target.sum()

    def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        mine = rows[indices[fabric.global_rank :: fabric.world_size]]
        nll, error, count = score(model, mine, known[mine])
        total = fabric.all_reduce(count.float(), reduce_op="sum")
        assert isinstance(total, Tensor)
        # Gradients are averaged over processes, but pixels are to be averaged over the whole batch.
        scale = fabric.world_size / total.clamp_min(1)
        return (nll + squared * error) * scale, torch.stack([nll, error, count]).double()

    def summarise(sums: list[float]) -> EpochRecord:
        nll, error, pixels = sums
        return {"nll": nll / max(pixels, 1), "mse": error / max(pixels, 1)}

    def evaluate(model: nn.Module) -> tuple[float, EpochRecord]:
        if len(held) == 0:
            return -math.inf, {}
        sums = torch.zeros(2, dtype=torch.float64, device=fabric.device)
        for part in torch.arange(len(held), device=held.device).split(4 * batch_size):
            mine = part[fabric.global_rank :: fabric.world_size]
            idle = len(mine) == 0  # it takes part all the same: processes call the model together, or not at all
            mine = part[:1] if idle else mine
            nll, _, count = score(model, held[mine], shown[mine])
            if not idle:
                sums += torch.stack([nll, count]).double()
        total = fabric.all_reduce(sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        nll_sum, pixels = total.tolist()
        mean = nll_sum / max(pixels, 1)
        return mean, {"validation_nll": mean}

    return Job(
        density, loss, 3, summarise, evaluate, len(rows), batch_size, learning_rate, seed=seed, clip=clip, begin=begin,
        prepare=prepare, resident=resident, settings=settings, data=lambda: identify_data(given[:2]), synchronize=True,
    )  # fmt: skip


def classifier_job(
    network: nn.Module,
    inputs: Inputs,
    labels: Tensor,
    fabric: Fabric,
    *,
    validation_inputs: Inputs | None = None,
    validation_labels: Tensor | None = None,
    batch_size: int,
    learning_rate: Rate,
    seed: int = 0,
    label_smoothing: float = 0.0,
    weight_decay: float = 0.0,
    learning_rate_scale: dict[str, float] | None = None,
    begin: Callable[[int], None] | None = None,
    settings: dict[str, Any] | None = None,
    name: str = "training",
    count: bool = True,
) -> Job:
    """The training of a classifier, for `train`; its arguments are those of `fit_classifier`.

    With `count` off the accuracy on training images is not recorded, which saves launches.

    Inputs may also be a function from indices (B,) to what the network takes of these images; it is called with
    indices on the device, and must not look at values there.
    """
    check_trainable("network", network)
    seed, batch_size = check_seed("seed", seed), check_size("batch_size", batch_size)
    labels = _check_labelled("", inputs, labels)
    size, held, highest = len(labels), 0, int(labels.max())
    batch_size = min(batch_size, size)
    if (validation_inputs is None) != (validation_labels is None):
        raise ValueError("validation_inputs and validation_labels must be given together, got one of them")
    if validation_inputs is not None and validation_labels is not None:
        validation_labels = _check_labelled("validation_", validation_inputs, validation_labels)
        held = len(validation_labels)
    known = {
        "task": "classifier",
        "seed": seed,
        "images": size,
        "labels": fingerprint(labels),
        "label_smoothing": label_smoothing,
    }
    given = [None if callable(each) else each for each in (inputs, validation_inputs)]
    resident = callable(inputs) or _fits(fabric, *pytree.tree_leaves((inputs, validation_inputs)))
    take, take_held = (_taker(i, fabric.device, resident) for i in (inputs, validation_inputs))
    if resident:
        labels = labels.to(fabric.device)

    def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        mine = indices[fabric.global_rank :: fabric.world_size]
        output, truth = _call("network", model, take(mine)), labels[mine].to(fabric.device)
        if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] <= highest:
            raise ValueError(
                f"network must return logits (B, classes) of at least {highest + 1} classes, which labels name, got "
                f"{describe(output)}"
            )
        total = F.cross_entropy(output, truth, reduction="sum", label_smoothing=label_smoothing)
        loss = total * fabric.world_size / len(indices)
        if not count:
            return loss, total.detach().unsqueeze(0)
        return loss, torch.stack([total.detach(), (output.argmax(1) == truth).sum()]).double()

    def summarise(sums: list[float]) -> EpochRecord:
        figures = {"loss": sums[0] / size}
        return figures | {"accuracy": sums[1] / size} if count else figures

    def evaluate(model: nn.Module) -> tuple[float, EpochRecord]:
        if validation_labels is None:
            return -math.inf, {}
        size = max(4 * batch_size, 1024) if resident else 4 * batch_size
        right = count_right(model, take_held, validation_labels, fabric.device, size)
        return -right / held, {"validation_accuracy": right / held}

    return Job(
        network, loss, 1 + count, summarise, evaluate, size, batch_size, learning_rate, seed=seed, begin=begin,
        resident=resident, settings=known | (settings or {}), weight_decay=weight_decay, name=name,
        learning_rate_scale=learning_rate_scale or {}, data=lambda: identify_data((given, validation_labels)),
    )  # fmt: skip


def count_right(
    model: nn.Module, take: Callable[[Tensor], Any], labels: Tensor, device: torch.device, batch_size: int
) -> int:
    """How many images a network in evaluation mode puts into the right class."""
    right, labels = torch.zeros((), dtype=torch.int64, device=device), labels.to(device)
    for indices in torch.arange(len(labels), device=device).split(batch_size):
        right += (_call("network", model, take(indices)).argmax(1) == labels[indices]).sum()
    return int(right)


def cosine_schedule(rate: float, epochs: int) -> Callable[[int], float]:
    """A learning rate that decreases from `rate` to nearly 0 along a cosine.

    Example:
        >>> [round(cosine_schedule(1.0, 4)(epoch), 2) for epoch in range(4)]
        [1.0, 0.85, 0.5, 0.15]
    """
    return lambda epoch: rate * (1 + math.cos(math.pi * epoch / epochs)) / 2


def as_floats(images: Tensor) -> Tensor:
    """Images as floating-point numbers; bytes from 0 to 255 become numbers from 0 to 1.

    Example:
        >>> as_floats(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """
    if not _is_bytes(images):
        return images
    # By a tensor on the device: with a number a GPU multiplies by 1/255, which has another last bit.
    return images.to(torch.get_default_dtype()) / torch.full((), 255.0, device=images.device)


# Inside ------------------------------------------------------------------------------------------------------------

# The holes of an epoch are drawn apart from its order.
_HOLES = 200_000


def _is_bytes(images: Tensor) -> bool:
    return isinstance(images, Tensor) and images.dtype == torch.uint8


def _fits(fabric: Fabric, *tensors: Tensor | None) -> bool:
    """Whether a GPU has room for the data, twice over."""
    if fabric.device.type != "cuda":
        return False
    needed = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor) and not t.is_cuda)
    return 2 * needed < torch.cuda.mem_get_info(fabric.device)[0]


def _taker(inputs: Inputs | None, device: torch.device, resident: bool) -> Callable[[Tensor], Any]:
    """From indices to the inputs of these images, on the device."""
    if callable(inputs):
        return inputs
    data = pytree.tree_map(lambda t: t.to(device) if resident and isinstance(t, Tensor) else t, inputs)

    def take(indices: Tensor) -> Any:
        def rows(t: Tensor | None) -> Tensor | None:
            return t if t is None else as_floats(t[indices.to(t.device)]).to(device)

        return pytree.tree_map(rows, data)

    return take


def _call(name: str, model: Callable[..., Any], batch: Any) -> Any:
    """What a module makes of a batch; torch's own words, where it fails, do not say of what."""
    try:
        return model(*batch) if isinstance(batch, tuple) else model(batch)
    except RuntimeError as error:
        # Out of memory, a broken device, a process that is gone; or a step that cannot be captured, and is launched.
        if type(error) is not RuntimeError or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            raise
        given = " and ".join(describe(each) for each in (batch if isinstance(batch, tuple) else (batch,)))
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ValueError(f"{name} must take what it is trained on, but it failed on {given}: {reason}") from error


def _identify_shape(shape: Callable[..., Tensor], fraction: float, images: Tensor) -> list[Any]:
    """The regions that are hidden: by the name of their function, and by a few that it draws."""
    like = "(batch, height, width, *, fraction, generator, device) -> bool (B, 1 or C, H, W), as misconv.missing.square"
    if not callable(shape):
        raise TypeError(f"shape must be a function {like}, got {describe(shape)}")
    size = (2, *images.shape[2:])
    try:
        drawn = shape(*size, fraction=fraction, generator=generator(0, "split"), device=torch.device("cpu"))
    except TypeError as error:
        raise TypeError(f"shape must be a function {like}, got {describe(shape)}: {error}") from error
    shapes = [(2, channels, *images.shape[2:]) for channels in (1, images.shape[1])]
    if not isinstance(drawn, Tensor) or drawn.dtype != torch.bool or tuple(drawn.shape) not in shapes:
        raise ValueError(f"shape must be a function {like}, got one that returns {describe(drawn)}")
    return [identify(shape), fingerprint(drawn)]


# Checks of arguments -------------------------------------------------------------------------------------------------


def check_share(name: str, share: float) -> None:
    """Of at least nothing, and never all."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ValueError(f"{name} must be a share of at least 0 and below 1, got {describe(share)}")


def check_count(name: str, value: int) -> None:
    """An integer of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {describe(value)}")


def check_incomplete(images: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Images, floating point or bytes, and what is observed of them as bool."""
    if not _is_bytes(images):
        check_images("images", images)
    elif images.dim() != 4 or 0 in images.shape:
        raise ValueError(f"images must have shape (N, C, H, W) with no empty dimension, got {describe(images)}")
    observed = check_observed("observed", observed, images, check=True)
    if not _is_bytes(images):
        check_seen_finite("images", images, observed, check=True)
    return images.detach(), observed


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check_labelled(prefix: str, inputs: Inputs, labels: Tensor) -> Tensor:
    """Labels that fit the inputs, as int64."""
    name = f"{prefix}labels"
    if not isinstance(labels, Tensor) or labels.dtype not in _INTEGERS or labels.dim() != 1 or labels.is_meta:
        raise TypeError(f"{name} must be a tensor (N,) of integers, got {describe(labels)}")
    if len(labels) == 0:
        raise ValueError(f"{name} must be one for each image, got none")
    if not callable(inputs):
        size = _check_inputs(f"{prefix}inputs", inputs)
        if len(labels) != size:
            raise ValueError(
                f"{name} must be one for each of the {size} images of {prefix}inputs, got {describe(labels)}"
            )
    if int(labels.min()) < 0:
        raise ValueError(f"{name} must be classes that count from 0, got {int(labels.min())}")
    return labels.long()


def _check_inputs(name: str, inputs: Inputs) -> int:
    """How many images there are."""
    parts: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else (inputs,)
    if not parts or not all(isinstance(part, Tensor | MFA) for part in parts):
        raise TypeError(f"{name} must be an MFA, a tensor or a tuple of tensors, got {describe(inputs)}")
    for part in parts:
        if isinstance(part, Tensor):
            check_dense(name, part)
    if any(part.device.type == "meta" for part in parts):
        raise ValueError(f"{name} must be on a device that holds values, got {' and '.join(map(describe, parts))}")
    sizes = {len(part) if isinstance(part, MFA) or part.dim() else 0 for part in parts}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"{name} must hold one row for each image, got {' and '.join(map(describe, parts))}")
    return sizes.pop()

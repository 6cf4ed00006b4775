"""The training of a classifier as a job for `misconv._train.engine`; and what all jobs need."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._checks import check_dense, check_seed, check_size, describe
from misconv._torch import pytree
from misconv._train.identity import fingerprint, identify_data
from misconv._train.images import as_floats, compact, fits
from misconv._train.loan import check_trainable
from misconv._train.running import Job, Rate
from misconv._train.session import EpochRecord
from misconv.mfa import MFA

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = [
    "Inputs",
    "call_model",
    "check_count",
    "check_share",
    "classifier_job",
    "cosine_schedule",
    "count_right",
]

Inputs = MFA | Tensor | tuple[Tensor, ...] | Callable[[Tensor], Any]


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
    resident = callable(inputs) or fits(fabric, *pytree.tree_leaves((inputs, validation_inputs)))
    take, take_held = (_taker(i, fabric.device, resident) for i in (inputs, validation_inputs))
    if resident:
        labels = labels.to(fabric.device)

    def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        mine = indices[fabric.global_rank :: fabric.world_size]
        output, truth = call_model("network", model, take(mine)), labels[mine].to(fabric.device)
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
        right += (call_model("network", model, take(indices)).argmax(1) == labels[indices]).sum()
    return int(right)


def cosine_schedule(rate: float, epochs: int) -> Callable[[int], float]:
    """A learning rate that decreases from `rate` to nearly 0 along a cosine.

    Example:
        >>> [round(cosine_schedule(1.0, 4)(epoch), 2) for epoch in range(4)]
        [1.0, 0.85, 0.5, 0.15]
    """
    return lambda epoch: rate * (1 + math.cos(math.pi * epoch / epochs)) / 2


# Inside ------------------------------------------------------------------------------------------------------------


def _taker(inputs: Inputs | None, device: torch.device, resident: bool) -> Callable[[Tensor], Any]:
    """From indices to the inputs of these images, on the device; integers are floating-point numbers there."""
    if callable(inputs):
        return inputs

    def stored(t: Any) -> Any:
        return compact(t.to(device) if resident else t) if isinstance(t, Tensor) else t

    data = pytree.tree_map(stored, inputs)

    def take(indices: Tensor) -> Any:
        def rows(t: Tensor | None) -> Tensor | None:
            return t if t is None else as_floats(t[indices.to(t.device)]).to(device)

        return pytree.tree_map(rows, data)

    return take


def call_model(name: str, model: Callable[..., Any], batch: Any) -> Any:
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


# Checks of arguments -------------------------------------------------------------------------------------------------


def check_share(name: str, share: float) -> None:
    """Of at least nothing, and never all."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ValueError(f"{name} must be a share of at least 0 and below 1, got {describe(share)}")


def check_count(name: str, value: int) -> None:
    """An integer of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {describe(value)}")


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

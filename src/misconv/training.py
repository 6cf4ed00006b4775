"""Training on Lightning Fabric: densities on incomplete images, classifiers on what a density says.

Devices, precision and processes are Fabric's arguments; the loop is that of `misconv._train.engine`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv._checks import check_seed, check_size, describe
from misconv._torch import pytree
from misconv._train import (
    Checkpoint,
    EpochRecord,
    Rate,
    as_floats,
    check_fabric,
    check_incomplete,
    check_place,
    check_trainable,
    classifier_job,
    density_job,
    gpu_of,
    identify_data,
    identify_module,
    on_first,
    one_device,
    progress_bar,
    train,
)
from misconv.density import SMFA
from misconv.mfa import MFA
from misconv.missing import square

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["fit_classifier", "fit_density"]


@torch.inference_mode(False)
@torch.enable_grad()
def fit_density(
    density: nn.Module,
    images: Tensor,
    observed: Tensor,
    *,
    epochs: int = 50,
    batch_size: int = 64,
    learning_rate: Rate = 1e-3,
    mse_epochs: int = 0,
    shape: Callable[..., Tensor] = square,
    fraction: float = 1 / 4,
    validation: float = 0.1,
    patience: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    fabric: Fabric | None = None,
    progress: bool = True,
) -> list[EpochRecord]:
    """Teach a density what missing pixels may be, from incomplete images alone.

    In every step a further region of what is seen is hidden, and the negative log-likelihood of the hidden pixels given
    the rest is minimised; pixels that were missing from the start are never read. The best parameters by the same
    measure on validation images are kept. An `SMFA` is fitted by EM to all images instead; it uses `epochs`, `seed`,
    `checkpoint`, `fabric` and `progress`, and ignores the arguments that are about gradients and validation.

    Wherever it is trained, the density comes back on the device, in the dtype and in the train or eval mode in which it
    came: call ``density.eval()`` before you use it. An error or an interruption leaves it with the best parameters so
    far, or as it came.

    Args:
        density: a module (x, observed) -> MFA; trained in place.
        images: (N, C, H, W); uint8 counts as 0 to 1. observed: bool (N, 1, H, W) or (N, C, H, W).
        epochs: passes over the images (for an `SMFA` the largest number of EM iterations).
        learning_rate: of Adam, a number or a function of the epoch, which counts from 0.
        mse_epochs: in this many first epochs the squared error of the mean is added.
        shape, fraction: the region that is hidden; see `misconv.missing.hide`.
        validation: the share of images set aside to measure on; 0 for none.
        patience: stop after this many epochs without a better validation.
        seed: of everything random.
        checkpoint: a file to continue from if it exists, and to write after every epoch. It is continued by the same
            training alone: the same density, images and settings, with as many `epochs` or more.
        fabric: devices, precision and processes; by default one device, a GPU if there is one. Several processes take
            batch statistics, like everything else, over the whole batch.
        progress: whether to show a progress bar.

    Returns:
        A record per epoch: `nll` and `mse` per hidden pixel, and `validation_nll` where images were set aside.

    Example:
        >>> import torch
        >>> from misconv import ConvDMFA
        >>> images, observed = torch.rand(32, 1, 8, 8), torch.rand(32, 1, 8, 8) > 0.25
        >>> density = ConvDMFA(1, rank=1, widths=(4,), depths=(1,))
        >>> history = fit_density(density, images, observed, epochs=2, progress=False)
        >>> len(history), sorted(history[0])
        (2, ['epoch', 'mse', 'nll', 'validation_nll'])
    """
    if not isinstance(density, nn.Module):
        raise TypeError(f"density must be a torch.nn.Module (x, observed) -> MFA, got {describe(density)}")
    if not isinstance(density, SMFA):
        check_trainable("density", density)
    epochs = check_size("epochs", epochs)
    fabric = _start(fabric, density, patience, checkpoint, progress, images)
    if isinstance(density, SMFA):
        return _fit_by_em(density, images, observed, epochs, seed, checkpoint, fabric, progress)
    job = density_job(
        density, images, observed, fabric, batch_size=batch_size, learning_rate=learning_rate, mse_epochs=mse_epochs,
        shape=shape, fraction=fraction, validation=validation, seed=seed,
    )  # fmt: skip
    (history,) = train(
        [job], fabric, epochs=epochs, patience=patience, checkpoint=checkpoint, progress=progress, title="density"
    )
    return history


@torch.inference_mode(False)
@torch.enable_grad()
def fit_classifier(
    network: nn.Module,
    inputs: MFA | Tensor | tuple[Tensor, ...],
    labels: Tensor,
    *,
    validation_inputs: MFA | Tensor | tuple[Tensor, ...] | None = None,
    validation_labels: Tensor | None = None,
    epochs: int = 20,
    batch_size: int = 64,
    learning_rate: Rate = 1e-3,
    patience: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    fabric: Fabric | None = None,
    progress: bool = True,
) -> list[EpochRecord]:
    """Train a classifier on images, or on what a density says of them; keep the epoch that is best on validation.

    Args:
        network: takes a batch of `inputs` (a tuple as several arguments) and returns logits; trained in place.
        inputs: an MFA of all training images, a tensor, or a tuple of tensors.
        labels: (N,), integers.
        validation_inputs, validation_labels: to choose the epoch by; the last one is taken where there are none.

    The other arguments are those of `fit_density`, and the network comes back as a density does. Of several processes
    each takes the statistics of a batch normalization over its own share, unless it is an `nn.SyncBatchNorm`.

    Returns:
        A record per epoch: `loss`, `accuracy` and, where there is validation, `validation_accuracy`.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> images, labels = torch.rand(30, 1, 4, 4), torch.randint(3, (30,))
        >>> len(fit_classifier(network, images, labels, epochs=2, progress=False))
        2
    """
    check_trainable("network", network)
    for name, given in (("inputs", inputs), ("validation_inputs", validation_inputs)):
        if callable(given):
            raise TypeError(f"{name} must be an MFA, a tensor or a tuple of tensors, got {describe(given)}")
    tensors = [t for t in pytree.tree_leaves((inputs, labels)) if isinstance(t, Tensor)]
    epochs = check_size("epochs", epochs)
    fabric = _start(fabric, network, patience, checkpoint, progress, *tensors)
    job = classifier_job(
        network, inputs, labels, fabric, validation_inputs=validation_inputs, validation_labels=validation_labels,
        batch_size=batch_size, learning_rate=learning_rate, seed=seed,
    )  # fmt: skip
    # Classifiers are trained in rows, with a table at the end; a density is one, and its figures are worth a line.
    (history,) = train(
        [job], fabric, epochs=epochs, patience=patience, checkpoint=checkpoint, progress=progress, title="classifier",
        transient=True,
    )  # fmt: skip
    return history


def _start(
    fabric: Fabric | None,
    module: nn.Module,
    patience: int | None,
    checkpoint: str | Path | None,
    progress: bool,
    *tensors: Tensor,
) -> Fabric:
    """Check what all trainings have in common; a Fabric on the GPU of the module or of its data, if there is one."""
    if patience is not None:
        check_size("patience", patience)
    if not isinstance(progress, bool):
        raise TypeError(f"progress must be True or False, got {describe(progress)}")
    if fabric is None:
        check_place(checkpoint)
        return one_device(gpu_of(module, *(t for t in tensors if isinstance(t, Tensor))))
    check_fabric(fabric)
    on_first(fabric, lambda: check_place(checkpoint))
    return fabric


def _fit_by_em(
    density: SMFA,
    images: Tensor,
    observed: Tensor,
    iterations: int,
    seed: int,
    checkpoint: str | Path | None,
    fabric: Fabric,
    progress: bool,
) -> list[EpochRecord]:
    """EM with a checkpoint after every iteration; several processes share the images out among them."""
    images, observed = check_incomplete(images, observed)
    seed = check_seed("seed", seed)
    rank, world = fabric.global_rank, fabric.world_size
    if len(images) < world:
        raise ValueError(f"images must be at least one for each of the {world} processes, got {describe(images)}")
    file = Checkpoint(checkpoint, fabric)
    settings: dict[str, Any] = {"task": "density", "seed": seed, "images": list(images.shape)}
    settings["module"] = identify_module(density)
    found = None
    if checkpoint is not None:
        settings["data"] = identify_data((images, observed))
        found = file.read(settings)
    home = images.device
    # In one piece each, so that all pieces together are the images in their order.
    images, observed = (t.tensor_split(world)[rank].to(fabric.device) for t in (as_floats(images), observed))
    with _returned(density, home):
        density.to(fabric.device)  # EM runs where the parameters are
        if found is None:
            density.begin(images, observed, seed=seed)
        else:
            _resume_em(density, images, file, *found, iterations)
        with progress_bar(progress and rank == 0, "SMFA", iterations, len(density.history)) as advance:
            for number, likelihood in density.passes(images, observed, iterations=iterations, seed=seed):
                if not math.isfinite(likelihood):
                    raise FloatingPointError(f"EM diverged in iteration {number}: its log-likelihood is not finite")
                if checkpoint is not None:
                    meta = {"settings": settings, "history": density.history, "floor": density.floor}
                    file.write(density.resumable(), meta)
                advance({"log-likelihood per image": likelihood})
    return [{"epoch": float(i), "log_likelihood": value} for i, value in enumerate(density.history)]


def _resume_em(
    density: SMFA, images: Tensor, file: Checkpoint, tensors: dict[str, Tensor], meta: dict[str, Any], iterations: int
) -> None:
    history, floor = meta.get("history"), meta.get("floor")
    numbers: list[Any] = [*history, floor] if isinstance(history, list) and history else [None]
    if not all(isinstance(number, float) and math.isfinite(number) for number in numbers):
        raise file.damaged("its numbers are not those of a training")
    if len(numbers) - 1 > iterations:
        raise ValueError(
            f"epochs must be at least {len(numbers) - 1}, which checkpoint {file.path} has done, got {iterations}"
        )
    try:
        density.resume(images, tensors, numbers[:-1], numbers[-1])
    except (KeyError, RuntimeError, ValueError) as error:
        raise file.damaged(f"its tensors do not fit the density: {str(error).splitlines()[0][:200]}") from error


@contextmanager
def _returned(density: SMFA, home: torch.device) -> Iterator[None]:
    """An SMFA goes back to where its tensors were, or `home`; after an error it is as EM left it, or as it came."""
    before, known = dict(density._buffers), dict(vars(density))
    history = density.history
    try:
        yield
    except BaseException:
        if density.history is history or not density.history:  # EM has not begun
            density._buffers.update(before)
            vars(density).update({name: known.get(name) for name in ("history", "floor", "_exact", "_units")})
        else:
            density._keep(density._working()[0])  # an interruption may have fallen between two of its tensors
        raise
    finally:
        place = next((t.device for t in before.values() if t is not None), home)
        density.to(place)
        for name, tensor in before.items():
            now = density._buffers[name]
            if tensor is not None and now is not None:
                density._buffers[name] = now.to(tensor.dtype)
        if density._exact is not None and density._units is not None:  # EM can go on there
            density._exact, density._units = density._exact.to(place), density._units.to(place)

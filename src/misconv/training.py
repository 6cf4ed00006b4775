"""Training on Lightning Fabric: densities on incomplete images, classifiers on what a density says.

Devices, precision and processes are Fabric's arguments; the loop is that of `misconv._engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from misconv import store
from misconv._checks import check_size
from misconv._engine import Rate, Record, train
from misconv._jobs import as_floats, classifier_job, density_job
from misconv._session import check_place, one_device, progress_bar, read
from misconv.density import SMFA
from misconv.mfa import MFA
from misconv.missing import square

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["fit_classifier", "fit_density"]


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
) -> list[Record]:
    """Teach a density what missing pixels may be, from incomplete images alone.

    In every step a further region of what is seen is hidden, and the negative log-likelihood of the hidden pixels given
    the rest is minimised; pixels that were missing from the start are never read. The best parameters by the same
    measure on validation images are kept. An `SMFA` is fitted by EM instead.

    Args:
        density: a module (x, observed) -> MFA; trained in place.
        images: (N, C, H, W); uint8 counts as 0 to 1. observed: bool (N, 1, H, W) or (N, C, H, W).
        epochs: passes over the images (for an `SMFA` at most so many EM iterations).
        learning_rate: of Adam, a number or a function of the epoch, which counts from 0.
        mse_epochs: in so many first epochs the squared error of the mean is added.
        shape, fraction: the region that is hidden; see `misconv.missing.hide`.
        validation: the share of images set aside to measure on; 0 for none.
        patience: stop after so many epochs without a better validation.
        seed: of everything random.
        checkpoint: a file to continue from if it exists, and to write after every epoch.
        fabric: devices, precision and processes; by default one device.
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
    check_place(checkpoint)
    fabric = fabric or one_device()
    job = density_job(
        density, images, observed, fabric, batch_size=batch_size, learning_rate=learning_rate, mse_epochs=mse_epochs,
        shape=shape, fraction=fraction, validation=validation, seed=seed,
    )  # fmt: skip
    check_size("epochs", epochs)
    if isinstance(density, SMFA):
        x = as_floats(images)
        return _fit_by_em(density, x, observed, epochs, seed, checkpoint, job.settings, fabric, progress)
    (history,) = train(
        [job], fabric, epochs=epochs, patience=patience, checkpoint=checkpoint, progress=progress, title="density"
    )
    return history


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
) -> list[Record]:
    """Train a classifier on images, or on what a density says of them; keep the epoch that is best on validation.

    Args:
        network: takes a batch of `inputs` (a tuple as several arguments) and returns logits; trained in place.
        inputs: an MFA of all training images, a tensor, or a tuple of tensors.
        labels: (N,), integers.
        validation_inputs, validation_labels: to choose the epoch by; the last one is taken where there are none.

    The other arguments are those of `fit_density`.

    Returns:
        A record per epoch: `loss`, `accuracy` and, where there is validation, `validation_accuracy`.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> images, labels = torch.rand(30, 1, 4, 4), torch.randint(3, (30,))
        >>> len(fit_classifier(network, images, labels, epochs=2, progress=False))
        2
    """
    check_place(checkpoint)
    check_size("epochs", epochs)
    fabric = fabric or one_device()
    job = classifier_job(
        network, inputs, labels, fabric, validation_inputs=validation_inputs, validation_labels=validation_labels,
        batch_size=batch_size, learning_rate=learning_rate, seed=seed,
    )  # fmt: skip
    # Classifiers are trained in rows, with a table at the end; a density is one, and its figures are worth a line.
    (history,) = train(
        [job], fabric, epochs=epochs, patience=patience, checkpoint=checkpoint, progress=progress, title="classifier",
        stays=False,
    )  # fmt: skip
    return history


def _fit_by_em(
    density: SMFA,
    images: Tensor,
    observed: Tensor,
    iterations: int,
    seed: int,
    checkpoint: str | Path | None,
    settings: dict[str, Any],
    fabric: Fabric,
    progress: bool,
) -> list[Record]:
    """EM with a checkpoint after every iteration; several processes share the images out among them."""
    rank, world = fabric.global_rank, fabric.world_size
    # In one piece each, so that all pieces together are the images in their order.
    images, observed = (t.tensor_split(world)[rank].to(fabric.device) for t in (images, observed))
    if checkpoint is not None and Path(checkpoint).exists():
        tensors, meta = read(checkpoint, settings)
        density.resume(images, tensors, meta["history"], meta["floor"])
    else:
        density.begin(images, observed, seed=seed)
    with progress_bar(progress and rank == 0, "SMFA", iterations, len(density.history)) as advance:
        while len(density.history) < iterations and (len(density.history) < 2 or density.gain() >= 1e-4):
            density.iterate(images, observed)
            if checkpoint is not None and rank == 0:
                meta = {"settings": settings, "history": density.history, "floor": density.floor}
                store.write(checkpoint, density.resumable(), meta)
            advance({"log-likelihood per image": density.history[-1]})
    return [{"epoch": float(i), "log_likelihood": value} for i, value in enumerate(density.history)]

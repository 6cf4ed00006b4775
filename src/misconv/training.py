"""Training on Lightning Fabric: densities on incomplete images, classifiers on what a density says.

Devices, precision and processes are Fabric's arguments; the loop is that of `misconv._train.engine`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from misconv._checks import check_seed, check_size, describe
from misconv._torch import pytree
from misconv._train import (
    Budget,
    Checkpoint,
    DensityTraining,
    EMImages,
    EpochRecord,
    History,
    Holes,
    Rate,
    StreamedImages,
    TensorImages,
    budget_of,
    check_count,
    check_density_arguments,
    check_fabric,
    check_incomplete,
    check_place,
    check_trainable,
    classifier_job,
    doubts,
    gpu_of,
    identify_module,
    images_for_em,
    is_stream,
    labelled_job,
    on_first,
    one_device,
    progress_bar,
    smallest_batch,
    stream_of,
    train,
    warm_up_cosine,
    warn_if_inverted,
)
from misconv.density import SMFA
from misconv.mfa import MFA
from misconv.missing import like

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["fit_classifier", "fit_density"]

# Adam, where no learning rate is given: needs no tuning.
_PEAK = 2e-3
_RECIPE: dict[str, Any] = {"schedule": warm_up_cosine(_PEAK), "betas": (0.9, 0.99), "clip": 1.0}
_ITERATIONS = 50  # of EM
_WRAPPED = 4  # frames from here to whoever called fit_density, through two decorators


@torch.inference_mode(False)
@torch.enable_grad()
def fit_density(
    density: nn.Module,
    images: Tensor | Dataset[Any] | Iterable[Any],
    observed: Tensor | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    batch_size: int = 64,
    workers: int = 0,
    learning_rate: Rate | None = None,
    objective: str = "joint+marginal+moments",
    mse_epochs: int = 0,
    shape: Callable[..., Tensor] | None = None,
    fraction: float = 1 / 4,
    augment: bool = False,
    validation: float = 0.1,
    patience: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    fabric: Fabric | None = None,
    progress: bool = True,
) -> History:
    """Teach a density what missing pixels may be, from incomplete images alone.

    In every step a further region of what is seen is hidden, and the negative log-likelihood of the hidden pixels given
    the rest is minimised; pixels that were missing from the start are never read. The parameters with the best
    likelihood of validation images are kept (by default, where the learning rate falls, the last ones that are as good
    as these within a standard error). An `SMFA` is fitted by EM to all images instead; it uses `epochs`, `seed`,
    `checkpoint`, `fabric` and `progress`, and ignores the arguments that are about gradients and validation.

    Images may be more than memory holds: of a Dataset or a DataLoader at most 2,000 and 32 MB are kept, for validation,
    and at most 4,096 and 48 MB are looked at beforehand, to measure the range of pixels and what regions are missing. A
    DataLoader is iterated as it is, and the first images that it yields are set aside for validation: they are left out
    wherever they come again. Several processes must be given the same one.

    Wherever it is trained, the density comes back on the device, in the dtype and in the train or eval mode in which it
    came: call ``density.eval()`` before you use it. An error or an interruption leaves it with the best parameters so
    far, or as it came. Where its mean predicts hidden pixels worse than the nearest pixel does, or its intervals hold
    ten points more or less of them than they should, a warning says so in the end.

    Args:
        density: a module (x, observed) -> MFA; trained in place.
        images: (N, C, H, W), a tensor or an array; integers keep their values. Or a map-style Dataset, or a DataLoader,
            that yields images with NaN where they are missing, pairs (x, observed), or dictionaries with "image" and,
            unless it has NaN, "observed"; labels and other keys are ignored.
        observed: bool (N, 1, H, W) or (N, C, H, W); None where missing pixels of `images` are NaN.
        epochs, steps, minutes: how long, one of them: passes over the images (for an `SMFA` the largest number of EM
            iterations), steps of Adam, or time. By default 100 epochs, but at least 300 steps and at most 2,000.
        workers: processes that read a Dataset.
        learning_rate: of Adam, a number or a function of the epoch, which counts from 0. By default it grows to 0.002
            at first and then falls to 0 along a cosine, over the whole training.
        objective: "joint+marginal+moments", the likelihood of all hidden pixels of an image together and of each by
            itself, and scores of their mean and variance alone; "joint+marginal"; "joint", as in the paper, which makes
            a density too uncertain; or "marginal". Why, says docs/maths.md.
        mse_epochs: in this many first epochs the squared error of the mean is added.
        shape, fraction: the region that is hidden; see `misconv.missing.hide`. By default it is one like those that
            are missing in the images, `misconv.missing.like`.
        augment: whether to mirror every second image, left to right, and to move all of them by up to an eighth of
            their size; for few images, if a mirrored one is as good as another.
        validation: the share of images set aside to measure on; 0 for none.
        patience: stop after this many records without a better validation.
        seed: of everything random.
        checkpoint: a file to continue from if it exists, and to write after every record. It is continued by the same
            training alone: the same density, images and settings. With a `learning_rate`, `epochs` may be more.
        fabric: devices, precision and processes; by default one device, a GPU if there is one. Several processes take
            batch statistics, like everything else, over the whole batch.
        progress: whether to show a progress bar.

    Returns:
        A record per epoch, and where `epochs` is not given one for every twentieth of the training too (fewer where
        judging it would take longer than learning): `nll` and `mse` per hidden pixel. Where images were set aside, also
        of these, as `validation_…`: `nll` and `marginal_nll`, `rmse` of the mean and `nearest_rmse` of nearest-pixel
        fill, `coverage_50` and `coverage_90`, the share of hidden pixels inside intervals that should hold 50 % and
        90 % of them. Its attribute `kept` is the number of the record whose parameters the density has in the end.

    Example:
        >>> import torch
        >>> from misconv import UNetDMFA
        >>> images = torch.rand(32, 1, 8, 8).masked_fill(torch.rand(32, 1, 8, 8) < 0.25, torch.nan)
        >>> density = UNetDMFA(1, rank=1, widths=(4, 4), depths=(1, 1))
        >>> history = fit_density(density, images, epochs=2, progress=False)
        >>> len(history), sorted(history[0])[:3]
        (2, ['epoch', 'mse', 'nll'])
    """
    if not isinstance(density, nn.Module):
        raise TypeError(f"density must be a torch.nn.Module (x, observed) -> MFA, got {describe(density)}")
    if not isinstance(density, SMFA):
        check_trainable("density", density)
    budget = budget_of(epochs, steps, minutes)
    fabric = _start(fabric, density, patience, checkpoint, progress, images)
    if isinstance(images, Iterator):
        raise TypeError(f"images must yield its batches anew in every epoch, as a DataLoader, got {describe(images)}")
    if is_stream(images) and observed is not None:
        raise TypeError(
            f"observed must be None where images is a Dataset or a DataLoader and yields it, got {describe(observed)}"
        )
    check_count("workers", workers)
    if isinstance(density, SMFA):
        data = images_for_em(images, observed, fabric, check_size("batch_size", batch_size), workers)
        home = images.device if isinstance(images, Tensor) else torch.device("cpu")
        return History(_fit_by_em(density, data, _iterations(budget), seed, home, checkpoint, fabric, progress))
    check_density_arguments(objective, mse_epochs, fraction, validation)
    if not isinstance(augment, bool):
        raise TypeError(f"augment must be True or False, got {describe(augment)}")
    seed, batch_size = check_seed("seed", seed), check_size("batch_size", batch_size)
    options: dict[str, Any] = {"validation": validation, "batch_size": batch_size, "seed": seed}
    source = _source(density, images, observed, fabric, workers, options)
    holes = Holes(like(source.regions()) if shape is None else shape, fraction, seed, augment)
    training = DensityTraining(density, source, holes, fabric, objective, mse_epochs)
    recipe = _RECIPE if learning_rate is None else {"clip": 5.0}
    rate = _PEAK if learning_rate is None else learning_rate
    job = training.job(learning_rate=rate, validation=validation, seed=seed, **recipe)
    budget = budget or _default_budget(source.steps)
    # A judged image costs about half as much as one that is learned from: at most a seventh of the time is for judging.
    budget.shortest = math.ceil(3 * source.held_size / batch_size)
    (history,) = train(
        [job], fabric, budget=budget, patience=patience, checkpoint=checkpoint,
        progress=progress, title="density",
    )  # fmt: skip
    if fabric.global_rank == 0 and source.held_size:
        doubt = doubts(history[history.kept], history[-1].get("step", math.inf))
        if doubt is not None:
            warnings.warn(doubt, stacklevel=_WRAPPED)
    return history


def _source(
    density: nn.Module, images: Any, observed: Tensor | None, fabric: Fabric, workers: int, options: dict[str, Any]
) -> TensorImages | StreamedImages:
    """The images to learn from, checked as far as they can be."""
    if not is_stream(images):
        images, observed = check_incomplete(images, observed)
        source: TensorImages | StreamedImages = TensorImages(images, observed, fabric, **options)
    else:
        least = smallest_batch(density, fabric.world_size, synchronize=True)
        source = stream_of(images, fabric, workers=workers, least=least, **options)
    if fabric.global_rank == 0:
        warn_if_inverted(source.some(), stacklevel=_WRAPPED + 1)
    return source


def _default_budget(steps: int | None) -> Budget:
    """Enough for a good density, and not for ever on few images, which would be learned by heart."""
    return Budget(steps=2000 if steps is None else min(max(100 * steps, 300), 2000))


def _iterations(budget: Budget | None) -> int:
    if budget is None:
        return _ITERATIONS
    if budget.epochs is None:
        name = "steps" if budget.steps is not None else "minutes"
        raise ValueError(f"{name} must not be given for an SMFA, which is fitted by EM; give epochs, its iterations")
    return budget.epochs


@torch.inference_mode(False)
@torch.enable_grad()
def fit_classifier(
    network: nn.Module,
    inputs: MFA | Tensor | tuple[Tensor, ...] | Dataset[Any],
    labels: Tensor | None = None,
    *,
    validation_inputs: MFA | Tensor | tuple[Tensor, ...] | Dataset[Any] | None = None,
    validation_labels: Tensor | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    batch_size: int = 64,
    workers: int = 0,
    learning_rate: Rate | None = 1e-3,
    augment: str | None = None,
    patience: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    fabric: Fabric | None = None,
    progress: bool = True,
) -> History:
    """Train a classifier on images, or on what a density says of them; keep the epoch that is best on validation.

    Args:
        network: takes a batch of `inputs` (a tuple as several arguments) and returns logits; trained in place.
        inputs: an MFA of all training images, a tensor, or a tuple of tensors. Or a map-style Dataset of pairs
            (x, label), which is read batch by batch: NaN-coded images and their classes, for a converted network.
            Integers become floating-point numbers of the same value.
        labels: (N,), integers; None where `inputs` is a Dataset.
        validation_inputs, validation_labels: to choose the epoch by; the last one is taken where there are none.
        epochs: how long, by default 20; where `inputs` is a Dataset also in `steps` or `minutes`.
        learning_rate: of Adam, a number or a function of the epoch. None, where `inputs` is a Dataset: it grows to
            0.001 at first and then falls to 0 along a cosine, over the whole training.
        augment: of a Dataset of images (C, H, W): "shift" moves each by up to an eighth of its size, "shift+mirror"
            mirrors every second one too; what comes in from outside is missing.

    The other arguments are those of `fit_density`, and the network comes back as a density does. Of several processes
    each takes the statistics of a batch normalization over its own share, unless it is an `nn.SyncBatchNorm`.

    Returns:
        A record per epoch: `loss`, `accuracy` and, where there is validation, `validation_accuracy`. Where `steps` or
        `minutes` are given, one for every twentieth of the training too.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> images, labels = torch.rand(30, 1, 4, 4), torch.randint(3, (30,))
        >>> len(fit_classifier(network, images, labels, epochs=2, progress=False))
        2
    """
    check_trainable("network", network)
    budget = budget_of(epochs, steps, minutes) or Budget(epochs=20)
    tensors = [t for t in pytree.tree_leaves((inputs, labels)) if isinstance(t, Tensor)]
    fabric = _start(fabric, network, patience, checkpoint, progress, *tensors)
    common: dict[str, Any] = {"batch_size": batch_size, "seed": seed}
    if isinstance(inputs, Dataset):
        if not isinstance(validation_inputs, Dataset | None) or labels is not None or validation_labels is not None:
            raise TypeError(
                "labels must be None where inputs is a Dataset, which yields them, as must validation_inputs"
            )
        check_count("workers", workers)
        common |= {} if learning_rate is not None else {"schedule": warm_up_cosine(1e-3), "clip": 1.0}
        rate = 1e-3 if learning_rate is None else learning_rate
        job = labelled_job(
            network, inputs, fabric, validation=validation_inputs, learning_rate=rate, workers=workers,
            augment=augment, **common,
        )  # fmt: skip
    else:
        if budget.epochs is None or learning_rate is None or augment is not None:
            raise ValueError("inputs must be a Dataset for steps, minutes, augment, or a learning_rate of None")
        _check_in_memory(inputs, labels, validation_inputs)
        job = classifier_job(
            network, inputs, cast(Tensor, labels), fabric, validation_inputs=cast(Any, validation_inputs),
            validation_labels=validation_labels, learning_rate=learning_rate, **common,
        )  # fmt: skip
    # Classifiers are trained in rows, with a table at the end; a density is one, and its figures are worth a line.
    (history,) = train(
        [job], fabric, budget=budget, patience=patience, checkpoint=checkpoint, progress=progress, title="classifier",
        transient=True,
    )  # fmt: skip
    return history


def _check_in_memory(inputs: object, labels: object, validation_inputs: object) -> None:
    """What is no Dataset; a function is no data, though a training of ours may have one inside."""
    for name, given in (("inputs", inputs), ("validation_inputs", validation_inputs)):
        if callable(given) or isinstance(given, Dataset):
            raise TypeError(f"{name} must be an MFA, a tensor or a tuple of tensors, got {describe(given)}")
    if labels is None:
        raise TypeError("labels must be a tensor (N,) of integers, got None")


def _start(
    fabric: Fabric | None,
    module: nn.Module,
    patience: int | None,
    checkpoint: str | Path | None,
    progress: bool,
    *tensors: object,
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
    images: EMImages,
    iterations: int,
    seed: int,
    home: torch.device,
    checkpoint: str | Path | None,
    fabric: Fabric,
    progress: bool,
) -> list[EpochRecord]:
    """EM with a checkpoint after every iteration; several processes share the images out among them."""
    seed = check_seed("seed", seed)
    file = Checkpoint(checkpoint, fabric)
    settings: dict[str, Any] = {"task": "density", "seed": seed, "images": images.shape}
    settings |= {"module": identify_module(density), "data": images.identity}
    found = file.read(settings)
    with _returned(density, home):
        density.to(fabric.device)  # EM runs where the parameters are
        if found is None:
            density.begin(images.x, images.observed, seed=seed)
        else:
            _resume_em(density, images.example, file, *found, iterations)
        with progress_bar(progress and fabric.global_rank == 0, "SMFA", iterations, len(density.history)) as advance:
            for number, likelihood in density.passes(images.x, images.observed, iterations=iterations, seed=seed):
                if not math.isfinite(likelihood):
                    raise FloatingPointError(f"EM diverged in iteration {number}: its log-likelihood is not finite")
                if checkpoint is not None:
                    meta = {"settings": settings, "history": density.history, "floor": density.floor}
                    file.write(density.resumable(), meta)
                advance({"log-likelihood per image": likelihood}, len(density.history))
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

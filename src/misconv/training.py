"""Training on Lightning Fabric: densities on incomplete images, classifiers on what a density says.

Devices, precision and processes are Fabric's arguments. All randomness of an epoch comes from the seed and the number
of the epoch, and a checkpoint is written whole or not at all after each, so a run that was killed and called again ends
with the same parameters as one that was not (bit for bit on a CPU).
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from misconv import store
from misconv._checks import check_fraction, check_images, check_observed, check_seen_finite, check_size, describe
from misconv.density import SMFA
from misconv.mfa import MFA
from misconv.missing import hide, square

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["fit_classifier", "fit_density"]

Record = dict[str, float]
Rate = float | Callable[[int], float]


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
        images: (N, C, H, W). observed: bool (N, 1, H, W) or (N, C, H, W).
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
        >>> from misconv import ConvDMFA
        >>> images, observed = torch.rand(32, 1, 8, 8), torch.rand(32, 1, 8, 8) > 0.25
        >>> density = ConvDMFA(1, rank=1, widths=(4,), depths=(1,))
        >>> history = fit_density(density, images, observed, epochs=2, progress=False)
        >>> len(history), sorted(history[0])
        (2, ['epoch', 'mse', 'nll', 'validation_nll'])
    """
    check_images("images", images)
    observed = check_observed("observed", observed, images)
    check_seen_finite("images", images, observed, check=True)
    check_size("epochs", epochs)
    check_size("batch_size", batch_size)
    check_fraction(fraction)
    if not 0 <= validation < 1:
        raise ValueError(f"validation must be a share of at least 0 and below 1, got {describe(validation)}")
    settings = {
        "task": "density",
        "density": type(density).__name__,
        "config": _config(density),
        "batch_size": batch_size,
        "mse_epochs": mse_epochs,
        "shape": getattr(shape, "__name__", repr(shape)),
        "fraction": fraction,
        "validation": validation,
        "seed": seed,
        "images": list(images.shape),
        "sum": float(images.where(observed, 0).sum(dtype=torch.float64)),
    }
    _check_place(checkpoint)
    if isinstance(density, SMFA):
        return _fit_by_em(density, images, observed, epochs, seed, checkpoint, settings, fabric, progress)

    order = torch.randperm(len(images), generator=_generator(seed, "split"), device="cpu")
    held, train = order.split([round(validation * len(images)), len(images) - round(validation * len(images))])
    if len(train) == 0:
        raise ValueError(f"images must hold more than the share set aside for validation, got {describe(images)}")
    fabric = fabric or _one_device()
    calibrate = getattr(density, "calibrate", None)
    if calibrate is not None:
        calibrate(images[train], observed[train])

    def losses(model: nn.Module, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over this process's share of a batch: −log p and squared error of what was hidden; how many pixels."""
        known = hide(observed[indices], shape, fraction=fraction, generator=generator)
        mine = slice(fabric.global_rank, None, fabric.world_size)
        x, seen, less = (t[mine].to(fabric.device) for t in (images[indices], observed[indices], known))
        target = (seen & ~less).expand(x.shape)
        p = model(x, less)
        error = (p.mean - x).where(target, 0).square().sum()
        return -p.log_prob(x, target).sum(), error, target.sum()

    def train_epoch(model: nn.Module, optimizer: Any, epoch: int) -> Record:
        generator = _generator(seed, epoch)
        shuffled = train[torch.randperm(len(train), generator=generator, device="cpu")]
        sums = torch.zeros(3, dtype=torch.float64)
        for indices in _batches(shuffled, batch_size, fabric.world_size):
            nll, error, count = losses(model, indices, generator)
            total = fabric.all_reduce(count.float(), reduce_op="sum")
            assert isinstance(total, Tensor)
            # Gradients are averaged over processes, but pixels are to be averaged over the whole batch.
            loss = nll + error if epoch < mse_epochs else nll
            optimizer.zero_grad()
            fabric.backward(loss * fabric.world_size / total.clamp_min(1))
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()
            sums += torch.stack([nll.detach().double(), error.detach().double(), count.double()]).cpu()
        nll_sum, error_sum, pixels = _reduce(fabric, sums)
        return {"nll": nll_sum / max(pixels, 1), "mse": error_sum / max(pixels, 1)}

    def evaluate(model: nn.Module) -> tuple[float, Record]:
        if len(held) == 0:
            return -math.inf, {}
        generator, sums = _generator(seed, "validation"), torch.zeros(2, dtype=torch.float64)
        for indices in _batches(held, batch_size, fabric.world_size):
            nll, _, count = losses(model, indices, generator)
            sums += torch.stack([nll.double(), count.double()]).cpu()
        nll_sum, pixels = _reduce(fabric, sums)
        mean = nll_sum / max(pixels, 1)
        return mean, {"validation_nll": mean}

    return _run(
        fabric, density, train_epoch, evaluate, epochs, learning_rate, patience, seed, checkpoint, settings, progress,
        title="density",
    )  # fmt: skip


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
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        >>> images, labels = torch.rand(30, 1, 4, 4), torch.randint(3, (30,))
        >>> len(fit_classifier(network, images, labels, epochs=2, progress=False))
        2
    """
    size = _count(inputs)
    _check_labels("labels", labels, size)
    if (validation_inputs is None) != (validation_labels is None):
        raise ValueError("validation_inputs and validation_labels must be given together, got one of them")
    if validation_inputs is not None and validation_labels is not None:
        _check_labels("validation_labels", validation_labels, _count(validation_inputs))
    check_size("epochs", epochs)
    check_size("batch_size", batch_size)
    _check_place(checkpoint)
    fabric = fabric or _one_device()
    settings = {
        "task": "classifier",
        "batch_size": batch_size,
        "seed": seed,
        "images": size,
        "labels": int((labels.long() * torch.arange(1, size + 1, device=labels.device)).sum() % 2**31),
    }

    def logits(model: nn.Module, data: MFA | Tensor | tuple[Tensor, ...], indices: Tensor) -> Tensor:
        batch = pytree.tree_map(lambda t: t if t is None else t[indices].to(fabric.device), data)
        result = model(*batch) if isinstance(batch, tuple) else model(batch)
        assert isinstance(result, Tensor)
        return result

    def train_epoch(model: nn.Module, optimizer: Any, epoch: int) -> Record:
        shuffled = torch.randperm(size, generator=_generator(seed, epoch), device="cpu")
        sums = torch.zeros(3, dtype=torch.float64)
        for indices in _batches(shuffled, batch_size, fabric.world_size):
            mine = indices[fabric.global_rank :: fabric.world_size]
            output, truth = logits(model, inputs, mine), labels[mine].to(fabric.device)
            loss = F.cross_entropy(output, truth, reduction="sum")
            optimizer.zero_grad()
            fabric.backward(loss * fabric.world_size / len(indices))
            optimizer.step()
            right = (output.argmax(1) == truth).sum()
            sums += torch.stack([loss.detach().double(), right.double(), right.new_tensor(len(mine)).double()]).cpu()
        loss_sum, right_sum, seen = _reduce(fabric, sums)
        return {"loss": loss_sum / seen, "accuracy": right_sum / seen}

    def evaluate(model: nn.Module) -> tuple[float, Record]:
        if validation_inputs is None or validation_labels is None:
            return -math.inf, {}
        accuracy = _accuracy(model, validation_inputs, validation_labels, logits, batch_size)
        return -accuracy, {"validation_accuracy": accuracy}

    return _run(
        fabric, network, train_epoch, evaluate, epochs, learning_rate, patience, seed, checkpoint, settings, progress,
        title="classifier",
    )  # fmt: skip


# One engine under both ---------------------------------------------------------------------------------------------


def _run(
    fabric: Fabric,
    module: nn.Module,
    train_epoch: Callable[[nn.Module, Any, int], Record],
    evaluate: Callable[[nn.Module], tuple[float, Record]],
    epochs: int,
    learning_rate: Rate,
    patience: int | None,
    seed: int,
    checkpoint: str | Path | None,
    settings: dict[str, Any],
    progress: bool,
    title: str,
) -> list[Record]:
    """Epochs with Adam, validation, the best parameters kept, early stop, checkpoints; leaves `module` in eval mode."""
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=_rate(learning_rate, 0)))
    history: list[Record] = []
    best_score, best_epoch, best = math.inf, -1, copy.deepcopy(module.state_dict())
    if checkpoint is not None and Path(checkpoint).exists():
        tensors, meta = _read(checkpoint, settings)
        module.load_state_dict(_under("model.", tensors))
        best = _under("best.", tensors)
        _load_optimizer(optimizer.optimizer, _under("optimizer.", tensors))
        history, best_score, best_epoch = meta["history"], meta["best_score"], meta["best_epoch"]
    # Classifiers are trained in rows, with a table at the end; a density is one, and its figures are worth a line.
    with _bar(progress and fabric.global_rank == 0, title, epochs, len(history), stays=title == "density") as advance:
        for epoch in range(len(history), epochs):
            if patience is not None and history and epoch - 1 - best_epoch >= patience:
                break
            for group in optimizer.param_groups:
                group["lr"] = _rate(learning_rate, epoch)
            model.train()
            with _seeded(seed, epoch, fabric.device):
                figures = train_epoch(model, optimizer, epoch)
            model.eval()
            with torch.no_grad():
                score, more = evaluate(model)
            history.append({"epoch": float(epoch), **figures, **more})
            if score < best_score or score == -math.inf:
                best_score, best_epoch, best = score, epoch, copy.deepcopy(module.state_dict())
            if checkpoint is not None and fabric.global_rank == 0:
                tensors = {f"model.{k}": v for k, v in module.state_dict().items()}
                tensors |= {f"best.{k}": v for k, v in best.items()}
                tensors |= {f"optimizer.{k}": v for k, v in _optimizer_tensors(optimizer.optimizer).items()}
                numbers = {"history": history, "best_score": best_score, "best_epoch": best_epoch}
                store.write(checkpoint, tensors, {"settings": settings, **numbers})
            advance(history[-1])
    module.load_state_dict(best)
    module.eval()
    return history


def _fit_by_em(
    density: SMFA,
    images: Tensor,
    observed: Tensor,
    iterations: int,
    seed: int,
    checkpoint: str | Path | None,
    settings: dict[str, Any],
    fabric: Fabric | None,
    progress: bool,
) -> list[Record]:
    """EM with a checkpoint after every iteration; several processes share the images out among them."""
    rank, world = (0, 1) if fabric is None else (fabric.global_rank, fabric.world_size)
    if fabric is not None:
        # In one piece each, so that all pieces together are the images in their order.
        images, observed = (t.tensor_split(world)[rank].to(fabric.device) for t in (images, observed))
    if checkpoint is not None and Path(checkpoint).exists():
        tensors, meta = _read(checkpoint, settings)
        density.resume(images, tensors, meta["history"], meta["floor"])
    else:
        density.begin(images, observed, seed=seed)
    with _bar(progress and rank == 0, "SMFA", iterations, len(density.history)) as advance:
        while len(density.history) < iterations and (len(density.history) < 2 or density.gain() >= 1e-4):
            density.iterate(images, observed)
            if checkpoint is not None and rank == 0:
                meta = {"settings": settings, "history": density.history, "floor": density.floor}
                store.write(checkpoint, density.resumable(), meta)
            advance({"log-likelihood per image": density.history[-1]})
    return [{"epoch": float(i), "log_likelihood": value} for i, value in enumerate(density.history)]


# Inside ------------------------------------------------------------------------------------------------------------


def _one_device() -> Fabric:
    try:
        from lightning_fabric import Fabric
    except ImportError as error:
        raise ImportError("training needs Lightning Fabric: pip install 'misconv[train]'") from error
    fabric = Fabric(accelerator="cuda" if torch.cuda.is_available() else "cpu", devices=1)
    fabric.launch()
    return fabric


def _generator(seed: int, purpose: int | str) -> torch.Generator:
    """Randomness of one epoch, or of one purpose, that depends on nothing that happened before."""
    number = {"split": 1, "validation": 2}[purpose] if isinstance(purpose, str) else 1000 + purpose
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


@contextmanager
def _seeded(seed: int, epoch: int, device: torch.device) -> Iterator[None]:
    """Global randomness (dropout) of an epoch, put back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed * 1_000_003 + 500_000 + epoch)
        yield


def _config(density: nn.Module) -> dict[str, Any] | None:
    """The arguments of the density, but for a shape that fitting may have set."""
    config = getattr(density, "config", None)
    return {k: v for k, v in config().items() if k != "shape"} if callable(config) else None


def _check_place(checkpoint: str | Path | None) -> None:
    """Say now, and not after the first epoch, that a checkpoint cannot be written."""
    if checkpoint is None:
        return
    folder = Path(checkpoint).resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"checkpoint must be in a folder that exists, got {checkpoint}; create {folder} first")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"checkpoint must be in a folder you may write to, got {checkpoint}")


def _rate(learning_rate: Rate, epoch: int) -> float:
    return float(learning_rate(epoch) if callable(learning_rate) else learning_rate)


def _reduce(fabric: Fabric, sums: Tensor) -> list[float]:
    total = fabric.all_reduce(sums, reduce_op="sum")
    assert isinstance(total, Tensor)
    return [float(value) for value in total]


def _count(inputs: MFA | Tensor | tuple[Tensor, ...]) -> int:
    return len(pytree.tree_leaves(inputs)[0])


def _check_labels(name: str, labels: Tensor, size: int) -> None:
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 1:
        raise TypeError(f"{name} must be a tensor (N,) of integers, got {describe(labels)}")
    if len(labels) != size:
        raise ValueError(f"{name} must be one for each of the {size} images, got {len(labels)}")


def _batches(indices: Tensor, batch_size: int, processes: int) -> Iterator[Tensor]:
    """Batches; a last one with fewer than two images a process joins the one before it, for BatchNorm's sake."""
    parts = list(indices.split(batch_size))
    if len(parts) > 1 and len(parts[-1]) < 2 * processes:
        parts[-2:] = [torch.cat(parts[-2:])]
    yield from parts


def _accuracy(model: nn.Module, inputs: Any, labels: Tensor, logits: Callable[..., Tensor], batch_size: int) -> float:
    right = 0
    for indices in torch.arange(len(labels)).split(4 * batch_size):
        right += int((logits(model, inputs, indices).argmax(1).cpu() == labels[indices].cpu()).sum())
    return right / len(labels)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state = optimizer.state_dict()
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state["state"].setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(state)


def _read(checkpoint: str | Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint of the same training; anything else is refused and left as it is."""
    tensors, meta = store.read(checkpoint)
    found = meta.get("settings")
    if not isinstance(found, dict):
        raise ValueError(f"checkpoint {checkpoint} must be one of a training, got another file of misconv")
    for name, value in settings.items():
        if found.get(name) != value:
            raise ValueError(
                f"checkpoint {checkpoint} must be of the same training, but its {name} is {found.get(name)!r} and not "
                f"{value!r}; give another file, or remove it to start anew"
            )
    return tensors, meta


@contextmanager
def _bar(show: bool, title: str, total: int, done: int, *, stays: bool = True) -> Iterator[Callable[[Record], None]]:
    """A progress bar with the figures of the last epoch beside it; yields what moves it on."""
    if not show:
        yield lambda record: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ImportError("progress bars need rich: pip install 'misconv[train]', or pass progress=False") from error
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[figures]}"), transient=not stays) as progress:
        task = progress.add_task(title, total=total, completed=done, figures="")

        def advance(record: Record) -> None:
            figures = "  ".join(f"{name} {value:.3g}" for name, value in record.items() if name != "epoch")
            figures = figures.replace("validation_", "val ").replace("accuracy", "acc")  # to fit into 80 columns
            progress.update(task, advance=1, figures=figures)

        yield advance

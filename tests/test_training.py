from __future__ import annotations

import functools
import math
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from misconv import (
    MFA,
    SMFA,
    ConvDMFA,
    MisConv2d,
    UNetDMFA,
    convert,
    data,
    fit_density,
    impute,
    missing,
    store,
    training,
)
from misconv.training import fit_classifier
from tests.processes import run, start


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


def images(count: int = 96) -> tuple[Tensor, Tensor]:
    x, _ = data.digits()
    return x[:count], missing.square(count, 8, 8, generator=torch.Generator().manual_seed(0), device=x.device)


def small(components: int = 1) -> ConvDMFA:
    torch.manual_seed(0)
    return ConvDMFA(1, components=components, rank=2, widths=(8,), depths=(1,))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


# Densities ---------------------------------------------------------------------------------------------------------


def test_it_learns_what_it_hides() -> None:
    x, observed = images(400)
    density = small()
    history = fit_density(density, x, observed, epochs=8, learning_rate=5e-3, progress=False)
    assert len(history) == 8
    assert history[-1]["nll"] < history[0]["nll"] - 0.1
    assert min(r["validation_nll"] for r in history) < history[0]["validation_nll"]


def test_the_best_epoch_is_kept() -> None:
    """Validation of the kept parameters is the best in the record, not the last."""
    x, observed = images(200)
    rates = [5e-3, 5e-3, 5e-3, 10.0, 10.0]  # the last epochs ruin it
    density = small()
    history = fit_density(density, x, observed, epochs=5, learning_rate=rates.__getitem__, progress=False)
    best = min(range(5), key=lambda e: history[e]["validation_nll"])
    assert best < 4
    twin = small()
    fit_density(twin, x, observed, epochs=best + 1, learning_rate=rates.__getitem__, progress=False)
    assert same(density, twin)


def test_early_stop() -> None:
    x, observed = images()
    history = fit_density(small(), x, observed, epochs=50, learning_rate=10.0, patience=2, progress=False)
    best = min(range(len(history)), key=lambda e: history[e]["validation_nll"])
    assert len(history) == best + 3 < 50


def test_warm_up_with_squared_error() -> None:
    x, observed = images()
    plain, warm = small(), small()
    fit_density(plain, x, observed, epochs=2, progress=False)
    fit_density(warm, x, observed, epochs=2, mse_epochs=1, progress=False)
    assert not same(plain, warm)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e20])
def test_what_was_missing_is_never_read(poison: float) -> None:
    x, observed = images()
    for make in (small, lambda: SMFA(2, 2)):
        clean, other = make(), make()
        fit_density(clean, x, observed, epochs=2, progress=False)
        fit_density(other, x.masked_fill(~observed, poison), observed, epochs=2, progress=False)
        assert same(clean, other)


def test_only_what_was_hidden_is_scored() -> None:
    """A density that knows the answer to every pixel it is shown, and is wildly wrong elsewhere, has not learned."""
    x, observed = images()
    calls: list[tuple[Tensor, Tensor]] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor, known: Tensor) -> MFA:
            calls.append((x, known))
            means = self.mean.expand(len(x), 1, 1, 8, 8)
            p = MFA(x.new_zeros(len(x), 1), means, x.new_zeros(len(x), 1, 0, 1, 8, 8), torch.ones_like(means))
            return p.fix(x, known)

    history = fit_density(Spy(), x, observed, epochs=1, learning_rate=0.0, validation=0, batch_size=96, progress=False)
    x, observed, batch, known = (t.cpu() for t in (x, observed, *calls[0]))
    order = [int((x == image).flatten(1).all(1).nonzero()[0]) for image in batch]
    target = observed[order] & ~known
    assert not (known & ~observed[order]).any()
    expected = 0.5 * batch[target].square().mean() + 0.5 * math.log(2 * math.pi)
    assert history[0]["nll"] == pytest.approx(float(expected), rel=1e-5)


def test_what_densities_learn_of_digits() -> None:
    """The mean of a network beats nearest-pixel fill by far; a mixture beats independent pixels in likelihood."""
    x, _ = data.digits()
    observed = missing.square(len(x), 8, 8, generator=torch.Generator().manual_seed(1), device=x.device)
    train, test = slice(0, 1400), slice(1400, None)
    known = missing.hide(observed[test], generator=torch.Generator().manual_seed(2))
    target = observed[test] & ~known
    torch.manual_seed(0)
    network = UNetDMFA(1, components=3, rank=4, widths=(16, 32, 32), depths=(1, 1, 1), patch=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # digits are mostly zeros, of which no interval holds just a half
        fit_density(network, x[train], observed[train], steps=150, batch_size=32, progress=False)
    p = network.eval()(x[test], known)
    errors = [(fill - x[test])[target].square().mean().sqrt() for fill in (p.mean, impute.nearest(x[test], known))]
    assert errors[0] < 0.8 * errors[1]
    assert p.weights.mean(0).min() > 0.02  # all components are in use
    results = [SMFA(*size).fit(x[train], observed[train])(x[test], known) for size in ((10, 4), (1, 0))]
    nll = [float(-q.log_prob(x[test], target).sum() / target.sum()) for q in results]
    assert nll[0] < nll[1]


# Interrupted runs --------------------------------------------------------------------------------------------------


def train(folder: Path, result: str, resumable: bool, ready: Connection) -> None:
    """A network, then a mixture, in a process of their own that tells when each of them begins."""
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    x, observed = images(160)
    network, mixture = small(), SMFA(3, 2)
    for name, density, epochs in (("network", network, 6), ("em", mixture, 8)):
        ready.send(name)
        checkpoint = folder / f"run-{name}" if resumable else None
        fit_density(density, x, observed, epochs=epochs, progress=False, checkpoint=checkpoint)
    torch.save({"network": network.state_dict(), "em": mixture.state_dict()}, folder / result)


def test_a_killed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """SIGKILL in the training of the network, then in that of the mixture (tests/fuzz has more)."""
    begun, ready = Pipe(duplex=False)
    generator = random.Random(0)
    for last, longest in (("network", 0.35), ("em", 0.08)):
        process = start(train, tmp_path, "resumed.pt", True, ready)
        while begun.recv() != last:
            pass
        time.sleep(generator.uniform(0, longest))
        process.kill()
        process.join()
        for path in tmp_path.glob("run-*"):  # whatever is visible is whole
            store.read(path)
    for result, resumable in (("resumed.pt", True), ("straight.pt", False)):
        process = start(train, tmp_path, result, resumable, ready)
        process.join(120)
        assert process.exitcode == 0
    straight, resumed = (torch.load(tmp_path / name) for name in ("straight.pt", "resumed.pt"))
    for kind, tensors in straight.items():
        assert tensors.keys() == resumed[kind].keys()
        for name, value in tensors.items():
            assert torch.equal(value, resumed[kind][name]), f"{kind}: {name}"


def test_every_epoch_can_be_the_last_before_a_crash(tmp_path: Path) -> None:
    """In one process: an error after any epoch, then the same call again."""
    x, observed = images()
    straight = small()
    history = fit_density(straight, x, observed, epochs=4, learning_rate=1e-3, progress=False)

    class Crash(Exception):
        pass

    for crash in range(1, 4):
        path = tmp_path / f"{crash}.safetensors"

        def rate(epoch: int, crash: int = crash) -> float:
            if epoch == crash:
                raise Crash
            return 1e-3

        with pytest.raises(Crash):
            fit_density(small(), x, observed, epochs=4, learning_rate=rate, checkpoint=path, progress=False)
        again = small()
        record = fit_density(again, x, observed, epochs=4, learning_rate=1e-3, checkpoint=path, progress=False)
        assert same(again, straight)
        assert record == history
        # A finished run is not run again.
        done = small()
        before = path.read_bytes()
        options = {"epochs": 4, "learning_rate": 1e-3, "checkpoint": path, "progress": False}
        assert fit_density(done, x, observed, **options) == history
        assert same(done, straight)
        assert path.read_bytes() == before


def test_a_checkpoint_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    x, observed = images()
    path = tmp_path / "run.safetensors"
    fit_density(small(), x, observed, epochs=2, checkpoint=path, progress=False)
    before = path.read_bytes()
    with pytest.raises(
        ValueError,
        match="checkpoint .*run.safetensors must be of the same training, but its seed is 0 and not 1; give another file",
    ):
        fit_density(small(), x, observed, epochs=2, seed=1, checkpoint=path, progress=False)
    with pytest.raises(ValueError, match="but its module.rank is 2 and not 1; give"):
        fit_density(
            ConvDMFA(1, rank=1, widths=(8,), depths=(1,)), x, observed, epochs=2, checkpoint=path, progress=False
        )
    with pytest.raises(ValueError, match="but its module.class is 'ConvDMFA' and not 'SMFA'"):
        fit_density(SMFA(2, 1), x, observed, epochs=2, checkpoint=path, progress=False)
    with pytest.raises(ValueError, match="but its data is"):
        fit_density(small(), x / 2, observed, epochs=2, checkpoint=path, progress=False)
    assert path.read_bytes() == before
    store.save(small(), path)
    with pytest.raises(ValueError, match="must be one of a training, got another file of misconv"):
        fit_density(small(), x, observed, epochs=2, checkpoint=path, progress=False)
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(ValueError, match="run.safetensors"):
        fit_density(small(), x, observed, epochs=2, checkpoint=path, progress=False)


def test_em_goes_on_whatever_is_said_of_other_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on none of these arguments, and no training with gradients is prepared only to be thrown away."""
    x, observed = images()
    path = tmp_path / "run.safetensors"

    def never(*arguments: Any, **more: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(training, "DensityTraining", never)
    straight, stopped = SMFA(2, 1), SMFA(2, 1)
    expected = fit_density(straight, x, observed, epochs=4, progress=False)
    fit_density(stopped, x, observed, epochs=2, checkpoint=path, progress=False)
    others: dict[str, Any] = {
        "batch_size": 7, "learning_rate": 0.5, "mse_epochs": 2, "shape": missing.noise, "fraction": 0.5,
        "validation": 0.3, "patience": 1,
    }  # fmt: skip
    resumed = SMFA(2, 1)
    assert fit_density(resumed, x, observed, epochs=4, checkpoint=path, progress=False, **others) == expected
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)


def test_em_is_the_same_by_either_way() -> None:
    """`SMFA.fit` and `fit_density` iterate, stop and end alike."""
    x, observed = images()
    one, other = SMFA(3, 1), SMFA(3, 1)
    history = fit_density(other, x, observed, epochs=30, progress=False)
    one.fit(x, observed, iterations=30)
    assert [record["log_likelihood"] for record in history] == one.history
    assert 1 < len(one.history) < 30  # it stopped by itself
    for name, value in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


class Own(nn.Module):
    """A density of one's own, whose activation is no module."""

    def __init__(self, activation: Callable[[Tensor], Tensor], scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.activation, self.scale = small(), activation, scale
        self.extra = nn.Linear(1, 1)

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        p = self.inner(x, observed)
        assert isinstance(p, MFA)
        return MFA(p.logits, p.means + 0 * self.activation(p.means), p.factors, p.noise, p.observed, check=False)


def with_activation(activation: nn.Module) -> ConvDMFA:
    density = small()
    density.features[1] = activation
    return density


OTHERS: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module], dict[str, Any], dict[str, Any], str]] = [
    (small, lambda: with_activation(nn.GELU()), {}, {}, "its module.features.1.class is 'ReLU' and not 'GELU'"),
    (lambda: with_activation(nn.LeakyReLU(0.1)), lambda: with_activation(nn.LeakyReLU(0.2)), {}, {}, "its module.features.1.negative_slope is 0.1 and not 0.2"),
    (lambda: Own(torch.tanh), lambda: Own(torch.sin), {}, {}, "its module.activation is 'tanh' and not 'sin'"),
    (lambda: Own(torch.tanh), lambda: Own(torch.tanh, 2.0), {}, {}, "its module.scale is 1.0 and not 2.0"),
    (small, lambda: frozen(), {}, {}, "its module.frozen is of length 0"),
    (small, small, {}, {"learning_rate": 2e-3}, "its learning_rate in epoch 1 is 0.001 and not 0.002"),
    (small, small, {"learning_rate": [1e-3, 5e-4].__getitem__}, {"learning_rate": [1e-3, 1e-4, 1e-5].__getitem__}, "its learning_rate in epoch 2 is 0.0005 and not 0.0001"),
    (small, small, {}, {"batch_size": 32}, "its batch_size is 43 and not 32"),
    (small, small, {}, {"mse_epochs": 1}, "its mse_epochs is 0 and not 1"),
    (small, small, {}, {"fraction": 0.3}, "its shape.1 is|its fraction is 0.25 and not 0.3"),
    (small, small, {}, {"shape": missing.noise}, "its shape.0 is 'square' and not 'noise'"),
    (small, small, {"shape": functools.partial(missing.stripes)}, {"shape": functools.partial(missing.free_form)}, "its shape.0.0 is 'stripes' and not 'free_form'"),
    (small, small, {}, {"validation": 0.2}, "its validation is 0.1 and not 0.2"),
    (small, small, {}, {"patience": 3}, "its patience is None and not 3"),
    (lambda: SMFA(2, 1), lambda: SMFA(2, 1), {}, {"seed": 1}, "its seed is 0 and not 1"),
    (lambda: SMFA(2, 1), lambda: SMFA(2, 2), {}, {}, "its module.rank is 1 and not 2"),
]  # fmt: skip


def frozen() -> ConvDMFA:
    density = small()
    density.means.requires_grad_(False)
    return density


@pytest.mark.parametrize(("first", "second", "before", "now", "message"), OTHERS, ids=[case[-1] for case in OTHERS])
def test_another_training_does_not_go_on_from_it(
    first: Callable[[], nn.Module], second: Callable[[], nn.Module], before: dict[str, Any], now: dict[str, Any],
    message: str, tmp_path: Path,
) -> None:  # fmt: skip
    """All tensors have the same shapes. It says what differs, in two lines at most, and nothing is changed."""
    x, observed = images(48)
    path = tmp_path / "run.safetensors"
    before = {"learning_rate": 1e-3, "shape": missing.square, **before}
    fit_density(first(), x, observed, epochs=2, checkpoint=path, progress=False, **before)
    content, density = path.read_bytes(), second()
    start = {name: value.clone() for name, value in density.state_dict().items()}
    with pytest.raises(ValueError, match=f"checkpoint .* must be of the same training, but ({message})") as caught:
        fit_density(density, x, observed, epochs=3, checkpoint=path, progress=False, **{**before, **now})
    assert len(str(caught.value)) < 400
    assert path.read_bytes() == content
    assert all(torch.equal(value, start[name]) for name, value in density.state_dict().items())
    # The same one does.
    assert len(fit_density(first(), x, observed, epochs=2, checkpoint=path, progress=False, **before)) == 2


@pytest.mark.parametrize("kind", ["network", "em"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_a_checkpoint_does_not_read_what_is_missing(kind: str, poison: float, tmp_path: Path) -> None:
    x, observed = images(48)

    def make() -> nn.Module:
        return small() if kind == "network" else SMFA(2, 1)

    straight = make()
    options: dict[str, Any] = {"learning_rate": 1e-3, "progress": False}
    fit_density(straight, x, observed, epochs=3, **options)
    fit_density(make(), x, observed, epochs=2, checkpoint=tmp_path / "run", **options)
    again = make()
    fit_density(again, x.masked_fill(~observed, poison), observed, epochs=3, checkpoint=tmp_path / "run", **options)
    assert same(again, straight)


@pytest.mark.parametrize("kind", ["network", "em"])
def test_fewer_epochs_than_were_done_are_refused(kind: str, tmp_path: Path) -> None:
    x, observed = images(48)
    for epochs in (3, 2):
        density = small() if kind == "network" else SMFA(2, 1, prior=0)  # EM with a prior ends before
        if epochs == 3:
            fit_density(density, x, observed, epochs=3, learning_rate=1e-3, checkpoint=tmp_path / "run", progress=False)
    before = (tmp_path / "run").read_bytes()
    with pytest.raises(ValueError, match="epochs must be at least 3, which checkpoint .*run has done, got 2"):
        fit_density(density, x, observed, epochs=2, learning_rate=1e-3, checkpoint=tmp_path / "run", progress=False)
    assert (tmp_path / "run").read_bytes() == before


@pytest.mark.parametrize("kind", ["network", "em"])
def test_a_checkpoint_that_is_not_whole_is_refused(kind: str, tmp_path: Path) -> None:
    """A tensor less, one more, or another in its place; numbers that are none. Nothing is filled in."""
    x, observed = images(48)
    path = tmp_path / "run"

    def fit() -> nn.Module:
        density = small() if kind == "network" else SMFA(2, 1)
        fit_density(density, x, observed, epochs=3, learning_rate=1e-3, checkpoint=path, progress=False)
        return density

    done = small() if kind == "network" else SMFA(2, 1)
    fit_density(done, x, observed, epochs=2, learning_rate=1e-3, checkpoint=path, progress=False)
    tensors, meta = store.read(path)
    damaged: list[tuple[dict[str, Tensor], dict[str, Any]]] = []
    for name, tensor in list(tensors.items())[::3]:
        rest = {key: value for key, value in tensors.items() if key != name}
        damaged += [(rest, meta), (rest | {name: tensor.reshape(1, *tensor.shape)}, meta)]
    name, tensor = next((n, t) for n, t in tensors.items() if t.is_floating_point())
    damaged += [(tensors | {"more": tensor}, meta), (tensors | {name: tensor.half()}, meta)]
    kinds = {key: value for key, value in meta["tensors"].items() if key != name}
    damaged.append(({key: value for key, value in tensors.items() if key != name}, {**meta, "tensors": kinds}))
    for bad in (None, 3, "x", [], [1], {}, [{}], [None]):
        for key in ("jobs", "seconds", "history", "floor"):
            if key in meta and not (key == "seconds" and bad == 3):
                damaged.append((tensors, {**meta, key: bad}))
    if kind == "network":
        for key in ("history", "rates", "place", "best_score", "best_epoch"):
            damaged += [(tensors, {**meta, "jobs": [{**meta["jobs"][0], key: bad}]}) for bad in (None, "x", [], [[]])]
    for number, (some, numbers) in enumerate(damaged):
        store.write(path, some, numbers)
        content = path.read_bytes()
        with pytest.raises(ValueError, match="checkpoint .*run must be (whole|of the same training)") as caught:
            fit()
        assert len(str(caught.value).splitlines()) == 1, number
        assert path.read_bytes() == content
    for bad in (None, "x", []):
        store.write(path, tensors, {**meta, "settings": bad})
        with pytest.raises(ValueError, match="checkpoint .* must be one of a training, got another file of misconv"):
            fit()
    store.write(path, tensors, meta)
    fit()


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    x, observed = images(48)
    path = tmp_path / "run"
    fit_density(small(), x, observed, epochs=1, checkpoint=path, progress=False)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[20] ^= 255
    for content in (b"", b"mine", whole[:-1], whole[:100], bytes(flipped), b"\x80\x04junk"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot load .*run") as caught:
            fit_density(small(), x, observed, epochs=2, checkpoint=path, progress=False)
        assert len(str(caught.value).splitlines()) == 1
        assert path.read_bytes() == content


def test_two_trainings_do_not_share_a_file(tmp_path: Path) -> None:
    """The one that finds the other's checkpoint in its place says so, and leaves it."""
    x, observed = images(48)
    path = tmp_path / "run"

    def rate(epoch: int) -> float:
        if epoch == 1:
            fit_density(small(), x, observed, epochs=1, seed=1, checkpoint=tmp_path / "other", progress=False)
            (tmp_path / "other").replace(path)
        return 1e-3

    with pytest.raises(
        FileExistsError, match="checkpoint .*run must belong to one training, but another one has written"
    ):
        fit_density(small(), x, observed, epochs=3, learning_rate=rate, checkpoint=path, progress=False)
    assert store.read(path)[1]["settings"]["seed"] == 1
    # A file that somebody has removed is written again.
    other = tmp_path / "removed"

    def remove(epoch: int) -> float:
        other.unlink(missing_ok=True)
        return 1e-3

    fit_density(small(), x, observed, epochs=3, learning_rate=remove, checkpoint=other, progress=False)
    assert other.exists()


def test_a_classifier_is_trained_around_its_frozen_density() -> None:
    """Bit for bit, batch statistics included; with `train_density` it learns too."""
    x, observed = images(64)
    labels = torch.arange(64, device=x.device) % 3
    for trained in (False, True):
        network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        net = convert(network, small().train(), train_density=trained)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        fit_classifier(net, (x, observed), labels, epochs=2, progress=False)
        after = net.state_dict()
        moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert {"network.0.weight", "network.1.running_mean"} <= moved
        assert any(name.startswith("density.") for name in moved) == trained
        assert net.density is not None
        assert net.density.training == trained


def test_a_checkpoint_of_a_classifier_belongs_to_its_inputs(tmp_path: Path) -> None:
    x, _ = images()
    labels = torch.arange(len(x)) % 2
    path = tmp_path / "run.safetensors"

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 2))

    fit_classifier(network(), x, labels, epochs=1, checkpoint=path, progress=False)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="but its data is .* and not .*; give another file"):
        fit_classifier(network(), -x, labels, epochs=2, checkpoint=path, progress=False)
    assert path.read_bytes() == before
    assert len(fit_classifier(network(), x, labels, epochs=2, checkpoint=path, progress=False)) == 2


def test_an_unwritable_checkpoint_says_so(tmp_path: Path) -> None:
    x, observed = images()
    for density in (small(), SMFA(2, 1)):
        with pytest.raises(
            FileNotFoundError, match="checkpoint must be in a folder that exists, got .*nowhere/run; create"
        ):
            fit_density(density, x, observed, epochs=1, checkpoint=tmp_path / "nowhere" / "run", progress=False)
        with pytest.raises(IsADirectoryError, match="checkpoint must be a file, got .*, which is a folder or a device"):
            fit_density(density, x, observed, epochs=1, checkpoint=tmp_path, progress=False)
        with pytest.raises(
            OSError, match="checkpoint must be in a folder you may write to, got .*: File name too long"
        ):
            fit_density(density, x, observed, epochs=1, checkpoint=tmp_path / ("x" * 300), progress=False)
        for bad in ("", "a\0b"):
            with pytest.raises(ValueError, match="checkpoint must be the name of a file, got"):
                fit_density(density, x, observed, epochs=1, checkpoint=bad, progress=False)
        for wrong in (3, b"x", True, ["x"]):
            with pytest.raises(TypeError, match="checkpoint must be a path or None, got"):
                fit_density(density, x, observed, epochs=1, checkpoint=wrong, progress=False)  # type: ignore[arg-type]


def fit_on_a_full_disk(checkpoint: Path) -> str:
    """What is said of it in a process that may not write another byte."""
    import resource  # POSIX's

    def rate(epoch: int) -> float:
        raise AssertionError("it was begun")

    x = torch.rand(4, 1, 8, 8)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        fit_density(small(), x, x > 0.2, learning_rate=rate, checkpoint=checkpoint, progress=False)
    except OSError as error:
        return str(error)
    return "nothing"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of a process are POSIX's")
def test_a_full_disk_is_noticed_before_the_work(tmp_path: Path) -> None:
    said = run(fit_on_a_full_disk, tmp_path / "run")
    assert "checkpoint must be in a folder you may write to, got" in said
    assert "File too large" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.filterwarnings("ignore::UserWarning:lightning_fabric")
def test_precision_is_an_argument_of_fabric(precision: str) -> None:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    x, observed = images()
    history = fit_density(small(), x, observed, epochs=2, fabric=fabric, progress=False)
    assert all(math.isfinite(value) for record in history for value in record.values())


# Classifiers -------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = MisConv2d(1, 8, 3)
        self.rest = nn.Sequential(nn.BatchNorm2d(8), nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 10))

    def forward(self, p: MFA) -> Tensor:
        out: Tensor = self.rest(self.first(p))
        return out


def test_a_classifier_learns_from_densities_and_resumes(tmp_path: Path) -> None:
    x, labels = data.digits()
    x, labels = x[:600], labels[:600]
    observed = missing.square(600, 8, 8, generator=torch.Generator().manual_seed(0), device=x.device)
    with torch.no_grad():
        p = SMFA(3, 2).fit(x, observed, iterations=10)(x, observed)
    arguments = {
        "validation_inputs": p[500:], "validation_labels": labels[500:], "batch_size": 50, "progress": False, "learning_rate": 3e-3,
    }  # fmt: skip
    straight = Classifier()
    history = fit_classifier(straight, p[:500], labels[:500], epochs=8, **arguments)
    assert max(r["validation_accuracy"] for r in history) > 0.6
    path = tmp_path / "c"
    fit_classifier(Classifier(), p[:500], labels[:500], epochs=3, checkpoint=path, **arguments)
    resumed = Classifier()
    assert fit_classifier(resumed, p[:500], labels[:500], epochs=8, checkpoint=path, **arguments) == history
    assert same(resumed, straight)


def test_a_last_batch_of_one_is_no_trouble() -> None:
    x, labels = data.digits()
    fit_classifier(Classifier(), MFA.point(x[:33]), labels[:33], epochs=1, batch_size=16, progress=False)


def test_progress_bars_show_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    x, observed = images()
    (record,) = fit_density(small(), x, observed, epochs=1)
    shown = capsys.readouterr().out
    for name in ("nll", "rmse", "nearest_rmse"):
        assert f"{name.removesuffix('_rmse')} {record[f'validation_{name}']:.3g}" in shown
    half, most = (100 * record[f"validation_coverage_{level}"] for level in (50, 90))
    assert f"in 50/90%: {half:.0f}/{most:.0f}" in shown


def test_global_randomness_is_left_alone() -> None:
    x, observed = images()
    density = small()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fit_density(density, x, observed, epochs=1, progress=False)
    assert torch.equal(torch.get_rng_state(), before)


ODD: list[Any] = [
    None, True, False, 0, -1, 2, 1.5, -0.5, math.nan, math.inf, -math.inf, 2**70, -(2**70), 10**400, 1j, "3", "", b"x", [], [1], (1, 2), {},
    object(), np.float32(0.5), np.ones(3), np.int64(2), torch.tensor(1), torch.zeros(2, 2), nn.ReLU(), int, lambda: 0, lambda *a, **k: None,
]  # fmt: skip


def odd_call(call: Callable[[], Any], name: str, value: object) -> None:
    """It works, or a short message names the argument; never an error of torch or Python itself."""
    caught: Exception | None = None
    try:
        call()
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        caught = error
    if caught is not None:
        lines = str(caught).splitlines()
        assert len(lines) <= 2, caught
        assert name in lines[0], (value, caught)
        assert " must " in lines[0] or isinstance(caught, FloatingPointError), (value, caught)


@pytest.mark.parametrize(
    "name",
    ["density", "images", "observed", "epochs", "steps", "minutes", "batch_size", "workers", "learning_rate", "objective", "mse_epochs",
     "shape", "fraction", "augment", "validation", "patience", "seed", "checkpoint", "fabric", "progress"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["network", "em"])
def test_odd_arguments_of_fit_density(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, observed = images(6)
    for value in ODD:
        density = small() if kind == "network" else SMFA(1, 1)
        arguments = {
            "density": density,
            "images": x,
            "observed": observed | True,
            "epochs": 1,
            "progress": False,
            name: value,
        }
        if name in ("epochs", "steps", "minutes"):
            if value is None or (isinstance(value, int | float | np.number) and value > (name != "minutes") + 0):
                continue  # for long
            arguments["epochs"] = value if name == "epochs" else None
        odd_call(lambda arguments=arguments: fit_density(**arguments), name, value)


@pytest.mark.parametrize(
    "name",
    ["network", "inputs", "labels", "validation_inputs", "validation_labels", "epochs", "batch_size", "learning_rate", "patience",
     "seed", "checkpoint", "fabric", "progress"],
)  # fmt: skip
def test_odd_arguments_of_fit_classifier(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, _ = images(6)
    labels = torch.arange(6) % 2
    for value in ODD:
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        arguments = {
            "network": network, "inputs": x, "labels": labels, "validation_inputs": x, "validation_labels": labels, "epochs": 1,
            "progress": False, name: value,
        }  # fmt: skip
        if name == "epochs" and isinstance(value, int) and value > 2:
            continue
        odd_call(lambda arguments=arguments: fit_classifier(**arguments), name, value)


IMAGES = torch.rand(6, 1, 8, 8, device="cpu")


@pytest.mark.parametrize(
    ("images", "observed", "message"),
    [
        (IMAGES[0], IMAGES > 0, "images must have shape"), (IMAGES[:0], IMAGES[:0] > 0, "images must have shape"),
        (IMAGES > 0, IMAGES > 0, "images must be a floating-point"), (IMAGES, IMAGES[:, :, :4] > 0, "observed must have shape"),
        (IMAGES, IMAGES, "observed must be bool, or hold only 0"), (IMAGES * torch.nan, IMAGES > -1, "images must be finite wherever"),
        (IMAGES, IMAGES > 2, "observed must show every channel somewhere"), (IMAGES.byte()[0], IMAGES > 0, "images must have shape"),
        (IMAGES.to(torch.complex64), IMAGES > 0, "images must be a floating-point"), (IMAGES.expand(6, 2, 8, 8), IMAGES > 0, "density must take what it is trained on|x must have the 1 channels of this density"),
    ],
)  # fmt: skip
def test_odd_tensors(images: Tensor, observed: Tensor, message: str) -> None:
    density = small()
    start = {name: value.clone() for name, value in density.state_dict().items()}
    with pytest.raises((ValueError, TypeError), match=message):
        fit_density(density, images, observed, epochs=1, progress=False)
    assert all(torch.equal(value, start[name]) for name, value in density.state_dict().items())


def test_odd_data_that_can_be_learned_from() -> None:
    """One image; two; images of which nothing is seen among others; batches of one; holes of NaN; nothing held back."""
    for count, options in (
        (1, {}),
        (1, {"validation": 0}),
        (2, {"batch_size": 1}),
        (3, {"batch_size": 2, "validation": 0.5}),
    ):
        x, observed = images(count)
        history = fit_density(small(), x, observed, epochs=2, progress=False, **options)  # type: ignore[arg-type]
        assert all(math.isfinite(value) for record in history for value in record.values())
    x, observed = images(20)
    observed[3:11] = False
    for batch_size in (1, 4, 64, 2**62):
        history = fit_density(
            small(), x.masked_fill(~observed, math.nan), observed, epochs=2, batch_size=batch_size, progress=False
        )
        assert all(math.isfinite(value) for record in history for value in record.values())


def test_odd_networks() -> None:
    x, observed = images(8)
    labels = torch.arange(8) % 4

    def network(out: int, **options: Any) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, out, **options))

    with pytest.raises(
        ValueError,
        match=r"network must return logits \(B, classes\) of at least 4 classes, .* got a float32 tensor of shape \(8, 3\)",
    ):
        fit_classifier(network(3), x, labels, progress=False)
    with pytest.raises(ValueError, match="labels must be classes that count from 0, got -100"):
        fit_classifier(network(4), x, labels - 100, progress=False)
    with pytest.raises(TypeError, match=r"labels must be a tensor \(N,\) of integers, got a bool"):
        fit_classifier(network(4), x, labels > 1, progress=False)
    with pytest.raises(
        ValueError,
        match="network must take what it is trained on, but it failed on a float64 tensor of shape .*: .*dtype",
    ):
        fit_classifier(network(4), x.double(), labels, progress=False)
    with pytest.raises(
        ValueError, match=r"inputs must hold one row for each image, got .* \(8, 1, 8, 8\) .* and .* \(3, 1, 8, 8\)"
    ):
        fit_classifier(network(4), (x, observed[:3]), labels, progress=False)
    with pytest.raises(TypeError, match="density must return a misconv.MFA of images .*, got a float32 tensor"):
        fit_density(Fake(), x, observed, progress=False)
    assert len(fit_classifier(network(4), x, labels.to(torch.uint8), epochs=1, progress=False)) == 1


class Fake(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, observed: Tensor) -> Tensor:
        return x * self.weight


def test_bad_arguments() -> None:
    x, observed = images()
    with pytest.raises(TypeError, match="images must be a floating-point image, got a bool tensor"):
        fit_density(small(), x > 0, observed)
    with pytest.raises(ValueError, match=r"observed must have shape \(96, 1, 8, 8\) to fit the images, got"):
        fit_density(small(), x, observed[:5])
    with pytest.raises(ValueError, match="images must be finite wherever it is observed"):
        fit_density(small(), x * math.nan, observed)
    with pytest.raises(ValueError, match="fraction must lie strictly between 0 and 1, got 1.0"):
        fit_density(small(), x, observed, fraction=1.0)
    with pytest.raises(ValueError, match="validation must be a share of at least 0 and below 1, got 1.0"):
        fit_density(small(), x, observed, validation=1.0)
    with pytest.raises(ValueError, match="epochs must be an integer of at least 1, got 0"):
        fit_density(small(), x, observed, epochs=0)
    with pytest.raises(ValueError, match="x must have the 3 channels of this density"):
        fit_density(ConvDMFA(3), x, observed, progress=False)
    with pytest.raises(
        ValueError,
        match="labels must be one for each of the 96 images of inputs, got a int64 tensor of shape \\(95,\\)",
    ):
        fit_classifier(Classifier(), x, torch.zeros(95, dtype=torch.long))
    with pytest.raises(TypeError, match=r"labels must be a tensor \(N,\) of integers, got"):
        fit_classifier(Classifier(), x, torch.zeros(96))
    with pytest.raises(ValueError, match="validation_inputs and validation_labels must be given together"):
        fit_classifier(Classifier(), x, torch.zeros(96, dtype=torch.long), validation_inputs=x)

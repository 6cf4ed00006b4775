"""`fit_density` on the data that people have: Datasets and DataLoaders, for steps or minutes, and what is wrong with them."""

from __future__ import annotations

import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from misconv import MFA, SMFA, ConvDMFA, UNetDMFA, data, fit_density, missing, store
from misconv._checks import warn_if_inverted
from misconv._train import budget as _budget
from misconv._train import cpu_by_default, one_device, scores, streams
from misconv._train import moves as moves_of
from tests.processes import run, start


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def _on_a_cpu() -> Iterator[None]:
    """Where the test looks at every image that a density gets, or compares bits that only a CPU promises."""
    with cpu_by_default():
        yield


def digits(count: int = 96) -> tuple[Tensor, Tensor]:
    x, _ = data.digits()
    return x[:count], missing.square(count, 8, 8, generator=torch.Generator().manual_seed(0), device=x.device)


def coded(count: int = 96) -> Tensor:
    x, observed = digits(count)
    return x.masked_fill(~observed, math.nan).cpu()


def small(seed: int = 0) -> UNetDMFA:
    torch.manual_seed(seed)
    return UNetDMFA(1, rank=1, widths=(4, 4), depths=(1, 1))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


class Items(Dataset[Any]):
    """Images one by one, in a form of its own; `at` may do what real data do to one."""

    def __init__(
        self,
        form: Callable[[Tensor], Any] = lambda x: x,
        count: int = 96,
        at: dict[int, Callable[[], Any]] | None = None,
    ) -> None:
        self.x, self.form, self.at = coded(count), form, at or {}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.at[index]() if index in self.at else self.form(self.x[index])


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "NaN": lambda x: x, "numpy": lambda x: x.numpy(), "alone": lambda x: (x,), "label": lambda x: (x, 7), "pair": lambda x: (x.nan_to_num(5.0), ~x.isnan()),
    "triple": lambda x: (x.nan_to_num(5.0), ~x.isnan(), 7), "numbers": lambda x: (x, (~x.isnan()).float()), "image": lambda x: {"image": x, "label": 7},
    "both": lambda x: {"observed": ~x.isnan(), "image": x, "name": "x"},
}  # fmt: skip

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 32, "progress": False}


# What is learned from ----------------------------------------------------------------------------------------------


def test_forms_of_data_are_the_same_data() -> None:
    """Items of every form teach the same; so do their batches by a loader."""
    straight, options = small(), QUICK | {"epochs": 1}
    history = fit_density(straight, Items(count=48), **options)
    first = fit_density(small(), DataLoader(Items(count=48), 32), **options)
    for name, form in FORMS.items():
        density = small()
        assert fit_density(density, Items(form, 48), **options) == history, name
        assert same(density, straight), name
        assert fit_density(small(), DataLoader(Items(form, 48), 32), **options) == first, name


@pytest.mark.usefixtures("_on_a_cpu")
def test_tensors_may_have_nan_for_what_is_missing() -> None:
    x, observed = digits()
    pair, alone, quick = small(), small(), QUICK | {"fabric": one_device("cpu")}
    history = fit_density(pair, x, observed, **quick)
    assert fit_density(alone, x.masked_fill(~observed, math.nan), **quick) == history
    assert same(pair, alone)
    arrays = small()
    assert fit_density(arrays, np.ma.masked_array(x, ~observed), **quick) == history
    fit_density(SMFA(2, 1), x.masked_fill(~observed, math.nan), epochs=2, progress=False)


@pytest.mark.usefixtures("_on_a_cpu")
def test_a_dataset_is_split_measured_and_judged_as_a_tensor_is() -> None:
    """Without learning, where regions of single batches do not matter, all figures on validation are equal."""
    x, observed = digits()
    tensor, dataset = small(), small()
    options = QUICK | {"epochs": 1, "learning_rate": 0.0, "shape": missing.square, "fabric": one_device("cpu")}
    by_tensor = fit_density(tensor, x.cpu(), observed.cpu(), **options)[0]
    by_dataset = fit_density(dataset, Items(), **options)[0]
    assert same(tensor, dataset)
    for name in by_tensor:
        if name.startswith("validation_"):
            assert by_tensor[name] == by_dataset[name], name


def test_it_learns_from_a_stream() -> None:
    history = fit_density(small(), Items(count=400), steps=60, batch_size=32, progress=False)
    assert history[-1]["validation_nll"] < history[0]["validation_nll"]
    assert history[-1]["validation_rmse"] < history[-1]["validation_nearest_rmse"]


@pytest.mark.usefixtures("_on_a_cpu")
def test_images_set_aside_are_never_learned_from() -> None:
    """Of a Dataset by their numbers; of a loader that shuffles by what they are."""
    for source in (Items(), DataLoader(Items(), 16, shuffle=True), DataLoader(Items(), 16), DataLoader(Items(), 60)):
        seen: dict[bool, set[bytes]] = {True: set(), False: set()}
        density = small()
        forward = density.forward

        def spy(x: Tensor, known: Tensor, forward: Any = forward, seen: Any = seen, density: Any = density) -> MFA:
            seen[density.training] |= {image.numpy().tobytes() for image in x.detach()}
            found: MFA = forward(x, known)
            return found

        density.forward = spy  # type: ignore[method-assign]
        fit_density(density, source, epochs=3, batch_size=16, validation=0.2, progress=False, fabric=one_device("cpu"))
        assert not seen[True] & seen[False]
        assert len(seen[False]) == round(
            0.2 * (96 if isinstance(source, Items) else len(source) * (source.batch_size or 0))
        )
        assert len(seen[True] | seen[False]) == 96


def test_a_stream_keeps_few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_HELD", 5)
    monkeypatch.setattr(streams, "MOST_SAMPLED", 20)
    for source in (Items(), DataLoader(Items(), 16)):
        found = streams.stream_of(
            source, fake_fabric(), validation=0.5, batch_size=16, seed=0, workers=0, least=2
        )  # fmt: skip
        assert found.held_size == 5
        assert len(found.sample()[0]) == (20 if isinstance(source, Items) else 15)
        assert found.sampled is None
    monkeypatch.setattr(streams, "HELD_BYTES", 3 * 64 * 4)
    monkeypatch.setattr(streams, "SAMPLED_BYTES", 7 * 64 * 4)
    for source in (Items(), DataLoader(Items(), 16)):
        found = streams.stream_of(
            source, fake_fabric(), validation=0.5, batch_size=16, seed=0, workers=0, least=2
        )  # fmt: skip
        assert found.held_size == 3
        assert len(found.sample()[0]) == (7 if isinstance(source, Items) else 4)


def fake_fabric() -> Any:
    return one_device("cpu")


def test_workers_read_the_same() -> None:
    alone, helped = small(), small()
    history = fit_density(alone, Items(), **QUICK)
    assert fit_density(helped, Items(), workers=1, **QUICK) == history
    assert same(alone, helped)


class Endless(IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        yield from coded(self.count)


def test_streams_of_unknown_length() -> None:
    for source in (Endless(70), DataLoader(Endless(70), 16), [coded(70)[:32], coded(70)[32:]]):
        history = fit_density(small(), source, steps=30, batch_size=16, progress=False)
        assert history[-1]["step"] == 30
        assert all(math.isfinite(value) for record in history for value in record.values())
    assert len(fit_density(small(), DataLoader(Endless(70), 16), epochs=3, progress=False)) == 3


def test_global_randomness_is_left_alone() -> None:
    for source in (Items(), DataLoader(Items(), 16, shuffle=True)):
        density = small()
        before = torch.get_rng_state()
        fit_density(density, source, **QUICK)
        assert torch.equal(torch.get_rng_state(), before)


def test_em_on_a_stream(tmp_path: Path) -> None:
    """As on tensors, up to the order of sums; and an interrupted run goes on."""
    straight, options = SMFA(2, 1), {"epochs": 4, "progress": False}
    expected = fit_density(straight, coded().double(), **options)
    for number, source in enumerate((Items(lambda x: x.double()), DataLoader(Items(lambda x: (x.double(), 7)), 20))):
        density = SMFA(2, 1)
        history = fit_density(density, source, **options)
        for mine, theirs in zip(history, expected, strict=True):
            assert mine["log_likelihood"] == pytest.approx(theirs["log_likelihood"], rel=1e-6)
        path, again = tmp_path / str(number), SMFA(2, 1)
        fit_density(SMFA(2, 1), source, epochs=2, progress=False, checkpoint=path)
        assert fit_density(again, source, **options, checkpoint=path) == history
        assert same(again, density)


# How long ----------------------------------------------------------------------------------------------------------


def test_steps_are_counted() -> None:
    """One record for an epoch, or for a twentieth of the steps where that is less; three batches to judge one."""
    for source in (digits(48), (Items(count=48),)):
        short = fit_density(small(), *source, steps=5, batch_size=22, progress=False)  # epochs of 2 steps
        assert [record["step"] for record in short] == [1, 2, 3, 4, 5]
        assert [record["epoch"] for record in short] == [0, 0, 1, 1, 2]
        parts = fit_density(small(), *source, steps=22, batch_size=5, progress=False)  # epochs of 9 steps
        assert [record["step"] for record in parts] == [3, 6, 9, 12, 15, 18, 21, 22]
    long = fit_density(small(), *digits(48), steps=41, batch_size=22, progress=False)
    assert [record["step"] for record in long] == [*range(2, 41, 2), 41]


def test_a_budget_that_is_over_before_it_begins_has_one_round() -> None:
    history = fit_density(small(), *digits(), minutes=1e-6, batch_size=32, progress=False)
    assert len(history) == 1
    assert history.kept == 0


def test_minutes_end_in_time() -> None:
    most = 60  # on a GPU kernels are compiled before the first step is over, and other work may be in the way
    for source in (digits(), (DataLoader(Items(), 32),)):
        start = time.monotonic()
        history = fit_density(small(), *source, minutes=1.2 / 60, batch_size=32, progress=False)
        assert 0.9 < time.monotonic() - start < most
        assert len(history) >= 2


def test_how_long_is_said_once() -> None:
    with pytest.raises(ValueError, match="epochs, steps and minutes must not be given together, got steps and minutes"):
        fit_density(small(), *digits(), steps=3, minutes=1)
    with pytest.raises(ValueError, match="steps must not be given for an SMFA, which is fitted by EM; give epochs"):
        fit_density(SMFA(1, 1), *digits(), steps=3)
    with pytest.raises(ValueError, match="minutes must be a finite number above 0, got -1"):
        fit_density(small(), *digits(), minutes=-1)


def test_the_default_is_enough_and_ends() -> None:
    from misconv.training import _default_budget

    assert [_default_budget(steps).steps for steps in (1, 9, 30, None)] == [300, 900, 2000, 2000]


def test_the_learning_rate_grows_and_falls() -> None:
    rate = _budget.warm_up_cosine(2e-3)
    rates = [rate(share / 100) for share in range(101)]
    assert max(rates) == rates[3] == pytest.approx(2e-3)
    assert rates[0] == pytest.approx(2e-4)
    assert rates[100] < 1e-9
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_the_share_of_a_budget() -> None:
    place = _budget.Place(epoch=2, position=3, taken=11)
    assert _budget.Budget(epochs=4).share(place, 4) == (2 + 3.5 / 4) / 4
    assert _budget.Budget(epochs=4).share(place, None) == 2.5 / 4
    assert _budget.Budget(steps=23).share(place, 4) == 0.5
    timed = _budget.Budget(minutes=1)
    assert timed.next_round(_budget.Place(), 0.0) == 4
    assert timed.next_round(_budget.Place(taken=4), 2.0) == 6  # half a second each, and 3 s for a round
    assert timed.share(_budget.Place(taken=5), None) == pytest.approx((2 + 1.5 * 0.5) / 60)
    assert timed.next_round(_budget.Place(taken=10), 59.0) == 1
    assert timed.next_round(_budget.Place(taken=11), 60.0) == 0


def test_no_round_is_shorter_than_what_judging_it_takes() -> None:
    """A round is a twentieth of the steps, or more; the last one has what is left."""
    budget = _budget.Budget(steps=100, shortest=30)
    assert [budget.next_round(_budget.Place(taken=taken), 0.0) for taken in (0, 30, 90, 100)] == [30, 30, 10, 0]
    timed = _budget.Budget(minutes=1, shortest=20)
    assert timed.next_round(_budget.Place(), 0.0) == 4
    assert timed.next_round(_budget.Place(taken=4), 2.0) == 16  # not yet all of them: the first steps are slow
    assert timed.next_round(_budget.Place(taken=20), 10.0) == 20
    x = torch.rand(400, 1, 8, 8)
    history = fit_density(small(), x, torch.rand(400, 1, 8, 8) > 0.3, steps=20, batch_size=8, progress=False)
    assert len(history) == 2  # 40 images are set aside, five batches


# Interrupted runs --------------------------------------------------------------------------------------------------


class Crash(Exception):
    pass


def crash() -> Any:
    raise Crash


class Failing(Items):
    """Fails when it has been asked for so many images."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        return crash() if self.left < 0 else super().__getitem__(index)


class Noisy(Items):
    """Augmented in ways that torch's generator draws."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + torch.rand(())


class NoisyFailing(Noisy, Failing):
    pass


@pytest.mark.parametrize("kind", ["dataset", "loader"])
@pytest.mark.parametrize("noisy", [False, True])
def test_a_run_that_fails_can_be_called_again(kind: str, noisy: bool, tmp_path: Path) -> None:
    """In the middle of an epoch too, and at its end: bit for bit where an uninterrupted run ends."""

    def source(calls: int) -> Any:
        made = (NoisyFailing if noisy else Failing)(calls)
        return made if kind == "dataset" else DataLoader(made, 16, shuffle=True)

    def density() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Dropping(small()))[0]

    options = {"steps": 18, "batch_size": 16, "progress": False, "validation": 0.0 if noisy else 0.1}
    straight = density()
    history = fit_density(straight, source(10**9), **options)
    beforehand = 1 + 86 + 10 if kind == "dataset" else 96
    for number, more in enumerate((4 * 16, 8 * 16 + 3)):
        path = tmp_path / str(number)
        with pytest.raises(Crash):
            fit_density(density(), source(beforehand + more), checkpoint=path, **options)
        assert path.exists()
        again = density()
        assert fit_density(again, source(10**9), checkpoint=path, **options) == history
        assert same(again, straight)


class Dropping(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.drop = inner, nn.Dropout(0.1)

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        found: MFA = self.inner(self.drop(x), observed)
        return found


class Counted(Dataset[Tensor]):
    """Images that tell of every 200th time that one of them is asked for."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.x, self.asked, self.tell = coded(160), 0, tell

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        if self.asked % 200 == 0:
            self.tell(self.asked)
        return self.x[index]


def fit_counted(checkpoint: Path | None, tell: Callable[[int], None]) -> UNetDMFA:
    torch.set_num_threads(1)
    density = small()
    fit_density(density, Counted(tell), steps=60, batch_size=16, progress=False, checkpoint=checkpoint)
    return density


def fit_and_tell(checkpoint: Path, ready: Connection) -> None:
    fit_counted(checkpoint, ready.send)


@pytest.mark.usefixtures("_on_a_cpu")
def test_a_run_that_is_killed_can_be_called_again(tmp_path: Path) -> None:
    """SIGKILL in the middle of an epoch."""
    path = tmp_path / "run"
    asked, ready = Pipe(duplex=False)
    process = start(fit_and_tell, path, ready)
    assert [asked.recv() for _ in range(3)] == [200, 400, 600]
    process.kill()
    process.join()
    assert 0 < len(store.read(path)[1]["jobs"][0]["history"]) < 20
    assert same(*(fit_counted(checkpoint, lambda asked: None) for checkpoint in (path, None)))


def test_another_stream_or_budget_does_not_go_on_from_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    fit_density(small(), Items(), steps=4, progress=False, checkpoint=path)
    content = path.read_bytes()
    for source, options, message in (
        (Items(count=90), {}, "its images.0 is 96 and not 90"), (Items(), {"steps": 5}, "its steps is 4 and not 5"),
        (Items(lambda x: x / 2), {}, "its data is"), (DataLoader(Items(), 64), {}, "its images is of length 4 and not 3|its batch_size|it has no batches"),
        (Items(), {"steps": None, "epochs": 4}, "its epochs is None and not 4"), (Items(), {"learning_rate": 1e-3}, "its clip is 1.0 and not 5.0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"checkpoint .*run must be of the same training, but ({message})"):
            fit_density(small(), source, **{"steps": 4, "progress": False, "checkpoint": path, **options})
        assert path.read_bytes() == content


# What is hidden ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_regions_are_like_the_missing_ones(stream: bool) -> None:
    """Where whole rows are missing, whole rows are hidden; a function that is given is asked instead."""
    x, _ = digits()
    observed = missing.stripes(96, 8, 8, bands=1, generator=torch.Generator().manual_seed(0)).cpu()
    x = x.cpu().masked_fill(~observed, math.nan)
    hidden: list[Tensor] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: Tensor, known: Tensor) -> MFA:
            hidden.append(known)
            found: MFA = self.inner(x, known)
            return found

    fit_density(Spy(), TensorDataset(x) if stream else x, **QUICK)
    for known in hidden:
        assert (known.all(3) | ~known.any(3)).all()
        assert (known.sum() < 0.72 * known.numel()).all()
    hidden.clear()
    fit_density(Spy(), TensorDataset(x) if stream else x, **QUICK, shape=missing.noise, fraction=0.5)
    assert not all((known.all(3) | ~known.any(3)).all() for known in hidden)


def test_moved_images() -> None:
    """Against torch's own flip and roll; what has left is neither seen nor shown."""
    x = torch.arange(1.0, 2 * 3 * 4 * 5 + 1).view(2, 3, 4, 5).cpu()
    moves = torch.tensor([[0, 1, -2], [1, 0, 1]], device="cpu")
    moved, seen = moves_of.apply_moves(moves, x, torch.ones(2, 1, 4, 5, dtype=torch.bool, device="cpu"))
    first, second = x[0].roll((1, -2), (1, 2)), x[1].flip(2).roll(1, 2)
    first[:, :1], first[:, :, -2:], second[:, :, :1] = 0, 0, 0
    assert torch.equal(moved, torch.stack([first, second]))
    assert torch.equal(seen.expand(2, 3, 4, 5), moved > 0)
    drawn = moves_of.draw_moves(500, 16, 24, seed=0)
    assert [sorted(set(column.tolist())) for column in drawn.T] == [[0, 1], [*range(-2, 3)], [*range(-3, 4)]]


@pytest.mark.usefixtures("_on_a_cpu")
@pytest.mark.parametrize("stream", [False, True])
def test_augmented_images_are_new_ones(stream: bool, tmp_path: Path) -> None:
    """In every epoch others; validation has the images as they are; a stopped run goes on."""
    seen: dict[bool, list[bytes]] = {True: [], False: []}

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: Tensor, known: Tensor) -> MFA:
            seen[self.training] += [image.numpy().tobytes() for image in x.detach()]
            assert not (known & x.isnan()).any()
            found: MFA = self.inner(x, known)
            return found

    x = coded().nan_to_num(0.5)
    source = TensorDataset(x) if stream else x
    straight = Spy()
    cpu = one_device("cpu")  # a GPU repeats a captured step, which the spy does not see
    history = fit_density(straight, source, **QUICK, augment=True, fabric=cpu)
    assert len(set(seen[True])) > 150
    assert set(seen[False]) <= {image.numpy().tobytes() for image in x}
    again, options = Spy(), {"batch_size": 32, "progress": False, "augment": True, "learning_rate": 1e-3}
    options["fabric"] = cpu
    straight = Spy()
    history = fit_density(straight, source, epochs=2, **options)
    fit_density(Spy(), source, epochs=1, checkpoint=tmp_path / "run", **options)
    assert fit_density(again, source, epochs=2, checkpoint=tmp_path / "run", **options) == history
    assert same(again, straight)


# Figures -----------------------------------------------------------------------------------------------------------


class Normal(nn.Module):
    """Two components of any mean, and variances 4 and 1, half of it a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        spread = x.new_tensor([2.0, 0.5]).view(1, 2, 1, 1, 1).expand(len(x), 2, *x.shape[1:])
        means = self.mean + x.new_tensor([0.0, 1.0]).view(1, 2, 1, 1, 1).expand_as(spread)
        return MFA(x.new_zeros(len(x), 2), means, spread.sqrt().unsqueeze(2), spread).fix(x, observed)


@pytest.mark.usefixtures("_on_a_cpu")
def test_figures_of_validation_are_what_they_say() -> None:
    """Against samples of the density, sorted, and a search for the nearest pixel."""
    generator = torch.Generator().manual_seed(0)
    x = 1.5 * torch.randn(20, 1, 6, 7, generator=generator, device="cpu") + 1
    shown = torch.rand(20, 1, 6, 7, generator=generator, device="cpu") < 0.5
    shown[0] = False
    target = ~shown & (torch.rand(20, 1, 6, 7, generator=generator, device="cpu") < 0.7)
    p = Normal()(x, shown).detach()
    *_, joint, marginal, error, half, most, pixels = scores.validation_sums(p, x, target, "joint").tolist()
    for objective, expected in (
        ("joint", joint), ("marginal", marginal), ("joint+marginal", joint + marginal),
        ("joint+marginal+moments", joint + marginal),
    ):  # fmt: skip
        assert scores.validation_sums(p, x, target, objective)[0] == pytest.approx(expected)  # judged by likelihoods
        more = 0.0
        for mean, variance, image, hidden in zip(p.mean, p.variance, x, target, strict=True):
            if hidden.any() and "moments" in objective:
                squares, claimed = (mean - image)[hidden].square(), variance[hidden]
                more += float(4 * squares.sum() / claimed.mean() + (claimed.log() / 2 + squares / claimed / 2).sum())
        assert float(scores.fit_sums(p, x, target, objective)[0]) == pytest.approx(expected + more)
    samples = p.sample(4000, generator=generator)[:, target].sort(0).values
    for share, found in ((0.5, half), (0.9, most)):
        low, high = (samples[round((0.5 + sign * share / 2) * 3999)] for sign in (-1, 1))
        assert found == pytest.approx(float(((low < x[target]) & (x[target] < high)).sum()), abs=8)
    assert pixels == target.sum()
    assert error == pytest.approx(float((p.mean - x)[target].square().sum()), rel=1e-5)
    assert joint == pytest.approx(-float(p.log_prob(x, target).sum()), rel=1e-5)
    assert marginal == pytest.approx(-float(p.marginal_log_prob(x, target).sum()), rel=1e-5)
    # Nearest-pixel fill, up to which of several nearest ones is taken.
    lowest = highest = 0.0
    mean = float(x[shown].mean())
    for image, seen, hidden in zip(x[:, 0], shown[:, 0], target[:, 0], strict=True):
        for row, column in hidden.nonzero().tolist():
            places = seen.nonzero()
            values = torch.tensor([mean])
            if len(places):
                distance = (places - torch.tensor([row, column])).square().sum(1)
                values = image[tuple(places[distance == distance.min()].T)]
            errors = (values - image[row, column]).square()
            lowest, highest = lowest + float(errors.min()), highest + float(errors.max())
    x[~(shown | target)] = math.nan
    assert lowest - 1e-3 <= float(scores.nearest_error(x, shown, target)) <= highest + 1e-3


def test_the_error_of_the_mean_moves_nothing_but_the_mean() -> None:
    """One component: what is claimed is no way to a smaller error; channels count alike, whatever their units."""
    unit = torch.tensor([1.0, 1000.0]).view(1, 2, 1, 1)
    x, target = unit * torch.randn(3, 2, 5, 5), torch.rand(3, 2, 5, 5) < 0.5
    means = (unit * torch.randn(3, 2, 5, 5)).unsqueeze(1).requires_grad_()
    factors = (unit * torch.randn(3, 2, 5, 5))[:, None, None].requires_grad_()
    noise = (unit.square() * (0.1 + torch.rand(3, 2, 5, 5))).unsqueeze(1).requires_grad_()
    found = []
    for objective in ("joint+marginal", "joint+marginal+moments"):
        p = MFA(torch.zeros(3, 1), means, factors, noise)
        found.append(torch.autograd.grad(scores.fit_sums(p, x, target, objective)[0], (means, factors, noise)))
    (to_means, *to_others), (with_error, *others) = found
    for ours, theirs in zip(others, to_others, strict=True):
        assert_close(ours, theirs)
    variance = (noise + factors.square().sum(2)).detach().squeeze(1)
    claimed = (variance * target).sum((2, 3), keepdim=True) / target.sum((2, 3), keepdim=True)
    assert_close((with_error - to_means).squeeze(1), 8 * (means.detach().squeeze(1) - x) * target / claimed)


@pytest.mark.parametrize("components", [1, 2])
def test_a_density_that_claims_no_variance_has_a_score_and_gradients(components: int) -> None:
    x, target = torch.ones(2, 1, 4, 4), torch.ones(2, 1, 4, 4, dtype=torch.bool)
    means = x.unsqueeze(1).repeat(1, components, 1, 1, 1).requires_grad_()
    p = MFA(torch.zeros(2, components), means, torch.zeros(2, components, 1, 1, 4, 4), torch.zeros_like(means))
    score = scores.fit_sums(p, x, target, "joint+marginal+moments")[0]
    assert score.isfinite()
    assert torch.autograd.grad(score, means)[0].isfinite().all()


def test_the_error_of_the_mean_has_no_units() -> None:
    """So images in other units are learned alike, also by a density inside a user's own module."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()
            self.calibrate = self.inner.calibrate

        def forward(self, x: Tensor, observed: Tensor) -> MFA:
            found: MFA = self.inner(x, observed)
            return found

    x, observed = digits()
    alone, wrapped = small(), Wrapped()
    history = fit_density(alone, x, observed, **QUICK)
    fit_density(wrapped, x, observed, **QUICK)
    assert same(alone, wrapped.inner)
    far = fit_density(small(), 1024 * x, observed, **QUICK)
    for ours, theirs in zip(far, history, strict=True):
        assert ours["validation_rmse"] == pytest.approx(1024 * theirs["validation_rmse"], rel=1e-2)


def test_every_record_has_all_figures() -> None:
    history = fit_density(small(), *digits(), **QUICK)
    names = ["nll", "marginal_nll", "rmse", "nearest_rmse", "coverage_50", "coverage_90"]
    for record in history:
        assert {f"validation_{name}" for name in names} | {"epoch", "nll", "mse"} == set(record)
    assert len({record["validation_nearest_rmse"] for record in history}) == 1
    assert set(fit_density(small(), *digits(), **QUICK, validation=0)[0]) == {"epoch", "nll", "mse"}


@pytest.mark.parametrize(
    ("rmse", "half", "most", "warned"),
    [(0.1, 0.5, 0.9, False), (0.1, 0.59, 0.98, False), (0.3, 0.5, 0.9, True), (0.1, 0.61, 0.9, True), (0.1, 0.5, 0.79, True)],
)  # fmt: skip
def test_when_a_density_is_doubted(rmse: float, half: float, most: float, warned: bool) -> None:
    record = {"rmse": rmse, "nearest_rmse": 0.2, "coverage_50": half, "coverage_90": most}
    found = scores.doubts({f"validation_{name}": value for name, value in record.items()})
    assert (found is not None) == warned
    if found is not None:
        assert f"has an RMSE of {rmse}, nearest-pixel fill one of 0.2, and {half:.0%} and {most:.0%} of" in found
        assert ("more components" in found) == (half > 0.6)
        hardly = scores.doubts({f"validation_{name}": value for name, value in record.items()}, 7.0)
        assert hardly is not None
        assert hardly.endswith("it has learned for 7 steps, and more of them may help")


def test_a_density_that_is_not_good_says_so_once() -> None:
    """To whoever called; and one that is good says nothing."""
    unlearned = ConvDMFA(1, rank=1, widths=(4,), depths=(1,))
    with pytest.warns(UserWarning, match="the density is not reliable yet: on validation images") as caught:
        fit_density(unlearned, *digits(), **QUICK | {"epochs": 1}, learning_rate=1e-9)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    x, observed = digits(400)
    torch.manual_seed(0)
    x = x + 0.1 * torch.randn_like(x)  # no interval holds half of many values that are equal
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_density(UNetDMFA(1, rank=2, widths=(8, 16), depths=(1, 1)), x, observed, steps=200, progress=False)


# Bad data ----------------------------------------------------------------------------------------------------------

ODD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Items(at={70: lambda: coded(1)[0, :, :7]}), ValueError, "images must yield images of one shape, but a batch has several"),
    (lambda: Items(at={70: lambda: torch.full((1, 8, 8), math.inf)}), ValueError, "images must be finite wherever it is observed, got inf"),
    (lambda: Items(lambda x: (x, x == x * 0 + x + 1) if len(x) == 0 else (x, torch.ones_like(x) > 0)), ValueError, "images must be finite wherever it is observed, got nan"),
    (lambda: Items(lambda x: x[0]), ValueError, r"images must have shape \(B, C, H, W\)"), (lambda: Items(lambda x: "x"), TypeError, "images must yield NaN-coded images, pairs"),
    (lambda: Items(lambda x: object()), TypeError, "images must yield NaN-coded images, .* default_collate"), (lambda: Items(lambda x: {"x": x}), ValueError, 'images must yield dictionaries with the key "image", got the keys'),
    (lambda: Items(lambda x: ()), ValueError, "images must yield NaN-coded images, .* got an empty"), (lambda: Items(lambda x: (x, 0.5)), ValueError, "observed must have shape"),
    (lambda: Items(lambda x: x > 0), TypeError, "images must be a floating-point image, got a bool"), (lambda: TensorDataset(torch.zeros(0, 1, 8, 8)), ValueError, "images must be a Dataset with a length of at least 1, got TensorDataset"),
    (lambda: Items(lambda x: (x, torch.zeros_like(x))), ValueError, "observed must show every channel somewhere, got none of channel 0"),
    (lambda: Items(lambda x: x.expand(2, 8, 8)), ValueError, "x must have the 1 channels of this density"),
    (lambda: DataLoader(TensorDataset(torch.zeros(0, 1, 8, 8)), 8, sampler=[]), ValueError, "images must yield at least one batch, got none"), (list, ValueError, "images must yield at least one batch, got none"),
    (lambda: iter([coded()]), TypeError, "images must yield its batches anew in every epoch, as a DataLoader, got"), (lambda: [coded(20), coded(20)[:, :, :7]], ValueError, r"images must yield images of one shape, \(1, 8, 8\) as at first, got"),
    (lambda: {"image": coded()}, TypeError, "images must be a torch.Tensor"), (lambda: np.zeros((9, 1, 8, 8), bool), TypeError, "images must hold floating-point numbers or integers"), (lambda: [3], TypeError, "images must yield NaN-coded"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "kind", "message"), ODD, ids=[f"{n}-{case[2][:40]}" for n, case in enumerate(ODD)])
def test_odd_streams(source: Callable[[], Any], kind: type[Exception], message: str) -> None:
    density = small()
    start = {name: value.clone() for name, value in density.state_dict().items()}
    with pytest.raises(kind, match=message):
        fit_density(density, source(), **QUICK)
    assert all(torch.equal(value, start[name]) for name, value in density.state_dict().items())


@pytest.mark.usefixtures("_on_a_cpu")
def test_one_who_yields_bad_data_after_a_while_leaves_the_checkpoint(tmp_path: Path) -> None:
    """Other shapes, NaN that counts as seen, or nothing at all from some epoch on; the density keeps its best."""

    class Turning:
        def __init__(self, then: list[Any]) -> None:
            self.then, self.passes = then, 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            yield from [coded()[:48], coded()[48:]] if self.passes < 4 else self.then

    for number, (then, message) in enumerate(
        [([coded(), coded()[:, :, 1:]], "images must yield images of one shape"), ([(coded(), torch.ones(96, 1, 8, 8))], "images must be finite"),
         ([], "images must yield at least one batch to learn from in every epoch, got none")]
    ):  # fmt: skip
        path, density = tmp_path / str(number), small()
        with pytest.raises(ValueError, match=message):
            fit_density(density, Turning(then), epochs=6, checkpoint=path, progress=False)
        assert len(store.read(path)[1]["jobs"][0]["history"]) == 2
        assert not same(density, small())


def test_observed_is_not_given_twice() -> None:
    with pytest.raises(
        TypeError, match="observed must be None where images is a Dataset or a DataLoader and yields it"
    ):
        fit_density(small(), Items(), digits()[1])
    with pytest.raises(TypeError, match="observed must be None where images is a Dataset"):
        fit_density(SMFA(1, 1), Items(), digits()[1])


def test_observed_that_is_inverted_is_noticed() -> None:
    """What is hidden is not looked at: the images may have anything there."""
    x, observed = digits()
    filled = x.masked_fill(~observed, 0.25)
    for source in ((filled, ~observed), (TensorDataset(filled.cpu(), ~observed.cpu()),)):
        with pytest.warns(
            UserWarning, match="what is observed of every image is one constant value: .* may be inverted"
        ) as caught:
            fit_density(small(), *source, **QUICK)
        first = [w for w in caught if "inverted" in str(w.message)]
        assert len(first) == 1
        assert first[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_inverted((filled.masked_fill(~observed, math.nan), observed), stacklevel=1)
        constant = torch.ones(3, 1, 4, 4), torch.ones(3, 1, 4, 4) > 0
        warn_if_inverted(constant, stacklevel=1)  # all seen


def die() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="images must be readable by its workers, but a worker process .* has died"):
        fit_density(small(), Items(at={70: die}), workers=1, checkpoint=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


# Memory ------------------------------------------------------------------------------------------------------------


class Computed(Dataset[Tensor]):
    """Images that are nowhere until they are asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        x = (torch.tensor(indices).view(-1, 1) * 7 + torch.arange(64.0)).remainder_(17).view(-1, 1, 8, 8)
        x[:, :, 3] = torch.nan
        return list(x)


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        means = self.mean.expand(len(x), 1, 1, 8, 8)
        p = MFA(x.new_zeros(len(x), 1), means, x.new_zeros(len(x), 1, 0, 1, 8, 8), torch.ones_like(means))
        return p.fix(x, observed)


def peaks() -> list[int]:
    """The largest memory of this process, in KiB, after fits to more and more images."""
    import resource  # POSIX's

    torch.set_num_threads(1)
    found = []
    for count in (1000, 20_000, 200_000):
        fit_density(Constant(), Computed(count), epochs=1, batch_size=500, progress=False)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return found


def test_memory_does_not_grow_with_the_number_of_images() -> None:
    """From 20,000 images on, of which as many are set aside as ever are, by less than half of what the others take."""
    few, more, many = run(peaks)
    assert many < 1.1 * few
    assert many - more < 180_000 * 256 / 1024 / 2

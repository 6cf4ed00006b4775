"""The engine under every training, on models small enough to be trained by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from misconv import MFA, SMFA, ConvDMFA, convert, data, fit_density, missing, store
from misconv._train import engine as _engine
from misconv._train import session as _session
from misconv._train.budget import warm_up_cosine
from misconv._train.densities import density_job
from misconv._train.engine import Job, train
from misconv._train.jobs import classifier_job
from misconv._train.scores import ratio_and_error, ratio_sums
from misconv.paper.networks import Classifier, misconv_layer
from misconv.training import fit_classifier

if TYPE_CHECKING:
    from lightning_fabric import Fabric

SIZE, BATCH = 50, 16


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def fabric() -> Fabric:
    return _session.one_device()


class Crash(Exception):
    pass


def network() -> nn.Module:
    """With all that makes a training hard to continue: dropout, and statistics that are no parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 3))


def rows(count: int, seed: int, fabric: Fabric) -> tuple[Tensor, Tensor]:
    """Three classes that overlap."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count, device="cpu") % 3
    x = torch.randn(count, 6, generator=generator, device="cpu")
    x[:, :3] += F.one_hot(labels, 3)
    return x.to(fabric.device), labels.to(fabric.device)


def job(fabric: Fabric, seed: int = 0, size: int = SIZE, **changes: Any) -> Job:
    """A classifier whose epoch is chosen by its loss on other rows."""
    x, labels = rows(size, 0, fabric)
    other, truth = rows(30, 1, fabric)

    def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        output = model(x[indices])
        right = (output.argmax(1) == labels[indices]).sum()
        each = F.cross_entropy(output, labels[indices], reduction="none")
        return each.mean(), torch.stack([each.detach().sum(), right]).double()

    def evaluate(model: nn.Module) -> tuple[float, dict[str, float]]:
        value = float(F.cross_entropy(model(other), truth))
        return value, {"validation": value}

    def summarise(sums: list[float]) -> dict[str, float]:
        return {"loss": sums[0] / size, "accuracy": sums[1] / size}

    arguments: dict[str, Any] = {
        "module": network(), "loss": loss, "figures": 2, "summarise": summarise, "evaluate": evaluate, "size": size,
        "batch_size": BATCH, "learning_rate": 0.02, "seed": seed, "settings": {"task": "toy", "seed": seed},
    }  # fmt: skip
    return Job(**(arguments | changes))


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a: nn.Module | dict[str, Tensor], b: nn.Module | dict[str, Tensor]) -> bool:
    first, second = (t.state_dict() if isinstance(t, nn.Module) else t for t in (a, b))
    return first.keys() == second.keys() and all(torch.equal(v, second[k]) for k, v in first.items())


def raising_at(crash: int) -> Callable[[int], None]:
    def begin(epoch: int) -> None:
        if epoch == crash:
            raise Crash

    return begin


# Side by side ------------------------------------------------------------------------------------------------------


def test_side_by_side_every_job_ends_as_if_alone(fabric: Fabric) -> None:
    """Parameters and histories, bit for bit; dropout too draws from the job's own seed."""

    def jobs() -> list[Job]:
        return [job(fabric, 0), job(fabric, 1), job(fabric, 2, learning_rate=0.1), job(fabric, 0, weight_decay=0.3)]

    together, alone = jobs(), jobs()
    histories = train(together, fabric, epochs=4, progress=False)
    for number, one in enumerate(alone):
        (history,) = train([one], fabric, epochs=4, progress=False)
        assert history == histories[number]
        assert same(one.module, together[number].module)
    assert all(not same(a.module, b.module) for i, a in enumerate(alone) for b in alone[:i])


def test_dropout_draws_from_the_seed_and_the_epoch(fabric: Fabric) -> None:
    """All rows are alike and nothing is learned, so that figures differ by dropout alone."""
    x, label = torch.ones(SIZE, 6, device=fabric.device), torch.zeros(SIZE, dtype=torch.int64, device=fabric.device)

    def losses(seed: int, module: nn.Module) -> list[float]:
        def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
            value = F.cross_entropy(model(x[indices]), label[indices], reduction="sum")
            return value, value.detach().double().unsqueeze(0)

        arguments = {"module": module, "figures": 1, "summarise": lambda sums: {"loss": sums[0]}, "learning_rate": 0.0}
        (history,) = train([job(fabric, seed, loss=loss, **arguments)], fabric, epochs=3, progress=False)
        return [record["loss"] for record in history]

    def with_dropout() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))

    first, second = losses(0, with_dropout()), losses(1, with_dropout())
    assert losses(0, with_dropout()) == first
    assert len({*first, *second}) == 6
    assert len(set(losses(0, with_dropout()[1]))) == 1


def test_global_randomness_is_left_alone(fabric: Fabric) -> None:
    jobs = [job(fabric, 0), job(fabric, 1)]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(jobs, fabric, epochs=1, progress=False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("other", [{"size": SIZE - 1}, {"batch_size": BATCH + 1}])
def test_jobs_of_different_size_are_refused(fabric: Fabric, other: dict[str, int], tmp_path: Path) -> None:
    jobs = [job(fabric), job(fabric, **other)]
    before = state(jobs[0].module)
    message = "jobs must have one number of images and one batch size to be trained side by side"
    with pytest.raises(ValueError, match=message):
        train(jobs, fabric, epochs=1, checkpoint=tmp_path / "run", progress=False)
    assert same(jobs[0].module, before)
    assert not list(tmp_path.iterdir())


# Adam by hand ------------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.frozen, self.slow, self.free = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.free(self.slow(self.frozen(x).tanh()).tanh())
        return out


def adam_by_hand(
    start: dict[str, Tensor], batches: list[list[Tensor]], x: Tensor, labels: Tensor, rate: Callable[[int], float],
    factors: dict[str, float], decay: float, clip: float | None,
) -> dict[str, Tensor]:  # fmt: skip
    """The formulas of Kingma and Ba, with the decoupled decay of Loshchilov and Hutter, in float64."""
    p = {name: value.double() for name, value in start.items()}
    first = {name: torch.zeros_like(value) for name, value in p.items()}
    second = {name: torch.zeros_like(value) for name, value in p.items()}
    toy, step = Toy().double().to(x.device), 0
    for epoch, orders in enumerate(batches):
        for indices in orders:
            step += 1
            for value in p.values():
                value.requires_grad_()
            output = torch.func.functional_call(toy, p, x[indices].double())
            F.cross_entropy(output, labels[indices]).backward()
            moving = [name for name in p if factors.get(name.split(".")[0], 1) != 0]
            gradients = {name: p[name].grad for name in moving}
            norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
            for name, gradient in gradients.items():
                g = gradient if clip is None else gradient * min(1.0, clip / (float(norm) + 1e-6))
                lr = rate(epoch) * factors.get(name.split(".")[0], 1)
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g.square()
                change = (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.999**step)).sqrt() + 1e-8)
                p[name] = (p[name] * (1 - lr * decay) - lr * change).detach()
            p = {name: value.detach() for name, value in p.items()}
    return p


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_it_is_adam_with_factors_decoupled_decay_and_clipping(fabric: Fabric, decay: float, clip: float | None) -> None:
    x, labels = rows(SIZE, 0, fabric)
    batches: list[list[Tensor]] = []

    def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        batches[-1].append(indices)
        value = F.cross_entropy(model(x[indices]), labels[indices])
        return value, value.detach().double().unsqueeze(0)

    def rate(epoch: int) -> float:
        return 0.02 / (1 + epoch)

    module, factors = Toy(), {"frozen.": 0.0, "slow.": 0.1}
    start = state(module)
    trained = job(
        fabric, module=module, loss=loss, figures=1, summarise=lambda sums: {}, evaluate=lambda model: (-math.inf, {}),
        learning_rate=rate, learning_rate_scale=factors, weight_decay=decay, clip=clip, begin=lambda epoch: batches.append([]),
    )  # fmt: skip
    train([trained], fabric, epochs=3, progress=False)
    names = {name.removesuffix("."): factor for name, factor in factors.items()}
    expected = adam_by_hand(
        {k: v.to(fabric.device) for k, v in start.items()}, batches, x, labels, rate, names, decay, clip
    )
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[name].cpu().float(), rtol=1e-5, atol=1e-6, msg=name)
    for name in ("frozen.weight", "frozen.bias"):
        assert torch.equal(module.state_dict()[name].cpu(), start[name].cpu())
    moved = {part: float((expected[f"{part}.weight"].cpu() - start[f"{part}.weight"].cpu()).norm()) for part in names}
    assert moved["slow"] > 1e-3  # the comparison compares something


def test_a_factor_of_zero_freezes_and_what_was_frozen_stays_so(fabric: Fabric) -> None:
    x, labels = rows(SIZE, 0, fabric)

    def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        value = F.cross_entropy(model(x[indices]), labels[indices])
        return value, value.detach().double().unsqueeze(0)

    module = Toy()
    module.slow.requires_grad_(False)
    start = state(module)
    arguments = {"loss": loss, "figures": 1, "summarise": lambda sums: {}, "evaluate": lambda model: (-math.inf, {})}
    train(
        [job(fabric, module=module, learning_rate_scale={"frozen.": 0.0}, weight_decay=0.5, **arguments)],
        fabric, epochs=1, progress=False,
    )  # fmt: skip
    still = {name for name, value in module.state_dict().items() if torch.equal(value.cpu(), start[name].cpu())}
    assert still == {f"{part}.{kind}" for part in ("frozen", "slow") for kind in ("weight", "bias")}


# Interrupted -------------------------------------------------------------------------------------------------------


def trio(fabric: Fabric, crash: int | None = None, where: str = "begin") -> list[Job]:
    """Three jobs, of which the second may raise an error in an epoch: before it, or after it when it is judged."""
    jobs = [job(fabric, 0), job(fabric, 1, learning_rate_scale={"0.": 0.1}, weight_decay=0.1), job(fabric, 2)]
    if crash is not None and where == "begin":
        jobs[1].begin = raising_at(crash)
    elif crash is not None:
        judge, number = jobs[1].evaluate, iter(range(9))

        def evaluate(model: nn.Module) -> tuple[float, dict[str, float]]:
            if next(number) == crash:
                raise Crash
            return judge(model)

        jobs[1].evaluate = evaluate
    return jobs


@pytest.mark.parametrize("where", ["begin", "judge"])
def test_after_an_error_in_any_epoch_several_jobs_end_with_the_same_bits(
    fabric: Fabric, where: str, tmp_path: Path
) -> None:
    straight = trio(fabric)
    histories = train(straight, fabric, epochs=4, progress=False)
    for crash in range(4):
        path = tmp_path / f"{crash}.safetensors"
        with pytest.raises(Crash):
            train(trio(fabric, crash, where), fabric, epochs=4, checkpoint=path, progress=False)
        assert path.exists() == (crash > 0)
        begun: list[int] = []
        again = trio(fabric)
        again[0].begin = begun.append
        assert train(again, fabric, epochs=4, checkpoint=path, progress=False) == histories
        assert begun == list(range(crash, 4))  # what was done is not done again
        for one, other in zip(again, straight, strict=True):
            assert same(one.module, other.module)
        before, done = path.read_bytes(), trio(fabric)
        assert train(done, fabric, epochs=4, checkpoint=path, progress=False) == histories
        assert all(same(one.module, other.module) for one, other in zip(done, straight, strict=True))
        assert path.read_bytes() == before


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["small", "large"])
def test_the_classifiers_of_the_paper_can_be_continued(
    fabric: Fabric, kind: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their BatchNorms do not count batches, so that a checkpoint holds no such number.

    The large one is in channels_last; the fused Adam of a captured step goes through memory as it lies there.
    """
    if fabric.device.type == "cpu":  # where only this Adam is fused
        real = _engine.Running
        monkeypatch.setattr(_engine, "Running", lambda job, fabric, captured: real(job, fabric, fused))
    x, labels = data.digits()
    x, labels = x[:40], labels[:40]

    def made() -> Job:
        torch.manual_seed(0)
        module = Classifier(misconv_layer(1), (1, 8, 8), 10, kind)
        arguments = {"validation_inputs": MFA.point(x[30:]), "validation_labels": labels[30:]}
        made = classifier_job(
            module, MFA.point(x[:30]), labels[:30], fabric, batch_size=10, learning_rate=1e-3, **arguments
        )
        made.resident = made.resident and fused  # on a GPU the captured step or a launched one
        return made

    straight, path = made(), tmp_path / "run.safetensors"
    histories = train([straight], fabric, epochs=3, progress=False)
    broken = made()
    broken.begin = raising_at(2)
    with pytest.raises(Crash):
        train([broken], fabric, epochs=3, checkpoint=path, progress=False)
    again = made()
    assert train([again], fabric, epochs=3, checkpoint=path, progress=False) == histories
    assert same(again.module, straight.module)


def test_a_checkpoint_of_other_jobs_is_refused_and_left_alone(fabric: Fabric, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    train([job(fabric, 0), job(fabric, 1)], fabric, epochs=1, checkpoint=path, progress=False)
    before = path.read_bytes()
    message = r"checkpoint .*run.safetensors must be of the same training, but {}; give another file, or remove it to start anew"
    differences = {
        (1, 0): "its jobs.0.seed is 0 and not 1",
        (0, 2): "its jobs.1.seed is 1 and not 2",
        (0, 1, 2): "its jobs is of length 2 and not 3",
    }
    for seeds, differs in differences.items():
        jobs = [job(fabric, seed) for seed in seeds]
        start = [state(one.module) for one in jobs]
        with pytest.raises(ValueError, match=message.format(differs)):
            train(jobs, fabric, epochs=2, checkpoint=path, progress=False)
        assert all(same(one.module, old) for one, old in zip(jobs, start, strict=True))
    with pytest.raises(ValueError, match=message.format("it has no task")):
        train([job(fabric, 0)], fabric, epochs=2, checkpoint=path, progress=False)
    assert path.read_bytes() == before
    single = tmp_path / "single-run.safetensors"
    train([job(fabric, 0)], fabric, epochs=1, checkpoint=single, progress=False)
    with pytest.raises(ValueError, match=message.format("it has no jobs")):
        train([job(fabric, 0), job(fabric, 1)], fabric, epochs=2, checkpoint=single, progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.safetensors", "single-run.safetensors"]


def test_how_often_a_checkpoint_is_written(fabric: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = store.write

    def spy(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        written.append(len(meta["jobs"][0]["history"]))
        write(path, tensors, meta)

    monkeypatch.setattr(store, "write", spy)
    path = tmp_path / "run.safetensors"
    train([job(fabric)], fabric, epochs=3, checkpoint=path, checkpoint_seconds=3600, progress=False)
    assert not written
    assert not path.exists()
    train([job(fabric)], fabric, epochs=3, checkpoint=path, progress=False)
    assert written == [1, 2, 3]
    # The clock runs from the last one written.
    written.clear()
    path.unlink()
    slow = ticking(fabric, monkeypatch)
    train([slow], fabric, epochs=6, checkpoint=path, checkpoint_seconds=25, progress=False)
    assert written == [3, 6]


def ticking(fabric: Fabric, monkeypatch: pytest.MonkeyPatch, crash: int | None = None) -> Job:
    """A job of which every epoch takes 10 s."""
    now = 1000.0

    def begin(epoch: int) -> None:
        nonlocal now
        now += 10
        if epoch == crash:
            raise Crash

    monkeypatch.setattr(_engine, "time", SimpleNamespace(monotonic=lambda: now))
    return job(fabric, begin=begin)


def test_time_before_an_interruption_counts(fabric: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.safetensors"
    with pytest.raises(Crash):
        train([ticking(fabric, monkeypatch, 3)], fabric, epochs=4, checkpoint=path, progress=False)
    for _ in range(2):  # and once more when all is done
        again = ticking(fabric, monkeypatch)
        train([again], fabric, epochs=4, checkpoint=path, progress=False)
        assert again.seconds == 40
    pair = [ticking(fabric, monkeypatch), job(fabric, 1)]
    train(pair, fabric, epochs=3, progress=False)
    assert [one.seconds for one in pair] == [15, 15]  # they share it


def test_a_training_that_diverges_says_so_and_keeps_its_checkpoint(fabric: Fabric, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    rates = [0.01, 1e30, 0.01]
    message = "training diverged in epoch 2: its loss is not finite; a smaller learning_rate may help"
    with pytest.raises(FloatingPointError, match=message):
        train(
            [job(fabric, module=nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), learning_rate=rates.__getitem__)],
            fabric, epochs=3, checkpoint=path, progress=False,
        )  # fmt: skip
    _, meta = store.read(path)
    assert [record["epoch"] for record in meta["jobs"][0]["history"]] == [0.0]


# What a job sees and what is recorded ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "sizes"), [(50, [16, 16, 16, 2]), (49, [16, 16, 17]), (48, [16, 16, 16]), (17, [17]), (9, [9])]
)
@pytest.mark.parametrize("resident", [False, True])
def test_every_image_is_seen_once_an_epoch(fabric: Fabric, size: int, sizes: list[int], resident: bool) -> None:
    """The ragged last batch too; a last batch of one joins the one before it."""
    if resident and fabric.device.type == "cuda":
        pytest.skip("a captured step cannot be spied on")
    seen: list[list[Tensor]] = []
    spied = job(fabric, size=size, resident=resident, begin=lambda epoch: seen.append([]))
    loss = spied.loss

    def spy(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        assert model.training
        seen[-1].append(indices.clone())
        return loss(model, indices)

    spied.loss = spy
    train([spied], fabric, epochs=2, progress=False)
    assert [[len(batch) for batch in epoch] for epoch in seen] == [sizes, sizes]
    orders = [torch.cat(epoch) for epoch in seen]
    for order in orders:
        assert order.sort().values.tolist() == list(range(size))
    assert not torch.equal(*orders)


def test_what_is_recorded(fabric: Fabric) -> None:
    """Sums are those of one epoch; a model is judged in evaluation mode, without gradients, after its steps."""
    events: list[str] = []
    scores = iter([3.0, 1.0, 1.0, 2.0])
    states: list[dict[str, Tensor]] = []

    def evaluate(model: nn.Module) -> tuple[float, dict[str, float]]:
        assert not model.training
        assert not torch.is_grad_enabled()
        events.append("judge")
        score = next(scores)
        states.append(state(spied.module))
        return score, {"score": score}

    spied = job(
        fabric, figures=2, summarise=lambda sums: {"images": sums[0], "numbers": sums[1]}, evaluate=evaluate,
        begin=lambda epoch: events.append(f"begin {epoch}"),
    )  # fmt: skip
    loss = spied.loss

    def spy(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        events.append("step")
        return loss(model, indices)[0], torch.stack([torch.ones_like(indices).sum(), indices.sum()]).to(fabric.device)

    spied.loss = spy
    (history,) = train([spied], fabric, epochs=4, progress=False)
    assert events == [e for epoch in range(4) for e in (f"begin {epoch}", "step", "step", "step", "step", "judge")]
    assert history == [
        {"epoch": float(e), "images": 50.0, "numbers": 1225.0, "score": s} for e, s in enumerate([3.0, 1.0, 1.0, 2.0])
    ]
    # Of two equally good epochs the last; and neither the last of all nor the start.
    assert same(spied.module, states[2])
    assert spied.kept == history.kept == 2
    assert not any(same(spied.module, other) for other in (states[0], states[1], states[3]))


def test_without_a_score_the_last_epoch_is_taken(fabric: Fabric) -> None:
    states: list[dict[str, Tensor]] = []

    def evaluate(model: nn.Module) -> tuple[float, dict[str, float]]:
        states.append(state(spied.module))
        return -math.inf, {}

    spied = job(fabric, evaluate=evaluate)
    (history,) = train([spied], fabric, epochs=3, progress=False)
    assert same(spied.module, states[-1])
    assert [sorted(record) for record in history] == [["accuracy", "epoch", "loss"]] * 3


@pytest.mark.parametrize("scheduled", [True, False])
def test_where_the_rate_falls_the_last_one_that_is_as_good_is_kept(fabric: Fabric, scheduled: bool) -> None:
    """Within the standard error of the best score, whatever came in between; a constant rate has no such preference."""
    scores, states = iter([3.0, 1.0, 2.0, 1.4, 1.6]), []

    def evaluate(model: nn.Module) -> tuple[float, dict[str, float]]:
        states.append(state(spied.module))
        return next(scores), {}

    schedule = warm_up_cosine(0.01) if scheduled else None
    spied = job(fabric, evaluate=evaluate, tolerance=lambda: 0.5, schedule=schedule)
    train([spied], fabric, epochs=5, progress=False)
    assert spied.kept == (3 if scheduled else 1)
    assert same(spied.module, states[spied.kept])


def test_the_standard_error_of_a_mean_over_pixels_is_that_of_many_draws() -> None:
    """Images are drawn again and again with as many pixels as they have."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    counts = torch.randint(1, 60, (400,), generator=generator).double()
    totals = counts * torch.randn(400, generator=generator).double() + torch.randn(400, generator=generator).double()
    mean, error = ratio_and_error(ratio_sums(totals, counts).tolist(), float(counts.sum()))
    drawn = torch.randint(400, (4000, 400), generator=generator)
    means = totals[drawn].sum(1) / counts[drawn].sum(1)
    assert mean == pytest.approx(float(totals.sum() / counts.sum()))
    assert error == pytest.approx(float(means.std()), rel=0.05)


def test_patience_waits_for_the_last_job_that_gets_better(fabric: Fabric) -> None:
    def scripted(*scores: float) -> Job:
        left = iter(scores)
        return job(fabric, evaluate=lambda model: ((score := next(left)), {"score": score}))

    jobs = [scripted(*[1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]), scripted(*[3.0, 2.0, 1.0, 2.0, 2.0, 2.0, 2.0])]
    histories = train(jobs, fabric, epochs=7, patience=2, progress=False)
    assert [len(history) for history in histories] == [5, 5]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("count", [True, False])
def test_the_loss_of_a_classifier(fabric: Fabric, smoothing: float, count: bool) -> None:
    """At a learning rate of 0 the figures of an epoch are those of the network as it was."""
    x, labels = rows(SIZE, 0, fabric)
    module = nn.Linear(6, 3).to(fabric.device)
    made = classifier_job(
        module, lambda indices: x[indices], labels, fabric, validation_inputs=x[:20],
        validation_labels=labels[:20], batch_size=BATCH, learning_rate=0.0, label_smoothing=smoothing, count=count,
    )  # fmt: skip
    (history,) = train([made], fabric, epochs=1, progress=False)
    with torch.no_grad():
        log = module(x).log_softmax(1)
        chosen = log.gather(1, labels.view(-1, 1)).squeeze(1)
        expected = -((1 - smoothing) * chosen + smoothing * log.mean(1)).mean()
        right = (log.argmax(1) == labels).double()
    figures = {"epoch", "loss", "validation_accuracy"} | ({"accuracy"} if count else set())
    assert history[0].keys() == figures
    assert history[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert history[0]["validation_accuracy"] == float(right[:20].mean())
    if count:
        assert history[0]["accuracy"] == pytest.approx(float(right.mean()))


# Bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["network", "em"])
def test_integers_keep_their_values(kind: str) -> None:
    """And what lies under a missing region is read of neither."""
    images = data.load("digits").train[:96]
    observed = missing.square(96, 8, 8, generator=torch.Generator().manual_seed(0)).cpu()
    garbage = torch.randint(256, images.shape, dtype=torch.uint8, device="cpu")
    results, histories = [], []
    for x in (images, images.to(torch.get_default_dtype()), images.where(observed, garbage), images.to(torch.uint16)):
        torch.manual_seed(0)
        density = SMFA(2, 2) if kind == "em" else ConvDMFA(1, rank=2, widths=(8,), depths=(1,))
        histories.append(fit_density(density, x, observed, epochs=2, batch_size=32, progress=False))
        results.append(density)
    assert all(same(results[0], other) for other in results[1:])
    assert all(histories[0] == other for other in histories[1:])


def test_a_job_divides_bytes(fabric: Fabric) -> None:
    """Which stay bytes in memory."""
    images = data.load("digits").train[:96]
    observed = missing.square(96, 8, 8, generator=torch.Generator().manual_seed(0)).cpu()
    results, histories = [], []
    for x, divisor in ((images, 255), (images.to(torch.get_default_dtype()) / 255, 1)):
        torch.manual_seed(0)
        density = ConvDMFA(1, rank=2, widths=(8,), depths=(1,))
        job = density_job(density, x, observed, fabric, batch_size=32, learning_rate=1e-3, divisor=divisor)
        histories.append(train([job], fabric, epochs=2, progress=False))
        results.append(density)
    assert same(*results)
    assert histories[0] == histories[1]


def test_a_classifier_gets_integers_as_numbers() -> None:
    images, labels = data.load("digits").train[:96], data.load("digits").train_labels[:96]
    results, histories = [], []
    for x in (images, images.to(torch.get_default_dtype()), images.to(torch.uint16), images.to(torch.int32)):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 10))
        histories.append(fit_classifier(network, x, labels, epochs=2, learning_rate=1e-4, progress=False))
        results.append(network)
    assert all(same(results[0], other) for other in results[1:])
    assert all(histories[0] == other for other in histories[1:])


@pytest.mark.parametrize("augment", [None, "shift"])
def test_a_classifier_gets_integers_of_a_dataset_as_numbers(augment: str | None) -> None:
    images, labels = data.load("digits").train[:96], data.load("digits").train_labels[:96]
    histories = []
    for x in (images, images.to(torch.get_default_dtype()), images.to(torch.int16)):
        torch.manual_seed(0)
        density = ConvDMFA(1, rank=1, widths=(4,), depths=(1,))
        layers = torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
        network = convert(torch.nn.Sequential(*layers), density)
        pairs = TensorDataset(x, labels)
        histories.append(fit_classifier(network, pairs, epochs=2, learning_rate=1e-4, augment=augment, progress=False))
    assert all(histories[0] == other for other in histories[1:])


# Graphs ------------------------------------------------------------------------------------------------------------


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a real CUDA graph")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """How many jobs each capture had, and whether it succeeded."""
    found: list[tuple[int, bool]] = []
    real = _engine._capture

    def capture(running: Any, device: torch.device) -> Any:
        graphs = real(running, device)
        found.append((len(running), graphs is not None))
        return graphs

    monkeypatch.setattr(_engine, "_capture", capture)
    return found


def resident(fabric: Fabric, **changes: Any) -> list[Job]:
    """Jobs that can be captured together, with dropout; they differ in seed, learning rate and norm of gradients."""
    differences: list[dict[str, Any]] = [{}, {"learning_rate": 3e-2}, {"clip": 0.1}]
    options: list[dict[str, Any]] = [{"resident": True, **changes, **each} for each in differences]
    return [job(fabric, n, **each) for n, each in enumerate(options)]


@gpu
@pytest.mark.parametrize("size", [SIZE, 2 * BATCH])
def test_a_captured_job_is_what_it_is_alone(fabric: Fabric, captures: list[tuple[int, bool]], size: int) -> None:
    """Bit for bit, dropout too, whether or not there is a last batch that the graph cannot take."""
    together = resident(fabric, size=size)
    histories = train(together, fabric, epochs=3, progress=False)
    assert captures == [(3, True)]
    for number, alone in enumerate(resident(fabric, size=size)):
        (history,) = train([alone], fabric, epochs=3, progress=False)
        assert history == histories[number]
        assert same(alone.module, together[number].module)
    assert captures == [(3, True)] + 3 * [(1, True)]


@gpu
def test_a_graph_draws_what_launches_draw(fabric: Fabric) -> None:
    """Dropout of nothing but ones, which rounding cannot change."""
    sums = []
    for captured in (True, False):
        module = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
        nn.init.constant_(module[1].weight, 0.0)
        x = torch.ones(SIZE, 6, device=fabric.device)

        def loss(model: nn.Module, indices: Tensor, x: Tensor = x, module: Any = module) -> tuple[Tensor, Tensor]:
            kept = module[0](x[indices])
            return module[1](kept).sum(), (kept.detach() * torch.arange(6, device=x.device)).sum().double().unsqueeze(0)

        options = {"module": module, "figures": 1, "summarise": lambda sums: {"sum": sums[0]}, "learning_rate": 0.0}
        (history,) = train([job(fabric, loss=loss, resident=captured, **options)], fabric, epochs=3, progress=False)
        sums.append([record["sum"] for record in history])
    assert sums[0] == sums[1]
    assert len(set(sums[0])) > 1


@gpu
@pytest.mark.parametrize("crash", range(4))
def test_a_graph_that_is_killed_goes_on_from_the_last_epoch(fabric: Fabric, tmp_path: Path, crash: int) -> None:
    straight = resident(fabric)
    histories = train(straight, fabric, epochs=4, progress=False)
    broken = resident(fabric)
    broken[1].begin = raising_at(crash)
    with pytest.raises(Crash):
        train(broken, fabric, epochs=4, checkpoint=tmp_path / "run", progress=False)
    again = resident(fabric)
    assert train(again, fabric, epochs=4, checkpoint=tmp_path / "run", progress=False) == histories
    for one, other in zip(again, straight, strict=True):
        assert same(one.module, other.module)


@gpu
@pytest.mark.parametrize("error", [None, Crash])
def test_what_cannot_be_captured_is_trained_all_the_same(
    fabric: Fabric, captures: list[tuple[int, bool]], error: type[Exception] | None
) -> None:
    """A step that reads a value, or fails only there; after it torch's generators draw as before."""

    def looking(one: Job) -> Job:
        inner = one.loss

        def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
            value, figures = inner(model, indices)
            if error is not None and torch.cuda.is_current_stream_capturing():
                raise error
            value.detach().item()
            return value, figures

        one.loss = loss
        return one

    jobs, others = ([looking(one) for one in resident(fabric)] for _ in range(2))
    before = torch.cuda.get_rng_state()
    histories = train(jobs, fabric, epochs=2, progress=False)
    assert captures == [(3, False)]  # it is tried once
    for number, alone in enumerate(others):
        (history,) = train([alone], fabric, epochs=2, progress=False)
        assert history == histories[number]
        assert same(alone.module, jobs[number].module)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert F.dropout(torch.ones(100, device=fabric.device)).unique().tolist() == [0, 2]


@gpu
def test_an_interruption_while_a_graph_is_captured_is_passed_on(fabric: Fabric) -> None:
    (one, *_) = resident(fabric)
    inner = one.loss

    def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        if torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt
        return inner(model, indices)

    one.loss = loss
    with pytest.raises(KeyboardInterrupt):
        train([one], fabric, epochs=2, progress=False)
    assert F.dropout(torch.ones(100, device=fabric.device)).unique().tolist() == [0, 2]


@gpu
def test_an_error_before_the_capture_waits_for_what_was_launched(fabric: Fabric) -> None:
    """What the launched steps still read is freed with the error."""
    (one, *_) = resident(fabric)
    launched = torch.cuda.Event()

    def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        torch.cuda._sleep(200_000_000)  # cycles, about a tenth of a second
        launched.record()
        raise Crash

    one.loss = loss
    with pytest.raises(Crash):
        train([one], fabric, epochs=1, progress=False)
    assert launched.query()


@gpu
def test_an_interruption_between_replays_waits_for_those_launched(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else these would go on to change parameters that were put back."""
    jobs = resident(fabric, size=4 * BATCH)
    for one in jobs:
        inner = one.loss

        def loss(model: nn.Module, indices: Tensor, inner: Any = inner) -> tuple[Tensor, Tensor]:
            torch.cuda._sleep(100_000_000)  # cycles, about a twentieth of a second
            out: tuple[Tensor, Tensor] = inner(model, indices)
            return out

        one.loss = loss
        one.module.to(fabric.device)
    before = [{name: value.clone() for name, value in one.module.state_dict().items()} for one in jobs]
    replay, calls = _engine._CapturedStep.replay, 0

    def interrupted(self: Any) -> None:
        nonlocal calls
        if (calls := calls + 1) > 2 * len(jobs):
            raise KeyboardInterrupt
        replay(self)

    monkeypatch.setattr(_engine._CapturedStep, "replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(jobs, fabric, epochs=1, progress=False)
    torch.cuda.synchronize()
    for one, values in zip(jobs, before, strict=True):
        for name, value in one.module.state_dict().items():
            assert torch.equal(value, values[name]), name


@gpu
def test_images_that_fill_no_batch_need_no_graph(fabric: Fabric, captures: list[tuple[int, bool]]) -> None:
    jobs = resident(fabric, size=BATCH - 1)
    histories = train(jobs, fabric, epochs=2, progress=False)
    assert captures == []
    for number, alone in enumerate(resident(fabric, size=BATCH - 1)):
        assert train([alone], fabric, epochs=2, progress=False) == [histories[number]]
        assert same(alone.module, jobs[number].module)


@gpu
def test_a_real_graph_takes_the_same_steps(fabric: Fabric) -> None:
    """A few of them: rounding differs between launches and replays, and grows from step to step."""
    x, labels = data.digits()
    x, labels = x[:123].to(fabric.device), labels[:123].to(fabric.device)
    jobs = []
    for captured in (True, True, False, False):
        torch.manual_seed(0)
        module = Classifier(misconv_layer(1), (1, 8, 8), 10, "small")
        made = classifier_job(
            module, MFA.point(x), labels, fabric, batch_size=24, learning_rate=1e-3, seed=len(jobs) % 2
        )
        made.resident = captured
        jobs.append(made)
    histories = train(jobs[:2], fabric, epochs=1, progress=False)
    for one, other in zip(jobs[:2], jobs[2:], strict=True):
        histories += train([other], fabric, epochs=1, progress=False)
        for value, expected in zip(one.module.state_dict().values(), other.module.state_dict().values(), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=2e-3)
    assert histories[0][0]["loss"] == pytest.approx(histories[2][0]["loss"], rel=1e-3)
    assert histories[0][0]["loss"] != pytest.approx(histories[1][0]["loss"], rel=1e-6)


@gpu
def test_a_real_graph_is_continued(fabric: Fabric, tmp_path: Path) -> None:
    """With the network that lies in memory in another order than in a file."""
    x, labels = data.digits()
    x, labels = x[:123].to(fabric.device), labels[:123].to(fabric.device)

    def made() -> list[Job]:
        jobs = []
        for seed in (0, 1):
            torch.manual_seed(0)
            module = Classifier(misconv_layer(1), (1, 8, 8), 10, "large")
            options: dict[str, Any] = {"batch_size": 24, "learning_rate": 1e-3, "seed": seed}
            jobs.append(classifier_job(module, MFA.point(x), labels, fabric, **options))
        return jobs

    straight, again, path = made(), made(), tmp_path / "run.safetensors"
    histories = train(straight, fabric, epochs=3, progress=False)
    train(made(), fabric, epochs=2, checkpoint=path, progress=False)
    continued = train(again, fabric, epochs=3, checkpoint=path, progress=False)
    for one, other, found, expected in zip(again, straight, continued, histories, strict=True):
        assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-2)
        for value, wanted in zip(one.module.state_dict().values(), other.module.state_dict().values(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=1e-2)

"""Tables 3, 4 and 5: what is measured and with what, that hidden pixels change nothing, and how they go on."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import uniform_filter
from scipy.stats import ttest_rel
from torch import Tensor
from typer.testing import CliRunner, Result

from misconv import cli, data
from misconv._train import engine, one_device
from misconv.data import ImageSet
from misconv.paper import features, generation, generation_tables, matching, wae
from misconv.paper.cache import Cache
from misconv.paper.classification import Experiment
from misconv.paper.features import FeatureSettings, Ruler, check_ruler
from misconv.paper.generation import ROWS, Generation, image_scores
from misconv.paper.generation_tables import make_generation
from misconv.paper.matching import MatchingSettings
from misconv.paper.scores import Record
from misconv.paper.settings import SETTINGS, Settings

COUNTS = (100, 20)
SMALL = replace(wae.SETTINGS["digits"], width=4, hidden=8, latent=4, epochs=2)
FLOW = MatchingSettings(epochs=2, scales=2, width=4, steps=2, batch_size=32)
FEATURES = FeatureSettings(epochs=1, width=2, batch_size=32)


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    usual = SETTINGS["digits"]
    digits = Settings(*(replace(getattr(usual, f.name), epochs=1) for f in fields(usual)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, "digits", digits)
        patch.setitem(wae.SETTINGS, "digits", SMALL)
        patch.setitem(matching.SETTINGS, "digits", FLOW)
        patch.setitem(features.FEATURES, "digits", FEATURES)
        yield


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


def few(*, labels: bool = True) -> ImageSet:
    images = data.load("digits")
    train, test = COUNTS
    known = (images.labels[0][:train], images.labels[1][:test]) if labels else (None, None)
    return ImageSet("digits", "digits", images.train[:train], known[0], images.test[:test], known[1])


def experiment(folder: Path, images: ImageSet | None = None, **more: Any) -> Experiment:
    return Experiment(images or few(), "square", Cache(folder), one_device("cpu"), progress=False, **more)


# Measures ------------------------------------------------------------------------------------------------------------


def theirs(x: np.ndarray, y: np.ndarray) -> float:
    """SSIM of one channel with a uniform window and a range of 2, the image reflected at its edges."""

    def mean(values: np.ndarray) -> np.ndarray:
        return np.asarray(uniform_filter(values, 7, mode="mirror"))

    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    mx, my = mean(x), mean(y)
    vx, vy, vxy = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    return float(((2 * mx * my + c1) * (2 * vxy + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean())


def test_scores_of_images_are_those_of_direct_computations() -> None:
    truth, images = (torch.rand(3, 1, 16, 12, dtype=torch.float64) for _ in range(2))
    found = image_scores(images, truth)
    errors = (images - truth).square().mean((1, 2, 3))
    torch.testing.assert_close(found["psnr"], -10 * errors.log10())
    wanted = [theirs(x[0].numpy(), y[0].numpy()) for x, y in zip(images, truth, strict=True)]
    torch.testing.assert_close(found["ssim_authors"], torch.tensor(wanted, dtype=torch.float64))
    torch.testing.assert_close(image_scores(truth, truth)["ssim"], torch.ones(3, dtype=torch.float64))
    assert (found["ssim"] < 0.5).all()


def test_the_frechet_distance_is_that_of_two_normal_distributions(tmp_path: Path) -> None:
    ruler = Ruler(experiment(tmp_path))
    network, images = ruler.network(), torch.rand(40, 1, 8, 8)
    assert torch.equal(network(images), ruler.network()(images)), "trained once, and the same when it is loaded"
    truth = network(data.load("digits").test[: COUNTS[1]].float() / 255).double().numpy()
    other = network(images).double().numpy()
    a, b = np.cov(truth.T), np.cov(other.T)
    values, vectors = np.linalg.eigh(a)
    root = vectors * values.clip(0) ** 0.5 @ vectors.T
    both = np.linalg.eigvalsh(root @ b @ root).clip(0) ** 0.5  # their sum is the trace of the root of a b
    wanted = ((truth.mean(0) - other.mean(0)) ** 2).sum() + np.trace(a + b) - 2 * both.sum()
    assert ruler.distance(images) == pytest.approx(wanted, rel=1e-3)
    assert ruler.distance(images) == pytest.approx(wanted, rel=1e-3), "the test images are counted once"
    assert ruler.title == "8 features of a network trained on the labels of digits"


def test_a_network_without_labels_tells_how_images_were_turned(tmp_path: Path) -> None:
    images = torch.arange(2 * 4, dtype=torch.uint8).view(2, 1, 2, 2)
    take = features._turned(images, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 2, 3]))
    found = (255 * take(torch.tensor([0, 1, 3]))).round().flatten(1).tolist()
    assert found == [[0, 1, 2, 3], [1, 3, 0, 2], [6, 4, 7, 5]]
    ruler = Ruler(experiment(tmp_path, few(labels=False)))
    assert math.isfinite(ruler.distance(torch.rand(8, 1, 8, 8)))
    assert ruler.title == "8 features of a network trained on telling how images were turned, of digits"


# What is never read --------------------------------------------------------------------------------------------------


def measured(folder: Path, methods: list[str], images: ImageSet | None = None, filler: float = 0.0) -> list[Record]:
    found = Generation(experiment(folder, images, filler=filler)).run(methods, [0])
    return [{name: record[name] for name in ("method", "epoch", *generation.BETTER)} for record in found]


def test_hidden_pixels_change_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["mask", "partial", "misconv_dmfa", "flow_matching"]
    clean = measured(tmp_path / "clean", methods)
    assert measured(tmp_path / "nan", methods, filler=math.nan) == clean
    # The measure sees complete images, and so it is the one of the clean images here.
    images = few()
    hidden = ~experiment(tmp_path / "regions").train.observed
    noisy = images.train.where(~hidden, torch.randint(256, images.train.shape, dtype=torch.uint8))
    ruler = Ruler(experiment(tmp_path / "clean"))
    monkeypatch.setattr(generation, "Ruler", lambda *_: ruler)
    assert measured(tmp_path / "noise", methods, replace(images, train=noisy)) == clean


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = few()
    path = tmp_path_factory.mktemp("data") / "few.npz"
    arrays = {"x_train": images.train[:, 0], "y_train": images.labels[0]}
    arrays |= {"x_test": images.test[:, 0], "y_test": images.labels[1]}
    np.savez(path, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
    return path


def call(number: str, file: Path, out: Path, *more: str | Path, name: str = "digits", seeds: int = 1) -> Result:
    given = ["--dataset", name, "--data", file, "--out", out, "--seeds", seeds, "--device", "cpu", *more]
    return CliRunner().invoke(cli.app, ["table", number, *map(str, given)], prog_name="misconv")


@pytest.fixture(scope="module")
def first(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_default_dtype(torch.float32)
    out = tmp_path_factory.mktemp("paper")
    result = call("3", file, out)
    assert result.exit_code == 0, result.output
    assert all(method in result.stdout for method in ("zero", "ACFlow *", "MFA imputation", "MisConv (DMFA)", "GT *"))
    assert "flow matching †" in result.stdout
    return out


def records(out: Path, number: int = 3) -> list[Record]:
    found: list[Record] = json.loads((out / f"table-{number}-digits.json").read_text())["records"]
    return found


def test_a_record_holds_the_chosen_epoch_and_the_best(first: Path) -> None:
    found = records(first)
    assert [record["method"] for record in found] == list(ROWS)
    for record in found:
        assert record["epochs"] == SMALL.epochs
        for name, better in generation.BETTER.items():
            if (record["kind"], name) == ("flow_matching", "frechet"):
                assert record["frechet"] > 0
                assert record["frechet_best"] is None, "samples are drawn once"
            else:
                assert better(record[name], record[f"{name}_best"]) == record[f"{name}_best"]


def test_other_tables_and_the_figure_train_nothing_more(
    file: Path, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something was trained")

    for module in (generation, features):
        monkeypatch.setattr(module, "train", fail)
    for number in (3, 4, 5):
        result = call(str(number), file, first)
        assert result.exit_code == 0, result.output
        assert records(first, number) == records(first)
    result = call("figure-2", file, first)
    assert result.exit_code == 0, result.output
    figure = first / "figure-2-digits.png"
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert generation.is_drawn(figure), "and may be drawn again"
    figure.write_text("mine")
    assert "must be new or written by this command" in call("figure-2", file, first).stderr
    figure.unlink()


def test_a_figure_has_networks_trained_again_whose_files_are_gone(file: Path, first: Path, tmp_path: Path) -> None:
    shutil.copytree(first, tmp_path / "paper")
    (gone,) = (tmp_path / "paper" / "networks").glob("*square-zero-wae-0-*")
    gone.unlink()
    result = call("figure-2", file, tmp_path / "paper")
    assert result.exit_code == 0, result.output
    assert gone.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("frechet_best", "abc"), ("psnr_hidden", [1]), ("method", "gt"), ("dataset", "mnist"), ("seed", 5)],
)
def test_a_record_that_somebody_has_changed(name: str, value: Any, file: Path, first: Path) -> None:
    (path,) = (first / "records").glob("*square-zero-wae-0-*")
    good = path.read_bytes()
    content = json.loads(good)
    content["record"][name] = value
    path.write_text(json.dumps(content))
    try:
        result = call("5", file, first)
        assert f"{path} must be a record of misconv, got something else; move it away" in result.stderr
    finally:
        path.write_bytes(good)


def test_some_rows_alone(file: Path, first: Path, tmp_path: Path) -> None:
    """Only these are trained; the table shows them beside those of an earlier call."""
    for names, shown in (("zero", ["zero"]), ("mask", ["zero", "mask"])):
        result = call("5", file, tmp_path, "--methods", names)
        assert result.exit_code == 0, result.output
        found = json.loads((tmp_path / f"table-5-digits-{names}.json").read_text())["records"]
        assert list(dict.fromkeys(record["method"] for record in found)) == shown
    for record in found:
        (same,) = [r for r in records(first) if (r["method"], r["seed"]) == (record["method"], record["seed"])]
        assert record["psnr"] == same["psnr"]
    assert "--methods must be some of zero,mask," in call("5", file, first, "--methods", "smfa").stderr


def stop_at(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> list[int]:
    """Interrupt the epochs of these numbers, counted over all trainings, before they are judged; returns the count."""
    judge, calls = engine.Running.judge, list[int]()

    def stop(self: Any, epoch: int) -> None:
        calls.append(epoch)
        if len(calls) in numbers:
            raise KeyboardInterrupt
        judge(self, epoch)

    monkeypatch.setattr(engine.Running, "judge", stop)
    return calls


def test_a_table_that_is_stopped_comes_out_the_same(
    file: Path, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 3, 6)  # in the middle of an autoencoder, and of the next one
    assert [call("3", file, tmp_path).exit_code for _ in range(3)] == [130, 130, 0]

    def numbers(out: Path) -> list[list[Any]]:
        return [[record[name] for name in (*generation.BETTER, "epoch")] for record in records(out)]

    assert numbers(tmp_path) == numbers(first)


def test_the_flow_alone_stopped_and_called_again(
    file: Path, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stop_at(monkeypatch, 3)  # after the features, and the first of its two epochs
    codes = [call("3", file, tmp_path, "--methods", "flow_matching").exit_code for _ in range(2)]
    assert codes == [130, 0]
    assert len(calls) == 4, "the first epoch was not done again"
    (found,) = json.loads((tmp_path / "table-3-digits-flow_matching.json").read_text())["records"]
    whole = next(record for record in records(first) if record["method"] == "flow_matching")
    for name in (*generation.BETTER, "epoch", "validation_loss"):
        assert found[name] == whole[name], name


@pytest.mark.parametrize(
    ("size", "more", "message"),
    [
        ((4, 4), [], "mine must have images of at least 6×6 pixels, got 4×4"),
        ((10, 10), [], "mine must have a height and a width that are multiples of 4, .*, got 10×10"),
        ((8, 12), [], "mine must have labels, or square images, .* got no labels and 8×12 pixels"),
        ((8, 8), ["--inception", "w.pth"], "--inception is for images of 3 channels, got mine with 1"),
        ((8, 8, 3), ["--inception", "nowhere.pth"], "--inception must be a file, got nowhere.pth"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_work(
    size: tuple[int, ...], more: list[str], message: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "mine.npz", **{f"x_{part}": np.zeros((100, *size), np.uint8) for part in ("train", "test")})
    result = call("3", tmp_path / "mine.npz", tmp_path / "new", *more, name="mine")
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "new").exists()


def test_one_test_image_has_no_distance(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x_train=np.zeros((100, 8, 8), np.uint8), x_test=np.zeros((1, 8, 8), np.uint8))
    result = call("4", tmp_path / "mine.npz", tmp_path / "new", name="mine")
    assert "mine must have at least 2 test images, for a Fréchet distance, got 1" in result.stderr


def test_completions_without_any_error_have_a_number(tmp_path: Path) -> None:
    black = replace(few(), test=torch.zeros_like(few().test))
    made = Generation(experiment(tmp_path, black))
    flow = made._new("flow_matching", 0)
    torch.nn.init.constant_(flow.network.last.bias, -2.0)  # type: ignore[union-attr, arg-type]
    found = made.measure("flow_matching", flow)
    assert found["psnr_hidden"] == found["psnr"] == 140


def test_numbers_of_images_that_are_none_are_none(tmp_path: Path) -> None:
    """Not those of a completion without any error; and eigenvalues of NaN do not end the process."""
    none = torch.full((4, 1, 8, 8), math.nan)
    made = Generation(experiment(tmp_path))
    assert math.isnan(made.ruler.distance(none))
    model = made._new("zero", 0)
    torch.nn.init.constant_(model.decoder[-2].bias, math.nan)  # type: ignore[index, union-attr, arg-type]
    assert all(math.isnan(value) for value in made.measure("zero", model).values())


def test_an_autoencoder_that_diverges_says_so(tmp_path: Path) -> None:
    """In the last step of an epoch, whose loss is a number still."""
    settings = replace(SMALL, epochs=1, batch_size=128, learning_rate=1e30)
    with pytest.raises(FloatingPointError, match="WAE diverged in epoch 1: its validation is not finite"):
        Generation(experiment(tmp_path), settings).run(["zero"], [0])


def test_weights_that_are_not_those_of_inception(tmp_path: Path, file: Path) -> None:
    colours = replace(few(labels=False), train=few().train.repeat(1, 3, 1, 1))
    path = tmp_path / "w.pth"
    path.write_bytes(b"no weights")
    with pytest.raises(ValueError, match="--inception must be weights that torch can load, got .*w.pth"):
        check_ruler(colours, path)
    torch.save({"fc.weight": torch.zeros(1000, 2048)}, path)
    with pytest.raises(ValueError, match=r"--inception must be the weights of Inception v3 .*, got .*w.pth"):
        check_ruler(colours, path)
    result = call("1", file, tmp_path / "new", "--inception", path)
    integers = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in features.INCEPTION_LAYERS.items()}
    torch.save(integers, path)
    with pytest.raises(ValueError, match=r"--inception must be the weights of Inception v3 .*, got .*w.pth"):
        check_ruler(colours, path)
    torch.save({"fc.weight": 2}, path)
    with pytest.raises(ValueError, match=r"--inception must be the weights of Inception v3 .*, got .*w.pth"):
        check_ruler(colours, path)
    assert "--inception is for the tables 3, 4 and 5 and for figure-2, got table 1" in result.stderr


def test_weights_that_were_downloaded_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(features, "find_spec", lambda name: object())
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / features.INCEPTION).write_bytes(b"half of a download")
    with pytest.raises(
        ValueError, match=f"--inception must be weights that torch can load, got .*{features.INCEPTION}"
    ):
        check_ruler(replace(few(), train=few().train.repeat(1, 3, 1, 1)), None)


@pytest.mark.parametrize("name", ["~nobody-of-that-name/w.pth", "w" * 5000])
def test_weights_of_odd_names(name: str) -> None:
    with pytest.raises(ValueError, match="--inception must be a file, got"):
        check_ruler(replace(few(), train=few().train.repeat(1, 3, 1, 1)), name)


def test_an_old_torch_reads_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({}, tmp_path / "w.pth")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    with pytest.raises(ValueError, match=r"w.pth is a pickle, which torch 2.9.1\+cu130 cannot read safely \(CVE-"):
        check_ruler(replace(few(), train=few().train.repeat(1, 3, 1, 1)), tmp_path / "w.pth")


# The tables in words -------------------------------------------------------------------------------------------------


UNET = ("mfa_unet", "misconv_unet")


def run(method: str, seed: int, value: float, dataset: str = "mnist") -> Record:
    found = {name + best: value + shift for name in generation.BETTER for best, shift in (("", 0.0), ("_best", 0.1))}
    common = {"kind": "wae", "dataset": dataset, "title": "MNIST", "features": "8 features of a network"}
    return {**common, "method": method, "seed": seed, **found}


def test_a_table_has_the_printed_numbers_beside_ours() -> None:
    ours, mfa = (0.5, 0.6, 0.8), (0.45, 0.5, 0.73)
    found = [run("misconv_dmfa", seed, value) for seed, value in enumerate(ours)]
    found += [run("mfa", seed, value) for seed, value in enumerate(mfa)]
    made = make_generation(4, found)
    heads = ["(paper)", "(here)", "(best test epoch, here)", "(7×7, here)", "(7×7, best test epoch, here)"]
    assert made.columns == ["method", *(f"MNIST {head}" for head in heads)]
    rows = {row[0]: row[1:] for row in made.rows}
    assert rows["MisConv (DMFA)"][:3] == [".803", "**.633 ± .153**", "**.733 ± .153**"]
    assert rows["MFA imputation"][:2] == ["–", ".560 ± .149"]
    p = ttest_rel(ours, mfa).pvalue
    assert f"MNIST, MisConv (DMFA) minus MFA imputation: +0.073 (p = {p:.3f} over 3 seeds)." in made.notes
    found += [run(name, seed, 0.9 - 0.01 * seed * row) for row, name in enumerate(UNET) for seed in range(3)]
    both = [note for note in make_generation(4, found).notes if " minus " in note]
    assert both[0].endswith(f"+0.073 (p = {min(1, 2 * p):.3f} over 3 seeds)."), "corrected for the other density"
    assert both[1].startswith("MNIST, MisConv (UNetDMFA) minus MFA imputation (UNetDMFA): −0.010")
    distance = make_generation(3, found)
    assert next(row for row in distance.rows if row[0] == "MFA imputation")[2].startswith("**")
    assert "MNIST: the distance is one in 8 features of a network." in distance.notes
    assert "Lower is better" in "".join(distance.notes)


def test_a_completion_is_compared_with_reconstructions_at_hidden_pixels_alone() -> None:
    found = [run("mfa", 0, 0.5), run("zero", 0, 0.4), {**run("flow_matching", 0, 0.9), "kind": "flow_matching"}]
    similar, ratio = make_generation(4, found), make_generation(5, found)
    bold = {
        made.number: [[cell.startswith("**") for cell in row[2:]] for row in made.rows] for made in (similar, ratio)
    }
    flow, mfa = (ROWS.index(name) for name in ("flow_matching", "mfa"))
    assert similar.rows[flow][0] == ratio.rows[flow][0] == "flow matching †"
    assert bold[4][flow] == [False] * 4
    assert bold[4][mfa] == [True] * 4
    assert ratio.columns[-1] == "MNIST (hidden pixels, here)"
    assert bold[5][flow] == [False, False, True]
    assert bold[5][mfa] == [True, True, False]
    distance = make_generation(3, [*found[:2], {**found[2], "frechet": 0.1}])
    assert distance.rows[flow][2] == "**.10**"
    assert any(note.startswith("† no autoencoder") and "nothing seen" in note for note in distance.notes)
    older = [{name: value for name, value in record.items() if "hidden" not in name} for record in found]
    assert "hidden" not in make_generation(5, older).columns[-1], "records without it make no column"


def test_a_large_network_is_measured_after_some_epochs_and_by_the_chosen_one(tmp_path: Path) -> None:
    seldom = replace(generation._settings("digits"), epochs=3, measured=2)
    made = Generation(experiment(tmp_path), seldom)
    looks = []
    measure = made.measure

    def counted(name: str, model: Any) -> dict[str, float]:
        looks.append(measure(name, model))
        return looks[-1]

    made.measure = counted  # type: ignore[method-assign]
    (record,) = made.run(["zero"], [0])
    found = measure("zero", made.load("zero", 0))
    assert record["epoch"] == 3, "the last of so few epochs is the best"
    assert len(looks) == 2, "after the second epoch, and by the chosen one"
    assert record["psnr"] == pytest.approx(found["psnr"], rel=1e-4)
    assert record["psnr_best"] == max(look["psnr"] for look in looks)
    (note,) = (note for note in make_generation(5, [record]).notes if "chooses the epoch" in note and "†" not in note)
    assert note.endswith("as in the paper (on digits one in 2 was measured).")


@pytest.mark.parametrize("number", generation_tables.NUMBERS)
def test_a_table_without_records(number: int) -> None:
    made = make_generation(number, [])
    assert len(made.rows) == len(ROWS)
    assert [head for head in made.columns if head.endswith("(paper)")] == [
        f"{name} (paper)" for name in ("MNIST", "SVHN", "CelebA")
    ]


def test_reconstructions_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    made = Generation(experiment(tmp_path))
    network = made.load("zero", 0)
    assert not network.training
    whole: Tensor = made.reconstruct("zero", network, torch.arange(COUNTS[1]))
    torch.testing.assert_close(made.reconstruct("zero", network, torch.arange(3)), whole[:3], rtol=1e-4, atol=1e-5)


def test_what_is_measured_of_the_flow(tmp_path: Path) -> None:
    made = Generation(experiment(tmp_path))
    (record,) = made.run(["flow_matching"], [0])
    flow = made.load("flow_matching", 0)
    rows, hidden = torch.arange(COUNTS[1]), ~made.experiment.test.observed
    truth, completed = few().test / 255, made.reconstruct("flow_matching", flow, rows)
    assert torch.equal(completed[~hidden], truth[~hidden])
    error = (completed - truth)[hidden].double().square().mean().item()
    assert record["psnr_hidden"] == pytest.approx(-10 * math.log10(error), rel=1e-6)
    # A quarter of the pixels is hidden: the other ones add 6 dB to the whole image, if they are exact.
    each = (completed - truth).double().square().mean((1, 2, 3))
    assert record["psnr"] == pytest.approx((-10 * each[each > 0].log10()).mean().item(), rel=1e-6)
    assert record["frechet"] == pytest.approx(made.ruler.distance(made.samples(flow)))
    assert made.samples(flow, 3).shape == (3, 1, 8, 8)

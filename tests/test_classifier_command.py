"""`misconv train`, `evaluate` and `predict` on a user's own files, as a user calls them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.transforms import v2
from typer.testing import CliRunner, Result

import misconv
from misconv import cli
from misconv._files import find_files, labels_of, read_labels
from misconv._store import set_channels
from misconv._train import cpu_by_default
from misconv.convert import Converted
from misconv.images.backbone import build_backbone
from misconv.images.labelled import choose_size, resize_to, split_by_class
from misconv.layers import Normalize
from misconv.store import read_notes
from tests.stopping import interrupted


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    with cpu_by_default():
        yield


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [*map(str, arguments)], prog_name="misconv")


SMALL = ("--backbone", "test_resnet")  # of timm


def stripes(folder: Path, count: int, seed: int, bands: int = 3, side: int = 24) -> Path:
    """Images of stripes that lie or stand, a folder for each, with a hole."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        kind = ("lying", "standing")[number % 2]
        wave = 100 + 80 * np.sin(np.arange(side) * draw.uniform(0.8, 1.2) + draw.uniform(0, 6))
        plane = np.repeat(wave[:, None], side, 1) if kind == "lying" else np.repeat(wave[None], side, 0)
        image = np.stack([plane + 10 * band for band in range(bands)]) + draw.normal(0, 5, (bands, side, side))
        y, x = draw.integers(0, side // 2, 2)
        (folder / kind).mkdir(parents=True, exist_ok=True)
        if bands == 3:
            pixels = np.dstack([*np.clip(image, 0, 255).astype(np.uint8), np.full((side, side), 255, np.uint8)])
            pixels[y : y + side // 2, x : x + side // 2, 3] = 0
            Image.fromarray(pixels).save(folder / kind / f"{number:03}.png")
        else:
            image[:, y : y + side // 2, x : x + side // 2] = np.nan
            np.save(folder / kind / f"{number:03}.npy", image.astype(np.float32))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Result]:
    """A folder for each of two classes, what was learned from it, and what was said meanwhile."""
    folder = tmp_path_factory.mktemp("trained")
    images, model = stripes(folder / "images", 40, 0), folder / "model.safetensors"
    with cpu_by_default():
        made = call("train", images, "-o", model, "--budget", "24steps", "--device", "cpu", "--batch-size", 8, *SMALL)
    return images, model, made


def test_a_folder_per_class_becomes_a_network(trained: tuple[Path, Path, Result], tmp_path: Path) -> None:
    _, model, made = trained
    assert made.exit_code == 0, made.output
    assert "34 images of 2 classes to learn from, 6 to judge by" in made.output
    assert "% of 6 images that were set aside are put into the right class" in made.output
    assert [path.name for path in model.parent.iterdir() if "checkpoint" in path.name] == []
    network = misconv.load(model)
    assert isinstance(network, Converted)
    assert read_notes(model)["classes"] == ["lying", "standing"]
    others = stripes(tmp_path / "others", 30, 1)
    found = call("evaluate", others, "--model", model, "--device", "cpu", "--json")
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert record["images"] == 30
    assert record["accuracy"] > 0.8
    assert np.sum(record["confusion"]) == 30
    assert record["largest_class"] == 0.5
    shown = call("evaluate", others, "--model", model, "--device", "cpu")
    assert f"{100 * record['accuracy']:.1f} % of 30 images are put into the right class" in shown.output


def test_predictions_are_those_of_the_network(trained: tuple[Path, Path, Result], tmp_path: Path) -> None:
    images, model, _ = trained
    table = tmp_path / "classes.csv"
    done = call("predict", images, "--model", model, "-o", table, "--device", "cpu", "--samples", 4)
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 40
    x = torch.stack([misconv.data.images(images)[n] for n in range(40)])
    network = misconv.load(model).eval()
    with torch.no_grad():
        probabilities = network(x).softmax(1)
    for n, row in enumerate(rows):
        assert float(row["p(lying)"]) == pytest.approx(probabilities[n, 0].item(), abs=2e-4)
        assert row["class"] == ("lying" if probabilities[n, 0] > 0.5 else "standing")
        assert float(row["missing"]) == pytest.approx(0.25)
        assert 0 <= float(row["doubt_from_holes"]) <= 1
    assert max(float(row["doubt_from_holes"]) for row in rows) > 0
    again = call("predict", images, "--model", model, "--device", "cpu", "--samples", 4, "--json")
    document = json.loads(again.stdout)
    assert [p["class"] for p in document["predictions"]] == [row["class"] for row in rows]
    printed = call("predict", images, "--model", model, "--device", "cpu", "--samples", 4)
    assert printed.stdout == table.read_text()


def test_bad_calls_are_refused_before_any_work(trained: tuple[Path, Path, Result], tmp_path: Path) -> None:
    images, model, _ = trained
    table, other = tmp_path / "t.csv", tmp_path / "density.safetensors"
    table.write_text("keep me")
    misconv.save(misconv.UNetDMFA(3, rank=1, widths=(4, 4), depths=(1, 1)), other)
    lonely = stripes(tmp_path / "lonely", 4, 0)
    for arguments, message in (
        (("train", images, "-o", tmp_path / "m", "--backbone", "resnet19"), "--backbone must be the name of a network"),
        (("train", images, "-o", tmp_path / "m", "--pretrained", tmp_path / "no.pth"), "there is no such file"),
        (
            ("train", images, "-o", tmp_path / "m", "--pretrained", model, "--backbone", "vgg11"),
            "whose tensors are others",
        ),
        (("train", images, "-o", tmp_path / "m", "--pretrained", table), "--pretrained must be weights"),
        (("train", images, "-o", tmp_path), "--out must be a file, got the folder"),
        (("train", images, "-o", tmp_path / "m", "--validation", "1"), "--validation must be at least 0 and below 1"),
        (("train", images, "-o", tmp_path / "m", "--labels", tmp_path / "no.csv"), "No such file"),
        (
            ("train", images / "lying", "-o", tmp_path / "m"),
            "IMAGES must be in a folder for each class, or have --labels",
        ),
        (("train", images, "-o", tmp_path / "m", "--precision", "64"), "--precision must be 32-true"),
        (("train", images, "-o", tmp_path / "m", "--device", "tpu"), "--device must be cuda or cpu"),
        (("predict", images, "--model", other), "--model must be a file that misconv train has written"),
        (("predict", images, "--model", model, "-o", tmp_path / "t.txt"), "--out must end in .csv or .json"),
        (("predict", images, "--model", model, "-o", table), "which exists; --overwrite replaces it"),
        (("predict", images, "--model", model, "--samples", "-1"), "--samples must be 0 or more, got -1"),
        (("evaluate", lonely / "lying", "--model", model), "IMAGES must be in a folder for each class"),
    ):
        refused = call(*arguments, "--device", "cpu") if "--device" not in arguments else call(*arguments)
        assert refused.exit_code == 2, (arguments, refused.output)
        assert message in refused.output, (arguments, refused.output)
        assert "Traceback" not in refused.output
    assert table.read_text() == "keep me"
    assert not (tmp_path / "m").exists()


def test_files_that_fail_do_not_stop_the_others(trained: tuple[Path, Path, Result], tmp_path: Path) -> None:
    _, model, _ = trained
    images = stripes(tmp_path / "images", 20, 3)
    some = images / "lying" / "000.png"
    (images / "lying" / "broken.png").write_bytes(some.read_bytes()[:200])
    Image.fromarray(np.zeros((24, 24), np.uint8)).save(images / "standing" / "grey.png")
    Image.fromarray(np.zeros((24, 24, 4), np.uint8)).save(images / "lying" / "void.png")
    (images / "loose.png").write_bytes(some.read_bytes())
    done = call("predict", images, "--model", model, "--device", "cpu", "--samples", 0)
    assert done.exit_code == 1
    assert len(list(csv.DictReader(done.stdout.splitlines()))) == 21
    for reason in (
        "broken.png is damaged",
        "has 1 band, and the model knows images of 3",
        "has no pixel that was seen",
    ):
        assert reason in done.stderr, done.stderr
    assert "3 of 24 files failed" in done.stderr
    judged = call("evaluate", images, "--model", model, "--device", "cpu", "--json")
    assert judged.exit_code == 1
    assert "loose.png: is in no folder of a class" in judged.stderr
    assert json.loads(judged.stdout)["images"] == 20
    learned = call(
        "train", images, "-o", tmp_path / "m", "--device", "cpu", "--budget", "2steps", "--batch-size", 4, *SMALL
    )
    assert learned.exit_code == 1
    assert (tmp_path / "m").exists()
    assert "3 of 24 files failed" in learned.stderr  # void.png, which can be read, teaches nothing


def test_classes_of_a_table(tmp_path: Path) -> None:
    folder = stripes(tmp_path / "images", 4, 0)
    files = find_files(folder)
    names = [file.name.as_posix() for file in files]
    for text in (
        "file,label\n" + "".join(f"{name},{n}\n" for n, name in enumerate(names)),
        "class;filename\n" + "".join(f"{n};{Path(name).name}\n" for n, name in enumerate(names)),
        "".join(f"{Path(name).stem},{n}\n" for n, name in enumerate(names)),
        "\ufeffid,age,target\n" + "".join(f"{Path(name).stem},7,{n}\n" for n, name in enumerate(names)),
    ):
        table = tmp_path / "table.csv"
        table.write_text(text)
        assert labels_of(files, table) == ["0", "1", "2", "3"], text
    table.write_text("file,label\n000.png,a\n")
    assert labels_of(files, table) == ["a", None, None, None]
    assert labels_of(files) == ["lying", "lying", "standing", "standing"]
    for text, message in (
        ("", "must have two columns"),
        ("a\nb\n", "must have two columns"),
        ("a,x\na,y\n", "must have one class for every file, got two for a"),
        ("a,\n", "must have a name and a class in every line"),
    ):
        table.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_labels(table)
    table.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="must be a text file"):
        read_labels(table)


def test_bands_tables_and_large_images(tmp_path: Path) -> None:
    """Six bands of floating-point numbers, of several sizes, with classes of a table and a timm network."""
    folder = stripes(tmp_path / "a", 8, 0, bands=6)
    stripes(tmp_path / "a", 16, 1, bands=6, side=40)
    table = tmp_path / "classes.csv"
    table.write_text("".join(f"{path.relative_to(folder)},{path.parent.name}\n" for path in folder.rglob("*.npy")))
    model = tmp_path / "model.safetensors"
    options = ("--budget", "2steps", "--device", "cpu", "--batch-size", "4", "--side", "32", "--mirror")
    made = call("train", folder, "--labels", table, "-o", model, "--backbone", "test_resnet", *options)
    assert made.exit_code == 0, made.output
    assert read_notes(model)["size"] == [32, 32]
    done = call("predict", folder, "--model", model, "--device", "cpu", "--samples", 2, "--json")
    assert len(json.loads(done.stdout)["predictions"]) == 16


def test_pretrained_weights_arrive(tmp_path: Path) -> None:
    source = torchvision.models.resnet18(num_classes=1000)
    torch.save({"state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}}, tmp_path / "w.pth")
    safetensors.torch.save_file(source.state_dict(), tmp_path / "w.safetensors")
    for name in ("w.pth", "w.safetensors"):
        made = build_backbone("resnet18", 5, 3, tmp_path / name)
        own, theirs = made.state_dict(), source.state_dict()
        assert all(torch.equal(own[key], theirs[key]) for key in own if not key.startswith("fc."))
        assert own["fc.weight"].shape == (5, 512)
    grey = build_backbone("resnet18", 5, 1, tmp_path / "w.pth")
    x = torch.rand(2, 1, 32, 32)
    assert torch.allclose(grey.conv1(x), source.conv1(x.expand(-1, 3, -1, -1)), atol=1e-5)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "convnext_tiny"])
def test_networks_of_other_channels_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    network = torchvision.models.get_model(name, num_classes=3)
    set_channels(network, 6)
    misconv.save(network.eval(), tmp_path / "n")
    x = torch.rand(2, 6, 64, 64)
    assert torch.equal(misconv.load(tmp_path / "n")(x), network(x))


def test_normalize() -> None:
    layer = Normalize((1.0, 2.0), (3.0, 4.0))
    x = torch.rand(2, 2, 4, 4)
    theirs = v2.functional.normalize(x, [1.0, 2.0], [3.0, 4.0])
    assert torch.allclose(layer(x), theirs)
    for mean, std, message in (
        ((1.0,), (1.0, 2.0), "one finite number per channel"),
        ((1.0,), (0.0,), "std must be"),
        ((float("nan"),), (1.0,), "one finite number per channel"),
        (3.0, (1.0,), "mean must be a list of numbers"),
        (("a",), (1.0,), "mean must be a list of numbers"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Normalize(mean, std)  # type: ignore[arg-type]
    density = misconv.UNetDMFA(2, rank=1, widths=(4, 4), depths=(1, 1))
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    network = misconv.convert(nn.Sequential(layer, plain), density)
    x[:, :, 1:3] = torch.nan
    p = density.eval()(x)
    affine = misconv.MFA(p.logits, (p.means - layer.shift) / layer.scale, p.factors / layer.scale, p.noise / layer.scale**2, observed=p.observed)  # fmt: skip
    expected = misconv.convert(plain)(affine)
    assert torch.allclose(network.eval()(x), expected, atol=1e-5)


def test_splits_have_all_classes() -> None:
    labels = [0] * 10 + [1] * 3 + [2]
    for seed in range(20):
        rows, held = split_by_class(labels, 0.3, seed)
        assert sorted(rows + held) == list(range(14))
        assert {labels[row] for row in rows} == {0, 1, 2}
        assert [sum(labels[row] == label for row in held) for label in range(3)] == [3, 1, 0]
    assert split_by_class(labels, 0.3, 0) == split_by_class(labels, 0.3, 0)
    assert split_by_class(labels, 0, 0)[1] == []


def test_sizes() -> None:
    assert choose_size([(3, 20, 24), (3, 20, 24)], None) == (20, 24)
    assert choose_size([(3, 20, 24), (3, 24, 24)], None) == (224, 224)
    assert choose_size([(3, 900, 900)], None) == (224, 224)
    assert choose_size([(3, 900, 900)], 64) == (64, 64)
    x = torch.rand(2, 30, 20)
    x[:, :12] = torch.nan
    small = resize_to(x, (10, 10))
    assert small.shape == (2, 10, 10)
    assert small[:, 9].isfinite().all()
    assert resize_to(x, (30, 20)) is x
    ours = resize_to(torch.ones(1, 17, 31), (8, 8))
    assert torch.allclose(ours, torch.ones(1, 8, 8))


def test_a_stopped_training_goes_on(trained: tuple[Path, Path, Result], tmp_path: Path) -> None:
    """Interrupted as by Ctrl-C, it leaves a checkpoint, says so, and ends where an uninterrupted one ends."""
    images, _, _ = trained
    options = ["--budget", "10steps", "--device", "cpu", "--batch-size", "4", "--seed", "3", *SMALL]
    models = [tmp_path / name for name in ("whole", "stopped")]
    whole = call("train", images, "-o", models[0], *options)
    assert whole.exit_code == 0, whole.output
    command = ("train", str(images), "-o", str(models[1]), *options)
    said = interrupted(tmp_path / "stopped.checkpoint", models[1], *command)
    assert "stopped; call it again to go on where it was" in said
    again = call(*command)
    assert again.exit_code == 0, again.output
    first, second = (misconv.load(model).state_dict() for model in models)
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    assert not list(tmp_path.glob("*.checkpoint*"))


def test_the_same_from_python(tmp_path: Path) -> None:
    """Labelled files, through a pipeline of torchvision, for a DataLoader with workers and for `fit_classifier`."""
    folder = stripes(tmp_path / "images", 12, 0)
    change = v2.Compose([v2.Resize(16), v2.RandomHorizontalFlip(1.0)])
    images = misconv.data.images(folder, labels="folders", transform=change)
    assert images.classes == ["lying", "standing"]
    x, label = images[0]
    assert (type(x), tuple(x.shape), label) == (torch.Tensor, (3, 16, 16), 0)
    assert 0 < x.isnan().double().mean() < 0.5
    batch, labels = next(iter(torch.utils.data.DataLoader(images, batch_size=12, num_workers=1)))
    assert batch.shape == (12, 3, 16, 16)
    assert labels.tolist() == [0] * 6 + [1] * 6
    density = misconv.UNetDMFA(3, rank=1, widths=(4, 4), depths=(1, 1))
    misconv.fit_density(density, images, steps=2, validation=0.0, progress=False)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    network = misconv.convert(nn.Sequential(*layers), density)
    history = misconv.training.fit_classifier(
        network, images, validation_inputs=images.only([0, 7]), steps=6, batch_size=4, learning_rate=None,
        augment="shift", progress=False,
    )  # fmt: skip
    assert {"loss", "accuracy", "validation_accuracy", "validation_nll"} <= history[history.kept].keys()
    (tmp_path / "t.csv").write_text("000.png,a\n")
    with pytest.raises(ValueError, match=r"every file must be named in t.csv, but lying/002.png is not"):
        misconv.data.images(folder, labels=tmp_path / "t.csv")
    with pytest.raises(TypeError, match="transform must be a function"):
        misconv.data.images(folder, transform=3)  # type: ignore[arg-type]
    for arguments, message in (
        ({"augment": "turn"}, "augment must be one of"),
        ({"inputs": torch.rand(4, 3, 8, 8), "steps": 3}, "inputs must be a Dataset for steps"),
        ({"labels": torch.zeros(12, dtype=torch.int64)}, "labels must be None where inputs is a Dataset"),
        ({"inputs": misconv.data.images(folder)}, "inputs must yield pairs"),
    ):
        given = {"inputs": images, "progress": False, **arguments}
        with pytest.raises((TypeError, ValueError), match=message):
            misconv.training.fit_classifier(network, given.pop("inputs"), **given)  # type: ignore[arg-type]

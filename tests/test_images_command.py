"""`misconv fit`, `impute` and `assess` on a user's own files, as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import misconv
from misconv import cli
from misconv._train import cpu_by_default
from misconv.images import parse_budget
from tests.stopping import interrupted


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    with cpu_by_default():
        yield


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [*map(str, arguments)], prog_name="misconv")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Eight PNG files of 24×20 with a transparent square each."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(8):
        smooth = np.add.outer(np.arange(24), np.arange(20))[..., None] * [3, 2, 1] + generator.integers(0, 30, 3)
        pixels = np.dstack([smooth.astype(np.uint8), np.full((24, 20), 255, np.uint8)])
        y, x = generator.integers(0, 14, 2)
        pixels[y : y + 6, x : x + 6] = 0
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


QUICK = ("--budget", "4steps", "--device", "cpu")


def test_from_pictures_to_filled_ones(pictures: Path, tmp_path: Path) -> None:
    density, out, sd = tmp_path / "density.safetensors", tmp_path / "out", tmp_path / "sd"
    made = call("fit", pictures, "-o", density, *QUICK)
    assert made.exit_code == 0, made.output
    assert f"Density: {density}" in made.output
    assert [path.name for path in tmp_path.iterdir() if "checkpoint" in path.name] == []
    assert isinstance(misconv.load(density), misconv.UNetDMFA)
    filled = call("impute", pictures, "-o", out, "--density", density, "--sd", sd, "--samples", 2, "--device", "cpu")
    assert filled.exit_code == 0, filled.output
    assert "8 filled" in filled.output
    for path in pictures.iterdir():
        before, after = (np.asarray(Image.open(folder / path.name)) for folder in (pictures, out))
        seen = before[..., 3] > 0
        assert np.array_equal(after[seen], before[seen])
        assert (after[..., 3] == 255).all()
        deviation = np.load(sd / path.with_suffix(".npy").name)
        assert (deviation[:, seen] == 0).all()
        assert (deviation[:, ~seen] > 0).all()
        samples = [np.asarray(Image.open(out / f"sample-{number}" / path.name)) for number in (1, 2)]
        assert (samples[0][~seen] != samples[1][~seen]).any()
        assert np.array_equal(samples[0][seen], before[seen])
    report = call("assess", pictures, "--density", density, "--device", "cpu", "--json")
    assert report.exit_code == 0, report.output
    assert 4 <= json.loads(report.stdout)["images"] <= 8  # of which something can be hidden
    shown = call("assess", pictures, "--density", density, "--device", "cpu")
    assert "RMSE" in shown.output


def test_without_a_density_one_is_learned_and_kept(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = call("impute", pictures, "-o", out, *QUICK, "--json")
    assert first.exit_code == 0, first.output
    assert len(json.loads(first.stdout)["done"]) == 8
    (out / "3.png").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.png")}
    second = call("impute", pictures, "-o", out, *QUICK)
    assert "1 filled, 7 were there already" in second.output
    assert "going on with" in second.output
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.png")}
    assert after.items() >= before.items()
    assert len(after) == 8


def test_a_folder_is_filled_by_one_density(pictures: Path, tmp_path: Path) -> None:
    densities = [tmp_path / f"{seed}.safetensors" for seed in (0, 1)]
    for seed, density in enumerate(densities):
        assert call("fit", pictures, "-o", density, *QUICK, "--seed", seed).exit_code == 0
    fill = ("impute", pictures, "-o", tmp_path / "out", "--device", "cpu", "--density")
    assert "8 filled" in call(*fill, densities[0]).output
    assert "8 were there already" in call(*fill, densities[0]).output
    refused = call(*fill, densities[1])
    assert refused.exit_code == 2
    assert "--out must be a folder of images that this density has filled, got" in refused.stderr
    assert "8 filled" in call(*fill, densities[1], "--overwrite").output
    assert "8 were there already" in call(*fill, densities[1]).output


@pytest.mark.parametrize(("slope", "shift"), [(1.0, 280.0), (1 / 255, 0.0)])
def test_other_units_than_those_of_the_density_are_told(
    slope: float, shift: float, pictures: Path, tmp_path: Path
) -> None:
    density = tmp_path / "density.safetensors"
    learned = call("fit", pictures, "-o", density, *QUICK)
    assert "learned for 4 steps; RMSE of hidden pixels" in learned.output
    others = tmp_path / "others"
    others.mkdir()
    with Image.open(pictures / "0.png") as opened:
        pixels = np.asarray(opened).astype(np.float32)
    values = slope * pixels[..., :3] + shift
    values[pixels[..., 3] == 0] = np.nan
    np.save(others / "0.npy", values)
    told = "are they in the same units?"
    sd = tmp_path / "sd"
    filled = call("impute", others, "-o", tmp_path / "out", "--density", density, "--device", "cpu", "--sd", sd)
    assert told in filled.output
    assert np.array_equal(np.load(sd / "0.npy") > 0, np.isnan(values)), "with the axes of the array itself"
    assert f"the images have values from {np.nanmin(values):.4g} to {np.nanmax(values):.4g}" in filled.output
    usual = call("impute", pictures, "-o", tmp_path / "usual", "--density", density, "--device", "cpu")
    assert told not in usual.output


def test_images_of_several_sizes_are_assessed(pictures: Path, tmp_path: Path) -> None:
    density = tmp_path / "density.safetensors"
    assert call("fit", pictures, "-o", density, *QUICK).exit_code == 0
    with Image.open(pictures / "0.png") as opened:
        opened.resize((33, 40), Image.Resampling.NEAREST).save(pictures / "large.png")
    report = call("assess", pictures, "--density", density, "--device", "cpu")
    assert report.exit_code == 0, report.output
    assert "the images have several sizes: squares are hidden" in report.output
    assert "claimed / real" in report.output


def test_a_network_is_no_density(pictures: Path, tmp_path: Path) -> None:
    network = tmp_path / "network.safetensors"
    density = misconv.UNetDMFA(3, widths=(8,), depths=(1,))
    converted = misconv.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()), density)
    misconv.save(converted, network)
    for command in (("assess", pictures), ("impute", pictures, "-o", tmp_path / "out")):
        refused = call(*command, "--density", network, "--device", "cpu")
        assert refused.exit_code == 2, refused.output
        assert f"--density must be a file that misconv fit has written, got {network}" in refused.stderr


def test_files_that_fail_do_not_stop_the_others(pictures: Path, tmp_path: Path) -> None:
    (pictures / "truncated.png").write_bytes((pictures / "0.png").read_bytes()[:100])
    (pictures / "empty.png").write_bytes(b"")
    Image.fromarray(np.zeros((24, 20), np.uint8)).save(pictures / "grey.png")
    Image.fromarray(np.zeros((24, 20, 4), np.uint8)).save(pictures / "void.png")
    whole = np.full((24, 20, 4), 255, np.uint8)
    Image.fromarray(whole).save(pictures / "whole.png")
    done = call("impute", pictures, "-o", tmp_path / "out", *QUICK)
    assert done.exit_code == 1
    assert "8 filled, 1 had no hole, 4 failed" in done.output
    assert "4 of 13 files failed, see above" in done.output
    for reason in (
        "truncated.png: truncated.png is damaged",
        "empty.png: empty.png is",
        "grey.png has 1 band, and the density knows images of 3",
        "void.png has no pixel that was seen",
    ):
        assert reason in done.output, done.output
    assert (tmp_path / "out" / "whole.png").read_bytes() == (pictures / "whole.png").read_bytes()
    record = json.loads((tmp_path / "out" / "misconv-impute.json").read_text())
    assert len(record["failed"]) == 4
    assert not list((tmp_path / "out").glob(".*"))


def test_names_do_not_collide_and_results_are_not_read_again(pictures: Path, tmp_path: Path) -> None:
    with Image.open(pictures / "0.png") as opened:
        opened.convert("RGB").save(pictures / "0.jpg")
        opened.convert("RGB").save(pictures / "photo.jpeg")
    for filled in ("10 filled", "10 were there already"):  # the JPEG files as PNG
        done = call("impute", pictures, "-o", pictures / "filled", "--sd", pictures / "sd", *QUICK)
        assert done.exit_code == 0, done.output
        assert filled in done.output
    names = {path.name for path in (pictures / "filled").glob("*.png")}
    assert names == {*(f"{number}.png" for number in range(8)), "0.jpg.png", "photo.png"}
    refused = call("impute", pictures, "-o", tmp_path / "x", "--sd", tmp_path / "x")
    assert refused.exit_code == 2
    assert "--sd must be another folder than --out" in refused.output


def test_places_are_refused_before_any_work(pictures: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    file = tmp_path / "file"
    file.write_text("x")
    for arguments, message in (
        (("impute", pictures, "-o", other), "--out must be new or empty"),
        (("impute", pictures, "-o", file / "deeper"), "--out must be"),
        (("impute", tmp_path / "nothing", "-o", tmp_path / "new"), "there is no such file"),
        (("impute", pictures, "-o", tmp_path / "new", "--nodata", "many"), "--nodata must be a number, got 'many'"),
        (("impute", pictures, "-o", tmp_path / "new", "--density", file), "cannot load"),
        (("impute", pictures, "-o", tmp_path / "new", "--samples", "-1"), "--samples must be 0 or more, got -1"),
        (("fit", pictures, "-o", tmp_path), "--out must be a file, got the folder"),
        (("fit", pictures, "-o", tmp_path / "d", "--budget", "soon"), "--budget must be a time or"),
        (("fit", pictures, "-o", tmp_path / "d", "--hole-is", "grey"), 'hole_is must be "white" or "black"'),
    ):
        refused = call(*arguments)
        assert refused.exit_code == 2, (arguments, refused.output)
        assert message in refused.output, refused.output
        assert "Traceback" not in refused.output
    assert (other / "mine.txt").read_text() == "mine"


def test_masks_that_seem_to_be_inverted_are_named(pictures: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    masks.mkdir()
    for path in pictures.iterdir():
        hole = np.zeros((24, 20), np.uint8)
        hole[4:9, 4:9] = 255
        Image.fromarray(hole).save(masks / path.name)
    fitted = call("fit", pictures, "-o", tmp_path / "a", "--masks", masks, "--hole-is", "black", *QUICK)
    assert "of every image is missing; if a hole is white there, say --hole-is white" in fitted.output
    fitted = call("fit", pictures, "-o", tmp_path / "b", "--masks", masks, *QUICK)
    assert "--hole-is" not in fitted.output
    assert fitted.exit_code == 0


@pytest.mark.parametrize(
    ("text", "budget"),
    [("90s", {"minutes": 1.5}), ("5min", {"minutes": 5}), ("0.5h", {"minutes": 30}), ("200steps", {"steps": 200})],
)
def test_budgets(text: str, budget: dict[str, float]) -> None:
    assert parse_budget(text) == budget


def test_a_stopped_fit_goes_on(pictures: Path, tmp_path: Path) -> None:
    """Interrupted as by Ctrl-C after its first record, it leaves a checkpoint, says so, and continues from there."""
    density = tmp_path / "density.safetensors"
    command = ("fit", str(pictures), "-o", str(density), "--budget", "40steps", "--device", "cpu")
    checkpoint = tmp_path / "density.safetensors.checkpoint"
    said = interrupted(checkpoint, density, *command)
    assert "stopped; call it again to go on where it was" in said
    assert checkpoint.exists()
    again = call(*command)
    assert again.exit_code == 0, again.output
    assert density.exists()
    assert not checkpoint.exists()


def test_several_processes_share_the_files(pictures: Path, tmp_path: Path) -> None:
    """By torchrun: together they learn one density, each fills its share, and the first one alone speaks."""
    (pictures / "broken.png").write_bytes((pictures / "0.png").read_bytes()[:90])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "misconv"]
    command = [*launch, "impute", str(pictures), "-o", str(tmp_path / "out"), "--sd", str(tmp_path / "sd"), *QUICK]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout == f"8 filled, 1 failed. Images: {tmp_path / 'out'}\n"
    assert done.stderr.count("broken.png is damaged") == 1
    assert "Initializing distributed" not in done.stderr
    assert len(list((tmp_path / "out").glob("*.png"))) == len(list((tmp_path / "sd").glob("*.npy"))) == 8
    assert len(json.loads((tmp_path / "out" / "misconv-impute.json").read_text())["done"]) == 8
    alone = call("impute", pictures, "-o", tmp_path / "alone", "--density", tmp_path / "out" / "density.safetensors", "--device", "cpu")  # fmt: skip
    assert alone.exit_code == 1
    for path in (tmp_path / "alone").glob("*.png"):
        one, other = (np.asarray(Image.open(each)).astype(int) for each in (path, tmp_path / "out" / path.name))
        assert abs(one - other).max() <= 1  # batches of other sizes round otherwise


def test_bands_in_files_of_their_own_come_back_so(tmp_path: Path) -> None:
    """Also a band that an image lacks, which is missing as a whole."""
    folder = tmp_path / "scenes"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(6):
        plane = np.add.outer(np.arange(20.0), np.arange(20.0)) + draw.uniform(0, 9)
        plane[4:8, 5:9] = np.nan
        for band in range(3):
            if (number, band) != (2, 1):
                np.save(folder / f"{number}_b{band}.npy", (plane * (band + 1)).astype(np.float32))
    out, sd = tmp_path / "out", tmp_path / "sd"
    done = call("impute", folder, "-o", out, "--sd", sd, "--bands", "b0,b1,b2", "--samples", 1, *QUICK)
    assert done.exit_code == 0, done.output
    assert "6 filled" in done.output
    for kind in (out, sd, out / "sample-1"):
        assert len(list(kind.glob("*.npy"))) == 18
    for path in folder.iterdir():
        before, after = np.load(path), np.load(out / path.name)
        assert after.shape == before.shape
        seen = ~np.isnan(before)
        assert np.array_equal(after[seen], before[seen])
        assert np.isfinite(after).all()
    assert (np.load(sd / "2_b1.npy") > 0).all()

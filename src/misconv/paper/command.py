"""The paper's tables, each from one command, and its figures: `misconv table`.

Every density and every classifier is trained once and kept in a folder; a table that was stopped goes on where it was,
and one that is complete only prints. The command line is `misconv.cli`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from misconv import data, store
from misconv._store import check_output_folder, check_replaceable, read_json
from misconv._train import one_device
from misconv.bench import command as bench
from misconv.paper import evidence, tables
from misconv.paper.cache import Cache
from misconv.paper.classification import Experiment
from misconv.paper.features import inception_file
from misconv.paper.generation import ROWS, Generation, check_generation, draw_generation, is_drawn, quick_generation
from misconv.paper.generation_tables import NUMBERS, PAPERS, make_generation
from misconv.paper.illustrate import check_drawable, illustrate
from misconv.paper.letters import check_methods, quick_recipe, run_letter, shapes_of_table
from misconv.paper.methods import METHODS, method_named
from misconv.paper.quality import SMALLEST, check_metrics
from misconv.paper.scores import Record
from misconv.paper.settings import SETTINGS, Settings
from misconv.paper.shares import draw_shares

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["FIGURES", "PICTURES", "TABLES", "Plan", "draw", "fabric_on", "prepare", "run", "table", "write"]

T = TypeVar("T")

FIGURES, FIGURE_2, FIGURE_A = "figures", "figure-2", "figure-A"
PICTURES = (FIGURES, FIGURE_2)  # drawn without a table
GENERATION = (*map(str, NUMBERS), FIGURE_2)
TABLES = (*map(str, sorted((*tables.NUMBERS, *NUMBERS))), *evidence.LETTERS, FIGURE_2, FIGURES)
WITHOUT_LABELS = (*GENERATION, "7")
# The data sets and the methods of a table; those that are not here have the paper's three, and all.
DATASETS: dict[str, tuple[str, ...]] = {
    "7": ("svhn",),
    "9": ("mnist",),
    "10": (),
    "D": ("svhn", "cifar10"),
    "E": ("mnist",),
    FIGURE_A: ("svhn", "cifar10"),
    **dict.fromkeys(GENERATION, PAPERS),
}
USUAL = ("mnist", "svhn", "cifar10")
SOME = {"6": ("misconv_smfa", "misconv_dmfa"), "8": ("mfa", "misconv_dmfa")}
# `--quick`: the number of images for training and for the test, and the epochs of each part.
FEW_IMAGES = (600, 200)
FEW_EPOCHS = {"dmfa": 1, "smfa": 2, "classifier": 1, "acflow": 1, "wae": 1}
# A tenth of them has to choose the epoch, and no pixel may be missing in all of them.
FEWEST = 100
MOST_SEEDS = 1000


@dataclass(frozen=True, eq=False)
class Plan:
    """A table that can be made: everything asked for is there."""

    table: str
    images: list[data.ImageSet]
    seeds: int
    folder: Path
    device: str | None  # None: a GPU where there is one
    quick: bool
    methods: tuple[str, ...] = ()  # those to train, all if none is named
    inception: str | Path | None = None  # weights

    def file(self, kind: str) -> Path:
        """Where something of this table goes; a quick run, or one of other data, does not replace what took long."""
        names = tuple(images.name for images in self.images)
        named = [self.table] if self.table == FIGURE_A else ["table", self.table]
        parts = [*named, *(names if names != DATASETS.get(self.table, USUAL) else ()), *self.methods]
        return self.folder / f"{'-'.join([*parts, *['quick'] * self.quick])}{kind}"

    def pictures(self, dataset: str) -> Path:
        """The folder for those of a data set."""
        return self.folder / "-".join([self.table, dataset, *["quick"] * self.quick])

    def picture(self, dataset: str) -> Path:
        """The file, where there is one for each data set."""
        folder = self.pictures(dataset)
        return folder.with_name(f"{folder.name}.png")


# What was asked for --------------------------------------------------------------------------------------------------


def prepare(
    number: str,
    datasets: Sequence[str] = (),
    files: Sequence[str | Path] = (),
    *,
    seeds: int = 3,
    folder: str | Path = "misconv-paper",
    device: str | None = None,
    quick: bool = False,
    methods: Sequence[str] = (),
    inception: str | Path | None = None,
) -> Plan:
    """Check what was asked for and load the data; an error says what cannot be had, before any work.

    Args:
        number: one of `TABLES`.
        datasets: names, of `misconv.data.NAMES` or with a file each any others; by default those of the paper's table.
        files: an .npz for each data set, see `misconv.data.load`, or none.
        seeds: trainings of every method.
        folder: for finished work; the figures, too, go there.
        device: "cuda" or "cpu"; cuda where there is one if left out.
        quick: few images, few epochs and small networks.
        methods: the rows of Tables 3, 4 and 5, or of one of our own, that are to be trained; all if none is named.
        inception: a file with the weights of Inception, for Table 3.
    """
    if number not in TABLES:
        known = f"{', '.join(TABLES[:-1])} or {TABLES[-1]}"
        raise ValueError(f"the table must be {known}, got {number!r}")
    if inception is not None and number not in GENERATION:
        raise ValueError(f"--inception is for the tables 3, 4 and 5 and for figure-2, got table {number}")
    check_methods(number, methods)
    names = _names(number, datasets, files)
    if not 1 <= seeds <= MOST_SEEDS:
        raise ValueError(f"--seeds must be between 1 and {MOST_SEEDS}, got {seeds}")
    _check_device(device)
    folder = _folder(folder)
    if number == "7" or number in (*GENERATION, *evidence.LETTERS):
        check_metrics()
    given: Sequence[str | Path | None] = files or [None] * len(names)
    images = [_load(number, name, file) for name, file in zip(names, given, strict=True)]
    if number in PICTURES:
        check_drawable(images)
    for each in images if number in GENERATION else ():
        check_generation(each, inception)
    few = [_few(each) for each in images] if quick else images
    plan = Plan(number, few, seeds, folder, device, quick, tuple(methods), inception)
    _check_files(plan)
    if number == "10" and not plan.file("-bench.json").exists():
        bench.choose(device, ["table10"], plan.file("-bench.json"))
    return plan


def _folder(name: str | Path) -> Path:
    """A place that can be written; asked before data are loaded, or even downloaded."""
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:  # nobody has that name
        raise ValueError(f"--out must be a folder, got {name}: {error}") from error
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--out must be a folder, got {folder}, which is a file")
    check_output_folder("--out", folder)
    return folder


def _check_files(plan: Plan) -> None:
    """The table replaces nothing that is not one."""
    record, text = plan.file(".json"), plan.file(".md")
    content = read_json(record)
    check_replaceable("--out", record, isinstance(content, dict) and content.keys() == {"records"})
    ours = text.is_file() and text.read_bytes()[:2] == b"# " and record.exists()
    check_replaceable("--out", text, ours)
    if plan.table == FIGURE_A:
        check_replaceable("--out", plan.file(".png"), record.exists())
    for images in plan.images if plan.table == FIGURE_2 else ():
        picture = plan.picture(images.name)
        check_replaceable("--out", picture, is_drawn(picture))


def _names(number: str, datasets: Sequence[str], files: Sequence[str | Path]) -> list[str]:
    if number == "10" and (datasets or files):
        raise ValueError(f"table 10 times the layer, and takes no {'--dataset' if datasets else '--data'}")
    names = list(datasets or DATASETS.get(number, USUAL))
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--dataset must name each data set once, got {name} {names.count(name)} times")
        if name not in data.NAMES and not files and not datasets:
            raise ValueError(
                f"--dataset must be given for {number}, because {name}, one of the paper's, comes only with --data "
                f"FILE; for example --dataset {names[0]}"
            )
        if name not in data.NAMES and not files:
            raise ValueError(
                f"--dataset must be one of {', '.join(data.NAMES)}, or come with --data FILE, got {name!r}"
            )
    if files and len(files) != len(names):
        count = f"{len(files)} file{'s' * (len(files) > 1)} for {', '.join(names)}"
        raise ValueError(f"--data must be given once for each --dataset, got {count}")
    return names


def _check_device(device: str | None) -> None:
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device must be cuda or cpu, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch can use, and there is none; --device cpu works anywhere")


def _load(number: str, name: str, file: str | Path | None) -> data.ImageSet:
    try:
        images = data.load(name, file)
    except TypeError as error:  # of arrays: the user's, like all that is wrong with a file
        raise ValueError(str(error)) from error
    if len(images.train) < FEWEST:
        raise ValueError(f"{name} must have at least {FEWEST} training images, got {len(images.train)}")
    if number not in WITHOUT_LABELS:
        images.labels  # noqa: B018  # says that there are none
    height, width = images.shape[1:]
    least = (
        SMALLEST if number in WITHOUT_LABELS else 2
    )  # of smaller ones there would be no SSIM, or nothing left to see
    if min(height, width) < least:
        raise ValueError(f"{name} must have images of at least {least}×{least} pixels, got {height}×{width}")
    return images


def _few(images: data.ImageSet) -> data.ImageSet:
    """Some of the images, drawn at random, for they may be sorted by class."""

    def some(count: int, most: int) -> Tensor:
        return torch.randperm(count, generator=torch.Generator().manual_seed(0), device="cpu")[:most]

    train, test = (some(len(part), most) for part, most in zip((images.train, images.test), FEW_IMAGES, strict=True))
    fewer = replace(images, train=images.train[train], test=images.test[test])
    if images.train_labels is None or images.test_labels is None:
        return fewer
    return replace(fewer, train_labels=images.train_labels[train], test_labels=images.test_labels[test])


# The work ------------------------------------------------------------------------------------------------------------


def run(plan: Plan, *, progress: bool = False, say: Callable[[str], None] = lambda line: None) -> list[Record]:
    """All records of a table; what is not there yet is trained, or measured.

    An OSError says that a file in the folder cannot be used, or that one cannot be written.
    """
    with _files_of(plan.folder):
        if plan.table == "10":
            return [_times(plan, say)]
    return _each(plan, lambda experiment: _units(plan, experiment), progress, say)


def draw(plan: Plan, *, progress: bool = False, say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """The paper's figures with images of every data set; what they need and is not there yet is trained."""

    def figures(experiment: Experiment) -> list[Path]:
        if plan.table == FIGURE_2:
            return [draw_generation(_generation(plan, experiment), plan.picture(experiment.data.name))]
        folder = plan.pictures(experiment.data.name)
        folder.mkdir(exist_ok=True)
        return illustrate(experiment, folder)

    return _each(plan, figures, progress, say)


def _each(plan: Plan, work: Callable[[Experiment], list[T]], progress: bool, say: Callable[[str], None]) -> list[T]:
    """What comes of every data set, with every shape that the table has."""
    with _files_of(plan.folder):
        cache, fabric = Cache(plan.folder), fabric_on(plan.device)
    with _files_of(plan.folder), _one_thread(fabric.device):
        found = []
        for images in plan.images:
            few = _quick_settings(images.name) if plan.quick else None
            for shape in shapes_of_table(plan.table):
                found += work(Experiment(images, shape, cache, fabric, settings=few, progress=progress, say=say))
        return found


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, so that sums, and with them the table, do not depend on the number of cores."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _units(plan: Plan, experiment: Experiment) -> list[Record]:
    """The records of one data set with one shape."""
    if plan.table in GENERATION:
        generation = _generation(plan, experiment)
        generation.run(plan.methods or ROWS, range(plan.seeds))
        return generation.known(ROWS, range(plan.seeds))  # with those of an earlier call
    if plan.table in evidence.LETTERS:
        shorter = quick_recipe(experiment.data.name, FEW_EPOCHS["classifier"]) if plan.quick else None
        return run_letter(plan.table, experiment, shorter, plan.methods, range(plan.seeds))
    if plan.table == "7":
        return [experiment.quality(kind) for kind in ("smfa", "dmfa", "acflow")]
    seeds, methods = range(plan.seeds), SOME.get(plan.table, [method.name for method in METHODS])
    if experiment.shape != "square":  # a network that takes complete images is the same for all shapes
        methods = [name for name in methods if not method_named(name).takes_complete]
    return experiment.run(methods, seeds)


def _generation(plan: Plan, experiment: Experiment) -> Generation:
    weights = inception_file(plan.inception, experiment.data)
    if plan.quick:
        return quick_generation(experiment, FEW_EPOCHS["wae"], weights)
    return Generation(experiment, inception=weights)


def _quick_settings(name: str) -> Settings:
    """Those of the digits, with few epochs: networks of the paper's sizes take minutes on a CPU for a few images."""
    small, classifier = SETTINGS["digits"], SETTINGS.get(name, SETTINGS["svhn"]).classifier
    return Settings(
        dmfa=replace(small.dmfa, epochs=FEW_EPOCHS["dmfa"]),
        smfa=replace(small.smfa, epochs=FEW_EPOCHS["smfa"]),
        classifier=replace(classifier, epochs=FEW_EPOCHS["classifier"]),
        acflow=replace(small.acflow, epochs=FEW_EPOCHS["acflow"]),
        unet=replace(small.unet, epochs=FEW_EPOCHS["dmfa"]),
    )


def fabric_on(device: str | None) -> Fabric:
    """One process on a device, whose matrix products on a GPU may take TF32, as its convolutions do."""
    if device != "cpu" and torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # before Fabric looks, which would recommend it
    return one_device(device)


def _times(plan: Plan, say: Callable[[str], None]) -> Record:
    """The benchmark of the layer, measured the first time."""
    path = plan.file("-bench.json")
    if not path.exists():
        device, sections = bench.choose(plan.device, ["table10"], path)
        bench.write(bench.run(device, sections, quick=plan.quick, say=say), path)
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        where = "cpu" if record["versions"]["cuda"] is None else "cuda"
        tables.make(10, [], benchmark=record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be a record of misconv bench, got something else; move it away") from error
    if plan.device not in (None, where):
        raise ValueError(f"{path} must have been measured on {plan.device}, got {record['device']}; use another --out")
    return record


@contextlib.contextmanager
def _files_of(folder: Path) -> Iterator[None]:
    """A file in the folder that cannot be used is the user's to move away; another ValueError is a mistake of ours."""
    try:
        yield
    except ValueError as error:
        parts = ("records", "densities", "layers", "networks", "running", "table-10")
        if not any(str(folder / part) in str(error) for part in parts):
            raise
        made_again = "; move it away to have it made again" if str(error).startswith("cannot load") else ""
        raise OSError(f"{error}{made_again}") from error


# The result ----------------------------------------------------------------------------------------------------------


def table(plan: Plan, records: Sequence[Record]) -> tables.Table:
    """The table of these records."""
    names = [images.name for images in plan.images]
    if plan.table == "10":
        return tables.make(10, [], benchmark=records[0])  # which says by itself that it was quick
    if plan.table in evidence.LETTERS:
        made = evidence.make_letter(plan.table, records, names)
    elif plan.table in GENERATION:
        made = make_generation(int(plan.table), records, names)
    else:
        made = tables.make(int(plan.table), records, names)
    few = "A quick run with few images, few epochs and small networks: these numbers mean nothing."
    return replace(made, notes=[*made.notes, few]) if plan.quick else made


def write(plan: Plan, made: tables.Table, records: Sequence[Record]) -> Path:
    """The table as markdown and its records as JSON, each whole or not at all; returns where the records are."""
    content = json.dumps({"records": records}, indent=1, ensure_ascii=False)
    store.write_bytes(plan.file(".md"), f"# {made.heading}\n\n{made.markdown()}\n".encode())
    store.write_bytes(plan.file(".json"), f"{content}\n".encode())
    if plan.table == FIGURE_A:
        draw_shares(records, plan.file(".png"))
    return plan.file(".json")

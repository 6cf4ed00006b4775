"""The commands for a user's own images: `misconv fit`, `impute` and `assess`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from misconv._terminal import interruptible, note, refuse, report_errors

if TYPE_CHECKING:
    from torch.nn import Module

    from misconv.data import ImageFiles
    from misconv.images import Outcome

__all__ = ["assess", "fit", "impute"]

Images = Annotated[
    list[str], typer.Argument(metavar="IMAGES", help="Files, folders or patterns: PNG, JPEG, WebP, TIFF, npy, npz.")
]
Nodata = Annotated[
    str | None, typer.Option(metavar="NUMBER", help='A value that means "no reading", besides what the files say.')
]
Masks = Annotated[
    Path | None, typer.Option(metavar="PATH", help="A folder of pictures of the holes, by name, or one for all.")
]
HoleIs = Annotated[str, typer.Option(metavar="white|black", help="What a hole is in --masks.")]
Budget = Annotated[str, typer.Option(metavar="TIME", help="How long to learn: 90s, 5min, 1h or 2000steps.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def fit(
    images: Images,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File for the density.")],
    budget: Budget = "2min",
    components: Annotated[int, typer.Option(help="K: more for residuals with heavy tails.")] = 1,
    rank: Annotated[int, typer.Option(help="L: how many ways in which missing pixels vary together.")] = 4,
    nodata: Nodata = None,
    masks: Masks = None,
    hole_is: HoleIs = "white",
    device: Device = None,
    precision: Annotated[str, typer.Option(help="32-true, bf16-mixed or 16-mixed.")] = "32-true",
    seed: Annotated[int, typer.Option(help="The same seed gives the same density.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn what missing pixels may be, from incomplete images alone.

    Stopped, it continues when it is called again in the same way.

    Example: misconv fit scans/ -o scans.safetensors --budget 5min
    """
    with _own_images("stopped; call it again to go on where it was"):
        from misconv.images import FitSettings, fit_files, parse_budget
        from misconv.store import save

        checkpoint = out.with_name(out.name + ".checkpoint")
        settings = FitSettings(
            parse_budget(budget), components, rank, seed, device, precision, checkpoint,
            progress=sys.stdout.isatty() and not as_json,
        )  # fmt: skip
        dataset = _dataset(images, nodata, masks, hole_is)
        _check_new_file(out)
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        density, history, outcome = fit_files(dataset, settings, note)
        save(density, out)
        checkpoint.unlink(missing_ok=True)
        record = {"density": str(out), "history": history, **outcome.to_dict()}
        _tell(record, [_quality(history[-1]), f"Density: {out}"], as_json=as_json)
        _end(outcome)


def impute(
    images: Images,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder for the filled images.")],
    density: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `misconv fit` wrote; by default one is learned first.")
    ] = None,
    sd: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder for the standard deviations.")] = None,
    samples: Annotated[int, typer.Option(help="Completions to draw of every image, besides the mean.")] = 0,
    budget: Budget = "2min",
    nodata: Nodata = None,
    masks: Masks = None,
    hole_is: HoleIs = "white",
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Of the density, if one is learned, and of the samples.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files in the folder.")] = False,
    as_json: Json = False,
) -> None:
    """Fill the holes of images: each file comes back in its own format, with what was seen bit for bit.

    A JPEG comes back as PNG, which loses nothing. Stopped, it continues when it is called again.

    Example: misconv impute scans/ -o filled/ --sd deviations/
    """
    if samples < 0:
        raise refuse(f"--samples must be 0 or more, got {samples}")
    with _own_images("stopped; call it again to go on where it was"):
        from misconv.images import ImputeSettings, impute_files, prepare_folder

        terminal = sys.stdout.isatty() and not as_json
        if sd is not None and sd.resolve() == out.resolve():
            raise ValueError("--sd must be another folder than --out, got the same")
        dataset = _outside(_dataset(images, nodata, masks, hole_is), out, sd)
        prepare_folder("--out", out, overwrite)
        if sd is not None:
            prepare_folder("--sd", sd, overwrite)
        model = _density_for(dataset, density, out, budget, seed, device, progress=terminal)
        with _bar(terminal, len(dataset)) as advance:
            settings = ImputeSettings(out, sd, samples, seed, overwrite)
            outcome = impute_files(dataset, model, settings, note, advance)
        counts = [f"{len(outcome.done)} filled"]
        counts += [f"{len(outcome.complete)} had no hole"] if outcome.complete else []
        counts += [f"{len(outcome.kept)} were there already"] if outcome.kept else []
        counts += [f"{len(outcome.failed)} failed"] if outcome.failed else []
        _tell({"out": str(out), **outcome.to_dict()}, [f"{', '.join(counts)}. Images: {out}"], as_json=as_json)
        _end(outcome)


def assess(
    images: Images,
    density: Annotated[Path, typer.Option(metavar="FILE", help="What `misconv fit` wrote.")],
    limit: Annotated[int | None, typer.Option(help="Take at most this many images.")] = None,
    nodata: Nodata = None,
    masks: Masks = None,
    hole_is: HoleIs = "white",
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Of what is hidden.")] = 0,
    as_json: Json = False,
) -> None:
    """Tell how far a density can be believed: hide some of what is seen, and compare.

    Take images that it was not learned from.

    Example: misconv assess others/ --density scans.safetensors
    """
    with _own_images("stopped"):
        from misconv.images import assess_files

        dataset = _dataset(images, nodata, masks, hole_is)
        found, outcome = assess_files(dataset, _load_density(density, device), note, limit=limit, seed=seed)
        _tell({**found.to_dict(), **outcome.to_dict()}, [str(found)], as_json=as_json)
        _end(outcome)


@contextlib.contextmanager
def _own_images(stopped: str) -> Iterator[None]:
    """What is wrong with images and places can be corrected by the user."""
    with interruptible(stopped), report_errors(OSError), report_errors(ImportError):
        try:
            yield
        except ValueError as error:
            raise refuse(str(error)) from error


def _dataset(images: list[str], nodata: str | None, masks: Path | None, hole_is: str) -> ImageFiles:
    from misconv import data

    try:
        number = None if nodata is None else float(nodata)
    except ValueError:
        raise ValueError(f"--nodata must be a number, got {nodata!r}") from None
    found = data.images(images, nodata=number, masks=masks, hole_is=hole_is)
    if masks is not None:
        _check_polarity(found, hole_is)
    return found


def _outside(images: ImageFiles, *folders: Path | None) -> ImageFiles:
    """Without what an earlier call has written below the folder that is read."""
    ours = [folder.resolve() for folder in folders if folder is not None]
    kept = [n for n, path in enumerate(images.paths) if not any(path.resolve().is_relative_to(own) for own in ours)]
    if not kept:
        raise ValueError("IMAGES must be other files than those in --out")
    return images.only(kept)


def _check_polarity(images: ImageFiles, hole_is: str) -> None:
    """White holes are easily taken for black ones: whoever means them would hardly have most of every image missing."""
    shares = []
    for index in range(min(len(images), 8)):
        with contextlib.suppress(ValueError, OSError):  # told later, with all others
            shares.append(images.stored(index).missing)
    if shares and min(shares) > 0.75:
        other = "black" if hole_is == "white" else "white"
        note(
            f"by --masks at least {100 * min(shares):.0f} % of every image is missing; if a hole is {other} there, say "
            f"--hole-is {other}"
        )


def _density_for(
    dataset: ImageFiles, file: Path | None, out: Path, budget: str, seed: int, device: str | None, *, progress: bool
) -> Module:
    """A density from a file; or one that is learned, and kept beside the filled images for the next call."""
    from misconv.images import FitSettings, fit_files, parse_budget
    from misconv.store import save

    kept = out / "density.safetensors"
    if file is None and kept.exists():
        note(f"going on with {kept}")
        file = kept
    if file is None:
        checkpoint = out / "density.checkpoint"
        settings = FitSettings(parse_budget(budget), seed=seed, device=device, checkpoint=checkpoint, progress=progress)
        learned, history, _ = fit_files(dataset, settings, note)
        note(_quality(history[-1]))
        save(learned, kept)
        checkpoint.unlink(missing_ok=True)
        file = kept
    return _load_density(file, device)


def _load_density(file: Path, device: str | None) -> Module:
    import torch

    from misconv.store import load

    model: Module = load(file)
    return model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _check_new_file(path: Path) -> None:
    from misconv._store import check_output_folder

    if path.is_dir():
        raise IsADirectoryError(f"--out must be a file, got the folder {path}")
    check_output_folder("--out", path.absolute().parent)


def _quality(record: dict[str, float]) -> str:
    if "validation_rmse" not in record:
        return "learned, from too few images to set some aside and measure"
    rmse, nearest = (f"{record[f'validation_{name}']:.4g}" for name in ("rmse", "nearest_rmse"))
    half, most = (f"{100 * record[f'validation_coverage_{level}']:.0f}" for level in (50, 90))
    return (
        f"RMSE of hidden pixels {rmse}, of nearest-pixel fill {nearest}; "
        f"{half} % and {most} % of them inside the intervals of 50 % and 90 %"
    )


def _tell(record: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    if as_json:
        import json

        lines = [json.dumps(record, indent=1)]
    for line in lines:
        typer.echo(line)


def _end(outcome: Outcome) -> None:
    """A file that failed makes the exit code 1."""
    if outcome.failed:
        total = sum(map(len, (outcome.done, outcome.complete, outcome.kept, outcome.failed)))
        note(f"{len(outcome.failed)} of {total} files failed, see above")
        raise typer.Exit(1)


@contextlib.contextmanager
def _bar(shown: bool, total: int) -> Iterator[Callable[[int], None]]:
    if not shown:
        yield lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("filling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("filling", total=total)
        yield lambda done: bar.update(task, completed=done)

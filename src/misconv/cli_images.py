"""The commands for a user's own images: `misconv fit`, `impute` and `assess`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from misconv._terminal import refuse
from misconv.cli_options import (
    Bands,
    Budget,
    Device,
    HoleIs,
    Images,
    Json,
    Masks,
    Nodata,
    Precision,
    Processes,
    Workers,
    check_new_file,
    end,
    open_images,
    own_images,
    quality,
    started,
    tell,
)

if TYPE_CHECKING:
    from misconv.data import ImageFiles
    from misconv.images import FitSettings

__all__ = ["assess", "fit", "impute"]

Components = Annotated[int, typer.Option(metavar="N", help="K: more for residuals with heavy tails.")]
Rank = Annotated[int, typer.Option(metavar="N", help="L: how many ways in which missing pixels vary together.")]

_GO_ON = "stopped; call it again to go on where it was"


def fit(
    images: Images,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File for the density.")],
    budget: Budget = "2min",
    components: Components = 1,
    rank: Rank = 4,
    nodata: Nodata = None,
    masks: Masks = None,
    hole_is: HoleIs = "white",
    bands: Bands = None,
    device: Device = None,
    precision: Precision = "32-true",
    workers: Workers = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same density.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn what missing pixels may be, from incomplete images alone.

    Stopped, it continues when it is called again in the same way.

    Example: misconv fit scans/ -o scans.safetensors --budget 5min
    """
    with own_images(_GO_ON), started(device, precision, as_json=as_json) as processes:
        from misconv.images import FitSettings, fit_files, parse_budget
        from misconv.store import save

        checkpoint = out.with_name(out.name + ".checkpoint")
        settings = FitSettings(
            parse_budget(budget), processes.fabric, components, rank, seed, workers, checkpoint, processes.terminal
        )
        dataset = open_images(images, nodata, masks, hole_is, bands, processes.say)
        processes.on_first(lambda: check_new_file("--out", out))
        density, history, outcome = fit_files(dataset, settings, processes.say)
        processes.join(outcome)
        if processes.first:
            save(density, out)
            checkpoint.unlink(missing_ok=True)
        record = {"density": str(out), "history": history, **outcome.to_dict()}
        tell(processes, record, [quality(history), f"Density: {out}"])
        end(processes, outcome)


def impute(
    images: Images,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder for the filled images.")],
    density: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `misconv fit` wrote; by default one is learned first.")
    ] = None,
    sd: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder for the standard deviations.")] = None,
    samples: Annotated[
        int, typer.Option(metavar="N", help="Completions to draw of every image, besides the mean.")
    ] = 0,
    budget: Budget = "2min",
    components: Components = 1,
    rank: Rank = 4,
    nodata: Nodata = None,
    masks: Masks = None,
    hole_is: HoleIs = "white",
    bands: Bands = None,
    device: Device = None,
    precision: Precision = "32-true",
    workers: Workers = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the density, if one is learned, and of the samples.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files in the folder.")] = False,
    as_json: Json = False,
) -> None:
    """Fill the holes of images: each file comes back in its own format, with what was seen bit for bit.

    A JPEG comes back as PNG, which loses nothing. Stopped, it continues when it is called again.

    Example: misconv impute scans/ -o filled/ --sd deviations/
    """
    if samples < 0:
        raise refuse(f"--samples must be 0 or more, got {samples}")
    with own_images(_GO_ON), started(device, precision, as_json=as_json) as processes:
        from misconv.images import (
            FitSettings,
            ImputeSettings,
            check_density,
            impute_files,
            keep_record,
            load_density,
            parse_budget,
        )

        dataset = _outside(open_images(images, nodata, masks, hole_is, bands, processes.say), out, sd)
        processes.on_first(lambda: _prepare_folders(out, sd, overwrite))
        learning = FitSettings(
            parse_budget(budget), processes.fabric, components, rank, seed, workers, out / "density.checkpoint",
            processes.terminal,
        )  # fmt: skip
        file = _density_for(dataset, density, out, learning, processes)
        fabric, model = processes.fabric, load_density(file, processes.fabric.device)
        mark = processes.on_first(lambda: check_density(out, file, overwrite))
        settings = ImputeSettings(out, sd, samples, seed, overwrite, fabric.global_rank, fabric.world_size)
        with processes.bar("filling", len(dataset)) as advance:
            outcome = impute_files(dataset, model, settings, processes.say, advance)
        processes.join(outcome)
        counts = [f"{len(outcome.done)} filled"]
        counts += [f"{len(outcome.complete)} had no hole"] if outcome.complete else []
        counts += [f"{len(outcome.kept)} were there already"] if outcome.kept else []
        counts += [f"{len(outcome.failed)} failed"] if outcome.failed else []
        tell(processes, {"out": str(out), **outcome.to_dict()}, [f"{', '.join(counts)}. Images: {out}"])
        processes.on_first(lambda: keep_record(out, outcome, mark))  # after the summary: the disk may be full
        end(processes, outcome)


def assess(
    images: Images,
    density: Annotated[Path, typer.Option(metavar="FILE", help="What `misconv fit` wrote.")],
    limit: Annotated[int | None, typer.Option(metavar="N", help="Take at most this many images.")] = None,
    nodata: Nodata = None,
    masks: Masks = None,
    hole_is: HoleIs = "white",
    bands: Bands = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what is hidden.")] = 0,
    as_json: Json = False,
) -> None:
    """Tell how far a density can be believed: hide some of what is seen, and compare.

    Take images that it was not learned from.

    Example: misconv assess others/ --density scans.safetensors
    """
    with own_images("stopped"), started(device, as_json=as_json) as processes:
        from misconv.images import assess_files, load_density

        dataset = open_images(images, nodata, masks, hole_is, bands, processes.say)
        model = load_density(density, processes.fabric.device)
        found, outcome = assess_files(dataset, model, processes.say, limit=limit, seed=seed)
        tell(processes, {**found.to_dict(), **outcome.to_dict()}, [str(found)])
        end(processes, outcome)


def _outside(images: ImageFiles, *folders: Path | None) -> ImageFiles:
    """Without what an earlier call has written below the folder that is read."""
    ours = [f"{folder.resolve()}{os.sep}" for folder in folders if folder is not None]
    kept = [n for n, file in enumerate(images.files) if not os.path.realpath(file.place).startswith(tuple(ours))]
    if not kept:
        raise ValueError("IMAGES must be other files than those in --out")
    return images.only(kept)


def _prepare_folders(out: Path, sd: Path | None, overwrite: bool) -> None:
    from misconv.images import prepare_folder

    if sd is not None and sd.resolve() == out.resolve():
        raise ValueError("--sd must be another folder than --out, got the same")
    prepare_folder("--out", out, overwrite)
    if sd is not None:
        prepare_folder("--sd", sd, overwrite)


def _density_for(
    dataset: ImageFiles, file: Path | None, out: Path, learning: FitSettings, processes: Processes
) -> Path:
    """The file of a density; if none is given, one is learned and kept beside the filled images for the next call."""
    from misconv.images import fit_files
    from misconv.store import save

    kept = out / "density.safetensors"
    if file is None and processes.on_first(kept.exists):
        processes.say(f"going on with {kept}")
        file = kept
    if file is None:
        learned, history, _ = fit_files(dataset, learning, processes.say)
        processes.say(quality(history))
        if processes.first:
            save(learned, kept)
            (out / "density.checkpoint").unlink(missing_ok=True)
        processes.fabric.barrier()
        file = kept
    return file

"""The commands for labelled images: `misconv train`, `evaluate` and `predict`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from misconv._terminal import print_json, refuse
from misconv.cli_options import (
    Bands,
    Device,
    HoleIs,
    Images,
    Json,
    Masks,
    Nodata,
    Precision,
    Workers,
    check_new_file,
    end,
    open_images,
    own_images,
    started,
    tell,
)

__all__ = ["evaluate", "predict", "train"]

Labels = Annotated[
    Path | None,
    typer.Option(metavar="CSV", help="A table of files and classes; without one, a class is a folder of images."),
]
Model = Annotated[Path, typer.Option(metavar="FILE", help="What `misconv train` wrote.")]


def train(
    images: Images,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File for the model.")],
    labels: Labels = None,
    backbone: Annotated[
        str, typer.Option(metavar="NAME", help="A network of torchvision or timm, by its name.")
    ] = "resnet18",
    pretrained: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights to begin with: .safetensors, or .pth of torch.")
    ] = None,
    density: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What `misconv fit` wrote; by default one is learned in a third of the time."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="How long to learn: 90s, 5min, 1h or 2000steps.")
    ] = "10min",
    side: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Bring all images to this many pixels; else to 224, or their own size if it is one and small.",
        ),
    ] = None,
    mirror: Annotated[bool, typer.Option("--mirror", help="A mirrored image is as good as another.")] = False,
    validation: Annotated[
        float, typer.Option(metavar="SHARE", help="The share of every class set aside to judge by.")
    ] = 0.15,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images in a step.")] = 32,
    nodata: Nodata = None,
    masks: Masks = None,
    hole_is: HoleIs = "white",
    bands: Bands = None,
    device: Device = None,
    precision: Precision = "32-true",
    workers: Workers = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a classifier on labelled images with holes.

    The network reads them as `misconv.convert` makes it: its first layer expects over what missing pixels may be.
    Stopped, it continues when it is called again in the same way.

    Example: misconv train flowers/ -o model.safetensors --budget 30min
    """
    if not 0 <= validation < 1 or batch_size < 1 or (side is not None and side < 8):
        raise refuse("--validation must be at least 0 and below 1, --batch-size at least 1, --side at least 8")
    with (
        own_images("stopped; call it again to go on where it was"),
        started(device, precision, as_json=as_json) as processes,
    ):
        from misconv.images import TrainSettings, parse_budget, train_files
        from misconv.store import save

        dataset = open_images(images, nodata, masks, hole_is, bands, processes.say)
        processes.on_first(lambda: check_new_file("--out", out))
        checkpoint = out.with_name(out.name + ".checkpoint")
        settings = TrainSettings(
            parse_budget(budget), processes.fabric, backbone, pretrained, density, side, batch_size, validation,
            mirror, workers, seed, checkpoint, processes.terminal,
        )  # fmt: skip
        made = train_files(dataset, labels, settings, processes.say)
        processes.join(made.outcome)
        if processes.first:
            save(made.network, out, notes=made.notes)
            for path in (checkpoint, checkpoint.with_name(checkpoint.name + "-density")):
                path.unlink(missing_ok=True)
        record = {"model": str(out), **made.notes, "history": made.history, **made.outcome.to_dict()}
        tell(processes, record, [_judgement(made.notes), f"Model: {out}"])
        end(processes, made.outcome)


def evaluate(
    images: Images,
    model: Model,
    labels: Labels = None,
    nodata: Nodata = None,
    masks: Masks = None,
    hole_is: HoleIs = "white",
    bands: Bands = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Tell how often a trained classifier is right, on labelled images that it has not seen.

    Example: misconv evaluate test/ --model flowers.safetensors
    """
    with own_images("stopped"), started(device, as_json=as_json) as processes:
        from misconv.images import Outcome, evaluate_files, load_classifier

        dataset = open_images(images, nodata, masks, hole_is, bands, processes.say)
        classifier, outcome = load_classifier(model, processes.fabric.device), Outcome()
        with processes.bar("reading", len(dataset)) as advance:
            found = evaluate_files(
                dataset, labels, classifier, outcome, processes.say, advance, processes.share,
                lambda mine: [each for part in processes.gather(mine) for each in part],
            )  # fmt: skip
        processes.join(outcome)
        tell(processes, {**found, **outcome.to_dict()}, _evaluation(found))
        end(processes, outcome)


def predict(
    images: Images,
    model: Model,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="A .csv or .json file; by default CSV is printed."),
    ] = None,
    samples: Annotated[
        int, typer.Option(metavar="N", help="Completions drawn to tell the doubt that holes make; 0: do not tell.")
    ] = 16,
    nodata: Nodata = None,
    masks: Masks = None,
    hole_is: HoleIs = "white",
    bands: Bands = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the completions.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    as_json: Json = False,
) -> None:
    """Tell the class of images with holes: probabilities, and how much of the doubt comes from the holes.

    Example: misconv predict new/ --model flowers.safetensors -o classes.csv
    """
    if samples < 0:
        raise refuse(f"--samples must be 0 or more, got {samples}")
    if out is not None and out.suffix.lower() not in (".csv", ".json"):
        raise refuse(f"--out must end in .csv or .json, got {out}")
    with own_images("stopped; nothing was written"), started(device, as_json=as_json) as processes:
        from misconv.images import Outcome, load_classifier, predict_files

        dataset = open_images(images, nodata, masks, hole_is, bands, processes.say)
        processes.on_first(lambda: _check_table(out, overwrite))
        classifier, outcome = load_classifier(model, processes.fabric.device), Outcome()
        mine = dataset.only(range(len(dataset))[processes.share])
        with processes.bar("reading", len(mine)) as advance:
            found = list(predict_files(mine, classifier, samples, seed, outcome, processes.say, advance))
        processes.join(outcome)
        together = sorted((each for part in processes.gather(found) for each in part), key=lambda each: str(each.path))
        rows = [each.to_dict(classifier.classes) for each in together]
        if processes.first:
            _write(rows, classifier.classes, out, outcome.to_dict(), as_json=as_json)
        end(processes, outcome)


def _judgement(notes: dict[str, Any]) -> str:
    record = notes["record"]
    if "validation_accuracy" not in record:
        return f"learned {len(notes['classes'])} classes; no images were set aside to judge by"
    return (
        f"{100 * record['validation_accuracy']:.1f} % of {notes['validation_images']} images that were set aside are "
        f"put into the right class; the largest class has {100 * notes['largest_class']:.1f} % of them"
    )


def _evaluation(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{100 * found['accuracy']:.1f} % of {found['images']} images are put into the right class; the largest class "
        f"has {100 * found['largest_class']:.1f} % of them",
        f"negative log-likelihood {found['nll']:.3f}, calibration error {100 * found['calibration_error']:.1f} points, "
        f"{100 * found['missing']:.0f} % of the pixels missing",
    ]
    for name, row in zip(found["classes"], found["confusion"], strict=True):
        total = sum(row)
        right = row[found["classes"].index(name)]
        others = sorted(((count, other) for count, other in zip(row, found["classes"], strict=True) if other != name))
        most = f", most others taken for {others[-1][1]}" if others and others[-1][0] else ""
        lines += [f"  {name}: {right} of {total} right{most}"] if total else []
    return lines


def _check_table(out: Path | None, overwrite: bool) -> None:
    if out is None:
        return
    check_new_file("--out", out)
    if out.exists() and not overwrite:
        raise FileExistsError(f"--out must be a new file, got {out}, which exists; --overwrite replaces it")


def _write(
    rows: Sequence[dict[str, Any]], classes: list[str], out: Path | None, outcome: dict[str, Any], *, as_json: bool
) -> None:
    record = {"classes": classes, "predictions": list(rows), "failed": outcome["failed"]}
    if out is not None:
        from misconv.store import write_bytes

        text = json.dumps(record, indent=1) if out.suffix.lower() == ".json" else _csv(rows, classes)
        write_bytes(out, text.encode())
    if as_json:
        print_json(record)
    elif out is None:
        typer.echo(_csv(rows, classes), nl=False)
    else:
        typer.echo(f"{len(rows)} images. Predictions: {out}")


def _csv(rows: Sequence[dict[str, Any]], classes: list[str]) -> str:
    stream = io.StringIO()
    heads = ["file", "class", "probability", "missing", "doubt_from_holes"]
    table = csv.writer(stream, lineterminator="\n")
    table.writerow([*heads, *(f"p({name})" for name in classes)])
    for row in rows:
        numbers = [f"{row[head]:.4f}" for head in heads[2:]]
        table.writerow(
            [row["file"], row["class"], *numbers, *(f"{row['probabilities'][name]:.4f}" for name in classes)]
        )
    return stream.getvalue()

"""What the report shows of the photographs: findings in words, pictures, tables and charts."""

from __future__ import annotations

import math
from typing import Any

import torch

from misconv.demo.charts import Curve, curve_chart
from misconv.demo.photographs import BANKS, Photographs, PhotographSettings
from misconv.demo.words import percent, signed
from misconv.paper.pictures import RESPONSE, UNSURE, paint, paint_photograph

__all__ = ["findings", "photograph_tiles", "photographs_page"]

SCALE = 4  # a pixel is a square with this side
RANKINGS = {"what the density claims": "ours", "contrast nearby": "bound", "distance": "other"}
KEPT = 0.8  # of the hidden pixels, in sentences


def findings(photographs: Photographs) -> str:
    """What the photographs show, in sentences that hold whatever came out."""
    surest, least = photographs.fifths[0], photographs.fifths[-1]
    mean, ours = (photographs.way(name) for name in ("mean", "MisConv"))
    return (
        "A density, learned from incomplete crops alone, says what may be there and how sure that is: the fifth of "
        f"hidden pixels that it calls surest is off by {surest.rmse:.3f}, the fifth that it is least sure of by "
        f"{least.rmse:.3f} (values run from 0 to 1). Near a hole, random filters answer {_off(mean.bias['random'])} if "
        f"its best guess is filled in, and {_off(ours.bias['random'])} by MisConv's expectation; edge filters "
        f"{_off(mean.bias['edge'])}, and {_off(ours.bias['edge'])}."
    )


def _off(bias: float) -> str:
    if round(100 * bias) == 0:
        return "without bias"
    return f"{abs(100 * bias):.0f} % too {'weakly' if bias < 0 else 'strongly'}"


def photograph_tiles(photographs: Photographs) -> list[dict[str, str]]:
    """The three figures to remember."""
    a, mean, ours = photographs.assessment, photographs.way("mean"), photographs.way("MisConv")
    zeros = photographs.way("zeros")
    best, distance = (_at(photographs, name, KEPT) for name in ("what the density claims", "distance"))
    return [
        {
            "kind": "ours",
            "figure": f"{100 * a.coverage_50:.0f}\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}{percent(a.coverage_90, 0)}",
            "name": "inside its 50 % and 90 % intervals",
            "what": "of hidden pixels: what it claims, measured",
        },
        {
            "kind": "ours",
            "figure": signed(ours.bias["random"]),
            "name": "bias of filter responses, MisConv",
            "what": f"{signed(mean.bias['random'])} with the mean filled in, {signed(zeros.bias['random'])} with zeros",
        },
        {
            "kind": "ours",
            "figure": f"{best:.3f}",
            "name": f"error of the {percent(KEPT, 0)} it is surest of",
            "what": f"{distance:.3f} if the nearest to seen pixels are kept, {mean.rmse:.3f} of all",
        },
    ]


def _at(photographs: Photographs, ranking: str, share: float) -> float:
    return next(error for kept, error in photographs.kept[ranking] if abs(kept - share) < 1e-9)


def photographs_page(photographs: Photographs, settings: PhotographSettings) -> dict[str, Any]:
    """What the template shows."""
    a, last = photographs.assessment, photographs.fifths[-1]
    return {
        "share": percent(settings.fraction).replace(".0", ""),
        "side": settings.side,
        "train": f"{settings.train:,}",
        "steps": settings.steps,
        "rank": settings.rank,
        "tested": photographs.tested,
        "stride": settings.stride,
        "shown": len(photographs.truth),
        "overlap": settings.stride < settings.side,
        "hidden": f"{photographs.hidden:,}",
        "touched": percent(photographs.touched, 0),
        "seconds": f"{photographs.seconds:.0f}",
        "holes": _holes(photographs),
        "ways": [_way(photographs, name) for name in (way.name for way in photographs.ways)],
        "verdict": a.verdict(),
        "assessed": {"pixels": f"{a.pixels:,}", "ratio": f"{a.deviation / a.rmse:.2f}"},
        "ratio": f"{photographs.claimed / photographs.way('mean').rmse:.2f}",
        "reliability": _reliability(photographs),
        "fifths": _fifths(photographs),
        "most": percent(last.share, 0),
        "banks": BANKS,
        "responses": _responses(photographs),
        "kept": _kept(photographs),
        "rankings": {name: f"{_at(photographs, name, KEPT):.3f}" for name in RANKINGS},
        "kept_share": percent(KEPT, 0),
        "all": f"{photographs.way('mean').rmse:.3f}",
    }


def _way(photographs: Photographs, name: str) -> dict[str, Any]:
    way = photographs.way(name)
    cells = []
    for bank in BANKS:
        closer = "" if name == "MisConv" else percent(way.closer[bank], 0)
        cells += [signed(way.bias[bank]), percent(way.error[bank], 0), closer]
    return {"name": name, "what": way.what, "rmse": f"{way.rmse:.4f}", "cells": cells, "ours": name == "MisConv"}


def _holes(photographs: Photographs) -> dict[str, Any]:
    """Crops with their fills, the deviation that is claimed and the real error, on one scale."""
    hidden = ~photographs.observed[:, 0]
    highest = float(torch.maximum(photographs.deviations, photographs.errors)[hidden].quantile(0.95))
    ways = {"nearest": "nearest pixel", "push–pull": "push–pull", "mean": "expected"}
    rows = []
    for i, hole in enumerate(hidden):

        def photo(words: str, values: torch.Tensor, number: int = i, **options: Any) -> dict[str, str]:
            alt = f"Crop {number + 1}, {words}"
            return {"alt": alt, "source": paint_photograph(values[number], scale=SCALE, **options)}

        cells = [photo("a part of it missing", photographs.truth, hidden=hole, gone=True)]
        cells += [photo(f"filled in: {title}", photographs.filled[way]) for way, title in ways.items()]
        for title, values in (("how unsure", photographs.deviations), ("real error", photographs.errors)):
            source = paint(values[i].where(hole, 0), UNSURE, 0, highest, scale=SCALE)
            cells.append({"alt": f"Crop {i + 1}, {title}", "source": source})
        rows.append({"head": (i + 1, ""), "pictures": [*cells, photo("the truth", photographs.truth)]})
    heads = ["given", *ways.values(), "how unsure", "its real error", "truth"]
    return {"heads": [(head, "") for head in heads], "rows": rows, "highest": f"{highest:.2f}"}


def _responses(photographs: Photographs) -> dict[str, Any]:
    """One edge filter on the same crops."""
    ways = {"zeros": "zeros", "nearest": "nearest pixel", "push–pull": "push–pull", "mean": "mean filled in"}
    ways |= {"MisConv": "MisConv", "truth": "nothing missing"}
    rows = []
    for i in range(len(photographs.truth)):
        hole = ~photographs.observed[i, 0]
        high = max(float(photographs.responses["truth"][i].max()), 1e-6)  # false edges beyond it are cut off
        seen = paint_photograph(photographs.truth[i], hole, gone=True, scale=SCALE)
        cells = [{"alt": f"Crop {i + 1}, a part of it missing", "source": seen}]
        for way, title in ways.items():
            source = paint(photographs.responses[way][i], RESPONSE, 0, high, scale=SCALE)
            cells.append({"alt": f"Crop {i + 1}, response: {title}", "source": source})
        rows.append({"head": (i + 1, ""), "pictures": cells})
    return {"heads": [(head, "") for head in ("given", *ways.values())], "rows": rows}


def _fifths(photographs: Photographs) -> list[dict[str, Any]]:
    largest = max(max(fifth.claimed, fifth.rmse) for fifth in photographs.fifths)
    names = ("surest fifth", "second", "third", "fourth", "least sure fifth")
    return [
        {
            "name": name,
            "claimed": f"{fifth.claimed:.3f}",
            "rmse": f"{fifth.rmse:.3f}",
            "share": percent(fifth.share, 0),
            "widths": [f"{100 * value / largest:.1f}%" for value in (fifth.claimed, fifth.rmse)],
        }
        for name, fifth in zip(names, photographs.fifths, strict=True)
    ]


def _reliability(photographs: Photographs) -> dict[str, Any]:
    points = list(photographs.assessment.calibration)
    said = ", ".join(f"{percent(level, 0)}: {percent(found, 0)}" for level, found in points if round(20 * level) % 2)
    ticks = {share: percent(share, 0) for share in (0.0, 0.25, 0.5, 0.75, 1.0)}
    label = f"Share of hidden pixels inside intervals, by what the interval claims: {said}"
    curves = [Curve("the density", "ours", points)]
    return curve_chart(label, ("claimed", "measured"), (ticks, ticks), curves, diagonal=True)


def _kept(photographs: Photographs) -> dict[str, Any]:
    """The chart of the error of those kept, by how many are."""
    highest = max(error for points in photographs.kept.values() for _, error in points)
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if highest / s <= 6 or s == 0.5)
    rows = {step * i: f"{step * i:.2f}" for i in range(math.ceil(highest / step) + 1)}
    columns = {share: percent(share, 0) for share in (0.0, 0.25, 0.5, 0.75, 1.0)}
    curves = [Curve(name, kind, photographs.kept[name]) for name, kind in RANKINGS.items()]
    said = "; ".join(f"by {name} {_at(photographs, name, KEPT):.3f}" for name in RANKINGS)
    label = f"Error of the hidden pixels that are kept, by their share; of {percent(KEPT, 0)} of them: {said}"
    return curve_chart(label, ("hidden pixels kept", "their error (RMSE)"), (columns, rows), curves)

"""An analysis as HTML: pictures with captions, legends and charts, from the template `results.html.jinja`."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from misconv.app.analysis import FILTERS, Analysis, Classes, Responses
from misconv.app.drawing import LEFT, RESPONSE, RIGHT, UNSURE, Curve, gradient, map_image, photo_image, svg_curves

try:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
except ImportError as error:
    raise ImportError("the page is made by Jinja2: pip install 'misconv[app]'") from error

__all__ = ["read_text", "results_html"]

_FILLS = {
    "zeros": ("Zeros", "Fill with black"),
    "nearest": ("Nearest pixel", "Copy the nearest seen pixel"),
    "push–pull": ("Push–pull", "A smooth fill from all around"),
    "mean": ("Mean of the density", "The best guess of what was learned"),
}
_WAYS = {"zeros": "zeros", "mean": "mean", "MisConv": "MisConv", "truth": "truth"}
_DIGIT_DEVIATION, _IMAGE_DEVIATION = 0.5, 0.25  # the ends of the colours, always the same, so that holes compare


def results_html(found: Analysis, number: int = 0) -> str:
    """The results of one look; `number` tells it from the one before."""
    height, width = found.picture.size
    hidden = (~found.observed).any(0)
    high = _DIGIT_DEVIATION if found.picture.is_digit else _IMAGE_DEVIATION
    page = _template().render(
        number=number,
        title=found.picture.title,
        status=_status(found),
        notes=found.picture.notes,
        width=width,
        height=height,
        fills=_fills(found, hidden),
        doubts=_doubts(found, high),
        claim=_claim(found),
        unsure=gradient(UNSURE),
        response=gradient(RESPONSE),
        deviation_high=f"{high:g} or more",
        responses=None if found.responses is None else _responses(found.responses),
        classes=None if found.classes is None else _classes(found.classes, found.picture.label),
    )
    return re.sub(r">\s*\n\s*<", "><", page).strip()


def read_text(name: str) -> str:
    """A file of this package."""
    return resources.files("misconv.app").joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(read_text),
    )
    return environment.get_template("results.html.jinja")


def _percent(share: float) -> str:
    """Without digits that say nothing; what is not 0 or 100 never looks like it."""
    text = f"{100 * share:.0f}"
    if text == "0" and share > 0:
        text = "<1"
    elif text == "100" and share < 1:
        text = ">99"
    return f"{text} %"


def _status(found: Analysis) -> str:
    height, width = found.picture.size
    if not found.hidden:
        return "Nothing is hidden. Paint over the image, or choose a shape, to make a hole."
    share = _percent(found.hidden / (height * width))
    text = f"{found.hidden:,} of {height * width:,} pixels are hidden ({share})."
    return (
        text
        if bool(found.observed.any())
        else f"{text} Nothing is left to see: the density says what it expects of any image."
    )


def _figure(name: str, text: str, image: str, alt: str, *, ours: bool = False) -> dict[str, Any]:
    return {"name": name, "text": text, "image": image, "alt": alt, "ours": ours}


def _fills(found: Analysis, hidden: Tensor) -> list[dict[str, Any]]:
    seen = found.picture.values
    made = [_figure("Seen", "Pink is hidden", photo_image(seen, hidden), "The image with its hole in pink")]
    for name, fill in found.fills.items():
        title, text = _FILLS[name]
        error = f"RMSE {found.errors[name]:.3f}" if name in found.errors else text
        made.append(_figure(title, error, photo_image(fill), f"{title}: {text}. {error}", ours=name == "mean"))
    missing = ~found.picture.known.all(0)
    truth = photo_image(seen, missing if bool(missing.any()) else None)
    return [*made, _figure("Truth", "Hidden from all of them", truth, "The image as it really is")]


def _doubts(found: Analysis, high: float) -> list[dict[str, Any]]:
    spread = found.deviation.square().mean(0).sqrt()  # over bands
    made = [
        _figure(
            "Standard deviation",
            "See the colours below",
            map_image(spread, UNSURE, high),
            "Standard deviation of every pixel",
        )
    ]
    for number, sample in enumerate(found.samples, 1):
        made.append(_figure(f"Sample {number}", "", photo_image(sample), f"Completion {number} drawn from the density"))
    return made


def _claim(found: Analysis) -> str | None:
    if found.claimed is None:
        return None
    return (
        f"In this hole the density expects an error of {found.claimed:.3f}. "
        f"The real error of its mean is {found.errors['mean']:.3f}."
    )


def _responses(found: Responses) -> dict[str, Any]:
    high = max(float(found.maps["truth"].quantile(0.995) if found.maps["truth"].numel() < 2**24 else 1.0), 0.02)
    heads = [
        {"name": _WAYS[way], "text": f"error {found.errors[way]:.3f}" if way in found.errors else ""}
        for way in found.maps
    ]
    rows = [
        {
            "name": name,
            "cells": [
                {"image": map_image(maps[row], RESPONSE, high), "alt": f"{name}, {_WAYS[way]}"}
                for way, maps in found.maps.items()
            ],
        }
        for row, name in enumerate(FILTERS)
    ]
    return {"heads": heads, "rows": rows, "high": f"{high:.2g} or more"}


# Classes -------------------------------------------------------------------------------------------------------------


def _classes(found: Classes, label: int | None) -> dict[str, Any]:
    now, truth = found.ways["MisConv"], found.ways["truth"]
    answer = int(now.argmax())
    growth = found.growth
    kept = torch.cat([now.argsort(descending=True)[:2], growth.probabilities.mean(0).argsort(descending=True)])
    shown = list(dict.fromkeys([answer, *([] if label is None else [label]), *kept.tolist()]))[:3]
    lines = growth.probabilities.T.tolist()
    curves = [
        Curve(f"probability of {digit}", f"class-{place}", list(zip(growth.hidden, lines[digit], strict=True)))
        for place, digit in enumerate(shown)
    ]
    doubt = list(zip(growth.hidden, growth.doubt.tolist(), strict=True))
    curves.append(Curve("share of the doubt that the hole causes", "doubt", doubt))
    return {
        "answer": _answer(found, answer),
        "bars": [
            {
                "name": str(digit),
                "width": round(100 * float(now[digit]), 1),
                "text": _percent(float(now[digit])),
                "truth": _percent(float(truth[digit])),
                "best": digit == answer,
            }
            for digit in range(len(now))
        ],
        "zeros": _said(found.ways["zeros"]),
        "mean": _said(found.ways["mean"]),
        "curves": svg_curves(curves),
        "here": round(LEFT + (RIGHT - LEFT) * growth.hidden[growth.here], 1),
        "label": "Class probabilities and the share of doubt that the hole causes, against the hidden share",
    }


def _said(probabilities: Tensor) -> str:
    return f"{int(probabilities.argmax())} ({_percent(float(probabilities.max()))})"


def _answer(found: Classes, answer: int) -> str:
    text = f"The classifier reads a {answer}, with a probability of {_percent(float(found.ways['MisConv'][answer]))}."
    growth = found.growth
    if not growth.hidden[growth.here]:
        return f"{text} Nothing is hidden, so no doubt comes from a hole."
    share = _percent(float(growth.doubt[growth.here]))
    return f"{text} The hole causes {share} of the doubt whether it is a {answer}; the rest would stay without a hole."

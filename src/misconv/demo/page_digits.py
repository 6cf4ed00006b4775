"""What the report shows of the digits: its verdict, pictures and the chart of the methods."""

from __future__ import annotations

import math
from typing import Any

from misconv.demo.digits import Digits, DigitSettings, MethodResult
from misconv.demo.words import percent
from misconv.paper.pictures import INK, UNSURE, paint

__all__ = ["chance", "digits_page", "leaders", "verdict"]


def verdict(digits: Digits, settings: DigitSettings) -> str:
    """How MisConv did against the best other method, in a sentence, and whether that may be chance."""
    ours, other, _ = leaders(digits)
    gap, likely = 100 * (ours.mean - other.mean), 100 * chance(ours, other, settings.test)
    right = f"{ours.name} reads {percent(ours.mean)} of the incomplete test digits correctly"
    if round(abs(gap), 1) == 0:
        return f"{right}, as many as the best other way, {other.name}."
    size = f"{abs(gap):.1f} points {'more' if gap > 0 else 'fewer'} than the best other way, {other.name}"
    if len(ours.accuracy) == 1:
        return f"{right}, {size}: one training of each cannot tell how much of that is chance."
    if abs(gap) <= likely:
        return f"{right}, {size}: too close to call, for chance alone can make {likely:.1f} points here."
    return f"{right}, {size}: more than the {likely:.1f} points that chance can make here."


def leaders(digits: Digits) -> tuple[MethodResult, MethodResult, MethodResult]:
    """The best MisConv, the best of the others, and the bound that saw complete images."""
    bound = digits.methods[-1]
    ours = [m for m in digits.methods if m.name.startswith("MisConv")]
    others = [m for m in digits.methods if m not in ours and m is not bound]
    return max(ours, key=lambda m: m.mean), max(others, key=lambda m: m.mean), bound


def chance(a: MethodResult, b: MethodResult, tested: int) -> float:
    """Two standard errors of a difference: of the trainings, and of the test digits as if each had its own.

    Both were tested on the same digits, so the true error is smaller: this errs on the side of doubt.
    """
    parts = (m.deviation**2 / len(m.accuracy) + m.mean * (1 - m.mean) / tested for m in (a, b))
    return 2 * math.sqrt(sum(parts))


def digits_page(digits: Digits, settings: DigitSettings) -> dict[str, Any]:
    """What the template shows."""
    ours, other, _ = leaders(digits)
    likely = chance(ours, other, settings.test)
    return {
        "worth": "it is no clear gain" if ours.mean - other.mean <= likely else "it is a gain",
        "share": percent(settings.fraction).replace(".0", ""),
        "tested": settings.test,
        "runs": len(digits.methods[0].accuracy),
        "chance": 100 * likely,
        "declined": percent(settings.declined).replace(".0", ""),
        "size": " × ".join(map(str, digits.truth.shape[-2:])),
        "guesses": _guesses(digits),
        "densities": _densities(digits),
        "assessed": digits.densities[-1].assessment.verdict(),
        **_methods(digits),
    }


def _picture(alt: str, *args: Any, **options: Any) -> dict[str, str]:
    return {"alt": alt, "source": paint(*args, **options)}


def _guesses(digits: Digits) -> dict[str, Any]:
    highest = max(float(digits.deviations.max()), 1e-6)
    samples = range(min(4, len(digits.samples)))
    ways = {"mean": "average", "k-NN": "k-NN", "SMFA": "SMFA", "DMFA": "DMFA"}
    rows = []
    for i, label in enumerate(digits.labels.tolist()):
        truth, hidden = digits.truth[i, 0], ~digits.observed[i, 0]
        cells = [_picture(f"{label}, incomplete", truth, INK, 0, 1, hidden, gone=True)]
        cells += [_picture(f"{label}, filled in by {w}", digits.imputed[w][i, 0], INK, 0, 1, hidden) for w in ways]
        cells += [_picture(f"{label}, how unsure the DMFA is", digits.deviations[i, 0], UNSURE, 0, highest)]
        cells += [
            _picture(f"{label}, possibility {s + 1}", digits.samples[s, i, 0], INK, 0, 1, hidden) for s in samples
        ]
        rows.append({"head": (label, ""), "pictures": [*cells, _picture(f"{label}, truth", truth, INK, 0, 1, hidden)]})
    heads = ["given", *ways.values(), "how unsure", *(f"possible {s + 1}" for s in samples), "truth"]
    return {"heads": [(head, "") for head in heads], "rows": rows, "highest": f"{highest:.2f}"}


def _densities(digits: Digits) -> list[dict[str, Any]]:
    found = []
    for density in digits.densities:
        a = density.assessment
        numbers = [f"{a.rmse:.3f}", f"{a.nearest_rmse:.3f}", f"{a.deviation:.3f}", f"{a.nll:.2f}".replace("-", "−")]
        numbers += [percent(a.coverage_50, 0), percent(a.coverage_90, 0)]
        numbers += [f"{density.seconds:.1f}" if density.seconds >= 0.05 else "< 0.1"]
        found.append({"name": density.name, "numbers": numbers})
    return found


def _methods(digits: Digits) -> dict[str, Any]:
    """The chart of the methods: ticks of its axis, and where the marks of each method are."""
    values = [v for m in digits.methods for v in (*m.accuracy, m.mean - m.deviation, m.mean + m.deviation)]
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2) if (max(values) - min(values)) / s <= 7 or s == 0.2)
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step + 1e-9

    def at(value: float) -> str:
        return f"{7 + 86 * (value - low) / (high - low):.2f}%"

    rows = []
    for m in digits.methods:
        kind = "bound" if m is digits.methods[-1] else "ours" if m.name.startswith("MisConv") else "other"
        label = f"{m.name}: mean {_spread(m)} %, seeds {', '.join(map(percent, m.accuracy))}"
        places = {"low": at(m.mean - m.deviation), "high": at(m.mean + m.deviation), "mean": at(m.mean)}
        texts = {"name": m.name, "what": m.what, "label": label, "spread": _spread(m)}
        texts["kept"] = f"{100 * m.kept_mean:.1f}"
        rows.append({"kind": kind, "seeds": [at(a) for a in m.accuracy], **places, **texts})
    ticks = [low + step * i for i in range(round((high - low) / step) + 1)]
    return {"methods": rows, "ticks": [{"x": at(t), "name": f"{100 * t:.0f} %"} for t in ticks]}


def _spread(method: MethodResult) -> str:
    return f"{100 * method.mean:.1f}" + (f" ± {100 * method.deviation:.1f}" if len(method.accuracy) > 1 else "")

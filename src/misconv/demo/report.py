"""The report of the demo: one HTML file that needs nothing else, and its numbers as JSON.

The page is the template `report.html.jinja`, and this file computes what it shows. Pictures are small PNG files inside
the page, charts are SVG, and all words are text: they stay sharp, follow the reader's light or dark mode, and fit a
phone.
"""

from __future__ import annotations

import json
import math
import platform
import re
from dataclasses import asdict
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from misconv._store import check_output_folder, check_replaceable, commit, read_json
from misconv._version import __version__
from misconv.demo.experiment import Demo, Density, MethodResult, Settings
from misconv.paper.pictures import DIFFERENCE, INK, RESPONSE, UNSURE, paint
from misconv.store import write_bytes

__all__ = ["check_folder", "verdict", "write_demo"]

FILES = ("results.json", "index.html")
EYEBROW = '<p class="eyebrow">misconv demo</p>'  # by it a page is known as ours
SERIES = ("#8a8f9c", "#0e8a7d", "#5a60e6")  # one for each density


def write_demo(demo: Demo, folder: Path, *, overwrite: bool = False) -> Path:
    """Write `index.html` and `results.json` into a folder, which is made if need be; returns the page's path.

    Each file appears whole or not at all, and the page last, so where there is a page there are its numbers.

    Args:
        demo: what `misconv.demo.experiment.run` returned.
        folder: a new or an empty one.
        overwrite: replace the report in a folder that has one; files of other names stay, others of these are refused.
    """
    folder = Path(folder)
    check_folder(folder, overwrite=overwrite)
    facts = _facts(demo)
    page = _page(demo, facts).encode()
    numbers = json.dumps(_finite(facts), indent=1, ensure_ascii=False, allow_nan=False).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot make the folder {folder}: {error.strerror}; choose another one") from error
    for name, content in zip(FILES, (numbers, page), strict=True):
        write_bytes(folder / name, content)
    return folder / FILES[1]


def check_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Whether a report can go there, without a trace: worth asking before the work."""
    folder = Path(folder)
    try:
        found = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
            raise NotADirectoryError(f"folder must be a folder or a new name, got {folder}, which is a file")
    except PermissionError as error:
        raise PermissionError(f"folder must be readable, got {folder}; choose another one") from error
    except OSError as error:
        raise type(error)(f"folder must be a folder or a new name, got {folder}: {error.strerror or error}") from error
    if found and not overwrite:
        raise FileExistsError(
            f"folder must be new or empty, got {folder} with files in it; choose another one, or replace a report in "
            "it (overwrite=True, or --overwrite)"
        )
    if found and not set(FILES) & set(found):
        raise FileExistsError(
            f"folder must hold a report of misconv to be overwritten, got {folder} with other files; choose another one"
        )
    for name in FILES:
        check_replaceable("folder", folder / name, _is_ours(folder / name))
    check_output_folder("folder", folder)


def _is_ours(path: Path) -> bool:
    """Whether a file of this name is one that a demo has written."""
    if path.suffix == ".json":
        facts = read_json(path)
        return isinstance(facts, dict) and {"verdict", "methods", "densities", "versions"} <= facts.keys()
    return path.is_file() and EYEBROW.encode() in path.read_bytes()


def verdict(demo: Demo) -> str:
    """How MisConv did against the best other method, in a sentence, and whether that may be chance."""
    ours, other, _ = _leaders(demo)
    gap, chance = 100 * (ours.mean - other.mean), 100 * _chance(ours, other, _tested(demo))
    right = f"{ours.name} reads {_percent(ours.mean)} of the incomplete test digits correctly"
    if round(abs(gap), 1) == 0:
        return f"{right}, as many as the best other way, {other.name}."
    size = f"{abs(gap):.1f} points {'more' if gap > 0 else 'fewer'} than the best other way, {other.name}"
    if len(ours.accuracy) == 1:
        return f"{right}, {size}: one training of each cannot tell how much of that is chance."
    if abs(gap) <= chance:
        return f"{right}, {size}: too close to call, for chance alone can make {chance:.1f} points here."
    return f"{right}, {size}: more than the {chance:.1f} points that chance can make here."


# Numbers -----------------------------------------------------------------------------------------------------------


def _leaders(demo: Demo) -> tuple[MethodResult, MethodResult, MethodResult]:
    """The best MisConv, the best of the others, and the bound that saw complete images."""
    bound = demo.methods[-1]
    ours = [m for m in demo.methods if m.name.startswith("MisConv")]
    others = [m for m in demo.methods if m not in ours and m is not bound]
    return max(ours, key=lambda m: m.mean), max(others, key=lambda m: m.mean), bound


def _chance(a: MethodResult, b: MethodResult, tested: int) -> float:
    """Two standard errors of a difference: of the trainings, and of the test digits as if each had its own.

    Both were tested on the same digits, so the true error is smaller: this errs on the side of doubt.
    """
    parts = (m.deviation**2 / len(m.accuracy) + m.mean * (1 - m.mean) / tested for m in (a, b))
    return 2 * math.sqrt(sum(parts))


def _tested(demo: Demo) -> int:
    return demo.settings.images - demo.settings.train - demo.settings.validation


def _facts(demo: Demo) -> dict[str, Any]:
    methods = [{**vars(m), "mean": m.mean, "deviation": m.deviation} for m in demo.methods]
    densities = [{**vars(d), "coverage": {str(level): c for level, c in d.coverage.items()}} for d in demo.densities]
    return {
        "settings": asdict(demo.settings),
        "verdict": verdict(demo),
        "methods": methods,
        "densities": densities,
        "seconds": demo.seconds,
        "versions": {
            "misconv": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": metadata.version("numpy"),
        },
        "device": f"CPU ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {str(key): _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _spread(method: MethodResult) -> str:
    return f"{100 * method.mean:.1f}" + (f" ± {100 * method.deviation:.1f}" if len(method.accuracy) > 1 else "")


# What the template shows ---------------------------------------------------------------------------------------------


def _picture(alt: str, *args: Any, **options: Any) -> dict[str, str]:
    return {"alt": alt, "source": paint(*args, **options)}


def _digits(demo: Demo) -> list[dict[str, Any]]:
    found = []
    for i, label in enumerate(demo.labels.tolist()):
        seen, hidden = demo.truth[i, 0], ~demo.observed[i, 0]
        incomplete = _picture(f"A handwritten {label} with a square missing", seen, INK, 0, 1, hidden, gone=True)
        complete = _picture(f"The same {label}, complete", seen, INK, 0, 1)
        found.append({"label": label, "incomplete": incomplete, "complete": complete})
    return found


def _guesses(demo: Demo) -> dict[str, Any]:
    highest = max(float(demo.deviations["DMFA"].max()), 1e-6)
    samples = range(min(4, len(demo.samples)))
    ways = {"mean": "average", "k-NN": "k-NN", "SMFA": "SMFA", "DMFA": "DMFA"}
    rows = []
    for i, label in enumerate(demo.labels.tolist()):
        truth, hidden = demo.truth[i, 0], ~demo.observed[i, 0]
        cells = [_picture(f"{label}, incomplete", truth, INK, 0, 1, hidden, gone=True)]
        cells += [_picture(f"{label}, filled in by {w}", demo.imputed[w][i, 0], INK, 0, 1, hidden) for w in ways]
        cells += [_picture(f"{label}, how unsure the DMFA is", demo.deviations["DMFA"][i, 0], UNSURE, 0, highest)]
        cells += [_picture(f"{label}, possibility {s + 1}", demo.samples[s, i, 0], INK, 0, 1, hidden) for s in samples]
        rows.append({"head": (label, ""), "pictures": [*cells, _picture(f"{label}, truth", truth, INK, 0, 1, hidden)]})
    heads = ["given", *ways.values(), "how unsure", *(f"possible {s + 1}" for s in samples), "truth"]
    return {"heads": [(head, "") for head in heads], "rows": rows, "highest": f"{highest:.2f}"}


def _densities(demo: Demo, levels: list[float]) -> list[dict[str, Any]]:
    found = []
    for colour, d in zip(_series(demo.densities), demo.densities, strict=True):
        numbers = [f"{d.nll:.3f}".replace("-", "−"), f"{d.rmse:.3f}", *(_percent(d.coverage[v]) for v in levels)]
        numbers.append(f"{d.seconds:.1f}" if d.seconds >= 0.05 else "< 0.1")
        found.append({"name": d.name, "colour": colour, "numbers": numbers})
    return found


def _series(densities: list[Density]) -> list[str]:
    return [SERIES[i % len(SERIES)] for i in range(len(densities))]


def _coverage(densities: list[Density], levels: list[float]) -> dict[str, Any]:
    """The chart of coverage: its label, ticks and marks, in units of its picture."""

    def at(promised: float, measured: float) -> tuple[float, float]:
        return 66 + 180 * promised, 206 - 180 * measured

    said = "; ".join(f"{d.name} {', '.join(_percent(d.coverage[v]) for v in levels)}" for d in densities)
    label = f"Coverage promised {', '.join(_percent(v) for v in levels)}, and measured: {said}"
    ticks = [{"x": round(at(t, t)[0]), "y": round(at(t, t)[1]), "name": f"{100 * t:.0f} %"} for t in (0, 0.5, 0.9)]
    marks = []
    for number, (colour, d) in enumerate(zip(_series(densities), densities, strict=True)):
        for level in levels:  # a little apart, so that equal ones do not hide each other
            x, y = at(level, d.coverage[level])
            marks.append({"x": f"{x + 7 * (number - 1):.1f}", "y": f"{y:.1f}", "colour": colour})
    return {"levels": levels, "label": label, "ticks": ticks, "marks": marks}


def _filters(demo: Demo) -> dict[str, Any]:
    complete = demo.responses["nothing missing"]
    guesses = [way for way in demo.responses if way != "nothing missing"]
    hidden = ~demo.observed
    # The clearest cases: the digits with most ink under the square, the filters that answer most to complete digits.
    digits = (demo.truth * hidden).flatten(1).sum(1).topk(min(2, len(hidden))).indices.tolist()
    filters = complete.mean((0, 2, 3)).topk(min(3, complete.shape[1])).indices.tolist()
    touched = F.max_pool2d(hidden.float(), 3, stride=1, padding=1).bool().expand_as(complete)
    errors = {way: float((demo.responses[way] - complete)[touched].square().mean().sqrt()) for way in guesses}
    rows = []
    for i in digits:
        for o in filters:
            high = max(float(response[i, o].max()) for response in demo.responses.values())
            off = max(float((demo.responses[way][i, o] - complete[i, o]).abs().max()) for way in guesses)
            name = f"{int(demo.labels[i])}, filter {o + 1}"
            cells = [_picture(f"{name}, the digit", demo.truth[i, 0], INK, 0, 1, hidden[i, 0], gone=True)]
            for way, r in demo.responses.items():
                cells.append(_picture(f"{name}, {way}", r[i, o], RESPONSE, 0, high, hidden[i, 0]))
            for way in guesses:
                difference = demo.responses[way][i, o] - complete[i, o]
                cells.append(_picture(f"{name}, {way}, difference", difference, DIFFERENCE, -off, off, hidden[i, 0]))
            rows.append({"head": (int(demo.labels[i]), f"filter {o + 1}"), "pictures": cells})
    heads = [(head, "") for head in ("the digit", *demo.responses)] + [(way, "difference") for way in guesses]
    return {"heads": heads, "rows": rows, "errors": errors, "digits": len(hidden), "count": complete.shape[1]}


def _methods(demo: Demo) -> dict[str, Any]:
    """The chart of the methods: ticks of its axis, and where the marks of each method are."""
    values = [v for m in demo.methods for v in (*m.accuracy, m.mean - m.deviation, m.mean + m.deviation)]
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2) if (max(values) - min(values)) / s <= 7 or s == 0.2)
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step + 1e-9

    def at(value: float) -> str:
        return f"{7 + 86 * (value - low) / (high - low):.2f}%"

    rows = []
    for m in demo.methods:
        kind = "bound" if m is demo.methods[-1] else "ours" if m.name.startswith("MisConv") else "other"
        label = f"{m.name}: mean {_spread(m)} %, seeds {', '.join(map(_percent, m.accuracy))}"
        places = {"low": at(m.mean - m.deviation), "high": at(m.mean + m.deviation), "mean": at(m.mean)}
        texts = {"name": m.name, "what": m.what, "label": label, "spread": _spread(m)}
        rows.append({"kind": kind, "seeds": [at(a) for a in m.accuracy], **places, **texts})
    ticks = [low + step * i for i in range(round((high - low) / step) + 1)]
    return {"methods": rows, "ticks": [{"x": at(t), "name": f"{100 * t:.0f} %"} for t in ticks]}


def _entries(demo: Demo, facts: dict[str, Any]) -> dict[str, str]:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    entries = {**{k.replace("_", " "): _plain(v) for k, v in asdict(demo.settings).items()}, "versions": versions}
    return entries | {
        "device": f"{facts['device']}, {facts['threads']} thread(s)",
        "commit": facts["commit"] or "not known",
    }


def _command(demo: Demo) -> str:
    """The line that makes this report again."""
    seed, seeds = demo.settings.seed, demo.settings.seeds
    usual = asdict(Settings(seed=seed, seeds=seeds))
    changed = {k: v for k, v in asdict(demo.settings).items() if v != usual[k]}
    if changed:  # what the command cannot say, Python can
        changed = {"seed": seed, "seeds": seeds, **changed}
        return f"misconv.demo.run(misconv.demo.Settings({', '.join(f'{k}={v!r}' for k, v in changed.items())}))"
    return f"misconv demo --seed {seed} --seeds {seeds}"


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# The page ----------------------------------------------------------------------------------------------------------


def _page(demo: Demo, facts: dict[str, Any]) -> str:
    ours, other, bound = _leaders(demo)
    fraction = demo.settings.fraction
    levels = sorted(demo.densities[0].coverage)
    page = _template().render(
        eyebrow=Markup(EYEBROW),
        style=Markup(_read("report.css")),
        colours={"UNSURE": UNSURE, "RESPONSE": RESPONSE, "DIFFERENCE": DIFFERENCE},
        share=_percent(fraction).replace(".0", ""),
        share_in_words={1 / 4: "A quarter", 1 / 2: "Half"}.get(fraction, _percent(fraction)),
        verdict=verdict(demo),
        tiles=[
            {"kind": "ours", "method": ours, "what": "expects over all that the gap could hold"},
            {"kind": "other", "method": other, "what": "best of the other ways"},
            {"kind": "bound", "method": bound, "what": "had nothing missing: the upper bound"},
        ],
        digits=_digits(demo),
        guesses=_guesses(demo),
        densities=_densities(demo, levels),
        coverage=_coverage(demo.densities, levels),
        filters=_filters(demo),
        **_methods(demo),
        tested=_tested(demo),
        runs=len(demo.methods[0].accuracy),
        chance=100 * _chance(ours, other, _tested(demo)),
        seconds=demo.seconds,
        size=" × ".join(map(str, demo.truth.shape[-2:])),
        threads=facts["threads"],
        command=_command(demo),
        entries=_entries(demo, facts),
    )
    return re.sub(r">\s*\n\s*<", "><", page).strip() + "\n"


def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": _percent, "hold_percent": _hold_percent, "hold_hyphen": _hold_hyphen}
    return environment.from_string(_read("report.html.jinja"))


def _hold_percent(text: str) -> Markup:
    """A number and its % stay on one line."""
    return escape(text).replace(" %", "\N{NO-BREAK SPACE}%")


def _hold_hyphen(text: str) -> Markup:
    """So does the name k-NN."""
    return escape(text).replace("k-NN", "k\N{NON-BREAKING HYPHEN}NN")


def _read(name: str) -> str:
    return resources.files("misconv.demo").joinpath(name).read_text(encoding="utf-8")

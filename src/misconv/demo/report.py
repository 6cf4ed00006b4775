"""The report of the demo: one HTML file that needs nothing else, and its numbers as JSON.

Pictures are small PNG files inside the page, charts are SVG, and all words are text: they stay sharp, follow the
reader's light or dark mode, and fit a phone.
"""

from __future__ import annotations

import json
import math
import platform
from html import escape
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from misconv._store import check_new_or_ours, commit, read_json, try_place
from misconv._version import __version__
from misconv.demo.experiment import SETTINGS, Demo, Density, Method
from misconv.paper.pictures import DIFFERENCE, INK, RESPONSE, UNSURE, bar, grid, image
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
        check_new_or_ours("folder", folder / name, _is_ours(folder / name))
    try_place("folder", folder)


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


def _leaders(demo: Demo) -> tuple[Method, Method, Method]:
    """The best MisConv, the best of the others, and the bound that saw complete images."""
    bound = demo.methods[-1]
    ours = [m for m in demo.methods if m.name.startswith("MisConv")]
    others = [m for m in demo.methods if m not in ours and m is not bound]
    return max(ours, key=lambda m: m.mean), max(others, key=lambda m: m.mean), bound


def _chance(a: Method, b: Method, tested: int) -> float:
    """Two standard errors of a difference: of the trainings, and of the test digits as if each had its own.

    Both were tested on the same digits, so the true error is smaller: this errs on the side of doubt.
    """
    parts = (m.deviation**2 / len(m.accuracy) + m.mean * (1 - m.mean) / tested for m in (a, b))
    return 2 * math.sqrt(sum(parts))


def _tested(demo: Demo) -> int:
    return int(demo.settings["images"] - demo.settings["train"] - demo.settings["validation"])


def _facts(demo: Demo) -> dict[str, Any]:
    methods = [{**vars(m), "mean": m.mean, "deviation": m.deviation} for m in demo.methods]
    densities = [{**vars(d), "coverage": {str(level): c for level, c in d.coverage.items()}} for d in demo.densities]
    return {
        "settings": demo.settings,
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


def _spread(method: Method) -> str:
    return f"{100 * method.mean:.1f}" + (f" ± {100 * method.deviation:.1f}" if len(method.accuracy) > 1 else "")


# Sections ----------------------------------------------------------------------------------------------------------


def _missing(demo: Demo) -> str:
    share = _percent(demo.settings["fraction"]).replace(".0", "")
    cells = []
    for i, label in enumerate(demo.labels.tolist()):
        seen, hidden = demo.truth[i, 0], ~demo.observed[i, 0]
        pictures = image(f"A handwritten {label} with a square missing", seen, INK, 0, 1, hidden, gone=True)
        pictures += image(f"The same {label}, complete", seen, INK, 0, 1)
        cells.append(f"<div>{pictures}<b>{label}</b></div>")
    return (
        f"<p>These are test digits. A square of {share} of the area is missing from each, at a random place, and so it "
        "is from every image the classifiers learned from. We know <em>which</em> pixels are missing, never what was "
        "there: only the pictures of the truth and the row of complete images, marked as such, have seen it.</p>"
        f'<figure class="card"><div class="digits">{"".join(cells)}</div><figcaption>Above: what the classifiers get; '
        '<span class="swatch"></span> marks the missing pixels. Below: the truth.</figcaption></figure>'
    )


def _guesses(demo: Demo) -> str:
    highest = max(float(demo.deviations["DMFA"].max()), 1e-6)
    samples = range(min(4, len(demo.samples)))
    ways = {"mean": "average", "k-NN": "k-NN", "SMFA": "SMFA", "DMFA": "DMFA"}
    rows = []
    for i, label in enumerate(demo.labels.tolist()):
        truth, hidden = demo.truth[i, 0], ~demo.observed[i, 0]
        cells = [image(f"{label}, incomplete", truth, INK, 0, 1, hidden, gone=True)]
        cells += [image(f"{label}, filled in by {w}", demo.imputed[w][i, 0], INK, 0, 1, hidden) for w in ways]
        cells += [image(f"{label}, how unsure the DMFA is", demo.deviations["DMFA"][i, 0], UNSURE, 0, highest)]
        cells += [image(f"{label}, possibility {s + 1}", demo.samples[s, i, 0], INK, 0, 1, hidden) for s in samples]
        rows.append((str(label), [*cells, image(f"{label}, truth", truth, INK, 0, 1, hidden)]))
    heads = ["given", *ways.values(), "how unsure", *(f"possible {s + 1}" for s in samples), "truth"]
    return (
        "<p>Four ways to fill the square with one guess, then what a single guess hides: how unsure it is, and several "
        "completions that are all possible. Where a digit could go on in two ways, one guess has to blur them.</p>"
        "<dl><dt>average</dt><dd>that pixel's average over the training images</dd>"
        "<dt>k-NN</dt><dd>the average of the five training images that look most alike</dd>"
        "<dt>SMFA</dt><dd>one statistical model of all digits, a mixture of factor analyzers, fitted to the incomplete "
        "images</dd><dt>DMFA</dt><dd>a neural network that looks at the pixels that are there and answers with such a "
        "mixture for this very image: what to expect, how unsure, and which pixels vary together</dd></dl>"
        + grid(heads, rows, "How unsure, as a standard deviation (ink runs from 0 to 1): "
                + bar(UNSURE, "0 (seen)", f"{highest:.2f}")
                + " The possibilities are drawn at random from the DMFA and cut off at no ink and full ink.", "wide")
    )  # fmt: skip


def _honesty(demo: Demo) -> str:
    levels = sorted(demo.densities[0].coverage)
    heads = [
        "",
        "score&nbsp;↓",
        "typical error&nbsp;↓",
        *(f"inside {100 * v:.0f}&nbsp;%" for v in levels),
        "seconds to&nbsp;fit",
    ]
    rows = []
    for colour, d in zip(_series(demo.densities), demo.densities, strict=True):
        name = f'<th scope="row"><span class="dot" style="background:{colour}"></span>{escape(d.name)}</th>'
        figures = [f"{d.nll:.3f}".replace("-", "−"), f"{d.rmse:.3f}", *(_percent(d.coverage[v]) for v in levels)]
        figures.append(f"{d.seconds:.1f}" if d.seconds >= 0.05 else "&lt; 0.1")
        rows.append(f"<tr>{name}{''.join(f'<td>{f}</td>' for f in figures)}</tr>")
    top = "".join(f'<th scope="col">{h}</th>' for h in heads)
    return (
        "<p>To check the models, a further square was hidden from the test digits and predicted. A model that knows "
        "its limits says “with 90 % probability the pixel lies in this interval” and is right nine times out of ten: "
        "<em>coverage</em> is how often it was. Less than promised is overconfident, more is timid.</p>"
        f'<figure class="card pair"><div class="scroll"><table class="figures"><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{_coverage(demo.densities, levels)}<figcaption>Score: negative "
        "log-likelihood per hidden pixel, lower is better. Typical error: root mean square, of ink from 0 to 1. "
        "“Independent pixels” knows every pixel's average and spread, and nothing of its neighbours.</figcaption>"
        "</figure>"
    )


def _series(densities: list[Density]) -> list[str]:
    return [SERIES[i % len(SERIES)] for i in range(len(densities))]


def _coverage(densities: list[Density], levels: list[float]) -> str:
    def at(promised: float, measured: float) -> tuple[float, float]:
        return 66 + 180 * promised, 206 - 180 * measured

    said = "; ".join(f"{d.name} {', '.join(_percent(d.coverage[v]) for v in levels)}" for d in densities)
    label = f"Coverage promised {', '.join(_percent(v) for v in levels)}, and measured: {said}"
    ticks = ""
    for tick in (0, 0.5, 0.9):
        (x, y), name = at(tick, tick), f"{100 * tick:.0f} %"
        ticks += f'<path class="line" d="M{x:.0f} 206V26M66 {y:.0f}H246"/><text x="{x:.0f}" y="222">{name}</text>'
        ticks += f'<text x="60" y="{y + 4:.0f}" class="end">{name}</text>' if tick else ""
    marks = ""
    for number, (colour, d) in enumerate(zip(_series(densities), densities, strict=True)):
        for level in levels:  # a little apart, so that equal ones do not hide each other
            x, y = at(level, d.coverage[level])
            marks += f'<circle cx="{x + 7 * (number - 1):.1f}" cy="{y:.1f}" r="5.5" fill="{colour}"/>'
    return (
        f'<svg class="square" viewBox="0 0 262 246" role="img" aria-label="{escape(label)}">{ticks}'
        f'<path class="ideal" d="M66 206L246 26"/>{marks}<text x="156" y="242">promised</text>'
        '<text transform="translate(14 116) rotate(-90)">measured</text></svg>'
    )


def _filters(demo: Demo) -> str:
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
            cells = [image(f"{name}, the digit", demo.truth[i, 0], INK, 0, 1, hidden[i, 0], gone=True)]
            for way, r in demo.responses.items():
                cells.append(image(f"{name}, {way}", r[i, o], RESPONSE, 0, high, hidden[i, 0]))
            for way in guesses:
                difference = demo.responses[way][i, o] - complete[i, o]
                cells.append(image(f"{name}, {way}, difference", difference, DIFFERENCE, -off, off, hidden[i, 0]))
            rows.append((f"{int(demo.labels[i])} <small>filter {o + 1}</small>", cells))
    heads = ["the digit", *map(escape, demo.responses)] + [
        f"{escape(way)} <small>difference</small>" for way in guesses
    ]
    listed = ", ".join(f"<b>{value:.3f}</b> ({escape(way)})" for way, value in errors.items())
    return (
        "<p>The first layer of the network is a set of filters that respond to strokes and edges. Zeros in the gap "
        "make edges that nobody drew. MisConv gives the <em>average response over everything that could be there</em>, "
        "in one exact formula, without drawing any samples. “Set to the mean” fills in the DMFA's best guess.</p>"
        + grid(heads, rows, "Left: the responses, each row on its own scale "
                + bar(RESPONSE, "0", "highest") + " Right: what differs from “nothing missing”, "
                + bar(DIFFERENCE, "too low", "too high") + " Typical difference (root mean "
                f"square) where a filter touches the gap, in all {len(hidden)} digits and {complete.shape[1]} filters: "
                f"{listed}.", "wide")
    )  # fmt: skip


def _methods(demo: Demo) -> str:
    values = [v for m in demo.methods for v in (*m.accuracy, m.mean - m.deviation, m.mean + m.deviation)]
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2) if (max(values) - min(values)) / s <= 7 or s == 0.2)
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step + 1e-9
    ticks = [low + step * i for i in range(round((high - low) / step) + 1)]

    def at(value: float) -> str:
        return f"{7 + 86 * (value - low) / (high - low):.2f}%"

    lines = "".join(f'<line x1="{at(t)}" x2="{at(t)}" y1="0" y2="100%" class="line"/>' for t in ticks)
    numbers = "".join(f'<text x="{at(t)}" y="15">{100 * t:.0f} %</text>' for t in ticks)
    rows = ""
    for m in demo.methods:
        bound = m is demo.methods[-1]
        kind = "bound" if bound else "ours" if m.name.startswith("MisConv") else "other"
        badge = ' <span class="badge">upper bound</span>' if bound else ""
        label = escape(f"{m.name}: mean {_spread(m)} %, seeds {', '.join(map(_percent, m.accuracy))}")
        dots = "".join(f'<circle cx="{at(a)}" cy="50%" r="4" class="seed"/>' for a in m.accuracy)
        rows += (
            f'<tr class="{kind}"><th scope="row">{escape(m.name)}{badge}<small>{escape(m.what)}</small></th>'
            f'<td class="strip"><svg role="img" aria-label="{label}">{lines}{dots}'
            f'<line x1="{at(m.mean - m.deviation)}" x2="{at(m.mean + m.deviation)}" y1="50%" y2="50%" class="spread"/>'
            f'<circle cx="{at(m.mean)}" cy="50%" r="6.5" class="mean"/></svg></td>'
            f'<td class="number">{_spread(m)}</td></tr>'
        )
    chance, runs = 100 * _chance(*_leaders(demo)[:2], _tested(demo)), len(demo.methods[0].accuracy)
    return (
        "<p>The same small network, trained in the same way; the rows differ only in what its first layer makes of the "
        f"gap. With {_tested(demo)} test digits and {runs} {'training' if runs == 1 else 'trainings'} of each, "
        f"differences of {'at least' if runs == 1 else 'up to about'} {chance:.1f} points (two standard errors) can be "
        "chance.</p>"
        '<figure class="card"><div class="scroll"><table class="methods"><thead><tr><th scope="col">the gap</th>'
        f'<th class="strip axis"><svg role="img" aria-label="Scale of accuracy">{numbers}</svg></th>'
        f'<th scope="col" class="number">correct, %</th></tr></thead><tbody>{rows}</tbody></table></div><figcaption>'
        "Share of the test digits read correctly. Small dots: one training each (one seed); large dot and bar: their "
        "mean ± one standard deviation. “Complete images” had nothing missing, in training and in the test."
        "</figcaption></figure>"
    )


def _made(demo: Demo, facts: dict[str, Any]) -> str:
    seed = demo.settings["seed"]
    changed = {k: v for k, v in demo.settings.items() if k not in ("seed", "seeds") and v != SETTINGS.get(k)}
    command = f"misconv demo --seed {seed} --seeds {demo.settings['seeds']}"
    if changed:  # what the command cannot say, Python can
        command = f"misconv.demo.experiment.run(seed={seed}, settings={changed | {'seeds': demo.settings['seeds']}})"
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    entries = {**{k.replace("_", " "): _plain(v) for k, v in demo.settings.items()}, "versions": versions}
    entries |= {"device": f"{facts['device']}, {facts['threads']} thread(s)", "commit": facts["commit"] or "not known"}
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in entries.items())
    return (
        f"<p>From scratch, in {demo.seconds:.0f} seconds, on handwritten digits that ship with scikit-learn "
        f"({' × '.join(map(str, demo.truth.shape[-2:]))} pixels). Validation digits chose the epoch of every training; "
        "the test digits were read once in this run. But the settings were chosen after a few trial runs on the same "
        "digits: an illustration, not a benchmark. The same seed, versions and number of threads "
        f"({facts['threads']}) give the same numbers:</p>"
        f"<pre><code>{escape(command)}</code></pre>"
        f'<details class="card"><summary>Settings and versions</summary><dl>{listed}</dl></details>'
        "<p>All numbers are in <code>results.json</code> beside this page. To use this on images of your own, read "
        "<code>README.md</code>; for the formulas, <code>docs/maths.md</code>. The idea is from Przewięźlikowski et "
        "al., “MisConv: Convolutional Neural Networks for Missing Data” (WACV 2022).</p>"
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# The page ----------------------------------------------------------------------------------------------------------


def _page(demo: Demo, facts: dict[str, Any]) -> str:
    ours, other, bound = _leaders(demo)
    share = {1 / 4: "A quarter", 1 / 2: "Half"}.get(demo.settings["fraction"], _percent(demo.settings["fraction"]))
    tiles = "".join(
        f'<div class="{kind}"><strong>{_percent(m.mean)}</strong><b>{escape(m.name)}</b><small>{said}</small></div>'
        for kind, m, said in (
            ("ours", ours, "expects over all that the gap could hold"),
            ("other", other, "best of the other ways"),
            ("bound", bound, "had nothing missing: the upper bound"),
        )
    )
    sections = {
        "What is missing": _missing(demo),
        "What could be there": _guesses(demo),
        "Is it honest about what it does not know?": _honesty(demo),
        "What the first layer sees": _filters(demo),
        "Which classifier is right most often?": _methods(demo),
        "How this was made": _made(demo, facts),
    }
    body = "".join(
        f"<section><h2><span>{i}</span>{title}</h2>{_hold(text)}</section>"
        for i, (title, text) in enumerate(sections.items(), 1)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Reading digits with a hole in them</title><style>{_style()}</style></head>\n<body><main><header>"
        f"{EYEBROW}<h1>Reading digits with a hole in them</h1>"
        f'<p class="lead">{share} of every handwritten digit is gone for good, and {len(demo.methods) - 1} classifiers '
        "that differ only in how they treat the gap learn to read the rest. "
        f'{_hold(escape(verdict(demo))).replace("k-NN", "k&#8209;NN")}</p><div class="tiles">{tiles}</div></header>\n'
        f"{body}</main></body></html>\n"
    )


def _hold(text: str) -> str:
    """A number and its % stay on one line."""
    return text.replace(" %", "&nbsp;%")


def _style() -> str:
    return resources.files("misconv").joinpath("report.css").read_text()

"""The report of the demo: one HTML file that needs nothing else, and its numbers as JSON.

The page is the template `report.html.jinja`; `page_photographs` and `page_digits` compute what it shows. Pictures are
small PNG files inside the page, charts are SVG, and all words are text: they stay sharp, follow the reader's light or
dark mode, and fit a phone.
"""

from __future__ import annotations

import json
import math
import platform
import re
from dataclasses import asdict, is_dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch

try:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as error:
    raise ImportError("the report is made by Jinja2: pip install 'misconv[demo]'") from error

from misconv._store import check_output_folder, check_replaceable, commit, read_json
from misconv._version import __version__
from misconv.demo import page_digits
from misconv.demo.experiment import QUICK, Demo, Settings
from misconv.demo.page_digits import digits_page, leaders
from misconv.demo.page_photographs import findings, photograph_tiles, photographs_page
from misconv.demo.words import hold_hyphen, hold_percent, percent
from misconv.paper.pictures import RESPONSE, UNSURE
from misconv.store import write_bytes

__all__ = ["PAGE", "check_folder", "findings", "numbers", "verdict", "write_demo"]

PAGE = "index.html"
FILES = ("results.json", PAGE)
EYEBROW = '<p class="eyebrow">misconv demo</p>'  # by it a page is known as ours


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
    page = _page(demo, _facts(demo)).encode()
    results = json.dumps(numbers(demo), indent=1, ensure_ascii=False, allow_nan=False).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot make the folder {folder}: {error.strerror}; choose another one") from error
    for name, content in zip(FILES, (results, page), strict=True):
        write_bytes(folder / name, content)
    return folder / PAGE


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
        return isinstance(facts, dict) and {"settings", "verdict", "versions", "seconds"} <= facts.keys()
    return path.is_file() and EYEBROW.encode() in path.read_bytes()


def verdict(demo: Demo) -> str:
    """How MisConv did on the digits against the best other method, and whether that may be chance."""
    return page_digits.verdict(demo.digits, demo.settings.digits)


# Numbers -----------------------------------------------------------------------------------------------------------


def numbers(demo: Demo) -> dict[str, Any]:
    """All that the report says in numbers and where they come from, as `results.json` holds it."""
    found: dict[str, Any] = _finite(_facts(demo))
    return found


def _facts(demo: Demo) -> dict[str, Any]:
    return {
        "settings": asdict(demo.settings),
        "findings": findings(demo.photographs),
        "verdict": verdict(demo),
        "photographs": demo.photographs.numbers(),
        "digits": demo.digits.numbers(),
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


def _entries(demo: Demo, facts: dict[str, Any]) -> dict[str, str]:
    """Settings, versions and the machine, in words."""
    found: dict[str, str] = {}
    for name, value in asdict(demo.settings).items():
        parts = {f"{name}: {k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
        found |= {k.replace("_", " "): _plain(v) for k, v in parts.items()}
    return found | {
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        "device": f"{facts['device']}, {facts['threads']} thread(s)",
        "commit": facts["commit"] or "not known",
    }


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _command(demo: Demo) -> str:
    """The line that makes this report again."""
    seed, seeds = demo.settings.seed, demo.settings.seeds
    for option, known in (("", Settings()), ("--quick ", QUICK)):
        if demo.settings == replace(known, seed=seed, seeds=seeds):
            return f"misconv demo {option}--seed {seed} --seeds {seeds}"
    return f"misconv.demo.run({_code(demo.settings)})"  # what the command cannot say, Python can


def _code(settings: Any) -> str:
    """A dataclass as a call that makes it, with what is not usual in it."""
    usual, kind = type(settings)(), type(settings).__name__
    changed = {k: v for k, v in vars(settings).items() if v != getattr(usual, k)}
    arguments = (f"{k}={_code(v) if is_dataclass(v) else repr(v)}" for k, v in changed.items())
    return f"misconv.demo.{kind}({', '.join(arguments)})"


# The page ----------------------------------------------------------------------------------------------------------


def _page(demo: Demo, facts: dict[str, Any]) -> str:
    ours, _, _ = leaders(demo.digits)
    fraction = demo.settings.photographs.fraction
    page = (
        _environment()
        .get_template("report.html.jinja")
        .render(
            eyebrow=Markup(EYEBROW),
            style=Markup(_read("report.css")),
            colours={"UNSURE": UNSURE, "RESPONSE": RESPONSE},
            share_in_words={1 / 4: "A quarter", 1 / 2: "Half"}.get(fraction, percent(fraction)),
            findings=findings(demo.photographs),
            verdict=verdict(demo),
            tiles=photograph_tiles(demo.photographs),
            photographs=photographs_page(demo.photographs, demo.settings.photographs),
            digits=digits_page(demo.digits, demo.settings.digits),
            ours=ours,
            fills={way.name: f"{way.rmse:.4f}" for way in demo.photographs.ways},
            named={m.name: m for m in demo.digits.methods},
            seconds=demo.seconds,
            threads=facts["threads"],
            command=_command(demo),
            entries=_entries(demo, facts),
        )
    )
    return re.sub(r">\s*\n\s*<", "><", page).strip() + "\n"


def _environment() -> Environment:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_read)
    )
    environment.filters |= {"percent": percent, "hold_percent": hold_percent, "hold_hyphen": hold_hyphen}
    return environment


def _read(name: str) -> str:
    return resources.files("misconv.demo").joinpath(name).read_text(encoding="utf-8")

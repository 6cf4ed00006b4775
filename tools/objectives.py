"""What densities learn from which objective: `make docs` prints the table, `--run` measures rows that are missing.

Trains densities on crops of scikit-learn's two photographs and on its digits, and writes `results/objectives.json` and
the table of `docs/maths.md`; about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv import MFA, ConvDMFA, UNetDMFA, data, fit_density, missing
from misconv._math import coverage_level
from misconv._store import commit, device_name, versions
from misconv.functional import expected_conv2d

ROOT = Path(__file__).parents[1]
RESULT, DOCUMENT = ROOT / "results" / "objectives.json", ROOT / "docs" / "maths.md"
CROPS, TEST_CROPS, SIDE, STEPS, BATCH = 600, 300, 32, 600, 32
SETTINGS = {
    "crops": CROPS, "test crops": TEST_CROPS, "side": SIDE, "steps": STEPS, "batch": BATCH,
    "missing": "misconv.missing.square, fraction 1/4", "seed": 0,
}  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {"density": "ConvDMFA", "objective": "joint", "bounds": None, "rank": 4, "components": 1},
    {"density": "UNetDMFA", "objective": "joint", "bounds": None, "rank": 4, "components": 1},
    {"density": "UNetDMFA", "objective": "joint", "bounds": "data", "rank": 4, "components": 1},
    {"density": "UNetDMFA", "objective": "marginal", "bounds": "data", "rank": 4, "components": 1},
    {"density": "UNetDMFA", "objective": "joint+marginal", "bounds": None, "rank": 4, "components": 1},
    {"density": "UNetDMFA", "objective": "joint+marginal", "bounds": "data", "rank": 4, "components": 1},
    {"density": "UNetDMFA", "objective": "joint+marginal", "bounds": "data", "rank": 0, "components": 1},
    {"density": "UNetDMFA", "objective": "joint+marginal", "bounds": "data", "rank": 4, "components": 3},
    {"density": "UNetDMFA", "objective": "joint+marginal+moments", "bounds": "data", "rank": 4, "components": 1},
    {"density": "UNetDMFA", "objective": "joint+marginal+moments", "bounds": "data", "rank": 4, "components": 3},
    *(
        {
            "density": "UNetDMFA",
            "objective": objective,
            "bounds": "data",
            "rank": 4,
            "components": count,
            "of": "digits",
        }
        for objective in ("joint+marginal", "joint+marginal+moments")
        for count in (1, 3)
    ),
]


def main() -> None:
    """Print the table into the document, measured first if so asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="measure the rows that results/objectives.json lacks")
    if parser.parse_args().run:
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    table = _table(json.loads(RESULT.read_text(encoding="utf-8"))["rows"])
    text = DOCUMENT.read_text(encoding="utf-8")
    made = "<!-- objectives: made by tools/objectives.py -->"
    text = re.sub(f"{made}.*?<!-- end", lambda _: f"{made}\n{table}\n<!-- end", text, flags=re.DOTALL)
    DOCUMENT.write_text(text, encoding="utf-8")


def measure() -> dict[str, Any]:
    """Train and test every row."""
    photographs = crops(CROPS, left=True, seed=0), crops(TEST_CROPS, left=False, seed=1)
    digits, _ = data.digits()
    rows = []
    for row in ROWS:
        known = [old for old in _kept() if row.items() <= old.items() and row.keys() & {"of"} == old.keys() & {"of"}]
        images = (digits[:1400], digits[1400:]) if row.get("of") == "digits" else photographs
        rows.append(known[0] if known else {**row, **_measure(row, *images)})
        print(rows[-1], flush=True)
    cpu = torch.device("cpu")
    where = {"commit": commit(), "versions": versions(cpu), "device": device_name(cpu)}
    return {"settings": SETTINGS, "rows": rows, **where}


def _kept() -> list[dict[str, Any]]:
    """Rows that were measured with these settings before, and are not measured again."""
    record = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    rows: list[dict[str, Any]] = record.get("rows", [])
    return rows if record.get("settings") == SETTINGS else []


def _measure(row: dict[str, Any], train: Tensor, test: Tensor) -> dict[str, float]:
    observed, shown = (
        missing.square(len(x), *x.shape[2:], fraction=1 / 4, generator=torch.Generator().manual_seed(seed))
        for seed, x in ((2, train), (3, test))
    )
    torch.manual_seed(0)
    make: Any = ConvDMFA if row["density"] == "ConvDMFA" else UNetDMFA
    density = make(train.shape[1], row["components"], row["rank"], bounds=row["bounds"])
    fit_density(
        density, train, observed, steps=STEPS, batch_size=BATCH, objective=row["objective"],
        progress=False,
    )  # fmt: skip
    with torch.no_grad():
        return _figures(density.eval(), test, shown)


def _figures(density: nn.Module, x: Tensor, shown: Tensor) -> dict[str, float]:
    """How well the pixels that are not shown are predicted, and what a layer makes of it."""
    p, hidden = density(x, shown), (~shown).expand(x.shape)
    assert isinstance(p, MFA)
    error = (p.mean - x)[hidden].square().mean().sqrt()
    b, c, i, j = hidden.nonzero(as_tuple=True)
    variances = p.noise + p.factors.square().sum(2)
    level = coverage_level(p.weights[b], p.means[b, :, c, i, j], variances[b, :, c, i, j], x[b, c, i, j])
    return {
        "rmse": float(error),
        "deviation": float(p.variance[hidden].mean().sqrt()),
        "coverage_50": float((level <= 0.5).double().mean()),
        "coverage_90": float((level <= 0.9).double().mean()),
        "joint_nll": float(-p.log_prob(x, hidden).sum() / hidden.sum()),
        "marginal_nll": float(-p.marginal_log_prob(x, hidden).sum() / hidden.sum()),
        "largest_variance": float(p.variance.max()),
        "layer": _layer(p, x),
    }


def _layer(p: MFA, x: Tensor) -> float:
    """The error of expected responses over that of the responses to the mean image."""
    channels = x.shape[1]
    weight = torch.randn(64, channels, 3, 3, generator=torch.Generator().manual_seed(0)) / math.sqrt(9 * channels)
    bias = -F.conv2d(x, weight).mean((0, 2, 3))  # filters that are on as often as off
    truth = torch.relu(F.conv2d(x, weight, bias))
    expected = (expected_conv2d(p, weight, bias) - truth).square().mean()
    return float((expected / (torch.relu(F.conv2d(p.mean, weight, bias)) - truth).square().mean()).sqrt())


def crops(count: int, *, left: bool, seed: int) -> Tensor:
    """Crops of one half of scikit-learn's photographs (N, 3, side, side), from 0 to 1."""
    halves = [photograph.tensor_split(2, dim=2)[0 if left else 1] for photograph in data.photographs()]
    generator, found = torch.Generator().manual_seed(seed), []
    for number in range(count):
        half = halves[number % 2]
        y, x = (int(torch.randint(n - SIDE, (), generator=generator)) for n in half.shape[1:])
        found.append(half[:, y : y + SIDE, x : x + SIDE])
    return torch.stack(found)


def _table(rows: list[dict[str, Any]]) -> str:
    names = ["images", "density", "objective", "bounds", "K, L", "RMSE", "claimed", "inside 50 / 90 %", "joint NLL"]
    names += ["marginal NLL", "largest variance", "layer"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for r in rows:
        bounds = "none" if r["bounds"] is None else "of the data"
        lines.append(
            f"| {r.get('of', 'photographs')} | {r['density']} | {r['objective']} | {bounds} | "
            f"{r['components']}, {r['rank']} | {r['rmse']:.3f} | {r['deviation']:.3f} | "
            f"{100 * r['coverage_50']:.0f} / {100 * r['coverage_90']:.0f} | "
            f"{r['joint_nll']:.2f} | {r['marginal_nll']:.2f} | {r['largest_variance']:.2g} | {r['layer']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

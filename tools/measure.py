"""Measure what the documents state: `make docs` runs this.

Writes every number to `results/formulas.json` and the tables made of them between their markers in `docs/maths.md`.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import misconv
from misconv import MFA
from misconv._math import ACTIVATIONS, activation_module
from misconv._store import commit
from misconv.functional import conv2d_moments, expected_activation, expected_conv2d

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "results"

SETTINGS: dict[str, Any] = {
    "formulas": {
        "seeds": [0, 1, 2],
        "images": 8,
        "image": [3, 16, 16],
        "rank": 4,
        "filters": 32,
        "kernel": 3,
        "padding": 1,
        "missing": "misconv.missing.square, fraction 1/4",
        "mean": "0.5 + 0.25 · smooth random field",
        "factors": "0.1 · smooth random field",
        "noise": "variance s², s uniform in [0.05, 0.15]",
        "weights": "as torch.nn.Conv2d begins",
        "completions": 20_000,
        "dtype": "float64",
    },
    "quadrature": {
        "means": "161 from -10 to 10",
        "standard deviations": [0.1, 0.3, 1.0, 3.0, 5.0, 10.0, 30.0],
        "reference": "Gauss–Legendre, 16 nodes on each of 1024 panels over ±12 standard deviations, float64",
        "Gauss–Hermite nodes": 65,
    },
    "single precision": {
        "standard deviations": "25 from 1e-3 to 1e3, evenly in the logarithm",
        "means": "201 from -50 to 50, as they are and times the standard deviation",
        "reference": "the same function of the same float32 numbers, computed in float64",
    },
}


# The formulas against Monte Carlo ----------------------------------------------------------------------------------


class Case:
    """Random images with a missing square, a convolution, and what Monte Carlo says of its expected ReLU."""

    def __init__(self, seed: int) -> None:
        size = SETTINGS["formulas"]
        torch.manual_seed(seed)
        batch, image = size["images"], size["image"]
        self.observed = misconv.missing.square(batch, *image[1:], fraction=1 / 4)
        self.p = MFA(
            logits=torch.zeros(batch, 1),
            means=0.5 + 0.25 * smooth_field(batch, 1, *image),
            factors=0.1 * smooth_field(batch, 1, size["rank"], *image),
            noise=(0.05 + 0.1 * torch.rand(batch, 1, *image)).square(),
            observed=self.observed,
        )
        conv = torch.nn.Conv2d(image[0], size["filters"], size["kernel"], padding=size["padding"])
        assert conv.bias is not None
        self.weight, self.bias = conv.weight.detach(), conv.bias.detach()
        holes = self.convolve((~self.observed).to(torch.float64), torch.ones(1, 1, *self.weight.shape[2:]))
        self.touched = (holes > 0).expand(-1, len(self.weight), -1, -1)
        self.truth, self.standard_error, self.active = self.monte_carlo(size["completions"])

    def convolve(self, images: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Any leading dimensions, (…, C, H, W) → (…, O, H', W')."""
        flat = F.conv2d(images.flatten(0, -4), weight, bias, padding=SETTINGS["formulas"]["padding"])
        return flat.view(*images.shape[:-3], *flat.shape[1:])

    def monte_carlo(self, completions: int, chunk: int = 50) -> tuple[Tensor, Tensor, Tensor]:
        """The mean of ReLU(conv(completion)) over many completions, its standard error, and how often it is above 0."""
        total, squares, above = (torch.zeros(len(self.p), len(self.weight), *self.p.shape[-2:]) for _ in range(3))
        for _ in range(completions // chunk):
            active = self.convolve(self.p.sample(chunk), self.weight, self.bias).relu_()
            total += active.sum(0)
            above += active.count_nonzero(0)
            squares += active.square_().sum(0)
        mean = total / completions
        variance = (squares / completions - mean.square()).clamp_min(0)
        return mean, (variance / completions).sqrt(), above / completions


def smooth_field(*shape: int) -> Tensor:
    """Random images (…, C, H, W) that change over a quarter of their width, with variance about one."""
    coarse = torch.randn(math.prod(shape[:-2]), 1, 6, 6)
    fine = F.interpolate(coarse, scale_factor=4, mode="bicubic")[..., 4:-4, 4:-4]
    return (fine / fine.std()).reshape(shape)


def printed_relu(mean: Tensor, variance: Tensor, share: float) -> Tensor:
    """E[ReLU] with only a share of the exponential term σφ(m/σ)."""
    # Nothing is random where the variance is 0; the tiny number keeps 0/0 away and changes no digit.
    spread = variance.clamp_min(1e-300).sqrt()
    z = mean / spread
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return mean * 0.5 * torch.erfc(-z / math.sqrt(2)) + share * spread * density


def rivals(case: Case) -> tuple[dict[str, Tensor], float]:
    """The expected ReLU by every way of computing it, (B, O, H, W), and the share of negative printed variances."""
    p, weight, bias = case.p, case.weight, case.bias
    _, factors, noise = p.pinned()
    exact_mean, exact_variance = (moment[:, 0] for moment in conv2d_moments(p, weight, bias, padding=1))
    zeros = torch.where(case.observed, p.mean, 0)
    on_zeros = F.relu(case.convolve(zeros, weight, bias))

    printed_variance = (case.convolve(noise, weight) + case.convolve(factors, weight).square().sum(2))[:, 0]
    clipped = printed_variance.clamp_min(0)
    biased_variance = case.convolve(noise, weight.square(), bias.square())
    biased_variance = (biased_variance + case.convolve(factors, weight, bias).square().sum(2))[:, 0]

    def known_centre_sees_zeros(expected: Tensor) -> Tensor:
        return torch.where(case.observed[:, :1], on_zeros, expected)

    results = {
        "misconv": expected_conv2d(p, weight, bias, padding=1),
        "missing pixels set to their mean, then ReLU(conv)": F.relu(exact_mean),
        "missing pixels set to zero, then ReLU(conv)": on_zeros,
        "paper: noise through the weights, not their squares": expected_activation("relu", exact_mean, clipped),
        "paper: a quarter of the exponential term": printed_relu(exact_mean, exact_variance, 1 / 4),
        "paper: both": printed_relu(exact_mean, clipped, 1 / 4),
        "code: bias inside the variance": expected_activation("relu", exact_mean, biased_variance),
        "code: half of the exponential term": printed_relu(exact_mean, exact_variance, 1 / 2),
        "code: zeros in windows with an observed centre": known_centre_sees_zeros(
            expected_activation("relu", exact_mean, exact_variance)
        ),
        "code: all three": known_centre_sees_zeros(printed_relu(exact_mean, biased_variance, 1 / 2)),
    }
    return results, float((printed_variance[case.touched] < 0).double().mean())


def lost_gradient(case: Case) -> float:
    """How far the gradient of the mean activation in the weights is off when none flows through the noise term."""

    def gradient(through_noise: bool) -> Tensor:
        weight = case.weight.clone().requires_grad_()
        mean, variance = conv2d_moments(case.p, weight, case.bias, padding=1)
        if not through_noise:
            _, _, noise = case.p.pinned()
            by_noise = case.convolve(noise, weight.square())
            variance = variance - by_noise + by_noise.detach()
        expected = expected_activation("relu", mean, variance)[:, 0]
        (result,) = torch.autograd.grad(expected[case.touched].mean(), weight)
        return result

    right = gradient(True)
    return float((gradient(False) - right).norm() / right.norm())


def errors(case: Case, result: Tensor, scale: float) -> dict[str, float]:
    """Errors against Monte Carlo over the windows that touch a missing pixel, relative to `scale`."""
    error = (result - case.truth)[case.touched]
    # A response that is hardly ever above zero has no usable standard error.
    judged = case.active[case.touched] > 0.01
    return {
        "bias": float(error.mean()) / scale,
        "rms": float(error.square().mean().sqrt()) / scale,
        "max": float(error.abs().max()) / scale,
        "chi square": float((error[judged] / case.standard_error[case.touched][judged]).square().mean()),
    }


def measure_seed(seed: int) -> dict[str, Any]:
    """Everything about one random case."""
    case = Case(seed)
    scale = float(case.truth[case.touched].square().mean().sqrt())
    results, negative = rivals(case)
    return {
        "seed": seed,
        "rms of the truth": scale,
        "relative standard error": float(case.standard_error[case.touched].square().mean().sqrt()) / scale,
        "share of negative printed variances": negative,
        "share of windows touched": float(case.touched.double().mean()),
        "relative gradient error without the noise path": lost_gradient(case),
        "rows": {name: errors(case, result, scale) for name, result in results.items()},
    }


def measure_formulas() -> dict[str, Any]:
    """All seeds, in double precision."""
    torch.set_default_dtype(torch.float64)
    return {"seeds": [measure_seed(seed) for seed in SETTINGS["formulas"]["seeds"]]}


def formulas_table(found: dict[str, Any]) -> str:
    """Markdown: bias, RMS and largest error of every rival, as a share of the RMS activation."""
    seeds = found["seeds"]

    def cell(row: str, column: str) -> str:
        values = np.array([seed["rows"][row][column] for seed in seeds])
        return f"{100 * values.mean():.2f} ± {100 * values.std(ddof=1):.2f}"

    lines = [
        [row, cell(row, "bias"), cell(row, "rms"), f"{100 * max(s['rows'][row]['max'] for s in seeds):.1f}"]
        for row in seeds[0]["rows"]
    ]
    return table(["expected ReLU by", "bias, %", "RMS error, %", "largest error, %"], lines)


def noise_sentence(found: dict[str, Any]) -> str:
    """What the table cannot show: how good the truth is, negative variances, gradients."""
    seeds = found["seeds"]
    chi = [seed["rows"]["misconv"]["chi square"] for seed in seeds]
    error = [100 * seed["relative standard error"] for seed in seeds]
    negative = [100 * seed["share of negative printed variances"] for seed in seeds]
    gradient = [100 * seed["relative gradient error without the noise path"] for seed in seeds]
    return "\n".join(
        [
            f"- Monte Carlo's own standard error (RMS): {span(error, '.2f')} % of the RMS activation. The mean of "
            f"(misconv's error / standard error)² is {span(chi, '.3f')}; 1 means that nothing but Monte Carlo's noise "
            "is left (responses share completions, so it scatters).",
            f"- Printed variances that are negative: {span(negative, '.1f')} % of the touched responses.",
            "- Without the gradient through the noise term the gradient of the mean activation in the weights is off "
            f"by {span(gradient, '.1f')} % of its length.",
        ]
    )


# Quadrature --------------------------------------------------------------------------------------------------------

TRAPEZOID = ("mish", "gelu_tanh")
LOGISTIC = ("sigmoid", "tanh", "silu", "softplus")


def legendre(function: Callable[[Tensor], Tensor], mean: Tensor, spread: float, panels: int = 1024) -> Tensor:
    """E[f(N(mean, spread²))] for a smooth f by 16-point Gauss–Legendre on many panels over ±12 deviations."""
    nodes, weights = (torch.as_tensor(a) for a in np.polynomial.legendre.leggauss(16))
    half = 12 / panels
    centres = torch.arange(panels) * (2 * half) - 12 + half
    z = (centres[:, None] + half * nodes).flatten()
    share = (half * weights).repeat(panels) * torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return torch.stack([(share * function(m + spread * z)).sum() for m in mean])


def hermite(function: Callable[[Tensor], Tensor], mean: Tensor, spread: float, nodes: int) -> Tensor:
    """E[f(N(mean, spread²))] by Gauss–Hermite quadrature."""
    z, weights = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(nodes))
    return function(mean[:, None] + spread * z) @ (weights / weights.sum())


def measure_quadrature() -> dict[str, Any]:
    """Largest error over the means for every standard deviation, of misconv and of Gauss–Hermite."""
    torch.set_default_dtype(torch.float64)
    nodes = SETTINGS["quadrature"]["Gauss–Hermite nodes"]
    mean = torch.linspace(-10, 10, 161)
    rows, unsure = [], 0.0
    for spread in SETTINGS["quadrature"]["standard deviations"]:
        row: dict[str, Any] = {"standard deviation": spread, "misconv": {}, "Gauss–Hermite": {}}
        for name in (*TRAPEZOID, *LOGISTIC):
            function = activation_module(name)
            truth = legendre(function, mean, spread)
            finer = legendre(function, mean[::40], spread, panels=2048)
            unsure = max(unsure, float((truth[::40] - finer).abs().max()))
            ours = expected_activation(name, mean, torch.full_like(mean, spread**2))
            row["misconv"][name] = float((ours - truth).abs().max())
            row["Gauss–Hermite"][name] = float((hermite(function, mean, spread, nodes) - truth).abs().max())
        rows.append(row)
    return {"rows": rows, "reference changes with twice the panels by": unsure}


def quadrature_table(found: dict[str, Any]) -> str:
    """Markdown: one row per standard deviation."""
    titles = ["σ"]
    for name in TRAPEZOID:
        titles += [f"{name}, trapezoid", f"{name}, Gauss–Hermite"]
    titles += [f"{name}, mixture" for name in LOGISTIC]
    lines = []
    for row in found["rows"]:
        cells = [f"{row['standard deviation']:g}"]
        for name in TRAPEZOID:
            cells += [f"{row['misconv'][name]:.0e}", f"{row['Gauss–Hermite'][name]:.0e}"]
        lines.append(cells + [f"{row['misconv'][name]:.0e}" for name in LOGISTIC])
    check = f"The reference itself moves by at most {found['reference changes with twice the panels by']:.0e} when its "
    return table(titles, lines) + f"\n\n{check}panels are doubled."


# Single precision --------------------------------------------------------------------------------------------------


def measure_single() -> dict[str, Any]:
    """The largest error of float32 relative to max(1, |m|, σ), per activation; and whether gradients stay finite."""
    spread = torch.logspace(-3, 3, 25, dtype=torch.float32)[:, None]
    steps = torch.linspace(-50, 50, 201, dtype=torch.float32)
    mean = torch.cat([steps.expand(len(spread), -1), steps * spread], 1)
    variance = spread.square().expand_as(mean).contiguous()
    scale = torch.maximum(mean.abs().clamp_min(1), spread).double()
    rows = {}
    for name in ACTIVATIONS:
        leaves = [mean.clone().requires_grad_(), variance.clone().requires_grad_()]
        single = expected_activation(name, leaves[0], leaves[1])
        double = expected_activation(ACTIVATIONS[name]().double(), mean.double(), variance.double())
        # The identity does not depend on the variance at all.
        gradients = torch.autograd.grad(single.sum(), leaves, allow_unused=True)
        finite = all(bool(g.isfinite().all()) for g in gradients if g is not None)
        error = (single.detach().double() - double.detach()).abs() / scale
        where = float(spread[int(error.argmax()) // error.shape[1]])
        rows[name] = {"largest error": float(error.max()), "standard deviation": where, "gradients finite": finite}
    return {"rows": rows}


def single_table(found: dict[str, Any]) -> str:
    """Markdown: one row per activation."""
    lines = [
        [
            name,
            f"{row['largest error']:.1e}",
            f"{row['standard deviation']:.2g}",
            "yes" if row["gradients finite"] else "**no**",
        ]
        for name, row in found["rows"].items()
    ]
    return table(["activation", "largest error of float32", "at σ", "gradients finite"], lines)


# Writing -----------------------------------------------------------------------------------------------------------


def span(values: Sequence[float], form: str) -> str:
    """The range of a few numbers, or the number they share."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of GitHub's markdown; the first column is text, the others are numbers."""
    rules = [":--", *("--:" for _ in titles[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, rules, *lines))


def insert(text: str, name: str, content: str) -> str:
    """Put `content` between the markers of the table `name`."""
    pattern = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    replaced, count = pattern.subn(lambda match: f"{match[1]}{content}\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"maths.md must hold the markers of table {name!r} once, found {count}")
    return replaced


def main() -> None:
    """Measure, then write the record and the tables."""
    torch.set_num_threads(1)
    results = {
        "formulas": measure_formulas(),
        "quadrature": measure_quadrature(),
        "single precision": measure_single(),
    }
    record = {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": f"cpu, {platform.machine()}, one thread",
        "settings": SETTINGS,
        "results": results,
    }
    (RESULTS / "formulas.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    maths = DOCS / "maths.md"
    text = maths.read_text(encoding="utf-8")
    text = insert(text, "formulas", formulas_table(results["formulas"]))
    text = insert(text, "formulas, notes", noise_sentence(results["formulas"]))
    text = insert(text, "quadrature", quadrature_table(results["quadrature"]))
    text = insert(text, "single precision", single_table(results["single precision"]))
    maths.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

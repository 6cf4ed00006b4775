"""Draw the pictures of the documents: `make docs` runs this.

`pictures/overview.png`: a photograph with holes, what a density says about them, and what a first layer makes of it.
The photograph ships with scikit-learn. The density, a `UNetDMFA`, learns from incomplete crops of it that do not touch
the part that is shown. Its components and rank were chosen after looking at a few pictures and their errors, so those
errors are no benchmark.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import misconv
from misconv import MFA, data

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "overview.png"

SEED = 5
TOP, LEFT, HEIGHT, WIDTH = 96, 232, 192, 192  # the part that is shown: roofs of a pagoda and the lake behind it
HIDDEN = 0.2  # share of the pixels
SIDE, CROPS, STEPS = 48, 2000, 400  # of the crops to learn from
KERNEL = 5


# The density -------------------------------------------------------------------------------------------------------


def holes(count: int, generator: torch.Generator) -> Tensor:
    """`observed` of images as large as the part that is shown."""
    return misconv.missing.free_form(count, HEIGHT, WIDTH, fraction=HIDDEN, strokes=7, turns=6, generator=generator)


def training_crops(photo: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Crops from all over the photograph, none of which touches the part that is shown, and what is seen of them."""
    crops: list[Tensor] = []
    while len(crops) < CROPS:
        top, left = (int(torch.randint(n - SIDE + 1, (), generator=generator)) for n in photo.shape[1:])
        if top + SIDE <= TOP or top >= TOP + HEIGHT or left + SIDE <= LEFT or left >= LEFT + WIDTH:
            crops.append(photo[:, top : top + SIDE, left : left + SIDE])
    # Pieces of holes like those that are shown, so that strokes are as wide.
    pieces = (HEIGHT // SIDE) * (WIDTH // SIDE)
    squares = holes(math.ceil(CROPS / pieces), generator).unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE)
    return torch.stack(crops), squares.reshape(-1, 1, SIDE, SIDE)[:CROPS]


def learn(x: Tensor, observed: Tensor) -> misconv.UNetDMFA:
    """A density of incomplete crops."""
    torch.manual_seed(SEED)
    density = misconv.UNetDMFA(channels=3, components=2, rank=12, noise_floor=1e-4)
    misconv.fit_density(density, x, observed, steps=STEPS, batch_size=16, augment=True)
    return density.eval()


# The layer ---------------------------------------------------------------------------------------------------------


def edge_filter() -> Tensor:
    """A Gabor filter on the brightness, of the kind first layers learn: (1, 3, 5, 5), with sum zero."""
    half = KERNEL // 2
    y, x = torch.meshgrid(*2 * [torch.arange(-half, half + 1.0)], indexing="ij")
    wave = torch.exp(-(x**2 + y**2) / (2 * 1.2**2)) * torch.sin(2 * math.pi * y / KERNEL)
    return (wave / wave.abs().sum() / 3).expand(1, 3, KERNEL, KERNEL)


class Responses(NamedTuple):
    """What the layer makes of the crop, (H, W) each, and RMS errors over the windows that miss a pixel."""

    zeros: Tensor
    expected: Tensor
    spread: Tensor
    truth: Tensor
    errors: dict[str, float]


def respond(crop: Tensor, observed: Tensor, p: MFA) -> Responses:
    """The same filter and ReLU on the crop with zeros in its holes, on its density, and on the whole crop."""
    conv = torch.nn.Conv2d(3, 1, KERNEL, padding=KERNEL // 2, padding_mode="reflect", bias=False)
    conv.weight = torch.nn.Parameter(edge_filter())
    layer = misconv.MisConv2d.from_conv(conv, activation="relu")
    plain = torch.nn.Sequential(conv, torch.nn.ReLU())
    with torch.no_grad():
        moments = misconv.functional.conv2d_moments(p, conv.weight, padding=KERNEL // 2, padding_mode=conv.padding_mode)
        truth, expected = plain(crop)[0, 0], layer(p)[0, 0]
        zeros, filled = plain(torch.where(observed, crop, 0))[0, 0], plain(p.mean)[0, 0]
    touched = F.max_pool2d((~observed).float(), KERNEL, 1, KERNEL // 2)[0, 0] > 0
    errors = {
        name: float((response - truth)[touched].square().mean().sqrt() / truth[touched].square().mean().sqrt())
        for name, response in (("zeros", zeros), ("filled", filled), ("expected", expected))
    }
    return Responses(zeros, expected, spread_of(p, *moments)[0, 0], truth, errors)


def spread_of(p: MFA, means: Tensor, variances: Tensor) -> Tensor:
    """The standard deviation of responses (B, O, H, W) from the moments of every component (B, K, O, H, W)."""
    weights = p.weights[..., None, None, None]
    mean = (weights * means).sum(1, keepdim=True)
    return (weights * (variances + (means - mean).square())).sum(1).sqrt()


# The picture -------------------------------------------------------------------------------------------------------


def draw(crop: Tensor, observed: Tensor, p: MFA, responses: Responses) -> Figure:
    """Two rows, image and layer, of four: as seen, as expected, how unsure, the truth."""
    plt.rcParams.update({"font.size": 12, "axes.titlesize": 12.5, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(2, 4, figsize=(12, 6.75), layout="constrained")
    hole = torch.tensor([0.93, 0.12, 0.47], dtype=crop.dtype).view(3, 1, 1)
    show(axes[0, 0], torch.where(observed, crop, hole), f"The photo, {100 * HIDDEN:.0f} % missing")
    show(axes[0, 1], p.mean, "Expected image")
    show(axes[0, 2], p.variance.mean(1)[0].sqrt(), "How unsure: σ of each pixel", high=0.25, bar=True)
    show(axes[0, 3], crop, "The whole photo")
    high = float(responses.truth.quantile(0.995))
    error = {name: f"{100 * value:.0f} %" for name, value in responses.errors.items()}
    show(axes[1, 0], responses.zeros, "Holes as zeros: false edges", high, note=f"RMS error {error['zeros']}")
    show(
        axes[1, 1],
        responses.expected,
        "MisConv2d: the expectation",
        high,
        note=f"RMS error {error['expected']} (mean filled in: {error['filled']})",
    )
    show(axes[1, 2], responses.spread, "How unsure: σ of each response", high / 2, bar=True)
    show(axes[1, 3], responses.truth, "Nothing missing", high, bar=True)
    axes[0, 0].set_ylabel("image", fontsize=14)
    axes[1, 0].set_ylabel("one filter + ReLU", fontsize=14)
    return figure


def show(axis: Axes, values: Tensor, title: str, high: float | None = None, bar: bool = False, note: str = "") -> None:
    """One panel: a colour image (1, 3, H, W), or numbers (H, W) from 0 to `high`."""
    picture = values.clamp(0, 1)[0].permute(1, 2, 0) if values.dim() == 4 else values
    drawn = axis.imshow(picture.numpy(), cmap="magma", vmin=0, vmax=high, interpolation="bilinear")
    axis.set(title=title, xticks=[], yticks=[])
    axis.set_xlabel(note, fontsize=11)
    axis.spines[:].set_visible(False)
    if bar:
        assert axis.figure is not None
        scale = axis.figure.colorbar(drawn, cax=axis.inset_axes((0.9, 0.08, 0.03, 0.36)), ticks=[0, high])
        scale.ax.set_yticklabels(["0", f"{high:.2f}"], color="white")
        scale.ax.yaxis.set_ticks_position("left")
        scale.ax.tick_params(size=0, labelsize=11)
        scale.outline.set_edgecolor("white")


def save(figure: Figure, path: Path) -> None:
    """A PNG with a palette, which is a third of the size and looks the same."""
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)  # sharp also on dense screens
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(256, dither=Image.Dither.FLOYDSTEINBERG)
    small.save(path, optimize=True)


def main() -> None:
    """Hide a part of the crop, complete it, and draw what the layer makes of it."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    photo = data.photographs()[0]
    crop = photo[None, :, TOP : TOP + HEIGHT, LEFT : LEFT + WIDTH]
    observed = holes(1, generator)
    density = learn(*training_crops(photo, generator))
    with torch.no_grad():
        p = density(crop, observed)
    save(draw(crop, observed, p, respond(crop, observed, p)), PICTURE)


if __name__ == "__main__":
    main()

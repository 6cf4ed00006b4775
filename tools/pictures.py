"""Draw the pictures of the documents: `make docs` runs this.

`pictures/overview.png`: a photograph with holes, what a density says about them, and what a first layer makes of it.
The photograph ships with scikit-learn. The density is made of factor analyses of small patches, fitted outside the
crop that is shown; every patch of the crop is conditioned on the pixels that were seen in it. Patch size, rank and
groups were chosen after looking at a few pictures and their errors, so those errors are no benchmark.
"""

from __future__ import annotations

import math
import warnings
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
from sklearn.datasets import load_sample_image
from sklearn.decomposition import FactorAnalysis
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn
from torch import Tensor

import misconv
from misconv import MFA

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "overview.png"

SEED = 5
TOP, LEFT, HEIGHT, WIDTH = 96, 232, 192, 192  # the crop: roofs of a pagoda and the lake behind it
HIDDEN = 0.2  # share of the pixels
CORE, MARGIN = 12, 4  # a patch: 12×12 pixels, with 4 more on every side to learn from
GROUPS, RANK, PATCHES = 4, 48, 10_000  # one factor analyzer of this rank for each of four degrees of contrast
KERNEL = 5


# The density -------------------------------------------------------------------------------------------------------


def photograph() -> Tensor:
    """The picture of a pagoda that ships with scikit-learn, (3, H, W), numbers between 0 and 1."""
    return torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1).double() / 255


def training_patches(photo: Tensor, generator: torch.Generator) -> Tensor:
    """Patches from all over the photograph, none of which touches the crop: (N, 3, side, side)."""
    side = CORE + 2 * MARGIN
    patches: list[Tensor] = []
    while len(patches) < PATCHES:
        top = int(torch.randint(photo.shape[1] - side + 1, (), generator=generator))
        left = int(torch.randint(photo.shape[2] - side + 1, (), generator=generator))
        if top + side <= TOP or top >= TOP + HEIGHT or left + side <= LEFT or left >= LEFT + WIDTH:
            patches.append(photo[:, top : top + side, left : left + side])
    return torch.stack(patches)


def fit(patches: Tensor) -> list[MFA]:
    """A factor analyzer for patches of each degree of contrast, from sky to roof tiles."""
    order = patches.std((1, 2, 3)).argsort()
    return [fit_one(patches[chosen]) for chosen in order.chunk(GROUPS)]


def fit_one(patches: Tensor) -> MFA:
    """One factor analyzer, as an MFA of one patch."""
    model = FactorAnalysis(RANK, svd_method="randomized", random_state=0, max_iter=20, tol=1)
    with warnings.catch_warnings():
        # Twenty rounds are enough for a picture.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(patches.flatten(1).numpy())
    shape = patches.shape[1:]
    return MFA(
        logits=patches.new_zeros(1, 1),
        means=torch.from_numpy(model.mean_).view(1, 1, *shape),
        factors=torch.from_numpy(model.components_).view(1, 1, RANK, *shape),
        noise=torch.from_numpy(model.noise_variance_).view(1, 1, *shape),
    )


def likeliest(models: list[MFA], x: Tensor, observed: Tensor) -> MFA:
    """For each patch (B, C, h, w) the model under which its observed pixels are likeliest."""
    every = [model[[0] * len(x)] for model in models]
    best = torch.stack([p.log_prob(x, observed) for p in every]).argmax(0)

    def pick(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts)[best, torch.arange(len(x))]

    return MFA(
        logits=pick([p.logits for p in every]),
        means=pick([p.means for p in every]),
        factors=pick([p.factors for p in every]),
        noise=pick([p.noise for p in every]),
    )


def cut(images: Tensor) -> Tensor:
    """(1, C, H, W) → (patches, C, side, side), patches overlapping by their margins, zero beyond the edge."""
    side = CORE + 2 * MARGIN
    columns = F.unfold(F.pad(images, (MARGIN,) * 4), side, stride=CORE)[0]
    return columns.T.reshape(-1, images.shape[1], side, side)


def add_up(patches: Tensor) -> Tensor:
    """(patches, …, side, side) → (…, H, W), the sum of overlapping patches."""
    flat = patches.flatten(1).T.unsqueeze(0)  # (1, … · side · side, patches)
    whole = F.fold(flat, (HEIGHT + 2 * MARGIN, WIDTH + 2 * MARGIN), patches.shape[-1], stride=CORE)
    return whole[0, :, MARGIN:-MARGIN, MARGIN:-MARGIN].reshape(*patches.shape[1:-2], HEIGHT, WIDTH)


def shares(count: int) -> Tensor:
    """How much each patch has to say about each of its pixels: fades over the margins, sums to one, (patches, s, s)."""
    side = CORE + 2 * MARGIN
    steps = torch.arange(side, dtype=torch.float64) + 0.5
    fade = (torch.minimum(steps, side - steps) / (2 * MARGIN)).clamp_max(1)
    window = torch.outer(fade, fade).expand(count, 1, side, side)
    total = cut(add_up(window)[None])
    # Beyond the edge of the image the total is zero, and nobody asks.
    return (window / total.clamp_min(1e-9)).squeeze(1)


def complete(crop: Tensor, observed: Tensor, models: list[MFA]) -> MFA:
    """The density of the crop: every patch given the pixels seen in it, one fading into the next.

    With shares r that sum to one over the patches: mean Σ r μ, noise Σ r d, and every factor times √r, so that
    variances fade as means do.
    """
    x, seen = cut(crop), cut(observed.double()) > 0.5  # beyond the edge nothing was seen
    q = likeliest(models, x, seen).condition(x, seen)
    share = shares(len(x)).unsqueeze(1)  # (patches, 1, side, side)
    # Neighbours need factors of their own; patches two apart may share them, for no window of the layer sees both. So
    # four sets of factors serve any number of patches.
    assert CORE - 2 * MARGIN >= KERNEL - 1
    row, column = torch.arange(HEIGHT // CORE)[:, None], torch.arange(WIDTH // CORE)
    turn = (2 * (row % 2) + column % 2).flatten().view(-1, 1, 1, 1, 1)
    factors = q.factors[:, 0] * share.unsqueeze(1).sqrt()
    return MFA(
        logits=crop.new_zeros(1, 1),
        means=add_up(q.means[:, 0] * share)[None, None],
        factors=torch.cat([add_up(factors * (turn == i)) for i in range(4)])[None, None],
        noise=add_up(q.noise[:, 0] * share)[None, None],
    ).fix(crop, observed)


# The layer ---------------------------------------------------------------------------------------------------------


def edge_filter() -> Tensor:
    """A Gabor filter on the brightness, of the kind first layers learn: (1, 3, 5, 5), with sum zero."""
    half = KERNEL // 2
    y, x = torch.meshgrid(*2 * [torch.arange(-half, half + 1, dtype=torch.float64)], indexing="ij")
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
    conv = torch.nn.Conv2d(3, 1, KERNEL, padding=KERNEL // 2, padding_mode="reflect", bias=False).double()
    conv.weight = torch.nn.Parameter(edge_filter())
    layer = misconv.MisConv2d.from_conv(conv, activation="relu")
    plain = torch.nn.Sequential(conv, torch.nn.ReLU())
    with torch.no_grad():
        _, variance = misconv.functional.conv2d_moments(
            p, conv.weight, padding=KERNEL // 2, padding_mode=conv.padding_mode
        )
        truth, expected = plain(crop)[0, 0], layer(p)[0, 0]
        zeros, filled = plain(torch.where(observed, crop, 0))[0, 0], plain(p.mean)[0, 0]
    touched = F.max_pool2d((~observed).double(), KERNEL, 1, KERNEL // 2)[0, 0] > 0
    errors = {
        name: float((response - truth)[touched].square().mean().sqrt() / truth[touched].square().mean().sqrt())
        for name, response in (("zeros", zeros), ("filled", filled), ("expected", expected))
    }
    return Responses(zeros, expected, variance[0, 0, 0].sqrt(), truth, errors)


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
    photo = photograph()
    crop = photo[None, :, TOP : TOP + HEIGHT, LEFT : LEFT + WIDTH]
    observed = misconv.missing.free_form(1, HEIGHT, WIDTH, fraction=HIDDEN, strokes=7, turns=6, generator=generator)
    with threadpool_limits(1):
        models = fit(training_patches(photo, generator))
    p = complete(crop, observed, models)
    save(draw(crop, observed, p, respond(crop, observed, p)), PICTURE)


if __name__ == "__main__":
    main()

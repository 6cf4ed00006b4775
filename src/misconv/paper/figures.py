"""The figures of the paper: what is missing, what may be there, and what the first layer makes of it.

Every function takes plain tensors and returns a matplotlib figure, which `figure.savefig(path)` writes. Images have
one channel, drawn as ink on paper (0 is the paper), or three, drawn in colour. Missing pixels are striped in magenta,
whatever they hold, and where something was filled in, a magenta line goes around it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from misconv._checks import check_images, check_observed, check_size, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Panels = list[list[Axes]]  # by row and column

__all__ = ["figure_class", "generated", "imputations", "masks", "responses"]

DPI = 150
PANEL = 176  # about the width of a picture, in pixels
TITLE, TEXT = 11.5, 9.5  # in points
DARK, GREY, EDGE = "#182038", "#5b6274", "#c9cdd6"
WIDEST = 0.5  # of a standard deviation: no value between 0 and 1 deviates by more


def masks(images: Tensor, observed_by_shape: dict[str, Tensor]) -> Figure:
    """The same images with regions of several shapes missing: a column for each image, a row for each shape.

    Args:
        images: complete images (N, C, H, W), floating point between 0 and 1 or uint8.
        observed_by_shape: for each shape, by its name, bool (N, 1, H, W) or (N, C, H, W).
    """
    images = _complete("images", images)
    seen = {name: _seen(f"observed_by_shape[{name!r}]", o, images) for name, o in observed_by_shape.items()}
    if not seen:
        raise ValueError("observed_by_shape must name at least one shape, got an empty dict")
    shares = {name: f"{name}\n{100 * float((~o).double().mean()):.0f} % missing" for name, o in seen.items()}
    labels = ["complete", *shares.values()]
    figure, panels = _panels("Missing pixels are striped", labels, len(images), images, gaps=(1,))
    for column, image in enumerate(images):
        _picture(panels[0][column], image)
        for row, observed in enumerate(seen.values(), 1):
            _picture(panels[row][column], image, ~observed[column], gone=True)
    return figure


def responses(
    first_layer_imputed: Tensor,
    first_layer_misconv: Tensor,
    images: Tensor,
    observed: Tensor,
    filled: Tensor,
    channels: int = 6,
) -> Figure:
    """Responses of one first layer: to an imputed image, expected over all that may be there, and their difference.

    Three rows for each image. The filters shown are those where the two differ most (root mean square over all images
    given), each on one scale for all images. Responses of another size than the image are stretched over it.

    Args:
        first_layer_imputed: (N, O, H', W'), the layer's responses to `filled`.
        first_layer_misconv: (N, O, H', W'), its expected responses over the density.
        images: (N, C, H, W); what is not observed is not read.
        observed: bool (N, 1, H, W) or (N, C, H, W).
        filled: (N, C, H, W), the imputed images.
        channels: how many filters to show; all if the layer has no more.
    """
    images = _images("images", images)
    filled, seen = _like("filled", filled, images), _seen("observed", observed, images)
    imputed = _numbers("first_layer_imputed", first_layer_imputed, len(images))
    expected = _numbers("first_layer_misconv", first_layer_misconv, len(images))
    _check_shape("first_layer_misconv", expected, "first_layer_imputed", imputed)
    check_size("channels", channels)
    difference = expected - imputed
    chosen = difference.square().mean((0, 2, 3)).topk(min(channels, imputed.shape[1])).indices.tolist()
    figure, panels = _panels(
        "Responses of the first layer, in the filters where MisConv differs most from MFA imputation",
        ["MFA imputation", "MisConv", "MisConv minus\nMFA imputation"] * len(images),
        1 + len(chosen),
        images,
        heads=["input", *(f"filter {o + 1}" for o in chosen)],
        gaps=range(3, 3 * len(images), 3),
    )
    for i, (image, hidden) in enumerate(zip(images, ~seen, strict=True)):
        _picture(panels[3 * i][0], filled[i], hidden)
        _picture(panels[3 * i + 1][0], image, hidden, gone=True)
        panels[3 * i + 2][0].spines[:].set_visible(False)  # keeps the label of its row
    for column, o in enumerate(chosen, 1):
        _filter(figure, [row[column] for row in panels], imputed[:, o], expected[:, o], ~seen)
    return figure


def imputations(
    truth: Tensor,
    observed: Tensor,
    fills: dict[str, Tensor],
    deviations: dict[str, Tensor],
    samples: Tensor | None = None,
) -> Figure:
    """Incomplete images, how each method fills them, how unsure a density is, possible completions, and the truth.

    A column for each image. Standard deviations, of several channels their root mean square, share one scale. It ends
    at ½, which no value between 0 and 1 can exceed; a density that says more is drawn as if it said that.

    Args:
        truth: complete images (N, C, H, W), floating point between 0 and 1 or uint8.
        observed: bool (N, 1, H, W) or (N, C, H, W).
        fills: for each method, by its name, the filled images (N, C, H, W).
        deviations: for each density, by its name, the standard deviation of every pixel (N, C, H, W).
        samples: completions drawn from a density (S, N, C, H, W), a row for each of S.
    """
    truth = _complete("truth", truth)
    seen = _seen("observed", observed, truth)
    filled = {name: _like(f"fills[{name!r}]", x, truth) for name, x in fills.items()}
    unsure = {name: _deviation(f"deviations[{name!r}]", d, truth) for name, d in deviations.items()}
    drawn = _samples(samples, truth)
    pictures = {
        **{f"filled in by\n{name}": x for name, x in filled.items()},
        **{f"how unsure\n{name} is": d for name, d in unsure.items()},
        **{f"possible:\nsample {s}": x for s, x in enumerate(drawn, 1)},
    }
    doubts = 1 + len(filled), 1 + len(filled) + len(unsure)  # the rows of `unsure`
    labels, gaps = ["incomplete", *pictures, "truth"], {1, *doubts, 1 + len(pictures)}
    figure, panels = _panels("What the missing pixels may be", labels, len(truth), truth, gaps=gaps)
    highest = max((float(d.max()) for d in unsure.values()), default=0.0) or WIDEST
    high = min(highest, WIDEST)
    for column, hidden in enumerate(~seen):
        _picture(panels[0][column], truth[column], hidden, gone=True)
        _picture(panels[-1][column], truth[column], hidden)
        for row, x in enumerate(pictures.values(), 1):
            if x.dim() == 4:
                _picture(panels[row][column], x[column], hidden)
            else:
                _map(panels[row][column], x[column], hidden.shape, "UNSURE", 0, high)
    if unsure:
        beside = [axes for row in panels[slice(*doubts)] for axes in row]
        _colour_bar(figure, beside, "UNSURE", 0, high, "standard deviation", location="right", cut=highest > high)
    return figure


def generated(
    truth: Tensor, observed: Tensor, reconstructions: dict[str, Tensor], samples: dict[str, Tensor]
) -> Figure:
    """What autoencoders make of incomplete images, and of normal codes: a row for each method, samples on the right.

    Args:
        truth: complete images (N, C, H, W), floating point between 0 and 1 or uint8.
        observed: bool (N, 1, H, W) or (N, C, H, W).
        reconstructions: for each method, by its name, images (N, C, H, W).
        samples: for the same methods, images (M, C, H, W).
    """
    truth = _complete("truth", truth)
    seen = _seen("observed", observed, truth)
    rebuilt = {name: _like(f"reconstructions[{name!r}]", x, truth) for name, x in reconstructions.items()}
    drawn = {name: _complete(f"samples[{name!r}]", samples[name]) for name in rebuilt}
    count, most = len(truth), max(map(len, drawn.values()))
    heads = ["reconstructions", *[""] * (count - 1), "samples"]
    labels = ["incomplete", *rebuilt, "complete"]
    title = "Reconstructions of incomplete test images, and samples"
    gaps = (1, 1 + len(rebuilt))
    figure, panels = _panels(title, labels, count + most, truth, heads=heads, gaps=gaps, split=count)
    for column, image in enumerate(truth):
        _picture(panels[0][column], image, ~seen[column], gone=True)
        _picture(panels[-1][column], image)
    for row, name in zip(panels[1:], rebuilt, strict=False):
        for axes, image in zip(row, [*rebuilt[name], *drawn[name]], strict=False):
            _picture(axes, image)
    for axes in (*panels[0][count:], *panels[-1][count:]):
        axes.spines[:].set_visible(False)  # of no image there is a sample
    return figure


# Panels ------------------------------------------------------------------------------------------------------------


def figure_class() -> type[Figure]:
    """Matplotlib's."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures are drawn by matplotlib: pip install 'misconv[paper]'") from error
    return Figure


def _panels(
    title: str,
    labels: Sequence[str],
    columns: int,
    images: Tensor,
    *,
    heads: Sequence[str] = (),
    gaps: Collection[int] = (),
    split: int | None = None,
) -> tuple[Figure, Panels]:
    """A figure with a panel for each row and column, a label for each row, a head for each column.

    Above each of the rows in `gaps` there is some room, and left of the column `split`.
    """
    height, width = (_magnification(images) * n for n in images.shape[-2:])
    ratios = [ratio for row in range(len(labels)) for ratio in ((0.05, 1) if row in gaps else (1,))]
    # Matplotlib finds the places; the size leaves room for words and is cut where there is more of it.
    size = ((columns * (width + 8) + 300) / DPI, (sum(ratios) * (height + 12) + 150) / DPI)
    Figure = figure_class()
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(compress=True, w_pad=4 / DPI, h_pad=4 / DPI, wspace=0, hspace=0)
    figure = Figure(figsize=size, dpi=DPI, facecolor="white", layout=layout)
    widths = [ratio for column in range(columns) for ratio in ((0.2, 1) if column == split else (1,))]
    grid = figure.add_gridspec(len(ratios), len(widths), height_ratios=ratios, width_ratios=widths)
    rows, places = ([n for n, ratio in enumerate(each) if ratio == 1] for each in (ratios, widths))
    panels = [[figure.add_subplot(grid[row, place]) for place in places] for row in rows]
    for axes in figure.axes:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=EDGE, linewidth=0.5)
    for label, (axes, *_) in zip(labels, panels, strict=True):
        axes.set_ylabel(label, fontsize=TEXT, color=DARK, rotation=0, ha="right", va="center", linespacing=1.35)
    for head, axes in zip(heads, panels[0], strict=False):
        axes.set_title(head, fontsize=TEXT, color=DARK)
    title = textwrap.fill(title, 18 + 12 * columns)
    figure.suptitle(title, fontsize=TITLE, color=DARK, weight="bold")
    return figure, panels


def _magnification(images: Tensor) -> int:
    """How many pixels of a panel show one pixel of an image, on one side."""
    return max(1, round(PANEL / max(images.shape[-2:])))


def _picture(axes: Axes, image: Tensor, hidden: Tensor | None = None, *, gone: bool = False) -> None:
    """An image (C, H, W); the hidden pixels (H, W) are striped where they are `gone`, and outlined otherwise."""
    from misconv.paper.pictures import hatching

    times = _magnification(image)
    rgb = _rgb(image).repeat_interleave(times, 0).repeat_interleave(times, 1)  # (times · H, times · W, 3)
    if hidden is not None and gone:
        inside = hidden.repeat_interleave(times, 0).repeat_interleave(times, 1)
        rgb = torch.where(inside.unsqueeze(-1), hatching(*inside.shape), rgb)
    height, width = image.shape[-2:]
    axes.imshow(rgb.round().to(torch.uint8).numpy(), extent=(0, width, height, 0), interpolation="nearest")
    if hidden is not None:
        _outline(axes, hidden)


def _rgb(image: Tensor) -> Tensor:
    """(C, H, W) → (H, W, 3), from 0 to 255."""
    from misconv.paper.pictures import INK

    image = image.clamp(0, 1).nan_to_num(0)
    if len(image) == 3:
        return 255 * image.permute(1, 2, 0)
    paper, ink = (torch.tensor(colour, dtype=image.dtype, device="cpu") for colour in INK)
    return paper + (ink - paper) * image[0].unsqueeze(-1)


def _map(axes: Axes, values: Tensor, size: Sequence[int], colours: str, low: float, high: float) -> None:
    """Numbers (H', W') in colours, stretched over an image of that size."""
    extent = (0, size[1], size[0], 0)
    axes.imshow(values.numpy(), _colours(colours), vmin=low, vmax=high, extent=extent, interpolation="nearest")


def _outline(axes: Axes, hidden: Tensor) -> None:
    """A thin line between the hidden pixels (H, W) and the others."""
    from matplotlib.collections import LineCollection

    from misconv.paper.pictures import MISSING

    inside = F.pad(hidden.int(), (1, 1, 1, 1))  # beyond the edge there is nothing to hide
    across, down = inside[1:-1].diff(dim=1), inside[:, 1:-1].diff(dim=0)
    lines = [((x, y), (x, y + 1)) for y, x in across.nonzero().tolist()]
    lines += [((x, y), (x + 1, y)) for y, x in down.nonzero().tolist()]
    if 2 * len(lines) > hidden.numel():
        return  # scattered pixels: their outlines would hide the picture
    colour = tuple(c / 255 for c in MISSING[1])
    options: dict[str, Any] = {"linewidths": 0.9, "capstyle": "projecting", "clip_on": False, "zorder": 3}
    axes.add_collection(LineCollection(lines, colors=[colour], **options), autolim=False)


def _filter(figure: Figure, column: Sequence[Axes], imputed: Tensor, expected: Tensor, hidden: Tensor) -> None:
    """One filter's column: (N, H', W') both, on one scale, their difference, and the scales below."""
    low = min(0.0, float(imputed.min()), float(expected.min()))
    high = max(low + 1e-9, float(imputed.max()), float(expected.max()))
    off = max(1e-9, float((expected - imputed).abs().max()))
    for i in range(len(imputed)):
        maps = [(imputed[i], "RESPONSE", low, high), (expected[i], "RESPONSE", low, high)]
        maps += [(expected[i] - imputed[i], "DIFFERENCE", -off, off)]
        for axes, (values, colours, lowest, highest) in zip(column[3 * i : 3 * i + 3], maps, strict=True):
            _map(axes, values, hidden.shape[1:], colours, lowest, highest)
            _outline(axes, hidden[i])
    _colour_bar(figure, column, "DIFFERENCE", -off, off, "difference")
    _colour_bar(figure, column, "RESPONSE", low, high, "response")


def _colour_bar(
    figure: Figure,
    axes: Sequence[Axes],
    colours: str,
    low: float,
    high: float,
    name: str,
    *,
    location: str = "bottom",
    cut: bool = False,
) -> None:
    """A colour bar between two numbers beside or below some panels; `cut` where there are larger numbers."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(low, high), _colours(colours))
    size: dict[str, Any] = {"aspect": 12, "shrink": 0.75} if location == "bottom" else {"aspect": 25, "fraction": 0.05}
    bar = figure.colorbar(scale, ax=axes, location=location, ticks=[low, high], pad=0.01, **size)
    first, last = (f"{value:.2g}".replace("-", "−") for value in (low, high))
    bar.set_ticklabels([first, f"≥ {last}" if cut else last], fontsize=TEXT - 1.5, color=GREY)
    bar.set_label(name, fontsize=TEXT - 1.5, color=GREY)
    bar.ax.tick_params(length=0)
    bar.outline.set(edgecolor=GREY, linewidth=0.6)


def _colours(name: str) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    from misconv.paper import pictures as _pictures

    return LinearSegmentedColormap.from_list(name, [[c / 255 for c in stop] for stop in getattr(_pictures, name)])


# Arguments ---------------------------------------------------------------------------------------------------------


def _images(name: str, x: Tensor) -> Tensor:
    """Images on the CPU, in float64."""
    if isinstance(x, Tensor) and x.dtype == torch.uint8:
        x = x.double() / 255
    check_images(name, x)
    if x.shape[1] not in (1, 3):
        raise ValueError(f"{name} must have one channel (drawn as ink) or three (colours), got {describe(x)}")
    return x.detach().cpu().double()


def _complete(name: str, x: Tensor) -> Tensor:
    x = _images(name, x)
    _check_finite(name, x)
    return x


def _like(name: str, x: Tensor, images: Tensor) -> Tensor:
    x = _complete(name, x)
    _check_shape(name, x, "the images", images)
    return x


def _seen(name: str, observed: Tensor, images: Tensor) -> Tensor:
    """(N, H, W), True where all channels were seen."""
    observed = observed.detach().cpu() if isinstance(observed, Tensor) else observed
    return check_observed(name, observed, images).all(1)


def _numbers(name: str, x: Tensor, count: int) -> Tensor:
    check_images(name, x)
    if len(x) != count:
        raise ValueError(f"{name} must hold one response for each of the {count} images, got {describe(x)}")
    _check_finite(name, x)
    return x.detach().cpu().double()


def _deviation(name: str, x: Tensor, images: Tensor) -> Tensor:
    """(N, H, W)."""
    x = _numbers(name, x, len(images))
    _check_shape(name, x, "the images", images)
    if x.min() < 0:
        raise ValueError(f"{name} must be standard deviations of at least 0, got {float(x.min()):.6g}")
    return x.square().mean(1).sqrt()


def _samples(samples: Tensor | None, images: Tensor) -> list[Tensor]:
    if samples is None:
        return []
    if not isinstance(samples, Tensor) or samples.shape[1:] != images.shape:
        raise ValueError(f"samples must have shape (S, {str(tuple(images.shape))[1:]}, got {describe(samples)}")
    return [_complete("samples", x) for x in samples]


def _check_finite(name: str, x: Tensor) -> None:
    if not x.isfinite().all():
        raise ValueError(f"{name} must be finite, got {int((~x.isfinite()).sum())} values that are NaN or infinite")


def _check_shape(name: str, x: Tensor, other: str, like: Tensor) -> None:
    if x.shape != like.shape:
        raise ValueError(f"{name} must have the shape of {other}, {tuple(like.shape)}, got {describe(x)}")

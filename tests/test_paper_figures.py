"""The figures show what they say, for grey and for colour, and nothing that was hidden."""

from __future__ import annotations

import math
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from torch import Tensor

from misconv import missing
from misconv.paper import figures
from misconv.paper import pictures as _pictures

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def some(channels: int = 1, count: int = 2, side: int = 8) -> tuple[Tensor, Tensor]:
    observed = missing.square(count, side, side, fraction=1 / 4, generator=torch.Generator().manual_seed(0))
    return torch.rand(count, channels, side, side), observed.to(torch.get_default_device())


def shapes(count: int = 2, side: int = 8) -> dict[str, Tensor]:
    generator, device = torch.Generator().manual_seed(0), torch.get_default_device()
    return {
        "square": missing.square(count, side, side, fraction=1 / 4, generator=generator).to(device),
        "trapezoid": missing.trapezoid(count, side, side, fraction=1 / 2, generator=generator).to(device),
        "noise": missing.noise(count, side, side, fraction=3 / 4, generator=generator).to(device),
    }


def make(kind: str, channels: int, count: int = 2, side: int = 8) -> Figure:
    x, observed = some(channels, count, side)
    if kind == "masks":
        return figures.masks(x, shapes(count, side))
    if kind == "responses":
        first, second = torch.rand(2, count, 9, side, side)
        return figures.responses(first, second, x, observed, x, channels=3)
    fills, unsure = {"k-NN": x, "DMFA": 1 - x}, {"SMFA": x / 3, "DMFA": x / 2}
    return figures.imputations(x, observed, fills, unsure, torch.rand(2, *x.shape))


def pixels(figure: Figure) -> Pixels:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba()).copy()


def title(figure: Figure) -> str:
    return figure.get_suptitle()


def labels(figure: Figure) -> list[str]:
    """Of the rows."""
    return [row[0].get_ylabel() for row in panels(figure)]


def panels(figure: Figure) -> list[list[Axes]]:
    """By row and column; colour bars are not among them."""
    rows: dict[int, list[Axes]] = {}
    for axes in figure.axes:
        spec = axes.get_subplotspec()
        if spec is not None and axes.get_label() != "<colorbar>":
            rows.setdefault(spec.rowspan.start, []).append(axes)
    return [rows[row] for row in sorted(rows)]


def bars(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]


def panel(figure: Figure, row: int, column: int) -> Pixels:
    """The picture of a panel."""
    (image,) = panels(figure)[row][column].images
    return np.asarray(image.get_array())


# All of them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("kind", "pictures", "scales"),
    [
        ("masks", 2 * 4, 0),
        ("responses", 2 * (2 + 3 * 3), 2 * 3),  # two scales for each filter
        ("imputations", 2 * (1 + 2 + 2 + 2 + 1), 1),
    ],
)
def test_every_panel_is_there_and_can_be_saved(
    kind: str, pictures: int, scales: int, channels: int, tmp_path: Path
) -> None:
    figure = make(kind, channels)
    assert sum(len(axes.images) for row in panels(figure) for axes in row) == pictures
    assert len(bars(figure)) == scales
    figure.savefig(tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as saved:
        assert saved.size == pytest.approx(figure.get_size_inches() * 150, abs=1)
    figure.savefig(tmp_path / "figure.pdf")


@pytest.mark.parametrize("kind", ["masks", "responses", "imputations"])
@pytest.mark.parametrize(("count", "side"), [(1, 8), (4, 32)])
def test_no_words_meet(kind: str, count: int, side: int) -> None:
    figure = make(kind, 3, count, side)
    pixels(figure)
    texts = [t for t in figure.findobj(Text) if isinstance(t, Text) and t.get_text() and t.get_visible()]
    boxes = [text.get_window_extent() for text in texts]
    assert len(boxes) > 4
    for a, b in combinations(boxes, 2):
        assert not a.overlaps(b), (texts[boxes.index(a)], texts[boxes.index(b)])
    for text, box in zip(texts, boxes, strict=True):
        assert figure.bbox.x0 <= box.x0
        assert figure.bbox.y0 <= box.y0
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
        assert not any(box.overlaps(axes.bbox) for axes in figure.axes), text


@pytest.mark.parametrize("kind", ["masks", "responses", "imputations"])
def test_pixels_of_an_image_are_squares(kind: str) -> None:
    """And all panels of a figure have one size."""
    figure = make(kind, 1, 3, 28)
    pixels(figure)
    boxes = [axes.get_window_extent() for row in panels(figure) for axes in row if axes.images]
    assert all(box.width == pytest.approx(box.height, abs=1) for box in boxes)
    assert all(box.width == pytest.approx(boxes[0].width, abs=1) for box in boxes)
    assert boxes[0].width > 100


def test_images_need_not_be_square_or_float_or_on_the_cpu() -> None:
    x = torch.randint(0, 256, (2, 3, 8, 20), dtype=torch.uint8)
    figure = figures.masks(x, {"left": torch.arange(20).view(1, 1, 1, 20).expand(2, 1, 8, 20) >= 10})
    height, width, _ = panel(figure, 0, 0).shape
    assert width / height == 20 / 8
    scale = width // 20
    assert (panel(figure, 0, 0)[::scale, ::scale] == x[0].permute(1, 2, 0).cpu().numpy()).all()


def test_the_default_device_is_of_no_account() -> None:
    x, observed = some()
    drawn = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            drawn.append(pixels(figures.imputations(x, observed, {"k-NN": x}, {"DMFA": x / 2})))
    assert (drawn[0] == drawn[1]).all()


# Nothing hidden leaks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_drawn_at_missing_places_does_not_depend_on_what_is_there(channels: int) -> None:
    x, observed = some(channels)[0], shapes()
    for row, (name, seen) in enumerate(observed.items(), 1):
        one = figures.masks(x, observed)
        other = figures.masks(torch.where(seen, x, 1 - x), observed)
        for column in range(2):
            drawn = panel(one, row, column)
            assert (drawn == panel(other, row, column)).all(), name
            assert (panel(one, 0, column) != panel(other, 0, column)).any()
            scale = drawn.shape[0] // 8
            gone = np.kron((~seen[column, 0]).cpu().numpy(), np.ones((scale, scale))) > 0
            colours = {tuple(int(c) for c in colour) for colour in drawn[gone]}
            assert colours == set(_pictures.MISSING)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e20])
def test_hidden_pixels_of_incomplete_images_are_not_read(poison: float) -> None:
    x, observed = some(3)
    first, second, filled = torch.rand(2, 2, 8, 8), torch.rand(2, 2, 8, 8), torch.rand(2, 3, 8, 8)
    drawn = [
        pixels(figures.responses(first, second, images, observed, filled))
        for images in (x, x.masked_fill(~observed, poison))
    ]
    assert (drawn[0] == drawn[1]).all()


def test_a_pixel_is_missing_if_any_channel_is() -> None:
    x, observed = some(3)
    in_one_channel = torch.ones_like(x, dtype=torch.bool)
    in_one_channel[:, 1:2] = observed
    drawn = [pixels(figures.masks(x, {"square": o})) for o in (observed, observed.expand_as(x), in_one_channel)]
    assert (drawn[0] == drawn[1]).all()
    assert (
        panel(figures.masks(x, {"a": observed}), 1, 0) == panel(figures.masks(x, {"a": in_one_channel}), 1, 0)
    ).all()


# What they show ----------------------------------------------------------------------------------------------------


def test_masks_say_how_much_is_missing() -> None:
    figure = make("masks", 1)
    assert title(figure) == "Missing pixels are striped"
    assert labels(figure) == [
        "complete",
        "square\n25 % missing",
        "trapezoid\n50 % missing",
        "noise\n75 % missing",
    ]


def test_the_filters_are_those_where_the_two_differ_most() -> None:
    x, observed = some()
    imputed = torch.rand(2, 5, 8, 8)
    expected = imputed + torch.tensor([0.1, 0.0, 0.5, 0.05, -0.9]).view(5, 1, 1)
    figure = figures.responses(imputed, expected, x, observed, x, channels=3)
    rows = panels(figure)
    assert [axes.get_title() for axes in rows[0]] == ["input", "filter 5", "filter 3", "filter 1"]
    # For each image the imputed response, the expected one, the difference.
    for column, o in ((1, 4), (2, 2), (3, 0)):
        shown = [row[column].images[0] for row in rows]
        np.testing.assert_allclose(shown[3].get_array(), imputed[1, o].cpu().numpy())
        np.testing.assert_allclose(shown[4].get_array(), expected[1, o].cpu().numpy())
        np.testing.assert_allclose(shown[5].get_array(), (expected - imputed)[1, o].cpu().numpy())
        both = torch.stack([imputed[:, o], expected[:, o]])
        scales = {image.get_clim() for number, image in enumerate(shown) if number % 3 < 2}
        assert scales == {(min(0.0, float(both.min())), float(both.max()))}
        low, high = shown[2].get_clim()
        assert high == -low == float((expected - imputed)[:, o].abs().max())


def test_a_layer_with_few_filters_or_a_stride() -> None:
    x, observed = some()
    same = torch.rand(2, 2, 4, 4)
    figure = figures.responses(same, same, x, observed, x)
    rows = panels(figure)
    assert (len(rows), {len(row) for row in rows}, len(bars(figure))) == (3 * 2, {3}, 2 * 2)
    assert all(axes.images[0].get_extent() == [0, 8, 8, 0] for row in rows for axes in row[1:])
    pixels(figure)


def test_the_outline_goes_around_the_missing_region() -> None:
    hidden = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    hidden[..., 2:5, 4:] = True  # it reaches the edge
    figure = figures.imputations(torch.rand(1, 1, 8, 8), ~hidden, {}, {})
    (lines,) = [c for c in panels(figure)[1][0].collections if isinstance(c, LineCollection)]
    ends = np.concatenate([path.vertices for path in lines.get_paths()])
    assert (ends.min(0).tolist(), ends.max(0).tolist()) == ([4, 2], [8, 5])
    assert len(lines.get_paths()) == 2 * (3 + 4)


def test_scattered_pixels_have_no_outline() -> None:
    figure = figures.masks(some()[0], shapes())
    assert [bool(row[0].collections) for row in panels(figure)] == [False, True, True, False]


def test_imputations_name_their_rows() -> None:
    figure = make("imputations", 1)
    assert title(figure) == "What the missing pixels may be"
    assert labels(figure) == [
        "incomplete",
        "filled in by\nk-NN",
        "filled in by\nDMFA",
        "how unsure\nSMFA is",
        "how unsure\nDMFA is",
        "possible:\nsample 1",
        "possible:\nsample 2",
        "truth",
    ]
    x, observed = some()
    assert labels(figures.imputations(x, observed, {}, {}, None)) == ["incomplete", "truth"]


def test_deviations_share_one_scale_that_ends_at_a_half() -> None:
    x, observed = some(3)
    for highest, end, label in ((0.25, 0.25, "0.25"), (7.0, 0.5, "≥ 0.5")):
        unsure = {"SMFA": torch.full_like(x, 0.1), "DMFA": torch.full_like(x, highest)}
        figure = figures.imputations(x, observed, {}, unsure)
        maps = [axes.images[0] for row in panels(figure)[1:3] for axes in row]
        assert [m.cmap.name for m in maps] == ["UNSURE"] * 4
        assert all(m.get_clim() == pytest.approx((0, end)) for m in maps)
        (bar,) = bars(figure)
        assert bar.get_ylim() == pytest.approx((0, end))
        assert ([t.get_text() for t in bar.get_yticklabels()], bar.get_ylabel()) == (["0", label], "standard deviation")


def test_the_deviation_of_a_colour_is_the_root_mean_square() -> None:
    x, observed = some(3)
    unsure = torch.rand_like(x) / 4
    figure = figures.imputations(x, observed, {}, {"DMFA": unsure})
    shown = panels(figure)[1][0].images[0]
    np.testing.assert_allclose(shown.get_array(), unsure[0].square().mean(0).sqrt().cpu().numpy(), rtol=1e-6)


# Bad arguments -----------------------------------------------------------------------------------------------------


def test_bad_images() -> None:
    x, observed = some()
    with pytest.raises(ValueError, match=r"images must have shape \(B, C, H, W\)"):
        figures.masks(x[0], {"square": observed})
    with pytest.raises(ValueError, match=r"images must have one channel \(drawn as ink\) or three \(colours\), got"):
        figures.masks(x.expand(-1, 2, -1, -1), {"square": observed})
    with pytest.raises(ValueError, match="images must be finite, got 128 values that are NaN or infinite"):
        figures.masks(x * math.nan, {"square": observed})
    with pytest.raises(ValueError, match="observed_by_shape must name at least one shape, got an empty dict"):
        figures.masks(x, {})
    with pytest.raises(ValueError, match=r"observed_by_shape\['square'\] must have shape \(2, 1, 8, 8\)"):
        figures.masks(x, {"square": observed[:1]})
    with pytest.raises(TypeError, match=r"observed_by_shape\['square'\] must be a bool tensor"):
        figures.masks(x, {"square": "all"})  # type: ignore[dict-item]  # what is tested


def test_bad_responses() -> None:
    x, observed = some()
    good = torch.rand(2, 4, 8, 8)
    with pytest.raises(ValueError, match=r"first_layer_misconv must have the shape of first_layer_imputed, \(2, 4, 8"):
        figures.responses(good, good[:, 1:], x, observed, x)
    with pytest.raises(ValueError, match="first_layer_imputed must hold one response for each of the 2 images"):
        figures.responses(good[1:], good, x, observed, x)
    with pytest.raises(ValueError, match="first_layer_misconv must be finite, got 512 values"):
        figures.responses(good, good * math.inf, x, observed, x)
    with pytest.raises(ValueError, match=r"filled must have the shape of the images, \(2, 1, 8, 8\), got"):
        figures.responses(good, good, x, observed, x[..., 1:])
    with pytest.raises(ValueError, match=r"observed must have shape \(2, 1, 8, 8\)"):
        figures.responses(good, good, x, observed[..., 1:], x)
    with pytest.raises(ValueError, match="channels must be an integer of at least 1, got 0"):
        figures.responses(good, good, x, observed, x, channels=0)


def test_bad_imputations() -> None:
    x, observed = some()
    with pytest.raises(ValueError, match=r"fills\['k-NN'\] must have the shape of the images"):
        figures.imputations(x, observed, {"k-NN": x[:1]}, {})
    with pytest.raises(ValueError, match=r"fills\['k-NN'\] must be finite"):
        figures.imputations(x, observed, {"k-NN": x.masked_fill(~observed, math.nan)}, {})
    with pytest.raises(ValueError, match=r"deviations\['DMFA'\] must have the shape of the images"):
        figures.imputations(x, observed, {}, {"DMFA": x[..., 1:]})
    with pytest.raises(ValueError, match=r"deviations\['DMFA'\] must be standard deviations of at least 0, got -"):
        figures.imputations(x, observed, {}, {"DMFA": x - 1})
    with pytest.raises(ValueError, match=r"samples must have shape \(S, 2, 1, 8, 8\), got"):
        figures.imputations(x, observed, {}, {}, x)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"figures are drawn by matplotlib: pip install 'misconv\[paper\]'"):
        make("masks", 1)

"""Augmentation of incomplete images against slices and flips by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from misconv import MFA, ConvDMFA
from misconv.paper.augment import EXTRA, Augmented, Versions
from misconv.paper.inputs import IncompleteImages

SHAPE = (2, 6, 5)
COUNT = 8


# Versions ----------------------------------------------------------------------------------------------------------


def pixels(count: int = COUNT) -> IncompleteImages:
    torch.manual_seed(0)
    images = torch.randint(256, (count, *SHAPE), dtype=torch.uint8)
    return IncompleteImages(images, torch.rand(count, 1, *SHAPE[1:]) < 0.7)


def network() -> ConvDMFA:
    torch.manual_seed(1)
    return ConvDMFA(SHAPE[0], rank=2, widths=(8,), depths=(1,)).eval().requires_grad_(False)


def test_versions_hide_more_and_more() -> None:
    data = pixels(200)
    versions = Versions(data)
    assert len(versions.data) == 200 * (1 + len(EXTRA))
    kept = versions.data.observed.view(1 + len(EXTRA), 200, 1, *SHAPE[1:])
    assert torch.equal(kept[0], data.observed)
    assert not (kept & ~data.observed).any()
    shares = (data.observed & ~kept).sum((1, 2, 3, 4)) / data.observed.sum()
    for share, fraction in zip(shares[1:].tolist(), EXTRA, strict=True):
        assert share == pytest.approx(fraction, abs=0.06)  # of 30 pixels the nearest square
    assert (shares.diff() > 0).all()
    images = versions.data.images.view(1 + len(EXTRA), 200, *SHAPE)
    assert torch.equal(images, data.images.where(kept, 0))  # what is hidden is gone here too
    assert torch.equal(Versions(data).data.observed, versions.data.observed)


def test_the_usual_pixel_is_that_of_the_seen_ones() -> None:
    """Place by place; where nobody has seen anything, that of the whole channel."""
    data = pixels()
    data.observed[:, :, 2, 3] = False
    mean, variance = (usual.view(SHAPE) for usual in Versions(data, network()).usual)
    values = data.images.double() / 255
    for channel, row, column in product(*map(range, SHAPE)):
        seen = values[:, channel, row, column][data.observed[:, 0, row, column]]
        if len(seen):
            assert float(mean[channel, row, column]) == pytest.approx(float(seen.mean()), rel=1e-5)
            spread = float(seen.var(unbiased=False))
            assert float(variance[channel, row, column]) == pytest.approx(spread, rel=1e-4, abs=1e-7)
        else:
            assert (row, column) == (2, 3)
            everywhere = values[:, channel : channel + 1][data.observed]
            assert float(mean[channel, row, column]) == pytest.approx(float(everywhere.mean()), rel=1e-5)
            assert 0 < float(variance[channel, row, column]) < float(everywhere.var())


def augmented(versions: Versions, rows: Tensor, seed: int = 0, **changes: Any) -> Augmented:
    arguments = {"hide": True, "shift": 2, "flip": True, "cached": False}
    return Augmented(versions, rows, seed, **(arguments | changes))


# Augmentation ------------------------------------------------------------------------------------------------------


def moved(values: Tensor, outside: Tensor | float, down: int, right: int, flipped: bool) -> Tensor:
    """(…, H, W) cut out of a frame that is wide enough, and turned over."""
    height, width = values.shape[-2:]
    border = 3
    frame = torch.zeros(*values.shape[:-2], height + 2 * border, width + 2 * border, dtype=values.dtype) + outside
    frame = frame.to(values.dtype)
    frame[..., border : border + height, border : border + width] = values
    cut = frame[..., border + down : border + down + height, border + right : border + right + width]
    return cut.flip(-1) if flipped else cut


@pytest.mark.parametrize(("shift", "flip"), [(2, True), (2, False), (0, True), (3, True)])
@pytest.mark.parametrize("hide", [True, False])
def test_images_are_shifted_and_flipped(shift: int, flip: bool, hide: bool) -> None:
    versions, rows = Versions(pixels()), torch.tensor([5, 1, 7, 0, 2])
    drawn = augmented(versions, rows, hide=hide, shift=shift, flip=flip)
    seen = set()
    for epoch in range(6):
        drawn.begin(epoch)
        indices = torch.tensor([4, 0, 0, 2, 1, 3])
        x, observed = drawn(indices)
        originals = versions.data.at(drawn.virtual[indices])
        for number, index in enumerate(indices.tolist()):
            down, right, flipped = (int(move) for move in drawn.moves[:, index])
            assert abs(down) <= shift
            assert abs(right) <= shift
            assert flipped in ((0, 1) if flip else (0,))
            seen.add((down, right, flipped))
            expected = moved(originals[1][number], False, down, right, bool(flipped))
            assert torch.equal(observed[number], expected)
            image = moved(originals[0][number], 0.0, down, right, bool(flipped))
            assert torch.equal(x[number] * expected, image * expected)
    assert len(seen) > (10 if shift else 1)


@pytest.mark.parametrize(("shift", "flip"), [(2, True), (0, True), (3, False), (0, False)])
def test_what_is_remembered_is_shifted_and_flipped(shift: int, flip: bool) -> None:
    """What comes in from beyond the border is missing, with mean and variance of the nearest pixel, and by itself."""
    versions, rows = Versions(pixels(), network()), torch.tensor([5, 1, 7, 0, 2])
    drawn = augmented(versions, rows, shift=shift, flip=flip, cached=True)
    indices = torch.tensor([4, 0, 0, 2, 1, 3])
    # A frame of what is usual: at its border continued outwards.
    mean, variance = (F.pad(usual.view(1, *SHAPE), (3, 3, 3, 3), mode="replicate")[0] for usual in versions.usual)
    for epoch in range(3):
        drawn.begin(epoch)
        found, original = drawn(indices), versions.cached(drawn.virtual[indices])
        for number, index in enumerate(indices.tolist()):
            move = [int(value) for value in drawn.moves[:, index]]
            down, right, flipped = move[0], move[1], bool(move[2])
            observed = moved(original.observed[number], False, down, right, flipped)
            inside = moved(torch.ones(1, *SHAPE[1:], dtype=torch.bool), False, down, right, flipped)
            expected = MFA(
                original.logits[number : number + 1],
                moved(original.means[number], mean, down, right, flipped).unsqueeze(0),
                moved(original.factors[number], 0.0, down, right, flipped).unsqueeze(0),
                moved(original.noise[number], variance, down, right, flipped).unsqueeze(0),
                observed.unsqueeze(0),
            )
            one = found[number]
            for name in ("logits", "means", "factors", "noise"):
                assert torch.equal(getattr(one, name), getattr(expected, name)), name
            assert torch.equal(one.observed.expand_as(expected.observed), expected.observed)
            if down or right:
                assert not inside.all()
                beyond = ~inside.expand(SHAPE)
                cut = (..., slice(3 + down, 3 + down + SHAPE[1]), slice(3 + right, 3 + right + SHAPE[2]))
                usual = [(frame[cut].flip(-1) if flipped else frame[cut])[beyond] for frame in (mean, variance)]
                torch.testing.assert_close([one.mean[0][beyond], one.variance[0][beyond]], usual)


def test_unmoved_and_with_nothing_more_hidden_it_is_what_the_density_says() -> None:
    data, density = pixels(), network()
    rows = torch.tensor([5, 1, 7, 0, 2])
    plain = {"hide": False, "shift": 0, "flip": False}
    cached = augmented(Versions(data, density), rows, cached=True, **plain)
    images = augmented(Versions(data), rows, **plain)
    for drawn in (cached, images):
        drawn.begin(3)
    indices = torch.tensor([3, 0])
    x, observed = images(indices)
    assert torch.equal(x, data.at(rows[indices])[0])
    assert torch.equal(observed, data.observed[rows[indices]])
    expected, found = density(x, observed), cached(indices)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.variance, expected.variance)


def test_every_second_image_is_left_as_it_is() -> None:
    data = pixels(20)
    versions, rows = Versions(data), torch.arange(20).repeat(150)
    drawn = augmented(versions, rows, shift=0, flip=False)
    drawn.begin(0)
    version = drawn.virtual // 20
    assert torch.equal(drawn.virtual % 20, rows)  # it is still the same image
    shares = version.bincount(minlength=4) / len(rows)
    assert shares.tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6], abs=0.04)
    x, observed = drawn(torch.arange(len(rows)))
    assert not (observed & ~data.observed[rows]).any()
    same_as_before = (observed == data.observed[rows]).flatten(1).all(1)
    assert same_as_before[version == 0].all()
    assert not same_as_before[version == 3].all()
    assert torch.equal(x, data.at(rows)[0].where(observed, 0))


def test_an_epoch_is_drawn_from_its_seed_and_number_alone() -> None:
    versions, rows = Versions(pixels()), torch.arange(COUNT)

    def draw(seed: int, *epochs: int) -> tuple[Tensor, Tensor]:
        drawn = augmented(versions, rows, seed)
        for epoch in epochs:
            drawn.begin(epoch)
        return drawn.virtual, drawn.moves

    def alike(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
        return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])

    torch.manual_seed(1)
    first = draw(0, 5)
    torch.manual_seed(2)
    assert alike(draw(0, 0, 1, 9, 5), first)
    assert not alike(draw(0, 6), first)
    assert not alike(draw(1, 5), first)


def test_it_draws_into_the_memory_that_a_captured_step_reads() -> None:
    drawn = augmented(Versions(pixels()), torch.arange(COUNT))
    places = drawn.virtual.data_ptr(), drawn.moves.data_ptr()
    drawn.begin(0)
    drawn.begin(1)
    assert (drawn.virtual.data_ptr(), drawn.moves.data_ptr()) == places

"""Table D, the paper explained: what regions coded −1 in training and 0 in the test do to three methods.

The authors' code knows 1 for a seen pixel, 0 for a hidden one, and −1 for one that is hidden without being scored; on
SVHN and CIFAR-10 it trains with −1 and tests with 0. Then

- the mask channel holds −1 where pixels are missing in training, and 0 in the test;
- partial convolution multiplies images by the mask and counts with it: in training it sees hidden pixels with their
  sign turned, and the count is seen minus hidden. This row alone reads hidden pixels, as that code does;
- SMFA takes all that is not 0 for seen: in training hidden pixels are zeros that were observed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv import impute
from misconv.layers import MisConv2d
from misconv.paper.classification import Experiment
from misconv.paper.classifiers import MethodInputs
from misconv.paper.inputs import IncompleteImages, Take, point
from misconv.paper.networks import WIDTH
from misconv.paper.scores import Record

__all__ = ["MISCODED", "SignedPartial", "run_coding"]

MISCODED = ("mask", "partial", "misconv_smfa")
VARIANT = "coded −1 in training, 0 in the test"


class SignedPartial(MisConv2d):
    """Partial convolution that multiplies by whatever the mask holds, and counts with it, as the authors' code does."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]  # an image and its mask
        """(B, O, H, W); nothing where nothing is counted."""
        count = F.conv2d(mask, mask.new_ones(1, 1, 3, 3), padding=1)
        response = F.conv2d(x * mask, self.weight, padding=1)
        assert self.bias is not None
        scaled = response * (9 / (count + 1e-8)) + self.bias.view(1, -1, 1, 1)
        return torch.where(count.abs() > 0.5, scaled, 0).clamp(-1e4, 1e4).relu()


def signed_layer(channels: int) -> nn.Module:
    """Of the size of all first layers."""
    return SignedPartial(channels, WIDTH, 3, padding=1)


def _mask_in_training(x: Tensor, observed: Tensor) -> Any:
    return point(torch.cat([impute.zero(x, observed), 2 * observed.to(x.dtype) - 1], 1))


def _partial_in_training(x: Tensor, observed: Tensor) -> Any:
    return x, 2 * observed.to(x.dtype) - 1


def _partial_in_test(x: Tensor, observed: Tensor) -> Any:
    return impute.zero(x, observed), observed.to(x.dtype)


def _smfa_in_training(x: Tensor, observed: Tensor) -> Any:
    return point(impute.zero(x, observed))


IN_TRAINING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mask": _mask_in_training,
    "misconv_smfa": _smfa_in_training,
}  # of partial convolution, which reads what is hidden, see `_inputs_of`


def run_coding(experiment: Experiment, seeds: Sequence[int]) -> list[Record]:
    """The records of the three methods coded right, which are those of Table 1, and coded as the authors' code does."""
    right = [{**record, "coding": "right"} for record in experiment.run(MISCODED, seeds)]

    def unit(name: str, seed: int) -> dict[str, Any]:
        return {**experiment.unit(name, seed), "variant": VARIANT}

    def train(units: Sequence[tuple[str, int]]) -> None:
        experiment.train_units(units, unit, partial(_inputs_of, experiment), "with regions coded −1", VARIANT)

    wrong = experiment.records(MISCODED, seeds, unit, train)
    records = [*right, *({**record, "coding": "wrong"} for record in wrong)]
    return [{**record, "kind": "coding"} for record in records]


def _inputs_of(experiment: Experiment, name: str) -> MethodInputs:
    """Training images are coded as in the authors' code, test images right."""
    usual, data = experiment.inputs_of(name), experiment.train
    if name == "partial":  # reads what is hidden
        whole = experiment.whole("train")
        return MethodInputs(
            signed_layer,
            lambda rows: _partial_in_training(whole.at(rows)[0], data.observed[rows]),
            lambda: (_partial_take(experiment.test), _partial_take(experiment.whole("test"))),
        )
    return replace(usual, train=lambda rows: IN_TRAINING[name](*data.at(rows)))


def _partial_take(data: IncompleteImages) -> Take:
    return lambda rows: _partial_in_test(*data.at(rows))

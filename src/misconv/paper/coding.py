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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv import impute
from misconv._train import classifier_job, train
from misconv.layers import MisConv2d
from misconv.paper.classification import Experiment, Trained
from misconv.paper.inputs import IncompleteImages, Take, point
from misconv.paper.methods import Method, method_named
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
    "partial": _partial_in_training,
    "misconv_smfa": _smfa_in_training,
}


def run_coding(experiment: Experiment, seeds: Sequence[int]) -> list[Record]:
    """The records of the three methods coded right, which are those of Table 1, and coded as the authors' code does."""
    right = [{**record, "coding": "right"} for record in experiment.run(MISCODED, seeds)]

    def unit(name: str, seed: int) -> dict[str, Any]:
        return {**experiment.unit(name, seed), "variant": VARIANT}

    wrong = experiment.records(MISCODED, seeds, unit, lambda units: _train(experiment, units, unit))
    records = [*right, *({**record, "coding": "wrong"} for record in wrong)]
    return [{**record, "kind": "coding"} for record in records]


def _train(
    experiment: Experiment, units: Sequence[tuple[str, int]], unit: Callable[[str, int], dict[str, Any]]
) -> None:
    experiment.say(f"{experiment.data.title}, {experiment.shape}: training with regions coded −1; {len(units)} of them")
    chosen, labels = experiment.settings.classifier, experiment.labels[0]
    rows, held = experiment.split
    jobs = []
    for name, seed in units:
        first = signed_layer if name == "partial" else method_named(name).first_layer
        take = _in_training(experiment, name)
        jobs.append(
            classifier_job(
                experiment.network(first, chosen.kind, seed), _at(take, rows), labels[rows], experiment.fabric,
                validation_inputs=_at(take, held), validation_labels=labels[held], batch_size=chosen.batch_size,
                learning_rate=chosen.learning_rate, seed=seed, settings=unit(name, seed), count=False,
                name=f"{name}, seed {seed},",
            )
        )  # fmt: skip
    checkpoint = experiment.cache.running([job.settings for job in jobs])
    histories = train(
        jobs, experiment.fabric, epochs=chosen.epochs, checkpoint=checkpoint, checkpoint_seconds=experiment.pause,
        progress=experiment.progress, title=f"{len(jobs)} classifiers", transient=True,
    )  # fmt: skip
    tested = []
    for (name, seed), job, history in zip(units, jobs, histories, strict=True):
        method = method_named(name)
        trained = Trained(unit(name, seed), method, seed, job.module, history, job.seconds, len(jobs), VARIANT)
        tested.append((trained.settings, experiment.test_once(trained, *_in_test(experiment, method))))
    experiment.keep(tested, [checkpoint])


def _in_training(experiment: Experiment, name: str) -> Take:
    data = experiment.train
    if name == "partial":  # reads what is hidden
        whole = experiment.whole("train")
        return lambda rows: _partial_in_training(whole.at(rows)[0], data.observed[rows])
    return lambda rows: IN_TRAINING[name](*data.at(rows))


def _in_test(experiment: Experiment, method: Method) -> tuple[Take, Take]:
    """Incomplete and complete test images, coded right."""
    whole = experiment.whole("test")
    if method.name == "partial":
        return tuple(_partial_take(data) for data in (experiment.test, whole))  # type: ignore[return-value]  # two
    return experiment.take(method, "test"), method.complete(whole)


def _partial_take(data: IncompleteImages) -> Take:
    return lambda rows: _partial_in_test(*data.at(rows))


def _at(take: Take, rows: Tensor) -> Take:
    return lambda indices: take(rows[indices])

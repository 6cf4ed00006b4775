"""How good the probabilities of a classifier are: accuracy, likelihood, calibration, and what abstaining is worth."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._train import call_model
from misconv.paper.inputs import Take

__all__ = ["BINS", "MEASURES", "abstention", "log_probabilities", "measures"]

BINS = 15  # of the expected calibration error
# Title, decimals and the better end of each.
MEASURES: dict[str, tuple[str, int, Callable[..., float]]] = {
    "accuracy": ("accuracy", 3, max),
    "nll": ("NLL", 3, min),
    "ece": ("ECE", 3, min),
    "abstention": ("abstention", 3, min),
}


@torch.no_grad()
def log_probabilities(network: nn.Module, take: Take, count: int, device: torch.device, chunk: int = 1000) -> Tensor:
    """Of all classes for the first `count` images, (count, classes), by a network in evaluation mode."""
    network.eval()
    indices = torch.arange(count, device=device).split(chunk)
    return torch.cat([call_model("network", network, take(rows)).float() for rows in indices]).log_softmax(1)


def measures(logs: Tensor, labels: Tensor) -> dict[str, float]:
    """Figures of log-probabilities (N, classes).

    - `accuracy`: the share of images whose most probable class is right.
    - `nll`: −log of the probability of the right class, the mean.
    - `ece`: the expected calibration error, over bins of the confidence.
    - `abstention`: `abstention`.

    Example:
        >>> found = measures(torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log(), torch.tensor([0, 0]))
        >>> [round(found[name], 3) for name in ("accuracy", "nll", "ece")]
        [0.5, 0.511, 0.35]
    """
    from torchmetrics.functional.classification import multiclass_calibration_error

    logs, labels = logs.double(), labels.to(logs.device)
    error = multiclass_calibration_error(logs.exp(), labels, num_classes=logs.shape[1], n_bins=BINS, norm="l1")
    return {
        "accuracy": float((logs.argmax(1) == labels).double().mean()),
        "nll": float(F.nll_loss(logs, labels)),
        "ece": float(error),
        "abstention": abstention(logs, labels),
    }


def abstention(logs: Tensor, labels: Tensor) -> float:
    """The area under the risk–coverage curve: the mean share of errors among the n most confident images, over all n.

    Example:
        >>> abstention(torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log(), torch.tensor([0, 0]))  # (0/1 + 1/2) / 2
        0.25
    """
    confidence, answers = logs.double().max(1)
    wrong = (answers != labels)[confidence.argsort(descending=True, stable=True)].double()
    return float((wrong.cumsum(0) / torch.arange(1, len(wrong) + 1, device=wrong.device)).mean())

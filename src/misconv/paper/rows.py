"""The rows of the block “one recipe for all”: what each method is given, and what its classifier makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from misconv import impute
from misconv.mfa import MFA
from misconv.paper.completions import Draw, draw_completion, draw_factors
from misconv.paper.inputs import filled, point, zeros_and_mask
from misconv.paper.networks import misconv_layer, misconv_layer_with_mask, partial_layer

__all__ = ["BY_ROW", "ROWS", "Row", "row_named"]


@dataclass(frozen=True)
class Row:
    """A method by the one recipe.

    Args:
        name: in records and on the command line. title: in tables. description: in one line.
        source: what is augmented and given: "images", or what "mean", "knn", "splitting" or "density" say of them.
        form: what the source gives -> what the network takes.
        first_layer: (channels) -> the first layer of the classifier.
        draw: what is drawn of an MFA, for a classifier that averages over draws.
        fresh: whether more is hidden anew in every epoch, instead of choosing among versions.
        complete: whether it is trained on complete images.
        marginal: whether it is supMIWAE, which has a bound of its own.
        extra: only in the table of ingredients.
    """

    name: str
    title: str
    description: str
    source: str = "images"
    form: Callable[..., Any] = lambda p: p
    first_layer: Callable[[int], nn.Module] = misconv_layer
    draw: Draw | None = None
    fresh: bool = False
    complete: bool = False
    marginal: bool = False
    extra: bool = False

    @property
    def starred(self) -> str:
        """The title, with a star for one that learns from complete images."""
        return f"{self.title} *" if self.complete else self.title


def _zeros(x: Tensor, observed: Tensor) -> MFA:
    return point(impute.zero(x, observed))


def _pair(x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    return x, observed


ROWS = (
    Row("zero", "zero", "missing pixels are set to 0", form=_zeros),
    Row("mask", "mask", "zeros, and the mask as a channel", form=zeros_and_mask, first_layer=misconv_layer_with_mask),
    Row(
        "hiding", "mask, hiding more", "zeros and mask, regions hidden anew in every epoch", form=zeros_and_mask,
        first_layer=misconv_layer_with_mask, fresh=True,
    ),
    Row("mean", "mean", "set to their average over the training images", "mean", filled),
    Row("knn", "k-NN", "set to the average of the 5 most similar training images", "knn", filled),
    Row("partial", "PC", "the first layer skips them and scales the rest up", form=_pair, first_layer=partial_layer),
    Row("splitting", "U-Net, splitting losses", "filled by a U-Net trained by splitting losses", "splitting", filled),
    Row(
        "supmiwae", "supMIWAE", "averaged over completions of a variational autoencoder", form=_pair, marginal=True,
    ),
    Row("samples", "sampled completions", "averaged over draws of the density", "density", draw=draw_completion),
    Row("mfa", "MFA imputation", "set to the mean of the density", "density", filled),
    Row("misconv", "MisConv", "expected response under the density", "density"),
    Row(
        "draws", "MisConv, factors drawn", "averaged over draws of the factors", "density", draw=draw_factors,
        extra=True,
    ),
    Row("gt", "GT", "nothing is missing", form=_zeros, complete=True),
)  # fmt: skip
BY_ROW = {row.name: row for row in ROWS}


def row_named(name: str) -> Row:
    """The row of that name.

    Example:
        >>> row_named("partial").title
        'PC'
    """
    if name not in BY_ROW:
        raise ValueError(f"method must be one of {', '.join(BY_ROW)}, got {name!r}")
    return BY_ROW[name]

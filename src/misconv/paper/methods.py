"""The methods of the tables, one object each: how they treat missing pixels, and what they are called.

A method differs from the others in what its network is given, and in the first layer that takes it; the rest of the
network is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from misconv import impute
from misconv.paper.inputs import CachedMFA, IncompleteImages, Take, filled, point, zeros_and_mask
from misconv.paper.networks import misconv_layer, misconv_layer_with_mask, partial_layer

__all__ = ["BASELINES", "BY_NAME", "METHODS", "OURS", "Method", "method_named"]

NEIGHBOURS, DONORS = 5, 5000  # of k-NN: how many, and among how many images
Imputer = Callable[[Tensor, Tensor], Tensor]  # (x, observed) -> filled x


def _certain(x: Tensor, observed: Tensor) -> Any:
    return point(x)


@dataclass(frozen=True)
class Method:
    """One way to treat missing pixels: a row of the tables.

    Args:
        name: in records, settings and on the command line.
        title: in tables.
        description: in one line, for the report of the demo.
        inputs: (images, what was fitted) -> what the network takes of some of them. What was fitted is indices -> MFA
            for a method with a density, (x, observed) -> filled x for one with an imputer, and None for others. None
            for a method that this module cannot feed.
        density: the name of the density that it uses, "smfa", "dmfa" or "acflow".
        fit_imputer: (x, observed) -> an imputer fitted to them, for a method that needs one.
        complete_inputs: (x, observed) -> what the network takes of images of which nothing is missing.
        first_layer: (channels, width) -> the first layer of its network.
        settings: what else makes its units what they are.
        is_baseline: whether MisConv is compared with it.
        sees_complete: whether it is trained on complete images, or what fills its images is.
        takes_complete: whether its network is never given an incomplete image.
        long_title: its title where there is room.
    """

    name: str
    title: str
    description: str
    inputs: Callable[[IncompleteImages, Any], Take] | None = None
    density: str | None = None
    fit_imputer: Callable[[Tensor, Tensor], Imputer] | None = None
    complete_inputs: Callable[[Tensor, Tensor], Any] = _certain
    first_layer: Callable[..., nn.Module] = misconv_layer
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_baseline: bool = False
    sees_complete: bool = False
    takes_complete: bool = False
    long_title: str = ""

    @property
    def starred(self) -> str:
        """The title, with a star for a method that learns from complete images."""
        return f"{self.title} *" if self.sees_complete else self.title

    def complete(self, data: IncompleteImages) -> Take:
        """How the network is given images of which nothing is missing."""
        return lambda rows: self.complete_inputs(*data.at(rows))


# How images become inputs --------------------------------------------------------------------------------------------


def _zeros(data: IncompleteImages, fitted: None) -> Take:
    return lambda rows: point(impute.zero(*data.at(rows)))


def _zeros_and_mask(data: IncompleteImages, fitted: None) -> Take:
    return lambda rows: zeros_and_mask(*data.at(rows))


def _imputed(data: IncompleteImages, fitted: Imputer) -> Take:
    return lambda rows: point(fitted(*data.at(rows)))


def _imputed_once(data: IncompleteImages, fitted: Imputer) -> Take:
    """Imputed before training, by an imputer that takes long."""
    return CachedMFA(fitted, data, 4096).filled  # an imputer compares with its donors in parts of its own


def _images_and_mask(data: IncompleteImages, fitted: None) -> Take:
    return data.at


def _mean_of_density(data: IncompleteImages, fitted: Take) -> Take:
    return lambda rows: filled(fitted(rows))


def _density_itself(data: IncompleteImages, fitted: Take) -> Take:
    return fitted


def _complete_images(data: IncompleteImages, fitted: None) -> Take:
    """Of images of which nothing is missing."""
    return lambda rows: point(data.at(rows)[0])


def _fit_mean(x: Tensor, observed: Tensor) -> Imputer:
    return impute.Mean().fit(x, observed)


def _fit_knn(x: Tensor, observed: Tensor) -> Imputer:
    return impute.KNN(NEIGHBOURS).fit(x[:DONORS], observed[:DONORS])


# The methods ---------------------------------------------------------------------------------------------------------

# All rows in the paper's order; “mean” is not in the paper.
METHODS = (
    Method("zero", "zero", "missing pixels are set to 0", _zeros, is_baseline=True),
    Method(
        "mask", "mask", "set to 0, and a second channel says which pixels were seen", _zeros_and_mask,
        complete_inputs=zeros_and_mask, first_layer=misconv_layer_with_mask, is_baseline=True,
    ),
    Method(
        "mean", "mean", "set to their average over the training images", _imputed, fit_imputer=_fit_mean,
        is_baseline=True,
    ),
    Method(
        "knn", "k-NN", "set to the average of the 5 most similar training images", _imputed_once, fit_imputer=_fit_knn,
        settings={"neighbours": [NEIGHBOURS, DONORS]}, is_baseline=True,
    ),
    Method(
        "partial", "PC", "the first layer skips them and scales the rest up", _images_and_mask,
        complete_inputs=lambda x, observed: (x, observed), first_layer=partial_layer, is_baseline=True,
        long_title="partial convolution",
    ),
    Method(
        "acflow", "ACFlow", "set to the best guess of a normalizing flow, which was trained on complete images",
        _mean_of_density, density="acflow", sees_complete=True,
    ),
    Method(
        "mfa", "MFA imputation", "set to the mean that the density network predicts", _mean_of_density, density="dmfa",
        is_baseline=True,
    ),
    Method(
        "misconv_smfa", "MisConv (SMFA)", "expected response under one mixture fitted to all images", _density_itself,
        density="smfa",
    ),
    Method(
        "misconv_dmfa", "MisConv (DMFA)", "expected response under the density network", _density_itself,
        density="dmfa",
    ),
    Method(
        "gt", "GT", "nothing is missing: the most that can be hoped for", _complete_images, sees_complete=True,
        takes_complete=True, long_title="complete images",
    ),
)  # fmt: skip

BY_NAME = {method.name: method for method in METHODS}
BASELINES = tuple(method for method in METHODS if method.is_baseline)
OURS = "misconv_dmfa"  # is compared with the best of them


def method_named(name: str) -> Method:
    """The method of that name.

    Example:
        >>> method_named("knn").title
        'k-NN'
    """
    if name not in BY_NAME:
        raise ValueError(f"method must be one of {', '.join(BY_NAME)}, got {name!r}")
    return BY_NAME[name]

"""The maths that stands by itself: expectations of activations, padding, L×L algebra, likelihoods."""

from misconv._math.expectations import (
    Activation,
    _apply,
    _cdf,
    _cut,
    _pdf,
    activation_module,
    deviation,
    expectation,
    expectation_of_spread,
    weighted_mean,
)
from misconv._math.likelihood import NOISE_FLOOR, full_precision, log_prob, score, wide_type
from misconv._math.linalg import cholesky, triangular_inverse
from misconv._math.padding import Border, Padding, Pair, border_noise, margins, output_size, pair

__all__ = [
    "NOISE_FLOOR",
    "Activation",
    "Border",
    "Padding",
    "Pair",
    "_apply",
    "_cdf",
    "_cut",
    "_pdf",
    "activation_module",
    "border_noise",
    "cholesky",
    "deviation",
    "expectation",
    "expectation_of_spread",
    "full_precision",
    "log_prob",
    "margins",
    "output_size",
    "pair",
    "score",
    "triangular_inverse",
    "weighted_mean",
    "wide_type",
]

"""The maths that stands by itself: expectations of activations, sizes of convolutions, L×L algebra."""

from misconv._math.activations import ACTIVATIONS, Activation, activation_module, apply_activation
from misconv._math.draw import Draw, between, hidden_count, lowest
from misconv._math.expectations import (
    deviation,
    expectation,
    expectation_of_spread,
    normal_cdf,
    normal_pdf,
    weighted_mean,
    z_limit,
)
from misconv._math.fill import SWEEPS, nearest_fill, nearest_seen, push_pull
from misconv._math.geometry import Padding, Pair, margins, output_size, pair
from misconv._math.likelihood import (
    NOISE_FLOOR,
    coverage_level,
    full_precision,
    log_prob,
    marginal_log_prob,
    score,
    wide_type,
)
from misconv._math.linalg import cholesky, triangular_inverse
from misconv._math.regions import Like
from misconv._math.relu import ExpectedReLU

__all__ = [
    "ACTIVATIONS",
    "NOISE_FLOOR",
    "SWEEPS",
    "Activation",
    "Draw",
    "ExpectedReLU",
    "Like",
    "Padding",
    "Pair",
    "activation_module",
    "apply_activation",
    "between",
    "cholesky",
    "coverage_level",
    "deviation",
    "expectation",
    "expectation_of_spread",
    "full_precision",
    "hidden_count",
    "log_prob",
    "lowest",
    "marginal_log_prob",
    "margins",
    "nearest_fill",
    "nearest_seen",
    "normal_cdf",
    "normal_pdf",
    "output_size",
    "pair",
    "push_pull",
    "score",
    "triangular_inverse",
    "weighted_mean",
    "wide_type",
    "z_limit",
]

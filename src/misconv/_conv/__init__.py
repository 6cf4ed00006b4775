"""Convolutions of random images: the checks, the normalization and the paths that compute them."""

from misconv._conv.batch_norm import (
    Affine,
    batch_norm_moments,
    first_response,
    fixed_batch_norm,
    normalized,
    sync_group,
)
from misconv._conv.checks import (
    check_convolution,
    check_flag,
    check_geometry,
    check_layer,
    check_placed,
    check_weight,
    check_windows,
)

__all__ = [
    "Affine",
    "batch_norm_moments",
    "check_convolution",
    "check_flag",
    "check_geometry",
    "check_layer",
    "check_placed",
    "check_weight",
    "check_windows",
    "first_response",
    "fixed_batch_norm",
    "normalized",
    "sync_group",
]

"""Convolutions of random images: one value for a convolution, its checks, its normalization, its paths."""

from misconv._conv.batch_norm import (
    Affine,
    BatchNorm,
    Statistics,
    batch_norm_affine,
    batch_norm_moments,
    fixed_batch_norm,
    normalized,
    sync_group,
)
from misconv._conv.checks import check_flag, check_geometry, check_layer, check_placed, check_weight, check_windows
from misconv._conv.compiled import why_not as why_no_kernels
from misconv._conv.convolution import Convolution
from misconv._conv.dispatch import batch_statistics, moments, normalized_response, respond, why_no_replays
from misconv._conv.plain import incomplete_windows, mix_expectations, pad_images

__all__ = [
    "Affine",
    "BatchNorm",
    "Convolution",
    "Statistics",
    "batch_norm_affine",
    "batch_norm_moments",
    "batch_statistics",
    "check_flag",
    "check_geometry",
    "check_layer",
    "check_placed",
    "check_weight",
    "check_windows",
    "fixed_batch_norm",
    "incomplete_windows",
    "mix_expectations",
    "moments",
    "normalized",
    "normalized_response",
    "pad_images",
    "respond",
    "sync_group",
    "why_no_kernels",
    "why_no_replays",
]

"""Checks and conversions of arguments; every message names the argument."""

from misconv._checks.conversions import (
    IMAGE_FORMS,
    INTEGERS,
    as_rows,
    generator_device,
    read_images,
    unpack_images,
)
from misconv._checks.tensors import (
    check_dense,
    check_fraction,
    check_images,
    check_mfa,
    check_nonnegative,
    check_observed,
    check_pair,
    check_positive,
    check_probability,
    check_seed,
    check_seen_finite,
    check_size,
    describe,
    readable,
)

__all__ = [
    "IMAGE_FORMS",
    "INTEGERS",
    "as_rows",
    "check_dense",
    "check_fraction",
    "check_images",
    "check_mfa",
    "check_nonnegative",
    "check_observed",
    "check_pair",
    "check_positive",
    "check_probability",
    "check_seed",
    "check_seen_finite",
    "check_size",
    "describe",
    "generator_device",
    "read_images",
    "readable",
    "unpack_images",
]

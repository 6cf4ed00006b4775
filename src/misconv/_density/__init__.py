"""What densities are made of: the parts of density networks, EM and its data."""

from misconv._density.bounds import Bounds, check_bounds, check_prior, clip, with_margin
from misconv._density.dmfa import ConvDMFA, LinearDMFA
from misconv._density.em import Parameters, Prior, Statistics, collect, log_prior, maximize, start
from misconv._density.em_data import Batches, Units, add_over_processes, check_representable, measure, pairs, some
from misconv._density.network import (
    MOST_WEIGHTS,
    DensityNetwork,
    add_blocks,
    check_devices,
    check_floor,
    check_rank,
    check_shape,
    check_sizes,
    head,
    initialize_components,
    result_type,
)
from misconv._density.unet import UNetDMFA

__all__ = [
    "MOST_WEIGHTS",
    "Batches",
    "Bounds",
    "ConvDMFA",
    "DensityNetwork",
    "LinearDMFA",
    "Parameters",
    "Prior",
    "Statistics",
    "UNetDMFA",
    "Units",
    "add_blocks",
    "add_over_processes",
    "check_bounds",
    "check_devices",
    "check_floor",
    "check_prior",
    "check_rank",
    "check_representable",
    "check_shape",
    "check_sizes",
    "clip",
    "collect",
    "head",
    "initialize_components",
    "log_prior",
    "maximize",
    "measure",
    "pairs",
    "result_type",
    "some",
    "start",
    "with_margin",
]

"""What densities are made of: the parts of density networks, EM and its data."""

from misconv._density.dmfa import ConvDMFA, LinearDMFA
from misconv._density.em import Parameters, Statistics, collect, maximize, start
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

__all__ = [
    "MOST_WEIGHTS",
    "Batches",
    "ConvDMFA",
    "DensityNetwork",
    "LinearDMFA",
    "Parameters",
    "Statistics",
    "Units",
    "add_blocks",
    "add_over_processes",
    "check_devices",
    "check_floor",
    "check_rank",
    "check_representable",
    "check_shape",
    "check_sizes",
    "collect",
    "head",
    "initialize_components",
    "maximize",
    "measure",
    "pairs",
    "result_type",
    "some",
    "start",
]

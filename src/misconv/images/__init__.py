"""What the command line does with a user's own images: learn a density, fill holes, tell how far to believe it."""

from misconv.images.assessing import assess_files
from misconv.images.fitting import FitSettings, fit_files
from misconv.images.imputing import ImputeSettings, impute_files, prepare_folder
from misconv.images.outcome import Outcome, parse_budget

__all__ = [
    "FitSettings",
    "ImputeSettings",
    "Outcome",
    "assess_files",
    "fit_files",
    "impute_files",
    "parse_budget",
    "prepare_folder",
]

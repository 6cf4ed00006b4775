"""What the command line does with a user's own images.

Learn a density, fill holes, tell how far to believe it; train a classifier, use it, measure it.
"""

from misconv.images.assessing import assess_files
from misconv.images.classifying import Trained, TrainSettings, train_files
from misconv.images.fitting import FitSettings, fit_files, load_density
from misconv.images.imputing import ImputeSettings, check_density, impute_files, keep_record, prepare_folder
from misconv.images.outcome import Outcome, parse_budget
from misconv.images.predicting import Classifier, FilePrediction, evaluate_files, load_classifier, predict_files

__all__ = [
    "Classifier",
    "FilePrediction",
    "FitSettings",
    "ImputeSettings",
    "Outcome",
    "TrainSettings",
    "Trained",
    "assess_files",
    "check_density",
    "evaluate_files",
    "fit_files",
    "impute_files",
    "keep_record",
    "load_classifier",
    "load_density",
    "parse_budget",
    "predict_files",
    "prepare_folder",
    "train_files",
]

"""The engine under every training: jobs, checkpoints, processes, devices."""

from misconv._train.checkpoint import Checkpoint, check_place
from misconv._train.engine import EpochRecord, Job, Rate, train
from misconv._train.identity import identify_data, identify_module
from misconv._train.jobs import as_floats, check_incomplete, classifier_job, cosine_schedule, count_right, density_job
from misconv._train.loan import check_trainable, gpu_of
from misconv._train.processes import on_first
from misconv._train.session import check_fabric, one_device, progress_bar

__all__ = [
    "Checkpoint",
    "EpochRecord",
    "Job",
    "Rate",
    "as_floats",
    "check_fabric",
    "check_incomplete",
    "check_place",
    "check_trainable",
    "classifier_job",
    "cosine_schedule",
    "count_right",
    "density_job",
    "gpu_of",
    "identify_data",
    "identify_module",
    "on_first",
    "one_device",
    "progress_bar",
    "train",
]

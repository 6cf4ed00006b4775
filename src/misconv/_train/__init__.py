"""The engine under every training: jobs, checkpoints, processes, devices."""

from misconv._train.batches import smallest_batch
from misconv._train.budget import Budget, budget_of, warm_up_cosine
from misconv._train.checkpoint import Checkpoint, check_place
from misconv._train.densities import DensityTraining, check_density_arguments, density_job
from misconv._train.em_images import EMImages, images_for_em
from misconv._train.engine import EpochRecord, History, Job, Rate, train
from misconv._train.identity import identify_module
from misconv._train.images import Holes, TensorImages, as_floats, check_incomplete, warn_if_inverted
from misconv._train.jobs import call_model, check_count, classifier_job, cosine_schedule, count_right
from misconv._train.labelled import AUGMENTATIONS, labelled_job
from misconv._train.loan import check_trainable, gpu_of
from misconv._train.processes import gathered, on_first
from misconv._train.scores import doubts
from misconv._train.session import check_fabric, cpu_by_default, one_device, progress_bar, started_processes
from misconv._train.streams import StreamedImages, is_stream, stream_of

__all__ = [
    "AUGMENTATIONS",
    "Budget",
    "Checkpoint",
    "DensityTraining",
    "EMImages",
    "EpochRecord",
    "History",
    "Holes",
    "Job",
    "Rate",
    "StreamedImages",
    "TensorImages",
    "as_floats",
    "budget_of",
    "call_model",
    "check_count",
    "check_density_arguments",
    "check_fabric",
    "check_incomplete",
    "check_place",
    "check_trainable",
    "classifier_job",
    "cosine_schedule",
    "count_right",
    "cpu_by_default",
    "density_job",
    "doubts",
    "gathered",
    "gpu_of",
    "identify_module",
    "images_for_em",
    "is_stream",
    "labelled_job",
    "on_first",
    "one_device",
    "progress_bar",
    "smallest_batch",
    "started_processes",
    "stream_of",
    "train",
    "warm_up_cosine",
    "warn_if_inverted",
]

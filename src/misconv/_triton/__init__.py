"""Kernels for a GPU, in Triton; importing this needs Triton."""

from misconv._triton.network import Frame, join, smooth_input, to_mixture
from misconv._triton.normalized import fixed_response, normalized_response
from misconv._triton.operator import respond
from misconv._triton.replay import why_not as why_no_replays
from misconv._triton.score import condition, log_prob, log_probs
from misconv._triton.statistics import batch_statistics

__all__ = [
    "Frame",
    "batch_statistics",
    "condition",
    "fixed_response",
    "join",
    "log_prob",
    "log_probs",
    "normalized_response",
    "respond",
    "smooth_input",
    "to_mixture",
    "why_no_replays",
]

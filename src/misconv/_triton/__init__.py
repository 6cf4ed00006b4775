"""Kernels for a GPU, in Triton; importing this needs Triton."""

from misconv._triton.network import Frame, smooth_input, to_mixture
from misconv._triton.operator import respond
from misconv._triton.score import condition, log_prob

__all__ = ["Frame", "condition", "log_prob", "respond", "smooth_input", "to_mixture"]

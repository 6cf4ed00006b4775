"""A classifier that also learns from an average of itself, which sees images with less hidden.

This is a mean teacher (Tarvainen and Valpola 2017): its parameters are moving averages of the student's. Both are given
the same image, moved in the same way; of the student's more may be hidden. The student learns the label and the
teacher's answer; the teacher is what is tested.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv.paper.inputs import Take

__all__ = ["Taught", "teaching_loss"]

DECAY = 0.999  # of the average, per step, at most: at first it forgets faster, as its first weights tell nothing


class Taught(nn.Module):
    """A classifier and its average.

    Args:
        student: a classifier. It is the only part that has gradients.
    """

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student
        # A training gives frozen parameters back as they came; these change, so they are buffers.
        self.teacher = _with_buffers_alone(copy.deepcopy(student)).eval()
        self.register_buffer("steps", torch.zeros(()))
        self.steps: Tensor

    def train(self, mode: bool = True) -> Taught:
        """The teacher's answers are always those of a network in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, more_hidden: Any, less_hidden: Any = None) -> Any:
        """Logits of the teacher; in training those of the student, and the teacher's."""
        if less_hidden is None:
            return self.teacher(more_hidden)
        with torch.no_grad():
            self._average()
            answers = self.teacher(less_hidden)
        return self.student(more_hidden), answers

    def _average(self) -> None:
        """Of parameters and of the statistics of BatchNorm, but not of counts."""
        self.steps += 1
        share = (9 / (9 + self.steps)).clamp_min(1 - DECAY)  # of what is new
        averages = self.teacher.state_dict()
        for name, new in self.student.state_dict().items():
            if new.is_floating_point():
                averages[name].lerp_(new, share.to(new.device, new.dtype))


def _with_buffers_alone(module: nn.Module) -> nn.Module:
    """The same module, whose parameters have become buffers of the same names."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach())
    return module


def teaching_loss(
    form: Callable[[Take], Take], more: Take, less: Take, labels: Tensor, weight: float
) -> Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]:
    """Cross-entropy of the labels, and `weight` times the Kullback–Leibler divergence from the teacher's answers."""
    more, less = form(more), form(less)

    def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        said, taught = model(more(indices), less(indices))
        total = F.cross_entropy(said, labels[indices], reduction="sum")
        apart = F.kl_div(said.log_softmax(1), taught.log_softmax(1), reduction="sum", log_target=True)
        return (total + weight * apart) / len(indices), total.detach().unsqueeze(0)

    return loss

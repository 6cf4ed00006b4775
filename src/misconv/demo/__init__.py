"""The newcomer's experiment and its report: `misconv demo`."""

from misconv.demo.experiment import Demo, run

__all__ = [
    "Demo",
    "run",
]

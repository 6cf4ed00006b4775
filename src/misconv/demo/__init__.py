"""The newcomer's experiment and its report: `misconv demo`."""

from misconv.demo.experiment import QUICK, Demo, Settings, run

__all__ = [
    "QUICK",
    "Demo",
    "Settings",
    "run",
]

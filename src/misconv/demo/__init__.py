"""The newcomer's experiment and its report: `misconv demo`."""

from misconv.demo.digits import DigitSettings
from misconv.demo.experiment import QUICK, Demo, Settings, run
from misconv.demo.photographs import PhotographSettings

__all__ = [
    "QUICK",
    "Demo",
    "DigitSettings",
    "PhotographSettings",
    "Settings",
    "run",
]

"""Learning from images with missing pixels: what they may be, and what a convolution expects of them.

>>> import torch, misconv
>>> images, observed = torch.rand(50, 1, 8, 8), misconv.missing.square(50, 8, 8)
>>> density = misconv.SMFA(components=2, rank=2).fit(images, observed)
>>> misconv.MisConv2d(1, 16, 3, padding=1)(density(images, observed)).shape
torch.Size([50, 16, 8, 8])
"""

from typing import TYPE_CHECKING, Any

from misconv import functional, impute, missing
from misconv._backend import plain
from misconv._version import __version__
from misconv.convert import convert
from misconv.density import SMFA, ConvDMFA, LinearDMFA
from misconv.layers import MisConv2d, PartialConv2d
from misconv.mfa import MFA
from misconv.missing import observe
from misconv.predict import predictive

if TYPE_CHECKING:
    from misconv.store import load, save
    from misconv.training import fit_density

__all__ = [
    "MFA",
    "SMFA",
    "ConvDMFA",
    "LinearDMFA",
    "MisConv2d",
    "PartialConv2d",
    "__version__",
    "convert",
    "fit_density",
    "functional",
    "impute",
    "load",
    "missing",
    "observe",
    "plain",
    "predictive",
    "save",
]

# The core imports with torch and numpy alone; what needs more is imported when it is asked for.
_LAZY = {"fit_density": "training", "load": "store", "save": "store"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"misconv.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'misconv' has no attribute {name!r}")

"""Learning from images with missing pixels: what they may be, and what a convolution expects of them.

>>> import torch, misconv
>>> images, observed = torch.rand(50, 1, 8, 8), misconv.missing.square(50, 8, 8)
>>> density = misconv.SMFA(components=2, rank=2).fit(images, observed)
>>> misconv.MisConv2d(1, 16, 3, padding=1)(density(images, observed)).shape
torch.Size([50, 16, 8, 8])
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from misconv._version import __version__

if TYPE_CHECKING:
    from misconv import functional, impute, missing
    from misconv._backend import plain
    from misconv.assess import assess
    from misconv.convert import convert
    from misconv.density import SMFA, ConvDMFA, LinearDMFA, UNetDMFA
    from misconv.layers import MisConv2d, PartialConv2d
    from misconv.mfa import MFA
    from misconv.missing import observe
    from misconv.predict import predictive
    from misconv.store import load, save
    from misconv.training import fit_classifier, fit_density

__all__ = [
    "MFA",
    "SMFA",
    "ConvDMFA",
    "LinearDMFA",
    "MisConv2d",
    "PartialConv2d",
    "UNetDMFA",
    "__version__",
    "assess",
    "convert",
    "fit_classifier",
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

# Everything is imported when it is first used (PEP 562): `misconv --help` then needs no torch, and the core no extra.
_MODULE_OF = {
    "MFA": "mfa",
    "SMFA": "density",
    "ConvDMFA": "density",
    "UNetDMFA": "density",
    "LinearDMFA": "density",
    "MisConv2d": "layers",
    "PartialConv2d": "layers",
    "assess": "assess",
    "convert": "convert",
    "fit_classifier": "training",
    "fit_density": "training",
    "load": "store",
    "observe": "missing",
    "plain": "_backend",
    "predictive": "predict",
    "save": "store",
}
_SUBMODULES = {
    "data", "density", "functional", "impute", "layers", "metrics", "mfa", "missing", "paper", "predict", "sklearn",
    "store", "training", "transforms",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"misconv.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return import_module(f"misconv.{name}")
    raise AttributeError(f"module 'misconv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))})


class _Package(ModuleType):
    """Python binds a submodule to its package when it is imported; `assess` and `convert` are names of functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("assess", "convert") and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

"""Kernels of torchvision's v2 transforms for images with missing pixels."""

from misconv._transforms.kernels import KERNELS, NATIVE, refuse

__all__ = [
    "KERNELS",
    "NATIVE",
    "refuse",
]

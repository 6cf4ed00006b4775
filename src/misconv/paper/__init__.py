"""The experiments of the paper: its networks, its tables, and the numbers that came out."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`misconv.paper.acflow`, the one part that is of use by itself, is imported when it is first used."""
    if name == "acflow":
        return import_module("misconv.paper.acflow")
    raise AttributeError(f"module 'misconv.paper' has no attribute {name!r}")

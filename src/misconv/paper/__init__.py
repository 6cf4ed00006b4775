"""The experiments of the paper: its networks, its tables, and the numbers that came out."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`acflow` and `flow_matching`, the parts that are of use by themselves, are imported when they are first used."""
    if name in ("acflow", "flow_matching"):
        return import_module(f"misconv.paper.{name}")
    raise AttributeError(f"module 'misconv.paper' has no attribute {name!r}")

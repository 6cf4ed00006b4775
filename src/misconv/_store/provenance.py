"""Where numbers come from: the commit of this code, versions, the device."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from misconv._version import __version__

__all__ = ["commit", "device_name", "versions"]


def commit() -> str | None:
    """The commit of this code, with a plus sign where it was changed since; None outside its repository.

    Where the code has gone without its history, the environment variable MISCONV_COMMIT can say it.
    """
    if told := os.environ.get("MISCONV_COMMIT"):
        return told

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # somebody's repository may hold an environment with us in it
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions(device: torch.device) -> dict[str, str | int | None]:
    """Of what computes."""
    cuda = device.type == "cuda"
    return {
        "misconv": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _installed("triton"),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
    }


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the kind of CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

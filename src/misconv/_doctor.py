"""What `misconv doctor` tells: versions, the device, whether the fused kernels serve, which extras are there."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch

from misconv._backend import plain
from misconv._conv import why_no_kernels, why_no_replays
from misconv._store import device_name, versions
from misconv.functional import expected_conv2d
from misconv.mfa import MFA

__all__ = ["examine", "is_healthy", "lines"]

EXTRAS = {
    "train": ("lightning_fabric", "rich"),
    "files": ("PIL", "rasterio"),
    "demo": ("sklearn", "typer"),
    "vision": ("torchvision",),
    "timm": ("timm",),
    "figures": ("matplotlib",),
    "paper": ("scipy", "torchmetrics"),
    "app": ("gradio", "uvicorn"),
}
_TOLERANCE = 2e-3  # of TF32


def examine() -> dict[str, Any]:
    """All of it, as JSON knows it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lost = {name: [part for part in parts if find_spec(part) is None] for name, parts in EXTRAS.items()}
    return {
        "versions": versions(device),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "kernels": _kernels(device),
        "replays": {"used": why_no_replays() is None, "reason": why_no_replays()},
        "cpu_kernels": {"used": why_no_kernels() is None, "reason": why_no_kernels()},
        "extras": {name: "there" if not parts else f"without {', '.join(parts)}" for name, parts in lost.items()},
    }


def _kernels(device: torch.device) -> dict[str, Any]:
    """Whether a small layer is computed by a fused kernel, and how far its result is from the plain formulas."""
    if device.type == "cpu":
        return {"used": False, "reason": "there is no GPU that torch can use", "error": None}
    heard = _Heard()
    logger = logging.getLogger("misconv")
    logger.addHandler(heard)
    try:
        generator = torch.Generator(device).manual_seed(0)
        x = torch.rand(2, 3, 32, 32, generator=generator, device=device)
        p = MFA(torch.zeros(2, 1, device=device), x[:, None], x[:, None, None], x[:, None], x[:, :1] > 0.3)
        weight = torch.randn(8, 3, 3, 3, generator=generator, device=device)
        fused = expected_conv2d(p, weight)
        with plain():
            exact = expected_conv2d(p, weight)
        error = float((fused - exact).norm() / exact.norm())
    except Exception as problem:  # a driver or a compiler may fail in any way, and that is what is asked here
        return {"used": False, "reason": f"{type(problem).__name__}: {problem}".splitlines()[0], "error": None}
    finally:
        logger.removeHandler(heard)
    return {"used": not heard.reasons, "reason": "; ".join(heard.reasons) or None, "error": error}


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reasons.append(str(record.args[0]) if isinstance(record.args, tuple) and record.args else record.msg)


def is_healthy(found: dict[str, Any]) -> bool:
    """Whether what the kernels compute is right."""
    error = found["kernels"]["error"]
    return error is None or error < _TOLERANCE


def lines(found: dict[str, Any]) -> list[str]:
    """The same in words."""
    known = found["versions"]
    kernels = found["kernels"]
    text = f"in use, {kernels['error']:.1g} from the plain formulas" if kernels["used"] else kernels["reason"]
    text = text if is_healthy(found) else f"WRONG by {kernels['error']:.1g}: set MISCONV_PLAIN=1, and report this"
    packages = ", ".join(f"{name} {known[name.lower()] or 'none'}" for name in ("Python", "torch", "triton"))
    cuda = f", CUDA {known['cuda']}" if known["cuda"] else ""
    return [
        f"misconv   {known['misconv']}, {packages}",
        f"device    {found['device']}{cuda}, {found['threads']} threads of the CPU",
        f"kernels   {text}",
        f"launches  {found['replays']['reason'] or 'known ones are replayed by compiled code'}",
        f"on a CPU  {found['cpu_kernels']['reason'] or 'compiled kernels are in use'}",
        *(f"extra     {name}: {state}" for name, state in found["extras"].items()),
    ]

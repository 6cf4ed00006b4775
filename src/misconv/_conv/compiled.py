"""The CPU's kernels: E[ReLU] in touched windows, compiled from `cpp/` by the C++ compiler of the machine.

They are compiled once, at their first use, and kept in the cache of torch's extensions. The source needs no header of
torch and takes a few seconds. Where it cannot be compiled, `touched` computes the same in torch's own operations.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from misconv._compiler import Build, reason
from misconv._conv.convolution import Convolution
from misconv._math import expectation, weighted_mean
from misconv.mfa import MFA

__all__ = ["expected_relu", "why_not"]

_SOURCES = Path(__file__).with_name("cpp")
# NaN and infinity keep their meaning: nothing here is -ffast-math, only errno and floating-point traps are given up.
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# The instructions that torch itself has found on this machine; a cache may be shared with older ones.
_INSTRUCTIONS = {"AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX2": ("-march=x86-64-v3",)}


# The library -------------------------------------------------------------------------------------------------------


def why_not() -> str | None:
    """Why there are no compiled kernels; None where they serve."""
    found = _library()
    return found if isinstance(found, str) else None


@cache
def _library() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none."""
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as problem:  # also where nobody is at home
        return f"the kernels {reason(problem)}"


def _compiled() -> Path:
    """The library in the cache, compiled if it is not there."""
    flags = (*_FLAGS, *_INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ()))
    return Build(_SOURCES / "windows.cpp", flags).wait()


_Pair, _Strides = ctypes.c_int64 * 2, ctypes.c_int64 * 4
_NUMBERS = ("batch", "channels", "height", "width", "filters", "groups", "components", "rank")
_PAIRS = ("kernel", "size", "stride", "dilation", "before", "padded")
_POINTERS = (
    *("observed", "missing", "factors", "noise", "apart", "weight", "shares", "table", "number", "touching"),
    *("response", "result", "gradient", "grad_response", "grad_weight", "grad_shares"),
    *("grad_table", "grad_factors", "grad_noise", "grad_apart"),
)


_STRIDED = ("response", "result", "gradient", "grad_response")


class _Problem(ctypes.Structure):
    """`Problem` of cpp/kernels.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, _Pair) for name in _PAIRS),
        ("strides", _Strides),
        *((name, ctypes.c_int64) for name in ("planes", "all", "threads")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    )


# Calls -------------------------------------------------------------------------------------------------------------


def expected_relu(
    p: MFA, conv: Convolution, missing: Tensor, response: Callable[[], Tensor], in_place: bool
) -> Tensor | None:
    """E[ReLU] (B, O, H', W') of a response whose missing pixels vary.

    None where squares might leave the range of float32, or where types are mixed.

    Args:
        conv: with zeros as padding; its weights hold the normalization.
        missing: (B, H, W), where a channel is not observed.
        response: the mean of the first component behind the normalization.
        in_place: whether nobody else can hold the response, so that the result may take its memory.
    """
    shares = apart = None
    if p.means.shape[1] > 1:
        shares, apart = p.weights, p.means[:, 1:] - p.means[:, :1]
    # Components share their observed pixels, and a gradient in these is split among them: then all are listed.
    every = apart is not None and apart.requires_grad and torch.is_grad_enabled()
    if {t.dtype for t in (p.factors, p.noise, p.means, conv.weight)} != {p.dtype}:
        return None
    windows = _Windows(p, conv, missing, every)
    with torch.no_grad():
        if not windows.pack(p, apart):
            return None
    mean = response()
    if mean.dtype != p.dtype:  # a normalization may have another type than the images
        return None
    parts = (mean, conv.weight, p.factors, p.noise, apart, shares)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in parts):
        result: Tensor = _ExpectedReLU.apply(windows, *parts)
        return result
    # Fresh memory costs more than the numbers in it.
    return windows.forward(mean, conv.weight, shares, mean if in_place else torch.empty_like(mean))


class _ExpectedReLU(torch.autograd.Function):
    """E[ReLU] of touched windows and ReLU of the others, from the response and from what varies."""

    @staticmethod
    def forward(ctx: Any, windows: _Windows, *parts: Tensor | None) -> Tensor:
        response, weight, _, _, _, shares = parts
        assert response is not None
        assert weight is not None
        ctx.windows = windows
        ctx.save_for_backward(*parts)
        return windows.forward(response, weight, shares, torch.empty_like(response))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # somebody will differentiate these gradients
            return (None, *ctx.windows.plain_backward(ctx.saved_tensors, ctx.needs_input_grad[1:], gradient))
        return (None, *ctx.windows.backward(ctx.saved_tensors, ctx.needs_input_grad[1:], gradient))


class _Windows:
    """The windows of one batch under one convolution: numbers that describe them, and what varies in their pixels."""

    def __init__(self, p: MFA, conv: Convolution, missing: Tensor, every: bool) -> None:
        assert p.observed is not None
        self.conv, self.missing, self.observed = conv, missing.contiguous(), p.observed.contiguous()
        batch, components, rank, channels, *image = p.factors.shape
        left, _, top, _ = conv.margins
        size = conv.size(tuple(image))
        moves = zip(size, conv.strides, conv.dilations, conv.kernel, strict=True)
        padded = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in moves]
        self.problem = _Problem(batch, channels, *image, len(conv.weight), conv.groups, components, rank)
        pairs = (conv.kernel, size, conv.strides, conv.dilations, (top, left), padded)
        for name, pair in zip(_PAIRS, pairs, strict=True):
            setattr(self.problem, name, _Pair(*pair))
        self.problem.planes, self.problem.all = self.observed.shape[1], every
        self.number = torch.zeros(batch, *padded, dtype=torch.int32, device=missing.device)
        self.touching = torch.zeros(batch, *padded, dtype=torch.bool, device=missing.device)
        pixels = missing.numel() if every else int(missing.count_nonzero())
        self.table = p.factors.new_empty(1 + pixels, channels, components * (rank + 2) - 1)

    def pack(self, p: MFA, apart: Tensor | None) -> bool:
        """List what varies; whether its squares stay in the range of its type."""
        return self._run("pack", factors=p.factors, noise=p.noise, apart=apart, missing=self.missing) != 0

    def forward(self, response: Tensor, weight: Tensor, shares: Tensor | None, result: Tensor) -> Tensor:
        """Write the expected activation into `result`, which may be the response itself."""
        self._run("forward", response, response=response, weight=weight, shares=shares, result=result)
        return result

    def backward(
        self, parts: tuple[Tensor | None, ...], needed: tuple[bool, ...], gradient: Tensor
    ) -> list[Tensor | None]:
        """The gradients of response, weight, factors, noise, differences of means and shares."""
        response, weight, factors, noise, apart, shares = parts
        assert response is not None
        assert weight is not None
        if gradient.stride() != response.stride():
            gradient = torch.empty_like(response).copy_(gradient)
        of_response = torch.empty_like(response)
        of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needed[1] else None
        of_shares = self.table.new_zeros(response.shape[0], self.problem.components)
        of_table = torch.zeros_like(self.table) if any(needed[2:5]) else None
        self._run(
            "backward",
            response,
            response=response,
            weight=weight,
            shares=shares,
            gradient=gradient,
            grad_response=of_response,
            grad_weight=of_weight,
            grad_shares=of_shares,
            grad_table=of_table,
        )
        of_pixels: list[Tensor | None] = [None, None, None]
        if of_table is not None:
            of_pixels = [t if t is None else t.new_zeros(t.shape) for t in (factors, noise, apart)]
            names = ("grad_factors", "grad_noise", "grad_apart")
            self._run("unpack", grad_table=of_table, **dict(zip(names, of_pixels, strict=True)))
        return [of_response, of_weight, *of_pixels, None if shares is None else of_shares]

    def plain_backward(
        self, parts: tuple[Tensor | None, ...], needed: tuple[bool, ...], gradient: Tensor
    ) -> list[Tensor | None]:
        """The same by formulas that can be differentiated again."""
        own = [None if t is None else t.view_as(t) for t in parts]  # the response depends on the weight as well
        wanted = [t for t, need in zip(own, needed, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(self._plain(*own), wanted, gradient, create_graph=True, allow_unused=True))
        return [next(found) if need else None for need in needed]

    def _plain(self, *parts: Any) -> Tensor:
        response, weight, factors, noise, apart, shares = parts
        moved, known = self.conv.replace(weight, None), self.observed.unsqueeze(1)
        variance = self.conv.replace(weight.square(), None)(noise.masked_fill(known, 0))
        if self.problem.rank > 0:
            variance = variance + moved(factors.masked_fill(known.unsqueeze(2), 0)).square().sum(2)
        mean = response.unsqueeze(1)
        if apart is None:
            return expectation("relu", mean, variance).squeeze(1)
        mean = torch.cat([mean, mean + moved(apart)], 1)
        return weighted_mean(shares[..., None, None, None], expectation("relu", mean, variance), 1)

    def _run(self, name: str, like: Tensor | None = None, **tensors: Tensor | None) -> int:
        """Call a function of the library with tensors, and with the strides of the response."""
        problem = _Problem.from_buffer_copy(self.problem)  # of this call alone: others may run at the same time
        problem.threads = torch.get_num_threads()
        if like is not None:
            problem.strides = _Strides(*like.stride())
        tensors |= {"observed": self.observed, "table": self.table, "number": self.number, "touching": self.touching}
        laid = {name: t if t is None or name in _STRIDED else t.contiguous() for name, t in tensors.items()}
        for field, tensor in laid.items():
            setattr(problem, field, None if tensor is None else tensor.data_ptr())
        library = _library()
        assert isinstance(library, ctypes.CDLL)
        kind = {torch.float32: "float", torch.float64: "double"}[self.table.dtype]
        return int(getattr(library, f"{name}_{kind}")(ctypes.byref(problem)))

"""Triton's interpreter checks all that it checked before tests/interpreter.py made it faster."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.interpreter import is_sped_up

pytestmark = pytest.mark.skipif(
    not is_sped_up(), reason="kernels are compiled, or this Triton's interpreter is as it was"
)


@triton.jit
def arithmetic_kernel(x, y, out, operation: tl.constexpr, size: tl.constexpr):
    i = tl.arange(0, size)
    a, b = tl.load(x + i), tl.load(y + i)
    if operation == "add":
        tl.store(out + i, a + b)
    elif operation == "sub":
        tl.store(out + i, a - b)
    else:
        tl.store(out + i, a * b)


@triton.jit
def block_kernel(out, size: tl.constexpr):
    tl.store(out + tl.arange(0, 2), tl.sum(tl.zeros((size, 2), tl.float32), 0))


def compute(operation: str, x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    arithmetic_kernel[(1,)](x, y, out, operation, x.numel())
    return out


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_an_overflow_of_integers_is_found(operation: str, dtype: torch.dtype) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    fits = {"add": (high - 1, 1), "sub": (low + 1, 1), "mul": (high // 2, 2)}[operation]
    x, y = (torch.tensor([1, value], dtype=dtype) for value in fits)
    assert torch.equal(compute(operation, x, y), getattr(torch, operation)(x, y))
    bits = torch.iinfo(dtype).bits
    with pytest.raises(Exception, match=f"int{bits} overflow detected for operation {operation}"):
        compute(operation, x, (y + 1 if operation != "mul" else y + 2).to(dtype))


def test_integers_of_64_bits_go_round_as_they_do_on_a_gpu() -> None:
    most = torch.full((2,), torch.iinfo(torch.int64).max)
    assert torch.equal(compute("add", most, torch.ones_like(most)), most + 1)


def test_a_block_has_a_power_of_two() -> None:
    out = torch.ones(2, dtype=torch.float32)
    block_kernel[(1,)](out, 4)
    assert torch.equal(out, torch.zeros_like(out))
    for _ in range(2):  # nor later, when shapes are known
        with pytest.raises(Exception, match="must be a power of 2"):
            block_kernel[(1,)](out, 3)

"""Float16 numbers in the place of TF32 ones.

They have as many digits, 11 bits, and tensor cores take them twice as fast, in any order, and two in a word. What
float16 lacks is range. So what is multiplied comes in *units*, powers of two that are found for a few numbers at a time
(the pixels of a box, the weights of a filter) from the largest of them. Only numbers below about a 10⁸th of that one
lose digits, and these weigh nothing in a sum with it. For that the channels of an image are *balanced* first: where one
is in much larger units than another, its weights are the smaller ones, and a power of two goes from the one to the
other. Infinite numbers have no part in the choice of a unit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from misconv._triton.launch import Launch

__all__ = ["HalfFilters", "balance_kernel", "finite_size", "halve_filters_kernel", "power_below", "unit_of"]


class HalfFilters(NamedTuple):
    """How filters become float16 numbers."""

    balance: Launch
    halve: Launch
    shape: tuple[int, ...]  # of these

    def launch(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The filters, the unit of each, and what `balance_kernel` says of the channels."""
        out, channels = self.shape[:2]
        filters = torch.empty(self.shape, dtype=torch.float16, device=weight.device)
        units = torch.empty(out, dtype=torch.float32, device=weight.device)
        balances = torch.empty(1 + channels, dtype=torch.float32, device=weight.device)
        self.balance(weight, balances)
        self.halve(weight, balances, filters, units)
        return filters, units, balances


@triton.jit
def finite_size(values):
    """Absolute values, and 0 where these are not finite."""
    size = tl.abs(values)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def power_below(number):
    """The largest power of two that is not above a positive number, and at least 2⁻¹⁰⁰, whose inverse is finite."""
    bits = number.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(bits.to(tl.float32, bitcast=True), 7.888609052210118e-31)


@triton.jit
def unit_of(values, LARGEST: tl.constexpr):
    """The power of two of which the largest of these values is between LARGEST and twice as many."""
    return power_below(tl.max(finite_size(values), 0)) / LARGEST


@triton.jit
def balance_kernel(
    weight, balances, out, TAPS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr
):
    """For each channel the power of two below its largest weight in all filters (out, TAPS); by one program.

    A window has WINDOW taps; BLOCK_O filters are read at a time. In front of them stands 1 where they are so uneven
    that they matter, else 0: then nobody reads them.
    """
    t = tl.arange(0, BLOCK_T)
    found = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(0, out, BLOCK_O):
        o = first + tl.arange(0, BLOCK_O)
        inside = (o < out)[:, None] & (t < TAPS)[None, :]
        values = tl.load(weight + o[:, None] * TAPS + t[None, :], mask=inside, other=0.0).to(tl.float32)
        found = tl.maximum(found, tl.max(finite_size(values), 0))
    most = power_below(tl.max(found, 0))
    least = most
    for channel in range(TAPS // WINDOW):
        power = power_below(tl.max(tl.where(t // WINDOW == channel, found, 0.0), 0))
        tl.store(balances + 1 + channel, power)
        least = tl.minimum(least, power)
    tl.store(balances, tl.where(most > 16 * least, 1.0, 0.0))


@triton.jit
def halve_filters_kernel(
    weight, balances, filters, units, TAPS: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """One filter, TAPS numbers in lines of KX, in units of its own; lines of the result have WIDE places, zeros last.

    The largest weight becomes 64 to 128, so that its square is a float16 number, too, and that of a weight which is
    10,000 times smaller has all digits.
    """
    o, t = tl.program_id(0), tl.arange(0, BLOCK)
    inside = (t < TAPS // KX * WIDE) & (t % WIDE < KX)
    values = tl.load(weight + o * TAPS + t // WIDE * KX + t % WIDE, mask=inside, other=0.0).to(tl.float32)
    if tl.load(balances) > 0:
        values = values / tl.load(balances + 1 + t // (KY * WIDE), mask=inside, other=1.0)
    unit = unit_of(values, 64)
    tl.store(units + o, unit)
    tl.store(filters + o * (TAPS // KX * WIDE) + t, (values / unit).to(tl.float16), mask=t < TAPS // KX * WIDE)

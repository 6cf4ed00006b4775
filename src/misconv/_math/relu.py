"""E[ReLU(Z)] from mean and variance in few passes over memory, with its own gradient, for the path of the CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from misconv._math.expectations import normal_cdf, normal_pdf, z_limit

__all__ = ["ExpectedReLU"]

# E[ReLU(N(m, v))] = ReLU(m) + s e^(−a²/2) g(a) with a = |m|/s, and 1/g is nearly this polynomial in a: a minimax fit
# that comes within 4e-8 of max(s, |m|) and never below ReLU. For single precision; a test holds it to that.
_TAIL = (
    2.506628015076795,
    3.1416153960695685,
    1.4304810068819938,
    0.22371180389596965,
    -0.02139637851225861,
    -0.0015998731981576374,
    0.00048653473976861464,
)


class ExpectedReLU(torch.autograd.Function):
    """E[ReLU(N(m, v))] = mΦ(m/s) + sφ(m/s), s = √v, in few passes; its slopes are Φ(m/s) and φ(m/s)/2s."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        ctx.save_for_backward(mean, variance)
        # 1/s of a variance of 0 is so large that the density is 0, or m is 0; √v = v/s then is 0.
        scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).rsqrt_()
        spread = variance * scale
        z = scale.mul_(mean)
        if mean.dtype == torch.float32:
            z.abs_()
            density = (z * z).mul_(-0.5 / math.log(2)).exp2_()  # several times as fast as exp
            lowest, *higher, last, highest = mean.new_tensor(_TAIL).unbind()
            tail = torch.addcmul(last, highest, z)
            for coefficient in (*reversed(higher), lowest):
                tail = torch.addcmul(coefficient, tail, z, out=tail)
            return mean.relu().addcdiv_(spread.mul_(density), tail)
        density = (z * z).mul_(-0.5).exp_()
        tail = z.mul_(-math.sqrt(0.5)).erfc_()  # 2Φ(m/s)
        expected = spread.mul_(density).mul_(1 / math.sqrt(2 * math.pi))
        return torch.where(variance > 0, expected.addcmul_(mean, tail, value=0.5), mean.relu())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = ctx.saved_tensors
        spread = torch.where(variance > 0, variance, 1).sqrt()
        random = (variance > 0) & (mean.abs() < z_limit(mean) * spread)
        z = torch.where(random, mean, 0) / spread
        above = torch.where(random, normal_cdf(z), (mean > 0).to(mean.dtype))
        return gradient * above, gradient * torch.where(random, normal_pdf(z) / (2 * spread), 0)

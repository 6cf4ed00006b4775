"""Learning from images with missing pixels: what they may be, and what a convolution expects of them.

>>> import torch, misconv
>>> x, observed = misconv.observe(torch.rand(2, 3, 8, 8))
>>> p = misconv.MFA.point(x)
>>> misconv.MisConv2d(3, 16, 3, padding=1)(p).shape
torch.Size([2, 16, 8, 8])
"""

from misconv import functional, missing
from misconv.layers import MisConv2d, PartialConv2d
from misconv.mfa import MFA
from misconv.missing import observe

__all__ = ["MFA", "MisConv2d", "PartialConv2d", "functional", "missing", "observe"]
__version__ = "0.1.0.dev0"

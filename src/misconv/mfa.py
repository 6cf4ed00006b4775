"""What the pixels of an image may be: a mixture of factor analyzers (MFA) per image.

Component k of an image with n = C·H·W pixels is the Gaussian ``Z = μ + √d ⊙ X + Σ_j Y_j a_j`` with X and Y standard
normal: mean μ, covariance ``diag(d) + A Aᵀ`` with L ≪ n columns a_j. By Woodbury's identity everything here costs
O(n·L²) time and O(n·L) memory; no n×n matrix ever exists. `docs/maths.md` has the derivations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from misconv._checks import check_images, check_mfa, check_observed, check_seen_finite, check_size, describe
from misconv._linalg import cholesky, triangular_inverse
from misconv._path import HAS_TRITON, by_itself, fall_back, is_plain

__all__ = ["MFA"]

# A noise variance below this counts as this where it is divided by (scoring, conditioning): a standard deviation of
# 1e-7. It keeps 1/d finite, and with the float64 Gram matrix (below) C = I + AᵀD⁻¹A still has correct digits.
_NOISE_FLOOR = 1e-14
_MAX_RANK = 16  # of the fused kernels


@dataclass(eq=False, repr=False)
class MFA:
    """A mixture of K factor analyzers for each of B images.

    Where `observed` is True the pixel is exact: it equals `means` there, and `factors` and `noise` count as zero
    whatever they hold. An MFA is a pytree and a dataclass, so that it passes through `torch.compile`, `torch.vmap`,
    `torch.export` and `DistributedDataParallel`.

    Args:
        logits: (B, K), unnormalised log weights of the components.
        means: (B, K, C, H, W), μ.
        factors: (B, K, L, C, H, W), the columns a_j of A; L may be 0.
        noise: (B, K, C, H, W), the variances d ≥ 0.
        observed: bool (B, 1, H, W) or (B, C, H, W), True where the pixel is exact; None where none is.
        check: whether to check values (finite, non-negative noise). None checks on the CPU only, because a look at
            values makes a GPU wait; True checks everywhere; False trusts the caller in everything, shapes included.

    Example:
        >>> means, noise = torch.zeros(2, 1, 3, 8, 8), torch.ones(2, 1, 3, 8, 8)
        >>> p = MFA(torch.zeros(2, 1), means, torch.ones(2, 1, 4, 3, 8, 8), noise)
        >>> p
        MFA(2 images of 3×8×8, 1 component of rank 4)
        >>> p.mean.shape, p.variance.unique().tolist()
        (torch.Size([2, 3, 8, 8]), [5.0])
    """

    logits: Tensor
    means: Tensor
    factors: Tensor
    noise: Tensor
    observed: Tensor | None = None
    check: InitVar[bool | None] = None

    def __post_init__(self, check: bool | None) -> None:
        if check is not False:
            check_mfa(self, check)

    @staticmethod
    def point(x: Tensor) -> MFA:
        """The density of fully known images: one component, all pixels exact.

        Example:
            >>> p = MFA.point(torch.rand(2, 3, 8, 8))
            >>> p.variance.max().item()
            0.0
        """
        check_images("x", x)
        batch, channels, height, width = x.shape
        observed = torch.ones(batch, 1, height, width, dtype=torch.bool, device=x.device)
        check_seen_finite("x", x, observed)
        return MFA(
            logits=x.new_zeros(batch, 1),
            means=x.unsqueeze(1),
            factors=x.new_zeros(batch, 1, 0, channels, height, width),
            noise=torch.zeros_like(x).unsqueeze(1),
            observed=observed,
            check=False,
        )

    # What it is --------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """(B, C, H, W), the shape of the images."""
        return torch.Size((*self.means.shape[:-4], *self.means.shape[-3:]))

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of all parameters."""
        return self.means.dtype

    @property
    def device(self) -> torch.device:
        """Where all parameters live."""
        return self.means.device

    @property
    def weights(self) -> Tensor:
        """(B, K), the probabilities of the components."""
        return self.logits.softmax(-1)

    @property
    def mean(self) -> Tensor:
        """(B, C, H, W), the expected image ``Σ_k π_k μ_k``; exact at observed pixels."""
        mixed = (_over_pixels(self.weights) * self.means).sum(-4)
        return mixed if self.observed is None else torch.where(self.observed, self.means.select(-4, 0), mixed)

    @property
    def variance(self) -> Tensor:
        """(B, C, H, W), the variance of every pixel: within components plus between them, never negative."""
        means, factors, noise = self.pinned()
        between = self._zero_where_observed(means - self.mean.unsqueeze(-4))
        within = noise + factors.square().sum(-4)  # (B, K, C, H, W)
        return (_over_pixels(self.weights) * (within + between.square())).sum(-4)

    def pinned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means, factors and noise as they count: factors and noise are zero, with zero gradient, at exact pixels."""
        return self.means, self._zero_where_observed(self.factors, 1), self._zero_where_observed(self.noise)

    # Probability -------------------------------------------------------------------------------------------------

    def log_prob(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """The log density of the pixels in `where`, all other pixels integrated out.

        ``log Σ_k π_k N(x_w; μ_w, D_w + A_w A_wᵀ)``. Pixels that this MFA holds as exact carry no density and count
        for nothing, so the chain rule reads
        ``p.log_prob(x, a | b) == p.log_prob(x, a) + p.condition(x, a).log_prob(x, b)``.

        Args:
            x: (B, C, H, W); values outside `where` are never read.
            where: bool (B, 1, H, W) or (B, C, H, W); None means every pixel.

        Returns:
            (B,).

        Example:
            >>> means, noise = torch.zeros(1, 1, 1, 2, 2), torch.ones(1, 1, 1, 2, 2)
            >>> p = MFA(torch.zeros(1, 1), means, torch.zeros(1, 1, 0, 1, 2, 2), noise)
            >>> p.log_prob(torch.zeros(1, 1, 2, 2))  # four standard normal pixels: -2 log 2π
            tensor([-3.6758])
        """
        scored = self._check_pixels(x, where, "where")
        tensors = (*self._parameters(), x, None if where is None else scored, self.observed)
        if self._fused(x):
            from misconv import _triton_score

            return _triton_score.log_prob(*tensors, floor=_NOISE_FLOOR, plain=_log_prob)
        return _log_prob(*tensors)

    def condition(self, x: Tensor, observed: Tensor) -> MFA:
        """The MFA given the observed pixels, which become exact; the weights are updated by Bayes' rule.

        With C = I + A_oᵀ D_o⁻¹ A_o = R Rᵀ and ŷ = C⁻¹ A_oᵀ D_o⁻¹ (x_o − μ_o): means μ + Aŷ, factors A R⁻ᵀ, noise d.

        Args:
            x: (B, C, H, W); values outside `observed` are never read.
            observed: bool (B, 1, H, W) or (B, C, H, W).

        Example:
            >>> means, noise = torch.zeros(1, 1, 1, 1, 2), torch.ones(1, 1, 1, 1, 2)
            >>> p = MFA(torch.zeros(1, 1), means, torch.ones(1, 1, 1, 1, 1, 2), noise)
            >>> q = p.condition(torch.tensor([[[[2.0, float("nan")]]]]), torch.tensor([[[[True, False]]]]))
            >>> q.mean.round(decimals=3)  # the second pixel: correlation 1/2 …
            tensor([[[[2., 1.]]]])
            >>> q.variance.round(decimals=3)  # … and variance 2 - 1/2
            tensor([[[[0.0000, 1.5000]]]])
        """
        observed = self._check_pixels(x, observed, "observed")
        known = observed if self.observed is None else observed | self.observed
        if self._fused(x, gradients=False):
            from misconv import _triton_score

            tensors = (*self._parameters(), x, observed, self.observed)
            logits, means, factors = _triton_score.condition(*tensors, floor=_NOISE_FLOOR)
            return MFA(logits, means, factors, self.noise, known, check=False)
        likelihood, root_inverse, latent = self._score(x, observed)
        # Factors of pixels that were exact before may hold anything; a zero times that must not reach a gradient.
        free = self._zero_where_observed(self.factors, 1).flatten(-3)  # (B, K, L, n)
        with _full_precision(self.device):
            moved = (latent.to(self.dtype).unsqueeze(-2) @ free).reshape(self.means.shape)
            factors = (root_inverse.to(self.dtype) @ free).reshape(self.factors.shape)
        fresh = observed if self.observed is None else observed & ~self.observed
        return MFA(
            logits=(self.logits.log_softmax(-1) + likelihood).log_softmax(-1).to(self.dtype),
            means=torch.where(fresh.unsqueeze(-4), x.unsqueeze(-4), self.means + moved),
            factors=factors,
            noise=self.noise,
            observed=known,
            check=False,
        )

    def fix(self, x: Tensor, observed: Tensor) -> MFA:
        """Pin the observed pixels of an MFA that is conditional already; nothing else is updated.

        This is the last line of a density network: its parameters describe the missing pixels given the others.

        Example:
            >>> means, noise = torch.zeros(1, 1, 1, 1, 2), torch.ones(1, 1, 1, 1, 2)
            >>> p = MFA(torch.zeros(1, 1), means, torch.ones(1, 1, 1, 1, 1, 2), noise)
            >>> p.fix(torch.tensor([[[[2.0, float("nan")]]]]), torch.tensor([[[[True, False]]]])).mean
            tensor([[[[2., 0.]]]])
        """
        observed = self._check_pixels(x, observed, "observed")
        return MFA(
            logits=self.logits,
            means=torch.where(observed.unsqueeze(-4), x.unsqueeze(-4), self.means),
            factors=self.factors,
            noise=self.noise,
            observed=observed if self.observed is None else observed | self.observed,
            check=False,
        )

    def sample(self, count: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw `count` completions of every image, (count, B, C, H, W); observed pixels are the same in all.

        Differentiable in means, factors and noise; the choice of the component is not.

        Example:
            >>> p = MFA.point(torch.rand(2, 3, 8, 8))
            >>> bool((p.sample(5) == p.mean).all())
            True
        """
        check_size("count", count)
        chosen = torch.multinomial(self.weights, count, replacement=True, generator=generator).T  # (S, B)
        one_hot = torch.nn.functional.one_hot(chosen, self.logits.shape[-1]).to(self.dtype)  # (S, B, K)
        randn = partial(torch.randn, generator=generator, dtype=self.dtype, device=self.device)
        latent = randn((count, *self.factors.shape[:3])) * one_hot.unsqueeze(-1)  # (S, B, K, L)
        means, factors, noise = self.pinned()
        with _full_precision(self.device):
            drawn = torch.einsum("sbk,bkchw->sbchw", one_hot, means)
            drawn = drawn + torch.einsum("sbkl,bklchw->sbchw", latent, factors)
            deviation = torch.einsum("sbk,bkchw->sbchw", one_hot, _safe_sqrt(noise))
        drawn = drawn + deviation * randn((count, *self.shape))
        return drawn if self.observed is None else torch.where(self.observed, self.means[:, 0], drawn)

    # Batches and devices -----------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> MFA:
        """Move or cast all parameters, with the arguments of `torch.Tensor.to`; `observed` stays bool."""
        moved = self._map(lambda t: t.to(*args, **kwargs))
        moved.observed = None if self.observed is None else self.observed.to(moved.device)
        return moved

    def detach(self) -> MFA:
        """The same MFA without gradients."""
        return self._map(Tensor.detach)

    def __len__(self) -> int:
        return len(self.means)

    def __getitem__(self, index: int | slice | list[int] | Tensor) -> MFA:
        """Some of the images; a single index keeps the batch dimension."""
        if isinstance(index, int) and not isinstance(index, bool):
            if not -len(self) <= index < len(self):
                raise IndexError(f"index must be one of {len(self)} images, got {index}")
            index = [index]
        return self._map(lambda t: t[index])

    def __repr__(self) -> str:
        if not isinstance(self.factors, Tensor) or self.factors.dim() != 6:
            return f"MFA({describe(self.factors)})"  # inside a transform, or a tree of something else
        batch, components, rank, *image = self.factors.shape
        plural = "s" if components > 1 else ""
        size = "×".join(str(n) for n in image)
        return f"MFA({batch} images of {size}, {components} component{plural} of rank {rank})"

    # Inside ------------------------------------------------------------------------------------------------------

    def _parameters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.logits, self.means, self.factors, self.noise

    def _map(self, function: Callable[[Tensor], Tensor]) -> MFA:
        logits, means, factors, noise = (function(t) for t in self._parameters())
        observed = None if self.observed is None else function(self.observed)
        return MFA(logits, means, factors, noise, observed, check=False)

    def _zero_where_observed(self, values: Tensor, extra: int = 0) -> Tensor:
        """Zero at pixels that are exact, with zero gradient; `extra` counts the dimensions between K and C."""
        if self.observed is None:
            return values
        observed = self.observed
        for _ in range(1 + extra):
            observed = observed.unsqueeze(-4)
        return values.masked_fill(observed, 0)

    def _check_pixels(self, x: Tensor, chosen: Tensor | None, name: str) -> Tensor:
        """Check images against this MFA, and the choice of their pixels; the choice as bool."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x must be a floating-point image, got {describe(x)}")
        if x.shape != self.shape or x.dtype != self.dtype or x.device != self.device:
            raise ValueError(
                f"x must have the shape {tuple(self.shape)}, dtype {self.dtype} and device {self.device} of the MFA, "
                f"got {describe(x)}"
            )
        chosen = torch.ones_like(x, dtype=torch.bool) if chosen is None else check_observed(name, chosen, x)
        check_seen_finite("x", x, chosen)
        return chosen

    def _fused(self, x: Tensor, *, gradients: bool = True) -> bool:
        """Whether Triton's kernels serve: on a GPU, for ordinary tensors or in a graph; some have no gradients."""
        if self.device.type != "cuda" or is_plain() or torch.compiler.is_exporting() or len(self) == 0:
            return False
        tensors, served = (*self._parameters(), x), HAS_TRITON and self.factors.shape[-4] <= _MAX_RANK
        if not gradients and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return False
        if torch.compiler.is_compiling():
            return gradients and served and not _transformed()
        if not served:
            fall_back(f"log_prob needs Triton, and at most {_MAX_RANK} factors")
        return served and by_itself(*tensors)

    def _score(self, x: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log density of x in `where` under every component (B, K), R⁻¹ (B, K, L, L) and E[Y | x] (B, K, L).

        C = I + VVᵀ, with V the factors over √d, is formed in float64: for nearly collinear factors and little noise
        its smallest pivots are differences of large numbers.
        """
        scored = where if self.observed is None else where & ~self.observed
        pixels = scored.expand(self.shape).unsqueeze(-4)  # (B, 1, C, H, W)
        compute, wide = torch.promote_types(self.dtype, torch.float32), _wide(self.dtype, self.device)
        # Fill before arithmetic: what is not scored may be NaN, and NaN · 0 is NaN in values and gradients.
        deviation = torch.where(pixels, x.unsqueeze(-4) - self.means, 0).to(compute).flatten(-3)  # (B, K, n)
        noise = torch.where(pixels, self.noise, 1).to(compute).clamp_min(_NOISE_FLOOR).flatten(-3)  # (B, K, n)
        factors = torch.where(pixels.unsqueeze(-4), self.factors, 0).to(compute).flatten(-3)  # (B, K, L, n)

        with _full_precision(self.device):
            scale = noise.rsqrt()
            whitened = deviation * scale  # (B, K, n), w
            loadings = factors * scale.unsqueeze(-2)  # (B, K, L, n), V
            exact = loadings.to(wide)
            identity = torch.eye(factors.shape[-2], dtype=wide, device=self.device)
            root = cholesky(identity + exact @ exact.mT)  # (B, K, L, L), R
            root_inverse = triangular_inverse(root)
            latent = root_inverse @ (exact @ whitened.to(wide).unsqueeze(-1))
            latent = (root_inverse.mT @ latent).squeeze(-1)  # (B, K, L), ŷ = C⁻¹ V w
            # |w|² − (Vw)ᵀC⁻¹(Vw) as a sum of squares, which cannot cancel: |w − Vᵀŷ|² + |ŷ|².
            unexplained = whitened - (latent.to(compute).unsqueeze(-2) @ loadings).squeeze(-2)
        distance = unexplained.square().sum(-1, dtype=wide) + latent.square().sum(-1)
        log_det = noise.log().sum(-1, dtype=wide) + 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        count = pixels.flatten(-3).sum(-1).to(wide)  # (B, 1)
        return -0.5 * (distance + log_det + count * math.log(2 * math.pi)), root_inverse, latent


def _log_prob(*tensors: Any) -> Tensor:
    logits, means, factors, noise, x, where, observed = tensors
    where = torch.ones_like(x, dtype=torch.bool) if where is None else where
    p = MFA(logits, means, factors, noise, observed, check=False)
    likelihood, _, _ = p._score(x, where)
    return (p.logits.log_softmax(-1) + likelihood).logsumexp(-1).to(p.dtype)


def _inside_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


_transformed: Callable[[], bool] = torch.compiler.assume_constant_result(_inside_transform)  # known while tracing


def _wide(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type for sums over pixels and L×L algebra: float64 wherever the device has it."""
    return torch.promote_types(dtype, torch.float32) if device.type == "mps" else torch.float64


def _full_precision(device: torch.device) -> torch.autocast:
    """Matrix products as they are written, also inside somebody's autocast."""
    return torch.autocast(device.type, enabled=False)


def _over_pixels(weights: Tensor) -> Tensor:
    return weights[..., None, None, None]


def _safe_sqrt(values: Tensor) -> Tensor:
    """√v with gradient 0, not infinity, at v = 0."""
    positive = values > 0
    return torch.where(positive, values, 1).sqrt() * positive


def _flatten(p: MFA) -> tuple[list[Any], None]:
    return [getattr(p, field.name) for field in fields(p)], None


def _flatten_with_keys(p: MFA) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
    return [(pytree.GetAttrKey(field.name), getattr(p, field.name)) for field in fields(p)], None


def _unflatten(leaves: Iterable[Any], _: None) -> MFA:
    logits, means, factors, noise, observed = leaves
    return MFA(logits, means, factors, noise, observed, check=False)


pytree.register_pytree_node(
    MFA, _flatten, _unflatten, serialized_type_name="misconv.MFA", flatten_with_keys_fn=_flatten_with_keys
)

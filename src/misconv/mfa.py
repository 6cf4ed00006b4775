"""What the pixels of an image may be: a mixture of factor analyzers (MFA) per image.

Component k of an image with n = C·H·W pixels is the Gaussian ``Z = μ + √d ⊙ X + Σ_j Y_j a_j`` with X and Y standard
normal: mean μ, covariance ``diag(d) + A Aᵀ`` with L ≪ n columns a_j. By Woodbury's identity everything here costs
O(n·L²) time and O(n·L) memory; no n×n matrix ever exists. `docs/maths.md` has the derivations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from misconv._backend import HAS_TRITON, LARGEST_RANK, is_eager, is_plain, warn_plain_path
from misconv._checks import (
    as_rows,
    check_images,
    check_mfa,
    check_observed,
    check_seen_finite,
    check_size,
    describe,
    generator_device,
    readable,
)
from misconv._math import NOISE_FLOOR, full_precision, log_prob, marginal_log_prob, score, wide_type
from misconv._torch import assume_constant, in_transform, pytree

__all__ = ["MFA"]

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_NUMBERS = 2**36  # drawn at once: 256 GiB in float32


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
        if check is not None and not isinstance(check, bool):
            raise TypeError(f"check must be True, False or None, got {describe(check)}")
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
        if self.means.shape[-4] == 1:  # all weight is on one component; a copy, as it is of several
            return self.means.select(-4, 0).clone()
        mixed = (_over_pixels(self.weights) * self.means).sum(-4)
        return mixed if self.observed is None else torch.where(self.observed, self.means.select(-4, 0), mixed)

    @property
    def variance(self) -> Tensor:
        """(B, C, H, W), the variance of every pixel, within components plus between them; never negative."""
        # In float64, so that the square of a far component with little weight cannot overflow.
        means, factors, noise = (values.to(wide_type(self.means)) for values in self.pinned())
        weights = _over_pixels(self.logits.to(means.dtype).softmax(-1))
        between = self._zero_where_observed(means - (weights * means).sum(-4, keepdim=True))
        within = noise + factors.square().sum(-4)  # (B, K, C, H, W)
        return (weights * (within + between.square())).sum(-4).to(self.dtype)

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
        tensors = self._scored(x, where)
        if self._fused(x):
            from misconv._triton import log_prob as fused_log_prob

            return fused_log_prob(*tensors, floor=NOISE_FLOOR, plain=log_prob)
        return log_prob(*tensors)

    def marginal_log_prob(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """The sum of the log densities of the pixels in `where`, each by itself, ``Σ_i log Σ_k π_k N(x_i; μ_i, σ²_i)``.

        Like `log_prob` it is a proper score: it is largest for the true density. It sees what each pixel claims, and
        nothing of how pixels go together. Arguments and result are those of `log_prob`.
        """
        tensors = self._scored(x, where)
        if self._fused(x):
            return self._fused_log_probs(tensors)[1]
        return marginal_log_prob(*tensors)

    def log_probs(self, x: Tensor, where: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`log_prob` and `marginal_log_prob`, (B,) each, in one pass where a GPU's kernels serve.

        A density is trained by both.

        Example:
            >>> means, noise = torch.zeros(1, 1, 1, 1, 2), torch.ones(1, 1, 1, 1, 2)
            >>> p = MFA(torch.zeros(1, 1), means, torch.ones(1, 1, 1, 1, 1, 2), noise)
            >>> joint, marginal = p.log_probs(torch.ones(1, 1, 1, 2))  # pixels go together, and x has them alike
            >>> bool(joint > marginal)
            True
        """
        tensors = self._scored(x, where)
        if self._fused(x):
            return self._fused_log_probs(tensors)
        return log_prob(*tensors), marginal_log_prob(*tensors)

    def _fused_log_probs(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        from misconv._triton import log_probs as fused_log_probs

        return fused_log_probs(*tensors, floor=NOISE_FLOOR, plain=(log_prob, marginal_log_prob))

    def _scored(self, x: Tensor, where: Tensor | None) -> tuple[Any, ...]:
        """What a log density is computed from, checked."""
        if where is not None:
            where = self._check_pixels(x, where, "where")
        else:
            self._check_images(x)
            if readable(x):
                check_seen_finite("x", x, torch.ones_like(x, dtype=torch.bool))
        return (*self._parameters(), x, where, self.observed)

    def condition(self, x: Tensor, observed: Tensor) -> MFA:
        """The MFA given the observed pixels, which become exact; the weights are updated by Bayes' rule.

        With C = I + A_oᵀ D_o⁻¹ A_o = R Rᵀ and ŷ = C⁻¹ A_oᵀ D_o⁻¹ (x_o − μ_o): means μ + Aŷ, factors A R⁻ᵀ, noise d.

        Args:
            x: (B, C, H, W); values outside `observed` are never read.
            observed: bool (B, 1, H, W) or (B, C, H, W). (None is refused: it does not say whether all or nothing was
                seen.)

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
            from misconv._triton import condition as fused_condition

            tensors = (*self._parameters(), x, observed, self.observed)
            logits, means, factors = fused_condition(*tensors, floor=NOISE_FLOOR)
            return MFA(logits, means, factors, self.noise, known, check=False)
        fresh = observed if self.observed is None else observed & ~self.observed
        likelihood, root_inverse, latent = score(self.means, self.factors, self.noise, x, fresh)
        # Factors of pixels that were exact before may hold anything; a zero times that must not reach a gradient.
        compute = torch.promote_types(self.dtype, torch.float32)
        free = self._zero_where_observed(self.factors, 1).to(compute).flatten(-3)  # (B, K, L, n)
        with full_precision(self.device):
            moved = (latent.to(compute).unsqueeze(-2) @ free).reshape(self.means.shape)
            factors = (root_inverse.to(compute) @ free).reshape(self.factors.shape)
        return MFA(
            logits=(self.logits.to(likelihood.dtype) + likelihood).log_softmax(-1).to(self.dtype),
            means=torch.where(fresh.unsqueeze(-4), x.unsqueeze(-4), (self.means + moved).to(self.dtype)),
            factors=factors.to(self.dtype),
            noise=self.noise,
            observed=known,
            check=False,
        )

    def fix(self, x: Tensor, observed: Tensor) -> MFA:
        """Pin the observed pixels of an MFA that is conditional already; nothing else is updated.

        Arguments are those of `condition`. This is the last line of a density network: its parameters describe the
        missing pixels given the others.

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

        Differentiable in means, factors and noise; the choice of the component is not. Numbers are drawn where the
        generator lives, so one CPU generator gives the same samples on every device.

        Example:
            >>> p = MFA.point(torch.rand(2, 3, 8, 8))
            >>> bool((p.sample(5) == p.mean).all())
            True
        """
        check_size("count", count)
        count = int(count)
        if count * self.means.numel() > _MOST_NUMBERS:
            raise ValueError(f"count must be at most {_MOST_NUMBERS // self.means.numel()} for this MFA, got {count}")
        device = generator_device(generator, self.device)
        kind = torch.promote_types(self.dtype, torch.float32)  # half precision has no generators

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=kind, device=device).to(self.device, self.dtype)

        weights = self.weights.to(device, kind)
        chosen = torch.multinomial(weights, count, replacement=True, generator=generator).T.to(self.device)  # (S, B)
        one_hot = torch.nn.functional.one_hot(chosen, self.logits.shape[-1]).to(self.dtype)  # (S, B, K)
        latent = randn(count, *self.factors.shape[:3]) * one_hot.unsqueeze(-1)  # (S, B, K, L)
        means, factors, noise = self.pinned()
        with full_precision(self.device):
            drawn = torch.einsum("sbk,bkchw->sbchw", one_hot, means)
            drawn = drawn + torch.einsum("sbkl,bklchw->sbchw", latent, factors)
            deviation = torch.einsum("sbk,bkchw->sbchw", one_hot, _safe_sqrt(noise))
        drawn = drawn + deviation * randn(count, *self.shape)
        return drawn if self.observed is None else torch.where(self.observed, self.means[:, 0], drawn)

    # Batches and devices -----------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> MFA:
        """Move or cast all parameters, with the arguments of `torch.Tensor.to`; `observed` stays bool."""
        try:
            if any(isinstance(value, (float, complex)) for value in args):  # torch takes their type
                raise TypeError
            logits, means, factors, noise = (t.to(*args, **kwargs) for t in self._parameters())
        except (AssertionError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            given = ", ".join(describe(value) for value in (*args, *kwargs.values()))
            raise ValueError(f"to must be given a device or a floating-point dtype that exists, got {given}") from error
        if means.dtype not in _TYPES:
            raise ValueError(f"to must be given float16, bfloat16, float32 or float64, got {means.dtype}")
        observed = None if self.observed is None else self.observed.to(means.device)
        return MFA(logits, means, factors, noise, observed, check=False)

    def detach(self) -> MFA:
        """The same MFA without gradients."""
        return self._map(Tensor.detach)

    def __len__(self) -> int:
        return len(self.means)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> MFA:
        """Some of the images, as an MFA: an integer, a slice, or a list or tensor of integers or of B bools.

        The batch dimension stays, also for a single integer of any kind.
        """
        rows = as_rows(index, len(self), self.device)
        return self._map(lambda t: t[rows])

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
        self._check_images(x)
        if chosen is None:
            raise TypeError(
                f"{name} must be a bool tensor, True where the pixel was seen, got None; for complete images it is "
                "torch.ones_like(x, dtype=torch.bool)"
            )
        chosen = check_observed(name, chosen, x)
        check_seen_finite("x", x, chosen)
        return chosen

    def _check_images(self, x: Tensor) -> None:
        """Images that fit this MFA."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x must be a floating-point image, got {describe(x)}")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError("x must be a dense tensor, got a sparse or nested one")
        means = self.means
        if x.shape != self.shape or x.dtype != means.dtype or x.device != means.device:
            raise ValueError(
                f"x must have the shape {tuple(self.shape)}, dtype {self.dtype} and device {self.device} of the MFA, "
                f"got {describe(x)}"
            )

    def _fused(self, x: Tensor, *, gradients: bool = True) -> bool:
        """Whether Triton's kernels serve: on a GPU, for ordinary tensors or in a graph; some have no gradients."""
        if self.device.type != "cuda" or is_plain() or torch.compiler.is_exporting() or len(self) == 0:
            return False
        tensors, served = (*self._parameters(), x), HAS_TRITON and self.factors.shape[-4] <= LARGEST_RANK
        if not gradients and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return False
        if torch.compiler.is_compiling():
            return gradients and served and not _transformed()
        if not served:
            warn_plain_path(f"log_prob needs Triton, and at most {LARGEST_RANK} factors")
        return served and is_eager(*tensors)


_transformed: Callable[[], bool] = assume_constant(in_transform)  # known while tracing


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

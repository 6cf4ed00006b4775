"""What the library computes, in float64, with full matrices and panels of Gauss–Legendre: slow, dense, obvious."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from misconv import MFA
from tests.fuzz.activations import Known

_NODES, _WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(16))  # on the CPU, whatever is usual


@dataclass
class Convolution:
    """A convolution in float64, with whatever `torch.nn.Conv2d` takes."""

    weight: Tensor
    bias: Tensor | None
    stride: int | tuple[int, int]
    padding: int | str | tuple[int, int]
    dilation: int | tuple[int, int]
    groups: int
    mode: str

    def __call__(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """The convolution of images, with other weights if they are given, and without its own bias."""
        weight = self.weight if weight is None else weight
        if self.mode == "zeros":
            return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return F.conv2d(F.pad(x, self._margins(), self.mode), weight, bias, self.stride, 0, self.dilation, self.groups)

    def _margins(self) -> list[int]:
        """(left, right, top, bottom), as `F.pad` takes them."""
        margins: list[int] = []
        for side in (1, 0):
            dilation = self.dilation if isinstance(self.dilation, int) else self.dilation[side]
            reach = dilation * (self.weight.shape[2 + side] - 1)
            if self.padding == "same":
                margins += [reach // 2, reach - reach // 2]
            else:
                amount = 0 if self.padding == "valid" else self.padding
                amount = amount if isinstance(amount, int) else amount[side]
                margins += [amount, amount]
        return margins

    def matrix(self, image: tuple[int, ...], weight: Tensor | None = None) -> tuple[Tensor, tuple[int, ...]]:
        """(n, outputs): what it does to every unit image; differentiable in the weights."""
        size = math.prod(image)
        columns = self(torch.eye(size, dtype=torch.float64).view(size, *image), weight)
        return columns.flatten(1), tuple(columns.shape[1:])


@dataclass
class Moments:
    """Mean and standard deviation of responses (B, K, O, H', W'), and how much rounding may change each.

    The errors are for arithmetic with relative precision 1; they are sums of magnitudes, as rounding sees them.
    """

    mean: Tensor
    variance: Tensor
    mean_error: Tensor
    spread_error: Tensor

    @property
    def spread(self) -> Tensor:
        positive = self.variance > 0
        return torch.where(positive, self.variance, 1).sqrt() * positive


def parameters(p: MFA) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (B, K), means (B, K, n), factors (B, K, L, n) and noise (B, K, n) in float64 on the CPU, zero where exact."""
    logits, means, factors, noise = (t.detach().double().cpu() for t in (p.logits, p.means, p.factors, p.noise))
    if p.observed is not None:
        known = p.observed.cpu().expand(p.shape)
        noise = noise.masked_fill(known[:, None], 0)
        factors = factors.masked_fill(known[:, None, None], 0)
    return logits, means.flatten(2), factors.flatten(3), noise.flatten(2)


def moments(parts: tuple[Tensor, ...], convolution: Convolution, image: tuple[int, ...], precision: float) -> Moments:
    """Mean and variance of every response: ``Mᵀμ + b`` and the diagonal of ``Mᵀ (diag(d) + A Aᵀ) M``.

    `precision` is what the errors will be multiplied with; one of them is no linear function of it.
    """
    _, means, factors, noise = parts
    matrix, out = convolution.matrix(image)
    bias = torch.zeros(out[0], dtype=torch.float64) if convolution.bias is None else convolution.bias
    bias = bias.repeat_interleave(math.prod(out[1:]))
    variance = noise @ matrix.square() + (factors @ matrix).square().sum(2)
    with torch.no_grad():
        magnitude = convolution.matrix(image, convolution.weight.abs())[0]
        # All components are computed by their difference from the first.
        mean_error = (means.abs() + means[:, :1].abs()) @ magnitude + bias.abs()
        spread_error = (factors.abs() @ magnitude).square().sum(2).sqrt() + variance.sqrt()
        # A pixel that padding repeats may meet weights that cancel.
        cancelled = noise @ (magnitude.square() - matrix.square()).clamp_min(0)
        spread_error += torch.minimum((cancelled / precision).sqrt(), cancelled / variance.sqrt().clamp_min(1e-300))
    values = (means @ matrix + bias, variance, mean_error, spread_error)
    return Moments(*(t.unflatten(-1, out) for t in values))


def integrate(known: Known, mean: Tensor, spread: Tensor, channel: Tensor) -> tuple[Tensor, Tensor]:
    """E[f(Z)] and E|f(Z)| for flat means and spreads (N,) of these channels (N,); f(mean) where the spread is 0."""

    def plain(x: Tensor) -> Tensor:
        if known.slopes is None:
            result: Tensor = known.plain(x)
            return result
        slope = known.slopes[channel].view(-1, *[1] * (x.dim() - 1))
        return torch.where(x > 0, x, slope * x)

    with torch.no_grad():
        safe = torch.where(spread > 0, spread, 1)[:, None]
        steps = torch.linspace(-12, 12, 49, dtype=torch.float64).expand(len(mean), -1)
        bend = torch.linspace(-16, 16, 65, dtype=torch.float64) * known.width
        bend = torch.cat([bend, torch.tensor(known.kinks, dtype=torch.float64)])
        own = ((bend - mean[:, None]) / safe).clamp(-12, 12)
        edges = torch.cat([steps, own], 1).sort(1).values
        half, middle = edges.diff(dim=1)[..., None] / 2, (edges[:, 1:] + edges[:, :-1])[..., None] / 2
        z = (middle + half * _NODES).flatten(1)  # (N, panels · nodes)
        weight = (half * _WEIGHTS).flatten(1) * torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    values = plain(mean[:, None] + spread[:, None] * z)
    certain = spread == 0
    expected = torch.where(certain, plain(mean.unsqueeze(1)).squeeze(1), (weight * values).sum(1))
    size = torch.where(certain, expected.abs(), (weight * values.abs()).sum(1))
    return expected, size.detach()


@dataclass
class Gaussian:
    """Log densities (B, K) of some pixels, the posterior, and how far rounding may move them (relative precision 1)."""

    log_density: Tensor
    log_density_error: Tensor
    means: Tensor  # (B, K, n), given those pixels
    means_error: Tensor
    variances: Tensor  # (B, K, n)
    variances_error: Tensor


def condition(p: MFA, x: Tensor, where: Tensor, eps: float) -> Gaussian:
    """The textbook formulas with full covariance matrices, image by image and component by component; `eps` of the type."""
    _, means, factors, noise = parameters(p)
    chosen = where.cpu().expand(p.shape).flatten(1)
    if p.observed is not None:
        chosen = chosen & ~p.observed.cpu().expand(p.shape).flatten(1)
    image = x.detach().double().cpu().flatten(1)
    batch, components = means.shape[:2]
    results = []
    for b in range(batch):
        seen = chosen[b]
        for k in range(components):
            results.append(_condition_one(means[b, k], factors[b, k], noise[b, k], image[b], seen, eps))
    stacked = [torch.stack(part) for part in zip(*results, strict=True)]
    return Gaussian(*(part.view(batch, components, *part.shape[1:]) for part in stacked))


def _condition_one(
    mean: Tensor, factors: Tensor, noise: Tensor, x: Tensor, seen: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """One Gaussian: log density and error, posterior means and errors, posterior variances and errors."""
    covariance = torch.diag(noise) + factors.T @ factors
    count = int(seen.sum())
    if count == 0:
        zero = torch.zeros((), dtype=torch.float64)
        variances = covariance.diagonal()
        return zero, zero + 1, mean, mean.abs(), variances, variances
    deviation = x[seen] - mean[seen]
    root = torch.linalg.cholesky(covariance[seen][:, seen])
    whole = torch.cholesky_solve(torch.cat([deviation[:, None], covariance[seen]], 1), root)
    explained, gain = whole[:, 0], whole[:, 1:]  # Σ⁻¹(x − μ) and Σ⁻¹Σ_{seen, all}
    log_det = 2 * root.diagonal().log().sum()
    density = -0.5 * (deviation @ explained + log_det + count * math.log(2 * math.pi))
    new_mean = mean + gain.T @ deviation
    new_variance = (covariance.diagonal() - (gain * covariance[seen]).sum(0)).clamp_min(0)
    new_mean = torch.where(seen, x, new_mean)
    new_variance = new_variance.masked_fill(seen, 0)
    errors = _rounding(mean, factors, noise, x, seen, covariance, root, eps)
    return density, errors[0], new_mean, errors[1], new_variance, errors[2]


def _rounding(
    mean: Tensor,
    factors: Tensor,
    noise: Tensor,
    x: Tensor,
    seen: Tensor,
    covariance: Tensor,
    root: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """First-order bounds of what rounding V = A/√d and w = (x − μ)/√d by one part does to the results.

    q = min_y |w − Vᵀy|² + |y|² is stationary in y, so its error is 2|u|·(|δw| + |δV||y|) with u the residual.
    """
    scale = noise[seen].rsqrt()
    loadings = factors[:, seen] * scale  # (L, n), V
    whitened = (x[seen] - mean[seen]) * scale
    system = torch.eye(len(factors), dtype=torch.float64) + loadings @ loadings.T
    inverse = torch.linalg.inv(system)
    latent = inverse @ (loadings @ whitened)
    residual = whitened - loadings.T @ latent
    inputs = (x[seen].abs() + mean[seen].abs()) * scale  # the magnitude behind each w
    moved = inputs + loadings.abs().T @ latent.abs()
    right = loadings.abs() @ moved  # what rounding does to the right-hand side of C y = V w
    square = loadings.abs() @ loadings.abs().T
    log_det = 2 * ((inverse @ loadings).abs() * loadings.abs()).sum()
    log_det = log_det + (inverse.abs() * square).sum() * 2**-52 / eps  # C itself is formed in float64
    logs = noise[seen].log().abs().sum() + len(scale)
    density = (residual.abs() * moved).sum() + log_det + logs + right @ inverse.abs() @ right * 40 * eps
    # The oracle itself solves with the full covariance matrix, in float64.
    eigenvalue = torch.linalg.cond(root) ** 2 * 2**-52 / eps
    density = density + eigenvalue * (residual.square().sum() + latent.square().sum() + len(scale))
    latent_error = inverse.abs() @ right
    spread = covariance.diagonal().sqrt()
    means = mean.abs() + factors.abs().T @ (latent.abs() + latent_error) + x.abs().nan_to_num(0, 0, 0) * seen
    means = means + eigenvalue * spread * (1 + residual.norm() + latent.norm())
    turned = inverse @ factors  # C⁻¹A, (L, n)
    variances = covariance.diagonal() * (1 + eigenvalue) + (turned.abs() * (square @ turned.abs())).sum(0)
    return density, means, variances

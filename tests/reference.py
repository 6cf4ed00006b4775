"""Dense, slow, obvious: what the library computes, written out without any of its tricks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from misconv import MFA

TOLERANCE = {
    # type: moments and probabilities, closed-form expectations, quadrature
    torch.float64: {"exact": 1e-10, "closed": 1e-8, "quadrature": 1e-5},
    torch.float32: {"exact": 1e-4, "closed": 1e-4, "quadrature": 1e-4},
}


def tolerance(kind: str, dtype: torch.dtype | None = None) -> float:
    return TOLERANCE[dtype or torch.get_default_dtype()][kind]


def random_mfa(
    batch: int,
    components: int,
    rank: int,
    image: tuple[int, int, int],
    observed: Tensor | None = None,
    seed: int = 0,
    scale: float = 1.0,
) -> MFA:
    """An MFA with parameters of ordinary size; where `observed`, factors and noise are left as garbage on purpose."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    means = randn(batch, components, *image)
    if observed is not None:
        means = torch.where(observed.unsqueeze(1), means[:, :1], means)
    noise = scale * (0.1 + randn(batch, components, *image).square())
    factors = scale * randn(batch, components, rank, *image)
    return MFA(randn(batch, components), means, factors, noise, observed)


def covariance(p: MFA) -> tuple[Tensor, Tensor]:
    """Means (B, K, n) and full covariances (B, K, n, n), observed pixels certain."""
    means, noise = p.means.flatten(2), p.noise.flatten(2)
    factors = p.factors.flatten(3)
    if p.observed is not None:
        known = p.observed.expand(p.shape).flatten(1).unsqueeze(1)
        noise = noise.masked_fill(known, 0)
        factors = factors.masked_fill(known.unsqueeze(2), 0)
    return means, torch.diag_embed(noise) + factors.mT @ factors


def as_matrix(conv: nn.Conv2d, image: tuple[int, int, int]) -> tuple[Tensor, tuple[int, ...]]:
    """The convolution without its bias as a matrix (n, outputs): what it does to every unit image."""
    size = math.prod(image)
    with torch.no_grad():
        columns = conv._conv_forward(torch.eye(size).view(size, *image), conv.weight, None)
    return columns.flatten(1), tuple(columns.shape[1:])


def dense_moments(p: MFA, conv: nn.Conv2d) -> tuple[Tensor, Tensor]:
    """Mean and variance of every response from the full covariance matrix, (B, K, O, H', W')."""
    matrix, out = as_matrix(conv, (p.shape[1], p.shape[2], p.shape[3]))
    means, covariances = covariance(p)
    mean = (means @ matrix).unflatten(-1, out)
    if conv.bias is not None:
        mean = mean + conv.bias.detach().view(-1, 1, 1)
    variance = torch.einsum("no,bknm,mo->bko", matrix, covariances, matrix).unflatten(-1, out)
    return mean, variance


def integrate(
    function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, kinks: Sequence[float] = ()
) -> Tensor:
    """E[f(N(mean, variance))] by Gauss–Legendre in float64, 24 nodes on each of many panels that end at the kinks."""
    import numpy as np

    m, s = mean.detach().double().flatten(), variance.detach().double().flatten().sqrt()
    nodes, weights = (torch.as_tensor(a, device=m.device) for a in np.polynomial.legendre.leggauss(24))
    edges = torch.linspace(-12, 12, 97, dtype=torch.float64, device=m.device).expand(len(m), -1)
    own = (torch.tensor([*kinks, 0.0], dtype=torch.float64, device=m.device) - m[:, None]) / s[:, None]
    # Panels a unit wide around zero too, where the activations bend, however wide the Gaussian is.
    bend = (torch.linspace(-16, 16, 65, dtype=torch.float64, device=m.device) - m[:, None]) / s[:, None]
    edges = torch.cat([edges, own.clamp(-12, 12), bend.clamp(-12, 12)], 1).sort(1).values  # (N, panels + 1)
    half, middle = edges.diff(dim=1)[..., None] / 2, (edges[:, 1:] + edges[:, :-1])[..., None] / 2
    z = middle + half * nodes  # (N, panels, nodes)
    density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    values = function(m[:, None, None] + s[:, None, None] * z)
    result = (half * weights * density * values).sum((1, 2))
    certain = function(m)
    return torch.where(s > 0, result, certain).view(mean.shape)


def dense_log_prob(p: MFA, x: Tensor, where: Tensor) -> Tensor:
    """Log density of some pixels from the full covariance matrix, image by image and component by component."""
    means, covariances = covariance(p)
    chosen = where.expand(p.shape).flatten(1)
    if p.observed is not None:
        chosen = chosen & ~p.observed.expand(p.shape).flatten(1)
    result = []
    for b in range(len(p)):
        pixels = chosen[b].nonzero().squeeze(1)
        values = []
        for k in range(p.logits.shape[1]):
            if len(pixels) == 0:
                values.append(torch.zeros(()))
                continue
            sigma = covariances[b, k][pixels][:, pixels]
            normal = torch.distributions.MultivariateNormal(means[b, k, pixels], sigma)
            values.append(normal.log_prob(x[b].flatten()[pixels]))
        result.append((p.logits[b].log_softmax(0) + torch.stack(values)).logsumexp(0))
    return torch.stack(result)


def dense_condition(p: MFA, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (B, K), means (B, K, n) and covariances (B, K, n, n) given some pixels, by the textbook formulas."""
    means, covariances = covariance(p)
    new_means, new_covariances = means.clone(), torch.zeros_like(covariances)
    logits = p.logits.log_softmax(1).clone()
    chosen = observed.expand(p.shape).flatten(1)
    for b in range(len(p)):
        o, m = chosen[b].nonzero().squeeze(1), (~chosen[b]).nonzero().squeeze(1)
        value = x[b].flatten()[o]
        for k in range(p.logits.shape[1]):
            sigma = covariances[b, k]
            solve = torch.linalg.solve(sigma[o][:, o], sigma[o][:, m]) if len(o) else sigma[o][:, m]
            new_means[b, k, m] = means[b, k, m] + solve.T @ (value - means[b, k, o])
            new_means[b, k, o] = value
            new_covariances[b, k][m[:, None], m] = sigma[m][:, m] - solve.T @ sigma[o][:, m]
            if len(o):
                logits[b, k] += torch.distributions.MultivariateNormal(means[b, k, o], sigma[o][:, o]).log_prob(value)
    return logits.softmax(1), new_means, new_covariances


def same(actual: Tensor, expected: Tensor) -> bool:
    """The same bits on a CPU; on a GPU, which may choose another algorithm every time, the same numbers.

    In half precision up to its rounding: autocast rounds what a convolution of torch reads, a fused kernel less so.
    """
    if expected.device.type == "cpu" or not expected.is_floating_point():
        return torch.equal(actual, expected)
    actual, expected = actual.detach(), expected.detach()
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}.get(expected.dtype, torch.finfo(expected.dtype).eps)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())

"""Expectation–maximization for one mixture of factor analyzers on incomplete images.

The complete data of this EM are the *observed* pixels and the latent Y of every image, so missing pixels never enter.
Everything that runs over images is a matrix product: with O the N×n matrix of `observed` and Y = O ⊙ x,

- E-step: all C_ik = I + A_oᵀD_o⁻¹A_o are O times the n × K·L(L+1)/2 products of factor columns over d;
- M-step: the regression of every pixel on [Y, 1], over the images that saw it, needs Oᵀ times the N × K·L(L+1)/2
  products of expected latent variables. `docs/maths.md` has the derivation.

Values are differences from the mean of each pixel, in units of the standard deviation of their channel (`_em_data`), so
that the constants below mean the same for data in any units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from misconv._math import cholesky, triangular_inverse

__all__ = ["Parameters", "Prior", "Statistics", "collect", "log_prior", "maximize", "start"]


@dataclass
class Parameters:
    """One mixture for all images, in float64: logits (K), means (K, n), factors (K, L, n), noise (K, n)."""

    logits: Tensor
    means: Tensor
    factors: Tensor
    noise: Tensor

    def to(self, device: torch.device) -> Parameters:
        """The same on another device."""
        return Parameters(*(getattr(self, f.name).to(device) for f in fields(self)))


@dataclass
class Statistics:
    """Sums over images of what the M-step needs; sums of two sets of images add up.

    With r the responsibilities, o observed and y the latent variables, over all images:
    """

    images: Tensor  # (), how many
    likelihood: Tensor  # (), Σ log p(x_o)
    weight: Tensor  # (K), Σ r
    seen: Tensor  # (n, K), Σ r o
    first: Tensor  # (n, K, L), Σ r o E[y]
    second: Tensor  # (n, K, L(L+1)/2), Σ r o E[y yᵀ], lower triangle
    value: Tensor  # (n, K), Σ r o x
    value_first: Tensor  # (n, K, L), Σ r o x E[y]
    square: Tensor  # (n, K), Σ r o x²

    def blend(self, other: Statistics, share: float) -> Statistics:
        """(1 − share)·self + share·other, entry by entry."""
        return Statistics(*(torch.lerp(getattr(self, f.name), getattr(other, f.name), share) for f in fields(self)))

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass
class Prior:
    """What is believed of every pixel before any image is seen, as if some images had been seen already.

    In them the pixel varies by `variance`, and nothing explains that: they count as noise, and hold means and factors
    at zero. So a component that few images belong to stays modest. Conjugate, so that the M-step stays one regression.
    """

    share: float  # how many such images there are, as a share of those that EM is fitted to
    variance: Tensor  # (n)


def log_prior(p: Parameters, prior: Prior) -> Tensor:
    """Its logarithm for an image, but for a constant: what EM adds to the mean log-likelihood."""
    size = p.factors.square().sum(1) + p.means.square()  # (K, n)
    return -0.5 * prior.share * (p.noise.log() + (prior.variance + size) / p.noise).sum()


def collect(p: Parameters, x: Tensor, observed: Tensor) -> Statistics:
    """The E-step over images x (N, n), zero where not observed, and observed (N, n), both float64."""
    images, (components, rank, _) = len(x), p.factors.shape
    lower = torch.tril_indices(rank, rank, device=x.device)
    precision = 1 / p.noise  # (K, n)
    scaled = p.factors * precision.unsqueeze(1)  # (K, L, n)

    # All that depends on O alone in one product, all that depends on O ⊙ x in another.
    products = p.factors[:, lower[0]] * scaled[:, lower[1]]  # (K, T, n)
    offset = scaled * p.means.unsqueeze(1)  # (K, L, n)
    constant = p.means.square() * precision + p.noise.log()  # (K, n)
    from_observed = observed @ _columns(products, offset, constant.unsqueeze(1))
    gram, shift, constants = _split(from_observed, components, products.shape[1], rank, 1)
    from_values = x @ _columns(scaled, (p.means * precision).unsqueeze(1))
    projected, cross = _split(from_values, components, rank, 1)
    squares = x.square()
    distance = squares @ precision.T - 2 * cross.squeeze(2) + constants.squeeze(2)  # (N, K), with Σ log d in it

    capacity = torch.eye(rank, dtype=x.dtype, device=x.device).repeat(images, components, 1, 1)
    capacity[..., lower[0], lower[1]] += gram
    capacity = torch.where(capacity.new_ones(rank, rank).tril() > 0, capacity, capacity.mT)  # (N, K, L, L), C
    root = cholesky(capacity)
    inverse = triangular_inverse(root)
    evidence = projected - shift  # (N, K, L), A_oᵀD_o⁻¹(x − μ)
    half = (inverse @ evidence.unsqueeze(-1)).squeeze(-1)
    latent = (inverse.mT @ half.unsqueeze(-1)).squeeze(-1)  # (N, K, L), E[y]
    log_det = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    count = observed.sum(1, keepdim=True) * math.log(2 * math.pi)
    joint = p.logits.log_softmax(0) - 0.5 * (distance + log_det + count - half.square().sum(-1))
    likelihood = joint.logsumexp(1)
    r = (joint - likelihood.unsqueeze(1)).exp()  # (N, K)

    covariance = inverse.mT @ inverse  # (N, K, L, L), C⁻¹
    moments = covariance[..., lower[0], lower[1]] + latent[..., lower[0]] * latent[..., lower[1]]
    weighted, weighted_moments = r.unsqueeze(2) * latent, r.unsqueeze(2) * moments
    sums = observed.T @ torch.cat([r.unsqueeze(2), weighted, weighted_moments], 2).flatten(1)
    seen, first, second = _split(sums, components, 1, rank, moments.shape[2], joined=True)
    value_sums = x.T @ torch.cat([r.unsqueeze(2), weighted], 2).flatten(1)
    value, value_first = _split(value_sums, components, 1, rank, joined=True)
    return Statistics(
        images=x.new_tensor(float(images)),
        likelihood=likelihood.sum(),
        weight=r.sum(0),
        seen=seen.squeeze(2),
        first=first,
        second=second,
        value=value.squeeze(2),
        value_first=value_first,
        square=squares.T @ r,
    )


def _columns(*blocks: Tensor) -> Tensor:
    """Blocks (K, m, n) side by side as the columns of one n × Σ K·m matrix."""
    return torch.cat([block.flatten(0, 1) for block in blocks]).T


def _split(product: Tensor, components: int, *widths: int, joined: bool = False) -> list[Tensor]:
    """A product's columns back into blocks (…, K, width); `joined`: components outermost, else blocks outermost."""
    if joined:
        return list(torch.unflatten(product, 1, (components, sum(widths))).split(widths, 2))
    parts = product.split([components * width for width in widths], 1)
    return [torch.unflatten(part, 1, (components, width)) for part, width in zip(parts, widths, strict=True)]


_RIDGE = 1e-13


def maximize(old: Parameters, s: Statistics, floor: float, prior: Prior) -> Parameters:
    """The M-step: for every pixel the weighted regression of its seen values on [y, 1], and the noise that is left.

    The noise is held at `floor` at least, which is the maximum under that constraint, so the likelihood, the prior
    included, still never falls. A pixel that no image of a component has seen keeps what it had.
    """
    components, rank, pixels = old.factors.shape
    lower = torch.tril_indices(rank, rank, device=s.seen.device)
    normal = s.seen.new_zeros(pixels, components, rank + 1, rank + 1)
    normal[..., lower[0], lower[1]] = s.second
    normal[..., lower[1], lower[0]] = s.second
    normal[..., rank, :rank] = normal[..., :rank, rank] = s.first
    normal[..., rank, rank] = s.seen
    target = torch.cat([s.value_first, s.value.unsqueeze(2)], 2)  # (n, K, L + 1)

    known = s.seen > 1e-6 * s.images.clamp_max(1)  # (n, K)
    identity = torch.eye(rank + 1, dtype=normal.dtype, device=normal.device)
    believed = prior.share * s.images / s.seen.clamp_min(1e-300)  # (n, K), images of the prior for one that saw it
    normal = torch.where(known[..., None, None], normal / s.seen.clamp_min(1e-300)[..., None, None], identity)
    target = torch.where(known[..., None], target / s.seen.clamp_min(1e-300)[..., None], 0)
    # A ridge far below what the data say keeps factors apart that no image tells apart.
    normal = normal + torch.diag_embed(_RIDGE * normal.diagonal(dim1=-2, dim2=-1))
    normal = normal + identity * torch.where(known, believed, 0)[..., None, None]
    solution, _ = torch.linalg.solve_ex(normal, target)  # (n, K, L + 1)
    known = known & solution.isfinite().all(-1)
    noise = s.square / s.seen.clamp_min(1e-300) - (solution * target).sum(2)
    noise = (noise + believed * prior.variance.unsqueeze(1)) / (1 + believed)
    factors = torch.where(known[..., None], solution[..., :rank], old.factors.permute(2, 0, 1))  # (n, K, L)
    return Parameters(
        logits=(s.weight / s.images).clamp_min(1e-30).log(),
        means=torch.where(known, solution[..., rank], old.means.T).T.contiguous(),
        factors=factors.permute(1, 2, 0).contiguous(),
        noise=torch.where(known, noise.clamp_min(floor), old.noise.T).T.contiguous(),
    )


def start(
    x: Tensor,
    observed: Tensor,
    components: int,
    rank: int,
    floor: float,
    prior: Prior,
    seed: int,
    tries: int = 5,
    steps: int = 6,
) -> Parameters:
    """Parameters to start from: of several k-means clusterings the one that a few steps of EM make most likely.

    Args:
        x: some images (N, n) around zero, zero where not observed.
        observed: (N, n).
    """
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device starts from the same
    best, most = None, -math.inf
    for _ in range(1 if components == 1 else tries):
        p = _from_clusters(
            x, observed, _k_means(x, observed, components, generator), components, rank, floor, generator
        )
        for _ in range(steps):
            statistics, believed = collect(p, x, observed), log_prior(p, prior)
            p = maximize(p, statistics, floor, prior)
        reached = float(statistics.likelihood / statistics.images + believed)
        if reached > most:
            best, most = p, reached
    assert best is not None, "the likelihood of a start is a number"
    return best


def _from_clusters(
    x: Tensor, observed: Tensor, labels: Tensor, components: int, rank: int, floor: float, generator: torch.Generator
) -> Parameters:
    """Mean, principal directions and what they leave, of every cluster."""
    overall = x.square().sum(0) / observed.sum(0).clamp_min(1)  # (n), the variance of every pixel
    means, factors, noises, weights = [], [], [], []
    for k in range(components):
        chosen = labels == k
        own, seen = x[chosen], observed[chosen]
        count = seen.sum(0)
        mean = own.sum(0) / count.clamp_min(1)
        centered = (own - mean) * seen
        directions = _principal_directions(centered, rank, generator)  # (L, n), as long as their deviations
        # Ten images' worth of the overall variance, for pixels that few of this cluster have seen.
        variance = (centered.square().sum(0) + 10 * overall) / (count + 10)
        means.append(mean)
        factors.append(directions)
        noises.append((variance - directions.square().sum(0)).maximum(0.1 * variance).clamp_min(floor))
        weights.append((chosen.sum() + 1.0) / (len(x) + components))
    logits = torch.stack(weights).to(x.dtype).log()
    return Parameters(logits, torch.stack(means), torch.stack(factors), torch.stack(noises))


def _k_means(x: Tensor, observed: Tensor, clusters: int, generator: torch.Generator, iterations: int = 20) -> Tensor:
    """Labels (N) of k-means over seen pixels alone, with a k-means++ start.

    Distances are means over the pixels that an image has seen; centers are means over the images that saw a pixel.
    """
    squares, counts = x.square().sum(1, keepdim=True), observed.sum(1, keepdim=True)

    def distances(centers: Tensor) -> Tensor:
        return ((squares - 2 * x @ centers.T + observed @ centers.square().T) / counts).clamp_min(0)  # (N, K)

    centers = x[torch.randint(len(x), (1,), generator=generator, device="cpu").to(x.device)]
    for _ in range(clusters - 1):
        nearest = distances(centers).amin(1).cpu() + 1e-12
        centers = torch.cat([centers, x[torch.multinomial(nearest, 1, generator=generator).to(x.device)]])
    labels = distances(centers).argmin(1)
    for _ in range(iterations):
        member = torch.nn.functional.one_hot(labels, clusters).to(x.dtype)
        seen = member.T @ observed
        # A center keeps its place at pixels that none of its images has seen.
        centers = torch.where(seen > 0, member.T @ x / seen.clamp_min(1), centers)
        labels = distances(centers).argmin(1)
    return labels


def _principal_directions(centered: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """The `rank` leading principal directions (L, n) of images (N, n), each as long as its standard deviation."""
    images, pixels = centered.shape
    randn = partial(torch.randn, generator=generator, dtype=centered.dtype, device="cpu")
    jitter = 1e-3 * randn((rank, pixels)).to(centered.device)
    size = centered.square().mean().sqrt() if images else centered.new_zeros(())
    size = torch.where(size > 0, size, 0.1)  # a single image says nothing; exact zeros would never move again
    if min(images, pixels) <= rank or rank == 0:
        return size * jitter  # too few images to have directions
    # Randomised subspace iteration: a few products with N×n, nothing of size n×n.
    basis = randn((pixels, min(rank + 8, images, pixels))).to(centered.device)
    for _ in range(6):
        basis = torch.linalg.qr(centered.T @ (centered @ basis)).Q
    _, values, right = torch.linalg.svd(centered @ basis, full_matrices=False)
    directions: Tensor = (basis @ right.T).T[:rank] * (values[:rank] / math.sqrt(images)).unsqueeze(1)
    return directions + size * jitter

"""Hidden values change nothing: everything public runs twice with different garbage where nothing was observed.

Results, gradients and what was learned must be the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import misconv
from misconv import MFA, functional, impute
from tests.fuzz import activations
from tests.fuzz.maths import random_observed
from tests.fuzz.outcome import Choices, Outcome, expect, ok, one_line, refused

GARBAGE = ("nan", "inf", "-inf", "1e30", "noise", "0", "mixed")
Problem = Callable[[Tensor], Iterable[Tensor | None]]  # images with garbage in them → all that comes of them


def case(seed: int, device: str = "cpu") -> Outcome:
    """One function, one mask, two kinds of garbage."""
    choices = Choices("leak", seed)
    make = choices.weighted(_PROBLEMS)
    shape = (choices.randint(2, 4), choices.randint(1, 3), choices.randint(4, 7), choices.randint(4, 7))
    observed = random_observed(choices, shape)
    observed = torch.rand(shape) < 0.5 if observed is None else observed.clone()
    observed[0] = True  # something to fit
    dtype = choices.pick([torch.float32, torch.float32, torch.float64])
    image = choices.pick([1.0, 1.0, choices.power(-10, 10)]) * torch.randn(shape, dtype=dtype)
    problem = make(choices, image.to(device), observed.to(device))
    first, second = choices.sample(GARBAGE, 2)
    results, reasons = [], []
    for garbage in (first, second):
        x = torch.where(observed.expand(shape), image, _garbage(garbage, image)).to(device)
        torch.manual_seed(seed)
        try:
            results.append(_run(problem, x))
        except (ValueError, TypeError) as error:  # the same for all that may be hidden
            reasons.append(one_line(error, 90))
    name = make.__name__.strip("_")
    if reasons:
        expect(len(set(reasons)) == 1 and not results, f"{name}: {first} and {second} end differently: {reasons}")
        return refused(f"{name}: {reasons[0]}")
    expect(len(results[0]) == len(results[1]), f"{name}: results for {first} and {second} differ in number")
    for number, (a, b) in enumerate(zip(*results, strict=True)):
        same = a.shape == b.shape and torch.equal(a, b)
        expect(
            same and not a.isnan().any(),
            f"{name}: {first} and {second} make result {number} of {len(results[0])} differ",
        )
    return ok(name)


def _garbage(kind: str, like: Tensor) -> Tensor:
    if kind == "noise":
        return torch.randn_like(like)
    if kind == "mixed":
        values = torch.tensor([math.nan, math.inf, -math.inf, 1e30, 0.0], dtype=like.dtype)
        return values[torch.randint(5, like.shape)]
    return torch.full_like(like, float(kind))


def _run(problem: Problem, x: Tensor) -> list[Tensor]:
    """Everything that comes out, and the gradient of it in the image where there is one."""
    x.requires_grad_()
    results = [t for t in problem(x) if t is not None]
    # Every result in units of its own, so that no square overflows.
    parts = [
        (t / t.detach().abs().max().clamp_min(1e-30)).square().sum() for t in results if t.requires_grad and t.numel()
    ]
    total = sum(parts, start=torch.zeros((), device=x.device))
    slope = torch.autograd.grad(total, x, allow_unused=True)[0] if total.requires_grad else None
    return [t.detach() for t in results] + ([] if slope is None else [slope])


def _mfa(choices: Choices, like: Tensor, observed: Tensor | None = None) -> MFA:
    batch, *image = like.shape
    components, rank = choices.pick([1, 2, 3]), choices.pick([0, 1, 3])
    scale = float(like.abs().max())

    def randn(*size: int) -> Tensor:
        return torch.randn(size, dtype=like.dtype).to(like.device)

    means = scale * randn(batch, components, *image)
    if observed is not None:
        means = torch.where(observed[:, None], means[:, :1], means)
    noise = scale**2 * (0.1 + randn(batch, components, *image).square())
    return MFA(randn(batch, components), means, scale * randn(batch, components, rank, *image), noise, observed)


def _parts(p: MFA) -> list[Tensor]:
    """What an MFA says; its parameters at exact pixels count for nothing, and may be anything."""
    means, factors, noise = p.pinned()
    return [p.weights, p.mean, p.variance, means, factors, noise]


# Problems: each gets the images once, for their size, and returns a function of images with garbage in them. ---------


def _log_prob(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    p = _mfa(choices, image)
    return lambda x: [p.log_prob(x, observed)]


def _condition(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    p = _mfa(choices, image)
    other = torch.rand(image.shape) < 0.3

    def run(x: Tensor) -> list[Tensor]:
        q = p.condition(x, observed)
        again = q.condition(x, observed)
        generator = torch.Generator(x.device).manual_seed(3)
        parts = [*_parts(q), again.mean, q.sample(2, generator=generator)]
        return [*parts, q.log_prob(image, other.to(x.device)), q.fix(x, observed).mean]

    return run


def _fix(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    p = _mfa(choices, image)
    return lambda x: _parts(p.fix(x, observed))


def _layer(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    """A layer behind `fix`: garbage in the image, and in factors and noise of pixels that are exact."""
    p = _mfa(choices, image)
    channels = image.shape[1]
    known = activations.draw(choices, 2)
    given = known.given.to(image) if isinstance(known.given, nn.Module) else known.given
    norm = nn.BatchNorm2d(2) if choices.chance(0.5) else None
    layer = misconv.MisConv2d(
        channels, 2, choices.pick([1, 3]), stride=choices.pick([1, 2]), padding=1, norm=norm, activation=given,
        padding_mode=choices.pick(["zeros", "zeros", "reflect", "replicate", "circular"]),
    ).to(image)  # fmt: skip
    layer.train(choices.chance(0.5))
    start = {name: value.clone() for name, value in layer.state_dict().items()}

    def run(x: Tensor) -> list[Tensor]:
        layer.load_state_dict(start)
        garbage = x.detach().where(~observed, torch.flip(x.detach(), (0,)))  # of both kinds
        q = p.fix(x, observed)
        noise = torch.where(observed[:, None], garbage[:, None], q.noise)
        factors = torch.where(observed[:, None, None], garbage[:, None, None], q.factors)
        layer.zero_grad()
        result = layer(MFA(q.logits, q.means, factors, noise, observed))
        slopes = torch.autograd.grad(
            result.square().sum(), list(layer.parameters()), retain_graph=True, allow_unused=True
        )
        return [result, *(s for s in slopes if s is not None), *layer.buffers()]

    return run


def _functional(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    groups = image.shape[1] if choices.chance(0.3) else 1
    weight = torch.randn(2 * groups, image.shape[1] // groups, 3, 3).to(image)
    p = _mfa(choices, image)
    stride = choices.pick([1, 2])

    def run(x: Tensor) -> list[Tensor]:
        q = p.fix(x, observed)
        mean, variance = functional.conv2d_moments(q, weight, None, stride, 1, 1, groups)
        return [mean, variance, functional.expected_conv2d(q, weight, None, stride, 1, 1, groups, activation="gelu")]

    return run


def _partial(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    layer = misconv.PartialConv2d(image.shape[1], 3, 3, padding=choices.pick([0, 1, 2])).to(image)
    return lambda x: [layer(x, observed)]


def _imputer(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    kind = choices.pick(["zero", "mean", "knn", "density"])
    fitted: Any = {"mean": impute.Mean, "knn": lambda: impute.KNN(choices.pick([1, 3]))}.get(kind)
    module = None if fitted is None else fitted()
    p = _mfa(choices, image)

    def run(x: Tensor) -> list[Tensor]:
        if kind == "zero":
            return [impute.zero(x, observed)]
        if kind == "density":
            return [impute.by_density(lambda x, o: p.condition(x, o))(x, observed)]
        module.fit(x.detach(), observed)
        return [module(x.detach(), observed), *module.buffers()]

    return run


def _smfa(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    components, rank = choices.pick([1, 2]), choices.pick([0, 1])

    def run(x: Tensor) -> list[Tensor]:
        density = misconv.SMFA(components, rank).fit(x.detach(), observed, iterations=2)
        return [*density.buffers(), *_parts(density(x, observed))]

    return run


def _density_network(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    """A density network and a step of training it."""
    density: nn.Module = choices.pick([
        lambda: misconv.ConvDMFA(image.shape[1], choices.pick([1, 2]), 1, widths=(4,), depths=(1,)),
        lambda: misconv.LinearDMFA(tuple(image.shape[1:]), 1, 1),
    ])()  # fmt: skip
    density.to(image)
    density.train(choices.chance(0.5))
    start = {name: value.clone() for name, value in density.state_dict().items()}

    def run(x: Tensor) -> list[Tensor]:
        density.load_state_dict(start)
        p = density(x, observed)
        loss = -p.log_prob(image, torch.ones_like(observed)).sum()
        slopes = torch.autograd.grad(loss, list(density.parameters()), retain_graph=True, allow_unused=True)
        return [*_parts(p), *(s for s in slopes if s is not None), *density.buffers()]

    return run


def _converted(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    network = nn.Sequential(
        nn.Conv2d(image.shape[1], 3, 3, padding=1), *([nn.BatchNorm2d(3)] if choices.chance(0.6) else []),
        choices.pick([nn.ReLU, nn.SiLU, nn.GELU])(), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip
    density = misconv.ConvDMFA(image.shape[1], rank=1, widths=(4,), depths=(1,)).eval()
    net = misconv.convert(network, density).to(image).train(choices.chance(0.3))
    coded = bool(observed.shape[1] > 1 or choices.chance(0.5))
    start = {name: value.clone() for name, value in net.state_dict().items()}

    def run(x: Tensor) -> list[Tensor]:
        net.load_state_dict(start)
        result = net(x, observed) if not coded else net(torch.where(observed, x, math.nan))
        slopes = torch.autograd.grad(result.square().sum(), list(network_parameters(net)), retain_graph=True)
        return [result, *slopes, *net.buffers()]

    return run


def network_parameters(net: nn.Module) -> Iterable[nn.Parameter]:
    return net.network.parameters()  # type: ignore[union-attr,operator,return-value]


def _training(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    """A whole training, of a density or of an imputing classifier."""

    def run(x: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        density = misconv.ConvDMFA(image.shape[1], rank=1, widths=(4,), depths=(1,))
        history = misconv.fit_density(
            density, x.detach().float(), observed, epochs=1, batch_size=2, validation=0.0, progress=False, seed=1
        )
        return [torch.tensor([record["nll"] for record in history]), *(p.detach() for p in density.parameters())]

    image.data = image.float().data
    return run


def _incomplete(choices: Choices, image: Tensor, observed: Tensor) -> Problem:
    """Transforms of images whose missing pixels are NaN: a NaN may be any of the many that there are."""
    from torchvision.transforms import v2

    from misconv.transforms import Incomplete

    transform = choices.pick([
        v2.Resize((5, 5), antialias=True), v2.RandomHorizontalFlip(1.0), v2.CenterCrop(3), v2.RandomRotation((30, 30)),
        v2.GaussianBlur(3, (1.0, 1.0)), v2.Pad(1), v2.Normalize([0.1] * image.shape[1], [0.5] * image.shape[1]),
    ])  # fmt: skip

    def run(x: Tensor) -> list[Tensor]:
        coded = torch.where(observed, x.detach(), math.nan)
        bits = coded.view(torch.int64 if coded.dtype == torch.float64 else torch.int32)
        odd = bits | (~observed).to(bits.dtype) * int(x.detach().nan_to_num(7, 7, 7).abs().sum().item() % 1000)
        result = transform(Incomplete(odd.view(coded.dtype))).as_subclass(Tensor)
        return [result.nan_to_num(123.0), result.isnan()]

    return run


_PROBLEMS: dict[Callable[[Choices, Tensor, Tensor], Problem], float] = {
    _log_prob: 2,
    _condition: 3,
    _fix: 1,
    _layer: 5,
    _functional: 2,
    _partial: 1,
    _imputer: 2,
    _smfa: 1,
    _density_network: 2,
    _converted: 2,
    _training: 0.2,
    _incomplete: 1,
}

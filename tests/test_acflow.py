"""ACFlow: an exact conditional density, whatever is hidden; and its training on complete images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import misconv
from misconv import data, missing
from misconv._train import one_device, train
from misconv.paper import flows
from misconv.paper.acflow import ACFlow
from misconv.paper.quality import quality

SHAPE = (2, 5, 6)  # rows and columns that 2×2 blocks of 2×2 blocks do not fill
MASKS = ("pixels", "channels", "square", "all", "none")


def random_flow(shape: tuple[int, int, int] = SHAPE, std: float = 0.1, **sizes: Any) -> ACFlow:
    """With weights of its own: a new flow changes nothing."""
    flow = ACFlow(shape, **{"scales": 3, "width": 6, "blocks": 1} | sizes)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += std * torch.randn_like(parameter)
    return flow


def masked(kind: str, batch: int = 3) -> Tensor:
    channels, height, width = SHAPE
    size = (batch, channels if kind == "channels" else 1, height, width)
    if kind == "square":
        return missing.square(batch, height, width)
    if kind in ("all", "none"):
        return torch.full(size, kind == "none")
    return torch.rand(size) > 0.5


def images(batch: int = 3) -> Tensor:
    """With some values at either end."""
    return (1.2 * torch.rand(batch, *SHAPE) - 0.1).clamp(0, 1)


# The density is exact --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MASKS)
def test_decoding_inverts_encoding_in_single_precision(kind: str) -> None:
    flow, x, observed = random_flow().float(), images().float(), masked(kind)
    z, log_det = flow.encode(x, observed)
    torch.testing.assert_close(flow.decode(z, x, observed), x, rtol=0, atol=1e-4)
    assert log_det.isfinite().all()
    hidden = ~observed.expand_as(x)
    new, _ = ACFlow(SHAPE, 3, 6, 1).float().encode(x, observed)
    if hidden.any():  # the flow does something, and so has something to invert
        assert (z - new)[hidden].abs().mean() > 0.1
    assert torch.equal(z[~hidden], new[~hidden])


@pytest.mark.parametrize("std", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_inverts_steep_flows(std: float, dtype: torch.dtype) -> None:
    """Large weights make the largest shifts and scales, one upon the other."""
    flow = random_flow((1, 12, 12), std, width=32, blocks=2).to(dtype)
    x, observed = torch.rand(2, 1, 12, 12).float(), torch.rand(2, 1, 12, 12) > 0.5
    z, _ = flow.encode(x, observed)
    assert z.abs().max() > 3  # a new flow keeps pixels within it
    torch.testing.assert_close(flow.decode(z, x, observed), x, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", MASKS[:-1])
def test_the_determinant_is_that_of_the_jacobian(kind: str) -> None:
    flow, x, observed = random_flow().double(), torch.rand(1, *SHAPE, dtype=torch.float64), masked(kind, 1)
    hidden = ~observed.expand_as(x)

    def latent(values: Tensor) -> Tensor:
        return flow.encode(x.masked_scatter(hidden, values), observed)[0][hidden]

    jacobian = torch.autograd.functional.jacobian(latent, x[hidden])
    assert isinstance(jacobian, Tensor)
    sign, log = torch.linalg.slogdet(jacobian)
    assert sign != 0
    z, log_det = flow.encode(x, observed)
    torch.testing.assert_close(log_det[0], log, rtol=1e-9, atol=1e-9)
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(z[hidden]).sum()
    torch.testing.assert_close(flow.log_prob(x, observed)[0], normal + log)


def scored(flow: ACFlow, x: Tensor, observed: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Values of one or two hidden pixels, and the probability of a cell around each, by the trapezoidal rule.

    The grid is even in logit space, where nothing is steep, so the rule is exact up to rounding.
    """
    y = torch.linspace(-12, 12, points, dtype=x.dtype)
    share = y.sigmoid()
    line, step = (share - flow.margin) / (1 - 2 * flow.margin), share * (1 - share) * (y[1] - y[0])
    step = step / (1 - 2 * flow.margin)
    hidden = ~observed.expand_as(x)
    count = int(hidden.sum())
    values = torch.cartesian_prod(*[line] * count).reshape(-1, count)
    area = torch.cartesian_prod(*[step] * count).reshape(-1, count).prod(1)
    many = x.expand(len(values), *x.shape[1:]).masked_scatter(hidden.expand(len(values), *x.shape[1:]), values)
    with torch.no_grad():
        found = flow.log_prob(many, observed.expand(len(values), *observed.shape[1:])).exp()
    return values, found * area


@pytest.mark.parametrize(
    ("places", "dependent"),
    # The last two are of one colour on the checkerboards of both scales: no coupling tells one of the other.
    [(((0, 0), (0, 1)), True), (((1, 1), (2, 0)), True), (((0, 0), (2, 2)), False)],
)
def test_the_density_of_two_hidden_pixels_integrates_to_one(
    places: tuple[tuple[int, int], ...], dependent: bool
) -> None:
    flow = random_flow((1, 3, 3), scales=2, width=4, margin=0.05).double()
    x, observed = torch.rand(1, 1, 3, 3, dtype=torch.float64), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    for row, column in places:
        observed[..., row, column] = False
    _, cells = scored(flow, x, observed, 80)
    assert cells.sum().item() == pytest.approx(1, abs=1e-3)
    # Both depend on the seen pixels, and on each other: it is no product of two fixed densities.
    _, others = scored(flow, 1 - x, observed, 80)
    assert (cells - others).abs().sum() > 1e-3
    table = cells.reshape(80, 80)
    assert bool((table - table.sum(1, keepdim=True) * table.sum(0)).abs().sum() > 1e-3) == dependent


def test_samples_have_the_density() -> None:
    """Of one hidden pixel: the largest difference of the two distribution functions (Kolmogorov and Smirnov)."""
    flow = random_flow((1, 3, 3), scales=2, width=4).double()
    x, observed = torch.rand(1, 1, 3, 3, dtype=torch.float64), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    observed[..., 1, 1] = False
    values, cells = scored(flow, x, observed, 2000)
    many = 4000
    drawn = flow.sample(x.expand(many, -1, -1, -1), observed.expand(many, -1, -1, -1))[0, :, 0, 1, 1]
    below = (drawn[:, None] <= values[:, 0]).double().mean(0)
    inside = (values[:, 0] > 0) & (values[:, 0] < 1)  # where samples are not clamped
    # Samples that are right pass in 99 % of all cases; this is one of them.
    assert (below - cells.cumsum(0))[inside].abs().max() < 1.63 / math.sqrt(many)


def test_a_new_flow_is_the_logistic_normal_density() -> None:
    """In units of x: with logit(s) of the scaled x times a factor standard normal."""
    flow, x, observed = ACFlow(SHAPE, scales=2, width=4, margin=0.05), images().double(), masked("pixels")
    share = 0.05 + 0.9 * x
    factor = 3 / math.log(19)
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(factor * share.logit())
    each = normal + math.log(factor * 0.9) - (share * (1 - share)).log()
    torch.testing.assert_close(flow.log_prob(x, observed), (each * ~observed).sum((1, 2, 3)))


# Seen and hidden -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e30])
def test_seen_pixels_stay_and_hidden_ones_are_never_read(kind: str, poison: float) -> None:
    flow, x, observed = random_flow(), images(), masked(kind)
    seen = observed.expand_as(x)
    spoilt = x.masked_fill(~seen, poison)
    clean = flow.impute(x, observed), flow.sample(x, observed, 2, generator=torch.Generator().manual_seed(1))
    again = flow.impute(spoilt, observed), flow.sample(spoilt, observed, 2, generator=torch.Generator().manual_seed(1))
    for first, second in zip(clean, again, strict=True):
        assert torch.equal(first, second)
        assert first.min() >= 0
        assert first.max() <= 1
        assert torch.equal(first.where(seen, 0), x.where(seen, 0).expand_as(first))
    assert clean[1].shape == (2, *x.shape)
    assert torch.equal(clean[1][0], clean[1][1]) == (kind == "none")


def test_the_best_guess_is_the_middle_of_the_latent_space() -> None:
    flow, x, observed = random_flow().double(), images().double(), masked("pixels")
    middle = flow.decode(torch.zeros_like(x), x, observed)
    assert torch.equal(flow.impute(x, observed), middle.clamp(0, 1))
    z, _ = flow.encode(middle, observed)
    assert z[~observed.expand_as(x)].abs().max() < 1e-6


def test_nothing_hidden_and_everything_hidden() -> None:
    flow, x = random_flow(), images()
    complete = torch.ones(3, 1, *SHAPE[1:], dtype=torch.bool)
    assert torch.equal(flow.log_prob(x, complete), torch.zeros(3))
    assert flow.log_prob(x, ~complete).isfinite().all()
    # Each image by itself: its density does not depend on its company.
    observed = torch.cat([complete[:1], masked("pixels", 2)])
    together = flow.log_prob(x, observed)
    alone = torch.cat([flow.log_prob(x[n : n + 1], observed[n : n + 1]) for n in range(3)])
    torch.testing.assert_close(together, alone)


def test_it_stays_finite_with_large_weights() -> None:
    flow, x = random_flow(std=1.0).float(), images().float()
    for kind in MASKS:
        observed = masked(kind)
        assert flow.log_prob(x, observed).isfinite().all()
        assert flow.sample(x, observed, 2).isfinite().all()
        assert flow.impute(x, observed).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_images_of_another_type(dtype: torch.dtype) -> None:
    flow, observed = random_flow().float(), masked("pixels")
    x = images().to(dtype)
    sampled = flow.sample(x, observed)[0]
    assert sampled.dtype == dtype
    assert torch.equal(sampled.where(observed, 0), x.where(observed, 0))
    found = flow.log_prob(x, observed)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.float(), flow.log_prob(x.float(), observed), rtol=1e-4, atol=1e-3)


# Gradients and files ---------------------------------------------------------------------------------------------------


def test_gradients() -> None:
    flow, observed = random_flow((1, 4, 4), scales=2, width=3).double(), torch.rand(2, 1, 4, 4) > 0.5
    x = (0.1 + 0.8 * torch.rand(2, 1, 4, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: flow.log_prob(x, observed), (x,))
    flow.log_prob(x, observed).sum().backward()
    assert x.grad is not None
    for name, parameter in flow.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or "blocks" in name, name  # where a ReLU is 0 for all of few pixels


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    flow, x, observed = random_flow(blocks=2, margin=0.01), images(), masked("pixels")
    misconv.save(flow, tmp_path / "flow.safetensors")
    again = misconv.load(tmp_path / "flow.safetensors").to(x.device)
    assert isinstance(again, ACFlow)
    assert again.config() == flow.config()
    assert torch.equal(again.log_prob(x, observed), flow.log_prob(x, observed))
    assert misconv.paper.acflow.ACFlow is ACFlow


# Training --------------------------------------------------------------------------------------------------------------


def digits() -> Tensor:
    return data.load("digits").train[:200]


def trained(epochs: int, settings: flows.FlowSettings, **options: Any) -> tuple[ACFlow, list[dict[str, float]]]:
    torch.set_default_dtype(torch.float32)
    flow, fabric = flows.make_flow(settings, (1, 8, 8)), one_device("cpu")
    job = flows.flow_job(flow, settings, digits(), fabric)
    (history,) = train([job], fabric, epochs=epochs, progress=False, **options)
    return flow, history


@pytest.mark.usefixtures("without_default_device")
def test_it_learns_from_digits_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    settings = flows.FlowSettings(epochs=4, scales=2, width=8, blocks=1, batch_size=32, learning_rate=3e-3)
    flow, history = trained(4, settings)
    test = data.load("digits").test[:100].float() / 255
    observed = missing.square(100, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = (-f.log_prob(test, observed).mean() for f in (flows.make_flow(settings, (1, 8, 8)), flow))
    assert after < before - 15  # nats, of 16 pixels
    assert history[-1]["validation_nll"] < history[0]["validation_nll"] < 0
    assert history[-1]["nll"] < history[0]["nll"]
    # Dequantisation and regions come from the seed and the epoch alone.
    trained(2, settings, checkpoint=tmp_path / "run")
    again, _ = trained(4, settings, checkpoint=tmp_path / "run")
    for name, value in flow.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_every_kind_of_region_is_hidden_in_training() -> None:
    drawn = flows.regions(200, 8, 8, fraction=0.5, generator=torch.Generator().manual_seed(0))
    counts = (~drawn).sum((1, 2, 3)).tolist()
    assert set(counts) == {16, 32, 48}
    assert all(counts.count(n) >= 30 for n in (16, 32, 48))
    assert drawn.shape == (200, 1, 8, 8)


def test_its_quality_is_that_of_its_guess_and_of_its_density() -> None:
    flow, observed = random_flow((1, 8, 8), scales=2), missing.square(5, 8, 8)
    x = torch.rand(5, 1, 8, 8)
    found = quality(flow, x, observed, batch_size=2)
    assert found["nll"] == pytest.approx(-flow.log_prob(x, observed).mean().item(), rel=1e-5)
    error = (flow.impute(x, observed) - x).square().sum((1, 2, 3))
    assert found["mse"] == pytest.approx(error.mean().item(), rel=1e-5)


# What is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (28, 28)}, r"shape must be \(C, H, W\) of the images, got \(28, 28\)"),
        ({"shape": (1, 0, 28)}, r"shape\[1\] must be an integer of at least 1, got 0"),
        ({"scales": 0}, "scales must be an integer of at least 1, got 0"),
        ({"scales": 11}, "scales must be at most 10, got 11"),
        ({"width": 1.5}, "width must be an integer of at least 1, got 1.5"),
        ({"blocks": 0}, "blocks must be an integer of at least 1, got 0"),
        ({"margin": 0.5}, "margin must be a number from 1e-06 to below 0.5, got 0.5"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ACFlow(**arguments)


@pytest.mark.usefixtures("values_are_checked")
def test_bad_images() -> None:
    flow, x, observed = random_flow(), images(), masked("pixels")
    with pytest.raises(ValueError, match=r"x must have shape \(B, 2, 5, 6\), got a .* tensor of shape \(3, 1, 5, 6\)"):
        flow.log_prob(x[:, :1], observed)
    with pytest.raises(ValueError, match=r"observed must have shape \(3, 1, 5, 6\) or \(3, 2, 5, 6\)"):
        flow.sample(x, observed[:2])
    with pytest.raises(TypeError, match="observed must be a bool tensor, True where the pixel was seen, got None"):
        flow.impute(x, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x must hold values from 0 to 1, got 255"):
        flow.log_prob(255 * torch.ones_like(x), observed)
    with pytest.raises(ValueError, match="x must be finite wherever it is observed, got nan"):
        flow.log_prob(x.masked_fill(~observed, math.nan), observed)
    with pytest.raises(ValueError, match="n must be an integer of at least 1, got 0"):
        flow.sample(x, observed, 0)
    with pytest.raises(ValueError, match=r"z must have the shape of x, \(3, 2, 5, 6\), got a"):
        flow.decode(x[:1], x, observed)
    assert isinstance(flow, nn.Module)

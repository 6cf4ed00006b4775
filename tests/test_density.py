from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

from misconv import MFA, SMFA, ConvDMFA, LinearDMFA, impute, missing
from misconv._density import em as _em
from misconv._density import em_data as _em_data
from tests.processes import run_two
from tests.reference import random_mfa


def planted(images: int, components: int = 3, rank: int = 2, seed: int = 0) -> tuple[MFA, Tensor, Tensor]:
    """A mixture with well-parted components, images from it, and 60 % of their pixels."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    shape = (1, 6, 6)
    truth = MFA(
        torch.zeros(1, components),
        1.5 * torch.randn(1, components, *shape, generator=generator),
        torch.randn(1, components, rank, *shape, generator=generator),
        0.05 + 0.2 * torch.rand(1, components, *shape, generator=generator),
    )
    x = truth.sample(images, generator=generator)[:, 0]
    return truth, x, missing.noise(images, 6, 6, fraction=0.4, generator=generator)


def held_out(p: MFA | SMFA, x: Tensor) -> float:
    """The mean log-likelihood of complete images."""
    parts = (p.logits, p.means, p.factors, p.noise)
    single = parts if isinstance(p, SMFA) else tuple(t[0] for t in parts)
    return MFA(*(t.expand(len(x), *t.shape) for t in single)).log_prob(x).mean().item()


# EM ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_likelihood_never_falls(seed: int) -> None:
    _, x, observed = planted(400, seed=seed)
    history = SMFA(3, 2).fit(x, observed, iterations=30, tolerance=-1, seed=seed).history
    gains = torch.tensor(history).diff()
    assert len(history) == 30
    assert (gains >= -1e-9 * abs(history[-1])).all()
    assert history[-1] > history[0]


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_e_step_agrees_with_the_mfa(per_channel: bool) -> None:
    """EM's matrix products against `MFA.log_prob` and `condition`, which take images one by one."""
    p = random_mfa(1, 3, 2, (2, 3, 3)).to(torch.float64)
    x = torch.randn(5, 2, 3, 3, dtype=torch.float64)
    observed = torch.rand(5, 2 if per_channel else 1, 3, 3) < 0.6
    flat, mask = _em_data.flatten(x, observed)
    parameters = _em.Parameters(p.logits[0], p.means[0].flatten(1), p.factors[0].flatten(2), p.noise[0].flatten(1))
    sums = _em.collect(parameters, flat, mask)
    prior = MFA(*(t.expand(5, *t.shape[1:]) for t in (p.logits, p.means, p.factors, p.noise)))
    torch.testing.assert_close(sums.likelihood, prior.log_prob(x, observed).sum())
    torch.testing.assert_close(sums.weight, prior.condition(x, observed).weights.sum(0))


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_mixture_is_recovered(seed: int) -> None:
    truth, x, observed = planted(6000, seed=seed)
    fresh = truth.sample(2000)[:, 0]
    best = held_out(truth, fresh)
    for prior in (0.0, 1.0):
        fitted = SMFA(3, 2, prior=prior).fit(x, observed, iterations=80, tolerance=1e-6)
        assert abs(held_out(fitted, fresh) - best) <= 0.01 * abs(best)


def test_minibatches_come_close() -> None:
    truth, x, observed = planted(4000)
    fresh = truth.sample(2000)[:, 0]
    full = held_out(SMFA(3, 2).fit(x, observed, iterations=60, tolerance=1e-6), fresh)
    stepwise = held_out(SMFA(3, 2).fit(x, observed, iterations=15, minibatch=200, tolerance=-1), fresh)
    assert abs(stepwise - full) <= 0.02 * abs(full)


def test_data_that_comes_in_batches() -> None:
    _, x, observed = planted(500)
    batches = [(x[i : i + 150], observed[i : i + 150]) for i in range(0, 500, 150)]
    whole, parts = SMFA(2, 2).fit(x, observed, iterations=5), SMFA(2, 2).fit(batches, iterations=5)
    torch.testing.assert_close(parts.means, whole.means, rtol=1e-6, atol=1e-6)
    stepwise = SMFA(2, 2).fit(batches, iterations=3, minibatch=150, tolerance=-1)
    assert stepwise.means.isfinite().all()


def test_rank_zero_is_a_gaussian_per_pixel() -> None:
    x, observed = torch.randn(300, 2, 3, 3) * 2 + 1, torch.rand(300, 2, 3, 3) < 0.7
    density = SMFA(components=1, rank=0, prior=0).fit(x, observed, noise_floor=1e-6)
    count = observed.sum(0)
    mean = x.where(observed, 0).sum(0) / count
    variance = (x - mean).where(observed, 0).square().sum(0) / count
    torch.testing.assert_close(density.means[0], mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(density.noise[0], variance, rtol=1e-5, atol=1e-6)


def test_hidden_values_change_no_bit_of_a_fit() -> None:
    _, x, observed = planted(300)
    clean = SMFA(2, 2).fit(x, observed, iterations=4)
    for poison in (math.nan, math.inf, -math.inf, 1e30):
        other = SMFA(2, 2).fit(x.masked_fill(~observed, poison), observed, iterations=4)
        for name in ("logits", "means", "factors", "noise"):
            assert torch.equal(getattr(other, name), getattr(clean, name))


def test_forward_conditions_the_mixture() -> None:
    _, x, observed = planted(300)
    density = SMFA(3, 2).fit(x, observed, iterations=5)
    p = density(x[:4].masked_fill(~observed[:4], math.nan), observed[:4])
    assert torch.equal(p.mean[observed[:4]], x[:4][observed[:4]])
    prior = MFA(*(t.expand(4, *t.shape) for t in (density.logits, density.means, density.factors, density.noise)))
    torch.testing.assert_close(p.mean, prior.condition(x[:4], observed[:4]).mean)
    nothing = density(x[:4], torch.zeros_like(observed[:4]))  # an image never seen is the mixture itself
    torch.testing.assert_close(nothing.mean, prior.mean)


def fit_share(rank: int, folder: Path) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x, observed = torch.load(folder / "data.pt")
    mine = slice(0, 170) if rank == 0 else slice(170, None)
    density = SMFA(3, 2).fit(x[mine], observed[mine], iterations=6)
    torch.save((density.means, density.factors, density.noise, density.history), folder / f"result{rank}.pt")
    distributed.destroy_process_group()


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    _, x, observed = planted(400)
    torch.save((x, observed), tmp_path / "data.pt")
    run_two(fit_share, tmp_path)
    one = SMFA(3, 2).fit(x, observed, iterations=6)
    for rank in (0, 1):
        means, factors, noise, history = torch.load(tmp_path / f"result{rank}.pt")
        for value, expected in ((means, one.means), (factors, one.factors), (noise, one.noise)):
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-8)
        assert history == pytest.approx(one.history, rel=1e-9)


# Networks ----------------------------------------------------------------------------------------------------------


def networks(components: int = 1, rank: int = 4) -> list[nn.Module]:
    return [
        LinearDMFA((2, 7, 10), components=components, rank=rank),
        ConvDMFA(2, components=components, rank=rank, widths=(8, 12, 16), depths=(1, 1, 2, 1, 1)),
    ]


@pytest.mark.parametrize(("components", "rank"), [(1, 4), (3, 2), (2, 0)])
def test_networks_predict_any_mixture(components: int, rank: int) -> None:
    x, observed = torch.rand(3, 2, 7, 10), torch.rand(3, 2, 7, 10) < 0.6
    for density in networks(components, rank):
        p = density(x.masked_fill(~observed, math.nan), observed)
        assert p.factors.shape == (3, components, rank, 2, 7, 10)
        assert (p.noise > 0).all()
        assert torch.equal(p.mean[observed], x[observed])
        p.log_prob(torch.rand(3, 2, 7, 10)).sum().backward()
        for name, value in density.named_parameters():
            assert value.grad is not None, name
            assert value.grad.isfinite().all()


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (16, 16), (17, 30)])
def test_convolutional_networks_take_any_size(size: tuple[int, int]) -> None:
    density = ConvDMFA(3, rank=2)
    x = torch.rand(2, 3, *size)
    assert density(x, torch.rand(2, 1, *size) < 0.5).shape == x.shape


def test_the_networks_are_those_of_the_paper() -> None:
    convolutional = ConvDMFA(3)
    widths = [m.out_channels for m in convolutional.features if isinstance(m, nn.Conv2d) and m.stride == (1, 1)]
    assert widths == [32, 32, 64, 64, 128, 128, 128, 128, 64, 64, 32, 32]
    linear = LinearDMFA((1, 28, 28))
    assert [(m.out_channels, m.kernel_size[0]) for m in linear.features if isinstance(m, nn.Conv2d)] == [
        (16, 5),
        (32, 5),
        (64, 5),
        (32, 3),
    ]
    assert linear.factors.out_features == 4 * 784


def test_hidden_values_change_no_bit_of_a_prediction() -> None:
    x, observed = torch.rand(3, 2, 7, 10), torch.rand(3, 1, 7, 10) < 0.6
    for density in networks(2, 2):
        density.eval()
        clean = density(x, observed)
        for poison in (math.nan, math.inf, 1e30):
            other = density(x.masked_fill(~observed, poison), observed)
            for name in ("logits", "means", "factors", "noise"):
                assert torch.equal(getattr(other, name), getattr(clean, name))


def test_images_may_have_any_range() -> None:
    """Calibrated, a network treats 16-bit values as it treats those between 0 and 1."""
    x, observed = torch.rand(20, 2, 7, 10), torch.rand(20, 1, 7, 10) < 0.6
    for density in networks(2, 2):
        twin = copy.deepcopy(density)
        density.calibrate(x, observed)
        twin.calibrate(1000 + 60000 * x, observed)
        p, q = density.eval()(x, observed), twin.eval()(1000 + 60000 * x, observed)
        torch.testing.assert_close(q.mean, 1000 + 60000 * p.mean, rtol=1e-6, atol=1e-2)
        torch.testing.assert_close(q.variance.sqrt(), 60000 * p.variance.sqrt(), rtol=1e-5, atol=1e-2)


def test_mixed_precision() -> None:
    x, observed = torch.rand(2, 2, 7, 10, dtype=torch.float32), torch.rand(2, 1, 7, 10) < 0.6
    for density in networks():
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            p = density.float()(x, observed)
        assert p.dtype == torch.float32
        assert p.log_prob(x).isfinite().all()


# Bad input ---------------------------------------------------------------------------------------------------------


def test_bad_data_for_em(values_are_checked: None) -> None:
    x, observed = torch.rand(20, 1, 4, 4), torch.ones(20, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="x must hold at least as many images as components, 30, got 20"):
        SMFA(30, 1).fit(x, observed)
    blank = observed.clone()
    blank[7] = False
    with pytest.raises(ValueError, match="observed must show at least one pixel of every image, got none of image 7"):
        SMFA(2, 1).fit(x, blank)
    never = observed.clone()
    never[:, :, 2, 3] = False
    with pytest.raises(
        ValueError,
        match=r"observed must show every pixel in at least one image, got 1 that are never seen, the first at \(channel, row, column\) \(0, 2, 3\)",
    ):
        SMFA(2, 1).fit(x, never)
    with pytest.raises(ValueError, match="x must be finite wherever it is observed, got nan"):
        SMFA(2, 1).fit(x * math.nan, observed)
    with pytest.raises(TypeError, match="observed must be a bool tensor beside images, got None"):
        SMFA(2, 1).fit(x)
    with pytest.raises(TypeError, match="observed must be None where x yields batches"):
        SMFA(2, 1).fit([(x, observed)], observed)
    with pytest.raises(ValueError, match="x must hold at least one image, got none"):
        SMFA(2, 1).fit([])
    with pytest.raises(ValueError, match=r"x must hold images of one shape, \(1, 4, 4\), got"):
        SMFA(2, 1).fit([(x, observed), (x[:, :, :3], observed[:, :, :3])])
    with pytest.raises(ValueError, match="noise_floor must lie strictly between 0 and 1, got 0"):
        SMFA(2, 1).fit(x, observed, noise_floor=0)


def test_bad_densities() -> None:
    x, observed = torch.rand(2, 1, 4, 4), torch.ones(2, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match=r"this SMFA has no parameters yet; call fit\(x, observed\) first"):
        SMFA(2, 1)(x, observed)
    with pytest.raises(ValueError, match=r"x must hold images of \(1, 5, 5\), as this SMFA was fitted to, got"):
        SMFA(2, 1, shape=(1, 5, 5))(x, observed)
    with pytest.raises(ValueError, match="x must have the 3 channels of this density, got"):
        ConvDMFA(3)(x, observed)
    with pytest.raises(ValueError, match=r"x must hold images of \(1, 5, 5\), as this density was made for, got"):
        LinearDMFA((1, 5, 5))(x, observed)
    with pytest.raises(ValueError, match="components must be an integer of at least 1, got 0"):
        ConvDMFA(3, components=0)
    with pytest.raises(ValueError, match="rank must be an integer of at least 0, got -1"):
        SMFA(2, -1)
    with pytest.raises(ValueError, match="depths must be positive, one for each of the widths .* 5 for 3 widths, got"):
        ConvDMFA(3, depths=(1, 2))
    with pytest.raises(ValueError, match=r"shape must be \(channels, height, width\), got"):
        LinearDMFA((28, 28))
    with pytest.raises(ValueError, match="observed must show every channel somewhere, got none of channel 0"):
        ConvDMFA(1).calibrate(x, ~observed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SMFA(2, True), "rank must be an integer of at least 0, got True"),
        (lambda: SMFA(2, 1, shape=3), r"shape must be \(channels, height, width\), got 3"),
        (lambda: SMFA(2, 1, shape=(1, 0, 3)), "height must be an integer of at least 1, got 0"),
        (lambda: SMFA(10**9, 10**9, shape=(1, 5, 5)), "components and rank must make at most .* parameters"),
        (lambda: LinearDMFA(28), r"shape must be \(channels, height, width\), got 28"),
        (lambda: LinearDMFA((3, 500, 500)), "shape must be that of small images, .* use ConvDMFA"),
        (lambda: ConvDMFA(3, widths=8), "widths must be a tuple of integers of at least 1, got 8"),
        (lambda: ConvDMFA(3, widths=()), "widths must be a tuple of integers of at least 1"),
        (lambda: ConvDMFA(3, widths=(8, "a", 8)), "widths must be a tuple of integers of at least 1"),
        (lambda: ConvDMFA(3, depths=(1, 1, 0, 1, 1)), "depths must be a tuple of integers of at least 1"),
        (lambda: ConvDMFA(10**12), "channels, components and rank must make a layer of ordinary size"),
    ],
)
def test_bad_arguments_of_densities(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_arguments_of_em() -> None:
    x, observed = torch.rand(20, 1, 4, 4), torch.ones(20, 1, 4, 4, dtype=torch.bool)
    for option, value in (
        ("iterations", 0),
        ("tolerance", math.nan),
        ("tolerance", "x"),
        ("minibatch", 0),
        ("seed", 1.5),
    ):
        with pytest.raises(ValueError, match=f"{option} must be a"):
            SMFA(2, 1).fit(x, observed, **{option: value})
    with pytest.raises(TypeError, match=r"on_iteration must be a function of \(number, log-likelihood\), got 3"):
        SMFA(2, 1).fit(x, observed, on_iteration=3)
    with pytest.raises(TypeError, match="x must yield its batches anew each time it is iterated, .* got a generator"):
        SMFA(2, 1).fit((x, observed) for _ in range(2))
    for data in (3, None, "images", x.cpu().numpy(), {"x": x}):
        with pytest.raises(
            TypeError, match=r"x must be images \(N, C, H, W\), or yield batches \(x, observed\), got a"
        ):
            SMFA(2, 1).fit(data)
    with pytest.raises(TypeError, match=r"x must yield pairs \(x, observed\), got a float"):
        SMFA(2, 1).fit([x])
    with pytest.raises(RuntimeError, match=r"this SMFA is not being fitted; call begin\(x, observed\) first"):
        SMFA(2, 1, shape=(1, 4, 4)).iterate(x, observed)
    fitted = SMFA(2, 1).fit(x, observed, iterations=2)
    with pytest.raises(ValueError, match=r"x must hold images of \(1, 4, 4\), got"):
        fitted.iterate(x[:, :, 1:], observed[:, :, 1:])
    with pytest.raises(ValueError, match=r"tensors must be those of SMFA.resumable"):
        fitted.resume(x, {"em.logits": torch.zeros(2)}, [], 0.1)


def test_one_small_image_in_training_mode_is_refused_in_words() -> None:
    density, x = ConvDMFA(1, rank=1), torch.rand(1, 1, 4, 4)
    with pytest.raises(
        ValueError, match=r"x must hold several images of this size in training mode, .*density.eval\(\)"
    ):
        density(x, x > 0.5)
    assert density.eval()(x, x > 0.5).shape == x.shape
    assert density.train()(torch.rand(1, 1, 5, 4), torch.rand(1, 1, 5, 4) > 0.5).shape == (1, 1, 5, 4)


# Devices, types and modes ------------------------------------------------------------------------------------------


def densities() -> dict[str, nn.Module]:
    x, observed = torch.rand(20, 2, 7, 10), torch.rand(20, 1, 7, 10) < 0.9
    linear, convolutional = networks(2, 2)
    return {"linear": linear, "convolutional": convolutional, "em": SMFA(2, 2).fit(x, observed, iterations=2)}


@pytest.mark.parametrize("name", densities())
def test_where_everything_is_is_said_in_one_sentence(name: str) -> None:
    density = densities()[name].eval()
    device = next(density.buffers()).device
    x, observed = torch.rand(2, 2, 7, 10), torch.rand(2, 1, 7, 10) < 0.6
    for images, seen, module in (
        (x.to("meta"), observed, density),
        (x, observed.to("meta"), density),
        (x, observed, copy.deepcopy(density).to("meta")),
    ):
        with pytest.raises(ValueError, match="x, observed and the density must be on one device, got x on") as error:
            module(images, seen)
        where = next(module.buffers()).device
        assert str(error.value).endswith(f"x on {images.device}, observed on {seen.device} and the density on {where}")
    assert density(x, observed).device == device


@pytest.mark.parametrize("name", densities())
@pytest.mark.parametrize("images", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [torch.float64, torch.float32])
def test_images_in_another_type_than_the_density(name: str, images: torch.dtype, own: torch.dtype) -> None:
    """The MFA has the type of the images, or of the density where that of the images is half precision."""
    density = densities()[name].eval().to(own)
    x, observed = torch.rand(2, 2, 7, 10).to(images), torch.rand(2, 1, 7, 10) < 0.6
    p = density(x.masked_fill(~observed, math.nan), observed)
    assert p.dtype == (images if images.itemsize >= 4 else own)
    seen = observed.expand(x.shape)
    assert torch.equal(p.mean[seen], x[seen].to(p.dtype))
    same = density(x.to(own), observed)
    torch.testing.assert_close(p.mean, same.mean.to(p.dtype), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(p.variance, same.variance.to(p.dtype), rtol=1e-4, atol=1e-4)
    filled = impute.by_density(density)(x, observed)
    assert filled.dtype == images
    assert torch.equal(filled[seen], x[seen])


@pytest.mark.parametrize("mode", [True, False])
def test_em_leaves_device_type_and_mode_as_they_were(mode: bool) -> None:
    """A module with parameters keeps them where they are; a fresh one follows the images."""
    x, observed = torch.rand(20, 1, 4, 4, dtype=torch.float32), torch.rand(20, 1, 4, 4) < 0.9
    device = x.device
    density = SMFA(2, 1, shape=(1, 4, 4)).double().train(mode)
    fitted = density.fit(x.cpu(), observed.cpu(), iterations=3)
    assert fitted is density
    assert fitted.training == mode
    assert (fitted.means.dtype, fitted.means.device) == (torch.float64, device)
    again = SMFA(2, 1).fit(x, observed, iterations=3)
    assert (again.means.dtype, again.means.device) == (torch.float32, device)
    torch.testing.assert_close(fitted.means.float(), again.means)
    batches = [(x[:10].cpu(), observed[:10].cpu()), (x[10:].cpu(), observed[10:].cpu())]
    assert SMFA(2, 1, shape=(1, 4, 4)).fit(batches, iterations=2).means.device == device
    assert SMFA(2, 1).fit(x.half(), observed, iterations=2).means.dtype == torch.float32
    assert SMFA(2, 1).fit(x.requires_grad_(), observed, iterations=2).means.grad_fn is None


def test_em_goes_on_where_it_was(tmp_path: Path) -> None:
    x, observed = torch.rand(30, 1, 4, 4), torch.rand(30, 1, 4, 4) < 0.9
    whole = SMFA(2, 1)
    whole.begin(x, observed)
    for _ in range(3):
        whole.iterate(x, observed)
    kept, history, floor = whole.resumable(), list(whole.history), whole.floor
    other = SMFA(2, 1)
    other.resume(x, kept, history, floor)
    for density in (whole, other):
        density.iterate(x, observed)
    assert whole.history == other.history
    assert torch.equal(whole.noise, other.noise)
    assert whole.gain() == other.gain()


@pytest.mark.parametrize("kind", ["channels_last", "expanded", "strided"])
def test_the_layout_of_images_does_not_matter(kind: str) -> None:
    x, observed = torch.rand(4, 2, 7, 10), torch.rand(4, 1, 7, 10) < 0.6
    odd = {
        "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "expanded": lambda t: t[:1].expand(4, -1, -1, -1),
        "strided": lambda t: t.mT.contiguous().mT,
    }[kind]
    dense = odd(x).contiguous(), odd(observed).contiguous()
    for density in densities().values():
        p, q = density.eval()(odd(x), odd(observed)), density(*dense)
        torch.testing.assert_close(p.mean, q.mean)
        torch.testing.assert_close(p.variance, q.variance)

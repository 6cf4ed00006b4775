"""Accuracy, likelihood, calibration and abstention against direct computation; draws of a density; Holm's correction."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from misconv import MFA, MisConv2d
from misconv.paper.completions import Sampled, draw_completion, draw_factors, mean_log
from misconv.paper.measures import BINS, abstention, log_probabilities, measures
from misconv.paper.networks import DeviationReLU, relu_moments
from misconv.paper.scores import Margin, holm
from tests.reference import random_mfa

SHAPE = (2, 5, 4)


def some(count: int = 200, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logs = (2 * torch.randn(count, classes, generator=generator)).log_softmax(1)
    return logs, torch.randint(classes, (count,), generator=generator)


def test_measures_are_what_they_are_called() -> None:
    logs, labels = some()
    found = measures(logs, labels)
    confidence, answers = logs.exp().max(1)
    right = [int(a) == int(t) for a, t in zip(answers, labels, strict=True)]
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))
    assert found["nll"] == pytest.approx(-sum(float(row[t]) for row, t in zip(logs, labels, strict=True)) / len(labels))
    bins: dict[int, list[tuple[float, bool]]] = {}
    for c, r in zip(confidence.tolist(), right, strict=True):
        bins.setdefault(math.ceil(c * BINS), []).append((c, r))
    gaps = [abs(sum(c for c, _ in each) - sum(r for _, r in each)) for each in bins.values()]
    assert found["ece"] == pytest.approx(sum(gaps) / len(right), abs=1e-6)
    order = sorted(range(len(right)), key=lambda i: -float(confidence[i]))
    wrong = [not right[i] for i in order]
    assert found["abstention"] == pytest.approx(sum(sum(wrong[:n]) / n for n in range(1, len(wrong) + 1)) / len(wrong))


def test_who_knows_when_it_errs_loses_less_by_abstaining() -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    knows = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]]).log()
    does_not = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.1, 0.9], [0.2, 0.8]]).log()
    assert abstention(knows, labels) == pytest.approx((0 + 0 + 1 / 3 + 2 / 4) / 4)
    assert abstention(does_not, labels) == pytest.approx((1 + 1 + 2 / 3 + 2 / 4) / 4)


def test_probabilities_are_asked_for_in_parts_and_in_evaluation_mode() -> None:
    x, network = torch.randn(7, 3), nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    logs = log_probabilities(network, lambda rows: x[rows], 7, torch.device("cpu"), chunk=3)
    torch.testing.assert_close(logs, network.eval()(x).log_softmax(1), check_dtype=False)


@pytest.mark.parametrize("components", [1, 3])
def test_draws_have_the_moments_of_the_density(components: int) -> None:
    observed = torch.rand(2, 1, 5, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    p = random_mfa(2, components, 2, SHAPE, observed)
    many = MFA(
        *(t.repeat(4000, *(1,) * (t.dim() - 1)) for t in (p.logits, p.means, p.factors, p.noise)),
        observed.repeat(4000, 1, 1, 1),
    )
    generator = torch.Generator().manual_seed(0)
    for draw in (draw_completion, draw_factors):
        drawn = draw(many, generator)
        means = drawn.mean.view(4000, 2, *SHAPE)
        variance = means.var(0) + drawn.variance.view(4000, 2, *SHAPE).mean(0)
        spread = p.variance.max().sqrt()
        torch.testing.assert_close(means.mean(0), p.mean, atol=float(0.1 * spread), rtol=0)
        torch.testing.assert_close(variance, p.variance, atol=float(0.15 * spread**2), rtol=0.1)
        assert torch.equal(means[5].where(observed, 0), p.mean.where(observed, 0))
    assert drawn.factors.shape[2] == 0


def test_answers_are_averaged_over_the_same_draws_every_time() -> None:
    p = random_mfa(2, 1, 2, SHAPE, torch.rand(2, 1, 5, 4) < 0.5)

    class Sums(nn.Module):
        def forward(self, q: MFA) -> torch.Tensor:
            return q.mean.sum((2, 3))

    network = Sampled(Sums(), draw_completion, samples=3).eval()
    generator = torch.Generator().manual_seed(0)
    draws = [Sums()(draw_completion(p, generator)).softmax(1) for _ in range(3)]
    expected = (sum(draws) / 3).log()
    torch.testing.assert_close(network(p), expected)
    assert torch.equal(network(p), network(p))
    assert not torch.equal(network.train()(p), network(p))
    torch.testing.assert_close(mean_log([d.log() for d in draws]), expected)


def test_moments_of_a_rectified_normal() -> None:
    mean, variance = torch.tensor([-2.0, 0.0, 0.3, 4.0]), torch.tensor([0.5, 1.0, 2.0, 0.0])
    first, second = relu_moments(mean, variance)
    drawn = (mean + variance.sqrt() * torch.randn(400_000, 4, generator=torch.Generator().manual_seed(0))).relu()
    torch.testing.assert_close(first, drawn.mean(0), atol=5e-3, rtol=0)
    torch.testing.assert_close(second, drawn.square().mean(0), atol=2e-2, rtol=0)


def test_the_deviation_enters_through_a_convolution_that_starts_at_zero() -> None:
    p = random_mfa(2, 2, 2, SHAPE, torch.rand(2, 1, 5, 4) < 0.6)
    layer = DeviationReLU(2, 3)
    plain = MisConv2d(2, 3, 3, padding=1, activation="relu")
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if not name.startswith("mix")})
    torch.testing.assert_close(layer(p), plain(p))
    layer.mix.weight.data.fill_(0.5)
    out = layer(p)
    assert (out >= plain(p)).all()
    assert not torch.equal(out, plain(p))
    out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_holm_corrects_from_the_smallest_on() -> None:
    ps = (0.2, 0.004, None, 0.03, 0.02)
    found = [each.p for each in holm([Margin("a", "b", 1.0, 5, p) for p in ps])]
    assert found == [pytest.approx(0.2), pytest.approx(0.016), None, pytest.approx(0.06), pytest.approx(0.06)]
    assert [each.p for each in holm([Margin("a", "b", 1.0, 5, p) for p in (0.6, 0.7)])] == [1.0, 1.0]

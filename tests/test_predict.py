from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import misconv
from misconv import MFA, MisConv2d
from misconv.predict import predictive
from tests.reference import random_mfa


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = MisConv2d(2, 4, 3), nn.Linear(64, 3)

    def forward(self, p: MFA) -> Tensor:
        out: Tensor = self.last(self.first(p).flatten(1))
        return out


def test_complete_images_leave_no_doubt_to_missing_pixels() -> None:
    network, x = Network(), torch.randn(5, 2, 6, 6)
    result = predictive(network, MFA.point(x), samples=4)
    torch.testing.assert_close(result.probabilities, network(MFA.point(x)).softmax(1).detach())
    assert (result.variance == 0).all()
    assert (result.share == 0).all()


def test_the_law_of_total_variance() -> None:
    """Against the plain formulas on the same completions."""
    network, p = Network(), random_mfa(3, 2, 2, (2, 6, 6), torch.rand(3, 1, 6, 6) < 0.5)
    device = torch.get_default_device()
    result = predictive(network, p, samples=50, generator=torch.Generator(device).manual_seed(1))
    generator = torch.Generator(device).manual_seed(1)
    drawn = torch.stack([p.sample(1, generator=generator)[0] for _ in range(50)])
    with torch.no_grad():
        q = torch.stack([network(MFA.point(x)).softmax(1) for x in drawn])  # (S, B, classes)
    mean = q.mean(0)
    torch.testing.assert_close(result.probabilities, mean)
    torch.testing.assert_close(result.variance, q.var(0, correction=0))
    within = (q * (1 - q)).mean(0)
    torch.testing.assert_close(within + result.variance, mean * (1 - mean))
    torch.testing.assert_close(result.share, 1 - within / (mean * (1 - mean)))
    torch.testing.assert_close(result.probabilities.sum(1), torch.ones(3))


def test_more_missing_pixels_more_doubt() -> None:
    network, shape = Network(), (2, 6, 6)
    share = []
    for seen in (0.95, 0.5, 0.0):
        observed = torch.rand(20, 1, 6, 6, generator=torch.Generator(torch.get_default_device()).manual_seed(0)) < seen
        share.append(predictive(network, random_mfa(20, 1, 2, shape, observed), samples=64).share.mean())
    assert share[0] < share[1] < share[2]


def test_bad_arguments() -> None:
    p = random_mfa(2, 1, 1, (2, 6, 6))
    with pytest.raises(TypeError, match="p must be a misconv.MFA, which a density gives"):
        predictive(Network(), torch.zeros(2, 2, 6, 6))
    with pytest.raises(ValueError, match="samples must be an integer of at least 1, got 0"):
        predictive(Network(), p, samples=0)
    with pytest.raises(ValueError, match=r"network must return logits \(B, classes\), with B = 2, got"):
        predictive(lambda p: p.mean, p)
    with pytest.raises(ValueError, match=r"network must return logits \(B, classes\), with B = 2, got"):
        predictive(lambda p: torch.zeros(3, 4), p)
    with pytest.raises(TypeError, match="network must be a module or function MFA -> logits"):
        predictive(3, p)
    with pytest.raises(TypeError, match="generator must be a torch.Generator or None, got 3"):
        predictive(Network(), p, generator=3)


def test_the_share_of_doubt_holds_for_tiny_probabilities() -> None:
    """A class of probability 1e-13 that hangs on one missing pixel: all of its doubt is due to that pixel."""
    ones = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    p = MFA(torch.zeros(1, 1, dtype=torch.float64), 0 * ones, torch.zeros(1, 1, 0, 1, 1, 1, dtype=torch.float64), ones)
    result = predictive(lambda q: torch.stack([0 * q.mean.flatten(), 0.5 * q.mean.flatten() - 30], 1), p, 64)
    doubt = result.probabilities * (1 - result.probabilities)
    torch.testing.assert_close(result.share, result.variance / doubt, rtol=1e-9, atol=0)
    assert (result.share > 0).all()
    sure = predictive(lambda q: torch.tensor([[0.0, -1e4]]), p, 4)
    assert sure.share.tolist() == [[0.0, 0.0]]


def test_a_network_is_asked_in_evaluation_mode_and_left_as_it_was() -> None:
    """Dropout is no doubt about missing pixels, and statistics of batch normalizations do not move."""
    stem, pool = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*stem, *pool, nn.Dropout(0.5), nn.Linear(4, 3))
    network = misconv.convert(model, misconv.UNetDMFA(channels=2)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    result = predictive(network, MFA.point(torch.rand(5, 2, 6, 6)), 8)
    assert result.share.max() < 1e-12
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_a_network_without_an_answer_has_no_share() -> None:
    result = predictive(lambda p: torch.full((2, 3), torch.nan), MFA.point(torch.rand(2, 1, 4, 4)), 3)
    assert result.share.isnan().all()
    counts = iter((3, 4))
    with pytest.raises(ValueError, match="logits of the same classes every time, 3, got"):
        predictive(lambda p: torch.zeros(2, next(counts)), MFA.point(torch.rand(2, 1, 4, 4)), 2)


def test_images_that_are_too_small_for_a_converted_network_are_called_by_their_name() -> None:
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    converted = misconv.convert(network, misconv.UNetDMFA(channels=2))
    with pytest.raises(
        ValueError, match="p must be a misconv.MFA, or images that the network takes: x must be at least"
    ):
        predictive(converted, torch.rand(2, 2, 2, 2))

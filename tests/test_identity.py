"""What a training is: descriptions that tell apart what differs, and nothing else."""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv import MFA, SMFA, ConvDMFA, LinearDMFA, missing
from misconv._train.identity import difference, fingerprint, identify, identify_data, identify_module
from tests.processes import run


def other(module: nn.Module, wanted: nn.Module) -> str | None:
    """In words, after a way through a file."""
    return difference(json.loads(json.dumps(identify_module(module))), identify_module(wanted))


class Net(nn.Module):
    def __init__(self, activation: Any = F.relu, slope: float = 0.1, **more: Any) -> None:
        super().__init__()
        self.layer, self.activation, self.slope = nn.Linear(2, 2), activation, slope
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.layer(x)) * self.slope
        return out


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        """The same shapes of all tensors."""
        return super().forward(2 * x)


def dense(heads: int) -> nn.Module:
    return nn.MultiheadAttention(8, heads)


def transformer(activation: str) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, activation=activation)


def conv(**changes: Any) -> ConvDMFA:
    return ConvDMFA(1, rank=1, **({"widths": (4,), "depths": (1,)} | changes))


def with_activation(activation: nn.Module) -> ConvDMFA:
    density = conv()
    density.features[1] = activation
    return density


PAIRS: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = [
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), lambda: nn.Sequential(nn.Linear(2, 2), nn.GELU()), "its 1.class is 'ReLU' and not 'GELU'"),
    (lambda: nn.LeakyReLU(0.1), lambda: nn.LeakyReLU(0.2), "its negative_slope is 0.1 and not 0.2"),
    (lambda: nn.GELU(), lambda: nn.GELU(approximate="tanh"), "its approximate is 'none' and not 'tanh'"),
    (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2), "its p is 0.1 and not 0.2"),
    (lambda: nn.Conv2d(1, 1, 3, padding=1), lambda: nn.Conv2d(1, 1, 3, padding=0), "its _reversed_padding_repeated_twice.0 is 1 and not 0"),
    (lambda: nn.Conv2d(1, 1, 3, stride=1), lambda: nn.Conv2d(1, 1, 3, stride=2), "its stride.0 is 1 and not 2"),
    (lambda: nn.Conv2d(1, 1, 3, padding_mode="zeros"), lambda: nn.Conv2d(1, 1, 3, padding_mode="reflect"), "its padding_mode is 'zeros' and not 'reflect'"),
    (lambda: nn.BatchNorm2d(2, eps=1e-5), lambda: nn.BatchNorm2d(2, eps=1e-3), "its eps is 1e-05 and not 0.001"),
    (lambda: nn.BatchNorm2d(2, momentum=None), lambda: nn.BatchNorm2d(2), "its momentum is None and not 0.1"),
    (lambda: dense(2), lambda: dense(4), "its head_dim is 4 and not 2"),
    (lambda: transformer("relu"), lambda: transformer("gelu"), "its activation is 'relu' and not 'gelu'"),
    (conv, lambda: conv(noise_floor=1e-2), "its noise_floor is 0.001 and not 0.01"),
    (conv, lambda: with_activation(nn.SiLU()), "its features.1.class is 'ReLU' and not 'SiLU'"),
    (lambda: SMFA(2, 1), lambda: SMFA(2, 2), "its rank is 1 and not 2"),
    (lambda: conv(), lambda: LinearDMFA((1, 8, 8), rank=1), "its class is 'ConvDMFA' and not 'LinearDMFA'"),
    (Net, lambda: Net(torch.tanh), "its activation is 'relu' and not 'tanh'"),
    (Net, lambda: Net(slope=0.2), "its slope is 0.1 and not 0.2"),
    (Net, Twice, "its class is 'Net' and not 'Twice'"),
    (lambda: Net(lambda x: x), lambda: Net(lambda x: -x), "its activation.1 is '.*' and not '.*'"),
    (lambda: Net(functools.partial(F.leaky_relu, negative_slope=0.1)), lambda: Net(functools.partial(F.leaky_relu, negative_slope=0.3)), "its activation.1.1 is 0.1 and not 0.3"),
    (lambda: Net(kernel=torch.ones(2)), lambda: Net(kernel=torch.zeros(2)), "its kernel is '.*' and not '.*'"),
    (lambda: Net(sizes={"a": [1, 2]}), lambda: Net(sizes={"a": [1, 3]}), "its sizes.a.1 is 2 and not 3"),
    (lambda: Net(scale=math.nan), lambda: Net(scale=math.inf), "its scale is 'nan' and not 'inf'"),
    (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), "it has no 1"),
    (lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), lambda: nn.Sequential(nn.ReLU()), "it has one more 1"),
    (lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2).requires_grad_(False), "its frozen is of length 0 and not 2"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "wanted", "message"), PAIRS, ids=[message for *_, message in PAIRS])
def test_modules_that_differ(found: Callable[[], nn.Module], wanted: Callable[[], nn.Module], message: str) -> None:
    """And the same ones do not, whatever their parameters are."""
    for make in (found, wanted):
        assert other(make(), make()) is None
    said = other(found(), wanted())
    assert said is not None
    assert re.fullmatch(message, said), said
    assert len(said) < 250


def test_what_does_not_matter() -> None:
    """Where a module is, its mode, what it has computed, gradients, names of nothing."""
    used, fresh = Net(_cache=None), Net(_cache=None)
    used(torch.ones(1, 2)).sum().backward()
    used._cache = {"a": torch.ones(3)}
    used.eval()
    assert other(used, fresh) in (None, "it has no _cache")
    x, observed = torch.rand(9, 1, 4, 4), torch.rand(9, 1, 4, 4) > 0.2
    assert other(SMFA(2, 1).fit(x, observed, iterations=2), SMFA(2, 1)) is None


def identities(folder: Path, names: list[str]) -> dict[str, Any]:
    """Of the classes `Net` of some modules in a folder, after a way through a file."""
    sys.path.insert(0, str(folder))
    found = {name: identify_module(importlib.import_module(name).Net()) for name in names}
    return dict(json.loads(json.dumps(found)))


def test_a_class_is_known_by_what_it_does(tmp_path: Path) -> None:
    """In another process, from another file, with another comment; but not with another forward."""
    text = "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        {}\n        return {}\n"
    variants = {
        "a": ("'''About.'''", "x + 1"),
        "b": ("# a comment\n\n        '''Other words.'''", "x + 1"),
        "c": ("pass", "x + 2"),
    }
    for name, parts in variants.items():
        (tmp_path / f"{name}.py").write_text(text.format(*parts))
    found: dict[str, Any] = {}
    for names in (["a"], ["b", "c"]):
        found |= run(identities, tmp_path, names)
    assert difference(found["a"], found["b"]) is None
    assert "its code is" in str(difference(found["a"], found["c"]))


def test_modules_that_know_each_other() -> None:
    """As plain attributes, in a circle."""
    child, parent = Net(), Net()
    object.__setattr__(child, "parent", parent)
    child.__dict__["family"] = [child, parent]
    parent.child = child
    assert len(json.dumps(identify_module(parent))) < 100_000
    assert other(parent, parent) is None


def test_functions_by_name_code_and_closure() -> None:
    def closure(value: float) -> Callable[[float], float]:
        return lambda x: x + value

    assert identify(closure(1.0)) == identify(closure(1.0)) != identify(closure(2.0))
    assert identify(missing.square) == "square"
    assert identify(functools.partial(missing.noise, fraction=0.5)) != identify(
        functools.partial(missing.noise, fraction=0.6)
    )
    assert "0x" not in json.dumps(identify([closure(1.0), object(), nn.ReLU(), torch.float32, max]))


# Data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64],
)  # fmt: skip
def test_a_fingerprint_tells_values_places_shapes_and_types(dtype: torch.dtype) -> None:
    x = (torch.arange(24).view(2, 3, 4) % 7 > 2).to(dtype)
    changed = x.clone()
    changed[1, 2, 3] = 0 if changed[1, 2, 3] else 1
    many = [x, changed, x.flip(0), x.view(3, 2, 4), x.to(torch.complex128), x[:1]]
    assert len({fingerprint(each) for each in many}) == len(many)
    assert fingerprint(x) == fingerprint(x.clone()) == fingerprint(x.mT.contiguous().mT)
    assert fingerprint(x, x) != fingerprint(x)


def test_a_fingerprint_of_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, in whatever parts it is computed."""
    x = torch.randn(200)
    whole = fingerprint(x)
    monkeypatch.setattr("misconv._train.identity._CHUNK", 7)
    assert fingerprint(x) == whole
    assert len({fingerprint(x.roll(n)) for n in range(200)}) == 200
    assert fingerprint(torch.zeros(0)) != fingerprint(torch.zeros(0, 2))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e20, 0.0])
def test_what_lies_under_holes_is_not_read(poison: float) -> None:
    x, observed = torch.randn(3, 2, 4, 4), torch.rand(3, 1, 4, 4) > 0.5
    changed = x.masked_fill(~observed, poison)
    assert identify_data((x, observed)) == identify_data((changed, observed))
    assert identify_data(((x, observed), None)) == identify_data(((changed, observed), None))
    assert identify_data((x, observed)) != identify_data((x, ~observed))
    assert identify_data((x, observed)) != identify_data((x.masked_fill(observed, 0.5), observed))
    noise = torch.rand(3, 1, 2, 4, 4)
    p = [MFA(torch.zeros(3, 1), x.unsqueeze(1), noise.unsqueeze(2).masked_fill(observed[:, None, None], v), noise.masked_fill(observed[:, None], v), observed) for v in (0.0, poison)]  # fmt: skip
    assert identify_data(p[0]) == identify_data(p[1])
    assert identify_data(p[0]) != identify_data(MFA.point(x))


def test_nan_is_nan() -> None:
    """Images of which NaN marks the holes: their payload is of no account, their places are."""
    x = torch.tensor([1.0, math.nan, 2.0, math.nan], dtype=torch.float64)
    odd = x.clone()
    odd.view(torch.int64)[1] += 5
    assert odd[1].isnan()
    assert fingerprint(x) == fingerprint(odd)
    assert fingerprint(x) != fingerprint(x.flip(0))

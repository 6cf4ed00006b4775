"""The usual stem is followed in few steps: with the results of the many steps that follow everything else, to the bit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from misconv import MFA
from misconv._convert import follow
from misconv.convert import Converted, convert
from tests.reference import random_mfa, same
from tests.test_convert_odd import Net

CONVERT = sys.modules["misconv.convert"]  # the function has the name of its module


@contextmanager
def many_steps() -> Iterator[None]:
    """Everything is followed as if nothing was usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CONVERT, "answer", follow.answer)
        yield


@contextmanager
def few_steps() -> Iterator[list[Any]]:
    """The functions that were followed in many steps nevertheless."""
    found: list[Any] = []

    def answer(tracker: Any, func: Any, args: Any, kwargs: Any, ask: Any = follow.answer) -> Any:
        found.append(func)
        return ask(tracker, func, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "answer", answer)
        yield found


def outcome(net: Converted, p: MFA) -> list[Any]:
    """What a call does, in full: its result with strides, its gradients and statistics, or its complaint."""
    net.zero_grad()
    try:
        result = net(p)
        if result.requires_grad:
            result.square().sum().backward()
    except (RuntimeError, ValueError, TypeError) as problem:
        return [type(problem), str(problem)]
    grads = [None if w.grad is None else w.grad.clone() for w in net.parameters()]
    told = (result.dtype, result.stride(), result.is_inference(), result.requires_grad)
    return [told, result.detach(), *grads, *(b.clone() for b in net.buffers())]


def agree(net: Converted, p: MFA) -> list[Any]:
    """Assert that few steps and many do the same; returns what was followed in many steps nevertheless."""
    state = copy.deepcopy(net.state_dict())
    with few_steps() as found:
        ours = outcome(net, p)
    with torch.no_grad():
        for name, value in net.state_dict().items():
            value.copy_(state[name])
    with many_steps():
        theirs = outcome(net, p)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, Tensor):
            assert same(one, other)
        else:
            assert one == other
    return found


def usual(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.act(m.bn(m.conv(x)))
    return y


MODES: dict[str, Callable[[], Any]] = {
    "gradients": nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast(torch.get_default_device().type, torch.bfloat16),
}


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU(inplace=True), nn.SiLU(), nn.Hardswish(inplace=True)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_usual_stem_in_few_steps(mode: str, training: bool, last: bool, act: nn.Module) -> None:
    net = convert(Net(usual, act=act)).train(training)
    net = net.to(memory_format=torch.channels_last) if last else net
    with MODES[mode]():
        assert agree(net, random_mfa(2, 1, 2, (3, 8, 8))) == []


# What is not usual --------------------------------------------------------------------------------------------------


def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.conv(x)
    return m.act(m.bn(y))


def without_norm(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.conv(x)
    return m.act(y)


def activated_image(m: Any, x: Tensor) -> Tensor:
    return usual(m, x) + m.act(x).mean()


def activated_twice(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    return F.relu(F.relu(y, inplace=True) - 1) + F.relu(y)


def full_precision(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    with torch.autocast("cpu", enabled=False):
        return m.act(m.bn(y.to(m.conv.weight.dtype)))


def in_place(m: Any, x: Tensor) -> Tensor:
    x *= 2
    return usual(m, x)


def after_a_look(m: Any, x: Tensor) -> Tensor:
    share = x.mean()
    return usual(m, x) * share


def before_a_look(m: Any, x: Tensor) -> Tensor:
    y = usual(m, x)
    x += 1
    return y * x.mean()


def twice(m: Any, x: Tensor) -> Tensor:
    first = usual(m, x)
    x.mul_(0.5)
    return first + usual(m, x)


def by_name(m: Any, x: Tensor) -> Tensor:
    return F.relu(F.conv2d(input=x, weight=m.conv.weight, stride=2))


def without_padding(m: Any, x: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, m.conv.weight))


def with_lists(m: Any, x: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, m.conv.weight, m.conv.bias, [2, 1], [1, 0], [1, 2], 1))


def read_again(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    F.relu(y, inplace=True)
    return 2 * y


def slope_of_the_mode(m: Any, x: Tensor) -> Tensor:
    return F.leaky_relu(m.bn(m.conv(x)), 0.1 if m.training else 0.3)


def learned_slope(m: Any, x: Tensor) -> Tensor:
    return F.prelu(m.bn(m.conv(x)), m.scale.flatten())


def own_statistics(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(m.conv(x), None, None, training=True).relu()


def two_norms(m: Any, x: Tensor) -> Tensor:
    return m.act(m.bn(m.bn(m.conv(x)) * 2))


def two_convolutions(m: Any, x: Tensor) -> Tensor:
    return usual(m, x) + F.conv2d(x, m.conv.weight, None, (1, 1), (1, 1), (1, 1), 1)


def no_activation(m: Any, x: Tensor) -> Tensor:
    return m.head(m.bn(m.conv(x)))


FORWARDS = [
    *(without_gradients, full_precision, in_place, after_a_look, before_a_look, twice, by_name, without_padding),
    *(with_lists, read_again, slope_of_the_mode, learned_slope, own_statistics, two_norms, two_convolutions),
    *(no_activation, without_norm, activated_image, activated_twice),
]


@pytest.mark.filterwarnings("ignore:besides the convolution", "ignore:no pointwise activation")
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [False, True])
def test_what_a_forward_may_do(forward: Callable[[Any, Tensor], Tensor], mode: str, training: bool) -> None:
    net = convert(Net(forward)).train(training)
    with MODES[mode]():
        agree(net, random_mfa(2, 1, 2, (3, 8, 8)))


def one_channel(layout: str) -> MFA:
    """Images of a single channel, which are contiguous whatever its stride is."""
    x = torch.rand(2, 1, 8, 8)
    x = x.as_strided(x.shape, (64, 1, 8, 1)) if layout == "last" else x
    return MFA(torch.zeros(2, 1), x.unsqueeze(1), torch.rand(2, 1, 2, 1, 8, 8), torch.rand(2, 1, 1, 8, 8))


@pytest.mark.parametrize("layout", ["first", "last"])
def test_one_channel_has_any_stride(layout: str) -> None:
    net = convert(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())).eval()
    assert net.network[0].weight.stride() == (9, 9, 3, 1)
    with torch.no_grad():
        assert agree(net, one_channel(layout)) == []
        assert net(one_channel(layout)).is_contiguous(memory_format=torch.channels_last) == (layout == "last")


def strided(p: MFA) -> MFA:
    means = p.means.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return MFA(p.logits, means, p.factors, p.noise, p.observed)


IMAGES: dict[str, Callable[[], MFA]] = {
    "several components": lambda: random_mfa(2, 3, 2, (3, 8, 8)),
    "several components with other strides": lambda: strided(random_mfa(2, 3, 2, (3, 8, 8))),
    "other strides": lambda: strided(random_mfa(2, 1, 2, (3, 8, 8))),
    "another type": lambda: random_mfa(2, 1, 2, (3, 8, 8)).to(torch.float16),
    "too small": lambda: random_mfa(2, 1, 2, (3, 8, 2)),
}


@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("mode", MODES)
def test_what_images_may_be(images: str, mode: str) -> None:
    net = convert(Net(lambda m, x: usual(m, x), conv=nn.Conv2d(3, 4, 5))).eval()
    with MODES[mode]():
        assert F.conv2d in agree(net, IMAGES[images]())


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_the_images(mode: str) -> None:
    net, found = convert(Net(usual)).eval(), []
    for steps in (nullcontext, many_steps):
        p = random_mfa(2, 1, 2, (3, 8, 8))
        p.means.requires_grad_()
        with steps(), MODES[mode]():
            result = net(p)
        if mode in ("gradients", "autocast"):
            result.sum().backward()
            found.append(p.means.grad)
        else:
            found.append(result)
    assert same(*found)


# What happens after the conversion ----------------------------------------------------------------------------------


def _assign(m: Any) -> None:
    m.conv.weight = nn.Parameter(torch.randn(4, 3, 3, 3))


def _other_size(m: Any) -> None:
    m.conv.weight.data = torch.randn(4, 3, 5, 5)


def _last(m: Any) -> None:
    m.conv.weight.data = m.conv.weight.data.contiguous(memory_format=torch.channels_last)


def _frozen(m: Any) -> None:
    m.requires_grad_(False)


def _hook(m: Any) -> None:
    m.conv.register_forward_hook(lambda module, args, result: result * 1)


def _pre_hook(m: Any) -> None:
    m.conv.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def _replaced(m: Any) -> None:
    m.conv = nn.Conv2d(3, 4, 3, stride=2, padding=(1, 2), dilation=2, bias=False)


def _another_activation(m: Any) -> None:
    m.act = nn.SiLU()


def _no_norm(m: Any) -> None:
    m.bn = nn.Identity()


def _parametrized(m: Any) -> None:
    parametrizations.weight_norm(m.conv)


def _halved(m: Any) -> None:
    m.conv.weight.mul_(0.5)


def _kept(m: Any) -> None:
    m.function = _keeps


def _keeps(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.act(m.bn(y)) + y


def _default(m: Any) -> None:
    m.function = lambda m, x: F.softplus(m.bn(m.conv(x)))


def _elsewhere(m: Any) -> None:
    m.function = lambda m, x: torch.sigmoid(m.bn(m.conv(x)), out=torch.empty(2, 4, 8, 8))


def _by_itself(m: Any) -> None:
    m.function = lambda m, x: F.conv2d(x, x, None, (1, 1), (0, 0), (1, 1), 1).relu()


CHANGES = [
    *(_assign, _other_size, _last, _frozen, _hook, _pre_hook, _replaced, _another_activation, _no_norm),
    *(_parametrized, _halved, _kept),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("training", [False, True])
def test_what_is_done_to_the_network_later(change: Callable[[Any], None], training: bool) -> None:
    net, p = convert(Net(usual)).train(training), random_mfa(2, 1, 2, (3, 8, 8))
    agree(net, p)
    with torch.no_grad():
        change(net.network)
    agree(net, p)
    agree(copy.deepcopy(net).train(not training), p)


@pytest.mark.parametrize(
    ("before", "change"),
    [
        (lambda m, x: F.softplus(m.bn(m.conv(x)), 2.0), _default),
        (lambda m, x: torch.sigmoid(m.bn(m.conv(x))), _elsewhere),
        (lambda m, x: m.conv(x).relu(), _by_itself),
    ],
)
def test_a_forward_that_changes_later(before: Callable[[Any, Tensor], Tensor], change: Callable[[Any], None]) -> None:
    net, p = convert(Net(before)).eval(), random_mfa(2, 1, 2, (3, 8, 8))
    with torch.no_grad():
        agree(net, p)
        change(net.network)
        agree(net, p)


@pytest.mark.parametrize("last", [False, True])
def test_the_same_is_known_of_a_response(last: bool) -> None:
    net, p = convert(Net(usual)).eval(), random_mfa(2, 1, 2, (3, 8, 8))
    net = net.to(memory_format=torch.channels_last) if last else net
    known = []
    for steps in (nullcontext, many_steps):
        with steps():
            _, ((response, _),) = net.run_stem(p)
        convolution = response.convolution
        known.append((convolution.size, convolution.channels_last, convolution.with_gradients, response.steps))
    assert known[0] == known[1] == ((2, 4, 8, 8), last, True, 1)


def test_a_hook_on_all_modules() -> None:
    net, p = convert(Net(usual)).eval(), random_mfa(2, 1, 2, (3, 8, 8))
    agree(net, p)
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (args[0] * 2,) if isinstance(module, nn.Conv2d) else None
    )
    try:
        assert F.conv2d in agree(net, p)
    finally:
        handle.remove()

"""Recorded functions, replayed by C++: the same bits as Python, values and gradients, in everything that graphs of gradients can do."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from misconv import MFA
from misconv._conv import BatchNorm, Convolution, fixed_batch_norm
from misconv._conv.dispatch import plain_normalized, plain_path
from misconv._triton import normalized, operator, replay, score, statistics
from misconv._triton.launch import Launch
from misconv._triton.replay import Replays, replayer
from misconv._triton.trace import Recorder
from tests.reference import random_mfa
from tests.test_compiled import script

CACHES = (
    operator._replays_of,
    normalized._replays_of,
    normalized._fixed_replays_of,
    statistics._replays_of,
    score._replays_of,
)


def stand_in(self: Launch, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Instead of `Launch.describe`, where the interpreter runs kernels: it is called with the pointers that are given."""
    known = [
        None if t is None else (t.dtype, t.untyped_storage().nbytes() - t.storage_offset() * t.element_size())
        for t in tensors
    ]

    def call(*values: int) -> None:
        given = iter(values)
        self.launch([None if k is None else memory(next(given), *k) for k in known])

    types = [*("constexpr" if t is None else "*" for t in tensors), *("constexpr" for _ in self.arguments)]
    return call, 1, 0, types


def memory(address: int, dtype: torch.dtype, number: int) -> Tensor:
    """A tensor over bytes that somebody else owns."""
    if number == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_byte * number).from_address(address), dtype=dtype)


@pytest.fixture(autouse=True)
def _replayed_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is recorded at its second call, also in the interpreter."""
    if "no C++ compiler" in (replay.why_not() or ""):
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(replay, "_WARM_UP", 1)
    if torch.get_default_device().type == "cpu":
        monkeypatch.setattr(replay, "_DEVICES", ("cpu",))
        monkeypatch.setattr(Launch, "describe", stand_in)
    assert replayer(wait=True) is not None, replay.why_not()
    for cached in CACHES:
        cached.cache_clear()
    yield
    for cached in CACHES:
        cached.cache_clear()


def is_replayed(t: Tensor) -> bool:
    assert t.grad_fn is not None
    return "Replayed" in t.grad_fn.name()


def make(components: int = 1, rank: int = 2, planes: int | None = 1) -> MFA:
    observed = None if planes is None else torch.rand(1, planes, 5, 6) > 0.3
    return random_mfa(1, components, rank, (2, 5, 6), observed).to(torch.float32)


def convolve(p: MFA, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """As a layer does, wherever the kernels run."""
    conv = Convolution(weight, bias, **options)
    result = operator.respond(p, conv, None, "relu", plain_path(conv, "relu"))
    assert result is not None
    return result


def normalize(p: MFA, weight: Tensor, bias: Tensor | None, norm: nn.BatchNorm2d, **options: Any) -> Tensor:
    conv = Convolution(weight, bias, **options)
    plain = plain_normalized(conv, norm.eps, "relu")
    result = normalized.normalized_response(p, conv, BatchNorm.of(norm), "relu", plain)
    assert result is not None
    return result


def repeat(function: Callable[[], list[Tensor]], *, exact: bool = True) -> None:
    """In Python, recorded, and replayed, with the same bits; or nearly, where a GPU adds in any order."""
    first = function()
    for _ in range(4):  # the forward pass is recorded in the second of them, the backward pass in the third
        again = function()
    for a, b in zip(first, again, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        if exact or not a.is_cuda:
            assert torch.equal(a.detach(), b.detach())
        else:
            torch.testing.assert_close(a.detach(), b.detach())


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"padding": 1}, "weight, bias"),
    ({"components": 3, "planes": 2}, {"stride": 2}, "weight, bias"),
    ({"planes": None}, {}, "weight"),
    ({"rank": 0}, {"padding": 1}, "means, factors, noise, weight, bias"),
    ({}, {"padding": 1}, "bias"),
    ({}, {"padding": 1, "groups": 2}, "means"),
]


@pytest.mark.parametrize(("density", "options", "learned"), CASES, ids=str)
def test_a_convolution(density: dict[str, Any], options: dict[str, Any], learned: str) -> None:
    p, groups, last = make(**density), options.get("groups", 1), options.get("stride", 1) == 2
    weight = torch.randn(4, 2 // groups, 3, 3, dtype=torch.float32)
    weight = weight.to(memory_format=torch.channels_last) if last else weight
    parts = dict(zip(("logits", "means", "factors", "noise"), p._parameters(), strict=True)) | {
        "weight": weight,
        "bias": torch.randn(4, dtype=torch.float32),
    }
    leaves = {name: t.detach().requires_grad_(name in learned) for name, t in parts.items()}
    wanted = [t for t in leaves.values() if t.requires_grad]
    *q, w, b = leaves.values()
    direction, is_new = None, []

    def step() -> list[Tensor]:
        nonlocal direction
        y = convolve(MFA(*q, p.observed, check=False), w, b, **options)
        direction = torch.randn_like(y) if direction is None else direction
        is_new.append(is_replayed(y))
        return [y, *torch.autograd.grad(y, wanted, direction)]

    repeat(step, exact="means" not in learned)
    assert is_new == [False, False, True, True, True]
    expected = step()[0]
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            assert torch.equal(convolve(p, w, b, **options), expected)


def test_a_gradient_of_another_layout_and_memory_that_is_not_aligned() -> None:
    p, w = make(), torch.randn(4, 2, 3, 3, dtype=torch.float32, requires_grad=True)
    for _ in range(4):
        y = convolve(p, w, None)
        spread = torch.autograd.grad(y, w, torch.ones((), dtype=torch.float32).expand_as(y))[0]
    assert is_replayed(y)
    y = convolve(p, w, None)
    dense = torch.autograd.grad(y, w, torch.ones_like(y))[0]
    torch.testing.assert_close(spread, dense)
    odd = torch.randn(73, dtype=torch.float32)[1:].view(4, 2, 3, 3).requires_grad_()
    y = convolve(p, odd, None)
    assert not is_replayed(y)
    torch.testing.assert_close(y, convolve(p, odd.detach().clone(), None))


def test_batch_normalization_and_its_statistics() -> None:
    p, kept, results = make(), [], []
    start = torch.randn(4, 2, 3, 3, dtype=torch.float32), torch.randn(1, 4, 5, 6, dtype=torch.float32)
    for native in (False, True):
        weight, norm = start[0].clone().requires_grad_(), nn.BatchNorm2d(4, momentum=0.3, dtype=torch.float32)
        normalized._replays_of.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(replay, "_DEVICES", ())
            found = []
            for _ in range(3):
                ys = [normalize(p, weight, None, norm, padding=1) for _ in range(2)]  # two batches before a gradient
                for y in ys:
                    found += [y, *torch.autograd.grad(y, [weight, norm.weight, norm.bias], start[1])]
            assert is_replayed(y) == native
            results.append([*found, norm.running_mean, norm.running_var, norm.num_batches_tracked])
            kept.append((norm.running_mean._version, norm.num_batches_tracked._version))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert kept[0] == kept[1]
    # In evaluation, without gradients.
    norm.eval()
    conv, fixed = Convolution(weight, None, padding=1), None
    affine = fixed_batch_norm(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    assert affine.statistics is not None
    with torch.no_grad():
        for _ in range(4):
            last, fixed = fixed, normalized.fixed_response(p, conv, affine.statistics, "relu")
    assert torch.equal(last, fixed)


def test_log_densities() -> None:
    p, where = make(components=2), torch.rand(1, 1, 5, 6) > 0.5
    x = torch.rand(1, 2, 5, 6, dtype=torch.float32)
    leaves = [t.detach().requires_grad_() for t in p._parameters()]
    from misconv._math import likelihood

    for wanted in (slice(0, 2), slice(0, 1), slice(1, 2)):  # of the two results

        def step(wanted: slice = wanted) -> list[Tensor]:
            made = score.log_probs(
                *leaves, x, where, None, floor=2**-20, plain=(likelihood.log_prob, likelihood.log_prob)
            )
            return [
                *made,
                *torch.autograd.grad(
                    [y.sum() for y in made][wanted], leaves, allow_unused=True, materialize_grads=True
                ),
            ]

        repeat(step)


def test_second_derivatives_come_from_the_plain_path() -> None:
    p, w = make(), torch.randn(4, 2, 3, 3, dtype=torch.float32, requires_grad=True)
    found = []
    for _ in range(4):
        y = convolve(p, w, None)
        (first,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), w)[0])
    assert is_replayed(y)
    torch.testing.assert_close(found[-1], found[0])


def test_what_graphs_of_gradients_promise() -> None:
    """They notice changed tensors, can be used twice if they shall be, and let go of what they keep."""
    p, w = make(), torch.randn(4, 2, 3, 3, dtype=torch.float32, requires_grad=True)
    for _ in range(4):
        convolve(p, w, None).sum().backward()
    y = convolve(p, w, None)
    assert is_replayed(y)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    y = convolve(p, w, None)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = convolve(p, w, None)
    assert any(t is w or t.data_ptr() == w.data_ptr() for t in packed)
    plain = plain_path(Convolution(w, None), "relu")
    gone, tensors = weakref.ref(plain), (*p._parameters(), p.observed, w, None)
    plan = operator.find_plan(p, Convolution(w, None), False, ("relu", 0.0, 0.0))
    assert plan is not None
    y = operator.expected_conv2d(plan, plain, *tensors)
    assert is_replayed(y)
    del plain, y
    gc.collect()
    assert gone() is None


def test_several_threads() -> None:
    """They record and replay at the same time; without kernels, for the interpreter has one thread."""

    def forward(x: Tensor) -> list[Tensor]:
        return [x.sum(0), x.transpose(0, 1).contiguous()]

    def backward(needed: Any, grads: Any, inputs: Any, kept: Any) -> list[Tensor]:
        return [(grads[0].expand_as(inputs[0]).contiguous())]

    replays, device = simple(forward, backward), torch.get_default_device()

    def work(number: int) -> bool:
        right = True
        for size in (3, 4, 5, 6) * 20:
            x = torch.full((size, 4), number, dtype=torch.float32, device=device).requires_grad_()
            y = replays(lambda x: x.sum(0), x)
            (grad,) = torch.autograd.grad(y, x, torch.full_like(y, number))
            right = right and bool((y == number * size).all()) and bool((grad == number).all())
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


# What is recorded ----------------------------------------------------------------------------------------------------


def simple(forward: Callable[..., Sequence[Tensor | None]], backward: Any = None) -> Replays:
    return Replays(forward, backward, torch.get_default_device())


def test_simple_functions_of_torch() -> None:
    """Zeros, sums, copies of another type or layout, and views of what was made or given."""

    def forward(x: Tensor, none: None) -> list[Tensor | None]:
        total = x.sum(0)
        wide = total.to(torch.float64)
        return [wide[1:].view(2, -1), torch.zeros_like(x), x.transpose(0, 1).contiguous(), x[1:], None]

    replays = Replays(forward, lambda *_: (), torch.get_default_device(), results=4)
    for _ in range(5):
        x = torch.randn(3, 5, dtype=torch.float32)
        made = replays(forward, x, None)
        for ours, theirs in zip(made, forward(x, None), strict=False):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()
    assert len({t.data_ptr() for t in made[:3]}) == 3
    assert replays._records == 1
    assert torch.equal(replays(forward, x.double(), None)[0], x.double().sum(0)[1:].view(2, -1))  # another type: anew


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: [x.sin()],
        lambda x: [x.clone().mul_(2)],
        lambda x: [torch.empty_like(x).fill_(float(x.sum()))],
        lambda x: [x.sum(1)],
        lambda x: [torch.cat(x.split(2)) + x],
    ],
)  # fmt: skip
def test_what_is_not_known_stays_in_python(forward: Callable[[Tensor], list[Tensor]]) -> None:
    replays = simple(forward)
    for i in range(6):
        x = torch.full((4, 4), i, dtype=torch.float32)
        assert torch.equal(replays(forward, x), forward(x)[0])


def test_memory_is_given_back_after_its_last_use() -> None:
    x = torch.randn(3, 4, dtype=torch.float32)
    with Recorder([x]) as recorder:
        wide = x.to(torch.float64)
        total = wide.sum(0)
        zeros = torch.zeros(3, dtype=torch.float64)
        result = total[1:].to(torch.float32)
    steps, outputs, constants, slots = recorder.trace([result, zeros[:2]])
    wide, total, zeros, result = range(1, 5)  # type: ignore[assignment]  # their slots, behind that of x
    assert [step[:2] for step in steps] == [
        *(
            ("empty", wide),
            ("copy", wide),
            ("empty", total),
            ("sum", total),
            ("free", wide),
            ("empty", zeros),
            ("zero", zeros),
        ),
        *(("empty", result), ("copy", result), ("free", total)),
    ]
    assert [view[0] for view in outputs] == [result, zeros]
    assert (constants, slots) == ((), 5)


def test_inputs_that_share_their_memory() -> None:
    def forward(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x[1:].clone()]

    replays, whole = simple(forward), torch.arange(32, dtype=torch.float32)
    for i in (0, 8, 8, 16):
        x, y = whole[i : i + 8], whole[8:16]
        assert torch.equal(replays(forward, x, y), x[1:])


def test_a_tensor_that_is_given_twice() -> None:
    """Which of two inputs was read cannot be told then, and the next call may have two."""

    def forward(x: Tensor, y: Tensor) -> list[Tensor]:
        return [y.clone()]

    replays, one = simple(forward), torch.ones(8)
    for _ in range(4):
        assert torch.equal(replays(forward, one, one), one)
    assert torch.equal(replays(forward, one, 2 * one), 2 * one)
    p, w = make(rank=0), torch.randn(4, 2, 3, 3, dtype=torch.float32)
    p = MFA(p.logits, p.means.abs(), p.factors, p.noise, p.observed, check=False)
    same = MFA(p.logits, p.means, p.factors, p.means, p.observed, check=False)  # noise that is the mean, too
    for _ in range(4):
        convolve(same, w, None)
    assert not torch.equal(convolve(p, w, None), convolve(same, w, None))
    with torch.no_grad():
        expected = plain_path(Convolution(w, None), "relu")(*p._parameters(), p.observed, w, None)
    torch.testing.assert_close(convolve(p, w, None), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    """What is computed again in the backward pass is replayed too, with as many saved tensors."""
    p, w = make(), torch.randn(4, 2, 3, 3, dtype=torch.float32, requires_grad=True)
    found = []
    for _ in range(5):
        y = checkpoint(lambda weight: convolve(p, weight, None), w, use_reentrant=reentrant)
        found.append(torch.autograd.grad(y.square().sum(), w)[0] if not reentrant else _leaf_gradient(y, w))
    assert all(torch.equal(found[0], each) for each in found[1:])


def _leaf_gradient(y: Tensor, w: Tensor) -> Tensor:
    """A reentrant checkpoint fills in gradients of leaves alone."""
    w.grad = None
    y.square().sum().backward()
    assert w.grad is not None
    return w.grad.clone()


def test_fixed_statistics_that_learn_are_not_for_these_kernels() -> None:
    p, w, norm = make(), torch.randn(4, 2, 3, 3, dtype=torch.float32), nn.BatchNorm2d(4, dtype=torch.float32).eval()
    mean = torch.zeros(4, dtype=torch.float32, requires_grad=True)
    for learned, served in ((mean, False), (mean.detach(), True)):
        affine = fixed_batch_norm(learned, norm.running_var, None, None, norm.eps)
        assert affine.statistics is not None
        found = normalized.fixed_response(p, Convolution(w, None), affine.statistics, "relu")
        assert (found is not None) == served


def test_a_launch_that_somebody_watches_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    p, w = make(), torch.randn(4, 2, 3, 3, dtype=torch.float32, requires_grad=True)
    for _ in range(3):
        y = convolve(p, w, None)
    assert is_replayed(y)
    monkeypatch.setattr(replay, "is_watched", lambda: True)
    assert not is_replayed(convolve(p, w, None))


def test_an_error_of_python_comes_through() -> None:
    def backward(*_: Any) -> tuple[Tensor, ...]:
        raise ZeroDivisionError("on purpose")

    replays = simple(lambda x: [x.clone()], backward)
    for _ in range(3):
        y = replays(None, torch.ones(4, requires_grad=True))
    assert is_replayed(y)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        y.sum().backward()


# The module --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has not asked for the module yet, and an empty cache; the library that there was."""
    library = Path(replayer().__file__)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    replay._loading.cache_clear()
    yield library
    replay._loading.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler", "no C++ compiler no-such-compiler was found"), ("broken", "sorry: out of order")],
)
def test_where_it_cannot_be_compiled(
    compiler: str, reason: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python goes on, without a word."""
    script(tmp_path / "broken", "echo 'sorry: out of order' >&2; exit 3")
    monkeypatch.setenv("CXX", str(tmp_path / compiler) if compiler == "broken" else compiler)
    replays = simple(lambda x: [x.clone()])
    for _ in range(4):
        x = torch.randn(4)
        assert torch.equal(replays(None, x), x)
    assert reason in str(replay.why_not())
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_it_is_compiled_in_the_background(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody waits for it; here by a compiler that takes what is there already."""
    go = tmp_path / "go"
    wait = f'while [ ! -e {go} ]; do sleep 0.02; done; while [ "$1" != -o ]; do shift; done; cp {fresh} "$2"'
    monkeypatch.setenv("CXX", script(tmp_path / "slow", wait))
    replays = simple(lambda x: [x.clone()], lambda needed, grads, *_: [grads[0].clone()])
    for _ in range(4):
        y = replays(None, torch.ones(4, requires_grad=True))
        assert not is_replayed(y)
    go.touch()
    assert replay.why_not() is None
    for _ in range(2):
        y = replays(None, torch.ones(4, requires_grad=True))
    assert is_replayed(y)
    assert [path.suffix for path in (tmp_path / "cache" / "misconv").iterdir()] == [".so"]

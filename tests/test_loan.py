"""What is trained comes back as it came: device, dtype, mode, gradients; whatever ends the training.

Caller's tensors and modules are on the CPU or on a GPU, where there is one; the training is on either.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from misconv import MFA, SMFA, ConvDMFA, data, fit_density, missing
from misconv._train import session as _session
from misconv._train.loan import borrowed, check_trainable, gpu_of
from misconv.training import fit_classifier

if TYPE_CHECKING:
    from lightning_fabric import Fabric

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


def images(device: str = "cpu", count: int = 48) -> tuple[Tensor, Tensor]:
    x, _ = data.digits()
    observed = missing.square(count, 8, 8, generator=torch.Generator().manual_seed(0))
    return x[:count].to(device), observed.to(device)


def small(device: str = "cpu") -> ConvDMFA:
    torch.manual_seed(0)
    return ConvDMFA(1, rank=2, widths=(8,), depths=(1,)).to(device)


class State:
    """All that must be the same afterwards, and the values."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.objects = list(module.parameters())
        self.found = self.now()
        self.values = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}

    def now(self) -> list[Any]:
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return [
            [(name, t.device, t.dtype, t.requires_grad, None if t.grad is None else t.grad.clone()) for name, t in tensors],
            [(name, part.training, type(part)) for name, part in self.module.named_modules()],
        ]  # fmt: skip

    def check(self, *, changed: bool) -> None:
        tensors, modes = self.now()
        assert [entry[:4] for entry in tensors] == [entry[:4] for entry in self.found[0]]
        for before, after in zip(self.found[0], tensors, strict=True):
            assert (before[4] is None) == (after[4] is None), before[0]
            assert before[4] is None or torch.equal(before[4], after[4])
        assert modes == self.found[1]
        assert all(a is b for a, b in zip(self.objects, self.module.parameters(), strict=True))
        same = [torch.equal(value.cpu(), self.values[name]) for name, value in self.module.state_dict().items()]
        assert (not all(same)) if changed else all(same)


# Devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [None, *DEVICES])
@pytest.mark.parametrize("data_on", DEVICES)
@pytest.mark.parametrize("module_on", DEVICES)
def test_a_density_comes_back_to_its_device(module_on: str, data_on: str, training: str | None) -> None:
    """And can be called with tensors there, as the README does."""
    x, observed = images(data_on)
    fabric = None if training is None else _session.one_device(training)
    density = small(module_on)
    state = State(density)
    fit_density(density, x, observed, epochs=2, fabric=fabric, progress=False)
    state.check(changed=True)
    p = density.eval()(x[:2].to(module_on), observed[:2].to(module_on))
    assert p.mean.device.type == module_on
    assert p.mean.isfinite().all()


@pytest.mark.parametrize("training", [None, *DEVICES])
@pytest.mark.parametrize("data_on", DEVICES)
def test_a_mixture_comes_back_to_the_images(data_on: str, training: str | None) -> None:
    """It has no tensors, and so no device, before it is fitted."""
    x, observed = images(data_on)
    fabric = None if training is None else _session.one_device(training)
    density = SMFA(2, 1)
    fit_density(density, x, observed, epochs=2, fabric=fabric, progress=False)
    assert density(x[:2], observed[:2]).mean.device.type == data_on
    density.iterate(x, observed)  # EM can go on there
    other = SMFA(2, 1, shape=(1, 8, 8)).double()
    home = other.means.device
    fit_density(other, x, observed, epochs=2, fabric=fabric, progress=False)
    assert (other.means.device, other.means.dtype) == (home, torch.float64)


@pytest.mark.parametrize("training", [None, *DEVICES])
@pytest.mark.parametrize("data_on", DEVICES)
@pytest.mark.parametrize("module_on", DEVICES)
@pytest.mark.parametrize("kind", ["tensor", "tuple", "MFA"])
def test_a_classifier_comes_back_to_its_device(kind: str, module_on: str, data_on: str, training: str | None) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rest = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))

        def forward(self, x: Tensor | MFA, observed: Tensor | None = None) -> Tensor:
            images = x.mean if isinstance(x, MFA) else x
            out: Tensor = self.rest(images if observed is None else images * observed)
            return out

    x, observed = images(data_on)
    labels = (torch.arange(len(x)) % 10).to(data_on)
    inputs = {"tensor": x, "tuple": (x, observed), "MFA": MFA.point(x)}[kind]
    network = Network().to(module_on)
    network.rest[0].eval()  # every part has its own mode
    state = State(network)
    fabric = None if training is None else _session.one_device(training)
    held = {"validation_inputs": inputs, "validation_labels": labels}
    fit_classifier(network, inputs, labels, epochs=2, fabric=fabric, progress=False, **held)  # type: ignore[arg-type]
    state.check(changed=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fabric_greets_nobody(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    from lightning_fabric.accelerators import cuda

    cuda._check_cuda_matmul_precision.cache_clear()  # it speaks once
    x, observed = images()
    with caplog.at_level(logging.INFO):
        fit_density(small(), x, observed, epochs=1, progress=False)
    out, err = capfd.readouterr()
    assert "Tensor Cores" not in caplog.text + out + err


def test_fabric_is_quiet_while_it_is_started(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice that it would give on a GPU, through the logger that it would use; other records are not held back."""
    from lightning_fabric import Fabric
    from lightning_utilities.core.rank_zero import rank_zero_info

    launch = Fabric.launch

    def advise(self: Fabric, *args: Any) -> Any:
        rank_zero_info("You are using a CUDA device that has Tensor Cores.")
        return launch(self, *args)

    monkeypatch.setattr(Fabric, "launch", advise)
    with caplog.at_level(logging.INFO):
        _session.one_device("cpu")
        assert caplog.text == ""
        rank_zero_info("something of the user's")
    assert "something of the user's" in caplog.text


# Modes, types, gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning:lightning_fabric")
def test_modes_types_and_gradients(precision: str, training: bool) -> None:
    from lightning_fabric import Fabric

    density = small().train(training)
    density.features[0].eval()
    density.means[-1].requires_grad_(False)
    density.noise[-1].weight.grad = torch.ones_like(density.noise[-1].weight)
    state = State(density)
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)  # type: ignore[arg-type]
    fabric.launch()
    fit_density(density, *images(), epochs=1, fabric=fabric, progress=False)
    state.check(changed=True)
    assert torch.equal(density.means[-1].weight, state.values["means.3.weight"])  # frozen
    density.eval()(*images())


def test_shared_parameters_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.density = small()
            self.again = nn.ModuleList([self.density.means[-1], self.density.features[0]])
            self.calibrate = self.density.calibrate

        def forward(self, x: Tensor, observed: Tensor) -> MFA:
            p = self.density(x, observed)
            assert isinstance(p, MFA)
            return p

    tied = Tied()
    fit_density(tied, *images(), epochs=1, progress=False)
    assert tied.again[0] is tied.density.means[-1]
    alone = small()
    fit_density(alone, *images(), epochs=1, progress=False)
    assert all(torch.equal(v, tied.density.state_dict()[k]) for k, v in alone.state_dict().items())


def test_under_no_grad_and_inference_mode() -> None:
    x, observed = images()
    plain = small()
    history = fit_density(plain, x, observed, epochs=1, progress=False)
    with torch.no_grad():
        assert fit_density(small(), x, observed, epochs=1, progress=False) == history
    with torch.inference_mode():
        inference = x.clone()
    assert fit_density(small(), inference, observed, epochs=1, progress=False) == history
    density = small()
    with torch.inference_mode():
        assert fit_density(density, x, observed, epochs=1, progress=False) == history
    wanted = x.clone().requires_grad_()
    assert fit_density(small(), wanted, observed, epochs=1, progress=False) == history
    assert wanted.grad is None


# Errors and interruptions ------------------------------------------------------------------------------------------


def failing(epoch: int, error: type[BaseException]) -> Any:
    def rate(number: int) -> float:
        if number == epoch:
            raise error("on purpose")
        return 1e-3

    return rate


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_in_the_first_epoch_leaves_no_trace(error: type[BaseException]) -> None:
    """Not even the scale of the images, which is measured before it."""
    density = small().eval()
    state = State(density)
    with pytest.raises(error):
        fit_density(density, *images(), epochs=3, learning_rate=failing(0, error), progress=False)
    state.check(changed=False)

    class Broken(ConvDMFA):
        def forward(self, x: Tensor, observed: Tensor) -> MFA:
            raise error("on purpose")

    broken = Broken(1, rank=1, widths=(4,), depths=(1,))
    state = State(broken)
    with pytest.raises(error):
        fit_density(broken, *images(), epochs=3, progress=False)
    state.check(changed=False)


def test_an_interruption_later_keeps_the_best_so_far() -> None:
    x, observed = images()
    twin, density = small(), small()
    fit_density(twin, x, observed, epochs=2, learning_rate=1e-3, progress=False)
    with pytest.raises(KeyboardInterrupt):
        fit_density(density, x, observed, epochs=5, learning_rate=failing(2, KeyboardInterrupt), progress=False)
    assert density.training
    assert all(torch.equal(v, density.state_dict()[k]) for k, v in twin.state_dict().items())


@pytest.mark.parametrize("rate", [1e20, 1e30])
def test_a_learning_rate_that_is_too_large(rate: float) -> None:
    density = small()
    state = State(density)
    rates = iter([rate] * 600)  # it may survive for a while, but not with better parameters

    def begin() -> None:
        fit_density(density, *images(), epochs=600, learning_rate=lambda epoch: next(rates), progress=False)

    with pytest.raises(FloatingPointError, match="training diverged.*learning_rate"):
        begin()
    assert next(rates, None) is not None
    assert all(value.isfinite().all() for value in density.state_dict().values())
    state.check(changed=any(not torch.equal(v, state.values[k]) for k, v in density.state_dict().items()))


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("call", [0, 1])
def test_an_interrupted_mixture(fitted: bool, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first iteration it stays as it was; later it holds the last one that was finished."""
    x, observed = images()
    density = SMFA(2, 1)
    if fitted:
        density.fit(x / 2, observed, iterations=1)
    before, history = copy.deepcopy(density.state_dict()), list(density.history)
    iterate, calls = SMFA.iterate, 0

    def stop(self: SMFA, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > call:
            raise KeyboardInterrupt
        return iterate(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SMFA, "iterate", stop)
        with pytest.raises(KeyboardInterrupt):
            fit_density(density, x, observed, epochs=3, progress=False)
    if call == 0:
        assert density.history == history
        assert density.state_dict().keys() == before.keys()
        assert all(torch.equal(v, before[k]) for k, v in density.state_dict().items())
    else:
        twin = SMFA(2, 1)
        fit_density(twin, x, observed, epochs=1, progress=False)
        assert all(torch.equal(v, density.state_dict()[k]) for k, v in twin.state_dict().items())


# What is borrowed --------------------------------------------------------------------------------------------------


def test_a_loan_of_mixed_types() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2).double(), "b": nn.BatchNorm1d(3), "c": nn.Linear(1, 1).half()})
    state = State(module)

    def spoil() -> None:
        with borrowed(module, torch.device("cpu")):
            module.bfloat16().eval().requires_grad_(False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spoil()
    state.check(changed=False)


def test_what_cannot_be_trained() -> None:
    with pytest.raises(TypeError, match="density must be a torch.nn.Module, got 3"):
        check_trainable("density", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="density must have values in memory, but its weight has none"):
        check_trainable("density", nn.LazyConv2d(3, 3))
    with pytest.raises(ValueError, match="density must have values in memory, but its weight has none"):
        check_trainable("density", nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="density must have a parameter that requires a gradient, got Linear, none"):
        check_trainable("density", nn.Linear(2, 2).requires_grad_(False))
    for kind in (torch.float16, torch.bfloat16):
        with pytest.raises(
            TypeError, match="density must hold float32 or float64 to be trained, but its weight is b?float16"
        ):
            check_trainable("density", nn.Linear(2, 2).to(kind))
    assert (
        gpu_of(nn.Linear(2, 2), torch.ones(1, device="cpu"), None) is None or torch.get_default_device().type == "cuda"
    )

"""Bad calls: valid calls of everything public, with one or two arguments replaced by something else.

Either the call works, or it raises an error of our own that names an argument of the call, in two lines at most.
"""

from __future__ import annotations

import enum
import inspect
import io
import math
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import misconv
from misconv import MFA, functional, impute, missing
from tests.fuzz import commands
from tests.fuzz.outcome import SOURCE, Choices, FuzzFailure, Outcome, expect, ok, one_line, refused, timer

SECONDS = 10  # that a call may take
ALLOWED = (ValueError, TypeError, OSError, IndexError, ImportError)
# Values that are allowed but huge may make a training diverge, which it says.
DIVERGED = FloatingPointError
# Arguments that may be functions of the caller: what such a function raises by itself is none of ours.
FUNCTIONS = ("activation", "density", "learning_rate", "model", "network", "on_iteration", "shape")
ADVISING = ("assess", "convert", "fit_density")  # warn of what is allowed and yet may be a mistake
Arguments = dict[str, Any]


class Colour(enum.Enum):
    RED = 1


class Rude:
    """An object that does not want to be looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __bool__(self) -> bool:
        raise RuntimeError("no")


# Values that nobody expects ------------------------------------------------------------------------------------------


def hostile(choices: Choices, value: object) -> Any:
    """Something to stand in place of `value`."""
    if isinstance(value, Tensor) and choices.chance(0.6):
        try:
            return choices.pick(_other_tensors(value))()
        except (RuntimeError, TypeError):  # there is no such tensor of this shape
            return None
    makers: list[Callable[[], Any]] = [
        lambda: None, lambda: True, lambda: False, lambda: "x" * choices.pick([0, 1, 1000]), lambda: b"bytes", list, dict,
        lambda: [1, 2, 3], lambda: (1,), object, Rude, lambda: np.zeros(1000), lambda: np.int64(2), lambda: np.float32(0.5),
        lambda: math.nan, lambda: math.inf, lambda: -math.inf, lambda: -1, lambda: 0, lambda: 2**70, lambda: -(2**70),
        lambda: 10**5000, lambda: 1.5, lambda: 1j, lambda: Colour.RED, lambda: torch.zeros(()), lambda: torch.zeros(3),
        lambda: torch.zeros(2, 2, 2, 2), lambda: torch.zeros(1, 0, 3, 3), lambda: nn.ReLU(), lambda: nn.ReLU, lambda: len,
        lambda: (lambda *args: None), lambda: set(), lambda: range(3), lambda: slice(None), lambda: torch.float16,
        lambda: torch.device("meta"), lambda: "relu", lambda: "\x00", lambda: Path("nowhere/at/all"), lambda: [None],
        lambda: (1, "a"), lambda: (0, 0), lambda: (-1, 2), lambda: {"a": np.zeros(100)}, lambda: torch.Generator(),
        lambda: [[1.0]], lambda: MFA.point(torch.rand(1, 2, 3, 3)), lambda: iter(()), lambda: Ellipsis, lambda: 1e-300,
        lambda: 1e300,
    ]  # fmt: skip
    return choices.pick(makers)()


def _other_tensors(x: Tensor) -> list[Callable[[], Any]]:
    """Tensors like this one, but for one thing."""
    number = torch.zeros(()) if x.is_floating_point() else torch.ones(())
    return [
        lambda: x[0], lambda: x[:0], lambda: x.unsqueeze(0), lambda: x.double(), lambda: x.half(), lambda: x.to(torch.int64),
        lambda: x.bool(), lambda: x.to(torch.complex64), lambda: x.to("meta"), lambda: x.float().to_sparse(),
        lambda: x.to(torch.bfloat16), lambda: x.mT, lambda: torch.cat([x, x]), lambda: torch.cat([x, x], -1),
        lambda: x.flatten(), lambda: x.tolist(), lambda: x.numpy(), lambda: torch.full_like(x.float(), math.nan),
        lambda: torch.full_like(x.float(), math.inf), lambda: x.float() * 0 - 1, lambda: x.float().requires_grad_(),
        lambda: x.float() * 1e30, lambda: number, lambda: x[..., :1], lambda: x.to(torch.uint8),
        lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), lambda: x.to(torch.float8_e4m3fn),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), lambda: nn.Parameter(x.float()),
        lambda: x.expand(2, *x.shape), lambda: x.transpose(0, -1), lambda: list(x), lambda: x.to(torch.float32).conj(),
    ]  # fmt: skip


# Valid calls ---------------------------------------------------------------------------------------------------------


def image() -> Tensor:
    return torch.rand(2, 2, 6, 6)


def seen() -> Tensor:
    observed = torch.rand(2, 1, 6, 6) < 0.7
    observed[0] = True
    return observed


def mfa() -> MFA:
    shape = (2, 2, 6, 6)
    means = torch.randn(2, 1, *shape[1:])
    return MFA(torch.zeros(2, 1), means, torch.randn(2, 1, 1, *shape[1:]), torch.rand(means.shape) + 0.1)


@cache
def density() -> nn.Module:
    torch.manual_seed(0)
    return misconv.ConvDMFA(2, rank=1, widths=(4,), depths=(1,)).eval()


@cache
def mixture() -> nn.Module:
    torch.manual_seed(0)
    return misconv.SMFA(components=2, rank=1).fit(torch.rand(20, 2, 6, 6), torch.rand(20, 1, 6, 6) < 0.8, iterations=2)


@cache
def converted() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    return misconv.convert(network, density())


@cache
def folder() -> Path:
    place = Path(tempfile.mkdtemp(prefix="misconv-fuzz-"))
    misconv.save(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), place / "model")
    return place


def _convolution() -> Arguments:
    return {
        "p": mfa(), "weight": torch.randn(4, 1, 3, 3), "bias": torch.randn(4), "stride": 1, "padding": 1, "dilation": 1,
        "groups": 2, "padding_mode": "zeros",
    }  # fmt: skip


def _region() -> Arguments:
    return {"batch": 2, "height": 6, "width": 6, "generator": torch.Generator()}


def _training(**more: Any) -> Arguments:
    return {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "patience": 2, "seed": 0, "checkpoint": None,
            "fabric": None, "progress": False, **more}  # fmt: skip


def _small_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


Call = tuple[Callable[..., Any], Callable[[], Arguments]]


def _calls() -> dict[str, tuple[Call, float]]:
    """What is called, how, and how often (slow ones less)."""
    conv: Arguments = {"in_channels": 2, "out_channels": 4, "kernel_size": 3, "stride": 1, "padding": 1, "dilation": 1,
                       "groups": 1, "bias": True, "padding_mode": "zeros"}  # fmt: skip

    def parts() -> Arguments:
        p = mfa()
        return {
            "logits": p.logits,
            "means": p.means,
            "factors": p.factors,
            "noise": p.noise,
            "observed": None,
            "check": None,
        }

    def pixels(name: str = "observed") -> Callable[[], Arguments]:
        return lambda: {"x": image(), name: seen()}

    calls: dict[str, tuple[Call, float]] = {
        "MFA": ((MFA, parts), 3),
        "MFA.point": ((MFA.point, lambda: {"x": image()}), 1),
        "log_prob": ((lambda x, where: mfa().log_prob(x, where), pixels("where")), 2),
        "condition": ((lambda x, observed: mfa().condition(x, observed), pixels()), 2),
        "fix": ((lambda x, observed: mfa().fix(x, observed), pixels()), 1),
        "sample": ((lambda count, generator: mfa().sample(count, generator=generator), lambda: {"count": 2, "generator": torch.Generator()}), 1),
        "p[index]": ((lambda index: mfa()[index], lambda: {"index": 0}), 2),
        "p.to": ((lambda device: mfa().to(device), lambda: {"device": "cpu"}), 0.3),
        "observe": ((misconv.observe, lambda: {"x": image(), "nodata": -9999.0}), 2),
        "conv2d_moments": ((functional.conv2d_moments, _convolution), 3),
        "expected_conv2d": ((functional.expected_conv2d, lambda: {**_convolution(), "activation": "relu"}), 4),
        "expected_activation": ((functional.expected_activation, lambda: {"activation": "gelu", "mean": image(), "variance": image()}), 2),
        "batch_norm_moments": ((functional.batch_norm_moments, lambda: {
            "mean": torch.randn(2, 1, 3, 4, 4), "variance": torch.rand(2, 1, 3, 4, 4), "weights": torch.ones(2, 1),
            "running_mean": torch.zeros(3), "running_var": torch.ones(3), "weight": torch.ones(3), "bias": torch.zeros(3),
            "training": True, "momentum": 0.1, "eps": 1e-5}), 2),
        "partial_conv2d": ((functional.partial_conv2d, lambda: {
            "x": image(), "observed": seen(), "weight": torch.randn(4, 2, 3, 3), "bias": torch.randn(4), "stride": 1,
            "padding": 1, "dilation": 1, "groups": 1, "return_observed": False}), 2),
        "MisConv2d": ((misconv.MisConv2d, lambda: {**conv, "norm": nn.BatchNorm2d(4), "activation": "relu"}), 3),
        "MisConv2d.from_conv": ((misconv.MisConv2d.from_conv, lambda: {"conv": nn.Conv2d(2, 4, 3), "norm": nn.BatchNorm2d(4), "activation": "relu"}), 1),
        "MisConv2d()": ((lambda p: misconv.MisConv2d(2, 3, 3)(p), lambda: {"p": mfa()}), 0.5),
        "PartialConv2d": ((misconv.PartialConv2d, lambda: dict(conv)), 1),
        "PartialConv2d()": ((lambda x, observed: misconv.PartialConv2d(2, 3, 3)(x, observed), pixels()), 1),
        "ConvDMFA": ((misconv.ConvDMFA, lambda: {"channels": 2, "components": 1, "rank": 1, "widths": (4, 4), "depths": (1, 1, 1), "noise_floor": 1e-3, "skips": False}), 2),
        "LinearDMFA": ((misconv.LinearDMFA, lambda: {"shape": (2, 6, 6), "components": 1, "rank": 1, "noise_floor": 1e-3}), 1),
        "SMFA": ((misconv.SMFA, lambda: {"components": 2, "rank": 1, "shape": (2, 6, 6)}), 1),
        "density()": ((lambda x, observed: density()(x, observed), pixels()), 2),
        "SMFA()": ((lambda x, observed: mixture()(x, observed), pixels()), 1),
        "SMFA.fit": ((lambda **arguments: misconv.SMFA(1, 1).fit(**arguments), lambda: {
            "x": torch.rand(6, 2, 3, 3), "observed": torch.ones(6, 1, 3, 3, dtype=torch.bool), "iterations": 1, "tolerance": 1e-4,
            "minibatch": None, "noise_floor": 1e-3, "seed": 0, "on_iteration": None}), 2),
        "impute.zero": ((impute.zero, pixels()), 1),
        "impute.nearest": ((impute.nearest, pixels()), 1),
        "impute.push_pull": ((impute.push_pull, pixels()), 1),
        "Mean.fit": ((lambda x, observed: impute.Mean().fit(x, observed), pixels()), 1),
        "Mean()": ((lambda x, observed: impute.Mean().fit(image(), seen())(x, observed), pixels()), 1),
        "KNN": ((impute.KNN, lambda: {"k": 2}), 0.5),
        "KNN.fit": ((lambda x, observed: impute.KNN(1).fit(x, observed), pixels()), 1),
        "KNN()": ((lambda x, observed: impute.KNN(1).fit(image(), seen())(x, observed), pixels()), 1),
        "by_density": ((lambda density, x, observed: impute.by_density(density)(x, observed), lambda: {"density": density(), "x": image(), "observed": seen()}), 1),
        "convert": ((misconv.convert, lambda: {"model": _small_network(), "density": density(), "stem": "0", "train_density": False}), 1),
        "convert()": ((lambda x, observed: converted()(x, observed), pixels()), 2),
        "assess": ((misconv.assess, lambda: {
            "density": density(), "images": image(), "observed": seen(), "shape": missing.square, "fraction": 0.25,
            "batch_size": 4, "limit": None, "seed": 0}), 1),
        "predictive": ((misconv.predictive, lambda: {"network": converted(), "p": mfa(), "samples": 2, "generator": torch.Generator()}), 1),
        "save": ((misconv.save, lambda: {"model": _small_network(), "path": folder() / "other"}), 1),
        "load": ((misconv.load, lambda: {"path": folder() / "model", "into": None}), 1),
        "fit_density": ((misconv.fit_density, lambda: {
            "density": misconv.ConvDMFA(2, rank=1, widths=(4,), depths=(1,)), "images": torch.rand(6, 2, 6, 6),
            "observed": torch.rand(6, 1, 6, 6) < 0.9, "mse_epochs": 0, "shape": missing.square, "fraction": 0.25,
            "validation": 0.2, **_training()}), 1),
        "fit_classifier": ((_fit_classifier, lambda: {
            "network": _small_network(), "inputs": torch.rand(6, 2, 6, 6), "labels": torch.arange(6) % 3,
            "validation_inputs": None, "validation_labels": None, **_training()}), 1),
        "Incomplete": ((_incomplete, lambda: {"data": image()}), 0.3),
    }  # fmt: skip
    for name in ("square", "trapezoid", "noise", "free_form", "stripes"):
        calls[f"missing.{name}"] = ((getattr(missing, name), lambda: {**_region(), "fraction": 0.3}), 0.7)
    calls["missing.channels"] = ((missing.channels, lambda: {**_region(), "channels": 3}), 0.7)
    calls["missing.hide"] = (
        (missing.hide, lambda: {"observed": seen(), "shape": missing.square, "fraction": 0.25}),
        0.7,
    )
    return calls


def _fit_classifier(**arguments: Any) -> Any:
    from misconv.training import fit_classifier

    return fit_classifier(**arguments)


def _incomplete(data: Any) -> Any:
    from misconv.transforms import Incomplete

    return Incomplete(data)


# Trying --------------------------------------------------------------------------------------------------------------


def case(seed: int, device: str = "cpu") -> Outcome:
    """One call, with one or two arguments that do not belong there."""
    choices = Choices("calls", seed)
    if choices.chance(0.05):
        return commands.case(choices)
    table = _calls()
    name = choices.weighted({name: weight for name, (_, weight) in table.items()})
    (function, make), _ = table[name]
    arguments = make()
    replaced = choices.sample(sorted(arguments), min(len(arguments), choices.pick([1, 1, 1, 2])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the tensors it is asked to make
        given = {argument: hostile(choices, arguments[argument]) for argument in replaced}
    words = ", ".join(f"{argument}={shown(value)}" for argument, value in given.items())
    label = one_line(f"{name}({words})", 160)
    try:
        # In the folder, because a word given as a path is a file that is written here.
        with chdir(folder()), timer(SECONDS, label), warnings.catch_warnings(record=True) as said, silence():
            warnings.simplefilter("always")
            function(**{**arguments, **given})
    except FuzzFailure:
        raise
    except Exception as error:
        if any(argument in FUNCTIONS and callable(given[argument]) for argument in given) and not _is_ours(error):
            return refused("an error of the caller's own function")
        if isinstance(error, DIVERGED) and "learning_rate" in str(error):
            return refused("a training that diverged")
        if not isinstance(error, ALLOWED):
            raise FuzzFailure(f"{label}: {type(error).__name__}: {one_line(error, 120)}{_where(error)}") from error
        # A layer may speak of its own weights, and `p.to` of itself.
        _check_error(label, error, set(arguments) | _parameters(function) | {"weight", name.split(".")[-1]})
        return refused(type(error).__name__)
    ours = [w for w in said if not (name in ADVISING and issubclass(w.category, UserWarning))]
    expect(not ours, f"{label} warned: {[one_line(w.message, 100) for w in ours]}")
    return ok(name)


@contextmanager
def silence() -> Iterator[None]:
    """Without what a call prints, such as a progress bar."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def shown(value: object) -> str:
    from misconv._checks import describe

    return describe(value)


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _is_ours(error: BaseException) -> bool:
    """Whether a line of this package raised the error, with a message that begins as ours do."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(SOURCE) and " must " in str(error)


def _check_error(label: str, error: BaseException, names: set[str]) -> None:
    """The error is ours: raised by this package, naming an argument, short."""
    message = str(error)
    if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(SOURCE):
        raise FuzzFailure(f"{label}: raw {type(error).__name__}: {one_line(message, 120)}{_where(error)}")
    expect(len(message) <= 500, f"{label}: a message of {len(message)} characters: {one_line(message, 80)}")
    expect(message.count("\n") <= 1, f"{label}: a message of {message.count(chr(10)) + 1} lines")
    named = any(re.search(rf"\b{re.escape(name)}\b", message) for name in names) or isinstance(
        error, OSError | ImportError
    )
    expect(named, f"{label}: {type(error).__name__} that names no argument: {one_line(message, 120)}")


def _where(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(SOURCE)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""

"""Random networks for `misconv.convert`, from a grammar of what people write.

Either `convert` refuses with a reason, or (a) complete images give the network's own results, (b) incomplete images
give the expected activation of the stem, and (c) neither the network nor the image is changed. The oracle of (b) runs
the network's own steps, in float64, on unit images: whatever is affine in the pixels becomes a matrix.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import misconv
from misconv import MFA
from tests.fuzz import oracles, steps
from tests.fuzz.activations import Known
from tests.fuzz.maths import close
from tests.fuzz.outcome import Choices, FuzzFailure, Outcome, expect, ok, one_line, refused

PLACES = 8


class Tail(nn.Module):
    """The rest of a network, which keeps what it was given so that a test can see it."""

    def __init__(self, channels: int, normalized: bool) -> None:
        super().__init__()
        self.seen: Tensor | None = None
        self.norm = nn.BatchNorm2d(channels) if normalized else nn.Identity()
        self.linear = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        result: Tensor = self.linear(self.norm(x).mean((2, 3)))
        return result


class Network(nn.Module):
    """Preprocessing, padding, convolution, arithmetic, normalization, arithmetic, activation and the rest."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.channels = choices.pick([1, 3, 3, 3])
        self.before, inside = steps.preprocessing(choices, self.channels)
        self.padding = steps.padding(choices)
        self.conv, channels = steps.convolution(choices, inside)
        self.first = steps.arithmetic(choices, channels, 0.08)
        self.norm = steps.normalization(choices, channels)
        self.second = steps.arithmetic(choices, channels, 0.12)
        self.activation = steps.activation(choices, channels)
        # Behind a linear stem a normalization would be part of it, and the tail would see no number.
        self.tail = Tail(channels, choices.chance(0.5) and not isinstance(self.activation, nn.Identity))
        self.extra = choices.weighted(
            {"": 12, "residual": 2, "response twice": 1, "image used": 1, "image returned": 1, "keeps response": 1,
             "keeps and reads response": 1, "keeps image": 1, "dictionary": 1}
        )  # fmt: skip
        self.checkpoint = choices.weighted({"": 8, "reentrant": 1, "not reentrant": 1})
        self.part = choices.pick(["stem", "convolution", "everything"])
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        return self._run("everything", self._all, x)

    def _all(self, x: Tensor) -> Any:
        image = x
        if self.extra == "keeps image":
            self.kept = x
        out = self._run("stem", self.stem, x)
        result = self.tail(out)
        if self.extra == "residual":
            result = result + out.mean((1, 2, 3))[:, None]
        elif self.extra == "keeps and reads response":
            assert self.kept is not None
            result = result + self.kept.mean()
        elif self.extra == "image used":
            result = result + image.mean((1, 2, 3))[:, None]
        elif self.extra == "image returned":
            return result, image
        elif self.extra == "dictionary":
            return {"logits": result, "features": out}
        return result

    def stem(self, x: Tensor) -> Tensor:
        """The activation of the stem."""
        y = self.response(x)
        out: Tensor = self.activation(y)
        return out + y if self.extra == "response twice" else out

    def response(self, x: Tensor) -> Tensor:
        """What the activation receives."""
        x = self.padding(self.before(x))
        y = self._run("convolution", self.conv, x)
        y = self.norm(self.first(y))
        if self.extra.startswith("keeps and") or self.extra == "keeps response":
            self.kept = y
        result: Tensor = self.second(y)
        return result

    def _run(self, part: str, function: Callable[[Tensor], Any], x: Tensor) -> Any:
        """A part of the network, with activation checkpointing if it is the chosen one."""
        if not self.checkpoint or self.part != part:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.checkpoint == "reentrant")

    def __str__(self) -> str:
        parts = (self.before, self.padding, self.conv, self.first, self.norm, self.second, self.activation)
        words = [name for part in parts if (name := getattr(part, "label", type(part).__name__)) != "Identity"]
        words += [self.extra, self.checkpoint and f"checkpoint({self.part}, {self.checkpoint})"]
        return " → ".join(word for word in words if word)


def case(seed: int, device: str = "cpu") -> Outcome:
    """One random network, converted, and compared with itself."""
    choices = Choices("networks", seed)
    wide = choices.chance(0.5)

    def build() -> Network:
        network = Network(Choices("a network", seed))
        return (network.double() if wide else network).to(device)

    network = build().train(choices.chance(0.3))
    text = str(network)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    modes = [module.training for module in network.modules()]
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            converted = misconv.convert(network)
    except (ValueError, TypeError) as error:
        message = str(error)
        if len(message) > 700 or message.count("\n") > 2:
            raise FuzzFailure(
                f"a refusal of {len(message)} characters, {message.count(chr(10))} lines, of {text}"
            ) from error
        return refused(one_line(re.sub(r"'[^']*'|\([^)]*\)", "…", message), 90))
    except Exception as error:
        raise FuzzFailure(f"{text}: {type(error).__name__}: {error}") from error
    try:
        ours = [w for w in said if issubclass(w.category, UserWarning)]
        expect(len(ours) == len(said), f"convert warned: {[str(w.message) for w in said]}")
        expect(modes == [module.training for module in network.modules()], "convert changed the mode of the model")
        _check_state(network, state, "convert changed the model")
        shape = (2, network.channels, choices.randint(7, 9), choices.randint(7, 9))
        dtype = torch.float64 if wide else torch.float32
        x = torch.rand(shape, dtype=torch.float64).to(device, dtype)
        _check_evaluation(build().eval(), converted.eval(), x, choices)
        _check_incomplete(build(), converted, shape, dtype, device, choices)
        _check_training(build().train(), converted.train(), x)
    except FuzzFailure as error:
        raise FuzzFailure(f"{text}: {error}") from error
    except RuntimeError as error:
        # What only shows when gradients are computed is refused then.
        if str(error).startswith(("an activation checkpoint with use_reentrant", "gradients of the image cannot")):
            return refused(one_line(str(error), 90))
        raise FuzzFailure(f"{text}: after conversion {type(error).__name__}: {error}") from error
    except Exception as error:
        raise FuzzFailure(f"{text}: after conversion {type(error).__name__}: {error}") from error
    return ok("converted" + (" with a linear stem" if converted.stem.activation is None else ""))


def _check_state(network: nn.Module, state: dict[str, Tensor], message: str) -> None:
    now = network.state_dict()
    expect(now.keys() == state.keys(), message)
    expect(all(torch.equal(now[name], value) for name, value in state.items()), message)


# (a) complete images -------------------------------------------------------------------------------------------------


def _leaves(result: Any) -> list[Tensor]:
    if isinstance(result, dict):
        return list(result.values())
    return list(result) if isinstance(result, tuple) else [result]


def _check_evaluation(plain: Network, converted: nn.Module, x: Tensor, choices: Choices) -> None:
    """On a CPU the bits of the network itself."""
    before = x.clone()
    expected = _leaves(plain(x.clone()))
    actual = _leaves(converted(x if choices.chance(0.5) else MFA.point(x)))
    expect(torch.equal(x, before), "the image was changed")
    _check_same(actual, expected, "evaluation")


def _check_same(actual: list[Tensor], expected: list[Tensor], mode: str) -> None:
    expect(len(actual) == len(expected), f"{len(actual)} results for {len(expected)} ({mode})")
    for a, e in zip(actual, expected, strict=True):
        same = torch.equal(a, e) if e.device.type == "cpu" else torch.allclose(a, e, rtol=1e-3, atol=1e-4)
        expect(same, f"complete images differ by {(a - e).abs().max().item():.2g} ({mode})")


def _check_training(plain: Network, converted: nn.Module, x: Tensor) -> None:
    """The bits of the results, and up to rounding the gradients and statistics, of the network itself."""
    images = [x.clone().requires_grad_() for _ in range(2)]
    try:
        results = _leaves(plain(images[0] * 1))
        expected = [t.detach().clone() for t in results]  # what is computed again may change them in place
        _backward(results)
    except (ValueError, RuntimeError):  # it cannot be trained itself: SyncBatchNorm on a CPU, for example
        return
    actual = _leaves(converted(MFA.point(images[1] * 1)))
    _check_same(actual, expected, "training")
    _backward(actual)
    others = dict(converted.network.named_parameters())
    # What is changed through `data` or behind `detach` is hidden from torch's gradients, which then are not those of what
    # was computed.
    text = str(plain)
    hidden = "x.data" in text or ("x.detach()" in text and "image" in text)
    pairs = [] if hidden else [("the image", *(image.grad for image in images))]
    if "spectral_norm" in text and "checkpoint" in text:
        return  # every run takes one step of its power iteration, so what is computed again is something else
    pairs += [(name, parameter.grad, others[name].grad) for name, parameter in plain.named_parameters()]
    pairs = [(name, *(torch.zeros(()) if g is None else g for g in gradients)) for name, *gradients in pairs]
    tolerance = 1e-9 if x.dtype == torch.float64 else 1e-3
    largest = max(float(wanted.abs().max()) for _, wanted, _ in pairs)  # of which others may be a small difference
    for name, wanted, found in pairs:
        room = tolerance * (wanted.abs().max() + 0.1 * largest)
        expect(((wanted - found).abs() <= room).all(), f"the gradient in {name} differs")
    twins = dict(converted.network.named_buffers())
    for name, buffer in plain.named_buffers():
        room = tolerance * (buffer.abs().max() + 1e-3) if buffer.numel() else 0
        expect(((buffer - twins[name]).abs() <= room).all(), f"the buffer {name} differs after training")


def _backward(results: list[Tensor]) -> None:
    total = sum((t.square().sum() for t in results if t.requires_grad), start=results[0].new_zeros(()))
    total.backward()  # type: ignore[no-untyped-call]


# (b) incomplete images -----------------------------------------------------------------------------------------------


def _random_mfa(shape: tuple[int, ...], dtype: torch.dtype, device: str, choices: Choices) -> MFA:
    batch, *image = shape
    components, rank = choices.pick([1, 2]), choices.pick([0, 2])
    observed = torch.rand(batch, choices.pick([1, image[0]]), *image[1:]) < 0.6
    means = torch.rand(batch, components, *image, dtype=torch.float64)
    means = torch.where(observed[:, None], means[:, :1], means)
    factors = 0.3 * torch.randn(batch, components, rank, *image, dtype=torch.float64)
    noise = 0.1 * torch.rand(batch, components, *image, dtype=torch.float64)
    parts = (torch.randn(batch, components), means, factors, noise)
    return MFA(*(t.to(device, dtype) for t in parts), observed.to(device))


def _check_incomplete(
    network: Network, converted: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: str, choices: Choices
) -> None:
    """What the tail receives, against the expectation over the responses of the network's own steps."""
    p = _random_mfa(shape, dtype, device, choices)
    converted.eval()
    tensors = [p.logits, p.means, p.factors, p.noise]
    before = [t.clone() for t in tensors]
    with torch.no_grad():
        converted(p)
    expect(all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)), "the MFA was changed")
    actual = converted.network.tail.seen.detach().double().cpu()
    network = network.double().cpu().eval()
    # Some functions of torch have constants in single precision on a GPU.
    precision = 2e-4 if dtype == torch.float32 else 1e-9 if device == "cpu" else 1e-6
    with torch.no_grad():
        if converted.stem.activation is None:  # linear: the expectation equals imputing the mean
            network(p.mean.double().cpu().clone())
            expected = network.tail.seen.double()
            room = precision * (1 + expected.abs().amax())
            close("the linear stem", actual, expected, room.expand(expected.shape))
            return
        matrix, offset = _as_matrix(network, shape)
        _compare(network, p, matrix, offset, actual, precision)


def _as_matrix(network: Network, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The response of the stem as matrix (n, O, H', W') and offset (O, H', W'), if it is affine in the pixels."""
    size = shape[1] * shape[2] * shape[3]
    units = torch.eye(size, dtype=torch.float64).view(size, *shape[1:])
    offset = network.response(torch.zeros(1, *shape[1:], dtype=torch.float64))
    matrix = network.response(units.clone()) - offset
    image = torch.rand(1, *shape[1:], dtype=torch.float64)
    whole = network.response(image.clone())
    sum_ = torch.einsum("n,nohw->ohw", image.flatten(), matrix) + offset
    affine = torch.allclose(whole, sum_, rtol=1e-9, atol=1e-9)
    expect(affine, "converted, but what comes before the activation is not affine in the pixels")
    return matrix, offset[0]


def _compare(network: Network, p: MFA, matrix: Tensor, offset: Tensor, actual: Tensor, precision: float) -> None:
    logits, means, factors, noise = oracles.parameters(p)
    flat = matrix.flatten(1)
    mean = (means @ flat).unflatten(-1, offset.shape) + offset
    variance = (noise @ flat.square() + (factors @ flat).square().sum(2)).unflatten(-1, offset.shape)
    batch, components, *out = mean.shape
    expect(list(actual.shape) == [batch, *out], f"the stem has shape {list(actual.shape)}, not {[batch, *out]}")
    b, o, h, w = torch.unravel_index(torch.randint(actual.numel(), (PLACES,)), tuple(actual.shape))
    known = Known("", None, _flat(network, o, components), kinks=(-3.0, 3.0, 6.0))
    spread = torch.where(variance > 0, variance, 0).sqrt()
    chosen = [t[b, :, o, h, w].flatten() for t in (mean, spread)]
    expected, size = oracles.integrate(known, *chosen, o.repeat_interleave(components))
    mixed, magnitude = ((logits.softmax(1)[b] * t.view(PLACES, components)).sum(1) for t in (expected, size))
    largest = 1 + chosen[0].abs().max() + chosen[1].max() + flat.abs().sum(0).max()
    room = precision * (magnitude + largest)
    close("the stem's expectation", actual[b, o, h, w], mixed, room)


def _flat(network: Network, channel: Tensor, components: int) -> Callable[[Tensor], Tensor]:
    """What the stem makes of responses (places · K, nodes), each with the parameters of its channel."""
    activation = network.activation

    def plain(x: Tensor) -> Tensor:
        if isinstance(activation, nn.PReLU):
            slope = activation.weight.detach().expand(int(channel.max()) + 1 if activation.weight.numel() == 1 else -1)
            result: Tensor = torch.where(x > 0, x, slope[channel.repeat_interleave(components)][:, None] * x)
        else:
            x = x.clone()  # which the activation may change in place, here as in the network
            result = activation(x)
        return result + x if network.extra == "response twice" else result

    return plain

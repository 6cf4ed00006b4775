"""What networks do to the image before their first convolution: right, or refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
import torchvision.transforms.functional as TF
import torchvision.transforms.v2.functional as TF2
from torch import Tensor, nn

from misconv import MFA, ConvDMFA
from misconv.convert import Converted, convert
from tests.reference import random_mfa, same

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Preprocessed(nn.Module):
    """A network that does something to its image first."""

    def __init__(self, preprocess: Callable[[Any, Tensor], Tensor], channels: int = 3, groups: int = 1) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1))
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.scale = nn.Parameter(torch.tensor([1.5, -0.5, 2.0]).view(3, 1, 1))
        self.conv = nn.Conv2d(channels, 2 * channels, 3, padding=1, groups=groups)
        self.bn = nn.BatchNorm2d(2 * channels)
        self.preprocess = preprocess

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(self.preprocess(self, x))).relu()


def in_place(*steps: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Statements that change x."""

    def preprocess(m: Any, x: Tensor) -> Tensor:
        for step in steps:
            step(m, x)
        return x

    return preprocess


def statements(text: str) -> Callable[[Any, Tensor], Tensor]:
    code = compile(text, "<preprocess>", "exec")

    def preprocess(m: Any, x: Tensor) -> Tensor:
        names: dict[str, Any] = {
            "m": m,
            "x": x,
            "torch": torch,
            "F": F,
            "TF": TF,
            "TF2": TF2,
            "MEAN": list(MEAN),
            "STD": list(STD),
        }
        exec(code, names)
        result: Tensor = names["x"]
        return result

    return preprocess


FOLLOWED = [
    "x = (x - m.mean) / m.std",
    "x = x.sub(m.mean).div(m.std)",
    "x = 2 * x - 1",
    "x = 1 - x",
    "x = -x",
    "x = x / 255",
    "x = x.div(255.0).sub(0.5).mul(2)",
    "x = torch.sub(x, m.mean, alpha=2)",
    "x = torch.sub(m.mean, x, alpha=3)",
    "x = torch.rsub(x, 1.0)",
    "x = torch.add(input=x, other=m.mean)",
    "x = x * m.scale + m.mean",
    "x = TF.normalize(x, MEAN, STD)",
    "x = TF.normalize(x, MEAN, STD, inplace=True)",
    "x = TF2.normalize(x, MEAN, STD)",
    "x = TF2.normalize(x, MEAN, STD, inplace=True)",
    "x.sub_(m.mean).div_(m.std)",
    "x -= 0.5; x *= 2; x /= 3; x += 1",
    "x.mul_(m.std)",
    "torch.sub(x, m.mean, out=x)",
    "torch.mul(x, 3.0, out=x)",
    "x[:, 1] = x[:, 1] * 2 + 1",
    "x[:, 0] -= 0.3",
    "x[:, 0].mul_(4)",
    "x[:, 1:3] /= 2",
    "x[:, 2] = 0",
    "x[:, [0, 1]] = x[:, [1, 0]]",
    "x.data.mul_(2)",
    "x.detach().add_(1).mul_(2)",
    "x.data.sub_(0.5); x = x * 3",
    "y = x.view(x.shape); y.mul_(3)",
    "y = x[:]; y -= 1; x = x * 2",
    "x = x.flip(1)",
    "x = torch.flip(x, (1,))",
    "x = x[:, [2, 1, 0]]",
    "x = x[:, m.order]",
    "x = x.index_select(1, m.order)",
    "x = x[:, torch.tensor([True, True, True])]",
    "x = torch.cat([x[:, 2:], x[:, :2]], 1)",
    "x = torch.stack([x[:, 0] * 2, x[:, 1] - 1, x[:, 2] / 3], 1)",
    "r, g, b = x.unbind(1); x = torch.stack((b, g, r), dim=1)",
    "r, g, b = x.chunk(3, 1); x = torch.cat((g, b * 2, r), 1)",
    "a, b = torch.split(x, [1, 2], dim=1); x = torch.cat([b, a], 1)",
    "x = torch.cat([x.select(1, 0).unsqueeze(1), x.narrow(1, 1, 2)], dim=1)",
    "x = torch.cat([torch.unsqueeze(x[:, c], 1) * (s / 0.5) + (u - 0.5) / 0.5 for c, (u, s) in enumerate(zip(MEAN, STD))], 1)",
    "x = torch.cat([x[:, :2], torch.linspace(0, 1, x.shape[3]).expand(len(x), 1, *x.shape[2:]).to(x)], 1)",
    "y = torch.empty_like(x)\nfor c in range(3): y[:, c] = (x[:, c] - MEAN[c]) / STD[c]\nx = y",
    "y = torch.zeros_like(x); y.copy_(x); x = y.mul_(2)",
    "y = x.clone(); y.sub_(m.mean); x = y",
    "y = x.clone(); x = x * 2",
    "y = x.clone(); y.mul_(5)",
    "x = x.contiguous(memory_format=torch.channels_last) * 2",
    "x = x.to(memory_format=torch.channels_last)",
    "x = x.to(m.conv.weight.dtype).to(m.conv.weight.device)",
    "x = F.pad(x, (1, 2, 0, 1)); x = x - 0.5",
    "x = x - 0.5; x = F.pad(x, (1, 1))",
    "x = F.pad(x, (1, 2, 0, 1), value=0.7) * 2",
    "x = F.pad(F.pad(x, (1, 1, 1, 1), value=1.0), (0, 2, 0, 2))",
    "x = x[:, :1].expand(-1, 3, -1, -1)",
    "x = x[:, :1].repeat(1, 3, 1, 1) * m.scale",
    "x = (x[:, :1] - m.mean) / m.std",
    "x = torch.cat([x[:, 1:2]] * 3, 1)",
    "x = x[:, [0, 0, 2]] * m.scale",
]  # fmt: skip


def output_of(net: Converted, p: MFA) -> Tensor:
    result = net(p)
    assert isinstance(result, Tensor)
    return result


def check_expectation(model: nn.Module, channels: int = 3, **options: Any) -> Converted:
    """Complete images bit for bit, mixtures of points exactly, Gaussians against dense sums over completions."""
    model = model.eval()
    before = copy.deepcopy(model.state_dict())
    net = convert(model, **options)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    x = torch.rand(2, channels, 7, 8)
    untouched = x.clone()
    expected = model(x.clone())
    assert same(net(x), expected)
    assert torch.equal(x, untouched)
    points = torch.rand(2, 3, channels, 7, 8)
    logits = torch.randn(2, 3)
    p = MFA(logits, points, torch.zeros(2, 3, 0, channels, 7, 8), torch.zeros_like(points))
    values = model(points.flatten(0, 1).clone()).unflatten(0, (2, 3))
    mixed = (logits.softmax(1).view(2, 3, 1, 1, 1) * values).sum(1)
    torch.testing.assert_close(output_of(net, p), mixed, rtol=1e-9, atol=1e-9)
    observed = torch.rand(1, 1, 7, 8) < 0.5
    p = random_mfa(1, 2, 2, (channels, 7, 8), observed)
    with torch.no_grad():
        torch.testing.assert_close(output_of(net, p)[0], dense_expectation(model, p), rtol=1e-8, atol=1e-9)
    return net


def dense_expectation(model: Any, p: MFA) -> Tensor:
    """E[ReLU(Ax + b)] of one image, where the matrix A is found by sending every pixel through the network by itself."""

    def before_the_activation(x: Tensor) -> Tensor:
        return model.bn(model.conv(model.preprocess(model, x.clone())))

    shape = p.shape[1:]
    count = shape.numel()
    basis = torch.eye(count).view(count, *shape)
    offset = before_the_activation(torch.zeros(1, *shape))[0]
    matrix = (before_the_activation(basis) - offset).flatten(1).T  # (outputs, pixels)
    means, factors, noise = (t[0].flatten(-3) for t in p.pinned())  # (K, n), (K, L, n), (K, n)
    total = torch.zeros(offset.numel())
    for k, weight in enumerate(p.weights[0]):
        mean = matrix @ means[k] + offset.flatten()
        variance = matrix.square() @ noise[k] + (matrix @ factors[k].T).square().sum(1)
        deviation = variance.clamp_min(1e-300).sqrt()
        z = mean / deviation
        density = torch.exp(-0.5 * z.square()) / (2 * torch.pi) ** 0.5
        total += weight * torch.where(variance > 1e-24, mean * torch.special.ndtr(z) + deviation * density, mean.relu())
    return total.view(offset.shape)


@pytest.mark.parametrize("text", FOLLOWED)
def test_followed(text: str) -> None:
    torch.manual_seed(1)
    check_expectation(Preprocessed(statements(text)))


def test_followed_through_another_type() -> None:
    model = Preprocessed(statements("x = (2 * x).to(torch.float32).to(m.conv.weight.dtype)")).eval()
    net, x = convert(model), torch.rand(2, 3, 7, 8)
    assert same(net(x), model(x))
    p = random_mfa(1, 2, 2, (3, 7, 8), torch.rand(1, 1, 7, 8) < 0.5)
    with torch.no_grad():
        torch.testing.assert_close(output_of(net, p)[0], dense_expectation(model, p), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", ["x = x[:, [0, 0, 2]] * m.scale", "x = x[:, [2, 1, 0]] * m.scale - 1"])
def test_followed_in_groups(text: str) -> None:
    check_expectation(Preprocessed(statements(text), groups=3))


@pytest.mark.parametrize("chosen", [slice(0, 2), slice(1, 3), slice(0, 3, 2)])
def test_channels_chosen_by_a_view(chosen: slice) -> None:
    model = Preprocessed(lambda m, x: x[:, chosen], channels=2)
    check_expectation(model, channels=3)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_followed_with_repeating_padding(mode: str) -> None:
    model = Preprocessed(lambda m, x: F.pad(x * m.scale, (1, 1, 2, 2), mode=mode) - 0.5)
    model.conv.padding = (0, 0)
    check_expectation(model)
    model = Preprocessed(lambda m, x: F.pad(x[:, [1, 1, 0]], (1, 1, 2, 2), mode=mode))
    model.conv.padding = (0, 0)
    check_expectation(model)


@pytest.mark.usefixtures("without_tf32")
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_transform_input(name: str) -> None:
    options = {"num_classes": 3, "aux_logits": False, "transform_input": True, "init_weights": False}
    model = torchvision.models.get_model(name, **options).float().eval()
    net = convert(model)
    side = 96
    x = torch.rand(2, 3, side, side, dtype=torch.float32)
    with torch.no_grad():
        assert same(net(x), model(x))
        points = torch.rand(1, 2, 3, side, side, dtype=torch.float32)
        p = MFA(
            torch.zeros(1, 2), points.double(), torch.zeros(1, 2, 0, 3, side, side), torch.zeros_like(points).double()
        )
        _, ((_, found),) = net.run_stem(p.to(torch.float32))
        first = next(module for module in model.modules() if type(module).__name__ == "BasicConv2d")
        expected = first(model._transform_input(points[0])).mean(0, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "text", ["x = (x - m.mean) * m.scale", "x.sub_(m.mean).mul_(m.scale)", "x = x[:, [2, 1, 0]] * m.scale"]
)
def test_gradients_reach_what_the_image_is_multiplied_with(text: str) -> None:
    """Against the same layer with the MFA transformed by hand."""
    model = Preprocessed(statements(text)).eval()
    net = convert(model, stem=None)
    p = random_mfa(2, 2, 2, (3, 6, 6), torch.rand(2, 1, 6, 6) < 0.5)
    for part in (p.logits, p.means, p.factors, p.noise):
        part.requires_grad_()
    output_of(net, p).square().sum().backward()
    mine = [part.grad.clone() for part in (p.logits, p.means, p.factors, p.noise)]
    parameters = [value.grad.clone() for value in (net.network.scale, net.network.conv.weight)]
    for part in (p.logits, p.means, p.factors, p.noise):
        part.grad = None
    order = [2, 1, 0] if "2, 1, 0" in text else [0, 1, 2]
    scale = model.scale
    shift = 0 if "mean" not in text else model.mean
    q = MFA(
        p.logits,
        (p.means[:, :, order] - shift) * scale,
        p.factors[:, :, :, order] * scale,
        p.noise[:, :, order] * scale.square(),
        p.observed,
        check=False,
    )
    layer = __import__("misconv").MisConv2d.from_conv(model.conv, model.bn, "relu").eval()
    layer(q).square().sum().backward()
    for found, part in zip(mine, (p.logits, p.means, p.factors, p.noise), strict=True):
        torch.testing.assert_close(found, part.grad, rtol=1e-8, atol=1e-10)
    for found, value in zip(parameters, (model.scale, model.conv.weight), strict=True):
        torch.testing.assert_close(found, value.grad, rtol=1e-8, atol=1e-10)


def test_gradients_of_other_readers_of_the_image() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2 - 1
            return self.conv(y).relu() + y.square() + x

    model = Skip()
    with pytest.warns(UserWarning, match="also read by"):
        net = convert(model)
    x = torch.rand(2, 3, 6, 6)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    net(leaves[0]).square().sum().backward()
    model(leaves[1]).square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


REFUSED = {
    "x = x.square()": "square",
    "x = x.clamp(0, 1)": "clamp",
    "x = x.clamp_(0, 1)": "clamp",
    "x.sqrt_()": "sqrt",
    "x.zero_()": "zero",
    "x[:, :, 1:3] = 0": "setitem",
    "x[:, :, :2] *= 2": "setitem",
    "x[0] = x[1]": "setitem",
    "x = x.flip(2)": "flip",
    "x = x.flip(1, 3)": "flip",
    "x = x.roll(1, 3)": "roll",
    "x = x.transpose(2, 3)": "transpose",
    "x = x.flip(0)": "flip",
    "x = x[torch.tensor([1, 0])]": "getitem",
    "x = F.avg_pool2d(x, 2)": "avg_pool2d",
    "x = F.interpolate(x, scale_factor=2)": "interpolate",
    "x = x - x.mean()": "depends on the image itself|mean",
    "x = x / x.max()": "depends on the image itself|max",
    "x = x - x.mean((2, 3), keepdim=True)": "sub",
    "x = x * x": "mul",
    "x = x / x.std()": "depends on the image itself|std",
    "x = 1 / x": "reciprocal|div",
    "x = x * torch.linspace(0, 1, x.shape[3])": "mul",
    "x = x // 2": "floor",
    "x = torch.div(x, 2, rounding_mode='floor')": "div",
    "x = x.round()": "round",
    "x = F.dropout(x, 0.1, m.training)": "dropout",
    "x = x + torch.randn_like(x)": "add",
    "x = x.repeat(1, 1, 2, 2)": "repeat",
    "x = F.pad(x, (-1, -1, 0, 0))": "pad",
    "x = F.pad(x, (1, 1, 1, 1), mode='reflect')": "reflect and then with zeros",
    "x = F.pad(x, (1, 0, 1, 1), mode='replicate')": "uneven",
    "x = torch.where(x > 0.5, x, 0 * x)": "where",
    "x = x.cumsum(1)": "cumsum",
    "x = (x.permute(0, 2, 3, 1) * 2).permute(0, 3, 1, 2)": "permute",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[text]):
        convert(Preprocessed(statements(text)))


def test_an_array_of_numpy_is_the_image_on_the_cpu_alone() -> None:
    """There it shares memory, and a change behind torch's back is refused; elsewhere it is a copy."""
    model = Preprocessed(statements("n = x.detach().cpu().numpy(); n *= 2"))
    if torch.get_default_device().type == "cpu":
        with pytest.raises(ValueError, match="depends on the image|same result"):
            convert(model)
        return
    with pytest.warns(UserWarning, match=r"the image is also read by cpu\(\) in 'forward'"):
        net = convert(model.eval()).eval()
    x = torch.rand(2, 3, 7, 8)
    assert same(net(x), model(x))


def test_the_users_image_is_left_alone() -> None:
    net = convert(Preprocessed(lambda m, x: x.sub_(m.mean).div_(m.std)), ConvDMFA(3, rank=1, widths=(4,), depths=(1,)))
    x = torch.rand(2, 3, 8, 8)
    x[:, :, :3] = torch.nan
    before = x.clone()
    net(x)
    torch.testing.assert_close(x, before, equal_nan=True, rtol=0, atol=0)
    p = random_mfa(2, 2, 2, (3, 8, 8))
    means = p.means.clone()
    net(p)
    assert torch.equal(p.means, means)


class Returned(nn.Module):
    """A network that returns its image, keeps it, and perhaps changes it behind its convolution."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.change, self.kept = change, torch.zeros(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x).relu()
        self.change(x)
        self.kept = x
        return y, x


def convert_returned(change: Callable[[Tensor], Any]) -> Converted:
    with pytest.warns(UserWarning, match=r"the image is also read by .*return\(\) in 'forward'"):
        return convert(Returned(change))


@pytest.mark.parametrize("change", [lambda x: None, lambda x: x.mul_(3), lambda x: x[:, :2].zero_()])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("made_in", [torch.no_grad, torch.inference_mode])
def test_the_memory_of_the_mfa_is_never_handed_out(change: Any, mode: Any, made_in: Any) -> None:
    """The image lies in it as long as the convolution alone reads it, and not any longer."""
    if (mode, made_in) == (torch.enable_grad, torch.inference_mode):
        pytest.skip("torch computes no gradients with inference tensors")
    net = convert_returned(change)
    with made_in():
        p = random_mfa(2, 1, 2, (3, 8, 8))
        means, image = p.means.clone(), p.means[:, 0].clone()
        change(image)
    with mode():
        y, x = net(p)
        assert type(x) is Tensor
        assert torch.equal(x, image)
        x.add_(1)
        assert torch.equal(net.network.kept.add_(1), image + 1 + 1)  # one tensor, as it is in the network itself
        assert torch.equal(p.means, means)
        assert not p.means.requires_grad
        assert same(y, net(p)[0])


def test_a_learned_change_in_place_stays_out_of_the_graph_of_the_mfa() -> None:
    net = convert_returned(lambda x: None)
    net.network.change = lambda x: x.mul_(net.network.scale)
    p = random_mfa(2, 1, 2, (3, 8, 8))
    means = p.means.clone()
    _, x = net(p)
    x.sum().backward()
    torch.testing.assert_close(net.network.scale.grad, means.sum())
    assert p.means.grad_fn is None
    assert torch.equal(p.means, means)


def test_a_change_in_place_is_no_change_of_the_mfa() -> None:
    """Gradients of another call that read the same MFA would be refused."""
    other, net = convert(Preprocessed(lambda m, x: x)), convert(Preprocessed(lambda m, x: x.sub_(0.5)))
    p = random_mfa(2, 1, 2, (3, 8, 8))
    first = other(p).sum()
    net(p).sum().backward()
    first.backward()
    assert other.network.conv.weight.grad is not None


@pytest.mark.parametrize(
    "text",
    [
        "x = (x - m.mean) / m.std",
        "x = x[:, [2, 1, 0]] * 2",
        "x = torch.stack([x[:, 0] * 2, x[:, 1] - 1, x[:, 2]], 1)",
        "x.sub_(0.5)",
    ],
)
def test_compiled(text: str) -> None:
    torch.compiler.reset()
    net = convert(Preprocessed(statements(text))).eval()
    net.network.preprocess = {  # exec cannot be compiled
        0: lambda m, x: (x - m.mean) / m.std,
        1: lambda m, x: x[:, [2, 1, 0]] * 2,
        2: lambda m, x: torch.stack([x[:, 0] * 2, x[:, 1] - 1, x[:, 2]], 1),
        3: lambda m, x: x.sub_(0.5),
    }[
        ["x = (x", "x = x[:", "x = torch", "x.sub_"].index(
            next(s for s in ("x = (x", "x = x[:", "x = torch", "x.sub_") if text.startswith(s))
        )
    ]
    p = random_mfa(2, 2, 2, (3, 8, 8), torch.rand(2, 1, 8, 8) < 0.5)
    torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(p), net(p))

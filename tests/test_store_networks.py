"""Networks of torchvision and timm, plain and converted, come back by their names; changed ones ask for `into`."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import misconv
from misconv import ConvDMFA, store
from misconv._store import is_channels_last
from tests import damage
from tests.test_store_models import bits, here, same

models = torchvision.models


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


def converted(network: nn.Module, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of stems without an activation, which are not the matter here
        return misconv.convert(network, ConvDMFA(3, widths=(4,), depths=(1,), rank=1), **options)


def incomplete(size: int = 64) -> Tensor:
    return torch.rand(2, 3, size, size).masked_fill(torch.rand(2, 1, size, size) < 0.3, torch.nan)


def outputs(result: Any) -> list[Tensor]:
    return list(result.values()) if isinstance(result, dict) else [result]


def with_new_classifier(network: Any, classes: int = 5) -> Any:
    """As one does with a pretrained network."""
    last = network.classifier[-1] if hasattr(network, "classifier") else network.heads.head
    new = nn.Linear(last.in_features, classes)
    if hasattr(network, "classifier"):
        network.classifier[-1] = new
    else:
        network.heads.head = new
    return network


def quiet(make: Callable[..., nn.Module], **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GoogLeNet and Inception warn of their initial values
        return make(**options)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": models.resnet18,
    "resnet18, 3 classes": lambda: models.resnet18(num_classes=3),
    "efficientnet_b0, new classifier": lambda: with_new_classifier(models.efficientnet_b0()),
    "vit_b_16, new classifier": lambda: with_new_classifier(models.vit_b_16(num_classes=10)),
    "regnet_y_400mf": lambda: models.regnet_y_400mf(num_classes=4),
    "squeezenet1_1": lambda: models.squeezenet1_1(num_classes=4),
    "swin_t": lambda: models.swin_t(num_classes=4),
    "googlenet without auxiliary outputs": lambda: quiet(models.googlenet, aux_logits=False, transform_input=True),
    "fcn_resnet50": lambda: models.segmentation.fcn_resnet50(weights_backbone=None, num_classes=4, aux_loss=True),
    "timm resnet18": lambda: timm.create_model("resnet18", num_classes=3, in_chans=4),
    "timm convnext_atto": lambda: timm.create_model("convnext_atto.d2_in1k", pretrained=False, drop_rate=0.25),
    "timm efficientnet_b0, no classifier": lambda: timm.create_model("efficientnet_b0", num_classes=0),
    "timm swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", num_classes=3),  # with hidden buffers
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_comes_back_by_its_name(name: str, tmp_path: Path) -> None:
    model = NETWORKS[name]().eval()
    before = torch.get_rng_state()
    store.save(model, tmp_path / "model")
    loaded = store.load(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)
    assert type(loaded) is type(model)
    assert repr(loaded) == repr(model)
    same(loaded, model)
    for mine, theirs in zip(model.modules(), loaded.modules(), strict=True):
        for key in mine._non_persistent_buffers_set:
            first, second = getattr(mine, key), getattr(theirs, key)
            assert (first is second is None) or torch.equal(bits(first), bits(second))
    description = damage.content_of((tmp_path / "model").read_bytes())["content"]["model"]
    assert description["name"] == name.removeprefix("timm ").split(",")[0].split(" ")[0] or "swin" in name


CONVERTED: dict[str, Callable[[], Any]] = {
    "resnet18": lambda: converted(models.resnet18(num_classes=3)),
    "efficientnet_b0": lambda: converted(with_new_classifier(models.efficientnet_b0())),
    "timm resnet18": lambda: converted(timm.create_model("resnet18", num_classes=3)),
    "timm convnext_atto": lambda: converted(timm.create_model("convnext_atto", num_classes=3)),
    "fcn_resnet50": lambda: converted(models.segmentation.fcn_resnet50(weights_backbone=None, num_classes=4)),
    "channels_last": lambda: converted(models.resnet18(num_classes=3).to(memory_format=torch.channels_last)),
    "a named stem": lambda: converted(models.resnet18(num_classes=3), stem=("conv1", "bn1", "relu")),
    "layers": lambda: converted(nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.AdaptiveAvgPool2d(2))),
    "without a density": lambda: misconv.convert(models.resnet18(num_classes=3)),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_network_comes_back_without_being_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CONVERTED[name]().eval()
    first = next(model.network.parameters())
    first.requires_grad_(False)
    store.save(model, tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", lambda *_: pytest.fail("the network was run"))
        loaded = store.load(tmp_path / "model")
    assert repr(loaded) == repr(model)
    assert loaded.stem == model.stem
    assert loaded.channels == model.channels
    same(loaded, model)
    assert [is_channels_last(p) for p in loaded.parameters()] == [is_channels_last(p) for p in model.parameters()]
    x: Any = incomplete()
    if model.density is None:
        x = ConvDMFA(3, widths=(4,), depths=(1,), rank=1).eval()(x.nan_to_num(), ~x.isnan())
    with torch.no_grad():
        for mine, theirs in zip(outputs(model(x)), outputs(here(loaded)(x)), strict=True):
            assert torch.equal(bits(mine), bits(theirs))


def test_a_converted_network_goes_on_learning(tmp_path: Path) -> None:
    """Statistics of BatchNorm, modes and gradients are those of the saved one."""
    model = converted(models.resnet18(num_classes=3))
    model(incomplete(40))
    model.network.layer1.requires_grad_(False)
    model.network.bn1.eval()
    store.save(model, tmp_path / "model")
    loaded = here(store.load(tmp_path / "model"))
    same(loaded, model)
    x = incomplete(40)
    for net in (model, loaded):
        net(x).square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is None or theirs.grad is None:
            continue
        if mine.is_cuda:  # where gradients of pooling are added up in any order
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4 * float(mine.grad.abs().max()))
        else:
            assert torch.equal(bits(mine.grad), bits(theirs.grad)), name


def replaced(network: Any) -> Any:
    network.maxpool = nn.Identity()
    return network


def strided(network: Any) -> Any:
    network.conv1.stride = (1, 1)  # the same tensors, another computation
    return network


def hooked(network: Any) -> Any:
    network.layer1.register_forward_hook(lambda *arguments: None)
    return network


class Own(models.ResNet):
    """Not in any list."""


@pytest.mark.parametrize("change", [replaced, strided, hooked], ids=lambda change: change.__name__)
def test_a_changed_network_asks_for_into(change: Callable[[Any], Any], tmp_path: Path) -> None:
    model, other = (converted(change(models.resnet18(num_classes=3))).eval() for _ in range(2))
    store.save(model, tmp_path / "model")
    with pytest.raises(
        ValueError,
        match=r"cannot load .*: the file does not say how to build torchvision.models.resnet.ResNet \(it is not in the "
        r"list of torchvision's models, or was changed after it was built\); build the model yourself and call",
    ) as caught:
        store.load(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert store.load(tmp_path / "model", into=other) is other
    same(model, other)
    x = incomplete(40)
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda: Own(models.resnet.BasicBlock, [1, 1, 1, 1]), "test_store_networks.Own"),
        (lambda: models.resnet.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1]), "torchvision.models.resnet.ResNet"),
        (lambda: models.resnet18(norm_layer=lambda n: nn.GroupNorm(2, n)), "torchvision.models.resnet.ResNet"),
        (lambda: models.resnet.BasicBlock(3, 3), "torchvision.models.resnet.BasicBlock"),
        (lambda: timm.create_model("resnet18", features_only=True), "timm.models._features.FeatureListNet"),
        (lambda: timm.create_model("resnet18", act_layer=nn.SiLU), "timm.models.resnet.ResNet"),
    ],
)
def test_networks_that_no_list_has(make: Callable[[], nn.Module], culprit: str, tmp_path: Path) -> None:
    model, other = make(), make()
    store.save(model, tmp_path / "model")
    with pytest.raises(ValueError, match=f"does not say how to build .*{culprit}.* build the model yourself"):
        store.load(tmp_path / "model")
    same(store.load(tmp_path / "model", into=other), model)


def test_a_network_beside_other_layers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), models.mobilenet_v3_small(num_classes=7), nn.Softmax(1)).eval()
    store.save(model, tmp_path / "model")
    x = torch.rand(2, 1, 40, 40)
    assert torch.equal(here(store.load(tmp_path / "model"))(x), model(x))


# Hostile files -------------------------------------------------------------------------------------------------------


def network(name: Any, registry: Any = "torchvision", **arguments: Any) -> dict[str, Any]:
    return {"registry": registry, "name": name, "arguments": {"num_classes": 3, **arguments}}


def stem(**parts: Any) -> dict[str, Any]:
    layers = {"0": {"class": "torch.nn.Conv2d", "arguments": {"in_channels": 1, "out_channels": 1, "kernel_size": 1}}}
    inner = {"module": {"class": "torch.nn.Sequential", "children": layers}}
    values = {"network": inner, "density": None, "stem": {"stem": {"convolution": "0"}}, "activation": None}
    return {"class": "misconv.Converted", "arguments": {**values, "channels": 1, **parts}}


def many(description: dict[str, Any], count: int) -> dict[str, Any]:
    return {"class": "torch.nn.Sequential", "children": {str(n): description for n in range(count)}}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a giant": (network("vit_h_14"), "torchvision's vit_h_14 has more parameters, or others, than the file holds"),
    "a giant of timm": (network("vit_giant_patch14_dinov2", "timm"), "than the file holds"),
    "another network": (network("resnet50"), "than the file holds"),
    "many networks": (many(network("squeezenet1_1"), 5000), "num_classes must be a sensible int"),  # of the numbers left
    "a name of no list": (network("os.system"), "it names the network 'os.system', which is not in torchvision's list"),
    "a name to download": (network("hf_hub:timm/resnet18", "timm"), "which is not in timm's list of models"),
    "a name with weights": (network("resnet18.a1_in1k", "timm"), "which is not in timm's list of models"),
    "a detector": (network("fasterrcnn_resnet50_fpn"), "which is not in torchvision's list of models"),
    "a name of another type": (network(["resnet18"]), "which is not in torchvision's list of models"),
    "another registry": (network("resnet18", "os"), "it names the registry 'os'"),
    "a registry of another type": (network("resnet18", ["timm"]), "it names the registry"),
    "no arguments": ({"registry": "timm", "name": "resnet18"}, "a network must have arguments"),
    "weights": (network("resnet18", weights="DEFAULT"), "'weights' is no argument that a file may give"),
    "pretrained": (network("resnet18", "timm", pretrained=True), "'pretrained' is no argument that a file may give"),
    "a checkpoint": (network("resnet18", "timm", checkpoint_path="/etc/passwd"), "is no argument that a file may give"),
    "a bool": (network("resnet18", num_classes=True), "num_classes must be a sensible int"),
    "a list": (network("resnet18", num_classes=[3]), "num_classes must be a sensible int"),
    "many classes": (network("squeezenet1_1", num_classes=10**12), "num_classes must be a sensible int"),
    "negative": (network("squeezenet1_1", num_classes=-1), "num_classes must be a sensible int"),
    "not finite": (network("resnet18", "timm", drop_rate=float("nan")), "drop_rate must be a sensible float"),
    "an argument of others": (network("squeezenet1_1", aux_loss=True), "squeezenet1_1 refuses its arguments"),
    "a stem that is not there": (stem(stem={"stem": {"convolution": "conv1"}}), "the stem is not in the network"),
    "a stem of other parts": (stem(stem={"stem": {"convolution": "0", "hook": "eval"}}), "a stem has no such part"),
    "a stem of modules": (stem(stem={"stem": {"convolution": {"function": "sin"}}}), "consists of names and numbers"),
    "a stem that is text": (stem(stem="0"), "the stem is not in the network"),
    "no network": (stem(network=None), "the stem is not in the network"),
    "a density that is text": (stem(density="eval"), "the stem is not in the network"),
    "no activation": (stem(stem={"stem": {"convolution": "0", "named": True}}), "the activation is not in the network"),
    "other arguments": (stem(forward="eval"), "Converted has no argument 'forward'"),
    "our functions": ({"class": "misconv.convert", "arguments": {}}, "it names the class 'misconv.convert'"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_once(name: str, tmp_path: Path) -> None:
    description, message = HOSTILE[name]
    store.save(models.squeezenet1_1(num_classes=3), tmp_path / "model")
    data = (tmp_path / "model").read_bytes()
    content = damage.content_of(data)
    content["content"]["model"] = description
    (tmp_path / "model").write_bytes(damage.with_content(data, content))
    begin = time.process_time()
    with pytest.raises(ValueError, match=f"cannot load .*: .*{message}") as caught:
        store.load(tmp_path / "model")
    assert time.process_time() - begin < 3
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_missing_package_is_named_where_it_is_needed(tmp_path: Path) -> None:
    """In a process that has neither; what was saved without them is loaded there."""
    store.save(converted(models.resnet18(num_classes=3)), tmp_path / "torchvision")
    store.save(converted(timm.create_model("resnet18", num_classes=3)), tmp_path / "timm")
    store.save(converted(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())), tmp_path / "own")
    code = """
import sys; sys.modules["torchvision"] = sys.modules["timm"] = None
import misconv
for name in ("torchvision", "timm", "own"):
    try: print(misconv.load(name).stem)
    except ValueError as error: print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8", cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "cannot load torchvision: its network is one of torchvision, which is not installed: pip install 'misconv[vision]'",
        "cannot load timm: its network is one of timm, which is not installed: pip install 'misconv[timm]'",
        "0 → 1",
    ]

"""A saved model comes back as it was, or the file says why it cannot; a model that is loaded into changes wholly or not."""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torchvision import tv_tensors

from misconv import SMFA, ConvDMFA, LinearDMFA, MisConv2d, PartialConv2d, fit_density, impute, store
from misconv._store.builder import CONTAINERS, class_name
from tests import damage
from tests.reference import random_mfa


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same(first: nn.Module, second: nn.Module) -> None:
    """All tensors bit for bit, types, what is frozen, modes."""
    mine, theirs = first.state_dict(), second.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype
        assert mine[name].shape == theirs[name].shape
        assert torch.equal(bits(mine[name]), bits(theirs[name])), name
    for (name, p), (other, q) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert (name, p.requires_grad) == (other, q.requires_grad)
    assert [m.training for m in first.modules()] == [m.training for m in second.modules()]


def here(model: nn.Module) -> nn.Module:
    """Where the tests put their tensors; models are loaded on the CPU."""
    return model.to(torch.get_default_device())


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    """Everything of a model that a failed load might have changed."""
    tensors = [*model.parameters(), *model.buffers()]
    return (
        [id(t) for t in tensors],
        [(t.dtype, t.requires_grad, t.data_ptr(), t.grad is None) for t in tensors],
        [bits(t).clone().tolist() for t in tensors],
        [(name, part.training, sorted(vars(part))) for name, part in model.named_modules()],
    )


# What a file says of a layer -----------------------------------------------------------------------------------------

ARGUMENTS: dict[str, list[tuple[Any, ...]]] = {
    "AdaptiveAvgPool1d": [(3,)], "AdaptiveAvgPool2d": [((3, None),)], "AdaptiveAvgPool3d": [(3,)], "AdaptiveMaxPool1d": [(3,)],
    "AdaptiveMaxPool2d": [(3, True)], "AdaptiveMaxPool3d": [(3,)], "AvgPool1d": [(3,)], "AvgPool2d": [(3, 2, 1, True, False, 5)], "AvgPool3d": [(3,)],
    "BatchNorm1d": [(3,)], "BatchNorm2d": [(3, 1e-3, None, False, False)], "BatchNorm3d": [(3,)], "Bilinear": [(2, 3, 4, False)],
    "ChannelShuffle": [(2,)], "CircularPad1d": [(2,)], "CircularPad2d": [((1, 2, 3, 4),)], "CircularPad3d": [(1,)], "ConstantPad1d": [(1, 0.5)],
    "ConstantPad2d": [(1, 0.5)], "ConstantPad3d": [(1, 0.5)], "Conv1d": [(4, 6, 3, 2, "valid")], "Conv2d": [(4, 6, (3, 1), 1, "same", 2, 2, False, "reflect")],
    "Conv3d": [(1, 2, 3)], "ConvTranspose1d": [(1, 2, 3)], "ConvTranspose2d": [(2, 4, 3, 2, 1, 1, 2, False, 1)], "ConvTranspose3d": [(1, 2, 3)],
    "CrossMapLRN2d": [(2,)], "Embedding": [(5, 3, 1, 2.0)], "EmbeddingBag": [(5, 3)], "Fold": [((4, 4), 2)], "FractionalMaxPool2d": [(2, None, 0.5)], "FractionalMaxPool3d": [(2, 3)], "GELU": [(), ("tanh",)],
    "GroupNorm": [(2, 4, 1e-3, False)], "Hardtanh": [(-2.0, float("inf"))], "InstanceNorm1d": [(2,)], "InstanceNorm2d": [(2, 1e-5, 0.1, True, True)], "InstanceNorm3d": [(2,)],
    "LPPool1d": [(2, 3)], "LPPool2d": [(2, 3)], "LPPool3d": [(2, 3)], "LayerNorm": [((2, 3), 1e-5, True, False)], "Linear": [(2, 3, False)],
    "LocalResponseNorm": [(2,)], "MaxPool1d": [(2,)], "MaxPool2d": [(2, 1, 0, 2, False, True)], "MaxPool3d": [(2,)], "MaxUnpool1d": [(2,)], "MaxUnpool2d": [(2,)],
    "MaxUnpool3d": [(2,)], "PReLU": [(), (3, 0.1)], "PixelShuffle": [(2,)], "PixelUnshuffle": [(2,)], "RMSNorm": [((3,), 1e-3)], "ReflectionPad1d": [(1,)],
    "ReflectionPad2d": [(1,)], "ReflectionPad3d": [(1,)], "ReplicationPad1d": [(1,)], "ReplicationPad2d": [(1,)], "ReplicationPad3d": [(1,)],
    "SyncBatchNorm": [(3,)], "Softmax": [(1,)], "LogSoftmax": [(1,)], "Softmin": [(1,)], "Threshold": [(0.1, 0.2)], "Unflatten": [(1, (2, 3))], "Unfold": [(2,)],
    "Upsample": [(None, 2.0, "bilinear", True), ((3, 4),)], "UpsamplingBilinear2d": [(None, 2)], "UpsamplingNearest2d": [(3,)], "ZeroPad1d": [(1,)],
    "ZeroPad2d": [(1,)], "ZeroPad3d": [(1,)],
}  # fmt: skip


LAYERS = [
    name
    for name, kind in vars(nn).items()
    if isinstance(kind, type) and kind not in CONTAINERS and class_name(kind) is not None
]


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_a_file_may_name_comes_back(name: str, tmp_path: Path) -> None:
    for arguments in ARGUMENTS.get(name, [()]):
        layer = getattr(nn, name)(*arguments)
        store.save(layer, tmp_path / "model")
        loaded = store.load(tmp_path / "model")
        assert type(loaded) is type(layer)
        assert repr(loaded) == repr(layer)
        same(loaded, layer)
        skip = ("_parameters", "_buffers")
        assert {k: v for k, v in vars(loaded).items() if k not in skip} == {
            k: v for k, v in vars(layer).items() if k not in skip
        }


def changed_padding() -> nn.Module:
    """The padding that is used is not the padding that is printed."""
    layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
    layer.padding = (2, 2)
    return layer


def with_(model: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    change(model)
    return model


class Counter(nn.Module):
    """Has something to say that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"count": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class Noting(nn.Module):
    """Has something to say that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.note = torch.zeros(2)

    def get_extra_state(self) -> Tensor:
        return self.note

    def set_extra_state(self, state: Tensor) -> None:
        self.note = state


CHANGED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "padding": (changed_padding, "its attribute '.*' was changed after it was made"),
    "a note": (lambda: with_(nn.Linear(2, 2), lambda m: setattr(m, "classes", ["a", "b"])), "its attribute 'classes' was set after"),
    "another forward": (lambda: with_(nn.ReLU(), lambda m: setattr(m, "forward", torch.sin)), "its attribute 'forward' was set after"),
    "a hook": (lambda: with_(nn.ReLU(), lambda m: m.register_forward_hook(lambda *a: a[2] * 2)), "it has hooks"),
    "a hook before": (lambda: with_(nn.Linear(2, 2), lambda m: m.register_forward_pre_hook(lambda *a: None)), "it has hooks"),
    "a hook of a container": (lambda: with_(nn.Sequential(nn.ReLU()), lambda m: m.register_forward_hook(lambda *a: None)), "Sequential .it has hooks"),
    "a note on a container": (lambda: with_(nn.Sequential(), lambda m: setattr(m, "classes", 3)), "Sequential .its attribute 'classes' was set"),
    "a tensor of a container": (lambda: with_(nn.Sequential(), lambda m: m.register_buffer("scale", torch.ones(1))), "it holds tensors of its own"),
    "no child": (lambda: with_(nn.ModuleDict({"a": nn.ReLU()}), lambda m: m.register_module("b", None)), "one of its children is None"),
    "a child": (lambda: with_(nn.Linear(2, 2), lambda m: m.add_module("more", nn.ReLU())), "modules in it were changed after it was made"),
    "a buffer": (lambda: with_(nn.ReLU(), lambda m: m.register_buffer("scale", torch.ones(2), persistent=False)), "is not persistent and was changed"),
    "another density": (lambda: with_(ConvDMFA(1, widths=(2,), depths=(1,)), lambda m: m.features.append(nn.Tanh())), "modules in it were changed"),
    "stride in a density": (lambda: with_(ConvDMFA(1, widths=(2,), depths=(1,)), lambda m: setattr(m.features[0], "stride", (2, 2))), "its attribute 'stride' was changed"),
    "a note on a density": (lambda: with_(SMFA(2, 1, (1, 2, 2)), lambda m: setattr(m, "classes", 3)), "its attribute 'classes' was set"),
    "eps of a norm": (lambda: with_(MisConv2d(1, 2, 1, norm=nn.BatchNorm2d(2)), lambda m: m.norm.register_forward_hook(print)), "BatchNorm2d .it has hooks"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5), "it has hooks"),
    "a function of mine": (lambda: MisConv2d(1, 2, 1, activation=nn.Sequential(nn.ReLU())), "the arguments it keeps are not those"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_what_was_changed_is_not_silently_lost(name: str, tmp_path: Path) -> None:
    make, message = CHANGED[name]
    model, other = make(), make()
    store.save(model, tmp_path / "model")
    with pytest.raises(
        ValueError,
        match=rf"does not say how to build .*{message}.*build the model yourself and call misconv.load\(path, into",
    ):
        store.load(tmp_path / "model")
    assert store.load(tmp_path / "model", into=other) is other
    same(model, other)


def test_what_torch_notes_in_passing_changes_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.rand(3, 2)).sum().backward()
    model.compile(backend="eager")
    model[0].register_forward_hook(lambda *a: None).remove()
    store.save(model, tmp_path / "model")
    same(store.load(tmp_path / "model"), model)


def test_extra_state(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError,
        match=r"0._extra_state \(what get_extra_state of a module returns\) must be a tensor to be stored, got .*dict",
    ):
        store.save(nn.Sequential(Counter()), tmp_path / "model")
    model = Noting()
    model.note = torch.rand(2)
    store.save(model, tmp_path / "model")
    assert torch.equal(store.load(tmp_path / "model", into=Noting()).note.cpu(), model.note.cpu())


def test_a_module_that_holds_itself(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU())
    model.append(model)
    with pytest.raises(
        ValueError, match="model must be a tree of modules, got a Sequential that is nested too deeply or holds"
    ):
        store.save(model, tmp_path / "model")
    deep: nn.Module = nn.Linear(2, 2)
    for _ in range(70):
        deep = nn.Sequential(deep)
    store.save(deep, tmp_path / "model")
    with pytest.raises(ValueError, match="it is nested more than 50 deep"):
        store.load(tmp_path / "model")
    same(store.load(tmp_path / "model", into=copy.deepcopy(deep)), deep)


# Tensors -------------------------------------------------------------------------------------------------------------

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
def test_buffers_of_every_type(dtype: torch.dtype, tmp_path: Path) -> None:
    def module(values: Tensor) -> nn.Module:
        made = nn.Module()
        made.register_buffer("values", values)
        made.register_buffer("scalar", values.flatten()[0])
        made.register_buffer("empty", values[:0])
        return made

    first = module((10 * torch.randn(3, 4)).to(dtype))
    store.save(first, tmp_path / "model")
    second = module(torch.zeros(3, 4, dtype=dtype))
    same(store.load(tmp_path / "model", into=second), first)


def test_conjugate_and_negative_views(tmp_path: Path) -> None:
    for dtype in (torch.complex64, torch.complex128):
        z = torch.randn(3, 4, dtype=dtype)
        tensors = {
            "z": z, "conjugate": z.conj(), "adjoint": z.mH, "negative": z.conj().imag, "both": z.imag, "again": z.conj().conj(), "part": z.conj()[1:],
        }  # fmt: skip
        assert tensors["conjugate"].is_conj()
        assert tensors["negative"].is_neg()
        store.write(tmp_path / "file", tensors, {})
        back, _ = store.read(tmp_path / "file")
        for name, tensor in tensors.items():
            assert torch.equal(back[name], tensor.cpu()), name
            assert not back[name].is_conj()
        assert back["again"] is back["z"]
        assert back["conjugate"] is not back["z"]
        model = nn.Module()
        model.weight = nn.Parameter(z.conj())
        store.save(model, tmp_path / "model")
        into = nn.Module()
        into.weight = nn.Parameter(torch.zeros(3, 4, dtype=dtype).conj())
        store.load(tmp_path / "model", into=into)
        assert torch.equal(into.weight, model.weight)


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    patterns = (
        torch.tensor([0x7FC00001, 0x7F800001, -0x400000, 0x7F800000, -0x80000000, 1, 0])
        .to(torch.int32)
        .view(torch.float32)
    )
    model = nn.Linear(7, 1, bias=False, dtype=torch.float32)
    model.weight.data.copy_(patterns)
    store.save(model, tmp_path / "model")
    same(store.load(tmp_path / "model"), model)
    same(store.load(tmp_path / "model", into=nn.Linear(7, 1, bias=False)), model)


@pytest.mark.parametrize(
    ("tensors", "metadata", "error", "message"),
    [
        ([], {}, TypeError, "tensors must be a dict, got"),
        ({}, [], TypeError, "metadata must be a dict, got"),
        ({}, None, TypeError, "metadata must be a dict, got None"),
        ({3: torch.ones(1)}, {}, TypeError, "tensors must have names of type str, other than '__metadata__', got 3"),
        (
            {"__metadata__": torch.ones(1)},
            {},
            TypeError,
            "tensors must have names of type str, other than '__metadata__'",
        ),
        ({"a": [1.0]}, {}, TypeError, "a must be a tensor to be stored, got"),
        (
            {"a": tv_tensors.Image(torch.ones(1, 2, 2))},
            {},
            TypeError,
            "a must be a torch.Tensor or a Parameter to be stored, got Image",
        ),
        ({"two\nlines": 3}, {}, TypeError, r"'two\\nlines' must be a tensor to be stored"),
        (
            {},
            {"a": {1: 2}},
            TypeError,
            r"metadata must hold only what JSON can say, got the key 1 \(int\), which is no str",
        ),
        ({}, {"a": [{None: 2}]}, TypeError, "got the key None"),
        ({}, {"a": {1, 2}}, TypeError, "metadata must hold only what JSON can say, got Object of type set"),
        ({}, {"a": b"b"}, TypeError, "metadata must hold only what JSON can say"),
    ],
)
def test_bad_calls_of_write(tensors: Any, metadata: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message) as caught:
        store.write(tmp_path / "file", tensors, metadata)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_metadata_nested_in_itself(tmp_path: Path) -> None:
    content: dict[str, Any] = {}
    content["self"] = content
    with pytest.raises(TypeError, match="nested in itself or too deeply"):
        store.write(tmp_path / "file", {}, content)


# Ours ----------------------------------------------------------------------------------------------------------------


def images(count: int = 12) -> tuple[Tensor, Tensor]:
    return torch.rand(count, 3, 8, 8, dtype=torch.float32), torch.rand(count, 1, 8, 8) > 0.3


def fitted(density: nn.Module) -> nn.Module:
    x, observed = images()
    if isinstance(density, SMFA | impute.Mean | impute.KNN):
        return density.fit(x, observed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of training loops for few images, which are not the matter here
        fit_density(density, x, observed, epochs=1, progress=False)
    return density


OURS: dict[str, Callable[[], nn.Module]] = {
    "ConvDMFA": lambda: ConvDMFA(3, widths=(4, 8), depths=(1, 1, 1), rank=2, components=2, skips=True),
    "LinearDMFA": lambda: LinearDMFA((3, 8, 8), rank=1),
    "SMFA": lambda: SMFA(2, 1),
    "Mean": impute.Mean,
    "KNN": lambda: impute.KNN(2),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_densities_and_imputers_give_the_same_bits_again(
    name: str, training: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.set_default_dtype(torch.float32)
    model = fitted(OURS[name]()).to(dtype).train(training)
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)
    store.save(model, tmp_path / "model")
    torch.set_default_dtype(torch.float64)  # another default than when it was made
    x, observed = images(3)
    expected = copy.deepcopy(model)(x.to(dtype), observed)
    other = OURS[name]() if name != "SMFA" else SMFA(2, 1, shape=(3, 8, 8))
    for loaded in (store.load(tmp_path / "model"), store.load(tmp_path / "model", into=other)):
        same(loaded, model)
        result = here(loaded)(x.to(dtype), observed)
        for first, second in zip(
            *(vars(r).values() if not isinstance(r, Tensor) else [r] for r in (expected, result)), strict=True
        ):
            assert not isinstance(first, Tensor) or torch.equal(bits(first), bits(second))


def test_layers_of_ours_with_everything(tmp_path: Path) -> None:
    p = random_mfa(2, 2, 2, (3, 6, 6), torch.rand(2, 1, 6, 6) < 0.5)
    for layer in (
        MisConv2d(
            3, 4, 3, padding="same", padding_mode="reflect", norm=nn.BatchNorm2d(4, eps=0.1), activation=nn.PReLU(4)
        ),
        MisConv2d(3, 4, 3, stride=2, padding=(1, 0), activation=nn.Hardtanh(-1, 0.5)),
        MisConv2d(3, 4, 1, bias=False, norm=nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
    ):
        store.save(layer.eval(), tmp_path / "model")
        assert torch.equal(here(store.load(tmp_path / "model"))(p), layer(p))
    layer = PartialConv2d(3, 4, 3, dilation=2)
    store.save(layer, tmp_path / "model")
    same(store.load(tmp_path / "model"), layer)


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm]
)
def test_parametrizations(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(wrap(nn.Linear(4, 4)), nn.ReLU())

    model, other = network().eval(), network()
    store.save(model, tmp_path / "model")
    store.load(tmp_path / "model", into=other)
    same(model, other)
    x = torch.rand(3, 4)
    assert torch.equal(model(x), other(x))


def tied(change: Callable[[Any], None]) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
    change(model)
    return model


def transposed(model: Any) -> None:
    model[1].weight = nn.Parameter(model[0].weight.data.T)


def parts(model: Any) -> None:
    model[2].running_mean = model[0].weight.data[1]


def apart(model: Any) -> None:
    whole = torch.rand(2, 3, 3)
    model[0].weight, model[1].weight = nn.Parameter(whole[0]), nn.Parameter(whole[1])


def test_tensors_that_share_memory_and_are_not_the_same(tmp_path: Path) -> None:
    for change in (transposed, parts):
        model, other = tied(change), tied(change)
        store.save(model, tmp_path / "model")
        with pytest.raises(
            ValueError, match=r"how to build torch.nn.Sequential \(tensors in it share memory and are not the"
        ):
            store.load(tmp_path / "model")
        same(store.load(tmp_path / "model", into=other), model)
        if change is transposed:
            other[0].weight.data[0, 1] = 7
            assert other[1].weight[1, 0] == 7  # they are tied still
    model = tied(apart)  # neighbours in memory, which nobody can tell
    store.save(model, tmp_path / "model")
    same(store.load(tmp_path / "model"), model)


def test_the_layout_of_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    store.save(model, tmp_path / "model")
    loaded = store.load(tmp_path / "model")
    same(model, loaded)
    assert [p.stride() for p in loaded.parameters()] == [p.stride() for p in model.parameters()]
    plain = store.load(tmp_path / "model", into=nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)))
    same(model, plain)
    assert plain[0].weight.is_contiguous()


# All or nothing ------------------------------------------------------------------------------------------------------


class Fails(nn.Module):
    """Refuses to be loaded, after the layers before it were."""

    def __init__(self, how: str = "load") -> None:
        super().__init__()
        self.how, self.layer, self.count = how, nn.Linear(2, 2), [0]

    def _load_from_state_dict(self, *args: Any) -> None:
        self.count.append(1)
        if self.how == "load":
            raise KeyError("layer\nof mine")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        super()._load_from_state_dict(*args)


class Ignores(nn.Linear):
    """Keeps what it has."""

    def _load_from_state_dict(self, *args: Any) -> None:
        pass


def broken(how: str) -> nn.Module:
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.BatchNorm1d(2), c=Fails(how), d=nn.Linear(2, 2)))
    if how == "replace":

        def replace(module: Any, *_: Any) -> None:
            module.weight = nn.Parameter(torch.zeros(2, 2))
            raise RuntimeError("after it has replaced a parameter")

        model.d.register_load_state_dict_pre_hook(replace)
    if how == "after":
        model.register_load_state_dict_post_hook(lambda *_: (_ for _ in ()).throw(AttributeError("too late")))
    if how == "ignore":
        model.d = Ignores(2, 2)
    return model


@pytest.mark.parametrize("how", ["load", "interrupt", "replace", "after", "ignore"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_load_that_fails_changes_nothing(how: str, dtype: torch.dtype, tmp_path: Path) -> None:
    good = broken("never").to(dtype).eval()
    good.a.requires_grad_(False)
    store.save(good, tmp_path / "model")
    model = broken(how)
    model.a(torch.rand(3, 2)).sum().backward()
    before = snapshot(model)
    error = KeyboardInterrupt if how == "interrupt" else ValueError
    with pytest.raises(error) as caught:
        store.load(tmp_path / "model", into=model)
    assert snapshot(model) == before
    assert model.c.count == [0]
    if how != "interrupt":
        assert str(caught.value).startswith(f"cannot load {tmp_path / 'model'}: ")
        assert "\n" not in str(caught.value)
    store.load(tmp_path / "model", into=(sound := broken("never")))
    same(sound, good)


def test_an_empty_tensor_of_another_shape(tmp_path: Path) -> None:
    """It gets its shape from the file where a module knows how; where it does not, nothing is changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of tensors without numbers
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(0, 5, bias=False), nn.Linear(0, 3))
        store.save(nn.Sequential(nn.Linear(2, 2), nn.Linear(1, 5, bias=False), nn.Linear(0, 3)), tmp_path / "model")
    before = snapshot(model)
    with pytest.raises(ValueError, match="cannot load .*: the model refuses it, RuntimeError: .*size mismatch"):
        store.load(tmp_path / "model", into=model)
    assert snapshot(model) == before


def test_tensors_that_cannot_be_changed(tmp_path: Path) -> None:
    """Made in inference mode, or one number under many indices."""
    store.save(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3)), tmp_path / "model")
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="0.bias was made in inference mode in the model and cannot be changed"):
        store.load(tmp_path / "model", into=model)
    with torch.inference_mode():
        store.load(tmp_path / "model", into=model)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3))
    model[1].running_mean = torch.zeros(1).expand(3)
    store.save(model, tmp_path / "expanded")
    before = snapshot(model)
    model[0].bias.data.add_(1)
    changed = snapshot(model)
    with pytest.raises(ValueError, match="the model refuses it, RuntimeError: .*running_mean"):
        store.load(tmp_path / "model", into=model)
    assert snapshot(model) == changed != before


class Versioned(nn.Module):
    """Reads what older versions of it wrote otherwise."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 3:
            state[prefix + "scale"] = state[prefix + "scale"] ** 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_versions_of_classes(tmp_path: Path) -> None:
    model = Versioned()
    model.scale.data.fill_(3)
    store.save(model, tmp_path / "model")
    same(store.load(tmp_path / "model", into=Versioned()), model)


def test_long_lists_of_differences_are_cut(tmp_path: Path) -> None:
    store.save(nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)]), tmp_path / "model")
    with pytest.raises(ValueError, match=r"unexpected in the file: .*; and 194 more\); nothing was loaded") as caught:
        store.load(tmp_path / "model", into=nn.ReLU())
    assert len(str(caught.value)) < 600


# Small files that ask for much ---------------------------------------------------------------------------------------


def layer(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class": f"torch.nn.{name}" if "." not in name else name, "arguments": arguments}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"class": "torch.nn.Sequential", "children": {str(n): part for n, part in enumerate(parts)}}


def conv(**arguments: Any) -> dict[str, Any]:
    return layer("misconv.MisConv2d", **{"in_channels": 1, "out_channels": 2, "kernel_size": 1, **arguments})


BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "layers of an LSTM": (layer("LSTM", input_size=1, hidden_size=1, num_layers=10**7), "which is neither a layer of torch.nn that a file may name"),
    "layers of a transformer": (layer("Transformer", num_encoder_layers=10**6), "which is neither a layer of torch.nn"),
    "blocks": (layer("misconv.ConvDMFA", channels=1, widths=[1], depths=[10**7]), "more (numbers|parameters) than the file holds"),
    "levels": (layer("misconv.ConvDMFA", channels=1, widths=[1] * 500, depths=[1] * 999), "than the file holds"),
    "widths": (layer("misconv.ConvDMFA", channels=1, widths=[10**6] * 3), "than the file holds"),
    "pixels": (layer("misconv.LinearDMFA", shape=[1, 30, 30]), "than the file holds"),
    "a mixture": (layer("misconv.SMFA", shape=[3, 500, 500]), "than the file holds"),
    "channels": (conv(out_channels=10**10), "than the file holds"),
    "channels without weights": (conv(out_channels=10**9, kernel_size=0, bias=False), "than the file holds"),
    "slopes": (conv(activation={"module": layer("PReLU", num_parameters=10**11)}), "than the file holds"),
    "an activation that enlarges": (conv(activation={"module": layer("Upsample", scale_factor=1e5)}), "activation of MisConv2d must be one of torch.nn, got Upsample"),
    "an activation that pads": (conv(activation={"module": sequence(layer("ZeroPad2d", padding=10**6))}), "must be one of torch.nn, got Sequential"),
    "a norm": (conv(norm={"module": layer("BatchNorm2d", num_features=10**10)}), "than the file holds"),
    "many layers": (sequence(*[layer("ReLU")] * 10**5), "far more modules than the file has tensors"),
    "many small layers": (sequence(*[layer("Linear", in_features=1, out_features=1)] * 5000), "than the file holds"),
    "one big layer": (layer("Conv3d", in_channels=10**4, out_channels=10**4, kernel_size=10**3), "than the file holds"),
    "an embedding": (layer("Embedding", num_embeddings=10**9, embedding_dim=10), "than the file holds"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_small_files_that_ask_for_much(name: str, tmp_path: Path) -> None:
    description, message = BOMBS[name]
    store.save(nn.Linear(2, 3), tmp_path / "model")
    data = (tmp_path / "model").read_bytes()
    content = damage.content_of(data)
    content["content"]["model"] = description
    (tmp_path / "model").write_bytes(damage.with_content(data, content))
    begin = time.process_time()
    with pytest.raises(ValueError, match=f"cannot load .*: .*{message}"):
        store.load(tmp_path / "model")
    assert time.process_time() - begin < 3


def test_one_tensor_under_many_names(tmp_path: Path) -> None:
    """4 MB that would be 4 GB: names of a tensor cost nothing, the layers that are built for them do."""
    weight = torch.rand(1000, 1000, dtype=torch.float32)
    content = {
        "model": sequence(*[layer("Linear", in_features=1000, out_features=1000, bias=False)] * 1000),
        "frozen": [],
        "evaluating": [],
    }
    store.write(tmp_path / "model", {f"{n}.weight": weight for n in range(1000)}, json.loads(json.dumps(content)))
    with pytest.raises(ValueError, match="it asks for more numbers than the file holds"):
        store.load(tmp_path / "model")
    few = nn.Sequential(*[nn.Linear(30, 30)] * 40)
    store.save(few, tmp_path / "model")
    loaded = store.load(tmp_path / "model")
    assert all(torch.equal(bits(few[n].weight), bits(loaded[n].weight)) for n in range(40))
    assert loaded[0].weight is loaded[39].weight


def test_layers_made_at_the_same_time_are_not_counted(tmp_path: Path) -> None:
    """The limit on what a file may build is a limit for the thread that loads it."""
    import threading

    store.save(nn.Linear(2, 3), tmp_path / "model")
    stop, failures = threading.Event(), []

    def make() -> None:
        while not stop.is_set():
            try:
                nn.Linear(500, 500)
            except Exception as error:  # handed to the test
                failures.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(50):
            store.load(tmp_path / "model")
    finally:
        stop.set()
        thread.join()
    assert not failures

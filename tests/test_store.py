"""What is saved comes back; what is damaged, foreign or hostile is refused; the old file outlives every failure."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import misconv
from misconv import MFA, MisConv2d, PartialConv2d, impute, store
from tests import damage
from tests.reference import random_mfa

IMAGE = (3, 6, 6)


class Own(nn.Module):
    """A class of the user, which no file can name."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)


def fitted(imputer: Any) -> nn.Module:
    made: nn.Module = imputer.fit(torch.randn(5, *IMAGE), torch.rand(5, 1, 6, 6) < 0.6)
    return made


def network() -> nn.Sequential:
    return nn.Sequential(
        MisConv2d(3, 8, 3, padding=1, norm=nn.BatchNorm2d(8)),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(8, 4, (3, 1), padding="same", bias=False, padding_mode="reflect"),
        nn.BatchNorm2d(4, affine=False, momentum=None),
        nn.Sequential(nn.PReLU(4, init=0.1), nn.Dropout(0.3)),
        nn.Flatten(),
        nn.Sequential(),
        nn.LayerNorm(36),
        nn.Linear(36, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MisConv2d": lambda: MisConv2d(3, 4, 3, 2, padding=1, groups=1, bias=False),
    "MisConv2d with a norm": lambda: MisConv2d(3, 4, 3, norm=nn.BatchNorm2d(4, eps=1e-3), activation="gelu"),
    "MisConv2d with slopes": lambda: MisConv2d(3, 4, 3, padding="same", dilation=2, activation=nn.PReLU(4, 0.3)),
    "MisConv2d with a function": lambda: MisConv2d(3, 4, 3, activation=F.silu),
    "MisConv2d with a builtin": lambda: MisConv2d(3, 4, 3, activation=torch.sin),
    "PartialConv2d": lambda: PartialConv2d(3, 4, (3, 1), stride=(1, 2), bias=False),
    "Mean": lambda: fitted(impute.Mean()),
    "KNN": lambda: fitted(impute.KNN(3)),
    "KNN without images": lambda: impute.KNN(7),
    "network": network,
    "lists": lambda: nn.ModuleList([nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.GELU("tanh")}), nn.Upsample(None, 2)]),
    "named": lambda: nn.Sequential(
        nn.modules.container.OrderedDict(first=nn.ConvTranspose2d(3, 4, 2), then=nn.ELU(0.5))
    ),
    "no tensors": lambda: nn.Sequential(nn.ReLU()),
}


def apply(model: nn.Module) -> Tensor | None:
    """What the model makes of some images, where we know how to ask."""
    torch.manual_seed(1)
    x, observed = torch.randn(2, *IMAGE), torch.rand(2, 1, 6, 6) < 0.5
    if isinstance(model, PartialConv2d | impute.Mean) or (isinstance(model, impute.KNN) and model.images.numel()):
        return model(x, observed)
    takes_density = isinstance(model, MisConv2d) or (
        isinstance(model, nn.Sequential) and isinstance(model[0], MisConv2d)
    )
    return model(random_mfa(2, 2, 2, IMAGE, observed)) if takes_density else None


def same_state(first: nn.Module, second: nn.Module) -> None:
    mine, theirs = first.state_dict(), second.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype
        assert torch.equal(mine[name].cpu(), theirs[name].cpu()), name


# There and back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back(name: str, tmp_path: Path) -> None:
    model = MODELS[name]().eval()
    chance = torch.get_rng_state()
    store.save(model, tmp_path / "model")
    loaded = store.load(str(tmp_path / "model"))
    assert torch.equal(torch.get_rng_state(), chance)  # loading draws no random numbers of the caller
    assert repr(loaded) == repr(model)
    assert [type(part) for part in loaded.modules()] == [type(part) for part in model.modules()]
    same_state(model, loaded)
    result = apply(model)
    again = apply(loaded.to(torch.get_default_device()))
    assert again is None if result is None else torch.equal(again, result)
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_modes_types_and_frozen_parameters_come_back(tmp_path: Path) -> None:
    model = network()
    model[3].eval()
    model[2].requires_grad_(False)
    model[8].to(torch.bfloat16)
    model[0].norm.half().requires_grad_(False)
    for target in (None, network().eval()):
        store.save(model, tmp_path / "model")
        loaded = store.load(tmp_path / "model", into=target)
        assert target is None or loaded is target
        same_state(model, loaded)
        assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in model.parameters()]
        assert [part.training for part in loaded.modules()] == [part.training for part in model.modules()]
        assert loaded[8].weight.dtype == torch.bfloat16


def with_stride(model: Any) -> nn.Module:
    """A network that its constructor does not make."""
    model.conv1.stride = (1, 1)
    changed: nn.Module = model
    return changed


def test_into_a_model_of_any_class(tmp_path: Path) -> None:
    model, other = (with_stride(torchvision.models.resnet18(num_classes=3)) for _ in range(2))
    parameters = list(other.parameters())
    store.save(model, tmp_path / "model")
    store.load(tmp_path / "model", into=other)
    same_state(model, other)
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True))  # an optimizer still holds them
    with pytest.raises(
        ValueError,
        match=r"does not say how to build torchvision.models.resnet.ResNet \(.* was changed after it was built\); build the model yourself and call misconv.load\(path, into=model\)",
    ):
        store.load(tmp_path / "model")


def test_an_imputer_into_one_without_images(tmp_path: Path) -> None:
    model = nn.Sequential(fitted(impute.KNN(3)))
    store.save(model, tmp_path / "model")
    loaded = store.load(tmp_path / "model", into=nn.Sequential(impute.KNN(3)))
    same_state(model, loaded)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[2].weight = model[0].weight
    model.append(model[3])  # the same module twice
    store.save(model, tmp_path / "model")
    assert len(load_file(tmp_path / "model")) == 8  # of 13 names
    loaded = store.load(tmp_path / "model")
    same_state(model, loaded)
    assert isinstance(loaded, nn.Sequential)
    assert loaded[0].weight is loaded[2].weight
    assert loaded[3].running_mean is loaded[4].running_mean
    assert len(list(loaded.parameters())) == len(list(model.parameters()))
    # Into a model that ties nothing the values go twice, into one that ties what differs they do not go at all.
    apart = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    same_state(store.load(tmp_path / "model", into=apart), model)
    apart[2].weight.data.add_(1)
    store.save(apart, tmp_path / "model")
    with pytest.raises(ValueError, match="2.weight is the same as 0.weight in the model but not in the file"):
        store.load(tmp_path / "model", into=model)


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tensors = {
        "a": base,
        "same": base,
        "view": base[1:],
        "turned": base.T,
        "alike": base.view(3, 4),
        "none": base[:0],
        "nothing": base[:0],
    }
    store.write(tmp_path / "file", tensors, {"epoch": 3})
    back, metadata = store.read(tmp_path / "file")
    assert metadata == {"epoch": 3}
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor.cpu())
    assert back["same"] is back["a"]
    assert back["alike"] is back["a"]
    assert back["none"] is not back["nothing"]
    back["view"][0, 0] = -1  # no memory in common
    assert back["a"][1, 0] == 4


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_types_of_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    store.write(tmp_path / "file", {"t": tensor, "scalar": tensor[0, 0], "empty": tensor[:0]}, {})
    back, _ = store.read(tmp_path / "file")
    assert back["t"].dtype == dtype
    assert torch.equal(back["t"], tensor.cpu())
    assert back["scalar"].shape == ()
    assert back["empty"].shape == (0, 5)


def test_the_file_is_open_to_everyone(tmp_path: Path) -> None:
    """Any safetensors reader gets the tensors, any JSON reader the description."""
    store.save(nn.Linear(2, 3), tmp_path / "model")
    data = (tmp_path / "model").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    description = json.loads(header["__metadata__"]["misconv"])
    assert description["format"] == 2
    assert description["misconv"] == misconv.__version__
    assert description["content"]["model"] == {
        "class": "torch.nn.Linear",
        "arguments": {"in_features": 2, "out_features": 3, "bias": True},
    }
    assert load_file(tmp_path / "model").keys() == {"weight", "bias"}


# What cannot be described --------------------------------------------------------------------------------------------


def square_root(x: Tensor) -> Tensor:
    return x.abs().sqrt()


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        (lambda: Own(), "test_store.Own"),
        (lambda: nn.Sequential(nn.Linear(1, 1), Own()), "test_store.Own"),
        (lambda: MisConv2d(3, 4, 3, activation=square_root), "test_store.square_root"),
        (lambda: nn.LSTM(2, 3), "torch.nn.LSTM"),  # does not keep its arguments under their names
        (lambda: nn.MultiheadAttention(4, 2, bias=False), "torch.nn.MultiheadAttention"),
        (lambda: nn.CrossEntropyLoss(torch.ones(3)), "torch.nn.CrossEntropyLoss"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "ParametrizedLinear"),
    ],
)
def test_other_classes_need_a_model(model: Callable[[], nn.Module], culprit: str, tmp_path: Path) -> None:
    first, second = model(), model()
    store.save(first, tmp_path / "model")
    with pytest.raises(
        ValueError,
        match=rf"cannot load .*model: the file does not say how to build .*{culprit}; build the model yourself",
    ):
        store.load(tmp_path / "model")
    same_state(store.load(tmp_path / "model", into=second), first)


def test_a_class_of_the_same_name_is_not_ours(tmp_path: Path) -> None:
    class MisConv2d(nn.Conv2d):
        pass

    class Linear(nn.Linear):
        pass

    for model in (MisConv2d(3, 4, 3), Linear(2, 3)):
        store.save(model, tmp_path / "model")
        with pytest.raises(ValueError, match="the file does not say how to build .*locals"):
            store.load(tmp_path / "model")


def test_a_mismatch_leaves_the_model_untouched(tmp_path: Path) -> None:
    store.save(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.PReLU()), tmp_path / "model")
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(5, 4), nn.ReLU(), nn.Linear(1, 1, bias=False)).eval()
    other[1].bias.requires_grad_(False)
    before = copy.deepcopy(other)
    with pytest.raises(ValueError, match="the file does not fit the model") as caught:
        store.load(tmp_path / "model", into=other)
    for part in (
        f"cannot load {tmp_path / 'model'}: the file does not fit the model",
        "missing in the file: 3.weight",
        "unexpected in the file: 2.weight",
        "1.weight has shape (4, 3) in the file and (4, 5) in the model",
        "nothing was loaded",
    ):
        assert part in str(caught.value)
    same_state(before, other)
    assert not other.training
    assert not other[1].bias.requires_grad
    store.write(
        tmp_path / "model",
        {"weight": torch.ones(3, 2, dtype=torch.int64)},
        {"model": None, "frozen": [], "evaluating": []},
    )
    with pytest.raises(ValueError, match="weight has type torch.int64 in the file and torch.float"):
        store.load(tmp_path / "model", into=nn.Linear(2, 3, bias=False))
    with pytest.raises(ValueError, match="weight has no values in the model"):
        store.load(tmp_path / "model", into=nn.Linear(2, 3, bias=False, device="meta"))


def test_what_has_no_values_is_refused(tmp_path: Path) -> None:
    for model, message in (
        (nn.LazyLinear(3), "weight has no shape yet; call the model once before it is saved"),
        (
            nn.Linear(2, 3, device="meta"),
            "weight must be an ordinary tensor with values in memory to be stored, got a .* on meta",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            store.save(model, tmp_path / "model")
    with pytest.raises(ValueError, match="sparse must be an ordinary tensor .* of layout sparse_coo"):
        store.write(tmp_path / "model", {"sparse": torch.eye(2).to_sparse()}, {})
    with pytest.raises(TypeError, match="epoch must be a tensor to be stored, got 3"):
        store.write(tmp_path / "model", {"epoch": 3}, {})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="metadata must hold only what JSON can say, got .*Tensor"):
        store.write(tmp_path / "model", {}, {"t": torch.ones(1)})
    with pytest.raises(ValueError, match="tensors must be of types and names that safetensors can store"):
        store.write(tmp_path / "model", {"\ud800": torch.ones(1)}, {})
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got 'net'"):
        store.save("net", tmp_path / "model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"into must be a torch.nn.Module or None, got .*"):
        store.load(tmp_path / "model", into=nn.Linear)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# Reading what should not be read -------------------------------------------------------------------------------------


def test_files_that_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with pytest.raises(FileNotFoundError, match=r"cannot load .*model: there is no such file; check the name"):
        store.load(path)
    with pytest.raises(IsADirectoryError, match=r"cannot load .*: it is a folder; name a file"):
        store.load(tmp_path)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (5000,), generator=generator, device="cpu").to(torch.uint8).numpy().tobytes()
    for data in (
        b"",
        b"abc",
        b"epoch,loss\n" * 100,
        b"\x89PNG\r\n\x1a\n" + bytes(500),
        noise,
        b"\xff" * 100,
        bytes(100),
    ):
        path.write_bytes(data)
        with pytest.raises(
            ValueError,
            match=r"cannot load .*model: this is not a file of misconv; give one that misconv.save has written",
        ):
            store.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", b"")
    with pytest.raises(ValueError, match="this is not a file of misconv"):
        store.load(path)
    save_file({"weight": torch.ones(2, device="cpu")}, path)
    with pytest.raises(
        ValueError,
        match=r"cannot load .*model: this safetensors file was not written by misconv; load its tensors with safetensors.torch.load_file",
    ):
        store.load(path)
    store.write(path, {}, {"epoch": 3})
    with pytest.raises(ValueError, match="holds no model but something else that misconv has stored"):
        store.load(path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model"
    state = nn.Linear(2, 3).state_dict()
    torch.save(state, path)
    made = [path.read_bytes(), pickle.dumps(Bomb(tmp_path / "exploded")), pickle.dumps({"a": 1}, protocol=2)]
    torch.save(state, path, _use_new_zipfile_serialization=False)
    for data in [*made, path.read_bytes()]:
        path.write_bytes(data)
        with pytest.raises(
            ValueError,
            match=r"cannot load .*model: this is a pickle, as torch.save writes it, and misconv never loads pickles",
        ):
            store.load(path)
    assert not (tmp_path / "exploded").exists()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_truncated_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "model"
    store.save(nn.Linear(20, 30), path)
    whole = path.read_bytes()
    for size in (9, 20, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cannot load .*model: the file is damaged or cut short; copy it again"):
            store.load(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(ValueError, match="damaged or cut short"):
        store.load(path)
    path.write_bytes(whole.replace(b"data_offsets", b"data_offsetz"))
    with pytest.raises(ValueError, match="damaged or cut short"):
        store.load(path)


def with_header(path: Path, header: object, tensors: dict[str, Tensor] | None = None) -> Path:
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(tensors or {}, path, {"misconv": text, "misconv_sha256": "0" * 64})
    path.write_bytes(damage.sealed(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            {"format": 3, "misconv": "9.1", "aliases": {}, "pairs": {}, "content": {}},
            "it has format 3, written by misconv '9.1', and this misconv reads format 2; install a newer misconv",
        ),
        (
            {"format": 1, "misconv": "0.1", "aliases": {}, "content": {}},
            "it has format 1, written by misconv '0.1', which this misconv reads no more; save the model again",
        ),
        ({"format": 10**30, "content": 3}, "install a newer misconv"),
        ({"format": "1"}, "its description is broken, the format must be a number from 1 on"),
        ({"format": True}, "the format must be a number from 1 on"),
        ({"format": 0}, "the format must be a number from 1 on"),
        ([], "the format must be a number from 1 on"),
        ({"format": 2}, "its description is broken, the aliases, the pairs or the content are missing"),
        ({"format": 2, "aliases": [], "pairs": {}, "content": {}}, "the aliases, the pairs or the content are missing"),
        (
            {"format": 2, "aliases": {"a": "b"}, "pairs": {}, "content": {}},
            "its description is broken, the aliases do not fit the tensors",
        ),
        ({"format": 2, "aliases": {"a": ["t"]}, "pairs": {}, "content": {}}, "the aliases do not fit the tensors"),
        ({"format": 2, "aliases": {"t": "t"}, "pairs": {}, "content": {}}, "the aliases do not fit the tensors"),
        *(
            ({"format": 2, "aliases": {}, "pairs": pairs, "content": {}}, "the complex tensors do not fit the tensors")
            for pairs in (
                {"t": "complex128"},
                {"x": "complex128"},
                {"t": "float32"},
                {"t": ["complex128"]},
                {"t": None},
            )
        ),
        ('{"format": 2, "format": 2}', "its description is broken, ValueError: a name is there twice"),
        ("{'format': 1}", "its description is broken, JSONDecodeError"),
        ("[" * 200_000, "its description is broken, RecursionError"),
        ("9" * 10_000, "its description is broken, ValueError"),
        ("", "its description is broken, JSONDecodeError"),
    ],
)
def test_broken_headers(header: object, message: str, tmp_path: Path) -> None:
    path = with_header(tmp_path / "model", header, {"t": torch.ones(1, device="cpu")})
    with pytest.raises(
        ValueError, match=f"cannot load .*model: {message}" if message.startswith(("it has", "its")) else message
    ):
        store.load(path)


LINEAR = {"class": "torch.nn.Linear", "arguments": {"in_features": 2, "out_features": 3}}


def nested(depth: int) -> dict[str, Any]:
    description: dict[str, Any] = LINEAR
    for _ in range(depth):
        description = {"class": "torch.nn.Sequential", "children": {"0": description}}
    return description


def conv(**arguments: object) -> dict[str, Any]:
    return {
        "class": "misconv.MisConv2d",
        "arguments": {"in_channels": 1, "out_channels": 2, "kernel_size": 3, **arguments},
    }


HOSTILE = [
    *(
        (
            {"class": name, "arguments": {"command": "touch exploded"}},
            "which is neither a layer of torch.nn that a file may name nor of this misconv",
        )
        for name in (
            "os.system",
            "builtins.eval",
            "eval",
            "",
            "torch.nn.",
            "torch.load",
            "torch.nn.init",
            "torch.nn.Parameter",
            "torch.nn.functional.relu",
            "torch.nn.modules.linear.Linear",
            "torch.nn.DataParallel",
            "torch.nn.utils.parametrize.torch.os.system",
            "torch.nn.__builtins__",
            "torch.nn.NoSuchLayer",
            "torch.nn.LSTM",
            "torch.nn.Transformer",
            "torch.nn.LazyLinear",
            "misconv.store.write_bytes",
            "misconv.MFA",
            "misconv.store",
            "misconv.__class__",
            "../../evil.Layer",
        )
    ),
    (None, "its description is broken, a module must have a class, got NoneType"),
    ([LINEAR], "a module must have a class"),
    ("torch.nn.Linear", "a module must have a class"),
    ({"class": ["torch.nn.Linear"], "arguments": {}}, "a module must have a class"),
    (
        {"class": "torch.nn.Linear", "arguments": [2, 3]},
        "its description is broken, torch.nn.Linear must have arguments",
    ),
    ({"class": "torch.nn.Linear", "children": {}}, "torch.nn.Linear must have arguments"),
    ({"class": "torch.nn.Sequential", "children": [LINEAR]}, "torch.nn.Sequential must have arguments"),
    ({"class": "torch.nn.Sequential", "children": {"a.b": LINEAR}}, "Sequential refuses its arguments"),
    ({"class": "torch.nn.Sequential", "children": {"forward": LINEAR}}, "Sequential refuses its arguments"),
    (
        {"class": "torch.nn.Linear", "arguments": {"in_features": "two", "out_features": 3}},
        "its description is broken, Linear refuses its arguments",
    ),
    ({"class": "torch.nn.Linear", "arguments": {"in_features": 2}}, "Linear refuses its arguments: .*out_features"),
    ({"class": "torch.nn.Linear", "arguments": {"in_features": -2, "out_features": 3}}, "Linear refuses its arguments"),
    (
        {"class": "torch.nn.Linear", "arguments": {"in_features": 2, "out_features": 3, "device": "cuda"}},
        "Linear has no argument 'device'",
    ),
    (
        {"class": "torch.nn.Linear", "arguments": {"in_features": 2, "out_features": 3, "self": 1}},
        "Linear has no argument 'self'",
    ),
    (
        {"class": "torch.nn.Linear", "arguments": {"in_features": 10**5, "out_features": 10**5}},
        "it asks for more numbers than the file holds",
    ),
    (
        {"class": "torch.nn.Linear", "arguments": {"in_features": 10**12, "out_features": 10**12}},
        "its description is broken",
    ),
    (
        {"class": "torch.nn.ModuleList", "children": {str(i): LINEAR for i in range(9)}},
        "it asks for more numbers than the file holds",
    ),
    (
        conv(activation={"module": {"class": "torch.nn.PReLU", "arguments": {"num_parameters": 10**10}}}),
        "it asks for more numbers than the file holds",
    ),
    (conv(activation="os.system"), "MisConv2d refuses its arguments: activation must be one of"),
    (conv(activation={"function": "load"}), "an object is no argument of a layer"),
    (conv(activation={"function": ["sin"]}), "is no argument of a layer"),
    (
        conv(activation={"module": {"class": "torch.nn.Softmax", "arguments": {"dim": 1}}}),
        "MisConv2d refuses its arguments: activation must be pointwise",
    ),
    (conv(norm={"module": LINEAR}), "MisConv2d refuses its arguments: norm must be nn.BatchNorm2d"),
    (conv(padding={"a": 1}), "is no argument of a layer"),
    (conv(groups=3), "MisConv2d refuses its arguments"),
    ({"class": "misconv.KNN", "arguments": {"k": 0}}, "KNN refuses its arguments: k must be an integer of at least 1"),
    (nested(60), "it is nested too deeply"),
    (nested(280), "it is nested too deeply"),
    (LINEAR, "the file does not fit the model .*missing in the file: bias"),
]


@pytest.mark.parametrize(("description", "message"), HOSTILE)
def test_hostile_descriptions(
    description: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    header = {
        "format": 2,
        "aliases": {},
        "pairs": {},
        "content": {"model": description, "frozen": [], "evaluating": []},
    }
    path = with_header(tmp_path / "model", header, {"t": torch.ones(40, device="cpu")})
    before = set(sys.modules)
    with pytest.raises(ValueError, match=rf"(?s)cannot load .*model: .*{message}"):
        store.load(path)
    assert not (tmp_path / "exploded").exists()
    assert not {name for name in set(sys.modules) - before if not name.startswith(("torch", "misconv"))}


def test_hostile_lists_and_aliases(tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(3, 2, device="cpu"), "bias": torch.ones(3, device="cpu")}
    for key in ("frozen", "evaluating"):
        for wrong in (None, "weight", [1], {"a": 1}):
            content = {"model": LINEAR, "frozen": [], "evaluating": [], key: wrong}
            path = with_header(
                tmp_path / "model", {"format": 2, "aliases": {}, "pairs": {}, "content": content}, tensors
            )
            with pytest.raises(ValueError, match=f"its description is broken, {key} must be a list of names, got"):
                store.load(path)
    norm = {"class": "torch.nn.BatchNorm1d", "arguments": {"num_features": 3}}
    names = {
        "weight": torch.ones(3, device="cpu"),
        "num_batches_tracked": torch.zeros((), dtype=torch.int64, device="cpu"),
    }
    header = {
        "format": 2,
        "pairs": {},
        "aliases": dict.fromkeys(("bias", "running_mean", "running_var"), "weight"),
        "content": {"model": norm, "frozen": [], "evaluating": []},
    }
    with pytest.raises(ValueError, match="its description is broken, running_mean and .* cannot be the same"):
        store.load(with_header(tmp_path / "model", header, names))


def test_a_density_of_any_kind(tmp_path: Path) -> None:
    """An imputer by density is a module like any other: its tensors go into one that was built alike."""

    class Density(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(()))

        def forward(self, x: Tensor, observed: Tensor) -> MFA:
            return MFA.point(torch.where(observed, x, self.shift))

    first, second = impute.by_density(Density()), impute.by_density(Density())
    store.save(first, tmp_path / "model")
    store.load(tmp_path / "model", into=second)
    x, observed = torch.randn(2, *IMAGE), torch.rand(2, 1, 6, 6) < 0.5
    assert torch.equal(first(x, observed), second(x, observed))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("LinearDMFA", {"shape": (1, 8, 8), "components": 2, "rank": 3}),
        ("ConvDMFA", {"channels": 2}),
        ("SMFA", {"components": 2, "rank": 2, "shape": (1, 3, 3)}),
    ],
)
def test_densities_come_back(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    model = getattr(pytest.importorskip("misconv.density"), name)(**arguments)
    store.save(model, tmp_path / "model")
    loaded = store.load(tmp_path / "model")
    assert type(loaded) is type(model)
    assert repr(loaded) == repr(model)
    same_state(model, loaded)

"""The house stays in order: who may import whom, and what the core needs to be imported at all."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

import misconv

SOURCE = Path(misconv.__file__).parent
ROOT = SOURCE.parents[1]
# What each room, or module outside of rooms, may import besides the standard library: the arrows of
# docs/architecture.md. A room is a folder; of one whose name begins with _ others import the door, its `__init__`, alone.
MAY_IMPORT = {
    "_version": set(),
    "_torch": {"torch"},
    "_compiler": set(),
    "_modes": {"torch"},
    "_backend": {"torch", "_torch"},
    "_checks": {"torch", "_torch", "numpy", "_backend"},
    "_math": {"torch", "_torch", "_checks"},
    "_triton": {"torch", "triton", "_backend", "_compiler", "_math", "_torch"},
    "missing": {"torch", "numpy", "_checks", "_math"},
    "mfa": {"torch", "_torch", "_backend", "_checks", "_math", "_triton"},
    "_conv": {"torch", "_torch", "_backend", "_checks", "_compiler", "_math", "_triton", "mfa"},
    "functional": {"torch", "_checks", "_conv", "_math", "mfa"},
    "layers": {"torch", "_checks", "_conv", "_math", "functional", "mfa"},
    "_density": {"torch", "_backend", "_checks", "_math", "_triton", "mfa"},
    "density": {"torch", "_checks", "_density", "_math", "mfa"},
    "impute": {"torch", "_checks", "_files", "_math", "mfa"},
    "_convert": {"torch", "_torch", "_backend", "_conv", "_math", "mfa"},
    "convert": {"torch", "_torch", "_backend", "_checks", "_convert", "mfa"},
    "predict": {"torch", "_checks", "_modes", "mfa"},
    "_assess": {"torch", "numpy", "matplotlib", "_checks", "_math", "mfa", "missing"},
    "assess": {"torch", "matplotlib", "_assess", "_checks", "_modes", "mfa"},
    "_transforms": {"torch", "torchvision"},
    "transforms": {"torch", "numpy", "torchvision", "_checks", "_transforms"},
    "metrics": {"torch", "torchmetrics", "_checks"},
    "_store": {"torch", "safetensors", "torchvision", "timm", "_checks", "_convert", "_version"},
    "store": {"torch", "_checks", "_store"},
    "_train": {
        "torch", "numpy", "lightning_fabric", "lightning_utilities", "rich", "_checks", "_math", "_store", "_torch", "mfa",
        "missing", "store",
    },
    "training": {"torch", "_torch", "lightning_fabric", "_checks", "_train", "density", "mfa", "missing"},
    "_files": {"torch", "numpy", "PIL", "rasterio", "_store"},
    "data": {"torch", "numpy", "sklearn", "torchvision", "_checks", "_files", "transforms"},
    "bench": {
        "torch", "torchvision", "_backend", "_conv", "_store", "convert", "density", "functional", "layers", "mfa", "missing",
        "store",
    },
    "paper": {
        "torch", "lightning_fabric", "matplotlib", "PIL", "scipy", "torchmetrics", "deepinv", "_checks", "_modes", "_store",
        "_torch", "_train", "bench", "data", "density", "functional", "impute", "layers", "mfa", "missing", "store", "training",
    },
    "demo": {
        "torch", "jinja2", "markupsafe", "_version", "_store", "_train", "assess", "data", "density", "functional", "impute",
        "mfa", "missing", "paper", "store", "training",
    },
    "sklearn": {"torch", "numpy", "sklearn", "_train", "density", "training"},
    "images": {
        "torch", "numpy", "safetensors", "timm", "torchmetrics", "torchvision", "_files", "_store", "_torch", "_train",
        "assess", "convert", "density", "layers", "missing", "predict", "store", "training", "transforms",
    },
    "app": {
        "torch", "numpy", "jinja2", "PIL", "gradio", "fastapi", "uvicorn", "_files", "_train", "data", "density",
        "functional", "impute", "layers", "mfa", "missing", "paper", "predict", "store", "training",
    },
    "_terminal": {"rich", "typer"},
    "_doctor": {"torch", "_backend", "_conv", "_store", "functional", "mfa"},
    "cli_options": {"torch", "typer", "rich", "_store", "_terminal", "_train", "data", "images", "store"},
    "cli_images": {"typer", "_terminal", "cli_options", "data", "images", "store"},
    "cli_classifier": {"typer", "_terminal", "cli_options", "images", "store"},
    "cli_app": {"torch", "typer", "_terminal", "app"},
    "cli_tables": {"rich"},
    "cli": {
        "torch", "typer", "rich", "_doctor", "_terminal", "_version", "bench", "cli_app", "cli_classifier", "cli_images",
        "cli_tables", "demo", "paper",
    },
    "__init__": {
        "_backend", "_version", "assess", "convert", "density", "functional", "impute", "layers", "mfa", "missing", "predict",
        "store", "training",
    },
    "__main__": {"cli"},
}  # fmt: skip
# Who may import the package at its door alone, and who is inside.
ROOMS = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
MODULES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}


@cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, also inside functions; not what it imports for its types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            inside = {name for name in names if name.removeprefix("misconv.") in MODULES or _is_door(name)}
            found |= inside | (set() if inside == names else {module})
    return found


def _is_door(name: str) -> bool:
    return name.removeprefix("misconv.") in ROOMS


def own(path: Path) -> set[str]:
    """Those of them that are ours, as names of files: `_conv.plain`, and `_conv.__init__` for a door."""
    found = {name.removeprefix("misconv.") for name in imports(path) if name.startswith("misconv.")}
    found |= {"__init__" for name in imports(path) if name == "misconv"}
    return {f"{name}.__init__" if name in ROOMS else name for name in found}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_who_may_import_whom(name: str) -> None:
    room = name.split(".")[0]
    assert room in MAY_IMPORT, "a new room: say here and in docs/architecture.md what it may import"
    allowed = MAY_IMPORT[room] | {room}
    for found in imports(MODULES[name]):
        if found.startswith("misconv"):
            first, *rest = found.split(".")[1:] or ["__init__"]
            assert first in allowed, f"{name} imports {found}"
            assert first == room or not rest or not first.startswith("_"), f"{name} imports {found}, and not its door"
        else:
            assert found.split(".")[0] in allowed | set(sys.stdlib_module_names), f"{name} imports {found}"


def test_imports_have_an_order() -> None:
    """No circles, those by imports inside functions included: there is an order in which all could be imported."""
    graph = {name: own(path) - {name} for name, path in MODULES.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("mfa") < order.index("_conv.__init__") < order.index("functional") < order.index("layers")


def test_a_circle_would_be_found(tmp_path: Path) -> None:
    """Also one that is closed inside a function."""
    (tmp_path / "a.py").write_text("def f():\n    from misconv import mfa\n")
    assert own(tmp_path / "a.py") == {"mfa"}
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter({"mfa": {"a"}, "a": own(tmp_path / "a.py")}).static_order())


def test_the_core_imports_with_torch_numpy_and_safetensors_alone() -> None:
    """Every other distribution that is installed, and that torch does not need, cannot be imported."""
    needed, names = {"torch", "numpy", "safetensors", "misconv"}, []
    todo = ["torch", "numpy", "safetensors"]
    while todo:
        for text in importlib.metadata.requires(todo.pop()) or []:
            name = re.match(r"[\w.-]+", text)[0].lower().replace("_", "-")  # type: ignore[index]  # each has a name
            if "extra ==" not in text and name not in needed:
                needed.add(name)
                todo += [name] if _is_installed(name) else []
    for module, owners in importlib.metadata.packages_distributions().items():
        if not needed & {owner.lower().replace("_", "-") for owner in owners} and module not in sys.stdlib_module_names:
            names.append(module)
    assert {"lightning_fabric", "sklearn", "torchvision", "rich", "typer", "PIL", "scipy"} <= set(names)
    code = f"""
import sys
for name in {sorted(names)!r}: sys.modules[name] = None
import torch, misconv
layer, x = misconv.MisConv2d(3, 4, 3), torch.rand(2, 3, 8, 8)
density = misconv.SMFA(2, 1).fit(x, x > 0)
net = misconv.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()), density)
misconv.save(density, "density.safetensors")
assert (misconv.load("density.safetensors")(x, x > 0).mean == density(x, x > 0).mean).all()
net(x), layer(density(x, x > 0)), misconv.impute.zero(x, x > 0), misconv.predictive
"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert result.returncode == 0, result.stderr


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_public_names_are_listed_and_exist() -> None:
    for module in (misconv, misconv.functional, misconv.missing):
        for name in module.__all__:
            assert hasattr(module, name)
            assert getattr(module, name).__doc__


def test_importing_the_package_imports_nothing_else_until_it_is_used() -> None:
    code = """
import sys, misconv
assert not {"torch", "numpy"} & set(sys.modules)
assert set(misconv.__all__) <= set(dir(misconv))
assert "torch" not in sys.modules
from misconv.convert import Converted, convert  # a module and a function of one name: the name is the function's
assert misconv.convert is convert
from misconv.assess import Assessment, assess
assert misconv.assess is assess
from misconv import MFA, data
assert misconv.MFA is MFA is misconv.mfa.MFA and misconv.data is data and misconv.functional.expected_conv2d
try: misconv.nonsense
except AttributeError as error: assert str(error) == "module 'misconv' has no attribute 'nonsense'"
else: raise AssertionError
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_package_says_it_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()


def test_what_torch_keeps_private_is_in_one_file() -> None:
    """A release of torch that changes it can then be served in one place."""
    private = re.compile(r"torch\.(\w+\.)*_(?!_)")
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name == "_torch.py" or not re.search(r"\btorch\b.*\b_(?!_)\w", text):
            continue
        used = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                used.add(ast.unparse(node))
            elif isinstance(node, ast.ImportFrom):
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
        found = sorted(filter(private.match, used))
        assert not found, f"{path.name} uses {found}: give it a name in _torch.py"


def test_isinstance_takes_tuples_in_the_core() -> None:
    """torch 2.8 cannot compile `isinstance(x, A | B)`."""
    outside = {
        "_store",
        "app",
        "_train",
        "_transforms",
        "bench",
        "cli",
        "data",
        "demo",
        "paper",
        "store",
        "training",
        "transforms",
    }
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                name.split(".")[0] not in outside
                and isinstance(node, ast.Call)
                and ast.unparse(node.func) == "isinstance"
            ):
                assert not isinstance(node.args[1], ast.BinOp), f"{name}: {ast.unparse(node)}"


def test_what_is_compiled_imports_rooms_and_not_the_package() -> None:
    """`from misconv import …` inside a function: torch 2.11 cannot trace it, for the package is a subclass of a module."""
    for name in (
        "mfa",
        "functional",
        "layers",
        "density",
        "convert",
        *(n for n in MODULES if n.startswith(("_conv", "_math"))),
    ):
        for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                inner = [n for n in ast.walk(node) if isinstance(n, ast.ImportFrom)]
                assert all(n.module != "misconv" for n in inner), name


def test_unflatten_is_called_as_a_function() -> None:
    """`Tensor.unflatten` cannot be compiled by torch 2.11 while a default device is set; `torch.unflatten` can."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "unflatten":
                assert isinstance(node.value, ast.Name), path
                assert node.value.id == "torch", path

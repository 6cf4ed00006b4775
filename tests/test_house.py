"""The house stays in order: who may import whom, and what the core needs to be imported at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import misconv

SOURCE = Path(misconv.__file__).parent
# What each module may import, besides the standard library; the arrows of docs/architecture.md.
MAY_IMPORT = {
    "_checks": {"torch", "numpy", "mfa"},  # mfa for its type alone
    "_linalg": {"torch"},
    "_arguments": {"numpy", "torch", "_checks"},
    "missing": {"numpy", "torch", "_arguments", "_checks"},
    "_path": {"torch"},
    "_padding": {"torch"},
    "_launch": {"torch"},
    "_triton_mfa": {"triton"},
    "_triton_score": {"torch", "triton", "_launch", "_triton_mfa"},
    "_likelihood": {"torch", "_linalg"},
    "mfa": {"torch", "_arguments", "_checks", "_likelihood", "_path", "_triton_score"},
    "_expectations": {"torch", "_checks"},
    "_triton_expectations": {"triton"},
    "_triton_conv": {"triton", "_triton_expectations"},
    "_triton_backward": {"triton", "_triton_conv", "_triton_expectations"},
    "_triton_launch": {"torch", "_launch", "_triton_backward", "_triton_conv"},
    "_triton": {"torch", "_expectations", "_padding", "_path", "_triton_launch", "_batch_norm", "functional", "mfa"},
    "_touched": {"torch", "_batch_norm", "_expectations", "_padding", "mfa"},
    "_conv_checks": {"torch", "_checks", "_padding", "mfa"},
    "_batch_norm": {"torch", "_conv_checks", "_path"},
    "functional": {
        "torch",
        "_conv_checks",
        "_batch_norm",
        "_checks",
        "_expectations",
        "_padding",
        "_path",
        "_touched",
        "_triton",
        "mfa",
    },
    "layers": {"torch", "_checks", "_conv_checks", "_padding", "_expectations", "functional", "mfa"},
    "_em": {"torch", "_linalg"},
    "_em_data": {"torch", "_checks"},
    "_density_network": {"torch", "_checks", "_em_data", "mfa"},
    "density": {"torch", "_checks", "_density_network", "_em", "_em_data", "mfa"},
    "impute": {"torch", "_checks", "mfa"},
    "_files": set(),
    "_format": {"torch", "safetensors", "_checks", "_files"},
    "_builder": {"torch"},
    "_description": {"torch", "_builder", "_checks"},
    "_restore": {"torch", "_files"},
    "store": {"torch", "_checks", "_description", "_files", "_format", "_restore"},
    "_session": {"torch", "lightning_fabric", "lightning_utilities", "rich", "_checks"},
    "_loan": {"torch", "_checks"},
    "_places": set(),
    "_identity": {"torch", "numpy", "mfa"},
    "_checkpoint": {"torch", "lightning_fabric", "_checks", "_identity", "_places", "_processes", "store"},
    "_processes": {"torch", "lightning_fabric"},
    "_running": {"torch", "lightning_fabric", "_checks", "_loan", "_processes", "_session"},
    "_engine": {
        "torch",
        "lightning_fabric",
        "_checkpoint",
        "_identity",
        "_loan",
        "_processes",
        "_running",
        "_session",
    },
    "_jobs": {
        "torch",
        "lightning_fabric",
        "_checks",
        "_identity",
        "_loan",
        "_running",
        "_session",
        "mfa",
        "missing",
    },
    "training": {
        "torch",
        "lightning_fabric",
        "_checkpoint",
        "_checks",
        "_engine",
        "_identity",
        "_jobs",
        "_loan",
        "_processes",
        "_session",
        "density",
        "mfa",
        "missing",
    },
    "_provenance": {"torch"},
    "_image": {"torch", "mfa"},
    "_stem": {"torch", "_batch_norm", "_expectations", "_image", "_padding", "functional", "mfa"},
    "_tracker": {"torch", "_image", "_path", "_stem", "mfa"},
    "_follow_image": {"torch", "_image", "_stem", "_tracker"},
    "_follow": {"torch", "_expectations", "_follow_image", "_image", "_stem", "_tracker"},
    "_search": {"torch", "_follow", "_image", "_stem", "_tracker", "mfa"},
    "convert": {"torch", "_checks", "_follow", "_path", "_search", "_stem", "_tracker", "mfa"},
    "predict": {"torch", "_checks", "mfa"},
    "_transform_kernels": {"torch", "torchvision"},
    "transforms": {"torch", "numpy", "torchvision", "_checks", "_transform_kernels"},
    "data": {"torch", "numpy", "sklearn", "torchvision", "_checks"},
    "demo": {
        "torch",
        "_session",
        "data",
        "density",
        "impute",
        "layers",
        "mfa",
        "missing",
        "training",
        "paper/networks",
        "_jobs",
    },
    "_pictures": {"torch", "PIL"},
    "report": {"torch", "_pictures", "_places", "_provenance", "demo", "store"},
    "_bench_layer": {"torch", "_path", "functional", "mfa", "missing"},
    "_bench_check": {"torch", "_bench_layer", "_path", "functional", "mfa"},
    "_bench_clock": {"torch", "_bench_layer"},
    "_bench_warm": {"torch", "_bench_check", "_bench_layer"},
    "bench": {
        "torch",
        "_bench_check",
        "_bench_clock",
        "_bench_layer",
        "_bench_warm",
        "_path",
        "_places",
        "_provenance",
        "store",
    },
    "paper/__init__": set(),
    "paper/printed": set(),
    "paper/cache": {"store"},
    "paper/networks": {"torch", "layers"},
    "paper/inputs": {"torch", "_jobs", "impute", "mfa"},
    "paper/quality": {"torch", "torchmetrics", "_checks", "mfa"},
    "paper/densities": {
        "torch",
        "lightning_fabric",
        "_engine",
        "density",
        "missing",
        "paper/inputs",
        "_jobs",
    },
    "paper/classification": {
        "torch",
        "lightning_fabric",
        "_engine",
        "_provenance",
        "data",
        "density",
        "impute",
        "layers",
        "missing",
        "store",
        "training",
        "paper/cache",
        "paper/densities",
        "paper/inputs",
        "paper/networks",
        "paper/printed",
        "paper/quality",
        "paper/scores",
        "_jobs",
    },
    "paper/augment": {"torch", "mfa", "missing", "paper/inputs", "_jobs"},
    "paper/plus": {
        "torch",
        "impute",
        "mfa",
        "paper/augment",
        "paper/classification",
        "paper/scores",
        "paper/inputs",
        "paper/networks",
        "paper/densities",
        "_engine",
        "_jobs",
    },
    "paper/scores": {"scipy", "paper/printed"},
    "paper/tables": {"paper", "paper/printed", "paper/scores"},
    "paper/illustrate": {
        "torch",
        "data",
        "impute",
        "layers",
        "mfa",
        "missing",
        "store",
        "paper",
        "paper/classification",
        "paper/sheet",
        "_jobs",
    },
    "paper/sheet": {"torch", "matplotlib"},
    "paper/figures": {"torch", "matplotlib", "_checks", "_pictures", "paper/sheet"},
    "paper/command": {
        "torch",
        "lightning_fabric",
        "_places",
        "_session",
        "bench",
        "data",
        "store",
        "paper",
        "paper/cache",
        "paper/classification",
        "paper/illustrate",
        "paper/plus",
        "paper/quality",
        "paper/scores",
    },
    "cli": {"torch", "typer", "rich", "bench", "demo", "paper", "report"},
    "__main__": {"cli"},
    "__init__": {
        "_path",
        "convert",
        "density",
        "functional",
        "impute",
        "layers",
        "mfa",
        "missing",
        "predict",
        "store",
        "training",
    },
}


def imports(path: Path) -> set[str]:
    """Names of the modules a file imports, ours without the package's name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            names = {alias.name for alias in node.names} if module == "misconv" else set()
            found |= {f"misconv.{name}" for name in names if (SOURCE / f"{name}.py").exists()}
            found |= {module} - {"misconv"}
    ours = {"/".join(name.split(".")[1:]) for name in found if name.startswith("misconv.")}
    return ours | {name.split(".")[0] for name in found if not name.startswith("misconv")}


@pytest.mark.parametrize("name", sorted(p.relative_to(SOURCE).with_suffix("").as_posix() for p in SOURCE.rglob("*.py")))
def test_arrows_go_one_way(name: str) -> None:
    assert name in MAY_IMPORT, "a new room: say here and in docs/architecture.md what it may import"
    assert imports(SOURCE / f"{name}.py") - set(sys.stdlib_module_names) <= MAY_IMPORT[name]


def test_the_core_imports_with_torch_and_numpy_alone() -> None:
    """Every other package that an extra or a test brings is made impossible to import."""
    extras = "sklearn scipy matplotlib PIL torchvision timm lightning torchmetrics rich typer tifffile safetensors hypothesis"
    code = f"import sys\nfor name in {extras.split()!r}: sys.modules[name] = None\nimport misconv; misconv.MisConv2d(3, 4, 3)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_public_names_are_listed_and_exist() -> None:
    for module in (misconv, misconv.functional, misconv.missing):
        for name in module.__all__:
            assert hasattr(module, name)
            assert getattr(module, name).__doc__


def test_the_package_says_it_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()


def test_unflatten_is_called_as_a_function() -> None:
    """`Tensor.unflatten` cannot be compiled by torch 2.11 while a default device is set; `torch.unflatten` can."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "unflatten":
                assert isinstance(node.value, ast.Name), path
                assert node.value.id == "torch", path

"""Device and type come from the command line: `pytest --device cuda --dtype float32`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# Some virtual machines announce AMX and kill the process that uses it, as oneDNN does for bfloat16. It is read before
# the first product is computed; no result here depends on it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # kernels run here too, as numpy; has to be said before they are read
if find_spec("triton") is None:
    collect_ignore_glob = ["src/misconv/_triton/*.py", "tests/test_triton*.py", "tests/interpreter.py"]
elif os.environ.get("TRITON_INTERPRET") == "1" and tuple(map(int, version("triton").split(".")[:2])) >= (3, 9):
    from tests.interpreter import speed_up

    speed_up()

# One process a core (pytest-xdist); threads of torch on top of that would only get in each other's way; also those of
# the processes that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background ignores Ctrl-C, and so would the commands that tests stop by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# `make test` runs the core first, for a quick answer, and then the rest: all other files, and tests of the core that
# compile or export, and those of gradients and by Monte Carlo, which take longest.
CORE = ("test_house", "test_checks", "test_missing", "test_mfa", "test_functional", "test_layers")
SLOW = ("compile", "export", "onnx", "gradient", "monte_carlo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=["core", "rest"], help="only the core's quick tests, or all others")
    parser.addoption("--device", default="cpu", help="where tensors live: cpu, cuda, cuda:1, …")
    parser.addoption("--dtype", default="float64", help="float64 or float32")


def pytest_configure(config: pytest.Config) -> None:
    # "No bit" can be asked for only where a repeated computation repeats its bits.
    torch.backends.cudnn.deterministic = True
    _set_default_device(config)


def _set_default_device(config: pytest.Config) -> None:
    """Tensors made without a device or a type follow the command line, in tests and in doctests.

    The CPU is torch's own default. To ask for it would put a mode around every call of torch, which costs time, most of
    all while something compiles.
    """
    device = config.getoption("--device")
    torch.set_default_device(None if device == "cpu" else device)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    outside = collection_path.is_file() and collection_path.stem not in CORE
    return True if outside and config.getoption("--part") == "core" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is not None:
        chosen = [item for item in items if _is_core(item) == (part == "core")]
        config.hook.pytest_deselected(items=[item for item in items if _is_core(item) != (part == "core")])
        items[:] = chosen
    # With a GPU at hand kernels are compiled, not interpreted, and take no tensors of the CPU.
    if torch.cuda.is_available() and config.getoption("--device") == "cpu":
        reason = pytest.mark.skip(reason="compiled kernels need a GPU's tensors: pytest --device cuda")
        for item in items:
            if "test_triton" in item.nodeid or "test_kernels" in item.nodeid:
                item.add_marker(reason)


def _is_core(item: pytest.Item) -> bool:
    return item.path.stem in CORE and not any(word in item.name for word in SLOW)


@pytest.fixture(autouse=True)
def _defaults(request: pytest.FixtureRequest) -> None:
    doctest = isinstance(request.node, pytest.DoctestItem)
    torch.set_default_dtype(torch.float32 if doctest else getattr(torch, request.config.getoption("--dtype")))
    torch.manual_seed(0)


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen = getattr(torch, request.config.getoption("--dtype"))
    assert isinstance(chosen, torch.dtype)
    return chosen


@pytest.fixture
def compiler(request: pytest.FixtureRequest) -> None:
    """Inductor writes C++ for the CPU; a machine that has only Python, git and make cannot compile that."""
    if request.getfixturevalue("backend") == "inductor" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("torch.compile's inductor needs a C++ compiler")
    torch.compiler.reset()


@pytest.fixture
def without_default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_default_device(None)
    yield
    _set_default_device(request.config)


@pytest.fixture(scope="module", autouse=True)
def _tables_have_no_default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tables of the paper are made by commands, which have an option for the device and know of no default."""
    if request.path.stem.startswith("test_paper_"):
        torch.set_default_device(None)
    yield
    _set_default_device(request.config)


@pytest.fixture
def without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 with all its bits: convolutions on a GPU, torch's and ours, may else round to TF32, which has eleven."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def values_are_checked(request: pytest.FixtureRequest) -> None:
    """A look at values makes a GPU wait, so only on the CPU is it taken without being asked for."""
    if request.config.getoption("--device") != "cpu":
        pytest.skip("values are checked on the CPU alone")

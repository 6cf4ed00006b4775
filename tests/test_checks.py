"""Messages name the argument, the requirement and what came instead, in one line that shows no contents."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from misconv._checks import tensors as checks
from tests.reference import random_mfa


class Colour(Enum):
    RED = 1


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Many(nn.Module):
    def __repr__(self) -> str:
        return "line\n" * 300


DESCRIPTIONS = {
    "float64 numpy array": (np.zeros((1000, 3)), "a float64 numpy array of shape (1000, 3)"),
    "array without dimensions": (np.array(3), "a int64 numpy array of shape ()"),
    "numpy scalar": (np.int64(3), "np.int64(3) (int64)"),
    "string": ("relu", "'relu' (str)"),
    "long string": ("a" * 1000, "'" + "a" * 58 + "… (str)"),
    "string of lines": ("a\nb", "'a\\nb' (str)"),
    "bytes": (bytes(1000), "b'" + "\\x00" * 14 + "\\… (bytes)"),
    "pair": ((3, 4), "(3, 4) (tuple)"),
    "long list": (list(range(1000)), "a list of 1000 elements"),
    "list of tensors": ([torch.zeros(3)], "a list of 1 elements"),
    "dictionary": ({"a": 1}, "{'a': 1} (dict)"),
    "dictionary of tensors": ({"a": torch.zeros(3)}, "a dict of 1 elements"),
    "nested list": ([[1, 2], [3]], "a list of 2 elements"),
    "module": (Many(), "Many (a module)"),
    "layer": (nn.ReLU(), "ReLU() (a module)"),
    "layer of many settings": (nn.Conv2d(3, 8, 3, stride=2, padding=1), "Conv2d(3, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1,… (a module)"),
    "network": (nn.Sequential(nn.ReLU(), nn.ReLU()), "Sequential (a module)"),
    "class": (nn.ReLU, "the class ReLU"),
    "function": (torch.relu, "the builtin_function_or_method relu"),
    "own function": (checks.describe, "the function describe"),
    "lambda": (lambda x: x, "the function <lambda>"),
    "object whose repr raises": (Odd(), "an object of type Odd"),
    "object": (object(), "an object of type object"),
    "integer of too many digits": (10**5000, "a value that cannot be printed (int)"),
    "enum": (Colour.RED, "<Colour.RED: 1> (Colour)"),
    "dtype": (torch.float16, "torch.float16 (dtype)"),
    "path": (Path("a"), f"{Path('a')!r} ({type(Path('a')).__name__})"),
    "None": (None, "None (NoneType)"),
    "number": (float("nan"), "nan (float)"),
    "sparse tensor": (torch.zeros(2, 2, device="cpu", dtype=torch.float32).to_sparse(), "a sparse_coo float32 tensor of shape (2, 2) on cpu"),
    "tensor of nothing": (torch.zeros(2, 0, device="meta", dtype=torch.float32), "a float32 tensor of shape (2, 0) on meta"),
    "lazy parameter": (nn.UninitializedParameter(device="cpu", dtype=torch.float32), "an uninitialized float32 parameter on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_is_short_and_shows_no_contents(name: str) -> None:
    value, expected = DESCRIPTIONS[name]
    assert checks.describe(value) == expected
    assert len(checks.describe(value)) <= 100


def test_a_nested_tensor_is_described() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged, dtype=torch.float32)
    assert checks.describe(nested) == f"a nested float32 tensor on {nested.device}"


GOOD = [
    (checks.check_size, ("n", np.int64(3)), 3),
    (checks.check_positive, ("lr", 1), 1.0),
    (checks.check_positive, ("lr", np.float32(0.5)), 0.5),
    (checks.check_nonnegative, ("decay", 0), 0.0),
    (checks.check_probability, ("share", 1), 1.0),
    (checks.check_seed, ("seed", np.uint8(7)), 7),
    (checks.check_index, ("index", -1, 4), 3),
    (checks.check_pair, ("stride", 2), (2, 2)),
    (checks.check_pair, ("stride", [np.int64(2), 1]), (2, 1)),
    (checks.check_same_device, ({"x": torch.zeros(1), "density": nn.ReLU(), "observed": None},), None),
]


@pytest.mark.parametrize(("check", "arguments", "expected"), GOOD)
def test_what_serves_is_returned_as_a_python_number(
    check: Callable[..., object], arguments: tuple[object, ...], expected: object
) -> None:
    result = check(*arguments)
    assert result == expected
    assert type(result) is type(expected)


BAD = [
    (checks.check_size, ("n", True), "n must be an integer of at least 1, got True (bool)"),
    (checks.check_size, ("n", 2**70), f"n must be an integer of at least 1, got {2**70} (int)"),
    (checks.check_size, ("n", 1.0), "n must be an integer of at least 1, got 1.0 (float)"),
    (checks.check_fraction, (float("nan"),), "fraction must lie strictly between 0 and 1, got nan (float)"),
    (checks.check_positive, ("lr", 0), "lr must be a finite number above 0, got 0 (int)"),
    (checks.check_positive, ("lr", float("inf")), "lr must be a finite number above 0, got inf (float)"),
    (checks.check_positive, ("lr", "1"), "lr must be a finite number above 0, got '1' (str)"),
    (checks.check_positive, ("lr", 10**400), "lr must fit a float, got 1" + "0" * 58 + "… (int)"),
    (checks.check_nonnegative, ("decay", -1e-9), "decay must be a finite number of at least 0, got -1e-09 (float)"),
    (checks.check_probability, ("share", 1.5), "share must be a number from 0 to 1, got 1.5 (float)"),
    (checks.check_probability, ("share", None), "share must be a number from 0 to 1, got None (NoneType)"),
    (checks.check_seed, ("seed", -1), "seed must be an integer from 0 to 2**63 - 1, got -1 (int)"),
    (checks.check_seed, ("seed", 2**63), f"seed must be an integer from 0 to 2**63 - 1, got {2**63} (int)"),
    (checks.check_index, ("index", 4, 4), "index must be one of 4, from -4 to 3, got 4 (int)"),
    (checks.check_index, ("index", 1.0, 4), "index must be an integer, got 1.0 (float)"),
    (checks.check_pair, ("stride", 0), "stride must be an integer of at least 1 or a pair of them, got 0 (int)"),
    (checks.check_pair, ("stride", (1, 2, 3)), "stride must be an integer of at least 1 or a pair of them, got (1, 2, 3) (tuple)"),
    (checks.check_pair, ("stride", "ab"), "stride must be an integer of at least 1 or a pair of them, got 'ab' (str)"),
    (checks.check_dense, ("x", torch.zeros(2, device="cpu").to_sparse()), "x must be a dense tensor, got a sparse_coo"),
    (checks.check_dense, ("x", torch.zeros(2, dtype=torch.float8_e5m2)), "x must be of type float16, bfloat16, float32 or float64, got a float8_e5m2"),
    (checks.check_images, ("x", torch.zeros(1, 1, 2, 2, device="cpu").to_sparse()), "x must be a dense tensor, got a sparse_coo"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "arguments", "message"), BAD)
def test_what_does_not_serve_is_refused_by_name(
    check: Callable[..., object], arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)) as caught:
        check(*arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_devices_that_differ_are_told_in_one_sentence() -> None:
    here = torch.zeros(1, device="cpu")
    there = nn.Linear(1, 1, device="meta")
    message = "^x, observed and density must be on one device, got x on cpu, observed on cpu and density on meta$"
    with pytest.raises(ValueError, match=message):
        checks.check_same_device({"x": here, "observed": here, "density": there, "norm": nn.ReLU()})
    with pytest.raises(ValueError, match="^network must be on one device, got network on cpu and meta$"):
        checks.check_same_device({"network": nn.Sequential(nn.Linear(1, 1, device="cpu"), there)})


def test_the_device_of_an_mfa_counts() -> None:
    p = random_mfa(1, 1, 1, (1, 2, 2))
    checks.check_same_device({"p": p, "x": p.means})
    with pytest.raises(ValueError, match=f"p and x must be on one device, got p on {p.device} and x on meta"):
        checks.check_same_device({"p": p, "x": torch.zeros(1, device="meta")})

"""Triton's interpreter, made faster for tests; what it computes and what it checks stay the same.

Nearly all of its time goes to the types of tensors, which are made anew for every operation although there are only a few
of them, and to the check of integers for overflow, which takes ten operations of its own for each of the kernel's.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

__all__ = ["is_sped_up", "speed_up"]

_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def is_sped_up() -> bool:
    """Whether the interpreter of this process was changed."""
    return bool(core.tensor.__init__.__module__ == __name__)


def speed_up() -> None:
    """Change the interpreter of this process: Triton 3.9 or newer, before the first kernel runs."""
    patch_once = functools.cache(interpreter._patch_lang)
    numpy_type_of, unwrap, make_block = interpreter._get_np_dtype, core._unwrap_if_constexpr, core.block_type.__init__
    numpy_types: dict[str, np.dtype[Any]] = {}
    blocks: dict[tuple[int, ...], tuple[Any, Any, str]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # At every call of a function Triton's language was patched for it, although once is enough.
        patch_once(self.fn)
        return self.rewrite()(*args, **kwargs)

    def get_np_dtype(kind: Any) -> np.dtype[Any]:
        scalar = kind.scalar
        if isinstance(scalar, core.pointer_type):
            return numpy_type_of(scalar)
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type_of(scalar)
        return numpy_types[scalar.name]

    def unwrap_if_constexpr(o: Any) -> Any:
        kind = type(o)
        if kind is core.constexpr:
            return o.value
        return o if kind is core.tensor or kind is core.dtype or kind is int else unwrap(o)

    def is_equal(self: Any, other: Any) -> bool:
        if self is other:
            return True
        other = unwrap_if_constexpr(other)
        return isinstance(other, core.dtype) and self.name == other.name

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(map(unwrap_if_constexpr, unwrap_if_constexpr(shape)))
        if sizes not in blocks:
            make_block(self, element_ty, shape)  # raises for what is no shape of a block
            blocks[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, name = blocks[sizes]
        self.name = f"<{name}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = core.tuple([core.constexpr(s) for s in sizes]), core.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def sanitize_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        assert kind == rhs.type.scalar, f"expected matching operand types, got {kind} and {rhs.type.scalar}"
        assert kind.is_int(), f"expected integer type, got {kind}"
        wide = _WIDE[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        fits = kind.get_int_min_value() <= wide.min() and wide.max() <= kind.get_int_max_value()
        assert fits, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"

    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = get_np_dtype
    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.dtype.__eq__ = is_equal
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = sanitize_overflow

"""Makes the operations of Triton's interpreter faster: NumPy computes one at once when its types are known.

Triton checks, casts and broadcasts the operands before it calls NumPy. What it does depends on their types
alone, so the first operation on some types tells what NumPy has to do in all others. NumPy broadcasts by the
same rules. What is rare or in doubt is left to Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

#: What NumPy calls the operations on two operands.
BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "and_": np.bitwise_and, "or_": np.bitwise_or, "xor_": np.bitwise_xor,
    "shl": np.left_shift, "lshr": np.right_shift,
    "less_than": np.less, "less_equal": np.less_equal, "equal": np.equal,
    "greater_than": np.greater, "greater_equal": np.greater_equal, "not_equal": np.not_equal,
}  # fmt: skip
#: The methods of a tensor that do nothing but call these.
METHODS = {
    "__add__": "add", "__sub__": "sub", "__mul__": "mul",
    "__and__": "and_", "__or__": "or_", "__xor__": "xor_",
    "__lt__": "less_than", "__le__": "less_equal", "__eq__": "equal",
    "__gt__": "greater_than", "__ge__": "greater_equal", "__ne__": "not_equal",
}  # fmt: skip
#: Types that NumPy has, too, and casts as the interpreter does.
NATIVE = frozenset(
    dtype.name
    for dtype in (
        *(tl.int1, tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64),
        *(tl.float16, tl.float32, tl.float64),
    )
)
_Tensor, _constexpr = tl.tensor, tl.constexpr


def install() -> None:
    """Replace the operations. Call it after the other parts of the interpreter are replaced."""
    if interpreter.interpreter_builder.options.sanitize_overflow:
        return
    for name, compute in BINARY.items():
        setattr(TritonSemantic, name, _binary(getattr(TritonSemantic, name), compute))
    TritonSemantic.where = _where(TritonSemantic.where)
    TritonSemantic.cast = _cast(TritonSemantic.cast)
    TritonSemantic.to_tensor = _to_tensor(TritonSemantic.to_tensor)


def method(name: str) -> Callable[[Any, Any], Any]:
    """The method of ``METHODS`` as it is while a kernel is interpreted."""
    semantic = interpreter.interpreter_semantic
    operation = getattr(semantic, METHODS[name])
    if METHODS[name] in ("add", "sub", "mul"):

        def call(self: Any, other: Any) -> Any:
            return operation(self, other.value if type(other) is _constexpr else other, True)
    elif METHODS[name] in ("and_", "or_", "xor_"):

        def call(self: Any, other: Any) -> Any:
            return operation(self, other.value if type(other) is _constexpr else other)
    else:

        def call(self: Any, other: Any) -> Any:
            return operation(self, other if type(other) is _Tensor else semantic.to_tensor(other))

    return call


class _Made:
    """The types and the shape of the results of an operation."""

    def __init__(self, made: Any) -> None:
        self.held = made.handle.dtype
        self.attributes = made.type, made.dtype, made.shape, made.numel

    def of(self, data: Any) -> Any:
        handle, made = _new_handle(TensorHandle), _new_tensor(_Tensor)
        handle.data, handle.dtype, handle.attr = data, self.held, {}
        made.handle = handle
        made.type, made.dtype, made.shape, made.numel = self.attributes
        return made


_new_handle, _new_tensor = TensorHandle.__new__, _Tensor.__new__


def _kind(operand: Any) -> Any:
    """All that an operation depends on, other than the elements of a tensor."""
    if type(operand) is _Tensor:
        handle = operand.handle
        return operand.type.name, handle.dtype.name, handle.data.dtype
    if type(operand) is float:
        return operand.hex()  # 0.0 and -0.0 are equal, but not the same
    return type(operand), operand  # nor are 1 and True


def _binary(slow: Any, compute: Any) -> Any:
    known: dict[Any, Any] = {}

    @wraps(slow)
    def operation(self: Any, lhs: Any, rhs: Any, *given: Any, **named: Any) -> Any:
        key = _kind(lhs), _kind(rhs)
        way = known.get(key)
        if way is not None:
            left, right, result = way
            return result(compute(left(lhs), right(rhs)))
        made = slow(self, lhs, rhs, *given, **named)
        if key not in known:
            operands = _operands(self, lhs, rhs, made)
            known[key] = _way(compute, operands, (lhs, rhs), made)
        return made

    return operation


def _way(compute: Any, operands: Any, given: Any, made: Any) -> Any:
    """What makes the arrays that NumPy computes with, and the result of its own. None: leave it to Triton."""
    if operands is None:
        return None
    found = compute(*(operand(side) for operand, side in zip(operands, given, strict=True)))
    right = made.handle.data
    equal = (found.dtype, found.shape, found.tobytes()) == (right.dtype, right.shape, right.tobytes())
    return (*operands, _Made(made).of) if equal else None


def _operands(semantic: Any, lhs: Any, rhs: Any, made: Any) -> Any:
    if made.type.scalar.is_ptr():
        return _of_address(lhs, rhs, made.type.scalar)
    checked = semantic.binary_op_type_checking_impl(lhs, rhs, True, True)
    operands = [_operand(*pair) for pair in zip((lhs, rhs), checked, strict=True)]
    return None if None in operands else operands


def _operand(given: Any, checked: Any) -> Any:
    if type(given) is not _Tensor:
        constant = checked.handle.data
        return lambda operand: constant
    before, after = given.type.scalar, checked.type.scalar
    if before == after:
        return _elements
    if not {before.name, after.name} <= NATIVE:
        return None
    dtype = interpreter._get_np_dtype(after)
    return lambda operand: operand.handle.data.astype(dtype)


def _elements(operand: Any) -> Any:
    return operand.handle.data


def _of_address(lhs: Any, rhs: Any, pointer: Any) -> Any:
    """A pointer and an offset, in elements. There are no pointers to other memory in the interpreter."""
    if type(lhs) is not _Tensor or type(rhs) is not _Tensor or not lhs.type.scalar.is_ptr():
        return None
    if pointer.address_space != 1 or not rhs.type.scalar.is_int():
        return None
    width = np.uint64(max(1, pointer.element_ty.primitive_bitwidth // 8))
    return _elements, lambda operand: operand.handle.data.astype(np.uint64) * width


def _where(slow: Any) -> Any:
    known: dict[Any, Any] = {}

    @wraps(slow)
    def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
        key = _kind(condition), _kind(x), _kind(y)
        way = known.get(key)
        if way is not None:
            _, left, right, result = way
            return result(np.where(condition.handle.data, left(x), right(y)))
        made = slow(self, condition, x, y)
        if key not in known:
            operands = None
            if condition.dtype == tl.int1 and condition.handle.data.dtype == bool:
                operands = _operands(self, x, y, made)
            given = condition, x, y
            known[key] = _way(np.where, operands and (_elements, *operands), given, made)
        return made

    return where


def _cast(slow: Any) -> Any:
    known: dict[Any, Any] = {}

    @wraps(slow)
    def cast(self: Any, input: Any, dst_ty: Any, *given: Any) -> Any:
        if (given and given != (None,)) or type(input) is not _Tensor:
            return slow(self, input, dst_ty, *given)
        key = _kind(input), dst_ty.scalar.name
        way = known.get(key)
        if way is not None:
            dtype, result = way
            return result(input.handle.data.astype(dtype))
        made = slow(self, input, dst_ty)
        if key not in known:
            known[key] = _direct_cast(input, made)
        return made

    return cast


def _direct_cast(input: Any, made: Any) -> Any:
    """The dtype and the result of a cast that NumPy does. None: leave it to Triton."""
    before, after = input.dtype, made.dtype
    if before == after or not {before.name, after.name, input.handle.dtype.name} <= NATIVE:
        return None
    if after == tl.int1 or (before == tl.float16 and after != tl.float32):  # in other ways, or in two steps
        return None
    return interpreter._get_np_dtype(after), _Made(made).of


def _to_tensor(slow: Any) -> Any:
    known: dict[Any, Any] = {}

    @wraps(slow)
    def to_tensor(self: Any, x: Any, *given: Any) -> Any:
        if type(x) is _Tensor:
            return x
        if type(x) is _constexpr:
            x = x.value
        if type(x) not in (int, float, bool):
            return slow(self, x, *given)
        key = _kind(x)
        if key not in known:
            made = slow(self, x, *given)
            made.handle.data.flags.writeable = False
            known[key] = made.handle.data, _Made(made).of
        data, result = known[key]
        return result(data)

    return to_tensor

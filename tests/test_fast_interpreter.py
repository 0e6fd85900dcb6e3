"""The faster interpreter finds the types that Triton's own finds, and refuses what Triton's own refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("kernels are compiled where there is a GPU", allow_module_level=True)

import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import fast_operations

SCALARS = [
    tl.int1, tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16,
    tl.bfloat16, tl.float32, tl.float64, tl.float8e5, tl.float8e4nv,
]  # fmt: skip
SHAPES = [[1], [64], [2, 4], [4, 2], [8, 1, 2]]
TYPES = [
    made
    for scalar in SCALARS
    for element in (scalar, tl.pointer_type(scalar))
    for made in (element, *(tl.block_type(element, shape) for shape in SHAPES))
]


def slowly(cls: Any, *given: Any) -> Any:
    """An object that Triton's own ``__init__`` makes."""
    made = cls.__new__(cls)
    cls.__init__.__wrapped__(made, *given)
    return made


def told(found: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(found).items()}


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_types_and_tensors_are_those_of_triton(kind: Any) -> None:
    assert interpreter._get_np_dtype(kind) == interpreter._get_np_dtype.__wrapped__(kind)
    handle = object()
    for _ in ("first", "known"):
        assert told(tl.tensor(handle, kind)) == told(slowly(tl.tensor, handle, kind))
        if kind.is_block():
            again = tl.block_type(kind.element_ty, [tl.constexpr(size) for size in kind.shape])
            assert told(again) == told(slowly(tl.block_type, kind.element_ty, kind.shape))
            assert again == kind


def test_types_that_differ_are_not_equal() -> None:
    for first, one in enumerate(TYPES):
        for second, other in enumerate(TYPES):
            assert (one == other) == (first == second), (one, other)


@triton.jit
def _add(out, a: tl.constexpr, b: tl.constexpr):
    both = tl.arange(0, a) + tl.arange(0, b)
    tl.store(out + tl.arange(0, a), both)


def test_shapes_that_do_not_fit_are_refused_each_time() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    for _ in ("first", "known"):
        with pytest.raises(interpreter.InterpreterError, match="incompatible dimensions"):
            _add[(1,)](out, 4, 8)
        with pytest.raises(interpreter.InterpreterError, match="power of 2"):
            _add[(1,)](out, 6, 6)
        assert not out.any()
    _add[(1,)](out, 8, 8)
    assert out.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


@triton.jit
def _overflow(out, x):
    tl.store(out, tl.load(x) + 1)


def test_the_interpreter_tells_of_no_overflow_by_itself() -> None:
    """So nothing is lost where the faster one does not look for any."""
    x, out = torch.tensor([2**31 - 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    builder = interpreter.interpreter_builder
    faster = builder.options
    assert not faster.sanitize_overflow
    for options in (faster, interpreter.InterpreterOptions()):
        builder.options = options
        try:
            _overflow[(1,)](out, x)
        finally:
            builder.options = faster
        assert out.item() == -(2**31)


#: Numbers that are equal and yet not the same, or that only some types hold.
NUMBERS = [True, 1, 1.0, 0, 0.0, -0.0, -1, 300, 2**40, 0.1, 1e300, float("nan"), float("inf")]
#: Pointers allowed, types promoted, a division.
WAYS = [(), (True, True), (False, False, False), (False, False, True, True)]


@pytest.fixture
def launching() -> Iterator[None]:
    """Triton's language as it is while a kernel is interpreted."""
    scope = interpreter._patch_lang(_add.fn)
    yield
    scope.restore()


def operand(kind: Any) -> Any:
    shape = kind.shape if kind.is_block() else (1,)
    data = np.ones(shape, interpreter._get_np_dtype(kind))
    return tl.tensor(interpreter.TensorHandle(data, kind.scalar), kind)


def outcome(check: Any, lhs: Any, rhs: Any, way: tuple[bool, ...]) -> Any:
    """The types and the bits of the operands of an operation, or its error."""
    try:
        made = check(interpreter.interpreter_semantic, lhs, rhs, *way)
    except Exception as error:
        return type(error), str(error)
    return [(one.type, one.handle.dtype, one.handle.data.shape, one.handle.data.tobytes()) for one in made]


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_operands_are_cast_and_broadcast_as_by_triton(kind: Any) -> None:
    checked = TritonSemantic.binary_op_type_checking_impl
    others = [*map(operand, TYPES[::7]), *NUMBERS]
    pairs = [pair for other in others for pair in ((operand(kind), other), (other, operand(kind)))]
    asked = [(*pair, WAYS[place // 2 % len(WAYS)]) for place, pair in enumerate(pairs)]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (TritonSemantic, "binary_op_type_checking_impl"),
            (TritonSemantic, "broadcast_impl_value"),
            (tl.block_type, "with_element_ty"),
        ):
            patch.setattr(owner, name, getattr(owner, name).__wrapped__)
        slow = [outcome(TritonSemantic.binary_op_type_checking_impl, *each) for each in asked]
    for _ in ("first", "known"):
        assert [outcome(checked, *each) for each in asked] == slow


def test_no_operation_writes_to_the_block_of_a_number() -> None:
    lhs = operand(tl.block_type(tl.float32, [4]))
    for _ in ("first", "known"):
        _, block = TritonSemantic.binary_op_type_checking_impl(interpreter.interpreter_semantic, lhs, 7.0)
    with pytest.raises(ValueError, match="read-only"):
        block.handle.data[0] = 1.0


def drawn(kind: Any, number: int) -> Any:
    """A tensor of any bits. The bits of a boolean are 0 and 1."""
    shape = tuple(kind.shape) if kind.is_block() else (1,)
    dtype = interpreter._get_np_dtype(kind)
    bits = np.random.default_rng(number).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    data = bits[..., 0] % 2 == 1 if dtype.kind == "b" else bits.view(dtype)[..., 0]
    return tl.tensor(interpreter.TensorHandle(data, kind.scalar), kind)


def result(operation: Any, *given: Any) -> Any:
    """All that an operation makes, or its error."""
    try:
        with np.errstate(all="ignore"):
            made = operation(interpreter.interpreter_semantic, *given)
    except Exception as error:
        return type(error), str(error)
    data = made.handle.data
    return told(made) | {"handle": ""}, made.handle.dtype, data.dtype, data.shape, data.tobytes()


def equal_each_time(operation: Any, *given: Any) -> None:
    """The first of some types is computed by Triton, the others by NumPy."""
    for number in range(2):
        operands = [drawn(one, number) if isinstance(one, tl.dtype) else one for one in given]
        slow = result(operation.__wrapped__, *operands)
        assert result(operation, *operands) == slow, (operation, given, number)


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("name", fast_operations.BINARY)
def test_an_operation_makes_what_triton_makes(name: str) -> None:
    operation = getattr(TritonSemantic, name)
    sanitized = (False,) if name in ("add", "sub", "mul") else ()
    for kind in TYPES[::11]:
        for other in [*TYPES[::13], *NUMBERS]:
            equal_each_time(operation, kind, other, *sanitized)
            equal_each_time(operation, other, kind, *sanitized)


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize(
    "condition", [tl.int1, *(tl.block_type(tl.int1, shape) for shape in SHAPES)], ids=str
)
def test_a_choice_is_that_of_triton(condition: Any) -> None:
    for kind in TYPES[::17]:
        for other in [*TYPES[::19], *NUMBERS]:
            equal_each_time(TritonSemantic.where, condition, kind, other)
            equal_each_time(TritonSemantic.where, condition, other, kind)


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_a_cast_is_that_of_triton(kind: Any) -> None:
    cast = TritonSemantic.cast
    for scalar in SCALARS:
        for number in range(2):
            before = drawn(kind, number)
            assert result(cast, before, scalar) == result(cast.__wrapped__, before, scalar), scalar


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("number", [*NUMBERS, 2**32 - 1, 2**63, 2**64, "text", None], ids=repr)
def test_a_number_is_the_tensor_of_triton(number: Any) -> None:
    found = TritonSemantic.to_tensor
    for given in (number, tl.constexpr(number), number):
        assert result(found, given) == result(found.__wrapped__, given)
    if isinstance(number, str | None):
        assert found(interpreter.interpreter_semantic, number, False) is number


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.int64])
@pytest.mark.parametrize("shape", [(4,), (1024,), (32, 64)])
@pytest.mark.parametrize("loaded", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("odd", [0, 1])
def test_elements_are_loaded_as_by_triton(dtype: Any, shape: Any, loaded: float, odd: int) -> None:
    from triton._C.libtriton import interpreter as library

    rng = np.random.default_rng(0)
    held = rng.integers(0, 256, 5000 * np.dtype(dtype).itemsize, np.uint8)
    places = rng.integers(0, 4999, shape).astype(np.uint64) * np.uint64(np.dtype(dtype).itemsize)
    pointers, mask = places + np.uint64(held.ctypes.data + odd), rng.random(shape) < loaded
    pointers[~mask] = 8  # not to be read
    other = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]
    slow = library.load(pointers, mask, other, np.dtype(dtype))
    found = interpreter._interpreter.load(pointers, mask, other, np.dtype(dtype))
    assert found.dtype == slow.dtype and found.shape == slow.shape and found.tobytes() == slow.tobytes()

"""The faster interpreter finds the types that Triton's own finds, and refuses what Triton's own refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("kernels are compiled where there is a GPU", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import interpreter

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

"""Makes Triton's interpreter faster, with the same results and the same errors.

An operation of the interpreter takes longer to check its types than to compute. The types are few, so what
is known of each is kept. A part of Triton that another version does not have is left as it is.
"""

from __future__ import annotations

import dataclasses
from functools import cache, wraps
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """Replace the slow parts. Call it before any kernel runs."""
    _patch_once_a_launch()
    _skip_unused_overflow_checks()
    _keep_numpy_dtypes()
    _keep_block_types()
    _keep_shapes_of_tensors()
    _compare_identical_dtypes_at_once()
    _leave_equal_shapes()


def _patch_once_a_launch() -> None:
    """Patch Triton's language once per launch, not on every call between functions.

    The repeated patches have no effect.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, patched = interpreter._patch_lang, set()

    @cache
    def seen_by(function: Any) -> frozenset[str]:
        seen = function.__globals__.values()
        return frozenset(lang.__name__ for lang in (tl, tl.core) if any(value is lang for value in seen))

    def patch_once(function: Any) -> Any:
        if patched >= seen_by(function):
            return interpreter._LangPatchScope()
        patched.update(seen_by(function))
        scope = patch(function)
        restore = scope.restore

        def restored() -> None:
            patched.clear()
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = patch_once


def _skip_unused_overflow_checks() -> None:
    """Do not compute whether an integer overflows: the interpreter drops the answer unless it debugs."""
    builder = interpreter.interpreter_builder
    options = getattr(builder, "options", None)
    if options is not None and hasattr(options, "sanitize_overflow") and not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _keep_numpy_dtypes() -> None:
    """Look up the NumPy dtype of a type. Its name says what it is."""
    find = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    @wraps(find)
    def found(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = found


def _keep_block_types() -> None:
    """Make a block type from an equal one, whose shape was checked."""
    make = tl.block_type.__init__
    known: dict[Any, dict[str, Any]] = {}

    @wraps(make)
    def made(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        key = element_ty.name, sizes
        if key in known:
            self.__dict__.update(known[key])
            self.element_ty = element_ty
        else:
            make(self, element_ty, shape)
            known[key] = dict(self.__dict__)

    tl.block_type.__init__ = made


def _keep_shapes_of_tensors() -> None:
    """Share the shape and size of all tensors of a type."""
    make = tl.tensor.__init__
    known: dict[str, Any] = {}

    @wraps(make)
    def made(self: Any, handle: Any, type: Any) -> None:
        if type.name in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[type.name]
        else:
            make(self, handle, type)
            known[type.name] = self.shape, self.numel

    tl.tensor.__init__ = made


def _compare_identical_dtypes_at_once() -> None:
    """A type is equal to itself."""
    for kind in (tl.dtype, tl.pointer_type, tl.block_type):
        equal = kind.__eq__

        def is_equal(self: Any, other: Any, equal: Any = equal) -> Any:
            return self is other or equal(self, other)

        kind.__eq__ = is_equal


def _leave_equal_shapes() -> None:
    """Blocks of equal shapes need no broadcast."""
    broadcast = TritonSemantic.broadcast_impl_value

    @wraps(broadcast)
    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape or lhs.shape.values == rhs.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcasted

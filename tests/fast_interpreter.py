"""Makes Triton's interpreter faster, with the same results and the same errors.

An operation of the interpreter takes longer to check its types than to compute. The types are few, so what
is known of each is kept. A part of Triton that another version does not have is left as it is.
"""

from __future__ import annotations

import ctypes
import dataclasses
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import fast_operations


def install() -> None:
    """Replace the slow parts. Call it before any kernel runs."""
    _patch_once_a_launch()
    _skip_unused_overflow_checks()
    _keep_numpy_dtypes()
    _keep_block_types()
    _keep_shapes_of_tensors()
    _compare_identical_dtypes_at_once()
    _keep_types_of_blocks()
    _check_sizes_once()
    _check_operands_once()
    _broadcast_by_types()
    _call_builtins_directly()
    _unwrap_at_once()
    _call_functions_directly()
    _load_many_at_once()
    fast_operations.install()


def _patch_once_a_launch() -> None:
    """Patch Triton's language once per launch, not on every call between functions.

    The repeated patches have no effect.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, patched = interpreter._patch_lang, set()
    known: dict[frozenset[str], list[tuple[Any, str, Any]]] = {}

    @cache
    def seen_by(function: Any) -> frozenset[str]:
        seen = function.__globals__.values()
        return frozenset(lang.__name__ for lang in (tl, tl.core) if any(value is lang for value in seen))

    def patch_once(function: Any) -> Any:
        seen = seen_by(function)
        if patched >= seen:
            return interpreter._LangPatchScope()
        if seen in known:
            scope = interpreter._LangPatchScope()
            for owner, name, value in known[seen]:
                scope.set_attr(owner, name, value)
        else:
            scope = patch(function)
            if not patched:
                known[seen] = [(owner, name, vars(owner)[name]) for owner, name, _ in scope._changes]
        patched.update(seen)
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
    shapes: dict[Any, Any] = {}

    @wraps(make)
    def made(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        key = element_ty.name, sizes
        if key in known:
            self.__dict__.update(known[key])
            self.element_ty = element_ty
        else:
            make(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
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


def _keep_types_of_blocks() -> None:
    """Share the type of a block with other elements."""
    make = tl.block_type.with_element_ty
    known: dict[Any, Any] = {}

    @wraps(make)
    def made(self: Any, scalar_ty: Any) -> Any:
        if scalar_ty.is_ptr():  # its name does not tell the address space
            return make(self, scalar_ty)
        key = self.name, scalar_ty.name
        if key not in known:
            known[key] = make(self, scalar_ty)
        return known[key]

    tl.block_type.with_element_ty = made


def _check_sizes_once() -> None:
    """Whether the elements of an array fit a type depends on their size alone."""
    make = interpreter.TensorHandle.__init__
    fits = interpreter._validate_np_data_size
    known: dict[Any, bool] = {}

    @wraps(fits)
    def found(array: Any, dtype: Any) -> bool:
        key = array.itemsize, dtype.name
        if key not in known:
            known[key] = fits(array, dtype)
        return known[key]

    @wraps(make)
    def made(self: Any, data: Any, dtype: Any, *attr: Any) -> None:
        if known.get((data.itemsize, dtype.name)) and not attr:
            self.data, self.dtype, self.attr = data, dtype, {}
        else:
            make(self, data, dtype, *attr)

    interpreter._validate_np_data_size = found
    interpreter.TensorHandle.__init__ = made


def _check_operands_once() -> None:
    """The types of two tensors tell what they are cast to. The type of one tells what a number becomes."""
    check = TritonSemantic.binary_op_type_checking_impl
    casts: dict[Any, tuple[Any, Any]] = {}
    blocks: dict[Any, Any] = {}

    @wraps(check)
    def checked(self: Any, lhs: Any, rhs: Any, *given: Any) -> tuple[Any, Any]:
        if type(lhs) is not tl.tensor or type(rhs) is not tl.tensor:
            return with_number(self, lhs, rhs, *given)
        key = lhs.type.name, rhs.type.name, given
        if key not in casts:
            made = check(self, lhs, rhs, *given)
            casts[key] = _cast(lhs, made[0]), _cast(rhs, made[1])
            return made
        left, right = casts[key]
        return self.broadcast_impl_value(
            lhs if left is None else self.cast(lhs, left), rhs if right is None else self.cast(rhs, right)
        )

    def with_number(self: Any, lhs: Any, rhs: Any, *given: Any) -> tuple[Any, Any]:
        if type(lhs) is tl.tensor:
            key = lhs.type.name, repr(rhs), given  # 1, True and 1.0 are equal, but not the same
            if key in blocks:
                return lhs, blocks[key]
            made = check(self, lhs, rhs, *given)
            if made[0] is lhs:
                blocks[key] = _read_only(made[1])
            return made
        return check(self, lhs, rhs, *given)

    TritonSemantic.binary_op_type_checking_impl = checked


def _cast(before: Any, after: Any) -> Any:
    """The type that the elements of a tensor were cast to, or None."""
    return None if before.type.scalar == after.type.scalar else after.type.scalar


def _read_only(block: Any) -> Any:
    block.handle.data.flags.writeable = False
    return block


def _broadcast_by_types() -> None:
    """Blocks of equal shapes need no broadcast. A scalar becomes a block of the other's shape at once."""
    broadcast = TritonSemantic.broadcast_impl_value

    @wraps(broadcast)
    def broadcasted(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        if left.is_block() and right.is_block():
            if left.shape is right.shape or left.shape == right.shape:
                return lhs, rhs
            return broadcast(self, lhs, rhs)
        if left.is_block():
            made = left.with_element_ty(right)
            return lhs, tl.tensor(self.builder.create_splat(made, rhs.handle), made)
        if right.is_block():
            made = right.with_element_ty(left)
            return tl.tensor(self.builder.create_splat(made, lhs.handle), made), rhs
        return lhs, rhs

    TritonSemantic.broadcast_impl_value = broadcasted


def _call_builtins_directly() -> None:
    """Pass the semantics of the interpreter without copying the arguments or checking that it is there."""
    if not hasattr(interpreter, "_patch_attr"):
        return

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if obj is tl.tensor and name in fast_operations.METHODS:
            scope.set_attr(obj, name, fast_operations.method(name))
            return
        function = getattr(member, "__wrapped__", member)

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*given, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def _unwrap_at_once() -> None:
    """Most values that may be constants of the compiler, or contain some, are tensors, types and numbers."""
    unwrap = tl.core._unwrap_if_constexpr
    types = (tl.dtype, tl.block_type, tl.pointer_type)
    plain = frozenset({tl.tensor, *types, int, float, bool, str, type(None)})

    @wraps(unwrap)
    def unwrapped(given: Any) -> Any:
        return given if type(given) in plain else unwrap(given)

    tl.core._unwrap_if_constexpr = unwrapped


def _call_functions_directly() -> None:
    """Call a function that a kernel calls without asking each time what else may be patched."""
    patch = interpreter._patch_lang

    def call(self: Any, *given: Any, **named: Any) -> Any:
        patch(self.fn)
        function = self.rewritten_fn.get(self.fn) or self.rewrite()
        try:
            return function(*given, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def _load_many_at_once() -> None:
    """Let NumPy gather elements where they are many. Triton's own loop makes several calls for each."""
    library, many, start = interpreter._interpreter, 512, 4096
    kinds = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64
    memory = {  # all that a process can have, as elements of each size
        size: np.ctypeslib.as_array((kind * ((2**47 - start) // size)).from_address(start))
        for size, kind in zip((1, 2, 4, 8), kinds, strict=True)
    }

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        size = dtype.itemsize
        if pointers.size < many or other.dtype != dtype or (pointers & np.uint64(size - 1)).any():
            return library.load(pointers, mask, other, dtype)
        places = (pointers - np.uint64(start)).view(np.int64) // size
        elements = memory[size]
        if mask.all():
            return elements[places].view(dtype)
        loaded = np.array(other, dtype, order="C")
        loaded.view(elements.dtype)[mask] = elements[places[mask]]
        return loaded

    names = {name: getattr(library, name) for name in dir(library) if not name.startswith("__")}
    interpreter._interpreter = SimpleNamespace(**{**names, "load": load})

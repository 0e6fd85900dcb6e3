"""How CPU kernels are compiled; knows no op.

Kernels take addresses, not arrays: the dtype of an operand is a number known at run time, so that each kernel
is compiled once for each compute type and never for a combination of dtypes.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from holdfast.backends import kernel_cache
from holdfast.backends.notice import compiling
from holdfast.backends.on_demand import callable_from_kernels
from holdfast.backends.private import numba as private
from holdfast.core import fork
from holdfast.core.importing import interrupts_wait

#: Bytes of a line of the cache.
LINE = 64
#: Elements of a loop between two calls of ``prefetch``, and the bytes that it looks ahead.
BLOCK, _AHEAD = 256, 2048

#: The type of an address of bytes, in LLVM.
BYTES = ir.IntType(8).as_pointer()

_EXACT: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile what Python calls: without the GIL, and cached on disk where a disk can be written."""
    compiled = njit(**_EXACT, **private.kernel_options())(function)
    kernel_cache.keep(compiled, function)
    return compiled


def jit(function: Callable[..., Any]) -> Any:
    """Compile what kernels call: it becomes part of them, on disk as well."""
    return njit(**_EXACT, **private.part_options())(function)


def on_demand(function: Callable[..., Any]) -> Any:
    """Compile what kernels call, by itself, when a kernel first calls it; see ``backends.on_demand``."""
    return callable_from_kernels(function, _c_function, _compile_c_function)


def _c_function(function: Callable[..., Any], signature: Any) -> Any:
    made = private.c_function(function, signature, _EXACT)
    kernel_cache.keep(made, function)
    return made


def _compile_c_function(function: Any, module: str) -> None:
    with _compiling, interrupts_wait(), private.remembering_types():
        if function.address is None:
            with compiling(module, cached=private.is_on_disk(function)):
                function.compile()


def emit(builder: Callable[..., Any]) -> Any:
    """Declare a function of kernels by the LLVM instructions that it stands for."""
    return intrinsic(builder)


@contextmanager
def counted_loop(builder: Any, count: Any) -> Iterator[Any]:
    """Emit a loop that runs ``count`` times; its body is what is emitted meanwhile. Yields the index."""
    before = builder.block
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(count.type)
    index.add_incoming(count.type(0), before)
    builder.cbranch(builder.icmp_signed("<", index, count), body, after)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, count.type(1), flags=["nsw"]), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


def stack_slot(builder: Any, kind: Any) -> Any:
    """Emit room for one value of a type of LLVM on the stack."""
    with builder.goto_entry_block():
        return builder.alloca(kind)


@emit
def pointer(typingctx, address, like):
    """An address as a pointer to elements of the type ``like``, which is a type or a value of that type."""
    element = like.dtype if isinstance(like, types.NumberClass) else like

    def build(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(address, like), build


@emit
def copy(typingctx, target, source, size):
    """Copy ``size`` bytes from one address to another."""

    def build(context, builder, signature, args):
        to, of = (builder.inttoptr(address, BYTES) for address in args[:2])
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [BYTES, BYTES, args[2].type])
        builder.call(memcpy, [to, of, args[2], ir.IntType(1)(0)])  # not volatile
        return context.get_dummy_value()

    return types.none(target, source, size), build


@emit
def outlined(typingctx):
    """Called in a function, keeps it from being copied into each of its callers."""

    def build(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.none(), build


def prefetch_line(builder: Any, place: Any) -> None:
    """Emit the request for the line of the cache that holds what a pointer points to; it need not exist."""
    byte, number = BYTES, ir.IntType(32)
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    )
    line = builder.bitcast(place, byte)
    builder.call(function, [line, number(0), number(3), number(1)])  # to read, and keep, data


@emit
def prefetch(typingctx, elements, index):
    """Ask for the block of elements that lies a few blocks after ``elements[index]``; it need not exist.

    Left alone, the processor falls behind where a loop reads memory faster than it foresees.
    """

    def build(context, builder, signature, args):
        start = builder.bitcast(builder.gep(args[0], [args[1]]), BYTES)
        size = BLOCK * context.get_abi_sizeof(context.get_value_type(signature.args[0].dtype))
        for offset in range(_AHEAD, _AHEAD + size, LINE):
            prefetch_line(builder, builder.gep(start, [ir.IntType(32)(offset)]))
        return context.get_dummy_value()

    return types.none(elements, index), build


@emit
def _prefetch_address(typingctx, address):
    def build(context, builder, signature, args):
        prefetch_line(builder, builder.inttoptr(args[0], BYTES))
        return context.get_dummy_value()

    return types.none(address), build


@jit
def prefetch_run(address, size):
    """Ask for ``size`` bytes from ``address`` on, which need not exist."""
    for offset in range(0, size, LINE):
        _prefetch_address(address + offset)


_VECTOR = 32  # bytes


@emit
def _stream_vector(typingctx, target, source):
    """Carry one vector to an aligned address, and leave it out of every cache."""

    def build(context, builder, signature, args):
        vector = ir.VectorType(ir.IntType(64), _VECTOR // 8).as_pointer()
        to, of = (builder.inttoptr(address, vector) for address in args)
        stored = builder.store(builder.load(of, align=1), to, align=_VECTOR)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.none(target, source), build


@emit
def fence(typingctx):
    """What was stored before is seen before whatever is stored after."""

    def build(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), build


@jit
def _copy_edges(target, source, size):
    """Copy what lies before and after the whole vectors of the target; return where these begin and end."""
    head = min((-target) & (_VECTOR - 1), size)
    rest = size - ((size - head) & (_VECTOR - 1))
    if head > 0:
        copy(target, source, head)
    if rest < size:
        copy(target + rest, source + rest, size - rest)
    return head, rest


@jit
def stream(target, source, size):
    """Copy ``size`` bytes past the caches: memory that is only written need not be read into them first.

    A ``fence`` must follow before anybody is told of it.
    """
    first, last = _copy_edges(target, source, size)
    for i in range(first, last, _VECTOR):
        _stream_vector(target + i, source + i)


@jit
def stream_and_prefetch(target, source, size, reads, ahead):
    """``stream``, and on the way ask for as many bytes from ``ahead`` bytes after each address of ``reads``.

    Where a kernel reads one run after the other this is faster than to ask for all of a block at once, which
    leaves no reads to do while it is written.
    """
    first, last = _copy_edges(target, source, size)
    for i in range(first, last, _VECTOR):
        for read in reads:
            _prefetch_address(read + ahead + i)
        _stream_vector(target + i, source + i)


# Held while Numba compiles; forking waits for it, so that a child never inherits half of a kernel.
_compiling = threading.RLock()


def compile_kernel(entry: Any, *args: Any) -> None:
    """Compile the kernel ``entry`` for the types of ``args`` by calling it, or load it from disk.

    An interrupt waits for it: LLVM calls back into Python, where the exception would be lost on the way.
    """
    module = getattr(entry, "py_func", entry).__module__
    cached = private.is_on_disk(entry)
    with _compiling, interrupts_wait(), private.remembering_types(), compiling(module, cached=cached):
        entry(*args)


fork.wait_for(_compiling)

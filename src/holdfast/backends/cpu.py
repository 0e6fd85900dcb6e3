"""Compilation of CPU kernels, and instructions that they use.

Kernels take addresses, not arrays. The dtype of an operand is a number that is passed at run time, so each
kernel is compiled once per compute type, not once per combination of dtypes.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import config, njit, typeof, types
from numba.extending import intrinsic

from holdfast.backends import kernel_cache
from holdfast.backends.notice import compiling
from holdfast.backends.on_demand import callable_from_kernels
from holdfast.backends.private import TaskFunction
from holdfast.backends.private import numba as private
from holdfast.core import fork
from holdfast.core.importing import signals_wait

#: Size of a cache line, bytes.
LINE = 64
#: Elements between two calls of ``prefetch`` in a loop, and its distance ahead in bytes.
BLOCK, _AHEAD = 256, 2048

#: LLVM's type of a pointer to bytes.
BYTES = ir.IntType(8).as_pointer()

_EXACT: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a kernel that Python calls: it releases the GIL and is cached on disk if possible."""
    compiled = njit(**_EXACT, **private.kernel_options())(function)
    kernel_cache.keep(compiled, function)
    return compiled


def jit(function: Callable[..., Any], name: str = "") -> Any:
    """Compile a function that kernels call: it is linked into each kernel and cached with it.

    A function with a closure needs a ``name`` that no other function of its module has. Numba's symbols are
    made of names and a count per process. Two kernels from the disk cache that have one symbol for different
    functions would both call the first.
    """
    if function.__closure__ and not name:
        raise TypeError(f"{function.__qualname__} has a closure; give it a name of its own.")
    function.__qualname__ = name or function.__qualname__
    return njit(**_EXACT, **private.part_options())(function)


def on_demand(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call, separately, at its first call; see ``backends.on_demand``."""
    return callable_from_kernels(function, _c_function, _compile_c_function)


def _c_function(function: Callable[..., Any], signature: Any) -> Any:
    made = private.c_function(function, signature, _EXACT)
    kernel_cache.keep(made, function)
    return made


def _compile_c_function(function: Any, module: str) -> None:
    with _compiling, signals_wait(), private.remembering_types():
        if function.address is None:
            with compiling(module, cached=private.is_on_disk(function)):
                function.compile()


class TeamKernel:
    """A kernel that the threads of a team run together, without Python; see ``threads.run_together``.

    Its only argument is a pointer to a task: ``numbers`` int64 numbers, then values of no meaning whose types
    are those of the elements that the kernel works on. There is one variant per such types.
    """

    def __init__(self, function: Callable[..., Any], numbers: int) -> None:
        self._function, self._numbers = function, numbers
        self._variants: dict[tuple[Any, ...], tuple[Any, TaskFunction]] = {}

    def compiled(self, *values: Any) -> TaskFunction:
        """The variant for the types of ``values``, compiled or loaded from disk."""
        kinds = tuple(map(typeof, values))
        if kinds not in self._variants:
            with _compiling:  # Numba may start here
                self._compile(kinds)
        return self._variants[kinds][1]

    def _compile(self, kinds: tuple[Any, ...]) -> None:
        if kinds not in self._variants:  # by another thread
            task = types.Tuple([types.int64] * self._numbers + [*kinds])
            made = _c_function(self._function, types.void(types.CPointer(task)))
            _compile_c_function(made, self._function.__module__)
            self._variants[kinds] = made, TaskFunction(made.address)  # the first owns the code


def team_kernel(numbers: int) -> Callable[[Callable[..., Any]], TeamKernel]:
    """Declare a ``TeamKernel`` whose task has this many numbers."""
    return lambda function: TeamKernel(function, numbers)


def emit(builder: Callable[..., Any]) -> Any:
    """Declare a function for kernels that emits LLVM instructions."""
    return intrinsic(builder)


@contextmanager
def counted_loop(builder: Any, count: Any) -> Iterator[Any]:
    """Emit a loop that runs ``count`` times. Code emitted inside the block is its body. Yields the index."""
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
    """Emit the allocation of one value of an LLVM type on the stack."""
    with builder.goto_entry_block():
        return builder.alloca(kind)


def _lanes_at(builder: Any, elements: Any, index: Any, lanes: int) -> tuple[Any, int]:
    """A pointer to a vector of ``lanes`` elements that starts at ``elements[index]``, and its alignment."""
    element = elements.type.pointee
    vector = ir.VectorType(element, lanes).as_pointer()
    size = {"half": 2, "float": 4, "double": 8}.get(str(element)) or element.width // 8
    return builder.bitcast(builder.gep(elements, [index]), vector), size


def load_lanes(builder: Any, elements: Any, index: Any, lanes: int, align: int | None = None) -> Any:
    """Emit the load of ``lanes`` elements as a vector; ``align``: its alignment if not that of an element."""
    place, size = _lanes_at(builder, elements, index, lanes)
    return builder.load(place, align=align or size)


def store_lanes(
    builder: Any, vector: Any, elements: Any, index: Any, align: int | None = None, streamed: bool = False
) -> None:
    """Emit the store of a vector to elements of its type; ``streamed``: by a non-temporal store.

    A streamed vector must be aligned to its size, or to a cache line if it is longer. A ``fence`` must follow
    before another thread reads it.
    """
    place, size = _lanes_at(builder, elements, index, vector.type.count)
    align = min(size * vector.type.count, LINE) if streamed else align or size
    stored = builder.store(vector, place, align=align)
    if streamed:
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """Emit a vector of ``lanes`` equal elements."""
    vector, number = ir.VectorType(value.type, lanes), ir.IntType(32)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, number(0))
    same = ir.Constant(ir.VectorType(number, lanes), [number(0)] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), same)


@emit
def pointer(typingctx, address, like):
    """An address as a pointer to elements of type ``like``, given as a type or a value of that type."""
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
def copy_lines(typingctx, target, source, lines):
    """Copy ``lines`` times the bytes of a cache line."""

    def build(context, builder, signature, args):
        target, source, lines = args
        line = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()
        to, of = (builder.inttoptr(address, line) for address in (target, source))
        with counted_loop(builder, lines) as i:
            builder.store(builder.load(builder.gep(of, [i]), align=1), builder.gep(to, [i]), align=1)
        return context.get_dummy_value()

    return types.none(target, source, lines), build


@emit
def clear(typingctx, target, size):
    """Set ``size`` bytes at an address to zero."""

    def build(context, builder, signature, args):
        to = builder.inttoptr(args[0], BYTES)
        memset = builder.module.declare_intrinsic("llvm.memset", [BYTES, args[1].type])
        builder.call(memset, [to, ir.IntType(8)(0), args[1], ir.IntType(1)(0)])  # not volatile
        return context.get_dummy_value()

    return types.none(target, size), build


@emit
def outlined(typingctx):
    """Prevent inlining of the function that calls this."""

    def build(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.none(), build


def prefetch_line(builder: Any, place: Any, level: int = 1) -> None:
    """Emit a prefetch of a cache line to the cache of ``level``. The address need not be valid."""
    byte, number = BYTES, ir.IntType(32)
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    )
    line = builder.bitcast(place, byte)
    builder.call(function, [line, number(0), number(4 - level), number(1)])  # read, locality, data


@emit
def prefetch(typingctx, elements, index):
    """Prefetch ``BLOCK`` elements at a distance after ``elements[index]``. Addresses need not be valid.

    The hardware prefetcher alone is too slow for loops that read memory at full bandwidth.
    """

    def build(context, builder, signature, args):
        start = builder.bitcast(builder.gep(args[0], [args[1]]), BYTES)
        size = BLOCK * context.get_abi_sizeof(context.get_value_type(signature.args[0].dtype))
        for offset in range(_AHEAD, _AHEAD + size, LINE):
            prefetch_line(builder, builder.gep(start, [ir.IntType(32)(offset)]))
        return context.get_dummy_value()

    return types.none(elements, index), build


@emit
def prefetch_address(typingctx, address):
    """Prefetch the cache line at an address, which need not be valid."""

    def build(context, builder, signature, args):
        prefetch_line(builder, builder.inttoptr(args[0], BYTES))
        return context.get_dummy_value()

    return types.none(address), build


@jit
def prefetch_run(address, size):
    """Prefetch ``size`` bytes from ``address``. The addresses need not be valid."""
    for offset in range(0, size, LINE):
        prefetch_address(address + offset)


#: Bytes of a vector that is streamed.
VECTOR = 32


@emit
def _stream_zeros(typingctx, target):
    """Set one vector at an aligned address to zero with a non-temporal store."""

    def build(context, builder, signature, args):
        vector = ir.VectorType(ir.IntType(64), VECTOR // 8)
        to = builder.inttoptr(args[0], vector.as_pointer())
        stored = builder.store(ir.Constant(vector, [0] * (VECTOR // 8)), to, align=VECTOR)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.none(target), build


@jit
def stream_zeros(target, size):
    """Set ``size`` bytes to zero with non-temporal stores, as ``stream``."""
    head = min((-target) & (VECTOR - 1), size)
    rest = size - ((size - head) & (VECTOR - 1))
    clear(target, head)
    clear(target + rest, size - rest)
    for i in range(head, rest, VECTOR):
        _stream_zeros(target + i)


@emit
def _stream_vector(typingctx, target, source):
    """Copy one vector to an aligned address with a non-temporal store, which bypasses the caches."""

    def build(context, builder, signature, args):
        vector = ir.VectorType(ir.IntType(64), VECTOR // 8).as_pointer()
        to, of = (builder.inttoptr(address, vector) for address in args)
        stored = builder.store(builder.load(of, align=1), to, align=VECTOR)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.none(target, source), build


#: Vectors that ``stream_blocks`` copies together, and their bytes.
_GROUP = 8
STREAM_BLOCK = _GROUP * VECTOR


@emit
def stream_blocks(typingctx, target, source, count):
    """``stream`` of ``count`` blocks of STREAM_BLOCK bytes to an address that is aligned to a vector."""

    def build(context, builder, signature, args):
        target, source, count = args
        vector = ir.VectorType(ir.IntType(64), VECTOR // 8).as_pointer()
        to, of = (builder.inttoptr(address, vector) for address in (target, source))
        once = builder.module.add_metadata([ir.IntType(32)(1)])
        with counted_loop(builder, count) as block:
            first = builder.mul(block, count.type(_GROUP))
            places = [builder.add(first, count.type(i)) for i in range(_GROUP)]
            loaded = [builder.load(builder.gep(of, [place]), align=1) for place in places]
            for place, value in zip(places, loaded, strict=True):
                stored = builder.store(value, builder.gep(to, [place]), align=VECTOR)
                stored.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.none(target, source, count), build


@emit
def numbers_of(typingctx, task):
    """The numbers of the task of a ``TeamKernel``, in memory."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(task), build


@emit
def address_of(typingctx, elements):
    """The address that a pointer points to."""

    def build(context, builder, signature, args):
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(elements), build


@emit
def take(typingctx, numbers, position, amount):
    """Add an amount to a number that threads share, atomically. Returns the number before."""

    def build(context, builder, signature, args):
        shared = builder.gep(args[0], [args[1]])
        return builder.atomic_rmw("add", shared, args[2], "monotonic")

    return types.int64(numbers, types.int64, types.int64), build


@jit
def scratch_of_next(numbers, threads, scratch, size):
    """The scratch memory of the next thread that starts, of ``size`` bytes; 0 if all ``threads`` have theirs.

    Number 1 of the task counts the threads that have started.
    """
    thread = take(numbers, 1, 1)
    return scratch + thread * size if thread < threads else 0


@jit
def next_range(numbers, share, units):
    """The first of the next ``share`` units, and their end; both are ``units`` if no unit is left.

    Number 0 of the task counts the units that were taken.
    """
    first = min(take(numbers, 0, share), units)
    return first, min(first + share, units)


@emit
def fence(typingctx):
    """Memory fence: stores before it become visible before stores after it."""

    def build(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), build


@jit
def _copy_edges(target, source, size):
    """Copy the bytes before and after the aligned vectors of the target; return the range of the vectors."""
    head = min((-target) & (VECTOR - 1), size)
    rest = size - ((size - head) & (VECTOR - 1))
    if head > 0:
        copy(target, source, head)
    if rest < size:
        copy(target + rest, source + rest, size - rest)
    return head, rest


@jit
def stream(target, source, size):
    """Copy ``size`` bytes with non-temporal stores, so that the target is not read into the caches first.

    A ``fence`` must follow before another thread reads the target.
    """
    first, last = _copy_edges(target, source, size)
    for i in range(first, last, VECTOR):
        _stream_vector(target + i, source + i)


@jit
def stream_and_prefetch(target, source, size, reads, ahead):
    """``stream`` with interleaved prefetches of ``size`` bytes from each address in ``reads`` plus ``ahead``.

    For a kernel that reads one run after the other this is faster than one prefetch of a whole block, because
    reads and writes overlap.
    """
    first, last = _copy_edges(target, source, size)
    for i in range(first, last, VECTOR):
        for read in reads:
            prefetch_address(read + ahead + i)
        _stream_vector(target + i, source + i)


# Held while Numba compiles. ``os.fork`` waits for it, so that a child never inherits a partly compiled
# kernel.
_compiling = threading.RLock()


def compile_kernel(entry: Any, *args: Any) -> None:
    """Compile the kernel ``entry`` for the types of ``args`` by calling it, or load it from disk.

    Handlers of signals are delayed: LLVM calls back into Python, where an exception would be lost.
    """
    module = getattr(entry, "py_func", entry).__module__
    cached = private.is_on_disk(entry)
    with _compiling, signals_wait(), private.remembering_types(), compiling(module, cached=cached):
        entry(*args)


fork.wait_for(_compiling)
for _lock in private.compiler_locks():
    fork.wait_for(_lock)


def processor_has(feature: str) -> bool:
    """Whether kernels may use a feature of x86 processors, by LLVM's name. Other processors have all of them.

    Numba's settings may ask for code that also runs on older processors.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    if feature.startswith("avx") and not config.ENABLE_AVX:
        return False
    with _compiling:  # LLVM has a lock, too
        return bool(llvm.get_host_cpu_features().get(feature, False))

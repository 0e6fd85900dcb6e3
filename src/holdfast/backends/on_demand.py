"""Functions of kernels that are compiled when a kernel first calls them.

Conversions, packing, strided copies and rare modes are most of the code of a kernel, and most calls need none
of them. Each is compiled by itself, once for all kernels. A kernel calls it through a *slot*: eight bytes
that LLVM knows by a symbol, and that hold the address to call. At first that is a Python function, which
compiles the real one, puts its address into the slot and calls it.

Such a function returns nothing. Its arguments are integers, addresses and pointers, all passed as int64, and
values of the compute type: those annotated as ``Real``, and ``like``. It has a variant for each compute type.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from holdfast.backends.kernel_cache import digest_of_sources
from holdfast.backends.private import FunctionCell

#: Annotates an argument of the compute type.
Real = Any

_INT64 = ir.IntType(64)
#: The variants of a function that has ``like``, and of one that has not.
_REALS = {types.float32: "float32", types.float64: "float64"}

#: Compiles a C function under the lock of the compiler; its module's name says for which op.
Compile = Callable[[Any, str], None]


class Slot:
    """Where kernels find one variant of a function."""

    def __init__(self, function: Callable[..., Any], real: Any, make: Callable[..., Any], compile: Compile):
        reals = _reals(function)
        signature = types.void(*(real if is_real else types.int64 for is_real in reals))
        self.compiled = make(function, signature)
        self._compile, self._module = compile, function.__module__
        kinds = [_REALS[real] if is_real else "int64" for is_real in reals]
        self._cell = FunctionCell(self._compile_and_call, kinds)
        sources = digest_of_sources(Path(function.__code__.co_filename))[:16]
        self.symbol = f"holdfast.{self._module}.{function.__qualname__}.{real}.{sources}"
        llvm.add_symbol(self.symbol, self._cell.address)

    def _compile_and_call(self, *args: Any) -> None:
        """What the slot holds at first. Nothing can be raised from here: a kernel is the caller."""
        call = SimpleNamespace(returned=False)
        try:
            self._compile(self.compiled, self._module)
        except BaseException as error:
            if self.compiled.address is None:
                sys.stderr.write(f"holdfast: a kernel could not be compiled: {error!r}\n")
                sys.stderr.flush()
                os.abort()  # to go on would be to return memory that nobody wrote
            threading.Thread(target=_interrupt_after, args=(call,)).start()
        self._cell.point_to(self.compiled.address)(*args)
        call.returned = True  # last: Python looks for signals at calls and loops, and here it must not


def _interrupt_after(call: SimpleNamespace) -> None:
    """Hand an interrupt, which has waited for the compiler, to the main thread once ``call`` has returned.

    An exception would be lost before that.
    """
    while not call.returned:
        time.sleep(0.001)
    interrupt_main()


def _reals(function: Callable[..., Any]) -> list[bool]:
    """Which arguments are of the compute type."""
    known = inspect.signature(function).parameters.values()
    return [name.name == "like" or name.annotation in ("Real", Real) for name in known]


def callable_from_kernels(function: Callable[..., Any], make: Callable[..., Any], compile: Compile) -> Any:
    """What kernels call in place of ``function``; ``make`` and ``compile`` make a C function of it."""
    variants = _REALS if any(_reals(function)) else (types.int64,)
    slots = {real: Slot(function, real, make, compile) for real in variants}

    def call(typingctx, *given):
        taken = [kind if isinstance(kind, types.Float | types.CPointer) else types.int64 for kind in given]
        (slot,) = {slots[kind] for kind in taken if kind in slots}

        def build(context, builder, signature, args):
            values = [builder.ptrtoint(v, _INT64) if isinstance(v.type, ir.PointerType) else v for v in args]
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
            cell = builder.module.globals.get(slot.symbol)
            if cell is None:
                cell = ir.GlobalVariable(builder.module, kind.as_pointer(), slot.symbol)
                cell.linkage = "external"
            builder.call(builder.load(cell), values)
            return context.get_dummy_value()

        return types.none(*taken), build

    call.__name__ = call.__qualname__ = function.__name__
    known = inspect.signature(function)
    context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = known.replace(parameters=[context, *known.parameters.values()])  # type: ignore[attr-defined]
    made = intrinsic(call)
    made.slots = slots
    return made

"""Functions of CPU kernels that are compiled at their first call.

Conversions, packing, strided copies and rare modes are most of a kernel's code, but most calls use none of
them. Each of these functions is compiled separately, once for all kernels. Kernels call it through a *slot*:
an LLVM symbol for eight bytes that hold the address of the function. At first this is the address of a Python
function, which compiles the real function, stores its address in the slot and calls it.

Such a function returns nothing. Integers, addresses and pointers are passed as int64. Arguments annotated as
``Real``, and ``like``, have the compute type. There is one variant per compute type.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import inspect
import os
import signal
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
from holdfast.core.importing import noting_signals

#: Annotation of an argument of the compute type.
Real = Any

_INT64 = ir.IntType(64)
#: The compute types and their names.
_REALS = {types.float32: "float32", types.float64: "float64"}

#: Compiles a C function under the compiler lock. Takes the function and the name of its module.
Compile = Callable[[Any, str], None]


class Slot:
    """The slot of one variant of a function."""

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
        """The initial content of the slot. It must not raise, because its caller is compiled code."""
        call, waiting = SimpleNamespace(returned=False), dict[int, Any]()
        try:
            with noting_signals() as waiting:
                self._compile_or_abort()
                self._cell.point_to(self.compiled.address)(*args)
        except BaseException:  # of the handler of a signal that came when the handlers were restored
            waiting.setdefault(signal.SIGINT)
        if waiting:
            threading.Thread(target=_signal_after, args=(call, list(waiting))).start()
        call.returned = True  # must be last: Python handles signals at calls and in loops

    def _compile_or_abort(self) -> None:
        try:
            self._compile(self.compiled, self._module)
        except BaseException as error:
            if self.compiled.address is None:
                sys.stderr.write(f"holdfast: a kernel could not be compiled: {error!r}\n")
                sys.stderr.flush()
                os.abort()  # continuing would return unwritten memory


def _signal_after(call: SimpleNamespace, numbers: list[int]) -> None:
    """Repeat signals after ``call`` has returned. Before that, what their handlers raise would be lost."""
    while not call.returned:
        time.sleep(0.001)
    for number in numbers:
        interrupt_main(number)  # type: ignore[arg-type]


def _reals(function: Callable[..., Any]) -> list[bool]:
    """For each argument whether it has the compute type."""
    known = inspect.signature(function).parameters.values()
    return [name.name == "like" or name.annotation in ("Real", Real) for name in known]


def callable_from_kernels(function: Callable[..., Any], make: Callable[..., Any], compile: Compile) -> Any:
    """``function`` in a form that kernels can call. ``make`` and ``compile`` build its C function."""
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

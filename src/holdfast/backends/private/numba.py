"""Private interfaces of Numba: its compiler, its cache, its C functions.

Kernels use a small part of Python: no closures, no ``with``, no reference-counted objects. ``KernelCompiler``
omits the passes of Numba's pipeline that handle these. ``remembering_types`` caches resolved call types
between kernels.

Each function at the end has a fallback in ``FALLBACKS`` that uses public interfaces: compilation then takes
longer and happens in every process, with the same results.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba

from holdfast.core.private import found_by

#: The fallback of each interface, by name.
FALLBACKS: dict[str, Callable[..., Any]] = {}


#: Class names of passes of Numba's pipeline that change nothing in a kernel.
NEEDLESS = frozenset(
    {
        "WithLifting",
        "InlineClosureLikes",
        "MakeFunctionToJitFunction",
        "InlineInlinables",
        "FindLiterallyCalls",
        "LiteralUnroll",
        "LiteralPropagationSubPipelinePass",
        "RewriteDynamicRaises",
        "InlineOverloads",
        "NopythonRewrites",
        "DumpParforDiagnostics",
        "NoPythonSupportedFeatureValidation",
    }
)


@cache
def _compilers() -> tuple[Any, Any, Any]:
    """The compiler of kernels, the compiler of functions that kernels call, and the cache of call types."""
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler
    from numba.core.compiler_machinery import PassManager
    from numba.core.types.functions import BaseFunction

    class KernelCompiler(Compiler):
        """Numba's compiler without the passes that kernels do not need."""

        def define_pipelines(self):
            (whole,) = super().define_pipelines()
            lean = PassManager(whole.pipeline_name)
            lean.passes = [(kind, why) for kind, why in whole.passes if kind.__name__ not in NEEDLESS]
            lean.finalize()
            return [lean]

    class _PartLibrary(JITCodeLibrary):
        """Code of a function that kernels call: optimized with the kernel that links it, never run alone."""

        def _optimize_final_module(self) -> None:
            """Skipped: optimizing the kernel covers its parts."""

        def _finalize_final_module(self) -> None:
            self._finalized = True  # for linking only; no machine code is generated

    class PartCompiler(KernelCompiler):
        """Compiles a function that kernels call, only as far as linking needs."""

        def __init__(self, typingctx, targetctx, library, args, return_type, flags, locals):
            flags.no_compile = True
            library = _PartLibrary(targetctx.codegen(), "part")
            super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)

        def compile_extra(self, func):
            part = super().compile_extra(func)
            # Callers find a function by its entry point. It is never called, but must be unique.
            entry_point: Any = [].append
            part.target_context.insert_user_function(entry_point, part.fndesc, [part.library])
            return part._replace(entry_point=entry_point)

    known: dict[Any, Any] = {}
    resolve = BaseFunction.get_call_type

    def resolve_once(self, context, args, kws):
        key = (self, context, args, tuple(kws.items()))
        found = known.get(key)
        if found is None:
            found = known[key] = resolve(self, context, args, kws)
        return found

    @contextmanager
    def remembering() -> Iterator[None]:
        kind: Any = BaseFunction
        kind.get_call_type = resolve_once
        try:
            yield
        finally:
            kind.get_call_type = resolve

    overridden = ("_optimize_final_module", "_finalize_final_module")
    if not all(hasattr(JITCodeLibrary, name) for name in overridden):
        raise NotImplementedError
    return KernelCompiler, PartCompiler, remembering


def kernel_options() -> dict[str, Any]:
    """Numba's options for kernels: fewer passes, and no reference counts."""
    found = found_by(_compilers)
    return {"_nrt": False, "no_cfunc_wrapper": True, "pipeline_class": found[0]} if found else {}


FALLBACKS["kernel_options"] = dict


def part_options() -> dict[str, Any]:
    """Numba's options for functions that kernels call: optimized with the kernel, never run alone."""
    found = found_by(_compilers)
    if not found:
        return {}
    wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return {"_nrt": False, **wrappers, "pipeline_class": found[1]}


FALLBACKS["part_options"] = dict


def remembering_types() -> AbstractContextManager[None]:
    """Context for compiling kernels: resolves each function and its argument types once per process.

    Without it, Numba tries every overload of an operator at each use.
    """
    found = found_by(_compilers)
    made: AbstractContextManager[None] = found[2]() if found else nullcontext()
    return made


FALLBACKS["remembering_types"] = nullcontext


class CFunction:
    """A function that ``compile()`` compiles with a C interface; ``address`` is None before."""

    def __init__(self, function: Callable[..., Any], signature: Any, options: dict[str, Any]) -> None:
        self._made = function, signature, options
        self.address: int | None = None

    def compile(self) -> None:
        function, signature, options = self._made
        self._compiled: Any = numba.cfunc(signature, **options)(function)
        self.address = self._compiled.address


def c_function(function: Callable[..., Any], signature: Any, options: dict[str, Any]) -> Any:
    """``function`` as a C function, with the interface of ``CFunction``.

    With the private interface it compiles with fewer passes, and can be cached on disk.
    """

    def make() -> Any:
        from numba.core.ccallback import CFunc

        lean = {name: value for name, value in kernel_options().items() if name == "_nrt"}
        types = (signature.args, signature.return_type)
        return CFunc(function, types, {}, options | lean, pipeline_class=_compilers()[0])

    return found_by(make) or CFunction(function, signature, options)


FALLBACKS["c_function"] = CFunction


def keep_on_disk(compiled: Any, function: Any, files: Callable[[Path, str], Any]) -> None:
    """Make Numba cache a compiled function in ``files(folder, base)``. Without it, every process compiles.

    It returns an object with ``load(key)``, ``save(key, compiled)`` and ``flush()``. Disk errors are ignored.
    """
    found_by(lambda: _attach_cache(compiled, function, files))


FALLBACKS["keep_on_disk"] = lambda compiled, function, files: None


def _attach_cache(compiled: Any, function: Any, files: Callable[[Path, str], Any]) -> None:
    from numba.core.caching import FunctionCache

    class KernelCache(FunctionCache):
        """Numba's cache of a function, with our files."""

        on_disk = True

        def __init__(self) -> None:
            super().__init__(function)  # raises if there is no writable folder
            self._cache_file = files(Path(self._cache_path), self._impl.filename_base)

        def load_overload(self, sig, target_context):
            with suppress(OSError):
                return super().load_overload(sig, target_context)
            return None

        def save_overload(self, sig, data):
            with suppress(OSError):  # the disk is full, missing or read-only
                super().save_overload(sig, data)

    compiled._cache = KernelCache()


def is_on_disk(compiled: Any) -> bool:
    """Whether a compiled function is cached on disk."""
    return getattr(getattr(compiled, "_cache", None), "on_disk", False)


FALLBACKS["is_on_disk"] = lambda compiled: False


def serialized(compiled: Any) -> bytes:
    """A compiled function as bytes that ``pickle.loads`` reads."""
    from numba.core.serialize import dumps

    return bytes(dumps(compiled))


FALLBACKS["serialized"] = pickle.dumps


def compiler_locks() -> list[Any]:
    """The locks of Numba's compiler and of LLVM, outermost first.

    A thread may hold them outside our own lock: it frees compiled code, or calls a kernel with new types.
    Fallback: none.
    """
    return found_by(_locks) or []


FALLBACKS["compiler_locks"] = list


def _locks() -> list[Any]:
    from llvmlite.binding import ffi
    from numba.core.compiler_lock import global_compiler_lock

    locks = [global_compiler_lock, ffi.lib._lock._lock]
    for lock in locks:
        lock.acquire()
        lock.release()
    return locks

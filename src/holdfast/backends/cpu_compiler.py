"""How Numba compiles kernels here: the passes that they need, and nothing twice.

Numba's own pipeline serves every Python program. Kernels use a small part of the language: no closures, no
``with``, no objects with a reference count. ``KernelCompiler`` leaves out the passes that look for these, and
``remembering_types`` keeps what Numba has worked out about the types of a call for the next kernel.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import typed_passes as typed
from numba.core import untyped_passes as untyped
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import PassManager
from numba.core.types.functions import BaseFunction

#: Passes of Numba's pipeline that change nothing in a kernel.
NEEDLESS = frozenset(
    {
        untyped.WithLifting,
        untyped.InlineClosureLikes,
        untyped.MakeFunctionToJitFunction,
        untyped.InlineInlinables,
        untyped.FindLiterallyCalls,
        untyped.LiteralUnroll,
        untyped.LiteralPropagationSubPipelinePass,
        untyped.RewriteDynamicRaises,
        typed.InlineOverloads,
        typed.NopythonRewrites,
        typed.DumpParforDiagnostics,
        typed.NoPythonSupportedFeatureValidation,
    }
)


class KernelCompiler(Compiler):
    """Numba's compiler without the passes that kernels do not need."""

    def define_pipelines(self):
        (whole,) = super().define_pipelines()
        lean = PassManager(whole.pipeline_name)
        lean.passes = [(kind, why) for kind, why in whole.passes if kind not in NEEDLESS]
        lean.finalize()
        return [lean]


class _PartLibrary(JITCodeLibrary):
    """The code of what kernels call: optimised where it is linked, with the kernel, and never run alone."""

    def _optimize_final_module(self) -> None:
        """A kernel's optimisation covers its parts; at every level of calls it would be done once more."""

    def _finalize_final_module(self) -> None:
        self._finalized = True  # as code to link; no machine code is made of it


class PartCompiler(KernelCompiler):
    """Compiles what kernels call, as far as linking it takes."""

    def __init__(self, typingctx, targetctx, library, args, return_type, flags, locals):
        flags.no_compile = True
        library = _PartLibrary(targetctx.codegen(), "part")
        super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)

    def compile_extra(self, func):
        part = super().compile_extra(func)
        # Callers find a function by its entry point. This one is never called: it need only be its own.
        entry_point: Any = [].append
        part.target_context.insert_user_function(entry_point, part.fndesc, [part.library])
        return part._replace(entry_point=entry_point)


#: The signature that a function was resolved to, by the function and the types of its arguments.
_known: dict[Any, Any] = {}
_resolve = BaseFunction.get_call_type


def _resolve_once(self, context, args, kws):
    key = (self, context, args, tuple(kws.items()))
    found = _known.get(key)
    if found is None:
        found = _known[key] = _resolve(self, context, args, kws)
    return found


@contextmanager
def remembering_types() -> Iterator[None]:
    """While kernels compile: resolve each function and its argument types once in a process.

    Numba tries every overload of an operator at every place where it is used.
    """
    kind: Any = BaseFunction
    kind.get_call_type = _resolve_once
    try:
        yield
    finally:
        kind.get_call_type = _resolve

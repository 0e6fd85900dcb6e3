"""Private interfaces of torch that ``install`` needs, with probes and fallbacks as in ``core.private``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from holdfast.core.private import instead_of

#: The fallback of each interface, by name.
FALLBACKS: dict[str, Any] = {}


def _probe_destroy() -> Any:
    def destroy(library: torch.library.Library) -> None:
        library._destroy()

    return destroy if callable(torch.library.Library._destroy) else None


@instead_of(_probe_destroy, FALLBACKS)
def destroy(library: torch.library.Library) -> None:
    """Remove the kernels of a library now. Fallback: torch's record of names that were taken is kept."""
    registrations: Any = library.m
    registrations.reset()


def _probe_replace_branch() -> Any:
    module: Any = importlib.import_module("torch._decomp.decompositions")

    def replace_branch(replaced: Callable[[Any], Any]) -> Callable[[], None]:
        original = module._upsample_linear_vec
        module._upsample_linear_vec = replaced(original)

        def restore() -> None:
            module._upsample_linear_vec = original

        return restore

    return replace_branch if callable(module._upsample_linear_vec) else None


@instead_of(_probe_replace_branch, FALLBACKS)
def replace_branch(replaced: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace the function that torch's ``interpolate`` calls on CUDA if deterministic algorithms are on.

    ``replaced`` takes torch's function. Returns a function that restores it. Fallback: nothing changes, and
    that branch keeps torch's decomposition, which is deterministic and slow.
    """
    return lambda: None


def _probe_trace_as() -> Any:
    keys = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
    probed: Any = torch.ops.aten.upsample_bilinear2d.vec

    def trace_as(overload: Any, replaced: Callable[[Any], Any]) -> Callable[[], None]:
        kernels = overload.py_kernels
        before = {key: kernels[key] for key in keys if key in kernels}
        function = replaced(next(iter(before.values()), overload))
        kernels.update(dict.fromkeys(before or keys[1:], function))
        overload._dispatch_cache.clear()

        def restore() -> None:
            for key in keys:
                kernels.pop(key, None)
            kernels.update(before)
            overload._dispatch_cache.clear()

        return restore

    found = keys[0] in probed.py_kernels and isinstance(probed._dispatch_cache, dict)
    return trace_as if found else None


@instead_of(_probe_trace_as, FALLBACKS)
def trace_as(overload: Any, replaced: Callable[[Any], Any]) -> Callable[[], None]:
    """Trace an operator as another function. ``replaced`` takes torch's own function, and returns the other.

    Returns a function that restores torch's own. Fallback: nothing changes.
    """
    return lambda: None


def _probe_without_cache_of_traces() -> Any:
    config: Any = importlib.import_module("torch._functorch.config")

    def without_cache_of_traces() -> Callable[[], None]:
        before = config.enable_autograd_cache
        config.enable_autograd_cache = False

        def restore() -> None:
            config.enable_autograd_cache = before

        return restore

    return without_cache_of_traces if isinstance(config.enable_autograd_cache, bool) else None


@instead_of(_probe_without_cache_of_traces, FALLBACKS)
def without_cache_of_traces() -> Callable[[], None]:
    """Ignore traces that torch.compile keeps on disk: their key does not tell how an operator was traced.

    Returns a function that restores the setting. Fallback: nothing changes.
    """
    return lambda: None

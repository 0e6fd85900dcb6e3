"""Private interfaces of torch that ``install`` needs, each with a probe and a fallback (see ``core.private``)."""

from __future__ import annotations

import importlib
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


def _probe_suggested_format() -> Any:
    from torch._prims_common import suggest_memory_format

    def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
        if tensor.is_contiguous():
            return torch.contiguous_format
        found: torch.memory_format = suggest_memory_format(tensor)
        return found

    sliced = torch.empty(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)[:, :, 1:]
    return suggested_format if suggested_format(sliced) == torch.channels_last else None


@instead_of(_probe_suggested_format, FALLBACKS)
def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format of torch's results for this tensor. Fallback: channels last only if it is dense."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format


def _probe_linear_branch() -> Any:
    module: Any = importlib.import_module("torch._decomp.decompositions")
    return (lambda: module) if callable(module._upsample_linear_vec) else None


@instead_of(_probe_linear_branch, FALLBACKS)
def linear_branch() -> Any:
    """The module whose ``_upsample_linear_vec`` torch's ``interpolate`` calls on CUDA with the flag on.

    Fallback: None. Then that branch keeps torch's decomposition, which is deterministic and slow.
    """
    return None


def upsample_linear(input: torch.Tensor, size: Any, align_corners: bool, scales: Any) -> torch.Tensor:
    """What torch's ``interpolate`` calls with the flag off: bilinear for 4 axes, trilinear for 5."""
    vec = {4: torch.ops.aten.upsample_bilinear2d.vec, 5: torch.ops.aten.upsample_trilinear3d.vec}[input.dim()]
    return vec(input, size, align_corners, scales)  # type: ignore[no-any-return]

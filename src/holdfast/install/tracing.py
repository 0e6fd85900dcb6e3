"""Python code of torch that avoids an operator: branches for the deterministic flag, and tracing.

- ``torch.nn.functional.interpolate`` calls a decomposition for bilinear and trilinear images on CUDA if
  deterministic algorithms are on. Its gradient is many times slower than an operator's.
- While torch traces for ``torch.compile`` it runs Python code instead of the upsampling operators. Its
  gradient is an ``index_put``, which compiled code adds up in the order of arrival. So is the gradient of
  ``embedding``.

While ``install`` holds, all of them reach the operators or holdfast's own. Exported programs keep torch's
operators: other programs read them, and they run without holdfast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling, is_exporting

from holdfast.core.errors import HoldfastError
from holdfast.install import interpolate, private
from holdfast.install.serving import is_served
from holdfast.ops.segment_sum.indexed import INDEX_DTYPES


def replace(names: Collection[str]) -> Callable[[], None]:
    """Replace the code that avoids these operators; return a function that restores it."""
    stack = ExitStack()
    served = [name for name in interpolate.UPSAMPLE if {name, f"{name}_backward"} <= set(names)]
    for name in served:
        overload = getattr(torch.ops.aten, name).vec
        stack.callback(private.trace_as(overload, partial(_upsample, interpolate.UPSAMPLE[name])))
    if "embedding_dense_backward" in names:
        overload = torch.ops.aten.embedding_backward.default
        stack.callback(private.trace_as(overload, lambda original: _embedding_backward))
    if served or "embedding_dense_backward" in names:
        stack.callback(private.without_cache_of_traces())
    if {"upsample_bilinear2d", "upsample_trilinear3d"} & set(served):
        stack.callback(private.replace_branch(partial(_branch, served)))
    return stack.close


def _upsample(kind: interpolate.Kind, original: Callable[..., Any]) -> Callable[..., Any]:
    """What F.interpolate is traced as. ``original`` is torch's function."""

    def upsample(input: Any, output_size: Any, *rest: Any) -> Any:
        if is_exporting() or not _is_served(input):
            return original(input, output_size, *rest)
        *corners, factors = rest
        size = output_size or _sizes(input.shape[2:], factors)
        operator = torch.ops.holdfast.interpolate
        return operator(input, size, str(kind.mode), any(corners), kind.antialias, factors or ())

    return upsample


def _embedding_backward(grad: Any, indices: Any, *rest: Any) -> Any:
    """What the gradient of F.embedding is traced as."""
    *options, sparse = rest
    if sparse:
        operator: Any = torch.ops.aten.embedding_sparse_backward.default
    elif not is_exporting() and _is_served(grad) and indices.dtype in INDEX_DTYPES:
        operator = torch.ops.holdfast.embedding_backward.default
    else:
        operator = torch.ops.aten.embedding_dense_backward.default
    return operator(grad, indices, *options)


def _is_served(tensor: Any) -> bool:
    return tensor.device.type in ("cpu", "cuda") and is_served(tensor.dtype)


def _sizes(sizes: Sequence[Any], factors: Sequence[float]) -> list[Any]:
    """The sizes of the output, which may be symbols."""
    return [
        size * int(factor) if int(factor) == factor else torch.sym_int(size * factor)
        for size, factor in zip(sizes, factors, strict=True)
    ]


def _branch(served: Collection[str], original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that ``interpolate`` calls if deterministic algorithms are on. ``original`` is torch's."""
    names = {4: "upsample_bilinear2d", 5: "upsample_trilinear3d"}
    overloads = {axes: getattr(torch.ops.aten, name).vec for axes, name in names.items() if name in served}

    def upsample_linear_vec(input: Any, output_size: Any, align_corners: Any, scale_factors: Any) -> Any:
        vec = overloads.get(input.dim())
        if vec is not None and (is_compiling() or _has_gradient(input, output_size, align_corners)):
            return vec(input, output_size, align_corners, scale_factors)
        return original(input, output_size, align_corners, scale_factors)

    return upsample_linear_vec


def _has_gradient(image: torch.Tensor, size: Any, align_corners: bool) -> bool:
    """Whether holdfast has the gradient. Otherwise torch's operator would raise in backward."""
    mode = "bilinear" if image.dim() == 4 else "trilinear"
    sizes = size or tuple(image.shape[2:])
    try:
        interpolate.describe(image, sizes, mode, align_corners).validate()
    except HoldfastError:
        return False
    return True

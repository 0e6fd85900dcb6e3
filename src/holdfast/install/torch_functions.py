"""torch's functions with the names and arguments of holdfast's, for drawn problems.

A call that torch does not have raises ``Inexpressible``. Some functions have several forms in torch, such as
an operator in place. The sizes of a call select its form, so that a problem is repeated exactly.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from holdfast.core.draw import Inexpressible


def other_bits(op: str, desc: Any) -> tuple[str, ...]:
    """The results and gradients whose bits are not those of holdfast's function, for a plan's op and problem.

    Their operators are not replaced. The gradient of maxima adds the same terms without zeros between them.
    """
    if op == "affine_grid":
        return "gradient of theta", "dtheta"
    if op == "embedding_bag":
        weights = ("gradient of per_sample_weights", "dper_sample_weights")
        return "out", *weights, *(("gradient of weight", "dweight") if desc.mode == "max" else ())
    return ()


#: Longest axis for which torch's interpolate in float64 is precise. torch computes coordinates in float32.
_PRECISE_AXIS = 256


def is_precise(op: str, desc: Any) -> bool:
    """Whether torch's own result in float64 is precise, for a plan's op and problem."""
    if op != "interpolate":
        return True
    # With antialias, torch 2.13 repeats the first row of an output of width 1.
    wrong = desc.antialias and desc.output_size[-1] == 1
    return not wrong and max(*desc.shape[2:], *desc.output_size) <= _PRECISE_AXIS


def _require_rows(index: torch.Tensor, rows: int) -> None:
    """torch's kernels on CUDA end the process for an index out of range."""
    if bool(((index < 0) | (index >= rows)).any()):
        raise Inexpressible


def _form(forms: int, *tensors: torch.Tensor) -> int:
    return sum(tensor.numel() for tensor in tensors) % forms


def embedding(
    input: torch.Tensor, weight: torch.Tensor, *, bad_index: str, sparse: bool = False, **how: Any
) -> torch.Tensor:
    _require_rows(input, weight.shape[0])
    return F.embedding(input, weight, **how)


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None,
    *,
    bad_index: str,
    sparse: bool = False,
    **how: Any,
) -> torch.Tensor:
    _require_rows(input, weight.shape[0])
    if offsets is None:
        how.pop("include_last_offset")
    elif offsets.dtype != input.dtype or not _bounds_bags(offsets, input.numel(), how["include_last_offset"]):
        raise Inexpressible
    return F.embedding_bag(input, weight, offsets, **how)


def _bounds_bags(offsets: torch.Tensor, count: int, include_last_offset: bool) -> bool:
    """Whether the bags are valid and hold all indices. torch adds further indices to the last bag's mean."""
    ends = offsets if include_last_offset else torch.cat([offsets, offsets.new_full((1,), count)])
    return bool(ends.numel() and ends[0] == 0 and ends[-1] == count and (ends[1:] >= ends[:-1]).all())


def grid_sample(
    input: torch.Tensor, grid: torch.Tensor, mode: str, padding_mode: str, align_corners: bool
) -> torch.Tensor:
    # torch 2.13 on the CPU writes past the end of memory for 16 bits and images of 2**15 pixels and more.
    narrow = input.is_cpu and input.dtype.itemsize == 2 and prod(input.shape[2:]) >= 2**15
    if input.dtype != grid.dtype or narrow:
        raise Inexpressible
    return F.grid_sample(input, grid, mode, padding_mode, align_corners)


def affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*unit-size grids")
        return F.affine_grid(theta, list(size), align_corners)


def interpolate(input: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.interpolate(input, **how)


def gather(input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    _require_rows(index, input.shape[dim])
    return torch.gather(input, dim, index.long())


def index_select(input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    _require_rows(index, input.shape[dim])
    if _form(2, input, index):
        return input[(slice(None),) * (dim % input.dim()) + (index,)]
    return torch.index_select(input, dim, index)


def scatter_add(input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    _require_rows(index, input.shape[dim])
    if _form(2, input, src):
        return input.clone().scatter_add_(dim, index.long(), src)
    return torch.scatter_add(input, dim, index.long(), src)


def scatter_reduce(
    input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool
) -> torch.Tensor:
    _require_rows(index, input.shape[dim])
    given = (dim, index.long(), src, reduce)
    if _form(2, input, src):
        return input.clone().scatter_reduce_(*given, include_self=include_self)
    return torch.scatter_reduce(input, *given, include_self=include_self)


def index_add(
    input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float
) -> torch.Tensor:
    _require_rows(index, input.shape[dim])
    form = _form(3, input, source)
    if form == 0:
        return torch.index_add(input, dim, index, source, alpha=alpha)
    if form == 1 or input.requires_grad or source.requires_grad:
        return input.clone().index_add_(dim, index, source, alpha=alpha)
    return torch.index_add(input, dim, index, source, alpha=alpha, out=torch.empty_like(input))


def index_put(input: torch.Tensor, indices: tuple[torch.Tensor, ...], values: torch.Tensor) -> torch.Tensor:
    for index, size in zip(indices, input.shape, strict=False):
        _require_rows(torch.where(index < 0, index + size, index), size)
    if _form(2, input, values):
        return input.clone().index_put_(indices, values, accumulate=True)
    return torch.index_put(input, indices, values, accumulate=True)

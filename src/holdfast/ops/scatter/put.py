"""``index_put`` as ``index_add``: several indices, masks and broadcast values become one index of rows."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from holdfast.core.checks import kind_of, require_memory, require_tensor
from holdfast.core.errors import InvalidArgs, InvalidIndex
from holdfast.core.torch_op import is_plain_call
from holdfast.ops.segment_sum.indexed import INDEX_DTYPES


class Put(NamedTuple):
    """A problem of ``index_put``. ``rows`` counts the positions of all indexed axes, and is out of range if
    any index is."""

    #: ``input`` with its indexed axes side by side, from ``dim`` on: a view.
    view: torch.Tensor
    dim: int
    rows: torch.Tensor
    #: Of the shape of ``table``, with as many elements along ``dim`` as ``rows`` has.
    terms: torch.Tensor
    #: The indices, and the axes of ``input`` that they index.
    indices: tuple[torch.Tensor, ...]
    axes: tuple[int, ...]
    size: tuple[int, ...]
    #: The axes of ``size`` in the order of ``view``.
    order: tuple[int, ...]

    @classmethod
    def of(cls, input: torch.Tensor, indices: Any, values: torch.Tensor) -> Put:
        given = _index_tensors(input, indices)
        axes = [axis for axis, index in enumerate(given) if index is not None]
        indexed = tuple(given[axis] for axis in axes)
        sizes = [input.shape[axis] for axis in axes]
        shape = broadcast([tuple(index.shape) for index in indexed], "the tensors of indices have shapes")
        pairs = zip(indexed, sizes, strict=True)
        rows = _flattened([from_the_front(index, n) for index, n in pairs], sizes).expand(shape)
        # As in torch, indexed axes stay where they are if they are neighbours, and come first otherwise.
        first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
        others = [axis for axis in range(input.dim()) if axis not in axes]
        before, after = ([input.shape[axis] for axis in some] for some in (others[:first], others[first:]))
        wanted = (*before, *shape, *after)
        if broadcast([tuple(values.shape), wanted], "values and indexing have shapes") != wanted:
            raise InvalidArgs(
                f"values has shape {tuple(values.shape)}, and indexing has {wanted}; values must broadcast "
                "to it."
            )
        terms = values.expand(wanted).reshape((*before, rows.numel(), *after))
        order = (*others[:first], *axes, *others[first:])
        view = input.permute(order)
        flat = rows.reshape(rows.numel())
        return cls(view, first, flat, terms, indexed, tuple(axes), tuple(input.shape), order)

    @property
    def table(self) -> torch.Tensor:
        """``view`` with all indexed axes as one."""
        shape, last = self.view.shape, self.dim + len(self.axes)
        return self.view.reshape((*shape[: self.dim], prod(shape[self.dim : last]), *shape[last:]))

    def restored(self, out: torch.Tensor) -> torch.Tensor:
        """The result, of the shape of ``table``, with the axes of ``input``."""
        if out.shape == self.size and self.order == tuple(range(len(self.size))):
            return out
        whole = out.reshape([self.size[axis] for axis in self.order])
        return whole.permute([self.order.index(axis) for axis in range(len(self.size))]).contiguous()


def name_bad_index(indices: Sequence[Any], axes: Sequence[int], size: Sequence[int]) -> None:
    """Raise the error for an index out of range again, with the index and the axis as they were given.

    On CUDA the error may be that of an earlier call, so it is left as it is.
    """
    for index, axis in zip(indices, axes, strict=True):
        if index.device.type != "cpu" or not is_plain_call(index):
            return
        rows = size[axis]
        bad = ((index < -rows) | (index >= rows)).reshape(-1).nonzero()
        if bad.numel():
            position = int(bad[0])
            accepted = f"{-rows} to {rows - 1}" if rows else "none"
            raise InvalidIndex(
                f"the index at position {position} of the flattened index of axis {axis} is "
                f"{int(index.reshape(-1)[position])}; the axis has {rows} rows; accepted are "
                f"{accepted}. Correct the index."
            ) from None


def broadcast(shapes: Sequence[tuple[int, ...]], what: str) -> tuple[int, ...]:
    """The shape that tensors of these shapes have together."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise InvalidArgs(f"{what} {', '.join(map(str, shapes))}; they must broadcast.") from None


def require_readable(name: str, tensor: torch.Tensor) -> None:
    """Raise if torch's own operators cannot read a tensor. A traced tensor has no memory."""
    if not is_compiling():
        require_memory(name, tensor)


def _index_tensors(input: torch.Tensor, indices: Any) -> list[Any]:
    """One tensor of integers or None for each axis of ``input``. A mask stands for several axes."""
    if not isinstance(indices, Sequence) or isinstance(indices, str):
        raise InvalidArgs(
            f"indices is {kind_of(indices)}; it must be a tuple of tensors, with None for axes that "
            "are not indexed."
        )
    found: list[Any] = []
    for number, index in enumerate(indices):
        if index is None:
            found.append(None)
            continue
        require_tensor(f"indices[{number}]", index)
        if index.dtype == torch.bool:
            covered = tuple(input.shape[len(found) : len(found) + index.dim()])
            if not index.dim():
                raise InvalidArgs(f"indices[{number}] is a mask of rank 0; it must have at least one axis.")
            if tuple(index.shape) != covered:
                raise InvalidArgs(
                    f"indices[{number}] is a mask of shape {tuple(index.shape)}; it must have the shape of "
                    f"the axes that it masks, {covered}."
                )
            require_readable(f"indices[{number}]", index)
            found += index.to(input.device).nonzero(as_tuple=True)
        elif index.dtype in INDEX_DTYPES:
            found.append(index.to(input.device))
        else:
            raise InvalidArgs(
                f"indices[{number}] has dtype {index.dtype}; accepted are torch.int32, torch.int64 and "
                "torch.bool."
            )
    if len(found) > input.dim() or all(index is None for index in found):
        raise InvalidArgs(
            f"indices has entries for {len(found)} axes, and input has {input.dim()}; index at least one "
            "axis, and no more than input has."
        )
    return found + [None] * (input.dim() - len(found))


def from_the_front(index: torch.Tensor, size: int) -> torch.Tensor:
    """Indices counted from 0; those out of range are unchanged."""
    require_readable("indices", index)
    return torch.add(index, (index < 0) & (index >= -size), alpha=size)


def _flattened(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """One index for several axes. It is out of range if any of them is."""
    if len(indices) == 1:
        return indices[0]
    flat: Any = 0
    bad: Any = False
    for index, size in zip(indices, sizes, strict=True):
        bad = bad | (index < 0) | (index >= size)
        flat = flat * size + index.long()
    return torch.where(bad, prod(sizes), flat)

"""torch's operators that add terms to the elements that an index names, and the gradients made of them.

The gradients of ``gather``, ``index_select``, ``x[index]``, ``take`` and ``repeat_interleave`` call these
operators.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.core.errors import InvalidIndex
from holdfast.core.strided import overlaps_itself, span
from holdfast.install.operators import WITH_FLAG, Operator, with_out
from holdfast.install.rows import add_rows, refuse_bad_indices
from holdfast.install.serving import PassOn, Serve, may_overlap, require_float
from holdfast.ops.scatter.put import Put, broadcast, name_bad_index
from holdfast.ops.scatter.torch_op import index_add, scatter_add, scatter_reduce, scatter_values

_INDICES = (torch.int32, torch.int64)
#: With fewer terms, torch's kernels for float32 and float64 on the CPU use one thread. They are deterministic
#: and faster.
SMALL = 2**14
_SIZES = "on the CPU from 16,384 terms"


def _require(self: torch.Tensor, src: torch.Tensor, terms: Callable[[], int]) -> None:
    """Pass the call on unless its dtypes and the number of its terms are served."""
    require_float(self)
    if src.dtype != self.dtype:
        raise PassOn("the tensors have different dtypes")
    if self.device.type != "cpu":
        return
    if not self.numel():
        raise PassOn("the tensor is empty")
    if self.dtype.itemsize > 2 and src.numel() < SMALL and terms() < SMALL:
        raise PassOn("there are few terms, which torch adds on one thread")


def _require_index(self: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> None:
    if index.dtype not in _INDICES:
        raise PassOn(f"the index is {index.dtype}")
    _require(self, src, src.numel)


def _require_memory_of_its_own(self: torch.Tensor, src: torch.Tensor) -> None:
    """Pass the call on if elements of the tensor that is written share memory, or are in the source.

    As in torch, tensors with gaps in their memory are taken to be apart.
    """
    if overlaps_itself(self.shape, self.stride()):
        raise PassOn("elements of the tensor share memory")
    if may_overlap(self, src) and _is_dense(self) and _is_dense(src):
        raise PassOn("the source shares memory with the tensor")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, in any order of the axes."""
    if span(tensor.shape, tensor.stride()) != tensor.numel():
        return False
    return tensor.is_contiguous() or not overlaps_itself(tensor.shape, tensor.stride())


def _with_scalars(serve: Serve, *, in_place: bool, ranked: bool) -> Serve:
    """``serve``, also for a tensor without dims, which is one element.

    ``ranked`` operators refuse a source of another rank; the others take an empty index of any dtype.
    """

    def serve_any(self, dim, index, src, *rest, **options):
        if ranked and src.dim() != self.dim():
            raise PassOn("the source has another rank")
        if not ranked and not index.numel():
            index = index.long()
        if self.dim():
            return serve(self, dim, index, src, *rest, **options)
        if dim not in (0, -1):
            raise PassOn("there is no such dim")
        if index.dim() > 1 or src.dim() > 1:
            raise PassOn("the index or the source has another rank")
        found = serve(self.view(1), 0, index.reshape(-1), src.reshape(-1), *rest, **options)
        return self if in_place else found.view(())

    return serve_any


def _axis(self: torch.Tensor, dim: int) -> int:
    if not -self.dim() <= dim < self.dim():
        raise PassOn("there is no such dim")
    return dim % self.dim()


def _shared(self: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor | None:
    """The index of rows, if this index is one that was expanded to their elements; otherwise None."""
    if index.shape != src.shape or index.dim() != self.dim():
        return None
    others = [d for d in range(self.dim()) if d != dim]
    if any(index.shape[d] != self.shape[d] or index.stride(d) * (index.shape[d] > 1) for d in others):
        return None
    return index[tuple(slice(None) if d == dim else 0 for d in range(self.dim()))]


def _scatter_add(self, dim, index, src):
    _require_index(self, index, src)
    with torch.no_grad():
        return scatter_add(self, dim, index, src)


def _scatter_add_(self, dim, index, src):
    _require_index(self, index, src)
    _require_memory_of_its_own(self, src)
    dim = _axis(self, dim)
    if not index.numel():
        return self
    rows = _shared(self, dim, index, src)
    if rows is not None:
        refuse_bad_indices(self, self.shape[dim], rows)
        return add_rows(self, dim, 1, rows, src)
    with torch.no_grad():
        return self.copy_(scatter_add(self, dim, index, src))


def _scatter_reduce(self, dim, index, src, reduce, *, include_self=True):
    if reduce not in ("sum", "mean"):
        raise PassOn(f'the reduction is "{reduce}"')
    _require_index(self, index, src)
    with torch.no_grad():
        return scatter_reduce(self, dim, index, src, reduce, include_self=include_self)


def _scatter_reduce_(self, dim, index, src, reduce, *, include_self=True):
    if reduce == "sum" and include_self:
        return _scatter_add_(self, dim, index, src)
    _require_memory_of_its_own(self, src)
    return self.copy_(_scatter_reduce(self, dim, index, src, reduce, include_self=include_self))


def _index_add(self, dim, index, source, *, alpha=1):
    _require_index(self, index, source)
    with torch.no_grad():
        return index_add(self, dim, index, source, alpha=alpha)


def _index_add_(self, dim, index, source, *, alpha=1):
    _require_index(self, index, source)
    _require_memory_of_its_own(self, source)
    dim = _axis(self, dim)
    expected = (*self.shape[:dim], index.numel(), *self.shape[dim + 1 :])
    if alpha == 1 and index.dim() == 1 and source.shape == expected:
        refuse_bad_indices(self, self.shape[dim], index)
        return add_rows(self, dim, 1, index, source)
    with torch.no_grad():
        return self.copy_(index_add(self, dim, index, source, alpha=alpha))


def _index_put_(self, indices, values, accumulate=False, unsafe=False):
    if not accumulate:
        raise PassOn("nothing is accumulated")
    require_float(self)
    if any(index is not None and index.device != self.device and not index.is_cpu for index in indices):
        raise PassOn("the tensors are on different devices")
    # As in torch, a mask may be uint8, and a single value on the CPU.
    indices = [
        index.bool() if index is not None and index.dtype == torch.uint8 else index for index in indices
    ]
    values = values if values.dim() or not values.is_cpu else values.to(self.device)
    _require(self, values, lambda: _number_of_terms(self, indices))
    _require_memory_of_its_own(self, values)
    put = Put.of(self, indices, values)
    try:
        refuse_bad_indices(self, math.prod(self.shape[axis] for axis in put.axes), put.rows)
    except InvalidIndex:
        name_bad_index(put.indices, put.axes, put.size)
        raise
    add_rows(put.view, put.dim, len(put.axes), put.rows, put.terms)
    return self


def _number_of_terms(self: torch.Tensor, indices: list[Any]) -> int:
    """Number of elements of the indexed tensor, or more if masks are sparse."""
    shapes, axis, others = [(1,)], 0, math.prod(self.shape)
    for index in indices:
        masked = index is not None and index.dtype == torch.bool
        axes = range(axis, axis + (index.dim() if masked else 1))
        axis = axes.stop
        if index is not None and axis <= self.dim():
            others //= max(math.prod(self.shape[a] for a in axes), 1)
            shapes.append((index.numel(),) if masked else tuple(index.shape))
    return others * math.prod(broadcast(shapes, "the tensors of indices have shapes"))


def _put_(self, index, source, accumulate=False):
    if not accumulate:
        raise PassOn("nothing is accumulated")
    if index.dtype != torch.int64:
        raise PassOn(f"the index is {index.dtype}")
    if index.numel() != source.numel():
        raise PassOn("the index has another size than the source")
    require_float(self)
    _require_memory_of_its_own(self, source)
    if not index.numel() and source.dtype == self.dtype:
        return self
    flat = self.reshape(-1)
    _index_put_(flat, [index.reshape(-1)], source.reshape(-1), accumulate=True)
    return self if self.is_contiguous() else self.copy_(flat.view(self.shape))


def operators() -> Iterator[Operator]:
    for name, overload, family, serve, serve_in_place in (
        ("scatter_add", "", "scatter_add", _scatter_add, _scatter_add_),
        ("index_add", "", "index_add", _index_add, _index_add_),
        ("scatter_reduce", "two", "scatter_reduce", _scatter_reduce, _scatter_reduce_),
    ):
        end = f".{overload}" if overload else ""
        ranked = name == "index_add"
        serve = _with_scalars(serve, in_place=False, ranked=ranked)
        serve_in_place = _with_scalars(serve_in_place, in_place=True, ranked=ranked)
        out = f"{overload}_out" if overload else "out"
        yield from with_out(Operator(f"{name}{end}", family, serve, WITH_FLAG, sizes=_SIZES), out, "out")
        yield Operator(f"{name}_{end}", family, serve_in_place, WITH_FLAG, sizes=_SIZES)
    yield Operator("_index_put_impl_", "index_put", _index_put_, WITH_FLAG, sizes=_SIZES)
    yield Operator("put_", "put", _put_, WITH_FLAG, sizes=_SIZES)


def largest_rows(grad: torch.Tensor, indices: torch.Tensor, sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """The gradient of embedding_bag's maxima: each element goes to the row that it was read from.

    ``indices`` are these rows, and ``sizes`` the number of rows in each bag. An empty bag has no gradient.
    """
    read = (sizes > 0).unsqueeze(1) & (indices >= 0)
    terms = grad.masked_fill(~read, 0)
    return scatter_values(None, 0, indices.clamp(min=0), terms, size=(rows, grad.shape[1]), base="zeros")

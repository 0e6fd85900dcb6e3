"""torch's operators that add terms to the elements that an index names, and the gradients made of them.

The gradients of ``gather``, ``index_select``, ``x[index]``, ``take`` and ``repeat_interleave`` call these
operators.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.install.operators import WITH_FLAG, Operator, with_out
from holdfast.install.rows import add_rows, refuse_bad_indices
from holdfast.install.serving import PassOn, Serve, require_float
from holdfast.ops.scatter.torch_op import index_add, scatter_add, scatter_reduce, scatter_values

_INDICES = (torch.int32, torch.int64)
#: With fewer terms, torch's kernels for float32 and float64 on the CPU use one thread. They are deterministic
#: and faster.
SMALL = 2**14
_SIZES = "on the CPU from 16,384 terms"


def _require(self: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> None:
    require_float(self)
    if src.dtype != self.dtype:
        raise PassOn("the tensors have different dtypes")
    if index.dtype not in _INDICES:
        raise PassOn(f"the index is {index.dtype}")
    if self.device.type == "cpu" and src.numel() < SMALL and self.dtype.itemsize > 2:
        raise PassOn("there are few terms, which torch adds on one thread")


def _with_scalars(serve: Serve, *, in_place: bool) -> Serve:
    """``serve``, also for a tensor without dims, which is one element, and an empty index of any dtype."""

    def serve_any(self, dim, index, src, *rest, **options):
        index = index if index.numel() else index.long()
        if self.dim():
            return serve(self, dim, index, src, *rest, **options)
        if dim not in (0, -1):
            raise PassOn("there is no such dim")
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
    _require(self, index, src)
    with torch.no_grad():
        return scatter_add(self, dim, index, src)


def _scatter_add_(self, dim, index, src):
    _require(self, index, src)
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
    _require(self, index, src)
    with torch.no_grad():
        return scatter_reduce(self, dim, index, src, reduce, include_self=include_self)


def _scatter_reduce_(self, dim, index, src, reduce, *, include_self=True):
    if reduce == "sum" and include_self:
        return _scatter_add_(self, dim, index, src)
    return self.copy_(_scatter_reduce(self, dim, index, src, reduce, include_self=include_self))


def _index_add(self, dim, index, source, *, alpha=1):
    _require(self, index, source)
    with torch.no_grad():
        return index_add(self, dim, index, source, alpha=alpha)


def _index_add_(self, dim, index, source, *, alpha=1):
    _require(self, index, source)
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
    if all(index is None for index in indices):
        raise PassOn("there is no index")
    # As in torch, indices and a single value may be on the CPU.
    values = values if values.dim() else _on(self.device, values)
    dims, given = _whole_numbers([index if index is None else _on(self.device, index) for index in indices])
    _require(self, given[0], values)
    if dims[-1] >= self.dim():
        raise PassOn("there are more indices than dims")
    given = list(torch.broadcast_tensors(*given))
    order = [*dims, *(d for d in range(self.dim()) if d not in dims)]
    # As in torch, the indexed dims stay where they are if they are neighbours, and come first otherwise.
    neighbours = dims == list(range(dims[0], dims[-1] + 1))
    first, view = (dims[0], self) if neighbours else (0, self.permute(order))
    shape = (*view.shape[:first], *given[0].shape, *view.shape[first + len(dims) :])
    lengths = zip(reversed(values.shape), reversed(shape), strict=False)
    if values.dim() > len(shape) or any(own not in (1, length) for own, length in lengths):
        raise PassOn("the values do not have the shape of the indexed tensor")
    sizes = view.shape[first : first + len(dims)]
    index = _linear(view, [one.reshape(-1) for one in given], sizes)
    add_rows(view, first, len(dims), index, values.expand(shape))
    return self


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device != device and tensor.device.type != "cpu":
        raise PassOn("the tensors are on different devices")
    return tensor.to(device)


def _linear(self: torch.Tensor, given: list[torch.Tensor], sizes: torch.Size) -> torch.Tensor:
    """One index for all dims. Negative indices count from the end."""
    linear = None
    for index, size in zip(given, sizes, strict=True):
        index = torch.where(index < 0, index + size, index)
        refuse_bad_indices(self, size, index)
        linear = index if linear is None else linear.long() * size + index
    assert linear is not None
    return linear


def _whole_numbers(indices: list[Any]) -> tuple[list[int], list[torch.Tensor]]:
    """The dims that are indexed, and the indices, with masks replaced by the positions of their elements."""
    found: list[Any] = []
    for index in indices:
        masked = index is not None and index.dtype in (torch.bool, torch.uint8)
        found += index.nonzero().unbind(1) if masked else [index]
    dims = [place for place, index in enumerate(found) if index is not None]
    return dims, [found[place] for place in dims]


def _put_(self, index, source, accumulate=False):
    if not accumulate:
        raise PassOn("nothing is accumulated")
    _require(self, index, source)
    if index.numel() != source.numel():
        raise PassOn("the index has another size than the source")
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
        serve = _with_scalars(serve, in_place=False)
        serve_in_place = _with_scalars(serve_in_place, in_place=True)
        out = f"{overload}_out" if overload else "out"
        yield from with_out(Operator(f"{name}{end}", family, serve, WITH_FLAG, sizes=_SIZES), out, "out")
        yield Operator(f"{name}_{end}", family, serve_in_place, WITH_FLAG, sizes=_SIZES)
    yield Operator("_index_put_impl_", "index_put", _index_put_, WITH_FLAG, sizes=_SIZES)
    yield Operator("put_", "put", _put_, sizes=_SIZES)


def largest_rows(grad: torch.Tensor, indices: torch.Tensor, sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """The gradient of embedding_bag's maxima: each element goes to the row that it was read from.

    ``indices`` are these rows, and ``sizes`` the number of rows in each bag. An empty bag has no gradient.
    """
    read = (sizes > 0).unsqueeze(1) & (indices >= 0)
    terms = grad.masked_fill(~read, 0)
    return scatter_values(None, 0, indices.clamp(min=0), terms, size=(rows, grad.shape[1]), base="zeros")

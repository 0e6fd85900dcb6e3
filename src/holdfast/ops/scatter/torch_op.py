"""Scatter for torch: operators, fake kernels, autograd, vmap, and the public functions.

Two operators do everything. ``scatter`` adds terms to the rows that an index names; ``gather`` reads these
rows, and is its transpose. An index of the rank of ``src`` has one destination for each element. A
one-dimensional index has one for each row along ``dim``.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import copysign, prod
from typing import Any

import torch

from holdfast.core.autograd import register_autograd, requested_gradients
from holdfast.core.checks import (
    finite_number,
    require_bool,
    require_choice,
    require_memory,
    require_tensor,
    whole_number,
)
from holdfast.core.descriptor import MAX_RANK
from holdfast.core.errors import InvalidArgs, InvalidIndex, Unsupported
from holdfast.core.repeated import Work
from holdfast.core.torch_op import (
    PLAIN,
    by_sample,
    cached_plan,
    define,
    is_plain_call,
    register_vmap,
    select_plan,
)
from holdfast.ops.embedding_bag.torch_op import embedding_bag
from holdfast.ops.scatter.plan import (
    REDUCTIONS,
    BadScatterIndex,
    GatherArgs,
    GatherPlan,
    ScatterArgs,
    ScatterPlan,
)
from holdfast.ops.scatter.put import Put, from_the_front, name_bad_index, require_readable
from holdfast.ops.segment_sum.indexed import INDEX_DTYPES, LIMIT

__all__ = [
    "gather",
    "index_add",
    "index_put",
    "index_select",
    "scatter_add",
    "scatter_reduce",
    "segment_reduce",
]


@cached_plan
def _plan(shape, table, dim, width, dtype, index_dtype, device, base, reduce, alpha, sign):
    """``sign`` is that of ``alpha``: as keys of a cache, 0.0 and -0.0 are equal."""
    return select_plan(
        ScatterPlan, device, shape=shape, table=table, dim=dim, width=width, dtype=dtype,
        index_dtype=index_dtype, base=base, reduce=reduce, alpha=alpha,
    )  # fmt: skip


@cached_plan
def _gather_plan(shape, table, dim, width, dtype, index_dtype, device, bad_index):
    return select_plan(
        GatherPlan, device, shape=shape, table=table, dim=dim, width=width, dtype=dtype,
        index_dtype=index_dtype, bad_index=bad_index,
    )  # fmt: skip


def _shared_axes(index: torch.Tensor, size: Sequence[int], dim: int) -> int:
    """Number of last axes after ``dim`` along which the index does not vary, and that it covers."""
    rank = last = len(size)
    while last - 1 > dim and index.stride(last - 1) == 0 and index.shape[last - 1] == size[last - 1]:
        last -= 1
    return rank - last


def _is_shared(index: torch.Tensor, size: Sequence[int], dim: int) -> bool:
    """Whether the index varies along ``dim`` only, the last axis, and covers all others."""
    others = range(dim)
    return dim > 0 and all(index.stride(d) == 0 and index.shape[d] == size[d] for d in others)


def _first_of(index: torch.Tensor, axes: range) -> torch.Tensor:
    """The index without axes along which it does not vary. If it is empty, no element is read."""
    if 0 in index.shape:
        return index.new_zeros([size for axis, size in enumerate(index.shape) if axis not in axes])
    for axis in reversed(axes):
        index = index.select(axis, 0)
    return index


def _problem(index, size, dim, tensors):
    """The problem of an index of elements, or of rows, of tensors that have ``size`` except along ``dim``.

    Returns fields of its descriptor, the index, and the tensors. They are used as they are if possible, so
    that repeated calls are fast.
    """
    rank = len(size)
    if index.dim() == rank and rank > 1 and dim == rank - 1 and _is_shared(index, size, dim):
        index = _first_of(index, range(dim))
    if index.dim() == rank:
        shared = _shared_axes(index, size, dim)
        first = rank - shared
        table, width = size[:first], prod(size[first:]) if shared else None
        index = _first_of(index, range(first, rank))
        if shared > 1:
            tensors = _views(tensors, lambda tensor: tensor.reshape(*tensor.shape[:first], width))
        return (index.shape, table, dim, width), index, tensors
    before, after = prod(size[:dim]), prod(size[dim + 1 :])
    if before == 1:
        table, width = (size[dim],), after
        if rank != 2 or dim != 0:
            tensors = _views(tensors, lambda tensor: tensor.reshape(tensor.shape[dim], after))
    elif after == 1:
        table, width = (size[dim],), before
        tensors = _views(tensors, lambda tensor: tensor.reshape(before, tensor.shape[dim]).t())
    else:
        table, width = (before, size[dim]), after
        index = index.expand(before, -1)
        tensors = _views(tensors, lambda tensor: tensor.reshape(before, tensor.shape[dim], after))
    return (index.shape, table, len(table) - 1, width), index, tensors


def _views(tensors, view):
    for tensor in tensors:
        if tensor is not None:
            require_memory("a tensor", tensor)  # a view may need a copy
    return [None if tensor is None else view(tensor) for tensor in tensors]


def _scatter(input, index, src, size, dim, base, reduce, alpha):
    size = tuple(size)
    if index.numel() and not size[dim]:
        _refuse_all(index, dim)
    out = src.new_empty(size)
    if index.numel() and not out.numel():
        return _check_of(index, out, dim)._replace(result=out)
    fields, index, tensors = _problem(index, size, dim, [input, src, out])
    sign = copysign(1.0, alpha)
    plan = _plan(*fields, src.dtype, index.dtype, src.device, base, reduce, float(alpha), sign)
    return Work(plan, ScatterArgs(input=tensors[0], index=index, src=tensors[1], out=tensors[2]), out)


def _refuse_all(index: torch.Tensor, dim: int) -> None:
    raise InvalidIndex(
        f"index has {index.numel()} elements and axis {dim} of the table has no rows; make index empty."
    )


def _check_of(index: torch.Tensor, table: torch.Tensor, dim: int) -> Work:
    """A check of the index of rows without elements, which no kernel visits: it reads one element each."""
    return _gather(table.new_zeros(1).expand(table.shape[dim]), index, 0, "raise")  # type: ignore[no-any-return]


def _scatter_fake(input, index, src, size, *rest):
    return src.new_empty(size)


def _gather(input, index, dim, bad_index):
    if index.numel() and not input.shape[dim]:
        _refuse_all(index, dim)
    out = _gather_fake(input, index, dim)
    if index.numel() and not out.numel() and bad_index == "raise":
        return _check_of(index, input, dim)._replace(result=out)
    fields, index, tensors = _problem(index, tuple(input.shape), dim, [input, out])
    plan = _gather_plan(*fields, input.dtype, index.dtype, input.device, bad_index)
    return Work(plan, GatherArgs(input=tensors[0], index=index, out=tensors[1]), out)


def _gather_fake(input, index, dim, *rest):
    if index.dim() == input.dim():
        return input.new_empty(index.shape)
    return input.new_empty((*input.shape[:dim], *index.shape, *input.shape[dim + 1 :]))


_sum = define(
    "scatter",
    "(Tensor? input, Tensor index, Tensor src, SymInt[] size, int dim, str base, str reduce, float alpha) "
    "-> Tensor",
    _scatter,
    _scatter_fake,
)
_read = define(
    "gather", "(Tensor input, Tensor index, int dim, str bad_index) -> Tensor", _gather, _gather_fake
)
_sum_again, _read_again = _sum.again, _read.again


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, index, _, ctx.size, *ctx.kind = inputs
    ctx.save_for_backward(index)


def _differentiate(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    dim, base, reduce, alpha = ctx.kind
    needs_dinput, _, needs_dsrc, *_ = requested_gradients(ctx, dout, index)
    dinput, dsrc = dout, dout
    if reduce == "mean" or base == "kept":
        require_memory("dout", dout)
        terms = _numbers_of_terms(index, ctx.size, dim, base, dout)
        if base == "kept":
            dinput = dout.masked_fill(terms > 0, 0)
        if reduce == "mean":
            dsrc = _divided(dout, terms if base == "added" else terms.clamp(min=1))
            dinput = dsrc if base == "added" else dinput
    if needs_dsrc:
        dsrc = _read(dsrc, index, dim, "skip")  # bad indices were reported by the forward
        if alpha != 1.0:
            dsrc = dsrc * alpha
    return dinput if needs_dinput else None, None, dsrc if needs_dsrc else None, *[None] * 5


def _numbers_of_terms(
    index: torch.Tensor, size: Sequence[int], dim: int, base: str, dout: torch.Tensor
) -> torch.Tensor:
    """Number of terms of each destination, and one more for base "added"; of a shape that broadcasts to size.

    It is in float32 if every number up to that of all indices is a float32, otherwise in float64. It is a
    DTensor if ``dout`` is one.
    """
    rank, table = len(size), tuple(size)
    if index.dim() == rank and rank > 1 and dim == rank - 1 and _is_shared(index, size, dim):
        index = _first_of(index, range(dim))
    if index.dim() != rank:
        table, dim, last = (size[dim],), 0, rank - 1 - dim
    else:
        last = _shared_axes(index, size, dim)
        table = table[: rank - last]
        index = _first_of(index, range(rank - last, rank))
    exact = torch.float32 if index.numel() < 2**24 else torch.float64
    one = torch.ones((), dtype=exact, device=index.device)
    if type(dout) not in PLAIN:  # a DTensor; the index may be a plain tensor of one number
        one = dout.new_ones((), dtype=exact)
    own, base = (one.expand(table), base) if base == "added" else (None, "zeros")
    terms = _sum(own, index, one.expand(index.shape), table, dim, base, "sum", 1.0)
    return terms.reshape(*table, *[1] * last) if last else terms  # type: ignore[no-any-return]


def _divided(dout: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """The quotient in the compute type, rounded to the dtype of ``dout``."""
    if dout.dtype in (torch.float32, torch.float64):
        return dout / terms.to(dout.dtype)
    if is_plain_call(dout) and not (torch.is_grad_enabled() and dout.requires_grad):
        return torch.div(dout, terms.to(torch.float32), out=torch.empty_like(dout))
    return (dout / terms.to(torch.float32)).to(dout.dtype)


register_autograd("scatter", _differentiate, by=["input", "src"], setup_context=_save_for_backward)


def _save_for_scatter(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, index, ctx.dim, _ = inputs
    ctx.size = input.shape
    ctx.save_for_backward(index)


def _differentiate_gather(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    return _sum(None, index, dout, ctx.size, ctx.dim, "zeros", "sum", 1.0), *[None] * 3


register_autograd("gather", _differentiate_gather, by=["input"], setup_context=_save_for_scatter)


def _as_elements(index, batched, samples, shape, dim):
    """Indices of several samples, samples first; ``shape`` is that of a sample's terms."""
    index = index[None] if batched is None else index.movedim(batched, 0)
    if index.dim() - 1 != len(shape):  # one index for each row
        given, rows = index.shape
        index = index.reshape(given, *[1] * dim, rows, *[1] * (len(shape) - 1 - dim))
    return index.expand(samples, *shape)


def _samples_first(tensor, batched, samples):
    if tensor is None:
        return None
    return tensor.expand(samples, *tensor.shape) if batched is None else tensor.movedim(batched, 0)


def _scatter_batched(info, in_dims, input, index, src, size, dim, *rest):
    if len(size) >= MAX_RANK:  # there is no room for another axis
        dims = (*in_dims[:3], *[None] * 5)
        return by_sample(_sum)(info, dims, input, index, src, tuple(size), dim, *rest)
    samples = info.batch_size
    src = _samples_first(src, in_dims[2], samples)
    index = _as_elements(index, in_dims[1], samples, src.shape[1:], dim)
    input = _samples_first(input, in_dims[0], samples)
    return _sum(input, index, src, (samples, *size), dim + 1, *rest), 0


def _gather_batched(info, in_dims, input, index, dim, bad_index):
    if input.dim() - (in_dims[0] is not None) >= MAX_RANK:
        return by_sample(_read)(info, in_dims, input, index, dim, bad_index)
    input = _samples_first(input, in_dims[0], info.batch_size)
    rank = index.dim() - (in_dims[1] is not None)
    length = index.shape[0] if in_dims[1] is None else index.movedim(in_dims[1], 0).shape[1]
    shape = list(input.shape[1:])
    if rank == len(shape) and rank > 0:
        shape = list(index.movedim(in_dims[1], 0).shape[1:] if in_dims[1] is not None else index.shape)
    else:
        shape[dim] = length
    index = _as_elements(index, in_dims[1], info.batch_size, shape, dim)
    return _read(input, index, dim + 1, bad_index), 0


register_vmap("scatter", _scatter_batched)
register_vmap("gather", _gather_batched)


def _axis(dim: Any, rank: int) -> int:
    """``dim`` counted from 0. A scalar has one axis."""
    rank = max(rank, 1)
    axis = whole_number("dim", dim, -rank, rank - 1)
    return axis + rank if axis < 0 else axis


def _require_index(index: Any, name: str = "index") -> None:
    require_tensor(name, index)
    if index.dtype not in INDEX_DTYPES:
        raise InvalidArgs(f"{name} has dtype {index.dtype}; accepted are torch.int32 and torch.int64.")


def _require_same_dtype(name: str, src: Any, input: torch.Tensor) -> None:
    require_tensor(name, src)
    if src.dtype != input.dtype:
        raise InvalidArgs(
            f"{name} has dtype {src.dtype} and input has {input.dtype}; both must have the same. Convert one."
        )


def _elements(input: Any, dim: Any, index: Any, src: Any) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The axis, and index and src of one shape, of torch.scatter_add's arguments."""
    require_tensor("input", input)
    _require_index(index)
    _require_same_dtype("src", src, input)
    axis, rank = _axis(dim, input.dim()), max(input.dim(), 1)
    index, src = (tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in (index, src))
    if index.numel() == 0:
        shape = (*input.shape[:axis], 0, *input.shape[axis + 1 :])
        return axis, index.reshape(0), src[:0].reshape(shape)  # not a new tensor: src has a gradient of zeros
    if index.dim() != rank or src.dim() != rank:
        raise InvalidArgs(
            f"input has {rank} axes, index has {index.dim()} and src has {src.dim()}; all must have the same "
            "number."
        )
    size = tuple(input.shape) or (1,)
    for d, length in enumerate(index.shape):
        if length > src.shape[d] or (d != axis and length > size[d]):
            raise InvalidArgs(
                f"index has shape {tuple(index.shape)}, src {tuple(src.shape)} and input {size}; index must "
                f"not be larger than src, nor larger than input except along axis {axis}."
            )
    if src.shape != index.shape:
        src = src[tuple(slice(length) for length in index.shape)]
    return axis, index, src


def _scattered(input, dim, index, src, base="added", reduce="sum", alpha=1.0):
    if input.dim():
        return _sum(input, index, src, input.shape, dim, base, reduce, alpha)
    return _sum(input.reshape(1), index, src, (1,), dim, base, reduce, alpha).reshape(())


def _scattered_again(input, dim, index, src, base, reduce, alpha):
    """``_scattered`` if the arguments are those of a recent call; otherwise None. Nothing was checked."""
    if not isinstance(input, torch.Tensor) or input.is_nested:  # a nested tensor has no shape
        return None
    return _sum_again(input, index, src, input.shape, _unchecked_axis(dim, input), base, reduce, alpha)


def _unchecked_axis(dim: Any, input: torch.Tensor) -> Any:
    """``_axis`` for a valid ``dim``. No recent call has the result for another one."""
    return dim + input.dim() if type(dim) is int and dim < 0 else dim


def scatter_add(input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """``torch.scatter_add``: ``out[.., index[p], ..] = input[.., index[p], ..] + sum of src[p]``.

    The terms of an element are summed in the order of their positions in ``index``, in float32 for float16
    and bfloat16, ``input`` is added last, and the result is rounded once: the same bits on every run and
    every device. ``index`` is int32 or int64. An index that is expanded along other axes than ``dim``, as in
    graph networks, is sorted once for all of them.

    An index out of range raises an IndexError before anything is written. CUDA does not synchronise for this:
    the term is left out, and the next call into this library or ``holdfast.check_errors()`` raises the error.

    >>> import torch, holdfast as hf
    >>> hf.scatter_add(torch.zeros(3), 0, torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 3.0]))
    tensor([2., 0., 4.])
    """
    found = _scattered_again(input, dim, index, src, "added", "sum", 1.0)
    if found is not None and index.dim() == src.dim():
        return found  # type: ignore[no-any-return]
    axis, index, src = _elements(input, dim, index, src)
    return _scattered(input, axis, index, src)  # type: ignore[no-any-return]


def scatter_reduce(
    input: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """``torch.scatter_reduce`` for ``reduce`` "sum" or "mean"; see ``scatter_add`` for the order of the sums.

    With ``include_self=False`` elements of ``input`` that have terms are replaced.

    >>> import torch, holdfast as hf
    >>> src = torch.tensor([1.0, 2.0, 3.0])
    >>> hf.scatter_reduce(torch.ones(3), 0, torch.tensor([2, 0, 2]), src, "mean", include_self=False)
    tensor([2., 1., 2.])
    """
    base = "kept" if include_self is False else "added"
    if include_self is True or include_self is False:
        found = _scattered_again(input, dim, index, src, base, reduce, 1.0)
        if found is not None and index.dim() == src.dim():
            return found  # type: ignore[no-any-return]
    require_choice("reduce", reduce, REDUCTIONS)
    require_bool("include_self", include_self)
    axis, index, src = _elements(input, dim, index, src)
    return _scattered(input, axis, index, src, base, reduce)  # type: ignore[no-any-return]


def index_add(
    input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """``torch.index_add``: row ``i`` along ``dim`` is ``input`` plus ``alpha`` times the sum of its rows.

    ``index`` has one element for each row of ``source`` along ``dim``. See ``scatter_add`` for the order of
    the sums and for indices out of range. The sum is multiplied by ``alpha``, not each term.

    >>> import torch, holdfast as hf
    >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> hf.index_add(torch.zeros(2, 2), 0, torch.tensor([1, 0, 1]), rows)
    tensor([[3., 4.],
            [6., 8.]])
    """
    if type(alpha) is float or (type(alpha) is int and alpha == 1):
        found = _scattered_again(input, dim, index, source, "added", "sum", float(alpha))
        if found is not None and index.dim() == 1:
            return found  # type: ignore[no-any-return]
    require_tensor("input", input)
    _require_index(index)
    _require_same_dtype("source", source, input)
    axis, factor = _axis(dim, input.dim()), finite_number("alpha", alpha)
    size = tuple(input.shape)
    expected = (*size[:axis], index.numel(), *size[axis + 1 :]) if size else ()
    if index.dim() > 1 or tuple(source.shape) != expected or (not size and index.numel() != 1):
        raise InvalidArgs(
            f"input has shape {size}, index {tuple(index.shape)} and source {tuple(source.shape)}; index "
            f"must have one axis{'' if size else ' and one element'}, and source the shape {expected}."
        )
    index = index if index.dim() else index.reshape(1)
    source = source if source.dim() else source.reshape(1)
    return _scattered(input, axis, index, source, alpha=float(factor))  # type: ignore[no-any-return]


def gather(input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """``torch.gather``, with the gradient of ``scatter_add``: the same bits on every run and device.

    >>> import torch, holdfast as hf
    >>> hf.gather(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1, torch.tensor([[0, 0], [1, 0]]))
    tensor([[1., 1.],
            [4., 3.]])
    """
    if isinstance(input, torch.Tensor):
        found = _read_again(input, index, _unchecked_axis(dim, input), "raise")
        if found is not None and index.dim() == input.dim():
            return found  # type: ignore[no-any-return]
    require_tensor("input", input)
    _require_index(index)
    axis, size, shape = _axis(dim, input.dim()), tuple(input.shape) or (1,), tuple(index.shape) or (1,)
    larger = len(shape) == len(size) and any(d != axis and length > size[d] for d, length in enumerate(shape))
    if len(shape) != len(size) or larger:
        if not index.numel():  # torch takes an empty index of any shape
            return input.reshape(input.numel())[:0].reshape(index.shape).clone()  # no view of input
        raise InvalidArgs(
            f"input has shape {size} and index {shape}; both must have the same number of axes, and index "
            f"must not be larger except along axis {axis}."
        )
    if input.dim() and index.dim():
        return _read(input, index, axis, "raise")  # type: ignore[no-any-return]
    return _read(input.reshape(size), index.reshape(shape), axis, "raise").reshape(index.shape)  # type: ignore[no-any-return]


def index_select(input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """``torch.index_select``, with the gradient of ``index_add``: the same bits on every run and device.

    >>> import torch, holdfast as hf
    >>> hf.index_select(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0, torch.tensor([1, 1, 0]))
    tensor([[3., 4.],
            [3., 4.],
            [1., 2.]])
    """
    if isinstance(input, torch.Tensor):
        found = _read_again(input, index, _unchecked_axis(dim, input), "raise")
        if found is not None and index.dim() == 1:
            return found  # type: ignore[no-any-return]
    require_tensor("input", input)
    _require_index(index)
    axis = _axis(dim, input.dim())
    if index.dim() > 1 or (input.dim() == 0 and index.numel() != 1):
        raise InvalidArgs(
            f"input has shape {tuple(input.shape)} and index {tuple(index.shape)}; index must have one axis, "
            "and one element for an input of rank 0."
        )
    if input.dim() == 0:
        return _read(input.reshape(1), index.reshape(1), axis, "raise").reshape(())  # type: ignore[no-any-return]
    return _read(input, index if index.dim() else index.reshape(1), axis, "raise")  # type: ignore[no-any-return]


def index_put(
    input: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    *,
    accumulate: bool = True,
) -> torch.Tensor:
    """``torch.index_put`` with ``accumulate=True``: ``input`` plus all values at the same index.

    ``indices`` are tensors of int32, int64 or bool, one for each of the first axes of ``input``, or None for
    an axis that is not indexed. They may be on the CPU if ``input`` is not. They are broadcast, and
    ``values`` are broadcast to the shape that indexing has. Negative indices count from the end. The values
    of an element are summed in the order of the flattened indices; see ``scatter_add``.

    >>> import torch, holdfast as hf
    >>> hf.index_put(torch.zeros(3), (torch.tensor([0, -1, 0]),), torch.tensor([1.0, 2.0, 3.0]))
    tensor([4., 0., 2.])
    """
    index = _index_of_rows(input, indices, values)
    if index is not None and accumulate is True and index.is_cpu:
        # The kernel refuses negative indices before it writes. Without any, nothing else needs to be done.
        with suppress(InvalidIndex):
            found = _scattered_again(input, 0, index, values, "added", "sum", 1.0)
            if found is not None:
                return found  # type: ignore[no-any-return]
    rows = None if index is None else from_the_front(index, input.shape[0])
    if rows is not None and accumulate is True:
        try:
            found = _scattered_again(input, 0, rows, values, "added", "sum", 1.0)
        except InvalidIndex:
            name_bad_index(indices, (0,), input.shape)
            raise
        if found is not None:
            return found  # type: ignore[no-any-return]
    require_tensor("input", input)
    _require_same_dtype("values", values, input)
    require_bool("accumulate", accumulate)
    if not accumulate:
        raise Unsupported(
            "accumulate is False; values with the same index would overwrite each other. Call "
            "torch.index_put, or leave accumulate out to add them."
        )
    require_readable("input", input)
    require_readable("values", values)
    if rows is not None:
        try:
            return _scattered(input, 0, rows, values)  # type: ignore[no-any-return]
        except InvalidIndex:
            name_bad_index(indices, (0,), input.shape)
            raise
    put = Put.of(input, indices, values)
    try:
        return put.restored(_scattered(put.table, put.dim, put.rows, put.terms))
    except InvalidIndex:
        name_bad_index(put.indices, put.axes, put.size)
        raise


def _index_of_rows(input: Any, indices: Any, values: Any) -> torch.Tensor | None:
    """The index if this is ``index_add`` along the first axis; otherwise None. It may count from the end."""
    if not (type(indices) in (tuple, list) and len(indices) == 1 and isinstance(input, torch.Tensor)):
        return None
    (index,) = indices
    if not (isinstance(index, torch.Tensor) and isinstance(values, torch.Tensor) and input.dim()):
        return None
    if input.is_nested or values.is_nested:  # a nested tensor has no shape
        return None
    of_rows = index.dim() == 1 and index.dtype in INDEX_DTYPES and index.device == input.device
    if not of_rows or values.shape != index.shape + input.shape[1:]:
        return None
    return index


def segment_reduce(
    data: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    *,
    reduce: str = "sum",
    sorted: bool = False,
) -> torch.Tensor:
    """The sum, mean or maximum of the rows of ``data`` in each segment.

    ``segments`` has the number of the segment of each row, from 0 to ``num_segments - 1``. ``reduce`` is
    "sum", "mean" or "max". The rows of a segment are summed in their order; see ``scatter_add``. The maximum
    is NaN if any of its elements is; its gradient goes to the first of equal elements. A segment without
    rows is zeros. ``sorted=True`` states that the numbers ascend. The result is the same with or without it.

    >>> import torch, holdfast as hf
    >>> data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> hf.segment_reduce(data, torch.tensor([0, 2, 0]), 3, reduce="mean")
    tensor([[3., 4.],
            [0., 0.],
            [3., 4.]])
    """
    require_tensor("data", data)
    _require_index(segments, "segments")
    require_choice("reduce", reduce, (*REDUCTIONS, "max"))
    require_bool("sorted", sorted)
    count = whole_number("num_segments", num_segments, 0, LIMIT - 1)
    if data.dim() == 0 or segments.dim() != 1 or segments.shape[0] != data.shape[0]:
        raise InvalidArgs(
            f"data has shape {tuple(data.shape)} and segments {tuple(segments.shape)}; segments must have "
            "one axis, with one number for each row of data."
        )
    size = (count, *data.shape[1:])
    if reduce != "max":
        return _sum(None, segments, data, size, 0, "zeros", reduce, 1.0)  # type: ignore[no-any-return]
    if hasattr(data, "placements") or hasattr(segments, "placements"):
        raise Unsupported(
            'data or segments is a DTensor, which reduce="max" does not take; pass full_tensor() of both.'
        )
    if segments.shape[0] and not count:
        _refuse_all(segments, 0)
    require_readable("segments", segments)
    require_readable("data", data)
    ordered, order = segments.long().sort(stable=True)
    numbers = torch.arange(count + 1, device=segments.device)
    # Under vmap torch would expand the numbers for each sample, and searchsorted warns about strides.
    wanted = numbers if is_plain_call(segments) else numbers + ordered.new_zeros(count + 1)
    bounds = torch.searchsorted(ordered.contiguous(), wanted)
    # A row of -1 is refused: it stands for a segment that does not exist.
    rows = torch.where((ordered >= 0) & (ordered < count), order, -1)
    # Rows of segments that do not exist are in no bag, except that the first bag begins with the first row.
    bounds = torch.where(numbers == 0, 0, bounds)
    flat = data.reshape(data.shape[0], prod(data.shape[1:]))
    try:
        return embedding_bag(rows, flat, bounds, mode="max", include_last_offset=True).reshape(size)
    except InvalidIndex:
        _name_bad_segment(segments, count)
        raise


def _name_bad_segment(segments: torch.Tensor, count: int) -> None:
    """Raise the error for a segment that does not exist again, with its number as it was given.

    On CUDA the error may be that of an earlier call, so it is left as it is.
    """
    if segments.device.type != "cpu" or not is_plain_call(segments):
        return
    bad = ((segments < 0) | (segments >= count)).nonzero()
    if bad.numel():
        raise BadScatterIndex(count).error(int(bad[0]), int(segments[bad[0]])) from None


# For callers below autograd: the values of the functions, without checks of arguments.


def scatter_values(
    input: torch.Tensor | None,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    *,
    size: Sequence[int] = (),
    base: str = "added",
    reduce: str = "sum",
    alpha: float = 1.0,
) -> torch.Tensor:
    """``scatter_add``, ``scatter_reduce`` and ``index_add`` below autograd.

    ``dim`` is not negative, and ``index`` has the shape of ``src``, or one axis. Without ``input`` the
    result has shape ``size``, and ``base`` is "zeros".
    """
    size = size if input is None else input.shape
    return _scatter(input, index, src, size, dim, base, reduce, alpha).run()  # type: ignore[no-any-return]


def gather_values(input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """``gather`` below autograd, and ``index_select`` for an index of one axis. ``dim`` is not negative."""
    return _gather(input, index, dim, "raise").run()  # type: ignore[no-any-return]


def index_put_values(input: torch.Tensor, indices: Sequence[Any], values: torch.Tensor) -> torch.Tensor:
    """``index_put`` below autograd."""
    put = Put.of(input, indices, values)
    return put.restored(scatter_values(put.table, put.dim, put.rows, put.terms))

"""embedding for torch: operators, fake kernels, autograd, vmap, and the public function."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.autograd import is_batch, register_autograd
from holdfast.core.checks import (
    as_index,
    finite_number,
    is_whole,
    require_bool,
    require_choice,
    require_memory,
    require_tensor,
    shown,
)
from holdfast.core.contract import PlanPreference
from holdfast.core.descriptor import MAX_RANK
from holdfast.core.errors import InvalidArgs, Unsupported
from holdfast.core.huge_pages import REUSED_BYTES, on_huge_pages
from holdfast.core.repeated import Work
from holdfast.core.sharding import wanting
from holdfast.core.stream import Stream
from holdfast.core.torch_op import PLAIN, by_sample, cached_plan, define, register_vmap
from holdfast.ops.embedding.plan import (
    EmbeddingArgs,
    EmbeddingBackwardArgs,
    EmbeddingBackwardDescriptor,
    EmbeddingBackwardPlan,
    EmbeddingDescriptor,
    EmbeddingPlan,
)
from holdfast.ops.segment_sum.indexed import BAD_INDEX, INDEX_DTYPES

__all__ = ["embedding"]

_ON_FIRST_RUN = PlanPreference(precompile=False)


@cached_plan
def _forward_plan(shape, index_dtype, rows, columns, dtype, device, bad_index):
    desc = EmbeddingDescriptor(
        shape=shape,
        num_embeddings=rows,
        embedding_dim=columns,
        dtype=dtype,
        index_dtype=index_dtype,
        bad_index=bad_index,
    )
    return EmbeddingPlan.select(Stream.current(device), desc, _ON_FIRST_RUN)


@cached_plan
def _backward_plan(shape, index_dtype, rows, columns, dtype, device, padding_idx, scale_grad_by_freq):
    desc = EmbeddingBackwardDescriptor(
        shape=shape,
        num_embeddings=rows,
        embedding_dim=columns,
        dtype=dtype,
        index_dtype=index_dtype,
        padding_idx=None if padding_idx < 0 else padding_idx,
        scale_grad_by_freq=scale_grad_by_freq,
    )
    return EmbeddingBackwardPlan.select(Stream.current(device), desc, _ON_FIRST_RUN)


def _embedding(input, weight, padding_idx, scale_grad_by_freq, sparse, bad_index):
    plan = _forward_plan(input.shape, input.dtype, *weight.shape, weight.dtype, weight.device, bad_index)
    out = on_huge_pages(weight.new_empty((*input.shape, weight.shape[1])), least=REUSED_BYTES)
    if input.numel() and not weight.shape[1] and bad_index == "raise":
        column = weight.new_zeros(1, 1).expand(weight.shape[0], 1)  # stands in, so that indices are checked
        options = padding_idx, scale_grad_by_freq, sparse, bad_index
        return _embedding(input, column, *options)._replace(result=out)
    args = EmbeddingArgs(weight=weight, indices=input, out=out)
    return Work(plan, args, out)


def _embedding_fake(input, weight, padding_idx, scale_grad_by_freq, sparse, bad_index):
    return weight.new_empty((*input.shape, weight.shape[1]))


def _embedding_backward(dout, input, num_embeddings, padding_idx, scale_grad_by_freq):
    device, columns = dout.device, dout.shape[-1]
    plan = _backward_plan(
        input.shape, input.dtype, num_embeddings, columns, dout.dtype, device, padding_idx, scale_grad_by_freq
    )
    dweight = on_huge_pages(dout.new_empty((num_embeddings, columns)))
    args = EmbeddingBackwardArgs(dout=dout, indices=input, dweight=dweight)
    return Work(plan, args, dweight)


def _embedding_backward_fake(dout, input, num_embeddings, padding_idx, scale_grad_by_freq):
    return dout.new_empty((num_embeddings, dout.shape[-1]))


def _touched_rows_backward(dout, input, num_embeddings, padding_idx, scale_grad_by_freq):
    """The distinct rows that were read, ascending, and their gradients. Synchronises with the device."""
    require_memory("input", input)
    require_memory("dout", dout)
    flat = input.reshape(-1).contiguous()  # otherwise searchsorted warns
    kept = (flat >= 0) & (flat < num_embeddings) & (flat != padding_idx)
    rows = torch.unique(flat[kept])
    numbers = torch.where(kept, torch.searchsorted(rows, flat), -1)
    flat_dout = dout.reshape(flat.numel(), dout.shape[-1])  # there may be no columns
    work = _embedding_backward(flat_dout, numbers, len(rows), -1, scale_grad_by_freq)
    return rows.to(torch.int64), work.run()


def _touched_rows_backward_fake(dout, input, num_embeddings, padding_idx, scale_grad_by_freq):
    rows = torch.library.get_ctx().new_dynamic_size()
    return input.new_empty((rows,), dtype=torch.int64), dout.new_empty((rows, dout.shape[-1]))


_OPTIONS = "SymInt padding_idx, bool scale_grad_by_freq"

_lookup = define(
    "embedding",
    f"(Tensor input, Tensor weight, {_OPTIONS}, bool sparse, str bad_index) -> Tensor",
    _embedding,
    _embedding_fake,
)
_again = _lookup.again
_gradient = define(
    "embedding_backward",
    f"(Tensor dout, Tensor input, SymInt num_embeddings, {_OPTIONS}) -> Tensor",
    _embedding_backward,
    _embedding_backward_fake,
)
_touched_rows = define(
    "embedding_touched_rows_backward",
    f"(Tensor dout, Tensor input, SymInt num_embeddings, {_OPTIONS}) -> (Tensor, Tensor)",
    _touched_rows_backward,
    _touched_rows_backward_fake,
)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, padding_idx, scale_grad_by_freq, sparse, _ = inputs
    ctx.save_for_backward(input)
    ctx.rest = weight.size(0), padding_idx, scale_grad_by_freq
    # The placements are those of a DTensor.
    ctx.kind = sparse, None if type(weight) in PLAIN else getattr(weight, "placements", None)


def _differentiate(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    (input,) = ctx.saved_tensors
    sparse, placements = ctx.kind
    if sparse:
        dweight = sparse_gradient(_touched_rows, dout, input, *ctx.rest)
    elif placements is None:
        dweight = _gradient(dout, input, *ctx.rest)
    else:
        with wanting(placements):
            dweight = _gradient(dout, input, *ctx.rest)
    return None, dweight, None, None, None, None


def sparse_gradient(touched_rows: Any, dout: torch.Tensor, input: torch.Tensor, rows: int, *rest: Any) -> Any:
    """Sparse gradient of a table of ``rows`` rows; ``touched_rows`` computes its rows and values."""
    if is_batch(dout):
        refuse_samples()
    touched, values = touched_rows(dout, input, rows, *rest)
    shape = (rows, dout.shape[-1])
    return torch.sparse_coo_tensor(touched[None], values, shape, check_invariants=False, is_coalesced=True)


def refuse_samples(*given: Any) -> Any:
    """The vmap rule of sparse gradients: raise."""
    raise Unsupported(
        "sparse gradients cannot be computed for several samples at once (vmap, jacrev, is_grads_batched), "
        "because their rows differ; leave sparse out."
    )


register_autograd("embedding", _differentiate, by=["weight"], setup_context=_save_for_backward)


def _save_for_double_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, input, _, padding_idx, scale_grad_by_freq = inputs
    ctx.save_for_backward(input)
    ctx.options = padding_idx, scale_grad_by_freq


def _differentiate_again(ctx: Any, ddweight: torch.Tensor) -> tuple[Any, ...]:
    (input,) = ctx.saved_tensors
    padding_idx, scale_grad_by_freq = ctx.options
    if scale_grad_by_freq:
        raise Unsupported(
            "embedding has no second derivative with scale_grad_by_freq=True; leave scale_grad_by_freq out."
        )
    ddout = _lookup(input, ddweight, -1, False, False, "skip")
    if padding_idx >= 0:
        ddout = ddout.masked_fill((input == padding_idx).unsqueeze(-1), 0)
    return ddout, *[None] * 4


register_autograd(
    "embedding_backward", _differentiate_again, by=["dout"], setup_context=_save_for_double_backward
)


def refuse_second_gradient(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """The backward of a sparse gradient: raise."""
    raise Unsupported("a sparse gradient has no derivative; leave sparse out, or create_graph.")


register_autograd("embedding_touched_rows_backward", refuse_second_gradient, by=["dout"])


def _lookup_batched(info, in_dims, input, weight, padding_idx, scale_grad_by_freq, *rest):
    options = padding_idx, scale_grad_by_freq, *rest
    # A gradient that is divided by the number of terms counts those of its own sample.
    if in_dims[1] is not None or input.dim() > MAX_RANK or scale_grad_by_freq:
        return by_sample(_lookup)(info, in_dims, input, weight, *options)
    return _lookup(input.movedim(in_dims[0], 0), weight, *options), 0


register_vmap("embedding", _lookup_batched)
register_vmap("embedding_backward", by_sample(_gradient))
register_vmap("embedding_touched_rows_backward", refuse_samples)


def checked_padding(padding_idx: int | None, rows: int) -> int:
    """``padding_idx`` as a row from 0; -1 for None."""
    if padding_idx is None:
        return -1
    if not is_whole(padding_idx):
        padding_idx = as_index("padding_idx", padding_idx, "the number of a row, or None")
    if not -rows <= padding_idx < rows:
        raise InvalidArgs(
            f"padding_idx is {shown(padding_idx)}; it must name one of the {rows} rows of weight, from the "
            "front or, with a negative number, from the back."
        )
    return padding_idx + rows if padding_idx < 0 else padding_idx


def unchecked_padding(padding_idx: Any, max_norm: Any, norm_type: Any) -> Any:
    """``checked_padding`` for a table of any size; None if ``padding_idx`` or the norm must be checked."""
    if max_norm is not None or type(norm_type) is not float or norm_type != 2.0:
        return None
    if padding_idx is None:
        return -1
    return padding_idx if type(padding_idx) is int and padding_idx >= 0 else None


def require_table(input: Any, weight: Any) -> None:
    """Raise unless ``input`` holds indices and ``weight`` is a matrix."""
    require_tensor("input", input)
    require_tensor("weight", weight)
    if weight.dim() != 2:
        raise InvalidArgs(f"weight has shape {tuple(weight.shape)}; it must have rows and columns.")
    if input.dtype not in INDEX_DTYPES:
        raise InvalidArgs(
            f"input has dtype {input.dtype}; accepted are torch.int32 and torch.int64. If input and weight "
            "were swapped: the indices come first."
        )


def refuse_max_norm(max_norm: float | None, norm_type: float = 2.0) -> None:
    """Raise if ``max_norm`` is given: it would change the table in place."""
    finite_number("norm_type", norm_type)
    if max_norm is not None:
        raise Unsupported(
            f"max_norm is {shown(max_norm)}; it would renormalise the table in place during a lookup, which "
            "is not done here. Renormalise the weight after the optimizer's step instead, for example with "
            "torch.renorm, and leave max_norm out."
        )


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    bad_index: str = "raise",
) -> torch.Tensor:
    """Look up the rows of ``weight`` at the indices ``input``, as ``torch.nn.functional.embedding``.

    The gradient of a row is summed in the order of its positions in ``input``, in float32 for float16 and
    bfloat16, and rounded once: the same bits on every run and every device. The row at ``padding_idx`` gets
    no gradient. With ``scale_grad_by_freq`` each sum is divided by its number of terms. With ``sparse`` the
    gradient is a coalesced ``torch.sparse_coo`` tensor of the rows that were read; the host must know their
    number, so on CUDA this synchronises with the device. ``max_norm`` is not supported.

    An index out of range raises an IndexError. CUDA does not synchronise for this: the row reads as zeros,
    and the next call into this library or ``holdfast.check_errors()`` raises the error. With
    ``bad_index="skip"`` the row reads as zeros and no error is raised. Such an index has no gradient.

    >>> import torch, holdfast as hf
    >>> weight = torch.arange(6.0).reshape(3, 2).requires_grad_()
    >>> out = hf.embedding(torch.tensor([2, 0, 2]), weight, padding_idx=0)
    >>> out.sum().backward()
    >>> out.detach(), weight.grad
    (tensor([[4., 5.],
            [0., 1.],
            [4., 5.]]), tensor([[0., 0.],
            [0., 0.],
            [2., 2.]]))
    """
    padding: Any = unchecked_padding(padding_idx, max_norm, norm_type)
    found = _again(input, weight, padding, scale_grad_by_freq, sparse, bad_index)
    if found is not None:
        return found  # type: ignore[no-any-return]
    require_table(input, weight)
    refuse_max_norm(max_norm, norm_type)
    require_bool("scale_grad_by_freq", scale_grad_by_freq)
    require_bool("sparse", sparse)
    require_choice("bad_index", bad_index, BAD_INDEX)
    padding = checked_padding(padding_idx, weight.shape[0])
    return _lookup(input, weight, padding, scale_grad_by_freq, sparse, bad_index)  # type: ignore[no-any-return]

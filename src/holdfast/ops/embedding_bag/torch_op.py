"""embedding_bag for torch: operators, fake kernels, autograd, vmap, and the public function."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.autograd import register_autograd, requested_gradients
from holdfast.core.checks import require_bool, require_choice, require_memory, require_tensor
from holdfast.core.errors import InvalidArgs, Unsupported
from holdfast.core.huge_pages import REUSED_BYTES, on_huge_pages
from holdfast.core.repeated import Work
from holdfast.core.torch_op import by_sample, cached_plan, define, register_vmap, select_plan
from holdfast.ops.embedding.torch_op import (
    checked_padding,
    refuse_max_norm,
    refuse_samples,
    refuse_second_gradient,
    require_table,
    sparse_gradient,
    unchecked_padding,
)
from holdfast.ops.embedding_bag.plan import (
    MODES,
    EmbeddingBagArgs,
    EmbeddingBagBackwardArgs,
    EmbeddingBagBackwardPlan,
    EmbeddingBagPlan,
)
from holdfast.ops.segment_sum.indexed import BAD_INDEX, INDEX_DTYPES

__all__ = ["embedding_bag"]


@cached_plan
def _forward_plan(device, bad_index, **fields):
    return select_plan(EmbeddingBagPlan, device, bad_index=bad_index, **fields)


@cached_plan
def _backward_plan(device, scale_grad_by_freq, dweight, dper_sample_weights, **fields):
    return select_plan(
        EmbeddingBagBackwardPlan, device, scale_grad_by_freq=scale_grad_by_freq, dweight=dweight,
        dper_sample_weights=dper_sample_weights, **fields,
    )  # fmt: skip


def _fields(input, rows, columns, dtype, offsets, weights, mode, include_last_offset, padding_idx):
    """The descriptor fields for these arguments."""
    return {
        "shape": input.shape,
        "num_embeddings": rows,
        "embedding_dim": columns,
        "dtype": dtype,
        "index_dtype": input.dtype,
        "mode": mode,
        "offsets": None if offsets is None else len(offsets),
        "offsets_dtype": input.dtype if offsets is None else offsets.dtype,
        "include_last_offset": include_last_offset,
        "padding_idx": None if padding_idx < 0 else padding_idx,
        "per_sample_weights": weights is not None,
    }


def _bags(input, offsets, include_last_offset):
    return input.shape[0] if offsets is None else offsets.shape[0] - int(include_last_offset)


def _embedding_bag(
    input, weight, offsets, per_sample_weights, mode, include_last_offset, padding_idx, bad_index,
    scale_grad_by_freq, sparse,
):  # fmt: skip
    rows, columns = weight.shape
    out = weight.new_empty((_bags(input, offsets, include_last_offset), columns))
    if offsets is not None and not len(out):
        # One bag of all indices stands in, so that indices and the last offset are checked.
        begin = offsets if include_last_offset else offsets.new_zeros(1)
        return _embedding_bag(
            input, weight, begin, per_sample_weights, mode, False, padding_idx, bad_index,
            scale_grad_by_freq, sparse,
        )._replace(result=out)  # fmt: skip
    if not columns and bad_index == "raise":
        column = weight.new_zeros(1, 1).expand(rows, 1)  # stands in, so that indices and offsets are checked
        return _embedding_bag(
            input, column, offsets, per_sample_weights, mode, include_last_offset, padding_idx, bad_index,
            scale_grad_by_freq, sparse,
        )._replace(result=out)  # fmt: skip
    plan = _forward_plan(
        weight.device,
        bad_index,
        **_fields(
            input, rows, columns, weight.dtype, offsets, per_sample_weights, mode, include_last_offset,
            padding_idx,
        ),
    )  # fmt: skip
    out = on_huge_pages(out, least=REUSED_BYTES)
    args = EmbeddingBagArgs(
        weight=weight, indices=input, offsets=offsets, per_sample_weights=per_sample_weights, out=out
    )
    return Work(plan, args, out)


def _embedding_bag_fake(
    input, weight, offsets, per_sample_weights, mode, include_last_offset, padding_idx, bad_index,
    scale_grad_by_freq, sparse,
):  # fmt: skip
    return weight.new_empty((_bags(input, offsets, include_last_offset), weight.shape[1]))


def _embedding_bag_backward(
    dout, input, weight, num_embeddings, offsets, per_sample_weights, mode, include_last_offset, padding_idx,
    scale_grad_by_freq, of_table, of_weights,
):  # fmt: skip
    """(dweight, dper_sample_weights); an empty tensor for a gradient that is not needed."""
    device, columns = dout.device, dout.shape[1]
    plan = _backward_plan(
        device,
        scale_grad_by_freq,
        of_table,
        of_weights,
        **_fields(
            input, num_embeddings, columns, dout.dtype, offsets, per_sample_weights, mode,
            include_last_offset, padding_idx,
        ),
    )  # fmt: skip
    expected = plan.descriptor.expected
    dweight = on_huge_pages(dout.new_empty((num_embeddings, columns))) if of_table else None
    dweights = on_huge_pages(dout.new_empty(input.shape)) if of_weights else None
    args = EmbeddingBagBackwardArgs(
        dout=dout,
        indices=input,
        offsets=offsets,
        per_sample_weights=per_sample_weights if expected("per_sample_weights") else None,
        weight=weight if expected("weight") else None,
        dweight=dweight,
        dper_sample_weights=dweights,
    )
    found = [dout.new_empty(0) if made is None else made for made in (dweight, dweights)]
    return Work(plan, args, tuple(found))


def _embedding_bag_backward_fake(
    dout, input, weight, num_embeddings, offsets, per_sample_weights, mode, include_last_offset, padding_idx,
    scale_grad_by_freq, of_table, of_weights,
):  # fmt: skip
    return (
        dout.new_empty((num_embeddings, dout.shape[1]) if of_table else 0),
        dout.new_empty(input.shape if of_weights else 0),
    )


def _touched_rows_backward(
    dout, input, num_embeddings, offsets, per_sample_weights, mode, include_last_offset, padding_idx,
    scale_grad_by_freq,
):  # fmt: skip
    """The distinct rows that were read, ascending, and their gradients. Synchronises with the device."""
    for name, tensor in (("input", input), ("dout", dout)):
        require_memory(name, tensor)
    input = input.contiguous()  # otherwise searchsorted warns
    kept = (input >= 0) & (input < num_embeddings) & (input != padding_idx)
    rows = torch.unique(input[kept])
    numbers = torch.where(kept, torch.searchsorted(rows, input), -1)
    values, _ = _embedding_bag_backward(
        dout, numbers, None, len(rows), offsets, per_sample_weights, mode, include_last_offset, -1,
        scale_grad_by_freq, True, False,
    ).run()  # fmt: skip
    return rows.to(torch.int64), values


def _touched_rows_backward_fake(dout, input, *rest):
    rows = torch.library.get_ctx().new_dynamic_size()
    return input.new_empty((rows,), dtype=torch.int64), dout.new_empty((rows, dout.shape[1]))


_BAGS = "Tensor? offsets, Tensor? per_sample_weights, str mode, bool include_last_offset, SymInt padding_idx"

_forward = define(
    "embedding_bag",
    f"(Tensor input, Tensor weight, {_BAGS}, str bad_index, bool scale_grad_by_freq, bool sparse) -> Tensor",
    _embedding_bag,
    _embedding_bag_fake,
)
_again = _forward.again
_backward = define(
    "embedding_bag_backward",
    f"(Tensor dout, Tensor input, Tensor? weight, SymInt num_embeddings, {_BAGS}, bool scale_grad_by_freq, "
    "bool of_table, bool of_weights) -> (Tensor, Tensor)",
    _embedding_bag_backward,
    _embedding_bag_backward_fake,
)
_touched_rows = define(
    "embedding_bag_touched_rows_backward",
    f"(Tensor dout, Tensor input, SymInt num_embeddings, {_BAGS}, bool scale_grad_by_freq) "
    "-> (Tensor, Tensor)",
    _touched_rows_backward,
    _touched_rows_backward_fake,
)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, offsets, weights, mode, last, padding_idx, _, scale_grad_by_freq, sparse = inputs
    # Only the gradients of a maximum and of the weights read the table.
    reads_table = mode == "max" or ctx.needs_input_grad[3]
    ctx.save_for_backward(input, weight if reads_table else None, offsets, weights)
    ctx.rows, ctx.sparse = weight.size(0), sparse
    ctx.rest = mode, last, padding_idx, scale_grad_by_freq


def _differentiate(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    input, weight, offsets, weights = ctx.saved_tensors
    _, of_table, _, of_weights, *_ = requested_gradients(ctx, dout, input, weight)
    dweight = dweights = None
    if of_table and ctx.sparse:
        dweight = sparse_gradient(_touched_rows, dout, input, ctx.rows, offsets, weights, *ctx.rest)
        of_table = False
    if of_table or of_weights:
        table, of_each = _backward(
            dout, input, weight, ctx.rows, offsets, weights, *ctx.rest, of_table, of_weights
        )
        dweight = table if of_table else dweight
        dweights = of_each if of_weights else None
    return None, dweight, None, dweights, None, None, None, None, None, None


def _refuse_to_differentiate(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    raise Unsupported(
        'embedding_bag has no second derivative, and neither has segment_reduce with "max"; leave '
        "create_graph out, or detach the gradient."
    )


register_autograd(
    "embedding_bag", _differentiate, by=["weight", "per_sample_weights"], setup_context=_save_for_backward
)
register_autograd(
    "embedding_bag_backward", _refuse_to_differentiate, by=["dout", "weight", "per_sample_weights"]
)
register_autograd(
    "embedding_bag_touched_rows_backward", refuse_second_gradient, by=["dout", "per_sample_weights"]
)

register_vmap("embedding_bag", by_sample(_forward))
register_vmap("embedding_bag_backward", by_sample(_backward))
register_vmap("embedding_bag_touched_rows_backward", refuse_samples)


def _require_bags(
    input, weight, offsets, mode, per_sample_weights, include_last_offset, scale_grad_by_freq, sparse
):
    """Raise unless these arguments fit together."""
    require_table(input, weight)
    require_choice("mode", mode, MODES)
    if offsets is None and input.dim() != 2:
        raise InvalidArgs(
            f"input has shape {tuple(input.shape)} and there are no offsets; accepted are two axes, whose "
            "rows are the bags, or one axis with offsets that say where each bag begins."
        )
    if offsets is not None:
        require_tensor("offsets", offsets)
        if input.dim() != 1 or offsets.dim() != 1:
            raise InvalidArgs(
                f"input has shape {tuple(input.shape)} and offsets has shape {tuple(offsets.shape)}; where "
                "there are offsets, both have one axis. Leave offsets out if the rows of input are the bags."
            )
        if offsets.dtype not in INDEX_DTYPES:
            raise InvalidArgs(f"offsets has dtype {offsets.dtype}; accepted are torch.int32 and torch.int64.")
        if include_last_offset and not offsets.shape[0]:
            raise InvalidArgs(
                "include_last_offset is True and offsets is empty; pass at least the last offset, the number "
                "of indices."
            )
    if mode == "max" and (scale_grad_by_freq or sparse):
        given = "scale_grad_by_freq" if scale_grad_by_freq else "sparse"
        raise InvalidArgs(f'{given} is True with mode "max"; only "sum" and "mean" take it. Leave it out.')
    if per_sample_weights is not None:
        require_tensor("per_sample_weights", per_sample_weights)
        if mode != "sum":
            raise InvalidArgs(f'per_sample_weights are given with mode {mode!r}; only mode "sum" takes them.')
        if per_sample_weights.shape != input.shape or per_sample_weights.dtype != weight.dtype:
            raise InvalidArgs(
                f"per_sample_weights has shape {tuple(per_sample_weights.shape)} and dtype "
                f"{per_sample_weights.dtype}; it must have the shape of input, {tuple(input.shape)}, and the "
                f"dtype of weight, {weight.dtype}."
            )


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    *,
    bad_index: str = "raise",
) -> torch.Tensor:
    """The sum, mean or maximum of the rows of each bag, as ``torch.nn.functional.embedding_bag``.

    Rows are added in the order of the bag, and gradients in the order of their positions in ``input``, in
    float32 for float16 and bfloat16, and rounded once: the same bits on every run and every device. The first
    of equal maxima gets the gradient; NaN is larger than any number. An empty bag is zeros. With
    ``scale_grad_by_freq`` the gradient of a row is divided by its number of terms. Backward saves only the
    arguments: for "max" it reads the table again. With ``sparse`` the gradient of the table is a coalesced
    ``torch.sparse_coo`` tensor of the rows that were read; the host must know their number, so on CUDA this
    synchronises with the device. ``max_norm`` is not supported.

    An index out of range raises an IndexError, and so do offsets that do not begin with 0, descend, or pass
    the end. CUDA does not synchronise for this: the next call into this library or
    ``holdfast.check_errors()`` raises the error, and until then such an index is skipped, as ``padding_idx``
    is. With ``bad_index="skip"`` it is skipped without an error.

    >>> import torch, holdfast as hf
    >>> weight = torch.arange(6.0).reshape(3, 2).requires_grad_()
    >>> out = hf.embedding_bag(torch.tensor([2, 0, 2]), weight, torch.tensor([0, 2]), mode="sum")
    >>> out.sum().backward()
    >>> out.detach(), weight.grad
    (tensor([[4., 6.],
            [4., 5.]]), tensor([[1., 1.],
            [0., 0.],
            [2., 2.]]))
    """
    padding: Any = unchecked_padding(padding_idx, max_norm, norm_type)
    last = False if offsets is None and include_last_offset is True else include_last_offset
    found = _again(
        input, weight, offsets, per_sample_weights, mode, last, padding, bad_index, scale_grad_by_freq, sparse
    )
    if found is not None:
        return found  # type: ignore[no-any-return]
    require_bool("scale_grad_by_freq", scale_grad_by_freq)
    require_bool("sparse", sparse)
    require_bool("include_last_offset", include_last_offset)
    require_choice("bad_index", bad_index, BAD_INDEX)
    _require_bags(input, weight, offsets, mode, per_sample_weights, last, scale_grad_by_freq, sparse)
    refuse_max_norm(max_norm, norm_type)
    padding = checked_padding(padding_idx, weight.shape[0])
    return _forward(  # type: ignore[no-any-return]
        input, weight, offsets, per_sample_weights, mode, last, padding, bad_index, scale_grad_by_freq, sparse
    )

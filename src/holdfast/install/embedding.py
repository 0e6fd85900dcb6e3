"""torch's gradients of ``embedding`` and ``embedding_bag``. Both lookups are deterministic in torch."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.core.huge_pages import on_huge_pages
from holdfast.core.repeated import Work
from holdfast.core.torch_op import below_autograd
from holdfast.install.operators import TRACED, Operator
from holdfast.install.scatter import largest_rows
from holdfast.install.serving import PassOn, plan_of, require_float
from holdfast.ops.embedding.plan import EmbeddingBackwardArgs, EmbeddingBackwardPlan
from holdfast.ops.embedding_bag.plan import EmbeddingBagBackwardArgs, EmbeddingBagBackwardPlan

_BAG_MODES = ("sum", "mean", "max")


def _table_fields(indices, dout, rows, padding_idx, scale_grad_by_freq):
    return {
        "shape": indices.shape,
        "num_embeddings": rows,
        "embedding_dim": dout.shape[-1],
        "dtype": dout.dtype,
        "index_dtype": indices.dtype,
        "padding_idx": None if padding_idx < 0 else padding_idx,
        "scale_grad_by_freq": scale_grad_by_freq,
    }


@below_autograd
def _rows(dout, indices, rows, padding_idx, scale_grad_by_freq):
    fields = _table_fields(indices, dout, rows, padding_idx, scale_grad_by_freq)
    plan = plan_of(EmbeddingBackwardPlan, dout.device, **fields)
    dweight = on_huge_pages(dout.new_empty((rows, dout.shape[-1])))
    return Work(plan, EmbeddingBackwardArgs(dout=dout, indices=indices, dweight=dweight), dweight)


@below_autograd
def _bags(dout, indices, offsets, weights, mode, rows, padding_idx, scale_grad_by_freq):
    plan = plan_of(
        EmbeddingBagBackwardPlan, dout.device, mode=mode, offsets=len(offsets), offsets_dtype=offsets.dtype,
        include_last_offset=True, per_sample_weights=weights is not None, dweight=True,
        dper_sample_weights=False, **_table_fields(indices, dout, rows, padding_idx, scale_grad_by_freq),
    )  # fmt: skip
    dweight = on_huge_pages(dout.new_empty((rows, dout.shape[-1])))
    args = EmbeddingBagBackwardArgs(
        dout=dout, indices=indices, offsets=offsets, per_sample_weights=weights, dweight=dweight
    )
    return Work(plan, args, dweight)


def _embedding(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    require_float(grad_output)
    if not num_weights or not grad_output.numel():
        raise PassOn("a tensor is empty")
    if grad_output.dim() != indices.dim() + 1:
        raise PassOn("the gradient has another rank than the output")
    padding = padding_idx if padding_idx < num_weights else -1
    return _rows(grad_output, indices, num_weights, padding, scale_grad_by_freq)


def _embedding_bag(
    grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode,
    per_sample_weights, padding_idx=-1,
):  # fmt: skip
    require_float(grad)
    if not num_weights or not grad.numel() or not indices.numel() or grad.dim() != 2 or indices.dim() != 1:
        raise PassOn("a tensor is empty or has another rank")
    if _BAG_MODES[mode] == "max":
        return largest_rows(grad, maximum_indices, bag_size, num_weights)
    if per_sample_weights is not None and per_sample_weights.dtype != grad.dtype:
        raise PassOn("the weights of the samples have another dtype than the gradient")
    # The indices are in the order of the bags, so the first index of a bag is found by bisection.
    numbers = torch.arange(grad.shape[0] + 1, device=grad.device, dtype=offset2bag.dtype)
    offsets = torch.searchsorted(offset2bag, numbers, out_int32=offset2bag.dtype == torch.int32)
    return _bags(
        grad, indices, offsets, per_sample_weights, _BAG_MODES[mode], num_weights, padding_idx,
        scale_grad_by_freq,
    )  # fmt: skip


def operators() -> Iterator[Operator]:
    yield Operator("embedding_dense_backward", "embedding", _embedding, TRACED)
    yield Operator("_embedding_bag_dense_backward", "embedding_bag", _embedding_bag)

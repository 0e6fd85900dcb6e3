"""Tensors of more than 2^31 elements, and means of more than 2^24."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf


def test_codes_beyond_the_reach_of_32_bits() -> None:
    rows, columns = 2**16 + 1, 2**15 + 1
    x = ((torch.arange(columns) % 251) - 125).to(torch.bfloat16).expand(rows, columns)
    zero_point = (torch.arange(rows, dtype=torch.int32) % 3)[:, None]
    q = hf.quantize(x, torch.ones(rows), zero_point.reshape(rows), granularity=hf.PerChannel(0))
    assert q.numel() > 2**31
    for row in (0, 1, 2, rows // 2, rows - 2, rows - 1):
        wanted = (x[row].to(torch.int32) + zero_point[row]).clamp(-128, 127).to(torch.int8)
        assert torch.equal(q[row], wanted), row


#: A number of terms that is no float32. The nearest is 2^24, and so is the ordered sum of as many ones.
TERMS = 2**24 + 1


@pytest.mark.parametrize("columns", [(), (2,)])
@pytest.mark.parametrize("include_self", [False, True])
def test_the_count_of_a_mean_is_rounded(columns: tuple[int, ...], include_self: bool) -> None:
    index = torch.zeros((), dtype=torch.int32).expand(TERMS - include_self, *columns)
    one, zero = torch.ones(()).expand(index.shape), torch.zeros(1, *columns)
    mean = hf.scatter_reduce(zero, 0, index, one, "mean", include_self=include_self)
    assert torch.equal(mean, torch.ones_like(mean))


def test_the_count_of_a_gradient_by_frequency_is_rounded() -> None:
    weight, index = torch.ones(1, 2, requires_grad=True), torch.zeros(TERMS, dtype=torch.int32)
    out = hf.embedding(index, weight, scale_grad_by_freq=True)
    (dweight,) = torch.autograd.grad(out, weight, torch.ones(()).expand(out.shape))
    assert torch.equal(dweight, torch.ones(1, 2))


def test_the_count_of_the_mean_of_a_bag_is_rounded() -> None:
    weight, index = torch.ones(1, 2, requires_grad=True), torch.zeros(1, TERMS, dtype=torch.int32)
    mean = hf.embedding_bag(index, weight, mode="mean")
    assert torch.equal(mean, torch.ones(1, 2))
    (dweight,) = torch.autograd.grad(mean, weight, torch.full((1, 2), 2.0**24))
    assert torch.equal(dweight, torch.full((1, 2), 2.0**24))

"""Tensors of more than 2^31 elements."""

from __future__ import annotations

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

"""Properties for any input: round trips of codes and packing, and independence of a sample from its batch."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.core.case import random_bits
from holdfast.core.formats import INTEGERS, Format

SETTINGS: dict[str, Any] = {"derandomize": True, "deadline": None, "print_blob": True}


def _bits(label: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bit patterns. For floats, half of the values are near 1, and thus in range."""
    count = prod(shape)
    words = random_bits(label, count)
    whole = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize]
    values = torch.from_numpy(words.view(np.int64).astype(whole)).view(dtype)
    if dtype.is_floating_point:
        near = torch.from_numpy((words >> np.uint64(40)).astype(np.float64) % 4096 / 64 - 32).to(dtype)
        values = torch.where(torch.from_numpy(words % 2 == 0), values, near)
    return values.reshape(shape)


def _run(plan: Any, args: Any, **fields: Any) -> None:
    stream = hf.Stream.current()
    plan.select(stream, plan.Descriptor(**fields), hf.PlanPreference(backend="cpu")).run(stream, None, args)


@settings(max_examples=50, **SETTINGS)
@given(st.integers(0, 2**32), st.floats(2.0**-60, 2.0**60, width=32), st.integers(-200, 200))
def test_codes_survive_the_way_there_and_back(seed: int, scale: float, zero_point: int) -> None:
    q, y, again = _bits(str(seed), (512,), torch.int8), torch.empty(512), torch.empty(512, dtype=torch.int8)
    shared = {"scale": scale, "zero_point": zero_point}
    _run(hf.plans.DequantizePerTensorPlan, hf.plans.DequantizePerTensorArgs(q=q, y=y, **shared), shape=(512,))
    _run(hf.plans.QuantizePerTensorPlan, hf.plans.QuantizePerTensorArgs(x=y, q=again, **shared), shape=(512,))
    assert torch.equal(q, again)


@settings(max_examples=50, **SETTINGS)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 10))
def test_a_sample_does_not_depend_on_its_batch(seed: int, size: int, first: int) -> None:
    x = _bits(str(seed), (16, 33), torch.float32)
    whole, part = torch.empty(16, 33, dtype=torch.int8), torch.empty(size, 33, dtype=torch.int8)
    _run(
        hf.plans.QuantizePerTensorPlan,
        hf.plans.QuantizePerTensorArgs(x=x, scale=0.3, q=whole),
        shape=(16, 33),
    )
    some = x[first : first + size]
    _run(
        hf.plans.QuantizePerTensorPlan,
        hf.plans.QuantizePerTensorArgs(x=some, scale=0.3, q=part),
        shape=(size, 33),
    )
    assert torch.equal(whole[first : first + size], part)


@settings(max_examples=50, **SETTINGS)
@given(
    st.sampled_from([c for c in INTEGERS.values() if c.per_byte > 1]),
    st.integers(0, 40),
    st.integers(0, 2**32),
)
def test_packing_there_and_back(code: Format, length: int, seed: int) -> None:
    low, high = code.code_range
    codes = (_bits(str(seed), (3, length), torch.int32) % (high - low + 1) + low).to(code.storage)
    packed = hf.pack(codes, code.torch)
    assert packed.shape == (3, -(-length // code.per_byte))
    assert torch.equal(hf.unpack(packed, code.torch, length), codes)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_an_output_with_gaps_that_fits_in_one_tile(backend: str) -> None:
    """No element is at the address it would have in a contiguous output."""
    desc = hf.plans.DequantizePerGroupBackwardDescriptor(
        shape=(2,), input_dtype=torch.float32, output_dtype=torch.float32, group_size=1, axis=0
    )
    stream = hf.Stream.current("cpu")
    plan = hf.plans.DequantizePerGroupBackwardPlan.select(stream, desc, hf.PlanPreference(backend=backend))
    memory = torch.full((4,), 9.0)
    dy, scale = torch.tensor([3.0, 5.0]), torch.tensor([0.5, 2.0])
    plan.run(stream, None, hf.plans.DequantizePerGroupBackwardArgs(dy=dy, scale=scale, dq=memory[::2]))
    assert memory.tolist() == [1.5, 9.0, 10.0, 9.0]

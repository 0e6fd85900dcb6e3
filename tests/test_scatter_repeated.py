"""Repeated calls of scatter and gather functions, which skip the checks of the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast as hf

TABLE, TERMS = torch.arange(12.0).reshape(4, 3), torch.ones(5, 3)
ROWS = torch.tensor([3, 0, 3, 1, 3])
ELEMENTS = ROWS[:, None].repeat(1, 3)

#: A function of an index that is accepted, and calls with equal values that differ in what must be refused.
CALLS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "gather": (
        lambda: hf.index_select(TABLE, 0, ROWS),
        lambda: hf.gather(TABLE, 0, ROWS),
    ),
    "index_select": (
        lambda: hf.gather(TABLE, 0, ELEMENTS),
        lambda: hf.index_select(TABLE, 0, ELEMENTS),
    ),
    "scatter_add": (
        lambda: hf.index_add(TABLE, 0, ROWS, TERMS),
        lambda: hf.scatter_add(TABLE, 0, ROWS, TERMS),
    ),
    "index_add": (
        lambda: hf.scatter_add(TABLE, 0, ELEMENTS, TERMS),
        lambda: hf.index_add(TABLE, 0, ELEMENTS, TERMS),
    ),
    "scatter_reduce": (
        lambda: hf.scatter_reduce(TABLE, 0, ELEMENTS, TERMS, "mean"),
        lambda: hf.scatter_reduce(TABLE, 0, ELEMENTS, TERMS, "mean", include_self=1),  # type: ignore[arg-type]
    ),
    "alpha": (
        lambda: hf.index_add(TABLE, 0, ROWS, TERMS),
        lambda: hf.index_add(TABLE, 0, ROWS, TERMS, alpha=True),
    ),
    "dim": (
        lambda: hf.gather(TABLE, 0, ELEMENTS),
        lambda: hf.gather(TABLE, False, ELEMENTS),
    ),
    "index_put": (
        lambda: hf.index_put(TABLE, (ROWS,), TERMS),
        lambda: hf.index_put(TABLE, (ROWS,), TERMS, accumulate=1),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_does_not_make_an_invalid_call_valid(name: str) -> None:
    valid, invalid = CALLS[name]
    for _ in range(4):
        valid()
        with pytest.raises(hf.InvalidArgs):
            invalid()


@pytest.mark.parametrize("alpha", [10**400, float("inf")])
def test_a_factor_that_is_no_float_is_refused(alpha: float) -> None:
    with pytest.raises(hf.InvalidArgs, match="alpha"):
        hf.index_add(TABLE, 0, ROWS, TERMS, alpha=alpha)


@pytest.mark.parametrize("index", [[3, 4, 0], [0, -5, 1]])
def test_a_repeated_call_reports_a_bad_index(index: list[int]) -> None:
    bad = torch.tensor(index)
    value = next(row for row in index if not -4 <= row < 4)
    good, terms = bad.clamp(0, 3), torch.ones(3, 3)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda index: hf.index_put(TABLE, (index,), terms),
        lambda index: hf.index_add(TABLE, 0, index, terms),
        lambda index: hf.index_select(TABLE, 0, index),
        lambda index: hf.scatter_add(TABLE, -2, index[:, None].expand(-1, 3), terms),
        lambda index: hf.scatter_add(TABLE, 0, index[:, None].repeat(1, 3), terms),
        lambda index: hf.gather(TABLE, 0, index[:, None].repeat(1, 3)),
    ]
    for call in calls:
        expected = call(good)
        for _ in range(3):
            assert torch.equal(call(good), expected)
            with pytest.raises(IndexError, match=f"is {value};"):
                call(bad)


def test_negative_axes_and_indices_are_repeated() -> None:
    index = torch.tensor([-1, 0, -4, 2, -1])
    for step in range(4):
        table, terms = TABLE + step, TERMS * (step + 1)
        assert torch.equal(
            hf.index_put(table, (index,), terms), torch.index_put(table, (index,), terms, accumulate=True)
        )
        across = torch.tensor([[2, 0], [1, 1], [0, 2], [2, 2]])
        assert torch.equal(hf.gather(table, -1, across), torch.gather(table, -1, across))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("expanded", [0, 1, None])
def test_gradients_of_a_mean_are_quotients_in_the_compute_type(
    dtype: torch.dtype, include_self: bool, expanded: int | None
) -> None:
    generator = torch.Generator().manual_seed(7)
    index = torch.randint(0, 4, (6, 3), generator=generator)
    if expanded is not None:
        index = index.select(expanded, 0).unsqueeze(expanded).expand(6, 3)
    dim = 1 if expanded == 0 else 0
    size = (6, 4) if dim else (5, 3)
    dout = torch.randn(size, generator=generator)
    dout[0] = -0.0
    dout = dout.to(dtype)
    for _ in range(3):
        input = torch.zeros(size, dtype=dtype, requires_grad=True)
        src = torch.zeros(6, 3, dtype=dtype, requires_grad=True)
        out = hf.scatter_reduce(input, dim, index, src, "mean", include_self=include_self)
        dinput, dsrc = torch.autograd.grad(out, (input, src), dout)
        counts = torch.zeros(size, dtype=torch.float64)
        counts.scatter_add_(dim, index, torch.ones(6, 3, dtype=torch.float64))
        terms = counts + 1 if include_self else counts.clamp(min=1)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        quotient = (dout.to(compute) / terms.to(compute)).to(dtype)
        kept = quotient if include_self else torch.where(counts > 0, torch.zeros_like(dout), dout)
        for found, expected in ((dinput, kept), (dsrc, quotient.gather(dim, index))):
            assert torch.equal(found, expected)
            assert torch.equal(found.signbit(), expected.signbit())


def test_an_empty_index_of_nine_axes() -> None:
    """Axes that share an index are one axis of a row, also if they have no elements."""
    empty = torch.zeros((0,) * 9)
    index = torch.zeros((0,) * 8, dtype=torch.int64)[..., None].expand(*[0] * 9)
    assert hf.gather(empty, 0, index).shape == empty.shape
    table = torch.ones((1, 2, 1, 1, 1, 2, 1, 2, 3))
    index = torch.zeros((1, 2, 1, 0, 1, 2, 1, 2, 3), dtype=torch.int64)
    assert torch.equal(hf.scatter_add(table, 2, index, torch.zeros(index.shape)), table)
    reduced = hf.scatter_reduce(table, 2, index, torch.zeros(index.shape), "mean", include_self=False)
    assert torch.equal(reduced, table)

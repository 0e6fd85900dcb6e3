"""Scatter: rows of ``src`` added to the rows of a table that an index names. Gather: such rows read.

``out[.., i, ..]`` is ``input[.., i, ..]`` plus the ordered sum of all terms whose index is i: the sum of
``segment_sum``, in the order of the positions in the index, multiplied by ``alpha``, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.core.checks import require_choice
from holdfast.core.declaration import Implementation, Output, arguments
from holdfast.core.descriptor import Expected, whole_numbers
from holdfast.core.device_errors import reported
from holdfast.core.errors import InvalidDescriptor, InvalidIndex
from holdfast.core.plan import Args, Plan
from holdfast.core.strided import contiguous_strides
from holdfast.ops.segment_sum.indexed import (
    LIMIT,
    IndexedDescriptor,
    count_roundings,
    summing_ulp,
    validate_bad_index,
)

#: What ``input`` is for. "added": to the sum. "kept": in rows without terms. "zeros": there is no input.
BASES = ("added", "kept", "zeros")
REDUCTIONS = ("sum", "mean")
#: From this magnitude on, a number is infinite when rounded to float32.
_FLOAT32_OVERFLOW = float.fromhex("0x1.ffffffp127")


@dataclass(frozen=True, kw_only=True)
class LinesDescriptor(IndexedDescriptor):
    """``shape`` is the shape of the index, ``table`` the shape of the table; their ranks are equal.

    Position p of the index belongs to position p of the table, with ``p[dim]`` replaced by ``index[p]``. With
    ``width``, every position has a row of ``width`` elements, the last axis of the tensors. Without, it has
    one element.
    """

    table: tuple[int, ...]
    dim: int = 0
    width: int | None = None

    sizes = ("rows", "columns")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "table", whole_numbers("table", self.table, (64, 3)))

    @property
    def rows(self) -> int:
        """Number of positions of the table."""
        return math.prod(self.table)

    @property
    def columns(self) -> int:
        return 1 if self.width is None else self.width

    @property
    def extent(self) -> int:
        """Indices are less than this."""
        return self.table[self.dim]

    @property
    def step(self) -> int:
        """Distance between the rows of two consecutive indices."""
        return contiguous_strides(self.table)[self.dim]

    @property
    def line_strides(self) -> tuple[int, ...]:
        """The row of a position with index 0 is the dot product of these strides and the position."""
        return self.without_dim(contiguous_strides(self.table))

    def without_dim(self, strides: Sequence[int]) -> tuple[int, ...]:
        """Strides of the table, with 0 for ``dim``."""
        return (*strides[: self.dim], 0, *strides[self.dim + 1 : len(self.table)])

    def column_step(self, tensor: torch.Tensor | None) -> int:
        """Stride of the columns of a tensor."""
        return 1 if tensor is None or self.width is None else tensor.stride(-1)

    def expected(self, name: str) -> Expected | None:
        if name == "index":
            return self.shape, self.index_dtype
        row = () if self.width is None else (self.width,)
        return (*(self.table if name in self.of_table else self.shape), *row), self.dtype

    #: The operands with the shape of the table.
    of_table: ClassVar[tuple[str, ...]]

    def validate(self) -> None:
        if self.width is not None and not (type(self.width) is int and 0 <= self.width < LIMIT):
            raise InvalidDescriptor(
                f"width is {self.width!r}; it must be None or a whole number from 0 to {LIMIT - 1}."
            )
        if not self.shape or len(self.shape) != len(self.table):
            raise InvalidDescriptor(
                f"shape is {self.shape} and table is {self.table}; both must have the same rank, from 1. "
                "View a scalar as one element, and axes that share an index as width."
            )
        if any(size < 0 for size in self.table):
            raise InvalidDescriptor(f"table {self.table} has a negative size; sizes count from 0.")
        if self.rows >= LIMIT:
            raise InvalidDescriptor(
                f"table {self.table} has {self.rows} rows; at most {LIMIT - 1} are accepted. Split it into "
                "several calls."
            )
        if type(self.dim) is not int or not 0 <= self.dim < len(self.shape):
            raise InvalidDescriptor(
                f"dim is {self.dim!r}; it must be a whole number from 0 to {len(self.shape) - 1}."
            )
        pairs = enumerate(zip(self.shape, self.table, strict=True))
        if any(axis != self.dim and own > other for axis, (own, other) in pairs):
            raise InvalidDescriptor(
                f"shape is {self.shape} and table is {self.table}; except along dim {self.dim}, the index "
                "must not be larger than the table."
            )
        super().validate()


@dataclass(frozen=True, kw_only=True)
class ScatterDescriptor(LinesDescriptor):
    """Each term of ``src`` is added to the row of the table that its index selects.

    ``shape`` is the shape of the index, ``table`` the shape of input and the output; their ranks are equal.
    The term at position p is added at position p of the table, with ``p[dim]`` replaced by ``index[p]``. With
    ``width``, every position has a row of ``width`` elements, the last axis of the tensors. Without, it has
    one element.

    ``base`` "added": input is added to the sum. "kept": input is the result where there are no terms.
    "zeros": there is no input, and results without terms are zeros. ``reduce`` "mean" divides by the number
    of terms, plus one if input is added. ``alpha`` is rounded to the compute type, and multiplies a sum
    before input is added.
    """

    base: str = "added"
    reduce: str = "sum"
    alpha: float = 1.0

    of_table = ("input", "out")

    @property
    def by_count(self) -> bool:
        return self.reduce == "mean"

    @property
    def empty(self) -> bool:
        return self.rows == 0 or self.columns == 0

    def expected(self, name: str) -> Expected | None:
        return None if name == "input" and self.base == "zeros" else super().expected(name)

    def validate(self) -> None:
        require_choice("base", self.base, BASES)
        require_choice("reduce", self.reduce, REDUCTIONS)
        super().validate()
        if self.alpha != 1.0 and (self.reduce, self.base) != ("sum", "added"):
            raise InvalidDescriptor(
                f"alpha is {self.alpha}, reduce is {self.reduce!r} and base is {self.base!r}; alpha is for "
                "sums that input is added to. Leave it out."
            )
        if self.dtype != torch.float64 and abs(self.alpha) >= _FLOAT32_OVERFLOW:
            raise InvalidDescriptor(
                f"alpha is {self.alpha} and dtype is {self.dtype}; alpha is rounded to torch.float32, where "
                "it is infinite. Accepted are magnitudes up to 3.4028235e+38. Use torch.float64, or multiply "
                "the terms."
            )


@dataclass(frozen=True, kw_only=True)
class GatherDescriptor(LinesDescriptor):
    """Every position of the index reads the row of the table that it selects.

    ``shape`` is the shape of the index, ``table`` the shape of input; their ranks are equal. Position p of
    the index reads position p of the table, with ``p[dim]`` replaced by ``index[p]``. With ``width``, every
    position has a row of ``width`` elements, the last axis of the tensors. Without, it has one element.

    An index out of range reads as zeros. With ``bad_index`` "raise" it also raises an error: on the CPU
    before anything is written; on CUDA at the next run of any plan, or at ``check_errors``.
    """

    bad_index: str = "raise"

    of_table = ("input",)

    @property
    def empty(self) -> bool:
        return self.count == 0 or self.columns == 0

    def validate(self) -> None:
        super().validate()
        validate_bad_index(self.bad_index)


@arguments
class ScatterArgs(Args):
    """``input``, ``index`` and ``src`` are read, ``out`` is written. ``input`` is None for base "zeros"."""

    input: torch.Tensor | None
    index: torch.Tensor
    src: torch.Tensor
    out: Output


@arguments
class GatherArgs(Args):
    """``input`` and ``index`` are read, ``out`` is written."""

    input: torch.Tensor
    index: torch.Tensor
    out: Output


@dataclass(frozen=True)
class BadScatterIndex:
    """Makes the error for an index out of range."""

    extent: int

    def error(self, position: int, value: int) -> InvalidIndex:
        accepted = f"0 to {self.extent - 1}" if self.extent else "none"
        return InvalidIndex(
            f"the index at position {position} of the flattened index is {reported(value)}; the indexed axis "
            f"has {self.extent} rows; accepted are {accepted}. Correct the index."
        )


class ScatterPlan(Plan[ScatterDescriptor, ScatterArgs]):
    """out[i] = input[i] + alpha * the ordered sum of src[n] over all n with index[n] == i."""

    kernels = (
        Implementation("cpu", ".cpu:Scatter"),
        Implementation("gpu", ".gpu_few_terms:scatter"),
        Implementation("reference", ".reference:Scatter"),
    )

    def mode(self) -> str:
        return f"{self.descriptor.reduce}, {self.descriptor.base}"

    def ulp(self) -> dict[str, float]:
        desc = self.descriptor
        more = 1.0 if desc.base == "added" else 0.0  # the addition of input
        if desc.by_count:
            more += count_roundings(desc.compute, desc.count + 1)
        if desc.alpha != 1.0:
            more += 1
        return {"out": summing_ulp(desc.real, desc.count, more=more)}


class GatherPlan(Plan[GatherDescriptor, GatherArgs]):
    """out[n] = input[index[n]]; zeros for an index out of range."""

    def mode(self) -> str:
        return self.descriptor.bad_index

    def ulp(self) -> dict[str, float]:
        return {"out": 0.0}

    def bytes_moved(self) -> int:
        desc = self.descriptor
        return desc.count * (2 * desc.columns * desc.dtype.itemsize + desc.index_dtype.itemsize)

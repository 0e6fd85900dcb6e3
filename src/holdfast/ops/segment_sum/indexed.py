"""What the ops over indices share: descriptors, checks, and what they say of themselves.

segment_sum, embedding and embedding_bag each have a matrix whose rows are named by indices. ``shape`` of a
descriptor is that of the indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar, cast

import torch

from holdfast.core.contract import error_in_ulp
from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Descriptor
from holdfast.core.device_errors import reported
from holdfast.core.dtypes import Float
from holdfast.core.errors import InvalidDescriptor, InvalidIndex
from holdfast.core.plan import Args, DescribedKernel
from holdfast.core.strided import Space, coalesce

#: Terms that are added one after another; their sums are terms again.
CHUNK = 32
#: Indices are counted, and rows named, in 31 bits.
LIMIT = 2**31 - 1
INDEX_DTYPES = (torch.int32, torch.int64)
#: What can be done about an index that names no row.
BAD_INDEX = ("raise", "skip")


@dataclass(frozen=True, kw_only=True)
class IndexedDescriptor(Descriptor):
    """``dtype`` is that of the rows, ``index_dtype`` that of what names them."""

    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64

    #: The fields that hold the sizes of the matrix: its rows, and its columns.
    sizes: ClassVar[tuple[str, str]]

    @property
    def rows(self) -> int:
        return cast(int, getattr(self, self.sizes[0]))

    @property
    def columns(self) -> int:
        return cast(int, getattr(self, self.sizes[1]))

    @property
    def count(self) -> int:
        """How many indices there are."""
        return math.prod(self.shape)

    @property
    def padding(self) -> int:
        """The row that is skipped where rows are summed; -1 for none."""
        return -1

    @property
    def by_count(self) -> bool:
        """Whether a sum is divided by the number of its terms."""
        return False

    def validate(self) -> None:
        super().validate()
        if self.index_dtype not in INDEX_DTYPES:
            raise InvalidDescriptor(
                f"index_dtype is {self.index_dtype}; accepted are torch.int32 and torch.int64."
            )
        for name in self.sizes:
            size = getattr(self, name)
            if type(size) is not int or not 0 <= size < LIMIT:
                raise InvalidDescriptor(
                    f"{name} is {size!r}; it must be a whole number from 0 to {LIMIT - 1}."
                )
        if self.count >= LIMIT:
            raise InvalidDescriptor(
                f"shape {self.shape} has {self.count} indices; at most {LIMIT - 1} are accepted. "
                "Split them into several calls."
            )


def validate_padding(padding_idx: int | None, rows: int) -> None:
    """Raise unless ``padding_idx`` names a row, or is None."""
    if padding_idx is not None and (type(padding_idx) is not int or not 0 <= padding_idx < rows):
        raise InvalidDescriptor(
            f"padding_idx is {padding_idx!r}; it must be None or name one of the {rows} rows, counted from 0."
        )


def validate_bad_index(bad_index: str) -> None:
    """Raise unless ``bad_index`` says what to do."""
    if bad_index not in BAD_INDEX:
        raise InvalidDescriptor(f'bad_index is {bad_index!r}; accepted are "raise" and "skip".')


class SummingArgs(Args):
    """What is summed by row: the operands are the sums, the terms and the row of each."""

    __slots__ = ()

    accumulate: bool

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class BadIndex:
    """The complaint that an index names no row."""

    rows: int

    def error(self, position: int, value: int) -> InvalidIndex:
        accepted = f"0 to {self.rows - 1}" if self.rows else "none"
        return InvalidIndex(
            f"the index at position {position} of the flattened indices is {reported(value)}; the table has "
            f"{self.rows} rows, so that accepted are {accepted}. Correct it, or pass "
            'bad_index="skip" to read it as zeros.'
        )


D = TypeVar("D", bound=IndexedDescriptor)


class IndexedKernel(DescribedKernel[D]):
    """A kernel over indices, on any backend."""


def summing_ulp(real: Float, terms: int, more: float = 0.0) -> float:
    """The error of an ordered sum of that many terms, in ULP of ``real``, of the sum of their magnitudes.

    ``more`` operations are rounded beside the additions.
    """
    return error_in_ulp(ordered_additions(terms) + more, real.compute, real)


def ordered_additions(terms: int) -> int:
    """The most additions that round a term of an ordered sum: the first of a chunk is to zero, and exact."""
    additions = 0
    while terms > 1:
        additions += min(terms, CHUNK) - 1
        terms = -(-terms // CHUNK)
    return additions


def count_roundings(compute: Float, most: int) -> int:
    """The roundings of a division by a count of at most ``most``, which may have to be rounded itself."""
    return 2 if most > 2**compute.precision else 1


def loops(shape: Sequence[int], *strides: Sequence[int]) -> Space:
    """The loops over the indices in row-major order, as few as the operands allow; strides for each operand.

    ``strides`` are those of tensors of this shape, or with more axes after it, which are left out.
    """
    return coalesce(shape, [tuple(own[: len(shape)]) for own in strides], keep_order=True)


@arguments
class DescribedSum(SummingArgs):
    """Args of any plan that sums by row, described."""

    out: Output
    terms: torch.Tensor
    indices: torch.Tensor
    accumulate: bool = False

    @classmethod
    def of(cls, desc: IndexedDescriptor) -> Self:
        """Contiguous tensors without memory: a term for each index."""
        out = torch.empty((desc.rows, desc.columns), dtype=desc.dtype, device="meta")
        terms = torch.empty((*desc.shape, desc.columns), dtype=desc.dtype, device="meta")
        indices = torch.empty(desc.shape, dtype=desc.index_dtype, device="meta")
        return cls(out=out, terms=terms, indices=indices)

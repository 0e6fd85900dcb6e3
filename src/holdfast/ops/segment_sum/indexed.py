"""Descriptors, checks and error bounds shared by segment_sum, embedding and embedding_bag.

Each of these ops has a matrix whose rows are selected by indices. A descriptor's ``shape`` is the shape of
the indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar, cast

import torch

from holdfast.core.contract import error_in_ulp
from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Descriptor, Expected
from holdfast.core.device_errors import reported
from holdfast.core.dtypes import Float
from holdfast.core.errors import InvalidDescriptor, InvalidIndex
from holdfast.core.plan import Args, DescribedKernel
from holdfast.core.strided import Space, coalesce

#: Terms of a chunk of the ordered sum. The chunk sums are the terms of the next level.
CHUNK = 32
#: Upper limit of the number of indices and rows, an int32.
LIMIT = 2**31 - 1
INDEX_DTYPES = (torch.int32, torch.int64)
#: What to do about an index out of range.
BAD_INDEX = ("raise", "skip")


@dataclass(frozen=True, kw_only=True)
class IndexedDescriptor(Descriptor):
    """``dtype`` is the dtype of the rows, ``index_dtype`` that of the indices."""

    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64

    #: Names of the fields that hold the number of rows and of columns of the matrix.
    sizes: ClassVar[tuple[str, str]]

    @property
    def rows(self) -> int:
        return cast(int, getattr(self, self.sizes[0]))

    @property
    def columns(self) -> int:
        return cast(int, getattr(self, self.sizes[1]))

    @property
    def count(self) -> int:
        """Number of indices."""
        return math.prod(self.shape)

    @property
    def padding(self) -> int:
        """The row whose terms are not summed; -1 for none."""
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


@dataclass(frozen=True, kw_only=True)
class TableDescriptor(IndexedDescriptor):
    """Indices into a table of shape (num_embeddings, embedding_dim)."""

    num_embeddings: int
    embedding_dim: int

    sizes = ("num_embeddings", "embedding_dim")

    def expected(self, name: str) -> Expected | None:
        if name == "indices":
            return self.shape, self.index_dtype
        rows = (self.num_embeddings,) if name in ("weight", "dweight") else self.shape
        return (*rows, self.embedding_dim), self.dtype


def validate_padding(padding_idx: int | None, rows: int) -> None:
    """Raise unless ``padding_idx`` is a row or None."""
    if padding_idx is not None and (type(padding_idx) is not int or not 0 <= padding_idx < rows):
        raise InvalidDescriptor(
            f"padding_idx is {padding_idx!r}; it must be None or name one of the {rows} rows, counted from 0."
        )


def validate_bad_index(bad_index: str) -> None:
    """Raise unless ``bad_index`` is one of BAD_INDEX."""
    if bad_index not in BAD_INDEX:
        raise InvalidDescriptor(f'bad_index is {bad_index!r}; accepted are "raise" and "skip".')


class SummingArgs(Args):
    """Args of a plan that sums terms by row. The operands are the sums, the terms and their rows."""

    __slots__ = ()

    accumulate: bool

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class BadIndex:
    """Makes the error for an index out of range."""

    rows: int

    def error(self, position: int, value: int) -> InvalidIndex:
        accepted = f"0 to {self.rows - 1}" if self.rows else "none"
        return InvalidIndex(
            f"the index at position {position} of the flattened indices is {reported(value)}; the table has "
            f"{self.rows} rows; accepted are {accepted}. Correct the index, or pass "
            'bad_index="skip" to read it as zeros.'
        )


D = TypeVar("D", bound=IndexedDescriptor)


class IndexedKernel(DescribedKernel[D]):
    """A kernel of an op over indices, on any backend."""


def summing_ulp(real: Float, terms: int, more: float = 0.0) -> float:
    """Error bound of an ordered sum, in ULP of ``real`` of the sum of the magnitudes of its terms.

    ``more`` is the number of roundings besides the additions.
    """
    return error_in_ulp(ordered_additions(terms) + more, real.compute, real)


def ordered_additions(terms: int) -> int:
    """Maximum number of rounded additions of a term; the first of a chunk adds to zero and is exact."""
    additions = 0
    while terms > 1:
        additions += min(terms, CHUNK) - 1
        terms = -(-terms // CHUNK)
    return additions


def count_roundings(compute: Float, most: int) -> int:
    """Roundings of a division by a count up to ``most``: one, and one more if the count can be inexact."""
    return 2 if most > 2**compute.precision else 1


def loops(shape: Sequence[int], *strides: Sequence[int]) -> Space:
    """The loops over the indices in row-major order, coalesced, with the strides of each operand.

    ``strides`` belong to tensors of this shape; axes after it are ignored.
    """
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    return coalesce(
        [shape[axis] for axis in axes], [[own[axis] for axis in axes] for own in strides], keep_order=True
    )


@arguments
class DescribedSum(SummingArgs):
    """Args on meta tensors, for compiling any plan that sums by row."""

    out: Output
    terms: torch.Tensor
    indices: torch.Tensor
    accumulate: bool = False

    @classmethod
    def of_sums(cls, desc: IndexedDescriptor) -> Self:
        """Contiguous meta tensors with one term per index."""
        out = torch.empty((desc.rows, desc.columns), dtype=desc.dtype, device="meta")
        terms = torch.empty((*desc.shape, desc.columns), dtype=desc.dtype, device="meta")
        indices = torch.empty(desc.shape, dtype=desc.index_dtype, device="meta")
        return cls(out=out, terms=terms, indices=indices)

"""Embedding bag: the sum, mean or maximum of the rows of each bag of indices, and its gradients.

A bag is a row of two-dimensional indices, or the range between two offsets in one-dimensional indices. An
index equal to ``padding_idx`` or out of range is skipped: it adds nothing and does not count for the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Expected
from holdfast.core.device_errors import reported
from holdfast.core.errors import InvalidDescriptor, InvalidIndex
from holdfast.core.plan import Args, Plan
from holdfast.ops.segment_sum.indexed import (
    INDEX_DTYPES,
    LIMIT,
    TableDescriptor,
    count_roundings,
    summing_ulp,
    validate_bad_index,
    validate_padding,
)

MODES = ("sum", "mean", "max")


@dataclass(frozen=True, kw_only=True)
class BagDescriptor(TableDescriptor):
    """``shape`` is the shape of the indices: (bags, length), or (count,) with ``offsets``.

    ``offsets`` is the number of offsets; each is the begin of a bag. With ``include_last_offset`` the last
    offset is the end of the last bag, and indices after it are in no bag.
    """

    mode: str = "mean"
    offsets: int | None = None
    offsets_dtype: torch.dtype = torch.int64
    include_last_offset: bool = False
    padding_idx: int | None = None
    per_sample_weights: bool = False

    @property
    def bags(self) -> int:
        return self.shape[0] if self.offsets is None else self.offsets - self.include_last_offset

    @property
    def length(self) -> int:
        """Number of indices of every bag; 0 with offsets."""
        return self.shape[1] if self.offsets is None else 0

    @property
    def longest(self) -> int:
        """Maximum number of indices of a bag."""
        return self.length if self.offsets is None else self.count

    @property
    def padding(self) -> int:
        return -1 if self.padding_idx is None else self.padding_idx

    def expected(self, name: str) -> Expected | None:
        if name == "offsets":
            return None if self.offsets is None else ((self.offsets,), self.offsets_dtype)
        if name == "per_sample_weights":
            return (self.shape, self.dtype) if self.per_sample_weights else None
        if name in ("out", "dout"):
            return (self.bags, self.embedding_dim), self.dtype
        return super().expected(name)

    def validate(self) -> None:
        super().validate()
        validate_padding(self.padding_idx, self.num_embeddings)
        if self.mode not in MODES:
            raise InvalidDescriptor(f'mode is {self.mode!r}; accepted are "sum", "mean" and "max".')
        if len(self.shape) != (2 if self.offsets is None else 1):
            raise InvalidDescriptor(
                f"shape is {self.shape} and offsets is {self.offsets}; accepted are indices of two axes, "
                "whose rows are the bags, without offsets, or of one axis with offsets."
            )
        least = int(self.include_last_offset)
        if self.offsets is not None and not (type(self.offsets) is int and least <= self.offsets < LIMIT):
            raise InvalidDescriptor(
                f"offsets is {self.offsets!r}; it must be the number of offsets, from {least} to {LIMIT - 1}."
            )
        if self.offsets is None and self.include_last_offset:
            raise InvalidDescriptor(
                "include_last_offset is True, but indices of two axes have no offsets; leave it out."
            )
        if self.offsets_dtype not in INDEX_DTYPES:
            raise InvalidDescriptor(
                f"offsets_dtype is {self.offsets_dtype}; accepted are torch.int32 and torch.int64."
            )
        if self.per_sample_weights and self.mode != "sum":
            raise InvalidDescriptor(
                f'per_sample_weights are given with mode {self.mode!r}; only mode "sum" takes them.'
            )


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagDescriptor(BagDescriptor):
    """With ``bad_index`` "raise", an index out of range raises an error: on the CPU before anything is
    written; on CUDA at the next run of any plan, or at ``check_errors``. Wrong offsets always do. A run that
    writes nothing, for want of columns or bags, checks neither; ``hf.embedding_bag`` checks both."""

    bad_index: str = "raise"

    @property
    def empty(self) -> bool:
        return self.bags == 0 or self.embedding_dim == 0

    def validate(self) -> None:
        super().validate()
        validate_bad_index(self.bad_index)


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagBackwardDescriptor(BagDescriptor):
    """``dweight`` and ``dper_sample_weights`` select the gradients to compute, at least one.

    With ``scale_grad_by_freq`` the sum of a row is divided by its number of terms.
    """

    scale_grad_by_freq: bool = False
    dweight: bool = True
    dper_sample_weights: bool = False

    @property
    def sums(self) -> bool:
        """Whether there is a non-empty gradient of the table."""
        return self.dweight and self.num_embeddings > 0 and self.embedding_dim > 0

    @property
    def empty(self) -> bool:
        return not self.sums and not (self.dper_sample_weights and self.count)

    @property
    def by_count(self) -> bool:
        return self.scale_grad_by_freq

    def expected(self, name: str) -> Expected | None:
        if name == "dper_sample_weights":
            return (self.shape, self.dtype) if self.dper_sample_weights else None
        # Mode "max" reads the table to find the maxima again, instead of storing their positions in forward.
        read_again = self.dper_sample_weights or (self.mode == "max" and self.dweight)
        if (name == "dweight" and not self.dweight) or (name == "weight" and not read_again):
            return None
        if name == "per_sample_weights" and not self.dweight:
            return None
        return super().expected(name)

    def validate(self) -> None:
        super().validate()
        if self.scale_grad_by_freq and self.mode == "max":
            raise InvalidDescriptor(
                'scale_grad_by_freq is True with mode "max", which has no sum to scale; leave it out.'
            )
        if self.dper_sample_weights and not self.per_sample_weights:
            raise InvalidDescriptor(
                "dper_sample_weights is True without per_sample_weights; there is nothing to derive by."
            )


@dataclass(frozen=True)
class BadOffset:
    """Makes the error for a wrong offset."""

    count: int

    def error(self, position: int, value: int) -> InvalidIndex:
        return InvalidIndex(
            f"offsets[{position}] is {reported(value)}; offsets must begin with 0, never descend, and not "
            f"pass the end of the {self.count} indices. Correct it."
        )


@arguments
class EmbeddingBagArgs(Args):
    """``out`` is written, one row per bag; the others are read."""

    weight: torch.Tensor
    indices: torch.Tensor
    offsets: torch.Tensor | None = None
    per_sample_weights: torch.Tensor | None = None
    out: Output


@arguments
class EmbeddingBagBackwardArgs(Args):
    """``dweight`` and ``dper_sample_weights`` are written, or with ``accumulate`` added to.

    ``per_sample_weights`` are read for ``dweight``. ``weight`` is read for ``dper_sample_weights``, and for
    mode "max". A row without terms is set to zeros, and so is the gradient of the weight of a skipped index;
    with ``accumulate`` they are left unchanged.
    """

    dout: torch.Tensor
    indices: torch.Tensor
    offsets: torch.Tensor | None = None
    per_sample_weights: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    dweight: Output | None = None
    dper_sample_weights: Output | None = None
    accumulate: bool = False


class EmbeddingBagPlan(Plan[EmbeddingBagDescriptor, EmbeddingBagArgs]):
    """out[b] = the sum, mean or maximum of weight[i] over the indices i of bag b."""

    def mode(self) -> str:
        desc = self.descriptor
        return f"{'weighted_' * desc.per_sample_weights}{desc.mode}_{desc.bad_index}"

    def ulp(self) -> dict[str, float]:
        desc = self.descriptor
        if desc.mode == "max":
            return {"out": 0.0}
        rounded = (desc.mode == "mean") * count_roundings(desc.compute, desc.longest)
        return {"out": summing_ulp(desc.real, desc.longest, rounded + desc.per_sample_weights)}

    def bytes_moved(self) -> int:
        desc = self.descriptor
        rows = (desc.count + desc.bags) * desc.embedding_dim * desc.dtype.itemsize
        return rows + _bytes_read(desc)


class EmbeddingBagBackwardPlan(Plan[EmbeddingBagBackwardDescriptor, EmbeddingBagBackwardArgs]):
    """dweight[i] = the ordered sum, over all n with indices[n] == i in bag b, of the gradient by dout[b].

    dper_sample_weights[n] = the ordered sum over columns of weight[indices[n]] * dout[b].
    """

    def mode(self) -> str:
        desc = self.descriptor
        return (
            f"{'weighted_' * desc.per_sample_weights}{desc.mode}{'_by_frequency' * desc.scale_grad_by_freq}"
            f"{'_dweight' * desc.dweight}{'_dper_sample_weights' * desc.dper_sample_weights}"
        )

    def ulp(self) -> dict[str, float]:
        desc = self.descriptor
        rounded = (desc.mode == "mean") * count_roundings(desc.compute, desc.longest)
        rounded += desc.scale_grad_by_freq * count_roundings(desc.compute, desc.count)
        found = {}
        if desc.dweight:
            found["dweight"] = summing_ulp(desc.real, desc.count, rounded + desc.per_sample_weights)
        if desc.dper_sample_weights:
            found["dper_sample_weights"] = summing_ulp(desc.real, desc.embedding_dim, 1.0)
        return found

    def bytes_moved(self) -> int:
        desc = self.descriptor
        rows = desc.bags + desc.num_embeddings * desc.dweight
        rows += desc.count * (desc.expected("weight") is not None)
        weights = desc.count * desc.dper_sample_weights
        return (rows * desc.embedding_dim + weights) * desc.dtype.itemsize + _bytes_read(desc)


def _bytes_read(desc: BagDescriptor) -> int:
    """Bytes of the indices, offsets and per-sample weights."""
    offsets = 0 if desc.offsets is None else desc.offsets * desc.offsets_dtype.itemsize
    weights = desc.per_sample_weights * desc.dtype.itemsize
    return offsets + desc.count * (desc.index_dtype.itemsize + weights)

"""Mutants of the ordered sum: of segment_sum and of the gradient of embedding."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.core.dtypes import Float
from holdfast.core.mutant import Mutant, instead_of
from holdfast.numerics.reference import Array, narrow_bfloat16, store_gradient
from holdfast.ops.segment_sum.indexed import CHUNK
from holdfast.ops.segment_sum.reference import ordered_sum, sources_of

_SUMS = ("segment_sum forward", "embedding backward")


# The order and the type of the additions.


def in_one_go(terms: Array) -> Array:
    """One sequential sum without chunks."""
    total = np.zeros(terms.shape[1:], terms.dtype)
    for term in terms:
        total = total + term
    return total


def _chunks_of_half(terms: Array) -> Array:
    while len(terms) > 1:
        begins = range(0, len(terms), CHUNK // 2)
        terms = np.stack([in_one_go(terms[begin : begin + CHUNK // 2]) for begin in begins])
    return in_one_go(terms)


def backwards(terms: Array) -> Array:
    return ordered_sum(terms[::-1])


def _from_the_first(terms: Array) -> Array:
    """A sum that starts with its first term, which may be -0.0."""
    return terms[0] if len(terms) == 1 else ordered_sum(terms)


def _in_bfloat16(terms: Array) -> Array:
    total = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        bits = narrow_bfloat16((total + term).astype(np.float32)).astype(np.uint32)
        total = (bits << np.uint32(16)).view(np.float32)
    return total.astype(terms.dtype)


# Which terms are added, and to what.


def a_lost_duplicate(destinations: Array, segments: int) -> dict[int, Array]:
    """The first term of a row with several terms is lost, as in a race."""
    found = sources_of(destinations, segments)
    return {row: places[1:] if len(places) > 1 else places for row, places in found.items()}


def _from_the_end(destinations: Array, segments: int) -> dict[int, Array]:
    """A negative index that counts from the end, as in Python."""
    negative = (destinations < 0) & (destinations >= -segments)
    return sources_of(np.where(negative, destinations + segments, destinations), segments)


def _never_zeroed(out: torch.Tensor, sums: dict[int, Array], accumulate: bool, compute: Float) -> None:
    """Rows without terms keep their old values."""
    for row, total in sums.items():
        store_gradient(out[row], total, accumulate, compute)


MUTANTS = (
    Mutant("a lost duplicate", instead_of("sources_of", a_lost_duplicate), _SUMS),
    Mutant("a dropped chunk boundary", instead_of("ordered_sum", in_one_go), _SUMS),
    Mutant("chunks of half the size", instead_of("ordered_sum", _chunks_of_half), _SUMS),
    Mutant("terms in descending order", instead_of("ordered_sum", backwards), _SUMS),
    Mutant("a sum that may be -0.0", instead_of("ordered_sum", _from_the_first), _SUMS),
    Mutant("accumulation in bfloat16", instead_of("ordered_sum", _in_bfloat16), _SUMS),
    Mutant("rows without terms not zeroed", instead_of("store_rows", _never_zeroed), _SUMS),
    Mutant("negative indices from the end", instead_of("sources_of", _from_the_end), _SUMS),
)

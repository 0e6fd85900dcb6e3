"""Mutants of embedding, its gradient and segment_sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.core.dtypes import Float
from holdfast.core.mutant import Mutant, Run, changed, described, instead_of
from holdfast.core.plan import AnyPlan, Args
from holdfast.numerics.reference import Array, accumulated, narrow_bfloat16, store
from holdfast.ops.segment_sum.indexed import CHUNK
from holdfast.ops.segment_sum.reference import ordered_sum, sources_of

_FORWARD, _BACKWARD = ("embedding forward",), ("embedding backward",)
_SUMS = ("segment_sum forward", *_BACKWARD)


# The order and the type of the additions.


def _in_one_go(terms: Array) -> Array:
    """One sequential sum without chunks."""
    with np.errstate(all="ignore"):
        total = np.zeros(terms.shape[1:], terms.dtype)
        for term in terms:
            total = total + term
        return total


def _chunks_of_half(terms: Array) -> Array:
    with np.errstate(all="ignore"):
        while len(terms) > 1:
            begins = range(0, len(terms), CHUNK // 2)
            terms = np.stack([_in_one_go(terms[begin : begin + CHUNK // 2]) for begin in begins])
        return _in_one_go(terms)


def _backwards(terms: Array) -> Array:
    return ordered_sum(terms[::-1])


def _from_the_first(terms: Array) -> Array:
    """A sum that starts with its first term, which may be -0.0."""
    return terms[0] if len(terms) == 1 else ordered_sum(terms)


def _in_bfloat16(terms: Array) -> Array:
    with np.errstate(all="ignore"):
        total = np.zeros(terms.shape[1:], np.float32)
        for term in terms:
            bits = narrow_bfloat16((total + term).astype(np.float32)).astype(np.uint32)
            total = (bits << np.uint32(16)).view(np.float32)
        return total.astype(terms.dtype)


# Which terms are added, and to what.


def _a_lost_duplicate(destinations: Array, segments: int) -> dict[int, Array]:
    """The first term of a row with several terms is lost, as in a race."""
    found = sources_of(destinations, segments)
    return {row: places[1:] if len(places) > 1 else places for row, places in found.items()}


def _from_the_end(destinations: Array, segments: int) -> dict[int, Array]:
    """A negative index that counts from the end, as in Python."""
    wrapped = np.where(
        (destinations < 0) & (destinations >= -segments), destinations + segments, destinations
    )
    return sources_of(wrapped, segments)


def _nothing_is_padding(indices: Array, padding: int) -> Array:
    return indices


def _never_zeroed(out: torch.Tensor, sums: dict[int, Array], accumulate: bool, compute: Float) -> None:
    """Rows without terms keep their old values."""
    for row, total in sums.items():
        store(out[row], accumulated(out[row], total, compute) if accumulate else total)


def _nearest_row(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    """A bad index reads the first or the last row."""
    indices: torch.Tensor = args.indices  # type: ignore[attr-defined]
    run(changed(args, indices=indices.clamp(0, max(desc.rows - 1, 0))))


def _wrapped(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    """A bad index is taken modulo the number of rows."""
    indices: torch.Tensor = args.indices  # type: ignore[attr-defined]
    run(changed(args, indices=indices.remainder(max(desc.rows, 1))))


def _neighbours_row(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    weight: torch.Tensor = args.weight  # type: ignore[attr-defined]
    run(changed(args, weight=weight.roll(1, 0)))


MUTANTS = (
    Mutant("a lost duplicate", instead_of("sources_of", _a_lost_duplicate), _SUMS),
    Mutant("a dropped chunk boundary", instead_of("ordered_sum", _in_one_go), _SUMS),
    Mutant("chunks of half the size", instead_of("ordered_sum", _chunks_of_half), _SUMS),
    Mutant("terms in descending order", instead_of("ordered_sum", _backwards), _SUMS),
    Mutant("a sum that may be -0.0", instead_of("ordered_sum", _from_the_first), _SUMS),
    Mutant("accumulation in bfloat16", instead_of("ordered_sum", _in_bfloat16), _SUMS),
    Mutant("rows without terms not zeroed", instead_of("store_rows", _never_zeroed), _SUMS),
    Mutant("negative indices from the end", instead_of("sources_of", _from_the_end), _SUMS),
    Mutant("an unskipped padding row", instead_of("kept_indices", _nothing_is_padding), _BACKWARD),
    Mutant("no division by the frequency", described(scale_grad_by_freq=False), _BACKWARD),
    Mutant("a bad index reads the nearest row", _nearest_row, _FORWARD),
    Mutant("a bad index wraps around", _wrapped, _FORWARD),
    Mutant("a neighbour's row", _neighbours_row, _FORWARD),
)

"""Mutants of embedding_bag and its gradients."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.core.mutant import Mutant, described, instead_of
from holdfast.numerics.reference import Array
from holdfast.ops.embedding_bag.plan import BagDescriptor
from holdfast.ops.embedding_bag.reference import begins_of, chosen_places, kept_indices
from holdfast.ops.segment_sum.mutants import a_lost_duplicate, backwards, in_one_go

_FORWARD, _BACKWARD = ("embedding_bag forward",), ("embedding_bag backward",)
_BOTH = (*_FORWARD, *_BACKWARD)


def _nothing_is_padding(indices: torch.Tensor, rows: int, padding: int) -> Array:
    return kept_indices(indices, rows, -1)


def _all_indices(kept: Array) -> int:
    """The mean counts padding."""
    return len(kept)


def _times_the_reciprocal(terms: Array, amount: int) -> Array:
    return np.asarray(terms * (terms.dtype.type(1) / terms.dtype.type(max(amount, 1))))


def _last_of_equals(rows: Array, kept: Array) -> Array:
    found = chosen_places(rows[::-1], kept[::-1])
    return np.where(found >= 0, len(rows) - 1 - found, -1)


def _nan_is_least(rows: Array, kept: Array) -> Array:
    """NaN loses every comparison."""
    return chosen_places(np.where(np.isnan(rows), -np.inf, rows), kept)


def _to_the_end(desc: BagDescriptor, offsets: torch.Tensor | None) -> Array:
    """The last bag always ends with the indices, as if without the last offset."""
    begins = begins_of(desc, offsets)
    return np.append(begins[:-1], desc.count) if desc.bags else begins


def _whatever_the_weight(terms: Array, weights: Array, kept: Array) -> Array:
    """Skipped terms are multiplied too."""
    return np.asarray(terms * weights[:, None])


def _weights_ignored(terms: Array, weights: Array, kept: Array) -> Array:
    return terms


MUTANTS = (
    Mutant("a lost duplicate in a bag", instead_of("sources_of", a_lost_duplicate), _BACKWARD),
    Mutant("a dropped chunk boundary in a bag", instead_of("ordered_sum", in_one_go), _BOTH),
    Mutant("a bag in descending order", instead_of("ordered_sum", backwards), _BOTH),
    Mutant("padding in a bag", instead_of("kept_indices", _nothing_is_padding), _BOTH),
    Mutant("a mean over padding", instead_of("counted_indices", _all_indices), _BOTH),
    Mutant("a mean by the reciprocal", instead_of("divided_by", _times_the_reciprocal), _BOTH),
    Mutant("the last of equal maxima", instead_of("chosen_places", _last_of_equals), _BACKWARD),
    Mutant("a maximum that loses NaN", instead_of("chosen_places", _nan_is_least), _BOTH),
    Mutant("a last bag to the end", instead_of("begins_of", _to_the_end), _BOTH),
    Mutant("weights on what is left out", instead_of("weighted", _whatever_the_weight), _FORWARD),
    Mutant("weights ignored", instead_of("weighted", _weights_ignored), _BOTH),
    Mutant("no division by the frequency in bags", described(scale_grad_by_freq=False), _BACKWARD),
)

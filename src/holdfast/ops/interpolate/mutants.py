"""Mutants of interpolate and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from holdfast.core.mutant import Mutant, described, instead_of
from holdfast.numerics.reference import Array
from holdfast.ops.interpolate import reference
from holdfast.ops.interpolate.tables import Table

_F, _B = ("interpolate forward",), ("interpolate backward",)
_ANY = _F + _B

_summed, _resampled = reference.summed, reference.resampled


def _z_first(values: Array, tables: Sequence[Table]) -> Array:
    for number, table in reversed(list(enumerate(tables[: values.ndim - 2]))):
        values = _summed(values, table, values.ndim - 1 - number)
    return values


def _last_tap_lost(values: Array, table: Table, axis: int) -> Array:
    return _summed(values, _Shorter(table.first, table.count, table.weights), axis)


class _Shorter(Table):
    """A table whose sums lack the last tap of the longest ones."""

    @property
    def most(self) -> int:
        return max(int(self.count.max()) - 1, 1)


def _in_float64(values: Array, table: Table, axis: int) -> Array:
    return _summed(values.astype(np.float64), table, axis).astype(values.dtype)


def _moved(values: Array, table: Table, axis: int) -> Array:
    first = np.minimum(table.first + 1, values.shape[axis] - table.count)
    return _summed(values, replace(table, first=first), axis)


def _one_weight(values: Array, table: Table, axis: int) -> Array:
    return _summed(values, replace(table, weights=np.ones_like(table.weights)), axis)


MUTANTS = (
    Mutant("sums over z first", instead_of("resampled", _z_first), _ANY),
    Mutant("last tap lost", instead_of("summed", _last_tap_lost), _ANY),
    Mutant("sums in float64", instead_of("summed", _in_float64), _ANY),
    Mutant("one index too far", instead_of("summed", _moved), _ANY),
    Mutant("weights ignored", instead_of("summed", _one_weight), _ANY),
    Mutant("align_corners ignored", described(align_corners=False), _ANY),
    Mutant("antialias ignored", described(antialias=False), _ANY),
    Mutant("scales ignored", described(scales=None), _ANY),
)

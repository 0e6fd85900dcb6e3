"""Exact interpolate and its gradient, with the weights of the tables rounded to the compute type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np

from exact.element import Element, sampled, summed
from exact.indexed import numbers
from exact.numbers import Array, Exact, ulp
from holdfast.ops.interpolate.tables import Table


def interpolate(desc: Any, args: Any) -> Iterator[Element]:
    return _resampled(desc, "out", desc.output_shape, args.input, desc.tables())


def interpolate_backward(desc: Any, args: Any) -> Iterator[Element]:
    return _resampled(desc, "dinput", desc.shape, args.dout, desc.transposed_tables())


def _resampled(
    desc: Any, output: str, shape: Sequence[int], source: Any, tables: Sequence[Table]
) -> Iterator[Element]:
    values = numbers(source)
    for place in sampled(prod(shape)):
        n, c, *at = map(int, np.unravel_index(place, shape))
        taps = [_taps(table, i, desc) for table, i in zip(tables, reversed(at), strict=False)]
        windows = [window for window, _ in reversed(taps)]
        read = values[(n, c, *windows)]
        if not np.isfinite(read).all():
            continue
        terms = Exact.of(read)
        for axis, (_, weights) in enumerate(reversed(taps)):
            terms = terms * Exact.of(weights.reshape(-1, *[1] * (desc.axes - 1 - axis)))
        # Each product below the normal range may lose half of the smallest number, times weights below 2.
        lost = 2 * desc.axes * read.size * ulp(Fraction(0), desc.compute.torch)
        yield summed(output, place, terms, lost=lost)


def _taps(table: Table, index: int, desc: Any) -> tuple[slice, Array]:
    first, count, start = (int(row[index]) for row in (table.first, table.count, table.start))
    return slice(first, first + count), table.weights[start : start + count].astype(desc.compute.name)

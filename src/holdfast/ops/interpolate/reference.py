"""interpolate and its gradient in NumPy, the definition. Each operation is rounded separately.

    out[z, y, x] = sum over taps of z: wz * (sum over taps of y: wy * (sum over taps of x: wx * input))

The taps of an axis are in ascending order. A sum starts with its first product; an empty sum, which only the
gradient has, is +0.0. The sum over x depends on z and y only by the row that it reads, so all sums over x are
made first, then those over y, then those over z: this is the nested sum, in every bit.

The gradient is the same sum over dout, with the transposed tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.numerics import reference as numerics
from holdfast.numerics.reference import Array
from holdfast.ops.interpolate import plan as plans
from holdfast.ops.interpolate.tables import Table


def summed(values: Array, table: Table, axis: int) -> Array:
    """The sums over the taps along ``axis``."""
    values = np.moveaxis(values, axis, -1)
    weights, total = table.weights.astype(values.dtype), np.zeros((*values.shape[:-1], len(table.count)))
    total = total.astype(values.dtype)
    with np.errstate(all="ignore"):
        for number in range(table.most):
            index = np.flatnonzero(number < table.count)
            product = weights[table.start[index] + number] * values[..., table.first[index] + number]
            total[..., index] = product if number == 0 else total[..., index] + product
    return np.moveaxis(total, -1, axis)


def resampled(values: Array, tables: Sequence[Table]) -> Array:
    """The nested sum over x, then y, then z; x is the last axis."""
    for number, table in enumerate(tables[: values.ndim - 2]):
        values = summed(values, table, values.ndim - 1 - number)
    return values


class Interpolate(numerics.ReferenceKernel[plans.InterpolateDescriptor]):
    def run(self, args: plans.InterpolateArgs) -> None:
        values = numerics.widen(args.input, self.desc.compute)
        numerics.store(args.out, resampled(values, self.desc.tables()))


class InterpolateBackward(numerics.ReferenceKernel[plans.InterpolateBackwardDescriptor]):
    def run(self, args: plans.InterpolateBackwardArgs) -> None:
        compute = self.desc.compute
        dinput = resampled(numerics.widen(args.dout, compute), self.desc.transposed_tables())
        numerics.store_gradient(args.dinput, dinput, args.accumulate, compute)

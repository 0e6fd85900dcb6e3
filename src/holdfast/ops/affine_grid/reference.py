"""affine_grid and its gradient in NumPy, the definition. Each operation is rounded separately.

    grid[n, place, j]  = ((theta[n, j, 0] * x + theta[n, j, 1] * y) + theta[n, j, 2] * z) + theta[n, j, 3]
    dtheta[n, j, k]    = tree sum over places in row-major order: dgrid[n, place, j] * (x, y, z or 1)

A place is one point of the grid. In two dimensions there is no z. The coordinates x, y and z are correctly
rounded quotients of integers.
"""

from __future__ import annotations

import numpy as np

from holdfast.numerics import reference as numerics
from holdfast.numerics.reference import Array
from holdfast.ops.affine_grid import plan as plans
from holdfast.ops.tree_sum.reference import tree_sum


def coordinates(size: int, desc: plans.MapDescriptor) -> Array:
    """Coordinates of the ``size`` places along an axis, from -1 to 1; a single place is at 0."""
    kind = numerics.compute_type(desc.compute)
    steps = size - 1 if desc.align_corners else size
    twice: Array = (2 * np.arange(size) - (size - 1)).astype(kind)
    found: Array = twice / np.array(max(steps, 1), kind)
    return found


def places(desc: plans.MapDescriptor) -> list[Array]:
    """x, y and z of every place, each in row-major order."""
    along = [coordinates(size, desc) for size in desc.output_size]
    return [axis.reshape(-1) for axis in reversed(np.meshgrid(*along, indexing="ij"))]


def affine_grid(theta: Array, desc: plans.MapDescriptor) -> Array:
    """The grid, of shape (N, places, axes)."""
    found = []
    with np.errstate(all="ignore"):
        for j in range(desc.axes):
            total = None
            for k, along in enumerate(places(desc)):
                term = theta[:, j, k, None] * along
                total = term if total is None else total + term
            found.append(total + theta[:, j, desc.axes, None])
    return np.stack(found, axis=-1)


def gradient_of_theta(dgrid: Array, desc: plans.MapDescriptor) -> Array:
    """dtheta, of shape (N, axes, axes + 1)."""
    ones = np.ones(desc.places, dgrid.dtype)
    with np.errstate(all="ignore"):
        columns = [tree_sum(dgrid.transpose(0, 2, 1) * along) for along in [*places(desc), ones]]
    return np.stack(columns, axis=-1)


class AffineGrid(numerics.ReferenceKernel[plans.AffineGridDescriptor]):
    def run(self, args: plans.AffineGridArgs) -> None:
        desc = self.desc
        numerics.store(args.grid, affine_grid(numerics.widen(args.theta, desc.compute), desc))


class AffineGridBackward(numerics.ReferenceKernel[plans.AffineGridBackwardDescriptor]):
    def run(self, args: plans.AffineGridBackwardArgs) -> None:
        desc, compute = self.desc, self.desc.compute
        dgrid = numerics.widen(args.dgrid, compute).reshape(desc.batch, desc.places, desc.axes)
        dtheta = gradient_of_theta(dgrid, desc)
        numerics.store_gradient(args.dtheta, dtheta, args.accumulate, compute)

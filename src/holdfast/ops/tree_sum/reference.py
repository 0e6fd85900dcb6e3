"""The tree sum, in NumPy: the sum of many terms in an order that has nothing to do with the machine.

Terms are laid out in blocks of 16 rows of 256 lanes, filled up with zeros. Each lane adds its rows from first
to last, starting from +0.0; the lanes are halved by adding neighbours until one is left. The sums of the
blocks are added in the same way, until one is left. A lane is never -0.0, so a zero more or less changes no
bit. So rows and lanes of nothing but padding are left out, and short segments take little memory.
"""

from __future__ import annotations

import numpy as np

from holdfast.core.granularity import ScaleView
from holdfast.core.segments import segment_length
from holdfast.numerics.reference import Array
from holdfast.ops.tree_sum.blocks import LANES, ROWS, blocks_of, lanes_of


def tree_sum(terms: Array) -> Array:
    """The sum along the last axis."""
    while True:
        *shape, length = terms.shape
        blocks, lanes = blocks_of(length), lanes_of(length)
        rows = min(ROWS, max(1, -(-length // LANES)))
        padded = np.zeros((*shape, blocks * rows * lanes), terms.dtype)
        padded[..., :length] = terms
        terms = _block_sums(padded.reshape(*shape, blocks, rows, lanes))
        if blocks == 1:
            return terms[..., 0]


def _block_sums(blocks: Array) -> Array:
    """The sum of each [rows, lanes] of the last two axes."""
    with np.errstate(all="ignore"):
        lanes = np.zeros((*blocks.shape[:-2], blocks.shape[-1]), blocks.dtype)
        for row in range(blocks.shape[-2]):
            lanes = lanes + blocks[..., row, :]
        while lanes.shape[-1] > 1:
            lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def by_segment(values: Array, view: ScaleView) -> Array:
    """A tensor's values in the shape of its scales, with the elements of each along one axis more."""
    over = [d for d, varies in enumerate(view.varies) if varies]
    within = [d for d, varies in enumerate(view.varies) if not varies]
    return (
        values.reshape(view.shape).transpose(*over, *within).reshape(*view.scale_shape, segment_length(view))
    )

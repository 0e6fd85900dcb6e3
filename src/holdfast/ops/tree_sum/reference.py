"""The tree sum, in NumPy: a sum whose order of additions depends on the number of terms alone.

Terms are laid out in blocks of 16 rows of 256 lanes, padded with zeros. Each lane adds its rows from first to
last, starting from +0.0; then neighbouring lanes are added until one is left. The block sums are added in the
same way until one is left. A lane is never -0.0, so adding a padding zero changes no bit. Rows and lanes that
hold only padding are therefore omitted, which saves memory for short segments.
"""

from __future__ import annotations

import numpy as np

from holdfast.core.granularity import ScaleView
from holdfast.core.segments import segment_length
from holdfast.numerics.reference import Array
from holdfast.ops.tree_sum.blocks import LANES, ROWS, blocks_of, lanes_of


def tree_sum(terms: Array) -> Array:
    """Sum along the last axis."""
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
    """Sum over the last two axes, [rows, lanes]."""
    with np.errstate(all="ignore"):
        lanes = np.zeros((*blocks.shape[:-2], blocks.shape[-1]), blocks.dtype)
        for row in range(blocks.shape[-2]):
            lanes = lanes + blocks[..., row, :]
        while lanes.shape[-1] > 1:
            lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def by_segment(values: Array, view: ScaleView) -> Array:
    """Reshape ``values`` to [*scale_shape, segment length]: the elements of each scale are the last axis."""
    over = [d for d, varies in enumerate(view.varies) if varies]
    within = [d for d, varies in enumerate(view.varies) if not varies]
    return (
        values.reshape(view.shape).transpose(*over, *within).reshape(*view.scale_shape, segment_length(view))
    )

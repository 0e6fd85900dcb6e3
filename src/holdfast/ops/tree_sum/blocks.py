"""Block sizes of the tree sum, and the number of its roundings."""

from __future__ import annotations

#: A block of the tree sum: ROWS rows of LANES lanes.
LANES = 256
ROWS = 16
BLOCK = ROWS * LANES


def blocks_of(length: int) -> int:
    """Number of blocks of a segment of ``length`` elements; 1 if it is empty."""
    return max(1, -(-length // BLOCK))


def lanes_of(length: int) -> int:
    """Number of lanes that a segment of ``length`` elements uses: a power of two."""
    return 1 << (min(max(length, 1), LANES) - 1).bit_length()


def levels(length: int) -> tuple[int, ...]:
    """Number of sums per segment after each level of the tree; the last is 1."""
    counts = [blocks_of(length)]
    while counts[-1] > 1:
        counts.append(blocks_of(counts[-1]))
    return tuple(counts)


def rounding_errors(length: int) -> int:
    """Maximum number of rounded additions between a term and the total.

    Each level of the tree has one per row of a block, except the first row, which is added to zero, and one
    per halving of the lanes. Adding a padding zero is exact.
    """
    additions = 0
    while length > 1:
        rows, lanes = -(-min(length, BLOCK) // LANES), min(length, LANES)
        additions += rows - 1 + (lanes - 1).bit_length()
        length = blocks_of(length)
    return additions

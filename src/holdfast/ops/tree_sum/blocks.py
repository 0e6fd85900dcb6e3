"""How the tree sum cuts a segment into blocks, and how often that rounds a term."""

from __future__ import annotations

#: A block of the tree sum: ROWS rows of LANES lanes.
LANES = 256
ROWS = 16
BLOCK = ROWS * LANES


def blocks_of(length: int) -> int:
    """The blocks that a segment of ``length`` elements fills; one if it is empty."""
    return max(1, -(-length // BLOCK))


def lanes_of(length: int) -> int:
    """The lanes that the elements of a segment need within a block: a power of two."""
    return 1 << (min(max(length, 1), LANES) - 1).bit_length()


def levels(length: int) -> tuple[int, ...]:
    """How many sums each level of the tree leaves of a segment; the last leaves one."""
    counts = [blocks_of(length)]
    while counts[-1] > 1:
        counts.append(blocks_of(counts[-1]))
    return tuple(counts)


def rounding_errors(length: int) -> int:
    """The most additions that round a term on its way to the total.

    At each level of the tree these are the rows of a block but the first, which is added to zero, and the
    halvings of its lanes; an addition of a zero that fills up a block is exact.
    """
    additions = 0
    while length > 1:
        rows, lanes = -(-min(length, BLOCK) // LANES), min(length, LANES)
        additions += rows - 1 + (lanes - 1).bit_length()
        length = blocks_of(length)
    return additions

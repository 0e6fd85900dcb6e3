"""Random problem sizes for ``holdfast bench --drawn``. They depend on the label and the limit alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

import torch

from holdfast.core.training_step import StepCase

#: Fewest bytes of a problem's tensors.
LEAST_BYTES = 2**10
#: The dtypes, and how often each is drawn.
REALS = {torch.float32: 2, torch.bfloat16: 1}

T = TypeVar("T")


class RandomSizes:
    """The random choices of one problem. Logarithms of sizes are uniform.

    ``elements`` is the number of elements of the input and the output together.
    """

    def __init__(self, label: str, most_bytes: int) -> None:
        self._random = Random(label)
        self.real = self.one_of(list(REALS), list(REALS.values()))
        self.elements = self._uniform(LEAST_BYTES, most_bytes) // self.real.itemsize

    def one_of(self, options: Sequence[T], weights: Sequence[int] | None = None) -> T:
        return self._random.choices(options, weights)[0]

    def chance(self, one_in: int) -> bool:
        return self._random.randrange(one_in) == 0

    def size(self, least: int, most: int) -> int:
        """A size from ``least`` to ``most``. Every second one is two or three times a power of two."""
        found = self._uniform(least, most)
        if self.chance(2):
            dropped = max(found.bit_length() - 2, 0)
            return max(found >> dropped << dropped, least)
        return found

    def near(self, size: float, factor: float) -> int:
        """A size up to ``factor`` times larger or smaller than ``size``."""
        return max(1, round(size * math.pow(factor, self._random.uniform(-1, 1))))

    def image(self, pixels: int, axes: int) -> tuple[int, ...]:
        """The sizes of an image of about ``pixels`` pixels. Its sides differ by a factor of up to four."""
        sizes: list[int] = []
        for left in range(axes, 1, -1):
            sizes.append(min(self.near(pixels ** (1 / left), 2), pixels))
            pixels = max(1, pixels // sizes[-1])
        return (*sizes, pixels)

    def _uniform(self, least: int, most: int) -> int:
        least = max(least, 1)
        if most <= least:
            return least
        return round(2 ** self._random.uniform(math.log2(least), math.log2(most)))


#: Draws a problem of one public function.
DrawCase = Callable[[RandomSizes], StepCase]

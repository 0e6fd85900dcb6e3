"""Tuning records: tile sizes, warps and thresholds of kernels. They change the speed, but no bit of a result.

A kernel family has one frozen record for GPUs and one for Triton's interpreter. Interpreting a program takes
the same time for any tile size, so the interpreter's tiles are large.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_as_on_gpu = False


class Tuned(Generic[T]):
    """The tuning records of one kernel family. The record of the interpreter defaults to that of GPUs."""

    def __init__(self, gpu: T, interpreter: T | None = None) -> None:
        self._gpu, self._interpreter = gpu, gpu if interpreter is None else interpreter
        self._changes: dict[str, Any] = {}

    def on(self, device: torch.device) -> T:
        """The record for kernels on ``device``. Kernels on the CPU are interpreted."""
        record: Any = self._gpu if device.type != "cpu" or _as_on_gpu else self._interpreter
        return replace(record, **self._changes) if self._changes else record

    @contextmanager
    def replaced(self, **changes: Any) -> Iterator[None]:
        """Change fields of the record, for plans that are selected inside the block."""
        before, self._changes = self._changes, self._changes | changes
        try:
            yield
        finally:
            self._changes = before


def constants_of(record: Any) -> dict[str, Any]:
    """The fields of a record as constexpr parameters of a kernel, which have the same names in capitals."""
    return {name.upper(): value for name, value in vars(record).items()}


def warps_for(elements: int, most: int) -> int:
    """Warps of a program with a tile of ``elements`` elements: 256 elements per warp, ``most`` at most."""
    return max(1, min(most, elements // 256))


@contextmanager
def tuned_as_on_gpu() -> Iterator[None]:
    """Use the records of GPUs in the interpreter too, for plans that are selected inside the block."""
    global _as_on_gpu
    before, _as_on_gpu = _as_on_gpu, True
    try:
        yield
    finally:
        _as_on_gpu = before

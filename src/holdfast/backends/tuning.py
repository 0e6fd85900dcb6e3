"""Tile sizes, warps and thresholds of kernels: what changes their speed and no bit of their results.

A kernel family has a frozen record of these, with one instance for GPUs and one for Triton's interpreter. To
the interpreter a program costs the same however much it does, so its tiles are large.
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
    """The tuning records of one kernel family. Without one for the interpreter it takes that of GPUs."""

    def __init__(self, gpu: T, interpreter: T | None = None) -> None:
        self._gpu, self._interpreter = gpu, gpu if interpreter is None else interpreter
        self._changes: dict[str, Any] = {}

    def on(self, device: torch.device) -> T:
        """The record for kernels on ``device``. Kernels on the CPU are interpreted."""
        record: Any = self._gpu if device.type != "cpu" or _as_on_gpu else self._interpreter
        return replace(record, **self._changes) if self._changes else record

    @contextmanager
    def replaced(self, **changes: Any) -> Iterator[None]:
        """Change fields of the record meanwhile, for plans that are selected meanwhile."""
        before, self._changes = self._changes, self._changes | changes
        try:
            yield
        finally:
            self._changes = before


@contextmanager
def tuned_as_on_gpu() -> Iterator[None]:
    """Use the records of GPUs in the interpreter too, for plans that are selected meanwhile."""
    global _as_on_gpu
    before, _as_on_gpu = _as_on_gpu, True
    try:
        yield
    finally:
        _as_on_gpu = before

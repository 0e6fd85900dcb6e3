"""The task of interpolate's CPU kernels, whose threads take ranges of units without Python."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.backends.cpu import TeamKernel, jit, pointer
from holdfast.backends.private import task_bytes, task_of
from holdfast.backends.scratch import Scratch
from holdfast.backends.threads import run_together, threads_together
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace

#: Rows of the table: first tap, number of taps, first weight. Then how many elements from this one on have as
#: many taps, have first taps that are 2 apart, and have up to 2 taps while their numbers vary.
FIRST, COUNT, START, SAME, EVEN, VARYING = range(6)
#: The numbers of a task that all kernels have, of which the first 7 differ between calls: the next unit and
#: the number of threads that have started, which the threads share; the number of threads that have scratch
#: memory, its address, the units of a range, and the addresses of the output and of the source. Then the
#: scratch bytes of a thread, the number of units, the addresses of the table and of the weights, the columns
#: of the table, the kind of the elements, and whether the result is added to the output.
SHARED, _VARIABLES = 14, 7
#: Ranges of units per thread.
_RANGES = 4


@jit
def table_at(spans, columns, weights, like):
    """The rows of the table, and the weights, as pointers to their addresses."""
    rows = (
        pointer(spans, np.int32), pointer(spans + 4 * columns, np.int32),
        pointer(spans + 8 * columns, np.int32), pointer(spans + 12 * columns, np.int32),
        pointer(spans + 16 * columns, np.int32), pointer(spans + 20 * columns, np.int32),
    )  # fmt: skip
    return rows, pointer(weights, like)


class Units(NamedTuple):
    """The units of work of a kernel: their number, and about how many products they have together."""

    number: int
    products: int


class Resampling:
    """Runs of ``kernel`` for tensors of one layout. ``numbers`` are those that only this kernel has."""

    def __init__(
        self,
        kernel: TeamKernel,
        scratch: Scratch,
        table: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
        units: Units,
        kind: int,
        accumulate: bool,
        numbers: Sequence[int],
    ) -> None:
        spans, weights = self._table = table  # in use
        self._units, self._products = units
        self._scratch = scratch
        self._kernel = kernel.compiled(weights.dtype.type(0))
        self._task = task_of(SHARED + len(numbers) + 1)
        addresses = (torch.from_numpy(array).data_ptr() for array in table)
        self._constants = task_bytes(
            *[0] * _VARIABLES, scratch.size, units.number, *addresses, spans.shape[1], kind,
            accumulate, *numbers, 0,
        )  # fmt: skip

    def run(self, stream: int, workspace: int, out: int, source: int) -> None:
        """Resample tensors at these addresses, on torch's number of threads."""
        threads = threads_together(self._products)
        share = self._units if threads == 1 else -(-self._units // (_RANGES * threads))
        task = self._task.from_buffer_copy(self._constants)
        task[:_VARIABLES] = (0, 0, threads, self._scratch.of_team(threads), max(share, 1), out, source)
        run_together(self._kernel, task, self._products)

    @property
    def launch(self) -> Launch[Any]:
        run = self.run

        def launch(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
            run(0, 0, *addresses)

        launch.bound = lambda args: run  # type: ignore[attr-defined]
        return launch

"""Tasks of the grid_sample kernels on the CPU: the numbers that describe a problem, in memory.

All threads of a team read one task. Its first numbers differ between calls; the others are those of a
descriptor and of the layouts of its tensors.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.backends.cpu import TeamKernel, jit, pointer
from holdfast.backends.private import task_of
from holdfast.backends.threads import run_together
from holdfast.core.dtypes import Float
from holdfast.numerics.cpu import kind
from holdfast.numerics.cpu_walk import number, table_of, walk_of
from holdfast.ops.grid_sample.cpu_coordinates import MODES, PADDINGS
from holdfast.ops.grid_sample.plan import MARGIN, TAPS, SampleDescriptor
from holdfast.ops.segment_sum.indexed import loops

# Positions of the numbers. The threads share the first two: the next unit of work, and the number of threads
# that have started. Then the number of units of work, how many a thread takes at once, the step, a unit of
# dinput, the address of the scratch memory, and the addresses of the tensors.
NEXT, THREAD, END, SHARE, STEP, UNIT, BASE, ADDRESSES = range(8)
#: The tensors of a task. The third is the output, or its gradient.
GRID, IMAGE, OUT, DINPUT, DGRID = range(5)
_TENSORS, _VARIABLES = 5, ADDRESSES + 5
# A tensor has 5 numbers: kind, image stride, stride of the channels or of the grid's axes, address of the
# table of the loops over samples or pixels, number of these loops.
_LAYOUTS = _VARIABLES
_EXTENT = _LAYOUTS + 5 * _TENSORS
_FORM, _SIZES, _NUMBERS_AT = _EXTENT + 4, _EXTENT + 9, _EXTENT + 12
STEPS, OWN_STEPS = _EXTENT + 13, _EXTENT + 17
SLOT_BYTES, SLOTS, _REGIONS = _EXTENT + 21, _EXTENT + 22, _EXTENT + 23
_REGION_COUNT = 10
PARTS, GROUP, UNITS, JOINT, BITS, LEVELS, ACCUMULATE, SPARSE = range(
    _REGIONS + _REGION_COUNT, _REGIONS + _REGION_COUNT + 8
)
# Numbers of the bands: offset of their sums in the scratch memory, room in rows of the image, whether it is
# enough.
BANDS, ROOM, FITS = range(SPARSE + 1, SPARSE + 4)
NUMBERS = FITS + 1

Table = np.ndarray[Any, Any]
NO_TABLE = table_of((1,), (1,))


@jit
def tensor_of(numbers, which):
    """(address, kind, image stride, axis stride, walk) of a tensor."""
    at = _LAYOUTS + 5 * which
    walk = (numbers[at + 3], numbers[at + 4])
    return numbers[ADDRESSES + which], numbers[at], numbers[at + 1], numbers[at + 2], walk


@jit
def extent_of(numbers):
    """(channels, pixels, samples, corners)"""
    return numbers[_EXTENT], numbers[_EXTENT + 1], numbers[_EXTENT + 2], numbers[_EXTENT + 3]


@jit
def _axis_of(values, at):
    return values[at], values[at + 1], values[at + 2], values[at + 3], values[at + 4], values[at + 5]


@jit
def problem_of(numbers, like):
    """(form, sizes, numbers) as in ``find_taps``."""
    at = _FORM
    form = (numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3], numbers[at + 4])
    sizes = (numbers[_SIZES], numbers[_SIZES + 1], numbers[_SIZES + 2])
    values = pointer(numbers[_NUMBERS_AT], like)
    return form, sizes, (_axis_of(values, 0), _axis_of(values, 6), _axis_of(values, 12))


@jit
def steps_of(numbers, at):
    """The strides along x, y and z, and whether all offsets are int32."""
    return numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3] != 0


@jit
def rows_of_sums(problem, own_steps):
    """``rows`` of ``place_of``, for sums with these strides."""
    return problem[1][0], own_steps[1] - problem[1][0]


@jit
def runs_of(numbers, slot):
    """Addresses of the tables and runs of a slot."""
    base, at = numbers[BASE] + slot * numbers[SLOT_BYTES], _REGIONS
    return (
        base + numbers[at], base + numbers[at + 1], base + numbers[at + 2], base + numbers[at + 3],
        base + numbers[at + 4], base + numbers[at + 5], base + numbers[at + 6],
    )  # fmt: skip


@jit
def sums_of(numbers, slot):
    """Addresses of the other regions of a slot: sums or facts, shifts, totals; or the copy of the image."""
    base, at = numbers[BASE] + slot * numbers[SLOT_BYTES], _REGIONS + 7
    return base + numbers[at], base + numbers[at + 1], base + numbers[at + 2]


def _axis_numbers(size: int, desc: SampleDescriptor) -> tuple[float, ...]:
    """Constants of an axis.

    The size, the last pixel, a coordinate beyond the image, pixels per unit of the grid, the coordinate of
    the first mirror, and the period of the reflection.
    """
    size_or_steps = size - 1 if desc.align_corners else size
    first_mirror = 0 if desc.align_corners else -0.5
    return (size, size - 1, size + MARGIN - 1, size_or_steps / 2, first_mirror, 2 * size_or_steps)


class Layout(NamedTuple):
    """The layout of a tensor: kind, image stride, axis stride, table of the loops over samples or pixels."""

    kind: int
    image_step: int
    axis_step: int
    table: Table

    @classmethod
    def of(cls, tensor: torch.Tensor | None, axis: int, compute: Float, sizes: Sequence[int]) -> Layout:
        """The layout of a tensor; ``axis`` is that of the channels, or of the coordinates of a grid."""
        if tensor is None:
            return cls(compute.bits // 8, 0, 0, NO_TABLE)
        strides = tensor.stride()[1:-1] if axis == -1 else tensor.stride()[2:]
        walk = loops(sizes, strides)
        table = table_of(walk.sizes, walk.strides[0])
        return cls(kind(tensor.dtype, compute.torch), tensor.stride(0), tensor.stride(axis), table)

    @property
    def numbers(self) -> tuple[int, ...]:
        """As in a task. The table must be kept."""
        return self.kind, self.image_step, self.axis_step, *walk_of(self.table)


def memory_steps(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int, bool]:
    """The strides along x, y and z, and whether all offsets are int32."""
    span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    x, y, z = (*reversed(strides), 0)[:3]
    return x, y, z, span < 2**31


class Slots(NamedTuple):
    """Scratch memory: number of slots, bytes of a slot, and the offsets of its regions."""

    number: int
    bytes: int
    offsets: list[int]


class Template:
    """Makes tasks of a kernel for tensors of one layout.

    ``rest`` are the numbers from PARTS on. ``elements`` decides whether a team runs a task.
    """

    def __init__(
        self,
        kernel: TeamKernel,
        desc: SampleDescriptor,
        layouts: Sequence[Layout],
        steps: Sequence[Sequence[int]],
        slots: Slots,
        rest: Sequence[int],
        columns: tuple[int, ...],
        elements: int,
    ) -> None:
        like, sizes = number(desc.compute), (*reversed(desc.image_size), 1)[:3]
        self._kernel, self._elements = kernel.compiled(like, columns), elements if slots.number > 1 else 0
        values = np.array([_axis_numbers(size, desc) for size in sizes], type(like))
        self._kept = values, layouts  # their addresses are in use
        form = (desc.axes, TAPS[desc.mode], MODES[desc.mode], PADDINGS[desc.padding_mode])
        tensors = [*layouts, *[Layout(0, 0, 0, NO_TABLE)] * (_TENSORS - len(layouts))]
        regions = [*slots.offsets, *[0] * (_REGION_COUNT - len(slots.offsets))]
        numbers = [
            *[0] * _VARIABLES, *(n for tensor in tensors for n in tensor.numbers), desc.channels, desc.pixels,
            desc.samples, desc.corners, *form, desc.align_corners, *sizes,
            torch.from_numpy(values).data_ptr(), *(n for own in steps for n in own), slots.bytes,
            slots.number, *regions, *rest,
        ]  # fmt: skip
        numbers += [0] * (NUMBERS - len(numbers) + 1 + len(columns))
        self._task = task_of(len(numbers))
        self._bytes = np.array(numbers, np.int64).tobytes()

    def task(self, base: int, *addresses: int) -> Any:
        """A task with scratch memory at ``base``, for tensors at these addresses in the order of ``GRID``."""
        made = self._task.from_buffer_copy(self._bytes)
        made[BASE : ADDRESSES + len(addresses)] = (base, *addresses)
        return made

    def run(self, task: Any, end: int, share: int = 1, step: int = 0, unit: int = 0) -> None:
        """Run a step of a task: ``end`` units of work, of which a thread takes ``share`` at once."""
        task[:BASE] = (0, 0, end, share, step, unit)
        run_together(self._kernel, task, self._elements)

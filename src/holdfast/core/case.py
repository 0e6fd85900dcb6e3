"""Cases: named inputs of a plan, with the same bits under every version of NumPy and torch.

Tests, proof, benchmark and docs share them. Values are derived from raw random bits by integer arithmetic and
single IEEE-754 operations. Framework distributions are not used, because their bits may change between
versions. Every tensor lies inside a larger poisoned buffer, which exposes unwritten outputs and out-of-bounds
accesses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.core.descriptor import Descriptor
from holdfast.core.plan import Args
from holdfast.core.strided import contiguous_strides, span

#: Elements of poison before and after a tensor; a multiple of 16 bytes for every dtype.
GUARD = 64
#: Each byte of poisoned integers and codes. Real numbers are poisoned with NaN.
POISON_BYTE = 0xA5


@dataclass(frozen=True)
class Case:
    """One problem with its tensors. ``make`` returns new args on the CPU, with poisoned outputs.

    ``common`` cases complete the set of combinations, but other cases already cover each of their properties.
    They run on hardware and are skipped under the interpreter, where they would take too long.
    """

    name: str
    descriptor: Descriptor
    make: Callable[[], Args]
    common: bool = False


def random_bits(label: str, count: int) -> npt.NDArray[np.uint64]:
    """``count`` random 64-bit words, seeded by ``label``."""
    seed = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little")
    return np.asarray(np.random.PCG64(seed).random_raw(count), dtype=np.uint64)


def poisoned(size: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor filled with poison."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.full((size,), float("nan"), dtype=dtype)
    return torch.full((size * dtype.itemsize,), POISON_BYTE, dtype=torch.uint8).view(dtype)


def poisoned_output(shape: Sequence[int], dtype: torch.dtype, layout: str = "contiguous") -> torch.Tensor:
    """An output tensor filled with poison."""
    return _place(tuple(shape), dtype, layout)


def outputs_of(
    args: type[Args], desc: Descriptor, layout: str, old: Callable[..., torch.Tensor] | None = None
) -> dict[str, torch.Tensor | None]:
    """The outputs of ``args`` by name, filled with poison or with ``old(name, shape, dtype)``."""
    found: dict[str, torch.Tensor | None] = dict.fromkeys(args.outputs)
    for name, expected in ((name, desc.expected(name)) for name in args.outputs):
        if expected is not None:
            found[name] = out = poisoned_output(*expected, layout)
            if old is not None:
                out.copy_(old(name, *expected))
    return found


def laid_out(values: torch.Tensor, layout: str = "contiguous") -> torch.Tensor:
    """A tensor with these values and this layout; a broadcast axis repeats its first index."""
    placed = _place(tuple(values.shape), values.dtype, layout)
    own = tuple(slice(None, 1) if stride == 0 else slice(None) for stride in placed.stride())
    placed[own].copy_(values[own])
    return placed


def _place(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    strides, shift = LAYOUTS[layout](shape) if layout in LAYOUTS else Layout.parse(layout).place(shape)
    size = span(shape, strides) + shift + 2 * GUARD
    return poisoned(size, dtype).as_strided(shape, strides, GUARD + shift)


@dataclass(frozen=True)
class Layout:
    """A layout for a tensor of any shape, written as ``"order=3 step=2"``; defaults are left out.

    ``order`` numbers the permutations of the axes in memory. With ``last`` the last axis stays innermost and
    contiguous. ``step`` is the innermost stride, ``gap`` the number of unused elements after each innermost
    row, ``shift`` the number of elements before the first. Bit i of ``broadcast`` gives axis i a stride of 0.
    """

    order: int = 0
    step: int = 1
    gap: int = 0
    shift: int = 0
    broadcast: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> Layout:
        named = (part.partition("=") for part in text.removeprefix("contiguous").split())
        return cls(**{name: int(value) for name, _, value in named})

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={value}" for name, value in changed.items()) or "contiguous"

    def place(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """The strides for this shape, and the shift of the first element."""
        axes, order, code = list(range(len(shape))), [], self.order
        fixed = [axes.pop()] if self.last and axes else []
        while axes:
            code, place = divmod(code, len(axes))
            order.append(axes.pop(place))
        strides, room = [0] * len(shape), 1 if fixed else self.step
        for number, axis in enumerate(reversed(order + fixed)):
            if self.broadcast >> axis & 1 and shape[axis] and axis not in fixed:
                continue
            strides[axis] = room
            room = room * max(shape[axis], 1) + (self.gap if number == 0 else 0)
        return tuple(strides), self.shift


def _in_order(shape: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor with this order of axes in memory, the last one innermost."""
    strides = [0] * len(shape)
    for axis, stride in zip(order, contiguous_strides([shape[axis] for axis in order]), strict=True):
        strides[axis] = stride
    return tuple(strides)


def _sliced(shape: tuple[int, ...], step: int, beside: int) -> tuple[int, ...]:
    """The strides of every ``step``-th element of rows that have ``beside`` further elements at the end."""
    wider = (*shape[:-1], shape[-1] * step + beside)
    return (*contiguous_strides(wider)[:-1], step)


def _last_first(shape: tuple[int, ...]) -> list[int]:
    return list(reversed(range(len(shape))))


#: For a shape, the strides and the shift of the first element. A shift of 1 breaks every alignment.
LAYOUTS: dict[str, Callable[[tuple[int, ...]], tuple[tuple[int, ...], int]]] = {
    "contiguous": lambda shape: (contiguous_strides(shape), 0),
    "unaligned": lambda shape: (contiguous_strides(shape), 1),
    "transposed": lambda shape: (_in_order(shape, _last_first(shape)), 0),
    "leading transposed": lambda shape: (_in_order(shape, [*_last_first(shape)[1:], len(shape) - 1]), 0),
    "channels last": lambda shape: (_in_order(shape, [0, *range(2, len(shape)), 1]), 0),
    "sliced": lambda shape: (_sliced(shape, 2, 1), 1),
    "padded rows": lambda shape: (_sliced(shape, 1, 3), 0),
    "broadcast": lambda shape: ((0, *contiguous_strides(shape)[1:]), 0),
}


def operands_of(args: Args) -> dict[str, Any]:
    """The fields of ``args`` by name."""
    return {name: getattr(args, name) for name in type(args).__dataclass_fields__}  # type: ignore[attr-defined]

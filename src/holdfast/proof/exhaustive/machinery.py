"""How all values of a type go through a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from holdfast.core.bits import mismatch
from holdfast.core.case import Case
from holdfast.core.contract import PlanPreference
from holdfast.core.plan import Args
from holdfast.core.stream import Stream, Workspace
from holdfast.proof.conformance import AnyPlan, Difference, Way, check, expected, gpu_way, selected

#: A scale and a zero point for each row: awkward scales and powers of two, odd and far zero points.
PAIRS = (
    (0.1, 0), (1 / 3, 3), (0.007, -5), (0.125, 1), (2.0**-20, -128), (1.0, 127), (96.5, -7), (0.3, 2**22 + 1),
)  # fmt: skip
#: How many float32 values are held at a time.
CHUNK = 2**26


@dataclass(frozen=True)
class Sweep:
    """One part of the whole: what it is called, how many values it tries, and how to try them.

    ``alone`` if it takes the whole machine; the others go side by side, for their variants to compile so.
    """

    plan: AnyPlan
    name: str
    values: int
    run: Callable[[], list[Difference]]
    alone: bool = False


def _ways() -> list[Way]:
    """The interpreter would take hours; it has the cases."""
    gpu = gpu_way()
    return [Way("cpu", times=1), *([gpu] if gpu is not None and gpu.device == "cuda" else [])]


def against_reference(
    plan: AnyPlan, name: str, values: int, descriptor: Any, make: Callable[[], Any]
) -> Sweep:
    """A sweep of one descriptor, whose args ``make`` gives, through the reference and all other backends."""
    case = Case(name, descriptor, make)

    def run() -> list[Difference]:
        args, reference = expected(plan, case)
        found = []
        for way in _ways():
            found += check(plan, case, way, args, reference, selected(way.backend))
        return found

    return Sweep(plan, name, values, run)


def every_16_bit(real: torch.dtype) -> torch.Tensor:
    """Every value of a type of 16 bits, in a row for each of ``PAIRS``."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(real)
    return every.expand(len(PAIRS), -1)


def gradients_16_bit(real: torch.dtype) -> torch.Tensor:
    """Gradients from 1 to 2, in the shape of ``every_16_bit``."""
    gradient = torch.arange(2**16, dtype=torch.int32)
    scatter(gradient, gradient)
    return gradient.view(torch.float32).to(real).expand(len(PAIRS), -1)


def scales() -> torch.Tensor:
    """The scales of ``PAIRS``."""
    return torch.tensor([scale for scale, _ in PAIRS], dtype=torch.float32)


def zero_points() -> torch.Tensor:
    """The zero points of ``PAIRS``."""
    return torch.tensor([zero_point for _, zero_point in PAIRS], dtype=torch.int32)


def scatter(whole: torch.Tensor, out: torch.Tensor) -> None:
    """For each int32 the bits of a float32 from 1 to 2, with no order in them."""
    torch.mul(whole, -1640531535, out=out)
    out.bitwise_and_(0x007FFFFF).bitwise_or_(0x3F800000)


@dataclass(frozen=True)
class Trial:
    """What is done with every float32: a plan of ``CHUNK`` elements, and its args.

    ``args`` takes x, a gradient of as many elements, and the output, which has shape ``out`` and ``dtype``.
    """

    plan: AnyPlan
    name: str
    descriptor: Any
    args: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Args]
    dtype: torch.dtype
    out: int = CHUNK


def over_float32(trials: Sequence[Trial]) -> Iterator[Sweep]:
    """Every trial on every float32: all of them on the values at hand, then on the next ones."""
    for first in range(-(2**31), 2**31, CHUNK):
        for trial in trials:
            name = f"every float32 from bits 0x{first & 0xFFFFFFFF:08x}, {trial.name}"
            yield Sweep(trial.plan, name, CHUNK, partial(_tried, trial, name, first), alone=True)


class _Buffers:
    """The tensors of the float32 sweep, on both devices, made once: first touch is slow."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.base = {
            device: torch.arange(CHUNK, dtype=torch.int32, device=device) for device in ("cpu", "cuda")
        }
        self.bits = {device: torch.empty_like(base) for device, base in self.base.items()}
        self.scattered = {device: torch.empty_like(base) for device, base in self.base.items()}
        self.x = {device: bits.view(torch.float32) for device, bits in self.bits.items()}
        self.dy = {device: bits.view(torch.float32) for device, bits in self.scattered.items()}
        self.outputs: dict[tuple[str, torch.dtype, int], torch.Tensor] = {}

    def load(self, first: int) -> None:
        """Hold the values whose bits are ``first`` and those that follow."""
        if self.first != first:
            self.first = first
            for device, base in self.base.items():
                torch.add(base, first, out=self.bits[device])
                scatter(self.bits[device], self.scattered[device])

    def out(self, device: str, trial: Trial) -> torch.Tensor:
        key = device, trial.dtype, trial.out
        if key not in self.outputs:
            self.outputs[key] = torch.empty(
                trial.out, dtype=trial.dtype, device=device, pin_memory=device == "cpu"
            )
        return self.outputs[key]


_buffers = lru_cache(maxsize=1)(_Buffers)


def _tried(trial: Trial, name: str, first: int) -> list[Difference]:
    held = _buffers()
    held.load(first)
    for device, backend in (("cuda", "gpu"), ("cpu", "cpu")):
        stream = Stream.current(device)
        plan = trial.plan.select(stream, trial.descriptor, PlanPreference(backend=backend, precompile=False))
        args = trial.args(held.x[device], held.dy[device], held.out(device, trial))
        plan.run(stream, Workspace.allocate(plan.workspace_size(), device), args)
    right, found = held.out("cpu", trial), held.out("cuda", trial)
    if _equal(right.to("cuda", non_blocking=True), found):
        return []
    return [Difference(trial.plan.__name__, name, "gpu", str(mismatch("output", right, found.cpu())))]


def _equal(right: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether all bits are the same, or else all but those of NaN."""
    if not right.is_floating_point():
        return torch.equal(right, found)
    return torch.equal(right.view(torch.int32), found.view(torch.int32)) or bool(
        ((right.view(torch.int32) == found.view(torch.int32)) | (right.isnan() & found.isnan())).all()
    )

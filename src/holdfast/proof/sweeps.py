"""Sweeps run: all float16 and bfloat16 values, all codes, and on CUDA all float32 values.

Sixteen-bit inputs and codes are few enough to go through the reference. The 2^32 float32 values go through
the cpu backend, itself proven against the reference, on all of its threads, and the gpu backend beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from holdfast import ops
from holdfast.core.bits import mismatch
from holdfast.core.case import Case
from holdfast.core.contract import PlanPreference
from holdfast.core.plan import AnyPlan
from holdfast.core.stream import Stream, Workspace
from holdfast.core.sweep import CHUNK, Float32Sweep, Sweep, scatter
from holdfast.proof.conformance import Difference, Way, check, expected, gpu_way, selected


@dataclass(frozen=True)
class SweepRun:
    """A sweep, or a chunk of one, and how to run it on this machine.

    ``alone`` if it takes the whole machine. The others run side by side, so that their variants compile so.
    """

    plan: AnyPlan
    name: str
    values: int
    run: Callable[[], list[Difference]]
    alone: bool = False


def sweeps() -> Iterator[SweepRun]:
    """Every sweep that this machine can do."""
    listed = ops.modules("sweeps")
    for module in listed:
        for sweep in module.sweeps():
            yield SweepRun(sweep.plan, sweep.name, sweep.values, partial(_against_reference, sweep))
    gpu = gpu_way()
    if gpu is not None and gpu.device == "cuda":
        yield from _over_float32([one for module in listed for one in getattr(module, "FLOAT32", ())])


def _ways() -> list[Way]:
    """The interpreter would take hours; it has the cases."""
    gpu = gpu_way()
    return [Way("cpu", times=1), *([gpu] if gpu is not None and gpu.device == "cuda" else [])]


def _against_reference(sweep: Sweep) -> list[Difference]:
    case = Case(sweep.name, sweep.descriptor, sweep.make)
    args, reference = expected(sweep.plan, case)
    found = []
    for way in _ways():
        found += check(sweep.plan, case, way, args, reference, selected(way.backend))
    return found


def _over_float32(trials: Sequence[Float32Sweep]) -> Iterator[SweepRun]:
    """Every trial on every float32: all of them on the values at hand, then on the next ones."""
    for first in range(-(2**31), 2**31, CHUNK):
        for trial in trials:
            name = f"every float32 from bits 0x{first & 0xFFFFFFFF:08x}, {trial.name}"
            yield SweepRun(trial.plan, name, CHUNK, partial(_tried, trial, name, first), alone=True)


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

    def out(self, device: str, trial: Float32Sweep) -> torch.Tensor:
        key = device, trial.dtype, trial.out
        if key not in self.outputs:
            self.outputs[key] = torch.empty(
                trial.out, dtype=trial.dtype, device=device, pin_memory=device == "cpu"
            )
        return self.outputs[key]


_buffers = lru_cache(maxsize=1)(_Buffers)


def _tried(trial: Float32Sweep, name: str, first: int) -> list[Difference]:
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
    if right.dtype.itemsize == 1:  # codes, whose NaN has one pattern
        return torch.equal(right.view(torch.uint8), found.view(torch.uint8))
    return torch.equal(right.view(torch.int32), found.view(torch.int32)) or bool(
        ((right.view(torch.int32) == found.view(torch.int32)) | (right.isnan() & found.isnan())).all()
    )

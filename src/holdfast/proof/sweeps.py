"""Exhaustive sweeps: all float16 and bfloat16 values, all codes, and on CUDA all float32 values.

16-bit inputs and codes are compared with the reference. For the 2^32 float32 values the reference is too
slow: there the gpu backend is compared with the multi-threaded cpu backend.
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
from holdfast.proof.conformance import Difference, Way, check, gpu_way, run_reference, select_on


@dataclass(frozen=True)
class SweepRun:
    """A sweep, or a chunk of one.

    ``values`` is the number of inputs. ``alone``: the sweep uses the whole machine. The others run in
    parallel, which also compiles their variants in parallel.
    """

    plan: AnyPlan
    name: str
    values: int
    run: Callable[[], list[Difference]]
    alone: bool = False


def sweeps() -> Iterator[SweepRun]:
    """Every sweep that this machine can run."""
    listed = ops.modules("sweeps")
    for module in listed:
        for sweep in module.sweeps():
            yield SweepRun(sweep.plan, sweep.name, sweep.values, partial(_against_reference, sweep))
    gpu = gpu_way()
    if gpu is not None and gpu.device == "cuda":
        yield from _over_float32([one for module in listed for one in getattr(module, "FLOAT32", ())])


def _ways() -> list[Way]:
    """The configurations to sweep. The interpreter is too slow."""
    gpu = gpu_way()
    return [Way("cpu", times=1), *([gpu] if gpu is not None and gpu.device == "cuda" else [])]


def _against_reference(sweep: Sweep) -> list[Difference]:
    case = Case(sweep.name, sweep.descriptor, sweep.make)
    args, reference = run_reference(sweep.plan, case)
    found = []
    for way in _ways():
        found += check(sweep.plan, case, way, args, reference, select_on(way.backend))
    return found


def _over_float32(trials: Sequence[Float32Sweep]) -> Iterator[SweepRun]:
    """All float32 sweeps on every float32 value, chunk by chunk."""
    for first in range(-(2**31), 2**31, CHUNK):
        for trial in trials:
            name = f"every float32 from bits 0x{first & 0xFFFFFFFF:08x}, {trial.name}"
            yield SweepRun(trial.plan, name, CHUNK, partial(_run_chunk, trial, name, first), alone=True)


class _Buffers:
    """The tensors of the float32 sweep on both devices, reused because the first write to memory is slow."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.base = {
            device: torch.arange(CHUNK, dtype=torch.int32, device=device) for device in ("cpu", "cuda")
        }
        self.bits = {device: torch.empty_like(base) for device, base in self.base.items()}
        self.scattered = {device: torch.empty_like(base) for device, base in self.base.items()}
        self.x = {device: bits.view(torch.float32) for device, bits in self.bits.items()}
        self.dy = {device: bits.view(torch.float32) for device, bits in self.scattered.items()}
        self.outputs: dict[tuple[str, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def load(self, first: int) -> None:
        """Fill the inputs with ``CHUNK`` values, whose bit patterns start at ``first``."""
        if self.first != first:
            self.first = first
            for device, base in self.base.items():
                torch.add(base, first, out=self.bits[device])
                scatter(self.bits[device], self.scattered[device])

    def out(self, device: str, trial: Float32Sweep) -> torch.Tensor:
        shape, dtype = trial.output
        key = device, dtype, shape
        if key not in self.outputs:
            self.outputs[key] = torch.empty(shape, dtype=dtype, device=device, pin_memory=device == "cpu")
        return self.outputs[key]


_buffers = lru_cache(maxsize=1)(_Buffers)


def _run_chunk(trial: Float32Sweep, name: str, first: int) -> list[Difference]:
    buffers = _buffers()
    buffers.load(first)
    for device, backend in (("cuda", "gpu"), ("cpu", "cpu")):
        stream = Stream.current(device)
        plan = trial.plan.select(stream, trial.descriptor, PlanPreference(backend=backend, precompile=False))
        args = trial.args(buffers.x[device], buffers.dy[device], buffers.out(device, trial))
        plan.run(stream, Workspace.allocate(plan.workspace_size(), device), args)
    right, found = buffers.out("cpu", trial), buffers.out("cuda", trial)
    if _equal(right.to("cuda", non_blocking=True), found):
        return []
    return [Difference(trial.plan.__name__, name, "gpu", str(mismatch("output", right, found.cpu())))]


def _equal(right: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether all bits are equal. NaNs are equal to each other."""
    if not right.is_floating_point():
        return torch.equal(right, found)
    if right.dtype.itemsize == 1:  # float8 codes: the bits of NaN are compared, too
        return torch.equal(right.view(torch.uint8), found.view(torch.uint8))
    return torch.equal(right.view(torch.int32), found.view(torch.int32)) or bool(
        ((right.view(torch.int32) == found.view(torch.int32)) | (right.isnan() & found.isnan())).all()
    )

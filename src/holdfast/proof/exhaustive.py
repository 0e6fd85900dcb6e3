"""Every input there is: all float16 and bfloat16 values, all codes, and on CUDA all float32 values.

Sixteen-bit inputs and codes are few enough to go through the reference. The 2^32 float32 values go through
the cpu backend, itself proven against the reference, on all of its threads, and the gpu backend beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.case import Case, poisoned_output
from holdfast.core.contract import PlanPreference
from holdfast.core.dtypes import CODES, FLOATS, dtype_name
from holdfast.core.stream import Stream
from holdfast.ops.affine.cases import STORED, stored_name
from holdfast.ops.affine.packing import pack
from holdfast.ops.dequantize.plan import (
    DequantizeArgs,
    DequantizePerChannelDescriptor,
    DequantizePerChannelPlan,
)
from holdfast.ops.quantize.plan import (
    QuantizeArgs,
    QuantizeBackwardArgs,
    QuantizePerChannelBackwardDescriptor,
    QuantizePerChannelBackwardPlan,
    QuantizePerChannelDescriptor,
    QuantizePerChannelPlan,
    QuantizePerTensorBackwardDescriptor,
    QuantizePerTensorBackwardPlan,
    QuantizePerTensorDescriptor,
    QuantizePerTensorPlan,
)
from holdfast.proof.bits import mismatch
from holdfast.proof.conformance import AnyPlan, Difference, Way, check, expected, gpu_way, selected

#: A scale and a zero point for each row: awkward scales and powers of two, odd and far zero points.
PAIRS = (
    (0.1, 0), (1 / 3, 3), (0.007, -5), (0.125, 1), (2.0**-20, -128), (1.0, 127), (96.5, -7), (0.3, 2**22 + 1),
)  # fmt: skip
#: Those of the float32 sweep, which takes seconds for each.
FLOAT32_PAIRS = (PAIRS[0], PAIRS[1], PAIRS[3], (7e-39, -77))
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


def sweeps() -> Iterator[Sweep]:
    """Every sweep that this machine can do."""
    for real in (torch.float16, torch.bfloat16):
        for codes, packed in STORED:
            yield _quantize(real, codes, packed)
            if packed:  # without zero points these divide in a way of their own
                yield _quantize(real, codes, packed, symmetric=True)
            else:
                yield _quantize_backward(real, codes)
    for real in (record.torch for record in FLOATS.values()):
        for codes, packed in STORED:
            yield _dequantize(real, codes, packed)
    gpu = gpu_way()
    if gpu is not None and gpu.device == "cuda":
        for first in range(-(2**31), 2**31, CHUNK):
            for pair in FLOAT32_PAIRS:
                yield _float32(pair, first)


def _ways() -> list[Way]:
    """The interpreter would take hours; it has the cases."""
    gpu = gpu_way()
    return [Way("cpu", times=1), *([gpu] if gpu is not None and gpu.device == "cuda" else [])]


def _against_reference(
    plan: AnyPlan, name: str, values: int, descriptor: Any, make: Callable[[], Any]
) -> Sweep:
    case = Case(name, descriptor, make)

    def run() -> list[Difference]:
        args, reference = expected(plan, case)
        found = []
        for way in _ways():
            found += check(plan, case, way, args, reference, selected(way.backend))
        return found

    return Sweep(plan, name, values, run)


def _every_16_bit(real: torch.dtype) -> torch.Tensor:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(real)
    return every.expand(len(PAIRS), -1)


def _scales() -> torch.Tensor:
    return torch.tensor([scale for scale, _ in PAIRS], dtype=torch.float32)


def _zero_points() -> torch.Tensor:
    return torch.tensor([zero_point for _, zero_point in PAIRS], dtype=torch.int32)


def _quantize(real: torch.dtype, codes: torch.dtype, packed: bool, symmetric: bool = False) -> Sweep:
    shape = (len(PAIRS), 2**16)
    desc = QuantizePerChannelDescriptor(
        shape=shape, axis=0, input_dtype=real, output_dtype=codes, packed=packed
    )

    def make() -> QuantizeArgs:
        return QuantizeArgs(
            x=_every_16_bit(real),
            scale=_scales(),
            zero_point=None if symmetric else _zero_points(),
            q=poisoned_output(desc.code_shape, desc.code_storage),
        )

    name = f"every {dtype_name(real)} to {stored_name(codes, packed)}" + ", symmetric" * symmetric
    return _against_reference(QuantizePerChannelPlan, name, shape[0] * shape[1], desc, make)


def _quantize_backward(real: torch.dtype, codes: torch.dtype) -> Sweep:
    """Every input twice over: as x, with gradients around 1, and as dy, where x is in range."""
    shape = (2, len(PAIRS), 2**16)
    desc = QuantizePerChannelBackwardDescriptor(shape=shape, axis=1, input_dtype=real, output_dtype=codes)

    def make() -> QuantizeBackwardArgs:
        every = _every_16_bit(real)
        in_range = torch.zeros((), dtype=real).expand(every.shape)
        gradient = torch.arange(2**16, dtype=torch.int32)
        scatter(gradient, gradient)
        return QuantizeBackwardArgs(
            x=torch.stack([every, in_range]),
            dy=torch.stack([gradient.view(torch.float32).to(real).expand(every.shape), every]),
            scale=_scales(),
            zero_point=_zero_points(),
            dx=poisoned_output(shape, real),
        )

    name = f"every {dtype_name(real)} through {dtype_name(codes)}"
    values = shape[0] * shape[1] * shape[2]
    return _against_reference(QuantizePerChannelBackwardPlan, name, values, desc, make)


def _dequantize(real: torch.dtype, codes: torch.dtype, packed: bool) -> Sweep:
    record = CODES[dtype_name(codes)]
    low, high = record.code_range
    shape = (len(PAIRS), high - low + 1)
    desc = DequantizePerChannelDescriptor(
        shape=shape, axis=0, input_dtype=codes, output_dtype=real, packed=packed
    )

    def make() -> DequantizeArgs:
        every = torch.arange(low, high + 1, dtype=torch.int32).to(record.storage).expand(shape)
        return DequantizeArgs(
            q=pack(every, codes) if packed else every,
            scale=_scales(),
            zero_point=_zero_points(),
            y=poisoned_output(shape, real),
        )

    name = f"every {stored_name(codes, packed)} to {dtype_name(real)}"
    return _against_reference(DequantizePerChannelPlan, name, shape[0] * shape[1], desc, make)


def scatter(whole: torch.Tensor, out: torch.Tensor) -> None:
    """For each int32 the bits of a float32 from 1 to 2, with no order in them."""
    torch.mul(whole, -1640531535, out=out)
    out.bitwise_and_(0x007FFFFF).bitwise_or_(0x3F800000)


class _Float32Buffers:
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
        self.out = {
            (device, dtype): torch.empty(CHUNK, dtype=dtype, device=device, pin_memory=device == "cpu")
            for device in ("cpu", "cuda")
            for dtype in (torch.int8, torch.float32)
        }
        for device in ("cpu", "cuda"):
            self.out[device, torch.uint8] = torch.empty(CHUNK // 2, dtype=torch.uint8, device=device)

    def load(self, first: int) -> None:
        """Hold the values whose bits are ``first`` and those that follow."""
        if self.first != first:
            self.first = first
            for device, base in self.base.items():
                torch.add(base, first, out=self.bits[device])
                scatter(self.bits[device], self.scattered[device])


_buffers: list[_Float32Buffers] = []
_PACKED = QuantizePerTensorDescriptor(shape=(CHUNK,), output_dtype=CODES["int4"].torch, packed=True)


def _float32(pair: tuple[float, int], first: int) -> Sweep:
    scale, zero_point = pair
    name = f"every float32 from bits 0x{first & 0xFFFFFFFF:08x}, scale {scale!r}, zero point {zero_point}"

    def run() -> list[Difference]:
        if not _buffers:
            _buffers.append(_Float32Buffers())
        held = _buffers[0]
        held.load(first)
        found = []
        for plan, descriptor, dtype in (
            (QuantizePerTensorPlan, QuantizePerTensorDescriptor(shape=(CHUNK,)), torch.int8),
            (
                QuantizePerTensorBackwardPlan,
                QuantizePerTensorBackwardDescriptor(shape=(CHUNK,)),
                torch.float32,
            ),
            (QuantizePerTensorPlan, _PACKED, torch.uint8),
        ):
            for device, backend in (("cuda", "gpu"), ("cpu", "cpu")):
                stream = Stream.current(device)
                out = held.out[device, dtype]
                z = None if descriptor is _PACKED else zero_point
                shared: dict[str, Any] = {"scale": scale, "zero_point": z, "x": held.x[device]}
                args: Any = (
                    QuantizeBackwardArgs(dy=held.dy[device], dx=out, **shared)
                    if dtype == torch.float32
                    else QuantizeArgs(q=out, **shared)
                )
                pref = PlanPreference(backend=backend, precompile=False)
                plan.select(stream, descriptor, pref).run(stream, None, args)  # type: ignore[arg-type]
            right, got = held.out["cpu", dtype], held.out["cuda", dtype]
            whole = torch.int32 if dtype == torch.float32 else dtype  # no result is NaN
            if not torch.equal(right.to("cuda").view(whole), got.view(whole)):
                found.append(
                    Difference(plan.__name__, name, "gpu", str(mismatch("output", right, got.cpu())))
                )
        return found

    return Sweep(QuantizePerTensorPlan, name, CHUNK, run, alone=True)

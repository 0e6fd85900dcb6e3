"""What is timed: a plan, a layout, a pair of dtypes. A case makes its own tensors, at any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from holdfast.core.contract import PlanPreference
from holdfast.core.dtypes import CODES, dtype_name
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.registry import plans
from holdfast.core.stream import Stream, Workspace
from holdfast.ops.affine.plan import AffinePlan
from holdfast.ops.dequantize.torch_op import dequantize
from holdfast.ops.quantize.torch_op import quantize

INT4 = CODES["int4"].torch
#: The row length of per-token and per-group cases: the width of a transformer layer.
ROW = 4096

#: The operands of a plan by name; a zero point may be None.
Tensors = dict[str, Any]


def _square(elements: int) -> tuple[int, ...]:
    rows = 2 ** ((elements.bit_length() - 1) // 2)
    return rows, max(elements // rows, 1)


def _sandwich(elements: int) -> tuple[int, ...]:
    outer = min(16, elements)
    return outer, *_square(elements // outer)


def _rows(elements: int) -> tuple[int, ...]:
    return max(elements // ROW, 1), ROW


#: How each granularity is called, and the shape that a number of elements has there.
LAYOUTS: dict[str, tuple[Granularity, Callable[[int], tuple[int, ...]]]] = {
    "per tensor": (PerTensor(), _square),
    "per channel, axis 0": (PerChannel(0), _square),
    "per channel, middle": (PerChannel(1), _sandwich),
    "per channel, last": (PerChannel(-1), _square),
    "per token": (PerToken(), _rows),
    "per group of 32": (PerGroup(32), _rows),
    "per group of 128": (PerGroup(128), _rows),
}

OPS = ("quantize", "dequantize", "quantize backward")


@dataclass(frozen=True)
class Case:
    """One row of the table: a plan, or with ``function`` the public function, which allocates its output.

    ``packed`` of a backward says what its forward made.
    """

    op: str
    layout: str
    real: torch.dtype
    codes: torch.dtype
    packed: bool = False
    zero_point: bool = False
    function: bool = False

    @property
    def name(self) -> str:
        real = "bf16" if self.real == torch.bfloat16 else "f32"
        codes = ("packed " if self.packed else "") + dtype_name(self.codes)
        pair = f"{codes} to {real}" if self.op == "dequantize" else f"{real} to {codes}"
        return f"{'hf.' if self.function else ''}{self.op} {self.label}, {pair}"

    @property
    def label(self) -> str:
        return self.layout + (", zero point" if self.zero_point else "")

    @property
    def granularity(self) -> Granularity:
        return LAYOUTS[self.layout][0]

    @property
    def backward(self) -> bool:
        return self.op.endswith("backward")

    def problem(self, elements: int, stream: Stream, backend: str | None = None) -> Problem:
        """The case at a size: its plan on the device of ``stream``."""
        op = self.op.split()[0].capitalize()
        plan = plans()[f"{op}{type(self.granularity).__name__}{'Backward' if self.backward else ''}Plan"]
        fields: dict[str, Any] = asdict(cast(Any, self.granularity))
        fields["shape"] = LAYOUTS[self.layout][1](elements)
        ends = (self.codes, self.real) if self.op == "dequantize" else (self.real, self.codes)
        fields["input_dtype"], fields["output_dtype"] = ends
        if not self.backward:
            fields["packed"] = self.packed
        preference = PlanPreference(backend=backend, precompile=False)
        selected = plan.select(stream, plan.Descriptor(**fields), preference)
        assert isinstance(selected, AffinePlan)
        return Problem(self, selected, stream)


@dataclass(frozen=True)
class Problem:
    """A case at one size on one device."""

    case: Case
    plan: AffinePlan[Any, Any]
    stream: Stream

    def draw(self) -> Tensors:
        """Random inputs, about one in twenty values out of range, and outputs with nothing in them."""
        device = self.stream.device
        generator = torch.Generator(device).manual_seed(20)
        view = self.plan.descriptor.view
        least, most = self.plan.descriptor.codes.code_range
        tensors: Tensors = {}
        for name in self.plan.tensors:
            shape, dtype = self.plan.expected(name)
            if name in self.plan.outputs:
                tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            elif dtype.is_floating_point:
                tensors[name] = torch.randn(shape, dtype=dtype, device=device, generator=generator)
            else:
                low, high = (0, 256) if self.case.packed else (least, most + 1)
                tensors[name] = torch.randint(
                    low, high, shape, dtype=dtype, device=device, generator=generator
                )
        spread = torch.rand(view.scale_shape, device=device, generator=generator)
        tensors["scale"] = (1.5 + spread) / most
        tensors["zero_point"] = None
        if self.case.zero_point:
            tensors["zero_point"] = torch.randint(
                -2, 3, view.scale_shape, dtype=torch.int32, device=device, generator=generator
            )
        return tensors

    def call(self, tensors: Tensors) -> Callable[[], torch.Tensor]:
        """What is timed, with all else done before: a run of the plan, or the public function."""
        if self.case.function:
            return self._function(tensors)
        make: Any = self.plan.Args
        plan, stream, args = self.plan, self.stream, make(**tensors)
        workspace = Workspace.allocate(plan.workspace_size(), stream.device)
        output: torch.Tensor = getattr(args, plan.outputs[0])

        def run() -> torch.Tensor:
            plan.run(stream, workspace, args)
            return output

        return run

    def _function(self, tensors: Tensors) -> Callable[[], torch.Tensor]:
        case = self.case
        assert not case.backward
        scale, zero_point, granularity = tensors["scale"], tensors["zero_point"], case.granularity
        if case.op == "quantize":
            return lambda: quantize(
                tensors["x"], scale, zero_point, dtype=case.codes, granularity=granularity, packed=case.packed
            )
        return lambda: dequantize(
            tensors["q"],
            scale,
            zero_point,
            dtype=case.real,
            granularity=granularity,
            code_dtype=case.codes,
            packed=case.packed,
        )


def full_cases() -> list[Case]:
    """Every op, layout and dtype pair, symmetric; and the common ones with a zero point."""
    pairs = (
        (torch.float32, torch.int8, False),
        (torch.bfloat16, torch.int8, False),
        (torch.bfloat16, INT4, True),
    )
    symmetric = [Case(op, layout, *pair) for op in OPS for layout in LAYOUTS for pair in pairs]
    affine = [
        Case(op, layout, real, codes, packed, zero_point=True)
        for op in OPS
        for layout in ("per tensor", "per channel, axis 0")
        for real, codes, packed in (pairs[0], pairs[2])
    ]
    return symmetric + affine


def cpu_cases() -> list[Case]:
    """One pair of dtypes at every op and layout; packed codes, a zero point and the functions once per op."""
    plain = [Case(op, layout, torch.float32, torch.int8) for op in OPS for layout in LAYOUTS]
    packed = [Case(op, "per group of 32", torch.bfloat16, INT4, packed=True) for op in OPS]
    affine = [Case(op, "per channel, axis 0", torch.float32, torch.int8, zero_point=True) for op in OPS]
    functions = [Case(op, "per tensor", torch.float32, torch.int8, function=True) for op in OPS[:2]]
    return plain + packed + affine + functions


def quick_cases() -> list[Case]:
    """A handful that shows each op."""
    return [
        Case("quantize", "per tensor", torch.float32, torch.int8),
        Case("quantize", "per channel, axis 0", torch.float32, torch.int8),
        Case("quantize", "per group of 32", torch.bfloat16, INT4, packed=True),
        Case("dequantize", "per channel, axis 0", torch.float32, torch.int8),
        Case("quantize backward", "per tensor", torch.float32, torch.int8),
    ]

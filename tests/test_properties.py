"""Problems that nobody thought of: random shapes, layouts, dtypes, ranges and bits, against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.core.case import Case, laid_out, poisoned_output, random_bits
from holdfast.core.dtypes import CODES, FLOATS, Code, code_dtype
from holdfast.proof.conformance import Way, check, expected, gpu_way, selected

PLANS = sorted(
    name for name, plan in hf.plans().items() if plan.op in ("quantize", "dequantize", "fake_quantize")
)
REALS = [record.torch for record in FLOATS.values()]
STORED = [(code.torch, packed) for code in CODES.values() for packed in {False, code.per_byte > 1}]
SETTINGS: dict[str, Any] = {"derandomize": True, "deadline": None, "print_blob": True}


@dataclass(frozen=True)
class Layout:
    """Axes in some order in memory, steps between elements, and some axes broadcast."""

    order: tuple[int, ...]
    steps: tuple[int, ...]
    shift: int
    repeated: int | None

    def place(self, values: torch.Tensor, rows_packed: bool = False) -> torch.Tensor:
        """The values in a layout like this; packed ones keep their last axis together."""
        order = [axis for axis in self.order if axis < values.dim()]
        steps = list(self.steps[: values.dim()])
        if rows_packed:
            order = [axis for axis in order if axis != values.dim() - 1] + [values.dim() - 1]
            steps[-1:] = [1] if values.dim() else []
        strides, room = [0] * values.dim(), 1
        for axis in reversed(order):
            strides[axis] = room * steps[axis]
            room *= max(values.shape[axis], 1) * steps[axis]
        memory = laid_out(torch.zeros(room + self.shift, dtype=values.dtype))
        placed = memory.as_strided(values.shape, strides, memory.storage_offset() + self.shift)
        return placed.copy_(values)

    def repeat(self, values: torch.Tensor, rows_packed: bool = False) -> torch.Tensor:
        """The values with one axis broadcast, if any is; not the last one of packed codes."""
        if self.repeated is None or self.repeated >= values.dim() - rows_packed:
            return values
        if values.shape[self.repeated] == 0:
            return values
        return values.narrow(self.repeated, 0, 1).expand(values.shape)


layouts = st.builds(
    Layout,
    st.permutations(range(6)).map(tuple),
    st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=6, max_size=6).map(tuple),
    st.integers(0, 3),
    st.none() | st.integers(0, 3),
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, Case]:
    """A plan, and a case of it."""
    plan = draw(st.sampled_from(PLANS).map(hf.plans().__getitem__))
    if plan.op == "fake_quantize":
        return draw(faked(plan))
    least = 1 if "PerChannel" in plan.__name__ or "PerGroup" in plan.__name__ else 0
    shape = draw(st.lists(st.integers(0, 9) | st.just(1), min_size=least, max_size=5))
    shape = [min(size, 5) for size in shape] if len(shape) > 3 else shape
    real = draw(st.sampled_from(REALS))
    fields: dict[str, Any] = {}
    if least:
        fields["axis"] = draw(st.integers(-len(shape), len(shape) - 1))
    codes, packed = draw(st.sampled_from(STORED)) if draw(st.integers(0, 4)) else (real, False)
    packed = packed and plan.direction == "forward" and bool(shape)
    if "PerGroup" in plan.__name__:
        fields["group_size"] = draw(st.integers(1, 4)) * (8 if packed else 1)
        shape[fields["axis"]] = fields["group_size"] * draw(st.integers(0, 3))
    carrier = code_dtype(codes, "codes")
    if packed:
        fields["packed"] = True
    if plan.op == "quantize":
        low, high = carrier.code_range
        if not isinstance(carrier, Code) or draw(st.booleans()):
            ends = sorted([draw(st.integers(low, high)), draw(st.integers(low, high))])
            fields["q_min"], fields["q_max"] = ends
        desc = plan.Descriptor(shape=tuple(shape), input_dtype=real, output_dtype=codes, **fields)
    else:
        desc = plan.Descriptor(shape=tuple(shape), input_dtype=codes, output_dtype=real, **fields)
    desc.validate()
    args = _args(draw, plan, desc)
    return plan, Case("drawn", desc, lambda: args)


@st.composite
def faked(draw: st.DrawFn, plan: Any) -> tuple[Any, Case]:
    """A case of fake_quantize or of its backward."""
    shape = draw(st.lists(st.integers(0, 9) | st.just(1), max_size=5))
    shape = [min(size, 5) for size in shape] if len(shape) > 3 else shape
    granularity: hf.Granularity = draw(st.sampled_from([hf.PerTensor(), hf.PerToken()]))
    if shape and draw(st.booleans()):
        axis, group = draw(st.integers(-len(shape), len(shape) - 1)), draw(st.integers(0, 4))
        granularity = hf.PerGroup(group, axis) if group else hf.PerChannel(axis)
        shape[axis] = group * draw(st.integers(0, 3)) if group else shape[axis]
    code = draw(st.sampled_from(list(CODES.values())))
    fields: dict[str, Any] = {"dtype": code.torch}
    if draw(st.booleans()):
        low, high = code.code_range
        fields["q_min"], fields["q_max"] = sorted(
            [draw(st.integers(low, high)), draw(st.integers(low, high))]
        )
    if plan.direction == "backward":
        fields["ste"] = draw(st.sampled_from(hf.SteKind))
    real = draw(st.sampled_from(REALS))
    desc = plan.Descriptor(shape=tuple(shape), granularity=granularity, input_dtype=real, **fields)
    desc.validate()
    args = _args(draw, plan, desc)
    if draw(st.integers(0, 2)) == 0:
        form = draw(st.sampled_from([torch.float32, real]))
        zero_point = _bits(f"learned{draw(st.integers(0, 99))}", desc.view.scale_shape, form)
        args = replace(args, zero_point=draw(layouts).place(zero_point))
    return plan, Case("drawn", desc, lambda: args)


def _bits(label: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all; for floats, half of them near enough to 1 to be in range."""
    count = prod(shape)
    words = random_bits(label, count)
    whole = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize]
    values = torch.from_numpy(words.view(np.int64).astype(whole)).view(dtype)
    if dtype.is_floating_point:
        near = torch.from_numpy((words >> np.uint64(40)).astype(np.float64) % 4096 / 64 - 32).to(dtype)
        values = torch.where(torch.from_numpy(words % 2 == 0), values, near)
    return values.reshape(shape)


def _args(draw: st.DrawFn, plan: Any, desc: Any) -> Any:
    seed = draw(st.integers(0, 2**32))
    made: dict[str, Any] = {}
    chosen = selected("reference")(plan, Case("", desc, lambda: None), hf.Stream.current())  # type: ignore[arg-type, return-value]
    for name in chosen.tensors:  # type: ignore[attr-defined]
        shape, dtype = chosen.expected(name)  # type: ignore[attr-defined]
        layout = draw(layouts)
        values = _bits(f"{name}{seed}", shape, dtype)
        if name == "q" and desc.per_byte == 1 and isinstance(desc.codes, Code):
            low, high = desc.codes.code_range
            values = values.to(torch.int32).remainder(high - low + 1).add(low).to(dtype)
        if name in plan.outputs:
            values = poisoned_output(shape, dtype) if plan.direction == "forward" else values
            made[name] = layout.place(values, desc.per_byte > 1)
        else:
            packed = desc.per_byte > 1 and name == "q"
            made[name] = layout.repeat(layout.place(values, packed), packed)
    scales = desc.view.scale_shape
    made["scale"] = draw(
        st.floats(2.0**-140, 2.0**100, width=32)
        | st.sampled_from(["float32", "own", "bits"]).map(
            lambda kind: _scale(kind, seed, scales, desc.real.torch)
        )
    )
    if isinstance(made["scale"], torch.Tensor):
        made["scale"] = draw(layouts).place(made["scale"])
    if "zero_point" in plan.Args.__dataclass_fields__:
        zero_points = _bits(f"zero point{seed}", scales, torch.int32) >> draw(st.integers(0, 31))
        made["zero_point"] = draw(
            st.none() | st.integers(-300, 300) | st.just(draw(layouts).place(zero_points))
        )
    if plan.direction == "backward":
        made["accumulate"] = draw(st.booleans())
    return plan.Args(**made)


def _scale(kind: str, seed: int, shape: tuple[int, ...], real: torch.dtype) -> torch.Tensor:
    if kind == "bits":
        return _bits(f"scale{seed}", shape, torch.float32)
    near = (random_bits(f"scale{seed}", prod(shape)) % np.uint64(4096)).astype(np.float64) / 2048 + 2.0**-10
    return torch.from_numpy(near.reshape(shape)).to(real if kind == "own" else torch.float32)


def assert_equal(plan: Any, case: Case, way: Way) -> None:
    args, reference = expected(plan, case)
    assert check(plan, case, way, args, reference, selected(way.backend)) == []


@settings(max_examples=300, **SETTINGS)
@given(problems(), st.sampled_from([1, 2, 3]))
def test_cpu(problem: tuple[Any, Case], threads: int) -> None:
    assert_equal(*problem, Way("cpu", threads=threads, times=1))


@settings(max_examples=100, **SETTINGS)
@given(problems())
def test_gpu(problem: tuple[Any, Case]) -> None:
    gpu = gpu_way()
    assert gpu is not None
    assert_equal(*problem, gpu)


def _run(plan: Any, args: Any, **fields: Any) -> None:
    stream = hf.Stream.current()
    plan.select(stream, plan.Descriptor(**fields), hf.PlanPreference(backend="cpu")).run(stream, None, args)


@settings(max_examples=50, **SETTINGS)
@given(st.integers(0, 2**32), st.floats(2.0**-60, 2.0**60, width=32), st.integers(-200, 200))
def test_codes_survive_the_way_there_and_back(seed: int, scale: float, zero_point: int) -> None:
    q, y, again = _bits(str(seed), (512,), torch.int8), torch.empty(512), torch.empty(512, dtype=torch.int8)
    shared = {"scale": scale, "zero_point": zero_point}
    _run(hf.DequantizePerTensorPlan, hf.DequantizePerTensorArgs(q=q, y=y, **shared), shape=(512,))
    _run(hf.QuantizePerTensorPlan, hf.QuantizePerTensorArgs(x=y, q=again, **shared), shape=(512,))
    assert torch.equal(q, again)


@settings(max_examples=50, **SETTINGS)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 10))
def test_a_sample_does_not_depend_on_its_batch(seed: int, size: int, first: int) -> None:
    x = _bits(str(seed), (16, 33), torch.float32)
    whole, part = torch.empty(16, 33, dtype=torch.int8), torch.empty(size, 33, dtype=torch.int8)
    _run(hf.QuantizePerTensorPlan, hf.QuantizePerTensorArgs(x=x, scale=0.3, q=whole), shape=(16, 33))
    some = x[first : first + size]
    _run(hf.QuantizePerTensorPlan, hf.QuantizePerTensorArgs(x=some, scale=0.3, q=part), shape=(size, 33))
    assert torch.equal(whole[first : first + size], part)


@settings(max_examples=50, **SETTINGS)
@given(
    st.sampled_from([c for c in CODES.values() if c.per_byte > 1]), st.integers(0, 40), st.integers(0, 2**32)
)
def test_packing_there_and_back(code: Code, length: int, seed: int) -> None:
    low, high = code.code_range
    codes = (_bits(str(seed), (3, length), torch.int32) % (high - low + 1) + low).to(code.storage)
    packed = hf.pack(codes, code.torch)
    assert packed.shape == (3, -(-length // code.per_byte))
    assert torch.equal(hf.unpack(packed, code.torch, length), codes)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_an_output_with_gaps_that_fits_in_one_tile(backend: str) -> None:
    """Nothing of it is where the next element would be if there were no gaps."""
    desc = hf.DequantizePerGroupBackwardDescriptor(
        shape=(2,), input_dtype=torch.float32, output_dtype=torch.float32, group_size=1, axis=0
    )
    stream = hf.Stream.current("cpu")
    plan = hf.DequantizePerGroupBackwardPlan.select(stream, desc, hf.PlanPreference(backend=backend))
    memory = torch.full((4,), 9.0)
    dy, scale = torch.tensor([3.0, 5.0]), torch.tensor([0.5, 2.0])
    plan.run(stream, None, hf.DequantizePerGroupBackwardArgs(dy=dy, scale=scale, dq=memory[::2]))
    assert memory.tolist() == [1.5, 9.0, 10.0, 9.0]

"""Tests of learned scales and zero points: gradients against exact arithmetic and torch; order of sums."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import holdfast as hf
from holdfast.core.bits import digest
from holdfast.core.case import random_bits
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.stream import Workspace
from holdfast.core.values import rounded, spread
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.ops.tree_sum.reference import by_segment, tree_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Each backend and its device. Without a GPU, the gpu backend runs interpreted on the CPU.
BACKENDS = [("reference", "cpu"), ("cpu", "cpu"), ("gpu", DEVICE)]
GRANULARITIES: list[tuple[Granularity, tuple[int, ...]]] = [
    (PerTensor(), (70, 90)),
    (PerChannel(0), (4, 5000)),
    (PerChannel(1), (300, 20)),
    (PerToken(), (3, 7, 260)),
    (PerGroup(32), (9, 64)),
]


def numbers(
    label: str, shape: tuple[int, ...], dtype: torch.dtype, least: int = -6, most: int = 3
) -> torch.Tensor:
    precision = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}[dtype]
    return rounded(spread(label, math.prod(shape), precision, least, most), dtype).reshape(shape)


def gradients(backend: str, device: str, given: dict[str, Any], **fields: Any) -> dict[str, torch.Tensor]:
    """dx, dscale and dzero_point, computed by the plan and copied to the CPU."""
    x, scale, zero_point = given["x"], given["scale"], given.get("zero_point")
    learns_zero = isinstance(zero_point, torch.Tensor) and zero_point.is_floating_point()
    descriptor = hf.plans.FakeQuantizeLearnedBackwardDescriptor(
        shape=tuple(x.shape),
        input_dtype=x.dtype,
        scale_dtype=scale.dtype,
        zero_point_dtype=zero_point.dtype if learns_zero else None,
        **fields,
    )
    stream = hf.Stream.current(device)
    plan = hf.plans.FakeQuantizeLearnedBackwardPlan.select(
        stream, descriptor, hf.PlanPreference(backend=backend, precompile=False)
    )
    there = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    outputs = {"dx": torch.empty_like(there["x"]), "dscale": torch.empty_like(there["scale"])}
    if learns_zero:
        outputs["dzero_point"] = torch.empty_like(there["zero_point"])
    args = hf.plans.FakeQuantizeLearnedBackwardArgs(**there, **outputs)
    plan.run(stream, Workspace.allocate(plan.workspace_size(), device), args)
    return {name: out.cpu() for name, out in outputs.items()}


def added_one_by_one(terms: list[float], number: type[np.floating[Any]]) -> float:
    """The tree sum, written as plain loops."""
    while True:
        sums = []
        for begin in range(0, max(len(terms), 1), 4096):
            lanes = [number(0)] * 256
            for index, term in enumerate(terms[begin : begin + 4096]):
                lanes[index % 256] = lanes[index % 256] + number(term)
            while len(lanes) > 1:
                lanes = [lanes[2 * i] + lanes[2 * i + 1] for i in range(len(lanes) // 2)]
            sums.append(float(lanes[0]))
        if len(sums) == 1:
            return sums[0]
        terms = sums


@pytest.mark.parametrize("length", [0, 1, 2, 3, 33, 129, 255, 256, 257, 700, 4095, 4096, 4097, 9000])
def test_the_tree_sum_is_what_it_says(length: int) -> None:
    terms = spread(f"terms/{length}", length, 24, -9, 9).astype(np.float32)
    assert tree_sum(terms) == np.float32(added_one_by_one(terms.tolist(), np.float32))


def test_a_sum_of_nothing_but_minus_zeros_is_plus_zero() -> None:
    assert math.copysign(1, tree_sum(np.full(300, -0.0))) == 1


@pytest.mark.parametrize("length", [1, 3, 33, 257])
def test_the_tree_sum_takes_little_more_than_the_memory_of_its_terms(length: int) -> None:
    terms = np.ones((2**20 // length, length), np.float32)
    tracemalloc.start()
    try:
        tree_sum(terms)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * terms.nbytes


def test_zeros_at_the_end_change_no_bit() -> None:
    terms = spread("padding", 700, 24, -9, 9).astype(np.float32)
    longer = np.concatenate([terms, np.zeros(9000, np.float32)])
    assert tree_sum(terms).tobytes() == tree_sum(longer).tobytes()


def test_segments_are_in_row_major_order() -> None:
    values = np.arange(2 * 6 * 4)
    found = by_segment(values, PerGroup(3, axis=1).view((2, 6, 4)))
    assert found.shape == (2, 2, 4, 3)
    assert found[1, 0, 2].tolist() == [24 + 2, 24 + 6, 24 + 10]
    assert by_segment(values, PerChannel(1).view((2, 6, 4)))[5].tolist() == [20, 21, 22, 23, 44, 45, 46, 47]


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_values_worked_out_by_hand(backend: str, device: str) -> None:
    """Codes -8 to 7, scale 0.5 and zero point 2: lo = -10 and hi = 5."""
    x = torch.tensor([0.6, -0.25, 2.74, 2.75, 3.0, -5.0, -5.25, -5.5, float("nan"), float("inf"), 0.0])
    #    t =         1.2   -0.5   5.48  5.5    6    -10    -10.5    -11
    #    r =           1      0      5    6    6    -10      -10    -11
    dy = torch.tensor([1.0, 2.0, 1.0, 4.0, 1.0, 8.0, 2.0, 16.0, float("nan"), 1.0, 3.0])
    given = {"x": x, "dy": dy, "scale": torch.tensor(0.5), "zero_point": torch.tensor(1.5)}
    found = gradients(backend, device, given, dtype=torch.int4, grad_factor=0.5)
    small = (
        np.float32(1)
        - np.float32(0.6) / np.float32(0.5)
        + (np.float32(5) - np.float32(2.74) / np.float32(0.5))
    )
    terms = float(small) + 2 * 0.5 + 4 * 5 + 5 + 0 + 2 * 0.5 + 16 * -10 + 0 + 5
    assert found["dscale"].item() == pytest.approx(0.5 * terms, rel=1e-6)
    assert found["dzero_point"].item() == 0.5 * -0.5 * (4 + 1 + 16 + 1)
    assert found["dx"].tolist() == [1.0, 2.0, 1.0, 0.0, 0.0, 8.0, 2.0, 0.0, 0.0, 0.0, 3.0]


def exact_gradients(
    given: dict[str, torch.Tensor], granularity: Granularity, q_min: int, q_max: int, factor: float
) -> dict[str, list[tuple[Fraction, Fraction]]]:
    """dscale and dzero_point in rational arithmetic, with their sums of magnitudes."""
    compute = np.float64 if given["x"].dtype == torch.float64 else np.float32
    x, dy, scale, zero = (given[name].double().numpy() for name in ("x", "dy", "scale", "zero_point"))
    view = granularity.view(x.shape)
    xs, dys = (by_segment(values, view).reshape(view.scale_count, -1) for values in (x, dy))
    found: dict[str, list[tuple[Fraction, Fraction]]] = {"dscale": [], "dzero_point": []}
    for k in range(view.scale_count):
        s, z = compute(scale.flat[k]), round(zero.flat[k])
        lo, hi = q_min - z, q_max - z
        sums = [Fraction(0)] * 4
        for v, u in zip(xs[k].astype(compute), dys[k], strict=True):
            t, dy_exact = v / s, Fraction(float(u))
            r = int(np.rint(t))
            step = (
                Fraction(lo)
                if r < lo
                else Fraction(hi)
                if r > hi
                else r - Fraction(float(v)) / Fraction(float(s))
            )
            sums[0] += dy_exact * step
            sums[1] += abs(dy_exact) * (abs(min(max(r, lo), hi)) + 1)
            if not lo <= r <= hi:
                sums[2] -= dy_exact * Fraction(float(s))
                sums[3] += abs(dy_exact) * Fraction(float(s))
        exact_factor = Fraction(factor)
        found["dscale"].append((exact_factor * sums[0], exact_factor * sums[1]))
        found["dzero_point"].append((exact_factor * sums[2], exact_factor * sums[3]))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("granularity", "shape"), GRANULARITIES, ids=str)
def test_gradients_are_as_exact_as_the_plan_says(
    granularity: Granularity, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    scales = granularity.view(shape).scale_shape
    given = {
        "x": numbers(f"exact x/{dtype}", shape, dtype),
        "dy": numbers(f"exact dy/{dtype}", shape, dtype),
        "scale": numbers("exact scale", scales, dtype, -3, -2).abs(),
        "zero_point": numbers("exact zero point", scales, dtype, -1, 2),
    }
    found = gradients("cpu", "cpu", given, granularity=granularity, q_min=-8, q_max=7, grad_factor=0.3)
    plan = hf.plans.FakeQuantizeLearnedBackwardPlan.select(
        hf.Stream.current("cpu"),
        hf.plans.FakeQuantizeLearnedBackwardDescriptor(
            shape=shape, granularity=granularity, input_dtype=dtype, q_min=-8, q_max=7, scale_dtype=dtype,
            zero_point_dtype=dtype,
        ),
        hf.PlanPreference(backend="reference"),
    )  # fmt: skip
    stated = plan.precision_guarantee().ulp
    for name, exact in exact_gradients(given, granularity, -8, 7, 0.3).items():
        for value, (right, magnitude) in zip(found[name].double().flatten().tolist(), exact, strict=True):
            unit = Fraction(2) ** (_exponent(magnitude) - {8: 52, 4: 23, 2: 10}[dtype.itemsize])
            if dtype == torch.bfloat16:
                unit *= 8
            assert abs(Fraction(value) - right) <= Fraction(stated[name]) * unit


def _exponent(value: Fraction) -> int:
    return math.frexp(float(value))[1] - 1


def test_the_bound_is_not_loose() -> None:
    """The bound for float64 is far below the error that one wrong term causes."""
    descriptor = hf.plans.FakeQuantizeLearnedBackwardDescriptor(
        shape=(10**6,), input_dtype=torch.float64, dtype=torch.int8
    )
    plan = hf.plans.FakeQuantizeLearnedBackwardPlan.select(
        hf.Stream.current("cpu"), descriptor, hf.PlanPreference(backend="reference")
    )
    assert plan.precision_guarantee().ulp["dscale"] < 100


@pytest.mark.parametrize(("backend", "device"), [b for b in BACKENDS if b[0] != "reference"])
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [(PerTensor(), (60001,)), (PerChannel(1), (4500, 20)), (PerGroup(32), (9, 96))],
    ids=str,
)
def test_a_hundred_runs_are_one(
    granularity: Granularity, shape: tuple[int, ...], backend: str, device: str
) -> None:
    scales = granularity.view(shape).scale_shape
    given = {
        "x": numbers("runs x", shape, torch.float32),
        "dy": numbers("runs dy", shape, torch.float32),
        "scale": numbers("runs scale", scales, torch.float32, -4, -3).abs(),
        "zero_point": numbers("runs zero point", scales, torch.float32, 0, 2),
    }
    times = 100 if backend == "cpu" or device == "cuda" else 2  # the interpreter is sequential
    found = {
        digest(gradients(backend, device, given, dtype=torch.int4, granularity=granularity))
        for _ in range(times)
    }
    assert found == {digest(gradients("reference", "cpu", given, dtype=torch.int4, granularity=granularity))}


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.usefixtures("shared_finely")
def test_the_number_of_threads_changes_no_bit(threads: Callable[[int], None]) -> None:
    given = {
        "x": numbers("threads x", (70, 40, 50), torch.bfloat16),
        "dy": numbers("threads dy", (70, 40, 50), torch.bfloat16),
    }
    found = set()
    for count in (1, 2, 3, 8):
        threads(count)
        per_count = {}
        for granularity in (
            PerTensor(),
            PerChannel(0),
            PerChannel(1),
            PerChannel(2),
            PerToken(),
            PerGroup(10),
        ):
            scale = torch.full(granularity.view((70, 40, 50)).scale_shape, 0.3)
            made = gradients(
                "cpu", "cpu", {**given, "scale": scale}, dtype=torch.int4, granularity=granularity
            )
            per_count |= {f"{granularity}{name}": out for name, out in made.items()}
        found.add(digest(per_count))
    assert len(found) == 1


@pytest.mark.parametrize(("backend", "device"), [b for b in BACKENDS if b[0] != "reference"])
def test_any_quotient_is_correctly_rounded(backend: str, device: str) -> None:
    """With one element per group, dscale is -t * dy, which exposes every bit of a small quotient t."""
    count = 1 << 14
    bits = random_bits("any quotient", 2 * count).astype(np.uint32)
    x, s = (torch.from_numpy(half.view(np.float32).copy()) for half in (bits[:count], bits[count:]))
    odd = torch.from_numpy((bits[:4096] % 4096 | 1).astype(np.float32))
    other = torch.from_numpy((bits[4096:8192] % 4096 | 1).astype(np.float32))
    # Quotients half-way between two subnormal numbers: other * 2^-150.
    s[:4096] = odd * 2.0**20
    x[:4096] = odd * other * 2.0**-130
    given = {"x": x, "dy": torch.full_like(x, 2.0**100), "scale": s}
    fields = {"q_min": -65536, "q_max": 65536, "granularity": PerGroup(1)}
    found = gradients(backend, device, given, **fields)
    assert digest(found) == digest(gradients("reference", "cpu", given, **fields))
    assert (found["dscale"][:4096] != 0).all()


def test_a_third_level() -> None:
    """More than 4096 * 4096 elements need a third level of blocks."""
    x = numbers("third level", (4096 * 4096 + 5,), torch.float32, -3, 3)
    descriptor = hf.plans.LsqInitDescriptor(shape=tuple(x.shape), q_max=7)
    found = []
    for backend, device in (
        ("reference", "cpu"),
        ("cpu", "cpu"),
        *([("gpu", "cuda")] if DEVICE == "cuda" else []),
    ):
        stream = hf.Stream.current(device)
        plan = hf.plans.LsqInitPlan.select(
            stream, descriptor, hf.PlanPreference(backend=backend, precompile=False)
        )
        scale = torch.empty((), device=device)
        args = hf.plans.LsqInitArgs(x=x.to(device), scale=scale)
        plan.run(stream, Workspace.allocate(plan.workspace_size(), device), args)
        found.append(scale.item())
    assert len(set(found)) == 1


def test_further_levels_on_the_gpu_are_those_of_the_reference() -> None:
    from holdfast.backends.steps import Steps
    from holdfast.core.dtypes import FLOATS
    from holdfast.core.segments import segments_in_order
    from holdfast.ops.tree_sum import gpu

    shape, compute = (2, 4096 * 4096 + 1), FLOATS["float32"]
    tensor, totals = torch.empty(shape, device="meta"), torch.empty(2, device=DEVICE)
    found = segments_in_order(PerChannel(0).view(shape), (tensor,), (totals,))
    further = gpu.further_levels(found.length, 1)
    assert [left for left, _ in further] == [4097, 2]
    sums, layout = gpu.workspace_sums(found.count, further, compute, 1)
    args = hf.plans.LsqInitArgs(x=totals, scale=totals)
    steps = Steps(torch.device(DEVICE), args)
    over, tuning = found.over.strides[1:], gpu.TUNING.on(torch.device(DEVICE))
    gpu.add_further_levels(steps, found, further, sums, ("scale",), over, tuning, factor=0.5)
    workspace = Workspace.allocate(layout.size, DEVICE)
    values = spread("further", 2 * 4097, 24, -9, 9).astype(np.float32).reshape(2, 4097)
    sums[0][0].tensor(workspace).copy_(torch.from_numpy(values.flatten()))
    steps.launch(hf.Stream.current(DEVICE), workspace, args, args.signature()[1])
    assert totals.cpu().numpy().tobytes() == (tree_sum(values) * np.float32(0.5)).tobytes()


def lsq(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor, q_min: int, q_max: int) -> torch.Tensor:
    """Fake quantization in plain torch: rounding passes gradients through, clamping stops them."""
    r = x / s + (torch.round(x / s) - x / s).detach()
    whole = z + (torch.round(z) - z).detach()
    low, high = q_min - whole, q_max - whole
    return torch.where(r < low, low, torch.where(r > high, high, r)) * s


@pytest.mark.parametrize(("granularity", "shape"), GRANULARITIES, ids=str)
def test_autograd_finds_the_gradients_of_the_formula(
    granularity: Granularity, shape: tuple[int, ...]
) -> None:
    view = granularity.view(shape)
    x = numbers("formula x", shape, torch.float64).requires_grad_()
    scale = numbers("formula scale", view.scale_shape, torch.float64, -3, -2).abs().requires_grad_()
    zero_point = numbers("formula zero point", view.scale_shape, torch.float64, -1, 2).requires_grad_()
    dy = numbers("formula dy", shape, torch.float64)
    y = hf.fake_quantize(x, scale, zero_point, dtype=torch.int4, granularity=granularity)
    found = torch.autograd.grad(y, (x, scale, zero_point), dy)
    split = x.reshape(view.shape)
    beside = [n if varies else 1 for n, varies in zip(view.shape, view.varies, strict=True)]
    same = lsq(split, scale.reshape(beside), zero_point.reshape(beside), -8, 7).reshape(shape)
    for mine, theirs in zip(found, torch.autograd.grad(same, (x, scale, zero_point), dy), strict=True):
        # torch sums the gradients of the formula in another order.
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("granularity", "shape"), GRANULARITIES, ids=str)
def test_every_dtype_learns_at_every_granularity(
    granularity: Granularity, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    scales = granularity.view(shape).scale_shape
    x = numbers("every x", shape, dtype).requires_grad_()
    for learned in (dtype, torch.float32):
        scale = torch.full(scales, 0.25, dtype=learned, requires_grad=True)
        zero_point = torch.zeros(scales, dtype=learned, requires_grad=True)
        hf.fake_quantize(x, scale, zero_point, q_min=-4, q_max=3, granularity=granularity).float().pow(
            2
        ).sum().backward()
        for parameter in (scale, zero_point):
            assert parameter.grad is not None and parameter.grad.dtype == learned
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.isfinite().all() and parameter.grad.any()


def test_the_factor_of_lsq() -> None:
    x = numbers("factor", (5, 300), torch.float32)
    scale = torch.full((5,), 0.3, requires_grad=True)

    def gradient(factor: Any) -> torch.Tensor:
        y = hf.fake_quantize(x, scale, dtype=torch.int4, granularity=PerChannel(0), grad_factor=factor)
        (found,) = torch.autograd.grad(y, scale, x)
        return found

    assert torch.equal(gradient("lsq"), gradient(1 / math.sqrt(300 * 7)))
    torch.testing.assert_close(gradient("lsq"), gradient(1.0) / math.sqrt(300 * 7))


def test_a_scale_that_is_learned_gets_better() -> None:
    """A few steps of gradient descent on the scale reduce the quantization error."""
    x = numbers("descent", (4000,), torch.float32, -2, 1)
    scale = hf.lsq_init(x, dtype=torch.int4).mul(4).requires_grad_()

    def error() -> torch.Tensor:
        return (hf.fake_quantize(x, scale, dtype=torch.int4, grad_factor="lsq") - x).pow(2).mean()

    before = error().item()
    for _ in range(200):
        (gradient,) = torch.autograd.grad(error(), scale)
        with torch.no_grad():
            scale -= 100.0 * gradient
    assert error().item() < 0.3 * before


def test_a_tensor_without_elements_has_a_gradient_of_zero() -> None:
    scale = torch.ones(3, requires_grad=True)
    hf.fake_quantize(torch.zeros(0, 3), scale, dtype=torch.int8, granularity=PerChannel(1)).sum().backward()
    assert scale.grad is not None and scale.grad.tolist() == [0.0, 0.0, 0.0]


OPERATOR = "fake_quantize_learned_backward"


def _operator_arguments(learns_zero: bool) -> tuple[Any, ...]:
    x, dy = numbers("operator x", (6, 40), torch.float32), numbers("operator dy", (6, 40), torch.float32)
    zero_point = torch.linspace(-1, 1, 6) if learns_zero else None
    scale = torch.full((6,), 0.25)
    return dy, x, scale, 1.0, zero_point, 0, "per_channel:0", -8, 7, "in_range", 0.5, learns_zero


@pytest.mark.parametrize("learns_zero", [False, True])
def test_opcheck(learns_zero: bool) -> None:
    arguments = _operator_arguments(learns_zero)
    operator = getattr(torch.ops.holdfast, OPERATOR).default
    torch.library.opcheck(operator, arguments)
    torch.library.opcheck(operator, (*arguments[:10], None, learns_zero))
    for codes in (("int4", None, None), (None, -3, 5)):
        torch.library.opcheck(torch.ops.holdfast.lsq_init.default, (arguments[1], "per_channel:0", *codes))
    assert operator(*arguments)[2].numel() == (6 if learns_zero else 0)


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(-1), PerGroup(2)], ids=str)
def test_the_factor_of_lsq_ties_nothing_that_is_compiled_to_a_shape(granularity: hf.Granularity) -> None:
    def step(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return hf.fake_quantize(x, scale, dtype=torch.int4, granularity=granularity, grad_factor="lsq").sin()

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for rows in (5, 7, 8, 11):
        x = numbers(f"symbolic {rows}", (rows, 6), torch.float32)
        ones, scales = torch.ones(rows, 6), granularity.view((rows, 6)).scale_shape
        learned = [torch.full(scales, 0.3, requires_grad=True) for _ in range(2)]
        for call, scale in zip((step, compiled), learned, strict=True):
            call(x, scale).backward(ones)
        assert learned[0].grad is not None and learned[1].grad is not None
        assert torch.equal(learned[0].grad, learned[1].grad)
    assert counter.frame_count == 1


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerToken(), PerGroup(4)], ids=str)
def test_lsq_init_compiles_whole_with_dynamic_shapes(granularity: hf.Granularity) -> None:
    def start(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            hf.lsq_init(x, dtype=torch.int4, granularity=granularity) * 2,
            hf.lsq_init(x, q_min=-3, q_max=5, granularity=granularity),
        )

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(start, fullgraph=True, dynamic=True, backend=counter)
    for rows in (3, 5, 8):
        x = numbers(f"lsq_init compiled {rows}", (rows, 8), torch.bfloat16)
        assert all(map(torch.equal, compiled(x), start(x)))
    assert counter.frame_count == 1


def test_compiled_as_a_whole() -> None:
    x = numbers("compiled", (8, 96), torch.float32)

    def step(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        y = hf.fake_quantize(
            x, scale, zero_point, dtype=torch.int4, granularity=PerGroup(32), grad_factor="lsq"
        )
        return (y * x).sum()

    def learned() -> tuple[torch.Tensor, ...]:
        return (
            x.clone().requires_grad_(),
            torch.full((8, 3), 0.2, requires_grad=True),
            torch.full((8, 3), 1.5, requires_grad=True),
        )

    plain, compiled = learned(), learned()
    step(*plain).backward()
    torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled).backward()
    for one, other in zip(plain, compiled, strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_gradients_for_a_batch_of_upstream_ones() -> None:
    """vmap over upstream gradients gives the bits of a loop over them."""
    x = numbers("batch x", (3, 40), torch.float32).requires_grad_()
    scale = torch.tensor([0.2, 0.3, 0.4], requires_grad=True)
    zero_point = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    y = hf.fake_quantize(x, scale, zero_point, dtype=torch.int4, granularity=PerChannel(0), grad_factor="lsq")
    dys = numbers("batch dy", (5, 3, 40), torch.float32)
    learned = x, scale, zero_point
    found = torch.autograd.grad(y, learned, dys, is_grads_batched=True, retain_graph=True)
    for i, dy in enumerate(dys):
        for mine, alone in zip(found, torch.autograd.grad(y, learned, dy, retain_graph=True), strict=True):
            assert torch.equal(mine[i], alone)


def test_a_second_derivative_is_refused() -> None:
    scale = torch.tensor(0.5, requires_grad=True)
    y = hf.fake_quantize(numbers("second", (30,), torch.float32), scale, dtype=torch.int4)
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), scale, create_graph=True)
    with pytest.raises(hf.Unsupported, match="its gradient is an estimate"):
        gradient.backward()


def test_a_workspace_may_begin_anywhere_and_hold_anything() -> None:
    x, dy = numbers("workspace x", (9000,), torch.float32), numbers("workspace dy", (9000,), torch.float32)
    descriptor = hf.plans.FakeQuantizeLearnedBackwardDescriptor(shape=(9000,), dtype=torch.int8)
    stream, found = hf.Stream.current("cpu"), set()
    for backend in ("cpu", "gpu") if DEVICE == "cpu" else ("cpu",):
        plan = hf.plans.FakeQuantizeLearnedBackwardPlan.select(
            stream, descriptor, hf.PlanPreference(backend=backend, precompile=False)
        )
        for start, filling in ((0, 0), (3, 0xFF), (8, 0x7F)):
            memory = torch.full((plan.workspace_size() + start,), filling, dtype=torch.uint8)
            args = hf.plans.FakeQuantizeLearnedBackwardArgs(
                dy=dy, x=x, scale=0.1, dx=torch.empty_like(x), dscale=torch.empty(())
            )
            plan.run(stream, memory[start:], args)
            found.add(digest({"dx": args.dx, "dscale": args.dscale}))
        with pytest.raises(hf.WorkspaceTooSmall, match=r"allocate plan\.workspace_size"):
            plan.run(stream, memory[: plan.workspace_size() - 1], args)
    assert len(found) == 1


def test_a_descriptor_goes_to_json_and_back() -> None:
    descriptor = hf.plans.FakeQuantizeLearnedBackwardDescriptor(
        shape=(4, 96), granularity=PerGroup(32), input_dtype=torch.bfloat16, q_min=-5, q_max=6,
        ste=hf.SteKind.TANH, scale_dtype=torch.bfloat16, zero_point_dtype=torch.float32,
        grad_factor=1 / math.sqrt(192),
    )  # fmt: skip
    assert hf.plans.Descriptor.from_json(descriptor.to_json()) == descriptor
    whole = json.dumps({**json.loads(descriptor.to_json()), "grad_factor": 1})
    assert hf.plans.FakeQuantizeLearnedBackwardDescriptor.from_json(whole).grad_factor == 1.0
    with pytest.raises(hf.InvalidDescriptor, match="grad_factor is 'lsq'; it must be a number"):
        hf.plans.Descriptor.from_json(whole.replace('"grad_factor": 1', '"grad_factor": "lsq"'))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"scale_dtype": torch.float16}, "scale_dtype is torch.float16; to be learned, it must be torch."),
        (
            {"zero_point_dtype": torch.int32},
            "zero_point_dtype is torch.int32; to be learned, it must be torch.float32.",
        ),
        ({"grad_factor": math.nan}, "grad_factor is nan; it must be a finite number."),
        ({"grad_factor": math.inf}, "grad_factor is inf; it must be a finite number."),
        ({"grad_factor": "lsq"}, "grad_factor is 'lsq'; it must be a finite number."),
        ({"ste": "relu"}, "ste is 'relu'; accepted are"),
        ({"granularity": 3}, "granularity is 3; accepted are"),
        ({"dtype": None}, "there is no range of codes; give dtype"),
    ],
)
def test_a_bad_descriptor_is_told_why(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(hf.InvalidDescriptor, match=sentence.replace(".", r"\.")):
        hf.plans.FakeQuantizeLearnedBackwardDescriptor(
            **{"shape": (4, 6), "dtype": torch.int8, **fields}
        ).validate()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"dscale": torch.zeros(4, dtype=torch.float64)},
            "dscale has dtype torch.float64; the descriptor asks for",
        ),
        ({"dscale": torch.zeros(5)}, r"dscale has shape \(5,\); PerChannel"),
        ({"dscale": None}, "dscale is a NoneType; it must be a torch tensor"),
        ({"dzero_point": None}, "dzero_point is a NoneType; it must be a torch tensor"),
        ({"dzero_point": torch.zeros(2, 2)}, r"dzero_point has shape \(2, 2\)"),
        (
            {"zero_point": torch.zeros(4, dtype=torch.int32)},
            "zero_point is torch.int32; to be learned it must be",
        ),
        ({"zero_point": 3}, "zero_point is int; to be learned it must be a tensor of torch.float32"),
        ({"dx": torch.zeros(4, 6, dtype=torch.float64)}, "dx has dtype torch.float64"),
        ({"dy": torch.zeros(4, 5)}, r"dy has shape \(4, 5\)"),
        ({"dscale": torch.zeros(1).expand(4)}, "elements share memory"),
        ({"scale": -1.0}, "scale is -1.0; it must be a positive number"),
        ({"scale": torch.ones(4, dtype=torch.float64)}, "scale has dtype torch.float64"),
    ],
)
def test_bad_args_are_told_why_and_nothing_is_written(changes: dict[str, Any], sentence: str) -> None:
    descriptor = hf.plans.FakeQuantizeLearnedBackwardDescriptor(
        shape=(4, 6), dtype=torch.int8, granularity=PerChannel(0), zero_point_dtype=torch.float32
    )
    stream = hf.Stream.current("cpu")
    plan = hf.plans.FakeQuantizeLearnedBackwardPlan.select(
        stream, descriptor, hf.PlanPreference(backend="reference")
    )
    given = {
        "x": torch.ones(4, 6), "dy": torch.ones(4, 6), "scale": torch.ones(4), "zero_point": torch.zeros(4),
        "dx": torch.full((4, 6), 9.0), "dscale": torch.full((4,), 9.0), "dzero_point": torch.full((4,), 9.0),
    }  # fmt: skip
    args = hf.plans.FakeQuantizeLearnedBackwardArgs(**{**given, **changes})
    with pytest.raises(hf.InvalidArgs, match=sentence):
        plan.run(stream, None, args)
    assert plan.can_implement(args).reason
    for name in {"dx", "dscale", "dzero_point"} - changes.keys():
        assert (given[name] == 9).all()


def test_a_gradient_of_the_zero_point_must_be_described() -> None:
    descriptor = hf.plans.FakeQuantizeLearnedBackwardDescriptor(shape=(4,), dtype=torch.int8)
    stream = hf.Stream.current("cpu")
    plan = hf.plans.FakeQuantizeLearnedBackwardPlan.select(
        stream, descriptor, hf.PlanPreference(backend="reference")
    )
    args = hf.plans.FakeQuantizeLearnedBackwardArgs(
        x=torch.ones(4),
        dy=torch.ones(4),
        scale=0.5,
        dx=torch.ones(4),
        dscale=torch.ones(()),
        dzero_point=torch.ones(()),
    )
    assert "the descriptor has no zero_point_dtype" in plan.can_implement(args).reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("granularity", "shape"), GRANULARITIES, ids=str)
def test_lsq_init_is_as_exact_as_the_plan_says(
    granularity: Granularity, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = numbers("init", shape, dtype)
    found = hf.lsq_init(x, dtype=torch.int4, granularity=granularity)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    view = granularity.view(shape)
    assert found.shape == view.scale_shape
    plan = hf.plans.LsqInitPlan.select(
        hf.Stream.current("cpu"),
        hf.plans.LsqInitDescriptor(shape=shape, input_dtype=dtype, granularity=granularity, q_max=7),
        hf.PlanPreference(backend="reference"),
    )
    root = Fraction(math.isqrt(7 * 10**60), 10**30)
    segments = by_segment(x.double().numpy(), view).reshape(view.scale_count, -1)
    for value, elements in zip(found.double().flatten().tolist(), segments.tolist(), strict=True):
        exact = 2 * sum(abs(Fraction(element)) for element in elements) / len(elements) / root
        unit = Fraction(2) ** (_exponent(exact) - (52 if dtype == torch.float64 else 23))
        assert abs(Fraction(value) - exact) <= Fraction(plan.precision_guarantee().ulp["scale"]) * unit


def test_lsq_init_of_nothing_zeros_and_nan() -> None:
    rows = torch.tensor([[0.0, -0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1e-20, 0.0]])
    found = hf.lsq_init(rows, dtype=torch.int8, granularity=PerToken())
    assert found[[0, 3]].tolist() == [np.float32(1e-12)] * 2
    assert found[1].isnan() and found[2] == float("inf")
    assert hf.lsq_init(torch.zeros(0), dtype=torch.int8).item() == np.float32(1e-12)


def test_lsq_init_tells_what_it_takes() -> None:
    x = torch.ones(4)
    with pytest.raises(hf.InvalidDescriptor, match="q_max is 0; for the first scale of LSQ it must be"):
        hf.lsq_init(x, q_min=-3, q_max=0)
    with pytest.raises(hf.InvalidDescriptor, match="there is no range of codes; give dtype"):
        hf.lsq_init(x)
    with pytest.raises(hf.InvalidArgs, match="x is a list; it must be a torch tensor"):
        hf.lsq_init([1.0], dtype=torch.int8)  # type: ignore[arg-type]
    with pytest.raises(hf.InvalidDescriptor, match=r"input_dtype is torch\.int64"):
        hf.lsq_init(torch.ones(3, dtype=torch.int64), dtype=torch.int8)


def test_pieces_are_what_the_workspace_is_cut_into() -> None:
    """The workspace holds the block sums of each tree and nothing else."""
    layout = WorkspaceLayout()
    for _ in range(2):
        layout.take(4 * 2, torch.float32)
    for zero_point_dtype, expected in ((None, 256 + 256), (torch.float32, layout.size)):
        descriptor = hf.plans.FakeQuantizeLearnedBackwardDescriptor(
            shape=(4, 8192), dtype=torch.int8, granularity=PerChannel(0), zero_point_dtype=zero_point_dtype
        )
        plan = hf.plans.FakeQuantizeLearnedBackwardPlan.select(
            hf.Stream.current("cpu"), descriptor, hf.PlanPreference(backend="cpu", precompile=False)
        )
        assert plan.workspace_size() == expected

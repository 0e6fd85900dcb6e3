"""The stated error bounds against exact rational arithmetic, and the rules by tables made by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core.case import Case
from holdfast.core.dtypes import FLOATS, dtype_name
from holdfast.proof.bits import canonical
from holdfast.proof.conformance import cases_of, expected, gpu_way, selected

#: The plans with a scale for each element; the others have tests of their own.
PLANS = {
    name: plan for name, plan in hf.plans().items() if plan.op in ("quantize", "dequantize", "fake_quantize")
}
#: Elements of each case that are checked; rational numbers are slow.
SAMPLED = 48


def ulp(value: Fraction, dtype: torch.dtype) -> Fraction:
    """The distance between neighbours of ``dtype`` around ``value``."""
    record, info = FLOATS[dtype_name(dtype)], torch.finfo(dtype)
    least = math.frexp(info.smallest_normal)[1] - 1
    exponent = least
    if value:
        exponent = max(least, _exponent(abs(value)))
    return Fraction(2) ** (exponent - record.precision + 1)


def _exponent(value: Fraction) -> int:
    """The largest e with 2**e <= value."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if Fraction(2) ** e <= value else e - 1


def rint(value: Fraction) -> int:
    """To nearest, ties to even: what Python's own rounding of rationals does."""
    return round(value)


@dataclass
class Element:
    """One element of a case: everything that its result depends on, as exact numbers."""

    given: dict[str, float]
    s: Fraction
    z: int
    result: float


def elements(plan: Any, case: Case) -> list[Element]:
    """Some elements of what the reference made of a case, those whose values are all finite."""
    args, reference = expected(plan, case)
    desc: Any = case.descriptor
    view = desc.view
    count = math.prod(desc.shape)
    if count == 0:
        return []

    def spread(values: Any) -> torch.Tensor:
        if not isinstance(values, torch.Tensor):
            made = torch.tensor(0 if values is None else values, dtype=torch.float64)
            return made.to(desc.real.compute.torch).double().expand(desc.shape).reshape(-1)
        strides = view.scale_strides(values.shape, values.stride())
        return values.as_strided(view.shape, strides, values.storage_offset()).double().reshape(-1)

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        if desc.per_byte > 1 and tensor.dtype == torch.uint8:
            tensor = hf.unpack(tensor.contiguous(), desc.codes.torch, desc.shape[-1])
        return tensor.double().reshape(-1)

    names = [name for name in ("x", "dy", "q", "y") if hasattr(args, name) and name not in plan.outputs]
    operands = {name: flat(getattr(args, name)) for name in names}
    scales, zero_points = spread(args.scale), spread(getattr(args, "zero_point", None))  # type: ignore[attr-defined]
    results = flat(getattr(reference, plan.outputs[0]))
    found = []
    for i in range(0, count, max(1, count // SAMPLED)):
        given = {name: float(values[i]) for name, values in operands.items()}
        s, z = float(scales[i]), whole(float(zero_points[i]))
        if all(map(math.isfinite, [*given.values(), s])) and s != 0:
            found.append(Element(given, Fraction(s), z, float(results[i])))
    return found


def whole(zero_point: float) -> int:
    """A zero point as it is used: a learned one is rounded, and 0 if it is NaN."""
    return 0 if math.isnan(zero_point) else round(min(max(zero_point, -(2.0**23)), 2.0**23))


def exact(plan: Any, desc: Any, element: Element) -> tuple[Fraction, torch.dtype | None]:
    """The exact result, and the dtype whose units its error counts in; None for codes."""
    given = {name: Fraction(value) for name, value in element.given.items()}
    s, z = element.s, element.z
    if plan.op == "dequantize":
        if plan.direction == "forward":
            return (given["q"] - z) * s, desc.output_dtype
        return given["dy"] * s, desc.gradient_of_codes
    q_min, q_max = desc.code_range
    if plan.op == "fake_quantize":
        return exactly_faked(plan, desc, element), desc.input_dtype
    if plan.direction == "forward":
        return Fraction(min(max(rint(given["x"] / s) + z, q_min), q_max)), None
    # The mask is that of the forward, whose quotient is rounded to the compute type first.
    quotient = torch.tensor(element.given["x"], dtype=desc.real.compute.torch) / torch.tensor(
        float(s), dtype=desc.real.compute.torch
    )
    r = quotient.round()
    return (given["dy"] / s if q_min - z <= r <= q_max - z else Fraction(0)), desc.input_dtype


def exactly_faked(plan: Any, desc: Any, element: Element) -> Fraction:
    """The code that quantize gives, times the scale; or the estimator at its argument as that was rounded."""
    number = {32: np.float32, 64: np.float64}[desc.real.compute.bits]
    x, s = number(element.given["x"]), number(float(element.s))
    lo, hi = (number(end - element.z) for end in desc.code_range)
    with np.errstate(all="ignore"):
        lo_x, hi_x, r = lo * s, hi * s, np.rint(x / s)
        mid, half = (lo_x + hi_x) / number(2), (hi_x - lo_x) / number(2)
        argument = (x - mid) / s if getattr(desc, "ste", None) == "tanh" else np.abs((x - mid) / half)
    if plan.direction == "forward":
        return Fraction(int(min(max(r, lo), hi))) * element.s
    dy = Fraction(element.given["dy"])
    if desc.ste in ("identity", "in_range", "clipped_identity"):
        passes = {"identity": True, "in_range": lo <= r <= hi, "clipped_identity": lo_x <= x <= hi_x}
        return dy if passes[desc.ste] else Fraction(0)
    if np.isnan(argument):
        return Fraction(0)
    if desc.ste == "hard_tanh":
        return dy * (1 - Fraction(float(argument))) if argument < 1 else Fraction(0)
    with mpmath.workdps(50):
        e = mpmath.exp(-min(2 * abs(mpmath.mpf(float(argument))), 80 if number is np.float32 else 700))
        return dy * Fraction(*mpmath.libmp.to_rational((4 * e / (1 + e) ** 2)._mpf_))


@pytest.mark.parametrize("name", PLANS)
def test_error_is_within_the_stated_bound(name: str) -> None:
    plan = PLANS[name]
    checked = 0
    for case in cases_of(plan):
        if getattr(case.make(), "accumulate", False):
            continue  # what is added to is not part of the bound
        promise = selected("reference")(plan, case, hf.Stream.current()).precision_guarantee()
        bound = Fraction(promise.ulp[plan.outputs[0]])
        for element in elements(plan, case):
            right, dtype = exact(plan, case.descriptor, element)
            if dtype is not None and abs(right) >= Fraction(torch.finfo(dtype).max):
                assert abs(element.result) >= torch.finfo(dtype).max
                continue
            unit = Fraction(1) if dtype is None else ulp(right, dtype)
            error = abs(Fraction(element.result) - right)
            assert error <= bound * unit, (case.name, element, float(error / unit))
            checked += 1
    assert checked > 500


def test_units_are_those_of_the_dtype() -> None:
    assert ulp(Fraction(1), torch.float32) == Fraction(2) ** -23
    assert ulp(Fraction(3, 2), torch.float16) == Fraction(2) ** -10
    assert ulp(Fraction(0), torch.float32) == Fraction(2) ** -149
    assert ulp(Fraction(1, 3), torch.bfloat16) == Fraction(2) ** -9


# The rules, by hand. Each table runs on every backend.

GPU = gpu_way()
BACKENDS = {"reference": "cpu", "cpu": "cpu", **({GPU.backend: GPU.device} if GPU else {})}
INF, NAN = float("inf"), float("nan")


def quantized(backend: str, x: list[float], scale: float, zero_point: int, **fields: Any) -> list[Any]:
    """Codes, by a plan on ``backend``."""
    device = BACKENDS[backend]
    desc = hf.QuantizePerTensorDescriptor(shape=(len(x),), **fields)
    plan = hf.QuantizePerTensorPlan.select(
        hf.Stream.current(device), desc, hf.PlanPreference(backend=backend, precompile=False)
    )
    q = torch.empty(desc.code_shape, dtype=desc.code_storage, device=device)
    values = torch.tensor(x, dtype=desc.input_dtype, device=device)
    plan.run(
        hf.Stream.current(device), None,
        hf.QuantizePerTensorArgs(x=values, scale=scale, zero_point=zero_point, q=q),
    )  # fmt: skip
    found: list[Any] = q.cpu().tolist()
    return found


def gradient(
    backend: str,
    x: list[float],
    dy: list[float],
    scale: float,
    zero_point: int,
    dx: list[float] | None = None,
) -> torch.Tensor:
    """The gradient of int8 codes, by a plan on ``backend``; added to ``dx`` if that is given."""
    device = BACKENDS[backend]
    desc = hf.QuantizePerTensorBackwardDescriptor(shape=(len(x),))
    plan = hf.QuantizePerTensorBackwardPlan.select(
        hf.Stream.current(device), desc, hf.PlanPreference(backend=backend, precompile=False)
    )
    out = torch.tensor(dx or [NAN] * len(x), device=device)
    args = hf.QuantizePerTensorBackwardArgs(
        dy=torch.tensor(dy, device=device), x=torch.tensor(x, device=device), scale=scale,
        zero_point=zero_point, dx=out, accumulate=dx is not None,
    )  # fmt: skip
    plan.run(hf.Stream.current(device), None, args)
    return out.cpu()


HALVES = [0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -3.5]
QUANTIZED: dict[str, tuple[list[float], float, int, dict[str, Any], list[float]]] = {
    "ties go to even": (HALVES, 1.0, 0, {}, [0, 2, 2, 4, 0, -2, -2, -4]),
    "an odd zero point moves no tie": (HALVES, 1.0, 3, {}, [3, 5, 5, 7, 3, 1, 1, -1]),
    "beside a tie": ([0.50000006, 0.49999997, 1.4999999, 2.5000002], 1.0, 0, {}, [1, 0, 1, 3]),
    "large values saturate": ([1e30, -1e30, 3.4e38, -3.4e38, 200.0, -200.0], 0.1, 0, {}, [127, -128] * 3),
    "infinities saturate": ([INF, -INF], 0.1, 100, {}, [127, -128]),
    "infinities saturate with a far zero point": ([INF, -INF], 0.1, 2**23, {}, [127, -128]),
    "the last code in range": ([127.4, 127.5, -128.5, -128.6], 1.0, 0, {}, [127, 127, -128, -128]),
    "NaN takes the code of zero": ([NAN, 0.0, -0.0], 0.1, 5, {}, [5, 5, 5]),
    "NaN takes a bound where zero has none": ([NAN, 0.0], 0.1, -7, {"output_dtype": torch.uint8}, [0, 0]),
    "a narrow range": ([-9.0, -3.0, 0.0, 5.0, 9.0], 1.0, 0, {"q_min": -3, "q_max": 4}, [-3, -3, 0, 4, 4]),
    "division, not the reciprocal": ([0.15, 0.35], 0.1, 0, {"input_dtype": torch.float64}, [1, 3]),
    "subnormal values and scale": ([1e-45, 3e-45, -4.2e-45], 1e-45, 0, {}, [1, 2, -3]),
    "zero points saturate": ([2.0**23, 2.0**23 - 5], 1.0, -(2**23) - 1, {}, [0, -5]),
    "an odd far zero point": ([-8388607.0, -8388606.0, 0.0], 1.0, 2**23 - 1, {}, [0, 1, 127]),
    "codes as floats": (
        [0.5, -3.7, INF, NAN], 1.0, 1, {"output_dtype": torch.float16, "q_min": -2, "q_max": 9}, [1, -2, 9, 1]
    ),
    "packed, low bits first": (
        [1.0, -2.0, 7.0], 1.0, 0, {"output_dtype": torch.int4, "packed": True}, [0xE1, 0x07]
    ),
    "packed by four": (
        [0.0, 1.0, 2.0, 3.0, 1.0], 1.0, 0, {"output_dtype": torch.uint2, "packed": True}, [0b11100100, 1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", QUANTIZED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantize(backend: str, rule: str) -> None:
    x, scale, zero_point, fields, codes = QUANTIZED[rule]
    assert quantized(backend, x, scale, zero_point, **fields) == codes


GRADIENTS: dict[str, tuple[list[float], list[float], float, int, list[float]]] = {
    "divided by the scale": ([0.0, 1.0], [3.0, -5.0], 0.25, 0, [12.0, -20.0]),
    "both bounds are inside": (
        [127.0, 127.4, 128.0, -128.0, -128.5, -128.6], [1.0] * 6, 1.0, 0, [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    ),
    "the bounds move with the zero point": ([117.0, 118.0, -138.0, -139.0], [2.0] * 4, 1.0, 10, [2, 0, 2, 0]),
    "nothing passes at NaN and infinity": ([NAN, INF, -INF], [1.0, NAN, INF], 0.5, 0, [0.0, 0.0, 0.0]),
    "a gradient is selected, not masked": ([1e9, 1e9, 0.0], [NAN, -INF, NAN], 1.0, 0, [0.0, 0.0, NAN]),
    "zeros have signs": ([0.0, 1e9, 0.0], [-0.0, -1.0, 0.0], 2.0, 0, [-0.0, 0.0, 0.0]),
}  # fmt: skip


@pytest.mark.parametrize("rule", GRADIENTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantize_backward(backend: str, rule: str) -> None:
    x, dy, scale, zero_point, dx = GRADIENTS[rule]
    found = gradient(backend, x, dy, scale, zero_point)
    assert torch.equal(canonical(found), canonical(torch.tensor(dx, dtype=torch.float32)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantize_backward_accumulates(backend: str) -> None:
    found = gradient(backend, [0.0, 1e9, 1e9], [1.0, 1.0, 1.0], 0.5, 0, dx=[10.0, -0.0, 7.0])
    assert torch.equal(canonical(found), canonical(torch.tensor([12.0, 0.0, 7.0])))


DEQUANTIZED: dict[str, tuple[list[int], float, int, list[float]]] = {
    "the difference, times the scale": ([-128, -3, 0, 127], 0.5, -3, [-62.5, 0.0, 1.5, 65.0]),
    "one rounding": ([3, 7], 0.1, 0, [0.30000001192092896, 0.699999988079071]),
    "zero points saturate": ([0, 1], 1.0, 2**30, [-8388608.0, -8388607.0]),
}


@pytest.mark.parametrize("rule", DEQUANTIZED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dequantize(backend: str, rule: str) -> None:
    codes, scale, zero_point, y = DEQUANTIZED[rule]
    device = BACKENDS[backend]
    desc = hf.DequantizePerTensorDescriptor(shape=(len(codes),))
    plan = hf.DequantizePerTensorPlan.select(
        hf.Stream.current(device), desc, hf.PlanPreference(backend=backend, precompile=False)
    )
    q = torch.tensor(codes, dtype=torch.int8, device=device)
    out = torch.empty(len(codes), device=device)
    args = hf.DequantizePerTensorArgs(q=q, scale=scale, zero_point=zero_point, y=out)
    plan.run(hf.Stream.current(device), None, args)
    assert out.tolist() == y

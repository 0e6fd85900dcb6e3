"""Tests of fake_quantize: the forward equals quantize and dequantize, and estimators match their formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.core.bits import canonical
from holdfast.core.dtypes import FLOATS
from holdfast.core.formats import INTEGERS
from holdfast.core.values import special_values
from holdfast.numerics import reference
from holdfast.ops.fake_quantize.plan import FakeQuantizeDescriptor
from holdfast.ops.fake_quantize.torch_op import lsq_factor
from holdfast.proof.conformance import Way, cases_of, check, gpu_way, run_reference, select_on

GPU = gpu_way()
BACKENDS = {"reference": "cpu", "cpu": "cpu", **({GPU.backend: GPU.device} if GPU else {})}
INF, NAN = float("inf"), float("nan")
SHAPE = (4, 6, 8)
GRANULARITIES = [hf.PerTensor(), hf.PerChannel(1), hf.PerToken(), hf.PerGroup(4), hf.PerGroup(3, axis=1)]
PLAIN: dict[str, Any] = {"dtype": torch.int4}


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all bits are equal. All NaNs are equal."""
    return torch.equal(canonical(found), canonical(wanted))


def forward(backend: str, x: torch.Tensor, scale: Any, zero_point: Any = None, **fields: Any) -> torch.Tensor:
    """y, computed by a plan on ``backend``."""
    stream = hf.Stream.current(BACKENDS[backend])
    desc = hf.plans.FakeQuantizeDescriptor(shape=x.shape, input_dtype=x.dtype, **fields)
    plan = hf.plans.FakeQuantizePlan.select(
        stream, desc, hf.PlanPreference(backend=backend, precompile=False)
    )
    x, scale, zero_point = (
        value.to(stream.device) if isinstance(value, torch.Tensor) else value
        for value in (x, scale, zero_point)
    )
    y = torch.full_like(x, 77)
    plan.run(stream, None, hf.plans.FakeQuantizeArgs(x=x, scale=scale, zero_point=zero_point, y=y))
    return y.cpu()


def gradient(
    backend: str,
    ste: hf.SteKind,
    x: torch.Tensor,
    dy: torch.Tensor,
    scale: Any,
    zero_point: Any = None,
    **fields: Any,
) -> torch.Tensor:
    """dx, computed by a plan on ``backend``."""
    stream = hf.Stream.current(BACKENDS[backend])
    desc = hf.plans.FakeQuantizeBackwardDescriptor(shape=x.shape, input_dtype=x.dtype, ste=ste, **fields)
    pref = hf.PlanPreference(backend=backend, precompile=False)
    plan = hf.plans.FakeQuantizeBackwardPlan.select(stream, desc, pref)
    x, dy, scale, zero_point = (
        value.to(stream.device) if isinstance(value, torch.Tensor) else value
        for value in (x, dy, scale, zero_point)
    )
    dx = torch.full_like(x, 77)
    args = hf.plans.FakeQuantizeBackwardArgs(dy=dy, x=x, scale=scale, zero_point=zero_point, dx=dx)
    plan.run(stream, None, args)
    return dx.cpu()


# Hand-computed estimators: scale 1/2 with 2 bits, 1/4 with 4, 1/64 with 8; codes from -q_max to q_max.

BY_HAND: dict[tuple[int, hf.SteKind], tuple[float, list[float], list[float]]] = {
    (2, hf.SteKind.IDENTITY): (0.5, [-9.0, 0.0, 0.5, 9.0], [1, 1, 1, 1]),
    (2, hf.SteKind.IN_RANGE): (0.5, [-0.75, -0.74, -0.5, 0.0, 0.5, 0.74, 0.75], [0, 1, 1, 1, 1, 1, 0]),
    (2, hf.SteKind.CLIPPED_IDENTITY): (0.5, [-0.51, -0.5, -0.3, 0.0, 0.5, 0.51], [0, 1, 1, 1, 1, 0]),
    (2, hf.SteKind.HARD_TANH): (0.5, [-0.6, -0.5, -0.25, 0.0, 0.125, 0.5], [0, 0, 0.5, 1, 0.75, 0]),
    (4, hf.SteKind.IDENTITY): (0.25, [-9.0, 0.0, 1.75, 9.0], [1, 1, 1, 1]),
    (4, hf.SteKind.IN_RANGE): (0.25, [-1.875, -1.87, -1.75, 1.75, 1.87, 1.875], [0, 1, 1, 1, 1, 0]),
    (4, hf.SteKind.CLIPPED_IDENTITY): (0.25, [-1.76, -1.75, 0.0, 1.75, 1.76], [0, 1, 1, 1, 0]),
    (4, hf.SteKind.HARD_TANH): (0.25, [-1.75, -0.875, 0.0, 0.4375, 3.5], [0, 0.5, 1, 0.75, 0]),
    (8, hf.SteKind.IDENTITY): (2.0**-6, [-9.0, 0.0, 1.984375, 9.0], [1, 1, 1, 1]),
    (8, hf.SteKind.IN_RANGE): (2.0**-6, [-1.9921875, -1.992, 1.984375, 1.992, 1.9921875], [0, 1, 1, 1, 0]),
    (8, hf.SteKind.CLIPPED_IDENTITY): (2.0**-6, [-1.985, -1.984375, 1.984375, 1.985], [0, 1, 1, 0]),
    (8, hf.SteKind.HARD_TANH): (2.0**-6, [-1.984375, -0.9921875, 0.0, 0.49609375], [0, 0.5, 1, 0.75]),
}  # fmt: skip


@pytest.mark.parametrize(("bits", "ste"), BY_HAND, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_estimators_by_hand(backend: str, bits: int, ste: hf.SteKind) -> None:
    scale, x, factors = BY_HAND[bits, ste]
    q_max = 2 ** (bits - 1) - 1
    for upstream in (1.0, -2.5):
        dy = torch.full((len(x),), upstream)
        dx = gradient(backend, ste, torch.tensor(x), dy, scale, q_min=-q_max, q_max=q_max)
        wanted = torch.tensor([upstream * factor if factor else 0.0 for factor in factors])
        assert same(dx, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_estimators_of_a_range_that_is_not_symmetric(backend: str) -> None:
    """int4, zero point 1, scale 1/2: x ranges from -4.5 to 3, with centre -0.75 and half-width 3.75."""
    x = torch.tensor([-4.75, -4.5, -2.625, -0.75, 1.125, 3.0, 3.25])
    wanted = {
        hf.SteKind.CLIPPED_IDENTITY: [0, 1, 1, 1, 1, 1, 0],
        hf.SteKind.HARD_TANH: [0, 0, 0.5, 1, 0.5, 0, 0],
        hf.SteKind.IN_RANGE: [0, 1, 1, 1, 1, 1, 1],  # -9.5 rounds to -10, 6.5 to 6
    }
    for ste, factors in wanted.items():
        dx = gradient(backend, ste, x, torch.ones(7), 0.5, 1, dtype=torch.int4)
        assert dx.tolist() == factors, ste
    at = torch.tensor([-0.75, -0.25, -1.25, 0.25])
    dx = gradient(backend, hf.SteKind.TANH, at, torch.ones(4), 0.5, 1, dtype=torch.int4)
    # 1 - tanh(0)^2, 1 - tanh(1)^2 twice, 1 - tanh(2)^2
    assert dx.tolist() == pytest.approx([1.0, 0.41997434161402614, 0.41997434161402614, 0.07065082485316443])
    assert dx[0] == 1.0 and dx[1] == dx[2]


# The formulas of the estimators in rational arithmetic, rounded after each operation.


def rounded(value: Fraction, dtype: torch.dtype) -> Fraction:
    """``value`` rounded to ``dtype``, ties to even."""
    if not value:
        return value
    precision, least = (24, -149) if dtype == torch.float32 else (53, -1074)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - precision + 1, least)
    return round(value / unit) * unit


def seed(ste: hf.SteKind, x: float, dy: float, scale: float, q_max: int, dtype: torch.dtype) -> Any:
    """The estimator in exact arithmetic for codes -q_max to q_max. The last steps of TANH are not rounded."""

    def rn(value: Fraction) -> Fraction:
        return rounded(value, dtype)

    exact_x, exact_dy, s = Fraction(x), Fraction(dy), Fraction(scale)
    bound = rn(q_max * s)
    if ste is hf.SteKind.IDENTITY:
        return exact_dy
    if ste is hf.SteKind.CLIPPED_IDENTITY:
        return exact_dy if abs(exact_x) <= bound else 0
    if ste is hf.SteKind.IN_RANGE:
        return exact_dy if abs(round(rn(exact_x / s))) <= q_max else 0
    if ste is hf.SteKind.HARD_TANH:
        return rn(exact_dy * max(Fraction(0), rn(1 - abs(rn(exact_x / bound)))))
    t = rn(exact_x / s)
    with mpmath.workdps(60):
        # The argument of exp has a lower limit, where the result is negligible.
        v = min(2 * abs(mpmath.mpf(t.numerator) / t.denominator), 80 if dtype == torch.float32 else 700)
        e = mpmath.exp(-v)
        return mpmath.mpf(dy) * 4 * e / (1 + e) ** 2


def around_the_bounds(scale: float, q_max: int, dtype: torch.dtype) -> torch.Tensor:
    """The bounds, the last code in range, and zero; values one ULP inside and outside; and values between."""
    places = torch.tensor([q_max, q_max + 0.5, q_max - 0.5, 0.5, 1.0], dtype=dtype)
    at = torch.cat([places * torch.tensor(scale, dtype=dtype), torch.tensor([0.0, 1e-30], dtype=dtype)])
    up, down = torch.full_like(at, INF), torch.full_like(at, -INF)
    at = torch.cat([at, at.nextafter(up), at.nextafter(down), at / 3, at * 7])
    return torch.cat([at, -at])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("ste", hf.SteKind)
@pytest.mark.parametrize("backend", BACKENDS)
def test_estimators_are_the_seeds_in_exact_arithmetic(
    backend: str, ste: hf.SteKind, bits: int, dtype: torch.dtype
) -> None:
    q_max = 2 ** (bits - 1) - 1
    info = torch.finfo(dtype)
    for wanted_scale in (0.5, 0.1, 1 / 3, 1e-12, 3.7):
        scale = float(torch.tensor(wanted_scale, dtype=dtype))
        x = around_the_bounds(scale, q_max, dtype)
        dy = torch.linspace(-3, 3, len(x), dtype=dtype)
        dx = gradient(backend, ste, x, dy, scale, q_min=-q_max, q_max=q_max)
        for one_x, one_dy, found in zip(x.tolist(), dy.tolist(), dx.tolist(), strict=True):
            right = seed(ste, one_x, one_dy, scale, q_max, dtype)
            if ste is not hf.SteKind.TANH:
                assert Fraction(found) == right, (one_x, scale)
            else:
                ulp = math.ldexp(info.eps, math.frexp(right)[1] - 1)
                assert abs(mpmath.mpf(found) - right) <= 4.5 * ulp, (one_x, scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_bounds_pass_their_gradient(backend: str) -> None:
    """Bounds are inclusive, so that saturated weights continue to train."""
    x = torch.tensor([-1.28, 1.27], dtype=torch.float64)
    for ste in (hf.SteKind.IN_RANGE, hf.SteKind.CLIPPED_IDENTITY, hf.SteKind.IDENTITY):
        dx = gradient(backend, ste, x, torch.ones_like(x), 0.01, dtype=torch.int8)
        assert dx.tolist() == [1.0, 1.0]


# Values that are not ordinary numbers.

SPECIAL_X = [NAN, INF, -INF]
TAIL = 7.219405345614219e-35  # 4 exp(-80), the smallest value of TANH in float32
SPECIAL: dict[hf.SteKind, list[float]] = {
    hf.SteKind.IDENTITY: [-3.0, -3.0, -3.0],
    hf.SteKind.IN_RANGE: [0.0, 0.0, 0.0],
    hf.SteKind.CLIPPED_IDENTITY: [0.0, 0.0, 0.0],
    hf.SteKind.HARD_TANH: [0.0, 0.0, 0.0],
    hf.SteKind.TANH: [0.0, -3.0 * TAIL, -3.0 * TAIL],
}


@pytest.mark.parametrize("ste", hf.SteKind)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_number_has_a_gradient_that_is_one(backend: str, ste: hf.SteKind) -> None:
    dx = gradient(backend, ste, torch.tensor(SPECIAL_X), torch.full((3,), -3.0), 0.5, **PLAIN)
    assert same(dx, torch.tensor(SPECIAL[ste]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_selected_not_masked(backend: str) -> None:
    """Where the estimator is 0, even NaN and infinite upstream gradients give 0."""
    x, dy = torch.full((5,), 99.0), torch.tensor([NAN, INF, -INF, -1.0, -0.0])
    for ste in (hf.SteKind.IN_RANGE, hf.SteKind.CLIPPED_IDENTITY, hf.SteKind.HARD_TANH):
        assert same(gradient(backend, ste, x, dy, 0.5, **PLAIN), torch.zeros(5))
    for ste in hf.SteKind:
        passed = gradient(backend, ste, torch.full((5,), -0.25), dy, 0.5, **PLAIN)
        assert same(passed.sign(), dy.sign()) and passed.isnan().tolist() == dy.isnan().tolist()


@pytest.mark.parametrize("scale", [0.0, -0.0, INF, NAN])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_that_are_not_ordinary(backend: str, scale: float) -> None:
    """Codes from -7 to 7: the bounds are -7 * scale and 7 * scale, and their centre is 0 or NaN."""
    x, dy = torch.tensor([-1.0, 0.0, 1.0, INF]), torch.full((4,), 2.0)
    wanted = {
        hf.SteKind.IN_RANGE: [2.0, 2.0, 2.0, 0.0] if math.isinf(scale) else [0.0] * 4,
        hf.SteKind.CLIPPED_IDENTITY: [2.0] * 4 if math.isinf(scale) else [0.0, 2.0 * (scale == 0), 0.0, 0.0],
        hf.SteKind.HARD_TANH: [0.0] * 4,
        hf.SteKind.TANH: [2 * TAIL, 0.0, 2 * TAIL, 2 * TAIL] if scale == 0 else [0.0] * 4,
    }
    for ste, factors in wanted.items():
        dx = gradient(backend, ste, x, dy, torch.tensor(scale), q_min=-7, q_max=7)
        assert same(dx, torch.tensor(factors)), ste


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_negative_scale(backend: str) -> None:
    """HARD_TANH and TANH ignore the sign; no x lies between lo_x and hi_x; codes are in reverse order."""
    x, dy, scale = torch.tensor([-1.0, 0.25, 1.0]), torch.ones(3), torch.tensor(0.5)
    for ste in (hf.SteKind.TANH, hf.SteKind.HARD_TANH, hf.SteKind.IN_RANGE):
        with_minus = gradient(backend, ste, x, dy, -scale, q_min=-7, q_max=7)
        assert same(with_minus, gradient(backend, ste, x, dy, scale, q_min=-7, q_max=7))
    dx = gradient(backend, hf.SteKind.CLIPPED_IDENTITY, x, dy, -scale, q_min=-7, q_max=7)
    assert dx.tolist() == [0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_range_of_one_code(backend: str) -> None:
    x = torch.tensor([1.5, 2.0, 2.4, 2.6])
    wanted = {
        hf.SteKind.IN_RANGE: [1, 1, 1, 0],  # 1.5 rounds to 2
        hf.SteKind.CLIPPED_IDENTITY: [0, 1, 0, 0],
        hf.SteKind.HARD_TANH: [0, 0, 0, 0],
    }
    for ste, factors in wanted.items():
        assert gradient(backend, ste, x, torch.ones(4), 1.0, q_min=2, q_max=2).tolist() == factors


# The forward.


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_peers_get_wrong(backend: str, granularity: hf.Granularity) -> None:
    """Infinite and huge values saturate, also with a zero point; NaN stays NaN."""
    x = torch.tensor([INF, 3.4e38, -INF, -3.4e38, NAN, 0.3, -0.0, 1e-45]).expand(SHAPE).contiguous()
    scales = granularity.view(SHAPE).scale_shape
    shared = torch.full(scales, 0.25), torch.full(scales, 100, dtype=torch.int32)
    y = forward(backend, x, *shared, granularity=granularity, dtype=torch.int8)
    assert same(y, torch.tensor([6.75, 6.75, -57.0, -57.0, NAN, 0.25, 0.0, 0.0]).expand(SHAPE).contiguous())


_codes = st.sampled_from([code.torch for code in INTEGERS.values()])
_numbers = st.floats(width=32, allow_nan=True) | st.floats(-40, 40, width=32)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    real=st.sampled_from([record.torch for record in FLOATS.values()]),
    dtype=_codes,
    values=st.lists(_numbers, min_size=1, max_size=30),
    scale=st.floats(2.0**-140, 2.0**100, width=32) | st.sampled_from([0.0, -0.0, INF, NAN, -0.5]),
    zero_point=st.integers(-300, 300) | st.sampled_from([2**23, -(2**23), 2**31 - 1, -(2**31)]),
    backend=st.sampled_from(sorted(BACKENDS)),
)
def test_forward_is_dequantize_of_quantize(
    real: torch.dtype, dtype: torch.dtype, values: list[float], scale: float, zero_point: int, backend: str
) -> None:
    x = torch.tensor([*values, *(value * scale / 7 for value in values)], dtype=torch.float64).to(real)
    shared = torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32)
    found = forward(backend, x, *shared, dtype=dtype)
    wanted = hf.dequantize(hf.quantize(x, *shared, dtype=dtype), *shared, dtype=real)
    assert same(found, torch.where(x.isnan(), x, wanted))


@pytest.mark.parametrize("real", [record.torch for record in FLOATS.values()], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_of_special_values(backend: str, real: torch.dtype) -> None:
    x = special_values(FLOATS[str(real).removeprefix("torch.")])
    for scale, limits in product([0.1, 2.0**-149, 3e38, 0.0, INF], [(-8, 7), (3, 7), (-7, -3), (0, 0)]):
        shared = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
        fields = {"q_min": limits[0], "q_max": limits[1]}
        found = forward(backend, x, *shared, **fields)
        codes = hf.quantize(x, *shared, dtype=torch.int8, **fields)
        assert same(found, torch.where(x.isnan(), x, hf.dequantize(codes, *shared, dtype=real)))


@pytest.mark.parametrize("real", [record.torch for record in FLOATS.values()], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_floating_zero_point_is_rounded_where_it_is_used(backend: str, real: torch.dtype) -> None:
    learned = torch.tensor([0.5, 1.5, -2.5, 3.49, NAN, INF, -INF, 2.0**23 + 6, -1e30], dtype=torch.float64)
    whole = torch.tensor([0, 2, -2, 3, 0, 2**23, -(2**23), 2**23, -(2**23)], dtype=torch.int32)
    if real == torch.float16:  # its largest number is 65504
        learned, whole = learned[:7], whole[:7]
    x = torch.linspace(-9, 9, 9 * 11).reshape(9, 11)[: len(whole)].to(real)
    scale = torch.full((len(whole),), 0.5)
    fields: dict[str, Any] = {"granularity": hf.PerChannel(0), "dtype": torch.int8}
    for form in (real, *([torch.float32] if real != torch.float16 else [])):
        zero_point = learned.to(form)
        assert same(
            forward(backend, x, scale, zero_point, **fields), forward(backend, x, scale, whole, **fields)
        )
        for ste in hf.SteKind:
            found = gradient(backend, ste, x, torch.ones_like(x), scale, zero_point, **fields)
            assert same(found, gradient(backend, ste, x, torch.ones_like(x), scale, whole, **fields))


@pytest.mark.parametrize("real", [torch.float32, torch.float64])
def test_the_ends_of_the_range_are_where_division_says(real: torch.dtype) -> None:
    """With a single scale, the CPU compares x with the smallest and largest x in range."""
    limits = torch.finfo(real)
    generator = torch.Generator().manual_seed(5)
    drawn = torch.exp2(torch.rand(40, dtype=torch.float64, generator=generator) * 30 - 20).tolist()
    odd = [-0.1, 0.0, INF, -INF, NAN, limits.max, limits.tiny, limits.smallest_normal * limits.eps]
    for scale in (torch.tensor(value, dtype=real) for value in drawn + odd):
        for zero_point, (q_min, q_max) in product((0, 5, -(2**23)), ((-128, 127), (0, 3), (7, 7))):
            near = [scale * (end - zero_point + half) for end in (q_min, q_max) for half in (-0.5, 0.5)]
            up = down = x = torch.stack(near)
            for _ in range(4):
                up = torch.nextafter(up, torch.full_like(up, INF))
                down = torch.nextafter(down, torch.full_like(down, -INF))
                x = torch.cat([x, up, down])
            x = torch.cat([x, torch.tensor([0.0, INF, -INF, NAN, limits.max], dtype=real)])
            dy = torch.ones_like(x)
            found, wanted = (
                gradient(backend, hf.SteKind.IN_RANGE, x, dy, scale, zero_point, q_min=q_min, q_max=q_max)
                for backend in ("cpu", "reference")
            )
            assert same(found, wanted)


@pytest.mark.parametrize(
    "name", ["FakeQuantizePlan", "FakeQuantizeBackwardPlan", "QuantizePerTensorBackwardPlan"]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_outputs_that_are_streamed_have_the_same_bits(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, large outputs use non-temporal stores; here all outputs do."""
    from holdfast.ops.affine import cpu

    monkeypatch.setattr(cpu, "_STREAM_MIN_BYTES", 1)
    plan, found = hf.plans.all()[name], []
    for case in cases_of(plan):
        args, wanted = run_reference(plan, case)
        found += check(plan, case, Way("cpu", threads=threads, times=1), args, wanted, select_on("cpu"))
    assert found == []


# The slope 1 - tanh^2.


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_the_slope_of_tanh_is_within_its_bound(name: str) -> None:
    """The relative error is at most 4 * 2^-24, or 4 * 2^-53 for float64 apart from the error of exp."""
    compute = FLOATS[name]
    kind = reference.compute_type(compute)
    floor = 40 if name == "float32" else 350
    near, far = np.linspace(0, 3, 40001), np.geomspace(1e-8, floor, 40001)
    t = np.concatenate([near, far]).astype(kind)
    if name == "float32":
        e = np.exp(-2 * t.astype(np.float64))
        error = np.abs(reference.tanh_slope(t, compute) / (4 * e / (1 + e) ** 2) - 1)
        assert error.max() < 4 * 2.0**-24
        return
    found = reference.tanh_slope(t, compute)
    with mpmath.workdps(40):
        for one, slope in zip(t[::37].tolist(), found[::37].tolist(), strict=True):
            e = mpmath.exp(-2 * mpmath.mpf(one))
            assert abs(mpmath.mpf(slope) * (1 + e) ** 2 / (4 * e) - 1) < 4 * mpmath.mpf(2) ** -53


def test_the_slope_of_tanh_is_1_at_0_and_falls() -> None:
    compute = FLOATS["float32"]
    t = np.linspace(0, 45, 100001, dtype=np.float32)
    slope = reference.tanh_slope(t, compute)
    assert slope[0] == 1.0 and (np.diff(slope) <= 2.0**-23 * slope[1:]).all()
    assert (slope[t >= 40] == np.float32(TAIL)).all()
    assert (reference.tanh_slope(-t, compute) == slope).all()


@pytest.fixture(scope="module")
def fma() -> Any:
    """Fused multiply-add in float32 for Numba functions, to emulate the steps of the GPU."""
    from numba import types
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def fused(context: Any, a: Any, b: Any, c: Any) -> Any:
        return types.float32(a, b, c), lambda _, builder, signature, args: builder.fma(*args)

    return fused


def test_the_division_of_the_gpu_rounds_correctly(fma: Any) -> None:
    """``minus_quotient``, starting from estimates with errors of up to 2 ulp."""
    from numba import njit

    @njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def wrong(p: Any, b: Any, estimates: Any) -> int:
        one, found = np.float32(1), 0
        for i in range(len(p)):
            y = estimates[i]
            y = fma(fma(b[i], y, one), y, y)
            q = p[i] * y
            q = fma(fma(b[i], q, p[i]), y, q)
            found += q != -p[i] / b[i]
        return found

    v = np.concatenate([np.linspace(0, 20, 400000), np.geomspace(1e-7, 80, 200000)]).astype(np.float32)
    e = reference.exp_below_zero(-v, FLOATS["float32"])
    p = np.ldexp(e, -np.rint(-v * np.float32(1.442695)).astype(np.int32)).astype(np.float32)
    b = ((np.float32(1) + e * (np.float32(2) + e)) / np.float32(16)).astype(np.float32)
    best = (np.float32(-1) / b).view(np.int32)
    for off in range(-2, 3):
        assert wrong(p, b, (best + off).view(np.float32)) == 0
    assert wrong(p, b, (best + 2**17).view(np.float32)) > 0


@pytest.mark.parametrize("off", range(-3, 4))
def test_the_reciprocals_of_the_gpu_round_correctly(fma: Any, off: int) -> None:
    """``minus_reciprocal`` for every significand, starting from estimates with errors of up to 3 ulp."""
    from numba import njit

    @njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def steps(b: Any, estimates: Any) -> Any:
        one, found = np.float32(1), np.empty_like(b)
        for i in range(len(b)):
            y = fma(fma(b[i], estimates[i], one), estimates[i], estimates[i])
            found[i] = fma(fma(b[i], y, one), y, y)
        return found

    b = np.arange(0x3F800000, 0x40000000, dtype=np.int32).view(np.float32)
    right = np.float32(-1) / b
    found = steps(b, (right.view(np.int32) + np.int32(off)).view(np.float32))
    assert (found[:-1] == right[:-1]).all()
    assert found.view(np.int32)[-1] | 1 == right.view(np.int32)[-1]
    assert (found[-1] == right[-1]) == (off == 0)


def test_the_argument_of_the_gpu_is_right_for_scales_of_every_size(fma: Any) -> None:
    """``tanh_argument`` is exact where the slope depends on it, and gives the same slope elsewhere."""
    from numba import njit

    @njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def steps(x: Any, mid: Any, unit: Any, quarter: Any, y: Any, first: Any, second: Any) -> None:
        for i in range(len(x)):
            difference = fma(x[i], unit[i], np.float32(mid[i] * -unit[i]))
            first[i] = difference * y[i]
            second[i] = fma(fma(quarter[i], first[i], difference), y[i], first[i])

    generator = np.random.default_rng(7)
    count = 2_000_000
    with np.errstate(all="ignore"):
        s = generator.integers(-(2**31), 2**31, count, dtype=np.int32)
        s[::3] |= 0x7FFFFF
        s[::1000] &= np.int32(-(2**31))  # zeros
        s = s.view(np.float32)
        low, high = generator.integers(-2, 3, (2, count)).astype(np.float32)
        mid = (low * s + high * s) * np.float32(0.5)
        steps_from_mid = generator.uniform(1, 2, count) * np.exp2(generator.integers(-30, 9, count))
        x = (mid.astype(np.float64) + s.astype(np.float64) * steps_from_mid).astype(np.float32)
        x[::5] = generator.integers(-(2**31), 2**31, len(x[::5]), dtype=np.int32).view(np.float32)
        exponent = s.view(np.int32) & 0x7F800000
        unit = np.maximum(0x7F000000 - exponent, 0x3F800000).astype(np.int32).view(np.float32)
        quarter = s * (unit * np.float32(0.25))
        first, second = np.empty_like(x), np.empty_like(x)
        steps(x, mid, unit, quarter, np.float32(-1) / quarter, first, second)
        t = (x - mid) / s
        slope = reference.tanh_slope(t, FLOATS["float32"])
        # If the second operand is NaN, a minimum returns the first.
        found = np.where(np.isnan(second), np.float32(40), second * np.float32(0.25))
        assert (np.isnan(first) == np.isnan(t)).all()
        known = ~np.isnan(t)
        assert (reference.tanh_slope(found, FLOATS["float32"]) == slope)[known].all()
        counts = (np.abs(t) >= 2.0**-27) & (np.abs(t) <= 40)
        assert (found == -t)[counts].all() and counts.sum() > count // 3
        for few in (np.abs(s) < 2.0**-126, np.abs(s) > 2.0**126, s.view(np.int32) & 0x7FFFFF == 0x7FFFFF):
            assert (few & counts).sum() > 100


# Names, descriptors, guarantees.


@pytest.mark.parametrize("ste", hf.SteKind)
def test_an_estimator_goes_to_json_and_back(ste: hf.SteKind) -> None:
    text = json.dumps(ste)
    assert text == f'"{ste.name.lower()}"'
    assert hf.SteKind(json.loads(text)) is ste
    desc = hf.plans.FakeQuantizeBackwardDescriptor(
        shape=(4, 6), granularity=hf.PerGroup(3), input_dtype=torch.bfloat16, dtype=torch.int4, ste=ste
    )
    back = hf.plans.Descriptor.from_json(desc.to_json())
    assert back == desc and isinstance(back, hf.plans.FakeQuantizeBackwardDescriptor) and back.ste is ste
    assert hf.plans.FakeQuantizeBackwardDescriptor(shape=(4,), dtype=torch.int4, ste=ste.value).ste is ste  # type: ignore[arg-type]


def test_estimators_have_their_names() -> None:
    names = ["identity", "clipped_identity", "tanh", "hard_tanh", "in_range"]
    assert [ste.value for ste in hf.SteKind] == names


def test_a_plan_says_what_it_is() -> None:
    stream = hf.Stream.current()
    desc = hf.plans.FakeQuantizeBackwardDescriptor(
        shape=(8, 4), granularity=hf.PerToken(), dtype=torch.int8, ste=hf.SteKind.TANH
    )
    plan = hf.plans.FakeQuantizeBackwardPlan.select(stream, desc, hf.PlanPreference(backend="reference"))
    assert str(plan.sku()).startswith("fake_quantize.backward[per_token, tanh] float32->float32")
    assert plan.precision_guarantee().ulp == {"dx": 4.5}
    assert plan.bytes_moved() == 3 * 32 * 4 + 8 * 4
    passed = hf.plans.FakeQuantizeBackwardDescriptor(shape=(8, 4), dtype=torch.int8, ste=hf.SteKind.IDENTITY)
    assert hf.plans.FakeQuantizeBackwardPlan.select(stream, passed).bytes_moved() == 2 * 32 * 4
    forward_plan = hf.plans.FakeQuantizePlan.select(
        stream, hf.plans.FakeQuantizeDescriptor(shape=(8,), dtype=torch.int8)
    )
    assert forward_plan.precision_guarantee().ulp == {"y": 0.5}


def test_codes_are_int8_unless_a_format_is_given() -> None:
    x = torch.tensor([0.26, -0.3, 99.0, -99.0], requires_grad=True)
    y = hf.fake_quantize(x, 0.5)
    assert y.equal(hf.fake_quantize(x, 0.5, dtype=torch.int8))
    assert y.equal(hf.dequantize(hf.quantize(x.detach(), 0.5), 0.5))
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1, 0, 0]
    assert hf.fake_quantize(x, 0.5, q_min=-3, q_max=3).tolist() == [0.5, -0.5, 1.5, -1.5]


X = torch.ones(SHAPE)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no range": (lambda: FakeQuantizeDescriptor(shape=()).validate(), "give dtype, or both q_min and q_max"),
    "half a range": (lambda: hf.fake_quantize(X, 0.1, q_min=3), "give dtype, or both q_min and q_max"),
    "a range beyond the dtype": (
        lambda: hf.fake_quantize(X, 0.1, dtype=torch.int4, q_max=8), r"wider than torch.int4 holds, -8 to 7"
    ),
    "a range beyond 16 bits": (
        lambda: hf.fake_quantize(X, 0.1, q_min=-70000, q_max=9), "16 bits may be, -65536 to 65536"
    ),
    "a range the wrong way round": (
        lambda: hf.fake_quantize(X, 0.1, q_min=5, q_max=-5), "q_min 5 is greater than q_max -5"
    ),
    "a floating dtype": (lambda: hf.fake_quantize(X, 0.1, dtype=torch.float16), "the dtype of the codes"),
    "a wide dtype": (lambda: hf.fake_quantize(X, 0.1, dtype=torch.int32), "dtype is torch.int32; accepted"),
    "no such estimator": (
        lambda: hf.fake_quantize(X, 0.1, **PLAIN, ste="cubic"), "ste is 'cubic'; accepted .* 'tanh'"
    ),
    "no such factor": (
        lambda: hf.fake_quantize(X, 0.1, **PLAIN, grad_factor="sgd"), "grad_factor is 'sgd'.*or 'lsq'"
    ),
    "x that is no tensor": (lambda: hf.fake_quantize([1.0], 0.1, **PLAIN), "x is a list"),
    "x of integers": (lambda: hf.fake_quantize(X.int(), 0.1, **PLAIN), "torch.int32; accepted are torch.f"),
    "a scale of zero": (lambda: hf.fake_quantize(X, 0.0, **PLAIN), "scale is 0.0"),
    "a scale of text": (lambda: hf.fake_quantize(X, "0.1", **PLAIN), "scale is a str"),
    "a scale too many": (
        lambda: hf.fake_quantize(X, torch.ones(7), **PLAIN, granularity=hf.PerChannel(1)), "takes 6 in shape"
    ),
    "a zero point of a half": (lambda: hf.fake_quantize(X, 0.1, 0.5, **PLAIN), "zero_point is a float"),
    "zero points in 64 bits": (
        lambda: hf.fake_quantize(X, 0.1, torch.tensor(1), **PLAIN), "torch.int64; accepted is torch.int32"
    ),
    "zero points in float16": (
        lambda: hf.fake_quantize(X, 0.1, torch.tensor(1.0).half(), **PLAIN), "torch.int32, torch.float32, an"
    ),
    "an axis too far": (
        lambda: hf.fake_quantize(X, torch.ones(4), **PLAIN, granularity=hf.PerChannel(3)), "axis 3 is out of"
    ),
    "a granularity of text": (
        lambda: FakeQuantizeDescriptor(shape=(4,), dtype=torch.int8, granularity="per_tensor").validate(),  # type: ignore[arg-type]
        r"granularity is 'per_tensor'; accepted are PerTensor\(\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_with_a_sentence(what: str) -> None:
    call, said = BAD[what]
    with pytest.raises(hf.HoldfastError, match=said) as refusal:
        call()
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_args_write_nothing(backend: str) -> None:
    device = BACKENDS[backend]
    stream, pref = hf.Stream.current(device), hf.PlanPreference(backend=backend, precompile=False)
    desc = hf.plans.FakeQuantizeDescriptor(shape=SHAPE, dtype=torch.int8)
    plan = hf.plans.FakeQuantizePlan.select(stream, desc, pref)
    x, y = torch.ones(SHAPE, device=device), torch.full(SHAPE, 77.0, device=device)
    good = {"x": x, "scale": 0.5, "y": y, "zero_point": None}
    for bad in ({"x": x[0]}, {"y": x}, {"scale": -1.0}, {"zero_point": torch.zeros(3, device=device)}):
        args = hf.plans.FakeQuantizeArgs(**{**good, **bad})
        assert not plan.can_implement(args)
        with pytest.raises(hf.InvalidArgs):
            plan.run(stream, None, args)
    assert (y == 77).all()


# Behaviour as a torch function.


def values(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    count = math.prod(shape)
    return ((torch.arange(count) * 37 + seed * 11) % 101 - 50).reshape(shape) / 16


def scales(granularity: hf.Granularity, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    wanted = granularity.view(shape).scale_shape
    return ((torch.arange(math.prod(wanted)) % 7 + 1) / 11).reshape(wanted)


@pytest.mark.parametrize(("granularity", "ste"), list(zip(GRANULARITIES, hf.SteKind, strict=True)), ids=str)
def test_opcheck(granularity: hf.Granularity, ste: hf.SteKind) -> None:
    shared = (scales(granularity), 1.0, None, 3, granularity.name, "int4", None, None, ste.value)
    x = values().requires_grad_()
    torch.library.opcheck(torch.ops.holdfast.fake_quantize.default, (x, *shared, 1.0))
    torch.library.opcheck(torch.ops.holdfast.fake_quantize_backward.default, (values(1), values(), *shared))


@pytest.mark.parametrize("granularity", [hf.PerTensor(), hf.PerChannel(0), hf.PerToken()], ids=repr)
@pytest.mark.parametrize("ste", ["in_range", hf.SteKind.TANH, hf.SteKind.IDENTITY])
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole_with_dynamic_shapes(granularity: hf.Granularity, ste: Any) -> None:
    def faked(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return hf.fake_quantize(x, scale, 1, dtype=torch.int4, granularity=granularity, ste=ste) * 2

    torch._dynamo.reset()
    compiled = torch.compile(faked, fullgraph=True, dynamic=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows, columns in ((3, 5), (4, 7), (9, 2)):
        x, again = (values(shape=(rows, columns)).requires_grad_() for _ in range(2))
        out, eager = compiled(x, scales(granularity, x.shape)), faked(again, scales(granularity, x.shape))
        out.backward(values(1, x.shape))
        eager.backward(values(1, x.shape))
        assert same(out.detach(), eager.detach())
        assert x.grad is not None and again.grad is not None and same(x.grad, again.grad)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs == 1


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("ste", hf.SteKind)
@pytest.mark.parametrize("dtype", [record.torch for record in FLOATS.values()], ids=str)
def test_the_function_is_the_plan(granularity: hf.Granularity, ste: hf.SteKind, dtype: torch.dtype) -> None:
    x, dy, scale = values().to(dtype).requires_grad_(), values(1).to(dtype), scales(granularity)
    y = hf.fake_quantize(x, scale, 1, dtype=torch.int4, granularity=granularity, ste=ste)
    y.backward(dy)
    fields: dict[str, Any] = {"granularity": granularity, "dtype": torch.int4}
    assert same(y.detach(), forward("cpu", x.detach(), scale, 1, **fields))
    assert x.grad is not None
    assert same(x.grad, gradient("cpu", ste, x.detach(), dy, scale, 1, **fields))


def test_identity_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = values().requires_grad_()
    hidden = x * 1
    arrived: list[torch.Tensor] = []
    hidden.register_hook(arrived.append)
    y = hf.fake_quantize(hidden, 0.1, **PLAIN, ste=hf.SteKind.IDENTITY)

    def refuse(*given: Any) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(hf.plans.FakeQuantizeBackwardPlan, "run", refuse)
    dy = values(1)
    y.backward(dy)
    assert arrived[0].data_ptr() == dy.data_ptr()
    with pytest.raises(AssertionError, match="a kernel was launched"):
        hf.fake_quantize(x, 0.1, **PLAIN).sum().backward()


@pytest.mark.parametrize("ste", hf.SteKind)
def test_nothing_is_saved_but_the_inputs(ste: hf.SteKind) -> None:
    x, scale = values().requires_grad_(), scales(hf.PerChannel(1))
    zero_point = torch.zeros(6, dtype=torch.int32)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hf.fake_quantize(x, scale, zero_point, **PLAIN, granularity=hf.PerChannel(1), ste=ste)
    inputs = [tensor.data_ptr() for tensor in (x, scale, zero_point)]
    assert [tensor.data_ptr() for tensor in saved] == ([] if ste is hf.SteKind.IDENTITY else inputs)


def test_a_gradient_of_the_gradient_is_refused() -> None:
    x = values().requires_grad_()
    (dx,) = torch.autograd.grad(
        hf.fake_quantize(x, 0.1, **PLAIN, ste="tanh").square().sum(), x, create_graph=True
    )
    with pytest.raises(hf.Unsupported, match=r"no second derivative.*create_graph"):
        dx.sum().backward()
    y = hf.fake_quantize(x, 0.1, **PLAIN, ste="identity")
    (dx,) = torch.autograd.grad((y * x).sum(), x, create_graph=True)  # y + x, linear in x
    dx.sum().backward()
    assert x.grad is not None and same(x.grad, torch.full(SHAPE, 2.0))


def test_autocast_computes_as_for_the_dtype_of_the_input() -> None:
    x, scale = values().requires_grad_(), scales(hf.PerChannel(1))
    fields: dict[str, Any] = {**PLAIN, "granularity": hf.PerChannel(1), "ste": "tanh"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = hf.fake_quantize(x, scale, **fields)
    y.sum().backward()
    assert y.dtype == torch.float32 and same(y.detach(), hf.fake_quantize(x.detach(), scale, **fields))
    assert x.grad is not None
    assert same(x.grad, gradient("cpu", hf.SteKind.TANH, x.detach(), torch.ones(SHAPE), scale, **{
        "granularity": hf.PerChannel(1), **PLAIN
    }))  # fmt: skip


def test_layouts_are_kept() -> None:
    x = values(shape=(2, 3, 5, 7)).to(memory_format=torch.channels_last)
    assert hf.fake_quantize(x, 0.1, **PLAIN).is_contiguous(memory_format=torch.channels_last)
    view = torch.complex(values(), values()).conj().imag
    assert view.is_neg() and same(
        hf.fake_quantize(view, 0.1, **PLAIN), hf.fake_quantize(-values(), 0.1, **PLAIN)
    )


#: The batch axes of x, scale and zero point (None: no batch axis), and whether they are tensors.
BATCHED = [
    dims
    for dims in product([0, 2, None], [0, -1, None, "host"], [0, None, "none"])
    if any(isinstance(dim, int) for dim in dims)
]


@pytest.mark.parametrize("granularity", [*GRANULARITIES, hf.PerChannel(-1)], ids=repr)
@pytest.mark.parametrize(("x_dim", "scale_dim", "zero_dim"), BATCHED)
def test_vmap(granularity: hf.Granularity, x_dim: Any, scale_dim: Any, zero_dim: Any) -> None:
    dims = (x_dim, *(dim if isinstance(dim, int) else None for dim in (scale_dim, zero_dim)))
    samples = 3
    one = scales(granularity)
    x = torch.stack([values(i) for i in range(samples)], x_dim) if x_dim is not None else values()
    scale: Any = one if scale_dim is None else 0.17
    if isinstance(scale_dim, int):
        scale = torch.stack([one * (i + 1) for i in range(samples)], scale_dim)
    zero_point: Any = None if zero_dim == "none" else torch.ones(one.shape, dtype=torch.int32)
    if zero_dim == 0:
        zero_point = torch.stack([zero_point * i for i in range(samples)])

    def faked(x: torch.Tensor, scale: Any, zero_point: Any) -> torch.Tensor:
        return hf.fake_quantize(x, scale, zero_point, **PLAIN, granularity=granularity, ste="hard_tanh")

    def of_sample(i: int) -> list[Any]:
        given = zip((x, scale, zero_point), dims, strict=True)
        return [value if dim is None else value.select(dim, i) for value, dim in given]

    x.requires_grad_()
    found = torch.vmap(faked, in_dims=dims)(x, scale, zero_point)
    wanted = torch.stack([faked(*of_sample(i)) for i in range(samples)])
    assert same(found.detach(), wanted.detach())
    if x_dim is not None:
        dy = torch.stack([values(7 + i) for i in range(samples)])
        (dx,), (wanted_dx,) = torch.autograd.grad(found, x, dy), torch.autograd.grad(wanted, x, dy)
        assert same(dx, wanted_dx)


def test_vmap_of_the_largest_rank() -> None:
    x = values(shape=(2, 1, 1, 1, 1, 1, 1, 3, 4))
    scale = torch.tensor([0.1, 0.2])
    found = torch.vmap(lambda x, s: hf.fake_quantize(x, s, **PLAIN))(x, scale)
    assert same(found, torch.stack([hf.fake_quantize(x[i], scale[i], **PLAIN) for i in range(2)]))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_gradients_in_batches(granularity: hf.Granularity) -> None:
    x = values().requires_grad_()
    y = hf.fake_quantize(x, scales(granularity), **PLAIN, granularity=granularity, ste="tanh")
    dy = torch.stack([values(i) for i in range(3)])
    (found,) = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in dy]
    assert same(found, torch.stack(wanted))


def test_the_factor_of_lsq() -> None:
    """1 / sqrt(n * q_max) for n elements per scale, without a division by zero for q_max 0 or n 0."""
    shape = torch.Size(SHAPE)
    assert lsq_factor(shape, "per_tensor", 7) == 1 / math.sqrt(192 * 7)
    assert lsq_factor(shape, "per_channel:1", 127) == 1 / math.sqrt(32 * 127)
    assert lsq_factor(shape, "per_token", 1) == 1 / math.sqrt(8)
    assert lsq_factor(shape, "per_group:4:-1", 3) == 1 / math.sqrt(4 * 3)
    assert lsq_factor(torch.Size([0, 4]), "per_tensor", 0) == 1.0


def test_a_learned_scale_and_zero_point_have_gradients() -> None:
    import holdfast.ops.fake_quantize_learned.torch_op  # noqa: F401

    x, dy = values().double().requires_grad_(), values(1).double()
    for granularity in GRANULARITIES:
        found = {}
        for factor in (1.0, "lsq"):
            scale = scales(granularity).double().requires_grad_()
            zero_point = (scales(granularity).double() * 3).requires_grad_()
            y = hf.fake_quantize(
                x, scale, zero_point, **PLAIN, granularity=granularity, ste="tanh", grad_factor=factor
            )
            found[factor] = torch.autograd.grad(y, (x, scale, zero_point), dy)
        plain = gradient("cpu", hf.SteKind.TANH, x.detach(), dy, scale.detach(), zero_point.detach(),
                         **PLAIN, granularity=granularity)  # fmt: skip
        assert same(found["lsq"][0], plain) and same(found[1.0][0], plain)
        lsq = lsq_factor(x.shape, granularity.name, 7)
        for one, scaled in zip(found[1.0][1:], found["lsq"][1:], strict=True):
            assert one.abs().max() > 0
            assert torch.equal(scaled, one * lsq)

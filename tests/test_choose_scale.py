"""Tests of choose_scale: hand-computed values, exact arithmetic, and the behaviour as a torch function."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.core.bits import canonical
from holdfast.core.case import LAYOUTS, laid_out, poisoned_output
from holdfast.ops.choose_scale.cases import Problem, input_values, segment_values
from holdfast.proof.conformance import gpu_way

GPU = gpu_way()
BACKENDS = {"reference": "cpu", "cpu": "cpu", **({GPU.backend: GPU.device} if GPU else {})}
SHAPE = (4, 6, 8)
GRANULARITIES = [hf.PerTensor(), hf.PerChannel(1), hf.PerToken(), hf.PerGroup(4), hf.PerGroup(3, axis=1)]
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INF, NAN = float("inf"), float("nan")
FLOOR = float(torch.tensor(1e-12))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal bits, dtype and shape. All NaNs are equal."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(canonical(a), canonical(b))


def chosen(backend: str, x: torch.Tensor, **fields: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scale and zero point, computed by a plan on ``backend``."""
    device = BACKENDS[backend]
    desc = hf.plans.ChooseScaleDescriptor(shape=tuple(x.shape), input_dtype=x.dtype, **fields)
    stream = hf.Stream.current(device)
    plan = hf.plans.ChooseScalePlan.select(stream, desc, hf.PlanPreference(backend=backend, precompile=False))
    made = {
        name: torch.empty(desc.expected(name)[0], dtype=desc.expected(name)[1], device=device)
        for name in (("scale",) if desc.symmetric else ("scale", "zero_point"))
    }
    args = hf.plans.ChooseScaleArgs(x=x.to(device), **made)
    plan.run(stream, hf.Workspace.allocate(plan.workspace_size(), device), args)
    return made["scale"].cpu(), made["zero_point"].cpu() if "zero_point" in made else None


#: Values, arguments, and the hand-computed scale.
SYMMETRIC: dict[str, tuple[list[float], dict[str, Any], float]] = {
    "the largest magnitude over 127": ([1.0, -254.0, 3.0], {}, 2.0),
    "one of either sign": ([254.0, -254.0], {}, 2.0),
    "4 bits": ([-14.0, 3.5], {"output_dtype": torch.int4}, 2.0),
    "2 bits": ([0.25, -0.5], {"output_dtype": torch.int2}, 0.5),
    "16 bits": ([-65534.0], {"output_dtype": torch.int16}, 2.0),
    "the whole range, lowest code reached": ([-256.0, 1.0], {"narrow": False}, 2.0),
    "the whole range, highest code reached": ([-1.0, 254.0], {"narrow": False}, 2.0),
    "a range of one's own": ([-10.0, 4.0], {"q_min": -5, "q_max": 5}, 2.0),
    "more codes above than below": ([6.0, 1.0], {"q_min": -3, "q_max": 100}, 2.0),
    "more codes above, all of them": ([6.0, -6.0], {"q_min": -3, "q_max": 100, "narrow": False}, 2.0),
    "codes in floats": ([-8.0], {"output_dtype": torch.float32, "q_min": -4, "q_max": 4}, 2.0),
    "zeros": ([0.0, -0.0], {}, FLOOR),
    "less than the floor": ([1e-11, -1e-10], {}, FLOOR),
    "just above the floor": ([2.54e-10], {}, float(torch.tensor(2.54e-10) / torch.tensor(127.0))),
    "nothing": ([], {}, FLOOR),
    "NaN": ([1.0, NAN, 2.0], {}, NAN),
    "NaN and infinity": ([INF, NAN], {}, NAN),
    "infinity": ([1.0, -INF], {}, INF),
    "the largest float32": ([3.4028234663852886e38], {"output_dtype": torch.int2}, 3.4028234663852886e38),
}


@pytest.mark.parametrize("what", SYMMETRIC)
@pytest.mark.parametrize("backend", BACKENDS)
def test_symmetric_scales_by_hand(backend: str, what: str) -> None:
    values, fields, wanted = SYMMETRIC[what]
    scale, zero_point = chosen(backend, torch.tensor(values, dtype=torch.float32), **fields)
    assert same(scale, torch.tensor(wanted, dtype=torch.float32))
    assert zero_point is None


AFFINE: dict[str, tuple[list[float], dict[str, Any], float, int]] = {
    "0 to the top": ([0.0, 510.0], {"output_dtype": torch.uint8}, 2.0, 0),
    "0 from below": ([-510.0, 0.0], {"output_dtype": torch.uint8}, 2.0, 255),
    "on both sides": ([-10.0, 500.0], {"output_dtype": torch.uint8}, 2.0, 5),
    "a signed dtype": ([-10.0, 500.0], {}, 2.0, -123),
    "0 is always inside": ([300.0, 510.0], {"output_dtype": torch.uint8}, 2.0, 0),
    "0 is always inside, below": ([-510.0, -300.0], {"output_dtype": torch.uint8}, 2.0, 255),
    "half a code goes to even": ([-3.0, 507.0], {"output_dtype": torch.uint8}, 2.0, 2),
    "half a code goes to even, up": ([-5.0, 505.0], {"output_dtype": torch.uint8}, 2.0, 2),
    "without the lowest": ([-508.0, 0.0], {"output_dtype": torch.uint8, "narrow": True}, 2.0, 255),
    "without the lowest, positive": ([508.0], {"output_dtype": torch.uint8, "narrow": True}, 2.0, 1),
    "two codes": ([-1.0, 1.0], {"q_min": 0, "q_max": 1}, 2.0, 0),
    "zeros": ([0.0, -0.0], {"output_dtype": torch.uint8}, FLOOR, 0),
    "nothing": ([], {}, FLOOR, -128),
    "NaN": ([1.0, NAN], {}, NAN, -128),
    "infinity": ([1.0, INF], {}, INF, -128),
    "minus infinity": ([1.0, -INF], {"output_dtype": torch.uint8}, INF, 0),
    "the widest range": (
        [3.4028234663852886e38, -3.4028234663852886e38],
        {"output_dtype": torch.uint2},
        float(torch.tensor(3.4028234663852886e38, dtype=torch.float64).mul(2).div(3).float()),
        2,
    ),
}


@pytest.mark.parametrize("what", AFFINE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_with_a_zero_point_by_hand(backend: str, what: str) -> None:
    values, fields, scale, zero_point = AFFINE[what]
    found = chosen(backend, torch.tensor(values, dtype=torch.float32), symmetric=False, **fields)
    assert same(found[0], torch.tensor(scale, dtype=torch.float32))
    assert found[1] is not None and found[1].tolist() == zero_point


def exact_scale(x: torch.Tensor, lowest: int, highest: int, symmetric: bool) -> Fraction:
    values = [Fraction(value) for value in x.double().flatten().tolist()]
    low, high = min(min(values), Fraction(0)), max(max(values), Fraction(0))
    scale = max(high / highest, low / lowest) if symmetric else (high - low) / (highest - lowest)
    return max(scale, Fraction(float(torch.tensor(1e-12, dtype=torch.float64))))


def ulp(value: Fraction, dtype: torch.dtype) -> Fraction:
    exponent = math.frexp(float(value))[1] - 1
    return Fraction(2) ** (exponent - (52 if dtype == torch.float64 else 23))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=8),
    st.integers(-200, -1),
    st.integers(1, 200),
    st.booleans(),
    st.sampled_from(REALS[2:]),
)
def test_a_scale_is_as_exact_as_the_plan_says(
    values: list[float], q_min: int, q_max: int, symmetric: bool, dtype: torch.dtype
) -> None:
    x = torch.tensor(values, dtype=dtype)
    fields: dict[str, Any] = {"output_dtype": torch.int16, "q_min": q_min, "q_max": q_max}
    desc = hf.plans.ChooseScaleDescriptor(
        shape=tuple(x.shape), input_dtype=dtype, symmetric=symmetric, narrow=False, **fields
    )
    promise = hf.plans.ChooseScalePlan.select(hf.Stream.current(), desc).precision_guarantee()
    right = exact_scale(x, q_min, q_max, symmetric)
    scale, zero_point = chosen("cpu", x, symmetric=symmetric, narrow=False, **fields)
    error = abs(Fraction(float(scale)) - right)
    if right > Fraction(1, 10**11):
        assert error <= Fraction(promise.ulp["scale"]) * ulp(right, scale.dtype)
    if zero_point is not None:
        low = min(0, *(Fraction(value) for value in x.double().tolist()))
        exact = min(max(q_min - round(low / right), q_min), q_max)
        assert abs(int(zero_point) - exact) <= promise.ulp["zero_point"]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.floats(-60000, 60000, width=16), min_size=1, max_size=40),
    st.sampled_from([torch.int8, torch.int4, torch.int2, torch.int16]),
    st.booleans(),
    st.sampled_from([None, True, False]),
    st.sampled_from(REALS),
)
def test_the_data_fits_into_the_codes(
    values: list[float], codes: torch.dtype, symmetric: bool, narrow: bool | None, dtype: torch.dtype
) -> None:
    """No code is clamped, and all codes are in the allowed range."""
    x = torch.tensor(values, dtype=dtype)
    found = hf.choose_scale(x, dtype=codes, symmetric=symmetric, narrow=narrow)
    scale, zero_point = found if isinstance(found, tuple) else (found, torch.tensor(0, dtype=torch.int32))
    r = torch.round(x.double() / scale.double()) + zero_point
    desc = hf.plans.ChooseScaleDescriptor(shape=(), output_dtype=codes, symmetric=symmetric, narrow=narrow)
    lowest, highest = desc.ends(*desc.code_range)
    slack = 0 if symmetric else 1  # two roundings may add up at the upper end
    assert lowest <= int(r.min()) and int(r.max()) <= highest + slack
    q = hf.quantize(x, scale, None if symmetric else zero_point, dtype=codes)
    assert lowest <= int(q.min()) and int(q.max()) <= highest
    y = hf.dequantize(q, scale, None if symmetric else zero_point, dtype=torch.float64)
    assert (y - x.double()).abs().max() <= 0.5001 * scale.double() + (
        0 if symmetric else 0.51 * scale.double()
    )


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_the_function_is_the_formula(granularity: hf.Granularity, dtype: torch.dtype) -> None:
    x = ((torch.arange(4 * 6 * 8) * 37 % 101 - 50) / 16).reshape(SHAPE).to(dtype)
    view = granularity.view(SHAPE)
    shared = [d for d, varies in enumerate(view.varies) if not varies]
    wide = x.to(torch.promote_types(dtype, torch.float32)).reshape(view.shape)
    amax = wide.abs().amax(shared).reshape(view.scale_shape)
    scale = hf.choose_scale(x, granularity=granularity)
    assert same(scale, amax / 127)
    low, high = hf.observe_range(x, granularity=granularity)
    assert same(low, wide.amin(shared).clamp(max=0).reshape(view.scale_shape))
    assert same(high, wide.amax(shared).clamp(min=0).reshape(view.scale_shape))
    scale, zero_point = hf.choose_scale(x, granularity=granularity, dtype=torch.uint8, symmetric=False)
    assert same(scale, (high - low) / 255)
    assert torch.equal(zero_point, torch.round(-low / scale).to(torch.int32))


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("narrow", [None, True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_scale_of_a_range_is_the_scale_of_the_data(
    symmetric: bool, narrow: bool | None, dtype: torch.dtype
) -> None:
    """The kernel on the data and scale_of_range on its range give the same bits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = input_values(Problem("", hf.PerChannel(0), (67, 40), dtype, values="mixed")).to(device)
    x = torch.cat([x, torch.randn(200, 40, generator=torch.Generator().manual_seed(3)).to(x)])
    for codes in (torch.int8, torch.int2, torch.int16):
        rule: dict[str, Any] = {"dtype": codes, "symmetric": symmetric, "narrow": narrow}
        granularity = hf.PerChannel(0)
        found = hf.choose_scale(x, granularity=granularity, **rule)
        of_range = hf.scale_of_range(*hf.observe_range(x, granularity=granularity), **rule)
        for one, other in zip(
            found if isinstance(found, tuple) else [found],
            of_range if isinstance(of_range, tuple) else [of_range],
            strict=True,
        ):
            assert same(one.cpu(), other.cpu())


def test_a_range_does_not_know_the_sign_of_zero_or_of_nan() -> None:
    for backend, device in BACKENDS.items():
        for values, wanted in (([-0.0, -0.0], 0.0), ([-NAN, 1.0], NAN), ([1.0, NAN], NAN)):
            x = torch.tensor(values).to(device)
            desc = hf.plans.ObserveRangeDescriptor(shape=(2,))
            stream = hf.Stream.current(device)
            plan = hf.plans.ObserveRangePlan.select(stream, desc, hf.PlanPreference(backend=backend))
            low, high = (torch.empty((), device=device) for _ in range(2))
            plan.run(stream, None, hf.plans.ObserveRangeArgs(x=x, low=low, high=high))
            assert same(low.cpu(), torch.tensor(wanted)) and same(high.cpu(), torch.tensor(wanted))


def test_one_bad_segment_spoils_no_other() -> None:
    for dtype in REALS:
        kinds = list(segment_values(hf.core.dtypes.FLOATS[str(dtype).removeprefix("torch.")]))
        x = input_values(Problem("", hf.PerToken(), (len(kinds), 40), dtype, values="mixed"))
        scale = hf.choose_scale(x, granularity=hf.PerToken())
        for i, kind in enumerate(kinds):
            assert bool(scale[i].isnan()) == ("NaN" in kind), kind
            assert bool(scale[i].isinf()) == ("infin" in kind and "NaN" not in kind), kind


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.sampled_from(["tensor", "channel", "token", "group"]),
    st.integers(0, 3),
    st.sampled_from(sorted(set(LAYOUTS) - {"channels last", "leading transposed"})),
    st.sampled_from(REALS),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_any_shape_and_layout(
    sizes: list[int], kind: str, axis: int, layout: str, dtype: torch.dtype, symmetric: bool, seed: int
) -> None:
    axis %= len(sizes)
    granularity = {
        "tensor": hf.PerTensor(),
        "channel": hf.PerChannel(axis),
        "token": hf.PerToken(),
        "group": hf.PerGroup(max(sizes[axis] // 2, 1), axis),
    }[kind]
    if isinstance(granularity, hf.PerGroup):
        sizes[axis] = granularity.group_size * 2
    if layout == "broadcast" and sizes[0] == 0:
        layout = "contiguous"
    bits = torch.randint(-(2**15), 2**15, sizes, generator=torch.Generator().manual_seed(seed))
    x = laid_out(bits.to(torch.int16).view(torch.bfloat16).to(dtype), layout)
    wanted = chosen("reference", x, granularity=granularity, symmetric=symmetric)
    for backend in BACKENDS:
        found = chosen(backend, x, granularity=granularity, symmetric=symmetric)
        for right, got in zip(wanted, found, strict=True):
            assert (right is None and got is None) or same(right, got)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_opcheck(granularity: hf.Granularity) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    rule = ("int8", None, None, None)
    torch.library.opcheck(torch.ops.holdfast.observe_range.default, (x, granularity.name))
    torch.library.opcheck(torch.ops.holdfast.choose_scale.default, (x, granularity.name, *rule))
    torch.library.opcheck(torch.ops.holdfast.choose_scale_affine.default, (x, granularity.name, *rule))
    low, high = hf.observe_range(x, granularity=granularity)
    torch.library.opcheck(torch.ops.holdfast.scale_of_range.default, (low, high, *rule))
    torch.library.opcheck(torch.ops.holdfast.scale_of_range_affine.default, (low, high, *rule))


@pytest.mark.parametrize("op", ["scale_of_range", "scale_of_range_affine"])
def test_opcheck_of_ends_with_other_strides(op: str) -> None:
    low, high = hf.observe_range(torch.randn(3, 4, 8), granularity=hf.PerToken())
    columns = low.t().contiguous().t()
    for ends in ((columns, high), (low, high.t().contiguous().t()), (columns, high[:1].expand(3, 4))):
        torch.library.opcheck(getattr(torch.ops.holdfast, op).default, (*ends, "int8", None, None, None))


@pytest.mark.parametrize("granularity", [hf.PerTensor(), hf.PerChannel(0), hf.PerGroup(4)], ids=repr)
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole_with_dynamic_shapes(granularity: hf.Granularity) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low, high = hf.observe_range(x * 2, granularity=granularity)
        scale, zero_point = hf.choose_scale(x, granularity=granularity, symmetric=False)
        plain = hf.choose_scale(x, granularity=granularity)
        return plain * 2, scale, zero_point, hf.scale_of_range(low, high)

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for rows, columns in ((3, 8), (4, 12), (9, 4)):
        x = torch.linspace(-3, 2, rows * columns).reshape(rows, columns)
        assert all(map(same, compiled(x), both(x)))


def test_a_scale_is_not_differentiable() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    assert not hf.choose_scale(x).requires_grad
    assert not any(found.requires_grad for found in hf.choose_scale(x, symmetric=False))
    assert not any(found.requires_grad for found in hf.observe_range(x))


def test_samples_of_vmap_have_scales_of_their_own() -> None:
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))
    assert same(torch.vmap(hf.choose_scale)(x), torch.stack([hf.choose_scale(sample) for sample in x]))
    affine = torch.vmap(lambda x: hf.choose_scale(x, symmetric=False), in_dims=1)(x)
    assert same(affine[0], torch.stack([hf.choose_scale(x[:, i], symmetric=False)[0] for i in range(3)]))


def test_negated_views_have_the_values_that_they_show() -> None:
    view = torch.complex(torch.ones(3), torch.tensor([1.0, 2.0, -3.0])).conj().imag
    assert view.is_neg()
    low, high = hf.observe_range(view)
    assert (float(low), float(high)) == (-2.0, 3.0)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unsigned dtype": ({"output_dtype": torch.uint8}, "the codes are 0 to 255; pass symmetric=False"),
    "a range below 0": ({"q_min": -8, "q_max": -1}, "codes on both sides of 0"),
    "one code": ({"q_min": 3, "q_max": 3, "symmetric": False}, "of which the scale uses 3 to 3"),
    "one code left": ({"q_min": 0, "q_max": 1, "symmetric": False, "narrow": True}, "1 to 1"),
    "codes in floats": ({"output_dtype": torch.float32}, "give q_min and q_max"),
    "a range too wide": ({"q_max": 200}, "wider than torch.int8 holds"),
    "no granularity": ({"granularity": "per_tensor"}, "granularity is 'per_tensor'; accepted are"),
    "a group that does not divide": ({"granularity": hf.PerGroup(4)}, "does not divide"),
    "an axis that is not there": ({"granularity": hf.PerChannel(2)}, "axis 2 is out of range"),
    "symmetric that is no truth": ({"symmetric": 1}, "symmetric is 1; it must be True or False"),
    "narrow that is no truth": ({"narrow": "yes"}, "narrow is 'yes'"),
    "an input that is no float": ({"input_dtype": torch.int32}, "accepted are torch.float16"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_descriptors(what: str) -> None:
    fields, said = BAD[what]
    desc = hf.plans.ChooseScaleDescriptor(shape=(4, 6), **fields)
    with pytest.raises(hf.InvalidDescriptor) as refusal:
        hf.plans.ChooseScalePlan.select(hf.Stream.current(), desc)
    assert said in str(refusal.value) and str(refusal.value).endswith(".")


def scale_args(device: str, **given: Any) -> hf.plans.ChooseScaleArgs:
    made: dict[str, Any] = {
        "x": torch.ones(4, 6),
        "scale": poisoned_output((4,), torch.float32),
        "zero_point": poisoned_output((4,), torch.int32),
    }
    made = {name: tensor.to(device) for name, tensor in made.items()}
    return hf.plans.ChooseScaleArgs(**{**made, **given})


BAD_ARGS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "x of another shape": (lambda a: replace(a, x=a.x[:3]), ("x has shape (3, 6)", "(4, 6)")),
    "x of another dtype": (lambda a: replace(a, x=a.x.half()), ("x has dtype torch.float16",)),
    "a negated x": (lambda a: replace(a, x=torch._neg_view(a.x)), ("x is a negated view",)),
    "no scale": (lambda a: replace(a, scale=None), ("scale is a NoneType", "torch tensor")),
    "a scale of another dtype": (lambda a: replace(a, scale=a.scale.double()), ("torch.float64", "float32")),
    "a scale of another shape": (lambda a: replace(a, scale=a.scale[:3]), ("(3,)", "takes 4 in shape (4,)")),
    "a scale elsewhere": (lambda a: replace(a, scale=a.scale.to("meta")), ("scale is on meta",)),
    "no zero point": (lambda a: replace(a, zero_point=None), ("zero_point is a NoneType",)),
    "a zero point of another dtype": (lambda a: replace(a, zero_point=a.zero_point.long()), ("torch.int64",)),
    "a scale that overlaps itself": (
        lambda a: replace(a, scale=a.scale[:1].expand(4)), ("scale has strides (0,)", "overlap themselves"),
    ),
    "a scale in the input": (lambda a: replace(a, scale=a.x.view(-1)[4:8]), ("scale shares memory",)),
    "results in one place": (
        lambda a: replace(a, zero_point=a.scale.view(torch.int32)), ("scale shares memory",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_ARGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_args(backend: str, what: str) -> None:
    device = BACKENDS[backend]
    desc = hf.plans.ChooseScaleDescriptor(shape=(4, 6), granularity=hf.PerChannel(0), symmetric=False)
    pref = hf.PlanPreference(backend=backend, precompile=False)
    plan = hf.plans.ChooseScalePlan.select(hf.Stream.current(device), desc, pref)
    args = scale_args(device)
    spoil, said = BAD_ARGS[what]
    bad = spoil(args)
    verdict = plan.can_implement(bad)
    with pytest.raises(hf.InvalidArgs) as refusal:
        plan.run(hf.Stream.current(device), None, bad)
    assert str(refusal.value) == verdict.reason and verdict.reason.endswith(".")
    assert all(words in verdict.reason for words in said)
    assert args.scale.isnan().all() and (args.zero_point.cpu().view(torch.uint8) == 0xA5).all()


def test_a_symmetric_plan_takes_no_zero_point() -> None:
    desc = hf.plans.ChooseScaleDescriptor(shape=(4, 6), granularity=hf.PerChannel(0))
    plan = hf.plans.ChooseScalePlan.select(hf.Stream.current(), desc)
    args = scale_args("cpu")
    assert "a symmetric scale has no zero_point" in plan.can_implement(args).reason
    assert plan.can_implement(replace(args, zero_point=None))


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_workspace_may_begin_anywhere(backend: str) -> None:
    device = BACKENDS[backend]
    x = torch.arange(-80_000.0, 80_000.0, device=device).reshape(2, 80_000)
    desc = hf.plans.ChooseScaleDescriptor(shape=(2, 80_000), granularity=hf.PerToken(), symmetric=False)
    stream = hf.Stream.current(device)
    plan = hf.plans.ChooseScalePlan.select(stream, desc, hf.PlanPreference(backend=backend))
    assert plan.workspace_size() > 0
    wanted = chosen("reference", x.cpu(), granularity=hf.PerToken(), symmetric=False)
    for shift in (0, 1, 7):
        scale, zero_point = torch.empty(2, device=device), torch.empty(2, dtype=torch.int32, device=device)
        args = hf.plans.ChooseScaleArgs(x=x, scale=scale, zero_point=zero_point)
        memory = torch.full((plan.workspace_size() + shift,), 0xFF, dtype=torch.uint8, device=device)
        plan.run(stream, memory[shift:], args)
        assert same(scale.cpu(), wanted[0]) and torch.equal(zero_point.cpu(), wanted[1])
        with pytest.raises(hf.WorkspaceTooSmall):
            plan.run(stream, memory[shift + 1 :], args)


def test_functions_refuse_with_a_sentence() -> None:
    x = torch.ones(4, 6)
    for bad, match in (
        (lambda: hf.choose_scale([1.0]), "x is a list"),
        (lambda: hf.choose_scale(x, dtype=torch.uint8), "symmetric=False"),
        (lambda: hf.choose_scale(x, granularity="per_tensor"), "granularity is 'per_tensor'"),
        (lambda: hf.choose_scale(x, symmetric=None), "symmetric is None"),
        (lambda: hf.choose_scale(x.long()), "torch.int64; accepted are"),
        (lambda: hf.observe_range(x, granularity=None), "granularity is None"),
        (lambda: hf.scale_of_range(x, x[0]), "low and high are those of observe_range"),
        (lambda: hf.scale_of_range(x.half(), x.half()), "low is torch.float16"),
        (lambda: hf.scale_of_range(x, x, dtype=torch.uint8), "symmetric=False"),
    ):
        with pytest.raises(hf.HoldfastError, match=match) as refusal:
            bad()
        assert str(refusal.value).endswith(".")

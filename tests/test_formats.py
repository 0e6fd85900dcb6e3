"""Tests of number formats: the record, and float8_e4m3fn against other implementations."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical
from holdfast.core.draw import Draw, case_of, space_of
from holdfast.core.formats import (
    CARRIED,
    E4M3FN,
    FLOAT_FORMATS,
    INT4,
    INT8,
    INTEGERS,
    UINT2,
    Format,
    Scales,
    format_of,
)
from holdfast.numerics.reference import decode, encode, nearest
from holdfast.proof.conformance import gpu_way

E4 = torch.float8_e4m3fn
INF, NAN = float("inf"), float("nan")
GPU = gpu_way()
BACKENDS = {"reference": "cpu", "cpu": "cpu", **({GPU.backend: GPU.device} if GPU else {})}

#: The records of future formats. These fields are sufficient to quantize and dequantize.
E5M2 = Format(
    torch.float8_e5m2, "float8_e5m2", 8, torch.float8_e5m2, (-57344, 57344), 5, 2, nan=0x7E, infinity=0x7C,
    zero_point=False,
)  # fmt: skip
_E2M1 = Format(torch.float4_e2m1fn_x2, "float4_e2m1fn_x2", 4, torch.uint8, (-6, 6), 2, 1, zero_point=False)
MXFP4 = replace(_E2M1, scales=Scales((torch.float8_e8m0fnu,), real=False, block=32))
NVFP4 = replace(_E2M1, scales=Scales((E4,), real=False, block=16, per_tensor=True))
PEERS = {
    "e4m3fn": (E4M3FN, ml_dtypes.float8_e4m3fn),
    "e5m2": (E5M2, ml_dtypes.float8_e5m2),
    "e2m1, e8m0 scales": (MXFP4, ml_dtypes.float4_e2m1fn),
    "e2m1, e4m3 scales": (NVFP4, ml_dtypes.float4_e2m1fn),
}


def run(kind: str, backend: str, out: torch.Tensor, fields: dict[str, Any], **operands: Any) -> torch.Tensor:
    """Run a plan on one backend; ``kind`` is the name of the plan without the suffix Plan."""
    device = BACKENDS[backend]
    plan = hf.plans.all()[f"{kind}Plan"]
    stream = hf.Stream.current(device)
    made = plan.select(
        stream, plan.Descriptor(**fields), hf.PlanPreference(backend=backend, precompile=False)
    )
    given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in operands.items()}
    result = out.to(device)
    made.run(stream, None, plan.Args(**given, **{plan.outputs[0]: result}))
    return result.cpu()


def codes(backend: str, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The codes of x, as bytes."""
    fields = {"shape": tuple(x.shape), "input_dtype": x.dtype, "output_dtype": E4}
    found = run("QuantizePerTensor", backend, torch.empty(x.shape, dtype=E4), fields, x=x, scale=scale)
    return found.view(torch.uint8)


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit dtype."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


# The record.


def test_a_format_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        INT8.bits = 9  # type: ignore[misc]
    assert hash(INT8) != hash(INT4) and replace(INT8) == INT8


def test_a_dtype_names_its_format() -> None:
    for record in (*INTEGERS.values(), *FLOAT_FORMATS.values(), *CARRIED.values()):
        assert format_of(record.torch, "dtype") is record
        assert str(record.torch) == f"torch.{record.name}"
    with pytest.raises(hf.InvalidDescriptor, match=r"dtype is torch\.complex64; accepted are torch\.int2"):
        format_of(torch.complex64, "dtype")


def test_the_integer_formats() -> None:
    assert [(f.code_range, f.per_byte) for f in (UINT2, INT4, INT8)] == [
        ((0, 3), 4),
        ((-8, 7), 2),
        ((-128, 127), 1),
    ]
    assert INT8.value(-5) == -5.0 and INT8.highest_code == 127 and not INT8.is_float
    assert CARRIED["bfloat16"].code_range == (-256, 256) and CARRIED["float32"].code_range == (-65536, 65536)


def test_what_a_scale_may_be() -> None:
    assert INT8.scales.accepted(torch.bfloat16) == (torch.float32, torch.bfloat16)
    assert E4M3FN.scales.accepted(torch.float32) == (torch.float32,)
    assert MXFP4.scales.accepted(torch.float32) == (torch.float8_e8m0fnu,)


@pytest.mark.parametrize("name", PEERS)
def test_the_record_is_enough_to_decode(name: str) -> None:
    record, peer = PEERS[name]
    with np.errstate(invalid="ignore"):
        theirs = np.arange(2**record.bits, dtype=np.uint8).view(peer).astype(np.float64)
    ours = np.array([record.value(code) for code in range(2**record.bits)])
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(ours[theirs == 0]), np.signbit(theirs[theirs == 0]))
    assert record.value(record.highest_code) == record.code_range[1]


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_record_is_enough_to_encode(name: str, dtype: torch.dtype) -> None:
    record, peer = PEERS[name]
    x = every(dtype).float().numpy()
    x = x[np.abs(x) <= record.code_range[1]]
    found = encode(nearest(x, record), record)
    assert np.array_equal(found, x.astype(peer).view(np.uint8))
    again = decode(found, record, hf.core.dtypes.FLOATS["float32"])
    assert np.array_equal(encode(nearest(again, record), record), found)


# float8_e4m3fn.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_to_ml_dtypes_on_every_input_in_range(backend: str, dtype: torch.dtype) -> None:
    x = every(dtype)
    in_range = x.abs() <= 448
    assert in_range.sum() > 2**15
    found = codes(backend, x)
    theirs = x[in_range].float().numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert torch.equal(found[in_range], torch.from_numpy(theirs))
    assert torch.equal(found[in_range], x.to(E4).view(torch.uint8)[in_range])
    assert set(found[x.isnan()].tolist()) == {0x7F}
    assert set(found[x > 448].tolist()) == {0x7E} and set(found[x < -448].tolist()) == {0xFE}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_input_is_faked_as_it_is_quantized(backend: str, dtype: torch.dtype) -> None:
    x = every(dtype)
    fields = {"shape": tuple(x.shape), "input_dtype": dtype, "dtype": E4}
    found = run("FakeQuantize", backend, torch.empty_like(x), fields, x=x, scale=0.3)
    values = torch.tensor([E4M3FN.value(code) for code in range(256)])
    wanted = values[codes("reference", x, 0.3).long()] * torch.tensor(0.3)
    assert torch.equal(canonical(found), canonical(wanted.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_code_dequantized(backend: str, dtype: torch.dtype) -> None:
    q = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(E4)
    fields = {"shape": (256,), "input_dtype": E4, "output_dtype": dtype}
    found = run("DequantizePerTensor", backend, torch.empty(256, dtype=dtype), fields, q=q, scale=1.0)
    assert torch.equal(canonical(found), canonical(q.to(dtype)))


_STEP = 2.0**-9  # step of the subnormal numbers
RULES: dict[str, tuple[list[float], list[int]]] = {
    "ties go to even": ([1.0625, 1.1875, -1.0625, 17.0, 19.0], [0x38, 0x3A, 0xB8, 0x58, 0x5A]),
    "beside a tie": ([1.0625 + 2.0**-20, 1.1875 - 2.0**-20], [0x39, 0x39]),
    "subnormal numbers": ([_STEP, 7 * _STEP, 0.5 * _STEP, 1.5 * _STEP, 2.5 * _STEP], [1, 7, 0, 2, 2]),
    "the least normal number": ([2.0**-6, 7.5 * _STEP, 7.49 * _STEP], [8, 8, 7]),
    "a carry into the exponent": ([1.9375, 1.96875, 15.9], [0x40, 0x40, 0x58]),
    "large values saturate": ([448.0, 464.0, 465.0, 1e30, -1e30], [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]),
    "infinities saturate": ([INF, -INF], [0x7E, 0xFE]),
    "NaN stays NaN": ([NAN, -NAN], [0x7F, 0x7F]),
    "zeros keep their sign": ([0.0, -0.0, 1e-30, -1e-30, -1e-45], [0, 0x80, 0, 0x80, 0x80]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rules(backend: str, rule: str, dtype: torch.dtype) -> None:
    x, wanted = RULES[rule]
    assert codes(backend, torch.tensor(x, dtype=dtype)).tolist() == wanted


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float64_is_rounded_once(backend: str) -> None:
    x = torch.tensor([1.0625 + 2.0**-50, 1.0625, 1.0625 - 2.0**-50], dtype=torch.float64)
    assert codes(backend, x).tolist() == [0x39, 0x38, 0x38]
    assert codes(backend, x.float()).tolist() == [0x38, 0x38, 0x38]


EDGES = [448.0, 464.0, math.nextafter(464.0, INF), 480.0, -464.0, -465.0, NAN, INF, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_range_is_what_does_not_saturate(backend: str) -> None:
    x = torch.tensor(EDGES, dtype=torch.float64)
    fields = {"shape": (len(x),), "input_dtype": x.dtype, "dtype": E4, "ste": hf.SteKind.IN_RANGE}
    operands = {"x": x, "dy": torch.full_like(x, 3.0), "scale": 1.0}
    dx = run("FakeQuantizeBackward", backend, torch.full_like(x, NAN), fields, **operands)
    assert dx.tolist() == [3.0, 3.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 3.0]
    fields = {"shape": (len(x),), "input_dtype": x.dtype, "output_dtype": E4}
    operands = {"x": 0.5 * x, "dy": torch.full_like(x, 3.0), "scale": 0.5}
    dx = run("QuantizePerTensorBackward", backend, torch.full_like(x, NAN), fields, **operands)
    assert dx.tolist() == [6.0, 6.0, 0.0, 0.0, 6.0, 0.0, 0.0, 0.0, 6.0]


# The public functions.


@pytest.mark.parametrize(
    "granularity", [hf.PerTensor(), hf.PerChannel(1), hf.PerToken(), hf.PerGroup(4)], ids=str
)
def test_dequantized_codes_are_the_faked_values(granularity: hf.Granularity) -> None:
    x = torch.linspace(-900, 900, 96).reshape(3, 4, 8)
    scale = hf.choose_scale(x, dtype=E4, granularity=granularity) / 2
    how = {"granularity": granularity}
    q = hf.quantize(x, scale, dtype=E4, **how)
    assert q.dtype == E4 and not q.requires_grad
    assert torch.equal(hf.dequantize(q, scale, **how), hf.fake_quantize(x, scale, dtype=E4, **how))


def test_the_gradient_reaches_x() -> None:
    x = torch.tensor([0.3, 500.0, -448.0, 464.0], requires_grad=True)
    hf.fake_quantize(x, 1.0, dtype=E4).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_codes_are_constants() -> None:
    x = torch.ones(3, requires_grad=True)
    assert not hf.quantize(x, 1.0, dtype=E4).requires_grad
    with pytest.raises(hf.Unsupported, match="forward mode"):
        torch.func.jvp(lambda x: hf.quantize(x, 1.0, dtype=E4).float(), (torch.ones(3),), (torch.ones(3),))


def test_a_scale_from_the_data() -> None:
    x = torch.tensor([[1.0, -896.0], [0.0, 0.0]])
    scale = hf.choose_scale(x, dtype=E4, granularity=hf.PerToken())
    assert torch.equal(scale, torch.tensor([2.0, 1e-12]))
    q, found = hf.dynamic_quantize(x, dtype=E4)
    assert torch.equal(found, scale) and q.float().tolist() == [[0.5, -448.0], [0.0, 0.0]]


def test_samples_of_vmap() -> None:
    x = torch.linspace(-500, 500, 24).reshape(4, 6)
    found = torch.vmap(lambda x: hf.fake_quantize(x, 0.7, dtype=E4))(x)
    assert torch.equal(found, hf.fake_quantize(x, 0.7, dtype=E4))
    found = torch.vmap(lambda x: hf.quantize(x, 0.7, dtype=E4).view(torch.uint8))(x)
    assert torch.equal(found, hf.quantize(x, 0.7, dtype=E4).view(torch.uint8))


def test_compiles() -> None:
    x = torch.linspace(-500, 500, 24)
    run = torch.compile(lambda x: hf.dequantize(hf.quantize(x, 0.7, dtype=E4), 0.7), backend="aot_eager")
    assert torch.equal(run(x), hf.fake_quantize(x, 0.7, dtype=E4))


def test_a_module() -> None:
    quantizer = hf.nn.FakeQuantize(dtype=E4)
    x = torch.tensor([1.0, -896.0])
    assert quantizer(x).tolist() == [1.0, -896.0] and float(quantizer.scale) == 2.0


X = torch.ones(2, 4)
REFUSED: dict[str, tuple[Any, str]] = {
    "a zero point": (
        lambda: hf.quantize(X, 1.0, 3, dtype=E4),
        "zero_point is 3; torch.float8_e4m3fn has no zero point",
    ),
    "a zero point in a tensor": (
        lambda: hf.fake_quantize(X, 1.0, torch.tensor(0, dtype=torch.int32), dtype=E4),
        "zero_point is a tensor; torch.float8_e4m3fn has no zero point. Leave it out.",
    ),
    "a zero point for dequantize": (lambda: hf.dequantize(X.to(E4), 1.0, 1), "has no zero point"),
    "a range": (
        lambda: hf.quantize(X, 1.0, dtype=E4, q_max=7),
        "whose range is always -448 to 448; leave both out",
    ),
    "a range for fake_quantize": (lambda: hf.fake_quantize(X, 1.0, dtype=E4, q_min=-4), "always -448 to 448"),
    "packing": (
        lambda: hf.quantize(X, 1.0, dtype=E4, packed=True),
        "only 2-bit and 4-bit codes share a byte",
    ),
    "pack": (lambda: hf.pack(X.to(E4), E4), "only codes of less than a byte are packed"),
    "a scale of 8 bits": (
        lambda: hf.quantize(X, torch.ones(()).to(E4), dtype=E4),
        "accepted is torch.float32",
    ),
    "an asymmetric scale": (
        lambda: hf.choose_scale(X, dtype=E4, symmetric=False),
        "torch.float8_e4m3fn has none",
    ),
    "dynamic, asymmetric": (lambda: hf.dynamic_quantize(X, dtype=E4, symmetric=False), "leave symmetric out"),
    "a learned scale": (
        lambda: hf.fake_quantize(X, torch.ones((), requires_grad=True), dtype=E4),
        "there is no gradient of the scale of a float format; detach the scale",
    ),
    "a first learned scale": (lambda: hf.lsq_init(X, dtype=E4), "find it by choose_scale"),
    "a module that learns": (lambda: hf.nn.FakeQuantize(dtype=E4, mode="learned"), "detach the scale"),
    "another format": (
        lambda: hf.quantize(X, 1.0, dtype=torch.float8_e5m2),
        "torch.float8_e4m3fn for floating codes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, sentence = REFUSED[name]
    with pytest.raises(hf.HoldfastError) as raised:
        call()
    assert sentence in str(raised.value)


def test_the_learned_plan_refuses_too() -> None:
    plan = hf.plans.FakeQuantizeLearnedBackwardPlan
    with pytest.raises(hf.InvalidDescriptor, match="no gradient of the scale"):
        plan.Descriptor(shape=(4,), dtype=E4).validate()


def test_a_sku_names_the_float_format() -> None:
    plan = hf.plans.FakeQuantizePlan
    stream = hf.Stream.current("cpu")
    of_codes = [
        plan.select(
            stream, plan.Descriptor(shape=(4,), dtype=dtype), hf.PlanPreference(precompile=False)
        ).sku()
        for dtype in (torch.int8, E4)
    ]
    assert "float8_e4m3fn" in of_codes[1].mode and of_codes[0] != of_codes[1]


@pytest.mark.parametrize(
    "name", ["QuantizePerTokenPlan", "DequantizePerTensorPlan", "FakeQuantizePlan", "DynamicQuantizePlan"]
)
def test_the_search_draws_float_formats(name: str) -> None:
    plan = hf.plans.all()[name]
    drawn = [space_of(plan).draw(plan, Draw(f"theme {number}", 0, 1000)) for number in range(60)]
    floating = [problem for problem in drawn if format_of(problem.codes, "codes").is_float]
    assert 3 <= len(floating) <= 30
    for problem in floating:
        case_of(plan, problem).descriptor.validate()

"""Tests of quantize and dequantize with hand-computed tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical
from holdfast.proof.conformance import gpu_way

# Each hand-computed table runs on every backend.

GPU = gpu_way()
BACKENDS = {"reference": "cpu", "cpu": "cpu", **({GPU.backend: GPU.device} if GPU else {})}
INF, NAN = float("inf"), float("nan")


def quantized(backend: str, x: list[float], scale: float, zero_point: int, **fields: Any) -> list[Any]:
    """Codes, computed by a plan on ``backend``."""
    device = BACKENDS[backend]
    desc = hf.plans.QuantizePerTensorDescriptor(shape=(len(x),), **fields)
    plan = hf.plans.QuantizePerTensorPlan.select(
        hf.Stream.current(device), desc, hf.PlanPreference(backend=backend, precompile=False)
    )
    q = torch.empty(desc.code_shape, dtype=desc.code_storage, device=device)
    values = torch.tensor(x, dtype=desc.input_dtype, device=device)
    plan.run(
        hf.Stream.current(device), None,
        hf.plans.QuantizePerTensorArgs(x=values, scale=scale, zero_point=zero_point, q=q),
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
    """The gradient of int8 codes, computed by a plan on ``backend``, and added to ``dx`` if given."""
    device = BACKENDS[backend]
    desc = hf.plans.QuantizePerTensorBackwardDescriptor(shape=(len(x),))
    plan = hf.plans.QuantizePerTensorBackwardPlan.select(
        hf.Stream.current(device), desc, hf.PlanPreference(backend=backend, precompile=False)
    )
    out = torch.tensor(dx or [NAN] * len(x), device=device)
    args = hf.plans.QuantizePerTensorBackwardArgs(
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
    desc = hf.plans.DequantizePerTensorDescriptor(shape=(len(codes),))
    plan = hf.plans.DequantizePerTensorPlan.select(
        hf.Stream.current(device), desc, hf.PlanPreference(backend=backend, precompile=False)
    )
    q = torch.tensor(codes, dtype=torch.int8, device=device)
    out = torch.empty(len(codes), device=device)
    args = hf.plans.DequantizePerTensorArgs(q=q, scale=scale, zero_point=zero_point, y=out)
    plan.run(hf.Stream.current(device), None, args)
    assert out.tolist() == y


@pytest.mark.parametrize("codes", [torch.int8, torch.int4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_product_is_rounded_to_float32_before_16_bits(backend: str, codes: torch.dtype) -> None:
    """-7 * scale is next to a tie of bfloat16, and is this tie in float32. Vectors and their rests agree."""
    device, scale = BACKENDS[backend], 0.0489676333963871
    for count in (1, 2, 31, 32, 40, 8192 + 6):
        q = torch.full((count,), -7, dtype=torch.int8)
        q = (hf.pack(q, codes) if codes == torch.int4 else q).to(device)
        y = torch.empty(count, dtype=torch.bfloat16, device=device)
        desc = hf.plans.DequantizePerTensorDescriptor(
            shape=(count,), input_dtype=codes, output_dtype=y.dtype, packed=codes == torch.int4
        )
        plan = hf.plans.DequantizePerTensorPlan.select(
            hf.Stream.current(device), desc, hf.PlanPreference(backend=backend, precompile=False)
        )
        plan.run(hf.Stream.current(device), None, hf.plans.DequantizePerTensorArgs(q=q, scale=scale, y=y))
        assert set(y.tolist()) == {-0.34375}, count


def _next_to_midpoints() -> list[tuple[float, float]]:
    """(x, scale) with x / scale as close as possible to the middle between a tie k + 0.5 and the next float.

    A quotient that is not correctly rounded is a tie where it should not be, or is none.
    """
    found = []
    for k in range(1, 127):
        tie = int((k + 0.5) * 2 ** (25 - k.bit_length()))
        for middle, sign in ((tie + 1, 1), (tie + 1, -1), (tie - 1, 1), (tie - 1, -1)):
            scale = sign * pow(middle, -1, 2**24) % 2**24
            x = (middle * scale - sign) // 2**24
            if 2**23 <= scale and 2**23 <= x < 2**24:
                found.append((float(x), float(scale) * 2.0 ** (1 - k.bit_length())))
    return found


@pytest.mark.parametrize("real", [torch.float32, torch.float64])
def test_codes_of_many_elements_are_those_of_correctly_rounded_quotients(real: torch.dtype) -> None:
    """Codes of many elements with one scale are found without a division."""
    pairs = _next_to_midpoints()
    assert len(pairs) > 60
    generator = torch.Generator().manual_seed(5)
    random = torch.rand(256, generator=generator) + 1
    scales = [1.0, 1 + 2.0**-23, 2 - 2.0**-23, 2.0**-59, 2.0**-61, 2.0**59, 2.0**61, *random.tolist()]
    ties = torch.arange(-130, 130) + 0.5
    for scale, given in [*((s, None) for s in scales), *((s, x) for x, s in pairs)]:
        x = ties.to(real) * scale if given is None else torch.full((256,), given, dtype=real)
        x = torch.cat([x, -x, x.nextafter(x + 1), x.nextafter(x - 1)])
        s = torch.tensor(scale, dtype=real)
        for sign, zero_point in ((1, 0), (1, 3), (-1, -77)):
            expected = ((x / (sign * s)).round() + zero_point).clamp(-128, 127).to(torch.int8)
            assert torch.equal(hf.quantize(x, sign * s, zero_point), expected), (scale, given, zero_point)


def test_values_of_odd_rows_in_a_large_tensor_are_rounded_to_float32_before_bfloat16() -> None:
    """An output that does not fit the caches is computed in blocks, which end in parts of short rows."""
    codes = torch.full((2**26 // (33 * 3) + 1, 33), -112, dtype=torch.int8)
    scale = torch.full(codes.shape[:1], float.fromhex("0x1.25b6dcp-1"))
    assert hf.dequantize(codes, scale, granularity=hf.PerChannel(0), dtype=torch.bfloat16).eq(-64).all()

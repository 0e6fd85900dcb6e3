"""Kernel mutants of fake_quantize and of its estimators."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_forward = partial(KernelMutant, plans=("FakeQuantizePlan",))
_backward = partial(KernelMutant, plans=("FakeQuantizeBackwardPlan",))
_CPU, _GPU = "holdfast.ops.fake_quantize.cpu", "holdfast.ops.fake_quantize.gpu"
_WALK_CPU = "holdfast.ops.affine.cpu"
_NUMERICS_CPU, _NUMERICS_GPU = "holdfast.numerics.cpu", "holdfast.numerics.gpu"

# fmt: off
MUTANTS = (
    _forward("the last element of a block lost", _CPU,
        "for i in range(part, stop):\n                        y[i] = rounded(x[i], s, z,",
        "for i in range(part, stop - 1):\n                        y[i] = rounded(x[i], s, z,"),
    _forward("the scale of the first row", _CPU,
        "min(end, row_end), scale[row], zero_point[row]", "min(end, row_end), scale[0], zero_point[row]",
        likely="per_token"),
    _backward("the first scale for the gradients of all rows", _WALK_CPU,
        "s, z = scale[row], zero_point[row]", "s, z = scale[0], zero_point[row]", likely="per_token"),
    _backward("accumulate lost", _WALK_CPU,
        "dx[i] += estimate_shared(",
        "dx[i] = estimate_shared(", likely="in_range: accumulate"),
    _backward("one scale for a run of several", _WALK_CPU,
        "dx[i] = estimate(dy[i], x[i], scale[i],",
        "dx[i] = estimate(dy[i], x[i], scale[0],", likely="clipped_identity: per_channel"),
    _backward("codes for bounds of x", _CPU,
        "in_range, between, in_range_bounds)",
        "in_range, between)", likely="in_range"),
    _backward("a middle of a narrower type", _CPU,
        "mid = ((q_min - z) * s + (q_max - z) * s) * np.float32(0.5)\n    t =",
        "mid = np.float32((q_min - z) * s + (q_max - z) * s) * np.float32(0.5)\n    t =",
        likely="tanh: per_channel:1, float64"),
    _forward("float: no saturation", _NUMERICS_CPU,
        "near = np.uint32(min(magnitude_of(bits), highest) | np.uint32(bits & 0x80000000))",
        "near = np.uint32(magnitude_of(bits) | np.uint32(bits & 0x80000000))",
        likely="special, float8_e4m3fn"),
    _forward("float: subnormal numbers rounded as normal ones", _NUMERICS_CPU,
        "        if magnitude < least_normal:\n            near = ",
        "        if magnitude < np.uint32(0):\n            near = ", likely="ties, float8_e4m3fn"),
    _backward("float: the range before rounding", _CPU,
        "return dy if fits_e4m3fn(x / s) else zero(dy)",
        "return dy if abs(x / s) <= q_max else zero(dy)", likely="ties, float8_e4m3fn"),
    _forward("float: the sign of zero lost", _NUMERICS_GPU,
        "near = (magnitude | (bits ^ (bits & 0x7FFFFFFF))).to(tl.float32, bitcast=True)",
        "near = (magnitude | (bits ^ (bits & 0x7FFFFFFF))).to(tl.float32, bitcast=True) + 0.0",
        likely="special, float8_e4m3fn"),
    _forward("float: a float64 quotient rounded to float32 first", _NUMERICS_GPU,
        "        return tl.where(back != t, bits | 1, bits).to(tl.float32, bitcast=True)",
        "        return near", likely="float64, ties, float8_e4m3fn"),
    _backward("float: the range before rounding", _GPU,
        "return tl.where(float_in_range(t, q_max, EXPONENT, MANTISSA), dy, 0.0)",
        "return tl.where(tl.abs(t) <= q_max, dy, 0.0)", likely="ties, float8_e4m3fn"),
    _forward("a mask one row too long", _GPU,
        "inside = (row < rows)[:, None] & columns_inside(start, columns, COLUMNS)\n    s =",
        "inside = (row <= rows)[:, None] & columns_inside(start, columns, COLUMNS)\n    s ="),
    _backward("the strides of dy for those of x", _GPU,
        "to_x = to_dy if SAME_STRIDES else tile_offsets(row, start, sizes, x_strides, COLUMNS)",
        "to_x = to_dy", likely="dy in another layout"),
    _backward("the strides of dy for those of dx", _GPU,
        "out = dx + (to_dy if SAME_STRIDES else tile_offsets(row, start, sizes, dx_strides, COLUMNS))",
        "out = dx + to_dy"),
    _backward("a middle of a narrower type", _GPU,
        "tanh_argument(x, (lo_x + hi_x) * 0.5, s)",
        "tanh_argument(x, ((lo_x + hi_x) * 0.5).to(tl.float32).to(x.dtype), s)"),
    _backward("accumulate lost", _GPU,
        "gradient = widen(tl.load(out, mask=inside), COMPUTE) + gradient",
        "gradient = gradient + 0.0", likely="accumulate"),
)

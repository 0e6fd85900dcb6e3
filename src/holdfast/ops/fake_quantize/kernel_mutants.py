"""The mistakes of the kernels of fake quantization and of its estimators."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_forward = partial(KernelMutant, plans=("FakeQuantizePlan",))
_backward = partial(KernelMutant, plans=("FakeQuantizeBackwardPlan",))
_CPU, _GPU = "holdfast.ops.fake_quantize.cpu", "holdfast.ops.fake_quantize.gpu"

MUTANTS = (
    _forward(
        "the last element of a block lost",
        _CPU,
        "for i in range(begin, end):\n                    y[i] = rounded_to_code(x[i], s, z,",
        "for i in range(begin, end - 1):\n                    y[i] = rounded_to_code(x[i], s, z,",
    ),
    _backward(
        "accumulate lost",
        _CPU,
        "dx[i] += told(",
        "dx[i] = told(",
        likely="in_range: accumulate",
    ),
    _backward(
        "one scale for a run of several",
        _CPU,
        "dx[i] = estimated(dy[i], x[i], scale[i],",
        "dx[i] = estimated(dy[i], x[i], scale[0],",
        likely="clipped_identity: per_channel",
    ),
    _backward(
        "codes for bounds of x",
        _CPU,
        "(in_range, in_range_of, between)",
        "(in_range, codes, between)",
        likely="in_range",
    ),
    _backward(
        "a middle of a narrower type",
        _CPU,
        "mid = ((q_min - z) * s + (q_max - z) * s) * np.float32(0.5)\n    t =",
        "mid = np.float32((q_min - z) * s + (q_max - z) * s) * np.float32(0.5)\n    t =",
        likely="tanh: per_channel:1, float64",
    ),
    _forward(
        "a mask one row too long",
        _GPU,
        "inside = (row < rows)[:, None] & columns_inside(start, columns, COLUMNS)\n    s =",
        "inside = (row <= rows)[:, None] & columns_inside(start, columns, COLUMNS)\n    s =",
    ),
    _backward(
        "the strides of dy for those of x",
        _GPU,
        "to_x = to_dy if ALIKE else tile_offsets(row, start, sizes, x_strides, COLUMNS)",
        "to_x = to_dy",
        likely="dy in another layout",
    ),
    _backward(
        "the strides of dy for those of dx",
        _GPU,
        "out = dx + (to_dy if ALIKE else tile_offsets(row, start, sizes, dx_strides, COLUMNS))",
        "out = dx + to_dy",
    ),
    _backward(
        "a middle of a narrower type",
        _GPU,
        "tanh_argument(x, (lo_x + hi_x) * 0.5, s)",
        "tanh_argument(x, ((lo_x + hi_x) * 0.5).to(tl.float32).to(x.dtype), s)",
    ),
    _backward(
        "accumulate lost",
        _GPU,
        "gradient = widen(tl.load(out, mask=inside), COMPUTE) + gradient",
        "gradient = gradient + 0.0",
        likely="accumulate",
    ),
)

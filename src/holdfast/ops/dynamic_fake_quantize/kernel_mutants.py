"""Kernel mutants of dynamic_fake_quantize and its backward."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_CPU, _GPU = "holdfast.ops.dynamic_fake_quantize.cpu", "holdfast.ops.dynamic_fake_quantize.gpu"
_forward = partial(KernelMutant, plans=("DynamicFakeQuantizePlan",))
_backward = partial(KernelMutant, plans=("DynamicFakeQuantizeBackwardPlan",))
#: The name of cases with NaN and infinite scales.
_SEGMENTS = "in_range: segments"

# fmt: off
MUTANTS = (
    _forward("the scale of a tile's first row", _CPU, "columns, row + r, rule", "columns, row, rule"),
    _forward("the row before", _CPU,
        "at = runs[1] + begin * item",
        "at = runs[1] + max(r - 1, 0) * columns * item"),
    _forward("the last element not rounded", _CPU,
        "range(begin, begin + columns)",
        "range(begin, begin + columns - 1)"),
    _forward("the last element not looked at", _CPU,
        "row_scale(at, columns,",
        "row_scale(at, columns - 1,", likely="groups of 32"),
    _forward("columns that do not exist not masked", _GPU,
        "column * steps[3], mask=inside, other=0.0)",
        "column * steps[3], mask=exists, other=0.0)"),
    _forward("the column stride of x for that of y", _GPU, "column * steps[0]", "column * steps[3]"),
    _forward("the loops of x for those of y", _GPU, "row, over_sizes, out_over,", "row, over_sizes, x_over,"),
    _forward("the zero point not used", _GPU,
        "rounded_to_code(wide, s, q_min, q_max, z)",
        "rounded_to_code(wide, s, q_min, q_max, 0 * z)"),
    _forward("the result of a float format not multiplied", _GPU,
        "MANTISSA).to(COMPUTE) * s",
        "MANTISSA).to(COMPUTE)"),
    _backward("an infinite scale not looked for", _CPU,
        "if abs(scale[i]) < np.float32(np.inf) else 1",
        "if True else 1", likely=_SEGMENTS),
    _backward("the first scale of a tile only", _CPU,
        "range(count // columns)",
        "range(1)", likely=_SEGMENTS),
    _backward("a NaN scale passes", _CPU,
        "((s == s) & (abs(x) < infinite))",
        "(abs(x) < infinite)", likely=_SEGMENTS),
    _backward("the scale of the first element", _CPU,
        "scale[i // columns]",
        "scale[0]", likely=_SEGMENTS),
    _backward("old gradients lost", _CPU,
        "dx[i] + passed if accumulate else passed",
        "passed", likely="accumulate"),
    _backward("an infinite scale not looked for", _GPU,
        "finite.to(tl.int32)) == 0",
        "finite.to(tl.int32)) == 2"),
    _backward("a NaN scale passes", _GPU, "((s == s) & (tl.abs(values) < ", "((s == s) | (tl.abs(values) < "),
    _backward("x where dy is", _GPU, "tl.load(x + to_x,", "tl.load(x + to_dy,", likely="another layout"),
    _backward("old gradients lost", _GPU, "if ACCUMULATE:", "if ACCUMULATE and False:"),
)

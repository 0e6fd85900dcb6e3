"""Kernel mutants of dynamic_quantize."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_mutant = partial(KernelMutant, plans=("DynamicQuantizePlan",))
_CPU, _GPU = "holdfast.ops.dynamic_quantize.cpu", "holdfast.ops.dynamic_quantize.gpu"
_ROWS, _SEGMENTS = "holdfast.ops.choose_scale.cpu_rows", "holdfast.ops.choose_scale.gpu_segments"

# fmt: off
MUTANTS = (
    _mutant("the scale of a tile's first row", _CPU,
        "row_scale(x, columns, row + r,",
        "row_scale(x, columns, row,"),
    _mutant("the bytes of a code for those of x", _CPU,
        "x, q = runs[1] + r * columns * item,",
        "x, q = runs[1] + r * columns * size,"),
    _mutant("the last code of a row lost", _CPU,
        "for i in range(columns):\n            codes[i]",
        "for i in range(columns - 1):\n            codes[i]"),
    _mutant("the last element not looked at", _ROWS,
        "fold(x, 1, columns, mask, both,",
        "fold(x, 1, columns - 1, mask, both,", likely="tokens of one"),
    _mutant("magnitudes where there are more codes below zero", _ROWS,
        "both, mask = affine or lowest != -highest,",
        "both, mask = affine,", likely="the whole range"),
    _mutant("rows longer than a tile", _ROWS,
        "0 < space.columns <= TILE",
        "0 < space.columns <= 2 * TILE", likely="12,001"),
    _mutant("columns that do not exist not masked", _GPU,
        "column * steps[3], mask=inside, other=0.0)",
        "column * steps[3], mask=exists, other=0.0)"),
    _mutant("the column stride of x for that of q", _GPU,
        "out + begin + column * steps[0], codes.to(",
        "out + begin + column * steps[3], codes.to("),
    _mutant("a ragged byte not masked", _GPU,
        "codes = tl.where(inside, codes, 0)",
        "codes = tl.where(inside, codes, codes)"),
    _mutant("the last row of a segment dropped", _SEGMENTS,
        "known & (row < rows)[:, None, None]",
        "known & (row < tl.maximum(rows - 1, 1))[:, None, None]"),
    _mutant("the zero point of the first column", _SEGMENTS,
        "at_zero += column * zero_step",
        "at_zero += 0 * column * zero_step"),
)

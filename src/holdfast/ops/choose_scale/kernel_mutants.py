"""Kernel mutants of observe_range and choose_scale."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_mutant = partial(KernelMutant, plans=("ObserveRangePlan", "ChooseScalePlan"))
_CPU, _GPU = "holdfast.ops.choose_scale.cpu", "holdfast.ops.choose_scale.gpu"

# fmt: off
MUTANTS = (
    _mutant("the last, shorter chunk dropped", _CPU,
        "(columns + CHUNK - 1) // CHUNK\n    for unit",
        "max(1, columns // CHUNK)\n    for unit", likely="long tokens"),
    _mutant("only the last row of a column counts", _CPU,
        "below[i] = larger(negated_bits(bits[i], mask), below[i])",
        "below[i] = negated_bits(bits[i], mask)"),
    _mutant("maxima of pieces over each other", _CPU,
        "words[(of_segment + piece) * segments + segment + i] = below[i]",
        "words[of_segment * segments + segment + i] = below[i]", likely="in pieces"),
    _mutant("the last piece dropped", _CPU,
        "for piece in range(of_segment):",
        "for piece in range(of_segment - 1):", likely="in pieces"),
    _mutant("results side by side", _CPU,
        "results[offset + i * step] = found[done + i]",
        "results[offset + i] = found[done + i]", likely="transposed"),
    _mutant("a mask one row too long", _GPU,
        "inside = known & (row < rows)[:, None, None]",
        "inside = known & (row <= rows)[:, None, None]"),
    _mutant("only the last tile counts", _GPU,
        "above = tl.maximum(above, bits)",
        "above = tl.maximum(bits, 0)"),
    _mutant("the last vector of a row lost", _GPU, "mask=last < columns", "mask=last < end"),
    _mutant("the column stride of a result", _GPU, "step = column_steps[2]", "step = column_steps[0]"),
    _mutant("maxima of pieces over each other", _GPU,
        "place = piece.to(tl.int64) * count + segment[None, :, None] * width + start + column",
        "place = segment[None, :, None] * width + start + column", likely="pieces"),
    _mutant("the last piece dropped", _GPU,
        "inside = (piece < piece_count)[:, None] & (segment < count)[None, :]",
        "inside = (piece < piece_count - 1)[:, None] & (segment < count)[None, :]", likely="long"),
)

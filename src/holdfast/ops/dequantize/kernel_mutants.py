"""Kernel mutants of dequantize and of unpacking codes."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_forward = partial(KernelMutant, plans=("DequantizePerTensorPlan", "DequantizePerChannelPlan"))
_backward = partial(
    KernelMutant, plans=("DequantizePerTensorBackwardPlan", "DequantizePerChannelBackwardPlan")
)
_CPU, _GPU = "holdfast.ops.dequantize.cpu", "holdfast.ops.dequantize.gpu"

# fmt: off
MUTANTS = (
    _forward("one zero point for a run of several", _CPU,
        "y[i] = (q[i] - zero_point[i]) * scale[i]",
        "y[i] = (q[i] - zero_point[0]) * scale[i]"),
    _forward("the last element of a tile lost", _CPU,
        "for i in range(part, stop):\n                    store_real",
        "for i in range(part, stop - 1):\n                    store_real"),
    KernelMutant("the last elements of a row lost", _CPU,
        "_value_blocks(codes, y, stop - ROW_BLOCK, stop, s, z)",
        "_value_blocks(codes, y, blocks - ROW_BLOCK, blocks, s, z)",
        plans=("DequantizePerChannelPlan",), likely="rows of 45"),
    _forward("signs not extended", _CPU, "signed=desc.codes.signed,", "signed=False,"),
    _forward("packed rows unpacked over each other", "holdfast.ops.affine.cpu",
        "pack_shift, signed, columns, raw + r * columns)",
        "pack_shift, signed, columns, raw)"),
    KernelMutant("the zero point of the first row", _CPU,
        "min(end, row_end), scale[row], zero_point[row]",
        "min(end, row_end), scale[row], zero_point[0]",
        plans=("DequantizePerGroupPlan",), likely="groups of 32"),
    _forward("bfloat16 cut, not rounded", "holdfast.numerics.cpu",
        "rounded = builder.add(builder.add(bits, _words(lanes, 0x7FFF)), odd)",
        "rounded = bits", likely="bfloat16"),
    _backward("accumulate lost", _CPU,
        "dq[i] += dy[i] * scale[i]",
        "dq[i] = dy[i] * scale[i]", likely="accumulate"),
    _forward("float: NaN is a number", "holdfast.numerics.cpu",
        "        if magnitude > highest_code:",
        "        if magnitude > highest_code + 1:", likely="e4m3fn"),
    _forward("float: subnormal numbers taken for normal ones", "holdfast.numerics.cpu",
        "        if magnitude < subnormals:",
        "        if magnitude < 1:", likely="e4m3fn"),
    _forward("float: NaN is a number", "holdfast.numerics.gpu",
        "value = tl.where(magnitude > HIGHEST, 0x7FC00000, value)",
        "value = tl.where(magnitude > HIGHEST + 1, 0x7FC00000, value)", likely="e4m3fn"),
    _forward("float: the sign lost", "holdfast.numerics.gpu",
        "return (value | ((codes >> (EXPONENT + MANTISSA)) << 31)).to(tl.float32, bitcast=True)",
        "return value.to(tl.float32, bitcast=True)", likely="e4m3fn"),
    _forward("a mask one row too long", _GPU,
        "    inside = (row < rows)[:, None] & here\n    if PER_BYTE > 1:",
        "    inside = (row <= rows)[:, None] & here\n    if PER_BYTE > 1:"),
    _forward("rows of packed codes counted in codes", "holdfast.ops.affine.gpu",
        "strides[packed] = (*(step // per_byte for step in strides[packed][:-1]), 1)",
        "strides[packed] = (*(step for step in strides[packed][:-1]), 1)"),
    _forward("the codes of a byte in another order", _GPU,
        "codes = tl.reshape(tl.join(packed, packed >> BITS), (ROWS, COLUMNS))",
        "codes = tl.reshape(tl.join(packed >> BITS, packed), (ROWS, COLUMNS))"),
    _backward("the strides of dy for those of dq", _GPU,
        "out = dq + tile_offsets(row, start, sizes, dq_strides, COLUMNS)",
        "out = dq + tile_offsets(row, start, sizes, dy_strides, COLUMNS)"),
    _backward("accumulate lost", _GPU,
        "gradient = widen(tl.load(out, mask=inside), COMPUTE) + gradient",
        "gradient = gradient + 0.0"),
)

"""Kernel mutants of quantize, of its number formats, and of the shared loops over tiles."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_forward = partial(KernelMutant, plans=("QuantizePerTensorPlan", "QuantizePerChannelPlan"))
_backward = partial(KernelMutant, plans=("QuantizePerTensorBackwardPlan", "QuantizePerChannelBackwardPlan"))
_CPU, _GPU = "holdfast.ops.quantize.cpu", "holdfast.ops.quantize.gpu"
_NUMERICS_CPU, _NUMERICS_GPU = "holdfast.numerics.cpu", "holdfast.numerics.gpu"
_WALK_CPU, _TILES_GPU = "holdfast.ops.affine.cpu", "holdfast.backends.gpu_tiles"

MUTANTS = (
    _forward(
        "a scratch run of half the size",
        _WALK_CPU,
        "_RUN_BYTES = TILE * 8",
        "_RUN_BYTES = TILE * 4",
        likely="a whole tile",
    ),
    _forward(
        "the last, shorter tile dropped",
        _WALK_CPU,
        "return Tiling(-(-rows // tile_rows) * parts,",
        "return Tiling(max(1, rows // tile_rows) * parts,",
    ),
    _forward(
        "the column stride of another operand",
        _WALK_CPU,
        "item, step = kind & ITEM_SIZE, table[operand, table.shape[1] - 1]",
        "item, step = kind & ITEM_SIZE, table[0, table.shape[1] - 1]",
        likely="transposed input",
    ),
    _forward(
        "the outermost loop over rows forgotten",
        _WALK_CPU,
        "for d in range(inner - 1, _STRIDES - 1, -1):",
        "for d in range(inner - 1, _STRIDES, -1):",
        likely="leading",
    ),
    _forward(
        "one scale for a run of several",
        _CPU,
        "codes[i] = np.int32(code(x[i], scale[i], zero_point[i], q_min, q_max))",
        "codes[i] = np.int32(code(x[i], scale[0], zero_point[i], q_min, q_max))",
    ),
    _forward(
        "the last element of a block lost",
        _CPU,
        "        whole = end - (end - begin) % ROW_BLOCK\n",
        "        end -= 1\n        whole = end - (end - begin) % ROW_BLOCK\n",
    ),
    KernelMutant(
        "the scale of the first row",
        _CPU,
        "stop, scale[row], zero_point[row], q_min, q_max)",
        "stop, scale[0], zero_point[row], q_min, q_max)",
        plans=("QuantizePerGroupPlan",),
        likely="groups of 32",
    ),
    _forward(
        "bfloat16 read as float32",
        _CPU,
        "        if reads_bfloat16(walk):",
        "        if reads_bfloat16(walk) and count < 0:",
        likely="bfloat16",
    ),
    _backward(
        "accumulate lost",
        _WALK_CPU,
        "dx[i] += estimate(",
        "dx[i] = estimate(",
        likely="accumulate",
    ),
    _backward(
        "a range without the zero point",
        _WALK_CPU,
        "bounds_of(s, z, q_min, q_max) if shared",
        "bounds_of(s, zero(z), q_min, q_max) if shared",
    ),
    _forward(
        "float: ties away from zero",
        _NUMERICS_CPU,
        "near = np.uint32(np.uint32(magnitude + odd + below_half) & kept)",
        "near = np.uint32(np.uint32(magnitude + 1 + below_half) & kept)",
        likely="e4m3fn, ties",
    ),
    _forward(
        "float: no saturation",
        _NUMERICS_CPU,
        "        magnitude = min(magnitude_of(bits), highest)\n",
        "        magnitude = magnitude_of(bits)\n",
        likely="e4m3fn, special",
    ),
    _forward(
        "float: NaN to a number",
        _NUMERICS_CPU,
        "return np.uint8(nan) if np.isnan(single) else np.uint8(code)",
        "return np.uint8(code)",
        likely="e4m3fn, special",
    ),
    _backward(
        "float: the range before rounding",
        _CPU,
        "return dy / s if fits_e4m3fn(x / s) else zero(dy)",
        "return dy / s if abs(x / s) <= q_max else zero(dy)",
        likely="e4m3fn, ties",
    ),
    _forward(
        "float: ties away from zero",
        _NUMERICS_GPU,
        "+ (2 ** (DROPPED - 1) - 1) + odd) & -(2**DROPPED)",
        "+ 2 ** (DROPPED - 1)) & -(2**DROPPED)",
        likely="e4m3fn, ties",
    ),
    _forward(
        "float: the step of normal numbers below the least of them",
        _NUMERICS_GPU,
        "    lifted = (magnitude.to(tl.float32, bitcast=True) + LIFT) - LIFT",
        "    lifted = near.to(tl.float32, bitcast=True) + 0.0",
        likely="e4m3fn, ties",
    ),
    _forward(
        "float: no saturation",
        _NUMERICS_GPU,
        "    magnitude = tl.minimum(magnitude, q_max.to(tl.float32).to(tl.int32, bitcast=True))\n",
        "    magnitude = tl.minimum(magnitude, 0x7F000000)\n",
        likely="e4m3fn, special",
    ),
    _forward(
        "float: NaN to a number",
        _NUMERICS_GPU,
        "return tl.where(near == near, code, NAN)",
        "return tl.where(near == near, code, NAN - 1)",
        likely="e4m3fn, special",
    ),
    _backward(
        "float: the range of integers",
        _GPU,
        "kept = float_in_range(code_quotient(values, s, BY_COLUMN), q_max, EXPONENT, MANTISSA)",
        "kept = in_range(values, s, q_min, q_max, z, BY_COLUMN)",
        likely="e4m3fn, ties",
    ),
    _forward(
        "a mask one row too long",
        _GPU,
        "row < rows)[:, None] & here\n    to_x = tile_offsets(row, start, sizes, x_strides, COLUMNS)\n    v",
        "row <= rows)[:, None] & here\n    to_x = tile_offsets(row, start, sizes, x_strides, COLUMNS)\n    v",
    ),
    _forward(
        "a mask one column too wide",
        _TILES_GPU,
        "left = tl.minimum(columns - start, COLUMNS)",
        "left = tl.minimum(columns - start + 1, COLUMNS)",
    ),
    _forward(
        "the strides of x for those of q",
        _GPU,
        "        out = q + tile_offsets(row, start, sizes, q_strides, COLUMNS)\n        if q.dtype",
        "        out = q + tile_offsets(row, start, sizes, x_strides, COLUMNS)\n        if q.dtype",
    ),
    _forward(
        "a carry lost between the loops over rows",
        _TILES_GPU,
        "            row = outer\n",
        "            row = row - row\n",
    ),
    _forward(
        "a ragged byte not masked",
        _GPU,
        "codes = tl.where(inside, codes, 0)",
        "codes = tl.where(inside, codes, codes)",
    ),
    _forward(
        "one scale for both codes of a byte",
        _GPU,
        "scale + scale_strides[len(scale_strides) - 1] // 2, scale_bits",
        "scale, scale_bits",
        plans=("QuantizePerChannelPlan",),
        likely="pairs",
    ),
    _backward(
        "the strides of x for those of dy",
        _GPU,
        "to_dy = to_x if SAME_STRIDES else tile_offsets(row, start, sizes, dy_strides, COLUMNS)",
        "to_dy = to_x",
        likely="dy in another layout",
    ),
    _backward(
        "accumulate lost",
        _GPU,
        "gradient = widen(tl.load(out, mask=inside), COMPUTE) + gradient",
        "gradient = gradient + 0.0",
        likely="accumulate",
    ),
)

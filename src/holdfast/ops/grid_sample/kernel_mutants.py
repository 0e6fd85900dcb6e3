"""Mutants of the grid_sample kernels."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_forward = partial(KernelMutant, plans=("GridSamplePlan",))
_backward = partial(KernelMutant, plans=("GridSampleBackwardPlan",))
_CPU, _SUMS_CPU = "holdfast.ops.grid_sample.cpu", "holdfast.ops.grid_sample.cpu_gradient_sums"
_GPU, _DGRID_GPU = "holdfast.ops.grid_sample.gpu", "holdfast.ops.grid_sample.gpu_dgrid"
_CELLS_GPU, _SUMS_GPU = "holdfast.ops.grid_sample.gpu_cells", "holdfast.ops.grid_sample.gpu_dinput_by_cell"

MUTANTS = (
    _forward(
        "the pixel beside the image not cleared", _CPU, "clear_row(image_at - row, like, lanes)", "pass"
    ),
    _forward(
        "a corner in the place of another",
        _CPU,
        "rows + np.int64(pixel[at + samples]) * row,",
        "rows + np.int64(pixel[at + 2 * samples]) * row,",
    ),
    _forward(
        "the grid of the first image for all",
        _CPU,
        "if begin < end and n != located:",
        "if begin < end and located < 0:",
    ),
    _forward(
        "the last, narrower bundle dropped",
        _CPU,
        "for channel in range(begin, end, len(lanes)):",
        "for channel in range(begin, end - len(lanes) + 1, len(lanes)):",
        likely="257 channels",
    ),
    _backward(
        "crowds of twice the size",
        _SUMS_CPU,
        "if count > CHUNK:",
        "if count > 2 * CHUNK:",
        likely="bicubic",
    ),
    _backward(
        "corners in another order",
        _SUMS_CPU,
        "    for corner in range(corners):\n        at = corner * samples",
        "    for corner in range(corners - 1, -1, -1):\n        at = corner * samples",
    ),
    _backward(
        "a full level not carried",
        _SUMS_CPU,
        "if levels == 1 or (done % CHUNK != 0 and done != channels):",
        "if levels == 1 or done != channels:",
        likely="64 channels",
    ),
    _forward(
        "what is beside the image not masked",
        _GPU,
        "tl.load(image + source, mask=there & inside, other=0.0)",
        "tl.load(image + tl.maximum(source, 0), mask=inside, other=0.0)",
    ),
    _forward(
        "a mask one channel too wide",
        _GPU,
        "mask=mask[:, None] & (channel < channels),",
        "mask=mask[:, None] & (channel <= channels),",
        likely="channels last",
    ),
    _forward(
        "the channel stride of the image for that of the output",
        _GPU,
        "tl.store(target + channel.to(tl.int64) * out_step, value, mask=inside)",
        "tl.store(target + channel.to(tl.int64) * image_step, value, mask=inside)",
    ),
    _backward(
        "a chunk of channels lost",
        _DGRID_GPU,
        "total += tl.sum(tl.where(chunk == k, sums, 0.0), 0)",
        "total = tl.sum(tl.where(chunk == k, sums, 0.0), 0)",
        likely="64 channels",
    ),
    _backward(
        "accumulate lost",
        _DGRID_GPU,
        "value = widen(tl.load(dgrid + at, mask=inside, other=0.0), COMPUTE) + value",
        "value = value + 0.0",
        likely="channels last",
    ),
    _backward(
        "the strides of the image for those of dout",
        _DGRID_GPU,
        "dout_at = offset_of(n, x, y, z, dout_strides).to(OFFSET)",
        "dout_at = offset_of(n, x, y, z, image_strides).to(OFFSET)",
        likely="64 channels",
    ),
    _backward(
        "samples of two cells at one position",
        _CELLS_GPU,
        "tl.store(starts + cell, first + tl.cumsum(amount, 0) - amount, mask=cell < all_cells)",
        "tl.store(starts + cell, first + tl.cumsum(amount, 0) - 1, mask=cell < all_cells)",
        likely="64 channels",
    ),
    _backward(
        "the last list of a pixel lost",
        _SUMS_GPU,
        "amount = first_3 + tl.load(counts + cell - row - 1, mask=exists, other=0)",
        "amount = first_3 + 0 * tl.load(counts + cell - row - 1, mask=exists, other=0)",
        likely="64 channels",
    ),
    _backward(
        "one scale for all channels",
        _SUMS_GPU,
        "q1 += word(a1, weight_0, scales[1]) + word(b1, weight_1, scales[1])",
        "q1 += word(a1, weight_0, scales[0]) + word(b1, weight_1, scales[1])",
        likely="257 channels",
    ),
)

"""Mutants of the grid_sample kernels."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_forward = partial(KernelMutant, plans=("GridSamplePlan",))
_backward = partial(KernelMutant, plans=("GridSampleBackwardPlan",))
_OP = "holdfast.ops.grid_sample"
_CPU, _COORDINATES_CPU, _PLACES_CPU = f"{_OP}.cpu", f"{_OP}.cpu_coordinates", f"{_OP}.cpu_places"
_CHANNELS_CPU, _INTEGERS_CPU = f"{_OP}.cpu_channel_sums", f"{_OP}.cpu_integer_sums"
_PAIRS_CPU = f"{_OP}.cpu_pairs"
_GRADIENTS_CPU, _BANDS_CPU = f"{_OP}.cpu_gradients", f"{_OP}.cpu_bands"
_LANES_CPU, _GPU, _DGRID_GPU = f"{_OP}.cpu_lanes", f"{_OP}.gpu", f"{_OP}.gpu_dgrid"
_SLOTS_GPU, _COLUMNS_GPU = f"{_OP}.gpu_dinput_by_slot", f"{_OP}.gpu_slot_columns"
_IMAGES_GPU, _PLANES_GPU = f"{_OP}.gpu_dinput_by_image", f"{_OP}.gpu_dinput_by_plane"
_TERMS_GPU, _SAMPLES_GPU = f"{_OP}.gpu_terms", f"{_OP}.gpu_sample_columns"
_CELLS_GPU, _SUMS_GPU = f"{_OP}.gpu_cells", f"{_OP}.gpu_dinput_by_cell"

MUTANTS = (
    _forward(
        "what is beside the image multiplied by 0",
        _PAIRS_CPU,
        "totals[channel] = builder.select(counts, more, totals[channel])",
        "totals[channel] = builder.select(\n"
        "                        counts, more, builder.fadd(totals[channel], builder.fmul(zeros, value))\n"
        "                    )",
        likely="special values",
    ),
    _forward(
        "the second channel of a pair of channels is the first",
        _PAIRS_CPU,
        "totals[channel] = builder.select(counts, more, totals[channel])\n"
        "                image = builder.add(image, step)",
        "totals[channel] = builder.select(counts, more, totals[channel])",
        likely="11 channels",
    ),
    _backward(
        "terms of a place in the order of the columns",
        _PAIRS_CPU,
        "order = [k + column for k in range(lanes) for column in (0, lanes)]",
        "order = list(range(2 * lanes))",
        likely="several tiles",
    ),
    _forward(
        "a column in the place of the other",
        _PLACES_CPU,
        "more = total + weight * values[i * len(columns) + k]",
        "more = total + weight * values[i * len(columns)]",
    ),
    _forward(
        "the grid of the first image for all",
        _CPU,
        "to_sample - begin), (offsets_at, weights_at)\n            locate(grid_of(grid, n),",
        "to_sample - begin), (offsets_at, weights_at)\n            locate(grid_of(grid, 0),",
    ),
    _forward(
        "the last, shorter run dropped",
        _CPU,
        "for begin in range(from_sample, to_sample, RUN):",
        "for begin in range(from_sample, max(to_sample - RUN + 1, from_sample + 1), RUN):",
        likely="several runs",
    ),
    _forward(
        "columns not moved at the right border",
        _COORDINATES_CPU,
        "t if moved == 0 else rest if moved == 1 else outside",
        "t if moved == 0 else outside",
    ),
    _backward(
        "a term rounded down",
        _INTEGERS_CPU,
        "whole = np.int64(term)",
        "whole = np.int64(np.floor(term))",
        likely="wide",
    ),
    _backward(
        "a unit of one bit fewer",
        _INTEGERS_CPU,
        "return bits - exponent",
        "return bits - 1 - exponent",
        likely="wide",
    ),
    _backward(
        "a unit from infinite values",
        _INTEGERS_CPU,
        "largest = max(largest, here if here < infinite else np.int64(0))",
        "largest = max(largest, here)",
        likely="infinite",
    ),
    _backward(
        "opposite infinities not NaN",
        _INTEGERS_CPU,
        "sums[0] = (sums[0] if sums[0] < _LEAST else _MARK) | mark",
        "sums[0] = _MARK | mark",
        likely="infinite",
    ),
    _backward(
        "the second word lost",
        _INTEGERS_CPU,
        "_as_real(sums[i * words + 1], like) * unit",
        "zero(like) * unit",
        likely="float64",
    ),
    _backward(
        "the sums of the other threads lost",
        _CPU,
        "for other in range(1, others[0]):",
        "for other in range(2, others[0]):",
        likely="several tiles",
    ),
    _backward(
        "the sums of the other bands lost",
        _BANDS_CPU,
        "for part in range(numbers[SLOTS]):",
        "for part in range(1):",
        likely="one image by bands",
    ),
    _backward(
        "the unit of a band from its own samples",
        _BANDS_CPU,
        "for slot in range(numbers[SLOTS]):",
        "for slot in range(1):",
        likely="one image by bands",
    ),
    _backward(
        "the shift of the first channel for all",
        _GRADIENTS_CPU,
        "scale(row, count, shifts[c], like)",
        "scale(row, count, shifts[0], like)",
        likely="magnitudes",
    ),
    _forward(
        "a column of lanes in the place of the other",
        _LANES_CPU,
        "image_at + (offsets[i] + k) * REALS",
        "image_at + offsets[i] * REALS",
        likely="64 channels",
    ),
    _backward(
        "terms of lanes in the place of the other column",
        _LANES_CPU,
        "sums_at + (offsets[i] + k) * SUMS",
        "sums_at + offsets[i] * SUMS",
        likely="64 channels",
    ),
    _backward(
        "the marks of the first channel for all",
        _CPU,
        "replace_marked(sums, pixel, count, row, like)",
        "replace_marked(sums_at + at * pixel, pixel, count, row, like)",
        likely="infinite gradients, 16 channels",
    ),
    _backward(
        "a full level not carried",
        _CHANNELS_CPU,
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
        "one tile of scattered samples per program",
        _SUMS_GPU,
        "tasks, programs):\n                sum_row_tile(",
        "programs, programs):\n                sum_row_tile(",
        likely="scattered samples",
    ),
    _backward(
        "one copy per program",
        _CELLS_GPU,
        "for task in range(program - listing, copies, copying):",
        "for task in range(program - listing, copying, copying):",
        likely="scattered samples",
    ),
    _backward(
        "one scale for all channels",
        _SUMS_GPU,
        "q1 += word(a1, weight_0, scales[1]) + word(b1, weight_1, scales[1])",
        "q1 += word(a1, weight_0, scales[0]) + word(b1, weight_1, scales[1])",
        likely="257 channels",
    ),
    _backward(
        "two samples in one slot",
        _SLOTS_GPU,
        "tl.store(slots + arrival * all_cells + cell, number, mask=there & (arrival < SLOTS))",
        "tl.store(slots + (arrival // 2) * all_cells + cell, number, mask=there & (arrival < SLOTS))",
        likely="random",
    ),
    _backward(
        "a corner after the last column taken for one of the image",
        _TERMS_GPU,
        "return index.to(tl.uint32) < (size + tl.zeros([1], tl.int32)).to(tl.uint32)",
        "return index.to(tl.uint32) <= (size + tl.zeros([1], tl.int32)).to(tl.uint32)",
        likely="on centres and borders",
    ),
    _backward(
        "the last channel not measured",
        _SLOTS_GPU,
        'tl.atomic_max(at + channel * SPREAD, most, mask=channel < CHANNELS, sem="relaxed")',
        'tl.atomic_max(at + channel * SPREAD, most, mask=channel < CHANNELS - 1, sem="relaxed")',
        likely="gradients of a wide range, 4 channels",
    ),
    _backward(
        "the extras lost",
        _COLUMNS_GPU,
        "total += tl.load(at, mask=counts[i] > SLOTS, other=0)",
        "total += tl.load(at, mask=counts[i] > SLOTS + 1, other=0)",
        likely="random",
    ),
    _backward(
        "the last row of a column lost",
        _COLUMNS_GPU,
        "done = exists & (j > 0) & (top + j <= sizes[1])",
        "done = exists & (j > 0) & (top + j < sizes[1])",
        likely="random",
    ),
    _backward(
        "the pixels above and below exchanged",
        _COLUMNS_GPU,
        "b0 += (below * change).to(tl.int64)",
        "b0 += (above * change).to(tl.int64)",
        likely="random",
    ),
    _backward(
        "empty slots summed",
        _COLUMNS_GPU,
        "below = tl.where(here, corner_weight(",
        "below = tl.where(here | (k == 0), corner_weight(",
        likely="random",
    ),
    _backward(
        "a scale of one bit fewer",
        _SLOTS_GPU,
        "scale = power_of_two(tl.minimum(shift, LARGEST_SHIFT), tl.float32)",
        "scale = power_of_two(tl.minimum(shift - 1, LARGEST_SHIFT), tl.float32)",
        likely="gradients of a wide range, 4 channels",
    ),
    _backward(
        "numbers that are not finite in fast sums",
        _SLOTS_GPU,
        "refused = (field == 255) |",
        "refused = (field == 256) |",
        likely="infinite gradients, 4 channels",
    ),
    _backward(
        "carried terms lost at the end of a column",
        _SAMPLES_GPU,
        "before, joined = (last_0, last_1), lane < 0",
        "before, joined = (last_0, last_1), lane >= 0",
        likely="infinite gradients, 4 channels",
    ),
    _backward(
        "one group of channels in the place of the others",
        _SAMPLES_GPU,
        "own_plane = first_plane + group * CHANNELS",
        "own_plane = first_plane + 0 * group",
        likely="11 channels",
    ),
    _backward(
        "dout of another group of channels",
        _SAMPLES_GPU,
        "(first_channel + own_plane).to(tl.int64) * dout_step",
        "(first_channel + own_plane // 8).to(tl.int64) * dout_step",
        likely="11 channels",
    ),
    _backward(
        "carried terms added twice",
        _SAMPLES_GPU,
        "release(sums, carried, before, joined, lane,",
        "release(sums, carried, before, joined & (lane < 0), lane,",
        likely="infinite gradients, 4 channels",
    ),
    _backward(
        "west terms exchanged for east terms",
        _SAMPLES_GPU,
        "got = tl.gather(tl.where(second, west, east), lane",
        "got = tl.gather(tl.where(second, east, west), lane",
        likely="infinite gradients, 4 channels",
    ),
    _backward(
        "the sums of the image before left in place",
        _CPU,
        "_clear_touched(width, touched, touched_end, places, sums_at, like)\n                _store_zeros",
        "_clear_touched(width, touched, touched, places, sums_at, like)\n                _store_zeros",
        likely="many small images",
    ),
    _backward(
        "the last touched pixel taken for untouched",
        _GRADIENTS_CPU,
        "return low, high + len(columns)",
        "return low, high + len(columns) - 1",
        likely="many small images",
    ),
    _backward(
        "a box one column too narrow",
        _IMAGES_GPU,
        "width = x1 - x0 + 1",
        "width = tl.maximum(x1 - x0, 1)",
        likely="small images",
    ),
    _backward(
        "the rows of a box stored from the wrong place",
        _IMAGES_GPU,
        "return (row - y) * width + (pixel % sizes[0] - x0)",
        "return (row - y) * width + (pixel % sizes[0] - x0 + 1)",
        likely="small images",
    ),
    _backward(
        "scattered samples taken for a window",
        _IMAGES_GPU,
        "return highest <= lowest,",
        "return highest <= lowest + 2**16,",
        likely="many small images",
    ),
    _backward(
        "a window one row too short",
        _IMAGES_GPU,
        "& (y <= out_sizes[1])",
        "& (y < out_sizes[1])",
        likely="windows",
    ),
    _backward(
        "the term of another sample of a window",
        _IMAGES_GPU,
        "return north + earlier(south, lane - wide)",
        "return north + earlier(south, lane - wide + 1)",
        likely="windows",
    ),
    _backward(
        "the scale of half of the samples",
        _PLANES_GPU,
        "for begin in range(0, samples, VECTOR):",
        "for begin in range(0, samples - VECTOR, VECTOR):",
        likely="one pixel, one",
    ),
    _backward(
        "the accumulators of another plane",
        _PLANES_GPU,
        "own_sums - n.to(tl.int64) * (pixels * WORDS)",
        "own_sums - channel.to(tl.int64) * (pixels * WORDS)",
        likely="2-d b",
    ),
    _backward(
        "the last tile of samples lost",
        _PLANES_GPU,
        "for tile in range(tiles):",
        "for tile in range(tiles - 1):",
        likely="2-d b",
    ),
    _backward(
        "numbers that are not finite left out",
        _PLANES_GPU,
        "largest + tl.max(not_finite, 0) * SPECIAL",
        "largest",
        likely="special values",
    ),
)

"""Mutants of the embedding kernels."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_mutant = partial(KernelMutant, plans=("EmbeddingPlan",))
_CPU, _GPU = "holdfast.ops.segment_sum.cpu_gather", "holdfast.ops.segment_sum.gpu_gather"

# fmt: off
MUTANTS = (
    _mutant("the last column lost", _CPU,
        "copy(target, table_at + index * row_step * item, columns * item)",
        "copy(target, table_at + index * row_step * item, (columns - 1) * item)"),
    _mutant("the last vector of a row one byte too early", _CPU,
        "copy(to + last_vector, of + last_vector, wide)",
        "copy(to + last_vector - 1, of + last_vector - 1, wide)"),
    _mutant("the lines of a long row lost", _CPU,
        "copy_lines(to, of, lines)", "copy_lines(to, of, 0)", likely="D = 768"),
    _mutant("the last byte of a very long row lost", _CPU,
        "copy(to, of, size)", "copy(to, of, size - 1)", likely="D = 4096"),
    _mutant("half of a word", _CPU,
        "copy(target + n * target_step, source + index * row_step, size_of(word))",
        "copy(target + n * target_step, source + index * row_step, size_of(word) // 2)", likely="D = 1"),
    _mutant("a whole row after the last", _CPU,
        "if np.uint64(index) >= np.uint64(rows):", "if np.uint64(index) > np.uint64(rows):"),
    _mutant("the column stride of the output for that of the table", _CPU,
        "row_step * item, step, columns, target, out_step, item)",
        "row_step * item, out_step, columns, target, out_step, item)"),
    _mutant("a row after the last", _CPU,
        "if index < 0 or index >= rows:",
        "if index < 0 or index >= rows + (rows > 0):"),
    _mutant("one byte of a zero", _CPU, "for b in range(item):", "for b in range(1):"),
    _mutant("the row of another index", _CPU,
        "move(table_at + index * row_step * item,",
        "move(table_at + index // 2 * row_step * item,"),
    _mutant("a mask one column too wide", _GPU, "inside = column < columns", "inside = column <= columns"),
    _mutant("a row after the last", _GPU,
        "known = exists & (row >= 0) & (row < extent)",
        "known = exists & (row >= 0) & (row <= extent)"),
    _mutant("the last index dropped", _GPU, "exists = number < count", "exists = number < count - 1"),
    _mutant("the column stride of the output for that of the table", _GPU,
        "column * column_stride",
        "column * out_strides[len(sizes) - 1]"),
    _mutant("the strides of the output for those of the indices", _GPU,
        "row_offsets(number, sizes, index_strides)",
        "row_offsets(number, sizes, out_strides) // columns"),
    _mutant("columns that fill no vector lost", _GPU, "STEP=common_step(", "STEP=2 * common_step("),
)

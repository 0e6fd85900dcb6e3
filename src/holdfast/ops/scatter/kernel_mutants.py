"""Mutants of the scatter kernels."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_mutant = partial(KernelMutant, plans=("ScatterPlan",))
_gathers = partial(KernelMutant, plans=("GatherPlan",))
_CPU, _GPU = "holdfast.ops.scatter.cpu", "holdfast.ops.scatter.gpu"
_ELEMENTS = "holdfast.ops.scatter.cpu_elements"
_SUM_CPU, _SORT = "holdfast.ops.segment_sum.cpu", "holdfast.ops.segment_sum.gpu_merge_sort"

# fmt: off
MUTANTS = (
    _mutant("the line of a term forgotten", _CPU,
        "found[at + i] = row * step + line + i * line_step",
        "found[at + i] = row * step + i * line_step", likely="lines"),
    _mutant("runs that leave their line", _CPU,
        "        run = min(table[0, inner] - at % table[0, inner], last - at)\n        indices, index_step",
        "        run = min(table[0, inner], last - at)\n        indices, index_step",
        likely="several threads"),
    _gathers("a row after the last", _CPU,
        "            if row < 0 or row >= extent:\n                for c",
        "            if row < 0 or row > extent:\n                for c", likely="bad"),
    _gathers("an element after the last", _CPU,
        "known = row >= 0 and row < extent", "known = row >= 0 and row <= extent", likely="bad"),
    _mutant("a full chunk not pushed", _ELEMENTS,
        "if word & _COUNT == CHUNK:", "if word & _COUNT == CHUNK + 1:", likely="elements, all equal"),
    _mutant("levels not carried", _ELEMENTS,
        "    while full % CHUNK == 0:", "    while full % CHUNK == 0 and level < 0:", likely="elements, all"),
    _mutant("a slot for several rows", _ELEMENTS,
        "                    used += new\n", "", likely="elements, neighbouring"),
    _mutant("input counted in no mean of elements", _ELEMENTS,
        "(np.int32(terms + 1) + zero(like))", "(np.int32(terms) + zero(like))", likely="mean of elements"),
    _mutant("the line of an element forgotten", _ELEMENTS,
        "row = given * step + line + i * line_step", "row = given * step + i * line_step", likely="matrix"),
    _gathers("the stride of the output for that of input", _CPU,
        "move(input + source * item, step, columns,",
        "move(input + source * item, out_step, columns,", likely="sliced"),
    _gathers("the last column lost", _CPU,
        "copy(out + target * item, input + source * item, columns * item)",
        "copy(out + target * item, input + source * item, (columns - 1) * item)"),
    _gathers("the line of a row forgotten", _GPU,
        "line = rows_at(input, number, column, sizes, input_strides)",
        "line = rows_at(input, number * 0, column, sizes, input_strides)", likely="lines"),
    _gathers("a mask one column too wide", _GPU, "inside = column < columns", "inside = column <= columns"),
    _gathers("a row after the last", _GPU, "& (row >= 0) & (row < extent)", "& (row >= 0) & (row <= extent)",
        likely="bad"),
    _gathers("the last index dropped", _GPU, "exists = number < count", "exists = number < count - 1"),
    _mutant("input counted in no mean", _SUM_CPU,
        "amount = np.int32(terms + 1) + zero(like)",
        "amount = np.int32(terms) + zero(like)", likely="mean"),
    _mutant("alpha lost", _SUM_CPU, "sums[i] = alpha * sums[i]", "sums[i] = sums[i]", likely="alpha"),
    _mutant("a row without terms lost", _SUM_CPU,
        "        copy(target, source, count * item)\n",
        "        copy(target, source, (count - 1) * item)\n", likely="few terms"),
    _mutant("the stride of the output for that of a copied row", _SUM_CPU,
        "move(source, source_step, count, target, step, item)",
        "move(source, step, count, target, step, item)", likely="sliced"),
    _mutant("the line of a term forgotten", _SORT,
        "row = index.to(tl.int32) * lines[1] + row_offsets(place, sizes, lines[2:]).to(tl.int32)",
        "row = index.to(tl.int32) * lines[1]", likely="matrix"),
    _mutant("destinations of one line one apart", _SORT,
        "row = index.to(tl.int32) * lines[1] +", "row = index.to(tl.int32) +", likely="matrix"),
    _mutant("input not added", _GPU, "total = widen(old, COMPUTE) + total", "total = total + 0.0"),
    _mutant("input not counted in a mean", _GPU,
        "quotient(total, (count + 1).to(COMPUTE)[:, None])",
        "quotient(total, tl.maximum(count, 1).to(COMPUTE)[:, None])", likely="mean"),
    _mutant("half of alpha lost", _GPU,
        "(alpha[1] & 0xFFFFFFFF)", "(alpha[1] & 0x0FFFFFFF)", likely="alpha"),
    _mutant("-0.0 lost where there are no terms", _GPU,
        "    total = widen(old, COMPUTE) + total\n    if BY_COUNT:",
        "    total = widen(old, COMPUTE) + total\n    amount += 1\n    if BY_COUNT:", likely="either sign"),
    _mutant("rows without terms read as zeros", _GPU,
        "mask = ((row < rows) & (amount == 0))[:, None] & inside\n    old",
        "mask = ((row < rows) & (amount < 0))[:, None] & inside\n    old", likely="few terms"),
)

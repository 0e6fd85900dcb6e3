"""Mutants of the segment_sum kernels."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_mutant = partial(KernelMutant, plans=("SegmentSumPlan", "EmbeddingBackwardPlan"))
_CPU, _GPU = "holdfast.ops.segment_sum.cpu", "holdfast.ops.segment_sum.gpu"

# fmt: off
MUTANTS = (
    _mutant("a scratch run too few", _CPU,
        "Runs(_LEVEL + LEVELS, RUN_BYTES)",
        "Runs(_LEVEL + LEVELS - 1, RUN_BYTES)", likely="width 1500"),
    _mutant("chunks of twice the size", _CPU, "if last - first <= CHUNK:", "if last - first <= 2 * CHUNK:"),
    _mutant("five terms in the room of four", _CPU,
        "if pending == 4:",
        "if pending == 5:", likely="sliced terms"),
    _mutant("accumulate lost", _CPU,
        "sums[i] = old[i] + sums[i]",
        "sums[i] = zero(like) + sums[i]", likely="accumulate"),
    _mutant("a full level not carried", _CPU,
        "while full % CHUNK == 0:",
        "while full % CHUNK == 0 and level < 0:"),
    _mutant("columns after the last whole vector lost", _CPU,
        "while done < count:",
        "while done < count - 1:"),
    _mutant("a row without terms not cleared", _CPU,
        "            clear(target, size)\n",
        "            clear(target, size - columns * item)\n"),
    KernelMutant("weights of other terms", _CPU,
        "[place] if factor[0] == TIMES",
        "[at] if factor[0] == TIMES", plans=("EmbeddingBagBackwardPlan",), likely="weighted"),
    _mutant("a heavy row left out", _CPU,
        "if ordering.longest > share:",
        "if ordering.longest > 2 * share:", likely="neighbouring long"),
    _mutant("the arrivals of all levels counted in one place", _GPU,
        "counter = arrivals + slot_of(origin, chunk + level, windows)",
        "counter = arrivals + slot_of(origin, chunk, windows)"),
    _mutant("rows of a whole chunk dropped", _GPU,
        "mine = exists & (amount <= CHUNK)",
        "mine = exists & (amount < CHUNK)"),
    _mutant("the first chunk in the slot of another", _GPU,
        "return origin + chunk + tl.where(chunk == 0, windows, 0)",
        "return origin + chunk"),
    _mutant("accumulate lost", _GPU,
        "total = widen(tl.load(at, mask=mask, other=0.0), COMPUTE) + total",
        "total = total + 0.0", likely="transposed output"),
    _mutant("rows filled whether or not they have terms", _GPU,
        "mask = ((row < rows) & (amount == 0))[:, None] & inside",
        "mask = ((row < rows) & (amount >= 0))[:, None] & inside", likely="a million"),
    _mutant("sums of a narrower type", _GPU,
        "            total += value\n",
        "            total = (total + value).to(tl.float32).to(COMPUTE)\n"),
    _mutant("the places of a long row of a tall table counted as a chunk", _GPU,
        "& (ahead <= CHUNK):", "& (ahead < CHUNK):", likely="a million"),
    _mutant("the end of a long row of a tall table missed", _GPU,
        "lower_bound(keys, row + 1, count, step)",
        "lower_bound(keys, row + 2, count, step)", likely="a million"),
    _mutant("a chunk more to each slot", _GPU,
        "tl.where(mine, tl.minimum(left, CHUNK), 0)",
        "tl.where(mine, tl.minimum(left, CHUNK + 1), 0)"),
)

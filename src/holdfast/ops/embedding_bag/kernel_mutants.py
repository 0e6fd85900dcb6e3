"""Mutants of the embedding_bag kernels."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_forward = partial(KernelMutant, plans=("EmbeddingBagPlan",))
_backward = partial(KernelMutant, plans=("EmbeddingBagBackwardPlan",))
_CPU, _GPU = "holdfast.ops.embedding_bag.cpu", "holdfast.ops.embedding_bag.gpu"
_SUMS_CPU, _DOTS_CPU = "holdfast.ops.embedding_bag.cpu_sums", "holdfast.ops.embedding_bag.cpu_dots"

# fmt: off
MUTANTS = (
    _forward("a scratch run of half the size", _CPU,
        "_RUN = step_of(RUN_BYTES)",
        "_RUN = step_of(RUN_BYTES // 2)", likely="long rows in float64"),
    _forward("the last index of a bag dropped", _CPU,
        "for n in range(starts[bag], starts[bag + 1]):",
        "for n in range(starts[bag], starts[bag + 1] - 1):"),
    _forward("only the first chunk of a bag", _SUMS_CPU,
        "add_to(sums, [builder.load(slot) for slot in chunk_sums])",
        "add_to(chunk_sums, [builder.load(slot) for slot in chunk_sums])", likely="bags of many sizes"),
    _forward("padding counted in a mean", _SUMS_CPU,
        "builder.sub(last, first), builder.load(skipped))",
        "builder.sub(last, first), count(0))", likely="padding"),
    _forward("the last columns at the place of others", _SUMS_CPU,
        "column = min(column, columns - width)",
        "column = min(column, columns - 1)", likely="vectors of columns"),
    _forward("the bags of the first batch again", _SUMS_CPU,
        "begin, batch_end = begin_of(first, offsets, length, count),",
        "begin, batch_end = begin_of(0, offsets, length, count),", likely="many bags"),
    _forward("a range of bags taken twice, another not at all", _SUMS_CPU,
        "first = take(numbers_of(task), _NEXT, share)",
        "first = take(numbers_of(task), _NEXT, share) // share // 2 * 2 * share", likely="many bags"),
    _forward("the sum of several rows not rounded", _SUMS_CPU,
        "store([builder.load(slot) for slot in sums])",
        "store([builder.load(slot) for slot in sums], exact=True)", likely="bfloat16"),
    _backward("the weight of a skipped index given a gradient", _DOTS_CPU,
        "totals[n - begin] if counts else zero(like)",
        "totals[n - begin]", likely="weighted in bfloat16"),
    _backward("columns added in another order", _DOTS_CPU,
        "in _transposed(builder, products(column, _LANES)):",
        "in _transposed(builder, products(column, _LANES))[::-1]:", likely="weighted"),
    _backward("the last of equal maxima", _CPU, "or value > most or", "or value >= most or"),
    _backward("indices in no bag given to the last", _CPU,
        "_find_rows(end, indices[2], np.int64(-1), indices,",
        "_find_rows(end, indices[2], np.int64(bags - 1), indices,", likely="beyond the last bag"),
    _backward("a level carry and kept", _CPU,
        "            levels[level] = zero(like)\n            full",
        "            full", likely="D = 4096"),
    _backward("the row stride of the table for that of dout", _DOTS_CPU,
        "np.int64(max(bags[n], np.int32(0))) * dout[1]",
        "np.int64(max(bags[n], np.int32(0))) * table[1]", likely="dout in another layout"),
    _backward("accumulate lost", _CPU,
        "total[0] = old[0] + total[0]",
        "total[0] = zero(like) + total[0]", likely="accumulate"),
    _forward("only the last chunk of a bag", _GPU, "        total += chunk\n", "        total = chunk\n"),
    _forward("a maximum over what is left out", _GPU,
        "better = better & kept[:, None]",
        "better = better & (begin + u < amount)[:, None]", likely="padding in a maximum"),
    _backward("a place that begins a bag given to the one before", _GPU,
        "exists & (there <= place), probe",
        "exists & ((there < place) | (there == 0)), probe"),
    _backward("a mean over padding", _GPU,
        "amount -= tl.load(skipped + bag, mask=bag < bags, other=0)",
        "amount -= 0", likely="padding"),
    _backward("columns added in another order", _GPU,
        "total = (((total + first) + second) + third) + fourth",
        "total = (((total + first) + third) + second) + fourth", likely="weighted"),
    _backward("accumulate lost", _GPU,
        "total = widen(tl.load(to, mask=kept, other=0.0), COMPUTE) + total",
        "total = total + 0.0", likely="accumulate"),
)

"""Named test inputs of segment_sum, and indices and rows that embedding and embedding_bag use too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch

from holdfast.core.case import Case, laid_out, poisoned_output, random_bits
from holdfast.core.dtypes import FLOATS, float_dtype
from holdfast.core.plan import AnyPlan
from holdfast.core.values import of_any_bits, of_every_exponent, rounded, special_values, spread
from holdfast.ops.segment_sum.plan import SegmentSumArgs, SegmentSumDescriptor

#: Lengths of consecutive segments, such that chunks of two long ones begin within 32 places of each other.
LENGTHS = (5, 40, 50, 33, 34, 0, 70, 32, 64, 31, 65, 1, 128, 97)


def index_values(kind: str, label: str, shape: Sequence[int], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Indices into ``rows`` rows with the distribution ``kind``."""
    count = prod(shape)
    bits = random_bits(f"indices/{label}", 2 * count)
    low, high = bits[:count] >> np.uint64(20), bits[count:]
    if kind == "uniform" or kind == "sorted":
        found = (low % np.uint64(max(rows, 1))).astype(np.int64)
        found = np.sort(found) if kind == "sorted" else found
    elif kind == "zipf":  # each power of two is equally likely
        reach = np.uint64(1) << (high % np.uint64(max(rows, 2).bit_length()))
        found = (low % reach % np.uint64(max(rows, 1))).astype(np.int64)
    elif kind == "equal":
        found = np.full(count, rows // 2, np.int64)
    elif kind == "distinct":
        found = np.argsort(low, kind="stable")[:count]
    elif kind == "lengths":
        found = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[np.argsort(low, kind="stable")]
    else:
        assert kind == "bad"
        widest = 2**31 - 1 if dtype == torch.int32 else 2**63 - 1
        wrong = np.array([-1, rows, -rows - 1, widest, -widest - 1], np.int64)
        found = np.where(
            high % np.uint64(3) == 0,
            wrong[low % np.uint64(5)],
            (low % np.uint64(max(rows, 1))).astype(np.int64),
        )
    return torch.from_numpy(np.ascontiguousarray(found.astype(np.int64))).to(dtype).reshape(tuple(shape))


def row_values(label: str, shape: Sequence[int], dtype: torch.dtype, values: str = "spread") -> torch.Tensor:
    """Values of both signs over many exponents, whose sums depend on the order, or special values."""
    record, count = float_dtype(dtype, "dtype"), prod(shape)
    made = rounded(spread(f"rows/{label}", count, record.precision, -9, 5), dtype)
    if values == "special":
        wanted = special_values(record)
        made[: 2 * len(wanted) : 2] = wanted[: len(made[: 2 * len(wanted) : 2])]
    elif values == "exponents":
        made = of_every_exponent(f"rows/{label}", count, record)
    elif values == "any bits":
        made = of_any_bits(f"rows/{label}", count, record)
    elif values == "zeros":
        made = torch.zeros(count, dtype=dtype)
        made[::2] = -0.0
    return made.reshape(tuple(shape))


@dataclass(frozen=True)
class Problem:
    """Parameters of a case. ``layouts`` are of the terms, the destinations and the output."""

    name: str
    shape: tuple[int, ...]
    segments: int
    width: int
    indices: str = "uniform"
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    values: str = "spread"
    accumulate: bool = False


_BFLOAT16, _FLOAT64 = FLOATS["bfloat16"].torch, FLOATS["float64"].torch

PROBLEMS = (
    Problem("uniform", (5, 41), 23, 64),
    Problem("zipf", (700,), 40, 17, "zipf"),
    Problem("float16", (700,), 11, 17, "zipf", torch.float16),
    Problem("bfloat16", (700,), 11, 17, "zipf", _BFLOAT16, torch.int32),
    Problem("float64", (700,), 11, 17, "zipf", _FLOAT64),
    Problem("neighbouring long segments", (sum(LENGTHS),), len(LENGTHS), 9, "lengths"),
    Problem("all equal", (1100,), 7, 5, "equal"),
    Problem("all equal in bfloat16", (4096,), 3, 3, "equal", _BFLOAT16),
    Problem("31 terms", (31,), 1, 3, "equal"),
    Problem("32 terms", (32,), 1, 3, "equal"),
    Problem("33 terms", (33,), 1, 3, "equal", index_dtype=torch.int32),
    Problem("1024 terms", (1024,), 2, 2, "equal"),
    Problem("1025 terms", (1025,), 2, 2, "equal"),
    Problem("all distinct", (300,), 300, 64, "distinct"),
    Problem("sorted", (400,), 60, 3, "sorted", index_dtype=torch.int32),
    Problem("bad destinations", (11, 30), 19, 8, "bad"),
    Problem("bad destinations in int32", (330,), 19, 8, "bad", index_dtype=torch.int32),
    Problem("no terms", (0,), 5, 4),
    Problem("no segments", (7,), 0, 4),
    Problem("no width", (7,), 3, 0),
    Problem("one index of rank 0", (), 3, 5),
    Problem("width 1", (200,), 90, 1, "zipf"),
    Problem("width 768", (90,), 20, 768, "zipf", _BFLOAT16),
    Problem("width 4096", (50,), 6, 4096, "zipf"),
    Problem("width 1500 in float64", (90,), 2, 1500, "equal", _FLOAT64),
    Problem("a million segments", (900,), 10**6, 1, "zipf"),
    Problem("far more segments than terms, odd width", (150,), 1001, 3),
    Problem("more segments than terms", (200,), 300, 64, "zipf"),
    Problem("several blocks", (5000,), 70, 8, "zipf"),
    Problem("many terms of few segments", (2**16 + 50,), 300, 1),
    Problem("transposed terms", (13, 21), 9, 6, layouts=("transposed", "contiguous", "contiguous")),
    Problem("broadcast terms", (130,), 9, 6, layouts=("broadcast", "contiguous", "contiguous")),
    Problem("sliced terms to padded rows", (130,), 9, 6, dtype=torch.float16,
            layouts=("sliced", "sliced", "padded rows")),
    Problem("transposed output", (130,), 9, 70, dtype=_BFLOAT16, accumulate=True,
            layouts=("contiguous", "contiguous", "transposed")),
    Problem("transposed destinations, unaligned", (6, 5, 7), 9, 64,
            layouts=("unaligned", "transposed", "unaligned")),
    Problem("accumulate", (120,), 60, 33, "zipf", accumulate=True),
    Problem("accumulate in float16", (700,), 11, 17, "zipf", torch.float16, accumulate=True),
    Problem("special values", (200,), 90, 6, values="special"),
    Problem("zeros of either sign", (60,), 40, 4, values="zeros"),
    Problem("accumulate zeros of either sign", (60,), 90, 4, values="zeros", accumulate=True),
)  # fmt: skip


def cases(plan: AnyPlan) -> list[Case]:
    return [case(plan, problem) for problem in PROBLEMS]


def case(plan: AnyPlan, problem: Problem) -> Case:
    desc = SegmentSumDescriptor(
        shape=problem.shape, segments=problem.segments, width=problem.width, dtype=problem.dtype,
        index_dtype=problem.index_dtype,
    )  # fmt: skip
    return Case(problem.name, desc, partial(_args, desc, problem))


def _args(desc: SegmentSumDescriptor, problem: Problem) -> SegmentSumArgs:
    of_terms, of_destinations, of_output = problem.layouts
    shape, rows = problem.shape, problem.segments
    out = poisoned_output((rows, problem.width), problem.dtype, of_output)
    if problem.accumulate:
        out.copy_(row_values(f"out/{problem.name}", out.shape, problem.dtype, problem.values))
    terms = row_values(problem.name, (*shape, problem.width), problem.dtype, problem.values)
    destinations = index_values(problem.indices, problem.name, shape, rows, problem.index_dtype)
    return SegmentSumArgs(
        terms=laid_out(terms, of_terms), destinations=laid_out(destinations, of_destinations), out=out,
        accumulate=problem.accumulate,
    )  # fmt: skip

"""Named test inputs of scatter and gather."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from holdfast.core.case import Case, laid_out, poisoned_output
from holdfast.core.plan import AnyPlan, Args
from holdfast.ops.segment_sum.cases import LENGTHS, index_values, row_values


@dataclass(frozen=True)
class Problem:
    """Parameters of a case. ``layouts`` are of input, the index, src and the output."""

    name: str
    shape: tuple[int, ...]
    table: tuple[int, ...]
    dim: int = 0
    width: int | None = None
    spread: str = "uniform"
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    base: str = "added"
    reduce: str = "sum"
    alpha: float = 1.0
    layouts: tuple[str, str, str, str] = ("contiguous",) * 4
    values: str = "spread"
    bad_index: str = "raise"


_F16, _BF16, _F64, _I32 = torch.float16, torch.bfloat16, torch.float64, torch.int32

PROBLEMS = (
    Problem("rows", (205,), (23,), width=64),
    Problem("rows, zipf, float16", (700,), (40,), width=17, spread="zipf", dtype=_F16),
    Problem("rows, zipf, bfloat16", (700,), (40,), 0, 17, "zipf", _BF16, _I32),
    Problem("rows, zipf, float64", (700,), (40,), 0, 17, "zipf", _F64),
    Problem("rows, neighbouring long", (sum(LENGTHS),), (len(LENGTHS),), width=9, spread="lengths"),
    Problem("rows, all equal", (1100,), (7,), width=5, spread="equal"),
    Problem("rows, all distinct", (300,), (300,), width=64, spread="distinct", index_dtype=_I32),
    Problem("rows, ascending", (205,), (40,), width=9, spread="sorted", dtype=_BF16),
    Problem("rows, few terms", (60,), (900,), width=33, spread="zipf"),
    Problem("rows, few terms, zeros", (60,), (900,), width=33, spread="zipf", base="zeros"),
    Problem("rows, few terms, kept", (60,), (900,), width=33, spread="zipf", base="kept", dtype=_BF16),
    Problem("rows, few terms, several digits", (300,), (5000,), width=3, spread="zipf", reduce="mean"),
    Problem("rows, few terms, ascending", (70,), (3000,), width=5, spread="sorted", dtype=_F64, alpha=0.3),
    Problem("rows, few terms, padded rows", (40,), (2500,), width=6, spread="zipf", dtype=_F16,
            layouts=("sliced", "sliced", "sliced", "padded rows")),
    Problem("rows, few terms, sliced, zeros", (40,), (2500,), width=6, spread="zipf", base="zeros",
            layouts=("contiguous", "contiguous", "contiguous", "sliced")),
    Problem("rows, few terms, transposed", (90,), (2500,), width=6, layouts=("transposed",) * 4),
    Problem("rows, few terms, one base for all", (90,), (25_000,),
            layouts=("broadcast", "contiguous", "contiguous", "contiguous")),
    Problem("rows, few terms, of elements", (8, 5), (900, 5), 0, reduce="mean", base="kept"),
    Problem("rows, few terms, zeros of either sign", (60,), (900,), width=2, values="zeros"),
    Problem("rows, several blocks", (3000,), (70,), width=8, spread="zipf", base="zeros"),
    Problem("rows of 768", (90,), (20,), 0, 768, "zipf", _BF16, base="zeros"),
    Problem("rows of 4096", (50,), (6,), 0, 4096, "zipf"),
    Problem("rows in lines", (3, 60), (5, 11), 1, 6, "zipf"),
    Problem("rows in lines, first axis", (60, 3), (11, 4), 0, 6, "zipf", _F16),
    Problem("rows in lines, several threads", (9, 4001), (9, 50), 1, 2, base="zeros"),
    Problem("elements", (700,), (90,), spread="zipf"),
    Problem("elements, float16", (700,), (90,), spread="zipf", dtype=_F16),
    Problem("elements, bfloat16", (700,), (90,), spread="zipf", dtype=_BF16, index_dtype=_I32),
    Problem("elements, float64", (700,), (90,), spread="zipf", dtype=_F64, base="kept"),
    Problem("elements, all equal", (4200,), (7,), spread="equal"),
    Problem("elements, all equal, bfloat16", (4096,), (7,), spread="equal", dtype=_BF16),
    Problem("elements, a million rows", (900,), (10**6,), spread="zipf", dtype=_BF16, base="zeros"),
    Problem("a tall table", (1200,), (40_000,), width=2, spread="zipf"),
    Problem("elements of a tall table, kept", (1200,), (30_000,), spread="zipf", base="kept", dtype=_F16,
            layouts=("sliced", "contiguous", "contiguous", "sliced")),
    Problem("elements, neighbouring long", (sum(LENGTHS),), (len(LENGTHS),), spread="lengths"),
    Problem("elements of a matrix, dim 0", (40, 9), (11, 9), 0),
    Problem("elements of a matrix, dim 1", (9, 40), (9, 11), 1, base="zeros"),
    Problem("elements of a matrix, tiles of columns", (3, 70), (2000, 70), 0),
    Problem("more terms in tiles of columns", (300, 70), (2000, 70), 0),
    Problem("elements of a matrix, tiles of lines", (40, 60), (40, 1000), 1, spread="zipf"),
    Problem("elements of a matrix, lines of 70", (450, 70), (11, 70), 0, spread="zipf"),
    Problem("elements of a part", (7, 4, 5), (9, 3, 6), 1, spread="zipf"),
    Problem("elements of rank 5", (2, 3, 8, 2, 3), (2, 4, 5, 2, 3), 2, index_dtype=_I32),
    Problem("alpha", (500,), (12,), width=9, spread="zipf", alpha=-0.3),
    Problem("alpha, elements, float16", (500,), (40,), spread="zipf", dtype=_F16, alpha=2.5),
    Problem("alpha, float64", (300,), (400,), width=3, spread="zipf", dtype=_F64, alpha=1 / 3),
    Problem("alpha zero", (300,), (40,), width=3, alpha=0.0),
    Problem("the smallest alpha", (300,), (40,), width=3, dtype=_F64, alpha=5e-324),
    Problem("mean", (500,), (12,), width=9, spread="zipf", reduce="mean"),
    Problem("mean, few terms, bfloat16", (60,), (500,), width=9, spread="zipf", dtype=_BF16, reduce="mean"),
    Problem("mean, kept", (500,), (70,), width=9, spread="zipf", base="kept", reduce="mean"),
    Problem("mean, zeros", (500,), (12,), width=9, spread="zipf", base="zeros", dtype=_F16, reduce="mean"),
    Problem("mean of elements", (9, 40), (9, 11), 1, spread="zipf", reduce="mean"),
    Problem("mean of elements, all equal", (1100,), (3,), spread="equal", base="kept", reduce="mean"),
    Problem("mean, float64", (1100,), (3,), width=300, spread="zipf", dtype=_F64, reduce="mean"),
    Problem("no terms", (0,), (5,), width=4),
    Problem("no terms, zeros", (0, 3), (5, 3), base="zeros"),
    Problem("no rows", (0,), (0,), width=4),
    Problem("no width", (4,), (3,), width=0),
    Problem("one term", (1,), (3,)),
    Problem("transposed", (130,), (9,), width=6, layouts=("transposed",) * 4),
    Problem("transposed elements", (13, 21), (15, 21), 0, layouts=("transposed",) * 4),
    Problem("sliced to padded rows", (130,), (9,), width=6, dtype=_F16,
            layouts=("sliced", "sliced", "sliced", "padded rows")),
    Problem("few terms, sliced to padded rows", (20,), (60,), width=6,
            layouts=("sliced", "contiguous", "contiguous", "padded rows")),
    Problem("sliced elements", (5, 30), (6, 30), 0, layouts=("padded rows", "sliced", "sliced", "sliced")),
    Problem("unaligned", (210,), (9,), width=64, layouts=("unaligned",) * 4),
    Problem("broadcast", (130,), (9,), width=6,
            layouts=("broadcast", "contiguous", "broadcast", "contiguous")),
    Problem("broadcast index in lines", (4, 40), (4, 9), 1, 6,
            layouts=("contiguous", "broadcast", "contiguous", "padded rows")),
    Problem("special values", (200,), (90,), width=6, values="special"),
    Problem("special values, bfloat16", (200,), (90,), width=6, dtype=_BF16, values="special", base="kept"),
    Problem("zeros of either sign", (60,), (90,), width=4, values="zeros"),
    Problem("zeros of either sign, more terms", (90,), (60,), width=4, spread="zipf", values="zeros"),
    Problem("elements, zeros of either sign", (60,), (90,), values="zeros", base="kept"),
    Problem("few columns", (1100,), (12,), width=3, spread="zipf"),
    Problem("few columns, neighbouring", (sum(LENGTHS),), (len(LENGTHS),), width=7, spread="lengths",
            dtype=_F64, alpha=0.7),
    Problem("few columns, mean, kept", (900,), (30,), width=2, spread="zipf", dtype=_F16, index_dtype=_I32,
            base="kept", reduce="mean", layouts=("padded rows", "sliced", "contiguous", "sliced")),
    Problem("few columns in lines, mean", (3, 400), (3, 5), 1, 4, dtype=_BF16, reduce="mean"),
    Problem("few columns, ascending", (700,), (6,), width=3, spread="sorted"),
    Problem("rows in lines, sliced", (4, 150), (4, 9), 1, 9,
            layouts=("sliced", "contiguous", "contiguous", "sliced")),
    Problem("more rows in lines, several threads", (9, 4001), (9, 50), 1, 8, base="zeros"),
    Problem("more rows, ascending, several threads", (600,), (40,), width=9, spread="sorted"),
    Problem("rows, kept", (60,), (70,), width=9, base="kept"),
    Problem("rows, sliced", (130,), (200,), width=9, layouts=("padded rows", "sliced", "sliced", "sliced")),
)  # fmt: skip


#: Problems that differ from others in fields of scatter alone.
_OF_SCATTER = (
    "alpha", "mean", "the smallest", "rows, few terms,", "rows, neighbouring", "no rows", "more",
    "few columns", "rows, kept", "rows in lines, sliced", "rows, sliced",
)  # fmt: skip

_OF_GATHER = (
    Problem("bad indices", (11, 30), (11, 19), 1, 8, "bad", bad_index="skip"),
    Problem("bad indices, elements", (330,), (19,), spread="bad", dtype=_BF16, index_dtype=_I32,
            bad_index="skip"),
    Problem("bad indices, elements in lines", (11, 30), (11, 19), 1, spread="bad", bad_index="skip"),
    Problem("no rows to read", (7,), (0,), width=4, bad_index="skip"),
    Problem("rows in lines, padded rows of sliced ones", (3, 60), (5, 11), 1, 6,
            layouts=("sliced", "contiguous", "contiguous", "padded rows")),
)  # fmt: skip


def cases(plan: AnyPlan) -> list[Case]:
    problems = list(PROBLEMS)
    if plan.op == "gather":
        problems = [*(p for p in PROBLEMS if not p.name.startswith(_OF_SCATTER)), *_OF_GATHER]
    return [case(plan, problem) for problem in problems]


def case(plan: AnyPlan, problem: Problem) -> Case:
    fields: dict[str, Any] = {
        "shape": problem.shape, "table": problem.table, "dim": problem.dim, "width": problem.width,
        "dtype": problem.dtype, "index_dtype": problem.index_dtype,
    }  # fmt: skip
    if plan.op == "gather":
        fields["bad_index"] = problem.bad_index
    else:
        fields |= {"base": problem.base, "reduce": problem.reduce, "alpha": problem.alpha}
    desc = plan.Descriptor(**fields)
    return Case(problem.name, desc, partial(_args, plan.Args, desc, problem))


def _args(args: Any, desc: Any, problem: Problem) -> Args:
    def values(name: str, layout: str) -> torch.Tensor | None:
        expected = desc.expected(name)
        if expected is None:
            return None
        shape, dtype = expected
        return laid_out(row_values(f"{name}/{problem.name}", shape, dtype, problem.values), layout)

    of_input, of_index, of_src, of_out = problem.layouts
    index = index_values(problem.spread, problem.name, desc.shape, desc.extent, desc.index_dtype)
    made: dict[str, Any] = {"input": values("input", of_input), "index": laid_out(index, of_index)}
    if "src" in args.inputs:
        made["src"] = values("src", of_src)
    shape, dtype = desc.expected("out")
    return cast(Args, args(**made, out=poisoned_output(shape, dtype, of_out)))

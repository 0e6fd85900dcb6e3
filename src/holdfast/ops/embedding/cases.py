"""Named test inputs of embedding and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast.core.case import Case, laid_out, outputs_of
from holdfast.core.plan import AnyPlan, Args
from holdfast.ops.segment_sum.cases import LENGTHS, index_values, row_values


@dataclass(frozen=True)
class Problem:
    """Parameters of a case. ``layouts`` are of the input, the indices and the output.

    ``padding`` is the descriptor's ``padding_idx``.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    columns: int
    spread: str = "uniform"
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    values: str = "spread"
    padding: int | None = None
    frequency: bool = False
    accumulate: bool = False
    bad_index: str = "raise"

    def indices(self) -> torch.Tensor:
        made = index_values(self.spread, f"embedding/{self.name}", self.shape, self.rows, self.index_dtype)
        return laid_out(made, self.layouts[1])


_F16, _BF16, _F64, _I32 = torch.float16, torch.bfloat16, torch.float64, torch.int32

_SHARED = (
    Problem("uniform", (5, 41), 23, 64),
    Problem("zipf in float16", (600,), 40, 17, "zipf", _F16),
    Problem("zipf in bfloat16", (600,), 40, 17, "zipf", _BF16, _I32),
    Problem("zipf in float64", (600,), 40, 17, "zipf", _F64),
    Problem("all equal", (1100,), 7, 5, "equal"),
    Problem("all distinct", (300,), 300, 64, "distinct", index_dtype=_I32),
    Problem("sorted", (400,), 60, 3, "sorted"),
    Problem("empty", (0, 3), 5, 4),
    Problem("no rows", (0,), 0, 4),
    Problem("no columns", (4,), 3, 0),
    Problem("one index of rank 0", (), 3, 5),
    Problem("D = 1", (200,), 90, 1, "zipf"),
    Problem("D = 768", (90,), 20, 768, "zipf", _BF16),
    Problem("D = 4096", (50,), 6, 4096, "zipf"),
    Problem("a million rows", (900,), 10**6, 1, "zipf", _BF16),
    Problem("more rows than indices", (200,), 300, 64, "zipf"),
    Problem("several blocks", (3000,), 70, 8, "zipf", _BF16),
    Problem("transposed input", (13, 21), 9, 6, layouts=("transposed", "contiguous", "contiguous")),
    Problem("transposed output", (6, 5), 9, 6, layouts=("contiguous", "transposed", "transposed")),
    Problem("sliced to padded rows", (130,), 9, 6, dtype=_F16, layouts=("sliced", "sliced", "padded rows")),
    Problem("unaligned", (6, 35), 9, 64, layouts=("unaligned", "unaligned", "unaligned")),
    Problem("special values", (200,), 90, 6, values="special"),
    Problem("special bfloat16", (200,), 90, 6, dtype=_BF16, values="special"),
    Problem("bad indices", (11, 30), 19, 8, "bad", bad_index="skip"),
    Problem("bad indices in int32", (330,), 19, 8, "bad", dtype=_BF16, index_dtype=_I32, bad_index="skip"),
)

_FORWARD = (
    Problem("no rows to read", (7,), 0, 4, bad_index="skip"),
    Problem("broadcast weight", (40,), 9, 6, layouts=("broadcast", "contiguous", "contiguous")),
    Problem(
        "bad indices, transposed", (13, 21), 19, 8, "bad", layouts=("contiguous", "transposed", "contiguous"),
        bad_index="skip",
    ),
)  # fmt: skip

_BACKWARD = (
    Problem("neighbouring long rows", (sum(LENGTHS),), len(LENGTHS), 9, "lengths"),
    Problem("32 times", (32,), 2, 3, "equal"),
    Problem("33 times", (33,), 2, 3, "equal"),
    Problem("4096 times in bfloat16", (4096,), 2, 3, "equal", _BF16),
    Problem("padding", (500,), 12, 9, "zipf", padding=0),
    Problem("padding everywhere", (40,), 7, 9, "equal", padding=3),
    Problem("padding with bad indices", (300,), 19, 8, "bad", padding=18),
    Problem("by frequency", (500,), 12, 9, "zipf", frequency=True),
    Problem("by frequency, padding, bfloat16", (500,), 12, 9, "zipf", _BF16, padding=2, frequency=True),
    Problem("by frequency in float64", (1100,), 3, 300, "zipf", _F64, frequency=True, accumulate=True),
    Problem("broadcast gradient", (130,), 9, 6, layouts=("broadcast", "contiguous", "contiguous")),
    Problem("accumulate", (120,), 60, 33, "zipf", accumulate=True),
    Problem("accumulate in bfloat16, padding", (500,), 12, 9, "zipf", _BF16, padding=1, accumulate=True),
    Problem("zeros of either sign", (60,), 40, 4, values="zeros"),
)


def cases(plan: AnyPlan) -> list[Case]:
    forward = plan.direction == "forward"
    return [case(plan, problem) for problem in (*_SHARED, *(_FORWARD if forward else _BACKWARD))]


def case(plan: AnyPlan, problem: Problem) -> Case:
    fields: dict[str, Any] = {
        "shape": problem.shape, "num_embeddings": problem.rows, "embedding_dim": problem.columns,
        "dtype": problem.dtype, "index_dtype": problem.index_dtype,
    }  # fmt: skip
    if plan.direction == "forward":
        fields["bad_index"] = problem.bad_index
    else:
        fields |= {"padding_idx": problem.padding, "scale_grad_by_freq": problem.frequency}
    desc = plan.Descriptor(**fields)
    return Case(problem.name, desc, partial(_args, plan.Args, desc, problem))


def _args(args: type[Args], desc: Any, problem: Problem) -> Args:
    def old(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return row_values(f"{name}/{problem.name}", shape, dtype)

    read = "dout" if "dout" in args.inputs else "weight"
    shape, dtype = desc.expected(read)
    values = row_values(f"{read}/{problem.name}", shape, dtype, problem.values)
    made: dict[str, Any] = {read: laid_out(values, problem.layouts[0]), "indices": problem.indices()}
    if problem.accumulate:
        made["accumulate"] = True
    return args(**made, **outputs_of(args, desc, problem.layouts[2], old if problem.accumulate else None))

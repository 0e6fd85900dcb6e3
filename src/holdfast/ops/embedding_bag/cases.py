"""Named test inputs of embedding_bag and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.core.case import Case, laid_out, outputs_of, random_bits
from holdfast.core.plan import AnyPlan, Args
from holdfast.ops.segment_sum.cases import LENGTHS, index_values, row_values


@dataclass(frozen=True)
class Problem:
    """Parameters of a case. ``layouts`` are of the inputs, of the indices, offsets and weights, and of the
    outputs. ``bags`` are the lengths of bags given by offsets; None for the rows of ``shape``. With ``last``
    the end of the last bag is an offset too.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    columns: int
    mode: str = "sum"
    bags: tuple[int, ...] | None = None
    spread: str = "uniform"
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    offsets_dtype: torch.dtype | None = None
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    values: str = "spread"
    padding: int | None = None
    weighted: bool = False
    last: bool = False
    bad_index: str = "raise"
    frequency: bool = False
    accumulate: bool = False
    gradients: tuple[bool, bool] | None = None
    upstream: str = ""  # layout of dout if it differs from the table's
    nan: bool = False  # a fifth of the table is NaN; for a maximum

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of both descriptors."""
        return {
            "shape": self.shape, "num_embeddings": self.rows, "embedding_dim": self.columns,
            "mode": self.mode, "dtype": self.dtype, "index_dtype": self.index_dtype,
            "offsets": None if self.bags is None else len(self.bags) + self.last,
            "offsets_dtype": self.offsets_dtype or self.index_dtype, "include_last_offset": self.last,
            "padding_idx": self.padding, "per_sample_weights": self.weighted,
        }  # fmt: skip

    @property
    def indices(self) -> torch.Tensor:
        made = index_values(
            self.spread, f"embedding_bag/{self.name}", self.shape, self.rows, self.index_dtype
        )
        return laid_out(made, self.layouts[1])

    @property
    def offsets(self) -> torch.Tensor | None:
        if self.bags is None:
            return None
        begins = np.concatenate([[0], np.cumsum(self.bags)])[: len(self.bags) + self.last].astype(np.int64)
        return laid_out(torch.from_numpy(begins).to(self.offsets_dtype or self.index_dtype), self.layouts[1])

    def real(self, what: str, *shape: int, layout: str = "") -> torch.Tensor:
        """Values of an input."""
        made = row_values(f"bag {what}/{self.name}", shape, self.dtype, self.values)
        return laid_out(made, layout or self.layouts[0])

    @property
    def weights(self) -> torch.Tensor | None:
        if not self.weighted:
            return None
        made = row_values(f"bag weights/{self.name}", self.shape, self.dtype, self.values)
        return laid_out(made, self.layouts[1])

    @property
    def table(self) -> torch.Tensor:
        """The table; for a maximum, of few distinct values, so that there are ties."""
        if self.mode != "max" or self.values != "spread":
            return self.real("table", self.rows, self.columns)
        few = random_bits(f"bag ties/{self.name}", self.rows * self.columns) % np.uint64(5)
        signed = torch.from_numpy(few.astype(np.int64) - 2).to(self.dtype).reshape(self.rows, self.columns)
        made = torch.where(signed == 0, -0.0, signed).to(self.dtype)
        return laid_out(torch.where(signed == 2, torch.nan, made) if self.nan else made, self.layouts[0])


_F16, _BF16, _F64, _I32, _I64 = torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64
_ALL = sum(LENGTHS)

_SHARED = (
    Problem("bags of one size", (7, 12), 23, 64),
    Problem("mean of bags of one size", (7, 12), 23, 64, "mean"),
    Problem("bags of many sizes", (_ALL,), 40, 9, bags=LENGTHS),
    Problem("mean of bags of many sizes", (_ALL,), 40, 9, "mean", LENGTHS, index_dtype=_I32),
    Problem("largest of bags of many sizes", (_ALL,), 40, 9, "max", LENGTHS),
    Problem("float16", (_ALL,), 30, 17, "mean", LENGTHS, dtype=_F16, offsets_dtype=_I32),
    Problem("bfloat16", (_ALL,), 30, 17, "mean", LENGTHS, dtype=_BF16, index_dtype=_I32, offsets_dtype=_I64),
    Problem("float64", (_ALL,), 30, 17, "mean", LENGTHS, dtype=_F64),
    Problem("largest in bfloat16", (9, 20), 30, 17, "max", dtype=_BF16),
    Problem("largest in float64", (9, 20), 30, 17, "max", dtype=_F64),
    Problem("largest in float16", (9, 20), 30, 41, "max", dtype=_F16),
    Problem("largest of transposed rows", (9, 20), 30, 41, "max", padding=2,
            layouts=("transposed", "contiguous", "padded rows")),
    Problem("weighted", (_ALL,), 40, 33, bags=LENGTHS, weighted=True),
    Problem("weighted in bfloat16", (9, 40), 30, 17, dtype=_BF16, weighted=True, padding=3),
    Problem("weighted in float64", (9, 40), 30, 17, dtype=_F64, weighted=True),
    Problem("one long bag", (1100,), 70, 5, "mean", (1100,), "zipf"),
    Problem("long rows", (3, 1030), 70, 5, spread="zipf", dtype=_BF16),
    Problem("padding", (_ALL,), 12, 9, "mean", LENGTHS, "zipf", padding=0),
    Problem("padding in a sum", (9, 40), 6, 9, spread="zipf", padding=1),
    Problem("padding in a maximum", (9, 40), 6, 9, "max", spread="zipf", padding=0),
    Problem("padding everywhere", (4, 10), 7, 9, "mean", spread="equal", padding=3),
    Problem("padding everywhere in a maximum", (4, 10), 7, 9, "max", spread="equal", padding=3),
    Problem("the last offset included", (90,), 12, 9, "mean", (5, 0, 60, 25), last=True),
    Problem("indices beyond the last bag", (90,), 12, 9, "mean", (5, 0, 41), last=True),
    Problem("bad indices", (11, 30), 19, 8, "mean", spread="bad", bad_index="skip"),
    Problem("bad indices in int32", (330,), 19, 8, "max", (7, 100, 223), "bad", index_dtype=_I32,
            bad_index="skip"),
    Problem("no indices", (0,), 5, 4, "mean", (0, 0, 0)),
    Problem("bags of nothing", (3, 0), 5, 4, "max"),
    Problem("no rows", (0,), 0, 4, "sum", (0, 0)),
    Problem("no columns", (2, 4), 3, 0),
    Problem("D = 1", (200,), 90, 1, "sum", (20, 100, 80), "zipf"),
    Problem("D = 768", (5, 18), 20, 768, "mean", spread="zipf", dtype=_BF16),
    Problem("D = 4096", (5, 10), 6, 4096, spread="zipf", weighted=True),
    Problem("a million rows", (900,), 10**6, 1, "mean", (400, 500), "zipf"),
    Problem("every layout", (130,), 9, 6, "mean", (30, 0, 100), dtype=_F16,
            layouts=("sliced", "sliced", "padded rows")),
    Problem("transposed", (13, 21), 9, 70, weighted=True, layouts=("transposed", "transposed", "transposed")),
    Problem("unaligned", (6, 35), 9, 64, "max", layouts=("unaligned", "unaligned", "unaligned")),
    Problem("special values", (40, 3), 30, 6, "mean", values="special"),
    Problem("largest of special values", (40, 3), 12, 6, "max", values="special"),
    Problem("largest of several NaN", (6, 8), 12, 41, "max", nan=True),
    Problem("special weights", (40, 3), 12, 6, values="special", weighted=True, padding=1),
    Problem("zeros of either sign", (15, 4), 40, 4, values="zeros"),
    Problem("largest of zeros of either sign", (13, 8), 6, 9, "max", values="zeros"),
    Problem("largest of long rows in float64", (5, 6), 10, 1500, "max", dtype=_F64),
    Problem("many bags", (150, 2), 40, 260, "mean", padding=1),
    Problem("largest of distinct values", (130,), 100, 9, "max", (1, 1, 0, 1, 1, 1, 125), values="exponents"),
    Problem("weighted vectors of columns", (_ALL,), 40, 250, bags=LENGTHS, weighted=True),
)  # fmt: skip

_BACKWARD = (
    Problem("all equal", (1100,), 7, 5, "mean", (1000, 100), "equal"),
    Problem("all equal in bfloat16", (64, 64), 3, 3, spread="equal", dtype=_BF16),
    Problem("by frequency", (_ALL,), 12, 9, "mean", LENGTHS, "zipf", frequency=True, padding=2),
    Problem("by frequency, weighted", (9, 40), 12, 9, spread="zipf", weighted=True, frequency=True),
    Problem("by frequency, beyond", (90,), 12, 9, "sum", (5, 0, 41), last=True, frequency=True),
    Problem("accumulate", (12, 10), 60, 33, spread="zipf", weighted=True, padding=1, accumulate=True),
    Problem("accumulate in bfloat16", (12, 10), 60, 33, "max", spread="zipf", dtype=_BF16, accumulate=True),
    Problem("the table's gradient alone", (5, 10), 6, 9, weighted=True, gradients=(True, False)),
    Problem("the weights' gradient alone", (60,), 6, 1100, "sum", (20, 0, 20), weighted=True, padding=2,
            last=True, gradients=(False, True)),
    Problem("special weights in no bag", (40,), 6, 3, "sum", (0,), values="special", weighted=True, last=True,
            accumulate=True),
    Problem("special weights without bags", (40,), 6, 3, "sum", (), values="special", weighted=True),
    Problem("broadcast gradient", (13, 10), 9, 6, layouts=("broadcast", "contiguous", "contiguous")),
    Problem("dout in another layout", (13, 10), 9, 70, weighted=True, upstream="padded rows"),
    Problem("maxima in many chunks of a row", (12, 10), 1, 9, "max", spread="equal"),
    Problem("maxima in groups of chunks", (12, 210), 2, 9, "max", spread="zipf"),
    Problem("accumulate to zeros of either sign", (5, 8), 6, 9, "max", values="zeros", accumulate=True),
)  # fmt: skip

#: Shared problems whose backward is covered by others.
_FORWARD_ALONE = (
    "float64", "padding in a sum", "mean of bags of one size", "bags of nothing", "special values",
    "many bags", "weighted vectors of columns", "largest of zeros of either sign",
)  # fmt: skip


def cases(plan: AnyPlan) -> list[Case]:
    if plan.direction == "forward":
        return [case(plan, problem) for problem in _SHARED]
    shared = [problem for problem in _SHARED if problem.name not in _FORWARD_ALONE]
    return [case(plan, problem) for problem in (*shared, *_BACKWARD)]


def case(plan: AnyPlan, problem: Problem) -> Case:
    more: dict[str, Any] = {"bad_index": problem.bad_index}
    if plan.direction == "backward":
        of_table, of_weights = problem.gradients or (True, problem.weighted)
        more = {"scale_grad_by_freq": problem.frequency}
        more |= {"dweight": of_table, "dper_sample_weights": of_weights}
    desc = plan.Descriptor(**problem.fields, **more)
    return Case(problem.name, desc, partial(_args, plan.Args, desc, problem))


def _args(args: type[Args], desc: Any, problem: Problem) -> Args:
    def old(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        values = "zeros" if problem.values == "zeros" else "spread"
        return row_values(f"bag {name}/{problem.name}", shape, dtype, values)

    made: dict[str, Any] = {"indices": problem.indices, "offsets": problem.offsets}
    made |= {"per_sample_weights": problem.weights, "weight": problem.table}
    made = {name: value if desc.expected(name) else None for name, value in made.items()}
    if "dout" in args.inputs:
        made["dout"] = problem.real("dout", desc.bags, problem.columns, layout=problem.upstream)
        made["accumulate"] = problem.accumulate
    return args(**made, **outputs_of(args, desc, problem.layouts[2], old if problem.accumulate else None))

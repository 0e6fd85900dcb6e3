"""Named test inputs of affine_grid: both ranks and alignments, all dtypes, several sizes and layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch

from holdfast.core.case import Case, laid_out, outputs_of
from holdfast.core.dtypes import FLOATS, float_dtype
from holdfast.core.plan import AnyPlan, Args
from holdfast.core.values import of_any_bits, of_every_exponent, rounded, special_values, spread


@dataclass(frozen=True)
class Problem:
    """Parameters of a case; ``layouts`` are of the input and of the output."""

    name: str
    size: tuple[int, ...] = (7, 11)
    batch: int = 2
    aligned: bool = False
    dtype: torch.dtype = torch.float32
    values: str = "spread"
    layouts: tuple[str, str] = ("contiguous", "contiguous")
    accumulate: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        axes = len(self.size)
        return {
            "shape": (self.batch, axes, axes + 1), "output_size": self.size, "align_corners": self.aligned,
            "dtype": self.dtype,
        }  # fmt: skip


def problems() -> list[Problem]:
    found = []
    for (name, record), size, aligned in product(FLOATS.items(), ((7, 11), (3, 5, 6)), (False, True)):
        title = f"{len(size)}-d, {'corners' if aligned else 'edges'} aligned, {name}"
        found.append(Problem(title, size, 2, aligned, record.torch))
    padded = Problem("sliced to padded rows", layouts=("sliced", "padded rows"), dtype=torch.bfloat16)
    return [
        *found,
        Problem("one place, corners aligned", (1, 1), aligned=True),
        Problem("one place", (1, 1, 1), batch=3),
        Problem("one row", (1, 300), aligned=True),
        Problem("one column", (300, 1)),
        Problem("more than a block", (67, 131)),
        Problem("ten blocks in float64", (191, 197), 1, dtype=torch.float64),
        Problem("no places", (4, 0), accumulate=True),
        Problem("no images", batch=0),
        Problem("special values", values="special"),
        Problem("transposed", layouts=("transposed", "transposed"), accumulate=True),
        replace(padded, accumulate=True),
        Problem("one for all", (3, 5, 6), layouts=("broadcast", "contiguous"), batch=3),
        Problem("unaligned", layouts=("unaligned", "unaligned"), dtype=torch.float16),
    ]


def cases(plan: AnyPlan) -> list[Case]:
    return [case(plan, problem) for problem in problems()]


def case(plan: AnyPlan, problem: Problem) -> Case:
    desc = plan.Descriptor(**problem.fields)
    return Case(problem.name, desc, partial(_args, plan.Args, desc, problem))


def _values(problem: Problem, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    record = float_dtype(problem.dtype, "dtype")
    values = rounded(spread(f"{name}/{problem.name}", prod(shape), record.precision, -9, 5), problem.dtype)
    if problem.values == "special":
        wanted, found = special_values(record), values[::2]
        found.copy_(wanted.repeat(-(-len(found) // len(wanted)))[: len(found)])
    elif problem.values == "exponents":
        values = of_every_exponent(f"{name}/{problem.name}", prod(shape), record)
    elif problem.values == "any bits":
        values = of_any_bits(f"{name}/{problem.name}", prod(shape), record)
    return values.reshape(shape)


def _args(args: type[Args], desc: Any, problem: Problem) -> Args:
    def old(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _values(problem, name, shape)

    of_input, of_output = problem.layouts
    (read,) = args.inputs
    made: dict[str, Any] = {read: laid_out(_values(problem, read, desc.expected(read)[0]), of_input)}
    if "accumulate" in args.flags:
        made["accumulate"] = problem.accumulate
    return args(**made, **outputs_of(args, desc, of_output, old if made.get("accumulate") else None))

"""Cases of observe_range and choose_scale: segments, shapes, layouts, dtypes and rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from holdfast.core.case import Case, laid_out, poisoned_output
from holdfast.core.dtypes import FLOATS, Float, float_dtype
from holdfast.core.formats import INT2, INT4, UINT2, UINT4
from holdfast.core.granularity import ONE_SCALE, Granularity, PerChannel, PerGroup, PerToken
from holdfast.core.plan import AnyPlan, Args
from holdfast.core.values import of_every_exponent, rounded, special_values, spread


@dataclass(frozen=True)
class Problem:
    """The settings of a case."""

    name: str
    granularity: Granularity = ONE_SCALE
    shape: tuple[int, ...] = (37, 45)
    real: torch.dtype = torch.float32
    codes: torch.dtype = torch.int8
    limits: tuple[int, int] | None = None
    symmetric: bool = True
    narrow: bool | None = None
    values: str = "spread"
    layout: str = "contiguous"
    results: str = "contiguous"

    @property
    def rule(self) -> dict[str, Any]:
        """The fields of the descriptor."""
        q_min, q_max = self.limits or (None, None)
        return {
            "shape": self.shape, "input_dtype": self.real, "output_dtype": self.codes,
            "q_min": q_min, "q_max": q_max, "granularity": self.granularity,
            "symmetric": self.symmetric, "narrow": self.narrow,
        }  # fmt: skip


def segment_values(record: Float) -> dict[str, list[float]]:
    """Values of difficult segments, by kind; finite ones first."""
    info = torch.finfo(record.torch)
    least = 2.0 ** -(149 if record.bits == 32 else 1074 if record.bits == 64 else 24)
    if record.torch == torch.bfloat16:
        least = 2.0**-133
    tiny = max(1e-14, 4 * least)
    return {
        "zeros": [0.0, 0.0], "zeros of either sign": [-0.0, 0.0, -0.0], "minus zeros": [-0.0, -0.0],
        "least": [least, -least, 0.0], "below the floor": [tiny, -3 * tiny, tiny / 2],
        "positive": [0.75, 3.0, 0.1], "negative": [-0.3, -7.0, -1.0],
        "largest": [float(info.max), -float(info.max), 1.0], "mostly negative": [-100.0, 1.0, 0.4],
        "NaN": [1.0, float("nan"), -2.0], "negative NaN": [1.0, -float("nan"), 2.0],
        "infinity": [1.0, float("inf"), -3.0], "minus infinity": [-1.0, float("-inf"), 3.0],
        "both infinities": [float("inf"), 1.0, float("-inf")],
        "NaN and infinity": [float("inf"), float("nan"), float("-inf")],
    }  # fmt: skip


def input_values(problem: Problem) -> torch.Tensor:
    """The elements of x: random or special values, or difficult segments."""
    record, count = float_dtype(problem.real, "real"), prod(problem.shape)
    values = rounded(spread(f"x/{problem.name}", count, record.precision, -9, 5), record.torch)
    if problem.values == "special":
        found = values[::2]
        wanted = special_values(record)
        found.copy_(wanted.repeat(-(-count // len(wanted)))[: len(found)])
    elif problem.values == "exponents":
        values = of_every_exponent(f"x/{problem.name}", count, record)
    elif problem.values != "spread" and count:
        kinds = segment_values(record)
        _fill(problem, values, list(kinds.values()) if problem.values == "mixed" else [kinds[problem.values]])
    return values.reshape(problem.shape)


def _fill(problem: Problem, values: torch.Tensor, kinds: list[list[float]]) -> None:
    """Fill segment i with values of kind i modulo the number of kinds, rotated differently each time."""
    view = problem.granularity.view(problem.shape)
    numbers = torch.arange(view.scale_count).reshape(view.scale_shape)
    steps = view.scale_strides(numbers.shape, numbers.stride())
    assert steps is not None
    of_element = numbers.as_strided(view.shape, steps).reshape(-1).numpy()
    places = np.argsort(of_element, kind="stable").reshape(view.scale_count, -1)
    for first, kind in enumerate(kinds):
        own = np.arange(first, view.scale_count, len(kinds))
        turn = np.arange(places.shape[1]) - (own // len(kinds))[:, None]
        chosen = rounded(np.array(kind)[turn % len(kind)], problem.real)
        values[torch.from_numpy(places[own])] = chosen


_INT4, _UINT4, _INT2, _UINT2 = (f.torch for f in (INT4, UINT4, INT2, UINT2))


def rules() -> list[Problem]:
    """Every rule and every code dtype, with segments of every kind."""
    mixed = Problem("", PerChannel(0), (33, 40), values="mixed")
    affine = replace(mixed, symmetric=False)
    found = [
        replace(mixed, name=f"segments of every kind in {name}", real=record.torch)
        for name, record in FLOATS.items()
    ]
    found += [
        replace(affine, name=f"segments of every kind in {name}, with zero points", real=record.torch)
        for name, record in FLOATS.items()
    ]
    found += [
        replace(mixed, name="the whole range", narrow=False),
        replace(
            mixed, name="the whole range of int2 in bfloat16", narrow=False, codes=_INT2, real=torch.bfloat16
        ),
        replace(mixed, name="int4", codes=_INT4),
        replace(mixed, name="int16", codes=torch.int16),
        replace(mixed, name="a range with more codes above", limits=(-3, 100)),
        replace(mixed, name="codes in float32", codes=torch.float32, limits=(-60000, 60000)),
        replace(affine, name="uint8", codes=torch.uint8),
        replace(affine, name="uint4 without its lowest", codes=_UINT4, narrow=True, real=torch.float16),
        replace(affine, name="two codes", codes=_UINT2, limits=(1, 2)),
        replace(affine, name="uint16", codes=torch.uint16),
        replace(mixed, name="float8_e4m3fn", codes=torch.float8_e4m3fn),
        replace(mixed, name="float8_e4m3fn in float64", codes=torch.float8_e4m3fn, real=torch.float64),
    ]
    return found


def places() -> list[Problem]:
    """Shapes, layouts and granularities."""
    image = Problem("", PerChannel(1), (2, 3, 5, 7))
    return [
        Problem("rank 0", shape=(), symmetric=False),
        Problem("one element of a token", PerToken(), (9, 1), symmetric=False),
        Problem("a token of rank 0", PerToken(), ()),
        Problem("rank 8", PerGroup(3, axis=6), (2, 1, 3, 2, 1, 2, 3, 2), symmetric=False),
        Problem("no elements", shape=(3, 0, 5), symmetric=False),
        Problem("channels without elements", PerChannel(0), (4, 0)),
        Problem("no channels", PerChannel(0), (0, 4)),
        Problem("per tensor", values="special"),
        Problem("per tensor, in pieces", shape=(9, 8003), real=torch.bfloat16, symmetric=False),
        Problem("last axis", PerChannel(-1), (43, 21), symmetric=False, values="mixed"),
        Problem("last axis, in pieces", PerChannel(1), (5001, 20), symmetric=False, narrow=True),
        Problem("middle axis, in pieces", PerChannel(1), (3, 2, 20_011), narrow=False),
        Problem("many short runs", PerChannel(1), (4001, 3, 7), real=torch.float16, symmetric=False),
        Problem("per token", PerToken(), (5, 7, 200), real=torch.bfloat16, values="mixed"),
        Problem("long tokens", PerToken(), (3, 20_001), real=torch.float64, symmetric=False),
        Problem("per group", PerGroup(32), (7, 96), real=torch.bfloat16, values="mixed"),
        Problem("groups of the first axis", PerGroup(3, axis=0), (12, 41), symmetric=False, values="mixed"),
        replace(image, name="transposed", layout="transposed", symmetric=False, results="sliced"),
        replace(image, name="channels last", layout="channels last", values="special", results="sliced"),
        replace(image, name="broadcast", layout="broadcast", granularity=PerToken()),
        Problem("sliced", PerToken(), (9, 31), torch.bfloat16, symmetric=False, layout="sliced"),
        Problem("unaligned", layout="unaligned", shape=(3, 1021)),
        Problem("padded rows", PerGroup(5), (11, 25), layout="padded rows", real=torch.float16, narrow=False),
    ]  # fmt: skip


def cases(plan: AnyPlan) -> list[Case]:
    """All cases of ``plan``. A range does not depend on the rule."""
    if plan.op == "choose_scale":
        return [case(plan, problem) for problem in [*rules(), *places()]]
    ranges = [problem for problem in rules() if problem.name.startswith("segments") and problem.symmetric]
    return [case(plan, problem) for problem in [*ranges, *places()]]


def case(plan: AnyPlan, problem: Problem) -> Case:
    fields = problem.rule
    if plan.op == "observe_range":
        fields = {name: fields[name] for name in ("shape", "input_dtype", "granularity")}
    desc = plan.Descriptor(**fields)
    return Case(problem.name, desc, partial(_args, plan.Args, desc, problem))


def _args(args: type[Args], desc: Any, problem: Problem) -> Args:
    outputs = {name: result(desc, problem, name) for name in args.outputs}
    if "zero_point" in outputs and problem.symmetric:
        del outputs["zero_point"]
    return args(**outputs, x=laid_out(input_values(problem), problem.layout))  # type: ignore[call-arg]


def result(descriptor: Any, problem: Problem, name: str) -> torch.Tensor:
    """An output with one value per scale."""
    shape, dtype = descriptor.expected(name)
    return poisoned_output(shape, dtype, problem.results if shape else "contiguous")

"""Cases of dynamic_fake_quantize and its backward.

The forward has the unpacked problems of dynamic_quantize. The backward has segments of every kind with each
estimator, and scales that were not chosen for x. A floating code dtype means that the descriptor has a range
and no dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from holdfast.core.case import Case, laid_out, poisoned_output
from holdfast.core.dtypes import FLOATS, dtype_name
from holdfast.core.formats import INT2, INT4, UINT2, UINT4, format_of
from holdfast.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.plan import AnyPlan
from holdfast.numerics.reference import widen
from holdfast.ops.choose_scale.cases import input_values, result
from holdfast.ops.choose_scale.reference import observe_range, scale_of_range, zero_point_of_range
from holdfast.ops.dynamic_fake_quantize.plan import (
    DynamicFakeQuantizeArgs,
    DynamicFakeQuantizeBackwardArgs,
    DynamicFakeQuantizeDescriptor,
)
from holdfast.ops.dynamic_quantize.cases import Problem as DynamicProblem
from holdfast.ops.dynamic_quantize.cases import problems as dynamic_problems
from holdfast.ops.fake_quantize.plan import SteKind

_INT4, _UINT4, _INT2, _UINT2 = (f.torch for f in (INT4, UINT4, INT2, UINT2))
_REALS = [record.torch for record in FLOATS.values()]


@dataclass(frozen=True)
class Problem(DynamicProblem):
    """The settings of a case.

    ``chosen``: the scale of a backward is that of x, not of other data. ``upstream`` is the layout of dy, if
    it is not that of x.
    """

    ste: SteKind = SteKind.IN_RANGE
    chosen: bool = True
    accumulate: bool = False
    upstream: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that the descriptors of both directions have."""
        rule = self.rule
        codes = rule.pop("output_dtype")
        return rule | {"dtype": None if format_of(codes, "codes").carried else codes}


def _forward_problems() -> Iterator[Problem]:
    for problem in dynamic_problems():
        if not problem.packed:
            yield Problem(**vars(problem))
    token = Problem("", PerToken(), (33, 40), values="mixed")
    affine = replace(token, symmetric=False)
    yield replace(token, name="int2, the whole range", codes=_INT2, narrow=False)
    yield replace(affine, name="uint4 of odd tokens", codes=_UINT4, shape=(33, 41), real=torch.bfloat16)
    yield replace(affine, name="uint2 in groups", granularity=PerGroup(8), codes=_UINT2, real=torch.float16)
    yield replace(token, name="more codes above", limits=(-3, 100), real=torch.bfloat16)
    yield replace(affine, name="two codes", codes=_UINT2, limits=(1, 2))
    yield replace(token, name="values of every exponent", values="exponents", shape=(90, 33))
    yield replace(affine, name="exponents, zero points", values="exponents", real=torch.float16)
    yield Problem("rows of a weight", PerChannel(0), (5, 3, 7, 9), codes=_INT4, values="mixed")
    yield Problem("tokens of 16,384", PerToken(), (3, 16_384), torch.bfloat16, codes=_INT4)
    yield Problem("float8 for two passes", PerToken(), (1, 33_001), codes=torch.float8_e4m3fn)


def _backward_problems() -> Iterator[Problem]:
    token = Problem("", PerToken(), (33, 40), values="mixed")
    grain = (PerToken(), PerGroup(8), PerChannel(0), PerChannel(1), PerTensor())
    for i, ste in enumerate(SteKind):
        for j, real in enumerate(_REALS):
            problem = replace(token, real=real, ste=ste, granularity=grain[(i + j) % 4])
            name = f"{ste}: segments of every kind in {dtype_name(real)}"
            yield replace(problem, name=name, codes=_INT4 if ste is SteKind.TANH else torch.int8)
            yield replace(problem, name=f"{name}, zero points", symmetric=False, codes=torch.uint8)
        yield replace(token, name=f"{ste}: scales of other data", ste=ste, chosen=False, codes=_INT4)
        yield replace(token, name=f"{ste}: float8", ste=ste, codes=torch.float8_e4m3fn, shape=(34, 24))
    for granularity in grain:
        name = f"in range: special values, {granularity.name}"
        yield Problem(name, granularity, (18, 24), values="special", narrow=False)
        yield Problem(f"{name}, another scale", granularity, (18, 24), values="special", chosen=False)
    yield replace(token, name="in range: accumulate", accumulate=True, real=torch.bfloat16)
    yield replace(token, name="in range: accumulate groups", accumulate=True, granularity=PerGroup(4))
    yield replace(token, name="in range: accumulate, zero points", accumulate=True, symmetric=False)
    yield replace(token, name="in range: a square", shape=(31, 31))
    image = Problem("", PerChannel(1), (2, 6, 5, 7), values="mixed")
    yield replace(image, name="in range: channels last", layout="channels last", written="transposed")
    yield replace(image, name="in range: dy in another layout", upstream="transposed", shape=(4, 16, 5, 7))
    yield replace(image, name="in range: transposed", layout="transposed", results="sliced")
    yield replace(token, name="in range: sliced", layout="sliced", written="padded rows", real=torch.float16)
    yield Problem("in range: long tokens", PerToken(), (15, 9001), values="mixed")
    yield Problem("in range: rank 0", shape=())
    yield Problem("in range: empty tokens", PerToken(), (4, 0))
    yield Problem("in range: many groups", PerGroup(32), (600, 1024), torch.bfloat16)


def cases(plan: AnyPlan) -> list[Case]:
    problems = _forward_problems() if plan.direction == "forward" else _backward_problems()
    return [case(plan, problem) for problem in problems]


def case(plan: AnyPlan, problem: Problem) -> Case:
    forward = DynamicFakeQuantizeDescriptor(**problem.fields)
    if plan.direction == "forward":
        return Case(problem.name, forward, partial(_forward_args, forward, problem))
    fields = {name: value for name, value in problem.fields.items() if name != "narrow"}
    fields["ste"] = problem.ste
    return Case(problem.name, plan.Descriptor(**fields), partial(_backward_args, forward, problem))


def _forward_args(descriptor: DynamicFakeQuantizeDescriptor, problem: Problem) -> DynamicFakeQuantizeArgs:
    return DynamicFakeQuantizeArgs(
        x=laid_out(input_values(problem), problem.layout),
        y=poisoned_output(problem.shape, problem.real, problem.written),
        scale=result(descriptor, problem, "scale"),
        zero_point=None if problem.symmetric else result(descriptor, problem, "zero_point"),
    )


def _backward_args(
    forward: DynamicFakeQuantizeDescriptor, problem: Problem
) -> DynamicFakeQuantizeBackwardArgs:
    x = input_values(problem)
    dx = poisoned_output(problem.shape, problem.real, problem.written)
    if problem.accumulate:
        dx.copy_(_spread(problem, "dx"))
    observed = x if problem.chosen else x.flatten().roll(3).reshape(x.shape)
    ends = forward.ends(*forward.code_range)
    low, high = observe_range(widen(observed, forward.real.compute), problem.granularity)
    found = scale_of_range(low, high, *ends, problem.symmetric)
    scale, zero_point = result(forward, problem, "scale").copy_(torch.from_numpy(found)), None
    if not problem.symmetric:
        points = torch.from_numpy(zero_point_of_range(low, found, *ends))
        zero_point = result(forward, problem, "zero_point").copy_(points)
    dy = laid_out(_spread(problem, "dy"), problem.upstream or problem.layout)
    return DynamicFakeQuantizeBackwardArgs(
        dy=dy, x=laid_out(x, problem.layout), scale=scale, zero_point=zero_point, dx=dx,
        accumulate=problem.accumulate,
    )  # fmt: skip


def _spread(problem: Problem, label: str) -> torch.Tensor:
    """Ordinary and special values, for a gradient."""
    values = input_values(replace(problem, name=f"{label}/{problem.name}", values="special"))
    return values.flatten().roll(7).reshape(problem.shape)

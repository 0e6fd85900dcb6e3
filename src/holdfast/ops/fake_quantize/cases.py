"""Cases of fake_quantize and its backward.

The lists are not the product of all settings. Every dtype, granularity, estimator, layout and kind of scale
occurs, and settings that interact in a kernel occur together. A floating code dtype means that the
descriptor has a range and no dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from holdfast.core.case import Case
from holdfast.core.dtypes import FLOATS, dtype_name
from holdfast.core.formats import FLOAT_FORMATS, INT2, INT4, INTEGERS, UINT2, UINT4, format_of
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.plan import AnyPlan, Args
from holdfast.ops.affine.cases import (
    EVERY_SIZE,
    ODD_ROWS,
    accumulating,
    float_fields,
    make_args,
    real_values,
    shapes_of,
)
from holdfast.ops.affine.cases import Problem as AffineProblem
from holdfast.ops.fake_quantize.plan import SteKind

_GRANULARITIES: tuple[type[Granularity], ...] = (PerTensor, PerChannel, PerToken, PerGroup)
_REALS = [record.torch for record in FLOATS.values()]
_CODES = [record.torch for record in INTEGERS.values()]
_INT4 = INT4.torch


@dataclass(frozen=True)
class Problem(AffineProblem):
    """The settings of a case. ``factor`` multiplies the gradients of a learned scale and zero point."""

    ste: SteKind = SteKind.IN_RANGE
    factor: float = 0.3


_ODD_ROWS = [Problem(**vars(problem)) for problem in ODD_ROWS]


def cases(plan: AnyPlan) -> list[Case]:
    problems = _forward_problems() if plan.direction == "forward" else _backward_problems()
    return [case(plan, problem) for problem in problems]


def plain(kind: type[Granularity], **fields: Any) -> Problem:
    """A problem of granularity ``kind`` with a plain shape."""
    shape, granularity = shapes_of(kind).plain
    return replace(Problem("plain", granularity, shape), **fields)


def image(kind: type[Granularity], **fields: Any) -> Problem:
    """A problem of rank 4."""
    shape, granularity = shapes_of(kind).image
    return replace(Problem("image", granularity, shape), **fields)


def odd(kind: type[Granularity], name: str, **fields: Any) -> Problem:
    """A problem with the odd shape ``name`` of granularity ``kind``."""
    shape, granularity = shapes_of(kind).odd[name]
    return replace(Problem(f"{granularity.name}, {name}", granularity, shape), **fields)


def many(kind: type[Granularity], **fields: Any) -> Problem:
    """A problem with enough elements for every thread."""
    shape, granularity = shapes_of(kind).many
    return replace(Problem(f"{granularity.name}, many elements", granularity, shape), **fields)


def _forward_problems() -> Iterator[Problem]:
    for i, kind in enumerate(_GRANULARITIES):
        for j, real in enumerate(_REALS):
            codes, values = _CODES[(2 * i + 3 * j) % len(_CODES)], ("special", "ties")[(i + j) % 2]
            problem = plain(kind, real=real, codes=codes, values=values)
            name = f"{problem.granularity.name}, {dtype_name(real)}, {values}, {dtype_name(codes)}"
            yield replace(problem, name=name)
    yield plain(PerTensor, name="host scale", scale="host", zero_point="none")
    yield plain(PerTensor, name="host scale in float64", scale="host", zero_point="host", real=torch.float64)
    yield plain(PerTensor, name="scale in bfloat16", scale="own", zero_point="none", real=torch.bfloat16)
    yield plain(PerChannel, name="unusual scales", values="special", scale="unusual mixed")
    yield plain(PerChannel, name="scales of every size", **EVERY_SIZE)
    yield plain(PerGroup, name="unusual scales, 0 out of range", values="special", scale="unusual mixed",
                limits=(3, 60), zero_point="none")  # fmt: skip
    yield plain(PerChannel, name="zero points far out", values="ties", zero_point="far mixed")
    yield plain(PerTensor, name="ties, odd zero point", values="ties", scale="dyadic", zero_point="odd")
    yield plain(PerTensor, name="floating zero point", values="ties", zero_point="floating")
    yield plain(PerChannel, name="floating zero points", values="ties", zero_point="floating")
    yield plain(PerToken, name="zero points in bfloat16", real=torch.bfloat16, zero_point="floating own")
    yield plain(PerChannel, name="zero points in float64", real=torch.float64, zero_point="floating own")
    yield plain(PerTensor, name="one code", limits=(4, 4), values="ties")
    yield plain(PerToken, name="a range without a dtype", codes=torch.float32, limits=(-65536, 65536))
    yield plain(PerTensor, name="no more than zero", limits=(-7, 0), zero_point="none", values="ties")
    yield image(PerChannel, name="transposed input", layouts=("transposed", "contiguous"))
    yield image(
        PerTensor, name="transposed output", layouts=("contiguous", "transposed"), real=torch.bfloat16
    )
    yield image(PerChannel, name="channels last", layouts=("channels last", "channels last"))
    yield plain(PerToken, name="sliced to padded rows", layouts=("sliced", "padded rows"), real=torch.float16)
    yield plain(PerGroup, name="broadcast, unaligned", layouts=("broadcast", "unaligned"), scale="strided",
                zero_point="strided")  # fmt: skip
    yield from _of_float_formats()
    yield odd(PerTensor, "rank 0")
    yield odd(PerTensor, "empty")
    yield odd(PerChannel, "last axis, wide", real=torch.bfloat16)
    yield odd(PerChannel, "no channels")
    yield odd(PerToken, "tokens of one")
    yield odd(PerGroup, "first axis")
    yield odd(PerGroup, "rank 8")
    yield many(PerTensor)
    yield many(PerChannel, real=torch.bfloat16)
    yield from _ODD_ROWS


def _of_float_formats() -> Iterator[Problem]:
    for codes in FLOAT_FORMATS.values():
        for i, kind in enumerate(_GRANULARITIES):
            for j, real in enumerate(_REALS):
                values = ("special", "ties", "bounds", "spread")[(i + j) % 4]
                problem = plain(kind, real=real, values=values, scale="dyadic", **float_fields(codes))
                name = f"{problem.granularity.name}, {dtype_name(real)}, {values}, {codes.name}"
                yield replace(problem, name=name)
        unusual = plain(PerChannel, values="special", scale="unusual mixed", **float_fields(codes))
        yield replace(unusual, name=f"unusual scales, {codes.name}")
        sized = plain(PerChannel, codes=codes.torch, **EVERY_SIZE)
        yield replace(sized, name=f"scales of every size, {codes.name}")
        yield replace(image(PerChannel, **float_fields(codes)), name=f"channels last, {codes.name}",
                      layouts=("channels last", "transposed"))  # fmt: skip


def _backward_problems() -> Iterator[Problem]:
    narrow = [codes.torch for codes in (INT4, UINT4, INT2, UINT2)]  # for tanh: much of x is in their range
    for i, ste in enumerate(SteKind):
        for j, kind in enumerate(_GRANULARITIES):
            real, values = _REALS[(i + j) % 4], ("special", "bounds", "ties", "spread")[(i + 2 * j) % 4]
            codes = narrow[(i + 3 * j) % 4] if ste is SteKind.TANH else _CODES[(i + 3 * j) % len(_CODES)]
            problem = plain(kind, real=real, codes=codes, values=values)
            name = f"{problem.granularity.name}, {dtype_name(real)}, {values}, {dtype_name(codes)}"
            yield _by(ste, problem, name)
    for ste in (SteKind.IN_RANGE, SteKind.CLIPPED_IDENTITY, SteKind.TANH, SteKind.HARD_TANH):
        unusual = plain(PerChannel, codes=_INT4, values="special", scale="unusual mixed")
        yield _by(ste, unusual, "unusual scales")
        for limits in ((-8, 7), (-1, 0), (-1, 1)):  # lo_x and hi_x of the last two are always finite
            sized = plain(PerChannel, codes=_INT4, limits=limits, **EVERY_SIZE)
            yield _by(ste, sized, f"scales of every size, codes from {limits[0]} to {limits[1]}")
        far_out = plain(PerToken, values="bounds", zero_point="far mixed")
        yield _by(ste, far_out, "zero points far out")
        bounds = plain(PerTensor, values="bounds", scale="host", zero_point="none", codes=_INT4)
        yield _by(ste, bounds, "bounds, host scale")
    # Rows of a multiple of 16 elements: the tanh kernel has another tile then.
    for real, shape, granularity in (
        (torch.float32, (35, 272), PerChannel(-1)),
        (torch.bfloat16, (35, 272), PerChannel(-1)),
        (torch.float16, (35, 272), PerToken()),
        (torch.bfloat16, (35, 256), PerGroup(32)),
    ):
        name = f"scales of every size, even, {granularity.name}, {dtype_name(real)}"
        vectors = Problem(name, granularity, shape, real=real, codes=_INT4, **EVERY_SIZE)
        yield _by(SteKind.TANH, vectors, name)
    for problem in _of_float_formats():
        yield _by(SteKind.IN_RANGE, problem, problem.name)
    for floats in FLOAT_FORMATS.values():
        for ste, kind in zip(SteKind, _GRANULARITIES * 2, strict=False):
            if ste is not SteKind.IN_RANGE:
                problem = plain(kind, values="bounds", scale="dyadic", **float_fields(floats))
                yield _by(ste, problem, f"{problem.granularity.name}, bounds, {floats.name}")
        more = plain(PerTensor, accumulate=True, values="ties", scale="dyadic", **float_fields(floats))
        yield _by(SteKind.IN_RANGE, more, f"accumulate, {floats.name}")
    for ste in (SteKind.CLIPPED_IDENTITY, SteKind.HARD_TANH):
        yield _by(ste, plain(PerTensor, limits=(4, 4), values="bounds"), "one code")
    for problem, ste in (
        (plain(PerChannel, name="floating zero points", values="bounds", zero_point="floating"),
         SteKind.TANH),
        (plain(PerGroup, name="zero points in float16", real=torch.float16, zero_point="floating own"),
         SteKind.IN_RANGE),
        (plain(PerTensor, name="accumulate", accumulate=True), SteKind.IN_RANGE),
        (plain(PerToken, name="accumulate in bfloat16", real=torch.bfloat16, accumulate=True), SteKind.TANH),
        (image(PerTensor, name="transposed input", layouts=("transposed", "contiguous"), accumulate=True),
         SteKind.IDENTITY),
        (image(PerChannel, name="channels last", layouts=("channels last", "transposed"), codes=_INT4),
         SteKind.HARD_TANH),
        (plain(PerGroup, name="broadcast to sliced", layouts=("broadcast", "sliced")),
         SteKind.CLIPPED_IDENTITY),
        (odd(PerTensor, "rank 0"), SteKind.TANH),
        (odd(PerToken, "empty tokens"), SteKind.IN_RANGE),
        (odd(PerChannel, "last axis, wide", real=torch.bfloat16), SteKind.IN_RANGE),
        (many(PerGroup, codes=_INT4), SteKind.TANH),
        (image(PerChannel, name="dy in another layout", layouts=("channels last", "contiguous"),
               upstream="transposed", codes=_INT4), SteKind.CLIPPED_IDENTITY),
    ):  # fmt: skip
        yield _by(ste, problem, problem.name)
    for ste in (SteKind.IN_RANGE, SteKind.HARD_TANH):
        for problem in [*_ODD_ROWS, *accumulating(_ODD_ROWS)]:
            yield _by(ste, problem, problem.name)


def _by(ste: SteKind, problem: Problem, name: str) -> Problem:
    return replace(problem, name=f"{ste}: {name}", ste=ste)


def descriptor_fields(problem: Problem) -> dict[str, Any]:
    """Fields of the descriptor."""
    q_min, q_max = problem.limits or (None, None)
    dtype = None if format_of(problem.codes, "codes").carried else problem.codes
    fields = {"shape": problem.shape, "input_dtype": problem.real, "granularity": problem.granularity}
    return fields | {"dtype": dtype, "q_min": q_min, "q_max": q_max}


def case(plan: AnyPlan, problem: Problem) -> Case:
    forward, fields = plan.direction == "forward", descriptor_fields(problem)
    desc = plan.Descriptor(**(fields if forward else {**fields, "ste": problem.ste}))
    make = make_args if forward else _backward_args
    return Case(problem.name, desc, partial(make, plan.Args, desc, problem))


def _backward_args(args: type[Args], desc: Any, problem: Problem) -> Args:
    # dy is rolled, so that special values of dy meet ordinary values of x, and the reverse.
    like = replace(problem, values="spread") if problem.values == "of the scale" else problem
    dy = real_values(like, f"dy/{problem.name}").flatten().roll(7).reshape(problem.shape)
    return make_args(args, desc, problem, dy=dy)

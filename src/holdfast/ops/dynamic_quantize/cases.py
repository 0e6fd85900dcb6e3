"""Cases of dynamic_quantize: every kind of segment and every code dtype, in one pass and in two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from holdfast.core.case import Case, laid_out, poisoned_output
from holdfast.core.dtypes import FLOATS
from holdfast.core.formats import INT2, INT4, UINT2, UINT4
from holdfast.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.plan import AnyPlan
from holdfast.ops.choose_scale.cases import Problem as ScaleProblem
from holdfast.ops.choose_scale.cases import input_values, result
from holdfast.ops.dynamic_quantize.plan import DynamicQuantizeArgs, DynamicQuantizeDescriptor

_INT4, _UINT4, _INT2, _UINT2 = (f.torch for f in (INT4, UINT4, INT2, UINT2))


@dataclass(frozen=True)
class Problem(ScaleProblem):
    """The settings of a case. ``written`` is the layout of the codes."""

    packed: bool = False
    written: str = "contiguous"


def problems() -> list[Problem]:
    """The problems of all cases."""
    token = Problem("", PerToken(), (33, 40), values="mixed")
    affine = replace(token, symmetric=False)
    image, channels = Problem("", PerToken(), (2, 6, 5, 7)), Problem("", PerChannel(1), (2, 6, 5, 7))
    of_every_kind = [
        replace(token, name=f"tokens of every kind in {name}", real=record.torch)
        for name, record in FLOATS.items()
    ]
    of_every_kind += [
        replace(affine, name=f"tokens of every kind in {name}, with zero points", real=record.torch)
        for name, record in FLOATS.items()
    ]
    return [
        *of_every_kind,
        replace(token, name="the whole range", narrow=False, real=torch.bfloat16),
        replace(token, name="packed int4", codes=_INT4, packed=True, real=torch.bfloat16),
        replace(token, name="packed int2, ragged", codes=_INT2, packed=True, shape=(17, 39), narrow=False),
        replace(affine, name="packed uint4, ragged", codes=_UINT4, packed=True, shape=(33, 41)),
        replace(affine, name="packed uint2 in groups", granularity=PerGroup(8), codes=_UINT2, packed=True),
        replace(token, name="int4, one a byte", codes=_INT4),
        replace(token, name="int16", codes=torch.int16, real=torch.float16),
        replace(affine, name="uint16", codes=torch.uint16, narrow=True),
        replace(affine, name="uint8", codes=torch.uint8, real=torch.bfloat16),
        replace(token, name="codes in float32", codes=torch.float32, limits=(-99, 65536), real=torch.float64),
        replace(affine, name="codes in bfloat16", codes=torch.bfloat16, limits=(-100, 155)),
        *(
            replace(token, name=f"{name} to float8_e4m3fn", codes=torch.float8_e4m3fn, real=record.torch)
            for name, record in FLOATS.items()
        ),
        Problem("groups of 32 to float8_e4m3fn", PerGroup(32), (15, 96), codes=torch.float8_e4m3fn),
        replace(channels, name="channels last to float8_e4m3fn", codes=torch.float8_e4m3fn,
                layout="channels last", written="channels last"),
        Problem("groups of 32", PerGroup(32), (15, 96), torch.bfloat16, values="mixed"),
        Problem("groups of 32, packed", PerGroup(32), (15, 96), codes=_INT4, packed=True, values="mixed"),
        Problem("groups of the first axis", PerGroup(3, axis=0), (12, 41), symmetric=False, values="mixed"),
        Problem("groups of a middle axis, packed", PerGroup(4, axis=1), (3, 8, 21), codes=_INT4, packed=True),
        Problem("packed tokens of one", PerToken(), (13, 1), codes=_UINT4, packed=True, symmetric=False),
        Problem("rank 0", shape=(), symmetric=False),
        Problem("rank 8", PerGroup(3, axis=6), (2, 1, 3, 2, 1, 2, 3, 2)),
        Problem("empty tokens", PerToken(), (4, 0), symmetric=False),
        Problem("no elements, packed", shape=(3, 0), codes=_INT4, packed=True),
        Problem("no tokens", PerToken(), (0, 5)),
        Problem("tokens of 8192", PerToken(), (3, 8192), torch.bfloat16),
        Problem("tokens of 12,001", PerToken(), (3, 12_001)),
        Problem("tokens for two passes", PerToken(), (2, 33_001), torch.bfloat16, symmetric=False),
        Problem("tokens for two passes, packed", PerToken(), (1, 33_003), codes=_INT4, packed=True),
        Problem("per tensor, in two passes", PerTensor(), (3, 11_003), torch.float16),
        Problem("channels in two passes", PerChannel(1), (2100, 9), symmetric=False, values="mixed"),
        replace(image, name="transposed input", layout="transposed", results="sliced"),
        replace(image, name="transposed output", written="transposed", symmetric=False, real=torch.bfloat16),
        replace(channels, name="channels last", layout="channels last", written="channels last"),
        replace(token, name="sliced", layout="sliced", written="padded rows", real=torch.float16),
        Problem("unaligned", PerGroup(8), (5, 32), layout="unaligned", written="unaligned", symmetric=False),
        replace(
            image, name="packed, leading axes transposed", codes=_UINT4, packed=True, symmetric=False,
            layout="leading transposed", written="leading transposed",
        ),
    ]  # fmt: skip


def cases(plan: AnyPlan) -> list[Case]:
    return [case(plan, problem) for problem in problems()]


def case(plan: AnyPlan, problem: Problem) -> Case:
    descriptor = DynamicQuantizeDescriptor(**problem.rule, packed=problem.packed)
    return Case(problem.name, descriptor, partial(_args, descriptor, problem))


def _args(descriptor: DynamicQuantizeDescriptor, problem: Problem) -> DynamicQuantizeArgs:
    return DynamicQuantizeArgs(
        x=laid_out(input_values(problem), problem.layout),
        q=poisoned_output(descriptor.code_shape, descriptor.code_storage, problem.written),
        scale=result(descriptor, problem, "scale"),
        zero_point=None if problem.symmetric else result(descriptor, problem, "zero_point"),
    )

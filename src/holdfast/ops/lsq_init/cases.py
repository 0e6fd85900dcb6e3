"""Cases of lsq_init."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from holdfast.core.case import Case, laid_out, poisoned_output
from holdfast.core.dtypes import dtype_name
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.plan import AnyPlan
from holdfast.ops.affine.cases import Problem, real_values
from holdfast.ops.fake_quantize.cases import image, odd, plain
from holdfast.ops.lsq_init.plan import LsqInitArgs, LsqInitDescriptor

_F16, _BF16, _F64 = torch.float16, torch.bfloat16, torch.float64


def cases(plan: AnyPlan) -> list[Case]:
    return [case(plan, problem) for problem in _problems()]


def case(plan: AnyPlan, problem: Problem) -> Case:
    desc = LsqInitDescriptor(
        shape=problem.shape, input_dtype=problem.real, granularity=problem.granularity,
        q_max=problem.code_range[1],
    )  # fmt: skip
    return Case(problem.name, desc, partial(_args, desc, problem))


def _sized(granularity: Granularity, shape: tuple[int, ...], real: torch.dtype = torch.float32) -> Problem:
    name = f"{granularity.name} of {'x'.join(map(str, shape))}, {dtype_name(real)}"
    return Problem(name, granularity, shape, real=real)


def _problems() -> Iterator[Problem]:
    yield _sized(PerTensor(), (255,), _BF16)
    yield _sized(PerTensor(), (4096,), _F64)
    yield _sized(PerTensor(), (70000,))
    yield _sized(PerChannel(0), (3, 8191), _F16)
    yield _sized(PerChannel(1), (4099, 40))
    yield _sized(PerChannel(1), (512, 32), _BF16)
    yield _sized(PerChannel(1), (3, 5, 1700))
    yield _sized(PerToken(), (21, 300))
    yield _sized(PerGroup(32), (9, 256), _BF16)
    yield _sized(PerGroup(32, axis=0), (64, 37))
    # Many segments per job, and more lanes than elements.
    yield _sized(PerChannel(0), (2000, 3), _F64)
    yield _sized(PerToken(), (130, 33), _F64)
    yield _sized(PerGroup(129), (7, 645), _F64)
    yield plain(PerGroup, name="special values", values="special")
    yield image(PerChannel, name="channels last", layouts=("channels last", "contiguous"), real=_F64)
    yield image(PerTensor, name="transposed", layouts=("transposed", "contiguous"))
    yield plain(PerToken, name="broadcast, strided scales", layouts=("broadcast", "sliced"))
    yield plain(PerChannel, name="one code above zero", limits=(-1, 1), layouts=("unaligned", "contiguous"))
    yield odd(PerTensor, "rank 0")
    yield odd(PerTensor, "empty")
    yield odd(PerToken, "empty tokens")
    yield odd(PerToken, "no tokens")


def _args(desc: LsqInitDescriptor, problem: Problem) -> LsqInitArgs:
    of_input, of_output = problem.layouts
    shape, dtype = desc.expected("scale")
    x = real_values(problem, f"x/{problem.name}")
    if x.numel() > 24:
        x.view(-1)[:24] = 0.0  # a short group is all zeros
    return LsqInitArgs(
        x=laid_out(x, of_input), scale=poisoned_output(shape, dtype, of_output if shape else "contiguous")
    )

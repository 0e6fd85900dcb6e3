"""Cases of fake_quantize's gradients with a learned scale and zero point.

The lists are not the product of all settings. They cover the sums in particular: segments shorter than a row
of lanes, shorter than a block, or longer; contiguous segments, interleaved ones, and others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from holdfast.core.case import Case, laid_out, poisoned_output
from holdfast.core.dtypes import dtype_name, float_dtype
from holdfast.core.formats import INT2, INT4, UINT4
from holdfast.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.plan import AnyPlan
from holdfast.core.values import rounded, special_values, spread
from holdfast.ops.affine.cases import make_scale, make_zero_point, real_values
from holdfast.ops.fake_quantize.cases import Problem, descriptor_fields, image, odd, plain
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.fake_quantize_learned.plan import (
    FakeQuantizeLearnedBackwardArgs,
    FakeQuantizeLearnedBackwardDescriptor,
)

_INT4, _UINT4, _INT2 = (f.torch for f in (INT4, UINT4, INT2))
_F16, _BF16, _F64 = torch.float16, torch.bfloat16, torch.float64
#: Distance of special values in dy. Most segments have none, so that not every sum is NaN.
_SPECIAL_STEP = 61


def cases(plan: AnyPlan) -> list[Case]:
    problems = (*_of_estimators(), *_of_lengths(), *_of_layouts(), *_of_scales())
    return [case(plan, problem) for problem in problems]


def _sized(
    granularity: Any, shape: tuple[int, ...], real: torch.dtype = torch.float32, **more: Any
) -> Problem:
    name = f"{granularity.name} of {'x'.join(map(str, shape))}, {dtype_name(real)}"
    fields: dict[str, Any] = {"name": name, "zero_point": "none", "codes": _INT4, **more}
    return Problem(granularity=granularity, shape=shape, real=real, **fields)


def _of_estimators() -> Iterator[Problem]:
    yield plain(PerChannel, name="in range, ties", codes=_INT4, values="ties", zero_point="floating")
    yield plain(PerGroup, name="in range, special values", real=_F16, values="special",
                zero_point="floating own")  # fmt: skip
    yield plain(PerTensor, name="clipped, bounds", real=_F64, codes=_UINT4, values="bounds",
                zero_point="floating own", ste=SteKind.CLIPPED_IDENTITY)  # fmt: skip
    yield plain(PerGroup, name="tanh", real=_BF16, codes=_INT2, ste=SteKind.TANH)
    yield plain(PerToken, name="tanh in float64", real=_F64, codes=_INT2, ste=SteKind.TANH)
    yield plain(PerToken, name="hard tanh, bounds", real=_F16, codes=_INT4, values="bounds",
                zero_point="floating own", ste=SteKind.HARD_TANH)  # fmt: skip
    yield plain(PerChannel, name="identity", real=_BF16, codes=_INT4, values="special",
                ste=SteKind.IDENTITY, factor=1.0)  # fmt: skip


def _of_lengths() -> Iterator[Problem]:
    yield _sized(PerTensor(), (255,))
    yield _sized(PerTensor(), (256,), _BF16)
    yield _sized(PerTensor(), (4095,), _F16, codes=torch.int8)
    yield _sized(PerTensor(), (4096,), values="ties")
    yield _sized(PerTensor(), (17, 241), zero_point="floating")
    yield _sized(PerTensor(), (4, 8192), _BF16)
    yield _sized(PerTensor(), (70000,), zero_point="host", codes=torch.int8)
    yield _sized(PerChannel(0), (2, 35000), _BF16, zero_point="floating")
    yield _sized(PerChannel(0), (3, 8191), _F64)
    yield _sized(PerToken(), (8, 4096), _BF16)
    yield _sized(PerToken(), (21, 300), zero_point="floating")
    yield _sized(PerChannel(1), (4099, 40), zero_point="floating")
    yield _sized(PerChannel(1), (512, 32), _BF16)
    yield _sized(PerChannel(1), (700, 3), _F16)
    yield _sized(PerChannel(1), (3, 5, 1700))
    yield _sized(PerChannel(1), (4, 8, 1024), _BF16, zero_point="floating")
    yield _sized(PerGroup(32), (9, 256), _BF16)
    yield _sized(PerGroup(128), (16, 256), zero_point="tensor")
    yield _sized(PerGroup(32, axis=0), (64, 37))
    # Many segments per job, and as many unused lanes per segment as possible.
    yield _sized(PerToken(), (257, 33), _F64)
    yield _sized(PerToken(), (131, 65), _F64, zero_point="floating own", accumulate=True)
    yield replace(_sized(PerChannel(0), (35, 129), _F64, zero_point="floating own"), ste=SteKind.TANH)
    yield _sized(PerGroup(3), (455, 9), _F64, zero_point="floating")
    yield _sized(PerToken(), (257, 33), _BF16, zero_point="floating")
    yield odd(PerTensor, "rank 0")
    yield odd(PerGroup, "groups of one", codes=_INT2)
    yield odd(PerGroup, "rank 8", real=_BF16)
    yield odd(PerTensor, "empty", zero_point="floating")
    yield odd(PerToken, "empty tokens", accumulate=True)
    yield odd(PerToken, "no tokens")


def _of_layouts() -> Iterator[Problem]:
    yield image(PerTensor, name="transposed output", layouts=("contiguous", "transposed"), real=_BF16)
    yield image(PerChannel, name="channels last, accumulate", layouts=("channels last", "channels last"),
                zero_point="floating", accumulate=True)  # fmt: skip
    yield plain(PerToken, name="sliced to padded rows", layouts=("sliced", "padded rows"), real=_F16,
                ste=SteKind.HARD_TANH)  # fmt: skip
    yield plain(PerGroup, name="broadcast to sliced, accumulate", layouts=("broadcast", "sliced"),
                accumulate=True)  # fmt: skip
    yield _sized(PerChannel(1), (40, 130), name="rows to columns", layouts=("transposed", "contiguous"))
    yield _sized(PerChannel(0), (40, 130), name="columns to rows", layouts=("contiguous", "transposed"),
                 accumulate=True)  # fmt: skip
    yield plain(PerChannel, name="unaligned", layouts=("unaligned", "unaligned"), zero_point="floating")
    yield image(PerChannel, name="dy in another layout", layouts=("channels last", "contiguous"),
                upstream="transposed", codes=_INT4)  # fmt: skip


def _of_scales() -> Iterator[Problem]:
    yield plain(PerTensor, name="host scale and zero point", scale="host", zero_point="host")
    yield plain(PerGroup, name="host scale", scale="host", zero_point="floating own", real=_F64)
    yield plain(PerToken, name="scales in bfloat16, accumulate", scale="own", real=_BF16, accumulate=True)
    yield plain(PerChannel, name="strided scales", scale="strided", zero_point="strided", codes=_INT4)
    yield plain(PerToken, name="scales with keepdim", scale="keepdim", zero_point="none")
    yield plain(PerChannel, name="unusual scales", values="special", scale="unusual mixed",
                zero_point="floating", codes=_INT4)  # fmt: skip
    yield plain(PerGroup, name="unusual scales, 0 out of range", values="special", scale="unusual mixed",
                limits=(3, 60))  # fmt: skip
    yield plain(PerChannel, name="zero points far out", values="ties", zero_point="far mixed")


def case(plan: AnyPlan, problem: Problem) -> Case:
    """The case of ``plan`` for ``problem``. A floating zero point is learned."""
    scale, zero_point = _floating(make_scale(problem)), _floating(make_zero_point(problem))
    desc = FakeQuantizeLearnedBackwardDescriptor(
        **descriptor_fields(problem), ste=problem.ste, grad_factor=problem.factor,
        scale_dtype=scale or torch.float32, zero_point_dtype=zero_point,
    )  # fmt: skip
    return Case(problem.name, desc, partial(_args, desc, problem))


def _floating(learned: Any) -> torch.dtype | None:
    """The dtype of a floating tensor, else None."""
    return learned.dtype if isinstance(learned, torch.Tensor) and learned.is_floating_point() else None


def _args(desc: FakeQuantizeLearnedBackwardDescriptor, problem: Problem) -> FakeQuantizeLearnedBackwardArgs:
    of_input, of_output = problem.layouts
    scale, zero_point = make_scale(problem), make_zero_point(problem)
    dx = poisoned_output(problem.shape, problem.real, of_output)
    if problem.accumulate:
        dx.copy_(real_values(problem, f"dx/{problem.name}"))
    learned = desc.zero_point_dtype is not None
    return FakeQuantizeLearnedBackwardArgs(
        dy=laid_out(_upstream(problem), problem.upstream or of_input),
        x=laid_out(real_values(problem, f"x/{problem.name}"), of_input),
        scale=scale, zero_point=zero_point, dx=dx, dscale=_gradient_of(scale, "dscale", desc, problem),
        dzero_point=_gradient_of(zero_point, "dzero_point", desc, problem) if learned else None,
        accumulate=problem.accumulate,
    )  # fmt: skip


def _upstream(problem: Problem) -> torch.Tensor:
    record = float_dtype(problem.real, "real")
    count = torch.Size(problem.shape).numel()
    dy = rounded(spread(f"dy/{problem.name}", count, record.precision, -9, 5), problem.real)
    if problem.values == "special":
        chosen = special_values(record)
        found = dy[::_SPECIAL_STEP]
        found.copy_(chosen.repeat(len(found) // len(chosen) + 1)[: len(found)])
    return dy.reshape(problem.shape)


def _gradient_of(
    learned: Any, name: str, descriptor: FakeQuantizeLearnedBackwardDescriptor, problem: Problem
) -> torch.Tensor:
    """An output for a gradient, in the shape and layout of the learned tensor."""
    shape, dtype = descriptor.expected(name)
    shape = learned.shape if isinstance(learned, torch.Tensor) else shape
    layout = "sliced" if shape and problem.scale == "strided" else "contiguous"
    made = poisoned_output(shape, dtype, layout)
    if problem.accumulate:
        record = float_dtype(dtype, name)
        values = spread(f"{name}/{problem.name}", made.numel(), record.precision, -3, 3)
        made.copy_(rounded(values, dtype).reshape(shape))
    return made

"""Random problems for the quantization ops: shape, granularity, code dtype, scale, zero point, values."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from holdfast.core.draw import Draw
from holdfast.core.dtypes import FLOATS
from holdfast.core.formats import FLOAT_FORMATS, format_of
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.plan import AnyPlan
from holdfast.ops.affine.cases import STORED, Problem

P = TypeVar("P", bound=Problem)

#: Fields of a problem that do not change the descriptor.
FREE = ("values", "scale", "zero_point")

_REALS = [record.torch for record in FLOATS.values()]
_SCALES = (
    "host", "float32", "own", "dyadic", "expanded", "strided", "keepdim", "unusual mixed", "every size",
    "unusual 1e-40", "any bits", "host 3e-39", "host 2e38",
)  # fmt: skip
_ZERO_POINTS = ("none", "tensor", "host", "host huge", "strided", "odd", "far mixed", "any bits")
_VALUES = ("spread", "special", "ties", "bounds", "exponents", "any bits")


def draw_real(draw: Draw) -> torch.dtype:
    return draw.kind(_REALS)


def draw_granular(
    draw: Draw, kind: type[Granularity] | None = None, multiple: int = 1
) -> tuple[tuple[int, ...], Granularity]:
    """A shape and a granularity. Groups along the last axis have a multiple of ``multiple`` elements."""
    kind = kind or draw.kind((PerTensor, PerChannel, PerToken, PerGroup))
    shape = list(draw.shape(least_rank=1 if kind in (PerChannel, PerGroup) or multiple > 1 else 0))
    if kind in (PerTensor, PerToken):
        return tuple(shape), kind()
    if kind is PerChannel and draw.chance(4):
        # Channels in the last axis with many elements each: the kernels have special paths for them.
        channels = draw.size(64, least=1) * multiple
        return (draw.size(max(draw.budget // channels, 1)), channels), PerChannel(-1)
    axis = draw.between(-len(shape), len(shape) - 1)
    if kind is PerChannel:
        return tuple(shape), PerChannel(axis)
    last = axis % len(shape) == len(shape) - 1
    group = draw.size(max(shape[axis], 1), least=1) * (multiple if last else 1)
    shape[axis] = shape[axis] // group * group if draw.chance(2) else group * draw.size(3)
    return tuple(shape), PerGroup(group, axis)


def draw_codes(
    draw: Draw, real: torch.dtype, *, packs: bool, carried: bool = True, floating: bool = True
) -> tuple[torch.dtype, bool]:
    """A code dtype, and whether the codes are packed."""
    if floating and draw.kind((True, False), (1, 5)):
        return draw.kind([codes.torch for codes in FLOAT_FORMATS.values()]), False
    if carried and draw.kind((True, False), (1, 3)):
        wide = real is torch.float64
        exact = [code for code in _REALS if code is torch.float32 or (code is torch.float64) == wide]
        return draw.kind(exact), False
    codes, packed = draw.kind(STORED)
    return codes, packed and packs


def draw_limits(draw: Draw, codes: torch.dtype) -> tuple[int, int] | None:
    """A range of codes, or None for the whole range of the format."""
    drawn = format_of(codes, "codes")
    low, high = drawn.code_range
    if drawn.is_float or (not drawn.carried and draw.chance(2)):
        return None
    near = [low, high, 0, 1, -1, low + 1, high - 1, draw.between(low, high), draw.between(-9, 9)]
    ends = sorted(min(max(draw.one_of(near), low), high) for _ in range(2))
    return ends[0], ends[1]


def granularity_of(plan: AnyPlan) -> type[Granularity]:
    """The granularity of a plan's descriptor."""
    return plan.Descriptor.kind  # type: ignore[attr-defined, no-any-return]


def draw_problem(
    draw: Draw,
    kind: type[Granularity] | None = None,
    *,
    kind_of_problem: type[P] = Problem,  # type: ignore[assignment]
    packs: bool = False,
    carried: bool = True,
    floating: bool = True,
    floating_zero_points: bool = False,
    **more: Any,
) -> P:
    """A problem of granularity ``kind``, or of any granularity."""
    real = draw_real(draw)
    codes, packed = draw_codes(draw, real, packs=packs, carried=carried, floating=floating)
    per_byte = format_of(codes, "codes").per_byte if packed else 1
    shape, granularity = draw_granular(draw, kind, per_byte)
    scale, zero_point = draw.one_of(_SCALES), draw.one_of(_ZERO_POINTS, [3, 3, 1, 1, 1, 1, 1, 2])
    if floating_zero_points and draw.kind((False, True)):
        zero_point = draw.one_of(("floating", "floating own"))
    if not format_of(codes, "codes").zero_point:
        zero_point = "none"
    values = draw.one_of(_VALUES, [3, 2, 2, 2, 2, 1])
    if scale == "every size" and zero_point == "none":
        values = draw.one_of(("of the scale", values))
    fields: dict[str, Any] = {
        "real": real, "codes": codes, "packed": packed, "limits": draw_limits(draw, codes), "values": values,
        "scale": scale, "zero_point": zero_point,
    }  # fmt: skip
    return kind_of_problem(draw.label, granularity, shape, **{**fields, **more})

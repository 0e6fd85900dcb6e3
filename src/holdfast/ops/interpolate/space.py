"""Random problems of interpolate and its gradient, for the fuzzer."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.draw import Draw, Results
from holdfast.core.dtypes import FLOATS
from holdfast.core.plan import AnyPlan
from holdfast.ops.interpolate import torch_op
from holdfast.ops.interpolate.cases import Problem
from holdfast.ops.interpolate.plan import ANTIALIASED, AXES, Mode

FREE = ("values",)


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    mode = draw.kind(tuple(Mode))
    axes = AXES.get(mode) or draw.kind((1, 2, 3))
    batch, channels = draw.size(3), draw.size(draw.one_of((4, 4, 40)))
    sizes: list[int] = []
    for _ in range(2):
        left = max(draw.budget // 8 // max(batch * channels, 1), 1)
        for _ in range(axes):
            sizes.append(draw.size(max(int(left ** draw.one_of((0.3, 0.5, 0.8, 1.0))), 1), 1))
            left //= sizes[-1]
    image, size = sizes[:axes], sizes[axes:]
    scales = None
    if draw.chance(3):
        scales = tuple(draw.between(1, 4000) / 1000 for _ in image)
        size = [max(int(n * scale), 1) for n, scale in zip(image, scales, strict=True)]
    aligned, antialias = draw.kind((False, True)), draw.kind((False, True))
    return Problem(
        draw.label, (batch, channels, *image), tuple(size), mode, aligned and mode in AXES,
        antialias and mode in ANTIALIASED, scales, draw.kind([record.torch for record in FLOATS.values()]),
        draw.one_of(("spread", "special", "exponents"), [4, 1, 2]),
        accumulate=plan.direction == "backward" and draw.chance(4),
    )  # fmt: skip


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any, functions: Any = torch_op) -> Results:
    if (args.flags and args.accumulate) or (desc.scales is not None and not _follows(desc)):
        return None
    given: dict[str, Any] = {"mode": str(desc.mode), "antialias": desc.antialias}
    given |= {"align_corners": desc.align_corners} if desc.mode in AXES else {}
    given |= {"size": desc.output_size} if desc.scales is None else {"scale_factor": desc.scales}
    if plan.direction == "forward":
        return {"out": functions.interpolate(args.input, **given)}
    image = torch.zeros(desc.shape, dtype=desc.dtype, device=args.dout.device, requires_grad=True)
    functions.interpolate(image, **given).backward(args.dout)
    assert image.grad is not None
    return {"dinput": image.grad}


def _follows(desc: Any) -> bool:
    """Whether the output size is the one that the public function derives from the scales."""
    pairs = zip(desc.input_size, desc.scales, strict=True)
    return bool(desc.output_size == tuple(int(size * scale) for size, scale in pairs))

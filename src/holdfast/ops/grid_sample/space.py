"""Random problems of grid_sample and its gradients, for the fuzzer."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.draw import Draw
from holdfast.core.plan import Plan
from holdfast.ops.grid_sample import torch_op
from holdfast.ops.grid_sample.cases import DTYPES, GRIDS, Problem, case
from holdfast.ops.grid_sample.plan import Mode, Padding

__all__ = ["FREE", "case", "draw", "public"]

FREE = ("values", "grid")


def draw(plan: type[Plan[Any, Any]], draw: Draw) -> Problem:
    axes = draw.kind((2, 3))
    channels = draw.size(draw.one_of([9, 9, 70, 300]))
    batch = draw.size(draw.one_of([4, 4, 300]))
    room = max(draw.budget // 8 // max(channels * -(-batch // 4), 1), 1)
    image: list[int] = []
    size: list[int] = []
    side = int(room ** (1 / axes))
    for sizes, least in ((image, 1), (size, 0)):
        left = room
        full = draw.chance(2)  # as many pixels or samples as there may be
        for _ in range(axes):
            if full and side > 1:
                sizes.append(draw.between(side // 2 + 1, side))
                continue
            sizes.append(draw.size(max(int(left ** draw.one_of([0.3, 0.5, 0.8, 1.0])), 1), least))
            left //= max(sizes[-1], 1)
    dtype, grid_dtype = draw.kind(DTYPES)
    modes = [mode for mode in Mode if axes == 2 or mode != Mode.BICUBIC]
    return Problem(
        draw.label,
        (channels, *image),
        tuple(size),
        draw.kind(modes, [3 if mode == Mode.BILINEAR else 1 for mode in modes]),
        draw.kind(tuple(Padding)),
        draw.kind((False, True)),
        dtype,
        grid_dtype,
        draw.one_of((*GRIDS, "affine", "windows")),
        draw.one_of(("spread", "special", "exponents", "any bits"), [6, 1, 2, 1]),
        batch,
        needs=draw.kind(((True, True), (True, False), (False, True))),
        accumulate=plan.direction == "backward" and draw.chance(4),
    )


def public(
    plan: type[Plan[Any, Any]], problem: Problem, desc: Any, args: Any, functions: Any = torch_op
) -> dict[str, torch.Tensor] | None:
    how = (str(desc.mode), str(desc.padding_mode), desc.align_corners)
    if plan.direction == "forward":
        return {"out": functions.grid_sample(args.input, args.grid, *how)}
    if args.accumulate:
        return None
    image, grid, wanted = args.input, args.grid, {}
    if image is None:
        image = torch.zeros(desc.shape, dtype=desc.input_dtype, device=grid.device)
    if desc.needs_dinput:
        wanted["dinput"] = image = image.detach().requires_grad_()
    if desc.needs_dgrid:
        wanted["dgrid"] = grid = grid.detach().requires_grad_()
    functions.grid_sample(image, grid, *how).backward(args.dout)
    return {name: tensor.grad for name, tensor in wanted.items()}

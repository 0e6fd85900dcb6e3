"""Named test inputs of grid_sample: every mode, padding, alignment and dtype in 2-D and 3-D.

The kind of grid cycles through these cases. Each combination of mode, padding and alignment has one case
that is not ``common``, whose dtype cycles such that each mode and each padding meets every dtype. Its cases
with the other dtypes are ``common``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.core.case import Case, laid_out, poisoned_output, random_bits
from holdfast.core.dtypes import dtype_name, float_dtype
from holdfast.core.plan import Plan
from holdfast.core.values import BITS, of_any_bits, of_every_exponent, rounded, special_values, spread
from holdfast.ops.grid_sample.plan import (
    GridSampleArgs,
    GridSampleBackwardArgs,
    GridSampleBackwardDescriptor,
    GridSampleDescriptor,
    Mode,
    Padding,
)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """Parameters of a case. ``image`` is (C, H, W) or (C, D, H, W); ``size`` is the output size.

    ``layouts`` are of the inputs and of the outputs.
    """

    name: str
    image: tuple[int, ...]
    size: tuple[int, ...]
    mode: Mode = Mode.BILINEAR
    padding: Padding = Padding.ZEROS
    aligned: bool = False
    dtype: torch.dtype = torch.float32
    grid_dtype: torch.dtype | None = None
    grid: str = "random"
    values: str = "spread"
    batch: int = 2
    layouts: tuple[str, str] = ("contiguous", "contiguous")
    grid_layout: str = "contiguous"
    needs: tuple[bool, bool] = (True, True)  # dinput, dgrid
    accumulate: bool = False
    of_sums: bool = False  # for the gradients only
    common: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of both descriptors."""
        return {
            "shape": (self.batch, *self.image),
            "output_size": self.size,
            "mode": self.mode,
            "padding_mode": self.padding,
            "align_corners": self.aligned,
            "input_dtype": self.dtype,
            "grid_dtype": self.grid_dtype or self.dtype,
        }


#: (dtype of the image, dtype of the grid or None for the same).
DTYPES: tuple[tuple[torch.dtype, torch.dtype | None], ...] = (
    (torch.float32, None),
    (torch.bfloat16, torch.float32),
    (torch.float64, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float16, torch.float32),
)
#: Kinds of grids.
GRIDS = ("smooth", "random", "not finite", "far", "on centres and borders", "on one pixel", "identity")


def problems() -> list[Problem]:
    kinds = list(_every_kind())
    common = [problem for problem in kinds if problem.common]
    rest = (*_sizes(), *_layouts(), *_gradients())
    return [*(problem for problem in kinds if not problem.common), *rest, *common]


def _every_kind() -> Iterator[Problem]:
    number = count()
    for axes in (2, 3):
        modes = [mode for mode in Mode if axes == 2 or mode != Mode.BICUBIC]
        for mode, padding, aligned in product(modes, Padding, (False, True)):
            n = next(number)
            for turn in range(len(DTYPES)):
                dtype, grid_dtype = DTYPES[(n + n // 6 + axes + turn) % len(DTYPES)]
                grid = GRIDS[(n + turn) % len(GRIDS)]
                exact = grid == "on centres and borders"  # needs sizes with exact coordinates
                image = (3, 4, 8, 16) if exact else (3, 4, 5, 9)
                yield Problem(
                    f"{axes}-d {mode}, {padding}, {'corners' if aligned else 'edges'} aligned, "
                    f"{dtype_name(dtype)}{' with a float32 grid' if grid_dtype else ''}, {grid}",
                    (3 + turn, *image[-axes:]), (2, 7, 11)[-axes:], mode, padding, aligned,
                    dtype, grid_dtype, grid, common=turn > 0,
                )  # fmt: skip


def _sizes() -> Iterator[Problem]:
    yield Problem("one pixel, one sample", (1, 1, 1), (1, 1), aligned=True, padding=Padding.REFLECTION)
    yield Problem("one pixel, many samples", (3, 1, 1), (6, 5), padding=Padding.BORDER, grid="far")
    yield Problem("one row of pixels, bicubic", (2, 1, 13), (5, 7), Mode.BICUBIC, Padding.REFLECTION, True)
    yield Problem("64 channels", (64, 13, 11), (9, 17), grid="smooth", dtype=torch.bfloat16)
    yield Problem("11 channels", (11, 5, 7), (4, 6), grid="smooth")
    yield Problem("257 channels", (257, 5, 7), (4, 6), batch=1)
    yield Problem("1025 channels of three dimensions", (1025, 2, 3, 3), (2, 2, 3), batch=1, of_sums=True,
                  needs=(False, True))  # fmt: skip
    crowd = Problem(
        "1100 samples on one pixel", (2, 6, 5), (25, 44), grid="on one pixel", batch=1, of_sums=True
    )
    yield crowd
    yield replace(crowd, name="1100 samples on one pixel, nearest", mode=Mode.NEAREST)
    yield Problem("images as large as several tiles", (3, 67, 71), (65, 130), grid="smooth")
    yield Problem("17 channels, several runs of samples", (17, 12, 13), (25, 29), grid="smooth", batch=1)
    yield Problem("scattered samples", (6, 40, 37), (24, 35))
    # The rows that parts of the samples touch have sums of their own.
    bands = Problem("one image by bands", (3, 40, 23), (38, 25), grid="affine", batch=1, of_sums=True)
    yield bands
    yield replace(
        bands, name="one image by bands, infinite gradients", image=(4, 40, 23), size=(38, 40),
        values="infinities", accumulate=True,
    )  # fmt: skip
    yield replace(bands, name="one image by bands, magnitudes", values="planes", dtype=torch.float64)
    small = Problem("many small images", (1, 5, 7), (2, 2), batch=64, of_sums=True)
    yield small
    yield Problem("many images of one sample", (1, 5, 7), (1, 1), batch=64)
    # Larger than the accumulators of a program, also on a GPU.
    yield replace(small, name="many images in several bands", image=(2, 24, 25), size=(6, 5))
    several = replace(
        small, name="small images, several bands", image=(3, 11, 13), size=(5, 4), batch=5, grid="not finite",
        dtype=torch.bfloat16, grid_dtype=torch.float32, accumulate=True,
    )  # fmt: skip
    yield several
    special = replace(several, name="small images, special values", values="special", accumulate=False)
    yield special
    yield replace(small, name="windows of small images", image=(2, 9, 8), size=(3, 4), grid="windows")
    yield replace(special, name="windows, special values", grid="windows")
    yield Problem("no channels", (0, 3, 4), (5, 2))
    yield Problem("no samples", (3, 4, 5), (0, 7))
    yield Problem("no images", (3, 4, 5), (6, 7), batch=0)
    yield Problem("special values", (3, 7, 9), (11, 8), values="special", grid="smooth")


def _layouts() -> Iterator[Problem]:
    image = Problem("", (5, 7, 9), (8, 6))
    last, sliced = ("channels last", "channels last"), ("sliced", "padded rows")
    yield replace(image, name="channels last", layouts=last, accumulate=True, image=(33, 7, 9))
    yield replace(
        image,
        name="volumes with channels last",
        layouts=last,
        image=(5, 3, 4, 6),
        size=(2, 5, 3),
        dtype=torch.float16,
    )
    yield replace(
        image, name="transposed to contiguous", layouts=("transposed", "contiguous"), needs=(False, True)
    )
    yield replace(
        image,
        name="channels last to contiguous, bicubic",
        layouts=("channels last", "contiguous"),
        mode=Mode.BICUBIC,
    )
    yield replace(
        image,
        name="sliced to padded rows",
        layouts=sliced,
        grid_layout="sliced",
        dtype=torch.bfloat16,
        accumulate=True,
    )
    yield replace(
        image,
        name="one grid for all",
        grid_layout="broadcast",
        layouts=("broadcast", "transposed"),
        needs=(True, False),
    )
    yield replace(
        image,
        name="unaligned, nearest",
        mode=Mode.NEAREST,
        layouts=("unaligned", "unaligned"),
        accumulate=True,
    )


def _gradients() -> Iterator[Problem]:
    """Gradients that show the unit of the integer sums, and terms that are not finite."""
    plain = Problem("", (5, 9, 11), (7, 8), of_sums=True, needs=(True, False))
    for dtype in (torch.float32, torch.float64):
        name = dtype_name(dtype)
        own = replace(plain, dtype=dtype)
        yield replace(own, name=f"gradients of a wide range, {name}", values="wide")
        yield replace(own, name=f"gradients of every exponent, {name}", values="exponents")
        yield replace(own, name=f"planes of different magnitudes, {name}", values="planes")
        yield replace(own, name=f"subnormal gradients, {name}", values="subnormal")
        yield replace(own, name=f"infinite gradients, {name}", values="infinities", grid="identity")
    yield replace(plain, name="gradients of zero", values="zeros")
    infinite = replace(plain, values="infinities")
    yield replace(infinite, name="infinite gradients on one pixel", grid="on one pixel", accumulate=True)
    yield replace(infinite, name="infinite gradients, bicubic", mode=Mode.BICUBIC, padding=Padding.REFLECTION)
    yield replace(
        infinite, name="infinite gradients, centres", image=(5, 8, 16), grid="on centres and borders"
    )
    yield replace(infinite, name="infinite gradients, bfloat16", dtype=torch.bfloat16, mode=Mode.NEAREST)
    many = replace(infinite, name="infinite gradients, 16 channels", image=(16, 9, 11))
    yield many
    yield replace(many, name="infinite gradients on one pixel, 16 channels", grid="on one pixel")
    yield replace(many, name="planes of different magnitudes, 16 channels", values="planes")
    yield replace(many, name="gradients of every exponent, 16 channels", values="exponents")
    yield replace(many, name="subnormal gradients, 16 channels", values="subnormal")
    for values, name in (
        ("wide", "gradients of a wide range"), ("planes", "planes of different magnitudes"),
        ("zeros", "gradients of zero"), ("subnormal", "subnormal gradients"),
        ("infinities", "infinite gradients"),
    ):  # fmt: skip
        yield replace(plain, name=f"{name}, 4 channels", image=(4, 9, 11), values=values)


def cases(plan: type[Plan[Any, Any]]) -> list[Case]:
    """Every case of ``plan``."""
    if plan.direction == "backward":
        return [case(plan, problem) for problem in problems()]
    return [case(plan, problem) for problem in problems() if not problem.of_sums]


def case(plan: type[Plan[Any, Any]], problem: Problem) -> Case:
    """The case of ``plan`` for ``problem``."""
    return (_forward if plan.direction == "forward" else _backward)(problem)


def _forward(problem: Problem) -> Case:
    descriptor = GridSampleDescriptor(**problem.fields)
    return Case(problem.name, descriptor, partial(_forward_args, problem), problem.common)


def _backward(problem: Problem) -> Case:
    needs_dinput, needs_dgrid = problem.needs
    descriptor = GridSampleBackwardDescriptor(
        **problem.fields, needs_dinput=needs_dinput, needs_dgrid=needs_dgrid
    )
    return Case(problem.name, descriptor, partial(_backward_args, problem, descriptor), problem.common)


def _forward_args(problem: Problem) -> GridSampleArgs:
    descriptor = GridSampleDescriptor(**problem.fields)
    of_input, of_output = problem.layouts
    return GridSampleArgs(
        input=laid_out(_values(problem, "input", descriptor.shape), of_input),
        grid=laid_out(grid_values(problem), problem.grid_layout),
        out=poisoned_output(descriptor.output_shape, problem.dtype, of_output),
    )


def _backward_args(problem: Problem, descriptor: GridSampleBackwardDescriptor) -> GridSampleBackwardArgs:
    of_input, of_output = problem.layouts
    needs_dinput, needs_dgrid = problem.needs
    made = {
        "dinput": poisoned_output(descriptor.shape, problem.dtype, of_output) if needs_dinput else None,
        "dgrid": poisoned_output(descriptor.grid_shape, descriptor.grid_dtype) if needs_dgrid else None,
    }
    for name, out in made.items():
        if out is not None and problem.accumulate:
            out.copy_(_values(problem, name, tuple(out.shape)))
    image = laid_out(_values(problem, "input", descriptor.shape), of_input) if needs_dgrid else None
    # The roll makes special gradients meet ordinary pixels, and vice versa.
    dout = _values(problem, "dout", descriptor.output_shape).flatten().roll(7)
    return GridSampleBackwardArgs(
        dout=laid_out(dout.reshape(descriptor.output_shape), of_input),
        grid=laid_out(grid_values(problem), problem.grid_layout),
        input=image,
        **made,
        accumulate=problem.accumulate,
    )


def _values(problem: Problem, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    record, size = float_dtype(problem.dtype, "dtype"), prod(shape)
    values = rounded(spread(f"{name}/{problem.name}", size, record.precision, -9, 5), problem.dtype)
    if problem.values == "special":
        wanted, found = special_values(record), values[::5]
        found.copy_(wanted.repeat(-(-len(found) // len(wanted)))[: len(found)])
    elif problem.values == "exponents":
        values = of_every_exponent(f"{name}/{problem.name}", size, record)
    elif problem.values == "any bits":
        values = of_any_bits(f"{name}/{problem.name}", size, record)
    elif name == "dout" and problem.values in GRADIENTS:
        values = GRADIENTS[problem.values](problem, shape)
    return values.reshape(shape)


def _wide(problem: Problem, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers from 2**-20 to 2**20."""
    precision = float_dtype(problem.dtype, "dtype").precision
    return rounded(spread(f"wide/{problem.name}", prod(shape), precision, -20, 20), problem.dtype)


def _planes(problem: Problem, shape: tuple[int, ...]) -> torch.Tensor:
    """``_wide``, divided by 2**40 from one plane to the next."""
    steps = torch.arange(shape[0] * shape[1]).reshape(*shape[:2], *[1] * (len(shape) - 2)) % 3
    factors = torch.ldexp(torch.ones(steps.shape, dtype=problem.dtype), -40 * steps)
    return _wide(problem, shape).reshape(shape) * factors


def _subnormal(problem: Problem, shape: tuple[int, ...]) -> torch.Tensor:
    """Subnormal numbers of either sign, and zeros."""
    record = float_dtype(problem.dtype, "dtype")
    fraction_and_sign = 2 ** (record.precision - 1) - 1 - 2 ** (record.bits - 1)
    bits = torch.from_numpy(random_bits(f"subnormal/{problem.name}", prod(shape)).astype(np.int64))
    return bits.to(BITS[record.bits]).bitwise_and(fraction_and_sign).view(problem.dtype)


def _infinities(problem: Problem, shape: tuple[int, ...]) -> torch.Tensor:
    """``_wide``, where the planes of an image have one inf, -inf, NaN, both infinities, or neither."""
    values = _wide(problem, shape).reshape(*shape[:2], -1)
    middle = values.shape[2] // 2
    for channel, found in enumerate(([np.inf], [-np.inf], [np.nan], [np.inf, -np.inf])):
        values[:, channel, middle : middle + len(found)] = torch.tensor(found, dtype=problem.dtype)
    return values


#: Gradients of a kind, of a shape.
GRADIENTS: dict[str, Callable[[Problem, tuple[int, ...]], torch.Tensor]] = {
    "wide": _wide,
    "planes": _planes,
    "subnormal": _subnormal,
    "infinities": _infinities,
    "zeros": lambda problem, shape: torch.zeros(shape, dtype=problem.dtype),
}


def _uniform(label: str, count: int, least: float, most: float) -> Array:
    numbers = (random_bits(label, count) >> np.uint64(40)).astype(np.float64) * 2.0**-24
    return least + numbers * (most - least)


def grid_values(problem: Problem) -> torch.Tensor:
    """A grid of kind ``problem.grid``."""
    axes, shape = len(problem.size), (problem.batch, *problem.size, len(problem.size))
    label, size = f"grid/{problem.name}", prod(shape)
    values = np.stack([_along(problem, a, label).reshape(shape[:-1]) for a in range(axes)], axis=-1)
    if problem.grid == "not finite":
        flat = values.reshape(-1)
        wanted = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e10, -1e10, 40000.0, -0.0, 1.0, -1.0]
        found = flat[:: 1 + size // 60]
        found[:] = np.resize(wanted, len(found))
    return rounded(np.ascontiguousarray(values), problem.grid_dtype or problem.dtype)


def _along(problem: Problem, axis: int, label: str) -> Array:
    """Grid coordinates along one axis, x first, of shape (N, *size) or flat."""
    pixels, size = problem.image[-1 - axis], problem.size[-1 - axis]
    shape = (problem.batch, *problem.size)
    noise = partial(_uniform, f"{label}/{axis}", prod(shape))
    steps = [np.arange(n, dtype=np.float64) for n in problem.size]
    own = np.broadcast_to(
        steps[-1 - axis].reshape([-1 if d == len(steps) - 1 - axis else 1 for d in range(len(steps))]), shape
    )
    if problem.grid == "affine":  # a different map near the identity for every image
        bent = _uniform(f"{label}/{axis}/map", problem.batch, 0.97, 1.03).reshape(-1, *[1] * len(steps))
        moved = _uniform(f"{label}/{axis}/shift", problem.batch, -0.03, 0.03).reshape(bent.shape)
        return (2 * own + 1 - size) / max(size, 1) * bent + moved
    if problem.grid == "windows":  # samples one pixel apart; a different place for every image
        corner = _uniform(f"{label}/{axis}/corner", problem.batch, -size, pixels)
        place = corner.reshape(-1, *[1] * len(steps)) + own
        return 2 * place / max(pixels - 1, 1) - 1 if problem.aligned else (2 * place + 1) / pixels - 1
    straight = 2 * own / max(size - 1, 1) - 1 if problem.aligned else (2 * own + 1) / max(size, 1) - 1
    if problem.grid == "identity":
        return straight
    if problem.grid == "smooth":
        slanted = np.broadcast_to(steps[0].reshape([-1] + [1] * (len(steps) - 1)), shape) / max(
            problem.size[0], 1
        )
        return straight + 0.2 * slanted + noise(-0.01, 0.01).reshape(shape)
    if problem.grid == "far":
        near = noise(-6, 6)
        near[::5] *= 1e5
        return near
    if problem.grid == "on centres and borders":
        halves = np.floor(noise(-6, 2 * pixels + 5)) / 2
        return 2 * halves / max(pixels - 1, 1) - 1 if problem.aligned else (2 * halves + 1) / pixels - 1
    if problem.grid == "on one pixel":
        return noise(0, 0.4) / pixels
    return noise(-1.2, 1.2)

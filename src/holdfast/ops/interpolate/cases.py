"""Named test inputs of interpolate: every mode, dtype and alignment, several sizes and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch

from holdfast.core.case import Case, laid_out, outputs_of
from holdfast.core.dtypes import FLOATS, dtype_name
from holdfast.core.plan import AnyPlan, Args
from holdfast.ops.interpolate.plan import ANTIALIASED, AXES, Mode
from holdfast.ops.segment_sum.cases import row_values


@dataclass(frozen=True)
class Problem:
    """Parameters of a case. ``image`` is the shape of the input; ``size`` is the output size.

    ``layouts`` are of the input and of the output.
    """

    name: str
    image: tuple[int, ...]
    size: tuple[int, ...]
    mode: Mode = Mode.BILINEAR
    aligned: bool = False
    antialias: bool = False
    scales: tuple[float, ...] | None = None
    dtype: torch.dtype = torch.float32
    values: str = "spread"
    layouts: tuple[str, str] = ("contiguous", "contiguous")
    accumulate: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "shape": self.image, "output_size": self.size, "mode": self.mode, "align_corners": self.aligned,
            "antialias": self.antialias, "scales": self.scales, "dtype": self.dtype,
        }  # fmt: skip


_SMALL, _LARGE = (3, 5, 7), (4, 11, 13)


def _every_kind() -> Iterator[Problem]:
    """Every mode, alignment and filter, larger and smaller, with dtypes in turn."""
    dtypes = cycle([record.torch for record in FLOATS.values()])
    kinds = [
        (mode, aligned, False) for mode in Mode for aligned in ((False, True) if mode in AXES else (False,))
    ]
    kinds += [(mode, aligned, True) for mode in ANTIALIASED for aligned in (False, True)]
    for number, (mode, aligned, antialias) in enumerate(kinds):
        axes = AXES.get(mode, 3 - number % 3)
        if antialias and mode == Mode.BICUBIC:
            next(dtypes)
        for word, size, other in (("larger", _SMALL, _LARGE), ("smaller", _LARGE, _SMALL)):
            dtype = next(dtypes)
            name = f"{axes}-d {mode}{', corners aligned' * aligned}{', antialiased' * antialias}"
            yield Problem(
                f"{name}, {word}, {dtype_name(dtype)}", (2, 2, *size[-axes:]), other[-axes:], mode, aligned,
                antialias, dtype=dtype,
            )  # fmt: skip


def _channels_last() -> Iterator[Problem]:
    """Images whose pixels are runs of many channels."""
    for name, image, size, mode, fields in (
        ("image", (2, 9, 6, 7), (13, 11), Mode.BILINEAR, {}),
        ("area", (1, 17, 40, 9), (5, 4), Mode.AREA, {"dtype": torch.float16}),
        ("wide", (1, 40, 3, 30), (8, 70), Mode.BICUBIC, {"dtype": torch.float64, "accumulate": True}),
        ("special values", (1, 8, 9, 5), (4, 6), Mode.BILINEAR, {"antialias": True, "values": "special"}),
        ("nearest", (1, 8, 5, 9), (4, 5), Mode.NEAREST, {"dtype": torch.bfloat16, "accumulate": True}),
        ("one plane of three", (1, 8, 3, 4, 5), (1, 7, 6), Mode.NEAREST_EXACT, {}),
        ("volume", (2, 9, 4, 3, 5), (6, 5, 4), Mode.TRILINEAR, {}),
        ("volume, area", (1, 8, 11, 12, 9), (2, 2, 4), Mode.AREA, {"dtype": torch.float64}),
        ("volume, nearest", (1, 8, 6, 4, 5), (4, 5, 3), Mode.NEAREST, {"accumulate": True}),
    ):
        last = ("channels last", "channels last")
        yield Problem(f"many channels, last, {name}", image, size, mode, layouts=last, **fields)


def problems() -> list[Problem]:
    image = Problem("", (2, 3, 6, 9), (11, 7))
    padded = replace(image, name="sliced to padded rows", layouts=("sliced", "padded rows"))
    last = ("channels last", "channels last")
    return [
        *_every_kind(),
        *(
            Problem(f"bilinear, {name}", (1, 2, 6, 5), (9, 8), dtype=record.torch, scales=(1.6, 1.7))
            for name, record in FLOATS.items()
        ),
        Problem("nearest, given scales", (1, 2, 10, 10), (23, 23), Mode.NEAREST, scales=(2.3, 2.34)),
        Problem("a scale for one axis", (1, 2, 10, 10), (7, 7), Mode.NEAREST_EXACT, scales=(0.0, 0.75)),
        Problem("bicubic, given scales", (1, 2, 6, 7), (9, 10), Mode.BICUBIC, scales=(1.55, 1.5)),
        Problem("antialiased, given scales", (1, 1, 17, 19), (7, 8), antialias=True, scales=(0.45, 0.46)),
        Problem("one pixel to many", (2, 1, 1, 1), (3, 4), Mode.BICUBIC),
        Problem("many pixels to one, corners aligned", (1, 2, 4, 5), (1, 1), aligned=True),
        Problem("many pixels to one, area", (1, 2, 9, 8), (1, 1), Mode.AREA, accumulate=True),
        Problem("the same size", (1, 2, 5, 6), (5, 6), Mode.BICUBIC, dtype=torch.float16),
        Problem("more columns than a run", (1, 1, 2, 300), (3, 517), dtype=torch.float64),
        Problem("a window of several runs", (1, 1, 600), (2,), Mode.AREA, dtype=torch.float64),
        Problem("windows of several runs", (1, 1, 2, 1000), (1, 3), antialias=True, dtype=torch.bfloat16),
        Problem("many taps", (1, 2, 37, 120), (9, 21), Mode.BICUBIC, antialias=True),
        Problem("many taps, two runs", (1, 1, 21, 700), (11, 290), antialias=True, dtype=torch.bfloat16),
        Problem("many taps, area", (1, 2, 13, 70), (5, 9), Mode.AREA, dtype=torch.float64, accumulate=True),
        Problem("many taps, special values", (1, 1, 20, 90), (7, 80), antialias=True, values="special"),
        Problem("many taps, channels last", (1, 3, 11, 60), (90, 400), dtype=torch.float16, layouts=last),
        Problem("many taps, volume", (1, 2, 3, 21, 90), (2, 9, 40), Mode.AREA, dtype=torch.bfloat16),
        Problem("pieces of several elements", (1, 1, 3, 700), (2, 260), dtype=torch.bfloat16),
        Problem("varying taps", (1, 2, 300), (131,), Mode.LINEAR, dtype=torch.float16),
        Problem("varying taps, special values", (1, 2, 330), (150,), Mode.AREA, values="special"),
        Problem("varying taps, many channels", (2, 9, 130), (61,), Mode.NEAREST, dtype=torch.float64),
        *_channels_last(),
        Problem("an image for several threads", (2, 3, 33, 47), (41, 61), Mode.BICUBIC, aligned=True),
        Problem("twice as large", (1, 2, 5, 20), (10, 40)),
        Problem("twice as large, wide", (1, 1, 3, 270), (6, 540)),
        Problem("twice as large, nearest, two runs", (1, 2, 1, 150), (2, 300), Mode.NEAREST),
        Problem("rows that no pixel reads", (1, 1, 2, 9, 6), (9, 3, 14), Mode.TRILINEAR, dtype=torch.float64),
        Problem("no images", (0, 3, 4, 5), (8, 10)),
        Problem("no channels", (2, 0, 4, 5), (8, 10)),
        Problem("special values", (1, 2, 7, 9), (9, 8), values="special"),
        Problem("special values, volume", (1, 2, 4, 6, 8), (3, 4, 5), Mode.TRILINEAR, values="special"),
        Problem("special values, nearest", (1, 2, 5, 9), (4, 5), Mode.NEAREST, values="special"),
        replace(image, name="channels last", layouts=last, accumulate=True),
        replace(image, name="transposed", layouts=("transposed", "transposed"), dtype=torch.float16),
        replace(padded, dtype=torch.bfloat16, accumulate=True, mode=Mode.BICUBIC),
        replace(image, name="one for all", layouts=("broadcast", "contiguous"), mode=Mode.AREA),
        replace(image, name="unaligned", layouts=("unaligned", "unaligned"), dtype=torch.float16),
        Problem("volumes with channels last", (2, 3, 2, 4, 5), (3, 3, 7), Mode.TRILINEAR, layouts=last),
    ]  # fmt: skip


def cases(plan: AnyPlan) -> list[Case]:
    return [case(plan, problem) for problem in problems()]


def case(plan: AnyPlan, problem: Problem) -> Case:
    desc = plan.Descriptor(**problem.fields)
    return Case(problem.name, desc, partial(_args, plan.Args, desc, problem))


def _args(args: type[Args], desc: Any, problem: Problem) -> Args:
    def values(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return row_values(f"{problem.name}/{name}", shape, dtype, problem.values)

    of_input, of_output = problem.layouts
    (read,) = args.inputs
    made: dict[str, Any] = {read: laid_out(values(read, *desc.expected(read)), of_input)}
    if "accumulate" in args.flags:
        made["accumulate"] = problem.accumulate
    return args(**made, **outputs_of(args, desc, of_output, values if made.get("accumulate") else None))

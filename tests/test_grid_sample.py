"""Tests of grid_sample: values and gradients against torch in float64, and edge cases."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton.language as tl

import holdfast as hf
from holdfast.backends.cpu import kernel
from holdfast.core.case import Case
from holdfast.core.plan import AnyPlan
from holdfast.core.stream import CPU_STREAM
from holdfast.core.workspace_layout import ALIGNMENT, WorkspaceLayout
from holdfast.ops.grid_sample import cases, cpu, cpu_task
from holdfast.ops.grid_sample.cpu_pairs import are_apart
from holdfast.ops.grid_sample.plan import (
    GridSampleArgs,
    GridSampleBackwardArgs,
    GridSampleBackwardDescriptor,
    GridSampleBackwardPlan,
    GridSampleDescriptor,
    GridSamplePlan,
    Mode,
    Padding,
)
from holdfast.ops.grid_sample.reference import at_pixels, axes_of, corners
from holdfast.ops.grid_sample.torch_op import grid_sample
from holdfast.proof.conformance import Way, check, gpu_way, run_reference, select_on

KINDS = [
    (axes, mode, padding, aligned)
    for axes, mode, padding, aligned in itertools.product((2, 3), Mode, Padding, (False, True))
    if axes == 2 or mode != Mode.BICUBIC
]
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]
PLANS: list[AnyPlan] = [GridSamplePlan, GridSampleBackwardPlan]


def named(kind: tuple[int, str, str, bool]) -> str:
    axes, mode, padding, aligned = kind
    return f"{axes}-d {mode} {padding} {'corners' if aligned else 'edges'}"


def case_of(plan: AnyPlan, problem: cases.Problem) -> Case:
    make: Callable[[cases.Problem], Case] = cases._forward if plan is GridSamplePlan else cases._backward
    return make(problem)


def differences(
    plan: AnyPlan, problem: cases.Problem, threads: int | None = None, backend: str = "cpu"
) -> list[Any]:
    """The differences between the kernel of a backend and the reference."""
    case = case_of(plan, problem)
    args, reference = run_reference(plan, case)
    way = gpu_way() if backend == "gpu" else Way(backend, threads=threads, times=1)
    assert way is not None
    return check(plan, case, way, args, reference, select_on(backend))


@pytest.mark.parametrize("plan", PLANS)
def test_cases_are_every_combination(plan: AnyPlan) -> None:
    """The cases cover every combination. Those that are not common cover every combination but dtypes."""
    wanted = {(*kind, *dtypes) for kind in KINDS for dtypes in DTYPES}
    described = [(case, case.descriptor) for case in cases.cases(plan)]
    kinds = [
        (case.common, (d.axes, d.mode, d.padding_mode, d.align_corners, d.input_dtype, d.grid_dtype))
        for case, d in described
        if isinstance(d, GridSampleDescriptor | GridSampleBackwardDescriptor)
    ]
    assert {kind for _, kind in kinds} == wanted
    assert {kind[:4] for common, kind in kinds if not common} == set(KINDS)


@pytest.mark.parametrize("channels", [1, 2, 31, 32, 33, 63, 64, 1023, 1024, 1025, 1056])
def test_sums_over_channels_at_the_edge_of_a_chunk(channels: int) -> None:
    problem = cases.Problem(f"{channels} channels", (channels, 2, 3), (2, 2), batch=1, needs=(False, True))
    assert differences(GridSampleBackwardPlan, problem) == []


@pytest.mark.parametrize("samples", [7, 8, 9, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025])
@pytest.mark.parametrize("mode", [Mode.BILINEAR, Mode.NEAREST])
def test_sums_over_samples_at_the_edge_of_a_chunk(samples: int, mode: Mode) -> None:
    problem = cases.Problem(f"{samples} samples", (3, 3, 3), (1, samples), mode, grid="on one pixel", batch=1)
    assert differences(GridSampleBackwardPlan, replace(problem, needs=(True, False))) == []


#: Tiles that are small enough for these problems to have many tiles of every kind.
SMALL_TILES: dict[str, dict[str, Any]] = {
    "gpu_cells": {"tile": 64, "measured": 64, "vector": 32, "block": 32, "copied": 128, "channels": 16},
    "gpu_dinput_by_cell": {
        "plane_pixels": 16,
        "plane_wide": 8,
        "plane_channels": 8,
        "row_pixels": 16,
        "row_wide": 8,
        "row_lanes": 1,
        "segment_programs": 3,
    },
    "gpu_dinput_by_slot": {"tile": 64, "lanes": 16, "wide": 8, "rows": 3},
    "gpu_dinput_by_plane": {"most_planes": 0},
    "gpu_dgrid": {"tile": 64},
    "gpu": {"few_samples": 64, "many_samples": 64, "small_samples": 32, "min_programs": 8},
}


@pytest.fixture
def small_tiles() -> Iterator[None]:
    with ExitStack() as stack:
        for module, tiles in SMALL_TILES.items():
            found = importlib.import_module(f"holdfast.ops.grid_sample.{module}")
            stack.enter_context(found.TUNING.replaced(**tiles))
        yield


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("channels", [3, 21])
@pytest.mark.parametrize("grid", ["random", "on one pixel"])
def test_nothing_is_lost_at_the_edge_of_a_tile(mode: Mode, channels: int, grid: str) -> None:
    problem = cases.Problem("tiles", (channels, 7, 11), (6, 13), mode, grid=grid)
    for plan in PLANS:
        assert differences(plan, problem, backend="gpu") == []


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("most_idle", [0.0, 1.0], ids=["across images", "one image"])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("mode", list(Mode))
def test_tiles_of_several_images(most_idle: float, layout: str, mode: Mode) -> None:
    from holdfast.ops.grid_sample import gpu

    problem = cases.Problem("tiles", (6, 5, 7), (3, 7), mode, batch=5, layouts=(layout, layout))
    with gpu.TUNING.replaced(most_idle=most_idle):
        assert differences(GridSamplePlan, problem, backend="gpu") == []


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("lines", [0, 99], ids=["scattered", "side by side"])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_the_order_in_which_dgrid_is_summed(lines: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """dgrid is summed in sample order, or by cell for scattered samples. LINES selects one of them."""
    monkeypatch.setattr(
        importlib.import_module("holdfast.ops.grid_sample.gpu_locality"), "LINES", tl.constexpr(lines)
    )
    problem = cases.Problem("either", (21, 17, 11), (16, 13), layouts=(layout, layout), accumulate=True)
    assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("image", "size", "given"),
    [
        ((3, 7, 11), (6, 13), {}),
        ((3, 7, 11), (6, 13), {"mode": Mode.NEAREST}),
        ((3, 7, 11), (6, 13), {"mode": Mode.BICUBIC}),
        ((2, 3, 4, 5), (4, 3, 6), {}),
        ((2, 3, 4, 5), (4, 3, 6), {"mode": Mode.NEAREST}),
        ((40, 3, 5), (4, 9), {"layouts": ("channels last", "channels last")}),
        ((3, 7, 11), (6, 13), {"values": "special", "grid": "on one pixel"}),
        ((3, 7, 11), (6, 13), {"needs": (True, False)}),
        ((3, 7, 11), (6, 13), {"dtype": torch.bfloat16}),
        ((3, 7, 11), (6, 13), {"dtype": torch.float64, "grid_dtype": torch.float64}),
    ],
)
def test_small_problems_by_plane(image: Any, size: Any, given: dict[str, Any], accumulate: bool) -> None:
    from holdfast.ops.grid_sample import gpu, gpu_dinput_by_plane

    problem = cases.Problem("planes", image, size, accumulate=accumulate, **given)
    with gpu_dinput_by_plane.TUNING.replaced(most_planes=500, most_places=500, most_elements=2**16):
        kernel = gpu.GridSampleBackward(
            case_of(GridSampleBackwardPlan, problem).descriptor, torch.device("cpu")
        )
        assert kernel.variant == "dinput by plane"
        assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


@pytest.mark.parametrize("channels", [5, 32, 33, 1025])
def test_sums_over_channels_on_the_gpu(channels: int) -> None:
    problem = cases.Problem(f"{channels} channels", (channels, 2, 3), (2, 2), batch=1, needs=(False, True))
    assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


@pytest.mark.parametrize("channels", [3, 6])
@pytest.mark.parametrize("samples", [14, 15, 32, 33, 1025])
def test_crowds_on_the_gpu(samples: int, channels: int) -> None:
    problem = cases.Problem(f"{samples} samples", (channels, 3, 3), (1, samples), grid="on one pixel")
    assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("values", ["special", "exponents", "any bits"])
@pytest.mark.parametrize("grid", ["random", "on one pixel"])
@pytest.mark.parametrize("lines", [0, 99], ids=["scattered", "side by side"])
def test_any_numbers_by_cell(values: str, grid: str, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("holdfast.ops.grid_sample.gpu_locality"), "LINES", tl.constexpr(lines)
    )
    problem = cases.Problem("numbers", (6, 7, 9), (11, 8), values=values, grid=grid, needs=(True, False))
    assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("image", [(6, 5, 9), (5, 3, 4, 10)], ids=["2-d", "3-d"])
@pytest.mark.parametrize("lines", [0, 99], ids=["scattered", "side by side"])
def test_many_samples_to_a_pixel(image: tuple[int, ...], lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("holdfast.ops.grid_sample.gpu_locality"), "LINES", tl.constexpr(lines)
    )
    problem = cases.Problem("dense", image, (2, 11, 13)[-len(image) + 1 :], needs=(True, False))
    assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


#: The slots of a cell, and its maximum number of samples. With more, dinput is summed by sample.
FILLED = {"many slots": (9, 200), "slots and lists": (2, 200), "lists": (1, 200), "too many samples": (2, 4)}


#: With one group of channels, and with several.
IN_SLOTS = [
    ((3, 9, 11), "spread"), ((1, 9, 11), "special"), ((2, 3, 4, 5), "exponents"), ((3, 5, 7), "subnormal"),
    ((5, 5, 7), "spread"), ((11, 5, 7), "planes"), ((8, 5, 7), "special"), ((7, 2, 3, 5), "spread"),
]  # fmt: skip


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("filled", FILLED)
@pytest.mark.parametrize(("image", "values"), IN_SLOTS)
def test_samples_in_slots(filled: str, image: tuple[int, ...], values: str) -> None:
    from holdfast.ops.grid_sample import gpu, gpu_dinput_by_slot

    slots, longest = FILLED[filled]
    grid = "on one pixel" if filled in ("lists", "too many samples") else "random"
    needs, size = (True, filled != "slots and lists"), image[1:]
    problem = cases.Problem("slots", image, size, values=values, grid=grid, accumulate=True, needs=needs)
    most = {"most_channels": 16, "most_channels_3d": 16, "few_programs": 999 if filled == "lists" else 0}
    with gpu_dinput_by_slot.TUNING.replaced(slots=slots, longest=longest, **most):
        kernel = gpu.GridSampleBackward(
            case_of(GridSampleBackwardPlan, problem).descriptor, torch.device("cpu")
        )
        assert kernel.variant == "dinput by slot"
        assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


def test_words_of_slots_are_counted_in_32_bits() -> None:
    from holdfast.ops.grid_sample.gpu_dinput_by_slot import SPREAD, SlotSums

    desc = GridSampleBackwardDescriptor(shape=(3_000_000, 16, 7, 7), output_size=(7, 7))
    sums = SlotSums(WorkspaceLayout(), torch.device("cpu"), desc, 2**40)
    assert sums.images * 16 * SPREAD.value < 2**31 < desc.batch * 16 * SPREAD.value


@pytest.fixture
def by_column() -> Iterator[None]:
    """Small tiles, and no way but ``gpu_dinput_by_sample`` for few channels."""
    from holdfast.ops.grid_sample import gpu_dinput_by_plane, gpu_dinput_by_sample, gpu_dinput_by_slot

    with (
        gpu_dinput_by_plane.TUNING.replaced(most_planes=0),
        gpu_dinput_by_slot.TUNING.replaced(least_channels=99),
        gpu_dinput_by_sample.TUNING.replaced(lanes=8, steps=3, prepared=16, vector=16, converted=16),
    ):
        yield


#: Samples that are next to each other, whose terms are carried to the sample below, and others.
@pytest.mark.usefixtures("by_column")
@pytest.mark.parametrize("grid", ["affine", "identity", "random", "on one pixel"])
@pytest.mark.parametrize(
    ("image", "size", "given"),
    [
        ((1, 7, 11), (7, 11), {}),
        ((2, 6, 5), (7, 9), {"accumulate": True, "values": "special"}),
        ((3, 5, 9), (5, 9), {"needs": (True, False), "padding": Padding.BORDER}),
        ((4, 4, 5), (1, 19), {"dtype": torch.bfloat16, "layouts": ("channels last", "channels last")}),
        ((1, 3, 4, 5), (3, 4, 5), {"values": "special", "aligned": True}),
        ((2, 3, 4, 5), (4, 3, 5), {"padding": Padding.REFLECTION}),
    ],
)
def test_samples_in_columns(image: Any, size: Any, given: dict[str, Any], grid: str) -> None:
    from holdfast.ops.grid_sample import gpu

    problem = cases.Problem("columns", image, size, grid=grid, **given)
    desc = case_of(GridSampleBackwardPlan, problem).descriptor
    assert isinstance(desc, GridSampleBackwardDescriptor)
    assert gpu.GridSampleBackward(desc, torch.device("cpu")).variant == "dinput by sample"
    assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


#: Planes for which there is memory, and the channels and bands at a time.
@pytest.mark.usefixtures("by_column")
@pytest.mark.parametrize(("planes", "channels", "bands"), [(3, 3, 1), (2, 2, 1), (1, 1, 1), (0.5, 1, 2)])
@pytest.mark.parametrize("mode", [Mode.BILINEAR, Mode.NEAREST])
@pytest.mark.parametrize("values", ["normal", "special"])
def test_little_memory_by_sample(
    planes: float, channels: int, bands: int, mode: Mode, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.ops.grid_sample import gpu
    from holdfast.ops.grid_sample.gpu_dinput_by_sample import SampleSums

    problem = cases.Problem("short", (3, 6, 8), (6, 8), mode=mode, grid="affine", values=values)
    desc = case_of(GridSampleBackwardPlan, problem).descriptor
    assert isinstance(desc, GridSampleBackwardDescriptor)
    monkeypatch.setattr(gpu.GridSampleBackward, "workspace_share", 0.0)
    # A plane has accumulators and words; two regions are aligned.
    parts = SampleSums(WorkspaceLayout(), torch.device("cpu"), desc, 2**20).parts
    least = int(planes * (6 * 8 * 8 + 4 * parts)) + 4 * ALIGNMENT
    monkeypatch.setattr(gpu.GridSampleBackward, "least_workspace", least)
    sums = gpu.GridSampleBackward(desc, torch.device("cpu")).sums
    assert isinstance(sums, SampleSums)
    assert (sums.channels, sums.bands) == (channels, bands)
    assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


#: Percent of the workspace that is allowed, and the images at a time and slots for which it is enough.
SHORT = {"fewer slots": (80, 3, 1), "fewer images": (66, 2, 2), "one image": (36, 1, 1)}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("longest", [20, 4])
@pytest.mark.parametrize(("values", "accumulate"), [("spread", False), ("special", True)])
def test_little_memory_by_slot(
    short: str, longest: int, values: str, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.ops.grid_sample import gpu, gpu_dinput_by_slot
    from holdfast.ops.grid_sample.gpu_dinput_by_slot import SlotSums

    percent, images, slots = SHORT[short]
    problem = cases.Problem("short", (3, 9, 11), (9, 11), values=values, batch=3, accumulate=accumulate)
    desc = case_of(GridSampleBackwardPlan, problem).descriptor
    assert isinstance(desc, GridSampleBackwardDescriptor)
    with gpu_dinput_by_slot.TUNING.replaced(longest=longest, slots=3):
        whole = gpu.GridSampleBackward(desc, torch.device("cpu"))
        budget = whole.workspace_size * percent // 100
        monkeypatch.setattr(gpu.GridSampleBackward, "workspace_share", 0.0)
        monkeypatch.setattr(gpu.GridSampleBackward, "least_workspace", budget)
        parts = gpu.GridSampleBackward(desc, torch.device("cpu"))
        assert isinstance(whole.sums, SlotSums) and isinstance(parts.sums, SlotSums)
        assert (whole.sums.images, whole.sums.SLOTS) == (3, 3)
        assert (parts.sums.images, parts.sums.SLOTS) == (images, slots)
        assert parts.workspace_size <= budget
        assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


@pytest.mark.parametrize("needs", [(True, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", list(Mode))
def test_by_plane_with_many_channels(mode: Mode, dtype: torch.dtype, needs: tuple[bool, bool]) -> None:
    """In bilinear mode, dgrid has a launch of its own; in other modes it is computed in the same launch."""
    from holdfast.ops.grid_sample import gpu
    from holdfast.ops.grid_sample.gpu_dinput_by_plane import PlaneSums

    problem = cases.Problem("planes", (7, 5, 6), (3, 4), mode=mode, dtype=dtype, batch=1, needs=needs)
    desc = case_of(GridSampleBackwardPlan, problem).descriptor
    assert isinstance(desc, GridSampleBackwardDescriptor)
    sums = gpu.GridSampleBackward(desc, torch.device("cpu")).sums
    assert isinstance(sums, PlaneSums)
    assert sums.computes_dgrid == (needs[1] and mode != Mode.BILINEAR)
    assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_some_images_at_a_time_by_cell(
    accumulate: bool, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.ops.grid_sample import gpu
    from holdfast.ops.grid_sample.gpu_dinput_by_cell import CellSums

    problem = cases.Problem("images", (9, 4, 5), (26, 27), batch=5, accumulate=accumulate)
    desc = case_of(GridSampleBackwardPlan, problem).descriptor
    assert isinstance(desc, GridSampleBackwardDescriptor)
    whole = gpu.GridSampleBackward(desc, torch.device("cpu"))
    monkeypatch.setattr(gpu.GridSampleBackward, "workspace_share", 0.0)
    budget = whole.workspace_size - 1 if copies else 26 * 27 * 9 * 4
    monkeypatch.setattr(gpu.GridSampleBackward, "least_workspace", budget)
    parts = gpu.GridSampleBackward(desc, torch.device("cpu"))
    assert isinstance(whole.sums, CellSums) and isinstance(parts.sums, CellSums)
    assert whole.sums.images == 5 and parts.sums.images == (3 if copies else 1)
    assert parts.sums.copies == copies and parts.workspace_size <= budget
    assert differences(GridSampleBackwardPlan, problem, backend="gpu") == []


def run_on(backend: str, desc: GridSampleBackwardDescriptor, operands: dict[str, torch.Tensor]) -> Any:
    """The outputs of a backward plan as integers."""
    given = {name: tensor.clone() for name, tensor in operands.items()}
    plan = GridSampleBackwardPlan.select(CPU_STREAM, desc, hf.PlanPreference(backend=backend))
    plan.run(CPU_STREAM, hf.Workspace.allocate(plan.workspace_size(), "cpu"), GridSampleBackwardArgs(**given))
    return [given[name].view(torch.int32) for name in ("dinput", "dgrid") if name in given]


@pytest.mark.parametrize("dgrid", [True, False])
@pytest.mark.parametrize("padding", list(Padding))
@pytest.mark.parametrize(("image", "window"), [((1, 7, 9), (3, 4)), ((2, 6, 5), (7, 7)), ((3, 4, 5), (1, 1))])
def test_windows_in_small_images(image: Any, window: Any, padding: Padding, dgrid: bool) -> None:
    """The images are: windows near, across and outside the edge, a scattered one, and special values."""
    from holdfast.ops.grid_sample import gpu

    desc = GridSampleBackwardDescriptor(
        shape=(12, *image), output_size=window, padding_mode=padding, needs_dgrid=dgrid
    )
    kernel = gpu.GridSampleBackward(desc, torch.device("cpu"))
    assert kernel.variant == "dinput by image"
    generator = torch.Generator().manual_seed(5)
    operands = {
        name: torch.randn(desc.expected(name)[0], generator=generator)
        for name in GridSampleBackwardPlan.operands
        if desc.expected(name) is not None and (dgrid or name not in ("dgrid", "input"))
    }
    rows, columns = torch.meshgrid(*(torch.arange(1.0 * size) for size in window), indexing="ij")
    corners = (
        torch.linspace(-window[1] - 3, image[2] + 3, 12),
        torch.linspace(image[1] + 3, -window[0] - 3, 12),
    )
    for n in range(12):
        x, y = columns + corners[0][n] + 0.3, rows + corners[1][(5 * n) % 12] + 0.6
        operands["grid"][n] = torch.stack([(2 * x + 1) / image[2] - 1, (2 * y + 1) / image[1] - 1], -1)
    operands["grid"][5] = torch.randn((*window, 2), generator=generator)
    operands["dout"][6, 0, 0, 0], operands["dout"][7, -1, -1, -1] = float("inf"), float("nan")
    assert all(map(torch.equal, run_on("gpu", desc, operands), run_on("cpu", desc, operands)))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_number_of_threads_changes_no_bit(plan: AnyPlan, threads: int) -> None:
    for batch in (1, 5):
        problem = cases.Problem("threads", (13, 17, 19), (29, 31), batch=batch)
        assert differences(plan, problem, threads) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_sums_with_unused_places_after_each_row(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images whose rows are a power of two apart have them; here all images do."""
    monkeypatch.setattr(cpu, "_COLLIDING", 1)
    monkeypatch.setattr(cpu, "_UNUSED", 1)
    plan, way = GridSampleBackwardPlan, Way("cpu", threads=threads, times=1)
    for case in cases.cases(plan):
        if case.common:
            args, reference = run_reference(plan, case)
            assert check(plan, case, way, args, reference, select_on("cpu")) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("image", [(1, 9, 40), (4, 9, 40), (3, 3, 5, 40)])
@pytest.mark.parametrize("columns", [45, 640])
def test_places_of_two_columns(columns: int, image: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows of samples that are about one pixel apart, and a sixteenth of a pixel: neighbours of neighbours.

    A run of samples ends within a vector. The channels are an odd or an even number.
    """
    size = (*(3,) * (len(image) - 2), columns)
    problem = cases.Problem(f"{columns} columns", image, size, grid="smooth", dtype=dtype)
    for plan in PLANS:
        assert differences(plan, problem) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("image", "size"),
    [((1, 9, 12), (9, 9)), ((1, 3, 4, 5), (2, 3, 7)), ((1, 5, 4), (1, 255)), ((1, 5, 4), (1, 1))],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_samples_of_several_images_in_a_run(threads: int, image: Any, size: Any, dtype: torch.dtype) -> None:
    """Runs that begin and end within an image, and span some: with one channel, where samples are few."""
    problem = cases.Problem("joint", image, size, dtype=dtype, batch=37, padding=Padding.BORDER)
    kernel = cpu.GridSample(GridSampleDescriptor(**problem.fields), torch.device("cpu"))
    assert kernel.joint(cases._forward_args(problem))
    assert not kernel.joint(cases._forward_args(replace(problem, layouts=("contiguous", "padded rows"))))
    for one in (problem, replace(problem, layouts=("sliced", "contiguous"), grid="not finite")):
        assert differences(GridSamplePlan, one, threads) == []


@kernel
def count_apart(offsets: int, count: int) -> bool:
    return bool(are_apart(offsets, count))


@pytest.mark.parametrize(
    ("step", "count", "apart"),
    [(1, 256, True), (1, 33, True), (1, 31, False), (0, 256, True), (16, 256, True), (1 / 16, 256, False)],
)
def test_samples_are_added_apart_from_their_neighbours(step: float, count: int, apart: bool) -> None:
    """Places that are ``step`` pixels apart. Sums of places side by side are not added after each other."""
    offsets = (torch.arange(count) * step).long()
    assert count_apart(offsets.data_ptr(), count) == apart


def test_sums_of_rows_that_are_a_power_of_two_apart() -> None:
    desc = GridSampleBackwardDescriptor(shape=(1, 3, 16, 512), output_size=(3, 5))
    assert cpu.GridSampleBackward(desc, torch.device("cpu")).unused
    desc = GridSampleBackwardDescriptor(shape=(1, 3, 512, 500), output_size=(3, 5))
    assert not cpu.GridSampleBackward(desc, torch.device("cpu")).unused
    for threads in (1, 3):
        problem = cases.Problem("wide", (3, 16, 256), (29, 31), batch=1)
        assert differences(GridSampleBackwardPlan, problem, threads) == []


@pytest.mark.usefixtures("shared_finely")
def test_threads_that_share_an_image_use_no_memory_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of the pixels is totalled first. It must not write to the runs of the first slot."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    desc = GridSampleBackwardDescriptor(shape=(1, 1, 100, 100), output_size=(100, 100))
    plan = GridSampleBackwardPlan.select(CPU_STREAM, desc, hf.PlanPreference(backend="cpu"))
    kernel: Any = plan.kernel
    assert kernel.slots == 2 and kernel.split == 1
    workspace = hf.Workspace.allocate(plan.workspace_size(), "cpu")
    runs = [region.tensor(workspace).view(torch.uint8) for region in kernel.regions[:7]]
    run, totalled = cpu_task.run_together, []

    def last_part_first(function: Any, task: Any, elements: int) -> None:
        if task[cpu_task.STEP] != cpu._TOTAL:
            run(function, task, elements)
            return
        for part in (1, 0):
            task[cpu_task.NEXT], task[cpu_task.THREAD], task[cpu_task.END] = part, 0, part + 1
            before = [run.clone() for run in runs]
            function.call(task)
            totalled.append(all(map(torch.equal, before, runs)))

    monkeypatch.setattr(cpu_task, "run_together", last_part_first)
    operands = random_operands(desc)
    operands["dinput"] = torch.empty(1, 1, 100, 200)[..., ::2]  # a contiguous one would need no runs
    plan.run(CPU_STREAM, workspace, GridSampleBackwardArgs(**operands))
    assert totalled == [True, False]


def random_operands(desc: GridSampleBackwardDescriptor) -> dict[str, torch.Tensor]:
    """Tensors for every operand of a descriptor."""
    generator, found = torch.Generator().manual_seed(3), {}
    for name in GridSampleBackwardPlan.operands:
        expected = desc.expected(name)
        assert expected is not None
        found[name] = 2 * torch.rand(expected[0], generator=generator).to(expected[1]) - 1
    return found


def exact_problem(axes: int, dtype: torch.dtype, grid_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """An image, a grid with exact coordinates, and gradients.

    Grid values have few bits and sizes are powers of two, so that float64 gives the same sample positions. No
    sample is at a point where the derivative is discontinuous.
    """
    generator = torch.Generator().manual_seed(7)
    size, output = (4, 8, 16)[-axes:], (3, 7, 11)[-axes:]
    bits = {torch.bfloat16: 64, torch.float16: 512}.get(grid_dtype, 4096)
    odd = 2 * torch.randint(-bits // 2, bits // 2, (2, *output, axes), generator=generator) + 1
    grid = (1.25 * odd / bits if bits > 64 else odd / bits).to(grid_dtype)
    image = torch.randn((2, 37, *size), generator=generator).to(dtype)
    dout = torch.randn((2, 37, *output), generator=generator).to(dtype)
    return image, grid, dout


def units(image: torch.Tensor, grid: torch.Tensor, dout: torch.Tensor, desc: Any) -> dict[str, torch.Tensor]:
    """The sums of magnitudes, which are the unit of the errors."""
    v, d = (t.double().abs().reshape(*t.shape[:2], -1).numpy() for t in (image, dout))
    axes = axes_of(grid.double().reshape(desc.batch, desc.samples, desc.axes).numpy(), desc)
    out, dinput = np.zeros_like(d), np.zeros_like(v)
    dgrid = np.zeros((desc.batch, desc.samples, desc.axes))
    for corner in corners(axes, desc):
        inside = (corner.pixel >= 0)[:, None]
        pixels = np.where(inside, at_pixels(v, corner.pixel), 0)
        out += pixels
        for n in range(desc.batch):
            np.add.at(dinput[n].T, np.maximum(corner.pixel[n], 0), np.where(inside[n], d[n], 0).T)
        for a, axis in enumerate(axes):
            dgrid[..., a] += (d * pixels).sum(1) * np.abs(axis.scale)
    found = {"out": (out, dout), "dinput": (dinput, image), "dgrid": (dgrid, grid)}
    return {name: torch.from_numpy(unit).reshape(like.shape) for name, (unit, like) in found.items()}


def last_place(unit: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unit in the last place of each number in ``dtype``."""
    precision = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}[dtype]
    _, exponent = torch.frexp(unit.clamp(min=torch.finfo(dtype).tiny))
    return torch.ldexp(torch.ones_like(unit), exponent - precision)


@pytest.mark.parametrize("kind", KINDS, ids=named)
@pytest.mark.parametrize(("dtype", "grid_dtype"), DTYPES)
def test_within_the_bound_that_the_plan_states(
    kind: tuple[int, Mode, Padding, bool], dtype: torch.dtype, grid_dtype: torch.dtype
) -> None:
    axes, mode, padding, aligned = kind
    image, grid, dout = exact_problem(axes, dtype, grid_dtype)
    wide_image, wide_grid = (t.to(torch.float64, copy=True).requires_grad_() for t in (image, grid))
    options = {"mode": str(mode), "padding_mode": str(padding), "align_corners": aligned}
    exact = F.grid_sample(wide_image, wide_grid, **options)  # type: ignore[arg-type]
    exact_dinput, exact_dgrid = torch.autograd.grad(exact, (wide_image, wide_grid), dout.double())
    own_image, own_grid = image.clone().requires_grad_(), grid.clone().requires_grad_()
    out = grid_sample(own_image, own_grid, **options)  # type: ignore[arg-type]
    dinput, dgrid = torch.autograd.grad(out, (own_image, own_grid), dout)
    fields: dict[str, Any] = {
        "shape": image.shape, "output_size": grid.shape[1:-1], "mode": mode, "padding_mode": padding,
        "align_corners": aligned, "input_dtype": dtype, "grid_dtype": grid_dtype,
    }  # fmt: skip
    desc = GridSampleBackwardDescriptor(**fields)
    bounds = {
        **GridSamplePlan.select(CPU_STREAM, GridSampleDescriptor(**fields)).precision_guarantee().ulp,
        **GridSampleBackwardPlan.select(CPU_STREAM, desc).precision_guarantee().ulp,
    }
    found = {
        "out": (out.detach(), exact.detach()),
        "dinput": (dinput, exact_dinput),
        "dgrid": (dgrid, exact_dgrid),
    }
    of = units(image, grid, dout, desc)
    for name, (ours, theirs) in found.items():
        # In float64, torch has an error of the same size.
        bound = bounds[name] * (2 if dtype == torch.float64 else 1)
        error = (ours.double() - theirs).abs() / last_place(of[name], ours.dtype)
        assert error.max() <= bound, f"{name}: {error.max()} ULP, {bound} are stated"
        assert mode == Mode.NEAREST or dtype == torch.float64 or error.max() > 0, (
            "a test that measures nothing"
        )


def test_coordinates_are_the_correctly_rounded_operations_of_the_definition() -> None:
    grid = torch.linspace(-1.3, 1.3, 101).reshape(1, 1, 101, 1).repeat(1, 1, 1, 2)
    g, size = grid[0, 0, :, 0].numpy(), 7
    one, two = np.float32(1), np.float32(2)
    image = torch.arange(size, dtype=torch.float32).reshape(1, 1, 1, size).repeat(1, 1, size, 1)
    for aligned in (False, True):
        x = ((g + one) / two) * np.float32(6) if aligned else ((g + one) * np.float32(7) - one) / two
        first = np.floor(x)
        t = x - first
        wanted = np.zeros_like(x)
        for down, across in itertools.product(((0, one - t), (1, t)), repeat=2):
            (dy, wy), (dx, wx) = down, across
            inside = (first + dx >= 0) & (first + dx < size) & (first + dy >= 0) & (first + dy < size)
            wanted = np.where(inside, wanted + (wx * wy) * (first + np.float32(dx)), wanted)
        out = grid_sample(image, grid, align_corners=aligned)[0, 0, 0].numpy()
        assert np.array_equal(out, wanted) and (wanted != 0).sum() > 70


@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_gradcheck(kind: tuple[int, Mode, Padding, bool]) -> None:
    axes, mode, padding, aligned = kind
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(
        (1, 2, *(2, 3, 4)[-axes:]), generator=generator, dtype=torch.float64, requires_grad=True
    )
    grid = torch.rand((1, *(1, 2, 3)[-axes:], axes), generator=generator, dtype=torch.float64) * 2.6 - 1.3
    sample = partial(grid_sample, mode=str(mode), padding_mode=str(padding), align_corners=aligned)
    if mode == Mode.NEAREST:  # the grid has no gradient
        assert torch.autograd.gradcheck(lambda x: sample(x, grid), (image,), nondet_tol=0.0)
        assert torch.autograd.gradgradcheck(lambda x: sample(x, grid), (image,), nondet_tol=0.0)
        return
    grid.requires_grad_()
    assert torch.autograd.gradcheck(sample, (image, grid), nondet_tol=0.0)
    if (padding, aligned) in ((Padding.ZEROS, False), (Padding.REFLECTION, True)) and axes == 2:
        assert torch.autograd.gradgradcheck(sample, (image, grid))


def test_second_derivatives_in_three_dimensions() -> None:
    generator = torch.Generator().manual_seed(5)
    image = torch.randn((1, 1, 2, 2, 3), generator=generator, dtype=torch.float64, requires_grad=True)
    grid = torch.rand((1, 1, 1, 2, 3), generator=generator, dtype=torch.float64) * 1.6 - 0.8
    assert torch.autograd.gradgradcheck(grid_sample, (image, grid.requires_grad_()))


NOT_PLACES = [float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e10, -1e10]


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("value", NOT_PLACES)
def test_coordinates_that_are_no_places(mode: Mode, aligned: bool, value: float) -> None:
    image = torch.arange(1.0, 21.0).reshape(1, 1, 4, 5)
    for axis, padding in itertools.product((0, 1), Padding):
        place = torch.tensor([[[[0.1, 0.1]]]])
        place[..., axis] = value
        own_image, own_grid = image.clone().requires_grad_(), place.requires_grad_()
        out = grid_sample(own_image, own_grid, str(mode), str(padding), aligned)
        dinput, dgrid = torch.autograd.grad(out, (own_image, own_grid), torch.ones_like(out))
        assert dgrid[..., axis] == 0
        assert out.isfinite().all() and dinput.isfinite().all() and dgrid.isfinite().all()
        if padding == Padding.ZEROS:
            assert out == 0 and (dinput == 0).all() and (dgrid == 0).all()
        else:
            assert torch.isclose(dinput.sum(), torch.tensor(1.0))
        if padding == Padding.BORDER:
            last = value > 0
            edge = image[..., :, -1 if last else 0] if axis == 0 else image[..., -1 if last else 0, :]
            assert edge.min() - 1 <= out <= edge.max() + 1


def test_a_sample_has_the_same_bits_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(11)
    image, grid = (
        torch.randn((5, 6, 7, 9), generator=generator),
        torch.rand((5, 33, 35, 2), generator=generator),
    )
    dout = torch.randn((5, 6, 33, 35), generator=generator)

    def gradients(of: slice) -> tuple[torch.Tensor, ...]:
        x, g = image[of].clone().requires_grad_(), grid[of].clone().requires_grad_()
        out = grid_sample(x, g, padding_mode="border")
        return out.detach(), *torch.autograd.grad(out, (x, g), dout[of])

    together = gradients(slice(None))
    for n in range(5):
        for alone, batched in zip(gradients(slice(n, n + 1)), together, strict=True):
            assert torch.equal(alone[0], batched[n])


def test_channels_last_stays_so_and_has_the_same_bits() -> None:
    for shape, size in (((2, 5, 6, 7), (3, 4)), ((2, 5, 3, 6, 7), (2, 3, 4))):
        generator = torch.Generator().manual_seed(13)
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        image = torch.randn(shape, generator=generator)
        grid = torch.rand((2, *size, len(size)), generator=generator) * 2 - 1
        x, y = image.clone().requires_grad_(), image.to(memory_format=last).requires_grad_()
        a, b = grid_sample(x, grid), grid_sample(y, grid)
        assert b.is_contiguous(memory_format=last) and torch.equal(a, b)
        (dx,) = torch.autograd.grad(a.square().sum(), x)
        (dy,) = torch.autograd.grad(b.square().sum(), y)
        assert dy.is_contiguous(memory_format=last) and torch.equal(dx, dy)


def test_only_what_is_needed_is_kept_and_computed() -> None:
    image, grid = torch.randn(1, 2, 3, 4), torch.rand(1, 2, 2, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        grid_sample(image.requires_grad_(), grid)
    assert kept == [tuple(grid.shape)]
    gradients = torch.ops.holdfast.grid_sample_backward(
        torch.ones(1, 2, 2, 2), None, grid, image.shape, False, "bilinear", "zeros", False, True, False
    )
    assert [tuple(g.shape) for g in gradients] == [tuple(image.shape), (0,)]


def test_a_grid_in_another_dtype() -> None:
    image, grid = torch.randn(1, 2, 5, 5), torch.rand(1, 3, 3, 2) * 2 - 1
    half = grid_sample(image.bfloat16(), grid)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, grid_sample(image.bfloat16().float(), grid).bfloat16())
    narrow = grid.half().requires_grad_()
    out = grid_sample(image, narrow)
    assert torch.equal(out, grid_sample(image, grid.half().float()))
    out.sum().backward()
    assert narrow.grad is not None and narrow.grad.dtype == torch.float16
    with pytest.raises(hf.InvalidDescriptor, match=r"grid_dtype is torch\.float64"):
        grid_sample(image, grid.double())


def test_autocast_takes_a_half_image_with_a_float_grid() -> None:
    layer = torch.nn.Conv2d(2, 2, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grid_sample(layer(torch.randn(1, 2, 4, 4)), torch.zeros(1, 2, 2, 2))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_opcheck(needs: tuple[bool, bool]) -> None:
    image, grid = torch.randn(2, 3, 4, 5), torch.rand(2, 2, 3, 2) * 2 - 1
    kind = ("bilinear", "border", True)
    torch.library.opcheck(
        torch.ops.holdfast.grid_sample.default,
        (image.clone().requires_grad_(needs[0]), grid.clone().requires_grad_(needs[1]), *kind),
    )
    torch.library.opcheck(
        torch.ops.holdfast.grid_sample_backward.default,
        (torch.randn(2, 3, 2, 3), image if needs[1] else None, grid, [2, 3, 4, 5], False, *kind, *needs),
    )


def test_compiled_whole() -> None:
    def warped(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return grid_sample(x * 2, torch.tanh(g), padding_mode="reflection").square().sum()

    x, g = torch.randn(2, 3, 5, 6, requires_grad=True), torch.randn(2, 4, 3, 2, requires_grad=True)
    compiled = torch.compile(warped, fullgraph=True, backend="aot_eager")
    plain, traced = warped(x, g), compiled(x, g)
    assert torch.equal(plain, traced)
    for a, b in zip(torch.autograd.grad(plain, (x, g)), torch.autograd.grad(traced, (x, g)), strict=True):
        assert torch.equal(a, b)


def test_vmap_gives_the_bits_of_a_loop() -> None:
    image, grid = torch.randn(3, 2, 4, 5, 6), torch.rand(3, 2, 3, 4, 2) * 2 - 1
    looped = torch.stack([grid_sample(x, g) for x, g in zip(image, grid, strict=True)])
    assert torch.equal(torch.vmap(grid_sample)(image, grid), looped)
    shared = torch.stack([grid_sample(image[0], g) for g in grid])
    assert torch.equal(torch.vmap(grid_sample, (None, 0))(image[0], grid), shared)
    kind = (False, "bilinear", "zeros", False, True, True)
    size = list(image.shape[1:])
    backward = torch.ops.holdfast.grid_sample_backward
    dinput, dgrid = torch.vmap(lambda d, x, g: backward(d, x, g, size, *kind))(looped, image, grid)
    for n in range(3):
        alone = backward(looped[n], image[n], grid[n], size, *kind)
        assert torch.equal(dinput[n], alone[0]) and torch.equal(dgrid[n], alone[1])


def test_a_limited_workspace_on_the_gpu() -> None:
    problem = cases.Problem("limited", (9, 20, 17), (12, 11), batch=1)
    case = case_of(GridSampleBackwardPlan, problem)
    device = hf.Stream.current("cuda" if torch.cuda.is_available() else "cpu")
    preference = hf.PlanPreference(backend="gpu", precompile=False)
    usual = GridSampleBackwardPlan.select(device, case.descriptor, preference)
    limit = usual.workspace_size() // 3
    lean = GridSampleBackwardPlan.select(
        device, case.descriptor, replace(preference, max_workspace_bytes=limit)
    )
    assert lean.workspace_size() <= limit and lean.backend == "gpu"
    made = []
    for plan in (usual, lean):
        args: Any = case.make()
        for name in ("dout", "grid", "input", "dinput", "dgrid"):
            setattr(args, name, getattr(args, name).to(device.device))
        plan.run(device, hf.Workspace.allocate(plan.workspace_size(), device.device), args)
        made.append((args.dinput, args.dgrid))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.usefixtures("shared_finely")  # the usual workspace has a part per thread
def test_a_limited_workspace_is_kept_to_with_the_same_bits() -> None:
    shape, size = (2, 16, 33, 35), (31, 37)
    image, grid, dout = torch.randn(shape), torch.rand(2, *size, 2) * 2.2 - 1.1, torch.randn(2, 16, *size)
    forward = GridSampleDescriptor(shape=shape, output_size=size)
    backward = GridSampleBackwardDescriptor(shape=shape, output_size=size)
    results = []
    least: dict[AnyPlan, int] = {}
    for limit in (None, "half", 0):
        found: list[torch.Tensor] = []
        for plan, desc in ((GridSamplePlan, forward), (GridSampleBackwardPlan, backward)):
            allowed = least[plan] // 2 if limit == "half" else limit
            made: Any = plan.select(CPU_STREAM, desc, hf.PlanPreference(max_workspace_bytes=allowed))
            least.setdefault(plan, made.workspace_size())
            assert allowed is None or made.workspace_size() <= allowed
            assert (made.backend == "cpu") == (limit != 0)
            out, dinput, dgrid = torch.empty_like(dout), torch.empty_like(image), torch.empty_like(grid)
            args: Any = GridSampleArgs(input=image, grid=grid, out=out)
            if plan is GridSampleBackwardPlan:
                args = GridSampleBackwardArgs(dout=dout, input=image, grid=grid, dinput=dinput, dgrid=dgrid)
            made.run(CPU_STREAM, hf.Workspace.allocate(made.workspace_size(), "cpu"), args)
            found += [out] if plan is GridSamplePlan else [dinput, dgrid]
        results.append(found)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (2, 3, 4)}, "accepted are images of shape"),
        ({"output_size": (3,)}, "one size for each of the last 2 axes"),
        ({"output_size": (-1, 3)}, "negative size"),
        ({"output_size": "ab"}, "must be a sequence of whole numbers"),
        ({"shape": (2, 3, 0, 4)}, "must have from 1 to 16777216 pixels"),
        ({"output_size": (2**20, 2**20)}, "Split them up"),
        ({"shape": (1, 2**20 + 1, 4, 4)}, "at most 1048576 are accepted"),
        ({"mode": "cubic"}, "mode is 'cubic'; accepted are 'bilinear', 'nearest', 'bicubic'"),
        ({"padding_mode": "wrap"}, "padding_mode is 'wrap'"),
        ({"shape": (2, 3, 4, 4, 4), "output_size": (1, 1, 1), "mode": "bicubic"}, "the image is 3-D"),
        ({"align_corners": 1}, "it must be True or False"),
        ({"input_dtype": torch.int8}, "input_dtype is torch.int8"),
        ({"grid_dtype": torch.float64}, "the grid must be torch.float32"),
    ],
)
def test_descriptors_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"shape": (2, 3, 4, 5), "output_size": (6, 7), **change}
    with pytest.raises(hf.InvalidDescriptor, match=message):
        GridSamplePlan.select(CPU_STREAM, GridSampleDescriptor(**fields))


def test_a_gradient_of_nothing_is_refused() -> None:
    desc = GridSampleBackwardDescriptor(
        shape=(1, 1, 1, 1), output_size=(1, 1), needs_dinput=False, needs_dgrid=False
    )
    with pytest.raises(hf.InvalidDescriptor, match="nothing to compute"):
        desc.validate()


def test_what_is_not_needed_must_not_be_given() -> None:
    desc = GridSampleBackwardDescriptor(shape=(1, 1, 2, 2), output_size=(1, 1), needs_dgrid=False)
    plan = GridSampleBackwardPlan.select(CPU_STREAM, desc, hf.PlanPreference(backend="reference"))
    tensors = {
        "dout": torch.ones(1, 1, 1, 1),
        "grid": torch.zeros(1, 1, 1, 2),
        "dinput": torch.empty(1, 1, 2, 2),
    }
    assert plan.can_implement(GridSampleBackwardArgs(**tensors))
    refused = plan.can_implement(GridSampleBackwardArgs(**tensors, input=torch.ones(1, 1, 2, 2)))
    assert "the descriptor says that there is none" in refused.reason


@pytest.mark.parametrize(
    ("image", "grid"),
    [
        ((2, 3, 4), (2, 1, 1, 2)),
        ((2, 3, 4, 4), (2, 1, 1, 3)),
        ((2, 3, 4, 4), (1, 1, 1, 2)),
        ((2, 3, 4, 4), (2, 1, 2)),
    ],
)
def test_shapes_that_do_not_fit(image: tuple[int, ...], grid: tuple[int, ...]) -> None:
    with pytest.raises(hf.InvalidArgs, match="accepted are"):
        grid_sample(torch.zeros(image), torch.zeros(grid))


def test_descriptors_go_to_json_and_back() -> None:
    desc = GridSampleBackwardDescriptor(
        shape=(2, 3, 4, 5), output_size=(6, 7), mode=Mode.BICUBIC, padding_mode=Padding.BORDER,
        align_corners=True, input_dtype=torch.bfloat16, needs_dgrid=False,
    )  # fmt: skip
    assert hf.plans.Descriptor.from_json(desc.to_json()) == desc
    assert GridSampleDescriptor(shape=(1, 1, 1, 1), output_size=(1, 1), mode="nearest").mode is Mode.NEAREST  # type: ignore[arg-type]


def test_the_example_trains_to_the_same_weights_twice() -> None:
    path = Path(__file__).resolve().parents[1] / "examples" / "spatial_transformer.py"
    given = [sys.executable, "-W", "error", str(path), "--device", "cpu", "--steps", "20"]
    result = subprocess.run(given, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("cpu: ") and result.stdout.endswith(", twice\n")


@pytest.mark.parametrize("size", [(0, 3), (2, 2)])
def test_few_samples_add_to_every_pixel_once(size: tuple[int, int]) -> None:
    """On the CPU the pixels that no sample touches are stored apart from the others."""
    generator = torch.Generator().manual_seed(5)
    old, dout = torch.randn(3, 2, 9, 11, generator=generator), torch.randn(3, 2, *size, generator=generator)
    grid = torch.rand(3, *size, 2, generator=generator) * 0.4
    desc = hf.plans.GridSampleBackwardDescriptor(shape=(3, 2, 9, 11), output_size=size, needs_dgrid=False)
    stream, found = hf.Stream.current("cpu"), {}
    for backend in ("reference", "cpu"):
        plan = hf.plans.GridSampleBackwardPlan.select(stream, desc, hf.PlanPreference(backend=backend))
        dinput = old.clone()
        workspace = hf.Workspace.allocate(plan.workspace_size(), "cpu")
        args = hf.plans.GridSampleBackwardArgs(dout=dout, grid=grid, dinput=dinput, accumulate=True)
        plan.run(stream, workspace, args)
        found[backend] = dinput
    assert torch.equal(found["cpu"], found["reference"])
    assert torch.equal(found["cpu"] != old, found["reference"] != old)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "shape, size",
    [
        ((16, 3, 512, 512), (512, 512)),
        ((4, 3, 480, 640), (480, 640)),
        ((8, 64, 256, 256), (256, 256)),
        ((7040, 1, 55, 128), (9, 9)),
        ((64, 32, 100, 134), (13294, 4)),
        ((64, 32, 20, 20), (300, 4)),
        ((1, 1, 160, 192, 224), (160, 192, 224)),
        ((1, 3, 160, 192, 224), (160, 192, 224)),
    ],
)
def test_workspace_on_the_gpu_is_limited(shape: Any, size: Any, needs: tuple[bool, bool]) -> None:
    from holdfast.backends.tuning import tuned_as_on_gpu
    from holdfast.ops.grid_sample import gpu

    desc = GridSampleBackwardDescriptor(
        shape=shape, output_size=size, needs_dinput=needs[0], needs_dgrid=needs[1]
    )
    with tuned_as_on_gpu():
        kernel = gpu.GridSampleBackward(desc, torch.device("cpu"))
    elements = np.prod(shape) * needs[0] + shape[0] * np.prod(size) * len(size) * needs[1]
    assert kernel.workspace_size <= max(1.5 * 4 * elements, 2**24)

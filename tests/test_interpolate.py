"""Tests of interpolate: its values and gradients against torch, and its plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import holdfast as hf
from holdfast.core.bits import digest
from holdfast.core.errors import HoldfastError, InvalidDescriptor
from holdfast.core.stream import CPU_STREAM
from holdfast.ops.interpolate.plan import (
    ANTIALIASED,
    AXES,
    InterpolateBackwardArgs,
    InterpolateBackwardDescriptor,
    InterpolateBackwardPlan,
    InterpolateDescriptor,
    InterpolatePlan,
    Mode,
)
from holdfast.ops.interpolate.tables import table_of

GPU = "cuda" if torch.cuda.is_available() else "cpu"

KINDS = [(mode, False) for mode in Mode] + [(mode, True) for mode in ANTIALIASED]
every_kind = pytest.mark.parametrize(("mode", "antialias"), KINDS)


def drawn(mode: Mode, antialias: bool, count: int) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """Shapes of inputs, and arguments of the function.

    torch's CPU kernels ignore a scale factor if an axis keeps its size, or doubles it. Their antialiased
    values, but not their gradients, are wrong for an output that is one column wide.
    """
    rng = random.Random(f"{mode} {antialias}")
    while count:
        axes = AXES.get(mode) or rng.choice((1, 2, 3))
        longest = (300, 40, 12)[axes - 1]
        image = tuple(rng.randint(1, longest) for _ in range(axes))
        given: dict[str, Any] = {"mode": str(mode)} | ({"antialias": True} if antialias else {})
        if mode in AXES:
            given["align_corners"] = rng.choice((None, False, True))
        size = tuple(rng.randint(1, longest) for _ in range(axes))
        if rng.random() < 0.5:
            given["size"] = size
        else:
            factors = [rng.choice((2.0, 0.5, 1.5, 1 / 3, rng.uniform(0.3, 3))) for _ in range(axes)]
            size = tuple(int(n * factor) for n, factor in zip(image, factors, strict=True))
            given["scale_factor"] = factors
            given["recompute_scale_factor"] = rng.choice((None, False, True))
            pairs = zip(image, size, factors, strict=True)
            if 0 in size or any(out in (n, 2 * n) and out != n * factor for n, out, factor in pairs):
                continue
        if antialias and size[-1] == 1:
            continue
        count -= 1
        yield (rng.randint(1, 2), rng.randint(1, 3), *image), given


@every_kind
def test_values_and_gradients_are_those_of_torch(mode: Mode, antialias: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    for shape, given in drawn(mode, antialias, 60):
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        if mode in (Mode.NEAREST, Mode.NEAREST_EXACT):  # torch computes the index in the dtype of the input
            x = other = x.float().requires_grad_()
            own = x.detach().double().requires_grad_()
        out, expected = hf.interpolate(own, **given), F.interpolate(other, **given)
        dout = torch.randn(out.shape, dtype=torch.float64, generator=generator)
        out.backward(dout)
        expected.backward(dout.to(expected.dtype))
        assert own.grad is not None and other.grad is not None
        if expected.dtype == torch.float32:
            assert torch.equal(out, expected.double()), (shape, given)
            torch.testing.assert_close(own.grad, other.grad.double(), rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-11, atol=1e-11)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types_are_rounded_once(mode: Mode, antialias: bool, dtype: torch.dtype) -> None:
    """Relative to float64, by the precision that the plan guarantees and the rounding of the weights."""
    for shape, given in drawn(mode, antialias, 6):
        x = torch.rand(shape, generator=torch.Generator().manual_seed(6)).to(dtype)
        exact = hf.interpolate(x.double(), **given)
        step = torch.finfo(dtype).eps
        close = {"rtol": 0.51 * step + 2e-6, "atol": 2e-6}
        torch.testing.assert_close(hf.interpolate(x, **given).double(), exact, **close)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_indices_of_nearest_are_those_of_torch(mode: str) -> None:
    rng = random.Random(7)
    for _ in range(300):
        size, output_size = rng.randint(1, 3000), rng.randint(1, 3000)
        index = torch.arange(float(size))[None, None]
        expected = F.interpolate(index, output_size, mode=mode)
        assert torch.equal(hf.interpolate(index, output_size, mode=mode), expected), (size, output_size)


@every_kind
@pytest.mark.parametrize("aligned", [False, True])
def test_tables_are_ordered_and_their_transposes_agree(mode: Mode, antialias: bool, aligned: bool) -> None:
    rng = random.Random(8)
    for _ in range(40):
        size, output_size = rng.randint(1, 60), rng.randint(1, 60)
        scale = rng.choice((0.0, output_size / size, 3.7, 0.01))
        table = table_of(str(mode), size, output_size, aligned and mode in AXES, antialias, scale)
        back = table.transposed(size)
        dense = np.zeros((output_size, size))
        for i, (first, count, start) in enumerate(zip(table.first, table.count, table.start, strict=True)):
            assert count > 0 and first >= 0 and first + count <= size
            dense[i, first : first + count] = table.weights[start : start + count]
        for j, (first, count, start) in enumerate(zip(back.first, back.count, back.start, strict=True)):
            assert (dense[first : first + count, j] == back.weights[start : start + count]).all()
            assert np.count_nonzero(dense[:first, j]) == np.count_nonzero(dense[first + count :, j]) == 0
        for each in (table, back):
            assert (np.diff(each.first) >= 0).all() and (np.diff(each.first + each.count) >= 0).all()
        if scale == 0.0:
            assert np.allclose(dense.sum(axis=1), 1.0, rtol=0, atol=1e-14)


@every_kind
def test_gradients_of_both_orders(mode: Mode, antialias: bool) -> None:
    axes = AXES.get(mode, 2)
    x = torch.randn(1, 2, *(2, 3, 4)[-axes:], dtype=torch.float64, requires_grad=True)

    def resize(x: torch.Tensor) -> torch.Tensor:
        return hf.interpolate(x, (3, 2, 5)[-axes:], mode=str(mode), antialias=antialias)

    assert torch.autograd.gradcheck(resize, (x,), nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(resize, (x,), nondet_tol=0.0)


def test_operators_compile_and_map() -> None:
    x = torch.randn(2, 3, 4, 5)
    kind = ["bicubic", True, False, [1.5, 1.6]]
    torch.library.opcheck(torch.ops.holdfast.interpolate.default, (x, [6, 8], *kind))
    torch.library.opcheck(torch.ops.holdfast.interpolate_backward.default, (x, [2, 3, 3, 3], False, *kind))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return hf.interpolate(x, scale_factor=1.7, mode="bilinear").square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((2, 3, 4, 5), (1, 3, 7, 6)):
        own = torch.randn(shape, requires_grad=True)
        plain, traced = torch.autograd.grad(loss(own), own), torch.autograd.grad(compiled(own), own)
        assert torch.equal(plain[0], traced[0])
    many = torch.randn(3, 1, 2, 4, 4)
    looped = torch.stack([hf.interpolate(t, 7, mode="bicubic") for t in many])
    assert torch.equal(torch.vmap(lambda t: hf.interpolate(t, 7, mode="bicubic"))(many), looped)


def test_channels_last_is_kept() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    out = hf.interpolate(x, 8, mode="bilinear")
    assert out.is_contiguous(memory_format=torch.channels_last)
    out.sum().backward()
    assert x.grad is not None and x.grad.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, hf.interpolate(x.detach().contiguous(), 8, mode="bilinear"))


def test_an_image_does_not_depend_on_its_batch() -> None:
    x = torch.randn(3, 4, 30, 41)
    whole = hf.interpolate(x, (70, 33), mode="bicubic", antialias=True)
    for n in range(3):
        own = hf.interpolate(x[n : n + 1], (70, 33), mode="bicubic", antialias=True)
        assert torch.equal(own[0], whole[n])


def test_nearest_copies_every_value() -> None:
    x = torch.tensor([[[-0.0, float("inf"), 1e-42, -1.0]]])
    out = hf.interpolate(x, 8)
    assert torch.equal(out.view(torch.int32), x.repeat_interleave(2, 2).view(torch.int32))


def test_plans_run_without_workspace_and_accumulate() -> None:
    fields: dict[str, Any] = {"shape": (1, 2, 3, 4), "output_size": (5, 6), "mode": "bilinear"}
    forward = InterpolatePlan.select(CPU_STREAM, InterpolateDescriptor(**fields))
    backward = InterpolateBackwardPlan.select(CPU_STREAM, InterpolateBackwardDescriptor(**fields))
    assert forward.workspace_size() == backward.workspace_size() == 0
    dout, dinput = torch.randn(1, 2, 5, 6), torch.ones(1, 2, 3, 4)
    backward.run(CPU_STREAM, None, InterpolateBackwardArgs(dout=dout, dinput=dinput, accumulate=True))
    alone = torch.ops.holdfast.interpolate_backward(dout, [1, 2, 3, 4], False, "bilinear", False, False, [])
    assert torch.equal(dinput, 1 + alone)
    nearest = InterpolateDescriptor(shape=(1, 1, 4, 4), output_size=(2, 2))
    plan = InterpolatePlan.select(CPU_STREAM, nearest)
    assert plan.bytes_moved() == 4 * (4 + 4) and plan.precision_guarantee().ulp == {"out": 0.0}


def test_more_products_than_an_int32_counts() -> None:
    fields: dict[str, Any] = {"shape": (1, 1, 2**14), "output_size": (2**18,), "scales": (2.0**25,)}
    plan = InterpolateBackwardPlan.select(CPU_STREAM, InterpolateBackwardDescriptor(**fields))
    dout, dinput = torch.ones(1, 1, 2**18), torch.full((1, 1, 2**14), torch.nan)
    plan.run(CPU_STREAM, None, InterpolateBackwardArgs(dout=dout, dinput=dinput))
    assert dinput[0, 0, 0] == 2**18 and dinput.count_nonzero() == 1


def test_descriptors_go_to_json_and_back() -> None:
    for scales in (None, (1.5, 0.0)):
        desc = InterpolateDescriptor(
            shape=(1, 1, 4, 4), output_size=(6, 6), mode=Mode.BICUBIC, align_corners=True, scales=scales
        )
        assert InterpolateDescriptor.from_json(desc.to_json()) == desc


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "cubic"}, "mode is 'cubic'; accepted are 'nearest'"),
        ({"shape": (4, 4)}, r"accepted are \(N, C, W\)"),
        ({"output_size": (4,)}, "one size for each of the last 2 axes"),
        ({"output_size": (0, 4)}, r"the output has size \(0, 4\); each axis must have from 1"),
        ({"shape": (1, 1, 0, 4)}, r"the input has size \(0, 4\)"),
        ({"mode": "linear"}, "this mode needs an input of rank 3"),
        ({"align_corners": True}, "align_corners is True and mode is 'nearest'"),
        ({"antialias": True}, "antialias is True and mode is 'nearest'; it must be 'bilinear' or 'bicubic'"),
        ({"scales": (1.0,)}, "one number for each of the last 2 axes"),
        ({"scales": (1.0, -1.0)}, "each must be from"),
        ({"scales": "ab"}, "scales is 'ab'; it must be None or a sequence of numbers"),
        ({"scales": (float("nan"), 1.0)}, "each must be from"),
        (
            {"mode": "bilinear", "antialias": True, "scales": (1e-7, 1.0), "shape": (1, 1, 2**24, 1),
             "output_size": (2**10, 1)},
            "resize in several steps",
        ),
    ],
)  # fmt: skip
def test_descriptors_are_checked(changes: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"shape": (1, 1, 4, 4), "output_size": (6, 6)} | changes
    with pytest.raises(InvalidDescriptor, match=said):
        InterpolatePlan.select(CPU_STREAM, InterpolateDescriptor(**fields))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "neither size nor scale_factor is given"),
        ({"size": 3, "scale_factor": 2.0}, "both size and scale_factor are given"),
        ({"size": (3, 3, 3)}, r"size is \(3, 3, 3\); it must be one number, or 2"),
        ({"size": 0}, "size is 0; accepted are whole numbers from 1"),
        ({"size": 2.5}, "size is 2.5; it must be a whole number"),
        ({"scale_factor": "2"}, "scale_factor is '2'; it must be a finite number"),
        ({"scale_factor": -1.0}, "scale_factor is -1.0; it must be positive"),
        ({"scale_factor": 0.1}, r"the output has size \(0, 0\)"),
        ({"size": 3, "recompute_scale_factor": True}, "give scale_factor instead"),
        ({"size": 3, "align_corners": False}, "leave align_corners out"),
        ({"size": 3, "mode": "lanczos"}, "mode is 'lanczos'; accepted are"),
        ({"size": 3, "mode": "trilinear"}, "this mode needs an input of rank 5"),
        ({"size": 3, "antialias": True}, "it must be 'bilinear' or 'bicubic'"),
        ({"size": 3, "antialias": 1}, "antialias is 1; it must be True or False"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(HoldfastError, match=said):
        hf.interpolate(torch.zeros(1, 1, 4, 4), **given)


def test_the_rank_of_the_input_is_checked() -> None:
    with pytest.raises(HoldfastError, match="input has shape"):
        hf.interpolate(torch.zeros(4, 4), 3)


#: Tuning of the GPU kernel: strips and windows of few rows, no windows, several blocks of a row.
TILES: list[dict[str, Any]] = [
    {"threads": 8, "least": 4, "rows": 3},
    {"threads": 16, "rows": 2, "window": 0, "unrolled": 0},
    {"threads": 64, "rows": 5, "window": 2, "most": 2, "far": 1.0},
]


@every_kind
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_strips_and_windows_change_no_bit(mode: Mode, antialias: bool, tiles: dict[str, Any]) -> None:
    from holdfast.ops.interpolate import gpu

    axes = AXES.get(mode, 2)
    layout = torch.channels_last if axes == 2 and "most" in tiles else torch.contiguous_format
    for shape, size in (((2, 3, 4, 7, 9), (9, 5, 20)), ((1, 2, 9, 20, 13), (5, 13, 6))):
        image, resized = (*shape[:2], *shape[-axes:]), size[-axes:]
        tensors = special(image), special((*image[:2], *resized))
        for plan, names in (
            (InterpolatePlan, ("input", "out")),
            (InterpolateBackwardPlan, ("dinput", "dout")),
        ):
            desc = plan.Descriptor(shape=image, output_size=resized, mode=mode, antialias=antialias)
            found = set()
            for backend, device in (("reference", "cpu"), ("gpu", GPU)):
                given = (tensor.to(device).contiguous(memory_format=layout) for tensor in tensors)
                args, stream = dict(zip(names, given, strict=True)), hf.Stream.current(device)
                written = "out" if plan is InterpolatePlan else "dinput"
                args[written] = args[written].clone().fill_(5)
                with gpu.TUNING.replaced(**tiles):
                    chosen = plan.select(stream, desc, hf.PlanPreference(backend=backend))
                    chosen.run(stream, None, plan.Args(**args))
                found.add(digest({"out": args[written].cpu()}))
            assert len(found) == 1


def special(shape: tuple[int, ...]) -> torch.Tensor:
    """Random numbers, negative zeros, an infinity and a NaN."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    drawn[drawn.abs() < 0.3] = -0.0
    drawn.view(-1)[3], drawn.view(-1)[-2] = torch.inf, torch.nan
    return drawn

"""Tests of code paths for large tensors, and of the arithmetic that kernels rely on."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

import holdfast as hf
from holdfast.proof.conformance import Way, cases_of, check, gpu_way, run_reference, select_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed_codes(
    backend: str, device: str, x: torch.Tensor, scale: torch.Tensor, z: torch.Tensor | None
) -> torch.Tensor:
    desc = hf.plans.QuantizePerChannelDescriptor(
        shape=tuple(x.shape), axis=1, input_dtype=x.dtype, output_dtype=torch.int4, packed=True
    )
    stream = hf.Stream.current(device)
    plan = hf.plans.QuantizePerChannelPlan.select(stream, desc, hf.PlanPreference(backend=backend))
    shape, dtype = desc.expected("q")
    q = torch.full(shape, 85, dtype=dtype, device=device)
    zero_point = None if z is None else z.to(device)
    args = hf.plans.QuantizePerChannelArgs(x=x.to(device), scale=scale.to(device), zero_point=zero_point, q=q)
    plan.run(stream, None, args)
    return q.cpu()


@pytest.mark.parametrize("rows", [64, 203])
@pytest.mark.parametrize("with_zero_point", [False, True])
def test_a_program_goes_down_several_tiles(rows: int, with_zero_point: bool) -> None:
    from holdfast.ops.affine import gpu

    assert gpu._tiles_per_program(6, gpu.Tuning(programs=1)) == 4
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 310, generator=draw).to(torch.bfloat16)
    scale = torch.rand(310, generator=draw) * 0.2 + 0.01
    z = torch.randint(-3, 4, (310,), generator=draw, dtype=torch.int32) if with_zero_point else None
    with gpu.TUNING.replaced(programs=1):
        made = packed_codes("gpu", DEVICE, x, scale, z)
    assert torch.equal(made, packed_codes("reference", "cpu", x, scale, z))


@pytest.mark.parametrize("more", [0, 1, 15])
def test_the_last_columns_of_a_long_row_have_a_launch_of_their_own(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.ops.affine import gpu

    ways: list[str] = []
    launched = gpu.Steps.add

    def watched(self: gpu.Steps, kernel: object, grid: object, offered: dict[str, str], **given: int) -> None:
        ways.append(offered["GRID"])
        launched(self, kernel, grid, offered, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu.Steps, "add", watched)
    draw = torch.Generator().manual_seed(more)
    x = torch.randn(1024 + more, generator=draw) * 9
    x[-2:] = torch.tensor([float("nan"), float("inf")])

    def made(backend: str, device: str) -> list[torch.Tensor]:
        stream, pref = hf.Stream.current(device), hf.PlanPreference(backend=backend, precompile=False)
        found = []
        for dtype, packed in ((torch.int8, False), (torch.int4, True), (torch.float8_e4m3fn, False)):
            quantizing = hf.plans.QuantizePerTensorDescriptor(
                shape=x.shape, input_dtype=x.dtype, output_dtype=dtype, packed=packed
            )
            shape, stored = quantizing.expected("q")
            q = torch.full(shape, 85, dtype=torch.uint8, device=device).view(stored)
            plan = hf.plans.QuantizePerTensorPlan.select(stream, quantizing, pref)
            zero_point = None if dtype.is_floating_point else 3
            args = hf.plans.QuantizePerTensorArgs(x=x.to(device), scale=0.1, zero_point=zero_point, q=q)
            plan.run(stream, None, args)
            dequantizing = hf.plans.DequantizePerTensorDescriptor(
                shape=x.shape, input_dtype=dtype, output_dtype=x.dtype, packed=packed
            )
            y = torch.full_like(x, 85.0, device=device)
            back = hf.plans.DequantizePerTensorPlan.select(stream, dequantizing, pref)
            back.run(
                stream, None, hf.plans.DequantizePerTensorArgs(q=q, scale=0.1, zero_point=zero_point, y=y)
            )
            found += [q.view(torch.uint8).cpu(), y.view(torch.int32).cpu()]
        return found

    with gpu.TUNING.replaced(least_split=1024):
        assert all(map(torch.equal, made("gpu", DEVICE), made("reference", "cpu")))
    assert set(ways) == ({"rows"} if more == 0 else {"rows", "last columns"})


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("QuantizePerTokenPlan", "sliced to padded rows"),
        ("QuantizePerChannelPlan", "packed, leading axes transposed"),
        ("QuantizePerChannelPlan", "bfloat16 pairs"),
        ("QuantizePerTokenBackwardPlan", "accumulate"),
        ("DequantizePerTokenPlan", "unaligned"),
        ("DequantizePerTokenBackwardPlan", "accumulate"),
        ("FakeQuantizePlan", "sliced to padded rows"),
        ("FakeQuantizeBackwardPlan", "accumulate in bfloat16"),
    ],
)
def test_tiles_are_counted_where_the_second_axis_is_too_short(
    name: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.ops.affine import gpu

    ways, laid_out = [], gpu._grid

    def watched(tiles_down: int, tiles_across: int, limit: int) -> tuple[str, tuple[int, int]]:
        way, grid = laid_out(tiles_down, tiles_across, limit)
        ways.append(way)
        return way, grid

    monkeypatch.setattr(gpu, "_tile_shape", lambda *_: (2, 4))
    monkeypatch.setattr(gpu, "_grid", watched)
    plan, way = hf.plans.all()[name], gpu_way()
    (case,) = (case for case in cases_of(plan) if case.name.endswith(ending))
    assert way is not None
    with gpu.TUNING.replaced(grid_limit=1, programs=1, steps=2):
        assert check(plan, case, way, *run_reference(plan, case), select_on("gpu")) == []
    assert set(ways) == {"tiles"}


@pytest.mark.parametrize("name", ["QuantizePerTensorPlan", "QuantizePerGroupPlan", "DequantizePerGroupPlan"])
def test_codes_and_values_that_are_streamed_have_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, large outputs use non-temporal stores; here all outputs do."""
    from holdfast.ops.affine import cpu

    monkeypatch.setattr(cpu, "_STREAM_MIN_BYTES", 1)
    plan, found = hf.plans.all()[name], []
    for case in cases_of(plan):
        args, wanted = run_reference(plan, case)
        found += check(plan, case, Way("cpu", times=1), args, wanted, select_on("cpu"))
    assert found == []


def test_programs_follow_the_memory() -> None:
    from holdfast.ops.affine import gpu

    limit = gpu.Tuning().grid_limit
    assert gpu._grid(2**20, 1, limit) == ("rows", (2**20, 1))
    assert gpu._grid(limit, 3, limit) == ("columns and rows", (3, limit))
    assert gpu._grid(limit + 1, 3, limit) == ("tiles", (3 * 2**16, 1))


def least_rounding_to(lo: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The smallest float32 that rounds to ``lo`` or more, found by search."""
    t = np.nextafter((lo - 0.5).astype(np.float32), np.float32(-np.inf))
    for _ in range(3):
        t = np.where(np.rint(t) < lo, np.nextafter(t, np.float32(np.inf)), t)
    before = np.nextafter(t, np.float32(-np.inf))
    assert (np.rint(t) >= lo).all() and (np.rint(before) < lo).all()
    return t


def around_the_end(lo: npt.NDArray[np.float64], s: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    """For each scale, the float32 numbers around the smallest x whose quotient rounds to ``lo`` or more."""
    least = least_rounding_to(lo)
    before = np.nextafter(least, np.float32(-np.inf))
    x = ((least.astype(np.float64) + before) / 2 * s).astype(np.float32)
    found = [x]
    for towards in (-np.inf, np.inf):
        step = x
        for _ in range(3):
            step = np.nextafter(step, np.float32(towards))
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("dtype", "q_min", "q_max"),
    [
        (torch.int8, -128, 127),
        (torch.uint8, 0, 255),
        (torch.int16, -32768, 32767),
        (torch.uint8, 0, 3),
        (torch.int8, 1, 1),
    ],
)
def test_a_range_of_x_ends_where_that_of_codes_does(dtype: torch.dtype, q_min: int, q_max: int) -> None:
    """With a scale per column, x is compared with two bounds, which must be exact to the last bit."""
    draw = np.random.default_rng(1)
    zero_points = [0, 3, -20, 1, 2**21 + 5, -(2**22), 1000 - 2**23, 2**23]
    unusual = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3.4e38, 1.0, 2.0**-126, 2e-39]
    s = np.concatenate([
        np.repeat(np.array(unusual, np.float32), len(zero_points)),
        draw.integers(1, 2**23, 96, dtype=np.int32).view(np.float32),
        draw.integers(1, 2**31 - 2**23, 256, dtype=np.int32).view(np.float32) * np.resize([1, -1], 256),
        draw.uniform(0.01, 0.03, 320),
    ]).astype(np.float32)  # fmt: skip
    z = np.resize(zero_points, len(s)).astype(np.int32)
    ordinary = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0])
    with np.errstate(all="ignore"):
        lower = around_the_end(q_min - z.astype(np.float64), s)
        upper = [-x for x in around_the_end(z.astype(np.float64) - q_max, s)]
        x = np.stack([*lower, *upper, *np.broadcast_to(ordinary[:, None], (10, len(s)))]).astype(np.float32)
    desc = hf.plans.QuantizePerChannelBackwardDescriptor(
        shape=x.shape, axis=1, input_dtype=torch.float32, output_dtype=dtype, q_min=q_min, q_max=q_max
    )

    def gradient(backend: str, device: str) -> torch.Tensor:
        stream = hf.Stream.current(device)
        plan = hf.plans.QuantizePerChannelBackwardPlan.select(
            stream, desc, hf.PlanPreference(backend=backend)
        )
        given = {"x": torch.from_numpy(x), "scale": torch.from_numpy(s), "zero_point": torch.from_numpy(z)}
        given |= {"dy": torch.ones(x.shape), "dx": torch.full(x.shape, torch.nan)}
        args = hf.plans.QuantizePerChannelBackwardArgs(**{name: t.to(device) for name, t in given.items()})
        plan.run(stream, None, args)
        return args.dx.cpu()

    wanted = gradient("reference", "cpu")
    assert torch.equal(gradient("gpu", DEVICE).view(torch.int32), wanted.view(torch.int32))
    kept = wanted[:, -320 :: len(zero_points)] != 0  # plain scales, no zero point
    for end in (kept[:7], kept[7:14]):
        assert (end.any(0) & ~end.all(0)).all()


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def fewest_bits_of_a_wrong_sum(bits: int, step: int) -> int:
    """The fewest significant bits of a quotient, or of the sum that replaces it, where the two differ."""
    fewest = 25
    for significand in range(1 << 23, 1 << 24, step):
        s = np.float32(significand) * np.float32(2.0**-23)
        wide = np.float64(s)
        rs = np.float32(1) / s
        if 1.0 - wide * np.float64(rs) <= 0:
            rs = np.nextafter(rs, np.float32(0))
        rl = np.float32(1.0 - wide * np.float64(rs)) / s
        for number in range(1 << (bits - 1), 1 << bits):
            x = np.float32(number)
            sum_ = np.float32(np.float64(x) * np.float64(rs) + np.float64(np.float32(x * rl)))
            quotient = np.float32(np.float64(x) / wide)
            if sum_ != quotient:
                for value in (sum_, quotient):
                    whole = np.int64(np.float64(value) * 2.0**40)
                    while whole % 2 == 0:
                        whole //= 2
                    length = 0
                    while whole:
                        whole //= 2
                        length += 1
                    fewest = min(fewest, length)
    return fewest


@pytest.mark.parametrize(("bits", "step"), [(8, 1), (11, 61)], ids=["bfloat16", "float16"])
def test_a_wrong_sum_of_short_code_is_no_tie(bits: int, step: int) -> None:
    """Ties between 8-bit codes with zero points up to 2^13 have at most 15 significant bits."""
    assert fewest_bits_of_a_wrong_sum(bits, step) > 15

"""Tests of grid_sample that need a GPU: equal bits on a busy GPU, CUDA graphs, no synchronization, size."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical, digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these need a CUDA device")


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def drawn(
    shape: tuple[int, ...], size: tuple[int, ...], kind: str = "random", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A random image, grid and gradient on the CPU."""
    generator = torch.Generator().manual_seed(7)
    grid = torch.rand((shape[0], *size, len(size)), generator=generator)
    if kind == "smooth":
        whole = torch.eye(len(size), len(size) + 1).expand(shape[0], -1, -1)
        grid = torch.nn.functional.affine_grid(whole, [shape[0], 1, *size], False) + grid * 0.01
    else:
        grid = grid * 2.4 - 1.2 if kind == "random" else grid * 0.01
    image = torch.randn(shape, generator=generator).to(dtype)
    return image, grid, torch.randn((*shape[:2], *size), generator=generator).to(dtype)


def both(
    image: torch.Tensor, grid: torch.Tensor, dout: torch.Tensor, mode: str = "bilinear"
) -> list[torch.Tensor]:
    """The samples and the gradients of the image and the grid."""
    known = image.detach().requires_grad_(), grid.detach().requires_grad_()
    out = hf.grid_sample(*known, mode=mode)
    return [out.detach(), *torch.autograd.grad(out, known, dout)]


@pytest.mark.parametrize("kind", ["random", "smooth", "one pixel"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize(
    ("channels", "dtype"), [(3, torch.float32), (40, torch.bfloat16), (70, torch.float32)]
)
def test_the_cpu_gives_the_same_bits(kind: str, mode: str, channels: int, dtype: torch.dtype) -> None:
    tensors = drawn((3, channels, 61, 53), (67, 71), kind, dtype)
    found = both(*(tensor.cuda() for tensor in tensors), mode=mode)
    for one, other in zip(found, both(*tensors, mode=mode), strict=True):
        assert torch.equal(canonical(one.cpu()), canonical(other))


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_volumes_give_the_bits_of_the_cpu(mode: str) -> None:
    tensors = drawn((2, 9, 11, 12, 13), (14, 9, 10))
    found = both(*(tensor.cuda() for tensor in tensors), mode=mode)
    for one, other in zip(found, both(*tensors, mode=mode), strict=True):
        assert torch.equal(canonical(one.cpu()), canonical(other))


#: Images that are large enough for dinput by slot, in one and in several groups of channels.
LARGE = [
    (4, 3, 256, 256), (4, 5, 512, 530), (2, 8, 256, 260), (3, 11, 200, 190), (2, 16, 200, 190),
    (1, 3, 64, 60, 62), (1, 8, 40, 48, 62),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["random", "smooth", "zoomed", "one pixel"])
@pytest.mark.parametrize("shape", LARGE, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("values", ["finite", "infinite"])
def test_large_images_with_few_channels(shape: tuple[int, ...], kind: str, values: str) -> None:
    from holdfast.ops.grid_sample.gpu import GridSampleBackward

    size = shape[2:]
    image, grid, dout = drawn(shape, size, "smooth" if kind == "zoomed" else kind)
    if kind == "zoomed":
        grid = grid * 0.3  # about ten samples, in 3-D about forty, in a cell
    if values == "infinite":
        dout.view(-1)[:: dout.numel() // 7] = float("inf")
    desc = hf.plans.GridSampleBackwardDescriptor(shape=shape, output_size=size)
    assert GridSampleBackward(desc, torch.device("cuda")).variant == "dinput by slot"
    of_cpu = both(image, grid, dout)
    for one, other in zip(both(image.cuda(), grid.cuda(), dout.cuda()), of_cpu, strict=True):
        assert torch.equal(canonical(one.cpu()), canonical(other))


@pytest.mark.parametrize("kind", ["random", "smooth"])
def test_a_hundred_runs_on_a_busy_device_give_one_digest(kind: str) -> None:
    tensors = [tensor.cuda() for tensor in drawn((4, 24, 96, 96), (90, 110), kind)]
    others = [torch.cuda.Stream() for _ in range(3)]
    noise = [torch.randn(2048, 2048, device="cuda") for _ in others]
    torch.cuda.synchronize()
    found = set()
    for _ in range(100):
        for stream, matrix in zip(others, noise, strict=True):
            with torch.cuda.stream(stream):
                torch.mm(matrix, matrix)
        out, dinput, dgrid = both(*tensors)
        found.add(digest({"out": out, "dinput": dinput, "dgrid": dgrid}))
    assert len(found) == 1


@pytest.mark.parametrize("channels", [3, 24])
def test_runs_one_after_another_in_one_workspace_do_not_mix(channels: int) -> None:
    """Runs are queued back to back: a run must not read data that the previous run left in the workspace."""
    desc = hf.plans.GridSampleBackwardDescriptor(shape=(4, channels, 96, 96), output_size=(90, 110))
    stream = hf.Stream.current("cuda")
    plan = hf.plans.GridSampleBackwardPlan.select(stream, desc)
    workspace = hf.Workspace.allocate(plan.workspace_size(), "cuda")
    found, wanted = [], []
    for kind in ("random", "smooth", "one pixel"):
        image, grid, dout = (tensor.cuda() for tensor in drawn(desc.shape, (90, 110), kind))
        args = hf.plans.GridSampleBackwardArgs(
            dout=dout,
            grid=grid,
            input=image,
            dinput=torch.full_like(image, torch.nan),
            dgrid=torch.full_like(grid, torch.nan),
        )
        wanted.append(both(image, grid, dout)[1:])
        found.append(args)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(30):
        for args, expected in zip(found, wanted, strict=True):
            plan.run(stream, workspace, args)
            assert args.dinput is not None and args.dgrid is not None
            for one, other in zip((args.dinput, args.dgrid), expected, strict=True):
                wrong += (one != other).sum()
                one.fill_(torch.nan)
    assert int(wrong) == 0


def test_threads_on_streams_of_their_own_do_not_disturb_each_other() -> None:
    tensors = [tensor.cuda() for tensor in drawn((4, 24, 96, 96), (90, 110), "smooth")]
    wanted = both(*tensors)
    torch.cuda.synchronize()

    def work(_: int) -> bool:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [both(*tensors) for _ in range(10)]
        stream.synchronize()
        return all(torch.equal(a, b) for run in found for a, b in zip(run, wanted, strict=True))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(8)))


def test_calls_do_not_synchronise(no_synchronisation: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    tensors = [tensor.cuda() for tensor in drawn((2, 16, 40, 40), (41, 43))]
    torch.cuda.set_sync_debug_mode("error")
    found = both(*tensors)
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, both(*tensors), strict=True))


def test_a_graph_replays_forward_and_backward() -> None:
    image, grid, dout = (tensor.cuda() for tensor in drawn((2, 16, 40, 40), (41, 43)))
    both(image, grid, dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(image, grid, dout)
    for kind in ("one pixel", "smooth", "random"):
        other = drawn((2, 16, 40, 40), (41, 43), kind)[1].flip(1)
        grid.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        for one, wanted in zip(found, both(image.cpu(), other, dout.cpu()), strict=True):
            assert torch.equal(one.cpu(), wanted)


def test_channels_last_and_autocast() -> None:
    image, grid, dout = (tensor.cuda() for tensor in drawn((2, 40, 33, 35), (31, 37), dtype=torch.bfloat16))
    wanted = both(image, grid, dout)
    last = torch.channels_last
    found = both(image.contiguous(memory_format=last), grid, dout.contiguous(memory_format=last))
    assert found[0].is_contiguous(memory_format=last) and found[1].is_contiguous(memory_format=last)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(hf.grid_sample(image, grid), wanted[0])


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole_on_the_gpu() -> None:
    image, grid, dout = (tensor.cuda() for tensor in drawn((2, 16, 20, 20), (21, 23)))
    compiled = torch.compile(lambda x, g: hf.grid_sample(x, g) * 2, fullgraph=True, dynamic=True)
    known = image.requires_grad_(), grid.requires_grad_()
    found = torch.autograd.grad(compiled(*known), known, dout)
    wanted = both(image, grid, dout * 2)[1:]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_gradcheck_on_the_gpu() -> None:
    image, grid, _ = (tensor.cuda().double().requires_grad_() for tensor in drawn((1, 2, 4, 5), (3, 3)))
    assert torch.autograd.gradcheck(hf.grid_sample, (image, grid), nondet_tol=0.0)


def test_an_image_of_more_than_two_to_the_31_elements() -> None:
    shape, size = (2, 520, 1450, 1450), (3, 5)
    grid = drawn((2, 1, 4, 4), size)[1].cuda().requires_grad_()
    image = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    image[:, -1] = 1
    out = hf.grid_sample(image, grid, padding_mode="border")
    assert (out[:, -1] == 1).all() and (out[:, :-1] == 0).all()
    known = image.requires_grad_()
    dinput, dgrid = torch.autograd.grad(
        hf.grid_sample(known, grid, padding_mode="border"), (known, grid), out.detach()
    )
    assert (dgrid == 0).all() and (dinput[:, :-1] == 0).all()
    assert dinput[:, -1].sum(dtype=torch.float64).item() == pytest.approx(30, abs=0.3)


def test_the_example_trains_to_the_same_weights_twice_on_the_gpu() -> None:
    path = Path(__file__).resolve().parents[1] / "examples" / "spatial_transformer.py"
    given = [sys.executable, str(path), "--device", "cuda", "--steps", "20"]
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    result = subprocess.run(
        given, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    assert "twice" in result.stdout and "the same bits on cpu and cuda" in result.stdout

"""Tests of embedding_bag that need a GPU: the bits of the CPU, graphs, no waiting, deferred errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical, digest
from holdfast.ops.segment_sum.cases import index_values, row_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these need a CUDA device")


@pytest.fixture(autouse=True)
def nothing_reported() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")
    hf.check_errors()


def offsets_of(count: int) -> torch.Tensor:
    """Offsets of bags with 32, 7 and 0 indices, and a long bag at the end."""
    begins = torch.arange(0, count // 2, 39)
    return torch.stack([begins, begins + 32, begins + 32], 1).reshape(-1)


def both(
    indices: torch.Tensor,
    offsets: torch.Tensor | None,
    weight: torch.Tensor,
    dout: torch.Tensor,
    mode: str,
    weights: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The bags and the gradients of the table and the weights."""
    inputs = [weight.detach().requires_grad_()]
    if weights is not None:
        inputs.append(weights.detach().requires_grad_())
    out = hf.embedding_bag(
        indices, inputs[0], offsets, mode=mode, padding_idx=1, per_sample_weights=(*inputs, None)[1]
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("kind", ["zipf", "equal", "uniform"])
@pytest.mark.parametrize("count", [5000, 300000])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_the_cpu_gives_the_same_bits(kind: str, count: int, mode: str) -> None:
    indices, offsets = index_values(kind, "large", (count,), 3000, torch.int64), offsets_of(count)
    dtype = torch.bfloat16 if mode == "mean" else torch.float32
    weight, dout = row_values("weight", (3000, 40), dtype), row_values("dout", (len(offsets), 40), dtype)
    weights = row_values("weights", (count,), dtype) if mode == "weighted" else None
    mode = "sum" if mode == "weighted" else mode
    there = both(
        indices.cuda(), offsets.cuda(), weight.cuda(), dout.cuda(), mode,
        None if weights is None else weights.cuda(),
    )  # fmt: skip
    for one, other in zip(there, both(indices, offsets, weight, dout, mode, weights), strict=True):
        assert torch.equal(canonical(one.cpu()), canonical(other))


def test_a_hundred_runs_on_a_busy_device_give_one_digest() -> None:
    indices = index_values("zipf", "busy", (600, 33), 5000, torch.int64).cuda()
    weight = row_values("weight", (5000, 96), torch.bfloat16).cuda()
    dout = row_values("dout", (600, 96), torch.bfloat16).cuda()
    others = [torch.cuda.Stream() for _ in range(3)]
    noise = [torch.randn(2048, 2048, device="cuda") for _ in others]
    torch.cuda.synchronize()
    found = set()
    for _ in range(100):
        for stream, matrix in zip(others, noise, strict=True):
            with torch.cuda.stream(stream):
                torch.mm(matrix, matrix)
        out, gradient = both(indices, None, weight, dout, "mean")
        found.add(digest({"out": out, "dweight": gradient}))
    assert len(found) == 1


@pytest.mark.parametrize("count", [3000, 300000])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_calls_do_not_synchronise(count: int, mode: str) -> None:
    indices = index_values("zipf", "sync", (count,), 700, torch.int64).cuda()
    offsets = offsets_of(count).cuda()
    weight, dout = torch.ones(700, 64, device="cuda"), torch.ones(len(offsets), 64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    found = both(indices, offsets, weight, dout, mode)
    torch.cuda.set_sync_debug_mode("default")
    wanted = both(indices.cpu(), offsets.cpu(), weight.cpu(), dout.cpu(), mode)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_graph_replays_forward_and_backward(mode: str) -> None:
    indices = index_values("zipf", "graph", (4000,), 300, torch.int64)
    offsets = offsets_of(4000)
    weight, dout = (
        row_values("weight", (300, 24), torch.float32),
        row_values("dout", (len(offsets), 24), torch.float32),
    )
    given = [t.cuda() for t in (indices, offsets, weight, dout)]
    both(given[0], given[1], given[2], given[3], mode)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(given[0], given[1], given[2], given[3], mode)
    given[0].copy_(indices.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    wanted = both(indices.flip(0), offsets, weight, dout, mode)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True))


def test_a_bad_index_is_raised_late_and_harms_nothing() -> None:
    indices = index_values("uniform", "bad", (100, 8), 50, torch.int64).cuda()
    weight = row_values("weight", (50, 16), torch.float32).cuda()
    indices[40, 2] = 10**9
    out = hf.embedding_bag(indices, weight)
    with pytest.raises(IndexError, match=r"position 322 .* is 1000000000"):
        hf.check_errors()
    assert torch.equal(out, hf.embedding_bag(indices, weight, bad_index="skip"))


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([0, 2**40, 700], r"offsets\[1\] is 2147483647 or more"),
        ([3, 5], r"offsets\[0\] is 3"),
        ([0, 700, 20, 10, 790], r"offsets\[2\] is 20"),
        ([0, -(2**40)], r"offsets\[1\] is -2147483648 or less"),
    ],
)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bad_offsets_are_raised_late_and_harm_nothing(offsets: list[int], said: str, mode: str) -> None:
    indices = index_values("uniform", "bad", (800,), 50, torch.int64).cuda()
    weight = row_values("weight", (50, 16), torch.float32).cuda().requires_grad_()
    given = torch.tensor(offsets, device="cuda")
    out = hf.embedding_bag(indices, weight, given, mode=mode)
    with pytest.raises(IndexError, match=said):
        hf.check_errors()
    out.sum().backward()
    with pytest.raises(IndexError, match=said):
        hf.check_errors()
    torch.cuda.synchronize()
    assert torch.equal(hf.embedding_bag(indices, weight, given[:1] * 0, mode=mode)[0] * 0, weight[0] * 0)


def test_past_two_to_the_31_elements() -> None:
    """A table of more than 2^31 elements, with bags that read its last rows."""
    rows, columns = 2**20 + 3, 2**11
    weight = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    weight[-3:] = torch.tensor([1.0, 2.0, 4.0], device="cuda").to(torch.bfloat16)[:, None]
    indices = torch.tensor([[rows - 1, rows - 2], [rows - 3, 0]], device="cuda")
    weight.requires_grad_()
    out = hf.embedding_bag(indices, weight, mode="sum")
    assert out[:, 0].tolist() == [6.0, 1.0] and out[:, -1].tolist() == [6.0, 1.0]
    (gradient,) = torch.autograd.grad(out, weight, torch.ones_like(out))
    assert gradient[-3:, -1].tolist() == [1.0, 1.0, 1.0] and gradient[0, 0] == 1
    assert gradient.count_nonzero() == 4 * columns


def test_a_sparse_gradient() -> None:
    indices, offsets = index_values("zipf", "sparse", (4000,), 300, torch.int64), offsets_of(4000)
    weight = row_values("weight", (300, 24), torch.float32)
    found = []
    for device in ("cuda", "cpu"):
        table = weight.to(device).requires_grad_()
        out = hf.embedding_bag(indices.to(device), table, offsets.to(device), sparse=True)
        found += torch.autograd.grad(out, table, torch.ones_like(out))
    assert found[0].is_coalesced()
    assert torch.equal(found[0].indices().cpu(), found[1].indices())
    assert torch.equal(found[0].values().cpu(), found[1].values())

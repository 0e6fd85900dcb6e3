"""Tests of embedding that need a GPU: equal bits on a busy device, CUDA graphs, no synchronization, size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical, digest
from holdfast.ops.segment_sum.cases import index_values, row_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these need a CUDA device")


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def nothing_reported() -> Iterator[None]:
    yield
    hf.check_errors()


def both(
    indices: torch.Tensor, weight: torch.Tensor, dout: torch.Tensor, padding_idx: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and the gradient of the table."""
    table = weight.detach().requires_grad_()
    out = hf.embedding(indices, table, padding_idx=padding_idx)
    (gradient,) = torch.autograd.grad(out, table, dout)
    return out.detach(), gradient


@pytest.mark.parametrize("kind", ["zipf", "equal", "uniform"])
@pytest.mark.parametrize("count", [5000, 40000, 300_000, 1_100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cpu_gives_the_same_bits(kind: str, count: int, dtype: torch.dtype) -> None:
    """With every sort: merging, digits of few and of many indices, and torch.sort."""
    indices = index_values(kind, "large", (count,), 3000, torch.int64)
    weight, dout = row_values("weight", (3000, 40), dtype), row_values("dout", (count, 40), dtype)
    found = both(indices.cuda(), weight.cuda(), dout.cuda(), padding_idx=1)
    for one, other in zip(found, both(indices, weight, dout, padding_idx=1), strict=True):
        assert torch.equal(canonical(one.cpu()), canonical(other))


def test_a_hundred_runs_on_a_busy_device_give_one_digest() -> None:
    indices = index_values("zipf", "busy", (20000,), 5000, torch.int64).cuda()
    weight = row_values("weight", (5000, 96), torch.bfloat16).cuda()
    dout = row_values("dout", (20000, 96), torch.bfloat16).cuda()
    others = [torch.cuda.Stream() for _ in range(3)]
    noise = [torch.randn(2048, 2048, device="cuda") for _ in others]
    torch.cuda.synchronize()
    found = set()
    for _ in range(100):
        for stream, matrix in zip(others, noise, strict=True):
            with torch.cuda.stream(stream):
                torch.mm(matrix, matrix)
        out, gradient = both(indices, weight, dout)
        found.add(digest({"out": out, "dweight": gradient}))
    assert len(found) == 1


@pytest.mark.parametrize(("count", "rows"), [(5000, 30000), (40000, 50000), (40000, 3000), (200000, 300000)])
def test_runs_one_after_another_in_one_workspace_do_not_mix(count: int, rows: int) -> None:
    """Runs are queued back to back: a run must not read data that the previous run left in the workspace."""
    desc = hf.plans.EmbeddingBackwardDescriptor(
        shape=(count,), num_embeddings=rows, embedding_dim=40, index_dtype=torch.int64
    )
    stream = hf.Stream.current("cuda")
    plan = hf.plans.EmbeddingBackwardPlan.select(stream, desc)
    workspace = hf.Workspace.allocate(plan.workspace_size(), "cuda")
    weight = torch.zeros(rows, 40, device="cuda")
    found, wanted = [], []
    for kind in ("zipf", "equal", "uniform"):
        indices = index_values(kind, "mixed", (count,), rows, torch.int64).cuda()
        dout = row_values(kind, (count, 40), torch.float32).cuda()
        wanted.append(both(indices, weight, dout)[1])
        dweight = torch.full_like(weight, torch.nan)
        found.append(hf.plans.EmbeddingBackwardArgs(dout=dout, indices=indices, dweight=dweight))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(30):
        for args, expected in zip(found, wanted, strict=True):
            plan.run(stream, workspace, args)
            wrong += (args.dweight != expected).sum()
            args.dweight.fill_(torch.nan)
    assert int(wrong) == 0


@pytest.mark.parametrize("count", [3000, 300000])
def test_calls_do_not_synchronise(count: int, no_synchronisation: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    indices = index_values("zipf", "sync", (count,), 700, torch.int64).cuda()
    weight, dout = torch.ones(700, 64, device="cuda"), torch.ones(count, 64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    _, gradient = both(indices, weight, dout)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(gradient[:, 0].long(), torch.bincount(indices, minlength=700))


@pytest.mark.parametrize("count", [3000, 300000])
def test_a_graph_replays_forward_and_backward(count: int) -> None:
    weight, dout = (row_values(n, (s, 32), torch.float32).cuda() for n, s in (("w", 700), ("d", count)))
    indices = index_values("zipf", "graph", (count,), 700, torch.int64).cuda()
    both(indices, weight, dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradient = both(indices, weight, dout)
    for kind in ("uniform", "equal"):
        other = index_values(kind, "replay", (count,), 700, torch.int64)
        indices.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        wanted = both(other, weight.cpu(), dout.cpu())
        assert torch.equal(out.cpu(), wanted[0])
        assert torch.equal(canonical(gradient.cpu()), canonical(wanted[1]))


def test_a_plan_runs_on_the_stream_it_is_given() -> None:
    """Also with torch.sort, which uses the current stream of torch by default."""
    count = 1_100_000
    indices = index_values("zipf", "stream", (count,), 700, torch.int64)
    dout = row_values("stream", (count, 8), torch.float32)
    desc = hf.plans.EmbeddingBackwardDescriptor(shape=(count,), num_embeddings=700, embedding_dim=8)
    side = torch.cuda.Stream()
    plan = hf.plans.EmbeddingBackwardPlan.select(hf.Stream.wrap(side), desc)
    workspace = hf.Workspace.allocate(plan.workspace_size(), "cuda")
    dweight = torch.full((700, 8), float("nan"), device="cuda")
    args = hf.plans.EmbeddingBackwardArgs(dout=dout.cuda(), indices=indices.cuda(), dweight=dweight)
    side.wait_stream(torch.cuda.current_stream())
    plan.run(hf.Stream.wrap(side), workspace, args)
    side.synchronize()
    assert torch.equal(dweight.cpu(), both(indices, torch.zeros(700, 8), dout)[1])


def test_a_bad_index_leaves_the_context_alive() -> None:
    weight = row_values("bad", (50, 8), torch.float32).cuda().requires_grad_()
    indices = torch.tensor([3, 50, -7, 49, 2**40], device="cuda")
    out = hf.embedding(indices, weight)
    with pytest.raises(hf.InvalidIndex) as refusal:
        hf.check_errors()
    out.sum().backward()
    for words in ("position 1", "is 50;", "50 rows"):
        assert words in str(refusal.value)
    assert torch.equal(out[[0, 3]], weight[[3, 49]]) and (out[[1, 2, 4]] == 0).all()
    assert weight.grad is not None and weight.grad.sum().item() == 16
    hf.embedding(torch.tensor([60], device="cuda"), weight)
    torch.cuda.synchronize()
    with pytest.raises(hf.InvalidIndex, match="is 60;"):
        hf.quantize(torch.ones(4, device="cuda"), 0.5)
    assert torch.equal(hf.embedding(torch.tensor([5], device="cuda"), weight)[0], weight[5])


def test_a_bad_index_in_a_graph_is_reported_by_the_replay() -> None:
    weight, indices = torch.ones(9, 4, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    hf.embedding(indices, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hf.embedding(indices, weight)
    indices.copy_(torch.tensor([1, 2, 9]))
    graph.replay()
    with pytest.raises(hf.InvalidIndex, match="position 2"):
        hf.check_errors()
    assert (out[2] == 0).all()


@pytest.mark.parametrize(("rows", "count"), [(2**17 + 3, 40), (40, 2**17 + 3)])
def test_more_than_two_to_the_31_elements(rows: int, count: int) -> None:
    """Once in the table, once in the output rows."""
    columns = 2**14 + 8
    assert max(rows, count) * columns > 2**31
    indices = torch.arange(count, device="cuda") % rows
    indices[-1] = rows - 1
    weight = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    weight += torch.arange(rows, device="cuda").remainder(251)[:, None]
    out, gradient = both(indices, weight, torch.ones(count, columns, dtype=torch.bfloat16, device="cuda"))
    for at in (0, count // 2, count - 1):
        assert torch.equal(out[at], weight[indices[at]])
    wanted = torch.bincount(indices, minlength=rows).to(torch.bfloat16)
    for row in (0, 1, rows // 2, rows - 1):
        assert (gradient[row] == wanted[row]).all()


def test_a_sparse_gradient_is_the_dense_one() -> None:
    indices = index_values("zipf", "sparse", (4000,), 10**6, torch.int64)
    dout = row_values("sparse", (4000, 24), torch.float32)
    weight = torch.zeros(10**6, 24, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad(hf.embedding(indices.cuda(), weight, sparse=True), weight, dout.cuda())
    assert gradient.is_coalesced() and torch.equal(gradient.indices()[0].cpu(), indices.unique())
    assert torch.equal(gradient.to_dense(), both(indices.cuda(), weight, dout.cuda())[1])


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole_on_the_gpu() -> None:
    indices = index_values("zipf", "compile", (6, 50), 90, torch.int64).cuda()
    weight, dout = (row_values(n, (*s, 16), torch.float32).cuda() for n, s in (("w", (90,)), ("d", (6, 50))))
    compiled = torch.compile(lambda i, w: hf.embedding(i, w) * 2, fullgraph=True, dynamic=True)
    table = weight.requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(indices, table), table, dout)
    wanted = both(indices.cpu(), weight.detach().cpu(), dout.cpu() * 2)[1]
    assert torch.equal(gradient.cpu(), wanted)

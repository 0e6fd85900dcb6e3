"""Tests of scatter that need a GPU: bits of the CPU, CUDA graphs, no synchronization, bad indices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical
from holdfast.core.errors import InvalidIndex
from holdfast.ops.segment_sum.cases import index_values, row_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these need a CUDA device")


@pytest.fixture(autouse=True)
def nothing_reported() -> Iterator[None]:
    yield
    hf.check_errors()


@pytest.mark.parametrize("kind", ["zipf", "equal", "uniform"])
@pytest.mark.parametrize("count", [5000, 300000])
@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cpu_gives_the_same_bits(kind: str, count: int, width: int, dtype: torch.dtype) -> None:
    index = index_values(kind, "large", (count,), 3000, torch.int64)
    table, src = row_values("table", (3000, width), dtype), row_values("src", (count, width), dtype)
    full = index[:, None].expand(src.shape)

    def results(device: str) -> list[torch.Tensor]:
        x, s = (t.to(device).requires_grad_() for t in (table, src))
        i, f = index.to(device), full.contiguous().to(device)
        out = [
            hf.index_add(x, 0, i, s, alpha=0.3), hf.scatter_add(x, 0, f, s),
            hf.scatter_reduce(x, 0, f, s, "mean", include_self=False), hf.gather(x, 0, f),
        ]  # fmt: skip
        return [*out, *torch.autograd.grad([o.float().square().sum() for o in out], (x, s))]

    for own, other in zip(results("cuda"), results("cpu"), strict=True):
        assert torch.equal(canonical(own.detach().cpu()), canonical(other.detach()))


def test_runs_are_captured_and_do_not_synchronise() -> None:
    desc = hf.plans.ScatterDescriptor(shape=(40000,), table=(3000,), width=16)
    stream = hf.Stream.current("cuda")
    plan = hf.plans.ScatterPlan.select(stream, desc)
    workspace = hf.Workspace.allocate(plan.workspace_size(), "cuda")
    index = index_values("zipf", "graph", (40000,), 3000, torch.int64).cuda()
    table, src = row_values("t", (3000, 16), torch.float32), row_values("s", (40000, 16), torch.float32)
    args = hf.plans.ScatterArgs(
        input=table.cuda(), index=index, src=src.cuda(), out=torch.empty(3000, 16, device="cuda")
    )
    plan.run(stream, workspace, args)
    expected = args.out.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.run(stream, workspace, args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(hf.Stream.current("cuda"), workspace, args)
    args.out.zero_()
    graph.replay()
    assert torch.equal(args.out, expected)


@pytest.mark.parametrize("count", [10, 200_000])
def test_a_bad_index_is_raised_later_and_its_term_left_out(count: int) -> None:
    index = torch.zeros(count, dtype=torch.int64, device="cuda")
    index[7] = 5
    out = hf.index_add(torch.zeros(3, 2, device="cuda"), 0, index, torch.ones(count, 2, device="cuda"))
    with pytest.raises(InvalidIndex, match=r"position 7 .* is 5; the indexed axis has 3 rows"):
        hf.check_errors()
    assert out.tolist() == [[count - 1.0] * 2, [0.0] * 2, [0.0] * 2]

"""Tests that need a GPU: CUDA graphs, streams, no synchronization, sizes above 2^31, recovery from errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import holdfast as hf

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these need a CUDA device")


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def values(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (((torch.arange(count) * 37) % 1009 - 504) / 64).reshape(shape)


def round_trip(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = hf.quantize(x, scale, 1, dtype=torch.float32, q_min=-8, q_max=7, granularity=hf.PerChannel(0))
    return hf.dequantize(codes, scale, 1, granularity=hf.PerChannel(0))


def test_a_graph_replays_forward_and_backward() -> None:
    x = values(16, 300).cuda().requires_grad_()
    scale = torch.full((16,), 0.3, device="cuda")
    round_trip(x, scale).sum().backward()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = round_trip(x, scale)
        y.sum().backward()
    with torch.no_grad():
        x.copy_(values(16, 300).flip(0))
    graph.replay()
    torch.cuda.synchronize()
    again = values(16, 300).flip(0).requires_grad_()
    wanted = round_trip(again, scale.cpu())
    wanted.sum().backward()
    assert torch.equal(y.cpu(), wanted)
    assert torch.equal(x.grad.cpu(), again.grad)


def test_repeated_calls_follow_the_current_stream_and_graph() -> None:
    """The third call is launched without a plan's run, on the stream that is current then."""
    indices = torch.arange(4096, device="cuda") % 64
    weight = torch.zeros(64, 8, device="cuda", requires_grad=True)

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        out = hf.fake_quantize(hf.embedding(indices, weight), 0.5)
        return out, torch.autograd.grad(out, weight, torch.ones_like(out))[0]

    for _ in range(4):
        results()
    torch.cuda.synchronize()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    for value in (1.0, 2.0, 3.0):
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            with torch.no_grad():
                weight.fill_(value)
            out, gradient = results()
        side.synchronize()
        assert torch.equal(out, torch.full_like(out, value))
        assert torch.equal(gradient, torch.full_like(gradient, 64.0))
    del out, gradient  # their graph holds a node of the other stream
    with torch.cuda.graph(graph):
        out, gradient = results()
    for value in (4.0, 5.0):
        with torch.no_grad():
            weight.fill_(value)
        gradient.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, torch.full_like(out, value))
        assert torch.equal(gradient, torch.full_like(gradient, 64.0))


def test_calls_do_not_synchronise(no_synchronisation: None) -> None:
    x, scale = torch.ones(64, 128, device="cuda"), torch.full((64,), 0.5, device="cuda")
    zero_point = torch.ones(64, dtype=torch.int32, device="cuda")
    q = hf.quantize(x, scale, zero_point, granularity=hf.PerChannel(0))
    y = hf.dequantize(q, scale, zero_point, granularity=hf.PerChannel(0))
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, x)


def test_plans_compiled_at_selection_run_on_the_stream_they_are_given() -> None:
    desc = hf.plans.QuantizePerChannelDescriptor(shape=(64, 3, 7, 7), axis=0)
    side = torch.cuda.Stream()
    plan = hf.plans.QuantizePerChannelPlan.select(hf.Stream.wrap(side), desc, hf.PlanPreference())
    x = values(64, 3, 7, 7).cuda()
    scale = torch.full((64,), 0.25, device="cuda")
    zero_point = torch.arange(64, dtype=torch.int32, device="cuda")
    q = torch.empty(64, 3, 7, 7, dtype=torch.int8, device="cuda")
    args = hf.plans.QuantizePerChannelArgs(x=x, scale=scale, zero_point=zero_point, q=q)
    side.wait_stream(torch.cuda.current_stream())
    plan.run(hf.Stream.wrap(side), None, args)
    side.synchronize()
    wanted = hf.quantize(x.cpu(), scale.cpu(), zero_point.cpu(), granularity=hf.PerChannel(0))
    assert torch.equal(q.cpu(), wanted)


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_addresses_need_no_alignment(shift: int) -> None:
    buffer = values(4100).cuda()
    x = buffer[shift : shift + 4096]
    out = torch.empty(4100, dtype=torch.int8, device="cuda")
    for where in (0, 1, 3):
        q = out[where : where + 4096]
        plan = hf.plans.QuantizePerTensorPlan.select(
            hf.Stream.current("cuda"),
            hf.plans.QuantizePerTensorDescriptor(shape=(4096,)),
            hf.PlanPreference(precompile=False),
        )
        plan.run(hf.Stream.current("cuda"), None, hf.plans.QuantizePerTensorArgs(x=x, scale=0.25, q=q))
        assert torch.equal(q.cpu(), hf.quantize(x.cpu(), 0.25))


def test_more_than_two_to_the_31_elements() -> None:
    rows, columns = 2**16 + 1, 2**15 + 8
    row = (torch.arange(columns, device="cuda") % 251 - 125).to(torch.bfloat16)
    zero_point = torch.arange(rows, dtype=torch.int32, device="cuda") % 3
    for x in (row.expand(rows, columns), row.expand(rows, columns).contiguous()):
        q = hf.quantize(x, torch.ones(rows, device="cuda"), zero_point, granularity=hf.PerChannel(0))
        flat = hf.quantize(x, 1.0)
        assert q.numel() > 2**31
        for at in (0, 1, rows // 2, rows - 1):
            wanted = row.to(torch.int32)
            assert torch.equal(flat[at], wanted.to(torch.int8))
            assert torch.equal(q[at], (wanted + zero_point[at]).clamp(-128, 127).to(torch.int8))
        del q, flat


def test_bad_input_leaves_the_context_alive() -> None:
    x = values(32).cuda()
    for bad in (
        lambda: hf.quantize(x, torch.tensor(0.1)),
        lambda: hf.quantize(x, torch.ones(3, device="cuda")),
        lambda: hf.quantize(x, 0.0),
        lambda: hf.quantize(x, 0.1, dtype=torch.int4, q_max=9),
    ):
        with pytest.raises(hf.HoldfastError):
            bad()
    assert torch.equal(hf.quantize(x, 0.25).cpu(), hf.quantize(x.cpu(), 0.25))


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole_on_the_gpu() -> None:
    x = values(16, 300).cuda()
    scale = torch.full((16,), 0.3, device="cuda")
    compiled = torch.compile(lambda x, s: round_trip(x, s) * 2, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x, scale).cpu(), round_trip(x.cpu(), scale.cpu()) * 2)

"""dynamic_quantize gives the bits of choose_scale followed by quantize, in one pass where documented."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.core.bits import canonical
from holdfast.core.case import laid_out, poisoned_output
from holdfast.core.formats import INTEGERS
from holdfast.ops.choose_scale.cases import Problem, input_values
from holdfast.ops.dynamic_quantize import cpu, gpu
from holdfast.proof.conformance import gpu_way

GPU = gpu_way()
BACKENDS = {"reference": "cpu", "cpu": "cpu", **({GPU.backend: GPU.device} if GPU else {})}
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
STORED = [(code.torch, packed) for code in INTEGERS.values() for packed in {False, code.per_byte > 1}]
GRANULARITIES = [
    hf.PerTensor(),
    hf.PerChannel(0),
    hf.PerChannel(1),
    hf.PerToken(),
    hf.PerGroup(8),
    hf.PerGroup(3, axis=0),
]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(canonical(a), canonical(b))


def results(desc: hf.plans.DynamicQuantizeDescriptor, device: str) -> dict[str, torch.Tensor]:
    names = ("q", "scale") if desc.symmetric else ("q", "scale", "zero_point")
    return {name: poisoned_output(*desc.expected(name)).to(device) for name in names}


def run(backend: str, x: torch.Tensor, **fields: Any) -> list[torch.Tensor]:
    """The outputs of a plan on ``backend``."""
    device = BACKENDS[backend]
    desc = hf.plans.DynamicQuantizeDescriptor(shape=tuple(x.shape), input_dtype=x.dtype, **fields)
    stream = hf.Stream.current(device)
    plan = hf.plans.DynamicQuantizePlan.select(
        stream, desc, hf.PlanPreference(backend=backend, precompile=False)
    )
    made = results(desc, device)
    given = x if device == "cpu" else x.to(device)
    workspace = hf.Workspace.allocate(plan.workspace_size(), device)
    plan.run(stream, workspace, hf.plans.DynamicQuantizeArgs(x=given, **made))
    return [made[name].cpu() for name in made]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_the_bits_of_choosing_and_then_quantizing(granularity: hf.Granularity, dtype: torch.dtype) -> None:
    x = input_values(Problem("dynamic", granularity, (18, 48), dtype, values="mixed"))
    for codes, packed in STORED:
        for symmetric in {False, INTEGERS[str(codes).removeprefix("torch.")].signed}:
            rule: dict[str, Any] = {"dtype": codes, "granularity": granularity}
            found = hf.quantize_dynamic(x, symmetric=symmetric, packed=packed, **rule)
            scale = hf.choose_scale(x, symmetric=symmetric, **rule)
            shared = scale if isinstance(scale, tuple) else (scale,)
            q = hf.quantize(x, *shared, packed=packed, **rule)
            assert all(map(same, found, (q, *shared))), (codes, packed, symmetric)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.tuples(st.integers(0, 5), st.integers(0, 9), st.sampled_from([0, 1, 7, 16, 33])),
    st.sampled_from([hf.PerTensor(), hf.PerChannel(1), hf.PerChannel(2), hf.PerToken(), None]),
    st.sampled_from(["contiguous", "transposed", "sliced", "unaligned", "padded rows"]),
    st.sampled_from(["contiguous", "transposed", "padded rows"]),
    st.sampled_from(REALS),
    st.sampled_from(STORED),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_any_shape_and_layout(
    shape: tuple[int, ...],
    granularity: hf.Granularity | None,
    layout: str,
    written: str,
    dtype: torch.dtype,
    stored: tuple[torch.dtype, bool],
    symmetric: bool,
    seed: int,
) -> None:
    codes, packed = stored
    symmetric = symmetric and INTEGERS[str(codes).removeprefix("torch.")].signed
    if granularity is None:
        granularity, shape = hf.PerGroup(8), (*shape[:2], 16)
    bits = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(seed))
    x = laid_out(bits.to(torch.int16).view(torch.bfloat16).to(dtype), layout)
    desc = hf.plans.DynamicQuantizeDescriptor(
        shape=shape, input_dtype=dtype, output_dtype=codes, packed=packed,
        granularity=granularity, symmetric=symmetric,
    )  # fmt: skip
    found = {}
    for backend in BACKENDS:
        device = BACKENDS[backend]
        stream = hf.Stream.current(device)
        pref = hf.PlanPreference(backend=backend, precompile=False)
        plan = hf.plans.DynamicQuantizePlan.select(stream, desc, pref)
        made = results(desc, device)
        if not packed:
            made["q"] = poisoned_output(desc.code_shape, desc.code_storage, written).to(device)
        workspace = hf.Workspace.allocate(plan.workspace_size(), device)
        plan.run(stream, workspace, hf.plans.DynamicQuantizeArgs(x=x.to(device), **made))
        found[backend] = [tensor.cpu() for tensor in made.values()]
    for backend in BACKENDS:
        assert all(map(same, found["reference"], found[backend])), backend


@pytest.mark.parametrize("columns", [2, 31, 4096, 8191, 8192])
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_tokens_are_read_once(backend: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*_: Any) -> None:
        raise AssertionError("two passes")

    module = {"cpu": cpu, "gpu": gpu}[backend]
    monkeypatch.setattr(module.DynamicQuantize, "_in_two_passes", twice)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)).to(torch.bfloat16)
    for fields in ({}, {"symmetric": False}, {"output_dtype": torch.int4, "packed": True}):
        right = run("reference", x, granularity=hf.PerToken(), **fields)
        assert all(map(same, right, run(backend, x, granularity=hf.PerToken(), **fields)))
    if columns % 8 == 0:
        run(backend, x, granularity=hf.PerGroup(8))
        run(backend, x.t().contiguous().t().contiguous(), granularity=hf.PerGroup(columns))
    with pytest.raises(AssertionError, match="two passes"):
        run(backend, torch.randn(2, 70_000), granularity=hf.PerToken())


def test_a_gpu_program_holds_tokens_of_32768() -> None:
    from holdfast.core.segments import segments_by_memory
    from holdfast.core.strided import contiguous_strides
    from holdfast.ops.choose_scale.gpu_segments import Tuning, whole_tile

    for columns, fits in ((8192, True), (32768, True), (32769, False)):
        shape = (64, columns)
        strides = contiguous_strides(shape)
        walk = segments_by_memory(hf.PerToken().view(shape), [strides, strides], (None, None))
        assert (whole_tile(walk, Tuning(), Tuning().per_thread, 1) is not None) is fits


@pytest.mark.parametrize("granularity", [hf.PerTensor(), hf.PerToken(), hf.PerGroup(4)], ids=repr)
def test_opcheck(granularity: hf.Granularity) -> None:
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    for dtype, packed in (("int8", False), ("int4", True)):
        arguments = (x, granularity.name, dtype, None, None, None, packed)
        torch.library.opcheck(torch.ops.holdfast.quantize_dynamic.default, arguments)
        torch.library.opcheck(torch.ops.holdfast.quantize_dynamic_affine.default, arguments)


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole_with_dynamic_shapes() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, scale = hf.quantize_dynamic(x * 2)
        packed, of_groups, zero_points = hf.quantize_dynamic(
            x, dtype=torch.uint4, granularity=hf.PerGroup(4), symmetric=False, packed=True
        )
        return q, scale * 2, packed, of_groups, zero_points

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for rows, columns in ((3, 8), (4, 12), (9, 4)):
        x = torch.linspace(-3, 2, rows * columns).reshape(rows, columns)
        assert all(map(same, compiled(x), both(x)))


def test_ordinary_torch_behaviour() -> None:
    x = torch.randn(5, 3, 8, requires_grad=True, generator=torch.Generator().manual_seed(2))
    q, scale = hf.quantize_dynamic(x)
    assert not q.requires_grad and not scale.requires_grad
    assert q.shape == x.shape and scale.shape == (5, 3)
    batched = torch.vmap(lambda x: hf.quantize_dynamic(x, granularity=hf.PerTensor()))(x.detach())
    assert same(batched[1], torch.stack([hf.choose_scale(sample) for sample in x.detach()]))
    image = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    q, _ = hf.quantize_dynamic(image, granularity=hf.PerChannel(1))
    assert q.is_contiguous(memory_format=torch.channels_last)
    wanted, _ = hf.quantize_dynamic(image.contiguous(), granularity=hf.PerChannel(1))
    assert torch.equal(q, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("columns", [96, 4096, 5120, 32768, 40_000])
def test_the_gpu_divides_as_the_cpu_does(columns: int, dtype: torch.dtype) -> None:
    """Rows with scales of every magnitude, near ties and elsewhere, including huge and non-finite values."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(96, columns, generator=generator, dtype=torch.float64)
    x *= 2.0 ** torch.linspace(-60, 126, 96, dtype=torch.float64)[:, None]
    x[:, ::3] = (x.abs().amax(1, keepdim=True) / 254) * torch.arange(0, columns, 3).remainder(255).mul(2).add(
        1
    )
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    x[3, 7], x[5, 1], x[90, 2], x[11] = float("nan"), float("inf"), float("-inf"), 0.0
    groups = hf.PerGroup(32) if columns % 32 == 0 else hf.PerTensor()
    for granularity in (hf.PerToken(), groups):
        for rule in (
            {}, {"narrow": False}, {"dtype": torch.int4, "packed": True}, {"dtype": torch.int16},
            {"dtype": torch.uint8, "symmetric": False},
            {"dtype": torch.uint4, "packed": True, "symmetric": False},
        ):  # fmt: skip
            right = hf.quantize_dynamic(x, granularity=granularity, **rule)
            found = hf.quantize_dynamic(x.cuda(), granularity=granularity, **rule)
            assert all(same(a, b.cpu()) for a, b in zip(right, found, strict=True)), (granularity, rule)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu_nothing_waits_and_a_graph_replays() -> None:
    x = torch.randn(512, 4096, device="cuda")

    def work() -> tuple[torch.Tensor, ...]:
        return *hf.quantize_dynamic(x), hf.choose_scale(x), *hf.choose_scale(x, symmetric=False)

    work()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    x.copy_(torch.randn(512, 4096, generator=torch.Generator().manual_seed(5)))
    graph.replay()
    torch.cuda.synchronize()
    captured = [tensor.cpu() for tensor in found]
    x = x.cpu()
    assert all(map(same, captured, work()))


BAD_ARGS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "x of another shape": (lambda a: replace(a, x=a.x[:3]), ("x has shape (3, 6)", "(4, 6)")),
    "q of another dtype": (lambda a: replace(a, q=a.q.view(torch.uint8)), ("q has dtype torch.uint8",)),
    "q that overlaps itself": (lambda a: replace(a, q=a.q[:1].expand(4, 6)), ("q has strides (0, 1)",)),
    "a scale of another shape": (lambda a: replace(a, scale=a.scale[:3]), ("(3,)", "takes 4 in shape (4,)")),
    "a scale of another dtype": (lambda a: replace(a, scale=a.scale.half()), ("torch.float16",)),
    "no zero point": (lambda a: replace(a, zero_point=None), ("zero_point is a NoneType",)),
    "q in the input": (
        lambda a: replace(a, q=a.x.view(torch.int8).flatten()[:24].view(4, 6)), ("q shares memory",),
    ),
    "a scale in the codes": (
        lambda a: replace(a, scale=a.q.as_strided((16,), (1,), a.q.storage_offset()).view(torch.float32)),
        ("q shares memory",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_ARGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_args(backend: str, what: str) -> None:
    device = BACKENDS[backend]
    desc = hf.plans.DynamicQuantizeDescriptor(shape=(4, 6), granularity=hf.PerToken(), symmetric=False)
    stream = hf.Stream.current(device)
    plan = hf.plans.DynamicQuantizePlan.select(
        stream, desc, hf.PlanPreference(backend=backend, precompile=False)
    )
    made = results(desc, device)
    args = hf.plans.DynamicQuantizeArgs(x=torch.ones(4, 6, device=device), **made)
    spoil, said = BAD_ARGS[what]
    bad = spoil(args)
    verdict = plan.can_implement(bad)
    with pytest.raises(hf.InvalidArgs) as refusal:
        plan.run(stream, None, bad)
    assert str(refusal.value) == verdict.reason and verdict.reason.endswith(".")
    assert all(words in verdict.reason for words in said)
    assert made["scale"].isnan().all() and (made["q"].cpu().view(torch.uint8) == 0xA5).all()


def test_functions_refuse_with_a_sentence() -> None:
    x = torch.ones(4, 6)
    for bad, match in (
        (lambda: hf.quantize_dynamic(None), "x is a NoneType"),
        (lambda: hf.quantize_dynamic(x, dtype=torch.uint8), "symmetric=False"),
        (lambda: hf.quantize_dynamic(x, packed=True), "only 2-bit and 4-bit codes share a byte"),
        (lambda: hf.quantize_dynamic(x, symmetric="no"), "symmetric is 'no'"),
        (lambda: hf.quantize_dynamic(x, granularity=3), "granularity is 3"),
        (lambda: hf.quantize_dynamic(x.int()), "torch.int32; accepted are"),
        (
            lambda: hf.quantize_dynamic(x, dtype=torch.int4, granularity=hf.PerGroup(3), packed=True),
            "two groups share one",
        ),
    ):
        with pytest.raises(hf.HoldfastError, match=match) as refusal:
            bad()
        assert str(refusal.value).endswith(".")

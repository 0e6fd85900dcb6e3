"""dynamic_fake_quantize gives the bits of choose_scale followed by fake_quantize, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.core.bits import canonical
from holdfast.core.case import laid_out, poisoned_output
from holdfast.core.formats import FLOAT_FORMATS, INTEGERS
from holdfast.ops.choose_scale import cpu_rows, gpu_segments
from holdfast.ops.choose_scale.cases import Problem, input_values
from holdfast.proof.conformance import gpu_way

GPU = gpu_way()
BACKENDS = {"reference": "cpu", "cpu": "cpu", **({GPU.backend: GPU.device} if GPU else {})}
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
RULES: list[dict[str, Any]] = [
    {},
    {"dtype": torch.int8, "narrow": False},
    {"dtype": torch.int16},
    {"q_min": -5, "q_max": 100},
    {"q_min": -7, "q_max": 8, "symmetric": False, "narrow": True},
    *({"dtype": record.torch} for record in INTEGERS.values() if record.signed and record.bits < 8),
    *({"dtype": record.torch, "symmetric": False} for record in INTEGERS.values()),
    *({"dtype": record.torch} for record in FLOAT_FORMATS.values()),
]
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


def in_two_steps(x: torch.Tensor, ste: str = "in_range", **rule: Any) -> tuple[torch.Tensor, ...]:
    """choose_scale, then fake_quantize. A range without a dtype belongs to codes in float32."""
    granularity = rule["granularity"]
    codes = {name: rule[name] for name in ("dtype", "q_min", "q_max") if name in rule}
    more = {name: rule[name] for name in ("symmetric", "narrow") if name in rule}
    carried = {"dtype": torch.float32} if codes and "dtype" not in codes else {}
    found: Any = hf.choose_scale(x, granularity=granularity, **carried, **codes, **more)
    shared = found if isinstance(found, tuple) else (found,)
    return hf.fake_quantize(x, *shared, granularity=granularity, ste=ste, **codes), *shared


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_the_bits_of_choosing_and_then_quantizing(granularity: hf.Granularity, dtype: torch.dtype) -> None:
    x = input_values(Problem("dynamic", granularity, (18, 48), dtype, values="mixed"))
    dy = input_values(Problem("gradient", granularity, (18, 48), dtype, values="special"))
    for number, rule in enumerate(RULES):
        ste = list(hf.SteKind)[number % 5]
        for estimator in {hf.SteKind.IN_RANGE, ste}:
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            found = hf.dynamic_fake_quantize(
                inputs[0], granularity=granularity, ste=estimator, return_scale=True, **rule
            )
            wanted = in_two_steps(inputs[1], granularity=granularity, ste=estimator, **rule)
            assert len(found) == len(wanted) and all(map(same, found, wanted)), (rule, estimator)
            found[0].backward(dy)
            wanted[0].backward(dy)
            assert inputs[0].grad is not None and inputs[1].grad is not None
            assert same(inputs[0].grad, inputs[1].grad), (rule, estimator)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(0, 5), st.integers(0, 9), st.sampled_from([0, 1, 7, 16, 33])),
    st.sampled_from([hf.PerTensor(), hf.PerChannel(1), hf.PerChannel(2), hf.PerToken(), None]),
    st.sampled_from(["contiguous", "transposed", "sliced", "unaligned", "padded rows"]),
    st.sampled_from(["contiguous", "transposed", "padded rows"]),
    st.sampled_from(REALS),
    st.sampled_from([rule for rule in RULES if "dtype" in rule]),
    st.integers(0, 2**32),
)
def test_any_shape_and_layout(
    shape: tuple[int, ...],
    granularity: hf.Granularity | None,
    layout: str,
    written: str,
    dtype: torch.dtype,
    rule: dict[str, Any],
    seed: int,
) -> None:
    if granularity is None:
        granularity, shape = hf.PerGroup(8), (*shape[:2], 16)
    bits = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(seed))
    x = laid_out(bits.to(torch.int16).view(torch.bfloat16).to(dtype), layout)
    desc = hf.plans.DynamicFakeQuantizeDescriptor(
        shape=shape, input_dtype=dtype, granularity=granularity, **rule
    )
    found = {}
    for backend, device in BACKENDS.items():
        stream = hf.Stream.current(device)
        preference = hf.PlanPreference(backend=backend, precompile=False)
        plan = hf.plans.DynamicFakeQuantizePlan.select(stream, desc, preference)
        names = ("scale",) if desc.symmetric else ("scale", "zero_point")
        made = {name: poisoned_output(*desc.expected(name)).to(device) for name in names}
        made["y"] = poisoned_output(shape, dtype, written).to(device)
        workspace = hf.Workspace.allocate(plan.workspace_size(), device)
        plan.run(stream, workspace, hf.plans.DynamicFakeQuantizeArgs(x=x.to(device), **made))
        found[backend] = [tensor.cpu() for tensor in made.values()]
    for backend in BACKENDS:
        assert all(map(same, found["reference"], found[backend])), backend


@pytest.mark.parametrize("columns", [2, 31, 4096, 8192])
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_tokens_are_read_once(backend: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*_: Any) -> None:
        raise AssertionError("two passes")

    base: Any = {"cpu": cpu_rows.RowKernel, "gpu": gpu_segments.SegmentKernel}[backend]
    monkeypatch.setattr(base, "_in_two_passes", twice)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)).to(torch.bfloat16)
    for rule in ({}, {"symmetric": False}, {"dtype": torch.float8_e4m3fn}):
        run(backend, x, granularity=hf.PerToken(), **{"dtype": torch.int8, **rule})
    if columns % 8 == 0:
        run(backend, x, granularity=hf.PerGroup(8), dtype=torch.int4)
    with pytest.raises(AssertionError, match="two passes"):
        run(backend, torch.randn(2, 70_000), granularity=hf.PerToken(), dtype=torch.int8)


def run(backend: str, x: torch.Tensor, **fields: Any) -> None:
    """Run a plan on ``backend``."""
    device = BACKENDS[backend]
    desc = hf.plans.DynamicFakeQuantizeDescriptor(shape=tuple(x.shape), input_dtype=x.dtype, **fields)
    stream = hf.Stream.current(device)
    preference = hf.PlanPreference(backend=backend, precompile=False)
    plan = hf.plans.DynamicFakeQuantizePlan.select(stream, desc, preference)
    names = ("y", "scale") if desc.symmetric else ("y", "scale", "zero_point")
    made = {name: poisoned_output(*desc.expected(name)).to(device) for name in names}
    workspace = hf.Workspace.allocate(plan.workspace_size(), device)
    plan.run(stream, workspace, hf.plans.DynamicFakeQuantizeArgs(x=x.to(device), **made))


def test_a_large_result_is_streamed() -> None:
    """More than 32 MiB: the CPU kernel then writes past the caches."""
    generator = torch.Generator().manual_seed(3)
    for shape, granularity in (((2050, 4100), hf.PerToken()), ((2049, 4128), hf.PerGroup(32))):
        x = torch.randn(shape, generator=generator).requires_grad_()
        wanted = in_two_steps(x, granularity=granularity)
        assert all(map(same, hf.dynamic_fake_quantize(x, granularity=granularity, return_scale=True), wanted))
        dy = torch.randn(shape, generator=generator)
        (dx,) = torch.autograd.grad(hf.dynamic_fake_quantize(x, granularity=granularity), x, dy)
        assert torch.equal(dx, dy)


@pytest.mark.parametrize("granularity", [hf.PerTensor(), hf.PerToken(), hf.PerGroup(4)], ids=repr)
def test_opcheck(granularity: hf.Granularity) -> None:
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for ste in ("in_range", "hard_tanh"):
        arguments = (x, granularity.name, "int8", None, None, ste, None)
        torch.library.opcheck(torch.ops.holdfast.dynamic_fake_quantize.default, arguments)
        torch.library.opcheck(torch.ops.holdfast.dynamic_fake_quantize_affine.default, arguments)
    x = x.detach()
    y, scale = hf.dynamic_fake_quantize(x, granularity=granularity, return_scale=True)
    arguments = (y, x, scale, None, granularity.name, "int8", None, None, "in_range")
    torch.library.opcheck(torch.ops.holdfast.dynamic_fake_quantize_backward.default, arguments)


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole_with_dynamic_shapes() -> None:
    def faked(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = hf.dynamic_fake_quantize(x * 2, dtype=torch.int4)
        return y, *hf.dynamic_fake_quantize(
            x, granularity=hf.PerGroup(4), symmetric=False, return_scale=True, ste="tanh"
        )

    compiled = torch.compile(faked, fullgraph=True, dynamic=True)
    for rows, columns in ((3, 8), (4, 12), (9, 4)):
        x = torch.linspace(-3, 2, rows * columns).reshape(rows, columns).requires_grad_()
        assert all(map(same, compiled(x), faked(x)))
        dy = torch.linspace(1, 2, rows * columns).reshape(rows, columns)
        for k in (0, 1):
            assert same(*(torch.autograd.grad(of(x)[k], x, dy)[0] for of in (compiled, faked)))


def test_ordinary_torch_behaviour() -> None:
    x = torch.randn(5, 3, 8, requires_grad=True, generator=torch.Generator().manual_seed(2))
    y, scale = hf.dynamic_fake_quantize(x, return_scale=True)
    assert y.requires_grad and not scale.requires_grad
    assert y.shape == x.shape and scale.shape == (5, 3)
    batched = torch.vmap(lambda x: hf.dynamic_fake_quantize(x, granularity=hf.PerTensor()))(x.detach())
    assert same(batched, torch.stack([in_two_steps(s, granularity=hf.PerTensor())[0] for s in x.detach()]))
    image = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    y = hf.dynamic_fake_quantize(image, granularity=hf.PerChannel(1))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, hf.dynamic_fake_quantize(image.contiguous(), granularity=hf.PerChannel(1)))
    with pytest.raises(hf.Unsupported, match="no second derivative"):
        (dx,) = torch.autograd.grad(hf.dynamic_fake_quantize(x).sum(), x, create_graph=True)
        dx.sum().backward()


def test_autograd_keeps_the_input_and_the_scale_only() -> None:
    x = torch.randn(6, 32, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        hf.dynamic_fake_quantize(x, granularity=hf.PerGroup(8))
    assert sorted(tensor.numel() for tensor in kept) == [24, 192]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        hf.dynamic_fake_quantize(x, ste="identity")
    assert len(kept) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("columns", [96, 4096, 5120, 16384, 32768, 40_000])
def test_the_gpu_divides_as_the_cpu_does(columns: int, dtype: torch.dtype) -> None:
    """Rows with scales of every magnitude, near ties and elsewhere, including huge and non-finite values."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(96, columns, generator=generator, dtype=torch.float64)
    x *= 2.0 ** torch.linspace(-60, 126, 96, dtype=torch.float64)[:, None]
    steps = torch.arange(0, columns, 3).remainder(255).mul(2).add(1)
    x[:, ::3] = (x.abs().amax(1, keepdim=True) / 254) * steps
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    x[3, 7], x[5, 1], x[90, 2], x[11] = float("nan"), float("inf"), float("-inf"), 0.0
    for granularity in (hf.PerToken(), hf.PerGroup(32) if columns % 32 == 0 else hf.PerTensor()):
        for rule in RULES:
            inputs = x.clone().requires_grad_(), x.cuda().requires_grad_()
            right, found = (
                hf.dynamic_fake_quantize(given, granularity=granularity, return_scale=True, **rule)
                for given in inputs
            )
            assert all(same(a, b.cpu()) for a, b in zip(right, found, strict=True)), (granularity, rule)
            right[0].backward(x)
            found[0].backward(x.cuda())
            assert inputs[0].grad is not None and inputs[1].grad is not None
            assert same(inputs[0].grad, inputs[1].grad.cpu()), (granularity, rule)


def test_functions_refuse_with_a_sentence() -> None:
    x = torch.ones(4, 6)
    for bad, match in (
        (lambda: hf.dynamic_fake_quantize(None), "x is a NoneType"),
        (lambda: hf.dynamic_fake_quantize(x, dtype=torch.uint8), "symmetric=False"),
        (lambda: hf.dynamic_fake_quantize(x, symmetric="no"), "symmetric is 'no'"),
        (lambda: hf.dynamic_fake_quantize(x, narrow="no"), "narrow is 'no'"),
        (lambda: hf.dynamic_fake_quantize(x, return_scale=1), "return_scale is 1"),
        (lambda: hf.dynamic_fake_quantize(x, ste="none"), "ste is 'none'"),
        (lambda: hf.dynamic_fake_quantize(x, granularity=3), "granularity is 3"),
        (lambda: hf.dynamic_fake_quantize(x, q_min=0), "give dtype, or both q_min and q_max"),
        (lambda: hf.dynamic_fake_quantize(x, dtype=torch.float32, q_min=-4, q_max=4), "dtype of the codes"),
        (lambda: hf.dynamic_fake_quantize(x.int()), "torch.int32; accepted are"),
    ):
        with pytest.raises(hf.HoldfastError, match=match) as refusal:
            bad()
        assert str(refusal.value).endswith(".")


def test_a_backward_with_a_symmetric_scale_takes_no_zero_point() -> None:
    desc = hf.plans.DynamicFakeQuantizeBackwardDescriptor(shape=(3,), dtype=torch.int8)
    plan = hf.plans.DynamicFakeQuantizeBackwardPlan.select(hf.Stream.current("cpu"), desc)
    x = torch.ones(3)
    zero_point = torch.zeros((), dtype=torch.int32)
    args = hf.plans.DynamicFakeQuantizeBackwardArgs(
        dy=x, x=x, scale=torch.tensor(1.0), zero_point=zero_point, dx=torch.empty(3)
    )
    assert plan.can_implement(args).reason == "a symmetric scale has no zero_point; leave it None."

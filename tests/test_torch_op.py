"""The torch operators pass opcheck, compile without graph breaks, and are differentiable."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast as hf
from holdfast.core import repeated
from holdfast.core.device_errors import Reports
from holdfast.core.plan import AnyPlan
from holdfast.proof.conformance import Difference, Way, cases_of, check, run_reference, select_on

SHAPE = (4, 6, 8)
GRANULARITIES = [hf.PerTensor(), hf.PerChannel(1), hf.PerToken(), hf.PerGroup(4), hf.PerGroup(3, axis=1)]


def values(dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> torch.Tensor:
    count = torch.Size(SHAPE).numel()
    x = ((torch.arange(count) * 37 % 101 - 50) / 16).reshape(SHAPE).to(dtype)
    return x.requires_grad_(requires_grad)


def scales(granularity: hf.Granularity) -> torch.Tensor:
    shape = granularity.view(SHAPE).scale_shape
    return ((torch.arange(torch.Size(shape).numel()) % 7 + 1) / 11).reshape(shape)


def zero_points(granularity: hf.Granularity) -> torch.Tensor:
    shape = granularity.view(SHAPE).scale_shape
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.int32) % 5 - 2).reshape(shape)


def formula(x: torch.Tensor, granularity: hf.Granularity) -> torch.Tensor:
    """int8 codes computed by plain torch operations, for ordinary values."""
    view = granularity.view(SHAPE)
    spread = [size if varies else 1 for size, varies in zip(view.shape, view.varies, strict=True)]
    scale = scales(granularity).reshape(spread).expand(view.shape).reshape(SHAPE)
    zero_point = zero_points(granularity).reshape(spread).expand(view.shape).reshape(SHAPE)
    return (torch.round(x / scale) + zero_point).clamp(-128, 127).to(torch.int8)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_quantize_is_the_formula(granularity: hf.Granularity) -> None:
    q = hf.quantize(values(), scales(granularity), zero_points(granularity), granularity=granularity)
    assert torch.equal(q, formula(values(), granularity))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_opcheck_of_integer_codes(granularity: hf.Granularity) -> None:
    for dtype, packed in (("int8", False), ("int4", granularity.view(SHAPE).shape[-1] % 2 == 0)):
        shared = (scales(granularity), 1.0, zero_points(granularity), 0, granularity.name)
        arguments = (values(), *shared, dtype, None, None, packed)
        torch.library.opcheck(torch.ops.holdfast.quantize.default, arguments)
        q = torch.ops.holdfast.quantize.default(*arguments)
        length = SHAPE[-1] if packed else None
        torch.library.opcheck(
            torch.ops.holdfast.dequantize.default,
            (q, *shared, "bfloat16", dtype if packed else "int8", length),
        )


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_opcheck_of_float_codes(granularity: hf.Granularity) -> None:
    shared = (scales(granularity), 1.0, None, 3, granularity.name)
    arguments = (values(requires_grad=True), *shared, "float32", -8, 7)
    torch.library.opcheck(torch.ops.holdfast.quantize_to_float.default, arguments)
    torch.library.opcheck(torch.ops.holdfast.quantize_backward.default, (values(), values(), *arguments[1:]))
    codes = torch.ops.holdfast.quantize_to_float.default(*arguments).detach().requires_grad_()
    torch.library.opcheck(torch.ops.holdfast.dequantize_from_float.default, (codes, *shared, "float32"))
    torch.library.opcheck(
        torch.ops.holdfast.dequantize_backward.default,
        (values(), scales(granularity), 1.0, granularity.name, "float32"),
    )


def round_trip(x: torch.Tensor, scale: torch.Tensor, granularity: hf.Granularity) -> torch.Tensor:
    codes = hf.quantize(x, scale, 1, dtype=torch.float32, granularity=granularity, q_min=-8, q_max=7)
    return hf.dequantize(codes, scale, 1, granularity=granularity)


@pytest.mark.parametrize("granularity", [hf.PerTensor(), hf.PerChannel(0), hf.PerToken()], ids=repr)
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole_with_dynamic_shapes(granularity: hf.Granularity) -> None:
    compiled = torch.compile(lambda x, s: round_trip(x, s, granularity) * 2, fullgraph=True, dynamic=True)
    for rows, columns in ((3, 5), (4, 7), (9, 2)):
        x = torch.linspace(-3, 3, rows * columns).reshape(rows, columns).requires_grad_()
        scale = torch.full(granularity.view((rows, columns)).scale_shape, 0.3)
        out = compiled(x, scale)
        out.sum().backward()
        again = x.detach().clone().requires_grad_()
        eager = round_trip(again, scale, granularity) * 2
        eager.sum().backward()
        assert torch.equal(out, eager)
        assert again.grad is not None
        assert torch.equal(x.grad, again.grad)


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_a_compiled_step_runs_the_gradient_of_a_learned_scale_eagerly() -> None:
    """torch would compile its Python code, which warns of interfaces that cannot be traced."""
    x, scale = torch.linspace(-3, 3, 12), torch.tensor(0.25, requires_grad=True)

    def step() -> None:
        hf.fake_quantize(x, scale, dtype=torch.int4).square().sum().backward()

    torch._dynamo.reset()
    step()
    expected, scale.grad = scale.grad, None
    torch.compile(step, backend="eager")()
    torch._dynamo.reset()
    assert scale.grad is not None and expected is not None and torch.equal(scale.grad, expected)


def test_compiles_packed_codes() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        q = hf.quantize(x, 0.25, dtype=torch.int4, packed=True)
        return hf.dequantize(q, 0.25, packed=True, code_dtype=torch.int4, length=x.shape[-1])

    x = values()[..., :7]
    assert torch.equal(torch.compile(both, fullgraph=True)(x), both(x))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradient_divides_by_the_scale_inside_the_range(
    granularity: hf.Granularity, dtype: torch.dtype
) -> None:
    x = values(dtype, requires_grad=True)
    scale = scales(granularity)
    codes = hf.quantize(x, scale, dtype=torch.float32, q_min=-3, q_max=3, granularity=granularity)
    codes.sum().backward()
    view = granularity.view(SHAPE)
    spread = [size if varies else 1 for size, varies in zip(view.shape, view.varies, strict=True)]
    s = scale.reshape(spread).expand(view.shape).reshape(SHAPE)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    r = torch.round(x.detach().to(compute) / s.to(compute))
    wanted = torch.where((r >= -3) & (r <= 3), 1 / s.to(compute), 0).to(dtype)
    assert torch.equal(x.grad, wanted)


def test_dequantize_is_differentiable_in_float_codes_alone() -> None:
    codes = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    hf.dequantize(codes, 0.5, 1).sum().backward()
    assert torch.equal(codes.grad, torch.full((3,), 0.5))
    scale = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(hf.InvalidArgs, match=r"scale requires a gradient.*scale\.detach\(\)"):
        hf.dequantize(codes, scale)
    with pytest.raises(hf.InvalidArgs, match="scale requires a gradient"):
        hf.quantize(values(), scale, dtype=torch.float32, q_min=-8, q_max=7)
    with torch.no_grad():
        assert torch.equal(hf.dequantize(codes, scale), codes * 0.5)
    assert not hf.quantize(values(requires_grad=True), scale).requires_grad


def test_negated_views_have_the_values_that_they_show() -> None:
    view = torch.complex(values(), values()).conj().imag
    assert view.is_neg()
    assert torch.equal(hf.quantize(view, 0.1), hf.quantize(-values(), 0.1))


def test_outputs_keep_the_layout_of_the_input() -> None:
    x = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    q = hf.quantize(x, 0.1)
    assert q.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(q, hf.quantize(x.contiguous(), 0.1))
    y = hf.dequantize(q, 0.1)
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("backend", ["cpu", "gpu", "reference"])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (2, 0, 4)], ids=str)
def test_empty_tensors_are_selected_and_run(shape: tuple[int, ...], backend: str) -> None:
    stream = hf.Stream.current("cuda" if backend == "gpu" and torch.cuda.is_available() else "cpu")
    for axis in range(len(shape)):
        desc = hf.plans.QuantizePerChannelDescriptor(shape=shape, axis=axis)
        plan = hf.plans.QuantizePerChannelPlan.select(stream, desc, hf.PlanPreference(backend=backend))
        x, q = (
            torch.empty(shape, device=stream.device),
            torch.empty(shape, dtype=torch.int8).to(stream.device),
        )
        scale = torch.ones(shape[axis], device=stream.device)
        plan.run(stream, None, hf.plans.QuantizePerChannelArgs(x=x, scale=scale, q=q))


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("dtype", [torch.int2, torch.uint2, torch.int4, torch.uint4], ids=str)
def test_packed_codes_are_the_unpacked_ones_packed(dtype: torch.dtype, length: int) -> None:
    x = values()[..., :1].expand(4, 6, length) + torch.arange(length) / 8
    codes = hf.quantize(x, 0.25, 1, dtype=dtype)
    packed = hf.quantize(x, 0.25, 1, dtype=dtype, packed=True)
    assert torch.equal(packed, hf.pack(codes, dtype))
    assert torch.equal(hf.unpack(packed, dtype, length), codes)
    y = hf.dequantize(packed, 0.25, 1, packed=True, code_dtype=dtype, length=length)
    assert torch.equal(y, hf.dequantize(codes, 0.25, 1))


@pytest.mark.parametrize("length", [1, 7, 8])
@pytest.mark.parametrize("dtype", [torch.int2, torch.uint4], ids=str)
def test_a_packed_length_is_never_guessed(dtype: torch.dtype, length: int) -> None:
    x = values()[..., :1].expand(4, 6, length)
    packed = hf.quantize(x, 0.25, dtype=dtype, packed=True)
    per_byte = 4 if dtype == torch.int2 else 2
    most = packed.shape[-1] * per_byte
    sentence = rf"length is not given.*may hold {most - per_byte + 1} to {most} codes; pass length="
    with pytest.raises(hf.InvalidArgs, match=sentence):
        hf.unpack(packed, dtype)
    for granularity, scale in (
        (hf.PerTensor(), 0.25),
        (hf.PerToken(), torch.full((4, 6), 0.25)),
        (hf.PerChannel(1), torch.full((6,), 0.25)),
        (hf.PerGroup(2, 1), torch.full((4, 3, length), 0.25)),
    ):
        how = {"packed": True, "code_dtype": dtype, "granularity": granularity}
        with pytest.raises(hf.InvalidArgs, match=sentence):
            hf.dequantize(packed, scale, **how)
        assert hf.dequantize(packed, scale, length=length, **how).shape == x.shape


@pytest.mark.parametrize("length", [1, 5, 7, 8])
@pytest.mark.parametrize("axis", [-1, 2])
def test_scales_along_the_packed_axis_tell_its_length(axis: int, length: int) -> None:
    x = torch.cat([values(), values()], -1)[..., :length]
    how = {"granularity": hf.PerChannel(axis)}
    for shape in ((length,), (1, 1, length)):
        scale = (torch.arange(1, length + 1) / 8).reshape(shape)
        codes, packed = (hf.quantize(x, scale, dtype=torch.int4, packed=p, **how) for p in (False, True))
        y = hf.dequantize(packed, scale, packed=True, code_dtype=torch.int4, **how)
        assert torch.equal(y, hf.dequantize(codes, scale, code_dtype=torch.int4, **how))
    with pytest.raises(hf.InvalidArgs, match="scale has shape"):
        hf.dequantize(packed, torch.ones(99), packed=True, code_dtype=torch.int4, **how)


def test_groups_along_the_packed_axis_fill_their_bytes() -> None:
    x = values()[..., :1].expand(4, 6, 12) + torch.arange(12) / 8
    how = {"granularity": hf.PerGroup(4)}
    scale = torch.full((4, 6, 3), 0.25)
    packed = hf.quantize(x, scale, dtype=torch.int4, packed=True, **how)
    y = hf.dequantize(packed, scale, packed=True, code_dtype=torch.int4, **how)
    assert torch.equal(y, hf.dequantize(hf.quantize(x, scale, dtype=torch.int4, **how), scale, **how))


def test_no_bytes_hold_no_codes() -> None:
    empty = torch.zeros(3, 0, dtype=torch.uint8)
    assert hf.unpack(empty, torch.int4).shape == (3, 0)
    assert hf.dequantize(empty, 0.5, packed=True, code_dtype=torch.int4).shape == (3, 0)


@pytest.mark.parametrize("packed", [torch.int4, torch.uint2], ids=str)
def test_pack_refuses_what_it_cannot_hold(packed: torch.dtype) -> None:
    with pytest.raises(hf.InvalidArgs, match=r"int32.*one per element"):
        hf.pack(torch.zeros(3, dtype=torch.int32), packed)
    with pytest.raises(hf.InvalidArgs, match="only codes of less than a byte"):
        hf.pack(torch.zeros(3, dtype=torch.int8), torch.int8)
    with pytest.raises(hf.InvalidArgs, match=r"length is 99"):
        hf.unpack(torch.zeros(3, dtype=torch.uint8), packed, length=99)
    with pytest.raises(hf.InvalidArgs, match="rank 0"):
        hf.unpack(torch.tensor(3, dtype=torch.uint8), packed)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_granularity_names_read_back(granularity: hf.Granularity) -> None:
    from holdfast.core.granularity import granularity_named

    assert granularity_named(granularity.name) == granularity


def test_functions_refuse_with_a_sentence() -> None:
    x = values()
    for bad, match in (
        (lambda: hf.quantize([1.0], 0.1), "x is a list"),
        (lambda: hf.quantize(x, "0.1"), "scale is a str"),
        (lambda: hf.quantize(x, 0.1, 1.5), "zero_point is a float"),
        (lambda: hf.quantize(x, 0.0), "scale is 0.0"),
        (lambda: hf.quantize(x, float("inf")), "scale is inf"),
        (lambda: hf.quantize(x, 1e-60), "scale is 1e-60"),
        (lambda: hf.quantize(x, 0.1, dtype=torch.float32), "give q_min and q_max"),
        (lambda: hf.quantize(x, 0.1, q_min=-200), "wider than torch.int8"),
        (lambda: hf.quantize(x, scales(hf.PerChannel(1)), granularity=hf.PerChannel(0)), "takes 4 in shape"),
        (lambda: hf.quantize(x.to(torch.int32), 0.1), "torch.int32; accepted are torch.float16"),
        (lambda: hf.dequantize(x.to(torch.int8), 0.1, packed=True), "need their code_dtype"),
        (lambda: hf.dequantize(x.to(torch.int8), 0.1, length=3), "for packed codes only"),
    ):
        with pytest.raises(hf.HoldfastError, match=match):
            bad()


def test_strides_do_not_change_the_codes() -> None:
    x = values()
    for order in itertools.permutations(range(3)):
        back = sorted(range(3), key=order.__getitem__)
        strided = x.permute(order).contiguous().permute(back)
        for granularity in GRANULARITIES:
            q = hf.quantize(strided, scales(granularity), zero_points(granularity), granularity=granularity)
            assert torch.equal(q, formula(x, granularity))


def test_torch_sees_a_call_that_it_watches() -> None:
    x = torch.randn(8)
    with torch.profiler.profile(acc_events=True) as profile:
        hf.quantize(x, 0.1)
    assert "holdfast::quantize" in {event.name for event in profile.events()}

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    with Seen():
        hf.quantize(x, 0.1)
    assert "holdfast.quantize.default" in names
    assert hf.quantize(x.to("meta"), 0.1).is_meta


def dispatched(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the first call of these arguments goes through torch's dispatcher."""
    with monkeypatch.context() as patch:
        straight, run = list[int](), repeated.Calls.run
        patch.setattr(repeated.Calls, "run", lambda *given: straight.append(1) or run(*given))
        patch.setattr(repeated, "repetition_of", lambda *given: None)
        call()
    return not straight


def test_a_call_that_nothing_watches_goes_straight_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8)
    recorded = torch.randn(8, requires_grad=True)
    subclass = x.as_subclass(type("Other", (torch.Tensor,), {}))
    for tensor in (x, recorded, torch.nn.Parameter(x), x[::2]):
        assert not dispatched(lambda tensor=tensor: hf.fake_quantize(tensor, 0.1237), monkeypatch)
        with torch.no_grad():
            assert not dispatched(lambda tensor=tensor: hf.fake_quantize(tensor, 0.1237), monkeypatch)
    for tensor in (torch._neg_view(x), x.to("meta"), subclass):
        assert dispatched(lambda tensor=tensor: hf.fake_quantize(tensor, 0.1237), monkeypatch)
    found = list[bool]()

    def row(x: torch.Tensor) -> torch.Tensor:
        found.append(dispatched(lambda: hf.fake_quantize(x, 0.1237), monkeypatch))
        return x

    torch.vmap(row)(x.reshape(2, 4))
    torch.func.grad(lambda x: row(x).sum())(x)
    assert found == [True, True]


def test_reports_lie_in_memory_of_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert Reports(torch.device("cpu")).words.device.type == "cpu"


@pytest.mark.parametrize(
    "plan",
    [
        hf.plans.QuantizePerTensorPlan,
        hf.plans.EmbeddingBagPlan,
        hf.plans.SegmentSumPlan,
        hf.plans.FakeQuantizeLearnedBackwardPlan,
        hf.plans.GridSampleBackwardPlan,
    ],
)
def test_the_default_device_is_not_where_plans_of_the_cpu_work(plan: AnyPlan) -> None:
    """In a new thread, whose scratch memory is not allocated yet."""
    known = [(case, *run_reference(plan, case)) for case in cases_of(plan)[:12]]

    def run() -> list[Difference]:
        with torch.device("meta"):
            return [
                d for case, *args in known for d in check(plan, case, Way("cpu"), *args, select_on("cpu"))
            ]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == []


@pytest.mark.parametrize(("granularity", "shapes"), [
    (hf.PerTensor(), [(), (1, 1, 1), (1,)]),
    (hf.PerChannel(1), [(6,), (1, 6, 1)]),
    (hf.PerToken(), [(4, 6), (4, 6, 1), (24,)]),
    (hf.PerGroup(4), [(4, 6, 2), (48,)]),
])  # fmt: skip
def test_the_error_names_every_shape_of_a_scale(
    granularity: hf.Granularity, shapes: list[tuple[int, ...]]
) -> None:
    for shape in shapes:
        hf.quantize(values(), torch.ones(shape), granularity=granularity)
    with pytest.raises(hf.InvalidArgs, match=re.escape(f" in shape {' or '.join(map(str, shapes))}.")):
        hf.quantize(values(), torch.ones(7, 7), granularity=granularity)

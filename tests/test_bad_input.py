"""Invalid input raises an error that says what was given and what is accepted. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical
from holdfast.core.case import operands_of, poisoned_output
from holdfast.core.declaration import Output, arguments
from holdfast.core.plan import Launch
from holdfast.proof.conformance import gpu_way

GPU = gpu_way()
DEVICES = {"reference": "cpu", "cpu": "cpu", **({GPU.backend: GPU.device} if GPU else {})}


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on a device that no plan of these tests runs on."""
    return tensor.to("meta")


def quantize_args(device: str) -> hf.plans.QuantizePerChannelArgs:
    return hf.plans.QuantizePerChannelArgs(
        x=torch.ones(4, 6, device=device),
        scale=torch.ones(4, device=device),
        zero_point=torch.zeros(4, dtype=torch.int32, device=device),
        q=poisoned_output((4, 6), torch.int8).to(device),
    )


def select(backend: str, **fields: Any) -> hf.plans.QuantizePerChannelPlan:
    desc = hf.plans.QuantizePerChannelDescriptor(**{"shape": (4, 6), "axis": 0, **fields})
    pref = hf.PlanPreference(backend=backend, precompile=False)
    return hf.plans.QuantizePerChannelPlan.select(hf.Stream.current(DEVICES[backend]), desc, pref)


#: The mistake, and parts of the error message: the given and the accepted value.
BAD_ARGS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "x of the wrong dtype": (
        lambda a: replace(a, x=a.x.double()), ("x has dtype torch.float64", "torch.float32")
    ),
    "x of the wrong shape": (lambda a: replace(a, x=a.x[:, :5]), ("x has shape (4, 5)", "(4, 6)")),
    "x of the wrong rank": (lambda a: replace(a, x=a.x.flatten()), ("x has shape (24,)", "(4, 6)")),
    "x on the wrong device": (lambda a: replace(a, x=elsewhere(a.x)), ("x is on meta", "move it")),
    "x that is no tensor": (lambda a: replace(a, x=[[1.0]]), ("x is a list", "torch tensor")),
    "x that is sparse": (lambda a: replace(a, x=a.x.to_sparse()), ("torch.sparse_coo", "to_dense")),
    "q of the wrong dtype": (
        lambda a: replace(a, q=a.q.view(torch.uint8)), ("q has dtype torch.uint8", "torch.int8")
    ),
    "q too small": (lambda a: replace(a, q=a.q[:3]), ("q has shape (3, 6)", "(4, 6)")),
    "q too large": (lambda a: replace(a, q=a.q.new_zeros(5, 6)), ("q has shape (5, 6)", "(4, 6)")),
    "q on the wrong device": (lambda a: replace(a, q=elsewhere(a.q)), ("q is on meta", "move it")),
    "q that overlaps itself": (
        lambda a: replace(a, q=a.q[:1].expand(4, 6)), ("strides (0, 1)", "must not overlap themselves")
    ),
    "x that is a negated view": (
        lambda a: replace(a, x=torch._neg_view(a.x)), ("x is a negated view", "resolve_neg()")
    ),
    "scale that is a negated view": (
        lambda a: replace(a, scale=torch._neg_view(a.scale)), ("scale is a negated view", "resolve_neg()")
    ),
    "scale of the wrong length": (
        lambda a: replace(a, scale=a.scale[:3]), ("scale has shape (3,)", "takes 4 in shape (4,)")
    ),
    "scale of the other axis": (
        lambda a: replace(a, scale=a.x[0].clone()), ("scale has shape (6,)", "PerChannel(axis=0)")
    ),
    "scale of the wrong dtype": (
        lambda a: replace(a, scale=a.scale.half()), ("scale has dtype torch.float16", "torch.float32")
    ),
    "scale on the wrong device": (
        lambda a: replace(a, scale=elsewhere(a.scale)), ("scale is on meta", "move it")
    ),
    "scale that is no number": (lambda a: replace(a, scale="1"), ("scale is a str", "Python float")),
    "scale that is a truth": (lambda a: replace(a, scale=True), ("scale is a bool", "Python float")),
    "zero_point of the wrong length": (
        lambda a: replace(a, zero_point=a.zero_point[:2]), ("zero_point has shape (2,)", "4 in shape (4,)")
    ),
    "zero_point of the wrong dtype": (
        lambda a: replace(a, zero_point=a.zero_point.long()), ("has dtype torch.int64", "torch.int32")
    ),
    "zero_point that is a fraction": (
        lambda a: replace(a, zero_point=0.5), ("zero_point is a float", "int32 tensor")
    ),
    "zero_point on the wrong device": (
        lambda a: replace(a, zero_point=elsewhere(a.zero_point)), ("zero_point is on meta", "move it")
    ),
    "host scale of zero": (lambda a: replace(a, scale=0.0), ("scale is 0.0", "positive")),
    "host scale below zero": (lambda a: replace(a, scale=-0.5), ("scale is -0.5", "positive")),
    "host scale of infinity": (lambda a: replace(a, scale=float("inf")), ("scale is inf", "can hold")),
    "host scale of NaN": (lambda a: replace(a, scale=float("nan")), ("scale is nan", "positive")),
    "host scale too small to hold": (lambda a: replace(a, scale=1e-60), ("scale is 1e-60", "torch.float32")),
    "host scale too large to hold": (lambda a: replace(a, scale=1e39), ("scale is 1e+39", "torch.float32")),
    "args of another plan": (
        lambda a: hf.plans.DequantizePerChannelArgs(q=a.q, scale=a.scale, y=a.x),
        ("given DequantizeArgs", "takes QuantizeArgs"),
    ),
    "no args": (lambda a: None, ("given NoneType", "takes QuantizeArgs")),
}  # fmt: skip


def assert_refused(plan: Any, args: Any, said: tuple[str, ...], *outputs: torch.Tensor) -> None:
    """``can_implement`` and ``run`` give the same message, and the outputs are unchanged."""
    before = [canonical(output) for output in outputs]
    verdict = plan.can_implement(args)
    assert not verdict
    with pytest.raises(hf.InvalidArgs) as refusal:
        plan.run(hf.Stream.current(plan.device), None, args)
    assert str(refusal.value) == verdict.reason
    assert verdict.reason.endswith(".")
    for words in said:
        assert words in verdict.reason
    assert isinstance(refusal.value, (ValueError, TypeError))
    assert all(torch.equal(was, canonical(output)) for was, output in zip(before, outputs, strict=True))


@pytest.mark.parametrize("what", BAD_ARGS)
@pytest.mark.parametrize("backend", DEVICES)
def test_bad_args(backend: str, what: str) -> None:
    spoil, said = BAD_ARGS[what]
    args = quantize_args(DEVICES[backend])
    assert_refused(select(backend), spoil(args), said, args.q)


@pytest.mark.parametrize("what", BAD_ARGS)
def test_bad_args_after_good_ones(what: str) -> None:
    """The cache of a plan for valid args does not accept invalid args."""
    plan = select("cpu")
    good = quantize_args("cpu")
    plan.run(hf.Stream.current(), None, good)
    plan.run(hf.Stream.current(), None, replace(good, scale=0.5))
    args = quantize_args("cpu")
    spoil, said = BAD_ARGS[what]
    assert_refused(plan, spoil(args), said, args.q)


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("after_good_ones", [False, True])
def test_overlapping_input_and_output(backend: str, after_good_ones: bool) -> None:
    plan = select(backend)
    args = quantize_args(DEVICES[backend])
    if after_good_ones:
        plan.run(hf.Stream.current(plan.device), None, replace(args, q=torch.empty_like(args.q)))
    for start in (0, 72):
        bytes_of_x = args.x.view(torch.int8).flatten()
        shared = replace(args, q=bytes_of_x[start : start + 24].view(4, 6))
        assert_refused(plan, shared, ("q shares memory", "torch.empty_like"), args.x)


@pytest.mark.parametrize("backend", DEVICES)
def test_backward_in_place(backend: str) -> None:
    device = DEVICES[backend]
    desc = hf.plans.QuantizePerTensorBackwardDescriptor(shape=(8,))
    pref = hf.PlanPreference(backend=backend, precompile=False)
    plan = hf.plans.QuantizePerTensorBackwardPlan.select(hf.Stream.current(device), desc, pref)
    x, dy = torch.ones(8, device=device), torch.ones(8, device=device)
    for name, shared in (("dy", dy), ("x", x)):
        args = hf.plans.QuantizePerTensorBackwardArgs(dy=dy, x=x, scale=1.0, dx=shared)
        assert_refused(plan, args, ("dx shares memory", "torch.empty_like"), operands_of(args)[name])


def test_packed_codes_with_strides() -> None:
    desc = hf.plans.QuantizePerTensorDescriptor(shape=(4, 8), output_dtype=torch.int4, packed=True)
    plan = hf.plans.QuantizePerTensorPlan.select(hf.Stream.current(), desc)
    q = poisoned_output((4, 4), torch.uint8, "transposed")
    args = hf.plans.QuantizePerTensorArgs(x=torch.ones(4, 8), scale=1.0, q=q)
    assert_refused(plan, args, ("strides (1, 4)", "side by side"), q)


BAD_DESCRIPTORS: dict[str, tuple[dict[str, Any], str]] = {
    "axis out of range": ({"axis": 2}, "axis 2 is out of range for shape (4, 6); accepted: from -2 to 1."),
    "negative axis out of range": ({"axis": -3}, "axis -3 is out of range"),
    "axis of a tensor of rank 0": ({"shape": ()}, "none (it has rank 0)"),
    "axis that is no number": ({"axis": None}, "axis is None"),
    "q_min above q_max": ({"q_min": 3, "q_max": 2}, "q_min 3 is greater than q_max 2"),
    "a range wider than the dtype": ({"q_max": 128}, "wider than torch.int8 holds, -128 to 127"),
    "a range below the dtype": ({"output_dtype": torch.uint8, "q_min": -1}, "torch.uint8 holds, 0 to 255"),
    "a range wider than a float holds": (
        {"output_dtype": torch.bfloat16, "q_min": 0, "q_max": 257}, "torch.bfloat16 holds, -256 to 256"
    ),
    "a range of fractions": ({"q_min": 0.5}, "q_min is 0.5; it must be a whole number"),
    "codes in floats without a range": ({"output_dtype": torch.float32}, "give q_min and q_max"),
    "an input that is no float": ({"input_dtype": torch.int32}, "input_dtype is torch.int32; accepted are"),
    "codes that are too wide": ({"output_dtype": torch.int32}, "output_dtype is torch.int32; accepted are"),
    "codes that would round twice": (
        {"input_dtype": torch.float64, "output_dtype": torch.float16, "q_min": 0, "q_max": 9}, "round twice"
    ),
    "packed codes of a byte": ({"packed": True}, "only 2-bit and 4-bit codes share a byte"),
    "rank 9": ({"shape": (1,) * 9}, "rank 9; accepted are ranks 0 to 8"),
    "a negative size": ({"shape": (4, -1)}, "negative size"),
    "a shape that is no shape": ({"shape": "ab"}, "whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_DESCRIPTORS)
def test_bad_descriptors(what: str) -> None:
    fields, said = BAD_DESCRIPTORS[what]
    with pytest.raises(hf.InvalidDescriptor) as refusal:
        select("reference", **fields)
    assert said in str(refusal.value)
    assert str(refusal.value).endswith(".")


def test_group_that_does_not_divide() -> None:
    desc = hf.plans.QuantizePerGroupDescriptor(shape=(4, 10), group_size=4)
    with pytest.raises(hf.InvalidDescriptor, match=r"group_size 4 does not divide axis 1 .* has 10 elements"):
        hf.plans.QuantizePerGroupPlan.select(hf.Stream.current(), desc)


def test_descriptor_of_another_plan() -> None:
    desc: Any = hf.plans.QuantizePerTokenDescriptor(shape=(4, 10))
    with pytest.raises(hf.InvalidDescriptor, match="given a QuantizePerTokenDescriptor; it takes a Quan"):
        hf.plans.QuantizePerTensorPlan.select(hf.Stream.current(), desc)


def test_no_backend_serves() -> None:
    desc = hf.plans.QuantizePerTensorDescriptor(shape=(4, 10))
    with pytest.raises(hf.Unsupported) as refusal:
        hf.plans.QuantizePerTensorPlan.select(hf.Stream.current(), desc, hf.PlanPreference(backend="tpu"))
    for backend in ("cpu", "gpu", "reference", "tpu: no such backend"):
        assert backend in str(refusal.value)
    assert isinstance(refusal.value, NotImplementedError)


def test_stream_of_another_device() -> None:
    args = quantize_args("cpu")
    with pytest.raises(hf.InvalidArgs, match="the stream is on cuda:0 and the plan was selected for cpu"):
        select("cpu").run(hf.Stream(torch.device("cuda:0")), None, args)
    assert (args.q.view(torch.uint8) == 0xA5).all()


# Quantization plans need no workspace. The check is in core, and is tested with a plan that needs one.


@arguments
class CopyArgs(hf.plans.Args):
    x: torch.Tensor
    y: Output

    def signature(self) -> Any:
        return (self.x.shape,), (self.y.data_ptr(), self.x.data_ptr())


class CopyKernel:
    workspace_size = 16

    def __init__(self, desc: Any, device: torch.device) -> None:
        """Copies have the same kernel for every shape."""

    def compile(self) -> None:
        """Nothing to do."""

    def prepare(self, args: CopyArgs) -> Launch[CopyArgs]:
        return lambda stream, workspace, args, addresses: args.y.copy_(args.x)


class CopyPlan(hf.plans.Plan[hf.plans.QuantizePerTensorDescriptor, CopyArgs], abstract=True):
    def _refused_layout(self, args: CopyArgs) -> str:
        return ""


@pytest.mark.parametrize(
    ("workspace", "error", "said"),
    [
        (None, hf.WorkspaceTooSmall, "has 0 bytes and the plan needs 16"),
        (torch.empty(15, dtype=torch.uint8), hf.WorkspaceTooSmall, "has 15 bytes and the plan needs 16"),
        (hf.Workspace.allocate(8, "cpu"), hf.WorkspaceTooSmall, "has 8 bytes and the plan needs 16"),
        (torch.empty(32, dtype=torch.uint8)[::2], hf.InvalidArgs, "non-contiguous"),
        (torch.empty(16, dtype=torch.uint8, device="meta"), hf.InvalidArgs, "on meta"),
    ],
)
def test_workspace_too_small(workspace: Any, error: type[Exception], said: str) -> None:
    desc = hf.plans.QuantizePerTensorDescriptor(shape=(3,))
    device = torch.device("cpu")
    plan = CopyPlan(desc, device, "cpu", CopyKernel(desc, device))
    args = CopyArgs(x=torch.zeros(3), y=poisoned_output((3,), torch.float32))
    with pytest.raises(error) as refusal:
        plan.run(hf.Stream.current(), workspace, args)
    assert said in str(refusal.value)
    assert isinstance(refusal.value, ValueError)
    assert args.y.isnan().all()
    plan.run(hf.Stream.current(), hf.Workspace.allocate(plan.workspace_size(), "cpu"), args)
    assert (args.y == 0).all()


X = torch.ones(4, 6)
IMAGE, GRID = torch.zeros(1, 1, 2, 2), torch.zeros(1, 2, 2, 2)
THETA = torch.zeros(1, 2, 3)
TABLE, INDICES = torch.zeros(7, 3), torch.tensor([[1, 2]])
SCALED: dict[str, Callable[..., Any]] = {
    "quantize": lambda scale=0.5, zero_point=None, **given: hf.quantize(X, scale, zero_point, **given),
    "dequantize": lambda scale=0.5, zero_point=None, **given: hf.dequantize(
        X.to(torch.int8), scale, zero_point, **given
    ),
    "fake_quantize": lambda scale=0.5, zero_point=None, dtype=torch.int8, **given: hf.fake_quantize(
        X, scale, zero_point, dtype=dtype, **given
    ),
}


@pytest.mark.parametrize("function", SCALED)
def test_functions_over_scales_take_the_numbers_of_numpy(function: str) -> None:
    wanted = SCALED[function](0.5, 3)
    found = SCALED[function](np.float32(0.5), np.int64(3))
    assert torch.equal(found, wanted)
    assert torch.equal(SCALED[function](np.int16(1), None), SCALED[function](1, None))
    with pytest.raises(hf.HoldfastError, match="scale is"):
        SCALED[function](np.float32("nan"))


@pytest.mark.parametrize("function", SCALED)
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"granularity": "per_tensor"}, "granularity is 'per_tensor'; accepted are PerTensor"),
        ({"granularity": None}, "granularity is None; accepted are PerTensor"),
        ({"granularity": hf.PerTensor}, "granularity is <class .*>; accepted are PerTensor"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be a dtype of torch"),
        ({"dtype": float}, "dtype is <class 'float'>; it must be a dtype of torch"),
        ({"scale": True}, "scale is a bool; it must be a tensor or a Python float"),
        ({"zero_point": True}, "zero_point is a bool; it must be an int32 tensor"),
        ({"zero_point": OSError()}, "zero_point is an OSError; it must be an int32 tensor"),
        ({"scale": torch.ones((), device="meta")}, "there are tensors on cpu and on meta"),
    ],
)
def test_functions_over_scales_tell_what_they_take(
    function: str, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        SCALED[function](**given)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: hf.dequantize(X.char(), 0.5, dtype=torch.qint8),
            "dtype is torch.qint8; accepted are",
        ),
        (lambda: hf.dequantize(X.char(), 0.5, code_dtype="int4"), "code_dtype is 'int4'; it must be a dtype"),
        (
            lambda: hf.dequantize(X.byte(), 0.5, packed=True, code_dtype=torch.int4, length="a"),
            "length is 'a'; it must be a whole number",
        ),
        (
            lambda: hf.dequantize(X.byte(), 0.5, packed=True, code_dtype=torch.int4, length=-1),
            "length is -1; 6 bytes of torch.int4 hold 12 codes",
        ),
        (
            lambda: hf.quantize(X, 0.5, dtype=torch.float32, q_min=0, q_max=3, packed=True),
            "codes carried as floats share no byte",
        ),
        *[
            (
                lambda factor=factor: hf.fake_quantize(X, 0.5, dtype=torch.int8, grad_factor=factor),
                "grad_factor is .*; it must be a finite number, or 'lsq'",
            )
            for factor in (None, "LSQ", float("nan"), float("inf"), True, [1.0], torch.tensor(1.0))
        ],
        *[
            (
                lambda row=row: hf.embedding(INDICES, TABLE, padding_idx=row),
                "padding_idx is .*; it must be the number of a row, or None",
            )
            for row in ("a", 1.0, True)
        ],
        (lambda: hf.embedding(INDICES, TABLE, sparse="no"), "sparse is 'no'; it must be True or False"),
        (
            lambda: hf.embedding(INDICES, TABLE, scale_grad_by_freq=1),
            "scale_grad_by_freq is 1; it must be True or False",
        ),
        (
            lambda: hf.embedding_bag(INDICES, TABLE, include_last_offset="no"),
            "include_last_offset is 'no'; it must be True or False",
        ),
        (lambda: hf.embedding(INDICES.to("meta"), TABLE), "there are tensors on meta and on cpu"),
        (
            lambda: hf.grid_sample(IMAGE, GRID, align_corners="no"),
            "align_corners is 'no'; it must be True or False",
        ),
        (
            lambda: hf.affine_grid(THETA, (1, 1, 2, 2), align_corners="no"),
            "align_corners is 'no'; it must be True or False",
        ),
        *[
            (lambda size=size: hf.affine_grid(THETA, size), "size is .*; it must be whole numbers")
            for size in (None, 5, (1, 1, 2.0, 2))
        ],
    ],
)
def test_functions_tell_what_they_take(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        call()


def test_numbers_that_are_not_whole_are_not_cut_off() -> None:
    with pytest.raises(hf.InvalidDescriptor, match=r"shape is \(4.7,\); it must be a sequence of whole"):
        hf.plans.QuantizePerTensorDescriptor(shape=(4.7,))  # type: ignore[arg-type]
    with pytest.raises(hf.InvalidDescriptor, match=r"output_size is \(2.5, 2\); it must be a sequence"):
        hf.plans.GridSampleDescriptor(shape=(1, 1, 2, 2), output_size=(2.5, 2))  # type: ignore[arg-type]
    with pytest.raises(hf.InvalidDescriptor, match="output_size is 3; it must be a sequence of whole"):
        hf.plans.AffineGridDescriptor(shape=(1, 2, 3), output_size=3)  # type: ignore[arg-type]


def test_json_that_never_ends_is_refused() -> None:
    with pytest.raises(hf.InvalidDescriptor, match="the descriptor is not JSON"):
        hf.plans.Descriptor.from_json("[" * 100_000)


def test_what_is_no_stream_preference_or_workspace() -> None:
    given: Any = hf.plans.QuantizePerTensorPlan
    desc, stream = hf.plans.QuantizePerTensorDescriptor(shape=(4,)), hf.Stream.current()
    with pytest.raises(hf.InvalidArgs, match="select was given a str and a PlanPreference"):
        given.select("cpu", desc)
    with pytest.raises(hf.InvalidArgs, match="select was given a Stream and a str"):
        given.select(stream, desc, "cpu")
    args = hf.plans.QuantizePerTensorArgs(x=torch.ones(4), scale=0.5, q=torch.zeros(4, dtype=torch.int8))
    plan = given.select(stream, desc)
    with pytest.raises(hf.InvalidArgs, match="the stream is a NoneType; it must be a Stream"):
        plan.run(None, None, args)
    with pytest.raises(hf.InvalidArgs, match="the workspace is an int; it must be a Workspace"):
        plan.run(stream, 3, args)
    assert not args.q.any()
    for device in (None, "nowhere"):
        with pytest.raises(hf.InvalidArgs, match=r"a stream on .* was asked for"):
            hf.Stream.current(device)  # type: ignore[arg-type]

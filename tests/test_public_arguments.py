"""Tests of the arguments of public functions: wrong values, and tensors without memory."""

from __future__ import annotations

import typing
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core.checks import shown
from holdfast.core.descriptor import field_types
from holdfast.core.dtypes import ZERO_POINT_LIMIT
from holdfast.proof.conformance import cases_of
from public_calls import CALLS, TENSORS, Call, flat

every_tensor = pytest.mark.parametrize(("name", "argument"), TENSORS)


def test_every_public_function_is_tried() -> None:
    found = [getattr(hf, name) for name in hf.__all__ if name[0].islower()]
    functions = {function.__name__ for function in found if callable(function)}
    tried = {call.function.__name__ for call in CALLS.values()}
    # These take no tensor; test_install tries theirs.
    assert functions - tried == {"check_errors", "install", "installed", "status", "uninstall"}
    for name in tried:
        arguments = {
            argument
            for call in CALLS.values()
            if call.function.__name__ == name
            for argument in call.arguments
        }
        missing = set(CALLS[name].parameters) - arguments
        assert not missing, f"{name} is never called with {missing}"


def same(found: Any, expected: Any) -> bool:
    return all(
        mine.dtype == other.dtype and torch.equal(mine, other)
        for mine, other in zip(flat(found), flat(expected), strict=True)
    )


# Wrong values.

#: A value, and its equivalent if an argument accepts it.
VALUES: dict[str, tuple[Any, Any]] = {
    **{
        repr(value): (value, value)
        for value in ("a", "", b"a", None, True, 1, 0, -1, 1.5, -8.0, 1.0, [], (1,), {}, object, 1j)
    },
    "nan": (float("nan"), float("nan")),
    "inf": (float("inf"), float("inf")),
    "2**63": (2**63, 2**63),
    "-2**63 - 1": (-(2**63) - 1, -(2**63) - 1),
    "10**400": (10**400, 10**400),
    "10**5000": (10**5000, 10**5000),
    "np.int64(1)": (np.int64(1), 1),
    "np.int64(-8)": (np.int64(-8), -8),
    "np.float32(0.7)": (np.float32(0.7), float(np.float32(0.7))),
    "np.float64(0.5)": (np.float64(0.5), 0.5),
    "np.bool_(True)": (np.bool_(True), True),
    "Fraction(10**400)": (Fraction(10**400), 10**400),
    "Fraction(1, 2)": (Fraction(1, 2), 0.5),
    "np.ones(2)": (np.ones(2), None),
    "torch.int32": (torch.int32, torch.int32),
    "torch.complex64": (torch.complex64, torch.complex64),
    "torch.qint8": (torch.qint8, torch.qint8),
    "PerChannel(True)": (hf.PerChannel(True), hf.PerChannel(True)),
    "PerChannel(1.0)": (hf.PerChannel(1.0), hf.PerChannel(1.0)),  # type: ignore[arg-type]
    "PerGroup(0)": (hf.PerGroup(0), hf.PerGroup(0)),
    "PerChannel": (hf.PerChannel, hf.PerChannel),
    "a tensor": (torch.tensor(1.0), torch.tensor(1.0)),
}
#: Accepted types by annotation. An int may stand for a float.
TAKEN = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,), "dtype": (torch.dtype,)}


def may_take(call: Call, argument: str, value: Any) -> bool:
    """Whether the annotation of the argument accepts values of this type."""
    hint = str(call.parameters[argument].annotation)
    if isinstance(value, torch.Tensor):
        return "Tensor" in hint
    if value is None:
        return "None" in hint
    words = hint.replace("torch.", "").replace(" ", "").split("|")
    return (
        any(type(value) in TAKEN.get(word, ()) for word in words)
        or ("Literal" in hint and isinstance(value, str))
        or ("SteKind" in hint and isinstance(value, str))
    )


ARGUMENTS = [(name, argument) for name, call in CALLS.items() for argument in call.arguments]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_wrong_values(name: str, argument: str, gradients: bool) -> None:
    """Each raises a HoldfastError, or is equivalent to a documented value."""
    call = CALLS[name]
    leaves = {
        by: call.arguments[by].clone().requires_grad_(gradients) for by in call.by if by in call.tensors
    }
    before = {key: tensor.clone() for key, tensor in call.tensors.items()}
    call(**leaves)  # the cache for valid values must not accept wrong values
    good = call.arguments[argument]
    twins = [bool(good), float(good)] if type(good) is int else [int(good)] if type(good) is bool else []
    for value, meant in [*VALUES.values(), *((twin, twin) for twin in twins)]:
        given = {**leaves, argument: value}
        try:
            found = call(**given)
        except hf.HoldfastError as error:
            assert str(error).endswith("."), (argument, error)
            continue
        where = f"{argument}={shown(value)}"
        assert may_take(call, argument, meant), f"{where} was taken"
        if argument == "zero_point" and isinstance(meant, int):
            meant = min(max(meant, -ZERO_POINT_LIMIT), ZERO_POINT_LIMIT)
        with torch.no_grad():
            assert same(found, call(**{argument: meant})), where
    assert all(torch.equal(tensor, before[key]) for key, tensor in call.tensors.items())


@pytest.mark.parametrize("gradients", [False, True])
@every_tensor
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_of_other_kinds(name: str, argument: str, gradients: bool) -> None:
    call = CALLS[name]
    tensor = call.tensors[argument]
    kinds: dict[str, Any] = {
        "coo": tensor.to_sparse(),
        "nested": torch.nested.as_nested_tensor([tensor]),
        "jagged": torch.nested.as_nested_tensor([tensor.reshape(-1)], layout=torch.jagged),
    }
    if tensor.dim() > 1:
        kinds["csr"] = tensor.reshape(tensor.shape[0], -1).to_sparse_csr()
    if tensor.dtype == torch.float32:
        kinds["mkldnn"] = tensor.to_mkldnn()
        kinds["quantized"] = torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
    with torch.set_grad_enabled(gradients):
        for other in kinds.values():
            if gradients and other.dtype.is_floating_point and argument in call.by:
                other = other.detach().requires_grad_()
            with pytest.raises(
                hf.HoldfastError, match=f"{argument} .*dense|{argument} is a quantized"
            ) as error:
                call(**{argument: other})
            assert str(error.value).endswith(".")


@every_tensor
def test_tensors_on_meta(name: str, argument: str) -> None:
    """With all tensors on meta, the result has a shape only. A mix of meta and other tensors raises."""
    call = CALLS[name]
    whole = call(**{key: tensor.to("meta") for key, tensor in call.tensors.items()})
    for shape, right in zip(flat(whole), flat(call()), strict=True):
        assert shape.is_meta and shape.shape == right.shape and shape.dtype == right.dtype
    if len(call.tensors) > 1:
        with pytest.raises(hf.HoldfastError, match=r"there are tensors on .*; move them to one device"):
            call(**{argument: call.tensors[argument].to("meta")})


# Tensors without memory.


@every_tensor
def test_a_zero_tensor_is_zeros(name: str, argument: str) -> None:
    """torch's autograd creates such tensors, and its operators accept them."""
    call = CALLS[name]
    tensor = call.tensors[argument]
    zero = torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)
    expected = call(**{argument: torch.zeros_like(tensor)})
    assert same(call(**{argument: zero}), expected)
    leaves = {by: call.arguments[by].clone().requires_grad_() for by in call.by if by != argument}
    if leaves:
        assert same(call(**leaves, **{argument: zero}), expected)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.by])
def test_a_gradient_that_is_a_zero_tensor(name: str) -> None:
    call = CALLS[name]
    leaves = {by: call.arguments[by].clone().requires_grad_() for by in call.by}

    def gradients(dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(call(**leaves), list(leaves.values()), dout)

    out = call(**leaves)
    zero = torch._efficientzerotensor(out.shape, dtype=out.dtype)
    assert same(gradients(zero), gradients(torch.zeros_like(out)))


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("gradients", [False, True])
@every_tensor
def test_a_storage_that_was_freed(name: str, argument: str, left: int, gradients: bool) -> None:
    call = CALLS[name]
    call()
    tensor = call.tensors[argument].clone()
    tensor.untyped_storage().resize_(left)
    if gradients and argument in call.by:
        tensor.requires_grad_()
    with pytest.raises(hf.InvalidArgs) as refusal:
        call(**{argument: tensor})
    assert "the storage was freed or shrunk" in str(refusal.value)
    if argument == "packed" or argument == "length":
        return
    samples = torch.stack([call.tensors[argument]] * 2)
    samples.untyped_storage().resize_(left)
    with pytest.raises(hf.InvalidArgs, match="the storage was freed or shrunk"):
        torch.vmap(lambda sample: call(**{argument: sample}))(samples)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.by])
def test_a_storage_that_was_freed_before_backward(name: str) -> None:
    """The storage of saved tensors, and of the gradient itself."""
    call = CALLS[name]
    for sparse in {False, "embedding" in name}:
        changed = {"sparse": True} if sparse else {}
        for argument in [*call.tensors, None]:
            copies = {key: tensor.clone() for key, tensor in call.tensors.items()}
            leaves = [copies[by].requires_grad_() for by in call.by if by in copies]
            out = call(**copies, **changed)
            dout = torch.ones_like(out)
            freed = dout if argument is None else copies[argument]
            freed.untyped_storage().resize_(0)
            try:
                torch.autograd.grad(out, leaves, dout)
            except hf.InvalidArgs as error:
                assert "the storage was freed or shrunk" in str(error)
            else:
                assert argument is not None  # it is not read again


# Plans.


def test_descriptors_check_the_type_of_every_field() -> None:
    wrong = ["no", 1.5, None, 10**400, [1], float("nan"), np.float32(1), object()]
    for plan in hf.plans.all().values():
        descriptor = cases_of(plan)[0].descriptor
        good = {key: getattr(descriptor, key) for key in field_types(type(descriptor))}
        for key, hint in field_types(type(descriptor)).items():
            options = typing.get_args(hint) or (hint,)
            for value in [*wrong, True, 1, 0, 1.0]:
                if (
                    type(value) in options
                    or (key in ("shape", "table") and value == [1])
                    or (float in options and type(value) is int and abs(value) < 9)
                ):
                    continue
                with pytest.raises(hf.InvalidDescriptor) as refusal:
                    type(descriptor)(**{**good, key: value}).validate()
                assert str(refusal.value).endswith("."), (plan.__name__, key, value)


def test_numbers_in_json_that_no_float_holds() -> None:
    descriptor = hf.plans.FakeQuantizeLearnedBackwardDescriptor(shape=(4,), dtype=torch.int8)
    text = descriptor.to_json().replace('"grad_factor": 1.0', f'"grad_factor": {10**400}')
    with pytest.raises(hf.InvalidDescriptor, match=r"grad_factor is 1000.*; it must be a number"):
        hf.plans.Descriptor.from_json(text)
    with pytest.raises(hf.InvalidDescriptor, match="has more elements than any tensor"):
        hf.plans.Descriptor.from_json(descriptor.to_json().replace("[4]", f"[{10**400}]"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_that_no_float_holds(dtype: torch.dtype) -> None:
    desc = hf.plans.QuantizePerTensorDescriptor(shape=(4,), input_dtype=dtype)
    plan = hf.plans.QuantizePerTensorPlan.select(hf.Stream.current(), desc)
    q = torch.zeros(4, dtype=torch.int8)
    for scale in (10**400, 10**5000, -(10**400)):
        args = hf.plans.QuantizePerTensorArgs(x=torch.ones(4, dtype=dtype), scale=scale, q=q)
        with pytest.raises(hf.InvalidArgs, match=r"scale is .*; it must be a positive number"):
            plan.run(hf.Stream.current(), None, args)


def test_accumulate_is_true_or_false() -> None:
    desc = hf.plans.QuantizePerTensorBackwardDescriptor(shape=(4,))
    plan = hf.plans.QuantizePerTensorBackwardPlan.select(hf.Stream.current(), desc)
    ones = torch.ones(4)
    dx = torch.ones(4)
    for known in (True, False, True):
        args = hf.plans.QuantizePerTensorBackwardArgs(dy=ones, x=ones, scale=0.5, dx=dx, accumulate=known)
        plan.run(hf.Stream.current(), None, args)
        args.dx = torch.ones(4)
        for wrong in (1, 0, "no", None, np.True_, 1.0):
            args.accumulate = wrong  # type: ignore[assignment]
            with pytest.raises(hf.InvalidArgs, match=r"accumulate is .*; it must be True or False"):
                plan.run(hf.Stream.current(), None, args)
            assert not plan.can_implement(args)
        assert torch.equal(args.dx, torch.ones(4))


def test_a_zero_point_that_equals_a_known_one() -> None:
    plan = hf.plans.QuantizePerTensorPlan.select(
        hf.Stream.current(), hf.plans.QuantizePerTensorDescriptor(shape=(4,))
    )
    args = hf.plans.QuantizePerTensorArgs(
        x=torch.ones(4), scale=1, zero_point=1, q=torch.zeros(4, dtype=torch.int8)
    )
    for _ in range(3):
        plan.run(hf.Stream.current(), None, args)
    for field, wrong in (("zero_point", True), ("zero_point", 1.0), ("scale", True)):
        other = hf.plans.QuantizePerTensorArgs(x=args.x, scale=1, zero_point=1, q=args.q)
        setattr(other, field, wrong)
        with pytest.raises(hf.InvalidArgs, match=f"{field} is a"):
            plan.run(hf.Stream.current(), None, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hf.Workspace("x"),
        lambda: hf.Workspace.of(3),
        lambda: hf.Workspace.allocate("x", "cpu"),
        lambda: hf.Workspace.allocate(-1, "cpu"),
        lambda: hf.Workspace.allocate(True, "cpu"),
        lambda: hf.Workspace.allocate(4, 1.5),
        lambda: hf.Stream("cpu"),
        lambda: hf.Stream.wrap("cpu"),
        lambda: hf.PlanPreference(backend=3),
        lambda: hf.PlanPreference(max_workspace_bytes="many"),
        lambda: hf.PlanPreference(precompile="no"),
        lambda: hf.PerChannel(True).view((4, 4)),
        lambda: hf.PerChannel(1.0).view((4, 4)),
        lambda: hf.PerGroup(True).view((4, 4)),
    ],
)
def test_the_words_of_the_protocol_are_checked(make: Any) -> None:
    hf.PerChannel(1).view((4, 4))
    hf.PerGroup(1).view((4, 4))
    with pytest.raises(hf.HoldfastError) as refusal:
        make()
    assert str(refusal.value).endswith(".")

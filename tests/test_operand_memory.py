"""Every plan refuses operands without enough memory of their own, and writes nothing.

Kernels take addresses. Without the check, a kernel would read and write the memory of other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import holdfast as hf
from holdfast.core.bits import canonical
from holdfast.core.case import Case, operands_of
from holdfast.proof.conformance import cases_of, copy_args

PLANS = hf.plans.all()


@cache
def smallest_case(plan: str) -> Case:
    """The case with the most tensors, none of them empty, and among those the case with the fewest bytes."""
    found: list[tuple[int, int, Case]] = []
    for case in [case for case in cases_of(PLANS[plan]) if not case.descriptor.empty][:60]:
        tensors = [value for value in operands_of(case.make()).values() if isinstance(value, torch.Tensor)]
        if all(tensor.numel() for tensor in tensors):
            size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            found.append((-len(tensors), size, case))
    return min(found, key=lambda one: one[:2])[2]


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and values in its own storage."""
    copy = torch.empty_like(tensor)
    return copy.copy_(tensor) if tensor.stride() == copy.stride() else tensor.clone()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = own_memory(tensor)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    tensor = own_memory(tensor)
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)
    return tensor


def shrunk_before_a_view(tensor: torch.Tensor) -> torch.Tensor:
    """The storage keeps as many bytes as the tensor needs, but the tensor starts at an offset."""
    tensor = own_memory(tensor)
    size = tensor.untyped_storage().nbytes()
    longer = torch.zeros(2 * size, dtype=torch.uint8)
    late = longer[size:].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    longer.untyped_storage().resize_(size)
    return late


def zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)


def fake(tensor: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(tensor)


SPOILED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "freed": (freed, "the storage was freed or shrunk"),
    "shrunk": (shrunk, "the storage was freed or shrunk"),
    "shrunk before a view": (shrunk_before_a_view, "the storage was freed or shrunk"),
    "zero": (zero, "is a zero tensor of torch, which has no memory"),
    "meta": (lambda tensor: tensor.to("meta"), "is on meta and the plan runs on cpu"),
    "fake": (fake, "is a FakeTensor, which has no memory of its own"),
    "sparse": (lambda tensor: tensor.to_sparse(), "to_dense"),
    "nested": (lambda tensor: torch.nested.as_nested_tensor([tensor]), "is a nested tensor"),
    "jagged": (
        lambda tensor: torch.nested.as_nested_tensor([tensor.reshape(-1)], layout=torch.jagged),
        "is a nested tensor",
    ),
}


def spoiled(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """With a shrunk storage, torch must not access any element."""
    return SPOILED[how][0](tensor)


class Idle:
    """A kernel that does nothing. The tested checks run before the kernel."""

    workspace_size = 0

    def compile(self) -> None:
        """Nothing to compile."""

    def prepare(self, args: Any) -> Any:
        return lambda stream, workspace, args, addresses: None


def idle(plan: str) -> Any:
    return PLANS[plan](smallest_case(plan).descriptor, torch.device("cpu"), "reference", Idle())


def settled(plan: str) -> tuple[Any, Any, Any]:
    """A plan that has run three times and so uses its cached launch; the stream, and the args."""
    made, stream, args = idle(plan), hf.Stream.current(), smallest_case(plan).make()
    for _ in range(3):
        made.run(stream, None, args)
    return made, stream, args


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("plan", PLANS)
def test_an_operand_without_memory(plan: str, how: str) -> None:
    made, stream, args = settled(plan)
    new = idle(plan)
    for name, tensor in operands_of(args).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        outputs = {output: canonical(getattr(args, output)) for output in made.outputs if output != name}
        wrong = replace(args, **{name: spoiled(tensor, how)})
        for each in (made, new):
            with pytest.raises(hf.InvalidArgs) as refusal:
                each.run(stream, None, wrong)
            sentence = str(refusal.value)
            assert sentence.startswith(name) and SPOILED[how][1] in sentence and sentence.endswith(".")
            assert each.can_implement(wrong).reason == sentence
        for output, before in outputs.items():
            assert torch.equal(before, canonical(getattr(args, output)))
        made.run(stream, None, args)  # valid args still work


@pytest.mark.parametrize("plan", PLANS)
def test_the_storage_of_a_known_operand_is_freed(plan: str) -> None:
    """The tensors are the same objects as in the last run. Only their storages have changed."""
    for name, operand in operands_of(smallest_case(plan).make()).items():
        for left in (0, 1):
            if not isinstance(operand, torch.Tensor):
                continue
            made, stream, args = settled(plan)
            getattr(args, name).untyped_storage().resize_(left)
            with pytest.raises(hf.InvalidArgs, match=rf"{name} needs .* the storage was freed or shrunk"):
                made.run(stream, None, args)


def on_cpu(plan: str) -> Any:
    """The plan of the smallest case on the CPU."""
    preference = hf.PlanPreference(backend="cpu", precompile=False)
    return PLANS[plan].select(hf.Stream.current(), smallest_case(plan).descriptor, preference)


def test_some_plans_need_a_workspace() -> None:
    needed = {plan for plan in PLANS if on_cpu(plan).workspace_size()}
    assert needed >= {"EmbeddingBackwardPlan", "GridSampleBackwardPlan", "SegmentSumPlan"}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("after_good_ones", [False, True])
def test_a_workspace_that_shares_memory(plan: str, after_good_ones: bool) -> None:
    made, stream = on_cpu(plan), hf.Stream.current()
    size = made.workspace_size()
    if not size:
        return  # it takes no workspace
    args: Any = smallest_case(plan).make()
    if after_good_ones:
        for _ in range(3):
            made.run(stream, hf.Workspace.allocate(size, "cpu"), args)
    for name, tensor in operands_of(args).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        inside = torch.zeros(2 * size + tensor.untyped_storage().nbytes(), dtype=torch.uint8)
        start = -(-size // 64) * 64 - 64  # it starts in the last bytes of the workspace
        bytes_of = inside[start:]
        at = bytes_of[: bytes_of.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        shared = replace(args, **{name: at.as_strided(tensor.shape, tensor.stride())})
        with pytest.raises(hf.InvalidArgs, match="the workspace shares memory with an argument"):
            made.run(stream, inside[:size], shared)
        with pytest.raises(hf.InvalidArgs, match="the workspace shares memory with an argument"):
            made.run(stream, hf.Workspace(inside[:size]), shared)
        assert not inside.any()


@pytest.mark.parametrize("offset", range(4))
def test_a_workspace_of_foreign_memory_at_any_address(offset: int) -> None:
    """The kernel copies the weights by torch, which views only aligned storages as floats."""
    (case,) = (c for c in cases_of(hf.plans.EmbeddingBagBackwardPlan) if c.name == "weighted in bfloat16")
    stream, args, expected = hf.Stream.current(), case.make(), case.make()
    made = hf.plans.EmbeddingBagBackwardPlan.select(stream, case.descriptor, hf.PlanPreference(backend="cpu"))
    size = made.workspace_size()
    made.run(stream, hf.Workspace.allocate(size, "cpu"), expected)
    workspace = torch.frombuffer(bytearray(size + offset), dtype=torch.uint8, offset=offset)
    made.run(stream, workspace, args)
    for name in made.outputs:
        assert torch.equal(canonical(getattr(args, name)), canonical(getattr(expected, name)))


def test_no_weights_in_a_workspace_at_an_odd_address() -> None:
    """An empty region of the workspace has no aligned address, and needs none."""
    bfloat16, descriptor = torch.bfloat16, hf.plans.EmbeddingBagBackwardDescriptor
    desc = descriptor(
        shape=(0, 3), num_embeddings=2, embedding_dim=3, dtype=bfloat16, index_dtype=torch.int64, mode="sum",
        per_sample_weights=True,
    )  # fmt: skip
    made = hf.plans.EmbeddingBagBackwardPlan.select(hf.Stream.current("cpu"), desc)
    args = hf.plans.EmbeddingBagBackwardArgs(
        dout=torch.empty(0, 3, dtype=bfloat16), indices=torch.empty(0, 3, dtype=torch.int64),
        per_sample_weights=torch.empty(0, 3, dtype=bfloat16), dweight=torch.ones(2, 3, dtype=bfloat16),
    )  # fmt: skip
    workspace = torch.frombuffer(bytearray(made.workspace_size() + 1), dtype=torch.uint8, offset=1)
    made.run(hf.Stream.current("cpu"), workspace, args)
    assert args.dweight is not None and not args.dweight.any()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("left", [0, 1])
def test_a_workspace_without_memory(plan: str, left: int) -> None:
    made, stream = on_cpu(plan), hf.Stream.current()
    size = made.workspace_size()
    if not size:
        return  # it takes no workspace
    args: Any = smallest_case(plan).make()
    known = hf.Workspace.allocate(size, "cpu")
    made.run(stream, known, args)
    assert known.buffer is not None
    known.buffer.untyped_storage().resize_(left)
    for wrong in (known, freed(torch.empty(size, dtype=torch.uint8))):
        with pytest.raises(hf.InvalidArgs, match=r"the workspace needs .* the storage was freed or shrunk"):
            made.run(stream, wrong, args)
    with pytest.raises(hf.InvalidArgs, match="the workspace is a zero tensor of torch"):
        made.run(stream, zero(torch.empty(size, dtype=torch.uint8)), args)
    with pytest.raises(hf.HoldfastError, match="the workspace"):
        made.run(stream, torch.empty(size, dtype=torch.uint8).to_sparse(), args)


@pytest.mark.parametrize("plan", PLANS)
def test_what_a_plan_writes_has_a_new_version(plan: str) -> None:
    """Autograd uses the version to detect that a saved tensor was modified."""
    for inference in (False, True):
        made, stream, args = settled(plan)
        if inference:
            with torch.inference_mode():
                made.run(stream, None, copy_args(args, "cpu"))
            continue
        versions = {
            name: tensor._version for name, tensor in operands_of(args).items() if torch.is_tensor(tensor)
        }
        made.run(stream, None, args)
        for name, version in versions.items():
            assert (getattr(args, name)._version > version) == (name in made.outputs), name


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("plan", PLANS)
def test_outputs_may_be_unknown_to_autograd(plan: str, backend: str) -> None:
    """An output may require a gradient or be an inference tensor: a plan records nothing."""
    case = smallest_case(plan)
    args, stream = case.make(), hf.Stream.current()
    made = PLANS[plan].select(stream, case.descriptor, hf.PlanPreference(backend=backend, precompile=False))
    expected = copy_args(args, "cpu")
    for kind in ("plain", "leaf", "inference"):
        given = copy_args(args, "cpu") if kind != "plain" else expected
        outputs = {name: getattr(given, name) for name in made.outputs}
        outputs = {name: out for name, out in outputs.items() if out is not None}
        if kind == "leaf":
            for out in outputs.values():
                out.requires_grad_(out.is_floating_point())
        if kind == "inference":
            with torch.inference_mode():
                outputs = {name: out.clone() for name, out in outputs.items()}
            given = replace(given, **outputs)
        made.run(stream, hf.Workspace.allocate(made.workspace_size(), "cpu"), given)
        for name, out in outputs.items():
            assert torch.equal(canonical(out.detach()), canonical(getattr(expected, name))), (kind, name)


def test_autograd_notices_an_overwritten_tensor() -> None:
    x, scale = torch.ones(4, requires_grad=True), torch.tensor(0.5)
    saved = torch.full((4,), 3.0)
    out = x * saved
    plan = hf.plans.FakeQuantizePlan.select(
        hf.Stream.current(), hf.plans.FakeQuantizeDescriptor(shape=(4,), dtype=torch.int8)
    )
    plan.run(hf.Stream.current(), None, hf.plans.FakeQuantizeArgs(x=torch.zeros(4), scale=scale, y=saved))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    segment = hf.plans.SegmentSumPlan.select(
        hf.Stream.current(), hf.plans.SegmentSumDescriptor(shape=(3,), segments=2, width=2)
    )
    scratch = torch.zeros(-(-segment.workspace_size() // 4))
    weight = torch.ones(scratch.shape, requires_grad=True)
    product = weight * scratch
    args = hf.plans.SegmentSumArgs(
        terms=torch.ones(3, 2), destinations=torch.zeros(3, dtype=torch.int64), out=torch.empty(2, 2)
    )
    segment.run(hf.Stream.current(), scratch, args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()

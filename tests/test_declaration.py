"""Tests of what core derives from the declaration of a plan: names, checks, guarantees and candidates."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core import registry
from holdfast.core.declaration import Implementation, Output, arguments, name_of_op
from holdfast.core.descriptor import Descriptor

PLAN = '''
"""out = x + alpha * y."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Descriptor
from holdfast.core.plan import Args, Plan


@dataclass(frozen=True, kw_only=True)
class ScaledAddDescriptor(Descriptor):
    """Tensors of one shape and dtype; ``alpha`` is a number of the host."""

    alpha: float = 1.0
    dtype: torch.dtype = torch.float32


@arguments
class ScaledAddArgs(Args):
    """``x`` and ``y`` are read, ``out`` is written."""

    x: torch.Tensor
    y: torch.Tensor
    out: Output


class ScaledAddPlan(Plan[ScaledAddDescriptor, ScaledAddArgs]):
    """out = x + alpha * y, rounded twice in the compute type."""

    def ulp(self) -> dict[str, float]:
        return {"out": 1.5}
'''

REFERENCE = '''
"""Scaled add, in NumPy."""

from __future__ import annotations

from holdfast.core.plan import DescribedKernel, Launch
from holdfast.numerics.reference import compute_type, store, widen
from op_for_a_test.plan import ScaledAddArgs, ScaledAddDescriptor


class ScaledAdd(DescribedKernel[ScaledAddDescriptor]):
    def prepare(self, args: ScaledAddArgs) -> Launch[ScaledAddArgs]:
        compute = self.desc.compute
        alpha = compute_type(compute)(self.desc.alpha)

        def launch(stream: object, workspace: object, args: ScaledAddArgs, addresses: object) -> None:
            store(args.out, widen(args.x, compute) + alpha * widen(args.y, compute))

        return launch
'''


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plan module of an op outside of holdfast, with a reference kernel only."""
    folder = tmp_path / "op_for_a_test"
    folder.mkdir()
    for name, text in (("__init__", ""), ("plan", PLAN), ("reference", REFERENCE)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        yield importlib.import_module("op_for_a_test.plan")
    finally:
        registry._plans.pop("ScaledAddPlan", None)
        Descriptor._by_name.pop("ScaledAddDescriptor", None)
        for name in [name for name in sys.modules if name.startswith("op_for_a_test")]:
            del sys.modules[name]


def test_a_declared_plan_runs_and_says_what_every_plan_says(op: Any) -> None:
    assert registry.plans()["ScaledAddPlan"] is op.ScaledAddPlan
    desc = op.ScaledAddDescriptor(shape=(3, 4), alpha=0.5)
    plan = op.ScaledAddPlan.select(hf.Stream.current("cpu"), desc)
    sku = plan.sku()
    assert (sku.op, sku.direction, sku.backend) == ("scaled_add", "forward", "reference")
    assert str(sku).startswith("scaled_add.forward float32->float32 on reference/")
    assert plan.precision_guarantee().ulp == {"out": 1.5}
    assert plan.precision_guarantee().compute_dtype == "float32"
    assert plan.bytes_moved() == 3 * 12 * 4
    assert plan.cases == "op_for_a_test.cases"
    x, y = torch.arange(12.0).reshape(3, 4), torch.full((4, 3), 8.0).t()
    args = op.ScaledAddArgs(x=x, y=y, out=torch.empty(3, 4))
    plan.run(hf.Stream.current("cpu"), None, args)
    assert np.array_equal(args.out.numpy(), x.numpy() + 4)


def test_the_tensors_of_a_declared_plan_are_checked(op: Any) -> None:
    desc = op.ScaledAddDescriptor(shape=(3,))
    plan = op.ScaledAddPlan.select(hf.Stream.current("cpu"), desc)
    right = {"x": torch.ones(3), "y": torch.ones(3), "out": torch.empty(3)}
    assert plan.can_implement(op.ScaledAddArgs(**right))
    wrong = {
        "out has shape (2,); the descriptor asks for (3,)": {"out": torch.empty(2)},
        "x has dtype torch.int8; the descriptor asks for torch.float32": {"x": torch.ones(3).char()},
        "y is a float; it must be a torch tensor": {"y": 2.0},
        "out shares memory with another argument": {"out": right["x"]},
        "out has strides (0,) for shape (3,)": {"out": torch.empty(1).expand(3)},
    }
    for sentence, given in wrong.items():
        assert plan.can_implement(op.ScaledAddArgs(**{**right, **given})).reason.startswith(sentence)
    with pytest.raises(hf.InvalidDescriptor, match=r"dtype is torch\.int8; accepted are"):
        op.ScaledAddDescriptor(shape=(3,), dtype=torch.int8).validate()


def test_a_backend_without_a_file_has_no_kernel(op: Any) -> None:
    desc = op.ScaledAddDescriptor(shape=(3,))
    considered = op.ScaledAddPlan.consider(hf.Stream.current("cpu"), desc)
    assert {candidate.label: candidate.reason for candidate in considered} == {
        "cpu": "has no kernel for this plan", "gpu": "has no kernel for this plan", "reference": ""
    }  # fmt: skip
    with pytest.raises(hf.Unsupported, match="cpu: has no kernel for this plan"):
        op.ScaledAddPlan.select(hf.Stream.current("cpu"), desc, hf.PlanPreference(backend="cpu"))


def test_the_first_candidate_without_a_reason_is_taken(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``select``, ``consider`` and the SKU use the same list."""
    usual = op.ScaledAddPlan.kernels[0]
    small = Implementation(
        "reference", usual.entry_point, "small",
        lambda desc, device, pref: "" if desc.shape[0] < 5 else f"{desc.shape[0]} rows are too many",
    )  # fmt: skip
    monkeypatch.setattr(op.ScaledAddPlan, "kernels", (small, usual))
    stream, only = hf.Stream.current("cpu"), hf.PlanPreference(backend="reference")
    for rows, reason, mode in ((4, "", "small"), (5, "5 rows are too many", "")):
        desc = op.ScaledAddDescriptor(shape=(rows,))
        first, second = op.ScaledAddPlan.consider(stream, desc, only)[-2:]
        assert (first.label, first.reason) == ("reference small", reason)
        assert (second.label, second.reason) == ("reference", "")
        assert op.ScaledAddPlan.select(stream, desc, only).sku().mode == mode


@arguments
class SomeArgs(hf.plans.Args):
    x: torch.Tensor
    second: Output | None = None
    scale: torch.Tensor | float
    first: Output
    accumulate: bool = False


def test_the_types_of_fields_are_the_roles_of_operands() -> None:
    assert SomeArgs.outputs == ("second", "first")
    assert SomeArgs.inputs == ("x", "scale")
    args = SomeArgs(x=torch.ones(1), scale=2.0, first=torch.ones(2), accumulate=True)
    assert args.operands() == (None, args.first, args.x, 2.0)
    assert args.options() == (True,)
    assert hf.plans.QuantizePerTensorArgs.flags == ()


def test_the_name_of_a_plan_tells_its_op() -> None:
    assert name_of_op("ScaledAddBackwardPlan") == ("scaled_add", "backward", "ScaledAddBackward")
    assert name_of_op("LsqInitPlan") == ("lsq_init", "forward", "LsqInit")
    for name, plan in hf.plans.all().items():
        assert name.endswith("BackwardPlan") == (plan.direction == "backward")
        assert all(backend in {way.backend for way in plan.kernels} for backend in registry.backends())


@pytest.mark.parametrize("op_name", ["Quantize", "Dequantize"])
@pytest.mark.parametrize("direction", ["", "Backward"])
def test_the_spellings_of_granularities_are_classes_like_any(op_name: str, direction: str) -> None:
    given: dict[str, dict[str, Any]] = {
        "PerTensor": {}, "PerChannel": {"axis": 1}, "PerToken": {}, "PerGroup": {"group_size": 3}
    }  # fmt: skip
    for spelling, fields in given.items():
        name = f"{op_name}{spelling}{direction}"
        plan, kind = getattr(hf.plans, f"{name}Plan"), getattr(hf.plans, f"{name}Descriptor")
        assert plan.Descriptor is kind and plan.Args is getattr(hf.plans, f"{name}Args")
        desc = kind(shape=(2, 6), **fields)
        assert repr(desc).startswith(f"{name}Descriptor(shape=(2, 6)")
        assert pickle.loads(pickle.dumps(desc)) == desc == Descriptor.from_json(desc.to_json())
        assert plan.__module__ == kind.__module__ == f"holdfast.ops.{op_name.lower()}.plan"
        assert plan.__doc__ == kind.__doc__ and plan.__doc__.startswith(f"{op_name}{direction}, one scale ")


def test_less_workspace_is_a_candidate_of_grid_sample() -> None:
    desc = hf.plans.GridSampleDescriptor(shape=(2, 16, 33, 35), output_size=(31, 37))
    stream, plan = hf.Stream.current("cpu"), hf.plans.GridSamplePlan
    usual, lean = (candidate for candidate in plan.consider(stream, desc) if candidate.backend == "cpu")
    assert (usual.label, usual.reason, lean.label, lean.reason) == ("cpu", "", "cpu lean", "")
    needed = plan.select(stream, desc, hf.PlanPreference(precompile=False)).workspace_size()
    little = hf.PlanPreference(backend="cpu", max_workspace_bytes=needed - 1, precompile=False)
    considered = {candidate.label: candidate for candidate in plan.consider(stream, desc, little)}
    usual, lean = considered["cpu"], considered["cpu lean"]
    assert usual.reason == f"needs {needed} bytes of workspace and {needed - 1} are allowed"
    assert lean.reason == ""
    sku = plan.select(stream, desc, little).sku()
    assert sku.backend == "cpu" and sku.mode.endswith("float32 grid, lean")
    nothing = hf.PlanPreference(backend="cpu", max_workspace_bytes=1)
    with pytest.raises(hf.Unsupported, match=r"cpu lean: needs .* bytes of workspace and 1 are allowed"):
        plan.select(stream, desc, nothing)

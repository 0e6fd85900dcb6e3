"""Tests of the public names: what ``holdfast`` and ``holdfast.plans`` export, also for type checkers."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import get_overloads

import pytest

import holdfast as hf
from holdfast import ops
from holdfast.core.plan import Plan

ROOT = Path(__file__).parents[1]


def test_about_fifty_names() -> None:
    assert 30 <= len(hf.__all__) <= 60
    assert set(hf.__all__) & set(hf.plans.__all__) == set()
    assert all(getattr(hf, name) is not None for name in hf.__all__)


def test_the_names_that_others_rely_on() -> None:
    functions = {
        "affine_grid", "choose_scale", "dequantize", "dynamic_fake_quantize", "embedding", "embedding_bag",
        "fake_quantize", "gather", "grid_sample", "index_add", "index_put", "index_select", "interpolate",
        "lsq_init", "observe_range", "pack", "quantize", "quantize_dynamic", "scale_of_range", "scatter_add",
        "scatter_reduce", "segment_reduce", "unpack",
    }  # fmt: skip
    assert functions <= set(hf.__all__)
    assert hf.quantize_dynamic is hf.dynamic_quantize  # the function of DynamicQuantizePlan


@pytest.mark.parametrize("name", sorted(hf.plans.all()))
def test_a_plan_has_its_descriptor_and_args_beside_it(name: str) -> None:
    plan, op = hf.plans.all()[name], name.removesuffix("Plan")
    assert issubclass(plan, Plan) and getattr(hf.plans, name) is plan
    assert getattr(hf.plans, f"{op}Descriptor") is plan.Descriptor
    assert getattr(hf.plans, f"{op}Args") is plan.Args


def test_thirty_two_plans_and_more() -> None:
    assert len(hf.plans.all()) >= 32


def test_every_folder_is_an_op() -> None:
    """Every folder of ``ops`` is discovered, with its plans and functions. No list names the folders."""
    found = {plan.__module__.split(".")[2] for plan in hf.plans.all().values()}
    assert found <= set(ops.names())
    for module in ops.modules("torch_op"):
        assert set(getattr(module, "__all__", ())) <= set(hf.__all__)


def test_the_stubs_are_current() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "stubs.py"), "--check"]
    assert subprocess.run(script, capture_output=True, text=True).stderr == ""


def test_overloads_take_what_the_function_takes() -> None:
    """A flag need not be a literal: the last overload has the annotations of the function."""
    overloaded = {name: get_overloads(found) for name in hf.__all__ if callable(found := getattr(hf, name))}
    found = {name: overloads[-1] for name, overloads in overloaded.items() if overloads}
    assert set(found) >= {"choose_scale", "dynamic_fake_quantize", "dynamic_quantize", "scale_of_range"}
    for name, last in found.items():
        taken = [parameter.annotation for parameter in signature(getattr(hf, name)).parameters.values()]
        assert [parameter.annotation for parameter in signature(last).parameters.values()] == taken, name

"""Tests of the public names: what ``holdfast`` and ``holdfast.plans`` export, also for type checkers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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

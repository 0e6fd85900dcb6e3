"""Tests of compilation in background processes during verification."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fresh
import holdfast as hf
from holdfast.proof import background_compile
from holdfast.proof.conformance import Difference, cases_of
from holdfast.proof.verify import PlanReport, verify

WRONG = Difference("LsqInitPlan", "a case", "cpu", "another bit")
NAMES = ["SegmentSumPlan", "EmbeddingPlan", "AffineGridPlan", "LsqInitPlan", "ObserveRangePlan"]


def test_others_work_while_plans_are_checked_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile.os, "cpu_count", lambda: 3)
    with pytest.raises(KeyError), background_compile.compile_in_background(NAMES) as others:
        assert [other.poll() for other in others] == [None, None]
        raise KeyError
    assert all(other.poll() is not None for other in others)


@pytest.mark.parametrize(("names", "processors"), [(NAMES[:4], 8), (NAMES, 1)])
def test_nobody_else_works_if_it_is_not_worth_it(
    names: list[str], processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_compile.os, "cpu_count", lambda: processors)
    with background_compile.compile_in_background(names) as others:
        assert others == []


def test_what_others_run_compiles_the_plans_that_they_are_told(tmp_path: Path) -> None:
    """The program runs to its end and writes the kernels to the shared cache."""
    shared = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = fresh.run(background_compile._PROGRAM, "LsqInitPlan", env=shared, check=True)
    assert done.stderr == ""
    assert any("_magnitudes" in place.name for place in tmp_path.rglob("*.nbc"))


def test_every_case_is_tried_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fail(plan: Any, case: Any, *rest: Any) -> None:
        tried.append(case.name)
        raise RuntimeError

    monkeypatch.setattr(background_compile, "execute", fail)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    background_compile.compile_all(NAMES[:2])
    assert tried == [case.name for name in NAMES[:2] for case in cases_of(hf.plans.all()[name])]


def test_processes_find_what_one_finds() -> None:
    names = ["LsqInitPlan"]
    alone, together = verify(names).as_json(), verify(names, jobs=2).as_json()
    for found in (alone, together):
        assert found["passed"] and all(plan["runs"] and plan["mutants_caught"] for plan in found["plans"])
        del found["seconds"], found["date"]
    assert together == alone


def test_processes_report_differences() -> None:
    found = PlanReport("LsqInitPlan")
    for part in (PlanReport("LsqInitPlan", cases=2), PlanReport("LsqInitPlan", cases=3, differences=[WRONG])):
        found.add(part)
    assert found.cases == 5 and found.differences == [WRONG] and not found.passed

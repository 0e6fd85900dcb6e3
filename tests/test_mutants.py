"""Tests of mutants: the cases reject wrong kernels and accept right ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.mutant import instead_of
from holdfast.core.plan import AnyPlan
from holdfast.proof import verify as verification
from holdfast.proof.mutants import ANY_OP, CONTROL, MUTANTS, Mutant, MutantError, rejection

PLANS = hf.plans.all()


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        pytest.param(name, mutant, id=f"{name}-{mutant.name}")
        for name, plan in PLANS.items()
        for mutant in MUTANTS
        if mutant.fits(plan)
    ],
)
def test_the_cases_reject(name: str, mutant: Mutant) -> None:
    assert rejection(mutant, PLANS[name]) is not None


@pytest.mark.parametrize("name", PLANS)
def test_the_control_passes(name: str) -> None:
    assert rejection(CONTROL, PLANS[name]) is None


@pytest.mark.parametrize(
    ("mistake", "op"),
    [
        ("no 1/scale", "quantize backward"),
        ("exclusive bound", "quantize backward"),
        ("exclusive bound", "quantize forward"),
        ("zero point added before rounding", "quantize forward"),
        ("zero point added before rounding", "quantize backward"),
        ("reciprocal instead of division", "quantize forward"),
        ("reciprocal instead of division", "quantize backward"),
        ("last tile dropped", "quantize forward"),
        ("last tile dropped", "dequantize backward"),
        ("swapped axis", "quantize forward"),
        ("swapped axis", "dequantize forward"),
        ("swapped nibbles", "quantize forward"),
        ("zeros", "quantize backward"),
    ],
)
def test_the_mistake_is_tried(mistake: str, op: str) -> None:
    plans = [plan for plan in PLANS.values() if f"{plan.op} {plan.direction}" == op]
    tried = [plan for plan in plans for mutant in MUTANTS if mutant.name == mistake and mutant.fits(plan)]
    assert len(tried) >= 3


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ("NaN lost", "FakeQuantizePlan"),
        ("zero point not cancelled", "FakeQuantizePlan"),
        ("in_range: mask on x", "FakeQuantizeBackwardPlan"),
        ("clipped: mask on the code", "FakeQuantizeBackwardPlan"),
        ("in_range: mask multiplied", "FakeQuantizeBackwardPlan"),
        ("in_range: scale from the data", "FakeQuantizeBackwardPlan"),
        ("tanh of x", "FakeQuantizeBackwardPlan"),
        ("hard_tanh without max", "FakeQuantizeBackwardPlan"),
        ("accumulate ignored", "FakeQuantizeLearnedBackwardPlan"),
        ("no gradient factor", "FakeQuantizeLearnedBackwardPlan"),
        ("sum in another order", "FakeQuantizeLearnedBackwardPlan"),
        ("saturated terms forgotten", "FakeQuantizeLearnedBackwardPlan"),
        ("zero point, sign", "FakeQuantizeLearnedBackwardPlan"),
        ("NaN dropped", "ChooseScalePlan"),
        ("no floor", "ChooseScalePlan"),
        ("sign forgotten", "ChooseScalePlan"),
        ("scale in half precision", "DynamicQuantizePlan"),
    ],
)
def test_the_mistake_is_tried_in(mistake: str, name: str) -> None:
    assert any(mutant.name == mistake and mutant.fits(PLANS[name]) for mutant in MUTANTS)


@pytest.mark.parametrize("name", PLANS)
def test_a_kernel_that_writes_nothing_is_rejected(name: str) -> None:
    def nothing(plan: AnyPlan, desc: Any, run: Any, args: Any) -> None:
        """A mutant that writes nothing."""

    found = rejection(Mutant("nothing", nothing), PLANS[name])
    assert found is not None and ("nan" in found.detail or "0xa5" in found.detail)


def _spoiled(plan: AnyPlan, desc: Any, run: Any, args: Any, *, what: str) -> None:
    run(args)
    target = getattr(args, what or plan.outputs[0])
    if what:
        target.zero_()
    else:
        target.as_strided((1,), (1,), target.storage_offset() - 1).zero_()


@pytest.mark.parametrize("name", PLANS)
def test_a_kernel_that_writes_beside_its_output_is_rejected(name: str) -> None:
    found = rejection(Mutant("beside", partial(_spoiled, what="")), PLANS[name])
    assert found is not None and "beside" in found.detail


@pytest.mark.parametrize("name", ["QuantizePerTokenPlan", "QuantizePerTokenBackwardPlan"])
def test_a_kernel_that_changes_its_input_is_rejected(name: str) -> None:
    found = rejection(Mutant("input", partial(_spoiled, what="x")), PLANS[name])
    assert found is not None and "x[" in found.detail


def test_an_exception_is_no_rejection() -> None:
    def fails(plan: AnyPlan, desc: Any, run: Any, args: Any) -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(MutantError, match="'fails' raised ZeroDivisionError in QuantizePerTensorPlan"):
        rejection(Mutant("fails", fails), hf.plans.QuantizePerTensorPlan)


def test_a_mutant_whose_target_is_gone_is_an_error() -> None:
    gone = Mutant("gone", instead_of("quantise", lambda *given: None))
    with pytest.raises(MutantError, match=r"quantize\.reference has no 'quantise' to replace"):
        rejection(gone, hf.plans.QuantizePerTensorPlan)


def test_a_mutant_whose_target_is_never_used_is_an_error() -> None:
    unused = Mutant("unused", instead_of("quantize_backward", lambda *given: None))
    with pytest.raises(MutantError, match=r"replaces .*\.quantize_backward, which no case of Quant"):
        rejection(unused, hf.plans.QuantizePerTensorPlan)


def test_verify_does_not_count_a_mutant_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Mutant("gone", instead_of("quantise", lambda *given: None))
    monkeypatch.setattr(verification, "MUTANTS", (gone,))
    report = verification.PlanReport("QuantizePerTensorPlan", cases=1)
    verification._mutants(hf.plans.QuantizePerTensorPlan, report, lambda *told: None)
    assert (report.mutants, report.mutants_caught) == (1, 0)
    assert "has no 'quantise' to replace" in report.differences[0].detail


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_has_mistakes_of_its_own(name: str) -> None:
    own = [mutant for mutant in MUTANTS if mutant not in ANY_OP and mutant.fits(PLANS[name])]
    assert len(own) >= 2


def test_every_mutant_fits_some_plan() -> None:
    assert [mutant.name for mutant in MUTANTS if not any(map(mutant.fits, PLANS.values()))] == []

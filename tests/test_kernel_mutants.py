"""Tests of kernel mutants: mistakes in a kernel's source change bits, and only a changed bit counts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core.mutant import KernelMutant, MutantError
from holdfast.proof.conformance import Difference
from holdfast.proof.kernel_mutants import command
from holdfast.proof.kernel_mutants.registry import every_mutant, families, label_of
from holdfast.proof.kernel_mutants.run import trials
from holdfast.proof.kernel_mutants.trial import Trial

#: A few mutants of both backends that compile quickly, or need no compilation.
SELECTED = [
    "embedding, cpu: the last column lost",
    "segment_sum, cpu: chunks of twice the size",
    "affine_grid, cpu: terms added in another order",
    "embedding, gpu: a row after the last",
    "quantize, gpu: a ragged byte not masked",
    "choose_scale, gpu: the column stride of a result",
    "segment_sum, gpu: the first chunk in the slot of another",
]


@pytest.mark.parametrize("label", every_mutant())
def test_the_target_is_there(label: str) -> None:
    mutant = every_mutant()[label]
    compile(mutant.source(), str(mutant.path), "exec")
    assert mutant.old != mutant.new
    assert mutant.backend in ("cpu", "gpu") and set(mutant.plans) <= set(hf.plans.all())


def test_a_target_that_is_gone_is_an_error() -> None:
    mutant = every_mutant()["embedding, gpu: a row after the last"]
    with pytest.raises(
        MutantError, match=r"'no such line', which holdfast\.ops\.segment_sum\.gpu_gather has 0 times"
    ):
        replace(mutant, old="no such line").source()
    with pytest.raises(MutantError, match="has 3 times"):
        replace(mutant, old="row_offsets(number, sizes, ").source()
    with pytest.raises(MutantError, match=r"holdfast\.ops\.embedding\.gone, which does not exist"):
        replace(mutant, module="holdfast.ops.embedding.gone").source()


def test_every_op_has_four_on_each_backend() -> None:
    ops = {plan.op for plan in hf.plans.all().values()}
    found = Counter(
        (op, mutant.backend)
        for mutant in every_mutant().values()
        for op in {hf.plans.all()[name].op for name in mutant.plans}
    )
    assert {
        (op, backend): n for op in ops for backend in ("cpu", "gpu") if (n := found[op, backend]) < 4
    } == {}


def test_every_family_has_four_on_each_backend_and_no_label_twice() -> None:
    for family, mutants in families().items():
        assert min(Counter(mutant.backend for mutant in mutants).values()) >= 4, family
    labels = [label_of(family, mutant) for family, mutants in families().items() for mutant in mutants]
    assert len(set(labels)) == len(labels) == len(every_mutant())


_GATHER = "holdfast.ops.segment_sum.gpu_gather"
_EMBEDDING = KernelMutant("", _GATHER, "exists = number < count", "", ("EmbeddingPlan",))

#: Mutants that change nothing, or fail in another way than by a difference.
UNCAUGHT = {
    "control": replace(_EMBEDDING, new=_EMBEDDING.old),
    "raises": replace(_EMBEDDING, new="exists = number < nothing"),
    "dies": replace(_EMBEDDING, old="TUNING = Tuned(", new="import os\nos.abort()\nTUNING = Tuned("),
    "unused": replace(_EMBEDDING, plans=("AffineGridPlan",)),
    "gone": replace(_EMBEDDING, old="no such line"),
}


@pytest.fixture(scope="module")
def tried() -> dict[str, Trial]:
    mutants = {label: every_mutant()[label] for label in SELECTED} | UNCAUGHT
    return {trial.mutant: trial for trial in trials(mutants)}


@pytest.mark.parametrize("label", SELECTED)
def test_the_cases_tell(label: str, tried: dict[str, Trial]) -> None:
    trial, mutant = tried[label], every_mutant()[label]
    assert trial.caught, trial.error
    assert trial.difference is not None and trial.difference.plan in mutant.plans
    assert trial.difference.way.startswith(mutant.backend)


@pytest.mark.parametrize(
    ("label", "error"),
    [
        ("control", ""),
        ("raises", "InterpreterError: NameError"),
        ("dies", "ended by signal 6"),
        ("unused", "RuntimeError: AffineGridPlan does not use holdfast.ops.segment_sum.gpu_gather"),
        ("gone", "MutantError"),
    ],
)
def test_only_a_difference_counts(label: str, error: str, tried: dict[str, Trial]) -> None:
    assert not tried[label].caught
    assert tried[label].error.startswith(error) and bool(tried[label].error) == bool(error)


def test_a_mutant_that_hangs_is_given_up() -> None:
    hangs = replace(_EMBEDDING, old="TUNING = Tuned(", new="while True: pass\nTUNING = Tuned(")
    (trial,) = trials({"hangs": hangs}, limit=1)
    assert not trial.caught and trial.error == "not done within 1 s"


@pytest.mark.parametrize("outcome", ["caught", "survives", "raises"])
def test_the_command_exits_1_unless_all_are_caught(outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(mutants: Any, **options: Any) -> Any:
        assert options == {"by": "cases", "jobs": 3}
        for label, mutant in mutants.items():
            told = Difference(mutant.plans[0], "a case", mutant.backend, "y[0]")
            error = "ValueError: on purpose" if outcome == "raises" else ""
            yield Trial(label, "cases", 0.1, told if outcome == "caught" else None, error)

    monkeypatch.setattr(command, "trials", found)
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["mutants", "--plan", "AffineGrid", "--jobs", "3", "--json", "-"])
    assert shown.exit_code == (outcome != "caught")
    kept = json.loads(shown.stdout)
    assert kept["passed"] is (outcome == "caught")
    assert [t["mutant"] for t in kept["trials"]] == [
        label for label, mutant in every_mutant().items() if "AffineGridPlan" in mutant.plans
    ]
    said = {"caught": "AffineGridPlan: a case, cpu", "survives": "survived", "raises": "ValueError"}
    assert said[outcome] in shown.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "NoSuch"], "no kernel mutant is tried on NoSuchPlan"),
        (["--by", "luck"], "--by is 'luck'; accepted are cases, fuzz."),
    ],
)
def test_the_command_refuses_with_a_sentence(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = CliRunner().invoke(app, ["mutants", *words])
    assert shown.exit_code == 2 and shown.stderr.startswith(f"error {said}")

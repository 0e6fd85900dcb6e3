"""Tests of ``holdfast verify --against`` and ``--from``, and of unusable files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core.machine import Machine
from holdfast.proof import digests
from holdfast.proof.catalogue import entry
from holdfast.proof.compare_reports import report_differences
from holdfast.proof.conformance import Difference
from holdfast.proof.result_files import UnusableFile, load_report
from holdfast.proof.verify import PlanReport, Report

BENCH = ("device", "rows", "versions", "date", "copy_bytes_per_second")
PLANS = ("QuantizePerTokenPlan", "EmbeddingPlan")


def report(cpu: str = "here") -> Report:
    """A report of two plans that pass."""
    known = {name: dict(digests.pinned()[name]) for name in PLANS}
    plans = [
        PlanReport(name, cases=len(k), runs=5, pinned=len(k), digests=k, promise=entry(hf.plans.all()[name]))
        for name, k in known.items()
    ]
    machine = Machine(cpu, 2, 2, None, None, "Linux", {"torch": "2.13.0"})
    return Report(["reference", "cpu on 1 thread"], plans, "no GPU", machine, "2026-11-16T01:02:03+00:00")


def store(path: Path, made: Report) -> Path:
    path.write_text(json.dumps(made.as_json()))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(app, ["verify", *map(str, words)])


def test_findings_come_back_as_they_were(tmp_path: Path) -> None:
    made = report()
    made.plans[0].differences.append(
        Difference(PLANS[0], "square", "gpu, run 1", "q[3]: 1 expected, 2 found")
    )
    made.fuzz = {"problems": 10, "seed": 1, "seconds": 2.0, "differences": []}
    assert load_report(store(tmp_path / "here.json", made)) == made


def test_equal_machines(run: Any, tmp_path: Path) -> None:
    here, there = store(tmp_path / "a.json", report()), store(tmp_path / "b.json", report("another CPU"))
    shown = run("--from", here, "--against", there)
    assert shown.exit_code == 0, shown.output
    cases = sum(len(digests.pinned()[name]) for name in PLANS)
    assert f"2 plans, {cases} cases: the digests are those in {there}" in shown.output
    assert "another CPU, 2 threads; no GPU; Linux; torch 2.13.0, numerics 1" in shown.output


def test_the_first_difference_is_named(run: Any, tmp_path: Path) -> None:
    other = report("another CPU")
    known = other.plans[0].digests["square"]
    other.plans[0].digests["square"] = "0" * 16
    other.plans[1].digests[next(iter(other.plans[1].digests))] = "1" * 16
    there = store(tmp_path / "b.json", other)
    shown = run("--from", store(tmp_path / "a.json", report()), "--against", there)
    assert shown.exit_code == 1
    said = f"first difference: {PLANS[0]}, case 'square': digest {known} here, {'0' * 16} in {there} (1 more)"
    assert said in shown.output
    assert "here (2026-11-16): here, 2 threads" in shown.output and "another CPU" in shown.output


def only(found: Report, other: Report) -> list[str]:
    return list(report_differences(found, other, "b.json"))


def test_plans_and_cases_of_one_machine_are_named() -> None:
    here, there = report(), report()
    there.plans.pop()
    assert only(here, there) == ["EmbeddingPlan is only here"]
    assert only(there, here) == ["EmbeddingPlan is only in b.json"]
    there = report()
    del there.plans[0].digests["square"]
    assert only(here, there) == ["QuantizePerTokenPlan, case 'square' is only here"]
    assert only(there, here) == ["QuantizePerTokenPlan, case 'square' is only in b.json"]


def test_plans_that_were_not_asked_for_are_not_compared() -> None:
    here, there = report(), report()
    here.plans.pop()
    assert list(report_differences(here, there, "b.json", [PLANS[0]])) == []


def test_a_backend_that_differs_on_one_machine_is_named() -> None:
    here, there = report(), report()
    there.plans[0].differences.append(Difference(PLANS[0], "square", "gpu, run 1", "q[3]: 1 and 2"))
    assert only(here, there) == [
        "only in b.json: QuantizePerTokenPlan, case 'square', gpu, run 1: q[3]: 1 and 2"
    ]
    assert only(there, here)[0].startswith("only here: ")
    assert only(there, there) == []


def test_another_version_of_the_numerics_comes_first() -> None:
    here, there = report(), replace(report(), numerics_version=2)
    there.plans.pop()
    assert only(here, there)[0] == "numerics version 1 here, 2 in b.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("not json", "is not JSON"),
        ("[1, 2]", "holds a list, not an object"),
        ("{}", "it has no 'plans'"),
        ('{"plans": [{"plan": "P", "differences": []}]}', "it has no 'digests'"),
        ('{"plans": 3}', "does not hold the findings of this version"),
    ],
)
@pytest.mark.parametrize("option", ["--against", "--from"])
def test_a_file_that_holds_something_else(
    run: Any, tmp_path: Path, option: str, text: str | None, said: str
) -> None:
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    shown = run("--plan", PLANS[0], option, file)
    assert shown.exit_code == 2 and said in shown.stderr, shown.output
    assert "holdfast verify --json FILE" in shown.stderr and "checking" not in shown.output


def test_findings_of_an_older_version_are_refused_with_a_sentence(tmp_path: Path) -> None:
    old = report().as_json()
    del old["machine"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(UnusableFile, match="findings of this version of verify: it has no 'machine'"):
        load_report(tmp_path / "old.json")


def test_fields_of_a_newer_version_are_left_out(tmp_path: Path) -> None:
    new = report().as_json()
    new["plans"][0]["colour"] = new["machine"]["colour"] = new["colour"] = "red"
    (tmp_path / "new.json").write_text(json.dumps(new))
    assert load_report(tmp_path / "new.json") == report()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--report", "no/such/folder/proof.html"], "there is no folder no/such/folder"),
        (["--json", "no/such/folder/here.json"], "there is no folder no/such/folder"),
        (["--bench", "pyproject.toml"], "--bench is shown on the page only"),
        (["--bench", "no.json", "--report", "proof.html"], "no.json cannot be read"),
        (["--fuzz", "no.json"], "no.json cannot be read"),
    ],
)
def test_what_could_not_be_used_is_refused_at_once(run: Any, words: list[str], said: str) -> None:
    shown = run("--plan", PLANS[0], *words)
    assert shown.exit_code == 2 and said in shown.stderr
    assert "checking" not in shown.output


def test_from_takes_no_plans(run: Any, tmp_path: Path) -> None:
    shown = run("--from", store(tmp_path / "a.json", report()), "--plan", PLANS[0])
    assert shown.exit_code == 2 and "leave out --plan" in shown.stderr


@pytest.mark.parametrize(("differing", "code"), [(0, 0), ([], 0), (2, 1), (["q[3]"], 1)])
def test_a_fuzz_run_is_part_of_the_findings(run: Any, tmp_path: Path, differing: Any, code: int) -> None:
    fuzz = {"problems": 3000, "seed": 7, "seconds": 60.5, "differences": differing}
    (tmp_path / "fuzz.json").write_text(json.dumps(fuzz))
    file, page = tmp_path / "out.json", tmp_path / "proof.html"
    here = store(tmp_path / "a.json", report())
    shown = run("--from", here, "--fuzz", tmp_path / "fuzz.json", "--json", file, "--report", page)
    assert shown.exit_code == code, shown.output
    assert "3,000 random problems with seed 7" in shown.output
    assert json.loads(file.read_text())["fuzz"] == fuzz
    assert "3,000 problems were drawn at random" in page.read_text()
    run("--from", file, "--report", page)
    assert "3,000 problems were drawn at random" in page.read_text(), "it is kept in the JSON"


@pytest.mark.parametrize("text", ['{"device": "a"}', json.dumps({key: [{"name": "a"}] for key in BENCH})])
def test_a_file_that_is_no_benchmark(run: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "bench.json").write_text(text)
    here = store(tmp_path / "a.json", report())
    shown = run("--from", here, "--report", tmp_path / "proof.html", "--bench", tmp_path / "bench.json")
    assert shown.exit_code == 2 and "so it is no benchmark" in shown.stderr


def test_a_file_that_is_no_fuzz_run(run: Any, tmp_path: Path) -> None:
    (tmp_path / "fuzz.json").write_text('{"problems": "many"}')
    shown = run("--from", store(tmp_path / "a.json", report()), "--fuzz", tmp_path / "fuzz.json")
    assert shown.exit_code == 2 and "holds 'many' for 'problems'" in shown.stderr

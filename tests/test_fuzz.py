"""Random problems of every plan on every backend; and tests that the search finds planted mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core.case import GUARD, Layout, laid_out
from holdfast.core.draw import Draw, case_of, space_of
from holdfast.core.dtypes import dtype_name
from holdfast.core.huge_pages import on_huge_pages
from holdfast.core.strided import overlaps_itself
from holdfast.ops.fake_quantize import torch_op as fake_quantize
from holdfast.ops.grid_sample import cpu as grid_sample
from holdfast.proof.catalogue import entry
from holdfast.proof.fuzz import Drawn, check_problem, draw_problems, fuzz_plan, refusal
from holdfast.proof.fuzz.functions import check_functions
from holdfast.proof.fuzz.problem import draw_problem
from holdfast.proof.fuzz.search import BUDGET, search
from holdfast.proof.result_files import load_fuzz_report

PLANS = sorted(hf.plans.all())
#: Number of problems per plan: on the CPU, and with GPU kernels in the interpreter.
ON_CPU, INTERPRETED = 50, 4


@pytest.mark.parametrize("name", PLANS)
def test_drawn_problems_have_equal_bits_on_the_cpu(name: str) -> None:
    assert fuzz_plan(name, seed=1, problems=ON_CPU) == []


@pytest.mark.parametrize("name", PLANS)
def test_drawn_problems_have_equal_bits_on_the_gpu(name: str) -> None:
    assert fuzz_plan(name, seed=2, problems=INTERPRETED, interpret=True) == []


@pytest.mark.parametrize("name", PLANS)
def test_functions_have_equal_bits_at_real_sizes(name: str) -> None:
    assert fuzz_plan(name, seed=3, problems=1, functions=True) == []


def called(plan: str, problem: str) -> Any:
    """The finding of one call, which is large enough for huge pages and several threads."""
    kind = hf.plans.all()[plan]
    return check_functions(kind, Drawn.from_json(kind, f'{{"problem": {problem}}}'))


#: Some images are divided among threads.
IMAGES = '{"name": "images", "image": [1, 1200, 1200], "size": [40, 50], "mode": "nearest", "batch": 5}'
VECTOR = '{"name": "vector", "granularity": "per_tensor", "shape": [800000]}'


def test_a_large_result_that_was_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert called("FakeQuantizePlan", VECTOR) is None
    args = fake_quantize.FakeQuantizeArgs
    monkeypatch.setattr(
        fake_quantize, "FakeQuantizeArgs", lambda y, **read: args(y=on_huge_pages(y.clone()), **read)
    )
    found = called("FakeQuantizePlan", VECTOR)
    assert found is not None and "differ)" in found.detail


def share_scratch() -> None:
    """Plant a mistake: all threads of grid_sample's gradients have the same scratch. Prints what is found."""
    kernel: Any = grid_sample.GridSampleBackward
    right = kernel.memory.fget
    kernel.memory = property(lambda self: right(self)._replace(bytes=0))
    print(called("GridSampleBackwardPlan", IMAGES))


def test_scratch_that_threads_share_is_found() -> None:
    assert [called("GridSampleBackwardPlan", IMAGES) for _ in range(3)] == [None] * 3
    # In a process of its own: threads that use the indices of each other may also end the process.
    code = "import test_fuzz; test_fuzz.share_scratch()"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert "differ)" in run.stdout or run.returncode < 0, run.stderr


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_declares_its_space(name: str) -> None:
    plan = hf.plans.all()[name]
    for drawn in islice(draw_problems(plan, 3, 500), 40):
        first, other = (case_of(plan, problem) for problem in (drawn.problem, drawn.other))
        first.descriptor.validate()
        assert type(first.descriptor) is plan.Descriptor
        assert first.descriptor == other.descriptor
        assert Drawn.from_json(plan, drawn.to_json()) == drawn


@pytest.mark.parametrize("name", PLANS)
def test_a_space_is_wide(name: str) -> None:
    """A few hundred themes cover every dtype of every field, both values of every flag, and every layout."""
    plan, accepted = hf.plans.all()[name], entry(hf.plans.all()[name]).dtypes
    draws = [draw_problem(plan, f"{name}/4/{theme}", 0, 400) for theme in range(400)]
    descriptors = [case_of(plan, drawn.problem).descriptor for drawn in draws]
    for field in (f.name for f in fields(descriptors[0])):
        values = {getattr(desc, field) for desc in descriptors}
        if field in accepted:
            assert {dtype_name(value) for value in values if value} >= set(accepted[field]), field
        elif {type(value) for value in values} == {bool} or all(isinstance(v, Enum) for v in values):
            assert len(values) == (2 if values <= {True, False} else len(type(min(values)))), field
    shapes = {desc.shape for desc in descriptors}
    assert any(0 in shape for shape in shapes) and any(1 in shape for shape in shapes)
    if name not in FIXED_RANKS:
        assert {len(shape) for shape in shapes} >= set(range(1, 9))
    text = "\n".join(str(drawn.layouts) for drawn in draws)
    for part in ("step=2", "shift=1", "broadcast=", "gap=", "order="):
        assert part in text
    assert any(drawn.limit is not None for drawn in draws)
    assert any(drawn.broken is not None for drawn in draws)


#: Plans whose shapes have a limited rank.
FIXED_RANKS = {
    name for name in PLANS if name.startswith(("AffineGrid", "GridSample", "EmbeddingBag", "Interpolate"))
}


@pytest.mark.parametrize("rank", range(9))
def test_drawn_layouts_fit_any_shape(rank: int) -> None:
    for number in range(60):
        draw = Draw(f"layouts of rank {rank}, {number}", number, 300)
        shape = draw.shape(rank, rank)
        written, packed = (
            draw.layout(written=True),
            Layout.parse(draw.layout(packed=True).replace("contiguous", "")),
        )
        strides, _ = Layout.parse(written.replace("contiguous", "")).place(shape)
        assert not overlaps_itself(shape, strides)
        if rank and packed != Layout():
            assert packed.place(shape)[0][-1] == 1
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        made = laid_out(values, written)
        assert torch.equal(made, values)
        around = made.as_strided((made.untyped_storage().nbytes() // 4,), (1,), 0)
        assert around[:GUARD].isnan().all() and around[-GUARD:].isnan().all()


def test_a_wrong_kernel_is_found_shrunk_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong kernel fails in the last column of rows with more than four elements, on several threads."""
    plan: Any = hf.plans.all()["FakeQuantizePlan"]
    right = plan.run

    def run(self: Any, stream: Any, workspace: Any, args: Any) -> None:
        right(self, stream, workspace, args)
        if self.backend == "cpu" and torch.get_num_threads() > 1 and args.y.dim() and args.y.shape[-1] > 4:
            args.y[..., -1] = 77.0

    monkeypatch.setattr(plan, "run", run)
    found = fuzz_plan("FakeQuantizePlan", problems=50)
    assert found and "77.0" in found[0].detail and "on 2 threads" in found[0].way
    smallest = Drawn.from_json(plan, found[0].problem)
    assert max(smallest.problem.shape) == 5 and torch.Size(smallest.problem.shape).numel() == 5
    assert smallest.layouts == smallest.other_layouts == {}
    assert check_problem(plan, smallest) is not None
    repeated = CliRunner().invoke(app, ["fuzz", "--plan", "FakeQuantize", "--problem", found[0].problem])
    assert repeated.exit_code == 1 and "77.0" in repeated.output
    monkeypatch.undo()
    repeated = CliRunner().invoke(app, ["fuzz", "--plan", "FakeQuantize", "--problem", found[0].problem])
    assert repeated.exit_code == 0 and "every bit equal: 1 problems" in repeated.output


SPOILT: dict[str, Any] = {
    "a byte beside the workspace": lambda self, ws, args: (
        ws is not None and ws.as_strided((1,), (1,), ws.storage_offset() + ws.numel()).zero_()
    ),
    "an input": lambda self, ws, args: args.dout.zero_(),
    "beside an input": lambda self, ws, args: args.grid.as_strided(
        (1,), (1,), args.grid.storage_offset() - 1
    ).zero_(),
}


@pytest.mark.parametrize("what", SPOILT)
def test_writing_where_nothing_may_be_written_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = hf.plans.all()["GridSampleBackwardPlan"]
    right = plan.run

    def run(self: Any, stream: Any, workspace: Any, args: Any) -> None:
        right(self, stream, workspace, args)
        if self.backend == "cpu" and args.dout.numel():
            SPOILT[what](self, workspace, args)

    monkeypatch.setattr(plan, "run", run)
    monkeypatch.setattr("holdfast.proof.fuzz.search.shrink", lambda drawn, found, check: found)
    assert fuzz_plan("GridSampleBackwardPlan", problems=40)


def test_a_launch_remembered_for_other_strides_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = hf.plans.all()["DequantizePerTensorPlan"]
    right, first = plan._look_up, {}

    def look_up(self: Any, args: Any, operands: Any) -> Any:
        cached, places = right(self, args, operands)
        if cached is not None:
            first.setdefault(id(self), (self, cached))
        return first.get(id(self), (self, cached))[1], places

    monkeypatch.setattr(plan, "_look_up", look_up)
    monkeypatch.setattr("holdfast.proof.fuzz.search.shrink", lambda drawn, found, check: found)
    assert fuzz_plan("DequantizePerTensorPlan", problems=50)


def test_a_public_function_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = hf.plans.all()["EmbeddingBackwardPlan"]
    space = space_of(plan)
    right = space.public

    def public(*given: Any) -> Any:
        found = right(*given)
        return found and {name: tensor + 1 for name, tensor in found.items()}

    monkeypatch.setattr(space, "public", public)
    monkeypatch.setattr("holdfast.proof.fuzz.search.shrink", lambda drawn, found, check: found)
    found = fuzz_plan("EmbeddingBackwardPlan", problems=30)
    assert found and found[0].way == "public function on cpu"


@pytest.mark.parametrize("number", range(4))
def test_an_argument_that_is_not_refused_is_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = hf.plans.all()["LsqInitPlan"]
    drawn = next(drawn for drawn in draw_problems(plan, 0, 100) if torch.Size(drawn.problem.shape).numel())
    assert check_problem(plan, replace(drawn, broken=number)) is None
    monkeypatch.setattr(refusal, "MISTAKES", {"cloned": lambda tensor: tensor.clone()})
    found = check_problem(plan, replace(drawn, broken=number))
    assert found is not None and "did not refuse it" in found.detail


def test_a_search_in_processes_counts_and_ends(tmp_path: Path) -> None:
    told = []
    report = search(
        ["LsqInitPlan"], seed=5, seconds=1, jobs=2, interpret=False, progress=lambda *said: told.append(said)
    )
    assert report.passed and report.problems == {"LsqInitPlan": report.count}
    assert report.count == len(told) > 0
    written = tmp_path / "fuzz.json"
    written.write_text(json.dumps(report.as_json()))
    assert load_fuzz_report(written)["problems"] == report.count


def test_a_problem_that_kills_its_process_is_reported() -> None:
    program = """
import os
import holdfast as hf
from holdfast.proof.fuzz import search as searching
def killed(name, drawn, how):
    os._exit(11)
searching._checked = killed
if __name__ == "__main__":
    report = searching.search(["LsqInitPlan"], seed=0, seconds=1, jobs=1, interpret=False)
    print(report.findings[0].detail, report.findings[0].command)
"""
    done = subprocess.run(
        [sys.executable, "-c", _as_file(program)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "exit code 11" in done.stdout and "holdfast fuzz --plan LsqInitPlan --problem" in done.stdout


def _as_file(program: str) -> str:
    """A program that runs ``program`` from a file, which spawned processes can import."""
    return (
        "import pathlib, runpy, sys, tempfile\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'killing.py'\n"
        f"path.write_text({program!r})\n"
        "sys.argv = [str(path)]\n"
        "sys.path.insert(0, str(path.parent))\n"
        "runpy.run_path(str(path), run_name='__main__')\n"
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--plan", "LsqInitPlan", "--problem", "{"], "the problem is not one of LsqInitPlan"),
        (["--plan", "LsqInitPlan", "--problem", '{"problem": {"colour": 1}}'], "the problem is not one of"),
        (["--problem", "{}"], "--problem repeats a problem of one plan"),
        (["--plan", "Nothing"], "there is no plan called 'Nothing'"),
        (["--functions", "--interpret"], "give one of them"),
    ],
)
def test_bad_input_of_the_command_gets_a_sentence(given: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["fuzz", *given])
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())


def test_the_budget_of_a_problem_is_kept() -> None:
    plan = hf.plans.all()["QuantizePerTensorPlan"]
    sizes = [torch.Size(d.problem.shape).numel() for d in islice(draw_problems(plan, 6, BUDGET), 200)]
    assert max(sizes) <= BUDGET and max(sizes) > BUDGET // 20

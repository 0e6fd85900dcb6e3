"""Tests of ``holdfast bench --models``: training steps of public functions on the shapes of real models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from holdfast.bench import models, step_timing
from holdfast.bench.model_report import ModelReport, ModelRow
from holdfast.bench.step_timing import Memory, Spread, step_times
from holdfast.cli import app
from holdfast.core.training_step import (
    COMPILED,
    DETERMINISTIC,
    EAGER,
    OURS,
    DeterministicStep,
    ModelCase,
    Step,
)
from holdfast.ops.grid_sample.models import GridSampleModel

CPU = torch.device("cpu")
CASES = models.model_cases()
DECODER = next(case for case in CASES if "decoder" in case.name)
BAGS = next(case for case in CASES if case.op == "embedding_bag")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few repetitions."""
    monkeypatch.setattr(step_timing, "CPU_TURNS", 2)
    monkeypatch.setattr(step_timing, "CPU_WARMUP", 1)
    monkeypatch.setattr(step_timing, "CALLS", 1)
    monkeypatch.setattr(step_timing, "BATCHES", 2)


def run(*options: str) -> Any:
    return CliRunner().invoke(
        app, ["bench", "--models", "--device", "cpu", "--elements", "4096", *options], env={"COLUMNS": "200"}
    )


def test_it_prints_ratios_and_writes_json(tmp_path: Path) -> None:
    stored = tmp_path / "out.json"
    result = run("--no-compile", "--only", "decoder", "--dtype", "float32", "--json", str(stored))
    assert result.exit_code == 0, result.output
    assert "Deformable-DETR decoder, N1 C32" in result.output and "x / " in result.output
    report = json.loads(stored.read_text())
    assert {"device", "threads", "date", "versions", "rows"} == report.keys()
    (row,) = report["rows"]
    assert row["name"] == DECODER.at(4096).name
    assert row["model"] == "Deformable-DETR decoder" and row["dtype"] == "float32"
    assert row["size"] == DECODER.at(4096).label and row["small"] == DECODER.at(models.SMALL).label
    steps = row["steps"]
    assert steps.keys() == {OURS, EAGER, DETERMINISTIC, COMPILED}
    assert steps[COMPILED] == {"reason": "left out by --no-compile"}
    for name in (OURS, EAGER, DETERMINISTIC):
        for part in ("step", "forward", "backward"):
            assert 0 < steps[name][part]["low"] <= steps[name][part]["median"] <= steps[name][part]["high"]
        assert steps[name]["memory"] is None
    assert steps[OURS]["host"]["median"] > 0 and steps[EAGER]["host"]["median"] > 0
    assert steps[DETERMINISTIC]["host"] is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_does_the_work_of_its_peers(case: ModelCase) -> None:
    small = case.at(models.SMALL)
    steps = small.steps(CPU)
    assert {OURS, EAGER, COMPILED} <= steps.keys()
    assert models.distance(steps[OURS], steps[COMPILED]) <= models.TOLERANCE[case.real]
    out = steps[EAGER].forward()
    gradients = steps[EAGER].backward(out)
    assert out.shape == steps[OURS].forward().shape
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in steps[OURS].leaves]
    if case.real == torch.float32:
        assert models.distance(steps[OURS], steps[EAGER]) <= models.TOLERANCE[case.real]


@pytest.mark.parametrize("elements", [2**12, 2**20])
def test_a_smaller_case_is_named_by_its_sizes(elements: int) -> None:
    smaller = [case.at(elements) for case in CASES]
    for case, made in zip(CASES, smaller, strict=True):
        assert made.largest <= max(elements, 2**18) and made.at(elements) == made
        assert (made.name == case.name) == (made == case) and made.model == case.model
        assert case.at(case.largest) == case


def test_names_of_cases_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_only_the_wanted_gradients_are_asked_for() -> None:
    wanted = {
        case.wanted: [leaf.shape for leaf in case.at(4096).steps(CPU)[OURS].leaves]
        for case in CASES
        if isinstance(case, GridSampleModel)
    }
    both, image, grid = wanted["input", "grid"], wanted[("input",)], wanted[("grid",)]
    assert len(both) == 2 and len(image) == len(grid) == 1
    assert image[0][1] == 3 and grid[0][-1] == 2


def _squaring(function: Any = torch.square) -> Step:
    return Step(function, (torch.arange(4.0).requires_grad_(),), torch.ones(4))


def test_the_deterministic_step_sets_the_mode_for_itself_alone() -> None:
    seen = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return x * x

    plain = _squaring(watched)
    step = DeterministicStep(plain.function, plain.inputs, plain.dout)
    step.backward(step.forward())
    plain.forward()
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()


def test_steps_take_turns() -> None:
    order: list[str] = []

    def named(name: str) -> Step:
        def watched(x: torch.Tensor) -> torch.Tensor:
            order.append(name)
            return x * x

        return _squaring(watched)

    made = step_times({"one": named("one"), "other": named("other")}, CPU)
    assert order == ["one", "other"] * 3  # one turn of warm-up
    assert made["one"].step.median > 0


class Clock:
    """A clock that work advances, in place of those of the host and the device."""

    now = 0.0

    def after(self, seconds: float, result: Any = None) -> Any:
        self.now += seconds
        return result

    def event(self, enable_timing: bool) -> Any:
        made = SimpleNamespace(synchronize=lambda: None, at=0.0)
        made.record = lambda: setattr(made, "at", self.now)
        made.elapsed_time = lambda end: 1e3 * (end.at - made.at)
        return made


def test_a_gpu_is_kept_busy_while_the_host_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer is cleared as often as the host needs; only the step lies between two events."""
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(step_timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    buffer: Any = SimpleNamespace(zero_=lambda: clock.after(1e-3))

    def turns(seconds: float) -> step_timing._GpuTurns:
        return step_timing._GpuTurns(_squaring(lambda x: clock.after(seconds, x * x)), buffer)

    least, most = step_timing.GPU_REPEAT
    quick, slow = turns(1e-4), turns(5.2e-3)
    assert (quick.clears, slow.clears) == (2, 9)  # 1 and 1.5 times what the host needs
    assert (quick.count, slow.count) == (most, least)
    for forward, backward in slow.repeat():
        assert (forward, backward) == (pytest.approx(5.2e-3), 0.0)


def test_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


def failing(message: str, kind: type[Exception] = RuntimeError) -> Any:
    def raising(*_: Any) -> Any:
        raise kind(message)

    return raising


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("f_cuda does not have a deterministic implementation, but you set 'torch...'"),
         "raises: f_cuda does not have a deterministic implementation"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (RuntimeError("can't allocate memory: you tried to allocate 4 bytes"), "out of memory"),
        (ValueError("no compiler.\nand a trace"), "ValueError: no compiler"),
    ],
)  # fmt: skip
def test_a_reason_is_one_line(error: Exception, reason: str) -> None:
    assert models.reason_of(error) == reason


def test_a_failing_peer_does_not_lose_the_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        DeterministicStep, "backward", failing("b does not have a deterministic implementation")
    )
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: failing("no C++ compiler\nand a trace"))
    stored = tmp_path / "out.json"
    result = run("--only", "decoder.*float32", "--json", str(stored))
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "n/a, compiled: RuntimeError: no C++ compiler." in shown
    assert "n/a, deterministic: raises: b does not have a deterministic implementation." in shown
    (row,) = json.loads(stored.read_text())["rows"]
    assert row["steps"][OURS]["step"]["median"] > 0
    assert row["steps"][DETERMINISTIC] == {"reason": "raises: b does not have a deterministic implementation"}


def test_the_formula_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the backend aot_eager, because inductor needs a C++ compiler."""
    compiling = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic: compiling(function, dynamic=dynamic, backend="aot_eager")
    )
    row = models._row(DECODER.at(4096), CPU, True)
    assert row.reasons == {} and row.times[COMPILED].backward.median > 0


def test_a_failing_row_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = GridSampleModel.steps

    def steps(self: GridSampleModel, device: torch.device) -> dict[str, Step]:
        if "encoder" in self.model:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(self, device)

    monkeypatch.setattr(GridSampleModel, "steps", steps)
    stored = tmp_path / "out.json"
    result = run("--no-compile", "--only", "DETR.*float32", "--json", str(stored))
    assert result.exit_code == 1
    assert "Not timed: grid_sample: Deformable-DETR encoder" in result.output
    assert "out of memory" in result.output
    encoder, decoder = json.loads(stored.read_text())["rows"]
    assert encoder["steps"] == {OURS: {"reason": "out of memory"}}
    assert decoder["steps"][OURS]["step"]["median"] > 0


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GridSampleModel.steps

    def wrong(self: GridSampleModel, device: torch.device) -> dict[str, Step]:
        steps = right(self, device)
        ours = steps[OURS]
        return {**steps, OURS: Step(lambda *given: 1.01 * ours.function(*given), ours.inputs, ours.dout)}

    monkeypatch.setattr(GridSampleModel, "steps", wrong)
    result = run("--no-compile", "--only", "decoder.*float32")
    assert result.exit_code == 1
    assert "the result differs from torch's by 0.01 of its norm" in " ".join(result.output.split())


def test_memory_is_shown_as_a_multiple_of_the_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    row = ModelRow(DECODER, "small")
    row.times = step_times({OURS: _squaring(), EAGER: _squaring()}, CPU)
    row.host = {OURS: Spread(1e-5, 2e-5, 3e-5), EAGER: Spread(1e-5, 1e-5, 1e-5)}
    row.memory = {OURS: Memory(300, 250, 100), EAGER: Memory(200, 150, 100)}
    report = ModelReport("a device", None, [row])
    report.print(Console(width=200))
    shown = capsys.readouterr().out
    assert "2.50 / 1.50" in shown and "20 us, 2.00x" in shown
    assert report.to_json()["rows"][0]["steps"][OURS]["memory"] == {
        "step": 300, "backward": 250, "gradients": 100,
    }  # fmt: skip
    assert json.loads(json.dumps(report.to_json())) == report.to_json()


def test_a_narrow_terminal_shows_each_case_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    long = BAGS.at(4096)
    rows = [ModelRow(case, "small", reasons={COMPILED: "left out"}) for case in (DECODER, long)]
    rows[0].times = step_times({OURS: _squaring(), EAGER: _squaring()}, CPU)
    rows[1].reasons[OURS] = "it failed"
    ModelReport("a device", 2, rows).print(Console(width=40))
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("grid_sample, float32")
    assert lines[place + 1].split() == ["forward", "backward", "eager"]
    assert lines[place + 2] == f"{DECODER.model}, {DECODER.label}"
    assert " us  " in lines[place + 3] and lines[place + 3].count("x") == 2
    place = lines.index(f"{long.model}, {long.label}")
    assert lines[place + 1].split() == ["n/a"] * 3
    assert any(line.startswith("Not timed: embedding_bag: ") for line in lines)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this needs a CUDA device")
def test_device_time_and_memory_on_a_gpu() -> None:
    row = models._row(DECODER.at(2**20), torch.device("cuda"), False)
    assert row.times.keys() == {OURS, EAGER} == row.memory.keys()
    assert row.reasons[DETERMINISTIC].startswith("raises")
    assert all(0 < times.backward.median < 0.01 for times in row.times.values())
    assert all(memory.backward >= memory.gradients > 0 for memory in row.memory.values())
    assert row.memory[OURS].gradients == row.memory[EAGER].gradients

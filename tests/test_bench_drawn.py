"""Tests of ``holdfast bench --drawn``: ratios to torch on problems of random sizes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from holdfast.bench import step_timing
from holdfast.bench.drawn import CPU_BYTES, POOL, TOLERANCE, drawn_cases
from holdfast.bench.drawn_report import DrawnReport, DrawnRow
from holdfast.bench.models import distance
from holdfast.cli import app
from holdfast.core.random_sizes import LEAST_BYTES, RandomSizes
from holdfast.core.training_step import COMPILED, EAGER, OURS, Step
from holdfast.ops.embedding.models import EmbeddingModel

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
FUNCTIONS = {
    "affine_grid", "dequantize", "dynamic_fake_quantize", "embedding", "embedding_bag", "fake_quantize",
    "fake_quantize learned", "gather", "grid_sample 2-D", "grid_sample 3-D", "index_add", "index_put",
    "index_select", "interpolate", "quantize", "scatter_add", "scatter_reduce",
}  # fmt: skip
#: A small float32 problem of each function.
SMALL = {case.op: case for case in reversed(drawn_cases(2, 5, 2**13)) if case.real == torch.float32}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few repetitions."""
    monkeypatch.setattr(step_timing, "CPU_TURNS", 2)
    monkeypatch.setattr(step_timing, "CPU_WARMUP", 1)


def run(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", *options], env={"COLUMNS": "200"})


def test_a_seed_draws_the_same_problems_again() -> None:
    first, again, other = (drawn_cases(3, seed, CPU_BYTES) for seed in (7, 7, 8))
    assert first == again and len(first) >= 3 * POOL
    assert not {case.name for case in first} & {case.name for case in other}
    counts = Counter(case.op for case in first)
    assert counts.keys() == FUNCTIONS and len(set(counts.values())) == 1
    more = drawn_cases(4, 7, CPU_BYTES)
    assert more[: len(first)] == first


def test_sizes_are_spread_over_the_range() -> None:
    made = [RandomSizes(str(number), 2**20) for number in range(300)]
    totals = [sizes.elements * sizes.real.itemsize for sizes in made]
    assert LEAST_BYTES - 4 <= min(totals) and max(totals) <= 2**20
    assert 80 < sum(total < 2**15 for total in totals) < 220  # half of them, by the logarithm
    for sizes in made:
        assert 3 <= sizes.size(3, 100) <= 100 and sizes.size(5, 5) == 5 and sizes.size(2, 1) == 2
        image = sizes.image(sizes.elements, 3)
        assert len(image) == 3 and 1 <= min(image) and torch.Size(image).numel() <= sizes.elements


@pytest.mark.parametrize("function", sorted(FUNCTIONS))
def test_every_problem_does_the_work_of_its_peers(function: str) -> None:
    steps = SMALL[function].steps(CPU)
    assert distance(steps[OURS], steps[COMPILED]) <= TOLERANCE
    if function not in ("quantize", "dequantize"):
        assert distance(steps[OURS], steps[EAGER]) <= TOLERANCE
        assert steps[OURS].leaves


def test_the_operators_of_torch_quantize_the_same_values() -> None:
    quantizing, dequantizing = (SMALL[name].steps(CPU) for name in ("quantize", "dequantize"))
    codes = quantizing[EAGER].forward()
    assert torch.equal(codes.int_repr(), quantizing[OURS].forward())
    torch.testing.assert_close(dequantizing[EAGER].forward(), dequantizing[OURS].forward())
    assert quantizing[OURS].backward(codes) == ()


def test_problems_are_within_the_limit() -> None:
    limit = 2**16
    for case in drawn_cases(1, 3, limit):
        step = case.steps(CPU)[OURS]
        tensors = [value for value in (*step.inputs, step.dout) if isinstance(value, torch.Tensor)]
        total = sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())
        assert 2**7 < total <= 4 * limit, case.name


def test_it_prints_ratios_and_writes_json(tmp_path: Path) -> None:
    stored = tmp_path / "out.json"
    options = ("--elements", "4096", "--only", "embedding:|quantize:", "--dtype", "float32")
    result = run("--drawn", "5", "--seed", "5", *options, "--json", str(stored))
    assert result.exit_code == 0, result.output
    assert "random problems, seed 5" in result.output and "Lowest ratios" in result.output
    given = json.loads(stored.read_text())
    report = DrawnReport(**{**given, "rows": [DrawnRow(**row) for row in given["rows"]]})
    assert report.to_json() == given and report.complete and report.drawn == 5 == len(report.rows)
    for row in report.rows:
        assert row.name in result.output and row.name.endswith("float32")
        parts = {"forward"} if row.function in ("quantize", "dequantize") else {"forward", "backward"}
        assert row.seconds.keys() == parts
        for taken in row.seconds.values():
            assert taken.keys() == {OURS, EAGER} and min(taken.values()) > 0


def test_it_stops_after_the_given_time() -> None:
    result = run("--drawn", "9", "--elements", "4096", "--only", "embedding:", "--seconds", "1e-6")
    assert result.exit_code == 0, result.output
    assert "Stopped after 1 of 9 problems" in result.output


def test_failures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EmbeddingModel.steps

    def steps(self: EmbeddingModel, device: torch.device) -> dict[str, Step]:
        made = right(self, device)
        ours, eager = made[OURS], made[EAGER]
        if self.spread == "zipf":
            return {**made, OURS: Step(lambda *given: 2 * ours.function(*given), ours.inputs, ours.dout)}
        return {**made, EAGER: Step(lambda *given: eager.function(0), eager.inputs, eager.dout)}

    monkeypatch.setattr(EmbeddingModel, "steps", steps)
    result = run("--drawn", "4", "--elements", "4096", "--only", "embedding:")
    shown = " ".join(result.output.split())
    assert result.exit_code == 1
    assert "Not timed: embedding: V=" in shown and "the result differs from torch's by 1 of its norm" in shown
    assert "of embedding: TypeError: " in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drawn", "3", "--models"), "--drawn and --models are both given"),
        (("--seed", "3"), "--seed is given without --drawn"),
        (("--seconds", "3"), "--seconds is given without --drawn"),
        (("--drawn", "3", "--only", "nothing"), "matches none"),
        (("--drawn", "3", "--dtype", "float64"), "the cases have bfloat16, float32"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: tuple[str, ...], message: str) -> None:
    result = run(*options)
    assert result.exit_code != 0 and message in f"{result.exception} {result.output}"


def test_quartiles_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    def row(function: str, ours: float) -> DrawnRow:
        return DrawnRow(function, f"{function} of {ours}", {"forward": {OURS: ours, EAGER: 1e-3}})

    backward = {"forward": {OURS: 2e-3, EAGER: 1e-3}, "backward": {OURS: 1e-3, EAGER: 3e-3}}
    rows = [row("f", ours) for ours in (4e-3, 1.25e-3, 0.5e-3, 0.25e-3, 1e-3)] + [
        DrawnRow("g", "g of 0.002", backward)
    ]
    DrawnReport("a device", None, 0, 6, rows=rows).print(Console(width=80))
    lines = [line.split() for line in capsys.readouterr().out.replace("│", " ").splitlines()]
    assert ["f", "forward", "5", "0.80", "1.00", "2.00", "2", "1"] in lines
    assert ["backward", "3.00", "3.00", "3.00", "0", "0"] in lines
    assert ["all", "forward", "6", "0.57", "0.90", "1.75", "3", "1"] in lines
    assert lines.index(["f", "of", "0.004", "forward", "1", "ms", "4", "ms", "0.25x"]) < lines.index(
        ["g", "of", "0.002", "forward", "1", "ms", "2", "ms", "0.50x"]
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this needs a CUDA device")
def test_host_time_is_measured_on_a_gpu() -> None:
    result = CliRunner().invoke(
        app, ["bench", "--device", "cuda", "--drawn", "1", "--elements", "4096", "--only", "embedding:"]
    )
    assert result.exit_code == 0 and "host" in result.output

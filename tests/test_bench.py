"""Tests of the benchmark: it runs on any machine, reports ratios, and does not time a wrong kernel."""

from __future__ import annotations

import json
import re
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from holdfast.bench import command, timing
from holdfast.bench.cases import cpu_cases, full_cases, quick_cases
from holdfast.bench.check import differences
from holdfast.bench.peers import peer
from holdfast.cli import app
from holdfast.core import formats
from holdfast.core.benchmark import Case, NoPeer
from holdfast.core.plan import Plan
from holdfast.core.stream import CPU_STREAM
from holdfast.ops.affine.benchmark import LAYOUTS
from holdfast.ops.dequantize import bench as dequantization
from holdfast.ops.fake_quantize import bench as fake_quantization
from holdfast.ops.fake_quantize_learned import bench as learned
from holdfast.ops.quantize import bench as quantization
from holdfast.ops.quantize.bench import OPS, QuantizeCase
from holdfast.ops.quantize.plan import QuantizePlan

INT4 = formats.INT4.torch
TINY = "4096"

#: Ops where torch rounds differently (a tanh, a sum): the same work, but not the same bits.
ROUNDED_OTHERWISE = ("fake_quantize backward tanh", "fake_quantize learned")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few repetitions, and no torch.compile unless a test asks for it."""
    monkeypatch.setattr(timing, "CPU_WARMUP", 1e-3)
    monkeypatch.setattr(timing, "CPU_SECONDS", 1e-3)
    monkeypatch.setattr(timing, "QUICK_SECONDS", 1e-3)
    monkeypatch.setattr(command, "COPY_ELEMENTS", 2**16)
    monkeypatch.setattr(command, "peer", without_compiler)


def without_compiler(kind: str, *given: Any) -> Any:
    if kind == "compiled":
        raise RuntimeError("no C++ compiler here\nand a long trace")
    return peer(kind, *given)


def run(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--elements", TINY, *options])


def test_it_prints_ratios_and_writes_json(tmp_path: Path) -> None:
    result = run("--quick", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert "of copy" in result.output and "x" in result.output and "%" in result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report["versions"]) == {"python", "holdfast", "torch", "triton", "numba", "numpy"}
    assert report["device"] and report["date"] and report["copy_bytes_per_second"] > 0
    assert [row["name"] for row in report["rows"]] == [case.at(int(TINY)).name for case in quick_cases()]
    for row in report["rows"]:
        assert row["seconds"] > 0 and row["of_copy"] > 0 and row["bytes_moved"] > 4096
        eager = row["peers"]["eager"]
        assert eager["speedup"] == pytest.approx(eager["seconds"] / row["seconds"])


def test_a_failing_peer_is_a_reason_not_a_crash() -> None:
    result = run("--only", "^quantize per group of 32, f32")
    assert result.exit_code == 0, result.output
    assert "n/a" in result.output
    assert "RuntimeError: no C++ compiler here." in result.output
    assert "long trace" not in result.output


def test_a_quick_run_does_not_wait_for_a_compiler() -> None:
    result = run("--quick", "--only", "quantize per group")
    assert result.exit_code == 0, result.output
    assert "left out of a quick run" in " ".join(result.output.split())
    assert "no C++ compiler" not in result.output


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Plan.run

    def off_by_one(self: Plan[Any, Any], stream: Any, workspace: Any, args: Any) -> None:
        right(self, stream, workspace, args)
        if self.backend != "reference":
            args.q.view(-1)[-1] += 1

    monkeypatch.setattr(QuantizePlan, "run", off_by_one)
    result = run("--quick", "--only", "quantize per tensor|dequantize")
    assert result.exit_code == 1
    assert "Not timed: quantize per tensor" in result.output
    assert "1 elements differ" in " ".join(result.output.split())
    assert "dequantize per channel" in result.output


@pytest.mark.parametrize("elements", ["1000", "2048", "-4096"])
def test_odd_sizes_are_refused(elements: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--elements", elements])
    assert result.exit_code == 2


def test_the_cases_are_all_there() -> None:
    full = [*quantization.full_cases(), *dequantization.full_cases()]
    assert len(set(full)) == len(full)
    for op in (*OPS, "dequantize"):
        for layout in LAYOUTS:
            pairs = [(c.real, c.codes, c.packed) for c in full if (c.op, c.label) == (op, layout)]
            assert pairs == [
                (torch.float32, torch.int8, False),
                (torch.bfloat16, torch.int8, False),
                (torch.bfloat16, INT4, True),
            ]


@pytest.mark.parametrize(
    "case", [*full_cases(), *(c for c in cpu_cases() if c.function)], ids=lambda c: c.name
)
def test_every_case_passes_its_check(case: Case) -> None:
    assert differences(case, CPU_STREAM, case.problem(4096, CPU_STREAM).plan.backend) == 0


@pytest.mark.parametrize("case", full_cases(), ids=lambda c: c.name)
def test_the_peers_do_the_same_work(case: Case) -> None:
    """On ordinary values the plain formula equals the op, so the comparison is fair."""
    problem = case.problem(2**14, CPU_STREAM, "reference")
    tensors = problem.draw()
    formula, inputs = problem.formula(tensors)
    made, right = formula(*inputs), problem.call(tensors)()
    for one, other in zip(made if isinstance(made, tuple) else (made,), right, strict=True):
        if case.name.startswith(ROUNDED_OTHERWISE):
            torch.testing.assert_close(one, other)
        else:
            assert one.equal(other)


@pytest.mark.parametrize("case", full_cases(), ids=lambda c: c.name)
def test_a_row_says_what_it_is(case: Case) -> None:
    facts = case.facts()
    assert {"family", "real_dtype", "dtypes"} <= set(facts)
    assert case.name.startswith(case.op) and case.label in case.name
    assert json.loads(json.dumps(facts)) == facts


def test_names_of_cases_differ() -> None:
    for cases in (full_cases(), cpu_cases(), quick_cases()):
        assert len({case.name for case in cases}) == len(cases)


def test_a_case_may_have_peers_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing() -> Any:
        raise NoPeer("it is not installed")

    others = {"rival": lambda: lambda: None, "absent": failing}
    monkeypatch.setattr(quantization.QuantizeProblem, "other_peers", lambda self, tensors: others)
    result = run("--quick", "--only", "^quantize per tensor", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert "rival" in result.output and "n/a, absent: it is not installed." in result.output
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["peers"]["rival"]["speedup"] > 0
    assert row["peers"]["absent"] == {"reason": "it is not installed"}


@pytest.mark.parametrize("layout", ["per tensor", "per channel, axis 0", "per channel, middle"])
def test_torch_operators_do_the_same_work(layout: str) -> None:
    problem = QuantizeCase("quantize", layout, torch.float32, torch.int8).problem(
        2**14, CPU_STREAM, "reference"
    )
    tensors = problem.draw()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*quantize_per_", UserWarning)  # torch deprecates these operators
        made: Any = peer("torch op", problem, tensors)()
    # torch multiplies by 1 / scale, so near a tie it may differ by one code.
    assert (made.int_repr().int() - problem.call(tensors)()[0].int()).abs().max() <= 1


@pytest.mark.parametrize(
    "case",
    [*fake_quantization.cpu_cases(), *learned.cpu_cases()],
    ids=lambda case: case.name,
)
def test_torch_fakes_quantization_the_same_way(case: Case) -> None:
    problem = case.problem(2**14, CPU_STREAM, "reference")
    tensors = problem.draw()
    try:
        made: Any = peer("torch op", problem, tensors)()
    except NoPeer:
        assert "group" in case.variant or "in_range" not in case.op
        return
    right = problem.call(tensors)()
    for one, other in zip(made if isinstance(made, tuple) else (made,), right, strict=False):
        torch.testing.assert_close(one.reshape(other.shape), other)


def test_torch_has_no_operator_for_groups() -> None:
    problem = QuantizeCase("quantize", "per group of 32", torch.float32, torch.int8).problem(
        2**14, CPU_STREAM
    )
    with pytest.raises(NoPeer, match="granularity"):
        peer("torch op", problem, problem.draw())


def test_the_compiled_peer_does_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the backend aot_eager, because inductor needs a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    case = QuantizeCase("quantize", "per group of 32", torch.bfloat16, INT4, packed=True)
    problem = case.problem(2**14, CPU_STREAM, "reference")
    tensors = problem.draw()
    made: Any = peer("compiled", problem, tensors)()
    assert made.equal(problem.call(tensors)()[0])


def test_calls_take_turns_on_the_cpu() -> None:
    order: list[str] = []
    calls = {name: partial(order.append, name) for name in ("ours", "theirs")}
    taken = timing.median_seconds(calls, torch.device("cpu"), 1)
    assert taken.keys() == calls.keys() and all(seconds > 0 for seconds in taken.values())
    changes = [after for before, after in pairwise(order) if after != before]
    # The warm-up counts as one turn.
    assert changes == ["theirs", "ours"] * timing.CPU_TURNS + ["theirs"]


def test_what_takes_long_is_still_timed_in_every_turn() -> None:
    order: list[str] = []

    def slowly() -> None:
        order.append("slow")
        time.sleep(0.01)

    calls = {"slow": slowly, "fast": partial(order.append, "fast")}
    assert timing.median_seconds(calls, torch.device("cpu"), 1)["slow"] >= 0.01
    assert sum(before != after == "slow" for before, after in pairwise(order)) == timing.CPU_TURNS


#: Those whose names say sizes.
SIZED = [case for case in full_cases() if re.search(r"[NVD]=?\d|bags", case.label)]


@pytest.mark.parametrize("case", SIZED, ids=lambda c: c.name)
@pytest.mark.parametrize("elements", [2**12, 2**16, 2**40])
def test_a_label_says_the_sizes_that_run(case: Case, elements: int) -> None:
    """Every number of a label is a size of the problem that runs under it."""
    sized = case.at(elements)
    assert sized.at(elements) == sized
    if elements == 2**40:
        assert sized == case, "nothing is made larger"
        return
    problem = sized.problem(elements, CPU_STREAM, "reference")
    encoded = json.loads(problem.plan.descriptor.to_json())
    sizes = {n for value in encoded.values() for n in (value if isinstance(value, list) else [value])}
    length = getattr(sized, "length", 1)
    sizes |= {n // length for n in sizes if isinstance(n, int)} | {length}
    said = {int(number) for number in re.findall(r"\d+", sized.label)}
    assert said <= sizes


def test_a_percentage_above_100_is_explained() -> None:
    result = run("--quick", "--only", "^quantize per tensor")
    assert "It may be above 100 %" in " ".join(result.output.split())


def test_memory_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    monkeypatch.setattr(command, "_row", none_left)
    result = run("--quick", "--only", "^quantize per tensor")
    assert result.exit_code == 1
    assert "There is no memory for 4096 elements" in " ".join(result.output.split())

"""Tests of the command line: output and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fresh
import holdfast as hf
from holdfast.cli import app
from holdfast.core.contract import printed_bound
from holdfast.core.declaration import Implementation
from holdfast.core.plan import Launch
from holdfast.ops.quantize.reference import Quantize
from holdfast.proof import catalogue, digests
from holdfast.proof import verify as verification
from holdfast.proof.mutants import MUTANTS
from holdfast.proof.page import FILTERS

ONE_PLAN = ["verify", "--plan", "QuantizePerTokenPlan"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls the command line in a wide terminal, which does not wrap lines."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(app, list(words))


def test_no_command_shows_help(run: Any) -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    for command in ("plans", "explain", "warmup", "verify", "fuzz", "mutants", "bench", "demo"):
        assert command in shown.output


def test_the_package_can_be_run() -> None:
    called = [sys.executable, "-m", "holdfast", "plans", "--help"]
    shown = subprocess.run(called, capture_output=True, text=True, check=True).stdout
    assert "holdfast plans" in shown


def test_plans_lists_every_plan(run: Any) -> None:
    shown = run("plans")
    assert shown.exit_code == 0
    for name in hf.plans.all():
        assert name in shown.output
    assert "same bits everywhere" in shown.output
    assert "float16/32/64" in shown.output


def test_plans_as_json(run: Any) -> None:
    listed = {entry["plan"]: entry for entry in json.loads(run("plans", "--json").output)}
    assert sorted(listed) == sorted(hf.plans.all())
    entry = listed["QuantizePerChannelPlan"]
    assert entry["dtypes"]["input_dtype"] == ["bfloat16", "float16", "float32", "float64"]
    assert {"int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16"} <= set(
        entry["dtypes"]["output_dtype"]
    )
    assert entry["backends"] == ["cpu", "gpu", "reference"]
    assert entry["ulp"] == {"q": 1.0}
    assert entry["deterministic"] and entry["bit_stable"] == "everywhere"


def test_explain(run: Any) -> None:
    shown = run("explain", "QuantizePerChannelPlan", "shape=64,3,7,7", "axis=0", "input_dtype=bfloat16")
    assert shown.exit_code == 0
    assert '"shape": [64, 3, 7, 7]' in shown.output
    assert "quantize.forward[per_channel] bfloat16->int8 on cpu" in shown.output
    assert "could run, but comes later" in shown.output
    assert "workspace: 0 bytes" in shown.output
    assert f"moves: {64 * 3 * 7 * 7 * 3 + 4 * 64} bytes" in shown.output


def test_explain_with_a_granularity_and_an_estimator(run: Any) -> None:
    shown = run(
        "explain",
        "FakeQuantizeBackward",
        "shape=8,32",
        "granularity=per_group:16:-1",
        "dtype=int4",
        "ste=tanh",
    )
    assert shown.exit_code == 0, shown.output
    assert '"granularity": "per_group:16:-1"' in shown.output and '"ste": "tanh"' in shown.output
    assert "fake_quantize.backward[per_group, tanh]" in shown.output
    wrong = run("explain", "FakeQuantizeBackward", "shape=8,32", "dtype=int4", "ste=sigmoid")
    assert wrong.exit_code == 2 and "sigmoid" in wrong.stderr and "clipped_identity" in wrong.stderr


def test_explain_what_needs_a_workspace(run: Any) -> None:
    shown = run("explain", "FakeQuantizeLearnedBackward", "shape=512,4096", "dtype=int8")
    assert shown.exit_code == 0, shown.output
    assert "workspace: 0 bytes" not in shown.output
    assert "dscale within" in shown.output and "dzero_point within" in shown.output


def test_explain_lists_every_implementation(run: Any) -> None:
    shown = run("explain", "GridSampleBackward", "shape=2,8,33,35", "output_size=[31,37]", "--backend", "gpu")
    assert shown.exit_code == 0, shown.output
    rows = [line.split("│")[1:3] for line in shown.output.splitlines() if line.count("│") == 3]
    verdicts = {name.strip(): verdict.strip() for name, verdict in rows}
    assert verdicts == {
        "cpu": "the preference asks for gpu", "cpu lean": "the preference asks for gpu",
        "gpu": "runs, dinput by cell", "gpu lean": "could run, but comes later",
        "reference": "the preference asks for gpu",
    }  # fmt: skip


def test_explain_a_preferred_backend(run: Any) -> None:
    shown = run("explain", "DequantizePerTensor", "shape=", "packed=false", "--backend", "reference")
    assert shown.exit_code == 0
    assert "the preference asks for reference" in shown.output
    assert "on reference/numpy" in shown.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["QuantizePerChanelPlan", "shape=3"],
            "no plan called 'QuantizePerChanelPlan'; near it: QuantizePerChan",
        ),
        (["QuantizePerChannelPlan", "shape=3,4", "axis=2"], "axis 2 is out of range for shape (3, 4)"),
        (["QuantizePerChannelPlan", "shape=3,4"], "axis"),
        (["QuantizePerTensorPlan", "shape=3,x"], "a list of whole numbers"),
        (["QuantizePerTensorPlan", "shape"], "'shape' is not FIELD=VALUE"),
        (["QuantizePerTensorPlan", "shape=3", "colour=red"], "no field 'colour'"),
        (["QuantizePerTensorPlan", "shape=3", "output_dtype=int3"], "int3"),
        (["QuantizePerTensorPlan", "shape=3", "--backend", "tpu"], "no such backend"),
        (["QuantizePerTensorPlan", "shape=3", "--device", "toaster"], "toaster"),
    ],
)
def test_explain_refuses_with_a_sentence(run: Any, words: list[str], said: str) -> None:
    shown = run("explain", *words)
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert "Traceback" not in shown.output


def test_verify_one_plan(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    page = tmp_path / "proof.html"
    shown = run(*ONE_PLAN, "--json", str(file), "--report", str(page))
    assert shown.exit_code == 0, shown.output
    assert "every bit equal" in shown.output
    mutants = sum(mutant.fits(hf.plans.QuantizePerTokenPlan) for mutant in MUTANTS)
    assert f"mutants caught {mutants}/{mutants}" in shown.output
    found = json.loads(file.read_text())
    assert found["passed"]
    (plan,) = found["plans"]
    assert plan["plan"] == "QuantizePerTokenPlan"
    assert plan["cases"] == len(digests.pinned()["QuantizePerTokenPlan"])
    assert plan["mutants_caught"] == plan["mutants"] == mutants
    assert plan["digests"] == digests.pinned()["QuantizePerTokenPlan"] and plan["pinned"] == plan["cases"]
    assert plan["promise"]["compute_dtypes"] == ["float32", "float64"]
    assert plan["promise"]["accumulator_dtypes"] and plan["promise"]["rounding"]
    assert found["machine"]["cpu"] and found["machine"]["versions"]["torch"] == torch.__version__
    assert found["numerics_version"] == hf.NUMERICS_VERSION and found["date"] and found["fuzz"] is None
    assert "QuantizePerToken" in page.read_text() and "✓ held" in page.read_text()
    assert shown.output.count("checking QuantizePerTokenPlan") == 1, "a line for each plan"


def test_verify_refuses_a_plan_that_is_not_there(run: Any) -> None:
    shown = run("verify", "--plan", "NoSuchPlan")
    assert shown.exit_code == 2
    assert "no plan called 'NoSuchPlan'" in shown.stderr


class WrongQuantize(Quantize):
    """A CPU kernel with one wrong code in int8 tensors of one shape."""

    def prepare(self, args: Any) -> Launch[Any]:
        right = super().prepare(args)

        def launch(stream: Any, workspace: Any, args: Any, addresses: Any) -> None:
            right(stream, workspace, args, addresses)
            if args.q.shape == (33, 1021) and args.q.dtype == torch.int8:
                args.q[32, 7] += 1

        return launch


def put_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Implementation("cpu", f"{__name__}:WrongQuantize")
    others = [way for way in hf.plans.QuantizePerTokenPlan.kernels if way.backend != "cpu"]
    monkeypatch.setattr(hf.plans.QuantizePerTokenPlan, "kernels", [wrong, *others])


def test_verify_exits_1_on_a_difference(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wrong_kernel(monkeypatch)
    shown = run(*ONE_PLAN, "--json", "-")
    assert shown.exit_code == 1
    found = json.loads(shown.stdout)
    assert not found["passed"]
    differences = found["plans"][0]["differences"]
    assert {difference["case"] for difference in differences} == {"many elements"}
    assert {difference["way"] for difference in differences} == {
        "cpu on 1 thread", "cpu on 2 threads", "cpu on 8 threads"
    }  # fmt: skip
    assert "q[32, 7]" in differences[0]["detail"]
    assert "(1 differ)" in differences[0]["detail"]
    assert "QuantizePerTokenPlan, case 'many elements', cpu on 1 thread: q[32, 7]" in shown.stderr


def test_verify_exits_1_on_another_digest(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = {name: dict(known) for name, known in digests.pinned().items()}
    pinned["QuantizePerTokenPlan"]["square"] = "0" * 16
    monkeypatch.setattr(digests, "pinned", lambda: pinned)
    shown = run(*ONE_PLAN)
    assert shown.exit_code == 1
    assert "case 'square', digest" in shown.output
    assert "0" * 16 in shown.output


def test_digests_are_written_on_demand(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = digests.pinned()
    monkeypatch.setattr(digests, "path", lambda plan: tmp_path / "digests" / f"{plan.__name__}.json")
    digests.pinned.cache_clear()
    try:
        assert run(*ONE_PLAN).exit_code == 1, "nothing is pinned yet"
        assert run(*ONE_PLAN, "--write-digests").exit_code == 0
        assert digests.pinned() == {"QuantizePerTokenPlan": kept["QuantizePerTokenPlan"]}
        assert run(*ONE_PLAN).exit_code == 0
    finally:
        digests.pinned.cache_clear()


def test_no_compiler_is_imported_to_list_plans() -> None:
    program = """
import sys
from typer.testing import CliRunner
from holdfast.cli import app
for words in (["--help"], ["plans"], ["plans", "--json"], ["explain", "--help"]):
    assert CliRunner().invoke(app, words).exit_code == 0
print([name for name in ("numba", "triton") if name in sys.modules])
CliRunner().invoke(app, ["explain", "QuantizePerTensorPlan", "shape=3"])
print([name for name in ("numba", "triton") if name in sys.modules])
"""
    done = fresh.run(program, check=True)
    before, after = done.stdout.splitlines()
    assert before == "[]"
    assert "numba" in after, "the test can see an import"


def test_torch_is_as_it_was_after_verifying(run: Any) -> None:
    before = torch.get_num_threads()
    run(*ONE_PLAN)
    assert torch.get_num_threads() == before


def test_the_version_is_shown(run: Any) -> None:
    shown = run("--version")
    assert shown.exit_code == 0
    assert shown.output == f"holdfast {hf.__version__}, numerics version {hf.NUMERICS_VERSION}\n"


def test_explain_reads_the_json_that_it_prints(run: Any) -> None:
    first = run("explain", "GridSamplePlan", "shape=1,3,8,8", "output_size=16,16", "mode=bicubic")
    assert first.exit_code == 0, first.output
    printed = first.output.splitlines()[0].removeprefix("GridSamplePlan ")
    assert json.loads(printed)["output_size"] == [16, 16]
    again = run("explain", "GridSamplePlan", printed)
    assert again.exit_code == 0, again.output
    assert again.output == first.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["QuantizePerChannelPlan", '{"shape": [3'], "the descriptor is not JSON"),
        (["QuantizePerChannelPlan", "shape=3,4"], "QuantizePerChannelDescriptor needs axis (a whole number)"),
        (["QuantizePerTensorPlan", "shape=3", "shape=4"], "shape is given twice"),
        (["QuantizePerTensorPlan"], "needs shape (a list of whole numbers)"),
        (["QuantizePerTensorPlan", "shape"], "'shape' is not FIELD=VALUE"),
    ],
)
def test_an_error_of_explain_is_one_sentence(run: Any, words: list[str], said: str) -> None:
    shown = run("explain", *words)
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert "__init__" not in shown.stderr
    assert shown.stderr.count("error ") == 1 and "error 2" not in shown.stderr


def test_only_plans_that_are_near_are_called_near(run: Any) -> None:
    far = run("verify", "--plan", "Foo")
    assert far.exit_code == 2
    assert "there is no plan called 'Foo'. `holdfast plans` lists them all." in far.stderr
    near = run("verify", "--plan", "gridsample")
    assert "near it: GridSamplePlan" in near.stderr and "Embedding" not in near.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "--only", "["], "'[' is no regular expression"),
        (["bench", "--only", "nothing"], "'nothing' matches none of the"),
        (["bench", "--dtype", "float8"], "'float8'; the cases have bfloat16, float32"),
        (["bench", "--models", "--only", "nothing"], "'nothing' matches none of the"),
        (["bench", "--models", "--dtype", "int8"], "'int8'; the cases have bfloat16, float32"),
        (["bench", "--models", "--elements", "1000"], "it must be a power of two"),
        (["bench", "--device", "toaster"], "accepted are cpu and cuda devices"),
        (["bench", "--elements", "1000"], "it must be a power of two"),
        (["bench", "--json", "/nowhere/file"], "there is no folder /nowhere"),
        (["fuzz", "--json", "/nowhere/file"], "there is no folder /nowhere"),
        (["mutants", "--json", "/nowhere/file"], "there is no folder /nowhere"),
        (["verify", "--report", "/tmp"], "it is a folder"),
        (["warmup", "--plan", "Foo"], "there is no plan called 'Foo'"),
        (["warmup", "--device", "toaster"], "accepted are cpu and cuda devices"),
    ],
)
def test_a_bad_option_gets_a_sentence(run: Any, words: list[str], said: str) -> None:
    shown = run(*words)
    assert shown.exit_code == 2 and said in shown.stderr, shown.output
    assert isinstance(shown.exception, SystemExit)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["bench", "warmup"])
def test_a_gpu_that_is_not_there_gets_a_sentence(run: Any, command: str) -> None:
    shown = run(command, "--device", "cuda")
    assert shown.exit_code == 2 and "sees no CUDA device" in shown.stderr, shown.output


def test_a_file_that_cannot_be_written_at_the_end_gets_a_sentence(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "out.json")

    stored = tmp_path / "found.json"
    assert run(*ONE_PLAN, "--json", str(stored)).exit_code == 0
    monkeypatch.setattr(Path, "write_text", full)
    shown = run("verify", "--from", str(stored), "--json", str(tmp_path / "out.json"))
    assert shown.exit_code == 2
    assert "out.json cannot be used: No space left on device." in shown.stderr


@pytest.mark.parametrize(
    ("ulp", "shown"),
    [
        (0.5, "0.5"),
        (1.0, "1"),
        (0.50000001, "0.5001"),
        (16777.21612, "16777.2162"),
        (2.0**53 + 2, "9007199254740994"),
        (float("inf"), "inf"),
    ],
)
def test_a_bound_is_rounded_up(ulp: float, shown: str) -> None:
    assert printed_bound(ulp) == shown
    assert float(shown) >= ulp
    assert FILTERS["bound"] is printed_bound, "on the page as well"


def test_digests_of_a_wrong_kernel_are_not_written_and_that_is_said(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(digests, "write", written.append)
    assert "digests of 1 plans" in run(*ONE_PLAN, "--write-digests").output and len(written) == 1
    put_wrong_kernel(monkeypatch)
    shown = run(*ONE_PLAN, "--write-digests")
    assert shown.exit_code == 1 and len(written) == 1
    assert "no digests were written: a kernel differs from the reference" in shown.output


def test_a_plan_without_cases_is_listed_and_fails_verification(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (catalogue, verification):
        monkeypatch.setattr(module, "cases_of", lambda plan: [])
    shown = run("plans")
    assert shown.exit_code == 0, shown.output
    assert "the plan has no cases" in " ".join(shown.output.split())
    assert not json.loads(run("plans", "--json").output)[0]["deterministic"]
    checked = run(*ONE_PLAN)
    assert checked.exit_code == 1 and "the plan has no cases to check" in checked.output


def test_a_piped_verification_says_what_it_is_at() -> None:
    """A line for each plan, when it begins: the reader of a pipe need not wait for the end."""
    program = "from holdfast.cli import main; main()"
    words = ["verify", "--plan", "LsqInit", "--plan", "Embedding"]
    command = [sys.executable, "-c", program, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert process.poll() is None, "it is still at work"
        process.kill()
    assert first.startswith("checking ")


def test_a_plan_says_what_it_is() -> None:
    desc = hf.plans.QuantizePerChannelDescriptor(shape=(64, 3), axis=0, input_dtype=torch.bfloat16)
    plan = hf.plans.QuantizePerChannelPlan.select(hf.Stream.current("cpu"), desc)
    assert repr(plan) == (
        "<QuantizePerChannelPlan shape=[64, 3], input_dtype=bfloat16, axis=0 on cpu, cpu backend>"
    )


def test_a_kernel_that_is_compiled_ahead_is_found_on_disk(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    words = ["warmup", "--plan", "AffineGrid", "--jobs", "2", "--device", "cpu"]
    done = fresh.run("from holdfast.cli import main; main()", *words, env=environment)
    assert done.returncode == 0, done.stderr
    assert "AffineGridPlan (1 of 1)" in done.stdout and "1 plans are compiled for cpu" in done.stdout
    call = """
import torch, holdfast as hf
hf.affine_grid(torch.eye(2, 3)[None], [1, 1, 4, 4])
from holdfast.ops.affine_grid import cpu
from numba.core.dispatcher import Dispatcher
kernels = [k for k in vars(cpu).values() if isinstance(k, Dispatcher) and k.stats.cache_path]
print(sum(sum(k.stats.cache_hits.values()) for k in kernels), end=" ")
print(sum(sum(k.stats.cache_misses.values()) for k in kernels))
"""
    done = fresh.run(call, env=environment)
    hits, misses = done.stdout.split()
    assert int(hits) > 0 and int(misses) == 0, done.stderr


def test_a_narrow_terminal_loses_no_column(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    listed, verified = run("plans").output, run(*ONE_PLAN).output
    assert "guarantee" in listed and "bfloat16" in listed
    mutants = sum(mutant.fits(hf.plans.QuantizePerTokenPlan) for mutant in MUTANTS)
    assert "equal │" in verified and f"{mutants}/{mutants}" in verified


def test_fuzz_writes_json_to_stdout(run: Any) -> None:
    problem = '{"problem": {"name": "a", "granularity": "per_tensor", "shape": [3]}}'
    shown = run("fuzz", "--plan", "LsqInit", "--problem", problem, "--json", "-")
    assert shown.exit_code == 0 and json.loads(shown.stdout)["passed"]
    assert "every bit equal" in shown.stderr


def test_bench_needs_a_file_for_json(run: Any) -> None:
    shown = run("bench", "--quick", "--json", "-")
    assert shown.exit_code == 2 and "name a file" in shown.stderr

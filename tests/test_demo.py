"""Tests of ``holdfast demo``, at a small size."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core.machine import Machine
from holdfast.demo import data, deployment, run, training
from holdfast.demo.bars import Bars
from holdfast.demo.command import print_result
from holdfast.demo.deployment import Deployment
from holdfast.demo.page import page
from holdfast.proof.verify import Report
from test_page import Text, looked_at

ROWS = ("float32", "int8", "int4", "int2")
SMALLEST = replace(run.QUICK, plans=("LsqInitPlan",), images=96, float_epochs=1)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """The result of the command, and its page."""
    file = tmp_path_factory.mktemp("demo") / "demo.html"
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        result = CliRunner().invoke(app, ["demo", "--quick", "--report", str(file)])
    assert torch.get_num_threads() == threads and torch.get_rng_state().equal(state)
    yield result, file.read_text()


@pytest.fixture
def no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifies no plan."""
    proof = Report(["reference"], [], "no GPU", Machine.here(), "2026-11-16T01:02:03+00:00")
    monkeypatch.setattr(run, "verify", lambda *_, **__: proof)


def test_the_table_says_that_all_is_equal(shown: tuple[Any, str]) -> None:
    result, _ = shown
    assert result.exit_code == 0, result.output
    rows = {cells[0]: cells[1:] for cells in re.findall(r"│ (\w+) +│" + 5 * r" +(.*?) *│", result.output)}
    assert tuple(rows) == ROWS
    for name, (accuracy, size, digest, twice, deployed) in rows.items():
        assert accuracy.endswith("%") and re.fullmatch(r"[0-9a-f]{16}", digest) and twice == "equal"
        assert deployed == ("" if name == "float32" else "equal")
        rows[name] = int(size.replace(",", ""))
    assert rows["float32"] > 3 * rows["int8"] > 3 * 1.5 * rows["int4"] > 3 * 1.5 * 1.5 * rows["int2"]
    assert "every bit equal: 4 trainings, twice each; 1,896,624 codes and values" in result.output
    for stage in (
        "verify LsqInit",
        "train float32 twice",
        "train int2 twice",
        "convert, export",
    ):
        assert stage in result.output, "a line for each stage"


def test_the_page_is_whole_and_needs_nothing_beside_itself(shown: tuple[Any, str]) -> None:
    _, html = shown
    said = str(Text(html))
    assert "Every bit held" in said and "LsqInitPlan" in said
    for name in ROWS[1:]:
        assert f"{name} " in said
    assert html.count("<polyline") == 4 and html.count("<svg") == 2 + 4
    assert len(re.findall(r'<rect class="bar', html)) == 3 + 64 + 256 + 16 + 4, "estimators and histograms"
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|<img", html)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_looks_right_in_a_browser(
    browser: str, shown: tuple[Any, str], tmp_path: Path, dark: bool
) -> None:
    for width in (400, 1200):
        seen = looked_at(browser, shown[1], tmp_path, width, dark)
        assert seen["loaded"] == 0 and seen["wide"] <= 0 and seen["cut"] == [] and seen["faint"] == []


@pytest.mark.usefixtures("no_proof")
def test_an_unequal_training_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One image of the second training of int4 is another."""
    batches, calls = training.batches, []

    def other(count: int, epochs: int) -> Iterator[torch.Tensor]:
        calls.append(count)
        for chosen in batches(count, epochs):
            if len(calls) == 6:
                chosen[0] = (chosen[0] + 1) % count
            yield chosen

    monkeypatch.setattr(training, "batches", other)
    monkeypatch.setattr(deployment, "deploy", lambda model, images: Deployment(0))
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["demo", "--quick", "--report", str(tmp_path / "demo.html")])
    assert result.exit_code == 1
    assert len(re.findall(r"│ differs +│", result.output)) == 1
    assert re.search(r"differs int4 with in_range: digests \w+, \w+\n", result.output)
    assert "not equal: 4 trainings" in result.output
    html = (tmp_path / "demo.html").read_text()
    assert "Not every bit held." in str(Text(html)) and "differs: " in html


@pytest.mark.usefixtures("no_proof")
def test_a_missing_package_leaves_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise hf.export.MissingPackage("this needs onnxruntime")

    monkeypatch.setattr(hf.export, "onnx", missing)
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    console = Console(width=200, record=True, file=io.StringIO())
    result = run.run(SMALLEST, Bars(console))
    assert result.passed and all(made.quantizers == 0 for made in result.deployments.values())
    assert "scikit-learn is not installed" in result.data
    print_result(result, console)
    said = console.export_text()
    assert said.count("ONNX: not run") == 3 and "not deployed to ONNX: this needs onnxruntime" in said
    assert "ONNX was not run: this needs onnxruntime" in str(Text(page(result)))


def trained() -> torch.nn.Module:
    recipe, loaded = training.Recipe("int4", training.ESTIMATOR), data.load(96)
    return training.train(recipe, training.classifier(), loaded, 1, lambda: None)[0]


def test_other_codes_in_the_file_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    images, quantized = data.load(96).test_images[:8], hf.qat.quantized_weights

    def changed(model: torch.nn.Module) -> dict[str, Any]:
        weights = dict(quantized(model))
        codes = weights["5.weight"].codes.clone()
        codes[3, 7] ^= 1
        weights["5.weight"] = replace(weights["5.weight"], codes=codes)
        return weights

    model = trained()
    monkeypatch.setattr(deployment.hf.qat, "quantized_weights", changed)
    assert deployment.deploy(model, images).different == 1


def test_a_converted_model_with_other_outputs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    images, convert = data.load(96).test_images[:8], hf.qat.convert

    def wrong(model: torch.nn.Module) -> None:
        convert(model)[-1].bias.data[0] += 1

    monkeypatch.setattr(deployment.hf.qat, "convert", wrong)
    assert deployment.deploy(trained(), images).different == len(images)


def test_shapes_can_be_told_apart() -> None:
    images, labels = data.shapes(300)
    assert images.shape == (300, 1, 8, 8) and labels.unique().numel() == data.CLASSES
    assert data.shapes(300)[0].equal(images)


def test_a_page_that_cannot_be_written_is_refused_first() -> None:
    result = CliRunner().invoke(app, ["demo", "--report", "/nowhere/demo.html"])
    assert result.exit_code == 2 and "there is no folder /nowhere" in result.stderr


def test_bars_end_when_the_next_stage_begins() -> None:
    console = Console(force_terminal=True, file=io.StringIO())
    with Bars(console) as bars:
        bars.tell("one", 0, 4)
        bars.step()
        assert [task.completed for task in bars.progress.tasks] == [1]
        bars.tell("two", 0, 2)
    assert [(task.description, task.completed) for task in bars.progress.tasks] == [("one", 4), ("two", 2)]

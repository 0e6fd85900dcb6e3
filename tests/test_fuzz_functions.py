"""The fuzzer of public functions: counterparts are called, and planted mistakes are found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core import repeated
from holdfast.install import embedding as installed_embedding
from holdfast.proof.fuzz import Drawn, cuda, routes
from holdfast.proof.fuzz.check import Finding
from holdfast.proof.fuzz.functions import check_functions

ROWS = '{"problem": {"name": "rows", "shape": [%d], "rows": 50, "columns": 3, "spread": "zipf"}}'
#: Problems whose counterparts are known: by plan, and what is called.
PROBLEMS = {
    "EmbeddingPlan": (ROWS % 2000, {"the module", "torch served"}),
    "EmbeddingBackwardPlan": (ROWS % 2000, {"the module", "torch served"}),
    "EmbeddingBagPlan": (
        '{"problem": {"name": "bags", "shape": [40, 50], "rows": 60, "columns": 3, "mode": "max"}}',
        {"the module", "the maxima of segments", "torch served"},
    ),
    "EmbeddingBagBackwardPlan": (
        '{"problem": {"name": "bags", "shape": [40, 50], "rows": 60, "columns": 3, "mode": "mean"}}',
        {"the module", "torch served"},
    ),
    "ScatterPlan": (
        '{"problem": {"name": "rows", "shape": [20000], "table": [50], "width": 1, "dtype": "float64"}}',
        {"torch served"},
    ),
    "GatherPlan": (
        '{"problem": {"name": "elements", "shape": [200, 90], "table": [30, 90], "bad_index": "skip"}}',
        {"torch served"},
    ),
    "GridSamplePlan": (
        '{"problem": {"name": "images", "image": [3, 20, 30], "size": [9, 8], "dtype": "float64", '
        '"grid_dtype": "float64"}}',
        {"torch served"},
    ),
    "InterpolatePlan": (
        '{"problem": {"name": "images", "image": [2, 3, 20, 30], "size": [9, 8], "mode": "bilinear"}}',
        {"torch served"},
    ),
    "AffineGridPlan": ('{"problem": {"name": "grids", "size": [9, 8], "batch": 3}}', {"torch served"}),
    "FakeQuantizePlan": (
        '{"problem": {"name": "x", "granularity": "per_channel:0", "shape": [6, 70], "zero_point": "none"}}',
        {"the module"},
    ),
    "FakeQuantizeLearnedBackwardPlan": (
        '{"problem": {"name": "x", "granularity": "per_tensor", "shape": [6, 70], "zero_point": "none"}}',
        {"the module"},
    ),
    "DynamicFakeQuantizePlan": (
        '{"problem": {"name": "x", "granularity": "per_token", "shape": [6, 70]}}',
        {"the module"},
    ),
    "ChooseScalePlan": (
        '{"problem": {"name": "x", "granularity": "per_tensor", "shape": [6, 70]}}',
        {"the module"},
    ),
}


def called(plan: str, problem: str, device: str = "cpu") -> Finding | None:
    kind = hf.plans.all()[plan]
    return check_functions(kind, Drawn.from_json(kind, problem), device)


@pytest.mark.parametrize("plan", PROBLEMS)
def test_counterparts_have_the_bits_of_the_function(plan: str) -> None:
    problem, expected = PROBLEMS[plan]
    routes.take()
    assert called(plan, problem) is None
    assert set(routes.take()) == expected


def test_coordinates_that_are_not_finite_are_not_compared_with_torch() -> None:
    problem = (
        '{"problem": {"name": "not finite", "image": [1, 1, 1], "size": [1, 1], "dtype": "float64", '
        '"grid_dtype": "float64", "grid": "not finite"}}'
    )
    nowhere = torch.full((1, 1, 1, 2), torch.nan, dtype=torch.float64)
    image = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    assert torch.nn.functional.grid_sample(image, nowhere, align_corners=False).isnan().all()
    assert hf.grid_sample(image, nowhere).item() == 0
    assert called("GridSamplePlan", problem) is None


def test_a_wrong_result_of_a_replaced_function_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = installed_embedding._rows
    monkeypatch.setattr(installed_embedding, "_rows", lambda *given: right(*given) + 1)
    found = called("EmbeddingBackwardPlan", ROWS % 2000)
    assert found is not None and found.way == "torch's call 1 on cpu, served"


def test_a_wrong_call_that_is_passed_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of few terms is passed on, and float64 results are compared with torch's."""
    right = torch.Tensor.scatter_add_
    monkeypatch.setattr(
        torch.Tensor,
        "scatter_add_",
        lambda self, dim, index, src: right(
            self, dim, index, src if hf.status()["put_"].installed is False else src * 2
        ),
    )
    problem = '{"problem": {"name": "a", "shape": [101], "table": [50], "dtype": "float64"}}'
    found = called("ScatterPlan", problem)
    assert found is not None and "far from torch's" in found.detail and "passed on" in found.way


def test_a_wrong_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hf.nn.Embedding, "forward", lambda self, input: hf.embedding(input, self.weight, bad_index="skip") * 2
    )
    found = called("EmbeddingPlan", ROWS % 300)
    assert found is not None and found.way == "the module on cpu"


class CpuStream:
    """Stands in for a CUDA stream."""

    def wait_stream(self, other: Any) -> None:
        pass


@pytest.fixture
def cpu_for_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ways of CUDA on the CPU. A CUDA graph cannot be imitated."""
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    monkeypatch.setattr(cuda, "_LARGE", 2**20)
    monkeypatch.setattr(cuda, "_variant", lambda plan, drawn: "a variant")
    monkeypatch.setattr(cuda, "_CAPTURED", 2**60)
    monkeypatch.setattr(torch.cuda, "Stream", CpuStream)
    monkeypatch.setattr(torch.cuda, "current_stream", CpuStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr("holdfast.proof.fuzz.functions.check_counterparts", lambda *given: None)
    monkeypatch.setattr("holdfast.proof.fuzz.functions.MODERATE", {"cuda": 0})
    yield


@pytest.mark.parametrize("plan", PROBLEMS)
def test_the_ways_of_cuda_have_equal_bits(plan: str, cpu_for_cuda: None) -> None:
    routes.take()
    assert called(plan, PROBLEMS[plan][0], "cuda") is None
    assert routes.take() == {"a variant": 1}


def test_an_error_is_expected_in_the_ways_of_cuda(cpu_for_cuda: None) -> None:
    assert called("EmbeddingPlan", (ROWS % 2000).replace("zipf", "bad"), "cuda") is None


def test_a_repetition_that_reads_the_first_call_is_found(
    monkeypatch: pytest.MonkeyPatch, cpu_for_cuda: None
) -> None:
    right = repeated.repetition_of

    def stale(arguments: Any, *rest: Any) -> Any:
        again = right(arguments, *rest)
        return again and (lambda *given: None if again(*given) is None else again(*arguments))

    monkeypatch.setattr(repeated, "repetition_of", stale)
    found = called("EmbeddingPlan", ROWS % 2001, "cuda")
    assert found is not None and "other values" in found.way
    assert found.command.startswith("holdfast fuzz --functions --device cuda --plan EmbeddingPlan")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--device", "cuda"], "--device cuda is for --functions"),
        (["--functions", "--device", "tpu"], "accepted are cpu and cuda"),
        (["--functions", "--device", "cuda"], "torch finds no CUDA device"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(
    given: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["fuzz", *given])
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())

"""Builds the example op of CONTRIBUTING.md in a copy of the package. It needs its folder only."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fresh
import holdfast

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(holdfast.__file__).parent
FOLDER = "ops/scaled_add/"

Run = Callable[..., str]

pytestmark = pytest.mark.long


def files_of_example() -> dict[str, str]:
    """The files in CONTRIBUTING.md, by name."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.findall(r'^```python title="scaled_add/(\w+\.py)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    return {"__init__.py": "", **dict(found)}


def hashes(package: Path) -> dict[str, str]:
    """A digest of every file of a package except compiled files."""
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the example's folder in it."""
    copy = tmp_path_factory.mktemp("worked_example") / "holdfast"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    folder = copy / FOLDER
    folder.mkdir()
    for name, source in files_of_example().items():
        (folder / name).write_text(source)
    return copy


#: Runs commands, given as JSON, one after another.
COMMANDS = """
import json, sys
from holdfast.cli import app
for words in json.loads(sys.argv[1]):
    exit_code = app(words, standalone_mode=False)
    if exit_code:
        sys.exit(exit_code)
"""


@pytest.fixture(scope="module")
def run(package: Path) -> Run:
    """Runs commands of that copy in one process, with Triton's interpreter."""

    def run(*commands: str) -> str:
        found = fresh.run(
            COMMANDS, json.dumps([command.split() for command in commands]),
            env={**os.environ, "PYTHONPATH": str(package.parent), "TRITON_INTERPRET": "1", "COLUMNS": "200"},
        )  # fmt: skip
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    return run


def test_the_example_is_complete() -> None:
    names = {Path(name).stem for name in files_of_example()}
    assert names >= {
        "plan", "reference", "cpu", "gpu", "torch_op", "cases", "space", "calls", "mutants", "kernel_mutants",
        "bench",
    }  # fmt: skip


def test_it_is_listed_verified_fuzzed_and_timed(package: Path, run: Run, tmp_path: Path) -> None:
    before = hashes(package)
    assert "ScaledAddPlan" in run("plans", "verify --plan ScaledAdd --write-digests")
    report, fuzzed, timed = (tmp_path / f"{name}.json" for name in ("verify", "fuzz", "bench"))
    run(
        f"verify --plan ScaledAdd --json {report}",
        f"fuzz --plan ScaledAdd --seconds 1 --jobs 1 --interpret --json {fuzzed}",
        f"bench --device cpu --quick --only scaled_add --elements 65536 --json {timed}",
    )
    (plan,) = json.loads(report.read_text())["plans"]
    assert plan["cases"] == plan["pinned"] > 0 and plan["mutants_caught"] == plan["mutants"] >= 5
    assert json.loads(fuzzed.read_text())["problems"] > 0
    assert [row["op"] for row in json.loads(timed.read_text())["rows"]] == ["scaled_add"]
    after = hashes(package)
    assert {name for name in after if after[name] != before.get(name)} == {
        f"{FOLDER}digests/ScaledAddPlan.json"
    }


def test_its_mutants_are_caught(run: Run) -> None:
    assert "every mutant caught: 8/8" in run("mutants --plan ScaledAdd")


def test_its_function_is_public_and_differentiable(package: Path) -> None:
    program = """
import torch, holdfast as hf
x, y = (torch.randn(5, 7, requires_grad=True) for _ in range(2))
hf.scaled_add(x, y, alpha=0.5).sum().backward()
assert torch.equal(x.grad, torch.ones(5, 7)) and torch.equal(y.grad, torch.full((5, 7), 0.5))
assert torch.equal(hf.scaled_add(x, y, alpha=0.5), x + 0.5 * y)
assert hf.plans.ScaledAddPlan is hf.plans.all()["ScaledAddPlan"]
zero, one = torch.tensor([-0.0]), torch.ones(1)
found = [hf.scaled_add(zero, one, alpha=alpha).signbit().item() for alpha in (0.0, -0.0)]
assert found == [False, True]
"""
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    fresh.run(program, env=environment, check=True)


def test_it_passes_the_tests_of_every_function(package: Path) -> None:
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in ("public_arguments", "repeated")]
    options = ["-q", "-k", "scaled_add", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-m", "pytest", *options, *files]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0 and " passed" in found.stdout, found.stdout + found.stderr


def test_only_its_folder_was_added(package: Path) -> None:
    own, copied = hashes(PACKAGE), hashes(package)
    assert {name for name in copied if copied[name] != own.get(name)} == {
        name for name in copied if name.startswith(FOLDER)
    }

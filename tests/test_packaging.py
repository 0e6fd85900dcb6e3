"""What is installed is what is in the repository, and nothing in it belongs to one machine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

#: Home directories, mounted shares and wheel folders; and hosts that serve packages.
MACHINE = re.compile(
    r"/(?:home|root|Users|mnt|opt|work)/\w|file://|index-url|find-links"
    r"|(?:pypi|download\.pytorch|pythonhosted)\.org|artifactory|localhost:\d"
)


def tracked_files() -> list[Path]:
    """What git has or would take; without git, everything but hidden and built folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    skipped = re.compile(r"/(\.|build/|dist/|.*\.egg-info/|__pycache__/)")
    return [p for p in ROOT.rglob("*") if p.is_file() and not skipped.search(f"/{p.relative_to(ROOT)}")]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {_normal(name): version for name, version in pins}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_version_is_in_sync() -> None:
    assert importlib.metadata.version("holdfast") == holdfast.__version__
    assert f"## {holdfast.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_torch_is_pinned() -> None:
    assert constraints()["torch"] == "2.13.0"


def test_every_requirement_is_pinned() -> None:
    extras = [r for extra in PROJECT["optional-dependencies"].values() for r in extra]
    for requirement in [*PROJECT["dependencies"], *extras]:
        name = _normal(re.split(r"[<>=!~; \[]", requirement)[0])
        assert name in constraints(), f"{name} has no version in constraints.txt"


def test_run_time_dependencies_are_the_agreed_ones() -> None:
    names = {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "numba", "typer", "rich"}


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "The holdfast authors" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_package_data_is_there() -> None:
    for name in ("py.typed", "ops/quantize/digests/QuantizePerTensorPlan.json", "proof/page.html"):
        assert (Path(holdfast.__file__).parent / name).is_file()


def test_the_command_exists() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="holdfast")
    assert callable(entry.load())


def test_ci_calls_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


def test_no_file_belongs_to_a_machine() -> None:
    for path in tracked_files():
        if path == Path(__file__):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found = MACHINE.search(line)
            assert not found, f"{path.relative_to(ROOT)}:{number} names {found[0] if found else ''}"


@pytest.mark.parametrize(
    "line", ["/home/me/holdfast", "pip --index-url x", "file:///wheels", "https://pypi.org/simple"]
)
def test_a_machine_path_is_noticed(line: str) -> None:
    assert MACHINE.search(line)

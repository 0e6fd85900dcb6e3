"""Tests of the package: it installs completely, and no file refers to one machine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

#: Patterns of home directories, mounted shares, wheel folders and package hosts.
MACHINE = re.compile(
    r"/(?:home|root|Users|mnt|opt|work)/\w|file://|index-url|find-links"
    r"|(?:pypi|download\.pytorch|pythonhosted)\.org|artifactory|localhost:\d"
)


def tracked_files() -> list[Path]:
    """The files that git tracks or would add. Without git: all files outside of hidden and build folders."""
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
        if name != "holdfast":  # an extra may name another extra of this project
            assert name in constraints(), f"{name} has no version in constraints.txt"


def test_run_time_dependencies_are_the_agreed_ones() -> None:
    names = {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "numba", "typer", "rich"}


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "The holdfast authors" in text
    assert PROJECT["license"] == "Apache-2.0"


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


# A wheel and an sdist, and a clean environment.


@dataclass
class Built:
    folder: Path
    sdist: Path
    wheel: Path


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command that runs outside of this checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of the files in git and the wheel of that sdist, as ``python -m build`` makes them."""
    folder = tmp_path_factory.mktemp("build")
    for path in tracked_files():
        copy = folder / "tree" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    backend = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    run(sys.executable, "-c", backend, "build_sdist", folder, cwd=folder / "tree")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    run(sys.executable, "-c", backend, "build_wheel", folder, cwd=source)
    (wheel,) = folder.glob("*.whl")
    return Built(folder, sdist, wheel)


@pytest.fixture(scope="module")
def clean_python(built: Built) -> Path:
    """An environment with the wheel and the installed packages of this environment, but not its holdfast."""
    environment = built.folder / "clean"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=built.folder).strip()
    )
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "installed_packages.pth").write_text("\n".join(sorted(places)) + "\n")
    look = "import importlib.util; print(importlib.util.find_spec('holdfast'))"
    assert run(python, "-c", look, cwd=built.folder).strip() == "None"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", built.wheel, cwd=built.folder)
    return python


def of_git(under: str = "") -> set[str]:
    names = (path.relative_to(ROOT).as_posix() for path in tracked_files())
    return {name for name in names if name.startswith(under)}


def test_the_sdist_holds_what_the_repository_holds(built: Built) -> None:
    top = f"holdfast-{holdfast.__version__}"
    assert built.sdist.name == f"{top}.tar.gz"
    with tarfile.open(built.sdist) as archive:
        held = {member.name.removeprefix(f"{top}/") for member in archive if member.isfile()}
    made = {"PKG-INFO", "setup.cfg"} | {name for name in held if ".egg-info/" in name}
    missing, added = of_git() - held, held - made - of_git()
    assert not missing, f"name these in MANIFEST.in: {sorted(missing)}"
    assert not added


def test_the_wheel_holds_every_file_of_the_package(built: Built) -> None:
    assert built.wheel.name == f"holdfast-{holdfast.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(built.wheel) as archive:
        held = {f"src/{name}" for name in archive.namelist() if ".dist-info/" not in name}
    assert held == of_git("src/")
    digests = [name for name in held if name.endswith("/QuantizePerTensorPlan.json")]
    assert len(digests) == 1 and "src/holdfast/py.typed" in held
    assert any(name.endswith("/page.html") for name in held)


IMPORTS = """
import importlib.metadata, importlib.resources, sys
import holdfast as hf, torch

assert hf.__file__.startswith(sys.prefix), hf.__file__
assert not {"numba", "triton"} & set(sys.modules)
assert importlib.metadata.version("holdfast") == hf.__version__
assert importlib.resources.files("holdfast").joinpath("py.typed").is_file()
assert hf.pack(torch.tensor([1, -2, 7], dtype=torch.int8), torch.int4).tolist() == [225, 7]
print(hf.__version__)
"""


def test_the_wheel_imports_in_a_clean_environment(built: Built, clean_python: Path) -> None:
    assert run(clean_python, "-c", IMPORTS, cwd=built.folder).strip() == holdfast.__version__


def test_the_command_works_in_a_clean_environment(built: Built, clean_python: Path) -> None:
    assert "QuantizePerTensorPlan" in run(clean_python.parent / "holdfast", "plans", cwd=built.folder)


# CI workflow and pre-commit hooks.


def test_the_workflow_runs_make_test_on_what_is_supported() -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert "- run: make test\n" in text
    listed = re.search(r"python: \[(.*)\]", text)
    assert listed
    pythons = re.findall(r"[\d.]+", listed[1])
    named = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert pythons == named and PROJECT["requires-python"] == f">={pythons[0]}"
    torches = set(re.findall(r"\b2\.\d+\.\d+", text))
    (oldest,) = (r.split(">=")[1] for r in PROJECT["dependencies"] if r.startswith("torch"))
    assert constraints()["torch"] in torches and f"{oldest}.0" == min(torches)


def test_hooks_are_local_and_those_of_make_test() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"repo: (\S+)", text) == ["local"]
    entries = re.findall(r"entry: \.venv/bin/(.*)", text)
    assert entries == ["ruff check --force-exclude", "ruff format --force-exclude", "mypy"]
    for entry in entries:
        assert f"$(BIN)/{entry.removesuffix(' --force-exclude')}" in makefile


def test_urls_have_the_name_of_the_project() -> None:
    urls = PROJECT["urls"]
    assert {"Documentation", "Repository", "Changelog"} <= set(urls)
    assert all(url.startswith("https://") and "holdfast" in url for url in urls.values())

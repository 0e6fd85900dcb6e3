"""Loads the JSON files that ``holdfast verify``, ``fuzz`` and ``bench`` write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from holdfast.core.checks import kind_of
from holdfast.core.files import UnusableFile
from holdfast.core.machine import Machine
from holdfast.proof.catalogue import Entry
from holdfast.proof.conformance import Difference
from holdfast.proof.verify import PlanReport, Report


def load_report(path: Path) -> Report:
    """Load the output of ``holdfast verify --json``."""
    made = _read(path, "holdfast verify --json FILE")
    try:
        return _report(made)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        detail = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UnusableFile(
            f"{path} does not hold the findings of this version of verify: {detail}. "
            f"Write it again, on its machine: holdfast verify --json FILE."
        ) from None


#: Required fields of a fuzz report, and their types. ``differences`` is a list or a count.
_FUZZ: dict[str, tuple[type, ...]] = {
    "problems": (int,), "seed": (int,), "seconds": (int, float), "differences": (int, list),
}  # fmt: skip


def load_fuzz_report(path: Path) -> dict[str, Any]:
    """Load the output of ``holdfast fuzz --json``."""
    made = _read(path, "holdfast fuzz --json FILE")
    for name, kinds in _FUZZ.items():
        if not isinstance(made.get(name), kinds):
            raise UnusableFile(
                f"{path} holds {made.get(name)!r} for {name!r}; a fuzz run has the numbers problems, seed "
                f"and seconds, and its differences. Write it again: holdfast fuzz --json FILE."
            )
    return made


#: Required fields of a benchmark, and of each of its cases.
_BENCHMARK = ("device", "rows", "versions", "date", "copy_bytes_per_second")
_CASE = ("name", "op", "shape", "seconds", "of_copy", "peers")


def load_benchmark(path: Path) -> dict[str, Any]:
    """Load the output of ``holdfast bench --json``."""
    made = _read(path, "holdfast bench --json FILE")
    missing = [name for name in _BENCHMARK if name not in made]
    missing = missing or [name for row in made["rows"] for name in _CASE if name not in row]
    if missing:
        raise UnusableFile(
            f"{path} has no {missing[0]!r}, so it is no benchmark. Write one: holdfast bench --json FILE."
        )
    return made


def _read(path: Path, command: str) -> dict[str, Any]:
    try:
        made = json.loads(path.read_text())
    except OSError as error:
        raise UnusableFile(f"{path} cannot be read: {error.strerror}. `{command}` writes one.") from None
    except ValueError as error:
        raise UnusableFile(f"{path} is not JSON: {error}. `{command}` writes one.") from None
    if not isinstance(made, dict):
        raise UnusableFile(f"{path} holds {kind_of(made)}, not an object. `{command}` writes one.")
    return made


def _report(made: Mapping[str, Any]) -> Report:
    plans = [
        PlanReport(
            **{
                **_fields(PlanReport, plan),
                "differences": [Difference(**_fields(Difference, found)) for found in plan["differences"]],
                "digests": {str(case): str(digest) for case, digest in plan["digests"].items()},
                "promise": Entry(**_fields(Entry, plan["promise"])),
            }
        )
        for plan in made["plans"]
    ]
    machine = Machine(**_fields(Machine, made["machine"]))
    return Report(**{**_fields(Report, made), "plans": plans, "machine": machine})


def _fields(kind: Any, made: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of dataclass ``kind``. Unknown fields, from a newer holdfast, are skipped."""
    known: tuple[Field[Any], ...] = fields(kind)
    required = {f.name for f in known if f.default is MISSING and f.default_factory is MISSING}
    return {f.name: made[f.name] for f in known if f.name in made or f.name in required}

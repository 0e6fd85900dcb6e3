"""The digests of every case, pinned: what the bits were is what they must be.

They are package data, written by ``holdfast verify --write-digests`` after a change of the numerics or of the
cases, and never otherwise.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path

from holdfast.core.bits import digest
from holdfast.core.case import Case
from holdfast.core.contract import NUMERICS_VERSION
from holdfast.core.plan import Args
from holdfast.proof.conformance import AnyPlan, Difference

Digests = dict[str, dict[str, str]]


def folder() -> Path:
    """Where the digests are kept: a file for each plan."""
    return Path(str(files("holdfast.proof") / "pinned"))


@cache
def pinned() -> Digests:
    """The digests by plan and case, as far as they are of this version of the numerics."""
    kept = {path.stem: json.loads(path.read_text()) for path in sorted(folder().glob("*.json"))}
    return {name: k["digests"] for name, k in kept.items() if k["numerics_version"] == NUMERICS_VERSION}


def write(digests: Digests) -> None:
    """Pin ``digests``; plans that they do not name keep theirs."""
    folder().mkdir(exist_ok=True)
    for name, known in digests.items():
        kept = {"numerics_version": NUMERICS_VERSION, "digests": known}
        (folder() / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    pinned.cache_clear()


def of(plan: AnyPlan, reference: Args) -> str:
    """The digest of what the reference made of a case; an output that was not asked for is left out."""
    outputs = {name: getattr(reference, name) for name in plan.outputs}
    return digest({name: out for name, out in outputs.items() if out is not None})


def check(plan: AnyPlan, case: Case, found: str) -> Difference | None:
    """Whether ``found`` is the digest that was pinned for a case."""
    known = pinned().get(plan.__name__, {}).get(case.name)
    if known == found:
        return None
    detail = f"digest {found} found, {known or 'none'} pinned for numerics version {NUMERICS_VERSION}"
    return Difference(plan.__name__, case.name, "digest", detail)

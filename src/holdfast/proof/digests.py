"""The pinned digests of every case, which detect a change of the bits between versions.

They are package data in the folder of each op. ``holdfast verify --write-digests`` writes them. Run it only
after a change of the numerics or of the cases.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

from holdfast.core.bits import digest
from holdfast.core.case import Case
from holdfast.core.plan import AnyPlan, Args
from holdfast.core.registry import plans
from holdfast.proof.conformance import Difference

Digests = dict[str, dict[str, str]]


def path(plan: AnyPlan) -> Path:
    """The file of the digests of a plan, in the folder of its op."""
    return Path(str(sys.modules[plan.__module__].__file__)).parent / "digests" / f"{plan.__name__}.json"


@cache
def pinned() -> Digests:
    """The digests of the current numerics version, by plan and case."""
    files = {name: path(plan) for name, plan in plans().items()}
    kept = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    return {
        name: k["digests"]
        for name, k in kept.items()
        if k["numerics_version"] == plans()[name].numerics_version
    }


def write(digests: Digests) -> None:
    """Pin ``digests``, by plan and case. Other plans keep their digests."""
    for name, known in digests.items():
        plan = plans()[name]
        kept = {"numerics_version": plan.numerics_version, "digests": known}
        file = path(plan)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(kept, indent=1) + "\n")
    pinned.cache_clear()


def of(plan: AnyPlan, reference: Args) -> str:
    """The digest of the outputs of the reference. Outputs that are None are skipped."""
    outputs = {name: getattr(reference, name) for name in plan.outputs}
    return digest({name: out for name, out in outputs.items() if out is not None})


def check(plan: AnyPlan, case: Case, found: str) -> Difference | None:
    """None if ``found`` is the pinned digest of the case, else the difference."""
    known = pinned().get(plan.__name__, {}).get(case.name)
    if known == found:
        return None
    detail = f"digest {found} found, {known or 'none'} pinned for numerics version {plan.numerics_version}"
    return Difference(plan.__name__, case.name, "digest", detail)

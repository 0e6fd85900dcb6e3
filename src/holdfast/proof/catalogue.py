"""What each plan takes and promises, found out by asking it: what is listed is what it accepts."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from holdfast.core.contract import NUMERICS_VERSION, PrecisionGuarantee
from holdfast.core.descriptor import Descriptor
from holdfast.core.dtypes import dtype_name
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.plan import AnyPlan
from holdfast.core.registry import plans
from holdfast.core.stream import CPU_STREAM
from holdfast.proof.conformance import cases_of, selected


@dataclass(frozen=True)
class Entry:
    """A plan in the list. ``ulp`` is the largest error of each output over all cases."""

    plan: str
    op: str
    direction: str
    dtypes: dict[str, list[str]]
    backends: list[str]
    ulp: dict[str, float]
    compute_dtypes: list[str]
    accumulator_dtypes: list[str]
    rounding: str
    deterministic: bool
    bit_stable: str
    numerics_version: int = NUMERICS_VERSION
    cases: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def catalogue() -> list[Entry]:
    """Every plan, in order of its name."""
    return [entry(plan) for _, plan in sorted(plans().items())]


def entry(plan: AnyPlan) -> Entry:
    """What is known of one plan. Compiles nothing."""
    cases = cases_of(plan)
    names = [
        f.name
        for f in fields(plan.Descriptor)
        if cases and isinstance(getattr(cases[0].descriptor, f.name), torch.dtype)
    ]
    by_dtypes = {tuple(getattr(case.descriptor, name) for name in names): case for case in cases}
    promises = [selected("reference")(plan, case, CPU_STREAM).precision_guarantee() for case in cases]
    return Entry(
        plan=plan.__name__,
        op=plan.op,
        direction=plan.direction,
        cases=len(cases),
        dtypes={name: _accepted(name, [case.descriptor for case in by_dtypes.values()]) for name in names},
        backends=list(dict.fromkeys(way.backend for way in plan.kernels)),
        ulp={name: max(errors) for name in plan.outputs if (errors := _errors(name, promises))},
        compute_dtypes=sorted({promise.compute_dtype for promise in promises}),
        accumulator_dtypes=sorted({promise.accumulator_dtype for promise in promises}),
        rounding=", ".join(sorted({promise.rounding for promise in promises})),
        deterministic=bool(promises) and all(promise.deterministic for promise in promises),
        bit_stable=", ".join(sorted({promise.bit_stable for promise in promises})),
    )


def _errors(name: str, promises: list[PrecisionGuarantee]) -> list[float]:
    """The errors that are promised for an output, where there is such an output."""
    return [promise.ulp[name] for promise in promises if name in promise.ulp]


def _accepted(name: str, descriptors: list[Descriptor]) -> list[str]:
    """The dtypes that field ``name`` may have, in some descriptor like these."""
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    found = [dtype_name(dtype) for dtype in every if any(_valid(like, name, dtype) for like in descriptors)]
    return sorted(found, key=lambda known: (known.rstrip("0123456789"), int(re.sub(r"\D", "", known) or 0)))


def _valid(like: Descriptor, name: str, dtype: torch.dtype) -> bool:
    changed: dict[str, Any] = {name: dtype}
    try:
        replace(like, **changed).validate()
    except InvalidDescriptor:
        return False
    return True

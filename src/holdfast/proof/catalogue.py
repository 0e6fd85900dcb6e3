"""The dtypes, backends and guarantees of each plan, found by calling its own validation."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from holdfast.core.contract import PrecisionGuarantee
from holdfast.core.descriptor import Descriptor
from holdfast.core.dtypes import dtype_name
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.plan import AnyPlan
from holdfast.core.registry import plans
from holdfast.core.stream import CPU_STREAM
from holdfast.proof.conformance import cases_of, select_on


@dataclass(frozen=True)
class Entry:
    """One plan. ``ulp`` is the largest guaranteed error of each output over all cases."""

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
    numerics_version: int
    cases: int = 0


def catalogue() -> list[Entry]:
    """Every plan, sorted by name."""
    return [entry(plan) for _, plan in sorted(plans().items())]


def entry(plan: AnyPlan) -> Entry:
    """The entry of one plan. Compiles nothing."""
    cases = cases_of(plan)
    names = [f.name for f in fields(plan.Descriptor)] if cases else []
    names = [name for name in names if isinstance(getattr(cases[0].descriptor, name), torch.dtype)]
    by_dtypes = {tuple(getattr(case.descriptor, name) for name in names): case for case in cases}
    promises = [select_on("reference")(plan, case, CPU_STREAM).precision_guarantee() for case in cases]
    return Entry(
        plan=plan.__name__, op=plan.op, direction=plan.direction, cases=len(cases),
        numerics_version=plan.numerics_version,
        dtypes={name: _accepted(name, [case.descriptor for case in by_dtypes.values()]) for name in names},
        backends=list(dict.fromkeys(way.backend for way in plan.kernels)),
        ulp={name: max(errors) for name in plan.outputs if (errors := _errors(name, promises))},
        compute_dtypes=sorted({promise.compute_dtype for promise in promises}),
        accumulator_dtypes=sorted({promise.accumulator_dtype for promise in promises}),
        rounding=", ".join(sorted({promise.rounding for promise in promises})),
        deterministic=bool(promises) and all(promise.deterministic for promise in promises),
        bit_stable=", ".join(sorted({promise.bit_stable for promise in promises})),
    )  # fmt: skip


def _errors(name: str, promises: list[PrecisionGuarantee]) -> list[float]:
    """The guaranteed errors of one output, for the cases that have this output."""
    return [promise.ulp[name] for promise in promises if name in promise.ulp]


def _accepted(name: str, descriptors: list[Descriptor]) -> list[str]:
    """The dtypes that field ``name`` accepts in at least one of ``descriptors``."""
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    found = [dtype_name(dtype) for dtype in every if any(_valid(desc, name, dtype) for desc in descriptors)]
    return sorted(found, key=lambda known: (known.rstrip("0123456789"), int(re.sub(r"\D", "", known) or 0)))


def _valid(desc: Descriptor, name: str, dtype: torch.dtype) -> bool:
    changed: dict[str, Any] = {name: dtype}
    try:
        replace(desc, **changed).validate()
    except InvalidDescriptor:
        return False
    return True

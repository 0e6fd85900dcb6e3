"""Runs every case on every backend through the plan protocol and compares its bits with the reference."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from holdfast.backends import interpreted
from holdfast.backends.scratch import guarded
from holdfast.backends.threads import shared_finely
from holdfast.core.bits import memory, mismatch
from holdfast.core.case import Case, operands_of, poisoned
from holdfast.core.checks import shown
from holdfast.core.contract import PlanPreference
from holdfast.core.errors import InvalidArgs
from holdfast.core.plan import AnyPlan, Args, Kernel, Plan
from holdfast.core.registry import plans
from holdfast.core.stream import Stream, Workspace
from holdfast.core.workspace_layout import workspace_overruns

#: The byte that fills a workspace before a run: NaN in every floating dtype.
WORKSPACE_FILL = 0xFF
#: Size of the guard zone after a workspace, in bytes.
TAIL = 4096
#: CPU thread counts to run with. All must give equal bits.
THREADS = (1, 2, 8)


@dataclass(frozen=True)
class Way:
    """A configuration to run a case in. ``times`` is the number of repeated runs."""

    backend: str
    device: str = "cpu"
    threads: int | None = None
    times: int = 2

    def __str__(self) -> str:
        if self.threads is None:
            return self.backend
        return f"{self.backend} on {self.threads} thread{'s' * (self.threads > 1)}"


@dataclass(frozen=True)
class Difference:
    """A run whose bits differ from the reference, or that failed."""

    plan: str
    case: str
    way: str
    detail: str

    def __str__(self) -> str:
        return f"{self.plan}, case {self.case!r}, {self.way}: {self.detail}"


REFERENCE = Way("reference")


def gpu_way() -> Way | None:
    """How to run the gpu backend on this machine, or None. One run of the interpreter is enough."""
    if interpreted():
        return Way("gpu", times=1)
    return Way("gpu", "cuda") if torch.cuda.is_available() else None


def ways() -> list[Way]:
    """Every configuration that this machine can compare with the reference."""
    gpu = gpu_way()
    on_cpu = [Way("cpu", threads=threads, times=1) for threads in THREADS]
    return [REFERENCE, *on_cpu, *([gpu] if gpu else [])]


def cases_of(plan: AnyPlan) -> list[Case]:
    """The named cases of ``plan``. Empty if the plan declares no module of cases."""
    if not hasattr(plan, "cases"):
        return []
    return cast(list[Case], importlib.import_module(plan.cases).cases(plan))


def plan_named(name: str) -> AnyPlan:
    """The plan called ``name``. The suffix ``Plan`` is optional."""
    known = plans()
    for candidate in (name, f"{name}Plan"):
        if candidate in known:
            return known[candidate]
    short = {plan.removesuffix("Plan").lower(): plan for plan in known}
    near = difflib.get_close_matches(name.removesuffix("Plan").lower(), short, n=3, cutoff=0.6)
    hint = f"; near it: {', '.join(short[found] for found in near)}" if near else ""
    raise InvalidArgs(f"there is no plan called {shown(name)}{hint}. `holdfast plans` lists them all.")


def copy_args(args: Args, device: str, wider: int = 0) -> Args:
    """A copy of ``args`` on ``device``. Copies whole storages, so that strides and guard zones are kept.

    Adds ``wider`` bytes to the guard zone on each side of every tensor. It must be a multiple of 16.
    """
    copied = {}
    for name, value in operands_of(args).items():
        if isinstance(value, torch.Tensor):
            flat, more = memory(value), wider // value.element_size()
            if more:
                around = poisoned(flat.numel() + 2 * more, value.dtype)
                around[more : more + flat.numel()] = flat
                flat = around
            flat = flat.to(device, copy=not more)
            value = flat.as_strided(value.shape, value.stride(), value.storage_offset() + more)
        copied[name] = value
    return type(args)(**copied)


@contextmanager
def cpu_threads(count: int | None, **sharing: int) -> Iterator[None]:
    """Run on ``count`` CPU threads and divide even small problems among them. None: change nothing."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with shared_finely(**sharing):
            yield
    finally:
        torch.set_num_threads(before)


#: Returns the plan that runs a case, with a registered kernel or with a given one.
Select = Callable[[AnyPlan, Case, Stream], Plan[Any, Any]]


def select_on(backend: str) -> Select:
    """Select the plan on ``backend``. Only the variant that the case needs is compiled."""
    pref = PlanPreference(backend=backend, precompile=False)
    return lambda plan, case, stream: plan.select(stream, case.descriptor, pref)


def select_kernel(make: Callable[[AnyPlan, Any, torch.device], Kernel[Any]]) -> Select:
    """Use a kernel that is not registered instead of one that ``plan.select`` picks."""

    def select(plan: AnyPlan, case: Case, stream: Stream) -> Plan[Any, Any]:
        case.descriptor.validate()
        kernel = make(plan, case.descriptor, stream.device)
        return plan(case.descriptor, stream.device, "reference", kernel)

    return select


def poisoned_workspace(size: int, device: str) -> Workspace:
    """A workspace followed by a guard zone. Both are filled with ``WORKSPACE_FILL``."""
    workspace = Workspace.allocate(size + TAIL if size else 0, device)
    if workspace.buffer is not None:
        workspace.buffer.fill_(WORKSPACE_FILL)
    return workspace


class Overrun(AssertionError):
    """A kernel wrote out of bounds. This counts as a difference even if the result is right."""


def execute(plan: AnyPlan, case: Case, args: Args, select: Select, device: str = "cpu") -> Args:
    """Run ``case`` on a copy of ``args``, and return this copy on the CPU."""
    stream = Stream.current(device)
    made = select(plan, case, stream)
    given = copy_args(args, device)
    verdict = made.can_implement(given)
    if not verdict:
        raise AssertionError(f"can_implement refuses the case: {verdict.reason}")
    workspace = poisoned_workspace(made.workspace_size(), device)
    with guarded() as guards:
        made.run(stream, workspace, given)
    overrun = [*guards.violations()]
    overrun += workspace_overruns(made.kernel.workspace_layouts, workspace, WORKSPACE_FILL)
    if overrun:
        raise Overrun("; ".join(overrun))
    return given if device == "cpu" else copy_args(given, "cpu")


def run_reference(plan: AnyPlan, case: Case) -> tuple[Args, Args]:
    """The args of a case, and a copy of them that the reference has run on."""
    args = case.make()
    return args, execute(plan, case, args, select_on("reference"))


def check(
    plan: AnyPlan, case: Case, way: Way, args: Args, reference: Args, select: Select
) -> list[Difference]:
    """Run ``case`` and compare the memory of all operands, inputs included, with the reference."""
    found = []
    for time in range(way.times):
        which = f"{way}, run {time + 1}" if way.times > 1 else str(way)
        try:
            detail = difference(plan, case, way, args, reference, select)
        except Exception as error:  # any failure of a kernel is a difference
            detail = f"{type(error).__name__}: {error}"
        if detail:
            found.append(Difference(plan.__name__, case.name, which, detail))
    return found


def difference(plan: AnyPlan, case: Case, way: Way, args: Args, reference: Args, select: Select) -> str:
    """Run ``case`` once. Returns where its memory differs from the reference. The kernel may raise."""
    with cpu_threads(way.threads):
        try:
            return first_mismatch(reference, execute(plan, case, args, select, way.device))
        except Overrun as overrun:
            return str(overrun)


def first_mismatch(expected: Args, found: Args, skip: Collection[str] = ()) -> str:
    """Where the memory of the operands of ``found`` differs first, or an empty string."""
    results = operands_of(found)
    for name, value in operands_of(expected).items():
        if isinstance(value, torch.Tensor) and name not in skip:
            differing = mismatch(name, value, results[name])
            if differing:
                return str(differing)
    return ""

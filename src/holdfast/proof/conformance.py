"""Every case on every backend, through the plan protocol, compared with the reference bit for bit."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
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

#: What workspaces are filled with: NaN in every floating dtype.
WORKSPACE_FILL = 0xFF
#: Bytes of the guard zone after a workspace.
TAIL = 4096
#: The numbers of threads that must not change a bit.
THREADS = (1, 2, 8)


@dataclass(frozen=True)
class Way:
    """One way to run a case: on a backend and a device, with so many threads, so many times."""

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
    """A run that did not give the bits of the reference, or none at all."""

    plan: str
    case: str
    way: str
    detail: str

    def __str__(self) -> str:
        return f"{self.plan}, case {self.case!r}, {self.way}: {self.detail}"


REFERENCE = Way("reference")


def gpu_way() -> Way | None:
    """How the gpu backend can run here, if it can. The interpreter has no freedom: once is enough."""
    if interpreted():
        return Way("gpu", times=1)
    return Way("gpu", "cuda") if torch.cuda.is_available() else None


def ways() -> list[Way]:
    """Every way to run a case on this machine, other than the reference once."""
    gpu = gpu_way()
    return [
        REFERENCE,
        *(Way("cpu", threads=threads, times=1) for threads in THREADS),
        *([gpu] if gpu else []),
    ]


def cases_of(plan: AnyPlan) -> list[Case]:
    """The named inputs of ``plan``; none if it names no module of cases."""
    if not hasattr(plan, "cases"):
        return []
    return cast(list[Case], importlib.import_module(plan.cases).cases(plan))


def plan_named(name: str) -> AnyPlan:
    """The plan of this name, with or without ``Plan`` at its end."""
    known = plans()
    for candidate in (name, f"{name}Plan"):
        if candidate in known:
            return known[candidate]
    short = {plan.removesuffix("Plan").lower(): plan for plan in known}
    near = difflib.get_close_matches(name.removesuffix("Plan").lower(), short, n=3, cutoff=0.6)
    hint = f"; near it: {', '.join(short[found] for found in near)}" if near else ""
    raise InvalidArgs(f"there is no plan called {shown(name)}{hint}. `holdfast plans` lists them all.")


def moved(args: Args, device: str, wider: int = 0) -> Args:
    """A copy of ``args`` on ``device``, with the same strides in a copy of the same memory.

    The guard zones of every tensor are ``wider`` by so many bytes, a multiple of 16.
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
def _threads(count: int | None) -> Iterator[None]:
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with shared_finely():
            yield
    finally:
        torch.set_num_threads(before)


#: Makes the plan that runs a case: by ``select``, or around a kernel that is not registered.
Select = Callable[[AnyPlan, Case, Stream], Plan[Any, Any]]


def selected(backend: str) -> Select:
    """Select the plan on ``backend``; no variant is compiled but the one that the case needs."""
    pref = PlanPreference(backend=backend, precompile=False)
    return lambda plan, case, stream: plan.select(stream, case.descriptor, pref)


def around(make: Callable[[AnyPlan, Any, torch.device], Kernel[Any]]) -> Select:
    """Put a kernel that is not registered where ``select`` would put the one it picks."""

    def select(plan: AnyPlan, case: Case, stream: Stream) -> Plan[Any, Any]:
        case.descriptor.validate()
        kernel = make(plan, case.descriptor, stream.device)
        return plan(case.descriptor, stream.device, "reference", kernel)

    return select


def guarded_workspace(size: int, device: str) -> Workspace:
    """A workspace with a guard zone after its end, full of the bytes that no kernel may count on."""
    workspace = Workspace.allocate(size + TAIL if size else 0, device)
    if workspace.buffer is not None:
        workspace.buffer.fill_(WORKSPACE_FILL)
    return workspace


class Overrun(AssertionError):
    """A kernel wrote to memory that is not its own. That is a difference, even if the result is right."""


def execute(plan: AnyPlan, case: Case, args: Args, select: Select, device: str = "cpu") -> Args:
    """Run ``case`` on a copy of ``args``, and give the copy back, on the CPU."""
    stream = Stream.current(device)
    made = select(plan, case, stream)
    given = moved(args, device)
    verdict = made.can_implement(given)
    if not verdict:
        raise AssertionError(f"can_implement refuses the case: {verdict.reason}")
    workspace = guarded_workspace(made.workspace_size(), device)
    with guarded() as guards:
        made.run(stream, workspace, given)
    overrun = [
        *guards.violations(),
        *workspace_overruns(made.kernel.workspace_layouts, workspace, WORKSPACE_FILL),
    ]
    if overrun:
        raise Overrun("; ".join(overrun))
    return given if device == "cpu" else moved(given, "cpu")


def expected(plan: AnyPlan, case: Case) -> tuple[Args, Args]:
    """The args of a case, and the same after the reference has run on a copy of them."""
    args = case.make()
    return args, execute(plan, case, args, selected("reference"))


def check(
    plan: AnyPlan, case: Case, way: Way, args: Args, reference: Args, select: Select
) -> list[Difference]:
    """Run ``case`` one way and compare all of its memory, inputs included, with what the reference left."""
    found = []
    for time in range(way.times):
        which = f"{way}, run {time + 1}" if way.times > 1 else str(way)
        try:
            detail = difference(plan, case, way, args, reference, select)
        except Exception as error:  # a kernel may fail in any way, and each is a finding, not an end
            detail = f"{type(error).__name__}: {error}"
        if detail:
            found.append(Difference(plan.__name__, case.name, which, detail))
    return found


def difference(plan: AnyPlan, case: Case, way: Way, args: Args, reference: Args, select: Select) -> str:
    """Run ``case`` once and say where its memory differs from the reference's. It may raise anything."""
    with _threads(way.threads):
        try:
            return _compared(reference, execute(plan, case, args, select, way.device))
        except Overrun as overrun:
            return str(overrun)


def _compared(reference: Args, result: Args) -> str:
    results = operands_of(result)
    for name, value in operands_of(reference).items():
        if isinstance(value, torch.Tensor):
            differing = mismatch(name, value, results[name])
            if differing:
                return str(differing)
    return ""

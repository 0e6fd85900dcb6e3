"""Runs one random problem on every backend of this machine and compares the bits with the reference.

One plan per backend runs the problem and its second form in turn, on 1, 2 and 8 threads. The two forms have
different strides and addresses, which tests the state that a plan keeps between runs. Operands, workspaces,
their parts and CPU scratch buffers lie between guard zones; outputs, scratch and workspaces are poisoned.
The public function and its gradients must give the same bits. All backends must refuse invalid args with the
same message, and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.backends.scratch import guarded
from holdfast.core.bits import canonical, mismatch
from holdfast.core.contract import PlanPreference
from holdfast.core.device_errors import check_errors
from holdfast.core.draw import Space, case_of, space_of
from holdfast.core.errors import HoldfastError, Unsupported
from holdfast.core.plan import AnyPlan, Args, Plan
from holdfast.core.stream import NO_WORKSPACE, Stream, Workspace
from holdfast.core.workspace_layout import workspace_overruns
from holdfast.proof.conformance import (
    THREADS,
    WORKSPACE_FILL,
    copy_args,
    cpu_threads,
    first_mismatch,
    gpu_way,
)
from holdfast.proof.fuzz.problem import Drawn
from holdfast.proof.fuzz.refusal import refused_everywhere

#: Extra bytes in the guard zones of an operand, wide enough to catch a write to a wrong row.
_WIDER = 2**16
#: Size in bytes of the guard zones around a workspace, and the byte that fills them.
_GUARD, _PATTERN = 2**16, 0xA5


@dataclass(frozen=True)
class Finding:
    """A problem that failed. ``way`` is the configuration that failed."""

    plan: str
    problem: str
    way: str
    detail: str
    #: Whether an exception was raised, rather than a difference found.
    raised: bool = False
    #: Whether public functions were checked, rather than plans; and on which device.
    functions: bool = False
    device: str = "cpu"

    @property
    def command(self) -> str:
        """The shell command that repeats the problem."""
        functions = "--functions " * self.functions
        functions += f"--device {self.device} " * (self.device != "cpu")
        return f"holdfast fuzz {functions}--plan {self.plan} --problem '{self.problem}'"

    def __str__(self) -> str:
        return f"{self.plan}, {self.way}: {self.detail}"


@dataclass(frozen=True)
class _Outcome:
    """The args after a run, and the error that it raised."""

    args: Args
    error: str = ""


class Differs(Exception):
    """Two configurations give different results for a problem."""

    def __init__(self, way: str, detail: str) -> None:
        super().__init__(detail)
        self.way = way


def check_problem(
    plan: AnyPlan, drawn: Drawn, *, interpret: bool = True, only: str | None = None
) -> Finding | None:
    """Run ``drawn`` on every backend, or on the backend ``only``. Returns the first difference.

    Without a GPU, ``interpret`` runs the GPU kernels in Triton's interpreter.
    """

    def check() -> None:
        with _threads(1):  # the default for everything outside _run
            _check(plan, drawn, interpret, only)

    return finding_of(plan, drawn, check)


def finding_of(
    plan: AnyPlan, drawn: Drawn, check: Callable[[], None], *, functions: bool = False, device: str = "cpu"
) -> Finding | None:
    """The finding of ``check``, which raises ``Differs``. Any other exception is a finding too."""
    try:
        check()
    except Differs as found:
        way, detail, raised = found.way, str(found), False
    except Exception as error:
        way, detail, raised = "every way", f"{type(error).__name__}: {error}", True
    else:
        return None
    return Finding(plan.__name__, drawn.to_json(), way, detail, raised, functions, device)


def _check(plan: AnyPlan, drawn: Drawn, interpret: bool, only: str | None) -> None:
    space = space_of(plan)
    desc: Any = case_of(plan, drawn.problem).descriptor
    if type(desc).from_json(desc.to_json()) != desc:
        raise Differs("descriptor", "it does not come back from its JSON form")
    reference = _selected(plan, desc, "reference", "cpu")
    given = drawn.args(plan)
    expected = [_run(reference, args, "cpu") for args in given]
    on_cpu = [reference]
    for backend, device in _backends(interpret, only).items():
        made = _selected(plan, desc, backend, device)
        for turn, threads in enumerate(2 * THREADS if backend == "cpu" else (1, 1, 1)):
            way = f"cpu on {threads} thread{'s' * (threads > 1)}" if backend == "cpu" else f"gpu on {device}"
            _compare(plan, expected[turn % 2], _run(made, given[turn % 2], device, threads), way)
        if drawn.limit is not None:
            _check_limit(made, int(made.workspace_size() * drawn.limit), given[0], expected[0])
        if (backend, device) != ("gpu", "cpu"):  # the public functions never use the interpreter
            _check_public(plan, space, drawn.problem, desc, given[0], expected[0], device)
        on_cpu += [made] if device == "cpu" else []
    if drawn.broken is not None:
        complaint = refused_everywhere(on_cpu, given[0], drawn.broken)
        if complaint:
            raise Differs("broken args", complaint)


def _backends(interpret: bool, only: str | None) -> dict[str, str]:
    """The backends to compare with the reference, and the device of each."""
    gpu = gpu_way() if interpret or torch.cuda.is_available() else None
    found = {"cpu": "cpu", **({"gpu": gpu.device} if gpu else {})}
    return {backend: device for backend, device in found.items() if only in (None, backend)}


def _selected(
    plan: AnyPlan, desc: Any, backend: str, device: str, limit: int | None = None
) -> Plan[Any, Any]:
    pref = PlanPreference(backend=backend, precompile=False, max_workspace_bytes=limit)
    return plan.select(Stream.current(device), desc, pref)


def _threads(count: int) -> AbstractContextManager[None]:
    return cpu_threads(count, least=64, worth=16)


def _run(made: Plan[Any, Any], args: Args, device: str, threads: int = 1) -> _Outcome:
    """Run on a copy of ``args``, with guard zones around the workspace."""
    given = copy_args(args, device, _WIDER)
    verdict = made.can_implement(given)
    if not verdict:
        raise Differs(made.backend, f"can_implement refuses what was drawn: {verdict.reason}")
    size = made.workspace_size()
    memory = torch.empty(size + 2 * _GUARD + 8, dtype=torch.uint8, device=device)
    begin = _GUARD + size % 8  # workspaces need no alignment
    workspace, zones = memory[begin : begin + size], (memory[:begin], memory[begin + size :])
    workspace.fill_(WORKSPACE_FILL)
    for zone in zones:
        zone.fill_(_PATTERN)
    error = ""
    try:
        with _threads(threads), guarded() as guards:
            made.run(Stream.current(device), workspace if size else None, given)
        check_errors()
    except HoldfastError as refused:
        error = f"{type(refused).__name__}: {refused}"
    for name, zone in zip(("before", "after"), zones, strict=True):
        touched = int((zone != _PATTERN).sum())
        if touched:
            raise Differs(made.backend, f"{touched} bytes {name} the workspace were written")
    used = Workspace(workspace) if size else NO_WORKSPACE
    overrun = [*guards.violations(), *workspace_overruns(made.kernel.workspace_layouts, used, WORKSPACE_FILL)]
    if overrun:
        raise Differs(made.backend, "; ".join(overrun))
    return _Outcome(given if device == "cpu" else copy_args(given, "cpu"), error)


def _compare(plan: AnyPlan, expected: _Outcome, found: _Outcome, way: str) -> None:
    if expected.error != found.error:
        raise Differs(way, f"{expected.error or 'no error'!r} expected, {found.error or 'no error'!r} found")
    # The GPU reports an error after the kernel has finished, so its outputs may be written.
    deferred = bool(found.error) and way.startswith("gpu")
    differing = first_mismatch(expected.args, found.args, skip=plan.outputs if deferred else ())
    if differing:
        raise Differs(way, differing)


def check_against_reference(plan: AnyPlan, problem: Any, args: Args, device: str = "cpu") -> None:
    """Compare the public function for ``args`` on ``device`` with the reference."""
    desc: Any = case_of(plan, problem).descriptor
    with _threads(1):
        expected = _run(_selected(plan, desc, "reference", "cpu"), args, "cpu")
    _check_public(plan, space_of(plan), problem, desc, args, expected, device)


def _check_limit(usual: Plan[Any, Any], limit: int, args: Args, expected: _Outcome) -> None:
    """With a workspace limit, ``select`` must find a kernel with equal bits, or raise Unsupported."""
    device, way = usual.device.type, f"{usual.backend} with {limit} bytes of workspace"
    try:
        made = _selected(type(usual), usual.descriptor, usual.backend, device, limit)
    except Unsupported:
        return
    if made.workspace_size() > limit:
        raise Differs(way, f"a plan was selected that needs {made.workspace_size()}")
    _compare(type(usual), expected, _run(made, args, device), way)


def same_bits(expected: torch.Tensor, found: torch.Tensor) -> bool:
    return torch.equal(canonical(expected), canonical(found))


def _check_public(
    plan: AnyPlan, space: Space, problem: Any, desc: Any, args: Args, expected: _Outcome, device: str
) -> None:
    way, error = f"public function on {device}", ""
    given = copy_args(args, device)
    try:
        found = space.public(plan, problem, desc, given)
        check_errors()
    except HoldfastError as refused:
        found, error = {}, f"{type(refused).__name__}: {refused}"
    if found is None:
        return
    if error != expected.error:
        raise Differs(way, f"{expected.error or 'no error'!r} expected, {error or 'no error'!r} found")
    for name, value in found.items():
        wanted, got = getattr(expected.args, name), value.detach().cpu()
        if (tuple(wanted.shape), wanted.dtype) != (tuple(got.shape), got.dtype):
            public, planned = (f"{tuple(t.shape)} of {t.dtype}" for t in (got, wanted))
            raise Differs(way, f"{name} is {public}; the plan's is {planned}")
        if not same_bits(wanted, got):
            raise Differs(way, str(mismatch(name, wanted.clone(), got.clone())))
    differing = first_mismatch(args, given if device == "cpu" else copy_args(given, "cpu"), skip=plan.outputs)
    if differing:
        raise Differs(way, f"an input was changed: {differing}")

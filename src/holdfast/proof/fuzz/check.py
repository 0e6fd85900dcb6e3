"""One drawn problem, run every way there is on this machine, and compared bit for bit.

The reference says what is right. A plan of each other backend runs the problem and its other form in turn, on
1, 2 and 8 threads, so that what it remembers of earlier runs is used for tensors with other strides and other
addresses. Every operand, output and workspace lies between guard zones, and so does every run of scratch and
every piece of a workspace; outputs, scratch and workspaces are poisoned.
The public function, with its gradients, must give the same bits. What is wrong must be refused with the same
sentence everywhere, and leave no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.backends.scratch import guarded
from holdfast.backends.threads import shared_finely
from holdfast.core.bits import canonical, mismatch
from holdfast.core.case import operands_of
from holdfast.core.contract import PlanPreference
from holdfast.core.device_errors import check_errors
from holdfast.core.draw import Space, space_of
from holdfast.core.errors import HoldfastError, Unsupported
from holdfast.core.plan import AnyPlan, Args, Plan
from holdfast.core.stream import NO_WORKSPACE, Stream, Workspace
from holdfast.core.workspace_layout import workspace_overruns
from holdfast.proof.conformance import THREADS, WORKSPACE_FILL, gpu_way, moved
from holdfast.proof.fuzz.problem import Drawn
from holdfast.proof.fuzz.refusal import refused_everywhere

#: Bytes around an operand that nobody may write to, besides those it has: a wrong row lands in them.
_WIDER = 2**16
#: Bytes around a workspace that nobody may write to, and what they hold.
_GUARD, _PATTERN = 2**16, 0xA5


@dataclass(frozen=True)
class Finding:
    """A problem that went wrong, and how."""

    plan: str
    problem: str
    way: str
    detail: str
    #: Whether something was raised, rather than a difference found.
    raised: bool = False

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"holdfast fuzz --plan {self.plan} --problem '{self.problem}'"

    def __str__(self) -> str:
        return f"{self.plan}, {self.way}: {self.detail}"


@dataclass(frozen=True)
class _Outcome:
    """What a run left behind: its args, and the error that it raised."""

    args: Args
    error: str = ""


class Differs(Exception):
    """Two ways to run a problem do not agree."""

    def __init__(self, way: str, detail: str) -> None:
        super().__init__(detail)
        self.way = way


def check_problem(
    plan: AnyPlan, drawn: Drawn, *, interpret: bool = True, only: str | None = None
) -> Finding | None:
    """Run ``drawn`` every way, or ``only`` on one backend, and report the first way that differs.

    Without a GPU its kernels run if they may be interpreted.
    """
    try:
        with _threads(1):  # all but the kernels that are told otherwise
            _check(plan, drawn, interpret, only)
    except Differs as found:
        return Finding(plan.__name__, drawn.to_json(), found.way, str(found))
    except Exception as error:  # whatever goes wrong with a problem is a finding, not the end of the search
        detail = f"{type(error).__name__}: {error}"
        return Finding(plan.__name__, drawn.to_json(), "every way", detail, raised=True)
    return None


def _check(plan: AnyPlan, drawn: Drawn, interpret: bool, only: str | None) -> None:
    space = space_of(plan)
    desc: Any = space.case(plan, drawn.problem).descriptor
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
        if (backend, device) != ("gpu", "cpu"):  # no function picks the interpreter
            _check_public(plan, space, drawn.problem, desc, given[0], expected[0], device)
        on_cpu += [made] if device == "cpu" else []
    if drawn.broken is not None:
        complaint = refused_everywhere(on_cpu, given[0], drawn.broken)
        if complaint:
            raise Differs("broken args", complaint)


def _backends(interpret: bool, only: str | None) -> dict[str, str]:
    """The backends that are compared with the reference, and the device of each."""
    gpu = gpu_way() if interpret or torch.cuda.is_available() else None
    found = {"cpu": "cpu", **({"gpu": gpu.device} if gpu else {})}
    return {backend: device for backend, device in found.items() if only in (None, backend)}


def _selected(
    plan: AnyPlan, desc: Any, backend: str, device: str, limit: int | None = None
) -> Plan[Any, Any]:
    pref = PlanPreference(backend=backend, precompile=False, max_workspace_bytes=limit)
    return plan.select(Stream.current(device), desc, pref)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with shared_finely(least=64, worth=16):
            yield
    finally:
        torch.set_num_threads(before)


def _run(made: Plan[Any, Any], args: Args, device: str, threads: int = 1) -> _Outcome:
    """Run on a copy of ``args``, in a workspace between guard zones."""
    given = moved(args, device, _WIDER)
    verdict = made.can_implement(given)
    if not verdict:
        raise Differs(made.backend, f"can_implement refuses what was drawn: {verdict.reason}")
    size = made.workspace_size()
    memory = torch.empty(size + 2 * _GUARD + 8, dtype=torch.uint8, device=device)
    begin = _GUARD + size % 8  # any address will do
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
    return _Outcome(given if device == "cpu" else moved(given, "cpu"), error)


def _compare(plan: AnyPlan, expected: _Outcome, found: _Outcome, way: str) -> None:
    if expected.error != found.error:
        raise Differs(way, f"{expected.error or 'no error'!r} expected, {found.error or 'no error'!r} found")
    deferred = bool(found.error) and way.startswith("gpu")  # what it wrote before it was heard of, it wrote
    results = operands_of(found.args)
    for name, value in operands_of(expected.args).items():
        if isinstance(value, torch.Tensor) and not (deferred and name in plan.outputs):
            differing = mismatch(name, value, results[name])
            if differing:
                raise Differs(way, str(differing))


def _check_limit(usual: Plan[Any, Any], limit: int, args: Args, expected: _Outcome) -> None:
    """With less workspace there is another kernel with the same bits, or none."""
    device, way = usual.device.type, f"{usual.backend} with {limit} bytes of workspace"
    try:
        made = _selected(type(usual), usual.descriptor, usual.backend, device, limit)
    except Unsupported:
        return
    if made.workspace_size() > limit:
        raise Differs(way, f"a plan was selected that needs {made.workspace_size()}")
    _compare(type(usual), expected, _run(made, args, device), way)


def _check_public(
    plan: AnyPlan, space: Space, problem: Any, desc: Any, args: Args, expected: _Outcome, device: str
) -> None:
    way, error = f"public function on {device}", ""
    given = moved(args, device)
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
            found_one, plans_own = (f"{tuple(t.shape)} of {t.dtype}" for t in (got, wanted))
            raise Differs(way, f"{name} is {found_one}; the plan's is {plans_own}")
        if not torch.equal(canonical(wanted), canonical(got)):
            raise Differs(way, str(mismatch(name, wanted.clone(), got.clone())))
    after = operands_of(given if device == "cpu" else moved(given, "cpu"))
    for name, value in operands_of(args).items():
        if isinstance(value, torch.Tensor) and name not in plan.outputs:
            differing = mismatch(name, value, after[name])
            if differing:
                raise Differs(way, f"an input was changed: {differing}")

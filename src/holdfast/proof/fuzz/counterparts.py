"""Counterparts of public functions must give the bits of the functions, gradients included.

They are modules of ``holdfast.nn``, and torch's own functions while ``holdfast.install`` serves them. A call
of torch that is passed on to torch's kernel is compared with a tolerance instead, and so is every float64
result with torch's own.
"""

from __future__ import annotations

from types import ModuleType

import torch

from holdfast.install import installed, status, torch_functions
from holdfast.nn import module_functions
from holdfast.ops.scatter import counterparts as segments
from holdfast.proof.fuzz import routes
from holdfast.proof.fuzz.call import Call, Outcome, compare, takes_counterparts
from holdfast.proof.fuzz.check import Differs

#: Values of a problem for which the error of a sum is small: no infinities and no exponents far apart.
_ORDINARY = "spread"
_TOLERANCE = 1e-9


def check_counterparts(call: Call, expected: Outcome, device: str) -> None:
    """Compare every counterpart of ``call`` on ``device`` with the ``expected`` result."""
    if not takes_counterparts(call.plan) or isinstance(expected, str):
        return
    _check_own("the module", call, expected, device, module_functions)
    _check_own("the maxima of segments", call, expected, device, segments)
    _check_torch(call, expected, device)


def _check_own(way: str, call: Call, expected: Outcome, device: str, functions: ModuleType) -> None:
    """Compare a counterpart on the CPU with the function, and on another device with the CPU."""
    on_cpu = call.like("cpu", functions)
    own = on_cpu.checked()
    if own is None:
        return
    routes.note(way)
    compare(f"{way} on cpu", expected, own, functions.other_bits(call.plan.op, call.desc))
    made = on_cpu if device == "cpu" else call.like(device, functions)
    for _ in range(3):
        compare(f"{way} on {device}", own, made.checked())


def _check_torch(call: Call, expected: Outcome, device: str) -> None:
    made = call.like(device, torch_functions)
    own, error = _torch_alone(made)
    if own is None and not error:
        return  # torch has no such call
    with installed():
        for number in (1, 2, 3):
            passed_on = _passed_on()
            try:
                found = made.checked()
            except (RuntimeError, IndexError, ValueError):
                if not error:
                    raise
                routes.note("torch refuses")
                return
            served = _passed_on() == passed_on
            routes.note("torch served" if served else "torch passed on")
            way = f"torch's call {number} on {device}, {'served' if served else 'passed on'}"
            if served:
                compare(way, expected, found, torch_functions.other_bits(call.plan.op, call.desc))
            precise = torch_functions.is_precise(call.plan.op, call.desc)
            if precise and isinstance(own, dict) and isinstance(found, dict):
                _compare_roughly(way, call, own, found)


def _torch_alone(made: Call) -> tuple[Outcome, str]:
    """The result of torch itself, or its error."""
    try:
        return made(), ""
    except (RuntimeError, IndexError, ValueError) as refused:
        return None, str(refused)


def _passed_on() -> int:
    """The number of calls that were passed on, without those of integers."""
    reasons = [item for operator in status() for item in operator.passed_on.items()]
    return sum(count for reason, count in reasons if "the dtype is torch.int" not in reason)


def _compare_roughly(
    way: str, call: Call, own: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> None:
    problem = call.drawn.problem
    if getattr(problem, "values", _ORDINARY) != _ORDINARY or getattr(problem, "frequency", False):
        return  # torch's embedding_bag divides some rows by a wrong frequency
    if getattr(problem, "grid", "") == "not finite":
        return  # the CPU kernel of torch gives NaN for some of these coordinates
    for name, wanted in own.items():
        got = found[name]
        if wanted.dtype != torch.float64 or not wanted.numel():
            continue
        largest = float(wanted.abs().nan_to_num(0.0, 0.0).max())
        near = torch.isclose(got, wanted, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)
        if not bool(near.all()):
            place = tuple((~near).nonzero()[0].tolist())
            values = f"{float(wanted[place])!r} expected, {float(got[place])!r} found"
            raise Differs(way, f"{name}[{', '.join(map(str, place))}] is far from torch's: {values}")

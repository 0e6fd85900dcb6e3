"""The ways to call a public function on CUDA. Each must give the bits of the CPU.

The calls follow one another without synchronization: a first call, repetitions, calls with other values and
other memory between them, a side stream, and the replay of a CUDA graph. Free memory of torch's allocator is
poisoned before most calls. The results are compared after all calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import torch

from holdfast.core.contract import PlanPreference
from holdfast.core.device_errors import check_errors
from holdfast.core.draw import case_of
from holdfast.core.errors import HoldfastError
from holdfast.core.plan import AnyPlan
from holdfast.core.stream import Stream
from holdfast.proof.fuzz import routes
from holdfast.proof.fuzz.call import Call, Outcome, compare, poisoned_allocations
from holdfast.proof.fuzz.check import Differs
from holdfast.proof.fuzz.problem import Drawn

DEVICE = "cuda"
#: Sizes in bytes of the free blocks that are poisoned: torch keeps blocks of up to 1 MiB apart from others.
_LARGE, _SMALL, _SMALL_BLOCKS = 2**29, 2**20, 24
#: One in so many problems is captured in a CUDA graph, which takes longer than all other calls.
_CAPTURED = 3
_POISON = 0xFF


def check_on_cuda(call: Call, expected: Outcome, plainly: Callable[[Call], Outcome]) -> None:
    """Compare calls on CUDA with ``expected``, the outcome of ``call`` on the CPU."""
    if expected is None:
        return
    routes.note(_variant(call.plan, call.drawn))
    made = call.like(DEVICE)
    if isinstance(expected, str):
        for number in (1, 2, 3):
            compare(f"call {number} on {DEVICE}", expected, made.checked())
        return
    twin = Call(call.plan, _other_values(call.drawn))
    other_expected = plainly(twin)
    other = twin.like(DEVICE)
    found = _calls(made, other if isinstance(other_expected, dict) else made)
    torch.cuda.synchronize()
    check_errors()
    wanted = {
        id(made): _moved(expected),
        id(other): _moved(other_expected) if isinstance(other_expected, dict) else None,
    }
    for way, source, outcome in found:
        compare(f"{way} on {DEVICE}", wanted[id(source)], outcome)
    if Random(f"graph of {call.drawn.problem.name}").randrange(_CAPTURED) == 0:
        _check_graph(made, wanted[id(made)])


def _variant(plan: AnyPlan, drawn: Drawn) -> str:
    desc = case_of(plan, drawn.problem).descriptor
    pref = PlanPreference(backend="gpu", precompile=False)
    variant = getattr(plan.select(Stream.current(DEVICE), desc, pref).kernel, "variant", "")
    return f"{plan.__name__}: {variant}" if variant else plan.__name__


def _other_values(drawn: Drawn) -> Drawn:
    """The same problem with other random values."""
    problem = replace(drawn.problem, name=f"{drawn.problem.name} again")
    return replace(drawn, problem=problem, other=problem)


def _calls(made: Call, other: Call) -> list[tuple[str, Call, Outcome]]:
    found: list[tuple[str, Call, Outcome]] = []

    def record(way: str, source: Call) -> None:
        found.append((way, source, source()))

    with poisoned_allocations():
        record("the first call", made)
    _poison()
    record("the second call", made)
    record("a call with other values", other)
    record("a call after other values", made)
    record("a repeated call with other values", other)
    made.move()
    _poison()
    record("a call with other memory", made)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _poison()
        record("a call on a side stream", other)
        record("a repeated call on a side stream", made)
    torch.cuda.current_stream().wait_stream(side)
    record("a call after a side stream", made)
    return found


def _poison() -> None:
    """Fill the free memory that torch's allocator gives to the next calls on this stream."""
    torch.cuda.empty_cache()
    sizes = [_LARGE, *[_SMALL] * _SMALL_BLOCKS]
    for block in [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]:
        block.fill_(_POISON)


def _moved(outcome: Outcome) -> Outcome:
    if not isinstance(outcome, dict):
        return outcome
    return {name: result.to(DEVICE) for name, result in outcome.items()}


def _check_graph(made: Call, expected: Outcome) -> None:
    """Capture a call in a CUDA graph and replay it, unless the call synchronizes with the device."""
    if _synchronizes(made):
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made()
    if not isinstance(found, dict):
        raise Differs("a CUDA graph", f"the captured call gave {found!r}")
    routes.note("captured in a CUDA graph")
    for number in (1, 2):
        for result in found.values():
            if result.is_contiguous() and not made.gives(result):
                # view(-1) keeps any stride of a single element.
                result.as_strided((result.numel(),), (1,)).view(torch.uint8).fill_(_POISON)
        graph.replay()
        torch.cuda.synchronize()
        compare(f"replay {number} of a CUDA graph", expected, found)
    check_errors()


def _synchronizes(made: Call) -> bool:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made()
    except HoldfastError:
        raise
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False

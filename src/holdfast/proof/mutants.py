"""Mutation testing of the cases: runs wrong versions of the reference, which at least one case must reject.

A mutant runs in place of the kernel that ``select`` picks. The control is the unchanged reference, run the
same way: it must pass. ``MUTANTS`` are the mutants in the ``mutants.py`` of each op, and ``ANY_OP``.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from holdfast import ops
from holdfast.core.case import operands_of
from holdfast.core.mutant import Mutant, MutantError, Run, changed, targets, used_targets
from holdfast.core.plan import AnyPlan, Args, Launch
from holdfast.core.registry import plans
from holdfast.proof.conformance import (
    REFERENCE,
    Difference,
    cases_of,
    difference,
    run_reference,
    select_kernel,
)


class _MutantKernel:
    """The reference kernel, run through ``mutant.spoil``."""

    def __init__(self, mutant: Mutant, plan: AnyPlan, desc: Any, device: torch.device) -> None:
        self.mutant, self.plan, self.desc = mutant, plan, desc
        self.kernel = plan._kernel("reference", desc, device)
        self.workspace_size = self.kernel.workspace_size
        self.workspace_layouts = self.kernel.workspace_layouts

    def compile(self) -> None:
        """Nothing to compile: the reference is NumPy."""

    def prepare(self, args: Args) -> Launch[Any]:
        def launch(stream: Any, workspace: Any, args: Args, addresses: Any) -> None:
            def run(given: Args) -> None:
                self.kernel.prepare(given)(stream, workspace, given, given.signature()[1])

            self.mutant.spoil(self.plan, self.desc, run, args)

        return launch


@lru_cache(maxsize=128)
def _expected(name: str, number: int) -> tuple[Args, Args]:
    """The args and the reference result of a case, cached for all mutants of the plan."""
    plan = plans()[name]
    return run_reference(plan, cases_of(plan)[number])


def rejection(mutant: Mutant, plan: AnyPlan) -> Difference | None:
    """The first case of ``plan`` whose bits differ between mutant and reference, or None."""
    targets.clear()
    used_targets.clear()
    select = select_kernel(partial(_MutantKernel, mutant))
    for number, case in enumerate(cases_of(plan)):
        args, reference = _expected(plan.__name__, number)
        try:
            detail = difference(plan, case, REFERENCE, args, reference, select)
        except Exception as error:  # an exception does not show that the cases reject the mutant
            raise MutantError(
                f"mutant {mutant.name!r} raised {type(error).__name__} in {plan.__name__}, "
                f"case {case.name!r}: {error}. Only a difference counts; mend the mutant."
            ) from error
        if detail:
            return Difference(plan.__name__, case.name, str(REFERENCE), detail)
    unused = sorted(targets - used_targets)
    if unused:
        raise MutantError(
            f"mutant {mutant.name!r} replaces {', '.join(unused)}, which no case of {plan.__name__} uses. "
            f"Name what the reference uses now."
        )
    return None


def written(plan: AnyPlan, args: Args) -> dict[str, torch.Tensor]:
    """The outputs of a run by name, without those that are None."""
    outputs = {name: getattr(args, name) for name in plan.outputs}
    return {name: out for name, out in outputs.items() if out is not None}


def _zeros(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    for out in written(plan, args).values():
        out.zero_()


def _last_dropped(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    before = {name: out.clone() for name, out in written(plan, args).items()}
    run(args)
    for name, kept in before.items():
        out = getattr(args, name)
        if out.dim():
            rest = out.shape[-1] // 8 * 8  # the columns after the last whole tile
            out[..., rest:] = kept[..., rest:]
        else:
            out.copy_(kept)


#: Dtypes of indices and offsets. With wrong strides they would be refused, which is no difference.
_INDICES = (torch.int32, torch.int64)


def _strides_ignored(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    tensors = {name: value for name, value in operands_of(args).items() if isinstance(value, torch.Tensor)}
    wrong = {
        name: value.as_strided(value.shape, torch.empty(value.shape, device="meta").stride())
        for name, value in tensors.items()
        if value.dtype not in _INDICES and not value.is_contiguous() and 0 not in value.stride()
    }
    run(changed(args, **wrong))


def _accumulate_ignored(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    run(changed(args, accumulate=False))


def _accumulates(plan: AnyPlan) -> bool:
    return "accumulate" in plan.Args.__dataclass_fields__  # type: ignore[attr-defined]


def _unchanged(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    run(args)


CONTROL = Mutant("the reference itself", _unchanged)

#: Mistakes in loops and addressing, which apply to any op.
ANY_OP = (
    Mutant("zeros", _zeros),
    Mutant("last tile dropped", _last_dropped),
    Mutant("strides ignored", _strides_ignored),
    Mutant("accumulate ignored", _accumulate_ignored, only=_accumulates),
)

#: Every mutant of every op.
MUTANTS: tuple[Mutant, ...] = (*ANY_OP, *(mutant for own in ops.modules("mutants") for mutant in own.MUTANTS))

"""``holdfast verify --against``: compares the reports of two machines."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from rich.console import Console
from rich.markup import escape

from holdfast.proof.verify import PlanReport, Report


def report_differences(here: Report, there: Report, name: str, plans: Collection[str] = ()) -> Iterator[str]:
    """One sentence per difference, in the order of the plans. ``name`` is the label of ``there``.

    Compares only the plans named in ``plans``, or all plans of both reports if it is empty.
    """
    if here.numerics_version != there.numerics_version:
        yield f"numerics version {here.numerics_version} here, {there.numerics_version} in {name}"
    ours, theirs = ({plan.plan: plan for plan in report.plans} for report in (here, there))
    for plan in dict.fromkeys([*ours, *theirs]):
        if plans and plan not in plans:
            continue
        if plan not in theirs or plan not in ours:
            yield f"{plan} is only {'here' if plan in ours else f'in {name}'}"
        else:
            yield from _plan_differences(ours[plan], theirs[plan], name)


def _plan_differences(here: PlanReport, there: PlanReport, name: str) -> Iterator[str]:
    for case in dict.fromkeys([*here.digests, *there.digests]):
        ours, theirs = here.digests.get(case), there.digests.get(case)
        if ours is None or theirs is None:
            yield f"{here.plan}, case {case!r} is only {f'in {name}' if ours is None else 'here'}"
        elif ours != theirs:
            yield f"{here.plan}, case {case!r}: digest {ours} here, {theirs} in {name}"
    # Digests cover the reference only. A backend that differs from it on one machine is a difference, too.
    for found in here.differences:
        if found not in there.differences:
            yield f"only here: {found}"
    for found in there.differences:
        if found not in here.differences:
            yield f"only in {name}: {found}"


def compare(here: Report, there: Report, name: str, plans: Collection[str], console: Console) -> bool:
    """Print both machines and the first difference. Returns whether the reports are equal."""
    show = partial(console.print, soft_wrap=True, highlight=False)
    for which, report in (("here", here), (name, there)):
        machine = f"{escape(str(report.machine))}, numerics {report.numerics_version}"
        show(f"[bold]{escape(which)}[/] ({report.date[:10]}): {machine}")
    found = list(report_differences(here, there, name, plans))
    if found:
        more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
        show(f"[red]differs[/] first difference: {escape(found[0])}{more}")
        return False
    cases = sum(len(plan.digests) for plan in here.plans)
    show(f"[green]equal[/] {len(here.plans)} plans, {cases} cases: the digests are those in {escape(name)}")
    return True

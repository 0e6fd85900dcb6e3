"""Two machines' findings, compared: where the bits of one are not those of the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rich.console import Console
from rich.markup import escape

from holdfast.proof.verify import PlanReport, Report


def differences(here: Report, there: Report, name: str, plans: Collection[str] = ()) -> Iterator[str]:
    """A sentence for each difference, the first one first. ``there`` is called ``name``.

    ``plans`` are those that were asked for; all that either report has, if none is named.
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
            yield from _of_plan(ours[plan], theirs[plan], name)


def _of_plan(here: PlanReport, there: PlanReport, name: str) -> Iterator[str]:
    for case in dict.fromkeys([*here.digests, *there.digests]):
        ours, theirs = here.digests.get(case), there.digests.get(case)
        if ours is None or theirs is None:
            yield f"{here.plan}, case {case!r} is only {f'in {name}' if ours is None else 'here'}"
        elif ours != theirs:
            yield f"{here.plan}, case {case!r}: digest {ours} here, {theirs} in {name}"
    # Digests are of the reference. A backend that left it on one machine only is a difference too.
    for found in here.differences:
        if found not in there.differences:
            yield f"only here: {found}"
    for found in there.differences:
        if found not in here.differences:
            yield f"only in {name}: {found}"


def compare(here: Report, there: Report, name: str, plans: Collection[str], console: Console) -> bool:
    """Print both machines and the first difference. True if there is none."""
    for which, report in (("here", here), (name, there)):
        console.print(
            f"[bold]{escape(which)}[/] ({report.date[:10]}): {escape(str(report.machine))}, "
            f"numerics {report.numerics_version}",
            soft_wrap=True,
            highlight=False,
        )
    found = list(differences(here, there, name, plans))
    if found:
        more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
        console.print(
            f"[red]differs[/] first difference: {escape(found[0])}{more}", soft_wrap=True, highlight=False
        )
        return False
    cases = sum(len(plan.digests) for plan in here.plans)
    console.print(
        f"[green]equal[/] {len(here.plans)} plans, {cases} cases: the digests are those in {escape(name)}",
        soft_wrap=True,
        highlight=False,
    )
    return True

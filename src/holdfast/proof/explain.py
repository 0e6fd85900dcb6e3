"""The command ``holdfast explain``."""

from __future__ import annotations

import json
import typing
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.core.contract import PlanPreference, printed_bound
from holdfast.core.descriptor import Descriptor, field_types
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.stream import Stream
from holdfast.proof.conformance import plan_named


def explain(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="Name of the plan, such as QuantizePerChannelPlan.")
    ],
    field: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE",
            help="Descriptor fields, such as shape=64,3,7,7 axis=0; or the descriptor as JSON.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device to run on.")] = "cpu",
    backend: Annotated[str | None, typer.Option(help="Consider only this backend.")] = None,
) -> None:
    """Show which kernel would run for a descriptor, and why the others would not."""
    kind = plan_named(plan)
    descriptor = kind.Descriptor.from_fields(fields_of(kind.Descriptor, field or []))
    stream = Stream.current(device)
    pref = PlanPreference(backend=backend, precompile=False)
    candidates = kind.consider(stream, descriptor, pref)
    made = kind.select(stream, descriptor, pref)
    console = Console()
    console.print(f"[bold]{kind.__name__}[/] {escape(descriptor.to_json())}", soft_wrap=True)
    table = Table("implementation", "verdict")
    taken = next(candidate for candidate in candidates if not candidate.reason)
    for candidate in candidates:
        variant = getattr(made.kernel, "variant", "")
        runs = f"runs, {variant}" if variant else "runs"
        served = runs if candidate is taken else "could run, but comes later"
        table.add_row(candidate.label, escape(candidate.reason or served))
    console.print(table)
    promise = made.precision_guarantee()
    errors = ", ".join(f"{name} within {printed_bound(ulp)} ULP" for name, ulp in promise.ulp.items())
    deterministic = "deterministic, " if promise.deterministic else ""
    facts = {
        "sku": str(made.sku()), "guarantee": f"{deterministic}same bits {promise.bit_stable}, {errors}",
        "computes in": f"{promise.compute_dtype}, rounded {promise.rounding}",
        "workspace": f"{made.workspace_size()} bytes", "moves": f"{made.bytes_moved()} bytes at least",
    }  # fmt: skip
    for name, fact in facts.items():
        console.print(f"{name}: {escape(fact)}", soft_wrap=True, highlight=False)


def fields_of(kind: type[Descriptor], given: list[str]) -> dict[str, Any]:
    """Parse arguments ``FIELD=VALUE`` or a JSON object into fields in JSON form.

    Brackets of a list and quotes of a string are optional.
    """
    found: dict[str, Any] = {}
    types = field_types(kind)  # type: ignore[arg-type]
    for text in given:
        name, equals, value = text.partition("=")
        if text.lstrip().startswith("{"):
            found |= _json_object(text)
        elif not equals:
            raise InvalidDescriptor(f"{text!r} is not FIELD=VALUE; write, for example, shape=64,3,7,7.")
        elif name in found:
            raise InvalidDescriptor(f"{name} is given twice; give each field once.")
        else:
            is_list = typing.get_origin(types.get(name)) is tuple and not value.startswith("[")
            try:
                found[name] = json.loads(f"[{value}]" if is_list else value)
            except (ValueError, RecursionError):
                found[name] = value
    return found


def _json_object(text: str) -> dict[str, Any]:
    try:
        made = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidDescriptor(
            f"the descriptor is not JSON ({error}). Quote it for the shell: '{{\"shape\": [3, 4]}}'."
        ) from None
    return dict(made)

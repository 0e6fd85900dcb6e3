"""Every operator that can be replaced, and the choice among them by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch

from holdfast.core.checks import shown
from holdfast.core.errors import InvalidArgs
from holdfast.install import embedding, fake_quantize, grid_sample, interpolate, scatter
from holdfast.install.operators import Operator

#: Replaced only on request.
ON_REQUEST = frozenset({"fake_quantize"})


@cache
def catalogue() -> dict[str, Operator]:
    """The operators by name, without those that this version of torch does not have."""
    modules = (embedding, grid_sample, interpolate, scatter, fake_quantize)
    found = (operator for module in modules for operator in module.operators())
    return {operator.name: operator for operator in found if _exists(operator)}


def _exists(operator: Operator) -> bool:
    packet = getattr(torch.ops.aten, operator.base, None)
    overload = operator.name.partition(".")[2] or "default"
    return packet is not None and overload in packet.overloads()


def chosen(include: Any, exclude: Any, with_fake_quantize: bool) -> frozenset[str]:
    """The names of the operators to replace."""
    left_out = frozenset() if with_fake_quantize else ON_REQUEST
    found = set(catalogue()) if include is None else _named("include", include)
    unasked = {name for name in found if catalogue()[name].family in left_out}
    if include is not None and unasked:
        given = next(name for name in include if _named("include", [name]) & unasked)
        raise InvalidArgs(
            f"include names {given!r}, which is replaced on request only: codes may differ from torch's by "
            "one. Pass fake_quantize=True as well."
        )
    found -= unasked
    return frozenset(found - _named("exclude", exclude or ()))


def _named(argument: str, names: Any) -> set[str]:
    """The operators that have one of these names, or whose family has."""
    if isinstance(names, str) or not isinstance(names, Collection) or not all(type(n) is str for n in names):
        raise InvalidArgs(
            f"{argument} is {shown(names)}; it must be a list of names, such as ['interpolate', 'embedding']."
        )
    found = set[str]()
    for name in names:
        short = name.removeprefix("aten::")
        matching = {
            operator.name
            for operator in catalogue().values()
            if short in (operator.family, operator.name, operator.base)
        }
        if not matching:
            raise InvalidArgs(f"{argument} names {name!r}, which {_unknown(short)}")
        found |= matching
    return found


def _unknown(name: str) -> str:
    families = sorted({operator.family for operator in catalogue().values()})
    close = get_close_matches(name, [*families, *_bases(catalogue().values())], 1)
    return (
        f"is no operator that can be replaced; {f'did you mean {close[0]!r}? ' if close else ''}accepted are "
        f"{', '.join(families)}, and the operators of torch that holdfast.status() lists."
    )


def _bases(operators: Iterable[Operator]) -> list[str]:
    return sorted({operator.base for operator in operators})

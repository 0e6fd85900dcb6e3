"""Random problems, and their JSON form, which repeats a problem exactly."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from itertools import count
from typing import Any

import torch

from holdfast.core.case import laid_out, operands_of
from holdfast.core.descriptor import encoded
from holdfast.core.draw import Draw, case_of, space_of
from holdfast.core.dtypes import parse_dtype
from holdfast.core.errors import HoldfastError, InvalidArgs, InvalidDescriptor
from holdfast.core.granularity import Granularity, granularity_named
from holdfast.core.plan import AnyPlan, Args
from holdfast.core.registry import plans

#: Number of problems per theme. The problems of a theme share compiled kernels.
THEME = 25
#: Maximum number of draws to find a valid descriptor.
_TRIES = 1000


@dataclass(frozen=True)
class Drawn:
    """A random problem and how to run it.

    ``other`` has the same descriptor as ``problem``, but different values. One plan runs both in turn.
    ``layouts`` and ``other_layouts`` are by operand; operands that are not listed are contiguous. ``limit``
    is the workspace limit for ``select``, as a fraction of the usual size. ``broken`` is the number of a
    mistake in the args that every backend must refuse.
    """

    problem: Any
    other: Any
    layouts: dict[str, str]
    other_layouts: dict[str, str]
    limit: float | None = None
    broken: int | None = None

    def to_json(self) -> str:
        pairs = [(f.name, getattr(self.other, f.name)) for f in fields(self.other)]
        found: dict[str, Any] = {
            "problem": _changed(self.problem), "layouts": self.layouts,
            "other": {n: encoded(v) for n, v in pairs if v != getattr(self.problem, n)},
            "other_layouts": self.other_layouts, "limit": self.limit, "broken": self.broken,
        }  # fmt: skip
        return json.dumps({name: value for name, value in found.items() if value not in ({}, None)})

    @classmethod
    def from_json(cls, plan: AnyPlan, text: str) -> Drawn:
        """Parse the output of ``to_json`` for ``plan``."""
        try:
            data = {"other": {}, "layouts": {}, "other_layouts": {}, **json.loads(text)}
            kind = _problem_type(plan.__name__)
            problem = kind(**_values(kind, data.pop("problem")))
            return cls(problem, replace(problem, **_values(kind, data.pop("other"))), **data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgs(
                f"the problem is not one of {plan.__name__} ({type(error).__name__}: {error}); give what "
                "`holdfast fuzz` printed, in single quotes."
            ) from None

    def args(self, plan: AnyPlan) -> tuple[Args, Args]:
        """The args of ``problem`` and of ``other``, each operand in its layout."""
        first, second = (case_of(plan, problem).make() for problem in (self.problem, self.other))
        return _laid_out(first, self.layouts), _laid_out(second, self.other_layouts)


def _laid_out(args: Args, layouts: dict[str, str]) -> Args:
    changed = {
        name: laid_out(value, layouts[name])
        for name, value in operands_of(args).items()
        if isinstance(value, torch.Tensor) and name in layouts
    }
    return type(args)(**{**operands_of(args), **changed})


def draw_problems(plan: AnyPlan, seed: int, budget: int, *, each: int = THEME) -> Iterator[Drawn]:
    """An endless sequence of problems of ``plan``, ``each`` per theme.

    ``budget`` is the maximum number of elements of a tensor.
    """
    for theme in count():
        for number in range(each):
            yield draw_problem(plan, f"{plan.__name__}/{seed}/{theme}", number, budget)


def draw_problem(plan: AnyPlan, theme: str, number: int, budget: int) -> Drawn:
    """One problem of a theme: the first draw whose descriptor is valid."""
    space = space_of(plan)
    for again in range(_TRIES):
        kinds = theme if again < 20 else f"{theme}~{again // 20}"  # some kinds allow no valid shape
        draw = Draw(kinds, number + again * THEME, budget)
        problem = space.draw(plan, draw)
        try:
            case_of(plan, problem).descriptor.validate()
        except InvalidDescriptor:
            continue
        second = space.draw(plan, Draw(kinds, -1 - number - again * THEME, budget))
        other = replace(
            problem, name=f"{problem.name} other", **{name: getattr(second, name) for name in space.FREE}
        )
        layouts, other_layouts = (_draw_layouts(plan, draw, problem) for _ in range(2))
        limit = draw.one_of((0.0, 0.5, 0.99, 1.0)) if draw.chance(4) else None
        broken = draw.between(0, 999) if draw.chance(8) else None
        return Drawn(problem, other, layouts, other_layouts, limit, broken)
    raise HoldfastError(f"{_TRIES} draws from the space of {plan.__name__} gave no valid descriptor.")


def _draw_layouts(plan: AnyPlan, draw: Draw, problem: Any) -> dict[str, str]:
    """A random layout for every possible operand. The rows of packed codes stay contiguous."""
    packed = bool(getattr(problem, "packed", False))
    drawn = {
        f.name: draw.layout(written=f.name in plan.outputs, packed=packed and f.name == "q")
        for f in fields(plan.Args)  # type: ignore[arg-type]
        if f.type != "bool"
    }
    return {name: layout for name, layout in drawn.items() if layout != "contiguous"}


@cache
def _problem_type(name: str) -> type[Any]:
    return type(draw_problem(plans()[name], "type", 0, 100).problem)


def _changed(problem: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, in JSON."""
    values = {f.name: getattr(problem, f.name) for f in fields(problem)}
    return {f.name: encoded(values[f.name]) for f in fields(problem) if values[f.name] != f.default}


def _values(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {name: _decode(value, hints[name]) for name, value in data.items()}


def _decode(value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        each = [items[0]] * len(value) if items[-1] is Ellipsis else items
        return tuple(_decode(item, of) for item, of in zip(value, each, strict=True))
    if hint is torch.dtype:
        return parse_dtype(value)
    if hint is Granularity:
        return granularity_named(value)
    return hint(value) if isinstance(hint, type) and issubclass(hint, Enum) else value

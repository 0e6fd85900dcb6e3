"""Shrinks a failing problem: resets fields to their defaults and reduces sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from holdfast.core.errors import InvalidDescriptor
from holdfast.proof.fuzz.check import Finding
from holdfast.proof.fuzz.problem import Drawn

#: Time limit for shrinking one problem, in seconds.
MAX_SECONDS = 20.0


def shrink(drawn: Drawn, found: Finding, check: Callable[[Drawn], Finding | None]) -> Finding:
    """The finding of the smallest failing problem. The difference may be another than ``found``.

    A candidate that raises may be invalid. It counts only if ``found`` raised the same type of error.
    """
    until = time.monotonic() + MAX_SECONDS
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(drawn):
            if time.monotonic() > until:
                return found
            again = _checked(candidate, check)
            if again is not None and _error(again) == _error(found):
                drawn, found, smaller = candidate, again, True
                break
    return found


def _error(found: Finding) -> str:
    """The type of the error that was raised, or ''."""
    return found.detail.partition(":")[0] if found.raised else ""


def _checked(candidate: Drawn, check: Callable[[Drawn], Finding | None]) -> Finding | None:
    """Run ``check``. Invalid candidates count as passing."""
    try:
        found = check(candidate)
    except (InvalidDescriptor, ValueError, IndexError, ZeroDivisionError, AssertionError):
        return None
    return None if found is None or "InvalidDescriptor" in found.detail else found


def _simpler(drawn: Drawn) -> Iterator[Drawn]:
    if drawn.limit is not None:
        yield replace(drawn, limit=None)
    if drawn.broken is not None:
        yield replace(drawn, broken=None)
    if (drawn.other, drawn.other_layouts) != (drawn.problem, drawn.layouts):
        yield replace(drawn, other=drawn.problem, other_layouts=drawn.layouts)
    yield from (replace(drawn, layouts=fewer) for fewer in _fewer(drawn.layouts))
    yield from (replace(drawn, other_layouts=fewer) for fewer in _fewer(drawn.other_layouts))
    for field in fields(drawn.problem):
        value = getattr(drawn.problem, field.name)
        if field.name == "name":
            continue
        if field.default is not MISSING and value != field.default:
            yield _with(drawn, field.name, field.default)
        for less in _less(value):
            yield _with(drawn, field.name, less)


def _fewer(layouts: dict[str, str]) -> Iterator[dict[str, str]]:
    if layouts:
        yield {}
    for name in layouts:
        yield {other: layout for other, layout in layouts.items() if other != name}


def _with(drawn: Drawn, name: str, value: Any) -> Drawn:
    """Set a field of the problem, and of ``other`` if both had the same value."""
    same = getattr(drawn.other, name) == getattr(drawn.problem, name)
    other = replace(drawn.other, **{name: value}) if same else drawn.other
    return replace(drawn, problem=replace(drawn.problem, **{name: value}), other=other)


def _less(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield from dict.fromkeys(less for less in (1, value // 2, value - 1) if 0 <= less < value)
    elif isinstance(value, tuple):
        for place, item in enumerate(value):
            if isinstance(item, int) and not isinstance(item, bool) and len(value) > 1:
                yield value[:place] + value[place + 1 :]
            for less in _less(item):
                yield (*value[:place], less, *value[place + 1 :])

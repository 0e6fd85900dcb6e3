"""Counts of the routes that the problems of a search took: variants of kernels, and counterparts."""

from __future__ import annotations

from collections import Counter

_taken = Counter[str]()


def note(route: str) -> None:
    """Count a route of the problem that is being checked."""
    _taken[route] += 1


def take() -> dict[str, int]:
    """The counts since the last call of this function in this process."""
    found = dict(_taken)
    _taken.clear()
    return found

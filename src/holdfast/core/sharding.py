"""Sharding rules: how an operator runs on the shards of its tensors.

An op's ``sharding.py`` lists the rules of its operators in ``RULES``. ``distributed.dtensor`` registers them
for DTensors. This module does not import ``torch.distributed.tensor``, and neither do the rules.

A place says how one tensor is distributed along one dimension of a mesh of ranks: an int is the dimension
that is split into shards, None is a copy on every rank, ``SUM`` is a term on every rank, to be added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

Place = int | str | None
SUM = "sum"


@dataclass(frozen=True)
class Option:
    """Places with which an operator may run. A tensor that is not in ``inputs`` is copied to every rank."""

    inputs: Mapping[str, Place]
    outputs: tuple[Place, ...]


@dataclass(frozen=True)
class Whole:
    """The arguments of a call by name, with whole tensors in place of shards.

    ``parts`` is the number of ranks in the mesh: a size that it divides is split evenly in every case.
    """

    given: Mapping[str, Any]
    parts: int

    def __getitem__(self, name: str) -> Any:
        return self.given[name]


@dataclass(frozen=True)
class Shards:
    """How a call was distributed: the places of each tensor, one for each dimension of the mesh."""

    whole: Whole
    inputs: Mapping[str, Sequence[Place]]
    outputs: Sequence[Sequence[Place]]
    #: The shape of the mesh, and the coordinate of this rank in it.
    mesh: Sequence[int]
    coordinate: Sequence[int]

    def range_of(self, places: Sequence[Place], dim: int, size: int) -> tuple[int, int]:
        """The indices [begin, end) of this rank's shard of a dimension of ``size`` elements."""
        begin, end = 0, size
        for place, ranks, rank in zip(places, self.mesh, self.coordinate, strict=True):
            if place == dim and type(place) is int:
                chunk = -(-(end - begin) // ranks)
                begin, end = min(begin + rank * chunk, end), min(begin + (rank + 1) * chunk, end)
        return begin, end


def _run(operator: Callable[..., Any], local: dict[str, Any], shards: Shards) -> Any:
    return operator(**local)


@dataclass(frozen=True)
class Rule:
    """The sharding rule of an operator.

    ``options`` yields the places that it may run with besides copies of everything. ``run`` calls the
    operator with the arguments of this rank; it may adapt those that are not tensors.
    """

    options: Callable[[Whole], Iterable[Option]] = field(default=lambda whole: ())
    run: Callable[[Callable[..., Any], dict[str, Any], Shards], Any] = _run


_WANTED: ContextVar[Any] = ContextVar("wanted", default=None)


@contextmanager
def wanting(placements: Any) -> Iterator[None]:
    """Prefer these placements of a DTensor for the first output of an operator, if they cost nothing."""
    token = _WANTED.set(placements)
    try:
        yield
    finally:
        _WANTED.reset(token)


def wanted_placements() -> Any:
    """The placements of ``wanting``, or None."""
    return _WANTED.get()

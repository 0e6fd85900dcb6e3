"""Random problems for the fuzzer.

Draws depend on the seed alone and are the same on every machine. Most of the time of a search is compilation.
Problems are therefore grouped into themes: choices that select the compiled variant of a kernel are drawn
once per theme (``kind``), all other choices once per problem.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from holdfast.core.case import Case, Layout

if TYPE_CHECKING:
    from holdfast.core.plan import AnyPlan, Args

T = TypeVar("T")
#: Results by the names of the plan's outputs; None if the public function cannot express the problem.
Results = dict[str, torch.Tensor] | None

#: Sizes at and next to powers of two, where loops, tiles and vectors end.
_EDGES = [2**power + beside for power in range(2, 17) for beside in (-1, 0, 1)]
_PRIMES = [2, 3, 5, 7, 11, 13, 17, 23, 37, 53, 97, 131, 257, 641, 1021, 4099]


class Draw:
    """The random choices of one problem. A tensor has at most ``budget`` elements, most have far fewer."""

    def __init__(self, theme: str, number: int, budget: int) -> None:
        self._kinds = Random(f"kinds of {theme}")
        self._random = Random(f"{number} of {theme}")
        self.label = f"{theme}/{number}"
        self.budget = self.one_of([budget // 100, budget // 20, budget // 4, budget], [12, 6, 2, 1])

    def kind(self, options: Sequence[T], weights: Sequence[int] | None = None) -> T:
        """One of ``options``, the same for all problems of a theme: it selects the compiled variant."""
        return self._kinds.choices(options, weights)[0]

    def one_of(self, options: Sequence[T], weights: Sequence[int] | None = None) -> T:
        return self._random.choices(options, weights)[0]

    def chance(self, one_in: int) -> bool:
        return self._random.randrange(one_in) == 0

    def between(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def size(self, most: int, least: int = 0) -> int:
        """A size up to ``most``: rarely 0, often 1, a prime, or next to a power of two."""
        if least == 0 and self.chance(40):
            return 0
        least = max(least, 1)
        if most <= least:
            return least
        choice = self.between(0, 5)
        if choice == 0:
            return least
        if choice <= 3:
            edges = [edge for edge in (_PRIMES if choice == 1 else _EDGES) if least <= edge <= most]
            if edges:
                return self.one_of(edges)
        return self.between(least, min(most, max(least, 4 ** self.between(1, 12))))

    def shape(self, least_rank: int = 0, most_rank: int = 8) -> tuple[int, ...]:
        """A shape of at most ``budget`` elements and up to eight axes, mostly a few."""
        weights = [2, 6, 8, 6, 4, 2, 1, 1, 1][least_rank : most_rank + 1]
        rank = self.one_of(range(least_rank, most_rank + 1), weights)
        sizes, room = [1] * rank, self.budget
        for axis in self._random.sample(range(rank), rank):
            sizes[axis] = self.size(max(room if self.chance(2) else int(room**0.5), 1))
            room //= max(sizes[axis], 1)
        return tuple(sizes)

    def layout(self, *, written: bool = False, packed: bool = False) -> str:
        """A layout. Elements of a ``written`` tensor never share memory; ``packed`` rows are contiguous."""
        if self.chance(3):
            return "contiguous"
        kinds = Random(self._kinds.random() + self.between(0, 2))  # a few layouts per theme
        return str(
            Layout(
                order=kinds.choice([0, 0, 1, kinds.randrange(40320)]),
                step=1 if packed else kinds.choice([1, 1, 1, 2, 3]),
                gap=kinds.choice([0, 0, 1, 16, 5]),
                shift=kinds.choice([0, 0, 0, 1, 3, 8]),
                broadcast=0 if written else kinds.choice([0] * 12 + [1, 2, 4, 3, 255]),
                last=int(packed),
            )
        )


def form_of(name: str, forms: int) -> int:
    """The number of the form of a call, by the problem's name. Other values have the same form."""
    return Random(name.partition(" ")[0]).randrange(forms)


class Inexpressible(Exception):
    """A counterpart of a public function has no call for a problem."""


class Space(Protocol):
    """The interface of ``ops/<op>/space.py``: the problems of a plan, and its public function.

    A problem is a frozen dataclass whose fields are numbers, strings, dtypes, enums, granularities, or tuples
    of these. ``FREE`` names the fields that its descriptor does not depend on. A problem has no layouts: the
    search assigns one to each operand.
    """

    FREE: Sequence[str]

    def draw(self, plan: AnyPlan, draw: Draw) -> Any:
        """A random problem. The search draws again if its descriptor is not valid."""

    def public(self, plan: AnyPlan, problem: Any, desc: Any, args: Args, functions: Any = ...) -> Results:
        """Results and gradients of the public function for ``args``.

        ``functions`` holds other functions with the names and arguments of holdfast's, such as torch's. A
        space whose functions have no counterpart does not need this parameter.
        """


def case_of(plan: AnyPlan, problem: Any) -> Case:
    """The descriptor and the tensors of ``problem``, by ``case`` in the module of the plan's cases."""
    return cast(Case, importlib.import_module(plan.cases).case(plan, problem))


def space_of(plan: AnyPlan) -> Space:
    """The space of a plan: the module ``space`` in the package of its cases."""
    return cast(Space, importlib.import_module(plan.cases.removesuffix("cases") + "space"))

"""Random problems of scatter and gather functions for ``holdfast bench --drawn``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.core.training_step import COMPILED, EAGER, OURS, Step, StepCase
from holdfast.ops.embedding.drawn import drawn_table
from holdfast.ops.embedding.models import drawn_indices
from holdfast.ops.scatter import torch_op

Tensor = torch.Tensor
#: Functions of a table, an index and terms, or of a table and an index.
Functions = tuple[Callable[..., Tensor], Callable[..., Tensor]]

_ADDING: dict[str, Functions] = {
    "index_add": (
        lambda table, index, terms: torch_op.index_add(table, 0, index, terms),
        lambda table, index, terms: torch.index_add(table, 0, index, terms),
    ),
    "index_put": (
        lambda table, index, terms: torch_op.index_put(table, (index,), terms, accumulate=True),
        lambda table, index, terms: torch.index_put(table, (index,), terms, accumulate=True),
    ),
    "scatter_add": (
        lambda table, index, terms: torch_op.scatter_add(table, 0, index, terms),
        lambda table, index, terms: torch.scatter_add(table, 0, index, terms),
    ),
    "scatter_reduce": (
        lambda table, index, terms: torch_op.scatter_reduce(table, 0, index, terms, "mean"),
        lambda table, index, terms: torch.scatter_reduce(table, 0, index, terms, "mean"),
    ),
}
_READING: dict[str, Functions] = {
    "gather": (
        lambda table, index: torch_op.gather(table, 0, index),
        lambda table, index: torch.gather(table, 0, index),
    ),
    "index_select": (
        lambda table, index: torch_op.index_select(table, 0, index),
        lambda table, index: torch.index_select(table, 0, index),
    ),
}
#: Functions with an index for each element.
_BY_ELEMENT = ("scatter_add", "scatter_reduce", "gather")


@dataclass(frozen=True)
class ScatterDrawn(StepCase):
    """``count`` rows of ``columns`` that are added to, or read from, ``rows`` rows.

    ``index`` is "rows", one index for each row; "expanded", the same as a view for each element; or
    "elements", an own index for each element.
    """

    rows: int
    columns: int
    count: int
    spread: str
    index: str

    @property
    def label(self) -> str:
        return f"R={self.rows} D={self.columns} N={self.count} {self.spread}, index of {self.index}"

    def steps(self, device: torch.device) -> dict[str, Step]:
        generator = torch.Generator(device).manual_seed(28)

        def normal(rows: int) -> Tensor:
            return torch.randn(rows, self.columns, device=device, generator=generator).to(self.real)

        table, terms = normal(self.rows).requires_grad_(), normal(self.count).requires_grad_()
        shape = (self.count, self.columns) if self.index == "elements" else (self.count,)
        index = drawn_indices(self.spread, self.rows, shape, device, generator)
        if self.index == "expanded":
            index = index[:, None].expand(-1, self.columns)
        inputs: tuple[Tensor, ...] = (table, index, terms)
        if self.op in _READING:
            (ours, eager), inputs, dout = _READING[self.op], inputs[:2], terms.detach()
        else:
            (ours, eager), dout = _ADDING[self.op], normal(self.rows)
        return {
            OURS: Step(ours, inputs, dout),
            EAGER: Step(eager, inputs, dout),
            COMPILED: Step(eager, inputs, dout),
        }


def _draw(sizes: RandomSizes, op: str) -> ScatterDrawn:
    index = sizes.one_of(("elements", "expanded")) if op in _BY_ELEMENT else "rows"
    spread = sizes.one_of(("uniform", "zipf"))
    return ScatterDrawn(op, "", sizes.real, *drawn_table(sizes, most_columns=1024), spread, index)


DRAWS: dict[str, DrawCase] = {op: partial(_draw, op=op) for op in (*_ADDING, *_READING)}

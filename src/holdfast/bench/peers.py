"""What a user has today: torch's own operators, and the plain formula, eager and compiled.

A peer allocates what it returns, as its users let it; a plan writes where it is told to.
"""

from __future__ import annotations

import torch

from holdfast.core.benchmark import Call, NoPeer, Problem, Tensors

#: The peers that every case is asked for.
PEERS = ("torch op", "eager", "compiled")


def kinds(problem: Problem, tensors: Tensors) -> tuple[str, ...]:
    """The peers of ``problem`` by name."""
    return *PEERS, *problem.other_peers(tensors)


def peer(kind: str, problem: Problem, tensors: Tensors) -> Call:
    """The peer's way to do the work of ``problem`` on ``tensors``; NoPeer says why there is none."""
    if kind == "torch op":
        return problem.torch_op(tensors)
    if kind not in PEERS:
        return problem.other_peers(tensors)[kind]()
    formula, inputs = problem.formula(tensors)
    if kind == "compiled":
        torch.compiler.reset()
        formula = torch.compile(formula, dynamic=False)
    return lambda: formula(*inputs)


__all__ = ["PEERS", "NoPeer", "kinds", "peer"]

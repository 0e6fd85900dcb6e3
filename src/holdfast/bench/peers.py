"""The peers that a plan is timed against: torch's own operator, and the plain formula, eager and compiled.

Peers allocate their results, as in ordinary use; a plan writes into given memory.
"""

from __future__ import annotations

import torch

from holdfast.core.benchmark import Call, Problem, Tensors

#: The peers of every case.
PEERS = ("torch op", "eager", "compiled")


def peer_names(problem: Problem, tensors: Tensors) -> tuple[str, ...]:
    """The names of all peers of ``problem``."""
    return *PEERS, *problem.other_peers(tensors)


def peer(kind: str, problem: Problem, tensors: Tensors) -> Call:
    """The call of peer ``kind`` for ``problem``. Raises NoPeer with the reason if there is none."""
    if kind == "torch op":
        return problem.torch_op(tensors)
    if kind not in PEERS:
        return problem.other_peers(tensors)[kind]()
    formula, inputs = problem.formula(tensors)
    if kind == "compiled":
        torch.compiler.reset()
        formula = torch.compile(formula, dynamic=False)
    return lambda: formula(*inputs)

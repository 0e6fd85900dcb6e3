"""Fuzzing: random problems from the whole input space of every plan, run on every backend.

``problem`` draws problems and converts them to JSON, ``check`` runs one problem, ``functions`` checks public
functions at real sizes, ``shrink`` reduces a failing problem, and ``search`` runs problems in several
processes until a time limit.
"""

from holdfast.proof.fuzz.check import Finding, check_problem
from holdfast.proof.fuzz.problem import Drawn, draw_problems
from holdfast.proof.fuzz.search import fuzz_plan

__all__ = ["Drawn", "Finding", "check_problem", "draw_problems", "fuzz_plan"]

"""Problems that nobody picked: drawn from the whole space of every plan, and run every way there is.

``problem`` draws them and writes them as JSON, ``check`` runs one, ``shrink`` makes a failing one small, and
``search`` goes on for as long as it is told, in several processes.
"""

from holdfast.proof.fuzz.check import Finding, check_problem
from holdfast.proof.fuzz.problem import Drawn, draw_problems
from holdfast.proof.fuzz.search import fuzz_plan

__all__ = ["Drawn", "Finding", "check_problem", "draw_problems", "fuzz_plan"]

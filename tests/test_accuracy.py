"""Every result within the error that its plan states, against exact arithmetic.

Sums have from one to a million terms, of kinds that are hard on a sum. Problems are drawn from all that a
plan accepts, and the named cases are checked too. Exact numbers are Python's integers times a power of two.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
import torch

import holdfast as hf
from exact.drawn import DRAWN
from exact.long_sums import LONG, Long, rng_of
from exact.numbers import ulp
from exact.outputs import EXACTLY, checked
from exact.values import KINDS
from holdfast.core.dtypes import FLOATS
from holdfast.proof.conformance import cases_of

PLANS = hf.plans()
DTYPES = {name: record.torch for name, record in FLOATS.items()}
#: Around the chunks of an ordered sum and the rows, lanes and blocks of a tree sum; and primes.
SHORT = (1, 2, 3, 7, 31, 32, 33, 61, 255, 256, 257)
MIDDLE = (1021, 4095, 4096, 4097, 7919, 12289)
LONGEST = (10**5, 10**6)
DRAWS = 200


def test_every_stated_bound_is_tested() -> None:
    missing = set(PLANS) - set(EXACTLY)
    assert not missing, f"exact/outputs.py does not say what {missing} compute; add it"
    undrawn = {plan.op for plan in PLANS.values()} - set(DRAWN)
    assert not undrawn, f"exact/drawn.py draws no problem of {undrawn}; add it"


def merged(total: Counter[str], found: dict[str, tuple[int, float]]) -> None:
    for name, (count, _) in found.items():
        total[name] += count


@pytest.mark.parametrize("name", PLANS)
def test_problems_drawn_at_random(name: str) -> None:
    plan = PLANS[name]
    total: Counter[str] = Counter()
    stated: set[str] = set()
    for draw in range(DRAWS):
        problem = DRAWN[plan.op](plan, rng_of(name, draw))
        merged(total, checked(plan, problem.desc, problem.args, "reference"))
        pref = hf.PlanPreference(backend="reference")
        stated |= set(plan.select(hf.Stream.current("cpu"), problem.desc, pref).precision_guarantee().ulp)
    assert stated == set(plan.outputs), f"{name} states no error for some of {plan.outputs}"
    assert all(total[output] > DRAWS for output in plan.outputs), total


@pytest.mark.parametrize("name", PLANS)
def test_the_named_cases(name: str) -> None:
    plan = PLANS[name]
    total: Counter[str] = Counter()
    for case in cases_of(plan):
        merged(total, checked(plan, case.descriptor, case.make(), "reference"))
    assert all(total[output] > 50 for output in plan.outputs), total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LONG)
def test_short_sums_of_every_kind(name: str, dtype: str) -> None:
    for count in SHORT:
        for kind in KINDS:
            run(name, count, dtype, kind, "reference")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LONG)
def test_sums_of_thousands(name: str, dtype: str) -> None:
    for position, count in enumerate(MIDDLE):
        for offset in range(0, len(KINDS), 3):
            run(name, count, dtype, list(KINDS)[(position + offset) % len(KINDS)], "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LONG)
def test_sums_of_a_hundred_thousand_and_a_million(name: str, dtype: str) -> None:
    first = list(LONG).index(name) + list(DTYPES).index(dtype)
    kinds = [kind for kind in KINDS if kind != "wide"]
    run(name, LONGEST[0], dtype, list(KINDS)[first % len(KINDS)], "cpu")
    run(name, LONGEST[1], dtype, kinds[first % len(kinds)], "cpu")


def run(name: str, count: int, dtype: str, kind: str, backend: str) -> None:
    compared = 0
    for problem in LONG[name](Long(count, DTYPES[dtype], kind, rng_of(name, count, dtype, kind))):
        found = checked(problem.plan, problem.desc, problem.args, backend)
        compared += sum(count for count, _ in found.values())
    assert compared or dtype == "float16", "a test that compares nothing"


def test_units_are_those_of_the_dtype() -> None:
    assert ulp(Fraction(1), torch.float32) == Fraction(2) ** -23
    assert ulp(Fraction(3, 2), torch.float16) == Fraction(2) ** -10
    assert ulp(Fraction(0), torch.float32) == Fraction(2) ** -149
    assert ulp(Fraction(1, 3), torch.bfloat16) == Fraction(2) ** -9

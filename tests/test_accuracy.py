"""Compares every result with exact arithmetic. The error must be within the bound that the plan states.

Sums have one to a million terms, with values that are hard to sum. The other problems are random problems
of every plan, and the named cases. Exact numbers are Python integers times a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import reduce
from itertools import islice

import numpy as np
import pytest
import torch

import holdfast as hf
from exact.drawn import DRAWN
from exact.long_sums import LONG, Long, Problem, made, rng_of, rows
from exact.numbers import Exact, ulp
from exact.outputs import EXACTLY, checked, compared, flat
from exact.values import KINDS, terms
from holdfast.core.case import Case
from holdfast.core.contract import printed_bound
from holdfast.core.dtypes import FLOATS
from holdfast.ops.segment_sum.indexed import ordered_additions
from holdfast.ops.tree_sum.blocks import rounding_errors
from holdfast.proof.conformance import cases_of, execute, select_on

PLANS = hf.plans.all()
DTYPES = {name: record.torch for name, record in FLOATS.items()}
#: Sizes around the chunks of an ordered sum and the rows, lanes and blocks of a tree sum; and primes.
SHORT = (1, 2, 3, 7, 31, 32, 33, 61, 255, 256, 257)
MIDDLE = (1021, 4095, 4096, 4097, 7919)
#: Number of random problems per plan.
DRAWS = 200
#: Plans with bounds of many ULP, although their sums only cover the corners of a sample.
FEW_TERMS = {"GridSamplePlan"}

Found = dict[str, tuple[int, float]]


def merged(*every: Found) -> Found:
    """For each output, the total number of comparisons and the largest fraction of the allowed error."""
    total: Found = {}
    for found in every:
        for name, (count, share) in found.items():
            counted, largest = total.get(name, (0, 0.0))
            total[name] = counted + count, max(largest, share)
    return total


def test_every_plan_has_exact_results() -> None:
    missing = set(PLANS) - set(EXACTLY)
    assert not missing, f"exact/outputs.py does not say what {missing} compute; add it"
    undrawn = {plan.op for plan in PLANS.values()} - set(DRAWN)
    assert not undrawn, f"exact/drawn.py draws no problem of {undrawn}; add it"


@pytest.mark.parametrize("name", PLANS)
def test_problems_drawn_at_random(name: str) -> None:
    plan = PLANS[name]
    found, stated = [], dict.fromkeys(plan.outputs, -1.0)
    for draw in range(DRAWS):
        problem = DRAWN[plan.op](plan, rng_of(name, draw))
        found.append(checked(plan, problem.desc, problem.args, "reference"))
        pref = hf.PlanPreference(backend="reference")
        selection = plan.select(hf.Stream.current("cpu"), problem.desc, pref)
        for output, bound in selection.precision_guarantee().ulp.items():
            stated[output] = max(stated[output], bound)
    assert set(stated) == set(plan.outputs) and min(stated.values()) >= 0, "an output without a bound"
    total = merged(*found)
    for output in plan.outputs:
        count, share = total[output]
        assert count > DRAWS, f"{output} was compared {count} times only"
        assert share > 0.25 or output == "q", f"the bound of {output} is loose: {share:.2f} of it is used"
    if max(stated.values()) > 8:
        assert name in LONG or name in FEW_TERMS, f"exact/long_sums.py has no long sums of {name}; add some"


@pytest.mark.parametrize("name", PLANS)
def test_the_named_cases(name: str) -> None:
    plan = PLANS[name]
    cases = [case for case in cases_of(plan) if not case.common]
    found = (checked(plan, case.descriptor, case.make(), "reference") for case in cases)
    total = merged(*found)
    assert all(total[output][0] > 50 for output in plan.outputs), total


@pytest.mark.parametrize("name", PLANS)
def test_a_result_beside_the_bound_is_rejected(name: str) -> None:
    plan = PLANS[name]
    for draw in range(20):
        problem = DRAWN[plan.op](plan, rng_of(name, draw))
        case = Case("drawn", problem.desc, lambda args=problem.args: args)
        selection = select_on("reference")(plan, case, hf.Stream.current("cpu"))
        bounds, args = selection.precision_guarantee().ulp, problem.args
        result = execute(plan, case, args, select_on("reference"))
        for element in EXACTLY[name](problem.desc, result):
            written = flat(problem.desc, getattr(result, element.output))
            if element.codes or element.overflows(written.dtype):
                continue
            allowed = element.allowed(bounds[element.output], written.dtype)
            wrong = float(element.right + 2 * allowed + ulp(element.magnitude, written.dtype))
            before = written[element.place].clone()
            written[element.place] = wrong
            with pytest.raises(AssertionError, match="are stated"):
                compared(plan, problem.desc, args, result, bounds)
            written[element.place] = before
            break


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LONG)
def test_short_sums_of_every_kind(name: str, dtype: str) -> None:
    every = [run(name, count, dtype, kind, "reference") for count in SHORT for kind in KINDS]
    for output, (_, share) in merged(*every).items():
        assert share > 0.1, f"the bound of {output} is loose: {share:.2f} of it is used"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LONG)
def test_sums_of_thousands(name: str, dtype: str) -> None:
    kinds = list(KINDS)
    for position, count in enumerate(MIDDLE):
        for kind in (2 * position, 2 * position + 1 + turn(name, dtype)):
            run(name, count, dtype, kinds[kind % len(kinds)], "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LONG)
def test_sums_of_a_hundred_thousand(name: str, dtype: str) -> None:
    run(name, 10**5, dtype, list(KINDS)[turn(name, dtype) % len(KINDS)], "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LONG)
def test_sums_of_a_million(name: str, dtype: str) -> None:
    """One problem per plan and dtype only, since these sums take the longest."""
    kinds = [kind for kind in KINDS if kind != "wide"]  # its exact sums need too much memory
    run(name, 10**6, dtype, kinds[turn(name, dtype) % len(kinds)], "cpu", only=turn(name, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [3, 33, 100, 256])
def test_many_short_rows(count: int, dtype: str) -> None:
    for problem in rows(count, DTYPES[dtype], rng_of(count, dtype)):
        assert checked(problem.plan, problem.desc, problem.args, "cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_products_below_the_normal_range_lose_half_of_the_smallest_number(dtype: str) -> None:
    """Each of 4096 products is half of the smallest subnormal and rounds to 0: more than the plain bound."""
    count, real = 4096, FLOATS[dtype]
    smallest = float(ulp(Fraction(0), real.compute.torch))
    factor = 2.0**-20
    desc = hf.plans.EmbeddingBagDescriptor(
        shape=(1, count), num_embeddings=1, embedding_dim=1, mode="sum", per_sample_weights=True,
        dtype=real.torch,
    )  # fmt: skip
    weight = torch.tensor([[smallest / factor / 2]], dtype=real.torch)
    problem = made(
        "EmbeddingBagPlan", desc, weight=weight, indices=torch.zeros(1, count, dtype=torch.int64),
        per_sample_weights=torch.full((1, count), factor, dtype=real.torch),
    )  # fmt: skip
    (element,) = EXACTLY["EmbeddingBagPlan"](desc, problem.args)
    assert element.right == element.lost == count * Fraction(smallest) / 2
    assert checked(problem.plan, desc, problem.args, "cpu")["out"][0] == 1
    if real is real.compute:
        pref = hf.PlanPreference(backend="cpu", precompile=False)
        stated = problem.plan.select(hf.Stream.current("cpu"), desc, pref).precision_guarantee().ulp
        assert element.right > Fraction(stated["out"]) * Fraction(smallest)


def turn(name: str, dtype: str) -> int:
    """A number per plan and dtype, which distributes kinds and problems over them."""
    return list(LONG).index(name) + list(DTYPES).index(dtype)


def run(name: str, count: int, dtype: str, kind: str, backend: str, only: int | None = None) -> Found:
    """Run the problems of a plan with sums of this length, or only one of them."""

    def problems(length: int) -> Iterator[Problem]:
        return LONG[name](Long(length, DTYPES[dtype], kind, rng_of(name, count, dtype, kind)))

    chosen = problems(count)
    if only is not None:
        place = only % len(list(problems(1000)))
        chosen = islice(chosen, place, place + 1)
    found = merged(*(checked(problem.plan, problem.desc, problem.args, backend) for problem in chosen))
    # Only float16 sums may overflow. They are not compared.
    assert found or dtype == "float16", "nothing was compared"
    return found


def added(a: int, b: int) -> int:
    """The number of roundings of a sum, given those of its terms; -1 is a zero of the padding."""
    return max(a, b) if min(a, b) < 0 else max(a, b) + 1


def counted_in_a_tree(count: int) -> int:
    terms = [0] * count
    while True:
        sums = []
        for begin in range(0, max(count, 1), 4096):
            block = terms[begin : begin + 4096] + [-1] * max(0, begin + 4096 - count)
            lanes = [reduce(added, block[lane::256]) for lane in range(256)]
            while len(lanes) > 1:
                lanes = [added(*pair) for pair in zip(lanes[0::2], lanes[1::2], strict=True)]
            sums += lanes
        if len(sums) == 1:
            return sums[0]
        terms, count = sums, len(sums)


def counted_in_order(count: int) -> int:
    terms = [0] * count
    while len(terms) > 1:
        terms = [reduce(added, terms[begin : begin + 32]) for begin in range(0, len(terms), 32)]
    return terms[0]


@pytest.mark.parametrize("count", [*SHORT, *MIDDLE, 70000])
def test_roundings_are_counted_as_the_sums_are_made(count: int) -> None:
    assert rounding_errors(count) == counted_in_a_tree(count)
    assert ordered_additions(count) == counted_in_order(count)


def test_a_million_terms_are_rounded_as_often_as_the_docs_say() -> None:
    assert (ordered_additions(10**6), rounding_errors(10**6)) == (123, 31)


def test_a_printed_bound_is_rounded_up() -> None:
    printed = {0.5: "0.5", 66.00026: "66.0003", 125.75001: "125.7501", 0.0: "0", 100.0: "100"}
    assert {bound: printed_bound(bound) for bound in printed} == printed


def test_counts_beyond_the_whole_numbers_of_float32_are_rounded_too() -> None:
    def stated(count: int, dtype: torch.dtype) -> float:
        desc = hf.plans.EmbeddingBagDescriptor(
            shape=(1, count), num_embeddings=1, embedding_dim=1, mode="mean", dtype=dtype
        )
        pref = hf.PlanPreference(backend="reference")
        plan = hf.plans.EmbeddingBagPlan.select(hf.Stream.current("cpu"), desc, pref)
        return round(plan.precision_guarantee().ulp["out"])

    assert stated(2**24 + 1, torch.float32) - stated(2**24 + 1, torch.float64) == 1
    assert stated(2**24, torch.float32) == stated(2**24, torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_numbers_are_the_floats(kind: str) -> None:
    for dtype in DTYPES.values():
        values = [*terms(kind, rng_of(kind), 40, 1, dtype)[:, 0].double().tolist(), 0.0, -0.0]
        exact, fractions = Exact.of(np.array(values)), [Fraction(value) for value in values]
        assert [exact[i].total() for i in range(len(values))] == fractions
        assert [Exact.of(np.array(value)).total() for value in values] == fractions  # one by one
        assert Exact.of(np.array(values[:9])).total() == sum(fractions[:9])
        assert (exact * exact - exact).total() == sum(f * f - f for f in fractions)


def test_units_are_those_of_the_dtype() -> None:
    assert ulp(Fraction(1), torch.float32) == Fraction(2) ** -23
    assert ulp(Fraction(3, 2), torch.float16) == Fraction(2) ** -10
    assert ulp(Fraction(0), torch.float32) == Fraction(2) ** -149
    assert ulp(Fraction(1, 3), torch.bfloat16) == Fraction(2) ** -9

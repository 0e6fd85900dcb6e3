"""Every case of every plan on every backend: equal bits and pinned digests."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

import holdfast as hf
from holdfast.core.bits import digest, mismatch
from holdfast.core.case import GUARD, LAYOUTS, Case, laid_out, poisoned, poisoned_output, random_bits
from holdfast.core.plan import Args
from holdfast.proof import digests
from holdfast.proof.conformance import Way, cases_of, check, run_reference, select_on, ways
from holdfast.proof.sweeps import SweepRun, sweeps

PLANS = sorted(hf.plans.all())


@lru_cache(maxsize=1)  # the tests of one plan follow each other
def references(name: str) -> list[tuple[Case, Args, Args]]:
    """The cases of a plan, their args, and copies of these that the reference has run on."""
    plan = hf.plans.all()[name]
    return [(case, *run_reference(plan, case)) for case in cases_of(plan)]


@pytest.mark.parametrize("way", ways(), ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_equal_to_the_reference_in_every_bit(name: str, way: Way) -> None:
    plan = hf.plans.all()[name]
    found = []
    for case, args, reference in references(name):
        if case.common and way.backend == "gpu" and way.device == "cpu":
            continue
        found += check(plan, case, way, args, reference, select_on(way.backend))
    assert found == []


@pytest.mark.parametrize("name", PLANS)
def test_digests_are_the_pinned_ones(name: str) -> None:
    plan = hf.plans.all()[name]
    found = {case.name: digests.of(plan, run_reference(plan, case)[1]) for case in cases_of(plan)}
    assert found == digests.pinned()[name]


def test_no_digest_is_left_of_a_plan_that_is_gone() -> None:
    assert sorted(digests.pinned()) == PLANS


def test_every_backend_is_compared() -> None:
    assert {way.backend for way in ways()} == {"reference", "cpu", "gpu"}
    assert [way.threads for way in ways() if way.backend == "cpu"] == [1, 2, 8]


def test_names_of_cases_differ() -> None:
    for plan in hf.plans.all().values():
        names = [case.name for case in cases_of(plan)]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "sweep",
    [s for s in sweeps() if "float32 from" not in s.name],
    ids=lambda s: f"{s.plan.__name__}: {s.name}",
)
def test_every_16_bit_input_and_every_code(sweep: SweepRun) -> None:
    assert sweep.run() == []


def test_random_bits_never_change() -> None:
    assert [hex(word) for word in random_bits("holdfast", 3).tolist()] == [
        "0xb4caf8b671462b36",
        "0x6a3e0232fdcc6e0c",
        "0x64d3424deabe2e6b",
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_keeps_the_values_and_is_guarded(layout: str) -> None:
    values = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    made = laid_out(values, layout)
    assert torch.equal(made, values[:1].expand_as(values) if layout == "broadcast" else values)
    around = made.as_strided((made.untyped_storage().nbytes() // 4,), (1,), 0)
    assert around[:GUARD].isnan().all() and around[-GUARD:].isnan().all()


def test_poison_is_conspicuous() -> None:
    assert poisoned(3, torch.float16).isnan().all()
    assert poisoned(3, torch.uint8).tolist() == [0xA5] * 3
    assert poisoned(3, torch.int16).tolist() == [0xA5A5 - 2**16] * 3


def test_mismatch_sees_signed_zeros_but_not_the_payload_of_nan() -> None:
    zero, minus_zero = torch.tensor([0.0]), torch.tensor([-0.0])
    assert mismatch("y", zero, minus_zero) is not None
    assert digest({"y": zero}) != digest({"y": minus_zero})
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, -1))
    assert mismatch("y", quiet, other) is None
    assert digest({"y": quiet}) == digest({"y": other})


def test_mismatch_sees_what_was_written_beside_an_output() -> None:
    right, wrong = poisoned_output((4,), torch.int8), poisoned_output((4,), torch.int8)
    wrong.as_strided((1,), (1,), wrong.storage_offset() + 4).zero_()
    found = mismatch("q", right, wrong)
    assert found is not None and "beside q, +4" in str(found)


def test_a_digest_knows_shape_and_dtype() -> None:
    values = torch.zeros(6, dtype=torch.int8)
    variants = [values, values.reshape(2, 3), values.view(torch.uint8)]
    assert len({digest({"q": variant}) for variant in variants}) == 3

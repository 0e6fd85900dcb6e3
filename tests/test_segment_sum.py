"""Tests of the ordered sum: order, workspace, and equal bits for any number of threads and any sort."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical, digest
from holdfast.core.case import poisoned_output, random_bits
from holdfast.ops.segment_sum.cases import index_values, row_values
from holdfast.ops.segment_sum.reference import ordered_sum

GPU = "cuda" if torch.cuda.is_available() else "cpu"
DEVICES = {"reference": "cpu", "cpu": "cpu", "gpu": GPU}


def summed(
    backend: str, terms: torch.Tensor, destinations: torch.Tensor, segments: int, *, shift: int = 0
) -> torch.Tensor:
    """The segment sum of a plan, with a workspace at an offset of ``shift`` bytes that is filled with NaN."""
    device = DEVICES[backend]
    desc = hf.plans.SegmentSumDescriptor(
        shape=destinations.shape,
        segments=segments,
        width=terms.shape[-1],
        dtype=terms.dtype,
        index_dtype=destinations.dtype,
    )
    stream = hf.Stream.current(device)
    plan = hf.plans.SegmentSumPlan.select(stream, desc, hf.PlanPreference(backend=backend, precompile=False))
    out = poisoned_output((segments, terms.shape[-1]), terms.dtype).to(device)
    args = hf.plans.SegmentSumArgs(terms=terms.to(device), destinations=destinations.to(device), out=out)
    workspace = torch.full((plan.workspace_size() + shift,), 0xFF, dtype=torch.uint8, device=device)
    plan.run(stream, workspace[shift:], args)
    return out.cpu()


def by_hand(terms: list[np.float32]) -> np.float32:
    """Rule 9, recursively: the sum of up to 32 parts, each with a power of 32 terms."""
    if len(terms) <= 32:
        total = np.float32(0)
        for term in terms:
            total = np.float32(total + term)
        return total
    size = 32
    while size * 32 < len(terms):
        size *= 32
    return by_hand([by_hand(terms[i : i + size]) for i in range(0, len(terms), size)])


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 2049, 33000])
def test_the_reference_is_the_rule(count: int) -> None:
    terms = row_values("rule", (count,), torch.float32).numpy()
    assert ordered_sum(terms[:, None])[0].tobytes() == by_hand(list(terms)).tobytes()


def test_the_order_matters_for_these_terms() -> None:
    """Otherwise these tests would prove nothing."""
    terms = row_values("rule", (2049, 1), torch.float32).numpy()
    assert ordered_sum(terms)[0] != ordered_sum(terms[::-1])[0]
    assert ordered_sum(terms)[0] != np.add.accumulate(terms[:, 0])[-1]


def test_a_sum_is_never_minus_zero() -> None:
    terms = torch.full((3, 2), -0.0)
    for backend in DEVICES:
        out = summed(backend, terms, torch.tensor([0, 0, 1]), 3)
        assert canonical(out).eq(0).all(), backend


@pytest.mark.parametrize("seed", range(3))
def test_segments_of_any_length_side_by_side(seed: int) -> None:
    """Long segments, whose chunk sums must not share a slot, next to short and empty segments."""
    bits = random_bits(f"lengths {seed}", 60)
    lengths = np.where(bits % 3 == 0, 0, (bits >> np.uint64(8)) % np.uint64(71)).astype(np.int64)
    destinations = torch.from_numpy(np.repeat(np.arange(60), lengths))
    terms = row_values(f"lengths {seed}", (len(destinations), 2), torch.float32)
    wanted = summed("reference", terms, destinations, 60)
    assert torch.equal(summed("cpu", terms, destinations, 60), wanted)
    assert torch.equal(summed("gpu", terms, destinations, 60), wanted)


@pytest.mark.usefixtures("shared_finely")
@pytest.mark.parametrize("kind", ["zipf", "equal", "uniform"])
def test_threads_change_nothing(kind: str) -> None:
    """Enough work for every thread, and a row that is longer than the share of one thread."""
    destinations = index_values(kind, "threads", (6000,), 500, torch.int64)
    terms = row_values("threads", (6000, 160), torch.float32)
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.add(digest({"out": summed("cpu", terms, destinations, 500)}))
    finally:
        torch.set_num_threads(before)
    assert found == {digest({"out": summed("reference", terms, destinations, 500)})}


@pytest.mark.parametrize("kind", ["zipf", "equal", "distinct", "bad"])
@pytest.mark.parametrize("tile_bytes", [64, 512])
def test_few_terms_are_summed_without_a_sort(kind: str, tile_bytes: int) -> None:
    """Tiles of one row and part of the columns, and of several rows."""
    from holdfast.ops.segment_sum import gpu_few_terms

    destinations = index_values(kind, "few", (7, 15), 105, torch.int64)
    terms = row_values("few", (7, 15, 21), torch.float32)
    with gpu_few_terms.TUNING.replaced(most_terms=105, tile_bytes=tile_bytes):
        assert torch.equal(
            summed("gpu", terms, destinations, 105), summed("reference", terms, destinations, 105)
        )
        desc = hf.plans.SegmentSumDescriptor(shape=(105,), segments=105, width=21)
        assert gpu_few_terms.segment_sum(desc, torch.device(GPU)).variant == "few terms"
    assert gpu_few_terms.segment_sum(desc, torch.device(GPU)).variant != "few terms"


WAYS_TO_SORT: dict[str, dict[str, int]] = {
    "sorted by merging": {
        "block": 64,
        "one_block": 64,
        "tile": 64,
        "side": 64,
        "most_ways": 2,
        "max_merged": 3000,
    },
    "sorted by digits": {"max_merged": 100},
    "sorted by torch.sort": {"max_merged": 100, "max_radix": 100},
}


@pytest.mark.parametrize("way", WAYS_TO_SORT)
@pytest.mark.parametrize("kind", ["zipf", "bad"])
def test_every_way_to_sort_gives_the_same(way: str, kind: str) -> None:
    from holdfast.ops.segment_sum import gpu_merge_sort as order
    from holdfast.ops.segment_sum import gpu_radix_sort as radix

    destinations = index_values(kind, "sorting", (3000,), 90, torch.int64)
    terms = row_values("sorting", (3000, 3), torch.float32)
    wanted = summed("reference", terms, destinations, 90)
    with (
        order.TUNING.replaced(**WAYS_TO_SORT[way]),
        radix.TUNING.replaced(tile=64, block=16, most_bits=3, few=3000),
    ):
        sort = order.MergeSort(order.WorkspaceLayout(), torch.device(GPU), 3000, 90)
        assert (sort.variant, sort.launches) == (way, {"merging": 4, "digits": 3}.get(way[10:], 0))
        assert torch.equal(summed("gpu", terms, destinations, 90), wanted)


@pytest.mark.parametrize("kind", ["uniform", "zipf", "bad"])
@pytest.mark.parametrize("part", [1000, 300, 100])
def test_rows_that_are_filled_early_are_written_again(kind: str, part: int) -> None:
    from holdfast.ops.segment_sum import gpu_merge_sort as order

    tiles = {"zero_bytes": 256, "block": 128, "one_block": 128, "tile": 64, "side": 64}
    destinations = index_values(kind, "filled", (300,), 500, torch.int64)
    terms = row_values("filled", (300, 3), torch.float32)
    # Two passes and the spans, with all of 500 rows, with 300, and with 100, which is too few to use them.
    wanted = summed("reference", terms, destinations, 500)
    with order.TUNING.replaced(**tiles, pass_bytes=part * 4, span_bytes=part * 4):
        assert (
            order.MergeSort(order.WorkspaceLayout(), torch.device(GPU), 300, 500).fill_bytes == 3 * part * 4
        )
        assert torch.equal(summed("gpu", terms, destinations, 500), wanted)


@pytest.mark.parametrize("rows", [255, 256, 65535, 65536])
@pytest.mark.parametrize("count", [3000, 90000])
def test_the_keys_of_torch_sort_are_short(rows: int, count: int) -> None:
    """The key of an index out of range is ``rows``, which the dtype of the keys must have too."""
    from holdfast.ops.segment_sum import gpu_merge_sort as order

    destinations = index_values("uniform", "keys", (count,), rows, torch.int64)
    destinations[:4] = torch.tensor([-1, rows, rows - 1, rows - 1])
    terms = row_values("keys", (count, 1), torch.float32)
    wanted = summed("reference", terms, destinations, rows)
    with order.TUNING.replaced(max_merged=100, max_radix=100, max_radix_tall=100):
        key = order.MergeSort(order.WorkspaceLayout(), torch.device(GPU), count, rows).ordered.dtype
        assert key == {255: torch.uint8, 65536: torch.int32}.get(rows, torch.int16)
        assert torch.equal(summed("gpu", terms, destinations, rows), wanted)


@pytest.mark.parametrize("count, launches", [(512, 1), (1000, 1), (1024, 1), (1025, 2)])
def test_few_indices_are_sorted_without_merging(count: int, launches: int) -> None:
    from holdfast.ops.segment_sum import gpu_merge_sort as order

    destinations = index_values("zipf", "blocks", (count,), 200, torch.int64)
    terms = row_values("blocks", (count, 2), torch.float32)
    wanted = summed("reference", terms, destinations, 200)
    with order.TUNING.replaced(block=512, one_block=1024, tile=32, side=256):
        assert order.MergeSort(order.WorkspaceLayout(), torch.device(GPU), count, 200).launches == launches
        assert torch.equal(summed("gpu", terms, destinations, 200), wanted)


def test_the_sku_names_a_sort_of_the_framework() -> None:
    from holdfast.ops.segment_sum import gpu_merge_sort as order

    desc = hf.plans.SegmentSumDescriptor(shape=(3000,), segments=90, width=3)
    pref = hf.PlanPreference(backend="gpu", precompile=False)
    found = []
    for limit in (3000, 2999):
        with order.TUNING.replaced(max_merged=0, max_radix=limit):
            found.append(hf.plans.SegmentSumPlan.select(hf.Stream.current(GPU), desc, pref).sku().mode)
    assert found == ["ordered", "ordered, torch.sort"]


def test_words_of_64_bits_sort_as_those_of_32() -> None:
    """With many rows, a row index and a position do not fit into 31 bits."""
    count, segments = 4100, 2**18 + 5
    assert segments << (count - 1).bit_length() > 2**31
    destinations = index_values("zipf", "wide", (count,), segments, torch.int64)
    terms = row_values("wide", (count, 1), torch.float32)
    wanted = summed("cpu", terms, destinations, segments)
    rows = destinations.unique()
    assert torch.equal(summed("gpu", terms, destinations, segments), wanted)
    few = summed("reference", terms, torch.searchsorted(rows, destinations), len(rows))
    assert torch.equal(wanted[rows], few)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("shift", [1, 7, 255])
def test_a_workspace_may_begin_anywhere(backend: str, shift: int) -> None:
    destinations = index_values("zipf", "shift", (200,), 9, torch.int32)
    terms = row_values("shift", (200, 5), torch.float64)
    wanted = summed("reference", terms, destinations, 9)
    assert torch.equal(summed(backend, terms, destinations, 9, shift=shift), wanted)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_workspace_is_bounded(backend: str) -> None:
    """A few words per index and one per segment. The GPU needs two per segment, for its first and last term,
    and a sixteenth of the terms in the compute dtype, but nothing for few terms."""
    stream = hf.Stream.current(DEVICES[backend])
    for shape, segments, width in (((1000,), 50, 64), ((2**22,), 10**6, 256), ((5,), 10**7, 4096)):
        desc = hf.plans.SegmentSumDescriptor(
            shape=shape, segments=segments, width=width, dtype=torch.bfloat16
        )
        pref = hf.PlanPreference(backend=backend, precompile=False)
        size = hf.plans.SegmentSumPlan.select(stream, desc, pref).workspace_size()
        count = shape[0]
        bound = 32 * count + 4 * (segments + 2) + 4096
        if backend == "gpu":
            bound += 4 * width * 2 * (count // 32 + 1) + count + 4 * segments
        assert (0 if backend == "gpu" and count == 5 else 1) <= size <= bound


def test_repeats_in_bfloat16_are_not_lost() -> None:
    """A sum of 4096 times 1.0 in bfloat16 would stop at 256."""
    terms = torch.ones(4096, 2, dtype=torch.bfloat16)
    for backend in DEVICES:
        assert summed(backend, terms, torch.zeros(4096, dtype=torch.int64), 1).tolist() == [[4096.0, 4096.0]]


def test_the_stated_error_holds() -> None:
    count = 3000
    terms = row_values("error", (count, 16), torch.float32)
    out = summed("cpu", terms, torch.zeros(count, dtype=torch.int64), 1)[0].double()
    exact, magnitudes = terms.double().sum(0), terms.double().abs().sum(0)
    desc = hf.plans.SegmentSumDescriptor(shape=(count,), segments=1, width=16)
    bound = hf.plans.SegmentSumPlan.select(hf.Stream.current(), desc).precision_guarantee().ulp["out"]
    unit = 2.0 ** (torch.floor(torch.log2(magnitudes)) - 23)
    assert ((out - exact).abs() <= bound * unit).all()


BAD_ARGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "terms of another dtype": ({"terms": torch.zeros(6, 4).double()}, ("terms has dtype torch.float64",)),
    "terms of another shape": ({"terms": torch.zeros(6, 5)}, ("terms has shape (6, 5)", "(6, 4)")),
    "destinations as floats": ({"destinations": torch.zeros(6)}, ("destinations has dtype", "torch.int64")),
    "no destinations": ({"destinations": None}, ("destinations is a NoneType", "must be a torch tensor")),
    "an output on another device": ({"out": torch.zeros(3, 4, device="meta")}, ("out is on meta",)),
    "an output that overlaps itself": ({"out": torch.zeros(1, 4).expand(3, 4)}, ("elements share memory",)),
}


@pytest.mark.parametrize("what", BAD_ARGS)
def test_bad_args(what: str) -> None:
    changed, said = BAD_ARGS[what]
    desc = hf.plans.SegmentSumDescriptor(shape=(6,), segments=3, width=4)
    plan = hf.plans.SegmentSumPlan.select(hf.Stream.current(), desc)
    args = hf.plans.SegmentSumArgs(
        terms=torch.zeros(6, 4), destinations=torch.zeros(6, dtype=torch.int64), out=torch.full((3, 4), 7.0)
    )
    wrong = replace(args, **changed)
    verdict = plan.can_implement(wrong)
    with pytest.raises(hf.InvalidArgs) as refusal:
        plan.run(hf.Stream.current(), hf.Workspace.allocate(plan.workspace_size(), "cpu"), wrong)
    assert not verdict and str(refusal.value) == verdict.reason
    assert all(words in verdict.reason for words in said)
    assert (args.out == 7).all()


def test_an_output_inside_the_terms() -> None:
    terms = torch.zeros(6, 4)
    desc = hf.plans.SegmentSumDescriptor(shape=(6,), segments=3, width=4)
    plan = hf.plans.SegmentSumPlan.select(hf.Stream.current(), desc)
    args = hf.plans.SegmentSumArgs(
        terms=terms, destinations=torch.zeros(6, dtype=torch.int64), out=terms[1:4]
    )
    assert "out shares memory" in plan.can_implement(args).reason


def test_no_workspace() -> None:
    desc = hf.plans.SegmentSumDescriptor(shape=(6,), segments=3, width=4)
    plan = hf.plans.SegmentSumPlan.select(hf.Stream.current(), desc)
    out = torch.full((3, 4), 7.0)
    args = hf.plans.SegmentSumArgs(
        terms=torch.zeros(6, 4), destinations=torch.zeros(6, dtype=torch.int64), out=out
    )
    with pytest.raises(hf.WorkspaceTooSmall, match=r"0 bytes and the plan needs \d+"):
        plan.run(hf.Stream.current(), None, args)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": torch.int8}, "dtype is torch.int8; accepted are torch.float16"),
        (
            {"index_dtype": torch.int16},
            "index_dtype is torch.int16; accepted are torch.int32 and torch.int64",
        ),
        ({"segments": -1}, "segments is -1; it must be a whole number from 0"),
        ({"width": 2.0}, "width is 2.0"),
        ({"segments": 2**31}, "segments is 2147483648"),
        ({"shape": (2**16, 2**16)}, "4294967296 indices; at most"),
    ],
)
def test_bad_descriptors(fields: dict[str, Any], said: str) -> None:
    desc = replace(hf.plans.SegmentSumDescriptor(shape=(6,), segments=3, width=4), **fields)
    with pytest.raises(hf.InvalidDescriptor) as refusal:
        hf.plans.SegmentSumPlan.select(hf.Stream.current(), desc)
    assert said in str(refusal.value) and str(refusal.value).endswith(".")

"""Tests of embedding_bag: torch's semantics, gradients, errors, and equal bits in every configuration."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.backends import interpreted
from holdfast.core import device_errors
from holdfast.core.bits import digest
from holdfast.core.case import poisoned_output
from holdfast.ops.embedding_bag import cpu_sums
from holdfast.ops.segment_sum.cases import index_values, row_values

GPU = "cuda" if torch.cuda.is_available() else "cpu"
DEVICES = {"reference": "cpu", "cpu": "cpu", "gpu": GPU}

# bags of 5, 0, 6, 29 and 2 indices; 7 x 6 as rows
OFFSETS = torch.tensor([0, 5, 5, 11, 40])
ROWS, COLUMNS = 13, 5


def indices_of(two: bool, kind: str = "uniform") -> torch.Tensor:
    return index_values(kind, "bag tests", (7, 6) if two else (42,), ROWS, torch.int64)


def table(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return row_values("bag table", (ROWS, COLUMNS), dtype)


def run_plan(
    backend: str, weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None, **fields: Any
) -> torch.Tensor:
    device = DEVICES[backend]
    desc = hf.plans.EmbeddingBagDescriptor(
        shape=tuple(indices.shape),
        num_embeddings=weight.shape[0],
        embedding_dim=weight.shape[1],
        dtype=weight.dtype,
        index_dtype=indices.dtype,
        offsets=None if offsets is None else len(offsets),
        offsets_dtype=torch.int64 if offsets is None else offsets.dtype,
        **fields,
    )
    stream = hf.Stream.current(device)
    plan = hf.plans.EmbeddingBagPlan.select(
        stream, desc, hf.PlanPreference(backend=backend, precompile=False)
    )
    out = poisoned_output((desc.bags, desc.embedding_dim), weight.dtype).to(device)
    args = hf.plans.EmbeddingBagArgs(
        weight=weight.to(device),
        indices=indices.to(device),
        offsets=None if offsets is None else offsets.to(device),
        out=out,
    )
    plan.run(stream, hf.Workspace.allocate(plan.workspace_size(), device), args)
    return out


@pytest.fixture
def _no_reports() -> Iterator[None]:
    """Clear deferred errors after each test."""
    yield
    for reports in device_errors._all_reports:
        reports.words.fill_(device_errors.NO_REPORT)
        reports.words[0] = 0


def test_the_arguments_are_those_of_torch() -> None:
    ours = inspect.signature(hf.embedding_bag).parameters
    theirs = inspect.signature(torch.nn.functional.embedding_bag).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    assert [name for name in ours if name not in theirs] == ["bad_index"]


@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize(
    ("mode", "weighted", "last"),
    [("sum", False, False), ("sum", True, True), ("mean", False, True), ("max", False, False)],
)
def test_forward_and_backward_are_those_of_torch(
    two: bool, padding_idx: int | None, mode: str, weighted: bool, last: bool
) -> None:
    indices = indices_of(two)
    offsets = None if two else torch.cat([OFFSETS, torch.tensor([42])]) if last else OFFSETS
    weight = table().requires_grad_()
    weights = row_values("bag psw", indices.shape, torch.float64).requires_grad_() if weighted else None
    kept = {
        "mode": mode,
        "per_sample_weights": weights,
        "padding_idx": padding_idx,
        "include_last_offset": last and not two,
    }
    inputs = [weight] if weights is None else [weight, weights]
    ours = hf.embedding_bag(indices, weight, offsets, **kept)  # type: ignore[arg-type]
    theirs = torch.nn.functional.embedding_bag(indices, weight, offsets, **kept)  # type: ignore[arg-type]
    # torch sums in another order.
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    dout = row_values("bag dout", ours.shape, torch.float64)
    for made, wanted in zip(
        torch.autograd.grad(ours, inputs, dout), torch.autograd.grad(theirs, inputs, dout), strict=True
    ):
        torch.testing.assert_close(made, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_gradient_by_frequency_is_over_how_often_a_row_was_named(mode: str) -> None:
    """Not compared with torch, which divides by the count of another row on the CPU."""
    indices, weight = indices_of(False, "zipf"), table().requires_grad_()
    grads = []
    for by_frequency in (False, True):
        out = hf.embedding_bag(indices, weight, OFFSETS, mode=mode, scale_grad_by_freq=by_frequency)
        grads.append(torch.autograd.grad(out, weight, torch.ones_like(out))[0])
    times = torch.bincount(indices, minlength=ROWS).clamp(min=1)
    assert torch.equal(grads[1], grads[0] / times[:, None])


@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize(
    ("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)]
)
def test_gradcheck(two: bool, mode: str, weighted: bool) -> None:
    indices, offsets = indices_of(two), None if two else OFFSETS
    weight = table().requires_grad_()
    weights = row_values("bag psw", indices.shape, torch.float64).requires_grad_() if weighted else None
    assert torch.autograd.gradcheck(
        lambda weight, weights: hf.embedding_bag(
            indices, weight, offsets, mode=mode, per_sample_weights=weights, padding_idx=2
        ),
        (weight, weights),
        nondet_tol=0.0,
    )


def test_opcheck() -> None:
    indices, weight = indices_of(False), table().requires_grad_()
    weights = row_values("bag psw", (42,), torch.float64).requires_grad_()
    dout = row_values("bag dout", (5, COLUMNS), torch.float64)
    forward, backward = (
        torch.ops.holdfast.embedding_bag.default,
        torch.ops.holdfast.embedding_bag_backward.default,
    )
    torch.library.opcheck(
        forward, (indices, weight, OFFSETS, weights, "sum", False, 1, "raise", False, False)
    )
    torch.library.opcheck(forward, (indices, weight, OFFSETS, None, "max", False, -1, "skip", False, False))
    torch.library.opcheck(
        forward, (indices_of(True), weight, None, None, "mean", False, -1, "raise", True, False)
    )
    plain = (OFFSETS, weights.detach(), "sum", False, 1, False)
    torch.library.opcheck(backward, (dout, indices, weight.detach(), ROWS, *plain, True, True))
    torch.library.opcheck(backward, (dout, indices, weight.detach(), ROWS, *plain, False, True))


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole() -> None:
    def step(indices: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return hf.embedding_bag(indices, weight, offsets, mode="mean", padding_idx=1) * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for kind in ("uniform", "zipf"):
        weight, again = table().requires_grad_(), table().requires_grad_()
        made = compiled(indices_of(False, kind), weight, OFFSETS)
        wanted = step(indices_of(False, kind), again, OFFSETS)
        made.sum().backward()
        wanted.sum().backward()
        assert torch.equal(made, wanted)
        assert weight.grad is not None and again.grad is not None and torch.equal(weight.grad, again.grad)


def test_autocast_changes_nothing() -> None:
    weight = table(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = hf.embedding_bag(indices_of(True), weight)
    assert out.dtype == torch.float32 and torch.equal(out, hf.embedding_bag(indices_of(True), weight))


@pytest.mark.usefixtures("shared_finely")
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_threads_change_no_bit(mode: str) -> None:
    indices = index_values("zipf", "threads", (40000,), 900, torch.int64)
    offsets = torch.cat([torch.arange(0, 3000, 30), torch.arange(3000, 40000, 5000)])
    dout = row_values("threads dout", (len(offsets), 40), torch.bfloat16)
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            weight = row_values("threads", (900, 40), torch.bfloat16).requires_grad_()
            out = hf.embedding_bag(indices, weight, offsets, mode=mode, padding_idx=0)
            out.backward(dout)
            assert weight.grad is not None
            found.add(digest({"out": out.detach(), "dweight": weight.grad}))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_number_of_columns(dtype: torch.dtype, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single rows, which are not rounded, and sums; in vectors of every width; with streaming stores."""
    monkeypatch.setattr(cpu_sums, "_STREAMED_FROM", 0 if streamed else 2**40)
    tasks, run = [], cpu_sums.run_together
    monkeypatch.setattr(cpu_sums, "run_together", lambda *given: (tasks.append(given[1]), run(*given)))
    offsets = torch.tensor([0, 1, 2, 2, 3, 4, 40, 42, 80])
    for columns in (1, 3, 6, 12, 16, 20, 32, 64, 100, 112, 250):
        indices = index_values("uniform", f"{columns} columns", (81,), 37, torch.int64)
        weight = row_values(f"{columns} columns", (37, columns), dtype, "special")
        for mode in ("sum", "mean"):
            out = run_plan("cpu", weight, indices, offsets, mode=mode)
            wanted = run_plan("reference", weight, indices, offsets, mode=mode)
            assert digest({"out": out}) == digest({"out": wanted}), columns
    assert len(tasks) == 2 * 22 and any(task[8] for task in tasks) == streamed


def test_a_repeated_call_sees_other_values() -> None:
    """A launch that is repeated without Python's checks: bad values and bags that are too long for it."""
    weight, indices = table(), index_values("uniform", "repeated", (3000,), ROWS, torch.int64)
    good = torch.tensor([0, 1000, 2000, 3000])
    for _ in range(4):
        hf.embedding_bag(indices, weight, good, mode="sum")
    for offsets, said in (([0, 2, 1, 3], r"offsets\[2\] is 1"), ([0, 5, 9, 3001], r"offsets\[3\] is 3001")):
        with pytest.raises(IndexError, match=said):
            hf.embedding_bag(indices, weight, torch.tensor(offsets), mode="sum")
    long = torch.tensor([0, 2999, 3000, 3000])
    made = hf.embedding_bag(indices, weight, long, mode="sum")
    assert torch.equal(made, run_plan("reference", weight, indices, long, mode="sum"))
    wrong = indices.clone()
    wrong[7] = -1
    with pytest.raises(IndexError, match=r"position 7 .* is -1"):
        hf.embedding_bag(wrong, weight, good, mode="sum")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_bad_index_in_any_batch_is_found(threads: int) -> None:
    """At the begin and the end of a batch, in the last bag, in no bag; by a plan and by repeated calls."""
    bags, weight = 9 * cpu_sums.BATCH + 5, table()
    indices = index_values("uniform", "batches", (bags * 50 + 3,), ROWS, torch.int64)
    offsets, before = torch.arange(0, bags * 50 + 1, 50), torch.get_num_threads()  # the last 3 are in no bag

    def call(indices: torch.Tensor) -> torch.Tensor:
        return hf.embedding_bag(indices, weight, offsets, mode="sum", include_last_offset=True)

    def run(indices: torch.Tensor) -> torch.Tensor:
        return run_plan("cpu", weight, indices, offsets, mode="sum", include_last_offset=True)

    torch.set_num_threads(threads)
    try:
        made = [run(indices), *(call(indices) for _ in range(4))]
        batch = 50 * cpu_sums.BATCH
        for place in (0, batch - 1, batch, 5 * batch + 7, bags * 50 - 1, bags * 50, bags * 50 + 2):
            for value in (ROWS, -1):
                wrong = indices.clone()
                wrong[place] = value
                for function in (run, call):
                    with pytest.raises(IndexError, match=rf"position {place} .* is {value}"):
                        function(wrong)
    finally:
        torch.set_num_threads(before)
    wanted = run_plan("reference", weight, indices, offsets, mode="sum", include_last_offset=True)
    assert all(torch.equal(one, wanted) for one in made)


def test_a_plan_that_refuses_indices_has_written_nothing() -> None:
    weight, offsets = table(), torch.arange(0, 6400, 50)
    indices = index_values("uniform", "nothing written", (6400,), ROWS, torch.int64)
    desc = hf.plans.EmbeddingBagDescriptor(
        shape=(6400,),
        num_embeddings=ROWS,
        embedding_dim=weight.shape[1],
        dtype=weight.dtype,
        mode="sum",
        offsets=128,
    )
    plan = hf.plans.EmbeddingBagPlan.select(hf.Stream.current("cpu"), desc)
    out = torch.full((128, weight.shape[1]), 7.0, dtype=weight.dtype)
    indices[6399] = ROWS
    args = hf.plans.EmbeddingBagArgs(weight=weight, indices=indices, offsets=offsets, out=out)
    workspace = hf.Workspace.allocate(plan.workspace_size(), torch.device("cpu"))
    with pytest.raises(IndexError, match="position 6399"):
        plan.run(hf.Stream.current("cpu"), workspace, args)
    assert bool((out == 7).all())


def test_a_bag_has_the_same_bits_in_any_batch() -> None:
    indices = index_values("uniform", "batch", (50, 70), 300, torch.int64)
    weight = row_values("batch", (300, 24), torch.float32)
    together = hf.embedding_bag(indices, weight, mode="sum")
    for row in (0, 31, 49):
        alone = hf.embedding_bag(indices[row], weight, torch.tensor([0]), mode="sum")
        assert torch.equal(together[row], alone[0])


def test_repeats_in_bfloat16_are_not_lost() -> None:
    weight = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    out = hf.embedding_bag(torch.ones(64, 64, dtype=torch.int64), weight, mode="sum")
    assert out.tolist() == [[64.0, 64.0]] * 64
    out.sum(0).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[0, 0], [4096, 4096], [0, 0]]


def test_the_first_of_equals_and_the_first_nan_are_chosen() -> None:
    nan = float("nan")
    weight = torch.tensor(
        [[1.0, 2.0, -0.0, nan], [1.0, 3.0, 0.0, 5.0], [0.0, 3.0, -1.0, nan]], requires_grad=True
    )
    out = hf.embedding_bag(torch.tensor([[1, 0, 2]]), weight, mode="max")
    assert out[0, :3].tolist() == [1.0, 3.0, 0.0] and out[0, 3].isnan()
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("two", [True, False])
def test_a_sparse_gradient_is_coalesced_and_has_the_bits_of_the_dense_one(mode: str, two: bool) -> None:
    indices, offsets = indices_of(two, "zipf"), None if two else OFFSETS
    grads = []
    for sparse in (False, True):
        weight = table(torch.float32).requires_grad_()
        out = hf.embedding_bag(indices, weight, offsets, mode=mode, sparse=sparse, padding_idx=2)
        grads += torch.autograd.grad(out, weight, row_values("bag dout", out.shape, torch.float32))
    assert grads[1].layout == torch.sparse_coo and grads[1].is_coalesced()
    rows = grads[1].indices()[0]
    assert rows.tolist() == sorted(set(indices.reshape(-1).tolist()) - {2})
    assert torch.equal(grads[1].to_dense(), grads[0])


def test_sparse_with_weights() -> None:
    indices = indices_of(False)
    weight = table().requires_grad_()
    weights = row_values("bag psw", (42,), torch.float64).requires_grad_()
    out = hf.embedding_bag(indices, weight, OFFSETS, mode="sum", per_sample_weights=weights, sparse=True)
    found = torch.autograd.grad(out, (weight, weights), torch.ones_like(out))
    again = hf.embedding_bag(indices, weight, OFFSETS, mode="sum", per_sample_weights=weights)
    wanted = torch.autograd.grad(again, (weight, weights), torch.ones_like(out))
    assert torch.equal(found[0].to_dense(), wanted[0]) and torch.equal(found[1], wanted[1])


def test_a_gradient_of_the_gradient_is_refused() -> None:
    weight = table().requires_grad_()
    out = hf.embedding_bag(indices_of(True), weight, mode="sum")
    (grad,) = torch.autograd.grad((out * out).sum(), weight, create_graph=True)
    with pytest.raises(hf.Unsupported, match="embedding_bag has no second derivative"):
        grad.sum().backward()


BAD_OFFSETS = {
    "does not begin with 0": ([1, 2], "offsets[0] is 1"),
    "descends": ([0, 5, 3], "offsets[2] is 3"),
    "is negative": ([0, -4, 3], "offsets[1] is -4"),
    "passes the end": ([0, 43], "offsets[1] is 43"),
    "has differences that overflow": ([0, 2**63 - 1, -(2**63)], "offsets[1] is 2147483647 or more"),
}


@pytest.mark.parametrize("what", BAD_OFFSETS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("mode", ["mean", "max"])
def test_bad_offsets(what: str, backend: str, mode: str) -> None:
    offsets, said = BAD_OFFSETS[what]
    with pytest.raises(IndexError) as refusal:
        run_plan(backend, table(), indices_of(False), torch.tensor(offsets), mode=mode)
    assert isinstance(refusal.value, hf.InvalidIndex)
    assert said in str(refusal.value) and "never descend" in str(refusal.value)


@pytest.mark.parametrize("what", BAD_OFFSETS)
@pytest.mark.parametrize("mode", ["mean", "max"])
@pytest.mark.usefixtures("_no_reports")
def test_bad_offsets_are_reported_by_a_gpu(what: str, mode: str) -> None:
    offsets, said = BAD_OFFSETS[what]
    run_plan("gpu", table(), indices_of(False), torch.tensor(offsets), mode=mode)
    with pytest.raises(hf.InvalidIndex) as refusal:
        hf.check_errors()
    assert said in str(refusal.value)
    hf.check_errors()


@pytest.mark.parametrize("value", [-1, ROWS, 2**40])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bad_indices(value: int, backend: str) -> None:
    indices = indices_of(False)
    indices[17] = value
    weight = table()
    shown = "2147483647 or more" if value > ROWS else value
    with pytest.raises(IndexError, match=rf"position 17 .* is {shown}; .* {ROWS} rows"):
        run_plan(backend, weight, indices, OFFSETS)
    kept = indices.clone()
    kept[17] = 4  # replace the index with padding, which is how a bad index is treated
    skipped = run_plan(backend, weight, indices, OFFSETS, bad_index="skip", padding_idx=4)
    assert torch.equal(skipped, run_plan(backend, weight, kept, OFFSETS, padding_idx=4))


@pytest.mark.usefixtures("_no_reports")
@pytest.mark.parametrize("two", [True, False])
def test_bad_indices_are_reported_by_a_gpu(two: bool) -> None:
    indices, offsets = indices_of(two), None if two else OFFSETS
    indices.view(-1)[17] = -5
    out = run_plan("gpu", table(), indices, offsets)
    with pytest.raises(hf.InvalidIndex, match=r"position 17 .* is -5"):
        hf.check_errors()
    assert torch.equal(out.cpu(), run_plan("cpu", table(), indices, offsets, bad_index="skip"))


def test_a_bad_index_gets_no_gradient() -> None:
    indices = indices_of(True)
    indices[2, 3] = -9
    weight = table().requires_grad_()
    weights = torch.ones(7, 6, dtype=torch.float64, requires_grad=True)
    out = hf.embedding_bag(indices, weight, mode="sum", per_sample_weights=weights, bad_index="skip")
    out.sum().backward()
    assert weights.grad is not None and weight.grad is not None
    assert weights.grad[2, 3] == 0 and weight.grad.sum() == 41 * COLUMNS


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "max_norm": ({"max_norm": 1.0}, "max_norm is 1.0"),
    "no such mode": ({"mode": "median"}, "mode is 'median'; accepted are"),
    "offsets with two axes": ({"offsets": OFFSETS}, "Leave offsets out"),
    "one axis without offsets": ({"input": torch.tensor([1, 2])}, "there are no offsets"),
    "weights with a mean": ({"per_sample_weights": torch.ones(7, 6)}, 'only mode "sum" takes them'),
    "weights of another shape": (
        {"per_sample_weights": torch.ones(7), "mode": "sum"},
        "per_sample_weights has shape (7,)",
    ),
    "weights of another dtype": (
        {"per_sample_weights": torch.ones(7, 6).double(), "mode": "sum"},
        "the dtype of weight, torch.float32",
    ),
    "frequency with max": ({"mode": "max", "scale_grad_by_freq": True}, "scale_grad_by_freq is True"),
    "sparse with max": ({"mode": "max", "sparse": True}, "sparse is True"),
    "floating indices": ({"input": torch.ones(7, 6)}, "input has dtype torch.float32"),
    "a vector for a table": ({"weight": torch.ones(7)}, "weight has shape (7,)"),
    "an integer table": ({"weight": torch.ones(7, 2, dtype=torch.int64)}, "dtype is torch.int64"),
    "padding outside": ({"padding_idx": ROWS}, "padding_idx is 13"),
    "bad_index": ({"bad_index": "ignore"}, "bad_index is 'ignore'"),
    "floating offsets": (
        {"input": torch.tensor([1, 2]), "offsets": torch.zeros(1)},
        "offsets has dtype torch.float32",
    ),
    "no last offset": (
        {"input": torch.tensor([1, 2]), "offsets": OFFSETS[:0], "include_last_offset": True},
        "offsets is empty",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_arguments(what: str) -> None:
    changed, said = REFUSED[what]
    arguments = {"input": indices_of(True), "weight": table(torch.float32), **changed}
    with pytest.raises(hf.HoldfastError) as refusal:
        hf.embedding_bag(**arguments)
    assert said in str(refusal.value) and str(refusal.value).endswith(".")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mode": "median"}, "mode is 'median'"),
        ({"shape": (6,)}, "offsets is None; accepted are indices of two axes"),
        ({"offsets": 3}, "offsets is 3; accepted are indices of two axes"),
        (
            {"shape": (6,), "offsets": 0, "include_last_offset": True},
            "offsets is 0; it must be the number of offsets",
        ),
        ({"include_last_offset": True}, "indices of two axes have no offsets"),
        ({"shape": (6,), "offsets": 2, "offsets_dtype": torch.int16}, "offsets_dtype is torch.int16"),
        ({"per_sample_weights": True}, "per_sample_weights are given with mode 'mean'"),
        ({"padding_idx": 9}, "padding_idx is 9"),
    ],
)
def test_bad_descriptors(fields: dict[str, Any], said: str) -> None:
    given = {"shape": (6, 2), "num_embeddings": 5, "embedding_dim": 3, **fields}
    for plan in (hf.plans.EmbeddingBagPlan, hf.plans.EmbeddingBagBackwardPlan):
        with pytest.raises(hf.InvalidDescriptor) as refusal:
            plan.Descriptor(**given).validate()
        assert said in str(refusal.value) and str(refusal.value).endswith(".")


def test_args_that_do_not_fit() -> None:
    desc = hf.plans.EmbeddingBagBackwardDescriptor(
        shape=(6, 2), num_embeddings=5, embedding_dim=3, mode="max"
    )
    plan = hf.plans.EmbeddingBagBackwardPlan.select(hf.Stream.current(), desc)
    made: dict[str, Any] = {
        "dout": torch.zeros(6, 3),
        "indices": torch.zeros(6, 2, dtype=torch.int64),
        "weight": torch.zeros(5, 3),
        "dweight": torch.zeros(5, 3),
    }
    for changed, said in (
        ({"weight": None}, "weight is a NoneType"),
        ({"offsets": torch.zeros(2, dtype=torch.int64)}, "offsets is given"),
        ({"per_sample_weights": torch.zeros(6, 2)}, "per_sample_weights is given"),
        ({"dweight": made["weight"]}, "dweight shares memory"),
        ({"dout": torch.zeros(5, 3)}, "dout has shape (5, 3)"),
    ):
        verdict = plan.can_implement(hf.plans.EmbeddingBagBackwardArgs(**{**made, **changed}))
        assert not verdict and said in verdict.reason
    assert plan.can_implement(hf.plans.EmbeddingBagBackwardArgs(**made))


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_workspace_is_bounded(backend: str) -> None:
    """A few words per index, bag and row, and on the GPU a sixteenth of the terms."""
    stream = hf.Stream.current(DEVICES[backend])
    pref = hf.PlanPreference(backend=backend, precompile=False)
    count, bags, width = 2**20, 2**15, 128
    for mode in ("sum", "mean", "max"):
        fields: dict[str, Any] = {
            "shape": (count,), "offsets": bags, "num_embeddings": 10**6, "embedding_dim": width, "mode": mode,
        }  # fmt: skip
        forward = hf.plans.EmbeddingBagPlan.select(stream, hf.plans.EmbeddingBagDescriptor(**fields), pref)
        desc = hf.plans.EmbeddingBagBackwardDescriptor(**fields)
        backward = hf.plans.EmbeddingBagBackwardPlan.select(stream, desc, pref)
        sums = 4 * width * 2 * (count // 32 + 1) + count if backend == "gpu" else 0
        assert forward.workspace_size() <= 16 * (count + bags) + sums + 4096
        assert backward.workspace_size() <= 40 * (count + bags) + 4 * 10**6 + 4 * bags * width + sums + 4096


def test_the_stated_error_holds() -> None:
    weight = row_values("bag error", (500, 16), torch.float32)
    indices = index_values("uniform", "bag error", (3, 700), 500, torch.int64)
    out = hf.embedding_bag(indices, weight, mode="mean").double()
    terms = weight.double()[indices]
    exact, magnitudes = terms.mean(1), terms.abs().sum(1) / 700
    desc = hf.plans.EmbeddingBagDescriptor(shape=(3, 700), num_embeddings=500, embedding_dim=16)
    bound = hf.plans.EmbeddingBagPlan.select(hf.Stream.current(), desc).precision_guarantee().ulp["out"]
    unit = 2.0 ** (torch.floor(torch.log2(magnitudes)) - 23)
    assert ((out - exact).abs() <= bound * unit).all()


def test_descriptors_go_to_json_and_back() -> None:
    desc = hf.plans.EmbeddingBagBackwardDescriptor(
        shape=(9,), num_embeddings=5, embedding_dim=3, offsets=4, offsets_dtype=torch.int32, padding_idx=2
    )
    assert hf.plans.Descriptor.from_json(desc.to_json()) == desc


def test_the_module_is_that_of_torch() -> None:
    theirs = torch.nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", padding_idx=1, dtype=torch.float64)
    ours = hf.nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", padding_idx=1, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, torch.nn.EmbeddingBag) and repr(ours) == repr(theirs)
    indices, weights = indices_of(False), row_values("bag psw", (42,), torch.float64)
    torch.testing.assert_close(ours(indices, OFFSETS, weights), theirs(indices, OFFSETS, weights))
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(again(indices_of(True)), ours(indices_of(True)))
    with pytest.raises(hf.Unsupported, match="max_norm"):
        hf.nn.EmbeddingBag(3, 2, max_norm=1.0)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -float("inf")])
def test_what_is_in_no_bag_reaches_no_gradient(weight: float) -> None:
    """Not even with a weight that turns zeros into NaN."""
    desc = hf.plans.EmbeddingBagBackwardDescriptor(
        shape=(4,), num_embeddings=3, embedding_dim=2, mode="sum", offsets=2, include_last_offset=True,
        per_sample_weights=True, dper_sample_weights=True,
    )  # fmt: skip
    for backend in ("reference", "cpu", *(["gpu"] if interpreted() else [])):
        stream = hf.Stream.current()
        pref = hf.PlanPreference(backend=backend, precompile=False)
        plan = hf.plans.EmbeddingBagBackwardPlan.select(stream, desc, pref)
        args = hf.plans.EmbeddingBagBackwardArgs(
            dout=torch.ones(1, 2),
            indices=torch.tensor([0, 1, 1, 2]),
            offsets=torch.tensor([0, 2]),
            per_sample_weights=torch.tensor([2.0, 3.0, weight, weight]),
            weight=torch.ones(3, 2),
            dweight=torch.empty(3, 2),
            dper_sample_weights=torch.empty(4),
        )
        plan.run(stream, hf.Workspace.allocate(plan.workspace_size(), "cpu"), args)
        assert torch.equal(args.dweight, torch.tensor([[2.0, 2], [3, 3], [0, 0]])), backend
        assert torch.equal(args.dper_sample_weights, torch.tensor([2.0, 2, 0, 0])), backend


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_indices_and_offsets_of_a_table_without_columns_are_checked(mode: str) -> None:
    table, offsets = torch.zeros(4, 0), torch.tensor([0, 1])
    assert hf.embedding_bag(torch.tensor([3, 0, 1]), table, offsets, mode=mode).shape == (2, 0)
    with pytest.raises(hf.InvalidIndex, match=r"position 1 of the flattened indices is 9; .* 4 rows"):
        hf.embedding_bag(torch.tensor([3, 9, 1]), table, offsets, mode=mode)
    with pytest.raises(hf.InvalidIndex, match=r"offsets\[1\] is 7"):
        hf.embedding_bag(torch.tensor([3, 0, 1]), table, torch.tensor([0, 7]), mode=mode)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_indices_and_offsets_are_checked_without_bags(mode: str) -> None:
    weight, indices = table().requires_grad_(), torch.tensor([3, ROWS, 1])
    for offsets, last in ((OFFSETS[:1], True), (OFFSETS[:0], False)):
        out = hf.embedding_bag(indices[:1], weight, offsets, mode=mode, include_last_offset=last)
        (gradient,) = torch.autograd.grad(out.sum(), weight)
        assert out.shape == (0, COLUMNS) and gradient.equal(torch.zeros(ROWS, COLUMNS))
        with pytest.raises(hf.InvalidIndex, match="position 1 of the flattened indices is 13"):
            hf.embedding_bag(indices, weight, offsets, mode=mode, include_last_offset=last)
    with pytest.raises(hf.InvalidIndex, match=r"offsets\[0\] is 11"):
        hf.embedding_bag(indices[:1], weight, OFFSETS[3:4], mode=mode, include_last_offset=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 8, 40])
def test_maxima_of_a_table_without_rows(columns: int, dtype: torch.dtype) -> None:
    """There is no row that could stand in for an index that is left out."""
    indices, offsets = torch.tensor([3, -1, 0, 7, 7]), torch.tensor([0, 2, 2])
    for table in (torch.empty(0, columns, dtype=dtype), torch.ones(5, columns, dtype=dtype)[5:]):
        weight = table.detach().requires_grad_()
        out = hf.embedding_bag(indices, weight, offsets, mode="max", bad_index="skip")
        assert out.equal(torch.zeros(3, columns, dtype=dtype))
        out.sum().backward()
        assert weight.grad is not None and weight.grad.shape == weight.shape

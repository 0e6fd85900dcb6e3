"""Tests of embedding: torch's semantics, accurate gradients, and errors for bad indices."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import fresh
import holdfast as hf
from holdfast.core.bits import canonical, digest
from holdfast.ops.segment_sum.cases import index_values, row_values
from holdfast.proof.conformance import Way, cases_of, check, cpu_threads, run_reference, select_on

GPU = "cuda" if torch.cuda.is_available() else "cpu"
DEVICES = {"reference": "cpu", "cpu": "cpu", "gpu": GPU}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def table(rows: int = 11, columns: int = 5, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return row_values("table", (rows, columns), dtype).requires_grad_()


INDICES = torch.tensor([[1, 2, 1, 10], [0, 9, 1, 2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (3, 0), (2, 3, 4)], ids=str)
def test_the_forward_is_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = table(dtype=dtype)
    for index_dtype in (torch.int32, torch.int64):
        indices = index_values("zipf", "forward", shape, 11, index_dtype)
        out = hf.embedding(indices, weight, padding_idx=2)
        wanted = F.embedding(indices, weight, padding_idx=2)
        assert out.shape == wanted.shape and torch.equal(out, wanted)


@pytest.mark.parametrize("padding_idx", [None, 1, -1])
@pytest.mark.parametrize("scale_grad_by_freq", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_gradient_is_torchs(padding_idx: int | None, scale_grad_by_freq: bool, sparse: bool) -> None:
    mine, theirs = table(), table()
    options = {"padding_idx": padding_idx, "scale_grad_by_freq": scale_grad_by_freq}
    dout = row_values("dout", (2, 4, 5), torch.float64)
    hf.embedding(INDICES, mine, **options, sparse=sparse).backward(dout)
    F.embedding(INDICES, theirs, **options).backward(dout)
    gradient = mine.grad.to_dense() if sparse else mine.grad
    # torch sums in another order, and multiplies by 1 / count where holdfast divides.
    assert torch.allclose(gradient, theirs.grad, rtol=1e-14, atol=0)
    if not scale_grad_by_freq:
        assert torch.equal(gradient == 0, theirs.grad == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sparse_gradient_has_the_rows_that_were_read(dtype: torch.dtype) -> None:
    sparse, dense = table(dtype=dtype), table(dtype=dtype)
    indices = torch.tensor([7, 3, 3, 0, 7, 4])
    dout = row_values("sparse", (6, 5), dtype)
    (gradient,) = torch.autograd.grad(hf.embedding(indices, sparse, padding_idx=4, sparse=True), sparse, dout)
    hf.embedding(indices, dense, padding_idx=4).backward(dout)
    assert gradient.layout == torch.sparse_coo and gradient.is_coalesced()
    assert gradient.indices().tolist() == [[0, 3, 7]]
    assert torch.equal(gradient.to_dense(), dense.grad)
    hf.embedding(indices, sparse, padding_idx=4, sparse=True).backward(dout)
    assert torch.equal(sparse.grad._values(), gradient.values())  # torch drops the coalesced flag


def test_a_sparse_gradient_of_a_table_without_columns() -> None:
    for shape in ((3,), (0,), (2, 0)):
        weight = torch.zeros(4, 0, requires_grad=True)
        hf.embedding(torch.ones(shape, dtype=torch.int64), weight, sparse=True).sum().backward()
        assert weight.grad is not None and weight.grad.to_dense().shape == (4, 0)


def test_indices_of_a_table_without_columns_are_checked() -> None:
    table = torch.zeros(4, 0)
    assert hf.embedding(torch.tensor([[3, 0]]), table).shape == (1, 2, 0)
    assert hf.embedding(torch.tensor([9]), table, bad_index="skip").shape == (1, 0)
    with pytest.raises(hf.InvalidIndex, match=r"position 1 of the flattened indices is 9; .* 4 rows"):
        hf.embedding(torch.tensor([[3, 9]]), table)
    # A plan that writes nothing launches nothing.
    desc = hf.plans.EmbeddingDescriptor(shape=(1,), num_embeddings=4, embedding_dim=0)
    plan = hf.plans.EmbeddingPlan.select(hf.Stream.current("cpu"), desc)
    args = hf.plans.EmbeddingArgs(weight=table, indices=torch.tensor([9]), out=torch.empty(1, 0))
    plan.run(hf.Stream.current("cpu"), None, args)


@pytest.mark.parametrize("function", ["embedding", "embedding_bag"])
def test_a_sparse_gradient_for_strided_indices_does_not_warn(function: str) -> None:
    """torch.searchsorted warns once per process, so this is a process of its own."""
    program = f"""
import warnings
warnings.simplefilter("error")
import torch, holdfast as hf
weight = torch.zeros(4, 2, requires_grad=True)
indices = torch.tensor([[1, 2, 0], [3, 3, 1]])[:, ::2]
indices = indices[0] if "{function}" == "embedding" else indices
hf.{function}(indices, weight, sparse=True).sum().backward()
"""
    fresh.run(program, check=True, timeout=120)


def test_a_sparse_gradient_of_nothing() -> None:
    weight = table()
    hf.embedding(torch.tensor([3, 3]), weight, padding_idx=3, sparse=True).sum().backward()
    assert weight.grad.shape == (11, 5) and weight.grad._nnz() == 0


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(lambda w: hf.embedding(INDICES, w), (table(),), nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(lambda w: hf.embedding(INDICES, w), (table(),), nondet_tol=0.0)


def test_the_gradients_gradient_skips_padding() -> None:
    weight = table()
    dout = row_values("double", (2, 4, 5), torch.float64).requires_grad_()
    (first,) = torch.autograd.grad(hf.embedding(INDICES, weight, 1), weight, dout, create_graph=True)
    (again,) = torch.autograd.grad(first, dout, torch.ones_like(first))
    assert torch.equal(again, (INDICES != 1).double()[..., None].expand_as(again))
    (scaled,) = torch.autograd.grad(
        hf.embedding(INDICES, weight, scale_grad_by_freq=True), weight, dout, create_graph=True
    )
    with pytest.raises(hf.Unsupported, match="scale_grad_by_freq"):
        scaled.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_repeats_are_within_one_ulp_of_the_exact_sum_rounded_once(dtype: torch.dtype) -> None:
    """torch sums these terms in half precision and loses most of them."""
    weight = torch.zeros(3, 8, dtype=dtype, requires_grad=True)
    dout = (row_values("repeats", (4096, 8), dtype).abs() / 64).to(dtype)
    hf.embedding(torch.ones(4096, dtype=torch.int64), weight).backward(dout)
    exact = dout.double().sum(0)
    rounded = exact.to(dtype)
    apart = (weight.grad[1].view(torch.int16).int() - rounded.view(torch.int16).int()).abs()
    assert apart.max() <= 1
    assert (weight.grad[[0, 2]] == 0).all()


@pytest.mark.usefixtures("shared_finely")
def test_threads_change_nothing() -> None:
    indices = index_values("zipf", "threads", (40, 150), 3000, torch.int64)
    dout = row_values("threads", (40, 150, 64), torch.bfloat16)
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            weight = table(3000, 64, torch.bfloat16)
            out = hf.embedding(indices, weight)
            out.backward(dout)
            found.add(digest({"out": out, "dweight": weight.grad}))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


BAD = {
    "too large": (torch.tensor([[3, 4], [11, 99]]), "position 2", "11"),
    "negative": (torch.tensor([5, -1]), "position 1", "-1"),
    "huge": (torch.tensor([2**40]), "position 0", "2147483647 or more"),
    "int32": (torch.tensor([0, -(2**31)], dtype=torch.int32), "position 1", "-2147483648 or less"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_index_raises_before_anything_is_written(what: str) -> None:
    indices, position, value = BAD[what]
    weight = table()
    for call in (hf.embedding, lambda i, w: hf.embedding(i.expand(2, *i.shape), w)):
        with pytest.raises(IndexError) as refusal:
            call(indices, weight)
        assert isinstance(refusal.value, hf.InvalidIndex)
        for words in (position, f"is {value};", "11 rows", "0 to 10"):
            assert words in str(refusal.value)
    desc = hf.plans.EmbeddingDescriptor(
        shape=indices.shape,
        num_embeddings=11,
        embedding_dim=5,
        dtype=torch.float64,
        index_dtype=indices.dtype,
    )
    for backend in ("cpu", "reference"):
        plan = hf.plans.EmbeddingPlan.select(hf.Stream.current(), desc, hf.PlanPreference(backend=backend))
        out = torch.full((*indices.shape, 5), 7.0, dtype=torch.float64)
        with pytest.raises(hf.InvalidIndex, match=position):
            plan.run(
                hf.Stream.current(),
                None,
                hf.plans.EmbeddingArgs(weight=weight.detach(), indices=indices, out=out),
            )
        assert (out == 7).all()


def test_bad_indices_may_be_skipped() -> None:
    weight = table()
    indices = torch.tensor([3, -1, 11, 3, 2**40])
    out = hf.embedding(indices, weight, bad_index="skip")
    assert torch.equal(out[[0, 3]], weight[[3, 3]])
    assert canonical(out[[1, 2, 4]].detach()).eq(0).all()
    out.sum().backward()
    wanted = torch.zeros(11, 5, dtype=torch.float64)
    wanted[3] = 2
    assert torch.equal(weight.grad, wanted)


def gpu_plan(shape: tuple[int, ...], rows: int = 11) -> tuple[hf.Stream, Any]:
    stream = hf.Stream.current(GPU)
    desc = hf.plans.EmbeddingDescriptor(shape=shape, num_embeddings=rows, embedding_dim=5)
    return stream, hf.plans.EmbeddingPlan.select(
        stream, desc, hf.PlanPreference(backend="gpu", precompile=False)
    )


def gpu_args(indices: torch.Tensor, rows: int = 11) -> hf.plans.EmbeddingArgs:
    out = torch.full((*indices.shape, 5), 7.0, device=GPU)
    weight = row_values("gpu", (rows, 5), torch.float32).to(GPU)
    return hf.plans.EmbeddingArgs(weight=weight, indices=indices.to(GPU), out=out)


@pytest.mark.parametrize("through", ["check_errors", "the same plan", "another op"])
def test_on_the_gpu_a_bad_index_is_raised_later(through: str) -> None:
    indices = torch.tensor([4, 70, -3, 5, 11])
    stream, plan = gpu_plan((5,))
    args = gpu_args(indices)
    plan.run(stream, None, args)  # the error is deferred
    if GPU == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(hf.InvalidIndex) as refusal:
        if through == "check_errors":
            hf.check_errors()
        elif through == "the same plan":
            plan.run(stream, None, gpu_args(torch.zeros(5, dtype=torch.int64)))
        else:
            hf.quantize(torch.ones(3), 0.5)
    for words in ("position 1", "is 70;", "11 rows", "0 to 10"):
        assert words in str(refusal.value)
    hf.check_errors()  # an error is reported once
    assert torch.equal(args.out[[0, 3]], args.weight[[4, 5]])
    assert (args.out[[1, 2, 4]] == 0).all()
    good = gpu_args(torch.arange(5))
    plan.run(stream, None, good)
    hf.check_errors()
    assert torch.equal(good.out, good.weight[:5])


@pytest.mark.parametrize(
    ("rows", "bad", "said"), [(11, 2**40, "2147483647 or more"), (13, -(2**35), "-2147483648 or less")]
)
def test_a_report_names_the_table_and_how_far_off_a_huge_index_is(rows: int, bad: int, said: str) -> None:
    gpu_plan((2,), 12)
    stream, plan = gpu_plan((2,), rows)
    plan.run(stream, None, gpu_args(torch.tensor([0, bad]), rows))
    with pytest.raises(hf.InvalidIndex, match=f"{said}; .* {rows} rows"):
        hf.check_errors()
    hf.check_errors()


def test_opcheck() -> None:
    weight = table(dtype=torch.float32)
    for padding_idx in (-1, 1):
        arguments = (INDICES, weight, padding_idx, False, False, "raise")
        torch.library.opcheck(torch.ops.holdfast.embedding.default, arguments)
    dout = row_values("opcheck", (2, 4, 5), torch.float32)
    torch.library.opcheck(
        torch.ops.holdfast.embedding_backward.default, (dout.requires_grad_(), INDICES, 11, 1, False)
    )
    torch.library.opcheck(
        torch.ops.holdfast.embedding_touched_rows_backward.default,
        (dout.detach(), INDICES, 11, 1, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole_with_dynamic_shapes() -> None:
    compiled = torch.compile(lambda i, w: hf.embedding(i, w, padding_idx=1) * 2, fullgraph=True, dynamic=True)
    for rows, shape in ((9, (3, 4)), (12, (5, 2)), (9, (2, 7))):
        indices = index_values("zipf", "compile", shape, rows, torch.int64)
        mine, again = (row_values("compile", (rows, 6), torch.float32).requires_grad_() for _ in range(2))
        out, eager = compiled(indices, mine), hf.embedding(indices, again, padding_idx=1) * 2
        out.sum().backward()
        eager.sum().backward()
        assert torch.equal(out, eager) and torch.equal(mine.grad, again.grad)


@pytest.mark.parametrize("function", [hf.embedding, hf.embedding_bag])
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_a_padding_from_the_back_is_traced_for_any_number_of_rows(function: Any) -> None:
    def step(indices: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = weight.detach().requires_grad_()
        out = function(indices, weight, padding_idx=-1)
        return out, torch.autograd.grad(out, weight, torch.ones_like(out))[0]

    traced = make_fx(step, tracing_mode="symbolic")(torch.tensor([[0, 3, 1]]), torch.randn(4, 6))
    for rows in (4, 7):
        given = torch.arange(rows)[None], torch.randn(rows, 3)
        assert all(map(torch.equal, traced(*given), step(*given)))


def test_autocast_changes_nothing() -> None:
    weight = table(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = hf.embedding(INDICES, weight)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_a_frozen_table_has_no_gradient() -> None:
    assert not hf.embedding(INDICES, table().detach()).requires_grad


def test_what_is_refused() -> None:
    weight = table()
    with pytest.raises(hf.Unsupported, match=r"max_norm is 1\.0; .*torch\.renorm"):
        hf.embedding(INDICES, weight, max_norm=1.0)
    for padding_idx in (11, -12):
        with pytest.raises(hf.InvalidArgs, match=f"padding_idx is {padding_idx}; .*11 rows"):
            hf.embedding(INDICES, weight, padding_idx=padding_idx)
    with pytest.raises(hf.InvalidArgs, match=r"input has dtype torch.float64; .*swapped"):
        hf.embedding(weight, INDICES.double())
    with pytest.raises(hf.InvalidArgs, match="input is a list"):
        hf.embedding([1, 2], weight)  # type: ignore[arg-type]
    with pytest.raises(hf.InvalidArgs, match=r"weight has shape \(11,\)"):
        hf.embedding(INDICES, torch.zeros(11))
    with pytest.raises(hf.InvalidDescriptor, match=r"dtype is torch\.int32; accepted are torch.float16"):
        hf.embedding(INDICES, torch.zeros(11, 5, dtype=torch.int32))
    with pytest.raises(hf.InvalidDescriptor, match="bad_index is 'ignore'; accepted are"):
        hf.embedding(INDICES, weight, bad_index="ignore")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"padding_idx": 11}, "padding_idx is 11; it must be None or name one of the 11 rows"),
        ({"padding_idx": -1}, "padding_idx is -1"),
        ({"scale_grad_by_freq": 1}, "scale_grad_by_freq is 1"),
        ({"num_embeddings": None}, "num_embeddings is None"),
    ],
)
def test_bad_descriptors(fields: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"shape": (3,), "num_embeddings": 11, "embedding_dim": 5}
    desc = hf.plans.EmbeddingBackwardDescriptor(**{**good, **fields})
    with pytest.raises(hf.InvalidDescriptor) as refusal:
        hf.plans.EmbeddingBackwardPlan.select(hf.Stream.current(), desc)
    assert said in str(refusal.value) and str(refusal.value).endswith(".")


def test_the_module_is_torchs_with_another_gradient() -> None:
    theirs = torch.nn.Embedding(11, 5, padding_idx=2, scale_grad_by_freq=True)
    mine = hf.nn.Embedding(11, 5, padding_idx=2, scale_grad_by_freq=True)
    assert isinstance(mine, torch.nn.Embedding)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    mine.load_state_dict(theirs.state_dict())
    for module in (mine, theirs):
        module(INDICES).sum().backward()
    assert torch.equal(mine(INDICES), theirs(INDICES))
    # torch multiplies by 1 / count where holdfast divides.
    assert torch.allclose(mine.weight.grad, theirs.weight.grad, rtol=1e-6)
    assert repr(mine) == repr(theirs)


def test_the_module_from_a_table() -> None:
    module = hf.nn.Embedding.from_pretrained(table().detach(), padding_idx=1)
    assert type(module) is hf.nn.Embedding and not module.weight.requires_grad
    assert torch.equal(module(INDICES), table()[INDICES])


def test_the_module_says_what_it_does_with_bad_indices() -> None:
    module = hf.nn.Embedding(11, 5, bad_index="skip")
    assert "bad_index='skip'" in repr(module)
    assert (module(torch.tensor([11])) == 0).all()
    with pytest.raises(hf.InvalidIndex, match="11 rows"):
        hf.nn.Embedding(11, 5)(torch.tensor([11]))
    with pytest.raises(hf.Unsupported, match="max_norm"):
        hf.nn.Embedding(11, 5, max_norm=2.0)


def test_the_module_has_a_sparse_gradient_if_asked() -> None:
    module = hf.nn.Embedding(11, 5, sparse=True)
    module(INDICES).sum().backward()
    assert module.weight.grad.is_sparse
    assert module.weight.grad._indices().tolist() == [sorted(set(INDICES.flatten().tolist()))]


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_that_are_streamed_have_the_same_bits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, large outputs use non-temporal stores; here all outputs do."""
    from holdfast.ops.embedding import cpu
    from holdfast.ops.segment_sum import cpu_gather

    monkeypatch.setattr(cpu, "STREAMED_FROM", 1)
    monkeypatch.setattr(cpu_gather, "STREAMED_FROM", 1)
    found = []
    for name in ("EmbeddingPlan", "GatherPlan"):
        plan = hf.plans.all()[name]
        for case in cases_of(plan):
            args, wanted = run_reference(plan, case)
            found += check(plan, case, Way("cpu", threads=threads, times=1), args, wanted, select_on("cpu"))
    assert found == []


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_rows_of_any_size_are_copied_whole(dtype: torch.dtype, threads: int) -> None:
    """On the CPU, rows of different sizes take different vectors. What lies between the rows is kept."""
    stream, indices = hf.Stream.current("cpu"), torch.tensor([2, 0, -1, 3, 3, 1])
    bad = indices == -1
    with cpu_threads(threads, least=1, worth=1):
        for columns in (*range(1, 140), 511, 512, 513, 1024, 1025):
            # Rows that are not aligned, and the last row at the end of its memory.
            weight = torch.randn(1 + 4 * (columns + 1), dtype=dtype)[1:].view(4, columns + 1)[:, 1:]
            held = torch.full((len(indices), columns + 2), 7.0, dtype=dtype)
            desc = hf.plans.EmbeddingDescriptor(
                shape=(6,), num_embeddings=4, embedding_dim=columns, dtype=dtype, bad_index="skip"
            )
            args = hf.plans.EmbeddingArgs(weight=weight, indices=indices, out=held[:, 1:-1])
            hf.plans.EmbeddingPlan.select(stream, desc).run(stream, None, args)
            wanted = weight[indices.clamp(min=0)].masked_fill(bad[:, None], 0)
            assert torch.equal(held[:, 1:-1], wanted), columns
            assert held[:, 0].eq(7).all() and held[:, -1].eq(7).all(), columns
            assert torch.equal(hf.index_select(weight, 0, indices.clamp(min=0)), weight[indices.clamp(min=0)])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is used again on Linux only")
@pytest.mark.parametrize("columns", [64, 65])
def test_rows_without_terms_of_a_large_gradient_are_cleared(columns: int) -> None:
    """On the CPU they are cleared by non-temporal stores. The memory was used before."""
    rows = 2**25 // (4 * columns) + 1000
    indices = torch.tensor([5, 6, 7, rows // 2, rows // 2 + 900, rows - 2, 5])
    weight = torch.zeros(rows, columns, requires_grad=True)
    dout = torch.randn(len(indices), columns)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(hf.embedding(indices, weight), weight, dout)
        assert torch.equal(gradient, torch.zeros(rows, columns).index_add_(0, indices, dout))
        gradient.fill_(torch.nan)
        del gradient

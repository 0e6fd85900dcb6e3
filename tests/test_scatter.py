"""Tests of the scatter functions: values and gradients against torch, the order of sums, errors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.backends.threads import shared_finely
from holdfast.core.errors import HoldfastError, InvalidDescriptor, InvalidIndex
from holdfast.core.stream import CPU_STREAM
from holdfast.ops.scatter import cpu_elements
from holdfast.ops.scatter.cpu import Scatter
from holdfast.ops.scatter.plan import ScatterArgs, ScatterDescriptor, ScatterPlan
from holdfast.ops.scatter.torch_op import gather_values, index_put_values, scatter_values

GPU = "cuda" if torch.cuda.is_available() else "cpu"

REDUCED = [
    ("add", {}),
    ("sum", {"include_self": True}),
    ("sum", {"include_self": False}),
    ("mean", {"include_self": True}),
    ("mean", {"include_self": False}),
]


def close(own: torch.Tensor, other: torch.Tensor) -> None:
    assert own.shape == other.shape and own.stride() == other.stride()
    torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def same_gradients(own: torch.Tensor, other: torch.Tensor, by: tuple[torch.Tensor, ...]) -> None:
    dout = torch.randn(other.shape, dtype=other.dtype, generator=torch.Generator().manual_seed(3))
    found, expected = (torch.autograd.grad(out, by, dout, allow_unused=True) for out in (own, other))
    for mine, others in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-12, atol=1e-12)


def drawn(seed: int) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    """input, dim, index and src of scatter_add: of any rank, expanded or not, smaller than input or not."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rank = rng.randint(0, 4)
    size = [rng.randint(1, 6) for _ in range(rank)]
    dim = rng.randint(-max(rank, 1), max(rank, 1) - 1)
    axis = dim % max(rank, 1)
    shape = [rng.randint(1, n) if rng.random() < 0.3 else n for n in size]
    if rank:
        shape[axis] = rng.randint(0, 40)
    index = torch.randint(0, size[axis] if rank else 1, shape, generator=generator)
    if rank and rng.random() < 0.5:
        varied = [n if d == axis or rng.random() < 0.2 else 1 for d, n in enumerate(shape)]
        index = torch.randint(0, size[axis], varied, generator=generator).expand(shape)
    if rank > 1 and rng.random() < 0.3:
        index = index.transpose(0, 1).contiguous().transpose(0, 1)
    input = torch.randn(size, dtype=torch.float64, generator=generator)
    src = torch.randn(shape, dtype=torch.float64, generator=generator)
    if rank > 1 and rng.random() < 0.3:
        input, src = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (input, src))
    return input.requires_grad_(), dim, index, src.requires_grad_()


@pytest.mark.parametrize(("reduce", "given"), REDUCED, ids=str)
def test_values_and_gradients_are_those_of_torch(reduce: str, given: dict[str, bool]) -> None:
    for seed in range(120):
        input, dim, index, src = drawn(seed)
        if reduce == "add":
            own, other = hf.scatter_add(input, dim, index, src), input.scatter_add(dim, index, src)
        else:
            own = hf.scatter_reduce(input, dim, index, src, reduce, **given)
            other = input.scatter_reduce(dim, index, src, reduce, **given)
        close(own, other)
        if src.numel():
            same_gradients(own, other, (input, src))


def test_index_add_is_that_of_torch() -> None:
    for seed in range(120):
        rng, (input, dim, _, _) = random.Random(seed), drawn(seed)
        axis, count = dim % max(input.dim(), 1), rng.choice((0, 1, 7, 100)) if input.dim() else 1
        index = torch.randint(0, input.shape[axis] if input.dim() else 1, (count,))
        shape = list(input.shape)
        if shape:
            shape[axis] = count
        source = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        alpha = rng.choice((1, 0.5, -2))
        own = hf.index_add(input, dim, index.to(rng.choice((torch.int32, torch.int64))), source, alpha=alpha)
        other = input.index_add(dim, index, source, alpha=alpha)
        close(own, other)
        same_gradients(own, other, (input, source))


def test_gather_and_index_select_are_those_of_torch() -> None:
    for seed in range(120):
        input, dim, index, _ = drawn(seed)
        # torch.gather has wrong gradients for some expanded indices on the CPU.
        pairs = [(hf.gather(input, dim, index), torch.gather(input, dim, index.contiguous()))]
        if input.dim():
            rows = index.reshape(-1)[:9]
            pairs.append((hf.index_select(input, dim, rows), torch.index_select(input, dim, rows)))
        for own, other in pairs:
            close(own, other)
            same_gradients(own, other, (input,))


def drawn_indices(seed: int) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """input and indices of index_put: broadcast tensors, negative indices, masks, axes left out."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    input = torch.randn(size, dtype=torch.float64, generator=generator)
    if len(size) > 1 and rng.random() < 0.3:
        input = input.transpose(0, 1).contiguous().transpose(0, 1)
    shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
    masked, indices = rng.random() < 0.3, list[torch.Tensor | None]()
    for d, n in enumerate(size):
        if rng.random() < 0.35 and d < len(size) - 1:
            indices.append(None)
        elif masked:
            covered = size[d : d + rng.randint(1, len(size) - d)]
            indices.append(torch.rand(covered, generator=generator) < 0.6)
            break
        else:
            own = [m if rng.random() < 0.7 else 1 for m in shape][rng.randint(0, len(shape)) :]
            indices.append(torch.randint(-n, n, own, generator=generator))
    return input.requires_grad_(), indices


def test_index_put_is_that_of_torch() -> None:
    for seed in range(200):
        input, indices = drawn_indices(seed)
        shape = list(torch.ops.aten.index(input, indices).shape)
        narrower = [n if seed % 3 else 1 for n in shape][
            seed % 5 % (len(shape) + 1) if seed % 4 == 0 else 0 :
        ]
        values = torch.randn(narrower, dtype=torch.float64, requires_grad=True)
        own = hf.index_put(input, tuple(indices), values)
        other = torch.ops.aten.index_put(input, indices, values, True)
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
        same_gradients(own, other, (input, values))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_segments_are_those_of_torch(reduce: str) -> None:
    for seed in range(60):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        count, rows = rng.choice((0, 1, 30, 300)), rng.randint(1, 20)
        shape = (count, *(rng.randint(1, 4) for _ in range(rng.randint(0, 2))))
        data = torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        segments = torch.randint(0, rows, (count,), generator=generator)
        is_sorted = seed % 2 == 1
        segments = segments.sort()[0] if is_sorted else segments
        own = hf.segment_reduce(data, segments, rows, reduce=reduce, sorted=is_sorted)
        index = segments.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        zeros = torch.zeros(rows, *shape[1:], dtype=torch.float64)
        other = zeros.scatter_reduce(0, index, data, {"max": "amax"}.get(reduce, reduce), include_self=False)
        close(own, other)
        if count:
            same_gradients(own, other, (data,))


def test_values_below_autograd() -> None:
    for seed in range(0, 60, 3):
        input, indices = drawn_indices(seed)
        values = torch.randn(torch.ops.aten.index(input, indices).shape, dtype=torch.float64)
        with torch.no_grad():
            found = index_put_values(input, indices, values)
        assert torch.equal(found, hf.index_put(input, tuple(indices), values)) and found.grad_fn is None
        input, dim, index, src = drawn(seed)
        if not input.dim():
            continue
        axis = dim % input.dim()
        assert torch.equal(gather_values(input, axis, index), hf.gather(input, dim, index))
        if index.numel():
            found = scatter_values(input.detach(), axis, index, src.detach(), reduce="mean", base="kept")
            assert torch.equal(found, hf.scatter_reduce(input, dim, index, src, "mean", include_self=False))


def test_a_wrong_claim_of_sorted_segments_changes_nothing() -> None:
    data, segments = torch.randn(500, 3), torch.randint(0, 20, (500,))
    for reduce in ("sum", "mean", "max"):
        found = [hf.segment_reduce(data, segments, 20, reduce=reduce, sorted=s) for s in (False, True)]
        assert torch.equal(*found)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_tiles_of_elements_change_nothing(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(8)
    for shape, table, dim in [((90, 40), (3, 40), 0), ((7, 50), (7, 5), 1), ((4, 70, 33), (4, 2, 33), 1)]:
        index = torch.randint(0, table[dim], shape, generator=generator)
        index[index == table[dim] - 1] = 0  # rows without terms, and long rows
        input, src = (torch.randn(size, generator=generator) for size in (table, shape))
        desc, found = ScatterDescriptor(shape=shape, table=table, dim=dim, reduce=reduce), []
        for rows in (2**17, 24):
            monkeypatch.setattr(cpu_elements, "_TILE_ROWS", rows)
            monkeypatch.setattr(cpu_elements, "_TILE_COLUMNS", min(rows, 64))
            kernel = Scatter(desc, torch.device("cpu"))
            assert kernel.elements is not None and (kernel.elements.tiling.tiles > 1) == (rows == 24)
            args = ScatterArgs(input=input, index=index, src=src, out=torch.empty(table))
            addresses = [tensor.data_ptr() for tensor in args.operands() if tensor is not None]
            workspace = hf.Workspace.allocate(kernel.workspace_size, "cpu")
            with shared_finely(1, 1):
                kernel.prepare(args)(CPU_STREAM, workspace, args, addresses)
            found.append(args.out)
        assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))
        index.view(-1)[-1] = table[dim]
        with pytest.raises(InvalidIndex, match=f"position {index.numel() - 1} "):
            kernel.prepare(args)(CPU_STREAM, workspace, args, addresses)
        assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))


def test_an_index_that_does_not_vary_gives_the_same_bits() -> None:
    """Rows of an expanded index, elements of a full one, and index_add: one order of sums."""
    table, terms = torch.randn(11, 3, 5), torch.randn(200, 3, 5)
    rows = torch.randint(0, 11, (200,))
    expanded = rows[:, None, None].expand(terms.shape)
    for dim in range(3):
        x, src, index = (t.movedim(0, dim) for t in (table, terms, expanded))
        found = [
            hf.scatter_add(x, dim, index, src),
            hf.scatter_add(x, dim, index.contiguous(), src),
            hf.scatter_add(x.contiguous(), dim, index, src.contiguous()),
            hf.index_add(x, dim, rows, src),
        ]
        assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_sum_is_rounded_once_and_input_is_added_last(dtype: torch.dtype) -> None:
    """A chunk of 32 terms, then the rest, then the sum of both, then input."""
    generator = torch.Generator().manual_seed(1)
    src, input = (torch.randn(n, generator=generator).to(dtype) for n in (50, 1))
    numbers = src.float().numpy()
    parts = []
    for chunk in (numbers[:32], numbers[32:]):
        total = np.float32(0)
        for term in chunk:
            total = total + term
        parts.append(total)
    expected = torch.tensor(input.float().numpy() + (parts[0] + parts[1])).to(dtype)
    found = hf.scatter_add(input, 0, torch.zeros(50, dtype=torch.int64), src)
    assert torch.equal(found, expected)


def test_what_has_no_terms_is_copied() -> None:
    bits = torch.tensor([-0.0, float("inf"), 1e-42, float("nan"), 5.0])
    out = hf.scatter_add(bits, 0, torch.tensor([4]), torch.tensor([1.0]))
    assert torch.equal(out[:4].view(torch.int32), bits[:4].view(torch.int32)) and out[4] == 6.0
    assert out.data_ptr() != bits.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["added", "kept", "zeros"])
@pytest.mark.parametrize("width", [3, 16])
def test_contiguous_rows_are_filled_as_one(dtype: torch.dtype, base: str, width: int) -> None:
    """A tall table with few terms; NaN shows an element that is not written."""
    from holdfast.ops.segment_sum import gpu_few_terms

    generator = torch.Generator().manual_seed(width)
    index = torch.randint(0, 701, (120,), generator=generator)
    src, table = (torch.randn(n, width, generator=generator).to(dtype) for n in (120, 701))
    desc = ScatterDescriptor(shape=(120,), table=(701,), width=width, dtype=dtype, base=base)
    found = []
    for backend, padded in (("reference", False), ("gpu", False), ("gpu", True)):
        device = GPU if backend == "gpu" else "cpu"
        out = torch.full((701, width + padded), torch.nan, dtype=dtype, device=device)[:, :width]
        stream = hf.Stream.current(device)
        with gpu_few_terms.TUNING.replaced(most_terms=1):
            plan = ScatterPlan.select(stream, desc, hf.PlanPreference(backend=backend, precompile=False))
            workspace = torch.full((plan.workspace_size(),), 0xFF, dtype=torch.uint8, device=device)
            input = None if base == "zeros" else table.to(device)
            plan.run(
                stream,
                workspace,
                ScatterArgs(input=input, index=index.to(device), src=src.to(device), out=out),
            )
        found.append(out.cpu())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_few_terms_of_a_large_ragged_table_are_sorted() -> None:
    from holdfast.ops.segment_sum.gpu_few_terms import TUNING

    tuning = TUNING.on(torch.device("meta"))  # the record of GPUs
    narrow = ScatterDescriptor(shape=(2,), table=(10**6,), width=3)
    assert not tuning.serves(narrow)
    assert tuning.serves(ScatterDescriptor(shape=(2,), table=(10**6,), width=4))
    assert tuning.serves(ScatterDescriptor(shape=(2,), table=(10**4,), width=3))


def test_all_terms_on_one_row_and_threads_change_nothing() -> None:
    src = torch.randn(100_000, 3)
    for rows, spread in ((1, 1), (50, 50), (10_000, 1000)):
        index = torch.randint(0, spread, (len(src),))
        found = []
        for threads in (1, 2, 5):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                found.append(hf.index_add(torch.zeros(rows, 3), 0, index, src))
                found.append(hf.scatter_add(torch.zeros(rows), 0, index, src[:, 0])[:, None])
            finally:
                torch.set_num_threads(before)
        for wide, narrow in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(wide, found[0]) and torch.equal(narrow[:, 0], found[0][:, 0])


@pytest.mark.parametrize("on", ["scatter_add", "index_add", "mean", "gather"])
def test_gradients_of_both_orders(on: str) -> None:
    index, rows = torch.tensor([[0, 2], [1, 1], [0, 1]]), torch.tensor([2, 0, 2])
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    calls: dict[str, Callable[..., torch.Tensor]] = {
        "scatter_add": lambda x, y: hf.scatter_add(x, 0, index, y),
        "index_add": lambda x, y: hf.index_add(x, 0, rows, y, alpha=0.5),
        "mean": lambda x, y: hf.scatter_reduce(x, 0, index, y, "mean"),
        "gather": lambda x, y: hf.gather(x, 0, index) * hf.index_select(y, 0, rows),
    }
    assert torch.autograd.gradcheck(calls[on], (x, y), nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(calls[on], (x, y), nondet_tol=0.0)


def test_operators_compile_and_map() -> None:
    x, src = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    index, rows = torch.randint(0, 4, (5, 3)), torch.randint(0, 4, (5,))
    kind = (0, "added", "sum", 1.0)
    for given in ((x, index, src), (x, rows, src), (None, rows, src)):
        base = kind if given[0] is not None else (0, "zeros", "mean", 1.0)
        torch.library.opcheck(torch.ops.holdfast.scatter.default, (*given, [4, 3], *base))
    torch.library.opcheck(torch.ops.holdfast.gather.default, (x, index, 0, "raise"))
    torch.library.opcheck(torch.ops.holdfast.gather.default, (x, rows, 0, "skip"))

    def loss(x: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        out = hf.scatter_add(x, 0, index, src).square().sum()
        return out + hf.index_add(x, 0, index[:, 0], src).square().sum() + hf.gather(x, 0, index).sum()

    def others(x: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        out = hf.index_put(x, (index[:, 0],), src).square().sum()
        out = out + hf.index_put(x, (index, torch.arange(3)), src).square().sum()
        return out + sum(hf.segment_reduce(src, index[:, 0], 4, reduce=r).sum() for r in ("mean", "max"))

    compiled = torch.compile(others, fullgraph=True, backend="aot_eager", dynamic=True)
    given = x, index, src
    plain, traced = (torch.autograd.grad(f(*given), (x, src)) for f in (others, compiled))
    assert all(map(torch.equal, plain, traced))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (5, 8):
        given = x, torch.randint(0, 4, (count, 3)), torch.randn(count, 3, requires_grad=True)
        by = given[0], given[2]
        plain, traced = (torch.autograd.grad(f(*given), by) for f in (loss, compiled))
        assert all(map(torch.equal, plain, traced))
    many, indices = torch.randn(3, 5, 3), torch.randint(0, 4, (3, 5, 3))
    looped = torch.stack([hf.scatter_add(x, 0, i, t) for i, t in zip(indices, many, strict=True)])
    assert torch.equal(torch.vmap(lambda i, t: hf.scatter_add(x, 0, i, t))(indices, many), looped)
    looped = torch.stack([hf.index_add(x, 0, i[:, 0], t) for i, t in zip(indices, many, strict=True)])
    assert torch.equal(torch.vmap(lambda i, t: hf.index_add(x, 0, i[:, 0], t))(indices, many), looped)


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_an_index_out_of_range_raises_before_anything_is_written(bad: int) -> None:
    index = torch.tensor([0, 1, bad, 1])
    said = rf"position 2 of the flattened index is {'.*' if bad > 4 else bad}.*has 4 rows"
    with pytest.raises(InvalidIndex, match=said):
        hf.scatter_add(torch.zeros(4), 0, index, torch.ones(4))
    with pytest.raises(InvalidIndex, match=said):
        hf.index_add(torch.zeros(4, 3), 0, index, torch.ones(4, 3))
    desc = ScatterDescriptor(shape=(4,), table=(4,))
    out = torch.full((4,), 7.0)
    for backend in ("cpu", "reference"):
        plan = ScatterPlan.select(CPU_STREAM, desc, hf.PlanPreference(backend=backend))
        args = ScatterArgs(input=torch.zeros(4), index=index, src=torch.ones(4), out=out)
        with pytest.raises(InvalidIndex):
            plan.run(CPU_STREAM, hf.Workspace.allocate(plan.workspace_size(), "cpu"), args)
        assert out.tolist() == [7.0] * 4
    for reduce in ("sum", "max"):
        with pytest.raises(InvalidIndex, match=said):
            hf.segment_reduce(torch.ones(4), index, 4, reduce=reduce)
    if bad != -1:
        with pytest.raises(InvalidIndex):
            hf.index_put(torch.zeros(4, 3), (index, index), torch.ones(4))
    with pytest.raises(InvalidIndex, match="has no rows"):
        hf.index_add(torch.zeros(0, 3), 0, torch.tensor([0]), torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, i: hf.scatter_add(x, 2, i, x), "dim is 2; accepted are whole numbers from -2 to 1"),
        (lambda x, i: hf.scatter_add(x, 0, i.float(), x), "index has dtype torch.float32; accepted are"),
        (lambda x, i: hf.scatter_add(x, 0, i, x.double()), "src has dtype torch.float64 and input has"),
        (lambda x, i: hf.scatter_add(x, 0, i[0], x), "input has 2 axes, index has 1 and src has 2"),
        (lambda x, i: hf.scatter_add(x[:, :2], 0, i, x), "index must not be larger than src, nor larger"),
        (lambda x, i: hf.scatter_add(x, 0, i, x[:2]), "index must not be larger than src"),
        (lambda x, i: hf.scatter_add(x.int(), 0, i, x.int()), "dtype"),
        (lambda x, i: hf.scatter_reduce(x, 0, i, x, "prod"), "reduce is 'prod'; accepted are 'sum', 'mean'"),
        (lambda x, i: hf.scatter_reduce(x, 0, i, x, "sum", include_self=1), "include_self is 1"),
        (lambda x, i: hf.index_add(x, 0, i, x), "index must have one axis"),
        (lambda x, i: hf.index_add(x, 0, i[0, :2], x), r"and source the shape \(2, 3\)"),
        (lambda x, i: hf.index_add(x, 0, i[0], x, alpha=float("nan")), "alpha is nan"),
        (lambda x, i: hf.index_add(x, 0, i[0], x, alpha=-1e300), "alpha is -1e.300 .* where it is infinite"),
        (lambda x, i: hf.index_add(x[0], 0, i[0, :1], x[0, 0]), r"and source the shape \(1,\)"),
        (
            lambda x, i: hf.index_add(x[0, 0], 0, i[0, :1], x[0, :1]),
            r"one element, and source the shape \(\)",
        ),
        (
            lambda x, i: hf.index_add(x[0, 0], 0, i[0, :2], x[0, :2]),
            r"one element, and source the shape \(\)",
        ),
        (lambda x, i: hf.gather(x, 0, i[0]), "both must have the same number of axes"),
        (lambda x, i: hf.index_put(x, i, x), "indices is a Tensor; it must be a tuple"),
        (lambda x, i: hf.index_put(x, (None,), x), "index at least one axis"),
        (lambda x, i: hf.index_put(x, (i, i, i), x), "index at least one axis, and no more"),
        (lambda x, i: hf.index_put(x, (i.float(),), x), r"indices\[0\] has dtype torch.float32"),
        (lambda x, i: hf.index_put(x, (i[0] > 0, i > 0), x), r"indices\[1\] is a mask of shape"),
        (lambda x, i: hf.index_put(x, (torch.tensor(True),), x), r"indices\[0\] is a mask of rank 0"),
        (lambda x, i: hf.index_put(x, (i[0], i[:2, 0]), x), "they must broadcast"),
        (lambda x, i: hf.index_put(x, (i[0, :2],), x), "they must broadcast"),
        (lambda x, i: hf.index_put(x, (i[0],), x[None]), "values must broadcast to it"),
        (lambda x, i: hf.index_put(x, (i[0],), x, accumulate=False), "accumulate is False"),
        (lambda x, i: hf.segment_reduce(x, i, 3), "segments must have one axis"),
        (lambda x, i: hf.segment_reduce(x, i[0], -1), "num_segments is -1"),
        (lambda x, i: hf.segment_reduce(x, i[0], 3, reduce="min"), "reduce is 'min'; accepted are"),
        (lambda x, i: hf.segment_reduce(x, i[0], 3, sorted=1), "sorted is 1"),
        (lambda x, i: hf.index_select(x, 0, i), "index must have one axis"),
    ],
)
def test_arguments_are_checked(call: Callable[..., Any], said: str) -> None:
    with pytest.raises(HoldfastError, match=said):
        call(torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"table": (4, 3)}, "both must have the same rank"),
        ({"dim": 1}, "dim is 1; it must be a whole number from 0 to 0"),
        ({"shape": (3, 5), "table": (4, 4)}, "the index must not be larger than the table"),
        ({"width": -1}, "width is -1"),
        ({"base": "zero"}, "base is 'zero'; accepted are"),
        ({"reduce": "max"}, "reduce is 'max'; accepted are"),
        ({"alpha": 2.0, "reduce": "mean"}, "alpha is for sums"),
        ({"alpha": 3.4028235677973366e38}, "where it is infinite"),
        ({"alpha": -1e39, "dtype": torch.bfloat16}, "where it is infinite"),
        ({"table": (2**31,)}, r"table \(2147483648,\) has 2147483648 rows; at most 2147483646 are accepted"),
        ({"shape": (1, 1), "table": (2**20, 2**12)}, r"table \(1048576, 4096\) has 4294967296 rows"),
        ({"width": 2**31}, "width is 2147483648; it must be None or a whole number from 0 to 2147483646"),
        ({"index_dtype": torch.int16}, "index_dtype is torch.int16"),
    ],
)
def test_descriptors_are_checked(changes: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"shape": (3,), "table": (4,)} | changes
    with pytest.raises(InvalidDescriptor, match=said):
        ScatterPlan.select(CPU_STREAM, ScatterDescriptor(**fields))


def test_descriptors_go_to_json_and_back() -> None:
    desc = ScatterDescriptor(shape=(3, 2), table=(4, 2), width=5, base="kept", reduce="mean")
    assert ScatterDescriptor.from_json(desc.to_json()) == desc


def test_index_put_names_the_index_that_is_out_of_range() -> None:
    indices = torch.tensor([0, 1]), torch.tensor([[3], [-9]])
    said = r"position 1 of the flattened index of axis 1 is -9; the axis has 8 rows; .* are -8 to 7"
    with pytest.raises(InvalidIndex, match=said) as refusal:
        hf.index_put(torch.zeros(4, 8), indices, torch.ones(2, 2))
    assert isinstance(refusal.value, IndexError) and isinstance(refusal.value, RuntimeError)


def test_index_put_of_rows_names_the_negative_indices_that_it_accepts() -> None:
    index, said = (
        torch.tensor([0, -4, 2]),
        "flattened index of axis 0 is -5; the axis has 4 rows; .* are -4 to 3",
    )
    for _ in range(4):  # the third call with the same metadata may be a repetition
        hf.index_put(torch.zeros(4, 8), (index,), torch.ones(3, 8))
    with pytest.raises(InvalidIndex, match=said):
        hf.index_put(torch.zeros(4, 8), (index - 1,), torch.ones(3, 8))
    with pytest.raises(InvalidIndex, match=said):
        hf.index_put(torch.zeros(4, 3), (index - 1,), torch.ones(3, 3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_index_put_refuses_nested_tensors_at_an_index_of_rows() -> None:
    index, table = (torch.tensor([0, 1]),), torch.zeros(3, 2)
    nested = torch.nested.as_nested_tensor([table])
    with pytest.raises(hf.InvalidArgs, match="values is a nested tensor; it must be a dense one"):
        hf.index_put(table, index, nested)
    with pytest.raises(hf.InvalidArgs, match="input is a nested tensor; it must be a dense one"):
        hf.index_put(nested, index, table[:2])


def test_alpha_may_be_any_number_of_the_compute_type() -> None:
    largest = float.fromhex("0x1.fffffefffffffp127")  # rounds to the largest float32
    index, rows = torch.tensor([1]), torch.ones(1, 2)
    assert hf.index_add(torch.zeros(2, 2), 0, index, rows, alpha=largest)[1, 0] == torch.finfo().max
    assert hf.index_add(torch.zeros(2, 2).double(), 0, index, rows.double(), alpha=1e300)[1, 0] == 1e300


@pytest.mark.parametrize("first", [0.0, -0.0])
def test_a_factor_of_minus_zero_keeps_its_sign_after_another_zero(first: float) -> None:
    table, index, rows = torch.full((3,), -0.0), torch.tensor([1]), torch.ones(1)
    for alpha in (first, -first, first):
        found = hf.index_add(table, 0, index, rows, alpha=alpha).signbit()
        assert found.tolist() == [True, math.copysign(1, alpha) < 0, True]
        assert torch.equal(found, table.index_add(0, index, rows, alpha=alpha).signbit())


def test_the_maximum_of_several_samples_gives_no_warning() -> None:
    data, segments = torch.randn(3, 5, 2), torch.randint(4, (3, 5))

    def largest(data: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        return hf.segment_reduce(data, segments, 4, reduce="max")

    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # and warnings are errors in tests
    try:
        found = torch.vmap(largest)(data, segments)
        by_columns = torch.vmap(largest, in_dims=(0, 1))(data, segments.t().contiguous())
    finally:
        torch.set_warn_always(always)
    each = torch.stack([largest(*sample) for sample in zip(data, segments, strict=True)])
    assert torch.equal(found, each) and torch.equal(by_columns, each)


def test_terms_that_an_empty_index_leaves_out_have_a_gradient() -> None:
    table = torch.ones(4, 3)
    for terms, index in ((torch.ones(0, 3), (0, 3)), (torch.ones(2, 3), (2, 0)), (torch.ones(2, 3), (0,))):
        terms.requires_grad_()
        empty = torch.zeros(index, dtype=torch.int64)
        for found in (
            hf.scatter_add(table, 0, empty, terms),
            hf.scatter_reduce(table, 1, empty, terms, "mean", include_self=False),
        ):
            (gradient,) = torch.autograd.grad(found.sum(), terms)
            assert torch.equal(found, table) and torch.equal(gradient, torch.zeros_like(terms))


def test_gather_takes_an_empty_index_of_any_shape() -> None:
    table = torch.ones(4, 5, requires_grad=True)
    for shape in ((0,), (3, 0, 2), (0, 7), (9, 0)):
        index = torch.zeros(shape, dtype=torch.int64)
        found = hf.gather(table, 0, index)
        assert found.shape == torch.gather(table, 0, index).shape
        found.add_(1)  # refused for a view of the table
        (gradient,) = torch.autograd.grad(found.sum(), table)
        assert gradient.shape == (4, 5) and not gradient.any()


def test_the_index_of_rows_without_elements_is_checked() -> None:
    index, said = torch.tensor([1, 4]), "position 1 of the flattened index is 4; the indexed axis has 4 rows"
    for shape, dim in (((4, 0), 0), ((0, 4), 1), ((2, 4, 0), -2)):
        table = torch.zeros(shape, requires_grad=True)
        rows = torch.zeros([2 if size == 4 else size for size in shape])
        for call in (
            lambda index, table=table, dim=dim: hf.index_select(table, dim, index),
            lambda index, table=table, dim=dim, rows=rows: hf.index_add(table, dim, index, rows),
        ):
            for _ in range(4):  # the third call with the same metadata may be a repetition
                (gradient,) = torch.autograd.grad(call(index.clamp(max=3)).sum(), table)
                assert gradient.shape == shape
            with pytest.raises(InvalidIndex, match=said):
                call(index)
    for reduce in ("sum", "max"):
        with pytest.raises(InvalidIndex, match=said):
            hf.segment_reduce(torch.zeros(2, 0), index, 4, reduce=reduce)
    with pytest.raises(InvalidIndex, match="position 1 of the flattened index of axis 0 is 4"):
        hf.index_put(torch.zeros(4, 0), (index,), torch.zeros(2, 0))


@pytest.mark.parametrize("rank", [8, 9])
def test_samples_of_the_largest_rank(rank: int) -> None:
    shape = (2, 1, 3, *[1] * (rank - 4), 2)
    table, rows = torch.randn(2, *shape), torch.tensor([[2, 0, 2], [1, 1, 0]])
    for dims in ((0, 0, 0), (None, 0, 0), (0, None, None), (1, 1, None)):
        given = [table, rows, table * 2]
        given = [x[0] if d is None else x.movedim(0, d) for x, d in zip(given, dims, strict=True)]
        calls = [
            lambda table, rows, terms: hf.index_add(table, 2, rows, terms),
            lambda table, rows, terms: hf.index_select(table, 2, rows),
        ]
        if rank == 8:
            calls += [
                lambda table, rows, terms: hf.scatter_add(table, 2, _everywhere(rows, shape), terms),
                lambda table, rows, terms: hf.gather(table, 2, _everywhere(rows, shape)),
            ]
        for call in calls:
            found = torch.vmap(call, in_dims=dims)(*given)
            for i in range(2):
                sample = [x if d is None else x.select(d, i) for x, d in zip(given, dims, strict=True)]
                assert torch.equal(found[i], call(*sample))


def _everywhere(rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return rows.reshape(3, *[1] * (len(shape) - 3)).expand(shape).clone()

"""``torch.func`` transforms and batched gradients give the bits of plain calls, or raise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, jvp, vjp, vmap

import holdfast as hf
from holdfast.core.autograd import LIBRARY, register_autograd
from holdfast.core.torch_op import define
from holdfast.core.values import rounded, spread


def numbers(
    label: str, shape: tuple[int, ...], dtype: torch.dtype, least: int = -6, most: int = 3
) -> torch.Tensor:
    return rounded(spread(label, math.prod(shape), 24, least, most), dtype).reshape(shape)


X = numbers("transformed", (4, 6), torch.float32, -3, 1)
SCALE = torch.tensor(0.25)
ROWS = torch.full((4,), 0.25)
TABLE = numbers("transformed table", (7, 3), torch.float32)
INDICES = torch.tensor([[1, 2, 3], [4, 1, 1]])
IMAGE = numbers("transformed image", (2, 3, 5, 5), torch.float32)
GRID = numbers("transformed grid", (2, 4, 4, 2), torch.float32, -3, 0)
THETA = numbers("transformed theta", (2, 2, 3), torch.float32)

Differentiable = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]

CALLS: dict[str, Differentiable] = {
    "quantize": (lambda x: hf.quantize(x, SCALE, dtype=torch.float32, q_min=-3, q_max=2), (X,)),
    "dequantize": (lambda q: hf.dequantize(q, ROWS, granularity=hf.PerChannel(0)), (X.round(),)),
    **{
        f"fake_quantize {ste}": (
            lambda x, ste=ste: hf.fake_quantize(x, SCALE, dtype=torch.int4, ste=ste),
            (X,),
        )
        for ste in hf.SteKind
    },
    "fake_quantize learned": (
        lambda x, s, z: hf.fake_quantize(
            x, s, z, dtype=torch.int4, granularity=hf.PerChannel(0), grad_factor="lsq"
        ),
        (X, ROWS, torch.zeros(4)),
    ),
    "embedding": (lambda w: hf.embedding(INDICES, w, padding_idx=1), (TABLE,)),
    "embedding_bag mean": (lambda w: hf.embedding_bag(INDICES, w), (TABLE,)),
    "embedding_bag max": (lambda w: hf.embedding_bag(INDICES, w, mode="max"), (TABLE,)),
    "embedding_bag weighted": (
        lambda w, p: hf.embedding_bag(INDICES, w, per_sample_weights=p, mode="sum"),
        (TABLE, torch.tensor([[0.5, 2.0, -1.0], [3.0, 0.25, 1.0]])),
    ),
    "scatter_add": (lambda w, x: hf.scatter_add(w, 0, INDICES, x), (TABLE, TABLE[:2] * 0.3)),
    "scatter_reduce": (
        lambda w, x: hf.scatter_reduce(w, 0, INDICES, x, "mean", include_self=False),
        (TABLE, TABLE[:2] * 0.3),
    ),
    "index_add": (lambda w, x: hf.index_add(w, 0, INDICES[0], x, alpha=0.3), (TABLE, TABLE[:3] * 0.3)),
    "index_put": (
        lambda w, x: hf.index_put(w, (INDICES, None), x),
        (TABLE, torch.stack([TABLE[:3], TABLE[2:5]])),
    ),
    "segment_reduce": (lambda w: hf.segment_reduce(w, INDICES.flatten(), 5, reduce="mean"), (TABLE[:6],)),
    "segment_reduce max": (
        lambda w: hf.segment_reduce(w, INDICES.flatten(), 5, reduce="max"),
        (TABLE[:6],),
    ),
    "gather": (lambda w: hf.gather(w, 0, INDICES), (TABLE,)),
    "index_select": (lambda w: hf.index_select(w, 0, INDICES[1]), (TABLE,)),
    "grid_sample": (hf.grid_sample, (IMAGE, GRID)),
    "grid_sample of an image": (lambda image: hf.grid_sample(image, GRID, "bicubic"), (IMAGE,)),
    "interpolate": (lambda image: hf.interpolate(image, (4, 7), mode="bicubic"), (IMAGE,)),
    "affine_grid": (lambda theta: hf.affine_grid(theta, (2, 3, 4, 4)), (THETA,)),
}
every_call = pytest.mark.parametrize("name", CALLS)


def plain(call: Callable[..., torch.Tensor], given: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients by torch.autograd.grad."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    return torch.autograd.grad(call(*leaves), leaves, dout)


def prepared(name: str) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], torch.Tensor]:
    call, given = CALLS[name]
    shape = call(*given).shape
    return call, given, numbers(f"gradient of {name}", tuple(shape), torch.float32)


@every_call
def test_grad_and_vjp(name: str) -> None:
    call, given, dout = prepared(name)
    expected = plain(call, given, dout)
    every = tuple(range(len(given)))
    found = grad(lambda *given: (call(*given) * dout).sum(), argnums=every)(*given)
    assert all(map(torch.equal, found, expected))
    out, differentiate = vjp(call, *given)  # type: ignore[misc]
    assert torch.equal(out, call(*given))
    assert all(map(torch.equal, differentiate(dout), expected))


@every_call
def test_a_gradient_for_each_sample(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    call, given, dout = prepared(name)
    samples = [torch.stack([tensor, tensor * 1.5, tensor * 0.5]) for tensor in given]
    every = tuple(range(len(given)))
    out = vmap(call)(*samples)
    found = vmap(grad(lambda *given: (call(*given) * dout).sum(), argnums=every))(*samples)
    for i in range(3):
        sample = [tensor[i] for tensor in samples]
        assert torch.equal(out[i], call(*sample))
        expected = plain(call, sample, dout)
        assert all(torch.equal(mine[i], other) for mine, other in zip(found, expected, strict=True))
    assert "batching rule" not in capfd.readouterr().err


@every_call
def test_no_samples(name: str) -> None:
    call, given, dout = prepared(name)
    samples = [tensor.new_empty(0, *tensor.shape, requires_grad=True) for tensor in given]
    out = vmap(call)(*samples)
    assert out.shape == (0, *dout.shape) and out.dtype == dout.dtype
    assert [found.shape for found in torch.autograd.grad(out.sum(), samples)] == [s.shape for s in samples]
    every = tuple(range(len(given)))
    found = vmap(grad(lambda *given: (call(*given) * dout).sum(), argnums=every))(*samples)
    assert [mine.shape for mine in found] == [sample.shape for sample in samples]


BY_INDEX: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index_add": lambda w, i: hf.index_add(w, 0, i, w[:3]),
    "index_add of columns": lambda w, i: hf.index_add(w, 1, i, w),
    "index_select": lambda w, i: hf.index_select(w, 0, i),
    "index_select of a scalar": lambda w, i: hf.index_select(w[0, 0], 0, i[:1]),
    "index_put": lambda w, i: hf.index_put(w, (i,), w[:3]),
    "index_put of two axes": lambda w, i: hf.index_put(w, (i, i), w[0]),
    "scatter_add": lambda w, i: hf.scatter_add(w, 0, i[:, None].expand(3, 3), w),
    "scatter_add of an empty index": lambda w, i: hf.scatter_add(w, 0, i[:0], w),
    "gather": lambda w, i: hf.gather(w, 0, i[:, None].expand(3, 3)),
    "gather of an empty index": lambda w, i: hf.gather(w, 0, i[:0]),
    "segment_reduce": lambda w, i: hf.segment_reduce(w[:3], i, 5, reduce="mean"),
    "segment_reduce max": lambda w, i: hf.segment_reduce(w[:3], i, 5, reduce="max"),
    "embedding": lambda w, i: hf.embedding(i, w),
    "embedding_bag": lambda w, i: hf.embedding_bag(i, w, i[:1] * 0),
}


@pytest.mark.parametrize("name", BY_INDEX)
@pytest.mark.parametrize("shared", [False, True])
def test_no_samples_of_an_index(name: str, shared: bool) -> None:
    call, indices = BY_INDEX[name], torch.zeros(3, 0, dtype=torch.int64)
    table = TABLE if shared else TABLE.new_empty(0, *TABLE.shape)
    shape = call(TABLE, torch.tensor([0, 1, 1])).shape
    assert vmap(call, in_dims=(None if shared else 0, 1))(table, indices).shape == (0, *shape)


@pytest.mark.parametrize("function", [hf.embedding, hf.embedding_bag])
def test_a_frequency_is_that_of_the_sample(function: Any) -> None:
    """The gradient of a table that samples share is the sum of their gradients."""
    samples, table = torch.stack([INDICES, INDICES.flip(0) - 1]), TABLE.clone().requires_grad_()

    def look_up(indices: torch.Tensor) -> torch.Tensor:
        return function(indices, table, scale_grad_by_freq=True)  # type: ignore[no-any-return]

    (found,) = torch.autograd.grad(vmap(look_up)(samples).sum(), table)
    expected = sum(torch.autograd.grad(look_up(sample).sum(), table)[0] for sample in samples)
    torch.testing.assert_close(found, expected)


def test_scales_and_codes_of_no_samples() -> None:
    x = torch.empty(4, 0, 6)
    scale, zero_point = vmap(lambda x: hf.choose_scale(x, symmetric=False), in_dims=1)(x)
    assert scale.shape == zero_point.shape == (0,) and zero_point.dtype == torch.int32
    assert vmap(lambda x: hf.lsq_init(x, dtype=torch.int8), in_dims=1)(x).shape == (0,)
    codes, scales = vmap(lambda x: hf.dynamic_quantize(x, dtype=torch.int4, packed=True), in_dims=1)(x)
    assert codes.shape == (0, 4, 3) and codes.dtype == torch.uint8 and scales.shape == (0, 4)
    back = vmap(lambda q: hf.dequantize(q, 0.5, packed=True, code_dtype=torch.int4, length=6))(codes)
    assert back.shape == (0, 4, 6)
    largest = vmap(hf.quantize)(torch.empty(0, *[1] * 7, 2), torch.empty(0))  # of the largest rank
    assert largest.shape == (0, *[1] * 7, 2) and largest.dtype == torch.int8


@every_call
def test_several_gradients_at_once(name: str) -> None:
    call, given, dout = prepared(name)
    several = torch.stack([dout, dout * 2, -dout])
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    batched = torch.autograd.grad(call(*leaves), leaves, several, is_grads_batched=True)
    mapped = vmap(vjp(call, *given)[1])(several)
    for i in range(3):
        expected = plain(call, given, several[i])
        for mine, also, other in zip(batched, mapped, expected, strict=True):
            assert torch.equal(mine[i], other) and torch.equal(also[i], other)


@every_call
def test_grad_compiles_whole(name: str) -> None:
    call, given, dout = prepared(name)
    every = tuple(range(len(given)))
    torch._dynamo.reset()
    transformed = grad(lambda *given: (call(*given) * dout).sum(), argnums=every)
    found = torch.compile(transformed, fullgraph=True, backend="aot_eager")(*given)
    assert all(map(torch.equal, found, plain(call, given, dout)))


@every_call
def test_forward_mode_is_refused_rather_than_zero(name: str) -> None:
    call, given, _ = prepared(name)
    ones = tuple(map(torch.ones_like, given))
    with pytest.raises(hf.Unsupported, match="has no derivative in forward mode"):
        jvp(call, given, ones)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(hf.Unsupported, match="has no derivative in forward mode"),
    ):
        call(*map(torch.autograd.forward_ad.make_dual, given, ones))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(call(*given), CALLS[name][0](*given))


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_of_samples_are_refused(bag: bool) -> None:
    function: Any = hf.embedding_bag if bag else hf.embedding
    leaf = TABLE.clone().requires_grad_()
    out = function(INDICES, leaf, sparse=True)
    with pytest.raises(hf.Unsupported, match="sparse gradients cannot be computed for several samples"):
        torch.autograd.grad(out, leaf, torch.ones(2, *out.shape), is_grads_batched=True)
    with pytest.raises(hf.Unsupported, match="sparse gradients cannot be computed for several samples"):
        jacrev(lambda w: function(INDICES, w, sparse=True))(TABLE)
    (gradient,) = torch.autograd.grad(
        function(INDICES, leaf, sparse=True).square().sum(), leaf, create_graph=True
    )
    with pytest.raises(hf.Unsupported, match="a sparse gradient has no derivative"):
        gradient.coalesce().values().sum().backward()


def test_second_derivatives_by_transforms() -> None:
    def compare(call: Callable[..., torch.Tensor], same: Callable[..., torch.Tensor], *given: Any) -> None:
        """Compare the transforms with torch.autograd of the same function."""
        every = tuple(range(len(given)))
        found = jacrev(jacrev(lambda *given: call(*given).pow(3).sum(), every), every)(*given)
        expected = torch.autograd.functional.hessian(lambda *given: same(*given).pow(3).sum(), given)
        torch.testing.assert_close(found, expected)

    # Not every torch has this second derivative. gradgradcheck has tested ours.
    compare(hf.grid_sample, hf.grid_sample, IMAGE[:1, :2].double(), GRID[:1].double() * 0.7)
    compare(lambda w: hf.embedding(INDICES, w), lambda w: w[INDICES], TABLE.double())
    compare(lambda q: hf.dequantize(q, 0.5, 1, dtype=torch.float64), lambda q: (q - 1) * 0.5, X.double())


def test_second_derivatives_of_codes_by_autograd() -> None:
    """They must not be silently zero."""
    codes = X.double().requires_grad_()
    scale = torch.linspace(0.5, 1, 4, dtype=torch.float64)

    def values(q: torch.Tensor) -> torch.Tensor:
        return hf.dequantize(q, scale, dtype=torch.float64, granularity=hf.PerChannel(0))

    assert torch.autograd.gradgradcheck(values, codes, nondet_tol=0.0)
    half = X.bfloat16().requires_grad_()
    (first,) = torch.autograd.grad(hf.dequantize(half, 0.5).pow(2).sum(), half, create_graph=True)
    (found,) = torch.autograd.grad(first.sum(), half)
    assert torch.equal(found, torch.full_like(half, 0.5))
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(
        hf.quantize(x, 0.5, dtype=torch.float32, q_min=-8, q_max=7).pow(2).sum(), x, create_graph=True
    )
    with pytest.raises(hf.Unsupported, match="quantize has no second derivative"):
        first.sum().backward()


GRANULARITIES = [
    hf.PerTensor(),
    hf.PerChannel(0),
    hf.PerChannel(-1),
    hf.PerToken(),
    hf.PerGroup(2),
    hf.PerGroup(2, 0),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("x_dim", [0, 1, None])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_codes_of_samples(
    granularity: hf.Granularity, x_dim: int | None, packed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    x = numbers("samples", (3, 4, 6), torch.float32, -3, 1)
    x = x[0] if x_dim is None else x.movedim(0, x_dim)
    scales = granularity.view((4, 6)).scale_shape
    scale = torch.arange(1, 1 + 3 * math.prod(scales)).reshape(3, *scales) / 64
    zero_point = (scale * 64).int() % 5 - 2

    def codes(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        return hf.quantize(x, scale, zero_point, dtype=torch.int4, granularity=granularity, packed=packed)

    def values(q: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        return hf.dequantize(
            q, scale, zero_point, granularity=granularity, packed=packed, code_dtype=torch.int4,
            length=6 if packed else None,
        )  # fmt: skip

    for scale_dim, zero_dim in ((0, 0), (0, None), (None, 0), (None, None)):
        if x_dim is scale_dim is zero_dim is None:
            continue
        shared = (scale if scale_dim == 0 else scale[1], zero_point if zero_dim == 0 else zero_point[2])
        dims = (x_dim, scale_dim, zero_dim)
        q = vmap(codes, in_dims=dims)(x, *shared)
        y = vmap(values, in_dims=(0, scale_dim, zero_dim))(q, *shared)
        for q_dim in (1, -1):  # for any batch axis, the last axis of a sample is packed
            moved = q.movedim(0, q_dim).contiguous()
            assert torch.equal(vmap(values, in_dims=(q_dim, scale_dim, zero_dim))(moved, *shared), y)
        for i in range(3):
            own = [t if d is None else t.select(d, i) for t, d in zip((x, *shared), dims, strict=True)]
            assert torch.equal(q[i], codes(*own))
            assert torch.equal(y[i], values(q[i], *own[1:]))
    assert "batching rule" not in capfd.readouterr().err


def test_torchs_own_registration_is_refused_by_transforms() -> None:
    """The reason for our own registration. If this test fails, ours is no longer needed."""
    LIBRARY.define("refused_by_transforms(Tensor x) -> Tensor")
    LIBRARY.impl("refused_by_transforms", torch.clone, "CPU")
    torch.library.register_autograd("holdfast::refused_by_transforms", lambda ctx, dy: dy, lib=LIBRARY)
    with pytest.raises(RuntimeError, match="must override the setup_context"):
        grad(lambda x: torch.ops.holdfast.refused_by_transforms(x).sum())(X)
    define("taken_by_transforms", "(Tensor x) -> Tensor", torch.clone, torch.empty_like)
    register_autograd("taken_by_transforms", lambda ctx, dy: (dy * 2,), by=["x"])
    assert torch.equal(
        grad(lambda x: torch.ops.holdfast.taken_by_transforms(x).sum())(X), torch.full_like(X, 2)
    )

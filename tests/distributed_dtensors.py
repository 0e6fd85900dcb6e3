"""Checks of DTensors: a call on shards has the bits of the call on whole tensors, without communication.

``test_distributed`` runs them in four processes, on a mesh of four ranks and on one of two by two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.nn.scale_in_use import scale_in_use
from public_calls import CALLS

RANKS = 4
CHECKS: dict[str, Callable[[], None]] = {}
SUM = "sum"
Place = int | str | None


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def indices(*shape: int) -> torch.Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Case:
    """A call on shards: the place of each tensor, of each result, and of each gradient.

    A place is a dimension that is split, None for a copy on every rank, SUM for a term on every rank.
    """

    function: Callable[..., Any]
    tensors: dict[str, torch.Tensor]
    places: dict[str, int]
    outputs: tuple[Place, ...]
    gradients: dict[str, Place] = field(default_factory=dict)


def of(function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    def call(**tensors: torch.Tensor) -> Any:
        return function(**tensors, **given)

    return call


X = drawn(6, 8)  # split over four ranks, the last one has no row
ROWS, COLUMNS = drawn(6, seed=1).abs() + 0.1, drawn(8, seed=2).abs() + 0.1
GROUPS = drawn(6, 4, seed=3).abs() + 0.1
ZEROS = torch.arange(6, dtype=torch.int32) - 2
CODES = (torch.arange(48).reshape(6, 8) % 15 - 7).to(torch.int8)
TABLE = drawn(11, 8, seed=4)
IMAGES, GRID = drawn(6, 8, 5, 4, seed=5), drawn(6, 5, 8, 2, seed=6) / 2
INT4: Any = torch.int4
PER_ROW, PER_COLUMN, PER_GROUP = hf.PerChannel(0), hf.PerChannel(-1), hf.PerGroup(2)
LEARNED = {"dtype": INT4, "grad_factor": "lsq"}

CASES = {
    "quantize rows": Case(
        of(hf.quantize, dtype=torch.int8, granularity=PER_ROW),
        {"x": X, "scale": ROWS, "zero_point": ZEROS},
        {"x": 0},
        (0,),
    ),
    "quantize rows with their scales": Case(
        of(hf.quantize, dtype=torch.int8, granularity=PER_ROW),
        {"x": X, "scale": ROWS, "zero_point": ZEROS},
        {"x": 0, "scale": 0, "zero_point": 0},
        (0,),
    ),
    "quantize columns with scales of rows": Case(
        of(hf.quantize, dtype=torch.int8, granularity=PER_ROW), {"x": X, "scale": ROWS}, {"x": 1}, (1,)
    ),
    "quantize columns with their scales": Case(
        of(hf.quantize, dtype=torch.int8, granularity=PER_COLUMN),
        {"x": X, "scale": COLUMNS},
        {"x": 1, "scale": 0},
        (1,),
    ),
    "quantize with one scale": Case(of(hf.quantize, scale=0.1, dtype=torch.int8), {"x": X}, {"x": 1}, (1,)),
    "quantize tokens, scales with keepdim": Case(
        of(hf.quantize, dtype=torch.int8, granularity=hf.PerToken()),
        {"x": X.reshape(3, 2, 8), "scale": ROWS.reshape(3, 2, 1)},
        {"x": 1},
        (1,),
    ),
    "quantize groups": Case(
        of(hf.quantize, dtype=torch.int8, granularity=PER_GROUP), {"x": X, "scale": GROUPS}, {"x": 1}, (1,)
    ),
    "quantize packed rows": Case(
        of(hf.quantize, dtype=INT4, granularity=PER_GROUP, packed=True),
        {"x": X, "scale": GROUPS},
        {"x": 0, "scale": 0},
        (0,),
    ),
    "quantize to floats": Case(
        of(hf.quantize, dtype=torch.float32, q_min=-8, q_max=7, granularity=PER_ROW),
        {"x": X, "scale": ROWS},
        {"x": 0},
        (0,),
        {"x": 0},
    ),
    "dequantize rows": Case(
        of(hf.dequantize, granularity=PER_ROW),
        {"q": CODES, "scale": ROWS, "zero_point": ZEROS},
        {"q": 0, "scale": 0},
        (0,),
    ),
    "dequantize columns": Case(of(hf.dequantize, scale=0.1), {"q": CODES}, {"q": 1}, (1,)),
    "dequantize packed rows": Case(
        of(hf.dequantize, scale=0.1, packed=True, code_dtype=INT4, length=15),
        {"q": CODES.view(torch.uint8)},
        {"q": 0},
        (0,),
    ),
    "dequantize from floats": Case(
        of(hf.dequantize, granularity=PER_COLUMN),
        {"q": CODES.float(), "scale": COLUMNS},
        {"q": 1},
        (1,),
        {"q": 1},
    ),
    "fake_quantize rows": Case(
        of(hf.fake_quantize, scale=0.1, dtype=INT4, ste="tanh"), {"x": X}, {"x": 0}, (0,), {"x": 0}
    ),
    "fake_quantize of a 16-bit tensor": Case(
        of(hf.fake_quantize, granularity=PER_COLUMN, dtype=INT4),
        {"x": X.bfloat16(), "scale": COLUMNS},
        {"x": 1},
        (1,),
        {"x": 1},
    ),
    "fake_quantize with learned scales of rows": Case(
        of(hf.fake_quantize, granularity=PER_ROW, **LEARNED),
        {"x": X, "scale": ROWS, "zero_point": ZEROS.float()},
        {"x": 0, "scale": 0, "zero_point": 0},
        (0,),
        {"x": 0, "scale": 0, "zero_point": 0},
    ),
    "fake_quantize with learned scales of groups": Case(
        of(hf.fake_quantize, granularity=PER_GROUP, **LEARNED),
        {"x": X, "scale": GROUPS},
        {"x": 1, "scale": 1},
        (1,),
        {"x": 1, "scale": 1},
    ),
    "fake_quantize of rows with one learned scale": Case(
        of(hf.fake_quantize, **LEARNED),
        {"x": X, "scale": torch.tensor(0.2)},
        {"x": 0},
        (0,),
        {"x": 0, "scale": SUM},
    ),
    "fake_quantize of columns with learned scales of rows": Case(
        of(hf.fake_quantize, granularity=PER_ROW, **LEARNED),
        {"x": X, "scale": ROWS, "zero_point": ZEROS.float()},
        {"x": 1},
        (1,),
        {"x": 1, "scale": SUM, "zero_point": SUM},
    ),
    "dynamic_quantize rows": Case(of(hf.dynamic_quantize, dtype=torch.int8), {"x": X}, {"x": 0}, (0, 0)),
    "dynamic_quantize columns, affine": Case(
        of(hf.dynamic_quantize, dtype=torch.uint8, symmetric=False, granularity=PER_COLUMN),
        {"x": X},
        {"x": 1},
        (1, 0, 0),
    ),
    "dynamic_fake_quantize rows": Case(
        of(hf.dynamic_fake_quantize, dtype=INT4, ste="tanh"), {"x": X}, {"x": 0}, (0,), {"x": 0}
    ),
    "dynamic_fake_quantize groups, affine": Case(
        of(hf.dynamic_fake_quantize, dtype=INT4, symmetric=False, granularity=PER_GROUP),
        {"x": X},
        {"x": 1},
        (1,),
        {"x": 1},
    ),
    "choose_scale": Case(of(hf.choose_scale, granularity=PER_ROW), {"x": X}, {"x": 0}, (0,)),
    "choose_scale affine": Case(
        of(hf.choose_scale, granularity=PER_ROW, symmetric=False), {"x": X}, {"x": 0}, (0, 0)
    ),
    "observe_range": Case(of(hf.observe_range, granularity=PER_COLUMN), {"x": X}, {"x": 1}, (0, 0)),
    "scale_of_range": Case(
        of(hf.scale_of_range), {"low": -ROWS, "high": ROWS * 3}, {"low": 0, "high": 0}, (0,)
    ),
    "scale_of_range affine": Case(
        of(hf.scale_of_range, symmetric=False),
        {"low": -ROWS, "high": ROWS * 3},
        {"low": 0, "high": 0},
        (0, 0),
    ),
    "lsq_init": Case(of(hf.lsq_init, dtype=INT4, granularity=PER_ROW), {"x": X}, {"x": 0}, (0,)),
    "scale_in_use": Case(
        of(scale_in_use, dtype=torch.bfloat16),
        {"scale": ROWS, "floor": ROWS[[5, 4, 3, 2, 1, 0]]},
        {"scale": 0, "floor": 0},
        (0,),
        {"scale": 0},
    ),
    "embedding of split indices": Case(
        of(hf.embedding, padding_idx=2),
        {"input": indices(6, 3), "weight": TABLE},
        {"input": 0},
        (0,),
        {"weight": SUM},
    ),
    "embedding of split columns": Case(
        of(hf.embedding, padding_idx=2),
        {"input": indices(6, 3), "weight": TABLE},
        {"weight": 1},
        (2,),
        {"weight": 1},
    ),
    "embedding of split rows": Case(
        of(hf.embedding, padding_idx=2),
        {"input": indices(6, 3), "weight": TABLE},
        {"weight": 0},
        (SUM,),
        {"weight": 0},
    ),
    "embedding of split rows, by frequency": Case(
        of(hf.embedding, padding_idx=9, scale_grad_by_freq=True),
        {"input": indices(6, 3), "weight": TABLE.half()},
        {"weight": 0},
        (SUM,),
        {"weight": 0},
    ),
    "embedding_bag of split columns": Case(
        of(hf.embedding_bag, mode="mean", padding_idx=2),
        {"input": indices(18), "weight": TABLE, "offsets": torch.tensor([0, 4, 9])},
        {"weight": 1},
        (1,),
        {"weight": 1},
    ),
    "embedding_bag, the greatest of split columns": Case(
        of(hf.embedding_bag, mode="max"),
        {"input": indices(6, 3), "weight": TABLE},
        {"weight": 1},
        (1,),
        {"weight": 1},
    ),
    "embedding_bag of split bags": Case(
        of(hf.embedding_bag, mode="sum"),
        {"input": indices(6, 3), "weight": TABLE, "per_sample_weights": drawn(6, 3)},
        {"input": 0, "per_sample_weights": 0},
        (0,),
        {"weight": SUM, "per_sample_weights": 0},
    ),
    "grid_sample of split images": Case(
        of(hf.grid_sample),
        {"input": IMAGES, "grid": GRID},
        {"input": 0, "grid": 0},
        (0,),
        {"input": 0, "grid": 0},
    ),
    "grid_sample of split channels": Case(
        of(hf.grid_sample, padding_mode="border"),
        {"input": IMAGES, "grid": GRID},
        {"input": 1},
        (1,),
        {"input": 1, "grid": SUM},
    ),
    "grid_sample of a split grid": Case(
        of(hf.grid_sample, mode="nearest"),
        {"input": IMAGES, "grid": GRID},
        {"grid": 2},
        (3,),
        {"input": SUM, "grid": 2},
    ),
    "scatter_add, an untouched dimension split": Case(
        of(hf.scatter_add, dim=0),
        {"input": TABLE, "index": indices(6, 8), "src": X},
        {"input": 1, "index": 1, "src": 1},
        (1,),
        {"input": 1, "src": 1},
    ),
    "scatter_reduce, an untouched dimension split": Case(
        of(hf.scatter_reduce, dim=1, reduce="mean", include_self=False),
        {"input": drawn(6, 11), "index": indices(6, 8), "src": X},
        {"input": 0, "index": 0, "src": 0},
        (0,),
        {"input": 0, "src": 0},
    ),
    "index_add, columns split": Case(
        of(hf.index_add, dim=0, alpha=0.5),
        {"input": TABLE, "index": indices(6), "source": X},
        {"input": 1, "source": 1},
        (1,),
        {"input": 1, "source": 1},
    ),
    "gather, an untouched dimension split": Case(
        of(hf.gather, dim=0),
        {"input": TABLE, "index": indices(6, 8)},
        {"input": 1, "index": 1},
        (1,),
        {"input": 1},
    ),
    "gather of split indices": Case(
        of(hf.gather, dim=0), {"input": TABLE, "index": indices(6, 8)}, {"index": 0}, (0,), {"input": SUM}
    ),
    "index_select of split columns": Case(
        of(hf.index_select, dim=0), {"input": TABLE, "index": indices(6)}, {"input": 1}, (1,), {"input": 1}
    ),
    "index_select of split indices": Case(
        of(hf.index_select, dim=0), {"input": TABLE, "index": indices(6)}, {"index": 0}, (0,), {"input": SUM}
    ),
    "segment_reduce of split columns": Case(
        of(hf.segment_reduce, num_segments=11, reduce="mean"),
        {"data": X, "segments": indices(6)},
        {"data": 1},
        (1,),
        {"data": 1},
    ),
    "segment_reduce of split rows": Case(
        of(hf.segment_reduce, num_segments=11),
        {"data": X, "segments": indices(6)},
        {"data": 0, "segments": 0},
        (SUM,),
        {"data": 0},
    ),
    "affine_grid": Case(
        of(hf.affine_grid, size=(6, 3, 4, 5)), {"theta": drawn(6, 2, 3)}, {"theta": 0}, (0,), {"theta": 0}
    ),
    "interpolate of split images": Case(
        of(hf.interpolate, size=(7, 9), mode="bicubic"), {"input": IMAGES}, {"input": 0}, (0,), {"input": 0}
    ),
    "interpolate of split channels": Case(
        of(hf.interpolate, scale_factor=1.5, mode="bilinear", antialias=True),
        {"input": IMAGES},
        {"input": 1},
        (1,),
        {"input": 1},
    ),
}


def flat(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


def same_bits(where: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, (where, a.dtype, b.dtype, a.shape, b.shape)
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    if a.numel():
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (where, a, b)


@cache
def meshes() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    return [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]


def placement(place: Place) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Replicate() if place is None else Partial() if isinstance(place, str) else Shard(place)


def check_case(name: str, mesh: Any) -> None:
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    case, ndim = CASES[name], mesh.ndim

    def spread(tensor: torch.Tensor, place: Place) -> Any:
        return distribute_tensor(tensor, mesh, [placement(place)] * ndim)

    plain = {key: t.clone().requires_grad_(key in case.gradients) for key, t in case.tensors.items()}
    expected = flat(case.function(**plain))
    given = {
        key: spread(tensor, case.places.get(key)).requires_grad_(key in case.gradients)
        for key, tensor in case.tensors.items()
    }
    with CommDebugMode() as forward:
        found = flat(case.function(**given))
    assert forward.get_total_counts() == 0, (name, forward.get_comm_counts())
    for result, whole, place in zip(found, expected, case.outputs, strict=True):
        assert list(result.placements) == [placement(place)] * ndim, (name, result.placements)
        same_bits(name, result.full_tensor(), whole)
        same_bits(name, hf.distributed.reduce_partial(result).full_tensor(), whole)
    if not case.gradients:
        return
    cotangent = drawn(*expected[0].shape, seed=9).to(expected[0].dtype)
    expected[0].backward(cotangent)
    place = None if case.outputs[0] == SUM else case.outputs[0]
    summed = hf.distributed.reduce_partial(found[0])
    sent = spread(cotangent, place)
    with CommDebugMode() as backward:
        summed.backward(sent)
    assert backward.get_total_counts() == 0, (name, backward.get_comm_counts())
    for key, place in case.gradients.items():
        gradient: Any = given[key].grad
        assert list(gradient.placements) == [placement(place)] * ndim, (name, key, gradient.placements)
        total = hf.distributed.reduce_partial(gradient).full_tensor()
        if place == SUM:  # another order of the sum than that of one process
            torch.testing.assert_close(total, plain[key].grad, rtol=1e-5, atol=1e-5)
        else:
            same_bits((name, key), total, plain[key].grad)


for _name in CASES:
    for _mesh in (0, 1):
        CHECKS[f"{_name}, mesh {_mesh + 1}-D"] = lambda name=_name, mesh=_mesh: check_case(
            name, meshes()[mesh]
        )


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


@check
def every_public_call_with_any_split_has_the_bits_of_one_process() -> None:
    """Where there is no rule for the split, tensors are gathered."""
    from torch.distributed.tensor import distribute_tensor

    mesh = meshes()[0]

    def spread(value: Any, place: Place = None) -> Any:
        if isinstance(value, tuple):  # may hold tensors
            return tuple(map(spread, value))
        return distribute_tensor(value, mesh, [placement(place)]) if torch.is_tensor(value) else value

    tried = 0
    for name, call in CALLS.items():
        if name in ("pack", "unpack"):  # made of torch's own operators
            continue
        expected = flat(call())
        for argument, tensor in call.tensors.items():
            for dim in range(tensor.dim()):
                given = {
                    key: spread(value, dim if key == argument else None)
                    for key, value in call.arguments.items()
                }
                for result, whole in zip(flat(call(**given)), expected, strict=True):
                    same_bits((name, argument, dim), result.full_tensor(), whole)
                tried += 1
    assert tried > 40


@check
def rows_of_packed_codes() -> None:
    from torch.distributed.tensor import distribute_tensor

    packed = hf.pack(CODES, INT4)
    for place in (0, None):
        codes = distribute_tensor(CODES, meshes()[0], [placement(place)])
        found: Any = hf.pack(codes, INT4)
        same_bits(place, found.full_tensor(), packed)
        same_bits(place, hf.unpack(found, INT4, length=8).full_tensor(), CODES)  # type: ignore[attr-defined]


@check
def a_result_without_elements_has_its_shape() -> None:
    from torch.distributed.tensor import distribute_tensor

    mesh = meshes()[0]

    def split(tensor: torch.Tensor) -> Any:
        return distribute_tensor(tensor, mesh, [placement(0)])

    table = distribute_tensor(torch.ones(11, 0), mesh, [placement(None)]).requires_grad_()
    looked_up = hf.embedding(split(indices(6)), table)
    assert looked_up.full_tensor().shape == (6, 0)  # type: ignore[attr-defined]
    looked_up.sum().backward()
    assert table.grad is not None and table.grad.full_tensor().shape == (11, 0)
    codes: Any = hf.quantize(split(torch.ones(6, 0)), split(ROWS), granularity=PER_ROW)
    assert codes.full_tensor().shape == (6, 0)


@check
def segments_may_be_a_plain_tensor_of_one_number() -> None:
    from torch.distributed.tensor import distribute_tensor

    data = distribute_tensor(torch.ones(1, 4), meshes()[0], [placement(1)]).requires_grad_()
    hf.segment_reduce(data, torch.tensor([1]), 2, reduce="mean").sum().backward()
    assert data.grad is not None
    same_bits("gradient", data.grad.full_tensor(), torch.ones(1, 4))


@check
def the_maximum_of_segments_is_refused() -> None:
    from torch.distributed.tensor import distribute_tensor

    data, segments = (distribute_tensor(t, meshes()[0], [placement(0)]) for t in (X, indices(6)))
    with pytest.raises(hf.Unsupported, match='is a DTensor, which reduce="max" does not take'):
        hf.segment_reduce(data, segments, 11, reduce="max")


@check
def terms_of_a_sum_are_added_in_rank_order_before_a_call() -> None:
    from torch.distributed.tensor import DTensor

    terms = [drawn(6, 8, seed=20 + rank) * 3.0**rank for rank in range(RANKS)]
    rank = torch.distributed.get_rank()
    x = DTensor.from_local(terms[rank], meshes()[0], [placement(SUM)], run_check=False)
    total = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    assert not torch.equal(total, (terms[0] + terms[1]) + (terms[2] + terms[3]))
    same_bits("sum", hf.fake_quantize(x, 1e-4).full_tensor(), hf.fake_quantize(total, 1e-4))
    same_bits("sum", hf.distributed.reduce_partial(x).full_tensor(), total)


@check
def the_gradient_of_a_term_is_the_gradient_of_the_sum() -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = meshes()[1]
    x = DTensor.from_local(drawn(3, 2), mesh, [placement(SUM), placement(None)], run_check=False)
    x.requires_grad_()
    hf.distributed.reduce_partial(x).backward(
        distribute_tensor(drawn(3, 2, seed=1), mesh, [placement(None)] * 2)
    )
    assert x.grad is not None
    same_bits("gradient", x.grad.full_tensor(), drawn(3, 2, seed=1))


@check
def rows_split_on_one_dimension_of_a_mesh_and_columns_on_the_other() -> None:
    from torch.distributed.tensor import distribute_tensor

    mesh = meshes()[1]
    weight = distribute_tensor(TABLE, mesh, [placement(0), placement(1)])
    looked_up = hf.embedding(distribute_tensor(indices(6, 3), mesh, [placement(None)] * 2), weight)
    assert list(looked_up.placements) == [placement(SUM), placement(2)]
    same_bits("embedding", looked_up.full_tensor(), hf.embedding(indices(6, 3), TABLE))
    x = distribute_tensor(X, mesh, [placement(1), placement(0)])
    scale = distribute_tensor(ROWS, mesh, [placement(None), placement(0)])
    made = hf.fake_quantize(x, scale, granularity=PER_ROW)
    assert made.placements == x.placements
    same_bits("fake_quantize", made.full_tensor(), hf.fake_quantize(X, ROWS, granularity=PER_ROW))


@check
def modules_in_a_tensor_parallel_model() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tokens = indices(6, 3)
    for style in (
        RowwiseParallel(input_layouts=Replicate(), use_local_output=True),
        ColwiseParallel(output_layouts=Replicate(), use_local_output=True),
    ):
        alone, split = (hf.nn.Embedding.from_pretrained(TABLE, freeze=False, padding_idx=2) for _ in "ab")
        parallelize_module(split, meshes()[0], style)
        expected, found = alone(tokens), split(tokens)
        same_bits(style, found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        assert alone.weight.grad is not None and split.weight.grad.placements == split.weight.placements
        same_bits(style, split.weight.grad.full_tensor(), alone.weight.grad)


@check
def a_rank_outside_the_mesh_has_no_shards() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    x = distribute_tensor(X, mesh, [placement(0)])
    y, scale = hf.dynamic_fake_quantize(x, dtype=INT4, return_scale=True)
    assert y.shape == X.shape and scale.shape == (6,)
    if torch.distributed.get_rank() < 2:
        same_bits("two ranks", y.full_tensor(), hf.dynamic_fake_quantize(X, dtype=INT4))
    else:
        assert not y.to_local().numel()


@check
def zeros_keep_their_signs_in_split_rows() -> None:
    from torch.distributed.tensor import distribute_tensor

    mesh = meshes()[0]
    table = torch.full((6, 2), -0.0)
    asked = torch.tensor([0, 5, 3, 7, -1])
    places = distribute_tensor(asked, mesh, [placement(None)])
    found = hf.embedding(places, distribute_tensor(table, mesh, [placement(0)]), bad_index="skip")
    same_bits("zeros", found.full_tensor(), hf.embedding(asked, table, bad_index="skip"))


def refused(kind: type[Exception], said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=said):
        call()


@check
def refusals_are_sentences() -> None:
    from torch.distributed.tensor import distribute_tensor

    one, two = meshes()

    def spread(tensor: torch.Tensor, place: Place = None, mesh: Any = one) -> Any:
        return distribute_tensor(tensor, mesh, [placement(place)] * mesh.ndim)

    x = spread(X, 0)
    refused(hf.InvalidArgs, r"scale is a plain tensor of shape \(6,\) and another .* is a DTensor; make it",
            lambda: hf.quantize(x, ROWS, granularity=PER_ROW))  # fmt: skip
    refused(hf.InvalidArgs, "scale is on the mesh .* redistribute them to one mesh",
            lambda: hf.quantize(x, spread(ROWS, None, two), granularity=PER_ROW))  # fmt: skip
    refused(hf.InvalidArgs, "tensor is a DTensor; pass it to hf.distributed.reduce_partial",
            lambda: hf.distributed.ordered_all_reduce(x))  # fmt: skip
    bad = spread(torch.tensor([1, 11]))
    refused(
        hf.InvalidIndex, "the index at position 1 .* is 11", lambda: hf.embedding(bad, spread(TABLE[:9], 0))
    )
    weight = spread(TABLE, 0).requires_grad_()
    looked_up = hf.distributed.reduce_partial(hf.embedding(spread(indices(3)), weight, sparse=True))
    refused(hf.Unsupported, "a table that is a DTensor cannot be sparse", looked_up.sum().backward)
    # Each rank has two of the six rows and two of these eight scales.
    refused(
        hf.InvalidArgs,
        r"scale has shape \(8,\)",
        lambda: hf.quantize(x, spread(COLUMNS), granularity=PER_ROW),
    )


@check
def compiled_graphs_have_the_same_bits() -> None:
    from torch.distributed.tensor import distribute_tensor

    mesh = meshes()[0]

    def step(x: Any, weight: Any, places: Any) -> Any:
        return hf.fake_quantize(x, 0.1) * 2, hf.embedding(places, weight)

    def given() -> list[Any]:
        return [
            distribute_tensor(X, mesh, [placement(0)]).requires_grad_(),
            distribute_tensor(TABLE, mesh, [placement(1)]).requires_grad_(),
            distribute_tensor(indices(6, 3), mesh, [placement(None)]),
        ]

    eager, compiled = given(), given()
    expected, found = step(*eager), torch.compile(step, backend="aot_eager")(*compiled)
    for results in (expected, found):
        sum(result.square().sum() for result in results).backward()
    for a, b in zip(expected, found, strict=True):
        assert a.placements == b.placements
        same_bits("compiled", a.full_tensor(), b.full_tensor())
    for a, b in zip(eager[:2], compiled[:2], strict=True):
        same_bits("compiled", a.grad.full_tensor(), b.grad.full_tensor())

"""A repeated call skips what its first call has settled. It must detect every change since then."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core import private, repeated
from holdfast.ops.fake_quantize.plan import FakeQuantizeBackwardPlan
from holdfast.ops.fake_quantize.torch_op import backward
from public_calls import CALLS, flat

SHAPE = (6, 4)


def known_calls() -> list[repeated.Calls]:
    """The calls of all operators. The list of all objects leaves out those that are frozen."""
    gc.unfreeze()
    found = [calls for calls in gc.get_objects() if type(calls) is repeated.Calls]
    gc.freeze()
    return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One element per call that was not repeated. The calls of earlier tests are forgotten."""
    found, run = list[int](), repeated.Calls.run
    for calls in known_calls():
        calls.forget()

    def counted(*given: Any) -> Any:
        found.append(1)
        return run(*given)

    monkeypatch.setattr(repeated.Calls, "run", counted)
    yield found


def values(seed: int = 0, **options: Any) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), **options)


def fresh(x: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
    """The result of a first call: its shape is another."""
    return hf.fake_quantize(x.reshape(1, *x.shape), *given, **options).reshape(x.shape)


#: Functions of plain torch operations, without a plan.
COMPOSED = {"scale_of_range", "scale_of_range affine"}


@pytest.mark.parametrize("name", sorted(CALLS.keys() - COMPOSED))
def test_every_public_function_repeats_its_calls(name: str, runs: list[int]) -> None:
    call = CALLS[name]
    first = flat(call())
    call()
    runs.clear()
    again = flat(call())
    assert not runs
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
        assert one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("name", sorted(name for name, call in CALLS.items() if call.by))
def test_every_gradient_is_repeated(name: str, runs: list[int]) -> None:
    call = CALLS[name]
    leaves = {argument: call.tensors[argument].detach().requires_grad_() for argument in call.by}

    def gradients() -> list[torch.Tensor]:
        out = flat(call(**leaves))[0]
        found = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out), allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    first = gradients()
    gradients()
    runs.clear()
    for one, other in zip(first, gradients(), strict=True):
        assert torch.equal(one, other)
    assert not runs


#: Maximum number of Python functions of holdfast in a repeated forward and backward.
MOST_FUNCTIONS = 52
#: The same where both learn a scale and a zero point, or where a function calls several operators.
MORE_FUNCTIONS = {
    "affine_grid": 80,
    "embedding_bag": 56,
    "fake_quantize": 72,
    "index_put": 88,
    "segment_reduce": 54,
}


@pytest.mark.parametrize("name", sorted(name for name, call in CALLS.items() if call.by))
def test_little_python_runs_in_a_repeated_step(name: str) -> None:
    """Time on the host is not tested, but the Python functions that take it are counted."""
    call, found = CALLS[name], list[str]()
    leaves = {argument: call.tensors[argument].detach().requires_grad_() for argument in call.by}
    own = (str(Path(hf.__file__).parent), "<string>")  # repetitions are written as a string

    def count(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(own):
            found.append(code.co_qualname)

    for _ in range(4):
        found.clear()
        out = flat(call(**leaves))[0]
        dout = torch.ones_like(out)
        sys.setprofile(count)
        try:
            out = flat(call(**leaves))[0]
            torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True)
        finally:
            sys.setprofile(None)
    assert 0 < len(found) <= MORE_FUNCTIONS.get(name, MOST_FUNCTIONS), found


def test_recording_is_part_of_the_call(runs: list[int]) -> None:
    """The same tensors are recorded in one call and not in the next."""
    x, plain = values(requires_grad=True), values()
    for turn in range(4):
        if turn == 2:
            runs.clear()
        assert hf.fake_quantize(x, 0.25).requires_grad
        with torch.no_grad():
            assert not hf.fake_quantize(x, 0.25).requires_grad
        with torch.inference_mode():
            assert hf.fake_quantize(x, 0.25).is_inference()
        assert not hf.fake_quantize(plain, 0.25).requires_grad
        assert hf.fake_quantize(torch.nn.Parameter(plain), 0.25).requires_grad
    assert not runs


@pytest.mark.parametrize("name", sorted(name for name, call in CALLS.items() if call.by))
def test_a_call_without_gradients_is_not_repeated_with_gradients(name: str, runs: list[int]) -> None:
    call = CALLS[name]
    leaves = {argument: call.tensors[argument].detach().requires_grad_() for argument in call.by}
    for _ in range(3):
        for _ in range(4):
            with torch.no_grad():
                assert not flat(call(**leaves))[0].requires_grad
        out = flat(call(**leaves))[0]
        assert out.requires_grad
        found = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out), allow_unused=True)
        assert any(gradient is not None for gradient in found)


def test_each_argument_may_require_a_gradient_or_not(runs: list[int]) -> None:
    x, scale, zero_point = values(), torch.tensor(0.25), torch.tensor(1.0)
    for _ in range(3):
        runs.clear()
        for each in ((False, False, False), (True, False, False), (False, True, False), (True, False, True)):
            given = [tensor.detach() for tensor in (x, scale, zero_point)]
            for tensor, needed in zip(given, each, strict=True):
                tensor.requires_grad_(needed)
            out = hf.fake_quantize(*given, grad_factor=0.5)
            assert out.requires_grad == any(each)
            if any(each):
                out.sum().backward()
            assert tuple(tensor.grad is not None for tensor in given) == each
    assert not runs


def test_a_gradient_that_is_not_there_is_refused_after_right_calls() -> None:
    x, scale = values(requires_grad=True), torch.tensor(0.5)
    for _ in range(3):
        hf.quantize(x, scale, dtype=torch.float32, q_min=-8, q_max=7)
    for _ in range(3):
        with pytest.raises(hf.InvalidArgs, match="scale requires a gradient"):
            hf.quantize(x, scale.clone().requires_grad_(), dtype=torch.float32, q_min=-8, q_max=7)


def test_hooks_see_repeated_calls() -> None:
    x, seen = values(requires_grad=True), list[str]()
    x.register_hook(lambda gradient: seen.append("gradient"))
    for _ in range(4):
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: (seen.append("pack"), saved)[1], lambda saved: (seen.append("unpack"), saved)[1]
        ):
            out = hf.fake_quantize(x, 0.25)
        out.register_hook(lambda gradient: seen.append("output"))
        out.sum().backward()
        assert seen == ["pack", "output", "unpack", "gradient"]


class Named(torch.Tensor):
    """A subclass whose functions are recorded."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs)


def test_a_subclass_keeps_its_functions() -> None:
    x = values()
    for _ in range(3):
        hf.fake_quantize(x, 0.25)
    for _ in range(3):
        Named.seen.clear()
        found = hf.fake_quantize(x.as_subclass(Named), 0.25)
        assert type(found) is Named and torch.ops.holdfast.fake_quantize.default in Named.seen


def test_modes_and_traces_record_repeated_calls() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(operator)
            return operator(*args, **(kwargs or {}))

    x, seen = values(), list[Any]()
    for _ in range(3):
        hf.fake_quantize(x, 0.25)
    with Seen():
        hf.fake_quantize(x, 0.25)
    assert torch.ops.holdfast.fake_quantize.default in seen
    traced = make_fx(lambda x: hf.fake_quantize(x, 0.25))(x)
    assert torch.ops.holdfast.fake_quantize.default in {node.target for node in traced.graph.nodes}


def test_the_state_of_torch_changes_no_result() -> None:
    x = values(requires_grad=True)

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        out = hf.fake_quantize(x, 0.25)
        return out, torch.autograd.grad(out, x, torch.ones(SHAPE, dtype=torch.float32))[0]

    for _ in range(3):
        expected = results()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            found = [results()]
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        try:
            found.append(results())
        finally:
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            found.append(results())
        for pair in found:
            for one, other in zip(pair, expected, strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)


def test_one_tensor_in_two_places_is_not_two_tensors() -> None:
    """A launch that was prepared with one tensor in two places must not serve two tensors."""
    x, dy, indices = values(), values(1), torch.zeros(6, dtype=torch.int64)
    rest = (None, 0.01, None, 0, "per_tensor", "int8", None, None, "in_range")
    for _ in range(4):
        backward(x, x, *rest)
        hf.embedding_bag(indices, x, indices, mode="sum")
    for _ in range(4):
        assert torch.equal(backward(dy, x, *rest), torch.where(x.abs() < 1.275, dy, 0.0))
        found = hf.embedding_bag(indices, x, torch.arange(6), mode="sum")
        assert torch.equal(found, x[:1].expand(6, 4))
    for _ in range(4):
        assert torch.equal(backward(x, x, *rest), torch.where(x.abs() < 1.275, x, 0.0))


def test_one_tensor_in_two_places_is_not_prepared() -> None:
    x = values()
    args = FakeQuantizeBackwardPlan.Args(dy=x, x=x, scale=0.01, zero_point=0, dx=torch.empty(SHAPE))
    plan = FakeQuantizeBackwardPlan.select(
        hf.Stream.current(), FakeQuantizeBackwardPlan.Descriptor(shape=SHAPE, dtype=torch.int8)
    )
    plan.run(hf.Stream.current(), None, args)
    launch = plan.prepared(args)
    assert launch is not None
    work = repeated.Work(plan, args, args.dx)
    assert repeated._written_out((x, x), work, launch, lambda *tensors: True, None, False) is None
    assert repeated._written_out((x,), work, launch, lambda *tensors: True, None, False) is not None


def test_views_of_one_memory_are_read_where_they_are() -> None:
    base = torch.randn(100, generator=torch.Generator().manual_seed(2))
    rest = (None, 0.01, None, 0, "per_tensor", "int8", None, None, "in_range")
    for first, second in ((0, 0), (0, 24), (4, 8), (8, 4), (60, 12), (1, 4), (4, 1), (3, 2)) * 3:
        dy, x = base[first : first + 24].view(SHAPE), base[second : second + 24].view(SHAPE)
        assert torch.equal(backward(dy, x, *rest), torch.where(x.abs() < 1.275, dy, 0.0))


@pytest.mark.parametrize("way", ["an expanded index", "a middle axis", "the last axis"])
def test_calls_that_view_their_tensors_are_repeated(way: str, runs: list[int]) -> None:
    """Each call has other tensors, so a view of an earlier one would show."""

    def call(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        index, x = torch.randint(0, 5, (7,), generator=generator), torch.randn(3, 5, 4, generator=generator)
        if way == "a middle axis":
            src = torch.randn(3, 7, 4, generator=generator)
            return hf.index_add(x, 1, index, src), torch.index_add(x, 1, index, src)
        if way == "the last axis":
            x, src = x.transpose(1, 2).contiguous(), torch.randn(3, 4, 7, generator=generator)
            return hf.index_add(x, 2, index, src), torch.index_add(x, 2, index, src)
        x, index, src = x[0], index[:, None].expand(7, 4), torch.randn(7, 4, generator=generator)
        return hf.scatter_add(x, 0, index, src), torch.scatter_add(x, 0, index, src)

    for seed in range(4):
        if seed == 2:
            runs.clear()
        torch.testing.assert_close(*call(seed))
    assert not runs


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_kinds_of_tensors_are_refused_after_right_calls() -> None:
    table, indices = torch.randn(9, 4), torch.arange(6)
    for _ in range(3):
        hf.embedding(indices, table)
    nested = torch.nested.as_nested_tensor([indices, indices])
    for other in (nested, indices.to_sparse(), [1, 2], None):
        with pytest.raises(hf.HoldfastError):
            hf.embedding(other, table)
        with pytest.raises(hf.HoldfastError):
            hf.embedding(indices, other)


def test_threads_have_their_own_results() -> None:
    """Gradients of a table use a workspace, which each thread has for itself."""

    def gradient(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        indices = torch.randint(0, 50, (400,), generator=generator)
        weight = torch.randn(50, 8, generator=generator).requires_grad_()
        expected = torch.zeros(50, 8).index_add_(0, indices, torch.full((400, 8), float(seed)))
        for _ in range(20):
            out = hf.embedding(indices, weight)
            (found,) = torch.autograd.grad(out, weight, torch.full_like(out, seed))
            if not (torch.equal(out, weight[indices]) and torch.equal(found, expected)):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(gradient, range(1, 9)))


def test_a_change_of_the_tensor_is_honoured() -> None:
    x = values()
    for _ in range(3):
        hf.fake_quantize(x, 0.25)
    wide = torch.zeros(6, 9)
    wide[:, 1:5] = x
    misaligned = torch.zeros(25)[1:].view(SHAPE).copy_(x)
    for other in (
        -x,
        x.double(),
        x.half(),
        x.t().contiguous().t(),
        wide[:, 1:5],
        misaligned,
        x[:1].expand(6, 4),
    ):
        for _ in range(3):
            found = hf.fake_quantize(other, 0.25)
            assert found.dtype == other.dtype and torch.equal(found, fresh(other, 0.25))


def test_a_change_of_a_value_is_honoured() -> None:
    x = values() * 100
    changes: list[dict[str, Any]] = [
        {}, {"dtype": torch.int4}, {"q_min": -3, "q_max": 5}, {"zero_point": 7}, {"scale": 2.0},
        {"zero_point": torch.tensor(3, dtype=torch.int32)}, {"scale": torch.tensor(0.5)},
    ]  # fmt: skip
    for _ in range(3):
        for change in changes:
            given: dict[str, Any] = {"scale": 1.0} | change
            assert torch.equal(hf.fake_quantize(x, **given), fresh(x, **given))


def test_a_wrong_value_is_refused_after_right_ones() -> None:
    x = values()
    for scale in (1.0, 1.0, 1.0):
        hf.fake_quantize(x, scale, 1)
    for scale in (-1.0, 0.0, math.nan, True):
        for _ in range(3):
            with pytest.raises(hf.HoldfastError):
                hf.fake_quantize(x, scale, 1)
    with pytest.raises(hf.HoldfastError):
        hf.fake_quantize(x, 1.0, True)


INDICES, TABLE = torch.tensor([[0, 2], [2, 1]]), torch.linspace(-1, 1, 9).reshape(3, 3)
IMAGE, GRID = torch.linspace(-1, 1, 16).reshape(1, 1, 4, 4), torch.zeros(1, 2, 2, 2)


@pytest.mark.parametrize(
    ("function", "tensors", "given"),
    [
        (hf.embedding, (INDICES, TABLE), {"sparse": 0}),
        (hf.embedding, (INDICES, TABLE), {"scale_grad_by_freq": 0.0}),
        (hf.embedding, (INDICES, TABLE), {"norm_type": torch.tensor(2.0)}),
        (hf.embedding, (INDICES, TABLE), {"norm_type": math.nan}),
        (hf.embedding, (INDICES, TABLE), {"max_norm": 1.0}),
        (hf.embedding, (INDICES, TABLE), {"padding_idx": True}),
        (hf.embedding, (INDICES, TABLE), {"padding_idx": 3}),
        (hf.embedding, (INDICES, TABLE), {"bad_index": np.array(["raise"])}),
        (hf.embedding, (INDICES.float(), TABLE), {}),
        (hf.embedding_bag, (INDICES, TABLE), {"include_last_offset": 1}),
        (hf.embedding_bag, (INDICES, TABLE), {"include_last_offset": 0}),
        (hf.embedding_bag, (INDICES, TABLE), {"mode": np.array(["mean"])}),
        (hf.embedding_bag, (INDICES[0], TABLE), {}),
        (hf.grid_sample, (IMAGE, GRID), {"align_corners": 0}),
        (hf.grid_sample, (IMAGE, GRID), {"mode": np.array(["bilinear"])}),
        (hf.grid_sample, (IMAGE, GRID.expand(2, 2, 2, 2)), {}),
        (hf.grid_sample, (GRID, IMAGE), {}),
    ],
)
def test_a_refused_call_is_refused_after_right_calls(function: Any, tensors: Any, given: Any) -> None:
    """Repeated calls are not checked, so they must be the calls that were checked."""
    right = (IMAGE, GRID) if function is hf.grid_sample else (INDICES, TABLE)
    for _ in range(3):
        function(*right)
    for _ in range(3):
        with pytest.raises(hf.HoldfastError):
            function(*tensors, **given)
        function(*right)


X, CODES = torch.linspace(-1, 1, 12), torch.arange(12, dtype=torch.int8)


@pytest.mark.parametrize(
    ("function", "tensor", "right", "wrong"),
    [
        (hf.quantize, X, {}, {"scale": None}),
        (hf.quantize, X, {}, {"scale": np.array(1.0)}),
        (hf.quantize, X, {}, {"zero_point": False}),
        (hf.quantize, X, {}, {"zero_point": 0.0}),
        (hf.quantize, X, {}, {"dtype": "int8"}),
        (hf.quantize, X, {}, {"granularity": None}),
        (hf.quantize, X, {}, {"granularity": "per_tensor"}),
        (hf.quantize, X, {}, {"packed": 0}),
        (hf.quantize, X, {"q_min": 0, "q_max": 1}, {"q_min": False}),
        (hf.dequantize, CODES, {}, {"scale": None}),
        (hf.dequantize, CODES, {}, {"dtype": "float32"}),
        (hf.dequantize, CODES, {}, {"code_dtype": "int8"}),
        (hf.dequantize, CODES, {}, {"packed": 0}),
        (hf.dequantize, CODES, {}, {"length": 12}),
        (hf.fake_quantize, X, {}, {"scale": None}),
        (hf.fake_quantize, X, {}, {"dtype": "int8"}),
        (hf.fake_quantize, X, {"q_min": 0, "q_max": 1}, {"dtype": "int4"}),
        (hf.fake_quantize, X, {"grad_factor": "lsq"}, {"grad_factor": None}),
        (hf.fake_quantize, X, {}, {"grad_factor": "other"}),
        (hf.fake_quantize, X, {}, {"ste": None}),
        (hf.fake_quantize, X, {}, {"ste": np.array(["in_range"])}),
    ],
)
def test_a_wrong_argument_is_refused_after_right_calls(
    function: Any, tensor: torch.Tensor, right: Any, wrong: Any
) -> None:
    right = {"scale": 1.0} | right
    for _ in range(3):
        for _ in range(3):
            wanted = function(tensor, **right)
        with pytest.raises(hf.HoldfastError):
            function(tensor, **(right | wrong))
        assert torch.equal(function(tensor, **right), wanted)


def test_a_padding_from_the_back_is_not_none() -> None:
    """Operators take -1 for None."""
    weight = TABLE.clone().requires_grad_()
    for _ in range(4):
        for padding, row in ((None, None), (-1, 2), (2, 2), (0, 0), (-3, 0)):
            out = hf.embedding(INDICES, weight, padding)
            bag = hf.embedding_bag(INDICES, weight, padding_idx=padding, mode="sum")
            for found in (out, bag):
                (gradient,) = torch.autograd.grad(found.sum(), weight)
                expected = (
                    torch.bincount(INDICES.flatten(), minlength=3).float()[:, None].expand(3, 3).clone()
                )
                if row is not None:
                    expected[row] = 0
                assert torch.equal(gradient, expected)


def test_a_factor_of_negative_zero_is_zero() -> None:
    """0.0 and -0.0 are equal as keys of caches, so that they must have equal results."""
    x, scale = values(), torch.tensor(0.25, requires_grad=True)
    for factor in (0.0, 0.0, 0.0, -0.0, -0.0, 0.0):
        (found,) = torch.autograd.grad(hf.fake_quantize(x, scale, grad_factor=factor).sum(), scale)
        (straight,) = torch.autograd.grad(hf.fake_quantize(x, scale).sum(), scale)
        assert torch.equal(torch.signbit(found), torch.signbit(straight * 0.0))
    other = x.reshape(4, 6)
    (found,) = torch.autograd.grad(hf.fake_quantize(other, scale, grad_factor=-0.0).sum(), scale)
    assert torch.equal(torch.signbit(found), torch.signbit(straight * 0.0))


VALUES = (1, 2, True, False, 1.0, 0.5, None, "sum", "mean", (1, 2), (2, 1), torch.int8, torch.float32)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_equals_only_values_of_its_type(value: Any) -> None:
    known = dict[str, Any]()
    text = repeated._equality("given", value, known)
    assert [other for other in VALUES if eval(text, known | {"given": other})] == [
        other for other in VALUES if type(other) is type(value) and other == value
    ]


def test_a_zero_is_no_key() -> None:
    """0.0 and -0.0 are equal as keys, so calls with them are not repeated."""
    calls = repeated.Calls(lambda x, value: repeated.Work(Nothing(), None, x))  # type: ignore[arg-type]
    for _ in range(3):
        for value in (0.0, -0.0):
            calls.run("key", (torch.zeros(1), value), False)
    assert calls.known == {"key": ()}


class Nothing:
    """A plan that computes nothing."""

    device = torch.device("cpu")
    kernel = type("Kernel", (), {"workspace_size": 0})

    def run(self, *given: Any) -> None:
        """Does nothing."""


def test_freed_memory_is_refused() -> None:
    x = values()
    for _ in range(3):
        hf.fake_quantize(x, 0.25)
    x.untyped_storage().resize_(8)
    with pytest.raises(hf.InvalidArgs, match="x needs 96 bytes"):
        hf.fake_quantize(x, 0.25)


def test_modes_see_repeated_calls() -> None:
    x = values(requires_grad=True)
    for _ in range(3):
        expected = hf.fake_quantize(x, 0.25)
    assert torch.equal(torch.vmap(lambda x: hf.fake_quantize(x, 0.25))(x), expected)
    gradient = torch.func.grad(lambda x: hf.fake_quantize(x, 0.25).sum())(x)
    assert torch.equal(gradient, torch.ones(SHAPE))
    with torch.device("meta"):
        assert torch.equal(hf.fake_quantize(x, 0.25), expected)
    assert hf.fake_quantize(x.to("meta"), 0.25).is_meta
    assert torch.equal(hf.fake_quantize(torch._neg_view(x), 0.25), -expected)


def test_a_tensor_that_left_a_transform_is_unwrapped() -> None:
    kept = list[torch.Tensor]()

    def loss(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.sum()

    x = values(requires_grad=True)
    for _ in range(3):
        expected = hf.fake_quantize(x, 0.25)
        torch.func.grad(loss)(x)
        found = hf.fake_quantize(kept.pop(), 0.25)
        assert torch.equal(found, expected)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert torch.equal(gradient, torch.ones(SHAPE))


def test_nothing_is_repeated_without_the_private_interface(
    monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    monkeypatch.setattr(private, "guard_of", private.FALLBACKS["guard_of"])
    x = values().reshape(3, 8)
    found = [hf.fake_quantize(x, 0.25) for _ in range(4)]
    assert len(runs) == 4
    assert all(torch.equal(one, found[0]) for one in found)


def test_calls_that_are_not_recent_are_repeated(runs: list[int]) -> None:
    """Calls of more kinds than are tried before a look-up of the key."""
    kinds = range(1, repeated.Calls._MOST_RECENT + 3)
    for turn in range(4):
        if turn == 2:
            runs.clear()
        for rows in kinds:
            x = values()[:1].expand(rows, 4)
            assert torch.equal(
                hf.fake_quantize(x, 0.25), hf.fake_quantize(values(), 0.25)[:1].expand(rows, 4)
            )
    assert not runs
    assert max(len(calls.recent) for calls in known_calls()) == repeated.Calls._MOST_RECENT


def test_many_kinds_of_calls_are_bounded() -> None:
    most = repeated.Calls._MOST_KEYS
    calls = repeated.Calls(lambda: repeated.Work(Nothing(), None, torch.zeros(1)))  # type: ignore[arg-type]
    for key in range(most + 10):
        calls.run(key, (), False)
    assert len(calls.known) <= most

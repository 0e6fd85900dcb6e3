"""A repeated call skips what its first call has settled. It must detect every change since then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core import private, repeated
from public_calls import CALLS, flat

SHAPE = (6, 4)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One element per call that was not repeated."""
    found, run = list[int](), repeated.Calls.run

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


def test_a_zero_is_no_key() -> None:
    """0.0 and -0.0 are equal as keys, so calls with them are not repeated."""
    calls = repeated.Calls(lambda x, value: repeated.Work(Nothing(), None, x))  # type: ignore[arg-type]
    for _ in range(3):
        for value in (0.0, -0.0):
            calls.run("key", (), (torch.zeros(1), value), False)
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


def test_many_kinds_of_calls_are_bounded() -> None:
    most = repeated.Calls._MOST_KEYS
    calls = repeated.Calls(lambda: repeated.Work(Nothing(), None, torch.zeros(1)))  # type: ignore[arg-type]
    for key in range(most + 10):
        calls.run(key, (), (), False)
    assert len(calls.known) <= most

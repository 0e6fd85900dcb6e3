"""A plan caches the launch of its last run. It must detect every change of the args since then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core import private

SHAPE = (6, 4)


def make(backend: str = "reference") -> tuple[hf.plans.QuantizePerTensorPlan, hf.Stream, Any]:
    desc = hf.plans.QuantizePerTensorDescriptor(shape=SHAPE)
    stream = hf.Stream.current("cpu")
    plan = hf.plans.QuantizePerTensorPlan.select(stream, desc, hf.PlanPreference(backend=backend))
    args = hf.plans.QuantizePerTensorArgs(
        x=torch.arange(24.0).reshape(SHAPE),
        scale=torch.tensor(0.5),
        zero_point=torch.tensor(3, dtype=torch.int32),
        q=torch.empty(SHAPE, dtype=torch.int8),
    )
    return plan, stream, args


def settled(backend: str = "reference") -> tuple[hf.plans.QuantizePerTensorPlan, hf.Stream, Any]:
    """Run twice with similar args, so that the third run uses the cached launch."""
    plan, stream, args = make(backend)
    for _ in range(3):
        plan.run(stream, None, args)
    return plan, stream, args


def test_the_third_run_is_recognised() -> None:
    plan, _stream, args = settled()
    assert plan._last_call is not None
    cached = plan._launches[args.signature()[0]]
    assert plan._last_call.places(args.operands(), args.options()) == cached.checked


@pytest.mark.parametrize("known", [True, False], ids=["recognised", "without the internal interface"])
def test_other_tensors_of_the_same_kind(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.setattr(private, "guard_of", private.FALLBACKS["guard_of"])
    plan, stream, args = settled()
    assert (plan._last_call is not None) == known
    other = hf.plans.QuantizePerTensorArgs(
        x=-args.x, scale=args.scale * 2, zero_point=args.zero_point, q=torch.empty_like(args.q)
    )
    plan.run(stream, None, other)
    assert torch.equal(other.q, hf.quantize(-args.x, 1.0, 3))


def transpose(args: Any) -> None:
    args.x.resize_(4, 6).t_()


def shrink(args: Any) -> None:
    args.x.resize_(2, 4)


def other_dtype(args: Any) -> None:
    args.x = args.x.double()


def overlap(args: Any) -> None:
    args.q = args.x.view(torch.int8).reshape(-1)[:24].reshape(SHAPE)


def misaligned(args: Any) -> None:
    args.x = torch.arange(25.0)[1:].reshape(SHAPE)


def host_zero_point(args: Any) -> None:
    args.zero_point = -7


def no_zero_point(args: Any) -> None:
    args.zero_point = None


def host_scale(args: Any) -> None:
    args.scale = 0.25


def bad_scale(args: Any) -> None:
    args.scale = -1.0


@pytest.mark.parametrize(
    "change",
    [transpose, misaligned, host_zero_point, no_zero_point, host_scale],
    ids=lambda change: change.__name__,
)
def test_a_change_is_honoured(change: Callable[[Any], None]) -> None:
    plan, stream, args = settled()
    change(args)
    for _ in range(3):
        args.q.zero_()
        plan.run(stream, None, args)
        assert torch.equal(args.q, hf.quantize(args.x, args.scale, args.zero_point))


@pytest.mark.parametrize(
    "change", [shrink, other_dtype, overlap, bad_scale], ids=lambda change: change.__name__
)
def test_a_wrong_change_is_refused(change: Callable[[Any], None]) -> None:
    plan, stream, args = settled()
    change(args)
    with pytest.raises(hf.InvalidArgs):
        plan.run(stream, None, args)


def test_a_run_of_another_thread_in_between() -> None:
    """The other thread runs the plan between the comparison with the last places and their use."""
    plan, stream, args = settled("cpu")
    cached = plan._launches[args.signature()[0]]
    other = hf.plans.QuantizePerTensorArgs(
        x=-args.x, scale=args.scale, zero_point=args.zero_point, q=torch.empty_like(args.q)
    )

    class Interrupted(tuple[Any, ...]):
        def __eq__(self, places: object) -> bool:
            cached.checked = tuple(self)
            plan.run(stream, None, other)
            return tuple(self) == places

        __hash__ = tuple.__hash__

    args.q.zero_()
    cached.checked = Interrupted(cached.checked)  # type: ignore[assignment]
    plan.run(stream, None, args)
    assert torch.equal(args.q, hf.quantize(args.x, args.scale, args.zero_point))


def test_host_values_change_from_run_to_run() -> None:
    plan, stream, args = make()
    for scale, zero_point in [(0.5, 1), (0.25, 1), (0.25, 2), (0.5, None), (1.0, None), (1.0, 2)] * 2:
        args.scale, args.zero_point = scale, zero_point
        plan.run(stream, None, args)
        assert torch.equal(args.q, hf.quantize(args.x, scale, zero_point))


def test_accumulate_is_not_forgotten() -> None:
    desc = hf.plans.QuantizePerTensorBackwardDescriptor(shape=SHAPE)
    stream = hf.Stream.current("cpu")
    plan = hf.plans.QuantizePerTensorBackwardPlan.select(stream, desc, hf.PlanPreference(backend="reference"))
    x, dy = torch.zeros(SHAPE), torch.ones(SHAPE)
    dx = torch.empty(SHAPE)
    for accumulate, expected in [
        (False, 2.0),
        (False, 2.0),
        (False, 2.0),
        (True, 4.0),
        (True, 6.0),
        (False, 2.0),
    ]:
        args = hf.plans.QuantizePerTensorBackwardArgs(dy=dy, x=x, scale=0.5, dx=dx, accumulate=accumulate)
        plan.run(stream, None, args)
        assert torch.equal(dx, torch.full(SHAPE, expected))

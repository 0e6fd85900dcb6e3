"""Compares hf.nn.FakeQuantize with a simple model on random sequences of operations."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch.utils.checkpoint import checkpoint

import holdfast as hf
from holdfast.core.bits import canonical

NAN = float("nan")
WEIGHT = 0.25

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ema": {"momentum": WEIGHT},
    "ema with zero points": {
        "momentum": WEIGHT, "symmetric": False, "granularity": hf.PerChannel(1), "dtype": torch.uint8,
    },
    "learned": {"mode": "learned"},
    "learned with zero points": {"mode": "learned", "symmetric": False, "scale_shape": (1,)},
}  # fmt: skip


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(canonical(a), canonical(b))


class Model:
    """The documented behaviour in a few lines."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.learned, self.symmetric = fields.get("mode") == "learned", fields.get("symmetric", True)
        self.codes = {"dtype": fields.get("dtype", torch.int8)}
        self.rule = {**self.codes, "granularity": fields.get("granularity", hf.PerTensor())}
        self.scale: torch.Tensor | None = None
        self.low = self.zero_point = None
        self.rejected, self.frozen, self.observes, self.training = 0, False, True, True

    def sees(self, x: torch.Tensor) -> None:
        """Update the state from a batch."""
        if not (self.training and self.observes and not self.frozen and x.numel()):
            return
        if self.learned and self.scale is not None:
            return
        low, high = hf.observe_range(x, granularity=self.rule["granularity"])
        zero_point = None
        if self.learned and self.symmetric:
            scale = hf.lsq_init(x, **self.rule)
        elif self.symmetric:
            scale = hf.scale_of_range(low, high, **self.codes)
        else:
            scale, zero_point = hf.scale_of_range(low, high, symmetric=False, **self.codes)
        if not scale.isfinite().all():
            self.rejected += 1
        elif self.scale is None:
            self.scale, self.low, self.zero_point = scale, low, zero_point
        else:
            self.scale = self.scale * (1 - WEIGHT) + scale * WEIGHT
            self.low = self.low * (1 - WEIGHT) + low * WEIGHT
            if not self.symmetric:
                self.zero_point = (0 - torch.round(self.low / self.scale)).clamp(0, 255).to(torch.int32)

    def computes(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The result for ``x``, and the gradient of ``x`` for the upstream gradient ``weight``."""
        x = x.detach().clone().requires_grad_()
        scale = torch.full((), NAN) if self.scale is None else self.scale
        if scale.isnan().all():
            y = x * NAN
            return y.detach(), torch.zeros_like(x)
        y = hf.fake_quantize(x, scale, self.zero_point, **self.rule)
        return y.detach(), torch.autograd.grad(y, x, weight)[0]


def reentrant(module: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x, use_reentrant=True)


def not_reentrant(module: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x, use_reentrant=False)


def compiled(module: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(module, backend="eager", dynamic=False)(x)


def compiled_in_a_checkpoint(module: Any, x: torch.Tensor) -> torch.Tensor:
    return not_reentrant(torch.compile(module, backend="eager", dynamic=False), x)


def plainly(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x)


RUNS: list[Callable[[Any, torch.Tensor], torch.Tensor]] = [
    plainly, reentrant, not_reentrant, compiled, compiled_in_a_checkpoint,
]  # fmt: skip


def machine(name: str) -> type[RuleBasedStateMachine]:
    fields = CONFIGURATIONS[name]

    class Machine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.module, self.model = hf.nn.FakeQuantize(**fields), Model(fields)
            self.waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []

        @rule(
            seed=st.integers(0, 20),
            kind=st.sampled_from(["ordinary", "ordinary", "nan", "infinite", "empty", "zeros"]),
            run=st.sampled_from(RUNS),
        )
        def batch(self, seed: int, kind: str, run: Any) -> None:
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
            if kind in ("nan", "infinite"):
                x[1, 2] = NAN if kind == "nan" else -float("inf")
            x = x[:0] if kind == "empty" else x * 0 if kind == "zeros" else x
            weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
            x.requires_grad_()
            model = self.model
            model.sees(x)
            if (
                model.scale is None
                and x.numel()
                and not (model.training and model.observes and not model.frozen)
            ):
                with pytest.raises(Exception, match="has seen no training batch that it could use"):
                    run(self.module, x)
                return
            with warnings.catch_warnings(action="ignore"):
                y = run(self.module, x)
            if not x.numel():
                assert y.shape == x.shape
                return
            right, gradient = model.computes(x, weight)
            assert same(y.detach(), right)
            if model.scale is not None:
                self.waiting.append((x, y, weight, gradient))

        @rule(which=st.integers(0, 5))
        def backward(self, which: int) -> None:
            """Run backward for any pending batch."""
            if self.waiting:
                x, y, weight, gradient = self.waiting.pop(which % len(self.waiting))
                y.backward(weight)
                assert same(x.grad, gradient)

        @rule(training=st.booleans())
        def train(self, training: bool) -> None:
            self.module.train(training)
            self.model.training = training

        @rule(frozen=st.booleans())
        def freeze(self, frozen: bool) -> None:
            self.module.freeze() if frozen else self.module.unfreeze()
            self.model.frozen = frozen

        @rule(observes=st.booleans())
        def observe(self, observes: bool) -> None:
            self.module.enable_observer(observes)
            self.model.observes = observes

        @rule(how=st.sampled_from(["deepcopy", "pickle", "state_dict", "file", "loaded over"]))
        def replace(self, how: str) -> None:
            other = hf.nn.FakeQuantize(**fields)
            if how == "deepcopy":
                other = copy.deepcopy(self.module)
            elif how == "pickle":
                other = pickle.loads(pickle.dumps(self.module))
            elif how == "file":
                file = io.BytesIO()
                torch.save(self.module.state_dict(), file)
                file.seek(0)
                other.load_state_dict(torch.load(file, weights_only=True))
            else:
                if how == "loaded over":
                    other(torch.full((3, 4), 9.0))
                other.load_state_dict(self.module.state_dict())
            self.waiting.clear()  # they belong to the old module
            self.module = other.train(self.model.training)

        @invariant()
        def agrees(self) -> None:
            module, model = self.module, self.model
            report = module.report()
            assert report["is_set"] is (model.scale is not None)
            assert report["rejected_batches"] == model.rejected
            assert (module.frozen, module.observes) == (model.frozen, model.observes)
            if model.scale is None:
                assert module.scale.isnan().all()
                return
            assert same(module.scale.detach().reshape(model.scale.shape), model.scale)
            if not model.symmetric:
                zero_point = module.zero_point.detach().reshape(model.zero_point.shape)
                assert torch.equal(zero_point, model.zero_point.to(zero_point.dtype))
                assert model.learned or same(module.low, model.low)

    return Machine


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_whatever_happens_the_state_is_that_of_the_model(name: str) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=256):
        run_state_machine_as_test(
            machine(name),
            settings=settings(
                max_examples=40,
                stateful_step_count=20,
                derandomize=True,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

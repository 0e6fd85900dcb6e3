"""hf.nn.FakeQuantize under activation checkpointing gives the bits of the model without checkpoints."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

import holdfast as hf
from holdfast.core import private
from holdfast.core.bits import canonical
from holdfast.nn import recomputation

NAN = float("nan")

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ema": {"dtype": torch.int4, "momentum": 0.5},
    "ema with zero points": {"granularity": hf.PerChannel(1), "symmetric": False, "momentum": 0.5},
    "learned": {"mode": "learned", "dtype": torch.int4},
    "per batch": {"mode": "per_batch"},
}

Run = Callable[..., torch.Tensor]


def plainly(function: Any, *arguments: Any) -> torch.Tensor:
    return function(*arguments)


def reentrant(function: Any, *arguments: Any) -> torch.Tensor:
    return checkpoint(function, *arguments, use_reentrant=True)


def not_reentrant(function: Any, *arguments: Any) -> torch.Tensor:
    return checkpoint(function, *arguments, use_reentrant=False)


KINDS = [reentrant, not_reentrant]


class Layers(torch.nn.Module):
    """A model whose gradients depend on all scales."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.quantizer = hf.nn.FakeQuantize(**CONFIGURATIONS[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.sin(self.quantizer(self.before(x)))).square()


def batch(seed: int) -> torch.Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
    return x.requires_grad_()


def bits(model: torch.nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    gradients = [tensor.grad for tensor in (*model.parameters(), *inputs) if tensor.grad is not None]
    return [canonical(tensor.detach().clone()) for tensor in (*gradients, *model.state_dict().values())]


def assert_same(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(found) == len(right) and all(map(torch.equal, found, right))


def compared(name: str, step: Callable[[torch.nn.Module, Run], list[torch.Tensor]], kind: Run) -> None:
    """Assert that ``step`` gives the same gradients and state with and without checkpoints."""
    model = Layers(name)
    other = copy.deepcopy(model)
    inputs, others = step(model, plainly), step(other, kind)
    assert_same(bits(other, *others), bits(model, *inputs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_steps_have_the_bits_of_steps_without_a_checkpoint(name: str, kind: Run) -> None:
    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for seed in range(4):
            x = batch(seed)
            optimizer.zero_grad()
            run(model, x).sum().backward()
            optimizer.step()
        return [x]

    compared(name, step, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_module_is_called_several_times_before_backward(name: str, kind: Run) -> None:
    """Within one checkpoint, in consecutive checkpoints, and outside of checkpoints.

    No parameter requires a gradient, because reentrant checkpoints sum these in another order.
    """

    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        model.requires_grad_(False)
        x = batch(0)
        y = run(lambda x: model(model(x)), x)
        y = model(run(model, y)) + run(model, x)
        y.sum().backward()
        return [x]

    compared(name, step, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saturated", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_batches_may_wait_for_their_backward_in_any_order(
    order: tuple[int, ...], saturated: bool, kind: Run
) -> None:
    """The batches have one range, so only the order of calls identifies their scales."""

    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        inputs = [batch(seed) for seed in range(4)]
        if saturated:
            model.before = torch.nn.Hardtanh()
            model(inputs.pop().detach() * 0.01)
        outputs = [run(model, x).sum() for x in inputs]
        for i in order:
            outputs[i].backward()
        return inputs

    compared("ema", step, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_gone_through_twice(kind: Run) -> None:
    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        x = batch(0)
        y = run(lambda x: model(model(x)), x).sum()
        y.backward(retain_graph=True)
        model(batch(1))
        y.backward()
        return [x]

    compared("ema", step, kind)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the first, outer pass
@pytest.mark.parametrize(("inner", "outer"), list(itertools.product(KINDS, KINDS)))
def test_checkpoints_within_checkpoints(inner: Run, outer: Run) -> None:
    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        model.requires_grad_(False)
        within, around = (plainly, plainly) if run is plainly else (inner, outer)
        inputs = [batch(seed) for seed in range(3)]
        outputs = [around(lambda x: model(within(lambda x: within(model, model(x)), x)), x) for x in inputs]
        for y in outputs:
            y.sum().backward()
        return inputs

    compared("ema", step, outer)


@pytest.mark.parametrize("early", [True, False])
def test_with_and_without_an_early_stop(early: bool) -> None:
    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        x = batch(0)
        y = run(lambda x: model.quantizer(model(x)), x) + run(model, x)
        y.sum().backward()
        return [x]

    with set_checkpoint_early_stop(early):
        compared("ema", step, not_reentrant)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_is_that_of_the_first_pass_in_evaluation_too(kind: Run) -> None:
    """Also if training mode and state change before backward."""

    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        model(batch(0))
        x, later = batch(1), batch(2)
        y = run(model.eval(), x)
        z = run(model.train(), later)
        model.eval()
        (y.sum() + z.sum()).backward()
        model.train()(batch(3))
        return [x, later]

    compared("ema", step, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_sequential_checkpoints(kind: Run) -> None:
    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        model.requires_grad_(False)
        x, reenters = batch(0), kind is reentrant
        layers = [model, model, model]
        if run is plainly:
            y = model(model(model(x)))
        else:
            y = checkpoint_sequential(layers, 2, x, use_reentrant=reenters)
        y.sum().backward()
        return [x]

    compared("ema", step, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ema", "ema with zero points", "learned"])
def test_a_rejected_batch_is_counted_once(name: str, kind: Run) -> None:
    model = Layers(name)
    x = batch(0).detach()
    x[0, 0] = NAN
    with pytest.warns(RuntimeWarning, match="rejected") as warned:
        kind(model, x.requires_grad_()).sum().backward()
    assert len(warned) == 1
    assert int(model.quantizer.rejected_batches) == 1 and not model.quantizer.report()["is_set"]


def test_nothing_is_kept_once_the_graph_is_gone() -> None:
    model = Layers("ema")
    gc.collect()
    before = len(recomputation._CALLS)
    for kind in KINDS:
        y = kind(model, batch(0))
        assert len(recomputation._CALLS) == before + 1
        del y
        gc.collect()
        assert len(recomputation._CALLS) == before
    model(batch(1)).sum().backward()
    assert len(recomputation._CALLS) == before


# Fallbacks for when torch's private names change.


class Twice(torch.autograd.Function):
    """A custom checkpoint that torch does not know."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(gradient)
        return None, x.grad


def unknown(function: Any, x: torch.Tensor) -> torch.Tensor:
    return Twice.apply(function, x)


@pytest.mark.parametrize("kind", [*KINDS, unknown])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_without_torch_s_names_one_call_before_each_backward_is_right(
    name: str, kind: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recomputation, "_FILE", "nowhere")

    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        for seed in range(3):
            x = batch(seed)
            run(model, x).sum().backward()
        return [x]

    compared(name, step, kind)


def test_where_torch_does_not_tell_of_backward_the_names_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "backward_pass", private.FALLBACKS["backward_pass"])
    assert not recomputation.in_backward()

    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        inputs = [batch(seed) for seed in range(2)]
        for y in [run(model, x).sum() for x in inputs]:
            y.backward()
        return inputs

    for kind in KINDS:
        compared("ema", step, kind)


# Compiled.


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ema", "ema with zero points", "learned"])
def test_a_compiled_module_in_a_checkpoint(name: str, kind: Run) -> None:
    torch._dynamo.reset()

    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        quantizer = torch.compile(model.quantizer, backend="aot_eager", fullgraph=True)

        def both(x: torch.Tensor) -> torch.Tensor:
            x = model.before(x)
            return model.after(torch.sin(model.quantizer(x) if run is plainly else quantizer(x)))

        inputs = [batch(seed) for seed in range(3)]
        poisoned = inputs[0].detach().where(inputs[0] != inputs[0][0, 0], NAN).requires_grad_()
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            run(both, poisoned).nan_to_num().sum().backward()
        model.zero_grad()
        for y in [run(both, x).sum() for x in inputs]:
            y.backward()
        return inputs

    compared(name, step, kind)


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ema", "learned", "per batch"])
def test_a_checkpoint_in_a_compiled_function(name: str, kind: Run) -> None:
    torch._dynamo.reset()

    def step(model: torch.nn.Module, run: Run) -> list[torch.Tensor]:
        @torch.compile(backend="aot_eager")
        def compiled(x: torch.Tensor) -> torch.Tensor:
            return run(model, x).sum()

        for seed in range(3):
            model.zero_grad()
            x = batch(seed)
            (model(x).sum() if run is plainly else compiled(x)).backward()
        return [x]

    compared(name, step, kind)


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_floor_events_are_counted_once(kind: Run) -> None:
    torch._dynamo.reset()
    module = hf.nn.FakeQuantize(mode="learned")
    module(batch(0))
    module.scale.data.neg_()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for events, run in enumerate([module, compiled], 1):
        kind(run, batch(1)).sum().backward()
        assert int(module.floor_events) == events


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_one_graph_of_a_checkpoint_with_a_moving_average_is_refused() -> None:
    """Its second run would start from the state after the first run."""
    torch._dynamo.reset()
    module = hf.nn.FakeQuantize()
    run = torch.compile(lambda x: not_reentrant(module, x), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
        run(batch(0))
    assert not module.report()["is_set"]
    torch.compile(module, backend="aot_eager", fullgraph=True)(batch(0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
        run(batch(0))

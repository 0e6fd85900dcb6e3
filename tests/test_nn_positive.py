"""Tests of hf.nn.FakeQuantize: learned scales stay positive, and scales are rounded as they are stored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast as hf
from holdfast.core.bits import canonical


def quantizer_of(scale: float, **arguments: Any) -> hf.nn.FakeQuantize:
    """A learned quantizer whose optimizer has set the scale. The floor is 1/64."""
    quantizer = hf.nn.FakeQuantize(mode="learned", grad_factor=1.0, **arguments)
    quantizer(torch.ones(2))
    quantizer.scale.data.fill_(scale)
    quantizer.scale_floor.fill_(1 / 64)
    return quantizer


def quantizers(model: nn.Module) -> list[hf.nn.FakeQuantize]:
    return [module for module in model.modules() if isinstance(module, hf.nn.FakeQuantize)]


def trained(positive: bool, stored: torch.dtype | None = None) -> tuple[nn.Module, torch.Tensor]:
    """A small model after steps of Adam that are far larger than its scales, and the least scale used."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(64, 16)
    target = torch.randint(4, (64,))
    weight = hf.qat.Quantizer(
        granularity=hf.PerChannel(0), mode="learned", positive=positive, scale_dtype=stored
    )
    hf.qat.prepare(model, hf.qat.Config(weight=weight, activation=hf.qat.Quantizer(mode="learned")))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    least = torch.tensor(float("inf"))
    for _ in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
        for quantizer in quantizers(model):
            least = torch.minimum(least, quantizer.evaluation_scale()[0].min())
    return model, least


def test_scales_stay_positive_under_large_steps_of_adam() -> None:
    model, least = trained(positive=True)
    assert least > 0
    assert sum(quantizer.report()["floor_events"] for quantizer in quantizers(model)) > 0
    _, least = trained(positive=False)
    assert least < 0, "the test can fail"


@pytest.mark.parametrize("stored", [None, torch.float16])
def test_training_twice_gives_equal_bits(stored: torch.dtype | None) -> None:
    (one, _), (other, _) = trained(True, stored), trained(True, stored)
    for name, tensor in one.state_dict().items():
        assert torch.equal(canonical(tensor), canonical(other.state_dict()[name])), name


@pytest.mark.parametrize("scale", [-3.0, 0.0, 2.0**-7])
def test_below_the_floor_the_gradient_raises_the_scale(scale: float) -> None:
    x, floor = torch.tensor([2.0, -1.0, 0.0]), torch.tensor(2.0**-6, requires_grad=True)
    for sign in (1.0, -1.0):
        quantizer = quantizer_of(scale)
        y = quantizer(x)
        assert y.equal(hf.fake_quantize(x, floor)) and int(quantizer.floor_events) == 1
        (expected,) = torch.autograd.grad(hf.fake_quantize(x, floor), floor, sign * torch.ones(3))
        y.backward(sign * torch.ones(3))
        assert expected != 0 and quantizer.scale.grad == -expected.abs()
    quantizer.eval()(x)
    assert int(quantizer.floor_events) == quantizer.report()["floor_events"] == 1
    assert quantizer.report()["least_scale"] == floor
    quantizer.reset_parameters()
    assert int(quantizer.floor_events) == 0 and quantizer.scale_floor.isnan()


def test_a_scale_leaves_the_floor() -> None:
    quantizer, x = quantizer_of(-0.05), torch.linspace(-2, 2, 9)
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=3e-2)
    for _ in range(5):
        optimizer.zero_grad()
        (quantizer(x) - x).square().sum().backward()
        optimizer.step()
    assert quantizer.scale > quantizer.scale_floor and 0 < int(quantizer.floor_events) < 5


def test_the_first_batch_or_the_argument_sets_the_floor() -> None:
    quantizer = hf.nn.FakeQuantize(mode="learned")
    assert quantizer.scale_floor.isnan()
    quantizer(torch.tensor([1.0, -2.0]))
    assert quantizer.scale_floor == quantizer.scale / 64
    given = hf.nn.FakeQuantize(mode="learned", scale=1.0)
    assert given.scale_floor == torch.tensor(1e-12)
    given.scale_floor.zero_()
    given.reset_parameters()
    assert given.scale_floor == torch.tensor(1e-12)


def test_above_the_floor_nothing_changes() -> None:
    x = torch.linspace(-2, 2, 9)
    one, other = quantizer_of(0.1, positive=True), quantizer_of(0.1, positive=False)
    for quantizer in (one, other):
        quantizer(x).square().sum().backward()
    assert one(x).equal(other(x)) and one.scale.grad.equal(other.scale.grad) and not one.floor_events
    assert "positive=False" in repr(other) and "positive" not in repr(one)


def test_nan_stays_visible() -> None:
    assert quantizer_of(float("nan"))(torch.ones(2)).isnan().all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stored", [None, torch.bfloat16])
def test_a_checkpoint_counts_once(compiled: bool, stored: torch.dtype | None) -> None:
    x = torch.linspace(-2, 2, 8, requires_grad=True)
    quantizer, plain = quantizer_of(-1.0, scale_dtype=stored), quantizer_of(-1.0, scale_dtype=stored)

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(checkpoint(lambda x: quantizer(x).sin() * x, x, use_reentrant=False))

    torch._dynamo.reset()
    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    for _ in range(2):
        gradients = torch.autograd.grad(call(x).sum(), (x, quantizer.scale))
        expected = torch.autograd.grad((plain(x).sin() * x).sum(), (x, plain.scale))
        assert all(map(torch.equal, gradients, expected))
    assert int(quantizer.floor_events) == int(plain.floor_events) == 2


def test_an_older_state_loads() -> None:
    quantizer = quantizer_of(0.5)
    older = {name: value for name, value in quantizer.state_dict().items() if "floor" not in name}
    other = quantizer_of(1.0)
    other.load_state_dict(older, strict=True)
    assert other.scale_floor == 0.5 / 64


def test_transforms() -> None:
    x, scales = torch.linspace(-1, 1, 7), torch.tensor([-1.0, 0.1, 0.3])
    quantizer = copy.deepcopy(quantizer_of(1.0, scale_dtype=torch.bfloat16)).eval()

    def loss(scale: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(quantizer, {"scale": scale}, (x,)).square().sum()

    found = torch.vmap(torch.func.grad(loss))(scales)
    assert found.equal(torch.stack([torch.func.grad(loss)(scale) for scale in scales]))


@pytest.mark.parametrize("mode", ["ema", "per_batch", "fixed", "learned"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_scale_dtype(mode: str, stored: torch.dtype) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    arguments: dict[str, Any] = {"mode": mode, "scale": 0.1} if mode == "fixed" else {"mode": mode}
    rounding, plain = hf.nn.FakeQuantize(scale_dtype=stored, **arguments), hf.nn.FakeQuantize(**arguments)
    plain(x)
    y = rounding(x)
    exact, _ = plain.evaluation_scale(x)
    used, _ = rounding.evaluation_scale(x)
    assert used.equal(exact.to(stored).float()) and not used.equal(exact)
    assert y.equal(hf.fake_quantize(x, used))
    if mode == "learned":
        leaf = used.clone().requires_grad_()
        (expected,) = torch.autograd.grad(hf.fake_quantize(x, leaf, grad_factor="lsq").sum(), leaf)
        y.sum().backward()
        assert rounding.scale.grad.equal(expected)


def test_a_stored_scale_is_neither_zero_nor_infinite() -> None:
    quantizer = hf.nn.FakeQuantize(mode="per_batch", scale_dtype=torch.float16, granularity=hf.PerToken())
    x = torch.tensor([[0.0, 0.0], [1e9, -1e9]])
    assert quantizer.evaluation_scale(x)[0].tolist() == [2.0**-24, 65504.0]
    assert quantizer(x).equal(torch.tensor([[0.0, 0.0], [127 * 65504.0, -128 * 65504.0]]))

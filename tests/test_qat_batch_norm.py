"""Tests of hf.qat: BatchNorm folded into a quantized convolution."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import holdfast as hf

WIDE = hf.qat.Quantizer(dtype=torch.int16, granularity=hf.PerChannel(0))
W4 = hf.qat.preset("w4a8")


class Block(nn.Module):
    """A residual block, in which a trace finds two pairs. The last BatchNorm has no Conv."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6, affine=False)
        self.last = nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        out: torch.Tensor = self.last(self.bn2(self.conv2(x)) + x)
        return out


def block_of() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, 3, 6, 6)
    block.bn1.weight.data.copy_(torch.tensor([1.0, 0.5, -2.0, 0.0, 3.0, 1.5]))
    block.bn1.bias.data.normal_()
    for _ in range(3):
        block(x * 2 + 1)
    return block, x


def evaluated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model.eval()(x))


@pytest.mark.parametrize("training", [True, False])
def test_folding_alone_changes_next_to_nothing(training: bool) -> None:
    """At 16 bits the folded model computes what the unfolded one does, also the statistics."""
    block, x = block_of()
    plain = copy.deepcopy(block)
    hf.qat.prepare(block, hf.qat.Config(weight=WIDE), fold_batch_norm=True)
    for _ in range(2):
        y, expected = block.train(training)(x), plain.train(training)(x)
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(block.bn1.running_var, plain.bn1.running_var, rtol=1e-3, atol=1e-4)
    y.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in (
        (block.conv2.parametrizations.weight.original, plain.conv2.weight),
        (block.bn1.bias, plain.bn1.bias),
        (block.last.weight, plain.last.weight),
    ):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("pairs", [True, [("conv1", "bn1"), ("conv2", "bn2")]])
def test_converted_equals_prepared(pairs: Any) -> None:
    block, x = block_of()
    hf.qat.prepare(block, W4, fold_batch_norm=pairs)
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        block.train()(x).square().mean().backward()
        optimizer.step()
    prepared = evaluated(block, x)
    copied = copy.deepcopy(block)
    tensors = hf.qat.quantized_weights(block.train())
    hf.qat.convert(block)
    assert evaluated(block, x).equal(prepared) and evaluated(copied, x).equal(prepared)
    assert block.conv1.weight.equal(tensors["conv1.weight"].dequantize())
    assert isinstance(block.bn1, nn.Identity) and isinstance(block.bn2, nn.Identity)
    assert isinstance(block.last, nn.BatchNorm2d)
    assert block.conv1.bias.shape == (6,) and copied.conv1.parametrizations.bias[0].norm is copied.bn1
    other = hf.qat.prepare(Block(), W4, fold_batch_norm=True)
    hf.qat.convert(other, for_loading=True).load_state_dict(block.state_dict(), strict=True)
    assert evaluated(other, x).equal(prepared)


def test_a_batch_norm_takes_its_input_by_name() -> None:
    class Named(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.bn1(input=self.conv1(input=x)))
            out: torch.Tensor = self.last(self.bn2(input=self.conv2(x)) + x)
            return out

    block, x = block_of()
    named = Named()
    named.load_state_dict(block.state_dict())
    for model in (block, named):
        hf.qat.prepare(model, W4, fold_batch_norm=True)
        model(x)
    assert all(ours.equal(theirs) for ours, theirs in zip(named.buffers(), block.buffers(), strict=True))
    expected = evaluated(block, x)
    assert evaluated(named, x).equal(expected) and evaluated(hf.qat.convert(named), x).equal(expected)
    assert isinstance(named.bn1, nn.Identity) and isinstance(named.bn2, nn.Identity)


def test_a_frozen_batch_norm_trains_with_the_running_statistics() -> None:
    block, x = block_of()
    hf.qat.prepare(block, hf.qat.Config(weight=WIDE), fold_batch_norm=True)
    expected = block.eval()(x)
    block.train()
    for norm in (block.bn1, block.bn2, block.last):
        norm.eval()
    assert block(x).equal(expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_folds_the_same_statistics_in_both_runs(use_reentrant: bool) -> None:
    block, x = block_of()
    hf.qat.prepare(block, W4, fold_batch_norm=True)
    block(x)
    again = copy.deepcopy(block)
    inputs = [(3 * x).requires_grad_() for _ in range(2)]
    block(inputs[0]).sin().sum().backward()
    checkpoint(again, inputs[1], use_reentrant=use_reentrant).sin().sum().backward()
    for ours, theirs in zip([*again.parameters(), inputs[1]], [*block.parameters(), inputs[0]], strict=True):
        assert ours.grad.equal(theirs.grad)


def test_compiles_whole() -> None:
    block, x = block_of()
    hf.qat.prepare(block, W4, fold_batch_norm=True)
    other = copy.deepcopy(block)
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    assert compiled(x).equal(block(x)) and compiled(x).equal(block(x))
    assert other.bn1.running_mean.equal(block.bn1.running_mean)


def test_a_compiled_step_has_the_gradients_of_an_eager_step() -> None:
    """The backward pass must not compute the factor again, from the statistics that the forward updated."""
    torch.manual_seed(0)
    x, norms = torch.randn(2, 3, 4, 4, dtype=torch.float64), [nn.BatchNorm2d(4) for _ in range(2)]
    block = nn.Sequential(nn.Conv2d(3, 4, 1), norms[0], nn.Conv2d(4, 4, 1), norms[1], nn.Sigmoid())
    hf.qat.prepare(block.double(), W4, fold_batch_norm=True)
    other = copy.deepcopy(block)
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for model in (block, compiled):
        model(x).square().mean().backward()
    for ours, theirs in zip(other.parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_layers_that_are_not_quantized_are_not_folded() -> None:
    block, _ = block_of()
    hf.qat.prepare(block, {"conv2": W4}, fold_batch_norm=True)
    assert type(block.conv1) is nn.Conv2d and block.conv1.bias is None
    hf.qat.convert(block, for_loading=True)
    assert isinstance(block.bn1, nn.BatchNorm2d) and isinstance(block.bn2, nn.Identity)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([("conv1", "missing")], "names 'missing', which the model does not have"),
        ([("bn1", "conv1")], "'bn1' and 'conv1' are a BatchNorm2d and a Conv2d; they must be"),
        ("conv1", "fold_batch_norm is 'conv1'; it must be True, False, or pairs of names"),
        ([("conv1", "bn1"), ("conv2", "bn1")], "fold_batch_norm has 'conv2' or 'bn1' twice"),
        ([("conv1",)], "it must be True, False, or pairs of names"),
    ],
)
def test_refused_pairs(pairs: Any, said: str) -> None:
    block, _ = block_of()
    shown = str(block)
    with pytest.raises(hf.InvalidArgs) as refused:
        hf.qat.prepare(block, W4, fold_batch_norm=pairs)
    assert said in str(refused.value) and str(block) == shown


def test_a_batch_norm_that_was_replaced_is_not_converted() -> None:
    block, x = block_of()
    hf.qat.prepare(block, W4, fold_batch_norm=True)
    block(x)
    nn.SyncBatchNorm.convert_sync_batchnorm(block)
    shown = str(block)
    with pytest.raises(hf.InvalidArgs, match="folded into 'conv1' is not in the model"):
        hf.qat.convert(block)
    assert str(block) == shown


def test_a_convolution_with_a_parametrized_bias_is_not_folded() -> None:
    block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    parametrize.register_parametrization(block[0], "bias", nn.Tanh())
    with pytest.raises(hf.InvalidArgs, match="cannot be folded into '0', whose bias has a parametrization"):
        hf.qat.prepare(block, hf.qat.preset("w4a8"), fold_batch_norm=True)


def test_a_model_that_cannot_be_traced_is_refused() -> None:
    class Branching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(hf.InvalidArgs, match=r"needs a model that torch\.fx can trace; pass pairs"):
        hf.qat.prepare(Branching(), W4, fold_batch_norm=True)
    with pytest.raises(hf.InvalidArgs, match="fold_batch_norm finds nothing to fold"):
        hf.qat.prepare(nn.Sequential(nn.Linear(2, 2)), W4, fold_batch_norm=True)

"""Tests of hf.nn.FakeQuantize: its state, when it changes, and equal results with one process and two.

``main`` runs in each of two processes.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core.bits import canonical
from ranks import run_two_processes

INF, NAN = float("inf"), float("nan")
SECONDS = 240

#: Configurations of every mode, symmetric or not, with every possible shape of scales.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ema": {},
    "ema, 4 bits per channel": {"dtype": torch.int4, "granularity": hf.PerChannel(1)},
    "ema with a zero point": {"symmetric": False, "dtype": torch.uint8},
    "ema with zero points per channel": {"symmetric": False, "granularity": hf.PerChannel(-1)},
    "ema over a range": {"q_min": -5, "q_max": 5, "granularity": hf.PerGroup(2, axis=1), "ste": "tanh"},
    "per batch": {"mode": "per_batch"},
    "per batch and token": {"mode": "per_batch", "granularity": hf.PerToken(), "symmetric": False},
    "fixed": {"mode": "fixed", "scale": 0.1},
    "fixed per channel": {
        "mode": "fixed", "scale": torch.tensor([0.1, 0.2, 0.3, 0.4]), "zero_point": 3, "dtype": torch.uint8,
        "granularity": hf.PerChannel(1), "ste": "clipped_identity",
    },
    "learned": {"mode": "learned"},
    "learned, unsigned": {"mode": "learned", "dtype": torch.uint8, "grad_factor": 1.0},
    "learned per channel": {"mode": "learned", "granularity": hf.PerChannel(1), "scale_shape": (4,)},
    "learned with a zero point": {"mode": "learned", "symmetric": False, "dtype": torch.uint4},
}  # fmt: skip


def made(name: str) -> hf.nn.FakeQuantize:
    return hf.nn.FakeQuantize(**CONFIGURATIONS[name])


def batches(count: int, rows: int = 6) -> list[torch.Tensor]:
    return [torch.randn(rows, 4, generator=torch.Generator().manual_seed(i)) * (i + 1) for i in range(count)]


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(canonical(a), canonical(b))


def same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def test_a_moving_average_of_scales_by_hand() -> None:
    quantizer = hf.nn.FakeQuantize(dtype=torch.int4, momentum=0.25)
    seen = []
    for largest in (7.0, 21.0, 7.0):
        quantizer(torch.tensor([largest, -1.0]))
        seen.append(float(quantizer.scale))
    assert seen == [1.0, 1.5, 1.375]


def test_the_bits_of_the_average_are_those_of_single_operations() -> None:
    quantizer = hf.nn.FakeQuantize(granularity=hf.PerChannel(1))
    scale = None
    for x in batches(5):
        y = quantizer(x)
        new = hf.choose_scale(x, granularity=hf.PerChannel(1))
        scale = new if scale is None else scale * 0.9 + new * 0.1
        assert same(quantizer.scale, scale)
        assert same(y, hf.fake_quantize(x, scale, dtype=torch.int8, granularity=hf.PerChannel(1)))


def test_with_a_zero_point_the_range_is_averaged() -> None:
    quantizer = hf.nn.FakeQuantize(symmetric=False, dtype=torch.uint8, momentum=0.5)
    for x in (torch.tensor([-10.0, 500.0]), torch.tensor([-30.0, 480.0]), torch.tensor([0.0, 1020.0])):
        y = quantizer(x)
        assert same(y, hf.fake_quantize(x, quantizer.scale, quantizer.zero_point, dtype=torch.uint8))
    assert (float(quantizer.scale), float(quantizer.low)) == (3.0, -10.0)
    assert quantizer.zero_point.tolist() == 3  # 10 / 3


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_is_trained_is_what_is_deployed(name: str) -> None:
    """In evaluation, the module gives the bits of quantize and dequantize with its scale."""
    quantizer = made(name)
    for x in batches(3):
        quantizer(x)
    quantizer.eval()
    x = batches(4)[3]
    if quantizer.mode == "per_batch":
        rule = {"granularity": quantizer.granularity, "symmetric": quantizer.symmetric}
        found = hf.choose_scale(x, **rule)
        scale, zero_point = found if isinstance(found, tuple) else (found, None)
    else:
        scale, zero_point = quantizer.scale.detach(), quantizer.zero_point
    if zero_point is not None and zero_point.is_floating_point():
        zero_point = zero_point.detach().round().to(torch.int32)
    codes = {"dtype": quantizer.dtype or torch.int8, "q_min": quantizer.q_min, "q_max": quantizer.q_max}
    q = hf.quantize(x, scale, zero_point, granularity=quantizer.granularity, **codes)
    right = hf.dequantize(q, scale, zero_point, granularity=quantizer.granularity)
    assert same(quantizer(x).detach(), right)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_evaluation_changes_nothing(name: str) -> None:
    quantizer = made(name)
    quantizer(batches(1)[0])
    quantizer.eval()
    before = state(quantizer)
    for x in batches(3):
        quantizer(x)
    assert same_state(before, state(quantizer))


def test_per_batch_is_dynamic_in_training_and_in_evaluation() -> None:
    quantizer = hf.nn.FakeQuantize(mode="per_batch", granularity=hf.PerToken())
    for x in batches(2):
        scale = hf.choose_scale(x, granularity=hf.PerToken())
        right = hf.fake_quantize(x, scale, dtype=torch.int8, granularity=hf.PerToken())
        quantizer.freeze()
        assert same(quantizer.train()(x), right) and same(quantizer.eval()(x), right)
    assert list(quantizer.state_dict()) == ["_extra_state"]


def test_learning_begins_with_the_first_batch_and_goes_on_with_the_optimizer() -> None:
    quantizer = hf.nn.FakeQuantize(mode="learned", dtype=torch.int4)
    assert [name for name, _ in quantizer.named_parameters()] == ["scale"]
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.1)
    first, second = batches(2)
    y = quantizer(first)
    begun = hf.lsq_init(first, dtype=torch.int4)
    assert same(quantizer.scale.detach(), begun)
    y.square().sum().backward()
    scale = begun.clone().requires_grad_()
    hf.fake_quantize(first, scale, dtype=torch.int4, grad_factor="lsq").square().sum().backward()
    assert same(quantizer.scale.grad, scale.grad)
    optimizer.step()
    quantizer(second)
    assert same(quantizer.scale.detach(), begun - 0.1 * scale.grad)


def test_a_learned_zero_point_begins_with_the_range() -> None:
    quantizer = hf.nn.FakeQuantize(mode="learned", symmetric=False, dtype=torch.uint8)
    x = torch.tensor([-10.0, 500.0], requires_grad=True)
    quantizer(x).sum().backward()
    assert (float(quantizer.scale.detach()), float(quantizer.zero_point.detach())) == (2.0, 5.0)
    assert quantizer.zero_point.is_floating_point() and quantizer.zero_point.grad is not None


def test_a_given_scale_is_where_learning_begins() -> None:
    quantizer = hf.nn.FakeQuantize(mode="learned", scale=0.5)
    quantizer(batches(1)[0])
    assert float(quantizer.scale.detach()) == 0.5


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if "fixed" not in name])
def test_frozen_state_stays(name: str) -> None:
    quantizer = made(name)
    first, second = batches(2)
    quantizer(first)
    quantizer.freeze()
    before = state(quantizer)
    quantizer(second)
    assert same_state(before, state(quantizer))
    assert not any(parameter.requires_grad for parameter in quantizer.parameters())
    quantizer.unfreeze()
    quantizer(second)
    assert all(parameter.requires_grad for parameter in quantizer.parameters())
    if quantizer.mode == "ema":
        assert not same(before["scale"], quantizer.scale)


def test_observing_and_quantizing_are_switched_on_their_own() -> None:
    quantizer = hf.nn.FakeQuantize()
    first, second = batches(2)
    quantizer.disable_fake_quant()
    assert quantizer(first) is first
    assert same(quantizer.scale, hf.choose_scale(first))
    quantizer.enable_fake_quant()
    quantizer.disable_observer()
    assert same(quantizer(second), hf.fake_quantize(second, hf.choose_scale(first), dtype=torch.int8))
    assert same(quantizer.scale, hf.choose_scale(first))
    quantizer.enable_observer()
    quantizer(second)
    assert not same(quantizer.scale, hf.choose_scale(first))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name.startswith("ema")])
def test_a_bad_batch_is_rejected_and_counted(name: str, bad: float) -> None:
    quantizer = made(name)
    first, second, third = batches(3)
    quantizer(first)
    before = state(quantizer)
    poisoned = second.clone()
    poisoned[2, 1] = bad
    with pytest.warns(RuntimeWarning, match="NaN or infinity in it was rejected"):
        y = quantizer(poisoned)
    assert y.isfinite().sum() >= y.numel() - 1  # only the bad element is not finite
    assert int(quantizer.rejected_batches) == 1 == quantizer.report()["rejected_batches"]
    assert "rejected_batches=1" in repr(quantizer)
    before["rejected_batches"] += 1
    assert same_state(before, state(quantizer))
    quantizer(third)
    assert not same(before["scale"], quantizer.scale) and quantizer.scale.isfinite().all()


@pytest.mark.parametrize("mode", ["ema", "learned"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_transform_that_refuses_to_change_the_state_leaves_it_unset(transform: Any, mode: Any) -> None:
    quantizer = hf.nn.FakeQuantize(dtype=torch.int8, mode=mode)
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError):
        transform(lambda x: quantizer(x).sum())(x)
    assert quantizer.scale.isnan()
    with pytest.raises(hf.InvalidArgs, match="has seen no training batch"):
        quantizer.eval()(x)


def test_a_functional_call_starts_the_scale_of_its_own_tensors_alone() -> None:
    quantizer, again = (hf.nn.FakeQuantize(dtype=torch.int8, mode="learned") for _ in range(2))
    first, second = batches(2)
    tensors = {name: tensor.detach().clone() for name, tensor in quantizer.state_dict(keep_vars=True).items()}
    del tensors["_extra_state"]
    for _ in range(2):
        y = torch.func.functional_call(quantizer, tensors, (first,))
        assert same(y, again(first)) and same(tensors["scale"], again.scale)
    assert quantizer.scale.isnan()
    with pytest.raises(hf.InvalidArgs, match="has seen no training batch"):
        quantizer.eval()(first)
    assert same(quantizer.train()(second), hf.nn.FakeQuantize(dtype=torch.int8, mode="learned")(second))


@pytest.mark.parametrize(
    "name", ["ema", "ema with zero points per channel", "learned", "learned with a zero point"]
)
def test_a_bad_first_batch_leaves_the_state_unset(name: str) -> None:
    quantizer, untouched = made(name), made(name)
    first, second = batches(2)
    with pytest.warns(RuntimeWarning, match="rejected"):
        y = quantizer(first.where(first != first[0, 0], NAN))
    assert y.isnan().any()
    assert int(quantizer.rejected_batches) == 1
    assert same(quantizer(second), untouched(second))
    assert same(quantizer.scale.detach(), untouched.scale.detach())


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("trained", [0, 2])
def test_state_dict_there_and_back(name: str, trained: int) -> None:
    quantizer, fresh = made(name), made(name)
    for x in batches(trained):
        quantizer(x)
    if trained:
        quantizer.freeze()
        quantizer.disable_observer()
    saved = io.BytesIO()
    torch.save(quantizer.state_dict(), saved)
    saved.seek(0)
    assert not fresh.load_state_dict(torch.load(saved, weights_only=True)).missing_keys
    assert same_state(state(quantizer), state(fresh))
    assert fresh.frozen == bool(trained)
    if trained:
        x = batches(3)[2]
        assert same(fresh.eval()(x).detach(), quantizer.eval()(x).detach())
    other = made(name)
    fresh.train().load_state_dict(other.state_dict())  # an unset state
    for x in batches(2):
        assert same(fresh(x).detach(), other(x).detach())
    assert same_state(state(fresh), state(other))


@pytest.mark.parametrize("positive", [True, False])
def test_a_learned_scale_that_became_nan_is_not_set_anew_after_loading(positive: bool) -> None:
    quantizer = hf.nn.FakeQuantize(mode="learned", positive=positive)
    first, second = batches(2)
    quantizer(first)
    with torch.no_grad():
        quantizer.scale.fill_(NAN)
    fresh = hf.nn.FakeQuantize(mode="learned", positive=positive)
    fresh.load_state_dict(quantizer.state_dict())
    assert same(fresh(second).detach(), quantizer(second).detach())
    assert same_state(state(fresh), state(quantizer)) and fresh.scale.isnan()


@pytest.mark.parametrize(
    "name", ["ema", "ema with a zero point", "learned", "learned per channel", "learned with a zero point"]
)
@pytest.mark.parametrize("training", [False, True])
def test_state_that_is_written_into_an_unset_module_is_used(name: str, training: bool) -> None:
    """As in an average of models, whose copy was made before the first batch."""
    quantizer = made(name)
    averaged = copy.deepcopy(quantizer).eval()
    first, second = batches(2)
    quantizer(first)
    with torch.no_grad():
        for kept, new in zip(averaged.parameters(), quantizer.parameters(), strict=True):
            kept.copy_(new)
        for kept, new in zip(averaged.buffers(), quantizer.buffers(), strict=True):
            kept.copy_(new)
    assert same(averaged.train(training)(second).detach(), quantizer.train(training)(second).detach())
    assert same_state(state(averaged), state(quantizer))


@pytest.mark.parametrize("name", ["ema with a zero point", "learned with a zero point"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_narrow_state_is_loaded_as_float32(name: str, assign: bool) -> None:
    quantizer = made(name)
    quantizer(batches(1)[0])
    saved = quantizer.state_dict()
    narrow = {key: kept.bfloat16() if kept.is_floating_point() else kept for key, kept in saved.items()}
    fresh = made(name)
    fresh.load_state_dict(narrow, assign=assign)
    for key, kept in state(fresh).items():
        assert same(kept, narrow[key].to(saved[key].dtype))
    assert [type(kept) for kept in fresh.parameters()] == [type(kept) for kept in quantizer.parameters()]


def test_state_of_a_known_shape_is_not_resized() -> None:
    quantizer = hf.nn.FakeQuantize(granularity=hf.PerChannel(1), scale_shape=(5,))
    assert quantizer.scale.shape == (5,)
    other = hf.nn.FakeQuantize(granularity=hf.PerChannel(1))
    other(batches(1)[0])
    with pytest.raises(RuntimeError, match="size mismatch for scale"):
        quantizer.load_state_dict(other.state_dict())


def test_backward_uses_the_scale_of_its_own_forward() -> None:
    quantizer = hf.nn.FakeQuantize(ste="tanh", dtype=torch.int4)
    inputs = [x.requires_grad_() for x in batches(4)]
    scales, outputs = [], []
    for i, x in enumerate(inputs):
        quantizer.train(i % 2 == 0)
        outputs.append(quantizer(x))
        scales.append(quantizer.scale.clone())
    for x, scale, y in zip(inputs, scales, outputs, strict=True):
        y.sum().backward()
        again = x.detach().clone().requires_grad_()
        hf.fake_quantize(again, scale, dtype=torch.int4, ste="tanh").sum().backward()
        assert same(x.grad, again.grad)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_go_their_own_way(name: str, copied: Any) -> None:
    quantizer = made(name)
    first, second = batches(2)
    for ready in (False, True):
        if ready:
            quantizer(first)
        other = copied(quantizer)
        assert same_state(state(quantizer), state(other))
        assert repr(other) == repr(quantizer)
        before = state(quantizer)
        other(second)
        assert same_state(before, state(quantizer))


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_compiles_whole_in_training_and_evaluation(name: str) -> None:
    torch._dynamo.reset()
    quantizer = made(name)
    eager = copy.deepcopy(quantizer)
    compiled = torch.compile(quantizer, fullgraph=True)
    for training in (True, True, True, False):
        quantizer.train(training)
        eager.train(training)
        for x in batches(2):
            again = x.clone().requires_grad_()
            x.requires_grad_()
            y, right = compiled(x), eager(again)
            assert same(y.detach(), right.detach())
            y.sum().backward()
            right.sum().backward()
            assert same(x.grad, again.grad)
    assert same_state(state(quantizer), state(eager))
    gradients = zip(quantizer.parameters(), eager.parameters(), strict=True)
    assert all(same(a.grad, b.grad) for a, b in gradients)


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
def test_a_compiled_module_rejects_bad_batches_too() -> None:
    torch._dynamo.reset()
    quantizer = hf.nn.FakeQuantize()
    compiled = torch.compile(quantizer, fullgraph=True)
    first, second = batches(2)
    compiled(first)
    compiled(second.where(second != second[0, 0], INF))
    assert same(quantizer.scale, hf.choose_scale(first)) and int(quantizer.rejected_batches) == 1


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("first_is_bad", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.filterwarnings("ignore:a batch with NaN:RuntimeWarning")
def test_learning_starts_once_in_a_step_that_calls_the_module_twice(
    compiles: bool, first_is_bad: bool, symmetric: bool
) -> None:
    torch._dynamo.reset()
    quantizer = hf.nn.FakeQuantize(mode="learned", symmetric=symmetric)
    right = copy.deepcopy(quantizer)
    first, second = batches(2)
    first = torch.full_like(first, NAN) if first_is_bad else first
    right(second if first_is_bad else first)

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (quantizer(a).nan_to_num() + 2 * quantizer(b)).sum()

    called = torch.compile(step, fullgraph=True, backend="aot_eager") if compiles else step
    called(first, second).backward()
    assert same(quantizer.scale.detach(), right.scale.detach())
    assert same(quantizer.scale_floor, right.scale_floor)
    assert int(quantizer.rejected_batches) == first_is_bad
    if not first_is_bad:
        (right(first) + 2 * right(second)).sum().backward()
        assert torch.allclose(quantizer.scale.grad, right.scale.grad)


def test_a_compiled_module_keeps_a_learned_scale_that_was_written_into_it() -> None:
    torch._dynamo.reset()
    quantizer = hf.nn.FakeQuantize(mode="learned")
    with torch.no_grad():
        quantizer.scale.fill_(0.5)
        quantizer.scale_floor.fill_(0.125)
    torch.compile(quantizer, fullgraph=True, backend="aot_eager")(batches(1)[0])
    assert float(quantizer.scale.detach()) == 0.5 and float(quantizer.scale_floor) == 0.125


def test_casts_keep_the_state_wide() -> None:
    for name in CONFIGURATIONS:
        quantizer = made(name)
        x = batches(1)[0] * 1e-9
        quantizer(x)
        before = {key: tensor for key, tensor in state(quantizer).items()}
        for cast in (quantizer.half, quantizer.bfloat16, lambda q=quantizer: q.to(torch.float16)):
            cast()
            assert same_state(before, state(quantizer))
        y = quantizer.eval()(x.bfloat16())
        assert y.dtype == torch.bfloat16
        quantizer.double()
        kept = [tensor for tensor in state(quantizer).values() if tensor.is_floating_point()]
        assert all(tensor.dtype == torch.float64 for tensor in kept)
        assert quantizer(x.double()).dtype == torch.float64


@pytest.mark.parametrize("name", ["ema", "learned", "per batch"])
def test_autocast_computes_as_for_the_dtype_of_the_input(name: str) -> None:
    quantizer, plain = made(name), made(name)
    layer = torch.nn.Linear(4, 4)
    x = batches(1)[0]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = layer(x)
        y = quantizer(hidden)
    assert hidden.dtype == y.dtype == torch.bfloat16
    assert same(y.detach(), plain(hidden.detach()).detach())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_on_the_gpu_the_bits_are_the_same_and_nothing_waits(name: str) -> None:
    on_cpu = made(name)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    for step, x in enumerate(batches(4)):
        if step == 2 and name.startswith("ema"):
            x[0, 0] = NAN
        on_device = x.cuda().requires_grad_()
        x.requires_grad_()
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            right = on_cpu(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            found = on_gpu(on_device)
            found.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        right.sum().backward()
        assert same(found.detach().cpu(), right.detach())
        assert same(on_device.grad.cpu(), x.grad)
    kept = {key: tensor.cpu() for key, tensor in state(on_gpu).items()}
    assert same_state(kept, state(on_cpu))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_training_step_is_captured_in_a_graph(name: str) -> None:
    on_cpu = made(name)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    inputs = batches(4)
    x = inputs[0].cuda().requires_grad_()
    for module, first in ((on_gpu, x), (on_cpu, inputs[0].clone().requires_grad_())):
        module(first).sum().backward()
    x.grad = None
    on_gpu.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = on_gpu(x)
        y.sum().backward()
    for batch in inputs[1:]:
        with torch.no_grad():
            x.copy_(batch)
        graph.replay()
        torch.cuda.synchronize()
        again = batch.clone().requires_grad_()
        right = on_cpu(again)
        right.sum().backward()
        assert same(y.detach().cpu(), right.detach()) and same(x.grad.cpu(), again.grad)
    kept = {key: tensor.cpu() for key, tensor in state(on_gpu).items()}
    assert same_state(kept, state(on_cpu))


def test_the_state_lies_on_the_device_that_is_asked_for() -> None:
    quantizer = hf.nn.FakeQuantize(device="meta", symmetric=False)
    assert {tensor.device.type for tensor in quantizer.buffers()} == {"meta"}
    assert {tensor.device.type for tensor in quantizer.to_empty(device="cpu").buffers()} == {"cpu"}


def test_bad_input_is_refused_with_a_sentence() -> None:
    x = batches(1)[0]
    make = hf.nn.FakeQuantize
    kept = make(granularity=hf.PerToken())
    kept(x)
    before = state(kept)
    for bad, match in (
        (lambda: make(mode="sometimes"), "mode is 'sometimes'; accepted are 'per_batch', 'ema'"),
        (lambda: make(momentum=0), "momentum is 0; it is the weight"),
        (lambda: make(momentum="slow"), "momentum is 'slow'"),
        (lambda: make(mode="fixed"), "mode fixed needs a scale"),
        (lambda: make(scale=0.1), "mode ema computes it from the data"),
        (lambda: make(mode="fixed", scale="0.1"), "scale is a str"),
        (lambda: make(mode="fixed", scale=0.1, granularity=hf.PerToken()), "scale is one number"),
        (lambda: make(mode="fixed", scale=torch.ones(3), zero_point=torch.ones(2).int()), r"shape \(2,\)"),
        (lambda: make(mode="fixed", scale=1.0, zero_point=0.5), "zero_point is 0.5; in mode fixed"),
        (lambda: make(zero_point=1), "zero_point is given and cannot be used"),
        (lambda: make(mode="learned", scale=1.0, zero_point=1), "cannot be used"),
        (lambda: make(mode="learned", granularity=hf.PerChannel(0)), "pass scale_shape="),
        (lambda: make(dtype=torch.uint8), "symmetric=False"),
        (lambda: make(dtype=torch.float32), "dtype is torch.float32"),
        (lambda: make(q_min=3), "both q_min and q_max"),
        (lambda: make(granularity="per_tensor"), "granularity is 'per_tensor'"),
        (lambda: make(ste="straight"), "'straight'"),
        (lambda: make()([1.0]), "x is a list"),
        (lambda: make().eval()(x), "has seen no training batch"),
        (lambda: make(granularity=hf.PerChannel(0)).eval()(x), "has seen no training batch"),
        (lambda: kept(x[:3]), r"scales of shape \(3,\), and the state has \(6,\)"),
        (
            lambda: make(mode="learned", granularity=hf.PerChannel(1), scale_shape=(3,))(x),
            r"state has \(3,\)",
        ),
        (lambda: make()(x.long()), "torch.int64; accepted are"),
    ):
        with pytest.raises(hf.HoldfastError, match=match) as refusal:
            bad()
        assert str(refusal.value).endswith(".")
    assert same_state(before, state(kept))


# Two processes with half of the batch each, and one process with all of it.

SHARED: dict[str, dict[str, Any]] = {
    "ema": {},
    "ema per channel": {"granularity": hf.PerChannel(1), "dtype": torch.int4, "narrow": False},
    "ema with zero points": {"granularity": hf.PerChannel(1), "symmetric": False, "dtype": torch.uint8},
    "per batch": {"mode": "per_batch", "symmetric": False},
    "per batch and token": {"mode": "per_batch", "granularity": hf.PerToken()},
}


def joint_batches() -> list[torch.Tensor]:
    """Batches of 8 rows. The third has a NaN and the fourth an infinity, each in one half."""
    found = batches(6, rows=8)
    found[2][1, 2] = NAN
    found[3][6, 0] = -INF
    return found


def trained(half: slice) -> dict[str, Any]:
    """The results of training each configuration on some rows of the batches."""
    found: dict[str, Any] = {}
    for name, fields in SHARED.items():
        quantizer = hf.nn.FakeQuantize(**fields)
        outputs = [quantizer(x[half]) for x in joint_batches()]
        found[name] = state(quantizer), outputs
    learned = hf.nn.FakeQuantize(mode="learned")
    learned(joint_batches()[0][half])
    found["learned"] = state(learned), []
    return found


def test_two_processes_have_the_state_of_one(tmp_path: Path) -> None:
    first, second = run_two_processes(__file__, tmp_path, SECONDS)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        alone = trained(slice(None))
    for name in SHARED:
        joined = [torch.cat(halves) for halves in zip(first[name][1], second[name][1], strict=True)]
        assert same_state(first[name][0], second[name][0]), name
        assert same_state(first[name][0], alone[name][0]), name
        assert all(map(same, joined, alone[name][1])), name
    assert int(first["ema"][0]["rejected_batches"]) == 2
    assert same_state(first["learned"][0], second["learned"][0])
    assert same(first["learned"][0]["scale"], hf.lsq_init(joint_batches()[0][:4], dtype=torch.int8))


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=(folder.resolve() / "rendezvous").as_uri(), rank=rank, world_size=2
    )
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.save(trained(slice(4 * rank, 4 * rank + 4)), folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mode": "fixed", "scale": 0.0}, r"scale is 0.0; a scale must be positive and finite"),
        ({"mode": "fixed", "scale": -1.0}, r"scale is -1.0; a scale must be positive and finite"),
        ({"mode": "learned", "scale": float("nan")}, "scale is nan; a scale must be positive and finite"),
        (
            {"mode": "fixed", "scale": torch.tensor([1.0, float("inf")]), "granularity": hf.PerChannel(0)},
            r"scale is \[1.0, inf\]; a scale must be positive and finite",
        ),
        ({"mode": "learned", "grad_factor": "LSQ"}, "grad_factor is 'LSQ'; it must be a finite number"),
        (
            {"scale_shape": 5, "granularity": hf.PerChannel(0)},
            "scale_shape is 5; it must be a sequence of whole",
        ),
        (
            {"scale_shape": (2.5,), "granularity": hf.PerChannel(0)},
            r"scale_shape is \(2.5,\); it must be a seq",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_when_the_module_is_made(given: Any, sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.nn.FakeQuantize(**given)


@pytest.mark.parametrize("mode", ["ema", "learned"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_batch_of_nothing_says_nothing(mode: str, symmetric: bool) -> None:
    """An empty first batch must not set the scale to the smallest value."""
    nothing, batch = torch.zeros(0, 3), torch.tensor([[127.0, -3.0, 5.0]])
    once, twice = (hf.nn.FakeQuantize(mode=mode, symmetric=symmetric) for _ in range(2))
    assert twice(nothing).shape == (0, 3)
    assert not twice.report()["is_set"]
    assert torch.equal(once(batch), twice(batch))
    assert torch.equal(once.scale, twice.scale)
    assert twice(nothing).shape == (0, 3)
    assert torch.equal(once.scale, twice.scale)
    assert hf.nn.FakeQuantize(mode=mode).eval()(nothing).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "given", [{}, {"symmetric": False}, {"mode": "learned"}, {"mode": "fixed", "scale": 0.5}]
)
def test_state_is_float32_whatever_torch_makes_by_default(given: Any, dtype: torch.dtype) -> None:
    batch = torch.tensor([[127.0, -3.0, 5.0]], dtype=torch.float32)
    torch.set_default_dtype(dtype)
    try:
        module = hf.nn.FakeQuantize(**given)
        made = module(batch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert module.scale.dtype == torch.float32
    assert torch.equal(made, hf.nn.FakeQuantize(**given)(batch))


def test_switches_are_saved_where_tensors_are_made_without_memory() -> None:
    module = hf.nn.FakeQuantize()
    module.freeze()
    with torch.device("meta"):
        state = module.state_dict()
    loaded = hf.nn.FakeQuantize()
    loaded.load_state_dict(state)
    assert loaded.frozen

"""hf.qat on a GPU: codes and scales have the bits of the CPU, and conversion keeps the bits of the output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf
from test_qat import MODELS, WEIGHTS, config_of, evaluated, model_of, same, train

DEVICE = "cuda"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_are_those_of_the_cpu_and_conversion_keeps_the_bits(
    name: str, weight: str, dtype: torch.dtype
) -> None:
    model, x = model_of(name, dtype)
    hf.qat.prepare(model, config_of(WEIGHTS[weight], name, hf.qat.Quantizer(mode="dynamic")))
    for module in model.modules():  # a moving average of the weight alone, which needs no batch
        for parametrizations in getattr(module, "parametrizations", {}).values():
            parametrizations()
    on_gpu = copy.deepcopy(model).to(DEVICE)
    of_cpu, of_gpu = hf.qat.quantized_weights(model), hf.qat.quantized_weights(on_gpu)
    for key, tensor in of_cpu.items():
        other = of_gpu[key]
        assert same(tensor.codes.view(torch.uint8), other.codes.view(torch.uint8).cpu())
        assert same(tensor.scale, other.scale.cpu()) and same(tensor.dequantize(), other.dequantize().cpu())
    x = x.to(DEVICE)
    train(on_gpu, x)
    prepared = evaluated(on_gpu, x)
    assert same(evaluated(hf.qat.convert(on_gpu), x), prepared)


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("mode", ["batch", "ema", "learned"])
def test_a_compiled_model_trains_with_the_quantizers_of_an_eager_one(mode: str) -> None:
    torch.manual_seed(0)
    rows: dict[str, Any] = {"dtype": torch.int4, "granularity": hf.PerGroup(32, axis=1), "mode": mode}
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).to(DEVICE)
    hf.qat.prepare(model, config_of({**rows, "scale_dtype": torch.bfloat16}))
    other = copy.deepcopy(model)
    x = torch.randn(16, 64, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True)
    for _ in range(2):
        model(x)
        compiled(x)
    (ours,), (theirs,) = (hf.qat.quantized_weights(m).values() for m in (model, other))
    assert same(ours.codes, theirs.codes) and same(ours.scale, theirs.scale)


def test_a_step_does_not_wait_for_the_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).to(DEVICE)
    learned = hf.qat.Quantizer(mode="learned", granularity=hf.PerChannel(0), scale_dtype=torch.float16)
    hf.qat.prepare(
        model, hf.qat.Config(weight=learned, activation=hf.qat.Quantizer(mode="ema", start_step=1))
    )
    x = torch.randn(16, 64, device=DEVICE)
    train(model, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")

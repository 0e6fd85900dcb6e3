"""torchao tensors made of our codes have our values, and torchao's own call gives our quantizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torchao.quantization import Int8Tensor, IntxUnpackedToInt8Tensor, quantize_
from torchao.quantization.pt2e import disable_observer
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

import holdfast as hf

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 32)
        self.conv = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.linear = torch.nn.Linear(64, 24)
        self.head = torch.nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).unflatten(-1, (4, 2, 4))
        x = torch.nn.functional.pad(self.linear(self.conv(x).flatten(1)), (0, 8))
        return self.head(x)


TOKENS = torch.randint(0, 16, (5,), generator=torch.Generator().manual_seed(0))


def prepared(config: Any, dtype: torch.dtype, model: torch.nn.Module | None = None) -> torch.nn.Module:
    """A prepared model whose weights are multiples of half a scale: half of the quotients are ties."""
    torch.manual_seed(0)
    made = hf.qat.prepare(Network().to(dtype) if model is None else model, config)
    if model is None:
        made(TOKENS)
    made.eval()
    for name, tensor in hf.qat.quantized_weights(made).items():
        halves = torch.randint(-20, 20, tensor.codes.shape).to(torch.int8)
        values = hf.dequantize(halves, tensor.scale.float() / 2, dtype=dtype, granularity=tensor.granularity)
        made.get_submodule(name.removesuffix(".weight")).weight = values
    return made


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", [hf.PerTensor(), hf.PerChannel(0), hf.PerGroup(2, 1)], ids=str)
@pytest.mark.parametrize("codes", [torch.int8, torch.int4, torch.int2, torch.uint4], ids=str)
def test_tensors_have_our_values(
    codes: torch.dtype, granularity: hf.Granularity, symmetric: bool, dtype: torch.dtype
) -> None:
    if codes == torch.uint4 and symmetric:
        return
    weight = hf.qat.Quantizer(dtype=codes, granularity=granularity, symmetric=symmetric, mode="ema")
    model = prepared(hf.qat.Config(weight=weight), dtype)
    weights, expected = hf.qat.quantized_weights(model), model(TOKENS)
    assert hf.export.torchao(model) is model
    for name, tensor in weights.items():
        found = model.get_parameter(name)
        assert isinstance(found.data, IntxUnpackedToInt8Tensor)
        offset = 0 if weight.format.signed else 8
        assert torch.equal(found.qdata.int(), tensor.codes.int() - offset)
        assert torch.equal(found.scale.flatten(), tensor.scale.flatten())
        assert same_bits(found.dequantize(), tensor.dequantize())
    assert model.embed.weight is model.head.weight, "still tied"
    assert same_bits(model(TOKENS), expected), "linear, conv2d and embedding compute with our values"


@pytest.mark.parametrize("codes", [torch.int8, torch.int4], ids=str)
@pytest.mark.parametrize("converted", [False, True])
def test_weights_keep_channels_last(codes: torch.dtype, converted: bool) -> None:
    torch.manual_seed(0)
    last = torch.channels_last
    model = torch.nn.Conv2d(8, 16, 3, groups=2).to(memory_format=last)  # type: ignore[call-overload]
    hf.qat.prepare(model, hf.qat.Config(weight=hf.qat.Quantizer(dtype=codes)))
    x = torch.randn(2, 8, 5, 5).contiguous(memory_format=last)
    with torch.no_grad():
        expected, strides = model(x), model.weight.stride()
        found = hf.export.torchao(hf.qat.convert(model) if converted else model)
        assert found.weight.dequantize().stride() == strides and same_bits(found(x), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("granularity", "symmetric"),
    [(hf.PerTensor(), True), (hf.PerChannel(0), True), (hf.PerGroup(8), True), (hf.PerGroup(8), False)],
    ids=str,
)
def test_int8_tensors_have_our_values(
    granularity: hf.Granularity, symmetric: bool, dtype: torch.dtype
) -> None:
    weight = hf.qat.Quantizer(granularity=granularity, symmetric=symmetric)
    model = prepared(
        hf.qat.Config(weight=weight), dtype, torch.nn.Sequential(torch.nn.Linear(32, 8)).to(dtype)
    )
    (tensor,) = hf.qat.quantized_weights(model).values()
    found = hf.export.torchao(hf.qat.convert(model), tensor="int8")[0].weight
    assert isinstance(found.data, Int8Tensor) and torch.equal(found.qdata, tensor.codes)
    assert same_bits(found.dequantize(), tensor.dequantize())
    assert model(torch.ones(2, 32, dtype=dtype)).shape == (2, 8)


@pytest.mark.parametrize("preset", ["w8a8", "w8a8-dynamic", "w4a8-dynamic"])
def test_activations_stay_quantized(preset: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    hf.qat.prepare(model, hf.qat.preset(preset))
    x = torch.randn(6, 64)
    model(x)
    expected = model.eval()(x)
    hf.export.torchao(model)
    assert same_bits(model(x), expected)
    before = copy.deepcopy(model.state_dict())
    model.train()(3 * x)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if "input_quantizer" in name)


def test_quantize_of_torchao_prepares_and_converts() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    ours, config = copy.deepcopy(model), hf.qat.preset("w4a8-dynamic")
    quantize_(model, hf.export.TorchaoConfig(config))
    hf.qat.prepare(ours, config)
    x = torch.randn(6, 64)
    assert same_bits(model(x), ours(x))
    for each in (model, ours):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).square().sum().backward()
        optimizer.step()
    expected = hf.qat.convert(ours.eval())(x)
    quantize_(model.eval(), hf.export.TorchaoConfig(step="convert"))
    assert isinstance(model[0].weight.data, IntxUnpackedToInt8Tensor)
    assert same_bits(model(x), expected)


def test_quantize_of_torchao_takes_a_filter() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Linear(8, 8))
    quantize_(
        model, hf.export.TorchaoConfig(hf.qat.preset("w8a16")), filter_fn=lambda module, name: name == "0"
    )
    assert list(hf.qat.quantized_weights(model)) == ["0.weight"]
    quantize_(model, hf.export.TorchaoConfig(step="convert"), filter_fn=lambda module, name: name in "01")
    assert isinstance(model[0].weight.data, IntxUnpackedToInt8Tensor)


@pytest.mark.parametrize("converted", [False, True])
def test_copies_of_the_model_stay_as_they_are(converted: bool) -> None:
    model = hf.qat.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)), hf.qat.preset("w4a16")).eval()
    if converted:
        hf.qat.convert(model)
    x = torch.randn(2, 8)
    with torch.no_grad():
        expected, copied, exported = model(x), copy.deepcopy(model), copy.deepcopy(model)
        hf.export.torchao(exported)
        assert all(made(x).equal(expected) for made in (model, copied, exported))
        assert type(exported[0]) is torch.nn.Linear


@pytest.mark.parametrize(
    ("config", "model", "tensor", "words"),
    [
        (hf.qat.preset("w4a16"), torch.nn.Conv1d(4, 4, 3), "intx", "weights of Linear, Conv2d, Embedding"),
        (hf.qat.preset("w4a16"), torch.nn.Linear(8, 8), "int8", "integer codes of 8 bits"),
        (hf.qat.preset("w8a8-fp8"), torch.nn.Linear(8, 8), "intx", "integer codes of 2 to 8 bits"),
        (hf.qat.preset("w8a16"), torch.nn.Linear(8, 8).double(), "intx", "torch.float64; torchao has"),
        (hf.qat.preset("w8a16"), torch.nn.Linear(8, 8), "int3", "tensor is 'int3'"),
        (hf.qat.preset("w8a8"), torch.nn.Linear(8, 8), "intx", "no scale"),
        (hf.qat.preset("w8a8-tensor"), torch.nn.Embedding(0, 8), "intx", "weight has no elements"),
        (
            hf.qat.Config(weight=hf.qat.Quantizer(symmetric=False)), torch.nn.Linear(8, 8), "int8",
            "ignores such",
        ),
        (
            hf.qat.Config(weight=hf.qat.Quantizer(symmetric=False, granularity=hf.PerGroup(8))),
            torch.nn.Linear(8, 8), "int8", "ignores such",
        ),
        (
            hf.qat.Config(weight=hf.qat.Quantizer(mode="fixed", scale=0.1, zero_point=200, symmetric=False)),
            torch.nn.Linear(8, 8), "intx", "zero point that is no code",
        ),
    ],
)  # fmt: skip
def test_what_torchao_lacks_is_refused(config: Any, model: torch.nn.Module, tensor: str, words: str) -> None:
    hf.qat.prepare(model, config)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hf.HoldfastError, match=words):
        hf.export.torchao(model, tensor=tensor)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)


def test_a_model_that_is_not_prepared_is_refused() -> None:
    with pytest.raises(hf.InvalidArgs, match=r"call hf\.qat\.prepare first"):
        hf.export.torchao(torch.nn.Linear(8, 8))
    with pytest.raises(hf.InvalidArgs, match="model is a str; it must be a torch"):
        hf.export.torchao("model")  # type: ignore[type-var]
    for arguments in ({}, {"step": "freeze"}, {"config": "w4a16"}):
        with pytest.raises(hf.HoldfastError, match=r"step|config"):
            hf.export.TorchaoConfig(**arguments)


class Annotated(Quantizer):
    """Quantizes the input and the weight of linear and conv2d, as the two specs say."""

    def __init__(self, activation: QuantizationSpec | None, weight: QuantizationSpec) -> None:
        self.activation, self.weight = activation, weight

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        for node in model.graph.nodes:
            if node.target in (torch.ops.aten.linear.default, torch.ops.aten.conv2d.default):
                specs = dict(zip(node.args[:2], (self.activation, self.weight), strict=True))
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    input_qspec_map=specs, _annotated=True
                )
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        pass


def spec(per_channel: bool = False, **arguments: Any) -> QuantizationSpec:
    """A spec; arguments that a spec does not have go to the class."""
    kind = hf.export.PT2EPerChannelFakeQuantize if per_channel else hf.export.PT2EFakeQuantize
    names = ("dtype", "quant_min", "quant_max", "qscheme", "ch_axis", "is_dynamic")
    own = {name: value for name, value in arguments.items() if name not in names}
    given = {"dtype": torch.int8, **{k: v for k, v in arguments.items() if k in names}}
    return QuantizationSpec(observer_or_fake_quant_ctr=kind.with_args(**own), **given)


AFFINE, PER_CHANNEL = torch.per_tensor_affine, torch.per_channel_symmetric


@pytest.mark.parametrize(
    ("activation", "weight"),
    [
        (spec(), spec(True, qscheme=PER_CHANNEL, ch_axis=0, mode="per_batch")),
        (spec(qscheme=AFFINE), spec(True, quant_min=-8, quant_max=7, qscheme=PER_CHANNEL, ch_axis=0)),
        (spec(mode="per_batch", qscheme=AFFINE), spec(mode="learned", quant_min=-127, quant_max=127)),
        (spec(mode="learned", scale_dtype=torch.bfloat16), spec(True, qscheme=torch.per_channel_affine)),
        (None, spec(dtype=torch.int4)),
    ],
    ids=range(5),
)
def test_pt2e_converts_to_what_was_trained(activation: Any, weight: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 8)
    )
    x = torch.randn(4, 3, 8, 8)
    exported = torch.export.export(model, (x,)).module()
    prepared = prepare_qat_pt2e(exported, Annotated(activation, weight))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        prepared(x).square().sum().backward()
        optimizer.step()
    prepared.apply(disable_observer)
    expected = prepared(x)
    converted = convert_pt2e(prepared)
    assert same_bits(converted(x), expected)
    assert not [name for name, _ in converted.named_modules() if "post_process" in name]
    stored = {name: buffer for name, buffer in converted.named_buffers() if name.endswith("_codes")}
    assert len(stored) == 2 and all(codes.dtype == torch.int8 for codes in stored.values())
    hf.export.onnx(converted, (x,), tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"is_dynamic": True}, 'pass mode="per_batch"'),
        ({"qscheme": torch.per_channel_affine_float_qparams}, "accepted are per_tensor"),
        ({"mode": "per_batch", "scale_dtype": torch.bfloat16}, "Leave it out"),
        ({"dtype": torch.int32}, "torch.int32"),
    ],
)
def test_what_pt2e_classes_lack_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(hf.HoldfastError, match=words):
        hf.export.PT2EFakeQuantize(**arguments)

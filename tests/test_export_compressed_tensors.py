"""Models in the compressed-tensors format, read back by the reader of that package.

The package is imported by the tests that use it: the import takes seconds, and not every worker runs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast as hf

FORMATS = (torch.int8, torch.int4, torch.int2)
GRANULARITIES = (hf.PerTensor(), hf.PerChannel(0), hf.PerGroup(8))


def network() -> torch.nn.Module:
    """Sizes that fill no whole word."""
    return torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.ReLU(), torch.nn.Linear(24, 13, bias=False))


def prepared(
    settings: Any, dtype: torch.dtype = torch.float32, model: Callable[[], torch.nn.Module] = network
) -> torch.nn.Module:
    """A prepared model whose weights are multiples of half a scale: half of the quotients are ties."""
    torch.manual_seed(0)
    made = hf.qat.prepare(model().to(dtype), settings)
    x = torch.randn(3, 40).to(dtype)
    made(x)
    made.eval()
    for name, tensor in hf.qat.quantized_weights(made).items():
        halves = torch.randint(-20, 20, tensor.codes.shape).to(torch.int8)
        scale = tensor.scale.float() / 2
        layer = made.get_submodule(name.removesuffix(".weight"))
        layer.weight = hf.dequantize(halves, scale, dtype=dtype, granularity=tensor.granularity)
    return made


def read_back(directory: Path, model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with the weights of the directory, through the package's way of loading a model."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    described = json.loads((directory / "config.json").read_text())["quantization_config"]
    known = QuantizationConfig.model_validate(described)
    compressor = ModelCompressor(quantization_config=known)
    apply_quantization_config(model, known, show_progress=False)
    compressor.compress_model(model)
    missing = model.load_state_dict(load_file(directory / "model.safetensors"), strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    compressor.decompress_model(model)
    return model


def check(made: torch.nn.Module, fresh: torch.nn.Module, directory: Path) -> None:
    """The weights that the package reads are ours, in every bit."""
    read = read_back(directory, fresh)
    for name, tensor in hf.qat.quantized_weights(made).items():
        weight = read.get_parameter(name)
        assert weight.dtype == tensor.dtype
        assert torch.equal(weight.view(torch.uint8), tensor.dequantize().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("codes", FORMATS, ids=str)
def test_packed_weights_are_read_back(
    codes: torch.dtype, granularity: hf.Granularity, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    weight = hf.qat.Quantizer(
        dtype=codes, granularity=granularity, symmetric=symmetric, scale_dtype=dtype, mode="ema"
    )
    made = prepared(hf.qat.Config(weight=weight), dtype)
    hf.export.compressed_tensors(made, tmp_path)
    check(made, network().to(dtype), tmp_path)
    from compressed_tensors.compressors import pack_to_int32

    stored = load_file(tmp_path / "model.safetensors")
    bits = weight.format.bits
    for name, tensor in hf.qat.quantized_weights(made).items():
        assert torch.equal(stored[f"{name}_packed"], pack_to_int32(tensor.codes, bits))
        assert torch.equal(stored[f"{name}_scale"].flatten(), tensor.scale.flatten())
        assert stored[f"{name}_shape"].tolist() == list(tensor.codes.shape)
        assert (f"{name}_zero_point" in stored) == (not symmetric)


@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("preset", ["w8a8", "w8a8-tensor", "w8a8-dynamic", "w4a8"])
def test_codes_with_quantized_inputs(preset: str, layout: str, tmp_path: Path) -> None:
    made = prepared(hf.qat.preset(preset))
    hf.export.compressed_tensors(made, tmp_path, layout=layout)
    check(made, network(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in hf.qat.quantized_weights(made).items():
        assert stored[name].dtype == torch.int8 and torch.equal(stored[name], tensor.codes)
    for name, activation in hf.qat.activation_quantizers(made).items():
        scale = activation.scale()
        assert (scale is None) == (f"{name}.input_scale" not in stored)
        assert scale is None or torch.equal(stored[f"{name}.input_scale"], scale.reshape(1))
    if "dynamic" not in preset:  # the package quantizes inputs with a constant scale as we do
        x = torch.randn(5, 40)
        assert torch.equal(read_back(tmp_path, network())(x), made(x))


@pytest.mark.parametrize(
    ("codes", "symmetric"),
    [(torch.uint8, False), (torch.uint4, False), (torch.uint4, True), (torch.uint2, False)],
)
def test_unsigned_codes_are_shifted(codes: torch.dtype, symmetric: bool, tmp_path: Path) -> None:
    weight = hf.qat.Quantizer(
        dtype=codes, granularity=hf.PerChannel(0), symmetric=symmetric,
        **({"mode": "fixed", "scale": 0.1} if symmetric else {"mode": "ema"}),
    )  # fmt: skip
    made = prepared(hf.qat.Config(weight=weight))
    hf.export.compressed_tensors(made, tmp_path)
    check(made, network(), tmp_path)


def test_float_codes(tmp_path: Path) -> None:
    made = prepared(hf.qat.preset("w8a8-fp8"))
    hf.export.compressed_tensors(made, tmp_path)
    check(made, network(), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert described["format"] == "float-quantized"


class Decoder(torch.nn.Module):
    """An embedding, its tied head, and layers with different settings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 40)
        self.up, self.down = torch.nn.Linear(40, 24), torch.nn.Linear(24, 40)
        self.head = torch.nn.Linear(40, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x + self.embed.weight[0])))


def test_layers_of_several_kinds(tmp_path: Path) -> None:
    made = prepared({"up": hf.qat.preset("w4a16"), "down": None, "*": hf.qat.preset("w8a16")}, model=Decoder)
    hf.export.compressed_tensors(made, tmp_path)
    check(made, Decoder(), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert described["config_groups"]["group_1"]["targets"] == ["up"]
    assert set(described["config_groups"]["group_0"]["targets"]) == {"embed", "head"}
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["steps"] == 3 and torch.equal(stored["down.weight"], made.down.weight)
    assert not any("parametrizations" in name or "quantizer" in name for name in stored)


def test_a_group_of_linear_layers_names_the_others(tmp_path: Path) -> None:
    made = prepared({"0": hf.qat.preset("w4a16"), "2": None})
    hf.export.compressed_tensors(made, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert described["ignore"] == ["2"] and described["config_groups"]["group_0"]["targets"] == ["Linear"]
    check(made, network(), tmp_path)


@pytest.mark.parametrize(("preset", "model"), [("w4a8", network), ("w8a16", Decoder), ("w4a16", Decoder)])
def test_a_converted_model_is_written_as_before(
    preset: str, model: Callable[[], torch.nn.Module], tmp_path: Path
) -> None:
    made = prepared(hf.qat.preset(preset), model=model)
    hf.export.compressed_tensors(made, tmp_path / "prepared")
    hf.export.compressed_tensors(hf.qat.convert(made), tmp_path / "converted")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "prepared" / name).read_bytes() == (tmp_path / "converted" / name).read_bytes()
    check(made, model(), tmp_path / "converted")


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_a_model_of_transformers_is_loaded_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=48, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    model = LlamaForCausalLM(settings).to(torch.bfloat16)
    weight = hf.qat.Quantizer(dtype=torch.int4, granularity=hf.PerGroup(32), scale_dtype=torch.bfloat16)
    hf.qat.prepare(model, {"lm_head": None, torch.nn.Linear: hf.qat.Config(weight=weight)})
    hf.export.compressed_tensors(model.eval(), tmp_path)
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    weights = hf.qat.quantized_weights(model)
    assert len(weights) == 7
    for name, tensor in weights.items():
        found = read.get_parameter(name)
        assert torch.equal(found.view(torch.int16), tensor.dequantize().view(torch.int16)), name
    assert torch.equal(read.lm_head.weight, model.lm_head.weight)


def conv() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Unflatten(1, (4, 10)), torch.nn.Conv1d(4, 4, 3))


def without_rows() -> torch.nn.Module:
    layer = torch.nn.Linear(40, 1, bias=False)
    layer.weight = torch.nn.Parameter(torch.empty(0, 40))
    return torch.nn.Sequential(layer)


def quantizer(**arguments: Any) -> hf.qat.Config:
    return hf.qat.Config(weight=hf.qat.Quantizer(**arguments))


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        (hf.qat.preset("w4a16"), {"layout": "marlin"}, "layout"),
        (hf.qat.preset("w4a16"), {"layout": "float-quantized"}, "need the layout pack-quantized"),
        (hf.qat.preset("w8a8-fp8"), {"layout": "pack-quantized"}, "need the layout float-quantized"),
        (hf.qat.preset("w4a16"), {"model": conv}, "not the weight of a Linear or an Embedding"),
        (hf.qat.preset("w4a16"), {"dtype": torch.bfloat16}, "scale_dtype=torch.bfloat16"),
        (quantizer(granularity=hf.PerChannel(1)), {}, "one for each row"),
        (quantizer(dtype=torch.int16), {}, "at most 8 bits"),
        (hf.qat.preset("w4a16"), {"model": without_rows}, "weight has no elements"),
        (quantizer(mode="fixed", scale=0.1, zero_point=300, symmetric=False), {}, "zero point that is no"),
        (hf.qat.Config(activation=hf.qat.Quantizer()), {}, "no quantized weight"),
        (
            hf.qat.Config(weight=hf.qat.Quantizer(), activation=hf.qat.Quantizer(range=(-127, 127))), {},
            "uses all codes of a signed format",
        ),
        (
            {"0": hf.qat.preset("w8a8"), "2": hf.qat.Config(activation=hf.qat.Quantizer())}, {},
            "the inputs of 2 are quantized and their weights are not",
        ),
    ],
)  # fmt: skip
def test_what_the_format_lacks_is_refused(
    settings: Any, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    layout = options.pop("layout", None)
    made = prepared(settings, **options)
    with pytest.raises(hf.HoldfastError, match=words):
        hf.export.compressed_tensors(made, tmp_path / "out", layout=layout)
    assert not list(tmp_path.iterdir())


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    model = hf.qat.prepare(network(), hf.qat.preset("w8a8"))
    with pytest.raises(hf.InvalidArgs, match=r"the input of 0\.weight has no scale: its quantizer"):
        hf.export.compressed_tensors(model, tmp_path / "out")
    with pytest.raises(hf.InvalidArgs, match="model is a str; it must be a torch"):
        hf.export.compressed_tensors("model", tmp_path / "out")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_quantizers_that_are_switched_off_are_refused(tmp_path: Path) -> None:
    """The file would say that the model computes with codes."""
    model = prepared(hf.qat.preset("w8a8"))
    for quantizer, said in (
        (model[2].input_quantizer.fake_quantize, "input of 2.weight is switched off"),
        (model[0].parametrizations.weight[0].fake_quantize, "the quantizer of 0.weight is switched off"),
    ):
        quantizer.disable_fake_quant()
        with pytest.raises(hf.HoldfastError, match=said):
            hf.export.compressed_tensors(model, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()

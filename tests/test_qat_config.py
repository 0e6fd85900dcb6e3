"""Tests of hf.qat: configurations, patterns and their precedence, and refused calls."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import holdfast as hf

W8, W4 = hf.qat.preset("w8a16"), hf.qat.preset("w4a16")
LEARNED = hf.qat.Quantizer(mode="learned")


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    block = OrderedDict(fc=nn.Linear(4, 4), norm=nn.LayerNorm(4), out=nn.Linear(4, 4))
    return nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(10, 4), encoder=nn.Sequential(block), head=nn.Sequential(nn.Linear(4, 2))
        )
    )


def bits(config: Any) -> dict[str, int]:
    """The bits of each quantized weight."""
    found = hf.qat.quantized_weights(hf.qat.prepare(model_of(), config))
    return {name.removesuffix(".weight"): tensor.format.bits for name, tensor in found.items()}


EVERY = ("embed", "encoder.fc", "encoder.out", "head.0")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (W8, dict.fromkeys(EVERY, 8)),
        ({"encoder.*": W8}, {"encoder.fc": 8, "encoder.out": 8}),
        ({"encoder": W8}, {"encoder.fc": 8, "encoder.out": 8}),
        ({"*.fc": W8, "e*": W4}, {"embed": 4, "encoder.fc": 8, "encoder.out": 4}),
        ({"head": None, "*": W8}, dict.fromkeys(EVERY[:3], 8)),
        ({"*.norm": None, "*": W8}, dict.fromkeys(EVERY, 8)),
        ({nn.Embedding: W4, nn.Linear: W8}, dict.fromkeys(EVERY, 8) | {"embed": 4}),
        ({nn.LayerNorm: None, "head.?": W8}, {"head.0": 8}),
        ({lambda name, module: name.endswith("out"): W4, nn.Linear: W8},
         {"encoder.fc": 8, "encoder.out": 4, "head.0": 8}),
        ({lambda name, module: "encoder" not in name: W4}, {"embed": 4, "head.0": 4}),
    ],
)  # fmt: skip
def test_the_first_pattern_that_fits_decides(config: Any, expected: dict[str, int]) -> None:
    assert bits(config) == expected


def test_a_module_in_several_places_fits_by_any_of_its_names() -> None:
    def tied() -> nn.ModuleDict:
        layer = nn.Linear(4, 4)
        decoder = nn.ModuleDict({"first": layer, "second": nn.Linear(4, 4)})
        return nn.ModuleDict({"encoder": nn.Sequential(layer), "decoder": decoder})

    def bits_of(config: Any) -> dict[str, int]:
        found = hf.qat.quantized_weights(hf.qat.prepare(tied(), config))
        return {name.removesuffix(".weight"): tensor.format.bits for name, tensor in found.items()}

    shared = {"encoder.0": 4, "decoder.first": 4}
    assert bits_of({"decoder.first": W4}) == shared
    assert bits_of({"decoder": W4}) == shared | {"decoder.second": 4}
    assert bits_of({"encoder": W4, "decoder": W8}) == shared | {"decoder.second": 8}
    assert bits_of({"decoder.f*": None, "*": W8}) == {"decoder.second": 8}
    assert bits_of({lambda name, module: name.endswith("first"): W4}) == shared
    with pytest.raises(hf.InvalidArgs, match=r"The modules are .* decoder, decoder.first, decoder.second"):
        hf.qat.prepare(tied(), {"decoder.third": W4})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"decoder.*": W8}, "the pattern 'decoder.*' matches no module. The modules are embed, encoder, enc"),
        ({nn.Conv2d: W8}, "Conv2d'> matches no module"),
        ({"*": W8, "missing": None}, "the pattern 'missing' matches no module"),
        ({"embed": hf.qat.Config(activation=LEARNED)}, "the pattern 'embed' matches no layer that can be"),
        ({"encoder.norm": W8}, "the pattern 'encoder.norm' matches no layer that can be quantized"),
        ({"*": W8, "head": None}, "the pattern 'head' changes nothing: earlier patterns decide"),
        ({nn.Linear: W8, "encoder": W4}, "the pattern 'encoder' changes nothing"),
        ({3: W8}, "the pattern 3 is an int; it must be a name of modules"),
        ({int: W8}, "it must be a name of modules with wildcards, a subclass of torch.nn.Module"),
        ({"*": "w8a8"}, "the pattern '*' has 'w8a8'; it must have a hf.qat.Config or None"),
        ({}, "config is {}; it must be a hf.qat.Config"),
        ("w8a8", "config is 'w8a8'; it must be a hf.qat.Config, such as hf.qat.preset('w8a8')"),
        (hf.qat.Config(weight=LEARNED, parameters=("w1",)), "matches no layer that can be quantized"),
        (hf.qat.Config(weight=LEARNED, parameters=("w1", "w2")), "matches no module with a parameter w1 or"),
        ({"encoder": hf.qat.Config(weight=LEARNED, parameters=("weight", "w2"))},
         "'encoder.fc', a Linear, has no parameter w2; it has weight, bias"),
        (hf.qat.preset("w4a16-g32"),
         "embed.weight cannot be quantized as configured: group_size 32 does not divide axis 1"),
        (hf.qat.Config(weight=hf.qat.Quantizer(granularity=hf.PerChannel(2))), "axis 2 is out of range"),
    ],
)  # fmt: skip
def test_a_refused_preparation_leaves_the_model_unchanged(config: Any, said: str) -> None:
    model = model_of()
    shown = str(model)
    with pytest.raises(hf.InvalidArgs) as refused:
        hf.qat.prepare(model, config)
    assert said in str(refused.value)
    assert str(model) == shown and not any(module._forward_pre_hooks for module in model.modules())


def prepared_twice(model: nn.Module) -> None:
    hf.qat.prepare(model, {"encoder.fc": W8})
    hf.qat.prepare(model, W4)


def input_prepared_twice(model: nn.Module) -> None:
    for _ in range(2):
        hf.qat.prepare(model, {"encoder.fc": hf.qat.Config(activation=LEARNED)})


def attribute_named_input_quantizer(model: Any) -> None:
    model.encoder.fc.input_quantizer = None
    hf.qat.prepare(model, {"encoder.fc": hf.qat.Config(activation=LEARNED)})


def prepared_after_convert(model: nn.Module) -> None:
    hf.qat.prepare(hf.qat.convert(hf.qat.prepare(model, W8)), W4)


def converted_twice(model: nn.Module) -> None:
    hf.qat.convert(hf.qat.convert(hf.qat.prepare(model, W8)))


def unobserved_input(model: nn.Module) -> None:
    hf.qat.convert(hf.qat.prepare(model, {"head": hf.qat.preset("w8a8")}))


def unobserved_input_of_a_layer(model: nn.Module) -> None:
    hf.qat.convert(hf.qat.prepare(nn.Linear(4, 4), hf.qat.preset("w8a8")))


def unobserved_weight(model: nn.Module) -> None:
    hf.qat.convert(hf.qat.prepare(model, hf.qat.Config(weight=hf.qat.Quantizer(mode="ema"))))


def unobserved_codes(model: nn.Module) -> None:
    hf.qat.quantized_weights(hf.qat.prepare(model, hf.qat.Config(weight=hf.qat.Quantizer(mode="ema"))))


def nan_in_a_weight(model: Any) -> None:
    model.head[0].weight.data[0, 0] = float("nan")
    hf.qat.convert(hf.qat.prepare(model, hf.qat.Config(weight=hf.qat.Quantizer(mode="fixed", scale=1.0))))


def nan_and_learned(model: Any) -> None:
    model.head[0].weight.data[0, 0] = float("nan")
    hf.qat.prepare(model, hf.qat.Config(weight=LEARNED))


def other_parametrization(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.head[0])
    hf.qat.prepare(model, W8)


def pruned(model: Any) -> None:
    nn.utils.prune.l1_unstructured(model.head[0], "weight", 0.5)
    hf.qat.prepare(model, W8)


def half_of_a_tie(model: Any) -> None:
    model.encoder.out.weight = model.encoder.fc.weight
    hf.qat.prepare(model, {"encoder.fc": W8})


def one_name_of_two_in_a_layer(model: Any) -> None:
    model.encoder.fc.again = model.encoder.fc.weight
    hf.qat.prepare(model, {"encoder.fc": W8})


def two_quantizers_of_a_tie(model: Any) -> None:
    model.encoder.out.weight = model.encoder.fc.weight
    hf.qat.prepare(model, {"encoder.fc": W8, "encoder.out": W4})


def sparse_table(model: Any) -> None:
    model.embed.sparse = True
    hf.qat.prepare(model, W8)


def lazy_layer(model: Any) -> None:
    model.append(nn.LazyLinear(3))
    hf.qat.prepare(model, W8)


def integer_weight(model: Any) -> None:
    model.head[0].weight = nn.Parameter(torch.zeros(2, 4, dtype=torch.int8), requires_grad=False)
    hf.qat.prepare(model, W8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (prepared_twice, "encoder.fc.weight is quantized already; a layer is prepared once"),
        (input_prepared_twice, "the input of 'encoder.fc' is quantized already"),
        (prepared_after_convert, "embed.weight is quantized already"),
        (attribute_named_input_quantizer, "'encoder.fc' has an attribute input_quantizer of its own"),
        (converted_twice, "the model has no layer to convert; call hf.qat.prepare first, and convert once"),
        (hf.qat.convert, "the model has no layer to convert; call hf.qat.prepare first"),
        (unobserved_input, "the input of 'head.0' has no scale: its quantizer has seen no training batch"),
        (unobserved_input_of_a_layer, "the input of the model has no scale"),
        (unobserved_weight, "embed.weight has no scale"),
        (unobserved_weight, "is never called, prepare its weight with another mode than"),
        (unobserved_codes, "embed.weight has no scale: its quantizer has seen no training batch"),
        (nan_in_a_weight, "head.0.weight has NaN in it, which has no code"),
        (nan_and_learned, "head.0.weight cannot be quantized as configured: the scale cannot be initialized"),
        (other_parametrization, "head.0.weight has the parametrization _WeightNorm; remove it first"),
        (pruned, "head.0.weight is no parameter: a hook computes it, such as those of weight_norm"),
        (half_of_a_tie, "encoder.fc.weight is shared with encoder.out.weight, which is not to be quantized"),
        (one_name_of_two_in_a_layer, "encoder.fc.weight is shared with encoder.fc.again, which is not to be"),
        (two_quantizers_of_a_tie, "encoder.fc.weight and encoder.out.weight are one weight that is to be"),
        (sparse_table, "'embed' is an embedding with sparse"),
        (lazy_layer, "has no shape yet; run one batch"),
        (integer_weight, "head.0.weight is torch.int8; accepted are float16"),
        (lambda model: hf.qat.prepare("model", W8), "model is a str; it must be a torch.nn.Module"),
        (lambda model: hf.qat.convert("model"), "model is a str; it must be a torch.nn.Module"),
        (lambda model: hf.qat.quantized_weights("model"), "model is a str; it must be a torch.nn.Module"),
        (lambda model: hf.qat.activation_quantizers("model"), "model is a str; it must be a torch.nn.Module"),
        (lambda model: hf.qat.convert(model, for_loading=1), "for_loading is 1; it must be True or False"),
    ],
)
def test_refused_calls(call: Any, said: str) -> None:
    model = model_of()
    with pytest.raises(hf.InvalidArgs) as refused:
        call(model)
    assert said in str(refused.value)


def test_a_refused_conversion_leaves_the_model_unchanged() -> None:
    model = model_of()
    hf.qat.prepare(model, {"embed": W8, "head": hf.qat.preset("w8a8")})
    shown = str(model)
    with pytest.raises(hf.InvalidArgs, match="The model is unchanged"):
        hf.qat.convert(model)
    assert str(model) == shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"mode": "sometimes"},
            "mode is 'sometimes'; accepted are 'learned', 'batch', 'ema', 'fixed'",
        ),
        ({"dtype": torch.int32}, "dtype is torch.int32; accepted are"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be a dtype of torch"),
        ({"range": (-7,)}, "range is (-7,); it must be (q_min, q_max)"),
        ({"range": (-700, 7)}, "-700"),
        ({"granularity": 3}, "granularity is 3; accepted are"),
        ({"granularity": hf.PerGroup(0)}, "group_size is 0; it must be a whole number of at least 1"),
        ({"granularity": hf.PerChannel("0")}, "axis is '0'; it must be a whole number"),  # type: ignore[arg-type]
        ({"mode": "fixed", "scale": 0.1, "zero_point": 1.5}, "zero_point is 1.5; in mode fixed it must be"),
        ({"ste": "sharp"}, "ste is 'sharp'; accepted are"),
        ({"momentum": 2}, "momentum is 2"),
        ({"start_step": -1}, "start_step is -1"),
        ({"scale_dtype": torch.int8}, "scale_dtype is torch.int8; accepted are torch.float32"),
        ({"positive": "exp"}, "positive is 'exp'; it must be True or False"),
        ({"mode": "learned", "dtype": torch.float8_e4m3fn}, "there is no gradient of the scale"),
        ({"mode": "ema", "scale": 1.0}, "scale is given, but mode ema computes it from the data"),
        ({"mode": "fixed", "scale": torch.ones(3)}, "it must be one number, which holds for every scale"),
        ({"dtype": torch.float8_e4m3fn, "symmetric": False}, "zero point"),
    ],
)
def test_refused_quantizers(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(hf.HoldfastError) as refused:
        hf.qat.Quantizer(**arguments)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "a Config needs one of them"),
        ({"weight": torch.int8}, "weight is torch.int8; it must be a hf.qat.Quantizer"),
        ({"activation": hf.qat.Quantizer(mode="fixed")}, "mode fixed, which needs a scale"),
        ({"activation": hf.qat.Quantizer(mode="learned", granularity=hf.PerToken())}, "is per tensor"),
        (
            {"activation": hf.qat.Quantizer(mode="fixed", scale=0.1, granularity=hf.PerChannel(-1))},
            "a fixed scale of an activation is per tensor. Use PerTensor(), or another mode.",
        ),
        ({"activation": LEARNED, "parameters": ("w",)}, "pass weight="),
        ({"weight": LEARNED, "parameters": "w"}, "parameters is 'w'; it must be names"),
    ],
)
def test_refused_configs(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(hf.InvalidArgs) as refused:
        hf.qat.Config(**arguments)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", hf.qat.presets())
def test_every_preset_trains_and_converts(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 128)
    config = hf.qat.preset(name)
    hf.qat.prepare(model, {"2": None, "*": config})
    model(x).sum().backward()
    expected = model.eval()(x)
    (tensor,) = hf.qat.quantized_weights(model).values()
    assert tensor.format.bits == int(name[1])
    assert (config.activation is None) == ("a16" in name)
    assert torch.equal(hf.qat.convert(model)(x), expected)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(hf.HoldfastError, match="preset is 'w3a3'; accepted are 'w8a16', 'w8a8'"):
        hf.qat.preset("w3a3")


def test_a_scale_in_a_tensor_is_a_number() -> None:
    given, expected = (hf.qat.Quantizer(mode="fixed", scale=scale) for scale in (torch.tensor(0.5), 0.5))
    assert given == expected and hash(given) == hash(expected)


def test_records_are_frozen_equal_and_hashable() -> None:
    one = hf.qat.Quantizer(dtype=hf.formats.INT4, mode="dynamic")
    other = hf.qat.Quantizer(dtype=torch.int4, granularity=hf.PerToken())
    assert one == other and hash(one) == hash(other) and one.format is hf.formats.INT4
    assert hf.qat.Config(weight=one) == hf.qat.Config(weight=other)
    with pytest.raises(AttributeError):
        one.mode = "ema"  # type: ignore[misc]


def test_a_layer_that_is_never_called_is_named_with_the_way_out() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.layer.weight, self.layer.bias)

    model = hf.qat.prepare(Functional(), hf.qat.preset("w8a8"))
    model(torch.ones(2, 4))
    said = "the input of 'layer' has no scale.* never called.* prepare it without an activation quantizer"
    with pytest.raises(hf.InvalidArgs, match=said):
        hf.qat.convert(model)
    model = hf.qat.prepare(Functional(), hf.qat.preset("w8a16"))
    expected = model(torch.ones(2, 4))
    assert torch.equal(hf.qat.convert(model.eval())(torch.ones(2, 4)), expected)


def test_weights_of_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        inference = nn.Linear(4, 4)
        hf.qat.prepare(nn.Linear(4, 4), W4)
    model = nn.Sequential(nn.Linear(4, 4), inference)
    names = list(model.state_dict())
    with pytest.raises(hf.InvalidArgs, match=r"1\.weight was made in torch\.inference_mode"):
        hf.qat.prepare(model, W4)
    assert list(model.state_dict()) == names

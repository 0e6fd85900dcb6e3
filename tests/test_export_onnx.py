"""Models written to ONNX give the codes of holdfast in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import holdfast as hf
from holdfast.core.formats import INTEGERS, Format

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (6, 32)
COMMON = [hf.formats.INT8, hf.formats.INT4, hf.formats.INT2]
GRANULARITIES = (
    hf.PerTensor(), hf.PerChannel(0), hf.PerChannel(-1), hf.PerGroup(8), hf.PerGroup(2, axis=0), hf.PerToken()
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def translations_read_once() -> Iterator[None]:
    """torch reads the sources of its 500 translations for each export, which takes most of the time."""
    from torch.onnx._internal._lazy_import import onnxscript_apis

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(onnxscript_apis, "get_torchlib_ops"):
            patch.setattr(onnxscript_apis, "get_torchlib_ops", cache(onnxscript_apis.get_torchlib_ops))
        yield


def with_ties(
    scale: torch.Tensor, granularity: hf.Granularity, dtype: torch.dtype, name: str
) -> torch.Tensor:
    """Multiples of half a scale: half of the quotients are ties. Some are out of the range of the codes."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    halves = torch.randint(-40, 40, SHAPE, generator=generator).to(torch.int8)
    return hf.dequantize(halves, scale.float() / 2, granularity=granularity).to(dtype)


class Quantizer(torch.nn.Module):
    """A weight and an activation with the same scales: the weight as a fake-quantized tensor or as codes."""

    def __init__(
        self, codes: Format, granularity: hf.Granularity, symmetric: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.codes, self.granularity, self.dtype = codes, granularity, dtype
        made = hf.choose_scale(
            torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), dtype=codes.torch,
            granularity=granularity, symmetric=symmetric,
        )  # fmt: skip
        scale, zero_point = (made, None) if isinstance(made, torch.Tensor) else made
        self.register_buffer("scale", scale.to(dtype))
        self.register_buffer("zero_point", zero_point)
        name = f"{codes.name} {granularity} {symmetric}"
        self.register_buffer("weight", with_ties(self.scale, granularity, dtype, name))
        self.register_buffer("stored", self.quantized(self.weight))

    def quantized(self, x: torch.Tensor) -> torch.Tensor:
        return hf.quantize(
            x, self.scale, self.zero_point, dtype=self.codes.torch, granularity=self.granularity
        )

    def faked(self, x: torch.Tensor) -> torch.Tensor:
        return hf.fake_quantize(
            x, self.scale, self.zero_point, dtype=self.codes.torch, granularity=self.granularity
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stored = hf.dequantize(
            self.stored, self.scale, self.zero_point, dtype=self.dtype, granularity=self.granularity,
            code_dtype=self.codes.torch,
        )  # fmt: skip
        return self.faked(x), self.faked(self.weight), stored


class Quantizers(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, codes: list[Format]) -> None:
        super().__init__()
        self.each = torch.nn.ModuleList(
            Quantizer(code, granularity, symmetric, dtype)
            for code in codes
            for granularity in (GRANULARITIES if code in COMMON else GRANULARITIES[1:2])
            for symmetric in (True, False)
            if code.signed or not symmetric
        )

    def forward(self, *inputs: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [quantizer(x) for quantizer, x in zip(self.each, inputs, strict=True)]

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(quantizer.weight.flip(0) for quantizer in self.each)


def written(model: torch.nn.Module, args: tuple[Any, ...], path: Path, **options: Any) -> onnx.ModelProto:
    hf.export.onnx(model.eval(), args, path, **options)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def exposed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with further outputs, the inputs and codes of each QuantizeLinear. All are float32."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
    wanted = [output.name for output in graph.output]
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            wanted += [name for name in (*node.input, *node.output) if name]
    del graph.output[:]
    for name in dict.fromkeys(wanted):
        graph.node.append(helper.make_node("Cast", [name], [f"{name}:shown"], to=TensorProto.FLOAT))
        graph.output.append(helper.make_tensor_value_info(f"{name}:shown", TensorProto.FLOAT, None))
    return copy


def run(
    proto: onnx.ModelProto, inputs: tuple[torch.Tensor, ...], level: str = "ENABLE_BASIC"
) -> dict[str, torch.Tensor]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    session = onnxruntime.InferenceSession(exposed(proto).SerializeToString(), options)
    values = {}
    for known, x in zip(session.get_inputs(), inputs, strict=True):
        if x.dtype == torch.bfloat16:
            raw = x.contiguous().view(torch.int16).numpy()
            values[known.name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                raw, TensorProto.BFLOAT16
            )
        else:
            values[known.name] = onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())
    names = [output.name for output in session.get_outputs()]
    results = session.run_with_ort_values(names, values)
    return {
        name.removesuffix(":shown"): torch.from_numpy(np.array(result.numpy()))
        for name, result in zip(names, results, strict=True)
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes_and_values_have_our_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Formats, granularities and symmetries, of weights and activations."""
    model = Quantizers(dtype, list(INTEGERS.values()) if dtype == torch.float32 else COMMON)
    inputs = model.inputs()
    proto = written(model, inputs, tmp_path / "model.onnx")
    assert proto.opset_import[0].version == 25
    found = run(proto, inputs, "DISABLE_ALL" if dtype == torch.float16 else "ENABLE_BASIC")
    names = [output.name for output in proto.graph.output]
    expected = [result.float() for results in model(*inputs) for result in results]
    for name, right in zip(names, expected, strict=True):
        assert same_bits(found[name], right), name
    stored = {t.name: t for t in proto.graph.initializer if t.name.endswith("_quantized")}
    assert len(stored) == 2 * len(model.each)
    for i, (quantizer, x) in enumerate(zip(model.each, inputs, strict=True)):
        assert torch.equal(found[f"{names[3 * i]}_codes"], quantizer.quantized(x).float())
        for tensor in (stored[f"each.{i}.{name}_quantized"] for name in ("weight", "stored")):
            assert tensor.data_type == getattr(TensorProto, quantizer.codes.name.upper())
            array = onnx.numpy_helper.to_array(tensor).astype(np.int32)
            assert np.array_equal(array, quantizer.stored.numpy())
    real = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    assert not [t.name for t in proto.graph.initializer if t.data_type in real and tuple(t.dims) == SHAPE]


class Function(torch.nn.Module):
    """A module of one function of the input."""

    def __init__(self, function: Any, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.function, self.names = function, list(buffers)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, **{name: getattr(self, name) for name in self.names})


SCALES_OF_DATA = (hf.PerTensor(), hf.PerToken(), hf.PerGroup(8))


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_scales_of_the_data_have_our_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Scales per token, group and tensor that the graph computes, symmetric and not, with a dynamic batch."""
    rules: list[dict[str, Any]] = [
        {"dtype": codes, "granularity": granularity, "symmetric": symmetric}
        for codes in (torch.int8, torch.int4)
        for granularity in SCALES_OF_DATA
        for symmetric in (True, False)
    ]
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0], x[0, 1, 8:16] = 0, x[0, 1, 8:16].abs()
    model = Function(lambda x: [hf.dynamic_fake_quantize(x, **rule) for rule in rules])
    batch = torch.export.Dim("batch", min=2, max=64)
    proto = written(model, (x[:2],), tmp_path / "model.onnx", dynamic_shapes=((), {0: batch})[1:])
    names = [output.name for output in proto.graph.output]
    found = run(proto, (x,))
    for name, rule, right in zip(names, rules, model(x), strict=True):
        assert same_bits(found[name], right.float()), rule
        made = hf.dynamic_quantize(x, **rule)
        assert torch.equal(found[f"{name}_codes"], made[0].float())


def test_a_range_of_codes_is_kept(tmp_path: Path) -> None:
    x = torch.cat(
        [with_ties(torch.tensor(0.07), hf.PerTensor(), torch.float32, "x"), torch.full((1, 32), 1e9)]
    )
    x = torch.cat([x, -x, torch.full((1, 32), -torch.inf)])
    scales = {hf.PerTensor(): torch.tensor(0.07), hf.PerChannel(1): torch.linspace(0.01, 0.3, 32)}
    ends = ((-127, 127), (-3, 3), (1, 250), (-2, 1))
    calls = [
        (scale, torch.full_like(scale, 1, dtype=torch.int32),
         {"granularity": granularity, "q_min": q_min, "q_max": q_max})
        for granularity, scale in scales.items() for q_min, q_max in ends
    ]  # fmt: skip
    model = Function(lambda x: [hf.fake_quantize(x, scale, zero, **rule) for scale, zero, rule in calls])
    proto = written(model, (x,), tmp_path / "model.onnx")
    found = run(proto, (x,))
    for output, right, (scale, zero, rule) in zip(proto.graph.output, model(x), calls, strict=True):
        assert same_bits(found[output.name], right), rule
        carried = hf.quantize(x, scale, zero, dtype=torch.float32, **rule)
        assert torch.equal(found[f"{output.name}_codes"], carried)


def test_embedding_of_codes(tmp_path: Path) -> None:
    weight = torch.randn(10, 8)
    scale = hf.choose_scale(weight, granularity=hf.PerChannel(0))
    model = Function(
        lambda i, w, s: hf.embedding(i, hf.fake_quantize(w, s, granularity=hf.PerChannel(0))),
        w=weight,
        s=scale,
    )
    indices = torch.tensor([[1, 9], [0, 3]])
    proto = written(model, (indices,), tmp_path / "model.onnx")
    assert same_bits(run(proto, (indices,))[proto.graph.output[0].name], model(indices))


FAR_ZERO = {"mode": "fixed", "symmetric": False, "scale": 0.1, "zero_point": 300}


def fake(**arguments: Any) -> Function:
    return Function(lambda x: hf.fake_quantize(x, 0.1, **arguments))


@pytest.mark.parametrize(
    ("model", "opset", "words"),
    [
        (fake(dtype=torch.int4), 19, "opset is 19, and ONNX has torch.int4 with .* from opset 21 on"),
        (fake(dtype=torch.int2), 24, "pass opset=25"),
        (fake(granularity=hf.PerGroup(8)), 20, "PerGroup.* from opset 21 on"),
        (fake(), 18, "from opset 19 on"),
        (fake(), 4, "opset is 4"),
        (fake(), 999, "opset is 999; .* up to"),
        (Function(lambda x: hf.dynamic_fake_quantize(x, q_min=-7, q_max=7)), None, "Leave out q_min and"),
        (
            Function(lambda x: torch.cond(x.sum() > 0, lambda x: hf.fake_quantize(x, 0.1), torch.neg, (x,))),
            None, "in a branch or a loop",
        ),
        (Function(lambda x: hf.fake_quantize(x, 0.1, 300)), None, "zero points from 300 to 300"),
        (Function(lambda x: hf.fake_quantize(x.double(), 0.1)), None, "float64|DOUBLE"),
        (Function(lambda x: hf.quantize(x, 0.1, dtype=torch.int4, packed=True)), None, "Leave out packed"),
        (Function(lambda x: hf.quantize(x, 0.1, dtype=torch.float16, q_min=0, q_max=1)), None, "no ONNX"),
    ],
)  # fmt: skip
def test_what_onnx_lacks_is_refused(
    model: torch.nn.Module, opset: int | None, words: str, tmp_path: Path
) -> None:
    with pytest.raises((hf.Unsupported, hf.InvalidArgs), match=words):
        hf.export.onnx(model.eval(), (torch.ones(2, 32),), tmp_path / "model.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "dtype", "words"),
    [
        ({"weight": {}}, torch.float64, "'2.weight' has a scale of float64"),
        ({"activation": {"mode": "ema"}}, torch.float64, "'2.input' has the type DOUBLE"),
        (
            {"activation": {"range": (0, 100), "symmetric": False}},
            torch.float32,
            "'2.input' uses the codes",
        ),
        ({"activation": {"granularity": hf.PerChannel(-1)}}, torch.float32, "'2.input' finds scales"),
        ({"weight": FAR_ZERO}, torch.float32, "'2.weight' has zero points from 300"),
        ({"activation": FAR_ZERO}, torch.float32, "'2.input' has zero points from 300"),
    ],
)
def test_a_refusal_names_the_weight_or_the_input(
    settings: dict[str, Any], dtype: torch.dtype, words: str, tmp_path: Path
) -> None:
    config = hf.qat.Config(**{name: hf.qat.Quantizer(**given) for name, given in settings.items()})
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to(dtype)
    x = torch.randn(3, 8, dtype=dtype)
    hf.qat.prepare(model, {"2": config})(x)
    with pytest.raises(hf.Unsupported, match=words):
        hf.export.onnx(model.eval(), (x,), tmp_path / "model.onnx")


def test_arguments_of_another_type_are_refused(tmp_path: Path) -> None:
    x, path = torch.ones(2, 32), tmp_path / "model.onnx"
    with pytest.raises(hf.InvalidArgs, match="model is a str; it must be a torch"):
        hf.export.onnx("model", (x,), path)  # type: ignore[arg-type]
    with pytest.raises(hf.InvalidArgs, match=r"args is a Tensor; it must be the tuple .* as \(x,\)"):
        hf.export.onnx(fake().eval(), x, path)  # type: ignore[arg-type]
    written(fake(), (x,), path)
    for args in (x, (3,), 3):
        with pytest.raises(hf.InvalidArgs, match=r"args is .*; it must be a tuple of tensors"):
            hf.export.check_onnx(path, args)  # type: ignore[arg-type]


def test_a_model_in_training_mode_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(hf.nn.FakeQuantize())
    with pytest.raises(hf.InvalidArgs, match="training mode"):
        hf.export.onnx(model, (torch.ones(2, 32),), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir()) and not model[0].report()["is_set"]


class Network(torch.nn.Module):
    """Convolutions, a linear layer, an embedding and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 32)
        self.conv = torch.nn.Conv1d(32, 32, 3, padding=1)
        self.up = torch.nn.ConvTranspose1d(32, 32, 2, stride=2)
        self.linear = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.up(self.conv(self.embed(tokens).mT)).mT
        return self.head(torch.relu(self.linear(x)))


def quantizer(**arguments: Any) -> hf.qat.Quantizer:
    return hf.qat.Quantizer(**arguments)


CONFIGS = {
    "w8a8": hf.qat.preset("w8a8"),
    "w4a8-dynamic": hf.qat.preset("w4a8-dynamic"),
    "w2a16-g32": hf.qat.preset("w2a16-g32"),
    "int4, not symmetric": hf.qat.Config(
        weight=quantizer(dtype=torch.int4, granularity=hf.PerGroup(8, 1), symmetric=False, mode="learned"),
        activation=quantizer(dtype=torch.uint8, symmetric=False, mode="ema"),
    ),
    "w8a8-fp8": hf.qat.preset("w8a8-fp8"),
    "scales of 16 bits": hf.qat.Config(
        weight=quantizer(granularity=hf.PerChannel(0), scale_dtype=torch.bfloat16, mode="ema"),
        activation=quantizer(mode="dynamic", scale_dtype=torch.float16),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "converted"),
    [*((name, name != "w4a8-dynamic") for name in CONFIGS), ("scales of 16 bits", False)],
)
def test_a_trained_model(name: str, converted: bool, tmp_path: Path) -> None:
    """The file has the codes of every weight, and onnxruntime finds the codes of every activation."""
    torch.manual_seed(0)
    model, config = Network(), CONFIGS[name]
    hf.qat.prepare(model, config)
    tokens = torch.randint(0, 16, (2, 6))
    model(tokens).sum().backward()
    model.eval()
    weights, expected = hf.qat.quantized_weights(model), model(tokens)
    if converted:
        hf.qat.convert(model)
    proto = written(model, (tokens,), tmp_path / "model.onnx")
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    for weight_name, weight in weights.items():
        if f"{weight_name}_quantized" not in arrays:  # the file has a shared weight under one of its names
            assert weight_name in ("embed.weight", "head.weight")
            continue
        codes = arrays[f"{weight_name}_quantized"].astype(np.float32)
        assert np.array_equal(codes, weight.codes.float().numpy())
        scale = arrays[f"{weight_name}_scale"]
        assert scale.tobytes() == weight.scale.float().numpy().tobytes()
    found = run(proto, (tokens,))
    if config.activation is None:  # else one other rounding of a sum can move a code of the next layer
        torch.testing.assert_close(found[proto.graph.output[0].name], expected.detach())
    quantizers = [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    assert len(quantizers) == len(hf.qat.activation_quantizers(model))
    for node in quantizers:
        x, scale, zero_point = (found.get(name) for name in node.input)
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        blocked = "block_size" in attributes
        granularity = hf.PerGroup(attributes["block_size"], attributes["axis"]) if blocked else hf.PerTensor()
        codes = hf.quantize(
            x, scale, None if zero_point is None else zero_point.int(), dtype=config.activation.dtype,
            granularity=granularity,
        )  # fmt: skip
        assert torch.equal(found[node.output[0]], codes.float())


def test_check_onnx_finds_every_quantizer_equal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "model.onnx"
    model = hf.qat.prepare(Network(), CONFIGS["int4, not symmetric"])
    tokens = torch.randint(0, 16, (2, 6))
    model(tokens)
    written(model, (tokens,), path)
    checked = hf.export.check_onnx(path, (tokens,))
    assert sorted(c.name for c in checked if c.kind == "weight") == [
        "conv.weight", "head.weight", "linear.weight", "up.weight"
    ]  # fmt: skip
    activations = [c.name for c in checked if c.kind == "activation"]
    assert activations == ["conv.input", "up.input", "linear.input", "head.input"]
    assert all(c.elements > 0 and c.different == 0 for c in checked)
    alone = hf.export.check_onnx(path)
    assert alone == [c for c in checked if c.kind == "weight"]
    with pytest.raises(hf.InvalidArgs, match="has 1 inputs, and 2 tensors"):
        hf.export.check_onnx(path, (tokens, tokens))


def test_check_onnx_of_a_file_whose_subgraphs_read_values_from_outside(tmp_path: Path) -> None:
    """As that of an EmbeddingBag, which torch writes as a Loop."""
    make, value = helper.make_node, helper.make_tensor_value_info
    branches = {
        name: helper.make_graph(
            [make(op, ["y"], [f"{name} result"])],
            name,
            [],
            [value(f"{name} result", TensorProto.FLOAT, [4])],
        )
        for name, op in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }
    nodes = [
        make("Identity", ["x"], ["y"]),
        make("If", ["yes"], ["z"], **branches),
        make("QuantizeLinear", ["z", "scale", "zero"], ["input_codes"]),
    ]
    constants = [
        onnx.numpy_helper.from_array(np.array(given), name)
        for name, given in (("yes", True), ("scale", np.float32(0.25)), ("zero", np.int8(0)))
    ]
    graph = helper.make_graph(
        nodes,
        "branches",
        [value("x", TensorProto.FLOAT, [4])],
        [value("input_codes", TensorProto.INT8, [4])],
        constants,
        value_info=[value("input_codes", TensorProto.INT8, [4])],
    )
    opset = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "model.onnx")
    (checked,) = hf.export.check_onnx(tmp_path / "model.onnx", (torch.tensor([0.3, -1.0, 40.0, -50.0]),))
    assert (checked.name, checked.elements, checked.different) == ("input", 4, 0)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(4, 16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.up.mT)


ROWS = hf.qat.Config(
    weight=quantizer(dtype=torch.int4, granularity=hf.PerToken(), symmetric=False), parameters=("up",)
)


@pytest.mark.parametrize(
    ("model", "config", "names"),
    [
        (Experts(), {Experts: ROWS}, ["up"]),
        (
            torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0),
            hf.qat.preset("w4a8-dynamic"),
            ["self_attn.input", "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.input",
             "linear1.weight", "linear2.input", "linear2.weight"],
        ),
    ],
    ids=["experts", "attention"],
)  # fmt: skip
def test_layers_of_other_kinds(model: Any, config: Any, names: list[str], tmp_path: Path) -> None:
    hf.qat.prepare(model, config)
    x = torch.randn(4, 5, 32)
    model(x)
    written(model, (x,), tmp_path / "model.onnx")
    checked = hf.export.check_onnx(tmp_path / "model.onnx", (x,))
    assert [c.name for c in checked] == names and all(c.different == 0 for c in checked)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(
    ("codes", "granularity"), [(torch.int4, hf.PerTensor()), (torch.int2, hf.PerGroup(2, axis=3))]
)
def test_a_convolution_with_channels_last(
    codes: torch.dtype, granularity: hf.Granularity, converted: bool, tmp_path: Path
) -> None:
    model: Any = torch.nn.Conv2d(8, 16, (1, 4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = hf.qat.Config(weight=hf.qat.Quantizer(dtype=codes, granularity=granularity))
    weight = hf.qat.quantized_weights(hf.qat.prepare(model, config))["weight"].codes
    if converted:
        hf.qat.convert(model)
    strides = model.weight.stride()
    x = torch.randn(2, 8, 5, 5)
    proto = written(model, (x,), tmp_path / "model.onnx")
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert np.array_equal(arrays["weight_quantized"].astype(np.int32), weight.numpy())
    (checked,) = hf.export.check_onnx(tmp_path / "model.onnx", (x,))
    assert checked.name == "weight" and checked.different == 0
    assert model.weight.stride() == strides == (32, 1, 32, 8)


@pytest.mark.parametrize("name", ["w8a8", "int4, not symmetric", "w2a16-g32"])
def test_weights_of_a_bfloat16_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf.qat.prepare(Network().bfloat16(), CONFIGS[name])
    tokens = torch.randint(0, 16, (2, 6))
    model(tokens)
    proto = written(model, (tokens,), tmp_path / "model.onnx")
    checked = hf.export.check_onnx(tmp_path / "model.onnx")
    assert len(checked) == 4 and all(c.different == 0 for c in checked)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    for weight_name, weight in hf.qat.quantized_weights(model).items():
        if weight_name != "embed.weight":  # the head shares it
            codes = arrays[f"{weight_name}_quantized"].astype(np.int32)
            assert np.array_equal(codes, weight.codes.numpy())


def test_input_codes_of_a_bfloat16_model(tmp_path: Path) -> None:
    """onnxruntime has no bfloat16 layers on the CPU: every QuantizeLinear runs alone, with its scale."""
    torch.manual_seed(0)
    model = hf.qat.prepare(Network().bfloat16(), CONFIGS["w8a8"])
    tokens = torch.randint(0, 16, (2, 6))
    model(tokens)
    graph = written(model, (tokens,), tmp_path / "model.onnx").graph
    made = {name: node for node in graph.node for name in node.output}
    stored = {t.name: t for t in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    quantizers = hf.qat.activation_quantizers(model)
    assert len(nodes) == len(quantizers) == 4
    for node, (name, quantizer) in zip(nodes, quantizers.items(), strict=True):
        x, scale, zero_point = node.input
        assert scale == f"{name}.input_scale" and made[x].op_type == "Cast"
        ours = quantizer.scale().detach()
        assert np.array_equal(onnx.numpy_helper.to_array(stored[scale]), ours.float().numpy())
        values = (torch.randint(-300, 300, (4096,)) * ours / 2).bfloat16()  # many ties
        known = onnx.helper.make_tensor_value_info(x, TensorProto.FLOAT, [4096])
        codes = onnx.helper.make_tensor_value_info(node.output[0], TensorProto.INT8, [4096])
        alone = onnx.helper.make_graph([node], "one", [known], [codes], [stored[scale], stored[zero_point]])
        opset = [onnx.helper.make_opsetid("", 21)]
        proto = onnx.helper.make_model(alone, opset_imports=opset, ir_version=10)
        session = onnxruntime.InferenceSession(proto.SerializeToString())
        (found,) = session.run(None, {x: values.float().numpy()})
        assert np.array_equal(found, hf.quantize(values, ours, dtype=torch.int8).numpy())


def test_a_folded_batch_norm_is_in_the_codes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    hf.qat.prepare(model, hf.qat.preset("w4a8"), fold_batch_norm=True)
    x = torch.randn(2, 3, 6, 6)
    model(x)
    proto = written(model, (x,), tmp_path / "model.onnx")
    assert "BatchNormalization" not in [node.op_type for node in proto.graph.node]
    (stored,) = (t for t in proto.graph.initializer if t.name == "0.weight_quantized")
    codes = hf.qat.quantized_weights(model)["0.weight"].codes
    assert np.array_equal(onnx.numpy_helper.to_array(stored).astype(np.int8), codes.numpy())
    assert isinstance(model[1], torch.nn.BatchNorm2d), "the model itself is not converted"
    assert all(c.different == 0 for c in hf.export.check_onnx(tmp_path / "model.onnx", (x,)))


def test_a_difference_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from holdfast.export import onnx_check

    path = tmp_path / "model.onnx"
    x = torch.linspace(-3, 3, 101)
    written(fake(), (x,), path)
    assert [c.different for c in hf.export.check_onnx(path, (x,))] == [0]
    monkeypatch.setattr(
        onnx_check, "quantize", lambda x, scale, *rest, **kwargs: hf.quantize(x, scale * 2, *rest, **kwargs)
    )
    (found,) = hf.export.check_onnx(path, (x,))
    assert 90 < found.different < 101 == found.elements


def test_a_transposed_weight_has_its_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 4)
    model.weight = torch.nn.Parameter(torch.randn(8, 4).t())
    written(hf.qat.prepare(model, hf.qat.preset("w4a16")), (torch.ones(2, 8),), tmp_path / "model.onnx")
    assert [c.name for c in hf.export.check_onnx(tmp_path / "model.onnx")] == ["weight"]


def test_a_weight_without_elements(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1, bias=False))
    model[1].weight = torch.nn.Parameter(torch.empty(0, 4))
    written(hf.qat.prepare(model, hf.qat.preset("w4a16")), (torch.ones(2, 8),), tmp_path / "model.onnx")
    assert [c.elements for c in hf.export.check_onnx(tmp_path / "model.onnx")] == [32, 0]


@pytest.mark.parametrize("codes", [torch.int2, torch.uint2], ids=str)
def test_two_bit_weights_of_tokens_are_loaded(codes: torch.dtype, tmp_path: Path) -> None:
    """A Linear of inputs with three axes is a Transpose and a MatMul."""
    weight = hf.qat.Quantizer(dtype=codes, granularity=hf.PerChannel(0), symmetric=False)
    model = hf.qat.prepare(torch.nn.Linear(32, 16), hf.qat.Config(weight=weight))
    x = torch.eye(32).reshape(2, 16, 32)  # an output is a weight plus a bias, in any order of the sum
    written(model, (x,), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", hf.export.onnx_session_options())
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.equal(torch.from_numpy(y), model(x))


def test_session_options() -> None:
    options = hf.export.onnx_session_options()
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    calls = {
        "onnx": lambda: hf.export.onnx(fake(), (torch.ones(2),), tmp_path / "model.onnx"),
        "onnxruntime": lambda: hf.export.check_onnx(tmp_path / "model.onnx", ()),
        "compressed-tensors": lambda: hf.export.compressed_tensors(fake(), tmp_path),
        "torchao": lambda: hf.export.torchao(fake()),
    }
    for extra, call in calls.items():
        with pytest.raises(ImportError, match=rf"pip install 'holdfast\[{extra}\]'") as caught:
            call()
        assert isinstance(caught.value, hf.HoldfastError)
    with pytest.raises(ImportError, match="torchao"):
        hf.export.TorchaoConfig  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'tflite'"):
        hf.export.tflite  # noqa: B018
    assert not list(tmp_path.iterdir())

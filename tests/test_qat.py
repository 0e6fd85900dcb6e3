"""Tests of hf.qat: prepared and converted models of every kind of layer, format, mode and dtype."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import holdfast as hf
from holdfast.core.bits import canonical

NAN = float("nan")
E4M3 = torch.float8_e4m3fn


class Experts(nn.Module):
    """The experts of a mixture model: a stack of matrices in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 4))
        self.down = nn.Parameter(torch.randn(3, 4, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.relu(torch.bmm(hidden.expand(3, -1, -1), self.up.mT)), self.down.mT).sum(0)


class Attention(nn.Module):
    """Self-attention, or attention whose keys and values have other widths."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.attention, self.sizes = nn.MultiheadAttention(8, 2, batch_first=True, **sizes), sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x[..., :4] if self.sizes else x
        out, _ = self.attention(x, other, value=other)
        return torch.as_tensor(out)


#: A model of each kind of layer, and the shape of its input. Embeddings take indices.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | torch.Tensor]] = {
    "Linear": (lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), (5, 8)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 5, 5)),
    "Conv3d": (lambda: nn.Conv3d(4, 2, 2), (1, 4, 3, 3, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (2, 4, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (1, 4, 4, 4)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 2, 2), (1, 4, 2, 2, 2)),
    "Embedding": (lambda: nn.Embedding(10, 4, padding_idx=0), torch.tensor([[1, 2], [0, 9]])),
    "hf.nn.Embedding": (lambda: hf.nn.Embedding(10, 4), torch.tensor([3, 3, 0])),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 4, mode="sum"), torch.tensor([[1, 2], [0, 9]])),
    "MultiheadAttention": (Attention, (2, 5, 8)),
    "attention of other widths": (lambda: Attention(kdim=4, vdim=4), (2, 5, 8)),
    "experts": (Experts, (5, 4)),
}

ROWS = hf.qat.Quantizer(dtype=torch.int4, granularity=hf.PerToken())

#: Quantizers of weights: every format, granularity and mode.
WEIGHTS: dict[str, dict[str, Any]] = {
    "int8 per tensor": {"mode": "ema"},
    "int8 per channel": {"granularity": hf.PerChannel(0), "scale_dtype": torch.float16},
    "int4 per group, learned": {
        "dtype": torch.int4, "granularity": hf.PerGroup(2, axis=1), "mode": "learned",
        "scale_dtype": torch.bfloat16,
    },
    "uint4 with zero points": {"dtype": torch.uint4, "granularity": hf.PerChannel(0), "symmetric": False},
    "int2, learned with zero points": {"dtype": torch.int2, "mode": "learned", "symmetric": False},
    "int8 per row, fixed": {"granularity": hf.PerToken(), "mode": "fixed", "symmetric": False},
    "int4 of a narrow range": {"dtype": hf.formats.INT4, "range": (-3, 3), "ste": "clipped_identity"},
    "float8": {"dtype": E4M3, "granularity": hf.PerChannel(0), "mode": "ema", "scale_dtype": torch.bfloat16},
    "int16": {"dtype": torch.int16},
}  # fmt: skip


def model_of(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, given = MODELS[name]
    x = given if isinstance(given, torch.Tensor) else torch.randn(given).to(dtype)
    return make().to(dtype), x


def config_of(
    weight: dict[str, Any], name: str = "", activation: hf.qat.Quantizer | None = None
) -> hf.qat.Config:
    parameters = ("up", "down") if name == "experts" else None
    return hf.qat.Config(weight=hf.qat.Quantizer(**weight), activation=activation, parameters=parameters)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(canonical(a), canonical(b))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def evaluated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output in evaluation, without gradients: for weights with gradients torch has other kernels."""
    with torch.no_grad():
        return torch.as_tensor(model.eval()(x))


def train(model: nn.Module, x: torch.Tensor, steps: int = 2, lr: float = 1e-2) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_layer_has_the_bits_of_the_prepared_one(name: str, weight: str) -> None:
    model, x = model_of(name)
    before = {key for key, _ in model.named_parameters()}
    static = hf.qat.Quantizer(mode="ema", symmetric=False)
    assert hf.qat.prepare(model, config_of(WEIGHTS[weight], name, static)) is model
    train(model, x)
    prepared = evaluated(model, x)
    tensors = hf.qat.quantized_weights(model)
    assert tensors.keys() == {key for key in before if "bias" not in key}
    assert hf.qat.convert(model) is model
    assert same(evaluated(model, x), prepared)
    for key, tensor in hf.qat.quantized_weights(model).items():
        owner, _, parameter = key.rpartition(".")
        assert same(getattr(model.get_submodule(owner), parameter), tensors[key].dequantize())
        assert same(tensor.codes.view(torch.uint8), tensors[key].codes.view(torch.uint8))
        assert same(tensor.scale, tensors[key].scale)
        assert tensor.scale.dtype == WEIGHTS[weight].get("scale_dtype", torch.float32)
        assert tensor.codes.dtype == tensor.format.storage and tensor.codes.shape == tensors[key].codes.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("weight", ["int4 per group, learned", "uint4 with zero points", "float8"])
def test_every_dtype(weight: str, dtype: torch.dtype) -> None:
    model, x = model_of("Linear", dtype)
    hf.qat.prepare(model, config_of(WEIGHTS[weight], activation=hf.qat.Quantizer(mode="dynamic")))
    train(model, x)
    prepared = evaluated(model, x)
    assert same(evaluated(hf.qat.convert(model), x), prepared) and prepared.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weight", ["int4 per group, learned", "uint4 with zero points", "float8"])
def test_a_float64_model_is_cast_to_a_narrower_dtype(weight: str, dtype: torch.dtype) -> None:
    model, x = model_of("Linear", torch.float64)
    hf.qat.prepare(model, config_of(WEIGHTS[weight], activation=hf.qat.Quantizer(mode="ema")))
    train(model.double(), x)  # the state of the quantizers is float64, too
    converted = hf.qat.convert(copy.deepcopy(model).eval())
    tensors = hf.qat.quantized_weights(converted)
    for cast in (model, converted):
        found = evaluated(cast.to(dtype), x.to(dtype))
        assert found.dtype == dtype and found.isfinite().all()
        assert not any(kept.dtype == torch.float64 for kept in state(cast).values())
    for key, tensor in hf.qat.quantized_weights(converted).items():
        stored = WEIGHTS[weight].get("scale_dtype", torch.float32)
        assert tensor.scale.dtype == stored and same(tensor.scale, tensors[key].scale.to(stored))
        assert tensor.dequantize().dtype == dtype
    train(model, x.to(dtype))


def test_transformers_conv1d() -> None:
    conv1d = importlib.import_module("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model, x = conv1d(6, 4), torch.randn(3, 4)
    hf.qat.prepare(model, hf.qat.preset("w4a8"))
    train(model, x)
    (tensor,) = hf.qat.quantized_weights(model).values()
    assert tensor.granularity == hf.PerChannel(1) and tensor.scale.shape == (6,)
    prepared = evaluated(model, x)
    assert same(evaluated(hf.qat.convert(model), x), prepared)


@pytest.mark.parametrize("name", ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"])
def test_axis_0_is_the_output_channel(name: str) -> None:
    model, _ = model_of(name)
    hf.qat.prepare(model, config_of({"granularity": hf.PerChannel(0)}))
    (tensor,) = hf.qat.quantized_weights(model).values()
    assert tensor.granularity == hf.PerChannel(1)


def test_a_depthwise_transposed_convolution_has_a_scale_for_each_channel() -> None:
    weights = {}
    for layer in (nn.ConvTranspose2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3, groups=4)):
        with torch.no_grad():
            layer.weight.copy_(torch.arange(-18.0, 18.0).reshape(4, 1, 3, 3))
        hf.qat.prepare(layer, hf.qat.preset("w4a16"))
        weights[type(layer).__name__] = hf.qat.quantized_weights(layer)["weight"]
    transposed, plain = weights.values()
    assert transposed.scale.shape == (4,) and same(transposed.scale, plain.scale)
    assert same(transposed.dequantize(), plain.dequantize())


def test_the_bits_are_those_of_the_functions() -> None:
    weight = torch.arange(-31, 33).reshape(4, 16) / 8  # full of ties
    model = nn.Linear(16, 4, bias=False)
    model.weight.data.copy_(weight)
    hf.qat.prepare(model, hf.qat.preset("w4a16"))
    scale = hf.choose_scale(weight, dtype=torch.int4, granularity=hf.PerChannel(0))
    (tensor,) = hf.qat.quantized_weights(model).values()
    assert same(tensor.codes, hf.quantize(weight, scale, dtype=torch.int4, granularity=hf.PerChannel(0)))
    assert same(model.weight, hf.fake_quantize(weight, scale, dtype=torch.int4, granularity=hf.PerChannel(0)))


def test_a_scale_without_a_floor_is_converted_to_a_buffer() -> None:
    learned = hf.qat.Quantizer(dtype=torch.int4, mode="learned", granularity=hf.PerChannel(0), positive=False)
    model = hf.qat.prepare(nn.Linear(8, 4), hf.qat.Config(weight=learned)).eval()
    x = torch.randn(2, 8, requires_grad=True)
    prepared = model(x)
    converted = hf.qat.convert(model)(x)  # with gradients enabled
    converted.sum().backward()
    assert converted.equal(prepared) and x.grad is not None
    assert not any(buffer.requires_grad for buffer in model.buffers())


@pytest.mark.parametrize("mode", [{"mode": "ema"}, {"mode": "learned", "positive": False}])
def test_training_does_not_change_codes_that_were_read(mode: dict[str, Any]) -> None:
    model = hf.qat.prepare(nn.Linear(8, 4), hf.qat.Config(weight=hf.qat.Quantizer(**mode)))
    x = torch.randn(2, 8)
    model(x).sum().backward()
    read = hf.qat.quantized_weights(model)["weight"]
    values = read.dequantize()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model(x)
    assert read.dequantize().equal(values) and not model.weight.equal(values)


def test_memory_drops() -> None:
    model = nn.Linear(256, 256, bias=False)

    def stored() -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())

    hf.qat.convert(hf.qat.prepare(model, hf.qat.preset("w2a16")))
    assert stored() == 256 * 256 // 4 + 256 * 4 + len("int2 per_channel:0")
    assert [parameter.dtype for parameter in model.parameters()] == [torch.uint8]


@pytest.mark.parametrize("weight", ["int4 per group, learned", "float8", "uint4 with zero points"])
def test_a_converted_state_loads_strictly(weight: str, tmp_path: Path) -> None:
    safetensors = importlib.import_module("safetensors.torch")
    config = config_of(WEIGHTS[weight], activation=hf.qat.Quantizer(mode="ema", start_step=1))
    model, x = model_of("Linear")
    train(hf.qat.prepare(model, config), x)
    expected = hf.qat.convert(model.eval())(x)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = hf.qat.convert(hf.qat.prepare(model_of("Linear")[0], config), for_loading=True)
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"), strict=True)
    assert same(other(x), expected) and same_state(state(other), state(model))
    with torch.device("meta"):
        empty = hf.qat.convert(hf.qat.prepare(MODELS["Linear"][0](), config), for_loading=True)
    empty.load_state_dict(state(model), strict=True, assign=True)
    assert same(empty(x), expected)


def converted(dtype: torch.dtype, granularity: Any, *, for_loading: bool = False) -> nn.Module:
    torch.manual_seed(0)
    quantizer = hf.qat.Quantizer(dtype=dtype, granularity=granularity, symmetric=False)
    model = hf.qat.prepare(nn.Sequential(nn.Linear(32, 32)), hf.qat.Config(weight=quantizer))
    return hf.qat.convert(model, for_loading=for_loading)


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        ((torch.uint4, hf.PerChannel(0)), (torch.int4, hf.PerChannel(0))),
        ((torch.int8, hf.PerChannel(0)), (torch.uint8, hf.PerChannel(0))),
        ((torch.int8, hf.PerChannel(0)), (torch.int8, hf.PerChannel(1))),
    ],
)
def test_codes_of_another_layout_are_refused(saved: Any, loading: Any) -> None:
    """All tensors of the state have the dtypes and the shapes that the other model wants, or can be cast."""
    model = converted(*loading, for_loading=True)
    (name, split), (own, own_split) = ((str(dtype)[6:], split.name) for dtype, split in (saved, loading))
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(converted(*saved).state_dict())
    assert (
        f"the codes of 0.weight in the state are {name} {split}; those of this model are {own} {own_split}. "
        "Convert a model with the config of the one that was saved."
    ) in str(raised.value)


def test_states_of_an_equal_layout_load() -> None:
    """-1 and 1 are one axis of a matrix. A state may lack the layout, and gets it when it is saved again."""
    state_dict, x = converted(torch.int4, hf.PerChannel(-1)).state_dict(), torch.randn(3, 32)
    expected = converted(torch.int4, hf.PerChannel(-1))(x)
    layout = "0.parametrizations.weight.0.layout"
    assert bytes(state_dict[layout].tolist()) == b"int4 per_channel:1"
    for given in (state_dict, {key: value for key, value in state_dict.items() if key != layout}):
        with torch.device("meta"):
            model = converted(torch.int4, hf.PerChannel(1), for_loading=True)
        model.to_empty(device="cpu").load_state_dict(given)
        assert same(model(x), expected)
        assert bytes(model.state_dict()[layout].tolist()) == b"int4 per_channel:1"


@pytest.mark.parametrize("codes", [torch.int4, torch.int2])
@pytest.mark.parametrize(("dimensions", "last"), [(2, torch.channels_last), (3, torch.channels_last_3d)])
def test_packed_codes_keep_channels_last(codes: torch.dtype, dimensions: int, last: Any) -> None:
    kind = nn.Conv2d if dimensions == 2 else nn.Conv3d
    config = config_of({"dtype": codes, "granularity": hf.PerChannel(0)})
    for kernel in ((3,) * dimensions, (1,) * (dimensions - 1) + (4,)):
        torch.manual_seed(0)
        model = kind(8, 16, kernel).to(memory_format=last)
        x = torch.randn(2, 8, *[5] * dimensions).to(memory_format=last)
        expected = evaluated(hf.qat.prepare(model, config), x)
        strides = model.weight.stride()
        hf.qat.convert(model)
        assert model.weight.stride() == strides and same(evaluated(model, x), expected)
        model.to(memory_format=torch.contiguous_format)
        assert model.weight.is_contiguous() and same(model.weight, model.to(memory_format=last).weight)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert same(evaluated(compiled, x), expected)


@pytest.mark.parametrize(("codes", "columns"), [(torch.int4, 64), (torch.int2, 64), (torch.int2, 4)])
def test_packed_codes_keep_the_strides_of_a_transposed_weight(codes: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(columns, 32), torch.randn(1, columns)
    model.weight = nn.Parameter(torch.randn(columns, 32).t())
    expected = evaluated(hf.qat.prepare(model, config_of({"dtype": codes})), x)
    hf.qat.convert(model)
    assert model.weight.stride() == (1, 32)
    assert same(evaluated(model, x), expected) and same(evaluated(copy.deepcopy(model), x), expected)


@pytest.mark.parametrize("codes", [torch.int8, torch.int4])
def test_an_average_that_is_loaded_keeps_channels_last(codes: torch.dtype) -> None:
    config = config_of({"dtype": codes, "granularity": hf.PerChannel(0), "mode": "ema"})
    model = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    empty = hf.qat.convert(hf.qat.prepare(copy.deepcopy(model), config), for_loading=True)
    assert empty.weight.is_contiguous(memory_format=torch.channels_last)
    hf.qat.prepare(model, config)(torch.ones(1, 8, 4, 4))
    hf.qat.convert(model.eval())
    empty.load_state_dict(model.state_dict())
    assert empty.weight.stride() == model.weight.stride() and same(empty.weight, model.weight)


def test_codes_whose_groups_would_share_a_byte_are_not_packed() -> None:
    config = config_of({"dtype": torch.int2, "granularity": hf.PerGroup(2), "mode": "learned"})
    model, x = nn.Linear(8, 6), torch.randn(5, 8)
    expected = evaluated(hf.qat.prepare(model, config), x)
    hf.qat.convert(model)
    assert model.state_dict()["parametrizations.weight.original"].shape == (6, 8)
    assert same(evaluated(model, x), expected)


@pytest.mark.parametrize(
    "weight",
    [
        {"granularity": hf.PerChannel(0)},
        {"mode": "fixed", "symmetric": False, "scale": 0.1},
        {"mode": "fixed", "scale": 0.1, "zero_point": 3},
        {"mode": "ema", "symmetric": False},
    ],
)
def test_a_model_on_the_meta_device_loads_a_float64_state(weight: dict[str, Any]) -> None:
    config = config_of(weight)
    model, x = model_of("Linear", torch.float64)
    train(hf.qat.prepare(model, config), x)
    expected = hf.qat.convert(model.eval())(x)
    with torch.device("meta"):
        empty = MODELS["Linear"][0]().to(torch.float64)
    hf.qat.convert(hf.qat.prepare(empty, config), for_loading=True).to_empty(device="cpu")
    empty.load_state_dict(state(model), strict=True)
    assert same_state(state(empty), state(model)) and same(empty(x), expected)


def test_a_model_that_was_cast_to_float64_loads_a_float64_state() -> None:
    config = config_of({"granularity": hf.PerChannel(0)})
    model, x = model_of("Linear", torch.float64)
    expected = hf.qat.convert(hf.qat.prepare(model, config))(x)
    other = hf.qat.convert(hf.qat.prepare(model_of("Linear")[0], config), for_loading=True).double()
    other.load_state_dict(state(model))
    assert same(other(x), expected) and same_state(state(other), state(model))


@pytest.mark.parametrize("together", [True, False])
def test_a_copy_of_a_parametrized_layer_is_prepared_alone(together: bool) -> None:
    """torch gives all copies of a parametrized layer one class, with a property for each such tensor."""
    first = hf.qat.prepare(Experts(), {"": hf.qat.Config(weight=ROWS, parameters=("up",))})
    model, x = nn.ModuleList([first, copy.deepcopy(first)]), torch.randn(5, 4)
    expected = hf.qat.prepare(Experts(), {"": hf.qat.Config(weight=ROWS, parameters=("up", "down"))})
    expected.up, expected.down = first.parametrizations.up.original.detach(), first.down.detach()
    plain = first(x)
    hf.qat.prepare(model if together else first, {Experts: hf.qat.Config(weight=ROWS, parameters=("down",))})
    assert same(model[0](x), expected(x)) and same(model[1](x), expected(x) if together else plain)


def test_training_resumes_with_equal_bits() -> None:
    config = hf.qat.Config(
        weight=hf.qat.Quantizer(dtype=torch.int4, granularity=hf.PerGroup(2), mode="learned"),
        activation=hf.qat.Quantizer(mode="learned", symmetric=False, start_step=2),
    )

    def trained(model: nn.Module, optimizer: Any, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            model(x * (step + 1)).square().mean().backward()
            optimizer.step()

    model, x = model_of("Linear")
    hf.qat.prepare(model, config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trained(model, optimizer, 3)
    saved, saved_optimizer = state(model), copy.deepcopy(optimizer.state_dict())
    trained(model, optimizer, 3)
    torch.manual_seed(7)
    other = hf.qat.prepare(MODELS["Linear"][0](), config)
    other.load_state_dict(saved)
    resumed = torch.optim.Adam(other.parameters(), lr=1e-2)
    resumed.load_state_dict(saved_optimizer)
    trained(other, resumed, 3)
    assert same_state(state(other), state(model)) and not same_state(saved, state(model))


class Tied(nn.Module):
    """A head that has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.embed(x)))


@pytest.mark.parametrize("converted", [False, True])
def test_safetensors_saves_and_loads_a_model_with_tied_weights(converted: bool, tmp_path: Path) -> None:
    safetensors = importlib.import_module("safetensors.torch")
    config = config_of(WEIGHTS["uint4 with zero points"], activation=hf.qat.Quantizer(mode="ema"))
    model, other = (hf.qat.prepare(Tied(), config) for _ in range(2))
    x = torch.tensor([1, 2, 9])
    train(model, x)
    expected = evaluated(model.eval(), x)
    if converted:
        hf.qat.convert(model)
        hf.qat.convert(other, for_loading=True)
    safetensors.save_model(model, tmp_path / "model.safetensors")
    assert safetensors.load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert same(evaluated(other.eval(), x), expected)


@pytest.mark.parametrize("weight", ["int4 per group, learned", "uint4 with zero points"])
def test_tied_weights_stay_tied(weight: str) -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.tensor([1, 2, 9])
    hf.qat.prepare(model, config_of(WEIGHTS[weight], activation=hf.qat.Quantizer(mode="dynamic")))
    train(model, x)

    def is_tied(model: nn.Module) -> bool:
        one, other = (getattr(model, name).parametrizations.weight for name in ("embed", "head"))
        return one.original is other.original and one[0] is other[0]

    assert is_tied(model) and is_tied(copy.deepcopy(model))
    assert hf.qat.quantized_weights(model).keys() == {"embed.weight", "head.weight"}
    prepared = evaluated(model, x)
    hf.qat.convert(model)
    assert is_tied(model) and is_tied(copy.deepcopy(model).to(torch.float64).float())
    assert same(model(x), prepared) and same(copy.deepcopy(model)(x), prepared)


def test_casts_change_the_weight_and_not_the_codes() -> None:
    model, x = model_of("Linear")
    hf.qat.prepare(model, config_of({"dtype": E4M3, "granularity": hf.PerChannel(0)}))
    hf.qat.convert(model)
    before = state(model)
    assert model.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert same_state(
        {k: v for k, v in state(model).items() if "bias" not in k},
        {k: v for k, v in before.items() if "bias" not in k},
    )


def test_a_prepared_model_is_still_the_users_model() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    torch.manual_seed(0)
    model, calls = nn.Sequential(Doubled(4, 4), nn.Linear(4, 2)), []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    names = [name for name, _ in model.named_parameters()]
    hf.qat.prepare(model, hf.qat.preset("w8a8"))
    assert isinstance(model[0], Doubled) and isinstance(model[1], nn.Linear)
    x = torch.randn(3, 4)
    y = model(x)
    assert calls == ["hook"]
    hidden = 2 * nn.functional.linear(model[0].eval().input_quantizer(x), model[0].weight, model[0].bias)
    assert same(y, model[1].eval()(hidden))
    assert [
        name.replace("parametrizations.", "").replace(".original", "")
        for name in state(model)
        if "quantize" not in name
    ] == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert len(list(model.parameters())) == len(names)
    copied = copy.deepcopy(model)
    train(copied.train(), x)
    assert same(model.eval()(x), y) and not same(copied.eval()(x), y)


@pytest.mark.parametrize("mode", ["batch", "ema", "learned"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_is_copied_after_a_step(kind: Any, mode: str) -> None:
    torch.manual_seed(0)
    model, x = kind(4, 4, 2, bidirectional=True), torch.randn(3, 2, 4)
    names = tuple(name for name, _ in model.named_parameters() if "weight" in name)
    weight = hf.qat.Quantizer(dtype=torch.int4, granularity=hf.PerChannel(0), mode=mode)
    hf.qat.prepare(model, hf.qat.Config(weight=weight, parameters=names))
    model(x)[0].sum().backward()
    copied = copy.deepcopy(copy.deepcopy(model))
    if mode != "ema":  # a cast reads the weights, which a moving average counts
        copied = copy.deepcopy(copied.double().float())
    assert same_state(state(copied), state(model))
    for layer in (model, copied):
        layer.zero_grad()
        layer(x)[0].square().sum().backward()
    assert same_state(state(copied), state(model))
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert same(ours.grad, theirs.grad)
    with torch.no_grad():
        expected, _ = model.eval()(x)
        assert same(copied.eval()(x)[0], expected)
        assert same(copy.deepcopy(hf.qat.convert(copied))(x)[0], expected)


def test_a_parametrization_after_the_quantizer_is_refused() -> None:
    model = hf.qat.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), hf.qat.preset("w4a16"))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh(), unsafe=True)
    for call in (hf.qat.convert, hf.qat.quantized_weights, hf.qat.report):
        with pytest.raises(hf.InvalidArgs, match=r"0\.weight has .* Tanh after its quantizer"):
            call(model)
    del model[0].parametrizations.weight[-1]
    assert list(hf.qat.quantized_weights(model)) == ["0.weight", "1.weight"]


def test_a_weight_whose_quantizer_is_switched_off_is_not_converted() -> None:
    """It would compute with the codes afterwards, and does not before."""
    model, x = model_of("Linear")
    train(hf.qat.prepare(model, hf.qat.preset("w8a8")), x)
    quantizers = [module for module in model.modules() if isinstance(module, hf.nn.FakeQuantize)]
    for quantizer in quantizers:
        quantizer.disable_fake_quant()
    before = state(model)
    with pytest.raises(hf.InvalidArgs, match=r"the quantizer of 0\.weight is switched off"):
        hf.qat.convert(model)
    assert same_state(state(model), before)
    for quantizer in quantizers:
        quantizer.enable_fake_quant()
    expected = evaluated(model, x)
    assert same(evaluated(hf.qat.convert(model), x), expected)


def test_the_count_of_steps_starts_at_zero_in_a_model_from_the_meta_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of({"start_step": 2}, activation=hf.qat.Quantizer(mode="ema", start_step=3))
    with torch.device("meta"):
        model = hf.qat.prepare(MODELS["Linear"][0](), config)
    monkeypatch.setattr(torch, "empty_like", lambda like, **options: torch.ones_like(like, **options))
    model.to_empty(device="cpu")
    counts = [count for name, count in model.named_buffers() if name.endswith("steps")]
    assert len(counts) == 4 and not any(counts)


def test_the_input_of_a_layer_without_parameters_is_quantized() -> None:
    layer, weight = nn.Linear(4, 4, bias=False), torch.randn(4, 4)
    del layer.weight
    layer.register_buffer("weight", weight)
    x = torch.randn(2, 4)
    hf.qat.prepare(layer, hf.qat.Config(activation=hf.qat.Quantizer(mode="dynamic")))
    assert same(layer(x), nn.functional.linear(hf.dynamic_fake_quantize(x, dtype=torch.int8), weight))


def test_an_average_of_models_is_evaluated_and_converted() -> None:
    model, x = model_of("Linear")
    hf.qat.prepare(model, hf.qat.preset("w8a8"))
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        train(model, x)
        average.update_parameters(model)
    expected = average.eval()(x)
    hf.qat.convert(average)
    assert same(average(x), expected)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["Linear", "Conv2d", "ConvTranspose2d"])
def test_an_average_of_models_with_inputs_per_channel_starts_before_the_first_batch(
    name: str, symmetric: bool
) -> None:
    model, x = model_of(name)
    per_channel = hf.qat.Quantizer(mode="ema", granularity=hf.PerChannel(1), symmetric=symmetric)
    hf.qat.prepare(model, hf.qat.Config(activation=per_channel))
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        train(model, x)
        average.update_parameters(model)
    expected = evaluated(average, x)
    hf.qat.convert(average)
    assert same(average(x), expected)


def test_the_first_batch_may_have_other_channels_than_expected() -> None:
    config = hf.qat.Config(activation=hf.qat.Quantizer(mode="ema", granularity=hf.PerChannel(1)))
    model, other = (hf.qat.prepare(nn.Linear(4, 2), config) for _ in range(2))
    quantizer = model.input_quantizer.fake_quantize
    assert quantizer.scale.shape == (4,)
    x = torch.randn(3, 5, 4)
    model(x)
    assert quantizer.scale.shape == (5,)
    with pytest.raises(hf.InvalidArgs, match=r"scales of shape \(4,\), and the state has \(5,\)"):
        model(torch.randn(3, 4))
    other.load_state_dict(model.state_dict())
    assert same(evaluated(other, x), evaluated(model, x))
    quantizer.reset_parameters()
    assert quantizer.scale.shape == (4,)
    model.train()(x[:, :3])
    assert quantizer.scale.shape == (3,)


def test_inputs_are_quantized_by_position_and_by_name() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    hf.qat.prepare(model, hf.qat.Config(activation=hf.qat.Quantizer(dtype=torch.int4, mode="dynamic")))
    expected = nn.functional.linear(hf.dynamic_fake_quantize(x, dtype=torch.int4), model.weight, model.bias)
    assert same(model(x), expected) and same(model(input=x), expected)
    assert hf.qat.quantized_weights(model) == {}


def test_inputs_of_a_subclass_are_quantized_by_its_own_names() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * factor

    class Wrapped(nn.Linear):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs)

    class Named(nn.Linear):
        def forward(self, *, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)

    torch.manual_seed(0)
    x = torch.randn(3, 4)
    for model, name in ((Scaled(4, 4), "x"), (Wrapped(4, 4), "input")):
        hf.qat.prepare(model, hf.qat.preset("w8a8-dynamic"))
        expected = nn.functional.linear(hf.dynamic_fake_quantize(x), model.weight, model.bias)
        assert same(model(x), expected) and same(model(**{name: x}), expected)
    named = hf.qat.prepare(Named(4, 4), hf.qat.preset("w8a8-dynamic"))
    assert same(named(x=x), nn.functional.linear(hf.dynamic_fake_quantize(x), named.weight, named.bias))


def test_options_of_a_subclass_of_attention_are_not_quantized() -> None:
    """A mask has -inf in it. An argument with a default is an option."""

    class SelfAttention(nn.MultiheadAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x, x, x, attn_mask=mask, need_weights=False)[0]

    class CrossAttention(nn.MultiheadAttention):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x, other, other, need_weights=False)[0]

    torch.manual_seed(0)
    x, mask = torch.randn(4, 8), torch.full((4, 4), -float("inf")).triu(1)
    config = hf.qat.Config(activation=hf.qat.Quantizer(dtype=torch.int4, mode="dynamic"))
    quantized = hf.dynamic_fake_quantize(x, dtype=torch.int4, granularity=hf.PerToken())
    layer = SelfAttention(8, 2)
    expected = layer(quantized, mask)
    hf.qat.prepare(layer, config)
    assert same(layer(x, mask), expected) and same(layer(x=x, mask=mask), expected)
    layer = CrossAttention(8, 2)
    expected = layer(quantized, quantized)
    hf.qat.prepare(layer, config)
    assert same(layer(x, x.clone()), expected) and same(layer(x, other=x), expected)


def test_an_input_may_be_none() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
            return self.table if x is None else x @ self.table

    config = hf.qat.Config(weight=ROWS, activation=hf.qat.Quantizer(), parameters=("table",))
    model = hf.qat.prepare(Optional(), config)
    assert same(model(None), model.table) and same(model(x=None), model.table)


@pytest.mark.parametrize("mode", ["ema", "learned"])
def test_a_functional_call_leaves_the_model_without_a_scale(mode: str) -> None:
    config, x = config_of({}, activation=hf.qat.Quantizer(mode=mode)), torch.randn(3, 4)
    model = hf.qat.prepare(nn.Linear(4, 4), config)
    tensors = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    assert torch.func.functional_call(model, tensors, (x,)).isfinite().all()
    with pytest.raises(hf.InvalidArgs, match="the input of the model has no scale"):
        hf.qat.convert(model)
    model.load_state_dict(tensors, strict=False)
    expected = evaluated(model.eval(), x)
    assert same(evaluated(hf.qat.convert(model), x), expected) and expected.isfinite().all()


def test_an_error_names_the_layer() -> None:
    """As for an expert that gets no tokens in training, and some in evaluation."""
    model = torch.nn.ModuleDict({"experts": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))})
    hf.qat.prepare(model, hf.qat.preset("w8a8"))
    first, second, third = model["experts"]
    first(torch.ones(2, 8))
    model.eval()
    first(torch.ones(2, 8))
    for call in (second, copy.deepcopy(third)):
        with pytest.raises(hf.InvalidArgs, match="has seen no training batch") as error:
            call(torch.ones(2, 8))
        name = "experts.1" if call is second else "experts.2"
        assert error.value.__notes__ == [f"This is the quantizer of the input of {name}."]


def test_attention_quantizes_a_tensor_that_is_given_thrice_once() -> None:
    model, x = model_of("MultiheadAttention")
    hf.qat.prepare(model, hf.qat.preset("w8a8"))
    seen = []
    model.attention.input_quantizer.register_forward_hook(lambda *_: seen.append(1))
    model(x)
    assert len(seen) == 1
    other, x = model_of("attention of other widths")
    hf.qat.prepare(other, hf.qat.preset("w8a8"))
    other.attention.input_quantizer.register_forward_hook(lambda *_: seen.append(1))
    other(x)
    assert len(seen) == 3


def test_activation_quantizers() -> None:
    model, x = model_of("Linear")
    static = hf.qat.Quantizer(mode="ema", symmetric=False, scale_dtype=torch.float16)
    hf.qat.prepare(model, {"0": hf.qat.Config(activation=static), "2": hf.qat.preset("w8a8-dynamic")})
    model(x)
    found = hf.qat.activation_quantizers(model)
    assert list(found) == ["0", "2"]
    scale, zero_point = found["0"].scale(), found["0"].zero_point()
    chosen, zero = hf.choose_scale(x, symmetric=False)
    assert scale is not None and same(scale, chosen.half()) and scale.shape == ()
    assert zero_point is not None and same(zero_point, zero)
    assert found["2"].mode == "batch" and found["2"].scale() is found["2"].zero_point() is None
    assert found["2"].granularity == hf.PerToken() and found["2"].format is hf.formats.INT8


def test_start_step_delays_quantization_in_training() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    float_output = model(x)
    delayed = hf.qat.Quantizer(mode="ema", start_step=2)
    hf.qat.prepare(model, hf.qat.Config(weight=delayed, activation=delayed))
    outputs = [model(x) for _ in range(3)]
    assert same(outputs[0], float_output) and same(outputs[1], float_output)
    assert not same(outputs[2], float_output) and same(model.eval()(x), outputs[2])
    assert same(hf.qat.convert(model.train())(x), outputs[2])


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", ["", "model", "checkpoint"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_start_step_under_activation_checkpointing(mode: str, reentrant: bool, compiled: str) -> None:
    torch._dynamo.reset()

    def delayed(calls: int) -> hf.qat.Quantizer:
        return hf.qat.Quantizer(dtype=torch.int2, mode=mode, start_step=calls)

    plain, _ = model_of("Linear")
    hf.qat.prepare(plain, hf.qat.Config(weight=delayed(3), activation=delayed(2)))
    other = copy.deepcopy(plain)
    called = torch.compile(other, fullgraph=True, backend="aot_eager") if compiled == "model" else other

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(checkpoint(called, x, use_reentrant=reentrant))

    if compiled == "checkpoint":
        checkpointed = torch.compile(checkpointed, backend="aot_eager")
    for step in range(5):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        gradients = []
        for model, run in ((plain, plain), (other, checkpointed)):
            model.zero_grad()
            first, second = run(x), run(x * 2)
            second.square().sum().backward()
            first.square().sum().backward()
            gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
            x.grad = None
        assert all(map(same, *gradients)), step
        assert same_state(state(other), state(plain)), step


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_forward_uses_the_scale_as_it_is_stored(stored: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 8)
    weight = model.weight.detach().clone()
    weight[3] = 0  # its scale, 1e-12, is below the range of float16
    model.weight.data.copy_(weight)
    rows = hf.PerChannel(0)
    hf.qat.prepare(model, config_of({"granularity": rows, "scale_dtype": stored}))
    chosen = hf.choose_scale(weight, granularity=rows)
    used = chosen.clamp_min(2**-24 if stored == torch.float16 else 0).to(stored)
    assert same(model.weight, hf.fake_quantize(weight, used.float(), granularity=rows))
    (tensor,) = hf.qat.quantized_weights(model).values()
    assert same(tensor.scale, used) and same(tensor.dequantize(), model.weight)


def test_a_module_with_two_names() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    hf.qat.prepare(model, hf.qat.preset("w4a8"))
    train(model, x)
    assert list(hf.qat.quantized_weights(model)) == ["0.weight", "2.weight"]
    prepared = evaluated(model, x)
    assert same(evaluated(hf.qat.convert(model), x), prepared) and model[0] is model[2]


def test_attention_compiles_whole() -> None:
    model, x = model_of("MultiheadAttention")
    hf.qat.prepare(model, hf.qat.preset("w8a8"))
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    scales = (m.attention.input_quantizer.scale() for m in (model, other))
    assert same(*scales)


@pytest.mark.parametrize("converted", [False, True])
def test_compiles_whole(converted: bool) -> None:
    model, x = model_of("Linear")
    config = config_of(WEIGHTS["int4 per group, learned"], activation=hf.qat.Quantizer(mode="ema"))
    hf.qat.prepare(model, config)
    if converted:
        train(model, x)
        hf.qat.convert(model)
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    if not converted:
        assert all(map(same, train(model, x), train(compiled, x)))
    assert same(compiled(x), model(x)) and same_state(state(other), state(model))


def test_exports() -> None:
    model, x = model_of("Linear")
    hf.qat.convert(hf.qat.prepare(model.eval(), hf.qat.preset("w4a16")))
    program = torch.export.export(model, (x,))
    assert same(program.module()(x), model(x))


def test_parametrize_caches_a_weight() -> None:
    model, x = model_of("Linear")
    hf.qat.prepare(model, hf.qat.preset("w4a16"))
    with parametrize.cached():
        assert model[0].weight is model[0].weight
        assert same(model(x), model(x))


def test_assigning_sets_the_float_weight() -> None:
    model = hf.qat.prepare(nn.Linear(4, 4), hf.qat.preset("w8a16"))
    model.weight = torch.eye(4)
    assert model.parametrizations.weight.original.equal(torch.eye(4))
    hf.qat.convert(model)
    with pytest.raises(hf.InvalidArgs, match="no other weight can be assigned to it"):
        model.weight = torch.zeros(4, 4)
    assert model.weight.count_nonzero() == 4


@pytest.mark.parametrize("dtype", [torch.int8, torch.int4])
@pytest.mark.parametrize("strict", [True, False])
def test_states_of_prepared_and_converted_models_are_not_mixed_up(dtype: torch.dtype, strict: bool) -> None:
    config = hf.qat.Config(weight=hf.qat.Quantizer(dtype=dtype, granularity=hf.PerChannel(0)))
    prepared, other = (hf.qat.prepare(nn.Sequential(nn.Linear(8, 4)), config) for _ in range(2))
    of_prepared = copy.deepcopy(prepared.state_dict())
    converted = hf.qat.convert(prepared)
    with pytest.raises(RuntimeError, match=r"0\.weight in the state is codes .*for_loading=True"):
        other.load_state_dict(converted.state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match=r"0\.weight in the state is a float weight.*conver"):
        converted.load_state_dict(of_prepared, strict=strict)
    for model, state in ((other, of_prepared), (converted, converted.state_dict())):
        copy.deepcopy(model).load_state_dict(state, strict=strict)
